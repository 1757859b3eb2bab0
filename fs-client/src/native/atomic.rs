//! Atomics on words of files: one-sidedly where a write grant permits that, else by a request, with the same meaning (docs/native.md).

use super::session::Opened;
use super::{File, NativeError};
use crate::file::OneSidedChange;
use crate::file::volume::{Caller, FsError};
use crate::transport::Change;
use cuttlefs_common::rdma::FileAtomic;
use cuttlefs_common::status::Status;

impl File {
    /// Stores `swap` in the word (little-endian) at `offset`, a multiple of 8, if `expect` is there. Returns what was there: it was swapped if that is
    /// `expect`. Atomic among all atomics and writes of the file, one-sided and by requests. The file must be open for reading and writing.
    ///
    /// # Errors
    /// `Unaligned`, `PastEnd`, `MayBeDone`; as [`Self::write_at`], with nothing done, but for `Server(Io)` of a disk that fails: then it may be done.
    pub fn compare_swap(&self, offset: u64, expect: u64, swap: u64) -> Result<u64, NativeError> {
        self.atomic(offset, FileAtomic::CompareSwap { expect, swap })
    }

    /// Adds to the word (little-endian, wrapping around) at `offset`, a multiple of 8. Returns what was there.
    ///
    /// # Errors
    /// As [`Self::compare_swap`].
    pub fn fetch_add(&self, offset: u64, add: u64) -> Result<u64, NativeError> {
        self.atomic(offset, FileAtomic::FetchAdd { add })
    }

    fn atomic(&self, offset: u64, operation: FileAtomic) -> Result<u64, NativeError> {
        self.check_atomic(offset)?;
        let (file, sync) = (self.opened().clone(), self.is_sync());
        self.session().run(move |_, caller| file.atomic(caller, offset, operation, sync))
    }

    /// Whether an atomic could be done at this place at all.
    pub(super) fn check_atomic(&self, offset: u64) -> Result<(), NativeError> {
        self.check(true)?;
        // It tells the word that was there.
        self.check(false)?;
        if !offset.is_multiple_of(8) {
            return Err(NativeError::Unaligned);
        }
        self.opened().check_range(offset, 8)
    }
}

impl Opened {
    /// Does an atomic; with `sync` it is durable when this returns. Waits while the server is away, unless the atomic may be done.
    pub(super) fn atomic(
        &self,
        caller: &Caller,
        offset: u64,
        operation: FileAtomic,
        sync: bool,
    ) -> Result<u64, NativeError> {
        let grants = &self.state.grants;
        if !sync && !grants.is_empty() {
            self.volume().renew_lost(caller, &self.state).map_err(|error| self.explained(error))?;
            match self.volume().change_granted(&self.state, Change::Word { offset, operation })? {
                OneSidedChange::Done(old) => return Ok(old),
                OneSidedChange::NoSpace => return Err(NativeError::Server(Status::NoSpace)),
                OneSidedChange::MayBeDone => return Err(NativeError::MayBeDone),
                OneSidedChange::NotDone => {}
            }
        }
        let (key, end) = (self.state.file().bound_key(), offset.saturating_add(8));
        let old = match self.volume().atomic(caller, &self.state, offset, operation, sync) {
            Err(FsError::Server(Status::NoSuchOffset)) => return Err(NativeError::PastEnd),
            Err(error) => {
                if error == FsError::Server(Status::NoSpace) {
                    grants.lacked_space(key, self.state.file().bound_key(), offset, end);
                }
                return Err(self.explained(error));
            }
            Ok(old) => old,
        };
        // The next one may be one-sided.
        grants.note_len(end);
        Ok(old)
    }
}
