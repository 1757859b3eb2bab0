//! Counts the bytes that the current thread asks of the allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    // No destructor and no lazy initialiser: the allocator may look at it at any moment of a thread's life.
    static ALLOCATED_BYTES: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count(bytes: usize) {
    ALLOCATED_BYTES.set(ALLOCATED_BYTES.get().saturating_add(bytes));
}

// SAFETY: every call goes to the system's allocator unchanged; counting neither allocates nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promise about `layout` is what `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the block came from `System` with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(new_size);
        // SAFETY: the block came from `System` with this layout.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}

/// The value of `run`, and the bytes that it asked of the allocator, including those that it freed.
pub fn counted<T>(run: impl FnOnce() -> T) -> (T, usize) {
    let before = ALLOCATED_BYTES.get();
    let value = run();
    (value, ALLOCATED_BYTES.get() - before)
}

#[test]
fn it_counts() {
    let (list, bytes) = counted(|| vec![0u8; 1000]);
    assert_eq!(list.len(), 1000);
    assert!((1000..2000).contains(&bytes), "{bytes}");
}
