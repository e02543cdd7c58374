//! Typed reads from `config.json`.

use std::cell::RefCell;
use std::collections::BTreeSet;

use super::wrong_type;
use crate::error::{Error, Result, cut};

/// A `config.json` or an object inside it. `null` counts as absent.
///
/// It remembers which fields were read, so that [`Json::finish`] can refuse what is left.
pub(super) struct Json<'a> {
    object: &'a serde_json::Value,
    place: String,
    seen: RefCell<BTreeSet<String>>,
}

/// Fields of `config.json` that do not change the logits: notes, training, generation, and
/// what transformers writes for every model.
const HF_WITHOUT_EFFECT: &[&str] = &[
    "add_cross_attention",
    "architectures",
    "attention_dropout",
    "attention_softmax_in_fp32",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "classifier_dropout",
    "cls_token_id",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "embd_pdrop",
    "embedding_dropout",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "hidden_dropout",
    "id2label",
    "initial_context_length",
    "initializer_cutoff_factor",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "is_llama_config",
    "label2id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "max_sequence_length",
    "min_length",
    "model_type",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "resid_pdrop",
    "residual_dropout",
    "return_dict",
    "return_dict_in_generate",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "scale_attention_softmax_in_fp32",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
];

/// Fields that change nothing with one value, as JSON.
const HF_NEUTRAL: &[(&str, &str)] = &[
    ("full_attn_mod", "1"),
    ("interpolate_factor", "1"),
    ("mlp_type", "\"default\""),
    ("norm_type", "\"layer_norm\""),
    ("scale_attn_weights", "true"),
];

impl<'a> Json<'a> {
    pub(super) fn new(object: &'a serde_json::Value, place: &str) -> Self {
        Self {
            object,
            place: place.to_string(),
            seen: RefCell::default(),
        }
    }

    pub(super) fn place(&self) -> &str {
        &self.place
    }

    pub(super) fn missing(&self, field: &str) -> Error {
        Error::Missing {
            place: self.place.clone(),
            what: field.to_string(),
        }
    }

    pub(super) fn get(&self, field: &str) -> Option<&'a serde_json::Value> {
        self.seen.borrow_mut().insert(field.to_string());
        self.object.get(field).filter(|value| !value.is_null())
    }

    /// Whether a field is there, be it null.
    pub(super) fn has(&self, field: &str) -> bool {
        self.object.get(field).is_some()
    }

    /// Refuses every field that nothing has read and that may change the result: all but those
    /// known to have no effect, private ones (`_name_or_path`), and those that are null, false
    /// or empty.
    pub(super) fn finish(&self) -> Result<()> {
        use serde_json::Value;
        let seen = self.seen.borrow();
        let fields = self.object.as_object().into_iter().flatten();
        for (field, value) in fields {
            let idle = match value {
                Value::Null | Value::Bool(false) => true,
                Value::String(text) => text.is_empty(),
                Value::Array(items) => items.is_empty(),
                Value::Object(items) => items.is_empty(),
                _ => false,
            };
            let neutral = HF_NEUTRAL.iter().find(|(name, _)| name == field);
            let fits = match neutral {
                Some((_, text)) => serde_json::from_str::<Value>(text).is_ok_and(|it| it == *value),
                None => idle || HF_WITHOUT_EFFECT.contains(&field.as_str()),
            };
            if !(fits || field.starts_with('_') || seen.contains(field)) {
                return Err(Error::Unsupported {
                    what: "model field",
                    got: format!("{} = {} in {}", cut(field), cut(value), self.place),
                    supported: "the fields of this family; remove one that has no effect".into(),
                });
            }
        }
        Ok(())
    }

    fn read<T>(
        &self,
        field: &str,
        expected: &str,
        convert: impl Fn(&'a serde_json::Value) -> Option<T>,
    ) -> Result<Option<T>> {
        self.get(field)
            .map(|value| {
                convert(value).ok_or_else(|| wrong_type(&self.place, field, expected, value))
            })
            .transpose()
    }

    pub(super) fn optional_count(&self, field: &str) -> Result<Option<usize>> {
        self.read(field, "a whole number of at least 1", |value| {
            let count = usize::try_from(value.as_u64()?).ok()?;
            (count > 0).then_some(count)
        })
    }

    /// A whole number; 0, by which some files mean "none", counts as absent.
    pub(super) fn size(&self, field: &str) -> Result<Option<usize>> {
        let size = self.read(field, "a whole number", |value| {
            usize::try_from(value.as_u64()?).ok()
        })?;
        Ok(size.filter(|&size| size > 0))
    }

    pub(super) fn count(&self, field: &str) -> Result<usize> {
        self.optional_count(field)?
            .ok_or_else(|| self.missing(field))
    }

    pub(super) fn optional_number(&self, field: &str) -> Result<Option<f64>> {
        self.read(field, "a number", serde_json::Value::as_f64)
    }

    pub(super) fn number(&self, field: &str) -> Result<f64> {
        self.optional_number(field)?
            .ok_or_else(|| self.missing(field))
    }

    pub(super) fn optional_text(&self, field: &str) -> Result<Option<&'a str>> {
        self.read(field, "a string", serde_json::Value::as_str)
    }

    pub(super) fn optional_flag(&self, field: &str) -> Result<Option<bool>> {
        self.read(field, "true or false", serde_json::Value::as_bool)
    }

    pub(super) fn flag(&self, field: &str) -> Result<bool> {
        Ok(self.optional_flag(field)?.unwrap_or(false))
    }

    /// The array in `field`, each item converted.
    pub(super) fn list<T>(
        &self,
        field: &str,
        expected: &str,
        convert: impl Fn(&'a serde_json::Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>> {
        self.read(field, expected, |value| {
            value.as_array()?.iter().map(&convert).collect()
        })
    }

    /// The object in `field`.
    pub(super) fn object(&self, field: &str) -> Result<Option<Self>> {
        let object = self.read(field, "an object", |value| {
            value.is_object().then_some(value)
        })?;
        Ok(object.map(|object| Self::new(object, &format!("{field} in {}", self.place))))
    }
}
