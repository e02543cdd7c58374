//! Headers that lie, written byte by byte.

use std::{path::PathBuf, time::Instant};

use candle_core::Device;
use candle_paged_attn::{Error, load::gguf::GgufFile};

use crate::{assert_blames, tiny};

/// A header under construction, after ggml's `docs/gguf.md`.
#[derive(Clone)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn header(version: u32, tensors: u64, values: u64) -> Self {
        Self(b"GGUF".to_vec()).u32(version).u64(tensors).u64(values)
    }

    fn u32(mut self, n: u32) -> Self {
        self.0.extend(n.to_le_bytes());
        self
    }

    fn u64(mut self, n: u64) -> Self {
        self.0.extend(n.to_le_bytes());
        self
    }

    fn text(mut self, s: &str) -> Self {
        self = self.u64(s.len() as u64);
        self.0.extend(s.as_bytes());
        self
    }

    fn tensor(mut self, name: &str, dims: &[u64], dtype: u32, offset: u64) -> Self {
        self = self.text(name).u32(dims.len() as u32);
        for &dim in dims {
            self = self.u64(dim);
        }
        self.u32(dtype).u64(offset)
    }

    /// Pads to the alignment and appends tensor data.
    fn data(mut self, bytes: usize) -> Self {
        self.0.resize(self.0.len().next_multiple_of(32) + bytes, 0);
        self
    }
}

const F32: u32 = 0;
const STRING: u32 = 8;
const ARRAY: u32 = 9;
const Q8_0: u32 = 8;

fn open(
    bytes: Bytes,
) -> (
    tempfile::TempDir,
    PathBuf,
    candle_paged_attn::Result<GgufFile>,
) {
    let folder = tempfile::tempdir().unwrap();
    let path = tiny::write(folder.path(), "lie.gguf", bytes.0);
    let start = Instant::now();
    let result = GgufFile::open(&path);
    assert!(
        start.elapsed().as_secs() < 5,
        "took a claimed length at its word"
    );
    (folder, path, result)
}

#[test]
fn versions_2_and_3_are_read() {
    for version in [2, 3] {
        let bytes = Bytes::header(version, 2, 1)
            .text("general.alignment")
            .u32(4)
            .u32(64)
            .tensor("a", &[2, 3], F32, 0)
            .tensor("q", &[32], Q8_0, 64);
        let pad = bytes.0.len().next_multiple_of(64) - bytes.0.len();
        let mut bytes = bytes;
        bytes.0.extend(vec![0; pad]);
        for x in [1f32, 2., 3., 4., 5., 6.] {
            bytes.0.extend(x.to_le_bytes());
        }
        bytes.0.extend(vec![0; 64 - 24 + 34]);
        let (_folder, _, file) = open(bytes);
        let file = file.unwrap();
        // The first GGUF dimension is the innermost.
        assert_eq!(file.tensor_shape("a").unwrap(), [3, 2]);
        let a = file.tensor("a", &Device::Cpu).unwrap();
        let a = a.dequantize(&Device::Cpu).unwrap();
        assert_eq!(a.to_vec2::<f32>().unwrap(), [[1., 2.], [3., 4.], [5., 6.]]);
    }
}

#[test]
fn claims_that_the_file_cannot_hold_are_refused() {
    let list = |kind: u32, len: u64| {
        Bytes::header(3, 0, 1)
            .text("k")
            .u32(ARRAY)
            .u32(kind)
            .u64(len)
    };
    let mut nested = Bytes::header(3, 0, 1).text("k").u32(ARRAY);
    for _ in 0..100_000 {
        nested = nested.u32(ARRAY).u64(1);
    }
    let one = |dims: &[u64], dtype, offset| {
        Bytes::header(3, 1, 0)
            .tensor("t", dims, dtype, offset)
            .data(1024)
    };
    let aligned = |kind: u32, value: u64| {
        Bytes::header(3, 0, 1)
            .text("general.alignment")
            .u32(kind)
            .u64(value)
    };
    let cases = [
        ("no magic", Bytes(b"GGML____________________".to_vec())),
        ("tensor count", Bytes::header(3, u64::MAX, 0)),
        ("value count", Bytes::header(3, 0, u64::MAX)),
        ("key length", Bytes::header(3, 0, 1).u64(u64::MAX).data(64)),
        (
            "string length",
            Bytes::header(3, 0, 1).text("k").u32(STRING).u64(1 << 40),
        ),
        ("array of bytes", list(0, 1 << 60)),
        ("array of strings", list(STRING, u64::MAX)),
        // The zeros are there: 9 million one-byte values would take 32 times their size.
        ("long array", list(0, 9_000_000).data(9_000_000)),
        ("nested arrays", nested),
        (
            "value type",
            Bytes::header(3, 0, 1).text("k").u32(13).u64(0),
        ),
        ("boolean 2", Bytes::header(3, 0, 1).text("k").u32(7).u64(2)),
        (
            "key twice",
            Bytes::header(3, 0, 2)
                .text("k")
                .u32(4)
                .u32(1)
                .text("k")
                .u32(4)
                .u32(1),
        ),
        ("alignment 0", aligned(10, 0)),
        ("alignment 4", aligned(10, 4)),
        ("alignment 48", aligned(10, 48)),
        ("alignment 2^63", aligned(10, 1 << 63)),
        ("alignment -32", aligned(11, (-32i64) as u64)),
        ("alignment 32.0", aligned(12, 32f64.to_bits())),
        ("5 dimensions", one(&[1, 1, 1, 1, 1], F32, 0)),
        (
            "2^32 dimensions",
            Bytes::header(3, 1, 0).text("t").u32(u32::MAX).data(64),
        ),
        ("dimensions overflow", one(&[1 << 32, 1 << 32, 2], F32, 0)),
        ("size overflows", one(&[1 << 62, 2], F32, 0)),
        ("no element", one(&[0, 8], F32, 0)),
        ("half a block", one(&[16, 2], Q8_0, 0)),
        ("past the end", one(&[16, 17], F32, 0)),
        ("starts past the end", one(&[1], F32, 1 << 40)),
        ("offset overflows", one(&[8], F32, u64::MAX - 31)),
        ("offset not aligned", one(&[1], F32, 4)),
        (
            "tensors that overlap",
            Bytes::header(3, 2, 0)
                .tensor("t", &[16], F32, 0)
                .tensor("u", &[1], F32, 32)
                .data(64),
        ),
        (
            "tensor twice",
            Bytes::header(3, 2, 0)
                .tensor("t", &[1], F32, 0)
                .tensor("t", &[1], F32, 0)
                .data(64),
        ),
    ];
    for (what, bytes) in cases {
        let (_folder, path, result) = open(bytes);
        let error = result.expect_err(what);
        assert_blames(&error, &path);
    }
}

#[test]
fn unknown_versions_and_tensor_types_are_named() {
    for version in [0, 1, 4, 3u32.swap_bytes()] {
        let (_folder, _, result) = open(Bytes::header(version, 0, 0));
        let error = result.unwrap_err();
        assert!(
            matches!(&error, Error::Unsupported { what: "GGUF version", got, .. }
                if got.starts_with(&version.to_string())),
            "{error}"
        );
    }
    // 23 is IQ4_XS; 9 (Q8_1) and 15 (Q8_K) are never stored.
    for dtype in [4, 9, 15, 23, 1000] {
        let bytes = Bytes::header(3, 1, 0).tensor("blk.0.x", &[256], dtype, 0);
        let (_folder, _, result) = open(bytes.data(1024));
        let error = result.unwrap_err();
        assert!(
            matches!(&error, Error::Unsupported { what: "tensor type", got, .. }
                if got.starts_with(&dtype.to_string()) && got.contains("blk.0.x")),
            "{error}"
        );
    }
}
