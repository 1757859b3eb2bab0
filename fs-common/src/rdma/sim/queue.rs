//! Completion queues and queue pairs of the simulated RNIC.

use super::link::{Cut, Fate, MAX_MESSAGE_BYTES, MAX_TRANSFER_BYTES, Peer, SimDevice};
use super::shared_receives::SimShared;
use super::window::SimWindow;
use crate::ids::QpNumber;
use crate::life::Event;
use crate::memory::SharedMemory;
use crate::rdma::verbs::count_within;
use crate::rdma::{
    Completion, CompletionKind, CompletionQueue, FileAtomic, LinkKind, LocalPeer, MemoryWindow, PeerIdentity,
    PostError, QpConfig, QpState, QueuePair, RdmaError, RecvWr, RegionOwner, Remote, SendOp, SendWr, SgeList,
    WcStatus, WrId,
};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// A completion queue. Queue pairs deliver into it when it is polled.
pub(super) struct SimQueue {
    ready: Mutex<VecDeque<Completion>>,
    pairs: Mutex<Vec<Weak<SimPair>>>,
    /// Always readable: a sleeper looks again at once, as it should in a simulation.
    event: OwnedFd,
}

impl SimQueue {
    pub(super) fn new() -> std::io::Result<Arc<Self>> {
        let event = eventfd(1, EventfdFlags::CLOEXEC)?;
        Ok(Arc::new(Self { ready: Mutex::default(), pairs: Mutex::default(), event }))
    }

    fn push(&self, completion: Completion) {
        self.ready.lock().push_back(completion);
    }
}

impl CompletionQueue for SimQueue {
    fn poll(&self, out: &mut Vec<Completion>, max: usize) -> usize {
        let pairs: Vec<_> = {
            let mut pairs = self.pairs.lock();
            pairs.retain(|pair| pair.strong_count() > 0);
            pairs.iter().filter_map(Weak::upgrade).collect()
        };
        for pair in pairs {
            pair.deliver();
        }
        let mut ready = self.ready.lock();
        let count = ready.len().min(max);
        out.extend(ready.drain(..count));
        count
    }

    fn arm(&self) -> bool {
        self.ready.lock().is_empty()
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    fn take_event(&self) {}

    fn wait(&self, _timeout: Duration) {
        super::pump();
    }
}

struct State {
    state: QpState,
    receives: VecDeque<RecvWr>,
    /// Messages that are under way, or have arrived and wait for a receive.
    inbox: VecDeque<Message>,
    peer: Option<Weak<SimPair>>,
    owner: RegionOwner,
}

#[derive(Clone)]
struct Message {
    bytes: Vec<u8>,
    /// Length of these bytes, or of the WRITE that the immediate belongs to.
    len: u32,
    imm: Option<u32>,
    /// Looks that will still not find it.
    late: u32,
}

/// The end of a connection that a queue pair is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// The end that connected.
    Client,
    /// The end that accepted.
    Server,
}

/// A queue pair.
pub(super) struct SimPair {
    /// For windows, which hold a reference.
    this: Weak<SimPair>,
    number: QpNumber,
    role: Role,
    device: Arc<SimDevice>,
    send_cq: Arc<SimQueue>,
    recv_cq: Arc<SimQueue>,
    config: QpConfig,
    shared: Option<Arc<SimShared>>,
    state: Mutex<State>,
}

impl SimPair {
    pub(super) fn new(
        number: QpNumber,
        role: Role,
        device: Arc<SimDevice>,
        queues: (Arc<SimQueue>, Arc<SimQueue>),
        shared: Option<Arc<SimShared>>,
        config: QpConfig,
        receives: Vec<RecvWr>,
    ) -> Arc<Self> {
        let state = State {
            state: QpState::Init,
            receives: receives.into(),
            inbox: VecDeque::new(),
            peer: None,
            owner: RegionOwner::default(),
        };
        let (send_cq, recv_cq) = queues;
        let pair = Arc::new_cyclic(|this| Self {
            this: this.clone(),
            number,
            role,
            device,
            send_cq,
            recv_cq,
            config,
            shared,
            state: Mutex::new(state),
        });
        pair.recv_cq.pairs.lock().push(Arc::downgrade(&pair));
        pair
    }

    pub(super) fn device(&self) -> &SimDevice {
        &self.device
    }

    /// Completes a request of one of its windows. If it failed, the queue pair does.
    pub(super) fn complete_of_window(&self, wr_id: WrId, kind: CompletionKind, status: WcStatus) {
        let qp = self.number;
        self.send_cq.push(Completion { wr_id, qp, kind, status, byte_len: 0, imm: None, absent: false });
        if status != WcStatus::Success {
            self.fail();
        }
    }

    pub(super) fn join(self: &Arc<Self>, other: &Arc<Self>) {
        for (pair, peer) in [(self, other), (other, self)] {
            let mut state = pair.state.lock();
            state.peer = Some(Arc::downgrade(peer));
            state.state = QpState::ReadyToSend;
        }
    }

    /// Moves arrived messages into posted receives.
    fn deliver(&self) {
        let mut state = self.state.lock();
        loop {
            let State { receives, inbox, .. } = &mut *state;
            let has_receive = match &self.shared {
                Some(shared) => !shared.is_empty(),
                None => !receives.is_empty(),
            };
            let Some(message) = inbox.front_mut().filter(|_| has_receive) else { return };
            if message.late > 0 {
                message.late -= 1;
                return;
            }
            if !self.device.network().allows(self.role, Event::Taken, message.bytes.len() as u64) {
                return;
            }
            let receive = match &self.shared {
                Some(shared) => shared.take(),
                None => receives.pop_front(),
            };
            let (Some(receive), Some(message)) = (receive, inbox.pop_front()) else { return };
            let status = self.place(&receive, &message);
            let Message { len, imm, .. } = message;
            let byte_len = if status == WcStatus::Success { len } else { 0 };
            self.recv_cq.push(Completion {
                wr_id: receive.wr_id,
                qp: self.number,
                kind: if imm.is_some() { CompletionKind::RecvWithImm } else { CompletionKind::Recv },
                status,
                byte_len,
                imm: imm.filter(|_| status == WcStatus::Success),
                absent: false,
            });
            if status != WcStatus::Success {
                drop(state);
                return self.fail();
            }
        }
    }

    /// Writes a message to the memory of a receive.
    fn place(&self, receive: &RecvWr, message: &Message) -> WcStatus {
        match self.local(&receive.local, true) {
            Ok(local) if message.bytes.len() > local.len => WcStatus::LocalLength,
            Ok(local) => {
                local.put(&message.bytes);
                WcStatus::Success
            }
            Err(status) => status,
        }
    }

    /// Delivers all messages that are under way: a FLUSH comes behind them.
    fn place_all(&self) -> Result<(), WcStatus> {
        let waits = || self.state.lock().inbox.iter().any(|message| !message.bytes.is_empty());
        if !waits() {
            return Ok(());
        }
        self.state.lock().inbox.iter_mut().for_each(|message| message.late = 0);
        self.deliver();
        // An RNIC's sender would try a message without a receive again until it gives up.
        if waits() { Err(WcStatus::Disconnected) } else { Ok(()) }
    }

    /// Goes into `Error`: outstanding receives are flushed. The other end follows.
    fn fail(&self) {
        let (receives, peer) = {
            let mut state = self.state.lock();
            if state.state == QpState::Error {
                return;
            }
            state.state = QpState::Error;
            state.inbox.clear();
            (std::mem::take(&mut state.receives), state.peer.take())
        };
        for receive in receives {
            self.recv_cq.push(Completion {
                wr_id: receive.wr_id,
                qp: self.number,
                kind: CompletionKind::Recv,
                status: WcStatus::Flushed,
                byte_len: 0,
                imm: None,
                absent: false,
            });
        }
        if let Some(peer) = peer.and_then(|peer| peer.upgrade()) {
            peer.fail();
        }
    }

    fn execute(&self, request: &SendWr, absent: &AtomicBool) -> Result<u32, WcStatus> {
        let Some(peer) = self.state.lock().peer.as_ref().and_then(Weak::upgrade) else {
            return Err(WcStatus::Disconnected);
        };
        let kind = self.cut_kind(&request.op);
        let event = if kind == Cut::Reply { Event::Sent } else { Event::OneSided };
        if !self.device.network().allows(self.role, event, request.local.len()) {
            return Err(WcStatus::Disconnected);
        }
        if peer.role == Role::Server && self.device.network().server_is_over() {
            return Err(WcStatus::Disconnected);
        }
        let fate = self.device.network().fate(kind);
        if fate == Fate::Lost {
            return Err(WcStatus::Disconnected);
        }
        let target = Peer { device: &peer.device, qp: peer.number, owner: peer.state.lock().owner, absent };
        let reads_local =
            matches!(request.op, SendOp::Read(_) | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. });
        let local = self.local(&request.local, reads_local)?;
        let is_right = match request.op {
            SendOp::Send | SendOp::SendImm(_) => local.len <= MAX_MESSAGE_BYTES as usize,
            SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => local.len == 8 && local.places.len() == 1,
            SendOp::Flush { .. } => local.len == 0,
            _ => local.len <= MAX_TRANSFER_BYTES as usize,
        };
        if !is_right {
            return Err(WcStatus::LocalLength);
        }
        match request.op {
            SendOp::Send => peer.arrive(local.bytes(), local.len, None, fate),
            SendOp::SendImm(imm) => peer.arrive(local.bytes(), local.len, Some(imm), fate),
            SendOp::Read(remote) => {
                let bytes = target.read(remote, local.len)?;
                local.put(&bytes);
                return Ok(bytes.len() as u32);
            }
            SendOp::Write(remote) => target.write(remote, &local.bytes())?,
            SendOp::WriteImm(Remote::File { .. } | Remote::Bitmap { .. }, _) => {
                return Err(WcStatus::RemoteInvalid);
            }
            SendOp::WriteImm(remote, imm) => {
                target.write(remote, &local.bytes())?;
                peer.arrive(Vec::new(), local.len, Some(imm), fate);
            }
            SendOp::CompareSwap { remote, expect, swap } => {
                let old = target.atomic(remote, FileAtomic::CompareSwap { expect, swap })?;
                local.put(&old.to_le_bytes());
            }
            SendOp::FetchAdd { remote, add } => {
                let old = target.atomic(remote, FileAtomic::FetchAdd { add })?;
                local.put(&old.to_le_bytes());
            }
            SendOp::Append { filekey, placed } => {
                let placed = self.local(&placed.into(), true)?;
                if placed.len != 8 {
                    return Err(WcStatus::LocalLength);
                }
                let offset = target.append(filekey, &local.bytes())?;
                placed.put(&offset.to_le_bytes());
            }
            SendOp::Flush { remote, len, placement } => {
                peer.place_all()?;
                target.flush(remote, len as usize, placement)?;
                return Ok(0);
            }
        }
        Ok(local.len as u32)
    }

    fn cut_kind(&self, op: &SendOp) -> Cut {
        match (self.role, matches!(op, SendOp::Send | SendOp::SendImm(_))) {
            (Role::Client, true) => Cut::Request,
            (Role::Client, false) => Cut::OneSided,
            (Role::Server, true) => Cut::Reply,
            (Role::Server, false) => Cut::Transfer,
        }
    }

    fn arrive(&self, bytes: Vec<u8>, len: usize, imm: Option<u32>, fate: Fate) {
        let late = if let Fate::Late(looks) = fate { looks } else { 0 };
        let message = Message { bytes, len: len as u32, imm, late };
        let mut state = self.state.lock();
        if fate == Fate::Twice {
            state.inbox.push_back(message.clone());
        }
        state.inbox.push_back(message);
    }

    fn local(&self, ranges: &SgeList, write: bool) -> Result<Local, WcStatus> {
        let mut local = Local::default();
        for range in ranges.as_slice() {
            let (memory, offset) = self.device.local(*range, write).ok_or(WcStatus::LocalProtection)?;
            local.places.push((memory, offset, range.len as usize));
            local.len += range.len as usize;
        }
        Ok(local)
    }
}

/// Checked local ranges, in order: one string of bytes.
#[derive(Default)]
struct Local {
    places: Vec<(Arc<SharedMemory>, usize, usize)>,
    len: usize,
}

impl Local {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        let mut rest = &mut bytes[..];
        for (memory, offset, len) in &self.places {
            let (part, behind) = rest.split_at_mut(*len);
            memory.read(*offset, part);
            rest = behind;
        }
        bytes
    }

    /// Fills the ranges from the front.
    fn put(&self, bytes: &[u8]) {
        let mut rest = &bytes[..bytes.len().min(self.len)];
        for (memory, offset, len) in &self.places {
            let (part, behind) = rest.split_at(rest.len().min(*len));
            memory.write(*offset, part);
            rest = behind;
        }
    }
}

impl QueuePair for SimPair {
    fn number(&self) -> QpNumber {
        self.number
    }

    fn state(&self) -> QpState {
        self.state.lock().state
    }

    fn link(&self) -> LinkKind {
        LinkKind::Sim
    }

    fn peer(&self) -> PeerIdentity {
        PeerIdentity::Local(LocalPeer::root())
    }

    /// Everything is copied by the post, since requests execute then.
    fn max_inline(&self) -> u32 {
        self.config.max_inline
    }

    fn post_send(&self, requests: &[SendWr]) -> Result<(), PostError> {
        let state = self.state();
        if state != QpState::ReadyToSend {
            return Err(PostError::BadState { state });
        }
        let most = self.config.max_sges;
        let within = count_within(requests, most);
        let posted = within.min(self.config.send_depth as usize);
        for request in &requests[..posted] {
            let absent = AtomicBool::new(false);
            // One before it may have broken the queue pair.
            let result = match self.state() {
                QpState::ReadyToSend => self.execute(request, &absent),
                _ => Err(WcStatus::Flushed),
            };
            let absent = self.looks_pages_up() && absent.into_inner();
            if result.is_ok() && !request.signaled && !absent {
                continue;
            }
            self.send_cq.push(Completion {
                wr_id: request.wr_id,
                qp: self.number,
                kind: request.op.kind(),
                status: result.err().unwrap_or(WcStatus::Success),
                byte_len: result.unwrap_or(0),
                imm: None,
                absent,
            });
            if result.is_err() {
                self.fail();
            }
        }
        match () {
            () if posted < within => Err(PostError::QueueFull { posted }),
            () if posted < requests.len() => Err(PostError::TooManySges { posted, most }),
            () => Ok(()),
        }
    }

    fn post_recv(&self, requests: &[RecvWr]) -> Result<(), PostError> {
        if self.shared.is_some() && !requests.is_empty() {
            return Err(PostError::SharedReceives);
        }
        let mut state = self.state.lock();
        if state.state == QpState::Error {
            return Err(PostError::BadState { state: state.state });
        }
        let most = self.config.max_sges;
        let posted = count_within(requests, most);
        for (posted, request) in requests[..posted].iter().enumerate() {
            if state.receives.len() >= self.config.recv_depth as usize {
                return Err(PostError::QueueFull { posted });
            }
            state.receives.push_back(*request);
        }
        if posted < requests.len() { Err(PostError::TooManySges { posted, most }) } else { Ok(()) }
    }

    fn create_window(&self) -> Result<Arc<dyn MemoryWindow>, RdmaError> {
        let this = self.this.upgrade().expect("a queue pair that is called is alive");
        Ok(Arc::new(SimWindow::new(this)))
    }

    fn looks_pages_up(&self) -> bool {
        self.device.looks_pages_up()
    }

    fn set_region_owner(&self, owner: RegionOwner) {
        self.state.lock().owner = owner;
    }

    fn close(&self) {
        self.fail();
    }
}
