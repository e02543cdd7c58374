//! What the scheduler knows of a sequence.

use std::cmp::Reverse;

use super::request::{Request, RequestId};
use crate::block::Namespace;
use crate::cache::{SequenceId, SwapId};

/// Names a sequence: a sample or beam of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct SeqKey {
    pub request: RequestId,
    pub branch: u32,
}

/// Who goes first: the smaller rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    /// Has waited too long: before every priority, so that nobody starves.
    overdue: Reverse<bool>,
    priority: Reverse<i32>,
    /// Was preempted: before those that have never run.
    preempted: Reverse<bool>,
    /// Order of arrival, then number of the branch.
    pub key: SeqKey,
}

/// A sequence: its tokens and how far they are in the cache.
#[derive(Debug, Clone)]
pub(super) struct Sequence {
    pub key: SeqKey,
    /// Prompt and generated tokens.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Leading tokens whose K/V are in the cache.
    pub computed: usize,
    /// The sequence in the cache, while it runs.
    pub held: Option<SequenceId>,
    /// Where its K/V are while it waits, if they were moved to host memory.
    pub swapped: Option<SwapId>,
    /// Sequences that will be made of this one when its prompt is computed, itself included.
    pub width: usize,
    pub namespace: Namespace,
    pub read_prefix: bool,
    /// Prompt rows whose logits are wanted, until they have been computed.
    pub prompt_logits: bool,
    pub priority: i32,
    /// Brought its logits to a beam search that waits for others: nothing to compute.
    pub parked: bool,
    pub preempted: bool,
    pub overdue: bool,
    /// Step in which it began to wait.
    pub since: u64,
}

impl Sequence {
    pub(super) fn new(id: RequestId, request: &Request) -> Self {
        Self {
            key: SeqKey {
                request: id,
                branch: 0,
            },
            tokens: request.prompt.clone(),
            prompt: request.prompt.len(),
            computed: 0,
            held: None,
            swapped: None,
            width: request.width(),
            namespace: request.namespace.clone(),
            read_prefix: request.read_prefix,
            prompt_logits: request.prompt_logprobs.is_some(),
            priority: request.priority,
            parked: false,
            preempted: false,
            overdue: false,
            since: 0,
        }
    }

    /// Tokens that are to be computed before the next one can be chosen.
    pub(super) fn pending(&self) -> usize {
        if self.parked {
            0
        } else {
            self.tokens.len() - self.computed
        }
    }

    /// Rank among those that wait.
    pub(super) fn rank(&self) -> Rank {
        Rank {
            overdue: Reverse(self.overdue),
            priority: Reverse(self.priority),
            preempted: Reverse(self.preempted),
            key: self.key,
        }
    }

    /// Rank among those that run, where it does not matter who was preempted before.
    pub(super) fn running_rank(&self) -> Rank {
        Rank {
            preempted: Reverse(false),
            ..self.rank()
        }
    }

    pub(super) fn generated(&self) -> &[u32] {
        &self.tokens[self.prompt..]
    }
}
