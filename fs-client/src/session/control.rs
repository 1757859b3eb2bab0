//! The session's background threads.
//!
//! *control* owns one lane. It sends heartbeats, notices at once when the server dies (so that no thread reads the windows of a dead server), and
//! runs the tasks of upper layers ([`Task`]). *closer* closes files (`closer`), *syncer* syncs (`syncer`). All end when the session is shut down.

use super::{Session, SessionLane, closer, syncer};
use crate::transport::FsError;
use cuttlefs_common::panic_ends;
use cuttlefs_common::rpc::Request;
use std::io;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// A task that the control thread does beside heartbeats.
pub(crate) trait Task: Send {
    /// Called whenever the thread wakes: when something has come over its lane, and when a task or a heartbeat is due. Returns the latest time of the
    /// next call, if there is one.
    ///
    /// # Errors
    /// `ShutDown` if the mount ends. Other errors are only logged, and the task is tried again.
    fn run(&mut self, session: &Session, lane: &mut SessionLane<'_>) -> Result<Option<Instant>, FsError>;
}

/// The lease in ms that is assumed before a server has told its own.
const UNKNOWN_LEASE_MS: u32 = 30_000;

/// What a thread does.
type Body = Box<dyn FnOnce() + Send>;

impl Session {
    /// Starts the background threads of a mount, if the options ask for them.
    ///
    /// # Errors
    /// One of them could not be started. The session is shut down, which ends the others.
    pub(crate) fn start(self: &Arc<Self>, tasks: Vec<Box<dyn Task>>) -> io::Result<()> {
        if !self.options.background {
            return Ok(());
        }
        let (weak, syncing, closing) = (Arc::downgrade(self), self.clone(), self.clone());
        let bodies: [(&str, Body); 3] = [
            ("control", Box::new(move || run(&weak, tasks))),
            ("syncer", Box::new(move || syncer::run(&syncing))),
            ("closer", Box::new(move || closer::run(&closing))),
        ];
        for (name, body) in bodies {
            let started = std::thread::Builder::new().name(name.to_owned()).spawn(body);
            started.inspect_err(|_| self.shut_down())?;
        }
        Ok(())
    }
}

fn run(weak: &Weak<Session>, mut tasks: Vec<Box<dyn Task>>) {
    let mut next_heartbeat = Instant::now();
    loop {
        let Some(session) = weak.upgrade() else {
            return;
        };
        if session.is_shut_down() {
            return;
        }
        panic_ends::plant("control");
        let mut lane = session.control_lane();
        if Instant::now() >= next_heartbeat || !lane.is_connected() {
            if !lane.is_connected() {
                session.attachment.drop_windows();
            }
            let caller = session.own_caller();
            match lane.call(&caller, |_| Request::Heartbeat, |_, _| Ok(())) {
                Ok(()) => {}
                Err(FsError::ShutDown) => return,
                Err(error) => tracing::warn!(%error, "heartbeat failed"),
            }
            let lease = session.attachment().map_or(UNKNOWN_LEASE_MS, |a| a.attached.lease_ms);
            next_heartbeat = Instant::now() + Duration::from_millis(u64::from(lease / 4).max(50));
        }
        session.attachment.drop_unread();
        let mut until = next_heartbeat;
        for task in &mut tasks {
            match task.run(&session, &mut lane) {
                Ok(next) => until = next.map_or(until, |next| until.min(next)),
                Err(FsError::ShutDown) => return,
                Err(error) => tracing::debug!(%error, "what goes on beside calls failed; it is tried again"),
            }
        }
        lane.lane().idle(until.saturating_duration_since(Instant::now()));
    }
}
