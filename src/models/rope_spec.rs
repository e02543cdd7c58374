//! What a rotary position embedding is.

use super::spec::refuse;
use crate::error::Result;

/// Rotary position embedding (Su et al. 2021, arXiv:2104.09864).
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct RopeSpec {
    /// Elements of a head that are rotated, even; the rest passes through.
    pub dim: usize,
    /// Base of the geometric row of frequencies: `base^(-2i / dim)`.
    pub base: f64,
    /// Which elements form a pair.
    pub pairs: RopePairs,
    /// How the frequencies are stretched for a longer context.
    pub scaling: RopeScaling,
}

/// Which two elements of a head rope turns together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RopePairs {
    /// `i` and `i + dim / 2`: most checkpoints in Hugging Face's layout.
    Halves,
    /// `2i` and `2i + 1`: the paper, GLM-4, Helium, and GGUF files of the `llama` architecture
    /// and its kin, whose q and k rows are permuted to match.
    Neighbours,
}

/// How rope frequencies differ from the plain geometric row. The names are those of
/// transformers' `modeling_rope_utils`.
///
/// `dynamic` is not among them: it leaves the frequencies plain up to
/// `max_position_embeddings`, where a [`Decoder`](super::Decoder) ends.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// They do not.
    None,
    /// All divided by `factor` (position interpolation: Chen et al. 2023, arXiv:2306.15595).
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1: wavelengths above `original_context / low_freq_factor` are divided by
    /// `factor`, those below `original_context / high_freq_factor` are kept, those between are
    /// blended.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Where the low frequencies begin, in turns per original context.
        low_freq_factor: f64,
        /// Where the high frequencies begin, in turns per original context.
        high_freq_factor: f64,
        /// Context length before the extension.
        original_context: usize,
    },
    /// YaRN (Peng et al. 2023, arXiv:2309.00071): frequencies of fewer than `beta_slow` turns
    /// per original context are divided by `factor`, those of more than `beta_fast` are kept,
    /// those between are blended by their number.
    Yarn {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Context length before the extension.
        original_context: usize,
        /// Turns per original context above which a frequency is kept.
        beta_fast: f64,
        /// Turns per original context below which a frequency is divided.
        beta_slow: f64,
        /// Whether the ends of the blend are rounded outwards to whole numbers.
        truncate: bool,
        /// Factor of every cosine and sine.
        attention_factor: f64,
    },
    /// LongRoPE (Ding et al. 2024, arXiv:2402.13753): a divisor for each frequency, of one
    /// list if the model runs up to `original_context` tokens and of another beyond.
    ///
    /// Keys of both lists cannot share a cache, so one list serves all sequences: the long
    /// one, unless [`ModelSpec::with_context_length`](super::ModelSpec::with_context_length)
    /// limits the model to its original context.
    LongRope {
        /// The two lists.
        divisors: LongRopeDivisors,
        /// Context length before the extension.
        original_context: usize,
        /// Factor of every cosine and sine.
        attention_factor: f64,
    },
    /// Only the first `turned` pairs turn, at frequencies divided by `factor`.
    Proportional {
        /// Pairs that turn.
        turned: usize,
        /// The divisor.
        factor: f64,
    },
}

/// Where the divisors of [`RopeScaling::LongRope`] are.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum LongRopeDivisors {
    /// In the configuration, `dim / 2` in each list.
    Listed {
        /// Divisors within the original context.
        short: Vec<f64>,
        /// Divisors beyond it.
        long: Vec<f64>,
    },
    /// In the checkpoint, under
    /// [`WeightNames::rope_short`](super::WeightNames::rope_short) and `rope_long`.
    Stored,
}

impl RopeSpec {
    pub(super) fn check(&self, k_dim: usize) -> Result<()> {
        if self.dim == 0 || !self.dim.is_multiple_of(2) || self.dim > k_dim {
            return refuse(
                "rope dimension",
                &format!("even, from 2 to the head dimension {k_dim}"),
                self.dim,
            );
        }
        // Frequencies fall with their number: a base of 1 would give YaRN no number to find.
        if !(self.base.is_finite() && self.base > 1.0) {
            return refuse("rope base", "a number above 1", self.base);
        }
        self.scaling.check(self.dim / 2)
    }
}

impl RopeScaling {
    fn check(&self, pairs: usize) -> Result<()> {
        let sound = |x: &f64| x.is_finite() && *x > 0.0;
        let (fits, rule) = match self {
            Self::None => (true, ""),
            Self::Linear { factor } => (sound(factor), "a positive factor"),
            Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_context,
            } => (
                sound(factor)
                    && sound(low)
                    && high.is_finite()
                    && high > low
                    && *original_context > 0,
                "positive factors, high_freq_factor above low_freq_factor",
            ),
            Self::Yarn {
                factor,
                original_context,
                beta_fast,
                beta_slow,
                attention_factor,
                ..
            } => (
                [factor, beta_fast, beta_slow, attention_factor]
                    .into_iter()
                    .all(sound)
                    && *original_context > 0,
                "positive factors",
            ),
            Self::LongRope {
                divisors,
                original_context,
                attention_factor,
            } => {
                let listed = match divisors {
                    LongRopeDivisors::Stored => true,
                    LongRopeDivisors::Listed { short, long } => [short, long]
                        .into_iter()
                        .all(|list| list.len() == pairs && list.iter().all(sound)),
                };
                (
                    listed && sound(attention_factor) && *original_context > 0,
                    "positive factors, one divisor for each of the turned pairs",
                )
            }
            Self::Proportional { turned, factor } => (
                sound(factor) && (1..=pairs).contains(turned),
                "a positive factor and at least one turned pair",
            ),
        };
        if fits {
            return Ok(());
        }
        let got = match self {
            // The lists themselves would bury the message.
            Self::LongRope {
                divisors: LongRopeDivisors::Listed { short, long },
                attention_factor,
                ..
            } => format!(
                "{} short and {} long divisors, attention factor {attention_factor}",
                short.len(),
                long.len()
            ),
            other => format!("{other:?}"),
        };
        refuse("rope scaling", rule, format!("{got}, {pairs} pairs"))
    }
}
