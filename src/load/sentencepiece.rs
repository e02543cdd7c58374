//! SentencePiece's BPE (`tokenizer.ggml.model = llama`): Llama 2, Yi, Mistral, Mixtral, Phi-3,
//! Gemma 1 to 3.
//!
//! SentencePiece has scores instead of merges: of all neighbours that together are a token, it
//! joins those whose token has the highest score, the leftmost of equals, until none are left.
//! Byte-level BPE's merges do the same when every way to put a token together is a merge and the
//! merges are in the order of the scores, which is how transformers converts such vocabularies.

use std::cmp::Ordering;

use candle_core::quantized::gguf_file::Value;
use tokenizers::{
    AddedToken, Tokenizer,
    decoders::{
        byte_fallback::ByteFallback, fuse::Fuse, sequence::Sequence as Decoders, strip::Strip,
    },
    models::bpe::{BPE, Merges, Vocab},
    normalizers::{Prepend, Replace, Sequence as Normalizers},
};

use super::gguf::{GgufFile, integer};
use super::tokenizer::TokenType;
use crate::error::{Error, Result};

/// What a space is in the vocabulary.
const SPACE: &str = "▁";

/// The tokenizer without its added tokens. Each stretch of text between them gets a space in
/// front, unless the file says no; what is not in the vocabulary becomes its UTF-8 bytes.
///
/// # Errors
/// [`Error::Missing`] or [`Error::Format`] if scores or byte tokens are not there or make no
/// sense, [`Error::Unsupported`] if the file asks for its text to be normalised.
pub(super) fn tokenizer(
    file: &GgufFile,
    tokens: &[&str],
    vocab: Vocab,
    types: &[TokenType],
) -> Result<Tokenizer> {
    refuse_normalisation(file)?;
    // Without types not even `<s>` would be found in a text.
    file.array("tokenizer.ggml.token_type")?;
    for byte in 0..=u8::MAX {
        let token = format!("<0x{byte:02X}>");
        if !vocab.contains_key(&token) {
            return Err(file.bad(format!("tokenizer.ggml.tokens: no byte token `{token}`")));
        }
    }
    let merges = merges(file, tokens, &vocab, types)?;
    let bpe = BPE::builder()
        .vocab_and_merges(vocab, merges)
        .byte_fallback(true)
        .build()
        .map_err(|e| file.bad(format!("tokenizer.ggml.tokens: {e}")))?;
    let prefix = file
        .optional("tokenizer.ggml.add_space_prefix", GgufFile::bool)?
        .unwrap_or(true);

    let replace =
        |from: &str, to: &str| Replace::new(from, to).map_err(|e| Error::Tokenizer(e.to_string()));
    let mut normalizers = vec![replace(" ", SPACE)?.into()];
    let mut decoders = vec![
        replace(SPACE, " ")?.into(),
        ByteFallback::new().into(),
        Fuse::new().into(),
    ];
    if prefix {
        normalizers.insert(0, Prepend::new(SPACE.into()).into());
        decoders.push(Strip::new(' ', 1, 0).into());
    }
    let mut tokenizer = Tokenizer::new(bpe);
    tokenizer
        .with_normalizer(Some(Normalizers::new(normalizers)))
        .map_err(|e| Error::Tokenizer(e.to_string()))?;
    tokenizer.with_decoder(Some(Decoders::new(decoders)));
    Ok(tokenizer)
}

/// Lets Phi-3's added tokens, all but three, swallow the white space after them: its
/// `tokenizer.json` says so, a GGUF file cannot.
pub(super) fn swallow_spaces(file: &GgufFile, added: &mut [AddedToken]) -> Result<()> {
    if file.optional("general.architecture", GgufFile::string)? == Some("phi3") {
        for token in added {
            token.rstrip = !["<unk>", "<s>", "<|endoftext|>"].contains(&token.content.as_str());
        }
    }
    Ok(())
}

/// SentencePiece can rewrite a text before it cuts it. The vocabularies of this kind do not ask
/// for that, and one that does would get wrong ids without an error.
fn refuse_normalisation(file: &GgufFile) -> Result<()> {
    const TRIM: &str = "tokenizer.ggml.remove_extra_whitespaces";
    const RULES: &str = "tokenizer.ggml.precompiled_charsmap";
    let (key, got) = if file.optional(TRIM, GgufFile::bool)? == Some(true) {
        (TRIM, "true")
    } else if file.metadata().contains_key(RULES) {
        (RULES, "present")
    } else {
        return Ok(());
    };
    Err(Error::Unsupported {
        what: "normalisation of text",
        got: format!("`{key}` is {got} in {}", file.place()),
        supported: "SentencePiece vocabularies that take the text as it is".into(),
    })
}

/// All pairs of tokens that together are a token, best score first. Costs two look-ups for each
/// character of the vocabulary.
///
/// Of equal scores the longer left part is first, so that a run of spaces, whose tokens all have
/// the same score in Llama's vocabulary, is eaten up from the left.
fn merges(file: &GgufFile, tokens: &[&str], vocab: &Vocab, types: &[TokenType]) -> Result<Merges> {
    let mut pairs: Vec<(f32, &str, &str)> = Vec::new();
    for ((&token, score), kind) in tokens.iter().zip(scores(file, tokens.len())?).zip(types) {
        // Every occurrence has been found before anything is joined, but for one that is made
        // by writing spaces as `▁`.
        if kind.is_added() && !token.contains(SPACE) {
            continue;
        }
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            let known = |part: &str| vocab.contains_key(part);
            let reached = |part: &str| known(part) || part.chars().nth(1).is_none();
            if known(left) && known(right) {
                pairs.push((score, left, right));
            } else if reached(left) && reached(right) {
                // SentencePiece also joins a character that is no token; a merge cannot.
                return Err(file.bad(format!(
                    "tokenizer.ggml.tokens: `{token}` is made of `{left}` and `{right}`, \
                     expected both to be tokens"
                )));
            }
        }
    }
    // Scores are finite. Stable, so that the same file gives the same order.
    pairs.sort_by(|(a, left, _), (b, other, _)| {
        let score = b.partial_cmp(a).unwrap_or(Ordering::Equal);
        score.then(other.len().cmp(&left.len()))
    });
    let owned = |(_, left, right): (f32, &str, &str)| (left.into(), right.into());
    Ok(pairs.into_iter().map(owned).collect())
}

fn scores(file: &GgufFile, count: usize) -> Result<Vec<f32>> {
    const KEY: &str = "tokenizer.ggml.scores";
    let values = file.array(KEY)?;
    if values.len() != count {
        return Err(file.bad(format!(
            "{KEY}: {} entries for {count} tokens",
            values.len()
        )));
    }
    let score = |(i, value): (usize, &Value)| {
        let score = match value {
            Value::F32(x) => Some(*x),
            other => integer(other).map(|n| n as f32),
        };
        score.filter(|x| x.is_finite()).ok_or_else(|| {
            file.bad(format!(
                "{KEY}[{i}]: expected a finite number, got {value:?}"
            ))
        })
    };
    values.iter().enumerate().map(score).collect()
}
