//! Bound regions: ranges of open files that others may open by a region key (FileMR section 3; docs/file-regions.md).
//!
//! A binding belongs to the open filekey by which it was made, and so to its session. It has a number, which the region key names, and the filekeys
//! that were opened by the key.
//!
//! # Invariants
//! * A filekey that was opened by a binding is in its list for as long as both are there. It is put there in the step that makes it.
//! * When a binding ends, all filekeys that were opened by it end, and no further one is made.
//! * Locks: this table, then the filekeys.
//!
//! # Failure
//! An unknown number, another client's and an ended one are the same error (`Stale`).

use super::filekeys::{FilePart, KeyedFile};
use super::{ClosedRegion, Files, OpenedRegion};
use crate::shares::Taken;
use cuttlefs_common::ids::{ClientId, FileKey, InodeNo};
use cuttlefs_common::rdma::RegionOwner;
use cuttlefs_common::rpc::RegionKey;
use cuttlefs_common::status::Status;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// A binding's name: the client that made it, and its number.
pub(super) type RegionId = (ClientId, u64);

/// What a binding is of, for those who judge whether it may be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionFacts {
    /// The file.
    pub ino: InodeNo,
    /// The topmost directory that the binder can reach.
    pub root: InodeNo,
}

#[derive(Debug)]
struct Bound {
    facts: RegionFacts,
    filekey: FileKey,
    expiry_ms: Option<u64>,
    opened: BTreeMap<FileKey, RegionOwner>,
    /// A place of the binder's share.
    _place: Option<Taken>,
}

#[derive(Debug, Default)]
struct Tables {
    bound: HashMap<RegionId, Bound>,
    of_filekey: HashMap<FileKey, BTreeSet<RegionId>>,
    /// The binding by which a filekey was opened.
    by_region: HashMap<FileKey, RegionId>,
    /// The bindings that expire, the first one first.
    expiries: BTreeSet<(u64, RegionId)>,
}

/// All bound regions of a server.
#[derive(Debug, Default)]
pub(super) struct BoundRegions {
    tables: Mutex<Tables>,
}

impl Tables {
    fn end(&mut self, id: RegionId) -> BTreeMap<FileKey, RegionOwner> {
        let Some(bound) = self.bound.remove(&id) else { return BTreeMap::new() };
        if let Some(expiry_ms) = bound.expiry_ms {
            self.expiries.remove(&(expiry_ms, id));
        }
        if let Some(ids) = self.of_filekey.get_mut(&bound.filekey) {
            ids.remove(&id);
            if ids.is_empty() {
                self.of_filekey.remove(&bound.filekey);
            }
        }
        bound.opened.keys().for_each(|filekey| {
            self.by_region.remove(filekey);
        });
        bound.opened
    }
}

impl BoundRegions {
    /// Notes that a filekey was unbound. Returns the filekeys that end with it.
    pub(super) fn note_unbound(&self, filekey: FileKey) -> Vec<(FileKey, RegionOwner)> {
        let mut tables = self.tables.lock();
        if let Some(id) = tables.by_region.remove(&filekey)
            && let Some(bound) = tables.bound.get_mut(&id)
        {
            bound.opened.remove(&filekey);
        }
        let ids = tables.of_filekey.remove(&filekey).unwrap_or_default();
        ids.into_iter().flat_map(|id| tables.end(id)).collect()
    }

    /// How many there are, and how many filekeys were opened by them.
    pub(super) fn counts(&self) -> (usize, usize) {
        let tables = self.tables.lock();
        (tables.bound.len(), tables.by_region.len())
    }
}

impl Files {
    /// Binds the range of `key`, with its rights and its number, to an open filekey of `owner`. The caller has made the key for `facts`.
    ///
    /// # Errors
    /// `Stale` if the owner has no such filekey; `Denied` if that was opened with fewer rights, or by a region key itself, or if it is another file's;
    /// `Exists` if there is a binding of this name.
    pub fn bind_region(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        key: &RegionKey,
        facts: RegionFacts,
        place: Option<Taken>,
    ) -> Result<(), Status> {
        let mut tables = self.regions.tables.lock();
        // Under the lock: a close of the filekey comes before, or finds the binding.
        let (file, rights) = self.resolve(owner, filekey)?;
        let may =
            file.ino() == facts.ino && rights.read >= key.rights.read && rights.write >= key.rights.write;
        if !may {
            return Err(Status::Denied);
        }
        let id = (key.client, key.number);
        if tables.bound.contains_key(&id) {
            return Err(Status::Exists);
        }
        let expiry_ms = key.expiry_ms;
        let bound = Bound { facts, filekey, expiry_ms, opened: BTreeMap::new(), _place: place };
        tables.bound.insert(id, bound);
        tables.of_filekey.entry(filekey).or_default().insert(id);
        tables.expiries.extend(expiry_ms.map(|expiry_ms| (expiry_ms, id)));
        Ok(())
    }

    /// A number for a new binding, and the time in milliseconds of Unix time. Numbers of 64 random bits hardly ever come twice, in any life of a
    /// server: so the key of a binding that has ended is never good again.
    pub fn new_region(&self) -> (u64, u64) {
        (self.random.next_u64(), self.now_ms())
    }

    /// What the binding of a key is of.
    ///
    /// # Errors
    /// `Stale` if there is none, or its time is over.
    pub fn region(&self, key: &RegionKey) -> Result<RegionFacts, Status> {
        let tables = self.regions.tables.lock();
        let bound = tables.bound.get(&(key.client, key.number)).ok_or(Status::Stale)?;
        let is_over = bound.expiry_ms.is_some_and(|expiry_ms| self.now_ms() >= expiry_ms);
        if is_over { Err(Status::Stale) } else { Ok(bound.facts) }
    }

    /// Opens the part of a file that a key is for. The caller has judged the key.
    ///
    /// # Errors
    /// `Stale` if there is no such binding any more; as `open`.
    pub fn open_region(
        &self,
        owner: RegionOwner,
        key: &RegionKey,
        place: Option<Taken>,
    ) -> Result<OpenedRegion, Status> {
        let id = (key.client, key.number);
        let ino = self.region(key)?.ino;
        let file = self.active.open(ino, self.may_take_slot(place.as_ref()), || self.load(ino))?;
        let part = FilePart { start: key.offset, end: key.end(), expiry_ms: key.expiry_ms };
        let keyed = KeyedFile { file: file.clone(), rights: key.rights, part: Some(part) };
        let mut tables = self.regions.tables.lock();
        let bound = match tables.bound.contains_key(&id) {
            true => self.keys.bind_part(&*self.random, owner, keyed, place),
            false => Err(Status::Stale),
        };
        match bound {
            Ok(filekey) => {
                tables.by_region.insert(filekey, id);
                if let Some(bound) = tables.bound.get_mut(&id) {
                    bound.opened.insert(filekey, owner);
                }
                Ok(OpenedRegion { filekey, slot: file.slot(), file })
            }
            Err(status) => {
                drop(tables);
                self.active.close(ino);
                Err(status)
            }
        }
    }

    /// Ends a binding, and the filekeys that were opened by it.
    pub fn unbind_region(&self, client: ClientId, number: u64) -> Vec<ClosedRegion> {
        let opened = self.regions.tables.lock().end((client, number));
        self.close_all(opened)
    }

    /// Ends the bindings whose time is over.
    pub fn end_expired_regions(&self) -> Vec<ClosedRegion> {
        let now_ms = self.now_ms();
        let mut closed = Vec::new();
        loop {
            let opened = {
                let mut tables = self.regions.tables.lock();
                match tables.expiries.first().copied() {
                    Some((expiry_ms, id)) if expiry_ms <= now_ms => tables.end(id),
                    _ => return closed,
                }
            };
            closed.extend(self.close_all(opened));
        }
    }

    /// Closes filekeys that were opened by a region key: nothing is bound to them.
    pub(super) fn close_all(
        &self,
        filekeys: impl IntoIterator<Item = (FileKey, RegionOwner)>,
    ) -> Vec<ClosedRegion> {
        // A filekey that is not there any more was closed meanwhile.
        let unbound = |(filekey, owner)| Some((filekey, self.keys.unbind(owner, filekey).ok()?));
        filekeys
            .into_iter()
            .filter_map(unbound)
            .map(|(filekey, file)| self.closed(filekey, file, true))
            .collect()
    }
}
