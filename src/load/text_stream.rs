//! Tokens to text, piece by piece.

use std::sync::Arc;

use tokenizers::Tokenizer;

use super::tokenizer::caught;
use crate::error::{Error, Result};

/// Turns a stream of tokens into a stream of text whose pieces, put together, are what
/// decoding all tokens at once gives.
///
/// A token alone has no text: it may hold half a character, and some tokenizers treat the
/// first token of a text differently. So each piece is the *difference* between decoding a
/// short window of tokens with and without the new one (the method of Hugging Face's
/// text-generation-inference), and text that ends in U+FFFD waits until a token completes the
/// character or [`TextStream::finish`] says that none will come. Byte tokens (`<0xE2>`, the
/// fallback of SentencePiece) wait for the token after them: decoded as a whole, a run of them is
/// text only if all of it is valid UTF-8. [`TextStream::waiting`] tells what they are so far.
///
/// A push decodes the tokens since the last piece but one: two or three in ordinary text.
#[derive(Debug, Clone)]
pub struct TextStream {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    /// Tokens of the last piece, then those that are not text yet.
    window: Vec<u32>,
    /// How many of `window` are the last piece.
    emitted: usize,
}

impl TextStream {
    /// An empty stream. With `skip_special` control tokens give no text.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Self {
        Self {
            tokenizer,
            skip_special,
            window: Vec::new(),
            emitted: 0,
        }
    }

    /// Appends a token and returns the text that is complete now, `None` if none is. An id
    /// past the tokenizer's vocabulary (models pad theirs) has no text.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the decoder refuses; the stream is unchanged then.
    pub fn push(&mut self, token: u32) -> Result<Option<String>> {
        let added = self.tokenizer.get_added_vocabulary();
        match self.tokenizer.id_to_token(token) {
            // Tokens without text would only make the window longer.
            None => return Ok(None),
            Some(text) if self.skip_special && added.is_special_token(&text) => return Ok(None),
            Some(text) if is_byte(&text) => {
                self.window.push(token);
                return Ok(None);
            }
            Some(_) => self.window.push(token),
        }
        let new = self.new_text().inspect_err(|_| {
            self.window.pop();
        })?;
        if new.is_empty() || new.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(None);
        }
        self.window.drain(..self.emitted);
        self.emitted = self.window.len();
        Ok(Some(new))
    }

    /// The text that would be complete if no token came after those pushed, empty if they end
    /// inside a character. A token that does come may still turn it into U+FFFD. Decodes all
    /// tokens that wait.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the decoder refuses.
    pub fn waiting(&self) -> Result<String> {
        if self.window.len() == self.emitted {
            return Ok(String::new());
        }
        let mut text = self.new_text()?;
        if text.ends_with(char::REPLACEMENT_CHARACTER) {
            text.clear();
        }
        Ok(text)
    }

    /// The text that was still waiting, with U+FFFD where the tokens end inside a character.
    /// The stream is empty afterwards.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the decoder refuses.
    pub fn finish(&mut self) -> Result<String> {
        let rest = self.new_text()?;
        self.window.clear();
        self.emitted = 0;
        Ok(rest)
    }

    /// Text of the window past that of the piece already given out.
    fn new_text(&self) -> Result<String> {
        let decode = |tokens: &[u32]| {
            caught(|| self.tokenizer.decode(tokens, self.skip_special)).map_err(Error::Tokenizer)
        };
        let (old, _) = self.window.split_at(self.emitted.min(self.window.len()));
        let old = decode(old)?;
        let all = decode(&self.window)?;
        // A decoder that changes earlier text gets the longest part that still agrees.
        let agree = old
            .char_indices()
            .zip(all.chars())
            .find(|((_, a), b)| a != b)
            .map_or(old.len().min(all.len()), |((at, _), _)| at);
        Ok(all.get(agree..).unwrap_or_default().to_string())
    }
}

/// Whether the token is `<0xE2>` or the like.
fn is_byte(token: &str) -> bool {
    let digits = token.strip_prefix("<0x").and_then(|t| t.strip_suffix('>'));
    digits.is_some_and(|d| d.len() == 2 && u8::from_str_radix(d, 16).is_ok())
}
