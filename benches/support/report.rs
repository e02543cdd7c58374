//! The rows so far, and which are wanted.

use anyhow::Result;

use crate::support::rows::{HEAD, Row, machine, median};
use crate::support::turns::Times;

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

    pub fn print(&self) {
        println!("machine: {}; {} rounds\n\n{HEAD}", machine(), self.rounds);
        for row in &self.rows {
            println!("{}", row.line());
        }
        let dropped: usize = self.rows.iter().map(|row| row.dropped).sum();
        println!("\n{dropped} rounds were repeated because other processes used the CPU");
    }

    pub fn json(&self) -> Result<String> {
        let rows: Vec<_> = self.rows.iter().map(Row::json).collect();
        let report = serde_json::json!({
            "machine": machine(),
            "threads": rayon::current_num_threads(),
            "rounds": self.rounds,
            "rows": rows,
        });
        Ok(format!("{report:#}\n"))
    }
}
