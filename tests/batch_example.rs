//! The example `batch` on the real model, as a user runs it: a KV memory that is far too small
//! costs time, not answers (which are those of other engines, see `data/README-goldens.md`).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../examples/support/mod.rs"]
mod support;

use std::path::Path;
use std::process::Command;

use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Deserialize)]
struct Golden {
    prompt_ids: Vec<u32>,
    greedy_ids: Vec<u32>,
}

/// The lines of `batch --json`: one per request, then the totals.
fn batch(model: &Path, prompts: &Path, kv_memory: &str) -> Vec<Value> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["run", "--quiet", "--example", "batch"]);
    if !cfg!(debug_assertions) {
        cargo.arg("--release");
    }
    cargo.arg("--").arg(prompts).arg("--model").arg(model);
    cargo.args(["--dtype", "f32", "--json"]);
    cargo.args(["--block-size", "4", "--kv-memory", kv_memory]);
    let output = cargo.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let lines = String::from_utf8(output.stdout).unwrap();
    lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[test]
fn a_small_kv_memory_preempts_and_answers_the_same() {
    let Some(model) = support::model_or_skip("a_small_kv_memory_preempts_and_answers_the_same")
    else {
        return;
    };
    const TOKENS: usize = 24;
    let goldens = include_str!("data/smollm2_135m_instruct_f32.json");
    let goldens: Vec<Golden> = serde_json::from_str(goldens).unwrap();
    let goldens = goldens.iter().filter(|g| g.prompt_ids.len() <= 64);
    let goldens: Vec<_> = goldens.collect();
    let folder = tempfile::tempdir().unwrap();
    let prompts = folder.path().join("prompts.jsonl");
    // The first is answered twice: the most likely tokens, twice the same.
    let samples = |index: usize| if index == 0 { 2 } else { 1 };
    let line = |(index, golden): (usize, &&Golden)| {
        let (ids, n) = (&golden.prompt_ids, samples(index));
        let line = json!({"prompt_ids": ids, "n": n, "max_tokens": TOKENS, "ignore_eos": true});
        line.to_string() + "\n"
    };
    let lines = goldens.iter().enumerate().map(line);
    std::fs::write(&prompts, lines.collect::<String>()).unwrap();

    // 46,080 bytes a token: in 7 MiB room for 159 tokens, where the requests grow to 25 to 88.
    for (kv_memory, preempts) in [("256MiB", false), ("7MiB", true)] {
        let mut lines = batch(&model, &prompts, kv_memory);
        let totals = lines.pop().unwrap();
        assert_eq!(lines.len(), goldens.len());
        for (index, (line, golden)) in lines.iter().zip(&goldens).enumerate() {
            assert_eq!(line["index"], index);
            assert_eq!(line["prompt_tokens"], golden.prompt_ids.len());
            assert_eq!(line["tokens"], json!(golden.greedy_ids[..TOKENS]));
            assert_eq!(line["finish_reason"], "length");
            let all = line["samples"].as_array().map_or(&[][..], Vec::as_slice);
            assert_eq!(all.len(), [0, 2][samples(index) - 1]);
            for sample in all {
                for key in ["tokens", "text", "finish_reason"] {
                    assert_eq!(sample[key], line[key]);
                }
            }
        }
        assert_eq!(totals["requests"], goldens.len());
        assert_eq!(totals["generated_tokens"], TOKENS * (goldens.len() + 1));
        assert_eq!(totals["preemptions"].as_u64().unwrap() > 0, preempts);
    }
}
