//! Products with GGML's K formats, whose superblocks of 256 weights have an integer scale (and
//! minimum) per span of 16 or 32: everything within a superblock is a sum of integers.

// Index loops over small constant ranges: they unroll, and the arrays stay in registers.
#![expect(clippy::needless_range_loop)]

use half::f16;

use super::super::simd::Simd;
use super::activations::{SUPER, SuperActivations};
use super::aligned::Aligned;
use super::dense::AHEAD;
use super::registers::{ByteSimd, ByteTask};
use super::tiles::{Kernel, TILE, Tiles};

/// A stored format of 256 weights with 16-bit units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SuperFormat {
    /// `unit * scale * quant − minimum unit * minimum`, 4 bits; scales and minima of 6 bits.
    Q4K,
    /// As `Q4K`, 5 bits.
    Q5K,
    /// `unit * scale * (quant − 32)`, 6 bits; scales of 8 bits.
    Q6K,
}

impl SuperFormat {
    /// Bits of a quant above its half-byte.
    const fn tops(self) -> usize {
        match self {
            Self::Q4K => 0,
            Self::Q5K => 1,
            Self::Q6K => 2,
        }
    }

    /// Weights of a scale.
    pub(super) const fn span(self) -> usize {
        span(self.tops())
    }

    const fn has_minima(self) -> bool {
        self.tops() < 2
    }

    /// Bytes of a superblock as GGML stores it.
    pub(super) const fn stored_bytes(self) -> usize {
        match self {
            Self::Q4K => 2 + 2 + 12 + SUPER / 2,
            Self::Q5K => 2 + 2 + 12 + SUPER / 8 + SUPER / 2,
            Self::Q6K => SUPER / 2 + SUPER / 4 + SUPER / 16 + 2,
        }
    }
}

/// Weights of a scale: as many as have their `tops` in one register beside the half-bytes, and
/// 32 at most.
const fn span(tops: usize) -> usize {
    match tops {
        2 => 16,
        _ => 32,
    }
}

/// Registers of a span: one of tops, if any, and its half-bytes, two weights each.
const fn registers(tops: usize) -> usize {
    (tops > 0) as usize + span(tops) / 8
}

/// A superblock taken apart.
struct Superblock {
    quants: [u8; SUPER],
    /// Of a span each.
    scales: [i8; 16],
    minima: [i8; 8],
    unit: f16,
    minimum_unit: f16,
}

impl Superblock {
    fn read(format: SuperFormat, bytes: &[u8]) -> Self {
        match format {
            SuperFormat::Q4K | SuperFormat::Q5K => Self::with_minima(bytes),
            SuperFormat::Q6K => Self::of_six_bits(bytes),
        }
    }

    /// Units, scales and minima, tops of 5 bits, half-bytes.
    fn with_minima(bytes: &[u8]) -> Self {
        let (numbers, rest) = bytes.split_at(2 + 2 + 12);
        let (tops, nibbles) = rest.split_at(rest.len() - SUPER / 2);
        let mut quants = [0; SUPER];
        // Half-bytes are of two spans, the bits of a byte of tops of all eight.
        for (i, quants) in quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let nibbles = &nibbles[i / 2 * 32..];
            for (quant, nibbles) in quants.iter_mut().zip(nibbles) {
                *quant = nibbles >> (i % 2 * 4) & 15;
            }
            for (quant, tops) in quants.iter_mut().zip(tops) {
                *quant |= (tops >> i & 1) << 4;
            }
        }
        // Six bits each: of the last four the upper two lie above those of the first four.
        let packed = &numbers[4..];
        let (mut scales, mut minima) = ([0; 16], [0; 8]);
        for i in 0..4 {
            scales[i] = (packed[i] & 63) as i8;
            minima[i] = (packed[4 + i] & 63) as i8;
            scales[4 + i] = (packed[8 + i] & 15 | packed[i] >> 6 << 4) as i8;
            minima[4 + i] = (packed[8 + i] >> 4 | packed[4 + i] >> 6 << 4) as i8;
        }
        Self {
            quants,
            scales,
            minima,
            unit: f16::from_le_bytes([numbers[0], numbers[1]]),
            minimum_unit: f16::from_le_bytes([numbers[2], numbers[3]]),
        }
    }

    /// Half-bytes, tops, scales, unit.
    fn of_six_bits(bytes: &[u8]) -> Self {
        let (nibbles, rest) = bytes.split_at(SUPER / 2);
        let (tops, rest) = rest.split_at(SUPER / 4);
        let (numbers, unit) = rest.split_at(SUPER / 16);
        let mut quants = [0; SUPER];
        // In each half of the superblock a byte of tops is of four weights 32 apart, a byte of
        // half-bytes of two weights 64 apart.
        for (i, quants) in quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (half, quarter) = (i / 4, i % 4);
            let nibbles = &nibbles[64 * half + 32 * (quarter % 2)..];
            let tops = &tops[32 * half..];
            for (quant, (nibbles, tops)) in quants.iter_mut().zip(nibbles.iter().zip(tops)) {
                *quant = nibbles >> (quarter / 2 * 4) & 15 | (tops >> (2 * quarter) & 3) << 4;
            }
        }
        let mut scales = [0; 16];
        for (scale, &byte) in scales.iter_mut().zip(numbers) {
            *scale = byte as i8;
        }
        Self {
            quants,
            scales,
            minima: [0; 8],
            unit: f16::from_le_bytes([unit[0], unit[1]]),
            minimum_unit: f16::ZERO,
        }
    }
}

/// A matrix in tiles, in as many bits as it was stored with but for the scales and minima of 6
/// bits, which take 8.
pub(super) struct Superblocks {
    format: SuperFormat,
    /// Superblocks in a row.
    blocks: usize,
    /// `[tiles][blocks][spans][registers][TILE][4]`: of each span the tops, if any, then the
    /// half-bytes. Byte `j` of an output in register `g` of these holds weight `4g + j` of the
    /// span in its lower half, and the weight half a span later in its upper one. Byte `j` of
    /// the tops holds those of all these weights, in the order of `g` and the halves.
    quants: Aligned<u8>,
    /// `[tiles][blocks][spans][TILE]`
    scales: Aligned<i8>,
    /// As `scales`, or empty.
    minima: Aligned<i8>,
    /// `[tiles][blocks][TILE]`
    units: Aligned<f16>,
    /// As `units`, or empty.
    minimum_units: Aligned<f16>,
}

impl Superblocks {
    pub(super) fn zeros(format: SuperFormat, out: usize, inp: usize) -> Self {
        let blocks = inp / SUPER;
        let count = out.div_ceil(TILE) * TILE * blocks;
        let spans = count * (SUPER / format.span());
        let of_minima = |len: usize| if format.has_minima() { len } else { 0 };
        Self {
            format,
            blocks,
            quants: Aligned::zeros(spans * registers(format.tops()) * 4),
            scales: Aligned::zeros(spans),
            minima: Aligned::zeros(of_minima(spans)),
            units: Aligned::zeros(count),
            minimum_units: Aligned::zeros(of_minima(count)),
        }
    }

    pub(super) fn format(&self) -> SuperFormat {
        self.format
    }

    /// GGML's bytes of the outputs from `first` on.
    pub(super) fn fill(&mut self, first: usize, bytes: &[u8]) {
        let (tops, span) = (self.format.tops(), self.format.span());
        let width = registers(tops) * 4 * TILE;
        let stored = bytes.chunks_exact(self.format.stored_bytes());
        for (i, bytes) in stored.enumerate() {
            let (out, block_of_row) = (first + i / self.blocks, i % self.blocks);
            let (at, lane) = (out / TILE * self.blocks + block_of_row, out % TILE);
            let block = Superblock::read(self.format, bytes);
            self.units[at * TILE + lane] = block.unit;
            if self.format.has_minima() {
                self.minimum_units[at * TILE + lane] = block.minimum_unit;
            }
            for (i, quants) in block.quants.chunks_exact(span).enumerate() {
                let at = at * (SUPER / span) + i;
                self.scales[at * TILE + lane] = block.scales[i];
                if self.format.has_minima() {
                    self.minima[at * TILE + lane] = block.minima[i];
                }
                let packed = self.quants[at * width..][..width].as_chunks_mut::<4>().0;
                let mut packed = packed.iter_mut().skip(lane).step_by(TILE);
                let top_bytes = if tops > 0 { packed.next() } else { None };
                let (lower, upper) = quants.split_at(span / 2);
                let (lower, upper) = (lower.as_chunks::<4>().0, upper.as_chunks::<4>().0);
                let mut all_tops = [0; 4];
                for (g, (packed, (lower, upper))) in packed.zip(lower.iter().zip(upper)).enumerate()
                {
                    for j in 0..4 {
                        packed[j] = lower[j] & 15 | upper[j] << 4;
                        let both = lower[j] >> 4 | upper[j] >> 4 << tops;
                        all_tops[j] |= both << (2 * tops * g);
                    }
                }
                if let Some(top_bytes) = top_bytes {
                    *top_bytes = all_tops;
                }
            }
        }
    }

    /// The weights `[inp]` of one output.
    pub(super) fn row(&self, out: usize, row: &mut [f32]) {
        let (tops, span) = (self.format.tops(), self.format.span());
        let width = registers(tops) * 4 * TILE;
        let mask = (1 << tops) - 1;
        for (i, row) in row.chunks_exact_mut(span).enumerate() {
            let (block, lane) = (out / TILE * self.blocks + i * span / SUPER, out % TILE);
            let at = out / TILE * self.blocks * (SUPER / span) + i;
            let unit = self.units[block * TILE + lane].to_f32();
            let scale = unit * f32::from(self.scales[at * TILE + lane]);
            let (offset, minimum) = match self.format {
                SuperFormat::Q6K => (32.0, 0.0),
                SuperFormat::Q4K | SuperFormat::Q5K => {
                    let unit = self.minimum_units[block * TILE + lane].to_f32();
                    (0.0, unit * f32::from(self.minima[at * TILE + lane]))
                }
            };
            let packed = self.quants[at * width..][..width].as_chunks::<4>().0;
            let mut packed = packed.iter().skip(lane).step_by(TILE);
            let top_bytes = match tops {
                0 => [0; 4],
                _ => packed.next().copied().unwrap_or_default(),
            };
            for (g, packed) in packed.enumerate() {
                for j in 0..4 {
                    let top = |half: usize| (top_bytes[j] >> (tops * (2 * g + half)) & mask) << 4;
                    let weight = |quant: u8| (f32::from(quant) - offset) * scale - minimum;
                    row[4 * g + j] = weight(packed[j] & 15 | top(0));
                    row[span / 2 + 4 * g + j] = weight(packed[j] >> 4 | top(1));
                }
            }
        }
    }

    fn tile(&self, tile: usize) -> Tile<'_> {
        let len = self.blocks * TILE;
        let spans = len * (SUPER / self.format.span());
        let width = registers(self.format.tops()) * 4;
        let (minima, minimum_units) = match self.format {
            // (quant − 32) * scale is a minimum of 32 scales.
            SuperFormat::Q6K => (&self.scales, &self.units),
            SuperFormat::Q4K | SuperFormat::Q5K => (&self.minima, &self.minimum_units),
        };
        Tile {
            quants: &self.quants[tile * spans * width..][..spans * width],
            scales: &self.scales[tile * spans..][..spans],
            minima: &minima[tile * spans..][..spans],
            units: &self.units[tile * len..][..len],
            minimum_units: &minimum_units[tile * len..][..len],
        }
    }
}

/// One tile of [`Superblocks`].
#[derive(Clone, Copy)]
struct Tile<'a> {
    quants: &'a [u8],
    scales: &'a [i8],
    minima: &'a [i8],
    units: &'a [f16],
    minimum_units: &'a [f16],
}

impl ByteTask for Tiles<'_, Superblocks, SuperActivations> {
    #[inline(always)]
    fn run<S: ByteSimd>(self, simd: S) {
        match self.weight.format {
            SuperFormat::Q4K => self.run_with::<S, 0>(simd, -1.0),
            SuperFormat::Q5K => self.run_with::<S, 1>(simd, -1.0),
            SuperFormat::Q6K => self.run_with::<S, 2>(simd, -32.0),
        }
    }
}

impl Tiles<'_, Superblocks, SuperActivations> {
    #[inline(always)]
    fn run_with<S: ByteSimd, const TOPS: usize>(self, simd: S, minimum_factor: f32) {
        let blocks = self.weight.blocks;
        self.compute(simd, self.x.scales.len() / blocks, |number| SuperKernel::<
            TOPS,
        > {
            tile: self.weight.tile(number),
            x: self.x,
            blocks,
            minimum_factor,
        });
    }
}

#[derive(Clone, Copy)]
struct SuperKernel<'a, const TOPS: usize> {
    tile: Tile<'a>,
    x: &'a SuperActivations,
    blocks: usize,
    /// What minima count.
    minimum_factor: f32,
}

/// Within a superblock all sums are of integers and exact (those of minima as f32, below 2^24);
/// superblocks are summed in their order.
impl<S: ByteSimd, const TOPS: usize> Kernel<S> for SuperKernel<'_, TOPS> {
    #[inline(always)]
    fn outputs<const ROWS: usize>(
        self,
        simd: S,
        row: usize,
        lane: usize,
    ) -> [<S::Floats as Simd>::V; ROWS] {
        let Self { tile, blocks, .. } = self;
        let float = simd.floats();
        let (span, registers, stride) = (span(TOPS), registers(TOPS), TILE * 4);
        let spans = SUPER / span;
        let x_quants = &self.x.quants[row * blocks * SUPER..];
        let x_scales = &self.x.scales[row * blocks..];
        let x_sums = &self.x.sums[row * blocks * spans..];
        assert!(tile.quants.len() == blocks * spans * registers * stride);
        assert!(tile.scales.len() == blocks * spans * TILE);
        assert!(tile.minima.len() == blocks * spans * TILE);
        assert!(tile.units.len() == blocks * TILE && tile.minimum_units.len() == blocks * TILE);
        assert!(lane + S::Floats::LANES <= TILE);
        assert!(x_quants.len() >= ROWS * blocks * SUPER);
        assert!(x_scales.len() >= ROWS * blocks && x_sums.len() >= ROWS * blocks * spans);
        let mut sums = [float.splat(0.0); ROWS];
        for block in 0..blocks {
            // SAFETY: of all loads in this loop: row `r < ROWS` and `block < blocks` of x, `block`
            // and a register from `lane` on of the tile, by the assertions.
            unsafe {
                let mut products = [simd.splat(0); ROWS];
                for at in block * spans..(block + 1) * spans {
                    let mut dots = [simd.splat(0); ROWS];
                    let weights = tile.quants.as_ptr().add(at * registers * stride + lane * 4);
                    let tops = simd.load(weights);
                    let nibbles = weights.add((TOPS > 0) as usize * stride);
                    if row == 0 {
                        for i in 0..registers {
                            float.prefetch(weights.wrapping_add(AHEAD + i * stride));
                        }
                    }
                    let quads = x_quants.as_ptr().add(at * span);
                    for g in 0..span / 8 {
                        let bytes = simd.load(nibbles.add(g * stride));
                        for r in 0..ROWS {
                            let quad = quads.add(r * blocks * SUPER + 4 * g);
                            let low = simd.splat(quad.cast::<i32>().read_unaligned());
                            let quad = quad.add(span / 2);
                            let high = simd.splat(quad.cast::<i32>().read_unaligned());
                            let first = (2 * TOPS * g) as u32;
                            dots[r] = match TOPS {
                                0 => simd.dot_nibbles(dots[r], bytes, low, high),
                                1 => simd.dot_topped::<1>(dots[r], bytes, tops, first, low, high),
                                _ => simd.dot_topped::<2>(dots[r], bytes, tops, first, low, high),
                            };
                        }
                    }
                    let scale = simd.load_i8(tile.scales.as_ptr().add(at * TILE + lane));
                    for r in 0..ROWS {
                        products[r] = simd.mul_add(dots[r], scale, products[r]);
                    }
                }
                let mut shifts = [float.splat(0.0); ROWS];
                for at in block * spans..(block + 1) * spans {
                    let minimum = simd.load_i8(tile.minima.as_ptr().add(at * TILE + lane));
                    let minimum = simd.to_f32(minimum);
                    for r in 0..ROWS {
                        let sum = float.splat(*x_sums.get_unchecked(r * blocks * spans + at));
                        shifts[r] = float.mul_add(minimum, sum, shifts[r]);
                    }
                }
                let at = block * TILE + lane;
                let unit = float.load_f16(tile.units.as_ptr().add(at));
                let minimum_unit = float.load_f16(tile.minimum_units.as_ptr().add(at));
                let minimum_unit = float.mul(minimum_unit, float.splat(self.minimum_factor));
                for r in 0..ROWS {
                    let scale = float.splat(*x_scales.get_unchecked(r * blocks + block));
                    let product = simd.to_f32(products[r]);
                    sums[r] = float.mul_add(product, float.mul(unit, scale), sums[r]);
                    let minimum = float.mul(minimum_unit, scale);
                    sums[r] = float.mul_add(shifts[r], minimum, sums[r]);
                }
            }
        }
        sums
    }
}
