//! The pool: the SSD space of a server, and the access to its bytes.
//!
//! `Space` says which pages are free, a `Disk` moves pages between the device and memory. Neither knows the contents of
//! a page.

/// Page-aligned memory for direct IO.
pub mod aligned_buf;
mod batch;
/// Durable writes to files beside the data files.
pub mod block_write;
/// Storage through the kernel's page cache.
pub mod cached;
/// The open data files as one row of pages.
pub mod data_files;
/// One data sync for many.
pub mod data_sync;
/// An open pool.
pub mod directory;
/// The trait the storage comes in through.
pub mod disk;
/// Why a pool cannot be formatted or opened.
pub mod error;
/// Making a pool.
pub mod format;
/// Marks of what else lives on disks.
pub mod signature;
/// Storage in memory, with faults.
pub mod simdisk;
/// Which pages are free.
pub mod space;
/// Checksums of pages.
pub mod sums;
/// The first 4 KiB of a data file.
pub mod superblock;
/// Storage through io_uring.
pub mod uring;
/// A pool's identity.
pub mod uuid;

pub use aligned_buf::AlignedBuf;
pub use block_write::{BLOCK_BYTES, BlockWrite, OwnRing};
pub use cached::{CachedDisk, CachedPool, Reach};
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
pub use uuid::PoolUuid;
