//! Changes of one file's extent records: cut, put, join; then the difference as puts and removes.

use super::error::MetaError;
use super::key;
use super::operation::RangeUpdate;
use super::record::{self, ExtentRecord};
use super::store::{Batch, Direction};
use super::view::View;
use cuttlefs_common::ids::{FilePage, InodeNo, PoolPage};
use cuttlefs_common::region::Extent;
use cuttlefs_common::status::Status;
use std::collections::BTreeMap;

/// The records in the changed ranges, as they were and as they will be.
#[derive(Debug, Default)]
pub(super) struct ExtentEdit {
    loaded: BTreeMap<u64, ExtentRecord>,
    working: BTreeMap<u64, ExtentRecord>,
    /// The stored record nearest below this page is loaded, if there is one. So a caller that goes from front to back looks for preceding records
    /// once: such a search walks over all records that were removed lately, and there may be many.
    looked_to: u64,
}

fn pages(records: &BTreeMap<u64, ExtentRecord>) -> u64 {
    records.values().map(|record| record.len_pages).sum()
}

/// Whether the second extent continues the first in the file and in the pool, in the same state.
fn joins(first: (u64, &ExtentRecord), second: (u64, &ExtentRecord)) -> bool {
    first.0 + first.1.len_pages == second.0
        && first.1.pool_page.0 + first.1.len_pages == second.1.pool_page.0
        && first.1.state == second.1.state
}

impl ExtentEdit {
    /// Makes `update.extents` the only extents in its range, and joins neighbours.
    pub(super) fn replace(
        &mut self,
        view: View<'_>,
        ino: InodeNo,
        update: &RangeUpdate,
    ) -> Result<(), MetaError> {
        check(update)?;
        if update.first == update.end {
            return Ok(());
        }
        self.load(view, ino, update.first, update.end)?;
        self.cut(update.first.0, update.end.0);
        for extent in &update.extents {
            self.working.insert(extent.file_page.0, ExtentRecord::from(*extent));
        }
        self.join(update.first.0, update.end.0);
        Ok(())
    }

    /// The number of pages held now, minus the number held before.
    pub(super) fn allocated_delta(&self) -> i128 {
        i128::from(pages(&self.working)) - i128::from(pages(&self.loaded))
    }

    /// Puts the difference into the batch.
    pub(super) fn write(&self, ino: InodeNo, batch: &mut Batch) {
        for page in self.loaded.keys().filter(|page| !self.working.contains_key(page)) {
            batch.remove(key::extent(ino, FilePage(*page)));
        }
        for (page, record) in &self.working {
            if self.loaded.get(page) != Some(record) {
                batch.put(key::extent(ino, FilePage(*page)), record::encode(record));
            }
        }
    }

    /// Loads the records that overlap or touch `first..end`.
    fn load(
        &mut self,
        view: View<'_>,
        ino: InodeNo,
        first: FilePage,
        end: FilePage,
    ) -> Result<(), MetaError> {
        let mut found = Vec::new();
        let from = if self.looked_to <= first.0 { self.looked_to } else { 0 };
        if let Some(before) = first.0.checked_sub(1).filter(|before| from <= *before) {
            view.extents(ino, FilePage(from), FilePage(before), Direction::Reverse, &mut |extent| {
                found.push(extent);
                false
            })?;
        }
        self.looked_to = self.looked_to.max(end.0.saturating_add(1));
        view.extents(ino, first, end, Direction::Forward, &mut |extent| {
            found.push(extent);
            true
        })?;
        for extent in found {
            let record = ExtentRecord::from(extent);
            // A record that was loaded before may have been changed or removed since, and must not be reset.
            if self.loaded.insert(extent.file_page.0, record).is_none() {
                self.working.insert(extent.file_page.0, record);
            }
        }
        Ok(())
    }

    /// Removes `first..end` from the extents, and splits those that reach over its ends.
    fn cut(&mut self, first: u64, end: u64) {
        let from = self.working.range(..first).next_back().map_or(first, |(page, _)| *page);
        let overlapping: Vec<_> =
            self.working.range(from..end).map(|(page, record)| (*page, *record)).collect();
        for (page, record) in overlapping {
            let record_end = page + record.len_pages;
            if record_end <= first {
                continue;
            }
            self.working.remove(&page);
            if page < first {
                self.working.insert(page, ExtentRecord { len_pages: first - page, ..record });
            }
            if record_end > end {
                let pool_page = PoolPage(record.pool_page.0 + (end - page));
                self.working.insert(end, ExtentRecord { pool_page, len_pages: record_end - end, ..record });
            }
        }
    }

    fn join(&mut self, first: u64, end: u64) {
        let from = self.working.range(..first).next_back().map_or(first, |(page, _)| *page);
        let near: Vec<_> = self.working.range(from..=end).map(|(page, record)| (*page, *record)).collect();
        let mut near = near.into_iter();
        let Some(mut last) = near.next() else { return };
        for next in near {
            if joins((last.0, &last.1), (next.0, &next.1)) {
                last.1.len_pages += next.1.len_pages;
                self.working.remove(&next.0);
                self.working.insert(last.0, last.1);
            } else {
                last = next;
            }
        }
    }
}

/// Checks that an update is well-formed. Regions make them so, but one may come from a log on a disk.
fn check(update: &RangeUpdate) -> Result<(), Status> {
    let mut at = update.first.0;
    for extent in &update.extents {
        let end = extent.file_page.0.checked_add(extent.len_pages).ok_or(Status::Invalid)?;
        let pool_end = extent.pool_page.0.checked_add(extent.len_pages);
        if extent.len_pages == 0 || extent.file_page.0 < at || end > update.end.0 || pool_end.is_none() {
            return Err(Status::Invalid);
        }
        at = end;
    }
    if update.first > update.end { Err(Status::Invalid) } else { Ok(()) }
}

/// The extents behind a file's new end that a trim frees, and the update that removes them.
pub(super) fn trim(
    view: View<'_>,
    ino: InodeNo,
    end: FilePage,
) -> Result<(RangeUpdate, Vec<Extent>), MetaError> {
    let mut freed = Vec::new();
    if let Some(before) = end.0.checked_sub(1) {
        view.extents(ino, FilePage(0), FilePage(before), Direction::Reverse, &mut |extent| {
            if extent.file_end() > end {
                let skipped = end.0 - extent.file_page.0;
                freed.push(Extent {
                    file_page: end,
                    pool_page: PoolPage(extent.pool_page.0 + skipped),
                    len_pages: extent.len_pages - skipped,
                    state: extent.state,
                });
            }
            false
        })?;
    }
    view.extents(ino, end, FilePage(u64::MAX), Direction::Forward, &mut |extent| {
        freed.push(extent);
        true
    })?;
    Ok((RangeUpdate { first: end, end: FilePage(u64::MAX), extents: Vec::new() }, freed))
}
