//! The arguments that the launch code passes, against the parameters of the compiled kernels:
//! a launch hands the driver bare pointers, so nothing else would notice a missing argument.
//!
//! `scripts/cuda_check.sh` compiles the kernels to PTX, names the file in `CANDLE_PAGED_ATTN_PTX`
//! and runs the test that reads it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};

use candle_paged_attn::ops::Mask;
use candle_paged_attn::ops::launch::{
    self, Arg, Batch, CacheView, Element, Launch, RowsView, Scores, Slot,
};

const ELEMENTS: [Element; 3] = [Element::F32, Element::F16, Element::BF16];

fn cache(element: Element, dim: usize) -> CacheView {
    CacheView {
        element,
        start: 0,
        block_stride: 16 * 2 * dim,
        num_blocks: 100,
        block_size: 16,
        kv_heads: 2,
        dim,
    }
}

fn rows(element: Element, dim: usize) -> RowsView {
    RowsView {
        element,
        start: 0,
        strides: [8 * dim, dim, 1],
        heads: 8,
        dim,
    }
}

/// At least one launch of every kernel, with optional inputs and without.
fn launches() -> Vec<Launch> {
    let mut plans = vec![launch::merge_states(6, 64)];
    for element in ELEMENTS {
        plans.push(launch::copy_blocks(&cache(element, 64), &[(0, 1), (1, 2), (4, 5)]).plan);
        for new in ELEMENTS {
            plans.push(launch::write_kv(&cache(element, 64), &rows(new, 64), 3));
        }
        for (q, dim, group, state) in [element, Element::F32]
            .into_iter()
            .flat_map(|q| (8..=512).step_by(8).map(move |dim| (q, dim)))
            .flat_map(|(q, dim)| [4, 20].map(|group| (q, dim, group)))
            .flat_map(|(q, dim, group)| [false, true].map(|state| (q, dim, group, state)))
        {
            let k = cache(element, dim);
            let q = RowsView {
                heads: group * k.kv_heads,
                ..rows(q, dim)
            };
            let batch = Batch {
                seqs: 4,
                rows: 128,
                pages: 256,
                min_rows: 1,
                max_rows: 100,
                max_len: 1000,
            };
            let scores = Scores {
                scale: 0.125,
                softcap: Some(30.0),
                mask: Mask::CausalWindow(100),
                slopes: true,
                sinks: !state,
            };
            plans.push(launch::attention(&q, &k, &k, &batch, &scores, state));
        }
    }
    plans.into_iter().flat_map(|plan| plan.launches).collect()
}

/// The parameter types of every entry point of a PTX text.
fn parameters(ptx: &str) -> BTreeMap<&str, Vec<&str>> {
    let mut entries = BTreeMap::new();
    for entry in ptx.split(".entry ").skip(1) {
        let (name, rest) = entry.split_once('(').unwrap();
        let (list, _) = rest.split_once(')').unwrap();
        let types = list
            .split(',')
            .filter_map(|parameter| parameter.trim().strip_prefix(".param "))
            .map(|parameter| parameter.split_whitespace().next().unwrap());
        entries.insert(name.trim(), types.collect());
    }
    entries
}

fn parameter(arg: &Arg) -> &'static str {
    match arg {
        Arg::Buffer(..) | Arg::Null | Arg::I64(_) => ".u64",
        Arg::U32(_) => ".u32",
        Arg::F32(_) => ".f32",
    }
}

#[test]
#[ignore = "needs nvcc: scripts/cuda_check.sh"]
fn arguments_are_the_parameters_of_the_compiled_kernels() {
    let path = std::env::var("CANDLE_PAGED_ATTN_PTX").expect("CANDLE_PAGED_ATTN_PTX names the PTX");
    let ptx = std::fs::read_to_string(path).unwrap();
    let compiled = parameters(&ptx);
    let named = launch::kernels();
    assert_eq!(
        compiled.keys().copied().collect::<BTreeSet<_>>(),
        named.iter().map(String::as_str).collect(),
        "entry points"
    );
    let launches = launches();
    for launch in &launches {
        let passed: Vec<_> = launch.args.iter().map(parameter).collect();
        assert_eq!(
            passed,
            compiled[launch.kernel.as_str()],
            "{}",
            launch.kernel
        );
    }
    let launched: BTreeSet<_> = launches.iter().map(|l| &l.kernel).collect();
    assert_eq!(launched, named.iter().collect(), "launched");
}

/// A launch has the same kinds of arguments whatever is on: an absent input is a null pointer
/// in its place, not a shorter list.
#[test]
fn absent_inputs_are_null_pointers() {
    let (q, k) = (rows(Element::F16, 64), cache(Element::F16, 64));
    let batch = |max_len| Batch {
        seqs: 1,
        rows: 1,
        pages: 64,
        min_rows: 1,
        max_rows: 1,
        max_len,
    };
    let scores = |given| Scores {
        scale: 1.0,
        softcap: None,
        mask: Mask::Causal,
        slopes: given,
        sinks: given,
    };
    let full = launch::attention(&q, &k, &k, &batch(1000), &scores(true), true);
    let bare = launch::attention(&q, &k, &k, &batch(100), &scores(false), false);
    let (full, bare) = (&full.launches[0], &bare.launches[0]);
    assert_eq!(full.kernel, bare.kernel);
    let kinds = |l: &Launch| l.args.iter().map(parameter).collect::<Vec<_>>();
    assert_eq!(kinds(full), kinds(bare));
    let nulls: Vec<_> = full
        .args
        .iter()
        .zip(&bare.args)
        .filter(|(_, bare)| **bare == Arg::Null)
        .map(|(full, _)| *full)
        .collect();
    let slot = |arg: &Arg| match arg {
        Arg::Buffer(slot, _) => Some(*slot),
        _ => None,
    };
    assert_eq!(
        nulls.iter().map(slot).collect::<Vec<_>>(),
        [
            Some(Slot::Out),
            Some(Slot::Workspace),
            Some(Slot::Workspace),
            Some(Slot::Slopes),
            Some(Slot::Sinks),
        ]
    );
}
