//! Filekeys: random names of open files, each bound to one owner with rights (FileMR section 3).
//!
//! The NIC engine looks up keys for every target-translated read, so the bindings are behind a plain read-write lock that is held for a lookup only.
//!
//! # Failure
//! An unknown key and another owner's key are the same error (`Stale`), so that a caller cannot find out which keys exist.

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

#[derive(Debug)]
struct Binding {
    owner: RegionOwner,
    rights: Rights,
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
    /// Binds a new random key, which keeps `place` until it is unbound.
    ///
    /// # Errors
    /// `Busy` if the owner has too many keys; `Denied` for owner 0, which is no session.
    pub(super) fn bind(
        &self,
        random: &dyn Random,
        owner: RegionOwner,
        rights: Rights,
        file: Arc<FileRegion>,
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
        tables.bindings.insert(key, Binding { owner, rights, file, _place: place });
        tables.of_owner.entry(owner).or_default().insert(key);
        Ok(key)
    }

    /// The file of a key.
    ///
    /// # Errors
    /// `Stale` if this owner has no such key.
    pub(super) fn resolve(
        &self,
        owner: RegionOwner,
        key: FileKey,
    ) -> Result<(Arc<FileRegion>, Rights), Status> {
        let tables = self.tables.read();
        match tables.bindings.get(&key) {
            Some(binding) if binding.owner == owner => Ok((binding.file.clone(), binding.rights)),
            _ => Err(Status::Stale),
        }
    }

    /// Whether an owner has a file open with at least these rights.
    pub(super) fn has_open(&self, owner: RegionOwner, ino: InodeNo, rights: Rights) -> bool {
        let tables = self.tables.read();
        let bindings = tables.of_owner.get(&owner).into_iter().flatten();
        bindings.filter_map(|key| tables.bindings.get(key)).any(|binding| {
            let has = binding.rights;
            binding.file.ino() == ino && has.read >= rights.read && has.write >= rights.write
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

    /// Unbinds all keys of an owner and returns their files, one for each key.
    pub(super) fn revoke(&self, owner: RegionOwner) -> Vec<Arc<FileRegion>> {
        let mut tables = self.tables.write();
        let keys = tables.of_owner.remove(&owner).unwrap_or_default();
        keys.iter().filter_map(|key| tables.bindings.remove(key)).map(|binding| binding.file).collect()
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
        assert_eq!(keys.resolve(mine, key).expect("mine").1, rights);
        assert_eq!(keys.resolve(other, key).expect_err("foreign"), Status::Stale);
        let (ino, write) = (InodeNo(9), Rights { read: false, write: true });
        assert!(keys.has_open(mine, ino, rights) && keys.has_open(mine, ino, Rights::default()));
        assert!(!keys.has_open(mine, ino, write) && !keys.has_open(mine, InodeNo(8), rights));
        assert!(!keys.has_open(other, ino, rights));
        assert_eq!(keys.unbind(other, key).expect_err("foreign"), Status::Stale);
        assert!(keys.unbind(mine, key).is_ok());
        assert_eq!(keys.resolve(mine, key).expect_err("ended"), Status::Stale);
        assert_eq!(
            keys.bind(&random, RegionOwner(0), rights, file(), None).expect_err("nobody"),
            Status::Denied
        );
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
        assert!(one.iter().all(|key| keys.resolve(RegionOwner(1), *key).is_err()));
        assert!(keys.resolve(RegionOwner(2), two).is_ok());
        assert_eq!(keys.len(), 1);
        assert!(keys.revoke(RegionOwner(1)).is_empty());
    }
}
