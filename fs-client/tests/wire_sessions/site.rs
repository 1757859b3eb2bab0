//! A server, the files that are planted in it, and a count of everything that it holds for its peers.

use crate::dice::Dice;
use crate::grammar::Notable;
use crate::scouts;
use crate::serving::{self, Serve};
use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::{Caller, FsError, Handle, OpenHow, Volume};
use cuttlefs_common::attr::{FileKind, SetAttr};
use cuttlefs_common::ids::{InodeNo, TraceId};
use cuttlefs_common::memory::STALE;
use cuttlefs_common::rdma::Endpoint;
use cuttlefs_common::rpc::{NewNode, XattrMode};
use cuttlefs_common::status::Status;
use cuttlefs_server::Resource;
use cuttlefs_server::files::GrantFigures;
use cuttlefs_server::pages::Hotspots;
use cuttlefs_server::pages::policy::RegionPolicy;
use cuttlefs_server::pool::FormatOptions;
use cuttlefs_server::serve::RunningServer;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

/// The owner of the files `victim` and `counter`.
pub const VICTIM: u32 = 61_101;
/// The owner of the directory `once`.
pub const REPEATER: u32 = 61_102;
/// The owner of the directory `let`.
pub const LANDLORD: u32 = 61_103;
/// The users of the hostile peers.
pub const STRANGERS: [u32; 2] = [61_111, 61_112];
/// The length of each planted file.
pub const PLANTED_LEN: usize = 256 << 10;
/// The repeated contents of `notice`.
const NOTICE: [u8; 16] = *b"for all to read.";
/// The caller of root's client, over `shm`.
pub const ROOT: Caller = Caller::new(0, 0, TraceId(1));
pub const READ_WRITE: OpenHow = OpenHow::READ_WRITE;

/// What the server holds for its peers: counts that must be as before when the hostile peers have gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    pub used: [usize; Resource::ALL.len()],
    pub peers: usize,
    pub connections: usize,
    pub sessions: usize,
    pub turns: (usize, usize),
    pub buffers: (usize, usize),
    pub filekeys: usize,
    /// Bound ranges, and filekeys that were opened by their keys.
    pub regions: (usize, usize),
    pub grants: GrantFigures,
    pub locks: (usize, usize),
    pub held_bytes: usize,
    pub pages: u64,
    pub inodes: u64,
}

pub struct Site {
    directory: tempfile::TempDir,
    running: Option<RunningServer>,
    pub root: Option<RemoteVolume>,
    /// The mark in root's files.
    pub root_mark: [u8; 16],
    /// The mark in the victim's file.
    pub victim_mark: [u8; 16],
    /// The mark in the landlord's file, and in all pages that it ever had.
    pub house_mark: [u8; 16],
    /// The inode numbers that the hostile users learned before files were closed to them.
    pub notable: Notable,
}

impl Site {
    pub fn new(dice: &Dice, durable_answers: bool) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).expect("mode");
        let dir = directory.path().join("pool");
        let format = FormatOptions { dir: dir.clone(), size: 256 << 20, ..FormatOptions::default() };
        serving::make_pool(&format, [3; 16]);
        let own = Endpoint::Shm(directory.path().join("shm"));
        let with = Serve {
            frames: 2048,
            listen: vec![own.clone(), Endpoint::Unix(directory.path().join("unix"))],
            policy: RegionPolicy::default(),
            hotspots: Hotspots::Pages,
            durable_answers,
        };
        let running = serving::serve(&dir, with).expect("start");
        // One lane for calls: a lane that is added when it is needed would look like a leak.
        let root = serving::connect(&own, "honest", 1, true);
        let (root_mark, victim_mark, house_mark) = (dice.array(), dice.array(), dice.array());
        let notable = Notable::default();
        let mut site = Self {
            directory,
            running: Some(running),
            root: Some(root),
            root_mark,
            victim_mark,
            house_mark,
            notable,
        };
        site.plant();
        site.notable = scouts::learn(&site, dice);
        site.close();
        site
    }

    fn plant(&mut self) {
        let root = self.root();
        let directory = |name: &[u8], mode, owner: u32| {
            let ino = root.make(&ROOT, InodeNo::ROOT, name, NewNode::Directory, mode).expect("make").ino;
            let owned =
                SetAttr { uid: Some(owner), gid: Some(owner), mode: Some(mode), ..SetAttr::default() };
            root.set_attr(&ROOT, ino, owned).expect("owner");
            ino
        };
        let file = |parent, name: &[u8], mark: [u8; 16], owner: u32| {
            let (attr, open) = root.create(&ROOT, parent, name, 0o600, true, READ_WRITE).expect("create");
            let bytes = mark.repeat(PLANTED_LEN / mark.len());
            assert_eq!(root.write(&ROOT, open.handle, 0, &bytes), Ok(PLANTED_LEN as u32));
            root.set_xattr(&ROOT, attr.ino, b"user.mark", &mark, XattrMode::Create).expect("attribute");
            let owned = SetAttr { uid: Some(owner), gid: Some(owner), ..SetAttr::default() };
            root.set_attr(&ROOT, attr.ino, owned).expect("owner");
            root.fsync(&ROOT, open.handle, false).expect("fsync");
            root.release(open.handle);
            attr.ino
        };
        directory(b"open", 0o777, 0);
        // The directory is closed after the hostile users have looked into it.
        let closed = directory(b"closed", 0o755, 0);
        directory(b"once", 0o700, REPEATER);
        directory(b"let", 0o700, LANDLORD);
        directory(b"honest", 0o700, 0);
        file(closed, b"secret", self.root_mark, 0);
        // A file whose name other users must not read.
        root.make(&ROOT, closed, &self.root_mark.map(|byte| byte | 0x80), NewNode::File, 0o644)
            .expect("make");
        file(InodeNo::ROOT, b"shut", self.root_mark, 0);
        // Everybody may write to `inbox` and read `notice`.
        for (name, mark, mode) in [(&b"inbox"[..], self.root_mark, 0o622), (b"notice", NOTICE, 0o644)] {
            let ino = file(InodeNo::ROOT, name, mark, 0);
            let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
            root.set_attr(&ROOT, ino, set).expect("mode");
        }
        file(InodeNo::ROOT, b"victim", self.victim_mark, VICTIM);
        file(InodeNo::ROOT, b"counter", self.victim_mark, VICTIM);
    }

    /// From now on only root may search the directory `closed`.
    fn close(&self) {
        let root = self.root();
        let closed = root.lookup(&ROOT, InodeNo::ROOT, b"closed").expect("lookup").ino;
        let set = SetAttr { mode: Some(0o700), ..SetAttr::default() };
        root.set_attr(&ROOT, closed, set).expect("mode");
    }

    /// What hostile peers must not be sent: bytes of files, a name, and earlier contents of memory that the server lends to them.
    pub fn marks(&self) -> Vec<[u8; 16]> {
        vec![self.root_mark, self.victim_mark, self.house_mark, self.root_mark.map(|byte| byte | 0x80), STALE]
    }

    pub fn root(&self) -> &RemoteVolume {
        self.root.as_ref().expect("it runs")
    }

    pub fn running(&self) -> &RunningServer {
        self.running.as_ref().expect("it runs")
    }

    pub fn unix(&self) -> PathBuf {
        self.directory.path().join("unix")
    }

    /// Root reads the files that others may not read, or not write, and writes them anew, through the memory through which others' bytes go.
    pub fn read_secrets(&self) {
        let root = self.root();
        let closed = root.lookup(&ROOT, InodeNo::ROOT, b"closed").expect("lookup").ino;
        for (parent, name, mark) in [
            (closed, &b"secret"[..], self.root_mark),
            (InodeNo::ROOT, b"shut", self.root_mark),
            (InodeNo::ROOT, b"notice", NOTICE),
            (InodeNo::ROOT, b"inbox", self.root_mark),
        ] {
            let ino = root.lookup(&ROOT, parent, name).expect("lookup").ino;
            let handle = root.open(&ROOT, ino, READ_WRITE).expect("open").handle;
            let bytes = mark.repeat(PLANTED_LEN / 16);
            let is_others = name == b"inbox";
            let found = read(root, handle, PLANTED_LEN).expect("read");
            assert!(is_others || found == bytes, "{:?} has changed", String::from_utf8_lossy(name));
            match root.write(&ROOT, handle, 0, &bytes) {
                // Hostile peers may have punched it and filled the disk.
                Err(FsError::Server(Status::NoSpace)) if is_others => {}
                written => assert_eq!(written, Ok(PLANTED_LEN as u32)),
            }
            root.release(handle);
        }
    }

    /// Gives `inbox` its first contents back, whatever was written, cut and punched.
    pub fn restore_inbox(&self) {
        let root = self.root();
        let ino = root.lookup(&ROOT, InodeNo::ROOT, b"inbox").expect("lookup").ino;
        let cut = SetAttr { size: Some(0), ..SetAttr::default() };
        root.set_attr(&ROOT, ino, cut).expect("cut");
        let handle = root.open(&ROOT, ino, READ_WRITE).expect("open").handle;
        let bytes = self.root_mark.repeat(PLANTED_LEN / 16);
        assert_eq!(root.write(&ROOT, handle, 0, &bytes), Ok(PLANTED_LEN as u32));
        root.release(handle);
    }

    /// Removes everything in a directory.
    pub fn clear(&self, name: &[u8]) {
        let ino = self.root().lookup(&ROOT, InodeNo::ROOT, name).expect("lookup").ino;
        self.clear_directory(ino);
    }

    fn clear_directory(&self, directory: InodeNo) {
        let root = self.root();
        let marks = SetAttr { flags: Some(cuttlefs_common::attr::InodeFlags(0)), ..SetAttr::default() };
        root.set_attr(&ROOT, directory, marks).expect("marks");
        let mut entries = Vec::new();
        root.read_dir(&ROOT, directory, 0, false, &mut |entry| {
            entries.push((entry.name.to_vec(), entry.ino, entry.kind));
            true
        })
        .expect("list");
        for (name, ino, kind) in entries {
            if kind == FileKind::Directory {
                self.clear_directory(ino);
                root.rmdir(&ROOT, directory, &name).expect("rmdir");
            } else {
                // Chattr marks keep a file from being unlinked.
                if kind == FileKind::File {
                    root.set_attr(&ROOT, ino, marks).expect("marks");
                }
                root.unlink(&ROOT, directory, &name).expect("unlink");
            }
        }
    }

    pub fn left(&self) -> Left {
        let server = self.running().server();
        let (turns, bounce) = (&server.counters.turns, &server.counters.bounce);
        let (locks, files) = (server.locks.figures(), server.files.figures());
        Left {
            used: Resource::ALL.map(|resource| server.admission.shares.used(resource)),
            peers: server.admission.shares.peers(),
            connections: server.admission.connections.len(),
            sessions: server.sessions.list().len(),
            turns: (turns.running(), turns.waiting()),
            buffers: (bounce.running(), bounce.waiting()),
            filekeys: files.filekeys,
            regions: (files.bound_regions, files.opened_regions),
            grants: files.grants,
            locks: (locks.held, locks.waiting),
            held_bytes: server.rnics.figures().held_bytes,
            // Without those of the free page queue, which is filled and given back as it may.
            pages: server.files.space_figures().used,
            inodes: server.meta.inode_count(),
        }
    }

    pub fn stop(mut self) {
        let root = self.root.take().expect("it runs");
        root.shut_down();
        drop(root);
        self.running.take().expect("it runs").stop();
    }
}

pub fn read(volume: &RemoteVolume, handle: Handle, len: usize) -> Result<Vec<u8>, FsError> {
    let mut bytes = Vec::new();
    volume.read(&ROOT, handle, 0, len as u32, &mut |got| bytes.extend_from_slice(got))?;
    Ok(bytes)
}

/// The number of descriptors that this process has open.
pub fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("descriptors").count()
}

/// The number of bytes of this process that are resident.
pub fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("statm");
    let pages: usize = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("pages");
    pages * rustix::param::page_size()
}
