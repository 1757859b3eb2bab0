//! The memory node: it lends pages to clients, and its threads have nothing to do with a page that is loaded, stored or freed.
//!
//! # The threads
//! One accepts connections. One (`service`) answers control messages, hears of chains that faulted, and ticks: budgets, leases, connections that are gone.
//! Both sleep while clients work. Only where no RNIC executes chains, the service thread does that, too (`processor`).
//!
//! # Setting right
//! When the queue was found empty, and when a client is gone, the gate of all chains is closed, the queue is made anew from the tables
//! ([`super::pages::Pages::set_right`]), and the gate is opened. Messages that came meanwhile wait, and are started then by this thread.

mod client;
mod connections;
mod processor;
mod service;

use super::chains::Kind;
use super::figures::NodeFigures;
use super::pages::Pages;
use crate::rdma::chain::Gate;
use crate::rdma::{
    Access, Device, Endpoint, Listener, MemoryRegion, PeerIdentity, ProtectionDomain, QpConfig, RdmaError,
};
use client::Client;
use connections::{CONNECTIONS_MAX, Connections, RECEIVE_DEPTH, SEND_DEPTH};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// The most clients of a node.
pub const CLIENTS_MAX: usize = 64;
/// How often the service looks at budgets, leases and connections.
const TICK: Duration = Duration::from_millis(100);
/// Depth of the completion queue of all connections: with all of them, a place for each request that may be outstanding.
const CQ_DEPTH: u32 = CONNECTIONS_MAX as u32 * (SEND_DEPTH + RECEIVE_DEPTH);

/// Options of a node.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// Pages to lend.
    pub pages: u64,
    /// The most pages that one client may have mapped.
    pub budget: u64,
    /// The most pages of a client's swap space, whether mapped or not.
    pub table_pages: u64,
    /// A client that is silent for this long is gone.
    pub lease: Duration,
    /// The only user whose processes on this machine may connect. `None`: whoever the endpoint lets in.
    pub only_user: Option<u32>,
}

impl NodeOptions {
    /// A node with this many pages, of which each client may have all, and with no client turned away.
    pub fn new(pages: u64) -> Self {
        Self {
            pages,
            budget: pages,
            table_pages: 16 * pages.max(1024),
            lease: Duration::from_secs(10),
            only_user: None,
        }
    }

    fn may_connect(&self, peer: &PeerIdentity) -> bool {
        let is_user = |user| matches!(peer, PeerIdentity::Local(local) if local.uid == user);
        self.only_user.is_none_or(is_user)
    }
}

/// Errors of starting a node.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The RNIC refused.
    #[error("{0}")]
    Rdma(#[from] RdmaError),
    /// There is no memory.
    #[error("cannot get memory for {pages} pages of 4 KiB: {source}; give fewer")]
    Memory {
        /// Pages.
        pages: u64,
        /// Why.
        source: io::Error,
    },
    /// A thread cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
}

/// What the node's threads share.
struct Shared {
    options: NodeOptions,
    pd: Arc<dyn ProtectionDomain>,
    cq: Arc<dyn crate::rdma::CompletionQueue>,
    pages: Pages,
    pool: Arc<dyn MemoryRegion>,
    free: Arc<dyn MemoryRegion>,
    gate: Arc<Gate>,
    /// Whether chains are executed by the service thread: no RNIC does.
    by_processor: bool,
    state: Mutex<State>,
    stopping: AtomicBool,
    control_messages: AtomicU64,
    faults: AtomicU64,
    set_right: AtomicU64,
    gone: AtomicU64,
}

/// Clients and connections. Only the service thread changes clients; the accepting thread adds connections.
struct State {
    clients: HashMap<u32, Client>,
    last_client: u32,
    connections: Connections,
    /// What clients that are gone had done.
    past: [u64; 4],
    past_entries: u64,
}

/// A memory node that serves.
pub struct MemoryNode {
    shared: Arc<Shared>,
    listener: Arc<dyn Listener>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl MemoryNode {
    /// Starts to serve at an endpoint.
    ///
    /// # Errors
    /// `NodeError`, with advice.
    pub fn start(
        device: &Arc<dyn Device>,
        endpoint: &Endpoint,
        options: NodeOptions,
    ) -> Result<Self, NodeError> {
        // Over shared memory there is no RNIC beside the two processors.
        let by_processor = !device.capabilities().chains || matches!(endpoint, Endpoint::Shm(_));
        let memory = |source| NodeError::Memory { pages: options.pages, source };
        let pages = Pages::new(options.pages).map_err(memory)?;
        let pd = device.alloc_pd()?;
        // No right for peers: they reach it by chains only.
        let pool = pd.register(pages.pool.clone(), Access::LOCAL)?;
        let free = pd.register(pages.free.clone(), Access::LOCAL)?;
        let connections = Connections::new(&pd).map_err(memory)??;
        let shared = Arc::new(Shared {
            options,
            cq: device.create_cq(CQ_DEPTH)?,
            pd,
            pages,
            pool,
            free,
            gate: Arc::default(),
            by_processor,
            state: Mutex::new(State {
                clients: HashMap::new(),
                last_client: 0,
                connections,
                past: [0; 4],
                past_entries: 0,
            }),
            stopping: AtomicBool::new(false),
            control_messages: AtomicU64::new(0),
            faults: AtomicU64::new(0),
            set_right: AtomicU64::new(0),
            gone: AtomicU64::new(0),
        });
        let listener: Arc<dyn Listener> = Arc::from(shared.pd.listen(endpoint)?);
        let mut node = Self { shared, listener, threads: Vec::new() };
        let (shared, listener) = (node.shared.clone(), node.listener.clone());
        node.spawn("odrp-accept", move || accept(&shared, &*listener))?;
        let shared = node.shared.clone();
        node.spawn("odrp-service", move || service::serve(&shared))?;
        Ok(node)
    }

    fn spawn(&mut self, name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), NodeError> {
        let builder = std::thread::Builder::new().name(name.to_owned());
        self.threads.push(builder.spawn(run).map_err(NodeError::Thread)?);
        Ok(())
    }

    /// The endpoint, with the port that the system chose if none was given.
    pub fn endpoint(&self) -> Endpoint {
        self.listener.endpoint()
    }

    /// Its figures.
    pub fn figures(&self) -> NodeFigures {
        self.shared.figures(&self.shared.state.lock())
    }
}

impl Drop for MemoryNode {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        self.listener.close();
        for thread in self.threads.drain(..) {
            // A panic has ended the process, or is the test's own.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn figures(&self, state: &State) -> NodeFigures {
        let mut figures = NodeFigures {
            clients: state.clients.len() as u64,
            clients_max: CLIENTS_MAX as u64,
            budget: self.options.budget,
            by_processor: self.by_processor,
            pages: self.pages.count(),
            free: self.pages.free_count(),
            chains: state.past,
            entries: state.past_entries,
            control_messages: self.control_messages.load(Ordering::Relaxed),
            faults: self.faults.load(Ordering::Relaxed),
            set_right: self.set_right.load(Ordering::Relaxed),
            gone: self.gone.load(Ordering::Relaxed),
            ..NodeFigures::default()
        };
        for client in state.clients.values() {
            figures.mapped += client.mapped();
            for kind in Kind::ALL {
                figures.chains[kind.index()] += client.chains(kind);
            }
            figures.entries += client.entries();
        }
        figures
    }
}

/// Accepts connections until the listener is closed.
fn accept(shared: &Arc<Shared>, listener: &dyn Listener) {
    loop {
        let incoming = match listener.accept() {
            Ok(incoming) => incoming,
            Err(RdmaError::Closed) => return,
            Err(error) => {
                tracing::warn!("a client could not connect: {error}");
                continue;
            }
        };
        if !shared.options.may_connect(&incoming.peer()) {
            tracing::warn!(peer = %incoming.peer(), "turned away: this memory node is for another user's programs only");
            incoming.refuse("this memory node is for another user's programs only");
            continue;
        }
        let Some(place) = shared.state.lock().connections.take_place() else {
            incoming.refuse("the memory node has no room for further connections; try again later");
            continue;
        };
        let config = QpConfig::new(&shared.cq, SEND_DEPTH, RECEIVE_DEPTH);
        match incoming.accept(config, Vec::new()) {
            Ok(qp) => shared.state.lock().connections.add(place, qp),
            Err(error) => {
                tracing::debug!("a client went away while it connected: {error}");
                shared.state.lock().connections.give_back(place);
            }
        }
    }
}

#[cfg(test)]
pub(super) use client::work_queue as work_queue_of;
