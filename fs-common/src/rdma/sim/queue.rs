//! Completion queues and queue pairs of the simulated RNIC.

use super::link::{Cut, Fate, Peer, SimDevice};
use super::shared_receives::SimShared;
use crate::ids::{Lkey, QpNumber};
use crate::life::Event;
use crate::memory::SharedMemory;
use crate::rdma::{
    Completion, CompletionKind, CompletionQueue, FileAtomic, LinkKind, LocalPeer, PeerIdentity, PostError,
    QpConfig, QpState, QueuePair, RecvWr, RegionOwner, SendOp, SendWr, Sge, WcStatus,
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
        let pair = Arc::new(Self {
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
        if message.bytes.len() > receive.local.len as usize {
            return WcStatus::LocalLength;
        }
        match self.device.local(receive.local, true) {
            Some((memory, offset)) => memory.write_word_last(offset, &message.bytes),
            None => return WcStatus::LocalProtection,
        }
        WcStatus::Success
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
        if !self.device.network().allows(self.role, event, u64::from(request.local.len)) {
            return Err(WcStatus::Disconnected);
        }
        if peer.role == Role::Server && self.device.network().server_is_over() {
            return Err(WcStatus::Disconnected);
        }
        let fate = self.device.network().fate(kind);
        if fate == Fate::Lost {
            return Err(WcStatus::Disconnected);
        }
        let target = Peer { device: &peer.device, owner: peer.state.lock().owner, absent };
        let reads_local =
            matches!(request.op, SendOp::Read(_) | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. });
        let local = self.local(request.local, reads_local)?;
        match request.op {
            SendOp::Send => peer.arrive(local.bytes(), local.len, None, fate),
            SendOp::SendImm(imm) => peer.arrive(local.bytes(), local.len, Some(imm), fate),
            SendOp::Read(remote) => {
                let bytes = target.read(remote, local.len)?;
                local.put(&bytes);
                return Ok(bytes.len() as u32);
            }
            SendOp::Write(remote) => target.write(remote, &local.bytes())?,
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
                let placed = self.local(placed, true)?;
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

    fn local(&self, sge: Sge, write: bool) -> Result<Local, WcStatus> {
        if sge.len == 0 && sge.lkey == Lkey(0) {
            return Ok(Local { memory: None, len: 0 });
        }
        let place = self.device.local(sge, write).ok_or(WcStatus::LocalProtection)?;
        Ok(Local { memory: Some(place), len: sge.len as usize })
    }
}

/// A checked local range.
struct Local {
    memory: Option<(Arc<SharedMemory>, usize)>,
    len: usize,
}

impl Local {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        if let Some((memory, offset)) = &self.memory {
            memory.read(*offset, &mut bytes);
        }
        bytes
    }

    fn put(&self, bytes: &[u8]) {
        if let Some((memory, offset)) = &self.memory {
            memory.write(*offset, &bytes[..bytes.len().min(self.len)]);
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
        for (posted, request) in requests.iter().enumerate() {
            let state = self.state();
            if state != QpState::ReadyToSend {
                return Err(PostError::BadState { state });
            }
            if posted >= self.config.send_depth as usize {
                return Err(PostError::QueueFull { posted });
            }
            let absent = AtomicBool::new(false);
            let result = self.execute(request, &absent);
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
        Ok(())
    }

    fn post_recv(&self, requests: &[RecvWr]) -> Result<(), PostError> {
        if self.shared.is_some() && !requests.is_empty() {
            return Err(PostError::SharedReceives);
        }
        let mut state = self.state.lock();
        if state.state == QpState::Error {
            return Err(PostError::BadState { state: state.state });
        }
        for (posted, request) in requests.iter().enumerate() {
            if state.receives.len() >= self.config.recv_depth as usize {
                return Err(PostError::QueueFull { posted });
            }
            state.receives.push_back(*request);
        }
        Ok(())
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
