//! POSIX semantics of a mount, without FUSE types: handles, permitted caching, the way of a write.
//!
//! `volume` is the interface for the FUSE edge, `remote` its implementation over a session. Nothing here repeats a request: the session does.

mod atomic;
mod copy;
mod defragment;
mod direct;
mod exposed_write;
mod figures;
mod granted;
mod grants;
mod handles;
mod idle_memory;
mod remote;
mod replies;
pub mod volume;
mod write;

pub use defragment::Moved;
pub(crate) use granted::{OneSidedChange, Reach};
pub(crate) use handles::HandleState;
pub use remote::RemoteVolume;
