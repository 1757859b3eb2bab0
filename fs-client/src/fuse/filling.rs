//! Requests that are under way: READs that fill pages, writes, and changes of a file's length.
//!
//! # A short answer
//! If a READ brings fewer bytes than the kernel wanted, the kernel takes the end of these bytes for the end of the file: it fills the rest of the
//! pages with zeros, and shortens the file. It does so only at the first short answer to READs that it has sent at the same time, and never while it
//! changes the file's length itself. Otherwise the old length stays, and programs read the zeros:
//!
//! * Another mount has cut the file. Of several readaheads one ends at the new end and the next ones lie behind it. If one of the latter is
//!   answered first, the kernel believes that the file ends where that one began.
//! * A program of this mount cuts the file. A READ that the server has executed after the cut is answered before the cut is.
//!
//! So a short answer waits ([`Filling::until_short_counts`]) until these are answered: the READs of earlier bytes of the file, and the changes of
//! its length (SETATTR with a size), that the mount had taken from the kernel when the bytes were there.
//!
//! Writes, copies and reservations are not waited for, because they only make a file longer. When the kernel learns of the new length it ignores
//! short answers to READs of before, or drops the pages. A write past the page cache must not be waited for: it waits for the pages itself
//! (`kernel_cache`).
//!
//! # No circle
//! What is waited for was taken before, has its thread, and waits only for READs of still earlier bytes: a change of the length waits for no READ.
//! Requests that are taken later are not waited for, so nobody waits for ever beside a program that cuts again and again. If all threads of the
//! mount wait, the spare reader goes on (`kernel/attendant.rs`).
//!
//! # What is left
//! An answered SETATTR changes the kernel's length only when its program's thread runs again. Then this thread waits for the pages of the READ, if it
//! lies behind the new end. So where the kernel's length is surely wrong, a short answer also waits until the threads of the last such requests do not
//! want to run any more, at most [`CHANGED_LIMIT`]. And a thread of the mount may have taken an earlier READ and not noted it yet: such an answer takes
//! [`PAUSE`] longer.
//!
//! # Bounds
//! One entry for each request that a thread has in hand, and [`CHANGED_MAX`] for changes of the length that were answered.

use super::kernel::INodeNo;
use parking_lot::{Condvar, Mutex};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time for the steps of other threads that cannot be seen. They take microseconds, and such answers are rare.
const PAUSE: Duration = Duration::from_millis(2);
/// How long an answered change of the length may take to reach the kernel: a program's thread waits for a processor.
const CHANGED_LIMIT: Duration = Duration::from_millis(250);
/// How often that is checked.
const LOOK_AGAIN: Duration = Duration::from_millis(1);
/// The longest time for which attributes wait for writes: their server may be away, and programs want to look at files.
const PASSED_LIMIT: Duration = Duration::from_secs(2);
/// The most answered changes of the length that are remembered; the oldest is forgotten.
const CHANGED_MAX: usize = 256;

/// A request that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A READ from this offset on.
    Read { at: u64 },
    /// A change of the length.
    Length,
    /// A write.
    Past,
}

#[derive(Clone, Copy, Debug)]
struct Noted {
    /// In the order in which requests were noted.
    number: u64,
    kind: Kind,
}

/// A change of the length that was answered.
#[derive(Clone, Copy, Debug)]
struct Changed {
    ino: u64,
    /// The thread that gets the answer; 0 if it cannot be seen.
    thread: u32,
    answered: Instant,
}

#[derive(Debug, Default)]
struct UnderWay {
    noted: u64,
    files: HashMap<u64, Vec<Noted>>,
    /// The oldest first.
    changed: VecDeque<Changed>,
    /// The number of threads in `wait`, so that most ends notify nobody.
    waiting: usize,
}

impl UnderWay {
    /// Whether a short answer to the READ at `offset` must wait for a request that was noted before the number `before`.
    fn must_wait(&self, ino: INodeNo, offset: u64, before: u64) -> bool {
        let first = |noted: &Noted| match noted.kind {
            Kind::Read { at } => at < offset,
            Kind::Length => true,
            Kind::Past => false,
        };
        self.files
            .get(&ino.0)
            .is_some_and(|all| all.iter().any(|noted| noted.number < before && first(noted)))
    }

    /// Whether a write of the file is under way that was noted before the number `before`.
    fn passes(&self, ino: INodeNo, before: u64) -> bool {
        let mut all = self.files.get(&ino.0).into_iter().flatten();
        all.any(|noted| noted.number < before && matches!(noted.kind, Kind::Past))
    }

    /// Notes the end of a request.
    fn end(&mut self, ino: INodeNo, number: u64) {
        let Some(all) = self.files.get_mut(&ino.0) else { return };
        all.retain(|noted| noted.number != number);
        if all.is_empty() {
            self.files.remove(&ino.0);
        }
    }
}

/// The requests that are under way.
#[derive(Debug, Default)]
pub(super) struct Filling {
    under_way: Mutex<UnderWay>,
    /// Notified when a request ends and somebody waits.
    ended: Condvar,
}

/// A request that is under way until this is dropped, which must be after its answer.
#[must_use]
#[derive(Debug)]
pub(super) struct Under {
    filling: Arc<Filling>,
    ino: INodeNo,
    number: u64,
}

impl Filling {
    /// A READ that fills pages begins. Must be called before the volume is asked for the bytes.
    pub(super) fn reads(self: &Arc<Self>, ino: INodeNo, offset: u64) -> Under {
        self.note(ino, Kind::Read { at: offset })
    }

    /// A write begins. Must be called before the volume is given the bytes.
    pub(super) fn passes(self: &Arc<Self>, ino: INodeNo) -> Under {
        self.note(ino, Kind::Past)
    }

    /// Waits until the writes of a file that are under way have been answered, at most [`PASSED_LIMIT`]. For attributes that the volume has told.
    pub(super) fn until_passed(&self, ino: INodeNo) {
        self.wait_for_passing(ino, PASSED_LIMIT);
    }

    fn wait_for_passing(&self, ino: INodeNo, limit: Duration) {
        let mut under_way = self.under_way.lock();
        let (before, until) = (under_way.noted, Instant::now() + limit);
        under_way.waiting += 1;
        while under_way.passes(ino, before) && !self.ended.wait_until(&mut under_way, until).timed_out() {}
        under_way.waiting -= 1;
    }

    /// A change of the length begins. Must be called before the volume is asked for it.
    pub(super) fn changes_length(self: &Arc<Self>, ino: INodeNo) -> Under {
        self.note(ino, Kind::Length)
    }

    /// Whether a short answer to the READ at `offset` may be given without a wait.
    pub(super) fn short_counts(&self, ino: INodeNo, offset: u64) -> bool {
        !self.under_way.lock().must_wait(ino, offset, u64::MAX)
    }

    /// Waits until the kernel takes a short answer to the READ at `offset` for the end of the file. `is_surprise`: it lacks so much that the kernel's
    /// length of the file is wrong.
    pub(super) fn until_short_counts(&self, ino: INodeNo, offset: u64, is_surprise: bool) {
        if is_surprise {
            std::thread::sleep(PAUSE);
        }
        let has_waited = self.wait(ino, offset);
        if is_surprise || has_waited {
            self.until_changed(ino);
        }
    }

    /// Waits until the kernel has changed the length as it was told.
    fn until_changed(&self, ino: INodeNo) {
        let changed: Vec<_> = {
            let under_way = self.under_way.lock();
            under_way.changed.iter().filter(|changed| changed.ino == ino.0).copied().collect()
        };
        for Changed { thread, answered, .. } in changed {
            while answered.elapsed() < CHANGED_LIMIT && wants_to_run(thread) {
                std::thread::sleep(LOOK_AGAIN);
            }
        }
    }

    /// Whether there was something to wait for.
    fn wait(&self, ino: INodeNo, offset: u64) -> bool {
        let mut under_way = self.under_way.lock();
        let before = under_way.noted;
        let mut has_waited = false;
        under_way.waiting += 1;
        while under_way.must_wait(ino, offset, before) {
            has_waited = true;
            self.ended.wait(&mut under_way);
        }
        under_way.waiting -= 1;
        has_waited
    }

    fn note(self: &Arc<Self>, ino: INodeNo, kind: Kind) -> Under {
        let mut under_way = self.under_way.lock();
        let number = under_way.noted;
        under_way.noted += 1;
        under_way.files.entry(ino.0).or_default().push(Noted { number, kind });
        Under { filling: self.clone(), ino, number }
    }
}

impl Under {
    /// A change of the length was answered, to this thread.
    pub(super) fn answered(self, thread: u32) {
        let mut under_way = self.filling.under_way.lock();
        if under_way.changed.len() >= CHANGED_MAX {
            under_way.changed.pop_front();
        }
        under_way.changed.push_back(Changed { ino: self.ino.0, thread, answered: Instant::now() });
        // Before the end is noted, which takes the lock.
        drop(under_way);
    }
}

/// Whether a thread runs, or waits for a processor.
fn wants_to_run(thread: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{thread}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| rest.starts_with(" R"))
}

impl Drop for Under {
    fn drop(&mut self) {
        let mut under_way = self.filling.under_way.lock();
        under_way.end(self.ino, self.number);
        if under_way.waiting > 0 {
            self.filling.ended.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INO: INodeNo = INodeNo(2);

    #[test]
    fn a_short_answer_waits_for_earlier_bytes_and_for_changes_of_the_length() {
        let filling = Arc::new(Filling::default());
        let own = filling.reads(INO, 8192);
        assert!(filling.short_counts(INO, 8192), "not for itself");
        let later = filling.reads(INO, 12288);
        let elsewhere = filling.reads(INodeNo(3), 0);
        let cut_elsewhere = filling.changes_length(INodeNo(3));
        assert!(filling.short_counts(INO, 8192));
        let earlier = filling.reads(INO, 4096);
        assert!(!filling.short_counts(INO, 8192));
        assert!(filling.short_counts(INO, 4096), "the earlier one does not wait for the later one");
        drop(earlier);
        assert!(filling.short_counts(INO, 8192));
        let cut = filling.changes_length(INO);
        assert!(!filling.short_counts(INO, 8192) && !filling.short_counts(INO, 0));
        cut.answered(0);
        assert!(filling.short_counts(INO, 8192));
        drop((own, later, elsewhere, cut_elsewhere));
        assert!(filling.under_way.lock().files.is_empty(), "nothing is left of what has ended");
    }

    #[test]
    fn attributes_wait_for_the_direct_writes_of_before() {
        let filling = Arc::new(Filling::default());
        let elsewhere = filling.passes(INodeNo(3));
        filling.wait_for_passing(INO, Duration::from_secs(60));
        let before = filling.passes(INO);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| filling.wait_for_passing(INO, Duration::from_secs(600)));
            while filling.under_way.lock().waiting == 0 {
                std::thread::yield_now();
            }
            assert!(!waiter.is_finished());
            drop(before);
        });
        let later = filling.passes(INO);
        filling.wait_for_passing(INO, Duration::ZERO);
        assert_eq!(filling.under_way.lock().files.len(), 2);
        assert!(filling.short_counts(INO, u64::MAX), "direct writes shorten nothing");
        drop((elsewhere, later));
        assert!(filling.under_way.lock().files.is_empty());
    }

    #[test]
    fn few_answered_changes_are_remembered() {
        let filling = Arc::new(Filling::default());
        for _ in 0..2 * CHANGED_MAX {
            filling.changes_length(INO).answered(0);
        }
        assert_eq!(filling.under_way.lock().changed.len(), CHANGED_MAX);
        filling.until_short_counts(INO, 0, true);
        assert!(!wants_to_run(0), "a thread that cannot be seen");
    }

    #[test]
    fn what_begins_later_is_not_waited_for() {
        let filling = Arc::new(Filling::default());
        let own = filling.reads(INO, 8192);
        let cut = filling.changes_length(INO);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| filling.until_short_counts(INO, 8192, false));
            while filling.under_way.lock().waiting == 0 {
                std::thread::yield_now();
            }
            let another = filling.changes_length(INO);
            assert!(!waiter.is_finished());
            drop(cut);
            waiter.join().expect("it ends beside the other change");
            drop(another);
        });
        drop(own);
    }
}
