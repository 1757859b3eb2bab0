//! Changes of contents: new ones that clients ask for, and those that clients restore because a killed server may have lost them.
//!
//! # How it works
//! Each change has a counter: the file's change counter when the change was answered. The client names it when it restores the change. The server
//! makes the change wherever nothing newer is in place. It decides that by the stored state of the file (`meta/written.rs`) and by the changes since
//! the server started (`files/newer.rs`). So the order of the answers decides between two changes, in whatever order the clients come back, and a
//! change that an earlier server answered never overwrites one of this server.
//!
//! # Failure
//! A change is not made over something newer. If the newer change was made after the death of the server that answered this one, the client is told
//! of the loss (`true`). A change that was overwritten before that is no loss.

use super::{Changed, WriteAt, allocate_for, write_for};
use crate::files::{FileRegion, Files};
use crate::meta::{ClientChange, Verdict};
use crate::pages::Source;
use crate::pool::disk::Disk;
use crate::sync::AsyncRwLockReadGuard;
use cuttlefs_common::rdma::PeerKey;
use cuttlefs_common::rpc::{Allocate, Restored};
use cuttlefs_common::status::Status;
use std::ops::Range;
use std::sync::Arc;

/// A change that a client asks for, under way.
#[must_use]
pub struct Changing<'f> {
    files: &'f Files,
    file: &'f Arc<FileRegion>,
    changed: &'f Changed,
    _shared: AsyncRwLockReadGuard<'f, ()>,
}

/// Begins a change of contents that a client asks for, and notes it.
///
/// # Errors
/// `Stale`, `Io`.
pub async fn begin_change<'f>(
    files: &'f Files,
    file: &'f Arc<FileRegion>,
    changed: &'f Changed,
) -> Result<Changing<'f>, Status> {
    changed.note_contents(file);
    let shared = file.changes.read().await;
    files.newer.begin(file.ino(), || files.meta.written(file.ino()))?;
    Ok(Changing { files, file, changed, _shared: shared })
}

impl Changing<'_> {
    /// Ends it: these bytes have other contents now, and the file's change counter was `change` after the change. Of a change of the length alone
    /// the range is empty, at the new end.
    pub fn done(self, change: u64, bytes: Range<u64>) {
        self.files.newer.changed(self.file.ino(), bytes.start, bytes.end);
        let is_to_be_committed = self.file.change_bookkeeping(|state| {
            state.note_contents(change);
            if state.unsynced_appends.are_before(bytes.start) {
                self.changed.note_behind_appends();
            }
            state.uncommitted
        });
        if is_to_be_committed {
            self.files.list_dirty(self.file);
        }
    }
}

/// Waits until the changes of a file are over that have begun. Behind it nothing changes any more by a filekey that had ended before.
pub async fn settle(file: &FileRegion) {
    drop(file.changes.write().await);
}

/// Restores a client's change wherever nothing newer is in place. `set_length` sets the file's length. Returns whether some of the change is lost.
///
/// # Errors
/// As writing, allocating, and growing.
pub async fn restore(
    files: &Files,
    disk: &dyn Disk,
    file: &Arc<FileRegion>,
    (by, peer): (ClientChange, &PeerKey),
    what: Restored<Source<'_>>,
    set_length: impl AsyncFn(u64) -> Result<(), Status>,
    changed: &Changed,
) -> Result<bool, Status> {
    changed.note_contents(file);
    let _alone = file.changes.write().await;
    file.usable()?;
    let ino = file.ino();
    // A reservation has the counter of the change before it. That change was the same client's or is older, so the reservation may be made over it.
    let is_reserve = matches!(what, Restored::Allocate { how: Allocate::Reserve { .. }, .. });
    let as_if = ClientChange { change: by.change + u64::from(is_reserve), ..by };
    let judge = |range| {
        files.newer.judge(ino, (as_if, peer), range, || {
            let mut written = files.meta.written(ino)?;
            written.cover(file.state().contents);
            Ok(written)
        })
    };
    let range = match what {
        Restored::Bytes { offset, bytes } => (offset, offset.saturating_add(bytes.len() as u64)),
        Restored::Allocate { offset, len, .. } => (offset, offset.saturating_add(len)),
        // All bytes behind the end were cut off, whether the file was longer or not: other clients may restore some there.
        Restored::End(size) => (size, u64::MAX),
    };
    let (mut is_restored, mut lost) = (false, false);
    let parts = judge(range)?;
    let is_end_overtaken = parts.last().is_some_and(|(_, _, verdict)| *verdict == Verdict::Overtaken);
    for (from, to, verdict) in parts {
        match (verdict, what) {
            (Verdict::Overtaken, _) => continue,
            // A reservation changes no bytes, so its counter is that of an earlier change, in whatever life of the server. It is no loss if the file
            // is long enough.
            (Verdict::Lost, Restored::Allocate { how: Allocate::Reserve { keep_size }, .. })
                if keep_size || to <= file.size() =>
            {
                continue;
            }
            (Verdict::Lost, _) => {
                lost = true;
                continue;
            }
            (Verdict::Restore, Restored::Bytes { offset, bytes }) => {
                let part = bytes.part((from - offset) as usize, (to - from) as usize);
                write_for(files, disk, file, WriteAt::Offset(from), part, None).await?;
            }
            (Verdict::Restore, Restored::Allocate { how, .. }) => {
                allocate_for(files, disk, file, (from, to - from), how, None).await?;
            }
            // Newer bytes behind the end keep the file as long as they reach.
            (Verdict::Restore, Restored::End(_)) if to == u64::MAX => {
                if file.size() > from {
                    set_length(from).await?;
                }
            }
            (Verdict::Restore, Restored::End(_)) => {
                let to = to.min(file.size());
                if from < to {
                    allocate_for(files, disk, file, (from, to - from), Allocate::PunchHole, None).await?;
                }
            }
        }
        if gives_contents(&what) {
            files.newer.restored(ino, (by, peer), from, to);
        }
        is_restored = true;
    }
    if let Restored::End(size) = what
        && file.size() < size
    {
        // A cut may be stored without the changes that had made the file longer.
        for (_, _, verdict) in judge((size - 1, size))? {
            lost |= verdict == Verdict::Lost;
            if verdict == Verdict::Restore {
                set_length(size).await?;
                is_restored = true;
            }
        }
    }
    if gives_length(&what) && is_end_overtaken && file.size() < range.1 {
        // What has overtaken its last bytes, a hole or zeros, may have left the length to it. Only a cut is newer at all places behind the end, too.
        let behind = judge((u64::MAX - 1, u64::MAX))?;
        if behind.iter().all(|(_, _, verdict)| *verdict == Verdict::Restore) {
            set_length(range.1).await?;
            is_restored = true;
        }
    }
    if is_restored {
        // Noted with the counter of the whole change, because a change that was noted as restored is not restored again.
        file.change_bookkeeping(|state| state.note_restored(by));
        files.list_dirty(file);
    }
    if lost {
        tracing::warn!(%ino, client = %format_args!("{:032x}", by.client.0), "some of what a client had not synced is not restored: others have changed it since the server it wrote to died, or it was more than its share");
    }
    Ok(lost)
}

/// Whether the change makes the file reach its end.
fn gives_length<B>(what: &Restored<B>) -> bool {
    use Allocate::{Reserve, ZeroRange};
    matches!(
        what,
        Restored::Bytes { .. }
            | Restored::Allocate { how: Reserve { keep_size: false } | ZeroRange { keep_size: false }, .. }
    )
}

/// Whether the change gives bytes other contents.
fn gives_contents<B>(what: &Restored<B>) -> bool {
    use Allocate::{PunchHole, ZeroRange};
    matches!(
        what,
        Restored::Bytes { .. }
            | Restored::End(_)
            | Restored::Allocate { how: PunchHole | ZeroRange { .. }, .. }
    )
}
