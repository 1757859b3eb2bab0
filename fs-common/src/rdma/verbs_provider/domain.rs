//! Protection domains over libibverbs: registering memory, connecting, listening.

use super::advice::{self, Task};
use super::cm::Events;
use super::cq::VerbsCq;
use super::hello::{Answer, Ask, NO_KEY, Refusal};
use super::listen::VerbsListener;
use super::queue::{Parts, VerbsQp};
use super::regions::{Regions, VerbsMr};
use super::shared_receives::VerbsSrq;
use super::sys::{Capacities, Event, Happened, Id, Mr, Pd, Rights};
use super::{Shared, address_of, another_device};
use crate::memory::SharedMemory;
use crate::persist::Persistence;
use crate::rdma::peer::PeerIdentity;
use crate::rdma::shared_receives::SharedReceiveQueue;
use crate::rdma::url::Endpoint;
use crate::rdma::verbs::{
    Access, CompletionQueue, ConnectOptions, Connected, FlushReach, Listener, MemoryRegion, ProtectionDomain,
    QpConfig, QueuePair, RdmaError, WindowId,
};
use crate::size::ByteSize;
use std::any::Any;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use std::time::{Duration, Instant};

/// A challenge and its answer, and two more: for two clients that ask within a millisecond, and for a challenge that grew too old.
const ATTEMPTS: usize = 4;

/// A protection domain; see the module.
#[derive(Clone)]
pub(super) struct VerbsPd {
    device: Arc<Shared>,
    pd: Arc<Pd>,
    /// Memory for the byte of a READ that takes the place of a FLUSH: see `queue`.
    landing: Arc<Mr>,
    regions: Arc<Regions>,
}

impl VerbsPd {
    pub(super) fn new(device: Arc<Shared>) -> io::Result<Self> {
        let pd = Pd::new(device.context())?;
        let landing = Arc::new(SharedMemory::new("flush-landing", 4096)?);
        let landing = Arc::new(Mr::new(&pd, landing, 0, Rights { local_write: true, ..Rights::default() })?);
        Ok(Self { device, pd, landing, regions: Arc::default() })
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

    fn check_sges(&self, asked: u32) -> Result<(), RdmaError> {
        let most = self.device.limits().sges;
        if (1..=most).contains(&asked) {
            return Ok(());
        }
        Err(RdmaError::Unsupported(format!(
            "{asked} local ranges of a request are not between 1 and {most}, the most of requests to this RNIC"
        )))
    }

    /// Makes the queue pair of an identifier.
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
        self.check_sges(config.max_sges)?;
        let queues = [self.queue(config.send_cq)?, self.queue(config.recv_cq)?];
        let QpConfig { send_depth, max_inline, max_sges, .. } = config;
        let wanted = Capacities { send_depth, recv_depth, max_inline, max_sges };
        let failed =
            |source| advice::failed(Task::Make, "make a queue pair for", endpoint.to_owned(), source);
        // One place more, for the check of the peer, which takes none of the user's.
        let raw_wanted = Capacities { send_depth: wanted.send_depth + 1, ..wanted };
        let promises = [
            queues[0].promise(raw_wanted.send_depth).map_err(failed)?,
            queues[1].promise(wanted.recv_depth).map_err(failed)?,
        ];
        if let Some(shared) = &shared {
            shared.completes_into(&queues[1]).map_err(failed)?;
        }
        let abilities = self.device.abilities();
        let raw_queues = queues.each_ref().map(|queue| &queue.raw);
        let raw_shared = shared.as_ref().map(|shared| shared.raw());
        let (raw_number, max_inline) =
            id.make_qp(&self.pd, raw_queues, raw_shared, raw_wanted, abilities).map_err(failed)?;
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
            flushing: (abilities.as_initiator, self.landing.clone()),
        };
        Ok((VerbsQp::new(parts), events))
    }

    /// Tries to connect once. `Err(Again)`: try again with this request.
    fn try_connect(
        &self,
        endpoint: &Endpoint,
        address: SocketAddr,
        ask: Ask,
        options: &ConnectOptions,
        deadline: Instant,
    ) -> Result<Arc<VerbsQp>, NotConnected> {
        let failed =
            |action| move |source| advice::failed(Task::Connect, action, endpoint.to_string(), source);
        self.device.few_ending(deadline).map_err(failed("connect to"))?;
        let events = self.device.events()?;
        // Asked again before the first message: see `ends`.
        let port_is_up = || {
            if events.port.is_up() {
                return Ok(());
            }
            let down = format!("the port of {} is down; look at the cable and `ip link`", self.device.name());
            Err(failed("connect to")(io::Error::new(io::ErrorKind::NetworkDown, down)))
        };
        port_is_up()?;
        let id = Id::new(Some(events.channel())).map_err(failed("make an identifier for"))?;
        let number = id.number();
        let setup = events.set_up(number);
        let forget = Forget(&events, number);
        let next = |wanted: Happened| -> Result<Event, RdmaError> {
            let late = || {
                let what = match wanted {
                    Happened::AddressResolved | Happened::RouteResolved => "no way there was found in time",
                    _ => "no answer came in time",
                };
                io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("{what}; {}{}", advice::NO_ANSWER, self.device.remedy()),
                )
            };
            let event = setup.next(deadline).ok_or_else(late).map_err(failed("connect to"))?;
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
        id.resolve_address(self.device.source, address, left_ms()).map_err(failed("find a way to"))?;
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
        port_is_up()?;
        qp.id().connect(&ask.encode(), self.device.limits().reads).map_err(failed("connect to"))?;
        let event = next(Happened::Established)?;
        let refused = |reason: String| RdmaError::Refused { endpoint: endpoint.to_string(), reason };
        let prover = self.device.prover();
        if event.what == Happened::Rejected {
            if event.private.iter().all(|byte| *byte == 0) {
                let refused: io::Error = if event.by_program {
                    let who = "the program that listens there refused, without a reason";
                    io::Error::new(io::ErrorKind::ConnectionRefused, who)
                } else {
                    io::ErrorKind::ConnectionRefused.into()
                };
                return Err(failed("connect to")(refused).into());
            }
            return Err(match (Refusal::parse(&event.private), prover) {
                (Ok(Refusal::Challenge(challenge)), Some(prover)) => {
                    NotConnected::Again(prover.ask(challenge))
                }
                (Ok(Refusal::Challenge(_)), None) => refused(NO_KEY.to_owned()).into(),
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

/// Why an attempt made no connection.
enum NotConnected {
    Again(Ask),
    Failed(RdmaError),
}

impl From<RdmaError> for NotConnected {
    fn from(error: RdmaError) -> Self {
        Self::Failed(error)
    }
}

/// On drop, forgets the identifier of an attempt that failed.
struct Forget<'e>(&'e Events, usize);

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.0.forget(self.1);
    }
}

impl VerbsPd {
    /// Registers memory, with exactly this reach of FLUSH.
    fn register_to(
        &self,
        memory: &Arc<SharedMemory>,
        access: Access,
        reach: FlushReach,
    ) -> io::Result<VerbsMr> {
        let Access { local_write, remote_read, remote_write, remote_atomic, remote_flush: _, own_bytes } =
            access;
        let rights = Rights {
            local_write,
            remote_read,
            remote_write,
            remote_atomic,
            flush_global: reach >= FlushReach::Visibility,
            flush_persistent: reach >= FlushReach::Persistence,
            windows: self.device.limits().has_windows,
        };
        let own = usize::try_from(own_bytes).unwrap_or(usize::MAX);
        let page = rustix::param::page_size();
        if own >= memory.len() || !own.is_multiple_of(page) {
            return Err(io::Error::other(format!(
                "{own} bytes of the owner's are no whole pages, or leave none for peers"
            )));
        }
        let reading = Rights {
            local_write: false,
            remote_write: false,
            remote_atomic: false,
            windows: false,
            ..rights
        };
        let main = Mr::new(&self.pd, memory.clone(), own, rights)?;
        let reading = if own > 0 { Some(Mr::new(&self.pd, memory.clone(), 0, reading)?) } else { None };
        Ok(self.regions.add(main, reading, reach, &self.device))
    }

    /// Registers memory with FLUSH as far as `wanted` and as the RNIC can.
    fn register_upto(
        &self,
        memory: Arc<SharedMemory>,
        access: Access,
        wanted: FlushReach,
    ) -> Result<Arc<dyn MemoryRegion>, RdmaError> {
        let writes = access.local_write || access.remote_write || access.remote_atomic;
        if writes && !memory.is_writable() {
            let reason = "a read-only mapping cannot be registered for writing";
            return Err(RdmaError::Unsupported(reason.to_owned()));
        }
        let can = self.device.abilities().as_target;
        let reach = if access.remote_flush { wanted.min(can) } else { FlushReach::None };
        let registered = match self.register_to(&memory, access, reach) {
            // The RNIC refuses this memory as not persistent (as rdma_rxe does with all but persistent memory): then the receiver's processor has to
            // flush.
            Err(error) if reach == FlushReach::Persistence => {
                tracing::debug!(%error, "memory is registered without FLUSH to persistence");
                self.register_to(&memory, access, FlushReach::Visibility)
            }
            registered => registered,
        };
        let region = registered.map_err(|source| {
            let asked = memory.len() as u64;
            let what = format!("{} with {}", ByteSize(asked), self.device.name());
            advice::failed(Task::Register(asked), "register (pin)", what, source)
        })?;
        Ok(Arc::new(region))
    }
}

impl ProtectionDomain for VerbsPd {
    fn register(
        &self,
        memory: Arc<SharedMemory>,
        access: Access,
    ) -> Result<Arc<dyn MemoryRegion>, RdmaError> {
        self.register_upto(memory, access, FlushReach::Visibility)
    }

    /// An RNIC's FLUSH reaches memory and no further: memory that needs a sync to be persistent is flushed to visibility only.
    fn register_persistent(
        &self,
        memory: Arc<SharedMemory>,
        access: Access,
        domain: Arc<dyn Persistence>,
    ) -> Result<Arc<dyn MemoryRegion>, RdmaError> {
        let is_memory = domain.by_cache_lines();
        let wanted = if is_memory { FlushReach::Persistence } else { FlushReach::Visibility };
        self.register_upto(memory, access, wanted)
    }

    fn create_shared_receives(
        &self,
        depth: u32,
        max_sges: u32,
    ) -> Result<Arc<dyn SharedReceiveQueue>, RdmaError> {
        self.check_sges(max_sges)?;
        let most = self.device.limits().shared_receives;
        if depth == 0 || depth > most {
            return Err(RdmaError::Unsupported(format!(
                "{depth} shared receives are not between 1 and {most}, this RNIC's most (0: it has none)"
            )));
        }
        let number = self.device.next_number().0;
        let queue = VerbsSrq::new(&self.pd, number, depth, max_sges).map_err(|source| {
            advice::failed(
                Task::Make,
                "make a shared receive queue of",
                self.device.name().to_owned(),
                source,
            )
        })?;
        Ok(Arc::new(queue))
    }

    /// This link maps nothing: peers that may read windows are told their keys.
    fn export_window(&self, _id: WindowId, _memory: Arc<SharedMemory>) {}

    fn connect(&self, endpoint: &Endpoint, options: ConnectOptions) -> Result<Connected, RdmaError> {
        let address = address_of(endpoint)?;
        // Checked before any message is sent.
        self.queue(options.qp.send_cq.clone())?;
        self.queue(options.qp.recv_cq.clone())?;
        let deadline = Instant::now() + options.timeout;
        let mut ask = if self.device.prover().is_some() { Ask::FIRST } else { Ask::KEYLESS };
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
