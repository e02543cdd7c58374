//! Safetensors folders: what sound ones give, and that no damaged one is taken for sound.

use std::{collections::HashMap, path::Path};

use candle_core::{DType, Device, Tensor};
use candle_paged_attn::{
    Error,
    load::safetensors::{INDEX_FILE, SINGLE_FILE, SafetensorsWeights},
    models::{LinearWeight, WeightSource},
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};

use crate::{assert_blames, tiny};

fn bytes(tensors: &[(&str, &Tensor)]) -> Vec<u8> {
    safetensors::serialize(tensors.iter().copied(), None).unwrap()
}

fn open(folder: &Path) -> candle_paged_attn::Result<SafetensorsWeights> {
    SafetensorsWeights::open(folder, DType::F32, &Device::Cpu)
}

/// A file with this header and `data` zero bytes after it.
fn raw(header: &Value, data: usize) -> Vec<u8> {
    let header = header.to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(vec![0; data]);
    bytes
}

#[test]
fn tensors_are_converted_to_the_compute_dtype() {
    let folder = tempfile::tempdir().unwrap();
    let matrix = tiny::random(&[3, 5], 1);
    let as_dtype = |dtype| matrix.to_dtype(dtype).unwrap();
    let (half, brain) = (as_dtype(DType::F16), as_dtype(DType::BF16));
    let ids = Tensor::new(&[1i64, 2], &Device::Cpu).unwrap();
    let tensors = [
        ("f32", &matrix),
        ("f16", &half),
        ("bf16", &brain),
        ("ids", &ids),
    ];
    tiny::write(folder.path(), SINGLE_FILE, bytes(&tensors));
    let weights = open(folder.path()).unwrap();
    for (name, stored) in &tensors[..3] {
        let expected = stored
            .to_dtype(DType::F32)
            .unwrap()
            .to_vec2::<f32>()
            .unwrap();
        let LinearWeight::Dense(got) = weights.linear(name, 3, 5).unwrap() else {
            panic!("safetensors are dense");
        };
        assert_eq!(got.to_vec2::<f32>().unwrap(), expected, "{name}");
    }
    let got = weights.tensor("f32", &[3, 5], DType::BF16).unwrap();
    assert_eq!(got.dtype(), DType::BF16);

    let shape = weights.tensor("f32", &[5, 3], DType::F32).unwrap_err();
    assert!(
        matches!(&shape, Error::Shape { tensor, got, .. }
            if tensor.starts_with("f32 in ") && got == &[3, 5]),
        "{shape}"
    );
    let missing = weights.tensor("x", &[1], DType::F32).unwrap_err();
    assert!(
        matches!(&missing, Error::Missing { what, .. } if what == "tensor `x`"),
        "{missing}"
    );
    // A tensor that no model asks for does no harm; asking for it is an error.
    let dtype = weights.tensor("ids", &[2], DType::F32).unwrap_err();
    assert!(
        matches!(&dtype, Error::Unsupported { what: "tensor dtype", got, .. }
            if got.contains("I64") && got.contains("`ids`")),
        "{dtype}"
    );
    let compute = SafetensorsWeights::open(folder.path(), DType::I64, &Device::Cpu).unwrap_err();
    assert!(
        matches!(compute, Error::InvalidArgument { .. }),
        "{compute}"
    );
}

#[test]
fn shards_are_found_through_the_index() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (tiny::random(&[2, 2], 1), tiny::random(&[4], 2));
    tiny::write(folder.path(), "one.safetensors", bytes(&[("a", &a)]));
    tiny::write(folder.path(), "two.safetensors", bytes(&[("b", &b)]));
    let index = |map: Value| {
        let index = json!({ "metadata": { "total_size": 32 }, "weight_map": map });
        tiny::write(folder.path(), INDEX_FILE, index.to_string())
    };
    index(json!({ "a": "one.safetensors", "b": "two.safetensors" }));
    let weights = open(folder.path()).unwrap();
    let got = weights.tensor("b", &[4], DType::F32).unwrap();
    assert_eq!(got.to_vec1::<f32>().unwrap(), b.to_vec1::<f32>().unwrap());
    assert!(weights.contains("a") && weights.contains("b"));

    let missing = |map: Value, expected: &str| {
        let path = index(map);
        let error = open(folder.path()).unwrap_err();
        assert!(
            matches!(&error, Error::Missing { place, what }
                if place == &path.display().to_string() && what.contains(expected)),
            "{error}"
        );
    };
    missing(
        json!({ "a": "one.safetensors", "c": "three.safetensors" }),
        "shard three.safetensors",
    );
    missing(
        json!({ "a": "two.safetensors" }),
        "tensor `a` in shard two.safetensors",
    );

    for outside in [
        "../one.safetensors",
        "/etc/passwd",
        "",
        "..",
        "x/one.safetensors",
    ] {
        let path = index(json!({ "a": outside }));
        assert_blames(&open(folder.path()).unwrap_err(), &path);
    }
    let path = tiny::write(folder.path(), INDEX_FILE, "{\"weight_map\": 1}");
    assert_blames(&open(folder.path()).unwrap_err(), &path);
    let path = tiny::write(folder.path(), INDEX_FILE, "{");
    assert_blames(&open(folder.path()).unwrap_err(), &path);

    let nothing = tempfile::tempdir().unwrap();
    let error = open(nothing.path()).unwrap_err();
    assert!(
        matches!(&error, Error::Missing { what, .. }
            if what.contains(SINGLE_FILE) && what.contains(INDEX_FILE)),
        "{error}"
    );
}

#[test]
fn every_truncation_is_an_error_that_names_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let tensor = tiny::random(&[4, 4], 1);
    let sound = bytes(&[("a", &tensor), ("b", &tensor)]);
    for length in 0..sound.len() {
        let path = tiny::write(folder.path(), SINGLE_FILE, &sound[..length]);
        let error = open(folder.path()).expect_err(&format!("{length} bytes were enough"));
        assert_blames(&error, &path);
    }
}

#[test]
fn no_random_damage_panics() {
    let folder = tempfile::tempdir().unwrap();
    let tensor = tiny::random(&[4, 4], 1);
    let sound = bytes(&[("a", &tensor), ("b", &tensor)]);
    let header = sound.len() - 128;
    let mut rng = StdRng::seed_from_u64(3);
    let mut refused = 0;
    for _ in 0..3_000 {
        let mut bytes = sound.clone();
        for _ in 0..rng.random_range(1..3) {
            bytes[rng.random_range(0..header)] = rng.random();
        }
        let path = tiny::write(folder.path(), SINGLE_FILE, bytes);
        match open(folder.path()) {
            Ok(weights) => {
                let names: Vec<String> = weights.tensor_names().map(String::from).collect();
                for name in names {
                    let _either = weights.tensor(&name, &[4, 4], DType::F32);
                }
            }
            Err(error) => {
                refused += 1;
                assert_blames(&error, &path);
            }
        }
    }
    assert!(refused > 1_000, "{refused}");
}

#[test]
fn headers_that_lie_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let entry = |shape: Value, offsets: Value| json!({ "a": { "dtype": "F32", "shape": shape, "data_offsets": offsets } });
    let max = u64::MAX;
    for length in [max, 1 << 40, 100_000_001, 17] {
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend(b"{}              ");
        let path = tiny::write(folder.path(), SINGLE_FILE, bytes);
        assert_blames(&open(folder.path()).unwrap_err(), &path);
    }
    for (what, header) in [
        ("begins after its end", entry(json!([1]), json!([4, 0]))),
        ("past the end", entry(json!([3]), json!([0, 12]))),
        ("far past the end", entry(json!([1]), json!([max - 3, max]))),
        ("negative", entry(json!([1]), json!([-4, 0]))),
        (
            "no dtype",
            json!({ "a": { "shape": [1], "data_offsets": [0, 4] } }),
        ),
        ("not an object", json!({ "a": 1 })),
        ("a list", json!([])),
    ] {
        let path = tiny::write(folder.path(), SINGLE_FILE, raw(&header, 8));
        let error = open(folder.path()).expect_err(what);
        assert_blames(&error, &path);
    }
    // The same bytes under several names: a small file would be a large model.
    let two = |a: [usize; 2], b: [usize; 2]| {
        let entry = |[start, end]: [usize; 2]| json!({ "dtype": "F32", "shape": [(end - start) / 4], "data_offsets": [start, end] });
        let header = json!({ "a": entry(a), "b": entry(b) });
        tiny::write(folder.path(), SINGLE_FILE, raw(&header, 16))
    };
    for (a, b) in [([0, 8], [0, 8]), ([0, 16], [4, 8]), ([8, 16], [0, 12])] {
        let path = two(a, b);
        let error = open(folder.path()).unwrap_err();
        assert_blames(&error, &path);
        assert!(error.to_string().contains("overlap"), "{error}");
    }
    for (a, b) in [([0, 8], [8, 16]), ([4, 4], [0, 16]), ([0, 0], [0, 4])] {
        two(a, b);
        open(folder.path()).unwrap();
    }
    // A shape that its bytes do not fill is found when the tensor is read.
    for (shape, model) in [
        (json!([3]), vec![3]),
        (json!([1u64 << 62, 16]), vec![1 << 62, 16]),
        (
            json!([1u64 << 32, 1u64 << 32, 1]),
            vec![1 << 32, 1 << 32, 1],
        ),
    ] {
        let header = entry(shape, json!([0, 8]));
        let path = tiny::write(folder.path(), SINGLE_FILE, raw(&header, 8));
        let weights = open(folder.path()).unwrap();
        let error = weights.tensor("a", &model, DType::F32).unwrap_err();
        assert_blames(&error, &path);
    }
}

#[test]
fn metadata_in_the_header_is_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let tensor = tiny::random(&[2], 1);
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    let bytes = safetensors::serialize([("a", &tensor)], Some(metadata)).unwrap();
    tiny::write(folder.path(), SINGLE_FILE, bytes);
    let weights = open(folder.path()).unwrap();
    assert_eq!(weights.tensor_names().collect::<Vec<_>>(), ["a"]);
}
