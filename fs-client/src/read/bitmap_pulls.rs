//! Pulls of page bitmaps, or looks around where there are none (`look_around`), by the control thread, as often as [`BitmapPace`] says.

use super::bitmap_pace::{BitmapPace, LONGEST};
use super::{CachedRegion, Reads};
use crate::session::{Session, SessionLane, Task};
use crate::transport::FsError;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Returns the regions of all open files of a mount.
type AllRegions = Box<dyn Fn() -> Vec<Arc<CachedRegion>> + Send>;

/// The control thread's task that pulls bitmaps.
pub(crate) struct BitmapPulls {
    reads: Arc<Reads>,
    regions: AllRegions,
    pace: BitmapPace,
    next: Instant,
}

impl BitmapPulls {
    /// A task that pulls the bitmaps of the regions that `regions` returns.
    pub(crate) fn new(reads: Arc<Reads>, regions: AllRegions) -> Self {
        Self { reads, regions, pace: BitmapPace::default(), next: Instant::now() + LONGEST }
    }
}

impl Task for BitmapPulls {
    fn run(&mut self, session: &Session, lane: &mut SessionLane<'_>) -> Result<Option<Instant>, FsError> {
        if Instant::now() < self.next {
            return Ok(Some(self.next));
        }
        let counters = &self.reads.counters;
        let mut bytes = 0;
        if session.target_translates() {
            for region in (self.regions)() {
                let pulled = region.pull_bitmap(lane);
                counters.onesided_reads.add(pulled.reads);
                bytes += pulled.bytes;
            }
        } else {
            let looked = self.reads.look_around(session, &(self.regions)(), lane);
            counters.onesided_reads.add(looked.reads);
            bytes += looked.bytes;
        }
        let (reads, twice) = (counters.onesided_reads.get(), counters.read_twice.load(Ordering::Relaxed));
        self.next = Instant::now() + self.pace.pulled(bytes, reads, twice);
        Ok(Some(self.next))
    }
}
