//! Rules of the export, each with its peers, directory and rights. The first rule for a peer counts.

use super::identity::Account;
use cuttlefs_common::rdma::PeerIdentity;
use std::net::IpAddr;
use std::str::FromStr;

/// The peers that a rule is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerPattern {
    /// Everybody.
    Anybody,
    /// This user of the server's own machine.
    User(u32),
    /// Peers with the cluster key of this name.
    Key(String),
    /// Addresses with the same first bits as this address; the number of these bits.
    Addresses(IpAddr, u8),
}

impl PeerPattern {
    fn is(&self, peer: &PeerIdentity) -> bool {
        match (self, peer) {
            (Self::Anybody, _) => true,
            (Self::User(uid), PeerIdentity::Local(local)) => local.uid == *uid,
            (Self::Key(key), PeerIdentity::Key { name, .. }) => **name == **key,
            (
                Self::Addresses(network, bits),
                PeerIdentity::Remote(address) | PeerIdentity::Key { address, .. },
            ) => {
                leading_bits(*network, *bits) == leading_bits(address.ip().to_canonical(), *bits)
                    && network.is_ipv4() == address.ip().to_canonical().is_ipv4()
            }
            _ => false,
        }
    }

    /// Whether it is for peers of other machines only. Links do not know the users of these.
    pub fn is_remote(&self) -> bool {
        matches!(self, Self::Addresses(..) | Self::Key(_))
    }
}

fn leading_bits(address: IpAddr, bits: u8) -> u128 {
    let (number, len) = match address {
        IpAddr::V4(address) => (u128::from(address.to_bits()), 32),
        IpAddr::V6(address) => (address.to_bits(), 128),
    };
    number.checked_shr(len - u32::from(bits).min(len)).unwrap_or(0)
}

impl FromStr for PeerPattern {
    type Err = String;

    fn from_str(input: &str) -> Result<Self, Self::Err> {
        let wrong = || {
            format!("`{input}` is for nobody; write \"uid:1000\", \"key:NAME\", \"addr:10.0.0.0/8\" or \"*\"")
        };
        match input.split_once(':') {
            None if input == "*" => Ok(Self::Anybody),
            Some(("uid", uid)) => uid.parse().map(Self::User).map_err(|_| wrong()),
            Some(("key", name)) if !name.is_empty() => Ok(Self::Key(name.to_owned())),
            Some(("addr", network)) => {
                let (address, bits) = match network.split_once('/') {
                    Some((address, bits)) => (address, bits.parse().map_err(|_| wrong())?),
                    None => (network, u8::MAX),
                };
                let address: IpAddr = address.parse().map_err(|_| wrong())?;
                let most = if address.is_ipv4() { 32 } else { 128 };
                match bits {
                    u8::MAX => Ok(Self::Addresses(address, most)),
                    bits if bits <= most => Ok(Self::Addresses(address, bits)),
                    _ => Err(wrong()),
                }
            }
            _ => Err(wrong()),
        }
    }
}

impl std::fmt::Display for PeerPattern {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Anybody => f.write_str("*"),
            Self::User(uid) => write!(f, "uid:{uid}"),
            Self::Key(name) => write!(f, "key:{name}"),
            Self::Addresses(address, bits) => write!(f, "addr:{address}/{bits}"),
        }
    }
}

/// A rule of the export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportRule {
    /// The peers that it is for: those that match any of these.
    pub peers: Vec<PeerPattern>,
    /// The exported directory, as path components from the pool's root.
    pub path: Vec<Vec<u8>>,
    /// Whether nothing may be changed.
    pub read_only: bool,
    /// The account under which clients' root acts; `None`: as root.
    pub root_squash: Option<Account>,
    /// The account under which all users act; `None`: as themselves.
    pub all_squash: Option<Account>,
    /// Whether the peer's requests may name the user they are for. `None`: those of root, of the server's own user and of other machines may.
    pub speaks_for_others: Option<bool>,
}

impl Default for ExportRule {
    /// The whole pool, for everybody.
    fn default() -> Self {
        Self {
            peers: vec![PeerPattern::Anybody],
            path: Vec::new(),
            read_only: false,
            root_squash: None,
            all_squash: None,
            speaks_for_others: None,
        }
    }
}

impl ExportRule {
    /// Whether it is for this peer.
    pub fn is_for(&self, peer: &PeerIdentity) -> bool {
        self.peers.iter().any(|pattern| pattern.is(peer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuttlefs_common::rdma::LocalPeer;

    fn pattern(text: &str) -> PeerPattern {
        text.parse().expect(text)
    }

    #[test]
    fn patterns_are_written_as_they_are_read() {
        for text in ["*", "uid:0", "uid:1000", "key:web", "addr:10.0.0.0/8", "addr:::1/128", "addr:0.0.0.0/0"]
        {
            assert_eq!(pattern(text).to_string(), text);
        }
        assert_eq!(pattern("addr:10.1.2.3"), pattern("addr:10.1.2.3/32"));
        for wrong in [
            "",
            "**",
            "uid:",
            "uid:-1",
            "uid:4294967296",
            "addr:10.0.0.0/33",
            "addr:x",
            "10.0.0.1",
            "gid:1",
            "key:",
        ] {
            assert!(wrong.parse::<PeerPattern>().expect_err(wrong).contains("uid:1000"), "{wrong}");
        }
    }

    #[test]
    fn patterns_are_for_whom_they_say() {
        let user = |uid| PeerIdentity::Local(LocalPeer { uid, ..LocalPeer::root() });
        let key = |name: &str, address: &str| PeerIdentity::Key {
            name: name.into(),
            address: address.parse().expect(address),
        };
        let remote = |address: &str| PeerIdentity::Remote(address.parse().expect(address));
        for (text, peer, is) in [
            ("*", user(5), true),
            ("*", remote("1.2.3.4:5"), true),
            ("uid:5", user(5), true),
            ("uid:5", user(6), false),
            ("uid:5", remote("1.2.3.4:5"), false),
            ("addr:10.0.0.0/8", remote("10.200.3.4:5"), true),
            ("addr:10.0.0.0/8", remote("11.0.0.1:5"), false),
            ("addr:10.0.0.0/8", remote("[::ffff:10.0.0.1]:5"), true),
            ("addr:10.0.0.0/8", remote("[::1]:5"), false),
            ("addr:10.0.0.0/8", user(0), false),
            ("addr:0.0.0.0/0", remote("255.1.1.1:5"), true),
            ("addr:0.0.0.0/0", remote("[fe80::1]:5"), false),
            ("addr:fe80::/10", remote("[fe81::1]:5"), true),
            ("addr:fe80::/10", remote("[fec0::1]:5"), false),
            ("key:web", key("web", "1.2.3.4:9"), true),
            ("key:web", key("we", "1.2.3.4:9"), false),
            ("key:web", remote("1.2.3.4:9"), false),
            ("addr:1.2.3.4", key("web", "1.2.3.4:9"), true),
            ("addr:1.2.3.4", remote("1.2.3.4:9"), true),
            ("addr:1.2.3.4", remote("1.2.3.5:9"), false),
        ] {
            assert_eq!(pattern(text).is(&peer), is, "{text} {peer}");
        }
    }
}
