//! The peer at the other end of a connection, as far as the link knows it.
//!
//! Only facts that the operating system or a handshake has proven are part of it. A peer's own claims in messages are not.

use std::net::SocketAddr;
use std::num::NonZeroI32;
use std::sync::Arc;

/// The user that the kernel shows for a user who is not mapped in this process's user namespace, and for `nobody`.
pub const OVERFLOW_USER: u32 = 65_534;

/// The peer at the other end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerIdentity {
    /// A process of this machine.
    Local(LocalPeer),
    /// An address; nothing is proven about it.
    Remote(SocketAddr),
    /// A peer that has proven to have a cluster key.
    Key {
        /// The key's name, as this side knows it.
        name: Arc<str>,
        /// The peer's address; nothing is proven about it.
        address: SocketAddr,
    },
}

/// A process of this machine, as the kernel saw it when it connected (`SO_PEERCRED`, `SO_PEERGROUPS`).
///
/// Users and groups are those of this process's user namespace; the kernel shows one that is not mapped here as the
/// overflow user (`OVERFLOW_USER`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalPeer {
    /// Effective user.
    pub uid: u32,
    /// Effective group.
    pub gid: u32,
    /// Supplementary groups, in order.
    pub groups: Arc<[u32]>,
    /// Its process, for messages. `None`: a process of another PID namespace, which has no number in this one.
    pub pid: Option<NonZeroI32>,
}

impl LocalPeer {
    /// Root, in no group but its own: the peer of every simulated connection.
    pub fn root() -> Self {
        Self { uid: 0, gid: 0, groups: [].into(), pid: None }
    }
}

impl std::fmt::Display for PeerIdentity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Local(LocalPeer { uid, pid: Some(pid), .. }) => write!(f, "user {uid} (process {pid})"),
            Self::Local(LocalPeer { uid, pid: None, .. }) => {
                write!(f, "user {uid} (a process of another PID namespace)")
            }
            Self::Remote(address) => address.fmt(f),
            Self::Key { name, address } => write!(f, "key {name} ({address})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_as_people_see_them() {
        let local = LocalPeer { uid: 7, pid: NonZeroI32::new(12), ..LocalPeer::root() };
        assert_eq!(PeerIdentity::Local(local).to_string(), "user 7 (process 12)");
        let container = PeerIdentity::Local(LocalPeer::root());
        assert_eq!(container.to_string(), "user 0 (a process of another PID namespace)");
        let address = "[::1]:80".parse().expect("an address");
        assert_eq!(PeerIdentity::Remote(address).to_string(), "[::1]:80");
        assert_eq!(PeerIdentity::Key { name: "box".into(), address }.to_string(), "key box ([::1]:80)");
    }
}
