//! RPC messages: the contents of SENDs between a client and a server.
//!
//! `header` is the fixed part of each message, `request` and `reply` are the closed sets of those, made of `parts` and within
//! `limits`, `body` is their encoding, `inodes` the inode numbers in them. A message is header, then the body in postcard's format
//! (varints, little-endian; see its specification). Parsing never panics and never allocates more than the message's own length
//! asks for.

mod body;
/// Requests that are safe before they are executed.
pub mod durable;
mod header;
mod inodes;
mod limits;
mod parts;
mod reply;
mod request;
mod session_secret;

pub use body::BodyError;
pub use header::{HEADER_LEN, HeaderError, PROTOCOL_VERSION, ReplyHeader, RequestHeader};
pub use limits::*;
pub use parts::*;
pub use reply::*;
pub use request::Request;
pub use session_secret::{SESSION_SECRET_LEN, SessionSecret};
