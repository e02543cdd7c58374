//! What one layer's attention computes, apart from its tensors.

use std::ops::Range;
use std::sync::Arc;

/// Which keys a query may see. The causal forms are aligned bottom-right: the last query of a
/// sequence stands at its last token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Mask {
    /// Every key up to and including the query's own position.
    #[default]
    Causal,
    /// The last `n` keys up to and *including the query itself* (as in Mistral's reference
    /// code: a window of 1 sees the query's own key alone). At least 1.
    CausalWindow(usize),
    /// Every key of the sequence, wherever the query stands. ALiBi goes by positions all the
    /// same.
    Full,
}

impl Mask {
    /// The causal mask of a layer with this window.
    pub(crate) fn causal(window: Option<usize>) -> Self {
        window.map_or(Self::Causal, Self::CausalWindow)
    }

    /// Keys that a query at `position` sees of a context of `len` tokens; under a causal mask a
    /// query before the first token (more queries than tokens) sees none.
    #[inline]
    pub(crate) fn keys(self, position: i64, len: usize) -> Range<usize> {
        let Ok(past) = usize::try_from(position.saturating_add(1)) else {
            return 0..if self == Self::Full { len } else { 0 };
        };
        match self {
            Self::Full => 0..len,
            Self::Causal => 0..past.min(len),
            Self::CausalWindow(window) => past.saturating_sub(window)..past.min(len),
        }
    }
}

/// How scores become weights. The order is fixed on every device:
/// `scale · q·k`, then the soft cap, then ALiBi, then the mask, then the softmax with sinks.
///
/// Cloning is cheap: the per-head values are shared.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct AttentionOptions {
    /// Factor of `q·k`, usually `1 / sqrt(k_dim)`.
    pub scale: f32,
    /// `s ← cap · tanh(s / cap)` (Gemma 2). Positive.
    pub softcap: Option<f32>,
    /// Which keys a query sees.
    pub mask: Mask,
    /// Per *query* head: `s ← s + slope · (j − i)` for key `j` and query `i` (ALiBi, Press et
    /// al. 2021). `[heads]`.
    pub alibi_slopes: Option<Arc<[f32]>>,
    /// Per query head: a logit that takes part in the softmax without a value (GPT-OSS).
    /// `[heads]`.
    pub sinks: Option<Arc<[f32]>>,
}

impl AttentionOptions {
    /// Plain causal attention with scores `scale · q·k`.
    pub fn new(scale: f32) -> Self {
        Self {
            scale,
            softcap: None,
            mask: Mask::Causal,
            alibi_slopes: None,
            sinks: None,
        }
    }

    /// Sets the mask.
    pub fn with_mask(mut self, mask: Mask) -> Self {
        self.mask = mask;
        self
    }

    /// Sets a window of `window` keys, the query itself included.
    pub fn with_window(self, window: usize) -> Self {
        self.with_mask(Mask::CausalWindow(window))
    }

    /// Sets the soft cap of the scores.
    pub fn with_softcap(mut self, cap: f32) -> Self {
        self.softcap = Some(cap);
        self
    }

    /// Sets one ALiBi slope per query head.
    pub fn with_alibi_slopes(mut self, slopes: impl Into<Arc<[f32]>>) -> Self {
        self.alibi_slopes = Some(slopes.into());
        self
    }

    /// Sets one sink logit per query head.
    pub fn with_sinks(mut self, sinks: impl Into<Arc<[f32]>>) -> Self {
        self.sinks = Some(sinks.into());
        self
    }
}
