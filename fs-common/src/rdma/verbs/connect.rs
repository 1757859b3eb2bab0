//! Connecting and listening, and the errors of set-up calls.

use super::device::LinkKind;
use super::queue::{QpConfig, QueuePair};
use super::request::RecvWr;
use crate::memory::SharedMemory;
use crate::rdma::peer::{OVERFLOW_USER, PeerIdentity};
use crate::rdma::url::Endpoint;
use std::sync::Arc;
use std::time::Duration;

/// Errors of set-up calls.
#[derive(Debug, thiserror::Error)]
pub enum RdmaError {
    /// The operating system refused.
    #[error("{action} {endpoint}: {source}")]
    Io {
        /// The action that failed.
        action: &'static str,
        /// The endpoint.
        endpoint: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The peer speaks another protocol or version, or broke the handshake.
    #[error("handshake with {endpoint} failed: {reason}")]
    Handshake {
        /// The endpoint.
        endpoint: String,
        /// What was wrong, and what to do.
        reason: String,
    },
    /// The peer refuses the connection.
    #[error("{endpoint} refused the connection: {reason}")]
    Refused {
        /// The endpoint.
        endpoint: String,
        /// The reason, in the peer's words.
        reason: String,
    },
    /// This side does not trust the user who listens there.
    #[error(
        "user {uid} listens at {endpoint}, and not root or you; if that is to be your server, say so: --server-user {uid}, or \
         for a mount -o server-user={uid} ({overflow} is anybody whom this user namespace does not know)",
        overflow = OVERFLOW_USER
    )]
    Untrusted {
        /// The endpoint.
        endpoint: String,
        /// The user.
        uid: u32,
    },
    /// The device does not support this.
    #[error("{0}")]
    Unsupported(String),
    /// The listener or device was shut down.
    #[error("shut down")]
    Closed,
}

impl RdmaError {
    /// What a peer is told whom this side cannot take because of it: the cause. Names of this side and advice are for its own log.
    pub fn for_the_peer(&self) -> String {
        let whole = match self {
            Self::Io { source, .. } => source.to_string(),
            other => other.to_string(),
        };
        let cause = whole.split("; ").next().unwrap_or_default();
        format!("the server cannot take this connection: {cause} (its log has more)")
    }
}

/// Parameters of a connect.
pub struct ConnectOptions {
    /// The queues.
    pub qp: QpConfig,
    /// Receives to post before the peer can send.
    pub receives: Vec<RecvWr>,
    /// The longest time to try.
    pub timeout: Duration,
}

/// A new connection, at the side that connected.
pub struct Connected {
    /// The queue pair, ready to send.
    pub qp: Arc<dyn QueuePair>,
    /// Windows that the target exports and this link maps, for reading, in `WindowId::ALL` order; empty on a link that maps nothing. Bytes read there
    /// are untrusted.
    pub windows: Vec<Arc<SharedMemory>>,
}

/// How long a client may take to say hello after it has connected: to a listener, and to a service that has hellos of its own.
pub const HELLO_WAIT: Duration = Duration::from_secs(5);

/// A connection that asks to be accepted.
pub trait Incoming: Send {
    /// The peer that asks.
    fn peer(&self) -> PeerIdentity;
    /// The link.
    fn link(&self) -> LinkKind;
    /// Accepts: the queue pair is ready to send when this returns.
    ///
    /// # Errors
    /// `RdmaError` if the peer went away or broke the handshake, which affects nobody else.
    fn accept(self: Box<Self>, qp: QpConfig, receives: Vec<RecvWr>) -> Result<Arc<dyn QueuePair>, RdmaError>;
    /// Refuses, and tells the peer the reason.
    fn refuse(self: Box<Self>, reason: &str);
}

/// A listening endpoint.
pub trait Listener: Send + Sync {
    /// The endpoint, with the port that the system chose if none was given.
    fn endpoint(&self) -> Endpoint;
    /// Waits for the next peer that has passed the link's own checks.
    ///
    /// # Errors
    /// `RdmaError::Closed` after `close`.
    fn accept(&self) -> Result<Box<dyn Incoming>, RdmaError>;
    /// Stops listening; a blocked `accept` returns.
    fn close(&self);
}
