//! Who is told how far a load is.

use std::{cell::Cell, fmt, sync::Arc};

use candle_core::{DType, Tensor};

use crate::{
    error::Result,
    models::{LinearWeight, WeightSource},
};

/// How far a load is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LoadProgress<'a> {
    /// A file comes from the hub. Told many times for each file, first with 0 bytes, or with
    /// those that an earlier, broken download left, and last with all.
    Download {
        /// Its name in the repository.
        file: &'a str,
        /// Bytes that are here.
        bytes: u64,
        /// Bytes it has.
        total: u64,
    },
    /// The weights are read. Told once with 0 and then after each tensor.
    Weights {
        /// Tensors that have been read.
        tensors: usize,
        /// Tensors that the model reads.
        total: usize,
    },
}

type Callback = dyn Fn(LoadProgress<'_>) + Send + Sync;

/// A callback that is told how far a load is; by default there is none. It is called on the
/// thread that loads, which waits for it.
#[derive(Clone, Default)]
pub struct Observer(Option<Arc<Callback>>);

impl Observer {
    /// An observer that calls `tell`.
    pub fn new(tell: impl Fn(LoadProgress<'_>) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(tell)))
    }

    pub(super) fn tell(&self, progress: LoadProgress<'_>) {
        if let Some(tell) = &self.0 {
            tell(progress);
        }
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.0.is_some() {
            "a callback"
        } else {
            "none"
        };
        write!(f, "Observer({kind})")
    }
}

/// Weights of which an observer is told each tensor that is read.
pub(super) struct Observed<'a> {
    weights: &'a dyn WeightSource,
    observer: &'a Observer,
    read: Cell<usize>,
    total: usize,
}

impl<'a> Observed<'a> {
    /// `weights`, of which a model reads `total` tensors.
    pub(super) fn new(weights: &'a dyn WeightSource, total: usize, observer: &'a Observer) -> Self {
        let read = Cell::new(0);
        observer.tell(LoadProgress::Weights { tensors: 0, total });
        Self {
            weights,
            observer,
            read,
            total,
        }
    }

    fn count<T>(&self, read: Result<T>) -> Result<T> {
        if read.is_ok() {
            // Two ropes may read the same tensor of divisors.
            self.read.set((self.read.get() + 1).min(self.total));
            self.observer.tell(LoadProgress::Weights {
                tensors: self.read.get(),
                total: self.total,
            });
        }
        read
    }
}

impl WeightSource for Observed<'_> {
    fn place(&self) -> String {
        self.weights.place()
    }

    fn contains(&self, name: &str) -> bool {
        self.weights.contains(name)
    }

    fn names(&self) -> Vec<&str> {
        self.weights.names()
    }

    fn check(&self, name: &str, shape: &[usize]) -> Result<()> {
        self.weights.check(name, shape)
    }

    fn tensor(&self, name: &str, shape: &[usize], dtype: DType) -> Result<Tensor> {
        self.count(self.weights.tensor(name, shape, dtype))
    }

    fn linear(&self, name: &str, out: usize, inp: usize) -> Result<LinearWeight> {
        self.count(self.weights.linear(name, out, inp))
    }

    fn stacked(&self, name: &str, count: usize, out: usize, inp: usize) -> Result<LinearWeight> {
        self.count(self.weights.stacked(name, count, out, inp))
    }
}
