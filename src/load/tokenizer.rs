//! Tokenizers, from `tokenizer.json` or from the metadata of a GGUF file.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
};

use tokenizers::{
    AddedToken, Tokenizer,
    decoders::byte_level::ByteLevel as ByteLevelDecoder,
    models::bpe::{BPE, Vocab},
    processors::template::{SpecialToken, TemplateProcessing},
};

use super::gguf::{GgufFile, integer};
use super::{sentencepiece, splitting};
use crate::error::{Error, Result};

/// Reads a `tokenizer.json`. Truncation and padding that the file asks for are switched off:
/// they are settings of a training run, and a prompt is encoded whole.
///
/// # Errors
/// [`Error::Io`] if it cannot be read, [`Error::Format`] if it is no tokenizer.
pub fn from_file(path: impl AsRef<Path>) -> Result<Tokenizer> {
    let path = path.as_ref();
    let text = super::json::read_text(path)?;
    caught(|| {
        let mut tokenizer = Tokenizer::from_bytes(text)?;
        tokenizer.with_truncation(None)?.with_padding(None);
        Ok(tokenizer)
    })
    .map_err(|e| Error::Format {
        path: path.into(),
        what: format!("not a tokenizer: {e}"),
    })
}

/// Calls into `tokenizers`, which panics where a file contradicts itself in ways that it does
/// not check.
pub(super) fn caught<T>(
    call: impl FnOnce() -> tokenizers::Result<T>,
) -> std::result::Result<T, String> {
    // Whatever the call has changed is dropped with it, but for caches, which hold no state.
    catch_unwind(AssertUnwindSafe(call))
        .map_err(|_| "the `tokenizers` crate panicked".to_string())?
        .map_err(|e| e.to_string())
}

/// Builds the tokenizer that a GGUF file describes. Gives llama.cpp's ids with special tokens
/// parsed; encoding with `add_special_tokens` adds the BOS and EOS tokens that the file asks
/// for, and none otherwise.
///
/// Byte-level BPE (`tokenizer.ggml.model = gpt2`) with the splitting rules of Llama 3, Qwen,
/// GPT-2, GPT-4o, StarCoder, SmolLM, Mistral's Tekken and those that share them, and
/// SentencePiece's BPE (`llama`) of Llama 2, Mistral, Phi-3 and Gemma. Where llama.cpp only comes
/// close to a model's own `tokenizer.json`, the latter counts: accented capitals and combining
/// marks under the rules of GPT-4o and Tekken, Unicode's spaces after Phi-3's special tokens.
///
/// # Errors
/// [`Error::Unsupported`] for another model or splitting rule: a rule that is merely close
/// gives wrong ids without an error. [`Error::Missing`] or [`Error::Format`] if the
/// description is incomplete or contradicts itself.
pub fn from_gguf(file: &GgufFile) -> Result<Tokenizer> {
    let model = file.string("tokenizer.ggml.model")?;
    if !["gpt2", "llama"].contains(&model) {
        return Err(Error::Unsupported {
            what: "tokenizer model",
            got: format!("`{model}` in {}", file.place()),
            supported: "`gpt2` (byte-level BPE), `llama` (SentencePiece's BPE)".into(),
        });
    }
    let tokens = file.strings("tokenizer.ggml.tokens")?;
    let vocab = vocabulary(file, &tokens)?;
    let types = token_types(file, tokens.len())?;
    let (mut tokenizer, add_bos) = if model == "llama" {
        let tokenizer = sentencepiece::tokenizer(file, &tokens, vocab, &types)?;
        (tokenizer, true)
    } else {
        byte_level(file, vocab)?
    };
    let mut added = added_tokens(&tokens, &types);
    if model == "llama" {
        sentencepiece::swallow_spaces(file, &mut added)?;
    }
    tokenizer
        .add_special_tokens(added)
        .map_err(|e| file.bad(format!("special tokens: {e}")))?;
    if let Some(template) = bos_and_eos(file, &tokens, add_bos)? {
        tokenizer.with_post_processor(Some(template));
    }
    Ok(tokenizer)
}

/// Ids by token.
fn vocabulary(file: &GgufFile, tokens: &[&str]) -> Result<Vocab> {
    let vocab: Vocab = (0u32..)
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
    Ok(vocab)
}

/// Byte-level BPE without its added tokens, and whether BOS is added where the file does not
/// say.
fn byte_level(file: &GgufFile, vocab: Vocab) -> Result<(Tokenizer, bool)> {
    let rule = splitting::rule(file.string("tokenizer.ggml.pre")?, &file.place())?;
    let merges = file
        .strings("tokenizer.ggml.merges")?
        .into_iter()
        .map(|merge| match merge.split_once(' ') {
            // `tokenizers` panics on a longer one than the longest token.
            Some((left, right)) if !vocab.contains_key(&[left, right].concat()) => {
                Err(file.bad(format!("tokenizer.ggml.merges: `{merge}` makes no token")))
            }
            Some((left, right)) => Ok((left.to_string(), right.to_string())),
            None => Err(file.bad(format!(
                "tokenizer.ggml.merges: expected two tokens and a space, got `{merge}`"
            ))),
        })
        .collect::<Result<_>>()?;
    let bpe = BPE::builder()
        .vocab_and_merges(vocab, merges)
        .ignore_merges(rule.ignore_merges)
        .build()
        .map_err(|e| file.bad(format!("tokenizer.ggml.merges: {e}")))?;
    let mut tokenizer = Tokenizer::new(bpe);
    tokenizer.with_pre_tokenizer(Some(rule.split));
    tokenizer.with_decoder(Some(ByteLevelDecoder::default()));
    Ok((tokenizer, rule.add_bos))
}

/// What a token is for, as ggml counts from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenType {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl TokenType {
    /// Whether the token is found in the text before it is split.
    pub(super) fn is_added(self) -> bool {
        matches!(self, Self::Unknown | Self::Control | Self::UserDefined)
    }

    /// Whether SentencePiece makes the token by joining others.
    pub(super) fn is_joined(self) -> bool {
        matches!(self, Self::Normal | Self::UserDefined | Self::Unused)
    }
}

/// The type of each token; all are normal if the file has no types.
fn token_types(file: &GgufFile, count: usize) -> Result<Vec<TokenType>> {
    const KEY: &str = "tokenizer.ggml.token_type";
    let Some(values) = file.optional(KEY, GgufFile::array)? else {
        return Ok(vec![TokenType::Normal; count]);
    };
    if values.len() != count {
        return Err(file.bad(format!(
            "{KEY}: {} entries for {count} tokens",
            values.len()
        )));
    }
    values
        .iter()
        .enumerate()
        .map(|(i, value)| match integer(value) {
            Some(1) => Ok(TokenType::Normal),
            Some(2) => Ok(TokenType::Unknown),
            Some(3) => Ok(TokenType::Control),
            Some(4) => Ok(TokenType::UserDefined),
            Some(5) => Ok(TokenType::Unused),
            Some(6) => Ok(TokenType::Byte),
            _ => Err(file.bad(format!("{KEY}[{i}]: expected 1 to 6, got {value:?}"))),
        })
        .collect()
}

/// Tokens that are found in the text before it is split. Control tokens (and the unknown
/// token) are dropped when text is decoded without special tokens, user-defined ones are text.
fn added_tokens(tokens: &[&str], types: &[TokenType]) -> Vec<AddedToken> {
    tokens
        .iter()
        .zip(types)
        .filter(|(_, kind)| kind.is_added())
        .map(|(token, kind)| {
            AddedToken::from(*token, *kind != TokenType::UserDefined).normalized(false)
        })
        .collect()
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
        let key = format!("tokenizer.ggml.{name}_token_id");
        let token = |id: u32| {
            tokens.get(id as usize).ok_or_else(|| {
                file.bad(format!("{key}: {id} is not below {} tokens", tokens.len()))
            })
        };
        // Checked even if it is not added: generation ends at EOS.
        file.optional(&key, GgufFile::u32)?.map(token).transpose()?;
        let wanted = file.optional(&format!("tokenizer.ggml.add_{name}_token"), GgufFile::bool)?;
        if !wanted.unwrap_or(add_bos && name == "bos") {
            continue;
        }
        let id = file.u32(&key)?;
        let token = token(id)?;
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
