//! A peer of a region: its accesses on their way.
//!
//! Atomics are always asked for: done twice they would be wrong. READs and WRITEs go the way of `optimistic` first.
//!
//! # Invariants
//! * Each access is in one of three places: *pending* in the order of posts, *under way* in a slot, or completed.
//! * The last work request of a chain is signaled, and completions come in order: so each wr_id that is polled is of the access that is in its slot. Where
//!   completions tell of absent pages, nothing is signaled, and an access leaves its slot when its doorbell is known to be done, or with the READ behind it.
//! * Pending, under way, and completed but not taken: no more than the depth.
//! * While an access goes alone (`alone`) nothing else is pending or under way, and no slot is in use.

use super::calls::{CALL_SENT, CALLS_LEN, Calls, Piece, greet};
use super::checks::Checks;
use super::flight::Flight;
use super::local::LocalMemory;
use super::order::{Span, UnderWay};
use super::request::{NpCompletion, NpError, NpLocal, NpOp, NpSettings, NpStatus, NpWr, PeerFigures};
use super::streak::Streak;
use super::versions::Versions;
use crate::ids::PAGE_SIZE;
use crate::memory::SharedMemory;
use crate::np::ACCESS_MAX;
use crate::np::wire::{INLINE_MAX, Message, PIECE_MAX, RPC_DEPTH, Reply, RequestOp, Status, Welcome};
use crate::rdma::{
    Access, Completion, CompletionKind, CompletionQueue, ConnectOptions, Device, Endpoint, MemoryRegion,
    PagedAccess, ProtectionDomain, QpConfig, QueuePair, RdmaError, RecvWr, SendWr, WcStatus, WrId,
};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Entries of the pages of the longest access.
pub(super) const ENTRIES_MAX: usize = ACCESS_MAX as usize / PAGE_SIZE + 1;
/// Bytes of an access's room for entries: from before, and from after.
pub(super) const ROOM: usize = 2 * ENTRIES_MAX * 8;
/// The most accesses under way.
const DEPTH_MAX: usize = 1024;
/// Completions taken at once.
pub(super) const COMPLETIONS: usize = 64;
/// A program that always finds completions has the completion queue polled once in this many polls: the owner's answers wait no longer than that.
const POLLS_PER_LOOK: u32 = 16;

/// What a polled completion is about; the high half of its wr_id.
pub(super) const READ_DONE: u64 = 1;
pub(super) const BATCH_CHECKED: u64 = 2;

/// A peer of a region. It belongs to one thread at a time.
pub struct NpPeer {
    pub(super) qp: Arc<dyn QueuePair>,
    completions: Arc<dyn CompletionQueue>,
    domain: Arc<dyn ProtectionDomain>,
    pub(super) settings: NpSettings,
    pub(super) welcome: Welcome,
    pub(super) control: Arc<dyn MemoryRegion>,
    calls: Calls,
    pub(super) versions: Versions,
    pub(super) streak: Streak,
    /// Local memory that was registered.
    locals: Vec<LocalMemory>,
    pub(super) flights: Vec<Flight>,
    pub(super) free: Vec<usize>,
    /// A READ is under way alone, whose completion is awaited.
    pub(super) is_alone: bool,
    /// The accesses under way, which each new one is compared with.
    pub(super) under_way: UnderWay,
    pub(super) pending: VecDeque<NpWr>,
    /// Accesses that are to be checked.
    pub(super) checks: Checks,
    pub(super) posts: Vec<SendWr>,
    polled: Vec<Completion>,
    /// A list, which a caller that has none of its own takes whole.
    pub(super) done: Vec<NpCompletion>,
    /// Polls since the last that looked at the completion queue.
    polls: u32,
    /// Completions tell of absent pages.
    pub(super) tells: bool,
    /// Since when nothing has come, as far as a wait has noticed; `None`: something came, or began, after the last one.
    pub(super) silent_since: Option<Instant>,
    is_over: bool,
    pub(super) figures: PeerFigures,
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
        let tells = qp.looks_pages_up();
        let settings = NpSettings { optimistic: settings.optimistic && welcome.one_sided, ..settings };
        Ok(Self {
            qp,
            completions,
            domain,
            settings,
            welcome,
            control,
            calls,
            versions: Versions::new(),
            streak: Streak::default(),
            locals: Vec::new(),
            flights: (0..depth).map(|_| Flight::FREE).collect(),
            free: (0..depth).rev().collect(),
            is_alone: false,
            under_way: UnderWay::new(depth),
            pending: VecDeque::new(),
            checks: Checks::default(),
            posts: Vec::new(),
            polled: Vec::new(),
            done: Vec::new(),
            polls: 0,
            tells,
            silent_since: None,
            is_over: false,
            figures: PeerFigures::default(),
        })
    }

    /// Registers local memory for requests, until this peer is dropped. The region's owner may read and write it while a request that names it is under
    /// way: it is the one who moves the bytes of pages that are not there.
    ///
    /// # Errors
    /// `RdmaError` if the device cannot.
    pub fn register(&mut self, memory: Arc<SharedMemory>) -> Result<NpLocal, RdmaError> {
        let access = Access { local_write: true, remote_read: true, remote_write: true, ..Access::NONE };
        self.locals.push(LocalMemory::new(self.domain.register(memory, access)?));
        Ok(NpLocal(self.locals.len() as u32 - 1))
    }

    /// The local memory of a request that was checked, and the first byte in it.
    pub(super) fn local(&self, wr: &NpWr) -> Option<(&LocalMemory, u64)> {
        wr.local.map(|(local, at)| (&self.locals[local.0 as usize], at))
    }

    /// Length of the region in bytes.
    pub fn region_len(&self) -> u64 {
        self.welcome.region.len
    }

    /// Whether there is a one-sided way to the region, and it is tried. Elsewhere the owner is asked for each access.
    pub fn is_optimistic(&self) -> bool {
        self.settings.optimistic
    }

    /// What this peer has done.
    pub fn figures(&self) -> PeerFigures {
        self.figures
    }

    /// Requests that are under way or wait, or whose completions were not taken.
    pub fn outstanding(&self) -> usize {
        let entered = self.flights.len() - self.free.len();
        self.pending.len() + entered + usize::from(self.is_alone) + self.done.len()
    }

    /// Posts a request.
    ///
    /// # Errors
    /// `NpError`: it was not posted.
    pub fn post(&mut self, wr: NpWr) -> Result<(), NpError> {
        if !self.goes_alone(&wr) {
            return self.post_all(std::iter::once(wr)).map(drop);
        }
        self.check(&wr)?;
        self.post_alone(&wr);
        Ok(())
    }

    /// Posts requests in order, with one doorbell where their order allows. Returns how many.
    ///
    /// # Errors
    /// `NpError` of the first that was not posted; those before it were.
    #[inline(never)]
    pub fn post_all(&mut self, requests: impl IntoIterator<Item = NpWr>) -> Result<usize, NpError> {
        self.enter_alone();
        let mut posted = 0;
        let mut refused = None;
        for wr in requests {
            if let Err(error) = self.check(&wr) {
                refused = Some(error);
                break;
            }
            posted += 1;
            let begins = self.pending.is_empty() && self.may_begin(&wr);
            match self.free.pop_if(|_| begins) {
                Some(slot) => self.begin(slot, &wr),
                None => self.pending.push_back(wr),
            }
        }
        self.advance();
        refused.map_or(Ok(posted), Err)
    }

    #[inline]
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
        let local = match wr.local {
            Some((local, at)) => {
                (self.locals.get(local.0 as usize)).is_some_and(|known| known.memory().contains(at, len))
            }
            None => wr.op.is_atomic(),
        };
        let atomic = !wr.op.is_atomic() || wr.len == 8 && wr.offset.is_multiple_of(8);
        let fits = (1..=ACCESS_MAX).contains(&wr.len) && self.welcome.region.contains(wr.offset, len);
        if fits && local && atomic { Ok(()) } else { Err(NpError::Range { offset: wr.offset, len: wr.len }) }
    }

    /// Takes up to `max` completions, and drives what is under way.
    pub fn poll(&mut self, out: &mut Vec<NpCompletion>, max: usize) -> usize {
        self.polls += 1;
        if self.done.is_empty() || self.polls >= POLLS_PER_LOOK {
            self.look();
        }
        if out.is_empty() && self.done.len() <= max {
            // Nearly always. The lists change places, which costs less than a copy.
            std::mem::swap(out, &mut self.done);
            return out.len();
        }
        let count = self.done.len().min(max);
        out.extend(self.done.drain(..count));
        count
    }

    /// Takes what has come, and drives what is under way.
    fn look(&mut self) {
        self.polls = 0;
        if self.completions.poll(&mut self.polled, COMPLETIONS) > 0 {
            self.silent_since = None;
            let mut polled = std::mem::take(&mut self.polled);
            for completion in &polled {
                self.on_completion(completion);
            }
            polled.clear();
            self.polled = polled;
            if !self.posts.is_empty() || !self.pending.is_empty() || !self.calls.is_idle() {
                self.advance();
            }
        }
    }

    /// Waits until something may be there to poll. Gives the connection up if an answer is overdue.
    pub fn wait(&mut self, timeout: Duration) {
        if !self.done.is_empty() || self.outstanding() == 0 {
            return;
        }
        // What is not signaled is not waited for, but checked.
        self.check_batch();
        self.ring();
        match self.silent_since {
            Some(since) if since.elapsed() > self.settings.patience => {
                tracing::warn!(peer = %self.qp.peer(), "the owner of a memory region does not answer");
                return self.fail();
            }
            Some(_) => {}
            None => self.silent_since = Some(Instant::now()),
        }
        self.completions.wait(timeout);
    }

    /// Polls until no request is under way. Returns all completions, in the order in which they came.
    pub fn drain(&mut self) -> Vec<NpCompletion> {
        let mut out = Vec::new();
        loop {
            self.poll(&mut out, usize::MAX);
            if self.outstanding() == 0 {
                return out;
            }
            self.wait(Duration::from_millis(100));
        }
    }

    /// Ends the connection. Requests under way are completed with `Disconnected`.
    pub fn close(&mut self) {
        self.fail();
    }

    fn may_begin(&self, wr: &NpWr) -> bool {
        self.under_way.may_begin(Span::of(wr), self.settings.strict)
    }

    /// Begins what may begin, and rings the doorbell; again while that ends accesses for which others wait.
    #[inline(never)]
    fn advance(&mut self) {
        loop {
            let waits = !self.pending.is_empty() && self.begin_pending();
            // Those that are waited for must be checked.
            if self.checks.is_awaited() || !self.tells && (waits || self.free.is_empty()) {
                self.check_batch();
            }
            while !self.calls.is_idle()
                && let Some(send) = self.calls.next(WrId(CALL_SENT << 32))
            {
                self.figures.calls += 1;
                self.posts.push(send);
            }
            if !self.ring() || self.pending.is_empty() {
                return;
            }
        }
    }

    /// Begins what may begin of what is pending. Returns whether the next waits for others.
    #[inline(never)]
    fn begin_pending(&mut self) -> bool {
        while let Some(next) = self.pending.front() {
            if !self.may_begin(next) {
                return true;
            }
            let (Some(slot), Some(wr)) = (self.free.pop(), self.pending.pop_front()) else { break };
            self.begin(slot, &wr);
        }
        false
    }

    /// Rings the doorbell. Returns whether that has ended accesses.
    pub(super) fn ring(&mut self) -> bool {
        let mut ended = false;
        while !self.posts.is_empty() && !self.is_over {
            let posted = self.qp.post_send_known(&self.posts);
            self.posts.clear();
            match posted {
                Err(_) => self.fail(),
                Ok(_) if !self.tells => {}
                // Behind others that are not known to be done, these are not done either.
                Ok(true) if !self.checks.are_under_way() => ended |= self.end_told(),
                Ok(_) => self.check_batch(),
            }
        }
        self.posts.clear();
        ended
    }

    fn begin(&mut self, slot: usize, wr: &NpWr) {
        if self.under_way.is_empty() {
            // Silence is counted from here.
            self.silent_since = None;
        }
        let (op, signaled, len) = (wr.op, wr.signaled, wr.len as usize);
        self.enter(slot, wr);
        // The local bytes of a WRITE that is not signaled are the program's again with the next completion, so it is tried.
        let asks = signaled && !op.is_atomic() && self.streak.asks();
        match op {
            _ if !self.settings.optimistic => self.ask(slot, 0, len),
            _ if asks => {
                self.figures.asked_at_once += 1;
                self.ask(slot, 0, len);
            }
            NpOp::Read | NpOp::Write if self.tells => self.post_told(slot),
            NpOp::Read => self.post_read(slot),
            NpOp::Write => self.post_write(slot),
            NpOp::CompareSwap { .. } | NpOp::FetchAdd(_) => self.ask(slot, 0, 8),
        }
        if signaled && !self.tells {
            self.await_run();
        }
    }

    #[inline]
    fn on_completion(&mut self, completion: &Completion) {
        if self.is_over {
            // Its access has failed already, and its slot is free.
            return;
        }
        if completion.status != WcStatus::Success {
            return self.fail();
        }
        let slot = (completion.wr_id.0 & 0xffff_ffff) as usize;
        if completion.kind == CompletionKind::Recv {
            return self.on_message(slot, completion.byte_len as usize);
        }
        if completion.absent {
            self.flights[slot].absent = true;
        }
        match completion.wr_id.0 >> 32 {
            READ_DONE => self.check_read(slot),
            BATCH_CHECKED => self.batch_came(),
            _ => {}
        }
    }

    /// Asks the target for a part of an access.
    pub(super) fn ask(&mut self, slot: usize, start: usize, end: usize) {
        let wr = self.flights[slot].wr;
        let local = wr.local.map(|(local, at)| (&self.locals[local.0 as usize], at));
        let mut done = start;
        while done < end {
            let len = (end - done).min(PIECE_MAX as usize);
            let inline = len <= INLINE_MAX;
            let buffer = local.map(|(memory, at)| memory.remote(at + done as u64));
            let (rkey, address) = buffer.unwrap_or_default();
            let op = match wr.op {
                NpOp::CompareSwap { expect, swap } => RequestOp::CompareSwap { expect, swap },
                NpOp::FetchAdd(add) => RequestOp::FetchAdd(add),
                NpOp::Read if inline => RequestOp::ReadInline(len as u32),
                NpOp::Read => RequestOp::Read { len: len as u32, rkey, address },
                NpOp::Write if inline => {
                    let mut bytes = vec![0; len];
                    if let Some((local, at)) = local {
                        local.memory().read(at as usize + done, &mut bytes);
                    }
                    RequestOp::WriteInline(bytes)
                }
                NpOp::Write => RequestOp::Write { len: len as u32, rkey, address },
            };
            self.flights[slot].calls += 1;
            let offset = wr.offset + done as u64;
            self.calls.ask(Piece { access: slot, offset, done: done as u32, op });
            done += len;
        }
    }

    #[inline(never)]
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
        // Answers come once for each piece that was asked for, and its access waits for them.
        let wr = self.flights[piece.access].wr;
        if !bytes.is_empty()
            && let Some((local, at)) = self.local(&wr)
        {
            local.memory().write(at as usize + piece.done as usize, &bytes);
        }
        let flight = &mut self.flights[piece.access];
        if status != Status::Done {
            flight.status = NpStatus::Refused(status);
        }
        flight.old = old;
        flight.calls -= 1;
        if flight.calls == 0 {
            self.finish(piece.access);
        }
    }

    #[inline]
    pub(super) fn finish(&mut self, slot: usize) {
        self.free.push(slot);
        self.under_way.remove(slot);
        let flight = &mut self.flights[slot];
        flight.is_under_way = false;
        if flight.wr.signaled || flight.status != NpStatus::Success {
            self.done.push(NpCompletion { id: flight.wr.id, status: flight.status, old: flight.old });
        }
    }

    /// The connection is over: everything that was posted fails, in the order of posts as far as it is known.
    pub(super) fn fail(&mut self) {
        if std::mem::replace(&mut self.is_over, true) {
            return;
        }
        self.qp.close();
        self.checks = Checks::default();
        self.posts.clear();
        self.enter_alone();
        for slot in 0..self.flights.len() {
            if self.flights[slot].is_under_way {
                self.flights[slot].status = NpStatus::Disconnected;
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
