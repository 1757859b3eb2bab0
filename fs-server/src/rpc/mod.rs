//! RPC: decode, admit, call, reply. One task a request, on the worker its connection belongs to.

/// What requests must satisfy before anything is done.
pub mod admit;
/// Registered memory for file bytes under way.
pub mod bounce;
/// One connection.
pub mod connection;
/// All connections.
pub mod connections;
/// From message to reply.
pub mod dispatch;
/// What each request does.
pub mod handlers;
/// Replies before they are sent.
pub mod reply;
/// Pulling what clients counted.
pub mod sampling;
/// One-sided transfers the server posts.
pub mod transfer;
/// Whose request runs next.
pub mod turns;
/// One worker's state.
pub mod worker;
