//! A batch of IOs with one future for all results.
//!
//! The disk has one end and puts each finished IO into its place. The future is the other end and resolves when every place is filled. Dropping the
//! future loses only the results: the disk still owns the buffers of IOs in flight, and frees them when these complete.

use super::disk::IoDone;
use parking_lot::Mutex;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// The disk's end of a batch.
#[derive(Clone, Debug)]
pub(super) struct Batch {
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    places: Vec<Option<IoDone>>,
    missing: usize,
    waker: Option<Waker>,
}

impl Batch {
    /// A batch of `len` IOs, and the future of its results in request order.
    pub(super) fn new(len: usize) -> (Self, BatchFuture) {
        let places = std::iter::repeat_with(|| None).take(len).collect();
        let state = Arc::new(Mutex::new(State { places, missing: len, waker: None }));
        (Self { state: state.clone() }, BatchFuture { state })
    }

    /// Puts in the result of IO number `index`.
    pub(super) fn finish(&self, index: usize, done: IoDone) {
        let waker = {
            let mut state = self.state.lock();
            assert!(state.places[index].is_none(), "an IO finishes once");
            state.places[index] = Some(done);
            state.missing -= 1;
            if state.missing == 0 { state.waker.take() } else { None }
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// Resolves to the results in request order.
#[derive(Debug)]
pub(super) struct BatchFuture {
    state: Arc<Mutex<State>>,
}

impl Future for BatchFuture {
    type Output = Vec<IoDone>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.state.lock();
        if state.missing > 0 {
            state.waker = Some(context.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(std::mem::take(&mut state.places).into_iter().flatten().collect())
    }
}

/// The disk's end of a single result, such as a sync's.
#[derive(Clone, Debug)]
pub(super) struct Ticket {
    state: Arc<Mutex<TicketState>>,
}

#[derive(Debug, Default)]
struct TicketState {
    result: Option<std::io::Result<()>>,
    waker: Option<Waker>,
}

impl Ticket {
    /// A ticket and the future of its result.
    pub(super) fn new() -> (Self, TicketFuture) {
        let state = Arc::new(Mutex::new(TicketState::default()));
        (Self { state: state.clone() }, TicketFuture { state })
    }

    /// Puts in the result.
    pub(super) fn finish(&self, result: std::io::Result<()>) {
        let waker = {
            let mut state = self.state.lock();
            state.result = Some(result);
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// Resolves to a ticket's result.
#[derive(Debug)]
pub(super) struct TicketFuture {
    state: Arc<Mutex<TicketState>>,
}

impl Future for TicketFuture {
    type Output = std::io::Result<()>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.state.lock();
        match state.result.take() {
            Some(result) => Poll::Ready(result),
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}
