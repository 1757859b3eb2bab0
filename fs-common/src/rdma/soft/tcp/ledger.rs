//! The memory that an engine's connections hold because of their peers: output that peers do not take, packets that arrive slowly, messages without a
//! receive.
//!
//! # How it works
//! A connection has an `Account` and notes there whenever it holds more or less; the `Ledger` has the sum. Above the bound the engine chooses the
//! peer that holds most, and ends the connection of that peer that holds most, until the sum is below the bound: a peer that asks for little is never
//! chosen. A connection that holds memory and makes no progress for `STALL_PATIENCE` is ended, too (`Progress`).
//!
//! # Ordering
//! These are only sums, and publish nothing: relaxed. Where an order is needed, the engine's bell gives it.

use crate::rdma::soft::queue::MAX_TRANSFER_BYTES;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Bytes that all connections of an engine hold at most. Mounts that read promptly leave next to nothing unread; there is room for sixty replies of 1
/// MiB to each of four mounts on slow links.
pub(in crate::rdma::soft) const HELD_MAX_BYTES: usize = 256 << 20;
/// How long output may wait while the peer takes less than one transfer of it, and how long a packet that has begun may take to arrive: every link in
/// use carries more than a megabyte in half a minute.
pub(super) const STALL_PATIENCE: Duration = Duration::from_secs(30);

/// The sum of what all connections of an engine hold.
pub(super) struct Ledger {
    held: AtomicUsize,
    most: usize,
}

impl Ledger {
    /// A ledger with nothing held, and this bound in bytes.
    pub(super) fn new(most: usize) -> Self {
        Self { held: AtomicUsize::new(0), most }
    }

    pub(super) fn most(&self) -> usize {
        self.most
    }

    pub(super) fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    pub(super) fn is_over(&self) -> bool {
        self.held() > self.most
    }
}

/// What the engine has to do after a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    Nothing,
    /// The engine has to check: something is held where nothing was, or too much is held.
    Look,
}

/// The memory that one connection holds.
pub(super) struct Account {
    ledger: Option<Arc<Ledger>>,
    /// Written under the send lock.
    output: AtomicUsize,
    /// Written under the receive lock.
    input: AtomicUsize,
}

impl Account {
    /// `None`: a self-driven side, which trusts the server it chose to connect to.
    pub(super) fn new(ledger: Option<Arc<Ledger>>) -> Self {
        Self { ledger, output: AtomicUsize::new(0), input: AtomicUsize::new(0) }
    }

    pub(super) fn held(&self) -> usize {
        self.output.load(Ordering::Relaxed) + self.input.load(Ordering::Relaxed)
    }

    pub(super) fn set_output(&self, bytes: usize) -> Due {
        self.set(&self.output, bytes)
    }

    pub(super) fn set_input(&self, bytes: usize) -> Due {
        self.set(&self.input, bytes)
    }

    fn set(&self, part: &AtomicUsize, bytes: usize) -> Due {
        let before = part.load(Ordering::Relaxed);
        let Some(ledger) = self.ledger.as_ref().filter(|_| bytes != before) else { return Due::Nothing };
        part.store(bytes, Ordering::Relaxed);
        if bytes < before {
            ledger.held.fetch_sub(before - bytes, Ordering::Relaxed);
            return Due::Nothing;
        }
        let all = ledger.held.fetch_add(bytes - before, Ordering::Relaxed);
        if all == 0 || all + (bytes - before) > ledger.most { Due::Look } else { Due::Nothing }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.set_output(0);
        self.set_input(0);
    }
}

/// A snapshot of a connection's progress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Progress {
    /// Bytes that wait for the socket.
    pub(super) waiting: usize,
    /// Bytes that have reached the socket.
    pub(super) reached: u64,
    /// A packet has begun to arrive, and only the peer can complete it.
    pub(super) is_partial: bool,
    /// Requests and replies taken.
    pub(super) packets: u64,
}

impl Progress {
    /// Whether nothing has progressed since an earlier snapshot.
    pub(super) fn stalls_since(&self, before: &Self) -> bool {
        let enough = before.waiting.min(MAX_TRANSFER_BYTES as usize) as u64;
        let output = self.waiting > 0 && before.waiting > 0 && self.reached - before.reached < enough;
        let input = self.is_partial && before.is_partial && self.packets == before.packets;
        output || input
    }
}

/// Since when a connection makes no progress.
#[derive(Default)]
pub(super) struct Stall {
    began: Option<(Instant, Progress)>,
}

impl Stall {
    /// Compares with the last snapshot; true if there was no progress for `STALL_PATIENCE`.
    pub(super) fn look(&mut self, now: Instant, progress: Progress) -> bool {
        match &self.began {
            Some((since, before)) if progress.stalls_since(before) => now - *since >= STALL_PATIENCE,
            _ => {
                let holds = progress.waiting > 0 || progress.is_partial;
                self.began = holds.then_some((now, progress));
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_adds_up_and_comes_back() {
        let ledger = Arc::new(Ledger::new(1 << 20));
        let (one, other) = (Account::new(Some(ledger.clone())), Account::new(Some(ledger.clone())));
        assert_eq!(one.set_output(1000), Due::Look, "the first");
        assert_eq!(one.set_output(1500), Due::Nothing);
        assert_eq!(one.set_input(10), Due::Nothing);
        assert_eq!(other.set_output(1 << 20), Due::Look, "too much");
        assert!(ledger.is_over());
        assert_eq!((one.held(), ledger.held()), (1510, (1 << 20) + 1510));
        assert_eq!(other.set_output(0), Due::Nothing);
        assert!(!ledger.is_over());
        drop(one);
        drop(other);
        assert_eq!(ledger.held(), 0);
        assert_eq!(Account::new(None).set_output(2 << 20), Due::Nothing);
    }

    #[test]
    fn a_stall_is_what_lasts() {
        let began = Instant::now();
        let after = |seconds| began + Duration::from_secs(seconds);
        let waits = |waiting, reached| Progress { waiting, reached, ..Progress::default() };
        let mut stall = Stall::default();
        assert!(!stall.look(began, waits(5 << 20, 0)));
        assert!(!stall.look(after(29), waits(5 << 20, 1000)), "not long enough");
        assert!(stall.look(after(30), waits(5 << 20, 1000)), "a trickle is no progress");
        let mut stall = Stall::default();
        assert!(!stall.look(began, waits(5 << 20, 0)));
        assert!(!stall.look(after(29), waits(4 << 20, 1 << 20)), "a transfer was taken");
        assert!(!stall.look(after(58), waits(4 << 20, 1 << 20)));
        assert!(stall.look(after(59), waits(4 << 20, 1 << 20)));
        let mut stall = Stall::default();
        assert!(!stall.look(began, waits(100, 0)));
        assert!(!stall.look(after(40), waits(0, 100)), "all was taken");
        assert!(!stall.look(after(80), waits(100, 100)), "and this is new");
        let partial = |packets| Progress { is_partial: true, packets, ..Progress::default() };
        let mut stall = Stall::default();
        assert!(!stall.look(began, partial(3)));
        assert!(!stall.look(after(31), partial(4)), "another packet");
        assert!(stall.look(after(61), partial(4)));
    }
}
