//! A model of one's own with a paged cache: one layer of attention in plain candle, of which
//! the cache, the mask and the softmax became one call. `docs/migrate.md` goes through a whole
//! model in the same way.
//!
//! ```text
//! cargo run --release --example custom_model
//! ```

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_nn::{Embedding, Linear, Module, VarBuilder, VarMap};
use candle_paged_attn::PagedAttention;
use candle_paged_attn::cache::{AddOptions, CacheConfig, CacheSpec, Feed, PagedKvCache, StepPlan};

const VOCAB: usize = 32;
const HIDDEN: usize = 32;
const HEADS: usize = 4;
const DIM: usize = HIDDEN / HEADS;

/// A decoder with one layer and no feed-forward network.
struct Tiny {
    embedding: Embedding,
    q: Linear,
    k: Linear,
    v: Linear,
    head: Linear,
    attention: PagedAttention,
}

impl Tiny {
    fn new(vb: &VarBuilder<'_>) -> Result<Self> {
        let linear = |out, name| candle_nn::linear_no_bias(HIDDEN, out, vb.pp(name));
        Ok(Self {
            embedding: candle_nn::embedding(VOCAB, HIDDEN, vb.pp("embedding"))?,
            q: linear(HIDDEN, "q")?,
            k: linear(HIDDEN, "k")?,
            v: linear(HIDDEN, "v")?,
            head: linear(VOCAB, "head")?,
            attention: PagedAttention::new((DIM as f32).powf(-0.5)),
        })
    }

    /// All rows of all sequences of the step side by side: `[rows]` to `[rows, vocab]`. The
    /// plan knows which rows belong together, so there is no batch dimension and no padding.
    fn forward(&self, plan: &StepPlan) -> Result<Tensor> {
        let x = self.embedding.forward(plan.tokens())?;
        let heads = |x: Tensor| x.reshape((plan.num_rows(), HEADS, DIM));
        let q = heads(self.q.forward(&x)?)?;
        let k = heads(self.k.forward(&x)?)?;
        let v = heads(self.v.forward(&x)?)?;
        // What was: append to the cache, repeat the KV heads, mask, softmax, two products.
        let y = self.attention.forward(0, &q, &k, &v, plan)?;
        let y = (x + y.reshape((plan.num_rows(), HIDDEN))?)?;
        Ok(self.head.forward(&y)?)
    }
}

fn main() -> Result<()> {
    let device = Device::Cpu;
    let weights = VarMap::new();
    let model = Tiny::new(&VarBuilder::from_varmap(&weights, DType::F32, &device))?;
    let spec = CacheSpec::uniform(1, HEADS, DIM, DType::F32)?;
    let cache = PagedKvCache::new(&spec, &CacheConfig::blocks(64), &device)?;

    // Two prompts of different lengths in one step, then both decode together.
    let prompts: [&[u32]; 2] = [&[1, 2, 3, 4, 5], &[7, 8]];
    let ids = [
        cache.add(prompts[0], AddOptions::default())?.id,
        cache.add(prompts[1], AddOptions::default())?.id,
    ];
    let mut next = prompts.map(<[u32]>::to_vec);
    for step in 0..6 {
        let feeds = [Feed::new(ids[0], &next[0]), Feed::new(ids[1], &next[1])];
        let plan = cache.plan(&feeds)?;
        let logits = model.forward(&plan)?;
        // Of each sequence the logits of its last row.
        let last = Tensor::new(plan.logit_rows(), &device)?;
        let chosen = logits.index_select(&last, 0)?.argmax(1)?.to_vec1::<u32>()?;
        plan.commit()?;
        println!("step {step}: {chosen:?}");
        next = [vec![chosen[0]], vec![chosen[1]]];
    }
    Ok(())
}
