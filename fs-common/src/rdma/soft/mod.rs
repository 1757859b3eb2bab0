//! The software RNIC: verbs semantics without a NIC.
//!
//! # The links
//! * `shm`: rings and mapped memory between processes of one machine; one-sided requests are the initiator's own
//!   loads and stores.
//! * `tcp`: a byte stream (TCP or Unix socket); the target's engine thread executes one-sided requests.
//!
//! # The parts
//! `region` registered memory and its keys; `cq` completion queues and sleeping; `queue` the common part of queue pairs of both links; `listen`
//! listeners and the start of each handshake; `arrivals` the rate at which a peer may connect; `fds` descriptors that are handed over;
//! `credentials` the peer of a Unix socket.
//!
//! # Where the promises differ from an RNIC's
//! * A WRITE stores its last aligned word last, and a FLUSH covers SENDs: the RNIC knows where it placed a message, as
//!   the durable RPC paper expects of future ones (section 4.1.1).
//! * A SEND completes when the link has taken its bytes, not when the peer has acknowledged them.
//! * Completion queues never overrun (see `cq`).
//! * It has no shared receive queues: a receive costs memory here only once a message has come to it, and a message that finds none waits in its own
//!   connection, which does not affect others.
//! * Deregistering waits for copies of this process. Over `shm` the initiator is the RNIC: a copy to or from memory of this process that a peer has
//!   begun may still end.

pub(in crate::rdma) mod arrivals;
mod cq;
mod credentials;
mod fds;
mod listen;
mod queue;
mod region;
pub mod shm;
pub mod tcp;
mod unheard;

use super::look_up::look_up;
use crate::cluster_key::ClusterKeys;
use crate::ids::QpNumber;
use crate::memory::SharedMemory;
use crate::memory::paged::PagedMemory;
use crate::persist::Persistence;
use crate::rdma::sys;
use crate::rdma::url::Endpoint;
use crate::rdma::verbs::{
    Access, Capabilities, CompletionQueue, ConnectOptions, Connected, Device, DeviceFigures, FileTarget,
    FlushReach, Listener, MemoryRegion, PagedAccess, ProtectionDomain, QpConfig, RdmaError, SGES_MAX,
    WindowId,
};
use cq::SoftCq;
use listen::{SoftListener, post_first};
use parking_lot::{Mutex, RwLock};
use queue::{LinkQp, MAX_MESSAGE_BYTES, MAX_QUEUE_DEPTH, MAX_TRANSFER_BYTES, QpParts, SoftQp};
use region::Registry;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use tcp::engine::Engine;
use tcp::{FileTargetCell, TlsConfigs};

/// The peers that are trusted over `tcp`, as clients and as servers.
#[derive(Clone, Debug, Default)]
pub enum TcpSecurity {
    /// No encryption, and listening on loopback only: for tests and benchmarks, which have no secrets.
    #[default]
    Loopback,
    /// No encryption, to and from everybody (`--insecure`).
    Insecure,
    /// TLS, to and from everybody with one of these keys. The first one is shown when connecting.
    Keys(ClusterKeys),
}

/// Options of a software RNIC.
#[derive(Clone, Debug, Default)]
pub struct SoftOptions {
    /// The peers that are trusted over `tcp`.
    pub tcp: TcpSecurity,
    /// The user whose server is trusted over `shm` and `unix`, besides root and this process's own user.
    pub server_user: Option<u32>,
}

/// `TcpSecurity`, ready for use.
enum TcpTrust {
    Loopback,
    Insecure,
    Keys(Box<TlsConfigs>),
}

impl TcpTrust {
    fn configs(&self) -> Option<&TlsConfigs> {
        match self {
            Self::Keys(configs) => Some(configs),
            Self::Loopback | Self::Insecure => None,
        }
    }
}

fn not_software(endpoint: &Endpoint) -> RdmaError {
    RdmaError::Unsupported(format!("{endpoint} is of RDMA hardware, and this is the software RNIC"))
}

/// The software RNIC.
pub struct SoftDevice {
    shared: Arc<DeviceShared>,
}

/// What queue pairs and listeners need of their device.
struct DeviceShared {
    tcp: TcpTrust,
    local: credentials::Trust,
    held_max_bytes: usize,
    last_qp_number: AtomicU32,
    queues: Mutex<Vec<Weak<SoftCq>>>,
    file_target: FileTargetCell,
    engine: Mutex<Option<Arc<Engine>>>,
    /// Clients that had to wait, or were turned away, because their peers connect often. Relaxed: for status.
    delayed: AtomicU64,
    turned_away: AtomicU64,
    /// Clients whose handshakes failed. Relaxed: a figure.
    refused: AtomicU64,
    unheard: unheard::Waiting,
}

impl SoftDevice {
    /// A software RNIC. Its one thread starts with the first `tcp` or `unix` listener. It ends when the device is dropped, and so does every
    /// connection that it drives.
    pub fn new(options: SoftOptions) -> Arc<Self> {
        Self::holding(options, tcp::HELD_MAX_BYTES)
    }

    /// As `new`, with this bound on the bytes that are held for peers: output that they do not take, packets that they have not sent completely,
    /// messages without a receive.
    pub fn holding(options: SoftOptions, held_max_bytes: usize) -> Arc<Self> {
        let tcp = match &options.tcp {
            TcpSecurity::Loopback => TcpTrust::Loopback,
            TcpSecurity::Insecure => TcpTrust::Insecure,
            TcpSecurity::Keys(keys) => TcpTrust::Keys(Box::new(TlsConfigs::new(keys))),
        };
        Arc::new(Self {
            shared: Arc::new(DeviceShared {
                tcp,
                local: credentials::Trust { also: options.server_user },
                held_max_bytes,
                last_qp_number: AtomicU32::new(0),
                queues: Mutex::new(Vec::new()),
                file_target: Arc::new(RwLock::new(None)),
                engine: Mutex::new(None),
                unheard: unheard::Waiting::default(),
                delayed: AtomicU64::new(0),
                turned_away: AtomicU64::new(0),
                refused: AtomicU64::new(0),
            }),
        })
    }
}

impl Drop for SoftDevice {
    fn drop(&mut self) {
        let engine = self.shared.engine.lock().take();
        if let Some(engine) = engine {
            engine.stop();
        }
    }
}

impl DeviceShared {
    /// The engine, started if it does not run yet.
    fn engine(&self) -> io::Result<Arc<Engine>> {
        let mut engine = self.engine.lock();
        if let Some(engine) = &*engine {
            return Ok(engine.clone());
        }
        Ok(engine.insert(Engine::start(self.held_max_bytes)?).clone())
    }

    /// The software queue behind this trait object, if it belongs to this device.
    fn own_queue(&self, queue: &Arc<dyn CompletionQueue>) -> Result<Arc<SoftCq>, RdmaError> {
        let address = Arc::as_ptr(queue).cast::<()>();
        self.queues
            .lock()
            .iter()
            .find(|known| known.as_ptr().cast::<()>() == address)
            .and_then(Weak::upgrade)
            .ok_or_else(|| {
                RdmaError::Unsupported("the completion queue belongs to another device".to_owned())
            })
    }

    /// Checks a queue pair's configuration, and numbers the queue pair.
    fn parts(&self, registry: &Arc<Registry>, config: QpConfig) -> Result<QpParts, RdmaError> {
        for depth in [config.send_depth, config.recv_depth] {
            if depth == 0 || depth > MAX_QUEUE_DEPTH {
                return Err(RdmaError::Unsupported(format!(
                    "a queue depth of {depth} is not between 1 and {MAX_QUEUE_DEPTH}"
                )));
            }
        }
        if config.max_sges == 0 || config.max_sges as usize > SGES_MAX {
            let asked = config.max_sges;
            return Err(RdmaError::Unsupported(format!(
                "{asked} local ranges of a request are not between 1 and {SGES_MAX}"
            )));
        }
        if config.shared_receives.is_some() {
            return Err(RdmaError::Unsupported("the software RNIC has no shared receive queues".to_owned()));
        }
        Ok(QpParts {
            number: QpNumber(self.last_qp_number.fetch_add(1, Ordering::Relaxed) + 1),
            registry: registry.clone(),
            send_cq: self.own_queue(&config.send_cq)?,
            recv_cq: self.own_queue(&config.recv_cq)?,
            send_depth: config.send_depth,
            recv_depth: config.recv_depth,
            max_sges: config.max_sges,
        })
    }
}

impl Device for SoftDevice {
    fn name(&self) -> &str {
        "soft"
    }

    fn network_security(&self) -> &'static str {
        match self.shared.tcp {
            TcpTrust::Loopback => "none (loopback only)",
            TcpTrust::Insecure => "none (INSECURE)",
            TcpTrust::Keys(_) => "TLS 1.3 with keys",
        }
    }

    fn figures(&self) -> DeviceFigures {
        let held = self.shared.engine.lock().as_ref().map_or(0, |engine| engine.held());
        DeviceFigures {
            held_bytes: held,
            held_bound: self.shared.held_max_bytes,
            arrivals_per_second: arrivals::PER_SECOND,
            arrivals_burst: arrivals::BURST,
            unheard_strangers: self.shared.unheard.strangers.load(Ordering::Relaxed),
            unheard_known: self.shared.unheard.known.load(Ordering::Relaxed),
            unheard_bound: unheard::UNHEARD_MAX,
            knocks: self.shared.tcp.configs().map_or(0, TlsConfigs::knocks_kept),
            knocks_bound: tcp::KNOCKS_KEPT,
            arrivals_delayed: self.shared.delayed.load(Ordering::Relaxed),
            arrivals_turned_away: self.shared.turned_away.load(Ordering::Relaxed),
            refused: self.shared.refused.load(Ordering::Relaxed),
        }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            file_regions: true,
            windows: true,
            max_message_bytes: MAX_MESSAGE_BYTES,
            max_transfer_bytes: MAX_TRANSFER_BYTES,
            max_queue_depth: MAX_QUEUE_DEPTH,
            max_sges: SGES_MAX as u32,
            word_last: true,
            flush: FlushReach::Persistence,
            atomic_write: false,
            shared_receives: false,
            memory_windows: false,
            // A window that is closed would be a fault of this process's own.
            on_demand_paging: false,
            chains: true,
            paged_memory: true,
            flush_after_send: true,
        }
    }

    fn alloc_pd(&self) -> Result<Arc<dyn ProtectionDomain>, RdmaError> {
        Ok(Arc::new(SoftPd { device: self.shared.clone(), registry: Arc::new(Registry::default()) }))
    }

    fn create_cq(&self, depth: u32) -> Result<Arc<dyn CompletionQueue>, RdmaError> {
        let queue = SoftCq::new(depth.min(MAX_QUEUE_DEPTH)).map_err(|source| RdmaError::Io {
            action: "make a completion queue of",
            endpoint: self.name().to_owned(),
            source,
        })?;
        let queue = Arc::new(queue);
        let mut queues = self.shared.queues.lock();
        queues.retain(|known| known.strong_count() > 0);
        queues.push(Arc::downgrade(&queue));
        Ok(queue)
    }

    fn set_file_target(&self, target: Arc<dyn FileTarget>) {
        *self.shared.file_target.write() = Some(target);
    }
}

/// A protection domain: queue pairs made from it reach only memory registered with it.
struct SoftPd {
    device: Arc<DeviceShared>,
    registry: Arc<Registry>,
}

impl SoftPd {
    fn insert(
        &self,
        memory: Arc<SharedMemory>,
        access: Access,
        domain: Option<Arc<dyn Persistence>>,
    ) -> Result<Arc<dyn MemoryRegion>, RdmaError> {
        let writes = access.local_write || access.remote_write || access.remote_atomic;
        if writes && !memory.is_writable() {
            return Err(RdmaError::Unsupported(
                "a read-only mapping cannot be registered for writing".to_owned(),
            ));
        }
        Ok(Arc::new(self.registry.insert(memory, access, domain)))
    }
}

impl ProtectionDomain for SoftPd {
    fn register(
        &self,
        memory: Arc<SharedMemory>,
        access: Access,
    ) -> Result<Arc<dyn MemoryRegion>, RdmaError> {
        self.insert(memory, access, None)
    }

    fn register_persistent(
        &self,
        memory: Arc<SharedMemory>,
        access: Access,
        domain: Arc<dyn Persistence>,
    ) -> Result<Arc<dyn MemoryRegion>, RdmaError> {
        self.insert(memory, access, Some(domain))
    }

    fn register_paged(
        &self,
        memory: Arc<PagedMemory>,
        access: PagedAccess,
    ) -> Result<Arc<dyn MemoryRegion>, RdmaError> {
        Ok(Arc::new(self.registry.insert_paged(memory, access.rights())))
    }

    fn export_window(&self, id: WindowId, memory: Arc<SharedMemory>) {
        self.registry.export(id, memory);
    }

    fn connect(&self, endpoint: &Endpoint, options: ConnectOptions) -> Result<Connected, RdmaError> {
        let ConnectOptions { qp, receives, timeout } = options;
        let parts = self.device.parts(&self.registry, qp)?;
        let prepare = post_first(&receives);
        let name = endpoint.to_string();
        let file_target = self.device.file_target.clone();
        let (link, windows): (Arc<dyn LinkQp>, _) = match endpoint {
            Endpoint::Shm(path) => shm::connect(path, self.device.local, parts, prepare, timeout)?,
            Endpoint::Unix(path) => {
                let place = (path.as_path(), name.as_str());
                let trust = self.device.local;
                (tcp::connect_unix(place, trust, parts, prepare, timeout, file_target)?, Vec::new())
            }
            Endpoint::Rdma { .. } => return Err(not_software(endpoint)),
            Endpoint::Tcp { host, port } => {
                let tls = self.device.tcp.configs();
                let address = (host.as_str(), *port);
                (tcp::connect_tcp(address, &name, tls, parts, prepare, timeout, file_target)?, Vec::new())
            }
        };
        Ok(Connected { qp: Arc::new(SoftQp(link)), windows })
    }

    fn listen(&self, endpoint: &Endpoint) -> Result<Box<dyn Listener>, RdmaError> {
        Ok(Box::new(SoftListener::bind(&self.device, &self.registry, endpoint)?))
    }
}
