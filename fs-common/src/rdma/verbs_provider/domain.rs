//! Protection domains over libibverbs: registering memory, connecting, listening.

use super::cm::Events;
use super::cq::VerbsCq;
use super::hello::{Answer, Ask, Refusal};
use super::listen::VerbsListener;
use super::queue::{Parts, VerbsQp};
use super::regions::Regions;
use super::shared_receives::VerbsSrq;
use super::sys::{Capacities, Event, Happened, Id, Mr, Pd, Rights};
use super::{Shared, address_of, another_device};
use crate::memory::SharedMemory;
use crate::persist::Persistence;
use crate::rdma::peer::PeerIdentity;
use crate::rdma::shared_receives::SharedReceiveQueue;
use crate::rdma::url::Endpoint;
use crate::rdma::verbs::{
    Access, CompletionQueue, ConnectOptions, Connected, Listener, MemoryRegion, ProtectionDomain, QpConfig,
    QueuePair, RdmaError, WindowId,
};
use std::any::Any;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A key's challenge and its answer; and once more, for two who asked within a millisecond, and for a challenge that grew old.
const ATTEMPTS: usize = 4;

/// See the module.
#[derive(Clone)]
pub(super) struct VerbsPd {
    device: Arc<Shared>,
    pd: Arc<Pd>,
    regions: Arc<Regions>,
}

impl VerbsPd {
    pub(super) fn new(device: Arc<Shared>, pd: Arc<Pd>) -> Self {
        Self { device, pd, regions: Arc::default() }
    }

    pub(super) fn device(&self) -> &Arc<Shared> {
        &self.device
    }

    fn queue(&self, queue: Arc<dyn CompletionQueue>) -> Result<Arc<VerbsCq>, RdmaError> {
        let queue: Arc<dyn Any + Send + Sync> = queue;
        let queue = queue.downcast::<VerbsCq>();
        queue.map_err(|_| RdmaError::Unsupported("the completion queue belongs to another device".to_owned()))
    }

    fn shared(&self, queue: Arc<dyn SharedReceiveQueue>) -> Result<Arc<VerbsSrq>, RdmaError> {
        let queue: Arc<dyn Any + Send + Sync> = queue;
        let queue = queue.downcast::<VerbsSrq>();
        queue.map_err(|_| RdmaError::Unsupported("the shared receives belong to another device".to_owned()))
    }

    /// Gives an identifier its queue pair.
    pub(super) fn make_qp(
        &self,
        mut id: Id,
        peer: PeerIdentity,
        config: QpConfig,
        endpoint: &str,
    ) -> Result<(Arc<VerbsQp>, Arc<Events>), RdmaError> {
        let shared = config.shared_receives.map(|queue| self.shared(queue)).transpose()?;
        let most = self.device.limits().queue_depth;
        let recv_depth = if shared.is_some() { 0 } else { config.recv_depth };
        for (depth, least) in [(config.send_depth, 1), (recv_depth, u32::from(shared.is_none()))] {
            if depth < least || depth > most {
                return Err(RdmaError::Unsupported(format!(
                    "a queue depth of {depth} is not between 1 and {most}, this RNIC's most"
                )));
            }
        }
        let queues = [self.queue(config.send_cq)?, self.queue(config.recv_cq)?];
        let wanted = Capacities { send_depth: config.send_depth, recv_depth, max_inline: config.max_inline };
        let failed =
            |source| RdmaError::Io { action: "make a queue pair for", endpoint: endpoint.to_owned(), source };
        let promises = [
            queues[0].promise(wanted.send_depth).map_err(failed)?,
            queues[1].promise(wanted.recv_depth).map_err(failed)?,
        ];
        if let Some(shared) = &shared {
            shared.completes_into(&queues[1]).map_err(failed)?;
        }
        let raw_queues = queues.each_ref().map(|queue| &queue.raw);
        let raw_shared = shared.as_ref().map(|shared| shared.raw());
        let (raw_number, max_inline) =
            id.make_qp(&self.pd, raw_queues, raw_shared, wanted).map_err(failed)?;
        let events = self.device.events()?;
        let parts = Parts {
            number: self.device.next_number(),
            raw_number,
            peer,
            id,
            events: events.clone(),
            queues,
            promises,
            shared,
            regions: self.regions.clone(),
            pd: self.pd.clone(),
            capacities: Capacities { max_inline, ..wanted },
        };
        Ok((VerbsQp::new(parts), events))
    }

    /// One attempt to connect. `Err(Again)`: with this request.
    fn try_connect(
        &self,
        endpoint: &Endpoint,
        address: SocketAddr,
        ask: Ask,
        options: &ConnectOptions,
        deadline: Instant,
    ) -> Result<Arc<VerbsQp>, NotConnected> {
        let failed = |action| move |source| RdmaError::Io { action, endpoint: endpoint.to_string(), source };
        let events = self.device.events()?;
        let id = Id::new(Some(events.channel())).map_err(failed("make an identifier for"))?;
        let number = id.number();
        let setup = events.set_up(number);
        let forget = Forget(&events, number);
        let next = |wanted: Happened| -> Result<Event, RdmaError> {
            let event = setup.next(deadline).ok_or(io::ErrorKind::TimedOut.into());
            let event = event.map_err(failed("connect to"))?;
            match event.what {
                what if what == wanted || what == Happened::Rejected => Ok(event),
                Happened::Failed(errno) => {
                    Err(failed("connect to")(io::Error::from_raw_os_error(if errno > 0 {
                        errno
                    } else {
                        libc::ECONNREFUSED
                    })))
                }
                _ => Err(failed("connect to")(io::ErrorKind::ConnectionAborted.into())),
            }
        };
        let left_ms = || {
            let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            i32::try_from(left.as_millis()).unwrap_or(i32::MAX)
        };
        id.resolve_address(address, left_ms()).map_err(failed("find a way to"))?;
        next(Happened::AddressResolved)?;
        if id.context() != Some(self.device.context()) {
            return Err(another_device(endpoint).into());
        }
        id.resolve_route(left_ms()).map_err(failed("find a way to"))?;
        next(Happened::RouteResolved)?;
        let peer = match self.device.own_key_name() {
            Some(name) => PeerIdentity::Key { name, address },
            None => PeerIdentity::Remote(address),
        };
        let (qp, _) = self.make_qp(id, peer, options.qp.clone(), &endpoint.to_string())?;
        qp.post_recv(&options.receives).map_err(io::Error::other).map_err(failed("post receives for"))?;
        qp.id().connect(&ask.encode(), self.device.limits().reads).map_err(failed("connect to"))?;
        let event = next(Happened::Established)?;
        let refused = |reason: String| RdmaError::Refused { endpoint: endpoint.to_string(), reason };
        let prover = self.device.prover();
        if event.what == Happened::Rejected {
            if event.private.iter().all(|byte| *byte == 0) {
                return Err(failed("connect to")(io::ErrorKind::ConnectionRefused.into()).into());
            }
            return Err(match (Refusal::parse(&event.private), prover) {
                (Ok(Refusal::Challenge(challenge)), Some(prover)) => {
                    NotConnected::Again(prover.ask(challenge))
                }
                (Ok(Refusal::Challenge(_)), None) => refused(
                    "it wants a key; give the server's (--key, or for a mount -o key=FILE)".to_owned(),
                )
                .into(),
                (Ok(Refusal::Reason(reason)), _) => refused(reason).into(),
                (Err(unheard), _) => self.handshake(endpoint, unheard.to_string()).into(),
            });
        }
        let answer = Answer::parse(&event.private);
        let answer = answer.map_err(|unheard| self.handshake(endpoint, unheard.to_string()))?;
        if prover.is_some_and(|prover| !prover.believes(&ask, answer)) {
            let reason = "it has not proven that it has your key: another server is there, or one that was started with --insecure";
            return Err(self.handshake(endpoint, reason.to_owned()).into());
        }
        qp.id().hurry_messages().map_err(failed("set up the queue pair for"))?;
        events.connected(number, &qp);
        std::mem::forget(forget);
        qp.begin();
        Ok(qp)
    }

    fn handshake(&self, endpoint: &Endpoint, reason: String) -> RdmaError {
        RdmaError::Handshake { endpoint: endpoint.to_string(), reason }
    }
}

/// Why an attempt brought no connection.
enum NotConnected {
    Again(Ask),
    Failed(RdmaError),
}

impl From<RdmaError> for NotConnected {
    fn from(error: RdmaError) -> Self {
        Self::Failed(error)
    }
}

/// Has events of an identifier forgotten that came to nothing.
struct Forget<'e>(&'e Events, usize);

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.0.forget(self.1);
    }
}

impl ProtectionDomain for VerbsPd {
    fn register(
        &self,
        memory: Arc<SharedMemory>,
        access: Access,
    ) -> Result<Arc<dyn MemoryRegion>, RdmaError> {
        let Access { local_write, remote_read, remote_write, remote_atomic, remote_flush: _, own_bytes } =
            access;
        let unsupported = |what: &str| Err(RdmaError::Unsupported(what.to_owned()));
        if (local_write || remote_write || remote_atomic) && !memory.is_writable() {
            return unsupported("a read-only mapping cannot be registered for writing");
        }
        if own_bytes > 0 {
            return unsupported(
                "rings over RDMA hardware are not there yet: a region is writable as a whole",
            );
        }
        let windows = self.device.limits().has_windows;
        let rights = Rights { local_write, remote_read, remote_write, remote_atomic, windows };
        let len = memory.len();
        let region = Mr::new(&self.pd, memory, rights).map_err(|source| RdmaError::Io {
            action: "register memory (it is pinned: `ulimit -l` must allow it, or LimitMEMLOCK= of the service) with",
            endpoint: format!("{} ({len} bytes)", self.device.name()),
            source,
        })?;
        Ok(Arc::new(self.regions.add(region)))
    }

    fn register_persistent(
        &self,
        _memory: Arc<SharedMemory>,
        _access: Access,
        _domain: Arc<dyn Persistence>,
    ) -> Result<Arc<dyn MemoryRegion>, RdmaError> {
        Err(RdmaError::Unsupported("FLUSH over RDMA hardware is not there yet".to_owned()))
    }

    fn create_shared_receives(&self, depth: u32) -> Result<Arc<dyn SharedReceiveQueue>, RdmaError> {
        let most = self.device.limits().shared_receives;
        if depth == 0 || depth > most {
            return Err(RdmaError::Unsupported(format!(
                "{depth} shared receives are not between 1 and {most}, this RNIC's most (0: it has none)"
            )));
        }
        let number = self.device.next_number().0;
        let queue = VerbsSrq::new(&self.pd, number, depth).map_err(|source| RdmaError::Io {
            action: "make a shared receive queue of",
            endpoint: self.device.name().to_owned(),
            source,
        })?;
        Ok(Arc::new(queue))
    }

    /// Nothing is mapped by this link: whoever may read windows is told their keys.
    fn export_window(&self, _id: WindowId, _memory: Arc<SharedMemory>) {}

    fn connect(&self, endpoint: &Endpoint, options: ConnectOptions) -> Result<Connected, RdmaError> {
        let address = address_of(endpoint)?;
        // Before anybody is asked.
        self.queue(options.qp.send_cq.clone())?;
        self.queue(options.qp.recv_cq.clone())?;
        let deadline = Instant::now() + options.timeout;
        let mut ask = Ask::FIRST;
        for _ in 0..ATTEMPTS {
            match self.try_connect(endpoint, address, ask, &options, deadline) {
                Ok(qp) => return Ok(Connected { qp, windows: Vec::new() }),
                Err(NotConnected::Again(next)) => ask = next,
                Err(NotConnected::Failed(error)) => return Err(error),
            }
        }
        Err(self.handshake(endpoint, "it does not take the proof of your key; try again".to_owned()))
    }

    fn listen(&self, endpoint: &Endpoint) -> Result<Box<dyn Listener>, RdmaError> {
        Ok(Box::new(VerbsListener::bind(self.clone(), endpoint)?))
    }
}
