//! The parts of a file region that both sides use: the memory that clients may read one-sidedly, and the arithmetic of pages, bitmaps and the magic
//! pattern.

mod access_counters;
mod extent;
mod file_table;
mod magic;
mod page_set;
mod residency;

pub use access_counters::{
    AccessCounters, CountersShape, MAX_SAMPLE_UNIT_PAGES, UNIT_RECORD_LEN, UnitRecord,
};
pub use extent::{Extent, ExtentState};
pub use file_table::{FILE_SLOT_LEN, FileSlotView, FileTable};
pub use magic::{MagicPattern, PATTERN_LEN};
pub use page_set::{PagePart, PageSet, divide};
pub use residency::{ResidencyEntry, ResidencyTable};
