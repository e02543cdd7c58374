//! The kernels that move rows: write, copy, gather.

use candle_core::{CpuStorage, Layout};
use half::{bf16, f16};

use super::cache::Rows;
use super::element::{self, Element, for_dtype};
use crate::error::Result;
use crate::ops::check::MAX_DIM;

/// Writes source rows to slots (checked: in range or −1).
pub(crate) fn write_rows(
    cache: &mut CpuStorage,
    cache_layout: &Layout,
    rows: &CpuStorage,
    rows_layout: &Layout,
    slots: &[i64],
) -> Result<()> {
    let (cache_dtype, dtype) = (element::dtype(cache), element::dtype(rows));
    if cache_dtype == dtype {
        return for_dtype!(
            dtype,
            copy_rows(cache, cache_layout, rows, rows_layout, slots)
        );
    }
    for_dtype!(
        cache_dtype,
        convert_rows(cache, cache_layout, rows, rows_layout, slots)
    )
}

/// Rows of the cache's own dtype: bits are kept.
fn copy_rows<T: Element>(
    cache: &mut CpuStorage,
    cache_layout: &Layout,
    rows: &CpuStorage,
    rows_layout: &Layout,
    slots: &[i64],
) -> Result<()> {
    let source = element::slice::<T>(rows)?;
    let cache = element::slice_mut::<T>(cache)?;
    each_head(cache_layout, rows_layout, slots, |to, dim, from, stride| {
        let target = &mut cache[to..to + dim];
        if stride == 1 {
            target.copy_from_slice(&source[from..from + dim]);
        } else {
            for (i, x) in target.iter_mut().enumerate() {
                *x = source[from + i * stride];
            }
        }
    })
}

/// Rows of another dtype, through f32.
fn convert_rows<T: Element>(
    cache: &mut CpuStorage,
    cache_layout: &Layout,
    rows: &CpuStorage,
    rows_layout: &Layout,
    slots: &[i64],
) -> Result<()> {
    let cache = element::slice_mut::<T>(cache)?;
    let mut buffer = [0f32; MAX_DIM];
    each_head(cache_layout, rows_layout, slots, |to, dim, from, stride| {
        let wide = &mut buffer[..dim];
        match rows {
            CpuStorage::F16(source) => widen_strided::<f16>(source, from, stride, wide),
            CpuStorage::BF16(source) => widen_strided::<bf16>(source, from, stride, wide),
            CpuStorage::F32(source) => widen_strided::<f32>(source, from, stride, wide),
            // `check::write` lets no other dtype pass.
            _ => wide.fill(f32::NAN),
        }
        T::narrow(wide, &mut cache[to..to + dim]);
    })
}

fn widen_strided<T: Element>(source: &[T], from: usize, stride: usize, wide: &mut [f32]) {
    if stride == 1 {
        T::widen(&source[from..from + wide.len()], wide);
    } else {
        for (i, x) in wide.iter_mut().enumerate() {
            *x = source[from + i * stride].to_f32();
        }
    }
}

/// Calls `f(target offset, dim, source offset, source stride)` for each head of each row that
/// has a slot.
fn each_head(
    cache_layout: &Layout,
    rows_layout: &Layout,
    slots: &[i64],
    mut f: impl FnMut(usize, usize, usize, usize),
) -> Result<()> {
    let target = Rows::of(cache_layout)?;
    let (_, heads, dim) = rows_layout.shape().dims3()?;
    let strides = rows_layout.stride();
    for (row, &slot) in slots.iter().enumerate() {
        let Ok(slot) = usize::try_from(slot) else {
            continue;
        };
        let to = target.slot_offset(slot);
        let from = rows_layout.start_offset() + row * strides[0];
        for head in 0..heads {
            f(to + head * dim, dim, from + head * strides[1], strides[2]);
        }
    }
    Ok(())
}

/// Copies checked block pairs; `late[i]`: an earlier pair overwrites the source of pair `i`.
pub(crate) fn copy_blocks(
    cache: &mut CpuStorage,
    layout: &Layout,
    pairs: &[(u32, u32)],
    late: &[bool],
) -> Result<()> {
    for_dtype!(
        element::dtype(cache),
        copy_typed(cache, layout, pairs, late)
    )
}

fn copy_typed<T: Element>(
    cache: &mut CpuStorage,
    layout: &Layout,
    pairs: &[(u32, u32)],
    late: &[bool],
) -> Result<()> {
    let cache = element::slice_mut::<T>(cache)?;
    let rows = Rows::of(layout)?;
    let len = rows.block_len();
    let at = |block: u32| rows.offset(block as usize, 0);
    let mut saved = Vec::new();
    for (&(from, _), _) in pairs.iter().zip(late).filter(|(_, late)| **late) {
        saved.extend_from_slice(&cache[at(from)..at(from) + len]);
    }
    let mut saved = saved.chunks_exact(len);
    for (&(from, to), &late) in pairs.iter().zip(late) {
        match late.then(|| saved.next()).flatten() {
            Some(block) => cache[at(to)..at(to) + len].copy_from_slice(block),
            None => cache.copy_within(at(from)..at(from) + len, at(to)),
        }
    }
    Ok(())
}

/// The first `tokens` rows of the pages, one after the other.
pub(crate) fn gather(
    cache: &CpuStorage,
    layout: &Layout,
    pages: &[u32],
    tokens: usize,
) -> Result<CpuStorage> {
    for_dtype!(
        element::dtype(cache),
        gather_typed(cache, layout, pages, tokens)
    )
}

fn gather_typed<T: Element>(
    cache: &CpuStorage,
    layout: &Layout,
    pages: &[u32],
    tokens: usize,
) -> Result<CpuStorage> {
    let cache = element::slice::<T>(cache)?;
    let rows = Rows::of(layout)?;
    let want = tokens * rows.row_len();
    let mut out = Vec::with_capacity(want);
    for &page in pages {
        let len = rows.block_len().min(want - out.len());
        let at = rows.offset(page as usize, 0);
        out.extend_from_slice(&cache[at..at + len]);
    }
    Ok(T::storage(out))
}
