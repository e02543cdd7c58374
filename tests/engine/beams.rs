//! Beam search against a naive reimplementation of the rule of transformers 5, which expands
//! every token of every beam and knows no cache.

use candle_paged_attn::engine::{BeamSearch, EarlyStopping, EngineConfig};

use crate::common::Rng;
use crate::hash_lm::{HashLm, engine, model, prompt, request, run};

struct Naive<'a> {
    lm: &'a HashLm,
    prompt: &'a [u32],
    beams: BeamSearch,
    max_tokens: usize,
    stops: &'a [u32],
}

impl Naive<'_> {
    fn penalised(&self, sum: f64, len: usize) -> f64 {
        sum / (len as f64).powf(self.beams.length_penalty.into())
    }

    fn keep(&self, done: &mut Vec<(f64, Vec<u32>)>, tokens: Vec<u32>, sum: f64) {
        done.push((self.penalised(sum, tokens.len()), tokens));
        done.sort_by(|a, b| b.0.total_cmp(&a.0));
        done.truncate(self.beams.width);
    }

    /// Hypotheses with their scores, the best first.
    fn search(&self) -> Vec<(f64, Vec<u32>)> {
        let k = self.beams.width;
        let mut live = vec![(0.0, Vec::<u32>::new())];
        let mut done: Vec<(f64, Vec<u32>)> = vec![];
        for len in 1..=self.max_tokens {
            let mut all = vec![];
            for (sum, tokens) in &live {
                let history = [self.prompt, tokens].concat();
                let logits = self.lm.logits(&history);
                let total: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
                for (token, &logit) in logits.iter().enumerate() {
                    let mut longer = tokens.clone();
                    longer.push(token as u32);
                    all.push((sum + f64::from(logit) - total.ln(), longer));
                }
            }
            all.sort_by(|a, b| b.0.total_cmp(&a.0));
            all.truncate(k * usize::max(2, 1 + self.stops.len()));
            live.clear();
            for (rank, (sum, tokens)) in all.into_iter().enumerate() {
                let ends = self.stops.contains(tokens.last().unwrap()) || len == self.max_tokens;
                if ends && rank < k {
                    self.keep(&mut done, tokens, sum);
                } else if !ends && live.len() < k {
                    live.push((sum, tokens));
                }
            }
            let (Some((best, _)), true) = (live.first(), done.len() == k) else {
                continue;
            };
            let longest = match self.beams.early_stopping {
                EarlyStopping::Yes => return done,
                EarlyStopping::Never if self.beams.length_penalty > 0.0 => self.max_tokens,
                _ => len,
            };
            if done[k - 1].0 >= self.penalised(*best, longest) {
                return done;
            }
        }
        done
    }
}

#[test]
fn beams_are_those_of_the_naive_search() {
    let mut rng = Rng(11);
    let mut early = 0;
    for case in 0..150 {
        let vocab = 6 + rng.below(20);
        let lm = model(vocab);
        let asked = prompt(case, 1 + rng.below(18), vocab);
        let mut beams = BeamSearch::new(2 + rng.below(4));
        beams.length_penalty = [1.0, 0.0, 2.0, -0.5][rng.below(4)];
        beams.early_stopping = [
            EarlyStopping::Yes,
            EarlyStopping::Heuristic,
            EarlyStopping::Never,
        ][rng.below(3)];
        let stops: Vec<u32> = (0..rng.below(3) as u32).collect();
        let max_tokens = 1 + rng.below(10);
        let naive = Naive {
            lm: &lm,
            prompt: &asked,
            beams,
            max_tokens,
            stops: &stops,
        };
        let expected = naive.search();

        let mut request = request(&asked, max_tokens).with_beams(beams);
        request.n = 1 + rng.below(beams.width);
        request.stop_ids = stops.clone();
        // From a pool that holds one beam and makes them take turns, to an ample one.
        let block_size = [1, 4, 8][rng.below(3)];
        let least = (asked.len() + max_tokens).div_ceil(block_size);
        let blocks = least + [0, 1, least, 20 * least][rng.below(4)];
        let config = EngineConfig::default().with_max_sequences(8);
        let mut engine = engine(model(vocab), blocks, block_size, config);
        let n = request.n;
        let id = engine.add_request(request).unwrap();
        let answers = run(&mut engine);
        let samples = &answers[&id].samples;
        assert_eq!(samples.len(), n.min(expected.len()), "case {case}");
        for (sample, (score, tokens)) in samples.iter().zip(&expected) {
            assert_eq!(&sample.tokens, tokens, "case {case}");
            assert!((sample.score.unwrap() - score).abs() < 1e-4, "case {case}");
        }
        early += usize::from(expected[0].1.len() < max_tokens);
    }
    // The cases are about ends, too.
    assert!(early > 20, "{early}");
}

/// Beams beside other requests, preempted now and then.
#[test]
fn beams_in_a_crowd() {
    let asked = prompt(1, 11, 30);
    let beams = BeamSearch::new(4);
    let lm = model(30);
    let naive = Naive {
        lm: &lm,
        prompt: &asked,
        beams,
        max_tokens: 12,
        stops: &[],
    };
    let expected = naive.search();
    let config = EngineConfig::default()
        .with_max_sequences(8)
        .with_max_batch_tokens(9);
    let mut engine = engine(model(30), 18, 4, config);
    let mut wanted = vec![];
    for seed in 0..3 {
        let other = prompt(50 + seed, 13, 30);
        wanted.push((engine.add_request(request(&other, 20)).unwrap(), other));
        let searching = request(&asked, 12).with_beams(beams).with_n(4);
        engine.add_request(searching).unwrap();
    }
    let answers = run(&mut engine);
    assert!(engine.stats().preemptions > 0);
    for (id, answer) in &answers {
        if let Some((_, prompt)) = wanted.iter().find(|(other, _)| other == id) {
            assert_eq!(answer.samples[0].tokens, lm.greedy(prompt, 20));
            continue;
        }
        for (sample, (_, tokens)) in answer.samples.iter().zip(&expected) {
            assert_eq!(&sample.tokens, tokens);
        }
    }
}
