//! The marked zones, in which pages may be overwritten in place.
//!
//! # How it works
//! | zone | mark record | meaning |
//! | --- | --- | --- |
//! | unmarked | none, or one that is being removed | every written page matches its sum |
//! | marked | there | it may be written to while the server runs; after a crash, see the next row |
//! | recovering | there | it was being written to: pages are accepted, and get new sums |
//!
//! Marks are records of metadata's log ([`MarkStore`]): each is there as a whole, in order, and durable by the sync that fsync and names share.
//! **Which marks are durable** is not noted for each zone, but follows from numbers. Each batch of marks is an `Edit`. A flush covers the edits that
//! were put before it began (`State::durable`), and a mark is durable when the edit that put it is among them. Many writers of one zone wait for the
//! same edit.
//!
//! # Invariants
//! * A mark is durable before a write relies on it (`begin`). It is removed only when page and sum of every write are durable (`synced`).
//! * A zone with a write that begins, or is under way, stays marked (`in_flight`).
//! * Batches are put in the order in which the marks changed (`putting`).
//!
//! # Failure
//! A batch or flush that fails does not change `State::durable`: the writes do not begin, and the next caller tries again. Marks that could not be
//! removed stay until the next sweep.

use crate::pool::disk::LocalFuture;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Sweeps for which a zone stays marked after its last write.
const IDLE_SWEEPS: u64 = 2;

/// The store of marks.
pub trait MarkStore: Send + Sync {
    /// Puts or removes the marks of zones, in one batch behind all earlier ones.
    ///
    /// # Errors
    /// Nothing was changed, or the store has failed for good.
    fn put_marks(&self, zones: &[u64], marked: bool) -> io::Result<()>;

    /// Makes all batches before the call durable.
    fn flush_marks(&self) -> LocalFuture<'static, io::Result<()>>;
}

/// The number of a batch of marks since the start. The marks that the server before left are the first batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Edit(u64);

#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    /// The edit that put its record.
    put_by: Edit,
    is_recovering: bool,
    in_flight: u32,
    /// When the last write to it ended: the values of `ended` and of `sweeps` at that time.
    last_end: u64,
    last_sweep: u64,
}

#[derive(Debug)]
struct State {
    zones: BTreeMap<u64, Mark>,
    /// The last edit.
    last_edit: Edit,
    /// All edits up to this one are durable.
    durable: Edit,
    /// The number of writes that have ended.
    ended: u64,
    /// The number of these that a sync covers.
    synced: u64,
    sweeps: u64,
}

/// The marks of a pool.
pub(super) struct Marks {
    state: Mutex<State>,
    /// Locked from a change of `state` until its batch is put. Taken before `state`.
    putting: Mutex<()>,
    store: Arc<dyn MarkStore>,
    /// The number of recovering zones. Written under `state`, read by anyone.
    recovering: AtomicU64,
    /// How many times a write waited until a mark was durable.
    waits: AtomicU64,
}

impl std::fmt::Debug for Marks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Marks").field("state", &self.state).finish_non_exhaustive()
    }
}

impl Marks {
    /// The marks that the server before left; their zones recover.
    pub(super) fn new(left: impl IntoIterator<Item = u64>, store: Arc<dyn MarkStore>) -> Self {
        // A killed server may have put a mark and not flushed it, so a power loss may still take it.
        let mark = Mark { put_by: Edit(1), is_recovering: true, ..Mark::default() };
        let zones: BTreeMap<u64, Mark> = left.into_iter().map(|zone| (zone, mark)).collect();
        let recovering = AtomicU64::new(zones.len() as u64);
        let state = State { zones, last_edit: Edit(1), durable: Edit(0), ended: 0, synced: 0, sweeps: 0 };
        Self {
            state: Mutex::new(state),
            putting: Mutex::default(),
            store,
            recovering,
            waits: AtomicU64::new(0),
        }
    }

    /// Begins writes in these zones (all different). When this returns, the zones are marked durably.
    ///
    /// # Errors
    /// The marks could not be made durable: the writes must not begin, and count as ended.
    pub(super) async fn begin(&self, zones: &BTreeSet<u64>) -> io::Result<()> {
        let (put_by, put) = self.put(zones)?;
        let begun = Begun { marks: self, zones };
        if !self.is_durable(put_by) {
            self.waits.fetch_add(1, Ordering::Relaxed);
            self.store.flush_marks().await?;
            let mut state = self.state.lock();
            state.durable = state.durable.max(put);
        }
        std::mem::forget(begun);
        Ok(())
    }

    /// Whether a zone is marked durably.
    pub(super) fn is_marked(&self, zone: u64) -> bool {
        let state = self.state.lock();
        state.zones.get(&zone).is_some_and(|mark| state.durable >= mark.put_by)
    }

    fn is_durable(&self, edit: Edit) -> bool {
        self.state.lock().durable >= edit
    }

    /// Begins writes in these zones. Returns the last edit that put one of their marks, and the last edit so far.
    fn put(&self, zones: &BTreeSet<u64>) -> io::Result<(Edit, Edit)> {
        let _in_order = self.putting.lock();
        let new: Vec<u64> = {
            let state = self.state.lock();
            zones.iter().copied().filter(|zone| !state.zones.contains_key(zone)).collect()
        };
        if !new.is_empty() {
            self.store.put_marks(&new, true)?;
        }
        let mut state = self.state.lock();
        if !new.is_empty() {
            state.last_edit.0 += 1;
        }
        let last_edit = state.last_edit;
        let mut put_by = Edit(0);
        for zone in zones {
            let fresh = Mark { put_by: last_edit, ..Mark::default() };
            let mark = state.zones.entry(*zone).or_insert(fresh);
            mark.in_flight += 1;
            put_by = put_by.max(mark.put_by);
        }
        Ok((put_by, last_edit))
    }

    /// Ends writes in these zones. Their changes are known to whoever syncs.
    pub(super) fn end(&self, zones: &BTreeSet<u64>) {
        let mut state = self.state.lock();
        state.ended += 1;
        let (ended, sweeps) = (state.ended, state.sweeps);
        for zone in zones {
            let mark = state.zones.get_mut(zone).expect("a zone that is written to is marked");
            mark.in_flight -= 1;
            (mark.last_end, mark.last_sweep) = (ended, sweeps);
        }
    }

    /// Called before a sync: the number of writes that it will cover.
    pub(super) fn before_sync(&self) -> u64 {
        self.state.lock().ended
    }

    /// Called after a sync: the number of writes that it covered.
    pub(super) fn after_sync(&self, covered: u64) {
        let mut state = self.state.lock();
        state.synced = state.synced.max(covered);
    }

    /// Whether a sync would let a zone's mark be removed.
    pub(super) fn wants_sync(&self) -> bool {
        let state = self.state.lock();
        state.zones.values().any(|mark| {
            mark.in_flight == 0 && !mark.is_recovering && mark.last_end > state.synced && state.is_idle(mark)
        })
    }

    /// Removes the marks of idle zones, or with `all` of every zone where that is possible. Called every few seconds. Returns how many it removed.
    /// Needs no flush, because a mark that stays longer is harmless.
    ///
    /// # Errors
    /// The store's; the marks stay.
    pub(super) fn sweep(&self, all: bool) -> io::Result<usize> {
        let _in_order = self.putting.lock();
        let idle = {
            let mut state = self.state.lock();
            state.sweeps += 1;
            let can_go = |mark: &Mark| {
                mark.in_flight == 0
                    && !mark.is_recovering
                    && mark.last_end <= state.synced
                    && (all || state.is_idle(mark))
            };
            let idle = state.zones.iter().filter(|(_, mark)| can_go(mark));
            idle.map(|(zone, _)| *zone).collect::<Vec<u64>>()
        };
        if !idle.is_empty() {
            // No write begins in these zones meanwhile.
            self.store.put_marks(&idle, false)?;
            let mut state = self.state.lock();
            state.zones.retain(|zone, _| idle.binary_search(zone).is_err());
        }
        Ok(idle.len())
    }

    /// Whether a zone was being written to when the server before went down, and was not recovered since.
    pub(super) fn is_recovering(&self, zone: u64) -> bool {
        self.recovering.load(Ordering::Relaxed) > 0
            && self.state.lock().zones.get(&zone).is_some_and(|mark| mark.is_recovering)
    }

    /// The first recovering zone.
    pub(super) fn next_recovering(&self) -> Option<u64> {
        let state = self.state.lock();
        state.zones.iter().find(|(_, mark)| mark.is_recovering).map(|(zone, _)| *zone)
    }

    /// Notes that all pages of a zone were examined, and have their sums.
    pub(super) fn recovered(&self, zone: u64) {
        let mut state = self.state.lock();
        state.ended += 1;
        let (ended, sweeps) = (state.ended, state.sweeps);
        if let Some(mark) = state.zones.get_mut(&zone).filter(|mark| mark.is_recovering) {
            // Its new sums must be synced before its mark is removed.
            *mark = Mark { is_recovering: false, last_end: ended, last_sweep: sweeps, ..*mark };
            self.recovering.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// The numbers of marked and of recovering zones, and of times a write waited for a mark.
    pub(super) fn figures(&self) -> (u64, u64, u64) {
        let marked = self.state.lock().zones.len() as u64;
        (marked, self.recovering.load(Ordering::Relaxed), self.waits.load(Ordering::Relaxed))
    }
}

impl State {
    fn is_idle(&self, mark: &Mark) -> bool {
        self.sweeps >= mark.last_sweep + IDLE_SWEEPS
    }
}

/// Writes that have not begun yet.
struct Begun<'a> {
    marks: &'a Marks,
    zones: &'a BTreeSet<u64>,
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        self.marks.end(self.zones);
    }
}
