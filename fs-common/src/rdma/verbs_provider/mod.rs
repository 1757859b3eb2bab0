//! RNICs through libibverbs, connections through librdmacm. (Feature `verbs`.)
//!
//! # The parts
//! `sys` the libraries, with owners and errors; `hello` what both sides say in the private data of a connection, and how they prove a
//! key; `cm` events of connections, and the thread that takes them; `listen`, `domain` (registering, connecting), `queue`, `cq`,
//! `shared_receives`, `regions` (what is registered), `window`.
//!
//! # What hardware promises beyond or less than the software RNIC
//! * The target translates no files, and maps no windows: who is trusted READs the tables ([`RemoteRange`](crate::rdma::RemoteRange)).
//! * A WRITE's last word is not stored last, as far as the specification says, and FLUSH is not there yet.
//! * A SEND completes when the peer's RNIC has acknowledged it.
//! * Memory that is registered is pinned.
//!
//! # Which RNIC
//! The one that the endpoint's address belongs to, here or on the way there: an address of an interface says device, port and GID. So a device
//! is made for an endpoint.

mod cm;
mod cq;
mod domain;
mod hello;
mod listen;
mod queue;
mod regions;
mod shared_receives;
mod sys;
mod window;

use crate::cluster_key::ClusterKeys;
use crate::ids::QpNumber;
use crate::rdma::soft::TcpSecurity;
use crate::rdma::url::Endpoint;
use crate::rdma::verbs::{Capabilities, CompletionQueue, Device, FileTarget, ProtectionDomain, RdmaError};
use crate::world::{Random, SystemRandom};
use cm::Events;
use cq::VerbsCq;
use domain::VerbsPd;
use hello::{Doorkeeper, Prover};
use parking_lot::Mutex;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use sys::{Context, Id, Limits, Pd};

/// Largest two-sided message.
const MAX_MESSAGE_BYTES: u32 = 1 << 20;
/// Largest one-sided transfer: an RC message (IBTA volume 1, 9.7.7.1.4, half of what it allows).
const MAX_TRANSFER_BYTES: u32 = 1 << 30;
/// READs and atomics under way of a queue pair that are asked for: more bring nothing at the depths that cuttlefs posts.
const READS_MAX: u8 = 16;
/// How long it is waited to learn which RNIC leads to an address.
const RESOLVE_TIME: Duration = Duration::from_secs(5);

/// An RNIC.
pub struct VerbsDevice {
    shared: Arc<Shared>,
}

/// What domains, listeners and queue pairs need of their device.
struct Shared {
    context: Context,
    name: String,
    limits: Limits,
    security: TcpSecurity,
    prover: Option<Prover>,
    /// There while anybody is connected or listens.
    events: Mutex<Weak<Events>>,
    last_number: AtomicU32,
}

/// The address that an endpoint names.
fn address_of(endpoint: &Endpoint) -> Result<SocketAddr, RdmaError> {
    let Endpoint::Rdma { host, port } = endpoint else {
        return Err(RdmaError::Unsupported(format!("{endpoint} is no endpoint of RDMA hardware")));
    };
    let failed =
        |source| RdmaError::Io { action: "find the address of", endpoint: endpoint.to_string(), source };
    let mut addresses = (host.as_str(), *port).to_socket_addrs().map_err(failed)?;
    addresses.next().ok_or_else(|| failed(io::ErrorKind::NotFound.into()))
}

fn another_device(endpoint: &Endpoint) -> RdmaError {
    RdmaError::Unsupported(format!(
        "{endpoint} belongs to another RNIC than the first endpoint; a server listens with one"
    ))
}

/// Whether anything looks like an RNIC: for a message that says more than an address could.
fn advice(source: &io::Error) -> &'static str {
    let has_devices =
        std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some());
    match source.raw_os_error() {
        _ if !has_devices => {
            "; this machine has no RDMA device (`rdma link` lists them; `rdma link add rxe0 type rxe netdev ETH` makes a software one)"
        }
        Some(libc::ENODEV | libc::EADDRNOTAVAIL) => {
            "; the address must be one of an interface with an RDMA device (`rdma link` and `ip addr` list them)"
        }
        _ => "",
    }
}

impl VerbsDevice {
    /// The RNIC that has the endpoint's address.
    ///
    /// # Errors
    /// There is none.
    pub fn to_listen(endpoint: &Endpoint, security: TcpSecurity) -> Result<Arc<Self>, RdmaError> {
        let address = address_of(endpoint)?;
        if address.ip().is_unspecified() {
            return Err(RdmaError::Unsupported(format!(
                "{endpoint} names no RNIC; write the address of one's interface (`rdma link` and `ip addr` list them)"
            )));
        }
        Self::find(endpoint, security, |id| id.bind(address))
    }

    /// The RNIC that leads to the endpoint.
    ///
    /// # Errors
    /// There is none.
    pub fn to_connect(endpoint: &Endpoint, security: TcpSecurity) -> Result<Arc<Self>, RdmaError> {
        let address = address_of(endpoint)?;
        Self::find(endpoint, security, |id| id.resolve_address(address, RESOLVE_TIME.as_millis() as i32))
    }

    fn find(
        endpoint: &Endpoint,
        security: TcpSecurity,
        towards: impl FnOnce(&Id) -> io::Result<()>,
    ) -> Result<Arc<Self>, RdmaError> {
        let failed = |source: io::Error| {
            let endpoint = format!("{endpoint}{}", advice(&source));
            RdmaError::Io { action: "find an RDMA device for", endpoint, source }
        };
        // Without a channel its calls wait.
        let id = Id::new(None).map_err(failed)?;
        towards(&id).map_err(failed)?;
        let context = id.context().ok_or_else(|| failed(io::Error::from_raw_os_error(libc::ENODEV)))?;
        let mut limits = context.limits().map_err(failed)?;
        limits.reads.at_us = limits.reads.at_us.min(READS_MAX);
        limits.reads.of_us = limits.reads.of_us.min(READS_MAX);
        let prover = match &security {
            TcpSecurity::Keys(keys) => Some(Prover::new(keys.own())),
            TcpSecurity::Loopback | TcpSecurity::Insecure => None,
        };
        let shared = Shared {
            context,
            name: context.name(),
            limits,
            security,
            prover,
            events: Mutex::default(),
            last_number: AtomicU32::new(0),
        };
        Ok(Arc::new(Self { shared: Arc::new(shared) }))
    }
}

impl Shared {
    fn context(&self) -> Context {
        self.context
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn prover(&self) -> Option<&Prover> {
        self.prover.as_ref()
    }

    /// The name of the key that both sides have proven.
    fn own_key_name(&self) -> Option<Arc<str>> {
        match &self.security {
            TcpSecurity::Keys(keys) => Some(keys.own().name().into()),
            TcpSecurity::Loopback | TcpSecurity::Insecure => None,
        }
    }

    fn next_number(&self) -> QpNumber {
        QpNumber(self.last_number.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Who looks at proofs where this device listens; `None`: whoever comes.
    fn doorkeeper(&self) -> Result<Option<Doorkeeper>, RdmaError> {
        let look = |keys: &ClusterKeys| {
            let mut secret = [0; 32];
            SystemRandom.fill(&mut secret);
            Doorkeeper::new(keys, &secret)
        };
        match &self.security {
            TcpSecurity::Keys(keys) => Ok(Some(look(keys))),
            TcpSecurity::Insecure => Ok(None),
            TcpSecurity::Loopback => Err(RdmaError::Unsupported(
                "rdma:// takes a key (--key), or --insecure for whoever comes".to_owned(),
            )),
        }
    }

    /// The thread for events, started if nobody has it.
    fn events(&self) -> Result<Arc<Events>, RdmaError> {
        let mut events = self.events.lock();
        if let Some(events) = events.upgrade() {
            return Ok(events);
        }
        let started = Events::start().map_err(|source| RdmaError::Io {
            action: "take events of connections from",
            endpoint: self.name.clone(),
            source,
        })?;
        *events = Arc::downgrade(&started);
        Ok(started)
    }
}

impl Device for VerbsDevice {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            file_regions: false,
            windows: false,
            max_message_bytes: MAX_MESSAGE_BYTES,
            max_transfer_bytes: MAX_TRANSFER_BYTES,
            max_queue_depth: self.shared.limits.queue_depth,
            word_last: false,
            shared_receives: self.shared.limits.shared_receives > 0,
            memory_windows: self.shared.limits.has_windows,
            flush_after_send: false,
        }
    }

    fn alloc_pd(&self) -> Result<Arc<dyn ProtectionDomain>, RdmaError> {
        let pd = Pd::new(self.shared.context).map_err(|source| RdmaError::Io {
            action: "make a protection domain of",
            endpoint: self.shared.name.clone(),
            source,
        })?;
        Ok(Arc::new(VerbsPd::new(self.shared.clone(), pd)))
    }

    fn create_cq(&self, depth: u32) -> Result<Arc<dyn CompletionQueue>, RdmaError> {
        let most = self.shared.limits.completions;
        let queue = VerbsCq::new(self.shared.context, depth, most).map_err(|source| RdmaError::Io {
            action: "make a completion queue of",
            endpoint: self.shared.name.clone(),
            source,
        })?;
        Ok(Arc::new(queue))
    }

    fn network_security(&self) -> &'static str {
        match self.shared.security {
            TcpSecurity::Keys(_) => "keys at connect, nothing behind it (trust this network)",
            TcpSecurity::Insecure | TcpSecurity::Loopback => "none (INSECURE)",
        }
    }

    /// No RNIC translates files.
    fn set_file_target(&self, _target: Arc<dyn FileTarget>) {}
}
