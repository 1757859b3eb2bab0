//! Durable RPC: a request is safe once its record is in the receiver's ring, before anybody has executed it
//! (Duan et al., SC '21, section 4).
//!
//! # The four kinds
//! | kind | request | who makes it persistent | who reports that |
//! | --- | --- | --- | --- |
//! | `Kind::WFlush` | RDMA WRITE into the ring | the FLUSH behind it | the RNIC: its completion |
//! | `Kind::SFlush` | SEND; the receive queue's buffers are the ring's slots | the FLUSH behind it | the RNIC: its completion |
//! | `Kind::WRFlush` | RDMA WRITE into the ring | the receiver, when it finds it | a notice, before it executes anything |
//! | `Kind::SRFlush` | SEND, as above | the receiver, when it finds it | a notice, before it executes anything |
//!
//! With the first two kinds no CPU of the receiver is needed to make a request persistent. The last WRITE of a doorbell carries an immediate, so that
//! an idle receiver can sleep instead of polling memory.
//!
//! # The parts
//! `Sender` posts requests, waits for persistence and for answers, and resumes after a broken connection; `Receiver` takes records in order, executes
//! them through a `Service`, answers, and checkpoints. `wire` has the other messages, `rings` the receiver's rings, one file a client, and their
//! recovery.
//!
//! # Invariants
//! * A request whose persistence was reported is executed, also if the receiver dies the next moment, without being sent again. It may be executed
//!   twice: after a crash all requests that were not checkpointed are executed. A service recognises them by client, life and number, or executes
//!   only requests that may be repeated.
//! * Requests of one lane (`Service::lane`) are executed in the order they were posted.
//! * A sender learns of free room only from a persistent head.
//!
//! # Bounds
//! The bounds are: the ring; `UNACKED_MAX` requests that are not known to be persistent; the answer slots; a receiver's backlog, beyond which it
//! tells the sender to slow down. A wait for room lasts at most `Settings::patience`, then ends with a typed error.

mod connection;
mod core;
mod kind;
mod receiver;
mod ring_place;
mod rings;
mod sender;
mod sender_link;
mod service;
mod wire;

pub use kind::{Kind, Settings};
pub use receiver::{CONNECTIONS_MAX, CONNECTIONS_OF_PEER, Receiver, ReceiverFigures, ReceiverOptions};
pub use rings::{RingStore, RingStoreError};
pub use sender::{Resumed, Sender, SenderError, SenderFigures, Ticket, Wants};
pub use service::{Request, Service};
pub use wire::{ANSWER_HEADER_LEN, AnswerHeader, ENVELOPE_LEN, MESSAGE_LEN, Message, MessageError};
