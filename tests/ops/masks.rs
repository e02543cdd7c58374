//! Windows, slopes, caps and sinks, and needles: one dominant key where a fault would miss it.

use candle_paged_attn::ops::{AttentionOptions, Mask};

use crate::common::paged::{Batch, Setup};

/// Distinct, none a multiple of another by the group size.
fn slopes(heads: usize) -> Vec<f32> {
    (0..heads).map(|h| 0.01 + 0.037 * h as f32).collect()
}

#[test]
fn every_rule_alone_and_all_together() {
    let seqs = [
        (1, 1),
        (37, 1),
        (70, 3),
        (90, 40),
        (33, 33),
        (700, 1),
        (5, 9),
    ];
    let setup = Setup::new(6, 2, 24, &seqs);
    let batch = setup.build();
    let plain = batch.options();
    let sinks: Vec<f32> = (0..6).map(|h| h as f32 - 2.0).collect();
    let together = plain
        .clone()
        .with_window(20)
        .with_softcap(4.0)
        .with_alibi_slopes(slopes(6))
        .with_sinks(sinks.clone());
    for (options, what) in [
        (plain.clone().with_window(20), "window"),
        (plain.clone().with_softcap(4.0), "softcap"),
        (plain.clone().with_alibi_slopes(slopes(6)), "slopes"),
        (plain.with_sinks(sinks), "sinks"),
        (together, "all"),
    ] {
        batch.check(&options, what);
    }
}

#[test]
fn c5_whole_pages_behind_the_window() {
    // Listed and hidden; then not listed, and poisoned.
    for released in [None, Some(2)] {
        let mut setup = Setup::new(2, 1, 8, &[(48, 1), (48, 3), (48, 40), (33, 1)]);
        setup.release_behind = released;
        let batch = setup.build();
        batch.check(&batch.options().with_window(2), "window of 2");
    }
}

#[test]
fn c6_windows_count_the_query_itself() {
    for window in 1..=5 {
        for block_size in [1, 4, 16] {
            let mut setup = Setup::new(2, 1, 8, &[(40, 40), (40, 1), (40, 7), (9, 1), (2, 1)]);
            setup.block_size = block_size;
            setup.release_behind = Some(window);
            let batch = setup.build();
            let options = batch.options().with_window(window);
            batch.check(
                &options,
                &format!("window {window}, blocks of {block_size}"),
            );
        }
    }
}

#[test]
fn windows_at_the_edges_of_tiles_and_chunks() {
    for window in [15, 16, 17, 63, 64, 65, 255, 256, 257, 511, 513] {
        let mut setup = Setup::new(2, 1, 8, &[(1100, 1), (1100, 70), (600, 600)]);
        setup.release_behind = Some(window);
        let batch = setup.build();
        let options = batch.options().with_window(window);
        batch.check(&options, &format!("window {window}"));
    }
}

#[test]
fn c7_a_slope_per_query_head() {
    let batch = Setup::new(4, 2, 16, &[(60, 1), (60, 50)]).build();
    batch.check(&batch.options().with_alibi_slopes(slopes(4)), "slopes");
}

/// Without causality every row sees every key, however many rows there are; rules that go by
/// positions still do.
#[test]
fn the_full_mask_shows_every_key_to_every_row() {
    let seqs = [
        (1, 5),
        (0, 3),
        (40, 1),
        (40, 3),
        (300, 20),
        (300, 200),
        (16, 64),
    ];
    let batch = Setup::new(6, 2, 32, &seqs).build();
    let full = batch.options().with_mask(Mask::Full);
    batch.check(&full, "full");
    batch.check(&full.clone().with_alibi_slopes(slopes(6)), "slopes");
    let all = full.with_softcap(4.0).with_alibi_slopes(slopes(6));
    let sinks: Vec<f32> = (0..6).map(|h| h as f32 - 2.0).collect();
    batch.check(&all.with_sinks(sinks), "all rules");
}

/// A key that takes nearly all of the weight, at each place where an off-by-one would lose or
/// gain it. Its value is unlike all others, so that the answer says whether it was seen.
#[test]
fn needles_at_every_edge() {
    const LEN: usize = 300;
    const WINDOW: usize = 70;
    let places = [
        0, 1, 15, 16, 17, 31, 32, 63, 64, 65, 127, 128, 191, 192, 228, 229, 230, 231, 255, 256,
        257, 298, 299,
    ];
    for rows in [1, 2, 40] {
        for &place in &places {
            let setup = Setup::new(2, 1, 8, &[(LEN, rows)]);
            let mut seq = setup.build().seqs.remove(0);
            seq.q.fill(1.0);
            seq.k.iter_mut().for_each(|x| *x *= 0.1);
            seq.k[place * 8..][..8].fill(8.0);
            seq.v[place * 8..][..8].fill(50.0);
            let batch = Batch::place(&setup, vec![seq], place as u64);
            for options in [
                batch.options(),
                batch.options().with_window(WINDOW),
                batch.options().with_sinks(vec![0.5, 1.0]),
            ] {
                let what = format!("needle at {place}, {rows} rows");
                let answer = batch.check(&options, &what);
                let last = answer.top[answer.top.len() - 1];
                let seen = options.mask == batch.options().mask || place + WINDOW >= LEN;
                assert_eq!(last > 0.99, seen, "{what}: weight {last}");
            }
        }
    }
}

#[test]
fn a_table_for_a_smaller_window_is_refused() {
    let mut setup = Setup::new(2, 1, 8, &[(100, 1)]);
    setup.release_behind = Some(16);
    let batch = setup.build();
    for options in [batch.options(), batch.options().with_window(40)] {
        let options: AttentionOptions = options;
        let error = candle_paged_attn::ops::paged_attention(
            &batch.q,
            &batch.k_cache,
            &batch.v_cache,
            &batch.table,
            &options,
        )
        .unwrap_err();
        assert!(
            error
                .to_string()
                .contains("every page that the mask can see")
        );
    }
}
