//! Who connected to a Unix socket: `SO_PEERCRED` and `SO_PEERGROUPS`, which no crate here reads as they are.
//!
//! `rustix` has the first, but takes a process of another PID namespace, whose number is 0 here, for an error, and nobody
//! has the second.
//!
//! # Failure
//! A kernel without `SO_PEERGROUPS` (before 4.13) is an error: a peer whose groups are not known is nobody.

use crate::rdma::peer::{LocalPeer, PeerIdentity};
use rustix::fd::{AsRawFd, OwnedFd};
use std::io;
use std::mem::size_of;
use std::num::NonZeroI32;

/// Groups asked for at first. Linux allows 65,536; the kernel says how many there are if these are too few.
const USUAL_GROUPS: usize = 64;
/// `NGROUPS_MAX`.
const MOST_GROUPS: usize = 65_536;

/// Who is at the other end of a Unix socket, as it was when it connected (or began to listen).
pub(super) fn unix_peer(socket: &OwnedFd) -> io::Result<PeerIdentity> {
    let libc::ucred { pid, uid, gid } = credentials(socket)?;
    Ok(PeerIdentity::Local(LocalPeer { uid, gid, groups: groups(socket)?.into(), pid: NonZeroI32::new(pid) }))
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
    // What is not connected has credentials of nobody, which the kernel shows as -1: no user.
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
    fn what_is_not_connected_has_no_peer() {
        let alone =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .expect("a socket");
        assert!(unix_peer(&alone).is_err());
    }
}
