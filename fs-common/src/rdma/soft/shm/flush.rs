//! FLUSH over shared memory.
//!
//! # How it works
//! The initiator has the region mapped and has executed its own WRITEs, so where cache-line write-back is enough, it does that itself, without the
//! target's CPU. The target has to do two things: sync a file, and flush messages, because only its own polling places them in memory. Then the FLUSH
//! goes through the message ring, behind the messages it covers, and the answer comes through the other ring.
//!
//! | offset | bytes | field     | in a FLUSH | in its answer |
//! |-------:|------:|-----------|------------|---------------|
//! | 0      | 8     | sequence  | counts the initiator's | the same |
//! | 8      | 8     | offset    | in the region | zero |
//! | 16     | 4     | rkey      | of the region | zero |
//! | 20     | 4     | length    | bytes | zero |
//! | 24     | 4     | placement | 1 visibility, 2 persistence | 0 done, 1 access, 2 invalid, 3 failed |
//! | 28     | 4     | reserved  | zero ||
//!
//! # Invariants
//! * A FLUSH without the target's part completes only if the peer is still connected after the write-back. A reader of
//!   the memory after the peer has closed the connection, or died, therefore finds all bytes that were reported
//!   persistent.
//! * Completions stay in order: those of requests behind a flush under way wait in `Outstanding`.
//! * Nothing is executed behind a request that failed.
//!
//! # Failure
//! A target that does not poll does not answer; its death ends the connection like any other. More unanswered flushes
//! than a queue pair may have requests break the connection.

use super::connection::{Sending, ShmQp, Step};
use super::ring::{Body, RecordHeader, RecordOf, Side};
use crate::breach::Breach;
use crate::ids::Rkey;
use crate::memory::SharedMemory;
use crate::persist::SyncFailed;
use crate::rdma::soft::queue::{Done, MAX_QUEUE_DEPTH};
use crate::rdma::soft::region::{Need, PersistenceKind};
use crate::rdma::verbs::{CompletionKind, Placement, QpState, Remote, SendWr, WcStatus, WrId};
use rustix::fd::OwnedFd;
use std::collections::VecDeque;
use std::sync::atomic::{Ordering, fence};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Bytes of a flush record's body.
pub(super) const FLUSH_LEN: usize = 32;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Raw {
    sequence: U64,
    offset: U64,
    rkey: U32,
    len: U32,
    code: U32,
    reserved: U32,
}
const _: () = assert!(size_of::<Raw>() == FLUSH_LEN);

/// The result of one of the peer's FLUSHes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    sequence: u64,
    result: Result<(), WcStatus>,
}

impl Answer {
    fn encode(self) -> [u8; FLUSH_LEN] {
        let mut raw = Raw::new_zeroed();
        raw.sequence = self.sequence.into();
        raw.code = match self.result {
            Ok(()) => 0,
            Err(WcStatus::RemoteAccess) => 1,
            Err(WcStatus::RemoteInvalid) => 2,
            Err(_) => 3,
        }
        .into();
        zerocopy::transmute!(raw)
    }

    fn parse(bytes: &[u8; FLUSH_LEN]) -> Option<Self> {
        let raw = Raw::ref_from_bytes(bytes).ok()?;
        let result = match raw.code.get() {
            0 => Ok(()),
            1 => Err(WcStatus::RemoteAccess),
            2 => Err(WcStatus::RemoteInvalid),
            3 => Err(WcStatus::RemoteOperation),
            _ => return None,
        };
        let rest = [raw.offset.get(), raw.rkey.get().into(), raw.len.get().into(), raw.reserved.get().into()];
        (rest == [0; 4]).then_some(Self { sequence: raw.sequence.get(), result })
    }
}

/// A FLUSH in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Asked {
    sequence: u64,
    rkey: u32,
    offset: u64,
    len: u32,
    placement: Placement,
}

impl Asked {
    fn encode(self) -> [u8; FLUSH_LEN] {
        let code = match self.placement {
            Placement::Visibility => 1,
            Placement::Persistence => 2,
        };
        let raw = Raw {
            sequence: self.sequence.into(),
            offset: self.offset.into(),
            rkey: self.rkey.into(),
            len: self.len.into(),
            code: U32::new(code),
            reserved: 0.into(),
        };
        zerocopy::transmute!(raw)
    }

    fn parse(bytes: &[u8; FLUSH_LEN]) -> Option<Self> {
        let raw = Raw::ref_from_bytes(bytes).ok()?;
        let placement = match raw.code.get() {
            1 => Placement::Visibility,
            2 => Placement::Persistence,
            _ => return None,
        };
        (raw.reserved.get() == 0).then_some(Self {
            sequence: raw.sequence.get(),
            rkey: raw.rkey.get(),
            offset: raw.offset.get(),
            len: raw.len.get(),
            placement,
        })
    }
}

struct Entry {
    wr_id: WrId,
    kind: CompletionKind,
    signaled: bool,
    /// The number of the answer that it waits for.
    sequence: Option<u64>,
    /// The result, once it is known.
    result: Option<Result<Done, WcStatus>>,
}

/// A FLUSH that the target does, and the requests executed behind it. Bounded by the queue pair's depth.
#[derive(Default)]
pub(super) struct Outstanding {
    entries: VecDeque<Entry>,
    asked: u64,
    failed: bool,
}

impl Outstanding {
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether a request failed: nothing is executed behind it.
    pub(super) fn has_failed(&self) -> bool {
        self.failed
    }

    pub(super) fn ask(&mut self, request: &SendWr, sequence: u64) {
        self.asked = sequence;
        let kind = request.op.kind();
        let (wr_id, signaled) = (request.wr_id, request.signaled);
        self.entries.push_back(Entry { wr_id, kind, signaled, sequence: Some(sequence), result: None });
    }

    /// Takes all requests out, to be flushed.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = (WrId, CompletionKind)> {
        self.entries.drain(..).map(|entry| (entry.wr_id, entry.kind))
    }
}

impl ShmQp {
    /// Maps a region of the peer. A log file cannot be sealed against shrinking, so whoever maps it trusts its owner not to shorten it: a client
    /// trusts the server that it chose to connect to, a server trusts nobody.
    pub(super) fn map_region(
        &self,
        fd: OwnedFd,
        len: usize,
        writable: bool,
        persistence: PersistenceKind,
    ) -> std::io::Result<SharedMemory> {
        if persistence == PersistenceKind::None || self.parts.side != Side::Client || !writable {
            return SharedMemory::from_fd(fd, len, writable);
        }
        let again = fd.try_clone()?;
        SharedMemory::from_fd(again, len, writable)
            .or_else(|_| SharedMemory::map_persistent(fd.try_clone()?, len, 0, true))
            .or_else(|_| SharedMemory::map_persistent(fd, len, 0, false))
    }

    /// Executes one of this side's FLUSHes, or asks the target to.
    pub(super) fn flush(
        &self,
        sending: &mut Sending,
        remote: Remote,
        len: u32,
        placement: Placement,
    ) -> Step {
        let (memory, offset) = match self.target(sending, remote, len.into(), Need::Flush) {
            Ok(place) => place,
            Err(status) => return Step::Failed(status),
        };
        let Remote::Memory { rkey: Rkey(rkey), .. } = remote else {
            return Step::Failed(WcStatus::RemoteInvalid);
        };
        let kind = sending.peers.get(&rkey).map_or(PersistenceKind::None, |region| region.persistence);
        // The peer stores its head with release once it has placed a message.
        let taken = super::ring::head(&self.parts.memory, self.parts.side.other()).load(Ordering::Acquire);
        let placed = sending.messages_end.wrapping_sub(taken) as i64 <= 0;
        match (placement, kind) {
            (Placement::Persistence, PersistenceKind::None) => {
                return Step::Failed(WcStatus::RemoteInvalid);
            }
            (Placement::Visibility, _) if placed => {
                fence(Ordering::SeqCst);
                return Step::Done(Done::default());
            }
            (Placement::Persistence, PersistenceKind::CacheLines) if placed => {
                memory.write_back(offset, len as usize);
                if self.peer_is_gone() {
                    return Step::Broken(Breach::of("the peer was gone before a flush was done"));
                }
                return Step::Done(Done::default());
            }
            _ => {}
        }
        let sequence = sending.outstanding.asked + 1;
        let asked = Asked { sequence, rkey, offset: offset as u64, len, placement };
        let header = RecordHeader { len: FLUSH_LEN as u32, imm: None, of: RecordOf::Flush };
        match self.put_record(sending, header, Body::Bytes(&asked.encode())) {
            Step::Done(_) => Step::Asked { sequence },
            other => other,
        }
    }

    /// Completes a request now, or when the FLUSH before it is done.
    pub(super) fn complete_in_order(
        &self,
        sending: &mut Sending,
        request: &SendWr,
        result: Result<Done, WcStatus>,
    ) {
        let kind = request.op.kind();
        match result {
            Ok(done) if sending.outstanding.is_empty() => {
                self.core.complete_done(request.wr_id, kind, request.signaled, done);
            }
            result => {
                sending.outstanding.failed |= result.is_err();
                let (wr_id, signaled) = (request.wr_id, request.signaled);
                let entry = Entry { wr_id, kind, signaled, sequence: None, result: Some(result) };
                sending.outstanding.entries.push_back(entry);
            }
        }
    }

    /// Acts on a FLUSH of the peer, or on the answer to one of this side's. Under the receive lock. Returns why the queue pair broke, if it did.
    pub(super) fn take_flush_record(&self, of: RecordOf, body: &[u8; FLUSH_LEN]) -> Option<Breach> {
        if of == RecordOf::Flushed {
            let Some(answer) = Answer::parse(body) else {
                return Some(Breach::of("the answer to a flush does not parse"));
            };
            return self.take_answer(answer);
        }
        let Some(asked) = Asked::parse(body) else {
            return Some(Breach::of("a flush does not parse"));
        };
        let sequence = asked.sequence;
        let checked = self
            .core
            .registry
            .remote(asked.rkey.into(), asked.offset, asked.len.into(), Need::Flush)
            .and_then(|region| match asked.placement {
                Placement::Visibility => Ok(None),
                Placement::Persistence => {
                    let domain = region.persistence.clone().ok_or(WcStatus::RemoteInvalid)?;
                    Ok(Some((region, domain)))
                }
            });
        let (region, domain) = match checked {
            Ok(Some(found)) => found,
            Ok(None) => return self.answer(Answer { sequence, result: Ok(()) }),
            Err(status) => return self.answer(Answer { sequence, result: Err(status) }),
        };
        if domain.by_cache_lines() {
            region.memory.write_back(asked.offset as usize, asked.len as usize);
            return self.answer(Answer { sequence, result: Ok(()) });
        }
        let this = self.this.clone();
        let done = move |result: Result<(), SyncFailed>| {
            let Some(qp) = this.upgrade() else { return };
            let result = result.map_err(|SyncFailed| WcStatus::RemoteOperation);
            if let Some(reason) = qp.answer(Answer { sequence, result }) {
                crate::rdma::soft::queue::LinkQp::fail(&*qp, Some(&reason));
            }
        };
        domain.persist(&region.memory, asked.offset as usize, asked.len as usize, Box::new(done));
        None
    }

    /// Answers one of the peer's FLUSHes.
    fn answer(&self, answer: Answer) -> Option<Breach> {
        let mut sending = self.send.lock();
        if !self.core.is_ready() {
            return None;
        }
        if sending.answers.len() >= MAX_QUEUE_DEPTH as usize {
            return Some(Breach::new(format_args!(
                "{MAX_QUEUE_DEPTH} answered flushes wait for a peer that does not read"
            )));
        }
        sending.answers.push_back(answer);
        match self.drain_answers(&mut sending) {
            Ok(published) => {
                if published {
                    self.ring_peer();
                }
                if !sending.answers.is_empty() {
                    self.blocked.store(true, Ordering::Release);
                }
                None
            }
            Err(reason) => Some(reason),
        }
    }

    /// Puts waiting answers into the ring; returns whether it put any.
    pub(super) fn drain_answers(&self, sending: &mut Sending) -> Result<bool, Breach> {
        let mut published = false;
        while let Some(answer) = sending.answers.front().copied() {
            let header = RecordHeader { len: FLUSH_LEN as u32, imm: None, of: RecordOf::Flushed };
            match self.put_record(sending, header, Body::Bytes(&answer.encode())) {
                Step::Done(_) => {
                    sending.answers.pop_front();
                    published = true;
                }
                Step::Broken(reason) => return Err(reason),
                _ => break,
            }
        }
        Ok(published)
    }

    /// Completes the FLUSH of an answer, and the requests executed behind it.
    fn take_answer(&self, answer: Answer) -> Option<Breach> {
        let mut sending = self.send.lock();
        let outstanding = &mut sending.outstanding;
        let found = outstanding.entries.iter_mut().find(|entry| entry.sequence == Some(answer.sequence));
        let Some(entry) = found.filter(|entry| entry.result.is_none()) else {
            return Some(Breach::new(format_args!(
                "an answer to flush {} that is not outstanding",
                answer.sequence
            )));
        };
        entry.result = Some(answer.result.map(|()| Done::default()));
        outstanding.failed |= answer.result.is_err();
        while let Some(entry) = outstanding.entries.front()
            && let Some(result) = entry.result
        {
            let (wr_id, kind, signaled) = (entry.wr_id, entry.kind, entry.signaled);
            outstanding.entries.pop_front();
            match result {
                Ok(done) => self.core.complete_done(wr_id, kind, signaled, done),
                Err(status) => {
                    self.core.become_state(QpState::Error);
                    self.core.complete_send(wr_id, kind, status, true, 0);
                    return Some(Breach::new(format_args!("{kind:?} failed with {status:?}")));
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn golden_bytes() {
        let asked = Asked {
            sequence: 0x0102,
            rkey: 0x0a0b_0c0d,
            offset: 0x0304,
            len: 0x0506,
            placement: Placement::Persistence,
        };
        let mut bytes = [0; FLUSH_LEN];
        bytes[..2].copy_from_slice(&[2, 1]);
        bytes[8..10].copy_from_slice(&[4, 3]);
        bytes[16..22].copy_from_slice(&[0x0d, 0x0c, 0x0b, 0x0a, 6, 5]);
        bytes[24] = 2;
        assert_eq!(asked.encode(), bytes);
        assert_eq!(Asked::parse(&bytes), Some(asked));
        assert_eq!(Answer::parse(&bytes), None);
        let mut bytes = [0; FLUSH_LEN];
        (bytes[0], bytes[24]) = (9, 3);
        let answer = Answer { sequence: 9, result: Err(WcStatus::RemoteOperation) };
        assert_eq!(answer.encode(), bytes);
        assert_eq!(Answer::parse(&bytes), Some(answer));
    }

    proptest! {
        #[test]
        fn what_parses_is_what_was_said(bytes in any::<[u8; FLUSH_LEN]>(), code in 0u8..5, blank in any::<bool>()) {
            let mut bytes = bytes;
            bytes[24..].fill(0);
            bytes[24] = code;
            if blank {
                bytes[8..24].fill(0);
            }
            if let Some(asked) = Asked::parse(&bytes) {
                prop_assert_eq!(asked.encode(), bytes);
            }
            if let Some(answer) = Answer::parse(&bytes) {
                prop_assert_eq!(answer.encode(), bytes);
            }
        }
    }
}
