//! The context in which a worker thread serves requests, and its treatment of completions.
//!
//! # Invariants
//! * A connection belongs to one worker, the one whose completion queue (of the RNIC it came by) its queue pair reports to.
//! * Queue pairs are numbered by their RNIC: here a connection is named by both.
//! * Completions that arrive before the acceptor handed the connection over are kept and handled then (`early`).
//! * A connection stays here until it is over (`Connection::is_over`): every completion finds it. This is checked after
//!   each completion, after each request, and once a second (`sweep`), for another worker's reply can be the last posted
//!   one. `retire` is the one place where a worker lets go of a connection.

use super::bounce::BouncePool;
use super::connection::{Arrived, Connection, RECEIVES, WorkId};
use super::dispatch;
use super::early::{Early, Gone, Name};
use super::queues::RnicQueues;
use super::shared_receives::PeersReceives;
use super::transfer::Transfers;
use super::turns::{MOST_RUNNING, PEER_RUNNING, Turns};
use crate::files::{self, FaultJob};
use crate::pool::Disk;
use crate::rnics::RnicIndex;
use crate::server::Server;
use cuttlefs_common::fair::Payer;
use cuttlefs_common::rdma::{Completion, CompletionKind, RdmaError, WcStatus};
use std::cell::RefCell;
use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How often connections and transfers are checked. Deadlines are counted in sweeps.
const SWEEP: Duration = Duration::from_secs(1);

/// A task of a worker.
pub(crate) type Task = Pin<Box<dyn Future<Output = ()>>>;

/// One worker's state; not shared with other threads.
pub(crate) struct WorkerContext {
    /// The state that all workers share.
    pub server: Arc<Server>,
    /// This worker's disk.
    pub disk: Rc<dyn Disk>,
    /// This worker's bounce memory.
    pub bounce: BouncePool,
    /// This worker's transfers in flight.
    pub transfers: Transfers,
    /// This worker's turns for requests that move file bytes.
    pub turns: Turns,
    /// This worker's turn to climb from a directory to the root (`meta::Climb`): there is one.
    pub climbs: Turns,
    /// The receives of its peers at each RNIC that has shared receives.
    receives: Vec<Option<Arc<PeersReceives>>>,
    spawn: Box<dyn Fn(Payer, Task)>,
    sleep: Box<dyn Fn(Duration) -> Task>,
    connections: RefCell<HashMap<Name, Arc<Connection>>>,
    /// Completions of connections that the acceptor has not handed over yet.
    early: RefCell<Early<Came>>,
    /// Connections whose messages by shared receives may still come.
    gone: RefCell<Gone>,
}

fn name_of(connection: &Connection) -> Name {
    (connection.rnic(), connection.qp().number())
}

/// A completion, with its message if that came by a shared receive.
struct Came {
    id: WorkId,
    completion: Completion,
    message: Vec<u8>,
}

impl WorkerContext {
    /// A worker's state. `spawn` runs a task on this worker on a payer's account, `sleep` waits on its clock.
    ///
    /// # Errors
    /// `RdmaError` if there is no bounce memory.
    pub(crate) fn new(
        server: Arc<Server>,
        disk: Rc<dyn Disk>,
        queues: &[RnicQueues],
        spawn: Box<dyn Fn(Payer, Task)>,
        sleep: Box<dyn Fn(Duration) -> Task>,
    ) -> Result<Rc<Self>, RdmaError> {
        let turns = Turns::new(MOST_RUNNING, PEER_RUNNING, server.counters.turns.clone());
        let climbs = Turns::new(1, 1, server.counters.climbs.clone());
        let bounce = BouncePool::new(&server.rnics, server.counters.bounce.clone())?;
        let receives = queues.iter().map(|queues| queues.receives.clone()).collect();
        Ok(Rc::new(Self {
            server,
            disk,
            bounce,
            transfers: Transfers::default(),
            turns,
            climbs,
            receives,
            spawn,
            sleep,
            connections: RefCell::default(),
            early: RefCell::default(),
            gone: RefCell::default(),
        }))
    }

    /// Runs a task on this worker on the server's own account.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        self.spawn_for(Payer::OWN, task);
    }

    /// Runs a task on this worker on a peer's account.
    pub(crate) fn spawn_for(&self, payer: Payer, task: impl Future<Output = ()> + 'static) {
        (self.spawn)(payer, Box::pin(task));
    }

    /// Makes a one-sided change for which the NIC engine would have to wait.
    pub(crate) fn run_fault(self: &Rc<Self>, job: FaultJob) {
        let context = self.clone();
        self.spawn_for(job.payer(), async move {
            // Else the server is going down. The job is dropped, and its request refused.
            if context.server.drain.begin() {
                files::run_fault(&context.server.files, context.disk.as_ref(), job).await;
                context.server.drain.end();
            }
        });
    }

    /// Waits on this worker's clock.
    pub(crate) fn sleep(&self, time: Duration) -> Task {
        (self.sleep)(time)
    }

    /// Starts the sweeps, which go on for as long as the worker.
    pub(crate) fn start_sweeps(self: &Rc<Self>) {
        let context = self.clone();
        self.spawn(async move {
            loop {
                context.sleep(SWEEP).await;
                context.sweep();
            }
        });
    }

    /// Ends connections whose peers have kept the server waiting for too long, and drops those that are over.
    fn sweep(&self) {
        for connection in self.transfers.sweep() {
            self.note_ended(&connection, "it does not answer a transfer");
        }
        for receives in self.receives.iter().flatten() {
            self.server.counters.receives_ran_dry.fetch_add(receives.ran_dry(), Ordering::Relaxed);
        }
        self.early.borrow_mut().sweep();
        self.gone.borrow_mut().sweep();
        let connections: Vec<_> = self.connections.borrow().values().cloned().collect();
        for connection in connections {
            if let Some(reason) = connection.sweep() {
                self.note_ended(&connection, reason);
            }
            self.retire(&connection);
        }
    }

    fn note_ended(&self, connection: &Connection, reason: &str) {
        self.server.counters.timed_out.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(peer = ?connection.qp().peer(), reason, "closing a connection");
    }

    /// Takes over a connection that was accepted for this worker.
    pub(crate) fn adopt(self: &Rc<Self>, connection: Arc<Connection>) {
        let name = name_of(&connection);
        self.connections.borrow_mut().insert(name, connection);
        let early = self.early.borrow_mut().take(name);
        for came in early {
            self.on_arrival(name, came);
        }
    }

    /// Handles a completion from this worker's queue of an RNIC.
    pub(crate) fn on_completion(self: &Rc<Self>, rnic: RnicIndex, completion: Completion) {
        let id = WorkId::decode(completion.wr_id);
        let message = match (id, &self.receives[rnic.0]) {
            (WorkId::Shared { queue, index }, Some(receives)) => {
                // If it is the immediate data of an RDMA WRITE, the length is that of the WRITE, and there is no message.
                let is_message = completion.kind == CompletionKind::Recv;
                receives.take(queue, index, if is_message { completion.byte_len as usize } else { 0 })
            }
            (WorkId::Shared { .. }, None) => unreachable!("only a worker with shared receives posts some"),
            _ => Vec::new(),
        };
        self.on_arrival((rnic, completion.qp), Came { id, completion, message });
    }

    fn on_arrival(self: &Rc<Self>, name: Name, came: Came) {
        let Some(connection) = self.connections.borrow().get(&name).cloned() else {
            // A shared receive that comes back from a queue pair that is gone is nothing to keep.
            let is_returned =
                came.completion.status != WcStatus::Success && matches!(came.id, WorkId::Shared { .. });
            if !is_returned && !self.gone.borrow().has(name) {
                self.early.borrow_mut().keep(name, came);
            }
            return;
        };
        let Came { id, completion, message } = came;
        if !matches!(id, WorkId::Shared { .. }) {
            connection.completed();
        }
        match id {
            WorkId::Receive(_) | WorkId::Shared { .. } if completion.status != WcStatus::Success => {}
            // An RDMA WRITE with immediate data: no request comes that way.
            WorkId::Receive(_) | WorkId::Shared { .. } if completion.kind != CompletionKind::Recv => {
                dispatch::end_connection(self, &connection, &"immediate data, which no request has");
            }
            WorkId::Shared { .. } if !connection.begin() => {
                // Those behind the first one too many find it ended.
                if !connection.has_ended() {
                    let reason = format!("more than {RECEIVES} requests at once");
                    dispatch::end_connection(self, &connection, &reason);
                }
            }
            WorkId::Shared { .. } => self.serve(&connection, Arrived::Copied(message)),
            WorkId::Receive(index) => {
                self.serve(&connection, Arrived::InPlace { index, len: completion.byte_len });
            }
            WorkId::Reply(index) => connection.sent(index),
            WorkId::Transfer(token) => {
                let result = match completion.status {
                    WcStatus::Success => Ok(completion.byte_len),
                    status => Err(status),
                };
                self.transfers.complete(token, result);
            }
        }
        self.retire(&connection);
    }

    fn serve(self: &Rc<Self>, connection: &Arc<Connection>, arrived: Arrived) {
        let task = dispatch::serve(self.clone(), connection.clone(), arrived);
        self.spawn_for(connection.peer().payer(), task);
    }

    /// Drops a connection if it is over. Idempotent.
    pub(super) fn retire(&self, connection: &Connection) {
        let name = name_of(connection);
        if connection.is_over()
            && self.connections.borrow_mut().remove(&name).is_some()
            && connection.shares_receives()
        {
            self.gone.borrow_mut().note(name);
        }
    }
}
