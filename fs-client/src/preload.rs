//! What `cuttlefs preload` tells the library that it loads into programs, and the counts that these programs keep for it.
//!
//! The plan is JSON in a variable of the environment, so that programs that a program starts have it, too. The counts are words of one file, which all
//! these programs map: so nothing has to be done at a program's end, however it ends.

use cuttlefs_common::memory::SharedMemory;
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

/// The variable with the plan.
pub const PLAN_VARIABLE: &str = "CUTTLEFS_PRELOAD";

/// The version of the plan and of the counts.
const VERSION: u32 = 4;
/// What a library and a command of different builds tell the user.
pub const OTHER_BUILD: &str = "libcuttlefs_preload.so and the command are of different builds; put the library of the command's build beside the command";

/// What the library is to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    version: u32,
    /// The mounts whose files are read past FUSE.
    pub mounts: Vec<PlannedMount>,
    /// The user who made the plan. Programs of other users leave everything to the kernel: their sessions might be told other inode numbers.
    pub uid: u32,
    /// Whether reads are taken too that the kernel's page cache can answer, over links on which a read costs messages.
    pub take_cached: bool,
    /// The file of the counts, if somebody wants them.
    pub counts: Option<PathBuf>,
}

impl Plan {
    /// A plan for these mounts.
    pub fn new(mounts: Vec<PlannedMount>, uid: u32) -> Self {
        Self { version: VERSION, mounts, uid, take_cached: false, counts: None }
    }

    /// Parses the variable's value. `None`: a command of another build has made it.
    pub fn parse(text: &OsStr) -> Option<Self> {
        let plan: Self = serde_json::from_str(text.to_str()?).ok()?;
        (plan.version == VERSION).then_some(plan)
    }
}

/// A mount whose files are read past FUSE.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedMount {
    /// Its device, as stat(2) names it.
    pub major: u32,
    /// The same.
    pub minor: u32,
    /// The server's endpoint.
    pub url: String,
    /// Whether a read is a copy out of mapped memory (shm), and costs no messages.
    pub is_mapped: bool,
    /// The file of the key that is shown.
    pub key: Option<PathBuf>,
    /// The user who may serve over shm and unix.
    pub server_user: Option<u32>,
    /// The UUID of the mount's pool: another one's inode numbers mean other files.
    pub pool: String,
    /// The directory of the export that is mounted.
    pub subtree: Vec<u8>,
}

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Count {
    /// Calls of read(2) and its kin that were served past FUSE.
    Reads,
    /// Their bytes.
    ReadBytes,
    /// Files that were opened for that.
    Files,
    /// Left to the kernel: the first reads of a file.
    LeftFirst,
    /// Left: nothing precedes the end of the file.
    LeftEnd,
    /// Left: reads at the offset of a file whose length has changed.
    LeftChanging,
    /// Left: the file is or was mapped for shared writing by this process.
    LeftMapped,
    /// Left: the kernel has the pages in its cache.
    LeftCached,
    /// Left: the process was forked from one that had a session, and has not started a program since.
    LeftForked,
    /// Left: another user than that of the plan.
    LeftUser,
    /// Left: the server, or the file there, could not be reached in time.
    LeftUnreached,
    /// Left: calls of write(2) and its kin.
    LeftWrites,
    /// Left: mappings of files.
    LeftMaps,
    /// Programs that loaded the library.
    Programs,
}

impl Count {
    /// All of them, with the words by which a report names them.
    pub const ALL: [(Self, &'static str); 14] = [
        (Self::Reads, "reads taken"),
        (Self::ReadBytes, "bytes of them"),
        (Self::Files, "files opened for them"),
        (Self::LeftFirst, "reads left: the first of a file"),
        (Self::LeftEnd, "reads left: at the end of the file"),
        (Self::LeftChanging, "reads left: at the offset of a file whose length changes"),
        (Self::LeftMapped, "reads left: the process maps the file for writing"),
        (Self::LeftCached, "reads left: in the kernel's page cache"),
        (Self::LeftForked, "reads left: after a fork"),
        (Self::LeftUser, "reads left: of another user"),
        (Self::LeftUnreached, "reads left: the server does not give the file in time"),
        (Self::LeftWrites, "writes left"),
        (Self::LeftMaps, "mappings left"),
        (Self::Programs, "programs that loaded the library"),
    ];
}

/// The counts; see the module.
#[derive(Debug)]
pub struct Counts {
    memory: SharedMemory,
}

/// Bytes of the file.
const COUNTS_LEN: usize = 4096;
/// A descriptor's number that few programs reach.
const HIGH_NUMBER: i32 = 900;
const _: () = assert!(Count::ALL.len() * 8 <= COUNTS_LEN);

impl Counts {
    /// Makes a file of counts, all 0, which other users cannot read.
    ///
    /// # Errors
    /// The file cannot be made.
    pub fn make(path: &Path) -> io::Result<Self> {
        use std::os::unix::fs::OpenOptionsExt;
        let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(path)?;
        file.set_len(COUNTS_LEN as u64)?;
        Self::map(file)
    }

    /// Maps a file of counts.
    ///
    /// # Errors
    /// It is not there, or no such file.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::options().read(true).write(true).open(path)?;
        // The descriptor stays, and programs know the low numbers as theirs.
        match rustix::io::fcntl_dupfd_cloexec(&file, HIGH_NUMBER) {
            Ok(high) => Self::map(high.into()),
            Err(_) => Self::map(file),
        }
    }

    fn map(file: File) -> io::Result<Self> {
        Ok(Self { memory: SharedMemory::map_persistent(file.into(), COUNTS_LEN, 0, false)? })
    }

    /// Adds to a count.
    pub fn add(&self, count: Count, number: u64) {
        self.memory.atomic_u64(count as usize * 8).fetch_add(number, Ordering::Relaxed);
    }

    /// A count.
    pub fn get(&self, count: Count) -> u64 {
        self.memory.atomic_u64(count as usize * 8).load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_shared_and_have_a_place_each() {
        for (place, (count, _)) in Count::ALL.into_iter().enumerate() {
            assert_eq!(count as usize, place);
        }
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("counts");
        let made = Counts::make(&path).expect("made");
        assert!(Counts::make(&path).is_err(), "it is there");
        let opened = Counts::open(&path).expect("opened");
        opened.add(Count::Reads, 2);
        opened.add(Count::LeftMaps, 5);
        assert_eq!((made.get(Count::Reads), made.get(Count::LeftMaps), made.get(Count::Files)), (2, 5, 0));
    }

    #[test]
    fn a_plan_survives_the_environment() {
        let mount = PlannedMount {
            major: 0,
            minor: 51,
            url: "tcp://a:1".to_owned(),
            is_mapped: false,
            key: Some("/etc/key".into()),
            server_user: None,
            pool: "67e55044-10b1-426f-9247-bb680e5fe0c8".to_owned(),
            subtree: vec![b'a', 0xff],
        };
        let plan = Plan { counts: Some("/tmp/counts".into()), ..Plan::new(vec![mount], 7) };
        let text = serde_json::to_string(&plan).expect("text");
        assert_eq!(Plan::parse(OsStr::new(&text)).expect("a plan"), plan);
        let other = text.replace("\"version\":4", "\"version\":1");
        assert_ne!(other, text);
        for other in [&other, "no plan at all"] {
            assert_eq!(Plan::parse(OsStr::new(other)), None);
        }
    }
}
