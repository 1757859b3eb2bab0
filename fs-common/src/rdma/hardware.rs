//! The figures of RDMA hardware in a status.

use serde::Serialize;
use std::collections::BTreeMap;

/// The smallest path MTU that RoCE has on an interface with Ethernet's usual MTU of 1500.
const USUAL_MTU_BYTES: u64 = 1024;
/// What the headers of RoCE v2 and of IPv6 take at most (rdma_rxe counts as many), and those of a ping over IPv4.
const HEADERS_BYTES: u64 = 80;
const PING_HEADERS_BYTES: u64 = 28;

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

impl HardwareFigures {
    /// What to look at where short messages pass, and long ones perhaps do not.
    pub fn hop_advice(&self) -> Option<String> {
        hop_advice(&self.link_layer, self.path_mtu_bytes?.into())
    }
}

/// As [`HardwareFigures::hop_advice`]. Nobody asks the hops of Ethernet whether they carry a path MTU; InfiniBand's subnet manager does.
pub fn hop_advice(link_layer: &str, path_mtu_bytes: u64) -> Option<String> {
    (link_layer == "Ethernet" && path_mtu_bytes > USUAL_MTU_BYTES).then(|| {
        let ping = path_mtu_bytes + HEADERS_BYTES - PING_HEADERS_BYTES;
        format!(
            "the path MTU is {path_mtu_bytes} bytes, and each hop must carry that and {HEADERS_BYTES} bytes of headers: `ping -M do -s {ping} ADDRESS` \
             says whether it does; if not, raise the MTU of the switch, or lower that of this machine's interface (`ip link set IFACE mtu 1500`)"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hops_are_named_where_packets_are_larger_than_usual() {
        let advice = hop_advice("Ethernet", 4096).expect("a large one");
        assert!(advice.contains("4096 bytes") && advice.contains("ping -M do -s 4148"), "{advice}");
        assert_eq!((hop_advice("Ethernet", 1024), hop_advice("InfiniBand", 4096)), (None, None));
        assert_eq!(HardwareFigures::default().hop_advice(), None);
    }
}
