//! A request that has been accepted: its samples, its figures, and the outputs they make.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use tokenizers::Tokenizer;

use super::beam::{Beams, Hypothesis};
use super::branch::{Branch, StopRules};
use super::output::{FinishReason, Output, Report, TokenLogprobs};
use super::request::{Request, RequestId};

#[derive(Debug)]
pub(super) struct Active {
    pub id: RequestId,
    pub request: Request,
    pub rules: StopRules,
    pub seed: u64,
    pub branches: BTreeMap<u32, Branch>,
    pub beams: Option<Beams>,
    /// Number of the next beam.
    pub next_branch: u32,
    pub submitted: Instant,
    pub last_token: Option<Instant>,
    /// Step of that token.
    pub last_step: u64,
    pub report: Report,
}

impl Active {
    pub(super) fn new(
        id: RequestId,
        request: Request,
        rules: StopRules,
        seed: u64,
        tokenizer: Option<&Arc<Tokenizer>>,
    ) -> Self {
        let beams = request
            .beams
            .map(|beams| Beams::new(beams, rules.max_tokens, rules.ids.clone()));
        // Nothing comes before the first token of a prompt.
        let unknown = request.prompt_logprobs.map(|_| None);
        let samples = if beams.is_some() { 0 } else { request.width() };
        let branches = (0..samples as u32).map(|b| (b, Branch::new(&request, tokenizer)));
        Self {
            id,
            rules,
            seed: request.sampling.seed.unwrap_or(seed),
            branches: branches.collect(),
            beams,
            next_branch: 1,
            submitted: Instant::now(),
            last_token: None,
            last_step: 0,
            report: Report {
                prompt_tokens: request.prompt.len(),
                cached_tokens: 0,
                generated_tokens: 0,
                preemptions: 0,
                queued: None,
                first_token: None,
                total: std::time::Duration::ZERO,
                prompt_logprobs: unknown.into_iter().collect(),
            },
            request,
        }
    }

    /// Whether every sample has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.beams.is_none() && self.branches.values().all(|branch| branch.finish.is_some())
    }

    /// Ends every sample that has not ended by itself.
    pub(super) fn end(&mut self, reason: &FinishReason, tokenizer: Option<&Arc<Tokenizer>>) {
        for branch in self.branches.values_mut() {
            branch.end(reason.clone());
        }
        if let Some(beams) = self.beams.take() {
            let mut found = beams.into_best();
            found.resize_with(found.len().max(1), || Hypothesis {
                tokens: Vec::new(),
                score: f64::NEG_INFINITY,
                finish: reason.clone(),
            });
            self.found(found, tokenizer);
        }
    }

    /// Makes samples of the hypotheses of a beam search.
    pub(super) fn found(&mut self, best: Vec<Hypothesis>, tokenizer: Option<&Arc<Tokenizer>>) {
        // The search has applied the rules; here they only must not end anything early.
        let none = StopRules {
            ids: Vec::new(),
            min_tokens: 0,
            max_tokens: usize::MAX,
        };
        for (number, hypothesis) in (0..).zip(best) {
            let mut branch = Branch::new(&self.request, tokenizer);
            let text_ends = match hypothesis.finish {
                FinishReason::StopToken(_) => hypothesis.tokens.len().saturating_sub(1),
                _ => hypothesis.tokens.len(),
            };
            for &token in &hypothesis.tokens[..text_ends] {
                branch.push(token, &none);
            }
            branch.tokens = hypothesis.tokens;
            branch.end(hypothesis.finish);
            branch.score = Some(hypothesis.score);
            self.branches.insert(number, branch);
        }
        self.beams = None;
    }

    /// Takes what the samples have to say; the last output carries the report.
    pub(super) fn take_outputs(&mut self) -> Vec<Output> {
        let ended = self.has_ended();
        if !self.request.streams() && !ended {
            return Vec::new();
        }
        let mut order: Vec<(u32, &mut Branch)> = self
            .branches
            .iter_mut()
            .map(|(&number, branch)| (number, branch))
            .collect();
        if !self.request.streams() {
            for (_, branch) in &mut order {
                let per_token = branch.logprob / branch.generated.max(1) as f64;
                branch.score = branch.score.or(Some(per_token));
            }
            // Stable: equal scores stay in the order of their numbers.
            order.sort_by(|(_, a), (_, b)| {
                b.score
                    .partial_cmp(&a.score)
                    .unwrap_or(std::cmp::Ordering::Equal)
            });
            order.truncate(self.request.n);
            for (sample, (number, _)) in (0..).zip(&mut order) {
                *number = sample;
            }
        }
        let mut outputs: Vec<Output> = order
            .into_iter()
            .filter(|(_, branch)| branch.has_news())
            .map(|(sample, branch)| branch.take_output(self.id, sample as usize))
            .collect();
        if ended {
            self.report.total = self.submitted.elapsed();
            if let Some(last) = outputs.last_mut() {
                last.report = Some(self.report.clone());
            }
        }
        outputs
    }

    /// Keeps the log-probabilities of prompt token `position`, given those before it.
    pub(super) fn prompt_logprobs(&mut self, position: usize, logprobs: TokenLogprobs) {
        let known = &mut self.report.prompt_logprobs;
        // A prompt that was preempted brings some of them twice.
        if known.len() == position {
            known.push(Some(logprobs));
        }
    }
}
