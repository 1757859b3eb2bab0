//! RPC messages: what travels in SENDs between a client and a server.
//!
//! `header` is the fixed part of each message, `request` and `reply` are the closed sets of those, of `parts` and within `limits`,
//! `body` how they are encoded, `inodes` where inode numbers are in them, `early` what small writes look like that are acknowledged before they are executed.
//! A message is header, then the body in postcard's format (varints, little-endian; see its specification).
//! Parsing never panics and never allocates more than the message's own length asks for.

mod body;
/// Requests that are safe before they are executed.
pub mod durable;
mod early;
mod header;
mod inodes;
mod limits;
mod parts;
mod reply;
mod request;
mod session_secret;

pub use body::BodyError;
pub use early::{
    EARLY_ANSWER_LEN, EARLY_HEADER_LEN, EARLY_RING_DEPTH, EARLY_UNANSWERED_MAX, EARLY_WRITE_MAX,
    EARLY_WRITE_PAGES_MAX, EarlyDoor, EarlyError, EarlyOffer, EarlyWrite, EarlyWritten, RINGS_PER_CLIENT,
    early_settings, ring_client, ring_of, ring_slot,
};
pub use header::{HEADER_LEN, HeaderError, PROTOCOL_VERSION, ReplyHeader, RequestHeader};
pub use limits::*;
pub use parts::*;
pub use reply::*;
pub use request::Request;
pub use session_secret::{SESSION_SECRET_LEN, SessionSecret};
