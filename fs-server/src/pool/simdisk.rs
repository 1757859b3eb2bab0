//! Storage in memory, driven by a seed, with the faults of a real device.
//!
//! The medium has the durable version of each page, and the later writes that a power loss may take. Clones share the medium, so that each worker
//! thread has a `Disk` of its own, and so that a test keeps the medium while the server above dies and the next one starts (`SimDisk::attach` takes
//! the next server's frames).
//!
//! # How it works
//! *At once*: IOs are done when they are submitted. *Deferred*: they wait until `SimDisk::step` does one, drawn at random, so that completions come
//! late and in any order. The bytes move at that moment, as by a device's DMA.
//!
//! A write makes a new version of each page that it covers. A sync makes the newest versions durable that had completed when it was submitted.
//! `SimDisk::crash` chooses, for each 512-byte sector, among the durable version and all later ones, so that unsynced writes are dropped, reordered
//! and torn; writes in flight count as versions. A page that was never written reads as `UNWRITTEN_BYTE`, so that code that reads such a page is
//! found out.
//!
//! A server with a `Life` (`SimDisk::set_life`) can die at any IO or sync, when it is submitted or when it is done. Its futures never resolve then,
//! and `SimDisk::crash` or `SimDisk::kill` decides what is left of the IOs in flight.
//!
//! # Effects of each fault
//! | fault | effect |
//! | --- | --- |
//! | read fault | the IO fails; pages before the bad one may have been read |
//! | write fault | the IO fails; pages before the bad one are written |
//! | failed sync | the versions it covers stay at risk, as if a page cache had dropped them; only a newer, synced write of the page is safe |
//! | crash | IOs in flight never complete; unsynced versions are mixed as above |
//! | kill | IOs in flight never complete; each of their writes is done, or not, or torn. Versions stay at risk |
//! | lie | syncs answer and make nothing durable |

use super::batch::{Batch, Ticket};
use super::disk::{Disk, IoBuffer, IoDone, IoError, IoKind, IoRequest, LocalFuture};
use super::sums::SumLayout;
use crate::sync::Mutex;
use cuttlefs_common::ids::{FrameIndex, PAGE_SIZE, PAGE_SIZE_U64};
use cuttlefs_common::life::{Event, Fate, Life};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::world::{Random, SeededRandom};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Every byte of a page that was never written.
pub const UNWRITTEN_BYTE: u8 = 0xA5;
/// Bytes that a device writes as a whole or not at all.
pub const SECTOR_BYTES: usize = 512;
/// Unsynced versions of one page that are kept. The oldest are dropped first, which reduces the results of a crash and never adds an impossible one.
const MOST_VERSIONS: usize = 8;

type PageBytes = Box<[u8; PAGE_SIZE]>;

/// When IOs are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimMode {
    /// When they are submitted.
    AtOnce,
    /// When `step` picks them.
    Deferred,
}

/// An error for IOs that touch some pages.
#[derive(Clone, Debug)]
pub struct SimFault {
    /// Pool pages.
    pub pages: Range<u64>,
    /// Whether only reads or only writes fail; `None` for both.
    pub kind: Option<IoKind>,
    /// The device's error number.
    pub errno: i32,
    /// How many IOs fail before the fault ends.
    pub times: u32,
}

/// Counts of the IOs so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimCounters {
    /// Read requests.
    pub reads: u64,
    /// Pages they read.
    pub pages_read: u64,
    /// Write requests.
    pub writes: u64,
    /// Pages they wrote.
    pub pages_written: u64,
    /// Syncs.
    pub syncs: u64,
}

/// A disk in memory.
#[derive(Clone, Debug)]
pub struct SimDisk {
    medium: Arc<Mutex<Medium>>,
    frames: Arc<SharedMemory>,
}

#[derive(Debug)]
struct Medium {
    pages: u64,
    random: SeededRandom,
    mode: SimMode,
    content: BTreeMap<u64, PageHistory>,
    /// The number of the last write that was done.
    last_write: u64,
    pending: Vec<Pending>,
    faults: Vec<SimFault>,
    sync_errors: Vec<i32>,
    lies: bool,
    life: Life,
    counters: SimCounters,
}

#[derive(Debug, Default)]
struct PageHistory {
    durable: Option<PageBytes>,
    /// Later writes, oldest first.
    versions: Vec<Version>,
}

#[derive(Debug)]
struct Version {
    number: u64,
    bytes: PageBytes,
    /// Whether a sync failed that should have covered it.
    doomed: bool,
}

#[derive(Debug)]
enum Pending {
    Io { batch: Batch, index: usize, request: IoRequest, frames: Arc<SharedMemory> },
    Sync { ticket: Ticket, up_to: u64 },
}

impl SimDisk {
    /// An unwritten disk of `pages` that does everything at once.
    pub fn new(pages: u64, frames: Arc<SharedMemory>) -> Self {
        Self::seeded(pages, frames, 0)
    }

    /// An unwritten disk whose random choices come from `seed`.
    pub fn seeded(pages: u64, frames: Arc<SharedMemory>, seed: u64) -> Self {
        let medium = Medium {
            pages,
            random: SeededRandom::new(seed),
            mode: SimMode::AtOnce,
            content: BTreeMap::new(),
            last_write: 0,
            pending: Vec::new(),
            faults: Vec::new(),
            sync_errors: Vec::new(),
            lies: false,
            life: Life::default(),
            counters: SimCounters::default(),
        };
        Self { medium: Arc::new(Mutex::new(medium)), frames }
    }

    /// A disk on the same medium for other frames: another server's, after this one is gone.
    pub fn attach(&self, frames: Arc<SharedMemory>) -> Self {
        Self { medium: self.medium.clone(), frames }
    }

    /// Makes IOs events of this life from now on.
    pub fn set_life(&self, life: Life) {
        self.medium.lock().life = life;
    }

    /// Lets syncs succeed without an effect from now on, which a test must notice.
    pub fn lie(&self) {
        self.medium.lock().lies = true;
    }

    /// Number of pages.
    pub fn pages(&self) -> u64 {
        self.medium.lock().pages
    }

    /// Sets the mode for later IOs. Pending ones stay pending.
    pub fn set_mode(&self, mode: SimMode) {
        self.medium.lock().mode = mode;
    }

    /// Does one pending IO or sync, drawn at random; `false` if there is none.
    pub fn step(&self) -> bool {
        let mut medium = self.medium.lock();
        if medium.pending.is_empty() {
            return false;
        }
        let index = (medium.random.next_u64() % medium.pending.len() as u64) as usize;
        if !medium.may_finish(index) {
            return true;
        }
        let pending = medium.pending.swap_remove(index);
        let finished = medium.perform(pending);
        // Outside of the lock, because wakers run other code.
        drop(medium);
        finished.tell();
        true
    }

    /// Number of pending IOs and syncs.
    pub fn pending(&self) -> usize {
        self.medium.lock().pending.len()
    }

    /// Loses power: IOs in flight never complete, and each sector that was written since the last sync has any of its possible versions.
    pub fn crash(&self, random: &dyn Random) {
        let mut medium = self.medium.lock();
        let pending = medium.cut_off(|_, _, bytes| Some(bytes));
        for history in medium.content.values_mut() {
            history.crash(random);
        }
        drop(medium);
        // Outside of the lock: buffers are freed, and futures stay unresolved.
        drop(pending);
    }

    /// Kills the server: of each write in flight all, none or some sectors are done.
    pub fn kill(&self, random: &dyn Random) {
        let mut medium = self.medium.lock();
        let pending = medium.cut_off(|medium, page, bytes| match random.next_u64() % 3 {
            0 => None,
            1 => Some(bytes),
            _ => Some(torn(&[&medium.current(page), &bytes], random)),
        });
        drop(medium);
        drop(pending);
    }

    /// Injects an error.
    pub fn inject(&self, fault: SimFault) {
        self.medium.lock().faults.push(fault);
    }

    /// Makes the next sync fail.
    pub fn fail_next_sync(&self, errno: i32) {
        self.medium.lock().sync_errors.push(errno);
    }

    /// Takes all injected errors away.
    pub fn clear_faults(&self) {
        let mut medium = self.medium.lock();
        medium.faults.clear();
        medium.sync_errors.clear();
    }

    /// The bytes that a read of this page would return now.
    pub fn peek(&self, page: u64) -> Vec<u8> {
        self.medium.lock().current(page).to_vec()
    }

    /// All versions that a power loss may leave of this page, each sector by itself: the durable one, and each later write, with those in flight.
    pub fn possible(&self, page: u64) -> Vec<Vec<u8>> {
        let medium = self.medium.lock();
        let mut possible = match medium.content.get(&page) {
            Some(history) => {
                let durable =
                    history.durable.as_ref().map_or(vec![UNWRITTEN_BYTE; PAGE_SIZE], |bytes| bytes.to_vec());
                std::iter::once(durable)
                    .chain(history.versions.iter().map(|version| version.bytes.to_vec()))
                    .collect()
            }
            None => vec![vec![UNWRITTEN_BYTE; PAGE_SIZE]],
        };
        for pending in &medium.pending {
            if let Pending::Io { request, frames, .. } = pending
                && request.kind == IoKind::Write
                && medium.check(request).is_ok()
            {
                let written = pages_of(request, frames).filter(|(other, _)| *other == page);
                possible.extend(written.map(|(_, bytes)| bytes.to_vec()));
            }
        }
        possible
    }

    /// Changes a page directly on the medium (bit rot); durable at once.
    pub fn poke(&self, page: u64, bytes: &[u8; PAGE_SIZE]) {
        let mut medium = self.medium.lock();
        assert!(page < medium.pages, "page {page} is past the disk's end");
        let history = PageHistory { durable: Some(Box::new(*bytes)), versions: Vec::new() };
        medium.content.insert(page, history);
    }

    /// Gives the sums the values that `format` gives them on a real device.
    pub fn format(&self, layout: &SumLayout) {
        (layout.pages()..layout.all_pages()).for_each(|page| self.poke(page, &[0; PAGE_SIZE]));
    }

    /// The number of pages with writes that a crash may take.
    pub fn unsynced_pages(&self) -> usize {
        let medium = self.medium.lock();
        medium.content.values().filter(|history| !history.versions.is_empty()).count()
    }

    /// Counts of the IOs so far.
    pub fn counters(&self) -> SimCounters {
        self.medium.lock().counters
    }
}

impl Disk for SimDisk {
    fn submit(&self, requests: Vec<IoRequest>) -> LocalFuture<'static, Vec<IoDone>> {
        let (batch, future) = Batch::new(requests.len());
        let mut medium = self.medium.lock();
        let at_once = medium.mode == SimMode::AtOnce;
        let mut finished = Vec::new();
        for (index, request) in requests.into_iter().enumerate() {
            if !medium.life.allows(Event::DiskSubmit, request.offset) {
                break;
            }
            let frames = self.frames.clone();
            medium.pending.push(Pending::Io { batch: batch.clone(), index, request, frames });
            if at_once && medium.may_finish(medium.pending.len() - 1) {
                finished.extend(medium.finish_last());
            }
        }
        drop(medium);
        finished.into_iter().for_each(Finished::tell);
        Box::pin(future)
    }

    fn sync(&self) -> LocalFuture<'static, io::Result<()>> {
        let (ticket, future) = Ticket::new();
        let mut medium = self.medium.lock();
        let up_to = medium.last_write;
        medium.pending.push(Pending::Sync { ticket, up_to });
        if medium.mode == SimMode::AtOnce && medium.may_finish(medium.pending.len() - 1) {
            let finished = medium.finish_last();
            drop(medium);
            finished.into_iter().for_each(Finished::tell);
        }
        Box::pin(future)
    }
}

/// A result on its way to its future.
enum Finished {
    Io(Batch, usize, IoDone),
    Sync(Ticket, io::Result<()>),
}

impl Finished {
    fn tell(self) {
        match self {
            Self::Io(batch, index, done) => batch.finish(index, done),
            Self::Sync(ticket, result) => ticket.finish(result),
        }
    }
}

impl Medium {
    /// Ends the server: a page of a write in flight gets the bytes that `left` returns. The caller drops the pending IOs outside of the lock.
    fn cut_off(&mut self, left: impl Fn(&Self, u64, PageBytes) -> Option<PageBytes>) -> Vec<Pending> {
        let pending = std::mem::take(&mut self.pending);
        for one in &pending {
            if let Pending::Io { request, frames, .. } = one
                && request.kind == IoKind::Write
                && self.check(request).is_ok()
            {
                for (page, bytes) in pages_of(request, frames) {
                    if let Some(left) = left(self, page, bytes) {
                        self.put(page, left);
                    }
                }
            }
        }
        pending
    }

    /// Whether the server lives until this pending IO is done. If not, the IO stays pending.
    fn may_finish(&self, index: usize) -> bool {
        let (event, about) = match &self.pending[index] {
            Pending::Io { request, .. } => (Event::DiskDone, request.offset),
            Pending::Sync { up_to, .. } => (Event::DiskSync, *up_to),
        };
        self.life.meets(event, about) == Fate::Happens
    }

    fn finish_last(&mut self) -> Option<Finished> {
        let pending = self.pending.pop()?;
        Some(self.perform(pending))
    }

    fn perform(&mut self, pending: Pending) -> Finished {
        match pending {
            Pending::Io { batch, index, mut request, frames } => {
                let result = match request.kind {
                    IoKind::Read => self.read(&mut request, &frames),
                    IoKind::Write => self.write(&request, &frames),
                };
                let result = result.map_err(|source| IoError {
                    kind: request.kind,
                    offset: request.offset,
                    len: len_bytes(&request.buffer),
                    source,
                });
                Finished::Io(batch, index, IoDone { buffer: request.buffer, result })
            }
            Pending::Sync { ticket, up_to } => {
                self.counters.syncs += 1;
                let error = (!self.sync_errors.is_empty()).then(|| self.sync_errors.remove(0));
                for history in self.content.values_mut().filter(|_| !self.lies) {
                    match error {
                        None => history.make_durable(up_to),
                        Some(_) => history.doom(up_to),
                    }
                }
                let result = error.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)));
                Finished::Sync(ticket, result)
            }
        }
    }

    /// Refuses the requests for which the kernel returns EINVAL.
    fn check(&self, request: &IoRequest) -> io::Result<Range<u64>> {
        let len = len_bytes(&request.buffer) as u64;
        let end = request.offset.checked_add(len);
        let inside = end.is_some_and(|end| end <= self.pages * PAGE_SIZE_U64);
        let whole = request.offset.is_multiple_of(PAGE_SIZE_U64) && len.is_multiple_of(PAGE_SIZE_U64);
        if len == 0 || !inside || !whole {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let first = request.offset / PAGE_SIZE_U64;
        Ok(first..first + len / PAGE_SIZE_U64)
    }

    fn read(&mut self, request: &mut IoRequest, frames: &SharedMemory) -> io::Result<()> {
        let pages = self.check(request)?;
        self.counters.reads += 1;
        let (good, error) = self.hit_fault(pages, IoKind::Read);
        for (index, page) in good.enumerate() {
            let bytes = self.current(page);
            match &mut request.buffer {
                IoBuffer::Owned(buffer) => {
                    buffer.as_mut_slice()[index * PAGE_SIZE..][..PAGE_SIZE].copy_from_slice(&bytes[..]);
                }
                IoBuffer::Frames(indices) => frames.write(frame_offset(indices[index]), &bytes[..]),
            }
            self.counters.pages_read += 1;
        }
        error
    }

    fn write(&mut self, request: &IoRequest, frames: &SharedMemory) -> io::Result<()> {
        let pages = self.check(request)?;
        self.counters.writes += 1;
        let (good, error) = self.hit_fault(pages, IoKind::Write);
        for (page, bytes) in pages_of(request, frames).take_while(|(page, _)| good.contains(page)) {
            self.put(page, bytes);
            self.counters.pages_written += 1;
        }
        error
    }

    /// The pages before the first bad one, and the error.
    fn hit_fault(&mut self, pages: Range<u64>, kind: IoKind) -> (Range<u64>, io::Result<()>) {
        let hit = self.faults.iter_mut().find(|fault| {
            fault.times > 0
                && fault.kind.is_none_or(|only| only == kind)
                && fault.pages.start < pages.end
                && pages.start < fault.pages.end
        });
        match hit {
            None => (pages, Ok(())),
            Some(fault) => {
                fault.times -= 1;
                let bad = fault.pages.start.max(pages.start);
                (pages.start..bad, Err(io::Error::from_raw_os_error(fault.errno)))
            }
        }
    }

    fn current(&self, page: u64) -> PageBytes {
        let history = self.content.get(&page);
        let newest = history.and_then(|history| {
            history.versions.last().map(|version| &version.bytes).or(history.durable.as_ref())
        });
        newest.cloned().unwrap_or_else(unwritten)
    }

    fn put(&mut self, page: u64, bytes: PageBytes) {
        self.last_write += 1;
        let history = self.content.entry(page).or_default();
        if history.versions.len() == MOST_VERSIONS {
            history.versions.remove(0);
        }
        history.versions.push(Version { number: self.last_write, bytes, doomed: false });
    }
}

impl PageHistory {
    fn make_durable(&mut self, up_to: u64) {
        let newest = self.versions.iter().rposition(|one| one.number <= up_to && !one.doomed);
        if let Some(index) = newest {
            let synced = self.versions.drain(..=index).next_back();
            self.durable = synced.map(|version| version.bytes);
        }
    }

    fn doom(&mut self, up_to: u64) {
        self.versions.iter_mut().filter(|one| one.number <= up_to).for_each(|one| one.doomed = true);
    }

    fn crash(&mut self, random: &dyn Random) {
        if self.versions.is_empty() {
            return;
        }
        let durable = self.durable.take().unwrap_or_else(unwritten);
        let choices: Vec<&PageBytes> =
            std::iter::once(&durable).chain(self.versions.iter().map(|one| &one.bytes)).collect();
        // Half of the pages have one whole version, the others are torn.
        let after = if random.next_u64().is_multiple_of(2) {
            torn(&choices, random)
        } else {
            choices[(random.next_u64() % choices.len() as u64) as usize].clone()
        };
        self.versions.clear();
        self.durable = Some(after);
    }
}

/// A page of which each sector is of a random version.
fn torn(versions: &[&PageBytes], random: &dyn Random) -> PageBytes {
    let mut page = unwritten();
    for start in (0..PAGE_SIZE).step_by(SECTOR_BYTES) {
        let sector = start..start + SECTOR_BYTES;
        let version = versions[(random.next_u64() % versions.len() as u64) as usize];
        page[sector.clone()].copy_from_slice(&version[sector]);
    }
    page
}

fn unwritten() -> PageBytes {
    Box::new([UNWRITTEN_BYTE; PAGE_SIZE])
}

fn len_bytes(buffer: &IoBuffer) -> usize {
    match buffer {
        IoBuffer::Owned(buffer) => buffer.len(),
        IoBuffer::Frames(indices) => indices.len() * PAGE_SIZE,
    }
}

fn frame_offset(index: FrameIndex) -> usize {
    index.0 as usize * PAGE_SIZE
}

/// The pool pages of a write, with their bytes.
fn pages_of<'a>(
    request: &'a IoRequest,
    frames: &'a SharedMemory,
) -> impl Iterator<Item = (u64, PageBytes)> + 'a {
    let first = request.offset / PAGE_SIZE_U64;
    let count = len_bytes(&request.buffer) / PAGE_SIZE;
    (0..count).map(move |index| {
        let mut bytes = unwritten();
        match &request.buffer {
            IoBuffer::Owned(buffer) => {
                bytes.copy_from_slice(&buffer.as_slice()[index * PAGE_SIZE..][..PAGE_SIZE]);
            }
            IoBuffer::Frames(indices) => frames.read(frame_offset(indices[index]), &mut bytes[..]),
        }
        (first + index as u64, bytes)
    })
}

#[cfg(test)]
#[path = "simdisk_tests.rs"]
mod tests;
