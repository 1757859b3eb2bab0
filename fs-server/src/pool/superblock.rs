//! The superblock: the first 4 KiB of each data file. It says to which pool the file belongs, and its place in the pool.
//!
//! It is written once, when the pool is formatted, before `cuttlefs.toml` names the file, and never changed. So it needs no second copy to survive a
//! torn write. It has no page number in the pool (`DATA_START`).
//!
//! ```text
//! offset  bytes  field
//!      0      8  magic "cuttlefs"
//!      8      4  format version
//!     12      4  length of this block: 4096
//!     16     16  pool UUID
//!     32      4  index of this data file
//!     36      4  number of data files
//!     40      8  pool page of this file's first page
//!     48      8  pool pages in this file
//!     56      8  byte offset of the first page in this file
//!     64      4  page size: 4096
//!     68      4  reserved, zero
//!     72      8  time of formatting, seconds since the epoch
//!     80      8  byte offset of the pages' checksums in this file (`sums`)
//!     88   4004  reserved, zero
//!   4092      4  CRC32C of everything before
//! ```
//! Numbers are little-endian.
//!
//! | format version | change |
//! | --- | --- |
//! | 1 | the first |
//! | 2 | checksums and write intents behind the pages |
//! | 3 | no write intents: marks are records of the metadata |

use super::data_files::DATA_START;
use super::sums::layout::sum_blocks;
use cuttlefs_common::ids::{PAGE_SIZE, PAGE_SIZE_U64};
use cuttlefs_common::pool_uuid::PoolUuid;
use std::mem::{offset_of, size_of};
use zerocopy::little_endian::{I64, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The format that this release reads and writes.
pub const FORMAT_VERSION: u32 = 3;
/// Bytes of a superblock.
pub const SUPERBLOCK_BYTES: usize = 4096;
/// Most data files of a pool. A larger number is a typing error, or a hostile file.
pub const MOST_DATA_FILES: u32 = 1024;

const MAGIC: [u8; 8] = *b"cuttlefs";
const RESERVED_BYTES: usize = 4004;
const CHECKED_BYTES: usize = offset_of!(Raw, crc32c);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Raw {
    magic: [u8; 8],
    format_version: U32,
    length: U32,
    pool_uuid: [u8; 16],
    file_index: U32,
    file_count: U32,
    first_page: U64,
    pages: U64,
    data_start: U64,
    page_size: U32,
    reserved_word: U32,
    created_seconds: I64,
    sums_start: U64,
    reserved: [u8; RESERVED_BYTES],
    crc32c: U32,
}

const _: () = assert!(size_of::<Raw>() == SUPERBLOCK_BYTES);
const _: () = assert!(CHECKED_BYTES == SUPERBLOCK_BYTES - 4);
const _: () = assert!(SUPERBLOCK_BYTES as u64 <= DATA_START);

/// The contents of a superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// The pool.
    pub pool_uuid: PoolUuid,
    /// The index of this data file.
    pub file_index: u32,
    /// The number of the pool's data files.
    pub file_count: u32,
    /// Pool page of this file's first page.
    pub first_page: u64,
    /// Pool pages in this file.
    pub pages: u64,
    /// When the pool was formatted, in seconds since the epoch.
    pub created_seconds: i64,
}

/// Why 4 KiB are not a superblock of this release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SuperblockError {
    /// There is no superblock.
    #[error("there is no cuttlefs superblock")]
    NoMagic,
    /// The superblock is of another release.
    #[error(
        "the pool has format version {found} and this release reads version {FORMAT_VERSION}; {}",
        if *found > FORMAT_VERSION {
            "use a newer release of cuttlefs"
        } else {
            "serve it with an older release of cuttlefs, and copy its files to a pool made by this one"
        }
    )]
    Version {
        /// Its version.
        found: u32,
    },
    /// The checksum does not match.
    #[error("the superblock is damaged: its checksum is {found:#010x} where its bytes have {computed:#010x}")]
    Checksum {
        /// The stored checksum.
        found: u32,
        /// The checksum of the bytes.
        computed: u32,
    },
    /// The checksum matches and a field has an impossible value.
    #[error("the superblock is damaged: {0}")]
    Field(&'static str),
}

impl Superblock {
    /// The superblock's bytes on disk.
    pub fn encode(&self) -> Box<[u8; SUPERBLOCK_BYTES]> {
        let mut raw = Raw {
            magic: MAGIC,
            format_version: U32::new(FORMAT_VERSION),
            length: U32::new(SUPERBLOCK_BYTES as u32),
            pool_uuid: self.pool_uuid.0,
            file_index: U32::new(self.file_index),
            file_count: U32::new(self.file_count),
            first_page: U64::new(self.first_page),
            pages: U64::new(self.pages),
            data_start: U64::new(DATA_START),
            page_size: U32::new(PAGE_SIZE as u32),
            reserved_word: U32::ZERO,
            created_seconds: I64::new(self.created_seconds),
            sums_start: U64::new(self.sums_start()),
            reserved: [0; RESERVED_BYTES],
            crc32c: U32::ZERO,
        };
        raw.crc32c = U32::new(crc32c::crc32c(&raw.as_bytes()[..CHECKED_BYTES]));
        let mut bytes = Box::new([0; SUPERBLOCK_BYTES]);
        bytes.copy_from_slice(raw.as_bytes());
        bytes
    }

    /// Whether the bytes begin like a superblock of any version.
    pub fn has_magic(bytes: &[u8]) -> bool {
        bytes.starts_with(&MAGIC)
    }

    /// Parses a superblock's bytes. Any bytes give a result, and a parsed superblock is consistent in itself.
    ///
    /// # Errors
    /// `SuperblockError`. The magic is checked first, then the version, so that another release's superblock is reported as such whatever else is
    /// different in it.
    pub fn parse(bytes: &[u8; SUPERBLOCK_BYTES]) -> Result<Self, SuperblockError> {
        use SuperblockError::Field;
        let raw = Raw::ref_from_bytes(bytes).map_err(|_| Field("its length is not 4096 bytes"))?;
        if raw.magic != MAGIC {
            return Err(SuperblockError::NoMagic);
        }
        let version = raw.format_version.get();
        if version != FORMAT_VERSION {
            return Err(SuperblockError::Version { found: version });
        }
        let (found, computed) = (raw.crc32c.get(), crc32c::crc32c(&bytes[..CHECKED_BYTES]));
        if found != computed {
            return Err(SuperblockError::Checksum { found, computed });
        }
        let require = |good: bool, what| if good { Ok(()) } else { Err(Field(what)) };
        require(raw.length.get() as usize == SUPERBLOCK_BYTES, "its length is not 4096 bytes")?;
        require(raw.page_size.get() as usize == PAGE_SIZE, "its page size is not 4096 bytes")?;
        require(raw.data_start.get() == DATA_START, "its pages begin at another place")?;
        let reserved_is_zero = raw.reserved_word.get() == 0 && raw.reserved.iter().all(|byte| *byte == 0);
        require(reserved_is_zero, "reserved bytes are not zero")?;
        let (index, count) = (raw.file_index.get(), raw.file_count.get());
        require(count <= MOST_DATA_FILES && index < count, "its index is not below the number of files")?;
        let (first, pages) = (raw.first_page.get(), raw.pages.get());
        // Every byte offset in the pool and in the file must fit an off_t, also with the sums, which are less than an eighth of the pages, or one
        // page.
        let end = first.checked_add(pages).and_then(|end| end.checked_mul(PAGE_SIZE_U64));
        let fits = end.is_some_and(|end| end <= i64::MAX as u64 / 2 - DATA_START);
        require(pages > 0 && fits, "its number of pages cannot be")?;
        require((index == 0) == (first == 0), "its first page does not fit its index")?;
        let superblock = Self {
            pool_uuid: PoolUuid(raw.pool_uuid),
            file_index: index,
            file_count: count,
            first_page: first,
            pages,
            created_seconds: raw.created_seconds.get(),
        };
        require(raw.sums_start.get() == superblock.sums_start(), "its checksums are at another place")?;
        Ok(superblock)
    }

    /// The offset in the data file at which the checksums of its pages begin.
    pub fn sums_start(&self) -> u64 {
        DATA_START + self.pages * PAGE_SIZE_U64
    }

    /// The least length in bytes of a data file with this superblock.
    pub fn file_bytes(&self) -> u64 {
        file_bytes(self.pages)
    }
}

/// The length of a data file with `pages` pages.
pub fn file_bytes(pages: u64) -> u64 {
    DATA_START + (pages + sum_blocks(pages)) * PAGE_SIZE_U64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn example() -> Superblock {
        Superblock {
            pool_uuid: PoolUuid(*b"0123456789abcdef"),
            file_index: 1,
            file_count: 3,
            first_page: 0x0102,
            pages: 0x030405,
            created_seconds: 1_700_000_000,
        }
    }

    #[test]
    fn golden_bytes() {
        let bytes = example().encode();
        let golden: [&[u8]; 14] = [
            b"cuttlefs",
            &[3, 0, 0, 0],
            &[0, 0x10, 0, 0],
            b"0123456789abcdef",
            &[1, 0, 0, 0],
            &[3, 0, 0, 0],
            &[2, 1, 0, 0, 0, 0, 0, 0],
            &[5, 4, 3, 0, 0, 0, 0, 0],
            &[0, 0, 1, 0, 0, 0, 0, 0],
            &[0, 0x10, 0, 0],
            &[0; 4],
            &[0x00, 0xf1, 0x53, 0x65, 0, 0, 0, 0],
            &[0, 0x50, 0x41, 0x30, 0, 0, 0, 0],
            &[0; RESERVED_BYTES],
        ];
        let golden = golden.concat();
        assert_eq!(bytes[..CHECKED_BYTES], golden[..]);
        assert_eq!(bytes[CHECKED_BYTES..], GOLDEN_CRC32C.to_le_bytes());
        assert_eq!(Superblock::parse(&bytes), Ok(example()));
    }

    /// Computed bit by bit, by another program.
    const GOLDEN_CRC32C: u32 = 0x054DB915;

    /// Gives changed bytes the right checksum.
    fn sealed(mut bytes: Box<[u8; SUPERBLOCK_BYTES]>) -> Box<[u8; SUPERBLOCK_BYTES]> {
        let crc = crc32c::crc32c(&bytes[..CHECKED_BYTES]);
        bytes[CHECKED_BYTES..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    #[test]
    fn each_wrong_field_is_refused_by_name() {
        let change = |at: usize, value: u8| {
            let mut bytes = example().encode();
            bytes[at] = value;
            Superblock::parse(&sealed(bytes))
        };
        assert_eq!(change(0, b'C'), Err(SuperblockError::NoMagic));
        assert_eq!(change(8, 1), Err(SuperblockError::Version { found: 1 }));
        for (at, value) in [
            (13, 0),
            (32, 3),
            (32, 0),
            (36, 0),
            (38, 1),
            (40 + 7, 0xff),
            (58, 2),
            (65, 0x20),
            (68, 1),
            (82, 0),
        ] {
            assert!(matches!(change(at, value), Err(SuperblockError::Field(_))), "byte {at}");
        }
        for at in [88, 2000, 4091] {
            assert_eq!(change(at, 1), Err(SuperblockError::Field("reserved bytes are not zero")));
        }
        let none = Superblock { pages: 0, ..example() };
        assert!(Superblock::parse(&none.encode()).is_err());
        let version = SuperblockError::Version { found: 7 }.to_string();
        assert!(version.contains("version 7") && version.contains("newer"), "{version}");
        let version = SuperblockError::Version { found: 1 }.to_string();
        assert!(version.contains("version 1") && version.contains("copy its files"), "{version}");
        assert_eq!(Superblock::parse(&[0; SUPERBLOCK_BYTES]), Err(SuperblockError::NoMagic));
    }

    proptest! {
        #[test]
        fn any_flipped_bit_is_seen(at in 0..SUPERBLOCK_BYTES, bit in 0..8u32) {
            let mut bytes = example().encode();
            bytes[at] ^= 1 << bit;
            prop_assert!(Superblock::parse(&bytes).is_err());
        }

        #[test]
        fn any_bytes_under_a_right_checksum_parse_or_not(
            head in proptest::collection::vec(any::<u8>(), 12..200),
        ) {
            let mut bytes = example().encode();
            bytes[12..12 + head.len()].copy_from_slice(&head);
            if let Ok(parsed) = Superblock::parse(&sealed(bytes)) {
                prop_assert_eq!(Superblock::parse(&parsed.encode()), Ok(parsed));
                prop_assert!(parsed.file_bytes() > DATA_START);
            }
        }
    }
}
