//! A mount's session with a server: its identity, its open files and locks there, and their recovery after a kill of the server.
//!
//! A session owns the state that a new server must be told: open files (`server_opens`), locks (`locks`), and copies of unsynced changes
//! (`unsynced`). All lanes of the link share the session, which a secret drawn at mount time opens.
//!
//! # Invariants
//! * After the server lost the session (restart, expiry), no request goes out before open files and locks are reclaimed.
//! * The exported windows are used only while the connection that brought them stands.

mod attach;
mod attachment;
mod closer;
mod control;
mod locks;
mod losses;
mod options;
mod recover;
mod regions;
mod server_opens;
mod settle;
mod syncer;
mod unsynced;

pub(crate) use attachment::{Attachment, MappedWindows, Windows};
pub(crate) use control::Task;
pub use locks::{GrantedLock, LockWaiter};
pub(crate) use losses::LossesTold;
pub use options::{MAX_CALLER_LANES, SessionOptions, lanes_bytes};
pub(crate) use server_opens::{ServerOpen, ServerOpens};
pub(crate) use unsynced::{Life, Room, Unsynced};
pub use unsynced::{UNSYNCED_BYTES_LEAST, UnsyncedChanges, unsynced_bytes};

use crate::transport::{Away, Caller, FsError, LaneGuard, Link};
use attachment::CurrentAttachment;
use closer::CloseQueue;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::pool_uuid::PoolUuid;
use cuttlefs_common::rdma::{Device, Endpoint, HardwareFigures, RdmaError};
use cuttlefs_common::rpc::{Reply, Request, SessionSecret, SyncScope};
use cuttlefs_common::status::Status;
use cuttlefs_common::world::Random;
use locks::OwnLocks;
use options::{CONTROL_LANE, LOCKS_LANE, OWN_LANES};
use parking_lot::Mutex;
use recover::Recovered;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Whether the server is away, and the changes that depend on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Condition {
    /// Since when the server is away, and why. `None`: it answers, as far as is known.
    pub away: Option<Away>,
    /// The server answers, and the connection for heartbeats cannot be made.
    pub unheard: Option<Away>,
    /// How long the server lets this mount be silent; `None`: no server has said so yet.
    pub lease: Option<Duration>,
    /// What would be lost if the mount ended while the server is away.
    pub unsynced: UnsyncedChanges,
    /// The pool; `None`: no server has told it yet.
    pub pool: Option<PoolUuid>,
}

/// A lane of a session's link.
pub(crate) type SessionLane<'s> = LaneGuard<'s, Session>;

/// A session and its lanes.
pub struct Session {
    options: SessionOptions,
    /// Proves that the session belongs to this mount.
    secret: SessionSecret,
    link: Link,
    /// The pool that was asked for, or else the first server's; known once that is attached.
    pool: OnceLock<PoolUuid>,
    attachment: CurrentAttachment,
    /// Serialises recovery.
    recovered: Mutex<Recovered>,
    opens: ServerOpens,
    closes: CloseQueue,
    unsynced: Unsynced,
    /// How often a change of contents waited for a sync to get room for its copy.
    unsynced_waits: AtomicU64,
    /// Held by a call that syncs for room, in a process without background threads.
    syncing: Mutex<()>,
    locks: OwnLocks,
}

impl Session {
    /// Connects and attaches.
    ///
    /// # Errors
    /// `RdmaError` if the server cannot be reached or refuses: nothing waits for it at mount time.
    pub fn connect(
        device: Arc<dyn Device>,
        options: SessionOptions,
        random: &dyn Random,
    ) -> Result<Arc<Self>, RdmaError> {
        let session = Self::unconnected(device, options, random)?;
        let mut lane = session.link.first_lane();
        lane.connect_once(&session)?;
        // An attach is short. A way that does not carry full packets would be found by the first program that reads.
        if session.link.hardware().is_some() {
            let _ = lane.ask_status(&session.link)?;
        }
        drop(lane);
        Ok(Arc::new(session))
    }

    /// Asks a server for its status, without a session: so the status is also for a user to whom nothing, or a missing directory, is exported.
    ///
    /// # Errors
    /// The outer error is as in `connect`; the inner one is the server's.
    pub fn ask_status(
        device: Arc<dyn Device>,
        options: SessionOptions,
        random: &dyn Random,
    ) -> Result<Result<String, FsError>, RdmaError> {
        let session = Self::unconnected(device, options, random)?;
        let mut lane = session.link.first_lane();
        lane.connect_link(&session.link)?;
        let answer = lane.ask_status(&session.link)?.map(Reply::parse);
        let text = match answer {
            Ok(Ok(Reply::Status(text))) => Ok(text.to_owned()),
            Ok(_) => Err(FsError::Server(Status::Malformed)),
            Err(status) => Err(FsError::Server(status)),
        };
        lane.disconnect();
        Ok(text)
    }

    fn unconnected(
        device: Arc<dyn Device>,
        options: SessionOptions,
        random: &dyn Random,
    ) -> Result<Self, RdmaError> {
        let callers = options.lanes.clamp(1, MAX_CALLER_LANES);
        let link = Link::new(device, options.endpoint.clone(), options.clock.clone(), callers, OWN_LANES)?;
        Ok(Self {
            secret: SessionSecret::draw(random),
            link,
            pool: options.pool.map_or_else(OnceLock::new, OnceLock::from),
            attachment: CurrentAttachment::default(),
            recovered: Mutex::default(),
            opens: ServerOpens::default(),
            closes: CloseQueue::default(),
            unsynced: Unsynced::new(options.unsynced_bytes),
            unsynced_waits: AtomicU64::new(0),
            syncing: Mutex::default(),
            locks: OwnLocks::default(),
            options,
        })
    }

    /// The link: its lanes, and the state that they share.
    pub(crate) fn link(&self) -> &Link {
        &self.link
    }

    /// The files that this mount has open at the server.
    pub(crate) fn opens(&self) -> &ServerOpens {
        &self.opens
    }

    /// Changes that the server may still lose.
    pub(crate) fn unsynced(&self) -> &Unsynced {
        &self.unsynced
    }

    /// How often a change of contents waited for a sync to get room for its copy.
    pub(crate) fn unsynced_waits(&self) -> u64 {
        self.unsynced_waits.load(Ordering::Relaxed)
    }

    /// The inode this mount shows as root.
    pub fn root(&self) -> InodeNo {
        self.look().map_or(InodeNo::ROOT, |attachment| attachment.attached.root)
    }

    /// The server's endpoint.
    pub fn endpoint(&self) -> &Endpoint {
        self.link.endpoint()
    }

    /// A caller for requests of the client's own, which belong to no FUSE request.
    pub fn own_caller(&self) -> Caller {
        self.link.own_caller()
    }

    /// Sets how long an answer may take before its connection is given up and the request is sent on another one.
    pub fn set_answer_patience(&self, patience: Duration) {
        self.link.set_answer_patience(patience);
    }

    /// Whether the server was away at the last request.
    pub fn is_away(&self) -> bool {
        self.link.is_away()
    }

    /// Whether the server is away, and the changes that would be lost.
    pub(crate) fn condition(&self) -> Condition {
        let lease =
            self.attachment().map(|attachment| Duration::from_millis(attachment.attached.lease_ms.into()));
        Condition {
            away: self.link.away(),
            unheard: self.link.unheard(),
            lease,
            unsynced: self.unsynced.changes(),
            pool: self.pool.get().copied(),
        }
    }

    /// The figures of the RNIC, if it is hardware, for status.
    pub(crate) fn hardware(&self) -> Option<HardwareFigures> {
        self.link.hardware()
    }

    /// A lane for one request.
    ///
    /// # Errors
    /// `Interrupted` if nobody waits for the request any more.
    pub(crate) fn borrow_lane(&self) -> Result<SessionLane<'_>, FsError> {
        SessionLane::borrow(self)
    }

    /// The control thread's lane.
    fn control_lane(&self) -> SessionLane<'_> {
        SessionLane::own(self, CONTROL_LANE)
    }

    /// The lane for the question how waits for locks ended.
    fn locks_lane(&self) -> SessionLane<'_> {
        SessionLane::own(self, LOCKS_LANE)
    }

    /// Sends the request that `build` makes and hands the reply to `take`. `build` is called again for each
    /// attempt, because a recovery changes filekeys.
    ///
    /// # Errors
    /// `FsError::Server` as the server says; `ShutDown` if the mount ends meanwhile.
    pub fn call<'r, T>(
        &self,
        caller: &Caller,
        build: impl Fn() -> Request<'r>,
        take: impl FnOnce(Reply<'_>) -> Result<T, FsError>,
    ) -> Result<T, FsError> {
        self.borrow_lane()?.call(caller, |_| build(), |reply, _| take(reply))
    }

    /// As `call`. Returns the number of the session that answered, too.
    pub(crate) fn call_noting_session<'r, T>(
        &self,
        caller: &Caller,
        build: impl Fn() -> Request<'r>,
        take: impl FnOnce(Reply<'_>) -> Result<T, FsError>,
    ) -> Result<(T, u64), FsError> {
        let mut lane = self.borrow_lane()?;
        let answer = lane.call(caller, |_| build(), |reply, _| take(reply))?;
        Ok((answer, lane.session_number()))
    }

    /// Makes everything durable at the server. After that the mount's copies of earlier changes are dropped.
    ///
    /// # Errors
    /// The error of the request.
    pub fn sync_all(&self, caller: &Caller) -> Result<(), FsError> {
        let mark = self.unsynced.mark();
        self.call(caller, || Request::Sync(SyncScope::All), |_| Ok(()))?;
        self.unsynced.synced(None, mark);
        Ok(())
    }

    /// Sleeps until `time` is over or the mount ends. In a process without background threads, lets everything else go on meanwhile. The caller must
    /// not hold a lane.
    fn rest(&self, time: Duration) {
        if self.options.background { self.link.pause(time) } else { self.control_lane().lane().idle(time) }
    }

    /// Whether the mount is ending.
    pub fn is_shut_down(&self) -> bool {
        self.link.is_shut_down()
    }

    /// Ends the session: waiting calls fail with `ShutDown`; the server is told if it is there.
    pub fn shut_down(&self) {
        if !self.link.begin_end() {
            return;
        }
        let is_there = self.attachment().is_some() && !self.is_away();
        // First, because a request that is sent after the detach would begin another session.
        self.link.shut_down();
        self.unsynced.end_waits();
        if is_there {
            self.detach();
        }
        self.end_lock_waits();
        self.closes.end();
    }

    /// Detaches, over a connection that stands if there is one: lanes connect when they are first used, and the thread that ends the mount may have
    /// used none.
    fn detach(&self) {
        // Shutting down is never interrupted, so there is a lane.
        let lane = SessionLane::connected(self).or_else(|| self.borrow_lane().ok());
        let Some(mut lane) = lane else { return };
        if lane.is_connected() {
            lane.lane().detach(&self.link);
        } else if let Err(error) = lane.lane().connect_once(self) {
            // A lane that connects to the server of a mount that ends detaches by itself.
            tracing::debug!(%error, "the mount has ended");
        }
    }
}
