//! Rows of comparisons, as a Markdown table and as JSON.

use serde_json::{Value, json};

/// One figure, measured in several rounds.
pub struct Row {
    pub name: String,
    pub values: Vec<f64>,
    pub goal: Option<f64>,
    pub higher_is_better: bool,
    /// Rounds that were repeated because other processes used the CPU.
    pub dropped: usize,
    /// What the figure was made of, for the reader.
    pub note: String,
}

impl Row {
    pub fn median(&self) -> f64 {
        median(&self.values)
    }

    /// Least and greatest value.
    pub fn spread(&self) -> (f64, f64) {
        let least = self.values.iter().copied().fold(f64::INFINITY, f64::min);
        let greatest = self
            .values
            .iter()
            .copied()
            .fold(f64::NEG_INFINITY, f64::max);
        (least, greatest)
    }

    fn met(&self) -> Option<bool> {
        let goal = self.goal?;
        Some(match self.higher_is_better {
            true => self.median() >= goal,
            false => self.median() <= goal,
        })
    }

    /// A line of the table below [`HEAD`].
    pub fn line(&self) -> String {
        let (least, greatest) = self.spread();
        let sign = if self.higher_is_better { "≥" } else { "≤" };
        let goal = self
            .goal
            .map_or("none".into(), |goal| format!("{sign} {goal}"));
        let met = match self.met() {
            Some(true) => "met",
            Some(false) => "missed",
            None => "",
        };
        format!(
            "| {} | {} | {}..{} | {goal} | {met} | {} |",
            self.name,
            figure(self.median()),
            figure(least),
            figure(greatest),
            self.note,
        )
    }

    pub fn json(&self) -> Value {
        let (least, greatest) = self.spread();
        json!({
            "name": self.name,
            "ratio": self.median(),
            "spread": [least, greatest],
            "goal": self.goal,
            "higher_is_better": self.higher_is_better,
            "dropped_rounds": self.dropped,
        })
    }
}

/// The head of a Markdown table of rows.
pub const HEAD: &str = "| row | median | min..max | goal | | |\n|---|---:|---:|---:|---|---|";

fn figure(x: f64) -> String {
    match x.abs() {
        x_abs if x_abs < 10.0 => format!("{x:.2}"),
        x_abs if x_abs < 1000.0 => format!("{x:.1}"),
        _ => format!("{x:.0}"),
    }
}

/// The middle value, or the mean of the two; NaN of none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

/// CPU model and number of cores.
pub fn machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map_or(std::env::consts::ARCH, |(_, model)| model.trim());
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!("{model}, {cores} cores")
}
