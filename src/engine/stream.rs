//! The outputs of a request as a stream that any executor, or none, can wait for.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use futures_core::Stream;

use super::output::Output;
use super::request::RequestId;

#[derive(Debug, Default)]
struct Queue {
    outputs: VecDeque<Output>,
    closed: bool,
    waker: Option<Waker>,
}

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    arrived: Condvar,
}

impl Shared {
    // No code that could panic runs while the lock is held.
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The engine's end: closes the stream when it is dropped.
#[derive(Debug)]
pub(super) struct Sender(Arc<Shared>);

impl Sender {
    pub(super) fn send(&self, output: Output) {
        self.change(|queue| queue.outputs.push_back(output));
    }

    fn change(&self, change: impl FnOnce(&mut Queue)) {
        let waker = {
            let mut queue = self.0.queue();
            change(&mut queue);
            queue.waker.take()
        };
        self.0.arrived.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.change(|queue| queue.closed = true);
    }
}

/// The outputs of one request, until its last. Dropping it cancels the request.
///
/// It is a [`Stream`] for asynchronous callers; for others `for output in stream` waits, by way
/// of [`BlockingOutputs`]. (It is no iterator itself: in the company of `StreamExt`, which has
/// methods of the same names, none of them could be called.)
pub struct OutputStream {
    id: RequestId,
    shared: Arc<Shared>,
    cancel: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl std::fmt::Debug for OutputStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("OutputStream").field(&self.id).finish()
    }
}

impl OutputStream {
    pub(super) fn new(id: RequestId, cancel: Box<dyn FnOnce() + Send + Sync>) -> (Sender, Self) {
        let shared: Arc<Shared> = Arc::default();
        let stream = Self {
            id,
            shared: shared.clone(),
            cancel: Some(cancel),
        };
        (Sender(shared), stream)
    }

    /// The request whose outputs these are.
    pub fn id(&self) -> RequestId {
        self.id
    }
}

impl Stream for OutputStream {
    type Item = Output;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Output>> {
        let mut queue = self.shared.queue();
        match queue.outputs.pop_front() {
            Some(output) => Poll::Ready(Some(output)),
            None if queue.closed => Poll::Ready(None),
            None => {
                queue.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl IntoIterator for OutputStream {
    type Item = Output;
    type IntoIter = BlockingOutputs;

    fn into_iter(self) -> BlockingOutputs {
        BlockingOutputs(self)
    }
}

/// An [`OutputStream`] as an iterator. It blocks until there is an output, or none will come;
/// dropping it cancels the request as well.
#[derive(Debug)]
pub struct BlockingOutputs(OutputStream);

impl Iterator for BlockingOutputs {
    type Item = Output;

    fn next(&mut self) -> Option<Output> {
        let shared = &self.0.shared;
        let mut queue = shared.queue();
        loop {
            if let Some(output) = queue.outputs.pop_front() {
                return Some(output);
            }
            if queue.closed {
                return None;
            }
            let waited = shared.arrived.wait(queue);
            queue = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for OutputStream {
    fn drop(&mut self) {
        let closed = self.shared.queue().closed;
        if let Some(cancel) = self.cancel.take()
            && !closed
        {
            cancel();
        }
    }
}
