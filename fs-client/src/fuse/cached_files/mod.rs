//! What the kernel may have cached of each file: whether pages, of which change of the file they are (`age`), and whether they may have come back as they
//! were before a write (`reread`).
//!
//! # Whether pages
//! `kernel_cache` asks this for writes past the page cache. Only requests of the kernel bring pages, so a file has none until the first of them.
//!
//! # Bounds
//! [`FILES_MAX`] files that are not open; those that are open have a bound at the server. `AHEAD_MAX` counters of a file, `RANGES_MAX` ranges.

mod age;
mod reread;

pub(super) use age::{At, Look};

use super::kernel::INodeNo;
use age::Age;
use parking_lot::{Condvar, Mutex};
use reread::Reread;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The number of direct writes of a file, without a page filled in between, after which all pages of the file are forgotten. A reader beside a direct
/// writer keeps the pages that are not written; a writer alone pays for a few forgotten ranges.
const QUIET_WRITES: u32 = 16;
/// The most files that are remembered while they are not open. Beyond that all of them are forgotten here: a file that is not known may have pages.
const FILES_MAX: usize = 65_536;
/// The longest time that is waited for own changes of a file: a copy within the server may take minutes. Then the pages are taken for stale.
const SETTLED_LIMIT: Duration = Duration::from_millis(250);

/// The bytes to forget after a direct write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Range {
    /// This range.
    Bytes { offset: i64, len: i64 },
    /// All bytes. Afterwards nothing is cached, if no page was filled since; `fills` is the count of fillings before.
    All { fills: u64 },
}

#[derive(Debug)]
struct File {
    /// How often pages were filled since there were none; 0: there are none.
    fills: u64,
    /// The number of direct writes since the last filling.
    quiet_writes: u32,
    /// How often the file is open, and how often for writing.
    opens: u32,
    writers: u32,
    /// The length that the kernel has, as far as it is known: of the last attributes that it has taken, and of writes since.
    size: Option<u64>,
    age: Age,
    reread: Reread,
}

impl File {
    fn new(may_have_pages: bool) -> Self {
        Self {
            fills: u64::from(may_have_pages),
            quiet_writes: 0,
            opens: 0,
            writers: 0,
            size: None,
            age: Age::default(),
            reread: Reread::default(),
        }
    }

    fn fills(&mut self) {
        self.fills += 1;
        self.quiet_writes = 0;
    }

    fn is_good(&mut self, at: At) -> bool {
        if self.age.has(at) {
            return true;
        }
        let has_none = self.fills == 0;
        if has_none {
            // Pages that come are of this or later.
            self.age.are_of(Some(at));
        }
        has_none
    }
}

#[derive(Debug, Default)]
struct Table {
    files: HashMap<u64, File>,
    /// Whether files were forgotten here, so that an unknown file may have pages.
    forgot: bool,
    /// The number of the next own change.
    changes: u64,
    /// The number of threads in `settle`, so that most answers notify nobody.
    waiting: usize,
}

impl Table {
    fn of(&mut self, ino: INodeNo) -> &mut File {
        if self.files.len() >= FILES_MAX && !self.files.contains_key(&ino.0) {
            self.files.retain(|_, file| file.opens > 0 || !file.age.is_settled());
            self.forgot = true;
        }
        let forgot = self.forgot;
        self.files.entry(ino.0).or_insert_with(|| File::new(forgot))
    }

    /// Drops a file of which there is nothing to know.
    fn tidy(&mut self, ino: INodeNo) {
        let is_idle = |file: &File| file.opens == 0 && file.fills == 0 && file.age.is_settled();
        if self.files.get(&ino.0).is_some_and(is_idle) {
            self.files.remove(&ino.0);
        }
    }
}

/// What the kernel may have cached, by file.
#[derive(Debug, Default)]
pub(super) struct CachedFiles {
    table: Mutex<Table>,
    /// Notified when an own change was answered and somebody waits.
    answered: Condvar,
}

impl CachedFiles {
    /// A request that fills pages begins. Must be called before the volume is asked for the bytes.
    pub(super) fn fills(&self, ino: INodeNo) {
        self.table.lock().of(ino).fills();
    }

    /// A READ that fills pages with `[from, to)` begins. Must be called before the volume is asked for the bytes.
    pub(super) fn reads(&self, ino: INodeNo, from: u64, to: u64) {
        let mut table = self.table.lock();
        let file = table.of(ino);
        file.fills();
        file.reread.reads(from, to);
    }

    /// Whether the pages of a write of `[from, to)` through the page cache may have the bytes of before: they were read since pages of the file were
    /// forgotten. Then the caller has them forgotten.
    pub(super) fn may_be_replaced(&self, ino: INodeNo, from: u64, to: u64) -> bool {
        self.table.lock().of(ino).reread.may_have_replaced(from, to)
    }

    /// The range to forget after a direct write; `None` if nothing can be cached.
    pub(super) fn passed(&self, ino: INodeNo, offset: u64, len: u32) -> Option<Range> {
        let mut table = self.table.lock();
        let file = table.of(ino);
        if file.fills == 0 {
            return None;
        }
        file.reread.forgets_range(offset, offset.saturating_add(len.into()));
        file.quiet_writes += 1;
        Some(if file.quiet_writes < QUIET_WRITES {
            Range::Bytes { offset: offset.cast_signed(), len: i64::from(len) }
        } else {
            Range::All { fills: file.fills }
        })
    }

    /// All pages of the file are going to be forgotten. Returns the count of fillings, for `forgotten`.
    pub(super) fn forgets(&self, ino: INodeNo) -> u64 {
        let mut table = self.table.lock();
        let file = table.of(ino);
        file.reread.forgets();
        file.fills
    }

    /// All pages were forgotten. A filling is noted before its bytes are requested, so if there was no new one, nothing is cached.
    pub(super) fn forgotten(&self, ino: INodeNo, fills_before: u64) {
        let mut table = self.table.lock();
        let file = table.of(ino);
        if file.fills == fills_before {
            file.fills = 0;
            table.tidy(ino);
        }
    }

    /// The file was opened, for writing or not.
    pub(super) fn opened(&self, ino: INodeNo, writes: bool) {
        let mut table = self.table.lock();
        let file = table.of(ino);
        file.opens += 1;
        file.writers += u32::from(writes);
    }

    /// An open file was closed.
    pub(super) fn closed(&self, ino: INodeNo, writes: bool) {
        let mut table = self.table.lock();
        let file = table.of(ino);
        file.opens = file.opens.saturating_sub(1);
        file.writers = file.writers.saturating_sub(u32::from(writes));
        table.tidy(ino);
    }

    /// Whether the file is open: programs may read its pages without asking.
    pub(super) fn is_open(&self, ino: INodeNo) -> bool {
        self.table.lock().files.get(&ino.0).is_some_and(|file| file.opens > 0)
    }

    /// Whether a program may have stored bytes in pages through a mapping that the volume has not been given.
    pub(super) fn may_be_dirty(&self, ino: INodeNo) -> bool {
        self.table.lock().files.get(&ino.0).is_some_and(|file| file.writers > 0)
    }

    /// The kernel is told this length, and takes it. If it has another one, it forgets the file's pages by itself.
    pub(super) fn takes_size(&self, ino: INodeNo, size: u64) {
        if let Some(file) = self.table.lock().files.get_mut(&ino.0)
            && file.size.replace(size) != Some(size)
        {
            file.reread.forgot();
        }
    }

    /// Whether the kernel is known to have this length.
    pub(super) fn has_size(&self, ino: INodeNo, size: u64) -> bool {
        self.table.lock().files.get(&ino.0).is_some_and(|file| file.size == Some(size))
    }

    /// Whether the kernel has a shorter length than this one, as far as is known.
    pub(super) fn has_shorter(&self, ino: INodeNo, size: u64) -> bool {
        self.table.lock().files.get(&ino.0).is_some_and(|file| file.size.is_some_and(|has| has < size))
    }

    /// A write of this mount is done that ended there.
    pub(super) fn wrote_up_to(&self, ino: INodeNo, end: u64) {
        if let Some(file) = self.table.lock().files.get_mut(&ino.0) {
            file.size = file.size.map(|size| size.max(end));
        }
    }

    /// The files that are open and may have pages.
    pub(super) fn in_use(&self) -> Vec<INodeNo> {
        let table = self.table.lock();
        let files = table.files.iter().filter(|(_, file)| file.opens > 0 && file.fills > 0);
        files.map(|(ino, _)| INodeNo(*ino)).collect()
    }

    /// An own change of the file begins. Must be called before the volume is asked for it.
    pub(super) fn changes(self: &Arc<Self>, ino: INodeNo) -> OwnChange {
        let mut table = self.table.lock();
        let number = table.changes;
        table.changes += 1;
        table.of(ino).age.begins(number);
        OwnChange { files: self.clone(), ino, number }
    }

    /// Looks at the pages, for somebody who was told that the file is `at` this change.
    pub(super) fn look(&self, ino: INodeNo, at: At) -> Look {
        let mut table = self.table.lock();
        let (next, forgot) = (table.changes, table.forgot);
        let Some(file) = table.files.get_mut(&ino.0) else {
            return if forgot { Look::Stale } else { Look::Good };
        };
        if file.is_good(at) { Look::Good } else { file.age.without(at, next) }
    }

    /// Waits until the own changes with numbers below `before` have been answered, at most [`SETTLED_LIMIT`]. Returns whether the pages are good then; later
    /// own changes cannot have counted.
    pub(super) fn settle(&self, ino: INodeNo, at: At, before: u64) -> bool {
        self.settle_within(ino, at, before, SETTLED_LIMIT)
    }

    fn settle_within(&self, ino: INodeNo, at: At, before: u64, limit: Duration) -> bool {
        let mut table = self.table.lock();
        let until = Instant::now() + limit;
        table.waiting += 1;
        let is_under_way =
            |table: &Table| table.files.get(&ino.0).is_some_and(|file| file.age.awaits(before));
        while is_under_way(&table) && !self.answered.wait_until(&mut table, until).timed_out() {}
        table.waiting -= 1;
        table.of(ino).is_good(at)
    }

    /// The pages of before were forgotten: those that are there are of this change or later. `None`: it is not known of which.
    pub(super) fn are_of(&self, ino: INodeNo, at: Option<At>) {
        self.table.lock().of(ino).age.are_of(at);
    }
}

/// An own change of a file that is under way until this is dropped.
#[must_use]
#[derive(Debug)]
pub(super) struct OwnChange {
    files: Arc<CachedFiles>,
    ino: INodeNo,
    number: u64,
}

impl OwnChange {
    /// The file is at this change by it. If that is not known, or never told, the pages are of no later change.
    pub(super) fn answered(self, at: Option<At>) {
        if let Some(at) = at {
            self.files.table.lock().of(self.ino).age.counted(at);
        }
    }
}

impl Drop for OwnChange {
    fn drop(&mut self) {
        let mut table = self.files.table.lock();
        table.of(self.ino).age.ends(self.number);
        table.tidy(self.ino);
        if table.waiting > 0 {
            self.files.answered.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const INO: INodeNo = INodeNo(2);

    fn at(change: u64) -> At {
        At { epoch: 1, change }
    }

    fn bytes(offset: i64, len: i64) -> Option<Range> {
        Some(Range::Bytes { offset, len })
    }

    #[test]
    fn only_what_may_be_cached_is_forgotten() {
        let files = CachedFiles::default();
        assert_eq!(files.passed(INO, 0, 10), None, "nobody has read it through the cache");
        files.fills(INO);
        assert_eq!(files.passed(INO, 4096, 10), bytes(4096, 10));
        assert_eq!(files.passed(INodeNo(3), 4096, 10), None);
    }

    #[test]
    fn a_file_that_nobody_fills_is_soon_forgotten_as_a_whole() {
        let files = CachedFiles::default();
        files.fills(INO);
        for _ in 1..QUIET_WRITES {
            assert_eq!(files.passed(INO, 0, 1), bytes(0, 1));
        }
        assert_eq!(files.passed(INO, 0, 1), Some(Range::All { fills: 1 }));
        // A filling begins before all pages were forgotten: it may bring bytes from before the next write.
        files.fills(INO);
        files.forgotten(INO, 1);
        assert_eq!(files.passed(INO, 0, 1), bytes(0, 1));
        files.forgotten(INO, 2);
        assert_eq!(files.passed(INO, 0, 1), None);
        files.fills(INO);
        assert_eq!(files.passed(INO, 0, 1), bytes(0, 1));
    }

    #[test]
    fn what_is_not_known_any_more_may_be_cached() {
        let files = CachedFiles::default();
        files.fills(INO);
        files.opened(INodeNo(999), false);
        assert_eq!(files.look(INodeNo(999), at(5)), Look::Good);
        for ino in 0..FILES_MAX as u64 {
            files.fills(INodeNo(1000 + ino));
        }
        assert!(files.table.lock().forgot && files.table.lock().files.len() < FILES_MAX);
        assert_eq!(files.look(INodeNo(999), at(5)), Look::Good, "an open file stays");
        assert_eq!(files.look(INO, at(1)), Look::Stale);
        files.opened(INO, true);
        assert_eq!(files.look(INO, at(1)), Look::Stale);
        assert_eq!(files.passed(INO, 0, 1), bytes(0, 1));
        for _ in 2..QUIET_WRITES {
            assert_eq!(files.passed(INO, 0, 1), bytes(0, 1));
        }
        let Some(Range::All { fills }) = files.passed(INO, 0, 1) else {
            panic!("all is to be forgotten");
        };
        files.forgotten(INO, fills);
        assert_eq!(files.passed(INO, 0, 1), None);
        assert_eq!(files.look(INO, at(1)), Look::Good, "nothing is cached");
    }

    #[test]
    fn own_changes_leave_pages_good_and_those_of_others_make_them_stale() {
        let files = Arc::new(CachedFiles::default());
        files.opened(INO, true);
        assert_eq!(files.look(INO, at(5)), Look::Good, "no pages");
        files.fills(INO);
        files.changes(INO).answered(Some(at(6)));
        assert_eq!(files.look(INO, at(6)), Look::Good);
        assert_eq!(files.look(INO, at(5)), Look::Good, "an answer from before");
        assert_eq!(files.look(INO, at(7)), Look::Stale, "somebody else wrote");
        files.changes(INO).answered(Some(at(8)));
        assert_eq!(files.look(INO, at(8)), Look::Stale, "and this mount behind him");
        files.are_of(INO, Some(at(7)));
        assert_eq!(
            files.look(INO, at(8)),
            Look::Good,
            "the own change is in the pages that were forgotten and in those that came"
        );
        assert_eq!(files.look(INO, At { epoch: 2, change: 8 }), Look::Stale, "another server has counted");
        files.are_of(INO, None);
        assert_eq!(files.look(INO, at(8)), Look::Stale);
    }

    #[test]
    fn a_counter_may_be_of_a_change_that_is_under_way() {
        let files = Arc::new(CachedFiles::default());
        files.opened(INO, true);
        files.look(INO, at(5));
        files.fills(INO);
        let (first, second) = (files.changes(INO), files.changes(INO));
        let unknown = files.look(INO, at(7));
        let Look::Unknown(before) = unknown else { panic!("{unknown:?}") };
        second.answered(Some(at(7)));
        assert_eq!(files.look(INO, at(7)), Look::Unknown(before), "somebody else may have made 6");
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| files.settle_within(INO, at(7), before, Duration::from_secs(600)));
            while files.table.lock().waiting == 0 {
                std::thread::yield_now();
            }
            let later = files.changes(INO);
            assert!(!waiter.is_finished());
            first.answered(Some(at(6)));
            assert!(waiter.join().expect("it waits for no later one"));
            drop(later);
        });
        assert_eq!(files.look(INO, at(7)), Look::Good);
        let long = files.changes(INO);
        let unknown = files.look(INO, at(8));
        let Look::Unknown(before) = unknown else { panic!("{unknown:?}") };
        assert!(!files.settle_within(INO, at(8), before, Duration::ZERO), "it is not waited for without end");
        drop(long);
        assert_eq!(files.look(INO, at(8)), Look::Stale, "one that failed may have counted");
    }

    #[test]
    fn the_kernel_s_length_is_known_from_what_it_was_told_and_from_writes() {
        let files = CachedFiles::default();
        files.takes_size(INO, 20);
        assert!(!files.has_shorter(INO, 30), "of files that are not open nothing is known");
        files.opened(INO, true);
        files.wrote_up_to(INO, 10);
        assert!(!files.has_shorter(INO, 30), "nor by a write");
        files.takes_size(INO, 20);
        files.wrote_up_to(INO, 10);
        assert!(!files.has_shorter(INO, 20) && files.has_shorter(INO, 21));
        files.wrote_up_to(INO, 30);
        assert!(!files.has_shorter(INO, 30) && files.has_shorter(INO, 31));
        files.opened(INO, false);
        assert!(files.may_be_dirty(INO) && files.is_open(INO));
        files.closed(INO, true);
        assert!(!files.may_be_dirty(INO) && files.is_open(INO));
        files.closed(INO, false);
        assert!(
            files.table.lock().files.is_empty(),
            "nothing is left of a file that is closed and has no pages"
        );
    }

    #[test]
    fn open_files_with_pages_are_in_use() {
        let files = CachedFiles::default();
        files.opened(INO, true);
        files.opened(INO, true);
        files.opened(INodeNo(3), false);
        assert_eq!(files.in_use(), []);
        files.fills(INO);
        files.closed(INO, true);
        assert_eq!(files.in_use(), [INO]);
        files.closed(INO, true);
        assert_eq!(files.in_use(), []);
    }

    proptest! {
        /// Changes of two clients; those of this mount are answered in any order, and some answers are lost. Good pages have no change of the other.
        #[test]
        fn good_pages_have_no_change_of_others(
            steps in proptest::collection::vec((0..5u8, any::<proptest::sample::Index>()), 1..200),
        ) {
            let files = Arc::new(CachedFiles::default());
            files.opened(INO, true);
            files.look(INO, at(0));
            files.fills(INO);
            // The file's counter, the last change of the other client, and the counter that the kernel's pages were taken at.
            let (mut change, mut others, mut taken) = (0u64, 0u64, 0u64);
            let mut under_way = Vec::new();
            for (step, which) in steps {
                match step {
                    0 => {
                        change += 1;
                        others = change;
                    }
                    1 => {
                        change += 1;
                        under_way.push((files.changes(INO), change));
                    }
                    2 if !under_way.is_empty() => {
                        let (own, counted) = under_way.swap_remove(which.index(under_way.len()));
                        own.answered(Some(at(counted)));
                    }
                    3 if !under_way.is_empty() && which.index(8) == 0 => {
                        drop(under_way.swap_remove(0));
                    }
                    _ => match files.look(INO, at(change)) {
                        Look::Good => prop_assert!(others <= taken),
                        Look::Stale => {
                            files.are_of(INO, Some(at(change)));
                            taken = change;
                        }
                        Look::Unknown(_) => prop_assert!(!under_way.is_empty()),
                    },
                }
            }
        }

        /// Without another client pages stay good, whatever the order of answers.
        #[test]
        fn own_changes_never_make_pages_stale(
            steps in proptest::collection::vec((any::<bool>(), any::<proptest::sample::Index>()), 1..200),
        ) {
            let files = Arc::new(CachedFiles::default());
            files.opened(INO, true);
            files.look(INO, at(0));
            files.fills(INO);
            let mut change = 0;
            let mut under_way = Vec::new();
            for (begins, which) in steps {
                // So many can wait for the first.
                if begins && change < age::AHEAD_MAX as u64 {
                    change += 1;
                    under_way.push((files.changes(INO), change));
                } else if !under_way.is_empty() {
                    let (own, counted) = under_way.swap_remove(which.index(under_way.len()));
                    own.answered(Some(at(counted)));
                }
                prop_assert_ne!(files.look(INO, at(change)), Look::Stale);
            }
            for (own, counted) in under_way {
                own.answered(Some(at(counted)));
            }
            prop_assert_eq!(files.look(INO, at(change)), Look::Good);
        }
    }
}
