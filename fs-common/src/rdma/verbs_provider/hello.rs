//! The private data of both sides of a connection: that they use this protocol, and that they have a key.
//!
//! RDMA has no TLS. With keys a client proves its key before it gets a queue pair, and the server proves the same key to the client. Nothing protects
//! the bytes that follow: the network is trusted, and `status` says so.
//!
//! ```text
//! ask      [magic u32][version u16][0 u16][challenge 16][proof 16][fingerprint 16]     56 bytes: all that a request has room for
//! answer   [magic u32][version u16][0 u16][proof 16]
//! refusal  [magic u32][version u16][kind u16][challenge 16, or a reason in UTF-8]
//! ```
//!
//! Integers are little-endian. A client without a key says so by a fingerprint of ones, so that a server with keys can tell whom it refuses. A client
//! with a key asks with zeros first, is refused with a challenge, and asks again with its proof: the first 16 bytes of HMAC-SHA256(rdma secret,
//! "ask" | challenge). The proof of the answer is over "answer" | challenge | the client's proof. The secret is derived from the cluster key. A
//! challenge is a time and a MAC of the time and of the client's address, under a secret of this life of the server, so the server need not remember
//! it. It is good once, and for [`CHALLENGE_LIFE`].

use crate::cluster_key::{ClusterKey, ClusterKeys, is_same_mac};
use parking_lot::Mutex;
use ring::hmac;
use std::collections::{HashMap, HashSet, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

const MAGIC: u32 = 0x6375_746c;
/// Version of this private data. Messages over the connection have a version of their own.
pub(super) const VERSION: u16 = 1;
const HEAD_LEN: usize = 8;
const PART_LEN: usize = 16;
/// Longest private data of a request (rdma_connect(3)).
const ASK_LEN: usize = HEAD_LEN + 3 * PART_LEN;
/// Longest private data of a refusal is 148 bytes (IBTA volume 1, 12.6.7).
const REASON_MAX: usize = 148 - HEAD_LEN;
const KIND_CHALLENGE: u16 = 1;
const KIND_REASON: u16 = 2;

/// What a client is told that has no key where one is wanted.
pub(super) const NO_KEY: &str = "it wants a key; give the server's (--key, or for a mount -o key=FILE)";

/// How long a challenge may be answered.
const CHALLENGE_LIFE: Duration = Duration::from_secs(10);
/// Answered challenges that are remembered: far more than connections can be made in `CHALLENGE_LIFE`.
const ANSWERED_MAX: usize = 65_536;

type Part = [u8; PART_LEN];

fn head(kind: u16) -> [u8; HEAD_LEN] {
    let mut head = [0; HEAD_LEN];
    head[..4].copy_from_slice(&MAGIC.to_le_bytes());
    head[4..6].copy_from_slice(&VERSION.to_le_bytes());
    head[6..].copy_from_slice(&kind.to_le_bytes());
    head
}

/// Why a peer's private data is not accepted.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unheard {
    /// It is not of this protocol, or too short.
    Foreign,
    /// It speaks another version.
    Version(u16),
}

impl std::fmt::Display for Unheard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Foreign => f.write_str("what is there is no cuttlefs"),
            Self::Version(theirs) => {
                write!(
                    f,
                    "it speaks RDMA version {theirs}, this side {VERSION}; run the same release on both"
                )
            }
        }
    }
}

/// Checks the head; returns the kind and the rest. Private data arrives padded with zeros.
fn after_head(bytes: &[u8]) -> Result<(u16, &[u8]), Unheard> {
    let (head, rest) = bytes.split_first_chunk::<HEAD_LEN>().ok_or(Unheard::Foreign)?;
    let [a, b, c, d, version @ .., kind_low, kind_high] = *head;
    if u32::from_le_bytes([a, b, c, d]) != MAGIC {
        return Err(Unheard::Foreign);
    }
    match u16::from_le_bytes(version) {
        VERSION => Ok((u16::from_le_bytes([kind_low, kind_high]), rest)),
        other => Err(Unheard::Version(other)),
    }
}

fn parts<const N: usize>(rest: &[u8]) -> Result<[Part; N], Unheard> {
    let (parts, _) = rest.as_chunks::<PART_LEN>();
    parts.first_chunk::<N>().copied().ok_or(Unheard::Foreign)
}

/// A client's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ask {
    challenge: Part,
    proof: Part,
    fingerprint: Part,
}

impl Ask {
    /// Without a proof: of a client with a key that has not been challenged yet.
    pub(super) const FIRST: Self = Self { challenge: [0; 16], proof: [0; 16], fingerprint: [0; 16] };
    /// Of a client that has no key.
    pub(super) const KEYLESS: Self = Self { fingerprint: [0xff; 16], ..Self::FIRST };

    pub(super) fn encode(&self) -> [u8; ASK_LEN] {
        let mut bytes = [0; ASK_LEN];
        bytes[..HEAD_LEN].copy_from_slice(&head(0));
        let all = [self.challenge, self.proof, self.fingerprint];
        bytes[HEAD_LEN..].copy_from_slice(all.as_flattened());
        bytes
    }

    pub(super) fn parse(bytes: &[u8]) -> Result<Self, Unheard> {
        let (_, rest) = after_head(bytes)?;
        let [challenge, proof, fingerprint] = parts(rest)?;
        Ok(Self { challenge, proof, fingerprint })
    }
}

/// The private data for a client that is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer(Part);

impl Answer {
    /// The answer of a server without keys.
    pub(super) const WITHOUT_PROOF: Self = Self([0; 16]);

    pub(super) fn encode(self) -> Vec<u8> {
        [&head(0)[..], &self.0].concat()
    }

    pub(super) fn parse(bytes: &[u8]) -> Result<Self, Unheard> {
        let [proof] = parts(after_head(bytes)?.1)?;
        Ok(Self(proof))
    }
}

/// The private data for a client that is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The client should ask again, with a proof.
    Challenge(Part),
    /// A reason in words.
    Reason(String),
}

impl Refusal {
    pub(super) fn encode(&self) -> Vec<u8> {
        match self {
            Self::Challenge(challenge) => [&head(KIND_CHALLENGE)[..], challenge].concat(),
            Self::Reason(reason) => {
                let end = (0..=reason.len().min(REASON_MAX)).rev().find(|end| reason.is_char_boundary(*end));
                let end = end.unwrap_or(0);
                [&head(KIND_REASON)[..], &reason.as_bytes()[..end]].concat()
            }
        }
    }

    pub(super) fn parse(bytes: &[u8]) -> Result<Self, Unheard> {
        match after_head(bytes)? {
            (KIND_CHALLENGE, rest) => Ok(Self::Challenge(parts::<1>(rest)?[0])),
            (KIND_REASON, rest) => {
                let text = rest.split(|byte| *byte == 0).next().unwrap_or_default();
                // A peer's text must not move a terminal's cursor.
                let reason = String::from_utf8_lossy(text).chars().filter(|c| !c.is_control()).collect();
                Ok(Self::Reason(reason))
            }
            _ => Err(Unheard::Foreign),
        }
    }
}

fn mac(key: &hmac::Key, of: &[&[u8]]) -> Part {
    let mut context = hmac::Context::with_key(key);
    of.iter().for_each(|bytes| context.update(bytes));
    let tag = context.sign();
    *tag.as_ref().first_chunk().expect("a tag of SHA-256 is longer")
}

fn rdma_key(key: &ClusterKey) -> hmac::Key {
    hmac::Key::new(hmac::HMAC_SHA256, &key.rdma_secret())
}

/// A key, in the form by which a client proves it.
pub(super) struct Prover {
    key: hmac::Key,
    fingerprint: Part,
}

impl Prover {
    pub(super) fn new(key: &ClusterKey) -> Self {
        Self { key: rdma_key(key), fingerprint: key.fingerprint_bytes() }
    }

    /// The request that answers a challenge.
    pub(super) fn ask(&self, challenge: Part) -> Ask {
        let proof = mac(&self.key, &[b"ask", &challenge]);
        Ask { challenge, proof, fingerprint: self.fingerprint }
    }

    /// Whether the server that answered has the key.
    pub(super) fn believes(&self, ask: &Ask, answer: Answer) -> bool {
        is_same_mac(mac(&self.key, &[b"answer", &ask.challenge, &ask.proof]), answer.0)
    }
}

/// Answered challenges, the oldest first.
#[derive(Default)]
struct Answered {
    known: HashSet<Part>,
    order: VecDeque<Part>,
}

/// A server's checker of proofs.
pub(super) struct Doorkeeper {
    /// Keys by fingerprint.
    keys: HashMap<Part, (hmac::Key, Arc<str>)>,
    /// The secret of this life of the server.
    secret: hmac::Key,
    begun: Instant,
    answered: Mutex<Answered>,
}

/// The result of checking a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The client has the key of this name, and gets this answer.
    Known(Arc<str>, Answer),
    /// The client has to answer this challenge first.
    Challenged(Part),
    /// The client has no key of this server.
    Unknown,
    /// The client has no key at all, as it says.
    Keyless,
}

impl Doorkeeper {
    pub(super) fn new(keys: &ClusterKeys, secret: &[u8; 32]) -> Self {
        let known = |key: &Arc<ClusterKey>| (key.fingerprint_bytes(), (rdma_key(key), key.name().into()));
        Self {
            keys: keys.all().iter().map(known).collect(),
            secret: hmac::Key::new(hmac::HMAC_SHA256, secret),
            begun: Instant::now(),
            answered: Mutex::default(),
        }
    }

    fn challenge_at(&self, at_ms: u64, address: IpAddr) -> Part {
        let time = at_ms.to_le_bytes();
        let address = match address {
            IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
            IpAddr::V6(address) => address.octets(),
        };
        let tag = mac(&self.secret, &[&time, &address]);
        let mut challenge = [0; PART_LEN];
        challenge[..8].copy_from_slice(&time);
        challenge[8..].copy_from_slice(&tag[..8]);
        challenge
    }

    /// Checks a request that came at `now`.
    pub(super) fn look(&self, ask: &Ask, address: IpAddr, now: Instant) -> Verdict {
        if *ask == Ask::KEYLESS {
            return Verdict::Keyless;
        }
        let now_ms = now.saturating_duration_since(self.begun).as_millis() as u64;
        // A challenge is never all zeros, since those stand for none.
        let fresh = || Verdict::Challenged(self.challenge_at(now_ms, address));
        let at_ms = u64::from_le_bytes(*ask.challenge.first_chunk().expect("sixteen bytes"));
        let is_ours = ask.challenge == self.challenge_at(at_ms, address)
            && now_ms.saturating_sub(at_ms) <= CHALLENGE_LIFE.as_millis() as u64;
        if !is_ours {
            return fresh();
        }
        let Some((key, name)) = self.keys.get(&ask.fingerprint) else {
            return Verdict::Unknown;
        };
        if !is_same_mac(mac(key, &[b"ask", &ask.challenge]), ask.proof) {
            return Verdict::Unknown;
        }
        // Two clients that ask within a millisecond from one address get the same challenge. With two keys they have two proofs, so it is the proof
        // that is good once.
        let mut answered = self.answered.lock();
        if !answered.known.insert(ask.proof) {
            return fresh();
        }
        answered.order.push_back(ask.proof);
        if answered.order.len() > ANSWERED_MAX {
            let oldest = answered.order.pop_front().expect("there are some");
            answered.known.remove(&oldest);
        }
        Verdict::Known(name.clone(), Answer(mac(key, &[b"answer", &ask.challenge, &ask.proof])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::SeededRandom;
    use proptest::prelude::*;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 9, 0, 1));

    fn key(seed: u64) -> ClusterKey {
        ClusterKey::generate("box", &SeededRandom::new(seed)).expect("a key")
    }

    fn doorkeeper() -> Doorkeeper {
        Doorkeeper::new(&ClusterKeys::new(vec![key(1)]).expect("keys"), &[7; 32])
    }

    #[test]
    fn golden_bytes() {
        let ask = Ask { challenge: [1; 16], proof: [2; 16], fingerprint: [3; 16] };
        let mut bytes = vec![0x6c, 0x74, 0x75, 0x63, 1, 0, 0, 0];
        for part in 1..=3 {
            bytes.extend([part; 16]);
        }
        assert_eq!(ask.encode().to_vec(), bytes);
        assert_eq!(Answer([9; 16]).encode()[8..], [9; 16]);
        let refusal = Refusal::Reason("the pool is being checked".to_owned());
        let said = refusal.encode();
        assert_eq!(said[..8], [0x6c, 0x74, 0x75, 0x63, 1, 0, 2, 0]);
        assert_eq!(&said[8..], b"the pool is being checked");
        // With the padding with which it arrives.
        assert_eq!(Refusal::parse(&[said, vec![0; 50]].concat()), Ok(refusal));
        assert_eq!(Refusal::Challenge([4; 16]).encode()[6..], [vec![1, 0], vec![4; 16]].concat());
    }

    #[test]
    fn a_proof_is_asked_for_and_good_for_once() {
        let (server, client) = (doorkeeper(), Prover::new(&key(1)));
        let now = Instant::now();
        let Verdict::Challenged(challenge) = server.look(&Ask::FIRST, HERE, now) else {
            panic!("a challenge")
        };
        let ask = client.ask(challenge);
        let Verdict::Known(name, answer) = server.look(&ask, HERE, now) else { panic!("known") };
        assert_eq!(&*name, "box");
        assert!(client.believes(&ask, answer) && !client.believes(&ask, Answer([0; 16])));
        assert!(!Prover::new(&key(2)).believes(&ask, answer));
        assert!(matches!(server.look(&ask, HERE, now), Verdict::Challenged(_)), "for once");
        // Too late, from another address, and with an unknown key.
        let other = client.ask(challenge);
        assert!(matches!(server.look(&other, HERE, now + CHALLENGE_LIFE * 2), Verdict::Challenged(_)));
        let far = "10.9.0.2".parse().expect("an address");
        assert!(matches!(server.look(&other, far, now), Verdict::Challenged(_)));
        assert_eq!(server.look(&Prover::new(&key(2)).ask(challenge), HERE, now), Verdict::Unknown);
        let forged = Ask { proof: [5; 16], ..client.ask(challenge) };
        assert_eq!(server.look(&forged, HERE, now), Verdict::Unknown);
        assert_eq!(server.look(&Ask::KEYLESS, HERE, now), Verdict::Keyless);
        assert!(Refusal::Reason(NO_KEY.to_owned()).encode().ends_with(NO_KEY.as_bytes()), "it is not cut");
    }

    #[test]
    fn a_long_reason_is_cut_between_letters() {
        let said = Refusal::Reason("ä".repeat(200)).encode();
        assert!(said.len() <= 148);
        assert_eq!(Refusal::parse(&said), Ok(Refusal::Reason("ä".repeat(70))));
    }

    proptest! {
        #[test]
        fn anything_may_be_said(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = (Ask::parse(&bytes), Answer::parse(&bytes), Refusal::parse(&bytes));
        }

        #[test]
        fn what_is_said_is_heard(parts: [[u8; 16]; 3], version in any::<u16>()) {
            let ask = Ask { challenge: parts[0], proof: parts[1], fingerprint: parts[2] };
            let mut bytes = ask.encode();
            prop_assert_eq!(Ask::parse(&bytes), Ok(ask));
            bytes[4..6].copy_from_slice(&version.to_le_bytes());
            let heard = if version == VERSION { Ok(ask) } else { Err(Unheard::Version(version)) };
            prop_assert_eq!(Ask::parse(&bytes), heard);
        }
    }
}
