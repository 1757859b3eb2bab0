//! Reads into memory of the caller's own: what `native` has beside [`Volume`](super::volume::Volume).

use super::handles::HandleState;
use super::remote::{RemoteVolume, unfenced, unless_fenced};
use super::volume::{Caller, FsError, Handle};
use crate::read::{Destination, PlannedRead};
use cuttlefs_common::ids::MAX_FILE_SIZE;
use cuttlefs_common::region::PageSet;
use cuttlefs_common::rpc::MAX_TRANSFER_BYTES;
use std::sync::Arc;

/// How many of `len` bytes from `offset` on one request reads.
fn clip(offset: u64, len: usize) -> usize {
    let room = MAX_FILE_SIZE.saturating_sub(offset).min(u64::from(MAX_TRANSFER_BYTES));
    len.min(room as usize)
}

impl RemoteVolume {
    /// Reads up to the length of `out`, and at most what one request reads. Fewer bytes mean the end of the file.
    pub(crate) fn read_into(
        &self,
        caller: &Caller,
        state: &HandleState,
        offset: u64,
        out: &mut [u8],
    ) -> Result<usize, FsError> {
        unfenced(state)?;
        let wanted = clip(offset, out.len());
        self.through(caller, state, || {
            let got = self.reads.read(&self.session, caller, &state.region, offset, &mut out[..wanted]);
            unless_fenced(state.file(), got)
        })
    }

    /// As `read_into`, if it needs no message: `None` otherwise. What does not fit one request is not read in this way.
    pub(crate) fn read_mapped(
        &self,
        state: &HandleState,
        offset: u64,
        out: &mut (impl Destination + ?Sized),
    ) -> Option<usize> {
        if clip(offset, out.wanted()) < out.wanted() || !is_usable(state) {
            return None;
        }
        self.reads.read_mapped(&self.session, &state.region, offset, out)
    }

    /// Plans a read by READs, and says which session they are of. `None`: there is no such way now.
    pub(crate) fn plan_read(
        &self,
        state: &HandleState,
        offset: u64,
        len: usize,
    ) -> Option<(PlannedRead, u64)> {
        if len == 0 || clip(offset, len) < len || !is_usable(state) {
            return None;
        }
        let attachment = self.session.look()?;
        let planned = self.reads.plan(&self.session, &attachment, &state.region, offset, len)?;
        Some((planned, attachment.attached.session))
    }

    /// Fetches the pages of `missing` into their places in `out`. Returns how many bytes precede the end of the file.
    pub(crate) fn fetch_into(
        &self,
        caller: &Caller,
        state: &HandleState,
        offset: u64,
        missing: &PageSet,
        out: &mut [u8],
    ) -> Result<usize, FsError> {
        unfenced(state)?;
        self.through(caller, state, || {
            let mut lane = self.session.borrow_lane()?;
            let got = self.reads.fetch(&mut lane, caller, state.file(), offset, missing, out);
            unless_fenced(state.file(), got)
        })
    }

    /// The open file of a handle, for a holder that looks it up once.
    ///
    /// # Errors
    /// `BadHandle`.
    pub(crate) fn state_of(&self, handle: Handle) -> Result<Arc<HandleState>, FsError> {
        self.handles.get(handle)
    }
}

/// Whether its filekey names it now, as far as is known.
fn is_usable(state: &HandleState) -> bool {
    !state.file().is_fenced() && !state.file().is_lost()
}
