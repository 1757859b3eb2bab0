//! The secret that proves that a session is a client's own.
//!
//! A client draws a secret when it mounts, and sends it on each connection that it attaches. Its [`ClientId`] is a hash of the secret, so the server
//! keeps no secret and compares none: it hashes the secret of a message, and finds the session of the client that knows that secret. An id may be
//! shown: it opens nothing, in this life of the server or the next. The time that it takes to find a session discloses something about ids, but not
//! about secrets.
//!
//! # Invariants
//! A secret is never shown: not in status, not in a log (`Debug` hides it), not on a disk.

use crate::ids::ClientId;
use crate::world::Random;
use serde::{Deserialize, Serialize};

/// Bytes of a secret: 128 random bits, as many as an id has.
pub const SESSION_SECRET_LEN: usize = 16;
/// Separates these hashes from any other use of the same bytes.
const CLIENT_ID_CONTEXT: &[u8] = b"cuttlefs client id 1";

/// A client's secret.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SessionSecret(pub [u8; SESSION_SECRET_LEN]);

impl SessionSecret {
    /// The secret of a client without a session.
    pub const NONE: Self = Self([0; SESSION_SECRET_LEN]);

    /// A new one.
    pub fn draw(random: &dyn Random) -> Self {
        let mut secret = Self::NONE;
        random.fill(&mut secret.0);
        secret
    }

    /// The id of the client whose secret this is: the first half of a SHA-256 hash, low byte first.
    pub fn client(&self) -> ClientId {
        let mut hash = ring::digest::Context::new(&ring::digest::SHA256);
        hash.update(CLIENT_ID_CONTEXT);
        hash.update(&self.0);
        let hash = hash.finish();
        let half = hash.as_ref().first_chunk().expect("a SHA-256 hash has 32 bytes");
        ClientId(u128::from_le_bytes(*half))
    }
}

impl std::fmt::Debug for SessionSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SessionSecret(hidden)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::SeededRandom;

    #[test]
    fn the_id_is_a_hash_of_the_secret() {
        // Another implementation of SHA-256 gave this value for the context and the bytes 0 to 15.
        let secret = SessionSecret(std::array::from_fn(|at| at as u8));
        assert_eq!(format!("{:032x}", secret.client().0), "b939c3e7d6d955edf87a67d91ef92a0e");
    }

    #[test]
    fn secrets_differ_and_are_not_shown() {
        let random = SeededRandom::new(1);
        let (one, other) = (SessionSecret::draw(&random), SessionSecret::draw(&random));
        assert_ne!(one.client(), other.client());
        assert_eq!(format!("{one:?}"), "SessionSecret(hidden)");
    }
}
