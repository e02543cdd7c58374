//! A toy model whose K/V rows tell what they are rows of.

use candle_core::Tensor;
use candle_paged_attn::cache::{LayerKv, PagedKvCache, SequenceId, StepPlan};
use candle_paged_attn::ops::{self, PageTable};

/// A sequence of the toy model: its last `new` tokens are fed in this step.
pub struct Toy {
    pub seed: u8,
    pub tokens: Vec<u32>,
    pub new: usize,
}

impl Toy {
    /// The K and V rows of `layer` from position `from` on: each depends on the seed, the
    /// layer and every token up to its own.
    pub fn rows(&self, layer: usize, from: usize) -> Vec<(Vec<f32>, Vec<f32>)> {
        let mut hash = 0xcbf2_9ce4_8422_2325u64 ^ ((u64::from(self.seed) << 32) | layer as u64);
        let rows = self.tokens.iter().map(|&token| {
            hash = (hash ^ u64::from(token))
                .wrapping_mul(0x0000_0100_0000_01b3)
                .rotate_left(23);
            // 24 bits are exact in f32.
            let base = (hash >> 40) as f32;
            (vec![base; 8], vec![-base; 16])
        });
        rows.skip(from).collect()
    }
}

/// The K/V tensors of a layer.
pub fn tensors(cache: &PagedKvCache, layer: usize) -> (Tensor, Tensor) {
    match cache.layer_kv(layer).unwrap() {
        LayerKv::Dense { k, v } => (k.clone(), v.clone()),
        other => panic!("{other:?}"),
    }
}

/// Fills the whole pool with NaN.
pub fn poison(cache: &PagedKvCache) {
    for layer in 0..cache.spec().num_layers() {
        let (k, v) = tensors(cache, layer);
        for x in [k, v] {
            let nan = Tensor::full(f32::NAN, x.shape(), x.device())
                .unwrap()
                .to_dtype(x.dtype())
                .unwrap();
            x.slice_set(&nan, 0, 0).unwrap();
        }
    }
}

/// What a forward pass does: writes the rows of the fed tokens in every layer.
pub fn write_step(plan: &StepPlan, cache: &PagedKvCache, feeds: &[Toy]) {
    for layer in 0..cache.spec().num_layers() {
        let rows: Vec<_> = feeds
            .iter()
            .flat_map(|toy| toy.rows(layer, toy.tokens.len() - toy.new))
            .collect();
        let matrix = |rows: Vec<&Vec<f32>>| {
            let (n, dim) = (rows.len(), rows[0].len());
            let flat: Vec<f32> = rows.into_iter().flatten().copied().collect();
            Tensor::from_vec(flat, (n, 1, dim), cache.device()).unwrap()
        };
        let k = matrix(rows.iter().map(|(k, _)| k).collect());
        let v = matrix(rows.iter().map(|(_, v)| v).collect());
        let step = plan.layer(layer).unwrap();
        let LayerKv::Dense {
            k: k_cache,
            v: v_cache,
        } = step.kv
        else {
            panic!("dense layers only")
        };
        ops::write_kv(k_cache, v_cache, &k, &v, step.table).unwrap();
    }
}

/// The K and V rows that the cache holds for a sequence, from its first held block on.
pub fn stored_rows(
    cache: &PagedKvCache,
    id: SequenceId,
    layer: usize,
) -> Vec<(Vec<f32>, Vec<f32>)> {
    let group = cache
        .spec()
        .groups
        .iter()
        .position(|g| g.layers.contains(&layer))
        .unwrap();
    let (first, pages) = cache.block_table(id, group).unwrap();
    let len = cache.len(id).unwrap();
    if pages.is_empty() {
        return vec![];
    }
    let mut table = PageTable::new(cache.block_size()).unwrap();
    table.push(&pages, first as u32, len, &[]).unwrap();
    let (k, v) = tensors(cache, layer);
    let (k, v) = ops::gather_kv(&k, &v, &table, 0).unwrap();
    let rows = |x: Tensor| x.squeeze(1).unwrap().to_vec2::<f32>().unwrap();
    rows(k).into_iter().zip(rows(v)).collect()
}
