//! One connection: its queue pair and the registered memory its messages travel through.
//!
//! ```text
//! connection memory:  [ 2 receives of 64 KiB | 4 replies of 64 KiB ]     (touched pages only are real)
//! ```
//!
//! A receive is posted again only when its request was answered, so a client cannot have more than `RECEIVES` requests running on one
//! connection. Where the worker has shared receives (`shared_receives`) the connection has none of its own, and a client that sends more is
//! cut off. Any worker may answer on any connection: a retransmitted request is answered on the connection where it came in last.
//!
//! # Its life
//! Owned by its worker (`worker.rs`) and by its running requests. Every work request that is posted is counted until its completion was polled,
//! for a queue pair that goes into `Error` completes all of them. So a connection *is over* when its queue pair is in `Error` and nothing is
//! posted: then its worker lets go of it, whatever ended it. The last running request drops it (a request that only waits ends with it:
//! `ended`), and with it go its entry among the connections, its session's count, its registered memory and its place in the peer's share.
//!
//! # Patience
//! No wait for a peer is endless. The worker's sweep counts seconds, and the connection ends when
//! * a reply was not taken for `REPLY_PATIENCE`: its client is stopped or gone, and a mount that still runs reconnects;
//! * it carries no live session and no message came for `ATTACH_PATIENCE`: a mount attaches at once, `status` asks at once.

use super::connections::Entry;
use crate::rights::Grant;
use crate::rnics::RnicIndex;
use crate::session::Session;
use crate::shares::{Peer, Taken};
use async_lock::{Semaphore, SemaphoreGuardArc};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::{
    Access, MemoryRegion, ProtectionDomain, QpState, QueuePair, RdmaError, RecvWr, SendOp, SendWr, WrId,
};
use cuttlefs_common::rpc::MAX_MESSAGE_BYTES;
use event_listener::Event;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

const MESSAGE: usize = MAX_MESSAGE_BYTES as usize;
/// Receives posted, and so requests running, for one connection.
pub(crate) const RECEIVES: usize = 2;
/// Replies being sent: more than receives, because a send may complete after the client's next request.
const REPLIES: usize = 4;
/// Sweeps, which come once a second, that a reply may wait for the peer to take it: as long as a client waits for one.
pub(crate) const REPLY_PATIENCE: u32 = 30;
/// Sweeps that a connection may be there without a session or a message.
pub(crate) const ATTACH_PATIENCE: u32 = 10;

/// What a work request id means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WorkId {
    /// Receive buffer of this index.
    Receive(usize),
    /// Reply buffer of this index.
    Reply(usize),
    /// One-sided transfer of a request, by its token.
    Transfer(usize),
    /// Shared receive buffer of this index.
    Shared(usize),
}

/// Where a connection's requests come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReceivesOf {
    /// Buffers of its own.
    Connection,
    /// Its worker's.
    Worker,
}

impl ReceivesOf {
    /// How many the connection has of its own.
    const fn own(self) -> usize {
        match self {
            Self::Connection => RECEIVES,
            Self::Worker => 0,
        }
    }
}

/// A request as it came.
pub(crate) enum Arrived {
    /// In a receive of the connection's, where it stays until it is looked at.
    InPlace {
        /// Which.
        index: usize,
        /// Bytes.
        len: u32,
    },
    /// In a shared one, which is another's by now.
    Copied(Vec<u8>),
}

impl WorkId {
    const KIND_SHIFT: u32 = 56;

    /// As the verbs API carries it.
    pub(crate) fn encode(self) -> WrId {
        let (kind, value) = match self {
            WorkId::Receive(index) => (0u64, index),
            WorkId::Reply(index) => (1, index),
            WorkId::Transfer(token) => (2, token),
            WorkId::Shared(index) => (3, index),
        };
        WrId(kind << Self::KIND_SHIFT | value as u64)
    }

    /// Back from a completion. Only ids this server posted come back, so anything else is a broken provider.
    pub(crate) fn decode(id: WrId) -> Self {
        let value = (id.0 & ((1 << Self::KIND_SHIFT) - 1)) as usize;
        match id.0 >> Self::KIND_SHIFT {
            0 => WorkId::Receive(value),
            1 => WorkId::Reply(value),
            2 => WorkId::Transfer(value),
            3 => WorkId::Shared(value),
            kind => unreachable!("work request id of kind {kind}"),
        }
    }
}

/// A reply buffer that is not free.
struct InFlight {
    /// Gives the buffer back.
    _permit: SemaphoreGuardArc,
    /// Its send is posted; sweeps since then.
    posted: bool,
    sweeps: u32,
}

/// A connected client queue pair.
pub struct Connection {
    rnic: RnicIndex,
    qp: Arc<dyn QueuePair>,
    /// Posted work requests whose completions were not polled yet. Moved by whoever posts, before, and by its worker; the
    /// worker looks at it after each of its own changes and at each sweep. Acquire and release: who finds none sees all that
    /// was done with them.
    posted: AtomicUsize,
    /// Sweeps since the last message. Relaxed: a second more or less does not matter.
    quiet: AtomicU32,
    region: Arc<dyn MemoryRegion>,
    receives: ReceivesOf,
    /// Requests that came by shared receives and are not answered. Moved by its worker; relaxed.
    running: AtomicUsize,
    session: OnceLock<(Arc<Session>, Grant)>,
    replies: Arc<Semaphore>,
    /// Its client's counters are pulled over it.
    is_sampled: AtomicBool,
    /// Which reply buffers are in flight.
    in_flight: Mutex<[Option<InFlight>; REPLIES]>,
    entry: Entry,
    /// It has ended.
    end: Event,
    /// Last: when the place is free, all else is.
    place: Taken,
}

impl Connection {
    /// Registers memory for a connection that is about to be accepted.
    ///
    /// # Errors
    /// `RdmaError` if there is no memory.
    pub(crate) fn register(
        pd: &dyn ProtectionDomain,
        receives: ReceivesOf,
    ) -> Result<Arc<dyn MemoryRegion>, RdmaError> {
        let len = MESSAGE * (receives.own() + REPLIES);
        let memory = SharedMemory::new("cuttlefs-connection", len).map_err(|source| RdmaError::Io {
            action: "allocate memory for",
            endpoint: "a connection".into(),
            source,
        })?;
        pd.register(Arc::new(memory), Access::LOCAL)
    }

    /// The receives to post before the peer can send.
    pub(crate) fn receives(region: &dyn MemoryRegion, receives: ReceivesOf) -> Vec<RecvWr> {
        (0..receives.own()).map(|index| Self::receive(region, index)).collect()
    }

    fn receive(region: &dyn MemoryRegion, index: usize) -> RecvWr {
        RecvWr {
            wr_id: WorkId::Receive(index).encode(),
            local: region.sge((MESSAGE * index) as u64, MAX_MESSAGE_BYTES),
        }
    }

    /// Whether its requests come by receives that other connections share.
    pub(crate) fn shares_receives(&self) -> bool {
        matches!(self.receives, ReceivesOf::Worker)
    }

    /// An accepted connection whose `receives` are posted.
    pub(crate) fn new(
        (entry, place): (Entry, Taken),
        rnic: RnicIndex,
        qp: Arc<dyn QueuePair>,
        region: Arc<dyn MemoryRegion>,
        receives: ReceivesOf,
    ) -> Self {
        Self {
            rnic,
            qp,
            posted: AtomicUsize::new(receives.own()),
            quiet: AtomicU32::new(0),
            region,
            receives,
            running: AtomicUsize::new(0),
            session: OnceLock::new(),
            replies: Arc::new(Semaphore::new(REPLIES)),
            is_sampled: AtomicBool::new(false),
            in_flight: Mutex::default(),
            entry,
            end: Event::new(),
            place,
        }
    }

    /// Number within the server, never reused.
    pub fn number(&self) -> u64 {
        self.entry.number()
    }

    /// Whoever is at the other end.
    pub fn peer(&self) -> &Arc<Peer> {
        self.place.peer()
    }

    /// The RNIC that it came by: keys and completion queues are that one's.
    pub fn rnic(&self) -> RnicIndex {
        self.rnic
    }

    /// The queue pair.
    pub fn qp(&self) -> &Arc<dyn QueuePair> {
        &self.qp
    }

    /// Ends it: what is posted is flushed, and its worker lets go of it.
    pub fn close(&self) {
        self.qp.close();
    }

    /// Whether its queue pair is broken.
    pub fn has_ended(&self) -> bool {
        self.qp.state() == QpState::Error
    }

    /// Whether its queue pair is broken and has completed all that was posted. Whoever waits for its end is told.
    pub fn is_over(&self) -> bool {
        if !self.has_ended() {
            return false;
        }
        self.end.notify(usize::MAX);
        self.posted.load(Ordering::Acquire) == 0
    }

    /// Resolves when its queue pair is broken: with the completion of what is posted, or with the next sweep if nothing is.
    pub async fn ended(&self) {
        let told = self.end.listen();
        if !self.has_ended() {
            told.await;
        }
    }

    /// Posts a signalled send work request. `false` if the connection is broken: it ends, and nothing was posted.
    pub fn post_send(&self, request: SendWr) -> bool {
        assert!(request.signaled, "its completion is waited for");
        self.post(|qp| qp.post_send(&[request]).is_ok())
    }

    fn post(&self, post: impl FnOnce(&dyn QueuePair) -> bool) -> bool {
        // Before it is posted: its completion may come first.
        self.posted.fetch_add(1, Ordering::AcqRel);
        let posted = post(&*self.qp);
        if !posted {
            self.completed();
            self.qp.close();
        }
        posted
    }

    /// The completion of something posted was polled.
    pub fn completed(&self) {
        let before = self.posted.fetch_sub(1, Ordering::AcqRel);
        assert!(before > 0, "a completion of nothing that was posted");
    }

    /// A second has passed: ends the connection if its peer has been waited for long enough. Why, if so.
    pub fn sweep(&self) -> Option<&'static str> {
        let quiet = self.quiet.fetch_add(1, Ordering::Relaxed);
        let is_idle = self.session().is_none_or(|session| session.is_ended());
        let mut untaken = false;
        for reply in self.in_flight.lock().iter_mut().flatten().filter(|reply| reply.posted) {
            reply.sweeps += 1;
            untaken |= reply.sweeps > REPLY_PATIENCE;
        }
        let reason = if untaken {
            "it does not take its replies"
        } else if is_idle && quiet >= ATTACH_PATIENCE {
            "it has no session and says nothing"
        } else {
            return None;
        };
        self.close();
        Some(reason)
    }

    /// Counters are going to be pulled over this connection; `false` if they are already.
    pub fn begin_sampling(&self) -> bool {
        !self.is_sampled.swap(true, Ordering::Relaxed)
    }

    /// The session it is attached to.
    pub fn session(&self) -> Option<&Arc<Session>> {
        self.session.get().map(|(session, _)| session)
    }

    /// What its requests may do, once it is attached.
    pub fn grant(&self) -> Option<&Grant> {
        self.session.get().map(|(_, grant)| grant)
    }

    /// Attaches it, once. `false` if it was attached to another session before.
    pub fn attach(&self, session: &Arc<Session>, grant: Grant) -> bool {
        let (attached, _) = self.session.get_or_init(|| {
            session.note_connection(true);
            (session.clone(), grant)
        });
        if !Arc::ptr_eq(attached, session) {
            return false;
        }
        self.qp.set_region_owner(session.number());
        true
    }

    /// A request came by a shared receive; `false`: it is one too many.
    pub(crate) fn begin(&self) -> bool {
        self.running.fetch_add(1, Ordering::Relaxed) < RECEIVES
    }

    /// A request's bytes, and in which receive of the connection's it lies. A receive is as long as the longest message, so none is longer.
    pub(crate) fn message(&self, arrived: Arrived) -> (Vec<u8>, Option<usize>) {
        self.quiet.store(0, Ordering::Relaxed);
        match arrived {
            Arrived::InPlace { index, len } => {
                let mut message = vec![0; len as usize];
                self.region.memory().read(MESSAGE * index, &mut message);
                (message, Some(index))
            }
            Arrived::Copied(message) => (message, None),
        }
    }

    /// A request was answered: another may come, in its receive where that is the connection's.
    pub(crate) fn answered(&self, receive: Option<usize>) {
        let Some(index) = receive else {
            self.running.fetch_sub(1, Ordering::Relaxed);
            return;
        };
        let receive = Self::receive(self.region.as_ref(), index);
        self.post(|qp| qp.post_recv(&[receive]).is_ok());
    }

    /// Sends a reply message. Waits while too many are in flight; a broken connection swallows it, because the
    /// client will ask again on its next one.
    pub async fn send(self: &Arc<Self>, message: &[u8]) {
        let permit = self.replies.acquire_arc().await;
        let buffer = self.reserve(permit);
        buffer.memory().write(buffer.offset(), message);
        buffer.post(0, message.len());
    }

    /// A reply buffer, if one is free now.
    pub fn try_reserve(self: &Arc<Self>) -> Option<ReplyBuffer> {
        Some(self.reserve(self.replies.try_acquire_arc()?))
    }

    fn reserve(self: &Arc<Self>, permit: SemaphoreGuardArc) -> ReplyBuffer {
        let mut in_flight = self.in_flight.lock();
        let index = in_flight.iter().position(Option::is_none).expect("a permit means a buffer");
        in_flight[index] = Some(InFlight { _permit: permit, posted: false, sweeps: 0 });
        drop(in_flight);
        ReplyBuffer { connection: self.clone(), index, posted: false }
    }

    /// A reply's send completed: its buffer is free.
    pub fn sent(&self, index: usize) {
        self.in_flight.lock()[index] = None;
    }
}

/// A reply buffer that is being filled; free again when it is dropped, or when its send has completed.
pub struct ReplyBuffer {
    connection: Arc<Connection>,
    index: usize,
    /// The send's completion frees it.
    posted: bool,
}

impl ReplyBuffer {
    /// The memory it lies in.
    pub fn memory(&self) -> &Arc<SharedMemory> {
        self.connection.region.memory()
    }

    /// Where in that memory it starts. It has room for the longest message.
    pub fn offset(&self) -> usize {
        MESSAGE * (self.connection.receives.own() + self.index)
    }

    /// Sends `[start, start + len)` of it. A broken connection swallows it.
    pub fn post(mut self, start: usize, len: usize) {
        assert!(start + len <= MESSAGE, "a reply longer than its buffer");
        let send = SendWr {
            wr_id: WorkId::Reply(self.index).encode(),
            op: SendOp::Send,
            local: self.connection.region.sge((self.offset() + start) as u64, len as u32),
            signaled: true,
        };
        if let Some(reply) = &mut self.connection.in_flight.lock()[self.index] {
            reply.posted = true;
        }
        // Before it is posted: its completion may come first.
        self.posted = true;
        self.posted = self.connection.post_send(send);
    }
}

impl Drop for ReplyBuffer {
    fn drop(&mut self) {
        if !self.posted {
            self.connection.sent(self.index);
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.qp.close();
        if let Some(session) = self.session() {
            session.note_connection(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_ids_round_trip() {
        for id in [WorkId::Receive(1), WorkId::Reply(3), WorkId::Transfer(123_456), WorkId::Shared(127)] {
            assert_eq!(WorkId::decode(id.encode()), id);
        }
    }
}
