//! A linear layer computes the same function at any number of rows.

use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_paged_attn::Error;
use candle_paged_attn::models::{Linear, LinearWeight};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::checkpoint::distance;

fn random(seed: u64, rows: usize, columns: usize) -> Tensor {
    let mut rng = StdRng::seed_from_u64(seed);
    let values: Vec<f32> = (0..rows * columns)
        .map(|_| rng.random_range(-1.0..1.0))
        .collect();
    Tensor::from_vec(values, (rows, columns), &Device::Cpu).unwrap()
}

fn linear(weight: &Tensor, dtype: Option<GgmlDType>, bias: Option<Tensor>) -> Linear {
    let weight = match dtype {
        None => LinearWeight::Dense(weight.clone()),
        Some(dtype) => LinearWeight::Quantized(Arc::new(QTensor::quantize(weight, dtype).unwrap())),
    };
    Linear::new(weight, bias, DType::F32, &Device::Cpu).unwrap()
}

/// Out sizes with and without a rest by 16, in sizes with and without a rest by 256: each of
/// them makes candle choose another kernel. The last is large enough that a single dense row
/// is computed in pieces, the last of them smaller.
const SHAPES: [(usize, usize); 5] = [(48, 512), (50, 256), (48, 288), (23, 96), (1003, 512)];

fn assert_row_rule(dtype: Option<GgmlDType>) {
    for (out, inp) in SHAPES {
        if dtype.is_some_and(|dtype| inp % dtype.block_size() != 0) {
            continue;
        }
        let layer = linear(&random(1, out, inp), dtype, None);
        let x = random(2, 130, inp);
        let alone: Vec<Vec<f32>> = (0..130)
            .map(|row| {
                let y = layer.forward(&x.narrow(0, row, 1).unwrap()).unwrap();
                y.to_vec2().unwrap().remove(0)
            })
            .collect();
        for rows in [2, 3, 4, 17, 64, 130] {
            let batch = layer.forward(&x.narrow(0, 0, rows).unwrap()).unwrap();
            let far = distance(&batch.to_vec2().unwrap(), &alone[..rows]);
            assert!(far <= 1e-5, "{dtype:?} {out}x{inp}, {rows} rows: {far}");
        }
    }
}

#[test]
fn rows_alone_equal_rows_of_a_batch_f32() {
    assert_row_rule(None);
}

#[test]
fn rows_alone_equal_rows_of_a_batch_q4_0() {
    assert_row_rule(Some(GgmlDType::Q4_0));
}

#[test]
fn rows_alone_equal_rows_of_a_batch_q4_1() {
    assert_row_rule(Some(GgmlDType::Q4_1));
}

#[test]
fn rows_alone_equal_rows_of_a_batch_q5_0() {
    assert_row_rule(Some(GgmlDType::Q5_0));
}

#[test]
fn rows_alone_equal_rows_of_a_batch_q8_0() {
    assert_row_rule(Some(GgmlDType::Q8_0));
}

#[test]
fn rows_alone_equal_rows_of_a_batch_q4k() {
    assert_row_rule(Some(GgmlDType::Q4K));
}

#[test]
fn rows_alone_equal_rows_of_a_batch_q5k() {
    assert_row_rule(Some(GgmlDType::Q5K));
}

#[test]
fn rows_alone_equal_rows_of_a_batch_q6k() {
    assert_row_rule(Some(GgmlDType::Q6K));
}

/// `x @ weightᵀ + bias` in f64.
fn reference(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Vec<Vec<f32>> {
    let x = x.to_dtype(DType::F64).unwrap();
    let y = x.matmul(&weight.to_dtype(DType::F64).unwrap().t().unwrap());
    let y = y
        .unwrap()
        .broadcast_add(&bias.to_dtype(DType::F64).unwrap());
    y.unwrap().to_dtype(DType::F32).unwrap().to_vec2().unwrap()
}

#[test]
fn equals_f64_with_a_bias() {
    let (weight, bias) = (random(3, 48, 512), random(4, 1, 48).squeeze(0).unwrap());
    for (dtype, tolerance) in [
        (None, 1e-6),
        // One rounding of the activations to 8 bits per block; the weights are the stored ones.
        (Some(GgmlDType::Q8_0), 1e-2),
        (Some(GgmlDType::Q4K), 1e-2),
    ] {
        let layer = linear(&weight, dtype, Some(bias.clone()));
        let stored = match dtype {
            None => weight.clone(),
            Some(dtype) => QTensor::quantize(&weight, dtype)
                .unwrap()
                .dequantize(&Device::Cpu)
                .unwrap(),
        };
        for rows in [1, 5, 100] {
            let x = random(5, rows, 512);
            let got = layer.forward(&x).unwrap().to_vec2().unwrap();
            let far = distance(&got, &reference(&x, &stored, &bias));
            assert!(far <= tolerance, "{dtype:?}, {rows} rows: {far}");
        }
    }
}

/// Dense 16-bit weights, and GGML weights with 16-bit rows: the result has the dtype of x and
/// is as good as it allows.
#[test]
fn a_bias_of_another_shape_is_refused() {
    for shape in [&[1][..], &[5], &[1, 4], &[]] {
        let bias = Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap();
        let weight = LinearWeight::Dense(random(1, 4, 8));
        let error = Linear::new(weight, Some(bias), DType::F32, &Device::Cpu).unwrap_err();
        assert!(
            matches!(&error, Error::Shape { tensor, expected, got, .. }
                if tensor == "bias" && expected == "[4]" && got == shape),
            "{error}"
        );
    }
}

#[test]
fn sixteen_bit_rows_keep_their_dtype() {
    let weight = random(6, 24, 64);
    let zero = Tensor::zeros(24, DType::F32, &Device::Cpu).unwrap();
    for (dtype, tolerance) in [(DType::F16, 2e-3), (DType::BF16, 1e-2)] {
        for (stored_as, tolerance) in [
            (None, tolerance),
            (Some(GgmlDType::F16), tolerance),
            (Some(GgmlDType::Q8_0), tolerance + 1e-2),
        ] {
            let (layer, stored) = match stored_as {
                None => (
                    LinearWeight::Dense(weight.clone()),
                    weight.to_dtype(dtype).unwrap(),
                ),
                Some(kind) => {
                    let quantized = QTensor::quantize(&weight, kind).unwrap();
                    let stored = quantized.dequantize(&Device::Cpu).unwrap();
                    (LinearWeight::Quantized(Arc::new(quantized)), stored)
                }
            };
            let layer = Linear::new(layer, None, dtype, &Device::Cpu).unwrap();
            for rows in [1, 4, 70] {
                let x = random(7, rows, 64).to_dtype(dtype).unwrap();
                let got = layer.forward(&x).unwrap();
                assert_eq!(got.dtype(), dtype);
                let got = got.to_dtype(DType::F32).unwrap().to_vec2().unwrap();
                let far = distance(&got, &reference(&x, &stored, &zero));
                assert!(
                    far <= tolerance,
                    "{dtype:?} {stored_as:?}, {rows} rows: {far}"
                );
            }
        }
    }
}
