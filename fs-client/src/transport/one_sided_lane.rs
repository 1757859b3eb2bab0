//! A lane for one-sided verbs only, from and into registered memory of the poster's.
//!
//! It has no slot of the session, and no request goes over it but the attach: one-sided verbs need neither. So its owner has many of them under way at
//! once, posts them with one doorbell, and looks for their ends when it likes. Values that come back (of atomics; the places of APPENDs) land in the
//! lane's memory, eight bytes for each post.
//!
//! # Failure
//! The target executes posts in their order, and nothing behind one that it refuses. So a refusal ends one post as *refused*, and all behind it as
//! *broken, not done*. A broken connection ends all posts as *broken*: each may have been done. The owner then asks by requests, which also find out
//! why. The next [`OneSidedLane::is_ready`] makes a new connection.

use super::connect::BACKOFF_FIRST;
use super::lane::{Lane, MAX_RUNS, PROOFS_LEN, PROOFS_OFFSET};
use super::one_sided::is_refusal;
use super::{Attach, Link};
use cuttlefs_common::ids::{FileKey, SlotIndex};
use cuttlefs_common::rdma::{
    Completion, CompletionKind, QpState, RdmaError, Remote, SendOp, SendWr, Sge, WcStatus, WrId,
};
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// The most posts of a lane that are under way.
pub(crate) const POSTS_MAX: usize = MAX_RUNS;
/// Bytes of a value that comes back.
const VALUE_LEN: usize = 8;
const _: () = assert!(POSTS_MAX * VALUE_LEN <= PROOFS_LEN);
/// The longest pause between attempts to connect: until then their callers read by requests.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// A verb to post.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Verb {
    /// READ into the poster's memory.
    Read { remote: Remote, local: Sge },
    /// WRITE from the poster's memory.
    Write { remote: Remote, local: Sge },
    /// APPEND from the poster's memory.
    Append { filekey: FileKey, local: Sge },
    /// A compare-swap of an aligned word.
    CompareSwap { remote: Remote, expect: u64, swap: u64 },
    /// A fetch-add of an aligned word.
    FetchAdd { remote: Remote, add: u64 },
}

impl Verb {
    /// Whether a value comes back.
    fn has_value(&self) -> bool {
        !matches!(self, Self::Read { .. } | Self::Write { .. })
    }

    /// The work request; a value lands in `value`.
    fn wr(&self, id: u64, value: Sge) -> SendWr {
        let (op, local) = match *self {
            Self::Read { remote, local } => (SendOp::Read(remote), local),
            Self::Write { remote, local } => (SendOp::Write(remote), local),
            Self::Append { filekey, local } => (SendOp::Append { filekey, placed: value }, local),
            Self::CompareSwap { remote, expect, swap } => {
                (SendOp::CompareSwap { remote, expect, swap }, value)
            }
            Self::FetchAdd { remote, add } => (SendOp::FetchAdd { remote, add }, value),
        };
        SendWr { wr_id: WrId(id), op, local: local.into(), signaled: true }
    }
}

/// A verb, by the poster's name for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Posted {
    /// The name.
    pub(crate) id: u64,
    /// The verb.
    pub(crate) verb: Verb,
}

/// How posts ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PostEnd {
    /// It is done.
    Done {
        /// The poster's name.
        id: u64,
        /// Of a READ: the bytes that came, fewer than were asked for where the file ends.
        len: usize,
        /// The old word of an atomic; where an APPEND's bytes are.
        value: u64,
    },
    /// The target has refused it, and changed nothing. `Broken` comes next.
    Refused {
        /// The poster's name.
        id: u64,
    },
    /// The connection is gone, and with it every post that was under way.
    Broken {
        /// None of them was done: they were behind one that was refused.
        is_undone: bool,
    },
}

/// The lane; see the module.
pub(crate) struct OneSidedLane {
    lane: Lane,
    under_way: usize,
    /// Where the values of posts land, by their names: numbers of places.
    values: BTreeMap<u64, usize>,
    free_values: Vec<usize>,
    /// By the link's clock: no attempt to connect before. `None`: the lane may connect at once.
    connect_at: Option<Duration>,
    pause: Duration,
}

fn all_values() -> Vec<usize> {
    (0..POSTS_MAX).collect()
}

impl OneSidedLane {
    /// A lane without a connection.
    ///
    /// # Errors
    /// The device has no more queues or memory.
    pub(crate) fn new(link: &Link) -> Result<Self, RdmaError> {
        // No numbered request goes over it, so it has no slot of its own.
        let lane = Lane::new(SlotIndex(0), link.device(), link.pd.as_ref())?;
        let (values, free_values) = (BTreeMap::new(), all_values());
        Ok(Self { lane, under_way: 0, values, free_values, connect_at: None, pause: BACKOFF_FIRST })
    }

    /// Whether verbs can be posted that name what is open in the session `number`. Connects if there is no connection, and the last attempt is some
    /// time ago; a server that is away is not asked.
    pub(crate) fn is_ready<S: Attach>(&mut self, session: &S, number: u64) -> bool {
        if self.lane.connection.as_ref().is_some_and(|connection| connection.session == number)
            && self.lane.is_connected()
        {
            return true;
        }
        // Those under way belong to the connection that stands, and their ends must be taken first.
        let link = session.link();
        let now = link.now();
        if self.under_way > 0 || link.is_away() || self.connect_at.is_some_and(|at| now < at) {
            return false;
        }
        match self.connect(session) {
            Ok(()) => {
                (self.connect_at, self.pause) = (None, BACKOFF_FIRST);
                self.lane.connection.as_ref().is_some_and(|connection| connection.session == number)
            }
            Err(reason) => {
                tracing::debug!(%reason, "a queue's connection cannot be made; it works by requests");
                self.lane.disconnect();
                self.connect_at = Some(link.now() + self.pause);
                self.pause = (self.pause * 2).min(AGAIN_AFTER);
                false
            }
        }
    }

    fn connect<S: Attach>(&mut self, session: &S) -> Result<(), String> {
        self.lane.disconnect();
        self.lane.connect_once(session).map_err(|error| error.to_string())?;
        let number = self.lane.connection.as_ref().map_or(0, |connection| connection.session);
        match session.recover(&mut self.lane, number) {
            Ok(true) => Ok(()),
            Ok(false) => Err("the session is another one by now".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// The number of posts for which there is room.
    pub(crate) fn room(&self) -> usize {
        POSTS_MAX - self.under_way
    }

    /// Posts verbs, no more than there is room for, with one doorbell. `false`: the connection broke, and all posts with it, these too.
    pub(crate) fn post(&mut self, posts: &[Posted]) -> bool {
        debug_assert!(posts.len() <= self.room());
        let wrs: Vec<SendWr> = posts
            .iter()
            .map(|Posted { id, verb }| {
                let mut value = Sge::EMPTY;
                if verb.has_value()
                    && let Some(place) = self.free_values.pop()
                {
                    self.values.insert(*id, place);
                    value = self.lane.region.sge(value_offset(place) as u64, VALUE_LEN as u32);
                }
                verb.wr(*id, value)
            })
            .collect();
        let posted = self.lane.post(&wrs).is_ok();
        if posted {
            self.under_way += posts.len();
        } else {
            self.break_off();
        }
        posted
    }

    /// Hands the ends of posts to `take`, without waiting. After `Broken` nothing is under way.
    pub(crate) fn poll(&mut self, mut take: impl FnMut(PostEnd)) {
        let mut completions = std::mem::take(&mut self.lane.completions);
        loop {
            completions.clear();
            if self.lane.cq.poll(&mut completions, POSTS_MAX) == 0 {
                break;
            }
            for completion in &completions {
                let Some(connection) = &self.lane.connection else { break };
                if completion.qp == connection.qp.number() {
                    self.ended(completion, &mut take);
                }
            }
        }
        self.lane.completions = completions;
        let is_broken =
            self.lane.connection.as_ref().is_some_and(|connection| connection.qp.state() == QpState::Error);
        // What is under way has completions yet to come, of which the first tells why.
        if is_broken && self.under_way == 0 {
            self.break_off();
        }
    }

    fn ended(&mut self, completion: &Completion, take: &mut impl FnMut(PostEnd)) {
        let (id, is_message) = (completion.wr_id.0, is_message(completion.kind));
        if is_message {
            if self.lane.pass_over(completion).is_err() {
                self.break_off();
                take(PostEnd::Broken { is_undone: false });
            }
            return;
        }
        match completion.status {
            WcStatus::Success => {
                self.under_way -= 1;
                let value = self.take_value(id);
                take(PostEnd::Done { id, len: completion.byte_len as usize, value });
            }
            status => {
                let is_refused = is_refusal(status);
                self.break_off();
                if is_refused {
                    take(PostEnd::Refused { id });
                }
                take(PostEnd::Broken { is_undone: is_refused });
            }
        }
    }

    /// The value of a post that is done.
    fn take_value(&mut self, id: u64) -> u64 {
        let Some(place) = self.values.remove(&id) else { return 0 };
        self.free_values.push(place);
        let mut bytes = [0; VALUE_LEN];
        self.lane.region.memory().read(value_offset(place), &mut bytes);
        u64::from_le_bytes(bytes)
    }

    fn break_off(&mut self) {
        self.lane.disconnect();
        self.under_way = 0;
        self.values.clear();
        self.free_values = all_values();
    }

    /// Asks for an event when the next post ends; `false`: poll again instead, as something may be there.
    pub(crate) fn arm(&self) -> bool {
        self.lane.cq.take_event();
        self.lane.cq.arm()
    }

    /// Readable when an armed lane has something to poll.
    pub(crate) fn event_fd(&self) -> BorrowedFd<'_> {
        self.lane.cq.event_fd()
    }
}

impl Drop for OneSidedLane {
    /// Nobody writes to the posters' memory after this.
    fn drop(&mut self) {
        self.lane.disconnect();
    }
}

fn value_offset(place: usize) -> usize {
    PROOFS_OFFSET + place * VALUE_LEN
}

/// Whether a completion is of a message, and not of a one-sided verb.
fn is_message(kind: CompletionKind) -> bool {
    matches!(kind, CompletionKind::Send | CompletionKind::Recv | CompletionKind::RecvWithImm)
}
