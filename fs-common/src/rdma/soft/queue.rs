//! The common part of queue pairs of every link: number, state, depths, posted receives, completions.
//!
//! # Locks
//! A link's receive lock comes before its send lock, that before `receives`, that before a completion queue's
//! entries. None is held across a system call that can block.

use super::cq::{Pumped, SoftCq};
use super::region::{Local, Registry};
use crate::breach::Breach;
use crate::ids::QpNumber;
use crate::rdma::chain::{Chain, WorkQueue};
use crate::rdma::peer::PeerIdentity;
use crate::rdma::verbs::{
    Completion, CompletionKind, LinkKind, PostError, QpState, QueuePair, RdmaError, RecvWr, RegionOwner,
    SendOp, SendWr, WcStatus, WrId, count_within, no_chains,
};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

/// Largest two-sided message: the RPC layer's largest, or a durable RPC of 64 KiB with its headers.
pub(super) const MAX_MESSAGE_BYTES: u32 = 68 * 1024;
/// Largest one-sided transfer: the most that FUSE asks for, so it also bounds the buffers of a connection.
pub(super) const MAX_TRANSFER_BYTES: u32 = 1024 * 1024;
/// Deepest queue.
pub(super) const MAX_QUEUE_DEPTH: u32 = 4096;

/// Places taken in a queue pair's two work queues. A post takes them; they are given back when the completion is polled (or, for unsignaled requests,
/// when the request completes).
#[derive(Debug, Default)]
pub(super) struct Slots {
    pub(super) sends: AtomicU32,
    pub(super) receives: AtomicU32,
}

/// What a request did that succeeded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Done {
    /// Bytes of it.
    pub(super) len: u32,
    /// See [`Completion::absent`].
    pub(super) absent: bool,
}

/// A posted receive.
pub(super) struct PostedReceive {
    pub(super) wr_id: WrId,
    pub(super) local: Local,
}

/// The common part of a queue pair.
pub(super) struct QpCore {
    pub(super) number: QpNumber,
    pub(super) link: LinkKind,
    pub(super) peer: PeerIdentity,
    pub(super) registry: Arc<Registry>,
    pub(super) send_cq: Arc<SoftCq>,
    pub(super) recv_cq: Arc<SoftCq>,
    pub(super) send_depth: u32,
    pub(super) recv_depth: u32,
    pub(super) max_sges: u32,
    pub(super) slots: Arc<Slots>,
    state: AtomicU8,
    owner: AtomicU64,
    receives: Mutex<VecDeque<PostedReceive>>,
}

/// The checked parts of a new queue pair.
pub(super) struct QpParts {
    pub(super) number: QpNumber,
    pub(super) registry: Arc<Registry>,
    pub(super) send_cq: Arc<SoftCq>,
    pub(super) recv_cq: Arc<SoftCq>,
    pub(super) send_depth: u32,
    pub(super) recv_depth: u32,
    pub(super) max_sges: u32,
}

/// Whether the provider writes the local ranges of an operation.
pub(super) fn writes_local(op: &SendOp) -> bool {
    matches!(op, SendOp::Read(_) | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. })
}

impl QpCore {
    pub(super) fn new(parts: QpParts, link: LinkKind, peer: PeerIdentity) -> Self {
        Self {
            number: parts.number,
            link,
            peer,
            registry: parts.registry,
            send_cq: parts.send_cq,
            recv_cq: parts.recv_cq,
            send_depth: parts.send_depth,
            recv_depth: parts.recv_depth,
            max_sges: parts.max_sges,
            slots: Arc::new(Slots::default()),
            state: AtomicU8::new(QpState::Init as u8),
            owner: AtomicU64::new(0),
            receives: Mutex::new(VecDeque::new()),
        }
    }

    /// The state of the queue pair.
    pub(super) fn state(&self) -> QpState {
        match self.state.load(Ordering::Acquire) {
            state if state == QpState::Init as u8 => QpState::Init,
            state if state == QpState::ReadyToSend as u8 => QpState::ReadyToSend,
            _ => QpState::Error,
        }
    }

    /// Changes the state; true if this call made the change.
    pub(super) fn become_state(&self, next: QpState) -> bool {
        self.state
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |state| {
                let now = if state == QpState::Init as u8 {
                    QpState::Init
                } else if state == QpState::ReadyToSend as u8 {
                    QpState::ReadyToSend
                } else {
                    QpState::Error
                };
                (now != next && now.may_become(next)).then_some(next as u8)
            })
            .is_ok()
    }

    pub(super) fn is_ready(&self) -> bool {
        self.state() == QpState::ReadyToSend
    }

    pub(super) fn owner(&self) -> RegionOwner {
        RegionOwner(self.owner.load(Ordering::Acquire))
    }

    /// The completion queues, each only once.
    pub(super) fn queues(&self) -> impl Iterator<Item = &Arc<SoftCq>> {
        let second = (!Arc::ptr_eq(&self.send_cq, &self.recv_cq)).then_some(&self.recv_cq);
        std::iter::once(&self.send_cq).chain(second)
    }

    /// Completes a send work request. An unsignaled one gives its place back at once.
    pub(super) fn complete_send(
        &self,
        wr_id: WrId,
        kind: CompletionKind,
        status: WcStatus,
        signaled: bool,
        len: u32,
    ) {
        let (done, qp) = (Done { len, absent: false }, self.number);
        match status {
            WcStatus::Success => self.complete_done(wr_id, kind, signaled, done),
            _ => {
                let completion =
                    Completion { wr_id, qp, kind, status, byte_len: 0, imm: None, absent: false };
                self.send_cq.push(completion, &self.slots);
            }
        }
    }

    /// Completes a send work request that succeeded.
    pub(super) fn complete_done(&self, wr_id: WrId, kind: CompletionKind, signaled: bool, done: Done) {
        let Done { len: byte_len, absent } = done;
        if !signaled && !absent {
            self.slots.sends.fetch_sub(1, Ordering::AcqRel);
            return;
        }
        let (qp, status) = (self.number, WcStatus::Success);
        self.send_cq.push(Completion { wr_id, qp, kind, status, byte_len, imm: None, absent }, &self.slots);
    }

    /// Completes a receive.
    pub(super) fn complete_receive(&self, wr_id: WrId, status: WcStatus, len: u32, imm: Option<u32>) {
        let kind = if imm.is_some() { CompletionKind::RecvWithImm } else { CompletionKind::Recv };
        let completion =
            Completion { wr_id, qp: self.number, kind, status, byte_len: len, imm, absent: false };
        self.recv_cq.push(completion, &self.slots);
    }

    /// The oldest posted receive.
    pub(super) fn take_receive(&self) -> Option<PostedReceive> {
        self.receives.lock().pop_front()
    }

    pub(super) fn has_receive(&self) -> bool {
        !self.receives.lock().is_empty()
    }

    /// Flushes every posted receive. The state is `Error` already, so none can be posted behind this.
    pub(super) fn flush_receives(&self) {
        let flushed: Vec<_> = self.receives.lock().drain(..).collect();
        for receive in flushed {
            self.complete_receive(receive.wr_id, WcStatus::Flushed, 0, None);
        }
    }

    /// The result of a post that took all requests before the one with too many local ranges, if there is one.
    pub(super) fn took(&self, posted: usize, of: usize) -> Result<(), PostError> {
        if posted < of { Err(PostError::TooManySges { posted, most: self.max_sges }) } else { Ok(()) }
    }

    /// Takes places for as many of `requests` as fit; returns how many.
    pub(super) fn reserve_sends(&self, requests: usize) -> usize {
        let mut taken = 0;
        let _ = self.slots.sends.fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
            taken = requests.min(self.send_depth.saturating_sub(used) as usize);
            Some(used + taken as u32)
        });
        taken
    }

    /// Posts receives. An unregistered buffer completes with `LocalProtection`; the caller then fails the queue pair.
    pub(super) fn post_receives(&self, requests: &[RecvWr]) -> (Result<(), PostError>, bool) {
        let mut broken = false;
        let within = count_within(requests, self.max_sges);
        for (posted, request) in requests[..within].iter().enumerate() {
            let local = self.registry.local(&request.local, true);
            let mut receives = self.receives.lock();
            // Under the lock, so that this sees an earlier flush, and a later flush sees these receives.
            let state = self.state();
            if state == QpState::Error {
                return (Err(PostError::BadState { state }), broken);
            }
            if self.slots.receives.load(Ordering::Acquire) >= self.recv_depth {
                return (Err(PostError::QueueFull { posted }), broken);
            }
            self.slots.receives.fetch_add(1, Ordering::AcqRel);
            match local {
                Ok(local) => receives.push_back(PostedReceive { wr_id: request.wr_id, local }),
                Err(status) => {
                    drop(receives);
                    self.complete_receive(request.wr_id, status, 0, None);
                    broken = true;
                    break;
                }
            }
        }
        (if broken { Ok(()) } else { self.took(within, requests.len()) }, broken)
    }
}

/// The part of a queue pair that depends on its link.
pub(super) trait LinkQp: Pumped {
    fn core(&self) -> &QpCore;
    /// Executes or queues requests whose places are reserved, in order, and rings the doorbell once.
    fn submit(&self, requests: &[SendWr]);
    /// Delivers messages that waited for the receives that were just posted.
    fn receives_posted(&self);
    /// From now on messages start this chain.
    fn arm(&self, chain: Chain) -> Result<(), RdmaError> {
        let _ = chain;
        Err(no_chains())
    }
    /// Starts the chains of messages that waited.
    fn resume(&self) {}
    /// See [`QueuePair::looks_pages_up`].
    fn looks_pages_up(&self) -> bool {
        false
    }
    /// Goes to `Error` and flushes; `reason` is logged if it is not an orderly close.
    fn fail(&self, reason: Option<&Breach>);
}

/// The queue pair handed to the user. Dropping it disconnects.
pub(super) struct SoftQp(pub(super) Arc<dyn LinkQp>);

impl QueuePair for SoftQp {
    fn number(&self) -> QpNumber {
        self.0.core().number
    }

    fn state(&self) -> QpState {
        self.0.core().state()
    }

    fn link(&self) -> LinkKind {
        self.0.core().link
    }

    fn peer(&self) -> PeerIdentity {
        self.0.core().peer.clone()
    }

    fn post_send(&self, requests: &[SendWr]) -> Result<(), PostError> {
        let core = self.0.core();
        let state = core.state();
        if state != QpState::ReadyToSend {
            return Err(PostError::BadState { state });
        }
        let within = count_within(requests, core.max_sges);
        let posted = core.reserve_sends(within);
        self.0.submit(&requests[..posted]);
        if posted < within { Err(PostError::QueueFull { posted }) } else { core.took(posted, requests.len()) }
    }

    fn post_recv(&self, requests: &[RecvWr]) -> Result<(), PostError> {
        let (result, broken) = self.0.core().post_receives(requests);
        if broken {
            self.0.fail(Some(&Breach::of("a posted receive names memory that is not registered for it")));
        } else {
            self.0.receives_posted();
        }
        result
    }

    fn arm(&self, queue: WorkQueue) -> Result<(), RdmaError> {
        let chain = Chain::new(queue)
            .map_err(|error| RdmaError::Unsupported(format!("the work queue cannot be armed: {error}")))?;
        self.0.arm(chain)
    }

    fn resume(&self) {
        self.0.resume();
    }

    fn looks_pages_up(&self) -> bool {
        self.0.looks_pages_up()
    }

    fn set_region_owner(&self, owner: RegionOwner) {
        self.0.core().owner.store(owner.0, Ordering::Release);
    }

    fn close(&self) {
        self.0.fail(None);
    }
}

impl Drop for SoftQp {
    fn drop(&mut self) {
        self.0.fail(None);
    }
}
