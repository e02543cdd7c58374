//! `write_kv`, `copy_blocks` and `merge_states`: whole buffers compared, byte by byte where bits
//! are moved.

use candle_core::{Device, Tensor};
use candle_paged_attn::ops::launch::{self, CacheView, Element, RowsView, Slot};
use candle_paged_attn::ops::{self, AttnState};

use crate::call::bytes;
use crate::common::Rng;
use paged_attn_emulator::{
    Emulator, Expect, Job, Schedule, decode, encode, encode_f32, encode_i64, encode_u32,
};

/// Random elements, rounded to their type.
fn random(rng: &mut Rng, n: usize, element: Element) -> Vec<u8> {
    (0..n).flat_map(|_| encode(rng.normal(), element)).collect()
}

const ALL: [Element; 3] = [Element::F32, Element::F16, Element::BF16];

/// Slots with padding, in a shuffled order; the last block of the cache is in use.
fn some_slots(rng: &mut Rng, rows: usize, cache_rows: usize) -> Vec<i64> {
    let mut slots: Vec<i64> = (0..cache_rows as i64).collect();
    rng.shuffle(&mut slots);
    slots.truncate(rows);
    slots[0] = -1;
    if !slots.contains(&(cache_rows as i64 - 1)) {
        slots[rows - 1] = cache_rows as i64 - 1;
    }
    slots
}

/// `write_kv` of rows as they lie in `view` into a cache of `NaN`, and the cache after it.
fn write_job(
    (new, cache): (&RowsView, &CacheView),
    (new_data, cache_data): (Vec<u8>, Vec<u8>),
    slots: &[i64],
) -> (Job, Vec<u8>) {
    let source = decode(&new_data, new.element);
    let mut want = cache_data.clone();
    for (row, &slot) in slots.iter().enumerate() {
        if slot < 0 || slot >= (cache.num_blocks * cache.block_size) as i64 {
            continue;
        }
        let (block, offset) = (
            slot as usize / cache.block_size,
            slot as usize % cache.block_size,
        );
        for head in 0..cache.kv_heads {
            for d in 0..cache.dim {
                let from =
                    new.start + row * new.strides[0] + head * new.strides[1] + d * new.strides[2];
                let to = cache.start
                    + block * cache.block_stride
                    + (offset * cache.kv_heads + head) * cache.dim
                    + d;
                let size = cache.element.size();
                want[to * size..][..size].copy_from_slice(&encode(source[from], cache.element));
            }
        }
    }
    let job = Job {
        plan: launch::write_kv(cache, new, slots.len()),
        buffers: vec![
            (Slot::Rows, new_data),
            (Slot::Cache, cache_data),
            (Slot::Slots, encode_i64(slots)),
        ],
        outputs: Vec::new(),
        scratch: Vec::new(),
        expect: Vec::new(),
    };
    (job, want)
}

fn packed(element: Element, heads: usize, dim: usize) -> RowsView {
    RowsView {
        element,
        start: 0,
        strides: [heads * dim, dim, 1],
        heads,
        dim,
    }
}

fn packed_cache(
    element: Element,
    num_blocks: usize,
    block_size: usize,
    kv_heads: usize,
    dim: usize,
) -> CacheView {
    CacheView {
        element,
        start: 0,
        block_stride: block_size * kv_heads * dim,
        num_blocks,
        block_size,
        kv_heads,
        dim,
    }
}

fn cache_of(results: Vec<(Slot, Vec<u8>)>) -> Vec<u8> {
    results
        .into_iter()
        .find(|(slot, _)| *slot == Slot::Cache)
        .unwrap()
        .1
}

#[test]
fn write_kv_between_all_types_changes_its_rows_alone() {
    let mut emulator = Emulator::start();
    let mut rng = Rng(3);
    let mut case = 0;
    for from in ALL {
        for to in ALL {
            for (block_size, heads, dim) in [
                (16, 2, 64),
                (1, 1, 8),
                (4, 3, 40),
                (256, 1, 512),
                (8, 10, 512),
            ] {
                let blocks = 1 + 24 / block_size;
                let new = packed(from, heads, dim);
                let cache = packed_cache(to, blocks, block_size, heads, dim);
                let rows = 9;
                let mut slots = some_slots(&mut rng, rows, blocks * block_size);
                slots[3] = (blocks * block_size) as i64; // outside: no wild write
                let data = (
                    random(&mut rng, rows * heads * dim, from),
                    vec![0xff; blocks * cache.block_stride * to.size()],
                );
                let (job, want) = write_job((&new, &cache), data, &slots);
                let what = format!("{from:?} to {to:?}, {block_size} x {heads} x {dim}");
                let got = cache_of(emulator.run(&job, Schedule::of(case), &what));
                assert!(got == want, "{what}");
                case += 1;
            }
        }
    }
}

/// So many rows that a block takes several, and the last block fewer.
#[test]
fn write_kv_of_many_rows() {
    let mut emulator = Emulator::start();
    let mut rng = Rng(9);
    let (rows, blocks) = (6_147, 400);
    let (new, cache) = (
        packed(Element::F32, 2, 8),
        packed_cache(Element::BF16, blocks, 16, 2, 8),
    );
    let slots = some_slots(&mut rng, rows, blocks * 16);
    let data = (
        random(&mut rng, rows * 16, Element::F32),
        vec![0xff; blocks * cache.block_stride * 2],
    );
    let (job, want) = write_job((&new, &cache), data, &slots);
    assert!((job.plan.launches[0].grid[0] as usize) < rows);
    let got = cache_of(emulator.run(&job, Schedule::of(2), "many rows"));
    assert!(got == want);
}

/// Rows as slices of a fused qkv, heads first, and with scattered elements; the cache as a
/// view with a start and a larger block stride, aligned and not.
#[test]
fn c10_write_kv_with_strides() {
    let mut emulator = Emulator::start();
    let mut rng = Rng(4);
    let (heads, dim, rows) = (2, 16, 7);
    let views = [
        (8, [3 * heads * dim, dim, 1]),
        (3, [3 * heads * dim + 1, dim, 1]),
        (0, [dim, rows * dim, 1]),
        (0, [heads * dim, 1, heads]),
    ];
    for (case, (start, strides)) in views.into_iter().enumerate() {
        for (cache_start, gap) in [(0, 0), (64, 128), (5, 3)] {
            let from = ALL[case % 3];
            let to = ALL[(case + cache_start) % 3];
            let new = RowsView {
                start,
                strides,
                ..packed(from, heads, dim)
            };
            let mut cache = packed_cache(to, 3, 4, heads, dim);
            cache.start = cache_start;
            cache.block_stride += gap;
            let last =
                start + (rows - 1) * strides[0] + (heads - 1) * strides[1] + (dim - 1) * strides[2];
            let cache_len = cache_start + 2 * cache.block_stride + 4 * heads * dim;
            let slots = some_slots(&mut rng, rows, 12);
            let data = (
                random(&mut rng, last + 1, from),
                vec![0xff; cache_len * to.size()],
            );
            let (job, want) = write_job((&new, &cache), data, &slots);
            let what = format!("{new:?} into {cache:?}");
            let got = cache_of(emulator.run(&job, Schedule::of(case), &what));
            assert!(got == want, "{what}");
        }
    }
}

fn copy_job(cache: &CacheView, data: Vec<u8>, pairs: &[(u32, u32)]) -> (Job, Vec<u8>) {
    let copy = launch::copy_blocks(cache, pairs);
    let size = cache.element.size();
    let block = cache.block_size * cache.kv_heads * cache.dim * size;
    let at = |id: u32| (cache.start + id as usize * cache.block_stride) * size;
    let mut want = data.clone();
    for &(from, to) in pairs {
        want[at(to)..][..block].copy_from_slice(&data[at(from)..][..block]);
    }
    let job = Job {
        plan: copy.plan,
        buffers: vec![(Slot::Cache, data), (Slot::Pairs, encode_u32(&copy.pairs))],
        outputs: Vec::new(),
        scratch: Vec::new(),
        expect: Vec::new(),
    };
    (job, want)
}

#[test]
fn a18_copy_blocks_reads_before_it_writes() {
    let mut emulator = Emulator::start();
    let mut rng = Rng(5);
    let lists: [&[(u32, u32)]; 5] = [
        &[(0, 1)],
        &[(0, 1), (1, 2)],
        &[(1, 2), (0, 1)],
        &[(0, 1), (1, 0), (2, 2), (3, 4)],
        &[(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)],
    ];
    for (case, pairs) in lists.into_iter().enumerate() {
        for element in ALL {
            for (start, gap) in [(0, 0), (16, 32), (3, 1)] {
                let mut cache = packed_cache(element, 5, 4, 3, 24);
                cache.start = start;
                cache.block_stride += gap;
                let len = start + 4 * cache.block_stride + 4 * 3 * 24;
                let data = random(&mut rng, len, element);
                let (job, want) = copy_job(&cache, data, pairs);
                let what = format!("{pairs:?} in {cache:?}");
                let got = cache_of(emulator.run(&job, Schedule::of(case), &what));
                assert!(got == want, "{what}");
            }
        }
    }
}

/// Blocks of more elements than one pass of the grid's threads.
#[test]
fn copy_blocks_of_a_large_block() {
    let mut emulator = Emulator::start();
    let cache = packed_cache(Element::BF16, 3, 256, 2, 128);
    let data = random(&mut Rng(6), 3 * cache.block_stride, Element::BF16);
    let (job, want) = copy_job(&cache, data, &[(2, 0), (0, 1)]);
    let got = cache_of(emulator.run(&job, Schedule::of(7), "large block"));
    assert!(got == want);
}

fn merge_job(rng: &mut Rng, pairs: usize, dim: usize) -> Job {
    let cpu =
        |data: &[f32], shape: &[usize]| Tensor::from_slice(data, shape, &Device::Cpu).unwrap();
    let mut state = |first: f32| {
        let mut lse: Vec<f32> = (0..pairs).map(|_| 4.0 * rng.normal() as f32).collect();
        lse[0] = f32::NEG_INFINITY;
        lse[1] = first;
        let mut out: Vec<f32> = (0..pairs * dim).map(|_| rng.normal() as f32).collect();
        for (out, lse) in out.chunks_mut(dim).zip(&lse) {
            if *lse == f32::NEG_INFINITY {
                out.fill(0.0);
            }
        }
        (out, lse)
    };
    let ((a_out, a_lse), (b_out, b_lse)) = (state(f32::NEG_INFINITY), state(1.5));
    let tensors = |out: &[f32], lse: &[f32]| AttnState {
        out: cpu(out, &[pairs, 1, dim]),
        lse: cpu(lse, &[pairs, 1]),
    };
    let want = ops::merge_states(&tensors(&a_out, &a_lse), &tensors(&b_out, &b_lse)).unwrap();
    let split = pairs * dim * 4;
    let expect = |start, row_len, values| Expect {
        slot: Slot::Out,
        start,
        element: Element::F32,
        row_len,
        tolerance: 1e-6,
        values,
        who: "the CPU op",
    };
    let wide = |t: &Tensor| decode(&bytes(t), Element::F32);
    Job {
        plan: launch::merge_states(pairs, dim),
        buffers: vec![
            (Slot::AOut, encode_f32(&a_out)),
            (Slot::ALse, encode_f32(&a_lse)),
            (Slot::BOut, encode_f32(&b_out)),
            (Slot::BLse, encode_f32(&b_lse)),
        ],
        outputs: vec![(Slot::Out, split + pairs * 4)],
        scratch: Vec::new(),
        expect: vec![
            expect(0, dim, wide(&want.out)),
            expect(split, 1, wide(&want.lse)),
        ],
    }
}

#[test]
fn c3_merge_states() {
    let mut emulator = Emulator::start();
    for (case, dim) in [8, 128, 200, 512].into_iter().enumerate() {
        let job = merge_job(&mut Rng(case as u64), 6, dim);
        emulator.check(&job, Schedule::of(case), &format!("dim {dim}"));
    }
}

/// Every kernel of this file once, as jobs with expectations for both interpreters.
pub fn small() -> Vec<(String, Job)> {
    let mut rng = Rng(8);
    let mut jobs = vec![("merge_states".to_string(), merge_job(&mut rng, 4, 40))];
    let mut push = |name: String, cache: &CacheView, (mut job, want): (Job, Vec<u8>)| {
        let values = decode(&want, cache.element);
        job.expect.push(Expect {
            slot: Slot::Cache,
            start: 0,
            element: cache.element,
            row_len: cache.dim,
            tolerance: 0.0,
            values,
            who: "the moved bits",
        });
        jobs.push((name, job));
    };
    for from in ALL {
        for to in ALL {
            let (new, cache) = (packed(from, 2, 24), packed_cache(to, 3, 4, 2, 24));
            let data = (
                random(&mut rng, 5 * 48, from),
                // Not NaN: values are compared as numbers here.
                random(&mut rng, 3 * cache.block_stride, to),
            );
            let slots = some_slots(&mut rng, 5, 12);
            let job = write_job((&new, &cache), data, &slots);
            push(format!("write_kv_{from:?}_{to:?}"), &cache, job);
        }
        let cache = packed_cache(from, 4, 4, 2, 24);
        let data = random(&mut rng, 4 * cache.block_stride, from);
        let job = copy_job(&cache, data, &[(3, 0), (0, 1)]);
        push(format!("copy_blocks_{from:?}"), &cache, job);
    }
    jobs
}
