//! The door for grammars and samplers of one's own.

/// What a [`LogitsHook`] may know of the sample it is asked about.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct HookContext<'a> {
    /// The prompt.
    pub prompt: &'a [u32],
    /// The tokens generated so far.
    pub generated: &'a [u32],
    /// Number of the sample within its request.
    pub sample: usize,
}

/// Changes or replaces the choice of the next token of a request.
///
/// Both methods are told everything that has been generated, and are asked once per token,
/// also when a request is preempted in between: state that follows from the tokens (the state
/// of a grammar) can be computed from them or kept under the sample's number. A hook that
/// panics ends its own request, no other.
pub trait LogitsHook: Send + Sync + std::fmt::Debug {
    /// Changes `logits`, one per token of the vocabulary, before any option of the request's
    /// [`Sampling`](super::Sampling). `-inf` rules a token out; a request with no token left
    /// ends as failed.
    fn process(&self, context: &HookContext<'_>, logits: &mut [f32]) {
        let _ = (context, logits);
    }

    /// Chooses the token, from logits with bias, bans and penalties applied. `None` leaves the
    /// choice to the engine.
    fn choose(&self, context: &HookContext<'_>, logits: &[f32]) -> Option<u32> {
        let _ = (context, logits);
        None
    }
}
