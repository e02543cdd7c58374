//! Cascade: prefixes that sequences share are read once, and nothing else changes.

use std::sync::Arc;

use candle_core::{DType, Tensor};
use candle_paged_attn::Error;
use candle_paged_attn::ops::{
    AttentionOptions, Cascade, Mask, PageTable, cascade_attention, paged_attention, portable,
};

use crate::common::Rng;
use crate::common::paged::{Batch, Setup, bits, close, tolerance};
use crate::common::sharing::{Sharing, behind_one_prompt, build, one, rows_of};

/// Kernel and portable cascade against the f64 reference. Answers the cascade.
fn check(batch: &Batch, options: &AttentionOptions, what: &str) -> Cascade {
    let mut cascade = Cascade::default();
    assert!(
        cascade.find(&batch.table, options.mask, 0).unwrap(),
        "{what}"
    );
    let want = batch.reference(options);
    for (op, who) in [
        (cascade_attention as Op, "kernels"),
        (portable::cascade_attention as Op, "portable"),
    ] {
        let got = op(&batch.q, &batch.k_cache, &batch.v_cache, &cascade, options).unwrap();
        assert_eq!(got.dtype(), batch.q.dtype());
        let off = tolerance(batch.setup.q_dtype);
        let what = format!("{what}, {who}");
        close(&got, &want.out, batch.setup.dims.v_dim, off, &what);
    }
    cascade
}

type Op =
    fn(&Tensor, &Tensor, &Tensor, &Cascade, &AttentionOptions) -> candle_paged_attn::Result<Tensor>;

/// What a batch would have to be like for each option, in turn.
fn variants(batch: &Batch) -> Vec<(&'static str, AttentionOptions)> {
    let heads = batch.setup.dims.heads;
    let per_head = |f: fn(usize) -> f32| -> Arc<[f32]> { (0..heads).map(f).collect() };
    let slopes = per_head(|h| 0.5f32.powi(1 + h as i32 % 8));
    let sinks = per_head(|h| [0.3, f32::NEG_INFINITY, 4.0, -1.0][h % 4]);
    let plain = batch.options();
    vec![
        ("plain", plain.clone()),
        ("softcap", plain.clone().with_softcap(3.0)),
        ("ALiBi", plain.clone().with_alibi_slopes(slopes.clone())),
        ("sinks", plain.clone().with_sinks(sinks.clone())),
        ("wide window", plain.clone().with_window(4096)),
        (
            "all",
            plain
                .with_softcap(5.0)
                .with_alibi_slopes(slopes)
                .with_sinks(sinks)
                .with_window(1000),
        ),
    ]
}

#[test]
fn many_behind_one_prompt_in_every_dtype_and_geometry() {
    let lens = [161, 190, 160, 176, 163];
    for (heads, kv_heads, k_dim, v_dim) in [
        (6, 2, 64, 64),
        (4, 4, 40, 40),
        (7, 1, 128, 128),
        (16, 1, 80, 80),
        (9, 3, 64, 32),
        (40, 8, 24, 8),
    ] {
        for (cache, q) in [
            (DType::F32, DType::F32),
            (DType::F16, DType::F16),
            (DType::BF16, DType::BF16),
            (DType::F16, DType::F32),
        ] {
            let mut setup = Setup::new(heads, kv_heads, k_dim, &[]);
            setup.dims.v_dim = v_dim;
            (setup.cache_dtype, setup.q_dtype) = (cache, q);
            let batch = build(&setup, &behind_one_prompt(&lens, 9));
            for (what, options) in variants(&batch) {
                let what = format!("{heads}/{kv_heads} x {k_dim}/{v_dim}, {cache:?}, {what}");
                let cascade = check(&batch, &options, &what);
                assert_eq!(cascade.tokens_saved(), 4 * 9 * 16);
                assert_eq!(cascade.prefixes().collect::<Vec<_>>(), [(144, 5)]);
            }
        }
    }
}

/// The prefix ends where a block does, before the first query: a sequence of 161 tokens reads
/// ten blocks with others, one of 160 nine, because its query stands in the tenth.
#[test]
fn a_prefix_ends_with_the_last_block_before_the_first_query() {
    let setup = Setup::new(4, 2, 32, &[]);
    let of = |lens: &[usize], shared: usize| {
        let batch = build(&setup, &behind_one_prompt(lens, shared));
        let cascade = check(&batch, &batch.options(), "edge");
        cascade.prefixes().collect::<Vec<_>>()
    };
    assert_eq!(of(&[200, 161, 177], 10), [(160, 3)]);
    assert_eq!(of(&[200, 160], 10), [(144, 2)]);
    assert_eq!(of(&[200, 162, 163], 10), [(160, 3)]);
    assert_eq!(of(&[17, 17], 1), [(16, 2)]);
    let none = |lens: &[usize], shared| {
        let batch = build(&setup, &behind_one_prompt(lens, shared));
        let mut cascade = Cascade::default();
        assert!(!cascade.find(&batch.table, Mask::Causal, 0).unwrap());
        assert_eq!(cascade.tokens_saved(), 0);
        let options = batch.options();
        let refused =
            cascade_attention(&batch.q, &batch.k_cache, &batch.v_cache, &cascade, &options);
        assert!(matches!(
            refused,
            Err(Error::Shape { .. } | Error::InvalidArgument { .. })
        ));
    };
    none(&[16, 16], 1);
    none(&[40, 50], 0);
    none(&[100], 0);
}

/// Where prefixes are nested, the choice saves the most tokens (counted by hand).
#[test]
fn nested_prefixes_are_chosen_by_what_they_save() {
    let setup = Setup::new(2, 1, 16, &[]);
    let prefixes = |sharing: &[Sharing]| {
        let batch = build(&setup, sharing);
        let cascade = check(&batch, &batch.options(), "nested");
        let mut prefixes: Vec<_> = cascade.prefixes().collect();
        prefixes.sort_unstable();
        (cascade.tokens_saved(), prefixes)
    };
    // 2 blocks behind 4 sequences; two pairs among them share 12: 2 * 12 > 3 * 2.
    let pairs = [
        one(200, 1, 0, 0),
        one(210, 1, 0, 12),
        one(220, 1, 0, 2),
        one(230, 1, 2, 12),
    ];
    assert_eq!(prefixes(&pairs), (24 * 16, vec![(192, 2), (192, 2)]));
    // 10 blocks behind 4; one pair shares a further one: 3 * 10 > 11.
    let all = [
        one(200, 1, 0, 0),
        one(210, 1, 0, 11),
        one(220, 1, 0, 10),
        one(230, 1, 0, 10),
    ];
    assert_eq!(prefixes(&all), (30 * 16, vec![(160, 4)]));
    // A pair that shares 12 blocks stays a pair, two others take the 2 of all of them.
    let mixed = [
        one(200, 1, 0, 0),
        one(210, 1, 0, 12),
        one(220, 1, 0, 2),
        one(230, 1, 0, 2),
        one(240, 1, 0, 2),
    ];
    assert_eq!(prefixes(&mixed), (16 * 16, vec![(32, 3), (192, 2)]));
}

/// Each of 2,000 contexts is a block longer than the one before it. If nothing better is found
/// the 1,937 that have 64 blocks share these.
#[test]
fn a_long_chain_of_prefixes_needs_little_stack() {
    let chain = || {
        let pages: Vec<u32> = (0..2_001).collect();
        let mut table = PageTable::new(16).unwrap();
        for len in 1..=2_000 {
            let tokens = len * 16 + 1;
            table.push(&pages[..len + 1], 0, tokens, &[-1]).unwrap();
        }
        let mut cascade = Cascade::default();
        assert!(cascade.find(&table, Mask::Causal, 0).unwrap());
        cascade.tokens_saved()
    };
    let thread = std::thread::Builder::new().stack_size(256 << 10);
    assert!(thread.spawn(chain).unwrap().join().unwrap() >= 1_936 * 64 * 16);
}

/// What each row has to save, in a table that was counted by hand: sequences as (tokens, rows,
/// with, shared blocks), and the prefixes as (tokens, rows).
#[test]
fn a_prefix_is_read_once_where_that_saves_more_than_its_rows_pay() {
    type Case<'a> = (&'a str, Vec<Sharing>, &'a [(usize, usize)]);
    let decode = |n: usize, blocks: usize| behind_one_prompt(&vec![600; n], blocks);
    let cases: [Case<'_>; 11] = [
        ("one block behind two", decode(2, 1), &[]),
        ("256 * 1 = 128 * 2", decode(2, 16), &[]),
        ("272 * 1 > 128 * 2", decode(2, 17), &[(272, 2)]),
        ("192 * 2 = 128 * 3", decode(3, 12), &[]),
        ("208 * 2 > 128 * 3", decode(3, 13), &[(208, 3)]),
        ("128 * 15 < 128 * 16", decode(16, 8), &[]),
        ("144 * 15 > 128 * 16", decode(16, 9), &[(144, 16)]),
        (
            "512 tokens are less than the 8 rows of a chunk pay: the others share",
            vec![one(600, 8, 0, 0), one(600, 1, 0, 32), one(600, 1, 0, 32)],
            &[(512, 2)],
        ),
        (
            "a system prompt of 512, a document of 512 more for each of two pairs: \
             2 * (1024 - 256) > 3 * 512 - 512",
            vec![
                one(1100, 1, 0, 0),
                one(1100, 1, 0, 64),
                one(1100, 1, 0, 32),
                one(1100, 1, 2, 64),
            ],
            &[(1024, 2), (1024, 2)],
        ),
        (
            "64 more for two of four: (576 - 256) + (512 - 256) < 3 * 512 - 512",
            vec![
                one(600, 1, 0, 0),
                one(600, 1, 0, 36),
                one(600, 1, 0, 32),
                one(600, 1, 0, 32),
            ],
            &[(512, 4)],
        ),
        (
            "2,048 more for two of five; 2 * 512 > 128 * 3 for the others",
            vec![
                one(2600, 1, 0, 0),
                one(2600, 1, 0, 160),
                one(600, 1, 0, 32),
                one(600, 1, 0, 32),
                one(600, 1, 0, 32),
            ],
            &[(512, 3), (2560, 2)],
        ),
    ];
    let setup = Setup::new(2, 1, 8, &[]);
    for (what, sharing, want) in cases {
        let batch = build(&setup, &sharing);
        let mut cascade = Cascade::default();
        let found = cascade.find(&batch.table, Mask::Causal, 128).unwrap();
        let mut prefixes: Vec<_> = cascade.prefixes().collect();
        prefixes.sort_unstable();
        assert_eq!(
            (found, prefixes.as_slice()),
            (!want.is_empty(), want),
            "{what}"
        );
        let saved = want.iter().map(|(tokens, rows)| tokens * (rows - 1));
        assert_eq!(cascade.tokens_saved(), saved.sum::<usize>(), "{what}");
        if found {
            let options = batch.options();
            let got =
                cascade_attention(&batch.q, &batch.k_cache, &batch.v_cache, &cascade, &options);
            close(&got.unwrap(), &batch.reference(&options).out, 8, 1e-5, what);
        }
        // A price that nothing is worth.
        assert!(
            !cascade
                .find(&batch.table, Mask::Causal, usize::MAX)
                .unwrap()
        );
    }
}

/// Prompts that wait, chunks, verification rows and decodes; several prefixes, in an order that
/// mixes them; sequences that share nothing.
#[test]
fn random_batches_agree_with_the_reference() {
    let mut rng = Rng(11);
    let mut found = 0;
    for case in 0..60 {
        let (heads, kv_heads) = [(4, 2), (6, 2), (3, 3), (8, 1), (71, 1)][rng.below(5)];
        let mut setup = Setup::new(heads, kv_heads, 8 * (1 + rng.below(8)), &[]);
        setup.block_size = [1, 4, 16, 32][rng.below(4)];
        setup.seed = 100 + case;
        let dtype = [DType::F32, DType::F16, DType::BF16][rng.below(3)];
        (setup.cache_dtype, setup.q_dtype) = (dtype, dtype);
        let bs = setup.block_size;
        let mut sharing: Vec<Sharing> = Vec::new();
        for i in 0..2 + rng.below(9) {
            let len = 1 + rng.below(12 * bs);
            let rows = [1, 1, 1, 1 + rng.below(5), 1 + rng.below(40)][rng.below(5)].min(len);
            let with = rng.below(i + 1);
            let other = sharing.get(with).map_or(0, |s| s.shape.len);
            let most = (len - 1).min(other) / bs;
            let shared = rng.below(most + 1).max(most.min(rng.below(3)));
            sharing.push(one(len, rows, with, shared));
        }
        let batch = build(&setup, &sharing);
        for (what, options) in variants(&batch) {
            let mut cascade = Cascade::default();
            if cascade.find(&batch.table, options.mask, 0).unwrap() {
                found += 1;
                check(&batch, &options, &format!("case {case}, {what}"));
            }
        }
    }
    assert!(found > 200, "{found} cascades are too few to say anything");
}

/// A window narrower than a context: that sequence sees less than the prefix and stays alone.
#[test]
fn a_sequence_whose_window_hides_part_of_the_prefix_stays_alone() {
    let setup = Setup::new(4, 2, 32, &[]);
    let batch = build(&setup, &behind_one_prompt(&[100, 120, 121, 90], 5));
    let options = batch.options().with_window(120);
    let cascade = check(&batch, &options, "window");
    assert_eq!(cascade.prefixes().collect::<Vec<_>>(), [(80, 3)]);
    let refused = cascade_attention(
        &batch.q,
        &batch.k_cache,
        &batch.v_cache,
        &cascade,
        &batch.options(),
    );
    assert!(matches!(refused, Err(Error::InvalidArgument { .. })));
}

/// Who shares nothing gets the bits of the op without a cascade, with sinks and 16 bits too.
#[test]
fn rows_outside_a_cascade_keep_their_bits() {
    for dtype in [DType::F32, DType::F16] {
        let mut setup = Setup::new(6, 2, 64, &[]);
        (setup.cache_dtype, setup.q_dtype) = (dtype, dtype);
        let sharing = [
            one(90, 1, 0, 0),
            one(300, 1, 1, 0),
            one(95, 2, 0, 5),
            one(150, 40, 3, 0),
        ];
        let batch = build(&setup, &sharing);
        for (what, options) in variants(&batch) {
            let cascade = check(&batch, &options, what);
            let args = (&batch.q, &batch.k_cache, &batch.v_cache);
            let plain = paged_attention(args.0, args.1, args.2, &batch.table, &options).unwrap();
            let got = cascade_attention(args.0, args.1, args.2, &cascade, &options).unwrap();
            for seq in [1, 3] {
                let rows = rows_of(&batch.table, seq);
                let of = |x: &Tensor| bits(&x.narrow(0, rows.start, rows.len()).unwrap());
                assert_eq!(of(&got), of(&plain), "{what}, sequence {seq}");
            }
        }
    }
}
