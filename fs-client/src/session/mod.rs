//! A mount's session with a server: its identity, its open files and locks there, and their recovery after a kill of the server.
//!
//! Owns the state that a new server has to be told: open files (`server_opens`), locks (`locks`), and copies of changes that no sync
//! has covered (`unsynced`). All lanes of the link share the session, which the secret that was drawn at mount time opens.
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
mod seen;
mod server_opens;
mod settle;
mod syncer;
mod unsynced;

pub(crate) use attachment::{Attachment, MappedWindows, Windows};
pub(crate) use control::Task;
pub use locks::{GrantedLock, LockWaiter};
pub(crate) use losses::LossesTold;
pub use options::{MAX_CALLER_LANES, SessionOptions};
pub(crate) use seen::SeenChanges;
pub(crate) use server_opens::{ServerOpen, ServerOpens};
pub use unsynced::{UNSYNCED_BYTES_LEAST, UnsyncedChanges, unsynced_bytes};

use crate::transport::{Away, Caller, FsError, LaneGuard, Link};
use attachment::CurrentAttachment;
use closer::CloseQueue;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rdma::{Device, Endpoint, HardwareFigures, RdmaError};
use cuttlefs_common::rpc::{Reply, Request, SessionSecret, SyncScope};
use cuttlefs_common::status::Status;
use cuttlefs_common::world::Random;
use locks::OwnLocks;
use options::{CONTROL_LANE, LOCKS_LANE, OWN_LANES};
use parking_lot::Mutex;
use recover::Recovered;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use unsynced::Unsynced;

/// How a mount stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Condition {
    /// `None`: the server answers, as far as is known.
    pub away: Option<Away>,
    /// The server answers, and the connection for heartbeats cannot be made.
    pub unheard: Option<Away>,
    /// What would be lost if the mount ended while the server is away.
    pub unsynced: UnsyncedChanges,
}

/// A lane of a session's link.
pub(crate) type SessionLane<'s> = LaneGuard<'s, Session>;

/// A session and its lanes.
pub struct Session {
    options: SessionOptions,
    /// Proves that the session is this mount's.
    secret: SessionSecret,
    link: Link,
    attachment: CurrentAttachment,
    /// Serialises recovery.
    recovered: Mutex<Recovered>,
    opens: ServerOpens,
    closes: CloseQueue,
    seen: SeenChanges,
    unsynced: Unsynced,
    /// Changes of contents that waited for a sync, so that there was room to keep them.
    unsynced_waits: AtomicU64,
    /// Held by a call that syncs for room, where nothing runs but calls.
    syncing: Mutex<()>,
    locks: OwnLocks,
}

impl Session {
    /// Connects and attaches.
    ///
    /// # Errors
    /// `RdmaError` if the server cannot be reached at all or refuses: at mount time there is nobody to wait for.
    pub fn connect(
        device: Arc<dyn Device>,
        options: SessionOptions,
        random: &dyn Random,
    ) -> Result<Arc<Self>, RdmaError> {
        let session = Self::unconnected(device, options, random)?;
        session.link.first_lane().connect_once(&session)?;
        Ok(Arc::new(session))
    }

    /// Asks a server for its status, without a session: also who is exported nothing, or a directory that is not there, is told.
    ///
    /// # Errors
    /// As `connect`; the inner one is the server's.
    pub fn ask_status(
        device: Arc<dyn Device>,
        options: SessionOptions,
        random: &dyn Random,
    ) -> Result<Result<String, FsError>, RdmaError> {
        let session = Self::unconnected(device, options, random)?;
        let mut lane = session.link.first_lane();
        lane.connect_link(&session.link)?;
        let answer = lane.call_unnumbered(&session.link, &Request::Status)?.map(Reply::parse);
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
            attachment: CurrentAttachment::default(),
            recovered: Mutex::default(),
            opens: ServerOpens::default(),
            closes: CloseQueue::default(),
            seen: SeenChanges::default(),
            unsynced: Unsynced::new(options.unsynced_bytes),
            unsynced_waits: AtomicU64::new(0),
            syncing: Mutex::default(),
            locks: OwnLocks::default(),
            options,
        })
    }

    /// Its lanes, and what they share.
    pub(crate) fn link(&self) -> &Link {
        &self.link
    }

    /// What this mount has open at the server.
    pub(crate) fn opens(&self) -> &ServerOpens {
        &self.opens
    }

    /// What this mount last saw of files' change counters.
    pub(crate) fn seen(&self) -> &SeenChanges {
        &self.seen
    }

    /// Written bytes the server may still lose.
    pub(crate) fn unsynced(&self) -> &Unsynced {
        &self.unsynced
    }

    /// Changes of contents that waited for a sync, so that there was room to keep them.
    pub(crate) fn unsynced_waits(&self) -> u64 {
        self.unsynced_waits.load(Ordering::Relaxed)
    }

    /// The inode this mount shows as root.
    pub fn root(&self) -> InodeNo {
        self.look().map_or(InodeNo::ROOT, |attachment| attachment.attached.root)
    }

    /// Where the server is.
    pub fn endpoint(&self) -> &Endpoint {
        self.link.endpoint()
    }

    /// A caller of the client's own, for requests no FUSE request stands behind.
    pub fn own_caller(&self) -> Caller {
        self.link.own_caller()
    }

    /// How long an answer may take before its connection is given up and it is asked for on another one.
    pub fn set_answer_patience(&self, patience: Duration) {
        self.link.set_answer_patience(patience);
    }

    /// Whether the server was away when somebody last asked it for something.
    pub fn is_away(&self) -> bool {
        self.link.is_away()
    }

    /// How the mount stands.
    pub(crate) fn condition(&self) -> Condition {
        Condition { away: self.link.away(), unheard: self.link.unheard(), unsynced: self.unsynced.changes() }
    }

    /// For status: what is told of its RNIC if that is hardware.
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

    /// The lane over which it is asked how waits for locks ended.
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

    /// As `call`, and the number of the session that answered.
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

    /// Makes everything durable at the server; this mount's copies of unsynced writes are then not needed any more.
    ///
    /// # Errors
    /// As the server says.
    pub fn sync_all(&self, caller: &Caller) -> Result<(), FsError> {
        let mark = self.unsynced.mark();
        self.call(caller, || Request::Sync(SyncScope::All), |_| Ok(()))?;
        self.unsynced.synced(None, mark);
        Ok(())
    }

    /// Sleeps, but not past the end of the mount; where nothing runs but calls, everything else goes on meanwhile. Not for who holds a lane.
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
        // First: what is sent behind the good-bye would begin another session.
        self.link.shut_down();
        self.unsynced.end_waits();
        if is_there {
            self.detach();
        }
        self.end_lock_waits();
        self.closes.end();
    }

    /// Says good-bye over a connection that stands: whoever ends a mount may never have asked for anything himself, and lanes
    /// connect when they are first used.
    fn detach(&self) {
        // Nobody gives up here, so there is a lane.
        let lane = SessionLane::connected(self).or_else(|| self.borrow_lane().ok());
        let Some(mut lane) = lane else { return };
        if lane.is_connected() {
            lane.lane().detach(&self.link);
        } else if let Err(error) = lane.lane().connect_once(self) {
            // Who connects to a mount that ends says good-bye.
            tracing::debug!(%error, "the mount has ended");
        }
    }
}
