//! What checkpoints call their tensors.

/// The tensor names of one checkpoint layout, without the ending `.weight` or `.bias`.
///
/// Those of a layer follow the layer's prefix: `layer_prefix`, the layer number, a dot. A
/// model without a part never asks for its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct WeightNames {
    /// Token embedding, `[vocab, hidden]`.
    pub embedding: &'static str,
    /// Norm after the last layer, `[hidden]`.
    pub final_norm: &'static str,
    /// Language model head, `[vocab, hidden]`.
    pub head: &'static str,
    /// Divisors of the rope frequencies, `[rope dim / 2]`.
    pub rope_divisors: &'static str,
    /// LongRoPE's divisors within the original context, `[rope dim / 2]`.
    pub rope_short: &'static str,
    /// LongRoPE's divisors beyond the original context, `[rope dim / 2]`.
    pub rope_long: &'static str,
    /// What stands before the number of a layer.
    pub layer_prefix: &'static str,
    /// Norm before attention, `[hidden]`.
    pub attention_norm: &'static str,
    /// Query, key and value projections in one matrix,
    /// `[heads * k_dim + kv_heads * k_dim + kv_heads * v_dim, hidden]`, where the checkpoint
    /// fuses them.
    pub qkv: Option<&'static str>,
    /// Query projection, `[heads * k_dim, hidden]`.
    pub q: &'static str,
    /// Key projection, `[kv_heads * k_dim, hidden]`.
    pub k: &'static str,
    /// Value projection, `[kv_heads * v_dim, hidden]`.
    pub v: &'static str,
    /// Output projection, `[hidden, heads * v_dim]`.
    pub o: &'static str,
    /// Norm of q, `[k_dim]` or `[heads * k_dim]`.
    pub q_norm: &'static str,
    /// Norm of k, `[k_dim]` or `[kv_heads * k_dim]`.
    pub k_norm: &'static str,
    /// Sinks, `[heads]`: the whole name, ending included.
    pub sinks: &'static str,
    /// Norm of what attention adds, `[hidden]`.
    pub after_attention_norm: &'static str,
    /// Norm before the feed-forward network, `[hidden]`.
    pub feed_forward_norm: &'static str,
    /// Gate and up projections in one matrix, `[2 * inner, hidden]`, where the checkpoint
    /// fuses them.
    pub gate_up: Option<&'static str>,
    /// Gate projection, `[inner, hidden]`.
    pub gate: &'static str,
    /// Up projection, `[inner, hidden]`.
    pub up: &'static str,
    /// Down projection, `[hidden, inner]`.
    pub down: &'static str,
    /// Norm of what the feed-forward network adds, `[hidden]`.
    pub after_feed_forward_norm: &'static str,
    /// Router of a mixture of experts, `[experts, hidden]`.
    pub router: &'static str,
    /// Its experts.
    pub experts: ExpertNames,
    /// Gate of the shared expert, `[1, hidden]`, or `[hidden]` in a GGUF file.
    pub shared_gate: &'static str,
    /// Gate, up and down projection of the shared expert.
    pub shared: [&'static str; 3],
}

/// How a checkpoint stores the experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExpertNames {
    /// Three matrices for each expert, named `prefix`, its number, a dot, and a name.
    Each {
        /// What stands before the number of an expert.
        prefix: &'static str,
        /// Gate projection, `[inner, hidden]`.
        gate: &'static str,
        /// Up projection, `[inner, hidden]`.
        up: &'static str,
        /// Down projection, `[hidden, inner]`.
        down: &'static str,
    },
    /// One tensor for all experts of each projection.
    Stacked {
        /// Gate projections, `[experts, inner, hidden]`.
        gate: &'static str,
        /// Up projections, `[experts, inner, hidden]`.
        up: &'static str,
        /// Down projections, `[experts, hidden, inner]`.
        down: &'static str,
    },
    /// GPT-OSS in Hugging Face's layout: inputs before outputs, gate and up in alternating
    /// columns. The names are whole; `_bias` is added for the biases.
    Interleaved {
        /// Gate and up projections, `[experts, hidden, 2 * inner]`.
        gate_up: &'static str,
        /// Down projections, `[experts, inner, hidden]`.
        down: &'static str,
    },
}

impl ExpertNames {
    /// The shape of the shared expert's gate, `matrix` or in a GGUF file a vector.
    pub(super) fn shared_gate_shape(self, matrix: &[usize; 2]) -> &[usize] {
        match self {
            Self::Stacked { .. } => &matrix[1..],
            _ => matrix,
        }
    }
}

impl WeightNames {
    /// Names in the safetensors files of Hugging Face's `LlamaForCausalLM` and its kin.
    pub const HF: Self = Self {
        embedding: "model.embed_tokens",
        final_norm: "model.norm",
        head: "lm_head",
        rope_divisors: "rope_freqs",
        rope_short: "rope_factors_short",
        rope_long: "rope_factors_long",
        layer_prefix: "model.layers.",
        attention_norm: "input_layernorm",
        qkv: None,
        q: "self_attn.q_proj",
        k: "self_attn.k_proj",
        v: "self_attn.v_proj",
        o: "self_attn.o_proj",
        q_norm: "self_attn.q_norm",
        k_norm: "self_attn.k_norm",
        sinks: "self_attn.sinks",
        after_attention_norm: "post_attention_layernorm",
        feed_forward_norm: "post_attention_layernorm",
        gate_up: None,
        gate: "mlp.gate_proj",
        up: "mlp.up_proj",
        down: "mlp.down_proj",
        after_feed_forward_norm: "post_feedforward_layernorm",
        router: "mlp.gate",
        experts: ExpertNames::Each {
            prefix: "mlp.experts.",
            gate: "gate_proj",
            up: "up_proj",
            down: "down_proj",
        },
        shared_gate: "mlp.shared_expert_gate",
        shared: [
            "mlp.shared_expert.gate_proj",
            "mlp.shared_expert.up_proj",
            "mlp.shared_expert.down_proj",
        ],
    };

    /// Names in GGUF files.
    pub const GGUF: Self = Self {
        embedding: "token_embd",
        final_norm: "output_norm",
        head: "output",
        rope_divisors: "rope_freqs",
        rope_short: "rope_factors_short",
        rope_long: "rope_factors_long",
        layer_prefix: "blk.",
        attention_norm: "attn_norm",
        qkv: None,
        q: "attn_q",
        k: "attn_k",
        v: "attn_v",
        o: "attn_output",
        q_norm: "attn_q_norm",
        k_norm: "attn_k_norm",
        sinks: "attn_sinks.weight",
        after_attention_norm: "post_attention_norm",
        feed_forward_norm: "ffn_norm",
        gate_up: None,
        gate: "ffn_gate",
        up: "ffn_up",
        down: "ffn_down",
        after_feed_forward_norm: "post_ffw_norm",
        router: "ffn_gate_inp",
        experts: ExpertNames::Stacked {
            gate: "ffn_gate_exps",
            up: "ffn_up_exps",
            down: "ffn_down_exps",
        },
        shared_gate: "ffn_gate_inp_shexp",
        shared: ["ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"],
    };

    /// The full base name of `tensor` in layer `layer`.
    pub fn in_layer(&self, layer: usize, tensor: &str) -> String {
        format!("{}{layer}.{tensor}", self.layer_prefix)
    }
}
