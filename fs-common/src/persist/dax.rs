//! A device of persistent memory (`/dev/dax*`) that several logs share.
//!
//! RDMA hardware can use persistent memory in this way only: the kernel pins the pages of a device for an RNIC, but not those of files on a DAX
//! mount. A device has no files, so its first bytes are a directory.
//!
//! ```text
//! 0         header: magic CFDX, version 1, bytes of a unit, units, CRC32C
//! 64 k      entry k of 1..=1024: name (16 bytes), generation, first unit, units, CRC32C; zeros: none
//! unit 1    logs, each of whole units: the kernel maps a device by its alignment, 2 MiB as a rule
//! ```
//!
//! # Invariants
//! * An entry is one cache line, written whole and then written back. An entry with a wrong CRC was being written at a crash: nobody used it yet.
//! * The units of a new entry hold zeros when the entry is written, or a copy of the log that the entry replaces.
//! * Of two entries of a name the later generation counts; the other one is cleared when the device is opened, or when the name grows.
//!
//! # Failure
//! A device that holds something else is refused and stays as it is.

use super::device::{LogDevice, LogDeviceError, LogDeviceKind};
use super::{CacheLines, cache_lines};
use crate::memory::SharedMemory;
use parking_lot::Mutex;
use rustix::fd::OwnedFd;
use rustix::fs::{FlockOperation, Mode, OFlags};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use zerocopy::little_endian::{U32, U64, U128};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

const MAGIC: [u8; 4] = *b"CFDX";
const VERSION: u32 = 1;
const ENTRY_LEN: usize = 64;
const _: () = assert!(ENTRY_LEN == cache_lines::LINE_LEN);
/// Logs that a device may have.
const ENTRIES: usize = 1024;
const DIRECTORY_LEN: usize = (1 + ENTRIES) * ENTRY_LEN;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 4],
    version: U32,
    unit: U64,
    units: U64,
    reserved: [u8; 36],
    crc: U32,
}
const _: () = assert!(size_of::<RawHeader>() == ENTRY_LEN);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawEntry {
    name: U128,
    generation: U64,
    first: U64,
    units: U64,
    reserved: [u8; 20],
    crc: U32,
}
const _: () = assert!(size_of::<RawEntry>() == ENTRY_LEN);

/// The checksum of a line: of the bytes before it.
fn crc_of(line: &[u8; ENTRY_LEN]) -> u32 {
    crc32c::crc32c(&line[..ENTRY_LEN - 4])
}

/// Where a log is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    /// Its index in the directory.
    index: usize,
    generation: u64,
    first: u64,
    units: u64,
}

impl Entry {
    fn encode(self, name: u128) -> [u8; ENTRY_LEN] {
        let mut raw = RawEntry::new_zeroed();
        raw.name = name.into();
        raw.generation = self.generation.into();
        raw.first = self.first.into();
        raw.units = self.units.into();
        raw.crc = crc_of(zerocopy::transmute_ref!(&raw)).into();
        zerocopy::transmute!(raw)
    }

    /// `None`: there is no entry here, or it was being written at a crash.
    fn parse(line: &[u8; ENTRY_LEN], index: usize, units_of_device: u64) -> Option<(u128, Self)> {
        let raw: &RawEntry = zerocopy::transmute_ref!(line);
        let entry =
            Self { index, generation: raw.generation.get(), first: raw.first.get(), units: raw.units.get() };
        let end = entry.first.checked_add(entry.units)?;
        let fits = entry.first > 0 && entry.units > 0 && end <= units_of_device;
        (raw.crc.get() == crc_of(line) && fits).then_some((raw.name.get(), entry))
    }
}

/// A device of persistent memory with a directory of logs. See the module.
#[derive(Debug)]
pub struct DaxDevice {
    fd: OwnedFd,
    lock: Arc<OwnedFd>,
    path: PathBuf,
    unit: usize,
    units: u64,
    /// Whether this is a device of persistent memory; in tests it is a file.
    is_device: bool,
    /// The mapped unit 0.
    directory: SharedMemory,
    known: Mutex<BTreeMap<u128, Entry>>,
}

/// Whether the path is a device, not a directory of logs.
pub fn is_device(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    std::fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_char_device())
}

impl DaxDevice {
    /// Opens a device, locks it against other processes, and makes its directory if the device is empty.
    ///
    /// # Errors
    /// [`LogDeviceError`].
    pub fn open(path: &Path) -> Result<Arc<Self>, LogDeviceError> {
        let failed = |source: io::Error| LogDeviceError::Io { action: "open", path: path.to_owned(), source };
        let stat = rustix::fs::stat(path).map_err(|error| failed(error.into()))?;
        // sysfs tells the length and the alignment, which stat does not.
        let (major, minor) = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
        let number = |name: &str| -> io::Result<u64> {
            let text = std::fs::read_to_string(format!("/sys/dev/char/{major}:{minor}/{name}"))?;
            text.trim().parse().map_err(io::Error::other)
        };
        let len = number("size").map_err(|_| LogDeviceError::NotDax(path.to_owned()))?;
        // Kernels before 5.10 do not tell the alignment, and use 2 MiB.
        let unit = number("align").unwrap_or(2 << 20);
        Self::over(path, len, unit, true)
    }

    /// As `open`, for a device (or a test's file) of `len` bytes in units of `unit` bytes.
    fn over(path: &Path, len: u64, unit: u64, is_device: bool) -> Result<Arc<Self>, LogDeviceError> {
        let failed =
            |action| move |source: io::Error| LogDeviceError::Io { action, path: path.to_owned(), source };
        let open = || rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        let fd = open().map_err(io::Error::from).map_err(failed("open"))?;
        let lock = open().map_err(io::Error::from).map_err(failed("open"))?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(LogDeviceError::Busy(path.to_owned())),
            Err(error) => return Err(failed("lock")(error.into())),
        }
        // The directory fits into a unit, unless the alignment is 4 KiB.
        let units = len / unit;
        let unit_len = usize::try_from(unit).ok().filter(|unit| *unit >= DIRECTORY_LEN);
        let Some(unit_len) = unit_len.filter(|_| units > 1) else {
            return Err(LogDeviceError::DaxShape(path.to_owned()));
        };
        let map = fd
            .try_clone()
            .and_then(|again| SharedMemory::map_persistent(again, unit_len, 0, is_device))
            .map_err(failed("map"))?;
        let device = Self {
            fd,
            lock: Arc::new(lock),
            path: path.to_owned(),
            unit: unit_len,
            units,
            is_device,
            directory: map,
            known: Mutex::default(),
        };
        device.read_directory()?;
        Ok(Arc::new(device))
    }

    fn line(&self, index: usize) -> [u8; ENTRY_LEN] {
        let mut line = [0; ENTRY_LEN];
        self.directory.read(index * ENTRY_LEN, &mut line);
        line
    }

    fn put_line(&self, index: usize, line: &[u8; ENTRY_LEN]) {
        self.directory.write(index * ENTRY_LEN, line);
        self.directory.write_back(index * ENTRY_LEN, ENTRY_LEN);
    }

    fn read_directory(&self) -> Result<(), LogDeviceError> {
        let mut header = RawHeader::new_zeroed();
        (header.magic, header.version) = (MAGIC, VERSION.into());
        (header.unit, header.units) = ((self.unit as u64).into(), self.units.into());
        header.crc = crc_of(zerocopy::transmute_ref!(&header)).into();
        let header: [u8; ENTRY_LEN] = zerocopy::transmute!(header);
        let found = self.line(0);
        if found != header {
            // A header that was being written at a crash has only zeros behind it.
            let is_empty = (1..=ENTRIES).all(|index| self.line(index) == [0; ENTRY_LEN]);
            let may_be_ours = found.iter().zip(header).all(|(found, ours)| *found == ours || *found == 0);
            if !is_empty || !may_be_ours {
                return Err(LogDeviceError::DaxForeign(self.path.clone()));
            }
            self.put_line(0, &header);
        }
        let mut known = self.known.lock();
        for index in 1..=ENTRIES {
            let line = self.line(index);
            let Some((name, entry)) = Entry::parse(&line, index, self.units) else {
                if line != [0; ENTRY_LEN] {
                    self.put_line(index, &[0; ENTRY_LEN]);
                }
                continue;
            };
            let before = known.get(&name).copied();
            let older = match before {
                Some(before) if before.generation > entry.generation => Some(entry),
                _ => {
                    known.insert(name, entry);
                    before
                }
            };
            if let Some(older) = older {
                self.put_line(older.index, &[0; ENTRY_LEN]);
            }
        }
        Ok(())
    }

    /// The names of all logs.
    pub fn names(&self) -> Vec<u128> {
        self.known.lock().keys().copied().collect()
    }

    /// The length of a log in bytes, if there is a log of this name.
    pub fn len_bytes(&self, name: u128) -> Option<u64> {
        self.known.lock().get(&name).map(|entry| entry.units * self.unit as u64)
    }

    /// The path of the device.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn map(&self, entry: Entry) -> Result<SharedMemory, LogDeviceError> {
        let len = entry.units as usize * self.unit;
        let offset = entry.first * self.unit as u64;
        self.fd
            .try_clone()
            .and_then(|again| SharedMemory::map_persistent(again, len, offset, self.is_device))
            .map_err(|source| LogDeviceError::Io { action: "map", path: self.path.clone(), source })
    }

    /// Opens a log, or makes it, with at least this length. New bytes are zeros. A log can be open only once at a time.
    ///
    /// # Errors
    /// The device has no room, or the kernel refuses the mapping.
    pub fn open_log(&self, name: u128, len_bytes: usize) -> Result<LogDevice, LogDeviceError> {
        let mut known = self.known.lock();
        let wanted = len_bytes.div_ceil(self.unit).max(1) as u64;
        let before = known.get(&name).copied();
        let memory = match before {
            Some(entry) if entry.units >= wanted => self.map(entry)?,
            _ => {
                let full = || LogDeviceError::DaxFull { path: self.path.clone(), len_bytes };
                let first = self.free_units(&known, wanted).ok_or_else(full)?;
                let taken: Vec<usize> = known.values().map(|entry| entry.index).collect();
                let index = (1..=ENTRIES).find(|index| !taken.contains(index)).ok_or_else(full)?;
                let generation = before.map_or(0, |before| before.generation) + 1;
                let entry = Entry { index, generation, first, units: wanted };
                let memory = self.map(entry)?;
                memory.fill(0, memory.len(), 0);
                if let Some(before) = before {
                    let old = self.map(before)?;
                    old.copy_to(0, &memory, 0, old.len());
                }
                memory.write_back(0, memory.len());
                self.put_line(index, &entry.encode(name));
                if let Some(before) = before {
                    self.put_line(before.index, &[0; ENTRY_LEN]);
                }
                known.insert(name, entry);
                memory
            }
        };
        Ok(LogDevice::of_parts(
            LogDeviceKind::Pmem,
            Arc::new(memory),
            Arc::new(CacheLines),
            &self.path,
            Some(self.lock.clone()),
        ))
    }

    /// The first unit of a free range of `wanted` units.
    fn free_units(&self, known: &BTreeMap<u128, Entry>, wanted: u64) -> Option<u64> {
        let mut used: Vec<(u64, u64)> = known.values().map(|entry| (entry.first, entry.units)).collect();
        used.sort_unstable();
        let mut first = 1;
        for (start, units) in used {
            if start - first >= wanted {
                break;
            }
            first = start + units;
        }
        (first.checked_add(wanted)? <= self.units).then_some(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: u64 = 128 << 10;

    /// A file as a device of eight units.
    fn device(path: &Path) -> Result<Arc<DaxDevice>, LogDeviceError> {
        DaxDevice::over(path, 8 * UNIT + 4096, UNIT, false)
    }

    fn file() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().expect("dir");
        let path = dir.path().join("dax");
        std::fs::File::create(&path).and_then(|file| file.set_len(8 * UNIT + 4096)).expect("file");
        (dir, path)
    }

    #[test]
    fn logs_stay_where_they_are_and_grow_with_what_is_in_them() {
        let (_dir, path) = file();
        let dax = device(&path).expect("made");
        assert!(matches!(device(&path), Err(LogDeviceError::Busy(_))));
        for (name, units) in [(7, 1), (8, 2), (9, 1)] {
            let log = dax.open_log(name, (units * UNIT) as usize).expect("room");
            assert_eq!((log.kind(), log.memory().len() as u64), (LogDeviceKind::Pmem, units * UNIT));
            log.memory().write(100, &name.to_le_bytes());
        }
        let refused = dax.open_log(10, 4 * UNIT as usize).err().expect("three units are free");
        assert!(matches!(refused, LogDeviceError::DaxFull { .. }), "{refused}");
        let grown = dax.open_log(7, UNIT as usize + 1).expect("it grows");
        let bytes = |log: &LogDevice| {
            let mut bytes = [0; 16];
            log.memory().read(100, &mut bytes);
            u128::from_le_bytes(bytes)
        };
        assert_eq!((bytes(&grown), grown.memory().len() as u64), (7, 2 * UNIT));
        drop((grown, dax));
        let dax = device(&path).expect("opened again");
        assert_eq!(dax.names(), [7, 8, 9]);
        assert_eq!(
            [7, 8, 9, 10].map(|name| dax.len_bytes(name)),
            [Some(2 * UNIT), Some(2 * UNIT), Some(UNIT), None]
        );
        for name in [7, 8, 9] {
            assert_eq!(bytes(&dax.open_log(name, 1).expect("there")), name);
        }
        // The place of the first log is free again.
        assert_eq!(bytes(&dax.open_log(11, 1).expect("room")), 0, "what is new is zeros");
        assert_eq!(dax.known.lock()[&11].first, 1);
    }

    #[test]
    fn an_entry_that_was_being_written_is_none_and_the_later_of_two_counts() {
        let (_dir, path) = file();
        let dax = device(&path).expect("made");
        dax.open_log(1, 1).expect("room").memory().write(0, b"first");
        let older = dax.line(1);
        dax.open_log(1, UNIT as usize * 2).expect("it grows");
        // As after a crash before the older entry was cleared, with another entry half written.
        dax.put_line(1, &older);
        let mut torn = Entry { index: 3, generation: 9, first: 5, units: 1 }.encode(1);
        torn[20] ^= 1;
        dax.put_line(3, &torn);
        drop(dax);
        let dax = device(&path).expect("opened again");
        assert_eq!((dax.names(), dax.len_bytes(1)), (vec![1], Some(2 * UNIT)));
        assert_eq!((dax.line(1), dax.line(3)), ([0; ENTRY_LEN], [0; ENTRY_LEN]));
        let mut first = [0; 5];
        dax.open_log(1, 1).expect("there").memory().read(0, &mut first);
        assert_eq!(&first, b"first");
    }

    #[test]
    fn a_device_with_something_else_is_refused_and_stays_as_it_is() {
        for (at, bytes) in [(0, &b"ext4"[..]), (4096, &b"data"[..])] {
            let (_dir, path) = file();
            use std::os::unix::fs::FileExt;
            let file = std::fs::File::options().write(true).open(&path).expect("open");
            file.write_all_at(bytes, at).expect("written");
            let before = std::fs::read(&path).expect("read");
            assert!(matches!(device(&path), Err(LogDeviceError::DaxForeign(_))));
            assert_eq!(std::fs::read(&path).expect("read"), before);
        }
        // A header that was being written at a crash.
        let (_dir, path) = file();
        std::fs::File::options()
            .write(true)
            .open(&path)
            .and_then(|mut file| std::io::Write::write_all(&mut file, b"CFDX"))
            .expect("written");
        assert!(device(&path).is_ok());
    }
}
