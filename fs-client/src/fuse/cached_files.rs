//! What the kernel may have cached of each file: whether pages, and of which change of the file they are.
//!
//! # Of which change
//! Every change of a file moves its change counter. The kernel's pages are *of* a counter if no other client has changed the file between that counter
//! and now, as far as this mount has been told. This mount's own writes go into the pages, too, so they move the pages' counter along. When an open, a
//! granted lock or attributes bring a counter that the pages are not of, another client has changed the file, and the pages must go
//! ([`CachedFiles::look`]).
//!
//! * **Own changes are answered in any order.** A counter that is ahead is kept until those before it have come.
//! * **A counter may be of an own change that is not answered yet.** Then nothing is known ([`Look::Unknown`]) until the own changes that were under way
//!   have been answered. To call such pages stale would be worse than a needless READ: the kernel lets go of a written page before it sends the WRITE,
//!   and whoever reads the page after it was dropped gets the bytes of before.
//! * **Counters repeat** after a server has died with changes. So each comes with the epoch of the server: that of before the request, so that an answer
//!   of the next server is never taken for one of the last.
//!
//! A page that is filled later may be of a later change. That the pages are of a counter is a lower bound.
//!
//! # Pages that come back
//! The kernel copies the bytes of a write into a page, lets go of it, and sends the WRITE. If the page is forgotten in between, a READ may bring it back
//! with the bytes of before, and it would stay. So the ranges that are read within [`PREEMPTED`] after pages were forgotten are kept, and a WRITE of such a range
//! has it forgotten before it is answered ([`CachedFiles::may_be_replaced`]).
//!
//! # Whether pages
//! `kernel_cache` asks this for writes past the page cache. Only requests of the kernel bring pages, so a file has none until the first of them.
//!
//! # Bounds
//! [`FILES_MAX`] files that are not open; those that are open have a bound at the server. [`AHEAD_MAX`] counters of a file, [`READ_MAX`] ranges.

use super::kernel::INodeNo;
use crate::file::volume::Volume;
use cuttlefs_common::ids::PAGE_SIZE;
use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The number of direct writes of a file, without a page filled in between, after which all pages of the file are forgotten. A reader beside a direct
/// writer keeps the pages that are not written; a writer alone pays for a few forgotten ranges.
const QUIET_WRITES: u32 = 16;
/// The most files that are remembered while they are not open. Beyond that all of them are forgotten here: a file that is not known may have pages.
const FILES_MAX: usize = 65_536;
/// The most counters of own changes that are ahead of the pages' counter. With more, the pages are of no counter.
const AHEAD_MAX: usize = 64;

/// The longest time between the kernel's copy of a write into its pages and the WRITE that is counted on: a program's thread waits for a processor.
const PREEMPTED: Duration = Duration::from_secs(10);
/// The longest time that is waited for own changes of a file: a copy within the server may take minutes. Then the pages are taken for stale.
const SETTLED_LIMIT: Duration = Duration::from_millis(250);
/// The most ranges of READs of a file that are kept. With more, all of it is taken for read.
const READ_MAX: usize = 1024;

/// A change of a file, by its counter and the epoch of the server that has counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct At {
    pub(super) epoch: u64,
    pub(super) change: u64,
}

impl At {
    /// The change of this counter in an answer. `epoch` is the server's number before the request; `None` if another server has come since.
    pub(super) fn of<V: Volume + ?Sized>(volume: &V, epoch: u64, change: u64) -> Option<Self> {
        (volume.server_epoch() == epoch).then_some(Self { epoch, change })
    }
}

/// What the kernel's pages are to somebody who was told a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// There are none, or no other client has changed the file since.
    Good,
    /// Another client may have changed the file.
    Stale,
    /// An own change that is not answered yet may have counted. Its number is below this one.
    Unknown(u64),
}

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
    /// The change that the pages are of; `None`: not known.
    of: Option<At>,
    /// Own changes behind it that others are missing before.
    ahead: Vec<At>,
    /// Own changes that are under way, by number.
    under_way: Vec<u64>,
    /// When pages were last forgotten.
    last_forgotten: Option<Instant>,
    /// The ranges that were read since then.
    read: Vec<(u64, u64)>,
}

impl File {
    fn new(may_have_pages: bool) -> Self {
        let fills = u64::from(may_have_pages);
        Self {
            fills,
            quiet_writes: 0,
            opens: 0,
            writers: 0,
            size: None,
            of: None,
            ahead: Vec::new(),
            under_way: Vec::new(),
            last_forgotten: None,
            read: Vec::new(),
        }
    }

    fn fills(&mut self) {
        self.fills += 1;
        self.quiet_writes = 0;
    }

    /// Whether pages were forgotten a moment ago, so that one that is being written may come back as it was before.
    fn is_racy(&self) -> bool {
        self.last_forgotten.is_some_and(|at| at.elapsed() < PREEMPTED)
    }

    /// The pages of `[from, to)` are going to be forgotten. Returns whether any of them was read since pages were last forgotten.
    fn drops(&mut self, from: u64, to: u64) -> bool {
        let page = PAGE_SIZE as u64;
        let (from, to) = (from / page * page, to.div_ceil(page).saturating_mul(page));
        if !self.read.iter().any(|(first, end)| *first < to && from < *end) {
            return false;
        }
        let rests = |(first, end): (u64, u64)| {
            let parts = [(first, end.min(from)), (first.max(to), end)];
            parts.into_iter().filter(|(first, end)| first < end)
        };
        self.read = self.read.drain(..).flat_map(rests).collect();
        true
    }

    /// Whether the pages are known to be of this change or a later one.
    fn has(&self, at: At) -> bool {
        self.of.is_some_and(|of| of.epoch == at.epoch && at.change <= of.change)
    }

    fn is_good(&mut self, at: At) -> bool {
        if self.has(at) {
            return true;
        }
        let has_none = self.fills == 0;
        if has_none {
            // Pages that come are of this or later.
            self.are_of(at);
        }
        has_none
    }

    /// An own change was counted.
    fn counted(&mut self, at: At) {
        if self.has(at) {
            return;
        }
        self.ahead.push(at);
        self.move_along();
        if self.ahead.len() > AHEAD_MAX {
            self.ahead.clear();
            self.of = None;
        }
    }

    /// The pages are of this change now.
    fn are_of(&mut self, at: At) {
        self.of = Some(at);
        self.ahead.retain(|ahead| ahead.epoch == at.epoch && ahead.change > at.change);
        self.move_along();
    }

    fn move_along(&mut self) {
        let Some(of) = &mut self.of else { return };
        let next = |of: &At| At { change: of.change + 1, ..*of };
        while let Some(place) = self.ahead.iter().position(|ahead| *ahead == next(of)) {
            *of = self.ahead.swap_remove(place);
        }
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
            self.files.retain(|_, file| file.opens > 0 || !file.under_way.is_empty());
            self.forgot = true;
        }
        let forgot = self.forgot;
        self.files.entry(ino.0).or_insert_with(|| File::new(forgot))
    }

    /// Drops a file of which there is nothing to know.
    fn tidy(&mut self, ino: INodeNo) {
        let is_idle = |file: &File| file.opens == 0 && file.fills == 0 && file.under_way.is_empty();
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
        if file.is_racy() {
            file.read.push((from, to));
            if file.read.len() > READ_MAX {
                let all = (0, u64::MAX);
                file.read.clear();
                file.read.push(all);
            }
        }
    }

    /// Whether the pages of a write of `[from, to)` through the page cache may have the bytes of before: they were read since pages of the file were
    /// forgotten. Then the caller has them forgotten.
    pub(super) fn may_be_replaced(&self, ino: INodeNo, from: u64, to: u64) -> bool {
        let mut table = self.table.lock();
        let file = table.of(ino);
        file.is_racy() && file.drops(from, to)
    }

    /// The range to forget after a direct write; `None` if nothing can be cached.
    pub(super) fn passed(&self, ino: INodeNo, offset: u64, len: u32) -> Option<Range> {
        let mut table = self.table.lock();
        let file = table.of(ino);
        if file.fills == 0 {
            return None;
        }
        if file.is_racy() {
            file.drops(offset, offset.saturating_add(len.into()));
        } else {
            file.read.clear();
        }
        file.last_forgotten = Some(Instant::now());
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
        file.last_forgotten = Some(Instant::now());
        // Those that are under way now are forgotten with the pages that are there.
        file.read.clear();
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
            file.read.clear();
        }
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
        table.of(ino).under_way.push(number);
        OwnChange { files: self.clone(), ino, number }
    }

    /// Looks at the pages, for somebody who was told that the file is `at` this change.
    pub(super) fn look(&self, ino: INodeNo, at: At) -> Look {
        let mut table = self.table.lock();
        let (next, forgot) = (table.changes, table.forgot);
        let Some(file) = table.files.get_mut(&ino.0) else {
            return if forgot { Look::Stale } else { Look::Good };
        };
        if file.is_good(at) {
            Look::Good
        } else if file.under_way.is_empty() || file.of.is_none_or(|of| of.epoch != at.epoch) {
            Look::Stale
        } else {
            Look::Unknown(next)
        }
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
        let is_under_way = |table: &Table| {
            table.files.get(&ino.0).is_some_and(|file| file.under_way.iter().any(|number| *number < before))
        };
        while is_under_way(&table) && !self.answered.wait_until(&mut table, until).timed_out() {}
        table.waiting -= 1;
        table.of(ino).is_good(at)
    }

    /// The pages of before were forgotten: those that are there are of this change or later. `None`: it is not known of which.
    pub(super) fn are_of(&self, ino: INodeNo, at: Option<At>) {
        let mut table = self.table.lock();
        let file = table.of(ino);
        match at {
            Some(at) => file.are_of(at),
            None => file.of = None,
        }
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
            self.files.table.lock().of(self.ino).counted(at);
        }
    }
}

impl Drop for OwnChange {
    fn drop(&mut self) {
        let mut table = self.files.table.lock();
        table.of(self.ino).under_way.retain(|number| *number != self.number);
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
    fn pages_that_were_read_after_others_were_forgotten_are_forgotten_once_more() {
        let files = CachedFiles::default();
        files.reads(INO, 0, 8192);
        assert!(!files.may_be_replaced(INO, 0, 10), "nothing was forgotten: no page can have come back");
        files.forgets(INO);
        assert!(!files.may_be_replaced(INO, 0, 10), "and was not read since");
        files.reads(INO, 4096, 12288);
        assert!(!files.may_be_replaced(INO, 0, 4096) && !files.may_be_replaced(INO, 12288, 20000));
        assert!(files.may_be_replaced(INO, 5000, 5010));
        assert!(!files.may_be_replaced(INO, 4000, 8192), "the whole page was forgotten");
        assert!(files.may_be_replaced(INO, 8192, 8193));
        files.reads(INO, 0, 10);
        files.forgets(INO);
        assert!(!files.may_be_replaced(INO, 0, u64::MAX), "all was forgotten");
        for page in 0..2 * READ_MAX as u64 {
            files.reads(INO, page * 8192, page * 8192 + 4096);
        }
        assert!(files.table.lock().of(INO).read.len() <= READ_MAX);
        assert!(files.may_be_replaced(INO, 0, 1) && files.may_be_replaced(INO, 5000, 5001));
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
    fn few_counters_are_kept() {
        let files = Arc::new(CachedFiles::default());
        files.opened(INO, true);
        files.look(INO, at(1));
        files.fills(INO);
        for change in 3..3 + 2 * AHEAD_MAX as u64 {
            files.changes(INO).answered(Some(at(change)));
        }
        assert!(files.table.lock().of(INO).ahead.len() <= AHEAD_MAX);
        assert_eq!(files.look(INO, at(2)), Look::Stale);
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
                if begins && change < AHEAD_MAX as u64 {
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
