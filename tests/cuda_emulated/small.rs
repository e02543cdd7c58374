//! Shapes small enough for the thread sanitizer and for the PTX interpreter: every kernel once,
//! under every schedule.

use std::collections::BTreeSet;

use candle_core::DType;
use candle_paged_attn::ops::launch::kernels;

use crate::call::attention;
use crate::common::paged::Setup;
use crate::job::{Emulator, Job, Schedule};
use crate::moves;

/// Jobs that together launch every kernel, each with a name.
fn jobs() -> Vec<(String, Job)> {
    let types = [DType::F32, DType::F16, DType::BF16];
    let mut jobs = moves::small();
    for cache in types {
        for dim in [64, 128, 256, 512] {
            for (what, seqs) in [
                ("decode", &[(270, 1), (5, 1)][..]),
                ("prefill", &[(75, 70), (20, 1)][..]),
            ] {
                // Prompts on tensor cores are the longest; one head is enough.
                let heads = if what == "decode" { 4 } else { 1 };
                let mut setup = Setup::new(heads, 1, dim, seqs);
                if what == "prefill" && dim > 128 {
                    setup.seqs.truncate(1);
                    setup.seqs[0].rows = 17;
                }
                (setup.q_dtype, setup.cache_dtype) = (cache, cache);
                let batch = setup.build();
                let job = attention(&batch, &batch.options(), false, None);
                jobs.push((format!("{what}_{cache:?}_{dim}"), job));
                if cache != DType::F32 && dim <= 256 {
                    // f32 queries over a 16-bit cache: the same cache without tensor cores.
                    setup.q_dtype = DType::F32;
                    setup.seqs.truncate(1);
                    setup.seqs[0].rows = 1;
                    let batch = setup.build();
                    let job = attention(&batch, &batch.options(), true, None);
                    jobs.push((format!("{what}_f32_{cache:?}_{dim}"), job));
                }
            }
        }
    }
    jobs
}

#[test]
fn small_shapes() {
    let Some(mut emulator) = Emulator::start() else {
        return;
    };
    let thorough = std::env::var("CANDLE_PAGED_ATTN_SCHEDULES").is_ok();
    for (case, (name, job)) in jobs().iter().enumerate() {
        job.record(name);
        let some = [0, 5, 10].map(|i| Schedule::of(case + i));
        let schedules = if thorough {
            Schedule::all().collect()
        } else {
            some.to_vec()
        };
        let mut first = None;
        for schedule in schedules {
            let results = emulator.check(job, schedule, name);
            // Same bits whatever the schedule.
            let results = first.get_or_insert_with(|| results.clone()) == &results;
            assert!(results, "{name}: {schedule:?} changes bits");
        }
    }
}

#[test]
fn small_shapes_launch_every_kernel() {
    let launched: BTreeSet<String> = jobs()
        .iter()
        .flat_map(|(_, job)| &job.plan.launches)
        .map(|launch| launch.kernel.clone())
        .collect();
    assert_eq!(launched, kernels().into_iter().collect());
}
