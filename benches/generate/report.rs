//! Rows, their statistics, and how they are printed.

use std::time::Duration;

use serde_json::json;

use crate::support::rows::{machine, median};

/// One comparison: stock's time over ours, round by round. Above 1, ours is faster.
pub struct Row {
    pub name: String,
    goal: Option<f64>,
    /// Tokens of a sample, for tokens/s.
    tokens: usize,
    ours: Vec<f64>,
    other: Vec<f64>,
}

impl Row {
    pub fn new(name: String, goal: Option<f64>, tokens: usize) -> Self {
        Self {
            name,
            goal,
            tokens,
            ours: Vec::new(),
            other: Vec::new(),
        }
    }

    pub fn push(&mut self, ours: Duration, other: Duration) {
        self.ours.push(ours.as_secs_f64());
        self.other.push(other.as_secs_f64());
    }

    /// Median, least and greatest ratio.
    fn ratios(&self) -> (f64, f64, f64) {
        let pairs = self.ours.iter().zip(&self.other);
        let ratios: Vec<f64> = pairs.map(|(ours, other)| other / ours).collect();
        let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        let greatest = ratios.iter().copied().fold(0.0, f64::max);
        (median(&ratios), least, greatest)
    }
}

pub struct Report {
    pub rounds: usize,
    threads: usize,
    only: String,
    rows: Vec<Row>,
}

impl Report {
    pub fn new(threads: usize, rounds: usize, only: &str) -> Self {
        Self {
            rounds,
            threads,
            only: only.to_string(),
            rows: Vec::new(),
        }
    }

    pub fn wants(&self, name: &str) -> bool {
        name.contains(&self.only)
    }

    /// Whether rows of these weights may be wanted: loading a model for nothing takes a while.
    pub fn wants_any(&self, weights: &str) -> bool {
        let other = if weights == "f32" { "Q8_0" } else { "f32" };
        !self.only.starts_with(other)
    }

    pub fn push(&mut self, row: Row) {
        eprintln!("{}: {:.2}", row.name, row.ratios().0);
        self.rows.push(row);
    }

    pub fn print_head(&self) {
        println!("machine: {}", described());
        println!(
            "{} threads on both sides, {} rounds, stock = candle-transformers 0.11.1",
            self.threads, self.rounds
        );
        println!("load average at the start: {}\n", load_average());
    }

    /// A Markdown table.
    pub fn print_table(&self) {
        println!("| row | ours, tokens/s | other, tokens/s | ratio | min..max | goal | |");
        println!("|---|---:|---:|---:|---:|---:|---|");
        for row in &self.rows {
            let (ratio, least, greatest) = row.ratios();
            let rate = |seconds: &[f64]| row.tokens as f64 / median(seconds);
            let (goal, met) = match row.goal {
                Some(goal) if ratio >= goal => (format!("{goal:.1}"), "met"),
                Some(goal) => (format!("{goal:.1}"), "missed"),
                None => ("none".into(), ""),
            };
            println!(
                "| {} | {:.1} | {:.1} | {ratio:.2} | {least:.2}..{greatest:.2} | {goal} | {met} |",
                row.name,
                rate(&row.ours),
                rate(&row.other),
            );
        }
    }

    pub fn json(&self) -> String {
        let rows: Vec<_> = self
            .rows
            .iter()
            .map(|row| {
                let (ratio, least, greatest) = row.ratios();
                json!({
                    "name": row.name,
                    "ratio": ratio,
                    "spread": [least, greatest],
                    "goal": row.goal,
                    "higher_is_better": true,
                })
            })
            .collect();
        let report = json!({
            "machine": described(),
            "threads": self.threads,
            "rounds": self.rounds,
            "rows": rows,
        });
        format!("{report:#}\n")
    }
}

/// The machine, and the vector instructions that kernels choose by.
fn described() -> String {
    format!("{}, {}", machine(), features().join(" "))
}

/// Of the last minute: figures of a machine that was busy are worth less.
fn load_average() -> String {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split(' ').next().unwrap_or_default().to_string()
}

#[cfg(target_arch = "x86_64")]
fn features() -> Vec<&'static str> {
    [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
        ("avx512vnni", is_x86_feature_detected!("avx512vnni")),
    ]
    .into_iter()
    .filter_map(|(name, has)| has.then_some(name))
    .collect()
}

#[cfg(not(target_arch = "x86_64"))]
fn features() -> Vec<&'static str> {
    vec![std::env::consts::ARCH]
}
