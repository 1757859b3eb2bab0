//! Permissions: rules of the export, the grants of sessions by these rules, and the permissions of inodes.
//!
//! # How it works
//! The link knows a connection's peer (`PeerIdentity`). The first rule for that peer (`rules`) decides its session's grant
//! (`grant`): a directory, the right to change files or not, and either one identity or the right to speak for others. Each
//! request runs under an `Identity`. Unless a trusted client's kernel has checked it, it is judged here, by `table` (the
//! rights that each request needs) and `permission` (the rights that bits and ownership give).
//!
//! # Invariants
//! * A peer's own words about a user count only where its grant says that it speaks for others.
//! * No request bypasses the table: both its matches are without wildcards, and handlers change metadata through
//!   `Server::execute` alone.
//!
//! # Failure
//! A peer without a rule is refused at Attach; the server's messages name it, and the client's say what to ask for.

mod accounts;
mod grant;
mod identity;
mod permission;
mod region_mac;
mod rules;
mod table;
mod ticket;
mod xattrs;

pub use accounts::Accounts;
pub use grant::{Exports, Grant};
pub use identity::{Account, Identity};
pub use permission::{Judge, Need};
pub use region_mac::RegionMacs;
pub use rules::{ExportRule, PeerPattern};
pub use ticket::Tickets;
