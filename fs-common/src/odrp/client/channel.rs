//! One chain's connection at the client: messages, their slots, and the receives that tell that one is done.
//!
//! Nothing waits for an invalidation, so those that were begun one after the other go out together, with one doorbell.
//!
//! # Invariants
//! No more messages are outstanding than the chain's window, so the places that a message writes to are not in use.

use super::super::chains::{Arguments, Kind, PLACES, put_message, shape};
use super::super::wire::{Answer, Question};
use super::control::Asking;
use super::{Base, PATIENCE, RemoteError};
use crate::ids::{PAGE_SIZE, QpNumber};
use crate::memory::SharedMemory;
use crate::rdma::chain::MessageShape;
use crate::rdma::{Access, Completion, MemoryRegion, QpState, QueuePair, RecvWr, SendOp, SendWr, Sge, WrId};
use std::collections::VecDeque;
use std::sync::Arc;

/// Operations of a kind that may be outstanding.
pub(super) const SLOTS: u32 = PLACES / 2;

/// Why a message was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NotBegun {
    /// All slots are taken.
    Full,
    /// The connection is gone.
    Broken,
}

/// The connection is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Broken;

/// A chain's connection.
pub(super) struct Channel {
    kind: Kind,
    qp: Arc<dyn QueuePair>,
    shape: MessageShape,
    messages: Arc<dyn MemoryRegion>,
    stride: usize,
    /// The next message's number.
    next: u64,
    /// The page of each outstanding operation.
    slots: [Option<u64>; SLOTS as usize],
    outstanding: u64,
    /// Messages that are put together and not posted.
    unposted: Vec<SendWr>,
    /// Where a message is put together.
    message: Vec<u8>,
}

impl Channel {
    /// Connects, and has the connection armed. Completions of other channels go to `others` meanwhile.
    pub(super) fn attach(
        base: &Base,
        kind: Kind,
        token: u128,
        others: &mut VecDeque<Completion>,
    ) -> Result<Self, RemoteError> {
        let shape = shape(kind);
        let stride = shape.len().next_multiple_of(64);
        let memory = SharedMemory::new("cuttlefs-odrp-requests", stride * SLOTS as usize)
            .map_err(RemoteError::Memory)?;
        // The node has no right to it.
        let messages = base.pd.register(Arc::new(memory), Access::NONE)?;
        let asking = Asking::connect(&base.pd, base.cq.clone(), &base.endpoint, 2 * SLOTS, PATIENCE)?;
        match asking.ask(&Question::Attach { token, kind }, others)? {
            Answer::Attached => {}
            other => {
                return Err(RemoteError::Refused(format!(
                    "it answered {other:?} to a connection for chains"
                )));
            }
        }
        let qp = asking.queue_pair().clone();
        let receives = [RecvWr { wr_id: WrId(1), local: Sge::EMPTY.into() }; SLOTS as usize];
        qp.post_recv(&receives).map_err(|_| RemoteError::Cut)?;
        let message = vec![0; shape.len()];
        Ok(Self {
            kind,
            qp,
            shape,
            messages,
            stride,
            next: 0,
            slots: [None; SLOTS as usize],
            outstanding: 0,
            unposted: Vec::new(),
            message,
        })
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    pub(super) fn number(&self) -> QpNumber {
        self.qp.number()
    }

    pub(super) fn outstanding(&self) -> u64 {
        self.outstanding
    }

    pub(super) fn is_outstanding(&self, slot: u32) -> bool {
        self.slots.get(slot as usize).is_some_and(Option::is_some)
    }

    /// Whether operations wait on a connection that is gone.
    pub(super) fn is_broken_with_work(&self) -> bool {
        self.outstanding > 0 && self.qp.state() == QpState::Error
    }

    /// Sends a message; a load's page comes to the slot's place behind `to`. An invalidation's is sent by [`Self::ring`].
    pub(super) fn begin(&mut self, page: u64, bytes: &[u8], to: (u32, u64)) -> Result<u32, NotBegun> {
        let slot = self.slots.iter().position(Option::is_none).ok_or(NotBegun::Full)?;
        let to = (to.0, to.1 + (slot * PAGE_SIZE) as u64);
        let arguments = Arguments { page, tag: slot as u32, to };
        put_message(self.kind, &self.shape, self.next, arguments, &mut self.message);
        let at = slot * self.stride;
        let payload = self.shape.payload();
        let memory = self.messages.memory();
        memory.write(at, &self.message[..payload.start]);
        if !payload.is_empty() {
            let bytes = &bytes[..bytes.len().min(payload.len())];
            memory.write(at + payload.start, bytes);
            memory.fill(at + payload.start + bytes.len(), payload.len() - bytes.len(), 0);
        }
        let local = self.messages.sge(at as u64, self.shape.len() as u32);
        let send =
            SendWr { wr_id: WrId(slot as u64), op: SendOp::Send, local: local.into(), signaled: false };
        self.unposted.push(send);
        if self.kind != Kind::Invalidate {
            self.ring().map_err(|Broken| NotBegun::Broken)?;
        }
        self.slots[slot] = Some(page);
        self.outstanding += 1;
        self.next += 1;
        Ok(slot as u32)
    }

    /// Posts the messages that are not.
    pub(super) fn ring(&mut self) -> Result<(), Broken> {
        if self.unposted.is_empty() {
            return Ok(());
        }
        let posted = self.qp.post_send(&self.unposted);
        self.unposted.clear();
        posted.map_err(|_| Broken)
    }

    /// An operation is done: returns its slot and page, and posts the receive for another.
    pub(super) fn arrived(&mut self, tag: u32) -> Option<(u32, u64)> {
        // A broken connection is found when it is used.
        let _ = self.qp.post_recv(&[RecvWr { wr_id: WrId(1), local: Sge::EMPTY.into() }]);
        let page = self.slots.get_mut(tag as usize)?.take()?;
        self.outstanding -= 1;
        Some((tag, page))
    }

    /// The connection is gone: the pages of the operations that were outstanding.
    pub(super) fn abandon(&mut self) -> Vec<u64> {
        self.qp.close();
        self.unposted.clear();
        self.outstanding = 0;
        self.slots.iter_mut().filter_map(Option::take).collect()
    }
}
