//! What the peers of a region do: optimistic one-sided accesses, and what follows when they fail.
//!
//! * `request`: what a program asks for and gets back.
//! * `versions`: entries of pages, as they were last seen.
//! * `order`: which accesses may be under way together.
//! * `optimistic`: the one-sided way; `checks`: what a READ of entries checks.
//! * `calls`: the two-sided way; `streak`: when it is gone without a try of the one-sided one.
//! * `alone`: an access that needs no place among others.
//! * `flight`: an access under way; `peer`: all of them; `local`: their local memory.

mod alone;
mod calls;
mod checks;
mod flight;
mod local;
mod optimistic;
mod order;
mod peer;
mod request;
mod streak;
mod versions;

pub use peer::NpPeer;
pub use request::{NpCompletion, NpError, NpLocal, NpOp, NpOrder, NpSettings, NpStatus, NpWr, PeerFigures};
