//! Where faults hide: edges of tiles, chunks and windows, needles, strides, capacity.

use candle_core::DType;
use candle_paged_attn::ops::launch::{self, Arg, CacheView, Slot};

use crate::call::{attention, bytes, cache_view, capacity, rows_view, scores};
use crate::common::paged::{Batch, Setup, tensor};
use paged_attn_emulator::{Emulator, Job, Schedule, encode_i64, encode_u32};

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn of(dtype: DType, heads: usize, kv_heads: usize, dim: usize, seqs: &[(usize, usize)]) -> Setup {
    let mut setup = Setup::new(heads, kv_heads, dim, seqs);
    (setup.q_dtype, setup.cache_dtype) = (dtype, dtype);
    setup
}

/// Lengths 0 to 600 around every edge of a page, a tile and a chunk, in one batch.
#[test]
fn lengths_around_every_edge() {
    let mut emulator = Emulator::start();
    let lengths = [
        0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 319, 320, 321,
        511, 512, 513, 600,
    ];
    let seqs: Vec<_> = lengths.iter().map(|&len| (len, 1)).collect();
    for (case, dtype) in TYPES.into_iter().enumerate() {
        let batch = of(dtype, 4, 1, 64, &seqs).build();
        for state in [false, true] {
            let job = attention(&batch, &batch.options(), state, None);
            emulator.check(&job, Schedule::of(case + 5), &format!("{dtype:?} decode"));
        }
    }
}

#[test]
fn prompts_around_every_edge() {
    let mut emulator = Emulator::start();
    let seqs = [
        (17, 17),
        (64, 64),
        (65, 65),
        (128, 128),
        (129, 129),
        (200, 31),
        (150, 130),
    ];
    for (case, dtype) in TYPES.into_iter().enumerate() {
        let batch = of(dtype, 2, 2, 64, &seqs).build();
        for state in [false, true] {
            let job = attention(&batch, &batch.options(), state, None);
            emulator.check(&job, Schedule::of(case + 2), &format!("{dtype:?} prompts"));
        }
    }
}

/// Chunks of 512 keys, and many of them.
#[test]
fn long_contexts_in_many_chunks() {
    let mut emulator = Emulator::start();
    for (case, dtype) in TYPES.into_iter().enumerate() {
        let batch = of(
            dtype,
            4,
            2,
            64,
            &[(4095, 1), (9000, 1), (700, 4), (8192, 2)],
        )
        .build();
        let job = attention(&batch, &batch.options(), case == 0, None);
        emulator.check(&job, Schedule::of(case), &format!("{dtype:?} long"));
    }
}

/// More chunks than `reduce` takes at a time: its warps use their memory a second time.
#[test]
fn a_context_of_more_chunks_than_a_block_has_threads() {
    let mut emulator = Emulator::start();
    let batch = of(DType::F16, 2, 2, 16, &[(70_000, 1)]).build();
    for case in 0..4 {
        let job = attention(&batch, &batch.options(), true, None);
        emulator.check(&job, Schedule::of(case), "70,000 tokens");
    }
}

#[test]
fn windows_at_the_edges_of_tiles_and_chunks() {
    let mut emulator = Emulator::start();
    for (case, window) in [1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 513]
        .into_iter()
        .enumerate()
    {
        let mut setup = of(TYPES[case % 3], 2, 1, 64, &[(600, 1), (590, 3), (300, 70)]);
        setup.release_behind = Some(window);
        setup.block_size = [16, 4, 1][case / 3 % 3];
        let batch = setup.build();
        let options = batch.options().with_window(window);
        let job = attention(&batch, &options, case % 2 == 0, None);
        emulator.check(&job, Schedule::of(case), &format!("window {window}"));
    }
}

/// One key with nearly all of the weight, at each place where an off-by-one would lose it, or
/// just outside, where it would be gained. Its value is unlike all others.
#[test]
fn needles_are_found_and_nothing_else() {
    let mut emulator = Emulator::start();
    let mut case = 0;
    for dtype in TYPES {
        for (len, rows) in [(300usize, 1), (300, 2), (140, 140), (300, 40)] {
            let window = 130;
            let mut places = vec![0, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, len - 1];
            places.extend([
                len - 130,
                len - 131,
                len - rows,
                len.saturating_sub(rows + 1),
            ]);
            places.retain(|&p| p < len);
            for chunk in places.chunks(4) {
                // One sequence per place: they run as one batch.
                let setup = of(dtype, 2, 1, 64, &vec![(len, rows); chunk.len()]);
                let mut seqs = setup.build().seqs;
                for (seq, &place) in seqs.iter_mut().zip(chunk) {
                    // Queries and this key point the same way; all other keys do not.
                    seq.q.iter_mut().for_each(|x| *x = 1.0);
                    seq.k.iter_mut().for_each(|x| *x *= 0.125);
                    seq.k.iter_mut().for_each(|x| *x = rounded(*x, dtype));
                    seq.k[place * 64..][..64].fill(2.0);
                    seq.v[place * 64..][..64].fill(-8.0);
                }
                let batch = Batch::place(&setup, seqs, case as u64);
                let options = batch.options();
                let options = if case % 2 == 0 {
                    options
                } else {
                    options.with_window(window)
                };
                let job = attention(&batch, &options, case % 3 == 0, None);
                let what = format!("{dtype:?}, {rows} of {len}, needles at {chunk:?}");
                emulator.check(&job, Schedule::of(case), &what);
                case += 1;
            }
        }
    }
}

fn rounded(x: f64, dtype: DType) -> f64 {
    crate::common::paged::round(x, dtype)
}

/// More sequences, rows and pages of capacity than in use: the rest of the output is not
/// written, and the arrays' padding is not followed.
#[test]
fn capacity_larger_than_the_batch() {
    let mut emulator = Emulator::start();
    for (case, dtype) in TYPES.into_iter().enumerate() {
        for seqs in [
            &[(300, 1), (4, 1), (270, 1)][..],
            &[(300, 1), (40, 30)][..],
            &[][..],
        ] {
            let batch = of(dtype, 4, 2, 64, seqs).build();
            let exact = capacity(&batch.table);
            let large = launch::Batch {
                seqs: exact.seqs + 5,
                rows: exact.rows + 9,
                pages: exact.pages + 40,
                min_rows: 1,
                max_rows: exact.max_rows.max(1),
                max_len: 2000,
            };
            let job = attention(&batch, &batch.options(), false, Some(large));
            let results = emulator.check(&job, Schedule::of(case), &format!("{dtype:?} {seqs:?}"));
            let used = exact.rows * 4 * 64 * batch.q.dtype().size_in_bytes();
            assert!(
                results[0].1[used..].iter().all(|&b| b == 0xff),
                "padding rows are written"
            );
        }
    }
}

/// Same bits alone, in another batch, with other blocks and another capacity.
#[test]
fn c16_same_bits_in_any_company() {
    let mut emulator = Emulator::start();
    for (case, dtype) in TYPES.into_iter().enumerate() {
        for shape in [(700, 1), (280, 3), (90, 40)] {
            let alone = of(dtype, 6, 2, 64, &[shape]);
            let first = alone.build().seqs;
            let mates = of(dtype, 6, 2, 64, &[(33, 1), shape, (400, 1), (50, 50)]);
            let mut all = mates.build().seqs;
            all[1] = first[0].clone();
            let alone = Batch::place(&alone, first, 3);
            let company = Batch::place(&mates, all, 4);
            let mut out = |batch: &Batch, i| {
                let job = attention(batch, &batch.options(), false, None);
                let all = emulator.check(&job, Schedule::of(case + i), "company");
                all[0].1.clone()
            };
            let (alone, company) = (out(&alone, 0), out(&company, 1));
            let row = 6 * 64 * dtype.size_in_bytes();
            assert!(
                alone == company[row..][..alone.len()],
                "{dtype:?} {shape:?}"
            );
        }
    }
}

#[test]
fn logits_of_1e5_stay_finite_with_a_soft_cap() {
    let mut emulator = Emulator::start();
    for dtype in TYPES {
        for cap in [None, Some(1.0)] {
            let mut setup = of(dtype, 2, 1, 64, &[(40, 1), (40, 30)]);
            setup.spread = 100.0;
            let batch = setup.build();
            let mut options = batch.options();
            options.scale = 100.0;
            options.softcap = cap;
            // Without a cap the largest score takes all: only f32 orders the scores exactly.
            if cap.is_none() && dtype != DType::F32 {
                continue;
            }
            let job = attention(&batch, &options, false, None);
            emulator.check(&job, Schedule::of(1), &format!("{dtype:?} cap {cap:?}"));
        }
    }
}

/// Blocks whose first element lies beyond 2^31 elements, and beyond 2^32 bytes: `write_kv` puts
/// the keys there, attention reads them. The caches are never in memory as a whole.
fn far_blocks(dtype: DType) {
    let mut emulator = Emulator::start();
    for (case, (first_block, block_stride)) in [(131_072, 16_384), (2_066, 1_039_680)]
        .into_iter()
        .enumerate()
    {
        for rows in [1, 20] {
            let batch = of(dtype, 2, 1, 64, &[(40, rows)]).build();
            let far = Far {
                first_block,
                block_stride,
            };
            let what = format!("{dtype:?}, {rows} rows, {far:?}");
            emulator.check(&far.job(&batch), Schedule::of(case), &what);
        }
    }
}

#[test]
fn a24_offsets_do_not_wrap_at_32_bits_f16() {
    far_blocks(DType::F16);
}

#[test]
fn a24_offsets_do_not_wrap_at_32_bits_bf16() {
    far_blocks(DType::BF16);
}

#[test]
fn a24_offsets_do_not_wrap_at_32_bits_f32() {
    far_blocks(DType::F32);
}

/// Where the blocks of a sequence lie.
#[derive(Debug)]
struct Far {
    first_block: usize,
    block_stride: usize,
}

impl Far {
    /// Writes K and V of the batch's one sequence into far blocks, then attends to them.
    fn job(&self, batch: &Batch) -> Job {
        let mut job = attention(batch, &batch.options(), false, None);
        let seq = &batch.seqs[0];
        let dtype = batch.k_cache.dtype();
        let blocks = seq.shape.len.div_ceil(16);
        let slots: Vec<i64> = (0..seq.shape.len)
            .map(|t| (self.first_block * 16 + t) as i64)
            .collect();
        let pages: Vec<u32> = (0..blocks).map(|b| (self.first_block + b) as u32).collect();
        let mut launches = Vec::new();
        for (cache_slot, rows_slot, values, t) in [
            (Slot::KCache, Slot::AOut, &seq.k, &batch.k_cache),
            (Slot::VCache, Slot::BOut, &seq.v, &batch.v_cache),
        ] {
            let cache = CacheView {
                num_blocks: self.first_block + blocks,
                block_stride: self.block_stride,
                ..cache_view(t)
            };
            let rows = tensor(values, &[seq.shape.len, 1, 64], dtype);
            let mut write = launch::write_kv(&cache, &rows_view(&rows), seq.shape.len);
            for arg in &mut write.launches[0].args {
                match arg {
                    Arg::Buffer(slot @ Slot::Cache, _) => *slot = cache_slot,
                    Arg::Buffer(slot @ Slot::Rows, _) => *slot = rows_slot,
                    _ => {}
                }
            }
            launches.append(&mut write.launches);
            job.buffers.push((rows_slot, bytes(&rows)));
            let len = (self.first_block + blocks - 1) * self.block_stride + 16 * 64;
            job.scratch.push((cache_slot, len * dtype.size_in_bytes()));
        }
        // The attention launches, with this stride.
        let (mut k, mut v) = (cache_view(&batch.k_cache), cache_view(&batch.v_cache));
        (k.block_stride, v.block_stride) = (self.block_stride, self.block_stride);
        let plan = launch::attention(
            &rows_view(&batch.q),
            &k,
            &v,
            &capacity(&batch.table),
            &scores(&batch.options()),
            false,
        );
        launches.extend(plan.launches);
        job.plan.launches = launches;
        job.buffers
            .retain(|(slot, _)| ![Slot::KCache, Slot::VCache, Slot::Indices].contains(slot));
        job.buffers.push((Slot::Indices, encode_u32(&pages)));
        job.buffers.push((Slot::Slots, encode_i64(&slots)));
        job
    }
}

/// Queries and caches as views: starts, gaps between rows and blocks, aligned and not.
#[test]
fn c10_strided_queries_and_caches() {
    let mut emulator = Emulator::start();
    for (case, dtype) in TYPES.into_iter().enumerate() {
        for (start, gap) in [(0, 0), (8, 16), (3, 5)] {
            let batch = of(dtype, 4, 2, 64, &[(300, 1), (60, 40)]).build();
            let mut job = attention(&batch, &batch.options(), false, None);
            let (mut q, mut k, mut v) = (
                rows_view(&batch.q),
                cache_view(&batch.k_cache),
                cache_view(&batch.v_cache),
            );
            let size = dtype.size_in_bytes();
            for (slot, data) in &mut job.buffers {
                let (view_start, stride) = match slot {
                    Slot::Q => (&mut q.start, &mut q.strides[0]),
                    Slot::KCache => (&mut k.start, &mut k.block_stride),
                    Slot::VCache => (&mut v.start, &mut v.block_stride),
                    _ => continue,
                };
                *data = spread(data, *stride * size, start * size, gap * size);
                *view_start = start;
                *stride += gap;
            }
            let (table, options) = (&batch.table, batch.options());
            job.plan = launch::attention(&q, &k, &v, &capacity(table), &scores(&options), false);
            emulator.check(
                &job,
                Schedule::of(case),
                &format!("{dtype:?} {start} {gap}"),
            );
        }
    }
}

/// Poison before the first row and between rows, none after the last.
fn spread(data: &[u8], row: usize, start: usize, gap: usize) -> Vec<u8> {
    let mut out = vec![0xff; start];
    for (i, row) in data.chunks(row).enumerate() {
        out.resize(out.len() + if i == 0 { 0 } else { gap }, 0xff);
        out.extend(row);
    }
    out
}
