//! Durable RPC: a request is safe once its record is in the receiver's ring, before anybody has executed it
//! (Duan et al., SC '21, section 4).
//!
//! # The four kinds
//! | kind | request | who makes it persistent | who says so |
//! | --- | --- | --- | --- |
//! | `Kind::WFlush` | RDMA WRITE into the ring | the FLUSH behind it | the RNIC: its completion |
//! | `Kind::SFlush` | SEND; the receive queue's buffers are the ring's slots | the FLUSH behind it | the RNIC: its completion |
//! | `Kind::WRFlush` | RDMA WRITE into the ring | the receiver, when it finds it | a notice, before it executes anything |
//! | `Kind::SRFlush` | SEND, as above | the receiver, when it finds it | a notice, before it executes anything |
//!
//! With the first two no CPU of the receiver's is between a request and its persistence. The last WRITE of a doorbell
//! carries an immediate, so that a receiver with nothing to do sleeps instead of polling memory.
//!
//! # The parts
//! `Sender` posts requests, waits for persistence and for answers, and resumes after a broken connection; `Receiver`
//! takes records in order, executes them through a `Service`, answers, checkpoints. `wire` is what they say besides, `rings`
//! the receiver's rings, one file a client, and their recovery.
//!
//! # Invariants
//! * A request whose persistence was reported is executed, also if the receiver dies the next moment, without being sent
//!   again. It may be executed twice: after a crash whatever is not checkpointed is. Services tell by client, life and
//!   number, or do what may be done twice.
//! * Requests of one lane (`Service::lane`) are executed in the order they were posted.
//! * A sender learns of free room only from a head that is persistent.
//!
//! # Bounds
//! The ring; `UNACKED_MAX` requests not known to be persistent; the answer slots; a receiver's backlog, beyond which it
//! tells the sender to slow down. Whoever waits for room waits `Settings::patience`, then gets a typed error.

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
