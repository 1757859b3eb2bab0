//! Marks in memory, in place of metadata's log, for tests and simulations, and their state after a crash.

use super::marks::MarkStore;
use crate::pool::disk::LocalFuture;
use cuttlefs_common::world::Random;
use parking_lot::Mutex;
use std::collections::{BTreeSet, VecDeque};
use std::io;

type Flushed = async_channel::Sender<bool>;

#[derive(Debug, Default)]
struct Kept {
    durable: BTreeSet<u64>,
    /// Batches that are not durable, the oldest first.
    batches: VecDeque<(Vec<u64>, bool)>,
    /// The number of batches since the start, and of those that are durable.
    put: u64,
    flushed: u64,
    flushes: u64,
    fails: bool,
    /// Whether flushes wait for `step`.
    is_late: bool,
    /// The waiting flushes: the number of batches that each covers, and where to report its end.
    waiting: VecDeque<(u64, Flushed)>,
}

impl Kept {
    fn flush(&mut self, up_to: u64) -> bool {
        if self.fails {
            return false;
        }
        self.flushes += 1;
        while self.flushed < up_to {
            let batch = self.batches.pop_front().expect("a batch that was put");
            apply(&mut self.durable, &batch);
            self.flushed += 1;
        }
        true
    }
}

fn apply(marks: &mut BTreeSet<u64>, (zones, marked): &(Vec<u64>, bool)) {
    match marked {
        true => marks.extend(zones),
        false => marks.retain(|zone| !zones.contains(zone)),
    }
}

/// Marks in memory.
#[derive(Debug, Default)]
pub struct MemoryMarks {
    kept: Mutex<Kept>,
}

impl MemoryMarks {
    /// The marked zones.
    pub fn marked(&self) -> BTreeSet<u64> {
        self.possible().pop().expect("one state at least")
    }

    /// The marked zones that a power loss may leave: the durable ones, and those after each later batch.
    pub fn possible(&self) -> Vec<BTreeSet<u64>> {
        let kept = self.kept.lock();
        let mut states = vec![kept.durable.clone()];
        for batch in &kept.batches {
            let mut next = states.last().expect("the first").clone();
            apply(&mut next, batch);
            states.push(next);
        }
        states
    }

    /// Loses power: some of the batches that are not durable are lost.
    pub fn crash(&self, random: &dyn Random) {
        let mut states = self.possible();
        let durable = states.swap_remove((random.next_u64() % states.len() as u64) as usize);
        *self.kept.lock() = Kept { durable, ..Kept::default() };
    }

    /// Makes all puts and flushes fail from now on, or ends that.
    pub fn fail(&self, fails: bool) {
        self.kept.lock().fails = fails;
    }

    /// Lets flushes wait for `step` from now on, or not. Waiting flushes fail.
    pub fn be_late(&self, is_late: bool) {
        let mut kept = self.kept.lock();
        kept.is_late = is_late;
        kept.waiting.clear();
    }

    /// The number of waiting flushes.
    pub fn waiting(&self) -> usize {
        self.kept.lock().waiting.len()
    }

    /// The number of flushes that were done.
    pub fn flushes(&self) -> u64 {
        self.kept.lock().flushes
    }

    /// Does the first waiting flush; `false` if there is none.
    pub fn step(&self) -> bool {
        let mut kept = self.kept.lock();
        let Some((up_to, done)) = kept.waiting.pop_front() else { return false };
        let is_well = kept.flush(up_to);
        drop(kept);
        // The waiter may be gone.
        let _ = done.try_send(is_well);
        true
    }
}

impl MarkStore for MemoryMarks {
    fn put_marks(&self, zones: &[u64], marked: bool) -> io::Result<()> {
        let mut kept = self.kept.lock();
        if kept.fails {
            return Err(io::Error::other("no batch can be put"));
        }
        kept.batches.push_back((zones.to_vec(), marked));
        kept.put += 1;
        Ok(())
    }

    fn flush_marks(&self) -> LocalFuture<'static, io::Result<()>> {
        let (done, wait) = async_channel::bounded(1);
        let mut kept = self.kept.lock();
        let up_to = kept.put;
        if kept.is_late {
            kept.waiting.push_back((up_to, done));
        } else {
            let is_well = kept.flush(up_to);
            let _ = done.try_send(is_well);
        }
        Box::pin(async move {
            match wait.recv().await {
                Ok(true) => Ok(()),
                _ => Err(io::Error::other("marks could not be flushed")),
            }
        })
    }
}
