//! The one-sided way (NP-RDMA section 3.1): what is posted, and how it is known that it was done.
//!
//! | access | posted | done if | else |
//! |--------|--------|---------|------|
//! | READ | READ | no page's part is the signature | the target, for the range from the first such page to the last |
//! | WRITE, all entries known | WRITE, READ of the entries | each page stayed: same frame, same version | see below |
//! | WRITE, not all known | READ of the entries, WRITE, READ of the entries | the same | see below |
//!
//! A WRITE of which a page did not stay goes once more, if all its pages now have frames; otherwise the target is asked, for the range from the first
//! such page to the last. One READ checks all WRITEs of a doorbell whose pages follow each other, and those that were not signaled before it (`checks`).
//!
//! **Where this end of the link looks pages up** ([`QueuePair::looks_pages_up`](crate::rdma::QueuePair::looks_pages_up)) nothing is signaled, and an access that met an
//! absent page completes all the same. Often the post itself tells that all is executed, and that no page was absent
//! ([`QueuePair::post_send_known`](crate::rdma::QueuePair::post_send_known)): then all accesses of the doorbell are done, without a completion. Otherwise a READ of one entry is posted
//! behind them, which is signaled, and when that is complete:
//!
//! | access | posted | done if no completion told of an absent page | else |
//! |--------|--------|------------------------------------------------|------|
//! | READ | READ | without a look at the bytes | looks for the signature, as above |
//! | WRITE to one page | WRITE | | the target |
//! | WRITE to several | WRITE | | once more, between two READs of the entries, as above |

use super::flight::widened;
use super::peer::{BATCH_CHECKED, ENTRIES_MAX, NpPeer, READ_DONE, ROOM};
use super::request::{NpOp, NpWr};
use crate::ids::{PAGE_SIZE, Rkey};
use crate::memory::SharedMemory;
use crate::memory::paged::PageEntry;
use crate::np::wire::Welcome;
use crate::rdma::{Remote, SendOp, SendWr, WrId};
use std::ops::RangeInclusive;
use std::sync::atomic::Ordering;

/// A WRITE of more pages is checked with its doorbell, signaled or not.
const BATCHED_PAGES_MAX: u64 = 16;

/// The name of a READ whose completion says that it is done.
pub(super) fn read_done(slot: usize) -> WrId {
    WrId(READ_DONE << 32 | slot as u64)
}

impl NpPeer {
    /// Posts an access of which it is told whether it met an absent page.
    pub(super) fn post_told(&mut self, slot: usize) {
        let Some(access) = self.access(WrId(slot as u64), &self.flights[slot].wr, false) else { return };
        self.posts.push(access);
        self.checks.add(slot);
    }

    /// The work request of a READ or a WRITE.
    #[inline]
    pub(super) fn access(&self, wr_id: WrId, wr: &NpWr, signaled: bool) -> Option<SendWr> {
        let (local, at) = self.local(wr)?;
        let remote = self.welcome.region.at(wr.offset);
        let op = if wr.op.changes() { SendOp::Write(remote) } else { SendOp::Read(remote) };
        Some(SendWr { wr_id, op, local: local.sge(at, wr.len).into(), signaled })
    }

    /// All that was posted is executed, and met no absent page. Returns whether there was any.
    pub(super) fn end_told(&mut self) -> bool {
        let ended = self.checks.end_open();
        self.figures.one_sided += ended as u64;
        for _ in 0..ended {
            if let Some(slot) = self.checks.next() {
                self.finish(slot);
            }
        }
        if ended > 0 {
            self.streak.tried(true);
        }
        ended > 0
    }

    pub(super) fn post_read(&mut self, slot: usize) {
        let Some(read) = self.access(read_done(slot), &self.flights[slot].wr, true) else { return };
        self.posts.push(read);
    }

    pub(super) fn post_write(&mut self, slot: usize) {
        let flight = &self.flights[slot];
        let Some(write) = self.access(WrId(slot as u64), &flight.wr, false) else { return };
        let (pages, len) = (flight.pages(), flight.wr.len);
        let count = pages.end() - pages.start() + 1;
        if !self.recall(slot, &pages) {
            let entries = self.entries(slot * ROOM, *pages.start(), count, None);
            self.posts.push(entries);
        }
        self.checks.add_write(slot, pages, len);
        self.flights[slot].entries_in = self.checks.entries_in().unwrap_or((slot, 0));
        self.posts.push(write);
        if count > BATCHED_PAGES_MAX {
            self.await_run();
        }
    }

    /// Has the WRITEs so far checked with this doorbell.
    pub(super) fn await_run(&mut self) {
        if self.checks.await_run() {
            self.check_batch();
        }
    }

    /// Puts the entries that pages had when they were last seen where those from before a WRITE are; `false`: they are not all known. Where
    /// completions tell of absent pages, entries are looked at so rarely that none are kept.
    fn recall(&self, slot: usize, pages: &RangeInclusive<u64>) -> bool {
        !self.tells
            && pages.clone().enumerate().all(|(index, page)| {
                let known = self.versions.get(page);
                if let Some(entry) = known {
                    let at = slot * ROOM + index * 8;
                    self.control.memory().store_u64(at, entry.0, Ordering::Relaxed);
                }
                known.is_some()
            })
    }

    /// A READ of entries into the control memory.
    fn entries(&mut self, at: usize, first: u64, count: u64, wr_id: Option<WrId>) -> SendWr {
        self.figures.entry_reads += 1;
        SendWr {
            wr_id: wr_id.unwrap_or(WrId(0)),
            op: SendOp::Read(Remote::Memory {
                rkey: Rkey(self.welcome.table_rkey),
                offset: self.welcome.table_address.wrapping_add(first * 8),
            }),
            local: self.control.sge(at as u64, (count * 8) as u32).into(),
            signaled: wr_id.is_some(),
        }
    }

    /// Has the accesses checked that nobody has checked. Completions of those that met an absent page have come when that of the last READ comes.
    pub(super) fn check_batch(&mut self) {
        self.checks.close();
        while let Some((run, is_last)) = self.checks.next_run() {
            let at = run.slot * ROOM + ENTRIES_MAX * 8;
            let (first, count) = (*run.pages.start(), run.pages.end() - run.pages.start() + 1);
            let check = self.entries(at, first, count, is_last.then_some(WrId(BATCH_CHECKED << 32)));
            self.posts.push(check);
        }
    }

    /// A READ that checks a batch has come.
    #[inline(never)]
    pub(super) fn batch_came(&mut self) {
        for _ in 0..self.checks.batch_came() {
            let Some(slot) = self.checks.next() else { return };
            match self.flights[slot].wr.op {
                NpOp::Read => self.check_read(slot),
                _ => self.check_write(slot),
            }
        }
    }

    /// Looks for the signature in what a READ brought.
    #[inline]
    pub(super) fn check_read(&mut self, slot: usize) {
        let missing = self.missing(slot);
        self.streak.tried(missing.is_none());
        match missing {
            None => {
                self.figures.one_sided += 1;
                if self.is_alone { self.finish_alone(slot) } else { self.finish(slot) }
            }
            Some((start, end)) => {
                self.enter_alone();
                self.figures.read_faults += 1;
                self.ask(slot, start, end);
            }
        }
    }

    /// The range from the first page of a READ that was not there to the last.
    #[inline]
    fn missing(&self, slot: usize) -> Option<(usize, usize)> {
        let flight = &self.flights[slot];
        if flight.told && !flight.absent {
            return None;
        }
        let (local, at) = self.local(&flight.wr)?;
        let (offset, len) = (flight.wr.offset, flight.wr.len as usize);
        let in_page = |start: usize| ((offset + start as u64) % PAGE_SIZE as u64) as usize;
        let is_missing = |start: usize, part: usize| {
            is_signature(&self.welcome, local.memory(), at as usize + start, in_page(start), part)
        };
        if in_page(0) + len <= PAGE_SIZE {
            return is_missing(0, len).then_some((0, len));
        }
        let mut missing = None;
        let mut start = 0;
        while start < len {
            let part = (PAGE_SIZE - in_page(start)).min(len - start);
            if is_missing(start, part) {
                missing = widened(missing, (start, part));
            }
            start += part;
        }
        missing
    }

    /// Looks whether a WRITE went into its pages.
    pub(super) fn check_write(&mut self, slot: usize) {
        let flight = &self.flights[slot];
        let (missing, all_there) = match (flight.told, flight.absent) {
            (false, _) => self.moved(slot),
            (true, false) => (None, true),
            // Which of several pages it met, the entries will tell.
            (true, true) => (Some((0, flight.wr.len as usize)), flight.pages().count() > 1),
        };
        let flight = &mut self.flights[slot];
        let was_repeated = flight.repeated;
        self.streak.tried(missing.is_none());
        let Some((start, end)) = missing else {
            self.figures.one_sided += 1;
            self.figures.repeated += u64::from(was_repeated);
            return self.finish(slot);
        };
        if was_repeated {
            return self.ask(slot, start, end);
        }
        self.figures.write_faults += 1;
        if all_there {
            (flight.repeated, flight.told) = (true, false);
            self.post_write(slot);
            self.await_run();
        } else {
            self.ask(slot, start, end);
        }
    }

    /// The range from the first page of a WRITE that did not stay to the last, and whether all pages have frames now.
    fn moved(&mut self, slot: usize) -> (Option<(usize, usize)>, bool) {
        let (mut missing, mut all_there): (Option<(usize, usize)>, bool) = (None, true);
        let flight = &self.flights[slot];
        let word = |at: usize| PageEntry(self.control.memory().load_u64(at));
        let (entries_in, first) = flight.entries_in;
        for (index, page) in flight.pages().enumerate() {
            let before = word(slot * ROOM + index * 8);
            let after = word(entries_in * ROOM + (ENTRIES_MAX + (page - first) as usize) * 8);
            if !self.tells {
                self.versions.see(page, after);
            }
            if !before.stayed(after) {
                missing = widened(missing, flight.part(page));
            }
            all_there &= after.is_resident();
        }
        (missing, all_there)
    }
}

/// Whether a part of a page is what the signature page has there.
#[inline]
fn is_signature(welcome: &Welcome, memory: &SharedMemory, at: usize, in_page: usize, len: usize) -> bool {
    // Nearly all data differs in its first bytes. One load of a word costs less than the start of a copy.
    if len >= 8 && (at | in_page).is_multiple_of(8) {
        let word = memory.load_u64_relaxed(at).to_ne_bytes();
        if word != welcome.signature.word(in_page / 8) {
            return false;
        }
    }
    is_all_signature(welcome, memory, at, in_page, len)
}

#[inline(never)]
fn is_all_signature(welcome: &Welcome, memory: &SharedMemory, at: usize, in_page: usize, len: usize) -> bool {
    let mut first = [0; 32];
    let first = &mut first[..len.min(32)];
    memory.read(at, first);
    if !welcome.signature.covers(in_page, first) {
        return false;
    }
    let mut bytes = vec![0; len];
    memory.read(at, &mut bytes);
    welcome.signature.covers(in_page, &bytes)
}
