//! The compiled kernels: embedded in the binary, loaded once per device.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::CUfunction_attribute_enum;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaFunction, CudaModule};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;

use crate::error::Result;
use crate::ops::launch::Launch;

/// `kernels/paged_attn.cu` for every architecture that `build.rs` chose.
static FATBIN: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/paged_attn.fatbin"));

/// Dynamic shared memory that a block has without asking, in bytes.
const SHARED_MEMORY: u32 = 48 * 1024;

/// The kernels in one context.
#[derive(Debug)]
pub(super) struct Kernels {
    module: Arc<CudaModule>,
    functions: Mutex<HashMap<String, CudaFunction>>,
}

impl Kernels {
    /// The kernels in `context`, loaded by the first call. They stay loaded: a process has one
    /// context per GPU, which all of candle's devices share.
    pub(super) fn of(context: &Arc<CudaContext>) -> Result<Arc<Self>> {
        static LOADED: Mutex<Vec<(usize, Arc<Kernels>)>> = Mutex::new(Vec::new());
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let key = context.cu_ctx() as usize;
        if let Some((_, kernels)) = loaded.iter().find(|(k, _)| *k == key) {
            return Ok(kernels.clone());
        }
        let kernels = Arc::new(Self {
            module: context.load_module(Ptx::from_binary(FATBIN.to_vec())).w()?,
            functions: Mutex::default(),
        });
        loaded.push((key, kernels.clone()));
        Ok(kernels)
    }

    /// The entry point of a launch, ready for its shared memory (which is the same in every
    /// launch of one kernel).
    pub(super) fn function(&self, launch: &Launch) -> Result<CudaFunction> {
        let mut functions = self
            .functions
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(&launch.kernel) {
            return Ok(function.clone());
        }
        let function = self.module.load_function(&launch.kernel).w()?;
        if launch.shared > SHARED_MEMORY {
            let attribute =
                CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            function
                .set_attribute(attribute, launch.shared as i32)
                .w()?;
        }
        functions.insert(launch.kernel.clone(), function.clone());
        Ok(function)
    }
}
