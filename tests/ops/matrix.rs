//! Shapes: every grouping, dimension, block size and dtype against the reference.

use candle_core::DType;

use crate::common::paged::{Setup, close, floats, tensor};
use crate::common::shapes::{BLOCK_SIZES, DIMS, DTYPES, MIX};

fn check(case: usize, group: usize, dim: usize, block_size: usize, types: (DType, DType)) {
    let kv_heads = 1 + case % 3;
    let mut setup = Setup::new(group * kv_heads, kv_heads, dim, MIX);
    if case % 4 == 3 {
        setup.dims.v_dim = DIMS[case % DIMS.len()];
    }
    setup.block_size = block_size;
    (setup.q_dtype, setup.cache_dtype) = types;
    setup.seed = case as u64;
    let batch = setup.build();
    let what = format!(
        "case {case}: {group} x {kv_heads} heads, dims {dim}/{}, blocks of {block_size}, {types:?}",
        setup.dims.v_dim
    );
    let answer = batch.check(&batch.options(), &what);
    let sharp = answer.top.iter().filter(|&&top| top > 0.5).count();
    assert!(
        sharp * 3 > answer.top.len(),
        "{what}: the data must make a lost key visible"
    );
}

#[test]
fn c11_every_grouping() {
    for (case, group) in (1..=16).chain([32]).enumerate() {
        check(
            case,
            group,
            [64, 8, 40, 128][case % 4],
            BLOCK_SIZES[case % BLOCK_SIZES.len()],
            DTYPES[case % DTYPES.len()],
        );
    }
}

#[test]
fn c11_every_dim_in_every_dtype() {
    for (i, &dim) in DIMS.iter().enumerate() {
        for (j, &types) in DTYPES.iter().enumerate() {
            let case = i * DTYPES.len() + j;
            let block_size = BLOCK_SIZES[(i + j) % BLOCK_SIZES.len()];
            check(case, [1, 3, 4, 2][case % 4], dim, block_size, types);
        }
    }
}

#[test]
fn c11_every_block_size_in_every_dtype() {
    for (i, &block_size) in BLOCK_SIZES.iter().enumerate() {
        for (j, &types) in DTYPES.iter().enumerate() {
            check(i * DTYPES.len() + j, 4, 64, block_size, types);
        }
    }
}

#[test]
fn long_contexts_in_many_chunks() {
    let mut setup = Setup::new(6, 2, 64, &[(2500, 1), (2111, 4), (3000, 70), (2600, 16)]);
    for types in DTYPES {
        (setup.q_dtype, setup.cache_dtype) = types;
        let batch = setup.build();
        batch.check(&batch.options(), &format!("{types:?}"));
    }
}

#[test]
fn long_prompts_in_many_tiles() {
    let mut setup = Setup::new(4, 2, 32, &[(700, 700), (900, 500), (300, 300)]);
    setup.block_size = 32;
    let batch = setup.build();
    batch.check(&batch.options(), "prompts");
}

#[test]
fn decode_row_equals_prefill_row() {
    let setup = Setup::new(6, 2, 64, &[(333, 333)]);
    let whole = setup.build();
    let options = whole.options();
    let rows = floats(&whole.attention(&options));
    let row_len = 6 * 64;
    for len in [1, 2, 15, 16, 17, 100, 256, 257, 333] {
        let seq = &whole.seqs[0];
        let mut one = seq.clone();
        one.shape.len = len;
        one.shape.rows = 1;
        one.q = seq.q[(len - 1) * row_len..][..row_len].to_vec();
        one.k = seq.k[..len * 2 * 64].to_vec();
        one.v = seq.v[..len * 2 * 64].to_vec();
        let decode = crate::common::paged::Batch::place(&setup, vec![one], 9);
        let want = &rows[(len - 1) * row_len..][..row_len];
        close(
            &decode.attention(&options),
            want,
            64,
            1e-5,
            &format!("length {len}"),
        );
    }
}

/// Every number of rows from the streaming kernel to several blocks of the matrix kernel, their
/// contexts around the edges of its tiles.
#[test]
fn every_number_of_rows() {
    let seqs: Vec<_> = (1..=60).map(|rows| (rows + 100 + rows % 7, rows)).collect();
    for (heads, kv_heads, dims) in [(6, 2, (24, 40)), (5, 1, (8, 8)), (2, 2, (72, 24))] {
        for types in DTYPES {
            let mut setup = Setup::new(heads, kv_heads, dims.0, &seqs);
            setup.dims.v_dim = dims.1;
            (setup.q_dtype, setup.cache_dtype) = types;
            let batch = setup.build();
            let what = format!("{heads}/{kv_heads} heads, dims {dims:?}, {types:?}");
            batch.check(&batch.options(), &what);
            batch.check(&batch.options().with_window(29), &what);
        }
    }
}

/// Chunks of a prompt give the rows of the whole prompt.
#[test]
fn chunks_equal_the_whole() {
    let setup = Setup::new(6, 2, 64, &[(200, 200)]);
    let whole = setup.build();
    let options = whole.options();
    let rows = floats(&whole.attention(&options));
    for chunk in [1, 7, 64, 100] {
        for start in (0..200).step_by(chunk) {
            let end = (start + chunk).min(200);
            let mut part = whole.seqs[0].clone();
            (part.shape.len, part.shape.rows) = (end, end - start);
            part.q = part.q[start * 6 * 64..end * 6 * 64].to_vec();
            part.k.truncate(end * 2 * 64);
            part.v.truncate(end * 2 * 64);
            let part = crate::common::paged::Batch::place(&setup, vec![part], start as u64);
            let want = &rows[start * 6 * 64..end * 6 * 64];
            close(
                &part.attention(&options),
                want,
                64,
                1e-5,
                &format!("{start}..{end}"),
            );
        }
    }
}

#[test]
fn c9_a_context_of_65537_tokens() {
    const LEN: usize = 65_537;
    let mut setup = Setup::new(1, 1, 8, &[(LEN, 1)]);
    setup.block_size = 256;
    for rows in [1, 40] {
        setup.seqs[0].rows = rows;
        for ramp in [false, true] {
            let mut seq = crate::common::paged::Dense {
                shape: setup.seqs[0],
                q: vec![1.0; rows * 8],
                k: vec![0.0; LEN * 8],
                v: vec![1.0; LEN * 8],
            };
            if ramp {
                for (t, row) in seq.v.chunks_mut(8).enumerate() {
                    row.fill(t as f64);
                }
            }
            let batch = crate::common::paged::Batch::place(&setup, vec![seq], 3);
            let out = floats(&batch.attention(&batch.options()));
            let portable = candle_paged_attn::ops::portable::paged_attention(
                &batch.q,
                &batch.k_cache,
                &batch.v_cache,
                &batch.table,
                &batch.options(),
            )
            .unwrap();
            for out in [out, floats(&portable)] {
                let last = &out[(rows - 1) * 8..];
                let (want, tolerance) = if ramp { (32_768.0, 1e-4) } else { (1.0, 1e-6) };
                for x in last {
                    assert!((x / want - 1.0).abs() < tolerance, "got {x}, want {want}");
                }
            }
        }
    }
}

/// Queries as views: of a fused qkv, transposed, and with scattered heads.
#[test]
fn c10_strided_queries() {
    for rows in [3, 60] {
        let setup = Setup::new(4, 2, 16, &[(80, rows)]);
        let batch = setup.build();
        let options = batch.options();
        let plain = floats(&batch.attention(&options));
        let q = &batch.q;
        let fused = candle_core::Tensor::cat(
            &[
                &tensor(&vec![f64::NAN; rows * 32], &[rows, 32], DType::F32),
                &q.reshape((rows, 64)).unwrap(),
                &tensor(&vec![f64::NAN; rows * 8], &[rows, 8], DType::F32),
            ],
            1,
        )
        .unwrap();
        let slice = fused
            .narrow(1, 32, 64)
            .unwrap()
            .reshape((rows, 4, 16))
            .unwrap();
        let heads_first = q
            .transpose(0, 1)
            .unwrap()
            .contiguous()
            .unwrap()
            .transpose(0, 1)
            .unwrap();
        let dims_first = q
            .transpose(1, 2)
            .unwrap()
            .contiguous()
            .unwrap()
            .transpose(1, 2)
            .unwrap();
        for view in [slice, heads_first, dims_first] {
            let out = candle_paged_attn::ops::paged_attention(
                &view,
                &batch.k_cache,
                &batch.v_cache,
                &batch.table,
                &options,
            )
            .unwrap();
            assert_eq!(floats(&out), plain);
        }
    }
}

/// Cache tensors as views with a larger block stride and a start offset: K and V of two
/// layers interleaved in one allocation.
#[test]
fn c10_interleaved_caches() {
    for rows in [1, 60] {
        let setup = Setup::new(4, 2, 16, &[(80, rows), (50, rows.min(50))]);
        let batch = setup.build();
        let options = batch.options();
        let poison = batch
            .k_cache
            .ones_like()
            .unwrap()
            .affine(0.0, f64::NAN)
            .unwrap();
        let all =
            candle_core::Tensor::stack(&[&poison, &batch.k_cache, &batch.v_cache, &poison], 1)
                .unwrap();
        let view = |i: usize| all.narrow(1, i, 1).unwrap().squeeze(1).unwrap();
        let (k, v) = (view(1), view(2));
        assert!(!k.is_contiguous());
        let out = candle_paged_attn::ops::paged_attention(&batch.q, &k, &v, &batch.table, &options)
            .unwrap();
        assert_eq!(floats(&out), floats(&batch.attention(&options)));
    }
}
