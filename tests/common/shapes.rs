//! The shapes that the ops are tried on, on the CPU and in the emulator of the CUDA kernels.

use candle_core::DType;

/// Decode rows, verification rows, chunks, whole prompts, and more rows than tokens, in one
/// batch: lengths and rows.
pub const MIX: &[(usize, usize)] = &[
    (1, 1),
    (37, 1),
    (70, 3),
    (0, 1),
    (90, 40),
    (33, 33),
    (20, 0),
    (300, 1),
    (3, 5),
];

pub const DIMS: [usize; 14] = [
    8, 40, 64, 72, 80, 96, 112, 120, 128, 192, 256, 320, 440, 512,
];

pub const BLOCK_SIZES: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];

/// Of the queries and of the cache.
pub const DTYPES: [(DType, DType); 5] = [
    (DType::F32, DType::F32),
    (DType::F16, DType::F16),
    (DType::BF16, DType::BF16),
    (DType::F32, DType::F16),
    (DType::F32, DType::BF16),
];
