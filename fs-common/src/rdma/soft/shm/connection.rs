//! A queue pair over shared memory.
//!
//! # Locks
//! `receive` before `send`; `announcements` on its own, under the registry's connection list.

use super::flush::{Answer, Outstanding};
use super::regions::{Announcements, PeerMemory, PeerRegion};
use super::ring::{self, Body, DIRECTORY_LEN, RecordHeader, RecordOf, Side};
use crate::breach::Breach;
use crate::ids::QpNumber;
use crate::memory::SharedMemory;
use crate::rdma::soft::cq::{Pumped, SoftCq};
use crate::rdma::soft::queue::{Done, LinkQp, MAX_MESSAGE_BYTES, MAX_TRANSFER_BYTES, QpCore, writes_local};
use crate::rdma::soft::region::{Local, Need};
use crate::rdma::soft::sys;
use crate::rdma::verbs::{QpState, Remote, SendOp, SendWr, WcStatus};
use parking_lot::Mutex;
use rustix::event::epoll::EventFlags;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long the end of a connection waits for a peer that has said that it ends it to be through with its last copy.
const HANG_UP_WAIT: Duration = Duration::from_millis(20);

pub(super) struct Sending {
    queue: VecDeque<SendWr>,
    pub(super) tail: u64,
    /// `tail` behind the last message: when the peer has taken everything before it, all messages are placed.
    pub(super) messages_end: u64,
    /// A FLUSH that the target does, and the requests that were executed behind it.
    pub(super) outstanding: Outstanding,
    /// A request of the last doorbell, or one that it found waiting, met an absent page.
    met_absent: bool,
    /// Answers to the peer's FLUSHes for which the ring had no room.
    pub(super) answers: VecDeque<Answer>,
    pub(super) peers: HashMap<u32, PeerRegion>,
    /// The time since which the first queued request waits for an announcement.
    pub(super) waiting_since: Option<Instant>,
}

/// The results of a handshake.
pub(super) struct ShmParts {
    pub(super) socket: OwnedFd,
    pub(super) memory: SharedMemory,
    pub(super) side: Side,
    pub(super) doorbell: OwnedFd,
    pub(super) peer_doorbell: OwnedFd,
    pub(super) peer_pages: [SharedMemory; 2],
}

/// A queue pair over shared memory.
pub(in crate::rdma::soft) struct ShmQp {
    pub(super) this: Weak<ShmQp>,
    pub(super) core: QpCore,
    pub(super) parts: ShmParts,
    /// Bytes taken from the peer's ring: the private original, of which shared memory has a copy for the peer.
    receive: Mutex<u64>,
    /// A copy of `receive`, to see without the lock whether anything has come. Written under the lock.
    head_seen: AtomicU64,
    /// A record waits in the ring for a receive to be posted.
    starved: AtomicBool,
    pub(super) send: Mutex<Sending>,
    /// Whether `send.queue` or `send.answers` holds anything. Written under its lock.
    pub(super) blocked: AtomicBool,
    pub(super) announcements: Mutex<Announcements>,
    /// Whether `announcements.pending` holds anything. Written under its lock.
    pub(super) unannounced: AtomicBool,
    /// Whether this side has ended the connection: the private original of a word in shared memory.
    has_ended: AtomicBool,
}

/// What happened to the first queued request.
pub(super) enum Step {
    Done(Done),
    /// The target does a FLUSH: its answer will complete it.
    Asked {
        sequence: u64,
    },
    Wait,
    Failed(WcStatus),
    Broken(Breach),
}

impl ShmQp {
    pub(super) fn new(core: QpCore, parts: ShmParts) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            this: this.clone(),
            core,
            parts,
            receive: Mutex::new(0),
            head_seen: AtomicU64::new(0),
            starved: AtomicBool::new(false),
            send: Mutex::new(Sending {
                queue: VecDeque::new(),
                tail: 0,
                messages_end: 0,
                outstanding: Outstanding::default(),
                met_absent: false,
                answers: VecDeque::new(),
                peers: HashMap::new(),
                waiting_since: None,
            }),
            blocked: AtomicBool::new(false),
            announcements: Mutex::new(Announcements {
                directory: vec![0; DIRECTORY_LEN],
                pending: VecDeque::new(),
            }),
            unannounced: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
        })
    }

    /// Goes live: state, completion queues, region announcements.
    pub(super) fn start(self: &Arc<Self>) -> std::io::Result<()> {
        self.core.become_state(QpState::ReadyToSend);
        self.core.registry.add_connection(self);
        let watched = [
            (self.parts.doorbell.as_fd(), EventFlags::IN | EventFlags::ET),
            (self.parts.socket.as_fd(), EventFlags::RDHUP),
        ];
        for queue in self.core.queues() {
            queue.attach(self.clone(), &watched)?;
        }
        Ok(())
    }

    fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.parts.doorbell.as_fd(), self.parts.socket.as_fd()]
    }

    /// Whether the peer has closed the connection, or died; costs a system call. Pairs with `end`: either this side sees that the peer has closed, or
    /// the peer, when it reads its memory after that, finds all bytes that were stored there before this call.
    pub(super) fn peer_is_gone(&self) -> bool {
        fence(Ordering::SeqCst);
        let closed = ring::closed(&self.parts.memory, self.parts.side.other());
        closed.load(Ordering::Acquire) != 0 || sys::is_hung_up(&self.parts.socket)
    }

    /// Rings the peer's doorbell if it sleeps. Call after publishing.
    pub(super) fn ring_peer(&self) {
        fence(Ordering::SeqCst);
        if self.parts.peer_pages.iter().any(SoftCq::page_wants_event) {
            sys::ring_eventfd(&self.parts.peer_doorbell);
        }
    }

    /// The peer's memory for a request, with key, range and right checked.
    fn place<'a>(
        &self,
        sending: &'a Sending,
        remote: Remote,
        len: u64,
        need: Need,
    ) -> Result<(&'a PeerMemory, u64), WcStatus> {
        let Remote::Memory { rkey, offset } = remote else {
            // On this link initiators translate file addresses, not the target.
            return Err(WcStatus::RemoteInvalid);
        };
        let region = sending.peers.get(&rkey.0).ok_or(WcStatus::RemoteAccess)?;
        if !self.is_alive(rkey.0, region) {
            return Err(WcStatus::RemoteAccess);
        }
        let is_writable = match &region.memory {
            PeerMemory::Whole(memory) => memory.is_writable(),
            PeerMemory::Paged(..) => true,
        };
        need.check(region.access, region.memory.len(), is_writable, offset, len)?;
        Ok((&region.memory, offset))
    }

    /// As [`Self::place`], for requests of memory that stays where it is.
    pub(super) fn target<'a>(
        &self,
        sending: &'a Sending,
        remote: Remote,
        len: u64,
        need: Need,
    ) -> Result<(&'a SharedMemory, usize), WcStatus> {
        let (memory, offset) = self.place(sending, remote, len, need)?;
        Ok((memory.whole()?, offset as usize))
    }

    pub(super) fn put_record(&self, sending: &mut Sending, header: RecordHeader, body: Body<'_>) -> Step {
        let memory = &self.parts.memory;
        for attempt in 0..2 {
            match ring::produce(memory, self.parts.side, &mut sending.tail, &header, body) {
                Ok(Some(())) => {
                    if header.of == RecordOf::Message {
                        sending.messages_end = sending.tail;
                    }
                    if attempt > 0 {
                        ring::waits(memory, self.parts.side).store(0, Ordering::Relaxed);
                    }
                    return Step::Done(Done { len: header.len, absent: false });
                }
                Ok(None) => {
                    // Announces the wait, then looks again: the peer frees space, then looks for the announcement.
                    ring::waits(memory, self.parts.side).store(1, Ordering::Relaxed);
                    fence(Ordering::SeqCst);
                }
                Err(error) => return Step::Broken(error.into()),
            }
        }
        Step::Wait
    }

    /// Executes one request; `published` is set if the peer must be rung.
    fn execute(&self, sending: &mut Sending, request: &SendWr, published: &mut bool) -> Step {
        let local = match self.core.registry.local(&request.local, writes_local(&request.op)) {
            Ok(local) => local,
            Err(status) => return Step::Failed(status),
        };
        if let SendOp::Read(remote)
        | SendOp::Write(remote)
        | SendOp::WriteImm(remote, _)
        | SendOp::CompareSwap { remote, .. }
        | SendOp::FetchAdd { remote, .. }
        | SendOp::Flush { remote, .. } = request.op
            && let Remote::Memory { rkey, .. } = remote
            && !self.prepare(sending, rkey.0)
        {
            return Step::Wait;
        }
        let result = match request.op {
            SendOp::Send | SendOp::SendImm(_) => {
                if local.len() > MAX_MESSAGE_BYTES as usize {
                    return Step::Failed(WcStatus::LocalLength);
                }
                let imm = if let SendOp::SendImm(imm) = request.op { Some(imm) } else { None };
                let header = RecordHeader { len: local.len() as u32, imm, of: RecordOf::Message };
                let held = match local.hold() {
                    Ok(held) => held,
                    Err(status) => return Step::Failed(status),
                };
                let step = self.put_record(sending, header, Body::Held(&held));
                *published |= matches!(step, Step::Done(_));
                return step;
            }
            SendOp::Read(remote) => self.read(sending, &local, remote),
            SendOp::Write(remote) => self.write(sending, &local, remote),
            SendOp::WriteImm(remote, imm) => match self.write(sending, &local, remote) {
                Ok(done) => {
                    // If the ring is full now, the WRITE is repeated later, which is allowed.
                    let header = RecordHeader { len: done.len, imm: Some(imm), of: RecordOf::Write };
                    let step = self.put_record(sending, header, Body::Empty);
                    *published |= matches!(step, Step::Done(_));
                    return if let Step::Done(_) = step { Step::Done(done) } else { step };
                }
                Err(status) => Err(status),
            },
            SendOp::CompareSwap { remote, expect, swap } => self.atomic(sending, &local, remote, |word| {
                word.compare_exchange(expect, swap, Ordering::AcqRel, Ordering::Acquire)
                    .unwrap_or_else(|old| old)
            }),
            SendOp::Flush { remote, len, placement } => {
                if local.len() != 0 {
                    return Step::Failed(WcStatus::LocalLength);
                }
                let step = self.flush(sending, remote, len, placement);
                *published |= matches!(step, Step::Asked { .. });
                return step;
            }
            SendOp::FetchAdd { remote, add } => {
                self.atomic(sending, &local, remote, |word| word.fetch_add(add, Ordering::AcqRel))
            }
            // Here the initiator translates, and only the target may change files.
            SendOp::Append { .. } => Err(WcStatus::RemoteInvalid),
        };
        match result {
            Ok(done) => Step::Done(done),
            Err(status) => Step::Failed(status),
        }
    }

    fn read(&self, sending: &Sending, local: &Local, remote: Remote) -> Result<Done, WcStatus> {
        check_transfer(local)?;
        let (memory, offset) = self.place(sending, remote, local.len() as u64, Need::Read)?;
        let all_there = memory.copy_out(offset, &local.hold()?);
        Ok(Done { len: local.len() as u32, absent: !all_there })
    }

    fn write(&self, sending: &Sending, local: &Local, remote: Remote) -> Result<Done, WcStatus> {
        check_transfer(local)?;
        let (memory, offset) = self.place(sending, remote, local.len() as u64, Need::Write)?;
        let all_there = memory.copy_in(offset, &local.hold()?);
        Ok(Done { len: local.len() as u32, absent: !all_there })
    }

    fn atomic(
        &self,
        sending: &Sending,
        local: &Local,
        remote: Remote,
        operate: impl FnOnce(&AtomicU64) -> u64,
    ) -> Result<Done, WcStatus> {
        if !local.is_word() {
            return Err(WcStatus::LocalLength);
        }
        let (memory, offset) = self.target(sending, remote, 8, Need::Atomic)?;
        let held = local.hold()?;
        let old = operate(memory.atomic_u64(offset));
        held.write(&old.to_le_bytes());
        Ok(Done { len: 8, absent: false })
    }

    /// Executes as many queued requests as can be, in order. Returns why the queue pair broke, if it did.
    pub(super) fn drain_queue(&self, sending: &mut Sending) -> Option<Breach> {
        self.drain(sending, &[])
    }

    /// Executes queued requests, and these new ones behind them: most of these never see the queue. Those that cannot be executed now are queued.
    fn drain(&self, sending: &mut Sending, mut fresh: &[SendWr]) -> Option<Breach> {
        let mut broken = None;
        let mut published = match self.drain_answers(sending) {
            Ok(published) => published,
            Err(reason) => {
                sending.queue.extend(fresh);
                return Some(reason);
            }
        };
        while !sending.outstanding.has_failed() {
            let queued = sending.queue.front().copied();
            let Some(request) = queued.as_ref().or(fresh.first()) else { break };
            let step = self.execute(sending, request, &mut published);
            match step {
                Step::Wait => break,
                Step::Broken(reason) => {
                    broken = Some(reason);
                    break;
                }
                Step::Done(_) | Step::Asked { .. } | Step::Failed(_) if queued.is_some() => {
                    sending.queue.pop_front();
                }
                Step::Done(_) | Step::Asked { .. } | Step::Failed(_) => fresh = &fresh[1..],
            }
            match step {
                Step::Done(done) => {
                    sending.met_absent |= done.absent;
                    self.complete_in_order(sending, request, Ok(done));
                }
                Step::Asked { sequence } => sending.outstanding.ask(request, sequence),
                Step::Failed(status) if !sending.outstanding.is_empty() => {
                    self.complete_in_order(sending, request, Err(status));
                }
                Step::Failed(status) => {
                    let kind = request.op.kind();
                    self.core.become_state(QpState::Error);
                    self.core.complete_send(request.wr_id, kind, status, true, 0);
                    broken = Some(Breach::new(format_args!("{kind:?} failed with {status:?}")));
                    break;
                }
                Step::Wait | Step::Broken(_) => unreachable!("they end the loop"),
            }
        }
        if !fresh.is_empty() {
            sending.queue.extend(fresh);
        }
        let blocked = !sending.queue.is_empty() || !sending.answers.is_empty();
        self.blocked.store(blocked, Ordering::Release);
        if published {
            self.ring_peer();
        }
        broken
    }

    /// Flushes all queued requests; the state is `Error`.
    fn flush_sends(&self, sending: &mut Sending, mut first: WcStatus) {
        for (wr_id, kind) in sending.outstanding.drain() {
            self.core.complete_send(wr_id, kind, first, true, 0);
            first = WcStatus::Flushed;
        }
        sending.answers.clear();
        for request in sending.queue.drain(..) {
            self.core.complete_send(request.wr_id, request.op.kind(), first, true, 0);
            first = WcStatus::Flushed;
        }
        self.blocked.store(false, Ordering::Release);
    }

    /// Ends the connection. `cut`: the peer ended it.
    fn end(&self, reason: Option<&Breach>, cut: bool) {
        // The state does not decide this: a failed request may have changed it already.
        let first = !self.has_ended.swap(true, Ordering::AcqRel);
        ring::closed(&self.parts.memory, self.parts.side).store(1, Ordering::Release);
        fence(Ordering::SeqCst);
        self.core.become_state(QpState::Error);
        let status = if cut { WcStatus::Disconnected } else { WcStatus::Flushed };
        self.flush_sends(&mut self.send.lock(), status);
        self.core.flush_receives();
        if !first {
            return;
        }
        if let Some(reason) = reason {
            tracing::warn!(qp = self.core.number.0, peer = %self.core.peer, "shm connection closed: {reason}");
        }
        self.ring_peer();
        let is_over = cut && self.core.registry.has_paged() && self.peer_has_hung_up();
        let _ = rustix::net::shutdown(&self.parts.socket, rustix::net::Shutdown::Both);
        for queue in self.core.queues() {
            queue.detach(self.core.number, &self.descriptors());
            queue.wake();
        }
        self.core.registry.remove_connection(self, is_over);
    }

    /// Whether the peer, which has ended the connection, copies nothing any more: it is dead, or has hung up, which it does behind its last copy.
    fn peer_has_hung_up(&self) -> bool {
        let since = Instant::now();
        while !sys::is_hung_up(&self.parts.socket) {
            if since.elapsed() > HANG_UP_WAIT {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }

    /// Moves records from the ring into posted receives. Returns why the queue pair broke, if it did.
    fn deliver(&self) -> Option<Breach> {
        let memory = &self.parts.memory;
        let side = self.parts.side;
        let mut own_head = self.receive.lock();
        let before = *own_head;
        let mut broken = None;
        self.starved.store(false, Ordering::Release);
        while self.core.is_ready() {
            let header = match ring::peek(memory, side, *own_head) {
                Ok(Some(header)) => header,
                Ok(None) => break,
                Err(error) => {
                    broken = Some(error.into());
                    break;
                }
            };
            if matches!(header.of, RecordOf::Flush | RecordOf::Flushed) {
                let body = ring::flush_body(memory, side, *own_head);
                // The space is given back before the FLUSH is acted on: its answer may find the other ring full, but never this one.
                ring::consume(memory, side, &mut own_head, &header, None);
                broken = self.take_flush_record(header.of, &body);
                if broken.is_some() {
                    break;
                }
                continue;
            }
            let Some(receive) = self.core.take_receive() else {
                self.starved.store(true, Ordering::Release);
                break;
            };
            if header.of == RecordOf::Message && header.len as usize > receive.local.len() {
                self.core.become_state(QpState::Error);
                self.core.complete_receive(receive.wr_id, WcStatus::LocalLength, 0, None);
                broken = Some(Breach::new(format_args!(
                    "a message of {} bytes is longer than the receive posted",
                    header.len
                )));
                break;
            }
            let held = match receive.local.hold() {
                Ok(held) => held,
                Err(status) => {
                    self.core.become_state(QpState::Error);
                    self.core.complete_receive(receive.wr_id, status, 0, None);
                    broken = Some(Breach::of("a posted receive names memory that was let go of"));
                    break;
                }
            };
            ring::consume(memory, side, &mut own_head, &header, Some(&held));
            drop(held);
            self.core.complete_receive(receive.wr_id, WcStatus::Success, header.len, header.imm);
        }
        self.head_seen.store(*own_head, Ordering::Release);
        if *own_head != before {
            fence(Ordering::SeqCst);
            if ring::waits(memory, side.other()).load(Ordering::Relaxed) != 0 {
                self.ring_peer();
            }
        }
        broken
    }
}

/// The bound of one-sided transfers, which is the same on every link.
fn check_transfer(local: &Local) -> Result<(), WcStatus> {
    if local.len() > MAX_TRANSFER_BYTES as usize { Err(WcStatus::LocalLength) } else { Ok(()) }
}

impl Pumped for ShmQp {
    fn number(&self) -> QpNumber {
        self.core.number
    }

    fn has_rings(&self) -> bool {
        true
    }

    fn pump_rings(&self) {
        if !self.core.is_ready() {
            return;
        }
        let memory = &self.parts.memory;
        // Loaded before the ring is looked at: a peer that closed has put its last record in before.
        let peer_closed = ring::closed(memory, self.parts.side.other()).load(Ordering::Acquire) != 0;
        let produced = ring::tail(memory, self.parts.side.other()).load(Ordering::Acquire);
        if produced != self.head_seen.load(Ordering::Acquire)
            && (!self.starved.load(Ordering::Acquire) || self.core.has_receive())
            && let Some(reason) = self.deliver()
        {
            self.end(Some(&reason), false);
            return;
        }
        if self.blocked.load(Ordering::Acquire) {
            // A statement of its own, so that the lock is released before `end` takes it.
            let broken = self.drain_queue(&mut self.send.lock());
            if let Some(reason) = broken {
                self.end(Some(&reason), false);
                return;
            }
        }
        if self.unannounced.load(Ordering::Acquire) {
            self.send_announcements(&mut self.announcements.lock());
        }
        if peer_closed {
            self.end(None, true);
        }
    }

    fn pump_socket(&self) {}

    fn event(&self, flags: EventFlags) {
        self.pump_rings();
        if flags.intersects(EventFlags::HUP | EventFlags::RDHUP | EventFlags::ERR) && self.core.is_ready() {
            // Records that the peer sent before it went are delivered; it cannot send more.
            self.pump_rings();
            self.end(None, true);
        }
    }
}

impl LinkQp for ShmQp {
    fn core(&self) -> &QpCore {
        &self.core
    }

    fn submit(&self, requests: &[SendWr]) -> bool {
        let mut sending = self.send.lock();
        sending.met_absent = false;
        let broken = if self.core.is_ready() {
            self.drain(&mut sending, requests)
        } else {
            sending.queue.extend(requests);
            None
        };
        let is_ready = broken.is_none() && self.core.is_ready();
        if broken.is_none() && !is_ready {
            // The queue pair was closed after the caller had looked at its state.
            self.flush_sends(&mut sending, WcStatus::Flushed);
        }
        let is_known =
            is_ready && sending.queue.is_empty() && sending.outstanding.is_empty() && !sending.met_absent;
        drop(sending);
        if let Some(reason) = broken {
            self.end(Some(&reason), false);
        }
        is_known
    }

    fn receives_posted(&self) {
        self.pump_rings();
    }

    fn looks_pages_up(&self) -> bool {
        true
    }

    fn fail(&self, reason: Option<&Breach>) {
        self.end(reason, false);
    }
}
