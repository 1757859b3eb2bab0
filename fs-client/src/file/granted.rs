//! File regions, what `native` has of them beside [`Volume`](super::volume::Volume): ranges that are bound for others, files that are opened by their keys,
//! write grants, and one-sided changes under these (docs/file-regions.md).

use super::handles::HandleState;
use super::remote::{RemoteVolume, unfenced, unless_fenced};
use super::replies::{done, unexpected};
use super::volume::{Caller, FsError, Handle, OpenHow};
use crate::session::Life;
use crate::transport::{Change, Changed, Refusal};
use cuttlefs_common::ids::FileKey;
use cuttlefs_common::rpc::{Attached, OneSidedReads, RegionKey, Reply, Request, Rights, SyncScope};
use cuttlefs_common::status::Status;
use std::cell::Cell;

/// What came of a one-sided change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OneSidedChange {
    /// It is done: the old word of an atomic, or where the bytes of an append are.
    Done(u64),
    /// It is not granted, or there is no such way now: nothing was done.
    NotDone,
    /// The pool is full: nothing was done.
    NoSpace,
    /// The connection broke: it may be done.
    MayBeDone,
}

/// What a change reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// It overwrites a range.
    Range {
        /// The first byte.
        offset: u64,
        /// The byte behind it.
        end: u64,
    },
    /// It appends.
    End,
}

impl Reach {
    /// That of so many bytes from here on.
    pub(crate) fn range(offset: u64, len: usize) -> Self {
        Self::Range { offset, end: offset.saturating_add(len as u64) }
    }

    /// That of a change.
    pub(crate) fn of(change: &Change<'_>) -> Self {
        match *change {
            Change::Write { offset, bytes } => Self::range(offset, bytes.len()),
            Change::Word { offset, .. } => Self::range(offset, 8),
            Change::Append { .. } => Self::End,
        }
    }
}

/// A change that may be posted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Postable {
    /// The filekey to name.
    pub(crate) filekey: FileKey,
    /// The session that it is of.
    pub(crate) session: u64,
    /// The server's life, for [`RemoteVolume::note_changed`].
    pub(crate) life: Life,
}

impl RemoteVolume {
    /// Binds a range of an open file.
    ///
    /// # Errors
    /// The server's.
    pub(crate) fn bind(
        &self,
        caller: &Caller,
        state: &HandleState,
        (offset, len): (u64, u64),
        rights: Rights,
        lifetime_ms: u64,
    ) -> Result<RegionKey, FsError> {
        let file = state.file();
        let build = || Request::Bind { filekey: file.filekey(), offset, len, rights, lifetime_ms };
        self.session.call(caller, build, |reply| match reply {
            Reply::Bound(key) => {
                file.bound().push(key);
                Ok(key)
            }
            other => unexpected(other),
        })
    }

    /// Ends a binding of an open file. `false`: it has no such binding.
    ///
    /// # Errors
    /// The session's.
    pub(crate) fn unbind(
        &self,
        caller: &Caller,
        state: &HandleState,
        key: &RegionKey,
    ) -> Result<bool, FsError> {
        {
            // Before the request, so that no recovery binds it again behind it.
            let mut bound = state.file().bound();
            let before = bound.len();
            bound.retain(|bound| bound != key);
            if bound.len() == before {
                return Ok(false);
            }
        }
        self.session.call(caller, || Request::Unbind { number: key.number }, done)?;
        Ok(true)
    }

    /// Opens what a region key is for.
    ///
    /// # Errors
    /// The server's: `Stale` if the binding is over, `Denied` if the key is not good, or not for this client.
    pub(crate) fn open_region(&self, caller: &Caller, key: RegionKey) -> Result<Handle, FsError> {
        let file = self.session.call(
            caller,
            || Request::OpenRegion { key },
            |reply| match reply {
                Reply::Opened(opened) => Ok(self.session.opens().add_region(&opened, key)),
                other => unexpected(other),
            },
        )?;
        let how = OpenHow { read: key.rights.read, write: key.rights.write, ..OpenHow::default() };
        Ok(self.insert_handle(file, how))
    }

    /// Runs `operation` through an open file. What was opened by a region key and lost by a recovery is opened again first, as often as that comes
    /// between. If the key has ended, so has the open file.
    pub(super) fn through<T>(
        &self,
        caller: &Caller,
        state: &HandleState,
        mut operation: impl FnMut() -> Result<T, FsError>,
    ) -> Result<T, FsError> {
        let file = state.file();
        if file.region_key().is_none() {
            return operation();
        }
        loop {
            self.session.open_again(caller, file)?;
            let key = file.bound_key();
            match operation() {
                Err(FsError::Server(Status::Stale)) if file.bound_key() != key => {}
                Err(FsError::Server(Status::Stale)) => {
                    file.end();
                    return Err(FsError::Server(Status::Stale));
                }
                result => return result,
            }
        }
    }

    /// Makes a file durable. `true`: bytes that were written are lost, and this handle was not told before.
    ///
    /// # Errors
    /// The server's.
    pub(crate) fn sync_told(&self, caller: &Caller, state: &HandleState) -> Result<bool, FsError> {
        unfenced(state)?;
        let ino = state.file().ino();
        self.sync_kept(caller, ino, SyncScope::Inode(ino))?;
        Ok(self.session.unsynced().losses().tell(ino, &state.losses_told))
    }

    /// Whether files can be changed one-sidedly: over this link, and by this server, which gives grants if its pages come back as magic.
    pub(crate) fn changes_one_sidedly(&self) -> bool {
        let gives = |attached: &Attached| attached.one_sided == OneSidedReads::Magic;
        let gives = self.session.look().is_some_and(|attachment| gives(&attachment.attached));
        self.session.target_translates() && gives
    }

    /// Asks for a write grant. `false`: the open file holds one of a part of the range.
    ///
    /// # Errors
    /// The server's; then nothing is held.
    pub(crate) fn grant_write(
        &self,
        caller: &Caller,
        state: &HandleState,
        offset: u64,
        end: u64,
    ) -> Result<bool, FsError> {
        let _alone = state.grants.returning();
        self.return_leaving(caller, state, offset, end)?;
        if !state.grants.want(offset, end) {
            return Ok(false);
        }
        let granted = self.ask_grant(caller, state, offset, end);
        if granted.is_err() {
            state.grants.forget(offset);
        }
        granted.map(|()| true)
    }

    /// Asks for a held grant again.
    ///
    /// # Errors
    /// The server's. One that stood stands; one that is lost stays lost if the server has no room; another has ended.
    pub(crate) fn renew_grant(
        &self,
        caller: &Caller,
        state: &HandleState,
        offset: u64,
        end: u64,
    ) -> Result<(), FsError> {
        self.ask_grant(caller, state, offset, end).inspect_err(|error| {
            let is_full = matches!(error, FsError::Server(Status::NoSpace | Status::Busy));
            let no_room = is_full.then(|| self.session.link().now());
            let has_ended = state.grants.not_given(offset, state.file().bound_key(), no_room);
            if has_ended {
                tracing::debug!(ino = %state.file().ino(), offset, end, %error, "a write grant was not given again");
            }
        })
    }

    /// The grants of an open file that a recovery has lost, and that are to be asked for now.
    pub(crate) fn lost_grants(&self, state: &HandleState) -> Vec<(u64, u64)> {
        state.grants.lost(state.file().bound_key(), self.session.link().now())
    }

    fn ask_grant(&self, caller: &Caller, state: &HandleState, offset: u64, end: u64) -> Result<(), FsError> {
        let file = state.file();
        let asked_by = Cell::new(file.filekey());
        let build = || {
            // A recovery between two attempts changes the filekey.
            asked_by.set(file.filekey());
            Request::GrantWrite { filekey: asked_by.get(), offset, len: end - offset }
        };
        self.through(caller, state, || {
            let attr = self.session.call(caller, build, super::replies::attr)?;
            state.grants.given(offset, asked_by.get(), attr.size);
            Ok(())
        })
    }

    /// Gives the grants of a range back that nobody wants any more.
    ///
    /// # Errors
    /// The session's.
    pub(crate) fn return_grants(
        &self,
        caller: &Caller,
        state: &HandleState,
        offset: u64,
        end: u64,
    ) -> Result<(), FsError> {
        let _alone = state.grants.returning();
        self.return_leaving(caller, state, offset, end)
    }

    fn return_leaving(
        &self,
        caller: &Caller,
        state: &HandleState,
        offset: u64,
        end: u64,
    ) -> Result<(), FsError> {
        for (start, end, filekey) in state.grants.leaving(offset, end) {
            // One of an earlier filekey went with that; so it is if this one does meanwhile.
            if filekey == state.file().bound_key() {
                let build = || Request::ReturnGrant { filekey, offset: start, len: end - start };
                match self.session.call(caller, build, done) {
                    Err(FsError::Server(Status::Stale)) => {}
                    result => result?,
                }
            }
            state.grants.forget(start);
        }
        Ok(())
    }

    /// Asks again for the grants that a recovery has lost. Those for which the server has no room stay lost; others that are refused have ended.
    ///
    /// # Errors
    /// The session's.
    pub(crate) fn renew_lost(&self, caller: &Caller, state: &HandleState) -> Result<(), FsError> {
        if state.grants.is_empty() {
            return Ok(());
        }
        self.through(caller, state, || Ok(()))?;
        for (offset, end) in self.lost_grants(state) {
            match self.renew_grant(caller, state, offset, end) {
                Err(FsError::Server(_)) => {}
                result => result?,
            }
        }
        Ok(())
    }

    /// Whether a change may be made one-sidedly now, and by which names.
    pub(crate) fn postable(&self, state: &HandleState, reach: Reach) -> Option<Postable> {
        if state.grants.is_empty() || state.file().is_fenced() {
            return None;
        }
        let attachment = self.session.look()?;
        if !self.session.target_translates_for(&attachment) {
            return None;
        }
        let filekey = state.file().filekey();
        let may = match reach {
            Reach::Range { offset, end } => state.grants.permits(filekey, offset, end),
            Reach::End => state.grants.permit_appends(filekey),
        };
        let session = attachment.attached.session;
        // Read last: once a later life has begun, no connection of this session stands, so what is done was done in the life that is read here.
        let life = self.session.unsynced().life();
        may.then_some(Postable { filekey, session, life })
    }

    /// A change that was posted is done; `value` came back.
    pub(crate) fn note_changed(
        &self,
        state: &HandleState,
        append_len: Option<usize>,
        life: Life,
        value: u64,
    ) {
        self.session.unsynced().note_one_sided(state.file().ino(), life);
        if let Some(len) = append_len {
            state.grants.note_len(value.saturating_add(len as u64));
        }
    }

    /// The server has refused a change that was posted, as it is not granted.
    pub(crate) fn note_refused(&self, state: &HandleState, filekey: FileKey, reach: Reach) {
        let now = state.file().bound_key();
        match reach {
            Reach::Range { offset, end } => state.grants.refused(filekey, now, offset, end),
            // There is no grant at all; or the end of the file is behind the part that was opened, which says nothing of grants.
            Reach::End if state.file().region_key().is_none() => {
                state.grants.refused(filekey, now, 0, u64::MAX);
            }
            Reach::End => {}
        }
    }

    /// Makes a change one-sidedly, and waits for its end.
    ///
    /// # Errors
    /// The session's.
    pub(crate) fn change_granted(
        &self,
        state: &HandleState,
        change: Change<'_>,
    ) -> Result<OneSidedChange, FsError> {
        let Some(Postable { filekey, session, life }) = self.postable(state, Reach::of(&change)) else {
            return Ok(OneSidedChange::NotDone);
        };
        let mut lane = self.session.borrow_lane()?;
        let changed = unless_fenced(state.file(), lane.change(session, filekey, change))?;
        drop(lane);
        Ok(match changed {
            Changed::Done(value) => {
                let append_len = if let Change::Append { bytes } = change { Some(bytes.len()) } else { None };
                self.note_changed(state, append_len, life, value);
                OneSidedChange::Done(value)
            }
            Changed::Refused(Refusal::NoSpace) => OneSidedChange::NoSpace,
            Changed::Refused(Refusal::NotGranted) => {
                self.note_refused(state, filekey, Reach::of(&change));
                OneSidedChange::NotDone
            }
            Changed::Unsent => OneSidedChange::NotDone,
            Changed::Unknown => OneSidedChange::MayBeDone,
        })
    }
}
