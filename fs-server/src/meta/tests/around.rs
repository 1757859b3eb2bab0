//! Stores for tests that wrap another store and change a few of its operations.

use super::super::{Batch, Direction, PartVisitor, Store, StoreError, StoreFigures, Visitor};

/// A store around another one. Each operation that it does not override is the inner store's.
pub(super) trait Around: Send + Sync {
    fn inner(&self) -> &dyn Store;

    fn get_record(&self, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        self.inner().get(key)
    }

    fn scan_records(
        &self,
        from: &[u8],
        to: &[u8],
        direction: Direction,
        visit: Visitor<'_>,
    ) -> Result<(), StoreError> {
        self.inner().scan(from, to, direction, visit)
    }

    fn commit_batch(&self, batch: Batch) -> Result<(), StoreError> {
        self.inner().commit(batch)
    }

    fn room(&self) -> u64 {
        self.inner().room_bytes()
    }
}

impl<T: Around> Store for T {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        self.get_record(key)
    }

    fn scan(
        &self,
        from: &[u8],
        to: &[u8],
        direction: Direction,
        visit: Visitor<'_>,
    ) -> Result<(), StoreError> {
        self.scan_records(from, to, direction, visit)
    }

    fn commit(&self, batch: Batch) -> Result<(), StoreError> {
        self.commit_batch(batch)
    }

    fn flush(&self) -> Result<(), StoreError> {
        self.inner().flush()
    }

    fn is_durable(&self) -> bool {
        self.inner().is_durable()
    }

    fn count(&self, kind: u8) -> Result<u64, StoreError> {
        self.inner().count(kind)
    }

    fn pages(&self, visit: PartVisitor<'_>) -> Result<u64, StoreError> {
        self.inner().pages(visit)
    }

    fn settle(&self) -> Result<(), StoreError> {
        self.inner().settle()
    }

    fn recount(&self) -> Result<(), StoreError> {
        self.inner().recount()
    }

    fn room_bytes(&self) -> u64 {
        self.room()
    }

    fn takes_contents(&self) -> bool {
        self.inner().takes_contents()
    }

    fn figures(&self) -> StoreFigures {
        self.inner().figures()
    }

    fn size_on_disk_bytes(&self) -> Result<u64, StoreError> {
        self.inner().size_on_disk_bytes()
    }
}
