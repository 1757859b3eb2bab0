//! The addresses for anonymous mmap(2): which pages of the arena are taken.
//!
//! A bit a page, in memory of its own: an allocator that calls mmap(2) cannot be called from there. Its lock spins, for the same reason.

use cuttlefs_client::swap::wire::PAGE;
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering};

/// Which pages are taken: a bit each.
#[derive(Debug)]
pub(crate) struct Pages<'w> {
    words: &'w mut [u64],
    count: usize,
    /// Where the next search begins.
    hint: usize,
}

impl<'w> Pages<'w> {
    /// None is taken. There are as many pages as bits, or fewer.
    pub(crate) fn new(words: &'w mut [u64], count: usize) -> Self {
        let count = count.min(words.len() * 64);
        Self { words, count, hint: 0 }
    }

    fn is_taken(&self, page: usize) -> bool {
        self.words[page / 64] >> (page % 64) & 1 == 1
    }

    /// Takes pages in a row that are free: the first.
    pub(crate) fn take(&mut self, len: usize) -> Option<usize> {
        let found = self.find(self.hint, len).or_else(|| self.find(0, len))?;
        self.mark(found, len, true);
        self.hint = found + len;
        Some(found)
    }

    fn find(&self, from: usize, len: usize) -> Option<usize> {
        let (mut start, mut at) = (from, from);
        while at < self.count {
            if at.is_multiple_of(64) && self.words[at / 64] == u64::MAX {
                at += 64;
                start = at;
            } else if self.is_taken(at) {
                at += 1;
                start = at;
            } else {
                at += 1;
                if at - start == len {
                    return Some(start);
                }
            }
        }
        None
    }

    /// Takes exactly these pages, if all are free.
    pub(crate) fn take_at(&mut self, first: usize, len: usize) -> bool {
        let is_free = first.checked_add(len).is_some_and(|end| end <= self.count)
            && (first..first + len).all(|page| !self.is_taken(page));
        if is_free {
            self.mark(first, len, true);
        }
        is_free
    }

    /// Gives pages back.
    pub(crate) fn give(&mut self, first: usize, len: usize) {
        self.mark(first, len, false);
        self.hint = self.hint.min(first);
    }

    fn mark(&mut self, first: usize, len: usize, taken: bool) {
        for page in first..(first + len).min(self.count) {
            let bit = 1 << (page % 64);
            if taken {
                self.words[page / 64] |= bit;
            } else {
                self.words[page / 64] &= !bit;
            }
        }
    }
}

/// The arena of this process.
pub(crate) struct Arena {
    pub(crate) start: usize,
    pub(crate) len: usize,
    pub(crate) pages: Pages<'static>,
}

impl Arena {
    /// Whether a range lies in it, and is one of whole pages.
    pub(crate) fn has(&self, address: usize, len: usize) -> bool {
        len > 0
            && address.is_multiple_of(PAGE)
            && address >= self.start
            && address.checked_add(len).is_some_and(|end| end <= self.start + self.len)
    }

    /// The number of the page at an address.
    pub(crate) fn page(&self, address: usize) -> usize {
        (address - self.start) / PAGE
    }

    /// The address of a page.
    pub(crate) fn address(&self, page: usize) -> usize {
        self.start + page * PAGE
    }
}

/// The arena and its lock.
pub(crate) struct Shared {
    is_locked: AtomicBool,
    arena: UnsafeCell<Option<Arena>>,
}

// SAFETY: the arena is reached by `with` alone, which holds the lock.
unsafe impl Sync for Shared {}

/// There is no arena before `begin`, and none in programs that are not swapped.
pub(crate) static ARENA: Shared = Shared { is_locked: AtomicBool::new(false), arena: UnsafeCell::new(None) };

impl Shared {
    /// Takes the lock: also before a fork, so that no other thread has it then.
    pub(crate) fn lock(&self) {
        while self.is_locked.swap(true, Ordering::Acquire) {
            std::thread::yield_now();
        }
    }

    /// Gives the lock back.
    pub(crate) fn unlock(&self) {
        self.is_locked.store(false, Ordering::Release);
    }

    /// Does something with the arena, if there is one. It must not fault in memory that is swapped, call mmap(2), or wait.
    pub(crate) fn with<T>(&self, work: impl FnOnce(&mut Arena) -> T) -> Option<T> {
        self.lock();
        // SAFETY: only who holds the lock is here, and `work` cannot come here again.
        let result = unsafe { &mut *self.arena.get() }.as_mut().map(work);
        self.unlock();
        result
    }

    /// Sets the arena.
    pub(crate) fn set(&self, arena: Arena) {
        self.lock();
        // SAFETY: only who holds the lock is here.
        unsafe { *self.arena.get() = Some(arena) };
        self.unlock();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pages_are_taken_once(steps in proptest::collection::vec((0usize..3, 0usize..210, 1usize..70), 1..80)) {
            let mut words = [0; 4];
            let mut pages = Pages::new(&mut words, 200);
            let mut model = [false; 200];
            for (what, at, len) in steps {
                match what {
                    0 => match pages.take(len) {
                        Some(first) => {
                            prop_assert!(model[first..first + len].iter().all(|taken| !taken));
                            model[first..first + len].fill(true);
                        }
                        None => prop_assert!(!model.windows(len).any(|run| run.iter().all(|taken| !taken))),
                    },
                    1 => {
                        let is_free = at + len <= 200 && model[at..at + len].iter().all(|taken| !taken);
                        prop_assert_eq!(pages.take_at(at, len), is_free);
                        if is_free {
                            model[at..at + len].fill(true);
                        }
                    }
                    _ => {
                        pages.give(at, len);
                        let end = (at + len).min(200);
                        model[at.min(end)..end].fill(false);
                    }
                }
            }
        }
    }

    #[test]
    fn ranges_of_the_arena_are_whole_pages_inside() {
        let words: &'static mut [u64] = Box::leak(Box::new([0; 1]));
        let arena = Arena { start: 0x10000, len: 0x10000, pages: Pages::new(words, 16) };
        assert!(arena.has(0x10000, 0x10000) && arena.has(0x1f000, 1));
        for (address, len) in
            [(0x10000, 0), (0x10001, 8), (0xf000, 0x2000), (0x1f000, 0x1001), (0x1f000, usize::MAX)]
        {
            assert!(!arena.has(address, len), "{address:#x} {len:#x}");
        }
        assert_eq!(arena.address(arena.page(0x13000)), 0x13000);
    }
}
