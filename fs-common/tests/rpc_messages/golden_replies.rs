//! Every reply beside its bytes. `golden_requests` describes the format.

use crate::golden_requests::REGION;
use crate::{joined, room};
use cuttlefs_common::attr::{Attr, FileKind, InodeFlags, Timestamp};
use cuttlefs_common::ids::{FileKey, FilePage, FileSlot, InodeNo, PoolPage, Rkey};
use cuttlefs_common::locks::{Lock, LockMode, LockOwner, LockRange, LockSpace, WaitId};
use cuttlefs_common::pool_uuid::PoolUuid;
use cuttlefs_common::rdma::RemoteRange;
use cuttlefs_common::region::{Extent, ExtentState, MagicPattern};
use cuttlefs_common::rpc::{
    Attached, BlockingLock, CHANGES_MAX, DirEntry, HEADER_LEN, Layout, OneSidedReads, OpenTicket, Opened,
    RECLAIM_FILES_MAX, RECLAIM_LOCKS_MAX, ReclaimLock, Reply, Request, SETTLED_LOCKS_MAX, Sampling,
    SettledLock, Space, TestedLock,
};
use cuttlefs_common::status::Status;

/// How many kinds of reply there are.
const KINDS: usize = 23;

/// The variant's number. There is no wildcard, so a new kind does not compile until it is listed here.
fn kind(reply: &Reply<'_>) -> usize {
    match reply {
        Reply::Done => 0,
        Reply::Attached(_) => 1,
        Reply::Reclaimed(_) => 2,
        Reply::Attr(_) => 3,
        Reply::Opened(_) => 4,
        Reply::Bytes(_) => 5,
        Reply::Entries { .. } => 6,
        Reply::Layout(_) => 7,
        Reply::Fetched { .. } => 8,
        Reply::Written { .. } => 9,
        Reply::Offset(_) => 10,
        Reply::Copied { .. } => 11,
        Reply::Space(_) => 12,
        Reply::Status(_) => 13,
        Reply::Queued => 14,
        Reply::Settled(_) => 15,
        Reply::Tested(_) => 16,
        Reply::LocksReclaimed(_) => 17,
        Reply::Restored { .. } => 18,
        Reply::Bound(_) => 19,
        Reply::Changes(_) => 20,
        Reply::Moved { .. } => 21,
        Reply::Old(_) => 22,
    }
}

const ATTR: Attr = Attr {
    ino: InodeNo(9),
    kind: FileKind::Socket,
    mode: 0o644,
    nlink: 1,
    uid: 2,
    gid: 3,
    rdev: 4,
    size: 5000,
    allocated_bytes: 8192,
    atime: Timestamp { secs: -1, nanos: 999_999_999 },
    mtime: Timestamp { secs: 1, nanos: 0 },
    ctime: Timestamp { secs: 2, nanos: 0 },
    btime: Timestamp { secs: i64::MIN, nanos: 0 },
    change: 6,
    flags: InodeFlags(0x102),
};

fn attr_bytes() -> Vec<u8> {
    joined(&[
        &[9],                                                          // inode
        &[6],                                                          // kind
        &[0xa4, 0x03],                                                 // mode
        &[1, 2, 3, 4],                                                 // links, owner, group, device
        &[0x88, 0x27],                                                 // size
        &[0x80, 0x40],                                                 // allocated
        &[1, 0xff, 0x93, 0xeb, 0xdc, 3],                               // atime
        &[2, 0],                                                       // mtime
        &[4, 0],                                                       // ctime
        &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 0], // btime
        &[6],                                                          // change counter
        &[0x82, 2],                                                    // marks
    ])
}

const OPENED: Opened =
    Opened { filekey: FileKey(300), slot: Some(FileSlot(2)), attr: ATTR, ticket: OpenTicket(301) };
const TICKET: &[u8] = &[0xad, 2];

fn cases() -> Vec<(Reply<'static>, Vec<u8>)> {
    let attr = attr_bytes();
    let magic: [u8; 32] = std::array::from_fn(|index| 0xe0 + index as u8);
    let extent = |file_page, pool_page, len_pages, state| Extent {
        file_page: FilePage(file_page),
        pool_page: PoolPage(pool_page),
        len_pages,
        state,
    };
    let named = |attr| DirEntry { cookie: 128, ino: InodeNo(9), kind: FileKind::File, name: b"\xfff", attr };
    vec![
        (Reply::Done, vec![0]),
        (
            Reply::Attached(Attached {
                server_epoch: 1,
                pool: PoolUuid(*b"the pool's UUID."),
                session: 2,
                lease_ms: 30_000,
                slots: 64,
                root: InodeNo::ROOT,
                magic: MagicPattern::new(magic),
                read_only: true,
                clean_predecessor: Some(3),
                one_sided: OneSidedReads::Off,
                sampling: Some(Sampling { unit_pages: 256, period_ms: 1000 }),
                durable_answers: true,
                windows: Some([1, 2, 3].map(|n| RemoteRange {
                    rkey: Rkey(n),
                    first_address: 0,
                    len: 1000 * u64::from(n),
                })),
                page_window: Some(RemoteRange { rkey: Rkey(4), first_address: 5, len: 6 }),
            }),
            joined(&[
                &[1],
                &[1],
                b"the pool's UUID.",
                &[2],
                &[0xb0, 0xea, 1],
                &[64],
                &[1],
                &magic,
                &[1],
                &[1, 3],
                &[2],
                &[1, 0x80, 2, 0xe8, 7],
                &[1],
                &[1, 1, 0, 0xe8, 7, 2, 0, 0xd0, 0xf, 3, 0, 0xb8, 0x17],
                &[1, 4, 5, 6],
            ]),
        ),
        (
            Reply::Reclaimed(vec![None, Some(OPENED)]),
            joined(&[&[2], &[2], &[0], &[1, 0xac, 2, 1, 2], &attr, TICKET]),
        ),
        (Reply::Attr(ATTR), joined(&[&[3], &attr])),
        (Reply::Opened(OPENED), joined(&[&[4], &[0xac, 2], &[1, 2], &attr, TICKET])),
        (Reply::Opened(Opened { slot: None, ..OPENED }), joined(&[&[4], &[0xac, 2], &[0], &attr, TICKET])),
        (Reply::Bytes(b"user.a\0"), joined(&[&[5], b"\x07user.a\0"])),
        (Reply::Entries { entries: Vec::new(), end: true }, vec![6, 0, 1]),
        (
            Reply::Entries { entries: vec![named(None), named(Some(ATTR))], end: false },
            joined(&[
                &[6, 2],
                &[0x80, 1, 9, 0, 2, 0xff, b'f', 0],
                &[0x80, 1, 9, 0, 2, 0xff, b'f', 1],
                &attr,
                &[0],
            ]),
        ),
        (
            Reply::Layout(Layout {
                generation: 7,
                extents: vec![
                    extent(0, 10, 2, ExtentState::Written),
                    extent(5, 300, 1, ExtentState::Unwritten),
                ],
                known_until: Some(FilePage(6)),
            }),
            joined(&[&[7], &[7], &[2], &[0, 10, 2, 0], &[5, 0xac, 2, 1, 1], &[1, 6]]),
        ),
        (Reply::Layout(Layout { generation: 0, extents: Vec::new(), known_until: None }), vec![7, 0, 0, 0]),
        (Reply::Fetched { valid_len: 3, inline: b"abc" }, joined(&[&[8], &[3], b"\x03abc"])),
        (
            Reply::Written { offset: 5, len: 4096, size: 5000, change: 7 },
            joined(&[&[9], &[5], &[0x80, 0x20], &[0x88, 0x27], &[7]]),
        ),
        (Reply::Offset(5), vec![10, 5]),
        (Reply::Copied { len: 5, change: 6 }, vec![11, 5, 6]),
        (
            Reply::Space(Space { pool_pages: 300, free_pages: 2, inodes: 1, free_inodes: 3 }),
            joined(&[&[12], &[0xac, 2], &[2], &[1], &[3]]),
        ),
        (Reply::Status("{}"), joined(&[&[13], b"\x02{}"])),
        (Reply::Queued, vec![14]),
        (
            Reply::Settled(vec![
                SettledLock { wait: WaitId(300), result: Ok(()) },
                // A status is encoded as its index in the list of statuses.
                SettledLock { wait: WaitId(1), result: Err(Status::Deadlock) },
            ]),
            joined(&[&[15], &[2], &[0xac, 0x02, 0], &[1, 1, 24]]),
        ),
        (Reply::Tested(TestedLock::Free), vec![16, 0]),
        (
            Reply::Tested(TestedLock::Blocked(BlockingLock {
                range: LockRange { first: 5, last: 300 },
                mode: LockMode::Exclusive,
                pid: 129,
            })),
            joined(&[&[16], &[1], &[5, 0xac, 0x02], &[1], &[0x81, 0x01]]),
        ),
        (Reply::Tested(TestedLock::Unknown), vec![16, 2]),
        (Reply::LocksReclaimed(vec![true, false]), vec![17, 2, 1, 0]),
        (Reply::Restored { lost: true }, vec![18, 1]),
        (Reply::Bound(REGION), joined(&[&[19], &[88], &REGION.to_bytes()])),
        (Reply::Changes(vec![Some(300), None]), vec![20, 2, 1, 0xac, 0x02, 0]),
        (Reply::Moved { pages: 5, next: Some(FilePage(300)) }, vec![21, 5, 1, 0xac, 0x02]),
        (Reply::Old(300), vec![22, 0xac, 0x02]),
    ]
}

/// The server binds filekeys before it encodes the reply: if the reply did not fit, no client would know those filekeys.
#[test]
fn the_longest_answer_to_a_reclaim_fits_one_message() {
    let time = Timestamp { secs: i64::MIN, nanos: u32::MAX };
    let attr = Attr {
        ino: InodeNo(u64::MAX),
        mode: u16::MAX,
        nlink: u32::MAX,
        uid: u32::MAX,
        gid: u32::MAX,
        rdev: u32::MAX,
        size: u64::MAX,
        allocated_bytes: u64::MAX,
        atime: time,
        mtime: time,
        ctime: time,
        btime: time,
        change: u64::MAX,
        flags: InodeFlags(u32::MAX),
        ..ATTR
    };
    let (filekey, slot, ticket) = (FileKey(u64::MAX), Some(FileSlot(u32::MAX)), OpenTicket(u64::MAX));
    let opened = Opened { filekey, slot, attr, ticket };
    let reply = Reply::Reclaimed(vec![Some(opened); RECLAIM_FILES_MAX]);
    assert!(reply.encode(&mut room()[HEADER_LEN..]).is_ok());
    let reply = Reply::Changes(vec![Some(u64::MAX); CHANGES_MAX]);
    assert!(reply.encode(&mut room()[HEADER_LEN..]).is_ok());
    let request = Request::Changes { inodes: vec![InodeNo(u64::MAX); CHANGES_MAX] };
    assert!(request.encode(&mut room()[HEADER_LEN..]).is_ok());
}

/// A client is told only once that a wait has ended, so the reply must fit into what a slot keeps.
#[test]
fn the_longest_lists_of_locks_fit() {
    let settled = SettledLock { wait: WaitId(u64::MAX), result: Err(Status::Cancelled) };
    let reply = Reply::Settled(vec![settled; SETTLED_LOCKS_MAX]);
    assert!(HEADER_LEN + reply.encode_to_vec().expect("it fits").len() <= 4096);
    let lock = Lock {
        space: LockSpace::Whole,
        owner: LockOwner(u64::MAX),
        range: LockRange { first: u64::MAX, last: u64::MAX },
        mode: LockMode::Exclusive,
        pid: u32::MAX,
    };
    let locks = vec![ReclaimLock { ino: InodeNo(u64::MAX), lock }; RECLAIM_LOCKS_MAX];
    assert!(Request::ReclaimLocks { locks }.encode(&mut room()[HEADER_LEN..]).is_ok());
}

#[test]
fn every_reply_has_these_bytes() {
    let mut seen = [false; KINDS];
    let mut buffer = room();
    for (reply, golden) in cases() {
        let len = reply.encode(&mut buffer).expect("it fits");
        assert_eq!(&buffer[..len], golden, "{reply:?}");
        assert_eq!(Reply::parse(&golden).as_ref(), Ok(&reply));
        assert_eq!(usize::from(golden[0]), kind(&reply), "{reply:?}");
        seen[kind(&reply)] = true;
    }
    assert!(seen.iter().all(|seen| *seen), "kinds without golden bytes: {seen:?}");
}
