//! The figures of RDMA hardware in a status.

use serde::Serialize;
use std::collections::BTreeMap;

/// A device's port as this process uses it, and the device's counters. Counters are those of the port, so they include other processes' traffic.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HardwareFigures {
    /// The kernel's name of the device, as in `rdma link`.
    pub device: String,
    /// The number of the port, from 1.
    pub port: u8,
    /// For example `4: ACTIVE`.
    pub state: String,
    /// `Ethernet` (RoCE) or `InfiniBand`.
    pub link_layer: String,
    /// For example `100 Gb/sec (4X EDR)`.
    pub rate: String,
    /// The address of the port that connections use.
    pub gid: String,
    /// Its index in the port's table.
    pub gid_index: Option<u32>,
    /// For example `RoCE v2`.
    pub gid_type: Option<String>,
    /// The network interface that has this address.
    pub interface: Option<String>,
    /// The path MTU of the last connection that was made.
    pub path_mtu_bytes: Option<u32>,
    /// The largest path MTU that the port can have.
    pub max_mtu_bytes: Option<u32>,
    /// Queue pairs of this process.
    pub queue_pairs: u64,
    /// Queue pairs that the device has for all processes.
    pub queue_pairs_bound: u64,
    /// Memory that this process has registered.
    pub pinned_bytes: u64,
    /// The most that may be registered (`ulimit -l`); `None`: no bound.
    pub pinned_bound: Option<u64>,
    /// Connections that are over, but not released by the kernel yet.
    pub ending: u64,
    /// With this number, no further connection is made.
    pub ending_bound: u64,
    /// The device's counters of lost, repeated and refused packets.
    pub counters: BTreeMap<String, u64>,
}
