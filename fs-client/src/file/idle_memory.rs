//! Memory that a mount gives back when it has not been used for a while: the lanes' memory for file bytes, the buffers in which reads
//! are put together, and heap memory of copies that have been freed.
//!
//! The control thread checks the mount each [`LOOK_PERIOD`]. After two checks in a row without use the mount gives everything back.

use crate::read::{KNOWN_ENTRIES_BYTES, Reads};
use crate::session::{Session, SessionLane, Task};
use crate::transport::{FsError, LANE_BYTES};
use cuttlefs_common::rpc::MAX_TRANSFER_BYTES;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The buffers of a FUSE thread: the longest request, and the bytes of one read.
const THREAD_BYTES: usize = 2 * MAX_TRANSFER_BYTES as usize + 16 * 1024;
/// Everything else: stacks, tables, buffers of connections, unused parts of the heap.
const OTHER_BYTES: usize = 24 << 20;

/// Heap memory of copies that a sync has freed: one thread frees what another one has allocated, and the allocator returns it to the system later.
/// Two runs of the memory suite had 149 and 176 MiB, with 128 MiB of copies at most.
const FREED_BYTES: usize = 32 << 20;

/// How often the control thread checks whether the mount was used.
const LOOK_PERIOD: Duration = Duration::from_secs(2);
/// The number of checks without use before memory is given back.
const QUIET_LOOKS: u32 = 2;

/// The control thread's task that checks whether the mount is used.
pub(super) struct IdleMemory {
    reads: Arc<Reads>,
    idle: Idle,
    next: Instant,
}

impl IdleMemory {
    /// The task for the session's lanes and the buffers of these reads.
    pub(super) fn new(reads: Arc<Reads>) -> Self {
        Self { reads, idle: Idle::default(), next: Instant::now() + LOOK_PERIOD }
    }

    /// Whether callers' lanes or buffers were used since the last call, or copies are kept.
    fn take_used(&self, session: &Session) -> bool {
        self.reads.buffers.take_used() | !session.unsynced().is_empty() | session.link().take_used()
    }

    fn give_back(&self, session: &Session) {
        session.link().give_memory_back();
        self.reads.buffers.free();
        cuttlefs_common::memory::trim_heap();
    }
}

impl Task for IdleMemory {
    fn run(&mut self, session: &Session, _: &mut SessionLane<'_>) -> Result<Option<Instant>, FsError> {
        if Instant::now() >= self.next {
            if self.idle.is_time(self.take_used(session)) {
                self.give_back(session);
            }
            self.next = Instant::now() + LOOK_PERIOD;
        }
        Ok(Some(self.next))
    }
}

/// How long a mount has not been used.
#[derive(Debug)]
struct Idle {
    quiet_looks: u32,
}

impl Default for Idle {
    /// Nothing has been used yet.
    fn default() -> Self {
        Self { quiet_looks: QUIET_LOOKS }
    }
}

impl Idle {
    /// Whether it is time to give memory back, after a check that found the mount used or not. True once after each use.
    fn is_time(&mut self, was_used: bool) -> bool {
        if was_used {
            self.quiet_looks = 0;
            return false;
        }
        if self.quiet_looks >= QUIET_LOOKS {
            return false;
        }
        self.quiet_looks += 1;
        self.quiet_looks == QUIET_LOOKS
    }
}

/// The most resident memory of a mount's own, in bytes, while its server is there: without the program, and without the server's frames, which the
/// mount maps over `shm`. Requests that wait for an absent server come on top (`fuse/kernel/attendant.rs` bounds them).
pub(super) fn memory_bound_bytes(session: &Session) -> u64 {
    let (lanes, threads) = session.link().lane_counts();
    // Guesses of frames exist only where the server's tables are read.
    let entries = if session.reads_remote_tables() { KNOWN_ENTRIES_BYTES } else { 0 };
    let own = lanes * LANE_BYTES + threads * THREAD_BYTES + entries + FREED_BYTES + OTHER_BYTES;
    (own + session.unsynced().bound()) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_time_once_after_each_use() {
        let mut idle = Idle::default();
        assert!(!idle.is_time(false), "nothing was ever used");
        for _ in 0..2 {
            assert!(!idle.is_time(true) && !idle.is_time(false) && idle.is_time(false));
            assert!(!idle.is_time(false) && !idle.is_time(false));
        }
        assert!(!idle.is_time(true) && !idle.is_time(false) && !idle.is_time(true) && !idle.is_time(false));
    }
}
