//! Metadata over the store in memory, and its state after a crash.
//!
//! Files have no names here: names are tested in `meta`. The files 1, 2, 3 of a test are the inodes that `inode` gives.

use crate::committer::Committer;
use crate::meta::{Caller, Format, HashKey, MemoryStore, Meta, Operation};
use cuttlefs_common::ids::{InodeNo, PoolPage};
use cuttlefs_common::region::ExtentState;
use cuttlefs_common::status::Status;
use cuttlefs_common::world::ManualClock;
use std::ops::{Deref, Range};
use std::sync::Arc;

const ROOT_USER: Caller =
    Caller { uid: 0, gid: 0, umask: 0, drops_privileges: false, request: None, opens: None };

/// The inode of a test's file. File 1 is the first inode after the root.
pub(super) const fn inode(number: u64) -> InodeNo {
    InodeNo(InodeNo::ROOT.0 + number)
}

pub(super) struct Records {
    store: Arc<MemoryStore>,
    pub committer: Arc<Committer>,
}

impl Default for Records {
    fn default() -> Self {
        let store = MemoryStore::new();
        let format = Format { uuid: [7; 16], hash_key: HashKey([7; 16]), root: ROOT_USER, root_mode: 0o755 };
        Meta::format(&store, &ManualClock::default(), &format).expect("format");
        Self::on(store)
    }
}

impl Deref for Records {
    type Target = Meta;

    fn deref(&self) -> &Meta {
        self.committer.meta()
    }
}

impl Records {
    fn on(store: MemoryStore) -> Self {
        let store = Arc::new(store);
        let meta = Meta::open(store.clone(), Arc::new(ManualClock::default())).expect("open");
        Self { store, committer: Committer::at_once(Arc::new(meta)) }
    }

    /// Makes an empty file without a name.
    pub fn create(&self, ino: InodeNo) {
        self.number_next(ino);
        let make = Operation::CreateNameless { parent: InodeNo::ROOT, mode: 0o644 };
        let made = self.execute(ROOT_USER, &make, &|_| true).expect("makes a file");
        assert_eq!(made.attr.map(|attr| attr.ino), Some(ino));
    }

    /// Removes a file and its records, as a reap commits them.
    pub fn remove(&self, ino: InodeNo) -> Result<(), Status> {
        self.reap(ino).map(drop)
    }

    /// Makes every batch fail from now on, or ends that.
    pub fn fail_batches(&self, fail: bool) {
        self.store.fail(fail);
    }

    /// How many states a crash may leave: the durable one and one for each batch after it.
    pub fn crash_states(&self) -> usize {
        self.store.unflushed_batches() + 1
    }

    /// The next server's metadata after a crash that kept `keep` of the batches since the last flush.
    pub fn crash(&self, keep: usize) -> Self {
        Self::on(self.store.crashed(keep))
    }

    /// The next server's metadata after a kill, which loses no batch.
    pub fn killed(&self) -> Self {
        self.crash(usize::MAX)
    }

    /// The pool pages of all extents, as runs.
    pub fn used(&self) -> Vec<Range<u64>> {
        self.extents_that(|_| true)
    }

    /// The pool pages of all extents in the state `Written`, as runs.
    pub fn pages_written(&self) -> Vec<Range<u64>> {
        self.extents_that(|state| state == ExtentState::Written)
    }

    fn extents_that(&self, is_wanted: impl Fn(ExtentState) -> bool) -> Vec<Range<u64>> {
        let mut runs = Vec::new();
        let all = self.all_extents(&mut |_, extent| {
            if is_wanted(extent.state) {
                runs.push(extent.pool_page.0..extent.pool_page.0 + extent.len_pages);
            }
            true
        });
        all.expect("extents");
        runs
    }

    /// All images, each with the pool page that is its place.
    pub fn placed_images(&self) -> Vec<(PoolPage, Vec<u8>)> {
        let images = self.images(None, usize::MAX).expect("images");
        let place =
            |image: &crate::meta::StoredImage| image.pool_page.expect("an image of a page with bytes");
        images.into_iter().map(|image| (place(&image), image.bytes)).collect()
    }

    /// Removes all images, once their bytes are in their places.
    pub fn forget_images(&self) {
        self.drop_images().expect("dropped");
        self.flush().expect("flushed");
    }

    /// The numbers of all files.
    pub fn files(&self) -> Vec<u64> {
        self.orphans().into_iter().map(|ino| ino.0 - InodeNo::ROOT.0).collect()
    }
}
