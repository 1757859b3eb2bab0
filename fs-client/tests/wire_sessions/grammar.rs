//! Random requests of every kind. Most of them make sense; their numbers are ones that the server told some session.

use crate::dice::Dice;
use cuttlefs_common::attr::{ACCESS_ACL_XATTR, FileKind, InodeFlags, SetAttr, SetTime, Timestamp};
use cuttlefs_common::ids::{ClientId, FileKey, FilePage, InodeNo, Rkey, SlotIndex};
use cuttlefs_common::locks::{Lock, LockMode, LockOwner, LockRange, LockSpace, WaitId};
use cuttlefs_common::rdma::FileAtomic;
use cuttlefs_common::region::PageSet;
use cuttlefs_common::rpc::{
    Allocate, NewNode, OpenBy, OpenTicket, Payload, Reclaim, ReclaimLock, RegionKey, RemoteBuffer,
    RenameMode, Reply, Request, Restored, Rights, SeekFor, SessionSecret, Sink, SyncScope, Unanswered,
    XattrMode,
};
use std::collections::HashMap;

/// Makes `Kind`, the names of the kinds of requests. A new variant of `Request` does not compile until it is listed, drawn and answered here.
macro_rules! kinds {
    ($($kind:ident),* $(,)?) => {
        /// The kind of a request.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Kind { $($kind),* }

        impl Kind {
            pub const ALL: &[Kind] = &[$(Kind::$kind),*];

            pub fn of(request: &Request<'_>) -> Self {
                match request { $(Request::$kind { .. } => Kind::$kind),* }
            }
        }
    };
}

kinds! {
    Attach, Heartbeat, Detach, Reclaim, Lookup, GetAttr, SetAttr, Make, Create, Link, Unlink, Rmdir, Rename, ReadLink, ReadDir,
    Open, Close, Layout, Fetch, Write, Sync, Allocate, Seek, CopyRange, GetXattr, ListXattr, SetXattr, RemoveXattr, StatFs,
    Status, Recovered, ShareCounters, SetLock, Unlock, TestLock, AwaitLocks, CancelLock, ReclaimLocks, Restore,
    CreateNameless, Bind, BindAgain, Unbind, OpenRegion, GrantWrite, ReturnGrant, Changes, Defragment, Atomic,
}

impl Kind {
    /// Whether a reply fits a request of this kind.
    pub fn is_answered_by(self, reply: &Reply<'_>) -> bool {
        use Kind as K;
        use Reply as R;
        match self {
            K::Heartbeat | K::Detach | K::Recovered | K::ShareCounters | K::Unlink | K::Rmdir => {
                matches!(reply, R::Done)
            }
            K::Close | K::Sync | K::SetXattr | K::RemoveXattr | K::Unlock => matches!(reply, R::Done),
            K::Unbind | K::ReturnGrant => matches!(reply, R::Done),
            K::Bind | K::BindAgain => matches!(reply, R::Bound(_)),
            K::CancelLock => matches!(reply, R::Done | R::Settled(_)),
            K::Attach => matches!(reply, R::Attached(_)),
            K::Reclaim => matches!(reply, R::Reclaimed(_)),
            K::Lookup
            | K::GetAttr
            | K::SetAttr
            | K::Make
            | K::Link
            | K::Rename
            | K::Allocate
            | K::GrantWrite => {
                matches!(reply, R::Attr(_))
            }
            K::SetLock => matches!(reply, R::Attr(_) | R::Queued),
            K::Open | K::Create | K::CreateNameless | K::OpenRegion => matches!(reply, R::Opened(_)),
            K::ReadLink | K::GetXattr | K::ListXattr => matches!(reply, R::Bytes(_)),
            K::ReadDir => matches!(reply, R::Entries { .. }),
            K::Layout => matches!(reply, R::Layout(_)),
            K::Fetch => matches!(reply, R::Fetched { .. }),
            K::Write => matches!(reply, R::Written { .. }),
            K::Seek => matches!(reply, R::Offset(_)),
            K::CopyRange => matches!(reply, R::Copied { .. }),
            K::StatFs => matches!(reply, R::Space(_)),
            K::Status => matches!(reply, R::Status(_)),
            K::TestLock => matches!(reply, R::Tested(_)),
            K::AwaitLocks => matches!(reply, R::Settled(_)),
            K::ReclaimLocks => matches!(reply, R::LocksReclaimed(_)),
            K::Restore => matches!(reply, R::Restored { .. }),
            K::Changes => matches!(reply, R::Changes(_)),
            K::Defragment => matches!(reply, R::Moved { .. }),
            K::Atomic => matches!(reply, R::Old(_)),
        }
    }
}

/// How many numbers of each kind are remembered.
const KNOWN_MAX: usize = 64;
/// Names of files, and names that no file may have.
const NAMES: [&[u8]; 17] = [
    b"a", b"b", b"c", b"d", b"e", b"open", b"closed", b"shut", b"victim", b"counter", b"once", b"inbox",
    b"notice", b"", b".", b"..", b"x/y",
];

/// What the hostile peers know together: numbers that the server told one of them, or the victim.
#[derive(Default)]
pub struct Known {
    pub inos: Vec<InodeNo>,
    pub filekeys: Vec<FileKey>,
    pub tickets: Vec<OpenTicket>,
    pub regions: Vec<RegionKey>,
    /// Inodes of files that are worth a try.
    pub notable: Notable,
    own: HashMap<[u8; 16], Own>,
}

/// Inode numbers by user. A number that was told to another user is of no use.
pub type Notable = HashMap<u32, Vec<InodeNo>>;

/// What the server told a session.
#[derive(Default)]
struct Own {
    root: Option<InodeNo>,
    filekeys: Vec<FileKey>,
}

impl Known {
    pub fn new(notable: Notable) -> Self {
        Self { notable, ..Self::default() }
    }

    /// Whether a session knows a directory to make files in, and whether it has files open.
    pub fn has(&self, session: SessionSecret) -> (bool, bool) {
        self.own.get(&session.0).map_or((false, false), |own| (own.root.is_some(), !own.filekeys.is_empty()))
    }

    /// Learns the numbers in an answer to a session.
    pub fn learn(&mut self, dice: &Dice, session: SessionSecret, reply: &Reply<'_>) {
        let own = self.own.entry(session.0).or_default();
        match reply {
            Reply::Attached(attached) => {
                own.root = Some(attached.root);
                note(dice, &mut self.inos, attached.root);
            }
            Reply::Attr(attr) => note(dice, &mut self.inos, attr.ino),
            Reply::Bound(key) => note(dice, &mut self.regions, *key),
            Reply::Opened(opened) => {
                note(dice, &mut own.filekeys, opened.filekey);
                self.learn_opened(dice, opened);
            }
            Reply::Reclaimed(all) => {
                all.iter().flatten().for_each(|opened| note(dice, &mut own.filekeys, opened.filekey));
                all.iter().flatten().for_each(|opened| self.learn_opened(dice, opened));
            }
            Reply::Entries { entries, .. } => {
                entries.iter().take(4).for_each(|entry| note(dice, &mut self.inos, entry.ino));
            }
            _ => {}
        }
    }

    pub fn learn_region(&mut self, dice: &Dice, key: RegionKey) {
        note(dice, &mut self.regions, key);
    }

    pub fn learn_opened(&mut self, dice: &Dice, opened: &cuttlefs_common::rpc::Opened) {
        note(dice, &mut self.inos, opened.attr.ino);
        note(dice, &mut self.filekeys, opened.filekey);
        note(dice, &mut self.tickets, opened.ticket);
    }
}

fn note<T: PartialEq>(dice: &Dice, known: &mut Vec<T>, number: T) {
    if known.contains(&number) {
    } else if known.len() < KNOWN_MAX {
        known.push(number);
    } else {
        let at = dice.below(KNOWN_MAX);
        known[at] = number;
    }
}

/// Draws random requests.
pub struct Grammar<'g> {
    pub dice: &'g Dice,
    pub known: &'g Known,
    /// The user who asks.
    pub uid: u32,
    /// The secret of the session that asks.
    pub session: SessionSecret,
    /// The secret for an attach request.
    pub attaches_with: SessionSecret,
}

impl Grammar<'_> {
    /// The body of a request of this kind.
    pub fn draw(&self, kind: Kind) -> Vec<u8> {
        let dice = self.dice;
        let (name, other) = (self.name(), self.name());
        let inline = dice.bytes(if dice.chance(95) { 1 + dice.below(5000) } else { dice.below(60_000) });
        let label = "hostile".repeat(dice.below(20));
        let request = match kind {
            Kind::Attach => Request::Attach {
                secret: self.attaches_with,
                label: &label,
                subtree: match dice.below(20) {
                    0 => dice.pick(&[&b"closed"[..], b"..", b"victim", b"open/a/b", &inline]),
                    1..9 => b"",
                    _ => b"open",
                },
            },
            Kind::Heartbeat => Request::Heartbeat,
            Kind::Detach => Request::Detach,
            Kind::Reclaim => Request::Reclaim { files: self.some(300, || self.reclaim()) },
            Kind::Lookup => Request::Lookup { parent: self.directory(), name: &name },
            Kind::GetAttr => Request::GetAttr { ino: self.ino() },
            Kind::SetAttr => Request::SetAttr { ino: self.ino(), set: self.set_attr() },
            Kind::Make => {
                let node = match dice.below(5) {
                    0 | 1 => NewNode::File,
                    2 => NewNode::Directory,
                    3 => NewNode::Symlink(&other),
                    _ => NewNode::Special {
                        kind: dice.pick(&[
                            FileKind::Fifo,
                            FileKind::Socket,
                            FileKind::BlockDevice,
                            FileKind::File,
                        ]),
                        rdev: dice.edge() as u32,
                    },
                };
                Request::Make { parent: self.directory(), name: &name, node, mode: self.mode() }
            }
            Kind::Create => Request::Create {
                parent: self.directory(),
                name: &name,
                mode: self.mode(),
                exclusive: dice.chance(30),
                rights: self.rights(),
            },
            Kind::CreateNameless => {
                Request::CreateNameless { parent: self.directory(), mode: self.mode(), rights: self.rights() }
            }
            Kind::Link => Request::Link { ino: self.ino(), parent: self.directory(), name: &name },
            Kind::Unlink => Request::Unlink { parent: self.directory(), name: &name },
            Kind::Rmdir => Request::Rmdir { parent: self.directory(), name: &name },
            Kind::Rename => {
                use RenameMode::{Exchange, NoReplace, NoReplaceWhiteout, Replace, Whiteout};
                let mode = dice.pick(&[Replace, NoReplace, Exchange, Whiteout, NoReplaceWhiteout]);
                let (parent, new_parent) = (self.directory(), self.directory());
                Request::Rename { parent, name: &name, new_parent, new_name: &other, mode }
            }
            Kind::ReadLink => Request::ReadLink { ino: self.ino() },
            Kind::ReadDir => Request::ReadDir {
                ino: self.ino(),
                cookie: if dice.chance(60) { 0 } else { dice.edge() },
                max_bytes: dice.edge() as u32,
                plus: dice.chance(50),
            },
            Kind::Open => Request::Open {
                ino: self.ino(),
                rights: self.rights(),
                truncate: dice.chance(10),
                by: if dice.chance(50) { OpenBy::Number } else { OpenBy::Name { told: dice.edge() } },
            },
            Kind::Close => Request::Close { filekeys: self.some(20, || self.filekey()) },
            Kind::Layout => Request::Layout {
                filekey: self.filekey(),
                first_page: FilePage(if dice.chance(70) { 0 } else { dice.edge() }),
                max_extents: dice.edge() as u32,
            },
            Kind::Fetch => {
                // Often beyond the end of a short file, where the server must send nothing.
                let past = dice.chance(40);
                let (offset, len) = if past { (0, 64 << 10) } else { (dice.offset(), dice.len() as u32) };
                let pages = if dice.chance(90) && len <= 1 << 21 && offset < 1 << 62 {
                    let mut pages = PageSet::none_of_range(offset, len as usize);
                    let spanned = cuttlefs_common::region::divide(offset, len as usize).len();
                    (0..spanned).filter(|_| dice.chance(70)).for_each(|page| pages.insert(page));
                    pages
                } else {
                    PageSet::all(dice.below(600))
                };
                let sink = if dice.chance(if past { 10 } else { 50 }) {
                    Sink::Inline
                } else {
                    Sink::Push(self.buffer(len))
                };
                Request::Fetch { filekey: self.filekey(), offset, len, pages, sink }
            }
            Kind::Write => Request::Write {
                filekey: self.filekey(),
                offset: dice.offset(),
                append: dice.chance(20),
                payload: if dice.chance(60) {
                    Payload::Inline(&inline)
                } else {
                    Payload::Pull(self.buffer(dice.len() as u32))
                },
            },
            Kind::Sync => Request::Sync(match dice.below(4) {
                0 => SyncScope::All,
                1 => SyncScope::InodeContents(self.ino()),
                _ => SyncScope::Inode(self.ino()),
            }),
            Kind::Allocate => {
                let (offset, len, how) = (dice.offset(), dice.len(), self.allocate());
                Request::Allocate { filekey: self.filekey(), offset, len, how }
            }
            Kind::Seek => {
                let seek = dice.pick(&[SeekFor::Data, SeekFor::Hole]);
                Request::Seek { filekey: self.filekey(), offset: dice.offset(), seek }
            }
            Kind::CopyRange => Request::CopyRange {
                from: self.filekey(),
                from_offset: dice.offset(),
                to: self.filekey(),
                to_offset: dice.offset(),
                len: dice.len(),
            },
            Kind::GetXattr => Request::GetXattr { ino: self.ino(), name: self.xattr() },
            Kind::ListXattr => Request::ListXattr { ino: self.ino() },
            Kind::SetXattr => Request::SetXattr {
                ino: self.ino(),
                name: self.xattr(),
                value: &inline,
                mode: dice.pick(&[XattrMode::Any, XattrMode::Create, XattrMode::Replace]),
            },
            Kind::RemoveXattr => Request::RemoveXattr { ino: self.ino(), name: self.xattr() },
            Kind::StatFs => Request::StatFs,
            Kind::Status => Request::Status,
            Kind::Recovered => {
                let unanswered = || {
                    let slot =
                        SlotIndex(if dice.chance(90) { dice.below(64) as u16 } else { dice.edge() as u16 });
                    Unanswered { slot, seq: dice.edge() }
                };
                Request::Recovered { unanswered: self.some(70, unanswered) }
            }
            Kind::ShareCounters => Request::ShareCounters { buffer: self.buffer(dice.len() as u32) },
            Kind::SetLock => Request::SetLock {
                filekey: self.filekey(),
                lock: self.lock(),
                wait: self.wait(),
                blocking: dice.chance(50),
            },
            Kind::Unlock => {
                let Lock { space, owner, range, .. } = self.lock();
                Request::Unlock { ino: self.ino(), space, owner, range }
            }
            Kind::TestLock => Request::TestLock { filekey: self.filekey(), lock: self.lock() },
            Kind::AwaitLocks => Request::AwaitLocks {
                // The server keeps a connection for that long, so long times are rare.
                hold_ms: if dice.number().is_multiple_of(200) {
                    dice.edge() as u32
                } else {
                    dice.below(50) as u32
                },
            },
            Kind::CancelLock => Request::CancelLock { wait: self.wait() },
            Kind::ReclaimLocks => {
                let lock = || ReclaimLock { ino: self.ino(), lock: self.lock() };
                Request::ReclaimLocks { locks: self.some(100, lock) }
            }
            Kind::Restore => {
                let what = match dice.below(4) {
                    0 => Restored::Bytes { offset: dice.offset(), bytes: Payload::Inline(&inline) },
                    1 => {
                        let bytes = Payload::Pull(self.buffer(dice.len() as u32));
                        Restored::Bytes { offset: dice.offset(), bytes }
                    }
                    2 => Restored::End(dice.offset()),
                    _ => Restored::Allocate { offset: dice.offset(), len: dice.len(), how: self.allocate() },
                };
                Request::Restore { filekey: self.filekey(), change: dice.edge(), what }
            }
            Kind::Bind => {
                let (filekey, rights) = (self.filekey(), self.rights());
                let lifetime_ms = if dice.chance(50) { 0 } else { dice.edge() };
                Request::Bind { filekey, offset: dice.offset(), len: dice.len(), rights, lifetime_ms }
            }
            Kind::BindAgain => Request::BindAgain { filekey: self.filekey(), key: self.region() },
            Kind::Unbind => Request::Unbind { number: self.region().number },
            Kind::OpenRegion => Request::OpenRegion { key: self.region() },
            Kind::GrantWrite => {
                Request::GrantWrite { filekey: self.filekey(), offset: dice.offset(), len: dice.len() }
            }
            Kind::ReturnGrant => {
                Request::ReturnGrant { filekey: self.filekey(), offset: dice.offset(), len: dice.len() }
            }
            Kind::Changes => Request::Changes { inodes: self.some(2000, || self.ino()) },
            Kind::Defragment => {
                let first_page = FilePage(if dice.chance(50) { 0 } else { dice.edge() });
                Request::Defragment { filekey: self.filekey(), first_page }
            }
            Kind::Atomic => {
                let operation = match dice.chance(50) {
                    true => FileAtomic::CompareSwap { expect: dice.edge(), swap: dice.edge() },
                    false => FileAtomic::FetchAdd { add: dice.edge() },
                };
                // Most at places where there can be a word.
                let offset = if dice.chance(80) { dice.offset() & !7 } else { dice.offset() };
                Request::Atomic { filekey: self.filekey(), offset, operation, durable: dice.chance(20) }
            }
        };
        let mut body = vec![0; 64 << 10];
        let len = request.encode(&mut body).expect("what is drawn fits a message");
        body.truncate(len);
        body
    }

    fn some<T>(&self, most: usize, one: impl Fn() -> T) -> Vec<T> {
        let count = if self.dice.chance(90) { self.dice.below(4) } else { self.dice.below(most) };
        (0..count).map(|_| one()).collect()
    }

    fn name(&self) -> Vec<u8> {
        match self.dice.below(20) {
            0 => self.dice.bytes(1 + self.dice.below(300)),
            1 => vec![b'n'; 255],
            2 => self.dice.pick(&[&b"inbox"[..], b"notice"]).to_vec(),
            _ => self.dice.pick(&NAMES[..if self.dice.chance(80) { 5 } else { NAMES.len() }]).to_vec(),
        }
    }

    fn ino(&self) -> InodeNo {
        match self.dice.below(20) {
            0 => InodeNo(self.dice.edge()),
            1 => InodeNo(1 + self.dice.number() % 64),
            2..6 => self.root(),
            6..10 => self.dice.pick(&self.known.notable[&self.uid]),
            _ if self.known.inos.is_empty() => InodeNo::ROOT,
            _ => self.dice.pick(&self.known.inos),
        }
    }

    fn directory(&self) -> InodeNo {
        if self.dice.chance(70) { self.root() } else { self.ino() }
    }

    fn root(&self) -> InodeNo {
        self.known.own.get(&self.session.0).and_then(|own| own.root).unwrap_or(InodeNo::ROOT)
    }

    /// In most cases a filekey of the session's own.
    fn filekey(&self) -> FileKey {
        let own = self.known.own.get(&self.session.0).map_or(&[][..], |own| &own.filekeys);
        if !own.is_empty() && self.dice.chance(85) {
            self.dice.pick(own)
        } else if self.known.filekeys.is_empty() || self.dice.chance(5) {
            FileKey(self.dice.edge())
        } else {
            self.dice.pick(&self.known.filekeys)
        }
    }

    fn reclaim(&self) -> Reclaim {
        let known = &self.known.tickets;
        let ticket = (!known.is_empty() && self.dice.chance(70)).then(|| self.dice.pick(known));
        Reclaim { ino: self.ino(), rights: self.rights(), ticket }
    }

    /// A key that the server gave somebody, as it is or with one field changed; or one that it never gave.
    fn region(&self) -> RegionKey {
        let dice = self.dice;
        let known = &self.known.regions;
        let key = if known.is_empty() {
            RegionKey {
                pool: [7; 16],
                client: ClientId(dice.number().into()),
                number: dice.edge(),
                offset: 0,
                len: 1 + dice.number() % 10_000,
                rights: Rights { read: true, write: dice.chance(50) },
                expiry_ms: None,
                mac: [7; 16],
            }
        } else {
            dice.pick(known)
        };
        if dice.chance(70) {
            return key;
        }
        let mut bytes = key.to_bytes();
        bytes[8 + dice.below(80)] ^= 1 << dice.below(8);
        RegionKey::parse(&bytes).unwrap_or(key)
    }

    fn rights(&self) -> Rights {
        Rights { read: self.dice.chance(60), write: self.dice.chance(60) }
    }

    fn mode(&self) -> u16 {
        self.dice.pick(&[0o777, 0o666, 0o600, 0o4755, 0, 0o170777, 0o1777, u16::MAX])
    }

    fn set_attr(&self) -> SetAttr {
        let dice = self.dice;
        let time = || {
            let at = Timestamp { secs: dice.edge() as i64, nanos: dice.edge() as u32 };
            if dice.chance(50) { SetTime::Now } else { SetTime::At(at) }
        };
        SetAttr {
            mode: dice.chance(25).then(|| self.mode()),
            uid: dice.chance(10).then(|| dice.edge() as u32),
            gid: dice.chance(10).then(|| dice.edge() as u32),
            size: dice.chance(40).then(|| dice.offset()),
            atime: dice.chance(20).then(time),
            mtime: dice.chance(20).then(time),
            ctime: dice.chance(5).then_some(Timestamp { secs: 1, nanos: 2 }),
            flags: dice.chance(5).then(|| InodeFlags(dice.number() as u32 & 0xffff)),
        }
    }

    fn xattr(&self) -> &'static [u8] {
        self.dice.pick(&[
            &b"user.mark"[..],
            b"user.a",
            b"user.b",
            b"trusted.a",
            b"security.capability",
            ACCESS_ACL_XATTR,
            b"system.posix_acl_default",
            b"user.",
            b"",
        ])
    }

    fn buffer(&self, len: u32) -> RemoteBuffer {
        let rkey = Rkey(if self.dice.chance(80) { 7 } else { self.dice.edge() as u32 });
        let offset = if self.dice.chance(80) { 0 } else { self.dice.edge() };
        RemoteBuffer { rkey, offset, len: if self.dice.chance(90) { len } else { self.dice.edge() as u32 } }
    }

    fn allocate(&self) -> Allocate {
        let keep_size = self.dice.chance(50);
        let (reserve, zero) = (Allocate::Reserve { keep_size }, Allocate::ZeroRange { keep_size });
        self.dice.pick(&[reserve, Allocate::PunchHole, zero])
    }

    fn lock(&self) -> Lock {
        let dice = self.dice;
        let range = match dice.below(4) {
            0 => LockRange { first: dice.edge(), last: dice.edge() },
            1 => LockRange { first: dice.number() % 100, last: 100 + dice.number() % 100 },
            _ => LockRange::WHOLE,
        };
        Lock {
            space: dice.pick(&[LockSpace::Ranges, LockSpace::Whole]),
            owner: LockOwner(dice.number() % 4),
            range,
            mode: dice.pick(&[LockMode::Shared, LockMode::Exclusive]),
            pid: dice.edge() as u32,
        }
    }

    fn wait(&self) -> WaitId {
        WaitId(self.dice.number() % 6)
    }
}
