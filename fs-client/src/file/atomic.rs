//! Atomics on words of files by requests, where there is no one-sided way.
//!
//! # Failure
//! An atomic that is done twice has another result. The server remembers its answer in the session's slot, and no later server does. So one that was
//! sent, and whose session is over before its answer came, is `MayBeDone`. Of one that was answered no copy is kept: if the server is killed before a sync,
//! the next sync of the file tells the loss (`session/unsynced`).

use super::handles::HandleState;
use super::remote::{RemoteVolume, unfenced, unless_fenced};
use super::replies::unexpected;
use super::volume::{Caller, FsError};
use cuttlefs_common::rdma::FileAtomic;
use cuttlefs_common::rpc::{Reply, Request};

impl RemoteVolume {
    /// Does an atomic by a request. With `durable` a change is durable when this returns. Returns the word before.
    ///
    /// # Errors
    /// The server's: `NoSuchOffset` if the file has not all of the word. `MayBeDone`.
    pub(crate) fn atomic(
        &self,
        caller: &Caller,
        state: &HandleState,
        offset: u64,
        operation: FileAtomic,
        durable: bool,
    ) -> Result<u64, FsError> {
        unfenced(state)?;
        let file = state.file();
        let build = || Request::Atomic { filekey: file.filekey(), offset, operation, durable };
        let take = |reply: Reply<'_>| match reply {
            Reply::Old(old) => Ok(old),
            other => unexpected(other),
        };
        self.through(caller, state, || {
            let mut lane = self.session.borrow_lane()?;
            let asked = lane.call_in_one_session(caller, |_| build(), |reply, _| take(reply));
            let old = unless_fenced(file, asked)?;
            if !durable && operation.apply(old) != old {
                self.session.unsynced().note_without_copy(file.ino(), lane.session_number());
            }
            Ok(old)
        })
    }
}
