//! The whole attention, both kernels, on every instruction set that the machine has, against
//! the ops made of candle's own: the public op runs the widest only.

use candle_core::{CpuStorage, DType, Device, Storage, Tensor, bail};

use super::attention::attention_on;
use super::simd::Isa;
use crate::error::Result;
use crate::ops::{AttentionOptions, PageTable, portable};

const BLOCK: usize = 8;
/// Context and rows of each sequence: a decode of one token and of a context in several chunks,
/// few rows, a whole prompt, and the last rows of a longer one.
const SEQUENCES: [(usize, usize); 5] = [(1, 1), (613, 1), (37, 3), (70, 70), (300, 41)];

fn numbers(len: usize, seed: usize) -> Vec<f32> {
    (0..len)
        .map(|i| (((i + seed) * 7919) % 2003) as f32 / 1001.0 - 1.0)
        .collect()
}

/// A table of the sequences with their blocks in no order, and the number of blocks.
fn table(sequences: &[(usize, usize)]) -> Result<(PageTable, usize)> {
    let pages: Vec<usize> = sequences
        .iter()
        .map(|(len, _)| len.div_ceil(BLOCK))
        .collect();
    let blocks = pages.iter().sum::<usize>().next_multiple_of(2) + 1;
    let mut order = (0..blocks).map(|i| ((i * 2 + 1) % blocks) as u32);
    let mut table = PageTable::new(BLOCK)?;
    for (&(len, rows), pages) in sequences.iter().zip(pages) {
        let pages: Vec<u32> = order.by_ref().take(pages).collect();
        table.push(&pages, 0, len, &vec![-1; rows])?;
    }
    Ok((table, blocks))
}

/// The elements of a tensor on the CPU.
fn elements(tensor: &Tensor) -> candle_core::Result<CpuStorage> {
    match &*tensor.storage_and_layout().0 {
        Storage::Cpu(storage) => Ok(storage.clone()),
        _ => bail!("not on the CPU"),
    }
}

fn check(
    sequences: &[(usize, usize)],
    heads: usize,
    kv_heads: usize,
    dim: usize,
    dtype: DType,
    options: &AttentionOptions,
) -> Result<()> {
    let (table, blocks) = table(sequences)?;
    let tensor = |shape: &[usize], seed| {
        let data = numbers(shape.iter().product(), seed);
        Tensor::from_vec(data, shape, &Device::Cpu)
    };
    let q = (tensor(&[table.num_rows(), heads, dim], 1)? * 3.0)?;
    let cache = |seed| tensor(&[blocks, BLOCK, kv_heads, dim], seed)?.to_dtype(dtype);
    let (k, v) = (cache(2)?, cache(3)?);
    let want = portable::paged_attention(&q, &k, &v, &table, options)?;
    let want: Vec<f32> = want.flatten_all()?.to_vec1()?;
    let stored = [elements(&q)?, elements(&k)?, elements(&v)?];
    let layouts = [q.layout(), k.layout(), v.layout()];
    for isa in Isa::all() {
        let [q, k, v] = [0, 1, 2].map(|i| (&stored[i], layouts[i]));
        let got = attention_on(isa, q, k, v, &table, options, false)?;
        let got = got.as_slice::<f32>()?;
        for (row, (got, want)) in got.chunks(dim).zip(want.chunks(dim)).enumerate() {
            let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
            let wide = |x: &f32| f64::from(*x);
            let off = norm(&mut got.iter().zip(want).map(|(a, b)| wide(a) - wide(b)));
            let size = norm(&mut want.iter().map(wide));
            assert!(
                off <= 1e-5 * size,
                "{isa:?}, {heads}/{kv_heads} heads of {dim}, {dtype:?}, row {row}: {off} of {size}"
            );
        }
    }
    Ok(())
}

#[test]
fn every_dim_group_and_dtype() -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (heads, kv_heads, dim) in [
            (1, 1, 8),
            (9, 3, 64),
            (5, 1, 24),
            (8, 1, 80),
            (4, 4, 40),
            (14, 2, 120),
            (8, 2, 128),
        ] {
            let options = AttentionOptions::new(1.0 / (dim as f32).sqrt());
            check(&SEQUENCES, heads, kv_heads, dim, dtype, &options)?;
        }
    }
    Ok(())
}

/// From one block of registers to several, with idle lanes and without.
#[test]
fn every_number_of_matrix_rows() -> Result<()> {
    let sequences: Vec<_> = (30..=66).map(|rows| (rows + 90, rows)).collect();
    let options = AttentionOptions::new(0.2);
    check(&sequences, 1, 1, 24, DType::F32, &options)?;
    check(&sequences, 6, 2, 40, DType::BF16, &options.with_window(31))
}

#[test]
fn every_option() -> Result<()> {
    let slopes = |heads: usize| -> Vec<f32> { (1..=heads).map(|i| 0.02 * i as f32).collect() };
    let plain = AttentionOptions::new(0.125);
    for options in [
        plain.clone().with_window(19),
        plain.clone().with_softcap(1.5),
        plain.clone().with_alibi_slopes(slopes(6)),
        plain.clone().with_sinks(slopes(6)),
        plain
            .with_window(50)
            .with_softcap(2.0)
            .with_alibi_slopes(slopes(6))
            .with_sinks(slopes(6)),
    ] {
        check(&SEQUENCES, 6, 2, 64, DType::F32, &options)?;
        check(&SEQUENCES, 6, 2, 64, DType::BF16, &options)?;
    }
    Ok(())
}
