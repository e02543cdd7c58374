//! Shapes small enough for the thread sanitizer and for the PTX interpreter: every kernel once,
//! under several schedules.

use std::collections::BTreeSet;

use candle_core::DType;
use candle_paged_attn::ops::Mask;
use candle_paged_attn::ops::launch::kernels;

use crate::call::attention;
use crate::common::paged::{Batch, Setup};
use crate::moves;
use paged_attn_emulator::{Emulator, Job, Schedule};

/// A batch that leaves block 0, which a forgotten predicate would read, to the poison.
fn place(setup: &Setup) -> Batch {
    let seqs = setup.build().seqs;
    (0..)
        .map(|seed| Batch::place(setup, seqs.clone(), seed))
        .find(|batch| !batch.table.indices().contains(&0))
        .unwrap()
}

/// Jobs that together launch every kernel, each with a name.
fn jobs() -> Vec<(String, Job)> {
    let mut jobs = moves::small();
    for cache in [DType::F32, DType::F16, DType::BF16] {
        for dim in [64, 128, 256, 512] {
            // A split context of more than 400 tokens for the dimension that planted faults use.
            let long = if dim == 64 { 450 } else { 270 };
            let mut setup = Setup::new(4, 1, dim, &[(long, 1), (5, 1)]);
            (setup.q_dtype, setup.cache_dtype) = (cache, cache);
            if dim == 64 {
                // All rules, two KV heads, streamed and tiled.
                let mut setup = Setup::new(4, 2, dim, &[(300, 1), (40, 30)]);
                (setup.q_dtype, setup.cache_dtype) = (cache, cache);
                let batch = place(&setup);
                let options = batch
                    .options()
                    .with_window(19)
                    .with_softcap(5.0)
                    .with_alibi_slopes(vec![0.05, 0.1, 0.2, 0.4])
                    .with_sinks(vec![1.0, 2.0, 0.0, -1.0]);
                let job = attention(&batch, &options, false, None);
                jobs.push((format!("rules_{cache:?}_{dim}"), job));
            }
            if dim == 64 {
                jobs.extend(without_causality(cache));
            }
            jobs.push((format!("decode_{cache:?}_{dim}"), call(&setup, false)));
            if cache != DType::F32 && dim <= 256 {
                setup.dims.heads = 19;
                jobs.push((format!("wide_{cache:?}_{dim}"), call(&setup, false)));
            }

            // Prompts on tensor cores are the longest; one head is enough.
            let prompts: &[_] = if dim <= 128 {
                &[(115, 70), (20, 1)]
            } else {
                &[(75, 17)]
            };
            let mut setup = Setup::new(1, 1, dim, prompts);
            (setup.q_dtype, setup.cache_dtype) = (cache, cache);
            jobs.push((format!("prefill_{cache:?}_{dim}"), call(&setup, false)));
            if cache != DType::F32 && dim <= 256 {
                // f32 out of 16-bit queries: the exact path.
                setup.seqs.truncate(1);
                setup.seqs[0].rows = 17;
                jobs.push((format!("state_{cache:?}_{dim}"), call(&setup, true)));
                // f32 queries over a 16-bit cache: the same cache without tensor cores.
                setup.q_dtype = DType::F32;
                setup.seqs[0].rows = 1;
                jobs.push((format!("decode_f32_{cache:?}_{dim}"), call(&setup, true)));
            }
        }
    }
    jobs
}

/// Two tiles of pairs that are streamed in two chunks, and two that are not.
fn without_causality(cache: DType) -> [(String, Job); 2] {
    [("streamed", (300, 20)), ("tiled", (40, 65))].map(|(name, shape)| {
        let mut setup = Setup::new(4, 2, 64, &[shape]);
        (setup.q_dtype, setup.cache_dtype) = (cache, cache);
        let batch = place(&setup);
        let options = batch.options().with_mask(Mask::Full);
        let options = options.with_alibi_slopes(vec![0.05, 0.1, 0.2, 0.4]);
        let job = attention(&batch, &options, true, None);
        (format!("full_{name}_{cache:?}_64"), job)
    })
}

fn call(setup: &Setup, state: bool) -> Job {
    let batch = place(setup);
    attention(&batch, &batch.options(), state, None)
}

/// Those of [`jobs`] that the few kernels serve which `scripts/kernels_planted.py` compiles.
fn few(name: &str) -> bool {
    !name.contains("BF16")
        && (name.contains("_64")
            || (name.contains("write") || name.contains("copy") || name.contains("merge")))
        && !name.contains("_128")
        && !name.contains("_256")
}

/// The kernels that planted faults go into, under every schedule.
#[test]
fn planted_faults_have_nowhere_to_hide() {
    let mut emulator = Emulator::start();
    for (name, job) in jobs().iter().filter(|(name, _)| few(name)) {
        for schedule in Schedule::all() {
            emulator.check(job, schedule, name);
        }
    }
}

/// Every job once, recorded for the PTX interpreter; short enough for the thread sanitizer.
#[test]
fn every_kernel_once() {
    let jobs = jobs();
    for (name, job) in &jobs {
        job.record(name);
    }
    let mut emulator = Emulator::start();
    for (case, (name, job)) in jobs.iter().enumerate() {
        emulator.check(job, Schedule::of(case), name);
    }
}

#[test]
fn same_bits_under_every_schedule() {
    let mut emulator = Emulator::start();
    for (case, (name, job)) in jobs().iter().enumerate() {
        let mut first = None;
        for schedule in [0, 5, 10].map(|i| Schedule::of(case + i)) {
            let results = emulator.check(job, schedule, name);
            let same = first.get_or_insert_with(|| results.clone()) == &results;
            assert!(same, "{name}: {schedule:?} changes bits");
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
