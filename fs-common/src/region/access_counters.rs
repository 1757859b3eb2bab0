//! A client's counters of one-sided reads, which the server cannot see (TeRM section 4.4).
//!
//! The client owns the memory and registers it; once a sample period the server reads it one-sidedly and writes zeros
//! over the counts that it read. Counters are hints: an access that is counted while the server resets its unit may be
//! lost, and a torn one is counted wrong. Nothing depends on them but the choice of pages in DRAM.
//!
//! ```text
//! records:  units x 16 bytes      filekey u64 | unit u32 | count u32          (little-endian; filekey 0: free)
//! pages:    units x unit_pages    one u8 a page of the unit, saturating
//! ```
//!
//! A record is found by the hash of (filekey, unit), within `PROBES` places. A unit without a place is not counted in this period; a unit that was
//! not read since the last pull gives its place to another.
//!
//! The paper counts each unit of one large memory region. Here files come and go, so the counters are a table of the units that were read. The paper
//! counts only units; with the page counters the server can also keep single hot pages.

use crate::ids::FileKey;
use crate::memory::SharedMemory;
use crate::rpc::Sampling;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Bytes of a unit's record.
pub const UNIT_RECORD_LEN: usize = 16;
/// Largest sample unit: 16 MiB.
pub const MAX_SAMPLE_UNIT_PAGES: u32 = 4096;
/// Most bytes of a client's counters; the number of units follows from it.
const MAX_COUNTERS_BYTES: usize = 4 << 20;
/// Most units: with units of a single page the table would be too long to pull.
const MAX_UNITS: usize = 64 << 10;
/// Places in which a unit's record may be.
const PROBES: usize = 8;
/// A record that is being given to another unit.
const CLAIMED: u64 = u64::MAX;

/// Shape of a table of counters, the same on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CountersShape {
    unit_pages: u32,
    units: usize,
}

impl CountersShape {
    /// The shape for this sampling; `None` if the server asks for something impossible.
    pub fn of(sampling: &Sampling) -> Option<Self> {
        let unit_pages = sampling.unit_pages;
        if !unit_pages.is_power_of_two() || unit_pages > MAX_SAMPLE_UNIT_PAGES {
            return None;
        }
        let fitting = MAX_COUNTERS_BYTES / (UNIT_RECORD_LEN + unit_pages as usize);
        let units = (1 << fitting.ilog2()).min(MAX_UNITS);
        Some(Self { unit_pages, units })
    }

    /// Most units that are counted.
    pub const fn units(&self) -> usize {
        self.units
    }

    /// Pages of a unit.
    pub const fn unit_pages(&self) -> u32 {
        self.unit_pages
    }

    /// Offset of a unit's page counters.
    pub const fn pages_offset(&self, index: usize) -> usize {
        self.units * UNIT_RECORD_LEN + index * self.unit_pages as usize
    }

    /// Length of the memory.
    pub const fn len_bytes(&self) -> usize {
        self.pages_offset(self.units)
    }
}

/// The pulled record of a unit that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitRecord {
    /// The open file.
    pub filekey: FileKey,
    /// The number of the unit in the file.
    pub unit: u32,
    /// Pages read since the last pull.
    pub count: u32,
}

impl UnitRecord {
    /// Parses a pulled record; `None`: nothing was read, or the record is being changed.
    pub fn parse(bytes: &[u8; UNIT_RECORD_LEN]) -> Option<Self> {
        let (key, rest) = bytes.split_first_chunk::<8>()?;
        let (unit, rest) = rest.split_first_chunk::<4>()?;
        let count = u32::from_le_bytes(*rest.first_chunk::<4>()?);
        let key = u64::from_le_bytes(*key);
        (key != 0 && key != CLAIMED && count > 0).then_some(Self {
            filekey: FileKey(key),
            unit: u32::from_le_bytes(*unit),
            count,
        })
    }
}

/// A client's counters. All accesses are relaxed, and an increment is a load and a store: readers on several cores may lose a count, and none waits
/// for a cache line. A clone counts in the same memory.
#[derive(Clone, Debug)]
pub struct AccessCounters {
    memory: Arc<SharedMemory>,
    shape: CountersShape,
}

impl AccessCounters {
    /// Counters at zero.
    ///
    /// # Errors
    /// The system gives no memory.
    pub fn new(shape: CountersShape) -> io::Result<Self> {
        let memory = Arc::new(SharedMemory::new("cuttlefs-counters", shape.len_bytes())?);
        Ok(Self { memory, shape })
    }

    /// The memory, to register.
    pub fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// The shape of the table.
    pub fn shape(&self) -> CountersShape {
        self.shape
    }

    /// Counts a one-sided read of `[first_page, end_page)` of an open file.
    pub fn count(&self, filekey: FileKey, first_page: u64, end_page: u64) {
        let unit_pages = u64::from(self.shape.unit_pages);
        let mut page = first_page;
        while page < end_page {
            let unit = page / unit_pages;
            let until = end_page.min((unit + 1) * unit_pages);
            // Beyond 2^32 units nothing is counted: with the default unit that is a file of 4 EiB.
            if let Some(index) = u32::try_from(unit).ok().and_then(|unit| self.place(filekey, unit)) {
                let pages = self.shape.pages_offset(index);
                for inside in page % unit_pages..page % unit_pages + (until - page) {
                    let counter = self.memory.atomic_u8(pages + inside as usize);
                    let old = counter.load(Ordering::Relaxed);
                    if old < u8::MAX {
                        counter.store(old + 1, Ordering::Relaxed);
                    }
                }
                let count = self.memory.atomic_u32(index * UNIT_RECORD_LEN + 12);
                let read = u32::try_from(until - page).unwrap_or(u32::MAX);
                count.store(count.load(Ordering::Relaxed).saturating_add(read), Ordering::Relaxed);
            }
            page = until;
        }
    }

    /// The index of the unit's record; takes a place for it if it has none.
    fn place(&self, filekey: FileKey, unit: u32) -> Option<usize> {
        let key = filekey.0;
        if key == 0 || key == CLAIMED {
            return None;
        }
        let mask = self.shape.units - 1;
        // Two rounds of Fibonacci hashing: neighbouring units land far apart, whatever the key.
        let hash = key.wrapping_add(u64::from(unit)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let hash = (hash ^ hash >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let first = (hash >> 32) as usize;
        let mut unused = None;
        for probe in 0..PROBES.min(self.shape.units) {
            let index = (first + probe) & mask;
            let at = index * UNIT_RECORD_LEN;
            let found = self.memory.atomic_u64(at).load(Ordering::Relaxed);
            if found == key && self.memory.atomic_u32(at + 8).load(Ordering::Relaxed) == unit {
                return Some(index);
            }
            let is_unused = found != CLAIMED && self.memory.atomic_u32(at + 12).load(Ordering::Relaxed) == 0;
            if is_unused && unused.is_none() {
                unused = Some((index, found));
            }
        }
        let (index, found) = unused?;
        let at = index * UNIT_RECORD_LEN;
        let word = self.memory.atomic_u64(at);
        word.compare_exchange(found, CLAIMED, Ordering::Acquire, Ordering::Relaxed).ok()?;
        self.memory.atomic_u32(at + 8).store(unit, Ordering::Relaxed);
        self.memory.fill(self.shape.pages_offset(index), self.shape.unit_pages as usize, 0);
        word.store(key, Ordering::Release);
        Some(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counters(unit_pages: u32) -> AccessCounters {
        let shape = CountersShape::of(&Sampling { unit_pages, period_ms: 1000 }).expect("a shape");
        AccessCounters::new(shape).expect("memory")
    }

    /// What a server pulls: each record with its page counters.
    fn pulled(counters: &AccessCounters) -> Vec<(UnitRecord, Vec<u8>)> {
        let shape = counters.shape();
        (0..shape.units())
            .filter_map(|index| {
                let mut record = [0; UNIT_RECORD_LEN];
                counters.memory().read(index * UNIT_RECORD_LEN, &mut record);
                let mut pages = vec![0; shape.unit_pages() as usize];
                counters.memory().read(shape.pages_offset(index), &mut pages);
                Some((UnitRecord::parse(&record)?, pages))
            })
            .collect()
    }

    #[test]
    fn reads_are_counted_by_unit_and_page() {
        let counters = counters(4);
        counters.count(FileKey(9), 2, 7);
        counters.count(FileKey(9), 3, 4);
        let mut found = pulled(&counters);
        found.sort_by_key(|(record, _)| record.unit);
        let record = |unit, count| UnitRecord { filekey: FileKey(9), unit, count };
        assert_eq!(found, [(record(0, 3), vec![0, 0, 1, 2]), (record(1, 3), vec![1, 1, 1, 0])]);
    }

    #[test]
    fn the_golden_bytes_of_a_record() {
        let counters = counters(1);
        counters.count(FileKey(0x0102_0304_0506_0708), 5, 6);
        let shape = counters.shape();
        let at = (0..shape.units())
            .find(|index| counters.memory().load_u64(index * UNIT_RECORD_LEN) != 0)
            .expect("a record");
        let mut bytes = [0; UNIT_RECORD_LEN];
        counters.memory().read(at * UNIT_RECORD_LEN, &mut bytes);
        assert_eq!(bytes, [8, 7, 6, 5, 4, 3, 2, 1, 5, 0, 0, 0, 1, 0, 0, 0]);
    }

    #[test]
    fn pages_saturate_and_impossible_keys_are_not_counted() {
        let counters = counters(1);
        (0..300).for_each(|_| counters.count(FileKey(1), 0, 1));
        assert_eq!(pulled(&counters), [(UnitRecord { filekey: FileKey(1), unit: 0, count: 300 }, vec![255])]);
        counters.count(FileKey(0), 0, 1);
        counters.count(FileKey(CLAIMED), 0, 1);
        counters.count(FileKey(1), 1 << 60, (1 << 60) + 1);
        assert_eq!(pulled(&counters).len(), 1);
    }

    #[test]
    fn what_was_not_read_since_the_pull_makes_room() {
        let counters = counters(MAX_SAMPLE_UNIT_PAGES);
        let units = counters.shape().units() as u64;
        let unit_pages = u64::from(MAX_SAMPLE_UNIT_PAGES);
        for unit in 0..4 * units {
            counters.count(FileKey(1), unit * unit_pages, unit * unit_pages + 1);
        }
        let before = pulled(&counters);
        assert!(before.len() as u64 <= units && before.len() as u64 > units * 9 / 10);
        assert!(before.iter().all(|(record, _)| record.count == 1), "nobody was thrown out");
        // As the server resets the counters.
        counters.memory().fill(0, counters.shape().len_bytes(), 0);
        counters.count(FileKey(2), 0, 1);
        assert_eq!(pulled(&counters).len(), 1);
    }

    #[test]
    fn shapes_are_bounded_and_odd_ones_refused() {
        for unit_pages in [1, 16, 256, 4096] {
            let shape = CountersShape::of(&Sampling { unit_pages, period_ms: 1 }).expect("a shape");
            assert!(shape.len_bytes() <= MAX_COUNTERS_BYTES && shape.units().is_power_of_two());
        }
        for unit_pages in [0, 3, 8192] {
            assert_eq!(CountersShape::of(&Sampling { unit_pages, period_ms: 1 }), None);
        }
        assert_eq!(UnitRecord::parse(&[0; UNIT_RECORD_LEN]), None);
        assert_eq!(UnitRecord::parse(&[0xff; UNIT_RECORD_LEN]), None);
    }
}
