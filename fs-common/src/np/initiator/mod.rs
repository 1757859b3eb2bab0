//! What the peers of a region do: optimistic one-sided accesses, and what follows when they fail.
//!
//! * `request`: what a program asks for and gets back.
//! * `versions`: entries of pages, as they were last seen.
//! * `order`: which accesses may be under way together.
//! * `calls`: the two-sided way.
//! * `peer`: the way of an access.

mod calls;
mod order;
mod peer;
mod request;
mod versions;

pub use peer::NpPeer;
pub use request::{NpCompletion, NpError, NpOp, NpOrder, NpSettings, NpStatus, NpWr, PeerFigures};
