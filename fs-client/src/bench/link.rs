//! What a benchmark that brings its own server has between itself and it.

use clap::ValueEnum;

/// What the load goes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Link {
    /// The software RNIC over TCP loopback: the target's RNIC is a thread
    Tcp,
    /// The software RNIC over a Unix socket: the same protocol
    Unix,
    /// Shared memory: the initiator is the RNIC
    Shm,
}

impl Link {
    /// As printed.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Unix => "unix",
            Self::Shm => "shm",
        }
    }
}
