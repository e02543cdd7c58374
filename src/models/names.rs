//! What checkpoints call their tensors.

/// The tensor names of one checkpoint layout, without the ending `.weight` or `.bias`.
///
/// Those of a layer follow the layer's prefix: `layer_prefix`, the layer number, a dot.
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
    /// What stands before the number of a layer.
    pub layer_prefix: &'static str,
    /// Norm before attention, `[hidden]`.
    pub attention_norm: &'static str,
    /// Query projection, `[heads * k_dim, hidden]`.
    pub q: &'static str,
    /// Key projection, `[kv_heads * k_dim, hidden]`.
    pub k: &'static str,
    /// Value projection, `[kv_heads * v_dim, hidden]`.
    pub v: &'static str,
    /// Output projection, `[hidden, heads * v_dim]`.
    pub o: &'static str,
    /// Norm before the feed-forward network, `[hidden]`.
    pub feed_forward_norm: &'static str,
    /// Gate projection, `[inner, hidden]`.
    pub gate: &'static str,
    /// Up projection, `[inner, hidden]`.
    pub up: &'static str,
    /// Down projection, `[hidden, inner]`.
    pub down: &'static str,
}

impl WeightNames {
    /// Names in the safetensors files of Hugging Face's `LlamaForCausalLM` and its kin.
    pub const HF: Self = Self {
        embedding: "model.embed_tokens",
        final_norm: "model.norm",
        head: "lm_head",
        rope_divisors: "rope_freqs",
        layer_prefix: "model.layers.",
        attention_norm: "input_layernorm",
        q: "self_attn.q_proj",
        k: "self_attn.k_proj",
        v: "self_attn.v_proj",
        o: "self_attn.o_proj",
        feed_forward_norm: "post_attention_layernorm",
        gate: "mlp.gate_proj",
        up: "mlp.up_proj",
        down: "mlp.down_proj",
    };

    /// Names in GGUF files.
    pub const GGUF: Self = Self {
        embedding: "token_embd",
        final_norm: "output_norm",
        head: "output",
        rope_divisors: "rope_freqs",
        layer_prefix: "blk.",
        attention_norm: "attn_norm",
        q: "attn_q",
        k: "attn_k",
        v: "attn_v",
        o: "attn_output",
        feed_forward_norm: "ffn_norm",
        gate: "ffn_gate",
        up: "ffn_up",
        down: "ffn_down",
    };

    /// The full base name of `tensor` in layer `layer`.
    pub fn in_layer(&self, layer: usize, tensor: &str) -> String {
        format!("{}{layer}.{tensor}", self.layer_prefix)
    }
}
