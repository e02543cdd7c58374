//! The rows so far, which are wanted, and where they go.

use std::path::Path;

use anyhow::{Context, Result};

use super::rows::{HEAD, Row, machine, median};
use super::turns::Times;

pub struct Report {
    pub rounds: usize,
    only: String,
    rows: Vec<Row>,
}

impl Report {
    pub fn new(rounds: usize, only: &str) -> Self {
        Self {
            rounds,
            only: only.to_string(),
            rows: Vec::new(),
        }
    }

    pub fn wants(&self, name: &str) -> bool {
        name.contains(&self.only)
    }

    /// A row of ratios: time of contender `other`, times `factor`, over that of contender 0.
    pub fn ratio(
        &mut self,
        name: &str,
        goal: impl Into<Option<f64>>,
        times: &Times,
        other: usize,
        factor: f64,
    ) {
        let values = times.seconds[other]
            .iter()
            .zip(&times.seconds[0])
            .map(|(other, ours)| factor * other / ours)
            .collect();
        let ms = |i: usize| 1e3 * median(&times.seconds[i]);
        self.push(Row {
            name: name.into(),
            values,
            goal: goal.into(),
            higher_is_better: true,
            dropped: times.dropped,
            note: format!("{:.3} ms against {:.3} ms", ms(0), ms(other)),
        });
    }

    pub fn push(&mut self, row: Row) {
        if self.wants(&row.name) {
            eprintln!("{}", row.line());
            self.rows.push(row);
        }
    }

    /// Prints the table, and writes the rows to `json` if that is wanted.
    pub fn finish(&self, json: Option<&Path>) -> Result<()> {
        println!("machine: {}; {} rounds\n\n{HEAD}", machine(), self.rounds);
        for row in &self.rows {
            println!("{}", row.line());
        }
        let dropped: usize = self.rows.iter().map(|row| row.dropped).sum();
        println!("\n{dropped} rounds were repeated because other processes used the CPU");
        match json {
            Some(path) => {
                std::fs::write(path, self.json()).with_context(|| path.display().to_string())
            }
            None => Ok(()),
        }
    }

    fn json(&self) -> String {
        let rows: Vec<_> = self.rows.iter().map(Row::json).collect();
        let report = serde_json::json!({
            "machine": machine(),
            "threads": rayon::current_num_threads(),
            "rounds": self.rounds,
            "rows": rows,
        });
        format!("{report:#}\n")
    }
}
