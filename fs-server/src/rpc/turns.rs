//! Turns: which client's request for file bytes runs next on a worker.
//!
//! Owns `MOST_RUNNING` turns. A request that moves bytes takes one before it takes any lock or buffer and gives it back
//! when it is answered. When all are taken requests wait, each session's in a queue of its own, and sessions take turns:
//! a client with sixty lanes gets as much of a busy SSD as one with a single lane.
//!
//! # Invariants
//! * A request that holds a lock or a buffer holds a turn, so whoever waits for a turn keeps nobody from going on.
//! * No more wait than connections have receives posted: a client whose request waits can send no other on that lane.
//!   That is the back-pressure.
//!
//! Requests that move no bytes (names, heartbeats) take no turn: a slow SSD does not cost a client its lease.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Poll, Waker};

/// Requests for file bytes that run on one worker at once: enough to keep a fast SSD busy, few enough that one that
/// comes next waits for a few of them only.
pub const MOST_RUNNING: usize = 64;

/// Requests for file bytes on all workers, of about this moment: for `status`. Relaxed.
#[derive(Debug, Default)]
pub struct TurnFigures {
    running: AtomicUsize,
    waiting: AtomicUsize,
}

impl TurnFigures {
    /// Requests that hold a turn.
    pub fn running(&self) -> usize {
        self.running.load(Ordering::Relaxed)
    }

    /// Requests that wait for one.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }
}

#[derive(Default)]
struct Waiter {
    granted: bool,
    waker: Option<Waker>,
}

struct State {
    free: usize,
    /// Sessions with waiters, the next to be served in front.
    order: VecDeque<u64>,
    queues: HashMap<u64, VecDeque<Rc<RefCell<Waiter>>>>,
    waiting: usize,
    figures: Arc<TurnFigures>,
}

/// The turns of one worker.
#[derive(Clone)]
pub struct Turns(Rc<RefCell<State>>);

impl Turns {
    /// `MOST_RUNNING` turns, counted in `figures`.
    pub fn new(figures: Arc<TurnFigures>) -> Self {
        Self::of(MOST_RUNNING, figures)
    }

    fn of(most_running: usize, figures: Arc<TurnFigures>) -> Self {
        Self(Rc::new(RefCell::new(State {
            free: most_running,
            order: VecDeque::new(),
            queues: HashMap::new(),
            waiting: 0,
            figures,
        })))
    }

    /// Waits for a turn of this session.
    pub async fn take(&self, session: u64) -> Turn {
        {
            let mut state = self.0.borrow_mut();
            // Those who wait come first, or a steady stream would starve them.
            if state.free > 0 && state.waiting == 0 {
                state.free -= 1;
                state.figures.running.fetch_add(1, Ordering::Relaxed);
                return Turn { turns: self.clone() };
            }
        }
        let waiter = Rc::new(RefCell::new(Waiter::default()));
        {
            let mut state = self.0.borrow_mut();
            state.waiting += 1;
            state.figures.waiting.fetch_add(1, Ordering::Relaxed);
            let queue = state.queues.entry(session).or_default();
            queue.push_back(waiter.clone());
            if queue.len() == 1 {
                state.order.push_back(session);
            }
        }
        let mut place = Place { turns: self, session, waiter, taken: false };
        poll_fn(|context| {
            let mut waiter = place.waiter.borrow_mut();
            if waiter.granted {
                return Poll::Ready(());
            }
            waiter.waker = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
        place.taken = true;
        Turn { turns: self.clone() }
    }

    /// A turn is free: the next session's oldest waiter has it.
    fn pass_on(&self) {
        let mut state = self.0.borrow_mut();
        let Some(session) = state.order.pop_front() else {
            state.free += 1;
            state.figures.running.fetch_sub(1, Ordering::Relaxed);
            return;
        };
        let queue = state.queues.get_mut(&session).expect("a session in the order has waiters");
        let waiter = queue.pop_front().expect("a session in the order has waiters");
        if queue.is_empty() {
            state.queues.remove(&session);
        } else {
            state.order.push_back(session);
        }
        state.waiting -= 1;
        // The turn itself goes on running, as another request's.
        state.figures.waiting.fetch_sub(1, Ordering::Relaxed);
        drop(state);
        let mut waiter = waiter.borrow_mut();
        waiter.granted = true;
        if let Some(waker) = waiter.waker.take() {
            waker.wake();
        }
    }

    fn leave(&self, session: u64, waiter: &Rc<RefCell<Waiter>>) {
        let mut state = self.0.borrow_mut();
        let Some(queue) = state.queues.get_mut(&session) else {
            return;
        };
        let before = queue.len();
        queue.retain(|other| !Rc::ptr_eq(other, waiter));
        let left = before - queue.len();
        if queue.is_empty() {
            state.queues.remove(&session);
            state.order.retain(|other| *other != session);
        }
        state.waiting -= left;
        state.figures.waiting.fetch_sub(left, Ordering::Relaxed);
    }
}

/// A place in line; given up if the request is dropped.
struct Place<'t> {
    turns: &'t Turns,
    session: u64,
    waiter: Rc<RefCell<Waiter>>,
    taken: bool,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if self.taken {
            return;
        }
        if self.waiter.borrow().granted {
            self.turns.pass_on();
        } else {
            self.turns.leave(self.session, &self.waiter);
        }
    }
}

/// A turn; given back when dropped.
pub struct Turn {
    turns: Turns,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.turns.pass_on();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_lite::future::{block_on, poll_once};
    use std::pin::{Pin, pin};

    type Taking<'t> = Pin<Box<dyn std::future::Future<Output = Turn> + 't>>;

    fn is_ready(taking: &mut Taking<'_>) -> Option<Turn> {
        block_on(poll_once(taking))
    }

    #[test]
    fn sessions_take_turns_whatever_they_ask_for() {
        let turns = Turns::of(1, Arc::default());
        let running = block_on(turns.take(1));
        let mut greedy: Vec<Taking<'_>> = (0..4).map(|_| Box::pin(turns.take(1)) as Taking<'_>).collect();
        greedy.iter_mut().for_each(|taking| assert!(is_ready(taking).is_none()));
        let mut modest: Taking<'_> = Box::pin(turns.take(2));
        assert!(is_ready(&mut modest).is_none());
        drop(running);
        // The greedy session stood first; the modest one comes before its second.
        let first = is_ready(&mut greedy[0]).expect("the first in line");
        assert!(is_ready(&mut modest).is_none() && is_ready(&mut greedy[1]).is_none());
        drop(first);
        assert!(is_ready(&mut greedy[1]).is_none());
        let second = is_ready(&mut modest).expect("the other session's turn");
        drop(second);
        let third = is_ready(&mut greedy[1]).expect("and the first one's again");
        drop(third);
        drop(is_ready(&mut greedy[2]).expect("its third"));
        drop(is_ready(&mut greedy[3]).expect("its last"));
        assert_eq!((turns.0.borrow().free, turns.0.borrow().waiting), (1, 0));
    }

    #[test]
    fn who_leaves_the_line_takes_nothing_along() {
        let figures = Arc::new(TurnFigures::default());
        let turns = Turns::of(1, figures.clone());
        let running = block_on(turns.take(1));
        let mut waits: Taking<'_> = Box::pin(turns.take(2));
        let mut leaves: Taking<'_> = Box::pin(turns.take(3));
        let mut granted: Taking<'_> = Box::pin(turns.take(4));
        assert!(is_ready(&mut waits).is_none() && is_ready(&mut leaves).is_none());
        assert!(is_ready(&mut granted).is_none());
        assert_eq!((figures.running(), figures.waiting()), (1, 3));
        drop(leaves);
        assert_eq!((figures.running(), figures.waiting()), (1, 2));
        drop(running);
        assert_eq!((figures.running(), figures.waiting()), (1, 1));
        drop(is_ready(&mut waits).expect("its turn"));
        // Granted, but dropped before it looked.
        drop(granted);
        assert_eq!((turns.0.borrow().free, turns.0.borrow().waiting), (1, 0));
        assert!(turns.0.borrow().queues.is_empty() && turns.0.borrow().order.is_empty());
        assert_eq!((figures.running(), figures.waiting()), (0, 0));
        let again = pin!(turns.take(5));
        drop(block_on(again));
    }

    #[test]
    fn newcomers_do_not_overtake() {
        let turns = Turns::of(2, Arc::default());
        let (a, b) = (block_on(turns.take(1)), block_on(turns.take(1)));
        let mut waits: Taking<'_> = Box::pin(turns.take(2));
        assert!(is_ready(&mut waits).is_none());
        drop((a, b));
        let mut late: Taking<'_> = Box::pin(turns.take(3));
        let late = is_ready(&mut late).expect("one turn is granted to who waited, one is free");
        let waited = is_ready(&mut waits).expect("granted");
        drop((late, waited));
        assert_eq!(turns.0.borrow().free, 2);
    }
}
