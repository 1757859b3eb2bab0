//! Where the log's bytes are kept: a file, or for tests and simulation memory that forgets what was not synced.

use super::header::{BLOCK_BYTES, HEADER_BYTES, Header, RING_OFFSET};
use cuttlefs_common::life::{Event, Fate, Life};
use cuttlefs_common::redo::LogId;
use cuttlefs_common::world::Random;
use parking_lot::Mutex;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// Name of the file in the log's directory.
pub const SEGMENT_FILE: &str = "segment";
/// Bytes zeroed at a time when a file is made.
const ZEROED_BYTES: usize = 1 << 20;

/// A log's bytes. Calls block.
pub trait LogDevice: Send + Sync {
    /// Bytes there are.
    fn len(&self) -> u64;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads.
    ///
    /// # Errors
    /// The device's.
    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;

    /// Writes; durable with the next `sync`.
    ///
    /// # Errors
    /// The device's.
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Makes what was written before durable.
    ///
    /// # Errors
    /// The device's; what is on it is unknown then.
    fn sync(&self) -> io::Result<()>;
}

/// A log in a file of fixed length.
#[derive(Debug)]
pub struct FileLog {
    file: File,
    len: u64,
}

impl FileLog {
    /// Opens the log in `directory`; `None` if there is none.
    ///
    /// # Errors
    /// The system's.
    pub fn open(directory: &Path) -> io::Result<Option<Self>> {
        match OpenOptions::new().read(true).write(true).open(directory.join(SEGMENT_FILE)) {
            Ok(file) => Ok(Some(Self { len: file.metadata()?.len(), file })),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Makes a log of about `len` bytes, all written once: no later sync waits for the file system to find space.
    ///
    /// # Errors
    /// The system's.
    pub fn make(directory: &Path, len: u64, log: LogId) -> io::Result<Self> {
        std::fs::create_dir_all(directory)?;
        // Under another name until it is whole.
        let unfinished = directory.join("segment.unfinished");
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&unfinished)?;
        let len = len.next_multiple_of(BLOCK_BYTES).max(RING_OFFSET + BLOCK_BYTES);
        let zeros = vec![0; ZEROED_BYTES];
        let mut at = 0;
        while at < len {
            let part = (len - at).min(ZEROED_BYTES as u64);
            file.write_all_at(&zeros[..part as usize], at)?;
            at += part;
        }
        let header = Header::first(log, len);
        file.write_all_at(&header.encode(), header.place())?;
        file.sync_all()?;
        std::fs::rename(&unfinished, directory.join(SEGMENT_FILE))?;
        File::open(directory)?.sync_all()?;
        if let Some(parent) = directory.parent() {
            File::open(parent)?.sync_all()?;
        }
        Ok(Self { file, len })
    }

    /// Removes the log of `directory`, durably.
    ///
    /// # Errors
    /// The system's.
    pub fn remove(directory: &Path) -> io::Result<()> {
        std::fs::remove_file(directory.join(SEGMENT_FILE))?;
        File::open(directory)?.sync_all()
    }
}

impl LogDevice for FileLog {
    fn len(&self) -> u64 {
        self.len
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(bytes, offset)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

#[derive(Debug, Default)]
struct Contents {
    /// As reads see it.
    now: Vec<u8>,
    durable: Vec<u8>,
    /// Writes since the last sync.
    unsynced: Vec<(usize, Vec<u8>)>,
    /// The write that the writer died with.
    cut_off: Option<(usize, Vec<u8>)>,
    fails: bool,
    fails_syncs: bool,
    lies: bool,
    life: Life,
}

/// A log in memory with a real device's faults: a crash drops, reorders and tears what was not synced, in sectors. A
/// server with a `Life` can die with any write or sync; `SimLog::crash` or `SimLog::kill` says what is left of it.
#[derive(Clone, Debug, Default)]
pub struct SimLog {
    contents: Arc<Mutex<Contents>>,
}

/// What a device writes whole.
const SECTOR_BYTES: usize = 512;

impl SimLog {
    /// An empty log.
    pub fn new(len: u64, log: LogId) -> Self {
        let mut bytes = vec![0; len as usize];
        let header = Header::first(log, len);
        bytes[header.place() as usize..][..HEADER_BYTES].copy_from_slice(&header.encode());
        let contents = Contents { now: bytes.clone(), durable: bytes, ..Contents::default() };
        Self { contents: Arc::new(Mutex::new(contents)) }
    }

    /// Writes and syncs are events of this life from now on.
    pub fn set_life(&self, life: Life) {
        self.contents.lock().life = life;
    }

    /// From now on syncs say `Ok` and do nothing: what a test must notice.
    pub fn lie(&self) {
        self.contents.lock().lies = true;
    }

    /// The server is killed: of a write it died with the first sectors are there, any number of them.
    pub fn kill(&self, random: &dyn Random) {
        let contents = &mut *self.contents.lock();
        if let Some((from, mut bytes)) = contents.cut_off.take() {
            let sectors = bytes.len().div_ceil(SECTOR_BYTES) as u64;
            bytes.truncate((random.next_u64() % (sectors + 1)) as usize * SECTOR_BYTES);
            contents.put(from, bytes);
        }
    }

    /// Power loss: of each sector that was not synced, any of the writes since then is there, or none.
    pub fn crash(&self, random: &dyn Random) {
        let mut contents = self.contents.lock();
        let mut left = std::mem::take(&mut contents.durable);
        let cut_off = contents.cut_off.take();
        for (offset, bytes) in std::mem::take(&mut contents.unsynced).into_iter().chain(cut_off) {
            let mut at = 0;
            while at < bytes.len() {
                let end = ((offset + at) / SECTOR_BYTES + 1) * SECTOR_BYTES - offset;
                let end = end.min(bytes.len());
                if random.next_u64().is_multiple_of(2) {
                    left[offset + at..offset + end].copy_from_slice(&bytes[at..end]);
                }
                at = end;
            }
        }
        contents.now.clone_from(&left);
        contents.durable = left;
        (contents.fails, contents.fails_syncs) = (false, false);
    }

    /// Every write and sync fails from now on, until a crash.
    pub fn fail(&self) {
        self.contents.lock().fails = true;
    }

    /// Every sync fails from now on, until a crash: what is written until then is there or not.
    pub fn fail_syncs(&self) {
        self.contents.lock().fails_syncs = true;
    }

    /// Flips one bit of what is durable.
    pub fn flip(&self, byte: usize, bit: u8) {
        let mut contents = self.contents.lock();
        contents.now[byte] ^= 1 << bit;
        contents.durable[byte] ^= 1 << bit;
    }
}

impl Contents {
    fn put(&mut self, from: usize, bytes: Vec<u8>) {
        self.now[from..from + bytes.len()].copy_from_slice(&bytes);
        self.unsynced.push((from, bytes));
    }

    /// What a server sees that is to be dead.
    fn died() -> io::Error {
        io::Error::other("the simulated server is dead")
    }
}

impl LogDevice for SimLog {
    fn len(&self) -> u64 {
        self.contents.lock().now.len() as u64
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let from = offset as usize;
        bytes.copy_from_slice(&self.contents.lock().now[from..from + bytes.len()]);
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let contents = &mut *self.contents.lock();
        if contents.fails {
            return Err(io::Error::other("the simulated log device fails"));
        }
        let from = offset as usize;
        match contents.life.meets(Event::LogWrite, offset) {
            Fate::Happens => {}
            Fate::CutOff => {
                contents.cut_off = Some((from, bytes.to_vec()));
                return Err(Contents::died());
            }
            Fate::Never => return Err(Contents::died()),
        }
        contents.put(from, bytes.to_vec());
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let contents = &mut *self.contents.lock();
        if contents.fails || contents.fails_syncs {
            return Err(io::Error::other("the simulated log device fails"));
        }
        if !contents.life.allows(Event::LogSync, contents.unsynced.len() as u64) {
            return Err(Contents::died());
        }
        if contents.lies {
            return Ok(());
        }
        for (from, bytes) in contents.unsynced.drain(..) {
            contents.durable[from..from + bytes.len()].copy_from_slice(&bytes);
        }
        Ok(())
    }
}
