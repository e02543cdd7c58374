//! Errors of this crate survive the way through candle code and back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::process::Command;

use candle_core::Context;
use candle_paged_attn::Error;

fn ours() -> Error {
    Error::OutOfBlocks {
        op: "plan",
        needed: 3,
        free: 2,
    }
}

fn assert_back(error: candle_core::Error) {
    let back = Error::from_candle(error);
    assert!(
        matches!(
            back,
            Error::OutOfBlocks {
                op: "plan",
                needed: 3,
                free: 2
            }
        ),
        "{back}"
    );
}

/// The standard library reads RUST_BACKTRACE once per process, so each setting gets a process
/// of its own: this test, run again.
#[test]
fn round_trip_with_and_without_backtraces() {
    const CHILD: &str = "CANDLE_PAGED_ATTN_ROUND_TRIP";
    if std::env::var_os(CHILD).is_none() {
        for backtrace in ["0", "1"] {
            let status = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "round_trip_with_and_without_backtraces"])
                .env(CHILD, "1")
                .env("RUST_BACKTRACE", backtrace)
                .status()
                .unwrap();
            assert!(status.success(), "RUST_BACKTRACE={backtrace}");
        }
        return;
    }
    let candle = candle_core::Error::from(ours());
    let with_backtrace = matches!(candle, candle_core::Error::WithBacktrace { .. });
    assert_eq!(
        with_backtrace,
        std::env::var("RUST_BACKTRACE").unwrap() == "1"
    );
    assert_back(candle);
    assert_back(candle_core::Error::from(ours()).context("in layer 3"));
    assert_back(
        candle_core::Error::from(ours())
            .with_path("model.gguf")
            .bt(),
    );
    let wrapped: candle_core::Result<()> = Err(candle_core::Error::from(ours()));
    assert_back(wrapped.context("while decoding").unwrap_err());
    // A candle error stays what it is, wrappers included.
    let genuine = candle_core::Error::Msg("no".into()).context("in layer 3");
    match Error::from_candle(genuine) {
        Error::Candle(inner) => assert!(inner.to_string().contains("in layer 3")),
        other => panic!("{other}"),
    }
}

#[test]
fn messages_name_op_expectation_and_value() {
    let message = ours().to_string();
    assert_eq!(message, "plan: needs 3 blocks, 2 are free");
    let shape = Error::Shape {
        op: "write_kv",
        tensor: "k".into(),
        expected: "[rows, 3, 64]".into(),
        got: vec![2, 4, 64],
    };
    assert_eq!(
        shape.to_string(),
        "write_kv: shape of k: expected [rows, 3, 64], got [2, 4, 64]"
    );
}
