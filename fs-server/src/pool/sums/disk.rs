//! A worker's disk with checksums: verifies reads, sums writes, and marks overwritten zones.
//!
//! # How it works
//! A batch of reads goes to the device together with the sum blocks that are not in memory, and is verified when it is
//! there. A batch of writes has its sum blocks first, then its marks (which costs a flush of the metadata's log where a zone was not being
//! written lately), then goes to the device; when it is done its sums are in memory, and a sync writes them.
//!
//! # Invariants
//! As in `sums`. The writer of a page has it alone (its block lock), so bytes and sum move together.

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

/// What a page is found to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Its sum matches.
    Good,
    /// It has no sum, for a write of it failed.
    NoSum,
    /// Its sum does not match, and it was being written when the last server went down.
    InFlight,
    /// Its sum does not match, or it was never written.
    Rotten,
    /// The device cannot read it.
    Unreadable,
}

/// A disk with checksums over one without.
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
    /// Over a disk that has `all_pages` of the sums' layout, and whose IOs name frames of `frames`.
    pub fn new(inner: Rc<dyn Disk>, frames: Arc<SharedMemory>, sums: Arc<PageSums>) -> Self {
        let inner = FinalSync::new(inner, sums.clone());
        Self { core: Rc::new(Core { inner, frames, sums }) }
    }

    /// What it shares with others.
    pub fn sums(&self) -> &Arc<PageSums> {
        &self.core.sums
    }

    /// Clears marks of zones that are not being written any more; to be called every few seconds.
    ///
    /// # Errors
    /// A device error; marks stay.
    pub async fn sweep(&self) -> io::Result<usize> {
        if self.core.sums.marks.wants_sync() {
            self.core.sync().await?;
        }
        self.core.sums.marks.sweep(false)
    }

    /// A clean end: all sums durable, no zone marked but those still to be recovered, once the marks' store is flushed.
    ///
    /// # Errors
    /// A device error, or the store's; zones stay marked.
    pub async fn finish(&self) -> io::Result<()> {
        self.core.sync().await?;
        self.core.sums.marks.sweep(true).map(drop)
    }

    /// The first zone that was being written when the last server went down and was not looked at.
    pub fn next_recovering(&self) -> Option<Range<u64>> {
        let zone = self.core.sums.marks.next_recovering()?;
        let (first, end) = self.core.sums.layout.pages_of_zone(zone);
        Some(first.0..end.0)
    }

    /// All pages of a zone were settled.
    pub fn recovered(&self, pages: &Range<u64>) {
        self.core.sums.marks.recovered(self.core.sums.layout.zone(PoolPage(pages.start)));
    }

    /// Gives pages the sums of what they hold now, whatever that is.
    ///
    /// # Errors
    /// As `examine`; a page that cannot be read is left as it is.
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

    /// Looks at pages on SSD. Without their block locks a page that is being written may look rotten.
    ///
    /// # Errors
    /// The sums cannot be read. (What pages cannot be read is told by their verdicts.)
    pub async fn examine(&self, pages: Range<u64>) -> io::Result<Vec<Verdict>> {
        let (found, _) = self.core.look(pages).await?;
        Ok(found.into_iter().map(|(verdict, _)| verdict).collect())
    }

    /// Gives pages that have no sum, or one that does not match, the sum of what they hold now; returns how many. The
    /// caller holds their block locks. Only for pages in a recovering zone, and for those without a sum.
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

/// What a request is about, once its buffer is on its way.
struct About {
    kind: IoKind,
    pages: Range<u64>,
    /// Of a write.
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

    /// What a page is that has these bytes' sum; `None` if its sum is not here.
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
    /// The pages of a request, if it is whole pages of the pool.
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

    /// The sums of what a buffer holds for pages from `first` on; `None` if it names a frame that is not there.
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
                // A mistake of who submits; the disk below says what is wrong, of this request and of the others.
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
            // Those that others were reading.
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
                // A write that failed may have left its pages old, new or mixed.
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
            // They are tried again by the next sync, which fails if they cannot be written.
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

/// A write that is under way. Abandoned, it may or may not be done: its pages have no sums then, and its zones stay
/// marked.
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
