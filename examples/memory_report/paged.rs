//! Blocks from the library's `BlockAllocator`, one more whenever the last one is full.

use anyhow::Result;
use candle_paged_attn::block::{BlockAllocator, BlockId, BlockTable, Namespace};

use super::memory::Memory;
use super::trace::Request;

/// Paged memory, with or without sharing of equal prefixes.
#[derive(Debug)]
pub struct Paged {
    blocks: BlockAllocator,
    /// Tokens per content id, if prefixes are shared.
    sharing: Option<usize>,
    namespace: Namespace,
    found: u64,
    /// Available blocks without which the first waiting request, refused before, still does
    /// not fit: no need to look its prompt up again. 0 once that may be another request.
    goal: usize,
    fresh: Vec<BlockId>,
    prompt: Vec<u32>,
}

impl Paged {
    pub fn new(rows: usize, block_size: usize, sharing: Option<usize>) -> Result<Self> {
        Ok(Self {
            blocks: BlockAllocator::new(rows / block_size, block_size)?,
            sharing,
            namespace: Namespace::default(),
            found: 0,
            goal: 0,
            fresh: Vec::new(),
            prompt: Vec::new(),
        })
    }

    /// The tokens of a prompt, as far as they matter: an id stands for equal tokens.
    fn read(&mut self, request: &Request) {
        self.prompt.clear();
        if let (Some(tokens), Some(content)) = (self.sharing, &request.content) {
            for &id in content {
                let rest = request.prompt - self.prompt.len();
                self.prompt
                    .extend(std::iter::repeat_n(id, tokens.min(rest)));
            }
        }
    }

    /// Makes the full blocks of the prompt findable, from block `from` on. Those before are
    /// held, so they are findable.
    fn register(&mut self, table: &BlockTable, from: usize) -> candle_paged_attn::Result<()> {
        let size = self.blocks.block_size();
        let full = self.prompt.chunks_exact(size).zip(table.blocks());
        let mut parent = match from {
            0 => None,
            _ => self.blocks.node_of(table.blocks()[from - 1]),
        };
        for (tokens, &block) in full.skip(from) {
            let blocks = &mut self.blocks;
            parent = blocks.register(&self.namespace, parent, tokens, block)?;
        }
        Ok(())
    }
}

impl Memory for Paged {
    type Held = BlockTable;

    /// The terms are those of the engine: all its tokens must fit, and beside them one block
    /// for each running request, or it would soon take their place. Its prompt is findable at
    /// once: in this clock it is computed in the very step.
    fn admit(&mut self, request: &Request, tokens: usize, running: usize) -> Option<BlockTable> {
        let available = self.blocks.available();
        if running > 0 && self.goal + running > available {
            return None;
        }
        self.read(request);
        let size = self.blocks.block_size();
        let most = (tokens - 1) / size;
        let hits = self.blocks.lookup(&self.namespace, &self.prompt, most);
        let hits: Vec<BlockId> = hits.iter().map(|hit| hit.block).collect();
        let fresh = tokens.div_ceil(size) - hits.len();
        let idle = hits.iter().filter(|&&hit| self.blocks.ref_count(hit) == 0);
        let needed = fresh + idle.count();
        if needed + running > available {
            self.goal = needed;
            return None;
        }
        self.goal = 0;
        self.fresh.clear();
        self.blocks.acquire(&hits, fresh, &mut self.fresh).ok()?;
        let mut table = BlockTable::new();
        for &block in hits.iter().chain(&self.fresh) {
            table.push(block);
        }
        self.found += (hits.len() * size) as u64;
        self.register(&table, hits.len()).ok()?;
        Some(table)
    }

    fn grow(&mut self, held: &mut BlockTable) -> bool {
        self.fresh.clear();
        let grown = self.blocks.allocate(1, &mut self.fresh).is_ok();
        if !grown {
            self.goal = 0;
        }
        for &block in &self.fresh {
            held.push(block);
        }
        grown
    }

    fn release(&mut self, held: BlockTable) {
        for &block in held.blocks().iter().rev() {
            let released = self.blocks.release(block);
            debug_assert!(released.is_ok());
        }
    }

    fn rows(&self, held: &BlockTable) -> usize {
        held.len() * self.blocks.block_size()
    }

    fn taken(&self) -> usize {
        self.blocks.counts().referenced * self.blocks.block_size()
    }

    /// Any free block is as good as any other.
    fn scattered(&self, _: &Request) -> usize {
        0
    }

    fn found(&self) -> u64 {
        self.found
    }
}
