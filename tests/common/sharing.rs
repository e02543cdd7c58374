//! Batches whose tables share physical blocks.

use candle_paged_attn::ops::PageTable;

use super::paged::{Batch, Dense, Setup, Shape};

/// One sequence of a batch with shared blocks: it starts with the first `shared` blocks of
/// sequence `with`.
#[derive(Clone, Copy)]
pub struct Sharing {
    pub shape: Shape,
    pub with: usize,
    pub shared: usize,
}

/// A batch whose tables share physical blocks: those that would hold copies are poisoned.
pub fn build(setup: &Setup, sharing: &[Sharing]) -> Batch {
    let mut setup = setup.clone();
    setup.seqs = sharing.iter().map(|s| s.shape).collect();
    let bs = setup.block_size;
    let plain = setup.build();
    let mut seqs: Vec<Dense> = plain.seqs;
    for (i, s) in sharing.iter().enumerate() {
        let (before, own) = seqs.split_at_mut(i);
        let Some(other) = before.get(s.with) else {
            continue;
        };
        let (k, v) = (kv_row(&setup).0 * bs, kv_row(&setup).1 * bs);
        own[0].k[..s.shared * k].copy_from_slice(&other.k[..s.shared * k]);
        own[0].v[..s.shared * v].copy_from_slice(&other.v[..s.shared * v]);
    }
    let mut batch = Batch::place(&setup, seqs, setup.seed ^ 0xca5c);
    let mut table = PageTable::new(bs).unwrap();
    let mut lists: Vec<Vec<u32>> = Vec::new();
    let mut copies = Vec::new();
    for (i, s) in sharing.iter().enumerate() {
        let mut pages = batch.table.pages(i).0.to_vec();
        if i > s.with {
            copies.extend_from_slice(&pages[..s.shared]);
            pages[..s.shared].copy_from_slice(&lists[s.with][..s.shared]);
        }
        let slots = &batch.table.slots()[rows_of(&batch.table, i)];
        table.push(&pages, 0, s.shape.len, slots).unwrap();
        lists.push(pages);
    }
    for page in copies {
        for cache in [&batch.k_cache, &batch.v_cache] {
            let block = cache.narrow(0, page as usize, 1).unwrap();
            let nan = (block.copy().unwrap() * f64::NAN).unwrap();
            cache.slice_set(&nan, 0, page as usize).unwrap();
        }
    }
    batch.table = table;
    batch
}

pub fn rows_of(table: &PageTable, seq: usize) -> std::ops::Range<usize> {
    table.query_offsets()[seq] as usize..table.query_offsets()[seq + 1] as usize
}

/// Elements of a K and of a V row.
fn kv_row(setup: &Setup) -> (usize, usize) {
    let d = setup.dims;
    (d.kv_heads * d.k_dim, d.kv_heads * d.v_dim)
}

pub fn one(len: usize, rows: usize, with: usize, shared: usize) -> Sharing {
    let shape = Shape { len, rows };
    Sharing {
        shape,
        with,
        shared,
    }
}

/// Sequence 0 and others that start with `shared` blocks of it, a decode row each.
pub fn behind_one_prompt(lens: &[usize], shared: usize) -> Vec<Sharing> {
    lens.iter().map(|&len| one(len, 1, 0, shared)).collect()
}
