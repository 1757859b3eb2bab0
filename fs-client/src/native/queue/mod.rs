//! Requests that are posted now and polled later, many at once.
//!
//! # How it works
//! * **Reads over `shm`** are copies out of the server's frames into the buffer. They are done when `post` returns.
//! * **Reads over `tcp` and `unix`** are READs of a connection of the queue's own ([`OneSidedLane`]), which has no slot: those of one post go out with one
//!   doorbell, land in the buffer, and cost no thread. `poll` looks for their ends, and at their pages: a page that is the magic pattern is on SSD.
//! * **Writes, appends and atomics under a write grant** go over the same connection, out of the buffer (`changes`).
//! * **Everything else** is a request to the server, in one of the session's threads: pages on SSD (one fetch for all missing pages of a read), changes
//!   without a grant, syncs, and reads over a link whose tables are READ.
//!
//! Requests of a queue are done in any order. A sync waits for the writes to its file that were posted before it, and for nothing else.
//!
//! # Sleeping
//! [`Queue::event_fd`] is an epoll descriptor over the inbox's event and the lane's. The lane is armed at the end of each poll and post, so the
//! descriptor is readable whenever something can be polled; it can be readable for nothing.
//!
//! # Bounds
//! A queue has at most its depth of requests between post and poll; [`DEPTH_MAX`] is no more than the posts that one connection has under way.

mod changes;
mod inbox;
mod reads;
mod request;

pub use request::{Completion, Done, Post};

use super::session::Opened;
use super::{Buffer, File, InodeNo, NativeError, Session};
use crate::transport::{OneSidedLane, POSTS_MAX, PostEnd, Posted, interrupt};
use changes::{ChangeUnderWay, What};
use cuttlefs_common::rdma::FileAtomic;
use cuttlefs_common::rpc::MAX_TRANSFER_BYTES;
use inbox::{Ended, Inbox};
use reads::{Range, ReadUnderWay};
use rustix::event::{PollFd, PollFlags, Timespec, epoll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most requests of a queue.
pub const DEPTH_MAX: usize = 128;
const _: () = assert!(DEPTH_MAX <= POSTS_MAX);
/// The most bytes of a request.
pub(super) const BYTES_MAX: usize = MAX_TRANSFER_BYTES as usize;
/// The runs of a READ's name: the low bits, behind the number of its request.
const RUN_BITS: u32 = 8;
const _: () = assert!(POSTS_MAX <= 1 << RUN_BITS);

/// A request whose verbs are under way.
enum UnderWay {
    Read(ReadUnderWay),
    Change(ChangeUnderWay),
}

/// A sync that waits for writes.
struct WaitingSync {
    number: u64,
    file: Arc<Opened>,
}

/// A queue; see the module. One thread at a time uses it.
pub struct Queue {
    // First, so that no verb uses a buffer that is gone.
    lane: Option<OneSidedLane>,
    under_way: BTreeMap<u64, UnderWay>,
    /// The tokens of requests that are not polled yet, but for those in `ready`.
    tokens: BTreeMap<u64, u64>,
    ready: VecDeque<Completion>,
    next: u64,
    /// Writes that are under way: the file, and the number of the request.
    writes: BTreeSet<(InodeNo, u64)>,
    syncs: Vec<WaitingSync>,
    inbox: Arc<Inbox>,
    events: OwnedFd,
    depth: usize,
    session: Session,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue")
            .field("depth", &self.depth)
            .field("under_way", &self.tokens.len())
            .finish_non_exhaustive()
    }
}

impl Queue {
    /// A queue of this depth, at most [`DEPTH_MAX`].
    ///
    /// # Errors
    /// `Depth`, `Resources`.
    pub fn new(session: &Session, depth: usize) -> Result<Self, NativeError> {
        if !(1..=DEPTH_MAX).contains(&depth) {
            return Err(NativeError::Depth { max: DEPTH_MAX });
        }
        let inner = session.volume().session();
        let lane = inner.target_translates().then(|| OneSidedLane::new(inner.link())).transpose()?;
        let inbox = Arc::new(Inbox::new()?);
        let events = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(std::io::Error::from)?;
        let watch = |fd: BorrowedFd<'_>| {
            epoll::add(&events, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
                .map_err(std::io::Error::from)
        };
        watch(inbox.event_fd())?;
        if let Some(lane) = &lane {
            watch(lane.event_fd())?;
        }
        Ok(Self {
            lane,
            under_way: BTreeMap::new(),
            tokens: BTreeMap::new(),
            ready: VecDeque::new(),
            next: 0,
            writes: BTreeSet::new(),
            syncs: Vec::new(),
            inbox,
            events,
            depth,
            session: session.clone(),
        })
    }

    /// The number of requests that were posted and not polled.
    pub fn outstanding(&self) -> usize {
        self.tokens.len() + self.ready.len()
    }

    /// Readable when completions are there. Wait for it with poll(2), epoll or a runtime's reactor, then call [`Self::poll`]; it can be readable for
    /// nothing.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    /// Posts requests, each with a token that comes back with its end. One-sided verbs among them go out together. If one of them can never be done, none is
    /// posted.
    ///
    /// # Errors
    /// `QueueFull`, `PastBuffer`, `TooLong`, `NotOpenFor`, `OutsideRegion`; of atomics `Unaligned`.
    pub fn post(&mut self, requests: &[(u64, Post<'_>)]) -> Result<(), NativeError> {
        if requests.len() > self.depth - self.outstanding() {
            return Err(NativeError::QueueFull { depth: self.depth });
        }
        requests.iter().try_for_each(|(_, request)| request.check())?;
        let mut posts = Vec::new();
        for (token, request) in requests {
            self.next += 1;
            self.tokens.insert(self.next, *token);
            self.begin(self.next, request, &mut posts);
        }
        if !posts.is_empty() && self.lane.as_mut().is_some_and(|lane| !lane.post(&posts)) {
            self.broken(false);
        }
        self.arm();
        Ok(())
    }

    /// Posts a read; see [`Post::Read`].
    ///
    /// # Errors
    /// As [`Self::post`].
    pub fn post_read(
        &mut self,
        token: u64,
        file: &File,
        offset: u64,
        (buffer, at, len): (&Buffer, usize, usize),
    ) -> Result<(), NativeError> {
        self.post(&[(token, Post::Read { file, offset, buffer, at, len })])
    }

    /// Posts a write; see [`Post::Write`].
    ///
    /// # Errors
    /// As [`Self::post`].
    pub fn post_write(
        &mut self,
        token: u64,
        file: &File,
        offset: u64,
        (buffer, at, len): (&Buffer, usize, usize),
    ) -> Result<(), NativeError> {
        self.post(&[(token, Post::Write { file, offset, buffer, at, len })])
    }

    /// Posts an append; see [`Post::Append`].
    ///
    /// # Errors
    /// As [`Self::post`].
    pub fn post_append(
        &mut self,
        token: u64,
        file: &File,
        (buffer, at, len): (&Buffer, usize, usize),
    ) -> Result<(), NativeError> {
        self.post(&[(token, Post::Append { file, buffer, at, len })])
    }

    /// Posts a compare-swap; see [`Post::CompareSwap`].
    ///
    /// # Errors
    /// As [`Self::post`].
    pub fn post_compare_swap(
        &mut self,
        token: u64,
        file: &File,
        offset: u64,
        (expect, swap): (u64, u64),
    ) -> Result<(), NativeError> {
        self.post(&[(token, Post::CompareSwap { file, offset, expect, swap })])
    }

    /// Posts a fetch-add; see [`Post::FetchAdd`].
    ///
    /// # Errors
    /// As [`Self::post`].
    pub fn post_fetch_add(
        &mut self,
        token: u64,
        file: &File,
        offset: u64,
        add: u64,
    ) -> Result<(), NativeError> {
        self.post(&[(token, Post::FetchAdd { file, offset, add })])
    }

    /// Posts a sync; see [`Post::Sync`].
    ///
    /// # Errors
    /// As [`Self::post`].
    pub fn post_sync(&mut self, token: u64, file: &File) -> Result<(), NativeError> {
        self.post(&[(token, Post::Sync { file })])
    }

    /// Appends up to `max` completions to `out`, and returns how many. Does not wait.
    pub fn poll(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        self.look();
        let count = self.ready.len().min(max);
        out.extend(self.ready.drain(..count));
        if !self.ready.is_empty() {
            self.inbox.ring();
        }
        count
    }

    /// As `poll`, but waits for a completion, no longer than `timeout`. At once 0 if nothing is under way.
    pub fn wait(&mut self, out: &mut Vec<Completion>, max: usize, timeout: Duration) -> usize {
        let until = Instant::now() + timeout;
        loop {
            let count = self.poll(out, max);
            let left = until.saturating_duration_since(Instant::now());
            if count > 0 || self.outstanding() == 0 || left.is_zero() {
                return count;
            }
            let left = Timespec::try_from(left).ok();
            // An interrupted wait is a wait that was short.
            let _ = rustix::event::poll(&mut [PollFd::new(&self.events, PollFlags::IN)], left.as_ref());
        }
    }

    fn begin(&mut self, number: u64, request: &Post<'_>, posts: &mut Vec<Posted>) {
        let range = |buffer: &Buffer, at, len| Range { buffer: buffer.clone(), at, len };
        let (file, what) = match *request {
            Post::Read { file, offset, buffer, at, len } => {
                return self.begin_read(number, file, offset, range(buffer, at, len), posts);
            }
            Post::Sync { file } => {
                self.syncs.push(WaitingSync { number, file: file.opened().clone() });
                return self.begin_syncs();
            }
            Post::Write { file, offset, buffer, at, len } => {
                (file, What::Write(offset, range(buffer, at, len)))
            }
            Post::Append { file, buffer, at, len } => (file, What::Append(range(buffer, at, len))),
            Post::CompareSwap { file, offset, expect, swap } => {
                (file, What::Word(offset, FileAtomic::CompareSwap { expect, swap }))
            }
            Post::FetchAdd { file, offset, add } => (file, What::Word(offset, FileAtomic::FetchAdd { add })),
        };
        self.begin_change(number, file, what, posts);
    }

    /// Begins the syncs that have no write to wait for.
    fn begin_syncs(&mut self) {
        for sync in std::mem::take(&mut self.syncs) {
            let ino = sync.file.state.file().ino();
            if self.writes.range((ino, 0)..(ino, sync.number)).next().is_some() {
                self.syncs.push(sync);
                continue;
            }
            let caller = self.session.caller();
            self.spawn(sync.number, move || {
                sync.file.sync(&caller)?;
                Ok(Done::Synced)
            });
        }
    }

    fn spawn(&mut self, number: u64, work: impl FnOnce() -> Result<Done, NativeError> + Send + 'static) {
        let inbox = self.inbox.clone();
        let spawned = self.session.calls().spawn(move || {
            let result = interrupt::handling(inbox.clone(), work);
            inbox.put(number, result);
        });
        if let Err(error) = spawned {
            self.inbox.put(number, Err(error));
        }
    }

    /// Notes the end of a request, for the next poll.
    fn end(&mut self, number: u64, result: Result<Done, NativeError>) {
        if let Some(token) = self.tokens.remove(&number) {
            self.ready.push_back(Completion { token, result });
        }
        // Of a request that changes nothing, nothing is there.
        self.writes.retain(|(_, write)| *write != number);
    }

    /// Takes the end of a post, or of all of them.
    fn post_ended(&mut self, end: PostEnd) {
        match end {
            PostEnd::Done { id, len, value } => {
                let number = id >> RUN_BITS;
                if let Some(UnderWay::Read(_)) = self.under_way.get(&number) {
                    return self.came(number, id & ((1 << RUN_BITS) - 1), len);
                }
                if let Some(UnderWay::Change(change)) = self.under_way.remove(&number) {
                    self.changed(number, &change, value);
                }
            }
            PostEnd::Refused { id, why } => {
                let number = id >> RUN_BITS;
                match self.under_way.remove(&number) {
                    Some(UnderWay::Change(change)) => self.change_refused(number, change, why),
                    Some(UnderWay::Read(read)) => {
                        self.read_by_request(number, read.file, read.offset, read.range);
                    }
                    None => {}
                }
            }
            PostEnd::Broken { is_undone } => self.broken(is_undone),
        }
    }

    /// The lane's connection broke: threads do what was under way by requests, and find out why.
    fn broken(&mut self, is_undone: bool) {
        for (number, under_way) in std::mem::take(&mut self.under_way) {
            match under_way {
                UnderWay::Read(read) => self.read_by_request(number, read.file, read.offset, read.range),
                UnderWay::Change(change) => self.change_broken(number, change, is_undone),
            }
        }
    }

    /// Takes everything that has ended.
    fn look(&mut self) {
        loop {
            for Ended { number, result } in self.inbox.take() {
                self.end(number, result);
            }
            let mut ends = Vec::new();
            if let Some(lane) = &mut self.lane {
                lane.poll(|end| ends.push(end));
            }
            for end in ends {
                self.post_ended(end);
            }
            if !self.syncs.is_empty() {
                self.begin_syncs();
            }
            if self.lane.as_ref().is_none_or(OneSidedLane::arm) {
                return;
            }
        }
    }

    /// Arms the lane. What is there by now rings the event.
    fn arm(&mut self) {
        if self.lane.as_ref().is_some_and(|lane| !lane.arm()) || !self.ready.is_empty() {
            self.inbox.ring();
        }
    }
}

impl Drop for Queue {
    /// Requests that were not sent yet end; the others are done, and nobody is told.
    fn drop(&mut self) {
        self.inbox.leave();
    }
}
