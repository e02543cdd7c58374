//! Whole models: SmolLM2-135M against stock candle, and against llama.cpp where there is one.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use candle_core::DType;
use candle_paged_attn::cache::{AddOptions, Feed, Logits};
use candle_paged_attn::load::LoadOptions;

use crate::ours::{Ours, Sequence, argmax};
use crate::requantize::requantize;
use crate::setup;
use crate::stock::Stock;
use crate::support::report::Report;
use crate::support::turns::{Contender, take_turns, timed};
use candle_core::quantized::GgmlDType;

const REQUESTS: usize = 16;
const PROMPT: usize = 128;
const NEW: usize = 128;
/// Steps timed per round at batch 1.
const STEPS: usize = 32;
const PREFILL: usize = 512;
/// Requests with one system prompt: tokens of it, of each request's own, and new ones.
const SHARED: usize = 512;
const OWN: usize = 32;
const SHARED_NEW: usize = 64;

/// Names the binary of llama.cpp's batched bench.
const LLAMA: &str = "LLAMA_BATCHED_BENCH";

pub fn bench(report: &mut Report, threads: usize) -> Result<()> {
    let llama = std::env::var_os(LLAMA).map(PathBuf::from);
    if llama.is_none() {
        eprintln!("no rows against llama.cpp: {LLAMA} does not name its batched bench");
    }
    let gguf = setup::default_model(true)?;
    let scratch = tempfile::tempdir()?;
    for (weights, dtype) in [
        ("Q8_0", Some(GgmlDType::Q8_0)),
        ("Q4_1", None),
        ("f32", Some(GgmlDType::F32)),
    ] {
        let names = Names::new(weights);
        if !names.all().any(|name| report.wants(name)) {
            continue;
        }
        let file = match dtype {
            None => gguf.clone(),
            Some(dtype) => {
                let file = scratch.path().join(format!("{weights}.gguf"));
                requantize(&gguf, &file, dtype)?;
                file
            }
        };
        let ours = load(&gguf, &file, weights, scratch.path())?;
        let peer = llama.as_deref().map(|binary| Llama {
            binary,
            model: &file,
            threads,
        });
        rows(report, &names, &ours, &file, peer.as_ref())?;
    }
    Ok(())
}

/// The rows of one kind of weights.
struct Names {
    stock: String,
    batch: String,
    alone: String,
    prefill: String,
    shared: String,
    weights: &'static str,
}

impl Names {
    fn new(weights: &'static str) -> Self {
        Self {
            stock: format!("{weights}, 16 x (128 + 128) / stock candle one by one"),
            batch: format!("{weights}, decode of 16 at 128..256 / llama.cpp"),
            alone: format!("{weights}, decode of 1 at 128 / llama.cpp"),
            prefill: format!("{weights}, prefill of 512 / llama.cpp"),
            shared: format!("{weights}, 16 x (512 shared + 32 + 64) / llama.cpp"),
            weights,
        }
    }

    fn all(&self) -> impl Iterator<Item = &str> {
        let Self {
            stock,
            batch,
            alone,
            prefill,
            shared,
            ..
        } = self;
        [stock, batch, alone, prefill, shared]
            .into_iter()
            .map(String::as_str)
    }
}

fn load(gguf: &Path, file: &Path, weights: &str, scratch: &Path) -> Result<Ours> {
    if weights != "f32" {
        return Ours::load(file, &LoadOptions::default());
    }
    let folder = scratch.join("folder");
    setup::write_hf_folder(gguf, &folder)?;
    Ours::load(&folder, &LoadOptions::default().with_dtype(DType::F32))
}

fn rows(
    report: &mut Report,
    names: &Names,
    ours: &Ours,
    file: &Path,
    llama: Option<&Llama<'_>>,
) -> Result<()> {
    // A round takes half a minute and more.
    let rounds = report.rounds.min(3);
    let prompts = (0..REQUESTS)
        .map(|i| crate::prompt::tokens(&ours.pretrained, PROMPT, i))
        .collect::<Result<Vec<_>>>()?;
    if names.weights == "Q8_0" && report.wants(&names.stock) {
        let stock = Stock::from_gguf(file)?;
        let all = timed(|| {
            let running = start(ours, &prompts)?;
            ours.decode(&running.iter().collect::<Vec<_>>(), NEW - 1)?;
            running.into_iter().try_for_each(|one| ours.remove(one))
        });
        let one_by_one = timed(|| {
            for prompt in &prompts {
                stock.start(prompt)?.decode(NEW - 1)?;
            }
            Ok(())
        });
        let times = take_turns(rounds, &mut [all, one_by_one])?;
        report.ratio(&names.stock, 6.0, &times, 1, 1.0);
    }
    let Some(llama) = llama else {
        return Ok(());
    };
    let goals = |q8_0, q4_1, f32| match names.weights {
        "Q8_0" => q8_0,
        "Q4_1" => q4_1,
        _ => f32,
    };
    let decode = |sequences: usize, steps: usize| -> Result<Contender<'_>> {
        let running = start(ours, &prompts[..sequences])?;
        Ok(Box::new(move || {
            let running: Vec<&Sequence> = running.iter().collect();
            Ok(ours.decode(&running, steps)?.time)
        }))
    };
    if report.wants(&names.batch) {
        let mut turns = [decode(REQUESTS, NEW)?, llama.decode(PROMPT, NEW, REQUESTS)];
        let times = take_turns(rounds, &mut turns)?;
        let goal = goals(Some(1.6), Some(2.5), Some(1.4));
        report.ratio(&names.batch, goal, &times, 1, 1.0);
    }
    if report.wants(&names.alone) {
        let mut turns = [decode(1, STEPS)?, llama.decode(PROMPT, STEPS, 1)];
        let times = take_turns(rounds, &mut turns)?;
        report.ratio(&names.alone, goals(Some(1.2), None, None), &times, 1, 1.0);
    }
    if report.wants(&names.prefill) {
        let prompt = crate::prompt::tokens(&ours.pretrained, PREFILL, 0)?;
        let mut turns: [Contender<'_>; 2] =
            [Box::new(|| ours.prefill(&prompt)), llama.prefill(PREFILL)];
        let times = take_turns(rounds, &mut turns)?;
        let goal = goals(Some(1.8), None, Some(1.15));
        report.ratio(&names.prefill, goal, &times, 1, 1.0);
    }
    if names.weights == "Q4_1" && report.wants(&names.shared) {
        let common = crate::prompt::tokens(&ours.pretrained, SHARED, 0)?;
        let own: Vec<_> = prompts
            .iter()
            .map(|prompt| prompt[..OWN].to_vec())
            .collect();
        let mut turns: [Contender<'_>; 2] = [
            Box::new(|| share(ours, &common, &own, SHARED_NEW)),
            llama.share(SHARED, OWN, SHARED_NEW, REQUESTS),
        ];
        let times = take_turns(rounds, &mut turns)?;
        report.ratio(&names.shared, 2.0, &times, 1, 1.0);
    }
    Ok(())
}

fn start(ours: &Ours, prompts: &[Vec<u32>]) -> Result<Vec<Sequence>> {
    prompts.iter().map(|prompt| ours.start(prompt)).collect()
}

/// From unknown prompts, `common` and one of `own` each, to `new` greedy tokens of each. The
/// common part is computed once, the others together.
fn share(ours: &Ours, common: &[u32], own: &[Vec<u32>], new: usize) -> Result<Duration> {
    let start = Instant::now();
    let trunk = ours.cache.add(common, AddOptions::default().unindexed())?;
    ours.step(&[Feed::new(trunk.id, common).with_logits(Logits::None)])?;
    let mut ids = vec![trunk.id];
    for _ in 1..own.len() {
        ids.push(ours.cache.fork(trunk.id)?);
    }
    let feeds: Vec<_> = ids
        .iter()
        .zip(own)
        .map(|(&id, own)| Feed::new(id, own))
        .collect();
    let next = argmax(&ours.step(&feeds)?)?;
    let sequences: Vec<_> = ids
        .iter()
        .zip(own)
        .zip(next)
        .map(|((&id, own), next)| Sequence {
            id,
            len: common.len() + own.len(),
            next,
        })
        .collect();
    ours.decode(&sequences.iter().collect::<Vec<_>>(), new - 1)?;
    let time = start.elapsed();
    sequences.into_iter().try_for_each(|one| ours.remove(one))?;
    Ok(time)
}

/// llama.cpp's batched bench: one run of it is one measurement, by its own clock.
struct Llama<'a> {
    binary: &'a Path,
    model: &'a Path,
    threads: usize,
}

impl<'a> Llama<'a> {
    fn decode(&'a self, prompt: usize, new: usize, sequences: usize) -> Contender<'a> {
        Box::new(move || self.run(prompt, new, sequences, "t_tg", &[]))
    }

    fn prefill(&'a self, prompt: usize) -> Contender<'a> {
        Box::new(move || self.run(prompt, 1, 1, "t_pp", &[]))
    }

    /// The bench knows prompts that are shared as a whole. What each request has of its own is
    /// another run of it, without the shared part before it: a little less work than ours.
    fn share(&'a self, shared: usize, own: usize, new: usize, sequences: usize) -> Contender<'a> {
        Box::new(move || {
            Ok(self.run(shared, new, sequences, "t", &["-pps"])?
                + self.run(own, 1, sequences, "t_pp", &[])?)
        })
    }

    fn run(
        &self,
        prompt: usize,
        new: usize,
        sequences: usize,
        field: &str,
        more: &[&str],
    ) -> Result<Duration> {
        let number = |n: usize| n.to_string();
        let output = Command::new(self.binary)
            .arg("-m")
            .arg(self.model)
            .args(["-c", &number((prompt + new) * sequences + 512)])
            .args(["-npp", &number(prompt), "-ntg", &number(new)])
            .args(["-npl", &number(sequences)])
            .args(["-t", &number(self.threads), "-tb", &number(self.threads)])
            .args(["--output-format", "jsonl"])
            .args(more)
            .output()
            .with_context(|| self.binary.display().to_string())?;
        ensure!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let text = String::from_utf8_lossy(&output.stdout);
        let value = text
            .lines()
            .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
            .find_map(|line| line.get(field)?.as_f64());
        match value {
            Some(seconds) => Ok(Duration::from_secs_f64(seconds)),
            None => bail!(
                "no {field} in the output of {}:\n{text}",
                self.binary.display()
            ),
        }
    }
}
