//! One step: schedule, reserve, run, commit, choose.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use candle_core::{DType, Device, Storage, Tensor};

use super::engine::Engine;
use super::output::{FinishReason, Output};
use super::sampler;
use super::scheduler::{Chunk, Decision};
use super::sequence::SeqKey;
use crate::cache::{Feed, Logits, StepPlan};
use crate::error::{Error, Result};
use crate::models::CausalLm;

/// What a chunk has brought: rows `first..first + rows` of the logits.
struct Brought {
    key: SeqKey,
    first: usize,
    rows: usize,
    /// Position of the token whose logits the first row is.
    position: usize,
    /// The last row is that of the last token: the next one can be chosen.
    complete: bool,
}

impl<M: CausalLm + ?Sized> Engine<M> {
    /// Runs one step of the model and answers what it added, and the outputs of requests that
    /// were cancelled since the last one. Without work it answers at once.
    ///
    /// # Errors
    /// What the model answers, and [`Error::PlanOutstanding`] if somebody else holds a plan of
    /// the cache. Nothing is lost then: the next step tries the same tokens again. See
    /// [`fail_step`](Self::fail_step). What goes wrong once they are computed, while the next
    /// ones are chosen, ends its request as [`FinishReason::Failed`].
    pub fn step(&mut self) -> Result<Vec<Output>> {
        self.last_step.clear();
        if let Some((chunks, plan)) = self.reserve()? {
            self.last_step.extend(chunks.iter().map(|chunk| chunk.key));
            self.run(&chunks, plan)?;
        }
        Ok(std::mem::take(&mut self.ready))
    }

    /// Chooses the tokens of the step and reserves their rows.
    fn reserve(&mut self) -> Result<Option<(Vec<Chunk>, StepPlan)>> {
        let mut admit = true;
        loop {
            let chunks = match self.scheduler.schedule(admit)? {
                Decision::Run(chunks) => chunks,
                Decision::Idle => return Ok(None),
                Decision::Full(key) => {
                    self.end_sequence(key, FinishReason::CacheFull);
                    continue;
                }
            };
            self.note_schedule();
            match self.plan(&chunks) {
                Ok(plan) => return Ok(Some((chunks, plan))),
                // Shared blocks that are to be copied were not counted.
                Err(Error::OutOfBlocks { .. }) => {
                    admit = false;
                    if let Some(key) = self.scheduler.give_way()? {
                        self.end_sequence(key, FinishReason::CacheFull);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn plan(&self, chunks: &[Chunk]) -> Result<StepPlan> {
        let mut feeds = Vec::with_capacity(chunks.len());
        for chunk in chunks {
            let sequence = self.scheduler.get(chunk.key)?;
            let Some(id) = sequence.held else {
                return Err(Error::Invariant {
                    op: "engine",
                    what: format!("{} is scheduled but holds nothing", chunk.key.request),
                });
            };
            let tokens = &sequence.tokens[sequence.computed..sequence.computed + chunk.rows];
            let logits = if sequence.prompt_logits {
                Logits::All
            } else if chunk.rows == sequence.pending() {
                Logits::Last
            } else {
                Logits::None
            };
            feeds.push(Feed::new(id, tokens).with_logits(logits));
        }
        self.cache.plan(&feeds)
    }

    fn run(&mut self, chunks: &[Chunk], plan: StepPlan) -> Result<()> {
        let span = tracing::debug_span!("step", sequences = chunks.len(), rows = plan.num_rows());
        let _inside = span.enter();
        let start = Instant::now();
        let logits = {
            let _inside = tracing::debug_span!("forward").entered();
            let logits = self.model.forward(plan.tokens(), &plan)?;
            self.check_logits(&logits, plan.logit_rows().len())?;
            // The copy waits for the device. On a CPU it is none.
            logits.to_device(&Device::Cpu)?.contiguous()?
        };
        self.scheduler
            .costs
            .computed(plan.num_rows(), chunks.len(), start.elapsed());
        plan.commit()?;

        let mut first = 0;
        let mut brought = Vec::with_capacity(chunks.len());
        for chunk in chunks {
            let sequence = self.scheduler.get_mut(chunk.key)?;
            let complete = chunk.rows == sequence.pending();
            let rows = match (sequence.prompt_logits, complete) {
                (true, _) => chunk.rows,
                (false, complete) => usize::from(complete),
            };
            let position = sequence.computed + chunk.rows - rows;
            sequence.computed += chunk.rows;
            brought.push(Brought {
                key: chunk.key,
                first,
                rows,
                position,
                complete,
            });
            first += rows;
        }
        self.metrics.step(chunks);
        let vocab = self.limits.vocab;
        let (storage, layout) = logits.storage_and_layout();
        let host = match (&*storage, layout.contiguous_offsets()) {
            (Storage::Cpu(data), Some((start, end))) => &data.as_slice::<f32>()?[start..end],
            _ => {
                return Err(Error::Invariant {
                    op: "engine",
                    what: "logits on the host are not".into(),
                });
            }
        };
        for brought in brought {
            let rows = &host[brought.first * vocab..(brought.first + brought.rows) * vocab];
            // Its tokens are computed and its logits are here once: what goes wrong now cannot
            // be tried again, and is the end of this request alone.
            let taken = catch_unwind(AssertUnwindSafe(|| self.take_rows(&brought, rows)));
            let why = match taken {
                Ok(Ok(())) => continue,
                Ok(Err(error)) => error.to_string(),
                Err(_) => "choosing a token panicked".into(),
            };
            self.end_request(brought.key.request, FinishReason::Failed(why));
        }
        for chunk in chunks {
            self.flush(chunk.key.request);
        }
        Ok(())
    }

    fn check_logits(&self, logits: &Tensor, rows: usize) -> Result<()> {
        let expected = [rows, self.limits.vocab];
        if logits.dims() != expected {
            return Err(Error::Shape {
                op: "engine",
                tensor: "logits".into(),
                expected: format!("[logit rows, vocab] = {expected:?}"),
                got: logits.dims().to_vec(),
            });
        }
        if logits.dtype() != DType::F32 {
            return Err(Error::Dtype {
                op: "engine",
                tensor: "logits",
                expected: "F32".into(),
                got: logits.dtype(),
            });
        }
        Ok(())
    }

    /// Uses the logits of one sequence.
    fn take_rows(&mut self, brought: &Brought, rows: &[f32]) -> Result<()> {
        let vocab = self.limits.vocab;
        // A sibling that failed a moment ago has ended the whole request.
        let Some(sequence) = self.scheduler.sequences.get_mut(&brought.key) else {
            return Ok(());
        };
        if sequence.prompt_logits {
            let active = self.requests.get_mut(&brought.key.request);
            let top = active.as_ref().and_then(|a| a.request.prompt_logprobs);
            if let (Some(active), Some(top)) = (active, top) {
                let next = &sequence.tokens[brought.position + 1..];
                for (i, (row, &token)) in rows.chunks(vocab).zip(next).enumerate() {
                    let position = brought.position + 1 + i;
                    active.prompt_logprobs(position, sampler::logprobs(row, token, top));
                }
            }
            sequence.prompt_logits = !brought.complete;
        }
        match rows.chunks(vocab).next_back() {
            Some(row) if brought.complete => self.choose(brought.key, row),
            _ => Ok(()),
        }
    }

    /// Ends a sequence, and with it its request if all samples depend on it.
    fn end_sequence(&mut self, key: SeqKey, reason: FinishReason) {
        let shared = (self.scheduler.sequences.get(&key)).is_some_and(|s| s.width > 1);
        let active = self.requests.get_mut(&key.request);
        if shared || active.as_ref().is_some_and(|active| active.beams.is_some()) {
            return self.end_request(key.request, reason);
        }
        self.scheduler.remove(key);
        if let Some(branch) = active.and_then(|active| active.branches.get_mut(&key.branch)) {
            branch.end(reason);
        }
        self.flush(key.request);
    }

    /// Writes what the scheduler did into the reports of the requests.
    fn note_schedule(&mut self) {
        for id in self.scheduler.gave_way.drain(..) {
            if let Some(active) = self.requests.get_mut(&id) {
                active.report.preemptions += 1;
            }
        }
        for (id, cached) in self.scheduler.started.drain(..) {
            if let Some(active) = self.requests.get_mut(&id) {
                active.report.cached_tokens = cached;
                active.report.queued = Some(active.submitted.elapsed());
                self.metrics.started(active.report.prompt_tokens, cached);
            }
        }
    }
}
