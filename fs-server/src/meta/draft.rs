//! The changes that an operation is about to make: typed edits over a `View`, which later steps of the same operation can read, and which become one
//! batch at the end.

use super::error::MetaError;
use super::extent_edit::ExtentEdit;
use super::key;
use super::name::{Cookie, SLOTS_PER_BUCKET};
use super::operation::Outcome;
use super::record::{self, BucketRecord, EntryRecord, InodeRecord};
use super::store::{Batch, VALUE_MAX_BYTES};
use super::view::{Found, View};
use cuttlefs_common::attr::FileKind;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::status::Status;
use std::collections::BTreeMap;

/// The result of `apply`, which has not changed anything yet.
#[derive(Debug)]
pub struct Applied {
    /// The batch to commit; empty if nothing changes.
    pub batch: Batch,
    /// The result of the operation once the batch is committed.
    pub outcome: Outcome,
    /// The changed inodes as the batch leaves them; `None` if removed.
    pub inodes: BTreeMap<InodeNo, Option<InodeRecord>>,
}

#[derive(Clone)]
struct Entry {
    slot: u8,
    ino: InodeNo,
    kind: FileKind,
    name: Vec<u8>,
}

/// The edits of one operation.
pub(super) struct Draft<'v> {
    pub view: View<'v>,
    pub batch: Batch,
    inodes: BTreeMap<InodeNo, Option<InodeRecord>>,
    buckets: BTreeMap<(InodeNo, u64), Vec<Entry>>,
    extents: BTreeMap<InodeNo, ExtentEdit>,
}

impl<'v> Draft<'v> {
    pub(super) fn new(view: View<'v>) -> Self {
        Self {
            view,
            batch: Batch::default(),
            inodes: BTreeMap::new(),
            buckets: BTreeMap::new(),
            extents: BTreeMap::new(),
        }
    }

    pub(super) fn inode_if_any(&self, ino: InodeNo) -> Result<Option<InodeRecord>, MetaError> {
        match self.inodes.get(&ino) {
            Some(record) => Ok(*record),
            None => self.view.inode(ino),
        }
    }

    /// The inode that a client named. If it is gone, the client's handle is stale.
    pub(super) fn inode(&self, ino: InodeNo) -> Result<InodeRecord, MetaError> {
        self.inode_if_any(ino)?.ok_or(MetaError::Refused(Status::Stale))
    }

    /// The inode that an entry names. It must exist.
    pub(super) fn inode_of_entry(&self, ino: InodeNo) -> Result<InodeRecord, MetaError> {
        self.inode_if_any(ino)?.ok_or(MetaError::Inconsistent { what: "an entry names no inode", ino: ino.0 })
    }

    /// A directory in which names can be looked up and changed.
    pub(super) fn directory(&self, ino: InodeNo) -> Result<InodeRecord, MetaError> {
        let record = self.inode(ino)?;
        match (record.is_directory(), record.nlink) {
            (false, _) => Err(Status::NotDirectory.into()),
            // The directory was removed, but is still the working directory of a process.
            (true, 0) => Err(Status::NotFound.into()),
            (true, _) => Ok(record),
        }
    }

    pub(super) fn put_inode(&mut self, ino: InodeNo, record: InodeRecord) {
        self.inodes.insert(ino, Some(record));
    }

    pub(super) fn remove_inode(&mut self, ino: InodeNo) {
        self.inodes.insert(ino, None);
    }

    /// Changes an inode that was read before.
    pub(super) fn edit_inode(
        &mut self,
        ino: InodeNo,
        edit: impl FnOnce(&mut InodeRecord),
    ) -> Result<InodeRecord, MetaError> {
        let mut record = self.inode_of_entry(ino)?;
        edit(&mut record);
        self.put_inode(ino, record);
        Ok(record)
    }

    fn bucket(&mut self, parent: InodeNo, hash: u64) -> Result<&mut Vec<Entry>, MetaError> {
        use std::collections::btree_map::Entry as Slot;
        match self.buckets.entry((parent, hash)) {
            Slot::Occupied(known) => Ok(known.into_mut()),
            Slot::Vacant(unknown) => {
                let mut entries = Vec::new();
                if let Some(value) = self.view.bucket(parent, hash)? {
                    let bucket = record::parse_bucket(&value)
                        .map_err(MetaError::record(&key::bucket(parent, hash)))?;
                    entries.extend(bucket.entries.iter().map(|entry| Entry {
                        slot: entry.slot,
                        ino: entry.ino,
                        kind: entry.kind,
                        name: entry.name.to_vec(),
                    }));
                }
                Ok(unknown.insert(entries))
            }
        }
    }

    pub(super) fn find(&mut self, parent: InodeNo, name: &[u8]) -> Result<Option<Found>, MetaError> {
        let hash = self.view.hash(name);
        let entry = self.bucket(parent, hash)?.iter().find(|entry| entry.name == name);
        Ok(entry.map(|entry| Found {
            ino: entry.ino,
            kind: entry.kind,
            cookie: Cookie::new(hash, entry.slot),
        }))
    }

    pub(super) fn find_existing(&mut self, parent: InodeNo, name: &[u8]) -> Result<Found, MetaError> {
        self.find(parent, name)?.ok_or(MetaError::Refused(Status::NotFound))
    }

    /// Adds an entry in the bucket's first free slot. The caller has checked that the name is free.
    pub(super) fn add_entry(
        &mut self,
        parent: InodeNo,
        name: &[u8],
        ino: InodeNo,
        kind: FileKind,
    ) -> Result<(), MetaError> {
        let hash = self.view.hash(name);
        let entries = self.bucket(parent, hash)?;
        // The entries are in the order of their slots, so the first index that differs from the entry's slot is a free slot.
        let free = entries.iter().enumerate().find(|(index, entry)| usize::from(entry.slot) != *index);
        let index = free.map_or(entries.len(), |(index, _)| index);
        if index >= SLOTS_PER_BUCKET {
            return Err(Status::NoSpace.into());
        }
        entries.insert(index, Entry { slot: index as u8, ino, kind, name: name.to_vec() });
        Ok(())
    }

    pub(super) fn remove_entry(&mut self, parent: InodeNo, name: &[u8]) -> Result<(), MetaError> {
        let hash = self.view.hash(name);
        self.bucket(parent, hash)?.retain(|entry| entry.name != name);
        Ok(())
    }

    /// Lets an entry name another inode. It keeps its slot.
    pub(super) fn point_entry(
        &mut self,
        parent: InodeNo,
        name: &[u8],
        ino: InodeNo,
        kind: FileKind,
    ) -> Result<(), MetaError> {
        let hash = self.view.hash(name);
        for entry in self.bucket(parent, hash)? {
            if entry.name == name {
                (entry.ino, entry.kind) = (ino, kind);
            }
        }
        Ok(())
    }

    /// The edits of a file's extents.
    pub(super) fn extents(&mut self, ino: InodeNo) -> (&mut ExtentEdit, View<'v>) {
        (self.extents.entry(ino).or_default(), self.view)
    }

    /// The batch of all edits. The allocated pages follow from the edits of the extents.
    pub(super) fn finish(mut self, outcome: Outcome) -> Result<Applied, MetaError> {
        for (ino, edit) in &self.extents {
            edit.write(*ino, &mut self.batch);
        }
        for ((parent, hash), entries) in &self.buckets {
            let key = key::bucket(*parent, *hash);
            let entries: Vec<_> = entries
                .iter()
                .map(|entry| EntryRecord {
                    slot: entry.slot,
                    ino: entry.ino,
                    kind: entry.kind,
                    name: &entry.name,
                })
                .collect();
            if entries.is_empty() {
                self.batch.remove(key);
                continue;
            }
            let value = record::encode(&BucketRecord { entries });
            if value.len() > VALUE_MAX_BYTES {
                return Err(Status::NoSpace.into());
            }
            self.batch.put(key, value);
        }
        for (ino, record) in &self.inodes {
            match record {
                Some(record) => self.batch.put(key::inode(*ino), record::encode(record)),
                None => self.batch.remove(key::inode(*ino)),
            }
        }
        Ok(Applied { batch: self.batch, outcome, inodes: self.inodes })
    }
}
