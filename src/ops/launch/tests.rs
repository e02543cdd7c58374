//! The launch rules, by hand calculation.

use super::*;

/// A cache of 16-bit elements, and queries of `group` heads per KV head.
fn views(group: usize, dim: usize, element: Element) -> (RowsView, CacheView) {
    let cache = CacheView {
        element,
        start: 0,
        block_stride: 16 * 2 * dim,
        num_blocks: 100,
        block_size: 16,
        kv_heads: 2,
        dim,
    };
    let q = RowsView {
        element,
        start: 0,
        strides: [2 * group * dim, dim, 1],
        heads: 2 * group,
        dim,
    };
    (q, cache)
}

const PLAIN: Scores = Scores {
    scale: 1.0,
    softcap: None,
    mask: Mask::Causal,
    slopes: false,
    sinks: false,
};

fn plan(q: &RowsView, cache: &CacheView, batch: &Batch) -> Plan {
    attention(q, cache, cache, batch, &PLAIN, false)
}

const DECODE: Batch = Batch {
    seqs: 3,
    rows: 3,
    pages: 300,
    min_rows: 1,
    max_rows: 1,
    max_len: 4096,
};

#[test]
fn every_chunk_of_every_sequence_has_a_slot_of_its_own() {
    for block_size in [1, 16, 256] {
        let (mut pages, mut next) = (0, 0);
        for (seq, len) in [0usize, 1, 255, 256, 257, 8192, 8193, 0, 9000, 300_001]
            .into_iter()
            .enumerate()
        {
            let first = pages * block_size / CHUNK + seq;
            assert!(first >= next, "sequence {seq} with blocks of {block_size}");
            next = first + len.div_ceil(chunk_keys(len)).max(1);
            pages += len.div_ceil(block_size);
        }
        assert!(
            next <= pages * block_size / CHUNK + 10,
            "the grid ends too early"
        );
    }
}

#[test]
fn a_decode_step_reads_no_length_on_the_host() {
    let (q, cache) = views(4, 128, Element::BF16);
    let plan = plan(&q, &cache, &DECODE);
    let names: Vec<_> = plan.launches.iter().map(|l| l.kernel.as_str()).collect();
    assert_eq!(names, ["decode_mma_bf16_d128", "reduce"]);
    // 300 pages of 16 are 18 chunks of 256 and a rest; and one slot more per sequence.
    let slots = 300 * 16 / 256 + 3;
    assert_eq!(plan.launches[0].grid, [slots as u32, 2, 1]);
    assert_eq!(plan.launches[1].grid, [3, 8, 1]);
    assert_eq!(plan.workspace, slots * 8 * (128 + 2) * 4);
}

/// Every grouping up to 32 has one block per chunk and KV head: one read of K/V.
#[test]
fn one_block_reads_a_chunk_for_all_heads_of_a_group() {
    let slots = 300 * 16 / 256 + 3;
    for element in [Element::F32, Element::BF16] {
        for group in 1..=32 {
            let (q, cache) = views(group, 128, element);
            let launch = &plan(&q, &cache, &DECODE).launches[0];
            assert_eq!(launch.grid, [slots as u32, 2, 1], "{group}: {launch:?}");
        }
        let (q, cache) = views(33, 128, element);
        let launch = &plan(&q, &cache, &DECODE).launches[0];
        assert_eq!(launch.grid[0] as usize % slots, 0, "33 heads side by side");
        assert!(launch.grid[0] as usize > slots);
    }
}

/// The prefix of 40 rows of a group of 4: 160 pairs are tiled, 128 (of 32 rows) streamed.
#[test]
fn rows_without_causality_are_streamed_side_by_side() {
    let (q, cache) = views(4, 128, Element::BF16);
    let names = |rows: usize| {
        let scores = Scores {
            mask: Mask::Full,
            ..PLAIN
        };
        let batch = Batch {
            seqs: 1,
            rows,
            pages: 256,
            min_rows: rows,
            max_rows: rows,
            max_len: 4096,
        };
        let plan = attention(&q, &cache, &cache, &batch, &scores, true);
        let names = |l: Launch| (l.kernel, l.grid);
        plan.launches.into_iter().map(names).collect::<Vec<_>>()
    };
    // 256 pages of 16 are 16 chunks of 256, and one slot more; 32 pairs a block.
    let slots = 17;
    assert_eq!(
        names(32),
        [
            ("decode_mma_wide_bf16_d128".into(), [slots * 4, 2, 1]),
            ("reduce".into(), [1, 8, 32]),
        ]
    );
    let tiled = (
        "prefill_mma_bf16_d128".to_string(),
        [40 * 4 / 128 + 1, 2, 1],
    );
    assert_eq!(names(40), [tiled]);
}

#[test]
fn a_window_that_no_context_reaches_is_none() {
    let (q, cache) = views(4, 128, Element::BF16);
    let args = |mask| {
        let scores = Scores { mask, ..PLAIN };
        attention(&q, &cache, &cache, &DECODE, &scores, false).launches
    };
    for window in [1 << 31, usize::MAX] {
        assert_eq!(args(Mask::CausalWindow(window)), args(Mask::Causal));
    }
    assert_ne!(args(Mask::CausalWindow((1 << 31) - 1)), args(Mask::Causal));
    assert_ne!(args(Mask::Full), args(Mask::Causal));
}

#[test]
fn write_kv_takes_several_rows_per_block_only_when_there_are_many() {
    let (q, cache) = views(1, 64, Element::F16);
    let shape = |rows| {
        let launch = write_kv(&cache, &q, rows).launches.remove(0);
        (launch.grid[0], launch.block)
    };
    // A row of 2 x 64 elements is 16 chunks of 8.
    assert_eq!(shape(1), (1, 32));
    assert_eq!(shape(4095), (4095, 32));
    assert_eq!(shape(4096), (2048, 32));
    // 32 rows are the 512 chunks that 256 threads take.
    assert_eq!(shape(1_000_000), (31_250, 256));
}

#[test]
fn what_has_no_tensor_core_path_goes_without() {
    let name = |q: &RowsView, cache: &CacheView| plan(q, cache, &DECODE).launches[0].kernel.clone();
    let (q, cache) = views(4, 128, Element::F16);
    assert_eq!(name(&q, &cache), "decode_mma_f16_d128");
    let odd = CacheView { start: 3, ..cache };
    assert_eq!(name(&q, &odd), "attend_simt_f16_d128");
    let gaps = CacheView {
        block_stride: cache.block_stride + 4,
        ..cache
    };
    assert_eq!(name(&q, &gaps), "attend_simt_f16_d128");
    let wide = RowsView {
        element: Element::F32,
        ..q
    };
    assert_eq!(name(&wide, &cache), "attend_simt_f16_d128");
    let (q, cache) = views(4, 264, Element::F16);
    assert_eq!(name(&q, &cache), "attend_simt_f16_d512");
}

#[test]
fn a18_blocks_that_are_read_and_written_go_through_the_workspace() {
    let (_, cache) = views(1, 64, Element::F16);
    let copy = copy_blocks(&cache, &[(0, 1), (1, 2), (7, 7)]);
    // Block 1 into the workspace, then 0 to 1, then the workspace to 2.
    assert_eq!(copy.pairs, [1, 0, 0, 1, 0, 2]);
    assert_eq!(copy.plan.launches.len(), 3);
    assert_eq!(copy.plan.workspace, 16 * 2 * 64 * 2);
}

#[test]
fn nothing_to_do_launches_nothing() {
    let (q, cache) = views(4, 64, Element::F16);
    let empty = Batch { rows: 0, ..DECODE };
    assert_eq!(plan(&q, &cache, &empty), Plan::default());
    assert_eq!(write_kv(&cache, &q, 0), Plan::default());
    assert_eq!(copy_blocks(&cache, &[(3, 3)]), CopyPlan::default());
    assert_eq!(merge_states(0, 64), Plan::default());
}
