//! A worker's disk with checksums: it verifies reads, sums writes, and marks overwritten zones.
//!
//! # How it works
//! A batch of reads goes to the device together with the reads of sum blocks that are not in memory, and is verified when it has completed. A batch
//! of writes first gets its sum blocks, then its marks (which costs a flush of metadata's log if a zone was not written to recently), and then goes
//! to the device. When it has completed, its sums are in memory, and a sync writes them.
//!
//! # Invariants
//! As in `sums`. A writer has its page to itself (by the block lock), so bytes and sum change together.

use super::blocks::Held;
use super::final_sync::FinalSync;
use super::{PageSums, RottenPages, UNKNOWN, add, page_sum};
use crate::pool::aligned_buf::AlignedBuf;
use crate::pool::disk::{Disk, IoBuffer, IoDone, IoError, IoKind, IoRequest, LocalFuture};
use cuttlefs_common::ids::{FrameIndex, PAGE_SIZE, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::memory::SharedMemory;
use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// The result of examining a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Its sum matches.
    Good,
    /// It has no sum, because a write of it failed.
    NoSum,
    /// Its sum does not match, and its zone was being written to when the last server went down.
    InFlight,
    /// Its sum does not match, or it was never written.
    Rotten,
    /// The device cannot read it.
    Unreadable,
}

/// A disk with checksums over a disk without.
#[derive(Clone)]
pub struct SummedDisk {
    core: Rc<Core>,
}

struct Core {
    inner: FinalSync,
    frames: Arc<SharedMemory>,
    sums: Arc<PageSums>,
}

impl SummedDisk {
    /// Checksums over a disk that has `all_pages` of the sums' layout, and whose IOs name frames of `frames`.
    pub fn new(inner: Rc<dyn Disk>, frames: Arc<SharedMemory>, sums: Arc<PageSums>) -> Self {
        let inner = FinalSync::new(inner, sums.clone());
        Self { core: Rc::new(Core { inner, frames, sums }) }
    }

    /// The sums that all workers share.
    pub fn sums(&self) -> &Arc<PageSums> {
        &self.core.sums
    }

    /// Clears the marks of zones that are no longer written to. Called every few seconds.
    ///
    /// # Errors
    /// A device error; the marks stay.
    pub async fn sweep(&self) -> io::Result<usize> {
        if self.core.sums.marks.wants_sync() {
            self.core.sync().await?;
        }
        self.core.sums.marks.sweep(false)
    }

    /// Ends cleanly: all sums are durable, and only zones that still recover are marked, once the store of marks is flushed.
    ///
    /// # Errors
    /// A device error, or the store's; zones stay marked.
    pub async fn finish(&self) -> io::Result<()> {
        self.core.sync().await?;
        self.core.sums.marks.sweep(true).map(drop)
    }

    /// The first zone that still recovers: it was being written to when the last server went down.
    pub fn next_recovering(&self) -> Option<Range<u64>> {
        let zone = self.core.sums.marks.next_recovering()?;
        let (first, end) = self.core.sums.layout.pages_of_zone(zone);
        Some(first.0..end.0)
    }

    /// Notes that all pages of a zone were settled.
    pub fn recovered(&self, pages: &Range<u64>) {
        self.core.sums.marks.recovered(self.core.sums.layout.zone(PoolPage(pages.start)));
    }

    /// Gives pages the sums of their present bytes, whatever these are.
    ///
    /// # Errors
    /// As `examine`. A page that cannot be read is left as it is.
    pub async fn accept(&self, pages: Range<u64>) -> io::Result<()> {
        let first = pages.start;
        let (found, held) = self.core.look(pages).await?;
        for (page, (verdict, sum)) in (first..).map(PoolPage).zip(found) {
            if verdict != Verdict::Unreadable {
                self.core.sums.put(&held, page, sum);
            }
        }
        Ok(())
    }

    /// Examines pages on SSD. Without its block lock a page that is being written may look rotten.
    ///
    /// # Errors
    /// If the sums cannot be read. (Pages that cannot be read have a verdict.)
    pub async fn examine(&self, pages: Range<u64>) -> io::Result<Vec<Verdict>> {
        let (found, _) = self.core.look(pages).await?;
        Ok(found.into_iter().map(|(verdict, _)| verdict).collect())
    }

    /// Gives pages without a matching sum the sum of their present bytes, and returns how many these were. The caller holds their block locks. Only
    /// for pages in a recovering zone, and for pages without a sum.
    ///
    /// # Errors
    /// As `examine`.
    pub async fn settle(&self, pages: Range<u64>) -> io::Result<u64> {
        let first = pages.start;
        let (found, held) = self.core.look(pages).await?;
        let mut settled = 0;
        for (page, (verdict, sum)) in (first..).map(PoolPage).zip(found) {
            if matches!(verdict, Verdict::NoSum | Verdict::InFlight) && self.core.sums.is_settled(page) {
                self.core.sums.put(&held, page, sum);
                settled += 1;
            }
        }
        add(&self.core.sums.counters.resummed, settled);
        Ok(settled)
    }
}

impl Disk for SummedDisk {
    fn submit(&self, batch: Vec<IoRequest>) -> LocalFuture<'static, Vec<IoDone>> {
        let core = self.core.clone();
        add(&core.sums.counters.foreground, batch.len() as u64);
        Box::pin(async move { core.run(batch).await })
    }

    fn sync(&self) -> LocalFuture<'static, io::Result<()>> {
        let core = self.core.clone();
        Box::pin(async move { core.sync().await })
    }
}

/// A request's kind and pages, kept while its buffer is with the disk below.
struct About {
    kind: IoKind,
    pages: Range<u64>,
    /// The new sums, for a write.
    sums: Vec<u32>,
}

impl About {
    fn fail(&self, buffer: IoBuffer, source: io::Error) -> IoDone {
        let len = (self.pages.end - self.pages.start) as usize * PAGE_SIZE;
        let offset = self.pages.start * PAGE_SIZE_U64;
        IoDone { buffer, result: Err(IoError { kind: self.kind, offset, len, source }) }
    }
}

impl PageSums {
    fn blocks_of(&self, pages: impl IntoIterator<Item = u64>) -> Vec<u64> {
        let blocks: BTreeSet<u64> =
            pages.into_iter().map(|page| self.layout.sum(PoolPage(page)).block).collect();
        blocks.into_iter().collect()
    }

    fn put(&self, held: &Held, page: PoolPage, sum: u32) {
        let place = self.layout.sum(page);
        self.blocks.set(&held[&place.block], place.index, sum);
    }

    /// The verdict on a page whose bytes have this sum; `None` if its stored sum is not held.
    fn judge(&self, held: &Held, page: PoolPage, sum: u32) -> Option<Verdict> {
        let place = self.layout.sum(page);
        let stored = held.get(&place.block)?.get(place.index);
        Some(match stored {
            _ if stored == sum => Verdict::Good,
            UNKNOWN => Verdict::NoSum,
            _ if self.marks.is_recovering(self.layout.zone(page)) => Verdict::InFlight,
            _ => Verdict::Rotten,
        })
    }
}

impl Core {
    /// The pages of a request, if it is for whole pages of the pool.
    fn pages_of(&self, request: &IoRequest) -> Option<Range<u64>> {
        let len = match &request.buffer {
            IoBuffer::Owned(buffer) => buffer.len(),
            IoBuffer::Frames(frames) => frames.len() * PAGE_SIZE,
        };
        let end = request.offset.checked_add(len as u64)?;
        let whole = request.offset.is_multiple_of(PAGE_SIZE_U64) && len.is_multiple_of(PAGE_SIZE) && len > 0;
        let pages = request.offset / PAGE_SIZE_U64..end / PAGE_SIZE_U64;
        (whole && pages.end <= self.sums.layout.pages()).then_some(pages)
    }

    /// The sums of the bytes that a buffer has for the pages from `first` on; `None` if it names a frame that does not exist.
    fn sums_of(&self, first: u64, buffer: &IoBuffer) -> Option<Vec<u32>> {
        match buffer {
            IoBuffer::Owned(buffer) => Some(
                (first..)
                    .zip(buffer.as_slice().chunks_exact(PAGE_SIZE))
                    .map(|(page, bytes)| page_sum(PoolPage(page), bytes))
                    .collect(),
            ),
            IoBuffer::Frames(frames) => {
                let mut bytes = [0; PAGE_SIZE];
                let sum = |(page, frame): (u64, &FrameIndex)| {
                    let offset = frame.0 as usize * PAGE_SIZE;
                    self.frames.contains(offset as u64, PAGE_SIZE_U64).then(|| {
                        self.frames.read(offset, &mut bytes);
                        page_sum(PoolPage(page), &bytes)
                    })
                };
                (first..).zip(frames).map(sum).collect()
            }
        }
    }

    async fn run(&self, batch: Vec<IoRequest>) -> Vec<IoDone> {
        let mut abouts = Vec::with_capacity(batch.len());
        for request in &batch {
            let pages = self.pages_of(request);
            let sums = match (&pages, request.kind) {
                (Some(pages), IoKind::Write) => self.sums_of(pages.start, &request.buffer),
                (pages, _) => pages.is_some().then(Vec::new),
            };
            let (Some(pages), Some(sums)) = (pages, sums) else {
                // A mistake of the submitter: every request of the batch fails with EINVAL.
                return refuse(batch);
            };
            abouts.push(About { kind: request.kind, pages, sums });
        }
        let blocks = self.sums.blocks_of(abouts.iter().flat_map(|about| about.pages.clone()));
        let mut held = Held::new();
        let writes = abouts.iter().any(|about| about.kind == IoKind::Write);
        if !writes {
            return self.read(batch, &abouts, &blocks, held).await;
        }
        if let Err(error) = self.sums.blocks.hold(&self.inner, &blocks, &mut held).await {
            return fail_all(batch, &abouts, &error);
        }
        self.write(batch, abouts, held).await
    }

    async fn read(
        &self,
        batch: Vec<IoRequest>,
        abouts: &[About],
        blocks: &[u64],
        mut held: Held,
    ) -> Vec<IoDone> {
        let mut loads = self.sums.blocks.begin(blocks, &mut held);
        let mut requests = std::mem::take(&mut loads.requests);
        let count = requests.len();
        requests.extend(batch);
        let mut done = self.inner.submit(requests).await.into_iter();
        let mut loaded = loads.finish(done.by_ref().take(count), &mut held);
        if loaded.is_ok() {
            // Blocks that others are reading.
            loaded = self.sums.blocks.hold(&self.inner, blocks, &mut held).await;
        }
        let results = abouts.iter().zip(done);
        results.map(|(about, done)| self.verify(about, done, &held, loaded.as_ref().err())).collect()
    }

    fn verify(&self, about: &About, done: IoDone, held: &Held, unread: Option<&io::Error>) -> IoDone {
        if done.result.is_err() {
            return done;
        }
        let sums = self.sums_of(about.pages.start, &done.buffer).expect("the frames were there before");
        let mut rotten = Vec::new();
        let (mut good, mut accepted, mut unverified) = (0, 0, 0);
        for (page, sum) in about.pages.clone().map(PoolPage).zip(sums) {
            let Some(verdict) = self.sums.judge(held, page, sum) else {
                let why = unread.map_or_else(|| "it is not in memory".to_owned(), ToString::to_string);
                return about.fail(done.buffer, io::Error::other(format!("the sum of page {page}: {why}")));
            };
            match verdict {
                Verdict::Good => good += 1,
                Verdict::InFlight => accepted += 1,
                Verdict::NoSum => unverified += 1,
                _ => rotten.push(page),
            }
        }
        let counters = &self.sums.counters;
        add(&counters.verified, good);
        add(&counters.accepted, accepted);
        add(&counters.unverified, unverified);
        if rotten.is_empty() {
            return done;
        }
        about.fail(done.buffer, io::Error::new(io::ErrorKind::InvalidData, RottenPages { pages: rotten }))
    }

    async fn write(&self, batch: Vec<IoRequest>, abouts: Vec<About>, held: Held) -> Vec<IoDone> {
        let written = abouts.iter().filter(|about| about.kind == IoKind::Write);
        let pages: Vec<u64> = written.flat_map(|about| about.pages.clone()).collect();
        let settled = pages.iter().filter(|page| self.sums.is_settled(PoolPage(**page)));
        let zones: BTreeSet<u64> = settled.map(|page| self.sums.layout.zone(PoolPage(*page))).collect();
        if !zones.is_empty()
            && let Err(error) = self.sums.marks.begin(&zones).await
        {
            return fail_all(batch, &abouts, &error);
        }
        let mut writing = Writing { sums: &self.sums, held: &held, pages, zones, is_done: false };
        let results = self.inner.submit(batch).await;
        let mut done = Vec::with_capacity(results.len());
        for (about, result) in abouts.iter().zip(results) {
            if about.kind == IoKind::Read {
                done.push(self.verify(about, result, &held, None));
                continue;
            }
            for (page, sum) in about.pages.clone().zip(&about.sums) {
                // After a failed write a page may have old, new or mixed bytes.
                self.sums.put(&held, PoolPage(page), if result.result.is_ok() { *sum } else { UNKNOWN });
            }
            done.push(result);
        }
        writing.is_done = true;
        drop(writing);
        drop(held);
        if self.sums.blocks.are_mostly_changed()
            && let Err(error) = self.sums.blocks.flush(&self.inner).await
        {
            // The next sync tries to write them again, and fails if it cannot.
            tracing::error!(%error, "sums could not be written");
        }
        done
    }

    async fn sync(&self) -> io::Result<()> {
        let covered = self.sums.marks.before_sync();
        self.sums.blocks.flush(&self.inner).await?;
        self.inner.sync().await?;
        self.sums.marks.after_sync(covered);
        Ok(())
    }

    /// Reads pages, one by one if they cannot be read together, and judges them.
    async fn look(&self, pages: Range<u64>) -> io::Result<(Vec<(Verdict, u32)>, Held)> {
        let mut held = Held::new();
        let blocks = self.sums.blocks_of(pages.clone());
        self.sums.blocks.hold(&self.inner, &blocks, &mut held).await?;
        let read = |pages: Range<u64>| IoRequest {
            kind: IoKind::Read,
            offset: pages.start * PAGE_SIZE_U64,
            buffer: IoBuffer::Owned(AlignedBuf::unfilled((pages.end - pages.start) as usize * PAGE_SIZE)),
        };
        let mut done = self.inner.submit(vec![read(pages.clone())]).await;
        if done.iter().any(|done| done.result.is_err()) {
            done = self.inner.submit(pages.clone().map(|page| read(page..page + 1)).collect()).await;
        }
        let mut found = Vec::new();
        let mut page = pages.start;
        for done in done {
            let sums = self.sums_of(page, &done.buffer).expect("no frames");
            for sum in sums {
                let verdict = self.sums.judge(&held, PoolPage(page), sum).expect("its sum is here");
                found.push((if done.result.is_ok() { verdict } else { Verdict::Unreadable }, sum));
                page += 1;
            }
        }
        Ok((found, held))
    }
}

/// A write under way. If it is dropped, it may be done or not: its pages have no sums then, and its zones stay marked.
struct Writing<'a> {
    sums: &'a PageSums,
    held: &'a Held,
    pages: Vec<u64>,
    zones: BTreeSet<u64>,
    is_done: bool,
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        for page in self.pages.iter().map(|page| PoolPage(*page)) {
            if !self.is_done {
                self.sums.put(self.held, page, UNKNOWN);
            }
            self.sums.set_settled(page, true);
        }
        if self.is_done && !self.zones.is_empty() {
            self.sums.marks.end(&self.zones);
        }
    }
}

fn fail_all(batch: Vec<IoRequest>, abouts: &[About], error: &io::Error) -> Vec<IoDone> {
    let again = || io::Error::new(error.kind(), error.to_string());
    batch.into_iter().zip(abouts).map(|(request, about)| about.fail(request.buffer, again())).collect()
}

fn refuse(batch: Vec<IoRequest>) -> Vec<IoDone> {
    let refuse = |request: IoRequest| {
        let len = match &request.buffer {
            IoBuffer::Owned(buffer) => buffer.len(),
            IoBuffer::Frames(frames) => frames.len() * PAGE_SIZE,
        };
        let source = io::Error::from_raw_os_error(libc::EINVAL);
        let error = IoError { kind: request.kind, offset: request.offset, len, source };
        IoDone { buffer: request.buffer, result: Err(error) }
    };
    batch.into_iter().map(refuse).collect()
}
