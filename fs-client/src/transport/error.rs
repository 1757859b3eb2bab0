//! The reasons why an operation of a mount fails: one error for all layers, for each hands on the errors of those
//! below.

use cuttlefs_common::status::Status;

/// Why an operation failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FsError {
    /// The server said so.
    #[error(transparent)]
    Server(#[from] Status),
    /// The handle is not open.
    #[error("bad handle")]
    BadHandle,
    /// The mount is ending, or the session was ended for good.
    #[error("the mount is shutting down")]
    ShutDown,
    /// Who asked does not want to wait any more, and nothing was done.
    #[error("who asked does not wait any more")]
    Interrupted,
}
