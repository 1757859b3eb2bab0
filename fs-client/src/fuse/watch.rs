//! Looks at the files that are open and have pages in the kernel, as often as their attributes would be asked for again: has another client changed them?
//!
//! A program that keeps a file open reads the kernel's pages without asking anybody. So it sees changes of other mounts as late as it sees new
//! attributes: after `attr_cache`. Mapped pages, too, for which the kernel never asks. One request is for many files, and none is sent while no
//! file with pages is open.
//!
//! # Failure
//! While the server is away it waits as programs do. Without its thread, changes show at opens, locks and attributes only, and the log says so.

use super::cached_files::At;
use super::file_system::CuttleFuse;
use crate::file::volume::{FsError, Volume};
use cuttlefs_common::rpc::CHANGES_MAX;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How often the thread looks whether the mount is still there.
const LOOK_AGAIN: Duration = Duration::from_millis(250);
/// The shortest time between two looks at the files.
const PERIOD_MIN: Duration = Duration::from_millis(100);

/// Starts the thread that watches. It ends soon after the mount.
pub(super) fn start<V: Volume + ?Sized>(edge: &Arc<CuttleFuse<V>>) {
    let period = edge.settings.attr_cache;
    if period.is_zero() || edge.settings.uncached {
        // The kernel asks itself, or keeps nothing.
        return;
    }
    let (edge, period) = (Arc::downgrade(edge), period.max(PERIOD_MIN));
    let watch = move || watch(&edge, period);
    if let Err(error) = std::thread::Builder::new().name("watch".to_owned()).spawn(watch) {
        tracing::warn!(%error, "no thread looks at open files: changes of other mounts show when files are opened");
    }
}

fn watch<V: Volume + ?Sized>(edge: &Weak<CuttleFuse<V>>, period: Duration) {
    let mut looked = Instant::now();
    while edge.strong_count() > 0 {
        std::thread::sleep(period.min(LOOK_AGAIN));
        if looked.elapsed() < period {
            continue;
        }
        looked = Instant::now();
        let Some(edge) = edge.upgrade() else { return };
        if matches!(edge.look_at_files(), Err(FsError::ShutDown)) {
            return;
        }
    }
}

impl<V: Volume + ?Sized> CuttleFuse<V> {
    /// Has the kernel forget the pages of the open files that another client has changed.
    fn look_at_files(&self) -> Result<(), FsError> {
        let files = self.cache.files().in_use();
        for files in files.chunks(CHANGES_MAX) {
            let inos: Vec<_> = files.iter().map(|ino| self.ino(*ino)).collect();
            let epoch = self.volume.server_epoch();
            let changes = self.volume.changes(&inos)?;
            for (ino, change) in files.iter().zip(changes) {
                // A file that is gone has no counter.
                if let Some(change) = change {
                    self.cache.looked(*ino, At::of(&*self.volume, epoch, change));
                }
            }
        }
        Ok(())
    }
}
