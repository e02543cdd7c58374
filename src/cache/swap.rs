//! Moving a sequence to host memory and back.

use super::cache::{Inner, PagedKvCache};
use super::host::{HostPool, Swapped};
use super::pool::LayerKv;
use super::sequence::{Chain, SequenceId};
use super::state::State;
use super::transfer::swap_blocks;
use crate::block::BlockId;
use crate::error::{Error, Result};

const OUT: &str = "swap_out";
const IN: &str = "swap_in";
const DISCARD: &str = "discard_swap";

/// Names a swapped sequence of one cache. No number is used twice, so a handle that was
/// swapped in, discarded or cleared is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SwapId(pub(super) u64);

impl std::fmt::Display for SwapId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl PagedKvCache {
    /// Moves a sequence to the host pool, so that its blocks can serve others. The handle of
    /// the sequence is stale afterwards; [`swap_in`](Self::swap_in) makes it a sequence again.
    ///
    /// Every block that it holds is copied, since any of them may be gone when it comes back;
    /// one that is findable and in the host pool already, for another sequence that shares it,
    /// is shared there as well. Its references are given back: blocks that others use stay
    /// with them, full ones that nobody uses stay findable until their memory is needed.
    ///
    /// Swapping is the cheaper kind of preemption where two transfers of the blocks take less
    /// time than computing their tokens again (Kwon et al. 2023, section 4.5).
    ///
    /// ```
    /// # use candle_core::{DType, Device};
    /// # use candle_paged_attn::cache::{
    /// #     AddOptions, CacheConfig, CacheSize, CacheSpec, Feed, PagedKvCache,
    /// # };
    /// let spec = CacheSpec::uniform(1, 1, 8, DType::F32)?;
    /// let config = CacheConfig::blocks(4).with_host(CacheSize::Blocks(64));
    /// let cache = PagedKvCache::new(&spec, &config, &Device::Cpu)?;
    /// let sequence = cache.add(&[1, 2, 3], AddOptions::default())?.id;
    /// cache.plan(&[Feed::new(sequence, &[1, 2, 3])])?.commit()?;
    ///
    /// let swap = cache.swap_out(sequence)?;
    /// assert_eq!(cache.usage()[0].blocks_used, 0);
    /// let sequence = cache.swap_in(swap)?;
    /// assert_eq!(cache.sequence_tokens(sequence)?, [1, 2, 3]);
    /// # Ok::<(), candle_paged_attn::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`] if the host pool is full, [`Error::InvalidArgument`] if the cache
    /// was made without one (see [`CacheConfig::with_host`](super::CacheConfig::with_host)),
    /// [`Error::StaleHandle`], [`Error::PlanOutstanding`]. Nothing has changed then.
    pub fn swap_out(&self, sequence: SequenceId) -> Result<SwapId> {
        let inner = &self.inner;
        self.changing(OUT)?.swap_out(sequence, |pairs| {
            inner.transfer(&inner.layers.kv, &inner.host, pairs)
        })
    }

    /// Makes a swapped sequence live again: the same tokens, K and V bit for bit, in new
    /// blocks. Full blocks are findable again.
    ///
    /// A block that never lost its bytes, because others use it or because it stayed findable,
    /// is taken as it is instead of copied back; so sequences that shared blocks share them
    /// again.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`] if it does not fit (`needed` counts the blocks to copy back and
    /// those it takes that nobody uses), [`Error::StaleHandle`], [`Error::PlanOutstanding`]. It
    /// stays swapped out then, and nothing has changed.
    pub fn swap_in(&self, swap: SwapId) -> Result<SequenceId> {
        let inner = &self.inner;
        self.changing(IN)?.swap_in(swap, |pairs| {
            inner.transfer(&inner.host, &inner.layers.kv, pairs)
        })
    }

    /// Forgets a swapped sequence.
    ///
    /// # Errors
    /// [`Error::StaleHandle`], [`Error::PlanOutstanding`].
    pub fn discard_swap(&self, swap: SwapId) -> Result<()> {
        self.changing(DISCARD)?.discard_swap(swap)
    }

    /// Forgets a swapped sequence even while a plan is alive, which never looks at the host pool:
    /// for owners that are dropped. A stale handle is none of their concern.
    pub(crate) fn abandon_swap(&self, swap: SwapId) {
        let _ = self.inner.state().discard_swap(swap);
    }

    /// Sequences in the host pool.
    pub fn num_swapped(&self) -> usize {
        let state = self.inner.state();
        state.host.as_ref().map_or(0, |host| host.swapped.len())
    }
}

impl Inner {
    /// Copies `pairs[group]` blocks, in all layers of the group.
    fn transfer(&self, from: &[LayerKv], to: &[LayerKv], pairs: &[Vec<(u32, u32)>]) -> Result<()> {
        for (group, pairs) in self.spec.groups.iter().zip(pairs) {
            for &layer in group.layers.iter().filter(|_| !pairs.is_empty()) {
                let (Some(from), Some(to)) = (from.get(layer), to.get(layer)) else {
                    continue;
                };
                let (LayerKv::Dense { k, v }, LayerKv::Dense { k: to_k, v: to_v }) = (from, to);
                swap_blocks(k, to_k, pairs)?;
                swap_blocks(v, to_v, pairs)?;
            }
        }
        Ok(())
    }
}

/// Block pairs `(from, to)` of each group.
type Pairs = Vec<Vec<(u32, u32)>>;

impl State {
    /// `copy` gets the blocks to copy in each group, `(device, host)`.
    fn swap_out(
        &mut self,
        id: SequenceId,
        copy: impl FnOnce(&[Vec<(u32, u32)>]) -> Result<()>,
    ) -> Result<SwapId> {
        let sequence = self.sequences.get(OUT, id)?;
        let host = self.host.as_mut().ok_or_else(|| Error::InvalidArgument {
            op: OUT,
            what: "host pool".into(),
            expected: "a cache that was made with one (CacheConfig::with_host)".into(),
            got: "none".into(),
        })?;
        // Counting comes first, so that what does not fit changes nothing in any group.
        for ((group, host), held) in self.groups.iter().zip(&host.groups).zip(&sequence.groups) {
            let absent = |&&block: &&BlockId| host.copy_of(&group.allocator, block).is_none();
            let needed = held.table.blocks().iter().filter(absent).count();
            let free = host.allocator.available();
            if needed > free {
                return Err(Error::OutOfBlocks {
                    op: OUT,
                    needed,
                    free,
                });
            }
        }
        let (mut blocks, mut pairs) = (Vec::new(), Pairs::new());
        for ((group, host), held) in self
            .groups
            .iter()
            .zip(&mut host.groups)
            .zip(&sequence.groups)
        {
            let (mut copies, mut moved) = (Vec::new(), Vec::new());
            for &block in held.table.blocks() {
                if let Some(copy) = host.copy_of(&group.allocator, block) {
                    host.allocator.retain(copy)?;
                    copies.push(copy);
                    continue;
                }
                host.allocator.allocate(1, &mut copies)?;
                if let Some(&copy) = copies.last() {
                    host.settle(&group.allocator, copy, block);
                    moved.push((block.raw(), copy.raw()));
                }
            }
            blocks.push(copies);
            pairs.push(moved);
        }
        if let Err(error) = copy(&pairs) {
            host.release(&blocks)?;
            return Err(error);
        }
        let mut sequence = self.sequences.remove(OUT, id)?;
        for (group, held) in self.groups.iter_mut().zip(&mut sequence.groups) {
            for block in held.table.truncate_to(held.table.first_block()) {
                group.allocator.release(block)?;
            }
        }
        self.counters.swapped_out += 1;
        self.counters.blocks_to_host += count(&pairs);
        Ok(host.insert(Swapped { sequence, blocks }))
    }

    /// `copy` gets the blocks to copy in each group, `(host, device)`.
    fn swap_in(
        &mut self,
        id: SwapId,
        copy: impl FnOnce(&[Vec<(u32, u32)>]) -> Result<()>,
    ) -> Result<SequenceId> {
        let host = self.host.as_mut().ok_or_else(|| stale(IN, id))?;
        let swapped = host.swapped.get(&id).ok_or_else(|| stale(IN, id))?;
        let mut at_home = Vec::with_capacity(self.groups.len());
        for ((group, host), copies) in self.groups.iter().zip(&host.groups).zip(&swapped.blocks) {
            let homes = copies
                .iter()
                .map(|&copy| host.at_home(&group.allocator, copy));
            let homes: Vec<Option<BlockId>> = homes.collect();
            let in_use = |block: BlockId| group.allocator.ref_count(block) > 0;
            let taken = homes.iter().filter(|home| !home.is_some_and(in_use));
            let (needed, free) = (taken.count(), group.allocator.available());
            if needed > free {
                return Err(Error::OutOfBlocks {
                    op: IN,
                    needed,
                    free,
                });
            }
            at_home.push(homes);
        }
        let (mut blocks, mut pairs) = (Vec::new(), Pairs::new());
        for ((group, copies), homes) in self.groups.iter_mut().zip(&swapped.blocks).zip(&at_home) {
            let hits: Vec<BlockId> = homes.iter().flatten().copied().collect();
            self.blocks.clear();
            let absent = homes.len() - hits.len();
            group.allocator.acquire(&hits, absent, &mut self.blocks)?;
            let mut fresh = self.blocks.iter().copied();
            let (mut table, mut moved) = (Vec::new(), Vec::new());
            for (&home, copy) in homes.iter().zip(copies) {
                if let Some(block) = home.or_else(|| fresh.next()) {
                    table.push(block);
                    moved.extend(home.is_none().then_some((copy.raw(), block.raw())));
                }
            }
            blocks.push(table);
            pairs.push(moved);
        }
        if let Err(error) = copy(&pairs) {
            for (group, blocks) in self.groups.iter_mut().zip(&blocks) {
                for &block in blocks.iter().rev() {
                    group.allocator.release(block)?;
                }
            }
            return Err(error);
        }
        let Swapped {
            mut sequence,
            blocks: copies,
        } = host.swapped.remove(&id).ok_or_else(|| stale(IN, id))?;
        for (g, group) in self.groups.iter_mut().enumerate() {
            let held = &mut sequence.groups[g];
            blocks[g].iter().for_each(|&block| held.table.push(block));
            // Nodes may have been evicted meanwhile, so the whole chain is made anew. Never
            // deduplicated: the bytes are to be the same.
            held.chain = sequence.indexed.then(Chain::default);
            group.register_full(&sequence.namespace, &sequence.tokens, held, false)?;
            for (&copy, &block) in copies[g].iter().zip(&blocks[g]) {
                host.groups[g].settle(&group.allocator, copy, block);
            }
        }
        host.release(&copies)?;
        self.counters.swapped_in += 1;
        self.counters.blocks_from_host += count(&pairs);
        Ok(self.sequences.insert(sequence))
    }

    fn discard_swap(&mut self, id: SwapId) -> Result<()> {
        let host = self.host.as_mut().ok_or_else(|| stale(DISCARD, id))?;
        let swapped = host.swapped.remove(&id).ok_or_else(|| stale(DISCARD, id))?;
        HostPool::release(host, &swapped.blocks)
    }
}

fn count(pairs: &[Vec<(u32, u32)>]) -> u64 {
    pairs.iter().map(|pairs| pairs.len() as u64).sum()
}

fn stale(op: &'static str, id: SwapId) -> Error {
    Error::StaleHandle {
        op,
        kind: "swap",
        id: id.to_string(),
    }
}
