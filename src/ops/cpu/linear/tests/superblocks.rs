//! The K formats.

use std::borrow::Cow;

use candle_core::Device;
use candle_core::quantized::{GgmlDType, QStorage, QTensor};

use super::*;

const FORMATS: [(SuperFormat, GgmlDType); 3] = [
    (SuperFormat::Q4K, GgmlDType::Q4K),
    (SuperFormat::Q5K, GgmlDType::Q5K),
    (SuperFormat::Q6K, GgmlDType::Q6K),
];

/// One superblock by its definition: weight `i` is
/// `unit * scales[i / span] * (quants[i] − offset) − minimum_unit * minima[i / span]`.
struct Superblock {
    format: SuperFormat,
    unit: f16,
    minimum_unit: f16,
    scales: Vec<i32>,
    minima: Vec<i32>,
    quants: Vec<i32>,
    offset: i32,
}

impl Superblock {
    /// `extreme` ones have the largest numbers that the format holds. Units are 1 if `whole`.
    fn random(rng: &mut StdRng, format: SuperFormat, whole: bool, extreme: bool) -> Self {
        let (bits, span, offset) = match format {
            SuperFormat::Q4K => (4, 32, 0),
            SuperFormat::Q5K => (5, 32, 0),
            SuperFormat::Q6K => (6, 16, 32),
        };
        let spans = SUPER / span;
        let scales = match format {
            SuperFormat::Q6K if extreme => -128..-127,
            SuperFormat::Q6K => -128..128,
            _ if extreme => 63..64,
            _ => 0..64,
        };
        let least = if extreme { (1 << bits) - 1 } else { 0 };
        let unit = |x: f32| if whole { f16::ONE } else { f16::from_f32(x) };
        let minima = match format {
            SuperFormat::Q6K => 0..1,
            _ => 0..64,
        };
        Self {
            format,
            unit: unit(rng.random_range(-0.01..0.01)),
            minimum_unit: unit(rng.random_range(-0.1..0.1)),
            scales: (0..spans)
                .map(|_| rng.random_range(scales.clone()))
                .collect(),
            minima: (0..spans)
                .map(|_| rng.random_range(minima.clone()))
                .collect(),
            quants: (0..SUPER)
                .map(|_| rng.random_range(least..1 << bits))
                .collect(),
            offset,
        }
    }

    /// As GGML stores it.
    fn bytes(&self) -> Vec<u8> {
        let (scales, minima, quants) = (&self.scales, &self.minima, &self.quants);
        let mut bytes = Vec::new();
        if self.format == SuperFormat::Q6K {
            for half in quants.chunks(128) {
                bytes.extend((0..64).map(|i| (half[i] & 15 | (half[64 + i] & 15) << 4) as u8));
            }
            for half in quants.chunks(128) {
                bytes.extend((0..32).map(|i| {
                    let tops = (0..4).map(|k| half[32 * k + i] >> 4 << (2 * k));
                    tops.sum::<i32>() as u8
                }));
            }
            bytes.extend(scales.iter().map(|&scale| scale as i8 as u8));
            bytes.extend(self.unit.to_le_bytes());
            return bytes;
        }
        bytes.extend(self.unit.to_le_bytes());
        bytes.extend(self.minimum_unit.to_le_bytes());
        bytes.extend((0..4).map(|i| (scales[i] | scales[4 + i] >> 4 << 6) as u8));
        bytes.extend((0..4).map(|i| (minima[i] | minima[4 + i] >> 4 << 6) as u8));
        bytes.extend((4..8).map(|i| (scales[i] & 15 | (minima[i] & 15) << 4) as u8));
        if self.format == SuperFormat::Q5K {
            bytes.extend((0..32).map(|i| {
                let tops = (0..8).map(|k| quants[32 * k + i] >> 4 << k);
                tops.sum::<i32>() as u8
            }));
        }
        for pair in quants.chunks(64) {
            bytes.extend((0..32).map(|i| (pair[i] & 15 | (pair[32 + i] & 15) << 4) as u8));
        }
        bytes
    }

    fn span(&self) -> usize {
        SUPER / self.scales.len()
    }

    /// The products with rounded activations less the scale of these, and the sum of the sizes
    /// of what a kernel may compute separately.
    fn dot(&self, x: &[i8]) -> (f64, f64) {
        let (mut products, mut offsets, mut minima) = (0, 0, 0);
        for (i, &x) in x.iter().enumerate() {
            let span = i / self.span();
            products += self.scales[span] * self.quants[i] * i32::from(x);
            offsets += self.scales[span] * self.offset * i32::from(x);
            minima += self.minima[span] * i32::from(x);
        }
        let (unit, minimum_unit) = (f64::from(self.unit), f64::from(self.minimum_unit));
        let parts = [
            unit * f64::from(products),
            -unit * f64::from(offsets),
            -minimum_unit * f64::from(minima),
        ];
        (parts.iter().sum(), parts.iter().map(|x| x.abs()).sum())
    }
}

/// `[out, blocks]`, every fifth of them extreme.
fn random(
    rng: &mut StdRng,
    format: SuperFormat,
    out: usize,
    blocks: usize,
    whole: bool,
) -> (Vec<Superblock>, Superblocks) {
    let matrix: Vec<_> = (0..out * blocks)
        .map(|i| Superblock::random(rng, format, whole, !whole && i % 5 == 4))
        .collect();
    let mut packed = Superblocks::zeros(format, out, blocks * SUPER);
    packed.fill(
        0,
        &matrix
            .iter()
            .flat_map(Superblock::bytes)
            .collect::<Vec<_>>(),
    );
    (matrix, packed)
}

fn rounded(format: SuperFormat, x: &[f32]) -> SuperActivations {
    let mut rounded = SuperActivations::EMPTY;
    match format {
        SuperFormat::Q6K => round_supers::<16>(x, &mut rounded),
        SuperFormat::Q4K | SuperFormat::Q5K => round_supers::<32>(x, &mut rounded),
    }
    rounded
}

fn products(weight: &Superblocks, x: &[f32], rows: usize, out: usize) -> Vec<Vec<f32>> {
    byte_products(weight, &rounded(weight.format(), x), rows, out)
}

/// With units of 1 and rows of small whole numbers all sums are integers that an f32 holds:
/// every instruction set has to give the very integer.
#[test]
fn superblocks_of_whole_numbers_are_exact() {
    let mut rng = StdRng::seed_from_u64(6);
    for (format, _) in FORMATS {
        for out in OUTS {
            for rows in ROWS {
                let blocks = rng.random_range(1..4);
                let (matrix, weight) = random(&mut rng, format, out, blocks, true);
                let mut x: Vec<f32> = (0..rows * blocks * SUPER)
                    .map(|_| rng.random_range(-9..10) as f32)
                    .collect();
                // So that a block is its own rounding, with scale 1.
                x.iter_mut().step_by(SUPER).for_each(|x| *x = 127.0);
                let quants: Vec<i8> = x.iter().map(|&x| x as i8).collect();
                for got in products(&weight, &x, rows, out) {
                    for (i, &got) in got.iter().enumerate() {
                        let weights = matrix[i % out * blocks..][..blocks].iter();
                        let x = quants[i / out * blocks * SUPER..].chunks(SUPER);
                        let want: f64 = weights.zip(x).map(|(w, x)| w.dot(x).0).sum();
                        assert_eq!(f64::from(got), want, "{format:?} {out}, {rows} rows, {i}");
                    }
                }
            }
        }
    }
}

/// Sums within a superblock are exact; each of its two parts has a rounding to f32, one of its
/// scale, and one of the running sum, by half a unit in the last place at most.
#[test]
fn superblocks_are_the_f64_product_of_the_rounded_rows() {
    let mut rng = StdRng::seed_from_u64(7);
    for (format, _) in FORMATS {
        for (out, blocks) in [(1, 1), (17, 2), (33, 3), (50, 6)] {
            let (matrix, weight) = random(&mut rng, format, out, blocks, false);
            for rows in ROWS {
                let mut x: Vec<f32> = (0..rows * blocks * SUPER)
                    .map(|_| rng.random_range(-2.0..2.0))
                    .collect();
                // The largest sums of the row's numbers.
                x[..SUPER].fill(1.5);
                let activations = rounded(format, &x);
                let sets = products(&weight, &x, rows, out);
                for (i, &got) in sets.iter().flat_map(|set| set.iter().enumerate()) {
                    let (mut want, mut size) = (0.0, 0.0);
                    for block in 0..blocks {
                        let at = i / out * blocks + block;
                        let quants = &activations.quants[at * SUPER..][..SUPER];
                        let (dot, parts) = matrix[i % out * blocks + block].dot(quants);
                        let scale = f64::from(activations.scales[at]);
                        want += scale * dot;
                        size += scale * parts;
                    }
                    let bound = 4.0 * blocks as f64 * UNIT * size;
                    let off = (f64::from(got) - want).abs();
                    assert!(off <= bound, "{format:?} {out}x{blocks}, {i}: {got} {want}");
                }
                assert_rows_alone(&sets, rows, |row| {
                    products(
                        &weight,
                        &x[row * blocks * SUPER..][..blocks * SUPER],
                        1,
                        out,
                    )
                });
            }
        }
    }
}

/// What candle reads from the same bytes, to the bit.
#[test]
fn rows_of_superblocks_are_those_of_candle() -> candle_core::Result<()> {
    let mut rng = StdRng::seed_from_u64(8);
    for (format, dtype) in FORMATS {
        let (out, blocks) = (35, 3);
        let (matrix, weight) = random(&mut rng, format, out, blocks, false);
        let bytes: Vec<u8> = matrix.iter().flat_map(Superblock::bytes).collect();
        assert_eq!(bytes.len(), matrix.len() * format.stored_bytes());
        let storage = QStorage::from_data(Cow::Owned(bytes), &Device::Cpu, dtype)?;
        let candle = QTensor::new(storage, (out, blocks * SUPER))?.dequantize(&Device::Cpu)?;
        for (out, want) in candle.to_vec2::<f32>()?.iter().enumerate() {
            let mut row = vec![f32::NAN; blocks * SUPER];
            weight.row(out, &mut row);
            assert_eq!(&row, want, "{format:?}, output {out}");
        }
    }
    Ok(())
}

/// Superblocks rounded by the definition of the format, one element after the other.
#[derive(Clone)]
struct Rounding<'a, const SPAN: usize>(&'a [f32]);

impl<const SPAN: usize> Task for Rounding<'_, SPAN> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let x = self.0;
        let mut got = SuperActivations::EMPTY;
        got.resize(x.len(), SPAN);
        let task = RoundSupers::<SPAN> {
            x,
            quants: &mut got.quants,
            scales: &mut got.scales,
            sums: &mut got.sums,
        };
        task.run(simd);
        for (block, x) in x.chunks(SUPER).enumerate() {
            let largest = x.iter().fold(0f32, |most, x| most.max(x.abs()));
            let inverse = 127.0 / largest;
            let (inverse, scale) = match inverse.is_finite() {
                true => (inverse, 1.0 / inverse),
                false => (0.0, 0.0),
            };
            let quants: Vec<i8> = x.iter().map(|x| (x * inverse).round() as i8).collect();
            assert!(quants.iter().all(|&quant| quant > i8::MIN));
            assert_eq!(got.quants[block * SUPER..][..SUPER], quants);
            assert_eq!(got.scales[block], scale);
            for (i, quants) in quants.chunks(SPAN).enumerate() {
                let sum: i32 = quants.iter().map(|&quant| i32::from(quant)).sum();
                assert_eq!(got.sums[block * (SUPER / SPAN) + i], sum as f32);
            }
        }
    }
}

#[test]
fn rounding_for_superblocks_is_that_of_the_format() {
    let mut rng = StdRng::seed_from_u64(9);
    let mut x: Vec<f32> = (0..60 * SUPER)
        .map(|i| rng.random_range(-1.0..1.0) * ((i / SUPER % 9) as f32).exp2())
        .collect();
    x[..SUPER].fill(0.0);
    // Halves, which go away from zero.
    for (i, x) in x[SUPER..2 * SUPER].iter_mut().enumerate() {
        *x = (i % 250) as f32 - 122.5;
    }
    x[SUPER] = -127.0;
    x[2 * SUPER..3 * SUPER].fill(1e-30);
    x[3 * SUPER..4 * SUPER].fill(-1e-38);
    for isa in Isa::all() {
        isa.run(Rounding::<16>(&x));
        isa.run(Rounding::<32>(&x));
    }
}
