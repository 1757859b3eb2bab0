//! What all of these benchmarks are told on the command line, and what that means.

use super::file_load::Load;
use super::load::Timing;
use super::policy::Policy;
use crate::bench::link::Link;
use anyhow::ensure;
use clap::{Args, ValueEnum};
use cuttlefs_common::ids::PAGE_SIZE_U64;
use cuttlefs_common::size::ByteSize;
use std::path::PathBuf;
use std::time::Duration;

/// Least value: a word at its beginning and one at its end can be checked, and ranks fit 32 bits for 256 GiB.
pub(super) const LEAST_VALUE_BYTES: u64 = 64;
/// Least memory a server takes.
const LEAST_MEMORY_BYTES: u64 = 4 << 20;

/// What is in memory before warming up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Preload {
    /// As much of the file's beginning as fits: memory is full, as of a server that has run for long
    Scan,
    /// Nothing
    None,
}

/// Options of every one of these benchmarks.
#[derive(Args, Clone, Debug)]
pub(super) struct CommonArgs {
    /// Directory in which the pool is made, which is removed afterwards; it should be on the disk to measure
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(super) scratch: PathBuf,
    /// Bytes of data [default: 2G; 256M with --quick]
    #[arg(long, value_name = "SIZE")]
    pub(super) size: Option<ByteSize>,
    /// What the load goes over
    #[arg(long, value_enum, default_value_t = Link::Tcp)]
    pub(super) link: Link,
    /// Client threads [default: 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(super) threads: Option<u16>,
    /// The server's threads for RPCs [default: the server's own choice]
    #[arg(long, value_name = "N")]
    pub(super) workers: Option<usize>,
    /// DRAM, as a share of the data
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(super) dram: Option<u32>,
    /// What to compare [default: as in the figure, or pin,term]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "POLICY,...")]
    pub(super) policy: Vec<Policy>,
    /// ODP with the times the NIC's hardware takes (the paper's Figure 4), not its software part alone
    #[arg(long)]
    pub(super) odp_hardware: bool,
    /// Scatter runs of so many bytes over the file instead of single values
    #[arg(long, value_name = "SIZE", default_value = "0", hide_default_value = true)]
    pub(super) clustered: ByteSize,
    /// Seconds of each point [default: 4; 1 with --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub(super) seconds: Option<u32>,
    /// Seconds before each point [default: 4; 1 with --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=3600))]
    pub(super) warmup: Option<u32>,
    /// Warm up until throughput does not change any more, and as long as --warmup [default with it: 60] at most
    #[arg(long)]
    pub(super) settle: bool,
    /// What is in memory before warming up
    #[arg(long, value_enum, default_value_t = Preload::Scan)]
    pub(super) preload: Preload,
    /// Times everything is run, in turn; medians are shown
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(super) rounds: u32,
    /// Fewer points, less data, one second each: to see that it works
    #[arg(long)]
    pub(super) quick: bool,
    /// Directory for NAME.json, NAME.svg and NAME.png
    #[arg(long, value_name = "DIR", default_value = "./bench-results")]
    pub(super) out: PathBuf,
}

/// Client threads unless told otherwise: enough for a disk's queue beside two cores' work.
const DEFAULT_THREADS: usize = 16;

/// The same, with what was not said filled in.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub(super) args: CommonArgs,
    pub(super) size_bytes: u64,
    pub(super) threads: usize,
    pub(super) dram_percent: u32,
    pub(super) timing: Timing,
}

impl Settings {
    /// # Errors
    /// If something is out of range.
    pub(super) fn new(args: &CommonArgs) -> anyhow::Result<Self> {
        let quick = args.quick;
        let size_bytes = args.size.map_or(if quick { 256 << 20 } else { 2 << 30 }, |size| size.0);
        ensure!(
            size_bytes >= 16 << 20,
            "--size must be at least 16M, so that a share of it is memory worth the name"
        );
        let warmup = args.warmup.unwrap_or(match (args.settle, quick) {
            (true, _) => 60,
            (false, true) => 1,
            (false, false) => 4,
        });
        let measure = args.seconds.unwrap_or(if quick { 1 } else { 4 });
        Ok(Self {
            size_bytes,
            threads: args.threads.map_or(DEFAULT_THREADS, usize::from),
            dram_percent: args.dram.unwrap_or(50),
            timing: Timing {
                warmup: Duration::from_secs(warmup.into()),
                settle: args.settle,
                measure: Duration::from_secs(measure.into()),
                change_hotspots: false,
            },
            args: args.clone(),
        })
    }

    /// What is compared, if nothing else was asked for.
    pub(super) fn policies(&self, usual: &[Policy]) -> Vec<Policy> {
        let chosen = if self.args.policy.is_empty() { usual } else { &self.args.policy };
        let mut policies: Vec<Policy> = Vec::new();
        for &policy in chosen {
            let policy =
                if policy == Policy::Odp && self.args.odp_hardware { Policy::OdpHardware } else { policy };
            if !policies.contains(&policy) {
                policies.push(policy);
            }
        }
        policies
    }

    /// A load of this kind, with what is the same for all.
    pub(super) fn load(&self, value_bytes: u64, write_percent: u32, theta: f64) -> Load {
        Load {
            value_bytes,
            write_percent,
            theta,
            clustered_bytes: self.args.clustered.0,
            threads: self.threads,
        }
    }

    /// Either list, the second when it is to be quick.
    pub(super) fn choose<T: Copy>(&self, all: &[T], quick: &[T]) -> Vec<T> {
        if self.args.quick { quick.to_vec() } else { all.to_vec() }
    }
}

/// Bytes of DRAM for a share of a file: whole pages. All of it is the whole pool, for then nothing may be missing.
pub(super) fn memory_bytes(file_bytes: u64, pool_bytes: u64, dram_percent: u32) -> u64 {
    if dram_percent >= 100 {
        return pool_bytes;
    }
    let share = (u128::from(file_bytes) * u128::from(dram_percent) / 100) as u64;
    (share / PAGE_SIZE_U64 * PAGE_SIZE_U64).max(LEAST_MEMORY_BYTES)
}

/// # Errors
/// If a value's size is none that a load can have.
pub(super) fn check_value_bytes(value_bytes: u64) -> anyhow::Result<u64> {
    let most = u64::from(cuttlefs_common::rpc::MAX_TRANSFER_BYTES);
    ensure!(
        (LEAST_VALUE_BYTES..=most).contains(&value_bytes) && value_bytes.is_power_of_two(),
        "--value-size {} is none; use a power of two between 64 and {}",
        ByteSize(value_bytes),
        ByteSize(most)
    );
    Ok(value_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_a_file() {
        assert_eq!(memory_bytes(1 << 30, 2 << 30, 50), 1 << 29);
        assert_eq!(memory_bytes(1 << 30, 2 << 30, 33) % PAGE_SIZE_U64, 0);
        assert_eq!(memory_bytes(1 << 30, 2 << 30, 100), 2 << 30);
        assert_eq!(memory_bytes(1 << 20, 2 << 30, 1), LEAST_MEMORY_BYTES);
    }

    #[test]
    fn values_are_powers_of_two() {
        assert!(check_value_bytes(4096).is_ok());
        for wrong in [0, 32, 100, 4095, 1 << 30] {
            assert!(check_value_bytes(wrong).is_err(), "{wrong}");
        }
    }
}
