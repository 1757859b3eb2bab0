//! The age of the names that the kernel remembers: for each file its change counter when one of its names was looked up.
//!
//! The kernel opens by number the file that a name meant up to an entry's lifetime ago. Other clients may have moved the file since, or put another
//! file under that name: then the open would read, cut or write a file that has another name by now. So an open carries the counter that the kernel
//! was told, and the server refuses it (`Stale`) if the file has lost a name since. Then the kernel looks the name up again.
//!
//! An open does not say which name led to it. A file that was told under two names within one lifetime is opened with the earlier counter: one of the
//! two names may be gone, even if the other was just looked up. Such an open may be refused needlessly; the lookup after it finds the file, and that
//! file is then opened (`nameless`).
//!
//! Directories are not noted: names below a directory are looked up in that directory, wherever it is by now.

use cuttlefs_common::attr::{Attr, FileKind};
use cuttlefs_common::ids::InodeNo;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::{Duration, Instant};

/// The most files that are remembered. Beyond that all are forgotten, and for a lifetime their opens are not protected against moves.
const CAPACITY: usize = 65_536;
/// An answer reaches the kernel up to this much later than it is noted here.
const LATE: Duration = Duration::from_secs(4);

/// A hash of a directory and a name in it. If two are equal by chance, with a probability of 2^-64, two names are treated as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NameId(u64);

impl NameId {
    pub(super) fn new(parent: InodeNo, name: &[u8]) -> Self {
        let mut hasher = DefaultHasher::new();
        (parent.0, name).hash(&mut hasher);
        Self(hasher.finish())
    }
}

/// A change counter that the kernel was told, and the time until which the kernel may remember it.
#[derive(Clone, Copy, Debug)]
struct Telling {
    change: u64,
    until: Instant,
}

#[derive(Debug)]
struct Told {
    /// The name under which the file was told last.
    name: NameId,
    last: Telling,
    /// The earliest counter that the kernel may still remember of the file's other names.
    others: Option<Telling>,
}

/// The tellings, by inode.
#[derive(Debug)]
pub(super) struct ToldNames {
    lifetime: Duration,
    told: Mutex<HashMap<InodeNo, Told>>,
}

impl ToldNames {
    /// Nothing was told yet. Entries live in the kernel for `lifetime`.
    pub(super) fn new(lifetime: Duration) -> Self {
        Self { lifetime: lifetime + LATE, told: Mutex::default() }
    }

    /// The kernel is told that this name means this file.
    pub(super) fn told(&self, name: NameId, attr: &Attr) {
        self.told_at(Instant::now(), name, attr);
    }

    fn told_at(&self, now: Instant, name: NameId, attr: &Attr) {
        if attr.kind != FileKind::File {
            return;
        }
        let last = Telling { change: attr.change, until: now + self.lifetime };
        let mut told = self.told.lock();
        let others = told.get(&attr.ino).and_then(|before| {
            let of_before = (before.name != name).then_some(before.last);
            let live = [before.others, of_before].into_iter().flatten().filter(|telling| telling.until > now);
            live.reduce(|a, b| Telling { change: a.change.min(b.change), until: a.until.max(b.until) })
        });
        if told.len() >= CAPACITY {
            told.clear();
        }
        told.insert(attr.ino, Told { name, last, others });
    }

    /// The kernel itself has moved a name: it remembers the file under the new name and not under the old one. With `exchanges`, the file of the new
    /// name has the old one now.
    pub(super) fn moved(&self, from: NameId, to: NameId, exchanges: bool, attr: &Attr) {
        let mut told = self.told.lock();
        if exchanges {
            // Exchanges are rare enough to search all files.
            told.values_mut().filter(|told| told.name == to).for_each(|told| told.name = from);
        }
        if let Some(told) = told.get_mut(&attr.ino).filter(|told| told.name == from) {
            told.name = to;
        }
        drop(told);
        self.told(to, attr);
    }

    /// The counter that an open carries; 0 if nothing is known.
    pub(super) fn of(&self, ino: InodeNo) -> u64 {
        self.of_at(Instant::now(), ino)
    }

    fn of_at(&self, now: Instant, ino: InodeNo) -> u64 {
        let told = self.told.lock();
        let Some(told) = told.get(&ino) else { return 0 };
        let others = told.others.filter(|others| others.until > now);
        others.map_or(told.last.change, |others| others.change.min(told.last.change))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(change: u64) -> Attr {
        Attr { change, ..Attr::empty_file(InodeNo(7)) }
    }

    #[test]
    fn what_counts_is_the_earliest_telling_of_names_that_may_still_be_remembered() {
        let names = ToldNames::new(Duration::from_secs(1));
        let (a, b) = (NameId::new(InodeNo(1), b"a"), NameId::new(InodeNo(1), b"b"));
        assert_ne!(a, NameId::new(InodeNo(2), b"a"));
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let open = |ms| names.of_at(at(ms), InodeNo(7));
        assert_eq!(open(0), 0, "nothing is known");
        names.told_at(at(0), a, &file(5));
        names.told_at(at(100), a, &file(6));
        assert_eq!(open(100), 6, "the same name, looked up again");
        names.told_at(at(200), b, &file(9));
        assert_eq!(open(200), 6, "a may be gone since");
        names.told_at(at(300), b, &file(10));
        assert_eq!(open(300), 6, "also if b is looked up again");
        assert_eq!(open(5_200), 10, "the kernel remembers a no more");
        names.told_at(at(5_250), a, &file(11));
        assert_eq!(open(5_260), 10, "b it does");
    }

    #[test]
    fn a_name_that_the_kernel_moves_is_one_name() {
        let names = ToldNames::new(Duration::from_secs(1));
        let (a, b, c) =
            (NameId::new(InodeNo(1), b"a"), NameId::new(InodeNo(1), b"b"), NameId::new(InodeNo(2), b"c"));
        names.told(a, &file(5));
        names.moved(a, b, false, &file(6));
        assert_eq!(names.of(InodeNo(7)), 6);
        names.told(c, &file(7));
        names.moved(c, a, false, &file(8));
        assert_eq!(names.of(InodeNo(7)), 6, "b is remembered beside it");
    }
}
