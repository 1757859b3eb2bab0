//! Block locks: the right to change a pool page's bytes or place (the page protocol in docs/pages.md).
//!
//! A fixed array of async mutexes, hashed by pool page. Two pages may share a lock; that costs time only.
//!
//! # Invariants
//! * Several locks are only ever taken through [`BlockLocks::lock_many`], which sorts and deduplicates, and no task
//!   waits for a lock while it holds one taken otherwise: no cycle can form.
//! * Eviction only tries; it never waits.

use crate::sync::{AsyncMutex, AsyncMutexGuard};
use cuttlefs_common::ids::PoolPage;

/// The number of locks. It is many times the pages of the largest request (257), so that two requests for different pages seldom meet, and a power of
/// two, so that the hash is a mask. 4096 mutexes take 64 KiB. Few in models, which make them anew for each order of steps.
pub(super) const BLOCK_LOCKS: usize = if cfg!(feature = "model-check") { 4 } else { 4096 };
const _: () = assert!(BLOCK_LOCKS.is_power_of_two());

/// The block locks of a pool.
#[derive(Debug)]
pub(crate) struct BlockLocks {
    locks: Box<[AsyncMutex<()>]>,
}

/// Held block locks, which are released together.
pub(super) type BlockGuards<'a> = Vec<AsyncMutexGuard<'a, ()>>;

impl Default for BlockLocks {
    fn default() -> Self {
        Self::new(BLOCK_LOCKS)
    }
}

impl BlockLocks {
    /// `count` locks (a power of two). Tests make few, so that pages share locks.
    pub(crate) fn new(count: usize) -> Self {
        assert!(count.is_power_of_two(), "the hash masks");
        Self { locks: (0..count).map(|_| AsyncMutex::new(())).collect() }
    }

    fn index(&self, page: PoolPage) -> usize {
        // Neighbouring pages get different locks, so that a request for a run of pages never waits for itself.
        page.0 as usize & (self.locks.len() - 1)
    }

    /// Takes the lock of one page if it is free.
    pub(crate) fn try_lock(&self, page: PoolPage) -> Option<AsyncMutexGuard<'_, ()>> {
        self.locks[self.index(page)].try_lock()
    }

    /// Takes the locks of all pages if all are free.
    pub(crate) fn try_lock_many(&self, pages: impl IntoIterator<Item = PoolPage>) -> Option<BlockGuards<'_>> {
        let mut indexes: Vec<usize> = pages.into_iter().map(|page| self.index(page)).collect();
        indexes.sort_unstable();
        indexes.dedup();
        indexes.into_iter().map(|index| self.locks[index].try_lock()).collect()
    }

    /// Waits for the locks of all pages, in lock order. The caller holds no other block lock.
    pub(crate) async fn lock_many(&self, pages: impl IntoIterator<Item = PoolPage>) -> BlockGuards<'_> {
        let mut indexes: Vec<usize> = pages.into_iter().map(|page| self.index(page)).collect();
        indexes.sort_unstable();
        indexes.dedup();
        let mut guards = Vec::with_capacity(indexes.len());
        for index in indexes {
            guards.push(self.locks[index].lock().await);
        }
        guards
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_lite::future::block_on;

    #[test]
    fn pages_that_share_a_lock_are_locked_once_and_all_are_released() {
        let locks = BlockLocks::new(4);
        let guards = block_on(locks.lock_many([9, 1, 5, 2, 2].map(PoolPage)));
        assert_eq!(guards.len(), 2);
        assert!(locks.try_lock(PoolPage(13)).is_none());
        assert!(locks.try_lock(PoolPage(6)).is_none());
        assert!(locks.try_lock(PoolPage(3)).is_some());
        drop(guards);
        assert!(locks.try_lock(PoolPage(13)).is_some());
    }

    #[test]
    fn opposite_orders_do_not_deadlock() {
        let locks = std::sync::Arc::new(BlockLocks::new(8));
        let threads: Vec<_> = (0..4u64)
            .map(|thread| {
                let locks = locks.clone();
                std::thread::spawn(move || {
                    for round in 0..2000u64 {
                        let mut pages: Vec<_> = (0..6).map(|i| PoolPage(i * 3 + thread + round)).collect();
                        if thread % 2 == 0 {
                            pages.reverse();
                        }
                        drop(block_on(locks.lock_many(pages)));
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().expect("no panic");
        }
    }
}
