//! POSIX semantics of a mount, without FUSE types: what a handle is, what may be cached, how a write goes.
//!
//! `volume` is what the FUSE edge knows; `remote` is that over a session. Nothing here is retried: the session does that below.

mod copy;
mod exposed_write;
mod figures;
mod handles;
mod idle_memory;
mod remote;
mod replies;
pub mod volume;
mod write;

pub use remote::RemoteVolume;
