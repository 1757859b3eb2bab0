//! A lane for one-sided READs only, into registered memory of the poster's.
//!
//! It has no slot of the session, and no request goes over it but the attach: READs need neither. So its owner has many READs under way at once, posts
//! them with one doorbell, and looks for their ends when it likes.
//!
//! # Failure
//! A READ that the target refuses, or a broken connection, ends all READs of the lane as *broken*: their owner asks for the bytes by requests, which
//! also find out why. The next [`ReadLane::connect`] makes a new connection.

use super::connect::BACKOFF_FIRST;
use super::lane::{Lane, MAX_RUNS};
use super::{Attach, Link};
use cuttlefs_common::ids::SlotIndex;
use cuttlefs_common::rdma::{
    CompletionKind, QpState, RdmaError, Remote, SendOp, SendWr, Sge, WcStatus, WrId,
};
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// The most READs of a lane that are under way.
pub(crate) const READS_MAX: usize = MAX_RUNS;
/// The longest pause between attempts to connect: until then their callers read by requests.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// A READ to post.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PostedRead {
    /// The poster's name for it.
    pub(crate) id: u64,
    /// The source.
    pub(crate) remote: Remote,
    /// The destination.
    pub(crate) local: Sge,
}

/// How a READ ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadEnd {
    /// So many bytes came.
    Came {
        /// The poster's name.
        id: u64,
        /// Fewer than were asked for where the file ends.
        len: usize,
    },
    /// The connection is gone, and with it every READ that was under way.
    Broken,
}

/// The lane; see the module.
pub(crate) struct ReadLane {
    lane: Lane,
    under_way: usize,
    /// By the link's clock: no attempt to connect before. `None`: the lane may connect at once.
    connect_at: Option<Duration>,
    pause: Duration,
}

impl ReadLane {
    /// A lane without a connection.
    ///
    /// # Errors
    /// The device has no more queues or memory.
    pub(crate) fn new(link: &Link) -> Result<Self, RdmaError> {
        // No numbered request goes over it, so it has no slot of its own.
        let lane = Lane::new(SlotIndex(0), link.device(), link.pd.as_ref())?;
        Ok(Self { lane, under_way: 0, connect_at: None, pause: BACKOFF_FIRST })
    }

    /// Whether READs can be posted that name what is open in the session `number`. Connects if there is no connection, and the last attempt is some
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
                tracing::debug!(%reason, "a queue's connection cannot be made; it reads by requests");
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

    /// The number of READs for which there is room.
    pub(crate) fn room(&self) -> usize {
        READS_MAX - self.under_way
    }

    /// Posts READs, no more than there is room for, with one doorbell. `false`: the connection broke, and all READs with it, these too.
    pub(crate) fn post(&mut self, reads: &[PostedRead]) -> bool {
        debug_assert!(reads.len() <= self.room());
        let wr = |read: &PostedRead| SendWr {
            wr_id: WrId(read.id),
            op: SendOp::Read(read.remote),
            local: read.local,
            signaled: true,
        };
        let posted = self.lane.post(&reads.iter().map(wr).collect::<Vec<_>>()).is_ok();
        if posted {
            self.under_way += reads.len();
        } else {
            self.break_off();
        }
        posted
    }

    /// Hands the ends of READs to `take`, without waiting. After `Broken` nothing is under way.
    pub(crate) fn poll(&mut self, mut take: impl FnMut(ReadEnd)) {
        let mut completions = std::mem::take(&mut self.lane.completions);
        loop {
            completions.clear();
            if self.lane.cq.poll(&mut completions, READS_MAX) == 0 {
                break;
            }
            for completion in &completions {
                let Some(connection) = &self.lane.connection else { break };
                if completion.qp != connection.qp.number() {
                    continue;
                }
                if completion.kind != CompletionKind::Read {
                    if self.lane.pass_over(completion).is_err() {
                        self.break_off();
                        take(ReadEnd::Broken);
                    }
                } else if completion.status == WcStatus::Success {
                    self.under_way -= 1;
                    take(ReadEnd::Came { id: completion.wr_id.0, len: completion.byte_len as usize });
                } else {
                    self.break_off();
                    take(ReadEnd::Broken);
                }
            }
        }
        self.lane.completions = completions;
        let is_broken =
            self.lane.connection.as_ref().is_some_and(|connection| connection.qp.state() == QpState::Error);
        if is_broken {
            self.break_off();
            take(ReadEnd::Broken);
        }
    }

    fn break_off(&mut self) {
        self.lane.disconnect();
        self.under_way = 0;
    }

    /// Asks for an event when the next READ ends; `false`: poll again instead, as something may be there.
    pub(crate) fn arm(&self) -> bool {
        self.lane.cq.take_event();
        self.lane.cq.arm()
    }

    /// Readable when an armed lane has something to poll.
    pub(crate) fn event_fd(&self) -> BorrowedFd<'_> {
        self.lane.cq.event_fd()
    }
}

impl Drop for ReadLane {
    /// Nobody writes to the posters' memory after this.
    fn drop(&mut self) {
        self.lane.disconnect();
    }
}
