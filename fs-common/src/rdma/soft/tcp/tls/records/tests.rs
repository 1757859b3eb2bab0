//! Two sides that exchange their bytes: whole, in pieces, and changed on the way.

use super::*;
use crate::cluster_key::{ClusterKey, ClusterKeys};
use crate::world::SeededRandom;
use rustls::crypto::ring::{cipher_suite, default_provider, kx_group};
use rustls::{SupportedCipherSuite, Tls13CipherSuite};

fn key(seed: u64, name: &str) -> ClusterKey {
    ClusterKey::generate(name, &SeededRandom::new(seed)).expect("a key")
}

fn configs(keys: &[(u64, &str)]) -> TlsConfigs {
    let keys = keys.iter().map(|(seed, name)| key(*seed, name)).collect();
    TlsConfigs::new(&ClusterKeys::new(keys).expect("keys"))
}

/// Passes bytes to a side, `at_once` at a time, and returns what the side decrypts.
fn give(to: &mut Records, mut bytes: &[u8], at_once: usize) -> Result<Vec<u8>, TlsError> {
    let mut plain = Vec::new();
    while !bytes.is_empty() {
        let room = to.room();
        let count = bytes.len().min(room.len()).min(at_once);
        room[..count].copy_from_slice(&bytes[..count]);
        bytes = &bytes[count..];
        to.arrived(count)?;
        while to.holds_plain() {
            let mut part = [0; 1000];
            let count = to.take_plain(&mut part);
            plain.extend_from_slice(&part[..count]);
        }
    }
    Ok(plain)
}

/// Passes each side's bytes to the other until the handshake is over. No other bytes may come.
fn shake(client: &mut Records, server: &mut Records, at_once: usize) -> Result<(), TlsError> {
    loop {
        let (there, back) = (client.take_outgoing(), server.take_outgoing());
        if there.is_empty() && back.is_empty() {
            return Ok(());
        }
        // To the client first: a refused client is told so by the server.
        assert!(give(client, &back, at_once)?.is_empty(), "nothing was said before the end of the handshake");
        assert!(
            give(server, &there, at_once)?.is_empty(),
            "nothing was said before the end of the handshake"
        );
    }
}

fn joined(client: &TlsConfigs, server: &TlsConfigs) -> (Records, Records) {
    let mut client = Records::client(client).expect("begun");
    let mut server = Records::server(server).expect("begun");
    shake(&mut client, &mut server, usize::MAX).expect("both are proven");
    assert!(client.is_established() && server.is_established());
    (client, server)
}

fn sealed(by: &mut Records, plain: &[u8]) -> Vec<u8> {
    let mut wire = Vec::new();
    by.seal(plain, &mut wire).expect("sealed");
    wire
}

#[test]
fn a_server_with_several_keys_knows_each_client_by_its_own() {
    let server = configs(&[(1, "one"), (2, "two")]);
    for (seed, name) in [(1, "one"), (2, "two")] {
        // The name in the client's copy of the key does not matter.
        let (mut at_client, mut at_server) = joined(&configs(&[(seed, "mine")]), &server);
        assert_eq!(at_server.client_name(&server).as_deref(), Some(name));
        for len in [1, 100, RECORD_LEN, RECORD_LEN + 1, SEALED_AT_ONCE, 1 << 20] {
            let bytes: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
            let wire = sealed(&mut at_client, &bytes);
            assert!(
                wire.len() > len
                    && !wire.windows(64.min(len.max(8))).any(|part| part == &bytes[..part.len().min(len)])
            );
            assert!(give(&mut at_server, &wire, usize::MAX).expect("opened") == bytes);
            let back = sealed(&mut at_server, &bytes);
            assert!(give(&mut at_client, &back, 7000).expect("opened") == bytes);
        }
    }
}

#[test]
fn bytes_may_come_one_at_a_time() {
    let both = configs(&[(1, "one")]);
    let mut client = Records::client(&both).expect("begun");
    let mut server = Records::server(&both).expect("begun");
    shake(&mut client, &mut server, 1).expect("both are proven");
    let wire = sealed(&mut client, b"hello");
    assert_eq!(give(&mut server, &wire, 1).expect("opened"), b"hello");
}

#[test]
fn another_key_is_refused_on_both_sides() {
    let mut client = Records::client(&configs(&[(1, "same")])).expect("begun");
    let mut server = Records::server(&configs(&[(2, "same")])).expect("begun");
    let told = shake(&mut client, &mut server, usize::MAX).expect_err("another key");
    assert_eq!(told, TlsError::WrongClient);
    assert!(server.client_name(&configs(&[(2, "same")])).is_none());
    let alert = server.take_outgoing();
    assert_eq!(give(&mut client, &alert, usize::MAX), Err(TlsError::UnknownKey));
    assert!(!client.is_established() && !server.is_established());
    let mut wire = Vec::new();
    assert!(client.seal(b"secret", &mut wire).is_err(), "nothing is said to who has proven nothing");
}

/// Somebody on the way may send a client's own bytes back to it, or claim to be the server while knowing only the fingerprint.
#[test]
fn a_reflected_handshake_proves_nothing() {
    let own = configs(&[(1, "one")]);
    let mut client = Records::client(&own).expect("begun");
    let first = client.take_outgoing();
    assert!(give(&mut client, &first, usize::MAX).is_err(), "its own words");
    // A server that knows the client's fingerprint, and has another key pair.
    let mut client = Records::client(&own).expect("begun");
    let mut impostor = configs(&[(2, "two")]);
    impostor.answer_to_as(&key(1, "one"), &key(2, "two"));
    let mut server = Records::server(&impostor).expect("begun");
    assert_eq!(shake(&mut client, &mut server, usize::MAX), Err(TlsError::WrongServer));
}

#[test]
fn what_was_changed_on_its_way_is_the_end() {
    let both = configs(&[(1, "one")]);
    let (mut client, _) = joined(&both, &both);
    let wire = sealed(&mut client, b"a message of some length");
    for at in 0..wire.len() {
        for bit in [0, 3, 7] {
            let (mut client, mut server) = joined(&both, &both);
            let mut changed = sealed(&mut client, b"a message of some length");
            changed[at] ^= 1 << bit;
            // With a longer length the side waits for bytes that never come. In no case is anything decrypted.
            match give(&mut server, &changed, usize::MAX) {
                // The record's kind and version are not protected: only the original bytes can be decrypted.
                Ok(plain) if at < 3 => assert!(plain.is_empty() || plain == b"a message of some length"),
                Ok(plain) => assert!(plain.is_empty() && (3..5).contains(&at), "byte {at} opened {plain:?}"),
                Err(error) => assert!(matches!(error, TlsError::Broken(_)), "{error}"),
            }
        }
    }
    let (mut client, mut server) = joined(&both, &both);
    let wire = sealed(&mut client, b"once");
    assert_eq!(give(&mut server, &wire, usize::MAX).expect("opened"), b"once");
    assert!(give(&mut server, &wire, usize::MAX).is_err(), "said again by another");
    let (mut client, mut server) = joined(&both, &both);
    let (first, second) = (sealed(&mut client, b"first"), sealed(&mut client, b"second"));
    assert!(give(&mut server, &second, usize::MAX).is_err(), "one is missing before it");
    drop(first);
}

#[test]
fn nonsense_is_refused_within_bounds() {
    let both = configs(&[(1, "one")]);
    for bytes in [vec![0; 70_000], vec![0xff; 70_000], b"GET / HTTP/1.1\r\n\r\n".to_vec()] {
        let mut server = Records::server(&both).expect("begun");
        assert!(give(&mut server, &bytes, usize::MAX).is_err());
    }
    // A handshake message of 16 MiB in complete records.
    let mut server = Records::server(&both).expect("begun");
    let mut endless = vec![1, 0xff, 0xff, 0xff];
    endless.resize(RECORD_LEN, 0);
    let record = [&[0x16, 3, 1, 0x40, 0][..], &endless].concat();
    let given = (0..100).try_for_each(|_| give(&mut server, &record, usize::MAX).map(drop));
    assert!(given.is_err());
    assert!(server.incoming.len() <= INCOMING_LEN);
}

/// A key is used up after a number of records (RFC 8446 section 5.5): before that both sides change to new keys.
#[test]
fn keys_are_changed_before_they_are_used_up() {
    let SupportedCipherSuite::Tls13(suite) = cipher_suite::TLS13_AES_128_GCM_SHA256;
    let short = Tls13CipherSuite {
        common: rustls::crypto::CipherSuiteCommon {
            suite: suite.common.suite,
            hash_provider: suite.common.hash_provider,
            confidentiality_limit: 50,
        },
        hkdf_provider: suite.hkdf_provider,
        aead_alg: suite.aead_alg,
        quic: suite.quic,
    };
    let short: &'static Tls13CipherSuite = Box::leak(Box::new(short));
    let provider = rustls::crypto::CryptoProvider {
        cipher_suites: vec![SupportedCipherSuite::Tls13(short)],
        kx_groups: vec![kx_group::X25519],
        ..default_provider()
    };
    let keys = ClusterKeys::new(vec![key(1, "one")]).expect("keys");
    let both = TlsConfigs::with_provider(&keys, provider).expect("configured");
    let (mut client, mut server) = joined(&both, &both);
    for round in 0..1000u32 {
        let bytes = round.to_le_bytes();
        let wire = sealed(&mut client, &bytes);
        assert_eq!(give(&mut server, &wire, usize::MAX).expect("opened"), bytes, "round {round}");
        if round % 3 == 0 {
            let wire = sealed(&mut server, &bytes);
            assert_eq!(give(&mut client, &wire, usize::MAX).expect("opened"), bytes, "round {round}");
        }
    }
}
