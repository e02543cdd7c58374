//! The block allocator, its prefix index and block tables.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "block/basics.rs"]
mod basics;
#[path = "block/cases.rs"]
mod cases;
#[path = "block/model.rs"]
mod model;
#[path = "block/replay.rs"]
mod replay;
#[path = "block/tables.rs"]
mod tables;

use std::hash::BuildHasher;

use candle_paged_attn::block::{BlockAllocator, BlockId, Namespace, NodeId};

/// `n` new blocks.
fn take<S: BuildHasher>(blocks: &mut BlockAllocator<S>, n: usize) -> Vec<BlockId> {
    let mut out = Vec::new();
    blocks.allocate(n, &mut out).unwrap();
    out
}

/// Registers the full blocks of a prompt from its start; the nodes.
fn register<S: BuildHasher>(
    blocks: &mut BlockAllocator<S>,
    ns: &Namespace,
    tokens: &[u32],
    table: &[BlockId],
) -> Vec<NodeId> {
    let mut nodes = Vec::new();
    for (tokens, &block) in tokens.chunks_exact(blocks.block_size()).zip(table) {
        let parent = nodes.last().copied();
        nodes.push(blocks.register(ns, parent, tokens, block).unwrap().unwrap());
    }
    nodes
}

/// Releases a table last first and checks the identity after each block.
fn release<S: BuildHasher>(blocks: &mut BlockAllocator<S>, table: &[BlockId]) {
    for &block in table.iter().rev() {
        blocks.release(block).unwrap();
        blocks.check_invariants().unwrap();
    }
}

/// The blocks that a lookup without limit finds.
fn found<S: BuildHasher>(
    blocks: &BlockAllocator<S>,
    ns: &Namespace,
    tokens: &[u32],
) -> Vec<BlockId> {
    let hits = blocks.lookup(ns, tokens, usize::MAX);
    hits.iter().map(|hit| hit.block).collect()
}
