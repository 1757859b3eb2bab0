//! Page-aligned memory for direct IO.
//!
//! `AlignedBuf` is memory at a page boundary whose length is whole pages. Each thread keeps a bounded list of free blocks of such memory, so that a 4
//! KiB miss does not cost a page fault for its buffer.
//!
//! # Invariants
//! * The bytes of a buffer are always initialised: a fresh block is zeroed once, a reused one has the bytes of its last use. Those may be of another
//!   file, so a user of an `unfilled` buffer either fills all of it from the device or does not read it.
//! * A block is given back to the allocator with the layout with which it was made.
//!
//! # Failure
//! Lack of memory aborts the process, as in Rust's standard collections; the callers bound the number of requests.

use cuttlefs_common::ids::PAGE_SIZE;
use cuttlefs_common::memory::spoil;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::cell::RefCell;
use std::ptr::NonNull;

/// Largest block that a thread keeps; larger ones are freed. The largest request of a client is 1 MiB.
const LARGEST_KEPT_BYTES: usize = 1 << 20;
/// Most bytes that a thread keeps; further blocks are freed. Enough for sixteen of the largest requests, and little beside any `--memory`.
pub const MOST_KEPT_BYTES: usize = 16 << 20;
/// Size classes of kept blocks: one, two, four ... pages up to `LARGEST_KEPT_BYTES`.
const CLASSES: usize = (LARGEST_KEPT_BYTES / PAGE_SIZE).ilog2() as usize + 1;

const _: () = assert!(LARGEST_KEPT_BYTES.is_power_of_two() && PAGE_SIZE.is_power_of_two());

thread_local! {
    static SHELVES: RefCell<Shelves> = RefCell::default();
}

/// A block from the allocator at a page boundary, zeroed when it was made.
struct Block {
    base: NonNull<u8>,
    capacity: usize,
}

// SAFETY: the block is owned by this value alone, as a `Vec<u8>`'s is.
unsafe impl Send for Block {}
// SAFETY: `&Block` gives no access to the bytes.
unsafe impl Sync for Block {}

impl Block {
    fn new(capacity: usize) -> Self {
        let layout = layout(capacity);
        // SAFETY: the layout's size is not zero: `whole_pages` gives one page at least.
        let base = unsafe { alloc_zeroed(layout) };
        Self { base: NonNull::new(base).unwrap_or_else(|| handle_alloc_error(layout)), capacity }
    }

    fn is_keepable(&self) -> bool {
        self.capacity <= LARGEST_KEPT_BYTES && self.capacity.is_power_of_two()
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: `base` came from `alloc_zeroed` with this very layout and is freed once.
        unsafe { dealloc(self.base.as_ptr(), layout(self.capacity)) }
    }
}

/// A thread's free blocks by size class.
#[derive(Default)]
struct Shelves {
    free: [Vec<Block>; CLASSES],
    kept_bytes: usize,
}

impl Shelves {
    fn take(&mut self, capacity: usize) -> Option<Block> {
        let block = self.free[class_of(capacity)].pop()?;
        self.kept_bytes -= block.capacity;
        Some(block)
    }

    fn put(&mut self, block: Block) {
        if block.is_keepable() && self.kept_bytes + block.capacity <= MOST_KEPT_BYTES {
            self.kept_bytes += block.capacity;
            self.free[class_of(block.capacity)].push(block);
        }
    }
}

/// Memory at a page boundary, whose length is a multiple of the page size, and not zero. When it is dropped, that thread keeps its block, within a
/// bound.
pub struct AlignedBuf {
    /// `None` only during drop.
    block: Option<Block>,
    len: usize,
}

impl AlignedBuf {
    /// Zeroed memory of `len_bytes`, rounded up to whole pages (at least one).
    pub fn zeroed(len_bytes: usize) -> Self {
        let (mut buffer, is_fresh) = Self::take(len_bytes);
        if !is_fresh {
            buffer.as_mut_slice().fill(0);
        }
        buffer
    }

    /// Memory of `len_bytes`, rounded up to whole pages. **It has the bytes of its last use**: only for reads that fill all of it, or writes that set
    /// all of it.
    pub fn unfilled(len_bytes: usize) -> Self {
        let (mut buffer, _) = Self::take(len_bytes);
        spoil(buffer.as_mut_slice());
        buffer
    }

    /// A buffer, and whether it is zeroed.
    fn take(len_bytes: usize) -> (Self, bool) {
        let len = whole_pages(len_bytes);
        if len > LARGEST_KEPT_BYTES {
            return (Self { block: Some(Block::new(len)), len }, true);
        }
        let capacity = len.next_power_of_two();
        // A thread that is ending keeps no blocks any more.
        let kept = SHELVES.try_with(|shelves| shelves.borrow_mut().take(capacity)).ok().flatten();
        let is_fresh = kept.is_none();
        (Self { block: Some(kept.unwrap_or_else(|| Block::new(capacity))), len }, is_fresh)
    }

    fn base(&self) -> NonNull<u8> {
        self.block.as_ref().expect("a buffer has its block until it is dropped").base
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true; here because clippy wants it beside `len`.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes that nobody writes while `self` is borrowed: an IO owns its buffer.
        unsafe { std::slice::from_raw_parts(self.base().as_ptr(), self.len) }
    }

    /// The bytes, to write.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as `as_slice`, and `&mut self` excludes every other user.
        unsafe { std::slice::from_raw_parts_mut(self.base().as_ptr(), self.len) }
    }

    /// The first address, for the device. The block does not move when the `AlignedBuf` does.
    pub(super) fn base_address(&self) -> NonNull<u8> {
        self.base()
    }
}

impl std::fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AlignedBuf").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            // A thread that is ending keeps no blocks: the closure drops the block then.
            let _ = SHELVES.try_with(move |shelves| shelves.borrow_mut().put(block));
        }
    }
}

fn whole_pages(len_bytes: usize) -> usize {
    len_bytes.max(1).next_multiple_of(PAGE_SIZE)
}

fn layout(capacity: usize) -> Layout {
    Layout::from_size_align(capacity, PAGE_SIZE).expect("a buffer is smaller than half the address space")
}

fn class_of(capacity: usize) -> usize {
    (capacity / PAGE_SIZE).ilog2() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_zeroed_and_whole_pages() {
        for asked in [0, 1, 4095, 4096, 4097, 1 << 20, (1 << 20) + 1] {
            let mut buffer = AlignedBuf::zeroed(asked);
            assert_eq!(buffer.len(), asked.max(1).next_multiple_of(PAGE_SIZE));
            assert_eq!(buffer.base_address().as_ptr() as usize % PAGE_SIZE, 0);
            assert!(buffer.as_slice().iter().all(|&byte| byte == 0));
            buffer.as_mut_slice().fill(7);
            assert!(buffer.as_slice().iter().all(|&byte| byte == 7));
        }
    }

    #[test]
    fn a_thread_keeps_blocks_within_its_bound() {
        let kept = || SHELVES.with_borrow(|shelves| shelves.kept_bytes);
        let mut buffer = AlignedBuf::unfilled(3 * PAGE_SIZE);
        let address = buffer.base_address();
        assert_eq!(buffer.len(), 3 * PAGE_SIZE);
        buffer.as_mut_slice().fill(9);
        drop(buffer);
        assert_eq!(kept(), 4 * PAGE_SIZE);
        let again = AlignedBuf::unfilled(4 * PAGE_SIZE);
        assert_eq!((again.base_address(), again.len(), kept()), (address, 4 * PAGE_SIZE, 0));
        drop(again);
        let zeroed = AlignedBuf::zeroed(4 * PAGE_SIZE);
        assert_eq!(zeroed.base_address(), address);
        assert!(zeroed.as_slice().iter().all(|&byte| byte == 0));
        drop(zeroed);
        drop((0..40).map(|_| AlignedBuf::unfilled(LARGEST_KEPT_BYTES)).collect::<Vec<_>>());
        assert!(kept() <= MOST_KEPT_BYTES && kept() > MOST_KEPT_BYTES - LARGEST_KEPT_BYTES);
        let before = kept();
        drop(AlignedBuf::zeroed(LARGEST_KEPT_BYTES + PAGE_SIZE));
        assert_eq!(kept(), before, "too large to be kept");
    }
}
