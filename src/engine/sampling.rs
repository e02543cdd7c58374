//! How a token is chosen from the logits of a row.

use super::request::refuse;
use crate::error::Result;

/// Options of the sampler, applied in the order of the fields: first what changes single
/// logits, then temperature, then the cuts, each on what the one before has left.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Sampling {
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Only these tokens can be sampled.
    pub allowed: Option<Vec<u32>>,
    /// These tokens cannot be sampled.
    pub banned: Vec<u32>,
    /// Divides the positive logits of tokens in the prompt or the answer, and multiplies
    /// their negative ones (CTRL, Keskar et al. 2019). 1 does nothing.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens in the answer.
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens in the answer, once for each time.
    pub frequency_penalty: f32,
    /// Divides the logits. 0 takes the most likely token (the smallest id among equals), and
    /// nothing below applies.
    pub temperature: f32,
    /// Keep tokens with at least this share of the probability of the most likely one.
    pub min_p: f32,
    /// Keep this many most likely tokens.
    pub top_k: Option<usize>,
    /// Keep the most likely tokens that together have this probability (nucleus sampling,
    /// Holtzman et al. 2020), at least one.
    pub top_p: f32,
    /// The same request with the same seed gives the same tokens, whatever runs beside it.
    /// `None` takes one from the engine's seed and the number of the request.
    pub seed: Option<u64>,
}

impl Default for Sampling {
    /// Greedy.
    fn default() -> Self {
        Self {
            logit_bias: Vec::new(),
            allowed: None,
            banned: Vec::new(),
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            temperature: 0.0,
            min_p: 0.0,
            top_k: None,
            top_p: 1.0,
            seed: None,
        }
    }
}

impl Sampling {
    /// Samples at a temperature from the whole vocabulary.
    pub fn temperature(temperature: f32) -> Self {
        Self {
            temperature,
            ..Self::default()
        }
    }

    /// Sets [`Sampling::seed`].
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Sets [`Sampling::top_k`].
    #[must_use]
    pub fn with_top_k(mut self, top_k: usize) -> Self {
        self.top_k = Some(top_k);
        self
    }

    /// Sets [`Sampling::top_p`].
    #[must_use]
    pub fn with_top_p(mut self, top_p: f32) -> Self {
        self.top_p = top_p;
        self
    }

    /// Sets [`Sampling::min_p`].
    #[must_use]
    pub fn with_min_p(mut self, min_p: f32) -> Self {
        self.min_p = min_p;
        self
    }

    pub(super) fn check(&self, vocabulary: &dyn Fn(&[u32]) -> Result<()>) -> Result<()> {
        // Written so that NaN fails each of them.
        let rules = [
            ("temperature", self.temperature, "a number from 0", {
                self.temperature >= 0.0 && self.temperature.is_finite()
            }),
            ("top_p", self.top_p, "above 0 and at most 1", {
                self.top_p > 0.0 && self.top_p <= 1.0
            }),
            ("min_p", self.min_p, "from 0 to 1", {
                (0.0..=1.0).contains(&self.min_p)
            }),
            (
                "repetition_penalty",
                self.repetition_penalty,
                "a number above 0",
                self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite(),
            ),
            ("presence_penalty", self.presence_penalty, "a number", {
                self.presence_penalty.is_finite()
            }),
            ("frequency_penalty", self.frequency_penalty, "a number", {
                self.frequency_penalty.is_finite()
            }),
        ];
        if let Some((what, got, rule, _)) = rules.into_iter().find(|(.., holds)| !holds) {
            return Err(refuse(what, rule, got));
        }
        if self.top_k == Some(0) {
            return Err(refuse("top_k", "at least 1", 0));
        }
        if self.allowed.as_ref().is_some_and(Vec::is_empty) {
            return Err(refuse("allowed", "at least one token", "none"));
        }
        // -inf bans a token; +inf would leave no probability to the others.
        let refused = |bias: f32| bias.is_nan() || bias == f32::INFINITY;
        if let Some((token, bias)) = self.logit_bias.iter().find(|(_, bias)| refused(*bias)) {
            let got = format!("{bias} for token {token}");
            return Err(refuse("logit_bias", "a number below infinity", got));
        }
        let biased: Vec<u32> = self.logit_bias.iter().map(|&(token, _)| token).collect();
        vocabulary(&biased)?;
        vocabulary(&self.banned)?;
        vocabulary(self.allowed.as_deref().unwrap_or_default())
    }
}
