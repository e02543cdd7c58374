//! The process that runs jobs.

use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;

use candle_paged_attn::ops::launch::Slot;

use crate::{Job, Schedule};

/// A running emulator.
#[derive(Debug)]
pub struct Emulator {
    child: Child,
    /// What it says on stderr: read all the time, or a full pipe would stop it.
    messages: Option<JoinHandle<String>>,
}

impl Emulator {
    /// Starts the program that this crate was built with, or that of `CANDLE_PAGED_ATTN_EMULATOR`.
    pub fn start() -> Self {
        let built = || env!("EMULATOR").to_string();
        let path = std::env::var("CANDLE_PAGED_ATTN_EMULATOR").unwrap_or_else(|_| built());
        assert!(
            !path.is_empty(),
            "built without the headers of CUDA: set CUDA_HOME (scripts/cuda_toolchain.sh)"
        );
        let mut child = Command::new(path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stderr = child.stderr.take().unwrap();
        let messages = std::thread::spawn(move || {
            let mut message = Vec::new();
            stderr.read_to_end(&mut message).ok();
            String::from_utf8_lossy(&message).into_owned()
        });
        Self {
            child,
            messages: Some(messages),
        }
    }

    /// All it said, once it has ended.
    fn messages(&mut self) -> String {
        self.messages
            .take()
            .map_or_else(String::new, |reader| reader.join().unwrap())
    }

    /// Runs a job, returns the outputs in the order of `outputs`, then those of `buffers`.
    pub fn run(&mut self, job: &Job, schedule: Schedule, what: &str) -> Vec<(Slot, Vec<u8>)> {
        let bytes = job.encode(schedule);
        let sent = self.child.stdin.as_mut().unwrap().write_all(&bytes);
        let stdout = self.child.stdout.as_mut().unwrap();
        let mut magic = [0; 4];
        if sent.is_err() || stdout.read_exact(&mut magic).is_err() || &magic != b"DONE" {
            let message = self.messages();
            panic!("{what}, {schedule:?}: the emulator stopped: {message}");
        }
        let mut results = Vec::new();
        for (slot, size) in job.sizes() {
            let mut data = vec![0; size];
            stdout.read_exact(&mut data).unwrap();
            results.push((slot, data));
        }
        results
    }

    /// Runs a job and compares.
    pub fn check(&mut self, job: &Job, schedule: Schedule, what: &str) -> Vec<(Slot, Vec<u8>)> {
        let results = self.run(job, schedule, what);
        for expect in &job.expect {
            let (_, data) = results
                .iter()
                .find(|(slot, _)| *slot == expect.slot)
                .unwrap();
            expect.compare(data, &format!("{what}, {schedule:?}"));
        }
        results
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        self.child.wait().ok();
        // Sanitizers report what they found even if the results were right.
        let message = self.messages();
        if !message.is_empty() && !std::thread::panicking() {
            panic!("the emulator says:\n{message}");
        }
    }
}
