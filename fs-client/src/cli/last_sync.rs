//! The sync before a mount ends: after a kill of the server, only the mount's memory has the changes that no sync has covered.
//!
//! `cuttlefs umount` and `down` ask the mount's process for a sync (`figures`) and unmount when it is done. Other unmounts (umount(8), a
//! signal) cannot be refused, so the process syncs after the unmount, and its messages and exit code say what is lost.
//!
//! # Bound
//! One sync at a time; the end of a mount waits [`LAST_SYNC_LIMIT`] for it, and [`HURRIED_LIMIT`] when it is signalled meanwhile, as by a
//! machine that is shut down.

use crate::file::volume::{Condition, UnsyncedChanges, Volume};
use crate::threads::NO_THREAD;
use anyhow::Context;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long the end of an unmounted mount waits for a server that is away.
const LAST_SYNC_LIMIT: Duration = Duration::from_secs(30);
/// The same for a mount that must end at once. A server that is there takes less time.
const HURRIED_LIMIT: Duration = Duration::from_secs(2);
/// The pause between two checks of a sync.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Changes that the end of a mount threw away.
#[derive(Debug, thiserror::Error)]
#[error("{changes} are lost: {server} did not take them before the mount ended{}", because.as_ref().map_or_else(String::new, |text| format!(" ({text})")))]
pub(super) struct Lost {
    changes: UnsyncedChanges,
    /// The server's endpoint.
    server: String,
    /// Why the server did not take them, if that is known.
    because: Option<String>,
}

/// The last sync of a mount's volume.
pub(super) struct LastSync {
    volume: Arc<dyn Volume>,
    /// Whether a sync is under way. Set by the one who starts it; cleared by its thread (release) after its changes are durable.
    runs: Arc<AtomicBool>,
    /// Whether the last sync failed. Stored before `runs` is cleared, and read after it.
    has_failed: Arc<AtomicBool>,
    /// Whether the unsynced changes were given up by someone who was told of them. Only ever set; guards nothing.
    is_given_up: AtomicBool,
    /// Whether the process must end soon. Only ever set; guards nothing.
    is_hurried: AtomicBool,
}

impl LastSync {
    pub(super) fn new(volume: Arc<dyn Volume>) -> Self {
        Self {
            volume,
            runs: Arc::default(),
            has_failed: Arc::default(),
            is_given_up: AtomicBool::new(false),
            is_hurried: AtomicBool::new(false),
        }
    }

    /// The condition of the mount.
    pub(super) fn condition(&self) -> Condition {
        self.volume.condition()
    }

    /// Begins a sync, unless there is nothing to sync or one is under way.
    pub(super) fn begin(&self) -> anyhow::Result<()> {
        if self.condition().unsynced == UnsyncedChanges::default() || self.runs.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let (volume, runs, has_failed) =
            (Arc::clone(&self.volume), Arc::clone(&self.runs), Arc::clone(&self.has_failed));
        let started = std::thread::Builder::new().name("last sync".to_owned()).spawn(move || {
            let synced = volume.sync_all();
            if let Err(error) = &synced {
                tracing::warn!(%error, "the sync before the unmount failed");
            }
            has_failed.store(synced.is_err(), Ordering::Relaxed);
            runs.store(false, Ordering::Release);
        });
        if started.is_err() {
            self.runs.store(false, Ordering::Release);
        }
        started.map(|_| ()).context(NO_THREAD)
    }

    /// Whether a sync is under way.
    pub(super) fn runs(&self) -> bool {
        self.runs.load(Ordering::Acquire)
    }

    /// Whether the last sync failed; of use when none is under way.
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }

    /// Gives the unsynced changes up, for someone who was told of them.
    pub(super) fn give_up(&self) {
        self.is_given_up.store(true, Ordering::Relaxed);
    }

    /// From now on a server that is away is waited for only briefly.
    pub(super) fn hurry(&self) {
        self.is_hurried.store(true, Ordering::Relaxed);
    }

    /// The mount has been unmounted: syncs its changes and waits for that.
    ///
    /// # Errors
    /// [`Lost`] with the unsynced changes, unless these were given up.
    pub(super) fn finish(&self, server: &str) -> anyhow::Result<()> {
        let gives_up = || self.is_given_up.load(Ordering::Relaxed);
        if gives_up() {
            return Ok(());
        }
        self.begin()?;
        let began = Instant::now();
        let limit = || if self.is_hurried.load(Ordering::Relaxed) { HURRIED_LIMIT } else { LAST_SYNC_LIMIT };
        while self.runs() && !gives_up() && began.elapsed() < limit() {
            std::thread::sleep(LOOK_AGAIN);
        }
        let Condition { away, unsynced: changes, .. } = self.condition();
        if gives_up() || changes == UnsyncedChanges::default() {
            return Ok(());
        }
        let because = away.map(|away| away.because);
        Err(Lost { changes, server: server.to_owned(), because }.into())
    }
}
