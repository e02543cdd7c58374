//! Folders with safetensors files.
//!
//! The header is read here rather than by the `safetensors` crate so that an error names the
//! file and the tensor, and so that tensors of dtypes we cannot run do no harm until a model
//! asks for them.

use std::{
    collections::{BTreeSet, HashMap},
    path::{Path, PathBuf},
};

use candle_core::{DType, Device, Tensor};
use serde::Deserialize;

use super::{check_dtype, check_shape, json, missing_tensor, mmap::Mapped, overlap};
use crate::{
    error::{Error, Result},
    models::{LinearWeight, WeightSource},
};

/// The file of an unsharded checkpoint.
pub const SINGLE_FILE: &str = "model.safetensors";
/// The index of a sharded checkpoint.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
/// The format's own limit.
const MAX_HEADER: u64 = 100_000_000;

/// The tensors of a checkpoint folder, memory-mapped.
#[derive(Debug)]
pub struct SafetensorsWeights {
    /// What errors about the whole name: the single file or the index.
    path: PathBuf,
    shards: Vec<Shard>,
    /// Tensor name to its shard.
    index: HashMap<String, usize>,
    dtype: DType,
    device: Device,
}

impl SafetensorsWeights {
    /// Opens [`SINGLE_FILE`], or else every shard that [`INDEX_FILE`] lists. Matrices are
    /// converted to `dtype` (f32, f16 or bf16) when they are loaded. The files must not be
    /// changed while they are open.
    ///
    /// # Errors
    /// [`Error::Missing`] if neither file, or a shard or tensor of the index, is there;
    /// [`Error::Format`] for a truncated or contradictory header; [`Error::InvalidArgument`]
    /// for another dtype.
    pub fn open(folder: impl AsRef<Path>, dtype: DType, device: &Device) -> Result<Self> {
        let folder = folder.as_ref();
        let single = folder.join(SINGLE_FILE);
        let index_file = folder.join(INDEX_FILE);
        let (path, (shards, index)) = if single.exists() {
            let shard = Shard::open(&single)?;
            let index = shard.tensors.keys().map(|name| (name.clone(), 0)).collect();
            (single, (vec![shard], index))
        } else if index_file.exists() {
            (index_file, open_shards(folder)?)
        } else {
            return Err(Error::Missing {
                place: folder.display().to_string(),
                what: format!("{SINGLE_FILE} or {INDEX_FILE}"),
            });
        };
        Ok(Self {
            path,
            shards,
            index,
            dtype: check_dtype(dtype)?,
            device: device.clone(),
        })
    }

    /// Names of all tensors, in no order.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.index.keys().map(String::as_str)
    }

    /// A tensor of this shape: how it is stored, and its bytes.
    fn find(&self, name: &str, shape: &[usize]) -> Result<(DType, &[u8])> {
        let shard = self.index.get(name).and_then(|&i| self.shards.get(i));
        let Some((shard, entry)) = shard.and_then(|s| Some((s, s.tensors.get(name)?))) else {
            return Err(missing_tensor(name, self.place()));
        };
        check_shape(name, &shard.path.display().to_string(), shape, &entry.shape)?;
        shard.bytes(name, entry)
    }
}

impl WeightSource for SafetensorsWeights {
    fn place(&self) -> String {
        self.path.display().to_string()
    }

    fn contains(&self, name: &str) -> bool {
        self.index.contains_key(name)
    }

    fn names(&self) -> Vec<&str> {
        self.tensor_names().collect()
    }

    fn check(&self, name: &str, shape: &[usize]) -> Result<()> {
        self.find(name, shape).map(|_| ())
    }

    fn tensor(&self, name: &str, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let (stored, bytes) = self.find(name, shape)?;
        let tensor = Tensor::from_raw_buffer(bytes, stored, shape, &self.device)?;
        Ok(tensor.to_dtype(dtype)?)
    }

    fn linear(&self, name: &str, out: usize, inp: usize) -> Result<LinearWeight> {
        let dense = self.tensor(name, &[out, inp], self.dtype)?;
        Ok(LinearWeight::Dense(dense))
    }
}

/// The files that an index lists: `weight_map` from tensor to file name.
pub(super) fn shard_names(index: &Path) -> Result<HashMap<String, String>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: HashMap<String, String>,
    }
    let Index { weight_map } = json::read(index)?;
    // A name with a folder in it could reach outside of the checkpoint.
    match weight_map.values().find(|name| {
        let mut parts = Path::new(name).components();
        !matches!(
            (parts.next(), parts.next()),
            (Some(std::path::Component::Normal(_)), None)
        )
    }) {
        Some(name) => Err(Error::Format {
            path: index.into(),
            what: format!("weight_map: expected plain file names, got `{name}`"),
        }),
        None => Ok(weight_map),
    }
}

fn open_shards(folder: &Path) -> Result<(Vec<Shard>, HashMap<String, usize>)> {
    let index_path = folder.join(INDEX_FILE);
    let weight_map = shard_names(&index_path)?;
    let files: Vec<&String> = BTreeSet::from_iter(weight_map.values())
        .into_iter()
        .collect();
    let missing = |what: String| Error::Missing {
        place: index_path.display().to_string(),
        what,
    };
    let mut shards = Vec::new();
    for file in &files {
        let path = folder.join(file);
        if !path.exists() {
            return Err(missing(format!("shard {file}, which it lists")));
        }
        shards.push(Shard::open(&path)?);
    }
    let mut index = HashMap::new();
    for (name, file) in &weight_map {
        let number = files.partition_point(|f| *f < file);
        let there = shards
            .get(number)
            .is_some_and(|shard| shard.tensors.contains_key(name));
        if !there {
            return Err(missing(format!("tensor `{name}` in shard {file}")));
        }
        index.insert(name.clone(), number);
    }
    Ok((shards, index))
}

/// One open file.
#[derive(Debug)]
struct Shard {
    path: PathBuf,
    map: Mapped,
    data_start: usize,
    tensors: HashMap<String, Entry>,
}

/// A tensor as the header lists it.
#[derive(Debug, Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    /// Begin and end, counted from the end of the header.
    data_offsets: [usize; 2],
}

#[derive(Deserialize)]
struct Header {
    #[serde(rename = "__metadata__", default)]
    _metadata: serde::de::IgnoredAny,
    #[serde(flatten)]
    tensors: HashMap<String, Entry>,
}

impl Shard {
    fn open(path: &Path) -> Result<Self> {
        let bad = |what: String| Error::Format {
            path: path.into(),
            what,
        };
        let map = Mapped::open(path)?;
        let (length, rest) = map
            .split_first_chunk::<8>()
            .ok_or_else(|| bad("shorter than the length of a safetensors header".into()))?;
        let length = u64::from_le_bytes(*length);
        let header = usize::try_from(length)
            .ok()
            .filter(|_| length <= MAX_HEADER)
            .and_then(|length| rest.get(..length))
            .ok_or_else(|| {
                bad(format!(
                    "truncated or corrupt: a header of {length} bytes in a file of {} \
                     (at most {MAX_HEADER} are allowed)",
                    map.len()
                ))
            })?;
        let Header { tensors, .. } =
            serde_json::from_slice(header).map_err(|e| bad(format!("safetensors header: {e}")))?;
        let data_start = 8 + header.len();
        let data_len = map.len() - data_start;
        for (name, entry) in &tensors {
            let [start, end] = entry.data_offsets;
            if start > end || end > data_len {
                return Err(bad(format!(
                    "truncated or corrupt: tensor `{name}` lies at bytes {start} to {end} of \
                     {data_len} bytes of data"
                )));
            }
        }
        let places = tensors.iter().map(|(name, entry)| {
            let [start, end] = entry.data_offsets;
            (name.as_str(), start..end)
        });
        if let Some(overlap) = overlap(places) {
            return Err(bad(overlap));
        }
        Ok(Self {
            path: path.into(),
            map,
            data_start,
            tensors,
        })
    }

    /// The stored dtype and bytes of a tensor, of which there are exactly as many as its shape
    /// needs.
    fn bytes(&self, name: &str, entry: &Entry) -> Result<(DType, &[u8])> {
        let dtype = match entry.dtype.as_str() {
            "F32" => DType::F32,
            "F16" => DType::F16,
            "BF16" => DType::BF16,
            other => {
                return Err(Error::Unsupported {
                    what: "tensor dtype",
                    got: format!("{other} of `{name}` in {}", self.path.display()),
                    supported: "F32, F16, BF16".into(),
                });
            }
        };
        let [start, end] = entry.data_offsets;
        let needed = entry
            .shape
            .iter()
            .try_fold(dtype.size_in_bytes(), |n, &dim| n.checked_mul(dim));
        let bytes = self
            .map
            .get(self.data_start..)
            .and_then(|data| data.get(start..end))
            .filter(|bytes| needed == Some(bytes.len()));
        bytes
            .map(|bytes| (dtype, bytes))
            .ok_or_else(|| Error::Format {
                path: self.path.clone(),
                what: format!(
                    "tensor `{name}`: shape {:?} of {} does not fill bytes {start} to {end}",
                    entry.shape, entry.dtype
                ),
            })
    }
}
