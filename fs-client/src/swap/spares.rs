//! Descriptors for processes that are on their way in.
//!
//! A process takes two here: its userfaultfd, and its connection. A forked process gets the first one with the kernel's message, and waits in fork(2) until
//! it has the second. If all descriptors went to the first ones nobody could go on, end, and give two back. So one is kept for each process that is on its
//! way in, and one for the next: a spare, which is a copy of any descriptor. A fork whose message finds no other free one stays with the kernel (`EMFILE`).
//! It is read when others have ended; the process that forks waits in fork(2) meanwhile.
//!
//! # Failure
//! If for `PATIENCE` nobody comes in although somebody waits, the run ends: the processes may wait for those that cannot be forked.

use super::swapper::SwapError;
use rustix::event::Timespec;
use rustix::fd::{AsFd, OwnedFd};
use rustix::process::{Resource, getrlimit};
use std::time::{Duration, Instant};

/// How long processes may wait while none comes in.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);
/// Between two tries.
pub(super) const RETRY: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// There was no descriptor.
#[derive(Clone, Copy)]
struct Shortage {
    since: Instant,
    tried: Instant,
}

/// Descriptors that are kept.
#[derive(Default)]
pub(super) struct Spares {
    kept: Vec<OwnedFd>,
    /// Processes on their way in.
    expected: usize,
    shortage: Option<Shortage>,
    is_told: bool,
}

impl Spares {
    /// So many processes are on their way in.
    pub(super) fn expect(&mut self, processes: usize, any: impl AsFd) {
        self.expected = processes;
        self.keep(any);
    }

    pub(super) fn expect_one_more(&mut self) {
        self.expected += 1;
    }

    /// Keeps as many as are wanted, or all that are free: copies of this one.
    pub(super) fn keep(&mut self, any: impl AsFd) {
        let wanted = self.expected + 1;
        self.kept.truncate(wanted);
        while self.kept.len() < wanted
            && let Ok(spare) = rustix::io::fcntl_dupfd_cloexec(&any, 0)
        {
            self.kept.push(spare);
        }
    }

    /// Sees to it that one is free; gives up a spare if it must.
    pub(super) fn make_free(&mut self, any: impl AsFd) -> bool {
        self.make_free_but(0, any)
    }

    /// The same, and leaves so many spares.
    pub(super) fn make_free_but(&mut self, left: usize, any: impl AsFd) -> bool {
        let is_free = rustix::io::fcntl_dupfd_cloexec(any, 0).is_ok();
        is_free || (self.kept.len() > left && self.kept.pop().is_some())
    }

    /// Whether somebody waits for a descriptor.
    pub(super) fn is_short(&self) -> bool {
        self.shortage.is_some()
    }

    /// Whether it is time to look for one.
    pub(super) fn may_try(&self) -> bool {
        let pause = Duration::from_nanos(RETRY.tv_nsec as u64);
        self.shortage.is_none_or(|shortage| shortage.tried.elapsed() >= pause)
    }

    /// Somebody came in.
    pub(super) fn came(&mut self) {
        self.shortage = None;
    }

    /// There was no descriptor for somebody.
    ///
    /// # Errors
    /// There has been none for too long.
    pub(super) fn refused(&mut self) -> Result<(), SwapError> {
        let tried = Instant::now();
        let since = self.shortage.map_or(tried, |shortage| shortage.since);
        self.shortage = Some(Shortage { since, tried });
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        if tried.duration_since(since) >= PATIENCE {
            return Err(SwapError::Descriptors { limit });
        }
        if !self.is_told {
            self.is_told = true;
            tracing::warn!(
                "as many files are open as may be ({limit}): new processes wait until others end (ulimit -Hn)"
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_kept_for_each_and_one_for_the_next() {
        let mut spares = Spares::default();
        let any = std::io::stderr();
        spares.expect(2, &any);
        assert_eq!(spares.kept.len(), 3);
        spares.expect_one_more();
        spares.keep(&any);
        assert_eq!(spares.kept.len(), 4);
        spares.expect(0, &any);
        assert_eq!(spares.kept.len(), 1);
        assert!(spares.make_free(&any), "others are free");
        assert_eq!(spares.kept.len(), 1);
    }

    #[test]
    fn who_waits_does_not_wait_for_ever() {
        let mut spares = Spares::default();
        assert!(spares.may_try() && !spares.is_short());
        spares.refused().expect("it waits");
        assert!(!spares.may_try() && spares.is_short());
        if let Some(shortage) = &mut spares.shortage {
            shortage.since -= PATIENCE;
        }
        let error = spares.refused().expect_err("too long").to_string();
        assert!(error.contains("ulimit -Hn"), "{error}");
        spares.came();
        spares.refused().expect("it waits from now on");
    }
}
