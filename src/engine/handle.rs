//! An engine on its own thread.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::config::Limits;
use super::engine::Engine;
use super::metrics::Stats;
use super::output::{FinishReason, Output};
use super::request::{Request, RequestId};
use super::stream::OutputStream;
use crate::block::Namespace;
use crate::cache::Pin;
use crate::error::{Error, Result};
use crate::models::CausalLm;

const PUBLISH_EVERY: Duration = Duration::from_millis(100);

type Sink = Box<dyn FnMut(Output) + Send>;

enum Command {
    Submit(RequestId, Box<Request>, Sink),
    Cancel(RequestId),
    PinPrefix(Vec<u32>, Namespace, mpsc::Sender<Result<Pin>>),
    Unpin(Pin, mpsc::Sender<Result<()>>),
    Stop,
}

/// A door to an engine that runs on its own thread: cheap to clone, to be used from anywhere.
///
/// The engine stops when the last handle is dropped, or at [`shutdown`](Self::shutdown);
/// requests that run or wait then end as [`FinishReason::Cancelled`].
#[derive(Debug, Clone)]
pub struct EngineHandle {
    owner: Arc<Owner>,
}

#[derive(Debug)]
struct Owner {
    commands: mpsc::Sender<Command>,
    next_id: Arc<AtomicU64>,
    limits: Limits,
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What the handles and the engine's thread have in common.
#[derive(Debug)]
struct Shared {
    stats: Mutex<Stats>,
    /// The engine has stopped. Commands are sent while this is locked for reading, so none
    /// comes when the thread has set it: what it finds then is all there will be.
    stopped: RwLock<bool>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        // The thread is not waited for: the last handle may be dropped by a sink, on it.
        let _ = self.commands.send(Command::Stop);
    }
}

impl<M: CausalLm + ?Sized + 'static> Engine<M> {
    /// Moves the engine to a thread of its own. Requests that were added before have nobody
    /// to hear their outputs.
    ///
    /// # Errors
    /// [`Error::Io`] if the system gives no thread.
    pub fn spawn(self) -> Result<EngineHandle> {
        let (commands, receiver) = mpsc::channel();
        let shared = Arc::new(Shared {
            stats: Mutex::new(self.stats()),
            stopped: RwLock::new(false),
        });
        let (next_id, limits) = (self.next_id.clone(), self.limits.clone());
        let common = shared.clone();
        let thread = std::thread::Builder::new()
            .name("paged-engine".into())
            .spawn(move || Worker::new(self, receiver, common).run())
            .map_err(|source| Error::Io {
                path: "engine thread".into(),
                source,
            })?;
        Ok(EngineHandle {
            owner: Arc::new(Owner {
                commands,
                next_id,
                limits,
                shared,
                thread: Mutex::new(Some(thread)),
            }),
        })
    }
}

impl EngineHandle {
    /// Submits a request. `sink` is called on the engine's thread with each of its outputs,
    /// until the one with a [report](Output::report); while it runs nothing else does. If it
    /// panics the request is cancelled and no other is touched. Never blocks.
    ///
    /// # Errors
    /// As [`Engine::add_request`]; [`Error::StaleHandle`] if the engine has stopped.
    pub fn submit(
        &self,
        request: Request,
        sink: impl FnMut(Output) + Send + 'static,
    ) -> Result<RequestId> {
        request.check(&self.owner.limits)?;
        let id = self.new_id();
        self.send(Command::Submit(id, Box::new(request), Box::new(sink)))?;
        Ok(id)
    }

    /// Submits a request and answers its outputs as a stream. Never blocks.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub fn stream(&self, request: Request) -> Result<OutputStream> {
        request.check(&self.owner.limits)?;
        let id = self.new_id();
        let commands = self.owner.commands.clone();
        let cancel = Box::new(move || {
            // An engine that has stopped has cancelled everything.
            let _ = commands.send(Command::Cancel(id));
        });
        let (sender, stream) = OutputStream::new(id, cancel);
        let sink = Box::new(move |output| sender.send(output));
        self.send(Command::Submit(id, Box::new(request), sink))?;
        Ok(stream)
    }

    /// Ends a request, if it has not ended.
    ///
    /// # Errors
    /// [`Error::StaleHandle`] if the engine has stopped.
    pub fn cancel(&self, request: RequestId) -> Result<()> {
        self.send(Command::Cancel(request))
    }

    /// [`Engine::pin_prefix`] between two steps. Waits for the engine's thread, so it is not
    /// to be called by a sink.
    ///
    /// # Errors
    /// As [`Engine::pin_prefix`]; [`Error::PlanOutstanding`] if somebody else holds a plan of
    /// the cache; [`Error::StaleHandle`] if the engine has stopped.
    pub fn pin_prefix(&self, tokens: &[u32], namespace: Namespace) -> Result<Pin> {
        self.ask(|answer| Command::PinPrefix(tokens.to_vec(), namespace, answer))
    }

    /// Gives up a pin, as [`PagedKvCache::unpin`] does, between two steps. Waits for the
    /// engine's thread, so it is not to be called by a sink.
    ///
    /// # Errors
    /// As [`PagedKvCache::unpin`]; [`Error::StaleHandle`] also if the engine has stopped.
    ///
    /// [`PagedKvCache::unpin`]: crate::cache::PagedKvCache::unpin
    pub fn unpin(&self, pin: Pin) -> Result<()> {
        self.ask(|answer| Command::Unpin(pin, answer))
    }

    /// The figures of the engine, at most a tenth of a second old while it runs.
    pub fn stats(&self) -> Stats {
        let stats = self.owner.shared.stats.lock();
        stats.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Stops the engine, for all handles, and waits until it has. Not to be called by a sink,
    /// which the engine would wait for.
    pub fn shutdown(self) {
        let _ = self.owner.commands.send(Command::Stop);
        let thread = self.owner.thread.lock();
        if let Some(thread) = thread.unwrap_or_else(PoisonError::into_inner).take() {
            let _ = thread.join();
        }
    }

    fn new_id(&self) -> RequestId {
        RequestId(self.owner.next_id.fetch_add(1, Ordering::Relaxed))
    }

    fn send(&self, command: Command) -> Result<()> {
        let has_stopped = self.owner.shared.stopped.read();
        let has_stopped = has_stopped.unwrap_or_else(PoisonError::into_inner);
        if *has_stopped {
            return Err(stopped());
        }
        self.owner.commands.send(command).map_err(|_| stopped())
    }

    /// Sends a command that is answered, and waits for the answer.
    fn ask<T>(&self, command: impl FnOnce(mpsc::Sender<Result<T>>) -> Command) -> Result<T> {
        let (sender, answer) = mpsc::channel();
        self.send(command(sender))?;
        answer.recv().unwrap_or_else(|_| Err(stopped()))
    }
}

fn stopped() -> Error {
    Error::StaleHandle {
        op: "engine_handle",
        kind: "engine",
        id: "of a thread that has stopped".into(),
    }
}

/// The engine's thread.
struct Worker<M: ?Sized> {
    commands: Receiver<Command>,
    sinks: HashMap<RequestId, Sink>,
    shared: Arc<Shared>,
    /// Steps in a row that have failed.
    failures: u32,
    published: Instant,
    engine: Engine<M>,
}

impl<M: CausalLm + ?Sized> Worker<M> {
    fn new(engine: Engine<M>, commands: Receiver<Command>, shared: Arc<Shared>) -> Self {
        Self {
            commands,
            sinks: HashMap::new(),
            shared,
            failures: 0,
            published: Instant::now(),
            engine,
        }
    }

    fn run(mut self) {
        while self.obey() {
            self.step();
            // The figures cost a walk over all block tables: not after each step.
            if !self.engine.has_work() || self.published.elapsed() >= PUBLISH_EVERY {
                self.publish();
            }
        }
        self.stop();
    }

    /// Tells everyone who still waits for an answer.
    fn stop(&mut self) {
        let has_stopped = self.shared.stopped.write();
        *has_stopped.unwrap_or_else(PoisonError::into_inner) = true;
        // Somebody may have submitted a request behind the command to stop.
        while let Ok(command) = self.commands.try_recv() {
            if let Command::Submit(id, request, sink) = command {
                self.accept(id, *request, sink);
            }
        }
        let open: Vec<RequestId> = self.engine.requests.keys().copied().collect();
        for id in open {
            self.engine.cancel(id);
        }
        self.deliver();
        self.publish();
    }

    fn accept(&mut self, id: RequestId, request: Request, sink: Sink) {
        self.sinks.insert(id, sink);
        self.engine.accept(id, request);
    }

    /// Takes all commands that are there, and waits for one if there is nothing else to do.
    /// Answers whether to go on.
    fn obey(&mut self) -> bool {
        loop {
            let command = if self.engine.has_work() {
                match self.commands.try_recv() {
                    Ok(command) => command,
                    Err(TryRecvError::Empty) => return true,
                    Err(TryRecvError::Disconnected) => return false,
                }
            } else {
                match self.commands.recv() {
                    Ok(command) => command,
                    Err(_) => return false,
                }
            };
            match command {
                Command::Submit(id, request, sink) => self.accept(id, *request, sink),
                Command::Cancel(id) => self.engine.cancel(id),
                // Who asked waits for the answer; if not, it is of no use to anyone.
                Command::PinPrefix(tokens, namespace, answer) => {
                    let engine = &mut self.engine;
                    let pin = || engine.pin_prefix(&tokens, namespace);
                    let pin = catch_unwind(AssertUnwindSafe(pin));
                    let _ = answer.send(pin.unwrap_or_else(|_| Err(panicked())));
                }
                Command::Unpin(pin, answer) => {
                    let _ = answer.send(self.engine.cache.unpin(pin));
                }
                Command::Stop => return false,
            }
        }
    }

    fn step(&mut self) {
        // The plan of a step that panics is rolled back like that of one that fails.
        let step = catch_unwind(AssertUnwindSafe(|| self.engine.step()));
        let failed = match step {
            Ok(Ok(outputs)) => {
                self.failures = 0;
                self.engine.ready = outputs;
                None
            }
            Ok(Err(error)) => Some(error),
            Err(_) => Some(panicked()),
        };
        if let Some(error) = failed {
            // If somebody else holds a plan no request is to blame, and only time helps.
            if !matches!(error, Error::PlanOutstanding { .. }) {
                tracing::warn!(%error, "a step failed");
                self.failures += 1;
                if self.failures > 1 {
                    self.engine.fail_step(&error);
                }
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        self.deliver();
    }

    /// Hands outputs to their sinks. A sink that panics loses its request.
    fn deliver(&mut self) {
        for output in std::mem::take(&mut self.engine.ready) {
            let (id, last) = (output.request, output.report.is_some());
            let Some(sink) = self.sinks.get_mut(&id) else {
                continue;
            };
            let heard = catch_unwind(AssertUnwindSafe(|| sink(output)));
            if heard.is_err() || last {
                self.sinks.remove(&id);
            }
            if heard.is_err() {
                self.engine.end_request(id, FinishReason::Cancelled);
            }
        }
    }

    fn publish(&mut self) {
        self.published = Instant::now();
        let stats = self.engine.stats();
        let published = self.shared.stats.lock();
        *published.unwrap_or_else(PoisonError::into_inner) = stats;
    }
}

fn panicked() -> Error {
    Error::Invariant {
        op: "engine",
        what: "the model panicked".into(),
    }
}
