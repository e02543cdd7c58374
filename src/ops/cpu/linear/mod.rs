//! Products with a weight matrix that was repacked once, at load, in the order in which the
//! kernels read it.
//!
//! A weight is cut into tiles of a few outputs, and a tile is read from front to back for
//! every block of rows: a single row streams the weights at the speed of memory, and many rows
//! find a tile in the cache. `dense` multiplies floats, `blocks` and `superblocks` GGML's
//! integers, each in one kernel for any number of rows.

mod activations;
mod aligned;
mod blocks;
mod dense;
mod registers;
mod superblocks;
#[cfg(test)]
mod tests;
mod tiles;

use std::cell::Cell;
use std::mem::MaybeUninit;
use std::ops::Range;

use half::{bf16, f16};

use super::attention::in_parallel;
use super::disjoint::Disjoint;
use super::element::Element;
use super::simd::Isa;
use activations::{Activations, BLOCK, Room, RoundSupers, SUPER, SuperActivations};
use aligned::Plain;
use blocks::Blocks;
use dense::{Dense, DenseTiles};
use registers::ByteTask;
use superblocks::Superblocks;
use tiles::Tiles;

pub(crate) use blocks::Format;
pub(crate) use superblocks::SuperFormat;

/// A weight matrix in tiles.
pub(crate) struct Packed {
    out: usize,
    inp: usize,
    weight: Weight,
}

enum Weight {
    F32(Dense<f32>),
    F16(Dense<f16>),
    BF16(Dense<bf16>),
    Blocks(Blocks),
    Superblocks(Superblocks),
}

/// Rows of a matrix to be packed, as they are stored.
#[derive(Clone, Copy)]
pub(crate) enum Stored<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
    /// Blocks of GGML, row by row.
    Blocks(Format, &'a [u8]),
    /// As `Blocks`, of a K format.
    Superblocks(SuperFormat, &'a [u8]),
}

impl Packed {
    /// Packs matrices of one kind, one above the other, `[out, inp]` in all. `None` if their
    /// kinds or sizes do not allow it.
    pub(crate) fn new(parts: &[Stored<'_>], out: usize, inp: usize) -> Option<Self> {
        let weight = match parts.first()? {
            Stored::F32(_) => Weight::F32(Dense::zeros(out, inp)),
            Stored::F16(_) => Weight::F16(Dense::zeros(out, inp)),
            Stored::BF16(_) => Weight::BF16(Dense::zeros(out, inp)),
            Stored::Blocks(format, _) if inp.is_multiple_of(BLOCK) => {
                Weight::Blocks(Blocks::zeros(*format, out, inp))
            }
            Stored::Superblocks(format, _) if inp.is_multiple_of(SUPER) => {
                Weight::Superblocks(Superblocks::zeros(*format, out, inp))
            }
            Stored::Blocks(..) | Stored::Superblocks(..) => return None,
        };
        let mut packed = Self { out, inp, weight };
        let mut first = 0;
        for part in parts {
            first += packed.fill(first, *part)?;
        }
        (first == out).then_some(packed)
    }

    /// Packs the rows of a part and answers how many there were.
    fn fill(&mut self, first: usize, part: Stored<'_>) -> Option<usize> {
        let (inp, room) = (self.inp, self.out - first);
        let rows = |elements: usize, per_row: usize| {
            let whole = per_row > 0 && elements.is_multiple_of(per_row);
            let rows = elements / per_row.max(1);
            (whole && rows <= room).then_some(rows)
        };
        Some(match (&mut self.weight, part) {
            (Weight::F32(dense), Stored::F32(x)) => {
                let rows = rows(x.len(), inp)?;
                dense.fill(first, x);
                rows
            }
            (Weight::F16(dense), Stored::F16(x)) => {
                let rows = rows(x.len(), inp)?;
                dense.fill(first, x);
                rows
            }
            (Weight::BF16(dense), Stored::BF16(x)) => {
                let rows = rows(x.len(), inp)?;
                dense.fill(first, x);
                rows
            }
            (Weight::Blocks(blocks), Stored::Blocks(format, x)) if format == blocks.format() => {
                let rows = rows(x.len(), inp / BLOCK * format.block_bytes())?;
                blocks.fill(first, x);
                rows
            }
            (Weight::Superblocks(blocks), Stored::Superblocks(format, x))
                if format == blocks.format() =>
            {
                let rows = rows(x.len(), inp / SUPER * format.stored_bytes())?;
                blocks.fill(first, x);
                rows
            }
            _ => return None,
        })
    }

    pub(crate) fn out(&self) -> usize {
        self.out
    }

    pub(crate) fn inp(&self) -> usize {
        self.inp
    }

    /// The weights `[inp]` of output `out`, which is in range.
    pub(crate) fn row(&self, out: usize, row: &mut [f32]) {
        match &self.weight {
            Weight::F32(dense) => dense.row(out, row),
            Weight::F16(dense) => dense.row(out, row),
            Weight::BF16(dense) => dense.row(out, row),
            Weight::Blocks(blocks) => blocks.row(out, row),
            Weight::Superblocks(blocks) => blocks.row(out, row),
        }
    }

    /// `x @ weightᵀ` of x `[rows, inp]`, on the threads of the current pool.
    pub(crate) fn product(&self, x: &[f32]) -> Vec<f32> {
        let rows = x.len() / self.inp;
        let mut out = Vec::with_capacity(rows * self.out);
        if rows * self.out == 0 {
            return out;
        }
        self.product_to(
            x,
            Out::new(&mut out.spare_capacity_mut()[..rows * self.out], self.out),
        );
        // SAFETY: every tile wrote its columns of every row, and together they are all.
        unsafe { out.set_len(rows * self.out) };
        out
    }

    fn product_to(&self, x: &[f32], out: Out<'_>) {
        match &self.weight {
            Weight::F32(weight) => dense_product(weight, x, out),
            Weight::F16(weight) => dense_product(weight, x, out),
            Weight::BF16(weight) => dense_product(weight, x, out),
            Weight::Blocks(weight) => block_product(weight, x, out),
            Weight::Superblocks(weight) => super_product(weight, x, out),
        }
    }
}

fn dense_product<T: Element + Plain>(weight: &Dense<T>, x: &[f32], out: Out<'_>) {
    let tiles = out.width.div_ceil(dense::TILE);
    in_ranges(tiles, x.len() * dense::TILE, |tiles| {
        Isa::best().run(DenseTiles {
            weight,
            tiles,
            x,
            out,
        });
    });
}

thread_local! {
    /// Rounded activations, kept for the next call of this thread. Taken out while in use: a
    /// thread that waits for its tasks may start another call.
    static ROUNDED: Cell<Activations> = const { Cell::new(Activations::EMPTY) };
    /// The same for the K formats.
    static SUPER_ROUNDED: Cell<SuperActivations> = const { Cell::new(SuperActivations::EMPTY) };
}

fn block_product(weight: &Blocks, x: &[f32], out: Out<'_>) {
    let mut rounded = ROUNDED.take();
    rounded.resize(x.len());
    {
        let quants = Disjoint::new(&mut rounded.quants);
        let scales = Disjoint::new(&mut rounded.scales);
        let sums = Disjoint::new(&mut rounded.sums);
        let totals = Disjoint::new(&mut rounded.totals);
        in_ranges(x.len() / BLOCK, 8 * BLOCK, |blocks| {
            let elements = blocks.start * BLOCK..blocks.end * BLOCK;
            // SAFETY: `in_ranges` gives out each block once.
            let room = unsafe {
                Room {
                    quants: quants.part(elements.clone()),
                    scales: scales.part(blocks.clone()),
                    sums: sums.part(blocks.clone()),
                    totals: totals.part(blocks),
                }
            };
            activations::round(&x[elements], room);
        });
    }
    byte_product(weight, &rounded, x.len(), out);
    ROUNDED.set(rounded);
}

fn super_product(weight: &Superblocks, x: &[f32], out: Out<'_>) {
    let mut rounded = SUPER_ROUNDED.take();
    match weight.format().span() {
        16 => round_supers::<16>(x, &mut rounded),
        _ => round_supers::<32>(x, &mut rounded),
    }
    byte_product(weight, &rounded, x.len(), out);
    SUPER_ROUNDED.set(rounded);
}

/// The product with `elements` rounded activations.
fn byte_product<W: Sync, X: Sync>(weight: &W, x: &X, elements: usize, out: Out<'_>)
where
    for<'a> Tiles<'a, W, X>: ByteTask,
{
    let tiles = out.width.div_ceil(tiles::TILE);
    in_ranges(tiles, elements * tiles::TILE, |tiles| {
        registers::dispatch(Tiles {
            weight,
            tiles,
            x,
            out,
        });
    });
}

fn round_supers<const SPAN: usize>(x: &[f32], rounded: &mut SuperActivations) {
    rounded.resize(x.len(), SPAN);
    let quants = Disjoint::new(&mut rounded.quants);
    let scales = Disjoint::new(&mut rounded.scales);
    let sums = Disjoint::new(&mut rounded.sums);
    in_ranges(x.len() / SUPER, 8 * SUPER, |blocks| {
        let elements = blocks.start * SUPER..blocks.end * SUPER;
        // SAFETY: `in_ranges` gives out each block once.
        let task = unsafe {
            RoundSupers::<SPAN> {
                x: &x[elements.clone()],
                quants: quants.part(elements.clone()),
                scales: scales.part(blocks),
                sums: sums.part(elements.start / SPAN..elements.end / SPAN),
            }
        };
        Isa::best().run(task);
    });
}

/// Products of a range at least, or handing it to another thread costs more than it saves.
const WORTH_A_THREAD: usize = 1 << 16;
/// Ranges per thread at most: a thread that is held up then leaves some to the others.
const RANGES_PER_THREAD: usize = 4;

/// Cuts `0..n`, items of `work` products each, into ranges and calls `f` with each of them, on
/// the current pool.
fn in_ranges(n: usize, work: usize, f: impl Fn(Range<usize>) + Sync) {
    let most = rayon::current_num_threads() * RANGES_PER_THREAD;
    let ranges = (n.saturating_mul(work) / WORTH_A_THREAD).clamp(1, most);
    let step = n.div_ceil(ranges);
    in_parallel(n.div_ceil(step.max(1)), |i| {
        f(i * step..n.min((i + 1) * step));
    });
}

/// The result, `[rows, width]`, of which every tile writes its own columns.
#[derive(Clone, Copy)]
struct Out<'a> {
    data: Disjoint<'a, MaybeUninit<f32>>,
    width: usize,
}

impl<'a> Out<'a> {
    fn new(data: &'a mut [MaybeUninit<f32>], width: usize) -> Self {
        Self {
            data: Disjoint::new(data),
            width,
        }
    }

    /// Writes the outputs of a tile from `column` on, as far as there are columns.
    ///
    /// # Safety
    /// Nobody else writes these columns at the same time.
    #[inline(always)]
    unsafe fn write(&self, row: usize, column: usize, values: &[f32]) {
        let len = values.len().min(self.width - column);
        let start = row * self.width + column;
        // SAFETY: the caller's promise.
        let part = unsafe { self.data.part(start..start + len) };
        part.write_copy_of_slice(&values[..len]);
    }
}
