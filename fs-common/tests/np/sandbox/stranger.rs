//! The bytes that decide, and a hostile peer.

use cuttlefs_common::np::Message;
use cuttlefs_common::rdma::{
    Completion, CompletionKind, CompletionQueue, MemoryRegion, QpState, QueuePair, RecvWr, SendOp, SendWr,
    WcStatus, WrId,
};
use std::sync::Arc;

/// Receives of a hostile peer.
pub const RECEIVES: u64 = 128;
/// Bytes of one receive.
pub const RECEIVE: u64 = 2048;

/// Bytes that decide; zeros when they are used up.
pub struct Feed<'b>(pub &'b [u8]);

impl Feed<'_> {
    pub fn byte(&mut self) -> u64 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        u64::from(*first)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.byte() % bound
    }

    pub fn two(&mut self) -> u64 {
        self.byte() << 8 | self.byte()
    }

    pub fn eight(&mut self) -> u64 {
        (0..8).fold(0, |all, _| all << 8 | self.byte())
    }

    pub fn take(&mut self, len: u64) -> Vec<u8> {
        (0..len).map(|_| self.byte() as u8).collect()
    }
}

/// A hostile peer.
pub struct Stranger {
    pub qp: Arc<dyn QueuePair>,
    pub cq: Arc<dyn CompletionQueue>,
    pub buffers: Arc<dyn MemoryRegion>,
    pub greeted: bool,
}

impl Stranger {
    pub fn post(&self, op: SendOp, len: u64) {
        let local = self.buffers.sge(RECEIVES * RECEIVE, len as u32);
        // A queue pair that is over takes nothing.
        let _ = self.qp.post_send(&[SendWr { wr_id: WrId(1), op, local: local.into(), signaled: true }]);
    }

    pub fn send(&self, bytes: &[u8]) {
        self.buffers.memory().write((RECEIVES * RECEIVE) as usize, bytes);
        self.post(SendOp::Send, bytes.len() as u64);
    }

    pub fn is_over(&self) -> bool {
        self.qp.state() == QpState::Error
    }

    /// Everything that has come: completions of its own requests, and messages.
    pub fn take(&self) -> (Vec<Completion>, Vec<Message>) {
        let (mut own, mut messages, mut some) = (Vec::new(), Vec::new(), Vec::new());
        while self.cq.poll(&mut some, 64) > 0 {
            for completion in some.drain(..) {
                if completion.kind != CompletionKind::Recv {
                    own.push(completion);
                    continue;
                }
                if completion.status != WcStatus::Success {
                    continue;
                }
                let at = completion.wr_id.0 * RECEIVE;
                let mut bytes = vec![0; completion.byte_len as usize];
                self.buffers.memory().read(at as usize, &mut bytes);
                messages.push(Message::parse(&bytes).expect("the owner's messages are right"));
                let local = self.buffers.sge(at, RECEIVE as u32).into();
                let _ = self.qp.post_recv(&[RecvWr { wr_id: completion.wr_id, local }]);
            }
        }
        (own, messages)
    }
}
