//! The arrays as the executor of a GPU lays them out, through the kernels.

use candle_core::DType;
use candle_paged_attn::ops::launch::{self, Slot};
use candle_paged_attn::ops::resident::{Filled, Resident};

use crate::call::attention;
use crate::common::host::{Host, at};
use crate::common::paged::Setup;
use paged_attn_emulator::{Emulator, Job, Schedule};

/// Replaces the index arrays of a job by the resident ones.
fn with_resident(mut job: Job, filled: &Filled) -> Job {
    let launch::Batch { seqs, pages, .. } = filled.batch;
    for (slot, buffer) in &mut job.buffers {
        let words = match slot {
            Slot::Indptr | Slot::QueryOffsets => seqs + 1,
            Slot::Indices => pages,
            Slot::FirstPage | Slot::SeqLens => seqs,
            _ => continue,
        };
        *buffer = at::<u8>(filled, *slot, 4 * words);
    }
    job
}

/// What a graph repeats are the launches of its capture; the arrays at their addresses are those of
/// the step at hand.
#[test]
fn captured_launches_are_right_for_every_step_of_the_same_placement() {
    let mut emulator = Emulator::start();
    for dtype in [DType::F32, DType::F16] {
        let (host, mut resident) = (Host::default(), Resident::<Host>::default());
        let mut captured = None;
        // 59 to 61 pages: the capacity is 64.
        for (case, grown) in [0, 1, 20].into_iter().enumerate() {
            let seqs = [(600 + grown, 1), (280 + grown, 1), (1 + grown, 1)];
            let mut setup = Setup::new(6, 2, 64, &seqs);
            (setup.q_dtype, setup.cache_dtype) = (dtype, dtype);
            setup.seed = case as u64;
            let batch = setup.build();
            let filled = resident.fill(&host, &batch.table).unwrap();
            let job = attention(&batch, &batch.options(), false, Some(filled.batch));
            let mut job = with_resident(job, &filled);
            resident.workspace(&host, job.plan.workspace).unwrap();
            let placement = resident.placement(&host, &filled);
            let (plan, at) = captured.get_or_insert_with(|| (job.plan.clone(), placement.clone()));
            assert_eq!(*at, placement, "step {case}");
            job.plan = plan.clone();
            emulator.check(&job, Schedule::of(case), &format!("{dtype:?}, step {case}"));
        }
    }
}

#[test]
fn padded_arrays_and_grids_give_the_same_answers() {
    let mut emulator = Emulator::start();
    // The first batch has the most of everything; the others lie in its buffer.
    let batches: [&[(usize, usize)]; 3] = [
        &[(600, 30), (3, 1), (0, 1), (290, 1), (17, 1)],
        &[(300, 1), (40, 1), (70, 3)],
        &[(33, 1)],
    ];
    for dtype in [DType::F32, DType::F16] {
        let (host, mut resident) = (Host::default(), Resident::<Host>::default());
        for (case, seqs) in batches.into_iter().enumerate() {
            let mut setup = Setup::new(6, 2, 64, seqs);
            (setup.q_dtype, setup.cache_dtype) = (dtype, dtype);
            let batch = setup.build();
            let filled = resident.fill(&host, &batch.table).unwrap();
            for state in [false, true] {
                let job = attention(&batch, &batch.options(), state, Some(filled.batch));
                let job = with_resident(job, &filled);
                let what = format!("{dtype:?}, batch {case}");
                emulator.check(&job, Schedule::of(case), &what);
            }
        }
        assert_eq!(host.allocations.get(), 1);
    }
}
