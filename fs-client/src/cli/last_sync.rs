//! The sync before a mount ends: after a kill of the server, changes that no sync has covered are in the mount's memory alone.
//!
//! `cuttlefs umount` and `down` ask the mount's process for one (`figures`) and unmount when it is done. Other unmounts (umount(8), a
//! signal) cannot be refused, so the process syncs after the unmount, and its messages and exit code say what is lost.
//!
//! # Bound
//! One sync at a time; the end of a mount waits [`LAST_SYNC_LIMIT`] for it, and [`HURRIED_LIMIT`] when it is signalled meanwhile, as by a
//! machine that is shut down.

use crate::file::volume::{Condition, UnsyncedChanges, Volume};
use anyhow::Context;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a mount that is unmounted waits for a server that is away.
const LAST_SYNC_LIMIT: Duration = Duration::from_secs(30);
/// The same, of one that is to end now. A server that is there takes less.
const HURRIED_LIMIT: Duration = Duration::from_secs(2);
/// Pause between looks at a sync.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Changes that the end of a mount threw away.
#[derive(Debug, thiserror::Error)]
#[error("{changes} are lost: {server} did not take them before the mount ended{}", because.as_ref().map_or_else(String::new, |text| format!(" ({text})")))]
pub(super) struct Lost {
    changes: UnsyncedChanges,
    /// Its endpoint.
    server: String,
    /// Why, if it is known.
    because: Option<String>,
}

/// Syncs a mount's volume for the last time.
pub(super) struct LastSync {
    volume: Arc<dyn Volume>,
    /// A sync is under way. Set by whoever starts one, cleared by its thread (release), which the changes it has made
    /// durable precede.
    runs: Arc<AtomicBool>,
    /// Whoever knows what would be lost does not want it. Only ever set; guards nothing.
    is_given_up: AtomicBool,
    /// The process is to end. Only ever set; guards nothing.
    is_hurried: AtomicBool,
}

impl LastSync {
    pub(super) fn new(volume: Arc<dyn Volume>) -> Self {
        Self {
            volume,
            runs: Arc::default(),
            is_given_up: AtomicBool::new(false),
            is_hurried: AtomicBool::new(false),
        }
    }

    /// How the mount stands.
    pub(super) fn condition(&self) -> Condition {
        self.volume.condition()
    }

    /// Begins a sync, if there is something to sync and none is under way.
    pub(super) fn begin(&self) -> anyhow::Result<()> {
        if self.condition().unsynced == UnsyncedChanges::default() || self.runs.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let (volume, runs) = (Arc::clone(&self.volume), Arc::clone(&self.runs));
        let started = std::thread::Builder::new().name("last sync".to_owned()).spawn(move || {
            if let Err(error) = volume.sync_all() {
                tracing::warn!(%error, "the sync before the unmount failed");
            }
            runs.store(false, Ordering::Release);
        });
        if started.is_err() {
            self.runs.store(false, Ordering::Release);
        }
        started.map(|_| ()).context("cannot start a thread")
    }

    /// Whether a sync is under way.
    pub(super) fn runs(&self) -> bool {
        self.runs.load(Ordering::Acquire)
    }

    /// What is not synced is thrown away, by whoever was told what it is.
    pub(super) fn give_up(&self) {
        self.is_given_up.store(true, Ordering::Relaxed);
    }

    /// There is no time to wait for a server that is away.
    pub(super) fn hurry(&self) {
        self.is_hurried.store(true, Ordering::Relaxed);
    }

    /// The mount has been unmounted: waits for the sync of what it holds.
    ///
    /// # Errors
    /// [`Lost`], unless that was given up.
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
