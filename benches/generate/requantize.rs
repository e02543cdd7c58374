//! The model's GGUF with every matrix in another type.

use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use anyhow::Result;
use candle_core::Device;
use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};

/// ggml's numbers of files that are mostly of a type.
const FILE_TYPE_Q8_0: u32 = 7;
const FILE_TYPE_F32: u32 = 0;

/// [`requantize`] to Q8_0.
pub fn to_q8_0(from: &Path, to: &Path) -> Result<()> {
    requantize(from, to, GgmlDType::Q8_0)
}

/// Writes `from` to `to`, matrices dequantised and quantised again to Q8_0 or F32 (those that
/// are already as they are), vectors and metadata copied.
pub fn requantize(from: &Path, to: &Path, dtype: GgmlDType) -> Result<()> {
    let mut file = File::open(from)?;
    let mut content = gguf_file::Content::read(&mut file)?;
    let file_type = Value::U32(match dtype {
        GgmlDType::Q8_0 => FILE_TYPE_Q8_0,
        _ => FILE_TYPE_F32,
    });
    content
        .metadata
        .insert("general.file_type".into(), file_type);
    let mut names: Vec<&String> = content.tensor_infos.keys().collect();
    names.sort();
    let tensors = names
        .into_iter()
        .map(|name| {
            let tensor = content.tensor(&mut file, name, &Device::Cpu)?;
            let is_matrix = tensor.rank() == 2;
            if !is_matrix || tensor.dtype() == dtype {
                return Ok((name.as_str(), tensor));
            }
            let dense = tensor.dequantize(&Device::Cpu)?;
            Ok((name.as_str(), QTensor::quantize(&dense, dtype)?))
        })
        .collect::<Result<Vec<_>>>()?;
    let metadata: Vec<(&str, &Value)> = content
        .metadata
        .iter()
        .map(|(key, value)| (key.as_str(), value))
        .collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(name, t)| (*name, t)).collect();
    let mut out = BufWriter::new(File::create(to)?);
    gguf_file::write(&mut out, &metadata, &tensors)?;
    out.into_inner()?;
    Ok(())
}
