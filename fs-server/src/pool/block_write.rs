//! Durable writes to files other than the data files (metadata's log), by the ring of the worker that writes.
//!
//! This module assigns rings to threads. A worker has one for as long as it has an `OwnRing`. Other threads (of a pool that uses the page cache, or
//! of a simulation) have none, and must make their writes durable in another way.

use super::aligned_buf::AlignedBuf;
use super::uring::{UringDisk, WeakRing};
use std::cell::RefCell;
use std::fs::File;
use std::rc::Rc;
use std::sync::Arc;

/// The unit in which direct writes begin and end: no device needs a larger one.
pub const BLOCK_BYTES: usize = cuttlefs_common::ids::PAGE_SIZE;

/// Whole blocks that are to be written durably to a file. The file and the memory are kept until the kernel is done with them.
#[derive(Debug)]
pub struct BlockWrite {
    /// Open with `O_DIRECT`.
    pub file: Arc<File>,
    /// The offset in the file; a multiple of `BLOCK_BYTES`.
    pub offset: u64,
    /// The bytes.
    pub buffer: AlignedBuf,
}

thread_local! {
    static OWN: RefCell<Option<WeakRing>> = const { RefCell::new(None) };
}

/// While this exists, its ring is this thread's own.
#[derive(Debug)]
pub struct OwnRing(());

impl OwnRing {
    /// Makes `ring` this thread's own: the thread drives it.
    pub fn set(ring: &Rc<UringDisk>) -> Self {
        OWN.set(Some(ring.downgrade()));
        Self(())
    }

    /// This thread's ring, if it has one.
    pub fn get() -> Option<UringDisk> {
        OWN.with_borrow(|own| own.as_ref().and_then(WeakRing::upgrade))
    }
}

impl Drop for OwnRing {
    fn drop(&mut self) {
        OWN.set(None);
    }
}
