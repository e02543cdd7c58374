//! [`PagedKvCache`]: the handle that ties the bookkeeping to the tensors.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{Device, Tensor};

use super::admission::{AddOptions, Added, Cost};
use super::epoch::Epoch;
use super::host::HostPool;
use super::plan::{Feed, Layers, StepBuffers, StepPlan};
use super::pool::{CacheConfig, LayerKv, block_bytes, check_memory};
use super::sequence::{SequenceId, Sequences};
use super::spec::CacheSpec;
use super::state::{Group, State};
use super::usage::Counters;
use crate::block::{BlockAllocator, Event, EvictionPolicy, Lru};
use crate::error::{Error, Result};
use crate::ops;

/// An event of the prefix index, with the number of its layer group.
pub type CacheEvent = (usize, Event);

/// Answer of [`PagedKvCache::pin`]; give it to [`PagedKvCache::unpin`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Pin {
    id: u64,
    /// Leading tokens that stay cached.
    pub tokens: usize,
}

/// A paged, shared KV cache for the layers of one model.
///
/// A cheap handle: clones share the cache. The tensors are allocated once, when it is made.
/// One step at a time goes through [`plan`](Self::plan) → the model's forward →
/// [`commit`](StepPlan::commit); while a plan is alive every operation that changes sequences
/// answers [`Error::PlanOutstanding`], except [`clear`](Self::clear).
///
/// The method is PagedAttention (Kwon et al. 2023, "Efficient Memory Management for Large
/// Language Model Serving with PagedAttention").
#[derive(Debug, Clone)]
pub struct PagedKvCache {
    pub(super) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(super) struct Inner {
    state: Mutex<State>,
    buffers: Mutex<StepBuffers>,
    pub(super) layers: Arc<Layers>,
    /// The host pool, layer by layer; empty without one.
    pub(super) host: Vec<LayerKv>,
    device: Device,
    pub(super) spec: CacheSpec,
}

impl PagedKvCache {
    /// Allocates a cache for the layers of `spec` on `device`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a block size that is not a power of two from 1 to 256, a
    /// size without a block in each group or beyond the memory of a CPU, a spec that
    /// contradicts itself, a fraction of free memory on a device that is not CUDA, or a CUDA
    /// device on the per-thread default stream (make it with
    /// [`Device::new_cuda_with_stream`]); [`Error::Candle`] if another device has no memory.
    pub fn new(spec: &CacheSpec, config: &CacheConfig, device: &Device) -> Result<Self> {
        Self::with_policy(spec, config, device, || Box::new(Lru))
    }

    /// As [`new`](Self::new), with an eviction policy of your own: one from `policy` for the
    /// pool of each group.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn with_policy(
        spec: &CacheSpec,
        config: &CacheConfig,
        device: &Device,
        mut policy: impl FnMut() -> Box<dyn EvictionPolicy>,
    ) -> Result<Self> {
        spec.check()?;
        ops::check_stream("paged_kv_cache", device)?;
        let blocks = config.blocks_per_group(spec, device)?;
        if device.is_cpu() {
            check_memory(spec, &blocks, config.block_size)?;
        }
        let mut groups = Vec::with_capacity(spec.groups.len());
        let buffers = StepBuffers::new(blocks.iter().copied(), config.block_size)?;
        let host_blocks = config.host_blocks_per_group(spec)?;
        let mut host: Vec<Option<LayerKv>> = vec![None; spec.num_layers()];
        let mut layers: Vec<Option<(LayerKv, usize, Option<usize>)>> =
            vec![None; spec.num_layers()];
        for (g, (group, &blocks)) in spec.groups.iter().zip(&blocks).enumerate() {
            block_bytes(group, config.block_size)?;
            for &layer in &group.layers {
                let kv = LayerKv::new(group, blocks, config.block_size, device)?;
                layers[layer] = Some((kv, g, group.window));
                if let Some(&blocks) = host_blocks.as_ref().and_then(|blocks| blocks.get(g)) {
                    let kv = LayerKv::new(group, blocks, config.block_size, &Device::Cpu)?;
                    host[layer] = Some(kv);
                }
            }
            let mut allocator = BlockAllocator::with_policy(blocks, config.block_size, policy())?;
            allocator.record_events(config.record_events);
            groups.push(Group {
                spec: group.clone(),
                allocator,
            });
        }
        let layers: Vec<_> = layers.into_iter().flatten().collect();
        let layers = Layers {
            group: layers.iter().map(|(_, group, _)| *group).collect(),
            window: layers.iter().map(|(_, _, window)| *window).collect(),
            kv: layers.into_iter().map(|(kv, _, _)| kv).collect(),
            epoch: Epoch::default(),
        };
        let state = State {
            epoch: 0,
            block_size: config.block_size,
            sub_block_reuse: config.sub_block_reuse,
            deduplicate: config.deduplicate,
            cascade: config.cascade,
            groups,
            sequences: Sequences::default(),
            host: host_blocks
                .map(|blocks| HostPool::new(&blocks, config.block_size))
                .transpose()?,
            pins: Default::default(),
            live: None,
            next_step: 0,
            counters: Counters::default(),
            spare: Default::default(),
            blocks: Vec::new(),
            given_up: Vec::new(),
            needed: Vec::new(),
            copying: Vec::new(),
            doomed: Vec::new(),
        };
        Ok(Self {
            inner: Arc::new(Inner {
                state: Mutex::new(state),
                buffers: Mutex::new(buffers),
                layers: Arc::new(layers),
                host: host.into_iter().flatten().collect(),
                device: device.clone(),
                spec: spec.clone(),
            }),
        })
    }

    /// Adds a sequence with the prompt `tokens` and looks its prefix up. At least one token is
    /// left to compute: feed `tokens[cached_tokens..]`. Nothing is reserved yet; only the
    /// reuse of part of a block, if it is [switched on](CacheConfig::with_sub_block_reuse),
    /// takes a block for the copy.
    ///
    /// # Errors
    /// [`Error::Empty`] for an empty prompt, [`Error::PlanOutstanding`].
    pub fn add(&self, tokens: &[u32], options: AddOptions) -> Result<Added> {
        let mut state = self.changing("add")?;
        if tokens.is_empty() {
            return Err(Error::Empty {
                op: "add",
                what: "the prompt",
            });
        }
        let copy = |pairs: &[_]| self.inner.copy_blocks(pairs);
        let (id, cached_tokens) = state.add(tokens, options, copy)?;
        Ok(Added { id, cached_tokens })
    }

    /// What adding `tokens` and feeding the rest of it in one step would take. No side effect.
    pub fn cost(&self, tokens: &[u32], options: &AddOptions) -> Cost {
        let state = self.inner.state();
        let wanted = if options.read_prefix { tokens } else { &[] };
        let prefix = state.find_prefix(&options.namespace, wanted);
        let fresh = tokens.len().div_ceil(state.block_size) - prefix.tokens / state.block_size;
        let needed = state
            .groups
            .iter()
            .zip(&prefix.groups)
            .map(|(group, prefix)| fresh + prefix.idle(group));
        Cost {
            cached_tokens: prefix.tokens,
            blocks_needed: needed.collect(),
            blocks_available: state
                .groups
                .iter()
                .map(|group| group.allocator.available())
                .collect(),
        }
    }

    /// Reserves a step: the slots of every fed token, with shared, partly filled blocks copied
    /// first (copy-on-write). All or nothing.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`] if the step does not fit; [`Error::Empty`] for no feed or a feed
    /// without tokens; [`Error::InvalidArgument`] for a sequence that is fed twice or positions
    /// of another number than tokens; [`Error::StaleHandle`]; [`Error::PlanOutstanding`].
    /// Nothing has changed then.
    pub fn plan(&self, feeds: &[Feed<'_>]) -> Result<StepPlan> {
        let mut state = self.changing("plan")?;
        let mut buffers = std::mem::take(&mut *self.inner.buffers());
        if buffers.tables.is_empty() {
            // An ended plan has not handed them back yet, or it outlived a `clear`.
            let blocks = state
                .groups
                .iter()
                .map(|group| group.allocator.num_blocks());
            buffers = StepBuffers::new(blocks, state.block_size)?;
        }
        buffers.clear();
        let reserved = state.reserve(feeds, &mut buffers).and_then(|()| {
            self.inner.copy_blocks(&buffers.copies)?;
            Ok(Tensor::new(
                buffers.token_ids.as_slice(),
                &self.inner.device,
            )?)
        });
        match reserved {
            Ok(tokens) => {
                let rows = feeds.first().map(|feed| feed.tokens.len());
                let uniform = feeds.iter().all(|feed| Some(feed.tokens.len()) == rows);
                Ok(StepPlan {
                    cache: Arc::downgrade(&self.inner),
                    layers: self.inner.layers.clone(),
                    epoch: state.epoch,
                    step: state.live.as_ref().map_or(0, |live| live.id),
                    buffers,
                    tokens,
                    rows_per_feed: rows.filter(|_| uniform),
                })
            }
            Err(error) => {
                *self.inner.buffers() = buffers;
                state.rollback()?;
                Err(error)
            }
        }
    }

    /// A second sequence with the same tokens. It shares every block; the last, partly filled
    /// one is copied when either writes to it.
    ///
    /// # Errors
    /// [`Error::StaleHandle`], [`Error::PlanOutstanding`].
    pub fn fork(&self, sequence: SequenceId) -> Result<SequenceId> {
        self.changing("fork")?.fork("fork", sequence)
    }

    /// Rewinds a sequence to its first `len` tokens.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it has fewer, or if a window has released blocks that the
    /// shorter sequence would see; [`Error::StaleHandle`], [`Error::PlanOutstanding`].
    pub fn truncate(&self, sequence: SequenceId, len: usize) -> Result<()> {
        self.changing("truncate")?
            .truncate("truncate", sequence, len)
    }

    /// Removes a sequence. Its full blocks stay findable until their memory is needed.
    ///
    /// # Errors
    /// [`Error::StaleHandle`] (also for a second removal), [`Error::PlanOutstanding`].
    pub fn remove(&self, sequence: SequenceId) -> Result<()> {
        self.changing("remove")?.remove("remove", sequence)
    }

    /// Removes a sequence even while a plan is alive, namely when that plan has ended: for
    /// owners that are dropped. A stale handle is none of their concern.
    pub(crate) fn discard(&self, sequence: SequenceId) {
        let _ = self.inner.state().discard(sequence);
    }

    /// The number of times that the cache was cleared.
    pub(crate) fn epoch(&self) -> u64 {
        self.inner.state().epoch
    }

    /// Keeps the full blocks of a sequence cached, whatever happens to it, until
    /// [`unpin`](Self::unpin): for system prompts.
    ///
    /// # Errors
    /// [`Error::StaleHandle`], [`Error::PlanOutstanding`].
    pub fn pin(&self, sequence: SequenceId) -> Result<Pin> {
        let (id, tokens) = self.changing("pin")?.pin("pin", sequence)?;
        Ok(Pin { id, tokens })
    }

    /// Gives up a pin.
    ///
    /// # Errors
    /// [`Error::StaleHandle`] if it was given up before or the cache was cleared;
    /// [`Error::PlanOutstanding`].
    pub fn unpin(&self, pin: Pin) -> Result<()> {
        self.changing("unpin")?.unpin("unpin", pin.id)
    }

    /// Forgets every sequence, swapped ones too, every pin and cached prefix, and starts a new
    /// epoch: for replaced weights. Always allowed; a live plan becomes stale and answers
    /// [`Error::StalePlan`]. Waits for layers that are written at this moment, so nothing of
    /// the old epoch reaches the new one, and blocks nobody meanwhile; must not be called by
    /// who holds a [`LayerStep`](super::LayerStep).
    pub fn clear(&self) {
        self.inner.layers.epoch.advance();
        self.inner.state().clear();
    }

    /// Length of a sequence in tokens.
    ///
    /// # Errors
    /// [`Error::StaleHandle`].
    pub fn len(&self, sequence: SequenceId) -> Result<usize> {
        Ok(self
            .inner
            .state()
            .sequences
            .get("len", sequence)?
            .tokens
            .len())
    }

    /// Tokens of a sequence whose K/V are in the cache.
    ///
    /// # Errors
    /// [`Error::StaleHandle`].
    pub fn sequence_tokens(&self, sequence: SequenceId) -> Result<Vec<u32>> {
        Ok(self
            .inner
            .state()
            .sequences
            .get("sequence_tokens", sequence)?
            .tokens
            .clone())
    }

    /// Physical blocks of a sequence in one group, and the logical index of the first: blocks
    /// behind a window are no longer held.
    ///
    /// # Errors
    /// [`Error::StaleHandle`], [`Error::InvalidArgument`] if there is no such group.
    pub fn block_table(&self, sequence: SequenceId, group: usize) -> Result<(usize, Vec<u32>)> {
        let state = self.inner.state();
        let held = &state.sequences.get("block_table", sequence)?.groups;
        let held = held.get(group).ok_or_else(|| Error::InvalidArgument {
            op: "block_table",
            what: "group".into(),
            expected: format!("a group below {}", held.len()),
            got: group.to_string(),
        })?;
        let blocks = held.table.blocks().iter().map(|block| block.raw());
        Ok((held.table.first_block(), blocks.collect()))
    }

    /// Sequences in the cache.
    pub fn num_sequences(&self) -> usize {
        self.inner.state().sequences.len()
    }

    /// Tokens per block.
    pub fn block_size(&self) -> usize {
        self.inner.state().block_size
    }

    /// The layer groups this cache was made for.
    pub fn spec(&self) -> &CacheSpec {
        &self.inner.spec
    }

    /// The device of the tensors.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    pub(super) fn changing(&self, op: &'static str) -> Result<MutexGuard<'_, State>> {
        let state = self.inner.state();
        state.idle(op)?;
        Ok(state)
    }
}

impl Inner {
    // The state is only changed by code that does not panic, so it is sound even if a thread
    // did while it held the lock; an eviction policy is held to that by its contract.
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn buffers(&self) -> MutexGuard<'_, StepBuffers> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Performs copy-on-write in all layers: `copies[group]` are (from, to) pairs.
    fn copy_blocks(&self, copies: &[Vec<(u32, u32)>]) -> Result<()> {
        for (group, pairs) in self.spec.groups.iter().zip(copies) {
            if pairs.is_empty() {
                continue;
            }
            for LayerKv::Dense { k, v } in
                group.layers.iter().filter_map(|&l| self.layers.kv.get(l))
            {
                ops::copy_blocks(&[k, v], pairs)?;
            }
        }
        Ok(())
    }

    pub(super) fn commit(&self, plan: &StepPlan, accepted: Option<&[usize]>) -> Result<()> {
        let mut state = self.state();
        if state.epoch != plan.epoch {
            return Err(Error::StalePlan {
                op: "commit",
                plan: plan.epoch,
                cache: state.epoch,
            });
        }
        let taken = |feed: usize| {
            accepted
                .and_then(|a| a.get(feed).copied())
                .unwrap_or(usize::MAX)
        };
        state.commit(plan.token_ids(), taken)?;
        state.counters.cascade_tokens += plan.tokens_saved() as u64;
        Ok(())
    }

    /// The end of a plan: rolls back what was not committed and takes its arrays back.
    pub(super) fn end(&self, step: u64, buffers: StepBuffers) {
        let mut state = self.state();
        if state.live.as_ref().is_some_and(|live| live.id == step) {
            // An error here would be a broken invariant, which `check_invariants` reports;
            // drop has no way to.
            let _ = state.rollback();
        }
        *self.buffers() = buffers;
    }
}
