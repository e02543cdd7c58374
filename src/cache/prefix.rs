//! The cached part of a prompt: what of it can be found, and how a new sequence takes it.

use super::admission::AddOptions;
use super::sequence::{Chain, GroupState, Query, Sequence, SequenceId};
use super::state::{Group, State};
use crate::block::{BlockId, BlockTable, Hit, Namespace};
use crate::error::Result;

/// A prompt's cached prefix.
pub(super) struct Prefix {
    pub tokens: usize,
    pub groups: Vec<PrefixGroup>,
}

/// The cached prefix in one group.
pub(super) struct PrefixGroup {
    /// Logical index of the first block that is needed.
    pub first: usize,
    /// The full blocks from there on.
    pub blocks: Vec<BlockId>,
    /// A block whose leading rows are those that come next: to be copied.
    pub partial: Option<BlockId>,
    /// How far the whole prefix is in the index.
    pub chain: Chain,
}

/// Rows inside a block that every group has, and the block of each group that has them.
struct Partial {
    rows: usize,
    sources: Vec<BlockId>,
}

impl State {
    /// The longest prefix of `tokens` that every group can serve, at least one token short of
    /// all. No side effect.
    pub(super) fn find_prefix(&self, namespace: &Namespace, tokens: &[u32]) -> Prefix {
        let reusable = &tokens[..tokens.len().saturating_sub(1)];
        let mut blocks = reusable.len() / self.block_size;
        let mut hits = Vec::with_capacity(self.groups.len());
        for group in &self.groups {
            let found = group.allocator.lookup(namespace, tokens, blocks);
            blocks = found.len();
            hits.push(found);
        }
        hits.iter_mut().for_each(|found| found.truncate(blocks));
        if self.sub_block_reuse {
            let rest = &reusable[blocks * self.block_size..];
            let partial = self.find_partial(namespace, &hits, rest);
            let prefix = partial.map(|partial| self.prefix(&hits, Some(partial)));
            if let Some(prefix) = prefix.filter(|prefix| self.has_room_to_copy(prefix)) {
                return prefix;
            }
        }
        self.prefix(&hits, None)
    }

    /// The longest start of `rest` that a block after the hits holds in every group.
    fn find_partial(
        &self,
        namespace: &Namespace,
        hits: &[Vec<Hit>],
        rest: &[u32],
    ) -> Option<Partial> {
        let mut rows = rest.len();
        let mut sources = Vec::with_capacity(hits.len());
        for (group, hits) in self.groups.iter().zip(hits) {
            let parent = hits.last().map(|hit| hit.node);
            let (hit, shared) = group.allocator.closest_child(namespace, parent, rest)?;
            rows = rows.min(shared);
            sources.push(hit.block);
        }
        Some(Partial { rows, sources })
    }

    fn prefix(&self, hits: &[Vec<Hit>], partial: Option<Partial>) -> Prefix {
        let blocks = hits.first().map_or(0, Vec::len);
        let rows = partial.as_ref().map_or(0, |partial| partial.rows);
        let tokens = blocks * self.block_size + rows;
        let groups = hits.iter().zip(&self.groups).enumerate();
        let groups = groups.map(|(g, (hits, group))| {
            // A window needs only the blocks that the next query still sees.
            let first = (group.spec.first_visible(tokens) / self.block_size).min(blocks);
            let source = |partial: &Partial| partial.sources.get(g).copied();
            PrefixGroup {
                first,
                blocks: hits[first..].iter().map(|hit| hit.block).collect(),
                partial: partial.as_ref().and_then(source),
                chain: Chain {
                    blocks,
                    last: hits.last().map(|hit| hit.node),
                },
            }
        });
        Prefix {
            tokens,
            groups: groups.collect(),
        }
    }

    /// Whether every group has a block for the copy besides the blocks of the prefix and the
    /// one that is copied.
    fn has_room_to_copy(&self, prefix: &Prefix) -> bool {
        let mut groups = self.groups.iter().zip(&prefix.groups);
        groups.all(|(group, prefix)| {
            let source = prefix.partial.filter(|&block| unused(group, block));
            let taken = prefix.idle(group) + usize::from(source.is_some());
            taken < group.allocator.available()
        })
    }

    /// Makes a sequence that holds the cached prefix of `tokens`; answers its length. `copy`
    /// gets the blocks to copy in each group, `(from, to)`.
    pub(super) fn add(
        &mut self,
        tokens: &[u32],
        options: AddOptions,
        copy: impl FnOnce(&[Vec<(u32, u32)>]) -> Result<()>,
    ) -> Result<(SequenceId, usize)> {
        let wanted = if options.read_prefix { tokens } else { &[] };
        let prefix = self.find_prefix(&options.namespace, wanted);
        let mut groups = Vec::with_capacity(self.groups.len());
        let mut copies = vec![Vec::new(); self.groups.len()];
        for (g, (group, prefix)) in self.groups.iter_mut().zip(&prefix.groups).enumerate() {
            // The source of a copy is held like a hit, or taking the block for the copy could
            // evict it. All hits are findable and there is room for the copy: this fits.
            let mut hits = prefix.blocks.clone();
            hits.extend(prefix.partial);
            let fresh = usize::from(prefix.partial.is_some());
            self.blocks.clear();
            group.allocator.acquire(&hits, fresh, &mut self.blocks)?;
            let mut table = BlockTable::starting_at(prefix.first);
            for &block in prefix.blocks.iter().chain(&self.blocks) {
                table.push(block);
            }
            let pairs = prefix.partial.iter().zip(&self.blocks);
            copies[g].extend(pairs.map(|(from, to)| (from.raw(), to.raw())));
            groups.push(GroupState {
                table,
                chain: options.indexed.then_some(prefix.chain),
            });
        }
        let id = self.sequences.insert(Sequence {
            namespace: options.namespace,
            indexed: options.indexed,
            tokens: tokens[..prefix.tokens].to_vec(),
            groups,
            query: Some(Query {
                tokens: tokens.len(),
                looked_up: wanted.len(),
                cached: prefix.tokens,
                recompute: options.recompute,
            }),
        });
        let copied = copy(&copies);
        for (group, prefix) in self.groups.iter_mut().zip(&prefix.groups) {
            if let Some(source) = prefix.partial {
                group.allocator.release(source)?;
            }
        }
        if let Err(error) = copied {
            self.remove("add", id)?;
            return Err(error);
        }
        self.counters.partial_hits += u64::from(!prefix.tokens.is_multiple_of(self.block_size));
        Ok((id, prefix.tokens))
    }
}

impl PrefixGroup {
    /// Blocks of the prefix that nobody uses now.
    pub(super) fn idle(&self, group: &Group) -> usize {
        let idle = |&&block: &&BlockId| unused(group, block);
        self.blocks.iter().filter(idle).count()
    }
}

fn unused(group: &Group, block: BlockId) -> bool {
    group.allocator.ref_count(block) == 0
}
