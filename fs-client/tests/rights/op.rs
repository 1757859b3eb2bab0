//! The users' operations. Each runs on a fresh tree: two directories with a file, a directory, and links in each.

use super::people::{FELLOW, OWNER, STRANGER};
use cuttlefs_common::rpc::RenameMode;
use cuttlefs_common::world::{Random, SeededRandom};
use std::collections::BTreeMap;

/// An error number, as applications see it. No negative number comes from the kernel.
pub type Errno = i32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    File,
    Directory,
    Symlink,
    Fifo,
}

/// An inode of the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub path: &'static str,
    pub kind: Kind,
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
}

/// The state after an operation, by path: file type and mode, user, group, links of a file, size of a file, names of attributes.
pub type State = BTreeMap<String, (u32, u32, u32, u32, u64, Vec<String>)>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Time {
    Omit,
    Now,
    At,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    Stat(&'static str),
    Open {
        path: &'static str,
        read: bool,
        write: bool,
        truncate: bool,
    },
    /// open(2) with O_CREAT, then a read, and a write if it was opened for that.
    Create {
        path: &'static str,
        mode: u16,
        exclusive: bool,
        read: bool,
        write: bool,
    },
    /// open(2) with O_TMPFILE in the directory of this path, a write, and a link to this path.
    Nameless(&'static str, u16),
    Mkdir(&'static str, u16),
    Fifo(&'static str, u16),
    Device {
        path: &'static str,
        block: bool,
        whiteout: bool,
    },
    Symlink(&'static str),
    Link(&'static str, &'static str),
    Unlink(&'static str),
    Rmdir(&'static str),
    Rename(&'static str, &'static str, RenameMode),
    Chmod(&'static str, u16),
    Chown(&'static str, Option<u32>, Option<u32>),
    Truncate(&'static str),
    Times(&'static str, Time, Time),
    List(&'static str),
    ReadLink(&'static str),
    SetXattr(&'static str, &'static str),
    GetXattr(&'static str, &'static str),
    RemoveXattr(&'static str, &'static str),
    ListXattr(&'static str),
    /// Opens the file for writing, then changes its contents.
    Write(&'static str),
    Allocate(&'static str),
    Copy(&'static str, &'static str),
    /// Opens the file for writing, has root take all its permissions away, and cuts the file through the open descriptor.
    CutOpen(&'static str),
}

/// The result of an operation, as text.
pub type Answer = Result<String, Errno>;

const DIRECTORY_MODES: &[u16] = &[
    0o755, 0o700, 0o770, 0o777, 0o1777, 0o2775, 0o2777, 0o3777, 0o711, 0o744, 0o722, 0o555, 0o070, 0o007,
    0o000, 0o1770,
];
const FILE_MODES: &[u16] = &[
    0o644, 0o600, 0o640, 0o660, 0o666, 0o444, 0o222, 0o000, 0o060, 0o006, 0o4755, 0o4777, 0o2755, 0o2777,
    0o2666, 0o6777, 0o4666, 0o711,
];
const NEW_MODES: &[u16] = &[0o644, 0o600, 0o4755, 0o2755, 0o2745, 0o6777, 0o1777, 0o000];
const UIDS: &[u32] = &[OWNER.uid, OWNER.uid, FELLOW.uid, 0];
const GIDS: &[u32] = &[OWNER.gid, OWNER.gid, 62_002, 0];
const XATTRS: &[&str] = &["user.a", "trusted.a", "security.a"];

/// The attributes of each new file and directory of a tree.
pub const MADE_WITH: &[(&str, &str)] = &[("user.a", "1"), ("trusted.a", "2"), ("security.a", "3")];

/// Draws random trees and operations.
pub struct Draw {
    random: SeededRandom,
}

impl Draw {
    pub fn new(seed: u64) -> Self {
        Self { random: SeededRandom::new(seed) }
    }

    fn below(&self, bound: usize) -> usize {
        (self.random.next_u64() % bound as u64) as usize
    }

    fn one<T: Copy>(&self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    fn coin(&self) -> bool {
        self.below(2) == 0
    }

    pub fn tree(&self) -> Vec<Node> {
        let node = |path, kind, modes: &[u16]| Node {
            path,
            kind,
            mode: self.one(modes),
            uid: self.one(UIDS),
            gid: self.one(GIDS),
        };
        vec![
            node("d1", Kind::Directory, DIRECTORY_MODES),
            node("d2", Kind::Directory, DIRECTORY_MODES),
            node("d1/f", Kind::File, FILE_MODES),
            node("d2/g", Kind::File, FILE_MODES),
            node("d1/s", Kind::Directory, DIRECTORY_MODES),
            node("d2/e", Kind::Directory, DIRECTORY_MODES),
            node("d1/s/x", Kind::File, FILE_MODES),
            node("d1/l", Kind::Symlink, &[0o777]),
            node("d1/p", Kind::Fifo, FILE_MODES),
        ]
    }

    fn any(&self) -> &'static str {
        self.one(&["d1/f", "d1/f", "d2/g", "d1", "d1/s", "d1/s/x", "d1/p", "d2/e", "d1/l", "d1/none"])
    }

    fn file(&self) -> &'static str {
        self.one(&["d1/f", "d1/f", "d2/g", "d1/s/x"])
    }

    fn missing(&self) -> &'static str {
        self.one(&["d1/n", "d1/n", "d2/n", "d1/s/n", "d1/f"])
    }

    pub fn op(&self, tree: &[Node]) -> Op {
        let is_sticky = |path: &str| {
            let parent = path.rsplit_once('/').map_or("", |(parent, _)| parent);
            tree.iter().any(|node| node.path == parent && node.mode & 0o1000 != 0)
        };
        match self.below(25) {
            0 => Op::Stat(self.any()),
            1 => Op::Open {
                path: self.one(&["d1/f", "d1/f", "d2/g", "d1/s/x", "d1/none"]),
                read: true,
                write: self.coin(),
                truncate: self.below(4) == 0,
            },
            2 | 3 => {
                let (path, exclusive) = (self.missing(), self.coin());
                // Whether `fs.protected_regular` refuses an open depends on its path, and not on the file.
                let exclusive = exclusive || is_sticky(path);
                Op::Create { path, mode: self.one(NEW_MODES), exclusive, read: true, write: self.coin() }
            }
            4 => Op::Mkdir(self.missing(), self.one(NEW_MODES)),
            5 => Op::Fifo(self.missing(), self.one(NEW_MODES)),
            6 => Op::Device { path: self.missing(), block: self.coin(), whiteout: self.coin() },
            7 => Op::Symlink(self.missing()),
            8 => Op::Link(self.any(), self.missing()),
            9 => Op::Unlink(self.any()),
            10 => Op::Rmdir(self.one(&["d2/e", "d2/e", "d1/s", "d1/f", "d1/none"])),
            11 | 12 => {
                use RenameMode::{Exchange, NoReplace, NoReplaceWhiteout, Replace, Whiteout};
                let mode = self.one(&[Replace, Replace, NoReplace, Exchange, Whiteout, NoReplaceWhiteout]);
                let (from, to) = self.one(&[
                    ("d1/f", "d2/g"),
                    ("d1/f", "d1/n"),
                    ("d1/f", "d2/n"),
                    ("d1/s", "d2/n"),
                    ("d1/s", "d2/e"),
                    ("d2/e", "d1/n"),
                    ("d1/l", "d2/g"),
                    ("d2/g", "d1/l"),
                    ("d1/none", "d2/g"),
                ]);
                Op::Rename(from, to, mode)
            }
            13 => Op::Chmod(self.one(&["d1/f", "d2/g", "d1", "d1/s", "d1/p", "d1/s/x"]), self.one(NEW_MODES)),
            14 => {
                let uid = self.one(&[None, None, Some(OWNER.uid), Some(STRANGER.uid)]);
                let gid = self.one(&[None, Some(OWNER.gid), Some(62_002), Some(62_009), Some(62_004)]);
                // chown(2) without a new owner still takes set-id bits, and reaches a file system as no change.
                Op::Chown(self.any(), uid, gid.or(uid.is_none().then_some(OWNER.gid)))
            }
            15 => Op::Truncate(self.one(&["d1/f", "d1/f", "d2/g", "d1", "d1/s/x"])),
            16 => {
                let times = [Time::Omit, Time::Now, Time::At];
                let (atime, mtime) = (self.one(&times), self.one(&times));
                // A call that omits both times would do nothing.
                let mtime = if (atime, mtime) == (Time::Omit, Time::Omit) { Time::Now } else { mtime };
                Op::Times(self.any(), atime, mtime)
            }
            17 => self.one(&[Op::List as fn(&'static str) -> Op, Op::ListXattr])(
                self.one(&["d1", "d2", "d1/s"]),
            ),
            18 => self
                .one(&[Op::ReadLink("d1/l"), Op::ListXattr("d1/f"), Op::ListXattr("d1/p")].each_ref())
                .clone(),
            19 => Op::SetXattr(self.any(), self.one(XATTRS)),
            20 => Op::GetXattr(self.any(), self.one(XATTRS)),
            21 => Op::RemoveXattr(self.any(), self.one(XATTRS)),
            22 => Op::Write(self.file()),
            23 => Op::Nameless(self.missing(), self.one(NEW_MODES)),
            _ => match self.below(3) {
                0 => Op::Allocate(self.file()),
                1 => Op::Copy(self.file(), self.file()),
                _ => Op::CutOpen(self.file()),
            },
        }
    }
}
