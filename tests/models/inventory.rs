//! What `check_weights` checks is what the decoder reads, for every family in both layouts:
//! no tensor of a model is found missing only when others have been read.

use std::cell::RefCell;
use std::collections::BTreeSet;

use candle_core::{DType, Device, Tensor};
use candle_paged_attn::Result;
use candle_paged_attn::load::gguf::GgufWeights;
use candle_paged_attn::load::safetensors::SafetensorsWeights;
use candle_paged_attn::models::{Decoder, LinearWeight, ModelSpec, WeightSource, spec_from_gguf};

use crate::families_gguf;
use crate::golden::{Golden, NAMES};

type Asked = RefCell<BTreeSet<(String, Vec<usize>)>>;

/// Weights that note what they are asked for.
struct Noted<'a> {
    weights: &'a dyn WeightSource,
    checked: Asked,
    read: Asked,
}

impl<'a> Noted<'a> {
    fn new(weights: &'a dyn WeightSource) -> Self {
        Self {
            weights,
            checked: Asked::default(),
            read: Asked::default(),
        }
    }

    fn note(asked: &Asked, name: &str, shape: &[usize]) {
        asked.borrow_mut().insert((name.into(), shape.to_vec()));
    }
}

impl WeightSource for Noted<'_> {
    fn place(&self) -> String {
        self.weights.place()
    }

    fn contains(&self, name: &str) -> bool {
        self.weights.contains(name)
    }

    fn names(&self) -> Vec<&str> {
        self.weights.names()
    }

    fn check(&self, name: &str, shape: &[usize]) -> Result<()> {
        Self::note(&self.checked, name, shape);
        self.weights.check(name, shape)
    }

    fn tensor(&self, name: &str, shape: &[usize], dtype: DType) -> Result<Tensor> {
        Self::note(&self.read, name, shape);
        self.weights.tensor(name, shape, dtype)
    }

    fn linear(&self, name: &str, out: usize, inp: usize) -> Result<LinearWeight> {
        Self::note(&self.read, name, &[out, inp]);
        self.weights.linear(name, out, inp)
    }

    fn stacked(&self, name: &str, count: usize, out: usize, inp: usize) -> Result<LinearWeight> {
        Self::note(&self.read, name, &[count, out, inp]);
        self.weights.stacked(name, count, out, inp)
    }
}

fn assert_checks_what_it_reads(name: &str, spec: ModelSpec, weights: &dyn WeightSource) {
    let noted = Noted::new(weights);
    let count = spec.check_weights(&noted).unwrap();
    assert!(noted.read.borrow().is_empty(), "{name}: the check reads");
    let checked = noted.checked.take();
    assert_eq!(count, checked.len(), "{name}");
    Decoder::load(spec, &noted, DType::F32, &Device::Cpu).unwrap();
    assert_eq!(noted.read.take(), checked, "{name}");
}

#[test]
fn every_tensor_that_is_read_has_been_checked() {
    for name in NAMES {
        let golden = Golden::read(name);
        let folder = tempfile::tempdir().unwrap();
        golden.write(folder.path());
        let weights = SafetensorsWeights::open(folder.path(), DType::F32, &Device::Cpu).unwrap();
        assert_checks_what_it_reads(name, golden.spec(), &weights);
    }
    for (name, arch) in families_gguf::CASES {
        let (_folder, file) = families_gguf::file(&Golden::read(name), arch);
        let spec = spec_from_gguf(file.metadata(), "tiny.gguf").unwrap();
        let weights = GgufWeights::new(file, None, &Device::Cpu).unwrap();
        assert_checks_what_it_reads(arch, spec, &weights);
    }
}

/// One tensor after the other is taken away, or is another one's: nothing is read before that
/// is found.
#[test]
fn no_weight_is_read_of_a_checkpoint_that_lacks_one() {
    for name in ["llama", "gemma3", "gpt_oss", "qwen2_moe", "phi"] {
        let golden = Golden::read(name);
        let spec = golden.spec();
        let sound = golden.weights();
        for lost in sound.0.keys() {
            let mut weights = sound.clone();
            weights.0.remove(lost);
            let noted = Noted::new(&weights);
            let error = Decoder::load(spec.clone(), &noted, DType::F32, &Device::Cpu).unwrap_err();
            assert!(error.to_string().contains(lost), "{name}: {error}");
            assert!(noted.read.borrow().is_empty(), "{name} without {lost}");
        }
    }
}
