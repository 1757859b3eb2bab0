//! The approaches that are compared: what each is called, and which flags of `cuttlefsd serve` make it.

use clap::ValueEnum;
use plotters::style::RGBColor;
use serde::{Serialize, Serializer};

/// How a server serves what its memory does not hold. Names as in the TeRM paper, sections 6.1 and 6.3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, ValueEnum)]
pub(super) enum Policy {
    /// All data in memory: the upper bound.
    Pin,
    /// What cuttlefs does.
    Term,
    /// The same, but whole sample units are promoted, as in the paper.
    TermUnits,
    /// On-demand paging by the NIC, its software part only.
    Odp,
    /// The same with the times the paper measured of the NIC's hardware (Figure 4).
    OdpHardware,
    /// Every request by RPC, which copies from and to mapped memory.
    Rpc,
    /// Every request by RPC, by buffered IO.
    RpcBuffer,
    /// Every request by RPC, by direct IO.
    RpcDirect,
    /// `rpc-direct`, and memory is used for what it holds.
    Tiering,
    /// `tiering`, and hot pages are moved to memory.
    Hotspot,
    /// `hotspot`, and clients read resident pages one-sidedly.
    Magic,
}

impl Policy {
    /// Colour in plots: Okabe and Ito's, which most people can tell apart.
    pub(super) fn colour(self) -> RGBColor {
        match self {
            Self::Pin => RGBColor(90, 90, 90),
            Self::Term | Self::Magic => RGBColor(213, 94, 0),
            Self::TermUnits => RGBColor(140, 60, 0),
            Self::Odp | Self::OdpHardware => RGBColor(0, 114, 178),
            Self::Rpc => RGBColor(0, 158, 115),
            Self::RpcBuffer => RGBColor(86, 180, 233),
            Self::RpcDirect => RGBColor(240, 200, 40),
            Self::Tiering => RGBColor(230, 159, 0),
            Self::Hotspot => RGBColor(204, 121, 167),
        }
    }

    /// As printed.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Pin => "PIN",
            Self::Term => "TeRM",
            Self::TermUnits => "TeRM_units",
            Self::Odp => "ODP",
            Self::OdpHardware => "ODP+RNIC",
            Self::Rpc => "RPC",
            Self::RpcBuffer => "RPC_buffer",
            Self::RpcDirect => "RPC_direct",
            Self::Tiering => "+tiering",
            Self::Hotspot => "+hotspot",
            Self::Magic => "+magic",
        }
    }

    /// Flags of `cuttlefsd serve`. None for what a server does anyway.
    pub(super) fn server_flags(self) -> &'static [&'static str] {
        match self {
            Self::Term => &[],
            Self::TermUnits => &["--hotspots", "units"],
            Self::Pin => &["--region", "pin"],
            Self::Odp => &["--region", "odp"],
            Self::OdpHardware => &["--region", "odp", "--odp-hardware"],
            Self::Rpc => &["--region", "rpc"],
            Self::RpcBuffer => &["--region", "rpc-buffer"],
            Self::RpcDirect => &["--region", "rpc-direct"],
            Self::Tiering => &["--region", "rpc-direct", "--with", "tiering"],
            Self::Hotspot => &["--region", "rpc-direct", "--with", "tiering,hotspot"],
            Self::Magic => &["--region", "rpc-direct", "--with", "tiering,hotspot,magic"],
        }
    }

    /// Whether the kernel's page cache holds the data, so that only a memory cgroup can limit it.
    pub(super) fn page_cached(self) -> bool {
        matches!(self, Self::Odp | Self::OdpHardware | Self::Rpc | Self::RpcBuffer)
    }

    /// Whether the NIC translates: there is no NIC where the client reads the server's tables itself.
    pub(super) fn needs_nic(self) -> bool {
        matches!(self, Self::Odp | Self::OdpHardware)
    }

    /// Whether memory holds all data whatever share was asked for.
    pub(super) fn holds_everything(self) -> bool {
        self == Self::Pin
    }
}

impl Serialize for Policy {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.label())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_a_prefix_of_the_techniques() {
        let all = "tiering,hotspot,magic";
        for policy in Policy::value_variants() {
            let flags = policy.server_flags();
            if let Some(at) = flags.iter().position(|flag| *flag == "--with") {
                assert!(all.starts_with(flags[at + 1]), "{policy:?}");
                assert_eq!(flags[..at], ["--region", "rpc-direct"]);
            }
            assert!(!policy.needs_nic() || policy.page_cached());
        }
    }
}
