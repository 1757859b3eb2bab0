//! Durable writes to files beside the data files (metadata's log), by the writing worker's own ring.
//!
//! Owns the assignment of rings to threads. A worker has one as long as it holds an `OwnRing`; a thread without one (of a pool
//! that goes through the page cache, of a simulation) has to have its writes made durable otherwise.

use super::aligned_buf::AlignedBuf;
use super::uring::{UringDisk, WeakRing};
use std::cell::RefCell;
use std::fs::File;
use std::rc::Rc;
use std::sync::Arc;

/// What a direct write begins and ends at: no device asks for more.
pub const BLOCK_BYTES: usize = cuttlefs_common::ids::PAGE_SIZE;

/// Whole blocks to be written to a file, durably. The file and the memory are kept until the kernel has done with them.
#[derive(Debug)]
pub struct BlockWrite {
    /// Open with `O_DIRECT`.
    pub file: Arc<File>,
    /// Where; a multiple of `BLOCK_BYTES`.
    pub offset: u64,
    /// What.
    pub buffer: AlignedBuf,
}

thread_local! {
    static OWN: RefCell<Option<WeakRing>> = const { RefCell::new(None) };
}

/// While it is there, its ring is this thread's own.
#[derive(Debug)]
pub struct OwnRing(());

impl OwnRing {
    /// This thread drives `ring` from now on.
    pub fn set(ring: &Rc<UringDisk>) -> Self {
        OWN.set(Some(ring.downgrade()));
        Self(())
    }

    /// This thread's, if it has one.
    pub fn get() -> Option<UringDisk> {
        OWN.with_borrow(|own| own.as_ref().and_then(WeakRing::upgrade))
    }
}

impl Drop for OwnRing {
    fn drop(&mut self) {
        OWN.set(None);
    }
}
