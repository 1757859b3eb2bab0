//! Typed reads of the store. `apply` reads a `View`, and nothing else.

use super::error::MetaError;
use super::key::{self, KeyRange, tag};
use super::name::{Cookie, HashKey};
use super::record::{
    self, BytesRecord, ClientRecord, ExtentRecord, InodeRecord, RecordError, SlotRecord, XattrHead,
};
use super::store::{Direction, Store};
use cuttlefs_common::attr::FileKind;
use cuttlefs_common::ids::{ClientId, FilePage, InodeNo};
use cuttlefs_common::region::Extent;

/// A directory entry that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// The inode that it names.
    pub ino: InodeNo,
    /// Type of that inode.
    pub kind: FileKind,
    /// Its position.
    pub cookie: Cookie,
}

/// A function that gets each entry with its name; `false` ends the listing.
pub type EntryVisitor<'a> = &'a mut dyn FnMut(Found, &[u8]) -> Result<bool, MetaError>;
/// A function that gets each record's key and value; `false` ends the scan.
pub type RecordVisitor<'a> = &'a mut dyn FnMut(&[u8], &[u8]) -> Result<bool, MetaError>;

/// A function that gets each extent with its file; `false` ends the visit.
pub(super) type ExtentVisitor<'a> = &'a mut dyn FnMut(InodeNo, Extent) -> bool;

/// The present metadata.
#[derive(Clone, Copy)]
pub struct View<'a> {
    store: &'a dyn Store,
    hash_key: HashKey,
    /// Inodes that differ from their records because their data changed. They are returned as a batch may write them: with live times and change
    /// counter, and with durable size and allocation.
    changed: &'a dyn Fn(InodeNo) -> Option<InodeRecord>,
}

impl<'a> View<'a> {
    /// The metadata in `store`, with the inodes of `changed` in place of their records.
    pub fn new(
        store: &'a dyn Store,
        hash_key: HashKey,
        changed: &'a dyn Fn(InodeNo) -> Option<InodeRecord>,
    ) -> Self {
        Self { store, hash_key, changed }
    }

    /// The stored metadata.
    pub fn of_store(store: &'a dyn Store, hash_key: HashKey) -> Self {
        Self::new(store, hash_key, &|_| None)
    }

    /// The hash of a name.
    pub fn hash(&self, name: &[u8]) -> u64 {
        self.hash_key.hash(name)
    }

    /// An inode.
    pub fn inode(&self, ino: InodeNo) -> Result<Option<InodeRecord>, MetaError> {
        if let Some(record) = (self.changed)(ino) {
            return Ok(Some(record));
        }
        let key = key::inode(ino);
        let Some(value) = self.store.get(&key)? else {
            return Ok(None);
        };
        record::parse_inode(&value).map(Some).map_err(MetaError::record(&key))
    }

    /// The record of a client's slot; `key` is the slot's.
    pub fn slot(&self, key: &[u8]) -> Result<Option<SlotRecord>, MetaError> {
        let Some(value) = self.store.get(key)? else {
            return Ok(None);
        };
        record::parse(&value).map(Some).map_err(MetaError::record(key))
    }

    /// The record of a client.
    pub fn client(&self, client: ClientId) -> Result<Option<ClientRecord>, MetaError> {
        let key = key::client(client);
        let Some(value) = self.store.get(&key)? else {
            return Ok(None);
        };
        record::parse(&value).map(Some).map_err(MetaError::record(&key))
    }

    /// The bytes of the bucket of a hash.
    pub fn bucket(&self, parent: InodeNo, hash: u64) -> Result<Option<Vec<u8>>, MetaError> {
        Ok(self.store.get(&key::bucket(parent, hash))?)
    }

    /// Finds a name.
    pub fn find(&self, parent: InodeNo, name: &[u8]) -> Result<Option<Found>, MetaError> {
        let hash = self.hash(name);
        let Some(value) = self.bucket(parent, hash)? else {
            return Ok(None);
        };
        let bucket = record::parse_bucket(&value).map_err(MetaError::record(&key::bucket(parent, hash)))?;
        let entry = bucket.entries.iter().find(|entry| entry.name == name);
        Ok(entry.map(|entry| Found {
            ino: entry.ino,
            kind: entry.kind,
            cookie: Cookie::new(hash, entry.slot),
        }))
    }

    /// Visits the entries behind `cookie`, in the order of cookies, until the visitor returns `false`. One bucket is in memory at a time.
    pub fn entries_after(
        &self,
        parent: InodeNo,
        cookie: Cookie,
        visit: EntryVisitor<'_>,
    ) -> Result<(), MetaError> {
        let from = key::bucket(parent, cookie.hash());
        let to = key::all_of(tag::ENTRY, parent).to;
        self.scan(&from, &to, Direction::Forward, &mut |key, value| {
            let malformed = || MetaError::record(key)(RecordError::Malformed);
            let (_, hash) = key::parse_bucket(key).ok_or_else(malformed)?;
            let bucket = record::parse_bucket(value).map_err(MetaError::record(key))?;
            for entry in &bucket.entries {
                let found = Found { ino: entry.ino, kind: entry.kind, cookie: Cookie::new(hash, entry.slot) };
                if found.cookie > cookie && !visit(found, entry.name)? {
                    return Ok(false);
                }
            }
            Ok(true)
        })
    }

    /// Whether a directory has no entries.
    pub fn is_empty_directory(&self, ino: InodeNo) -> Result<bool, MetaError> {
        let mut empty = true;
        let KeyRange { from, to } = key::all_of(tag::ENTRY, ino);
        self.scan(&from, &to, Direction::Forward, &mut |_, _| {
            empty = false;
            Ok(false)
        })?;
        Ok(empty)
    }

    /// A symlink's target.
    pub fn symlink(&self, ino: InodeNo) -> Result<Option<Vec<u8>>, MetaError> {
        let key = key::symlink(ino);
        let Some(value) = self.store.get(&key)? else {
            return Ok(None);
        };
        let target: BytesRecord<'_> = record::parse(&value).map_err(MetaError::record(&key))?;
        Ok(Some(target.bytes.to_vec()))
    }

    /// The value of an extended attribute.
    pub fn xattr(&self, ino: InodeNo, name: &[u8]) -> Result<Option<Vec<u8>>, MetaError> {
        let KeyRange { from, to } = key::all_of_xattr(ino, name);
        let mut value: Option<(usize, Vec<u8>)> = None;
        self.scan(&from, &to, Direction::Forward, &mut |key, piece| {
            match &mut value {
                None => {
                    let head: XattrHead<'_> = record::parse(piece).map_err(MetaError::record(key))?;
                    value = Some((head.len_bytes as usize, head.bytes.to_vec()));
                }
                Some((_, bytes)) => {
                    let piece: BytesRecord<'_> = record::parse(piece).map_err(MetaError::record(key))?;
                    bytes.extend_from_slice(piece.bytes);
                }
            }
            Ok(true)
        })?;
        match value {
            Some((len, bytes)) if len != bytes.len() => {
                Err(MetaError::record(&from)(RecordError::Impossible("pieces that do not make the value")))
            }
            value => Ok(value.map(|(_, bytes)| bytes)),
        }
    }

    /// Visits the names of an inode's extended attributes.
    pub fn xattr_names(&self, ino: InodeNo, visit: &mut dyn FnMut(&[u8])) -> Result<(), MetaError> {
        let KeyRange { mut from, to } = key::all_of(tag::XATTR, ino);
        loop {
            let mut long = None;
            self.scan(&from, &to, Direction::Forward, &mut |key, _| {
                let malformed = || MetaError::record(key)(RecordError::Malformed);
                let (_, name, piece) = key::parse_xattr(key).ok_or_else(malformed)?;
                if piece == 0 {
                    visit(name);
                    return Ok(true);
                }
                // The other pieces of a long value are skipped.
                long = Some(key::all_of_xattr(ino, name).to);
                Ok(false)
            })?;
            match long {
                Some(next) => from = next,
                None => return Ok(()),
            }
        }
    }

    /// The keys of all extended attribute records of an inode.
    pub fn xattr_keys(&self, ino: InodeNo) -> Result<Vec<Vec<u8>>, MetaError> {
        self.keys(&key::all_of(tag::XATTR, ino))
    }

    /// The keys of all records in a range.
    pub fn keys(&self, range: &KeyRange) -> Result<Vec<Vec<u8>>, MetaError> {
        let mut keys = Vec::new();
        self.scan(&range.from, &range.to, Direction::Forward, &mut |key, _| {
            keys.push(key.to_vec());
            Ok(true)
        })?;
        Ok(keys)
    }

    /// Visits an inode's extents that start in `first..=last`, in the given direction.
    pub fn extents(
        &self,
        ino: InodeNo,
        first: FilePage,
        last: FilePage,
        direction: Direction,
        visit: &mut dyn FnMut(Extent) -> bool,
    ) -> Result<(), MetaError> {
        let from = key::extent(ino, first);
        let mut to = key::extent(ino, last).to_vec();
        // The smallest key behind that of `last`.
        to.push(0);
        self.scan(&from, &to, direction, &mut |key, value| Ok(visit(parse_extent(key, value)?.1)))
    }

    /// Visits all extents of all inodes.
    pub fn all_extents(&self, visit: ExtentVisitor<'_>) -> Result<(), MetaError> {
        let KeyRange { from, to } = key::all(tag::EXTENT);
        self.scan(&from, &to, Direction::Forward, &mut |key, value| {
            let (ino, extent) = parse_extent(key, value)?;
            Ok(visit(ino, extent))
        })
    }

    /// A scan whose visitor can fail.
    pub fn scan(
        &self,
        from: &[u8],
        to: &[u8],
        direction: Direction,
        visit: RecordVisitor<'_>,
    ) -> Result<(), MetaError> {
        let mut failure = None;
        self.store.scan(from, to, direction, &mut |key, value| {
            visit(key, value).unwrap_or_else(|error| {
                failure = Some(error);
                false
            })
        })?;
        failure.map_or(Ok(()), Err)
    }
}

fn parse_extent(key: &[u8], value: &[u8]) -> Result<(InodeNo, Extent), MetaError> {
    let malformed = || MetaError::record(key)(RecordError::Malformed);
    let (ino, page) = key::parse_paged(key).ok_or_else(malformed)?;
    let record = ExtentRecord::parse(page, value).map_err(MetaError::record(key))?;
    Ok((ino, record.at(page)))
}
