//! An engine on its own thread.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::config::Limits;
use super::engine::Engine;
use super::metrics::Stats;
use super::output::{FinishReason, Output};
use super::request::{Request, RequestId};
use super::stream::OutputStream;
use crate::error::{Error, Result};
use crate::models::CausalLm;

const PUBLISH_EVERY: Duration = Duration::from_millis(100);

type Sink = Box<dyn FnMut(Output) + Send>;

enum Command {
    Submit(RequestId, Box<Request>, Sink),
    Cancel(RequestId),
    Stop,
}

/// A door to an engine that runs on its own thread: cheap to clone, to be used from anywhere.
///
/// The engine stops when the last handle is dropped, or at [`shutdown`](Self::shutdown);
/// requests that run then end as [`FinishReason::Cancelled`].
#[derive(Debug, Clone)]
pub struct EngineHandle {
    owner: Arc<Owner>,
}

#[derive(Debug)]
struct Owner {
    commands: mpsc::Sender<Command>,
    next_id: Arc<AtomicU64>,
    limits: Limits,
    stats: Arc<Mutex<Stats>>,
    thread: Mutex<Option<JoinHandle<()>>>,
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
        let stats: Arc<Mutex<Stats>> = Arc::new(Mutex::new(self.stats()));
        let (next_id, limits) = (self.next_id.clone(), self.limits.clone());
        let shared = stats.clone();
        let thread = std::thread::Builder::new()
            .name("paged-engine".into())
            .spawn(move || Worker::new(self, receiver, shared).run())
            .map_err(|source| Error::Io {
                path: "engine thread".into(),
                source,
            })?;
        Ok(EngineHandle {
            owner: Arc::new(Owner {
                commands,
                next_id,
                limits,
                stats,
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

    /// The figures of the engine, at most a tenth of a second old while it runs.
    pub fn stats(&self) -> Stats {
        let stats = self.owner.stats.lock();
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
        let stopped = |_| Error::StaleHandle {
            op: "engine_handle",
            kind: "engine",
            id: "of a thread that has stopped".into(),
        };
        self.owner.commands.send(command).map_err(stopped)
    }
}

/// The engine's thread.
struct Worker<M: ?Sized> {
    commands: Receiver<Command>,
    sinks: HashMap<RequestId, Sink>,
    stats: Arc<Mutex<Stats>>,
    /// Steps in a row that have failed.
    failures: u32,
    published: Instant,
    engine: Engine<M>,
}

impl<M: CausalLm + ?Sized> Worker<M> {
    fn new(engine: Engine<M>, commands: Receiver<Command>, stats: Arc<Mutex<Stats>>) -> Self {
        Self {
            commands,
            sinks: HashMap::new(),
            stats,
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
        let open: Vec<RequestId> = self.engine.requests.keys().copied().collect();
        for id in open {
            self.engine.cancel(id);
        }
        self.deliver();
        self.publish();
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
                Command::Submit(id, request, sink) => {
                    self.sinks.insert(id, sink);
                    self.engine.accept(id, *request);
                }
                Command::Cancel(id) => self.engine.cancel(id),
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
            Err(_) => Some(Error::Invariant {
                op: "engine",
                what: "the model panicked".into(),
            }),
        };
        if let Some(error) = failed {
            tracing::warn!(%error, "a step failed");
            self.failures += 1;
            if self.failures > 1 {
                self.engine.fail_step(&error);
            }
            // If somebody else holds a plan only time helps.
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
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner) = stats;
    }
}
