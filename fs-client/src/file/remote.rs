//! `Volume` over a session. Each method is one request, except reads (`read`), writes (`write`) and copies (`copy`).

use super::figures::figures;
use super::grants::HeldGrants;
use super::handles::{HandleState, HandleTable};
use super::idle_memory::IdleMemory;
use super::replies::{attr, bytes, changes, done, unexpected};
use super::volume::{
    Caller, Condition, Copied, FsError, Handle, LockWaiter, OpenFile, OpenHow, Volume, WriteHow, Written,
};
use crate::read::{BitmapPulls, CachedRegion, CountSharing, Reads};
use crate::session::{Room, ServerOpen, Session, Task, Unsynced};
use cuttlefs_common::attr::{Attr, InodeFlags, SetAttr};
use cuttlefs_common::ids::{InodeNo, MAX_FILE_SIZE};
use cuttlefs_common::locks::{Lock, LockOwner, LockRange, LockSpace};
use cuttlefs_common::name;
use cuttlefs_common::rdma::HardwareFigures;
use cuttlefs_common::rpc::{
    Allocate, BlockingLock, DirEntry, MAX_TRANSFER_BYTES, NewNode, OpenBy, RenameMode, Reply, Request,
    Rights, SeekFor, Space, SyncScope, XattrMode,
};
use cuttlefs_common::status::Status;
use std::io;
use std::sync::Arc;

/// The most bytes of directory entries in one reply.
const READDIR_BYTES: u32 = 48 * 1024;

/// A mounted volume on a server.
pub struct RemoteVolume {
    pub(super) session: Arc<Session>,
    pub(super) handles: Arc<HandleTable>,
    pub(super) reads: Arc<Reads>,
}

/// Refuses names that the server would refuse: a long name would not even fit a message.
fn check_name(name: &[u8]) -> Result<(), FsError> {
    name::check(name).map_err(FsError::Server)
}

impl RemoteVolume {
    /// The volume of a connected session, which it starts.
    ///
    /// # Errors
    /// A thread could not be started. The session is shut down.
    pub fn new(session: Arc<Session>) -> io::Result<Self> {
        let (handles, reads) = (Arc::new(HandleTable::default()), Arc::new(Reads::default()));
        let open = handles.clone();
        let tasks: [Box<dyn Task>; 3] = [
            Box::new(CountSharing::default()),
            Box::new(BitmapPulls::new(reads.clone(), Box::new(move || open.regions()))),
            Box::new(IdleMemory::new(reads.clone())),
        ];
        session.start(tasks.into())?;
        Ok(Self { session, handles, reads })
    }

    /// The open file of a handle, for I/O through it.
    ///
    /// # Errors
    /// `Io` if a lock that was taken through it was lost.
    fn unfenced(&self, handle: Handle) -> Result<Arc<HandleState>, FsError> {
        let state = self.handles.get(handle)?;
        unfenced(&state).map(|()| state)
    }

    /// The state of reads.
    pub(crate) fn reads(&self) -> &Arc<Reads> {
        &self.reads
    }

    /// Looks which pages are on SSD, as the control thread does each second over links where this side READs the server's tables. For clients without
    /// that thread.
    pub fn look_around(&self) {
        if let Ok(mut lane) = self.session.borrow_lane() {
            self.reads.look_around(&self.session, &self.handles.regions(), &mut lane);
        }
    }

    /// The session underneath, for figures.
    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// Adds the file that a reply opens to the files that a recovery reclaims.
    fn open_file(&self, reply: Reply<'_>, rights: Rights) -> Result<(Attr, Arc<ServerOpen>), FsError> {
        let Reply::Opened(opened) = reply else { return unexpected(reply) };
        Ok((opened.attr, self.session.opens().add(&opened, rights)))
    }

    fn opened(&self, (attr, file): (Attr, Arc<ServerOpen>), how: OpenHow) -> OpenFile {
        self.session.opens().forget_written(|| self.session.unsynced().files());
        OpenFile { handle: self.insert_handle(file, how), change: attr.change }
    }

    /// Room for the note of a cut or an allocation, and the epoch before it is asked for.
    fn to_be_noted(&self) -> Result<(Room<'_>, u64), FsError> {
        Ok((self.session.room_for(0)?, self.session.recovered_epoch()))
    }

    pub(super) fn insert_handle(&self, file: Arc<ServerOpen>, how: OpenHow) -> Handle {
        let losses_told = self.session.unsynced().losses().before_open(file.ino());
        let region = Arc::new(CachedRegion::new(file));
        self.handles.insert(HandleState { region, how, losses_told, grants: HeldGrants::default() })
    }
}

/// # Errors
/// `Io` if a lock that was taken through the open file was lost.
pub(super) fn unfenced(state: &HandleState) -> Result<(), FsError> {
    if state.file().is_fenced() { Err(FsError::Server(Status::Io)) } else { Ok(()) }
}

/// The result of a request through an open file. If the file was fenced during the request, its filekey was not valid, so the error is `Io`.
pub(super) fn unless_fenced<T>(file: &ServerOpen, result: Result<T, FsError>) -> Result<T, FsError> {
    result.map_err(|error| if file.is_fenced() { FsError::Server(Status::Io) } else { error })
}

fn rights(how: &OpenHow) -> Rights {
    Rights { read: how.read, write: how.write }
}

impl Volume for RemoteVolume {
    fn root(&self) -> InodeNo {
        self.session.root()
    }

    fn server_epoch(&self) -> u64 {
        self.session.look().map_or(0, |attachment| attachment.attached.server_epoch)
    }

    fn lookup(&self, caller: &Caller, parent: InodeNo, name: &[u8]) -> Result<Attr, FsError> {
        if name != b".." {
            check_name(name)?;
        }
        self.session.call(caller, || Request::Lookup { parent, name }, attr)
    }

    fn get_attr(&self, caller: &Caller, ino: InodeNo) -> Result<Attr, FsError> {
        self.session.call(caller, || Request::GetAttr { ino }, attr)
    }

    fn changes(&self, inos: &[InodeNo]) -> Result<Vec<Option<u64>>, FsError> {
        self.session.call(&self.session.own_caller(), || Request::Changes { inodes: inos.to_vec() }, changes)
    }

    fn set_attr(&self, caller: &Caller, ino: InodeNo, set: SetAttr) -> Result<Attr, FsError> {
        if set.size.is_some_and(|size| size > MAX_FILE_SIZE) {
            return Err(FsError::Server(Status::TooLarge));
        }
        if set == SetAttr::default() {
            // Nothing changes, so the change counter in the reply may be of another client's change.
            return self.get_attr(caller, ino);
        }
        let cut = set.size.map(|size| self.to_be_noted().map(|noted| (size, noted))).transpose()?;
        let build = || Request::SetAttr { ino, set };
        let (attr, session) = self.session.call_noting_session(caller, build, attr)?;
        if let Some((size, (room, epoch))) = cut {
            let note = |unsynced: &Unsynced| unsynced.note_end(room, session, ino, size, attr.change);
            self.session.note_answered(caller, ino, epoch, note);
        }
        Ok(attr)
    }

    fn make(
        &self,
        caller: &Caller,
        parent: InodeNo,
        name: &[u8],
        node: NewNode<'_>,
        mode: u16,
    ) -> Result<Attr, FsError> {
        check_name(name)?;
        let build = || Request::Make { parent, name, node, mode };
        self.session.call(caller, build, attr)
    }

    fn create(
        &self,
        caller: &Caller,
        parent: InodeNo,
        name: &[u8],
        mode: u16,
        exclusive: bool,
        how: OpenHow,
    ) -> Result<(Attr, OpenFile), FsError> {
        check_name(name)?;
        let rights = rights(&how);
        let build = || Request::Create { parent, name, mode, exclusive, rights };
        let made = self.session.call(caller, build, |reply| self.open_file(reply, rights))?;
        Ok((made.0, self.opened(made, how)))
    }

    fn create_nameless(
        &self,
        caller: &Caller,
        parent: InodeNo,
        mode: u16,
        how: OpenHow,
    ) -> Result<(Attr, OpenFile), FsError> {
        let rights = rights(&how);
        let build = || Request::CreateNameless { parent, mode, rights };
        let made = self.session.call(caller, build, |reply| self.open_file(reply, rights))?;
        Ok((made.0, self.opened(made, how)))
    }

    fn link(&self, caller: &Caller, ino: InodeNo, parent: InodeNo, name: &[u8]) -> Result<Attr, FsError> {
        check_name(name)?;
        let build = || Request::Link { ino, parent, name };
        self.session.call(caller, build, attr)
    }

    fn unlink(&self, caller: &Caller, parent: InodeNo, name: &[u8]) -> Result<(), FsError> {
        check_name(name)?;
        self.session.call(caller, || Request::Unlink { parent, name }, done)
    }

    fn rmdir(&self, caller: &Caller, parent: InodeNo, name: &[u8]) -> Result<(), FsError> {
        check_name(name)?;
        self.session.call(caller, || Request::Rmdir { parent, name }, done)
    }

    fn rename(
        &self,
        caller: &Caller,
        parent: InodeNo,
        name: &[u8],
        new_parent: InodeNo,
        new_name: &[u8],
        mode: RenameMode,
    ) -> Result<Attr, FsError> {
        check_name(name)?;
        check_name(new_name)?;
        let build = || Request::Rename { parent, name, new_parent, new_name, mode };
        self.session.call(caller, build, attr)
    }

    fn read_link(&self, caller: &Caller, ino: InodeNo) -> Result<Vec<u8>, FsError> {
        self.session.call(caller, || Request::ReadLink { ino }, bytes)
    }

    fn open(&self, caller: &Caller, ino: InodeNo, how: OpenHow) -> Result<OpenFile, FsError> {
        let rights = rights(&how);
        let cut = how.truncate.then(|| self.to_be_noted()).transpose()?;
        let by = how.told.map_or(OpenBy::Number, |told| OpenBy::Name { told });
        let build = || Request::Open { ino, rights, truncate: how.truncate, by };
        let take = |reply: Reply<'_>| self.open_file(reply, rights);
        let ((attr, file), session) = self.session.call_noting_session(caller, build, take)?;
        if let Some((room, epoch)) = cut {
            let note = |unsynced: &Unsynced| unsynced.note_end(room, session, ino, 0, attr.change);
            self.session.note_answered(caller, ino, epoch, note);
        }
        if how.write && !how.append && attr.flags.has(InodeFlags::APPEND_ONLY) {
            // The error must come from open(2), not from the first write.
            self.session.close(file);
            return Err(FsError::Server(Status::NotPermitted));
        }
        Ok(self.opened((attr, file), how))
    }

    fn read(
        &self,
        caller: &Caller,
        handle: Handle,
        offset: u64,
        len: u32,
        take: &mut dyn FnMut(&[u8]),
    ) -> Result<(), FsError> {
        let room = MAX_FILE_SIZE.saturating_sub(offset);
        let len = u64::from(len.min(MAX_TRANSFER_BYTES)).min(room) as usize;
        self.reads.buffers.lend(len, |buffer| {
            let read = |state: &HandleState| {
                unfenced(state)?;
                let got = self.reads.read(&self.session, caller, &state.region, offset, &mut *buffer);
                unless_fenced(state.file(), got)
            };
            let got = self.handles.with(handle, read)?;
            take(&buffer[..got]);
            Ok(())
        })
    }

    fn write(&self, caller: &Caller, handle: Handle, offset: u64, bytes: &[u8]) -> Result<u32, FsError> {
        let state = self.unfenced(handle)?;
        let how = WriteHow { append: state.how.append, sync: state.how.sync };
        self.write_through(caller, &state, offset, bytes, how).map(|written| written.len)
    }

    fn write_how(
        &self,
        caller: &Caller,
        handle: Handle,
        offset: u64,
        bytes: &[u8],
        how: WriteHow,
    ) -> Result<Written, FsError> {
        let state = self.unfenced(handle)?;
        self.write_through(caller, &state, offset, bytes, how)
    }

    fn fsync(&self, caller: &Caller, handle: Handle, contents_only: bool) -> Result<(), FsError> {
        let state = self.unfenced(handle)?;
        let ino = state.file().ino();
        let scope = if contents_only { SyncScope::InodeContents(ino) } else { SyncScope::Inode(ino) };
        self.sync(caller, &state, scope)
    }

    fn fsync_dir(&self, caller: &Caller, ino: InodeNo) -> Result<(), FsError> {
        self.sync_kept(caller, ino, SyncScope::Inode(ino))
    }

    fn flush(&self, handle: Handle, closer: LockOwner) -> Result<(), FsError> {
        let state = self.handles.get(handle)?;
        let ino = state.file().ino();
        self.session.release_owner(ino, closer);
        // Any process that inherited the descriptor may close it and ignore the error, so the next fsync returns it, too.
        let lost = state.how.write && self.session.unsynced().losses().are_untold(ino, &state.losses_told);
        if lost { Err(FsError::Server(Status::Io)) } else { Ok(()) }
    }

    fn open_directory(&self, caller: &Caller, ino: InodeNo) -> Result<Handle, FsError> {
        let rights = Rights::default();
        let build = || Request::Open { ino, rights, truncate: false, by: OpenBy::Number };
        let (_, file) = self.session.call(caller, build, |reply| self.open_file(reply, rights))?;
        Ok(self.insert_handle(file, OpenHow::default()))
    }

    fn release(&self, handle: Handle) {
        if let Some(state) = self.handles.remove(handle) {
            self.session.release_open(state.file());
            self.session.close(state.file().clone());
        }
    }

    fn read_dir(
        &self,
        caller: &Caller,
        ino: InodeNo,
        cookie: u64,
        plus: bool,
        take: &mut dyn FnMut(&DirEntry<'_>) -> bool,
    ) -> Result<(), FsError> {
        let mut cookie = cookie;
        loop {
            let build = || Request::ReadDir { ino, cookie, max_bytes: READDIR_BYTES, plus };
            let next = self.session.call(caller, build, |reply| {
                let Reply::Entries { entries, end } = reply else {
                    return unexpected(reply);
                };
                for entry in &entries {
                    if !take(entry) {
                        return Ok(None);
                    }
                }
                Ok(entries.last().map(|last| last.cookie).filter(|_| !end))
            })?;
            match next {
                Some(last) => cookie = last,
                None => return Ok(()),
            }
        }
    }

    fn stat_fs(&self, caller: &Caller) -> Result<Space, FsError> {
        self.session.call(
            caller,
            || Request::StatFs,
            |reply| match reply {
                Reply::Space(space) => Ok(space),
                other => unexpected(other),
            },
        )
    }

    fn get_xattr(&self, caller: &Caller, ino: InodeNo, name: &[u8]) -> Result<Vec<u8>, FsError> {
        self.session.call(caller, || Request::GetXattr { ino, name }, bytes)
    }

    fn list_xattr(&self, caller: &Caller, ino: InodeNo) -> Result<Vec<u8>, FsError> {
        self.session.call(caller, || Request::ListXattr { ino }, bytes)
    }

    fn set_xattr(
        &self,
        caller: &Caller,
        ino: InodeNo,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
    ) -> Result<(), FsError> {
        self.session.call(caller, || Request::SetXattr { ino, name, value, mode }, done)
    }

    fn remove_xattr(&self, caller: &Caller, ino: InodeNo, name: &[u8]) -> Result<(), FsError> {
        self.session.call(caller, || Request::RemoveXattr { ino, name }, done)
    }

    fn allocate(
        &self,
        caller: &Caller,
        handle: Handle,
        offset: u64,
        len: u64,
        how: Allocate,
    ) -> Result<u64, FsError> {
        let state = self.unfenced(handle)?;
        let (room, epoch) = self.to_be_noted()?;
        let build = || Request::Allocate { filekey: state.file().filekey(), offset, len, how };
        let ino = state.file().ino();
        let (attr, session) = self.session.call_noting_session(caller, build, attr)?;
        let note = |unsynced: &Unsynced| {
            unsynced.note_allocate(room, session, ino, (offset, len), how, attr.change);
        };
        self.session.note_answered(caller, ino, epoch, note);
        Ok(attr.change)
    }

    fn seek(&self, caller: &Caller, handle: Handle, offset: u64, seek: SeekFor) -> Result<u64, FsError> {
        let state = self.handles.get(handle)?;
        let build = || Request::Seek { filekey: state.file().filekey(), offset, seek };
        self.session.call(caller, build, |reply| match reply {
            Reply::Offset(offset) => Ok(offset),
            other => unexpected(other),
        })
    }

    fn copy_range(
        &self,
        caller: &Caller,
        from: Handle,
        from_offset: u64,
        to: Handle,
        to_offset: u64,
        len: u64,
    ) -> Result<Copied, FsError> {
        let (source, target) = (self.unfenced(from)?, self.unfenced(to)?);
        self.copy(caller, (from, &source, from_offset), (&target, to_offset), len)
    }

    fn has_locks(&self) -> bool {
        true
    }

    fn set_lock(
        &self,
        caller: &Caller,
        handle: Handle,
        lock: Lock,
        blocking: bool,
        waiter: Arc<dyn LockWaiter>,
    ) {
        match self.unfenced(handle) {
            Ok(state) => self.session.set_lock(caller, state.file(), lock, blocking, waiter),
            Err(error) => {
                let _told = waiter.answer(Err(error));
            }
        }
    }

    fn lock_waits_interrupted(&self) {
        self.session.lock_waits_interrupted();
    }

    fn unlock(
        &self,
        caller: &Caller,
        handle: Handle,
        space: LockSpace,
        owner: LockOwner,
        range: LockRange,
    ) -> Result<(), FsError> {
        let ino = self.handles.get(handle)?.file().ino();
        self.session.unlock(caller, ino, space, owner, range)
    }

    fn test_lock(
        &self,
        caller: &Caller,
        handle: Handle,
        lock: Lock,
    ) -> Result<Option<BlockingLock>, FsError> {
        let state = self.unfenced(handle)?;
        unless_fenced(state.file(), self.session.test_lock(caller, state.file(), lock))
    }

    fn figures(&self) -> Vec<(&'static str, u64)> {
        figures(&self.session, &self.reads)
    }

    fn hardware(&self) -> Option<HardwareFigures> {
        self.session.hardware()
    }

    fn condition(&self) -> Condition {
        self.session.condition()
    }

    fn sync_all(&self) -> Result<(), FsError> {
        self.session.sync_all(&self.session.own_caller())
    }

    fn shut_down(&self) {
        self.session.shut_down();
    }
}
