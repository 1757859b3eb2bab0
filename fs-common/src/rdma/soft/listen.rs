//! Listening endpoints of every link, and the first part of each handshake.
//!
//! # How it works
//! `accept` sleeps in poll(2) on the listening socket, a stop eventfd, and every client that has connected but not said hello yet (`unheard`). Each
//! time it wakes, it reads from all clients that have sent something, and takes in those that have connected since. So each client of a crowd costs
//! one call, not one for each of the others. A client that sends nothing, or nonsense, is dropped after `HELLO_WAIT`, or when its place is needed,
//! and never holds up another. A client whose peer connects often is read from when its time has come (`arrivals`). Where a key is needed, the key is
//! the peer as soon as the first words have proven it.

use super::arrivals::UNHEARD_OF_PEER_MAX;
use super::queue::{QpCore, QpParts};
use super::tcp::{Channel, FirstWords, HelloReader, Knocked, TcpIncoming, TlsConfigs};
use super::unheard::{Client, Crowd, Unheard};
use super::{DeviceShared, TcpTrust, credentials, look_up, shm, sys, tcp};
use crate::breach::Breach;
use crate::descriptors::is_for_peers;
use crate::memory::SharedMemory;
use crate::rdma::PeerKey;
use crate::rdma::peer::{LocalPeer, PeerIdentity};
use crate::rdma::soft::queue::SoftQp;
use crate::rdma::soft::region::Registry;
use crate::rdma::url::Endpoint;
use crate::rdma::verbs::{Incoming, LinkKind, Listener, QpConfig, QueuePair, RdmaError, RecvWr};
use crate::socket_file;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags};
use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Pause after accept failed for want of descriptors or memory, so that the thread does not spin.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// Clients that the kernel queues until they are taken in: a crowd may come while this process has no core.
const BACKLOG: i32 = 4096;
/// Clients taken in before those that are already in are read from. It is less than one peer may have waiting: so the listener notices that some of a
/// peer's clients have hung up before it turns others away for them.
const ACCEPTS_A_PASS: usize = UNHEARD_OF_PEER_MAX / 2;

/// What a listener needs for its connections.
pub(super) struct Setup {
    pub(super) endpoint: Endpoint,
    device: Arc<DeviceShared>,
    registry: Arc<Registry>,
    link: LinkKind,
}

impl Setup {
    /// The exported windows in `WindowId::ALL` order.
    pub(super) fn windows(&self) -> [Option<Arc<SharedMemory>>; 3] {
        self.registry.windows()
    }

    fn tls(&self) -> Option<&TlsConfigs> {
        self.device.tcp.configs()
    }

    /// The peer of a client, now that its handshake is over.
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

/// How far the first part of a client's handshake has come.
pub(super) enum Greeting {
    Shm(OwnedFd),
    /// The client has not proven a key yet, or it has and its time has not come.
    FirstWords(FirstWords),
    Tcp(Channel, HelloReader),
}

impl Greeting {
    fn socket(&self) -> &OwnedFd {
        match self {
            Self::Shm(socket) => socket,
            Self::FirstWords(words) => words.socket(),
            Self::Tcp(channel, _) => channel.socket(),
        }
    }

    fn refuse(&self, reason: &str) {
        match self {
            Self::Shm(socket) => shm::refuse(socket, reason),
            Self::FirstWords(words) => words.refuse(reason),
            Self::Tcp(channel, _) => tcp::refuse(channel, reason),
        }
    }
}

/// The clients of a listener.
struct Hall {
    unheard: Unheard,
    /// Clients that have said hello, to be accepted.
    heard: VecDeque<SoftIncoming>,
}

/// A listening endpoint of the software RNIC.
pub(super) struct SoftListener {
    setup: Arc<Setup>,
    socket: OwnedFd,
    /// The path to remove at the end.
    path: Option<PathBuf>,
    stop: OwnedFd,
    closed: AtomicBool,
    hall: Mutex<Hall>,
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
            Endpoint::Rdma { .. } => return Err(super::not_software(endpoint)),
            // Every user who reaches the path may connect: sessions decide about rights.
            Endpoint::Unix(path) => (
                bind_unix(path, SocketType::STREAM, 0o666).map_err(failed)?,
                LinkKind::Unix,
                Some(path.clone()),
            ),
            // A client of this link sees all frames, so only the server's own user may use the path; peers are checked again.
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
            hall: Mutex::new(Hall { unheard: Unheard::new(&device.unheard), heard: VecDeque::new() }),
        })
    }

    /// Takes a connection from the backlog, and lets its client in if the peer may connect. Returns whether there was one.
    fn take_connection(&self, unheard: &mut Unheard) -> bool {
        let socket =
            match rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => socket,
                Err(rustix::io::Errno::AGAIN) => return false,
                Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => return true,
                // The listener was closed while accept was on its way, so this is the end and no error.
                Err(_) if self.closed.load(Ordering::Acquire) => return false,
                Err(error) => {
                    tracing::warn!(endpoint = %self.setup.endpoint, %error, "cannot accept a connection");
                    std::thread::sleep(ACCEPT_RETRY);
                    return false;
                }
            };
        let peer = match self.setup.link {
            LinkKind::Tcp => remote_peer(&socket),
            _ => credentials::unix_peer(&socket),
        };
        let peer = match peer {
            Ok(peer) => peer,
            Err(error) => {
                tracing::debug!(endpoint = %self.setup.endpoint, %error, "a client went away at once");
                return true;
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
            return true;
        }
        let (key, now) = (PeerKey::from(&peer), Instant::now());
        if !is_for_peers(&socket, key.is_administrator(rustix::process::geteuid().as_raw())) {
            tracing::warn!(endpoint = %self.setup.endpoint, %peer, "refused a client: nearly as many files are open as may be (ulimit -n)");
            let reason = "nearly as many files are open there as may be; try again later, or raise that program's limit (ulimit -n)";
            match (self.setup.link, self.setup.tls()) {
                (LinkKind::Shm, _) => shm::refuse(&socket, reason),
                (LinkKind::Tcp, Some(_)) => {}
                _ => plain(socket).refuse(reason),
            }
            return true;
        }
        match (self.setup.link, self.setup.tls()) {
            (LinkKind::Tcp, Some(_)) => {
                let stranger = Client::new(peer, key, Greeting::FirstWords(FirstWords::new(socket)), now);
                self.make_room(unheard.strangers.add(stranger));
            }
            (LinkKind::Tcp, None) => match tcp::tune_tcp(&socket) {
                Ok(()) => self.let_wait(unheard, peer, key, plain(socket), now),
                Err(error) => {
                    tracing::debug!(endpoint = %self.setup.endpoint, %error, "a client went away at once");
                }
            },
            (LinkKind::Shm, _) => self.let_wait(unheard, peer, key, Greeting::Shm(socket), now),
            _ => self.let_wait(unheard, peer, key, plain(socket), now),
        }
        true
    }

    /// Lets a client whose peer is known wait for its time.
    fn let_wait(
        &self,
        unheard: &mut Unheard,
        peer: PeerIdentity,
        key: PeerKey,
        greeting: Greeting,
        now: Instant,
    ) {
        let is_administrator = key.is_administrator(rustix::process::geteuid().as_raw());
        let Some(due) = unheard.due(&key, is_administrator, now) else {
            self.setup.device.turned_away.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(endpoint = %self.setup.endpoint, %peer, "turned a client away: its peer connects too often");
            greeting.refuse("this peer connects too often; try again in a moment");
            return;
        };
        if due > now {
            self.setup.device.delayed.fetch_add(1, Ordering::Relaxed);
        }
        self.make_room(unheard.known.add(Client::new(peer, key, greeting, due)));
    }

    fn make_room(&self, gone: Option<Client>) {
        if let Some(client) = gone {
            tracing::warn!(endpoint = %self.setup.endpoint, peer = %client.peer, "dropped a client that said nothing: too many wait");
        }
    }

    /// Reads from strangers: a client that proves a key goes on to wait among the known ones.
    fn hear_strangers(&self, unheard: &mut Unheard, spoke: &[bool], tls: &TlsConfigs, now: Instant) {
        let mut strangers = std::mem::take(&mut unheard.strangers);
        strangers.visit(
            |index, _| spoke.get(index).is_some_and(|spoke| *spoke),
            |mut client| {
                let Greeting::FirstWords(words) = &mut client.greeting else {
                    unreachable!("a stranger's first words")
                };
                match words.hear(tls) {
                    Ok(Knocked::Waits) => return Some(client),
                    Ok(Knocked::Gone) => {}
                    Ok(Knocked::As(name)) => {
                        let key = PeerKey::Key(name);
                        self.let_wait(unheard, client.peer, key, client.greeting, now);
                    }
                    Err(reason) => self.fail(&client, &reason),
                }
                None
            },
        );
        unheard.strangers = strangers;
    }

    /// Reads from known clients: a client that says hello can be accepted.
    fn hear_known(&self, hall: &mut Hall, spoke: &[bool], now: Instant) {
        let heard = &mut hall.heard;
        hall.unheard.known.visit(
            |index, _| spoke.get(index).is_some_and(|spoke| *spoke),
            |mut client| {
                if client.due > now {
                    // The client has hung up before its time.
                    return None;
                }
                let mut shm_hello = None;
                match self.listen_to(&mut client, &mut shm_hello) {
                    Ok(Some(false)) => return Some(client),
                    Ok(Some(true)) => {
                        let peer = self.setup.proven(client.peer, &client.greeting);
                        let setup = self.setup.clone();
                        heard.push_back(SoftIncoming { setup, greeting: client.greeting, peer, shm_hello });
                    }
                    Ok(None) => {}
                    Err(reason) => self.fail(&client, &reason),
                }
                None
            },
        );
    }

    /// Begins the handshakes of clients whose time has come.
    fn answer_first_words(&self, known: &mut Crowd, tls: &TlsConfigs, now: Instant) {
        let waits = |client: &Client| client.due <= now && matches!(client.greeting, Greeting::FirstWords(_));
        if !known.iter().any(waits) {
            return;
        }
        known.visit(
            |_, client| waits(client),
            |client| {
                let Client { peer, key, greeting: Greeting::FirstWords(words), due, .. } = client else {
                    unreachable!("first words were looked for")
                };
                match words.answer(tls) {
                    Ok(channel) => {
                        Some(Client::new(peer, key, Greeting::Tcp(channel, HelloReader::new()), due))
                    }
                    Err(reason) => {
                        self.setup.device.refused.fetch_add(1, Ordering::Relaxed);
                        tracing::warn!(endpoint = %self.setup.endpoint, %peer, "handshake failed: {reason}");
                        None
                    }
                }
            },
        );
    }

    fn fail(&self, client: &Client, reason: &Breach) {
        self.setup.device.refused.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(endpoint = %self.setup.endpoint, peer = %client.peer, "handshake failed: {reason}");
        client.greeting.refuse(&reason.to_string());
    }

    /// Lets a client that has sent something go on. `Ok(true)`: its hello is complete.
    fn listen_to(
        &self,
        client: &mut Client,
        shm_hello: &mut Option<[OwnedFd; 3]>,
    ) -> Result<Option<bool>, Breach> {
        match &mut client.greeting {
            Greeting::FirstWords(_) => unreachable!("answered when their time has come"),
            Greeting::Tcp(channel, reader) => reader.read(channel),
            Greeting::Shm(socket) => {
                *shm_hello = shm::receive_hello(socket)?;
                Ok(shm_hello.is_some().then_some(true))
            }
        }
    }
}

fn plain(socket: OwnedFd) -> Greeting {
    Greeting::Tcp(Channel::plain(socket), HelloReader::new())
}

fn remote_peer(socket: &OwnedFd) -> io::Result<PeerIdentity> {
    let address = rustix::net::getpeername(socket)?.and_then(|address| SocketAddr::try_from(address).ok());
    address.map(PeerIdentity::Remote).ok_or_else(|| io::ErrorKind::NotConnected.into())
}

/// Whether a user may see the frames: root, and the user who runs the server.
fn may_share_memory(uid: u32, server_euid: u32) -> bool {
    uid == 0 || uid == server_euid
}

fn bind_tcp(host: &str, port: u16, tcp: &TcpTrust, endpoint: &Endpoint) -> Result<TcpListener, RdmaError> {
    let failed = |source| RdmaError::Io { action: "listen on", endpoint: endpoint.to_string(), source };
    let addresses = look_up(host, port).map_err(failed)?;
    if matches!(tcp, TcpTrust::Loopback)
        && let Some(open) = addresses.iter().find(|address| !is_loopback(address.ip()))
    {
        return Err(RdmaError::Unsupported(format!(
            "{endpoint}: {} can be reached from other machines; give a key (--key FILE), or --insecure if \
             everybody in the network is trusted",
            open.ip()
        )));
    }
    let socket = TcpListener::bind(&addresses[..]).map_err(|error| {
        let advice = match error.kind() {
            io::ErrorKind::AddrInUse => {
                "another program listens on this port, perhaps another cuttlefsd (ss -ltnp shows which); stop it, or choose \
                 another port"
            }
            io::ErrorKind::AddrNotAvailable => {
                "this machine has no such address; write one of its own, or 0.0.0.0 for all of them"
            }
            io::ErrorKind::PermissionDenied => "only root may listen on ports below 1024; choose a higher one",
            _ => return failed(error),
        };
        failed(io::Error::new(error.kind(), format!("{error}: {advice}")))
    })?;
    // The socket already listens, with a shorter queue.
    rustix::net::listen(&socket, BACKLOG).map_err(|error| failed(error.into()))?;
    Ok(socket)
}

fn is_loopback(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

/// Makes the directory of a socket, such as one in /run, which is empty after each boot. Everybody may look into it: the mode of the socket decides
/// who may connect.
fn make_folder(socket: &Path) -> io::Result<()> {
    let Some(folder) = socket.parent().filter(|folder| !folder.exists()) else { return Ok(()) };
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o755).create(folder);
    made.map_err(|error| io::Error::new(error.kind(), format!("cannot make {}: {error}", folder.display())))
}

fn bind_unix(path: &Path, kind: SocketType, mode: u32) -> io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    make_folder(path)?;
    if let Err(error) = rustix::net::bind(&socket, &address) {
        if error != rustix::io::Errno::ADDRINUSE {
            return Err(error.into());
        }
        if !socket_file::is_left_behind(path)? {
            return Err(io::Error::new(
                io::ErrorKind::AddrInUse,
                "something else uses this path; stop it or choose another",
            ));
        }
        std::fs::remove_file(path)?;
        rustix::net::bind(&socket, &address)?;
    }
    // Before listen, so that nobody can connect while the mode is wider.
    socket_file::set_mode(path, mode)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

impl Listener for SoftListener {
    fn endpoint(&self) -> Endpoint {
        self.setup.endpoint.clone()
    }

    fn accept(&self) -> Result<Box<dyn Incoming>, RdmaError> {
        let mut hall = self.hall.lock();
        let hall = &mut *hall;
        loop {
            if self.closed.load(Ordering::Acquire) {
                return Err(RdmaError::Closed);
            }
            if let Some(incoming) = hall.heard.pop_front() {
                return Ok(Box::new(incoming));
            }
            let now = Instant::now();
            hall.unheard.strangers.expire(now);
            hall.unheard.known.expire(now);
            if let Some(tls) = self.setup.tls() {
                self.answer_first_words(&mut hall.unheard.known, tls, now);
            }
            let timeout =
                hall.unheard.next_due(now).map(|due| sys::timespec(due.saturating_duration_since(now)));
            let ready: Vec<bool> = {
                let mut fds =
                    vec![PollFd::new(&self.stop, PollFlags::IN), PollFd::new(&self.socket, PollFlags::IN)];
                fds.extend(hall.unheard.known.iter().chain(hall.unheard.strangers.iter()).map(|client| {
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
            let (of_known, of_strangers) = ready[2..].split_at(hall.unheard.known.iter().count());
            self.hear_known(hall, of_known, now);
            if let Some(tls) = self.setup.tls() {
                self.hear_strangers(&mut hall.unheard, of_strangers, tls, now);
            }
            if ready[1] {
                let _ = (0..ACCEPTS_A_PASS).take_while(|_| self.take_connection(&mut hall.unheard)).count();
            }
        }
    }

    fn close(&self) {
        if !self.closed.swap(true, Ordering::AcqRel) {
            if let Some(path) = &self.path {
                // The path may be gone already.
                let _ = std::fs::remove_file(path);
            }
            // Nobody resets this eventfd, so every accept wakes, now or later.
            sys::ring_eventfd(&self.stop);
            // A client that connects before the socket is dropped is turned away at once.
            let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        }
    }
}

impl Drop for SoftListener {
    fn drop(&mut self) {
        self.close();
    }
}

/// A client that has said hello.
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
        let parts: QpParts = setup
            .device
            .parts(&setup.registry, qp)
            .inspect_err(|error| greeting.refuse(&error.for_the_peer()))?;
        let prepare = post_first(&receives);
        let link = match greeting {
            Greeting::Shm(socket) => {
                let descriptors =
                    shm_hello.expect("a client over shm is incoming once its hello was received");
                shm::ShmIncoming { socket, peer, descriptors }.accept(&setup, parts, prepare)?
            }
            Greeting::FirstWords(_) => unreachable!("a client is incoming once its hello was received"),
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
