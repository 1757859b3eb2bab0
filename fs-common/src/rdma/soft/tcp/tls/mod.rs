//! TLS 1.3 below the packets: it proves the peer's identity, and nobody on the way can read or change the bytes.
//!
//! Both sides have a cluster key (`cluster_key`). Each proves it by signing the handshake with the Ed25519 key pair that is derived from the key for
//! its role, and sends the public half as a raw public key (RFC 7250): there are no certificates, and nothing expires. A client names its key by the
//! fingerprint, as the server's name (SNI), so that a server with several keys answers with the right one. Before the fingerprint come a few bytes
//! that prove that the client has the key (`knock`); without them no handshake is begun.
//!
//! `config` is the configuration of rustls: TLS 1.3 only, these keys only, no resumption (it would skip the proof), no early data (it could be
//! replayed). `records` is one connection: bytes in, bytes out. `channel` has the sockets.
//!
//! # Visible on the way
//! The fingerprint of the key, and lengths and times of messages. A holder of a key can pose as the server to other holders of the
//! same key: give each client machine a key of its own.

mod config;
mod knock;
mod records;

pub(in crate::rdma::soft) use config::TlsConfigs;
pub(in crate::rdma::soft) use knock::KNOCKS_KEPT;
pub(super) use knock::{ACCESS_DENIED, FIRST_WORDS_MAX};
pub(super) use records::{Records, SEALED_AT_ONCE, TlsError};
