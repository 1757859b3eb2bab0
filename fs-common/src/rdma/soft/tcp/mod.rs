//! Link `tcp`: the target's NIC engine executes one-sided requests; the same bytes also flow over Unix sockets.
//!
//! # How it works
//! Accepted connections are read by the device's engine thread (`engine`), which executes READ, WRITE and atomics
//! itself and hands messages to the completion queues of the server's workers. Connections made by `connect` have no
//! thread: a thread that polls or waits on their completion queue reads the socket, so a one-sided read costs the
//! client no context switch beyond its own sleep.
//!
//! Requests are executed in the order of their packets, and replies come in that order. A SEND, and an unsignaled WRITE, is complete at the initiator
//! when the socket has taken its bytes; a signaled WRITE when the target has acknowledged it. A refused request is answered with Nak, behind which
//! the connection ends.
//!
//! Between machines the packets are encrypted with TLS (`tls`); `channel` hides whether they are.
//!
//! A file read that first needs a page from a disk stalls its queue pair and no other (`faults`).

mod channel;
mod connection;
pub(super) mod engine;
mod faults;
mod handshake;
mod keyed_stream;
mod ledger;
pub mod packet;
mod tls;

pub(super) use channel::Channel;
pub(super) use connection::FileTargetCell;
pub(super) use handshake::{
    FirstWords, HelloReader, Knocked, TcpIncoming, connect_tcp, connect_unix, refuse, tune_tcp,
};
pub use keyed_stream::KeyedStream;
pub(super) use ledger::HELD_MAX_BYTES;
pub(super) use tls::{KNOCKS_KEPT, TlsConfigs};
