//! Newtypes for every number that crosses a boundary, so that an inode number cannot be passed
//! where a pool page is meant.
//!
//! They are plain values without behaviour; each type's doc says what the number indexes.

use serde::{Deserialize, Serialize};

/// Bytes in a pool page, a frame and a file page. The three are the same so that a page moves
/// between SSD and DRAM without being cut, and equal to the host page so that an MR over frames
/// has one translation a page (TeRM section 4.1.1).
pub const PAGE_SIZE: usize = 4096;
/// `PAGE_SIZE` as a `u64`, for offset arithmetic.
pub const PAGE_SIZE_U64: u64 = PAGE_SIZE as u64;
/// Largest file offset plus one: 2^63 - 1, what `off_t` can hold.
pub const MAX_FILE_SIZE: u64 = i64::MAX as u64;
/// Longest name of a directory entry in bytes (`NAME_MAX`).
pub const NAME_MAX: usize = 255;
/// Longest symlink target in bytes (`PATH_MAX` less the NUL).
pub const SYMLINK_MAX: usize = 4095;

macro_rules! newtype {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        #[repr(transparent)]
        pub struct $name(pub $inner);

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Display::fmt(&self.0, f)
            }
        }

        impl From<$inner> for $name {
            fn from(value: $inner) -> Self {
                Self(value)
            }
        }
    };
}

newtype!(
    /// An inode number. 64 bits, never reused; 1 is the root directory.
    InodeNo(u64)
);
newtype!(
    /// Index of a 4 KiB page in the pool (the SSD space).
    PoolPage(u64)
);
newtype!(
    /// Index of a 4 KiB page in a file: file offset divided by `PAGE_SIZE`.
    FilePage(u64)
);
newtype!(
    /// Index of a 4 KiB frame of DRAM. Frames 0, 1 and 2 are reserved.
    FrameIndex(u32)
);
newtype!(
    /// Names an open file to the target: random, bound to one session, carrying rights (FileMR section 3).
    FileKey(u64)
);
newtype!(
    /// Index of a file's slot in the file table, which clients read one-sidedly.
    FileSlot(u32)
);
newtype!(
    /// Sequence number of a record in a ring's log.
    LogSeq(u64)
);
newtype!(
    /// Local key of a memory region, as in `ibv_mr.lkey`.
    Lkey(u32)
);
newtype!(
    /// Remote key of a memory region, as in `ibv_mr.rkey`.
    Rkey(u32)
);
newtype!(
    /// Number of a queue pair within one device.
    QpNumber(u32)
);
newtype!(
    /// A client's identity: drawn at random when it mounts, kept across reconnects.
    ClientId(u128)
);
newtype!(
    /// A session slot: at most one request of a slot is in flight (RFC 8881 section 2.10.6).
    SlotIndex(u16)
);
newtype!(
    /// One FUSE request, carried in the RPC header so that one read joins client's and server's logs.
    TraceId(u64)
);

impl InodeNo {
    /// The root directory of a pool.
    pub const ROOT: Self = Self(1);
}

impl FrameIndex {
    /// Every byte is covered by the magic pattern; where pages on SSD point to.
    pub const MAGIC: Self = Self(0);
    /// Swallows one-sided writes to pages that are not resident.
    pub const BLACK_HOLE: Self = Self(1);
    /// All zeros; never written.
    pub const ZERO: Self = Self(2);
    /// The first frame that can hold a page.
    pub const FIRST_USABLE: Self = Self(3);
}

impl PoolPage {
    /// Byte offset of this page in the pool.
    pub const fn byte_offset(self) -> u64 {
        self.0 * PAGE_SIZE_U64
    }
}

impl FilePage {
    /// The page that holds file byte `offset`.
    pub const fn containing(offset: u64) -> Self {
        Self(offset / PAGE_SIZE_U64)
    }

    /// File offset of this page's first byte.
    pub const fn byte_offset(self) -> u64 {
        self.0 * PAGE_SIZE_U64
    }
}
