//! The engine on its own thread.

use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use candle_paged_attn::Error;
use candle_paged_attn::block::Namespace;
use candle_paged_attn::cache::{AddOptions, Feed, PagedKvCache};
use candle_paged_attn::engine::{Answer, EngineConfig, EngineHandle, FinishReason, Output, Sample};
use futures_core::Stream;

use crate::hash_lm::{engine, model, prompt, request, run, tokens};

const PATIENCE: Duration = Duration::from_secs(60);

fn spawn() -> EngineHandle {
    engine(model(30), 64, 4, EngineConfig::default())
        .spawn()
        .unwrap()
}

fn collect(outputs: impl IntoIterator<Item = Output>) -> Answer {
    let mut answer = Answer::default();
    for output in outputs {
        answer.push(output);
    }
    answer
}

fn wait_until(mut done: impl FnMut() -> bool) {
    let started = std::time::Instant::now();
    while !done() {
        assert!(started.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn many_threads_submit_and_each_hears_its_own() {
    fn assert_shareable<T: Send + Sync + Clone>(_: &T) {}
    let handle = spawn();
    assert_shareable(&handle);
    let threads: Vec<_> = (0..6)
        .map(|seed| {
            let handle = handle.clone();
            std::thread::spawn(move || {
                let asked = prompt(seed, 5 + seed as usize, 30);
                let (sender, receiver) = mpsc::channel();
                handle
                    .submit(request(&asked, 9), move |output| {
                        sender.send(output).unwrap()
                    })
                    .unwrap();
                let answer = collect(receiver.iter());
                assert_eq!(tokens(&answer), model(30).greedy(&asked, 9));
                let answer = collect(handle.stream(request(&asked, 9)).unwrap());
                assert_eq!(tokens(&answer), model(30).greedy(&asked, 9));
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    handle.clone().shutdown();
    assert_eq!(handle.stats().finished, 12);
    assert_eq!(handle.stats().blocks_used, 0);
    let stopped = handle.submit(request(&[1], 1), |_| {});
    assert!(matches!(
        stopped,
        Err(Error::StaleHandle { kind: "engine", .. })
    ));
}

#[test]
fn a_bad_request_is_refused_at_the_door() {
    let handle = spawn();
    assert!(matches!(
        handle.submit(request(&[], 1), |_| {}),
        Err(Error::Empty { .. })
    ));
    assert!(matches!(
        handle.stream(request(&[99], 1)),
        Err(Error::TokenOutOfRange { .. })
    ));
}

/// Wakes a thread that sleeps, which is all an executor needs.
struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(answer) => return answer,
            Poll::Pending => std::thread::park_timeout(PATIENCE),
        }
    }
}

/// As in the crate `futures`: a trait of all streams whose methods are called like those of
/// iterators.
trait StreamExt: Stream {
    fn next(&mut self) -> impl Future<Output = Option<Self::Item>>
    where
        Self: Unpin,
    {
        std::future::poll_fn(move |context| Pin::new(&mut *self).poll_next(context))
    }
}

impl<S: Stream + ?Sized> StreamExt for S {}

#[test]
fn outputs_are_an_asynchronous_stream() {
    let handle = spawn();
    let asked = prompt(1, 7, 30);
    let mut stream = handle.stream(request(&asked, 12)).unwrap();
    let answer = block_on(async {
        let mut answer = Answer::default();
        while let Some(output) = stream.next().await {
            answer.push(output);
        }
        answer
    });
    assert_eq!(tokens(&answer), model(30).greedy(&asked, 12));
}

#[test]
fn a_sink_that_panics_harms_nobody_else() {
    let handle = spawn();
    let asked = prompt(1, 7, 30);
    handle
        .submit(request(&asked, 3000), |output| {
            assert!(output.tokens.is_empty(), "expected by the test");
        })
        .unwrap();
    let answer = collect(handle.stream(request(&asked, 12)).unwrap());
    assert_eq!(tokens(&answer), model(30).greedy(&asked, 12));
    handle.clone().shutdown();
    assert_eq!(handle.stats().blocks_used, 0);
}

#[test]
fn a_forward_that_fails_once_goes_unnoticed_and_twice_ends_the_request() {
    let failing = engine(model(30), 64, 4, EngineConfig::default());
    let lm = failing.model().clone();
    let handle = failing.spawn().unwrap();
    let asked = prompt(1, 7, 30);
    for (failures, ends) in [(1, false), (2, true), (0, false)] {
        lm.failures
            .store(failures, std::sync::atomic::Ordering::Relaxed);
        let answer = collect(handle.stream(request(&asked, 4)).unwrap());
        if ends {
            let finish = answer.samples[0].finish.as_ref().unwrap();
            assert!(matches!(finish, FinishReason::Failed(why) if why.contains("injected")));
        } else {
            assert_eq!(tokens(&answer), model(30).greedy(&asked, 4));
        }
    }
}

/// Requests that run when the last handle is dropped end as cancelled.
#[test]
fn dropping_the_engine_cancels_what_runs() {
    let handle = spawn();
    let (sender, receiver) = mpsc::channel();
    // The engine stands still in the first output until the handle is gone.
    let (go_on, gate) = mpsc::channel::<()>();
    let stream = handle.stream(request(&prompt(2, 7, 30), 200)).unwrap();
    handle
        .submit(request(&prompt(1, 7, 30), 200), move |output| {
            let _ = gate.recv();
            sender.send(output).unwrap();
        })
        .unwrap();
    drop(handle);
    drop(go_on);
    let last = receiver.iter().last().unwrap();
    assert_eq!(last.finish, Some(FinishReason::Cancelled));
    assert!(last.report.is_some());
    let streamed = collect(stream);
    assert_eq!(streamed.samples[0].finish, Some(FinishReason::Cancelled));
}

#[test]
fn dropping_a_stream_cancels_its_request() {
    let handle = spawn();
    let stream = handle.stream(request(&prompt(1, 7, 30), 200)).unwrap();
    let mut outputs = stream.into_iter();
    outputs.next().unwrap();
    drop(outputs);
    wait_until(|| handle.stats().finished == 1);
    assert_eq!(handle.stats().blocks_used, 0);
}

/// A request that another thread submits while the engine stops is told so.
#[test]
fn a_request_behind_the_stop_ends_as_cancelled() {
    let handle = spawn();
    // The engine stands still in the first output until the gate is gone.
    let (go_on, gate) = mpsc::channel::<()>();
    let (inside, entered) = mpsc::channel();
    handle
        .submit(request(&prompt(1, 7, 30), 200), move |_| {
            let _ = inside.send(());
            let _ = gate.recv();
        })
        .unwrap();
    entered.recv().unwrap();
    let stopping = std::thread::spawn({
        let handle = handle.clone();
        move || handle.shutdown()
    });
    std::thread::sleep(Duration::from_millis(50));
    let asked = request(&prompt(2, 9, 30), 5).with_n(2);
    let stream = handle.stream(asked).unwrap();
    let pinning = std::thread::spawn({
        let handle = handle.clone();
        move || handle.pin_prefix(&[1, 2, 3, 4], Namespace::default())
    });
    std::thread::sleep(Duration::from_millis(50));
    drop(go_on);
    stopping.join().unwrap();
    let answer = collect(stream);
    let cancelled = |sample: &Sample| sample.finish == Some(FinishReason::Cancelled);
    assert_eq!(answer.samples.len(), 2);
    assert!(answer.samples.iter().all(cancelled), "{answer:?}");
    assert_eq!(answer.report.unwrap().prompt_tokens, 9);
    let stopped = pinning.join().unwrap();
    assert!(matches!(stopped, Err(Error::StaleHandle { .. })));
    assert!(matches!(
        handle.stream(request(&[1], 1)),
        Err(Error::StaleHandle { kind: "engine", .. })
    ));
}

/// Runs `meanwhile` while a plan of somebody else is alive.
fn beside_a_plan<T>(cache: &PagedKvCache, meanwhile: impl FnOnce() -> T) -> T {
    let other = cache.add(&[1, 2], AddOptions::default()).unwrap().id;
    let plan = cache.plan(&[Feed::new(other, &[1, 2])]).unwrap();
    let answer = meanwhile();
    drop(plan);
    // The engine may be the next to hold one.
    wait_until(|| cache.remove(other).is_ok());
    answer
}

#[test]
fn a_plan_of_somebody_else_fails_no_request() {
    let engine = engine(model(30), 64, 4, EngineConfig::default());
    let cache = engine.cache().clone();
    let handle = engine.spawn().unwrap();
    let asked = prompt(1, 7, 30);
    let (stream, pinned) = beside_a_plan(&cache, || {
        let stream = handle.stream(request(&asked, 5)).unwrap();
        // Dozens of steps are tried.
        std::thread::sleep(Duration::from_millis(50));
        (stream, handle.pin_prefix(&asked, Namespace::default()))
    });
    assert!(matches!(pinned, Err(Error::PlanOutstanding { .. })));
    assert_eq!(tokens(&collect(stream)), model(30).greedy(&asked, 5));
}

#[test]
fn a_plan_of_somebody_else_delays_no_cancellation() {
    let engine = engine(model(30), 64, 4, EngineConfig::default());
    let cache = engine.cache().clone();
    let handle = engine.spawn().unwrap();
    let heard = Arc::new(Mutex::new(Answer::default()));
    let (inside, entered) = mpsc::channel();
    let (go_on, gate) = mpsc::channel::<()>();
    let id = handle
        .submit(request(&prompt(1, 7, 30), 200), {
            let heard = heard.clone();
            move |output| {
                heard.lock().unwrap().push(output);
                let _ = inside.send(());
                let _ = gate.recv();
            }
        })
        .unwrap();
    // In a sink the engine holds no plan, so there is room for another.
    entered.recv().unwrap();
    beside_a_plan(&cache, || {
        handle.cancel(id).unwrap();
        drop(go_on);
        wait_until(|| heard.lock().unwrap().report.is_some());
    });
    let answer = heard.lock().unwrap().clone();
    assert_eq!(answer.samples[0].finish, Some(FinishReason::Cancelled));
    assert_eq!(cache.num_sequences(), 0);
}

#[test]
fn a_plan_of_somebody_else_does_not_silence_the_stop() {
    let engine = engine(model(30), 64, 4, EngineConfig::default());
    let cache = engine.cache().clone();
    let handle = engine.spawn().unwrap();
    let (inside, entered) = mpsc::channel();
    let (go_on, gate) = mpsc::channel::<()>();
    let (sender, receiver) = mpsc::channel();
    handle
        .submit(request(&prompt(1, 7, 30), 200), move |output| {
            let _ = sender.send(output);
            let _ = inside.send(());
            let _ = gate.recv();
        })
        .unwrap();
    entered.recv().unwrap();
    beside_a_plan(&cache, || {
        drop(go_on);
        handle.shutdown();
    });
    let last = receiver.iter().last().unwrap();
    assert_eq!(last.finish, Some(FinishReason::Cancelled));
    assert!(last.report.is_some());
    assert_eq!(cache.num_sequences(), 0);
}

#[test]
fn a_loop_of_ones_own_gets_the_error_of_a_plan_of_somebody_else() {
    let mut engine = engine(model(30), 64, 4, EngineConfig::default());
    let cache = engine.cache().clone();
    let asked = prompt(1, 7, 30);
    let error = beside_a_plan(&cache, || {
        let error = engine.generate(vec![request(&asked, 5)], |_| {});
        error.unwrap_err()
    });
    assert!(matches!(error, Error::PlanOutstanding { .. }), "{error}");
    let answers = run(&mut engine);
    let answer = answers.values().next().unwrap();
    assert_eq!(tokens(answer), model(30).greedy(&asked, 5));
}

#[test]
fn a_running_engine_pins_prefixes() {
    let handle = spawn();
    let system = prompt(1, 12, 30);
    let pin = handle.pin_prefix(&system, Namespace::default()).unwrap();
    assert_eq!(pin.tokens, 12);
    let mut asked = system.clone();
    asked.push(3);
    let answer = collect(handle.stream(request(&asked, 4)).unwrap());
    assert_eq!(answer.report.as_ref().unwrap().cached_tokens, 12);
    assert_eq!(tokens(&answer), model(30).greedy(&asked, 4));
    wait_until(|| handle.stats().blocks_used == 3);
    handle.unpin(pin).unwrap();
    assert!(matches!(handle.unpin(pin), Err(Error::StaleHandle { .. })));
    let empty = handle.pin_prefix(&[], Namespace::default());
    assert!(matches!(empty, Err(Error::Empty { .. })));
    let stats = {
        handle.clone().shutdown();
        handle.stats()
    };
    assert_eq!(stats.blocks_used, 0);
    let stopped = handle.pin_prefix(&system, Namespace::default());
    assert!(matches!(stopped, Err(Error::StaleHandle { .. })));
}
