//! Beam search: the rule by which beams live, end and are ranked.
//!
//! It is that of `generate(num_beams=..)` in Hugging Face's transformers 5, step for step, so
//! that the same model gives the same answers. (Its version 4 had another at the end: a search
//! that stopped at the last step did not look at the beams still open, and the heuristic also
//! counted a continuation that had just ended.)

use std::collections::BTreeMap;

use super::output::FinishReason;
use super::request::BeamSearch;

/// When a beam search ends: as soon as it has as many hypotheses as beams and ...
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum EarlyStopping {
    /// ... nothing else (`early_stopping=True` in transformers).
    Yes,
    /// ... the best open beam, if it ended now, would not be better than the worst of them
    /// (`False`).
    Heuristic,
    /// ... no open beam could become better than the worst of them, at any length (`"never"`).
    Never,
}

/// A finished continuation.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Hypothesis {
    pub tokens: Vec<u32>,
    /// Sum of log-probabilities over generated tokens to the power of the length penalty.
    pub score: f64,
    pub finish: FinishReason,
}

/// A beam of the next step: a copy of `parent` with one more token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Child {
    pub parent: u32,
    pub token: u32,
    pub score: f64,
}

/// The beams of one request. A beam is named by the number of the sequence that holds it.
#[derive(Debug)]
pub(super) struct Beams {
    options: BeamSearch,
    max_tokens: usize,
    stops: Vec<u32>,
    /// Open beams with the sums of their log-probabilities, the best first.
    pub live: Vec<(u32, f64)>,
    /// Continuations of the beams whose logits are there, each with its log-probability.
    rows: BTreeMap<u32, Vec<(u32, f64)>>,
    done: Vec<Hypothesis>,
}

impl Beams {
    pub(super) fn new(options: BeamSearch, max_tokens: usize, stops: Vec<u32>) -> Self {
        Self {
            options,
            max_tokens,
            stops,
            live: vec![(0, 0.0)],
            rows: BTreeMap::new(),
            done: Vec::new(),
        }
    }

    /// Continuations that are looked at per step: with `width` of them ending, as many are
    /// left to go on.
    pub(super) fn candidates(&self) -> usize {
        self.options.width * (1 + self.stops.len()).max(2)
    }

    /// Takes the most likely continuations of one beam. Answers whether all beams have brought
    /// theirs: they may come in different steps, when some were preempted.
    pub(super) fn offer(&mut self, branch: u32, continuations: Vec<(u32, f64)>) -> bool {
        self.rows.insert(branch, continuations);
        self.live
            .iter()
            .all(|(branch, _)| self.rows.contains_key(branch))
    }

    /// The beams of the next step, the best first; none if the search is over. `generated`
    /// answers the tokens of a live beam.
    pub(super) fn select<'a>(&mut self, generated: impl Fn(u32) -> &'a [u32]) -> Vec<Child> {
        let mut all: Vec<Child> = Vec::new();
        for &(parent, sum) in &self.live {
            let continuations = self.rows.remove(&parent).unwrap_or_default();
            all.extend(continuations.into_iter().map(|(token, logprob)| Child {
                parent,
                token,
                score: sum + logprob,
            }));
        }
        all.retain(|child| child.score > f64::NEG_INFINITY);
        // A stable sort: equal scores stay in the order of beams and tokens.
        all.sort_by(|a, b| b.score.total_cmp(&a.score));
        all.truncate(self.candidates());
        let length = 1 + self
            .live
            .first()
            .map_or(0, |&(branch, _)| generated(branch).len());

        let last = length == self.max_tokens;
        let mut children = Vec::new();
        for (rank, child) in all.iter().enumerate() {
            let stop = self.stops.contains(&child.token);
            if stop || last {
                // An end that is not among the best `width` continuations is none.
                if rank < self.options.width {
                    let tokens = [generated(child.parent), &[child.token]].concat();
                    let finish = match stop {
                        true => FinishReason::StopToken(child.token),
                        false => FinishReason::Length,
                    };
                    self.complete(tokens, child.score, finish);
                }
            } else {
                children.push(*child);
            }
            if children.len() == self.options.width {
                break;
            }
        }
        let best = children
            .first()
            .map_or(f64::NEG_INFINITY, |child| child.score);
        if self.is_over(best, length) {
            children.clear();
        }
        children
    }

    /// Adds a hypothesis if it is among the best `width`.
    pub(super) fn complete(&mut self, tokens: Vec<u32>, sum: f64, finish: FinishReason) {
        let score = sum / self.penalty(tokens.len());
        self.done.push(Hypothesis {
            tokens,
            score,
            finish,
        });
        self.done.sort_by(|a, b| b.score.total_cmp(&a.score));
        self.done.truncate(self.options.width);
    }

    /// Whether no text has ended yet.
    pub(super) fn found_nothing(&self) -> bool {
        self.done.is_empty()
    }

    /// The hypotheses, the best first.
    pub(super) fn into_best(self) -> Vec<Hypothesis> {
        self.done
    }

    /// Whether to stop, with `best` the score of the best open beam.
    fn is_over(&self, best: f64, length: usize) -> bool {
        let Some(worst) = self.done.get(self.options.width - 1) else {
            return false;
        };
        let attainable = match self.options.early_stopping {
            EarlyStopping::Yes => return true,
            // With a positive penalty a longer text has the better score.
            EarlyStopping::Never if self.options.length_penalty > 0.0 => self.max_tokens,
            EarlyStopping::Never | EarlyStopping::Heuristic => length,
        };
        worst.score >= best / self.penalty(attainable)
    }

    fn penalty(&self, tokens: usize) -> f64 {
        (tokens.max(1) as f64).powf(self.options.length_penalty.into())
    }
}
