//! Shapes: every grouping, dimension, block size and dtype, each with some of the rules.

use candle_core::DType;
use candle_paged_attn::ops::AttentionOptions;

use crate::call::attention;
use crate::common::paged::{Batch, Setup};
use crate::common::shapes::{BLOCK_SIZES, DIMS, DTYPES, MIX};
use paged_attn_emulator::{Emulator, Schedule};

/// Rules that change from case to case, so that each meets each shape somewhere.
pub fn rules(batch: &Batch, case: usize) -> AttentionOptions {
    let heads = batch.setup.dims.heads;
    let mut options = batch.options();
    if case % 2 == 1 {
        options = options.with_window([1, 7, 33, 64, 260][case % 5]);
    }
    if case % 3 == 1 {
        options = options.with_softcap(6.0);
    }
    if case % 5 == 1 {
        let slopes: Vec<f32> = (0..heads).map(|h| 0.01 + 0.037 * h as f32).collect();
        options = options.with_alibi_slopes(slopes);
    }
    if case % 7 == 1 {
        let sinks: Vec<f32> = (0..heads).map(|h| h as f32 - 2.0).collect();
        options = options.with_sinks(sinks);
    }
    options
}

fn check(
    emulator: &mut Emulator,
    case: usize,
    group: usize,
    dim: usize,
    block_size: usize,
    types: (DType, DType),
) {
    let kv_heads = if group > 4 { 1 } else { 1 + case % 2 };
    let mut setup = Setup::new(group * kv_heads, kv_heads, dim, MIX);
    if case % 4 == 3 {
        setup.dims.v_dim = DIMS[case % DIMS.len()];
    }
    setup.block_size = block_size;
    (setup.q_dtype, setup.cache_dtype) = types;
    setup.seed = case as u64;
    let batch = setup.build();
    let options = rules(&batch, case);
    let what = format!(
        "case {case}: {group} x {kv_heads} heads, dims {dim}/{}, blocks of {block_size}, {types:?}, {options:?}",
        setup.dims.v_dim
    );
    let state = case.is_multiple_of(3) && options.sinks.is_none();
    let job = attention(&batch, &options, state, None);
    emulator.check(&job, Schedule::of(case), &what);
}

#[test]
fn every_grouping() {
    let mut emulator = Emulator::start();
    for (case, group) in (1..=32).enumerate() {
        let dim = [64, 8, 40, 128, 256][case % 5];
        let block_size = BLOCK_SIZES[case % BLOCK_SIZES.len()];
        // The last three groups with tensor cores and without.
        for types in &DTYPES[..if group >= 30 { 3 } else { 1 }] {
            let types = if group >= 30 {
                *types
            } else {
                DTYPES[case % 3]
            };
            check(&mut emulator, case, group, dim, block_size, types);
        }
    }
}

#[test]
fn every_dim_in_every_dtype() {
    let mut emulator = Emulator::start();
    for (i, &dim) in DIMS.iter().enumerate() {
        for (j, &types) in DTYPES.iter().enumerate() {
            let case = i * DTYPES.len() + j;
            let block_size = BLOCK_SIZES[(i + j) % BLOCK_SIZES.len()];
            let group = [1, 3, 4, 2, 7][case % 5];
            check(&mut emulator, case, group, dim, block_size, types);
        }
    }
}

#[test]
fn every_block_size_in_every_dtype() {
    let mut emulator = Emulator::start();
    for (i, &block_size) in BLOCK_SIZES.iter().enumerate() {
        for (j, &types) in DTYPES.iter().enumerate() {
            check(
                &mut emulator,
                i * DTYPES.len() + j,
                4,
                64,
                block_size,
                types,
            );
        }
    }
}
