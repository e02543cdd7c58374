//! SentencePiece's BPE (`tokenizer.ggml.model = llama`): Llama 2, Yi, Mistral, Mixtral, Phi-3,
//! Gemma 1 to 3.
//!
//! SentencePiece has scores instead of merges: of all neighbours that together are a token, it
//! joins those whose token has the highest score, the leftmost of equals, until none are left.
//! Byte-level BPE's merges do the same when every way to put a token together is a merge and the
//! merges are in the order of the scores, which is how transformers converts such vocabularies.

use std::{cmp::Ordering, collections::HashMap};

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

/// Bytes of the longest token that is taken: cutting one in two everywhere takes time with the
/// square of its length. Llama's and Gemma's longest have 48 and 93.
const LONGEST: usize = 1024;

/// The tokenizer without its added tokens. Each stretch of text between them gets a space in
/// front, unless the file says no; what is not in the vocabulary becomes its UTF-8 bytes.
///
/// # Errors
/// [`Error::Missing`] or [`Error::Format`] if scores or byte tokens are not there or make no
/// sense, [`Error::Unsupported`] if the file asks for its text to be normalised, or if merges
/// cannot do what SentencePiece would: with ties of scores that matter, with unused tokens that
/// other tokens make, and with tokens of more than 1024 bytes.
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

/// Two tokens that together are a token.
#[derive(Debug, Clone, Copy)]
struct Join<'a> {
    score: f32,
    token: &'a str,
    left: &'a str,
    right: &'a str,
}

/// All pairs of tokens that together are a token, best score first. Costs two look-ups for each
/// character of the vocabulary.
///
/// Of equal scores the longer left part is first, so that a run of spaces, whose tokens all have
/// the same score in Llama's vocabulary, is eaten up from the left.
fn merges(file: &GgufFile, tokens: &[&str], vocab: &Vocab, types: &[TokenType]) -> Result<Merges> {
    let kind = |part: &str| types.get(*vocab.get(part)? as usize);
    let letter = |part: &str| part.chars().nth(1).is_none();
    // Bytes that stand for a character are never joined, whatever their tokens spell.
    let known = |part: &str| kind(part).is_some_and(|kind| kind.is_joined() || letter(part));
    let mut joins: Vec<Join<'_>> = Vec::new();
    for ((&token, score), kind) in tokens.iter().zip(scores(file, tokens.len())?).zip(types) {
        if token.len() > LONGEST {
            return Err(unsupported(
                "token",
                format!("{} bytes in `tokenizer.ggml.tokens`", token.len()),
                file,
                format!("SentencePiece tokens of {LONGEST} bytes at most"),
            ));
        }
        // Every occurrence has been found before anything is joined, but for one that is made
        // by writing spaces as `▁`.
        if !kind.is_joined() || kind.is_added() && !token.contains(SPACE) {
            continue;
        }
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            let reached = |part: &str| known(part) || letter(part);
            if known(left) && known(right) {
                if *kind == TokenType::Unused {
                    return Err(unsupported(
                        "unused token",
                        format!("`{token}`, made of `{left}` and `{right}`,"),
                        file,
                        "unused tokens that no two tokens make".into(),
                    ));
                }
                joins.push(Join {
                    score,
                    token,
                    left,
                    right,
                });
            } else if reached(left) && reached(right) {
                // SentencePiece also joins a character that is no token; a merge cannot.
                return Err(file.bad(format!(
                    "tokenizer.ggml.tokens: `{token}` is made of `{left}` and `{right}`, \
                     expected both to be tokens"
                )));
            }
        }
    }
    if let Some((score, a, b)) = tie(&joins) {
        return Err(unsupported(
            "tie",
            format!("`tokenizer.ggml.scores` of `{a}` and `{b}`, both {score},"),
            file,
            "equal scores only of tokens whose order does not matter".into(),
        ));
    }
    // Scores are finite. Stable, so that the same file gives the same order.
    joins.sort_by(|a, b| {
        let score = b.score.partial_cmp(&a.score).unwrap_or(Ordering::Equal);
        score.then(b.left.len().cmp(&a.left.len()))
    });
    let owned = |join: Join<'_>| (join.left.into(), join.right.into());
    Ok(joins.into_iter().map(owned).collect())
}

fn unsupported(what: &'static str, got: String, file: &GgufFile, supported: String) -> Error {
    Error::Unsupported {
        what,
        got: format!("{got} in {}", file.place()),
        supported,
    }
}

/// Two tokens of the same score for which it matters that SentencePiece joins the leftmost
/// first: merges have an order whatever the text is. That is so if one may end with the part
/// that the other begins with, or if what one of them is joined to next, at a score no lower,
/// may be a part of the other. `None` if there are none.
///
/// Runs of one character do no harm to each other: they are eaten up from the left either way.
fn tie<'a>(joins: &[Join<'a>]) -> Option<(f32, &'a str, &'a str)> {
    // Zero has two patterns of bits.
    let bits = |score: f32| (score + 0.0).to_bits();
    let mut tokens: HashMap<u32, (&str, Option<&str>)> = HashMap::new();
    for join in joins {
        let (first, other) = tokens.entry(bits(join.score)).or_insert((join.token, None));
        if other.is_none() && differ(first, join.token) {
            *other = Some(join.token);
        }
    }
    let mut tied: HashMap<&str, (f32, &str)> = HashMap::new();
    let mut begun: HashMap<(u32, &str), Vec<&str>> = HashMap::new();
    for join in joins {
        if let Some((first, Some(other))) = tokens.get(&bits(join.score)) {
            let rival = if differ(first, join.token) {
                first
            } else {
                other
            };
            tied.insert(join.token, (join.score, rival));
            let begun = begun.entry((bits(join.score), join.left)).or_default();
            begun.push(join.token);
        }
    }
    joins.iter().find_map(|join| {
        let overlap = begun.get(&(bits(join.score), join.right));
        let overlap = overlap.and_then(|tokens| tokens.iter().find(|t| differ(t, join.token)));
        let part = |part| {
            let (score, rival) = *tied.get(part)?;
            (join.score >= score).then_some((score, part, rival))
        };
        overlap
            .map(|other| (join.score, join.token, *other))
            .or_else(|| part(join.left))
            .or_else(|| part(join.right))
    })
}

/// Whether two tokens are not the same, nor runs of the same character.
fn differ(a: &str, b: &str) -> bool {
    let run = |token: &str| {
        let first = token.chars().next();
        first.filter(|first| token.chars().all(|c| c == *first))
    };
    a != b && (run(a).is_none() || run(a) != run(b))
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
