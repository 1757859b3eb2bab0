//! The rows of the table: what is measured, in which order, and what is good.

use super::files::FileWork;
use super::fio_job::FioJob;
use serde::Serialize;

/// What one run of one row gave.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Sample {
    /// Operations (requests, files, names) a second.
    pub(super) operations_per_second: f64,
    /// Bytes a second; 0 where none move.
    pub(super) bytes_per_second: f64,
    /// Mean time of one operation.
    pub(super) mean_latency_us: f64,
    /// 99th percentile of it, where it is known.
    pub(super) p99_latency_us: Option<f64>,
}

/// How a row is measured.
#[derive(Clone, Copy, Debug)]
pub(super) enum Work {
    /// By fio.
    Fio(FioJob),
    /// By system calls of our own.
    Files(FileWork),
}

/// How a row's value is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// MiB/s, of bytes a second.
    MebibytesPerSecond,
    /// Operations a second, with the operation's name.
    PerSecond(&'static str),
}

/// A row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item {
    /// As printed.
    pub(super) name: &'static str,
    /// As in JSON.
    pub(super) key: &'static str,
    /// How it is measured.
    pub(super) work: Work,
    /// How it is written.
    pub(super) unit: Unit,
    /// Value of a good file system on two cores through FUSE, one client, one job, in this row's unit: green from
    /// here on, yellow from half of it. The figures are a C passthrough's on a local disk and, for random reads, those
    /// of a FUSE file system that does nothing. `None` where nobody has measured one: then there is no colour.
    pub(super) good: Option<f64>,
}

/// All rows, in the order they run: later ones use what earlier ones left.
pub(super) const ITEMS: &[Item] = &[
    Item {
        name: "Sequential write, 1 MiB",
        key: "sequential_write",
        work: Work::Fio(FioJob::SequentialWrite),
        unit: Unit::MebibytesPerSecond,
        good: Some(900.0),
    },
    Item {
        name: "Sequential read, 1 MiB",
        key: "sequential_read",
        work: Work::Fio(FioJob::SequentialRead),
        unit: Unit::MebibytesPerSecond,
        good: None,
    },
    Item {
        name: "Random write, 4 KiB",
        key: "random_write",
        work: Work::Fio(FioJob::RandomWrite),
        unit: Unit::PerSecond("op"),
        good: None,
    },
    Item {
        name: "Random read, 4 KiB",
        key: "random_read",
        work: Work::Fio(FioJob::RandomRead),
        unit: Unit::PerSecond("op"),
        good: Some(37_000.0),
    },
    Item {
        name: "Small files, write",
        key: "small_write",
        work: Work::Files(FileWork::WriteSmall),
        unit: Unit::PerSecond("file"),
        good: None,
    },
    Item {
        name: "Small files, read",
        key: "small_read",
        work: Work::Files(FileWork::ReadSmall),
        unit: Unit::PerSecond("file"),
        good: None,
    },
    Item {
        name: "Create",
        key: "create",
        work: Work::Files(FileWork::Create),
        unit: Unit::PerSecond("file"),
        good: Some(5_000.0),
    },
    Item {
        name: "Stat, cold",
        key: "stat_cold",
        work: Work::Files(FileWork::StatCold),
        unit: Unit::PerSecond("op"),
        good: Some(15_000.0),
    },
    Item {
        name: "Stat, warm",
        key: "stat_warm",
        work: Work::Files(FileWork::StatWarm),
        unit: Unit::PerSecond("op"),
        good: None,
    },
    Item {
        name: "List directory",
        key: "read_directory",
        work: Work::Files(FileWork::ReadDirectory),
        unit: Unit::PerSecond("entry"),
        good: None,
    },
    Item {
        name: "Rename",
        key: "rename",
        work: Work::Files(FileWork::Rename),
        unit: Unit::PerSecond("op"),
        good: None,
    },
    Item {
        name: "Unlink",
        key: "unlink",
        work: Work::Files(FileWork::Unlink),
        unit: Unit::PerSecond("file"),
        good: Some(5_500.0),
    },
];

impl Item {
    /// The row's value out of a sample, in its unit.
    pub(super) fn value(&self, sample: &Sample) -> f64 {
        match self.unit {
            Unit::MebibytesPerSecond => sample.bytes_per_second / f64::from(1u32 << 20),
            Unit::PerSecond(_) => sample.operations_per_second,
        }
    }
}

/// The middle one of several samples, by operations a second: one disturbed round does not move it.
pub(super) fn median(samples: &[Sample]) -> Option<Sample> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(|a, b| a.operations_per_second.total_cmp(&b.operations_per_second));
    sorted.get(sorted.len().checked_sub(1)? / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(operations_per_second: f64) -> Sample {
        Sample { operations_per_second, bytes_per_second: 0.0, mean_latency_us: 0.0, p99_latency_us: None }
    }

    #[test]
    fn median_of_rounds() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[sample(3.0)]), Some(sample(3.0)));
        assert_eq!(median(&[sample(9.0), sample(1.0), sample(5.0)]), Some(sample(5.0)));
        assert_eq!(median(&[sample(9.0), sample(1.0)]), Some(sample(1.0)));
    }

    #[test]
    fn keys_are_unique() {
        let mut keys: Vec<_> = ITEMS.iter().map(|item| item.key).collect();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), ITEMS.len());
    }
}
