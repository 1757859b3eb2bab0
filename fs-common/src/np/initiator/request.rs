//! Requests of a program, and their completions.

use crate::np::wire::Status;
use crate::rdma::RdmaError;
use std::time::Duration;

/// What to do with a range of the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NpOp {
    /// Copy it to local memory.
    Read,
    /// Copy local memory to it.
    Write,
    /// 64-bit compare and swap; the completion has what was there.
    CompareSwap {
        /// What must be there.
        expect: u64,
        /// What to store then.
        swap: u64,
    },
    /// 64-bit fetch and add; the completion has what was there.
    FetchAdd(u64),
}

impl NpOp {
    /// Whether it changes the region.
    pub const fn changes(self) -> bool {
        !matches!(self, Self::Read)
    }

    /// Whether it is an atomic.
    pub const fn is_atomic(self) -> bool {
        matches!(self, Self::CompareSwap { .. } | Self::FetchAdd(_))
    }
}

/// The ordering bits of a request (NP-RDMA section 3.3). With neither, a request waits only for earlier ones of overlapping ranges, of which at least
/// one changes the region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NpOrder {
    /// It begins when all earlier requests are done.
    pub before: bool,
    /// Later requests begin when it is done.
    pub after: bool,
}

impl NpOrder {
    /// Neither.
    pub const RELAXED: Self = Self { before: false, after: false };
    /// Both: all that was posted earlier, then this, then all that is posted later.
    pub const STRICT: Self = Self { before: true, after: true };
}

/// Local memory of a peer: [`super::NpPeer::register`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NpLocal(pub(super) u32);

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NpWr {
    /// The program's name for it; it comes back in the completion.
    pub id: u64,
    /// What to do.
    pub op: NpOp,
    /// First byte in the region.
    pub offset: u64,
    /// Local memory, and the first byte in it. Of no use to atomics.
    pub local: Option<(NpLocal, u64)>,
    /// Number of bytes, 1 to [`crate::np::ACCESS_MAX`]; 8 for atomics.
    pub len: u32,
    /// Its order among others.
    pub order: NpOrder,
    /// Whether success makes a completion, too. Failure always does. A WRITE that is not signaled is checked when the next request is that is; until
    /// then its local bytes must stay as they are.
    pub signaled: bool,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NpStatus {
    /// Done.
    Success,
    /// The target did not do it, and says why. `Done` is never here.
    Refused(Status),
    /// The connection broke, or the target did not answer in time. A change may have been made.
    Disconnected,
}

/// A completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NpCompletion {
    /// The request's name.
    pub id: u64,
    /// How it ended.
    pub status: NpStatus,
    /// What an atomic found.
    pub old: u64,
}

/// Why a request was not taken, or a peer could not be made.
#[derive(Debug, thiserror::Error)]
pub enum NpError {
    /// There is no connection.
    #[error(transparent)]
    Connection(#[from] RdmaError),
    /// The other end serves no region.
    #[error("{0}")]
    NoRegion(String),
    /// As many requests are under way as may be.
    #[error("{0} requests are under way, which is all that may be; poll completions first")]
    Full(usize),
    /// The range does not lie in the region or in the local memory, or is too long or empty, or an atomic is not aligned.
    #[error("bytes {offset} to {} do not lie in the region or in the local memory, or an atomic is not aligned", offset.saturating_add(u64::from(*len)))]
    Range {
        /// First byte in the region.
        offset: u64,
        /// Number of bytes.
        len: u32,
    },
    /// The peer has no right to change the region.
    #[error("the region may only be read; its owner gives the right to write it")]
    ReadOnly,
    /// The connection is over.
    #[error("the connection to the region's owner is over; make a new one")]
    Closed,
}

/// Sizes and habits of a peer.
#[derive(Clone, Debug)]
pub struct NpSettings {
    /// Requests under way or waiting, at most 1,024.
    pub depth: usize,
    /// READs and WRITEs are tried one-sidedly. Without, the owner is asked for all of them, as it is where nothing can be put in the place of a page that is
    /// gone (section 6.1): an RNIC that cannot look pages up.
    pub optimistic: bool,
    /// All requests are executed one after the other, as if each had the order-before bit.
    pub strict: bool,
    /// How long an answer may take. Then the connection is given up.
    pub patience: Duration,
    /// How long a connect may take.
    pub connect_timeout: Duration,
}

impl Default for NpSettings {
    fn default() -> Self {
        Self {
            depth: 64,
            optimistic: true,
            strict: false,
            patience: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(10),
        }
    }
}

/// What a peer has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerFigures {
    /// Accesses that the optimistic way did.
    pub one_sided: u64,
    /// READs that found the signature.
    pub read_faults: u64,
    /// WRITEs that may have gone to the black hole.
    pub write_faults: u64,
    /// WRITEs that a second optimistic WRITE did.
    pub repeated: u64,
    /// Accesses for which the target was asked without a try, in a streak of faults.
    pub asked_at_once: u64,
    /// Requests to the target's processor.
    pub calls: u64,
    /// READs of entries.
    pub entry_reads: u64,
}
