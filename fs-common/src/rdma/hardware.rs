//! What is told of RDMA hardware in a status.

use serde::Serialize;
use std::collections::BTreeMap;

/// A device's port as it is used by this process, and what the device counts. Counters are of the port: other processes' traffic is in them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HardwareFigures {
    /// As the kernel calls it, and `rdma link` does.
    pub device: String,
    /// From 1.
    pub port: u8,
    /// For example `4: ACTIVE`.
    pub state: String,
    /// `Ethernet` (RoCE) or `InfiniBand`.
    pub link_layer: String,
    /// For example `100 Gb/sec (4X EDR)`.
    pub rate: String,
    /// The address of the port that connections have.
    pub gid: String,
    /// Its place in the port's table.
    pub gid_index: Option<u32>,
    /// For example `RoCE v2`.
    pub gid_type: Option<String>,
    /// The network interface that has it.
    pub interface: Option<String>,
    /// Of the connection that was made last.
    pub path_mtu_bytes: Option<u32>,
    /// Queue pairs of this process.
    pub queue_pairs: u64,
    /// How many the device has for all.
    pub queue_pairs_bound: u64,
    /// Memory that this process has registered.
    pub pinned_bytes: u64,
    /// How much that may be (`ulimit -l`); `None`: any.
    pub pinned_bound: Option<u64>,
    /// Connections that are over, and that the kernel has not let go of yet.
    pub ending: u64,
    /// With so many, no connection is made.
    pub ending_bound: u64,
    /// Those of the device's counters that tell of lost, repeated and refused packets.
    pub counters: BTreeMap<String, u64>,
}
