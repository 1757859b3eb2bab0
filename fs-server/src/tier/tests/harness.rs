//! A server's storage in memory, and the stamps that tell whose bytes are whose.

use crate::pool::simdisk::SimDisk;
use crate::pool::space::Space;
use crate::region::memory_meta::MemoryMeta;
use crate::region::{FileRegion, Frames, Hotspots, MetaPort, Regions, RegionsConfig};
use crate::tier::{Sink, fetch};
use cuttlefs_common::ids::{FrameIndex, InodeNo, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::region::{PageSet, divide};
use cuttlefs_common::status::Status;
use cuttlefs_common::world::SeededRandom;
use futures_lite::future::block_on;
use std::collections::BTreeSet;
use std::sync::Arc;

pub(super) struct Storage {
    pub regions: Arc<Regions>,
    pub disk: SimDisk,
    pub meta: MemoryMeta,
    pub pool_pages: u64,
    pub frames: u64,
}

impl Storage {
    pub fn new(pool_pages: u64, frames: u64) -> Self {
        let meta = MemoryMeta::default();
        let regions = regions(pool_pages, frames, &meta);
        let disk = SimDisk::new(pool_pages, regions.frames().memory().clone());
        Self { regions, disk, meta, pool_pages, frames }
    }

    /// A server that promotes whole units of so many pages, on a disk whose choices come from `seed`.
    pub fn with_units(pool_pages: u64, frames: u64, unit_pages: u32, seed: u64) -> Self {
        let meta = MemoryMeta::default();
        let config = RegionsConfig { hotspots: Hotspots::Units, unit_pages, ..config(pool_pages, frames) };
        let regions = regions_of(config, &meta);
        let disk = SimDisk::seeded(pool_pages, regions.frames().memory().clone(), seed);
        Self { regions, disk, meta, pool_pages, frames }
    }

    /// The next server on the same medium, with what the store kept.
    pub fn restart(&self, meta: MemoryMeta) -> Self {
        let regions = regions(self.pool_pages, self.frames, &meta);
        let disk = self.disk.attach(regions.frames().memory().clone());
        Self { regions, disk, meta, pool_pages: self.pool_pages, frames: self.frames }
    }

    pub fn file(&self, ino: u64) -> Arc<FileRegion> {
        self.regions.file(InodeNo(ino)).expect("the file is there")
    }

    pub fn read(&self, file: &FileRegion, offset: u64, len: usize) -> Result<Vec<u8>, Status> {
        // Poisoned, so that what was not filled shows.
        let mut out = vec![0xEE; len];
        let pages = PageSet::all(divide(offset, len).len());
        let sink = Sink::Bytes(&mut out);
        let valid = block_on(fetch(&self.regions, &self.disk, file, offset, len, &pages, sink))? as usize;
        assert!(out[valid..].iter().all(|byte| *byte == 0), "bytes past the end of the file");
        out.truncate(valid);
        Ok(out)
    }

    /// What must hold whenever nothing is under way.
    pub fn check(&self) {
        let figures = self.regions.figures();
        let table = self.regions.residency.table();
        let (mut resident, mut dirty) = (BTreeSet::new(), 0);
        for page in (0..self.pool_pages).map(PoolPage) {
            let entry = table.load(page);
            assert!(!entry.is_changing(), "pool page {page} was left changing");
            if entry.is_resident() {
                assert!(resident.insert(entry.frame()), "two pages in frame {}", entry.frame());
                assert_eq!(self.regions.frames().owner(entry.frame()), Some(page));
                dirty += u64::from(entry.is_dirty());
            } else {
                assert_eq!(entry.frame(), FrameIndex::MAGIC);
                assert!(!entry.is_dirty());
            }
        }
        assert_eq!(figures.dirty_frames, dirty, "dirty frames are counted exactly");
        assert_eq!(
            figures.free_frames + resident.len() as u32,
            figures.frames,
            "every frame is free or owned"
        );
        assert_eq!(figures.leaked_frames, 0);
        // The store never names what is free, and no two files hold one page.
        let mut used = BTreeSet::new();
        for ino in self.meta.inodes() {
            let file = self.regions.file(ino).expect("loads");
            for piece in file.state().table.iter() {
                for page in piece.pool..piece.pool + piece.len {
                    assert!(used.insert(page), "pool page {page} is in two places");
                    let entry = table.load(PoolPage(page));
                    assert!(piece.state.has_bytes() || !entry.is_resident(), "unwritten and resident");
                }
            }
            assert_eq!(self.meta.attr(ino).expect("live").size, file.size());
            let allocated = self.meta.attr(ino).expect("live").allocated_bytes;
            assert_eq!(allocated, file.allocated_pages() * PAGE_SIZE_U64);
        }
        let space = self.regions.space().figures();
        assert_eq!(space.used, used.len() as u64, "used space is exact");
        assert_eq!(space.free + space.quarantined + space.used, self.pool_pages);
        for frame in &resident {
            let page = self.regions.frames().owner(*frame).expect("checked above");
            assert!(used.contains(&page.0), "pool page {page} is free and resident");
        }
        let zero = Frames::offset(FrameIndex::ZERO);
        let mut bytes = [1u8; 4096];
        self.regions.frames().memory().read(zero, &mut bytes);
        assert!(bytes.iter().all(|byte| *byte == 0), "the zero frame was written");
        self.regions.frames().memory().read(0, &mut bytes);
        assert!(self.regions.magic().covers(0, &bytes), "the magic frame was written");
    }
}

fn config(pool_pages: u64, frames: u64) -> RegionsConfig {
    let defaults = RegionsConfig::new(pool_pages, frames * PAGE_SIZE_U64);
    RegionsConfig { file_slots: 4, max_inactive: 0, ..defaults }
}

fn regions(pool_pages: u64, frames: u64, meta: &MemoryMeta) -> Arc<Regions> {
    regions_of(config(pool_pages, frames), meta)
}

fn regions_of(config: RegionsConfig, meta: &MemoryMeta) -> Arc<Regions> {
    let space = Space::new(config.pool_pages, meta.used()).expect("extents do not overlap");
    let random = Arc::new(SeededRandom::new(42));
    Arc::new(Regions::new(config, Arc::new(space), Arc::new(meta.clone()), random).expect("memory"))
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
