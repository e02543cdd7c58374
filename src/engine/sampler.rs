//! From a row of logits to a token. Works on one row at a time, so that no sample can see the
//! batch it is in.

use std::cmp::Ordering;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::hook::{HookContext, LogitsHook};
use super::output::{TokenLogprob, TokenLogprobs};
use super::random;
use super::sampling::Sampling;

/// The choice of one token.
#[derive(Debug, Clone, Copy)]
pub(super) struct Choice<'a> {
    pub sampling: &'a Sampling,
    pub hook: Option<&'a dyn LogitsHook>,
    pub prompt: &'a [u32],
    pub generated: &'a [u32],
    /// Number of the sample.
    pub branch: u32,
    pub seed: u64,
    /// Stop ids that may not come yet.
    pub too_early: &'a [u32],
}

/// Memory that is reused from token to token.
#[derive(Debug, Default)]
pub(super) struct Sampler {
    logits: Vec<f32>,
    candidates: Vec<Candidate>,
}

/// Why there is no next token where masks have left none.
pub(super) const NO_TOKEN: &str = "no token is left to sample";

/// A token and its probability relative to the most likely one.
type Candidate = (u32, f64);

impl Sampler {
    /// The next token, or why there is none: the text of a
    /// [`FinishReason::Failed`](super::FinishReason::Failed).
    pub(super) fn choose(&mut self, row: &[f32], choice: &Choice<'_>) -> Result<u32, String> {
        let mut logits = row;
        if !leaves_logits(choice) {
            self.logits.clear();
            self.logits.extend_from_slice(row);
            let changed = self.logits.as_mut_slice();
            let context = HookContext {
                prompt: choice.prompt,
                generated: choice.generated,
                sample: choice.branch as usize,
            };
            if let Some(hook) = choice.hook {
                unharmed(|| hook.process(&context, changed))?;
            }
            adjust(changed, choice);
            if let Some(hook) = choice.hook
                && let Some(token) = unharmed(|| hook.choose(&context, changed))?
            {
                return match changed.get(token as usize) {
                    Some(_) => Ok(token),
                    None => Err(format!(
                        "the hook chose token {token}, which does not exist"
                    )),
                };
            }
            logits = changed;
        }
        let (best, most) = most_likely(logits)?;
        let sampling = choice.sampling;
        if sampling.temperature == 0.0 {
            return Ok(best);
        }
        self.candidates.clear();
        let temperature = f64::from(sampling.temperature);
        self.candidates
            .extend((0..).zip(logits).filter_map(|(token, &x)| {
                let weight = ((f64::from(x) - f64::from(most)) / temperature).exp();
                (weight > 0.0 && weight >= f64::from(sampling.min_p)).then_some((token, weight))
            }));
        if let Some(k) = sampling.top_k {
            keep_largest(&mut self.candidates, k);
        }
        if sampling.top_p < 1.0 {
            nucleus(&mut self.candidates, sampling.top_p.into());
        }
        let position = choice.generated.len();
        let unit = random::unit(choice.seed, choice.branch, position);
        Ok(draw(&self.candidates, unit).unwrap_or(best))
    }
}

/// Runs a hook of the caller; a panic is its request's end and nobody else's.
fn unharmed<T>(hook: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(hook)).map_err(|_| "the hook panicked".to_string())
}

/// Whether [`adjust`] would change nothing and there is no hook: the row need not be copied.
fn leaves_logits(choice: &Choice<'_>) -> bool {
    let sampling = choice.sampling;
    choice.hook.is_none()
        && choice.too_early.is_empty()
        && sampling.logit_bias.is_empty()
        && sampling.allowed.is_none()
        && sampling.banned.is_empty()
        && sampling.repetition_penalty == 1.0
        && sampling.presence_penalty == 0.0
        && sampling.frequency_penalty == 0.0
}

/// Bias, bans and penalties.
pub(super) fn adjust(logits: &mut [f32], choice: &Choice<'_>) {
    let sampling = choice.sampling;
    for &(token, bias) in &sampling.logit_bias {
        logits[token as usize] += bias;
    }
    if let Some(allowed) = &sampling.allowed {
        let kept: Vec<_> = allowed.iter().map(|&t| (t, logits[t as usize])).collect();
        logits.fill(f32::NEG_INFINITY);
        for (token, logit) in kept {
            logits[token as usize] = logit;
        }
    }
    for &token in sampling.banned.iter().chain(choice.too_early) {
        logits[token as usize] = f32::NEG_INFINITY;
    }
    if sampling.repetition_penalty != 1.0 {
        let mut seen: Vec<u32> = choice
            .prompt
            .iter()
            .chain(choice.generated)
            .copied()
            .collect();
        seen.sort_unstable();
        seen.dedup();
        for token in seen {
            let logit = &mut logits[token as usize];
            if *logit > 0.0 {
                *logit /= sampling.repetition_penalty;
            } else {
                *logit *= sampling.repetition_penalty;
            }
        }
    }
    if sampling.presence_penalty != 0.0 || sampling.frequency_penalty != 0.0 {
        let mut seen = choice.generated.to_vec();
        seen.sort_unstable();
        for times in seen.chunk_by(|a, b| a == b) {
            logits[times[0] as usize] -=
                sampling.presence_penalty + sampling.frequency_penalty * times.len() as f32;
        }
    }
}

/// The token with the largest logit, the smallest id among equals, and that logit.
fn most_likely(logits: &[f32]) -> Result<(u32, f32), String> {
    const LANES: usize = 16;
    let mut best = (0, f32::NEG_INFINITY);
    let mut nan = false;
    // The largest of each part, lane by lane, which the compiler makes vectors of; the token
    // only where it counts.
    for (number, part) in logits.chunks(1024).enumerate() {
        let (lanes, rest) = part.as_chunks::<LANES>();
        let mut most = [f32::NEG_INFINITY; LANES];
        let mut nans = [false; LANES];
        for lane in lanes {
            for i in 0..LANES {
                most[i] = if lane[i] > most[i] { lane[i] } else { most[i] };
                nans[i] |= lane[i].is_nan();
            }
        }
        nan |= nans.contains(&true) || rest.iter().any(|x| x.is_nan());
        let most = most.iter().chain(rest).copied().fold(best.1, f32::max);
        if most > best.1 {
            let at = part.iter().position(|&x| x == most).unwrap_or(0);
            best = ((1024 * number + at) as u32, most);
        }
    }
    if nan {
        return Err("the logits are not numbers".into());
    }
    if !best.1.is_finite() {
        return Err(NO_TOKEN.into());
    }
    Ok(best)
}

/// Most likely first, the smaller id among equals. What is no number is least likely.
fn by_likelihood<T: Copy + Into<f64>>(a: &(u32, T), b: &(u32, T)) -> Ordering {
    let weight = |x: T| match x.into() {
        x if x.is_nan() => f64::NEG_INFINITY,
        // Both zeros are one.
        x => x + 0.0,
    };
    weight(b.1).total_cmp(&weight(a.1)).then(a.0.cmp(&b.0))
}

/// Keeps the `k` most likely, in order. Linear in the candidates.
fn keep_largest<T: Copy + Into<f64>>(candidates: &mut Vec<(u32, T)>, k: usize) {
    if k < candidates.len() {
        candidates.select_nth_unstable_by(k, by_likelihood);
        candidates.truncate(k);
    }
    candidates.sort_unstable_by(by_likelihood);
}

/// Keeps the most likely candidates up to the one with which they reach the share `p` of the
/// probability of all, in order.
fn nucleus(candidates: &mut Vec<Candidate>, p: f64) {
    let enough = p * candidates.iter().map(|(_, weight)| weight).sum::<f64>();
    // The nucleus is mostly far smaller than the vocabulary: only as much as is needed is
    // put in order.
    let mut ordered = 0;
    let mut sum = 0.0;
    while ordered < candidates.len() {
        let rest = &mut candidates[ordered..];
        let next = rest.len().min((3 * ordered).max(64));
        if next < rest.len() {
            rest.select_nth_unstable_by(next, by_likelihood);
        }
        rest[..next].sort_unstable_by(by_likelihood);
        for (i, (_, weight)) in rest[..next].iter().enumerate() {
            sum += weight;
            if sum >= enough {
                candidates.truncate(ordered + i + 1);
                return;
            }
        }
        ordered += next;
    }
}

/// The candidate at the share `unit` of the sum of all weights.
fn draw(candidates: &[Candidate], unit: f64) -> Option<u32> {
    let mut left = unit * candidates.iter().map(|(_, weight)| weight).sum::<f64>();
    let at = candidates.iter().find(|(_, weight)| {
        left -= weight;
        left < 0.0
    });
    // Rounding can leave a rest of 0 behind the last one.
    at.or(candidates.last()).map(|&(token, _)| token)
}

/// Natural logarithm of the sum of exponentials, in f64.
pub(super) fn log_sum_exp(row: &[f32]) -> f64 {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let most = f64::from(most);
    let sum: f64 = row.iter().map(|&x| (f64::from(x) - most).exp()).sum();
    most + sum.ln()
}

/// Log-probabilities of `token` and of the `top` most likely tokens of a row.
pub(super) fn logprobs(row: &[f32], token: u32, top: usize) -> TokenLogprobs {
    let total = log_sum_exp(row);
    let of = |(token, logit): (u32, f32)| TokenLogprob {
        token,
        logprob: (f64::from(logit) - total) as f32,
    };
    TokenLogprobs {
        token: of((token, row.get(token as usize).copied().unwrap_or(f32::NAN))),
        top: largest(row, top).into_iter().map(of).collect(),
    }
}

/// The `k` largest values of a row with their tokens, the largest first.
pub(super) fn largest(row: &[f32], k: usize) -> Vec<(u32, f32)> {
    if k == 0 {
        return Vec::new();
    }
    let mut all: Vec<_> = (0..).zip(row.iter().copied()).collect();
    keep_largest(&mut all, k);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_the_largest_is_found_wherever_it_stands() {
        for len in [1, 15, 16, 1023, 1024, 2500] {
            let row: Vec<f32> = (0..len).map(|i| -1.0 - (i * 7919 % 97) as f32).collect();
            for at in (0..len).step_by(11).chain([len - 1]) {
                let mut row = row.clone();
                row[at] = 0.5;
                assert_eq!(most_likely(&row), Ok((at as u32, 0.5)));
                row[len - 1] = 0.5;
                assert_eq!(most_likely(&row), Ok((at as u32, 0.5)));
                row[at] = f32::NAN;
                assert!(most_likely(&row).is_err());
            }
        }
        assert_eq!(most_likely(&[-0.0, 0.0]), Ok((0, 0.0)));
        let infinite = [f32::NEG_INFINITY; 40];
        assert!(most_likely(&infinite).is_err());
        assert!(most_likely(&[1.0, f32::INFINITY]).is_err());
    }
}
