//! Launches that move K/V rows and blocks, and `merge_states`.

use std::collections::HashSet;

use super::{Arg, CacheView, Launch, Plan, RowsView, Slot, THREADS};

/// Most threads of a block of `write_kv`.
const WRITE_THREADS: usize = 256;

/// Blocks of `write_kv` from which on a block takes more than one row: a few waves of any GPU.
const WRITE_BLOCKS: usize = 2048;

/// `write_kv` for one cache tensor: `rows` new rows, whose slots are in [`Slot::Slots`].
/// Slots are distinct (the caller keeps the last of equal ones and turns the others into −1);
/// a slot that is negative or outside the cache writes nothing.
pub fn write_kv(cache: &CacheView, new: &RowsView, rows: usize) -> Plan {
    if rows == 0 {
        return Plan::default();
    }
    // Small batches spread over the GPU; large ones fill blocks of two chunks per thread.
    let chunks = cache.kv_heads * cache.dim / 8;
    let per_block = (rows / WRITE_BLOCKS).clamp(1, (2 * WRITE_THREADS).div_ceil(chunks));
    let launch = Launch {
        kernel: format!("write_kv_{}_{}", new.element.name(), cache.element.name()),
        grid: [rows.div_ceil(per_block) as u32, 1, 1],
        block: (chunks * per_block).next_multiple_of(32).min(WRITE_THREADS) as u32,
        shared: 0,
        args: vec![
            cache.arg(Slot::Cache),
            new.arg(Slot::Rows),
            Arg::Buffer(Slot::Slots, 0),
            Arg::I64(new.strides[0] as i64),
            Arg::I64(new.strides[1] as i64),
            Arg::I64(new.strides[2] as i64),
            Arg::I64(cache.block_stride as i64),
            Arg::I64((cache.num_blocks * cache.block_size) as i64),
            Arg::U32(rows as u32),
            Arg::U32(per_block as u32),
            Arg::U32(cache.kv_heads as u32),
            Arg::U32(cache.dim as u32),
            Arg::U32(cache.block_shift()),
        ],
    };
    Plan {
        launches: vec![launch],
        workspace: 0,
    }
}

/// The launches of `copy_blocks` and the pairs they read.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct CopyPlan {
    /// Content of [`Slot::Pairs`]: `from, to, from, to, ...`.
    pub pairs: Vec<u32>,
    /// What to launch.
    pub plan: Plan,
}

/// `copy_blocks` in one cache tensor, all reads before all writes: blocks that are read by one
/// pair and written by another go through the workspace.
pub fn copy_blocks(cache: &CacheView, pairs: &[(u32, u32)]) -> CopyPlan {
    let targets: HashSet<u32> = pairs.iter().map(|&(_, to)| to).collect();
    let moving = pairs.iter().copied().filter(|(from, to)| from != to);
    let (staged, direct): (Vec<_>, Vec<_>) = moving.partition(|(from, _)| targets.contains(from));
    let block_len = cache.block_size * cache.kv_heads * cache.dim;
    let in_cache = (cache.arg(Slot::Cache), cache.block_stride);
    let in_workspace = (Arg::Buffer(Slot::Workspace, 0), block_len);
    let numbered = || staged.iter().zip(0u32..);
    let into: Vec<_> = numbered().map(|(&(from, _), i)| (from, i)).collect();
    let out_of: Vec<_> = numbered().map(|(&(_, to), i)| (i, to)).collect();

    let mut copy = CopyPlan::default();
    copy.plan.workspace = staged.len() * block_len * cache.element.size();
    for (list, (source, source_stride), (target, target_stride)) in [
        (&into, in_cache, in_workspace),
        (&direct, in_cache, in_cache),
        (&out_of, in_workspace, in_cache),
    ] {
        if list.is_empty() {
            continue;
        }
        let first = copy.pairs.len() * size_of::<u32>();
        copy.pairs
            .extend(list.iter().flat_map(|&(from, to)| [from, to]));
        copy.plan.launches.push(Launch {
            kernel: format!("copy_blocks_b{}", 8 * cache.element.size()),
            grid: [
                list.len() as u32,
                block_len.div_ceil(8 * 4 * THREADS as usize) as u32,
                1,
            ],
            block: THREADS,
            shared: 0,
            args: vec![
                target,
                source,
                Arg::Buffer(Slot::Pairs, first),
                Arg::I64(target_stride as i64),
                Arg::I64(source_stride as i64),
                Arg::I64(block_len as i64),
            ],
        });
    }
    copy
}

/// `merge_states` of `pairs` (rows times heads) contiguous F32 states of `v_dim` elements.
/// [`Slot::Out`] receives `pairs * v_dim` outputs, then `pairs` log-sum-exps.
pub fn merge_states(pairs: usize, v_dim: usize) -> Plan {
    if pairs == 0 {
        return Plan::default();
    }
    let launch = Launch {
        kernel: "merge_states".into(),
        // A warp per pair.
        grid: [pairs.div_ceil(THREADS as usize / 32) as u32, 1, 1],
        block: THREADS,
        shared: 0,
        args: vec![
            Arg::Buffer(Slot::Out, 0),
            Arg::Buffer(Slot::Out, pairs * v_dim * size_of::<f32>()),
            Arg::Buffer(Slot::AOut, 0),
            Arg::Buffer(Slot::ALse, 0),
            Arg::Buffer(Slot::BOut, 0),
            Arg::Buffer(Slot::BLse, 0),
            Arg::U32(pairs as u32),
            Arg::U32(v_dim as u32),
        ],
    };
    Plan {
        launches: vec![launch],
        workspace: 0,
    }
}
