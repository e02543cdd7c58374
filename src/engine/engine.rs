//! [`Engine`]: what a caller does with it. How a step runs is in `step.rs`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::DType;
use tokenizers::Tokenizer;

use super::active::Active;
use super::branch::StopRules;
use super::config::{EngineConfig, Limits};
use super::metrics::{Metrics, Stats};
use super::output::{FinishReason, Output};
use super::random;
use super::request::{Request, RequestId, refuse};
use super::sampler::Sampler;
use super::scheduler::Scheduler;
use super::sequence::{SeqKey, Sequence};
use crate::block::Namespace;
use crate::cache::{
    AddOptions, CacheSpec, Cost, Feed, GroupSpec, Logits, PagedKvCache, Pin, SequenceId,
};
use crate::error::{Error, Result};
use crate::models::CausalLm;

/// Runs many requests on one model and one cache.
///
/// A loop of one's own calls [`step`](Self::step) while there [is work](Self::has_work);
/// [`generate`](Self::generate) is such a loop; [`spawn`](Self::spawn) gives it a thread.
///
/// The answer of a request depends on nothing but the request: not on what runs beside it,
/// not on preemptions, not on cached prefixes (as far as the model gives the same logits for
/// the same tokens: within rounding, see the design of the ops). Only one that samples without
/// a [seed](super::Sampling::seed) also depends on the engine's and on its own number.
///
/// The engine owns the sequences it makes in the cache, and gives them back when it is dropped.
/// Others may use the cache between steps; what they hold is missing from the pool. Where they
/// [clear](PagedKvCache::clear) it, all that runs is computed anew.
///
/// Continuous batching is from Orca (Yu et al. 2022), chunked prefill from Sarathi-Serve
/// (Agrawal et al. 2024).
#[derive(Debug)]
pub struct Engine<M: ?Sized> {
    pub(super) scheduler: Scheduler,
    pub(super) cache: PagedKvCache,
    pub(super) limits: Limits,
    pub(super) tokenizer: Option<Arc<Tokenizer>>,
    pub(super) eos: Vec<u32>,
    pub(super) next_id: Arc<AtomicU64>,
    pub(super) requests: BTreeMap<RequestId, Active>,
    pub(super) sampler: Sampler,
    /// Outputs that have not left yet.
    pub(super) ready: Vec<Output>,
    /// Sequences of the step that ran last.
    pub(super) last_step: Vec<SeqKey>,
    pub(super) metrics: Metrics,
    pub(super) model: Arc<M>,
}

impl<M: CausalLm + ?Sized> Engine<M> {
    /// An engine for `model`, with the K/V in `cache`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a configuration that contradicts itself, or a cache that
    /// was made for other layers than the model's.
    pub fn new(model: Arc<M>, cache: PagedKvCache, config: EngineConfig) -> Result<Self> {
        config.check()?;
        check_layers(model.as_ref(), cache.spec())?;
        let (vocab, context) = (model.vocab_size(), model.context_length());
        Ok(Self {
            limits: Limits::new(vocab, context, &cache, config.max_sequences),
            scheduler: Scheduler::new(cache.clone(), config),
            cache,
            tokenizer: None,
            eos: Vec::new(),
            next_id: Arc::default(),
            requests: BTreeMap::new(),
            sampler: Sampler::default(),
            ready: Vec::new(),
            last_step: Vec::new(),
            metrics: Metrics::default(),
            model,
        })
    }

    /// Gives outputs a text and makes stop strings possible.
    #[must_use]
    pub fn with_tokenizer(mut self, tokenizer: Arc<Tokenizer>) -> Self {
        self.tokenizer = Some(tokenizer);
        self.limits.text = true;
        self
    }

    /// Tokens that end an answer unless a request ignores them.
    #[must_use]
    pub fn with_eos(mut self, eos: impl Into<Vec<u32>>) -> Self {
        self.eos = eos.into();
        self
    }

    /// Accepts a request. It waits for the next [`step`](Self::step).
    ///
    /// # Errors
    /// Refuses what can never run, and changes nothing then: [`Error::OutOfBlocks`] for a
    /// prompt that with one more token is larger than the whole pool,
    /// [`Error::ContextLength`], [`Error::TokenOutOfRange`], [`Error::Empty`] for an empty
    /// prompt or stop string, [`Error::InvalidArgument`] for any other option out of range.
    pub fn add_request(&mut self, request: Request) -> Result<RequestId> {
        request.check(&self.limits)?;
        let id = RequestId(self.next_id.fetch_add(1, Ordering::Relaxed));
        self.accept(id, request);
        Ok(id)
    }

    /// Takes a request that has been checked.
    pub(super) fn accept(&mut self, id: RequestId, request: Request) {
        let rules = StopRules::new(&request, &self.eos, &self.limits);
        let seed = random::seed_of(self.scheduler.config.seed, id.0);
        self.scheduler.add(Sequence::new(id, &request));
        let active = Active::new(id, request, rules, seed, self.tokenizer.as_ref());
        self.requests.insert(id, active);
    }

    /// What a request would cost now: tokens that are cached, and blocks that its prompt would
    /// take, before it is submitted. No side effect.
    ///
    /// # Errors
    /// As [`add_request`](Self::add_request).
    pub fn cost(&self, request: &Request) -> Result<Cost> {
        request.check(&self.limits)?;
        let sequence = Sequence::new(RequestId(u64::MAX), request);
        let options = self.scheduler.options(&sequence);
        Ok(self.cache.cost(&request.prompt, &options))
    }

    /// Ends a request. Its last outputs leave with the next [`step`](Self::step). Unknown and
    /// finished requests are ignored: a cancellation often crosses the end on its way. While
    /// somebody else holds a plan of the cache, its blocks return when that has ended.
    pub fn cancel(&mut self, request: RequestId) {
        self.end_request(request, FinishReason::Cancelled);
    }

    /// Takes the blocks of a running request, as the scheduler does when they run out. It
    /// waits before its equals, and its answer does not change. Unknown and waiting requests
    /// are ignored.
    ///
    /// # Errors
    /// [`Error::PlanOutstanding`] if somebody else holds a plan of the cache; nothing has
    /// changed then.
    pub fn preempt(&mut self, request: RequestId) -> Result<()> {
        for key in self.scheduler.branches(request) {
            self.scheduler.preempt(key)?;
        }
        Ok(())
    }

    /// Whether a step would do something, or outputs wait to be taken.
    pub fn has_work(&self) -> bool {
        !self.requests.is_empty() || !self.ready.is_empty()
    }

    /// Requests that have not ended.
    pub fn num_requests(&self) -> usize {
        self.requests.len()
    }

    /// Computes a prefix, a system prompt, and keeps its full blocks cached until they are
    /// [unpinned](PagedKvCache::unpin). Runs at once, before anything that waits.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`] if it does not fit beside what runs, [`Error::TokenOutOfRange`],
    /// [`Error::Empty`], [`Error::InvalidArgument`] without a prefix cache, or what the model answers. Nothing has changed then.
    pub fn pin_prefix(&mut self, tokens: &[u32], namespace: Namespace) -> Result<Pin> {
        if !self.scheduler.config.prefix_cache {
            return Err(refuse(
                "pin_prefix",
                "an engine with a prefix cache",
                "one without",
            ));
        }
        let request = Request::new(tokens).with_namespace(namespace.clone());
        request.check(&self.limits)?;
        let options = AddOptions::default().with_namespace(namespace);
        let added = self.cache.add(tokens, options)?;
        let _held = Held(&self.cache, added.id);
        let chunk = self.scheduler.config.max_batch_tokens;
        for tokens in tokens[added.cached_tokens..].chunks(chunk) {
            let feed = Feed::new(added.id, tokens).with_logits(Logits::None);
            let plan = self.cache.plan(&[feed])?;
            self.model.forward(plan.tokens(), &plan)?;
            plan.commit()?;
        }
        self.cache.pin(added.id)
    }

    /// The figures of the engine now. Costs a walk over the block tables.
    pub fn stats(&self) -> Stats {
        self.metrics.stats(&self.scheduler, self.requests.len())
    }

    /// The cache the engine works on.
    pub fn cache(&self) -> &PagedKvCache {
        &self.cache
    }

    /// The model.
    pub fn model(&self) -> &Arc<M> {
        &self.model
    }

    /// Ends the requests of the step that failed, or all if none had been chosen, because it
    /// fails again and again. `generate` and the engine's thread do so after the second time.
    /// [`Error::PlanOutstanding`] ends none: no request is to blame, and only time helps.
    pub fn fail_step(&mut self, error: &Error) {
        if matches!(error, Error::PlanOutstanding { .. }) {
            return;
        }
        let mut failed: Vec<RequestId> = self.last_step.iter().map(|key| key.request).collect();
        if failed.is_empty() {
            failed.extend(self.requests.keys());
        }
        for id in failed {
            self.end_request(id, FinishReason::Failed(error.to_string()));
        }
    }

    /// Ends every sample of a request and returns its blocks.
    pub(super) fn end_request(&mut self, id: RequestId, reason: FinishReason) {
        let keys = self.scheduler.branches(id);
        let Some(active) = self.requests.get_mut(&id) else {
            return;
        };
        if let Some(beams) = &mut active.beams {
            for (branch, sum) in beams.live.clone() {
                let key = SeqKey {
                    request: id,
                    branch,
                };
                let beam = self.scheduler.sequences.get(&key);
                let generated = beam.map_or(&[][..], Sequence::generated);
                if !generated.is_empty() {
                    beams.complete(generated.to_vec(), sum, reason.clone());
                }
            }
        }
        for key in keys {
            self.scheduler.remove(key);
        }
        active.end(&reason, self.tokenizer.as_ref());
        self.flush(id);
    }

    /// Moves what a request has to say into `ready`, and forgets it if it has ended.
    pub(super) fn flush(&mut self, id: RequestId) {
        let Some(active) = self.requests.get_mut(&id) else {
            return;
        };
        self.ready.extend(active.take_outputs());
        if active.has_ended() {
            self.metrics.finished += 1;
            self.requests.remove(&id);
        }
    }
}

/// A sequence that goes when its work is done, or has failed, or panicked.
struct Held<'a>(&'a PagedKvCache, SequenceId);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.discard(self.1);
    }
}

/// The groups have to be those of the model; in which dtype they keep their rows is free.
fn check_layers<M: CausalLm + ?Sized>(model: &M, have: &CacheSpec) -> Result<()> {
    let want = model.cache_spec(DType::F32)?.groups;
    let fits = |(have, want): (&GroupSpec, GroupSpec)| {
        let format = have.format;
        *have == GroupSpec { format, ..want }
    };
    if have.groups.len() == want.len() && have.groups.iter().zip(want.clone()).all(fits) {
        return Ok(());
    }
    let expected = format!("a cache for the layers {want:?}");
    Err(refuse("cache", expected, format!("{:?}", have.groups)))
}
