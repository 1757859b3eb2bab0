//! RNICs through libibverbs, connections through librdmacm. (Feature `verbs`.)
//!
//! # The parts
//! `sys`: the libraries, with owners and errors; `sys_flush`: FLUSH; `hello`: the private data of a connection, and the proof of keys; `cm`: events
//! of connections, and the thread that takes them; `ends`: the thread that destroys identifiers; `port`: the kernel's facts about an RNIC's port;
//! `listen`, `asks` (clients that wait to be accepted), `domain` (registering, connecting), `queue`, `cq`, `shared_receives`, `regions` (registered
//! memory), `window`; `advice`: what to do about an error.
//!
//! # Where the promises differ from the software RNIC's
//! * The target translates no files, and maps no windows: trusted clients READ the tables ([`RemoteRange`](crate::rdma::RemoteRange)).
//! * The specification does not promise that a WRITE's last word is stored last.
//! * There is FLUSH if device and library have it (`sys_flush`). If not, a READ of the range's last byte makes it visible, and persistence is
//!   refused. No known RNIC promises that a FLUSH covers SENDs before it.
//! * A SEND completes when the peer's RNIC has acknowledged it.
//! * Registered memory is pinned.
//!
//! # Which RNIC
//! The RNIC that the endpoint's address belongs to, here or on the way there: the address of an interface determines device, port and GID. So a
//! device is made for an endpoint. Parameters of the endpoint can name another RNIC ([`Via`]).

mod advice;
mod asks;
mod cm;
mod cq;
mod domain;
mod ends;
mod hello;
mod listen;
mod port;
mod queue;
mod regions;
mod requests;
mod shared_receives;
mod sys;
mod sys_flush;
mod under_way;
mod window;

use crate::cluster_key::ClusterKeys;
use crate::ids::QpNumber;
use crate::rdma::hardware::HardwareFigures;
use crate::rdma::look_up::look_up;
use crate::rdma::soft::TcpSecurity;
use crate::rdma::url::{Endpoint, Via};
use crate::rdma::verbs::{
    Capabilities, CompletionQueue, Device, DeviceFigures, FileTarget, ProtectionDomain, RdmaError,
};
use crate::world::{Random, SystemRandom};
use advice::Task;
use cm::Events;
use cq::VerbsCq;
use domain::VerbsPd;
use ends::{ENDING_MAX, Ending};
use hello::{Doorkeeper, Prover};
use parking_lot::Mutex;
use port::{LastLook, Port};
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use sys::{Context, Id, Limits};
use sys_flush::Abilities;

/// Largest two-sided message.
const MAX_MESSAGE_BYTES: u32 = 1 << 20;
/// Largest one-sided transfer: an RC message (IBTA volume 1, 9.7.7.1.4, half of what it allows).
const MAX_TRANSFER_BYTES: u32 = 1 << 30;
/// READs and atomics of a queue pair that may be under way: more bring nothing at the depths that cuttlefs posts.
const READS_MAX: u8 = 16;
/// How long it is waited to learn which RNIC leads to an address.
const RESOLVE_TIME: Duration = Duration::from_secs(5);

/// An RNIC.
pub struct VerbsDevice {
    shared: Arc<Shared>,
}

/// The part of a device that domains, listeners and queue pairs need.
struct Shared {
    context: Context,
    name: String,
    limits: Limits,
    abilities: Abilities,
    /// The port that the endpoint led to that it was opened for.
    port: Arc<LastLook>,
    /// The largest MTU that this port can have.
    max_mtu_bytes: Option<u32>,
    /// Where connections begin, if that does not follow from where they lead.
    source: Option<SocketAddr>,
    /// Registered bytes. Relaxed: a figure.
    pinned_bytes: AtomicU64,
    /// Connections that are over and that the kernel has not let go of.
    ending: Arc<Ending>,
    /// Clients that were refused. Relaxed: a figure.
    refused: AtomicU64,
    security: TcpSecurity,
    prover: Option<Prover>,
    /// Lives while a connection or a listener uses it.
    events: Mutex<Weak<Events>>,
    last_number: AtomicU32,
}

/// Host, port, and this machine's RNIC if the endpoint names one.
fn parts_of(endpoint: &Endpoint) -> Result<(&str, u16, Option<&Via>), RdmaError> {
    match endpoint {
        Endpoint::Rdma { host, port, via } => Ok((host, *port, via.as_ref())),
        _ => Err(RdmaError::Unsupported(format!("{endpoint} is no endpoint of RDMA hardware"))),
    }
}

/// The address that an endpoint names.
fn address_of(endpoint: &Endpoint) -> Result<SocketAddr, RdmaError> {
    let (host, port, _) = parts_of(endpoint)?;
    let failed =
        |source| RdmaError::Io { action: "find the address of", endpoint: endpoint.to_string(), source };
    let addresses = look_up(host, port).map_err(failed)?;
    addresses.first().copied().ok_or_else(|| failed(io::ErrorKind::NotFound.into()))
}

/// The address of this machine at which an endpoint listens: any address (`0.0.0.0`) stands for the address of the RNIC that is named beside it.
fn address_to_listen(endpoint: &Endpoint) -> Result<SocketAddr, RdmaError> {
    let address = address_of(endpoint)?;
    needs_interface(endpoint, address)?;
    match parts_of(endpoint)?.2 {
        _ if !address.ip().is_unspecified() => Ok(address),
        Some(via) => named_address(endpoint, via, address),
        None => Err(RdmaError::Unsupported(format!(
            "{endpoint} names no RNIC; write the address of one's interface (`rdma link` and `ip addr` list them), or ?device=NAME behind it"
        ))),
    }
}

/// The address of the RNIC that an endpoint names; with the port of `to` if `to` is any address, else port 0.
fn named_address(endpoint: &Endpoint, via: &Via, to: SocketAddr) -> Result<SocketAddr, RdmaError> {
    let port = if to.ip().is_unspecified() { to.port() } else { 0 };
    port::address_of(via, to, port).map_err(|reason| RdmaError::Unsupported(format!("{endpoint}: {reason}")))
}

/// Refuses an address that is good on any interface, and names none.
fn needs_interface(endpoint: &Endpoint, address: SocketAddr) -> Result<(), RdmaError> {
    match address {
        SocketAddr::V6(address) if address.ip().is_unicast_link_local() && address.scope_id() == 0 => {
            Err(RdmaError::Unsupported(format!(
                "{endpoint}: {ip} is link-local, and each interface may have it; write the interface behind it, as in rdma://[{ip}%eth0]:{}",
                address.port(),
                ip = address.ip()
            )))
        }
        _ => Ok(()),
    }
}

fn another_device(endpoint: &Endpoint) -> RdmaError {
    RdmaError::Unsupported(format!("{endpoint} belongs to another RNIC than when it was opened; start again"))
}

impl VerbsDevice {
    /// The RNIC that has the endpoint's address.
    ///
    /// # Errors
    /// There is no such RNIC.
    pub fn to_listen(endpoint: &Endpoint, security: TcpSecurity) -> Result<Arc<Self>, RdmaError> {
        let address = address_to_listen(endpoint)?;
        Self::find(endpoint, security, None, |id| id.bind(address))
    }

    /// The RNIC that leads to the endpoint.
    ///
    /// # Errors
    /// There is no such RNIC.
    pub fn to_connect(endpoint: &Endpoint, security: TcpSecurity) -> Result<Arc<Self>, RdmaError> {
        let address = address_of(endpoint)?;
        let via = parts_of(endpoint)?.2;
        let source = via.map(|via| named_address(endpoint, via, address)).transpose()?;
        Self::find(endpoint, security, source, |id| {
            id.resolve_address(source, address, RESOLVE_TIME.as_millis() as i32)
        })
    }

    fn find(
        endpoint: &Endpoint,
        security: TcpSecurity,
        source: Option<SocketAddr>,
        towards: impl FnOnce(&Id) -> io::Result<()>,
    ) -> Result<Arc<Self>, RdmaError> {
        let failed =
            |source| advice::failed(Task::Find, "find an RDMA device for", endpoint.to_string(), source);
        // Calls of an identifier without a channel block.
        let id = Id::new(None).map_err(failed)?;
        towards(&id).map_err(failed)?;
        let context = id.context().ok_or_else(|| failed(io::Error::from_raw_os_error(libc::ENODEV)))?;
        let mut limits = context.limits().map_err(failed)?;
        // One place of each send queue is for the provider (`queue`).
        limits.queue_depth = limits.queue_depth.saturating_sub(1);
        limits.reads.at_us = limits.reads.at_us.min(READS_MAX);
        limits.reads.of_us = limits.reads.of_us.min(READS_MAX);
        let (port, gid) = id.port();
        let name = context.name();
        let via = parts_of(endpoint)?.2;
        if let Some(via) = via
            && (via.device != name || via.port != port)
        {
            return Err(RdmaError::Unsupported(format!(
                "{endpoint}: the address leads to device {name}, port {port}, and not to {}, port {}; write ?device={name}&port={port}, or \
                 nothing behind the address, or an address of the device that is meant (`rdma link` and `ip addr` list them)",
                via.device, via.port
            )));
        }
        let max_mtu_bytes = context.max_mtu_bytes(port);
        let port = Port::new(&name, port);
        if let Some(index) = via.and_then(|via| via.gid) {
            port.must_be(index, gid)
                .map_err(|reason| RdmaError::Unsupported(format!("{endpoint}: {reason}")))?;
        }
        let port = Arc::new(LastLook::new(port, gid, &limits));
        let prover = match &security {
            TcpSecurity::Keys(keys) => Some(Prover::new(keys.own())),
            TcpSecurity::Loopback | TcpSecurity::Insecure => None,
        };
        let shared = Shared {
            context,
            port,
            max_mtu_bytes,
            name,
            limits,
            abilities: Abilities::of(context),
            source,
            pinned_bytes: AtomicU64::new(0),
            ending: Arc::default(),
            refused: AtomicU64::new(0),
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

    fn abilities(&self) -> Abilities {
        self.abilities
    }

    /// Waits until fewer than `ENDING_MAX` connections are left to the kernel.
    ///
    /// # Errors
    /// At the deadline there are still as many.
    fn few_ending(&self, deadline: Instant) -> io::Result<()> {
        if self.ending.has_room(deadline) {
            return Ok(());
        }
        let ending = self.ending.count();
        let hangs =
            format!("the kernel does not let go of {ending} connections that are over{}", self.remedy());
        Err(io::Error::new(io::ErrorKind::TimedOut, hangs))
    }

    /// The end of a message: what may help if the kernel's connection manager hangs.
    fn remedy(&self) -> String {
        format!(
            "; if that stays so although the other side is there, the connection manager of {} hangs: stop the server and unmount what uses the \
             device, then take it away and add it again (`rdma link`), or load its driver again",
            self.name
        )
    }

    /// Counts a client that is refused.
    fn note_refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
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

    /// The checker of proofs where this device listens; `None`: everybody may connect.
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

    /// The thread for events; started if it does not run.
    fn events(&self) -> Result<Arc<Events>, RdmaError> {
        let mut events = self.events.lock();
        if let Some(events) = events.upgrade() {
            return Ok(events);
        }
        let started = Events::start(&self.ending, &self.port).map_err(|source| RdmaError::Io {
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

    fn figures(&self) -> DeviceFigures {
        DeviceFigures { refused: self.shared.refused.load(Ordering::Relaxed), ..DeviceFigures::default() }
    }

    fn hardware(&self) -> Option<HardwareFigures> {
        let shared = &self.shared;
        let events = shared.events.lock().upgrade();
        let events = events.as_ref();
        let mtu = events.map_or(0, |events| events.path_mtu_bytes.load(Ordering::Relaxed));
        Some(HardwareFigures {
            path_mtu_bytes: (mtu > 0).then_some(mtu),
            max_mtu_bytes: shared.max_mtu_bytes,
            queue_pairs: events.map_or(0, |events| events.queue_pairs.load(Ordering::Relaxed)),
            pinned_bytes: shared.pinned_bytes.load(Ordering::Relaxed),
            ending: shared.ending.count() as u64,
            ending_bound: ENDING_MAX as u64,
            ..shared.port.figures()
        })
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            file_regions: false,
            windows: false,
            max_message_bytes: MAX_MESSAGE_BYTES,
            max_transfer_bytes: MAX_TRANSFER_BYTES,
            max_queue_depth: self.shared.limits.queue_depth,
            max_sges: self.shared.limits.sges,
            word_last: false,
            flush: self.shared.abilities.as_initiator,
            atomic_write: self.shared.abilities.atomic_write,
            shared_receives: self.shared.limits.shared_receives > 0,
            memory_windows: self.shared.limits.has_windows,
            on_demand_paging: self.shared.abilities.on_demand_paging,
            chains: false,
            // An RNIC keeps the pages that are there at the registration; with on-demand paging it waits for a page that is gone.
            paged_memory: false,
            flush_after_send: false,
        }
    }

    fn alloc_pd(&self) -> Result<Arc<dyn ProtectionDomain>, RdmaError> {
        let pd = VerbsPd::new(self.shared.clone()).map_err(|source| {
            advice::failed(Task::Make, "make a protection domain of", self.shared.name.clone(), source)
        })?;
        Ok(Arc::new(pd))
    }

    fn create_cq(&self, depth: u32) -> Result<Arc<dyn CompletionQueue>, RdmaError> {
        let most = self.shared.limits.completions;
        let queue = VerbsCq::new(self.shared.context, depth, most).map_err(|source| {
            advice::failed(Task::Make, "make a completion queue of", self.shared.name.clone(), source)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_of_any_interface_needs_the_interface() {
        let listen = |text: &str| address_to_listen(&text.parse().expect("an endpoint"));
        let unnamed = listen("rdma://[fe80::1]:80").expect_err("which one?").to_string();
        assert!(unnamed.contains("as in rdma://[fe80::1%eth0]:80"), "{unnamed}");
        assert!(listen("rdma://[fe80::1%lo]:80").is_ok() && listen("rdma://[fd00::1]:80").is_ok());
    }
}
