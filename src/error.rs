//! The one error type of the crate.

use std::path::PathBuf;

use candle_core::{DType, DeviceLocation};

/// The beginning of a value of a file, as an error shows it: a long one would bury the
/// message.
pub(crate) fn cut(value: impl std::fmt::Display) -> String {
    const SHOWN: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(SHOWN) {
        Some((at, _)) => format!("{}...", text.split_at(at).0),
        None => text,
    }
}

/// Result with the crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong, one variant per broken rule.
///
/// Unless a variant says otherwise the call that returned it changed nothing:
/// sequences, blocks and tensors are as they were.
///
/// Inside a candle model the error travels as [`candle_core::Error`] (`?` converts it) and
/// [`Error::from_candle`] brings it back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is outside what the operation accepts.
    #[error("{op}: {what}: expected {expected}, got {got}")]
    InvalidArgument {
        /// The operation that refused.
        op: &'static str,
        /// The name of the argument or of the property that was checked.
        what: String,
        /// The rule.
        expected: String,
        /// What was given.
        got: String,
    },
    /// A tensor has another shape than the operation needs.
    #[error("{op}: shape of {tensor}: expected {expected}, got {got:?}")]
    Shape {
        /// The operation that refused.
        op: &'static str,
        /// The name of the tensor.
        tensor: String,
        /// The rule, with the dimensions by name.
        expected: String,
        /// The shape that was given.
        got: Vec<usize>,
    },
    /// A tensor has another dtype than the operation needs.
    #[error("{op}: dtype of {tensor}: expected {expected}, got {got:?}")]
    Dtype {
        /// The operation that refused.
        op: &'static str,
        /// The name of the tensor.
        tensor: &'static str,
        /// The rule.
        expected: String,
        /// The dtype that was given.
        got: DType,
    },
    /// Two tensors of one operation live on different devices.
    #[error("{op}: {tensor} is on {got:?}, expected {expected:?}")]
    Device {
        /// The operation that refused.
        op: &'static str,
        /// The name of the tensor.
        tensor: &'static str,
        /// The device of the other operands.
        expected: DeviceLocation,
        /// The device of this tensor.
        got: DeviceLocation,
    },
    /// A page table contradicts itself or the cache it is used with.
    #[error("{op}: page table: {rule}: got {got}")]
    PageTable {
        /// The operation that refused.
        op: &'static str,
        /// The rule that was broken.
        rule: &'static str,
        /// What was given.
        got: String,
    },
    /// The pool has fewer free blocks than the call needs.
    #[error("{op}: needs {needed} blocks, {free} are free")]
    OutOfBlocks {
        /// The operation that refused.
        op: &'static str,
        /// Blocks that the call needs.
        needed: usize,
        /// Blocks that are free or can be evicted.
        free: usize,
    },
    /// A block id, node id, sequence or pin that is not, or no longer, valid.
    #[error("{op}: stale {kind} {id}: it was removed or belongs to an earlier epoch")]
    StaleHandle {
        /// The operation that refused.
        op: &'static str,
        /// What the handle names: `"sequence"`, `"swap"`, `"pin"`, `"node"` or `"block"`.
        kind: &'static str,
        /// The handle as text.
        id: String,
    },
    /// A step plan is alive; commit or drop it before changing sequences.
    #[error("{op}: a step plan is outstanding; commit or drop it first")]
    PlanOutstanding {
        /// The operation that refused.
        op: &'static str,
    },
    /// The plan was made before the cache was cleared.
    #[error("{op}: the plan is of epoch {plan}, the cache is at epoch {cache}")]
    StalePlan {
        /// The operation that refused.
        op: &'static str,
        /// Epoch in which the plan was made.
        plan: u64,
        /// Epoch of the cache now.
        cache: u64,
    },
    /// A prompt without a token, a feed without a token, a plan without a feed.
    #[error("{op}: {what} is empty")]
    Empty {
        /// The operation that refused.
        op: &'static str,
        /// What is empty.
        what: &'static str,
    },
    /// A token id at or past the size of the vocabulary.
    #[error("{op}: token id {token} is not in the vocabulary of {vocab} tokens")]
    TokenOutOfRange {
        /// The operation that refused.
        op: &'static str,
        /// The token id that was given.
        token: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// A position at or past the context length of the model.
    #[error("{op}: {len} tokens exceed the context length of {max}")]
    ContextLength {
        /// The operation that refused.
        op: &'static str,
        /// Tokens that the sequence would have.
        len: usize,
        /// The context length of the model.
        max: usize,
    },
    /// A file cannot be read as what it claims to be.
    #[error("{path}: {what}", path = path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The rule that was broken and what was found.
        what: String,
    },
    /// A model configuration that this crate does not run.
    #[error("unsupported {what}: {got} (supported: {supported})")]
    Unsupported {
        /// The kind of thing: `"architecture"`, `"pre-tokenizer"`, `"rope scaling"`, ...
        what: &'static str,
        /// The value that was found.
        got: String,
        /// What would be accepted.
        supported: String,
    },
    /// A configuration or a checkpoint lacks something.
    #[error("{place}: missing {what}")]
    Missing {
        /// The file, or the part of a file, that was searched.
        place: String,
        /// The field or tensor that is not there.
        what: String,
    },
    /// No place had the model; every place that was tried is named.
    #[error("cannot find the model {model}: {tried}")]
    ModelNotFound {
        /// The path or hub id that was asked for.
        model: String,
        /// The places tried and why each failed.
        tried: String,
    },
    /// Reading or writing a file failed.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// Tokenising or detokenising failed.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The chat template could not be compiled or rendered.
    #[error("chat template: {0}")]
    Template(String),
    /// A rule that the library itself guarantees does not hold: a defect of this crate.
    #[error("{op}: internal invariant broken: {what}")]
    Invariant {
        /// The operation that noticed.
        op: &'static str,
        /// The invariant.
        what: String,
    },
    /// candle refused an operation.
    #[error(transparent)]
    Candle(candle_core::Error),
}

impl Error {
    /// Recovers an error of this crate that travelled through candle code, from below any
    /// backtrace, context or path that candle wrapped around it. A genuine candle error
    /// becomes [`Error::Candle`].
    pub fn from_candle(error: candle_core::Error) -> Self {
        use candle_core::Error as E;
        if !carries_ours(&error) {
            return Self::Candle(error);
        }
        match error {
            E::WithBacktrace { inner, .. }
            | E::Context { inner, .. }
            | E::WithPath { inner, .. } => Self::from_candle(*inner),
            E::WrappedContext { wrapped, context } => match wrapped.downcast::<Self>() {
                Ok(ours) => *ours,
                Err(wrapped) => match wrapped.downcast::<candle_core::Error>() {
                    Ok(inner) => Self::from_candle(*inner),
                    Err(wrapped) => Self::Candle(E::WrappedContext { wrapped, context }),
                },
            },
            other => Self::Candle(other),
        }
    }
}

/// Whether an error of this crate lies below candle's wrappers. Asked first, so that a
/// genuine candle error keeps its wrappers.
fn carries_ours(error: &candle_core::Error) -> bool {
    use candle_core::Error as E;
    match error {
        E::WithBacktrace { inner, .. } | E::Context { inner, .. } | E::WithPath { inner, .. } => {
            carries_ours(inner)
        }
        E::WrappedContext { wrapped, .. } => {
            wrapped.is::<Error>() || wrapped.downcast_ref::<E>().is_some_and(carries_ours)
        }
        _ => false,
    }
}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        Self::from_candle(error)
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(inner) => inner,
            ours => candle_core::Error::WrappedContext {
                wrapped: Box::new(ours),
                context: "candle-paged-attn".to_string(),
            }
            .bt(),
        }
    }
}
