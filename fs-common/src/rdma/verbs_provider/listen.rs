//! Listening over librdmacm, and the decision which clients may connect.

use super::asks::Asks;
use super::cm::Events;
use super::domain::{NoQueuePair, VerbsPd};
use super::hello::{Answer, Ask, Doorkeeper, NO_KEY, Refusal, Verdict};
use super::sys::{Event, Happened, Id, RETRIES, ReadDepth};
use crate::rdma::PeerKey;
use crate::rdma::peer::PeerIdentity;
use crate::rdma::url::Endpoint;
use crate::rdma::verbs::{Incoming, LinkKind, Listener, QpConfig, QueuePair, RdmaError, RecvWr};
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Clients that the kernel queues meanwhile.
const BACKLOG: i32 = 128;

/// A client that asked and may connect.
struct Admitted {
    id: Id,
    peer: PeerIdentity,
    answer: Answer,
    reads: ReadDepth,
}

/// The part of a listener that it shares with the thread for events.
pub(super) struct Shared {
    id: Id,
    endpoint: Endpoint,
    pd: VerbsPd,
    /// Passes clients that ask to [`Shared::asked`].
    events: Arc<Events>,
    /// `None`: everybody may connect.
    doorkeeper: Option<Doorkeeper>,
    admitted: Mutex<Asks<Admitted>>,
    came: Condvar,
    closed: AtomicBool,
}

impl Shared {
    /// A client asks to connect.
    pub(super) fn asked(&self, event: Event) {
        let Event { what: Happened::Asked, asker: Some(id), private, reads, retries, .. } = event else {
            return;
        };
        let refuse = |reason: &str| {
            self.pd.device().note_refused();
            let endpoint = &self.endpoint;
            let peer = id.peer_address().map_or_else(|| "unknown".to_owned(), |address| address.to_string());
            tracing::warn!(%endpoint, peer, "refused a client; it was told: {reason}");
            id.reject(&Refusal::Reason(reason.to_owned()).encode());
        };
        let Some(address) = id.peer_address() else {
            return refuse("your address is of no kind that is known here");
        };
        let ask = match Ask::parse(&private) {
            Ok(ask) => ask,
            Err(unheard) => return refuse(&unheard.to_string()),
        };
        if retries > RETRIES {
            return refuse(&format!("{retries} retransmissions are too many; ask for {RETRIES} at most"));
        }
        let (peer, answer) = match &self.doorkeeper {
            None => (PeerIdentity::Remote(address), Answer::WITHOUT_PROOF),
            Some(doorkeeper) => match doorkeeper.look(&ask, address.ip(), Instant::now()) {
                Verdict::Known(name, answer) => (PeerIdentity::Key { name, address }, answer),
                Verdict::Challenged(challenge) => return id.reject(&Refusal::Challenge(challenge).encode()),
                Verdict::Keyless => return refuse(NO_KEY),
                Verdict::Unknown => {
                    return refuse("your key is none of this server's; give one that it has (--key)");
                }
            },
        };
        let key = PeerKey::from(&peer);
        let ask = Admitted { id, peer, answer, reads };
        let mut admitted = self.admitted.lock();
        let gone = if self.closed.load(Ordering::SeqCst) { Some(ask) } else { admitted.push(key, ask) };
        drop(admitted);
        self.came.notify_one();
        if let Some(Admitted { id, .. }) = gone {
            let reason = "too many ask at once, or the server is stopping; ask again";
            id.reject(&Refusal::Reason(reason.to_owned()).encode());
        }
    }
}

/// A listener; see the module.
pub(super) struct VerbsListener(Arc<Shared>);

impl VerbsListener {
    pub(super) fn bind(pd: VerbsPd, endpoint: &Endpoint) -> Result<Self, RdmaError> {
        let device = pd.device().clone();
        let doorkeeper = device.doorkeeper()?;
        let address = super::address_to_listen(endpoint)?;
        let failed = |action| move |source| RdmaError::Io { action, endpoint: endpoint.to_string(), source };
        let events = device.events()?;
        let id = Id::new(Some(events.channel())).map_err(failed("make an identifier for"))?;
        id.bind(address).map_err(failed("bind"))?;
        if id.context() != Some(device.context()) {
            return Err(super::another_device(endpoint));
        }
        let endpoint = match endpoint {
            Endpoint::Rdma { host, via, .. } => {
                Endpoint::Rdma { host: host.clone(), port: id.local_port(), via: via.clone() }
            }
            other => other.clone(),
        };
        let number = id.number();
        let shared = Arc::new(Shared {
            id,
            endpoint: endpoint.clone(),
            pd,
            events: events.clone(),
            doorkeeper,
            admitted: Mutex::default(),
            came: Condvar::new(),
            closed: AtomicBool::new(false),
        });
        events.listens(number, &shared);
        let listener = Self(shared);
        listener.0.id.listen(BACKLOG).map_err(|source| RdmaError::Io {
            action: "listen on",
            endpoint: endpoint.to_string(),
            source,
        })?;
        Ok(listener)
    }
}

impl Listener for VerbsListener {
    fn endpoint(&self) -> Endpoint {
        self.0.endpoint.clone()
    }

    fn accept(&self) -> Result<Box<dyn Incoming>, RdmaError> {
        let mut admitted = self.0.admitted.lock();
        loop {
            if self.0.closed.load(Ordering::SeqCst) {
                return Err(RdmaError::Closed);
            }
            let Some(Admitted { id, peer, answer, reads }) = admitted.pop() else {
                self.0.came.wait(&mut admitted);
                continue;
            };
            // Asked without the lock: it is a system call, and events come meanwhile. A peer that went is told by nobody (`Id::still_asks`), and a queue
            // pair that is made for it is the dearest part of a connection.
            drop(admitted);
            if id.still_asks() {
                let listener = self.0.clone();
                return Ok(Box::new(VerbsIncoming { listener, id: Some(id), peer, answer, reads }));
            }
            tracing::debug!(%peer, "who asked to connect is gone");
            drop(id);
            admitted = self.0.admitted.lock();
        }
    }

    fn close(&self) {
        let left = {
            let mut admitted = self.0.admitted.lock();
            self.0.closed.store(true, Ordering::SeqCst);
            admitted.drain()
        };
        self.0.came.notify_all();
        for Admitted { id, .. } in left {
            id.reject(&Refusal::Reason("the server is stopping".to_owned()).encode());
        }
    }
}

impl Drop for VerbsListener {
    fn drop(&mut self) {
        self.close();
        self.0.events.forget(self.0.id.number());
    }
}

/// A client that asked and may connect.
struct VerbsIncoming {
    listener: Arc<Shared>,
    /// `Some` until it is accepted or refused.
    id: Option<Id>,
    peer: PeerIdentity,
    answer: Answer,
    reads: ReadDepth,
}

impl Incoming for VerbsIncoming {
    fn peer(&self) -> PeerIdentity {
        self.peer.clone()
    }

    fn link(&self) -> LinkKind {
        LinkKind::Rdma
    }

    fn accept(
        mut self: Box<Self>,
        qp: QpConfig,
        receives: Vec<RecvWr>,
    ) -> Result<Arc<dyn QueuePair>, RdmaError> {
        let id = self.id.take().expect("it is answered once");
        let pd = &self.listener.pd;
        let number = id.number();
        let endpoint = self.listener.endpoint.to_string();
        let told = |id: &Id, error: RdmaError| {
            // Without this the kernel would refuse by itself, without a reason.
            id.reject(&Refusal::Reason(error.for_the_peer()).encode());
            error
        };
        let (made, events) = pd
            .make_qp(id, self.peer.clone(), qp, &endpoint)
            .map_err(|NoQueuePair { id, error }| told(&id, error))?;
        events.connected(number, &made);
        if let Err(error) = made.post_recv(&receives) {
            let source = std::io::Error::other(error);
            let error =
                told(made.id(), RdmaError::Io { action: "post receives for a client of", endpoint, source });
            made.fail();
            return Err(error);
        }
        let accept = || {
            made.id().accept(&self.answer.encode(), self.reads.min(pd.device().limits().reads))?;
            made.id().hurry_messages()?;
            made.id().misses_its_peer()
        };
        if let Err(source) = accept() {
            made.fail();
            return Err(RdmaError::Io { action: "accept a client of", endpoint, source });
        }
        made.begin();
        Ok(made)
    }

    fn refuse(mut self: Box<Self>, reason: &str) {
        if let Some(id) = self.id.take() {
            id.reject(&Refusal::Reason(reason.to_owned()).encode());
        }
    }
}

impl Drop for VerbsIncoming {
    fn drop(&mut self) {
        if let Some(id) = self.id.take() {
            id.reject(&Refusal::Reason("the server cannot take this connection".to_owned()).encode());
        }
    }
}
