//! One job for the emulator (`cpp/main.cpp` describes the bytes), and what its results must be.

use candle_paged_attn::ops::launch::{Arg, Element, Plan, Slot};

/// How the emulator orders what a GPU leaves open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Schedule {
    /// Next thread: 0 lowest, 1 highest, 2 random, 3 random but staying in the warp.
    pub threads: u32,
    pub seed: u32,
    /// cp.async: 0 as late as possible, 1 at once, 2 random.
    pub copies: u32,
}

impl Schedule {
    /// Another schedule for each case; all combinations come up.
    pub fn of(case: usize) -> Self {
        Self {
            threads: (case % 4) as u32,
            seed: case as u32 + 1,
            copies: (case / 4 % 3) as u32,
        }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        (0..12).map(Self::of)
    }
}

/// What a part of an output buffer must hold, within `tolerance` (relative norm of each row).
pub struct Expect {
    pub slot: Slot,
    /// First byte.
    pub start: usize,
    pub element: Element,
    pub row_len: usize,
    pub tolerance: f64,
    pub values: Vec<f64>,
    pub who: &'static str,
}

pub struct Job {
    pub plan: Plan,
    /// Inputs, and outputs with the content they had before.
    pub buffers: Vec<(Slot, Vec<u8>)>,
    /// Outputs that start poisoned: bytes.
    pub outputs: Vec<(Slot, usize)>,
    /// Buffers that are neither filled nor returned: bytes.
    pub scratch: Vec<(Slot, usize)>,
    pub expect: Vec<Expect>,
}

impl Job {
    /// Buffers that are returned, in order, and their bytes.
    pub(crate) fn sizes(&self) -> impl Iterator<Item = (Slot, usize)> {
        let given = self.buffers.iter().map(|(slot, data)| (*slot, data.len()));
        self.outputs.iter().copied().chain(given)
    }

    /// The job for the emulator; the PTX interpreter reads the same bytes, followed by what is
    /// expected.
    pub fn encode(&self, schedule: Schedule) -> Vec<u8> {
        let mut out = b"JOB1".to_vec();
        let u32 = |out: &mut Vec<u8>, x: u32| out.extend(x.to_le_bytes());
        let name = |out: &mut Vec<u8>, s: &str| {
            out.extend((s.len() as u32).to_le_bytes());
            out.extend(s.as_bytes());
        };
        let blocks = schedule.threads.min(2);
        for x in [schedule.threads, schedule.seed, blocks, schedule.copies] {
            u32(&mut out, x);
        }
        let mut slots: Vec<Slot> = self.sizes().map(|(slot, _)| slot).collect();
        let returned = slots.len();
        let workspace = (Slot::Workspace, self.plan.workspace);
        let scratch = || self.scratch.iter().copied().chain([workspace]);
        slots.extend(scratch().map(|(slot, _)| slot));
        u32(&mut out, slots.len() as u32);
        for &(slot, size) in &self.outputs {
            name(&mut out, &format!("{slot:?}"));
            out.extend((size as u64).to_le_bytes());
            out.push(0);
        }
        for (slot, data) in &self.buffers {
            name(&mut out, &format!("{slot:?}"));
            out.extend((data.len() as u64).to_le_bytes());
            out.push(1);
            out.extend(data);
        }
        for (slot, size) in scratch() {
            name(&mut out, &format!("{slot:?}"));
            out.extend((size as u64).to_le_bytes());
            out.push(0);
        }

        u32(&mut out, self.plan.launches.len() as u32);
        for launch in &self.plan.launches {
            name(&mut out, &launch.kernel);
            for x in launch.grid {
                u32(&mut out, x);
            }
            for x in [launch.block, launch.shared, launch.args.len() as u32] {
                u32(&mut out, x);
            }
            for arg in &launch.args {
                match *arg {
                    Arg::Buffer(slot, offset) => {
                        let index = slots.iter().position(|&s| s == slot);
                        out.push(0);
                        u32(
                            &mut out,
                            index.unwrap_or_else(|| panic!("no {slot:?}")) as u32,
                        );
                        out.extend((offset as u64).to_le_bytes());
                    }
                    Arg::Null => out.push(1),
                    Arg::U32(x) => {
                        out.push(2);
                        u32(&mut out, x);
                    }
                    Arg::I64(x) => {
                        out.push(3);
                        out.extend(x.to_le_bytes());
                    }
                    Arg::F32(x) => {
                        out.push(4);
                        out.extend(x.to_le_bytes());
                    }
                }
            }
        }
        u32(&mut out, returned as u32);
        for index in 0..returned {
            u32(&mut out, index as u32);
        }
        out
    }

    /// Writes the job and its expectations where the PTX interpreter finds them, if asked to
    /// (`CANDLE_PAGED_ATTN_JOBS` names a folder).
    pub fn record(&self, file: &str) {
        let Ok(folder) = std::env::var("CANDLE_PAGED_ATTN_JOBS") else {
            return;
        };
        let mut bytes = self.encode(Schedule::of(0));
        bytes.extend((self.expect.len() as u32).to_le_bytes());
        for expect in &self.expect {
            let index = self.sizes().position(|(slot, _)| slot == expect.slot);
            let code = match expect.element {
                Element::F32 => 0u32,
                Element::F16 => 1,
                Element::BF16 => 2,
            };
            for x in [index.unwrap() as u32, code, expect.row_len as u32] {
                bytes.extend(x.to_le_bytes());
            }
            for x in [expect.start as u64, expect.values.len() as u64] {
                bytes.extend(x.to_le_bytes());
            }
            bytes.extend(expect.tolerance.to_le_bytes());
            for x in &expect.values {
                bytes.extend(x.to_le_bytes());
            }
        }
        std::fs::write(format!("{folder}/{file}.job"), bytes).unwrap();
    }
}

impl Expect {
    pub(crate) fn compare(&self, data: &[u8], what: &str) {
        let size = self.element.size();
        let data = &data[self.start..][..self.values.len() * size];
        let got = decode(data, self.element);
        let rows = got
            .chunks(self.row_len)
            .zip(self.values.chunks(self.row_len));
        for (row, (got, want)) in rows.enumerate() {
            // A row of one value is a log-sum-exp: relative to 1 if it is small.
            let floor = if self.row_len == 1 { 1.0 } else { 0.0 };
            let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
            let reference = norm(&mut want.iter().copied()).max(floor);
            let off = norm(&mut got.iter().zip(want).map(|(a, b)| a - b));
            // No f16 is closer than half the distance of its smallest numbers.
            let coarse = match self.element {
                Element::F16 if self.tolerance > 0.0 => 2f64.powi(-25) * (got.len() as f64).sqrt(),
                _ => 0.0,
            };
            let equal = got == want;
            assert!(
                equal || off <= self.tolerance * reference + coarse,
                "{what}, against {}: row {row} off by {:e}\n got {:?}\nwant {:?}",
                self.who,
                off / reference,
                &got[..got.len().min(4)],
                &want[..want.len().min(4)],
            );
        }
    }
}

pub fn decode(data: &[u8], element: Element) -> Vec<f64> {
    let half = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
    match element {
        Element::F32 => data
            .chunks(4)
            .map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])))
            .collect(),
        Element::F16 => data
            .chunks(2)
            .map(|b| half::f16::from_bits(half(b)).to_f64())
            .collect(),
        Element::BF16 => data
            .chunks(2)
            .map(|b| half::bf16::from_bits(half(b)).to_f64())
            .collect(),
    }
}

pub fn encode_u32(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

pub fn encode_i64(values: &[i64]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

pub fn encode_f32(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

pub fn encode(x: f64, element: Element) -> Vec<u8> {
    match element {
        Element::F32 => (x as f32).to_le_bytes().to_vec(),
        Element::F16 => half::f16::from_f64(x).to_le_bytes().to_vec(),
        // `from_f64` takes numbers just above the middle of two for the middle.
        Element::BF16 => half::bf16::from_f32(x as f32).to_le_bytes().to_vec(),
    }
}
