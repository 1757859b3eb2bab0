//! The reasons why an operation of a mount fails. All layers share one error type, because each passes on the errors of the layers below.

use cuttlefs_common::status::Status;

/// Why an operation failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FsError {
    /// The server answered with this status.
    #[error(transparent)]
    Server(#[from] Status),
    /// The handle is not open.
    #[error("bad handle")]
    BadHandle,
    /// The mount is ending, or the session was ended for good.
    #[error("the mount is shutting down")]
    ShutDown,
    /// A request that must not be done twice was sent to a server that is gone, or in a session that is over: it may be done.
    #[error("the server or the session was lost before the answer came")]
    MayBeDone,
    /// The caller does not want to wait any more, and nothing was done.
    #[error("who asked does not wait any more")]
    Interrupted,
}
