//! Linear layers on a CPU: the f64 product, the same bits at any number of rows, candle's
//! quantised product, and what is refused.
//!
//! Bounds come from the arithmetic. A sum of `n` parts in f32, one after the other, is off by
//! `n` roundings of at most half a unit in the last place of the sum of the parts' sizes; each
//! part has one rounding more where products are not fused.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{DType, Device, Module, Tensor};
use candle_paged_attn::Error;
use candle_paged_attn::models::{Linear, LinearWeight};
use half::f16;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// The largest error of rounding to f32, relative.
const UNIT: f64 = 1.0 / (1 << 24) as f64;

/// Elements that share a scale.
const BLOCK: usize = 32;
/// Elements of a row that share a scale for the K formats.
const SUPER: usize = 256;

/// How a weight is stored.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Stored {
    Dense(DType),
    Blocks(GgmlDType),
}

const DENSE: [Stored; 3] = [
    Stored::Dense(DType::F32),
    Stored::Dense(DType::F16),
    Stored::Dense(DType::BF16),
];
const BLOCKS: [Stored; 6] = [
    Stored::Blocks(GgmlDType::Q8_0),
    Stored::Blocks(GgmlDType::Q4_0),
    Stored::Blocks(GgmlDType::Q4_1),
    Stored::Blocks(GgmlDType::Q4K),
    Stored::Blocks(GgmlDType::Q5K),
    Stored::Blocks(GgmlDType::Q6K),
];

impl Stored {
    /// `inp`, or the next size of a row that is stored so.
    fn whole(self, inp: usize) -> usize {
        match self {
            Self::Dense(_) => inp,
            Self::Blocks(kind) => inp.next_multiple_of(kind.block_size()),
        }
    }
}

fn random(seed: u64, rows: usize, columns: usize) -> Tensor {
    let mut rng = StdRng::seed_from_u64(seed);
    let values: Vec<f32> = (0..rows * columns)
        .map(|_| rng.random_range(-1.0..1.0))
        .collect();
    Tensor::from_vec(values, (rows, columns), &Device::Cpu).unwrap()
}

/// A random weight `[out, inp]`, and the numbers that are stored.
fn weight(stored: Stored, seed: u64, out: usize, inp: usize) -> (LinearWeight, Vec<Vec<f64>>) {
    let full = random(seed, out, inp);
    let (weight, numbers) = match stored {
        Stored::Dense(dtype) => {
            let weight = full.to_dtype(dtype).unwrap();
            (LinearWeight::Dense(weight.clone()), weight)
        }
        Stored::Blocks(kind) => {
            let weight = QTensor::quantize(&full, kind).unwrap();
            let numbers = weight.dequantize(&Device::Cpu).unwrap();
            (LinearWeight::Quantized(Arc::new(weight)), numbers)
        }
    };
    let numbers = numbers.to_dtype(DType::F64).unwrap().to_vec2().unwrap();
    (weight, numbers)
}

fn layer(stored: Stored, weight: LinearWeight) -> Linear {
    let dtype = match stored {
        Stored::Dense(dtype) => dtype,
        Stored::Blocks(_) => DType::F32,
    };
    Linear::new(weight, None, dtype, &Device::Cpu).unwrap()
}

fn forward(layer: &Linear, x: &Tensor) -> Vec<Vec<f32>> {
    layer.forward(x).unwrap().to_vec2().unwrap()
}

/// A row as GGML rounds it for products with blocks: 8 bits, and a 16-bit scale per block.
fn rounded(x: &[f32]) -> Vec<f64> {
    x.chunks(BLOCK)
        .flat_map(|x| {
            let scale = x.iter().fold(0f32, |most, x| most.max(x.abs())) / 127.0;
            let stored = f16::from_f32(scale).to_f64();
            x.iter()
                .map(move |x| f64::from((x / scale).round()) * stored)
        })
        .collect()
}

/// The same for the K formats: a scale of full precision per 256.
fn super_rounded(x: &[f32]) -> Vec<f64> {
    x.chunks(SUPER)
        .flat_map(|x| {
            let inverse = 127.0 / x.iter().fold(0f32, |most, x| most.max(x.abs()));
            let scale = f64::from(1.0 / inverse);
            x.iter()
                .map(move |x| f64::from((x * inverse).round()) * scale)
        })
        .collect()
}

/// The product of two rows and how far off results may be.
struct Product {
    want: f64,
    bound: f64,
    /// Between two ways to compute it that add up any parts of a block separately.
    between: f64,
}

fn product(stored: Stored, weight: &[f64], x: &[f32]) -> Product {
    let Stored::Blocks(kind) = stored else {
        let parts = weight.iter().zip(x);
        let parts: Vec<f64> = parts.map(|(w, &x)| w * f64::from(x)).collect();
        let size: f64 = parts.iter().map(|part| part.abs()).sum();
        let bound = 2.0 * x.len() as f64 * UNIT * size;
        return Product {
            want: parts.iter().sum(),
            bound,
            between: 2.0 * bound,
        };
    };
    if kind.block_size() == SUPER {
        return super_product(weight, x);
    }
    let x = rounded(x);
    // A block of Q4_1 has two parts: the product of the integers, and its minimum times the sum
    // of the row's numbers, which is rounded to 16 bits twice.
    let (mut want, mut size, mut elements, mut minima) = (0.0, 0.0, 0.0, 0.0);
    for (w, x) in weight.chunks(BLOCK).zip(x.chunks(BLOCK)) {
        let least = match kind {
            GgmlDType::Q4_1 => w.iter().copied().fold(f64::INFINITY, f64::min),
            _ => 0.0,
        };
        let shift = (least * x.iter().sum::<f64>()).abs();
        let part: f64 = w.iter().zip(x).map(|(w, x)| w * x).sum();
        want += part;
        size += part.abs() + 2.0 * shift;
        elements += shift;
        elements += w
            .iter()
            .zip(x)
            .map(|(w, x)| ((w - least) * x).abs())
            .sum::<f64>();
        minima += shift;
    }
    // Two parts, each with a product and a sum.
    let roundings = 4.0 * (weight.len() / BLOCK) as f64;
    Product {
        want,
        bound: roundings * UNIT * size + minima / 1023.0,
        between: 2.0 * roundings * UNIT * elements,
    }
}

/// A superblock has two parts: the product of the integers, and what is taken off, of Q6_K 32
/// scales and else a minimum, times sums of the row's numbers. Of weights from −1 to 1 it is about
/// 1 at most.
fn super_product(weight: &[f64], x: &[f32]) -> Product {
    const TAKEN_OFF: f64 = 2.0;
    let x = super_rounded(x);
    let (mut want, mut size, mut elements) = (0.0, 0.0, 0.0);
    for (w, x) in weight.chunks(SUPER).zip(x.chunks(SUPER)) {
        let part: f64 = w.iter().zip(x).map(|(w, x)| w * x).sum();
        let sums = x.chunks(16).map(|x| x.iter().sum::<f64>().abs());
        want += part;
        size += part.abs() + 2.0 * TAKEN_OFF * sums.sum::<f64>();
        let sizes = w
            .iter()
            .zip(x)
            .map(|(w, x)| (w.abs() + TAKEN_OFF) * x.abs());
        elements += sizes.sum::<f64>();
    }
    // Two parts, each with a product and a sum. What candle reads as a weight is rounded once.
    let blocks = (weight.len() / SUPER) as f64;
    Product {
        want,
        bound: 4.0 * blocks * UNIT * size + UNIT * elements,
        // candle may round as often in every block of 32.
        between: 2.0 * 4.0 * blocks * 8.0 * UNIT * elements,
    }
}

fn assert_product(stored: Stored, out: usize, inp: usize, rows: usize, seed: u64) {
    let (weight, numbers) = weight(stored, seed, out, inp);
    let x = random(seed + 1, rows, inp);
    let got = forward(&layer(stored, weight), &x);
    assert_eq!(got.len(), rows);
    for (x, got) in x.to_vec2::<f32>().unwrap().iter().zip(&got) {
        assert_eq!(got.len(), out);
        for (weight, &got) in numbers.iter().zip(got) {
            let Product { want, bound, .. } = product(stored, weight, x);
            let off = (f64::from(got) - want).abs();
            assert!(
                off <= bound,
                "{stored:?} {out}x{inp}, {rows} rows: {got}, but {want} within {bound}"
            );
        }
    }
}

#[test]
fn dense_weights_give_the_f64_product() {
    for stored in DENSE {
        for (out, inp) in [(1, 1), (3, 50), (17, 64), (33, 100), (64, 576), (131, 33)] {
            for rows in [1, 2, 5, 13, 40] {
                assert_product(stored, out, inp, rows, 10);
            }
        }
    }
}

/// Also where candle has another function: rows of whole 256.
#[test]
fn blocks_give_the_f64_product_of_the_rounded_rows() {
    for stored in BLOCKS {
        for (out, inp) in [(1, 32), (3, 96), (17, 64), (33, 256), (64, 576), (131, 512)] {
            for rows in [1, 2, 5, 13, 40] {
                for seed in [20, 22, 24] {
                    assert_product(stored, out, stored.whole(inp), rows, seed);
                }
            }
        }
    }
}

/// Both compute one function, in another order of sums: so each is within the bound.
#[test]
fn blocks_give_the_product_of_candle() {
    for stored in BLOCKS {
        let Stored::Blocks(kind) = stored else {
            continue;
        };
        // Of 256 columns candle rounds activations of Q8_0 in blocks of 256 on some machines.
        for (seed, (out, inp)) in (30..).zip([(3, 64), (33, 192), (48, 320), (131, 576)]) {
            let inp = stored.whole(inp);
            let (weight, numbers) = weight(stored, seed, out, inp);
            let LinearWeight::Quantized(blocks) = &weight else {
                continue;
            };
            assert_eq!(blocks.dtype(), kind);
            let candle = QMatMul::QTensor(blocks.clone());
            let layer = layer(stored, weight.clone());
            for seed in seed..seed + 20 {
                let x = random(100 + seed, 5, inp);
                let want: Vec<Vec<f32>> = candle.forward(&x).unwrap().to_vec2().unwrap();
                let got = forward(&layer, &x);
                for (row, x) in x.to_vec2::<f32>().unwrap().iter().enumerate() {
                    for out in 0..out {
                        let Product { between, .. } = product(stored, &numbers[out], x);
                        let off = f64::from(got[row][out] - want[row][out]).abs();
                        assert!(off <= between, "{kind:?}: {off}, bound {between}");
                    }
                }
            }
        }
    }
}

fn bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    let bits = |row: &Vec<f32>| row.iter().map(|x| x.to_bits()).collect();
    rows.iter().map(bits).collect()
}

#[test]
fn a_row_alone_has_the_bits_of_the_row_in_a_batch() {
    for stored in DENSE.into_iter().chain(BLOCKS) {
        // The last is large enough to be shared out among threads at any number of rows.
        for (out, inp) in [
            (1, 32),
            (3, 64),
            (17, 96),
            (33, 256),
            (49, 576),
            (1003, 512),
        ] {
            let inp = stored.whole(inp);
            let layer = layer(stored, weight(stored, 40, out, inp).0);
            let x = random(41, 64, inp);
            let rows = |first, count| bits(&forward(&layer, &x.narrow(0, first, count).unwrap()));
            let alone: Vec<_> = (0..64).flat_map(|row| rows(row, 1)).collect();
            for count in [2, 3, 4, 17, 64] {
                for first in [0, 64 - count] {
                    assert_eq!(
                        rows(first, count),
                        alone[first..first + count],
                        "{stored:?} {out}x{inp}, {count} rows from {first}"
                    );
                }
            }
        }
    }
}

/// Neighbours of a row may be anything, not a number too.
#[test]
fn batch_mates_that_are_no_numbers_do_not_matter() {
    for stored in DENSE.into_iter().chain(BLOCKS) {
        let inp = stored.whole(96);
        let layer = layer(stored, weight(stored, 42, 33, inp).0);
        let x = random(43, 1, inp);
        let alone = bits(&forward(&layer, &x));
        let poison = Tensor::full(f32::NAN, (1, inp), &Device::Cpu).unwrap();
        let batch = Tensor::cat(&[&poison, &x, &poison, &x, &poison], 0).unwrap();
        let batch = bits(&forward(&layer, &batch));
        assert_eq!(batch[1], alone[0], "{stored:?}");
        assert_eq!(batch[3], alone[0], "{stored:?}");
    }
}

#[test]
fn rows_may_lie_anywhere() {
    for stored in DENSE.into_iter().chain(BLOCKS) {
        let inp = stored.whole(64);
        let layer = layer(stored, weight(stored, 50, 33, inp).0);
        let x = random(51, 7, inp);
        let want = bits(&forward(&layer, &x));
        // Behind other rows, between other columns, and column by column.
        let other = random(52, 3, inp);
        let behind = Tensor::cat(&[&other, &x], 0).unwrap();
        let behind = behind.narrow(0, 3, 7).unwrap();
        let other = random(53, 7, 11);
        let between = Tensor::cat(&[&other, &x, &other], 1).unwrap();
        let between = between.narrow(1, 11, inp).unwrap();
        let by_column = x.t().unwrap().contiguous().unwrap().t().unwrap();
        assert!(!between.is_contiguous() && !by_column.is_contiguous());
        for x in [behind, between, by_column] {
            assert_eq!(
                bits(&forward(&layer, &x)),
                want,
                "{stored:?} {:?}",
                x.layout()
            );
        }
    }
}

/// A weight is packed from where it lies as well.
#[test]
fn weights_may_lie_anywhere() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let full = random(54, 40, 70).to_dtype(dtype).unwrap();
        let part = full.narrow(0, 5, 33).unwrap().narrow(1, 3, 64).unwrap();
        let packed = part.contiguous().unwrap();
        let x = random(55, 3, 64);
        let stored = Stored::Dense(dtype);
        assert_eq!(
            bits(&forward(&layer(stored, LinearWeight::Dense(part)), &x)),
            bits(&forward(&layer(stored, LinearWeight::Dense(packed)), &x))
        );
    }
}

#[test]
fn no_rows_give_no_rows() {
    for stored in DENSE.into_iter().chain(BLOCKS) {
        let inp = stored.whole(64);
        let layer = layer(stored, weight(stored, 60, 33, inp).0);
        let x = Tensor::zeros((0, inp), DType::F32, &Device::Cpu).unwrap();
        assert_eq!(layer.forward(&x).unwrap().dims(), [0, 33]);
    }
}

/// Zeros give zeros, in the rows that fill up the last tile of a weight too.
#[test]
fn zeros_give_zeros() {
    for stored in DENSE.into_iter().chain(BLOCKS) {
        let inp = stored.whole(64);
        let layer = layer(stored, weight(stored, 61, 33, inp).0);
        let x = Tensor::zeros((3, inp), DType::F32, &Device::Cpu).unwrap();
        assert_eq!(forward(&layer, &x), vec![vec![0.0; 33]; 3]);
    }
}

#[test]
fn rows_of_another_shape_are_refused() {
    for stored in DENSE.into_iter().chain(BLOCKS) {
        let inp = stored.whole(64);
        let layer = layer(stored, weight(stored, 62, 33, inp).0);
        for shape in [vec![3, 32], vec![3, inp + 1], vec![inp], vec![1, 3, inp]] {
            let x = Tensor::zeros(shape.as_slice(), DType::F32, &Device::Cpu).unwrap();
            match layer.forward(&x) {
                Err(Error::Shape { tensor, got, .. }) => {
                    assert_eq!((tensor.as_str(), got), ("x", shape));
                }
                other => panic!("{stored:?} {shape:?}: {other:?}"),
            }
        }
    }
}

#[test]
fn weights_of_another_shape_are_refused() {
    for shape in [vec![64], vec![2, 32, 64], vec![3, 0]] {
        let dense = Tensor::zeros(shape.as_slice(), DType::F32, &Device::Cpu).unwrap();
        let mut weights = vec![LinearWeight::Dense(dense.clone())];
        if dense.elem_count() > 0 {
            let blocks = QTensor::quantize(&dense, GgmlDType::Q8_0).unwrap();
            weights.push(LinearWeight::Quantized(Arc::new(blocks)));
        }
        for weight in weights {
            match Linear::new(weight, None, DType::F32, &Device::Cpu) {
                Err(Error::Shape { tensor, got, .. }) => {
                    assert_eq!((tensor.as_str(), got), ("weight", shape.clone()));
                }
                other => panic!("{shape:?}: {other:?}"),
            }
        }
    }
}
