//! Calls of `paged_attention` as jobs: the inputs of a random paged batch, the launches, and
//! what the f64 reference and the CPU op say.

use candle_core::{DType, Tensor};
use candle_paged_attn::ops::launch::{self, CacheView, Element, RowsView, Scores, Slot};
use candle_paged_attn::ops::{AttentionOptions, PageTable};

use crate::common::paged::{Batch, floats, tolerance};

use paged_attn_emulator::{Expect, Job, encode_f32, encode_u32};

pub fn element(dtype: DType) -> Element {
    match dtype {
        DType::F16 => Element::F16,
        DType::BF16 => Element::BF16,
        _ => Element::F32,
    }
}

pub fn dtype(element: Element) -> DType {
    match element {
        Element::F16 => DType::F16,
        Element::BF16 => DType::BF16,
        Element::F32 => DType::F32,
    }
}

/// The elements of a tensor as they lie in memory.
pub fn bytes(t: &Tensor) -> Vec<u8> {
    let t = t.flatten_all().unwrap();
    match t.dtype() {
        DType::F16 => {
            let data: Vec<half::f16> = t.to_vec1().unwrap();
            data.iter().flat_map(|x| x.to_le_bytes()).collect()
        }
        DType::BF16 => {
            let data: Vec<half::bf16> = t.to_vec1().unwrap();
            data.iter().flat_map(|x| x.to_le_bytes()).collect()
        }
        _ => encode_f32(&t.to_vec1::<f32>().unwrap()),
    }
}

pub fn cache_view(t: &Tensor) -> CacheView {
    let (num_blocks, block_size, kv_heads, dim) = t.dims4().unwrap();
    CacheView {
        element: element(t.dtype()),
        start: 0,
        block_stride: block_size * kv_heads * dim,
        num_blocks,
        block_size,
        kv_heads,
        dim,
    }
}

pub fn rows_view(t: &Tensor) -> RowsView {
    let (_, heads, dim) = t.dims3().unwrap();
    RowsView {
        element: element(t.dtype()),
        start: 0,
        strides: [heads * dim, dim, 1],
        heads,
        dim,
    }
}

/// Capacity exactly as large as the table.
pub fn capacity(table: &PageTable) -> launch::Batch {
    let rows = || {
        table
            .query_offsets()
            .windows(2)
            .map(|w| (w[1] - w[0]) as usize)
    };
    launch::Batch {
        seqs: table.num_seqs(),
        rows: table.num_rows(),
        pages: table.indices().len(),
        min_rows: rows().filter(|&n| n > 0).min().unwrap_or(1),
        max_rows: rows().max().unwrap_or(0),
        max_len: table.seq_lens().iter().copied().max().unwrap_or(0) as usize,
    }
}

pub fn scores(options: &AttentionOptions) -> Scores {
    Scores {
        scale: options.scale,
        softcap: options.softcap,
        mask: options.mask,
        slopes: options.alibi_slopes.is_some(),
        sinks: options.sinks.is_some(),
    }
}

/// The index arrays, padded up to a capacity as the launch code asks for.
pub fn index_arrays(table: &PageTable, capacity: &launch::Batch) -> Vec<(Slot, Vec<u8>)> {
    let padded = |values: &[u32], len: usize, by: u32| {
        let mut values = values.to_vec();
        values.resize(len, by);
        encode_u32(&values)
    };
    let last = |values: &[u32]| values.last().copied().unwrap_or(0);
    let (indptr, offsets) = (table.indptr(), table.query_offsets());
    // What pads the indices is never read: an id that no cache has.
    let garbage = u32::MAX;
    vec![
        (
            Slot::Indptr,
            padded(indptr, capacity.seqs + 1, last(indptr)),
        ),
        (
            Slot::Indices,
            padded(table.indices(), capacity.pages, garbage),
        ),
        (
            Slot::FirstPage,
            padded(table.first_page(), capacity.seqs, 0),
        ),
        (Slot::SeqLens, padded(table.seq_lens(), capacity.seqs, 0)),
        (
            Slot::QueryOffsets,
            padded(offsets, capacity.seqs + 1, last(offsets)),
        ),
    ]
}

pub fn option_arrays(options: &AttentionOptions) -> Vec<(Slot, Vec<u8>)> {
    [
        (Slot::Slopes, &options.alibi_slopes),
        (Slot::Sinks, &options.sinks),
    ]
    .into_iter()
    .filter_map(|(slot, values)| Some((slot, encode_f32(values.as_ref()?))))
    .collect()
}

/// One call over the whole batch, with the capacity given or exact.
pub fn attention(
    batch: &Batch,
    options: &AttentionOptions,
    state: bool,
    capacity: Option<launch::Batch>,
) -> Job {
    let capacity = capacity.unwrap_or_else(|| self::capacity(&batch.table));
    let (q, k, v) = (
        rows_view(&batch.q),
        cache_view(&batch.k_cache),
        cache_view(&batch.v_cache),
    );
    let plan = launch::attention(&q, &k, &v, &capacity, &scores(options), state);
    let mut buffers = vec![
        (Slot::Q, bytes(&batch.q)),
        (Slot::KCache, bytes(&batch.k_cache)),
        (Slot::VCache, bytes(&batch.v_cache)),
    ];
    buffers.extend(index_arrays(&batch.table, &capacity));
    buffers.extend(option_arrays(options));

    let out_element = if state { Element::F32 } else { q.element };
    let out = capacity.rows * q.heads * v.dim;
    let lse_start = out * Element::F32.size();
    let mut size = out * out_element.size();
    let want = batch.reference(options);
    let tolerance = tolerance(dtype(out_element));
    let expect = |start, row_len, tolerance, values, who| Expect {
        slot: Slot::Out,
        start,
        element: if row_len == 1 {
            Element::F32
        } else {
            out_element
        },
        row_len,
        tolerance,
        values,
        who,
    };
    let mut expected = vec![expect(0, v.dim, tolerance, want.out, "the reference")];
    if state {
        size += capacity.rows * q.heads * Element::F32.size();
        expected.push(expect(lse_start, 1, 1e-5, want.lse, "the reference's lse"));
        let cpu = batch.state(options);
        expected.push(expect(0, v.dim, 2e-5, floats(&cpu.out), "the CPU op"));
        expected.push(expect(
            lse_start,
            1,
            2e-5,
            floats(&cpu.lse),
            "the CPU op's lse",
        ));
    } else {
        let cpu = floats(&batch.attention(options));
        expected.push(expect(0, v.dim, 2.0 * tolerance, cpu, "the CPU op"));
    }
    Job {
        plan,
        buffers,
        outputs: vec![(Slot::Out, size)],
        scratch: Vec::new(),
        expect: expected,
    }
}
