//! What the owner of a region does for its peers (NP-RDMA section 3.2).
//!
//! # How it works
//! The region is registered twice: as memory whose pages come and go, for READs and WRITEs, and its table of entries, for READs only. A peer says hello
//! and is told of both. From then on it asks for what it could not do itself: *serve* answers. Up to 1 KiB travels in the messages; longer pieces go
//! through a bounce buffer, by a WRITE to the peer's buffer before the answer, or a READ from it before the store.
//!
//! A slot of a connection is one receive buffer and one buffer for the answer, and carries one request at a time:
//!
//! | slot | a message comes | the peer's bytes are in the bounce buffer | the answer is sent |
//! |------|-----------------|-------------------------------------------|--------------------|
//! | free | served, or its READ posted | - | - |
//! | pulling | - | stored, answered | - |
//! | answering | - | - | the receive is posted again: free |
//!
//! # Bounds
//! `RPC_DEPTH` requests a connection, `CONNECTIONS_MAX` connections, `BOUNCES` bounce buffers. Who gets none waits in its slot.
//!
//! # Failure
//! A message that is none ends its connection, with a line in the log; nobody else notices. A request that cannot be served is answered with a status.

use super::region::{NpRegion, RegionError};
use super::wire::{BUFFER_LEN, Message, PIECE_MAX, RPC_DEPTH, Reply, Request, RequestOp, Status, Welcome};
use crate::breach::Breach;
use crate::ids::{QpNumber, Rkey};
use crate::memory::SharedMemory;
use crate::memory::paged::ENTRIES_AT;
use crate::rdma::{
    Access, Completion, CompletionKind, CompletionQueue, Device, Incoming, MemoryRegion, PagedAccess,
    ProtectionDomain, QpConfig, QueuePair, RdmaError, RecvWr, Remote, RemoteRange, SendOp, SendWr, WcStatus,
    WrId,
};
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Peers at once. Further ones are refused.
const CONNECTIONS_MAX: usize = 64;
/// Buffers of `PIECE_MAX` bytes for long pieces.
const BOUNCES: usize = 32;
/// Completions taken at once.
const COMPLETIONS: usize = 64;

/// What happened at a target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TargetFigures {
    /// Requests that were served by the processor.
    pub requests: u64,
    /// Peers whose connection was ended because of what they sent.
    pub breaches: u64,
    /// Peers now.
    pub connections: u64,
}

/// What a slot has in hand.
#[derive(Default)]
enum Slot {
    #[default]
    Free,
    Pulling(Request, usize),
    /// The bounce buffer that the answer's WRITE reads.
    Answering(Option<usize>),
}

struct Connection {
    qp: Arc<dyn QueuePair>,
    buffers: Arc<dyn MemoryRegion>,
    greeted: AtomicBool,
    /// `None`: the connection has ended.
    slots: Mutex<Option<Vec<Slot>>>,
}

impl Connection {
    fn receive(&self, slot: usize) -> RecvWr {
        RecvWr {
            wr_id: WrId(slot as u64),
            local: self.buffers.sge((slot * BUFFER_LEN) as u64, BUFFER_LEN as u32).into(),
        }
    }

    /// Puts a state into a slot; `false`: the connection has ended.
    fn set(&self, slot: usize, state: Slot) -> bool {
        let mut slots = self.slots.lock();
        let Some(slots) = slots.as_mut() else { return false };
        slots[slot] = state;
        true
    }

    fn take(&self, slot: usize) -> Slot {
        self.slots
            .lock()
            .as_mut()
            .and_then(|slots| slots.get_mut(slot))
            .map(std::mem::take)
            .unwrap_or_default()
    }
}

/// Something to do for a peer.
pub(super) struct Job {
    connection: Arc<Connection>,
    slot: usize,
    work: Work,
}

enum Work {
    Serve(Request),
    /// The bytes of a WRITE are in this bounce buffer.
    Store(Request, usize),
}

/// The owner's side of all connections of one device. See the module.
pub struct NpTarget {
    region: Arc<NpRegion>,
    domain: Arc<dyn ProtectionDomain>,
    completions: Arc<dyn CompletionQueue>,
    welcome: Welcome,
    /// The region and the entries of its pages, if the device looks pages up.
    _registered: Option<[Arc<dyn MemoryRegion>; 2]>,
    bounces: Arc<dyn MemoryRegion>,
    free_bounces: Mutex<Vec<usize>>,
    /// Jobs that wait for a bounce buffer.
    waiting: Mutex<VecDeque<Job>>,
    connections: Mutex<HashMap<QpNumber, Arc<Connection>>>,
    requests: AtomicU64,
    breaches: AtomicU64,
}

fn io(action: &'static str) -> impl Fn(std::io::Error) -> RdmaError {
    move |source| RdmaError::Io { action, endpoint: "a memory region".into(), source }
}

impl NpTarget {
    /// Bytes of message buffers for each peer.
    pub const CONNECTION_BYTES: u64 = (2 * RPC_DEPTH * BUFFER_LEN) as u64;
    /// Bytes of all bounce buffers.
    pub const BOUNCE_BYTES: u64 = BOUNCES as u64 * PIECE_MAX as u64;

    /// Registers a region with a device. Peers connect to listeners of [`Self::domain`]. Where the device cannot look pages up, peers are told to ask for
    /// each access.
    ///
    /// # Errors
    /// `RdmaError` if the device has no room.
    pub fn new(
        device: &Arc<dyn Device>,
        region: Arc<NpRegion>,
        access: PagedAccess,
    ) -> Result<Arc<Self>, RdmaError> {
        let domain = device.alloc_pd()?;
        let registered = if device.capabilities().paged_memory {
            let window = domain.register_paged(region.memory().clone(), access)?;
            let table = region.memory().translated().table().clone();
            Some([window, domain.register(table, Access { remote_read: true, ..Access::NONE })?])
        } else {
            None
        };
        let bounces = SharedMemory::new("cuttlefs-np-bounce", BOUNCES * PIECE_MAX as usize)
            .map_err(io("make bounce buffers for"))?;
        let bounces = domain.register(Arc::new(bounces), Access::LOCAL)?;
        let completions = device.create_cq(device.capabilities().max_queue_depth)?;
        let (len, signature) = (region.len(), region.signature());
        let mut welcome = Welcome {
            region: RemoteRange { rkey: Rkey(0), first_address: 0, len },
            table_rkey: 0,
            table_address: 0,
            access,
            one_sided: registered.is_some(),
            signature,
        };
        if let Some([window, table]) = &registered {
            welcome.region.rkey = window.rkey();
            welcome.region.first_address = window.first_address();
            welcome.table_rkey = table.rkey().0;
            welcome.table_address = table.first_address() + ENTRIES_AT as u64;
        }
        Ok(Arc::new(Self {
            region,
            domain,
            completions,
            welcome,
            _registered: registered,
            bounces,
            free_bounces: Mutex::new((0..BOUNCES).collect()),
            waiting: Mutex::default(),
            connections: Mutex::default(),
            requests: AtomicU64::new(0),
            breaches: AtomicU64::new(0),
        }))
    }

    /// The domain whose listeners this target serves.
    pub fn domain(&self) -> &Arc<dyn ProtectionDomain> {
        &self.domain
    }

    /// What happened so far.
    pub fn figures(&self) -> TargetFigures {
        TargetFigures {
            requests: self.requests.load(Ordering::Relaxed),
            breaches: self.breaches.load(Ordering::Relaxed),
            connections: self.connections.lock().len() as u64,
        }
    }

    /// Accepts a peer. One beyond `CONNECTIONS_MAX` is refused.
    ///
    /// # Errors
    /// `RdmaError`: the peer went away, which affects nobody else.
    pub fn accept(&self, incoming: Box<dyn Incoming>) -> Result<(), RdmaError> {
        if self.connections.lock().len() >= CONNECTIONS_MAX {
            incoming.refuse("the region has as many peers as it serves; try again when one has left");
            return Ok(());
        }
        let buffers = SharedMemory::new("cuttlefs-np-messages", 2 * RPC_DEPTH * BUFFER_LEN)
            .map_err(io("make buffers for a peer of"))?;
        let buffers = self.domain.register(Arc::new(buffers), Access::LOCAL)?;
        // A request has one answer, and a WRITE or a READ before it.
        let depth = 2 * RPC_DEPTH as u32 + 2;
        let config = QpConfig::new(&self.completions, depth, RPC_DEPTH as u32);
        let qp = incoming.accept(config, Vec::new())?;
        let slots = (0..RPC_DEPTH).map(|_| Slot::Free).collect();
        let connection = Arc::new(Connection {
            qp: qp.clone(),
            buffers,
            greeted: AtomicBool::new(false),
            slots: Mutex::new(Some(slots)),
        });
        self.connections.lock().insert(qp.number(), connection.clone());
        // Only now, so that each completion finds its connection.
        let receives: Vec<RecvWr> = (0..RPC_DEPTH).map(|slot| connection.receive(slot)).collect();
        if qp.post_recv(&receives).is_err() {
            self.end(&connection, None);
        }
        Ok(())
    }

    /// Waits until there may be something to do.
    pub(super) fn wait(&self, timeout: Duration) {
        self.completions.wait(timeout);
    }

    /// Does what there is to do, in this thread. Returns whether there was anything.
    pub fn step(&self) -> bool {
        self.step_with(&|job| self.perform(job))
    }

    /// As [`Self::step`], and gives jobs away.
    pub(super) fn step_with(&self, give: &dyn Fn(Job)) -> bool {
        let mut completions = Vec::new();
        if self.completions.poll(&mut completions, COMPLETIONS) == 0 {
            return false;
        }
        for completion in completions {
            let connection = self.connections.lock().get(&completion.qp).cloned();
            // What a connection that has ended still had under way is of no interest.
            if let Some(connection) = connection {
                self.on_completion(&connection, &completion, give);
            }
        }
        true
    }

    fn on_completion(&self, connection: &Arc<Connection>, completion: &Completion, give: &dyn Fn(Job)) {
        let slot = completion.wr_id.0 as usize;
        if completion.status != WcStatus::Success || slot >= RPC_DEPTH {
            return self.end(connection, None);
        }
        match completion.kind {
            CompletionKind::Recv => {
                let len = (completion.byte_len as usize).min(BUFFER_LEN);
                let mut bytes = vec![0; len];
                connection.buffers.memory().read(slot * BUFFER_LEN, &mut bytes);
                let greeted = connection.greeted.load(Ordering::Acquire);
                match Message::parse(&bytes) {
                    Ok(Message::Hello) if !greeted => {
                        connection.greeted.store(true, Ordering::Release);
                        self.answer(connection, slot, &Message::Welcome(self.welcome), None, None);
                    }
                    Ok(Message::Request(request)) if greeted => {
                        give(Job { connection: connection.clone(), slot, work: Work::Serve(request) });
                    }
                    Ok(_) => self.end(connection, Some(&Breach::of("a message that is not due came"))),
                    Err(error) => self.end(connection, Some(&Breach::new(format_args!("{error}")))),
                }
            }
            CompletionKind::Read => {
                if let Slot::Pulling(request, bounce) = connection.take(slot) {
                    give(Job { connection: connection.clone(), slot, work: Work::Store(request, bounce) });
                }
            }
            CompletionKind::Send => {
                if let Slot::Answering(Some(bounce)) = connection.take(slot)
                    && let Some(job) = self.give_back(bounce)
                {
                    give(job);
                }
                if connection.qp.post_recv(&[connection.receive(slot)]).is_err() {
                    self.end(connection, None);
                }
            }
            _ => {}
        }
    }

    /// Whether a job needs no device, and is done where it came up.
    pub(super) fn is_quick(&self, job: &Job) -> bool {
        let (Work::Serve(request) | Work::Store(request, _)) = &job.work;
        self.region.is_quick(request.offset, request.op.len())
    }

    /// Does a job, and those that waited for its bounce buffer.
    pub(super) fn perform(&self, job: Job) {
        let mut next = Some(job);
        while let Some(Job { connection, slot, work }) = next {
            next = match work {
                Work::Serve(request) => self.serve(&connection, slot, request),
                Work::Store(request, bounce) => {
                    let len = request.op.len() as usize;
                    let from = bounce * PIECE_MAX as usize;
                    let stored = self.region.copy_in(request.offset, self.bounces.memory(), from, len);
                    self.reply(&connection, slot, request.tag, stored.map(|()| (0, Vec::new())), None);
                    self.give_back(bounce)
                }
            };
        }
    }

    fn serve(&self, connection: &Arc<Connection>, slot: usize, request: Request) -> Option<Job> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let Request { tag, offset, ref op } = request;
        let refused = if op.changes() && self.welcome.access == PagedAccess::Read {
            Some(Status::Rights)
        } else {
            self.region.check(offset, op.len()).is_err().then_some(Status::Range)
        };
        if let Some(status) = refused {
            let reply = Reply { tag, status, old: 0, bytes: Vec::new() };
            self.answer(connection, slot, &Message::Reply(reply), None, None);
            return None;
        }
        match *op {
            RequestOp::ReadInline(len) => {
                let mut bytes = vec![0; len as usize];
                let read = self.region.read(offset, &mut bytes);
                self.reply(connection, slot, tag, read.map(|()| (0, bytes)), None);
            }
            RequestOp::WriteInline(ref bytes) => {
                let written = self.region.write(offset, bytes);
                self.reply(connection, slot, tag, written.map(|()| (0, Vec::new())), None);
            }
            RequestOp::CompareSwap { expect, swap } => {
                let old = self.region.compare_swap(offset, expect, swap);
                self.reply(connection, slot, tag, old.map(|old| (old, Vec::new())), None);
            }
            RequestOp::FetchAdd(add) => {
                let old = self.region.fetch_add(offset, add);
                self.reply(connection, slot, tag, old.map(|old| (old, Vec::new())), None);
            }
            RequestOp::Read { len, rkey, address } => {
                let Some(bounce) = self.take_bounce() else {
                    return self.postpone(connection, slot, request);
                };
                let at = bounce * PIECE_MAX as usize;
                let read = self.region.copy_out(offset, self.bounces.memory(), at, len as usize);
                if read.is_err() {
                    self.reply(connection, slot, tag, read.map(|()| (0, Vec::new())), None);
                    return self.give_back(bounce);
                }
                let push = SendWr {
                    wr_id: WrId(slot as u64),
                    op: SendOp::Write(Remote::Memory { rkey: Rkey(rkey), offset: address }),
                    local: self.bounces.sge(at as u64, len).into(),
                    signaled: false,
                };
                self.reply(connection, slot, tag, Ok((0, Vec::new())), Some((push, bounce)));
            }
            RequestOp::Write { len, rkey, address } => {
                let Some(bounce) = self.take_bounce() else {
                    return self.postpone(connection, slot, request);
                };
                let pull = SendWr {
                    wr_id: WrId(slot as u64),
                    op: SendOp::Read(Remote::Memory { rkey: Rkey(rkey), offset: address }),
                    local: self.bounces.sge((bounce * PIECE_MAX as usize) as u64, len).into(),
                    signaled: true,
                };
                if !connection.set(slot, Slot::Pulling(request, bounce)) {
                    return self.give_back(bounce);
                }
                if connection.qp.post_send(&[pull]).is_err() {
                    self.end(connection, None);
                }
            }
        }
        None
    }

    fn reply(
        &self,
        connection: &Arc<Connection>,
        slot: usize,
        tag: u32,
        result: Result<(u64, Vec<u8>), RegionError>,
        push: Option<(SendWr, usize)>,
    ) {
        let (status, (old, bytes)) = match result {
            Ok(found) => (Status::Done, found),
            Err(error) => {
                let status = match error {
                    RegionError::Range { .. } => Status::Range,
                    RegionError::Device { .. } => Status::Device,
                    RegionError::NoFrame => Status::NoFrame,
                };
                if status != Status::Range {
                    tracing::error!(%error, "a peer's access failed");
                }
                (status, (0, Vec::new()))
            }
        };
        let (push, bounce) = push.unzip();
        self.answer(connection, slot, &Message::Reply(Reply { tag, status, old, bytes }), push, bounce);
    }

    /// Sends the slot's answer, behind a WRITE from a bounce buffer if there is one.
    fn answer(
        &self,
        connection: &Arc<Connection>,
        slot: usize,
        message: &Message,
        push: Option<SendWr>,
        bounce: Option<usize>,
    ) {
        let bytes = message.encode();
        let at = (RPC_DEPTH + slot) * BUFFER_LEN;
        connection.buffers.memory().write(at, &bytes);
        let send = SendWr {
            wr_id: WrId(slot as u64),
            op: SendOp::Send,
            local: connection.buffers.sge(at as u64, bytes.len() as u32).into(),
            signaled: true,
        };
        if !connection.set(slot, Slot::Answering(bounce)) {
            if let Some(job) = bounce.and_then(|bounce| self.give_back(bounce)) {
                self.perform(job);
            }
            return;
        }
        let posted = match push {
            Some(push) => connection.qp.post_send(&[push, send]),
            None => connection.qp.post_send(&[send]),
        };
        if posted.is_err() {
            self.end(connection, None);
        }
    }

    fn take_bounce(&self) -> Option<usize> {
        self.free_bounces.lock().pop()
    }

    /// Keeps a job until a bounce buffer is free. Returns it if one has become free meanwhile.
    fn postpone(&self, connection: &Arc<Connection>, slot: usize, request: Request) -> Option<Job> {
        let job = Job { connection: connection.clone(), slot, work: Work::Serve(request) };
        let free = self.free_bounces.lock();
        if free.is_empty() {
            self.waiting.lock().push_back(job);
            return None;
        }
        Some(job)
    }

    /// Gives a bounce buffer back, and returns the job that waited longest for one.
    fn give_back(&self, bounce: usize) -> Option<Job> {
        let mut free = self.free_bounces.lock();
        free.push(bounce);
        self.waiting.lock().pop_front()
    }

    /// Ends a connection; the bounce buffers that it had are free again.
    fn end(&self, connection: &Arc<Connection>, breach: Option<&Breach>) {
        let Some(slots) = connection.slots.lock().take() else { return };
        if let Some(breach) = breach {
            self.breaches.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(peer = %connection.qp.peer(), "a peer of a memory region was cut off: {breach}");
        }
        connection.qp.close();
        self.connections.lock().remove(&connection.qp.number());
        for slot in slots {
            if let Slot::Pulling(_, bounce) | Slot::Answering(Some(bounce)) = slot
                && let Some(job) = self.give_back(bounce)
            {
                self.perform(job);
            }
        }
    }

    /// Ends all connections.
    pub fn close(&self) {
        let connections: Vec<_> = self.connections.lock().values().cloned().collect();
        connections.iter().for_each(|connection| self.end(connection, None));
    }
}
