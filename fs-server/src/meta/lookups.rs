//! Reads of the façade. None of them takes the writer's mutex.

use super::answer::Answer;
use super::error::MetaError;
use super::key;
use super::metadata::Meta;
use super::name::Cookie;
use super::operation::RequestId;
use super::page_map::PartVisitor;
use super::record::{self, ClientRecord, InodeRecord, RecordError};
use super::store::Direction;
use super::view::ExtentVisitor;
use cuttlefs_common::attr::{ACCESS_ACL_XATTR, Attr, FileKind};
use cuttlefs_common::ids::{ClientId, FilePage, InodeNo, NAME_MAX};
use cuttlefs_common::region::Extent;
use cuttlefs_common::rpc::DirEntry;
use cuttlefs_common::status::Status;

/// How many times a lookup starts again if the inode that it found was removed before it was read. Each time the name was replaced in between.
const LOOKUP_TRIES: usize = 8;

impl Meta {
    /// Whether an inode has lost a name since its change counter was `told`.
    ///
    /// # Errors
    /// `Stale` if it is gone, `Io`.
    pub fn has_lost_a_name(&self, ino: InodeNo, told: u64) -> Result<bool, Status> {
        self.inode(ino).map(|record| record.name_lost > told).map_err(|error| self.fail("open", error))
    }

    pub(super) fn inode(&self, ino: InodeNo) -> Result<InodeRecord, MetaError> {
        // Held while the record is loaded: see `live`.
        let shard = self.live.read(ino);
        let record = match shard.get(ino) {
            Some(live) => Some(live.record),
            None => self.stored().inode(ino)?,
        };
        record.ok_or(MetaError::Refused(Status::Stale))
    }

    /// The attributes of an inode, with live size and times.
    ///
    /// # Errors
    /// `Stale` if there is no such inode, `Io`.
    pub fn attr(&self, ino: InodeNo) -> Result<Attr, Status> {
        self.inode(ino).map(|record| record.attr(ino)).map_err(|e| self.fail("attr", e))
    }

    /// The parent of a directory; the root's is the root itself.
    ///
    /// # Errors
    /// `Stale`, `NotDirectory`, `Io`.
    pub fn parent(&self, ino: InodeNo) -> Result<InodeNo, Status> {
        let record = self.inode(ino).map_err(|e| self.fail("parent", e))?;
        if record.is_directory() { Ok(record.parent) } else { Err(Status::NotDirectory) }
    }

    /// Looks up a name, also `.` and `..`. The caller checks whether `..` leaves an export.
    ///
    /// # Errors
    /// `NotFound`, `NotDirectory`, `NameTooLong`, `Stale` if the directory is gone, `Io`.
    pub fn lookup(&self, parent: InodeNo, name: &[u8]) -> Result<Attr, Status> {
        match name {
            b"." => return self.parent(parent).and_then(|_| self.attr(parent)),
            b".." => return self.parent(parent).and_then(|above| self.attr(above)),
            _ if name.len() > NAME_MAX => return Err(Status::NameTooLong),
            _ => {}
        }
        self.find(parent, name).map_err(|e| self.fail("lookup", e))
    }

    fn find(&self, parent: InodeNo, name: &[u8]) -> Result<Attr, MetaError> {
        for _ in 0..LOOKUP_TRIES {
            let Some(found) = self.stored().find(parent, name)? else {
                // Only for the error's status the directory itself is read.
                let directory = self.inode(parent)?;
                let status = if directory.is_directory() { Status::NotFound } else { Status::NotDirectory };
                return Err(status.into());
            };
            match self.inode(found.ino) {
                Ok(record) => return Ok(record.attr(found.ino)),
                Err(MetaError::Refused(_)) => {}
                Err(error) => return Err(error),
            }
        }
        // The same name without an inode so many times is no race.
        Err(MetaError::Inconsistent { what: "an entry names no inode", ino: parent.0 })
    }

    /// Lists a directory from behind `cookie` (0: from the start), in the order of cookies, until the visitor returns `false`, which means that it
    /// did not take that entry. Without `.` and `..`. An entry that exists all the time is listed once, whatever happens to others. Returns whether
    /// the end was reached.
    ///
    /// # Errors
    /// `Invalid` for a cookie that was never given out, `Stale`, `NotDirectory`, `Io`.
    pub fn read_dir(
        &self,
        ino: InodeNo,
        cookie: u64,
        plus: bool,
        visit: &mut dyn FnMut(&DirEntry<'_>) -> bool,
    ) -> Result<bool, Status> {
        let cookie = Cookie::parse(cookie)?;
        self.parent(ino)?;
        let mut end = true;
        let listed = self.stored().entries_after(ino, cookie, &mut |found, name| {
            let attr = match plus.then(|| self.inode(found.ino)) {
                None => None,
                Some(Ok(record)) => Some(record.attr(found.ino)),
                // The entry was unlinked since its bucket was read.
                Some(Err(MetaError::Refused(_))) => return Ok(true),
                Some(Err(error)) => return Err(error),
            };
            let entry = DirEntry { cookie: found.cookie.get(), ino: found.ino, kind: found.kind, name, attr };
            let taken = visit(&entry);
            end &= taken;
            Ok(taken)
        });
        listed.map(|()| end).map_err(|e| self.fail("read_dir", e))
    }

    /// A symlink's target.
    ///
    /// # Errors
    /// `Stale`, `Invalid` if it is no symlink, `Io`.
    pub fn read_link(&self, ino: InodeNo) -> Result<Vec<u8>, Status> {
        let read = || {
            if self.inode(ino)?.kind != FileKind::Symlink {
                return Err(Status::Invalid.into());
            }
            match self.stored().symlink(ino)? {
                Some(target) => Ok(target),
                // The symlink is gone, or was never whole.
                None => {
                    self.inode(ino)?;
                    Err(MetaError::Inconsistent { what: "a symlink has no target", ino: ino.0 })
                }
            }
        };
        read().map_err(|e| self.fail("read_link", e))
    }

    /// The value of an extended attribute.
    ///
    /// # Errors
    /// `NoAttribute`, `Stale`, `Io`.
    pub fn xattr(&self, ino: InodeNo, name: &[u8]) -> Result<Vec<u8>, Status> {
        let read = || {
            let before = self.inode(ino)?;
            if before.xattrs == 0 || name.is_empty() || name.len() > NAME_MAX {
                return Err(Status::NoAttribute.into());
            }
            let value = self.stored().xattr(ino, name);
            // A value is several records. If the inode changed meanwhile, they may be of two values, which can also look like damage. So the value is
            // read again with the writers kept out.
            let value = if self.inode(ino)?.change == before.change {
                value
            } else {
                let _still = self.writer.lock();
                self.stored().xattr(ino, name)
            };
            value?.ok_or(MetaError::Refused(Status::NoAttribute))
        };
        read().map_err(|e| self.fail("xattr", e))
    }

    /// A file's access control list. Does not take the writer's mutex, because changes are judged under it.
    ///
    /// # Errors
    /// `Io`.
    pub fn access_list(&self, ino: InodeNo) -> Result<Option<Vec<u8>>, Status> {
        let read = || self.stored().xattr(ino, ACCESS_ACL_XATTR);
        // A list of several records may be replaced while it is read.
        let mut list = read();
        for _ in 1..LOOKUP_TRIES {
            if list.is_ok() {
                break;
            }
            list = read();
        }
        list.map_err(|e| self.fail("access_list", e))
    }

    /// The names of an inode's extended attributes, each ended by NUL.
    ///
    /// # Errors
    /// `Stale`, `Io`.
    pub fn xattr_names(&self, ino: InodeNo) -> Result<Vec<u8>, Status> {
        let read = || {
            let mut names = Vec::new();
            if self.inode(ino)?.xattrs > 0 {
                self.stored().xattr_names(ino, &mut |name| {
                    names.extend_from_slice(name);
                    names.push(0);
                })?;
            }
            Ok(names)
        };
        read().map_err(|e| self.fail("xattr_names", e))
    }

    /// The durable range table of a file, in file order. The caller must not let data of the file be committed meanwhile.
    ///
    /// # Errors
    /// `Io`.
    pub fn extents(&self, ino: InodeNo) -> Result<Vec<Extent>, Status> {
        let mut extents = Vec::new();
        let all = (FilePage(0), FilePage(u64::MAX));
        self.stored()
            .extents(ino, all.0, all.1, Direction::Forward, &mut |extent| {
                extents.push(extent);
                true
            })
            .map_err(|e| self.fail("extents", e))?;
        Ok(extents)
    }

    /// Visits the map of the pool pages that extents have, also those of orphans; all other pages are free. Returns how many pages contradict that
    /// (`Store::pages`).
    ///
    /// # Errors
    /// `Io`.
    pub fn pages(&self, visit: PartVisitor<'_>) -> Result<u64, Status> {
        self.store.pages(visit).map_err(|e| self.fail("pages", e.into()))
    }

    /// Visits every extent of every inode, also of orphans. Takes long: for tests, and for searches of a page's file.
    ///
    /// # Errors
    /// `Io`.
    pub fn all_extents(&self, visit: ExtentVisitor<'_>) -> Result<(), Status> {
        self.stored().all_extents(visit).map_err(|e| self.fail("all_extents", e))
    }

    /// The answer to a request, if it was done and is the last of its slot that changed something.
    ///
    /// # Errors
    /// `Io`.
    pub fn answer_to(&self, request: RequestId) -> Result<Option<Answer>, Status> {
        let key = key::client_slot(request.client, request.slot);
        let slot = self.stored().slot(&key).map_err(|e| self.fail("answer_to", e))?;
        Ok(slot.filter(|slot| slot.seq == request.seq).map(|slot| slot.answer))
    }

    /// The remembered clients. `None` for a client that was already forgotten when its last request was done, and that will not come back for the
    /// answer.
    ///
    /// # Errors
    /// `Io`.
    pub fn clients(&self) -> Result<Vec<(ClientId, Option<ClientRecord>)>, Status> {
        let mut clients: Vec<(ClientId, Option<ClientRecord>)> = Vec::new();
        let range = key::all(key::tag::CLIENT);
        self.stored()
            .scan(&range.from, &range.to, Direction::Forward, &mut |key, value| {
                let malformed = || MetaError::record(key)(RecordError::Malformed);
                let client = key::parse_client(key).ok_or_else(malformed)?;
                let record = || record::parse(value).map_err(MetaError::record(key));
                clients.push((client, if key::is_slot(key) { None } else { Some(record()?) }));
                Ok(true)
            })
            .map_err(|e| self.fail("clients", e))?;
        // A client's key comes before those of its slots.
        clients.dedup_by_key(|(client, _)| *client);
        Ok(clients)
    }
}
