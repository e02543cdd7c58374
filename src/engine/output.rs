//! What leaves an engine.

use std::time::Duration;

use super::request::RequestId;

/// Why a sample ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FinishReason {
    /// `max_tokens`, or the context length of the model, was reached.
    Length,
    /// This token, an end-of-text token or one of `stop_ids`, was sampled.
    StopToken(u32),
    /// This string of `stop_strings` appeared.
    StopString(String),
    /// The sequence filled the whole pool with nobody left to make room.
    CacheFull,
    /// The caller cancelled the request, or the engine was shut down.
    Cancelled,
    /// The request could not go on: a hook that panicked, logits without a number, a forward
    /// pass that failed repeatedly. Other requests are unharmed.
    Failed(String),
}

impl FinishReason {
    /// One word: `length`, `stop`, `cache_full`, `cancelled` or `failed`.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Length => "length",
            Self::StopToken(_) | Self::StopString(_) => "stop",
            Self::CacheFull => "cache_full",
            Self::Cancelled => "cancelled",
            Self::Failed(_) => "failed",
        }
    }
}

/// A token and its natural log-probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLogprob {
    /// Token id.
    pub token: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
}

/// The log-probability of a token of the text, and the most likely ones in its place.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct TokenLogprobs {
    /// The token that is there.
    pub token: TokenLogprob,
    /// As many most likely tokens as were asked for, the most likely first.
    pub top: Vec<TokenLogprob>,
}

/// What a step added to one sample of a request.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Output {
    /// The request.
    pub request: RequestId,
    /// Number of the sample, below the request's `n`.
    pub sample: usize,
    /// New tokens.
    pub tokens: Vec<u32>,
    /// New text, empty without a tokenizer. Text lags behind tokens where a character or a
    /// possible stop string is incomplete.
    pub text: String,
    /// One for each new token, if asked for.
    pub logprobs: Vec<TokenLogprobs>,
    /// The rank of a sample that was chosen at the end, by which they are ordered: its
    /// log-probability per token (`best_of`), or with the length penalty (`beams`).
    pub score: Option<f64>,
    /// Why the sample ended, if it did.
    pub finish: Option<FinishReason>,
    /// The figures of the request, with its very last output.
    pub report: Option<Report>,
}

/// The figures of a request that has ended.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Report {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, tokens whose K/V were found in the cache when the request first ran.
    pub cached_tokens: usize,
    /// Tokens generated, all samples and beams together.
    pub generated_tokens: usize,
    /// How often a sequence of the request was preempted.
    pub preemptions: usize,
    /// From submission until the request first ran, `None` if it never did.
    pub queued: Option<Duration>,
    /// From submission to the first token, `None` if there is none.
    pub first_token: Option<Duration>,
    /// From submission to the end.
    pub total: Duration,
    /// For each prompt token its log-probability given those before it, `None` for the first.
    /// Empty unless asked for.
    pub prompt_logprobs: Vec<Option<TokenLogprobs>>,
}
