//! Every request beside its bytes. A change here is a change of the protocol: it needs a new `PROTOCOL_VERSION`.
//!
//! The format is postcard's: the variant's number, then the fields in order; integers over eight bits as varints
//! (seven bits a byte, low ones first), signed ones zigzag; `Option` as 0 or 1 and the value; bytes, text and lists
//! behind their count.

use crate::{joined, room};
use cuttlefs_common::attr::{FileKind, InodeFlags, SetAttr, SetTime, Timestamp};
use cuttlefs_common::ids::{ClientId, FileKey, FilePage, InodeNo, Rkey, SlotIndex};
use cuttlefs_common::locks::{LOCK_END, Lock, LockMode, LockOwner, LockRange, LockSpace, WaitId};
use cuttlefs_common::rdma::FileAtomic;
use cuttlefs_common::region::PageSet;
use cuttlefs_common::rpc::{
    Allocate, NewNode, OpenBy, OpenTicket, Payload, REGION_KEY_LEN, Reclaim, ReclaimLock, RegionKey,
    RemoteBuffer, RenameMode, Request, Restored, Rights, SeekFor, SessionSecret, Sink, SyncScope, Unanswered,
    XattrMode,
};

/// How many kinds of request there are.
const KINDS: usize = 49;
const READ_ONLY: Rights = Rights { read: true, write: false };
const BUFFER: RemoteBuffer = RemoteBuffer { rkey: Rkey(7), offset: 4096, len: 1 << 20 };

/// The variant's number. There is no wildcard, so a new kind does not compile until it is listed here.
fn kind(request: &Request<'_>) -> usize {
    match request {
        Request::Attach { .. } => 0,
        Request::Heartbeat => 1,
        Request::Detach => 2,
        Request::Reclaim { .. } => 3,
        Request::Lookup { .. } => 4,
        Request::GetAttr { .. } => 5,
        Request::SetAttr { .. } => 6,
        Request::Make { .. } => 7,
        Request::Create { .. } => 8,
        Request::Link { .. } => 9,
        Request::Unlink { .. } => 10,
        Request::Rmdir { .. } => 11,
        Request::Rename { .. } => 12,
        Request::ReadLink { .. } => 13,
        Request::ReadDir { .. } => 14,
        Request::Open { .. } => 15,
        Request::Close { .. } => 16,
        Request::Layout { .. } => 17,
        Request::Fetch { .. } => 18,
        Request::Write { .. } => 19,
        Request::Sync(_) => 20,
        Request::Allocate { .. } => 21,
        Request::Seek { .. } => 22,
        Request::CopyRange { .. } => 23,
        Request::GetXattr { .. } => 24,
        Request::ListXattr { .. } => 25,
        Request::SetXattr { .. } => 26,
        Request::RemoveXattr { .. } => 27,
        Request::StatFs => 28,
        Request::Status => 29,
        Request::Recovered { .. } => 30,
        Request::ShareCounters { .. } => 31,
        Request::SetLock { .. } => 32,
        Request::Unlock { .. } => 33,
        Request::TestLock { .. } => 34,
        Request::AwaitLocks { .. } => 35,
        Request::CancelLock { .. } => 36,
        Request::ReclaimLocks { .. } => 37,
        Request::Restore { .. } => 38,
        Request::CreateNameless { .. } => 39,
        Request::Bind { .. } => 40,
        Request::BindAgain { .. } => 41,
        Request::Unbind { .. } => 42,
        Request::OpenRegion { .. } => 43,
        Request::GrantWrite { .. } => 44,
        Request::ReturnGrant { .. } => 45,
        Request::Changes { .. } => 46,
        Request::Defragment { .. } => 47,
        Request::Atomic { .. } => 48,
    }
}

fn cases() -> Vec<(Request<'static>, Vec<u8>)> {
    let mut cases = connection();
    cases.extend(names());
    cases.extend(files());
    cases.extend(attributes());
    cases.extend(locks());
    cases.extend(restores());
    cases.extend(regions());
    cases
}

fn connection() -> Vec<(Request<'static>, Vec<u8>)> {
    vec![
        (
            Request::Attach { secret: SessionSecret([0x5e; 16]), label: "pc:/m", subtree: b"a/b" },
            joined(&[&[0], &[0x5e; 16], b"\x05pc:/m", b"\x03a/b"]),
        ),
        (Request::Heartbeat, vec![1]),
        (Request::Detach, vec![2]),
        (
            Request::Reclaim {
                files: vec![
                    Reclaim { ino: InodeNo(5), rights: READ_ONLY, ticket: None },
                    Reclaim {
                        ino: InodeNo(200),
                        rights: Rights { read: false, write: true },
                        ticket: Some(OpenTicket(300)),
                    },
                ],
            },
            joined(&[&[3], &[2], &[5, 1, 0, 0], &[0xc8, 0x01, 0, 1, 1, 0xac, 0x02]]),
        ),
        (Request::StatFs, vec![28]),
        (Request::Status, vec![29]),
        (Request::Recovered { unanswered: vec![] }, vec![30, 0]),
        (
            Request::Recovered {
                unanswered: vec![
                    Unanswered { slot: SlotIndex(0), seq: 1 },
                    Unanswered { slot: SlotIndex(61), seq: 300 },
                ],
            },
            joined(&[&[30], &[2], &[0, 1], &[61, 0xac, 0x02]]),
        ),
        (
            Request::ShareCounters { buffer: BUFFER },
            joined(&[&[31], &[7], &[0x80, 0x20], &[0x80, 0x80, 0x40]]),
        ),
    ]
}

fn names() -> Vec<(Request<'static>, Vec<u8>)> {
    let make = |node| Request::Make { parent: InodeNo(1), name: b"n", node, mode: 0o755 };
    let rename = |mode| Request::Rename {
        parent: InodeNo(1),
        name: b"old",
        new_parent: InodeNo(2),
        new_name: b"new",
        mode,
    };
    let renamed = |mode: u8| joined(&[&[12], &[1], b"\x03old", &[2], b"\x03new", &[mode]]);
    vec![
        (Request::Lookup { parent: InodeNo(1), name: b"a\xff" }, joined(&[&[4], &[1], b"\x02a\xff"])),
        // 0o755 = 0x1ed = 0b11_1101101
        (make(NewNode::File), joined(&[&[7], &[1], b"\x01n", &[0], &[0xed, 0x03]])),
        (make(NewNode::Directory), joined(&[&[7], &[1], b"\x01n", &[1], &[0xed, 0x03]])),
        (make(NewNode::Symlink(b"../t")), joined(&[&[7], &[1], b"\x01n", b"\x02\x04../t", &[0xed, 0x03]])),
        (
            make(NewNode::Special { kind: FileKind::CharDevice, rdev: 0x501 }),
            joined(&[&[7], &[1], b"\x01n", &[3, 4, 0x81, 0x0a], &[0xed, 0x03]]),
        ),
        (
            Request::Create {
                parent: InodeNo(1),
                name: b"f",
                mode: 0o644,
                exclusive: true,
                rights: Rights { read: true, write: true },
            },
            joined(&[&[8], &[1], b"\x01f", &[0xa4, 0x03], &[1], &[1, 1]]),
        ),
        (
            Request::CreateNameless {
                parent: InodeNo(1),
                mode: 0o644,
                rights: Rights { read: false, write: true },
            },
            joined(&[&[39], &[1], &[0xa4, 0x03], &[0, 1]]),
        ),
        (
            Request::Link { ino: InodeNo(9), parent: InodeNo(1), name: b"l" },
            joined(&[&[9], &[9], &[1], b"\x01l"]),
        ),
        (Request::Unlink { parent: InodeNo(1), name: b"f" }, joined(&[&[10], &[1], b"\x01f"])),
        (Request::Rmdir { parent: InodeNo(1), name: b"d" }, joined(&[&[11], &[1], b"\x01d"])),
        (rename(RenameMode::Replace), renamed(0)),
        (rename(RenameMode::NoReplace), renamed(1)),
        (rename(RenameMode::Exchange), renamed(2)),
        (rename(RenameMode::Whiteout), renamed(3)),
        (rename(RenameMode::NoReplaceWhiteout), renamed(4)),
        (Request::ReadLink { ino: InodeNo(9) }, vec![13, 9]),
        (
            Request::ReadDir { ino: InodeNo(1), cookie: u64::MAX, max_bytes: 4096, plus: true },
            joined(&[
                &[14],
                &[1],
                &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01],
                &[0x80, 0x20],
                &[1],
            ]),
        ),
    ]
}

fn files() -> Vec<(Request<'static>, Vec<u8>)> {
    let mut third_page = PageSet::none(3);
    third_page.insert(2);
    let fetch = |sink| Request::Fetch {
        filekey: FileKey(6),
        offset: 8192,
        len: 9000,
        pages: third_page.clone(),
        sink,
    };
    let fetched = |sink: &[u8]| joined(&[&[18], &[6], &[0x80, 0x40], &[0xa8, 0x46], &[1, 0x04], sink]);
    let remote: &[u8] = &[7, 0x80, 0x20, 0x80, 0x80, 0x40];
    let write = |payload, append| Request::Write { filekey: FileKey(6), offset: 1, append, payload };
    let allocate = |how| Request::Allocate { filekey: FileKey(6), offset: 1, len: 2, how };
    vec![
        (
            Request::Open { ino: InodeNo(9), rights: READ_ONLY, truncate: false, by: OpenBy::Number },
            vec![15, 9, 1, 0, 0, 0],
        ),
        (
            Request::Open {
                ino: InodeNo(9),
                rights: READ_ONLY,
                truncate: true,
                by: OpenBy::Name { told: 300 },
            },
            vec![15, 9, 1, 0, 1, 1, 0xac, 2],
        ),
        (
            Request::Close { filekeys: vec![FileKey(6), FileKey(u64::from(u32::MAX))] },
            joined(&[&[16], &[2], &[6], &[0xff, 0xff, 0xff, 0xff, 0x0f]]),
        ),
        (
            Request::Layout { filekey: FileKey(6), first_page: FilePage(3), max_extents: 64 },
            vec![17, 6, 3, 64],
        ),
        (fetch(Sink::Inline), fetched(&[0])),
        (fetch(Sink::Push(BUFFER)), fetched(&[&[1], remote].concat())),
        (write(Payload::Inline(b"xyz"), true), joined(&[&[19], &[6], &[1], &[1], b"\x00\x03xyz"])),
        (write(Payload::Pull(BUFFER), false), joined(&[&[19], &[6], &[1], &[0], &[1], remote])),
        (Request::Sync(SyncScope::Inode(InodeNo(9))), vec![20, 0, 9]),
        (Request::Sync(SyncScope::InodeContents(InodeNo(9))), vec![20, 1, 9]),
        (Request::Sync(SyncScope::All), vec![20, 2]),
        (allocate(Allocate::Reserve { keep_size: true }), vec![21, 6, 1, 2, 0, 1]),
        (allocate(Allocate::PunchHole), vec![21, 6, 1, 2, 1]),
        (allocate(Allocate::ZeroRange { keep_size: false }), vec![21, 6, 1, 2, 2, 0]),
        (Request::Seek { filekey: FileKey(6), offset: 5, seek: SeekFor::Data }, vec![22, 6, 5, 0]),
        (Request::Seek { filekey: FileKey(6), offset: 5, seek: SeekFor::Hole }, vec![22, 6, 5, 1]),
        (
            Request::CopyRange { from: FileKey(6), from_offset: 1, to: FileKey(8), to_offset: 2, len: 3 },
            vec![23, 6, 1, 8, 2, 3],
        ),
    ]
}

fn attributes() -> Vec<(Request<'static>, Vec<u8>)> {
    let set_xattr = |mode| Request::SetXattr { ino: InodeNo(9), name: b"user.a", value: b"\x00v", mode };
    let set = |mode: u8| joined(&[&[26], &[9], b"\x06user.a", b"\x02\x00v", &[mode]]);
    vec![
        (Request::GetAttr { ino: InodeNo(9) }, vec![5, 9]),
        (Request::SetAttr { ino: InodeNo(9), set: SetAttr::default() }, vec![6, 9, 0, 0, 0, 0, 0, 0, 0, 0]),
        (
            Request::SetAttr {
                ino: InodeNo(9),
                set: SetAttr {
                    mode: Some(0o644),
                    uid: Some(1),
                    gid: Some(2),
                    size: Some(3),
                    atime: Some(SetTime::Now),
                    // One second before the epoch: zigzag 1.
                    mtime: Some(SetTime::At(Timestamp { secs: -1, nanos: 4 })),
                    ctime: Some(Timestamp { secs: 1, nanos: 5 }),
                    flags: Some(InodeFlags::APPEND_ONLY),
                },
            },
            joined(&[
                &[6],
                &[9],
                &[1, 0xa4, 0x03],
                &[1, 1],
                &[1, 2],
                &[1, 3],
                &[1, 0],
                &[1, 1, 1, 4],
                &[1, 2, 5],
                &[1, 2],
            ]),
        ),
        (Request::GetXattr { ino: InodeNo(9), name: b"user.a" }, joined(&[&[24], &[9], b"\x06user.a"])),
        (Request::ListXattr { ino: InodeNo(9) }, vec![25, 9]),
        (set_xattr(XattrMode::Any), set(0)),
        (set_xattr(XattrMode::Create), set(1)),
        (set_xattr(XattrMode::Replace), set(2)),
        (Request::RemoveXattr { ino: InodeNo(9), name: b"user.a" }, joined(&[&[27], &[9], b"\x06user.a"])),
    ]
}

fn locks() -> Vec<(Request<'static>, Vec<u8>)> {
    let range = LockRange { first: 5, last: LOCK_END };
    let lock = |space, mode| Lock { space, owner: LockOwner(300), range, mode, pid: 129 };
    // 2^63 - 1 in nine groups of seven bits.
    let range: &[u8] = &[5, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f];
    let locked = |space: u8, mode: u8| joined(&[&[space], &[0xac, 0x02], range, &[mode], &[0x81, 0x01]]);
    let whole = lock(LockSpace::Whole, LockMode::Exclusive);
    let bytes = lock(LockSpace::Ranges, LockMode::Shared);
    vec![
        (
            Request::SetLock { filekey: FileKey(6), lock: bytes, wait: WaitId(7), blocking: true },
            joined(&[&[32], &[6], &locked(0, 0), &[7], &[1]]),
        ),
        (
            Request::SetLock { filekey: FileKey(6), lock: whole, wait: WaitId(7), blocking: false },
            joined(&[&[32], &[6], &locked(1, 1), &[7], &[0]]),
        ),
        (
            Request::Unlock {
                ino: InodeNo(9),
                space: LockSpace::Whole,
                owner: LockOwner(300),
                range: bytes.range,
            },
            joined(&[&[33], &[9], &[1], &[0xac, 0x02], range]),
        ),
        (Request::TestLock { filekey: FileKey(6), lock: bytes }, joined(&[&[34], &[6], &locked(0, 0)])),
        (Request::AwaitLocks { hold_ms: 5000 }, vec![35, 0x88, 0x27]),
        (Request::CancelLock { wait: WaitId(7) }, vec![36, 7]),
        (
            Request::ReclaimLocks { locks: vec![ReclaimLock { ino: InodeNo(9), lock: whole }] },
            joined(&[&[37], &[1], &[9], &locked(1, 1)]),
        ),
    ]
}

fn restores() -> Vec<(Request<'static>, Vec<u8>)> {
    let restore = |what| Request::Restore { filekey: FileKey(6), change: 7, what };
    vec![
        (
            restore(Restored::Bytes { offset: 5, bytes: Payload::Inline(b"ab") }),
            joined(&[&[38], &[6], &[7], &[0, 5, 0, 2, b'a', b'b']]),
        ),
        (restore(Restored::End(300)), vec![38, 6, 7, 1, 0xac, 0x02]),
        (
            restore(Restored::Allocate { offset: 1, len: 2, how: Allocate::PunchHole }),
            vec![38, 6, 7, 2, 1, 2, 1],
        ),
    ]
}

/// The fields of a key in its own golden bytes are tested beside it.
pub(crate) const REGION: RegionKey = RegionKey {
    pool: [0xaa; 16],
    client: ClientId(1),
    number: 2,
    offset: 3,
    len: 4,
    rights: READ_ONLY,
    expiry_ms: Some(5),
    mac: [0xbb; 16],
};

fn regions() -> Vec<(Request<'static>, Vec<u8>)> {
    let (filekey, key) = (FileKey(6), REGION);
    let key_bytes = REGION.to_bytes();
    let key_len: &[u8] = &[REGION_KEY_LEN as u8];
    vec![
        (
            Request::Bind { filekey, offset: 300, len: 1, rights: READ_ONLY, lifetime_ms: 2 },
            vec![40, 6, 0xac, 0x02, 1, 1, 0, 2],
        ),
        (Request::BindAgain { filekey, key }, joined(&[&[41], &[6], key_len, &key_bytes])),
        (Request::Unbind { number: 300 }, vec![42, 0xac, 0x02]),
        (Request::OpenRegion { key }, joined(&[&[43], key_len, &key_bytes])),
        (Request::GrantWrite { filekey, offset: 300, len: 1 }, vec![44, 6, 0xac, 0x02, 1]),
        (Request::ReturnGrant { filekey, offset: 300, len: 1 }, vec![45, 6, 0xac, 0x02, 1]),
        (Request::Changes { inodes: vec![InodeNo(300), InodeNo(1)] }, vec![46, 2, 0xac, 0x02, 1]),
        (Request::Defragment { filekey, first_page: FilePage(300) }, vec![47, 6, 0xac, 0x02]),
        (
            Request::Atomic {
                filekey,
                offset: 304,
                operation: FileAtomic::CompareSwap { expect: 300, swap: 1 },
                durable: true,
            },
            vec![48, 6, 0xb0, 0x02, 0, 0xac, 0x02, 1, 1],
        ),
        (
            Request::Atomic {
                filekey,
                offset: 8,
                operation: FileAtomic::FetchAdd { add: 300 },
                durable: false,
            },
            vec![48, 6, 8, 1, 0xac, 0x02, 0],
        ),
    ]
}

#[test]
fn every_request_has_these_bytes() {
    let mut seen = [false; KINDS];
    let mut buffer = room();
    for (request, golden) in cases() {
        let len = request.encode(&mut buffer).expect("it fits");
        assert_eq!(&buffer[..len], golden, "{request:?}");
        assert_eq!(Request::parse(&golden).as_ref(), Ok(&request));
        assert_eq!(usize::from(golden[0]), kind(&request), "{request:?}");
        seen[kind(&request)] = true;
    }
    assert!(seen.iter().all(|seen| *seen), "kinds without golden bytes: {seen:?}");
}
