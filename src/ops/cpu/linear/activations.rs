//! Activations rounded to 8 bits, in blocks of 32 or, for the K formats, of 256, as GGML's and
//! candle's products of block formats do.

use half::f16;

use super::super::simd::{Isa, Simd, Task};

/// Elements that share a scale, in weights and in activations.
pub(super) const BLOCK: usize = 32;
/// Elements that share a scale in activations for the K formats.
pub(super) const SUPER: usize = 256;

/// Rounded rows. `value ≈ scale * quant`; no quant is −128.
#[derive(Default)]
pub(super) struct Activations {
    /// `[rows, inp]`
    pub(super) quants: Vec<i8>,
    /// `[rows, blocks]`
    pub(super) scales: Vec<f32>,
    /// The sum of a block's quants, `[rows, blocks]`.
    pub(super) sums: Vec<i32>,
    /// `scale * sum`, what a minimum is multiplied with, `[rows, blocks]`.
    pub(super) totals: Vec<f32>,
}

/// Some rows of [`Activations`], `[rows, ..]`.
#[derive(Clone, Copy)]
pub(super) struct Rounded<'a> {
    pub(super) quants: &'a [i8],
    pub(super) scales: &'a [f32],
    pub(super) sums: &'a [i32],
    pub(super) totals: &'a [f32],
}

impl Activations {
    pub(super) const EMPTY: Self = Self {
        quants: Vec::new(),
        scales: Vec::new(),
        sums: Vec::new(),
        totals: Vec::new(),
    };

    /// Makes room for `elements`, in whole blocks.
    pub(super) fn resize(&mut self, elements: usize) {
        self.quants.resize(elements, 0);
        self.scales.resize(elements / BLOCK, 0.0);
        self.sums.resize(elements / BLOCK, 0);
        self.totals.resize(elements / BLOCK, 0.0);
    }

    /// The rows from `first` on, of `blocks` blocks each.
    #[inline(always)]
    pub(super) fn rows_at(&self, first: usize, blocks: usize) -> Rounded<'_> {
        Rounded {
            quants: &self.quants[first * blocks * BLOCK..],
            scales: &self.scales[first * blocks..],
            sums: &self.sums[first * blocks..],
            totals: &self.totals[first * blocks..],
        }
    }
}

/// Room for whole blocks.
pub(super) struct Room<'a> {
    pub(super) quants: &'a mut [i8],
    pub(super) scales: &'a mut [f32],
    pub(super) sums: &'a mut [i32],
    pub(super) totals: &'a mut [f32],
}

/// Rounds whole blocks.
pub(super) fn round(x: &[f32], room: Room<'_>) {
    Isa::best().run(Round { x, room });
}

pub(super) struct Round<'a> {
    pub(super) x: &'a [f32],
    pub(super) room: Room<'a>,
}

impl Task for Round<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Room {
            quants,
            scales,
            sums,
            totals,
        } = self.room;
        let blocks = self.x.as_chunks::<BLOCK>().0.iter();
        let quants = quants.as_chunks_mut::<BLOCK>().0.iter_mut();
        let numbers = scales.iter_mut().zip(sums).zip(totals);
        for ((x, quants), ((scale, sum), total)) in blocks.zip(quants).zip(numbers) {
            let rounded;
            (*quants, rounded, *sum) = round_block(x);
            *scale = rounded.to_f32();
            *total = (f16::from_f32(*sum as f32) * rounded).to_f32();
        }
    }
}

/// The arithmetic of candle: the scale is applied before it is itself rounded to 16 bits, and
/// its product with the sum is rounded to 16 bits too.
#[inline(always)]
fn round_block(x: &[f32; BLOCK]) -> ([i8; BLOCK], f16, i32) {
    let scale = largest(x) / 127.0;
    // The inverse of a smaller scale is infinite; as a 16-bit float it is 0 anyway.
    let inverse = if scale < f32::MIN_POSITIVE {
        0.0
    } else {
        1.0 / scale
    };
    let (quants, sum) = quantised(x, inverse);
    (quants, f16::from_f32(scale), sum)
}

/// The largest size of an element.
#[inline(always)]
fn largest(x: &[f32]) -> f32 {
    // Lane by lane, or the compiler would keep the order of a single chain.
    let mut largest = [0f32; 8];
    for part in x.as_chunks::<8>().0 {
        for (largest, x) in largest.iter_mut().zip(part) {
            let x = x.abs();
            *largest = if x > *largest { x } else { *largest };
        }
    }
    largest.iter().fold(0f32, |a, &b| if b > a { b } else { a })
}

/// The quants, and their sum.
#[inline(always)]
fn quantised<const N: usize>(x: &[f32; N], inverse: f32) -> ([i8; N], i32) {
    let mut quants = [0i8; N];
    let mut sum = 0;
    for (quant, &x) in quants.iter_mut().zip(x) {
        // Within the range: |x| * inverse is at most 127, give or take its rounding.
        *quant = (x * inverse).round() as i8;
        sum += i32::from(*quant);
    }
    (quants, sum)
}

/// Rows rounded for the K formats. `value ≈ scale * quant`; no quant is −128.
#[derive(Default)]
pub(super) struct SuperActivations {
    /// `[rows, inp]`
    pub(super) quants: Vec<i8>,
    /// `[rows, inp / 256]`
    pub(super) scales: Vec<f32>,
    /// The sums of the quants that one scale of a weight is for, `[rows, inp / span]`.
    pub(super) sums: Vec<f32>,
}

impl SuperActivations {
    pub(super) const EMPTY: Self = Self {
        quants: Vec::new(),
        scales: Vec::new(),
        sums: Vec::new(),
    };

    /// Makes room for `elements`, in whole blocks.
    pub(super) fn resize(&mut self, elements: usize, span: usize) {
        self.quants.resize(elements, 0);
        self.scales.resize(elements / SUPER, 0.0);
        self.sums.resize(elements / span, 0.0);
    }
}

/// Rounds whole blocks of 256, with sums of `SPAN` quants.
pub(super) struct RoundSupers<'a, const SPAN: usize> {
    pub(super) x: &'a [f32],
    pub(super) quants: &'a mut [i8],
    pub(super) scales: &'a mut [f32],
    pub(super) sums: &'a mut [f32],
}

impl<const SPAN: usize> Task for RoundSupers<'_, SPAN> {
    /// The arithmetic of candle, but for signs: it gives scale and quants the other one where the
    /// largest element is positive.
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let blocks = self.x.as_chunks::<SUPER>().0.iter().zip(self.scales);
        let quants = self.quants.as_chunks_mut::<SPAN>().0;
        let quants = quants.chunks_exact_mut(SUPER / SPAN);
        let sums = self.sums.chunks_exact_mut(SUPER / SPAN);
        for (((x, scale), quants), sums) in blocks.zip(quants).zip(sums) {
            let mut inverse = 127.0 / largest(x);
            if inverse == f32::INFINITY {
                // Zeros, or so small that they do not count.
                inverse = 0.0;
                *scale = 0.0;
            } else {
                *scale = 1.0 / inverse;
            }
            let spans = x.as_chunks::<SPAN>().0.iter();
            for ((x, quants), total) in spans.zip(quants).zip(sums) {
                let sum;
                (*quants, sum) = quantised(x, inverse);
                *total = sum as f32;
            }
        }
    }
}
