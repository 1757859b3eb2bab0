//! Cluster keys: the right to connect over a network, and the identity that goes with it.
//!
//! A key is 32 random bytes and a name, in a file that a server and its clients share. It never crosses the network: both
//! sides derive key pairs from it, and prove with a TLS handshake (`rdma::soft::tcp`) that they have it. A server may have
//! several, so that clients have identities: it tells them apart by the name in its own copy of the key.
//!
//! A key is one line of text, so that people can read and copy it:
//!
//! | field    | bytes   | meaning |
//! |----------|--------:|---------|
//! | format   | 14      | `cuttlefs-key-1` |
//! | name     | 1 to 64 | letters, digits, `.`, `_` and `-` |
//! | secret   | 64      | 32 bytes in hexadecimal |
//! | checksum | 8       | CRC32C of the text before it and its blank, in hexadecimal |
//!
//! with one blank between fields and a newline at the end. `file` reads and makes such files.
//!
//! # Derived secrets (HKDF-SHA256, RFC 5869)
//! A seed of an Ed25519 key pair for clients and one for servers, so that a handshake that is reflected to its sender proves
//! nothing; a secret for the first words of a client (`rdma::soft::tcp::tls::knock`), and one for proofs over RDMA
//! (`rdma::verbs_provider::hello`); and a fingerprint, by which people and handshakes name a key. None of them discloses
//! another.

mod file;

pub use file::{KEY_FILE_MODE, KeyFileError};

use crate::world::Random;
use ring::hkdf;
use std::fmt;
use std::sync::Arc;

/// Bytes of a key's secret, and of each secret derived from it.
const SECRET_LEN: usize = 32;
/// Longest name.
pub const KEY_NAME_MAX: usize = 64;
/// Keys one server has at most: each is one client, or a group of clients that trust each other.
pub const KEYS_MAX: usize = 1024;
const FORMAT: &str = "cuttlefs-key-1";
const SALT: &[u8] = b"cuttlefs cluster key 1";
const FINGERPRINT_LEN: usize = 16;

/// The side of a connection that a derived key pair belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The side that connects.
    Client,
    /// The side that listens.
    Server,
}

impl Role {
    const fn label(self) -> &'static [u8] {
        match self {
            Self::Client => b"client",
            Self::Server => b"server",
        }
    }
}

/// A key.
#[derive(Clone, PartialEq, Eq)]
pub struct ClusterKey {
    name: String,
    secret: [u8; SECRET_LEN],
}

/// Why a text is no key. No variant repeats the text, since it may be nearly a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// It does not look like a key at all.
    #[error("it holds no cluster key, which is one line of text that begins with `{FORMAT}`")]
    Format,
    /// The name is not allowed.
    #[error("a key's name has 1 to {KEY_NAME_MAX} letters, digits, `.`, `_` and `-`")]
    Name,
    /// The text was damaged.
    #[error("the key in it is damaged; copy the file again")]
    Damaged,
    /// Two keys have one name or one secret.
    #[error(
        "two keys have the same name, or are the same; make each with a name of its own: `cuttlefsd key new --name NAME FILE`"
    )]
    Twice,
    /// No key at all, or more than `KEYS_MAX`.
    #[error("a server has 1 to {KEYS_MAX} keys")]
    Count,
}

impl ClusterKey {
    /// A new key.
    ///
    /// # Errors
    /// `Name` if the name is not allowed.
    pub fn generate(name: &str, random: &dyn Random) -> Result<Self, KeyError> {
        check_name(name)?;
        let mut secret = [0; SECRET_LEN];
        random.fill(&mut secret);
        Ok(Self { name: name.to_owned(), secret })
    }

    /// Parses the text of a key file.
    ///
    /// # Errors
    /// [`KeyError`].
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        let line = text.strip_suffix('\n').unwrap_or(text);
        let (before, checksum) = line.rsplit_once(' ').ok_or(KeyError::Format)?;
        let mut fields = before.split(' ');
        let (Some(FORMAT), Some(name), Some(secret), None) =
            (fields.next(), fields.next(), fields.next(), fields.next())
        else {
            return Err(KeyError::Format);
        };
        if checksum != checksum_of(before) {
            return Err(KeyError::Damaged);
        }
        check_name(name)?;
        Ok(Self { name: name.to_owned(), secret: from_hex(secret).ok_or(KeyError::Format)? })
    }

    /// The text of the key's file.
    fn encode(&self) -> String {
        let before = format!("{FORMAT} {} {}", self.name, to_hex(&self.secret));
        let checksum = checksum_of(&before);
        format!("{before} {checksum}\n")
    }

    /// The name of the client or group that has it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A name for the key itself, which discloses nothing of it.
    pub fn fingerprint(&self) -> String {
        to_hex(&self.fingerprint_bytes())
    }

    /// The seed of a role's Ed25519 key pair.
    pub(crate) fn seed(&self, role: Role) -> [u8; SECRET_LEN] {
        self.derive(role.label())
    }

    /// The secret behind a client's knock.
    pub(crate) fn knock_secret(&self) -> [u8; SECRET_LEN] {
        self.derive(b"knock")
    }

    /// The secret by which both sides prove the key over RDMA. Public for tests, whose peers prove it by themselves.
    #[cfg(feature = "verbs")]
    pub fn rdma_secret(&self) -> [u8; SECRET_LEN] {
        self.derive(b"rdma")
    }

    /// The first bytes of [`Self::fingerprint`]. Public for tests, too.
    pub fn fingerprint_bytes(&self) -> [u8; FINGERPRINT_LEN] {
        *self.derive(b"fingerprint").first_chunk().expect("thirty-two bytes")
    }

    fn derive(&self, label: &[u8]) -> [u8; SECRET_LEN] {
        let mut out = [0; SECRET_LEN];
        hkdf::Salt::new(hkdf::HKDF_SHA256, SALT)
            .extract(&self.secret)
            .expand(&[label], hkdf::HKDF_SHA256)
            .and_then(|okm| okm.fill(&mut out))
            .expect("HKDF-SHA256 gives 32 bytes");
        out
    }
}

impl fmt::Debug for ClusterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterKey").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The keys of one side: the one key of a client, or all of a server's.
#[derive(Clone, Debug)]
pub struct ClusterKeys(Vec<Arc<ClusterKey>>);

impl ClusterKeys {
    /// These keys, each with a name of its own.
    ///
    /// # Errors
    /// `Twice`, `Count`.
    pub fn new(keys: Vec<ClusterKey>) -> Result<Self, KeyError> {
        if keys.is_empty() || keys.len() > KEYS_MAX {
            return Err(KeyError::Count);
        }
        let mut names: Vec<_> = keys.iter().map(ClusterKey::name).collect();
        let mut fingerprints: Vec<_> = keys.iter().map(ClusterKey::fingerprint).collect();
        names.sort_unstable();
        fingerprints.sort_unstable();
        let twice = names.windows(2).any(|pair| pair[0] == pair[1])
            || fingerprints.windows(2).any(|pair| pair[0] == pair[1]);
        if twice {
            return Err(KeyError::Twice);
        }
        Ok(Self(keys.into_iter().map(Arc::new).collect()))
    }

    /// The key with which connections are made: the first.
    pub fn own(&self) -> &Arc<ClusterKey> {
        &self.0[0]
    }

    /// All keys.
    pub fn all(&self) -> &[Arc<ClusterKey>] {
        &self.0
    }
}

/// Whether a MAC is the right one. The time that this takes does not depend on how many bytes are right.
pub(crate) fn is_same_mac(right: [u8; 16], said: [u8; 16]) -> bool {
    right.iter().zip(said).fold(0, |bits, (right, said)| bits | (right ^ said)) == 0
}

fn check_name(name: &str) -> Result<(), KeyError> {
    let fits = (1..=KEY_NAME_MAX).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    if fits { Ok(()) } else { Err(KeyError::Name) }
}

fn checksum_of(text: &str) -> String {
    format!("{:08x}", crc32c::crc32c(text.as_bytes()))
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Option<[u8; SECRET_LEN]> {
    let digits = text.as_bytes();
    if digits.len() != 2 * SECRET_LEN {
        return None;
    }
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; SECRET_LEN];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::SeededRandom;
    use proptest::prelude::*;

    const TEXT: &str = "cuttlefs-key-1 box-7 \
         000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f 83694ff7\n";

    fn key() -> ClusterKey {
        ClusterKey { name: "box-7".to_owned(), secret: std::array::from_fn(|at| at as u8) }
    }

    #[test]
    fn golden_bytes() {
        assert_eq!(key().encode(), TEXT);
        assert_eq!(ClusterKey::parse(TEXT), Ok(key()));
        assert_eq!(ClusterKey::parse(TEXT.trim_end()), Ok(key()), "an editor may drop the newline");
    }

    /// Another implementation of RFC 5869 gave these values.
    #[test]
    fn golden_derivations() {
        assert_eq!(key().fingerprint(), "52f30f0e1fbd89c67368099a2f45938c");
        assert_eq!(
            to_hex(&key().seed(Role::Client)),
            "c17d8d7a18236a3f4eef6a26d1d7bb3eee30d60761cc7ab82da47e9a3fe5f82d"
        );
        assert_eq!(
            to_hex(&key().seed(Role::Server)),
            "86f3a6d8a2861184e6d45608e427830be6d2498de00f6249c939bc9f41a76814"
        );
    }

    #[test]
    fn what_is_no_key_is_told_without_showing_it() {
        let other = TEXT.replace("0f10", "0f11");
        for (text, error) in [
            ("", KeyError::Format),
            ("hello", KeyError::Format),
            (&TEXT.replace("key-1", "key-2"), KeyError::Format),
            (&TEXT.replace(" box", "  box"), KeyError::Format),
            (&format!("{TEXT}x"), KeyError::Damaged),
            (&other, KeyError::Damaged),
            (&TEXT[..TEXT.len() - 2], KeyError::Damaged),
        ] {
            assert_eq!(ClusterKey::parse(text), Err(error), "{text}");
            assert!(!error.to_string().contains("0102"));
        }
        assert!(!format!("{:?}", key()).contains("secret"), "{:?}", key());
    }

    #[test]
    fn names_are_plain_words() {
        let random = SeededRandom::new(1);
        for name in ["", "a b", "a/b", "a\n", &"a".repeat(65), "ä"] {
            assert_eq!(ClusterKey::generate(name, &random), Err(KeyError::Name), "{name:?}");
        }
        let (one, other) = (ClusterKey::generate("a", &random), ClusterKey::generate("b", &random));
        let (one, other) = (one.expect("a key"), other.expect("a key"));
        assert!(ClusterKeys::new(vec![one.clone(), other.clone()]).is_ok());
        let renamed = ClusterKey { name: "c".to_owned(), ..one.clone() };
        for twice in [vec![one.clone(), one.clone()], vec![one.clone(), other, renamed]] {
            assert_eq!(ClusterKeys::new(twice).map(drop), Err(KeyError::Twice));
        }
        assert_eq!(ClusterKeys::new(Vec::new()).map(drop), Err(KeyError::Count));
    }

    proptest! {
        #[test]
        fn whatever_parses_is_what_was_written(text in "cuttlefs-key-1 [a-z]{0,3} [0-9a-f]{60,68} [0-9a-f]{8}") {
            let (before, _) = text.rsplit_once(' ').expect("fields");
            let right = format!("{before} {}\n", checksum_of(before));
            if let Ok(key) = ClusterKey::parse(&right) {
                prop_assert_eq!(key.encode(), right);
            }
            let _ = ClusterKey::parse(&text);
        }
    }
}
