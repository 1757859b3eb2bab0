//! The file region as a client knows it: its cached layout, its page bitmap, and the plan of a read.

mod bitmap;
mod layout;
mod plan;

pub(crate) use bitmap::{MAX_BITMAP_BYTES, PageBitmap};
pub(crate) use layout::{CachedLayout, MAX_EXTENTS};
pub(crate) use plan::Plan;
