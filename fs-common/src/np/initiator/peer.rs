//! The way of an access.
//!
//! | access | posted | done if | else |
//! |--------|--------|---------|------|
//! | READ | READ | no page's part is the signature | the target, for the range from the first such page to the last |
//! | WRITE, all entries known | WRITE, READ of the entries | each page stayed: same frame, same version | see below |
//! | WRITE, not all known | READ of the entries, WRITE, READ of the entries | the same | see below |
//! | atomic | - | - | the target: done twice it would be wrong |
//!
//! A WRITE of which a page did not stay goes once more, if all its pages now have frames; otherwise the target is asked, for the range from the first
//! such page to the last. WRITEs that are not signaled are checked together, when the next request is that is, or when one has to wait for them.
//!
//! # Invariants
//! * Each access is in one of three places: *pending* in the order of posts, *under way* in a slot, or completed.
//! * The last work request of a chain is signaled, and completions come in order: so each wr_id that is polled is of the access that is in its slot.

use super::calls::{CALLS_LEN, Calls, Piece};
use super::order::{Span, may_begin};
use super::request::{NpCompletion, NpError, NpOp, NpSettings, NpStatus, NpWr, PeerFigures};
use super::versions::Versions;
use crate::ids::{PAGE_SIZE, Rkey};
use crate::memory::SharedMemory;
use crate::memory::paged::PageEntry;
use crate::np::ACCESS_MAX;
use crate::np::wire::{INLINE_MAX, Message, PIECE_MAX, RPC_DEPTH, Reply, RequestOp, Status, Welcome};
use crate::rdma::{
    Access, Completion, CompletionKind, CompletionQueue, ConnectOptions, Device, Endpoint, MemoryRegion,
    PagedAccess, ProtectionDomain, QpConfig, QueuePair, RdmaError, RecvWr, Remote, SendOp, SendWr, WcStatus,
    WrId,
};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Entries of the pages of the longest access.
const ENTRIES_MAX: usize = ACCESS_MAX as usize / PAGE_SIZE + 1;
/// Bytes of an access's room for entries: from before, and from after.
const ROOM: usize = 2 * ENTRIES_MAX * 8;
/// WRITEs beyond so many pages are checked at once, signaled or not.
const BATCHED_PAGES_MAX: u64 = 16;
/// The most accesses under way.
const DEPTH_MAX: usize = 1024;
/// Completions taken at once.
const COMPLETIONS: usize = 64;

/// What a polled completion is about; the high half of its wr_id.
const READ_DONE: u64 = 1;
const WRITE_CHECKED: u64 = 2;
const BATCH_CHECKED: u64 = 3;
const CALL_SENT: u64 = 4;

/// An access under way.
struct Flight {
    wr: NpWr,
    /// The entries before are those of `Versions`; otherwise they are in the room.
    known: Vec<PageEntry>,
    /// The access in whose room the entries from after are, and the page of the first of them.
    entries_in: (usize, u64),
    repeated: bool,
    /// Pieces that the target was asked for.
    calls: usize,
    status: NpStatus,
    old: u64,
}

impl Flight {
    fn pages(&self) -> std::ops::RangeInclusive<u64> {
        let last = self.wr.offset + u64::from(self.wr.len) - 1;
        self.wr.offset / PAGE_SIZE as u64..=last / PAGE_SIZE as u64
    }

    /// The part of the access that is in a page: offset in the access, length.
    fn part(&self, page: u64) -> (usize, usize) {
        let start = (page * PAGE_SIZE as u64).max(self.wr.offset);
        let end = ((page + 1) * PAGE_SIZE as u64).min(self.wr.offset + u64::from(self.wr.len));
        ((start - self.wr.offset) as usize, (end - start) as usize)
    }

    fn local(&self) -> Option<(&SharedMemory, usize)> {
        self.wr.local.as_ref().map(|(region, at)| (&**region.memory(), *at as usize))
    }
}

/// A peer of a region. It belongs to one thread at a time.
pub struct NpPeer {
    qp: Arc<dyn QueuePair>,
    completions: Arc<dyn CompletionQueue>,
    domain: Arc<dyn ProtectionDomain>,
    settings: NpSettings,
    welcome: Welcome,
    control: Arc<dyn MemoryRegion>,
    calls: Calls,
    versions: Versions,
    flights: Vec<Option<Flight>>,
    free: Vec<usize>,
    /// The accesses under way, and their slots: what each new one is compared with.
    under_way: Vec<(usize, Span)>,
    pending: VecDeque<NpWr>,
    /// WRITEs that nobody has checked yet, in order.
    unchecked: Vec<usize>,
    /// WRITEs whose check is under way, a batch for each.
    batches: VecDeque<Vec<usize>>,
    posts: Vec<SendWr>,
    polled: Vec<Completion>,
    done: VecDeque<NpCompletion>,
    /// When something last came.
    heard: Instant,
    is_over: bool,
    figures: PeerFigures,
}

impl NpPeer {
    /// Bytes in which it remembers entries of pages.
    pub const SEEN_BYTES: u64 = Versions::BYTES;

    /// Bytes of its message buffers, and of entries of the accesses under way.
    pub const fn control_bytes(depth: usize) -> u64 {
        (depth * ROOM + CALLS_LEN) as u64
    }

    /// Connects to a region.
    ///
    /// # Errors
    /// `NpError`, with advice.
    pub fn connect(
        device: &Arc<dyn Device>,
        endpoint: &Endpoint,
        settings: NpSettings,
    ) -> Result<Self, NpError> {
        let depth = settings.depth.clamp(1, DEPTH_MAX);
        let domain = device.alloc_pd()?;
        // A chain is of three requests at most; calls, and READs that check a batch, come on top.
        let send_depth =
            (3 * depth + depth + RPC_DEPTH + 1).min(device.capabilities().max_queue_depth as usize);
        let completions = device.create_cq((send_depth + RPC_DEPTH) as u32)?;
        let control = SharedMemory::new("cuttlefs-np-peer", depth * ROOM + CALLS_LEN).map_err(|source| {
            RdmaError::Io { action: "make buffers to connect to", endpoint: endpoint.to_string(), source }
        })?;
        let control = domain.register(Arc::new(control), Access::LOCAL)?;
        let calls = Calls::new(control.clone(), depth * ROOM);
        let receives: Vec<RecvWr> = (0..RPC_DEPTH).map(|number| calls.receive(number)).collect();
        let qp = QpConfig::new(&completions, send_depth as u32, RPC_DEPTH as u32);
        let options = ConnectOptions { qp, receives, timeout: settings.connect_timeout };
        let qp = domain.connect(endpoint, options)?.qp;
        let welcome = greet(&*qp, &*completions, &calls, settings.connect_timeout)?;
        Ok(Self {
            qp,
            completions,
            domain,
            settings,
            welcome,
            control,
            calls,
            versions: Versions::new(),
            flights: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            under_way: Vec::with_capacity(depth),
            pending: VecDeque::new(),
            unchecked: Vec::new(),
            batches: VecDeque::new(),
            posts: Vec::new(),
            polled: Vec::new(),
            done: VecDeque::new(),
            heard: Instant::now(),
            is_over: false,
            figures: PeerFigures::default(),
        })
    }

    /// Registers local memory for requests. The region's owner may read and write it while a request that names it is under way: it is the one who
    /// moves the bytes of pages that are not there.
    ///
    /// # Errors
    /// `RdmaError` if the device cannot.
    pub fn register(&self, memory: Arc<SharedMemory>) -> Result<Arc<dyn MemoryRegion>, RdmaError> {
        let access = Access { local_write: true, remote_read: true, remote_write: true, ..Access::NONE };
        self.domain.register(memory, access)
    }

    /// Length of the region in bytes.
    pub fn region_len(&self) -> u64 {
        self.welcome.region.len
    }

    /// What this peer has done.
    pub fn figures(&self) -> PeerFigures {
        self.figures
    }

    /// Requests that are under way or wait.
    pub fn outstanding(&self) -> usize {
        self.pending.len() + self.flights.len() - self.free.len()
    }

    /// Posts a request.
    ///
    /// # Errors
    /// `NpError`: it was not posted.
    pub fn post(&mut self, wr: NpWr) -> Result<(), NpError> {
        self.post_all(std::iter::once(wr)).map(drop)
    }

    /// Posts requests in order, with one doorbell where their order allows. Returns how many.
    ///
    /// # Errors
    /// `NpError` of the first that was not posted; those before it were.
    pub fn post_all(&mut self, requests: impl IntoIterator<Item = NpWr>) -> Result<usize, NpError> {
        let mut posted = 0;
        let mut refused = None;
        for wr in requests {
            if let Err(error) = self.check(&wr) {
                refused = Some(error);
                break;
            }
            self.pending.push_back(wr);
            posted += 1;
        }
        self.advance();
        refused.map_or(Ok(posted), Err)
    }

    fn check(&self, wr: &NpWr) -> Result<(), NpError> {
        if self.is_over {
            return Err(NpError::Closed);
        }
        if self.outstanding() >= self.flights.len() {
            return Err(NpError::Full(self.flights.len()));
        }
        if wr.op.changes() && self.welcome.access == PagedAccess::Read {
            return Err(NpError::ReadOnly);
        }
        let len = u64::from(wr.len);
        let local = match &wr.local {
            Some((region, at)) => region.memory().contains(*at, len),
            None => wr.op.is_atomic(),
        };
        let atomic = !wr.op.is_atomic() || wr.len == 8 && wr.offset.is_multiple_of(8);
        let fits = (1..=ACCESS_MAX).contains(&wr.len) && self.welcome.region.contains(wr.offset, len);
        if fits && local && atomic { Ok(()) } else { Err(NpError::Range { offset: wr.offset, len: wr.len }) }
    }

    /// Takes up to `max` completions, and drives what is under way.
    pub fn poll(&mut self, out: &mut Vec<NpCompletion>, max: usize) -> usize {
        let mut polled = std::mem::take(&mut self.polled);
        if self.completions.poll(&mut polled, COMPLETIONS) > 0 {
            self.heard = Instant::now();
            for completion in polled.drain(..) {
                self.on_completion(&completion);
            }
            self.advance();
        }
        self.polled = polled;
        let count = self.done.len().min(max);
        out.extend(self.done.drain(..count));
        count
    }

    /// Waits until something may be there to poll. Gives the connection up if an answer is overdue.
    pub fn wait(&mut self, timeout: Duration) {
        if !self.done.is_empty() || self.outstanding() == 0 {
            return;
        }
        // What is not signaled is not waited for, but checked.
        self.check_batch();
        self.ring();
        if self.heard.elapsed() > self.settings.patience {
            tracing::warn!(peer = %self.qp.peer(), "the owner of a memory region does not answer");
            return self.fail();
        }
        self.completions.wait(timeout);
    }

    /// Polls until no request is under way. Returns all completions, in the order in which they came.
    pub fn drain(&mut self) -> Vec<NpCompletion> {
        let mut out = Vec::new();
        loop {
            self.poll(&mut out, usize::MAX);
            if self.outstanding() == 0 && self.done.is_empty() {
                return out;
            }
            self.wait(Duration::from_millis(100));
        }
    }

    /// Ends the connection. Requests under way are completed with `Disconnected`.
    pub fn close(&mut self) {
        self.fail();
    }

    /// Begins what may begin, and rings the doorbell.
    fn advance(&mut self) {
        while let Some(next) = self.pending.front() {
            let span = Span { offset: next.offset, len: next.len, op: next.op, order: next.order };
            let under_way = self.under_way.iter().map(|(_, span)| *span);
            if !may_begin(span, self.settings.strict, under_way) {
                // It waits; so those that it waits for must be checked.
                self.check_batch();
                break;
            }
            let (Some(slot), Some(wr)) = (self.free.pop(), self.pending.pop_front()) else { break };
            self.begin(slot, wr);
        }
        if self.free.is_empty() {
            self.check_batch();
        }
        while let Some(send) = self.calls.next(WrId(CALL_SENT << 32)) {
            self.figures.calls += 1;
            self.posts.push(send);
        }
        self.ring();
    }

    fn ring(&mut self) {
        if !self.posts.is_empty() && !self.is_over && self.qp.post_send(&self.posts).is_err() {
            self.fail();
        }
        self.posts.clear();
    }

    fn begin(&mut self, slot: usize, wr: NpWr) {
        if self.under_way.is_empty() {
            // Silence is counted from here.
            self.heard = Instant::now();
        }
        let (op, signaled, len) = (wr.op, wr.signaled, wr.len as usize);
        let span = Span { offset: wr.offset, len: wr.len, op: wr.op, order: wr.order };
        self.under_way.push((slot, span));
        self.flights[slot] = Some(Flight {
            wr,
            known: Vec::new(),
            entries_in: (slot, 0),
            repeated: false,
            calls: 0,
            status: NpStatus::Success,
            old: 0,
        });
        match op {
            _ if !self.settings.optimistic => self.ask(slot, 0, len),
            NpOp::Read => self.post_read(slot),
            NpOp::Write => self.post_write(slot, signaled),
            NpOp::CompareSwap { .. } | NpOp::FetchAdd(_) => self.ask(slot, 0, 8),
        }
        if signaled {
            self.check_batch();
        }
    }

    fn post_read(&mut self, slot: usize) {
        let Some(flight) = &self.flights[slot] else { return };
        let Some((region, at)) = &flight.wr.local else { return };
        self.posts.push(SendWr {
            wr_id: WrId(READ_DONE << 32 | slot as u64),
            op: SendOp::Read(self.welcome.region.at(flight.wr.offset)),
            local: region.sge(*at, flight.wr.len),
            signaled: true,
        });
    }

    fn post_write(&mut self, slot: usize, signaled: bool) {
        let Some(flight) = &mut self.flights[slot] else { return };
        let Some((region, at)) = &flight.wr.local else { return };
        let pages = flight.pages();
        let count = pages.end() - pages.start() + 1;
        flight.entries_in = (slot, *pages.start());
        flight.known.clear();
        flight.known.extend(pages.clone().map_while(|page| self.versions.get(page)));
        let write = SendWr {
            wr_id: WrId(slot as u64),
            op: SendOp::Write(self.welcome.region.at(flight.wr.offset)),
            local: region.sge(*at, flight.wr.len),
            signaled: false,
        };
        if flight.known.len() as u64 != count {
            flight.known.clear();
            let entries = self.entries(slot * ROOM, *pages.start(), count, None);
            self.figures.entry_reads += 1;
            self.posts.push(entries);
        }
        self.posts.push(write);
        if signaled && self.unchecked.is_empty() || count > BATCHED_PAGES_MAX {
            let check = self.entries(
                slot * ROOM + ENTRIES_MAX * 8,
                *pages.start(),
                count,
                Some(WRITE_CHECKED << 32 | slot as u64),
            );
            self.figures.entry_reads += 1;
            self.posts.push(check);
        } else {
            self.unchecked.push(slot);
        }
    }

    /// A READ of entries into the control memory.
    fn entries(&self, at: usize, first: u64, count: u64, wr_id: Option<u64>) -> SendWr {
        SendWr {
            wr_id: WrId(wr_id.unwrap_or(0)),
            op: SendOp::Read(Remote::Memory {
                rkey: Rkey(self.welcome.table_rkey),
                offset: self.welcome.table_address.wrapping_add(first * 8),
            }),
            local: self.control.sge(at as u64, (count * 8) as u32),
            signaled: wr_id.is_some(),
        }
    }

    /// Checks the WRITEs that nobody has checked, with one READ for those that follow each other in the region (section 3.1.1).
    fn check_batch(&mut self) {
        let batch = std::mem::take(&mut self.unchecked);
        let mut reads: Vec<(usize, std::ops::RangeInclusive<u64>)> = Vec::new();
        for slot in &batch {
            let Some(flight) = &mut self.flights[*slot] else { continue };
            let pages = flight.pages();
            match reads.last_mut() {
                // Pages that the last READ has, or that are next to them.
                Some((of, read))
                    if (*read.start()..=read.end() + 1).contains(pages.start())
                        && pages.end() - read.start() < ENTRIES_MAX as u64 =>
                {
                    *read = *read.start()..=*read.end().max(pages.end());
                    flight.entries_in = (*of, *read.start());
                }
                _ => {
                    flight.entries_in = (*slot, *pages.start());
                    reads.push((*slot, pages));
                }
            }
        }
        let Some(last) = reads.len().checked_sub(1) else { return };
        for (index, (slot, pages)) in reads.into_iter().enumerate() {
            let at = slot * ROOM + ENTRIES_MAX * 8;
            let count = pages.end() - pages.start() + 1;
            let check =
                self.entries(at, *pages.start(), count, (index == last).then_some(BATCH_CHECKED << 32));
            self.figures.entry_reads += 1;
            self.posts.push(check);
        }
        self.batches.push_back(batch);
    }

    fn on_completion(&mut self, completion: &Completion) {
        if completion.status != WcStatus::Success {
            return self.fail();
        }
        let slot = (completion.wr_id.0 & 0xffff_ffff) as usize;
        if completion.kind == CompletionKind::Recv {
            return self.on_message(slot, completion.byte_len as usize);
        }
        match completion.wr_id.0 >> 32 {
            READ_DONE => self.check_read(slot),
            WRITE_CHECKED => self.check_write(slot),
            BATCH_CHECKED => {
                let batch = self.batches.pop_front().unwrap_or_default();
                batch.into_iter().for_each(|slot| self.check_write(slot));
            }
            _ => {}
        }
    }

    /// Looks for the signature in what a READ brought.
    fn check_read(&mut self, slot: usize) {
        let Some(flight) = &self.flights[slot] else { return };
        let Some((memory, at)) = flight.local() else { return };
        let mut missing: Option<(usize, usize)> = None;
        for page in flight.pages() {
            let (start, len) = flight.part(page);
            let in_page = ((flight.wr.offset + start as u64) % PAGE_SIZE as u64) as usize;
            if is_signature(&self.welcome, memory, at + start, in_page, len) {
                missing = Some((missing.map_or(start, |(first, _)| first), start + len));
            }
        }
        match missing {
            None => {
                self.figures.one_sided += 1;
                self.finish(slot);
            }
            Some((start, end)) => {
                self.figures.read_faults += 1;
                self.ask(slot, start, end);
            }
        }
    }

    /// Looks whether all pages of a WRITE stayed.
    fn check_write(&mut self, slot: usize) {
        let Some(flight) = &self.flights[slot] else { return };
        let word = |at: usize| PageEntry(self.control.memory().load_u64(at));
        let (mut missing, mut all_there): (Option<(usize, usize)>, bool) = (None, true);
        for (index, page) in flight.pages().enumerate() {
            let before = flight.known.get(index).copied();
            let before = before.unwrap_or_else(|| word(slot * ROOM + index * 8));
            let (entries_in, first) = flight.entries_in;
            let after = word(entries_in * ROOM + (ENTRIES_MAX + (page - first) as usize) * 8);
            self.versions.see(page, after);
            if !before.stayed(after) {
                let (start, len) = flight.part(page);
                missing = Some((missing.map_or(start, |(first, _)| first), start + len));
            }
            all_there &= after.is_resident();
        }
        let Some((start, end)) = missing else {
            self.figures.one_sided += 1;
            return self.finish(slot);
        };
        let may_repeat = all_there && !flight.repeated;
        self.figures.write_faults += 1;
        if may_repeat {
            self.figures.repeated += 1;
            if let Some(flight) = &mut self.flights[slot] {
                flight.repeated = true;
            }
            self.post_write(slot, true);
            self.check_batch();
        } else {
            self.ask(slot, start, end);
        }
    }

    /// Asks the target for a part of an access.
    fn ask(&mut self, slot: usize, start: usize, end: usize) {
        let Some(flight) = &mut self.flights[slot] else { return };
        let mut done = start;
        while done < end {
            let len = (end - done).min(PIECE_MAX as usize);
            let inline = len <= INLINE_MAX;
            let buffer = flight
                .wr
                .local
                .as_ref()
                .map(|(region, at)| (region.rkey().0, region.first_address() + at + done as u64));
            let (rkey, address) = buffer.unwrap_or_default();
            let op = match flight.wr.op {
                NpOp::CompareSwap { expect, swap } => RequestOp::CompareSwap { expect, swap },
                NpOp::FetchAdd(add) => RequestOp::FetchAdd(add),
                NpOp::Read if inline => RequestOp::ReadInline(len as u32),
                NpOp::Read => RequestOp::Read { len: len as u32, rkey, address },
                NpOp::Write if inline => {
                    let mut bytes = vec![0; len];
                    if let Some((memory, at)) = flight.local() {
                        memory.read(at + done, &mut bytes);
                    }
                    RequestOp::WriteInline(bytes)
                }
                NpOp::Write => RequestOp::Write { len: len as u32, rkey, address },
            };
            flight.calls += 1;
            let offset = flight.wr.offset + done as u64;
            self.calls.ask(Piece { access: slot, offset, done: done as u32, op });
            done += len;
        }
    }

    fn on_message(&mut self, number: usize, len: usize) {
        let bytes = self.calls.received(number, len);
        let piece = match Message::parse(&bytes) {
            Ok(Message::Reply(reply)) => self.calls.answered(&reply).map(|piece| (piece, reply)),
            _ => None,
        };
        let reposted = self.qp.post_recv(&[self.calls.receive(number)]).is_ok();
        let Some((piece, Reply { status, old, bytes, .. })) = piece.filter(|_| reposted) else {
            tracing::warn!(peer = %self.qp.peer(), "the owner of a memory region sent an answer to nothing");
            return self.fail();
        };
        let Some(flight) = &mut self.flights[piece.access] else { return };
        if status != Status::Done {
            flight.status = NpStatus::Refused(status);
        }
        if !bytes.is_empty()
            && let Some((memory, at)) = flight.local()
        {
            memory.write(at + piece.done as usize, &bytes);
        }
        flight.old = old;
        flight.calls -= 1;
        if flight.calls == 0 {
            self.finish(piece.access);
        }
    }

    fn finish(&mut self, slot: usize) {
        let Some(flight) = self.flights[slot].take() else { return };
        self.free.push(slot);
        if let Some(at) = self.under_way.iter().position(|(of, _)| *of == slot) {
            self.under_way.swap_remove(at);
        }
        if flight.wr.signaled || flight.status != NpStatus::Success {
            self.done.push_back(NpCompletion { id: flight.wr.id, status: flight.status, old: flight.old });
        }
    }

    /// The connection is over: everything that was posted fails, in the order of posts as far as it is known.
    fn fail(&mut self) {
        if std::mem::replace(&mut self.is_over, true) {
            return;
        }
        self.qp.close();
        self.unchecked.clear();
        self.batches.clear();
        self.posts.clear();
        for slot in 0..self.flights.len() {
            if let Some(flight) = &mut self.flights[slot] {
                flight.status = NpStatus::Disconnected;
                self.finish(slot);
            }
        }
        let status = NpStatus::Disconnected;
        let failed = self.pending.drain(..).map(|wr| NpCompletion { id: wr.id, status, old: 0 });
        self.done.extend(failed);
    }
}

impl Drop for NpPeer {
    fn drop(&mut self) {
        self.qp.close();
    }
}

/// Whether a part of a page is what the signature page has there.
fn is_signature(welcome: &Welcome, memory: &SharedMemory, at: usize, in_page: usize, len: usize) -> bool {
    // Nearly all data differs in its first bytes. One load of a word costs less than the start of a copy.
    if len >= 8 && at.is_multiple_of(8) {
        let word = memory.load_u64_relaxed(at).to_ne_bytes();
        if !welcome.signature.covers(in_page, &word) {
            return false;
        }
    }
    let mut first = [0; 32];
    let first = &mut first[..len.min(32)];
    memory.read(at, first);
    if !welcome.signature.covers(in_page, first) {
        return false;
    }
    let mut bytes = vec![0; len];
    memory.read(at, &mut bytes);
    welcome.signature.covers(in_page, &bytes)
}

/// Says hello, and waits for the welcome.
fn greet(
    qp: &dyn QueuePair,
    completions: &dyn CompletionQueue,
    calls: &Calls,
    timeout: Duration,
) -> Result<Welcome, NpError> {
    let gone = || NpError::NoRegion("the other end hung up before it told of its memory region".to_owned());
    qp.post_send(&[calls.send(0, &Message::Hello, WrId(CALL_SENT << 32))]).map_err(|_| gone())?;
    let deadline = Instant::now() + timeout;
    let mut polled = Vec::new();
    loop {
        completions.poll(&mut polled, COMPLETIONS);
        for completion in polled.drain(..) {
            if completion.status != WcStatus::Success {
                return Err(gone());
            }
            if completion.kind != CompletionKind::Recv {
                continue;
            }
            let number = completion.wr_id.0 as usize;
            let message = Message::parse(&calls.received(number, completion.byte_len as usize));
            qp.post_recv(&[calls.receive(number)]).map_err(|_| gone())?;
            return match message {
                Ok(Message::Welcome(welcome)) => Ok(welcome),
                Ok(_) => Err(NpError::NoRegion("the other end serves no memory region".to_owned())),
                Err(error) => Err(NpError::NoRegion(error.to_string())),
            };
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(NpError::NoRegion("the other end does not tell of a memory region".to_owned()));
        }
        completions.wait(left.min(Duration::from_millis(100)));
    }
}
