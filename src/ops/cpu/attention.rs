//! One call of paged attention: plan, run the tasks, merge what was split.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{CpuStorage, DType, Layout};
use half::{bf16, f16};
use rayon::prelude::*;

use super::ahead;
use super::cache::{Context, Rows};
use super::decode::stream_task;
use super::disjoint::Disjoint;
use super::element::{self, Element, for_dtype};
use super::plan::{Cut, Kernel, SeqPlan, Task};
use super::prefill::matrix_task;
use super::scores::{Running, base};
use super::simd::Isa;
use crate::error::Result;
use crate::ops::check::MAX_DIM;
use crate::ops::{AttentionOptions, PageTable};

/// A tensor inside a custom op.
type Operand<'a> = (&'a CpuStorage, &'a Layout);

thread_local! {
    /// Plans and partial results of a call, kept for the next call of this thread. Taken out
    /// while in use: a thread that waits for its tasks may start another call.
    static WORKSPACE: Cell<Workspace> = const { Cell::new(Workspace::EMPTY) };
    /// Tiles of one task.
    static SCRATCH: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

struct Workspace {
    cut: Cut,
    records: Vec<f32>,
}

impl Workspace {
    const EMPTY: Self = Self {
        cut: Cut {
            plans: Vec::new(),
            tasks: Vec::new(),
            merges: Vec::new(),
            records: 0,
        },
        records: Vec::new(),
    };
}

impl Default for Workspace {
    fn default() -> Self {
        Self::EMPTY
    }
}

/// Runs `f` with `len` floats of the thread's scratch memory, of any content, that begin with
/// a cache line: a register that lies in two lines takes two loads.
pub(super) fn with_scratch(len: usize, f: impl FnOnce(&mut [f32])) {
    const LINE: usize = ahead::LINE / size_of::<f32>();
    let mut scratch = SCRATCH.take();
    if scratch.len() < len + LINE {
        scratch.resize(len + LINE, 0.0);
    }
    let start = scratch.as_ptr().align_offset(ahead::LINE).min(LINE);
    f(&mut scratch[start..start + len]);
    SCRATCH.set(scratch);
}

/// Attention of checked arguments. Returns the output in the dtype of `q`, or with `state`
/// in f32, followed by one log-sum-exp per row and head.
pub(crate) fn attention(
    q: Operand<'_>,
    k: Operand<'_>,
    v: Operand<'_>,
    table: &PageTable,
    options: &AttentionOptions,
    state: bool,
) -> Result<CpuStorage> {
    attention_on(Isa::best(), q, k, v, table, options, state)
}

/// As [`attention`], on an instruction set.
pub(super) fn attention_on(
    isa: Isa,
    q: Operand<'_>,
    k: Operand<'_>,
    v: Operand<'_>,
    table: &PageTable,
    options: &AttentionOptions,
    state: bool,
) -> Result<CpuStorage> {
    for_dtype!(
        element::dtype(k.0),
        run(isa, q, k, v, table, options, state)
    )
}

fn run<T: Element>(
    isa: Isa,
    (q, q_layout): Operand<'_>,
    (k, k_layout): Operand<'_>,
    (v, v_layout): Operand<'_>,
    table: &PageTable,
    options: &AttentionOptions,
    state: bool,
) -> Result<CpuStorage> {
    let (rows, heads, k_dim) = q_layout.shape().dims3()?;
    let (_, _, kv_heads, v_dim) = v_layout.shape().dims4()?;
    let elements = rows * heads * v_dim;
    let mut out = if state {
        let mut flat = vec![0.0; elements + rows * heads];
        flat[elements..].fill(f32::NEG_INFINITY);
        CpuStorage::F32(flat)
    } else {
        match element::dtype(q) {
            DType::F16 => CpuStorage::F16(vec![f16::ZERO; elements]),
            DType::BF16 => CpuStorage::BF16(vec![bf16::ZERO; elements]),
            _ => CpuStorage::F32(vec![0.0; elements]),
        }
    };

    let mut workspace = WORKSPACE.take();
    workspace.cut.fill(table, options.mask, heads, kv_heads);
    let needed = workspace.cut.records * (v_dim + 2);
    if workspace.records.len() < needed {
        workspace.records.resize(needed, 0.0);
    }
    let call = Call {
        isa,
        q: Queries::new(q, q_layout)?,
        k: element::slice::<T>(k)?,
        k_rows: Rows::of(k_layout)?,
        v: element::slice::<T>(v)?,
        v_rows: Rows::of(v_layout)?,
        table,
        options,
        plans: &workspace.cut.plans,
        heads,
        kv_heads,
        group: heads / kv_heads,
        k_dim,
        v_dim,
        records: Disjoint::new(&mut workspace.records),
        out: Output::new(&mut out, elements)?,
    };
    let (tasks, merges) = (&workspace.cut.tasks, &workspace.cut.merges);
    in_parallel(tasks.len(), |i| call.run_task(tasks[i]));
    in_parallel(merges.len(), |i| call.merge(merges[i]));
    WORKSPACE.set(workspace);
    Ok(out)
}

/// Calls `f(0..n)`, each number once, on the current pool, in about that order.
pub(super) fn in_parallel(n: usize, f: impl Fn(usize) + Sync) {
    let workers = rayon::current_num_threads().min(n);
    if workers <= 1 {
        return (0..n).for_each(f);
    }
    // A shared counter and not a split of the range: tasks differ in length, and a worker
    // that comes late must find nothing left rather than hold up the rest.
    let next = AtomicUsize::new(0);
    (0..workers).into_par_iter().with_max_len(1).for_each(|_| {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= n {
                break;
            }
            f(i);
        }
    });
}

/// Everything the tasks of one call share.
pub(super) struct Call<'a, T> {
    pub isa: Isa,
    pub q: Queries<'a>,
    k: &'a [T],
    k_rows: Rows,
    v: &'a [T],
    v_rows: Rows,
    table: &'a PageTable,
    pub options: &'a AttentionOptions,
    plans: &'a [SeqPlan],
    pub heads: usize,
    pub kv_heads: usize,
    pub group: usize,
    pub k_dim: usize,
    pub v_dim: usize,
    /// One record `[max, sum, accumulator]` per (chunk, row, head) of a split sequence.
    records: Disjoint<'a, f32>,
    out: Output<'a>,
}

impl<'a, T: Element> Call<'a, T> {
    fn run_task(&self, task: Task) {
        let plan = &self.plans[task.plan as usize];
        let chunk = task.chunk as usize;
        match plan.kernel {
            Kernel::Stream => stream_task(self, plan, chunk),
            Kernel::Matrix { rows } => {
                let first = task.row as usize;
                let rows = first..(first + rows).min(plan.rows.len());
                matrix_task(self, plan, chunk, task.head as usize, rows);
            }
        }
    }

    /// The K rows and the V rows of a sequence.
    pub(super) fn context(&self, plan: &SeqPlan) -> (Context<'a, T>, Context<'a, T>) {
        let (pages, first) = self.table.pages(plan.seq);
        (
            Context::new(self.k, self.k_rows, pages, first),
            Context::new(self.v, self.v_rows, pages, first),
        )
    }

    fn record(&self, plan: &SeqPlan, chunk: usize, row: usize, head: usize) -> &'a mut [f32] {
        let len = self.v_dim + 2;
        let index = plan.records + (chunk * plan.rows.len() + row) * self.heads + head;
        // SAFETY: records of a sequence are numbered by (chunk, row, head), those of
        // different sequences do not overlap (`Cut::fill`), each is written by the one task
        // that owns its (chunk, row, head), and read by `merge` after all tasks.
        unsafe { self.records.part(index * len..(index + 1) * len) }
    }

    /// Takes the result of one row and head over one chunk: kept for the merge if the
    /// context is split, else final. Each task calls it once per row and head it owns.
    pub(super) fn emit(
        &self,
        plan: &SeqPlan,
        chunk: usize,
        (row, head): (usize, usize),
        running: Running,
        accumulator: &[f32],
    ) {
        if plan.chunks == 1 {
            return self.finish(plan.rows.start + row, head, running, accumulator);
        }
        let record = self.record(plan, chunk, row, head);
        record[0] = running.max;
        record[1] = running.sum;
        record[2..].copy_from_slice(accumulator);
    }

    /// Merges the chunks of one row, for the heads of one KV head, first chunk to last.
    fn merge(&self, task: Task) {
        let plan = &self.plans[task.plan as usize];
        let (row, kv_head) = (task.row as usize, task.head as usize);
        for head in kv_head * self.group..(kv_head + 1) * self.group {
            let records = || (0..plan.chunks).map(|chunk| &*self.record(plan, chunk, row, head));
            let max = records().fold(f32::NEG_INFINITY, |max, record| max.max(record[0]));
            let base = base(max);
            let mut buffer = [0f32; MAX_DIM];
            let accumulator = &mut buffer[..self.v_dim];
            let mut sum = 0.0;
            for record in records() {
                let weight = (record[0] - base).exp();
                sum += weight * record[1];
                for (a, x) in accumulator.iter_mut().zip(&record[2..]) {
                    *a += weight * x;
                }
            }
            self.finish(
                plan.rows.start + row,
                head,
                Running { max, sum },
                accumulator,
            );
        }
    }

    /// Normalises and writes one output row; `row` counts through the batch.
    fn finish(&self, row: usize, head: usize, running: Running, accumulator: &[f32]) {
        let Running { max, sum } = running;
        let index = row * self.heads + head;
        let factor = match &self.options.sinks {
            // No key: 0, with sinks too.
            _ if sum == 0.0 => 0.0,
            None => 1.0 / sum,
            Some(sinks) => {
                let top = max.max(sinks[head]);
                let weight = (max - top).exp();
                weight / (sum * weight + (sinks[head] - top).exp())
            }
        };
        self.out.write(index * self.v_dim, accumulator, factor);
        let lse = if sum == 0.0 {
            f32::NEG_INFINITY
        } else {
            max + sum.ln()
        };
        self.out.write_lse(index, lse);
    }
}

/// The query tensor, `[rows, heads, k_dim]` with contiguous heads.
pub(super) struct Queries<'a> {
    data: Floats<&'a [f32], &'a [f16], &'a [bf16]>,
    start: usize,
    row_stride: usize,
    head_stride: usize,
}

/// One of the three dtypes, where a choice at run time costs nothing.
enum Floats<A, B, C> {
    F32(A),
    F16(B),
    Bf16(C),
}

impl<'a> Queries<'a> {
    fn new(storage: &'a CpuStorage, layout: &Layout) -> Result<Self> {
        let data = match storage {
            CpuStorage::F32(data) => Floats::F32(&data[..]),
            CpuStorage::F16(data) => Floats::F16(&data[..]),
            CpuStorage::BF16(data) => Floats::Bf16(&data[..]),
            _ => return Err(element::unexpected_dtype()),
        };
        Ok(Self {
            data,
            start: layout.start_offset(),
            row_stride: layout.stride()[0],
            head_stride: layout.stride()[1],
        })
    }

    /// One head of one row in f32, times `scale`.
    pub(super) fn load(&self, row: usize, head: usize, scale: f32, dst: &mut [f32]) {
        let at = self.start + row * self.row_stride + head * self.head_stride;
        let range = at..at + dst.len();
        match self.data {
            Floats::F32(data) => f32::widen(&data[range], dst),
            Floats::F16(data) => f16::widen(&data[range], dst),
            Floats::Bf16(data) => bf16::widen(&data[range], dst),
        }
        dst.iter_mut().for_each(|x| *x *= scale);
    }
}

/// The output rows, and the log-sum-exps where they are wanted.
struct Output<'a> {
    rows: Floats<Disjoint<'a, f32>, Disjoint<'a, f16>, Disjoint<'a, bf16>>,
    lse: Option<Disjoint<'a, f32>>,
}

impl<'a> Output<'a> {
    /// The first `elements` of the storage are output rows, the rest log-sum-exps.
    fn new(storage: &'a mut CpuStorage, elements: usize) -> Result<Self> {
        let mut lse = None;
        let rows = match storage {
            CpuStorage::F32(data) => {
                let (rows, rest) = data.split_at_mut(elements);
                lse = (!rest.is_empty()).then(|| Disjoint::new(rest));
                Floats::F32(Disjoint::new(rows))
            }
            CpuStorage::F16(data) => Floats::F16(Disjoint::new(data)),
            CpuStorage::BF16(data) => Floats::Bf16(Disjoint::new(data)),
            _ => return Err(element::unexpected_dtype()),
        };
        Ok(Self { rows, lse })
    }

    fn write(&self, at: usize, accumulator: &[f32], factor: f32) {
        let mut buffer = [0f32; MAX_DIM];
        let row = &mut buffer[..accumulator.len()];
        for (x, a) in row.iter_mut().zip(accumulator) {
            *x = a * factor;
        }
        let range = at..at + row.len();
        // SAFETY: `at` is that of one (row, head) of the batch, which one task, or one merge
        // after all tasks, owns.
        unsafe {
            match &self.rows {
                Floats::F32(out) => f32::narrow(row, out.part(range)),
                Floats::F16(out) => f16::narrow(row, out.part(range)),
                Floats::Bf16(out) => bf16::narrow(row, out.part(range)),
            }
        }
    }

    fn write_lse(&self, index: usize, value: f32) {
        if let Some(lse) = &self.lse {
            // SAFETY: as in `write`.
            unsafe { lse.part(index..index + 1)[0] = value }
        }
    }
}
