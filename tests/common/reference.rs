//! Attention as its definition reads, in f64 on plain vectors.

/// Sizes of one sequence.
#[derive(Clone, Copy)]
pub struct Dims {
    pub heads: usize,
    pub kv_heads: usize,
    pub k_dim: usize,
    pub v_dim: usize,
}

#[derive(Clone, Default)]
pub struct Rules {
    pub scale: f64,
    pub softcap: Option<f64>,
    pub window: Option<usize>,
    /// Every query sees every key.
    pub full: bool,
    pub slopes: Option<Vec<f64>>,
    pub sinks: Option<Vec<f64>>,
}

pub struct Answer {
    /// `[rows, heads, v_dim]`
    pub out: Vec<f64>,
    /// `[rows, heads]`, without the sink
    pub lse: Vec<f64>,
    /// Largest weight of each row and head.
    pub top: Vec<f64>,
}

/// `q [rows, heads, k_dim]`, `k [len, kv_heads, k_dim]`, `v [len, kv_heads, v_dim]`.
pub fn reference(q: &[f64], k: &[f64], v: &[f64], dims: Dims, rules: &Rules) -> Answer {
    let Dims {
        heads,
        kv_heads,
        k_dim,
        v_dim,
    } = dims;
    let rows = q.len() / (heads * k_dim);
    let len = k.len() / (kv_heads * k_dim);
    let mut answer = Answer {
        out: vec![0.0; rows * heads * v_dim],
        lse: vec![f64::NEG_INFINITY; rows * heads],
        top: vec![0.0; rows * heads],
    };
    for row in 0..rows {
        // The rows are the last tokens of the context.
        let position = len as i64 - rows as i64 + row as i64;
        for head in 0..heads {
            let kv_head = head / (heads / kv_heads);
            let query = &q[(row * heads + head) * k_dim..][..k_dim];
            let mut keys = Vec::new();
            let mut scores = Vec::new();
            for j in 0..len {
                let hidden_by_window = rules
                    .window
                    .is_some_and(|w| j as i64 <= position - w as i64);
                if !rules.full && (j as i64 > position || hidden_by_window) {
                    continue;
                }
                let key = &k[(j * kv_heads + kv_head) * k_dim..][..k_dim];
                let dot: f64 = query.iter().zip(key).map(|(a, b)| a * b).sum();
                let mut score = rules.scale * dot;
                if let Some(cap) = rules.softcap {
                    score = cap * (score / cap).tanh();
                }
                if let Some(slopes) = &rules.slopes {
                    score += slopes[head] * (j as i64 - position) as f64;
                }
                keys.push(j);
                scores.push(score);
            }
            if keys.is_empty() {
                continue;
            }
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let sink = rules.sinks.as_ref().map_or(0.0, |s| (s[head] - max).exp());
            let index = row * heads + head;
            answer.lse[index] = max + sum.ln();
            for (j, w) in keys.iter().zip(&weights) {
                let weight = w / (sum + sink);
                answer.top[index] = answer.top[index].max(weight);
                let value = &v[(j * kv_heads + kv_head) * v_dim..][..v_dim];
                for (o, x) in answer.out[index * v_dim..][..v_dim].iter_mut().zip(value) {
                    *o += weight * x;
                }
            }
        }
    }
    answer
}
