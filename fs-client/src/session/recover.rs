//! Attaching, and what follows when the server no longer knows the session: open files and locks are reclaimed before
//! any other request goes out.

use super::lane::Lane;
use super::unsynced::{Kept, What};
use super::{Attachment, Session, Windows};
use crate::file::volume::FsError;
use cuttlefs_common::attr::SetAttr;
use cuttlefs_common::ids::{FileKey, InodeNo};
use cuttlefs_common::rdma::{RdmaError, RemoteWindow};
use cuttlefs_common::region::{FileTable, ResidencyTable};
use cuttlefs_common::rpc::{MAX_INLINE_BYTES, Payload, RECLAIM_FILES_MAX, Reclaim, Reply, Request, Rights};
use cuttlefs_common::status::Status;
use std::sync::Arc;

impl Session {
    /// First request on a connection. Returns the session's number.
    pub(super) fn attach(
        &self,
        lane: &mut Lane,
        windows: &[Arc<dyn RemoteWindow>],
    ) -> Result<u64, RdmaError> {
        let request = Request::Attach {
            secret: self.secret,
            label: &self.options.label,
            subtree: &self.options.subtree,
        };
        let refused =
            |reason: String| RdmaError::Refused { endpoint: self.options.endpoint.to_string(), reason };
        let attached = match lane.call_unnumbered(self, &request)? {
            Ok(body) => match Reply::parse(body) {
                Ok(Reply::Attached(attached)) => attached,
                _ => {
                    return Err(refused("it does not speak this client's protocol".to_owned()));
                }
            },
            Err(Status::NotFound) => {
                return Err(refused("the subtree to mount does not exist in the export".to_owned()));
            }
            Err(Status::Denied) => {
                return Err(refused(
                    "it exports nothing to this user or address, or not this subtree; an [[export]] of its cuttlefs.toml \
                     would have to be for it"
                        .to_owned(),
                ));
            }
            Err(status) => return Err(refused(status.to_string())),
        };
        let number = attached.session;
        let epoch = attached.server_epoch;
        let durable_answers = attached.durable_answers;
        let attaching = self.attaching.lock();
        let known = self.attachment.load().as_ref().is_some_and(|known| {
            known.attached.session == number && (known.windows.is_some() || windows.is_empty())
        });
        if !known {
            self.attachment.store(Some(Arc::new(Attachment {
                attached,
                initiator_translates: !windows.is_empty(),
                windows: map_windows(windows).map(Arc::new),
                counting: Arc::default(),
            })));
        }
        drop(attaching);
        let mut recovered = self.recovered.lock();
        if recovered.number == 0 {
            // The mount's first attach: nothing is open yet.
            recovered.number = number;
            recovered.epoch = epoch;
            self.unsynced.begin_session(number, durable_answers);
            self.begin_locks(number);
        }
        Ok(number)
    }

    /// Whether open files belong to this session.
    pub(super) fn is_recovered(&self, number: u64) -> bool {
        self.recovered.lock().number == number
    }

    /// Epoch of the server that the last recovery was for.
    pub(crate) fn recovered_epoch(&self) -> u64 {
        self.recovered.lock().epoch
    }

    /// Whether a recovery since then has written again what an earlier server may have lost.
    pub(crate) fn wrote_again_since(&self, epoch: u64) -> bool {
        self.recovered.lock().epoch != epoch && !self.unsynced.answers_are_durable()
    }

    /// Returns once no recovery runs that began before.
    pub(super) fn wait_for_recovery(&self) {
        drop(self.recovered.lock());
    }

    /// Reclaims every open file in the session `lane` is attached to. `false`: the connection broke meanwhile.
    pub(super) fn recover(&self, lane: &mut Lane, number: u64) -> Result<bool, FsError> {
        let mut recovered = self.recovered.lock();
        let recovered = &mut *recovered;
        if recovered.number == number {
            return Ok(true);
        }
        // Uses up the number of a request that an attempt before this one may have left without an answer, so that none
        // of ours gets that answer.
        if lane.call_recovering(self, &Request::Heartbeat, &mut recovered.seq).is_none() {
            return Ok(false);
        }
        let files = self.open_files.all();
        tracing::info!(files = files.len(), "the server lost our session; reclaiming open files");
        for batch in files.chunks(RECLAIM_FILES_MAX) {
            let wanted = batch.iter().map(|file| file.reclaim()).collect();
            let request = Request::Reclaim { files: wanted };
            let Some(Ok(reply)) = lane.call_recovering(self, &request, &mut recovered.seq) else {
                return Ok(false);
            };
            let Ok(Reply::Reclaimed(opened)) = Reply::parse(reply) else {
                return Ok(false);
            };
            for (file, opened) in batch.iter().zip(opened) {
                if opened.is_none() {
                    tracing::warn!(ino = %file.ino(), "an open file is gone from the server");
                }
                file.rebind(opened.as_ref());
            }
        }
        // Before bytes are written again, which may take long: others wait until everybody has his locks.
        if self.recover_locks(lane, number, &mut recovered.seq).is_none() {
            return Ok(false);
        }
        let Some(attachment) = self.attachment() else {
            return Ok(false);
        };
        // A server that only ended the session (its lease ran out) has lost no byte; others may have written since.
        // Nor has one that wrote everything back before it stopped.
        let epoch = attachment.attached.server_epoch;
        if attachment.attached.clean_predecessor == Some(recovered.epoch) {
            self.unsynced.synced(None, self.unsynced.mark());
        } else if recovered.epoch != epoch {
            for ino in self.unsynced.files() {
                if self.write_again(lane, ino, &mut recovered.seq).is_none() {
                    return Ok(false);
                }
            }
        }
        let request = Request::Recovered { unanswered: self.unanswered() };
        if lane.call_recovering(self, &request, &mut recovered.seq).is_none() {
            return Ok(false);
        }
        self.unsynced.begin_session(number, attachment.attached.durable_answers);
        recovered.epoch = epoch;
        recovered.number = number;
        Ok(true)
    }

    /// Gives the server what it may have lost of a file. `None`: the connection broke, all of it is tried again.
    ///
    /// Bytes another client wrote over ours since, and before this, are overwritten: between clients there is no
    /// order without leases.
    fn write_again(&self, lane: &mut Lane, ino: InodeNo, seq: &mut u64) -> Option<()> {
        // Each with a key of its own: whoever wrote may have closed the file.
        // What was never open here was cut by its name.
        let cut = Reclaim { ino, rights: Rights { read: false, write: true }, ticket: None };
        let files = vec![self.open_files.reclaim_written(ino).unwrap_or(cut)];
        let opened = match lane.call_recovering(self, &Request::Reclaim { files }, seq)? {
            Ok(body) => match Reply::parse(body) {
                Ok(Reply::Reclaimed(opened)) => opened.first().copied().flatten(),
                _ => return None,
            },
            Err(_) => None,
        };
        let Some(opened) = opened else {
            self.unsynced.give_up(ino, true);
            return Some(());
        };
        let filekey = opened.filekey;
        for kept in &self.unsynced.writes_of(ino, opened.attr.change) {
            if let Err(status) = self.do_again(lane, ino, filekey, kept, seq)? {
                tracing::error!(%ino, %status, "a change the server lost could not be made again; fsync will fail");
                self.unsynced.give_up(ino, false);
                break;
            }
        }
        lane.call_recovering(self, &Request::Close { filekeys: vec![filekey] }, seq)?.ok();
        Some(())
    }

    /// Makes one change again. `None`: the connection broke.
    fn do_again(
        &self,
        lane: &mut Lane,
        ino: InodeNo,
        filekey: FileKey,
        kept: &Kept,
        seq: &mut u64,
    ) -> Option<Result<(), Status>> {
        let offset = kept.offset;
        let request = match &kept.what {
            What::Bytes(bytes) => {
                for (index, chunk) in bytes.chunks(MAX_INLINE_BYTES).enumerate() {
                    let offset = offset + (index * MAX_INLINE_BYTES) as u64;
                    let payload = Payload::Inline(chunk);
                    let write = Request::Write { filekey, offset, append: false, payload };
                    if let Err(status) = lane.call_recovering(self, &write, seq)? {
                        return Some(Err(status));
                    }
                }
                return Some(Ok(()));
            }
            What::End => match lane.call_recovering(self, &Request::GetAttr { ino }, seq)? {
                // Cutting is never forgotten. If the file is longer, somebody has written since.
                Ok(body) if matches!(Reply::parse(body), Ok(Reply::Attr(attr)) if attr.size >= offset) => {
                    return Some(Ok(()));
                }
                Ok(_) => {
                    let set = SetAttr { size: Some(offset), ..SetAttr::default() };
                    Request::SetAttr { ino, set }
                }
                Err(status) => return Some(Err(status)),
            },
            What::Allocate { len, how } => Request::Allocate { filekey, offset, len: *len, how: *how },
        };
        Some(lane.call_recovering(self, &request, seq)?.map(|_| ()))
    }
}

fn map_windows(windows: &[Arc<dyn RemoteWindow>]) -> Option<Windows> {
    let [frames, residency, files] = windows else {
        return None;
    };
    Some(Windows {
        frames: frames.mapped()?.clone(),
        residency: ResidencyTable::over(residency.mapped()?.clone()),
        files: FileTable::over(files.mapped()?.clone()),
    })
}
