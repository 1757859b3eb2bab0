//! A port of an RNIC, from `/sys/class/infiniband`: its GIDs and counters.
//!
//! A GID of RoCE is an IP address of the interface below it (IBTA annex A17, 17.4.1), so rdma_cm selects a GID by its address. A GID of InfiniBand is
//! not: there the address of an IPoIB interface selects the port.
//!
//! Counters come from the driver, which may ask the RNIC for them and take its time. So a thread that holds up no request looks ([`LastLook`]).
//!
//! # Failure
//! Files that do not exist are left out: drivers differ in what they show.

use super::sys::Limits;
use crate::rdma::hardware::HardwareFigures;
use crate::rdma::url::Via;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::path::{Path, PathBuf};

const CLASS: &str = "/sys/class/infiniband";
const INTERFACES: &str = "/sys/class/net";
/// More entries than any port has.
const GIDS_MAX: u32 = 1024;
/// Counters of errors, by the names that drivers give them (rdma_rxe, mlx5, mlx4, bnxt_re, irdma, hns; IBTA volume 1, 16.1.4).
const COUNTERS: [&str; 27] = [
    "out_of_seq_request",
    "out_of_sequence",
    "rcvd_seq_err",
    "packet_seq_err",
    "duplicate_request",
    "rcvd_rnr_err",
    "send_rnr_err",
    "out_of_buffer",
    "rnr_nak_retry_err",
    "retry_rnr_exceeded_err",
    "completer_retry_err",
    "retry_exceeded_err",
    "local_ack_timeout_err",
    "implied_nak_seq_err",
    "roce_adp_retrans",
    "roce_adp_retrans_to",
    "to_retransmits",
    "seq_err_naks_rcvd",
    "rnr_naks_rcvd",
    "max_retry_exceeded",
    "np_cnp_sent",
    "rp_cnp_handled",
    "send_err",
    "link_downed",
    "port_rcv_errors",
    "port_xmit_discards",
    "symbol_error",
];

/// An address of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Gid {
    index: u32,
    address: Ipv6Addr,
    kind: Option<String>,
    interface: Option<String>,
}

impl Gid {
    /// The address for rdma_cm; `None`: a link-local address whose interface is not known.
    fn socket_address(&self, port: u16) -> Option<SocketAddr> {
        if let Some(address) = self.address.to_ipv4_mapped() {
            return Some((address, port).into());
        }
        let scope = match &self.interface {
            Some(interface) if self.is_link_local() => interface_index(interface)?,
            None if self.is_link_local() => return None,
            _ => 0,
        };
        Some(SocketAddrV6::new(self.address, port, 0, scope).into())
    }

    fn is_link_local(&self) -> bool {
        self.address.is_unicast_link_local()
    }
}

fn interface_index(name: &str) -> Option<u32> {
    read(&Path::new(INTERFACES).join(name).join("ifindex"))?.parse().ok()
}

/// The text of a file, without the end of its line.
fn read(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim_end().to_owned())
}

/// A port of an RNIC; see the module.
#[derive(Clone, Debug)]
pub(super) struct Port {
    class: PathBuf,
    device: String,
    number: u8,
}

impl Port {
    pub(super) fn new(device: &str, number: u8) -> Self {
        Self::at(Path::new(CLASS), device, number)
    }

    fn at(class: &Path, device: &str, number: u8) -> Self {
        Self { class: class.to_owned(), device: device.to_owned(), number }
    }

    fn folder(&self) -> PathBuf {
        self.class.join(&self.device).join("ports").join(self.number.to_string())
    }

    /// The GIDs that are set, in the order of their indices.
    fn gids(&self) -> Vec<Gid> {
        let folder = self.folder();
        let places = fs::read_dir(folder.join("gids")).into_iter().flatten().flatten();
        let mut places: Vec<u32> =
            places.filter_map(|place| place.file_name().to_str()?.parse().ok()).collect();
        places.retain(|place| *place < GIDS_MAX);
        places.sort_unstable();
        let gid = |index: u32| {
            let address: Ipv6Addr = read(&folder.join("gids").join(index.to_string()))?.parse().ok()?;
            // Most are not set; rdma_rxe has 1,024.
            if address.is_unspecified() {
                return None;
            }
            let attribute = |name: &str| read(&folder.join("gid_attrs").join(name).join(index.to_string()));
            let (kind, interface) = (attribute("types"), attribute("ndevs"));
            Some(Gid { index, address, kind, interface })
        };
        places.into_iter().filter_map(gid).collect()
    }

    /// The GID to use: the one with this index, or else the first that fits the address `to`, RoCE v2 before v1.
    ///
    /// # Errors
    /// A text that says what does not exist.
    fn choose(&self, gid: Option<u32>, to: IpAddr) -> Result<Gid, String> {
        let Self { device, number, .. } = self;
        let known = names(&self.class);
        if known.is_empty() {
            return Err(format!(
                "there is no RDMA device {device} here, nor any other (`rdma link` lists them)"
            ));
        }
        if !known.contains(device) {
            return Err(format!("there is no RDMA device {device} here; there are {}", known.join(", ")));
        }
        if !self.folder().exists() {
            let ports = names(&self.class.join(device).join("ports"));
            return Err(format!("{device} has no port {number}; it has {}", ports.join(", ")));
        }
        if read(&self.folder().join("link_layer")).as_deref() == Some("InfiniBand") {
            return Err(format!(
                "the port {number} of {device} is InfiniBand's: name it by the address of its IPoIB interface instead"
            ));
        }
        let gids = self.gids();
        let Some(gid) = gid else {
            let goes_with = |gid: &&Gid| match to {
                IpAddr::V4(_) => gid.address.to_ipv4_mapped().is_some(),
                IpAddr::V6(to) => {
                    gid.address.to_ipv4_mapped().is_none()
                        && gid.is_link_local() == to.is_unicast_link_local()
                }
            };
            let is_old = |gid: &&Gid| gid.kind.as_deref().is_some_and(|kind| kind.contains("v1"));
            let found = gids.iter().filter(goes_with).min_by_key(|gid| (is_old(gid), gid.index));
            return found
                .cloned()
                .ok_or_else(|| format!("no GID of port {number} of {device} goes with {to}"));
        };
        let found = gids.into_iter().find(|known| known.index == gid);
        let found = found.ok_or_else(|| format!("port {number} of {device} has no GID {gid} that is set"))?;
        let is_v4 = found.address.to_ipv4_mapped().is_some();
        if !to.is_unspecified() && is_v4 != to.is_ipv4() {
            return Err(format!(
                "GID {gid} of {device} is {}, and cannot be used to reach {to}; leave gid= out, or name one of an IPv{} address",
                found.address,
                if to.is_ipv4() { 4 } else { 6 }
            ));
        }
        Ok(found)
    }

    /// Refuses an index that is not that of the GID with this address.
    ///
    /// # Errors
    /// A text that says which index is.
    pub(super) fn must_be(&self, index: u32, address: Ipv6Addr) -> Result<(), String> {
        let gids = self.gids();
        if gids.iter().any(|gid| gid.index == index && gid.address == address) {
            return Ok(());
        }
        let fitting: Vec<String> =
            gids.iter().filter(|gid| gid.address == address).map(|gid| gid.index.to_string()).collect();
        Err(format!(
            "GID {index} of {} is not that of the address: those are {}; name one of them, or leave gid= out",
            self.device,
            fitting.join(", ")
        ))
    }

    /// The figures of the port, for the GID with this address; the caller adds those of the process.
    pub(super) fn figures(&self, gid: Ipv6Addr, limits: &Limits) -> HardwareFigures {
        let folder = self.folder();
        let text = |name: &str| read(&folder.join(name)).unwrap_or_default();
        let found = self.gids().into_iter().filter(|known| known.address == gid);
        let is_old = |gid: &Gid| gid.kind.as_deref().is_some_and(|kind| kind.contains("v1"));
        let found = found.min_by_key(|gid| (is_old(gid), gid.index));
        let figures = HardwareFigures {
            device: self.device.clone(),
            port: self.number,
            link_layer: text("link_layer"),
            gid: gid.to_string(),
            gid_index: found.as_ref().map(|gid| gid.index),
            gid_type: found.as_ref().and_then(|gid| gid.kind.clone()),
            interface: found.and_then(|gid| gid.interface),
            queue_pairs_bound: limits.queue_pairs.into(),
            ..HardwareFigures::default()
        };
        self.look_again(figures)
    }

    /// The same figures, with those that change as they are now.
    fn look_again(&self, before: HardwareFigures) -> HardwareFigures {
        let folder = self.folder();
        let text = |name: &str| read(&folder.join(name)).unwrap_or_default();
        let mut counters = BTreeMap::new();
        for kind in ["counters", "hw_counters"] {
            for name in COUNTERS {
                let value = read(&folder.join(kind).join(name)).and_then(|text| text.parse().ok());
                counters.extend(value.map(|value: u64| (name.to_owned(), value)));
            }
        }
        HardwareFigures {
            state: text("state"),
            rate: text("rate"),
            pinned_bound: pinned_bound(),
            counters,
            ..before
        }
    }
}

/// Whether an interface is turned off or has no carrier (RFC 2863's operational state). One that does not tell is not down.
fn is_down(interfaces: &Path, name: &str) -> bool {
    matches!(read(&interfaces.join(name).join("operstate")).as_deref(), Some("down" | "lowerlayerdown"))
}

/// The names in a folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// A port's figures as they were at the last look.
pub(super) struct LastLook {
    port: Port,
    figures: Mutex<HardwareFigures>,
}

impl LastLook {
    /// Looks for the first time, at the GID with this address, too.
    pub(super) fn new(port: Port, gid: Ipv6Addr, limits: &Limits) -> Self {
        let figures = Mutex::new(port.figures(gid, limits));
        Self { port, figures }
    }

    /// Looks at what changes. May take as long as the driver does.
    pub(super) fn again(&self) {
        let before = self.figures();
        let now = self.port.look_again(before);
        *self.figures.lock() = now;
    }

    /// Whether the port can send. The interface below RoCE says so without the driver; of InfiniBand it is what the last look found.
    pub(super) fn is_up(&self) -> bool {
        let figures = self.figures.lock();
        match &figures.interface {
            Some(interface) => !is_down(Path::new(INTERFACES), interface),
            None => figures.state.is_empty() || figures.state.contains("ACTIVE"),
        }
    }

    /// What was found.
    pub(super) fn figures(&self) -> HardwareFigures {
        self.figures.lock().clone()
    }
}

/// The address of this machine that an endpoint's parameters name, for connections to or from `to`.
///
/// # Errors
/// A text that says what does not exist.
pub(super) fn address_of(via: &Via, to: SocketAddr, port: u16) -> Result<SocketAddr, String> {
    let gid = Port::new(&via.device, via.port).choose(via.gid, to.ip())?;
    gid.socket_address(port).ok_or_else(|| {
        format!("GID {} of {} is link-local, and its interface is not told", gid.index, via.device)
    })
}

/// Bytes of memory that this process may pin; `None`: any number. A process that may lock memory (CAP_IPC_LOCK) has no bound.
pub(super) fn pinned_bound() -> Option<u64> {
    const CAP_IPC_LOCK: u32 = 14;
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0);
    if effective >> CAP_IPC_LOCK & 1 == 1 {
        return None;
    }
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        queue_depth: 1,
        completions: 1,
        queue_pairs: 7,
        shared_receives: 1,
        has_windows: false,
        sges: 1,
        reads: super::super::sys::ReadDepth { at_us: 1, of_us: 1 },
    };

    fn put(folder: &Path, files: &[(&str, &str)]) {
        for (name, text) in files {
            let path = folder.join(name);
            fs::create_dir_all(path.parent().expect("a folder")).expect("folder");
            fs::write(path, format!("{text}\n")).expect("file");
        }
    }

    /// A device with one Ethernet port, in the form of the kernel's files.
    fn class() -> tempfile::TempDir {
        let class = tempfile::tempdir().expect("folder");
        let port = class.path().join("dev0/ports/1");
        let gids = [
            "fe80:0000:0000:0000:5054:00ff:fe12:3456",
            "0000:0000:0000:0000:0000:ffff:0a09:0001",
            "0000:0000:0000:0000:0000:ffff:0a09:0001",
            "0000:0000:0000:0000:0000:0000:0000:0000",
            "2001:0db8:0000:0000:0000:0000:0000:0005",
        ];
        for (index, gid) in gids.iter().enumerate() {
            put(&port, &[(&format!("gids/{index}"), gid), (&format!("gid_attrs/ndevs/{index}"), "eth0")]);
        }
        put(
            &port,
            &[
                ("state", "4: ACTIVE"),
                ("link_layer", "Ethernet"),
                ("gid_attrs/types/1", "IB/RoCE v1"),
                ("gid_attrs/types/2", "RoCE v2"),
                ("hw_counters/rcvd_rnr_err", "3"),
                ("hw_counters/sent_pkts", "1000"),
                ("counters/symbol_error", "N/A (no PMA)"),
            ],
        );
        put(&class.path().join("dev1/ports/1"), &[("link_layer", "InfiniBand")]);
        class
    }

    #[test]
    fn an_address_finds_the_gid_that_goes_with_it() {
        let class = class();
        let port = Port::at(class.path(), "dev0", 1);
        let chosen = |gid, to: &str| port.choose(gid, to.parse().expect("an address"));
        assert_eq!(chosen(None, "10.9.0.7").expect("v4").index, 2, "RoCE v2 before v1");
        assert_eq!(chosen(None, "fe80::1").expect("link-local").index, 0);
        assert_eq!(chosen(None, "2001:db8::1").expect("v6").index, 4);
        assert_eq!(chosen(Some(1), "10.9.0.7").expect("named").index, 1);
        let refused = chosen(Some(0), "10.9.0.7").expect_err("a GID of IPv6");
        assert!(refused.contains("cannot be used to reach 10.9.0.7"), "{refused}");
        assert_eq!(chosen(Some(4), "0.0.0.0").expect("to listen at any address").index, 4);
        let v4 = "::ffff:10.9.0.1".parse().expect("an address");
        assert_eq!((port.must_be(1, v4), port.must_be(2, v4)), (Ok(()), Ok(())));
        let refused = port.must_be(4, v4).expect_err("another address's");
        assert!(refused.contains("those are 1, 2"), "{refused}");
        assert!(chosen(Some(3), "10.9.0.7").expect_err("not set").contains("no GID 3"));
        let address = chosen(Some(2), "10.9.0.7").expect("v4").socket_address(5);
        assert_eq!(address, Some("10.9.0.1:5".parse().expect("an address")));
        let failed = |device, number| {
            Port::at(class.path(), device, number).choose(None, [10, 9, 0, 7].into()).expect_err("nothing")
        };
        assert_eq!(failed("dev0", 2), "dev0 has no port 2; it has 1");
        assert_eq!(failed("dev2", 1), "there is no RDMA device dev2 here; there are dev0, dev1");
        assert!(failed("dev1", 1).contains("IPoIB"));
    }

    #[test]
    fn figures_are_those_that_are_there() {
        let class = class();
        let gid = "::ffff:10.9.0.1".parse().expect("an address");
        let figures = Port::at(class.path(), "dev0", 1).figures(gid, &LIMITS);
        assert_eq!((figures.state.as_str(), figures.link_layer.as_str()), ("4: ACTIVE", "Ethernet"));
        assert_eq!((figures.gid_index, figures.gid_type.as_deref()), (Some(2), Some("RoCE v2")));
        assert_eq!(figures.interface.as_deref(), Some("eth0"));
        assert_eq!(figures.counters, BTreeMap::from([("rcvd_rnr_err".to_owned(), 3)]));
        assert_eq!((figures.queue_pairs_bound, figures.rate.as_str()), (7, ""));
    }

    #[test]
    fn a_port_is_down_with_its_interface() {
        let interfaces = tempfile::tempdir().expect("folder");
        for (name, state, down) in
            [("a", "up", false), ("b", "unknown", false), ("c", "down", true), ("d", "lowerlayerdown", true)]
        {
            put(&interfaces.path().join(name), &[("operstate", state)]);
            assert_eq!(is_down(interfaces.path(), name), down, "{state}");
        }
        assert!(!is_down(interfaces.path(), "none"), "that says nothing");
    }

    #[test]
    fn figures_are_those_of_the_last_look() {
        let class = class();
        let gid = "::ffff:10.9.0.1".parse().expect("an address");
        let look = LastLook::new(Port::at(class.path(), "dev0", 1), gid, &LIMITS);
        put(
            &class.path().join("dev0/ports/1"),
            &[
                ("state", "1: DOWN"),
                ("hw_counters/rcvd_rnr_err", "4"),
                ("hw_counters/duplicate_request", "5"),
            ],
        );
        let (state, counters) = ("4: ACTIVE".to_owned(), BTreeMap::from([("rcvd_rnr_err".to_owned(), 3)]));
        let before = look.figures();
        assert_eq!((&before.state, &before.counters), (&state, &counters));
        look.again();
        let counters = BTreeMap::from([("rcvd_rnr_err".to_owned(), 4), ("duplicate_request".to_owned(), 5)]);
        assert_eq!(look.figures(), HardwareFigures { state: "1: DOWN".to_owned(), counters, ..before });
    }
}
