//! The peer at the other end of a Unix socket: `SO_PEERCRED` and `SO_PEERGROUPS`, which no crate reads as needed here.
//!
//! `rustix` reads the first, but reports a process of another PID namespace, whose number is 0 here, as an error. No crate reads the second.
//!
//! A path proves nothing: where a server has stopped, any user who may write to the directory can listen instead. So a client asks the kernel for the
//! listener's user before it sends anything (`Trust`).
//!
//! # Failure
//! A kernel without `SO_PEERGROUPS` (before 4.13) is an error: a peer whose groups are unknown is not admitted.

use crate::rdma::peer::{LocalPeer, OVERFLOW_USER, PeerIdentity};
use crate::rdma::verbs::RdmaError;
use rustix::fd::{AsRawFd, OwnedFd};
use std::io;
use std::mem::size_of;
use std::num::NonZeroI32;

/// Groups asked for at first. Linux allows 65,536; the kernel says how many there are if these are too few.
const USUAL_GROUPS: usize = 64;
/// `NGROUPS_MAX`.
const MOST_GROUPS: usize = 65_536;

/// The peer of a Unix socket, at the time when it connected or began to listen.
pub(super) fn unix_peer(socket: &OwnedFd) -> io::Result<PeerIdentity> {
    let libc::ucred { pid, uid, gid } = credentials(socket)?;
    Ok(PeerIdentity::Local(LocalPeer { uid, gid, groups: groups(socket)?.into(), pid: NonZeroI32::new(pid) }))
}

/// The users whose servers this process trusts at a Unix socket: root, its own user, and a user whom the operator named.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Trust {
    pub(super) also: Option<u32>,
}

impl Trust {
    /// The listener of a socket that this process connected.
    pub(super) fn server(self, socket: &OwnedFd, endpoint: &str) -> Result<PeerIdentity, RdmaError> {
        let failed = |source| RdmaError::Io { action: "connect to", endpoint: endpoint.to_owned(), source };
        let peer = unix_peer(socket).map_err(failed)?;
        match &peer {
            PeerIdentity::Local(LocalPeer { uid, .. })
                if !self.is_in(*uid, rustix::process::geteuid().as_raw()) =>
            {
                Err(RdmaError::Untrusted { endpoint: endpoint.to_owned(), uid: *uid })
            }
            _ => Ok(peer),
        }
    }

    /// A user shown as the overflow user may be anybody, even if this process is shown so itself.
    fn is_in(self, uid: u32, own: u32) -> bool {
        uid == 0 || uid == own && own != OVERFLOW_USER || Some(uid) == self.also
    }
}

fn credentials(socket: &OwnedFd) -> io::Result<libc::ucred> {
    let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `found`, which has as many, and any bytes are a `ucred`; it writes the
    // new length to `len`. Both live until the call returns.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // A socket that is not connected has no credentials: the kernel shows user -1.
    if len as usize != size_of::<libc::ucred>() || found.uid == u32::MAX {
        return Err(io::ErrorKind::NotConnected.into());
    }
    Ok(found)
}

fn groups(socket: &OwnedFd) -> io::Result<Vec<u32>> {
    let mut found = vec![0u32; USUAL_GROUPS];
    loop {
        let mut len = (found.len() * size_of::<u32>()) as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes to `found`, which has as many, and any bytes are numbers; it writes
        // the length it has, or would need, to `len`. Both live until the call returns.
        let result = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                found.as_mut_ptr().cast(),
                &raw mut len,
            )
        };
        let count = len as usize / size_of::<u32>();
        if result == 0 {
            found.truncate(count);
            return Ok(found);
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::ERANGE) || count <= found.len() || count > MOST_GROUPS {
            return Err(error);
        }
        found.resize(count, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    #[test]
    fn a_peer_is_who_it_was_when_it_connected() {
        let kind = SocketType::STREAM;
        let (here, _there) =
            rustix::net::socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).expect("a pair");
        let PeerIdentity::Local(peer) = unix_peer(&here).expect("credentials") else {
            panic!("a Unix socket's peer is local");
        };
        let mut own: Vec<u32> =
            rustix::process::getgroups().expect("groups").iter().map(|gid| gid.as_raw()).collect();
        let mut theirs = peer.groups.to_vec();
        own.sort_unstable();
        theirs.sort_unstable();
        assert_eq!(
            (peer.uid, peer.gid),
            (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw())
        );
        assert_eq!(peer.pid.map(NonZeroI32::get), Some(std::process::id() as i32));
        assert_eq!(theirs, own);
    }

    #[test]
    fn root_oneself_and_who_was_named_are_listened_to() {
        let (nobody, named) = (Trust::default(), Trust { also: Some(OVERFLOW_USER) });
        for (uid, own, is_in) in [
            (0, 0, true),
            (0, 7, true),
            (7, 7, true),
            (7, 0, false),
            (7, 8, false),
            (OVERFLOW_USER, 0, false),
            (OVERFLOW_USER, OVERFLOW_USER, false),
        ] {
            assert_eq!(nobody.is_in(uid, own), is_in, "{uid} {own}");
            assert_eq!(named.is_in(uid, own), is_in || uid == OVERFLOW_USER, "{uid} {own}");
            assert!(Trust { also: Some(uid) }.is_in(uid, own), "{uid} {own}");
        }
    }

    #[test]
    fn what_is_not_connected_has_no_peer() {
        let alone =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .expect("a socket");
        assert!(unix_peer(&alone).is_err());
    }
}
