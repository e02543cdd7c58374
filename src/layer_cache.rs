//! [`LayerCache`]: the paged cache in the shape of candle's `KvCache`, for models whose
//! attention code stays as it is.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use candle_core::Tensor;

use crate::cache::{AddOptions, Feed, LayerKv, PagedKvCache, SequenceId, StepPlan};
use crate::error::{Error, Result};
use crate::ops;

const OP: &str = "layer_cache";

/// The cache of one layer of one sequence, with the methods of
/// `candle_nn::kv_cache::KvCache`, so that a model written for that type runs on a
/// [`PagedKvCache`] with its attention code unchanged.
///
/// [`PagedKvCache::layers`] makes one for each layer. In every forward pass each layer appends
/// once, in ascending order: the first layer's append reserves the step, the last layer's
/// commits it. Batch size 1.
///
/// `append` *gathers*: it returns contiguous K and V of the whole context, which costs a copy
/// of it per layer and step. What is gained is the memory management: blocks on demand,
/// sharing by `clone`, one budget for many sequences. For speed use
/// [`PagedAttention`](crate::PagedAttention). Token ids are unknown here, so nothing enters
/// the prefix index.
///
/// `Clone` is a fork: the copy continues on its own from the tokens both share. Cloning all
/// layers of a model, one after the other, forks the sequence once. (candle's own `KvCache`
/// aliases its buffer when cloned.)
#[derive(Debug)]
pub struct LayerCache {
    layer: usize,
    session: Arc<Session>,
    /// Why the fork behind a `clone` failed; `Clone` itself cannot say.
    broken: Option<String>,
}

/// What the layers of one sequence share.
#[derive(Debug)]
struct Session {
    cache: PagedKvCache,
    layers: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// `None` before the first append and after a reset.
    sequence: Option<SequenceId>,
    /// The step between the first layer's append and the last one's.
    step: Option<(StepPlan, usize)>,
    /// The fork in progress: which layers have been cloned into it.
    fork: Option<(Weak<Session>, Vec<bool>)>,
}

impl PagedKvCache {
    /// One [`LayerCache`] for each layer, on a new, empty sequence of this cache.
    pub fn layers(&self) -> Vec<LayerCache> {
        let layers = self.spec().num_layers();
        let session = Arc::new(Session {
            cache: self.clone(),
            layers,
            state: Mutex::new(State::default()),
        });
        (0..layers)
            .map(|layer| LayerCache {
                layer,
                session: session.clone(),
                broken: None,
            })
            .collect()
    }
}

impl LayerCache {
    /// Appends k `[1, kv_heads, n, k_dim]` and v `[1, kv_heads, n, v_dim]` and returns both
    /// for the whole context, `[1, kv_heads, len, dim]`, contiguous, in the dtype of the cache.
    /// A layer with a sliding window gets at least what the window of the new rows sees.
    ///
    /// # Errors
    /// [`Error::Shape`] for another batch size or another number of tokens than the first
    /// layer appended; [`Error::InvalidArgument`] for a layer out of order;
    /// [`Error::OutOfBlocks`]. After an error the step is dropped: the next append starts from
    /// the tokens before it. [`Error::StaleHandle`] once the cache was cleared, until
    /// [`reset`](Self::reset).
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        if let Some(why) = &self.broken {
            return Err(Error::InvalidArgument {
                op: OP,
                what: "clone".into(),
                expected: "a fork of the original".into(),
                got: why.clone(),
            });
        }
        let mut state = self.session.state();
        let (plan, next) = match state.step.take() {
            Some(step) => step,
            None => (self.session.begin(&mut state, k)?, 0),
        };
        // On any error the plan is dropped here, which rolls the step back.
        let (k, v) = self.append_to(&plan, next, k, v)?;
        if next + 1 == self.session.layers {
            plan.commit()?;
        } else {
            state.step = Some((plan, next + 1));
        }
        Ok((k, v))
    }

    fn append_to(
        &self,
        plan: &StepPlan,
        next: usize,
        k: &Tensor,
        v: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        if self.layer != next {
            return Err(Error::InvalidArgument {
                op: OP,
                what: "layer".into(),
                expected: format!("layers append in ascending order: layer {next} is next"),
                got: self.layer.to_string(),
            });
        }
        let rows = |name: &str, x: &Tensor| match *x.dims() {
            [1, _, n, _] if n == plan.num_rows() => Ok(x.squeeze(0)?.transpose(0, 1)?),
            _ => Err(Error::Shape {
                op: OP,
                tensor: name.into(),
                expected: format!("[1, kv_heads, {}, dim]", plan.num_rows()),
                got: x.dims().to_vec(),
            }),
        };
        let step = plan.layer(self.layer)?;
        let LayerKv::Dense {
            k: k_cache,
            v: v_cache,
        } = step.kv;
        ops::write_kv(k_cache, v_cache, &rows("k", k)?, &rows("v", v)?, step.table)?;
        let (k, v) = ops::gather_kv(k_cache, v_cache, step.table, 0)?;
        let batched = |x: Tensor| Ok::<_, Error>(x.transpose(0, 1)?.unsqueeze(0)?.contiguous()?);
        Ok((batched(k)?, batched(v)?))
    }

    /// Tokens in the cache, those of a step in progress included once this layer has
    /// appended.
    pub fn current_seq_len(&self) -> usize {
        if self.broken.is_some() {
            return 0;
        }
        let state = self.session.state();
        let committed = state
            .sequence
            .and_then(|id| self.session.cache.len(id).ok())
            .unwrap_or(0);
        let running = state.step.as_ref().filter(|(_, next)| self.layer < *next);
        committed + running.map_or(0, |(plan, _)| plan.num_rows())
    }

    /// Empties the sequence, for all layers. A step in progress is dropped.
    pub fn reset(&mut self) {
        if self.broken.is_some() {
            // It has no sequence of its own; the one it was cloned from is not its to empty.
            return;
        }
        let mut state = self.session.state();
        state.step = None;
        state.fork = None;
        if let Some(id) = state.sequence.take() {
            self.session.cache.discard(id);
        }
    }
}

impl Clone for LayerCache {
    fn clone(&self) -> Self {
        let mut state = self.session.state();
        let joined = state.fork.as_mut().and_then(|(fork, cloned)| {
            let fork = fork.upgrade()?;
            // A layer that is cloned again, or a fork that has moved on, is another fork.
            let fresh = fork.state().step.is_none()
                && !std::mem::replace(cloned.get_mut(self.layer)?, true);
            fresh.then_some(fork)
        });
        let made = match joined {
            Some(fork) => Ok(fork),
            None => self.session.fork(&mut state, self.layer),
        };
        match made {
            Ok(session) => Self {
                layer: self.layer,
                session,
                broken: None,
            },
            Err(error) => Self {
                layer: self.layer,
                session: self.session.clone(),
                broken: Some(error.to_string()),
            },
        }
    }
}

impl Session {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves the step of one forward pass, for as many tokens as `k` has.
    fn begin(&self, state: &mut State, k: &Tensor) -> Result<StepPlan> {
        state.fork = None;
        let n = match *k.dims() {
            [1, _, n, _] if n > 0 => n,
            _ => {
                return Err(Error::Shape {
                    op: OP,
                    tensor: "k".into(),
                    expected: "[1, kv_heads, n, dim] with n of at least 1".into(),
                    got: k.dims().to_vec(),
                });
            }
        };
        let tokens = vec![0; n];
        let id = match state.sequence {
            Some(id) => id,
            None => {
                let id = self
                    .cache
                    .add(&tokens, AddOptions::default().unindexed())?
                    .id;
                state.sequence = Some(id);
                id
            }
        };
        self.cache.plan(&[Feed::new(id, &tokens)])
    }

    fn fork(&self, state: &mut State, layer: usize) -> Result<Arc<Self>> {
        if state.step.is_some() {
            return Err(Error::PlanOutstanding { op: OP });
        }
        let sequence = state.sequence.map(|id| self.cache.fork(id)).transpose()?;
        let forked = State {
            sequence,
            ..State::default()
        };
        let session = Arc::new(Self {
            cache: self.cache.clone(),
            layers: self.layers,
            state: Mutex::new(forked),
        });
        let mut cloned = vec![false; self.layers];
        if let Some(cloned) = cloned.get_mut(layer) {
            *cloned = true;
        }
        state.fork = Some((Arc::downgrade(&session), cloned));
        Ok(session)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        state.step = None;
        if let Some(id) = state.sequence.take() {
            self.cache.discard(id);
        }
    }
}
