//! Timers of one worker: a sorted map from deadline to waker.
//!
//! A `Sleep` adds its entry when it is first polled and removes it when it is dropped, so there are never more entries than sleeping tasks. Timers
//! with the same deadline fire in the order in which they were made.

use cuttlefs_common::world::Clock;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// The deadline and the number of a timer.
type Key = (Duration, u64);

/// A worker's timers.
pub(super) struct Timers {
    clock: Arc<dyn Clock>,
    entries: RefCell<BTreeMap<Key, Waker>>,
    last_number: Cell<u64>,
}

impl std::fmt::Debug for Timers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Timers").field("entries", &self.len()).finish_non_exhaustive()
    }
}

impl Timers {
    pub(super) fn new(clock: Arc<dyn Clock>) -> Self {
        Self { clock, entries: RefCell::default(), last_number: Cell::new(0) }
    }

    pub(super) fn now(&self) -> Duration {
        self.clock.monotonic()
    }

    pub(super) fn len(&self) -> usize {
        self.entries.borrow().len()
    }

    pub(super) fn sleep(this: &Rc<Self>, duration: Duration) -> Sleep {
        let number = this.last_number.get() + 1;
        this.last_number.set(number);
        let deadline = this.now().saturating_add(duration);
        Sleep { timers: this.clone(), key: (deadline, number) }
    }

    pub(super) fn next_deadline(&self) -> Option<Duration> {
        self.entries.borrow().keys().next().map(|(deadline, _)| *deadline)
    }

    /// How long until the next timer; zero if it is overdue.
    pub(super) fn until_next(&self) -> Option<Duration> {
        self.next_deadline().map(|deadline| deadline.saturating_sub(self.now()))
    }

    /// Wakes the tasks of due timers. Returns whether there were any.
    pub(super) fn fire(&self) -> bool {
        if self.entries.borrow().is_empty() {
            return false;
        }
        let now = self.now();
        let mut any = false;
        loop {
            // The waker runs outside of the borrow, because it may drop another `Sleep`.
            let due = {
                let mut entries = self.entries.borrow_mut();
                match entries.first_entry() {
                    Some(entry) if entry.key().0 <= now => entry.remove(),
                    _ => return any,
                }
            };
            any = true;
            due.wake();
        }
    }
}

/// Resolves at its deadline.
#[derive(Debug)]
#[must_use = "a Sleep does nothing unless it is awaited"]
pub struct Sleep {
    timers: Rc<Timers>,
    key: Key,
}

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.timers.now() >= self.key.0 {
            return Poll::Ready(());
        }
        self.timers.entries.borrow_mut().insert(self.key, context.waker().clone());
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        let removed = self.timers.entries.borrow_mut().remove(&self.key);
        // Dropping a waker can drop a task and with it another `Sleep`, so it happens outside of the borrow.
        drop(removed);
    }
}
