//! Tokenizers, from `tokenizer.json` or from the metadata of a GGUF file.

use std::path::Path;

use tokenizers::{
    AddedToken, Tokenizer,
    decoders::byte_level::ByteLevel as ByteLevelDecoder,
    models::bpe::BPE,
    processors::template::{SpecialToken, TemplateProcessing},
};

use super::gguf::{GgufFile, integer};
use super::splitting;
use crate::error::{Error, Result};

/// Reads a `tokenizer.json`.
///
/// # Errors
/// [`Error::Io`] if it cannot be read, [`Error::Format`] if it is no tokenizer.
pub fn from_file(path: impl AsRef<Path>) -> Result<Tokenizer> {
    let path = path.as_ref();
    let text = super::json::read_text(path)?;
    Tokenizer::from_bytes(text).map_err(|e| Error::Format {
        path: path.into(),
        what: format!("not a tokenizer: {e}"),
    })
}

/// Builds the tokenizer that a GGUF file describes. Gives llama.cpp's ids with special tokens
/// parsed; encoding with `add_special_tokens` adds the BOS and EOS tokens that the file asks
/// for, and none otherwise.
///
/// Byte-level BPE (`tokenizer.ggml.model = gpt2`) with the splitting rules of Llama 3, Qwen,
/// GPT-2, GPT-4o, StarCoder, SmolLM and those that share them.
///
/// # Errors
/// [`Error::Unsupported`] for another model or splitting rule: a rule that is merely close
/// gives wrong ids without an error. [`Error::Missing`] or [`Error::Format`] if the
/// description is incomplete or contradicts itself.
pub fn from_gguf(file: &GgufFile) -> Result<Tokenizer> {
    let model = file.string("tokenizer.ggml.model")?;
    if model != "gpt2" {
        return Err(Error::Unsupported {
            what: "tokenizer model",
            got: format!("`{model}` in {}", file.path().display()),
            supported: "`gpt2` (byte-level BPE)".into(),
        });
    }
    let rule = splitting::rule(file.string("tokenizer.ggml.pre")?, &file.place())?;
    let tokens = file.strings("tokenizer.ggml.tokens")?;
    let mut tokenizer = Tokenizer::new(bpe(file, &tokens, rule.ignore_merges)?);
    tokenizer.with_pre_tokenizer(Some(rule.split));
    tokenizer.with_decoder(Some(ByteLevelDecoder::default()));
    tokenizer
        .add_special_tokens(special_tokens(file, &tokens)?)
        .map_err(|e| file.bad(format!("special tokens: {e}")))?;
    if let Some(template) = bos_and_eos(file, &tokens, rule.add_bos)? {
        tokenizer.with_post_processor(Some(template));
    }
    Ok(tokenizer)
}

fn bpe(file: &GgufFile, tokens: &[&str], ignore_merges: bool) -> Result<BPE> {
    let vocab: tokenizers::models::bpe::Vocab = (0u32..)
        .zip(tokens)
        .map(|(id, token)| (token.to_string(), id))
        .collect();
    if vocab.len() != tokens.len() {
        return Err(file.bad(format!(
            "tokenizer.ggml.tokens: {} of {} tokens appear twice",
            tokens.len() - vocab.len(),
            tokens.len()
        )));
    }
    let merges = file
        .strings("tokenizer.ggml.merges")?
        .into_iter()
        .map(|merge| match merge.split_once(' ') {
            Some((left, right)) => Ok((left.to_string(), right.to_string())),
            None => Err(file.bad(format!(
                "tokenizer.ggml.merges: expected two tokens and a space, got `{merge}`"
            ))),
        })
        .collect::<Result<_>>()?;
    BPE::builder()
        .vocab_and_merges(vocab, merges)
        .ignore_merges(ignore_merges)
        .build()
        .map_err(|e| file.bad(format!("tokenizer.ggml.merges: {e}")))
}

/// Tokens that are found in the text before it is split. Control tokens (and the unknown
/// token) are dropped when text is decoded without special tokens, user-defined ones are text.
fn special_tokens(file: &GgufFile, tokens: &[&str]) -> Result<Vec<AddedToken>> {
    const KEY: &str = "tokenizer.ggml.token_type";
    let Some(kinds) = file.optional(KEY, GgufFile::array)? else {
        return Ok(Vec::new());
    };
    if kinds.len() != tokens.len() {
        return Err(file.bad(format!(
            "{KEY}: {} entries for {} tokens",
            kinds.len(),
            tokens.len()
        )));
    }
    Ok(tokens
        .iter()
        .zip(kinds)
        .filter_map(|(token, kind)| {
            // ggml: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
            let special = match integer(kind)? {
                2 | 3 => true,
                4 => false,
                _ => return None,
            };
            Some(AddedToken::from(*token, special).normalized(false))
        })
        .collect())
}

/// Puts BOS before and EOS after a text, each only if the file says so; BOS also if `add_bos`
/// and the file says nothing.
fn bos_and_eos(
    file: &GgufFile,
    tokens: &[&str],
    add_bos: bool,
) -> Result<Option<TemplateProcessing>> {
    let mut specials = Vec::new();
    let mut single = vec!["$A"];
    for name in ["bos", "eos"] {
        let wanted = file.optional(&format!("tokenizer.ggml.add_{name}_token"), GgufFile::bool)?;
        if !wanted.unwrap_or(add_bos && name == "bos") {
            continue;
        }
        let key = format!("tokenizer.ggml.{name}_token_id");
        let id = file.u32(&key)?;
        let token = tokens
            .get(id as usize)
            .ok_or_else(|| file.bad(format!("{key}: {id} is not below {} tokens", tokens.len())))?;
        let special = SpecialToken::new(name.into(), vec![id], vec![token.to_string()]);
        specials.push(special.map_err(|e| file.bad(format!("{key}: {e}")))?);
        single.insert(if name == "bos" { 0 } else { single.len() }, name);
    }
    if specials.is_empty() {
        return Ok(None);
    }
    let invariant = |what: String| Error::Invariant {
        op: "tokenizer",
        what,
    };
    TemplateProcessing::builder()
        .try_single(single)
        .map_err(invariant)?
        .special_tokens(specials)
        .build()
        .map(Some)
        .map_err(|e| invariant(e.to_string()))
}
