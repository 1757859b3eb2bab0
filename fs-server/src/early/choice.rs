//! What people may ask for: whether writes are acknowledged early, how, and on what their rings lie.

use cuttlefs_common::persist::LogDeviceKind;
use cuttlefs_common::rpc::durable::{Kind, RingStore, RingStoreError};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Whether small writes are acknowledged before they are executed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EarlyChoice {
    /// If rings lie on persistent memory.
    #[default]
    Auto,
    /// Never.
    Off,
    /// So.
    Kind(Kind),
}

impl FromStr for EarlyChoice {
    type Err = String;

    fn from_str(input: &str) -> Result<Self, Self::Err> {
        match input {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            _ => Kind::ALL
                .into_iter()
                .find(|kind| kind.label().eq_ignore_ascii_case(input))
                .map(Self::Kind)
                .ok_or_else(|| {
                    format!("`{input}` is none of auto, off, sflush, wflush, s-rflush and w-rflush")
                }),
        }
    }
}

impl std::fmt::Display for EarlyChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Off => f.write_str("off"),
            Self::Kind(kind) => f.write_str(&kind.label().to_lowercase()),
        }
    }
}

/// What rings are to lie on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RingDevice {
    /// Persistent memory if the kernel says so, else a synced file.
    #[default]
    Auto,
    /// That.
    Kind(LogDeviceKind),
}

impl RingDevice {
    /// As `LogDevice::open` takes it.
    pub const fn kind(self) -> Option<LogDeviceKind> {
        match self {
            Self::Auto => None,
            Self::Kind(kind) => Some(kind),
        }
    }
}

impl FromStr for RingDevice {
    type Err = String;

    fn from_str(input: &str) -> Result<Self, Self::Err> {
        let kinds = [LogDeviceKind::Pmem, LogDeviceKind::PmemEmulated, LogDeviceKind::File];
        match kinds.into_iter().find(|kind| kind.label() == input) {
            Some(kind) => Ok(Self::Kind(kind)),
            None if input == "auto" => Ok(Self::Auto),
            None => Err(format!("`{input}` is none of auto, pmem, pmem-emulated and file")),
        }
    }
}

impl std::fmt::Display for RingDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.kind().map_or("auto", LogDeviceKind::label))
    }
}

/// Rings of a pool, whether early writes are offered or only those of an earlier server are looked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingOptions {
    /// Where they are.
    pub directory: PathBuf,
    /// What they lie on.
    pub device: RingDevice,
    /// What is offered.
    pub early: EarlyChoice,
    /// How long who connects for a ring may take to say hello.
    pub hello_wait: Duration,
}

impl RingOptions {
    /// Where a server before may have left something.
    ///
    /// # Errors
    /// The directory.
    pub(crate) fn left(&self) -> Result<Option<RingStore>, RingStoreError> {
        match self.directory.exists() {
            true => RingStore::new(&self.directory, self.device.kind()).map(Some),
            false => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_written_as_they_are_read() {
        for text in ["auto", "off", "sflush", "wflush", "s-rflush", "w-rflush"] {
            assert_eq!(text.parse::<EarlyChoice>().expect(text).to_string(), text);
        }
        for text in ["auto", "pmem", "pmem-emulated", "file"] {
            assert_eq!(text.parse::<RingDevice>().expect(text).to_string(), text);
        }
        assert!("on".parse::<EarlyChoice>().expect_err("unknown").contains("wflush"));
        assert!("ssd".parse::<RingDevice>().expect_err("unknown").contains("pmem-emulated"));
    }
}
