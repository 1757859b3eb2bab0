//! Attaching, and what follows when the server no longer knows the session: open files and locks are reclaimed before
//! any other request goes out.

use super::lane::{DataBuffer, Lane};
use super::unsynced::{Kept, What};
use super::{Attachment, Recovered, Session, Windows};
use crate::file::OpenFile;
use crate::file::interrupt::Whole;
use crate::file::volume::{Caller, FsError};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rdma::{RdmaError, RemoteWindow};
use cuttlefs_common::region::{FileTable, ResidencyTable};
use cuttlefs_common::rpc::{
    Payload, RECLAIM_FILES_MAX, Reclaim, Reply, Request, Restored, Rights, SyncScope,
};
use cuttlefs_common::status::Status;
use parking_lot::MutexGuard;
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
            Err(Status::NotFound | Status::NotDirectory) => {
                return Err(refused(
                    "the directory to mount does not exist there: the `path` of the [[export]] that is for this client, or the \
                     subtree to mount below it; make it, and mount again"
                        .to_owned(),
                ));
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

    /// Keeps open files from being reclaimed for another session than this one. `None`: they have been.
    pub(super) fn hold_session(&self, number: u64) -> Option<MutexGuard<'_, Recovered>> {
        Some(self.recovered.lock()).filter(|recovered| recovered.number == number)
    }

    /// Epoch of the server that the last recovery was for.
    pub(crate) fn recovered_epoch(&self) -> u64 {
        self.recovered.lock().epoch
    }

    /// Whether there was a recovery since then, and the server may still lose what it answers.
    pub(crate) fn recovered_since(&self, epoch: u64) -> bool {
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
        // of ours gets that answer. It also tells a lane whose session is over already, for another one has recovered the next:
        // that is nothing to recover.
        if !matches!(lane.call_recovering(self, &Request::Heartbeat, &mut recovered.seq), Some(Ok(_))) {
            return Ok(false);
        }
        // What is answered from here on by the server that is gone its caller restores.
        self.unsynced.begin_recovery();
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
        } else if recovered.epoch != epoch && self.restore_all(lane, &mut recovered.seq).is_none() {
            return Ok(false);
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

    /// Has the server restore what the one before it may have lost, and makes that durable: it is of a life of the server that is
    /// over, and what comes from here on of the next. `None`: the connection broke, all of it is tried again.
    fn restore_all(&self, lane: &mut Lane, seq: &mut u64) -> Option<()> {
        let files = self.unsynced.files();
        if files.is_empty() {
            return Some(());
        }
        let mark = self.unsynced.mark();
        for ino in &files {
            self.restore_file(lane, *ino, seq)?;
        }
        if let Err(status) = lane.call_recovering(self, &Request::Sync(SyncScope::All), seq)? {
            tracing::error!(%status, "what a killed server had lost could not be made durable; fsync will fail");
            files.iter().for_each(|ino| self.unsynced.losses().note(*ino));
        }
        self.unsynced.synced(None, mark);
        Some(())
    }

    fn restore_file(&self, lane: &mut Lane, ino: InodeNo, seq: &mut u64) -> Option<()> {
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
            // Gone, so that nobody asks for its bytes, or not to be written any more.
            self.unsynced.give_up(ino, self.unsynced.mark());
            return Some(());
        };
        let filekey = opened.filekey;
        let kept = self.unsynced.changes_of(ino);
        let buffer = lane.data();
        let mut is_lost = false;
        for kept in &kept {
            let what = in_message(kept.restored(), &buffer);
            let request = Request::Restore { filekey, change: kept.change, what };
            is_lost |= match lane.call_recovering(self, &request, seq)? {
                Ok(body) => match Reply::parse(body) {
                    Ok(Reply::Restored { lost }) => lost,
                    _ => return None,
                },
                Err(status) => {
                    tracing::error!(%ino, %status, "a change the server lost could not be made again");
                    true
                }
            };
        }
        if is_lost {
            tracing::error!(%ino, "unsynced changes of a file are lost with a killed server: others have changed it since, or they could not be made again; its next fsync fails");
            self.unsynced.losses().note(ino);
        }
        lane.call_recovering(self, &Request::Close { filekeys: vec![filekey] }, seq)?.ok();
        Some(())
    }

    /// Makes durable what a server has answered that was lost before this mount had noted it, or that came after the first one that
    /// was asked had been lost. `answered_by` is the session, `change` the file's counter then.
    ///
    /// # Errors
    /// `Io` if it is lost; as the server says.
    pub(crate) fn settle_write(
        &self,
        caller: &Caller,
        file: &OpenFile,
        (offset, bytes): (u64, &[u8]),
        change: u64,
        answered_by: u64,
    ) -> Result<(), FsError> {
        self.sync_where_done(caller, file.ino(), ((), answered_by), || {
            let mut lane = self.borrow_lane()?;
            let restore = |buffer: &DataBuffer| {
                let what = in_message(Restored::Bytes { offset, bytes }, buffer);
                Request::Restore { filekey: file.filekey(), change, what }
            };
            let is_lost = lane.call(caller, restore, |reply, _| match reply {
                Reply::Restored { lost } => Ok(lost),
                _ => Err(FsError::Server(Status::Malformed)),
            })?;
            if is_lost { Err(FsError::Server(Status::Io)) } else { Ok(((), lane.session_number())) }
        })
    }

    /// Makes durable what a server has done to a file, which this mount keeps nothing of to restore: a sync counts if the same session
    /// answers it that answered what was done. If it does not, it is done `again`, and synced again. `done` and what `again` gives are
    /// an answer and the session it came from. Nothing of it is given up.
    ///
    /// # Errors
    /// As the server and `again` say.
    pub(crate) fn sync_where_done<T>(
        &self,
        caller: &Caller,
        ino: InodeNo,
        mut done: (T, u64),
        mut again: impl FnMut() -> Result<(T, u64), FsError>,
    ) -> Result<T, FsError> {
        let _whole = Whole::begin();
        loop {
            let mark = self.unsynced.mark();
            let sync = || Request::Sync(SyncScope::InodeContents(ino));
            let take = |reply: Reply<'_>| {
                if reply == Reply::Done { Ok(()) } else { Err(FsError::Server(Status::Malformed)) }
            };
            let ((), synced_by) = self.call_noting_session(caller, sync, take)?;
            let (answer, done_by) = done;
            if synced_by == done_by {
                self.unsynced.synced(Some(ino), mark);
                return Ok(answer);
            }
            done = again()?;
        }
    }
}

impl Kept {
    fn restored(&self) -> Restored<&[u8]> {
        let offset = self.offset;
        match &self.what {
            What::Bytes(bytes) => Restored::Bytes { offset, bytes },
            What::End => Restored::End(offset),
            What::Allocate { len, how } => Restored::Allocate { offset, len: *len, how: *how },
        }
    }
}

/// As a request tells it; many bytes are pulled from `buffer`.
fn in_message<'b>(what: Restored<&'b [u8]>, buffer: &DataBuffer) -> Restored<Payload<'b>> {
    what.map(|bytes| buffer.payload(bytes))
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
