//! Region keys over a restart of the server (docs/file-regions.md, "After a kill"): the ranges that this client has bound are bound again by its recovery,
//! with the same keys; what it has opened by keys of others is opened again when it is used next.
//!
//! # Failure
//! A range that the next server does not bind again has ended: its key is forgotten, with a warning. A key by which a file cannot be opened again has
//! ended, and the open file with it: all later uses are `Stale`.

use super::{ServerOpen, Session};
use crate::transport::{Caller, FsError, Lane};
use cuttlefs_common::rpc::{Reply, Request};
use cuttlefs_common::status::Status;

impl Session {
    /// Binds the ranges of a reclaimed file again. `None`: the connection broke.
    pub(super) fn bind_again(&self, lane: &mut Lane, file: &ServerOpen, seq: &mut u64) -> Option<()> {
        let keys = file.bound().clone();
        for key in keys {
            let request = Request::BindAgain { filekey: file.bound_key(), key };
            if let Err(status) = lane.call_recovering(&self.link, &request, seq)? {
                tracing::warn!(ino = %file.ino(), ?key, %status, "a bound range could not be bound again: its key has ended");
                file.bound().retain(|bound| *bound != key);
            }
        }
        Some(())
    }

    /// Opens a part of a file again by its region key, if a recovery has lost it. Waits while the client that bound it may still come back.
    ///
    /// # Errors
    /// `Stale` if the key has ended; the session's.
    pub(crate) fn open_again(&self, caller: &Caller, file: &ServerOpen) -> Result<(), FsError> {
        let Some(key) = file.region_key().copied() else { return Ok(()) };
        if !file.is_lost() {
            return Ok(());
        }
        let _alone = file.opening();
        if file.has_ended() {
            return Err(FsError::Server(Status::Stale));
        }
        if !file.is_lost() {
            return Ok(());
        }
        let opened = self.call(
            caller,
            || Request::OpenRegion { key },
            |reply| match reply {
                Reply::Opened(opened) => {
                    file.rebind(Some(&opened));
                    Ok(())
                }
                _ => Err(FsError::Server(Status::Malformed)),
            },
        );
        if let Err(FsError::Server(Status::Stale | Status::Denied)) = opened {
            file.end();
            return Err(FsError::Server(Status::Stale));
        }
        opened
    }
}
