//! Reads: the part of a request that goes one-sidedly, and the way of the rest.
//!
//! [`Reads::read`] goes `plan` -> `target` or `initiator` -> `fetch`. Two translators give the same answer, for each page
//! `Filled` or `Missing`. The initiator follows the server's tables itself: `initiator` with loads, over links that map them, `remote` with
//! READs. `target` lets the target's NIC engine do it. The code above them does not know which one ran.
//!
//! [`CachedRegion`] is the memory of an open file for that: its layout and its page bitmap. Each mount has one [`Reads`]; the session's control
//! thread pulls bitmaps ([`BitmapPulls`], TeRM section 4.2) and tells each server the place of the counts of one-sided reads ([`CountSharing`],
//! section 4.4).
//!
//! # Invariants
//! * A layout is used only under the filekey of its request: a layout of an earlier server is not used.
//! * A page that the read cannot tell to be the file's, untorn, is `Missing`, and is fetched.

mod bitmap;
mod bitmap_pace;
mod bitmap_pulls;
mod buffers;
mod counters;
mod counting;
mod destination;
mod fetch;
mod initiator;
mod known_entries;
mod layout;
mod look_around;
#[cfg(feature = "model-check")]
pub mod model;
#[cfg(any(test, feature = "model-check"))]
mod near_rnic;
mod plan;
mod posted;
mod reads;
mod region;
mod remote;
mod spread_count;
mod target;

pub(crate) use bitmap_pulls::BitmapPulls;
pub(crate) use counting::CountSharing;
pub(crate) use destination::{Destination, Part};
pub(crate) use known_entries::KNOWN_ENTRIES_BYTES;
pub(crate) use posted::PlannedRead;
pub(crate) use reads::Reads;
pub(crate) use region::CachedRegion;

use buffers::ReadBuffers;
use counters::ReadCounters;
use cuttlefs_common::region::PageSet;

/// The result of a one-sided read.
#[derive(Debug, PartialEq, Eq)]
struct OneSided {
    /// Bytes of the request that precede the end of the file.
    valid_len: usize,
    /// The pages of the request that could not be read; all others are in the caller's buffer.
    missing: PageSet,
}
