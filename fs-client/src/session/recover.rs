//! Recovery after the server has lost the session: open files and locks are reclaimed before any other request goes out.

use super::Session;
use super::unsynced::in_message;
use crate::transport::{FsError, Lane};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rpc::{RECLAIM_FILES_MAX, Reclaim, Reply, Request, Rights, SyncScope};

/// The progress of recovery.
pub(super) struct Recovered {
    /// The session in which open files are reclaimed; 0 before the first session.
    pub(super) number: u64,
    /// The epoch of that session's server.
    pub(super) epoch: u64,
    /// The number of the next request in recovery's slot.
    seq: u64,
}

impl Default for Recovered {
    /// Nothing was ever open.
    fn default() -> Self {
        Self { number: 0, epoch: 0, seq: 1 }
    }
}

impl Session {
    /// The epoch of the server of the last recovery.
    pub(crate) fn recovered_epoch(&self) -> u64 {
        self.recovered.lock().epoch
    }

    /// Whether there was a recovery since `epoch`, of a server that may lose what it answers.
    pub(crate) fn recovered_since(&self, epoch: u64) -> bool {
        self.recovered.lock().epoch != epoch && !self.unsynced.answers_are_durable()
    }

    /// Waits for the end of a recovery that is under way.
    pub(super) fn wait_for_recovery(&self) {
        drop(self.recovered.lock());
    }

    /// Reclaims every open file and lock in the session to which `lane` is attached, unless that is done. `false`: the connection broke.
    pub(super) fn reclaim_in(&self, lane: &mut Lane, number: u64) -> Result<bool, FsError> {
        let mut recovered = self.recovered.lock();
        let recovered = &mut *recovered;
        if recovered.number == number {
            return Ok(true);
        }
        // This uses up the number of a request that an earlier attempt may have left unanswered, so that no later request gets that answer. It also
        // fails on a lane whose session is over because another lane has recovered the next one: then there is nothing to recover.
        if !matches!(lane.call_recovering(&self.link, &Request::Heartbeat, &mut recovered.seq), Some(Ok(_))) {
            return Ok(false);
        }
        // Changes that the lost server has answered, but that are not noted yet, are restored by their callers from here on.
        self.unsynced.begin_recovery();
        let files = self.opens.all();
        tracing::info!(files = files.len(), "the server lost our session; reclaiming open files");
        // Those by a region key are opened again when they are used: that may wait for another client, which may wait for this one.
        let (files, by_key): (Vec<_>, Vec<_>) =
            files.into_iter().partition(|file| file.region_key().is_none());
        by_key.iter().for_each(|file| file.rebind(None));
        for batch in files.chunks(RECLAIM_FILES_MAX) {
            let wanted = batch.iter().filter_map(|file| file.reclaim()).collect();
            let request = Request::Reclaim { files: wanted };
            let Some(Ok(reply)) = lane.call_recovering(&self.link, &request, &mut recovered.seq) else {
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
        for file in &files {
            if self.bind_again(lane, file, &mut recovered.seq).is_none() {
                return Ok(false);
            }
        }
        // Before bytes are restored, which may take long: other clients wait until all locks are reclaimed.
        if self.recover_locks(lane, number, &mut recovered.seq).is_none() {
            return Ok(false);
        }
        let Some(attachment) = self.attachment() else {
            return Ok(false);
        };
        // A server that only ended the session (its lease ran out) has lost no byte, and others may have written since. A server that wrote
        // everything back before it stopped has lost nothing either.
        let epoch = attachment.attached.server_epoch;
        if attachment.attached.clean_predecessor == Some(recovered.epoch) {
            self.unsynced.synced(None, self.unsynced.mark());
        } else if recovered.epoch != epoch {
            self.unsynced.lose_one_sided();
            if self.restore_all(lane, &mut recovered.seq).is_none() {
                return Ok(false);
            }
        }
        let request = Request::Recovered { unanswered: self.link.unanswered() };
        if lane.call_recovering(&self.link, &request, &mut recovered.seq).is_none() {
            return Ok(false);
        }
        self.unsynced.begin_session(number, attachment.attached.durable_answers);
        recovered.epoch = epoch;
        recovered.number = number;
        Ok(true)
    }

    /// Has the server restore what the one before may have lost, and makes it durable: the copies belong to an earlier life of the server, and new
    /// changes to this one. `None`: the connection broke, and everything is tried again.
    fn restore_all(&self, lane: &mut Lane, seq: &mut u64) -> Option<()> {
        let files = self.unsynced.files();
        if files.is_empty() {
            return Some(());
        }
        let mark = self.unsynced.mark();
        for ino in &files {
            self.restore_file(lane, *ino, seq)?;
        }
        if let Err(status) = lane.call_recovering(&self.link, &Request::Sync(SyncScope::All), seq)? {
            tracing::error!(%status, "what a killed server had lost could not be made durable; fsync will fail");
            files.iter().for_each(|ino| self.unsynced.losses().note(*ino));
        }
        self.unsynced.synced(None, mark);
        Some(())
    }

    fn restore_file(&self, lane: &mut Lane, ino: InodeNo, seq: &mut u64) -> Option<()> {
        // Each file is opened with a filekey of its own, because the program may have closed it. A file that was never open for writing here was cut
        // by its name.
        let cut = Reclaim { ino, rights: Rights { read: false, write: true }, ticket: None };
        let files = vec![self.opens.reclaim_written(ino).unwrap_or(cut)];
        let opened = match lane.call_recovering(&self.link, &Request::Reclaim { files }, seq)? {
            Ok(body) => match Reply::parse(body) {
                Ok(Reply::Reclaimed(opened)) => opened.first().copied().flatten(),
                _ => return None,
            },
            Err(_) => None,
        };
        let Some(opened) = opened else {
            // The file is gone, so its bytes are not needed, or it may not be written any more.
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
            is_lost |= match lane.call_recovering(&self.link, &request, seq)? {
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
        lane.call_recovering(&self.link, &Request::Close { filekeys: vec![filekey] }, seq)?.ok();
        Some(())
    }
}
