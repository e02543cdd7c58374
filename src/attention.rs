//! [`PagedAttention`], the drop-in layer: one call in place of "append to the cache, repeat
//! the KV heads, mask, softmax, matmul".

use candle_core::{DType, Tensor};

use crate::cache::{LayerKv, StepPlan};
use crate::error::{Error, Result};
use crate::ops::{self, AttentionOptions, Mask};

const OP: &str = "paged_attention_layer";

/// Writes a layer's new K/V rows into the cache and attends to everything the sequences hold.
///
/// Holds only options, no state: one value serves all layers of a kind, from any thread. The
/// window is not an option here: it belongs to the layer's group in the
/// [`CacheSpec`](crate::cache::CacheSpec), because blocks behind it are released.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_paged_attn::PagedAttention;
/// use candle_paged_attn::cache::{AddOptions, CacheConfig, CacheSpec, Feed, PagedKvCache};
///
/// # fn main() -> candle_paged_attn::Result<()> {
/// let device = Device::Cpu;
/// // One layer, 2 KV heads of dim 8; 4 query heads.
/// let spec = CacheSpec::uniform(1, 2, 8, DType::F32)?;
/// let cache = PagedKvCache::new(&spec, &CacheConfig::blocks(64), &device)?;
/// let attention = PagedAttention::new(8f32.powf(-0.5));
///
/// let prompt = [1, 2, 3];
/// let sequence = cache.add(&prompt, AddOptions::default())?.id;
/// let plan = cache.plan(&[Feed::new(sequence, &prompt)])?;
/// let q = Tensor::randn(0f32, 1., (3, 4, 8), &device)?;
/// let k = Tensor::randn(0f32, 1., (3, 2, 8), &device)?;
/// let v = Tensor::randn(0f32, 1., (3, 2, 8), &device)?;
/// let out = attention.forward(0, &q, &k, &v, &plan)?;
/// assert_eq!(out.dims(), [3, 4, 8]);
/// plan.commit()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct PagedAttention {
    options: AttentionOptions,
}

impl PagedAttention {
    /// Causal attention with scores `scale * q·k`, usually with `scale = 1 / sqrt(dim)`.
    pub fn new(scale: f32) -> Self {
        Self {
            options: AttentionOptions::new(scale),
        }
    }

    /// Attention with a softcap, ALiBi slopes or sinks. The mask of `options` is replaced by
    /// the window of the layer's group.
    pub fn with_options(options: AttentionOptions) -> Self {
        Self { options }
    }

    /// Writes `k` and `v` into the cache of `layer` and attends with `q`.
    ///
    /// - q `[rows, heads, k_dim]`, k `[rows, kv_heads, k_dim]`, v `[rows, kv_heads, v_dim]`,
    ///   with `plan.num_rows()` rows, gives `[rows, heads, v_dim]`; or
    /// - candle's q `[batch, heads, seq, k_dim]` and k, v `[batch, kv_heads, seq, dim]`, when
    ///   the plan has `batch` feeds of exactly `seq` tokens, gives `[batch, heads, seq, v_dim]`.
    ///
    /// The result has q's dtype. f32, f16 and bf16 are converted where they differ from the
    /// dtype of the cache. Any strides; a copy is made only where the last dimension is not
    /// contiguous, or where a batch of several sequences is not in row order.
    ///
    /// # Errors
    /// [`Error::StalePlan`] if the cache was cleared after the plan was made;
    /// [`Error::Shape`] or another typed error for operands that do not fit. The rows of the
    /// plan may have been written then; no other row of the cache is ever touched.
    pub fn forward(
        &self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        plan: &StepPlan,
    ) -> Result<Tensor> {
        if !matches!(q.dtype(), DType::F32 | DType::F16 | DType::BF16) {
            return Err(Error::Dtype {
                op: OP,
                tensor: "q",
                expected: "F32, F16 or BF16".into(),
                got: q.dtype(),
            });
        }
        let step = plan.layer(layer)?;
        let LayerKv::Dense {
            k: k_cache,
            v: v_cache,
        } = step.kv;
        let [q_rows, k_rows, v_rows] =
            [("q", q), ("k", k), ("v", v)].map(|(name, x)| rows(name, x, plan));
        let (q_rows, k_rows, v_rows) = (q_rows?, k_rows?, v_rows?);
        ops::write_kv(k_cache, v_cache, &k_rows, &v_rows, step.table)?;

        let dtype = q.dtype();
        // The op takes q in the dtype of the cache or in f32.
        let q_rows = if dtype == DType::F32 || dtype == k_cache.dtype() {
            q_rows
        } else {
            q_rows.to_dtype(DType::F32)?
        };
        let mut options = self.options.clone();
        options.mask = Mask::causal(step.window);
        let out = match step.cascade {
            None => ops::paged_attention(&q_rows, k_cache, v_cache, step.table, &options)?,
            Some(cascade) => ops::cascade_attention(&q_rows, k_cache, v_cache, cascade, &options)?,
        }
        .to_dtype(dtype)?;
        match q.dims() {
            &[batch, heads, seq, _] => {
                let dim = out.dim(2)?;
                Ok(out.reshape((batch, seq, heads, dim))?.transpose(1, 2)?)
            }
            _ => Ok(out),
        }
    }
}

/// `[rows, heads, dim]` of an operand in either form.
fn rows(name: &str, x: &Tensor, plan: &StepPlan) -> Result<Tensor> {
    let refuse = |expected: String| Error::Shape {
        op: OP,
        tensor: name.into(),
        expected,
        got: x.dims().to_vec(),
    };
    match *x.dims() {
        [rows, _, _] if rows == plan.num_rows() => Ok(x.clone()),
        [1, _, seq, _] if seq == plan.num_rows() && plan.num_feeds() == 1 => {
            Ok(x.squeeze(0)?.transpose(0, 1)?)
        }
        [batch, heads, seq, dim]
            if batch == plan.num_feeds() && plan.rows_per_feed() == Some(seq) =>
        {
            Ok(x.transpose(1, 2)?.reshape((batch * seq, heads, dim))?)
        }
        [_, _, _, _] => Err(refuse(format!(
            "[batch, heads, seq, dim] with batch = {} feeds of seq = {} tokens each",
            plan.num_feeds(),
            plan.rows_per_feed()
                .map_or("different numbers of".into(), |rows| rows.to_string())
        ))),
        _ => Err(refuse(format!(
            "[rows, heads, dim] with rows = {}",
            plan.num_rows()
        ))),
    }
}
