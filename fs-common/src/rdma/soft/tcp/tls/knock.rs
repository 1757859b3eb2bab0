//! Knocks: a client's proof, in its first words, that it has a key.
//!
//! A handshake costs a server some hundred microseconds, and a place for the time of a round trip: a crowd without a key could use up both. So the
//! first words already prove the key, as far as one message can. The name that a client asks for (SNI) is
//!
//! ```text
//! nonce . mac . fingerprint . key.invalid          mac: HMAC-SHA256(knock key, nonce); both 16 bytes, in hexadecimal
//! ```
//!
//! where the knock key is derived from the cluster key. Without a good knock no handshake is begun. Checking a knock costs a few microseconds and no
//! memory, and a client sends it as soon as it is connected, however long the round trip is. (WireGuard's first `mac` is the same, with a public key
//! in place of a secret.)
//!
//! A knock proves nothing more than that: the handshake behind it proves the client's identity.
//!
//! # Replays
//! Somebody who listens on the way can send a knock again. So a knock is good once: the server remembers the last [`KNOCKS_KEPT`] good ones. It needs
//! no clock on which two machines would have to agree. A repeated knock that is older than all of them, or was sent to another life of the server,
//! begins one handshake and no more.

use super::{TlsConfigs, TlsError};
use crate::cluster_key::{ClusterKey, ClusterKeys, is_same_mac};
use parking_lot::Mutex;
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};
use rustls::server::Acceptor;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

const NONCE_LEN: usize = 16;
const MAC_LEN: usize = 16;
/// Knocks that are remembered, for all keys together: with mounts, those of months.
pub(in crate::rdma::soft) const KNOCKS_KEPT: usize = 65_536;
/// Longest first words that are looked at. A client of this protocol needs some 350 bytes.
pub(in crate::rdma::soft::tcp) const FIRST_WORDS_MAX: usize = 4096;
/// Kind, version, length (RFC 8446 section 5.1).
const RECORD_HEAD_LEN: usize = 5;
/// The answer to a client without a good knock: a fatal alert, access denied (section 6). The client reports it as "unknown key".
pub(in crate::rdma::soft::tcp) const ACCESS_DENIED: [u8; 7] = [0x15, 3, 3, 0, 2, 2, 49];

type Nonce = [u8; NONCE_LEN];

fn mac(key: &hmac::Key, nonce: &Nonce) -> [u8; MAC_LEN] {
    let tag = hmac::sign(key, nonce);
    tag.as_ref()[..MAC_LEN].try_into().expect("a tag of SHA-256 is longer")
}

fn knock_key(key: &ClusterKey) -> hmac::Key {
    hmac::Key::new(hmac::HMAC_SHA256, &key.knock_secret())
}

/// A client's maker of knocks.
pub(super) struct Knocker {
    key: hmac::Key,
    /// The key's name, as in a handshake.
    name: String,
}

impl Knocker {
    pub(super) fn new(key: &ClusterKey, name: String) -> Self {
        Self { key: knock_key(key), name }
    }

    /// A new name to ask for, good once.
    pub(super) fn knock(&self) -> String {
        let mut nonce = [0; NONCE_LEN];
        SystemRandom::new().fill(&mut nonce).expect("the kernel gives random bytes");
        self.knock_with(&nonce)
    }

    fn knock_with(&self, nonce: &Nonce) -> String {
        let number = |bytes: &[u8; 16]| format!("{:032x}", u128::from_be_bytes(*bytes));
        format!("{}.{}.{}", number(nonce), number(&mac(&self.key, nonce)), self.name)
    }
}

/// The key's name, as a knock contains it.
pub(super) fn key_name(knock: &str) -> Option<&str> {
    knock.splitn(3, '.').nth(2)
}

fn number_of(text: &str) -> Option<[u8; 16]> {
    let is_hexadecimal = text.len() == 32 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
    is_hexadecimal.then(|| u128::from_str_radix(text, 16).ok()).flatten().map(u128::to_be_bytes)
}

/// Good knocks that were heard.
#[derive(Default)]
struct Heard {
    nonces: HashSet<Nonce>,
    order: VecDeque<Nonce>,
}

impl Heard {
    /// Notes a nonce; `false` if it was noted before.
    fn note(&mut self, nonce: Nonce) -> bool {
        if !self.nonces.insert(nonce) {
            return false;
        }
        self.order.push_back(nonce);
        if self.order.len() > KNOCKS_KEPT {
            let oldest = self.order.pop_front().expect("there are some");
            self.nonces.remove(&oldest);
        }
        true
    }
}

/// A server's checker of knocks.
pub(super) struct Doorkeeper {
    /// By the keys' names in handshakes: the secret that a knock proves, and this side's name of the key.
    keys: HashMap<String, (hmac::Key, Arc<str>)>,
    heard: Mutex<Heard>,
}

impl Doorkeeper {
    pub(super) fn new(keys: &ClusterKeys, name_of: impl Fn(&ClusterKey) -> String) -> Self {
        let known = |key: &Arc<ClusterKey>| (name_of(key), (knock_key(key), key.name().into()));
        Self { keys: keys.all().iter().map(known).collect(), heard: Mutex::default() }
    }

    /// The name of the key that a knock proves.
    fn admit(&self, knock: &str) -> Option<Arc<str>> {
        let mut parts = knock.splitn(3, '.');
        let (nonce, said) = (number_of(parts.next()?)?, number_of(parts.next()?)?);
        let (key, name) = self.keys.get(parts.next()?)?;
        (is_same_mac(mac(key, &nonce), said) && self.heard.lock().note(nonce)).then(|| name.clone())
    }
}

impl TlsConfigs {
    /// The number of knocks that are remembered, so that each is good once.
    pub(in crate::rdma::soft) fn knocks_kept(&self) -> usize {
        self.doorkeeper.heard.lock().order.len()
    }

    /// Reads a client's first words: the name of the key that they prove. `None`: they are not complete.
    ///
    /// # Errors
    /// They are not first words of this protocol, or prove no key.
    pub(in crate::rdma::soft::tcp) fn hear_knock(&self, words: &[u8]) -> Result<Option<Arc<str>>, TlsError> {
        let broken = |error: &dyn std::fmt::Display| TlsError::Broken(error.to_string());
        let Some(head) = words.first_chunk::<RECORD_HEAD_LEN>() else { return Ok(None) };
        // They are one record, and are read only when it is complete, however they arrive.
        let record_len = RECORD_HEAD_LEN + usize::from(u16::from_be_bytes([head[3], head[4]]));
        if record_len > FIRST_WORDS_MAX {
            return Err(broken(&"the first words are longer than any of this protocol"));
        }
        if words.len() < record_len {
            return Ok(None);
        }
        let mut acceptor = Acceptor::default();
        acceptor.read_tls(&mut &words[..record_len]).map_err(|error| broken(&error))?;
        match acceptor.accept() {
            Ok(Some(hello)) => {
                let knock = hello.client_hello().server_name().and_then(|knock| self.doorkeeper.admit(knock));
                knock.map(Some).ok_or(TlsError::WrongClient)
            }
            Ok(None) => Err(broken(&"the first words are in several records")),
            Err((error, _)) => Err(broken(&error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::SeededRandom;

    fn key(seed: u64, name: &str) -> ClusterKey {
        ClusterKey::generate(name, &SeededRandom::new(seed)).expect("a key")
    }

    fn name_of(key: &ClusterKey) -> String {
        format!("{}.key.invalid", key.fingerprint())
    }

    fn knocker(key: &ClusterKey) -> Knocker {
        Knocker::new(key, name_of(key))
    }

    /// Another implementation of HKDF and HMAC gave these values.
    #[test]
    fn golden_knock() {
        let text = "cuttlefs-key-1 box-7 000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f 83694ff7\n";
        let key = ClusterKey::parse(text).expect("a key");
        let knock = knocker(&key).knock_with(&std::array::from_fn(|at| at as u8));
        assert_eq!(
            knock,
            "000102030405060708090a0b0c0d0e0f.4b2b3ec289904a6768fa2287dbf8ca6c.52f30f0e1fbd89c67368099a2f45938c.key.invalid"
        );
        assert_eq!(key_name(&knock), Some(name_of(&key).as_str()));
    }

    #[test]
    fn a_knock_is_good_for_once_and_for_its_own_key() {
        let (one, two) = (key(1, "one"), key(2, "two"));
        let keys = ClusterKeys::new(vec![one.clone(), two.clone()]).expect("keys");
        let doorkeeper = Doorkeeper::new(&keys, name_of);
        for key in [&one, &two] {
            let knock = knocker(key).knock();
            assert_eq!(doorkeeper.admit(&knock).as_deref(), Some(key.name()));
            assert_eq!(doorkeeper.admit(&knock), None, "said again");
            assert_eq!(doorkeeper.admit(&knock.to_uppercase()), None);
        }
        assert_eq!(doorkeeper.admit(&knocker(&key(3, "three")).knock()), None, "no key of this server");
        let knock = Knocker::new(&one, name_of(&two)).knock();
        assert_eq!(doorkeeper.admit(&knock), None, "another key's name");
        let knock = knocker(&one).knock();
        for at in 0..65 {
            let mut changed = knock.clone().into_bytes();
            changed[at] = if changed[at] == b'0' { b'1' } else { b'0' };
            assert_eq!(doorkeeper.admit(std::str::from_utf8(&changed).expect("text")), None, "at {at}");
        }
        for nonsense in ["", ".", "..", "a.b.c", &name_of(&one), &knock[1..], &format!("+{}", &knock[1..])] {
            assert_eq!(doorkeeper.admit(nonsense), None, "{nonsense}");
        }
        assert!(doorkeeper.admit(&knock).is_some(), "what was not good has used nothing up");
    }

    #[test]
    fn what_was_heard_is_bounded() {
        let mut heard = Heard::default();
        let nonce = |number: usize| (number as u128).to_be_bytes();
        for number in 0..2 * KNOCKS_KEPT {
            assert!(heard.note(nonce(number)));
        }
        assert_eq!((heard.nonces.len(), heard.order.len()), (KNOCKS_KEPT, KNOCKS_KEPT));
        assert!(!heard.note(nonce(2 * KNOCKS_KEPT - 1)) && heard.note(nonce(0)));
    }

    #[test]
    fn first_words_are_waited_for_and_bounded() {
        let configs = TlsConfigs::new(&ClusterKeys::new(vec![key(1, "one")]).expect("keys"));
        let mut client = super::super::Records::client(&configs).expect("begun");
        let words = client.take_outgoing();
        assert!(words.len() < 512, "{}", words.len());
        for len in 0..words.len() {
            assert_eq!(configs.hear_knock(&words[..len]), Ok(None), "{len}");
        }
        assert_eq!(configs.hear_knock(&words).expect("good").as_deref(), Some("one"));
        assert_eq!(configs.hear_knock(&words), Err(TlsError::WrongClient), "said again");
        for long in [&[0x16, 3, 1, 0xff, 0xff], &[0x16, 3, 1, 0x10, 0]] {
            assert!(matches!(configs.hear_knock(long), Err(TlsError::Broken(_))));
        }
        assert!(matches!(configs.hear_knock(&[0x16, 3, 1, 0, 1, 1]), Err(TlsError::Broken(_))));
    }
}
