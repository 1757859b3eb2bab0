//! How a `tcp` connection is made: Hello, then Welcome or Refuse.

use super::connection::{FileTargetCell, TcpQp};
use super::engine::Engine;
use super::frame::{
    FRAME_HEADER_LEN, FrameHeader, FrameKind, HELLO_LEN, MAX_REASON_LEN, build, hello_payload, verify,
};
use crate::rdma::peer::PeerIdentity;
use crate::rdma::soft::credentials;
use crate::rdma::soft::queue::{LinkQp, QpCore, QpParts};
use crate::rdma::verbs::{LinkKind, RdmaError};
use rustix::fd::OwnedFd;
use rustix::net::{RecvFlags, SendFlags, sockopt};
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Keepalive: a peer that vanished without a word is noticed after about half a minute.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_COUNT: u32 = 4;
const FULL_HELLO_LEN: usize = FRAME_HEADER_LEN + HELLO_LEN;

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
    for address in (host, port).to_socket_addrs()? {
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
    parts: QpParts,
    prepare: impl FnOnce(&QpCore) -> Result<(), RdmaError>,
    timeout: Duration,
    file_target: FileTargetCell,
) -> Result<Arc<dyn LinkQp>, RdmaError> {
    let failed = |source| RdmaError::Io { action: "connect to", endpoint: endpoint.to_owned(), source };
    let mut stream = connect_address(host, port, timeout).map_err(failed)?;
    stream.set_read_timeout(Some(timeout.max(Duration::from_millis(1)))).map_err(failed)?;
    greet(&mut stream, endpoint)?;
    let peer = PeerIdentity::Remote(stream.peer_addr().map_err(failed)?);
    let socket = OwnedFd::from(stream);
    tune_tcp(&socket).map_err(failed)?;
    finish(socket, endpoint, QpCore::new(parts, LinkKind::Tcp, peer), prepare, file_target)
}

/// Connects to a `unix://` endpoint.
pub(in crate::rdma::soft) fn connect_unix(
    path: &Path,
    endpoint: &str,
    parts: QpParts,
    prepare: impl FnOnce(&QpCore) -> Result<(), RdmaError>,
    timeout: Duration,
    file_target: FileTargetCell,
) -> Result<Arc<dyn LinkQp>, RdmaError> {
    let failed = |source| RdmaError::Io { action: "connect to", endpoint: endpoint.to_owned(), source };
    let mut stream = UnixStream::connect(path).map_err(failed)?;
    stream.set_read_timeout(Some(timeout.max(Duration::from_millis(1)))).map_err(failed)?;
    greet(&mut stream, endpoint)?;
    let socket = OwnedFd::from(stream);
    let peer = credentials::unix_peer(&socket).map_err(failed)?;
    finish(socket, endpoint, QpCore::new(parts, LinkKind::Unix, peer), prepare, file_target)
}

/// The client's part of the handshake.
fn greet(stream: &mut (impl Read + Write), endpoint: &str) -> Result<(), RdmaError> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            RdmaError::Handshake { endpoint: endpoint.to_owned(), reason: "no answer in time".to_owned() }
        }
        io::ErrorKind::UnexpectedEof => RdmaError::Handshake {
            endpoint: endpoint.to_owned(),
            reason: "the server closed the connection".to_owned(),
        },
        _ => RdmaError::Io { action: "greet", endpoint: endpoint.to_owned(), source },
    };
    let broken = |reason: String| RdmaError::Handshake { endpoint: endpoint.to_owned(), reason };
    // A server that refuses at once may have closed already; its reason is still there to be read.
    match stream.write_all(&build(FrameHeader::new(FrameKind::Hello, 0), &hello_payload())) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => return Err(failed(error)),
        _ => {}
    }
    let mut frame = vec![0; FRAME_HEADER_LEN];
    stream.read_exact(&mut frame).map_err(failed)?;
    let header = FrameHeader::parse(&frame).map_err(|error| broken(error.to_string()))?;
    // Welcome and Refuse are short: parse has refused longer ones.
    frame.resize(FRAME_HEADER_LEN + header.payload_len as usize, 0);
    stream.read_exact(&mut frame[FRAME_HEADER_LEN..]).map_err(failed)?;
    verify(&frame).map_err(|error| broken(error.to_string()))?;
    let payload = &frame[FRAME_HEADER_LEN..];
    match header.kind {
        FrameKind::Welcome if payload == hello_payload() => Ok(()),
        FrameKind::Welcome => {
            Err(broken("the server has other limits; run the same release on both".to_owned()))
        }
        FrameKind::Refuse => Err(RdmaError::Refused {
            endpoint: endpoint.to_owned(),
            reason: String::from_utf8_lossy(payload).into_owned(),
        }),
        other => Err(broken(format!("the answer is {other:?}"))),
    }
}

fn finish(
    socket: OwnedFd,
    endpoint: &str,
    core: QpCore,
    prepare: impl FnOnce(&QpCore) -> Result<(), RdmaError>,
    file_target: FileTargetCell,
) -> Result<Arc<dyn LinkQp>, RdmaError> {
    prepare(&core)?;
    let qp = TcpQp::new(core, socket, None, file_target);
    if let Err(source) = qp.start() {
        qp.fail(None);
        return Err(RdmaError::Io { action: "watch", endpoint: endpoint.to_owned(), source });
    }
    Ok(qp)
}

/// Collects a client's Hello as it arrives.
pub(in crate::rdma::soft) struct HelloReader {
    bytes: [u8; FULL_HELLO_LEN],
    len: usize,
}

impl HelloReader {
    pub(in crate::rdma::soft) const fn new() -> Self {
        Self { bytes: [0; FULL_HELLO_LEN], len: 0 }
    }

    /// Reads what is there; true once the hello is whole and good. `Ok(None)`: the client went away.
    pub(in crate::rdma::soft) fn read(&mut self, socket: &OwnedFd) -> Result<Option<bool>, String> {
        // Never more than the hello: what follows belongs to the connection.
        match rustix::net::recv(socket, &mut self.bytes[self.len..], RecvFlags::DONTWAIT) {
            Ok((_, 0)) => return Ok(None),
            Ok((_, count)) => self.len += count,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(Some(false)),
            Err(_) => return Ok(None),
        }
        if self.len >= FRAME_HEADER_LEN {
            let header = FrameHeader::parse(&self.bytes).map_err(|error| error.to_string())?;
            if header.kind != FrameKind::Hello {
                return Err(format!("the first frame is {:?}, no hello", header.kind));
            }
        }
        if self.len < FULL_HELLO_LEN {
            return Ok(Some(false));
        }
        verify(&self.bytes).map_err(|error| error.to_string())?;
        if self.bytes[FRAME_HEADER_LEN..] != hello_payload() {
            return Err("the client has other limits; run the same release on both".to_owned());
        }
        Ok(Some(true))
    }
}

/// A client that said hello.
pub(in crate::rdma::soft) struct TcpIncoming {
    pub(in crate::rdma::soft) socket: OwnedFd,
    pub(in crate::rdma::soft) peer: PeerIdentity,
    pub(in crate::rdma::soft) link: LinkKind,
}

impl TcpIncoming {
    /// Answers with Welcome; the queue pair is live.
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
        let welcome = build(FrameHeader::new(FrameKind::Welcome, 0), &hello_payload());
        // The first bytes of a fresh socket: they fit its buffer or the peer is gone.
        let sent = rustix::net::send(&self.socket, &welcome, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
            .map_err(|error| failed(error.into()))?;
        if sent != welcome.len() {
            return Err(failed(io::Error::other("the welcome did not fit the socket's buffer")));
        }
        let qp = TcpQp::new(core, self.socket, Some(engine), file_target);
        if let Err(source) = qp.start() {
            qp.fail(None);
            return Err(failed(source));
        }
        Ok(qp)
    }
}

/// Tells a client why it may not connect.
pub(in crate::rdma::soft) fn refuse(socket: &OwnedFd, reason: &str) {
    let mut end = reason.len().min(MAX_REASON_LEN);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    let frame = build(FrameHeader::new(FrameKind::Refuse, 0), &reason.as_bytes()[..end]);
    // The client may be gone; there is nobody else to tell.
    let _ = rustix::net::send(socket, &frame, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
}
