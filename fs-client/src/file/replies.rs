//! Checks of the kind of a reply.

use super::volume::FsError;
use cuttlefs_common::attr::Attr;
use cuttlefs_common::rpc::Reply;
use cuttlefs_common::status::Status;

/// A reply that does not belong to its request.
pub(super) fn unexpected<T>(_: Reply<'_>) -> Result<T, FsError> {
    tracing::error!("the server's reply does not belong to the request");
    Err(FsError::Server(Status::Malformed))
}

/// Accepts a reply that only says that the request was done.
pub(super) fn done(reply: Reply<'_>) -> Result<(), FsError> {
    match reply {
        Reply::Done => Ok(()),
        other => unexpected(other),
    }
}

/// The attributes in a reply.
pub(super) fn attr(reply: Reply<'_>) -> Result<Attr, FsError> {
    match reply {
        Reply::Attr(attr) => Ok(attr),
        other => unexpected(other),
    }
}

/// The change counters in a reply.
pub(super) fn changes(reply: Reply<'_>) -> Result<Vec<Option<u64>>, FsError> {
    match reply {
        Reply::Changes(changes) => Ok(changes),
        other => unexpected(other),
    }
}

/// The bytes in a reply.
pub(super) fn bytes(reply: Reply<'_>) -> Result<Vec<u8>, FsError> {
    match reply {
        Reply::Bytes(bytes) => Ok(bytes.to_vec()),
        other => unexpected(other),
    }
}
