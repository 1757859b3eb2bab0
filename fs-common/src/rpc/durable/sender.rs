//! The sender: posts requests, learns when they are persistent, and waits only for the answers that it asks for.
//!
//! # How it works
//! `post` stages a record in the mirror of the ring. When a batch is full, or the sender waits, one doorbell posts the records: as WRITEs (one for
//! adjacent records) or SENDs, and for the flush kinds one FLUSH over all of them. The next request can be posted before the last one is persistent:
//! this is the advantage of durable RPC.
//!
//! # Bounds
//! `post` waits for room in the ring, for an answer slot, for requests to become persistent, and for a receiver that is behind; each at most
//! `Settings::patience`. Then it fails with a typed error, and nothing was posted.
//!
//! # Failure
//! After a broken connection every call fails until `resume`, which connects again and posts the requests that the receiver never got. Persistent
//! requests are executed by the receiver, and not sent again. Answers that were under way are lost: waiting for them fails with `AnswerLost`.

use super::kind::{Kind, Settings};
use super::sender_link::{Buffers, Dialling, Event, IN_RING_MAX, Link, Registered, UNACKED_MAX};
use super::wire::{
    ANSWER_HEADER_LEN, AnswerHeader, ENVELOPE_LEN, Envelope, Message, envelope, open_envelope,
};
use crate::ids::{ClientId, LogSeq, Rkey, SlotIndex};
use crate::persist::LogDeviceKind;
use crate::rdma::{
    Capabilities, Device, Endpoint, LinkKind, Placement, RdmaError, Remote, SendOp, SendWr, Sge, WrId,
};
use crate::redo::ring::{RingError, RingWriter, Room, Span};
use crate::redo::{LogId, Record, RecordKind, parse};
use crate::world::{Clock, SystemClock};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Longest single wait for completions, after which the bounds are checked again.
const STEP: Duration = Duration::from_millis(5);

/// Names a posted request until its connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(u64);

impl Ticket {
    /// The request's number, which its record carries: one more than that of the request before it, also over
    /// reconnects.
    pub const fn number(self) -> u64 {
        self.0
    }
}

/// What the poster waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wants {
    /// Until the request is persistent.
    Persistence,
    /// Until the request is persistent, and the answer.
    Answer,
    /// The answer to a request that changes nothing: it gets no FLUSH of its own, and after a crash it may have to be posted again.
    AnswerOnly,
}

/// Why a call of a sender failed.
#[derive(Debug, thiserror::Error)]
pub enum SenderError {
    /// The connection is gone; call `resume`.
    #[error("the connection to the receiver broke")]
    Disconnected,
    /// The receiver's log device failed.
    #[error("the receiver's log device cannot make requests persistent")]
    Device,
    /// The ring had no room until the time limit.
    #[error("the ring stayed full for {0} ms: the receiver executes nothing")]
    Full(u64),
    /// The receiver is behind, and asked to slow down.
    #[error("the receiver asked to slow down for {0} ms")]
    Slowed(u64),
    /// There was no free slot for the answer until the time limit.
    #[error(
        "no answer could be asked for in {0} ms: all slots are of requests whose answers were not waited for"
    )]
    NoSlot(u64),
    /// Nothing was heard of the request until the time limit.
    #[error("no word of the request in {0} ms")]
    TimedOut(u64),
    /// The answer was lost with its connection.
    #[error("the request was executed, and its answer was lost with its connection")]
    AnswerLost,
    /// No answer was asked for.
    #[error("the request was posted without asking for an answer")]
    NoAnswer,
    /// The receiver has no ring for this client.
    #[error("the receiver refused; its log says why")]
    Refused,
    /// The receiver did not answer the hello.
    #[error("the receiver did not answer the hello")]
    NoWelcome,
    /// The receiver sent something impossible.
    #[error("the receiver broke the protocol: {0}")]
    Protocol(&'static str),
    /// The ring cannot be used.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// The device or the link failed.
    #[error(transparent)]
    Rdma(#[from] RdmaError),
}

/// Figures of a sender.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SenderFigures {
    /// Requests posted.
    pub posted: u64,
    /// Doorbells rung.
    pub doorbells: u64,
    /// Posts that waited because the receiver was behind.
    pub slowed: u64,
    /// Posts that waited for room in the ring.
    pub full: u64,
    /// Heads read one-sidedly.
    pub head_reads: u64,
    /// Requests posted again after a broken connection.
    pub resent: u64,
    /// Requests that were not posted again, since the receiver had them.
    pub not_resent: u64,
}

/// The result of a resumption.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resumed {
    /// Requests that the receiver had executed, and that were not sent again.
    pub kept: u64,
    /// Requests posted again.
    pub resent: u64,
}

enum Asked {
    Waiting(u16),
    Here(u16),
    Lost,
}

/// A posted request that is not known to be executed.
struct Sent {
    ticket: Ticket,
    lsn: LogSeq,
    span: Span,
}

/// A sender.
pub struct Sender {
    device: Arc<dyn Device>,
    clock: Arc<dyn Clock>,
    client: ClientId,
    settings: Settings,
    buffers: Buffers,
    link: Link,
    ring: Rkey,
    reading: Rkey,
    kind: Kind,
    log_device: LogDeviceKind,
    regions: Registered,
    writer: RingWriter,
    persistent: LogSeq,
    slow: bool,
    sent: VecDeque<Sent>,
    /// Requests of an earlier life that have to be sent again, in order, with envelope and body. Empty except during `resume`, and after a `resume`
    /// that failed midway.
    again: VecDeque<(Ticket, Vec<u8>)>,
    /// The newest ticket.
    last: u64,
    batch: Vec<Span>,
    /// Whether a staged record must be persistent.
    batch_is_durable: bool,
    /// Records that were sent without a FLUSH. The next FLUSH covers them, too, since a record is valid only if everything before it is. Cleared once
    /// executed.
    passing: Vec<(LogSeq, usize, usize)>,
    asked: HashMap<Ticket, Asked>,
    by_lsn: HashMap<LogSeq, Ticket>,
    free_slots: Vec<u16>,
    head_read_under_way: bool,
    events: Vec<Event>,
    scratch: Vec<u8>,
    data: Vec<u8>,
    requests: Vec<SendWr>,
    figures: SenderFigures,
}

impl Sender {
    /// Connects to a receiver.
    ///
    /// # Errors
    /// [`SenderError`].
    pub fn connect(
        device: Arc<dyn Device>,
        endpoint: &Endpoint,
        client: ClientId,
        settings: Settings,
    ) -> Result<Self, SenderError> {
        let capabilities: Capabilities = device.capabilities();
        let geometry = settings.geometry()?;
        if settings.kind.sends() && geometry.stride() > u64::from(capabilities.max_message_bytes) {
            let most = capabilities.max_message_bytes as usize;
            return Err(RingError::TooLong { len: geometry.stride() as usize, most }.into());
        }
        let buffers = Buffers::new(&settings, geometry).map_err(|source| RdmaError::Io {
            action: "allocate memory for",
            endpoint: "a sender".to_owned(),
            source,
        })?;
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
        let dialling = Dialling { device: &*device, clock: &*clock, client };
        let (link, welcomed, regions) = Link::connect(dialling, endpoint, &settings, geometry, &buffers)?;
        let mut sender = Self {
            device,
            clock,
            client,
            buffers,
            link,
            ring: welcomed.ring,
            reading: welcomed.reading,
            kind: welcomed.kind,
            log_device: welcomed.device,
            regions,
            writer: RingWriter::new(geometry, welcomed.log),
            persistent: LogSeq(0),
            slow: false,
            sent: VecDeque::new(),
            again: VecDeque::new(),
            last: 0,
            batch: Vec::new(),
            batch_is_durable: false,
            passing: Vec::new(),
            asked: HashMap::new(),
            by_lsn: HashMap::new(),
            free_slots: (0..settings.answers as u16).collect(),
            head_read_under_way: false,
            events: Vec::new(),
            scratch: Vec::new(),
            data: Vec::new(),
            requests: Vec::new(),
            figures: SenderFigures::default(),
            settings,
        };
        for event in &welcomed.behind {
            sender.on_event(event)?;
        }
        Ok(sender)
    }

    /// The kind: that of the settings, or, if RNICs, library or the ring's memory support no FLUSH to persistence, the one in which the receiver
    /// flushes. It may change with `resume`.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The kind of the receiver's log device.
    pub fn log_device(&self) -> LogDeviceKind {
        self.log_device
    }

    /// The link that carries the connection.
    pub fn link(&self) -> LinkKind {
        self.link.qp.link()
    }

    /// Its figures.
    pub fn figures(&self) -> SenderFigures {
        self.figures
    }

    /// Posts a request. It is sent when the batch is full, or the sender waits for something.
    ///
    /// # Errors
    /// [`SenderError`]; nothing was posted.
    pub fn post(&mut self, body: &[u8], wants: Wants) -> Result<Ticket, SenderError> {
        self.check_resumed()?;
        self.make_room(body.len(), wants)?;
        let slot = match wants {
            Wants::Answer | Wants::AnswerOnly => self.free_slots.pop(),
            Wants::Persistence => None,
        };
        self.data.clear();
        let passing = wants == Wants::AnswerOnly;
        self.data.extend_from_slice(&envelope(Envelope { answer_slot: slot, passing }));
        self.batch_is_durable |= !passing;
        self.data.extend_from_slice(body);
        self.last += 1;
        let ticket = Ticket(self.last);
        self.stage(ticket);
        if let Some(slot) = slot {
            self.asked.insert(ticket, Asked::Waiting(slot));
        }
        self.figures.posted += 1;
        if self.batch.len() >= self.settings.batch {
            self.ring_doorbell()?;
        }
        Ok(ticket)
    }

    /// Puts `self.data` into the mirror as the next record.
    fn stage(&mut self, ticket: Ticket) {
        let record = Record {
            kind: RecordKind::Request,
            lsn: LogSeq(0),
            client: self.client,
            slot: SlotIndex(0),
            seq: ticket.0,
            data: &self.data,
        };
        let span = self.writer.put(&self.buffers.mirror, &record, &mut self.scratch);
        self.batch.push(span);
        self.sent.push_back(Sent { ticket, lsn: span.lsn, span });
        self.by_lsn.insert(span.lsn, ticket);
    }

    /// Waits until there is room for a request.
    fn make_room(&mut self, body_len: usize, wants: Wants) -> Result<(), SenderError> {
        let start = self.clock.monotonic();
        let (mut counted_slow, mut counted_full, mut head_reads) = (false, false, 0);
        self.take_events(Duration::ZERO)?;
        loop {
            let room = self.writer.room(ENVELOPE_LEN + body_len)?;
            let unacked = self.writer.next().0 - 1 - self.persistent.0;
            let in_ring = self.writer.next().0 - self.writer.head_lsn().0;
            let full = room != Room::Enough || in_ring >= IN_RING_MAX;
            let no_slot = wants != Wants::Persistence && self.free_slots.is_empty();
            if !full && !no_slot && !self.slow && unacked < UNACKED_MAX {
                return Ok(());
            }
            self.figures.slowed += u64::from(self.slow && !counted_slow);
            counted_slow |= self.slow;
            self.figures.full += u64::from(full && !counted_full);
            counted_full |= full;
            let waited = self.clock.monotonic() - start;
            if waited > self.settings.patience {
                let waited_ms = waited.as_millis() as u64;
                return Err(match (self.slow, full) {
                    (true, _) => SenderError::Slowed(waited_ms),
                    (false, false) if no_slot => SenderError::NoSlot(waited_ms),
                    _ => SenderError::Full(waited_ms),
                });
            }
            self.ring_doorbell()?;
            // Not with every turn: over shared memory a READ completes at once, and a sender that always finds a completion never looks for messages.
            let due = waited >= STEP * head_reads;
            if full && due && !self.head_read_under_way {
                head_reads += 1;
                self.link.read_head(self.reading)?;
                self.head_read_under_way = true;
                self.figures.head_reads += 1;
            }
            self.take_events(STEP)?;
        }
    }

    /// Sends all staged records.
    ///
    /// # Errors
    /// [`SenderError::Disconnected`].
    pub fn ring_doorbell(&mut self) -> Result<(), SenderError> {
        let Some(last) = self.batch.last().map(|span| span.lsn) else { return Ok(()) };
        let most = self.device.capabilities().max_transfer_bytes as usize;
        let rkey = self.ring;
        let mirror = &self.regions[0];
        let requests = &mut self.requests;
        requests.clear();
        // Adjacent records, and records with only padding between them, are one range.
        let mut ranges: Vec<(usize, usize)> = Vec::new();
        for span in &self.batch {
            for (offset, len) in span.wrap.into_iter().chain([(span.offset, span.len)]) {
                match ranges.last_mut() {
                    Some(open) if open.0 + open.1 == offset && open.1 + len <= most => open.1 += len,
                    _ => ranges.push((offset, len)),
                }
            }
        }
        let silent =
            |op, local: Sge| SendWr { wr_id: WrId(last.0), op, local: local.into(), signaled: false };
        if self.settings.kind.sends() {
            for span in &self.batch {
                requests.push(silent(SendOp::Send, mirror.sge(span.offset as u64, span.len as u32)));
            }
        } else {
            for (index, (offset, len)) in ranges.iter().enumerate() {
                let remote = Remote::Memory { rkey, offset: *offset as u64 };
                let op = match index + 1 == ranges.len() {
                    true => SendOp::WriteImm(remote, last.0 as u32),
                    false => SendOp::Write(remote),
                };
                requests.push(silent(op, mirror.sge(*offset as u64, *len as u32)));
            }
        }
        let durable = std::mem::replace(&mut self.batch_is_durable, false);
        if !self.kind.receiver_flushes() && !durable {
            let head = self.writer.head_lsn();
            self.passing.retain(|(lsn, ..)| *lsn >= head);
            self.passing.extend(ranges.into_iter().map(|(offset, len)| (last, offset, len)));
        } else if !self.kind.receiver_flushes() {
            // The range from the first to the last record, or two ranges if it wraps around.
            let mut flushes: Vec<(usize, usize)> = Vec::new();
            let head = self.writer.head_lsn();
            let before = self.passing.drain(..).filter(|(lsn, ..)| *lsn >= head);
            for (offset, len) in before.map(|(_, offset, len)| (offset, len)).chain(ranges) {
                match flushes.last_mut() {
                    Some(open) if open.0 <= offset => open.1 = offset + len - open.0,
                    _ => flushes.push((offset, len)),
                }
            }
            let count = flushes.len();
            for (index, (offset, len)) in flushes.into_iter().enumerate() {
                let remote = Remote::Memory { rkey, offset: offset as u64 };
                let op = SendOp::Flush { remote, len: len as u32, placement: Placement::Persistence };
                let signaled = index + 1 == count;
                requests.push(SendWr { wr_id: WrId(last.0), op, local: Sge::EMPTY.into(), signaled });
            }
        }
        self.batch.clear();
        self.figures.doorbells += 1;
        self.link.post(&self.requests)
    }

    /// Waits until a request, and with it every one posted before, is persistent.
    ///
    /// # Errors
    /// [`SenderError`].
    pub fn wait_persistent(&mut self, ticket: Ticket) -> Result<(), SenderError> {
        self.check_resumed()?;
        self.ring_doorbell()?;
        self.wait_until(|sender| sender.is_persistent(ticket))
    }

    fn is_persistent(&self, ticket: Ticket) -> bool {
        // Requests are sent in the order of their tickets; one that is not in the list has been executed.
        let at = self.sent.partition_point(|sent| sent.ticket < ticket);
        self.sent.get(at).is_none_or(|sent| sent.ticket != ticket || sent.lsn <= self.persistent)
    }

    /// Waits for a request's answer, and puts it into `body`. Returns the service's status.
    ///
    /// # Errors
    /// [`SenderError`]. After [`SenderError::Disconnected`] and [`SenderError::TimedOut`] the answer may still come, also after a `resume`, and keeps
    /// its slot until it is waited for again.
    pub fn wait_answer(&mut self, ticket: Ticket, body: &mut Vec<u8>) -> Result<u32, SenderError> {
        self.check_resumed()?;
        self.ring_doorbell()?;
        if !self.asked.contains_key(&ticket) {
            return Err(SenderError::NoAnswer);
        }
        self.wait_until(|sender| !matches!(sender.asked.get(&ticket), Some(Asked::Waiting(_))))?;
        match self.asked.remove(&ticket) {
            Some(Asked::Here(slot)) => {
                let at = usize::from(slot) * self.buffers.slot_len;
                let mut header = [0; ANSWER_HEADER_LEN];
                self.buffers.answers.read(at, &mut header);
                let header = AnswerHeader::parse(&header);
                let room = self.buffers.slot_len - ANSWER_HEADER_LEN;
                body.resize((header.len as usize).min(room), 0);
                self.buffers.answers.read(at + ANSWER_HEADER_LEN, body);
                self.free_slots.push(slot);
                Ok(header.status)
            }
            _ => Err(SenderError::AnswerLost),
        }
    }

    /// As `wait_answer`, but without waiting: `None` if the answer has not come.
    ///
    /// # Errors
    /// [`SenderError`].
    pub fn take_answer(&mut self, ticket: Ticket, body: &mut Vec<u8>) -> Result<Option<u32>, SenderError> {
        self.check_resumed()?;
        self.take_events(Duration::ZERO)?;
        match self.asked.get(&ticket) {
            Some(Asked::Waiting(_)) => Ok(None),
            _ => self.wait_answer(ticket, body).map(Some),
        }
    }

    fn wait_until(&mut self, done: impl Fn(&Self) -> bool) -> Result<(), SenderError> {
        let start = self.clock.monotonic();
        while !done(self) {
            self.take_events(STEP)?;
            let waited = self.clock.monotonic() - start;
            if waited > self.settings.patience && !done(self) {
                return Err(SenderError::TimedOut(waited.as_millis() as u64));
            }
        }
        Ok(())
    }

    /// Acts on completions; waits for the first at most `wait`.
    fn take_events(&mut self, wait: Duration) -> Result<(), SenderError> {
        let mut events = std::mem::take(&mut self.events);
        let taken = self.link.progress(wait, &mut events);
        for event in events.drain(..) {
            self.on_event(&event)?;
        }
        self.events = events;
        taken
    }

    fn on_event(&mut self, event: &Event) -> Result<(), SenderError> {
        match event {
            Event::Persistent(lsn) => self.persistent = self.persistent.max(*lsn),
            Event::Notice(Message::Notice { persistent, head, head_lsn, slow }) => {
                if *persistent >= self.writer.next() {
                    return Err(SenderError::Protocol("what was not written is persistent"));
                }
                self.persistent = self.persistent.max(*persistent);
                self.slow = *slow;
                self.writer.heard(*head, *head_lsn)?;
            }
            Event::Notice(_) => return Err(SenderError::Protocol("a message that does not belong here")),
            Event::Head(checkpoint) => {
                self.head_read_under_way = false;
                if let Some(checkpoint) = checkpoint {
                    self.writer.read_head(checkpoint)?;
                }
            }
            Event::Answer(slot) => {
                let at = *slot as usize * self.buffers.slot_len;
                if *slot as usize >= self.settings.answers {
                    return Err(SenderError::Protocol("an answer to no slot"));
                }
                let mut header = [0; ANSWER_HEADER_LEN];
                self.buffers.answers.read(at, &mut header);
                let header = AnswerHeader::parse(&header);
                self.writer.heard(header.head, header.head_lsn)?;
                let ticket = self.by_lsn.get(&header.lsn).copied();
                match ticket.and_then(|ticket| self.asked.get(&ticket)) {
                    Some(Asked::Waiting(of)) if u32::from(*of) == *slot => {
                        let of = *of;
                        if let Some(ticket) = ticket {
                            self.asked.insert(ticket, Asked::Here(of));
                        }
                    }
                    _ => return Err(SenderError::Protocol("an answer nobody waits for")),
                }
            }
        }
        // An answer may come before the head has moved past its request: a number is kept until both have happened.
        let head = self.writer.head_lsn();
        while let Some(first) = self.sent.front()
            && first.lsn < head
        {
            if matches!(self.asked.get(&first.ticket), Some(Asked::Waiting(_))) {
                break;
            }
            self.by_lsn.remove(&first.lsn);
            self.sent.pop_front();
        }
        // Executed requests are persistent.
        self.persistent = self.persistent.max(LogSeq(head.0 - 1));
        Ok(())
    }

    /// Connects again, to a receiver that may have been restarted, and posts the requests that it never got.
    ///
    /// # Errors
    /// [`SenderError`]; no request is lost, and no other request is sent before a later call has succeeded.
    pub fn resume(&mut self, endpoint: &Endpoint) -> Result<Resumed, SenderError> {
        self.link.qp.close();
        let geometry = self.writer.geometry();
        let dialling = Dialling { device: &*self.device, clock: &*self.clock, client: self.client };
        let (link, welcomed, regions) =
            Link::connect(dialling, endpoint, &self.settings, geometry, &self.buffers)?;
        let mut resumed = Resumed { kept: self.take_back(welcomed.past)?, resent: 0 };
        (self.link, self.regions, self.ring) = (link, regions, welcomed.ring);
        (self.reading, self.kind) = (welcomed.reading, welcomed.kind);
        self.log_device = welcomed.device;
        self.writer = RingWriter::new(geometry, welcomed.log);
        (self.persistent, self.slow, self.head_read_under_way) = (LogSeq(0), false, false);
        self.batch.clear();
        self.passing.clear();
        // All requests that are sent again are made persistent.
        self.batch_is_durable = true;
        self.by_lsn.clear();
        self.events.clear();
        for event in &welcomed.behind {
            self.on_event(event)?;
        }
        while let Some((_, data)) = self.again.front() {
            // They fitted into the same ring before, but perhaps not from its beginning on.
            let (start, len) = (self.clock.monotonic(), data.len());
            while self.writer.room(len)? != Room::Enough {
                self.ring_doorbell()?;
                self.take_events(STEP)?;
                let waited = self.clock.monotonic() - start;
                if waited > self.settings.patience {
                    return Err(SenderError::Full(waited.as_millis() as u64));
                }
            }
            if let Some((ticket, data)) = self.again.pop_front() {
                self.data = data;
                self.stage(ticket);
                resumed.resent += 1;
                self.figures.resent += 1;
            }
        }
        self.ring_doorbell()?;
        Ok(resumed)
    }

    /// Takes the requests that the receiver never got out of the mirror, before records of the new life overwrite them. They are to be sent again,
    /// before those that an earlier attempt did not get to send. All others were executed, up to `past`; returns how many those were.
    ///
    /// # Errors
    /// [`SenderError::Protocol`]; nothing has changed.
    fn take_back(&mut self, (log, executed): (LogId, LogSeq)) -> Result<u64, SenderError> {
        let had = if log == self.writer.log() { executed } else { LogSeq(0) };
        let had = had.max(LogSeq(self.writer.head_lsn().0 - 1));
        let (mut again, mut answered) = (VecDeque::new(), 0);
        for sent in self.sent.iter().filter(|sent| sent.lsn > had) {
            let mut bytes = vec![0; sent.span.len];
            self.buffers.mirror.read(sent.span.offset, &mut bytes);
            let (record, _) = parse(self.writer.log(), sent.lsn, &bytes)
                .map_err(|_| SenderError::Protocol("the mirror lost a record"))?;
            let mut data = record.data.to_vec();
            let (Envelope { answer_slot, passing }, _) =
                open_envelope(&data).map_err(|_| SenderError::Protocol("the mirror lost a request"))?;
            let is_waited = matches!(self.asked.get(&sent.ticket), Some(Asked::Waiting(_)));
            if answer_slot.is_some() && !is_waited {
                // The answer has arrived, and another request may have the slot by now.
                if passing {
                    answered += 1;
                    continue;
                }
                data[..ENVELOPE_LEN].copy_from_slice(&envelope(Envelope { answer_slot: None, passing }));
            }
            again.push_back((sent.ticket, data));
        }
        let mut kept = answered;
        for sent in self.sent.drain(..).filter(|sent| sent.lsn <= had) {
            kept += 1;
            if let Some(asked) = self.asked.get_mut(&sent.ticket)
                && let Asked::Waiting(slot) = *asked
            {
                self.free_slots.push(slot);
                *asked = Asked::Lost;
            }
        }
        again.append(&mut self.again);
        self.again = again;
        self.figures.not_resent += kept;
        Ok(kept)
    }

    /// Fails while requests wait for another `resume`, since nothing may overtake them.
    fn check_resumed(&self) -> Result<(), SenderError> {
        if self.again.is_empty() { Ok(()) } else { Err(SenderError::Disconnected) }
    }
}
