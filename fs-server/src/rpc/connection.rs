//! One connection: its queue pair and the registered memory its messages travel through.
//!
//! ```text
//! connection memory:  [ 2 receives of 64 KiB | 4 replies of 64 KiB ]     (touched pages only are real)
//! ```
//!
//! A receive is posted again only when its request was answered, so a client cannot have more than `RECEIVES` requests running on one connection. If
//! its peer has shared receives (`shared_receives`), the connection has none of its own, and a client that sends more is cut off. Any worker may
//! answer on any connection: a retransmitted request is answered on the connection where it came in last.
//!
//! # Lifetime
//! A connection is owned by its worker (`worker.rs`) and by its running requests. Every posted work request is counted until its completion was
//! polled: a queue pair that goes into `Error` completes all of them. A connection *is over* when its queue pair is in `Error` and nothing is posted.
//! Then its worker drops it, whatever ended it, and the last running request does, too (a request that only waits ends with it: `ended`). With the
//! connection go its entry among the connections, its session's count, its registered memory and its place in the peer's share.
//!
//! # Patience
//! No wait for a peer is endless. The worker's sweep counts seconds, and the connection ends when
//! * a reply was not taken for `REPLY_PATIENCE`: its client is stopped or gone, and a mount that still runs reconnects;
//! * it carries no live session and no message came for `ATTACH_PATIENCE`: a mount attaches at once, `status` asks at once.

use super::connections::Entry;
use super::shared_receives::SharedReceives;
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
/// Receives of one connection, and so the requests of it that run at once.
pub(crate) const RECEIVES: usize = 2;
/// Replies being sent: more than receives, because a send may complete after the client's next request.
const REPLIES: usize = 4;
/// Sweeps (one a second) for which a reply may wait until the peer takes it: as long as a client waits for a reply.
pub(crate) const REPLY_PATIENCE: u32 = 30;
/// Sweeps for which a connection may exist without a session or a message.
pub(crate) const ATTACH_PATIENCE: u32 = 10;

/// The meaning of a work request's id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WorkId {
    /// Receive buffer of this index.
    Receive(usize),
    /// Reply buffer of this index.
    Reply(usize),
    /// One-sided transfer of a request, by its token.
    Transfer(usize),
    /// A shared receive buffer, by the number of its queue and its index there.
    Shared {
        /// Which of the worker's shared receives.
        queue: u32,
        /// Which of those.
        index: usize,
    },
}

/// The receives into which a connection's requests come.
pub(crate) enum ReceivesOf {
    /// Buffers of its own.
    Connection,
    /// The shared receives of its peer at its worker.
    Peer(Arc<SharedReceives>),
}

impl ReceivesOf {
    /// The number of the connection's own receives.
    const fn own(&self) -> usize {
        match self {
            Self::Connection => RECEIVES,
            Self::Peer(_) => 0,
        }
    }
}

/// A request that arrived.
pub(crate) enum Arrived {
    /// In a receive of the connection, where it stays until it is read.
    InPlace {
        /// The receive's index.
        index: usize,
        /// The message's length in bytes.
        len: u32,
    },
    /// In a shared receive, which has been copied and posted again.
    Copied(Vec<u8>),
}

impl WorkId {
    const KIND_SHIFT: u32 = 56;
    /// Of a shared receive: the index is below, the queue's number above.
    const QUEUE_SHIFT: u32 = 16;

    /// The id as the verbs API carries it.
    pub(crate) fn encode(self) -> WrId {
        let (kind, value) = match self {
            WorkId::Receive(index) => (0u64, index),
            WorkId::Reply(index) => (1, index),
            WorkId::Transfer(token) => (2, token),
            WorkId::Shared { queue, index } => (3, (queue as usize) << Self::QUEUE_SHIFT | index),
        };
        WrId(kind << Self::KIND_SHIFT | value as u64)
    }

    /// The meaning of a completion's id. Only ids that this server posted come back; any other id means a broken provider, and panics.
    pub(crate) fn decode(id: WrId) -> Self {
        let value = (id.0 & ((1 << Self::KIND_SHIFT) - 1)) as usize;
        match id.0 >> Self::KIND_SHIFT {
            0 => WorkId::Receive(value),
            1 => WorkId::Reply(value),
            2 => WorkId::Transfer(value),
            3 => WorkId::Shared {
                queue: (value >> Self::QUEUE_SHIFT) as u32,
                index: value & ((1 << Self::QUEUE_SHIFT) - 1),
            },
            kind => unreachable!("work request id of kind {kind}"),
        }
    }
}

/// A reply buffer that is not free.
struct InFlight {
    /// Gives the buffer back when dropped.
    _permit: SemaphoreGuardArc,
    /// Whether the send was posted, and the sweeps since then.
    posted: bool,
    sweeps: u32,
}

/// A connected client queue pair.
pub struct Connection {
    rnic: RnicIndex,
    qp: Arc<dyn QueuePair>,
    /// Posted work requests whose completions were not polled yet. Increased by the poster before it posts, decreased by the worker, which also reads
    /// it after each of its own changes and at each sweep. Acquire and release: a reader of 0 sees all effects of these requests.
    posted: AtomicUsize,
    /// Sweeps since the last message. Relaxed: a second more or less does not matter.
    quiet: AtomicU32,
    region: Arc<dyn MemoryRegion>,
    /// Dropped after its queue pair, which takes them.
    receives: ReceivesOf,
    /// Requests that came by shared receives and are not answered yet. Only its worker changes it; relaxed.
    running: AtomicUsize,
    session: OnceLock<(Arc<Session>, Grant)>,
    replies: Arc<Semaphore>,
    /// Whether its client's counters are pulled over this connection.
    is_sampled: AtomicBool,
    /// The reply buffers that are in flight.
    in_flight: Mutex<[Option<InFlight>; REPLIES]>,
    entry: Entry,
    /// Notified when the connection has ended.
    end: Event,
    /// Dropped last: when this place is free, all else of the connection is freed.
    place: Taken,
}

impl Connection {
    /// Registers memory for a connection that is about to be accepted.
    ///
    /// # Errors
    /// `RdmaError` if there is no memory.
    pub(crate) fn register(
        pd: &dyn ProtectionDomain,
        receives: &ReceivesOf,
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
    pub(crate) fn receives(region: &dyn MemoryRegion, receives: &ReceivesOf) -> Vec<RecvWr> {
        (0..receives.own()).map(|index| Self::receive(region, index)).collect()
    }

    fn receive(region: &dyn MemoryRegion, index: usize) -> RecvWr {
        RecvWr {
            wr_id: WorkId::Receive(index).encode(),
            local: region.sge((MESSAGE * index) as u64, MAX_MESSAGE_BYTES).into(),
        }
    }

    /// Whether its requests come in by its peer's shared receives.
    pub(crate) fn shares_receives(&self) -> bool {
        matches!(self.receives, ReceivesOf::Peer(_))
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

    /// The peer at the other end.
    pub fn peer(&self) -> &Arc<Peer> {
        self.place.peer()
    }

    /// The RNIC by which it came: its keys and completion queues are that RNIC's.
    pub fn rnic(&self) -> RnicIndex {
        self.rnic
    }

    /// The queue pair.
    pub fn qp(&self) -> &Arc<dyn QueuePair> {
        &self.qp
    }

    /// Ends it: the posted work requests are flushed, and its worker drops it.
    pub fn close(&self) {
        self.qp.close();
    }

    /// Whether its queue pair is in `Error`.
    pub fn has_ended(&self) -> bool {
        self.qp.state() == QpState::Error
    }

    /// Whether its queue pair is in `Error` and all work requests have completed. Also wakes the tasks that wait for its end.
    pub fn is_over(&self) -> bool {
        if !self.has_ended() {
            return false;
        }
        self.end.notify(usize::MAX);
        self.posted.load(Ordering::Acquire) == 0
    }

    /// Resolves when its queue pair is in `Error`: at the next completion of a work request, or at the next sweep if nothing is posted.
    pub async fn ended(&self) {
        let told = self.end.listen();
        if !self.has_ended() {
            told.await;
        }
    }

    /// Posts a signalled send work request. `false` if the queue pair is broken: nothing was posted, and the connection ends.
    pub fn post_send(&self, request: SendWr) -> bool {
        assert!(request.signaled, "its completion is waited for");
        self.post(|qp| qp.post_send(&[request]).is_ok())
    }

    fn post(&self, post: impl FnOnce(&dyn QueuePair) -> bool) -> bool {
        // Counted before it is posted, because its completion may come before this function returns.
        self.posted.fetch_add(1, Ordering::AcqRel);
        let posted = post(&*self.qp);
        if !posted {
            self.completed();
            self.qp.close();
        }
        posted
    }

    /// Notes that the completion of a posted work request was polled.
    pub fn completed(&self) {
        let before = self.posted.fetch_sub(1, Ordering::AcqRel);
        assert!(before > 0, "a completion of nothing that was posted");
    }

    /// Called each second: ends the connection if its peer has kept it waiting for too long, and returns the reason then.
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

    /// Notes that counters are pulled over this connection from now on; `false` if they already are.
    pub fn begin_sampling(&self) -> bool {
        !self.is_sampled.swap(true, Ordering::Relaxed)
    }

    /// The session to which it is attached.
    pub fn session(&self) -> Option<&Arc<Session>> {
        self.session.get().map(|(session, _)| session)
    }

    /// The rights of its requests, once it is attached.
    pub fn grant(&self) -> Option<&Grant> {
        self.session.get().map(|(_, grant)| grant)
    }

    /// Attaches it to a session, once. `false` if it is attached to another session.
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

    /// Notes a request that came by a shared receive. `false`: the client has sent one too many.
    pub(crate) fn begin(&self) -> bool {
        self.running.fetch_add(1, Ordering::Relaxed) < RECEIVES
    }

    /// A request's bytes, and the index of the connection's receive in which it came, if it is one. A receive has room for the longest message.
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

    /// Notes that a request was answered: another one may come. Posts its receive again, if that is the connection's.
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

    /// Notes that a reply's send has completed: its buffer is free.
    pub fn sent(&self, index: usize) {
        self.in_flight.lock()[index] = None;
    }
}

/// A reply buffer that is being filled. It is free again when this is dropped without a send, or when its send has completed.
pub struct ReplyBuffer {
    connection: Arc<Connection>,
    index: usize,
    /// Whether the send was posted, whose completion frees the buffer.
    posted: bool,
}

impl ReplyBuffer {
    /// The memory in which it lies.
    pub fn memory(&self) -> &Arc<SharedMemory> {
        self.connection.region.memory()
    }

    /// Where in that memory it begins. It has room for the longest message.
    pub fn offset(&self) -> usize {
        MESSAGE * (self.connection.receives.own() + self.index)
    }

    /// Sends `[start, start + len)` of the buffer. A broken connection drops it.
    pub fn post(mut self, start: usize, len: usize) {
        assert!(start + len <= MESSAGE, "a reply longer than its buffer");
        let send = SendWr {
            wr_id: WorkId::Reply(self.index).encode(),
            op: SendOp::Send,
            local: self.connection.region.sge((self.offset() + start) as u64, len as u32).into(),
            signaled: true,
        };
        if let Some(reply) = &mut self.connection.in_flight.lock()[self.index] {
            reply.posted = true;
        }
        // Set before it is posted: the completion may come before this function returns.
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
        for id in [
            WorkId::Receive(1),
            WorkId::Reply(3),
            WorkId::Transfer(123_456),
            WorkId::Shared { queue: u32::MAX, index: 63 },
        ] {
            assert_eq!(WorkId::decode(id.encode()), id);
        }
    }
}
