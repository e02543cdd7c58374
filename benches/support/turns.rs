//! Contenders that take turns: A B A B ...

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::quiet::Watch;

/// Runs once and says what it took.
pub type Contender<'a> = Box<dyn FnMut() -> Result<Duration> + 'a>;

/// Times all of `run`.
pub fn timed<'a, T>(mut run: impl FnMut() -> Result<T> + 'a) -> Contender<'a> {
    Box::new(move || {
        let start = Instant::now();
        std::hint::black_box(run()?);
        Ok(start.elapsed())
    })
}

/// Seconds of each contender, round by round.
pub struct Times {
    pub seconds: Vec<Vec<f64>>,
    /// Rounds that were repeated because other processes used the CPU.
    pub dropped: usize,
}

/// Runs every contender once in each round, one after the other, so that whatever the machine
/// does falls on all of them; a round before the first warms up. Rounds in which other processes
/// used the CPU are repeated.
///
/// # Errors
/// What a contender answers; or fewer than half of the rounds were quiet after four times as
/// many tries.
pub fn take_turns(rounds: usize, contenders: &mut [Contender<'_>]) -> Result<Times> {
    let mut times = Times {
        seconds: vec![Vec::new(); contenders.len()],
        dropped: 0,
    };
    for contender in contenders.iter_mut() {
        contender()?;
    }
    let mut tries = 0;
    while times.seconds[0].len() < rounds && tries < 4 * rounds {
        tries += 1;
        let watch = Watch::start();
        let mut round = Vec::with_capacity(contenders.len());
        for contender in contenders.iter_mut() {
            round.push(contender()?.as_secs_f64());
        }
        if !watch.was_quiet() {
            times.dropped += 1;
            std::thread::sleep(Duration::from_millis(150));
            continue;
        }
        for (seconds, time) in times.seconds.iter_mut().zip(round) {
            seconds.push(time);
        }
    }
    let quiet = times.seconds[0].len();
    ensure!(
        2 * quiet >= rounds,
        "only {quiet} of {tries} rounds were quiet: other processes use the CPU"
    );
    Ok(times)
}
