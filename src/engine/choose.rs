//! From the logits of a complete row to the tokens of one sequence, of the samples that fork
//! from it, or of all beams.

use std::time::Instant;

use super::beam::Child;
use super::engine::Engine;
use super::output::FinishReason;
use super::sampler::{self, Choice};
use super::sequence::SeqKey;
use crate::error::Result;
use crate::models::CausalLm;

impl<M: CausalLm + ?Sized> Engine<M> {
    /// The logits of the last token of a sequence are there: it goes on, or ends.
    pub(super) fn choose(&mut self, key: SeqKey, row: &[f32]) -> Result<()> {
        self.note_token(key);
        let beams = self
            .requests
            .get(&key.request)
            .is_some_and(|a| a.beams.is_some());
        if beams {
            return self.search(key, row);
        }
        // The end of a prompt: samples share its blocks and part here. All forks come before
        // the first token, which would be copied with them.
        let width = self.scheduler.get(key)?.width as u32;
        let mut keys = vec![key];
        for branch in 1..width {
            keys.push(self.scheduler.fork(key, branch)?);
        }
        for key in keys {
            self.sample(key, row)?;
        }
        Ok(())
    }

    /// Chooses the next token of one sample.
    fn sample(&mut self, key: SeqKey, row: &[f32]) -> Result<()> {
        let Some(active) = self.requests.get_mut(&key.request) else {
            return Ok(());
        };
        let sequence = self.scheduler.get(key)?;
        let choice = Choice {
            sampling: &active.request.sampling,
            hook: active.request.hook.as_deref(),
            prompt: &active.request.prompt,
            generated: sequence.generated(),
            branch: key.branch,
            seed: active.seed,
            too_early: active.rules.too_early(sequence.generated().len()),
        };
        let token = match self.sampler.choose(row, &choice) {
            Ok(token) => token,
            Err(why) => {
                self.end_request(key.request, FinishReason::Failed(why));
                return Ok(());
            }
        };
        let Some(branch) = active.branches.get_mut(&key.branch) else {
            return Ok(());
        };
        if let Some(top) = active.request.logprobs {
            branch.logprobs.push(sampler::logprobs(row, token, top));
        }
        if !active.request.streams() {
            let logit = f64::from(row[token as usize]);
            branch.logprob += logit - sampler::log_sum_exp(row);
        }
        branch.push(token, &active.rules);
        active.report.generated_tokens += 1;
        if branch.finish.is_none() {
            return self.scheduler.extend(key, token);
        }
        self.scheduler.remove(key);
        Ok(())
    }

    /// Brings a beam's continuations to its search, which goes on when all beams have.
    fn search(&mut self, key: SeqKey, row: &[f32]) -> Result<()> {
        let sequence = self.scheduler.get_mut(key)?;
        sequence.parked = true;
        let Some(active) = self.requests.get_mut(&key.request) else {
            return Ok(());
        };
        let Some(beams) = &mut active.beams else {
            return Ok(());
        };
        let total = sampler::log_sum_exp(row);
        if !total.is_finite() {
            let why = FinishReason::Failed("the logits are not numbers".into());
            self.end_request(key.request, why);
            return Ok(());
        }
        // As in transformers, options that change logits change log-probabilities here.
        let mut logprobs: Vec<f32> = row.iter().map(|&x| (f64::from(x) - total) as f32).collect();
        let choice = Choice {
            sampling: &active.request.sampling,
            hook: None,
            prompt: &active.request.prompt,
            generated: sequence.generated(),
            branch: key.branch,
            seed: active.seed,
            too_early: active.rules.too_early(sequence.generated().len()),
        };
        sampler::adjust(&mut logprobs, &choice);
        let best = sampler::largest(&logprobs, beams.candidates());
        let best = best
            .into_iter()
            .map(|(token, logprob)| (token, f64::from(logprob)));
        if !beams.offer(key.branch, best.collect()) {
            return Ok(());
        }
        let scheduler = &self.scheduler;
        let children = beams.select(|branch| {
            let key = SeqKey { branch, ..key };
            scheduler
                .sequences
                .get(&key)
                .map_or(&[][..], |beam| beam.generated())
        });
        if !children.is_empty() {
            return self.grow(key, &children);
        }
        if beams.found_nothing() {
            let why = FinishReason::Failed(sampler::NO_TOKEN.into());
            self.end_request(key.request, why);
            return Ok(());
        }
        for key in self.scheduler.branches(key.request) {
            self.scheduler.remove(key);
        }
        if let Some(beams) = active.beams.take() {
            active.found(beams.into_best(), self.tokenizer.as_ref());
        }
        Ok(())
    }

    /// Makes the beams of the next step: a parent's first child continues in its place, others
    /// fork from it, and parents without a child end.
    fn grow(&mut self, any: SeqKey, children: &[Child]) -> Result<()> {
        let Some(active) = self.requests.get_mut(&any.request) else {
            return Ok(());
        };
        let Some(beams) = &mut active.beams else {
            return Ok(());
        };
        let mut live: Vec<(u32, f64)> = Vec::with_capacity(children.len());
        for child in children {
            let mut branch = child.parent;
            if live.iter().any(|&(taken, _)| taken == branch) {
                branch = active.next_branch;
                active.next_branch += 1;
                let parent = SeqKey {
                    branch: child.parent,
                    ..any
                };
                self.scheduler.fork(parent, branch)?;
            }
            live.push((branch, child.score));
        }
        for &(branch, _) in &beams.live {
            if !live.iter().any(|&(taken, _)| taken == branch) {
                self.scheduler.remove(SeqKey { branch, ..any });
            }
        }
        for (child, &(branch, _)) in children.iter().zip(&live) {
            self.scheduler
                .extend(SeqKey { branch, ..any }, child.token)?;
        }
        active.report.generated_tokens += children.len();
        beams.live = live;
        Ok(())
    }

    /// Times of the first token of a request and between tokens of a sequence.
    fn note_token(&mut self, key: SeqKey) {
        let Some(active) = self.requests.get_mut(&key.request) else {
            return;
        };
        let now = Instant::now();
        let since_submission = now - active.submitted;
        match active.report.first_token {
            None => {
                active.report.first_token = Some(since_submission);
                self.metrics.first_token(since_submission);
            }
            Some(_) => {
                // Samples come one by one in the same step: the gap is that of the first.
                let gap = active.last_token.map(|last| now - last);
                if let Some(gap) = gap.filter(|_| active.last_step != self.scheduler.step) {
                    self.metrics.inter_token(gap);
                }
            }
        }
        active.last_token = Some(now);
        active.last_step = self.scheduler.step;
    }
}
