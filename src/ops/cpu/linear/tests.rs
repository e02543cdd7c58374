//! The kernels on every instruction set that the machine has.

mod superblocks;

use std::cell::RefCell;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::super::simd::{Isa, Simd, Task};
use super::activations::Room;
use super::registers::{self, ByteSimd, ByteTask};
use super::*;

/// What a task left on each instruction set.
type Results<T> = RefCell<Vec<T>>;

/// The largest error of rounding to f32, relative.
const UNIT: f64 = 1.0 / (1 << 24) as f64;

const FORMATS: [Format; 3] = [Format::Q8_0, Format::Q4_0, Format::Q4_1];
/// One output, a rest, whole tiles of both kinds and their neighbours.
const OUTS: [usize; 8] = [1, 3, 15, 16, 17, 32, 33, 50];
/// Every number of rows that a kernel takes at once, and what is left over.
const ROWS: [usize; 9] = [1, 2, 3, 4, 7, 8, 12, 13, 17];

/// A matrix of one block format: its bytes, and what they mean.
struct Matrix {
    bytes: Vec<u8>,
    /// `[out, blocks]`
    scales: Vec<f64>,
    minima: Vec<f64>,
    /// `[out, inp]`, less the offset.
    quants: Vec<i32>,
}

impl Matrix {
    fn random(rng: &mut StdRng, format: Format, out: usize, inp: usize, whole: bool) -> Self {
        let mut matrix = Self {
            bytes: Vec::new(),
            scales: Vec::new(),
            minima: Vec::new(),
            quants: Vec::new(),
        };
        for _ in 0..out * inp / BLOCK {
            let number = |x: f32| if whole { f16::ONE } else { f16::from_f32(x) };
            let scale = number(rng.random_range(-0.1..0.1));
            let minimum = match format {
                Format::Q4_1 if whole => f16::from_f32(rng.random_range(-3..4) as f32),
                Format::Q4_1 => f16::from_f32(rng.random_range(-1.0..1.0)),
                Format::Q8_0 | Format::Q4_0 => f16::ZERO,
            };
            matrix.bytes.extend(scale.to_le_bytes());
            matrix.scales.push(scale.into());
            matrix.minima.push(minimum.into());
            if let Format::Q4_1 = format {
                matrix.bytes.extend(minimum.to_le_bytes());
            }
            if let Format::Q8_0 = format {
                // The ends of the range are frequent.
                let quants = [(); BLOCK].map(|()| match rng.random_range(0..4) {
                    0 => -128,
                    1 => 127,
                    _ => rng.random_range(-128..128i32),
                });
                matrix.bytes.extend(quants.map(|quant| quant as i8 as u8));
                matrix.quants.extend(quants);
            } else {
                let stored = [(); BLOCK].map(|()| rng.random_range(0..16u8));
                let (low, high) = stored.split_at(BLOCK / 2);
                let both = low.iter().zip(high);
                matrix.bytes.extend(both.map(|(low, high)| low | high << 4));
                let offset = if format == Format::Q4_0 { 8 } else { 0 };
                let quants = stored.map(|quant| i32::from(quant) - offset);
                matrix.quants.extend(quants);
            }
        }
        matrix
    }

    fn pack(&self, format: Format, out: usize, inp: usize) -> Blocks {
        let mut blocks = Blocks::zeros(format, out, inp);
        blocks.fill(0, &self.bytes);
        blocks
    }

    /// The product of one output with a row of rounded activations, and the sum of the sizes of
    /// all its parts.
    fn dot(&self, out: usize, x: &Activations, row: usize, blocks: usize) -> (f64, f64) {
        let (mut sum, mut size) = (0.0, 0.0);
        for block in 0..blocks {
            let (w, a) = (out * blocks + block, row * blocks + block);
            let dot: i32 = (0..BLOCK)
                .map(|i| self.quants[w * BLOCK + i] * i32::from(x.quants[a * BLOCK + i]))
                .sum();
            let product = self.scales[w] * f64::from(x.scales[a]) * f64::from(dot);
            let shift = self.minima[w] * f64::from(x.totals[a]);
            sum += product + shift;
            size += product.abs() + shift.abs();
        }
        (sum, size)
    }
}

fn rounded(x: &[f32]) -> Activations {
    let mut activations = Activations::EMPTY;
    activations.resize(x.len());
    let Activations {
        quants,
        scales,
        sums,
        totals,
    } = &mut activations;
    let room = Room {
        quants,
        scales,
        sums,
        totals,
    };
    activations::round(x, room);
    activations
}

/// A product with all tiles of a weight.
#[derive(Clone)]
struct Product<'a, W, X> {
    weight: W,
    x: X,
    rows: usize,
    out: usize,
    results: &'a Results<Vec<f32>>,
}

impl<W, X> Product<'_, W, X> {
    fn room(&self) -> Vec<MaybeUninit<f32>> {
        vec![MaybeUninit::new(f32::NAN); self.rows * self.out]
    }

    fn keep(&self, out: &[MaybeUninit<f32>]) {
        // SAFETY: `room` made them, and so all are numbers.
        let out = out.iter().map(|x| unsafe { x.assume_init() });
        self.results.borrow_mut().push(out.collect());
    }
}

impl<W, X> ByteTask for Product<'_, &W, &X>
where
    for<'a> Tiles<'a, W, X>: ByteTask,
{
    #[inline(always)]
    fn run<S: ByteSimd>(self, simd: S) {
        let mut room = self.room();
        let tiles = Tiles {
            weight: self.weight,
            tiles: 0..self.out.div_ceil(tiles::TILE),
            x: self.x,
            out: Out::new(&mut room, self.out),
        };
        tiles.run(simd);
        self.keep(&room);
    }
}

impl<T: Element + Plain> Task for Product<'_, &Dense<T>, &[f32]> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let mut room = self.room();
        let tiles = DenseTiles {
            weight: self.weight,
            tiles: 0..self.out.div_ceil(dense::TILE),
            x: self.x,
            out: Out::new(&mut room, self.out),
        };
        tiles.run(simd);
        self.keep(&room);
    }
}

/// `[rows, out]` of every instruction set.
fn byte_products<W, X>(weight: &W, x: &X, rows: usize, out: usize) -> Vec<Vec<f32>>
where
    for<'a> Tiles<'a, W, X>: ByteTask,
{
    let results = RefCell::default();
    registers::dispatch_to_each(Product {
        weight,
        x,
        rows,
        out,
        results: &results,
    });
    results.into_inner()
}

fn block_products(weight: &Blocks, x: &[f32], rows: usize, out: usize) -> Vec<Vec<f32>> {
    byte_products(weight, &rounded(x), rows, out)
}

fn dense_products<T: Element + Plain>(
    weight: &Dense<T>,
    x: &[f32],
    rows: usize,
    out: usize,
) -> Vec<Vec<f32>> {
    let results = RefCell::default();
    for isa in Isa::all() {
        isa.run(Product {
            weight,
            x,
            rows,
            out,
            results: &results,
        });
    }
    results.into_inner()
}

/// Each row alone has the bits that it has in the batch, on each instruction set.
fn assert_rows_alone(batch: &[Vec<f32>], rows: usize, alone: impl Fn(usize) -> Vec<Vec<f32>>) {
    for row in 0..rows {
        for (alone, batch) in alone(row).iter().zip(batch) {
            let width = alone.len();
            let of_batch = &batch[row * width..][..width];
            assert!(
                alone
                    .iter()
                    .map(|x| x.to_bits())
                    .eq(of_batch.iter().map(|x| x.to_bits())),
                "row {row} of {rows}: alone {alone:?}, in the batch {of_batch:?}"
            );
        }
    }
}

/// Sums of products of four bytes, the ends of the range among them.
#[derive(Clone)]
struct ByteProducts;

impl ByteTask for ByteProducts {
    fn run<S: ByteSimd>(self, simd: S) {
        const ENDS: [i32; 6] = [-128, -127, -1, 0, 1, 127];
        let mut rng = StdRng::seed_from_u64(1);
        for _ in 0..2000 {
            let mut byte = |least: i32| match rng.random_range(0..2) {
                0 => ENDS[rng.random_range(0..6)].max(least),
                _ => rng.random_range(least..128),
            };
            let weights = [(); 64].map(|()| byte(-128));
            let low = [(); 64].map(|()| byte(-127));
            let high = [(); 64].map(|()| byte(-127));
            let load = |bytes: [i32; 64]| {
                let bytes = bytes.map(|byte| byte as u8);
                // SAFETY: the widest register has 64 bytes.
                unsafe { simd.load(bytes.as_ptr()) }
            };
            let store = |sums: S::I| {
                let mut floats = [0f32; 16];
                // SAFETY: the widest register has 16 lanes.
                unsafe { simd.floats().store(floats.as_mut_ptr(), simd.to_f32(sums)) };
                floats
            };
            let start = simd.splat(-7);
            let dots = store(simd.dot_bytes(start, load(weights.map(|w| w + 128)), load(low)));
            let nibbles = store(simd.dot_nibbles(start, load(weights), load(low), load(high)));
            let of_weights = weights.map(|w| w as i8);
            // SAFETY: the widest register has 16 lanes.
            let scale = unsafe { simd.load_i8(of_weights.as_ptr()) };
            let scaled = store(simd.mul_add(scale, simd.splat(-129), start));
            for lane in 0..S::Floats::LANES {
                assert_eq!(scaled[lane], (weights[lane] * -129 - 7) as f32);
                let sum =
                    |f: &dyn Fn(usize) -> i32| -7 + (4 * lane..4 * lane + 4).map(f).sum::<i32>();
                let want = sum(&|i| (weights[i] + S::BYTE_OFFSET) * low[i]);
                assert_eq!(dots[lane], want as f32);
                let want = sum(&|i| (weights[i] & 15) * low[i] + (weights[i] >> 4 & 15) * high[i]);
                assert_eq!(nibbles[lane], want as f32);
            }
            let tops = [(); 64].map(|()| byte(-128));
            let [nibbles, above, below, over] = [weights, tops, low, high].map(load);
            let one = [0, 2, 4, 6].map(|at| {
                let dots = simd.dot_topped::<1>(start, nibbles, above, at, below, over);
                (1, at, store(dots))
            });
            let two = [0, 4].map(|at| {
                let dots = simd.dot_topped::<2>(start, nibbles, above, at, below, over);
                (2, at, store(dots))
            });
            for (bits, at, got) in one.into_iter().chain(two) {
                let top = |i: usize, at: u32| (tops[i] >> at & ((1 << bits) - 1)) * 16;
                for (lane, &got) in got.iter().enumerate().take(S::Floats::LANES) {
                    let dots = (4 * lane..4 * lane + 4).map(|i| {
                        let lower = (weights[i] & 15) + top(i, at);
                        let upper = (weights[i] >> 4 & 15) + top(i, at + bits);
                        lower * low[i] + upper * high[i]
                    });
                    let want = dots.sum::<i32>() - 7;
                    assert_eq!(got, want as f32, "{bits} bits at {at}");
                }
            }
        }
    }
}

#[test]
fn byte_products_are_exact() {
    registers::dispatch_to_each(ByteProducts);
}

/// With whole numbers everywhere each sum is exact: every instruction set has to give the very
/// integer.
#[test]
fn tiles_of_whole_numbers_are_exact() {
    let mut rng = StdRng::seed_from_u64(2);
    for format in FORMATS {
        for out in OUTS {
            for rows in ROWS {
                let blocks = rng.random_range(1..6);
                let inp = blocks * BLOCK;
                let matrix = Matrix::random(&mut rng, format, out, inp, true);
                let mut x: Vec<f32> = (0..rows * inp)
                    .map(|_| rng.random_range(-127..128) as f32)
                    .collect();
                // So that a block is its own rounding, with scale 1.
                x.iter_mut().step_by(BLOCK).for_each(|x| *x = 127.0);
                let weight = matrix.pack(format, out, inp);
                let sets = block_products(&weight, &x, rows, out);
                for (set, got) in sets.iter().enumerate() {
                    for (i, &got) in got.iter().enumerate() {
                        let want: f64 = (0..inp)
                            .map(|k| {
                                let at = i % out * inp + k;
                                let w = f64::from(matrix.quants[at]) + matrix.minima[at / BLOCK];
                                w * f64::from(x[i / out * inp + k])
                            })
                            .sum();
                        assert_eq!(
                            f64::from(got),
                            want,
                            "{format:?} {out}x{inp}, {i}, set {set}"
                        );
                    }
                }
            }
        }
    }
}

/// Products of the integers are exact, of two 16-bit scales too; so what differs from f64 is a
/// product and a sum for each part, each off by half a unit in the last place at most.
#[test]
fn block_tiles_are_the_f64_product_of_the_rounded_rows() {
    let mut rng = StdRng::seed_from_u64(3);
    for format in FORMATS {
        for (out, blocks) in [(1, 1), (17, 3), (33, 18), (50, 48)] {
            let inp = blocks * BLOCK;
            let matrix = Matrix::random(&mut rng, format, out, inp, false);
            let weight = matrix.pack(format, out, inp);
            for rows in ROWS {
                let x: Vec<f32> = (0..rows * inp)
                    .map(|_| rng.random_range(-2.0..2.0))
                    .collect();
                let activations = rounded(&x);
                let sets = block_products(&weight, &x, rows, out);
                for got in sets.iter().flat_map(|set| set.iter().enumerate()) {
                    let (i, &got) = got;
                    let (want, size) = matrix.dot(i % out, &activations, i / out, blocks);
                    let bound = 4.0 * blocks as f64 * UNIT * size;
                    let off = (f64::from(got) - want).abs();
                    assert!(off <= bound, "{format:?} {out}x{inp}, {i}: {got} {want}");
                }
                assert_rows_alone(&sets, rows, |row| {
                    block_products(&weight, &x[row * inp..][..inp], 1, out)
                });
            }
        }
    }
}

/// Blocks rounded by the definition of the format, one element after the other.
#[derive(Clone)]
struct Rounding<'a>(&'a [f32]);

impl Task for Rounding<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let mut got = Activations::EMPTY;
        got.resize(self.0.len());
        let room = Room {
            quants: &mut got.quants,
            scales: &mut got.scales,
            sums: &mut got.sums,
            totals: &mut got.totals,
        };
        activations::Round { x: self.0, room }.run(simd);
        for (block, x) in self.0.chunks(BLOCK).enumerate() {
            let scale = x.iter().fold(0f32, |most, x| most.max(x.abs())) / 127.0;
            let inverse = if scale.is_normal() { 1.0 / scale } else { 0.0 };
            let quants: Vec<i8> = x.iter().map(|x| (x * inverse).round() as i8).collect();
            assert!(quants.iter().all(|&quant| quant > i8::MIN));
            assert_eq!(got.quants[block * BLOCK..][..BLOCK], quants);
            assert_eq!(got.scales[block], f16::from_f32(scale).to_f32());
            let sum = quants.iter().map(|&quant| i32::from(quant)).sum::<i32>();
            assert_eq!(got.sums[block], sum);
            let total = f64::from(sum) * f64::from(got.scales[block]);
            // Two roundings to 16 bits.
            let off = (f64::from(got.totals[block]) - total).abs();
            assert!(off <= total.abs() / 1023.0 + 1e-7, "{off} of {total}");
        }
    }
}

#[test]
fn rounding_is_that_of_the_format() {
    let mut rng = StdRng::seed_from_u64(4);
    let mut x: Vec<f32> = (0..500 * BLOCK)
        .map(|i| rng.random_range(-1.0..1.0) * ((i / BLOCK % 9) as f32).exp2())
        .collect();
    x[..BLOCK].fill(0.0);
    // Halves, which go away from zero.
    for (i, x) in x[BLOCK..2 * BLOCK].iter_mut().enumerate() {
        *x = i as f32 - 15.5;
    }
    x[BLOCK] = 127.0;
    x[2 * BLOCK..3 * BLOCK].fill(1e-30);
    x[3 * BLOCK..4 * BLOCK].fill(-1e-38);
    Isa::all().into_iter().for_each(|isa| isa.run(Rounding(&x)));
}

fn assert_dense<T: Element + Plain>(from_f32: fn(f32) -> T) {
    let mut rng = StdRng::seed_from_u64(5);
    for (out, inp) in [(1, 1), (3, 7), (17, 64), (32, 33), (33, 100), (50, 576)] {
        for rows in ROWS {
            let stored: Vec<T> = (0..out * inp)
                .map(|_| from_f32(rng.random_range(-1.0..1.0)))
                .collect();
            let mut weight = Dense::zeros(out, inp);
            weight.fill(0, &stored);
            let x: Vec<f32> = (0..rows * inp)
                .map(|_| rng.random_range(-2.0..2.0))
                .collect();
            let sets = dense_products(&weight, &x, rows, out);
            for (i, &got) in sets.iter().flat_map(|set| set.iter().enumerate()) {
                let (row, out) = (&x[i / out * inp..][..inp], &stored[i % out * inp..][..inp]);
                let parts = row.iter().zip(out);
                let parts: Vec<f64> = parts
                    .map(|(&x, w)| f64::from(x) * f64::from(w.to_f32()))
                    .collect();
                let want: f64 = parts.iter().sum();
                let size: f64 = parts.iter().map(|part| part.abs()).sum();
                // A product and a sum for each part.
                let bound = 2.0 * inp as f64 * UNIT * size;
                assert!((f64::from(got) - want).abs() <= bound, "{got} {want}");
            }
            assert_rows_alone(&sets, rows, |row| {
                dense_products(&weight, &x[row * inp..][..inp], 1, out)
            });
        }
    }
}

#[test]
fn dense_tiles_are_the_f64_product() {
    assert_dense(|x| x);
    assert_dense(f16::from_f32);
    assert_dense(bf16::from_f32);
}
