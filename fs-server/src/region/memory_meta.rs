//! The in-memory twin of metadata, for tests and simulation: attributes and extent records, with what a crash leaves.
//!
//! Batches are applied at once and become durable with `flush`; `crash` goes back to the last flush, or to any batch
//! after it, as a store that writes its log in order may.

use super::meta_port::{CutStep, DataCommit, Images, MetaPort, NoteData, Written};
use crate::pool::MarkStore;
use crate::pool::disk::LocalFuture;
use cuttlefs_common::attr::{Attr, FileKind, InodeFlags, Timestamp};
use cuttlefs_common::ids::{InodeNo, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::region::{Extent, ExtentState};
use cuttlefs_common::status::Status;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// What the store has of one inode.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Record {
    size: u64,
    /// From where on it is being cut off.
    cut: Option<u64>,
    extents: BTreeMap<u64, Extent>,
    /// Bytes of pages that are not in their places.
    images: BTreeMap<u64, Vec<u8>>,
}

impl Record {
    fn has_bytes(&self, page: u64) -> bool {
        let before = self.extents.range(..=page).next_back();
        before.is_some_and(|(_, extent)| extent.file_end().0 > page && extent.state == ExtentState::Written)
    }
}

#[derive(Clone, Debug, Default)]
struct Store {
    files: BTreeMap<InodeNo, Record>,
    /// Regions of the pool.
    marks: BTreeSet<u64>,
}

impl std::ops::Deref for Store {
    type Target = BTreeMap<InodeNo, Record>;

    fn deref(&self) -> &Self::Target {
        &self.files
    }
}

impl std::ops::DerefMut for Store {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.files
    }
}

#[derive(Debug, Default)]
struct Inner {
    live: BTreeMap<InodeNo, Attr>,
    store: Store,
    /// The store after each batch since the last flush, oldest first; the first is the durable one.
    history: Vec<Store>,
    fail: bool,
}

/// Metadata in memory.
#[derive(Clone, Debug, Default)]
pub struct MemoryMeta {
    inner: Arc<Mutex<Inner>>,
}

fn attr(ino: InodeNo, size: u64, pages: u64) -> Attr {
    Attr {
        ino,
        kind: FileKind::File,
        mode: 0o644,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        size,
        allocated_bytes: pages * PAGE_SIZE_U64,
        atime: Timestamp::default(),
        mtime: Timestamp::default(),
        ctime: Timestamp::default(),
        btime: Timestamp::default(),
        change: 1,
        flags: InodeFlags::default(),
    }
}

impl Inner {
    fn batch(&mut self, change: impl FnOnce(&mut Store)) -> Result<(), Status> {
        if self.fail {
            return Err(Status::Io);
        }
        self.history.push(self.store.clone());
        change(&mut self.store);
        Ok(())
    }
}

impl MemoryMeta {
    /// Makes an empty file.
    pub fn create(&self, ino: InodeNo) {
        let mut inner = self.inner.lock();
        let made = inner.batch(|store| {
            store.insert(ino, Record::default());
        });
        if made.is_ok() {
            inner.live.insert(ino, attr(ino, 0, 0));
        }
    }

    /// Removes a file and returns its durable extents: what a reap commits.
    ///
    /// # Errors
    /// `NotFound`; `Io` if batches fail.
    pub fn remove(&self, ino: InodeNo) -> Result<Vec<Extent>, Status> {
        let mut inner = self.inner.lock();
        let record = inner.store.get(&ino).cloned().ok_or(Status::NotFound)?;
        inner.batch(|store| {
            store.remove(&ino);
        })?;
        inner.live.remove(&ino);
        Ok(record.extents.into_values().collect())
    }

    /// Makes every batch fail from now on, or no more.
    pub fn fail_batches(&self, fail: bool) {
        self.inner.lock().fail = fail;
    }

    /// How many states a crash may leave: the durable one and one for each batch after it.
    pub fn crash_states(&self) -> usize {
        self.inner.lock().history.len() + 1
    }

    /// The store after a crash: `keep` of the batches since the last flush survive. What is live comes from it.
    pub fn crash(&self, keep: usize) -> Self {
        let inner = self.inner.lock();
        let mut store = inner.history.get(keep).unwrap_or(&inner.store).clone();
        for record in store.values_mut() {
            // As metadata does when it is opened.
            if let Some(from) = record.cut.take() {
                replace(record, from, u64::MAX, &[]);
            }
            drop_images_of_nothing(record);
        }
        let live = store
            .iter()
            .map(|(ino, record)| {
                let pages = record.extents.values().map(|extent| extent.len_pages).sum();
                (*ino, attr(*ino, record.size, pages))
            })
            .collect();
        Self { inner: Arc::new(Mutex::new(Inner { live, store, ..Inner::default() })) }
    }

    /// Every pool page an extent names, as runs.
    pub fn used(&self) -> Vec<Range<u64>> {
        let inner = self.inner.lock();
        let extents = inner.store.values().flat_map(|record| record.extents.values());
        extents.map(|extent| extent.pool_page.0..extent.pool_page.0 + extent.len_pages).collect()
    }

    /// Pool pages that an extent says are written.
    pub fn written(&self) -> Vec<Range<u64>> {
        let inner = self.inner.lock();
        let extents = inner.store.values().flat_map(|record| record.extents.values());
        let written = extents.filter(|extent| extent.state == ExtentState::Written);
        written.map(|extent| extent.pool_page.0..extent.pool_page.0 + extent.len_pages).collect()
    }

    /// Images, each with the pool page that is to have it.
    pub fn images(&self) -> Vec<(PoolPage, Vec<u8>)> {
        let inner = self.inner.lock();
        let place = |record: &Record, page: u64| {
            let (_, extent) = record.extents.range(..=page).next_back().expect("it has bytes");
            assert!(record.has_bytes(page), "an image of page {page}, which has no bytes");
            PoolPage(extent.pool_page.0 + (page - extent.file_page.0))
        };
        let of = |record: &Record| -> Vec<_> {
            record.images.iter().map(|(page, bytes)| (place(record, *page), bytes.clone())).collect()
        };
        inner.store.values().flat_map(of).collect()
    }

    /// All of them are in their places.
    pub fn drop_images(&self) {
        self.inner.lock().store.values_mut().for_each(|record| record.images.clear());
    }

    /// Regions that are marked.
    pub fn marks(&self) -> BTreeSet<u64> {
        self.inner.lock().store.marks.clone()
    }

    /// The inodes there are.
    pub fn inodes(&self) -> Vec<InodeNo> {
        self.inner.lock().store.keys().copied().collect()
    }
}

/// Replaces `[first, end)` of a record.
fn replace(record: &mut Record, first: u64, end: u64, extents: &[Extent]) {
    let old = std::mem::take(&mut record.extents);
    for extent in old.into_values() {
        let (from, to) = (extent.file_page.0, extent.file_end().0);
        for (part_from, part_to) in [(from, to.min(first)), (from.max(end), to)] {
            if part_from < part_to {
                let part = Extent {
                    file_page: part_from.into(),
                    pool_page: PoolPage(extent.pool_page.0 + (part_from - from)),
                    len_pages: part_to - part_from,
                    state: extent.state,
                };
                record.extents.insert(part_from, part);
            }
        }
    }
    for extent in extents {
        assert!(
            extent.file_page.0 >= first && extent.file_end().0 <= end && extent.len_pages > 0,
            "{extent:?} outside [{first}, {end})"
        );
        record.extents.insert(extent.file_page.0, *extent);
    }
    let all: Vec<_> = record.extents.values().collect();
    assert!(all.windows(2).all(|pair| pair[0].file_end() <= pair[1].file_page), "overlap: {all:?}");
}

fn drop_images_of_nothing(record: &mut Record) {
    let images = std::mem::take(&mut record.images);
    record.images = images.into_iter().filter(|(page, _)| record.has_bytes(*page)).collect();
}

impl MetaPort for MemoryMeta {
    fn attr(&self, ino: InodeNo) -> Result<Attr, Status> {
        self.inner.lock().live.get(&ino).copied().ok_or(Status::NotFound)
    }

    fn written(&self, ino: InodeNo) -> Result<Written, Status> {
        self.attr(ino).map(|_| Written::default())
    }

    fn has_room(&self) -> bool {
        true
    }

    fn is_flushing(&self) -> bool {
        false
    }

    fn takes_images(&self) -> bool {
        true
    }

    fn extents(&self, ino: InodeNo) -> Result<Vec<Extent>, Status> {
        let inner = self.inner.lock();
        let record = inner.store.get(&ino).ok_or(Status::NotFound)?;
        Ok(record.extents.values().copied().collect())
    }

    fn note_data(&self, ino: InodeNo, note: NoteData) -> Result<Attr, Status> {
        let mut inner = self.inner.lock();
        let attr = inner.live.get_mut(&ino).ok_or(Status::NotFound)?;
        if let Some(size) = note.size {
            attr.size = size;
        }
        if let Some(pages) = note.allocated_pages {
            attr.allocated_bytes = pages * PAGE_SIZE_U64;
        }
        if note.modified {
            attr.change += 1;
        }
        Ok(*attr)
    }

    fn commit_data(&self, commits: &[DataCommit]) -> Result<(), Status> {
        self.inner.lock().batch(|store| {
            for commit in commits {
                let Some(record) = store.get_mut(&commit.ino) else {
                    continue;
                };
                for range in &commit.ranges {
                    replace(record, range.first.0, range.end.0, &range.extents);
                }
                record.size = commit.size;
                match &commit.images {
                    Images::Follow => drop_images_of_nothing(record),
                    Images::Drop => record.images.clear(),
                    Images::Put(images) => {
                        record.images.extend(images.iter().map(|image| (image.page.0, image.bytes.clone())));
                    }
                }
                match commit.cut {
                    CutStep::Unchanged => {}
                    CutStep::From(page) => record.cut = Some(page.0),
                    CutStep::Done => record.cut = None,
                }
            }
        })
    }

    fn flush(&self) -> LocalFuture<'static, Result<(), Status>> {
        let inner = self.inner.clone();
        Box::pin(async move {
            let mut inner = inner.lock();
            if inner.fail {
                return Err(Status::Io);
            }
            inner.history.clear();
            Ok(())
        })
    }
}

impl MarkStore for MemoryMeta {
    fn put_marks(&self, regions: &[u64], marked: bool) -> std::io::Result<()> {
        let put = self.inner.lock().batch(|store| match marked {
            true => store.marks.extend(regions),
            false => store.marks.retain(|region| !regions.contains(region)),
        });
        put.map_err(|status| std::io::Error::other(status.to_string()))
    }

    fn flush_marks(&self) -> LocalFuture<'static, std::io::Result<()>> {
        let flushed = self.flush();
        Box::pin(async move { flushed.await.map_err(|status| std::io::Error::other(status.to_string())) })
    }
}
