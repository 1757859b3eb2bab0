//! One ring of a client, as the file server sees it.

use crate::pool::{Reserve, Space};
use cuttlefs_common::ids::{ClientId, LogSeq, SlotIndex};
use cuttlefs_common::redo::LogId;
use cuttlefs_common::rpc::durable::{Executed, Request, Work};
use cuttlefs_common::rpc::ring_slot;
use cuttlefs_common::status::Status;
use parking_lot::Mutex;
use std::collections::VecDeque;

/// A write that waits for its turn in its ring.
pub(super) enum Job {
    /// Of a connected sender.
    Taken(Work),
    /// Found in a ring that is being opened; who opens it waits.
    Found { log: LogId, lsn: LogSeq, seq: u64, body: Vec<u8>, give: async_channel::Sender<Executed> },
}

impl Job {
    pub(super) fn request(&self, client: ClientId) -> Request<'_> {
        match self {
            Self::Taken(work) => work.request(),
            Self::Found { log, lsn, seq, body, .. } => {
                Request { client, log: *log, lsn: *lsn, seq: *seq, body }
            }
        }
    }

    pub(super) fn finish(self, executed: Executed, answer: Vec<u8>) {
        match self {
            Self::Taken(work) => work.finish(executed, &answer),
            Self::Found { give, .. } => {
                // Whoever waits does not give up; he wants no answer.
                let _ = give.try_send(executed);
            }
        }
    }
}

#[derive(Default)]
struct Queue {
    /// Bounded by the ring.
    jobs: VecDeque<Job>,
    /// A worker has it.
    running: bool,
}

#[derive(Clone, Copy)]
pub(super) struct Progress {
    /// Number of the last write that was executed.
    pub(super) done: u64,
    /// Why nothing more is executed before the next start.
    pub(super) failed: Option<Status>,
}

/// A ring.
pub(crate) struct Ring {
    /// What names it.
    pub(super) id: ClientId,
    /// Whose.
    pub(super) client: ClientId,
    /// Which of the client's.
    pub(super) slot: SlotIndex,
    /// Written by the worker that executes.
    pub(super) progress: Mutex<Progress>,
    /// Space for what may still come.
    pub(super) reserve: Mutex<Reserve>,
    queue: Mutex<Queue>,
}

impl Ring {
    /// Without any space kept for it.
    pub(super) fn new(id: ClientId, client: ClientId, number: u16, done: u64) -> Self {
        Self {
            id,
            client,
            slot: ring_slot(number),
            progress: Mutex::new(Progress { done, failed: None }),
            reserve: Mutex::new(Reserve::EMPTY),
            queue: Mutex::default(),
        }
    }

    /// An acknowledged write could not be executed: nothing behind it is, either, before the next start. `false`: that
    /// was so already.
    pub(super) fn fail(&self, status: Status) -> bool {
        let mut progress = self.progress.lock();
        let first = progress.failed.is_none();
        progress.failed.get_or_insert(status);
        first
    }

    /// Whether it holds acknowledged writes that only the next start can execute.
    pub(super) fn is_owed(&self) -> bool {
        self.progress.lock().failed.is_some()
    }

    /// Adds a write; `true`: a worker is to be given the ring.
    pub(super) fn push(&self, job: Job) -> bool {
        let mut queue = self.queue.lock();
        queue.jobs.push_back(job);
        !std::mem::replace(&mut queue.running, true)
    }

    /// The next write; `None` gives the ring back.
    pub(super) fn next(&self) -> Option<Job> {
        let mut queue = self.queue.lock();
        let job = queue.jobs.pop_front();
        queue.running = job.is_some();
        job
    }

    /// Nothing is to come any more: the pages kept for it are everybody's.
    pub(super) fn release_space(&self, space: &Space) {
        space.release(std::mem::replace(&mut *self.reserve.lock(), Reserve::EMPTY));
    }

    /// The ring is in use (again): keeps pages for it.
    pub(super) fn keep_space(&self, space: &Space, pages: u64) {
        let mut reserve = self.reserve.lock();
        if reserve.is_ended() {
            *reserve = space.reserve(pages);
        }
    }
}
