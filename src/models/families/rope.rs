//! Rope, from both kinds of configuration.

use super::super::rope_spec::{LongRopeDivisors, RopePairs, RopeScaling, RopeSpec};
use super::json::Json;
use super::metadata::Gguf;
use super::{OP, unsupported};
use crate::error::{Error, Result, cut};

/// Rope base where a GGUF file names none.
const DEFAULT_BASE: f64 = 10_000.0;
/// YaRN's bounds where a configuration names none (transformers, and ggml).
const BETA_FAST: f64 = 32.0;
const BETA_SLOW: f64 = 1.0;

/// What a family of Hugging Face's layout assumes where the configuration is silent.
#[derive(Clone, Copy)]
pub(super) struct RopeDefaults {
    /// The base.
    pub(super) base: f64,
    /// The part of a head that is turned; `None` for a family that turns all of it and has
    /// no field for less.
    pub(super) turned: Option<f64>,
}

impl RopeDefaults {
    /// These with another base.
    pub(super) const fn with_base(self, base: f64) -> Self {
        Self { base, ..self }
    }
}

/// What a rope depends on besides its own fields.
#[derive(Clone, Copy)]
pub(super) struct Head {
    pub(super) dim: usize,
    pub(super) context: usize,
}

/// Rope of transformers 5 (`rope_parameters` holds everything) or of the releases before it
/// (`rope_theta` beside `rope_scaling`, whose kind was first called `type`).
pub(super) fn from_config(json: &Json<'_>, head: Head, defaults: RopeDefaults) -> Result<RopeSpec> {
    let base = json.optional_number("rope_theta")?;
    let turned = match defaults.turned {
        Some(default) => {
            let turned = json.optional_number("partial_rotary_factor")?;
            Some(turned.unwrap_or(default))
        }
        None => None,
    };
    let defaults = RopeDefaults {
        base: base.unwrap_or(defaults.base),
        turned,
    };
    let parameters = match json.object("rope_parameters")? {
        Some(parameters) => Some(parameters),
        None => json.object("rope_scaling")?,
    };
    match parameters {
        Some(parameters) => {
            let outer = json.optional_count("original_max_position_embeddings")?;
            from_parameters(&parameters, head, outer, defaults)
        }
        None => Ok(plain(head, defaults)),
    }
}

/// The rope of a configuration that says nothing.
pub(super) fn plain(head: Head, defaults: RopeDefaults) -> RopeSpec {
    spec(head.dim, defaults.base, defaults.turned, RopeScaling::None)
}

/// Rope from an object of parameters. `outer` is the original context that the configuration
/// names beside them, which then has precedence.
pub(super) fn from_parameters(
    json: &Json<'_>,
    head: Head,
    outer: Option<usize>,
    defaults: RopeDefaults,
) -> Result<RopeSpec> {
    let base = json.optional_number("rope_theta")?.unwrap_or(defaults.base);
    let kind = match json.optional_text("rope_type")? {
        Some(kind) => kind,
        None => json.optional_text("type")?.unwrap_or("default"),
    };
    // Read after the other name: files of the years between hold both.
    json.optional_text("type")?;
    let mut turned = json
        .optional_number("partial_rotary_factor")?
        .or(defaults.turned);
    let partial = turned.is_some_and(|turned| turned != 1.0);
    if partial && defaults.turned.is_none() && kind != "proportional" {
        return Err(unsupported("rope", "partial_rotary_factor".into(), "1"));
    }
    let factor = || json.number("factor");
    let inner = json.optional_count("original_max_position_embeddings")?;
    let original = outer.or(inner).unwrap_or(head.context);
    let scaling = match kind {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: factor()? },
        // Plain up to the context length, where the decoder ends.
        "dynamic" => {
            factor()?;
            RopeScaling::None
        }
        "llama3" => RopeScaling::Llama3 {
            factor: factor()?,
            low_freq_factor: json.number("low_freq_factor")?,
            high_freq_factor: json.number("high_freq_factor")?,
            original_context: original,
        },
        "yarn" => yarn(json, factor()?, original)?,
        "longrope" | "su" => long_rope(json, head, original, turned_dim(head.dim, turned) / 2)?,
        "proportional" => {
            let part = turned.take().unwrap_or(1.0);
            RopeScaling::Proportional {
                turned: (part * head.dim as f64 / 2.0) as usize,
                factor: json.optional_number("factor")?.unwrap_or(1.0),
            }
        }
        other => {
            return Err(unsupported(
                "rope scaling",
                cut(other),
                "default, linear, dynamic, llama3, yarn, longrope, proportional",
            ));
        }
    };
    json.finish()?;
    Ok(spec(head.dim, base, turned, scaling))
}

fn spec(dim: usize, base: f64, turned: Option<f64>, scaling: RopeScaling) -> RopeSpec {
    RopeSpec {
        dim: turned_dim(dim, turned),
        base,
        pairs: RopePairs::Halves,
        scaling,
    }
}

/// Elements of a head of `dim` that are turned.
fn turned_dim(dim: usize, turned: Option<f64>) -> usize {
    (turned.unwrap_or(1.0) * dim as f64) as usize
}

fn yarn(json: &Json<'_>, factor: f64, original_context: usize) -> Result<RopeScaling> {
    let mscale = json.optional_number("mscale")?.filter(|&x| x != 0.0);
    let all_dim = json
        .optional_number("mscale_all_dim")?
        .filter(|&x| x != 0.0);
    let attention_factor = match (json.optional_number("attention_factor")?, mscale, all_dim) {
        (Some(factor), ..) => factor,
        (None, Some(above), Some(below)) => yarn_mscale(factor, above) / yarn_mscale(factor, below),
        (None, ..) => yarn_mscale(factor, 1.0),
    };
    Ok(RopeScaling::Yarn {
        factor,
        original_context,
        beta_fast: json.optional_number("beta_fast")?.unwrap_or(BETA_FAST),
        beta_slow: json.optional_number("beta_slow")?.unwrap_or(BETA_SLOW),
        truncate: json.optional_flag("truncate")?.unwrap_or(true),
        attention_factor,
    })
}

/// How much larger YaRN makes cosines and sines.
fn yarn_mscale(factor: f64, weight: f64) -> f64 {
    if factor <= 1.0 {
        return 1.0;
    }
    0.1 * weight * factor.ln() + 1.0
}

fn long_rope(
    json: &Json<'_>,
    head: Head,
    original_context: usize,
    pairs: usize,
) -> Result<RopeScaling> {
    let list = |field: &str| {
        let list: Vec<f64> = json
            .list(field, "an array of numbers", serde_json::Value::as_f64)?
            .ok_or_else(|| json.missing(field))?;
        // Before each layer gets a copy.
        if list.len() != pairs {
            return Err(Error::InvalidArgument {
                op: OP,
                what: format!("{field} in {}", json.place()),
                expected: format!("{pairs} numbers, one for each of the turned pairs"),
                got: list.len().to_string(),
            });
        }
        Ok(list)
    };
    let ratio = match json.optional_number("factor")? {
        Some(factor) => factor,
        None => head.context as f64 / original_context as f64,
    };
    let attention_factor = match json.optional_number("attention_factor")? {
        Some(factor) => factor,
        None if ratio <= 1.0 => 1.0,
        None => (1.0 + ratio.ln() / (original_context as f64).ln()).sqrt(),
    };
    Ok(RopeScaling::LongRope {
        divisors: LongRopeDivisors::Listed {
            short: list("short_factor")?,
            long: list("long_factor")?,
        },
        original_context,
        attention_factor,
    })
}

/// Rope of a GGUF file. `truncate` is YaRN's, which the files do not hold.
pub(super) fn from_gguf(
    gguf: &Gguf<'_>,
    k_dim: usize,
    pairs: RopePairs,
    truncate: bool,
) -> Result<RopeSpec> {
    // Files from before `rope.scaling.type` say `scale_linear` and mean it. A factor of 0
    // means "not set" in llama.cpp.
    let old_factor = gguf.factor("rope.scale_linear")?;
    let factor = gguf
        .factor("rope.scaling.factor")?
        .or(old_factor)
        .unwrap_or(1.0);
    let scaling = match gguf.optional_text("rope.scaling.type")? {
        Some("none") => RopeScaling::None,
        None | Some("linear") if factor == 1.0 => RopeScaling::None,
        None | Some("linear") => RopeScaling::Linear { factor },
        Some("yarn") => RopeScaling::Yarn {
            factor,
            original_context: gguf.count("rope.scaling.original_context_length")?,
            beta_fast: gguf
                .factor("rope.scaling.yarn_beta_fast")?
                .unwrap_or(BETA_FAST),
            beta_slow: gguf
                .factor("rope.scaling.yarn_beta_slow")?
                .unwrap_or(BETA_SLOW),
            truncate,
            attention_factor: yarn_mscale(factor, 1.0)
                * gguf.factor("rope.scaling.attn_factor")?.unwrap_or(1.0),
        },
        Some(other) => {
            return Err(unsupported(
                "rope scaling",
                cut(other),
                "none, linear, yarn",
            ));
        }
    };
    Ok(RopeSpec {
        dim: gguf.size("rope.dimension_count")?.unwrap_or(k_dim),
        base: gguf.factor("rope.freq_base")?.unwrap_or(DEFAULT_BASE),
        pairs,
        scaling,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::super::super::rope::Rope;
    use super::*;

    /// What transformers' `ROPE_INIT_FUNCTIONS` give (`scripts/family_goldens.py`).
    const ORACLE: &str = include_str!("../../../tests/data/families/rope.json");

    fn numbers(value: &Value) -> Vec<f64> {
        value
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_f64)
            .collect()
    }

    #[test]
    fn frequencies_and_factors_are_those_of_transformers() -> Result<()> {
        let oracle: Value = serde_json::from_str(ORACLE).unwrap_or_default();
        let ropes = oracle["ropes"].as_array().map(Vec::as_slice);
        let ropes = ropes.unwrap_or_default();
        assert_eq!(ropes.len(), 18);
        for rope in ropes {
            let json = Json::new(&rope["parameters"], "oracle");
            let head = Head {
                dim: 64,
                context: 32_768,
            };
            let defaults = RopeDefaults {
                base: 0.0,
                turned: None,
            };
            let spec = from_parameters(&json, head, None, defaults)?;
            let context = rope["context"].as_u64().unwrap_or(0) as usize;
            let (got, factor) = Rope::new(&spec, context, None).into_parts();
            let want = numbers(&rope["frequencies"]);
            assert_eq!(got.len(), want.len(), "{spec:?}");
            for (got, want) in got.iter().zip(&want) {
                // Theirs is f32.
                assert!(
                    (got - want).abs() <= 1e-6 * want.abs(),
                    "{got} {want} {spec:?}"
                );
            }
            let want = rope["factor"].as_f64().unwrap_or(0.0);
            assert!((factor - want).abs() <= 1e-6, "{factor} {want} {spec:?}");

            // At a position past 16,000 the angles are exact: f64, rounded once.
            let position = 16_411;
            let angles = Rope::new(&spec, context, None).table(&[position]);
            for (i, (sin, cos)) in angles.into_iter().enumerate() {
                let (want_sin, want_cos) = (f64::from(position) * got[i]).sin_cos();
                let close = |got: f32, want: f64| (f64::from(got) - want * factor).abs() <= 1.2e-7;
                assert!(close(sin, want_sin) && close(cos, want_cos), "{i} {spec:?}");
            }
        }
        Ok(())
    }
}
