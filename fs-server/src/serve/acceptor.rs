//! One thread for each listener: accepts connections and hands each to a worker of its peer (`placement`).

use super::{Door, join};
use crate::rnics::RnicIndex;
use crate::rpc::connection::{Connection, ReceivesOf};
use crate::rpc::queues::{RnicQueues, SEND_DEPTH};
use crate::server::Server;
use crate::shares::Resource;
use cuttlefs_common::descriptors::is_for_peers;
use cuttlefs_common::panic_ends;
use cuttlefs_common::rdma::{Incoming, LinkKind, Listener, QpConfig, RdmaError};
use cuttlefs_common::rpc::POSTED_INLINE_BYTES;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

const RECEIVE_DEPTH: u32 = crate::rpc::connection::RECEIVES as u32;

/// A listener's thread.
pub(super) struct Acceptor {
    listener: Arc<dyn Listener>,
    thread: JoinHandle<()>,
}

impl Acceptor {
    pub(super) fn start(
        listener: Box<dyn Listener>,
        server: &Arc<Server>,
        rnic: RnicIndex,
        doors: Vec<Door>,
    ) -> std::io::Result<Self> {
        let listener: Arc<dyn Listener> = Arc::from(listener);
        let thread = std::thread::Builder::new().name("acceptor".into()).spawn({
            let (listener, server) = (listener.clone(), server.clone());
            move || {
                loop {
                    let accepted = listener.accept();
                    panic_ends::plant("acceptor");
                    match accepted {
                        Ok(incoming) => {
                            let peer = server.admission.shares.peer(&incoming.peer());
                            let door = &doors[peer.home().next_worker()];
                            admit(incoming, &server, rnic, door);
                        }
                        Err(RdmaError::Closed) => return,
                        Err(error) => tracing::warn!(%error, "a connection did not come about"),
                    }
                }
            }
        })?;
        Ok(Self { listener, thread })
    }

    pub(super) fn close(&self) {
        self.listener.close();
    }

    pub(super) fn join(self) {
        self.close();
        join(self.thread, "acceptor");
    }
}

fn admit(incoming: Box<dyn Incoming>, server: &Arc<Server>, rnic: RnicIndex, door: &Door) {
    if let Some(connection) = accept(incoming, server, rnic, &door.queues[rnic.0]) {
        // Waits while many connections wait for the worker, and holds up the next peer that connects. A worker that has stopped drops the connection.
        let _ = door.connections.send_blocking(connection);
    }
}

/// Accepts a connection of this RNIC, on the queues of a worker there.
pub(super) fn accept(
    incoming: Box<dyn Incoming>,
    server: &Arc<Server>,
    rnic: RnicIndex,
    queues: &RnicQueues,
) -> Option<Arc<Connection>> {
    let identity = incoming.peer();
    let place = match server.admission.shares.peer(&identity).take(Resource::Connections) {
        Ok(place) => place,
        Err(full) => {
            server.counters.refused.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(peer = %identity, %full, "refusing a connection");
            incoming.refuse(&full.to_string());
            return None;
        }
    };
    if let Some(reason) = queues.lacks_room(place.peer().key()) {
        server.counters.refused.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(peer = %identity, reason, "refusing a connection");
        incoming.refuse(reason);
        return None;
    }
    let pd = server.rnics.get(rnic).pd.as_ref();
    let prepare = || -> Result<_, RdmaError> {
        let receives_of = match &queues.receives {
            Some(of_peers) => ReceivesOf::Peer(of_peers.of(place.peer().key(), pd)?),
            None => ReceivesOf::Connection,
        };
        let qp = match &receives_of {
            ReceivesOf::Peer(shared) => QpConfig::with_shared(&queues.cq, SEND_DEPTH, shared.queue()),
            ReceivesOf::Connection => QpConfig::new(&queues.cq, SEND_DEPTH, RECEIVE_DEPTH),
        };
        let region = Connection::register(pd, &receives_of)?;
        if incoming.link() == LinkKind::Rdma && !is_for_peers(region.memory().fd(), false) {
            return Err(RdmaError::Io {
                action: "get a descriptor for",
                endpoint: "a connection".into(),
                source: std::io::Error::other("nearly as many files are open as may be (ulimit -n)"),
            });
        }
        let receives = Connection::receives(region.as_ref(), &receives_of);
        Ok((qp.inline(POSTED_INLINE_BYTES), receives, region, receives_of))
    };
    let failed = |error| {
        tracing::warn!(peer = %identity, %error, "a connection did not come about; its client is told");
        error
    };
    let (qp, receives, region, receives_of) = match prepare().map_err(failed) {
        Ok(prepared) => prepared,
        Err(error) => {
            incoming.refuse(&error.for_the_peer());
            return None;
        }
    };
    match incoming.accept(qp, receives).map_err(failed) {
        Ok(qp) => {
            let entry = server.admission.connections.entry();
            let connection = Arc::new(Connection::new((entry, place), rnic, qp, region, receives_of));
            server.counters.connections.fetch_add(1, Ordering::Relaxed);
            server.admission.connections.add(&connection);
            Some(connection)
        }
        Err(_) => None,
    }
}
