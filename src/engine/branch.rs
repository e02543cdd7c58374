//! A sample in the making: its text, its log-probabilities, and whether it has ended.

use std::sync::Arc;

use tokenizers::Tokenizer;

use super::config::Limits;
use super::output::{FinishReason, Output, TokenLogprobs};
use super::request::{Request, RequestId};
use super::stop::StopScanner;
use crate::load::TextStream;

/// A sample of a request.
#[derive(Debug, Clone)]
pub(super) struct Branch {
    text: Option<TextStream>,
    scanner: StopScanner,
    /// Bytes of the text waiting in `text` that came too early for a stop string.
    unstoppable: usize,
    /// Tokens generated.
    pub generated: usize,
    /// Sum of the log-probabilities, if they are computed.
    pub logprob: f64,
    /// What has not left yet.
    pub tokens: Vec<u32>,
    pub new_text: String,
    pub logprobs: Vec<TokenLogprobs>,
    pub score: Option<f64>,
    pub finish: Option<FinishReason>,
    /// Whether the end has left, too.
    told: bool,
}

/// The rules by which a sample ends.
#[derive(Debug, Clone)]
pub(super) struct StopRules {
    /// Stop ids, end-of-text tokens among them unless they are ignored.
    pub ids: Vec<u32>,
    pub min_tokens: usize,
    pub max_tokens: usize,
}

impl StopRules {
    /// Rules for a request of an engine with these end-of-text tokens. One that the model does
    /// not know never comes.
    pub(super) fn new(request: &Request, eos: &[u32], limits: &Limits) -> Self {
        let mut ids = request.stop_ids.clone();
        if !request.ignore_eos {
            let known = eos.iter().filter(|&&id| (id as usize) < limits.vocab);
            ids.extend(known);
        }
        ids.sort_unstable();
        ids.dedup();
        Self {
            ids,
            min_tokens: request.min_tokens,
            max_tokens: request
                .max_tokens
                .min(limits.context - request.prompt.len()),
        }
    }

    /// Stop ids that may not be sampled as token number `generated`.
    pub(super) fn too_early(&self, generated: usize) -> &[u32] {
        if generated < self.min_tokens {
            &self.ids
        } else {
            &[]
        }
    }
}

impl Branch {
    pub(super) fn new(request: &Request, tokenizer: Option<&Arc<Tokenizer>>) -> Self {
        Self {
            text: tokenizer.map(|t| TextStream::new(t.clone(), true)),
            scanner: StopScanner::new(request.stop_strings.clone()),
            unstoppable: 0,
            generated: 0,
            logprob: 0.0,
            tokens: Vec::new(),
            new_text: String::new(),
            logprobs: Vec::new(),
            score: None,
            finish: None,
            told: false,
        }
    }

    /// Whether there is something that has not left yet.
    pub(super) fn has_news(&self) -> bool {
        !self.tokens.is_empty() || !self.new_text.is_empty() || self.finish.is_some() && !self.told
    }

    /// Takes what has not left yet.
    pub(super) fn take_output(&mut self, request: RequestId, sample: usize) -> Output {
        self.told = self.finish.is_some();
        Output {
            request,
            sample,
            tokens: std::mem::take(&mut self.tokens),
            text: std::mem::take(&mut self.new_text),
            logprobs: std::mem::take(&mut self.logprobs),
            score: self.score,
            finish: self.finish.clone(),
            report: None,
        }
    }

    /// Appends a token and decides whether it was the last.
    pub(super) fn push(&mut self, token: u32, rules: &StopRules) {
        self.generated += 1;
        self.tokens.push(token);
        let early = self.generated < rules.min_tokens;
        if !early && rules.ids.contains(&token) {
            self.end(FinishReason::StopToken(token));
            return;
        }
        if let Some(text) = &mut self.text {
            match text.push(token) {
                Ok(Some(piece)) => self.push_text(&piece, early),
                Ok(None) => {}
                Err(error) => self.end(FinishReason::Failed(error.to_string())),
            }
        }
        if self.finish.is_none() {
            self.look_ahead(early);
        }
        if self.finish.is_none() && self.generated >= rules.max_tokens {
            self.end(FinishReason::Length);
        }
    }

    fn push_text(&mut self, piece: &str, early: bool) {
        let unstoppable = match early {
            true => piece.len(),
            false => piece.floor_char_boundary(self.unstoppable),
        };
        self.unstoppable = 0;
        let (old, piece) = piece.split_at(unstoppable);
        self.new_text.push_str(old);
        let (text, stop) = self.scanner.push(piece);
        self.new_text.push_str(&text);
        if let Some(stop) = stop {
            self.finish = Some(FinishReason::StopString(stop));
        }
    }

    /// Ends the sample at a stop string in text that waits in the stream, as a newline does that
    /// is a byte token: the next token would be one too many, and there may be none.
    fn look_ahead(&mut self, early: bool) {
        let Some(text) = self.text.as_ref().filter(|_| self.scanner.has_stops()) else {
            return;
        };
        // What a decoder refuses has no stop string in it.
        let waiting = text.waiting().unwrap_or_default();
        if early {
            self.unstoppable = waiting.len();
        }
        let old = waiting.floor_char_boundary(self.unstoppable);
        if self.scanner.would_stop(&waiting[old..]) {
            self.finish_text();
        }
    }

    /// Ends the sample and lets go of the text that was held back. A stop string that is only
    /// found in it, not the number of tokens, is the reason then.
    pub(super) fn end(&mut self, reason: FinishReason) {
        if self.finish.is_some() {
            return;
        }
        self.finish_text();
        if self.finish.is_none() || reason != FinishReason::Length {
            self.finish = Some(reason);
        }
    }

    fn finish_text(&mut self) {
        if let Some(text) = &mut self.text {
            // What a decoder refuses at the end of a text is no text.
            let rest = text.finish().unwrap_or_default();
            self.push_text(&rest, false);
            self.new_text.push_str(&self.scanner.finish());
        }
    }
}
