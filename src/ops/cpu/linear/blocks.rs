//! Products with GGML's block formats of one scale (and minimum) per 32 weights: integer dot
//! products of rounded activations with the stored integers, scaled and summed in f32.

// Index loops over small constant ranges: they unroll, and the arrays stay in registers.
#![expect(clippy::needless_range_loop)]

use half::f16;

use super::super::simd::Simd;
use super::activations::{Activations, BLOCK};
use super::aligned::Aligned;
use super::dense::AHEAD;
use super::registers::{ByteSimd, ByteTask};
use super::tiles::{Kernel, TILE, Tiles};

/// A stored format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// `scale * quant`, signed bytes.
    Q8_0,
    /// `scale * (quant − 8)`, half-bytes.
    Q4_0,
    /// `scale * quant + minimum`, half-bytes.
    Q4_1,
}

impl Format {
    /// Bytes of a block's quants.
    const fn quant_bytes(self) -> usize {
        match self {
            Self::Q8_0 => BLOCK,
            Self::Q4_0 | Self::Q4_1 => BLOCK / 2,
        }
    }

    const fn has_minimum(self) -> bool {
        matches!(self, Self::Q4_1)
    }

    /// Bytes of a block as GGML stores it: scale, minimum, quants.
    pub(super) const fn block_bytes(self) -> usize {
        2 + 2 * self.has_minimum() as usize + self.quant_bytes()
    }
}

/// A matrix in tiles. A register of quants holds four from each of 16 outputs: byte `j` of
/// output `o` in group `g` is byte `4g + j` of the output's block.
pub(super) struct Blocks {
    format: Format,
    /// Blocks in a row.
    blocks: usize,
    /// `[tiles][blocks][groups][TILE][4]`; Q8_0 plus 128, for products of unsigned bytes.
    quants: Aligned<u8>,
    /// `[tiles][blocks][TILE]`
    scales: Aligned<f16>,
    /// As `scales`, or empty.
    minima: Aligned<f16>,
}

impl Blocks {
    pub(super) fn zeros(format: Format, out: usize, inp: usize) -> Self {
        let blocks = inp / BLOCK;
        let count = out.div_ceil(TILE) * TILE * blocks;
        let minima = if format.has_minimum() { count } else { 0 };
        Self {
            format,
            blocks,
            quants: Aligned::zeros(count * format.quant_bytes()),
            scales: Aligned::zeros(count),
            minima: Aligned::zeros(minima),
        }
    }

    pub(super) fn format(&self) -> Format {
        self.format
    }

    /// GGML's bytes of the outputs from `first` on.
    pub(super) fn fill(&mut self, first: usize, bytes: &[u8]) {
        let stored = self.format.block_bytes();
        let width = self.format.quant_bytes();
        let flip = match self.format {
            Format::Q8_0 => 0x80,
            Format::Q4_0 | Format::Q4_1 => 0,
        };
        for (i, block) in bytes.chunks_exact(stored).enumerate() {
            let (out, block_of_row) = (first + i / self.blocks, i % self.blocks);
            let (at, lane) = (out / TILE * self.blocks + block_of_row, out % TILE);
            let (numbers, quants) = block.split_at(stored - width);
            let number = |i: usize| f16::from_le_bytes([numbers[2 * i], numbers[2 * i + 1]]);
            self.scales[at * TILE + lane] = number(0);
            if self.format.has_minimum() {
                self.minima[at * TILE + lane] = number(1);
            }
            let packed = self.quants[at * TILE * width..].chunks_exact_mut(4);
            for (packed, quants) in packed
                .skip(lane)
                .step_by(TILE)
                .zip(quants.as_chunks::<4>().0)
            {
                packed.copy_from_slice(&quants.map(|quant| quant ^ flip));
            }
        }
    }

    /// The weights `[inp]` of one output.
    pub(super) fn row(&self, out: usize, row: &mut [f32]) {
        let width = self.format.quant_bytes();
        for (block, row) in row.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
            let (at, lane) = (out / TILE * self.blocks + block, out % TILE);
            let scale = self.scales[at * TILE + lane].to_f32();
            let minimum = match self.format {
                Format::Q4_1 => self.minima[at * TILE + lane].to_f32(),
                Format::Q8_0 | Format::Q4_0 => 0.0,
            };
            let packed = &self.quants[at * TILE * width..][..TILE * width];
            let quants = packed.chunks_exact(4).skip(lane).step_by(TILE).flatten();
            for (i, &quant) in quants.enumerate() {
                let [low, high] = [quant & 15, quant >> 4];
                match self.format {
                    Format::Q8_0 => row[i] = f32::from((quant ^ 0x80) as i8) * scale,
                    Format::Q4_0 => {
                        row[i] = (f32::from(low) - 8.0) * scale;
                        row[i + BLOCK / 2] = (f32::from(high) - 8.0) * scale;
                    }
                    Format::Q4_1 => {
                        row[i] = f32::from(low) * scale + minimum;
                        row[i + BLOCK / 2] = f32::from(high) * scale + minimum;
                    }
                }
            }
        }
    }

    fn tile(&self, tile: usize) -> Tile<'_> {
        let len = self.blocks * TILE;
        let width = self.format.quant_bytes();
        Tile {
            quants: &self.quants[tile * len * width..][..len * width],
            scales: &self.scales[tile * len..][..len],
            minima: match self.format {
                Format::Q4_1 => &self.minima[tile * len..][..len],
                Format::Q8_0 | Format::Q4_0 => &[],
            },
        }
    }
}

/// One tile of [`Blocks`].
#[derive(Clone, Copy)]
struct Tile<'a> {
    quants: &'a [u8],
    scales: &'a [f16],
    minima: &'a [f16],
}

impl ByteTask for Tiles<'_, Blocks, Activations> {
    #[inline(always)]
    fn run<S: ByteSimd>(self, simd: S) {
        match self.weight.format {
            Format::Q8_0 => self.run_with::<S, 8, false>(simd, S::BYTE_OFFSET),
            Format::Q4_0 => self.run_with::<S, 4, false>(simd, 8),
            Format::Q4_1 => self.run_with::<S, 4, true>(simd, 0),
        }
    }
}

impl Tiles<'_, Blocks, Activations> {
    #[inline(always)]
    fn run_with<S: ByteSimd, const BITS: usize, const MINIMA: bool>(self, simd: S, offset: i32) {
        let blocks = self.weight.blocks;
        self.compute(simd, self.x.scales.len() / blocks, |number| BlockKernel::<
            BITS,
            MINIMA,
        > {
            tile: self.weight.tile(number),
            x: self.x,
            blocks,
            offset,
        });
    }
}

#[derive(Clone, Copy)]
struct BlockKernel<'a, const BITS: usize, const MINIMA: bool> {
    tile: Tile<'a>,
    x: &'a Activations,
    blocks: usize,
    offset: i32,
}

/// Integers are summed exactly and floats in the order of the blocks.
impl<S: ByteSimd, const BITS: usize, const MINIMA: bool> Kernel<S>
    for BlockKernel<'_, BITS, MINIMA>
{
    #[inline(always)]
    fn outputs<const ROWS: usize>(
        self,
        simd: S,
        row: usize,
        lane: usize,
    ) -> [<S::Floats as Simd>::V; ROWS] {
        let Self {
            tile,
            blocks,
            offset,
            ..
        } = self;
        let x = self.x.rows_at(row, blocks);
        let float = simd.floats();
        let groups = BITS; // Of four bytes each: 32 weights of BITS bits are 4 * BITS bytes.
        let stride = TILE * 4;
        assert!(tile.quants.len() == blocks * groups * stride && lane + S::Floats::LANES <= TILE);
        assert!(tile.scales.len() == blocks * TILE);
        assert!(tile.minima.len() == if MINIMA { blocks * TILE } else { 0 });
        assert!(x.quants.len() >= ROWS * blocks * BLOCK);
        assert!(x.scales.len() >= ROWS * blocks && x.sums.len() >= ROWS * blocks);
        assert!(x.totals.len() >= ROWS * blocks);
        let mut sums = [float.splat(0.0); ROWS];
        for block in 0..blocks {
            // SAFETY: of all loads in this loop: row `r < ROWS` and `block < blocks` of x, `block`
            // and a register from `lane` on of the tile, by the assertions.
            unsafe {
                let mut dots = [simd.splat(0); ROWS];
                if !MINIMA && offset != 0 {
                    for r in 0..ROWS {
                        dots[r] = simd.splat(-offset * *x.sums.get_unchecked(r * blocks + block));
                    }
                }
                let weights = tile.quants.as_ptr().add(block * groups * stride + lane * 4);
                if row == 0 {
                    for g in 0..groups {
                        float.prefetch(weights.wrapping_add(AHEAD + g * stride));
                    }
                }
                let quads = x.quants.as_ptr().add(block * BLOCK);
                let quad = |r: usize, at: usize| -> i32 {
                    quads
                        .add(r * blocks * BLOCK + at)
                        .cast::<i32>()
                        .read_unaligned()
                };
                for g in 0..groups {
                    let bytes = simd.load(weights.add(g * stride));
                    for r in 0..ROWS {
                        dots[r] = if BITS == 8 {
                            simd.dot_bytes(dots[r], bytes, simd.splat(quad(r, 4 * g)))
                        } else {
                            let high = simd.splat(quad(r, 4 * g + BLOCK / 2));
                            simd.dot_nibbles(dots[r], bytes, simd.splat(quad(r, 4 * g)), high)
                        };
                    }
                }
                let at = block * TILE + lane;
                let scale = float.load_f16(tile.scales.as_ptr().add(at));
                for r in 0..ROWS {
                    let x_scale = *x.scales.get_unchecked(r * blocks + block);
                    let both = float.mul(scale, float.splat(x_scale));
                    sums[r] = float.mul_add(simd.to_f32(dots[r]), both, sums[r]);
                }
                if MINIMA {
                    let minimum = float.load_f16(tile.minima.as_ptr().add(at));
                    for r in 0..ROWS {
                        let i = r * blocks + block;
                        let total = *x.totals.get_unchecked(i);
                        sums[r] = float.mul_add(minimum, float.splat(total), sums[r]);
                    }
                }
            }
        }
        sums
    }
}
