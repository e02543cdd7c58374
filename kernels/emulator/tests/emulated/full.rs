//! The mask without causality, and the cascade that needs it: a prefix under the rows of all
//! sequences, what each has besides, merged.

use candle_core::DType;
use candle_paged_attn::ops::launch::{self, Element, Slot};
use candle_paged_attn::ops::{AttentionOptions, Mask, PageTable};

use crate::call::attention;
use crate::common::paged::{Batch, Dense, Setup, Shape};
use crate::common::sharing::{behind_one_prompt, build, rows_of};
use crate::matrix::rules;
use paged_attn_emulator::{Emulator, Expect, Job, Schedule, decode, encode_f32};

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Streamed and tiled, around the 128 pairs where that changes, with every rule.
#[test]
fn every_row_sees_every_key() {
    let mut emulator = Emulator::start();
    let mut case = 0;
    for (heads, kv_heads, dim) in [(2, 2, 64), (6, 2, 40), (19, 1, 128), (71, 1, 16)] {
        let group = heads / kv_heads;
        let edge = 128 / group;
        let seqs = [
            (0, 3),
            (5, 9),
            (40, 1),
            (300, edge.max(1)),
            (290, edge + 1),
            (600, 2),
        ];
        for dtype in TYPES {
            let mut setup = Setup::new(heads, kv_heads, dim, &seqs);
            (setup.q_dtype, setup.cache_dtype) = (dtype, dtype);
            setup.block_size = [16, 1, 64][case % 3];
            setup.seed = case as u64;
            let batch = setup.build();
            let slopes: Vec<f32> = (0..heads).map(|h| 0.01 + 0.037 * h as f32).collect();
            for options in [
                rules(&batch, case),
                batch.options().with_alibi_slopes(slopes),
            ] {
                let options = options.with_mask(Mask::Full);
                let state = options.sinks.is_none();
                let what = format!("{dtype:?}, {heads}/{kv_heads} x {dim}, {options:?}");
                let job = attention(&batch, &options, state, None);
                emulator.check(&job, Schedule::of(case), &what);
                case += 1;
            }
        }
    }
}

/// Many chunks, each of 512 keys, under more pairs than a block takes.
#[test]
fn a_long_prefix_under_many_rows() {
    let mut emulator = Emulator::start();
    for (case, dtype) in TYPES.into_iter().enumerate() {
        let mut setup = Setup::new(4, 1, 64, &[(9000, 16)]);
        (setup.q_dtype, setup.cache_dtype) = (dtype, dtype);
        let batch = setup.build();
        let options = batch.options().with_mask(Mask::Full);
        let job = attention(&batch, &options, true, None);
        assert_eq!(job.plan.launches.len(), 2, "streamed and reduced");
        emulator.check(&job, Schedule::of(case), &format!("{dtype:?} long"));
    }
}

/// No context is as long: as without a window.
#[test]
fn a_window_past_the_range_of_the_kernels_shows_everything() {
    let mut emulator = Emulator::start();
    let batch = Setup::new(4, 2, 64, &[(300, 1), (70, 40)]).build();
    for window in [1 << 31, (1 << 31) - 1, u32::MAX as usize] {
        let options = batch.options().with_window(window);
        let job = attention(&batch, &options, true, None);
        emulator.check(&job, Schedule::of(1), &format!("window {window}"));
    }
}

/// A part of a batch: the same cache and rows, another table and other keys.
fn part(batch: &Batch, table: PageTable, seqs: Vec<Dense>) -> Batch {
    Batch {
        setup: batch.setup.clone(),
        q: batch.q.clone(),
        k_cache: batch.k_cache.clone(),
        v_cache: batch.v_cache.clone(),
        seqs,
        table,
    }
}

/// Keys `from..` or `..from` of a sequence.
fn keys(batch: &Batch, seq: &Dense, range: std::ops::Range<usize>) -> (Vec<f64>, Vec<f64>) {
    let d = batch.setup.dims;
    let of = |x: &[f64], row: usize| x[range.start * row..range.end * row].to_vec();
    let (k, v) = (d.kv_heads * d.k_dim, d.kv_heads * d.v_dim);
    (of(&seq.k, k), of(&seq.v, v))
}

/// The prefix of all sequences, and what each sees besides.
fn parts(batch: &Batch, blocks: usize) -> (Batch, Batch) {
    let block_size = batch.setup.block_size;
    let prefix = blocks * block_size;
    let mut own = PageTable::new(block_size).unwrap();
    let mut rests = Vec::new();
    for (i, seq) in batch.seqs.iter().enumerate() {
        let Shape { len, rows } = seq.shape;
        let slots = vec![-1; rows];
        own.push(&batch.table.pages(i).0[blocks..], 0, len - prefix, &slots)
            .unwrap();
        let (k, v) = keys(batch, seq, prefix..len);
        let shape = Shape {
            len: len - prefix,
            rows,
        };
        let q = seq.q.clone();
        rests.push(Dense { shape, q, k, v });
    }
    let rows = batch.table.num_rows();
    let mut shared = PageTable::new(block_size).unwrap();
    let pages = &batch.table.pages(0).0[..blocks];
    shared.push(pages, 0, prefix, &vec![-1; rows]).unwrap();
    let (k, v) = keys(batch, &batch.seqs[0], 0..prefix);
    let q = batch.seqs.iter().flat_map(|seq| seq.q.clone()).collect();
    let shape = Shape { len: prefix, rows };
    let all = Dense { shape, q, k, v };
    (part(batch, shared, vec![all]), part(batch, own, rests))
}

/// Out and lse of a checked state.
fn state(emulator: &mut Emulator, job: &Job, what: &str) -> (Vec<u8>, Vec<f64>) {
    let mut out = emulator.check(job, Schedule::of(3), what).remove(0).1;
    let lse = out.split_off(job.expect[1].start);
    (out, decode(&lse, Element::F32))
}

#[test]
fn a_cascade_of_three_calls_is_the_attention_of_one() {
    let mut emulator = Emulator::start();
    let lens = [161, 190, 160, 440, 163];
    for (heads, kv_heads, k_dim, v_dim) in [(6, 2, 64, 64), (32, 1, 128, 64), (4, 4, 40, 40)] {
        for dtype in TYPES {
            let mut setup = Setup::new(heads, kv_heads, k_dim, &[]);
            setup.dims.v_dim = v_dim;
            (setup.q_dtype, setup.cache_dtype) = (dtype, dtype);
            let batch = build(&setup, &behind_one_prompt(&lens, 9));
            let slopes: Vec<f32> = (0..heads).map(|h| 0.01 + 0.037 * h as f32).collect();
            for options in [
                batch.options(),
                batch.options().with_softcap(4.0).with_alibi_slopes(slopes),
            ] {
                let what = format!("{dtype:?}, {heads}/{kv_heads} x {k_dim}/{v_dim}");
                cascade(&mut emulator, &batch, &options, &what);
            }
        }
    }
}

fn cascade(emulator: &mut Emulator, batch: &Batch, options: &AttentionOptions, what: &str) {
    let (shared, own) = parts(batch, 9);
    let full = options.clone().with_mask(Mask::Full);
    let job = attention(&shared, &full, true, None);
    let (a_out, mut a_lse) = state(emulator, &job, &format!("{what}, prefix"));
    let job = attention(&own, options, true, None);
    let (b_out, b_lse) = state(emulator, &job, &format!("{what}, own"));

    let heads = batch.setup.dims.heads;
    let rows = batch.table.num_rows();
    if let Some(slopes) = &options.alibi_slopes {
        // In the table of the prefix the rows are its last tokens.
        for (seq, dense) in batch.seqs.iter().enumerate() {
            for row in rows_of(&batch.table, seq) {
                let there = (9 * 16 - rows + row) as f64;
                let later = dense.shape.len as f64 - 1.0 - there;
                for head in 0..heads {
                    a_lse[row * heads + head] -= f64::from(slopes[head]) * later;
                }
            }
        }
    }
    let narrow = |x: &[f64]| encode_f32(&x.iter().map(|&x| x as f32).collect::<Vec<_>>());
    let (pairs, dim) = (rows * heads, batch.setup.dims.v_dim);
    let want = batch.reference(options);
    let merge = Job {
        plan: launch::merge_states(pairs, dim),
        buffers: vec![
            (Slot::AOut, a_out),
            (Slot::ALse, narrow(&a_lse)),
            (Slot::BOut, b_out),
            (Slot::BLse, narrow(&b_lse)),
        ],
        outputs: vec![(Slot::Out, pairs * (dim + 1) * 4)],
        scratch: Vec::new(),
        expect: vec![Expect {
            slot: Slot::Out,
            start: 0,
            element: Element::F32,
            row_len: dim,
            tolerance: 1e-5,
            values: want.out,
            who: "the reference",
        }],
    };
    emulator.check(&merge, Schedule::of(6), &format!("{what}, merged"));
}
