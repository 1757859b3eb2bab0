//! Who may do what: rules of the export, what sessions are granted by them, and the permissions of inodes.
//!
//! # How it works
//! A connection's peer is who the link says (`PeerIdentity`). The first rule that is for it (`rules`) grants its session
//! something (`grant`): a directory, whether it may change things, and either one identity or the right to speak for others.
//! Each request runs under an `Identity`. Unless a trusted client's kernel has checked it, it is judged here, by `table` (what
//! each request needs) and `permission` (what bits and ownership give).
//!
//! # Invariants
//! * What a peer says of itself in a message is believed only where its grant says that it speaks for others.
//! * No request gets round the table: both its matches are without wildcards, and handlers change metadata through
//!   `Server::execute` alone.
//!
//! # Failure
//! A peer for whom there is no rule is refused at Attach; the log says which, and the client what to ask for.

mod accounts;
mod grant;
mod identity;
mod permission;
mod rules;
mod table;
mod ticket;
mod xattrs;

pub use accounts::Accounts;
pub use grant::{Exports, Grant};
pub use identity::{Account, Identity};
pub use permission::{Judge, Need};
pub use rules::{ExportRule, PeerPattern};
pub use ticket::Tickets;
