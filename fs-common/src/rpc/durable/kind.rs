//! The four kinds of durable RPC, and the parameters of a connection.

use crate::persist::LogDeviceKind;
use crate::rdma::{Capabilities, FlushReach, LinkKind};
use crate::redo::encoded_len;
use crate::redo::ring::{Geometry, RingError};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The way in which a request becomes persistent. The order is a wire format (hellos).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// SEND and FLUSH.
    SFlush,
    /// WRITE and FLUSH.
    WFlush,
    /// SEND; the receiver flushes.
    SRFlush,
    /// WRITE; the receiver flushes.
    WRFlush,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::SFlush, Self::WFlush, Self::SRFlush, Self::WRFlush];

    /// The paper's name.
    pub const fn label(self) -> &'static str {
        match self {
            Self::SFlush => "SFlush",
            Self::WFlush => "WFlush",
            Self::SRFlush => "S-RFlush",
            Self::WRFlush => "W-RFlush",
        }
    }

    /// Whether requests are sent as messages.
    pub const fn sends(self) -> bool {
        matches!(self, Self::SFlush | Self::SRFlush)
    }

    /// Whether the receiver makes requests persistent.
    pub const fn receiver_flushes(self) -> bool {
        matches!(self, Self::SRFlush | Self::WRFlush)
    }

    /// The best kind for a link and a log device. Where a FLUSH needs the target's CPU anyway (a synced file over shared memory), the receiver may as
    /// well flush without being asked.
    pub fn choose(link: LinkKind, device: LogDeviceKind) -> Self {
        match (link, device) {
            (LinkKind::Shm, LogDeviceKind::File) => Self::WRFlush,
            _ => Self::WFlush,
        }
    }

    /// The same way into the ring, but the receiver flushes.
    pub const fn by_receiver(self) -> Self {
        match self {
            Self::SFlush | Self::SRFlush => Self::SRFlush,
            Self::WFlush | Self::WRFlush => Self::WRFlush,
        }
    }

    /// The kind that is possible over a device on which FLUSHes of the ring reach as far as `reach`.
    pub fn over(self, capabilities: &Capabilities, reach: FlushReach) -> Self {
        let covers = self != Self::SFlush || capabilities.flush_after_send;
        if covers && reach == FlushReach::Persistence { self } else { self.by_receiver() }
    }

    pub(super) const fn number(self) -> u32 {
        self as u32 + 1
    }

    pub(super) fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.number() == number)
    }
}

/// Sizes and patience of a durable connection. The sender chooses them, within the receiver's bounds.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The kind.
    pub kind: Kind,
    /// Largest request body.
    pub request_max: usize,
    /// Largest answer body.
    pub answer_max: usize,
    /// Requests of the largest size for which the ring has room, at least.
    pub depth: usize,
    /// Answers that may be outstanding.
    pub answers: usize,
    /// Requests that share one doorbell and one flush.
    pub batch: usize,
    /// How long a request waits for room, or for a receiver that is behind.
    pub patience: Duration,
}

impl Settings {
    /// Usual sizes for requests and answers of this length.
    pub fn new(kind: Kind, request_max: usize, answer_max: usize) -> Self {
        Self {
            kind,
            request_max,
            answer_max,
            depth: 64,
            answers: 64,
            batch: 1,
            patience: Duration::from_secs(5),
        }
    }

    /// The ring for these settings.
    ///
    /// # Errors
    /// [`RingError::Geometry`] if the ring would be too small or too large.
    pub fn geometry(&self) -> Result<Geometry, RingError> {
        let record = encoded_len(super::ENVELOPE_LEN + self.request_max) as u64;
        // Whole cache lines, so that two records of a ring never share one.
        let slot = record.next_multiple_of(64);
        let slots = (self.depth.max(4) as u64).max(4096u64.div_ceil(slot));
        if self.kind.sends() { Geometry::slots(slot, slots) } else { Geometry::stream(slot * slots) }
    }
}
