//! The chains of a client by the node's processor, where no RNIC executes them: over RDMA hardware, and over shared memory.
//!
//! # How it works
//! The client's messages come to receives. The service thread executes the same checked work queue with them that an RNIC would be armed with, and sends what the
//! chain tells the client. So client, messages, tables, budgets and counters are the same. What is lost is what ODRP is for: the node's processor is
//! asked for each page.
//!
//! # Invariants
//! * A message stays in its receive until its chain has begun: one that waits for the gate, the doorbell or the budget is not copied. There are as many
//!   receives as an honest client has messages outstanding; others wait at the client's end.
//! * A chain begins only if a place is free for what it tells. One that tells more, by a message with wrong indices, ends at the last free place.
//!
//! # Failure
//! A fault ends the queue, as on an RNIC. What chains before it told is posted first.

use super::super::chains::{Kind, PLACES, shape};
use super::super::pages::PAGE_LEN;
use super::Shared;
use super::client::Refusal;
use crate::ids::Rkey;
use crate::memory::SharedMemory;
use crate::rdma::chain::{Chain, ChainPeer, Fault, PeerGone, WorkQueue};
use crate::rdma::{Access, MemoryRegion, QueuePair, RecvWr, Remote, SendOp, SendWr, Sge, WrId};
use std::collections::VecDeque;
use std::sync::Arc;

/// Messages that a queue has receives for, and places for what its chains tell: those that a client may have outstanding.
pub(super) const WINDOW: u32 = PLACES / 2;
/// Messages and what is told have these names, and their places behind.
const MESSAGE: u64 = 1 << 32;
const TOLD: u64 = 1 << 33;

/// What a completion of an executed queue is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum About {
    /// A message has come to this receive.
    Message(u32),
    /// What was told from this place is with the client.
    Told(u32),
}

impl About {
    /// `None`: the completion is not of such a queue.
    pub(super) fn of(name: WrId) -> Option<Self> {
        match name.0 & !u64::from(u32::MAX) {
            MESSAGE => Some(Self::Message(name.0 as u32)),
            TOLD => Some(Self::Told(name.0 as u32)),
            _ => None,
        }
    }
}

/// A work queue that the node's processor executes.
pub(super) struct Executed {
    qp: Arc<dyn QueuePair>,
    chain: Chain,
    receives: Arc<dyn MemoryRegion>,
    /// Bytes of a receive.
    message_len: u32,
    /// Receives with messages that have not begun, and the messages' lengths.
    waiting: VecDeque<(u32, u32)>,
    peer: Peer,
}

/// What chains tell the client.
struct Peer {
    /// Pages that are on their way. A store tells no bytes.
    answers: Option<Arc<dyn MemoryRegion>>,
    free: Vec<u32>,
    unposted: Vec<SendWr>,
    /// Where a page is put together.
    page: Vec<u8>,
}

impl ChainPeer for Peer {
    fn write(
        &mut self,
        key: u32,
        address: u64,
        imm: Option<u32>,
        len: usize,
        fill: &dyn Fn(&mut [u8]),
    ) -> Result<(), PeerGone> {
        // With wrong indices a message can have more told than one thing.
        let place = self.free.pop().ok_or(PeerGone)?;
        let remote = Remote::Memory { rkey: Rkey(key), offset: address };
        let (op, local) = match (&self.answers, imm) {
            (Some(answers), imm) if len > 0 => {
                let at = place as usize * PAGE_LEN as usize;
                fill(&mut self.page[..len]);
                answers.memory().write(at, &self.page[..len]);
                let op = imm.map_or(SendOp::Write(remote), |imm| SendOp::WriteImm(remote, imm));
                (op, answers.sge(at as u64, len as u32))
            }
            // No bytes name no memory.
            (_, Some(imm)) => (SendOp::SendImm(imm), Sge::EMPTY),
            (_, None) => (SendOp::Send, Sge::EMPTY),
        };
        let wr_id = WrId(TOLD | u64::from(place));
        self.unposted.push(SendWr { wr_id, op, local: local.into(), signaled: true });
        Ok(())
    }
}

impl Executed {
    /// Posts receives for the client's messages.
    pub(super) fn new(
        shared: &Shared,
        kind: Kind,
        queue: WorkQueue,
        qp: &Arc<dyn QueuePair>,
    ) -> Result<Self, Refusal> {
        let failed =
            |error: &dyn std::fmt::Display| format!("the memory node has no memory for messages: {error}");
        let slab = |name, len: u32| {
            let memory = SharedMemory::new(name, (WINDOW * len) as usize).map_err(|error| failed(&error))?;
            shared.pd.register(Arc::new(memory), Access::LOCAL).map_err(|error| failed(&error))
        };
        let message_len = shape(kind).len().next_multiple_of(64) as u32;
        let answers = if kind == Kind::Load { Some(slab("cuttlefs-odrp-answers", PAGE_LEN)?) } else { None };
        let executed = Self {
            qp: qp.clone(),
            chain: Chain::new(queue).map_err(|error| failed(&error))?,
            receives: slab("cuttlefs-odrp-received", message_len)?,
            message_len,
            waiting: VecDeque::new(),
            peer: Peer {
                page: vec![0; answers.as_ref().map_or(0, |_| PAGE_LEN as usize)],
                answers,
                free: (0..WINDOW).collect(),
                unposted: Vec::new(),
            },
        };
        let receives: Vec<_> = (0..WINDOW).map(|place| executed.receive(place)).collect();
        qp.post_recv(&receives).map_err(|error| failed(&error))?;
        Ok(executed)
    }

    fn receive(&self, place: u32) -> RecvWr {
        let local = self.receives.sge(u64::from(place * self.message_len), self.message_len);
        RecvWr { wr_id: WrId(MESSAGE | u64::from(place)), local: local.into() }
    }

    /// A request of this queue is done; the message in it has `len` bytes. [`Self::go_on`] begins its chain.
    pub(super) fn done(&mut self, about: About, len: u32) {
        match about {
            About::Message(place) => self.waiting.push_back((place, len)),
            About::Told(place) => self.peer.free.push(place),
        }
    }

    /// Executes the chains of the messages that may begin, and sends what they tell with one doorbell.
    ///
    /// # Errors
    /// The fault that ends the queue; `None` if the connection is at its end.
    pub(super) fn go_on(&mut self) -> Result<(), Option<Fault>> {
        let gate = self.chain.queue().gate.clone();
        let mut begun = Ok(());
        let mut receives = Vec::new();
        while begun.is_ok()
            && let Some((place, len)) = self.waiting.front().copied()
            && !self.peer.free.is_empty()
            && let Some(_started) = gate.enter()
            && self.chain.is_ready()
        {
            self.waiting.pop_front();
            let mut message = vec![0; len.min(self.message_len) as usize];
            self.receives.memory().read((place * self.message_len) as usize, &mut message);
            receives.push(self.receive(place));
            begun = self.chain.start(&message, &mut self.peer).map_err(Some);
        }
        // A client that has its answer may send the next message.
        if !receives.is_empty() && self.qp.post_recv(&receives).is_err() {
            return Err(None);
        }
        let told = std::mem::take(&mut self.peer.unposted);
        if !told.is_empty() && self.qp.post_send(&told).is_err() {
            return begun.and(Err(None));
        }
        begun
    }
}
