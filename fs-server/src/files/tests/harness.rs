//! A server's storage in memory, and the stamps that tell which file bytes belong to.

use super::records::{Records, inode};
use crate::bits;
use crate::files::FilesConfig;
use crate::files::fetch;
use crate::files::range_table::Piece;
use crate::files::{FileRegion, Files};
use crate::files::{WriteAt, Written, allocate_for, defragment, write_for};
use crate::pages::put_in_place;
use crate::pages::{Frames, Hotspots, Pages, PagesConfig, Sink, Source};
use crate::pool::disk::{Disk, IoDone, IoRequest, LocalFuture};
use crate::pool::simdisk::SimDisk;
use crate::pool::space::Space;
use crate::pool::sums::{PageSums, SumLayout, SummedDisk};
use cuttlefs_common::attr::Attr;
use cuttlefs_common::ids::{FilePage, FrameIndex, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::region::{PageSet, divide};
use cuttlefs_common::rpc::Allocate;
use cuttlefs_common::status::Status;
use cuttlefs_common::world::SeededRandom;
use futures_lite::future::block_on;
use std::collections::BTreeSet;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;

/// Memory for blocks of sums: little, so that the blocks are read from the disk again and again.
const SUM_CACHE_BYTES: usize = 4096;

/// A simulated disk with checksums over it. Tests change the bytes of `medium` directly, past the checksums.
#[derive(Clone)]
pub(super) struct SummedSim {
    medium: SimDisk,
    frames: Arc<SharedMemory>,
    sums: Arc<PageSums>,
}

impl SummedSim {
    /// The disk with checksums, as one worker thread has it.
    pub fn summed(&self) -> SummedDisk {
        SummedDisk::new(Rc::new(self.medium.clone()), self.frames.clone(), self.sums.clone())
    }
}

impl Deref for SummedSim {
    type Target = SimDisk;

    fn deref(&self) -> &SimDisk {
        &self.medium
    }
}

impl Disk for SummedSim {
    fn submit(&self, batch: Vec<IoRequest>) -> LocalFuture<'static, Vec<IoDone>> {
        self.summed().submit(batch)
    }

    fn sync(&self) -> LocalFuture<'static, std::io::Result<()>> {
        self.summed().sync()
    }
}

pub(super) struct Storage {
    pub files: Arc<Files>,
    pub pages: Arc<Pages>,
    pub disk: SummedSim,
    pub meta: Records,
    pub pool_pages: u64,
    pub frames: u64,
}

impl Storage {
    pub fn new(pool_pages: u64, frames: u64) -> Self {
        let meta = Records::default();
        Self::build(config(pool_pages, frames), meta, frames, |memory| formatted(pool_pages, memory, 0))
    }

    /// A server that promotes whole units of `unit_pages` pages, on a disk whose choices come from `seed`.
    pub fn with_units(pool_pages: u64, frames: u64, unit_pages: u32, seed: u64) -> Self {
        let meta = Records::default();
        let config = PagesConfig { hotspots: Hotspots::Units, unit_pages, ..config(pool_pages, frames) };
        Self::build(config, meta, frames, |memory| formatted(pool_pages, memory, seed))
    }

    /// The next server on the same medium, with the records in `meta`.
    pub fn restart(&self, meta: Records) -> Self {
        let config = config(self.pool_pages, self.frames);
        let next = Self::build(config, meta, self.frames, |memory| self.disk.attach(memory));
        // Page images of the server before are written to their places before anything reads the pages.
        let images = next.meta.placed_images();
        if !images.is_empty() {
            block_on(put_in_place(&next.disk, images)).expect("written");
            block_on(next.disk.sync()).expect("synced");
            next.meta.forget_images();
        }
        next
    }

    fn build(
        config: PagesConfig,
        meta: Records,
        frames: u64,
        open: impl FnOnce(Arc<SharedMemory>) -> SimDisk,
    ) -> Self {
        let pool_pages = config.pool_pages;
        let written = bits::of(pool_pages, meta.pages_written());
        let layout = SumLayout::new([pool_pages]);
        let sums = PageSums::new(
            layout,
            SUM_CACHE_BYTES,
            written,
            meta.marks().expect("marks"),
            meta.committer.clone(),
        );
        let sums = Arc::new(sums);
        let files = files_of(config, &meta, sums.clone());
        let pages = files.pages().clone();
        let memory = files.pages.frames().memory().clone();
        let disk = SummedSim { medium: open(memory.clone()), frames: memory, sums };
        Self { files, pages, disk, meta, pool_pages, frames }
    }

    pub fn file(&self, ino: u64) -> Arc<FileRegion> {
        self.files.file(inode(ino)).expect("the file is there")
    }

    /// Places where the file goes on and its pool pages do not.
    pub fn breaks(&self, file: &FileRegion) -> usize {
        let pieces: Vec<_> = file.state().table.iter().collect();
        let is_break =
            |pair: &&[Piece]| pair[0].end() == pair[1].first && pair[0].pool + pair[0].len != pair[1].pool;
        pieces.windows(2).filter(is_break).count()
    }

    pub fn read(&self, file: &FileRegion, offset: u64, len: usize) -> Result<Vec<u8>, Status> {
        // The buffer starts with a byte that no file has, so that bytes that the fetch did not fill show.
        let mut out = vec![0xEE; len];
        let pages = PageSet::all(divide(offset, len).len());
        let sink = Sink::Bytes(&mut out);
        let valid = block_on(fetch(&self.files, &self.disk, file, offset, len, &pages, sink))? as usize;
        assert!(out[valid..].iter().all(|byte| *byte == 0), "bytes past the end of the file");
        out.truncate(valid);
        Ok(out)
    }

    /// Checks the invariants that hold whenever no operation is under way.
    pub fn check(&self) {
        let figures = self.pages.figures();
        let table = self.pages.residency.table();
        let (mut resident, mut dirty) = (BTreeSet::new(), 0);
        for page in (0..self.pool_pages).map(PoolPage) {
            let entry = table.load(page);
            assert!(!entry.is_changing(), "pool page {page} was left changing");
            if entry.is_resident() {
                assert!(resident.insert(entry.frame()), "two pages in frame {}", entry.frame());
                assert_eq!(self.pages.frames().owner(entry.frame()), Some(page));
                dirty += u64::from(entry.is_dirty());
            } else {
                assert_eq!(entry.frame(), FrameIndex::MAGIC);
                assert!(!entry.is_dirty());
            }
        }
        assert_eq!(figures.dirty_frames, dirty, "dirty frames are counted exactly");
        let held = |file: u64| self.file(file).grants.lock().held();
        let (spare, taken) =
            self.meta.files().into_iter().map(held).fold((0, 0), |(a, b), (c, d)| (a + c, b + d));
        let queued = self.files.figures().free_page_queue as u64;
        assert_eq!(
            figures.free_frames + resident.len() as u32 + spare + self.files.free_pages.frames() as u32,
            figures.frames,
            "every frame is free, owned, a grant's, or in the free page queue"
        );
        assert_eq!(figures.leaked_frames, 0);
        // No extent names a free pool page, and no two files have the same pool page.
        let mut used = BTreeSet::new();
        for ino in self.meta.files() {
            let file = self.file(ino);
            let state = file.state();
            state.table.translation.check(&state.table);
            drop(state);
            for piece in file.state().table.iter() {
                for page in piece.pool..piece.pool + piece.len {
                    assert!(used.insert(page), "pool page {page} is in two places");
                    let entry = table.load(PoolPage(page));
                    assert!(piece.state.has_bytes() || !entry.is_resident(), "unwritten and resident");
                }
            }
            assert_eq!(self.meta.attr(file.ino()).expect("live").size, file.size());
            let allocated = self.meta.attr(file.ino()).expect("live").allocated_bytes;
            assert_eq!(allocated, file.allocated_pages() * PAGE_SIZE_U64);
        }
        let space = self.files.space().figures();
        assert_eq!(space.used, used.len() as u64 + taken + queued, "used space is exact");
        assert_eq!(space.free + space.quarantined + space.used, self.pool_pages);
        assert_eq!(self.files.space_figures().free, space.free + queued);
        for frame in &resident {
            let page = self.pages.frames().owner(*frame).expect("checked above");
            assert!(used.contains(&page.0), "pool page {page} is free and resident");
        }
        let zero = Frames::offset(FrameIndex::ZERO);
        let mut bytes = [1u8; 4096];
        self.pages.frames().memory().read(zero, &mut bytes);
        assert!(bytes.iter().all(|byte| *byte == 0), "the zero frame was written");
        self.pages.frames().memory().read(0, &mut bytes);
        assert!(self.pages.magic().covers(0, &bytes), "the magic frame was written");
    }
}

fn config(pool_pages: u64, frames: u64) -> PagesConfig {
    PagesConfig::new(pool_pages, frames * PAGE_SIZE_U64)
}

fn files_of(config: PagesConfig, meta: &Records, sums: Arc<PageSums>) -> Arc<Files> {
    let space = Space::new(config.pool_pages, bits::of(config.pool_pages, meta.used()))
        .expect("extents do not overlap");
    let random = Arc::new(SeededRandom::new(42));
    let pages = Pages::new(config, random.as_ref()).expect("memory").with_sums(sums);
    let few = FilesConfig { file_slots: 4, max_inactive: 0 };
    let files = Files::new(few, Arc::new(pages), Arc::new(space), meta.committer.clone(), random);
    Arc::new(files.expect("memory"))
}

/// A medium as `format` leaves it, whose choices come from `seed`.
fn formatted(pool_pages: u64, frames: Arc<SharedMemory>, seed: u64) -> SimDisk {
    let layout = SumLayout::new([pool_pages]);
    let medium = SimDisk::seeded(layout.all_pages(), frames, seed);
    medium.format(&layout);
    medium
}

/// The byte every write puts at this place of this file: never 0, and different enough between files and places that
/// bytes from elsewhere show.
pub(super) fn stamp(ino: u64, offset: u64) -> u8 {
    let mut z =
        ino.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (offset / 64).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ offset;
    z ^= z >> 29;
    z = z.wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 32;
    (z % 255) as u8 + 1
}

pub(super) fn stamped(ino: u64, offset: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|index| stamp(ino, offset + index)).collect()
}

/// Writes all of `source`, on behalf of no request.
pub(super) async fn write(
    files: &Files,
    disk: &dyn Disk,
    file: &Arc<FileRegion>,
    at: WriteAt,
    source: Source<'_>,
) -> Result<Written, Status> {
    write_for(files, disk, file, at, source, None).await
}

/// Allocates, zeroes or punches as `how` says, on behalf of no request.
pub(super) async fn allocate_range(
    files: &Files,
    disk: &dyn Disk,
    file: &Arc<FileRegion>,
    offset: u64,
    len: u64,
    how: Allocate,
) -> Result<Attr, Status> {
    allocate_for(files, disk, file, (offset, len), how, None).await
}

/// Punches a hole, on behalf of no request.
pub(super) async fn punch_hole(
    files: &Files,
    disk: &dyn Disk,
    file: &Arc<FileRegion>,
    offset: u64,
    len: u64,
) -> Result<Attr, Status> {
    allocate_range(files, disk, file, offset, len, Allocate::PunchHole).await
}

/// Moves all pages of a file that have a better place. Returns how many were moved.
pub(super) async fn defragment_all(
    files: &Files,
    disk: &dyn Disk,
    file: &Arc<FileRegion>,
) -> Result<u64, Status> {
    let (mut pages, mut next) = (0, Some(FilePage(0)));
    while let Some(first) = next {
        let moved = defragment(files, disk, file, first).await?;
        assert!(moved.next.is_none_or(|next| next > first), "no step stays where it is");
        (pages, next) = (pages + moved.pages, moved.next);
    }
    Ok(pages)
}
