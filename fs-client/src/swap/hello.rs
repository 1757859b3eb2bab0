//! Takes processes in: programs that begin, and processes that were forked.
//!
//! A forked process's userfaultfd comes from the kernel by a message of its parent's, and names no process. Nor do addresses tell processes apart: those of
//! one parent have the same. So each process has a page that is new in each child, the badge. A child looks there before it says hello; that is a fault, which
//! comes by the child's own userfaultfd; and what is put there is the number of the process that has this userfaultfd, for the child to say.

use super::process::{Link, Process};
use super::remote::Remote;
use super::swapper::{SwapError, Swapper, kernel};
use super::sys::Uffd;
use super::wire::{ANSWER_MAX, HELLO_LEN, Hello, OTHER_BUILD, PAGE, WELCOME};
use rustix::fs::{Mode, fchmod};
use rustix::io::{IoSlice, IoSliceMut};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, recvmsg, sendmsg,
    socket_with,
};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a process that has connected may take to say hello.
const HELLO_WAIT: Duration = Duration::from_secs(10);
/// Processes that wait for a connection.
const BACKLOG: i32 = 128;
/// Connections that have not said hello yet.
const STRANGERS_MAX: usize = 128;

/// Connections whose process has not said hello yet. Nobody waits for them.
#[derive(Default)]
pub(super) struct Strangers(Vec<(OwnedFd, Instant)>);

impl Strangers {
    /// Their sockets.
    pub(super) fn sockets(&self) -> impl Iterator<Item = &OwnedFd> {
        self.0.iter().map(|(socket, _)| socket)
    }

    /// Adds the next connection. If there are too many the oldest is forgotten: a process says hello at once.
    pub(super) fn accept(&mut self, listener: &UnixListener) -> Result<(), SwapError> {
        let (socket, _) = listener.accept().map_err(kernel("take a connection"))?;
        if self.0.len() == STRANGERS_MAX {
            self.0.remove(0);
        }
        self.add(socket.into());
        Ok(())
    }

    /// Adds a connection, or one that was taken and cannot be taken in yet.
    pub(super) fn add(&mut self, socket: OwnedFd) {
        self.0.push((socket, Instant::now()));
    }

    /// Takes those that have said something, in the order of [`Self::sockets`], and forgets those that have been silent for too long.
    pub(super) fn take(&mut self, have_spoken: &[bool]) -> Vec<OwnedFd> {
        let mut spoken = have_spoken.iter().copied();
        let taken =
            self.0.extract_if(.., |_| spoken.next().unwrap_or(false)).map(|(socket, _)| socket).collect();
        self.0.retain(|(_, since)| since.elapsed() < HELLO_WAIT);
        taken
    }
}

impl<R: Remote> Swapper<R> {
    /// Takes in a process that has said something. What is wrong with it is told to it, and ends it alone.
    pub(super) fn take_in(&mut self, socket: OwnedFd) {
        let Ok(peer) = rustix::net::sockopt::socket_peercred(&socket) else { return };
        let mut bytes = [0; HELLO_LEN + 1];
        let Ok((len @ 1.., uffd)) = receive_with(&socket, &mut bytes) else { return };
        let Some(hello) = Hello::parse(&bytes[..len]) else {
            return refuse(&socket, OTHER_BUILD);
        };
        let pid = peer.pid.as_raw_nonzero().get();
        let own = match (hello, uffd) {
            (Hello::Begun { heap, arena, badge, staging }, Some(uffd)) => {
                let uffd = Uffd::from(uffd);
                let registered = [heap, arena, (badge, PAGE as u64)]
                    .into_iter()
                    .filter(|(_, len)| *len > 0)
                    .try_for_each(|(start, len)| uffd.register(start, len));
                match registered {
                    Ok(()) => {
                        let link = Link { socket, pid, staging, thread: None };
                        self.figures.processes += 1;
                        self.last += 1;
                        self.processes.insert(self.last, Process::new(uffd, Some(link), badge));
                        self.last
                    }
                    Err(error) => {
                        return refuse(&socket, &format!("its memory cannot be registered: {error}"));
                    }
                }
            }
            (Hello::Forked { number, staging }, None) => {
                match self.processes.get_mut(&number).filter(|process| process.link.is_none()) {
                    Some(process) => {
                        process.link = Some(Link { socket, pid, staging, thread: None });
                        number
                    }
                    None => return refuse(&socket, "no process that has its number waits to be taken in"),
                }
            }
            _ => return refuse(&socket, "it says hello without what belongs to that"),
        };
        let Some(process) = self.processes.get(&own) else { return };
        // One that has a userfaultfd keeps it open, so that the kernel does not let go of its memory if this process ends before it.
        let shown = process.uffd.as_fd();
        if let Some(link) = &process.link
            && send_with(&link.socket, &[WELCOME], matches!(hello, Hello::Forked { .. }).then_some(shown))
                .is_err()
            && let Some(mut process) = self.processes.remove(&own)
        {
            process.end(&mut self.store);
        }
    }
}

fn refuse(socket: &OwnedFd, reason: &str) {
    let reason = &reason.as_bytes()[..reason.len().min(ANSWER_MAX)];
    // It sees that the connection ends, too.
    let _ = send_with(socket, reason, None);
}

/// Listens for processes of this user, and of root.
///
/// # Errors
/// The path cannot be made a socket.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    // Before it has a path, which gets this mode: nobody else can connect at any time.
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(UnixListener::from(socket))
}

/// Sends a message, and a descriptor with it.
///
/// # Errors
/// The other end is gone.
pub fn send_with(socket: impl AsFd, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut room);
    let fds = fd.as_slice();
    if !fds.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(fds));
    }
    sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives a message, and the descriptor that came with it.
///
/// # Errors
/// The other end is gone, or silent.
pub fn receive_with(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut room);
    let got = recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let mut fd = None;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            fd = fds.last().or(fd);
        }
    }
    Ok((got.bytes, fd))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn silent_connections_wait_by_themselves() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("swap");
        let listener = listen(&path).expect("a socket");
        let mut strangers = Strangers::default();
        let connect = |strangers: &mut Strangers| {
            let socket =
                rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
            rustix::net::connect(&socket, &SocketAddrUnix::new(&path).expect("a path")).expect("connected");
            strangers.accept(&listener).expect("accepted");
            socket
        };
        let _connected: Vec<_> = (0..3).map(|_| connect(&mut strangers)).collect();
        let before: Vec<_> = strangers.sockets().map(AsRawFd::as_raw_fd).collect();
        let taken = strangers.take(&[false, true, false]);
        assert_eq!(taken.iter().map(AsRawFd::as_raw_fd).collect::<Vec<_>>(), [before[1]]);
        let left: Vec<_> = strangers.sockets().map(AsRawFd::as_raw_fd).collect();
        assert_eq!(left, [before[0], before[2]], "the others wait on");
        let youngest = strangers.0[1].0.as_raw_fd();
        for number in 0..STRANGERS_MAX {
            assert_eq!(strangers.sockets().count(), (2 + number).min(STRANGERS_MAX));
            drop(connect(&mut strangers));
            if number == STRANGERS_MAX - 2 {
                assert_eq!(strangers.0[0].0.as_raw_fd(), youngest, "the oldest is forgotten");
            }
        }
        strangers.0.truncate(2);
        strangers.0[0].1 -= HELLO_WAIT;
        assert!(strangers.take(&[false, false]).is_empty());
        assert_eq!(strangers.sockets().count(), 1, "one was silent for too long");
    }

    #[test]
    fn other_users_cannot_connect() {
        let directory = tempfile::tempdir().expect("directory");
        let socket = directory.path().join("swap");
        let _listener = listen(&socket).expect("a socket");
        let mode = std::fs::metadata(&socket).expect("there").permissions().mode();
        assert_eq!(mode & 0o7777, 0o600);
    }
}
