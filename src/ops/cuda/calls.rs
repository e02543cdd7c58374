//! The ops on candle's CUDA storages: what to launch, where its buffers are, go.
//!
//! All arguments were checked at the public door (`check`): shapes, dtypes, strides, the
//! table against the caches. The launch code relies on that, and so do the SAFETY comments.

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::DevicePtr;
use candle_core::{CudaDevice, CudaStorage, Layout};

use super::check_stream;
use super::execute::{Bindings, run};
use super::storage::{allocate, cache_view, read, rows_view, write};
use crate::error::Result;
use crate::ops::launch::{self, Element, Scores, Slot};
use crate::ops::resident::Placement;
use crate::ops::{AttentionOptions, PageTable};

/// A tensor inside a custom op.
type Operand<'a> = (&'a CudaStorage, &'a Layout);

/// See [`PageTable::upload`].
pub(in crate::ops) fn upload(table: &PageTable, device: &CudaDevice) -> Result<Placement> {
    check_stream("upload", device)?;
    let stream = device.cuda_stream();
    table
        .on_device()
        .with(&stream, table, |filled, resident, memory| {
            Ok(resident.placement(memory, filled))
        })
}

/// Writes checked rows into one cache tensor.
pub(in crate::ops) fn write_rows(
    (cache, cache_layout): (&mut CudaStorage, &Layout),
    (rows, rows_layout): Operand<'_>,
    table: &PageTable,
) -> Result<()> {
    check_stream("write_kv", &cache.device)?;
    let plan = launch::write_kv(
        &cache_view(cache, cache_layout)?,
        &rows_view(rows, rows_layout)?,
        table.num_rows(),
    );
    let stream = cache.device.cuda_stream();
    let (cache, _written) = write(cache, &stream)?;
    let (rows, _read) = read(rows, &stream)?;
    table.on_device().with(&stream, table, |filled, _, _| {
        let mut bindings = Bindings::new(filled.addresses().iter().copied());
        bindings.bind(Slot::Cache, cache);
        bindings.bind(Slot::Rows, rows);
        // SAFETY: the storages are borrowed and freed in stream order, the table is locked and
        // refilled in stream order; sizes were checked at the door.
        unsafe { run(&stream, &plan, &bindings) }
    })
}

/// Attention of checked arguments, in the dtype of `q`, or with `state` in F32, followed by
/// one log-sum-exp per row and head.
pub(in crate::ops) fn attention(
    (q, q_layout): Operand<'_>,
    (k, k_layout): Operand<'_>,
    (v, v_layout): Operand<'_>,
    table: &PageTable,
    options: &AttentionOptions,
    state: bool,
) -> Result<CudaStorage> {
    check_stream("paged_attention", &q.device)?;
    let queries = rows_view(q, q_layout)?;
    let (k_view, v_view) = (cache_view(k, k_layout)?, cache_view(v, v_layout)?);
    let scores = Scores {
        scale: options.scale,
        softcap: options.softcap,
        mask: options.mask,
        slopes: options.alibi_slopes.is_some(),
        sinks: options.sinks.is_some(),
    };
    let (element, per_head) = if state {
        (Element::F32, v_view.dim + 1)
    } else {
        (queries.element, v_view.dim)
    };
    let heads = table.num_rows() * queries.heads;
    let mut out = allocate(&q.device, element, heads * per_head)?;

    let stream = q.device.cuda_stream();
    let (q, _q) = read(q, &stream)?;
    let (k, _k) = read(k, &stream)?;
    let (v, _v) = read(v, &stream)?;
    let (result, written) = write(&mut out, &stream)?;
    table
        .on_device()
        .with(&stream, table, |filled, resident, memory| {
            let plan = launch::attention(&queries, &k_view, &v_view, &filled.batch, &scores, state);
            let mut bindings = Bindings::new(filled.addresses().iter().copied());
            for (slot, address) in [
                (Slot::Out, result),
                (Slot::Q, q),
                (Slot::KCache, k),
                (Slot::VCache, v),
            ] {
                bindings.bind(slot, address);
            }
            for (slot, values) in [
                (Slot::Slopes, &options.alibi_slopes),
                (Slot::Sinks, &options.sinks),
            ] {
                if let Some(values) = values {
                    bindings.bind(slot, resident.constant(memory, values)?);
                }
            }
            if plan.workspace > 0 {
                let workspace = resident.workspace(memory, plan.workspace)?;
                bindings.bind(Slot::Workspace, workspace);
            }
            // SAFETY: as in `write_rows`; the output has the length that `launch::attention`
            // states, the workspace that of the plan.
            unsafe { run(&stream, &plan, &bindings) }
        })?;
    drop(written);
    Ok(out)
}

/// Copies checked pairs of blocks within one cache tensor.
pub(in crate::ops) fn copy_blocks(
    (cache, layout): (&mut CudaStorage, &Layout),
    pairs: &[(u32, u32)],
) -> Result<()> {
    check_stream("copy_blocks", &cache.device)?;
    let copy = launch::copy_blocks(&cache_view(cache, layout)?, pairs);
    if copy.pairs.is_empty() {
        return Ok(());
    }
    let stream = cache.device.cuda_stream();
    let pairs = stream.clone_htod(&copy.pairs).w()?;
    // SAFETY: the launches write each staged block before they read it.
    let workspace = unsafe { stream.alloc::<u8>(copy.plan.workspace.max(1)) }.w()?;
    let (cache, _written) = write(cache, &stream)?;
    let bindings = Bindings::new([
        (Slot::Cache, cache),
        (Slot::Pairs, pairs.device_ptr(&stream).0),
        (Slot::Workspace, workspace.device_ptr(&stream).0),
    ]);
    // SAFETY: the cache is borrowed, the other two buffers are dropped after the launches are
    // queued and freed in stream order; ids were checked at the door.
    unsafe { run(&stream, &copy.plan, &bindings) }
}

/// Merges two states of contiguous F32 tensors: `a`, `b` `[rows, heads, v_dim]`, and `lses`
/// `[2, rows, heads]`. Returns the outputs, then the log-sum-exps.
pub(in crate::ops) fn merge_states(
    (a, a_layout): Operand<'_>,
    (b, b_layout): Operand<'_>,
    (lses, lse_layout): Operand<'_>,
) -> Result<CudaStorage> {
    check_stream("merge_states", &a.device)?;
    let (rows, heads, v_dim) = a_layout.shape().dims3()?;
    let pairs = rows * heads;
    let plan = launch::merge_states(pairs, v_dim);
    let mut out = allocate(&a.device, Element::F32, pairs * (v_dim + 1))?;
    let stream = a.device.cuda_stream();
    let (a, _a) = read(a, &stream)?;
    let (b, _b) = read(b, &stream)?;
    let (lses, _lses) = read(lses, &stream)?;
    let (result, written) = write(&mut out, &stream)?;
    let bytes = |elements: usize| (elements * size_of::<f32>()) as u64;
    let lses = lses + bytes(lse_layout.start_offset());
    let bindings = Bindings::new([
        (Slot::Out, result),
        (Slot::AOut, a + bytes(a_layout.start_offset())),
        (Slot::BOut, b + bytes(b_layout.start_offset())),
        (Slot::ALse, lses),
        (Slot::BLse, lses + bytes(pairs)),
    ]);
    // SAFETY: as in `write_rows`; shapes were checked at the door.
    unsafe { run(&stream, &plan, &bindings) }?;
    drop(written);
    Ok(out)
}
