//! The handshake of a shared-memory connection.
//!
//! The client asks the kernel for the listener's user, and sends Hello with its sleep pages and doorbell. The server checks the client's user
//! (`SO_PEERCRED`), makes the connection's memory and answers with Welcome, its own pages and doorbell, and the windows, opened read-only.
//! Descriptors that are missing, unsealed or too small end the handshake with a reason.

use super::connection::{ShmParts, ShmQp};
use super::ring::{DIRECTORY_LEN, MEMORY_LEN, RING_LEN, Side};
use super::wire::ShmMessage;
use crate::breach::Breach;
use crate::memory::SharedMemory;
use crate::rdma::peer::PeerIdentity;
use crate::rdma::soft::cq::SLEEP_PAGE_LEN;
use crate::rdma::soft::credentials::Trust;
use crate::rdma::soft::fds;
use crate::rdma::soft::listen::Setup;
use crate::rdma::soft::queue::{LinkQp, QpCore, QpParts};
use crate::rdma::soft::sys;
use crate::rdma::verbs::{LinkKind, RdmaError};
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const BUFFER_LEN: usize = 512;

/// A connection at the client: its queue pair and the server's windows.
type Connection = (Arc<dyn LinkQp>, Vec<Arc<SharedMemory>>);

/// The sleep pages of both queues, to hand to the peer.
fn sleep_pages(parts: &QpParts) -> io::Result<[OwnedFd; 2]> {
    Ok([
        sys::read_only_descriptor(parts.recv_cq.page().fd())?,
        sys::read_only_descriptor(parts.send_cq.page().fd())?,
    ])
}

fn map_pages(pages: [OwnedFd; 2]) -> io::Result<[SharedMemory; 2]> {
    let [first, second] = pages;
    Ok([
        SharedMemory::from_fd(first, SLEEP_PAGE_LEN, false)?,
        SharedMemory::from_fd(second, SLEEP_PAGE_LEN, false)?,
    ])
}

/// Connects to a `shm://` endpoint.
pub(in crate::rdma::soft) fn connect(
    path: &Path,
    trust: Trust,
    parts: QpParts,
    prepare: impl FnOnce(&QpCore) -> Result<(), RdmaError>,
    timeout: Duration,
) -> Result<Connection, RdmaError> {
    let endpoint = format!("shm://{}", path.display());
    let io_error = |action| {
        let endpoint = endpoint.clone();
        move |source: io::Error| RdmaError::Io { action, endpoint, source }
    };
    let handshake = |reason: String| RdmaError::Handshake { endpoint: endpoint.clone(), reason };
    let connecting = || -> io::Result<OwnedFd> {
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(socket)
    };
    let socket = connecting().map_err(io_error("connect to"))?;
    let peer = trust.server(&socket, &endpoint)?;
    let greeting = || -> io::Result<OwnedFd> {
        let doorbell = sys::new_eventfd()?;
        let [receive_page, send_page] = sleep_pages(&parts)?;
        let hello = ShmMessage::Hello { page_len: SLEEP_PAGE_LEN as u32 }.encode();
        match fds::send(&socket, &hello, &[receive_page.as_fd(), send_page.as_fd(), doorbell.as_fd()]) {
            // The server may have refused already; then its reason waits in the socket.
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
            Err(error) => return Err(error),
        }
        Ok(doorbell)
    };
    let doorbell = greeting().map_err(io_error("greet"))?;
    if !sys::wait_readable(&socket, timeout).map_err(io_error("wait for"))? {
        return Err(handshake(format!("no answer in {} ms", timeout.as_millis())));
    }
    let mut buffer = [0; BUFFER_LEN];
    let (len, descriptors) = match fds::receive::<{ fds::MAX_DESCRIPTORS }>(&socket, &mut buffer) {
        // A server that refuses does not read the hello, which causes this error once; its reason waits behind it.
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
            fds::receive::<{ fds::MAX_DESCRIPTORS }>(&socket, &mut buffer)
        }
        received => received,
    }
    .map_err(io_error("receive from"))?
    .ok_or_else(|| handshake("the server closed the connection".to_owned()))?;
    let (memory_len, window_lens) =
        match ShmMessage::parse(&buffer[..len]).map_err(|error| handshake(error.to_string()))? {
            ShmMessage::Refuse { reason } => return Err(RdmaError::Refused { endpoint, reason }),
            ShmMessage::Welcome { page_len, ring_len, directory_len, memory_len, window_lens } => {
                let same = page_len as usize == SLEEP_PAGE_LEN
                    && ring_len as usize == RING_LEN
                    && directory_len as usize == DIRECTORY_LEN
                    && memory_len == MEMORY_LEN as u64;
                if !same {
                    return Err(handshake(
                        "the server lays its rings out otherwise; run the same release on both".to_owned(),
                    ));
                }
                (MEMORY_LEN, window_lens)
            }
            _ => {
                return Err(handshake("the answer is neither welcome nor refusal".to_owned()));
            }
        };
    let exported = window_lens.iter().filter(|len| **len != 0).count();
    if descriptors.len() != 4 + exported {
        return Err(handshake(format!(
            "{} descriptors came where {} belong",
            descriptors.len(),
            4 + exported
        )));
    }
    let mut descriptors = descriptors.into_iter();
    let mut next = || descriptors.next().expect("counted above");
    let memory = SharedMemory::from_fd(next(), memory_len, true).map_err(io_error("map memory of"))?;
    let peer_pages = map_pages([next(), next()]).map_err(io_error("map memory of"))?;
    let peer_doorbell = next();
    let mut windows = Vec::with_capacity(exported);
    for len in window_lens.into_iter().filter(|len| *len != 0) {
        let len = usize::try_from(len).map_err(|_| handshake("a window is larger than memory".to_owned()))?;
        let memory = SharedMemory::from_fd(next(), len, false).map_err(io_error("map memory of"))?;
        windows.push(Arc::new(memory));
    }
    let core = QpCore::new(parts, LinkKind::Shm, peer);
    prepare(&core)?;
    let qp = ShmQp::new(
        core,
        ShmParts { socket, memory, side: Side::Client, doorbell, peer_doorbell, peer_pages },
    );
    if let Err(source) = qp.start() {
        qp.fail(None);
        return Err(io_error("watch")(source));
    }
    Ok((qp, windows))
}

/// Takes a client's Hello from a socket that is readable. `None`: the client went away.
pub(in crate::rdma::soft) fn receive_hello(socket: &OwnedFd) -> Result<Option<[OwnedFd; 3]>, Breach> {
    let mut buffer = [0; BUFFER_LEN];
    let Some((len, descriptors)) = fds::receive::<{ fds::MAX_DESCRIPTORS }>(socket, &mut buffer)? else {
        return Ok(None);
    };
    match ShmMessage::parse(&buffer[..len])? {
        ShmMessage::Hello { page_len } if page_len as usize == SLEEP_PAGE_LEN => {}
        ShmMessage::Hello { .. } => {
            return Err(Breach::of("sleep pages have another size; run the same release on both"));
        }
        _ => return Err(Breach::of("the first message is no hello")),
    }
    let count = descriptors.len();
    descriptors
        .try_into()
        .map(Some)
        .map_err(|_| Breach::new(format_args!("{count} descriptors came with the hello where 3 belong")))
}

/// A client that has said hello.
pub(in crate::rdma::soft) struct ShmIncoming {
    pub(in crate::rdma::soft) socket: OwnedFd,
    pub(in crate::rdma::soft) peer: PeerIdentity,
    pub(in crate::rdma::soft) descriptors: [OwnedFd; 3],
}

impl ShmIncoming {
    /// Answers with Welcome, and makes the queue pair live.
    pub(in crate::rdma::soft) fn accept(
        self,
        setup: &Setup,
        parts: QpParts,
        prepare: impl FnOnce(&QpCore) -> Result<(), RdmaError>,
    ) -> Result<Arc<dyn LinkQp>, RdmaError> {
        let Self { socket, peer, descriptors: [receive_page, send_page, peer_doorbell] } = self;
        let endpoint = setup.endpoint.to_string();
        let io_error = |action| {
            let endpoint = endpoint.clone();
            move |source: io::Error| RdmaError::Io { action, endpoint, source }
        };
        let peer_pages = map_pages([receive_page, send_page]).map_err(|error| RdmaError::Handshake {
            endpoint: endpoint.clone(),
            reason: format!("the client's sleep pages cannot be mapped: {error}"),
        })?;
        let welcoming = || -> io::Result<(SharedMemory, OwnedFd)> {
            let memory = SharedMemory::new("cuttlefs-rings", MEMORY_LEN)?;
            let doorbell = sys::new_eventfd()?;
            let pages = sleep_pages(&parts)?;
            let windows = setup.windows();
            let mut window_lens = [0; 3];
            let mut opened = Vec::new();
            for (len, window) in window_lens.iter_mut().zip(&windows) {
                if let Some(window) = window {
                    *len = window.len() as u64;
                    opened.push(sys::read_only_descriptor(window.fd())?);
                }
            }
            let welcome = ShmMessage::Welcome {
                page_len: SLEEP_PAGE_LEN as u32,
                ring_len: RING_LEN as u32,
                directory_len: DIRECTORY_LEN as u32,
                memory_len: MEMORY_LEN as u64,
                window_lens,
            };
            let mut all = vec![memory.fd(), pages[0].as_fd(), pages[1].as_fd(), doorbell.as_fd()];
            all.extend(opened.iter().map(AsFd::as_fd));
            fds::send(&socket, &welcome.encode(), &all)?;
            Ok((memory, doorbell))
        };
        let core_peer = peer.clone();
        let (memory, doorbell) = welcoming().map_err(io_error("answer a client of"))?;
        let core = QpCore::new(parts, LinkKind::Shm, core_peer);
        prepare(&core)?;
        let qp = ShmQp::new(
            core,
            ShmParts { socket, memory, side: Side::Server, doorbell, peer_doorbell, peer_pages },
        );
        if let Err(source) = qp.start() {
            qp.fail(None);
            return Err(io_error("watch a client of")(source));
        }
        Ok(qp)
    }
}

/// Tells a client why it may not connect.
pub(in crate::rdma::soft) fn refuse(socket: &OwnedFd, reason: &str) {
    // The client may be gone, and nobody else needs the reason.
    let _ = fds::send(socket, &ShmMessage::Refuse { reason: reason.to_owned() }.encode(), &[]);
}
