//! The engine on its own thread.

use std::pin::pin;
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use candle_paged_attn::Error;
use candle_paged_attn::engine::{Answer, EngineConfig, EngineHandle, FinishReason, Output};
use futures_core::Stream;

use crate::hash_lm::{engine, model, prompt, request, tokens};

const PATIENCE: Duration = Duration::from_secs(60);

fn spawn() -> EngineHandle {
    engine(model(30), 64, 4, EngineConfig::default())
        .spawn()
        .unwrap()
}

fn collect(outputs: impl Iterator<Item = Output>) -> Answer {
    let mut answer = Answer::default();
    outputs.for_each(|output| answer.push(output));
    answer
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

#[test]
fn outputs_are_an_asynchronous_stream() {
    let handle = spawn();
    let asked = prompt(1, 7, 30);
    let mut stream = pin!(handle.stream(request(&asked, 12)).unwrap());
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut answer = Answer::default();
    loop {
        match stream.as_mut().poll_next(&mut context) {
            Poll::Ready(Some(output)) => answer.push(output),
            Poll::Ready(None) => break,
            Poll::Pending => std::thread::park_timeout(PATIENCE),
        }
    }
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
    let mut stream = handle.stream(request(&prompt(1, 7, 30), 200)).unwrap();
    stream.next().unwrap();
    drop(stream);
    let started = std::time::Instant::now();
    while handle.stats().finished == 0 {
        assert!(started.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(handle.stats().blocks_used, 0);
}
