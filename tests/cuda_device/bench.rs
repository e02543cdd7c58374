//! Figures, for a GPU only: `cuda_device --ignored bench --nocapture`, written to the file
//! that `CANDLE_PAGED_ATTN_FIGURES` names.

use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use candle_paged_attn::ops::{
    AttentionOptions, Cascade, Mask, PageTable, cascade_attention, paged_attention, write_kv,
};
use serde_json::{Value, json};

use crate::common::Rng;
use crate::gpu;

const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const DIM: usize = 128;
const BLOCK: usize = 16;
/// Bytes of K and V of one token, bf16.
const TOKEN_BYTES: usize = 2 * KV_HEADS * DIM * 2;

/// Seconds per call: the median of five runs that last about 30 ms each, after a warm-up.
fn seconds(device: &Device, mut f: impl FnMut()) -> f64 {
    let mut timed = |calls: usize| {
        device.synchronize().unwrap();
        let start = Instant::now();
        (0..calls).for_each(|_| f());
        device.synchronize().unwrap();
        start.elapsed().as_secs_f64() / calls as f64
    };
    timed(2);
    let calls = ((0.03 / timed(2)) as usize).clamp(1, 1000);
    let mut runs: Vec<f64> = (0..5).map(|_| timed(calls)).collect();
    runs.sort_by(f64::total_cmp);
    runs[2]
}

struct Memory {
    k: Tensor,
    v: Tensor,
    table: PageTable,
}

/// `batch` sequences of `len` tokens in shuffled pages, the last `rows` of each being queries.
fn memory(device: &Device, batch: usize, len: usize, rows: usize) -> Memory {
    let per_sequence = len.div_ceil(BLOCK);
    let mut pages: Vec<u32> = (0..(batch * per_sequence) as u32).collect();
    Rng(7).shuffle(&mut pages);
    let mut table = PageTable::new(BLOCK).unwrap();
    for pages in pages.chunks(per_sequence) {
        let slots: Vec<i64> = (len - rows..len)
            .map(|t| i64::from(pages[t / BLOCK]) * BLOCK as i64 + (t % BLOCK) as i64)
            .collect();
        table.push(pages, 0, len, &slots).unwrap();
    }
    let cache = || {
        let shape = (batch * per_sequence, BLOCK, KV_HEADS, DIM);
        Tensor::ones(shape, DType::BF16, device).unwrap()
    };
    Memory {
        k: cache(),
        v: cache(),
        table,
    }
}

fn rows(device: &Device, rows: usize, heads: usize) -> Tensor {
    let values = Tensor::randn(0f32, 1.0, (rows, heads, DIM), device).unwrap();
    values.to_dtype(DType::BF16).unwrap()
}

/// Bytes per second that a plain copy moves, reads and writes together.
fn copy_bandwidth(device: &Device) -> f64 {
    let bytes: usize = 2 << 30;
    let source = Tensor::zeros(bytes / 4, DType::F32, device).unwrap();
    let time = seconds(device, || drop(source.copy().unwrap()));
    2.0 * bytes as f64 / time
}

fn decode(device: &Device, copy: f64) -> Vec<Value> {
    let mut figures = Vec::new();
    for len in [1 << 10, 4 << 10, 32 << 10] {
        for batch in [1, 16, 64, 256] {
            let Memory { k, v, table } = memory(device, batch, len, 1);
            let q = rows(device, batch, HEADS);
            let options = AttentionOptions::new((DIM as f32).powf(-0.5));
            let time = seconds(device, || {
                paged_attention(&q, &k, &v, &table, &options).unwrap();
            });
            let rate = (batch * len * TOKEN_BYTES) as f64 / time;
            figures.push(json!({
                "batch": batch, "tokens": len, "microseconds": time * 1e6,
                "gigabytes_per_second": rate / 1e9, "of_copy": rate / copy,
            }));
        }
    }
    figures
}

fn prefill(device: &Device) -> Vec<Value> {
    let lengths = [1, 2, 4, 8, 16].map(|k| k << 10);
    let figure = |len: usize| {
        let Memory { k, v, table } = memory(device, 1, len, len);
        let q = rows(device, len, HEADS);
        let options = AttentionOptions::new((DIM as f32).powf(-0.5));
        let time = seconds(device, || {
            paged_attention(&q, &k, &v, &table, &options).unwrap();
        });
        // Two products over the lower triangle.
        let operations = 2.0 * (HEADS * DIM) as f64 * (len as f64) * (len as f64 + 1.0);
        json!({
            "tokens": len, "microseconds": time * 1e6,
            "teraflops": operations / time / 1e12,
        })
    };
    lengths.map(figure).into()
}

/// Decode of 16 sequences that share 4,096 tokens and have 64 of their own, with the prefix read
/// once and without.
fn cascade(device: &Device) -> Value {
    const SEQUENCES: usize = 16;
    let (shared, own) = ((4 << 10) / BLOCK, 64 / BLOCK);
    let Memory { k, v, table } = memory(device, 1, (shared + SEQUENCES * own) * BLOCK, 1);
    let (prefix, rest) = table.pages(0).0.split_at(shared);
    let mut table = PageTable::new(BLOCK).unwrap();
    for own in rest.chunks(own) {
        let pages = [prefix, own].concat();
        let len = pages.len() * BLOCK;
        table.push(&pages, 0, len, &[-1]).unwrap();
    }
    let q = rows(device, SEQUENCES, HEADS);
    let options = AttentionOptions::new((DIM as f32).powf(-0.5));
    let mut cascade = Cascade::default();
    assert!(
        cascade
            .find(&table, Mask::Causal, Cascade::ROW_COST)
            .unwrap()
    );
    let plain = seconds(device, || {
        paged_attention(&q, &k, &v, &table, &options).unwrap();
    });
    let time = seconds(device, || {
        cascade_attention(&q, &k, &v, &cascade, &options).unwrap();
    });
    json!({
        "sequences": SEQUENCES, "shared_tokens": shared * BLOCK,
        "microseconds": time * 1e6, "plain_microseconds": plain * 1e6,
    })
}

fn write(device: &Device, copy: f64) -> Value {
    let tokens = 64 << 10;
    let Memory { k, v, table } = memory(device, 1, tokens, tokens);
    let (new_k, new_v) = (
        rows(device, tokens, KV_HEADS),
        rows(device, tokens, KV_HEADS),
    );
    let time = seconds(device, || {
        write_kv(&k, &v, &new_k, &new_v, &table).unwrap();
    });
    let rate = 2.0 * (tokens * TOKEN_BYTES) as f64 / time;
    json!({
        "tokens": tokens, "microseconds": time * 1e6,
        "gigabytes_per_second": rate / 1e9, "of_copy": rate / copy,
    })
}

/// Time of a layer's two calls where the kernels have next to nothing to do.
fn overhead(device: &Device) -> Value {
    let Memory { k, v, table } = memory(device, 1, 16, 1);
    let (q, new) = (rows(device, 1, HEADS), rows(device, 1, KV_HEADS));
    let options = AttentionOptions::new((DIM as f32).powf(-0.5));
    let time = seconds(device, || {
        write_kv(&k, &v, &new, &new, &table).unwrap();
        paged_attention(&q, &k, &v, &table, &options).unwrap();
    });
    json!({ "microseconds_per_layer": time * 1e6 })
}

#[test]
#[ignore = "needs a GPU: scripts/gpu-check.sh"]
fn bench() {
    let device = gpu();
    let copy = copy_bandwidth(device);
    let figures = json!({
        "copy_gigabytes_per_second": copy / 1e9,
        "decode": decode(device, copy),
        "prefill": prefill(device),
        "cascade": cascade(device),
        "write_kv": write(device, copy),
        "overhead": overhead(device),
    });
    let text = serde_json::to_string_pretty(&figures).unwrap();
    match std::env::var_os("CANDLE_PAGED_ATTN_FIGURES") {
        Some(path) => std::fs::write(path, text).unwrap(),
        None => println!("{text}"),
    }
}
