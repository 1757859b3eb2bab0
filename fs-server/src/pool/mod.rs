//! The pool: a server's space on SSD, and the access to its bytes.
//!
//! `Space` knows which pages are free, and a `Disk` moves pages between the device and memory. Neither knows the contents of a page.

/// Page-aligned memory for direct IO.
pub mod aligned_buf;
mod batch;
/// Durable writes to files other than the data files.
pub mod block_write;
/// Storage through the kernel's page cache.
pub mod cached;
/// The open data files as one sequence of pages.
pub mod data_files;
/// One data sync for many waiters.
pub mod data_sync;
/// An open pool.
pub mod directory;
/// The trait of the storage.
pub mod disk;
/// Why a pool cannot be formatted or opened.
pub mod error;
/// Making a pool.
pub mod format;
/// Signatures of other contents of disks.
pub mod signature;
/// Storage in memory, with injected faults.
pub mod simdisk;
/// The free pages.
pub mod space;
/// Checksums of pages.
pub mod sums;
/// The first 4 KiB of a data file.
pub mod superblock;
/// Storage through io_uring.
pub mod uring;

pub use aligned_buf::AlignedBuf;
pub use block_write::{BLOCK_BYTES, BlockWrite, OwnRing};
pub use cached::{CachedDisk, CachedPool, Reach};
pub use cuttlefs_common::pool_uuid::PoolUuid;
pub use data_files::{DATA_START, DataFile, DataFiles, Place};
pub use data_sync::DataSync;
pub use directory::{Intent, PoolDirectory, open, open_to};
pub use disk::{Disk, IoBuffer, IoDone, IoError, IoKind, IoRequest, LocalFuture};
pub use error::PoolError;
pub use format::{FormatOptions, FormatReport, MakeMetadata, POOL_PAGES_MAX, format};
pub use simdisk::{SimCounters, SimDisk, SimFault, SimMode};
pub use space::{NoSpace, QuarantineSeq, Run, Space, SpaceError, SpaceFigures};
pub use sums::{MarkStore, MemoryMarks, PageSums, SumFigures, SumLayout, SummedDisk, ZONE_PAGES};
pub use superblock::{Superblock, SuperblockError};
pub use uring::{UringCounters, UringDisk};
