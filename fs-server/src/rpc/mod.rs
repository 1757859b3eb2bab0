//! RPC: decode, admit, call, reply. One task for each request, on its connection's worker.

use cuttlefs_common::rpc::MAX_TRANSFER_BYTES;

/// Checks of requests before they are run.
pub(crate) mod admit;
/// Registered memory for file bytes under way.
pub(crate) mod bounce;
/// One connection.
pub(crate) mod connection;
/// All connections.
pub(crate) mod connections;
/// The path from a message to its reply.
pub(crate) mod dispatch;
/// Completions that find no connection.
mod early;
/// What each request does.
pub(crate) mod handlers;
/// The queues of a worker at one RNIC.
pub(crate) mod queues;
/// Replies before they are sent.
pub(crate) mod reply;
/// Pulling the counts of clients' accesses.
pub(crate) mod sampling;
/// Receives that a peer's connections share.
pub(crate) mod shared_receives;
/// One-sided transfers that the server posts.
pub(crate) mod transfer;
/// The choice of the next request.
pub(crate) mod turns;
/// One worker's state.
pub(crate) mod worker;

/// The memory that a worker thread registers with each RNIC; receives of peers come on top.
pub(crate) const WORKER_REGISTERED_BYTES: u64 =
    (bounce::BUFFERS_PER_WORKER * MAX_TRANSFER_BYTES as usize) as u64;
