//! The bookkeeping of the example `memory_report`: small traces counted by hand, and real ones
//! whose shares were computed independently, from the lengths alone.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../examples/memory_report/contiguous.rs"]
mod contiguous;
#[path = "../examples/memory_report/memory.rs"]
mod memory;
#[path = "../examples/memory_report/paged.rs"]
mod paged;
#[path = "../examples/memory_report/plot.rs"]
mod plot;
#[path = "../examples/memory_report/replay.rs"]
mod replay;
#[path = "../examples/memory_report/report.rs"]
mod report;
#[path = "../examples/memory_report/trace.rs"]
mod trace;

use std::path::Path;

use contiguous::{Contiguous, Reservation};
use paged::Paged;
use replay::{Shares, replay};
use report::{Policy, Report};
use trace::{Request, Trace};

/// Requests by their prompt and output tokens.
fn trace(lengths: &[(usize, usize)]) -> Trace {
    let request = |&(prompt, output): &(usize, usize)| Request {
        prompt,
        output,
        content: None,
    };
    Trace {
        name: "small".into(),
        requests: lengths.iter().map(request).collect(),
        tokens_per_id: 4,
    }
}

fn contiguous(trace: &Trace, rows: usize, reservation: Reservation) -> Shares {
    replay(trace, Contiguous::new(rows, reservation), || {})
}

fn paged(trace: &Trace, rows: usize, block_size: usize, sharing: Option<usize>) -> Shares {
    replay(trace, Paged::new(rows, block_size, sharing).unwrap(), || {})
}

/// Rows that hold tokens, are reserved, never filled and scattered, out of all.
fn assert_rows(shares: &Shares, [real, reserved, internal, external]: [u32; 4]) {
    let all = f64::from(real + reserved + internal + external);
    for (share, rows) in [
        (shares.utilization, real),
        (shares.reserved_waste, reserved),
        (shares.internal_waste, internal),
        (shares.external_waste, external),
    ] {
        assert!((share * all - f64::from(rows)).abs() < 1e-9, "{shares:?}");
    }
}

/// Requests of 3 + 2 and 5 + 1 tokens, side by side in 16 rows:
///
/// | tick | tokens | paged, 4 | reserved / never filled | max 6 | reserved / never filled |
/// |---|---|---|---|---|---|
/// | 0 | 3 + 5 | 4 + 8 | 1 + 1 / 2 | 12 | 2 + 1 / 1 |
/// | 1 | 4 + 6 | 4 + 8 | 0 / 2 | 12 | 1 / 1 |
/// | 2 | 5 | 8 | 0 / 3 | 6 | 0 / 1 |
#[test]
fn two_requests_counted_by_hand() {
    let two = trace(&[(3, 2), (5, 1)]);
    let shares = paged(&two, 16, 4, None);
    assert_rows(&shares, [23, 2, 7, 0]);
    assert_eq!((shares.ticks, shares.peak, shares.preemptions), (3, 2, 0));
    assert_rows(&contiguous(&two, 16, Reservation::Max(6)), [23, 4, 3, 0]);
    assert_rows(&contiguous(&two, 16, Reservation::Exact), [23, 4, 0, 0]);
    // 3 + 2 and 5 + 1 are powers of two already; 3 output tokens take 4 rows.
    assert_rows(
        &contiguous(&two, 16, Reservation::PowerOfTwo),
        [23, 4, 0, 0],
    );
    let three = trace(&[(2, 3)]);
    // 2, 3, 4, 5 tokens in 2 + 4 rows.
    assert_rows(
        &contiguous(&three, 16, Reservation::PowerOfTwo),
        [14, 6, 4, 0],
    );
}

/// 10 rows; 4, 5 and again 5 are wanted. When the first has gone, 4 + 1 rows are free but not
/// side by side, so the third waits for the second: three ticks with 5 scattered rows.
#[test]
fn holes_that_are_too_small_are_external_waste() {
    let shares = contiguous(&trace(&[(3, 1), (1, 4), (4, 1)]), 10, Reservation::Exact);
    assert_rows(&shares, [31, 12, 0, 15]);
    // Two run in two ticks, one in three; then nobody waits.
    assert!((shares.concurrent - 7.0 / 5.0).abs() < 1e-9);
    assert_eq!(shares.ticks, 7);
}

/// 3 blocks of 4; two requests of 4 + 4. In tick 1 both want a second block: the later one goes
/// back, and starts again with 5 tokens when the first is done. Each is counted with 4, 5, 6, 7
/// and 8 tokens, once.
#[test]
fn a_preempted_request_is_counted_once_at_each_length() {
    let shares = paged(&trace(&[(4, 4), (4, 4)]), 12, 4, None);
    // 8 rows in each of 9 ticks; reserved 3 + 2 + 1 in both second blocks.
    assert_rows(&shares, [60, 12, 0, 0]);
    assert_eq!((shares.ticks, shares.peak, shares.preemptions), (9, 2, 1));
}

/// Prompts of 8 equal but for the second half, in blocks of 4: 3 blocks for both, and 2 more for
/// the token that each generates.
#[test]
fn shared_blocks_count_once() {
    let mut two = trace(&[(8, 1), (8, 1)]);
    two.requests[0].content = Some(vec![7, 8]);
    two.requests[1].content = Some(vec![7, 9]);
    let shares = paged(&two, 32, 4, Some(4));
    // Tick 0: 12 rows, all full. Tick 1: 20 rows, 14 full.
    assert_rows(&shares, [26, 0, 6, 0]);
    assert!((shares.tokens_per_row - 34.0 / 32.0).abs() < 1e-9);
    assert!((shares.found - 4.0 / 16.0).abs() < 1e-9);
    // The same prompt again: all but the block with its last token is found.
    two.requests[1].content = Some(vec![7, 8]);
    assert!((paged(&two, 32, 4, Some(4)).found - 4.0 / 16.0).abs() < 1e-9);
    assert_eq!(paged(&two, 32, 4, None).found, 0.0);
}

fn row(report: &Report, policy: Policy, block_size: Option<usize>) -> &Shares {
    let mut rows = report.rows.iter();
    let row = rows.find(|row| row.policy == policy && row.block_size == block_size);
    &row.unwrap().shares
}

/// What was computed from the lengths of a trace alone.
struct Lengths {
    file: &'static str,
    requests: usize,
    longest: usize,
    /// By block size.
    paged: [(usize, f64); 6],
    /// Reserved to the maximum, power of two, exact.
    contiguous: [f64; 3],
}

#[test]
fn azure_conversations_have_the_shares_computed_from_their_lengths() {
    check_shares(&Lengths {
        file: "azure_conv.csv",
        requests: 19_366,
        longest: 14_089,
        paged: [
            (8, 0.9972),
            (16, 0.9939),
            (32, 0.9875),
            (64, 0.9750),
            (128, 0.9505),
            (256, 0.9078),
        ],
        contiguous: [0.0871, 0.8155, 0.8795],
    });
}

#[test]
fn azure_code_has_the_shares_computed_from_its_lengths() {
    check_shares(&Lengths {
        file: "azure_code.csv",
        requests: 8_819,
        longest: 7_841,
        paged: [
            (8, 0.9984),
            (16, 0.9965),
            (32, 0.9928),
            (64, 0.9853),
            (128, 0.9706),
            (256, 0.9411),
        ],
        contiguous: [0.2715, 0.9416, 0.9655],
    });
}

fn check_shares(lengths: &Lengths) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let trace = Trace::read(&path.join(lengths.file)).unwrap();
    let of_trace = (trace.requests.len(), trace.longest());
    assert_eq!(of_trace, (lengths.requests, lengths.longest));
    let report = report::report(&trace, None, || {}).unwrap();

    let near = |got: f64, expected: f64| {
        assert!((got - expected).abs() <= 0.00005 + 1e-9, "{got} {expected}");
    };
    for (size, expected) in lengths.paged {
        let shares = row(&report, Policy::Paged, Some(size));
        near(shares.utilization, expected);
        assert_eq!(shares.external_waste, 0.0);
    }
    // Those of the contiguous ones were computed without external fragmentation.
    let policies = [
        Policy::ReserveToMax,
        Policy::PowerOfTwo,
        Policy::ExactFirstFit,
    ];
    for (policy, expected) in policies.into_iter().zip(lengths.contiguous) {
        let shares = row(&report, policy, None);
        near(shares.utilization / (1.0 - shares.external_waste), expected);
        assert_eq!(shares.preemptions, 0);
    }
    // Memory for 16 at the maximum; the same for each.
    let at_once = |policy, size| row(&report, policy, size).concurrent;
    assert_eq!(report.memory_tokens, 16 * lengths.longest);
    assert_eq!(at_once(Policy::ReserveToMax, None), 16.0);
    assert!(at_once(Policy::Paged, Some(16)) > at_once(Policy::ExactFirstFit, None));

    for row in &report.rows {
        let shares = &row.shares;
        let sum = shares.utilization
            + shares.reserved_waste
            + shares.internal_waste
            + shares.external_waste;
        assert!((sum - 1.0).abs() < 1e-9, "{row:?}");
    }
}

#[test]
fn the_synthetic_trace_shows_sharing_in_every_output() {
    let mut trace = Trace::synthetic();
    assert_eq!(trace, Trace::synthetic());
    trace.truncate(400);
    let report = report::report(&trace, None, || {}).unwrap();
    assert_eq!(report.rows.len(), 3 + 7 + 7);
    for size in report::BLOCK_SIZES {
        let alone = row(&report, Policy::Paged, Some(size));
        let shared = row(&report, Policy::PagedPrefixSharing, Some(size));
        assert!(shared.concurrent > alone.concurrent, "{size}");
        assert!(alone.tokens_per_row <= 1.0 && shared.tokens_per_row > alone.tokens_per_row);
    }
    let table = report::table(&report);
    let svg = plot::svg(&report).unwrap();
    let json = serde_json::to_value(&report).unwrap();
    for (i, row) in report.rows.iter().enumerate() {
        assert!(table.contains(&row.label()) && svg.contains(&row.label()));
        let written = &json["rows"][i];
        assert_eq!(
            written["block_size"].as_u64(),
            row.block_size.map(|n| n as u64)
        );
        assert_eq!(written["utilization"], row.shares.utilization);
        for key in [
            "reserved_waste",
            "internal_waste",
            "external_waste",
            "concurrent",
        ] {
            assert!(written[key].is_number(), "{key}");
        }
    }
    assert_eq!(json["rows"][10]["policy"], "paged_prefix_sharing");
}

#[test]
fn a_memory_too_small_for_the_longest_request_is_refused() {
    let error = report::report(&trace(&[(250, 7)]), Some(400), || {}).unwrap_err();
    // 257 tokens are two blocks of 256.
    assert!(error.to_string().contains("takes 512"), "{error}");
}

#[test]
fn bad_traces_are_refused_with_the_line_and_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let refusal = |name: &str, text: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        format!("{:#}", Trace::read(&path).unwrap_err())
    };
    let csv = |text: &str| refusal("a.csv", text.as_bytes());
    let json = |text: &str| refusal("a.jsonl", text.as_bytes());
    let header = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
    let id = r#"{"input_length": 513, "output_length": 1, "hash_ids": [1]}"#;
    for (message, parts) in [
        (csv("a,b\n1,2\n"), ["line 1", "column ContextTokens"]),
        (csv(header), ["a.csv", "no request"]),
        (
            csv(&format!("{header}x,1,2\nx,1,-2\n")),
            ["line 3", "GeneratedTokens"],
        ),
        (csv(&format!("{header}x,1\n")), ["line 2", "too short"]),
        (
            csv(&format!("{header}x,0,2\n")),
            ["line 2", "at least one token"],
        ),
        (
            csv(&format!("{header}x,1,99999999999\n")),
            ["line 2", "at most"],
        ),
        (
            refusal("a.csv", b"ContextTokens\xff\n"),
            ["line 1", "UTF-8"],
        ),
        (json("{\"input_length\": 3}\n"), ["line 1", "output_length"]),
        (json("\n[\n"), ["line 2", "EOF"]),
        (json(id), ["line 1", "2 hash_ids"]),
        (refusal("a.txt", b""), ["*.csv or *.jsonl", "txt"]),
    ] {
        for part in parts {
            assert!(message.contains(part), "{message}");
        }
    }
    let missing = Trace::read(&folder.path().join("none.csv")).unwrap_err();
    assert!(format!("{missing:#}").contains("cannot read"));
}
