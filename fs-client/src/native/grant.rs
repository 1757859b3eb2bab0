//! Write grants, and changes under them past the server's workers (docs/native.md).
//!
//! A file's writes, appends and atomics (`atomic`) go one-sidedly where a grant of the file permits that, and as requests where none does: a program need
//! not care.

use super::session::Opened;
use super::{File, NativeError};
use crate::file::OneSidedChange;
use crate::file::volume::{Caller, FsError, WriteHow};
use crate::transport::Change;
use cuttlefs_common::status::Status;
use std::ops::Range;

/// The most bytes of one grant. Neighbouring grants of an open file are as one.
pub const GRANT_MAX_BYTES: u64 = 64 << 20;

/// A write grant of a range of an open file. It is given back when it is dropped; the open file goes on.
///
/// While it stands, the pages of the range stay in the server's memory. Over a link without one-sided changes, and where the server gives none, it is
/// an empty promise ([`Self::is_one_sided`]): changes go as requests, with the same meaning.
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
        let is_one_sided = self.session().volume().changes_one_sidedly()
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
}
