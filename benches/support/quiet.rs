//! Whether other processes used the CPU meanwhile.

use std::time::Instant;

/// A span of time that is watched. What the system's processes used beyond this one comes from
/// Linux' `/proc`, in ticks of 10 ms; elsewhere every span counts as quiet.
pub struct Watch {
    used: Option<(i64, i64)>,
    start: Instant,
}

/// Ticks that may pass unnoticed, plus this share of a core.
const SLACK_TICKS: f64 = 2.0;
const SLACK_PER_SECOND: f64 = 5.0;

impl Watch {
    pub fn start() -> Self {
        Self {
            used: ticks(),
            start: Instant::now(),
        }
    }

    /// Whether nobody else used more than a trifle since the start.
    pub fn was_quiet(&self) -> bool {
        let (Some(before), Some(now)) = (self.used, ticks()) else {
            return true;
        };
        let others = (now.0 - before.0) - (now.1 - before.1);
        others as f64 <= SLACK_TICKS + SLACK_PER_SECOND * self.start.elapsed().as_secs_f64()
    }
}

/// CPU time used by everybody, and by this process and the children it waited for.
fn ticks() -> Option<(i64, i64)> {
    let numbers = |text: &str| -> Vec<i64> {
        text.split_whitespace()
            .map(|field| field.parse().unwrap_or(0))
            .collect()
    };
    let all = std::fs::read_to_string("/proc/stat").ok()?;
    let all = numbers(all.lines().next()?.strip_prefix("cpu")?);
    let own = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The name of the program, in brackets, may hold spaces.
    let own = numbers(own.rsplit_once(')')?.1);
    // user, nice, system, then idle and iowait, irq, softirq, steal; of our own utime, stime, cutime, cstime.
    let all = [0, 1, 2, 5, 6, 7]
        .iter()
        .filter_map(|&i| all.get(i))
        .sum::<i64>();
    Some((all, own.get(11..15)?.iter().sum()))
}
