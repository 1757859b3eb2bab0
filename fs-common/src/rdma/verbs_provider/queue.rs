//! Queue pairs over libibverbs.
//!
//! # Sequence numbers
//! A queue pair completes the requests of each of its queues in order. So each queue has a list of the requests under way, and the number that is
//! posted as `wr_id` counts through it (the top bit says which list). A completion of a send also ends all sends before it: those were not signaled,
//! and succeeded. So that places become free although the user asks for no completions, the provider now and then asks for one itself and does not
//! show it to the user. A completion for the user keeps its place until it is polled. The check of the peer ([`VerbsQp::probe`]) takes none of the
//! user's places: the RNIC's queue, and the promise of the completion queue, is one deeper than the user asked for.
//!
//! # Failure
//! A completion with an error, or an event that the peer is gone, puts the queue pair into `Error`: the RNIC flushes all requests that are under way,
//! and the peer is told.

use super::cm::Events;
use super::cq::{Promise, VerbsCq};
use super::regions::Regions;
use super::requests::{Requests, Sending, Sends, Tells};
use super::shared_receives::VerbsSrq;
use super::sys::{self, Batch, Far, Lists, Mw, Next, Pd};
use super::sys_flush::Flush;
use super::under_way::UnderWay;
use super::window::VerbsWindow;
use super::{MAX_MESSAGE_BYTES, MAX_TRANSFER_BYTES};
use crate::ids::{Lkey, QpNumber};
use crate::rdma::memory_window::MemoryWindow;
use crate::rdma::peer::PeerIdentity;
use crate::rdma::verbs::{
    Completion, CompletionKind, FlushReach, LinkKind, Placement, PostError, QpState, QueuePair, RdmaError,
    RecvWr, RegionOwner, Remote, SendOp, SendWr, Sge, WcStatus, WrId, count_within,
};
use parking_lot::Mutex;
use std::io;
use std::slice;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Weak};

/// Set in the `wr_id` of a receive.
pub(super) const RECEIVE: u64 = 1 << 63;

/// A queue pair; see the module.
pub(super) struct VerbsQp {
    peer: PeerIdentity,
    id: sys::Id,
    events: Arc<Events>,
    state: AtomicU8,
    send_cq: Arc<VerbsCq>,
    recv_cq: Arc<VerbsCq>,
    /// Declared behind `id`, so that the RNIC's queue pair is destroyed first.
    _promises: [Promise; 2],
    capacities: sys::Capacities,
    /// How far its RNIC can FLUSH; if it cannot, a READ takes the place of a FLUSH, and this is the memory for its byte. Nobody reads that byte.
    reach: FlushReach,
    landing: [Sge; 1],
    _landing: Arc<sys::Mr>,
    regions: Arc<Regions>,
    pd: Arc<Pd>,
    /// For windows, which hold a reference.
    this: Weak<Self>,
    /// The shared queue of its receives; `None`: it has receives of its own.
    shared: Option<Arc<VerbsSrq>>,
    requests: Arc<Requests>,
}

/// The parts of a new queue pair.
pub(super) struct Parts {
    pub(super) number: QpNumber,
    /// Its number at the RNIC.
    pub(super) raw_number: u32,
    pub(super) peer: PeerIdentity,
    /// Has the RNIC's queue pair already.
    pub(super) id: sys::Id,
    pub(super) events: Arc<Events>,
    /// For sends, and for receives.
    pub(super) queues: [Arc<VerbsCq>; 2],
    pub(super) promises: [Promise; 2],
    pub(super) shared: Option<Arc<VerbsSrq>>,
    /// The regions of its protection domain.
    pub(super) regions: Arc<Regions>,
    pub(super) pd: Arc<Pd>,
    pub(super) capacities: sys::Capacities,
    /// How far its RNIC can FLUSH, and the memory for the byte of a READ that takes the place of a FLUSH.
    pub(super) flushing: (FlushReach, Arc<sys::Mr>),
}

const INIT: u8 = 0;
const READY: u8 = 1;
const ERROR: u8 = 2;

impl VerbsQp {
    /// A queue pair in state `Init`.
    pub(super) fn new(parts: Parts) -> Arc<Self> {
        let [send_cq, recv_cq] = parts.queues;
        // Shared receives are under way elsewhere.
        let own_receives = if parts.shared.is_some() { 0 } else { parts.capacities.recv_depth };
        let capacities = parts.capacities;
        let qp = Arc::new_cyclic(|this| Self {
            requests: Arc::new(Requests {
                number: parts.number,
                qp: this.clone(),
                is_gone: AtomicBool::new(false),
                shared: parts.shared.as_ref().map(Arc::downgrade),
                sends: Mutex::new(Sends::new(capacities.send_depth)),
                receives: Mutex::new(UnderWay::new(own_receives, WrId(0))),
            }),
            peer: parts.peer,
            id: parts.id,
            events: parts.events,
            state: AtomicU8::new(INIT),
            send_cq,
            recv_cq,
            _promises: parts.promises,
            capacities,
            reach: parts.flushing.0,
            landing: [Sge { lkey: Lkey(parts.flushing.1.lkey()), offset: 0, len: 1 }],
            _landing: parts.flushing.1,
            regions: parts.regions,
            pd: parts.pd,
            this: this.clone(),
            shared: parts.shared,
        });
        qp.events.queue_pairs.fetch_add(1, Ordering::Relaxed);
        for queue in [&qp.send_cq, &qp.recv_cq] {
            queue.add(parts.raw_number, &qp.requests);
        }
        qp
    }

    pub(super) fn id(&self) -> &sys::Id {
        &self.id
    }

    /// Makes the queue pair live, after the handshake.
    pub(super) fn begin(&self) {
        self.events.path_mtu_bytes.store(self.id.path_mtu_bytes().unwrap_or(0), Ordering::Relaxed);
        let _ = self.state.compare_exchange(INIT, READY, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Puts the queue pair into `Error`: requests under way are flushed, and the peer is told, now or, while the port is down, when it is up again
    /// (`ends`). Idempotent.
    pub(super) fn fail(&self) {
        if self.state.swap(ERROR, Ordering::AcqRel) == ERROR {
            return;
        }
        if self.events.port.is_up() {
            self.id.disconnect();
        } else {
            self.id.fail_in_silence();
        }
        self.send_cq.wake();
        self.recv_cq.wake();
    }

    fn takes_posts(&self) -> Result<(), PostError> {
        match self.state() {
            QpState::Error => Err(PostError::BadState { state: QpState::Error }),
            _ => Ok(()),
        }
    }

    /// Sends the peer's RNIC an empty WRITE, if nothing is under way whose end would be heard of. It needs no key (IBTA volume 1, C9-88), and its
    /// failure breaks the queue pair: so this side notices that a peer is gone without a word, even if it only waits for that peer's answer.
    pub(super) fn probe(&self) {
        if self.state() != QpState::ReadyToSend {
            return;
        }
        if self.requests.sends.lock().is_watched() {
            // Of an idle queue pair nobody polls: what the last check came to lies there.
            self.send_cq.look();
        }
        let mut sends = self.requests.sends.lock();
        if self.state() != QpState::ReadyToSend || sends.is_watched() {
            return;
        }
        let number = sends.under_way.next();
        let mut batch = Batch::of(&mut sends.lists, 1);
        batch.next(number, &[], true).write(Far { rkey: 0, offset: 0 });
        if self.id.post_send(batch, &[], &self.regions).is_ok() {
            sends.probe = Some(number);
            sends.silent = 0;
            sends.under_way.push(Sending::CHECK);
        }
    }

    /// Makes the RNIC's request, which is `next`, of this one.
    ///
    /// # Errors
    /// The status of a request that is refused here, because the RNIC would not take it, or would report its failure only later.
    #[inline(always)]
    fn prepare<'r>(&'r self, request: &'r SendWr, next: Next<'_, 'r>) -> Result<(), WcStatus> {
        if request.local.len() > MAX_TRANSFER_BYTES.into() {
            return Err(WcStatus::LocalLength);
        }
        match request.op {
            // Most requests are READs.
            SendOp::Read(Remote::Memory { rkey, offset }) => next.read(Far { rkey: rkey.0, offset }),
            _ => return self.prepare_other(request, next),
        }
        Ok(())
    }

    /// As `prepare`, of other requests. Apart, so that a post of a READ stays short.
    #[inline(never)]
    fn prepare_other<'r>(&'r self, request: &'r SendWr, next: Next<'_, 'r>) -> Result<(), WcStatus> {
        let len = request.local.len();
        let far = |remote: Remote| match remote {
            Remote::Memory { rkey, offset } => Ok(Far { rkey: rkey.0, offset }),
            // No RNIC translates file addresses at the target.
            Remote::File { .. } | Remote::Bitmap { .. } => Err(WcStatus::RemoteInvalid),
        };
        let atomic = |remote: Remote| match far(remote)? {
            _ if len != 8 || request.local.count() != 1 => Err(WcStatus::LocalLength),
            far if !far.offset.is_multiple_of(8) => Err(WcStatus::RemoteInvalid),
            far => Ok(far),
        };
        let is_short = || (1..=self.capacities.max_inline.into()).contains(&len);
        match request.op {
            SendOp::Send | SendOp::SendImm(_) if len > MAX_MESSAGE_BYTES.into() => {
                return Err(WcStatus::LocalLength);
            }
            SendOp::Send => next.copied_if(is_short()).send(),
            SendOp::SendImm(imm) => next.copied_if(is_short()).send_imm(imm),
            // Those of memory are done.
            SendOp::Read(_) => return Err(WcStatus::RemoteInvalid),
            SendOp::Write(remote) => next.copied_if(is_short()).write(far(remote)?),
            SendOp::WriteImm(remote, imm) => next.copied_if(is_short()).write_imm(far(remote)?, imm),
            SendOp::CompareSwap { remote, expect, swap } => next.compare_swap(atomic(remote)?, expect, swap),
            SendOp::FetchAdd { remote, add } => next.fetch_add(atomic(remote)?, add),
            // No RNIC knows where a file ends: APPEND takes a target that translates.
            SendOp::Append { .. } => return Err(WcStatus::RemoteInvalid),
            SendOp::Flush { .. } if len > 0 => return Err(WcStatus::LocalLength),
            SendOp::Flush { remote, len, placement } => {
                let far = far(remote)?;
                let persistent = placement == Placement::Persistence;
                match self.reach {
                    FlushReach::Persistence => next.flush(Flush { far, len, persistent }),
                    FlushReach::Visibility if !persistent => next.flush(Flush { far, len, persistent }),
                    FlushReach::None if !persistent => {
                        let last = u64::from(len.max(1)) - 1;
                        next.read_into(Far { offset: far.offset.wrapping_add(last), ..far }, &self.landing)
                    }
                    _ => return Err(WcStatus::RemoteInvalid),
                }
            }
        }
        Ok(())
    }

    /// The status of a request that is refused here.
    #[cold]
    #[inline(never)]
    fn refusal(&self, request: &SendWr) -> Option<WcStatus> {
        let mut lists = Lists::default();
        let mut batch = Batch::of(&mut lists, 1);
        let next = batch.next(0, request.local.as_slice(), false);
        self.prepare(request, next).err()
    }

    /// The regions of its protection domain.
    pub(super) fn regions(&self) -> &Regions {
        &self.regions
    }

    /// Posts a signaled request of one of its windows.
    pub(super) fn post_of_window(
        &self,
        wr_id: WrId,
        kind: CompletionKind,
        prepare: impl FnOnce(Next<'_, '_>),
    ) -> Result<(), PostError> {
        if self.state() != QpState::ReadyToSend {
            return Err(PostError::BadState { state: self.state() });
        }
        let mut sends = self.requests.sends.lock();
        if sends.room_for(1, self.capacities.send_depth) == 0 {
            return Err(PostError::QueueFull { posted: 0 });
        }
        let number = sends.under_way.next();
        let mut batch = Batch::of(&mut sends.lists, 1);
        prepare(batch.next(number, &[], true));
        if let Err((_, error)) = self.id.post_send(batch, &[], &self.regions) {
            drop(sends);
            return Err(self.broken_by(&error));
        }
        sends.silent = 0;
        sends.push(self.requests.sending(wr_id, kind, 0, Tells::End));
        Ok(())
    }

    /// Posts as many requests as there is room for, and up to one that the RNIC could not take; returns how many.
    #[inline(always)]
    fn post_some(&self, requests: &[SendWr]) -> Result<usize, PostError> {
        let mut sends = self.requests.sends.lock();
        let room = sends.room_for(requests.len(), self.capacities.send_depth);
        if room == 0 {
            return Ok(0);
        }
        let Sends { under_way, silent, lists, .. } = &mut *sends;
        let first = under_way.next();
        let mut batch = Batch::of(lists, room);
        for request in &requests[..room] {
            if request.local.count() > self.capacities.max_sges {
                break;
            }
            let is_asked = request.signaled || *silent + 1 >= self.capacities.send_depth.div_ceil(2);
            let next = batch.next(first + batch.len() as u64, request.local.as_slice(), is_asked);
            if self.prepare(request, next).is_err() {
                break;
            }
            *silent = if is_asked { 0 } else { *silent + 1 };
        }
        let count = batch.len();
        if count == 0 {
            return Ok(0);
        }
        let result = self.id.post_send(batch, requests, &self.regions);
        let posted = match &result {
            Ok(()) => count,
            Err((posted, _)) => *posted,
        };
        // The RNIC is at work meanwhile; who takes its completions waits for the lock.
        for request in &requests[..posted] {
            let (kind, len) = (request.op.kind(), request.local.len() as u32);
            let tells = if request.signaled { Tells::End } else { Tells::Failure };
            sends.push(self.requests.sending(request.wr_id, kind, len, tells));
        }
        drop(sends);
        match result {
            Ok(()) => Ok(count),
            Err((_, error)) => Err(self.broken_by(&error)),
        }
    }

    /// As `post_some`. Apart, so that a post of one request stays short.
    #[inline(never)]
    fn post_many(&self, requests: &[SendWr]) -> Result<usize, PostError> {
        self.post_some(requests)
    }

    /// Breaks the queue pair, whose RNIC refused a post.
    #[cold]
    fn broken_by(&self, error: &io::Error) -> PostError {
        tracing::debug!(%error, "the RNIC refused a post");
        self.fail();
        PostError::BadState { state: QpState::Error }
    }

    /// Goes on behind requests that are posted: makes room, or tells why the next one was not.
    #[inline(never)]
    fn post_rest(&self, requests: &[SendWr], mut posted: usize) -> Result<(), PostError> {
        let (of, most) = (requests.len(), self.capacities.max_sges);
        let requests = &requests[..count_within(requests, most)];
        let refusal = |posted: usize| requests.get(posted).and_then(|request| self.refusal(request));
        if posted < requests.len() && refusal(posted).is_none() {
            // Unsignaled requests may be done by now.
            self.send_cq.make_room();
            posted += self.post_many(&requests[posted..])?;
        }
        match refusal(posted) {
            Some(status) => {
                self.refuse(&requests[posted..], status);
                Ok(())
            }
            None if posted < requests.len() => Err(PostError::QueueFull { posted }),
            None if posted < of => Err(PostError::TooManySges { posted, most }),
            None => Ok(()),
        }
    }
}

impl VerbsQp {
    /// Completes the first of these requests as refused and the others as flushed. Requests posted before them are flushed, too, or done, and may
    /// complete later: only here the order of completions is not that of the posts.
    fn refuse(&self, requests: &[SendWr], status: WcStatus) {
        self.fail();
        let statuses = std::iter::once(status).chain(std::iter::repeat(WcStatus::Flushed));
        self.send_cq.put(requests.iter().zip(statuses).map(|(request, status)| Completion {
            wr_id: request.wr_id,
            qp: self.requests.number,
            kind: request.op.kind(),
            status,
            byte_len: 0,
            imm: None,
            absent: false,
        }));
    }
}

impl QueuePair for VerbsQp {
    fn number(&self) -> QpNumber {
        self.requests.number
    }

    fn state(&self) -> QpState {
        match self.state.load(Ordering::Acquire) {
            INIT => QpState::Init,
            READY => QpState::ReadyToSend,
            _ => QpState::Error,
        }
    }

    fn link(&self) -> LinkKind {
        LinkKind::Rdma
    }

    fn peer(&self) -> PeerIdentity {
        self.peer.clone()
    }

    fn max_inline(&self) -> u32 {
        self.capacities.max_inline
    }

    fn path_mtu_bytes(&self) -> Option<u32> {
        Some(self.id.path_mtu_bytes().unwrap_or(0))
    }

    fn post_send(&self, requests: &[SendWr]) -> Result<(), PostError> {
        if self.state() != QpState::ReadyToSend {
            return Err(PostError::BadState { state: self.state() });
        }
        let posted = match requests {
            // Nearly all posts are of one request: that path has no loops.
            [one] => self.post_some(slice::from_ref(one)),
            _ => self.post_many(requests),
        };
        match posted? {
            posted if posted == requests.len() => Ok(()),
            posted => self.post_rest(requests, posted),
        }
    }

    fn post_recv(&self, requests: &[RecvWr]) -> Result<(), PostError> {
        self.takes_posts()?;
        if self.shared.is_some() && !requests.is_empty() {
            return Err(PostError::SharedReceives);
        }
        let most = self.capacities.max_sges;
        let within = count_within(requests, most);
        let mut receives = self.requests.receives.lock();
        for (posted, request) in requests[..within].iter().enumerate() {
            if receives.room(self.capacities.recv_depth) == 0 {
                return Err(PostError::QueueFull { posted });
            }
            let number = receives.next();
            if self.id.post_receive(number | RECEIVE, request.local.as_slice()).is_err() {
                drop(receives);
                self.fail();
                return Err(PostError::BadState { state: QpState::Error });
            }
            receives.push(request.wr_id);
        }
        if within < requests.len() { Err(PostError::TooManySges { posted: within, most }) } else { Ok(()) }
    }

    fn create_window(&self) -> Result<Arc<dyn MemoryWindow>, RdmaError> {
        let this = self.this.upgrade().expect("a queue pair that is called is alive");
        let window = Mw::new(&self.pd).map_err(|source| RdmaError::Io {
            action: "make a memory window for",
            endpoint: self.peer.to_string(),
            source,
        })?;
        Ok(Arc::new(VerbsWindow::new(this, window)))
    }

    /// The RNIC serves no file requests.
    fn set_region_owner(&self, _owner: RegionOwner) {}

    fn close(&self) {
        self.fail();
    }
}

impl Drop for VerbsQp {
    fn drop(&mut self) {
        self.requests.is_gone.store(true, Ordering::Release);
        self.events.forget(self.id.number());
        self.events.queue_pairs.fetch_sub(1, Ordering::Relaxed);
        self.fail();
        if self.shared.is_some() {
            // Some RNICs drop a queue pair's completions with it, and receives that it took would never come back.
            self.recv_cq.take_what_is_there();
        }
    }
}
