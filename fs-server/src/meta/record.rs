//! Values of the metadata records: a version byte, then postcard. Golden bytes in the tests below fix each of them.
//!
//! A value from the store is bytes until it is parsed into one of these types. The parse checks every relation on which the rest of the code relies.
//! A record that fails it is reported, and never repaired by a guess.

use super::answer::Answer;
use super::name::{HashKey, SLOTS_PER_BUCKET};
use super::written::Written;
use cuttlefs_common::attr::{Attr, FileKind, InodeFlags, Timestamp};
use cuttlefs_common::ids::{FilePage, InodeNo, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::name;
use cuttlefs_common::rdma::PeerKey;
use cuttlefs_common::region::{Extent, ExtentState};
use serde::{Deserialize, Serialize};

/// First byte of every value. Another number is another format.
pub(super) const RECORD_VERSION: u8 = 1;
/// The format of the whole store, which is in the superblock record.
pub const FORMAT_VERSION: u32 = 7;

/// Why a value is not a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// The value is of another version than this server writes.
    #[error("record version {0} is not known")]
    Version(u8),
    /// The value is no record of this kind.
    #[error("the record does not parse")]
    Malformed,
    /// The value parses, and contradicts itself.
    #[error("the record contradicts itself: {0}")]
    Impossible(&'static str),
}

/// An inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InodeRecord {
    /// Type.
    pub kind: FileKind,
    /// Permission, set-id and sticky bits.
    pub mode: u16,
    /// The number of entries that name it, and 0 for an orphan; for a directory, 2 plus its subdirectories.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number.
    pub rdev: u32,
    /// Length in bytes. On disk it covers only bytes that are durable.
    pub size: u64,
    /// The number of pages that its extents have. On disk: that of its extent records.
    pub allocated_pages: u64,
    /// Last access.
    pub atime: Timestamp,
    /// Last change of contents.
    pub mtime: Timestamp,
    /// Last change of the inode.
    pub ctime: Timestamp,
    /// Creation.
    pub btime: Timestamp,
    /// Change counter.
    pub change: u64,
    /// The parent of a directory; 0 for everything else.
    pub parent: InodeNo,
    /// The number of its extended attributes.
    pub xattrs: u32,
    /// Its chattr marks, and flags of its attributes.
    pub flags: InodeFlags,
    /// For a regular file: the part of its contents that is durable.
    pub written: Written,
    /// The change counter of the last change that took a name from it; 0 if none did.
    pub name_lost: u64,
}

impl InodeRecord {
    /// The attributes as clients get them.
    pub fn attr(&self, ino: InodeNo) -> Attr {
        Attr {
            ino,
            kind: self.kind,
            mode: self.mode,
            nlink: self.nlink,
            uid: self.uid,
            gid: self.gid,
            rdev: self.rdev,
            size: self.size,
            allocated_bytes: self.allocated_pages.saturating_mul(PAGE_SIZE_U64),
            atime: self.atime,
            mtime: self.mtime,
            ctime: self.ctime,
            btime: self.btime,
            change: self.change,
            flags: self.flags,
        }
    }

    /// Whether it is a directory.
    pub fn is_directory(&self) -> bool {
        self.kind == FileKind::Directory
    }
}

/// One entry of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct EntryRecord<'a> {
    /// Its slot in the bucket, for good.
    pub slot: u8,
    /// The inode that it names.
    pub ino: InodeNo,
    /// Type of that inode.
    pub kind: FileKind,
    /// Name.
    #[serde(borrow)]
    pub name: &'a [u8],
}

/// The entries of one directory whose names have one hash, in slot order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct BucketRecord<'a> {
    /// The entries; never empty in the store, because an empty bucket is removed.
    #[serde(borrow)]
    pub entries: Vec<EntryRecord<'a>>,
}

/// An extent; its first file page is in its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ExtentRecord {
    /// Its first pool page.
    pub pool_page: PoolPage,
    /// The number of pages; never 0.
    pub len_pages: u64,
    /// Whether the pages have bytes of the file.
    pub state: ExtentState,
}

impl From<Extent> for ExtentRecord {
    fn from(extent: Extent) -> Self {
        Self { pool_page: extent.pool_page, len_pages: extent.len_pages, state: extent.state }
    }
}

impl ExtentRecord {
    /// The extent with its place in the file.
    pub(super) fn at(&self, file_page: FilePage) -> Extent {
        Extent { file_page, pool_page: self.pool_page, len_pages: self.len_pages, state: self.state }
    }

    /// Parses a value, and checks it against the page in its key.
    ///
    /// # Errors
    /// [`RecordError`].
    pub(super) fn parse(file_page: FilePage, value: &[u8]) -> Result<Self, RecordError> {
        let record: Self = parse(value)?;
        let file_end = file_page.0.checked_add(record.len_pages);
        let pool_end = record.pool_page.0.checked_add(record.len_pages);
        match (record.len_pages, file_end, pool_end) {
            (0, ..) => Err(RecordError::Impossible("an extent of no pages")),
            (_, Some(_), Some(_)) => Ok(record),
            _ => Err(RecordError::Impossible("an extent past the last page")),
        }
    }
}

/// The first piece of an extended attribute's value. The other pieces are bare bytes after the version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct XattrHead<'a> {
    /// Length of the whole value.
    pub len_bytes: u32,
    /// The value's first bytes.
    #[serde(borrow)]
    pub bytes: &'a [u8],
}

/// A symlink's target, an orphan's record (empty), or an image of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct BytesRecord<'a> {
    /// The bytes.
    #[serde(borrow)]
    pub bytes: &'a [u8],
}

/// The identity of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SuperRecord {
    /// [`FORMAT_VERSION`].
    pub format_version: u32,
    /// The pool's identity.
    pub uuid: [u8; 16],
    /// Key of the name hash.
    pub hash_key: HashKey,
    /// When it was formatted.
    pub created: Timestamp,
}

/// A client that is remembered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientRecord {
    /// Whether it has a session: after a restart it may reclaim what it had open.
    pub has_session: bool,
    /// The peer of the client; no other peer can attach as it.
    pub owner: PeerKey,
}

/// The last request of a slot that changed something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotRecord {
    /// Its sequence number.
    pub seq: u64,
    /// Its answer.
    pub answer: Answer,
}

/// The findings of a scrub.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassFigures {
    /// Pages read.
    pub pages: u64,
    /// Pages whose bytes did not match their sums.
    pub rotten: u64,
    /// Pages among these that were written again from their frames.
    pub healed: u64,
    /// Pages the device could not read.
    pub unreadable: u64,
}

/// The state of the scrub.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubRecord {
    /// When the last pass began, in seconds since the epoch.
    pub began_secs: i64,
    /// The next pool page of a pass that has not reached its end.
    pub position: Option<u64>,
    /// The findings of that pass so far, or of the last one.
    pub current: PassFigures,
    /// The findings of the last whole pass.
    pub last: Option<PassFigures>,
    /// When that pass ended, in seconds since the epoch.
    pub last_ended_secs: i64,
}

/// A number that is stored by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CounterRecord(pub u64);

/// The bytes of a record.
pub(super) fn encode<T: Serialize>(record: &T) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(96);
    bytes.push(RECORD_VERSION);
    // The types here have known lengths and no maps, and the vector grows, so this cannot fail.
    postcard::to_extend(record, bytes).expect("records always serialise")
}

/// Parses a record whose fields need no further check. All bytes must be used.
///
/// # Errors
/// [`RecordError`].
pub(super) fn parse<'a, T: Deserialize<'a>>(value: &'a [u8]) -> Result<T, RecordError> {
    match value.split_first() {
        Some((&RECORD_VERSION, body)) => match postcard::take_from_bytes(body) {
            Ok((record, [])) => Ok(record),
            _ => Err(RecordError::Malformed),
        },
        Some((version, _)) => Err(RecordError::Version(*version)),
        None => Err(RecordError::Malformed),
    }
}

/// Parses an inode.
///
/// # Errors
/// [`RecordError`].
pub(super) fn parse_inode(value: &[u8]) -> Result<InodeRecord, RecordError> {
    let record: InodeRecord = parse(value)?;
    if record.mode > 0o7777 {
        return Err(RecordError::Impossible("mode bits"));
    }
    if !record.flags.is_known() {
        return Err(RecordError::Impossible("marks"));
    }
    if [record.atime, record.mtime, record.ctime, record.btime].iter().any(|time| !is_valid_time(*time)) {
        return Err(RecordError::Impossible("nanoseconds"));
    }
    if record.is_directory() != (record.parent.0 != 0) {
        return Err(RecordError::Impossible("a directory without parent or a parent without directory"));
    }
    Ok(record)
}

/// Parses a bucket.
///
/// # Errors
/// [`RecordError`].
pub(super) fn parse_bucket(value: &[u8]) -> Result<BucketRecord<'_>, RecordError> {
    let record: BucketRecord<'_> = parse(value)?;
    let in_order = record.entries.windows(2).all(|pair| pair[0].slot < pair[1].slot);
    let in_range = record.entries.last().is_some_and(|last| usize::from(last.slot) < SLOTS_PER_BUCKET);
    if !in_order || !in_range {
        return Err(RecordError::Impossible("slots"));
    }
    if record.entries.iter().any(|entry| name::check(entry.name).is_err()) {
        return Err(RecordError::Impossible("a name that cannot be"));
    }
    Ok(record)
}

/// Whether the nanoseconds are in range.
pub(super) fn is_valid_time(time: Timestamp) -> bool {
    time.nanos < 1_000_000_000
}

#[cfg(test)]
mod tests {
    use super::super::written::Cut;
    use super::*;
    use proptest::prelude::*;

    fn golden<T: Serialize + for<'a> Deserialize<'a> + PartialEq + std::fmt::Debug>(record: T, bytes: &[u8]) {
        assert_eq!(encode(&record), bytes);
        assert_eq!(parse::<T>(bytes), Ok(record));
    }

    fn inode() -> InodeRecord {
        let time = |secs| Timestamp { secs, nanos: 1 };
        let mut written = Written::default();
        written.cover(15);
        written.cut(Cut { size: 16, change: 17 });
        InodeRecord {
            kind: FileKind::Directory,
            mode: 0o755,
            nlink: 2,
            uid: 3,
            gid: 4,
            rdev: 5,
            size: 6,
            allocated_pages: 7,
            atime: time(8),
            mtime: time(-9),
            ctime: time(10),
            btime: time(11),
            change: 12,
            parent: InodeNo(13),
            xattrs: 14,
            flags: InodeFlags::ACCESS_ACL,
            written,
            name_lost: 18,
        }
    }

    #[test]
    fn golden_bytes() {
        let bytes = [
            1, // version
            1, // kind: directory
            0xed, 3, // mode 0755, varint
            2, 3, 4, 5, 6, 7, // nlink, uid, gid, rdev, size, allocated
            16, 1, 17, 1, 20, 1, 22, 1, // times: zigzag seconds, nanoseconds
            12, 13, 14, // change, parent, xattrs
            0x80, 2, // marks
            15, 1, 16, 17, 0, 0, 0, 0,  // written: until, cut, nothing restored
            18, // the last change that took a name
        ];
        golden(inode(), &bytes);
        golden(
            ExtentRecord { pool_page: PoolPage(300), len_pages: 2, state: ExtentState::Unwritten },
            &[1, 0xac, 2, 2, 1],
        );
        golden(ClientRecord { has_session: true, owner: PeerKey::User(300) }, &[1, 1, 0, 0xac, 2]);
        let machine = PeerKey::Machine([10, 0, 0, 1].into());
        golden(ClientRecord { has_session: false, owner: machine }, &[1, 0, 1, 0, 10, 0, 0, 1]);
        golden(ClientRecord { has_session: true, owner: PeerKey::Key("k".into()) }, &[1, 1, 2, 1, b'k']);
        golden(CounterRecord(128), &[1, 0x80, 1]);
        let current = PassFigures { pages: 128, rotten: 2, healed: 3, unreadable: 4 };
        let last = Some(PassFigures { pages: 5, rotten: 6, healed: 7, unreadable: 8 });
        golden(
            ScrubRecord { began_secs: 1, position: Some(300), current, last, last_ended_secs: 3 },
            &[1, 2, 1, 0xac, 2, 0x80, 1, 2, 3, 4, 1, 5, 6, 7, 8, 6],
        );
        golden(
            SuperRecord {
                format_version: 1,
                uuid: [0xaa; 16],
                hash_key: HashKey([0xbb; 16]),
                created: Timestamp { secs: 1, nanos: 2 },
            },
            &[&[1, 1][..], &[0xaa; 16], &[0xbb; 16], &[2, 2]].concat(),
        );
        let bucket = BucketRecord {
            entries: vec![
                EntryRecord { slot: 0, ino: InodeNo(5), kind: FileKind::File, name: b"ab" },
                EntryRecord { slot: 3, ino: InodeNo(6), kind: FileKind::Symlink, name: b"c" },
            ],
        };
        let bytes = [1, 2, 0, 5, 0, 2, b'a', b'b', 3, 6, 2, 1, b'c'];
        assert_eq!(encode(&bucket), bytes);
        assert_eq!(parse_bucket(&bytes), Ok(bucket));
        assert_eq!(encode(&BytesRecord { bytes: b"to" }), [1, 2, b't', b'o']);
        assert_eq!(encode(&XattrHead { len_bytes: 9, bytes: b"v" }), [1, 9, 1, b'v']);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        assert_eq!(parse::<CounterRecord>(&[]), Err(RecordError::Malformed));
        assert_eq!(parse::<CounterRecord>(&[2, 1]), Err(RecordError::Version(2)));
        assert_eq!(parse::<CounterRecord>(&[1, 1, 1]), Err(RecordError::Malformed));
        let bad_mode = InodeRecord { mode: 0o10000, ..inode() };
        assert!(matches!(parse_inode(&encode(&bad_mode)), Err(RecordError::Impossible(_))));
        let bad_marks = InodeRecord { flags: InodeFlags(1 << 4), ..inode() };
        assert!(matches!(parse_inode(&encode(&bad_marks)), Err(RecordError::Impossible(_))));
        let bad_time = InodeRecord { mtime: Timestamp { secs: 0, nanos: 1_000_000_000 }, ..inode() };
        assert!(matches!(parse_inode(&encode(&bad_time)), Err(RecordError::Impossible(_))));
        let no_parent = InodeRecord { parent: InodeNo(0), ..inode() };
        assert!(matches!(parse_inode(&encode(&no_parent)), Err(RecordError::Impossible(_))));
        let entry = |slot| EntryRecord { slot, ino: InodeNo(5), kind: FileKind::File, name: b"n" };
        for slots in [&[1, 1][..], &[2, 1], &[128], &[]] {
            let entries = slots.iter().map(|slot| entry(*slot)).collect();
            assert!(parse_bucket(&encode(&BucketRecord { entries })).is_err(), "{slots:?}");
        }
        for (page, pool, len) in [(0, 0, 0), (u64::MAX, 0, 1), (0, u64::MAX, 1)] {
            let record =
                ExtentRecord { pool_page: PoolPage(pool), len_pages: len, state: ExtentState::Written };
            assert!(ExtentRecord::parse(FilePage(page), &encode(&record)).is_err());
        }
    }

    proptest! {
        #[test]
        fn parsing_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = parse_inode(&bytes);
            let _ = parse_bucket(&bytes);
            let _ = ExtentRecord::parse(FilePage(u64::MAX), &bytes);
            let _ = parse::<SuperRecord>(&bytes);
            let _ = parse::<XattrHead<'_>>(&bytes);
        }
    }
}
