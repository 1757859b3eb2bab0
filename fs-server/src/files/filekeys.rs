//! Filekeys: random names of open files, each bound to one owner with rights (FileMR section 3).
//!
//! The NIC engine looks up keys for every target-translated read, so the bindings are behind a plain read-write lock that is held for a lookup only.
//!
//! # Parts
//! A filekey that was got by a region key (`bound_regions`) is good for a part of its file, and until a time. Operations on whole files refuse it
//! (`Denied`); those that name a range ask `KeyedFile::holds`.
//!
//! # Failure
//! An unknown key and another owner's key are the same error (`Stale`), so that a caller cannot find out which keys exist. So is a key whose time is
//! over.

use super::file_region::FileRegion;
use crate::shares::Taken;
use cuttlefs_common::ids::{FileKey, InodeNo};
use cuttlefs_common::rdma::RegionOwner;
use cuttlefs_common::rpc::Rights;
use cuttlefs_common::status::Status;
use cuttlefs_common::world::Random;
use parking_lot::RwLock;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// Most open files of one owner, whatever its peer's share: a client that leaks handles harms only itself.
pub(super) const MAX_FILEKEYS_PER_OWNER: usize = 1 << 20;

/// The part of a file that a filekey is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilePart {
    /// Its first byte.
    pub start: u64,
    /// The byte behind it.
    pub end: u64,
    /// Milliseconds of Unix time at which the key ends.
    pub expiry_ms: Option<u64>,
}

/// A file, and what a filekey permits to do with it.
#[derive(Clone, Debug)]
pub struct KeyedFile {
    /// The file.
    pub file: Arc<FileRegion>,
    /// The rights.
    pub rights: Rights,
    /// The part to which they are restricted; `None`: they are not.
    pub part: Option<FilePart>,
}

impl KeyedFile {
    /// Whether the key is good for `[start, end)`.
    pub fn holds(&self, start: u64, end: u64) -> bool {
        self.part.is_none_or(|part| part.start <= start && end <= part.end)
    }

    /// Whether the key is good for a part of `[start, end)`.
    pub(super) fn overlaps(&self, start: u64, end: u64) -> bool {
        self.part.is_none_or(|part| part.start < end && start < part.end)
    }
}

#[derive(Debug)]
struct Binding {
    owner: RegionOwner,
    rights: Rights,
    part: Option<FilePart>,
    file: Arc<FileRegion>,
    /// A place of the peer's share, if a peer opened the file.
    _place: Option<Taken>,
}

#[derive(Debug, Default)]
struct Tables {
    bindings: HashMap<FileKey, Binding>,
    of_owner: HashMap<RegionOwner, BTreeSet<FileKey>>,
}

/// All filekeys of a server.
#[derive(Debug, Default)]
pub(super) struct FileKeys {
    tables: RwLock<Tables>,
}

impl FileKeys {
    /// Binds a new random key of a whole file, which keeps `place` until it is unbound.
    ///
    /// # Errors
    /// As `bind_part`.
    pub(super) fn bind(
        &self,
        random: &dyn Random,
        owner: RegionOwner,
        rights: Rights,
        file: Arc<FileRegion>,
        place: Option<Taken>,
    ) -> Result<FileKey, Status> {
        self.bind_part(random, owner, KeyedFile { file, rights, part: None }, place)
    }

    /// Binds a new random key, which keeps `place` until it is unbound.
    ///
    /// # Errors
    /// `Busy` if the owner has too many keys; `Denied` for owner 0, which is no session.
    pub(super) fn bind_part(
        &self,
        random: &dyn Random,
        owner: RegionOwner,
        KeyedFile { file, rights, part }: KeyedFile,
        place: Option<Taken>,
    ) -> Result<FileKey, Status> {
        if owner == RegionOwner::default() {
            return Err(Status::Denied);
        }
        let mut tables = self.tables.write();
        if tables.of_owner.get(&owner).is_some_and(|keys| keys.len() >= MAX_FILEKEYS_PER_OWNER) {
            return Err(Status::Busy);
        }
        // 64 random bits hardly ever collide. 0 means "no file" in logs.
        let key = loop {
            let key = FileKey(random.next_u64());
            if key.0 != 0 && !tables.bindings.contains_key(&key) {
                break key;
            }
        };
        #[cfg(test)]
        file.state_mut().table.bind(key);
        tables.bindings.insert(key, Binding { owner, rights, part, file, _place: place });
        tables.of_owner.entry(owner).or_default().insert(key);
        Ok(key)
    }

    /// The file of a key; `now_ms` is the time.
    ///
    /// # Errors
    /// `Stale` if this owner has no such key, or its time is over.
    pub(super) fn look_up(
        &self,
        owner: RegionOwner,
        key: FileKey,
        now_ms: impl FnOnce() -> u64,
    ) -> Result<KeyedFile, Status> {
        let keyed = {
            let tables = self.tables.read();
            let binding = tables.bindings.get(&key).filter(|binding| binding.owner == owner);
            let Binding { file, rights, part, .. } = binding.ok_or(Status::Stale)?;
            KeyedFile { file: file.clone(), rights: *rights, part: *part }
        };
        let expiry_ms = keyed.part.and_then(|part| part.expiry_ms);
        if expiry_ms.is_some_and(|expiry_ms| now_ms() >= expiry_ms) { Err(Status::Stale) } else { Ok(keyed) }
    }

    /// Whether an owner has a whole file open with at least these rights.
    pub(super) fn has_open(&self, owner: RegionOwner, ino: InodeNo, rights: Rights) -> bool {
        let tables = self.tables.read();
        let bindings = tables.of_owner.get(&owner).into_iter().flatten();
        bindings.filter_map(|key| tables.bindings.get(key)).any(|binding| {
            let has = binding.rights;
            binding.part.is_none()
                && binding.file.ino() == ino
                && has.read >= rights.read
                && has.write >= rights.write
        })
    }

    /// Unbinds a key and returns its file.
    ///
    /// # Errors
    /// `Stale` if this owner has no such key.
    pub(super) fn unbind(&self, owner: RegionOwner, key: FileKey) -> Result<Arc<FileRegion>, Status> {
        let mut tables = self.tables.write();
        match tables.bindings.get(&key) {
            Some(binding) if binding.owner == owner => {}
            _ => return Err(Status::Stale),
        }
        let binding = tables.bindings.remove(&key).ok_or(Status::Stale)?;
        if let Some(keys) = tables.of_owner.get_mut(&owner) {
            keys.remove(&key);
            if keys.is_empty() {
                tables.of_owner.remove(&owner);
            }
        }
        Ok(binding.file)
    }

    /// Unbinds all keys of an owner and returns them with their files.
    pub(super) fn revoke(&self, owner: RegionOwner) -> Vec<(FileKey, Arc<FileRegion>)> {
        let mut tables = self.tables.write();
        let keys = tables.of_owner.remove(&owner).unwrap_or_default();
        keys.into_iter().filter_map(|key| Some((key, tables.bindings.remove(&key)?.file))).collect()
    }

    /// The number of keys.
    pub(super) fn len(&self) -> usize {
        self.tables.read().bindings.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::range_table::RangeTable;
    use cuttlefs_common::world::SeededRandom;

    fn file() -> Arc<FileRegion> {
        Arc::new(FileRegion::new(InodeNo(9), RangeTable::default(), 0, 1))
    }

    #[test]
    fn a_key_is_good_for_its_owner_only_and_until_it_ends() {
        let keys = FileKeys::default();
        let random = SeededRandom::new(1);
        let (mine, other) = (RegionOwner(1), RegionOwner(2));
        let rights = Rights { read: true, write: false };
        let key = keys.bind(&random, mine, rights, file(), None).expect("bound");
        let look_up = |owner, key| keys.look_up(owner, key, || 0).map(|keyed| keyed.rights);
        assert_eq!(look_up(mine, key), Ok(rights));
        assert_eq!(look_up(other, key), Err(Status::Stale), "foreign");
        let (ino, write) = (InodeNo(9), Rights { read: false, write: true });
        assert!(keys.has_open(mine, ino, rights) && keys.has_open(mine, ino, Rights::default()));
        assert!(!keys.has_open(mine, ino, write) && !keys.has_open(mine, InodeNo(8), rights));
        assert!(!keys.has_open(other, ino, rights));
        assert_eq!(keys.unbind(other, key).expect_err("foreign"), Status::Stale);
        assert!(keys.unbind(mine, key).is_ok());
        assert_eq!(look_up(mine, key), Err(Status::Stale), "ended");
        assert_eq!(
            keys.bind(&random, RegionOwner(0), rights, file(), None).expect_err("nobody"),
            Status::Denied
        );
    }

    #[test]
    fn a_key_of_a_part_is_good_for_that_and_for_its_time() {
        let keys = FileKeys::default();
        let rights = Rights { read: true, write: true };
        let part = Some(FilePart { start: 100, end: 200, expiry_ms: Some(1000) });
        let keyed = KeyedFile { file: file(), rights, part };
        let mine = RegionOwner(1);
        let key = keys.bind_part(&SeededRandom::new(3), mine, keyed, None).expect("bound");
        let found = keys.look_up(mine, key, || 999).expect("in time");
        assert!(found.holds(100, 200) && found.holds(150, 150));
        assert!(!found.holds(99, 150) && !found.holds(150, 201) && !found.holds(0, u64::MAX));
        assert_eq!(keys.look_up(mine, key, || 1000).expect_err("over"), Status::Stale);
        assert!(!keys.has_open(mine, InodeNo(9), Rights::default()), "no open of the file");
    }

    #[test]
    fn revoking_ends_every_key_of_the_owner_and_no_other() {
        let keys = FileKeys::default();
        let random = SeededRandom::new(2);
        let one: Vec<_> = (0..5)
            .map(|_| keys.bind(&random, RegionOwner(1), Rights::default(), file(), None).expect("bound"))
            .collect();
        let two = keys.bind(&random, RegionOwner(2), Rights::default(), file(), None).expect("bound");
        assert_eq!(keys.revoke(RegionOwner(1)).len(), 5);
        assert!(one.iter().all(|key| keys.look_up(RegionOwner(1), *key, || 0).is_err()));
        assert!(keys.look_up(RegionOwner(2), two, || 0).is_ok());
        assert_eq!(keys.len(), 1);
        assert!(keys.revoke(RegionOwner(1)).is_empty());
    }
}
