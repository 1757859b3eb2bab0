//! Write grants, and changes under them past the server's workers (docs/native.md).
//!
//! A file's writes and appends go one-sidedly where a grant of the file permits that, and as requests where none does: a program need not care. Atomics
//! exist under a grant only.

use super::session::Opened;
use super::{File, NativeError};
use crate::file::volume::{Caller, FsError, Volume, WriteHow};
use crate::file::{OneSidedChange, Permit};
use crate::transport::Change;
use cuttlefs_common::status::Status;
use std::ops::Range;

/// The most bytes of one grant. Neighbouring grants of an open file are as one.
pub const GRANT_MAX_BYTES: u64 = 64 << 20;
/// How often an atomic is tried whose lane was in another session than the file.
const ATTEMPTS: usize = 100;

const NO_VERBS: &str = "atomics on files need a server's RNIC that has such verbs: over tcp:// and unix:// they exist, over shm:// and rdma:// they do not; connect by one of those, or take turns by a lock of a mount";
const NO_GRANTS: &str = "the server gives no write grants under its region policy; atomics on files need one (cuttlefsd without --policy)";

/// A write grant of a range of an open file. It is given back when it is dropped; the open file goes on.
///
/// While it stands, the pages of the range stay in the server's memory. Over a link without one-sided changes, and where the server gives none, it is
/// an empty promise ([`Self::is_one_sided`]): writes and appends go as requests, with the same meaning.
#[must_use = "a grant is given back when it is dropped"]
pub struct Grant {
    file: File,
    range: Range<u64>,
    is_one_sided: bool,
}

impl std::fmt::Debug for Grant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grant")
            .field("range", &self.range)
            .field("is_one_sided", &self.is_one_sided)
            .finish_non_exhaustive()
    }
}

impl Grant {
    /// The range.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Whether changes of the range can go past the server's workers at all: over this link, and by this server.
    pub fn is_one_sided(&self) -> bool {
        self.is_one_sided
    }

    /// Whether it stands, as far as this side knows. It ends when the file is cut before its end, or punched or zeroed in its range. What a kill of the
    /// server has taken does not stand, and comes back with the next change; while the server has no room for it, a change asks again each second.
    pub fn stands(&self) -> bool {
        let state = self.file.state();
        state.grants.stands(self.range.start, state.file().bound_key())
    }

    /// Asks for it again, after it has ended.
    ///
    /// # Errors
    /// As [`File::grant_write`].
    pub fn renew(&self) -> Result<(), NativeError> {
        if !self.is_one_sided {
            return Ok(());
        }
        let (file, Range { start, end }) = (self.file.opened().clone(), self.range());
        self.file.session().run(move |volume, caller| {
            volume.renew_grant(caller, &file.state, start, end).map_err(|error| file.explained(error))
        })
    }

    /// Gives it back now. When this returns, no change under it is under way.
    ///
    /// # Errors
    /// The session's. The grant is gone at the latest with the open file.
    pub fn give_back(self) -> Result<(), NativeError> {
        if !self.is_one_sided {
            return Ok(());
        }
        let (file, Range { start, end }) = (self.file.opened().clone(), self.range());
        if !file.state.grants.leave(start) {
            return Ok(());
        }
        self.file
            .session()
            .run(move |volume, caller| Ok(volume.return_grants(caller, &file.state, start, end)?))
    }
}

impl Drop for Grant {
    /// Soon, and not at once: nobody waits here for a server that is away.
    fn drop(&mut self) {
        let Range { start, end } = self.range;
        if !self.is_one_sided || !self.file.state().grants.leave(start) {
            return;
        }
        let (session, file) = (self.file.session().clone(), self.file.opened().clone());
        let caller = session.caller();
        let spawned = self.file.session().calls().spawn(move || {
            let returned = file.volume().return_grants(&caller, &file.state, start, end);
            if let Err(error) = returned {
                tracing::debug!(%error, "a write grant could not be given back; it ends with its open file");
            }
        });
        if spawned.is_err() {
            // It ends with the open file.
            tracing::debug!("a write grant is not given back: nobody has time");
        }
    }
}

impl File {
    /// Asks for a write grant of a range, which may reach behind the end of the file, for appends.
    ///
    /// # Errors
    /// `NotOpenFor`, `GrantLength`, `GrantOverlaps`, `OutsideRegion`; `Server(Busy)`: the server has no memory left for grants (a quarter of its frames
    /// are for all); `Server(NoSpace)`; `Deadline`.
    pub fn grant_write(&self, offset: u64, len: u64) -> Result<Grant, NativeError> {
        self.check(true)?;
        if len == 0 || len > GRANT_MAX_BYTES {
            return Err(NativeError::GrantLength { max: GRANT_MAX_BYTES });
        }
        self.opened().check_range(offset, len as usize)?;
        let end = offset.checked_add(len).ok_or(NativeError::Server(Status::TooLarge))?;
        let file = self.opened().clone();
        let is_one_sided = self.session().volume().changes_one_sidedly() == (true, true)
            && self.session().run(move |volume, caller| {
                match volume.grant_write(caller, &file.state, offset, end) {
                    Ok(true) => Ok(true),
                    Ok(false) => Err(NativeError::GrantOverlaps),
                    Err(FsError::Server(Status::Unsupported)) => Ok(false),
                    Err(error) => Err(file.explained(error)),
                }
            })?;
        Ok(Grant { file: self.clone(), range: offset..end, is_one_sided })
    }

    /// Stores `swap` in the word (little-endian) at `offset`, a multiple of 8, if `expect` is there. Returns what was there: it was swapped if that is
    /// `expect`. Atomic among all one-sided changes, and all writes by requests.
    ///
    /// # Errors
    /// `NotGranted`, `Unaligned`, `PastEnd`, `Unsupported` (the text says why), `MayBeDone`; as [`Self::write_at`], with nothing done.
    pub fn compare_swap(&self, offset: u64, expect: u64, swap: u64) -> Result<u64, NativeError> {
        self.atomic(Change::CompareSwap { offset, expect, swap })
    }

    /// Adds to the word (little-endian, wrapping around) at `offset`, a multiple of 8. Returns what was there.
    ///
    /// # Errors
    /// As [`Self::compare_swap`].
    pub fn fetch_add(&self, offset: u64, add: u64) -> Result<u64, NativeError> {
        self.atomic(Change::FetchAdd { offset, add })
    }

    fn atomic(&self, change: Change<'static>) -> Result<u64, NativeError> {
        self.check_atomic(place(&change))?;
        let file = self.opened().clone();
        self.session().run(move |_, caller| file.atomic(caller, change))
    }

    /// Whether an atomic could be done at this place at all.
    pub(super) fn check_atomic(&self, offset: u64) -> Result<(), NativeError> {
        self.check(true)?;
        if !offset.is_multiple_of(8) {
            return Err(NativeError::Unaligned);
        }
        self.opened().check_range(offset, 8)?;
        match self.session().volume().changes_one_sidedly() {
            (false, _) => Err(NativeError::Unsupported(NO_VERBS)),
            (true, false) => Err(NativeError::Unsupported(NO_GRANTS)),
            (true, true) => Ok(()),
        }
    }
}

fn place(change: &Change<'_>) -> u64 {
    match *change {
        Change::Write { offset, .. }
        | Change::CompareSwap { offset, .. }
        | Change::FetchAdd { offset, .. } => offset,
        Change::Append { .. } => 0,
    }
}

impl Opened {
    /// Writes one-sidedly if that is granted. Returns where; `None`: it was not done, or may be done again.
    pub(super) fn write_granted(
        &self,
        caller: &Caller,
        offset: u64,
        bytes: &[u8],
        how: WriteHow,
    ) -> Result<Option<u64>, NativeError> {
        if how.sync || bytes.is_empty() || self.state.grants.is_empty() {
            return Ok(None);
        }
        self.volume().renew_lost(caller, &self.state).map_err(|error| self.explained(error))?;
        let change = if how.append { Change::Append { bytes } } else { Change::Write { offset, bytes } };
        match self.volume().change_granted(&self.state, change)? {
            OneSidedChange::Done(at) => Ok(Some(if how.append { at } else { offset })),
            OneSidedChange::NoSpace => Err(NativeError::Server(Status::NoSpace)),
            OneSidedChange::MayBeDone if how.append => Err(NativeError::MayBeDone),
            OneSidedChange::MayBeDone | OneSidedChange::NotDone => Ok(None),
        }
    }

    /// Does an atomic. Waits while the server is away, unless the atomic may be done.
    pub(super) fn atomic(&self, caller: &Caller, change: Change<'_>) -> Result<u64, NativeError> {
        let (volume, state) = (self.volume(), &self.state);
        let offset = place(&change);
        for _ in 0..ATTEMPTS {
            volume.renew_lost(caller, state).map_err(|error| self.explained(error))?;
            match state.grants.permits(state.file().filekey(), offset, offset.saturating_add(8)) {
                Permit::NotGranted if volume.lost_grants(state).is_empty() => {
                    return Err(NativeError::NotGranted);
                }
                Permit::NotGranted => continue,
                Permit::PastEnd => {
                    let len = volume.get_attr(caller, state.file().ino())?.size;
                    if offset.saturating_add(8) > len {
                        return Err(NativeError::PastEnd);
                    }
                    state.grants.note_len(len);
                }
                Permit::Granted => {}
            }
            match volume.change_granted(state, change)? {
                OneSidedChange::Done(old) => return Ok(old),
                OneSidedChange::NoSpace => return Err(NativeError::Server(Status::NoSpace)),
                OneSidedChange::MayBeDone => return Err(NativeError::MayBeDone),
                // Refused, and the grant with it; or the lane is in another session, and the next one makes it good.
                OneSidedChange::NotDone => {}
            }
        }
        Err(NativeError::NotGranted)
    }
}
