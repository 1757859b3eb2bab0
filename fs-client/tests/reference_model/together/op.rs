//! Operations that clients begin at once, and their answers. Operations name things by index, as in `step`.
//!
//! Only operations that cuttlefs promises to be atomic among clients: everything about names and attributes; of contents writes, cuts and
//! allocations. Reads are within one page, because a read of several pages sees each page at a time of its own.

use super::super::model::Model;
use super::super::step::How;
use super::super::walk::{CALLER, Open, list, name, open_how, read_all, status};
use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::{Handle, Volume};
use cuttlefs_common::attr::{Attr, FileKind, SetAttr};
use cuttlefs_common::ids::{InodeNo, PAGE_SIZE_U64};
use cuttlefs_common::rpc::{Allocate, NewNode, RenameMode, XattrMode};
use cuttlefs_common::status::Status;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// The most pages of files in these walks: few, so that clients meet, and more than a small write has.
const PAGES: u64 = 8;
pub const TARGET: &[u8] = b"some/where";
pub const RDEV: u32 = 0x105;

/// The index of a directory, and the index of a name in it.
pub type Entry = (usize, usize);

/// An operation.
#[derive(Clone, Debug)]
pub enum Op {
    Make { at: Entry, kind: FileKind },
    Create { at: Entry, exclusive: bool, how: How },
    CreateNameless { parent: usize, how: How },
    Link { ino: usize, at: Entry },
    Unlink { at: Entry },
    Rmdir { at: Entry },
    Rename { from: Entry, to: Entry, mode: RenameMode },
    Lookup { at: Entry },
    List { ino: usize },
    GetAttr { ino: usize },
    SetAttr { ino: usize, mode: Option<u16>, gid: Option<u32> },
    SetXattr { ino: usize, name: usize, salt: u8, mode: XattrMode },
    GetXattr { ino: usize, name: usize },
    RemoveXattr { ino: usize, name: usize },
    Open { ino: usize, how: How },
    Truncate { ino: usize, size: u64 },
    Write { handle: usize, offset: u64, len: u64, salt: u64 },
    Read { handle: usize, page: u64 },
    Allocate { handle: usize, offset: u64, len: u64, how: Allocate },
    Copy { from: usize, from_offset: u64, to: usize, to_offset: u64, len: u64 },
    Fsync { handle: usize },
}

/// The answer of an operation.
#[derive(Clone, Debug)]
pub enum Answer {
    Done(Result<(), Status>),
    Found(Result<InodeNo, Status>),
    /// The inode if it is new, the handle, and the file's change counter.
    Opened(Result<(Option<InodeNo>, Handle, u64), Status>),
    Attr(Result<Attr, Status>),
    Entries(Result<BTreeMap<Vec<u8>, InodeNo>, Status>),
    Bytes(Result<Vec<u8>, Status>),
    Count(Result<u64, Status>),
}

impl Answer {
    /// The error, if the operation was refused.
    pub fn refusal(&self) -> Option<Status> {
        match self {
            Self::Done(result) => result.err(),
            Self::Found(result) => result.err(),
            Self::Opened(result) => result.err(),
            Self::Attr(result) => result.err(),
            Self::Entries(result) => result.as_ref().err().copied(),
            Self::Bytes(result) => result.as_ref().err().copied(),
            Self::Count(result) => result.err(),
        }
    }
}

/// The inodes and handles behind the indices, as they were when the operations began.
pub struct Places {
    made: Vec<InodeNo>,
    /// The handles of each client.
    handles: Vec<Vec<Open>>,
}

impl Places {
    pub fn new(model: &Model, handles: &[Open], clients: usize) -> Self {
        let of = |client| handles.iter().copied().filter(|open| open.client == client).collect();
        Self { made: model.made.clone(), handles: (0..clients).map(of).collect() }
    }

    pub fn ino(&self, index: usize) -> InodeNo {
        self.made.get(index).copied().unwrap_or(InodeNo(u64::MAX - index as u64))
    }

    pub fn entry(&self, (parent, index): Entry) -> (InodeNo, Vec<u8>) {
        (self.ino(parent), name(index))
    }

    pub fn open(&self, client: usize, index: usize) -> Option<Open> {
        let handles = &self.handles[client];
        if handles.is_empty() { None } else { Some(handles[index % handles.len()]) }
    }
}

/// The bytes of a write. Parts of one salt at different places differ, and so do parts of different salts, so that a misplaced or older write shows.
pub fn bytes_of(salt: u64, len: u64) -> Vec<u8> {
    let mixed = salt.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..len).map(|at| ((mixed >> (at % 7 * 8)) as u8).wrapping_add((at / 7) as u8)).collect()
}

/// Whether this allocation punches a hole that ends within a page.
pub fn punches_within_a_page(offset: u64, len: u64, how: Allocate) -> bool {
    let whole = offset.is_multiple_of(PAGE_SIZE_U64) && (offset + len).is_multiple_of(PAGE_SIZE_U64);
    how == Allocate::PunchHole && !whole
}

impl Op {
    /// Whether it changes nothing.
    pub fn only_looks(&self) -> bool {
        matches!(
            self,
            Self::Lookup { .. }
                | Self::List { .. }
                | Self::GetAttr { .. }
                | Self::GetXattr { .. }
                | Self::Read { .. }
        )
    }

    /// Whether it makes, moves or removes a name, or makes a file without one.
    pub fn changes_names(&self) -> bool {
        matches!(
            self,
            Self::Make { .. }
                | Self::Create { .. }
                | Self::CreateNameless { .. }
                | Self::Link { .. }
                | Self::Unlink { .. }
                | Self::Rmdir { .. }
                | Self::Rename { .. }
        )
    }

    /// Whether it makes a file shorter.
    pub fn cuts(&self) -> bool {
        matches!(self, Self::Truncate { .. } | Self::Open { how: How { truncate: true, .. }, .. })
    }

    /// Whether it punches a hole that ends within a page.
    pub fn punches_within_a_page(&self) -> bool {
        matches!(*self, Self::Allocate { offset, len, how, .. } if punches_within_a_page(offset, len, how))
    }

    /// The inodes that it names, and the directories of the names that it uses.
    pub fn about(&self, places: &Places) -> Vec<InodeNo> {
        match *self {
            Self::Make { at, .. }
            | Self::Create { at, .. }
            | Self::Unlink { at }
            | Self::Rmdir { at }
            | Self::Lookup { at } => vec![places.ino(at.0)],
            Self::Link { ino, at } => vec![places.ino(ino), places.ino(at.0)],
            Self::Rename { from, to, .. } => vec![places.ino(from.0), places.ino(to.0)],
            Self::CreateNameless { parent: ino, .. }
            | Self::List { ino }
            | Self::GetAttr { ino }
            | Self::SetAttr { ino, .. }
            | Self::SetXattr { ino, .. }
            | Self::GetXattr { ino, .. }
            | Self::RemoveXattr { ino, .. }
            | Self::Open { ino, .. }
            | Self::Truncate { ino, .. } => vec![places.ino(ino)],
            _ => Vec::new(),
        }
    }

    /// The files whose contents or length it reads or changes.
    pub fn contents(&self, client: usize, places: &Places) -> Vec<InodeNo> {
        let of = |index| places.open(client, index).map(|open| open.ino);
        match *self {
            Self::GetAttr { ino } | Self::Truncate { ino, .. } | Self::Open { ino, .. } => {
                vec![places.ino(ino)]
            }
            Self::Write { handle, .. }
            | Self::Read { handle, .. }
            | Self::Allocate { handle, .. }
            | Self::Fsync { handle } => of(handle).into_iter().collect(),
            Self::Copy { from, to, .. } => of(from).into_iter().chain(of(to)).collect(),
            _ => Vec::new(),
        }
    }

    /// The source of a copy.
    pub fn source(&self, client: usize, places: &Places) -> Option<InodeNo> {
        match *self {
            Self::Copy { from, .. } => places.open(client, from).map(|open| open.ino),
            _ => None,
        }
    }

    /// Sends the operation as client `client`, whose mount is `volume`. `None`: it needs a handle and the client has none.
    pub fn ask(&self, volume: &RemoteVolume, client: usize, places: &Places) -> Option<Answer> {
        let inode = |attr: Attr| attr.ino;
        Some(match *self {
            Self::Make { at, kind } => {
                let (parent, name) = places.entry(at);
                let (node, mode) = node_of(kind);
                Answer::Found(status(volume.make(&CALLER, parent, &name, node, mode)).map(inode))
            }
            Self::Create { at, exclusive, how } => {
                let (parent, name) = places.entry(at);
                let made = status(volume.create(&CALLER, parent, &name, 0o640, exclusive, open_how(how)));
                Answer::Opened(made.map(|(attr, open)| (Some(attr.ino), open.handle, open.change)))
            }
            Self::CreateNameless { parent, how } => {
                let made = volume.create_nameless(&CALLER, places.ino(parent), 0o640, open_how(how));
                Answer::Opened(status(made).map(|(attr, open)| (Some(attr.ino), open.handle, open.change)))
            }
            Self::Link { ino, at } => {
                let (parent, name) = places.entry(at);
                Answer::Found(status(volume.link(&CALLER, places.ino(ino), parent, &name)).map(inode))
            }
            Self::Unlink { at } => {
                let (parent, name) = places.entry(at);
                Answer::Done(status(volume.unlink(&CALLER, parent, &name)))
            }
            Self::Rmdir { at } => {
                let (parent, name) = places.entry(at);
                Answer::Done(status(volume.rmdir(&CALLER, parent, &name)))
            }
            Self::Rename { from, to, mode } => {
                let ((parent, name), (new_parent, new_name)) = (places.entry(from), places.entry(to));
                let moved = volume.rename(&CALLER, parent, &name, new_parent, &new_name, mode);
                Answer::Done(status(moved.map(drop)))
            }
            Self::Lookup { at } => {
                let (parent, name) = places.entry(at);
                Answer::Found(status(volume.lookup(&CALLER, parent, &name)).map(inode))
            }
            Self::List { ino } => Answer::Entries(list(volume, places.ino(ino), 1000, false)),
            Self::GetAttr { ino } => Answer::Attr(status(volume.get_attr(&CALLER, places.ino(ino)))),
            Self::SetAttr { ino, mode, gid } => {
                let set = SetAttr { mode, gid, ..SetAttr::default() };
                Answer::Done(status(volume.set_attr(&CALLER, places.ino(ino), set)).map(|_| ()))
            }
            Self::SetXattr { ino, name: index, salt, mode } => {
                let set = volume.set_xattr(&CALLER, places.ino(ino), &name(index), &value_of(salt), mode);
                Answer::Done(status(set))
            }
            Self::GetXattr { ino, name: index } => {
                Answer::Bytes(status(volume.get_xattr(&CALLER, places.ino(ino), &name(index))))
            }
            Self::RemoveXattr { ino, name: index } => {
                Answer::Done(status(volume.remove_xattr(&CALLER, places.ino(ino), &name(index))))
            }
            Self::Open { ino, how } => {
                let opened = status(volume.open(&CALLER, places.ino(ino), open_how(how)));
                Answer::Opened(opened.map(|open| (None, open.handle, open.change)))
            }
            Self::Truncate { ino, size } => {
                let set = SetAttr { size: Some(size), ..SetAttr::default() };
                Answer::Done(status(volume.set_attr(&CALLER, places.ino(ino), set)).map(|_| ()))
            }
            Self::Write { handle, offset, len, salt } => {
                let handle = places.open(client, handle)?.handle;
                let written = volume.write(&CALLER, handle, offset, &bytes_of(salt, len));
                Answer::Count(status(written).map(u64::from))
            }
            Self::Read { handle, page } => {
                let handle = places.open(client, handle)?.handle;
                Answer::Bytes(read_all(volume, handle, page * PAGE_SIZE_U64, PAGE_SIZE_U64))
            }
            Self::Allocate { handle, offset, len, how } => {
                let handle = places.open(client, handle)?.handle;
                Answer::Done(status(volume.allocate(&CALLER, handle, offset, len, how)).map(drop))
            }
            Self::Copy { from, from_offset, to, to_offset, len } => {
                let (from, to) = (places.open(client, from)?.handle, places.open(client, to)?.handle);
                let copied = status(volume.copy_range(&CALLER, from, from_offset, to, to_offset, len));
                Answer::Count(copied.map(|copied| copied.len))
            }
            Self::Fsync { handle } => {
                Answer::Done(status(volume.fsync(&CALLER, places.open(client, handle)?.handle, false)))
            }
        })
    }
}

/// The node and the mode with which an inode of this kind is made.
pub fn node_of(kind: FileKind) -> (NewNode<'static>, u16) {
    match kind {
        FileKind::File => (NewNode::File, 0o644),
        FileKind::Directory => (NewNode::Directory, 0o3755),
        FileKind::Symlink => (NewNode::Symlink(TARGET), 0o777),
        kind => (NewNode::Special { kind, rdev: RDEV }, 0o600),
    }
}

/// The value of an extended attribute.
pub fn value_of(salt: u8) -> Vec<u8> {
    vec![salt; usize::from(salt) * 5]
}

fn place() -> impl Strategy<Value = u64> {
    let pages = || 0..PAGES;
    prop_oneof![
        3 => pages().prop_map(|page| page * PAGE_SIZE_U64),
        1 => 0..PAGES * PAGE_SIZE_U64,
    ]
}

fn length() -> impl Strategy<Value = u64> {
    prop_oneof![
        2 => 1u64..300,
        3 => (1u64..4).prop_map(|pages| pages * PAGE_SIZE_U64),
        1 => 1..PAGES * PAGE_SIZE_U64,
    ]
}

fn entry() -> impl Strategy<Value = Entry> {
    (prop_oneof![6 => Just(0usize), 3 => 4usize..7, 1 => 0usize..16], 0usize..4)
}

fn names() -> impl Strategy<Value = Op> {
    let ino = || prop_oneof![6 => 0usize..6, 1 => 0usize..16];
    let how = How { read: true, write: true, append: false, truncate: false, sync: false };
    let kind =
        prop_oneof![2 => Just(FileKind::File), 3 => Just(FileKind::Directory), 1 => Just(FileKind::Symlink)];
    let rename = prop_oneof![
        3 => Just(RenameMode::Replace), 1 => Just(RenameMode::NoReplace), 2 => Just(RenameMode::Exchange)
    ];
    let xattr =
        prop_oneof![1 => Just(XattrMode::Any), 2 => Just(XattrMode::Create), 1 => Just(XattrMode::Replace)];
    prop_oneof![
        4 => (entry(), kind).prop_map(|(at, kind)| Op::Make { at, kind }),
        5 => (entry(), any::<bool>()).prop_map(move |(at, exclusive)| Op::Create { at, exclusive, how }),
        1 => (0usize..7).prop_map(move |parent| Op::CreateNameless { parent, how }),
        3 => (ino(), entry()).prop_map(|(ino, at)| Op::Link { ino, at }),
        5 => entry().prop_map(|at| Op::Unlink { at }),
        3 => entry().prop_map(|at| Op::Rmdir { at }),
        6 => (entry(), entry(), rename).prop_map(|(from, to, mode)| Op::Rename { from, to, mode }),
        2 => entry().prop_map(|at| Op::Lookup { at }),
        2 => prop_oneof![Just(0usize), 4usize..7].prop_map(|ino| Op::List { ino }),
        2 => ino().prop_map(|ino| Op::GetAttr { ino }),
        2 => (ino(), prop::option::of(0u16..0o10000), prop::option::of(0u32..9))
            .prop_map(|(ino, mode, gid)| Op::SetAttr { ino, mode, gid }),
        2 => (ino(), 0usize..2, any::<u8>(), xattr)
            .prop_map(|(ino, name, salt, mode)| Op::SetXattr { ino, name, salt, mode }),
        1 => (ino(), 0usize..2).prop_map(|(ino, name)| Op::GetXattr { ino, name }),
        1 => (ino(), 0usize..2).prop_map(|(ino, name)| Op::RemoveXattr { ino, name }),
    ]
}

fn contents() -> impl Strategy<Value = Op> {
    // Most operations are about the first two files, whose handles are among the first of each client.
    let handle = || prop_oneof![4 => 0usize..2, 1 => 0usize..6];
    let ino = || prop_oneof![4 => 1usize..3, 1 => 0usize..16];
    let allocate = prop_oneof![
        any::<bool>().prop_map(|keep_size| Allocate::Reserve { keep_size }),
        Just(Allocate::PunchHole),
        any::<bool>().prop_map(|keep_size| Allocate::ZeroRange { keep_size }),
    ];
    let how = (any::<bool>(), prop::bool::weighted(0.3)).prop_map(|(append, truncate)| How {
        read: true,
        write: true,
        append,
        truncate,
        sync: false,
    });
    prop_oneof![
        8 => (handle(), place(), length(), any::<u64>())
            .prop_map(|(handle, offset, len, salt)| Op::Write { handle, offset, len, salt }),
        4 => (handle(), 0..PAGES).prop_map(|(handle, page)| Op::Read { handle, page }),
        3 => (ino(), place()).prop_map(|(ino, size)| Op::Truncate { ino, size }),
        3 => (handle(), place(), length(), allocate)
            .prop_map(|(handle, offset, len, how)| Op::Allocate { handle, offset, len, how }),
        3 => (0usize..6, place(), handle(), place(), length()).prop_map(
            |(from, from_offset, to, to_offset, len)| Op::Copy { from, from_offset, to, to_offset, len }
        ),
        1 => handle().prop_map(|handle| Op::Fsync { handle }),
        2 => (ino(), how).prop_map(|(ino, how)| Op::Open { ino, how }),
        1 => ino().prop_map(|ino| Op::GetAttr { ino }),
    ]
}

/// The operations of one batch with the clients that do them: all about names, all about contents, or mixed.
pub fn ops(clients: usize) -> impl Strategy<Value = Vec<(usize, Op)>> {
    let of = |op: BoxedStrategy<Op>| prop::collection::vec((0..clients, op), 2..6);
    prop_oneof![
        4 => of(names().boxed()),
        4 => of(contents().boxed()),
        1 => of(prop_oneof![names(), contents()].boxed()),
    ]
}
