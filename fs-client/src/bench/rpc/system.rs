//! What is compared.
//!
//! | system | request | reply | of the paper's Figure 2 |
//! | --- | --- | --- | --- |
//! | DaRPC | SEND | SEND | (a) |
//! | FaSST | SEND, at most 4 KiB (the MTU of its datagrams; this RNIC has reliable connections only) | SEND | (d) |
//! | FaRM | WRITE | WRITE, found by polling memory | (b) |
//! | L5 | WRITE of the data, WRITE of the valid word | WRITE, found by polling memory | (e) |
//! | RFP | WRITE | READ by the sender until it is there | (f) |
//! | ScaleRPC | every hundredth: WRITE of an address, READ by the receiver; else as FaRM | as FaRM | (g) |
//! | Octopus | WRITE with immediate | WRITE with immediate | (h) |
//!
//! Where the paper's receivers poll memory with a core of their own, the WRITE carries an immediate here, ours as theirs:
//! a few cores serve everybody, and a poller would take them from who works.

use clap::ValueEnum;
use cuttlefs_common::rpc::durable::Kind;

/// A way to do RPC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
#[allow(missing_docs)]
pub(super) enum System {
    Sflush,
    Wflush,
    SRflush,
    WRflush,
    Darpc,
    Fasst,
    Farm,
    L5,
    Rfp,
    Scalerpc,
    Octopus,
}

impl System {
    pub(super) const ALL: [Self; 11] = [
        Self::Sflush,
        Self::Wflush,
        Self::SRflush,
        Self::WRflush,
        Self::Darpc,
        Self::Fasst,
        Self::Farm,
        Self::L5,
        Self::Rfp,
        Self::Scalerpc,
        Self::Octopus,
    ];

    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Sflush => "SFlush",
            Self::Wflush => "WFlush",
            Self::SRflush => "S-RFlush",
            Self::WRflush => "W-RFlush",
            Self::Darpc => "DaRPC",
            Self::Fasst => "FaSST",
            Self::Farm => "FaRM",
            Self::L5 => "L5",
            Self::Rfp => "RFP",
            Self::Scalerpc => "ScaleRPC",
            Self::Octopus => "Octopus",
        }
    }

    /// Which durable kind it is, if one.
    pub(super) fn kind(self) -> Option<Kind> {
        match self {
            Self::Sflush => Some(Kind::SFlush),
            Self::Wflush => Some(Kind::WFlush),
            Self::SRflush => Some(Kind::SRFlush),
            Self::WRflush => Some(Kind::WRFlush),
            _ => None,
        }
    }

    /// Whether requests are messages: the paper compares those among themselves.
    pub(super) fn sends(self) -> bool {
        match self.kind() {
            Some(kind) => kind.sends(),
            None => matches!(self, Self::Darpc | Self::Fasst),
        }
    }

    /// Largest object.
    pub(super) fn object_max(self) -> usize {
        if self == Self::Fasst { 4096 } else { 64 << 10 }
    }

    /// Colour in plots: durable ones warm, others cold (Okabe and Ito, and shades).
    pub(super) fn colour(self) -> (u8, u8, u8) {
        match self {
            Self::Sflush => (230, 159, 0),
            Self::Wflush => (213, 94, 0),
            Self::SRflush => (204, 121, 167),
            Self::WRflush => (140, 60, 0),
            Self::Darpc => (0, 114, 178),
            Self::Fasst => (86, 180, 233),
            Self::Farm => (0, 158, 115),
            Self::L5 => (90, 90, 90),
            Self::Rfp => (150, 150, 60),
            Self::Scalerpc => (120, 120, 200),
            Self::Octopus => (60, 60, 120),
        }
    }
}
