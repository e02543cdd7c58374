//! The examples `generate`, `batch` and `inspect` on other families than the default model's,
//! from both kinds of checkpoints, run as a user runs them.

use std::path::{Path, PathBuf};
use std::process::Command;

use candle_core::DType;
use candle_core::quantized::gguf_file::Value as Gguf;
use candle_paged_attn::models::Decoder;
use serde_json::{Value, json};

use crate::families_gguf;
use crate::golden::Golden;
use crate::run::in_chunks;

const TOKENS: usize = 6;

/// A stored case, and for a GGUF file llama.cpp's name of its architecture and splitting rule.
const CASES: &[(&str, Option<(&str, &str)>)] = &[
    ("gemma3", None),
    ("qwen2_moe", None),
    ("phi", None),
    ("mixtral", Some(("llama", "smollm"))),
    ("qwen3", Some(("qwen3", "qwen2"))),
    ("gpt_oss_limit_7", Some(("gpt-oss", "gpt-4o"))),
];

/// 60 letters and digits, and one pair of letters: a vocabulary of the size of the stored cases.
fn vocabulary() -> Vec<String> {
    let mut tokens: Vec<String> = ('a'..='z')
        .chain('A'..='Z')
        .chain('0'..='7')
        .map(String::from)
        .collect();
    tokens.push("qz".into());
    tokens
}

fn text(ids: &[u32]) -> String {
    let vocabulary = vocabulary();
    ids.iter()
        .map(|&id| vocabulary[id as usize].as_str())
        .collect()
}

/// Writes the checkpoint with a tokenizer, and answers what to give as `--model`.
fn write(golden: &Golden, gguf: Option<(&str, &str)>, folder: &Path) -> PathBuf {
    let tokens = vocabulary();
    let Some((arch, pre)) = gguf else {
        golden.write(folder);
        let vocab: serde_json::Map<String, Value> = (0u32..)
            .zip(tokens)
            .map(|(id, token)| (token, id.into()))
            .collect();
        let tokenizer = json!({
            "version": "1.0", "added_tokens": [], "decoder": {"type": "Fuse"},
            "model": {"type": "BPE", "vocab": vocab, "merges": ["q z"]},
        });
        std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
        return folder.to_path_buf();
    };
    let path = folder.join("tiny.gguf");
    let mut fields = families_gguf::metadata(golden, arch);
    let text = |text: &str| Gguf::String(text.into());
    let tokens = tokens.iter().map(|token| text(token)).collect();
    for (field, value) in [
        ("model", text("gpt2")),
        ("pre", text(pre)),
        ("tokens", Gguf::Array(tokens)),
        ("merges", Gguf::Array(vec![text("q z")])),
    ] {
        fields.insert(format!("tokenizer.ggml.{field}"), value);
    }
    families_gguf::write(&path, &fields, &families_gguf::tensors(golden, arch));
    path
}

fn best(logits: &[f32]) -> u32 {
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
    best.unwrap() as u32
}

/// The greedy answer: the first token by transformers, the others by prompts run as a whole.
fn expected(golden: &Golden, model: &Decoder) -> Vec<u32> {
    let mut tokens = golden.prompt.clone();
    tokens.push(best(golden.logits.last().unwrap()));
    while tokens.len() < golden.prompt.len() + TOKENS {
        let logits = in_chunks(model, &tokens, tokens.len());
        tokens.push(best(logits.last().unwrap()));
    }
    tokens.split_off(golden.prompt.len())
}

/// The examples, built as this test is.
struct Examples(PathBuf);

impl Examples {
    fn build() -> Self {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet"]);
        for example in ["generate", "batch", "inspect"] {
            cargo.args(["--example", example]);
        }
        if !cfg!(debug_assertions) {
            cargo.arg("--release");
        }
        assert!(cargo.status().unwrap().success());
        // This test is in `deps`, beside which the examples are.
        let here = std::env::current_exe().unwrap();
        Self(here.parent().unwrap().with_file_name("examples"))
    }

    fn run(&self, example: &str, args: &[&str]) -> String {
        let output = Command::new(self.0.join(example)).args(args).output();
        let output = output.unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{example} {args:?}: {errors}");
        String::from_utf8(output.stdout).unwrap()
    }
}

#[test]
fn the_examples_run_other_families_from_both_kinds_of_checkpoints() {
    let examples = Examples::build();
    for (name, gguf) in CASES {
        let golden = Golden::read(name);
        let folder = tempfile::tempdir().unwrap();
        let path = write(&golden, *gguf, folder.path());
        let model = path.to_str().unwrap();
        let expected = expected(&golden, &golden.load(golden.spec(), DType::F32));
        let prompt = text(&golden.prompt);
        let count = TOKENS.to_string();

        let args = [
            &prompt,
            "--model",
            model,
            "--raw",
            "--ignore-eos",
            "--json",
            "--max-tokens",
            &count,
        ];
        let answer: Value = serde_json::from_str(&examples.run("generate", &args)).unwrap();
        assert_eq!(answer["prompt_tokens"], json!(golden.prompt), "{name}");
        assert_eq!(answer["tokens"], json!(expected), "{name}");
        assert_eq!(answer["text"], text(&expected), "{name}");

        // Twice the prompt, of which the second finds the first in the cache, and its end.
        let prompts = folder.path().join("prompts.txt");
        std::fs::write(&prompts, format!("{prompt}\n{prompt}\n{}\n", &prompt[20..])).unwrap();
        let args = [
            prompts.to_str().unwrap(),
            "--model",
            model,
            "--raw",
            "--ignore-eos",
            "--json",
            "--max-tokens",
            &count,
            "--block-size",
            "4",
        ];
        let lines = examples.run("batch", &args);
        let lines: Vec<Value> = lines
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(lines.len(), 4, "{name}");
        for line in &lines[..2] {
            assert_eq!(line["tokens"], json!(expected), "{name}");
        }
        assert_eq!(lines[3]["generated_tokens"], 3 * TOKENS);
        assert!(lines[3]["cached_tokens"].as_u64().unwrap() > 0, "{name}");

        let told = examples.run("inspect", &[model]);
        let line = |what: &str| {
            let line = told.lines().find(|line| line.starts_with(what)).unwrap();
            line[what.len()..].trim().to_string()
        };
        let family = match gguf {
            Some((arch, _)) => *arch,
            None => golden.config["model_type"].as_str().unwrap(),
        };
        assert_eq!(line("family"), family);
        assert_eq!(
            line("layers"),
            golden.config["num_hidden_layers"].to_string()
        );
        assert_eq!(line("vocabulary"), "61");
    }
}
