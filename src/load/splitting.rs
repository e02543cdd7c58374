//! How byte-level BPE cuts text into words before the merges.

use tokenizers::{
    pre_tokenizers::{
        PreTokenizerWrapper, byte_level::ByteLevel, digits::Digits, sequence::Sequence,
        split::Split, split::SplitPattern,
    },
    tokenizer::SplitDelimiterBehavior,
};

use crate::error::{Error, Result};

/// A splitting rule, and what else goes with its name.
pub(super) struct Rule {
    pub(super) split: PreTokenizerWrapper,
    /// A word that is a token is that token, whatever the merges would make of it.
    pub(super) ignore_merges: bool,
    /// Whether BOS is added where the file does not say.
    pub(super) add_bos: bool,
}

/// Llama 3's expression (its `tokenizer.json`), of which others differ in the digits.
macro_rules! llama3 {
    ($digits:literal) => {
        concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|",
            $digits,
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    };
}
const LLAMA3: &str = llama3!(r"\p{N}{1,3}");
const QWEN2: &str = llama3!(r"\p{N}");

/// GPT-4o's expression (the `tokenizer.json` of GPT-OSS), of which Tekken (that of Mistral Nemo)
/// lacks the contractions and takes digits one by one.
macro_rules! gpt4o {
    ($contractions:literal, $digits:literal) => {
        concat!(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
            $contractions,
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
            $contractions,
            "|",
            $digits,
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    };
}
const GPT4O: &str = gpt4o!(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}");
const TEKKEN: &str = gpt4o!("", r"\p{N}");

/// The rule that a GGUF file calls `pre`; `place` names the file in errors. The names are
/// llama.cpp's (`src/llama-vocab.cpp`), which stand for regular expressions: GPT-2's, alone or
/// after every digit was set apart, or those above. llama.cpp reads GPT-4o's and Tekken's letter
/// classes as ASCII's, and so differs where capitals are accented or marks combine. The regular
/// expression of [`ByteLevel`] is GPT-2's, and `char::is_numeric`, by which [`Digits`] splits, is
/// `\p{N}`.
///
/// # Errors
/// [`Error::Unsupported`] for another rule: one that is merely close gives wrong ids without
/// an error.
pub(super) fn rule(pre: &str, place: &str) -> Result<Rule> {
    let gpt2 = || ByteLevel::new(false, true, true);
    let split = match pre {
        "gpt-2" | "phi-2" | "olmo" => gpt2().into(),
        "smollm" | "starcoder" | "refact" => {
            Sequence::new(vec![Digits::new(true).into(), gpt2().into()]).into()
        }
        "llama-bpe" | "llama3" | "llama-v3" | "dbrx" | "smaug-bpe" | "glm4" | "chatglm-bpe" => {
            words(LLAMA3)?
        }
        "qwen2" | "deepseek-r1-qwen" | "stablelm2" => words(QWEN2)?,
        "gpt-4o" => words(GPT4O)?,
        "tekken" => words(TEKKEN)?,
        other => {
            return Err(Error::Unsupported {
                what: "pre-tokenizer",
                got: format!("`{other}` in {place}"),
                supported: "`gpt-2`, `phi-2`, `olmo`, `smollm`, `starcoder`, `refact`, \
                            `llama-bpe`, `dbrx`, `smaug-bpe`, `glm4`, `chatglm-bpe`, `qwen2`, \
                            `deepseek-r1-qwen`, `stablelm2`, `gpt-4o`, `tekken`"
                    .into(),
            });
        }
    };
    let llama3 = matches!(pre, "llama-bpe" | "llama3" | "llama-v3");
    let tekken = pre == "tekken";
    Ok(Rule {
        split,
        ignore_merges: llama3 || tekken || pre == "glm4",
        add_bos: llama3 || tekken,
    })
}

/// The matches of an expression and what lies between them, then bytes as letters.
fn words(expression: &str) -> Result<PreTokenizerWrapper> {
    let pattern = SplitPattern::Regex(expression.into());
    let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
        .map_err(|e| Error::Tokenizer(e.to_string()))?;
    let letters = ByteLevel::new(false, true, false);
    Ok(Sequence::new(vec![split.into(), letters.into()]).into())
}
