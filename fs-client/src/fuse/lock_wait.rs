//! Who asked the kernel for a lock, and waits: its answer, and whether it still wants one.
//!
//! # Signals
//! The kernel tells a FUSE file system that a caller was interrupted (FUSE_INTERRUPT), and ends no request by itself, not even
//! for SIGKILL. fuser 0.18 refuses these messages before a file system sees them. So it is looked at the caller itself: a signal
//! that is pending, neither blocked nor ignored, can only be handled when the system call is over. `/proc/PID/status` shows it.
//! A caller in a process namespace that this process does not see cannot be looked at; it waits until it has the lock.

use super::kernel_cache::KernelCache;
use super::reply::refused;
use crate::file::volume::{FsError, GrantedLock, LockWaiter};
use fuser::{INodeNo, ReplyEmpty};
use parking_lot::Mutex;
use std::sync::Arc;

/// Signals that stop a process, where it does not handle them.
const STOP_SIGNALS: [i32; 4] = [libc::SIGSTOP, libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];

/// A kernel request for a lock.
#[derive(Debug)]
pub(super) struct LockRequest {
    ino: INodeNo,
    /// The thread that asked, as this process sees it; 0: it does not.
    thread: u32,
    cache: Arc<KernelCache>,
    reply: Mutex<Option<ReplyEmpty>>,
}

impl LockRequest {
    pub(super) fn new(ino: INodeNo, thread: u32, cache: &Arc<KernelCache>, reply: ReplyEmpty) -> Arc<Self> {
        Arc::new(Self { ino, thread, cache: cache.clone(), reply: Mutex::new(Some(reply)) })
    }
}

impl LockWaiter for LockRequest {
    fn is_interrupted(&self) -> bool {
        self.thread != 0
            && std::fs::read_to_string(format!("/proc/{}/status", self.thread))
                .is_ok_and(|status| has_signal_to_handle(&status))
    }

    fn answer(&self, result: Result<GrantedLock, FsError>) {
        let Some(reply) = self.reply.lock().take() else {
            return;
        };
        match result {
            Ok(GrantedLock { is_stale }) => {
                self.cache.forget_attributes(self.ino);
                if is_stale { self.cache.answer_without_bytes(self.ino, reply) } else { reply.ok() }
            }
            Err(error) => reply.error(refused(&error)),
        }
    }
}

/// Whether a thread with this status has a signal to handle. A signal that only stops it is none: it would find its system
/// call ended when it goes on.
fn has_signal_to_handle(status: &str) -> bool {
    let set = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        u64::from_str_radix(line.trim_start_matches(':').trim(), 16).ok()
    };
    let (Some(own), Some(shared), Some(blocked), Some(ignored), Some(caught)) =
        (set("SigPnd"), set("ShdPnd"), set("SigBlk"), set("SigIgn"), set("SigCgt"))
    else {
        return false;
    };
    let stops = STOP_SIGNALS.iter().fold(0, |stops, signal| stops | 1 << (signal - 1)) & !caught;
    (own | shared) & !blocked & !ignored & !stops != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_signals_end_a_wait() {
        let status = |own: u64, shared: u64, blocked: u64, ignored: u64, caught: u64| {
            format!(
                "Name:\tflock\nSigQ:\t0/7\nSigPnd:\t{own:016x}\nShdPnd:\t{shared:016x}\nSigBlk:\t{blocked:016x}\n\
                 SigIgn:\t{ignored:016x}\nSigCgt:\t{caught:016x}\n"
            )
        };
        let bit = |signal: i32| 1u64 << (signal - 1);
        let term = bit(libc::SIGTERM);
        assert!(!has_signal_to_handle(&status(0, 0, 0, 0, term)));
        assert!(has_signal_to_handle(&status(term, 0, 0, 0, 0)));
        assert!(has_signal_to_handle(&status(0, term, 0, 0, term)));
        assert!(has_signal_to_handle(&status(bit(libc::SIGKILL), 0, 0, 0, 0)));
        assert!(!has_signal_to_handle(&status(term, 0, term, 0, term)));
        assert!(!has_signal_to_handle(&status(0, term, 0, term, 0)));
        assert!(!has_signal_to_handle(&status(0, bit(libc::SIGTSTP), 0, 0, 0)), "it only stops");
        assert!(has_signal_to_handle(&status(0, bit(libc::SIGTSTP), 0, 0, bit(libc::SIGTSTP))));
        assert!(!has_signal_to_handle("Name:\tgone\n"));
        let own = std::fs::read_to_string("/proc/self/status").expect("proc");
        assert!(own.contains("SigPnd:") && !has_signal_to_handle(&own));
    }
}
