//! What a sound GGUF gives, and that no damaged one is taken for sound.

use std::collections::HashMap;

use candle_core::{
    DType, Device,
    quantized::{GgmlDType, QTensor, gguf_file::Value},
};
use candle_paged_attn::{
    Error,
    load::{
        gguf::{GgufFile, GgufWeights},
        tokenizer,
    },
    models::{LinearWeight, WeightSource},
};
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::{assert_blames, tiny};

fn open(metadata: &[(&str, Value)], tensors: &[(&str, QTensor)]) -> (tempfile::TempDir, GgufFile) {
    let folder = tempfile::tempdir().unwrap();
    let metadata = metadata
        .iter()
        .map(|(key, value)| (key.to_string(), value.clone()))
        .collect();
    let path = tiny::write(
        folder.path(),
        "t.gguf",
        tiny::gguf_bytes(&metadata, tensors),
    );
    let file = GgufFile::open(path).unwrap();
    (folder, file)
}

#[test]
fn metadata_of_any_integer_width_and_typed_errors() {
    let (_folder, file) = open(
        &[
            ("u8", Value::U8(200)),
            ("i8", Value::I8(100)),
            ("u16", Value::U16(60_000)),
            ("i16", Value::I16(30_000)),
            ("u32", Value::U32(4_000_000_000)),
            ("i32", Value::I32(2_000_000_000)),
            ("u64", Value::U64(4_000_000_000)),
            ("i64", Value::I64(7)),
            ("negative", Value::I32(-1)),
            ("large", Value::U64(1 << 32)),
            ("f32", Value::F32(1.5)),
            ("f64", Value::F64(2.5)),
            ("bool", Value::Bool(true)),
            ("text", Value::String("héllo".into())),
            ("list", tiny::strings(&["a", "b"])),
            ("numbers", Value::Array(vec![Value::I32(3), Value::I32(4)])),
        ],
        &[],
    );
    for (key, expected) in [
        ("u8", 200),
        ("i8", 100),
        ("u16", 60_000),
        ("i16", 30_000),
        ("u32", 4_000_000_000),
        ("i32", 2_000_000_000),
        ("u64", 4_000_000_000),
        ("i64", 7),
    ] {
        assert_eq!(file.u32(key).unwrap(), expected, "{key}");
    }
    assert_eq!(file.f32("f32").unwrap(), 1.5);
    assert_eq!(file.f32("f64").unwrap(), 2.5);
    assert!(file.bool("bool").unwrap());
    assert_eq!(file.string("text").unwrap(), "héllo");
    assert_eq!(file.strings("list").unwrap(), ["a", "b"]);
    assert_eq!(file.array("numbers").unwrap().len(), 2);
    assert_eq!(file.optional("absent", GgufFile::u32).unwrap(), None);
    assert_eq!(file.optional("u8", GgufFile::u32).unwrap(), Some(200));

    let wrong = [
        file.u32("negative").unwrap_err(),
        file.u32("large").unwrap_err(),
        file.u32("text").unwrap_err(),
        file.f32("u8").unwrap_err(),
        file.bool("u8").unwrap_err(),
        file.string("u8").unwrap_err(),
        file.array("u8").unwrap_err(),
        file.strings("numbers").unwrap_err(),
        file.optional("text", GgufFile::u32).unwrap_err(),
    ];
    for error in &wrong {
        assert_blames(error, file.path());
    }
    assert!(wrong[0].to_string().contains("`negative`"), "{}", wrong[0]);
    let missing = file.u32("absent").unwrap_err();
    assert!(
        matches!(&missing, Error::Missing { place, what }
            if what.contains("`absent`") && place.ends_with("t.gguf")),
        "{missing}"
    );
}

#[test]
fn tensors_keep_their_blocks_unless_a_dtype_is_given() {
    let matrix = tiny::random(&[4, 64], 1);
    let vector = tiny::random(&[5], 2);
    let stored = QTensor::quantize(&matrix, GgmlDType::Q8_0).unwrap();
    let expected: Vec<Vec<f32>> = stored.dequantize(&Device::Cpu).unwrap().to_vec2().unwrap();
    let bytes = stored.data().unwrap().to_vec();
    let half = QTensor::quantize(&matrix, GgmlDType::F16).unwrap();
    let tensors = [
        ("v", QTensor::quantize(&vector, GgmlDType::F32).unwrap()),
        ("m", stored),
        ("h", half),
    ];
    let (_folder, file) = open(&[], &tensors);
    let path = file.path().to_path_buf();
    let kept = GgufWeights::new(file, None, &Device::Cpu).unwrap();
    assert!(kept.contains("m") && !kept.contains("x"));

    let LinearWeight::Quantized(m) = kept.linear("m", 4, 64).unwrap() else {
        panic!("dequantised without a dtype");
    };
    assert_eq!(m.dtype(), GgmlDType::Q8_0);
    assert_eq!(m.shape().dims(), [4, 64]);
    assert_eq!(m.data().unwrap(), bytes);
    // Not a block format: dense, in f32, with the rounding of f16 only.
    let LinearWeight::Dense(h) = kept.linear("h", 4, 64).unwrap() else {
        panic!("f16 is not quantised");
    };
    assert_eq!(h.dtype(), DType::F32);
    let rounded = matrix
        .to_dtype(DType::F16)
        .unwrap()
        .to_dtype(DType::F32)
        .unwrap();
    assert_eq!(
        h.to_vec2::<f32>().unwrap(),
        rounded.to_vec2::<f32>().unwrap()
    );

    let v = kept.tensor("v", &[5], DType::F32).unwrap();
    assert_eq!(
        v.to_vec1::<f32>().unwrap(),
        vector.to_vec1::<f32>().unwrap()
    );
    assert_eq!(
        kept.tensor("v", &[5], DType::BF16).unwrap().dtype(),
        DType::BF16
    );

    let dense = GgufWeights::new(
        GgufFile::open(&path).unwrap(),
        Some(DType::F32),
        &Device::Cpu,
    );
    let LinearWeight::Dense(m) = dense.unwrap().linear("m", 4, 64).unwrap() else {
        panic!("still quantised");
    };
    assert_eq!(m.to_vec2::<f32>().unwrap(), expected);

    let shape = kept.linear("m", 64, 4).unwrap_err();
    assert!(
        matches!(&shape, Error::Shape { tensor, got, .. }
            if tensor.starts_with("m in ") && got == &[4, 64]),
        "{shape}"
    );
    let missing = kept.tensor("x", &[1], DType::F32).unwrap_err();
    assert!(
        matches!(&missing, Error::Missing { what, .. } if what == "tensor `x`"),
        "{missing}"
    );
    let file = GgufFile::open(&path).unwrap();
    let dtype = GgufWeights::new(file, Some(DType::U8), &Device::Cpu).unwrap_err();
    assert!(matches!(dtype, Error::InvalidArgument { .. }), "{dtype}");
}

/// A whole tiny model, with no padding after the last tensor: cutting a byte loses something.
fn whole() -> Vec<u8> {
    tiny::gguf_bytes(&tiny::llama_metadata(), &tiny::llama_tensors())
}

#[test]
fn every_truncation_is_an_error_that_names_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = whole();
    let path = tiny::write(folder.path(), "whole.gguf", &bytes);
    GgufFile::open(&path).unwrap();
    // Each length in the header, which is where lengths and types are; sparsely in the data.
    let header = 12_000.min(bytes.len());
    let lengths = (0..header)
        .step_by(3)
        .chain((header..bytes.len()).step_by(997));
    let path = folder.path().join("cut.gguf");
    for length in lengths.chain([bytes.len() - 1]) {
        std::fs::write(&path, &bytes[..length]).unwrap();
        let error = GgufFile::open(&path).expect_err(&format!("{length} bytes were enough"));
        assert_blames(&error, &path);
    }
}

#[test]
fn no_random_damage_panics() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("damaged.gguf");
    let sound = whole();
    let mut rng = StdRng::seed_from_u64(7);
    let (mut refused, mut taken) = (0, 0);
    for round in 0..2_000 {
        let mut bytes = sound.clone();
        // Mostly in the first bytes and in the tensor table, where a byte decides most.
        let end = if round % 2 == 0 { 200 } else { 12_000 };
        for _ in 0..rng.random_range(1..4) {
            let at = rng.random_range(0..end);
            bytes[at] = rng.random();
        }
        std::fs::write(&path, &bytes).unwrap();
        match GgufFile::open(&path) {
            Ok(file) => {
                taken += 1;
                for name in file.tensor_names() {
                    file.tensor(name, &Device::Cpu).unwrap();
                }
                let _either = tokenizer::from_gguf(&file);
            }
            Err(error) => {
                refused += 1;
                assert!(error.to_string().contains("damaged.gguf"), "{error}");
            }
        }
    }
    assert!(
        refused > 100 && taken > 100,
        "{refused} refused, {taken} taken"
    );
}

#[test]
fn a_missing_file_a_folder_and_an_empty_file_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing.gguf");
    let error = GgufFile::open(&missing).unwrap_err();
    assert!(
        matches!(&error, Error::Io { path, .. } if path == &missing),
        "{error}"
    );
    let empty = tiny::write(folder.path(), "empty.gguf", []);
    assert_blames(&GgufFile::open(&empty).unwrap_err(), &empty);
    // What opening a folder answers depends on the operating system; never success.
    assert!(GgufFile::open(folder.path()).is_err());
    let zeros = HashMap::from([("k".to_string(), Value::U8(0))]);
    let trailing = [tiny::gguf_bytes(&zeros, &[]), vec![0; 100]].concat();
    let path = tiny::write(folder.path(), "trailing.gguf", trailing);
    GgufFile::open(path).unwrap();
}
