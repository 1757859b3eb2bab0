//! Files whose written bytes were lost, and the handles that have been told.
//!
//! A loss is told like a failed write-back on a local file system (Linux's `errseq_t`): each handle that was open at the loss is told of
//! it once, by EIO from its fsync. If no handle has been told when the file is opened again, the new handle is told. close(2) says EIO,
//! too, until its handle has been told by an fsync, and does not count as telling: any process that inherited the descriptor closes it,
//! such as a child that was forked for another purpose, and programs seldom look at the result.
//!
//! # Bound
//! [`FILES_MAX`]. With one more the files are forgotten, and each handle that is open then is told of a loss, once, though its file may
//! have none.

use cuttlefs_common::ids::InodeNo;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

const FILES_MAX: usize = 65_536;

/// Number of the last loss that a handle was told of.
#[derive(Debug)]
pub(crate) struct LossesTold(AtomicU64);

#[derive(Clone, Copy, Debug)]
struct Loss {
    number: u64,
    /// Whether some handle was told of it.
    was_told: bool,
}

#[derive(Debug, Default)]
struct State {
    /// The number of the last loss.
    last: u64,
    of: HashMap<InodeNo, Loss>,
    /// The number that counts for files that are not in `of`: each of them may have lost bytes then.
    of_others: u64,
}

impl State {
    fn number(&self, ino: InodeNo) -> u64 {
        self.of.get(&ino).map_or(self.of_others, |loss| loss.number)
    }
}

/// The losses of a mount; see the module.
#[derive(Debug, Default)]
pub(crate) struct Losses {
    state: Mutex<State>,
}

impl Losses {
    /// Written bytes of this file were lost, or may have been.
    pub(super) fn note(&self, ino: InodeNo) {
        let mut state = self.state.lock();
        state.last += 1;
        let number = state.last;
        if state.of.len() >= FILES_MAX && !state.of.contains_key(&ino) {
            state.of.clear();
            state.of_others = number;
            tracing::warn!(
                FILES_MAX,
                "so many files have lost bytes that it is not known which; the next fsync of every open file fails"
            );
            return;
        }
        state.of.insert(ino, Loss { number, was_told: false });
    }

    /// The losses that a handle that is opened now need not be told of.
    pub(crate) fn before_open(&self, ino: InodeNo) -> LossesTold {
        let state = self.state.lock();
        let known = match state.of.get(&ino) {
            Some(loss) if !loss.was_told => 0,
            _ => state.number(ino),
        };
        LossesTold(AtomicU64::new(known))
    }

    /// Whether a handle must be told of a loss. If so, it counts as told from now on.
    pub(crate) fn tell(&self, ino: InodeNo, told: &LossesTold) -> bool {
        let mut state = self.state.lock();
        let number = state.number(ino);
        // Relaxed: ordered by the mutex.
        if told.0.fetch_max(number, Ordering::Relaxed) >= number {
            return false;
        }
        if let Some(loss) = state.of.get_mut(&ino) {
            loss.was_told = true;
        }
        true
    }

    /// Whether a handle must still be told of a loss.
    pub(crate) fn are_untold(&self, ino: InodeNo, told: &LossesTold) -> bool {
        told.0.load(Ordering::Relaxed) < self.state.lock().number(ino)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INO: InodeNo = InodeNo(7);

    #[test]
    fn each_open_handle_is_told_once_and_closing_does_not_count() {
        let losses = Losses::default();
        let [one, two] = [losses.before_open(INO), losses.before_open(INO)];
        losses.note(INO);
        assert!(losses.are_untold(INO, &one) && losses.are_untold(INO, &one));
        assert!(losses.tell(INO, &one) && !losses.tell(INO, &one));
        assert!(!losses.are_untold(INO, &one) && losses.are_untold(INO, &two));
        let later = losses.before_open(INO);
        assert!(!losses.tell(INO, &later), "somebody was told before it was opened");
        assert!(losses.tell(INO, &two));
        losses.note(INO);
        assert!(losses.tell(INO, &one) && losses.tell(INO, &later), "another loss");
        let other = losses.before_open(InodeNo(8));
        assert!(!losses.tell(InodeNo(8), &other));
    }

    #[test]
    fn who_opens_a_file_whose_loss_nobody_was_told_of_is_told() {
        let losses = Losses::default();
        losses.note(INO);
        let [one, two] = [losses.before_open(INO), losses.before_open(INO)];
        assert!(losses.tell(INO, &one) && losses.tell(INO, &two));
        assert!(!losses.tell(INO, &losses.before_open(INO)));
    }

    #[test]
    fn with_too_many_files_every_open_handle_is_told() {
        let losses = Losses::default();
        let open = losses.before_open(INO);
        for ino in 0..=FILES_MAX as u64 {
            losses.note(InodeNo(1000 + ino));
        }
        assert!(losses.state.lock().of.is_empty());
        assert!(losses.tell(INO, &open) && !losses.tell(INO, &open));
        assert!(!losses.tell(INO, &losses.before_open(INO)));
    }
}
