//! RPC messages: the contents of SENDs between a client and a server.
//!
//! `header` is the fixed part of each message, `request` and `reply` are the closed sets of bodies, `parts` their common parts, `region_key` a token
//! that clients hand to each other, `limits` their bounds, `body` their encoding, and `inodes` finds the inode numbers in them. A message is a header
//! and a body in postcard's format (varints, little-endian; see its specification). Parsing never panics, and never allocates more than in proportion
//! to the message's own length.

mod body;
/// Requests that are persistent before they are executed.
pub mod durable;
mod header;
mod inodes;
mod limits;
mod parts;
mod region_key;
mod reply;
mod request;
mod session_secret;

pub use body::BodyError;
pub use header::{HEADER_LEN, HeaderError, PROTOCOL_VERSION, ReplyHeader, RequestHeader};
pub use limits::*;
pub use parts::*;
pub use region_key::{REGION_KEY_LEN, RegionKey, RegionKeyError};
pub use reply::*;
pub use request::Request;
pub use session_secret::{SESSION_SECRET_LEN, SessionSecret};
