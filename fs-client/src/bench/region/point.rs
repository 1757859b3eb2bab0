//! One measured point, and the most that could have been.
//!
//! A value that is not in memory must be moved by the disk. With `r` disk reads and `w` disk writes for each value
//! (in blocks of a value rounded up to pages), a disk that does `D_r` reads or `D_w` writes a second and a server
//! that does `P` values a second with everything in memory, no placement of the same hit ratio does more than
//!
//! ```text
//!   min(P, 1 / (r / D_r + w / D_w))          for reads alone: min(P, D / m), m the miss ratio
//! ```

use super::file_load::Load;
use super::load::Outcome;
use super::policy::Policy;
use super::server::Counts;
use cuttlefs_common::ids::PAGE_SIZE_U64;
use serde::Serialize;

/// A throughput and what it is to be judged by.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Point {
    /// Which part of a figure.
    pub(super) panel: &'static str,
    /// Its place there, as printed.
    pub(super) x: String,
    pub(super) policy: Policy,
    pub(super) load: Load,
    /// DRAM for data, of what the file has.
    pub(super) dram_percent: u32,
    pub(super) workers: Option<usize>,
    /// Median of the rounds.
    pub(super) operations_per_second: f64,
    /// Of every round, in the order they ran.
    pub(super) rounds: Vec<f64>,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    /// Disk reads for each value.
    pub(super) disk_reads_per_value: f64,
    /// Disk writes for each value.
    pub(super) disk_writes_per_value: f64,
    /// One-sided reads that found the magic pattern and went again by RPC.
    pub(super) twice_per_value: f64,
    /// The same load with everything in memory.
    pub(super) pin_operations_per_second: Option<f64>,
    /// Random reads and writes a second of the disk alone.
    pub(super) disk_reads_per_second: Option<f64>,
    pub(super) disk_writes_per_second: Option<f64>,
    pub(super) bound_operations_per_second: Option<f64>,
    /// Throughput over time, in seconds and operations a second; of dynamic loads only.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) timeline: Vec<(f64, f64)>,
}

impl Point {
    /// Of the bound.
    pub(super) fn of_bound(&self) -> Option<f64> {
        self.bound_operations_per_second.map(|bound| self.operations_per_second / bound)
    }

    /// Of what is done with everything in memory.
    pub(super) fn of_pin(&self) -> Option<f64> {
        self.pin_operations_per_second.map(|pin| self.operations_per_second / pin)
    }

    /// Fills in the bound out of what else is known.
    pub(super) fn judge(&mut self) {
        let costs = [
            (self.disk_reads_per_value, self.disk_reads_per_second),
            (self.disk_writes_per_value, self.disk_writes_per_second),
        ];
        self.bound_operations_per_second = self.pin_operations_per_second.and_then(|pin| bound(pin, &costs));
    }
}

/// The most values a second; `None` if a disk's rate that is needed is unknown.
pub(super) fn bound(pin: f64, costs: &[(f64, Option<f64>)]) -> Option<f64> {
    let mut seconds_per_value = 0.0;
    for &(operations_per_value, per_second) in costs {
        if operations_per_value > 0.0 {
            seconds_per_value += operations_per_value / per_second.filter(|&rate| rate > 0.0)?;
        }
    }
    Some(if seconds_per_value > 0.0 { pin.min(1.0 / seconds_per_value) } else { pin })
}

/// Disk reads and writes for each value, in blocks of a value. Where the server fetches pages itself it counts them;
/// where the kernel pages, what its process had the disks move says it, which includes read-ahead.
pub(super) fn disk_operations_per_value(
    policy: Policy,
    load: &Load,
    outcome: &Outcome,
    before: &Counts,
    after: &Counts,
) -> (f64, f64) {
    let values = outcome.operations.max(1) as f64;
    let pages_per_value = load.value_bytes.div_ceil(PAGE_SIZE_U64).max(1) as f64;
    let since = |count: fn(&Counts) -> u64| count(after).saturating_sub(count(before)) as f64;
    let page = PAGE_SIZE_U64 as f64;
    let (read_pages, written_pages) = if policy.page_cached() {
        (since(|c| c.disk_read_bytes) / page, since(|c| c.disk_write_bytes) / page)
    } else {
        (
            since(|c| c.pages.fetch_misses) + since(|c| c.pages.read_modify_writes),
            since(|c| c.pages.direct_writes) + since(|c| c.pages.written_back),
        )
    };
    (read_pages / pages_per_value / values, written_pages / pages_per_value / values)
}

/// Reads that travelled twice for each value: the page bitmap had not said yet that the page was on SSD.
pub(super) fn twice_per_value(outcome: &Outcome, before: &Counts, after: &Counts) -> f64 {
    after.nic.magic_reads.saturating_sub(before.nic.magic_reads) as f64 / outcome.operations.max(1) as f64
}

/// The middle one of several rounds, by throughput.
pub(super) fn median(rounds: &[f64]) -> f64 {
    let mut sorted = rounds.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len().saturating_sub(1) / 2).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::region::load::histogram;
    use crate::bench::region::server::{NicCounts, PageCounts};

    #[test]
    fn the_bound_is_memory_or_disk_whichever_is_slower() {
        assert_eq!(bound(1000.0, &[(0.0, None)]), Some(1000.0), "nothing missed, nothing asked of the disk");
        assert_eq!(bound(1000.0, &[(0.5, Some(100.0))]), Some(200.0));
        assert_eq!(bound(150.0, &[(0.5, Some(100.0))]), Some(150.0));
        assert_eq!(
            bound(1000.0, &[(0.5, Some(100.0)), (0.5, Some(100.0))]),
            Some(100.0),
            "reads and writes add up"
        );
        assert_eq!(bound(1000.0, &[(0.5, None)]), None);
    }

    #[test]
    fn misses_are_counted_in_values() {
        let load = Load { value_bytes: 16384, write_percent: 0, theta: 0.0, clustered_bytes: 0, threads: 1 };
        let latencies = histogram().expect("histogram");
        let outcome = Outcome { operations: 100, seconds: 1.0, latencies, timeline: Vec::new() };
        let after = Counts {
            pages: PageCounts { fetch_misses: 200, direct_writes: 40, ..PageCounts::default() },
            nic: NicCounts { magic_reads: 7 },
            disk_read_bytes: 4096 * 400,
            disk_write_bytes: 0,
        };
        let before = Counts::default();
        let counted = disk_operations_per_value(Policy::Term, &load, &outcome, &before, &after);
        assert_eq!(counted, (0.5, 0.1));
        assert_eq!(twice_per_value(&outcome, &before, &after), 0.07);
        assert_eq!(disk_operations_per_value(Policy::Odp, &load, &outcome, &before, &after), (1.0, 0.0));
    }

    #[test]
    fn one_disturbed_round_moves_no_median() {
        assert_eq!(median(&[9.0, 1.0, 5.0]), 5.0);
        assert_eq!(median(&[]), 0.0);
    }
}
