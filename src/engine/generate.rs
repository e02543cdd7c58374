//! The loop for a caller who has all prompts at hand.

use std::collections::BTreeMap;
use std::time::Duration;

use super::engine::Engine;
use super::output::{FinishReason, Output, Report, TokenLogprobs};
use super::request::{Request, RequestId};
use crate::error::{Error, Result};
use crate::models::CausalLm;

/// A finished sample.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct Sample {
    /// Generated tokens, with the one that ended the sample.
    pub tokens: Vec<u32>,
    /// Their text, empty without a tokenizer.
    pub text: String,
    /// One for each token, if asked for.
    pub logprobs: Vec<TokenLogprobs>,
    /// See [`Output::score`].
    pub score: Option<f64>,
    /// Why it ended; `None` only as long as it has not.
    pub finish: Option<FinishReason>,
}

/// The answer to a request.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct Answer {
    /// The samples, by number.
    pub samples: Vec<Sample>,
    /// The figures of the request.
    pub report: Option<Report>,
}

impl Answer {
    /// Adds what a step brought: a caller with a loop of his own collects answers with it.
    pub fn push(&mut self, output: Output) {
        if self.samples.len() <= output.sample {
            self.samples.resize_with(output.sample + 1, Sample::default);
        }
        let sample = &mut self.samples[output.sample];
        sample.tokens.extend(output.tokens);
        sample.text.push_str(&output.text);
        sample.logprobs.extend(output.logprobs);
        sample.score = output.score.or(sample.score);
        sample.finish = output.finish.or(sample.finish.take());
        self.report = output.report.or(self.report.take());
    }
}

/// How far [`Engine::generate`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// Requests that were given.
    pub requests: usize,
    /// Of these, requests that have ended or were refused.
    pub finished: usize,
    /// Tokens generated so far.
    pub tokens: usize,
}

impl<M: CausalLm + ?Sized> Engine<M> {
    /// Answers all requests, in their order, and calls `progress` after each step. A request
    /// that is refused has its error in its place and does not touch the others.
    ///
    /// Requests that were added before run along; their outputs leave with the next
    /// [`step`](Self::step).
    ///
    /// # Errors
    /// A step that fails twice ends the requests in it as
    /// [`FinishReason::Failed`](super::FinishReason::Failed). Only
    /// [`Error::PlanOutstanding`] leaves, if somebody holds a plan of the cache from the start:
    /// the requests stay then, and the next [`step`](Self::step) begins with them. For a plan
    /// that another thread makes later it waits.
    pub fn generate(
        &mut self,
        requests: Vec<Request>,
        mut progress: impl FnMut(&Progress),
    ) -> Result<Vec<Result<Answer>>> {
        let mut state = Progress {
            requests: requests.len(),
            finished: 0,
            tokens: 0,
        };
        let mut open: BTreeMap<RequestId, usize> = BTreeMap::new();
        let mut answers = Vec::with_capacity(requests.len());
        for (place, request) in requests.into_iter().enumerate() {
            let id = self.add_request(request);
            answers.push(id.map(|id| {
                open.insert(id, place);
                Answer::default()
            }));
        }
        state.finished = state.requests - open.len();
        let mut others = Vec::new();
        let (mut failures, mut stepped) = (0, false);
        while !open.is_empty() {
            let outputs = match self.step() {
                Ok(outputs) => outputs,
                // The caller's own plan will not end while it waits here; another's will.
                Err(error @ Error::PlanOutstanding { .. }) => {
                    if !stepped {
                        return Err(error);
                    }
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                }
                Err(error) => {
                    failures += 1;
                    if failures > 1 {
                        self.fail_step(&error);
                    }
                    continue;
                }
            };
            (failures, stepped) = (0, true);
            for output in outputs {
                let Some(&place) = open.get(&output.request) else {
                    others.push(output);
                    continue;
                };
                state.tokens += output.tokens.len();
                if output.report.is_some() {
                    open.remove(&output.request);
                    state.finished += 1;
                }
                if let Some(Ok(answer)) = answers.get_mut(place) {
                    answer.push(output);
                }
            }
            progress(&state);
        }
        self.ready.extend(others);
        Ok(answers)
    }
}
