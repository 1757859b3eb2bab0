//! What a memory node says of itself.

use serde::{Deserialize, Serialize};

/// Figures of a node. Read them at any time; what executes chains counts `chains` and `entries`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeFigures {
    /// Clients that have joined and are there.
    pub clients: u64,
    /// The most clients.
    pub clients_max: u64,
    /// Whether the node's processor executes chains, and no RNIC does.
    pub by_processor: bool,
    /// Pages of the node.
    pub pages: u64,
    /// Pages that no client has.
    pub free: u64,
    /// Pages that clients have mapped.
    pub mapped: u64,
    /// The most pages that one client may have mapped.
    pub budget: u64,
    /// Chains that were executed, by kind.
    pub chains: [u64; 4],
    /// Entries that were executed.
    pub entries: u64,
    /// Control messages that the service thread has answered.
    pub control_messages: u64,
    /// Chains that faulted.
    pub faults: u64,
    /// How often the queue was set right.
    pub set_right: u64,
    /// Clients whose lease ran out, or whose connection broke.
    pub gone: u64,
}
