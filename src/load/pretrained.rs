//! One call from a path or a name to a model that can be talked to.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
};

use candle_core::{DType, Device};
use serde_json::Value;
use tokenizers::Tokenizer;

use super::{
    chat::ChatTemplate,
    check_dtype,
    gguf::{GgufFile, GgufWeights},
    json,
    progress::{LoadProgress, Observed, Observer},
    safetensors::SafetensorsWeights,
    tokenizer,
};
use crate::{
    error::{Error, Result},
    models::{self, Decoder, ModelSpec, WeightSource},
};

/// How [`from_pretrained`] loads.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LoadOptions {
    /// Compute dtype: f32, f16 or bf16. `None` is f32, and leaves the quantised matrices of a
    /// GGUF file quantised; with a dtype they are dequantised to it.
    pub dtype: Option<DType>,
    /// Longest sequence in tokens, where it is to be less than what the model was made for.
    /// Of a model with LongRoPE (Phi-3, Phi-4-mini) a limit within its original context also
    /// chooses the divisors made for short texts: see
    /// [`RopeScaling::LongRope`](crate::models::RopeScaling::LongRope).
    pub context_length: Option<usize>,
    /// Where the weights go.
    pub device: Device,
    /// Who is told how far a download and the reading of the weights are.
    pub progress: Observer,
}

impl Default for LoadOptions {
    /// f32 on the CPU, quantised matrices as they are, the model's own context length, nobody
    /// who is told of the progress.
    fn default() -> Self {
        Self {
            dtype: None,
            context_length: None,
            device: Device::Cpu,
            progress: Observer::default(),
        }
    }
}

impl LoadOptions {
    /// Sets the compute dtype; see [`LoadOptions::dtype`].
    pub fn with_dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// Limits the length of sequences; see [`LoadOptions::context_length`].
    pub fn with_context_length(mut self, tokens: usize) -> Self {
        self.context_length = Some(tokens);
        self
    }

    fn limit(&self, spec: ModelSpec) -> ModelSpec {
        match self.context_length {
            Some(tokens) => spec.with_context_length(tokens),
            None => spec,
        }
    }

    /// Sets the device of the weights.
    pub fn with_device(mut self, device: &Device) -> Self {
        self.device = device.clone();
        self
    }

    /// Calls `tell` while files are downloaded and while weights are read; see
    /// [`LoadProgress`].
    pub fn with_progress(
        mut self,
        tell: impl Fn(LoadProgress<'_>) + Send + Sync + 'static,
    ) -> Self {
        self.progress = Observer::new(tell);
        self
    }
}

/// A model with what is needed to speak to it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Pretrained {
    /// The model.
    pub model: Decoder,
    /// Its tokenizer. The prompt of a chat template is encoded without adding special tokens.
    pub tokenizer: Arc<Tokenizer>,
    /// Its chat template, if it has one.
    pub chat_template: Option<ChatTemplate>,
    /// Tokens that end an answer, ascending.
    pub eos_token_ids: Vec<u32>,
    /// The file or folder that was loaded.
    pub path: PathBuf,
}

/// Ends of a turn. Older files name only the end of a *text* as their EOS.
const CHAT_ENDS: [&str; 4] = ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", MESSAGE_END];
/// Phi-3's end of a turn. Where there is [`ANSWER_END`] too (GPT-OSS), a turn has several
/// messages, and this ends but one of them.
const MESSAGE_END: &str = "<|end|>";
const ANSWER_END: &str = "<|return|>";

/// Loads a model from a GGUF file, a folder that holds one, a folder with `config.json`,
/// `tokenizer.json` and safetensors, or (feature `hub`) by its hub id `owner/name`. What is on
/// disk wins over a hub id.
///
/// Whether the checkpoint is whole and of the family that its configuration says is checked
/// before a weight is read: it takes no longer for a large one.
///
/// # Errors
/// [`Error::ModelNotFound`] if there is no such thing; otherwise what reading its files
/// answers, [`Error::Unsupported`] for an architecture or tokenizer that this crate does not
/// run, what [`ModelSpec::check_weights`] answers for weights that do not fit, and
/// [`Error::InvalidArgument`] for a tokenizer with more tokens than the embedding has rows.
pub fn from_pretrained(model: impl AsRef<Path>, options: &LoadOptions) -> Result<Pretrained> {
    options.dtype.map(check_dtype).transpose()?;
    let model = model.as_ref();
    let path = if model.exists() {
        model.to_path_buf()
    } else {
        from_hub(model, options)?
    };
    if path.is_file() {
        return from_gguf(&path, options);
    }
    if path.join("config.json").exists() {
        return from_folder(&path, options);
    }
    from_gguf(&only_gguf(&path)?, options)
}

#[cfg(feature = "hub")]
fn from_hub(model: &Path, options: &LoadOptions) -> Result<PathBuf> {
    let Some(id) = model.to_str().filter(|id| super::hub::is_id(id)) else {
        return Err(not_found(model, "no such file or folder"));
    };
    super::hub::fetch(id, &options.progress).map_err(|error| match error {
        // What looks like an id may be a path with a slip in it.
        Error::ModelNotFound { tried, .. } => not_found(
            model,
            &format!("no such file or folder; as a hub id: {tried}"),
        ),
        other => other,
    })
}

#[cfg(not(feature = "hub"))]
fn from_hub(model: &Path, _: &LoadOptions) -> Result<PathBuf> {
    Err(not_found(
        model,
        "no such file or folder, and the feature `hub` is off",
    ))
}

fn not_found(model: &Path, tried: &str) -> Error {
    Error::ModelNotFound {
        model: model.display().to_string(),
        tried: tried.into(),
    }
}

/// The GGUF file of a folder that has exactly one.
fn only_gguf(folder: &Path) -> Result<PathBuf> {
    let entries = std::fs::read_dir(folder).map_err(|source| Error::Io {
        path: folder.into(),
        source,
    })?;
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "gguf"))
        .collect();
    files.sort();
    match files.as_slice() {
        [file] => Ok(file.clone()),
        [] => Err(not_found(folder, "neither config.json nor a *.gguf in it")),
        [first, ..] => Err(not_found(
            folder,
            &format!(
                "{} files *.gguf in it; name one, such as {}",
                files.len(),
                first.display()
            ),
        )),
    }
}

fn from_gguf(path: &Path, options: &LoadOptions) -> Result<Pretrained> {
    let file = GgufFile::open(path)?;
    let place = path.display().to_string();
    let spec = options.limit(models::spec_from_gguf(file.metadata(), &place)?);
    let weights = GgufWeights::new(file, options.dtype, &options.device)?;
    let tensors = spec.check_weights(&weights)?;
    let file = weights.file();
    let tokenizer = tokenizer::from_gguf(file)?;
    let chat_template = ChatTemplate::from_gguf(file)?;
    let mut ends = BTreeSet::new();
    for name in ["eos", "eot", "eom"] {
        let key = format!("tokenizer.ggml.{name}_token_id");
        ends.extend(file.optional(&key, GgufFile::u32)?);
    }
    let model = read(spec, &weights, tensors, options)?;
    Ok(assemble(model, tokenizer, chat_template, ends, path))
}

fn from_folder(folder: &Path, options: &LoadOptions) -> Result<Pretrained> {
    let config_path = folder.join("config.json");
    let config: Value = json::read(&config_path)?;
    let spec = options.limit(models::spec_from_hf(
        &config,
        &config_path.display().to_string(),
    )?);
    let tokenizer_path = folder.join("tokenizer.json");
    if !tokenizer_path.exists() {
        return Err(Error::Missing {
            place: folder.display().to_string(),
            what: "tokenizer.json".into(),
        });
    }
    let dtype = options.dtype.unwrap_or(DType::F32);
    let weights = SafetensorsWeights::open(folder, dtype, &options.device)?;
    let tensors = spec.check_weights(&weights)?;
    let tokenizer = tokenizer::from_file(&tokenizer_path)?;
    check_vocabulary(&tokenizer, &tokenizer_path, &spec)?;
    let chat_template = ChatTemplate::from_folder(folder)?;
    let generation_path = folder.join("generation_config.json");
    let generation: Value = json::read_if_there(&generation_path)?.unwrap_or_default();
    let mut ends = eos_ids(&generation, &generation_path)?;
    if ends.is_empty() {
        ends = eos_ids(&config, &config_path)?;
    }
    let model = read(spec, &weights, tensors, options)?;
    Ok(assemble(model, tokenizer, chat_template, ends, folder))
}

/// The model of weights that have been checked.
fn read(
    spec: ModelSpec,
    weights: &dyn WeightSource,
    tensors: usize,
    options: &LoadOptions,
) -> Result<Decoder> {
    let weights = Observed::new(weights, tensors, &options.progress);
    let dtype = options.dtype.unwrap_or(DType::F32);
    Decoder::load_checked(spec, &weights, dtype, &options.device)
}

/// Refuses a tokenizer with more tokens than the embedding has rows. Tokens added later are
/// not counted: Gemma 3's text models have one for images, and no row for it. A request that
/// uses such a token is refused.
fn check_vocabulary(tokenizer: &Tokenizer, path: &Path, spec: &ModelSpec) -> Result<()> {
    let tokens = tokenizer.get_vocab_size(false);
    if tokens <= spec.vocab {
        return Ok(());
    }
    Err(Error::InvalidArgument {
        op: "load",
        what: format!("vocabulary of {}", path.display()),
        expected: format!("at most {} tokens, the rows of the embedding", spec.vocab),
        got: tokens.to_string(),
    })
}

/// `eos_token_id`: an id, a list of ids, or nothing.
fn eos_ids(config: &Value, path: &Path) -> Result<BTreeSet<u32>> {
    let ids = match config.get("eos_token_id") {
        None | Some(Value::Null) => return Ok(BTreeSet::new()),
        Some(Value::Array(ids)) => ids.as_slice(),
        Some(id) => std::slice::from_ref(id),
    };
    ids.iter()
        .map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()))
        .collect::<Option<_>>()
        .ok_or_else(|| Error::Format {
            path: path.into(),
            what: "eos_token_id: expected a token id or a list of them".into(),
        })
}

fn assemble(
    model: Decoder,
    tokenizer: Tokenizer,
    chat_template: Option<ChatTemplate>,
    mut ends: BTreeSet<u32>,
    path: &Path,
) -> Pretrained {
    if let Some(template) = &chat_template {
        let many = tokenizer.token_to_id(ANSWER_END).is_some();
        let used = CHAT_ENDS
            .iter()
            .filter(|end| !(many && **end == MESSAGE_END) && template.source().contains(**end));
        ends.extend(used.filter_map(|end| tokenizer.token_to_id(end)));
    }
    Pretrained {
        model,
        tokenizer: Arc::new(tokenizer),
        chat_template,
        eos_token_ids: ends.into_iter().collect(),
        path: path.into(),
    }
}
