//! The way of requests to a server and of answers back. Knows no files.
//!
//! Owns the connections of a mount. A [`Lane`] is one queue pair with a slot of the session and registered memory; a [`Link`] is all lanes
//! to one server and their common state: patience, whether the server is away, whether the mount ends. A calling thread borrows a lane,
//! sends its request and waits for the answer itself, so that a request costs no thread switch on this side.
//!
//! The session decides the steps on a new connection before requests go over it: it implements [`Attach`].
//!
//! # Invariants
//! * A slot has one request in flight; its sequence number moves on only when the reply is there. A request whose connection broke is sent
//!   again with the same number, also to the next server and in the next session: a server that has done it knows it by that number.
//! * A request goes out only over a connection whose session [`Attach::recover`] has accepted.
//!
//! # Failure
//! While the server is away calls wait, with one warning in the log, until it is back or the mount ends. It is away when no lane has a
//! live connection: one lane that cannot connect tries again, and the calls of others go on. If that lane is the one of heartbeats, there is a
//! warning, too (`away`).

mod attach;
mod away;
mod call;
mod caller;
mod connect;
mod data_buffer;
mod error;
mod exchange;
pub mod interrupt;
mod lane;
mod lanes;
mod link;
mod one_sided;
mod one_sided_lane;

pub(crate) use attach::{Attach, RemoteWindows, Told};
pub use away::Away;
pub(crate) use call::LaneGuard;
pub use caller::Caller;
pub(crate) use data_buffer::DataBuffer;
pub use error::FsError;
pub(crate) use lane::DATA_LEN;
pub(crate) use lane::{LANE_BYTES, Lane, MAX_RUNS, PROOFS_LEN};
pub(crate) use link::Link;
pub(crate) use one_sided::{Change, Changed, Landing, Piece, Refusal};
pub(crate) use one_sided_lane::{OneSidedLane, POSTS_MAX, PostEnd, Posted, Verb};
