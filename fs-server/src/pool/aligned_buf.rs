//! Page-aligned memory for direct IO.
//!
//! Owns `AlignedBuf`, a heap block at a page boundary whose length is whole pages, and `BufferPool`, a thread's
//! bounded list of such blocks that are free.
//!
//! # Invariants
//! * The bytes of a buffer are always initialised: a fresh block is zeroed once, a reused one holds what its last
//!   user left. Reused bytes may belong to another file, so whoever takes a buffer from the pool either fills all of
//!   it from the device or asks for it zeroed.
//! * A block goes back to the allocator with the layout it was made with.
//!
//! # Failure
//! Running out of memory aborts, as everywhere in Rust's standard collections; how much is asked for is bounded by
//! the callers' admission.

use cuttlefs_common::ids::PAGE_SIZE;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::cell::RefCell;
use std::ptr::NonNull;

/// Largest buffer a [`BufferPool`] keeps; larger ones are freed. The largest request of a client is 1 MiB.
pub const LARGEST_POOLED_BYTES: usize = 1 << 20;
/// Most bytes a [`BufferPool`] keeps; what is given back beyond it is freed. Enough for sixteen of the largest
/// requests, and small beside any `--memory`.
pub const MOST_POOLED_BYTES: usize = 16 << 20;
/// Size classes of a [`BufferPool`]: one, two, four ... pages up to `LARGEST_POOLED_BYTES`.
const CLASSES: usize = (LARGEST_POOLED_BYTES / PAGE_SIZE).ilog2() as usize + 1;

const _: () = assert!(LARGEST_POOLED_BYTES.is_power_of_two() && PAGE_SIZE.is_power_of_two());

/// Heap memory at a page boundary; its length is a multiple of the page size, and not zero.
pub struct AlignedBuf {
    base: NonNull<u8>,
    len: usize,
    /// What was allocated: at least `len`, whole pages.
    capacity: usize,
}

// SAFETY: the block is owned by this value alone, as a `Vec<u8>`'s is.
unsafe impl Send for AlignedBuf {}
// SAFETY: `&AlignedBuf` only reads.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// Zeroed memory of `len_bytes`, rounded up to whole pages (at least one).
    pub fn zeroed(len_bytes: usize) -> Self {
        let len = whole_pages(len_bytes);
        Self::with_capacity(len, len)
    }

    fn with_capacity(len: usize, capacity: usize) -> Self {
        let layout = layout(capacity);
        // SAFETY: the layout's size is not zero: `whole_pages` gives one page at least.
        let base = unsafe { alloc_zeroed(layout) };
        let base = NonNull::new(base).unwrap_or_else(|| handle_alloc_error(layout));
        Self { base, len, capacity }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true; here because clippy wants a pair.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes that nobody writes while `self` is borrowed: an IO owns its buffer.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }

    /// The bytes, to write.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as `as_slice`, and `&mut self` excludes every other user.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }

    /// First address, for the device. The block does not move when the `AlignedBuf` does.
    pub(super) fn base_address(&self) -> NonNull<u8> {
        self.base
    }
}

impl std::fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AlignedBuf").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // SAFETY: `base` came from `alloc_zeroed` with this very layout and is freed once.
        unsafe { dealloc(self.base.as_ptr(), layout(self.capacity)) }
    }
}

fn whole_pages(len_bytes: usize) -> usize {
    len_bytes.max(1).next_multiple_of(PAGE_SIZE)
}

fn layout(capacity: usize) -> Layout {
    Layout::from_size_align(capacity, PAGE_SIZE).expect("a buffer is smaller than half the address space")
}

/// A thread's free buffers, by size class. A buffer that is not given back is freed as any other.
#[derive(Debug, Default)]
pub struct BufferPool {
    shelves: RefCell<Shelves>,
}

#[derive(Debug, Default)]
struct Shelves {
    free: [Vec<AlignedBuf>; CLASSES],
    kept_bytes: usize,
}

impl BufferPool {
    /// A pool that keeps nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// A buffer of `len_bytes` rounded up to whole pages. **Its bytes are whatever its last user left**: only for
    /// reads that fill all of it or writes that set all of it.
    pub fn take(&self, len_bytes: usize) -> AlignedBuf {
        let len = whole_pages(len_bytes);
        if len > LARGEST_POOLED_BYTES {
            return AlignedBuf::with_capacity(len, len);
        }
        let capacity = len.next_power_of_two();
        let mut shelves = self.shelves.borrow_mut();
        match shelves.free[class_of(capacity)].pop() {
            Some(mut buffer) => {
                shelves.kept_bytes -= buffer.capacity;
                buffer.len = len;
                buffer
            }
            None => AlignedBuf::with_capacity(len, capacity),
        }
    }

    /// A zeroed buffer of `len_bytes` rounded up to whole pages.
    pub fn take_zeroed(&self, len_bytes: usize) -> AlignedBuf {
        let mut buffer = self.take(len_bytes);
        buffer.as_mut_slice().fill(0);
        buffer
    }

    /// Gives a buffer back. It is freed if the pool is full or the buffer's size is not one the pool keeps.
    pub fn put(&self, buffer: AlignedBuf) {
        let mut shelves = self.shelves.borrow_mut();
        let fits = buffer.capacity <= LARGEST_POOLED_BYTES
            && buffer.capacity.is_power_of_two()
            && shelves.kept_bytes + buffer.capacity <= MOST_POOLED_BYTES;
        if fits {
            shelves.kept_bytes += buffer.capacity;
            shelves.free[class_of(buffer.capacity)].push(buffer);
        }
    }

    /// Bytes on the free lists.
    pub fn kept_bytes(&self) -> usize {
        self.shelves.borrow().kept_bytes
    }
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
    fn the_pool_reuses_within_its_bound() {
        let pool = BufferPool::new();
        let buffer = pool.take(3 * PAGE_SIZE);
        let address = buffer.base_address();
        assert_eq!(buffer.len(), 3 * PAGE_SIZE);
        pool.put(buffer);
        assert_eq!(pool.kept_bytes(), 4 * PAGE_SIZE);
        let mut again = pool.take(4 * PAGE_SIZE);
        assert_eq!((again.base_address(), again.len()), (address, 4 * PAGE_SIZE));
        again.as_mut_slice().fill(9);
        pool.put(again);
        let zeroed = pool.take_zeroed(4 * PAGE_SIZE);
        assert_eq!(zeroed.base_address(), address);
        assert!(zeroed.as_slice().iter().all(|&byte| byte == 0));
        assert_eq!(pool.kept_bytes(), 0);

        let many: Vec<_> = (0..40).map(|_| pool.take(LARGEST_POOLED_BYTES)).collect();
        many.into_iter().for_each(|buffer| pool.put(buffer));
        assert_eq!(pool.kept_bytes(), MOST_POOLED_BYTES);
        pool.put(AlignedBuf::zeroed(LARGEST_POOLED_BYTES + PAGE_SIZE));
        pool.put(AlignedBuf::zeroed(3 * PAGE_SIZE));
        assert_eq!(pool.kept_bytes(), MOST_POOLED_BYTES);
    }
}
