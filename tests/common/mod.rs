//! What tests share: a dense f64 reference, paged batches with poisoned memory, and a toy model.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub mod host;
pub mod paged;
pub mod reference;
pub mod shapes;
pub mod sharing;
pub mod toy;

use std::sync::OnceLock;

use candle_core::Device;

/// The device of the op tests: the CPU, or with `CANDLE_PAGED_ATTN_TEST_DEVICE=cuda` the first
/// GPU.
pub fn device() -> &'static Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    DEVICE.get_or_init(
        || match std::env::var("CANDLE_PAGED_ATTN_TEST_DEVICE").as_deref() {
            Ok("cuda") => Device::new_cuda_with_stream(0).unwrap(),
            Ok(other) => panic!("no such test device: {other}"),
            Err(_) => Device::Cpu,
        },
    )
}

/// A small deterministic generator (SplitMix64), so that a failing case can be repeated.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// About normal, mean 0 and variance 1.
    pub fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.unit()).sum::<f64>() - 6.0
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}
