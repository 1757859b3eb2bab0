//! The two-sided way: requests to the target's processor, and the buffers of their messages.
//!
//! A call is one request under way. Its number and its generation are the request's tag: an answer that names another generation is none.

use super::peer::COMPLETIONS;
use super::request::NpError;
use crate::np::wire::{BUFFER_LEN, Message, RPC_DEPTH, Reply, Request, RequestOp, Welcome};
use crate::rdma::{
    CompletionKind, CompletionQueue, MemoryRegion, QueuePair, RecvWr, SendOp, SendWr, WcStatus, WrId,
};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A completion of a SEND; the high half of its wr_id.
pub(super) const CALL_SENT: u64 = 4;

/// Bytes of all message buffers: one of a call's request, one of an answer.
pub(super) const CALLS_LEN: usize = 2 * RPC_DEPTH * BUFFER_LEN;

/// A part of an access that the target is asked for.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    /// The access's place among those under way.
    pub(super) access: usize,
    /// Offset in the region.
    pub(super) offset: u64,
    /// Offset in the access.
    pub(super) done: u32,
    pub(super) op: RequestOp,
}

#[derive(Clone, Debug, Default)]
struct Call {
    generation: u32,
    piece: Option<Piece>,
}

/// The calls of a peer.
pub(super) struct Calls {
    buffers: Arc<dyn MemoryRegion>,
    at: usize,
    calls: Vec<Call>,
    free: Vec<usize>,
    queue: VecDeque<Piece>,
}

impl Calls {
    /// Calls whose messages lie at `at` in these buffers.
    pub(super) fn new(buffers: Arc<dyn MemoryRegion>, at: usize) -> Self {
        let calls = vec![Call::default(); RPC_DEPTH];
        Self { buffers, at, calls, free: (0..RPC_DEPTH).rev().collect(), queue: VecDeque::new() }
    }

    /// The receive with this number.
    pub(super) fn receive(&self, number: usize) -> RecvWr {
        let at = self.at + (RPC_DEPTH + number) * BUFFER_LEN;
        RecvWr { wr_id: WrId(number as u64), local: self.buffers.sge(at as u64, BUFFER_LEN as u32).into() }
    }

    /// The message that came to a receive.
    pub(super) fn received(&self, number: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len.min(BUFFER_LEN)];
        self.buffers.memory().read(self.at + (RPC_DEPTH + number) * BUFFER_LEN, &mut bytes);
        bytes
    }

    /// Asks for a piece, as soon as a call is free.
    pub(super) fn ask(&mut self, piece: Piece) {
        self.queue.push_back(piece);
    }

    /// The SEND of a message; `number` names the buffer.
    pub(super) fn send(&self, number: usize, message: &Message, wr_id: WrId) -> SendWr {
        let bytes = message.encode();
        let at = self.at + number * BUFFER_LEN;
        self.buffers.memory().write(at, &bytes);
        let local = self.buffers.sge(at as u64, bytes.len() as u32);
        SendWr { wr_id, op: SendOp::Send, local: local.into(), signaled: true }
    }

    /// Whether nothing waits for a call.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty()
    }

    /// The next request to post, if a call is free for it.
    pub(super) fn next(&mut self, wr_id: WrId) -> Option<SendWr> {
        if self.is_idle() {
            return None;
        }
        let number = self.free.pop()?;
        let piece = self.queue.pop_front()?;
        let call = &mut self.calls[number];
        call.generation = call.generation.wrapping_add(1) & 0xff_ffff;
        let tag = call.generation << 8 | number as u32;
        let request = Request { tag, offset: piece.offset, op: piece.op.clone() };
        call.piece = Some(piece);
        Some(self.send(number, &Message::Request(request), wr_id))
    }

    /// The piece that an answer is about. `None`: nobody has asked for it, or the answer does not fit.
    pub(super) fn answered(&mut self, reply: &Reply) -> Option<Piece> {
        let number = (reply.tag & 0xff) as usize;
        let call = self.calls.get_mut(number).filter(|call| call.generation == reply.tag >> 8)?;
        let wanted = match call.piece.as_ref()?.op {
            RequestOp::ReadInline(len) if reply.status == crate::np::wire::Status::Done => len as usize,
            _ => 0,
        };
        if reply.bytes.len() != wanted {
            return None;
        }
        let piece = call.piece.take();
        self.free.push(number);
        piece
    }
}
const _: () = assert!(RPC_DEPTH <= 256, "a tag has eight bits for the call");

/// Says hello, and waits for the welcome.
pub(super) fn greet(
    qp: &dyn QueuePair,
    completions: &dyn CompletionQueue,
    calls: &Calls,
    timeout: Duration,
) -> Result<Welcome, NpError> {
    let gone = || NpError::NoRegion("the other end hung up before it told of its memory region".to_owned());
    qp.post_send(&[calls.send(0, &Message::Hello, WrId(CALL_SENT << 32))]).map_err(|_| gone())?;
    let deadline = Instant::now() + timeout;
    let mut polled = Vec::new();
    loop {
        completions.poll(&mut polled, COMPLETIONS);
        for completion in polled.drain(..) {
            if completion.status != WcStatus::Success {
                return Err(gone());
            }
            if completion.kind != CompletionKind::Recv {
                continue;
            }
            let number = completion.wr_id.0 as usize;
            let message = Message::parse(&calls.received(number, completion.byte_len as usize));
            qp.post_recv(&[calls.receive(number)]).map_err(|_| gone())?;
            return match message {
                Ok(Message::Welcome(welcome)) => Ok(welcome),
                Ok(_) => Err(NpError::NoRegion("the other end serves no memory region".to_owned())),
                Err(error) => Err(NpError::NoRegion(error.to_string())),
            };
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(NpError::NoRegion("the other end does not tell of a memory region".to_owned()));
        }
        completions.wait(left.min(Duration::from_millis(100)));
    }
}
