//! The session's background threads.
//!
//! *control* owns one lane: it sends heartbeats, notices at once when the server dies (so that nobody reads the
//! windows of a dead server), pulls page bitmaps (TeRM section 4.2; `bitmap_pace`), and tells each server where this client
//! counts its one-sided reads (section 4.4).
//! *closer* sends closes in batches, so that close(2) does not wait for the server.
//! *syncer* syncs (`syncer`).
//! All end when the session is shut down.

use super::bitmap_pace::{BitmapPace, LONGEST};
use super::counting::Sharing;
use super::idle_memory::{self, IdleMemory};
use super::{Session, syncer};
use crate::file::OpenFile;
use crate::file::volume::FsError;
use cuttlefs_common::ids::FileKey;
use cuttlefs_common::panic_ends;
use cuttlefs_common::rpc::Request;
use std::cell::RefCell;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long the closer gathers before it sends: a build closes thousands of files a second, and nothing waits
/// for a close but the space of files that were unlinked while open.
const CLOSE_GATHER: Duration = Duration::from_millis(3);
/// Closes in one request.
const CLOSE_BATCH: usize = 512;

pub(super) fn start(session: &Arc<Session>) {
    let weak = Arc::downgrade(session);
    let spawn = |name: &str, body: Box<dyn FnOnce() + Send>| {
        // Without threads the process cannot run at all; the mount reports it by failing to start.
        std::thread::Builder::new().name(name.to_owned()).spawn(body).expect("a thread can be started");
    };
    spawn("control", Box::new(move || run_control(&weak)));
    let syncing = session.clone();
    spawn("syncer", Box::new(move || syncer::run(&syncing)));
    let closer = session.clone();
    spawn("closer", Box::new(move || run_closer(&closer)));
}

fn run_control(weak: &Weak<Session>) {
    let mut next_heartbeat = Instant::now();
    let mut next_bitmap = Instant::now() + LONGEST;
    let mut pace = BitmapPace::default();
    let mut sharing = Sharing::default();
    let mut idle_memory = IdleMemory::default();
    let mut next_look = Instant::now() + idle_memory::LOOK_PERIOD;
    loop {
        let Some(session) = weak.upgrade() else {
            return;
        };
        if session.is_shut_down() {
            return;
        }
        panic_ends::plant("control");
        let mut lane = session.control_lane();
        let now = Instant::now();
        if now >= next_heartbeat || !lane.is_connected() {
            if !lane.is_connected() {
                session.drop_windows();
            }
            let caller = session.own_caller();
            match lane.call(&caller, |_| Request::Heartbeat, |_, _| Ok(())) {
                Ok(()) => {}
                Err(FsError::ShutDown) => return,
                Err(error) => tracing::warn!(%error, "heartbeat failed"),
            }
            let lease = session.attachment().map_or(30_000, |a| a.attached.lease_ms);
            next_heartbeat = Instant::now() + Duration::from_millis(u64::from(lease / 4).max(50));
        }
        if let Err(error) = sharing.share(&session, &mut lane) {
            match error {
                FsError::ShutDown => return,
                error => tracing::debug!(%error, "the server does not pull counters"),
            }
        }
        if now >= next_bitmap {
            let mut pulled_bytes = 0;
            if session.target_translates() {
                for file in session.open_files().all() {
                    pulled_bytes += file.pull_bitmap(&mut lane);
                }
            }
            let reads = session.counters.onesided_reads.get();
            let twice = session.counters.read_twice.load(Ordering::Relaxed);
            next_bitmap = Instant::now() + pace.pulled(pulled_bytes, reads, twice);
        }
        if now >= next_look {
            idle_memory.look(&session);
            next_look = Instant::now() + idle_memory::LOOK_PERIOD;
        }
        let until = next_heartbeat.min(next_bitmap).min(next_look);
        lane.lane().idle(until.saturating_duration_since(Instant::now()));
    }
}

fn run_closer(session: &Session) {
    while session.open_files().wait_for_closes() {
        panic_ends::plant("closer");
        std::thread::sleep(CLOSE_GATHER);
        for batch in session.open_files().take_closes().chunks(CLOSE_BATCH) {
            if close_batch(session, batch.to_vec()).is_err() {
                return;
            }
        }
    }
}

/// Closes files at the server. An error: the mount ends.
fn close_batch(session: &Session, mut files: Vec<Arc<OpenFile>>) -> Result<(), FsError> {
    while !files.is_empty() {
        let sent = RefCell::new(Vec::<FileKey>::new());
        let build = || {
            *sent.borrow_mut() = files.iter().map(|file| file.bound_key()).collect();
            Request::Close { filekeys: sent.borrow().clone() }
        };
        for file in &files {
            file.end_pulls();
        }
        let result = session.call(&session.own_caller(), build, |_| Ok(()));
        for file in &files {
            session.open_files().forget(file);
        }
        match result {
            Ok(()) => {}
            Err(FsError::ShutDown) => return Err(FsError::ShutDown),
            Err(error) => tracing::warn!(%error, "closing files failed"),
        }
        // A recovery that began before the files were forgotten has opened them again: those keys are to be
        // closed too, or the space of unlinked files never comes back.
        session.wait_for_recovery();
        let mut closed = sent.into_inner().into_iter();
        files.retain(|file| closed.next() != Some(file.bound_key()));
    }
    Ok(())
}
