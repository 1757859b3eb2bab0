//! Random requests and replies, each kind as likely as another.
//!
//! Messages borrow their names and data, so the drawn buffers are leaked: a few hundred short ones a test run.

use cuttlefs_common::attr::{Attr, FileKind, InodeFlags, SetAttr, SetTime, Timestamp};
use cuttlefs_common::ids::{ClientId, FileKey, FilePage, FileSlot, InodeNo, PoolPage, Rkey, SlotIndex};
use cuttlefs_common::locks::{Lock, LockMode, LockOwner, LockRange, LockSpace, WaitId};
use cuttlefs_common::pool_uuid::PoolUuid;
use cuttlefs_common::rdma::FileAtomic;
use cuttlefs_common::rdma::RemoteRange;
use cuttlefs_common::region::{Extent, ExtentState, MagicPattern, PageSet};
use cuttlefs_common::rpc::{
    Allocate, Attached, BlockingLock, DirEntry, Layout, NewNode, OneSidedReads, OpenBy, OpenTicket, Opened,
    Payload, Reclaim, ReclaimLock, RegionKey, RemoteBuffer, RenameMode, Reply, Request, Restored, Rights,
    Sampling, SeekFor, SessionSecret, SettledLock, Sink, Space, SyncScope, TestedLock, Unanswered, XattrMode,
};
use cuttlefs_common::status::Status;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::strategy::Union;

fn bytes() -> impl Strategy<Value = &'static [u8]> {
    vec(any::<u8>(), 0..300).prop_map(|bytes| &*bytes.leak())
}

fn text() -> impl Strategy<Value = &'static str> {
    ".{0,60}".prop_map(|text: String| &*text.leak())
}

fn ino() -> impl Strategy<Value = InodeNo> {
    any::<u64>().prop_map(InodeNo)
}

fn filekey() -> impl Strategy<Value = FileKey> {
    any::<u64>().prop_map(FileKey)
}

fn region_key() -> impl Strategy<Value = RegionKey> {
    let names = (any::<[u8; 16]>(), any::<u128>(), any::<u64>(), any::<[u8; 16]>());
    let range = (0..u64::MAX >> 2, 1..u64::MAX >> 2);
    (names, range, 1u8..4, any::<u64>()).prop_map(
        |((pool, client, number, mac), (offset, len), rights, expiry_ms)| RegionKey {
            pool,
            client: ClientId(client),
            number,
            offset,
            len,
            rights: Rights { read: rights & 1 != 0, write: rights & 2 != 0 },
            expiry_ms: Some(expiry_ms).filter(|at| *at != 0),
            mac,
        },
    )
}

fn lock_range() -> impl Strategy<Value = LockRange> {
    any::<(u64, u64)>().prop_map(|(first, last)| LockRange { first, last })
}

fn lock_space() -> impl Strategy<Value = LockSpace> {
    select(vec![LockSpace::Ranges, LockSpace::Whole])
}

fn lock_mode() -> impl Strategy<Value = LockMode> {
    select(vec![LockMode::Shared, LockMode::Exclusive])
}

fn lock() -> impl Strategy<Value = Lock> {
    (lock_space(), any::<u64>(), lock_range(), lock_mode(), any::<u32>()).prop_map(
        |(space, owner, range, mode, pid)| Lock { space, owner: LockOwner(owner), range, mode, pid },
    )
}

fn settled_lock() -> impl Strategy<Value = SettledLock> {
    (any::<u64>(), option::of(select(Status::ALL.to_vec())))
        .prop_map(|(wait, failed)| SettledLock { wait: WaitId(wait), result: failed.map_or(Ok(()), Err) })
}

fn tested_lock() -> impl Strategy<Value = TestedLock> {
    prop_oneof![
        Just(TestedLock::Free),
        Just(TestedLock::Unknown),
        (lock_range(), lock_mode(), any::<u32>())
            .prop_map(|(range, mode, pid)| TestedLock::Blocked(BlockingLock { range, mode, pid })),
    ]
}

fn rights() -> impl Strategy<Value = Rights> {
    any::<(bool, bool)>().prop_map(|(read, write)| Rights { read, write })
}

fn kind() -> impl Strategy<Value = FileKind> {
    select(vec![
        FileKind::File,
        FileKind::Directory,
        FileKind::Symlink,
        FileKind::BlockDevice,
        FileKind::CharDevice,
        FileKind::Fifo,
        FileKind::Socket,
    ])
}

fn timestamp() -> impl Strategy<Value = Timestamp> {
    any::<(i64, u32)>().prop_map(|(secs, nanos)| Timestamp { secs, nanos })
}

fn set_time() -> impl Strategy<Value = SetTime> {
    prop_oneof![Just(SetTime::Now), timestamp().prop_map(SetTime::At)]
}

fn set_attr() -> impl Strategy<Value = SetAttr> {
    let numbers = any::<(Option<u16>, Option<u32>, Option<u32>, Option<u64>)>();
    let times = (option::of(set_time()), option::of(set_time()), option::of(timestamp()));
    (numbers, times, any::<Option<u32>>()).prop_map(
        |((mode, uid, gid, size), (atime, mtime, ctime), flags)| SetAttr {
            mode,
            uid,
            gid,
            size,
            atime,
            mtime,
            ctime,
            flags: flags.map(InodeFlags),
        },
    )
}

fn attr() -> impl Strategy<Value = Attr> {
    let numbers = any::<(u16, u32, u32, u32, u32, u64, u64, u64, u32)>();
    let times = (timestamp(), timestamp(), timestamp(), timestamp());
    (ino(), kind(), numbers, times).prop_map(|(ino, kind, numbers, (atime, mtime, ctime, btime))| {
        let (mode, nlink, uid, gid, rdev, size, allocated_bytes, change, flags) = numbers;
        Attr {
            ino,
            kind,
            mode,
            nlink,
            uid,
            gid,
            rdev,
            size,
            allocated_bytes,
            atime,
            mtime,
            ctime,
            btime,
            change,
            flags: InodeFlags(flags),
        }
    })
}

fn opened() -> impl Strategy<Value = Opened> {
    let parts = (filekey(), any::<Option<u32>>(), attr(), any::<u64>());
    parts.prop_map(|(filekey, slot, attr, ticket)| {
        let (slot, ticket) = (slot.map(FileSlot), OpenTicket(ticket));
        Opened { filekey, slot, attr, ticket }
    })
}

fn buffer() -> impl Strategy<Value = RemoteBuffer> {
    any::<(u32, u64, u32)>().prop_map(|(rkey, offset, len)| RemoteBuffer { rkey: Rkey(rkey), offset, len })
}

fn pages() -> impl Strategy<Value = PageSet> {
    vec(any::<bool>(), 0..300).prop_map(|wanted| {
        let mut set = PageSet::none(wanted.len());
        wanted.iter().enumerate().filter(|(_, wanted)| **wanted).for_each(|(index, _)| set.insert(index));
        set
    })
}

fn node() -> impl Strategy<Value = NewNode<'static>> {
    prop_oneof![
        Just(NewNode::File),
        Just(NewNode::Directory),
        bytes().prop_map(NewNode::Symlink),
        (kind(), any::<u32>()).prop_map(|(kind, rdev)| NewNode::Special { kind, rdev }),
    ]
}

fn payload() -> impl Strategy<Value = Payload<'static>> {
    prop_oneof![bytes().prop_map(Payload::Inline), buffer().prop_map(Payload::Pull)]
}

fn sink() -> impl Strategy<Value = Sink> {
    prop_oneof![Just(Sink::Inline), buffer().prop_map(Sink::Push)]
}

fn scope() -> impl Strategy<Value = SyncScope> {
    prop_oneof![
        ino().prop_map(SyncScope::Inode),
        ino().prop_map(SyncScope::InodeContents),
        Just(SyncScope::All),
    ]
}

fn allocate() -> impl Strategy<Value = Allocate> {
    prop_oneof![
        any::<bool>().prop_map(|keep_size| Allocate::Reserve { keep_size }),
        Just(Allocate::PunchHole),
        any::<bool>().prop_map(|keep_size| Allocate::ZeroRange { keep_size }),
    ]
}

fn extent() -> impl Strategy<Value = Extent> {
    (any::<(u64, u64, u64)>(), select(vec![ExtentState::Written, ExtentState::Unwritten])).prop_map(
        |((file_page, pool_page, len_pages), state)| Extent {
            file_page: FilePage(file_page),
            pool_page: PoolPage(pool_page),
            len_pages,
            state,
        },
    )
}

fn entry() -> impl Strategy<Value = DirEntry<'static>> {
    (any::<u64>(), ino(), kind(), bytes(), option::of(attr()))
        .prop_map(|(cookie, ino, kind, name, attr)| DirEntry { cookie, ino, kind, name, attr })
}

/// Any request.
pub fn request() -> impl Strategy<Value = Request<'static>> {
    let rename_mode = || {
        use RenameMode::{Exchange, NoReplace, NoReplaceWhiteout, Replace, Whiteout};
        select(vec![Replace, NoReplace, Exchange, Whiteout, NoReplaceWhiteout])
    };
    let xattr_mode = || select(vec![XattrMode::Any, XattrMode::Create, XattrMode::Replace]);
    let seek_for = || select(vec![SeekFor::Data, SeekFor::Hole]);
    let reclaim = || {
        let parts = (ino(), rights(), any::<Option<u64>>());
        parts.prop_map(|(ino, rights, ticket)| Reclaim { ino, rights, ticket: ticket.map(OpenTicket) })
    };
    Union::new(vec![
        (any::<[u8; 16]>(), text(), bytes())
            .prop_map(|(secret, label, subtree)| Request::Attach {
                secret: SessionSecret(secret),
                label,
                subtree,
            })
            .boxed(),
        select(vec![Request::Heartbeat, Request::Detach, Request::StatFs, Request::Status]).boxed(),
        buffer().prop_map(|buffer| Request::ShareCounters { buffer }).boxed(),
        vec(reclaim(), 0..20).prop_map(|files| Request::Reclaim { files }).boxed(),
        vec(any::<(u16, u64)>(), 0..20)
            .prop_map(|all| {
                all.into_iter().map(|(slot, seq)| Unanswered { slot: SlotIndex(slot), seq }).collect()
            })
            .prop_map(|unanswered| Request::Recovered { unanswered })
            .boxed(),
        (ino(), bytes()).prop_map(|(parent, name)| Request::Lookup { parent, name }).boxed(),
        ino().prop_map(|ino| Request::GetAttr { ino }).boxed(),
        (ino(), set_attr()).prop_map(|(ino, set)| Request::SetAttr { ino, set }).boxed(),
        (ino(), bytes(), node(), any::<u16>())
            .prop_map(|(parent, name, node, mode)| Request::Make { parent, name, node, mode })
            .boxed(),
        (ino(), bytes(), any::<(u16, bool)>(), rights())
            .prop_map(|(parent, name, (mode, exclusive), rights)| Request::Create {
                parent,
                name,
                mode,
                exclusive,
                rights,
            })
            .boxed(),
        (ino(), any::<u16>(), rights())
            .prop_map(|(parent, mode, rights)| Request::CreateNameless { parent, mode, rights })
            .boxed(),
        (ino(), ino(), bytes()).prop_map(|(ino, parent, name)| Request::Link { ino, parent, name }).boxed(),
        (ino(), bytes()).prop_map(|(parent, name)| Request::Unlink { parent, name }).boxed(),
        (ino(), bytes()).prop_map(|(parent, name)| Request::Rmdir { parent, name }).boxed(),
        (ino(), bytes(), ino(), bytes(), rename_mode())
            .prop_map(|(parent, name, new_parent, new_name, mode)| Request::Rename {
                parent,
                name,
                new_parent,
                new_name,
                mode,
            })
            .boxed(),
        ino().prop_map(|ino| Request::ReadLink { ino }).boxed(),
        (ino(), any::<(u64, u32, bool)>())
            .prop_map(|(ino, (cookie, max_bytes, plus))| Request::ReadDir { ino, cookie, max_bytes, plus })
            .boxed(),
        (ino(), rights(), any::<(bool, Option<u64>)>())
            .prop_map(|(ino, rights, (truncate, told))| {
                let by = told.map_or(OpenBy::Number, |told| OpenBy::Name { told });
                Request::Open { ino, rights, truncate, by }
            })
            .boxed(),
        vec(filekey(), 0..20).prop_map(|filekeys| Request::Close { filekeys }).boxed(),
        (filekey(), any::<(u64, u32)>())
            .prop_map(|(filekey, (first_page, max_extents))| Request::Layout {
                filekey,
                first_page: FilePage(first_page),
                max_extents,
            })
            .boxed(),
        (filekey(), any::<(u64, u32)>(), pages(), sink())
            .prop_map(|(filekey, (offset, len), pages, sink)| Request::Fetch {
                filekey,
                offset,
                len,
                pages,
                sink,
            })
            .boxed(),
        (filekey(), any::<(u64, bool)>(), payload())
            .prop_map(|(filekey, (offset, append), payload)| Request::Write {
                filekey,
                offset,
                append,
                payload,
            })
            .boxed(),
        scope().prop_map(Request::Sync).boxed(),
        (filekey(), any::<(u64, u64)>(), allocate())
            .prop_map(|(filekey, (offset, len), how)| Request::Allocate { filekey, offset, len, how })
            .boxed(),
        (filekey(), any::<u64>(), seek_for())
            .prop_map(|(filekey, offset, seek)| Request::Seek { filekey, offset, seek })
            .boxed(),
        (filekey(), filekey(), any::<(u64, u64, u64)>())
            .prop_map(|(from, to, (from_offset, to_offset, len))| Request::CopyRange {
                from,
                from_offset,
                to,
                to_offset,
                len,
            })
            .boxed(),
        (ino(), bytes()).prop_map(|(ino, name)| Request::GetXattr { ino, name }).boxed(),
        ino().prop_map(|ino| Request::ListXattr { ino }).boxed(),
        (ino(), bytes(), bytes(), xattr_mode())
            .prop_map(|(ino, name, value, mode)| Request::SetXattr { ino, name, value, mode })
            .boxed(),
        (ino(), bytes()).prop_map(|(ino, name)| Request::RemoveXattr { ino, name }).boxed(),
        (filekey(), lock(), any::<u64>(), any::<bool>())
            .prop_map(|(filekey, lock, wait, blocking)| Request::SetLock {
                filekey,
                lock,
                wait: WaitId(wait),
                blocking,
            })
            .boxed(),
        (ino(), lock_space(), any::<u64>(), lock_range())
            .prop_map(|(ino, space, owner, range)| Request::Unlock {
                ino,
                space,
                owner: LockOwner(owner),
                range,
            })
            .boxed(),
        (filekey(), lock()).prop_map(|(filekey, lock)| Request::TestLock { filekey, lock }).boxed(),
        any::<u32>().prop_map(|hold_ms| Request::AwaitLocks { hold_ms }).boxed(),
        any::<u64>().prop_map(|wait| Request::CancelLock { wait: WaitId(wait) }).boxed(),
        (filekey(), any::<u64>(), restored())
            .prop_map(|(filekey, change, what)| Request::Restore { filekey, change, what })
            .boxed(),
        vec((ino(), lock()).prop_map(|(ino, lock)| ReclaimLock { ino, lock }), 0..20)
            .prop_map(|locks| Request::ReclaimLocks { locks })
            .boxed(),
        (filekey(), any::<(u64, u64)>(), rights(), any::<u64>())
            .prop_map(|(filekey, (offset, len), rights, lifetime_ms)| Request::Bind {
                filekey,
                offset,
                len,
                rights,
                lifetime_ms,
            })
            .boxed(),
        (filekey(), region_key()).prop_map(|(filekey, key)| Request::BindAgain { filekey, key }).boxed(),
        any::<u64>().prop_map(|number| Request::Unbind { number }).boxed(),
        region_key().prop_map(|key| Request::OpenRegion { key }).boxed(),
        (filekey(), any::<(u64, u64)>())
            .prop_map(|(filekey, (offset, len))| Request::GrantWrite { filekey, offset, len })
            .boxed(),
        (filekey(), any::<(u64, u64)>())
            .prop_map(|(filekey, (offset, len))| Request::ReturnGrant { filekey, offset, len })
            .boxed(),
        vec(ino(), 0..5).prop_map(|inodes| Request::Changes { inodes }).boxed(),
        (filekey(), any::<u64>())
            .prop_map(|(filekey, page)| Request::Defragment { filekey, first_page: FilePage(page) })
            .boxed(),
        (filekey(), any::<u64>(), file_atomic(), any::<bool>())
            .prop_map(|(filekey, offset, operation, durable)| Request::Atomic {
                filekey,
                offset,
                operation,
                durable,
            })
            .boxed(),
    ])
}

fn file_atomic() -> impl Strategy<Value = FileAtomic> {
    Union::new(vec![
        any::<(u64, u64)>().prop_map(|(expect, swap)| FileAtomic::CompareSwap { expect, swap }).boxed(),
        any::<u64>().prop_map(|add| FileAtomic::FetchAdd { add }).boxed(),
    ])
}

fn restored() -> impl Strategy<Value = Restored<Payload<'static>>> {
    Union::new(vec![
        (any::<u64>(), payload()).prop_map(|(offset, bytes)| Restored::Bytes { offset, bytes }).boxed(),
        any::<u64>().prop_map(Restored::End).boxed(),
        (any::<(u64, u64)>(), allocate())
            .prop_map(|((offset, len), how)| Restored::Allocate { offset, len, how })
            .boxed(),
    ])
}

/// Any reply.
pub fn reply() -> impl Strategy<Value = Reply<'static>> {
    Union::new(vec![
        Just(Reply::Done).boxed(),
        (
            any::<(u64, u64, u32, u16, u64, bool, Option<u64>)>(),
            any::<[u8; 32]>(),
            select(vec![OneSidedReads::Magic, OneSidedReads::Whole, OneSidedReads::Off]),
            any::<(Option<(u32, u32)>, bool, Option<[(u32, u64); 3]>, [u8; 16])>(),
        )
            .prop_map(
                |(
                    (server_epoch, session, lease_ms, slots, root, read_only, clean_predecessor),
                    magic,
                    one_sided,
                    (sampling, durable_answers, windows, pool),
                )| {
                    Reply::Attached(Attached {
                        server_epoch,
                        pool: PoolUuid(pool),
                        session,
                        lease_ms,
                        slots,
                        root: InodeNo(root),
                        magic: MagicPattern::new(magic),
                        read_only,
                        clean_predecessor,
                        one_sided,
                        sampling: sampling.map(|(unit_pages, period_ms)| Sampling { unit_pages, period_ms }),
                        durable_answers,
                        windows: windows.map(|windows| {
                            windows.map(|(rkey, len)| RemoteRange { rkey: Rkey(rkey), first_address: 0, len })
                        }),
                        page_window: windows.map(|[(rkey, len), ..]| RemoteRange {
                            rkey: Rkey(rkey),
                            first_address: len,
                            len,
                        }),
                    })
                },
            )
            .boxed(),
        vec(option::of(opened()), 0..8).prop_map(Reply::Reclaimed).boxed(),
        attr().prop_map(Reply::Attr).boxed(),
        opened().prop_map(Reply::Opened).boxed(),
        bytes().prop_map(Reply::Bytes).boxed(),
        (vec(entry(), 0..8), any::<bool>())
            .prop_map(|(entries, end)| Reply::Entries { entries, end })
            .boxed(),
        (any::<u64>(), vec(extent(), 0..20), any::<Option<u64>>())
            .prop_map(|(generation, extents, known_until)| {
                Reply::Layout(Layout { generation, extents, known_until: known_until.map(FilePage) })
            })
            .boxed(),
        (any::<u32>(), bytes()).prop_map(|(valid_len, inline)| Reply::Fetched { valid_len, inline }).boxed(),
        any::<(u64, u32, u64, u64)>()
            .prop_map(|(offset, len, size, change)| Reply::Written { offset, len, size, change })
            .boxed(),
        any::<u64>().prop_map(Reply::Offset).boxed(),
        any::<(u64, u64)>().prop_map(|(len, change)| Reply::Copied { len, change }).boxed(),
        any::<(u64, u64, u64, u64)>()
            .prop_map(|(pool_pages, free_pages, inodes, free_inodes)| {
                Reply::Space(Space { pool_pages, free_pages, inodes, free_inodes })
            })
            .boxed(),
        text().prop_map(Reply::Status).boxed(),
        Just(Reply::Queued).boxed(),
        vec(settled_lock(), 0..20).prop_map(Reply::Settled).boxed(),
        tested_lock().prop_map(Reply::Tested).boxed(),
        vec(any::<bool>(), 0..20).prop_map(Reply::LocksReclaimed).boxed(),
        any::<bool>().prop_map(|lost| Reply::Restored { lost }).boxed(),
        region_key().prop_map(Reply::Bound).boxed(),
        vec(any::<Option<u64>>(), 0..5).prop_map(Reply::Changes).boxed(),
        any::<(u64, Option<u64>)>()
            .prop_map(|(pages, next)| Reply::Moved { pages, next: next.map(FilePage) })
            .boxed(),
        any::<u64>().prop_map(Reply::Old).boxed(),
    ])
}
