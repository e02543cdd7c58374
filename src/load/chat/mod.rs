//! Chat templates: from messages to the text a model was trained on.

mod python;

use std::path::Path;

use minijinja::{Environment, context, syntax::SyntaxConfig, value::Serde};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{gguf::GgufFile, json};
use crate::error::{Error, Result};

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `"system"`, `"user"`, `"assistant"`, or what else the template knows.
    pub role: String,
    /// The text of the turn.
    pub content: String,
}

impl Message {
    /// A turn of `role`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: content.into(),
        }
    }
}

/// A model's own chat template, in Jinja, rendered as Hugging Face's transformers renders it:
/// blocks trimmed, `raise_exception`, `strftime_now` (in UTC), Python's string and dict
/// methods, `tojson` as `json.dumps` writes it.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    bos_token: String,
    eos_token: String,
}

const NAME: &str = "chat_template";
/// Bytes of a template: the longest in use have some 20,000.
const MAX_SOURCE: usize = 1 << 16;
/// Address space for a stack that is enough for [`MAX_SOURCE`] nested operators, and for the
/// deepest list that [`FUEL`] builds (some 600,000 lists) in an optimised build.
const STACK: usize = 256 << 20;
/// Instructions of one rendering: far more than a long conversation takes, and an endless
/// loop ends after a moment.
const FUEL: u64 = 1_000_000;

/// Does work that calls itself as often as a template says: the parser for each operator in a
/// row, a rendering for each list in a list, be it only to drop them.
fn with_room<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        std::thread::Builder::new()
            .stack_size(STACK)
            .spawn_scoped(scope, work)
            .map_err(|e| Error::Template(format!("cannot start a thread: {e}")))?
            .join()
            .map_err(|_| Error::Template("`minijinja` panicked".into()))?
    })
}

/// The template with blocks in the place of `{% generation %}`, by which transformers finds
/// the text to train on. The tags keep their marks for white space.
fn with_plain_blocks(source: &str) -> String {
    let mut parts = source.split("{%");
    let mut plain = parts.next().unwrap_or_default().to_string();
    for part in parts {
        plain.push_str("{%");
        let tag = part.split_once("%}").map_or("", |(tag, _)| tag);
        let marks = |c: char| c.is_whitespace() || matches!(c, '-' | '+');
        plain.push_str(&match tag.trim_matches(marks) {
            "generation" => part.replacen("generation", "if true", 1),
            "endgeneration" => part.replacen("endgeneration", "endif", 1),
            _ => part.to_string(),
        });
    }
    plain
}

fn compile(source: &str) -> Result<Environment<'static>> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build();
    environment.set_syntax(syntax.map_err(template_error)?);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", python::raise_exception);
    environment.add_function("strftime_now", python::strftime_now);
    environment.add_filter("tojson", python::tojson);
    environment
        .add_template_owned(NAME, with_plain_blocks(source))
        .map_err(template_error)?;
    Ok(environment)
}

impl ChatTemplate {
    /// Compiles a template. `bos_token` and `eos_token` are what the template calls so, empty
    /// if the model has none.
    ///
    /// # Errors
    /// [`Error::Template`] with the line if it is not valid Jinja, or if it has more than
    /// 65,536 bytes.
    pub fn new(source: &str, bos_token: &str, eos_token: &str) -> Result<Self> {
        if source.len() > MAX_SOURCE {
            let got = source.len();
            return Err(Error::Template(format!(
                "expected at most {MAX_SOURCE} bytes, got {got}"
            )));
        }
        Ok(Self {
            environment: with_room(|| compile(source))?,
            source: source.into(),
            bos_token: bos_token.into(),
            eos_token: eos_token.into(),
        })
    }

    /// The template of a model folder: `chat_template.jinja`, else the `chat_template` of
    /// `tokenizer_config.json` (a text, or a list of which the one named `default` is taken).
    /// `None` if the model has none.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Format`] if a file is there but cannot be used, and those of
    /// [`ChatTemplate::new`].
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Option<Self>> {
        let folder = folder.as_ref();
        let path = folder.join("tokenizer_config.json");
        let config: Value = json::read_if_there(&path)?.unwrap_or_default();
        let file = folder.join("chat_template.jinja");
        let (place, source) = if file.exists() {
            let source = json::read_text(&file)?;
            (file, Some(source))
        } else {
            match configured(&config) {
                Ok(source) => (path, source),
                Err(what) => return Err(Error::Format { path, what }),
            }
        };
        // A token is its text, or an object with the text as `content`.
        let token = |key: &str| {
            let token = config.get(key)?;
            token.as_str().or_else(|| token.get("content")?.as_str())
        };
        source
            .map(|source| {
                Self::new(
                    &source,
                    token("bos_token").unwrap_or_default(),
                    token("eos_token").unwrap_or_default(),
                )
            })
            .transpose()
            .map_err(|error| placed(error, &place.display().to_string()))
    }

    /// The `tokenizer.chat_template` of a GGUF file, `None` if it has none.
    ///
    /// # Errors
    /// [`Error::Format`] for metadata of another type, and those of [`ChatTemplate::new`].
    pub fn from_gguf(file: &GgufFile) -> Result<Option<Self>> {
        let Some(source) = file.optional("tokenizer.chat_template", GgufFile::string)? else {
            return Ok(None);
        };
        let token = |name: &str| -> Result<&str> {
            let Some(id) =
                file.optional(&format!("tokenizer.ggml.{name}_token_id"), GgufFile::u32)?
            else {
                return Ok("");
            };
            match file.array("tokenizer.ggml.tokens")?.get(id as usize) {
                Some(candle_core::quantized::gguf_file::Value::String(token)) => Ok(token),
                _ => Err(file.bad(format!("{name} token {id} is not in tokenizer.ggml.tokens"))),
            }
        };
        Self::new(source, token("bos")?, token("eos")?)
            .map(Some)
            .map_err(|error| placed(error, &file.place()))
    }

    /// The text of a conversation; with `add_generation_prompt` it ends where the model's
    /// answer begins. Special tokens are in the text, so encode it *without* adding any. A
    /// message that spells a special token becomes one: filter text that you do not trust.
    ///
    /// # Errors
    /// [`Error::Template`] if the template raises an exception (many refuse roles out of
    /// order), uses what is not there, or does not come to an end.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        with_room(|| {
            self.environment
                .get_template(NAME)
                .and_then(|template| {
                    template.render(context! {
                        messages => Serde(messages),
                        add_generation_prompt,
                        bos_token => &self.bos_token,
                        eos_token => &self.eos_token,
                        // Templates ask `tools is not none`, which an undefined value would
                        // pass.
                        tools => (),
                        documents => (),
                    })
                })
                .map_err(template_error)
        })
    }

    /// The template text.
    pub fn source(&self) -> &str {
        &self.source
    }
}

/// The template in a `tokenizer_config.json`.
fn configured(config: &Value) -> std::result::Result<Option<String>, String> {
    let named = match config.get("chat_template") {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(source)) => return Ok(Some(source.clone())),
        Some(Value::Array(named)) => named,
        Some(_) => return Err("chat_template: expected a text or a list of named ones".into()),
    };
    named
        .iter()
        .find(|entry| entry.get("name").and_then(Value::as_str) == Some("default"))
        .and_then(|entry| entry.get("template")?.as_str())
        .map(|source| Some(source.into()))
        .ok_or_else(|| "chat_template: the list has none named `default`".into())
}

/// The error of a template with the file that it is in.
fn placed(error: Error, place: &str) -> Error {
    match error {
        Error::Template(what) => Error::Template(format!("{what} in {place}")),
        other => other,
    }
}

/// The whole chain of causes: the message of an exception lies below the place.
fn template_error(error: minijinja::Error) -> Error {
    let mut text = error.to_string();
    let mut cause: Option<&dyn std::error::Error> = std::error::Error::source(&error);
    while let Some(inner) = cause {
        text.push_str(&format!(": {inner}"));
        cause = inner.source();
    }
    Error::Template(text)
}
