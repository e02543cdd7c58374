//! Random numbers that depend on the request alone.

/// The number in `[0, 1)` that chooses token `position` of sample `branch`.
///
/// A function and not a generator: nothing that happens between two tokens (a preemption, a
/// sibling, another batch) can move it. The mixing is SplitMix64 (Steele et al. 2014).
pub(super) fn unit(seed: u64, branch: u32, position: usize) -> f64 {
    let bits = mix(mix(mix(seed) ^ u64::from(branch)) ^ position as u64);
    // The upper 53 bits are what an f64 holds exactly.
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// The seed of a request that brings none.
pub(super) fn seed_of(engine: u64, request: u64) -> u64 {
    mix(mix(engine) ^ request)
}

fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
