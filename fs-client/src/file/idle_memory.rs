//! Memory that a mount gives back when it has not been used for a while: the lanes' memory for file bytes, the buffers in which reads
//! are put together, and heap memory of copies that have been freed.
//!
//! The control thread looks each [`LOOK_PERIOD`]. A mount that is idle for two looks in a row has given everything back by then.

use crate::read::{FRAME_GUESSES_BYTES, Reads};
use crate::session::{Session, SessionLane, Task};
use crate::transport::{FsError, LANE_BYTES};
use cuttlefs_common::rpc::MAX_TRANSFER_BYTES;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Of a FUSE thread: the request it has read, with room for the longest, and the bytes it reads for one.
const THREAD_BYTES: usize = 2 * MAX_TRANSFER_BYTES as usize + 16 * 1024;
/// All else: stacks, tables, connections' buffers, what the heap has between what is used of it.
const OTHER_BYTES: usize = 24 << 20;

/// What the heap still has of copies that a sync has freed: threads free what others have allocated, and it goes back to the system
/// later. Seen: 149 and 176 MiB in two runs of the memory suite with 128 MiB of copies at most.
const FREED_BYTES: usize = 32 << 20;

/// How often it is looked.
const LOOK_PERIOD: Duration = Duration::from_secs(2);
/// Looks without use before memory is given back.
const QUIET_LOOKS: u32 = 2;

/// Looks whether a mount is used. The control thread's task.
pub(super) struct IdleMemory {
    reads: Arc<Reads>,
    idle: Idle,
    next: Instant,
}

impl IdleMemory {
    /// Of the session's lanes, and of what is read with.
    pub(super) fn new(reads: Arc<Reads>) -> Self {
        Self { reads, idle: Idle::default(), next: Instant::now() + LOOK_PERIOD }
    }

    /// Whether callers' lanes or buffers were used since this was last asked, or copies are kept.
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
    /// Whether it is time to give memory back, after a look that found the mount used or not. Once for each time it was used.
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

/// What a mount has resident of its own at most while its server is there: without its program, and without the server's
/// frames, which it maps over `shm`. While the server is away requests wait besides (`fuse/kernel/attendant.rs` has their bound).
pub(super) fn memory_bound_bytes(session: &Session) -> u64 {
    let (lanes, threads) = session.link().lane_counts();
    // What is guessed of frames is there where the server's tables are read.
    let guesses = if session.reads_remote_tables() { FRAME_GUESSES_BYTES } else { 0 };
    let own = lanes * LANE_BYTES + threads * THREAD_BYTES + guesses + FREED_BYTES + OTHER_BYTES;
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
