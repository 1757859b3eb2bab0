//! Listening endpoints of every link, and the first part of each handshake.
//!
//! # How it works
//! `accept` sleeps in poll(2) on the listening socket, a stop eventfd, and every client that has connected but not
//! said hello yet. A client that says nothing, or nonsense, is dropped after `HELLO_WAIT`, or when its place is needed, and
//! never holds up another. A peer that connects often is listened to when its time has come (`arrivals`).

use super::arrivals::{Arrivals, UNHEARD_OF_PEER_MAX};
use super::queue::{QpCore, QpParts};
use super::tcp::{Channel, HelloReader, TcpIncoming, TlsConfigs};
use super::{DeviceShared, TcpTrust, credentials, shm, sys, tcp};
use crate::descriptors::is_for_peers;
use crate::memory::SharedMemory;
use crate::rdma::PeerKey;
use crate::rdma::peer::{LocalPeer, PeerIdentity};
use crate::rdma::soft::queue::SoftQp;
use crate::rdma::soft::region::Registry;
use crate::rdma::url::Endpoint;
use crate::rdma::verbs::{
    HELLO_WAIT, Incoming, LinkKind, Listener, QpConfig, QueuePair, RdmaError, RecvWr, WindowId,
};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags};
use rustix::fd::OwnedFd;
use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, TcpListener, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Clients that connected and said nothing yet; when one more comes, the oldest is dropped. So many that a handshake over a long way is
/// done before its place goes to a crowd of strangers: at 2,000 a second a place is kept for a quarter of a second.
const SILENT_CLIENTS_MAX: usize = 512;
/// Pause after accept failed for want of descriptors or memory, so that the thread does not spin.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
const BACKLOG: i32 = 128;

/// Where connections of a listener come from and go to.
pub(super) struct Setup {
    pub(super) endpoint: Endpoint,
    device: Arc<DeviceShared>,
    registry: Arc<Registry>,
    link: LinkKind,
}

impl Setup {
    /// The exported windows in `WindowId::ALL` order.
    pub(super) fn windows(&self) -> [Option<Arc<SharedMemory>>; 3] {
        let windows = self.device.windows.read();
        WindowId::ALL.map(|id| windows.get(&(id as u32)).cloned())
    }

    fn tls(&self) -> Option<&TlsConfigs> {
        self.device.tcp.configs()
    }

    /// Who a client is, now that its handshake is over.
    fn proven(&self, peer: PeerIdentity, greeting: &Greeting) -> PeerIdentity {
        match (peer, greeting, self.tls()) {
            (PeerIdentity::Remote(address), Greeting::Tcp(channel, _), Some(tls)) => {
                let name = channel.client_name(tls).expect("a hello comes behind the proof of a key");
                PeerIdentity::Key { name, address }
            }
            (peer, ..) => peer,
        }
    }
}

enum Greeting {
    Shm(OwnedFd),
    Tcp(Channel, HelloReader),
}

impl Greeting {
    fn socket(&self) -> &OwnedFd {
        match self {
            Self::Shm(socket) => socket,
            Self::Tcp(channel, _) => channel.socket(),
        }
    }

    fn refuse(&self, reason: &str) {
        match self {
            Self::Shm(socket) => shm::refuse(socket, reason),
            Self::Tcp(channel, _) => tcp::refuse(channel, reason),
        }
    }
}

struct Silent {
    peer: PeerIdentity,
    key: PeerKey,
    greeting: Greeting,
    /// When it is listened to, and until when.
    due: Instant,
    deadline: Instant,
}

/// Clients that have connected and not said hello.
struct Unheard {
    silent: VecDeque<Silent>,
    arrivals: Arrivals,
}

impl Unheard {
    fn of_peer(&self, key: &PeerKey) -> usize {
        self.silent.iter().filter(|client| client.key == *key).count()
    }

    /// When something is to be done about one of them.
    fn next_due(&self, now: Instant) -> Option<Instant> {
        self.silent.iter().map(|client| if client.due > now { client.due } else { client.deadline }).min()
    }

    /// Whether one more of a peer may wait. If need be the oldest goes that was listened to and said nothing; those whose time has
    /// not come stay, or a peer that connects without end would keep even its own from being heard.
    fn has_room_for(&mut self, key: &PeerKey, now: Instant) -> bool {
        if self.of_peer(key) < UNHEARD_OF_PEER_MAX {
            return true;
        }
        let mute = self.silent.iter().position(|client| client.key == *key && client.due <= now);
        mute.and_then(|index| self.silent.remove(index)).is_some()
    }

    /// Makes room for one: the oldest of the peer that has most goes.
    fn drop_one(&mut self) {
        let mut counts: HashMap<&PeerKey, usize> = HashMap::new();
        for client in &self.silent {
            *counts.entry(&client.key).or_default() += 1;
        }
        let most = counts.values().max().copied();
        let oldest = self.silent.iter().position(|client| counts.get(&client.key).copied() == most);
        if let Some(index) = oldest {
            self.silent.remove(index);
        }
    }
}

/// A listening endpoint of the software RNIC.
pub(super) struct SoftListener {
    setup: Arc<Setup>,
    socket: OwnedFd,
    /// The path to remove when done.
    path: Option<PathBuf>,
    stop: OwnedFd,
    closed: AtomicBool,
    unheard: Mutex<Unheard>,
}

impl SoftListener {
    pub(super) fn bind(
        device: &Arc<DeviceShared>,
        registry: &Arc<Registry>,
        endpoint: &Endpoint,
    ) -> Result<Self, RdmaError> {
        let failed = |source| RdmaError::Io { action: "listen on", endpoint: endpoint.to_string(), source };
        let mut bound = endpoint.clone();
        let (socket, link, path) = match endpoint {
            Endpoint::Tcp { host, port } => {
                let socket = bind_tcp(host, *port, &device.tcp, endpoint)?;
                let address = socket.local_addr().map_err(failed)?;
                bound = Endpoint::Tcp { host: host.clone(), port: address.port() };
                (OwnedFd::from(socket), LinkKind::Tcp, None)
            }
            // Anyone who reaches the path may connect: sessions decide what they may do.
            Endpoint::Unix(path) => (
                bind_unix(path, SocketType::STREAM, 0o666).map_err(failed)?,
                LinkKind::Unix,
                Some(path.clone()),
            ),
            // Whoever connects sees all frames, so the path is for the server's own user; peers are asked again.
            Endpoint::Shm(path) => (
                bind_unix(path, SocketType::SEQPACKET, 0o600).map_err(failed)?,
                LinkKind::Shm,
                Some(path.clone()),
            ),
        };
        if link != LinkKind::Shm {
            device.engine().map_err(failed)?;
        }
        rustix::io::ioctl_fionbio(&socket, true).map_err(|error| failed(error.into()))?;
        let setup = Setup { endpoint: bound, device: device.clone(), registry: registry.clone(), link };
        Ok(Self {
            setup: Arc::new(setup),
            socket,
            path,
            stop: sys::new_eventfd().map_err(failed)?,
            closed: AtomicBool::new(false),
            unheard: Mutex::new(Unheard { silent: VecDeque::new(), arrivals: Arrivals::new() }),
        })
    }

    /// Takes a connection from the backlog, if there is one and its peer may come.
    fn take_connection(&self, unheard: &mut Unheard) {
        let socket =
            match rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => socket,
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {
                    return;
                }
                // Shut down while accept was on its way: that is how it ends, and nobody has to be told.
                Err(_) if self.closed.load(Ordering::Acquire) => return,
                Err(error) => {
                    tracing::warn!(endpoint = %self.setup.endpoint, %error, "cannot accept a connection");
                    std::thread::sleep(ACCEPT_RETRY);
                    return;
                }
            };
        if !is_for_peers(&socket) {
            tracing::warn!(endpoint = %self.setup.endpoint, "refused a client: nearly as many files are open as may be (ulimit -n)");
            return;
        }
        let admitted = match self.setup.link {
            LinkKind::Tcp => tcp::tune_tcp(&socket).and_then(|()| {
                let address = rustix::net::getpeername(&socket)?
                    .and_then(|address| std::net::SocketAddr::try_from(address).ok());
                address.map(PeerIdentity::Remote).ok_or_else(|| io::ErrorKind::NotConnected.into())
            }),
            _ => credentials::unix_peer(&socket),
        };
        let peer = match admitted {
            Ok(peer) => peer,
            Err(error) => {
                tracing::debug!(endpoint = %self.setup.endpoint, %error, "a client went away at once");
                return;
            }
        };
        if self.setup.link == LinkKind::Shm
            && let PeerIdentity::Local(LocalPeer { uid, .. }) = peer
            && !may_share_memory(uid, rustix::process::geteuid().as_raw())
        {
            tracing::warn!(endpoint = %self.setup.endpoint, uid, "refused a user who may not map the frames");
            shm::refuse(
                &socket,
                "shared memory shows every file's pages, so only root and the server's own user may connect; \
                 use the server's unix:// or tcp:// endpoint",
            );
            return;
        }
        let (key, now) = (PeerKey::from(&peer), Instant::now());
        let due = if key.is_administrator(rustix::process::geteuid().as_raw()) {
            now
        } else if unheard.has_room_for(&key, now) {
            unheard.arrivals.due(&key, now)
        } else {
            self.setup.device.turned_away.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(endpoint = %self.setup.endpoint, %peer, "turned a client away: its peer connects too often");
            return;
        };
        if due > now {
            self.setup.device.delayed.fetch_add(1, Ordering::Relaxed);
        }
        let greeting = match (self.setup.link, self.setup.tls()) {
            (LinkKind::Shm, _) => Greeting::Shm(socket),
            (LinkKind::Tcp, Some(tls)) => match Channel::tls_server(socket, tls) {
                Ok(channel) => Greeting::Tcp(channel, HelloReader::new()),
                Err(reason) => {
                    tracing::warn!(endpoint = %self.setup.endpoint, "no handshake can be begun: {reason}");
                    return;
                }
            },
            _ => Greeting::Tcp(Channel::plain(socket), HelloReader::new()),
        };
        if unheard.silent.len() == SILENT_CLIENTS_MAX {
            unheard.drop_one();
            tracing::warn!(endpoint = %self.setup.endpoint, "dropped a client that said nothing: too many wait");
        }
        unheard.silent.push_back(Silent { peer, key, greeting, due, deadline: due + HELLO_WAIT });
    }

    /// Lets a client that has something to say go on. `Ok(true)`: the hello is whole.
    fn listen_to(
        &self,
        client: &mut Silent,
        shm_hello: &mut Option<[OwnedFd; 3]>,
    ) -> Result<Option<bool>, String> {
        match &mut client.greeting {
            Greeting::Tcp(channel, reader) => reader.read(channel),
            Greeting::Shm(socket) => {
                *shm_hello = shm::receive_hello(socket)?;
                Ok(shm_hello.is_some().then_some(true))
            }
        }
    }
}

/// Whether a user may see the frames: root, and whoever runs the server.
fn may_share_memory(uid: u32, server_euid: u32) -> bool {
    uid == 0 || uid == server_euid
}

fn bind_tcp(host: &str, port: u16, tcp: &TcpTrust, endpoint: &Endpoint) -> Result<TcpListener, RdmaError> {
    let failed = |source| RdmaError::Io { action: "listen on", endpoint: endpoint.to_string(), source };
    let addresses: Vec<_> = (host, port).to_socket_addrs().map_err(failed)?.collect();
    if matches!(tcp, TcpTrust::Loopback)
        && let Some(open) = addresses.iter().find(|address| !is_loopback(address.ip()))
    {
        return Err(RdmaError::Unsupported(format!(
            "{endpoint}: {} can be reached from other machines; give a key (--key FILE), or --insecure if \
             everybody in the network is trusted",
            open.ip()
        )));
    }
    TcpListener::bind(&addresses[..]).map_err(failed)
}

fn is_loopback(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

fn bind_unix(path: &Path, kind: SocketType, mode: u32) -> io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    let new_socket = || rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
    let socket = new_socket()?;
    if let Err(error) = rustix::net::bind(&socket, &address) {
        if error != rustix::io::Errno::ADDRINUSE {
            return Err(error.into());
        }
        // A socket nobody listens on is left from a server that was killed.
        let in_use =
            !matches!(rustix::net::connect(&new_socket()?, &address), Err(rustix::io::Errno::CONNREFUSED));
        if in_use || !std::os::unix::fs::FileTypeExt::is_socket(&std::fs::symlink_metadata(path)?.file_type())
        {
            return Err(io::Error::new(
                io::ErrorKind::AddrInUse,
                "something else uses this path; stop it or choose another",
            ));
        }
        std::fs::remove_file(path)?;
        rustix::net::bind(&socket, &address)?;
    }
    // Before listen: nobody can connect with a wider mode.
    rustix::fs::chmod(path, Mode::from_raw_mode(mode))?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

impl Listener for SoftListener {
    fn endpoint(&self) -> Endpoint {
        self.setup.endpoint.clone()
    }

    fn accept(&self) -> Result<Box<dyn Incoming>, RdmaError> {
        let mut unheard = self.unheard.lock();
        loop {
            if self.closed.load(Ordering::Acquire) {
                return Err(RdmaError::Closed);
            }
            let now = Instant::now();
            unheard.silent.retain(|client| client.deadline > now);
            let timeout = unheard.next_due(now).map(|due| sys::timespec(due.saturating_duration_since(now)));
            let ready: Vec<bool> = {
                let mut fds =
                    vec![PollFd::new(&self.stop, PollFlags::IN), PollFd::new(&self.socket, PollFlags::IN)];
                fds.extend(unheard.silent.iter().map(|client| {
                    let wanted = if client.due > now { PollFlags::RDHUP } else { PollFlags::IN };
                    PollFd::new(client.greeting.socket(), wanted)
                }));
                match rustix::event::poll(&mut fds, timeout.as_ref()) {
                    Ok(_) => {}
                    Err(rustix::io::Errno::INTR) => continue,
                    Err(error) => {
                        let endpoint = self.setup.endpoint.to_string();
                        return Err(RdmaError::Io { action: "wait on", endpoint, source: error.into() });
                    }
                }
                fds.iter().map(|fd| !fd.revents().is_empty()).collect()
            };
            let spoke = ready[2..].iter().position(|ready| *ready);
            if let Some(index) = spoke.filter(|index| unheard.silent[*index].due > now) {
                // It hung up before its time.
                unheard.silent.remove(index);
            } else if let Some(index) = spoke {
                let mut shm_hello = None;
                let heard = self.listen_to(&mut unheard.silent[index], &mut shm_hello);
                if matches!(heard, Ok(Some(false))) {
                    // Goes to the back of the queue of attention, not of age.
                    continue;
                }
                let Some(client) = unheard.silent.remove(index) else {
                    continue;
                };
                match heard {
                    Ok(Some(_)) => {
                        let peer = self.setup.proven(client.peer, &client.greeting);
                        let setup = self.setup.clone();
                        return Ok(Box::new(SoftIncoming {
                            setup,
                            greeting: client.greeting,
                            peer,
                            shm_hello,
                        }));
                    }
                    Ok(None) => {}
                    Err(reason) => {
                        tracing::warn!(endpoint = %self.setup.endpoint, peer = %client.peer, "handshake failed: {reason}");
                        client.greeting.refuse(&reason);
                    }
                }
            } else if ready[1] {
                self.take_connection(&mut unheard);
            }
        }
    }

    fn close(&self) {
        if !self.closed.swap(true, Ordering::AcqRel) {
            if let Some(path) = &self.path {
                // Gone already is as good.
                let _ = std::fs::remove_file(path);
            }
            // Never taken: every accept, now or later, wakes up.
            sys::ring_eventfd(&self.stop);
            // Who connects between now and the drop of the socket is turned away at once.
            let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        }
    }
}

impl Drop for SoftListener {
    fn drop(&mut self) {
        self.close();
    }
}

/// A client that said hello.
struct SoftIncoming {
    setup: Arc<Setup>,
    greeting: Greeting,
    peer: PeerIdentity,
    shm_hello: Option<[OwnedFd; 3]>,
}

/// Posts receives before a queue pair goes live, so that the first message finds one.
pub(super) fn post_first(receives: &[RecvWr]) -> impl FnOnce(&QpCore) -> Result<(), RdmaError> + '_ {
    move |core| match core.post_receives(receives) {
        (Ok(()), false) => Ok(()),
        (Err(error), _) => {
            Err(RdmaError::Unsupported(format!("the first receives cannot be posted: {error}")))
        }
        (Ok(()), true) => Err(RdmaError::Unsupported(
            "a first receive names memory that is not registered for it".to_owned(),
        )),
    }
}

impl Incoming for SoftIncoming {
    fn peer(&self) -> PeerIdentity {
        self.peer.clone()
    }

    fn link(&self) -> LinkKind {
        self.setup.link
    }

    fn accept(self: Box<Self>, qp: QpConfig, receives: Vec<RecvWr>) -> Result<Arc<dyn QueuePair>, RdmaError> {
        let Self { setup, greeting, peer, shm_hello } = *self;
        let parts: QpParts = setup.device.parts(&setup.registry, qp)?;
        let prepare = post_first(&receives);
        let link = match greeting {
            Greeting::Shm(socket) => {
                let descriptors =
                    shm_hello.expect("a client over shm is incoming once its hello was received");
                shm::ShmIncoming { socket, peer, descriptors }.accept(&setup, parts, prepare)?
            }
            Greeting::Tcp(channel, _) => {
                let endpoint = setup.endpoint.to_string();
                let engine = setup.device.engine().map_err(|source| RdmaError::Io {
                    action: "start the NIC engine for",
                    endpoint: endpoint.clone(),
                    source,
                })?;
                let incoming = TcpIncoming { channel, peer, link: setup.link };
                incoming.accept(&endpoint, parts, prepare, engine, setup.device.file_target.clone())?
            }
        };
        Ok(Arc::new(SoftQp(link)))
    }

    fn refuse(self: Box<Self>, reason: &str) {
        self.greeting.refuse(reason);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_root_and_the_servers_user_may_share_memory() {
        for (uid, server, may) in
            [(0, 0, true), (0, 1000, true), (1000, 1000, true), (1000, 0, false), (1001, 1000, false)]
        {
            assert_eq!(may_share_memory(uid, server), may, "uid {uid}, server {server}");
        }
    }
}
