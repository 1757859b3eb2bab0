//! One sender, at the receiver: its ring, the records that were taken and executed, and the place for its answers.
//!
//! # Locks
//! `state` is held over memory copies, cache-line write-back and, once for many records, over the data sync that moves the head of a ring on a synced
//! file. `said` is taken inside it and held over posting a message, but never over a sync: the thread that syncs takes it to report persistence.

use super::core::Common;
use super::kind::Kind;
use super::rings::OpenRing;
use super::service::Request;
use super::wire::{
    ANSWER_HEADER_LEN, AnswerHeader, ENVELOPE_LEN, Envelope, MESSAGE_LEN, Message, open_envelope,
};
use crate::breach::Breach;
use crate::ids::{ClientId, LogSeq, Rkey};
use crate::memory::SharedMemory;
use crate::persist::{LogDevice, SyncFailed};
use crate::rdma::{
    Access, MemoryRegion, PostError, ProtectionDomain, QueuePair, RdmaError, RecvWr, Remote, SendOp, SendWr,
    WrId,
};
use crate::redo::LogId;
use crate::redo::ring::{RECORDS_AT, RingReader, Taken};
use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Depth of a connection's queues: several times the number of requests, answers and notices that may be under way.
pub(super) const QUEUE_DEPTH: u32 = 1024;
/// Buffers of notices. One is used again after this many posts, and by then the queue pair has taken it.
const NOTICES: usize = QUEUE_DEPTH as usize;
/// Records after which the head is moved and told, however small they are: far fewer than a sender may have in the ring.
pub(super) const RECORDS_PER_HEAD: u64 = 64;
const _: () = assert!(4 * RECORDS_PER_HEAD < super::sender_link::IN_RING_MAX);
const _: () = assert!(super::sender_link::IN_RING_MAX < QUEUE_DEPTH as u64 / 2);
/// A slowed sender may go on once this part of the bound is free again. A small part, so that there are many short pauses instead of a few long ones,
/// which would dominate the sender's 99th percentile (measured: with half of the bound it was 850 us).
const RESUME_PART: usize = 16;
/// Ranges of records that need not be persistent by themselves; with this number they are made persistent all the same.
const PASSING_MAX: usize = 64;
/// `WrId` of receives that are not slots of the ring.
const PLAIN: u64 = u64::MAX;

/// A request that was taken, but not executed yet.
pub(super) struct Work {
    pub(super) connection: Arc<Connection>,
    lsn: LogSeq,
    seq: u64,
    /// Envelope and body.
    data: Vec<u8>,
    answer_slot: Option<u16>,
}

impl Work {
    /// The request to execute.
    pub(super) fn request(&self) -> Request<'_> {
        let Connection { client, log, .. } = *self.connection;
        Request { client, log, lsn: self.lsn, seq: self.seq, body: &self.data[ENVELOPE_LEN..] }
    }

    /// Reports that the request was executed, and answers it if an answer was asked for.
    pub(super) fn finish(self, status: u32, answer: &[u8]) {
        let Self { connection, lsn, answer_slot, .. } = self;
        let answer = &answer[..answer.len().min(connection.answer_max())];
        if let Err(reason) = connection.executed(lsn, status, answer_slot, answer) {
            connection.give_up(&reason);
        }
    }
}

struct Progress {
    lsn: LogSeq,
    end: u64,
    executed: bool,
}

struct State {
    reader: RingReader,
    /// Records taken but not checkpointed, in order. Bounded by the ring.
    taken: VecDeque<Progress>,
    /// Slots posted as receives so far.
    posted: u64,
    /// Offset and length of records that need not be persistent by themselves, merged. Cleared once all are executed.
    passing: Vec<(usize, usize)>,
}

/// The state that the sender is told, and the part that it was told.
struct Said {
    persistent: LogSeq,
    slow: bool,
    next_notice: usize,
    head: (u64, LogSeq),
    told: (u64, LogSeq),
}

/// The sender's memory for answers.
#[derive(Clone, Copy)]
pub(super) struct AnswerSlots {
    pub(super) rkey: Rkey,
    pub(super) slots: u32,
    pub(super) slot_len: u32,
}

/// A sender that has been welcomed.
pub(super) struct Connection {
    common: Arc<Common>,
    pub(super) client: ClientId,
    pub(super) log: LogId,
    kind: Kind,
    pub(super) qp: Arc<dyn QueuePair>,
    device: LogDevice,
    ring: Arc<dyn MemoryRegion>,
    outgoing: Arc<dyn MemoryRegion>,
    answers: AnswerSlots,
    state: Mutex<State>,
    said: Mutex<Said>,
    /// Requests taken but not executed. Written by poller and executors.
    pub(super) backlog: AtomicUsize,
    pub(super) broken: AtomicBool,
    pub(super) slowed: AtomicU64,
}

/// The end of the executed records, if it lies behind the head.
fn finished(state: &State) -> Option<(u64, LogSeq)> {
    let done = state.taken.iter().take_while(|progress| progress.executed);
    done.last().map(|progress| (progress.end, LogSeq(progress.lsn.0 + 1)))
}

/// Bytes of outgoing messages: notices, then answers, with one place for each slot.
fn outgoing_len(answers: &AnswerSlots) -> usize {
    NOTICES * MESSAGE_LEN + answers.slots as usize * answers.slot_len as usize
}

impl Connection {
    pub(super) fn new(
        common: Arc<Common>,
        pd: &dyn ProtectionDomain,
        qp: Arc<dyn QueuePair>,
        ring: OpenRing,
        client: ClientId,
        kind: Kind,
        answers: AnswerSlots,
    ) -> Result<Arc<Self>, RdmaError> {
        let OpenRing { device, reader } = ring;
        // A sender may write records. The receiver alone writes identity and checkpoints.
        let access = Access { remote_atomic: false, own_bytes: RECORDS_AT as u64, ..Access::ALL };
        let region = pd.register_persistent(device.memory().clone(), access, device.persistence().clone())?;
        let kind = kind.over(&common.capabilities, region.flush_reach());
        let outgoing = SharedMemory::new("durable-answers", outgoing_len(&answers)).map_err(|source| {
            RdmaError::Io { action: "allocate memory for", endpoint: "answers".to_owned(), source }
        })?;
        let outgoing = pd.register(Arc::new(outgoing), Access::LOCAL)?;
        let log = reader.checkpoint().log;
        let state = State { reader, taken: VecDeque::new(), posted: 0, passing: Vec::new() };
        let start = (0, LogSeq(1));
        let said = Said { persistent: LogSeq(0), slow: false, next_notice: 0, head: start, told: start };
        Ok(Arc::new(Self {
            common,
            client,
            log,
            kind,
            qp,
            device,
            ring: region,
            outgoing,
            answers,
            state: Mutex::new(state),
            said: Mutex::new(said),
            backlog: AtomicUsize::new(0),
            broken: AtomicBool::new(false),
            slowed: AtomicU64::new(0),
        }))
    }

    /// Posts the receives, and sends the welcome.
    pub(super) fn welcome(&self) -> Result<(), PostError> {
        let mut state = self.state.lock();
        if self.kind.sends() {
            let slots = state.reader.geometry().capacity() / state.reader.geometry().stride();
            self.post_slots(&mut state, slots)?;
        } else {
            let plain = RecvWr { wr_id: WrId(PLAIN), local: self.outgoing.sge(0, 0).into() };
            self.qp.post_recv(&vec![plain; QUEUE_DEPTH as usize / 2])?;
        }
        let past = state.reader.checkpoint().past;
        let (ring, reading, kind) = (self.ring.rkey(), self.ring.read_rkey(), self.kind);
        let (log, device) = (self.log, self.device.kind());
        let mut said = self.said.lock();
        self.say(&mut said, &Message::Welcome { ring, reading, kind, log, past, device })
    }

    fn post_slots(&self, state: &mut State, upto: u64) -> Result<(), PostError> {
        let geometry = state.reader.geometry();
        while state.posted < upto {
            let place = geometry.place(state.posted * geometry.stride());
            let local = self.ring.sge(place as u64, geometry.stride() as u32);
            self.qp.post_recv(&[RecvWr { wr_id: WrId(state.posted), local: local.into() }])?;
            state.posted += 1;
        }
        Ok(())
    }

    fn say(&self, said: &mut Said, message: &Message) -> Result<(), PostError> {
        let offset = said.next_notice * MESSAGE_LEN;
        said.next_notice = (said.next_notice + 1) % NOTICES;
        self.outgoing.memory().write(offset, &message.encode());
        let local = self.outgoing.sge(offset as u64, MESSAGE_LEN as u32);
        self.qp.post_send(&[SendWr {
            wr_id: WrId(0),
            op: SendOp::Send,
            local: local.into(),
            signaled: false,
        }])
    }

    fn notice(&self, said: &mut Said) -> Result<(), PostError> {
        said.told = said.head;
        let (persistent, slow) = (said.persistent, said.slow);
        let (head, head_lsn) = said.head;
        self.say(said, &Message::Notice { persistent, head, head_lsn, slow })
    }

    /// Takes the request, or the batch of requests, that the RNIC has announced.
    pub(super) fn arrived(self: &Arc<Self>, imm: Option<u32>, out: &mut Vec<Work>) -> Result<(), Breach> {
        let mut state = self.state.lock();
        // Earlier records that need not be persistent by themselves become persistent with the next one that must, since a record is valid only if
        // everything before it is.
        let mut range = std::mem::take(&mut state.passing);
        let mut durable = false;
        let first = out.len();
        let mut last = LogSeq(0);
        loop {
            let next = state.reader.next_lsn();
            // The immediate is the low half of the last record's number.
            let more = match imm {
                Some(imm) => imm.wrapping_sub(next.0 as u32) as i32 >= 0,
                None => out.len() == first,
            };
            if !more {
                break;
            }
            let Taken { lsn, seq, data, end, place, .. } = state.reader.take()?;
            match range.last_mut() {
                Some(open) if open.0 + open.1 <= place.0 && place.0 - open.0 - open.1 < 4096 => {
                    open.1 = place.0 + place.1 - open.0;
                }
                _ => range.push(place),
            }
            let (Envelope { answer_slot, passing }, _) = open_envelope(&data)?;
            if answer_slot.is_some_and(|slot| u32::from(slot) >= self.answers.slots) {
                return Err(Breach::new(format_args!(
                    "request {lsn} wants its answer in a slot that is not there"
                )));
            }
            durable |= !passing;
            state.taken.push_back(Progress { lsn, end, executed: false });
            out.push(Work { connection: self.clone(), lsn, seq, data, answer_slot });
            // Counted at once: whoever ends the connection waits for it, also if the next record is no request.
            self.backlog.fetch_add(1, Ordering::AcqRel);
            last = lsn;
        }
        let backlog = self.backlog.load(Ordering::Acquire);
        let mut said = self.said.lock();
        let slows = backlog > self.common.options.slow_beyond && !said.slow;
        if slows {
            said.slow = true;
            self.slowed.fetch_add(1, Ordering::Relaxed);
        }
        if imm.is_some() {
            let plain = RecvWr { wr_id: WrId(PLAIN), local: self.outgoing.sge(0, 0).into() };
            self.qp.post_recv(&[plain])?;
        }
        if self.kind.receiver_flushes() && !durable && range.len() < PASSING_MAX {
            state.passing = range;
        } else if self.kind.receiver_flushes() && last.0 > 0 {
            return self.persist(&state.reader, said, &range, last);
        }
        if slows {
            self.notice(&mut said)?;
        }
        Ok(())
    }

    /// RFlush: makes arrived records persistent, and notifies the sender.
    fn persist(
        self: &Arc<Self>,
        reader: &RingReader,
        mut said: MutexGuard<'_, Said>,
        ranges: &[(usize, usize)],
        last: LogSeq,
    ) -> Result<(), Breach> {
        let persistence = reader.persistence().clone();
        let memory = reader.memory().clone();
        if persistence.by_cache_lines() {
            for (offset, len) in ranges {
                let persisted = persistence.persist_and_wait(&memory, *offset, *len);
                persisted?;
            }
            said.persistent = last;
            return self.notice(&mut said).map_err(Breach::from);
        }
        // The domain completes ranges in the order of the calls, and after a failure all fail: so the last range's result is that of all.
        let Some(((offset, len), before)) = ranges.split_last() else { return Ok(()) };
        drop(said);
        for (offset, len) in before {
            persistence.persist(&memory, *offset, *len, Box::new(|_| {}));
        }
        let this = self.clone();
        let done = move |result: Result<(), SyncFailed>| {
            let mut said = this.said.lock();
            let told = result.map_err(Breach::from).and_then(|()| {
                said.persistent = last;
                this.notice(&mut said).map_err(Breach::from)
            });
            drop(said);
            if let Err(reason) = told {
                this.give_up(&reason);
            }
        };
        persistence.persist(&memory, *offset, *len, Box::new(done));
        Ok(())
    }

    /// A request was executed: answers it, and moves the head past all executed requests, once for many records. On persistent memory the head also
    /// moves when all taken requests are executed, so the requests of one doorbell cost one checkpoint. On a synced file that would not be worth a
    /// sync.
    fn executed(
        &self,
        lsn: LogSeq,
        status: u32,
        answer_slot: Option<u16>,
        body: &[u8],
    ) -> Result<(), Breach> {
        self.common.executed.fetch_add(1, Ordering::Relaxed);
        let backlog = self.backlog.fetch_sub(1, Ordering::AcqRel) - 1;
        let mut state = self.state.lock();
        let at = state.taken.partition_point(|progress| progress.lsn < lsn);
        if let Some(progress) = state.taken.get_mut(at) {
            progress.executed |= progress.lsn == lsn;
        }
        if let Some((end, next)) = finished(&state) {
            let by_lines = state.reader.persistence().by_cache_lines();
            let is_all = state.taken.back().is_some_and(|last| last.lsn < next);
            let part = state.reader.geometry().capacity() / 8;
            let before = state.reader.checkpoint();
            let is_much = end - before.position >= part || next.0 - before.lsn.0 >= RECORDS_PER_HEAD;
            if is_much || (by_lines && is_all) {
                self.advance(&mut state, end, next)?;
            }
        }
        let mut said = self.said.lock();
        let head = *state.reader.checkpoint();
        said.head = (head.position, head.lsn);
        let slow_beyond = self.common.options.slow_beyond;
        let resumes = said.slow && backlog <= slow_beyond - slow_beyond / RESUME_PART;
        said.slow &= !resumes;
        if let Some(slot) = answer_slot {
            self.answer(&state, slot, lsn, status, body)?;
            said.told = said.head;
        }
        if resumes || self.is_untold(&state, &said) {
            self.notice(&mut said)?;
        }
        Ok(())
    }

    /// Whether the head that the sender knows is far behind.
    fn is_untold(&self, state: &State, said: &Said) -> bool {
        said.head.0 - said.told.0 > state.reader.geometry().capacity() / 4
            || said.head.1.0 - said.told.1.0 >= RECORDS_PER_HEAD
    }

    /// Moves the head, makes it persistent, and posts the slots that this frees.
    fn advance(&self, state: &mut State, end: u64, next: LogSeq) -> Result<(), Breach> {
        self.common.heads.fetch_add(1, Ordering::Relaxed);
        state.reader.checkpoint_to(end, next)?;
        while state.taken.front().is_some_and(|progress| progress.lsn < next) {
            state.taken.pop_front();
        }
        if state.taken.is_empty() {
            state.passing.clear();
        }
        if self.kind.sends() && !self.broken.load(Ordering::Acquire) {
            let geometry = state.reader.geometry();
            let upto = (end + geometry.capacity()) / geometry.stride();
            self.post_slots(state, upto)?;
        }
        Ok(())
    }

    /// Whether the sender was told to slow down.
    pub(super) fn is_slowed(&self) -> bool {
        self.said.lock().slow
    }

    fn answer(
        &self,
        state: &State,
        slot: u16,
        lsn: LogSeq,
        status: u32,
        body: &[u8],
    ) -> Result<(), PostError> {
        let AnswerSlots { rkey, slot_len, .. } = self.answers;
        let room = slot_len as usize - ANSWER_HEADER_LEN;
        assert!(body.len() <= room, "a service answers with no more than the sender has room for");
        let checkpoint = state.reader.checkpoint();
        let header = AnswerHeader {
            lsn,
            head: checkpoint.position,
            head_lsn: checkpoint.lsn,
            status,
            len: body.len() as u32,
        };
        let at = NOTICES * MESSAGE_LEN + usize::from(slot) * slot_len as usize;
        let memory = self.outgoing.memory();
        memory.write(at, &header.encode());
        memory.write(at + ANSWER_HEADER_LEN, body);
        let local = self.outgoing.sge(at as u64, (ANSWER_HEADER_LEN + body.len()) as u32);
        let offset = u64::from(slot) * u64::from(slot_len);
        let op = SendOp::WriteImm(Remote::Memory { rkey, offset }, slot.into());
        self.qp.post_send(&[SendWr { wr_id: WrId(0), op, local: local.into(), signaled: false }])
    }

    /// Most bytes an answer may have.
    pub(super) fn answer_max(&self) -> usize {
        self.answers.slot_len as usize - ANSWER_HEADER_LEN
    }

    /// Ends the connection. Requests in its ring are executed when the sender comes back, or at the next start.
    pub(super) fn give_up(&self, reason: &Breach) {
        if !self.broken.swap(true, Ordering::AcqRel) {
            tracing::warn!(client = %self.client, "durable connection closed: {reason}");
        }
        self.qp.close();
    }
}
