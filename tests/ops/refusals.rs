//! c12: arguments that do not fit, each a typed error that names what was given.

use candle_core::{DType, Tensor};
use candle_paged_attn::ops::{
    AttentionOptions, AttnState, PageTable, copy_blocks, gather_kv, merge_states, paged_attention,
    paged_attention_state, portable, write_kv,
};
use candle_paged_attn::{Error, Result};

use crate::common::device;
use crate::common::paged::bits;

fn zeros(dims: &[usize], dtype: DType) -> Tensor {
    Tensor::zeros(dims, dtype, device()).unwrap()
}

fn table() -> PageTable {
    let mut table = PageTable::new(4).unwrap();
    table.push(&[1, 2], 0, 6, &[8, 9]).unwrap();
    table
}

struct Args {
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    table: PageTable,
    options: AttentionOptions,
}

fn good() -> Args {
    Args {
        q: zeros(&[2, 4, 8], DType::F32),
        k_cache: zeros(&[3, 4, 2, 8], DType::F32),
        v_cache: zeros(&[3, 4, 2, 16], DType::F32),
        k: zeros(&[2, 2, 8], DType::F32),
        v: zeros(&[2, 2, 16], DType::F32),
        table: table(),
        options: AttentionOptions::new(1.0),
    }
}

impl Args {
    /// Every attention and write op that takes these arguments.
    fn errors(&self) -> Vec<Error> {
        let a = (
            &self.q,
            &self.k_cache,
            &self.v_cache,
            &self.table,
            &self.options,
        );
        let w = (&self.k_cache, &self.v_cache, &self.k, &self.v, &self.table);
        let results: [Result<()>; 6] = [
            paged_attention(a.0, a.1, a.2, a.3, a.4).map(drop),
            paged_attention_state(a.0, a.1, a.2, a.3, a.4).map(drop),
            portable::paged_attention(a.0, a.1, a.2, a.3, a.4).map(drop),
            portable::paged_attention_state(a.0, a.1, a.2, a.3, a.4).map(drop),
            write_kv(w.0, w.1, w.2, w.3, w.4),
            portable::write_kv(w.0, w.1, w.2, w.3, w.4),
        ];
        results.into_iter().filter_map(Result::err).collect()
    }
}

/// `count` of the six ops must refuse, each with a message that contains all of `parts`.
#[track_caller]
fn refused(count: usize, parts: &[&str], change: impl FnOnce(&mut Args)) {
    let mut args = good();
    change(&mut args);
    let before = (bits(&args.k_cache), bits(&args.v_cache));
    let errors = args.errors();
    assert_eq!(errors.len(), count, "{errors:?}");
    for error in errors {
        assert!(!matches!(error, Error::Candle(_)), "untyped: {error}");
        let text = error.to_string();
        for part in parts {
            assert!(text.contains(part), "{text:?} lacks {part:?}");
        }
    }
    assert!((bits(&args.k_cache), bits(&args.v_cache)) == before);
}

#[test]
fn good_arguments_pass() {
    assert_eq!(good().errors().len(), 0);
}

#[test]
fn c12_heads() {
    refused(4, &["query heads", "2 KV heads", "got 3"], |a| {
        a.q = zeros(&[2, 3, 8], DType::F32);
    });
    refused(4, &["query heads", "got 0"], |a| {
        a.q = zeros(&[2, 0, 8], DType::F32)
    });
}

#[test]
fn c12_dtypes() {
    refused(6, &["dtype of v_cache", "F32", "F16"], |a| {
        a.v_cache = zeros(&[3, 4, 2, 16], DType::F16);
    });
    refused(6, &["dtype of k_cache", "U32"], |a| {
        a.k_cache = zeros(&[3, 4, 2, 8], DType::U32);
    });
    refused(4, &["dtype of q", "F16"], |a| {
        a.q = zeros(&[2, 4, 8], DType::F16)
    });
    refused(4, &["dtype of q", "F64"], |a| {
        a.q = zeros(&[2, 4, 8], DType::F64)
    });
    refused(2, &["dtype of v", "I64"], |a| {
        a.v = zeros(&[2, 2, 16], DType::I64)
    });
}

#[test]
fn c12_ranks_and_shapes() {
    refused(4, &["shape of q", "[2, heads, 8]", "[2, 32]"], |a| {
        a.q = zeros(&[2, 32], DType::F32);
    });
    refused(4, &["shape of q", "[3, 4, 8]"], |a| {
        a.q = zeros(&[3, 4, 8], DType::F32)
    });
    refused(4, &["shape of q", "[2, 4, 16]"], |a| {
        a.q = zeros(&[2, 4, 16], DType::F32)
    });
    refused(6, &["k_cache", "num_blocks", "[12, 2, 8]"], |a| {
        a.k_cache = zeros(&[12, 2, 8], DType::F32);
    });
    refused(6, &["v_cache", "[4, 4, 2, 16]"], |a| {
        a.v_cache = zeros(&[4, 4, 2, 16], DType::F32);
    });
    refused(2, &["shape of k", "[2, 2, 8]", "[2, 2, 16]"], |a| {
        a.k = zeros(&[2, 2, 16], DType::F32);
    });
    refused(2, &["shape of v", "[2, 2, 16]", "[3, 2, 16]"], |a| {
        a.v = zeros(&[3, 2, 16], DType::F32);
    });
    refused(2, &["shape of k", "[2, 16]"], |a| {
        a.k = zeros(&[2, 16], DType::F32)
    });
}

#[test]
fn c11_unsupported_dims_and_block_sizes() {
    for dim in [4, 12, 520] {
        refused(
            6,
            &["head dimension of v_cache", &format!("got {dim}")],
            |a| {
                a.v_cache = zeros(&[3, 4, 2, dim], DType::F32);
            },
        );
    }
    for size in [3, 512] {
        refused(6, &["block_size", &format!("got {size}")], |a| {
            a.k_cache = zeros(&[3, size, 2, 8], DType::F32);
        });
    }
    refused(6, &["kv_heads", "got 0"], |a| {
        a.k_cache = zeros(&[3, 4, 0, 8], DType::F32)
    });
}

#[test]
fn c12_tables_that_do_not_fit() {
    refused(6, &["block size", "8 for a cache with blocks of 4"], |a| {
        a.table = PageTable::new(8).unwrap();
        a.table.push(&[1], 0, 6, &[8, 9]).unwrap();
    });
    refused(6, &["page 3 in a cache of 3 blocks"], |a| {
        a.table = PageTable::new(4).unwrap();
        a.table.push(&[1, 3], 0, 6, &[8, 9]).unwrap();
    });
    refused(2, &["slot 12 in a cache of 12 rows"], |a| {
        a.table = PageTable::new(4).unwrap();
        a.table.push(&[1, 2], 0, 6, &[8, 12]).unwrap();
    });
}

#[test]
fn caches_of_scattered_rows() {
    refused(6, &["strides of k_cache"], |a| {
        a.k_cache = zeros(&[3, 2, 4, 8], DType::F32).transpose(1, 2).unwrap();
    });
    refused(6, &["block stride of k_cache", "got 0"], |a| {
        a.k_cache = zeros(&[1, 4, 2, 8], DType::F32)
            .broadcast_as((3, 4, 2, 8))
            .unwrap();
    });
    // A larger block stride is fine for the kernels, not for the portable ops.
    refused(3, &["strides of k_cache", "contiguous"], |a| {
        a.k_cache = zeros(&[3, 2, 4, 2, 8], DType::F32)
            .narrow(1, 1, 1)
            .unwrap()
            .squeeze(1)
            .unwrap();
    });
}

#[test]
fn options_that_do_not_fit() {
    let set = |options: AttentionOptions| move |a: &mut Args| a.options = options;
    let plain = || AttentionOptions::new(1.0);
    refused(4, &["scale", "NaN"], set(AttentionOptions::new(f32::NAN)));
    refused(4, &["softcap", "got 0"], set(plain().with_softcap(0.0)));
    refused(4, &["softcap", "got -1"], set(plain().with_softcap(-1.0)));
    refused(4, &["window", "got 0"], set(plain().with_window(0)));
    refused(
        4,
        &["alibi_slopes", "4 query heads", "2 values"],
        set(plain().with_alibi_slopes(vec![0.5, 0.25])),
    );
    refused(
        4,
        &["alibi_slopes", "inf"],
        set(plain().with_alibi_slopes(vec![0.5, 0.25, f32::INFINITY, 0.1])),
    );
    refused(
        4,
        &["sinks", "5 values"],
        set(plain().with_sinks(vec![0.0; 5])),
    );
    refused(
        4,
        &["sinks", "NaN"],
        set(plain().with_sinks(vec![f32::NAN; 4])),
    );
    refused(
        4,
        &["sinks", "inf"],
        set(plain().with_sinks(vec![0.0, f32::NEG_INFINITY, f32::INFINITY, 0.0])),
    );
    // Only the states: sinks enter once, at the end.
    refused(
        2,
        &["paged_attention_state: sinks"],
        set(plain().with_sinks(vec![0.0; 4])),
    );
}

#[test]
fn other_ops() {
    let cache = || zeros(&[3, 4, 2, 8], DType::F32);
    for copy in [copy_blocks, portable::copy_blocks] {
        for (pairs, part) in [
            (&[(0, 3)][..], "(0, 3)"),
            (&[(7, 0)][..], "(7, 0)"),
            (&[(0, 2), (1, 2)][..], "block 2 twice"),
        ] {
            let text = copy(&[&cache()], pairs).unwrap_err().to_string();
            assert!(text.contains(part), "{text}");
        }
        assert!(copy(&[&zeros(&[3, 4], DType::F32)], &[]).is_err());
    }
    for gather in [gather_kv, portable::gather_kv] {
        let text = gather(&cache(), &cache(), &table(), 1)
            .unwrap_err()
            .to_string();
        assert!(text.contains("seq") && text.contains("got 1"), "{text}");
    }
    let state = |heads: usize, dtype: DType| AttnState {
        out: zeros(&[2, heads, 8], dtype),
        lse: zeros(&[2, heads], dtype),
    };
    let merge = |a, b| merge_states(&a, &b).unwrap_err();
    let error = merge(state(4, DType::F32), state(2, DType::F32));
    assert!(matches!(error, Error::Shape { .. }), "{error}");
    let error = merge(state(4, DType::F32), state(4, DType::F16));
    assert!(matches!(error, Error::Dtype { .. }), "{error}");
}
