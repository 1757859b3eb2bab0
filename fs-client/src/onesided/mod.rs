//! One-sided reads: which pages came back (`Filled`) and which did not (`Missing`).
//!
//! Two translators give the same answer (DESIGN section 2): `initiator` follows the tables itself, over links that
//! map them; `target` lets the target's NIC engine do it. The code above them does not know which one ran.

mod initiator;
mod target;

pub(crate) use initiator::{NoAnswer, read as read_by_initiator};
pub(crate) use target::read as read_by_target;

use cuttlefs_common::region::PageSet;

/// What a one-sided read brought.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct OneSided {
    /// Bytes of the request that precede the end of the file.
    pub(crate) valid_len: usize,
    /// Pages of the request that were not there; all others are in the caller's buffer.
    pub(crate) missing: PageSet,
}
