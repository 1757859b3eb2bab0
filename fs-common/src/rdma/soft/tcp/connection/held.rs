//! FLUSH at the target, and the replies that wait behind one.
//!
//! # How it works
//! A FLUSH that needs only cache-line write-back is done at once. One that needs a data sync is handed to the region's persistence domain, and the
//! queue pair goes on: later requests execute, so that many FLUSHes share one sync. But an RC queue pair's replies come in order, so replies behind a
//! FLUSH that is under way wait here. A FLUSH covers the messages before it, so it waits with them for receives (`target`).
//!
//! # Invariants
//! * The first held reply is a flush under way; with nothing held, nothing waits.
//! * Nothing is executed behind a refusal, though the refusal itself may have to wait.
//!
//! # Bounds
//! Held replies count as owed output: the engine stops reading a peer that is owed too much, and a self-driven side
//! breaks its queue pair at `OUTPUT_HARD_BYTES`.

use super::input::Receiving;
use super::output::{OUTPUT_HARD_BYTES, OWED_MAX_BYTES, Sending};
use super::target::Parked;
use super::{End, TcpQp};
use crate::breach::Breach;
use crate::memory::SharedMemory;
use crate::persist::{Persistence, SyncFailed};
use crate::rdma::soft::region::Need;
use crate::rdma::soft::tcp::packet::{PACKET_HEADER_LEN, PacketHeader, PacketKind, build, placement};
use crate::rdma::verbs::{Placement, WcStatus};
use std::collections::VecDeque;
use std::sync::Arc;

enum Held {
    /// A FLUSH, and its result once it has ended.
    Flush(u64, Option<Result<(), SyncFailed>>),
    /// A reply.
    Packet(Vec<u8>),
    /// A refusal, behind which the connection ends.
    Refusal(u64, WcStatus),
}

/// One of the peer's FLUSHes.
pub(super) struct Flush {
    sequence: u64,
    memory: Arc<SharedMemory>,
    /// `None`: a FLUSH to visibility.
    domain: Option<Arc<dyn Persistence>>,
    offset: usize,
    len: usize,
}

impl Flush {
    /// Whether it has to wait for a device.
    fn takes_a_sync(&self) -> bool {
        self.domain.as_ref().is_some_and(|domain| !domain.by_cache_lines())
    }

    fn write_back(&self) {
        if self.domain.is_some() {
            self.memory.write_back(self.offset, self.len);
        }
    }
}

/// Replies that wait for a FLUSH.
#[derive(Default)]
pub(super) struct HeldReplies {
    held: VecDeque<Held>,
    bytes: usize,
    refused: bool,
}

impl HeldReplies {
    /// Bytes of the waiting replies.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether a refusal waits.
    pub(super) fn is_refused(&self) -> bool {
        self.refused
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    fn push(&mut self, held: Held) -> Result<(), End> {
        self.bytes += match &held {
            Held::Packet(packet) => packet.len(),
            Held::Flush(..) | Held::Refusal(..) => PACKET_HEADER_LEN,
        };
        self.held.push_back(held);
        if self.bytes > OUTPUT_HARD_BYTES {
            return Err(End::Broken(Breach::new(format_args!("{} bytes wait for a flush", self.bytes))));
        }
        Ok(())
    }

    fn pop(&mut self) -> Option<Held> {
        let held = self.held.pop_front()?;
        self.bytes -= match &held {
            Held::Packet(packet) => packet.len(),
            Held::Flush(..) | Held::Refusal(..) => PACKET_HEADER_LEN,
        };
        Some(held)
    }
}

fn refusal(sequence: u64, status: WcStatus) -> Vec<u8> {
    build(PacketHeader { status: Some(status), ..PacketHeader::new(PacketKind::Nak, sequence) }, b"")
}

impl TcpQp {
    /// Sends a reply, or holds it behind a FLUSH that is under way.
    pub(super) fn put_reply(&self, sending: &mut Sending, packet: &[u8]) -> Result<(), End> {
        if sending.held.held.is_empty() {
            return self.put_answer(sending, packet);
        }
        sending.held.push(Held::Packet(packet.to_vec()))?;
        self.account_output(sending);
        Ok(())
    }

    /// Refuses a request. `Err` if the refusal is sent now: then the connection ends.
    pub(super) fn put_refusal(
        &self,
        sending: &mut Sending,
        sequence: u64,
        status: WcStatus,
    ) -> Result<(), End> {
        if sending.held.held.is_empty() {
            self.put(sending, &refusal(sequence, status), false)?;
            return Err(End::Refused(status));
        }
        sending.held.refused = true;
        sending.held.push(Held::Refusal(sequence, status))
    }

    /// Executes one of the peer's FLUSHes.
    pub(super) fn flush(&self, receiving: &mut Receiving, header: &PacketHeader) -> Result<(), End> {
        let placement = placement(header.second).ok_or(End::Refused(WcStatus::RemoteInvalid))?;
        let region = self
            .core
            .registry
            .remote(header.key, header.offset, header.first, Need::Flush)
            .map_err(End::Refused)?;
        let domain = match placement {
            Placement::Visibility => None,
            Placement::Persistence => {
                Some(region.persistence.clone().ok_or(End::Refused(WcStatus::RemoteInvalid))?)
            }
        };
        let (offset, len) = (header.offset as usize, header.first as usize);
        let flush = Flush { sequence: header.sequence, memory: region.memory.clone(), domain, offset, len };
        if !receiving.parked.is_empty() {
            // A message before it has no receive yet. Replies behind it wait from here on.
            self.send.lock().held.push(Held::Flush(flush.sequence, None))?;
            return self.park(receiving, Parked::Flush(flush));
        }
        if flush.takes_a_sync() {
            self.send.lock().held.push(Held::Flush(flush.sequence, None))?;
            self.begin_sync(&flush);
            return Ok(());
        }
        flush.write_back();
        self.reply(PacketHeader::new(PacketKind::FlushAck, flush.sequence), 0, |_| Ok(0))
    }

    /// All messages before a FLUSH have been placed.
    pub(super) fn unpark_flush(&self, flush: &Flush) -> Result<(), End> {
        if flush.takes_a_sync() {
            self.begin_sync(flush);
            return Ok(());
        }
        flush.write_back();
        self.flushed(flush.sequence, Ok(()))
    }

    fn begin_sync(&self, flush: &Flush) {
        let (this, sequence) = (self.this.clone(), flush.sequence);
        let done = move |result| {
            if let Some(qp) = this.upgrade() {
                qp.finish_flush(sequence, result);
            }
        };
        if let Some(domain) = &flush.domain {
            domain.persist(&flush.memory, flush.offset, flush.len, Box::new(done));
        }
    }

    /// The data sync of a FLUSH has ended. On the domain's thread.
    fn finish_flush(&self, sequence: u64, result: Result<(), SyncFailed>) {
        if let Err(end) = self.flushed(sequence, result) {
            self.end(Some(end));
        }
    }

    /// A FLUSH for which replies wait has ended.
    fn flushed(&self, sequence: u64, result: Result<(), SyncFailed>) -> Result<(), End> {
        let mut sending = self.send.lock();
        if self.has_ended() {
            return Ok(());
        }
        let flush = sending.held.held.iter_mut().find_map(|held| match held {
            Held::Flush(of, outcome) if *of == sequence => Some(outcome),
            _ => None,
        });
        if let Some(outcome) = flush {
            *outcome = Some(result);
        }
        self.release(&mut sending)
    }

    /// Sends the replies that no longer wait for a FLUSH.
    fn release(&self, sending: &mut Sending) -> Result<(), End> {
        let was_held_back = sending.owed() > OWED_MAX_BYTES;
        while let Some(first) = sending.held.held.front() {
            if matches!(first, Held::Flush(_, None)) {
                break;
            }
            match sending.held.pop() {
                Some(Held::Flush(sequence, Some(Ok(())))) => {
                    self.put(sending, &build(PacketHeader::new(PacketKind::FlushAck, sequence), b""), false)?;
                }
                Some(Held::Flush(sequence, _)) => {
                    let status = WcStatus::RemoteOperation;
                    self.put(sending, &refusal(sequence, status), false)?;
                    return Err(End::Refused(status));
                }
                Some(Held::Packet(packet)) => self.put(sending, &packet, false)?,
                Some(Held::Refusal(sequence, status)) => {
                    self.put(sending, &refusal(sequence, status), false)?;
                    return Err(End::Refused(status));
                }
                None => break,
            }
        }
        self.account_output(sending);
        if was_held_back && sending.owed() <= OWED_MAX_BYTES {
            // The engine has to look at input that was held back, also if the socket has nothing new.
            sending.resumed = true;
        }
        self.watch(sending);
        Ok(())
    }
}
