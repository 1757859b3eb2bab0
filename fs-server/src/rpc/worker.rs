//! What one worker thread needs to serve requests, and what it does with completions.
//!
//! # Invariants
//! * A connection belongs to one worker, the one whose completion queue its queue pair reports to.
//! * Completions that arrive before the acceptor handed the connection over are kept and handled then.

use super::bounce::BouncePool;
use super::connection::{Connection, WorkId};
use super::dispatch;
use super::transfer::Transfers;
use super::turns::Turns;
use crate::pool::Disk;
use crate::server::Server;
use cuttlefs_common::ids::QpNumber;
use cuttlefs_common::rdma::{Completion, ProtectionDomain, RdmaError, WcStatus};
use std::cell::RefCell;
use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Completions kept for connections that are not handed over yet. A handshake takes microseconds; more than this
/// means that nobody will come for them.
const MAX_EARLY: usize = 4096;

/// A task of a worker.
pub type Task = Pin<Box<dyn Future<Output = ()>>>;

/// One worker's state; not shared with other threads.
pub struct WorkerContext {
    /// What all workers share.
    pub server: Arc<Server>,
    /// This worker's disk.
    pub disk: Rc<dyn Disk>,
    /// This worker's bounce memory.
    pub bounce: BouncePool,
    /// This worker's transfers in flight.
    pub transfers: Transfers,
    /// This worker's turns for requests that move file bytes.
    pub turns: Turns,
    spawn: Box<dyn Fn(Task)>,
    sleep: Box<dyn Fn(Duration) -> Task>,
    connections: RefCell<HashMap<QpNumber, Arc<Connection>>>,
    early: RefCell<Vec<Completion>>,
}

impl WorkerContext {
    /// A worker's state; `spawn` runs a task on this worker, `sleep` waits on its clock.
    ///
    /// # Errors
    /// `RdmaError` if there is no bounce memory.
    pub fn new(
        server: Arc<Server>,
        disk: Rc<dyn Disk>,
        pd: &dyn ProtectionDomain,
        spawn: Box<dyn Fn(Task)>,
        sleep: Box<dyn Fn(Duration) -> Task>,
    ) -> Result<Rc<Self>, RdmaError> {
        let turns = Turns::new(server.counters.turns.clone());
        Ok(Rc::new(Self {
            server,
            disk,
            bounce: BouncePool::new(pd)?,
            transfers: Transfers::default(),
            turns,
            spawn,
            sleep,
            connections: RefCell::default(),
            early: RefCell::default(),
        }))
    }

    /// Runs a task on this worker.
    pub fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        (self.spawn)(Box::pin(task));
    }

    /// Waits on this worker's clock.
    pub fn sleep(&self, time: Duration) -> Task {
        (self.sleep)(time)
    }

    /// A connection was accepted for this worker.
    pub fn adopt(self: &Rc<Self>, connection: Arc<Connection>) {
        let number = connection.qp().number();
        self.connections.borrow_mut().insert(number, connection);
        let early: Vec<_> = self.early.borrow_mut().extract_if(.., |c| c.qp == number).collect();
        for completion in early {
            self.on_completion(completion);
        }
    }

    /// A completion of this worker's queue.
    pub fn on_completion(self: &Rc<Self>, completion: Completion) {
        let Some(connection) = self.connections.borrow().get(&completion.qp).cloned() else {
            let mut early = self.early.borrow_mut();
            if early.len() < MAX_EARLY && completion.status == WcStatus::Success {
                early.push(completion);
            }
            return;
        };
        match WorkId::decode(completion.wr_id) {
            WorkId::Receive(index) if completion.status == WcStatus::Success => {
                let task = dispatch::serve(self.clone(), connection, index, completion.byte_len);
                self.spawn(task);
            }
            // A receive ends without a message only when the queue pair is done for.
            WorkId::Receive(_) => self.forget(&connection),
            WorkId::Reply(index) => connection.sent(index),
            WorkId::Transfer(token) => {
                let result = match completion.status {
                    WcStatus::Success => Ok(completion.byte_len),
                    status => Err(status),
                };
                self.transfers.complete(token, result);
            }
        }
    }

    fn forget(&self, connection: &Connection) {
        connection.qp().close();
        self.connections.borrow_mut().remove(&connection.qp().number());
        self.server.connections.remove(connection.number());
    }
}
