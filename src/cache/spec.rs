//! What a cache is made for: layer groups and the format of their K/V rows.

use candle_core::DType;

use crate::error::{Error, Result};

/// How the K/V rows of a group are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct KvFormat {
    /// Element type: f32, f16 or bf16.
    pub dtype: DType,
}

impl KvFormat {
    /// Rows of `dtype` as they are, neither scaled nor quantised.
    pub fn new(dtype: DType) -> Self {
        Self { dtype }
    }
}

/// Layers that share one block pool, one block table per sequence and one page table per
/// step: the layers of a model with the same window, KV heads and dims.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupSpec {
    /// Layer numbers of the model, ascending.
    pub layers: Vec<usize>,
    /// Keys a query sees, itself included; `None` sees the whole context.
    pub window: Option<usize>,
    /// KV heads of each layer.
    pub kv_heads: usize,
    /// Dimension of a key head.
    pub k_dim: usize,
    /// Dimension of a value head.
    pub v_dim: usize,
    /// How the rows are stored.
    pub format: KvFormat,
}

/// The layer groups of a model. See [`CacheSpec::uniform`] for the usual case.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheSpec {
    /// The groups; every layer is in exactly one.
    pub groups: Vec<GroupSpec>,
}

/// K/V geometry of one layer, from which [`CacheSpec::from_layers`] forms the groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerShape {
    /// Keys a query sees, itself included; `None` sees the whole context.
    pub window: Option<usize>,
    /// KV heads.
    pub kv_heads: usize,
    /// Dimension of a key head.
    pub k_dim: usize,
    /// Dimension of a value head.
    pub v_dim: usize,
}

const OP: &str = "cache_spec";

/// More layers than any model has: a number beyond it is a mistake, refused before memory for
/// so many is asked for.
const MAX_LAYERS: usize = 10_000;

fn check_layers(layers: usize) -> Result<()> {
    if (1..=MAX_LAYERS).contains(&layers) {
        return Ok(());
    }
    Err(Error::InvalidArgument {
        op: OP,
        what: "layers".into(),
        expected: format!("1 to {MAX_LAYERS}"),
        got: layers.to_string(),
    })
}

impl CacheSpec {
    /// One group: `layers` equal layers of full attention with K and V of `dim`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a zero or an unsupported dtype.
    pub fn uniform(layers: usize, kv_heads: usize, dim: usize, dtype: DType) -> Result<Self> {
        check_layers(layers)?;
        let shape = LayerShape {
            window: None,
            kv_heads,
            k_dim: dim,
            v_dim: dim,
        };
        Self::from_layers(&vec![shape; layers], dtype)
    }

    /// Groups the layers of a model by window, KV heads and dims, in the order in which each
    /// combination first appears.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no layer, a zero, or a dtype other than f32, f16, bf16.
    pub fn from_layers(layers: &[LayerShape], dtype: DType) -> Result<Self> {
        check_layers(layers.len())?;
        let mut groups: Vec<GroupSpec> = Vec::new();
        for (number, layer) in layers.iter().enumerate() {
            let same = |g: &&mut GroupSpec| {
                (g.window, g.kv_heads, g.k_dim, g.v_dim)
                    == (layer.window, layer.kv_heads, layer.k_dim, layer.v_dim)
            };
            match groups.iter_mut().find(same) {
                Some(group) => group.layers.push(number),
                None => groups.push(GroupSpec {
                    layers: vec![number],
                    window: layer.window,
                    kv_heads: layer.kv_heads,
                    k_dim: layer.k_dim,
                    v_dim: layer.v_dim,
                    format: KvFormat::new(dtype),
                }),
            }
        }
        let spec = Self { groups };
        spec.check()?;
        Ok(spec)
    }

    /// Checks every group and that each layer from 0 is in exactly one.
    pub(crate) fn check(&self) -> Result<()> {
        let refuse = |what: &str, expected: &str, got: String| {
            Err(Error::InvalidArgument {
                op: OP,
                what: what.into(),
                expected: expected.into(),
                got,
            })
        };
        let mut layers: Vec<usize> = self
            .groups
            .iter()
            .flat_map(|g| g.layers.iter().copied())
            .collect();
        layers.sort_unstable();
        if layers.is_empty() || !layers.iter().copied().eq(0..layers.len()) {
            return refuse(
                "layers",
                "each layer from 0 in exactly one group",
                format!("{layers:?}"),
            );
        }
        for group in &self.groups {
            if group.layers.is_empty() || group.window == Some(0) {
                return refuse(
                    "group",
                    "at least one layer and a window of at least 1",
                    format!("{group:?}"),
                );
            }
            if group.kv_heads == 0 {
                return refuse("kv_heads", "at least 1", "0".into());
            }
            for (name, dim) in [("k_dim", group.k_dim), ("v_dim", group.v_dim)] {
                if dim == 0 || dim % 8 != 0 || dim > 512 {
                    return refuse(name, "a multiple of 8 up to 512", dim.to_string());
                }
            }
            if !matches!(group.format.dtype, DType::F32 | DType::F16 | DType::BF16) {
                return refuse(
                    "dtype",
                    "f32, f16 or bf16",
                    format!("{:?}", group.format.dtype),
                );
            }
        }
        Ok(())
    }

    /// Number of layers of the model.
    pub fn num_layers(&self) -> usize {
        self.groups.iter().map(|g| g.layers.len()).sum()
    }
}

impl GroupSpec {
    /// Bytes of K and V of one token in all layers of the group, `None` if that overflows.
    pub fn bytes_per_token(&self) -> Option<u64> {
        let elements = (self.k_dim as u64).checked_add(self.v_dim as u64)?;
        elements
            .checked_mul(self.kv_heads as u64)?
            .checked_mul(self.layers.len() as u64)?
            .checked_mul(self.format.dtype.size_in_bytes() as u64)
    }
}
