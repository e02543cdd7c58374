//! The device side of a page table, without a device: what is copied, and that addresses and
//! launches stay from step to step.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::Arc;

use candle_core::{DType, Device};
use candle_paged_attn::cache::{
    AddOptions, CacheConfig, CacheSpec, Feed, PagedKvCache, SequenceId,
};
use candle_paged_attn::ops::launch::{self, CacheView, Element, Plan, RowsView, Scores, Slot};
use candle_paged_attn::ops::resident::Resident;
use candle_paged_attn::ops::{Mask, PageTable};

use common::host::{Host, at};

#[test]
fn the_arrays_are_copied_and_padded_to_powers_of_two() {
    let mut table = PageTable::new(4).unwrap();
    table.push(&[7, 3], 0, 6, &[12, 13]).unwrap();
    table.push(&[9], 2, 12, &[39]).unwrap();
    table.push(&[5, 6], 0, 5, &[24]).unwrap();
    let (host, mut resident) = (Host::default(), Resident::<Host>::default());
    let filled = resident.fill(&host, &table).unwrap();
    let words = |slot, len| at::<u32>(&filled, slot, len);
    assert_eq!(words(Slot::Indptr, 5), [0, 2, 3, 5, 5]);
    assert_eq!(words(Slot::Indices, 8), [7, 3, 9, 5, 6, 0, 0, 0]);
    assert_eq!(words(Slot::FirstPage, 4), [0, 2, 0, 0]);
    assert_eq!(words(Slot::SeqLens, 4), [6, 12, 5, 0]);
    assert_eq!(words(Slot::QueryOffsets, 5), [0, 2, 3, 4, 4]);
    assert_eq!(at::<i64>(&filled, Slot::Slots, 4), [12, 13, 39, 24]);
    let batch = filled.batch;
    assert_eq!((batch.seqs, batch.rows, batch.pages), (4, 4, 8));
    assert_eq!((batch.min_rows, batch.max_rows), (1, 2));
    assert_eq!(batch.max_len, 16);
    assert_eq!((host.allocations.get(), host.copies.get()), (1, 1));
}

#[test]
fn of_equal_slots_the_last_row_keeps_its_own() {
    let mut table = PageTable::new(4).unwrap();
    table.push(&[1, 2], 0, 8, &[5, -1, 5, 4, 5, 6]).unwrap();
    let mut resident = Resident::<Host>::default();
    let filled = resident.fill(&Host::default(), &table).unwrap();
    let slots = at::<i64>(&filled, Slot::Slots, 8);
    assert_eq!(slots, [-1, -1, -1, 4, 5, 6, -1, -1]);
}

#[test]
fn a_larger_table_moves_the_arrays_and_a_smaller_one_does_not_move_them_back() {
    let with_pages = |pages: u32| {
        let mut table = PageTable::new(4).unwrap();
        let ids: Vec<u32> = (0..pages).collect();
        table.push(&ids, 0, pages as usize * 4, &[0]).unwrap();
        table
    };
    let (host, mut resident) = (Host::default(), Resident::<Host>::default());
    let mut fill = |pages| resident.fill(&host, &with_pages(pages)).unwrap();
    let small = fill(3);
    assert_eq!(fill(4).addresses(), small.addresses());
    assert_eq!(host.allocations.get(), 1);
    let large = fill(5);
    assert_ne!(large.addresses(), small.addresses());
    assert_eq!(fill(3).addresses(), large.addresses());
    assert_eq!(fill(3).batch, small.batch, "grids follow the table at hand");
    assert_eq!(host.allocations.get(), 2);
}

#[test]
fn a_placement_changes_with_the_capacity_and_with_everything_that_moves() {
    let table = |len: usize| {
        let mut table = PageTable::new(4).unwrap();
        let pages: Vec<u32> = (0..len.div_ceil(4) as u32).collect();
        table.push(&pages, 0, len, &[len as i64 - 1]).unwrap();
        table
    };
    let (host, mut resident) = (Host::default(), Resident::<Host>::default());
    let mut placement = |len: usize, workspace: usize, constant: Option<&Arc<[f32]>>| {
        let filled = resident.fill(&host, &table(len)).unwrap();
        resident.workspace(&host, workspace).unwrap();
        if let Some(values) = constant {
            resident.constant(&host, values).unwrap();
        }
        resident.placement(&host, &filled)
    };
    let slopes: Arc<[f32]> = [0.5].into();
    let captured = placement(13, 100, Some(&slopes));
    assert_eq!(placement(14, 100, Some(&slopes)), captured, "the next step");
    assert_eq!(placement(16, 90, Some(&slopes)), captured, "less workspace");
    assert_ne!(placement(17, 100, Some(&slopes)), captured, "more pages");
    let captured = placement(17, 100, Some(&slopes));
    assert_ne!(placement(17, 999, Some(&slopes)), captured, "it moved");
    let captured = placement(17, 999, Some(&slopes));
    let sinks: Arc<[f32]> = [1.0].into();
    assert_ne!(placement(17, 999, Some(&sinks)), captured, "one more");
}

#[test]
fn a_device_whose_ops_read_the_table_itself_has_no_placement() {
    let table = PageTable::new(4).unwrap();
    assert_eq!(table.upload(&Device::Cpu).unwrap(), None);
}

#[test]
fn workspace_and_constants_stay_where_they_are() {
    let (host, mut resident) = (Host::default(), Resident::<Host>::default());
    let first = resident.workspace(&host, 1000).unwrap();
    assert_eq!(resident.workspace(&host, 10).unwrap(), first);
    assert_eq!(resident.workspace(&host, 1024).unwrap(), first);
    assert_eq!(host.allocations.get(), 1);
    assert_ne!(resident.workspace(&host, 1025).unwrap(), first);

    let slopes: Arc<[f32]> = [0.5, 0.25].into();
    let address = resident.constant(&host, &slopes).unwrap();
    let before = host.copies.get();
    assert_eq!(
        resident.constant(&host, &slopes.clone()).unwrap(),
        address,
        "known by its identity, not copied again"
    );
    assert_eq!(host.copies.get(), before);
    // Equal values in another allocation are another constant; one that only the table still
    // holds is given up, so options made anew for every call do not pile up.
    let other: Arc<[f32]> = [0.5, 0.25].into();
    assert_ne!(resident.constant(&host, &other).unwrap(), address);
    for _ in 0..100 {
        resident.constant(&host, &Arc::from([1.0])).unwrap();
    }
    assert_eq!(resident.num_constants(), 3);
}

/// One layer of 2 KV heads of dim 64 in blocks of 16.
struct Steps {
    cache: PagedKvCache,
    host: Host,
    resident: Resident<Host>,
}

impl Steps {
    /// Plans one step, and says what it would launch and where the buffers are.
    fn step(&mut self, feeds: &[(SequenceId, &[u32])]) -> (Plan, Plan, Vec<(Slot, u64)>) {
        let feeds: Vec<_> = feeds.iter().map(|(id, new)| Feed::new(*id, new)).collect();
        let plan = self.cache.plan(&feeds).unwrap();
        let step = plan.layer(0).unwrap();
        let table = step.table;
        let filled = self.resident.fill(&self.host, table).unwrap();
        let cache = CacheView {
            element: Element::F16,
            start: 0,
            block_stride: 16 * 2 * 64,
            num_blocks: 256,
            block_size: 16,
            kv_heads: 2,
            dim: 64,
        };
        let rows = |heads| RowsView {
            element: Element::F16,
            start: 0,
            strides: [heads * 64, 64, 1],
            heads,
            dim: 64,
        };
        let scores = Scores {
            scale: 0.125,
            softcap: None,
            mask: Mask::Causal,
            slopes: false,
            sinks: false,
        };
        let attend = launch::attention(&rows(8), &cache, &cache, &filled.batch, &scores, false);
        let write = launch::write_kv(&cache, &rows(2), table.num_rows());
        let mut addresses = filled.addresses().to_vec();
        let workspace = self.resident.workspace(&self.host, attend.workspace);
        addresses.push((Slot::Workspace, workspace.unwrap()));
        drop(step);
        plan.commit().unwrap();
        (write, attend, addresses)
    }
}

#[test]
fn two_plans_of_one_capacity_give_identical_pointers_and_launches() {
    let spec = CacheSpec::uniform(1, 2, 64, DType::F16).unwrap();
    let cache = PagedKvCache::new(&spec, &CacheConfig::blocks(256), &Device::Cpu).unwrap();
    let prompts: Vec<Vec<u32>> = [600, 300, 20]
        .iter()
        .zip(0u32..)
        .map(|(&len, i)| (0..len).map(|t| 1000 * i + t).collect())
        .collect();
    let ids: Vec<_> = prompts
        .iter()
        .map(|prompt| cache.add(prompt, AddOptions::default()).unwrap().id)
        .collect();
    let mut steps = Steps {
        cache,
        host: Host::default(),
        resident: Resident::default(),
    };
    let feeds: Vec<_> = ids
        .iter()
        .copied()
        .zip(prompts.iter().map(|p| &p[..]))
        .collect();
    steps.step(&feeds);
    let decode: Vec<_> = ids.iter().map(|&id| (id, &[7u32][..])).collect();
    let first = steps.step(&decode);
    assert!(first.1.workspace > 0, "the long contexts are split");
    let allocations = steps.host.allocations.get();
    // 59 pages grow to 63: the capacity is 64.
    for _ in 0..20 {
        assert_eq!(steps.step(&decode), first);
    }
    // A batch of two lies in the buffers of three.
    assert_eq!(steps.step(&decode[1..]).2, first.2);
    assert_eq!(steps.host.allocations.get(), allocations);
}
