//! The key by which shares are counted: it is the same for all connections of one peer.

use super::peer::{LocalPeer, PeerIdentity};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

/// A peer, as bounds distinguish peers.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum PeerKey {
    /// A user of this machine.
    User(u32),
    /// A machine; for IPv6 a network, since one machine can have any of its addresses.
    Machine(IpAddr),
    /// Everybody who has this cluster key.
    Key(Arc<str>),
}

/// The part of an IPv6 address that belongs to one site. The site chooses the rest as it likes.
const SITE_PREFIX: u128 = !0 << 64;

impl PeerKey {
    /// Whether this is root, or the user who runs the server.
    pub fn is_administrator(&self, server_euid: u32) -> bool {
        matches!(self, Self::User(uid) if *uid == 0 || *uid == server_euid)
    }

    /// Whether both may be the same user, as far as links prove that. A user may have many processes. Two addresses count as the same user, since an
    /// address proves nothing and may change.
    pub fn is_same_user(&self, other: &Self) -> bool {
        matches!((self, other), (Self::Machine(_), Self::Machine(_))) || self == other
    }

    fn of_address(address: IpAddr) -> Self {
        Self::Machine(match address.to_canonical() {
            IpAddr::V4(address) => address.into(),
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & SITE_PREFIX).into(),
        })
    }
}

impl From<&PeerIdentity> for PeerKey {
    fn from(identity: &PeerIdentity) -> Self {
        match identity {
            PeerIdentity::Local(LocalPeer { uid, .. }) => Self::User(*uid),
            PeerIdentity::Remote(address) => Self::of_address(address.ip()),
            PeerIdentity::Key { name, .. } => Self::Key(name.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_of_one_peer_share() {
        let address = |text: &str| text.parse().expect("an address");
        let remote = |text: &str| PeerKey::from(&PeerIdentity::Remote(address(text)));
        assert_eq!(remote("10.0.0.1:1000"), remote("10.0.0.1:2000"));
        assert_eq!(remote("10.0.0.1:1000"), remote("[::ffff:10.0.0.1]:2000"));
        assert_ne!(remote("10.0.0.1:1000"), remote("10.0.0.2:1000"));
        assert_eq!(remote("[2001:db8::1]:1"), remote("[2001:db8::ffff:2]:1"));
        assert_ne!(remote("[2001:db8::1]:1"), remote("[2001:db8:0:1::1]:1"));
        let key =
            |name: &str, at| PeerKey::from(&PeerIdentity::Key { name: name.into(), address: address(at) });
        assert_eq!(key("a", "10.0.0.1:1"), key("a", "10.0.0.2:1"));
        assert_ne!(key("a", "10.0.0.1:1"), key("b", "10.0.0.1:1"));
        let local = |pid| {
            let peer = LocalPeer { uid: 7, pid: std::num::NonZeroI32::new(pid), ..LocalPeer::root() };
            PeerKey::from(&PeerIdentity::Local(peer))
        };
        assert_eq!(local(1), local(2));
        assert!(local(1).is_administrator(7) && !local(1).is_administrator(8));
        assert!(PeerKey::User(0).is_administrator(8));
        assert!(!remote("127.0.0.1:1").is_administrator(0));
    }
    #[test]
    fn a_user_is_known_by_what_is_proven() {
        let machine = |last| PeerKey::Machine([10, 0, 0, last].into());
        let key = |name: &str| PeerKey::Key(name.into());
        let kinds = [PeerKey::User(1), PeerKey::User(2), key("a"), key("b"), machine(1)];
        for (index, one) in kinds.iter().enumerate() {
            for (other_index, other) in kinds.iter().enumerate() {
                assert_eq!(one.is_same_user(other), index == other_index, "{one:?} {other:?}");
            }
        }
        assert!(machine(1).is_same_user(&machine(2)), "an address may change");
    }
}
