//! The sender's connection: registered memory, the hello, and completions.

use super::kind::{Kind, Settings};
use super::sender::SenderError;
use super::wire::{ANSWER_HEADER_LEN, MESSAGE_LEN, Message};
use crate::ids::{ClientId, LogSeq, Rkey};
use crate::memory::SharedMemory;
use crate::persist::LogDeviceKind;
use crate::rdma::{
    Access, Completion, CompletionQueue, ConnectOptions, Device, Endpoint, MemoryRegion, QpConfig, QueuePair,
    RdmaError, RecvWr, SendOp, SendWr, WcStatus, WrId,
};
use crate::redo::LogId;
use crate::redo::ring::{CHECKPOINT_LEN, Checkpoint, Geometry};
use crate::world::Clock;
use std::sync::Arc;
use std::time::Duration;

/// Posted requests that may not be known to be persistent.
pub(super) const UNACKED_MAX: u64 = 256;
/// Requests that may be in the ring. The receiver posts more receives than that for their immediates.
pub(super) const IN_RING_MAX: u64 = 400;
/// Least time that a receiver has to welcome a sender.
const WELCOME_WAIT: Duration = Duration::from_secs(5);
/// Depth of the queues: room for requests, their FLUSHes, notices and answers.
const DEPTH: u32 = 1024;
/// `WrId` of the READ of the head; a FLUSH has its request's number.
pub(super) const HEAD_READ: u64 = u64::MAX;
/// Receives posted: more than answers and notices together.
const RECEIVES: usize = 900;

/// The contents of a welcome.
pub(super) struct Welcomed {
    pub(super) ring: Rkey,
    /// The ring's other key: see [`MemoryRegion::read_rkey`].
    pub(super) reading: Rkey,
    pub(super) kind: Kind,
    pub(super) log: LogId,
    pub(super) past: (LogId, LogSeq),
    pub(super) device: LogDeviceKind,
    /// Events that came right behind the welcome.
    pub(super) behind: Vec<Event>,
}

/// A connection and the memory registered for it.
pub(super) struct Link {
    pub(super) cq: Arc<dyn CompletionQueue>,
    pub(super) qp: Arc<dyn QueuePair>,
    /// Memory for messages; behind them is the head that was READ.
    incoming: Arc<dyn MemoryRegion>,
    completions: Vec<Completion>,
}

/// Memory of the sender that outlives its connections.
pub(super) struct Buffers {
    /// The mirror of the ring, with the same offsets.
    pub(super) mirror: Arc<SharedMemory>,
    pub(super) answers: Arc<SharedMemory>,
    pub(super) slot_len: usize,
}

impl Buffers {
    pub(super) fn new(settings: &Settings, geometry: Geometry) -> std::io::Result<Self> {
        let slot_len = (ANSWER_HEADER_LEN + settings.answer_max).next_multiple_of(64);
        Ok(Self {
            mirror: Arc::new(SharedMemory::new("durable-mirror", geometry.memory_len())?),
            answers: Arc::new(SharedMemory::new("durable-answers", slot_len * settings.answers)?),
            slot_len,
        })
    }
}

/// The registrations of mirror and answers.
pub(super) type Registered = [Arc<dyn MemoryRegion>; 2];

/// An event at the sender.
pub(super) enum Event {
    /// Everything up to this record is persistent.
    Persistent(LogSeq),
    /// A notice.
    Notice(Message),
    /// An answer is in this slot.
    Answer(u32),
    /// The head was READ: the newest valid checkpoint, if there is one.
    Head(Option<Box<Checkpoint>>),
}

/// The parameters of connecting.
pub(super) struct Dialling<'d> {
    pub(super) device: &'d dyn Device,
    pub(super) clock: &'d dyn Clock,
    pub(super) client: ClientId,
}

impl Link {
    /// Connects, says hello, and waits for the welcome. Returns the registrations of mirror and answers, too.
    pub(super) fn connect(
        Dialling { device, clock, client }: Dialling<'_>,
        endpoint: &Endpoint,
        settings: &Settings,
        geometry: Geometry,
        buffers: &Buffers,
    ) -> Result<(Self, Welcomed, Registered), SenderError> {
        let pd = device.alloc_pd()?;
        let cq = device.create_cq(DEPTH)?;
        let failed =
            |source| RdmaError::Io { action: "allocate memory for", endpoint: "a sender".into(), source };
        let len = RECEIVES * MESSAGE_LEN + 2 * CHECKPOINT_LEN;
        let incoming =
            pd.register(Arc::new(SharedMemory::new("durable-in", len).map_err(failed)?), Access::LOCAL)?;
        let mirror = pd.register(buffers.mirror.clone(), Access::LOCAL)?;
        let access = Access { remote_write: true, ..Access::LOCAL };
        let answers = pd.register(buffers.answers.clone(), access)?;
        let receives = (0..RECEIVES).map(|index| receive(&*incoming, index)).collect();
        let qp = QpConfig::new(&cq, DEPTH, DEPTH);
        let options = ConnectOptions { qp, receives, timeout: settings.patience.max(WELCOME_WAIT) };
        let connected = pd.connect(endpoint, options)?;
        let mut link = Self { cq, qp: connected.qp, incoming, completions: Vec::new() };
        let capabilities = device.capabilities();
        let asked = settings.kind.over(&capabilities, capabilities.flush);
        let hello = Message::Hello {
            client,
            capacity: geometry.capacity(),
            stride: geometry.stride(),
            answers: answers.rkey(),
            slots: settings.answers as u32,
            slot_len: buffers.slot_len as u32,
            kind: asked,
        };
        // No record lies in the mirror's first page, so a message fits there.
        buffers.mirror.write(0, &hello.encode());
        let local = mirror.sge(0, MESSAGE_LEN as u32);
        link.post(&[SendWr { wr_id: WrId(0), op: SendOp::Send, local: local.into(), signaled: false }])?;
        // The receiver may have to make and sync a ring.
        let deadline = clock.monotonic() + settings.patience.max(WELCOME_WAIT);
        let mut events = Vec::new();
        loop {
            // A refusal and the end of the connection may come together.
            let progress = link.progress(Duration::from_millis(20), &mut events);
            let first = (!events.is_empty()).then(|| events.remove(0));
            match first {
                Some(Event::Notice(Message::Welcome { ring, reading, kind, log, past, device })) => {
                    if kind != asked && kind != asked.by_receiver() {
                        return Err(SenderError::Protocol("another kind of RPC than was asked for"));
                    }
                    let welcomed = Welcomed { ring, reading, kind, log, past, device, behind: events };
                    return Ok((link, welcomed, [mirror, answers]));
                }
                Some(Event::Notice(Message::Refused)) => return Err(SenderError::Refused),
                Some(_) => return Err(SenderError::Protocol("the answer to a hello is none")),
                None => progress?,
            }
            if clock.monotonic() > deadline {
                return Err(SenderError::NoWelcome);
            }
        }
    }

    pub(super) fn post(&self, requests: &[SendWr]) -> Result<(), SenderError> {
        self.qp.post_send(requests).map_err(|_| SenderError::Disconnected)
    }

    /// READs the ring's two checkpoints.
    pub(super) fn read_head(&self, reading: Rkey) -> Result<(), SenderError> {
        let offset = crate::redo::ring::CHECKPOINTS_AT as u64;
        let op = SendOp::Read(crate::rdma::Remote::Memory { rkey: reading, offset });
        let local = self.incoming.sge((RECEIVES * MESSAGE_LEN) as u64, 2 * CHECKPOINT_LEN as u32);
        self.post(&[SendWr { wr_id: WrId(HEAD_READ), op, local: local.into(), signaled: true }])
    }

    /// Takes completions; waits for the first at most `wait`.
    pub(super) fn progress(&mut self, wait: Duration, events: &mut Vec<Event>) -> Result<(), SenderError> {
        if self.cq.poll(&mut self.completions, 64) == 0 && !wait.is_zero() {
            self.cq.wait(wait);
            self.cq.poll(&mut self.completions, 64);
        }
        for completion in std::mem::take(&mut self.completions) {
            if completion.status != WcStatus::Success {
                return Err(match completion.status {
                    WcStatus::RemoteOperation => SenderError::Device,
                    _ => SenderError::Disconnected,
                });
            }
            use crate::rdma::CompletionKind as Of;
            match completion.kind {
                Of::Flush => events.push(Event::Persistent(LogSeq(completion.wr_id.0))),
                Of::Read => {
                    let mut bytes = [0; 2 * CHECKPOINT_LEN];
                    self.incoming.memory().read(RECEIVES * MESSAGE_LEN, &mut bytes);
                    events.push(Event::Head(Checkpoint::latest(&bytes).map(Box::new)));
                }
                Of::Recv | Of::RecvWithImm => {
                    let index = completion.wr_id.0 as usize;
                    if let Some(slot) = completion.imm {
                        events.push(Event::Answer(slot));
                    } else {
                        let mut bytes = [0; MESSAGE_LEN];
                        self.incoming.memory().read(index * MESSAGE_LEN, &mut bytes);
                        let message = Message::parse(&bytes)
                            .map_err(|_| SenderError::Protocol("a message does not parse"))?;
                        events.push(Event::Notice(message));
                    }
                    self.qp
                        .post_recv(&[receive(&*self.incoming, index)])
                        .map_err(|_| SenderError::Disconnected)?;
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn receive(incoming: &dyn MemoryRegion, index: usize) -> RecvWr {
    let local = incoming.sge((index * MESSAGE_LEN) as u64, MESSAGE_LEN as u32);
    RecvWr { wr_id: WrId(index as u64), local: local.into() }
}
