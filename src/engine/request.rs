//! What a caller asks for, and the check that refuses what can never run.

use std::sync::Arc;

use super::beam::EarlyStopping;
use super::config::Limits;
use super::hook::LogitsHook;
use super::sampling::Sampling;
use crate::block::Namespace;
use crate::error::{Error, Result};

pub(super) const OP: &str = "add_request";

/// Names a request of one engine. Later requests have larger ids; ids are never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub(super) u64);

impl std::fmt::Display for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "request {}", self.0)
    }
}

/// Beam search in place of sampling, see [`Request::beams`].
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct BeamSearch {
    /// Beams kept, at least 2.
    pub width: usize,
    /// Hypotheses are ranked by `sum of log-probabilities / generated tokens ^ length_penalty`.
    pub length_penalty: f32,
    /// When the search ends.
    pub early_stopping: EarlyStopping,
}

impl BeamSearch {
    /// `width` beams, length penalty 1, [`EarlyStopping::Heuristic`].
    pub fn new(width: usize) -> Self {
        Self {
            width,
            length_penalty: 1.0,
            early_stopping: EarlyStopping::Heuristic,
        }
    }
}

/// A prompt and how to continue it. [`Request::new`] gives defaults; every field may be set.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Request {
    /// Token ids, at least one.
    pub prompt: Vec<u32>,
    /// Tokens to generate at most, per sample. Default 256. A request also ends where the
    /// context length of the model does.
    pub max_tokens: usize,
    /// Tokens to generate at least: until then stop ids cannot be sampled and stop strings are
    /// not looked for.
    pub min_tokens: usize,
    /// Tokens that end a sample, besides the engine's end-of-text tokens. The token that ended
    /// a sample is among its tokens but not in its text.
    pub stop_ids: Vec<u32>,
    /// Strings that end a sample. The text ends before the string, which may straddle tokens.
    pub stop_strings: Vec<String>,
    /// Go on past the engine's end-of-text tokens.
    pub ignore_eos: bool,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Samples to answer. They share the blocks of the prompt.
    pub n: usize,
    /// Samples to generate, of which the `n` with the highest log-probability per token are
    /// answered, all at the end. `None` is `n`, streamed.
    pub best_of: Option<usize>,
    /// Search for the most probable continuations instead of sampling; the `n` best beams are
    /// answered at the end. Needs temperature 0 and no stop strings.
    pub beams: Option<BeamSearch>,
    /// Report the log-probability of each generated token and of this many most likely ones,
    /// by the model's own distribution, before any option of [`Sampling`].
    pub logprobs: Option<usize>,
    /// The same for each prompt token given those before it, in [`Report`](super::Report).
    /// The prompt is then computed whole, without cached blocks, and every prompt row of a
    /// step gives a row of `vocab` f32 logits.
    pub prompt_logprobs: Option<usize>,
    /// Larger runs first. Equal ones run in the order of their arrival.
    pub priority: i32,
    /// Prompts share K/V only within a namespace.
    pub namespace: Namespace,
    /// Use cached K/V of equal prefixes. Off, the request still fills the cache for others.
    pub read_prefix: bool,
    /// A grammar, or a sampler of your own.
    pub hook: Option<Arc<dyn LogitsHook>>,
}

impl Request {
    /// Continues `prompt` greedily by up to 256 tokens.
    pub fn new(prompt: impl Into<Vec<u32>>) -> Self {
        Self {
            prompt: prompt.into(),
            max_tokens: 256,
            min_tokens: 0,
            stop_ids: Vec::new(),
            stop_strings: Vec::new(),
            ignore_eos: false,
            sampling: Sampling::default(),
            n: 1,
            best_of: None,
            beams: None,
            logprobs: None,
            prompt_logprobs: None,
            priority: 0,
            namespace: Namespace::default(),
            read_prefix: true,
            hook: None,
        }
    }

    /// Sets [`Request::max_tokens`].
    #[must_use]
    pub fn with_max_tokens(mut self, max_tokens: usize) -> Self {
        self.max_tokens = max_tokens;
        self
    }

    /// Sets [`Request::sampling`].
    #[must_use]
    pub fn with_sampling(mut self, sampling: Sampling) -> Self {
        self.sampling = sampling;
        self
    }

    /// Sets [`Request::n`].
    #[must_use]
    pub fn with_n(mut self, n: usize) -> Self {
        self.n = n;
        self
    }

    /// Sets [`Request::beams`].
    #[must_use]
    pub fn with_beams(mut self, beams: BeamSearch) -> Self {
        self.beams = Some(beams);
        self
    }

    /// Sets [`Request::priority`].
    #[must_use]
    pub fn with_priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    /// Sets [`Request::namespace`].
    #[must_use]
    pub fn with_namespace(mut self, namespace: Namespace) -> Self {
        self.namespace = namespace;
        self
    }

    /// Adds a stop string.
    #[must_use]
    pub fn with_stop_string(mut self, stop: impl Into<String>) -> Self {
        self.stop_strings.push(stop.into());
        self
    }

    /// Sets [`Request::hook`].
    #[must_use]
    pub fn with_hook(mut self, hook: Arc<dyn LogitsHook>) -> Self {
        self.hook = Some(hook);
        self
    }

    /// Sequences that the request runs once its prompt is computed.
    pub(super) fn width(&self) -> usize {
        match self.beams {
            Some(beams) => beams.width,
            None => self.best_of.unwrap_or(self.n),
        }
    }

    /// Whether samples leave token by token: not when the best are chosen at the end.
    pub(super) fn streams(&self) -> bool {
        self.beams.is_none() && self.width() == self.n
    }

    /// Refuses what can never run, see [`Engine::add_request`](super::Engine::add_request).
    pub(super) fn check(&self, limits: &Limits) -> Result<()> {
        if self.prompt.is_empty() {
            return Err(Error::Empty {
                op: OP,
                what: "the prompt",
            });
        }
        let vocabulary = |ids: &[u32]| match ids.iter().find(|&&id| id as usize >= limits.vocab) {
            Some(&token) => Err(Error::TokenOutOfRange {
                op: OP,
                token,
                vocab: limits.vocab,
            }),
            None => Ok(()),
        };
        vocabulary(&self.prompt)?;
        vocabulary(&self.stop_ids)?;
        self.sampling.check(&vocabulary)?;
        at_least("max_tokens", self.max_tokens, 1)?;
        at_least("n", self.n, 1)?;
        at_least("best_of", self.best_of.unwrap_or(self.n), self.n)?;
        if self.min_tokens > self.max_tokens {
            return Err(refuse(
                "min_tokens",
                format!("at most max_tokens, {}", self.max_tokens),
                self.min_tokens,
            ));
        }
        for count in [self.logprobs, self.prompt_logprobs].into_iter().flatten() {
            if count > limits.vocab {
                let rule = format!("at most the vocabulary, {}", limits.vocab);
                return Err(refuse("logprobs", rule, count));
            }
        }
        if self.stop_strings.iter().any(String::is_empty) {
            return Err(Error::Empty {
                op: OP,
                what: "a stop string",
            });
        }
        if !self.stop_strings.is_empty() && !limits.text {
            let rule = "none for an engine without a tokenizer";
            return Err(refuse("stop_strings", rule, self.stop_strings.len()));
        }
        self.check_beams()?;
        limits.check_size(self.prompt.len(), self.width())
    }

    fn check_beams(&self) -> Result<()> {
        let Some(beams) = self.beams else {
            return Ok(());
        };
        at_least("beams.width", beams.width, 2)?;
        at_least("beams.width", beams.width, self.n)?;
        if !beams.length_penalty.is_finite() {
            let got = beams.length_penalty;
            return Err(refuse("beams.length_penalty", "a finite number", got));
        }
        let conflict = [
            ("best_of", self.best_of.is_some()),
            ("temperature", self.sampling.temperature > 0.0),
            ("stop_strings", !self.stop_strings.is_empty()),
            ("hook", self.hook.is_some()),
            ("logprobs", self.logprobs.is_some()),
        ];
        match conflict.iter().find(|(_, set)| *set) {
            Some((what, _)) => Err(refuse(what, "not set in a beam search", "a value")),
            None => Ok(()),
        }
    }
}

pub(super) fn refuse(
    what: &str,
    expected: impl Into<String>,
    got: impl std::fmt::Display,
) -> Error {
    Error::InvalidArgument {
        op: OP,
        what: what.into(),
        expected: expected.into(),
        got: got.to_string(),
    }
}

fn at_least(what: &str, got: usize, least: usize) -> Result<()> {
    if got < least {
        return Err(refuse(what, format!("at least {least}"), got));
    }
    Ok(())
}
