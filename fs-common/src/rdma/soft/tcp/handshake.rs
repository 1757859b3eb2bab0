//! The handshake of a `tcp` connection: with keys a knock and the proof of a key (`tls`), then Hello, then Welcome or Refuse.

use super::channel::{Channel, Dialogue, DialogueError, Input, TLS_FIRST_BYTES, receive, speaks_tls};
use super::connection::{FileTargetCell, TcpQp};
use super::engine::Engine;
use super::packet::{
    HELLO_LEN, MAGIC, MAX_REASON_LEN, PACKET_HEADER_LEN, PacketHeader, PacketKind, build, hello_payload,
    verify,
};
use super::tls::{ACCESS_DENIED, FIRST_WORDS_MAX, TlsConfigs};
use crate::breach::Breach;
use crate::rdma::peer::PeerIdentity;
use crate::rdma::soft::credentials::Trust;
use crate::rdma::soft::look_up;
use crate::rdma::soft::queue::{LinkQp, QpCore, QpParts};
use crate::rdma::verbs::{LinkKind, RdmaError};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{SendFlags, sockopt};
use std::io;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Keepalive: the server notices after about half a minute that a peer has vanished.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_COUNT: u32 = 4;
/// The refusal of an unencrypted client where keys are needed.
const KEY_NEEDED: &str = "the server asks for a key: give --key FILE (a mount also takes -o key=FILE, \
     a session of the library the option `key`); the file is a copy of one of the server's keys";
/// What answers is something else.
const FOREIGN: &str = "what answers there is no cuttlefs server";
/// The refusal of a client that proves a key where none is taken.
const NO_KEY_TAKEN: &str = "the server takes no keys (it runs with --insecure); mount without a key if everybody on the way is trusted";
const FULL_HELLO_LEN: usize = PACKET_HEADER_LEN + HELLO_LEN;

/// Options of a TCP socket, either side.
pub(in crate::rdma::soft) fn tune_tcp(socket: &OwnedFd) -> io::Result<()> {
    sockopt::set_tcp_nodelay(socket, true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(socket, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(socket, KEEPALIVE_COUNT)?;
    Ok(())
}

fn connect_address(host: &str, port: u16, timeout: Duration) -> io::Result<TcpStream> {
    let deadline = Instant::now() + timeout;
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in look_up(host, port)? {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        match TcpStream::connect_timeout(&address, left) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Connects to a `tcp://` endpoint.
pub(in crate::rdma::soft) fn connect_tcp(
    (host, port): (&str, u16),
    endpoint: &str,
    tls: Option<&TlsConfigs>,
    parts: QpParts,
    prepare: impl FnOnce(&QpCore) -> Result<(), RdmaError>,
    timeout: Duration,
    file_target: FileTargetCell,
) -> Result<Arc<dyn LinkQp>, RdmaError> {
    let failed = |source| RdmaError::Io { action: "connect to", endpoint: endpoint.to_owned(), source };
    let deadline = Instant::now() + timeout;
    let stream = connect_address(host, port, timeout).map_err(failed)?;
    let address = stream.peer_addr().map_err(failed)?;
    let peer = match tls {
        None => PeerIdentity::Remote(address),
        Some(configs) => PeerIdentity::Key { name: configs.own_name().clone(), address },
    };
    let socket = OwnedFd::from(stream);
    tune_tcp(&socket).map_err(failed)?;
    let channel = greet(socket, tls, deadline, endpoint)?;
    finish(channel, endpoint, QpCore::new(parts, LinkKind::Tcp, peer), prepare, file_target)
}

/// Connects to a `unix://` endpoint.
pub(in crate::rdma::soft) fn connect_unix(
    (path, endpoint): (&Path, &str),
    trust: Trust,
    parts: QpParts,
    prepare: impl FnOnce(&QpCore) -> Result<(), RdmaError>,
    timeout: Duration,
    file_target: FileTargetCell,
) -> Result<Arc<dyn LinkQp>, RdmaError> {
    let failed = |source| RdmaError::Io { action: "connect to", endpoint: endpoint.to_owned(), source };
    let deadline = Instant::now() + timeout;
    let socket = OwnedFd::from(UnixStream::connect(path).map_err(failed)?);
    let peer = trust.server(&socket, endpoint)?;
    let channel = greet(socket, None, deadline, endpoint)?;
    finish(channel, endpoint, QpCore::new(parts, LinkKind::Unix, peer), prepare, file_target)
}

/// The client's part of the handshake.
fn greet(
    socket: OwnedFd,
    tls: Option<&TlsConfigs>,
    deadline: Instant,
    endpoint: &str,
) -> Result<Channel, RdmaError> {
    let failed = |error: DialogueError| {
        let endpoint = endpoint.to_owned();
        match error {
            DialogueError::Io(source) => RdmaError::Io { action: "greet", endpoint, source },
            DialogueError::Late => RdmaError::Handshake { endpoint, reason: "no answer in time".to_owned() },
            DialogueError::Closed => {
                RdmaError::Handshake { endpoint, reason: "the server closed the connection".to_owned() }
            }
            DialogueError::Tls(reason) => RdmaError::Refused { endpoint, reason: reason.to_string() },
            // A server that takes no keys refuses, and anything else says what it says. A welcome in plain is not believed.
            DialogueError::InPlain(channel) => match answer(&channel, deadline, &endpoint) {
                Err(error) => error,
                Ok(()) => RdmaError::Refused { endpoint, reason: NO_KEY_TAKEN.to_owned() },
            },
        }
    };
    let channel = Dialogue::open(socket, tls, deadline).map_err(failed)?;
    let hello = build(PacketHeader::new(PacketKind::Hello, 0), &hello_payload());
    // A server that refuses at once may have closed already; its reason can still be read.
    match Dialogue::new(&channel, deadline).say(&hello) {
        Err(DialogueError::Io(error)) if error.kind() == io::ErrorKind::BrokenPipe => {}
        result => result.map_err(failed)?,
    }
    answer(&channel, deadline, endpoint)?;
    Ok(channel)
}

/// The server's answer to a hello: `Ok` if it is a welcome.
fn answer(channel: &Channel, deadline: Instant, endpoint: &str) -> Result<(), RdmaError> {
    let broken = |reason: String| RdmaError::Handshake { endpoint: endpoint.to_owned(), reason };
    let failed = |error: DialogueError| match error {
        DialogueError::Io(source) => RdmaError::Io { action: "greet", endpoint: endpoint.to_owned(), source },
        DialogueError::Late => broken("no answer in time".to_owned()),
        DialogueError::Tls(reason) => {
            RdmaError::Refused { endpoint: endpoint.to_owned(), reason: reason.to_string() }
        }
        DialogueError::Closed | DialogueError::InPlain(_) => {
            broken("the server closed the connection".to_owned())
        }
    };
    let dialogue = Dialogue::new(channel, deadline);
    let mut packet = vec![0; PACKET_HEADER_LEN];
    // Something else may say less than a header, and wait.
    let (magic, rest) = packet.split_at_mut(MAGIC.len());
    dialogue.hear(magic).map_err(failed)?;
    if *magic != MAGIC {
        return Err(broken(FOREIGN.to_owned()));
    }
    dialogue.hear(rest).map_err(failed)?;
    let header = PacketHeader::parse(&packet).map_err(|error| broken(error.to_string()))?;
    // Welcome and Refuse are short, since parse refuses longer ones.
    packet.resize(PACKET_HEADER_LEN + header.payload_len as usize, 0);
    dialogue.hear(&mut packet[PACKET_HEADER_LEN..]).map_err(failed)?;
    verify(&packet).map_err(|error| broken(error.to_string()))?;
    let payload = &packet[PACKET_HEADER_LEN..];
    match header.kind {
        PacketKind::Welcome if payload == hello_payload() => Ok(()),
        PacketKind::Welcome => {
            Err(broken("the server has other limits; run the same release on both".to_owned()))
        }
        // The reason goes to a terminal, and nothing is proven about its sender.
        PacketKind::Refuse => Err(RdmaError::Refused {
            endpoint: endpoint.to_owned(),
            reason: String::from_utf8_lossy(payload).replace(char::is_control, " "),
        }),
        other => Err(broken(format!("the answer is {other:?}"))),
    }
}

fn finish(
    channel: Channel,
    endpoint: &str,
    core: QpCore,
    prepare: impl FnOnce(&QpCore) -> Result<(), RdmaError>,
    file_target: FileTargetCell,
) -> Result<Arc<dyn LinkQp>, RdmaError> {
    prepare(&core)?;
    let qp = TcpQp::new(core, channel, None, file_target);
    if let Err(source) = qp.start() {
        qp.fail(None);
        return Err(RdmaError::Io { action: "watch", endpoint: endpoint.to_owned(), source });
    }
    Ok(qp)
}

/// Collects a client's Hello as it arrives; on an encrypted channel it comes behind the proof of a key.
pub(in crate::rdma::soft) struct HelloReader {
    bytes: [u8; FULL_HELLO_LEN],
    len: usize,
    /// The peer has sent something.
    begun: bool,
}

impl HelloReader {
    pub(in crate::rdma::soft) const fn new() -> Self {
        Self { bytes: [0; FULL_HELLO_LEN], len: 0, begun: false }
    }

    /// Reads all that is there; true once the hello is complete and good. `Ok(None)`: the client went away.
    pub(in crate::rdma::soft) fn read(&mut self, channel: &Channel) -> Result<Option<bool>, Breach> {
        if !self.begun && !channel.is_sealed() {
            match speaks_tls(channel.socket()) {
                Ok(None) => return Ok(Some(false)),
                Ok(Some(false)) => self.begun = true,
                Ok(Some(true)) => return Err(Breach::of(NO_KEY_TAKEN)),
                Err(_) => return Ok(None),
            }
        }
        // Never more than the hello: the bytes behind it belong to the connection.
        match channel.receive(&mut self.bytes[self.len..])? {
            Input::Closed => return Ok(None),
            Input::Bytes { count, .. } => self.len += count,
            Input::Nothing => return Ok(Some(false)),
        }
        if self.len >= PACKET_HEADER_LEN {
            let header = PacketHeader::parse(&self.bytes)?;
            if header.kind != PacketKind::Hello {
                return Err(Breach::new(format_args!("the first packet is {:?}, no hello", header.kind)));
            }
        }
        if self.len < FULL_HELLO_LEN {
            return Ok(Some(false));
        }
        verify(&self.bytes)?;
        if self.bytes[PACKET_HEADER_LEN..] != hello_payload() {
            return Err(Breach::of("the client has other limits; run the same release on both"));
        }
        Ok(Some(true))
    }
}

/// A client's first words, as they arrive, where a key is needed.
pub(in crate::rdma::soft) struct FirstWords {
    socket: OwnedFd,
    words: Vec<u8>,
}

/// The result of reading first words.
pub(in crate::rdma::soft) enum Knocked {
    /// They are not complete.
    Waits,
    /// The client went away.
    Gone,
    /// The client has the key of this name.
    As(Arc<str>),
}

impl FirstWords {
    pub(in crate::rdma::soft) const fn new(socket: OwnedFd) -> Self {
        Self { socket, words: Vec::new() }
    }

    pub(in crate::rdma::soft) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Reads all that is there. The error is why the client may not go on.
    pub(in crate::rdma::soft) fn hear(&mut self, tls: &TlsConfigs) -> Result<Knocked, Breach> {
        let mut space = [0; FIRST_WORDS_MAX];
        match receive(&self.socket, &mut space[self.words.len()..]) {
            Ok(0) => return Ok(Knocked::Gone),
            Ok(count) => self.words.extend_from_slice(&space[self.words.len()..][..count]),
            Err(Errno::AGAIN) => return Ok(Knocked::Waits),
            Err(_) => return Ok(Knocked::Gone),
        }
        if !self.are_tls() {
            return Err(Breach::of(KEY_NEEDED));
        }
        // The space holds the longest first words, so one read gets all or none of them.
        match tls.hear_knock(&self.words)? {
            Some(name) => Ok(Knocked::As(name)),
            None => Ok(Knocked::Waits),
        }
    }

    fn are_tls(&self) -> bool {
        self.words.first().is_some_and(|first| TLS_FIRST_BYTES.contains(first))
    }

    /// Begins the TLS handshake.
    pub(in crate::rdma::soft) fn answer(self, tls: &TlsConfigs) -> Result<Channel, Breach> {
        tune_tcp(&self.socket)?;
        Channel::tls_server(self.socket, tls, &self.words)
    }

    /// Tells the client the reason, in a form that it can read.
    pub(in crate::rdma::soft) fn refuse(&self, reason: &str) {
        let answer = if self.are_tls() { ACCESS_DENIED.to_vec() } else { refusal(reason) };
        // The peer may be gone, and nobody else needs the reason.
        let _ = rustix::net::send(&self.socket, &answer, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    }
}

/// A client that has said hello.
pub(in crate::rdma::soft) struct TcpIncoming {
    pub(in crate::rdma::soft) channel: Channel,
    pub(in crate::rdma::soft) peer: PeerIdentity,
    pub(in crate::rdma::soft) link: LinkKind,
}

impl TcpIncoming {
    /// Answers with Welcome, and makes the queue pair live.
    pub(in crate::rdma::soft) fn accept(
        self,
        endpoint: &str,
        parts: QpParts,
        prepare: impl FnOnce(&QpCore) -> Result<(), RdmaError>,
        engine: Arc<Engine>,
        file_target: FileTargetCell,
    ) -> Result<Arc<dyn LinkQp>, RdmaError> {
        let failed =
            |source| RdmaError::Io { action: "answer a client of", endpoint: endpoint.to_owned(), source };
        let core = QpCore::new(parts, self.link, self.peer);
        prepare(&core)?;
        let welcome = build(PacketHeader::new(PacketKind::Welcome, 0), &hello_payload());
        self.channel.send_first(&welcome).map_err(failed)?;
        let qp = TcpQp::new(core, self.channel, Some(engine), file_target);
        if let Err(source) = qp.start() {
            qp.fail(None);
            return Err(failed(source));
        }
        Ok(qp)
    }
}

fn refusal(reason: &str) -> Vec<u8> {
    let mut end = reason.len().min(MAX_REASON_LEN);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    build(PacketHeader::new(PacketKind::Refuse, 0), &reason.as_bytes()[..end])
}

/// Tells a client why it may not connect.
pub(in crate::rdma::soft) fn refuse(channel: &Channel, reason: &str) {
    channel.send_refusal(&refusal(reason));
}
