//! POSIX semantics of a mount, without FUSE types: what a handle is, what may be cached, how a read and a write go.

mod handles;
pub mod interrupt;
mod open_file;
mod read;
mod read_buffers;
mod remote;
mod seen;
mod told_names;
pub mod volume;

pub use handles::HandleTable;
pub(crate) use open_file::{OpenFile, OpenFiles};
pub(crate) use read_buffers::ReadBuffers;
pub use remote::RemoteVolume;
pub(crate) use seen::SeenChanges;
