//! The client's session with a server: identity, lanes, retransmission, recovery, heartbeats.
//!
//! A *lane* is one queue pair and one session slot; a calling thread borrows a lane, sends its request and waits
//! for the reply itself, so an RPC costs no thread switch on this side. All lanes share one session, which the
//! secret that was drawn at mount time opens.
//!
//! # Invariants
//! * A slot has one request in flight; its sequence number moves on only when the reply is there. A request whose
//!   connection broke is sent again with the same number, also to the next server and in the next session: whoever
//!   did it knows so by that number.
//! * After the server lost the session (restart, expiry), no request goes out before open files and locks are reclaimed.
//! * The exported windows are used only while the connection that brought them stands.
//!
//! # Failure
//! While the server is away calls wait, with one warning in the log, until it is back or the mount ends. It is away when no lane has a
//! connection that stands: one lane that cannot connect tries again, and others' calls go on.

mod bitmap_pace;
mod control;
mod counting;
mod idle_memory;
mod lane;
mod locks;
mod losses;
mod recover;
mod spread_count;
mod syncer;
mod unsynced;

pub(crate) use lane::{DataBuffer, LaneGuard};
pub(crate) use losses::LossesTold;

use crate::file::interrupt;
use crate::file::volume::{Away, Caller, Condition, FsError};
use crate::file::{OpenFile, OpenFiles, ReadBuffers, SeenChanges};
use arc_swap::ArcSwapOption;
use cuttlefs_common::ids::{InodeNo, SlotIndex, TraceId};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::{Device, Endpoint, ProtectionDomain, RdmaError};
use cuttlefs_common::region::{AccessCounters, FileTable, ResidencyTable};
use cuttlefs_common::rpc::{
    Attached, Reply, Request, SLOTS_PER_SESSION, SessionSecret, SyncScope, Unanswered,
};
use cuttlefs_common::status::Status;
use cuttlefs_common::world::{Clock, Random};
use lane::Lane;
use locks::OwnLocks;
use parking_lot::{Condvar, Mutex};
pub use spread_count::SpreadCount;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use unsynced::Unsynced;

/// The slot of recovery's own requests: the last.
const RECOVERY_SLOT: SlotIndex = SlotIndex(SLOTS_PER_SESSION - 1);
/// Lanes callers can have: of the session's slots, one is recovery's, one the control thread's, and over one it is asked
/// how waits for locks ended.
pub const MAX_CALLER_LANES: usize = SLOTS_PER_SESSION as usize - 3;
/// How long one attempt to connect may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long an answer may take before it is asked for on another connection. Longer than any but the largest syncs on a
/// slow disk take, as long as a silent host is noticed by TCP's keepalive.
const ANSWER_PATIENCE: Duration = Duration::from_secs(30);
/// How long a request waits for a lane before it looks whether somebody still waits for the request.
const LANE_SLICE: Duration = Duration::from_millis(100);
/// How long it is waited for the answer to a good-bye.
const DETACH_PATIENCE: Duration = Duration::from_secs(2);
/// First and longest pause between attempts to reconnect.
const BACKOFF_FIRST: Duration = Duration::from_millis(10);
const BACKOFF_LONGEST: Duration = Duration::from_secs(1);

/// What copies of unsynced changes take at most, of a mount: a part of the machine's memory, within these. What is written faster than
/// it becomes durable waits when so much is owed. Of 1,000 MiB that are written at once most is taken at memory's speed with 128 MiB.
pub const UNSYNCED_BYTES_LEAST: usize = 32 << 20;
const UNSYNCED_BYTES_MOST: usize = 128 << 20;
const UNSYNCED_PART_OF_MEMORY: u64 = 64;

/// What copies of unsynced changes of a mount may take on this machine.
pub fn unsynced_bytes() -> usize {
    let machine = rustix::system::sysinfo();
    let memory = machine.totalram.saturating_mul(u64::from(machine.mem_unit));
    let part = usize::try_from(memory / UNSYNCED_PART_OF_MEMORY).unwrap_or(usize::MAX);
    part.clamp(UNSYNCED_BYTES_LEAST, UNSYNCED_BYTES_MOST)
}

/// What a session needs to know before it connects.
pub struct SessionOptions {
    /// Where the server is.
    pub endpoint: Endpoint,
    /// For people: host and mount point.
    pub label: String,
    /// Directory of the export to mount; empty: all of it.
    pub subtree: Vec<u8>,
    /// Lanes for callers; bounded by the session's slots.
    pub lanes: usize,
    /// What copies of unsynced changes take at most; then changes wait for a sync.
    pub unsynced_bytes: usize,
    /// By what patience is measured.
    pub clock: Arc<dyn Clock>,
    /// Whether heartbeats, bitmap pulls and closes run in threads of their own. Without, nothing runs but calls:
    /// for a simulation in one thread.
    pub background: bool,
}

/// The server's tables, mapped: what initiator translation reads.
pub struct Windows {
    /// The frames.
    pub frames: Arc<SharedMemory>,
    /// The residency table.
    pub residency: ResidencyTable,
    /// The file table.
    pub files: FileTable,
}

/// What the session knows of the server it is attached to.
#[derive(Clone)]
pub(crate) struct Attachment {
    pub(crate) attached: Attached,
    /// The link maps the server's tables: this side translates. Stays true when the windows are dropped.
    pub(crate) initiator_translates: bool,
    pub(crate) windows: Option<Arc<Windows>>,
    /// Where one-sided reads are counted, once the server has been told. Stays when the windows are dropped.
    pub(crate) counting: Arc<OnceLock<AccessCounters>>,
}

/// The current attachment, for the time of a read.
pub(crate) struct AttachmentGuard(arc_swap::Guard<Option<Arc<Attachment>>>);

impl std::ops::Deref for AttachmentGuard {
    type Target = Attachment;

    fn deref(&self) -> &Attachment {
        self.0.as_deref().expect("a guard is made of an attachment that is there")
    }
}

/// Figures of one mount, for `status`.
#[derive(Default)]
pub struct ClientCounters {
    /// Requests answered.
    pub rpc_requests: AtomicU64,
    /// One-sided reads posted (target-translated) or done by loads (initiator-translated).
    pub onesided_reads: SpreadCount,
    /// Pages that came back as magic or would not validate.
    pub magic_hits: AtomicU64,
    /// One-sided reads that found the magic pattern where the page bitmap had promised bytes.
    pub read_twice: AtomicU64,
    /// Fetch RPCs.
    pub sparse_fetches: AtomicU64,
    /// Reconnects.
    pub reconnects: AtomicU64,
    /// Changes of contents that waited for a sync, so that there was room to keep them.
    pub unsynced_waits: AtomicU64,
}

impl ClientCounters {
    /// All of them, by the names people see. Relaxed: each is about this moment.
    pub fn figures(&self) -> [(&'static str, u64); 7] {
        [
            ("rpc_requests", self.rpc_requests.load(Ordering::Relaxed)),
            ("onesided_reads", self.onesided_reads.get()),
            ("magic_hits", self.magic_hits.load(Ordering::Relaxed)),
            ("read_twice", self.read_twice.load(Ordering::Relaxed)),
            ("sparse_fetches", self.sparse_fetches.load(Ordering::Relaxed)),
            ("reconnects", self.reconnects.load(Ordering::Relaxed)),
            ("unsynced_waits", self.unsynced_waits.load(Ordering::Relaxed)),
        ]
    }
}

/// How far recovery is.
struct Recovered {
    /// The session that open files are reclaimed for; 0 before the first.
    number: u64,
    /// Epoch of the server that session is of.
    epoch: u64,
    /// Number of the next request in recovery's slot.
    seq: u64,
}

/// A lane's request without an answer.
struct Asking<'s>(&'s AtomicU64);

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

/// The server does not answer, or refuses this mount.
struct AwaySince {
    /// By the session's clock.
    since: Duration,
    /// What the last attempt to connect came to.
    because: String,
}

/// A session and its lanes.
pub struct Session {
    options: SessionOptions,
    /// Proves that the session is this mount's.
    secret: SessionSecret,
    pd: Arc<dyn ProtectionDomain>,
    device: Arc<dyn Device>,
    /// Taken by a caller for the time of one request. The last two are the control thread's own, and the one for locks.
    lanes: Vec<Mutex<Lane>>,
    /// Which of them have a connection.
    standing: Vec<Arc<AtomicBool>>,
    /// Round-robin start for threads without a lane of their own.
    next_lane: AtomicU64,
    /// Read by every one-sided read, on both cores at once: no reader writes to a line they share.
    attachment: ArcSwapOption<Attachment>,
    /// Of each lane the number of its request that has no answer yet; 0: none. Written by whoever has the lane (release, before
    /// it sends), read by recovery (acquire): a request that a server has done is seen once that server is known to be gone.
    asking: Vec<AtomicU64>,
    /// Held to change `attachment`.
    attaching: Mutex<()>,
    /// Serialises recovery.
    recovered: Mutex<Recovered>,
    open_files: OpenFiles,
    seen: SeenChanges,
    unsynced: Unsynced,
    /// Held by a call that syncs for room, where nothing runs but calls.
    syncing: Mutex<()>,
    read_buffers: ReadBuffers,
    locks: OwnLocks,
    shut_down: AtomicBool,
    /// The session is being ended by this side: that its connections go is no news.
    ending: AtomicBool,
    /// Wakes pausing reconnects when the mount ends.
    pause: (Mutex<()>, Condvar),
    trace: AtomicU64,
    /// Since when the server is away, and why; logged, and not yet taken back.
    away: Mutex<Option<AwaySince>>,
    /// Milliseconds an answer may take. Relaxed: read before each wait, guards nothing.
    answer_patience_ms: AtomicU64,
    /// Figures.
    pub counters: ClientCounters,
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
        session.lanes[0].lock().connect_once(&session)?;
        if session.options.background {
            control::start(&session);
        }
        Ok(session)
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
        let mut lane = session.lanes[0].lock();
        lane.connect_link(&session)?;
        let answer = lane.call_unnumbered(&session, &Request::Status)?.map(Reply::parse);
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
    ) -> Result<Arc<Self>, RdmaError> {
        let pd = device.alloc_pd();
        // One more for the control thread, and one for locks.
        let lane_count = options.lanes.clamp(1, MAX_CALLER_LANES) + 2;
        let mut lanes = Vec::with_capacity(lane_count);
        for slot in 0..lane_count {
            lanes.push(Lane::new(slot as u16, device.as_ref(), pd.as_ref())?);
        }
        let secret = SessionSecret::draw(random);
        let unsynced_bytes = options.unsynced_bytes;
        Ok(Arc::new(Self {
            options,
            secret,
            pd,
            device,
            asking: lanes.iter().map(|_| AtomicU64::new(0)).collect(),
            standing: lanes.iter().map(Lane::standing).collect(),
            lanes: lanes.into_iter().map(Mutex::new).collect(),
            next_lane: AtomicU64::new(0),
            attachment: ArcSwapOption::empty(),
            attaching: Mutex::new(()),
            recovered: Mutex::new(Recovered { number: 0, epoch: 0, seq: 1 }),
            open_files: OpenFiles::default(),
            seen: SeenChanges::default(),
            unsynced: Unsynced::new(unsynced_bytes),
            syncing: Mutex::default(),
            read_buffers: ReadBuffers::default(),
            locks: OwnLocks::default(),
            shut_down: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            pause: (Mutex::new(()), Condvar::new()),
            trace: AtomicU64::new(1),
            away: Mutex::new(None),
            answer_patience_ms: AtomicU64::new(ANSWER_PATIENCE.as_millis() as u64),
            counters: ClientCounters::default(),
        }))
    }

    /// Closes a file at the server: soon and in a batch, or at once where there are no threads.
    pub(crate) fn close(&self, file: Arc<OpenFile>) {
        if self.options.background {
            return self.open_files.close(file);
        }
        let build = || Request::Close { filekeys: vec![file.bound_key()] };
        if let Err(error) = self.call(&self.own_caller(), build, |_| Ok(())) {
            tracing::debug!(%error, "closing a file failed");
        }
        self.open_files.forget(&file);
    }

    /// How long an answer may take before its connection is given up and it is asked for on another one.
    pub fn set_answer_patience(&self, patience: Duration) {
        self.answer_patience_ms.store(patience.as_millis() as u64, Ordering::Relaxed);
    }

    fn answer_patience(&self) -> Duration {
        Duration::from_millis(self.answer_patience_ms.load(Ordering::Relaxed))
    }

    /// Where the server is.
    pub fn endpoint(&self) -> &Endpoint {
        &self.options.endpoint
    }

    /// The files open through this session.
    pub(crate) fn open_files(&self) -> &OpenFiles {
        &self.open_files
    }

    /// What this mount last saw of files' change counters.
    pub(crate) fn seen(&self) -> &SeenChanges {
        &self.seen
    }

    /// Written bytes the server may still lose.
    pub(crate) fn unsynced(&self) -> &Unsynced {
        &self.unsynced
    }

    /// Memory for reads.
    pub(crate) fn read_buffers(&self) -> &ReadBuffers {
        &self.read_buffers
    }

    /// The lanes of callers, without those of the control thread and of locks.
    fn caller_lanes(&self) -> &[Mutex<Lane>] {
        &self.lanes[..self.lanes.len() - 2]
    }

    /// The inode this mount shows as root.
    pub fn root(&self) -> InodeNo {
        self.attachment.load().as_ref().map_or(InodeNo::ROOT, |a| a.attached.root)
    }

    /// The current attachment, looked at once for all a read wants of it: no reference is counted.
    pub(crate) fn look(&self) -> Option<AttachmentGuard> {
        let attachment = self.attachment.load();
        attachment.is_some().then_some(AttachmentGuard(attachment))
    }

    pub(crate) fn attachment(&self) -> Option<Arc<Attachment>> {
        self.attachment.load_full()
    }

    /// Whether the target translates file addresses on this link.
    pub(crate) fn target_translates(&self) -> bool {
        self.look().is_some_and(|attachment| self.target_translates_for(&attachment))
    }

    /// The same of an attachment.
    pub(crate) fn target_translates_for(&self, attachment: &Attachment) -> bool {
        self.device.capabilities().file_regions && !attachment.initiator_translates
    }

    /// A caller of the client's own, for requests no FUSE request stands behind.
    pub fn own_caller(&self) -> Caller {
        Caller::new(0, 0, TraceId(self.trace.fetch_add(1, Ordering::Relaxed)))
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

    /// A lane begins to ask; until what this gives is dropped it has no answer.
    fn note_asking(&self, slot: SlotIndex, seq: u64) -> Asking<'_> {
        let number = &self.asking[usize::from(slot.0)];
        number.store(seq, Ordering::Release);
        Asking(number)
    }

    /// Requests without an answer. Some may not have been sent yet.
    fn unanswered(&self) -> Vec<Unanswered> {
        let lanes = (0..).map(SlotIndex).zip(&self.asking);
        let asked = lanes.map(|(slot, number)| Unanswered { slot, seq: number.load(Ordering::Acquire) });
        asked.filter(|request| request.seq != 0).collect()
    }

    /// The calling thread's own lane if that is free, else any. Every request of a caller goes this way. Whoever has a lane asks
    /// for no other one.
    ///
    /// # Errors
    /// `Interrupted` if nobody waits for the request any more.
    pub(crate) fn borrow_lane(&self) -> Result<LaneGuard<'_>, FsError> {
        thread_local! {
            static PREFERRED: std::cell::Cell<Option<usize>> = const { std::cell::Cell::new(None) };
        }
        let callers = self.lanes.len() - 2;
        let preferred = PREFERRED.with(|cell| {
            cell.get().unwrap_or_else(|| {
                let lane = self.next_lane.fetch_add(1, Ordering::Relaxed) as usize;
                cell.set(Some(lane));
                lane
            })
        }) % callers;
        for step in 0..callers {
            if let Some(lane) = self.lanes[(preferred + step) % callers].try_lock() {
                return Ok(LaneGuard::new(self, lane));
            }
        }
        loop {
            if let Some(lane) = self.lanes[preferred].try_lock_for(LANE_SLICE) {
                return Ok(LaneGuard::new(self, lane));
            }
            if interrupt::is_interrupted() {
                return Err(FsError::Interrupted);
            }
        }
    }

    /// The control thread's lane.
    fn control_lane(&self) -> LaneGuard<'_> {
        LaneGuard::new(self, self.lanes[self.lanes.len() - 2].lock())
    }

    /// The lane over which it is asked how waits for locks ended.
    fn locks_lane(&self) -> LaneGuard<'_> {
        LaneGuard::new(self, self.lanes[self.lanes.len() - 1].lock())
    }

    /// Whether the mount is ending.
    pub fn is_shut_down(&self) -> bool {
        self.shut_down.load(Ordering::Acquire)
    }

    /// Ends the session: waiting calls fail with `ShutDown`; the server is told if it is there.
    pub fn shut_down(&self) {
        if self.ending.swap(true, Ordering::AcqRel) {
            return;
        }
        let is_there = self.attachment.load().is_some() && !self.is_away();
        // First: what is sent behind the good-bye would begin another session.
        self.shut_down.store(true, Ordering::Release);
        self.pause.1.notify_all();
        self.unsynced.end_waits();
        if is_there {
            self.detach();
        }
        self.end_lock_waits();
        self.open_files.end_closes();
    }

    /// Says good-bye over a connection that stands: whoever ends a mount may never have asked for anything himself, and lanes
    /// connect when they are first used.
    fn detach(&self) {
        let connected = self.lanes.iter().find_map(|lane| lane.try_lock().filter(|lane| lane.is_connected()));
        let connected = connected.map(|lane| LaneGuard::new(self, lane));
        // Nobody gives up here, so there is a lane.
        let Some(mut lane) = connected.or_else(|| self.borrow_lane().ok()) else { return };
        if lane.is_connected() {
            lane.lane().detach(self);
        } else if let Err(error) = lane.lane().connect_once(self) {
            // Who connects to a mount that ends says good-bye.
            tracing::debug!(%error, "the mount has ended");
        }
    }

    /// The time by which patience is measured.
    fn now(&self) -> Duration {
        self.options.clock.monotonic()
    }

    /// As `pause`; where nothing runs but calls, everything else goes on meanwhile. Not for who holds a lane.
    fn rest(&self, time: Duration) {
        if self.options.background { self.pause(time) } else { self.control_lane().lane().idle(time) }
    }

    /// Sleeps, but not past the end of the mount.
    fn pause(&self, time: Duration) {
        let mut guard = self.pause.0.lock();
        if !self.is_shut_down() {
            self.pause.1.wait_for(&mut guard, time);
        }
    }

    /// The connection that brought the windows is gone: nobody may read them any more.
    fn drop_windows(&self) {
        let _alone = self.attaching.lock();
        if let Some(current) = self.attachment.load().as_ref()
            && current.windows.is_some()
        {
            let without = Attachment { windows: None, ..current.as_ref().clone() };
            self.attachment.store(Some(Arc::new(without)));
        }
    }

    /// Whether the server was away when somebody last asked it for something.
    pub fn is_away(&self) -> bool {
        self.away.lock().is_some()
    }

    /// A lane has lost its connection, or could not make one.
    fn note_failure(&self, slot: SlotIndex, error: &dyn std::fmt::Display) {
        if self.others_stand(slot) {
            tracing::debug!(endpoint = %self.options.endpoint, %error, "a connection of several is gone or cannot be made; it is tried again");
        } else {
            self.note_away(error);
        }
    }

    /// Whether a lane beside this one has a connection that stands. One that somebody has stands until he finds that it does not.
    fn others_stand(&self, slot: SlotIndex) -> bool {
        let lanes = (0..).map(SlotIndex).zip(self.lanes.iter().zip(&self.standing));
        let mut others = lanes.filter(|(other, _)| *other != slot);
        others.any(|(_, (lane, standing))| match lane.try_lock() {
            Some(mut lane) => lane.still_stands(),
            None => standing.load(Ordering::Relaxed),
        })
    }

    fn note_away(&self, error: &dyn std::fmt::Display) {
        if self.ending.load(Ordering::Acquire) {
            return;
        }
        let because = error.to_string();
        let mut away = self.away.lock();
        match &mut *away {
            Some(known) if known.because == because => {}
            // A server that is back and refuses this mount is another matter than one that is gone.
            Some(known) => {
                tracing::warn!(endpoint = %self.options.endpoint, %error, "server is still away; operations wait");
                known.because = because;
            }
            None => {
                tracing::warn!(endpoint = %self.options.endpoint, %error, "server is away; operations wait until it is back");
                *away = Some(AwaySince { since: self.now(), because });
            }
        }
    }

    /// How the mount stands.
    pub(crate) fn condition(&self) -> Condition {
        let away = self
            .away
            .lock()
            .as_ref()
            .map(|away| Away { time: self.now().saturating_sub(away.since), because: away.because.clone() });
        Condition { away, unsynced: self.unsynced.changes() }
    }

    fn note_back(&self) {
        if self.away.lock().take().is_some() {
            tracing::warn!(endpoint = %self.options.endpoint, "server is back; operations go on");
        }
    }
}
