//! Random batches in a paged cache whose unused memory is poisoned.

use candle_core::{DType, Device, Tensor};
use candle_paged_attn::ops::{
    AttentionOptions, AttnState, PageTable, paged_attention, paged_attention_state, portable,
};

use super::Rng;
use super::reference::{Answer, Dims, Rules, reference};

/// One sequence of a batch: context length, and how many of its last tokens are queries.
#[derive(Clone, Copy)]
pub struct Shape {
    pub len: usize,
    pub rows: usize,
}

pub fn shapes(list: &[(usize, usize)]) -> Vec<Shape> {
    list.iter()
        .map(|&(len, rows)| Shape { len, rows })
        .collect()
}

#[derive(Clone)]
pub struct Setup {
    pub dims: Dims,
    pub block_size: usize,
    pub cache_dtype: DType,
    pub q_dtype: DType,
    pub seqs: Vec<Shape>,
    /// Pages behind this window are not listed (and hold poison).
    pub release_behind: Option<usize>,
    pub seed: u64,
    /// Fills every slot that no sequence uses.
    pub poison: f64,
    /// Standard deviation of the scores at scale `1/sqrt(k_dim)`: about 5 puts most of the
    /// weight of many rows on one key.
    pub spread: f64,
}

impl Setup {
    pub fn new(heads: usize, kv_heads: usize, dim: usize, seqs: &[(usize, usize)]) -> Self {
        Self {
            dims: Dims {
                heads,
                kv_heads,
                k_dim: dim,
                v_dim: dim,
            },
            block_size: 16,
            cache_dtype: DType::F32,
            q_dtype: DType::F32,
            seqs: shapes(seqs),
            release_behind: None,
            seed: 1,
            poison: f64::NAN,
            spread: 5.0,
        }
    }

    pub fn build(&self) -> Batch {
        let mut rng = Rng(self.seed);
        let d = self.dims;
        let seqs = self
            .seqs
            .iter()
            .map(|&shape| {
                let mut normal = |n: usize, amplitude: f64, dtype: DType| -> Vec<f64> {
                    (0..n)
                        .map(|_| round(rng.normal() * amplitude, dtype))
                        .collect()
                };
                Dense {
                    shape,
                    q: normal(shape.rows * d.heads * d.k_dim, self.spread, self.q_dtype),
                    k: normal(shape.len * d.kv_heads * d.k_dim, 1.0, self.cache_dtype),
                    v: normal(shape.len * d.kv_heads * d.v_dim, 1.0, self.cache_dtype),
                }
            })
            .collect();
        Batch::place(self, seqs, self.seed ^ 0xabcd)
    }
}

/// A sequence as plain vectors, rounded to the dtypes of the tensors.
#[derive(Clone)]
pub struct Dense {
    pub shape: Shape,
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
}

pub struct Batch {
    pub setup: Setup,
    pub seqs: Vec<Dense>,
    pub q: Tensor,
    pub k_cache: Tensor,
    pub v_cache: Tensor,
    pub table: PageTable,
}

impl Batch {
    /// Puts sequences into shuffled pages of a fresh, poisoned cache. Slots of the query rows
    /// are those of their tokens.
    pub fn place(setup: &Setup, seqs: Vec<Dense>, seed: u64) -> Self {
        let (d, bs) = (setup.dims, setup.block_size);
        let mut rng = Rng(seed);
        let pages: usize = seqs.iter().map(|s| s.shape.len.div_ceil(bs)).sum();
        // A few blocks that nobody owns, too.
        let blocks = pages + 3;
        let mut order: Vec<u32> = (0..blocks as u32).collect();
        rng.shuffle(&mut order);
        let mut k = vec![setup.poison; blocks * bs * d.kv_heads * d.k_dim];
        let mut v = vec![setup.poison; blocks * bs * d.kv_heads * d.v_dim];
        let mut table = PageTable::new(bs).unwrap();
        let mut q = Vec::new();
        let mut taken = 0;
        for seq in &seqs {
            let Shape { len, rows } = seq.shape;
            let mine = &order[taken..taken + len.div_ceil(bs)];
            taken += mine.len();
            let first_seen = match setup.release_behind {
                Some(window) => (len.saturating_sub(rows) + 1).saturating_sub(window),
                None => 0,
            };
            let first_page = (first_seen / bs).min(mine.len());
            let slot = |t: usize| mine[t / bs] as usize * bs + t % bs;
            for t in first_page * bs..len {
                let (kr, vr) = (d.kv_heads * d.k_dim, d.kv_heads * d.v_dim);
                k[slot(t) * kr..][..kr].copy_from_slice(&seq.k[t * kr..][..kr]);
                v[slot(t) * vr..][..vr].copy_from_slice(&seq.v[t * vr..][..vr]);
            }
            let slots: Vec<i64> = (0..rows)
                .map(|i| match (len + i).checked_sub(rows) {
                    Some(t) => slot(t) as i64,
                    None => -1,
                })
                .collect();
            table
                .push(&mine[first_page..], first_page as u32, len, &slots)
                .unwrap();
            q.extend_from_slice(&seq.q);
        }
        let rows = table.num_rows();
        Self {
            q: tensor(&q, &[rows, d.heads, d.k_dim], setup.q_dtype),
            k_cache: tensor(&k, &[blocks, bs, d.kv_heads, d.k_dim], setup.cache_dtype),
            v_cache: tensor(&v, &[blocks, bs, d.kv_heads, d.v_dim], setup.cache_dtype),
            setup: setup.clone(),
            seqs,
            table,
        }
    }

    /// The scale that goes with [`Setup::spread`].
    pub fn scale(&self) -> f32 {
        1.0 / (self.setup.dims.k_dim as f32).sqrt()
    }

    pub fn options(&self) -> AttentionOptions {
        AttentionOptions::new(self.scale())
    }

    pub fn reference(&self, options: &AttentionOptions) -> Answer {
        let rules = rules(options);
        let mut all = Answer {
            out: Vec::new(),
            lse: Vec::new(),
            top: Vec::new(),
        };
        for seq in &self.seqs {
            let one = reference(&seq.q, &seq.k, &seq.v, self.setup.dims, &rules);
            all.out.extend(one.out);
            all.lse.extend(one.lse);
            all.top.extend(one.top);
        }
        all
    }

    pub fn attention(&self, options: &AttentionOptions) -> Tensor {
        paged_attention(&self.q, &self.k_cache, &self.v_cache, &self.table, options).unwrap()
    }

    pub fn state(&self, options: &AttentionOptions) -> AttnState {
        paged_attention_state(&self.q, &self.k_cache, &self.v_cache, &self.table, options).unwrap()
    }

    /// Kernel and portable op, output and state, against the reference.
    pub fn check(&self, options: &AttentionOptions, what: &str) -> Answer {
        let want = self.reference(options);
        let tolerance = tolerance(self.setup.q_dtype);
        let v_dim = self.setup.dims.v_dim;
        let operands = (&self.q, &self.k_cache, &self.v_cache, &self.table, options);
        let (q, k, v, table, options) = operands;
        let kernel = self.attention(options);
        assert_eq!(kernel.dtype(), self.setup.q_dtype);
        close(&kernel, &want.out, v_dim, tolerance, what);
        let portable = portable::paged_attention(q, k, v, table, options).unwrap();
        assert_eq!(portable.dtype(), self.setup.q_dtype);
        close(
            &portable,
            &want.out,
            v_dim,
            tolerance,
            &format!("{what}, portable"),
        );
        if options.sinks.is_none() {
            for (state, who) in [
                (self.state(options), "state"),
                (
                    portable::paged_attention_state(q, k, v, table, options).unwrap(),
                    "portable state",
                ),
            ] {
                let what = format!("{what}, {who}");
                close(&state.out, &want.out, v_dim, 1e-5, &what);
                close_lse(&state.lse, &want.lse, &what);
            }
        }
        want
    }
}

fn rules(options: &AttentionOptions) -> Rules {
    use candle_paged_attn::ops::Mask;
    let wide = |values: &std::sync::Arc<[f32]>| values.iter().map(|&x| f64::from(x)).collect();
    Rules {
        scale: f64::from(options.scale),
        softcap: options.softcap.map(f64::from),
        window: match options.mask {
            Mask::CausalWindow(window) => Some(window),
            _ => None,
        },
        full: options.mask == Mask::Full,
        slopes: options.alibi_slopes.as_ref().map(wide),
        sinks: options.sinks.as_ref().map(wide),
    }
}

/// The tolerances of the design, by the dtype of the output.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2e-3,
        DType::BF16 => 1e-2,
        _ => 1e-5,
    }
}

pub fn round(x: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F16 => half::f16::from_f64(x).to_f64(),
        DType::BF16 => half::bf16::from_f64(x).to_f64(),
        _ => f64::from(x as f32),
    }
}

pub fn tensor(data: &[f64], dims: &[usize], dtype: DType) -> Tensor {
    let device = super::device();
    match dtype {
        DType::F16 => {
            let data: Vec<_> = data.iter().map(|&x| half::f16::from_f64(x)).collect();
            Tensor::from_vec(data, dims, device)
        }
        DType::BF16 => {
            let data: Vec<_> = data.iter().map(|&x| half::bf16::from_f64(x)).collect();
            Tensor::from_vec(data, dims, device)
        }
        _ => {
            let data: Vec<_> = data.iter().map(|&x| x as f32).collect();
            Tensor::from_vec(data, dims, device)
        }
    }
    .unwrap()
}

pub fn floats(t: &Tensor) -> Vec<f64> {
    t.to_device(&Device::Cpu)
        .unwrap()
        .to_dtype(DType::F64)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap()
}

/// The bits of a tensor, so that NaN compares equal to itself.
pub fn bits(t: &Tensor) -> Vec<u32> {
    let t = t.flatten_all().unwrap();
    match t.dtype() {
        DType::F16 => t
            .to_vec1::<half::f16>()
            .unwrap()
            .iter()
            .map(|x| u32::from(x.to_bits()))
            .collect(),
        DType::BF16 => t
            .to_vec1::<half::bf16>()
            .unwrap()
            .iter()
            .map(|x| u32::from(x.to_bits()))
            .collect(),
        DType::U32 => t.to_vec1().unwrap(),
        _ => t
            .to_vec1::<f32>()
            .unwrap()
            .iter()
            .map(|x| x.to_bits())
            .collect(),
    }
}

/// The largest `norm(out − ref) / norm(ref)` over rows of `dim` must be within `tolerance`; a
/// row whose reference is 0 must be 0.
pub fn close(out: &Tensor, want: &[f64], dim: usize, tolerance: f64, what: &str) {
    let got = floats(out);
    assert_eq!(got.len(), want.len(), "{what}: number of elements");
    for (row, (got, want)) in got.chunks(dim).zip(want.chunks(dim)).enumerate() {
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let size = norm(&mut want.iter().copied());
        let off = norm(&mut got.iter().zip(want).map(|(a, b)| a - b));
        let within = if size == 0.0 {
            off == 0.0
        } else {
            off / size <= tolerance
        };
        assert!(
            within,
            "{what}: row {row} off by {:e}\n got {:?}\nwant {:?}",
            off / size,
            &got[..got.len().min(4)],
            &want[..want.len().min(4)],
        );
    }
}

pub fn close_lse(lse: &Tensor, want: &[f64], what: &str) {
    let got = floats(lse);
    assert_eq!(got.len(), want.len(), "{what}: number of lse");
    for (row, (&got, &want)) in got.iter().zip(want).enumerate() {
        let within = got == want || (got - want).abs() <= 1e-5 * want.abs().max(1.0);
        assert!(within, "{what}: lse of row {row}: got {got}, want {want}");
    }
}
