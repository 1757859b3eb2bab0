//! The node's connections, and the memory of their messages: a place each in one registered slab.
//!
//! # Bounds
//! `CONNECTIONS_MAX` places; further clients are refused. A connection that says nothing useful for `HELLO_WAIT` is closed.

use super::super::chains::Kind;
use super::super::wire::MESSAGE_MAX;
use super::processor::WINDOW;
use crate::ids::QpNumber;
use crate::memory::SharedMemory;
use crate::rdma::{
    Access, HELLO_WAIT, MemoryRegion, ProtectionDomain, QpState, QueuePair, RdmaError, RecvWr, SendOp,
    SendWr, WrId,
};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::Instant;

/// The most connections: five of each of `CLIENTS_MAX` clients, and some of who only asks for figures.
pub(super) const CONNECTIONS_MAX: usize = 5 * super::CLIENTS_MAX + 8;
/// Receives of a connection: one question at a time, and the completion of a fault; or the messages of a queue that the processor executes.
pub(super) const RECEIVE_DEPTH: u32 = WINDOW + 4;
/// What such a queue tells; an answer, and the ones before it whose completions were not polled yet.
pub(super) const SEND_DEPTH: u32 = 2 * WINDOW;
/// Name of the receives.
pub(super) const RECEIVE: WrId = WrId(1);
/// Name of the completions that faults make.
pub(super) const FAULT: WrId = WrId(2);

/// Whose connection it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// It has said nothing yet.
    New,
    /// A client's control connection.
    Control(u32),
    /// It is armed with a chain of a client.
    Chains(u32, Kind),
}

/// A connection.
pub(super) struct Connection {
    pub(super) qp: Arc<dyn QueuePair>,
    pub(super) role: Role,
    place: usize,
    since: Instant,
}

/// All connections.
pub(super) struct Connections {
    slab: Arc<dyn MemoryRegion>,
    /// Taken from the front: a place rests before somebody else has it.
    free: VecDeque<usize>,
    by_number: HashMap<QpNumber, Connection>,
}

impl Connections {
    pub(super) fn new(pd: &Arc<dyn ProtectionDomain>) -> io::Result<Result<Self, RdmaError>> {
        // A question and an answer for each place.
        let memory = SharedMemory::new("cuttlefs-odrp-messages", CONNECTIONS_MAX * 2 * MESSAGE_MAX)?;
        let slab = pd.register(Arc::new(memory), Access::LOCAL);
        Ok(slab.map(|slab| Self { slab, free: (0..CONNECTIONS_MAX).collect(), by_number: HashMap::new() }))
    }

    fn receive(&self, place: usize) -> RecvWr {
        RecvWr {
            wr_id: RECEIVE,
            local: self.slab.sge((place * 2 * MESSAGE_MAX) as u64, MESSAGE_MAX as u32).into(),
        }
    }

    /// A place for a connection.
    pub(super) fn take_place(&mut self) -> Option<usize> {
        self.free.pop_front()
    }

    pub(super) fn give_back(&mut self, place: usize) {
        self.free.push_back(place);
    }

    /// Adds a connection, which has no receive yet, and posts its first one: so its first message is not heard of before the connection is known.
    pub(super) fn add(&mut self, place: usize, qp: Arc<dyn QueuePair>) {
        let since = Instant::now();
        // If it is broken already, it is found among those that are over.
        let _ = qp.post_recv(&[self.receive(place)]);
        self.by_number.insert(qp.number(), Connection { qp, role: Role::New, place, since });
    }

    pub(super) fn get(&mut self, number: QpNumber) -> Option<&mut Connection> {
        self.by_number.get_mut(&number)
    }

    /// The question that has come.
    pub(super) fn question(&self, number: QpNumber, len: u32) -> Vec<u8> {
        let mut bytes = vec![0; (len as usize).min(MESSAGE_MAX)];
        if let Some(connection) = self.by_number.get(&number) {
            self.slab.memory().read(connection.place * 2 * MESSAGE_MAX, &mut bytes);
        }
        bytes
    }

    /// Posts the receive for the next question, and sends an answer.
    pub(super) fn answer(&self, number: QpNumber, bytes: &[u8]) {
        let Some(connection) = self.by_number.get(&number) else { return };
        let at = (connection.place * 2 + 1) * MESSAGE_MAX;
        self.slab.memory().write(at, bytes);
        let send = SendWr {
            wr_id: WrId(0),
            op: SendOp::Send,
            local: self.slab.sge(at as u64, bytes.len() as u32).into(),
            signaled: false,
        };
        let receive = match connection.role {
            // Its messages go to chains from now on.
            Role::Chains(..) => Ok(()),
            Role::New | Role::Control(_) => connection.qp.post_recv(&[self.receive(connection.place)]),
        };
        if receive.and_then(|()| connection.qp.post_send(&[send])).is_err() {
            connection.qp.close();
        }
    }

    /// Closes a connection and forgets it.
    pub(super) fn remove(&mut self, number: QpNumber) {
        if let Some(connection) = self.by_number.remove(&number) {
            connection.qp.close();
            self.free.push_back(connection.place);
        }
    }

    /// The queue pairs with these roles.
    pub(super) fn of(&self, is_of: impl Fn(Role) -> bool) -> Vec<Arc<dyn QueuePair>> {
        let found = self.by_number.values().filter(|connection| is_of(connection.role));
        found.map(|connection| connection.qp.clone()).collect()
    }

    /// Connections that are gone, or were silent for too long after they connected.
    pub(super) fn over(&self, now: Instant) -> Vec<(QpNumber, Role)> {
        let is_over = |connection: &&Connection| {
            connection.qp.state() == QpState::Error
                || (connection.role == Role::New && now.duration_since(connection.since) > HELLO_WAIT)
        };
        let over = self.by_number.values().filter(is_over);
        over.map(|connection| (connection.qp.number(), connection.role)).collect()
    }
}
