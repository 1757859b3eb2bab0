//! Steps of a walk. They name clients, inodes, names and handles by index, so that a case shrinks well and each step has a meaning whatever came
//! before it.

use super::world::{Crash, Death};
use cuttlefs_common::attr::FileKind;
use cuttlefs_common::ids::PAGE_SIZE_U64;
use cuttlefs_common::life::{End, Event};
use cuttlefs_common::rdma::sim::Cut;
use cuttlefs_common::rpc::{Allocate, RenameMode, SeekFor, XATTR_VALUE_MAX, XattrMode};
use proptest::prelude::*;

/// All offsets are below this. It is more than the smallest pool holds, so that space runs out.
const SPAN: u64 = 48 * PAGE_SIZE_U64;

/// How a file is opened.
#[derive(Clone, Copy, Debug)]
pub struct How {
    pub read: bool,
    pub write: bool,
    pub append: bool,
    pub truncate: bool,
    pub sync: bool,
}

/// A step of a walk.
#[derive(Clone, Debug)]
pub enum Step {
    Make {
        parent: usize,
        name: usize,
        kind: FileKind,
    },
    Create {
        parent: usize,
        name: usize,
        exclusive: bool,
        how: How,
    },
    CreateNameless {
        parent: usize,
        how: How,
    },
    Open {
        ino: usize,
        how: How,
    },
    Release {
        handle: usize,
    },
    Write {
        handle: usize,
        offset: u64,
        len: u64,
    },
    Read {
        handle: usize,
        offset: u64,
        len: u64,
    },
    Allocate {
        handle: usize,
        offset: u64,
        len: u64,
        how: Allocate,
    },
    Seek {
        handle: usize,
        offset: u64,
        seek: SeekFor,
    },
    Copy {
        from: usize,
        from_offset: u64,
        to: usize,
        to_offset: u64,
        len: u64,
    },
    Fsync {
        handle: usize,
        contents_only: bool,
    },
    /// The file's pages move to fewer runs of the pool, from this page on.
    Defragment {
        handle: usize,
        page: u64,
    },
    Truncate {
        ino: usize,
        size: u64,
    },
    SetAttr {
        ino: usize,
        mode: Option<u16>,
        gid: Option<u32>,
        time: Option<i64>,
    },
    Link {
        ino: usize,
        parent: usize,
        name: usize,
    },
    Unlink {
        parent: usize,
        name: usize,
    },
    Rmdir {
        parent: usize,
        name: usize,
    },
    Rename {
        parent: usize,
        name: usize,
        new_parent: usize,
        new_name: usize,
        mode: RenameMode,
    },
    SetXattr {
        ino: usize,
        name: usize,
        len: usize,
        mode: XattrMode,
    },
    RemoveXattr {
        ino: usize,
        name: usize,
    },
    ReadDir {
        ino: usize,
        each: usize,
        plus: bool,
    },
    ReadLink {
        ino: usize,
    },
    /// The client closes all its files, unmounts and mounts again.
    Remount,
    Pass {
        ms: u64,
    },
    /// Everything is synced, then the server is killed at that instant and another one starts.
    Restart,
    /// Everything is synced, then the server is killed when the next request or its answer is lost, and another one starts. The request must take
    /// effect once all the same.
    Kill {
        cut: Cut,
        death: Death,
    },
    Cut {
        cut: Cut,
        pass: u32,
    },
    /// The server dies at a later event, and perhaps the next server, too, in its recovery or later. Where answers are not durable and power is lost,
    /// everything is synced first, and the crash comes within the next step or not at all.
    Crash {
        crash: Crash,
        again: Option<Crash>,
    },
}

fn place() -> impl Strategy<Value = u64> {
    prop_oneof![
        2 => 0..SPAN,
        2 => (0..SPAN / PAGE_SIZE_U64).prop_map(|page| page * PAGE_SIZE_U64),
        1 => (1..SPAN / PAGE_SIZE_U64, 0u64..3).prop_map(|(page, by)| page * PAGE_SIZE_U64 + by - 1),
    ]
}

fn length() -> impl Strategy<Value = u64> {
    prop_oneof![
        3 => 1u64..200,
        3 => (1u64..12).prop_map(|pages| pages * PAGE_SIZE_U64),
        2 => 1u64..60_000,
        1 => 60_000u64..150_000,
    ]
}

fn how() -> impl Strategy<Value = How> {
    let rights = prop_oneof![6 => Just((true, true)), 1 => Just((true, false)), 1 => Just((false, true))];
    (rights, prop::bool::weighted(0.2), prop::bool::weighted(0.15), prop::bool::weighted(0.1)).prop_map(
        |((read, write), append, truncate, sync)| How {
            read,
            write,
            append,
            truncate: truncate && write,
            sync,
        },
    )
}

fn allocate() -> impl Strategy<Value = Allocate> {
    prop_oneof![
        any::<bool>().prop_map(|keep_size| Allocate::Reserve { keep_size }),
        Just(Allocate::PunchHole),
        any::<bool>().prop_map(|keep_size| Allocate::ZeroRange { keep_size }),
    ]
}

fn files() -> impl Strategy<Value = Step> {
    let handle = || 0usize..6;
    let ino = || 0usize..16;
    let seek = prop_oneof![Just(SeekFor::Data), Just(SeekFor::Hole)];
    prop_oneof![
        3 => (ino(), how()).prop_map(|(ino, how)| Step::Open { ino, how }),
        2 => handle().prop_map(|handle| Step::Release { handle }),
        12 => (handle(), place(), length()).prop_map(|(handle, offset, len)| Step::Write { handle, offset, len }),
        6 => (handle(), place(), length()).prop_map(|(handle, offset, len)| Step::Read { handle, offset, len }),
        5 => (handle(), place(), length(), allocate())
            .prop_map(|(handle, offset, len, how)| Step::Allocate { handle, offset, len, how }),
        2 => (handle(), place(), seek).prop_map(|(handle, offset, seek)| Step::Seek { handle, offset, seek }),
        2 => (handle(), place(), handle(), place(), length()).prop_map(
            |(from, from_offset, to, to_offset, len)| Step::Copy { from, from_offset, to, to_offset, len }
        ),
        2 => (handle(), any::<bool>()).prop_map(|(handle, contents_only)| Step::Fsync { handle, contents_only }),
        3 => (handle(), prop_oneof![Just(0), 0..SPAN / PAGE_SIZE_U64])
            .prop_map(|(handle, page)| Step::Defragment { handle, page }),
        4 => (ino(), place()).prop_map(|(ino, size)| Step::Truncate { ino, size }),
    ]
}

fn names() -> impl Strategy<Value = Step> {
    let ino = || 0usize..16;
    let parent = || prop_oneof![8 => 0usize..3, 1 => 0usize..16];
    let name = || prop_oneof![60 => 0usize..4, 1 => 4usize..8];
    let kind = prop_oneof![
        3 => Just(FileKind::File), 3 => Just(FileKind::Directory), 1 => Just(FileKind::Symlink),
        1 => Just(FileKind::Fifo), 1 => Just(FileKind::CharDevice),
    ];
    let rename = prop_oneof![
        3 => Just(RenameMode::Replace), 1 => Just(RenameMode::NoReplace), 2 => Just(RenameMode::Exchange)
    ];
    let xattr =
        prop_oneof![2 => Just(XattrMode::Any), 1 => Just(XattrMode::Create), 1 => Just(XattrMode::Replace)];
    let xattr_len = prop_oneof![6 => 0usize..300, 2 => 0usize..9000, 1 => Just(XATTR_VALUE_MAX), 1 => Just(XATTR_VALUE_MAX + 1)];
    prop_oneof![
        4 => (parent(), name(), kind).prop_map(|(parent, name, kind)| Step::Make { parent, name, kind }),
        8 => (parent(), name(), any::<bool>(), how())
            .prop_map(|(parent, name, exclusive, how)| Step::Create { parent, name, exclusive, how }),
        2 => (parent(), how()).prop_map(|(parent, how)| Step::CreateNameless { parent, how }),
        3 => (ino(), parent(), name()).prop_map(|(ino, parent, name)| Step::Link { ino, parent, name }),
        4 => (parent(), name()).prop_map(|(parent, name)| Step::Unlink { parent, name }),
        2 => (parent(), name()).prop_map(|(parent, name)| Step::Rmdir { parent, name }),
        5 => (parent(), name(), parent(), name(), rename).prop_map(|(parent, name, new_parent, new_name, mode)| {
            Step::Rename { parent, name, new_parent, new_name, mode }
        }),
        2 => (ino(), prop::option::of(0u16..0o10000), prop::option::of(0u32..9), prop::option::of(-9i64..9))
            .prop_map(|(ino, mode, gid, time)| Step::SetAttr { ino, mode, gid, time }),
        2 => (ino(), 0usize..4, xattr_len, xattr)
            .prop_map(|(ino, name, len, mode)| Step::SetXattr { ino, name, len, mode }),
        1 => (ino(), 0usize..4).prop_map(|(ino, name)| Step::RemoveXattr { ino, name }),
        2 => (parent(), 1usize..4, any::<bool>()).prop_map(|(ino, each, plus)| Step::ReadDir { ino, each, plus }),
        1 => ino().prop_map(|ino| Step::ReadLink { ino }),
    ]
}

/// The event that ends a life: one of the next few events of a kind, or of the next events of any kind.
pub fn end() -> impl Strategy<Value = End> {
    prop_oneof![
        6 => (prop_oneof![2 => 0u64..3, 1 => 0u64..20], prop::sample::select(&Event::ALL))
            .prop_map(|(after, kind)| End { after, of: Some(kind) }),
        3 => (0u64..60).prop_map(|after| End { after, of: None }),
        1 => (0u64..400).prop_map(|after| End { after, of: None }),
    ]
}

/// A step and the client that does it, for walks with many crashes and few cuts.
pub fn step_among_crashes(clients: usize, durable_answers: bool) -> impl Strategy<Value = (usize, Step)> {
    let cut = prop_oneof![Just(Cut::Request), Just(Cut::Reply), Just(Cut::Transfer), Just(Cut::OneSided)];
    let crash = || (end(), any::<bool>()).prop_map(|(end, power)| Crash { end, power });
    let again = prop::option::weighted(0.3, crash());
    let cut = (cut, 0u32..6).prop_map(|(cut, pass)| Step::Cut { cut, pass });
    // Clients remount only where answers are durable, because a mount that ends may leave unsynced changes.
    let cut_or_remount =
        if durable_answers { prop_oneof![cut, Just(Step::Remount)].boxed() } else { cut.boxed() };
    let step = prop_oneof![
        30 => files(),
        15 => names(),
        3 => (1u64..2500).prop_map(|ms| Step::Pass { ms }),
        9 => (crash(), again).prop_map(|(crash, again)| Step::Crash { crash, again }),
        1 => cut_or_remount,
    ];
    (0..clients, step)
}

/// A step and the client that does it.
pub fn step() -> impl Strategy<Value = (usize, Step)> {
    let cut = prop_oneof![Just(Cut::Request), Just(Cut::Reply), Just(Cut::Transfer), Just(Cut::OneSided)];
    let step = prop_oneof![
        40 => files(),
        30 => names(),
        1 => (1u64..3000).prop_map(|ms| Step::Pass { ms }),
        1 => Just(Step::Restart),
        2 => (
            prop_oneof![Just(Cut::Request), Just(Cut::Reply)],
            prop_oneof![Just(Death::Sudden), Just(Death::WrittenBack), Just(Death::PowerLost)],
        )
            .prop_map(|(cut, death)| Step::Kill { cut, death }),
        2 => (cut, 0u32..6).prop_map(|(cut, pass)| Step::Cut { cut, pass }),
    ];
    (0usize..2, step)
}
