//! The checkpoint: all records up to some batch, in a B-tree of redb.
//!
//! redb writes to free pages only and changes its root with one write between two syncs. So after any crash the file has the last complete
//! checkpoint: no page of it is overwritten before its replacement is durable. sled 0.34 does not promise that: it reuses a segment of its log after
//! `sync_file_range`, which makes nothing durable (`meta/tests/power.rs`).
//!
//! * Each commit also stores redb's own free pages (`set_quick_repair`), so that opening does not walk through the tree.
//! * In the same commit as the records are totals of them, which must not be counted at each start: `Tally`, and the map of the pages that extents
//!   have (`page_map`). Both are updated by the old and the new value of each record that is written, so that they agree with the records of any
//!   checkpoint that is found after a crash (docs/pages.md, "Reuse of a page").
//!
//! # A file that is mostly empty
//! redb gives back little of the space of deleted records. Its own way to make a file smaller, `compact`, commits the moved pages and the root that
//! names them in one sync. After a power loss redb's own sums would have to tell which pages are there, but the sums below it refuse missing blocks
//! before redb can look at them. So a file is made smaller in another way: its records are written in order to a new file, which is durable before it
//! takes the old one's name (`moved`). Readers of the old file go on reading it; the last of them closes it.
//!
//! # Failure
//! A device error is final: redb refuses further work, and the store is poisoned. A full disk is no error (`summed_file`).

use super::overlay::Overlay;
use super::space::Space;
use super::summed_file::{Draft, SummedFile};
use super::tally::Tally;
use crate::meta::page_map::{self, PageChanges, PageMap, PartBits, PartKey};
use crate::meta::record;
use crate::meta::store::StoreError;
use cuttlefs_common::panic_ends;
use redb::{
    Database, Durability, ReadOnlyTable, ReadableDatabase, ReadableTable, TableDefinition, TableError,
    WriteTransaction,
};
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Name of the file of records.
pub(super) const FILE_NAME: &str = "records";
/// Name of the file that is to replace it.
pub(super) const DRAFT_NAME: &str = "records.new";
/// The name under which syncs of the directory are told.
pub(super) const DIRECTORY: &str = "meta";
const RECORDS: TableDefinition<'static, &[u8], &[u8]> = TableDefinition::new("records");
const PAGES: TableDefinition<'static, u64, &[u8]> = TableDefinition::new("pages");
const STATE: TableDefinition<'static, &str, &[u8]> = TableDefinition::new("state");
/// The number of the last batch in the records.
const APPLIED: &str = "applied";
const TALLY: &str = "tally";

type Pair = (Vec<u8>, Vec<u8>);

pub(super) fn failed(operation: &'static str, error: impl Into<redb::Error>) -> StoreError {
    StoreError::Backend { operation, source: Box::new(error.into()) }
}

/// The opened file of records.
#[derive(Debug)]
pub(super) struct Checkpoint {
    database: Arc<Database>,
    directory: PathBuf,
    cache_bytes: u64,
}

/// The records of one checkpoint, which stay as they are while others are made.
pub(super) struct Snapshot {
    table: ReadOnlyTable<&'static [u8], &'static [u8]>,
    pages: ReadOnlyTable<u64, &'static [u8]>,
    /// The number of the last batch in it.
    pub applied: u64,
    /// The totals of the records.
    pub tally: Tally,
    /// Keeps the file open as long as this is used.
    _database: Arc<Database>,
}

impl std::fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Snapshot").field("applied", &self.applied).finish_non_exhaustive()
    }
}

impl Checkpoint {
    /// Opens the checkpoint in `directory`, or makes an empty one if there is none.
    ///
    /// # Errors
    /// [`StoreError::Backend`] if it is in use, damaged, or cannot be read.
    pub(super) fn open(directory: &Path, cache_bytes: u64, space: Arc<Space>) -> Result<Self, StoreError> {
        let backend = |e| StoreError::Backend { operation: "open", source: Box::new(e) };
        remove_draft(directory).map_err(backend)?;
        let file = open_file(&directory.join(FILE_NAME)).map_err(backend)?;
        let database = open_database(file, Draft::default(), cache_bytes, space)?;
        Ok(Self { database: Arc::new(database), directory: directory.to_owned(), cache_bytes })
    }

    /// Writes the checkpoint to a new file, which takes this one's place; `None` if there is no space for it. Readers of the old file keep it. Nobody
    /// may write to it meanwhile.
    ///
    /// # Errors
    /// [`StoreError::Backend`].
    pub(super) fn moved(&self, snapshot: &Snapshot, space: &Arc<Space>) -> Result<Option<Self>, StoreError> {
        let backend = |e| StoreError::Backend { operation: "give space back", source: Box::new(e) };
        let draft = self.directory.join(DRAFT_NAME);
        let is_draft: Draft = Arc::new(true.into());
        let before = file_bytes(&self.directory);
        let made = match self.draft(snapshot, &draft, &is_draft, space) {
            Ok(made) => made,
            Err(error) => {
                // Nobody relies on the new file yet.
                tracing::warn!(%error, "metadata: space could not be given back");
                remove_draft(&self.directory).map_err(backend)?;
                return Ok(None);
            }
        };
        // The new file is durable. Its name must be durable as well, before anything is written to it or removed from the log.
        std::fs::rename(draft, self.directory.join(FILE_NAME)).map_err(backend)?;
        let directory = File::open(&self.directory).map_err(backend)?;
        space.sync(DIRECTORY, &directory).map_err(backend)?;
        is_draft.store(false, Ordering::Relaxed);
        tracing::info!(before, now = file_bytes(&self.directory), "metadata: space was given back");
        Ok(Some(made))
    }

    fn draft(
        &self,
        snapshot: &Snapshot,
        path: &Path,
        is_draft: &Draft,
        space: &Arc<Space>,
    ) -> Result<Self, StoreError> {
        let backend = |e| StoreError::Backend { operation: "give space back", source: Box::new(e) };
        remove_draft(&self.directory).map_err(backend)?;
        let file = open_file(path).map_err(backend)?;
        let database = open_database(file, is_draft.clone(), self.cache_bytes, space.clone())?;
        let made = Self { database: Arc::new(database), directory: self.directory.clone(), ..*self };
        let transaction = made.begin()?;
        {
            let failed = |e: redb::StorageError| failed("give space back", e);
            let mut records =
                transaction.open_table(RECORDS).map_err(|e| self::failed("give space back", e))?;
            for pair in snapshot.table.iter().map_err(failed)? {
                let (key, value) = pair.map_err(failed)?;
                records.insert(key.value(), value.value()).map_err(failed)?;
            }
            let mut pages = transaction.open_table(PAGES).map_err(|e| self::failed("give space back", e))?;
            for part in snapshot.pages.iter().map_err(failed)? {
                let (key, value) = part.map_err(failed)?;
                pages.insert(key.value(), value.value()).map_err(failed)?;
            }
        }
        let told = [(APPLIED, record::encode(&snapshot.applied)), (TALLY, record::encode(&snapshot.tally))];
        Self::commit(transaction, &told)?;
        Ok(made)
    }

    /// A snapshot of the last checkpoint.
    ///
    /// # Errors
    /// [`StoreError::Backend`].
    pub(super) fn snapshot(&self) -> Result<Snapshot, StoreError> {
        let transaction = self.database.begin_read().map_err(|e| failed("read", e))?;
        let (records, state) = match (transaction.open_table(RECORDS), transaction.open_table(STATE)) {
            (Ok(records), Ok(state)) => (records, state),
            // The file is new: an empty checkpoint is written first, so that there always is one.
            (Err(TableError::TableDoesNotExist(_)), _) => {
                drop(transaction);
                self.write(&Overlay::default(), 0, &Tally::default())?;
                return self.snapshot();
            }
            (Err(error), _) | (_, Err(error)) => return Err(failed("read", error)),
        };
        let pages = match transaction.open_table(PAGES) {
            Ok(pages) => pages,
            // The file is of a version that read all extents at each start.
            Err(TableError::TableDoesNotExist(_)) => {
                drop((transaction, records, state));
                self.recount()?;
                return self.snapshot();
            }
            Err(error) => return Err(failed("read", error)),
        };
        let number = |name| -> Result<Vec<u8>, StoreError> {
            let value = state.get(name).map_err(|e| failed("read", e))?;
            let missing = || failed("read", redb::Error::Corrupted(format!("no {name} in the checkpoint")));
            Ok(value.ok_or_else(missing)?.value().to_vec())
        };
        let malformed = |e: record::RecordError| failed("read", redb::Error::Corrupted(e.to_string()));
        let applied = record::parse(&number(APPLIED)?).map_err(malformed)?;
        let tally = record::parse(&number(TALLY)?).map_err(malformed)?;
        Ok(Snapshot { table: records, pages, applied, tally, _database: self.database.clone() })
    }

    /// Writes the changes of an overlay; they are durable when this returns. `applied` is the last batch in it, `tally` has the totals of the
    /// checkpoint before.
    ///
    /// # Errors
    /// [`StoreError::Backend`]; final.
    pub(super) fn write(&self, overlay: &Overlay, applied: u64, tally: &Tally) -> Result<(), StoreError> {
        let transaction = self.begin()?;
        let mut tally = tally.clone();
        let mut changes = PageChanges::default();
        {
            let mut records = transaction.open_table(RECORDS).map_err(|e| failed("checkpoint", e))?;
            overlay.visit(|key, value| {
                let old = match value {
                    Some(value) => records.insert(key, value),
                    None => records.remove(key),
                };
                let old = old.map_err(|e| failed("checkpoint", e))?;
                let old = old.as_ref().map(redb::AccessGuard::value);
                tally.change(key, old, value);
                changes.change(key, old, value);
                Ok::<(), StoreError>(())
            })?;
            let mut pages = transaction.open_table(PAGES).map_err(|e| failed("checkpoint", e))?;
            for (key, change) in changes.into_parts() {
                let (mut bits, old_len) = {
                    let found = pages.get(key.0).map_err(|e| failed("checkpoint", e))?;
                    let found = found.as_ref().map(redb::AccessGuard::value);
                    (parsed(found)?, found.map(<[u8]>::len))
                };
                tally.contradictions += change.apply(&mut bits);
                let value = page_map::encode(&bits);
                tally.change_map(old_len, value.as_ref().map(Vec::len));
                match value {
                    Some(value) => pages.insert(key.0, value.as_slice()).map(drop),
                    None => pages.remove(key.0).map(drop),
                }
                .map_err(|e| failed("checkpoint", e))?;
            }
        }
        Self::commit(transaction, &[(APPLIED, record::encode(&applied)), (TALLY, record::encode(&tally))])
    }

    /// Computes the totals anew from the records.
    ///
    /// # Errors
    /// [`StoreError::Backend`]; final.
    pub(super) fn recount(&self) -> Result<(), StoreError> {
        let transaction = self.begin()?;
        let (mut tally, mut map) = (Tally::default(), PageMap::default());
        {
            let records = transaction.open_table(RECORDS).map_err(|e| failed("recount", e))?;
            for record in records.iter().map_err(|e| failed("recount", e))? {
                let (key, value) = record.map_err(|e| failed("recount", e))?;
                tally.change(key.value(), None, Some(value.value()));
                map.add(key.value(), value.value());
            }
            tally.contradictions = map.contradictions;
            transaction.delete_table(PAGES).map_err(|e| failed("recount", e))?;
            let mut pages = transaction.open_table(PAGES).map_err(|e| failed("recount", e))?;
            let mut inserted = Ok(());
            map.visit(&mut |key, bits| {
                if let (Some(value), Ok(())) = (page_map::encode(bits), &inserted) {
                    tally.change_map(None, Some(value.len()));
                    inserted = pages.insert(key.0, value.as_slice()).map(drop);
                }
            });
            inserted.map_err(|e| failed("recount", e))?;
        }
        Self::commit(transaction, &[(TALLY, record::encode(&tally))])
    }

    /// The bytes of the file that are in use, counted by a walk through all of it.
    ///
    /// # Errors
    /// [`StoreError::Backend`]; final.
    pub(super) fn count_used_bytes(&self) -> Result<u64, StoreError> {
        // Pages that a commit replaced become free with the next commit.
        Self::commit(self.begin()?, &[])?;
        let transaction = self.begin()?;
        let found = transaction.stats().map_err(|e| failed("count pages", e))?;
        transaction.abort().map_err(|e| failed("count pages", e))?;
        Ok(found.allocated_pages() * found.page_size() as u64)
    }

    fn begin(&self) -> Result<WriteTransaction, StoreError> {
        let mut transaction = self.database.begin_write().map_err(|e| failed("checkpoint", e))?;
        transaction.set_durability(Durability::Immediate).map_err(|e| failed("checkpoint", e))?;
        transaction.set_quick_repair(true);
        Ok(transaction)
    }

    fn commit(transaction: WriteTransaction, told: &[(&str, Vec<u8>)]) -> Result<(), StoreError> {
        {
            let mut state = transaction.open_table(STATE).map_err(|e| failed("checkpoint", e))?;
            for (name, value) in told {
                state.insert(*name, value.as_slice()).map_err(|e| failed("checkpoint", e))?;
            }
        }
        transaction.commit().map_err(|e| failed("checkpoint", e))
    }

    /// Removes the map of pages, as if there never was one.
    #[cfg(test)]
    pub fn forget_pages(&self) {
        let transaction = self.begin().expect("begins");
        assert!(transaction.delete_table(PAGES).expect("deletes"), "it was there");
        transaction.commit().expect("commits");
    }

    /// Makes a part of the map of pages wrong.
    #[cfg(test)]
    pub fn plant(&self, key: PartKey, change: impl FnOnce(&mut PartBits)) {
        let transaction = self.begin().expect("begins");
        {
            let mut pages = transaction.open_table(PAGES).expect("opens");
            let mut bits = parsed(pages.get(key.0).expect("reads").as_ref().map(redb::AccessGuard::value))
                .expect("parses");
            change(&mut bits);
            match page_map::encode(&bits) {
                Some(value) => drop(pages.insert(key.0, value.as_slice()).expect("writes")),
                None => drop(pages.remove(key.0).expect("writes")),
            }
        }
        transaction.commit().expect("commits");
    }
}

fn open_file(path: &Path) -> io::Result<File> {
    let file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
    file.try_lock()?;
    Ok(file)
}

fn open_database(
    file: File,
    is_draft: Draft,
    cache_bytes: u64,
    space: Arc<Space>,
) -> Result<Database, StoreError> {
    let file = SummedFile::new(file, is_draft, space);
    let file = file.map_err(|e| StoreError::Backend { operation: "open", source: Box::new(e) })?;
    let mut builder = Database::builder();
    builder.set_cache_size(cache_bytes as usize);
    // The recovery may meet damage that the blocks' sums do not show.
    let opened = panic_ends::survive(|| builder.create_with_backend(file));
    let damaged = |_| {
        let told = "meta/records contradicts itself; restore the pool from a copy";
        redb::Error::Corrupted(told.to_owned())
    };
    opened.map_err(|e| failed("open", damaged(e)))?.map_err(|e| failed("open", e))
}

/// Removes the draft of a process that died.
fn remove_draft(directory: &Path) -> io::Result<()> {
    match std::fs::remove_file(directory.join(DRAFT_NAME)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

/// Bytes that the file of records in a directory takes on its disk.
pub(super) fn file_bytes(directory: &Path) -> u64 {
    std::fs::metadata(directory.join(FILE_NAME)).map_or(0, |found| found.blocks() * 512)
}

/// Decodes a part of the map of pages.
fn parsed(value: Option<&[u8]>) -> Result<PartBits, StoreError> {
    page_map::decode(value)
        .map_err(|e| failed("read", redb::Error::Corrupted(format!("the map of pages: {e}"))))
}

impl Snapshot {
    /// Reads one record.
    ///
    /// # Errors
    /// [`StoreError::Backend`].
    pub(super) fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        let value = self.table.get(key).map_err(|e| failed("get", e))?;
        Ok(value.map(|value| value.value().to_vec()))
    }

    /// The records of `from <= key < to`, from either end.
    ///
    /// # Errors
    /// [`StoreError::Backend`].
    pub(super) fn range(
        &self,
        from: &[u8],
        to: &[u8],
    ) -> Result<impl DoubleEndedIterator<Item = Result<Pair, StoreError>> + use<>, StoreError> {
        let range = self.table.range::<&[u8]>(from..to).map_err(|e| failed("scan", e))?;
        Ok(range.map(|pair| {
            let (key, value) = pair.map_err(|e| failed("scan", e))?;
            Ok((key.value().to_vec(), value.value().to_vec()))
        }))
    }

    /// The records of a kind, to be asked for in the order of their keys.
    ///
    /// # Errors
    /// [`StoreError::Backend`].
    pub(super) fn ascending(&self, kind: u8) -> Result<Ascending<'_>, StoreError> {
        let to = vec![kind + 1];
        let mut rest = Box::new(self.range(&[kind], &to)?);
        Ok(Ascending { next: rest.next().transpose()?, rest, snapshot: self, to })
    }

    /// The map of pages.
    ///
    /// # Errors
    /// [`StoreError::Backend`].
    pub(super) fn pages(
        &self,
    ) -> Result<impl Iterator<Item = Result<(PartKey, PartBits), StoreError>> + use<>, StoreError> {
        let parts = self.pages.range::<u64>(..).map_err(|e| failed("scan", e))?;
        Ok(parts.map(|part| {
            let (key, value) = part.map_err(|e| failed("scan", e))?;
            Ok((PartKey(key.value()), parsed(Some(value.value()))?))
        }))
    }
}

/// Records of a kind, asked for in the order of their keys. It walks from record to record if they are neighbours or behind all existing ones, as new
/// ones mostly are, and descends the tree otherwise.
pub(super) struct Ascending<'a> {
    snapshot: &'a Snapshot,
    to: Vec<u8>,
    /// The first record that is not before the last key that was asked for; `None` if there is none.
    next: Option<Pair>,
    rest: Box<dyn Iterator<Item = Result<Pair, StoreError>>>,
}

impl Ascending<'_> {
    /// Reads one record, whose key is behind those asked for before.
    ///
    /// # Errors
    /// [`StoreError::Backend`].
    pub(super) fn get(&mut self, key: &[u8]) -> Result<Option<&[u8]>, StoreError> {
        for is_far in [false, true] {
            if self.next.as_ref().is_some_and(|(next, _)| next.as_slice() < key) {
                if is_far {
                    self.rest = Box::new(self.snapshot.range(key, &self.to)?);
                }
                self.next = self.rest.next().transpose()?;
            }
        }
        Ok(self.next.as_ref().filter(|(next, _)| next == key).map(|(_, value)| value.as_slice()))
    }
}
