//! Random batches in a paged cache, blocks in random order.

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_paged_attn::ops::{AttentionOptions, PageTable, paged_attention};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

/// What a batch is like.
#[derive(Clone, Copy)]
pub struct Shape {
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    pub dtype: DType,
    pub block_size: usize,
    pub sequences: usize,
    pub len: usize,
    /// The last tokens of each sequence that are queries.
    pub rows: usize,
}

impl Shape {
    /// One query of each of `sequences` sequences: 32 query and 8 KV heads of dim 128, f32,
    /// blocks of 16.
    pub fn decode(sequences: usize, len: usize) -> Self {
        Self {
            heads: 32,
            kv_heads: 8,
            dim: 128,
            dtype: DType::F32,
            block_size: 16,
            sequences,
            len,
            rows: 1,
        }
    }

    /// The last `rows` queries of one sequence, else as [`Self::decode`].
    pub fn prefill(len: usize, rows: usize) -> Self {
        Self {
            rows,
            ..Self::decode(1, len)
        }
    }

    /// Bytes of K and V that a decode step reads.
    pub fn bytes(&self) -> usize {
        let row = self.kv_heads * self.dim * self.dtype.size_in_bytes();
        2 * self.sequences * self.len * row
    }

    /// Products with K and with V that the mask leaves, in flops.
    pub fn flops(&self) -> f64 {
        let sum = |n: usize| (n * (n + 1) / 2) as f64;
        let pairs = sum(self.len) - sum(self.len - self.rows);
        4.0 * pairs * (self.sequences * self.heads * self.dim) as f64
    }

    pub fn scale(&self) -> f32 {
        1.0 / (self.dim as f32).sqrt()
    }
}

pub struct Batch {
    pub shape: Shape,
    /// `[rows, heads, dim]`
    pub q: Tensor,
    /// `[blocks, block_size, kv_heads, dim]`
    pub k: Tensor,
    pub v: Tensor,
    pub table: PageTable,
    options: AttentionOptions,
}

impl Batch {
    pub fn new(shape: Shape) -> Result<Self> {
        let mut rng = StdRng::seed_from_u64(7);
        let pages = shape.len.div_ceil(shape.block_size);
        let blocks = pages * shape.sequences;
        let mut order: Vec<u32> = (0..blocks as u32).collect();
        order.shuffle(&mut rng);
        let mut table = PageTable::new(shape.block_size)?;
        for pages in order.chunks(pages) {
            table.push(pages, 0, shape.len, &vec![-1; shape.rows])?;
        }
        let cache = (blocks, shape.block_size, shape.kv_heads, shape.dim);
        let rows = shape.rows * shape.sequences;
        Ok(Self {
            q: random((rows, shape.heads, shape.dim), DType::F32, &mut rng)?
                .to_dtype(shape.dtype)?,
            k: random(cache, shape.dtype, &mut rng)?,
            v: random(cache, shape.dtype, &mut rng)?,
            table,
            options: AttentionOptions::new(shape.scale()),
            shape,
        })
    }

    pub fn attend(&self) -> Result<Tensor> {
        Ok(paged_attention(
            &self.q,
            &self.k,
            &self.v,
            &self.table,
            &self.options,
        )?)
    }

    /// K and V of all sequences without pages, `[sequences, len, kv_heads, dim]`.
    pub fn contiguous(&self) -> Result<(Tensor, Tensor)> {
        let s = self.shape;
        let shape = (s.sequences, s.len, s.kv_heads, s.dim);
        let one = |cache: &Tensor| -> Result<Tensor> {
            let pages = Tensor::new(self.table.indices(), &Device::Cpu)?;
            Ok(cache
                .index_select(&pages, 0)?
                .contiguous()?
                .reshape(shape)?)
        };
        Ok((one(&self.k)?, one(&self.v)?))
    }
}

/// Random numbers, of which a few are drawn and repeated: drawing them all takes long.
pub fn random<S: Into<candle_core::Shape>>(
    shape: S,
    dtype: DType,
    rng: &mut StdRng,
) -> Result<Tensor> {
    const DRAWN: usize = 1 << 16;
    let shape = shape.into();
    let drawn: Vec<f32> = (0..DRAWN + 1024)
        .map(|_| rng.random_range(-1.0..1.0))
        .collect();
    let mut data = Vec::with_capacity(shape.elem_count());
    while data.len() < shape.elem_count() {
        let from = rng.random_range(0..DRAWN);
        let n = (shape.elem_count() - data.len()).min(1024);
        data.extend_from_slice(&drawn[from..from + n]);
    }
    Ok(Tensor::from_vec(data, shape, &Device::Cpu)?.to_dtype(dtype)?)
}
