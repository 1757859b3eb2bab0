//! A device of persistent memory (`/dev/dax*`) that several logs share.
//!
//! RDMA hardware can have persistent memory this way only: the kernel pins a device's pages for an RNIC, and those of files on a DAX mount
//! not. A device has no files, so its first unit has a directory of what is where (`directory`); behind it are logs, each of whole units: the
//! kernel maps a device by its alignment, 2 MiB as a rule.
//!
//! # Invariants
//! * What a new entry names was zeros before the entry was written, or a copy of what it takes the place of.
//! * An entry that was not finished names nothing that anybody has heard of, and is cleared.
//! * Of two entries of a name the later generation counts; the other one is cleared when the device is opened, or when the name grows.
//!
//! # Failure
//! A device that holds something else is refused and stays as it is. So does an entry that is damaged: the log that it named may lie anywhere that
//! no other log does. Until somebody gives it up, logs that are known are opened as ever, none is made, and none grows.

mod directory;

use super::CacheLines;
use super::device::{LogDevice, LogDeviceError, LogDeviceKind};
use crate::memory::SharedMemory;
use directory::{DIRECTORY_LEN, Directory, ENTRIES, Entry, Found, LINE_LEN, header};
use parking_lot::Mutex;
use rustix::fd::OwnedFd;
use rustix::fs::{FlockOperation, Mode, OFlags};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

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
    directory: Directory,
    known: Mutex<BTreeMap<u128, Entry>>,
    /// The first line that is damaged.
    damaged: Option<usize>,
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
        let mut device = Self {
            fd,
            lock: Arc::new(lock),
            path: path.to_owned(),
            unit: unit_len,
            units,
            is_device,
            directory: Directory(map),
            known: Mutex::default(),
            damaged: None,
        };
        device.read_directory()?;
        Ok(Arc::new(device))
    }

    fn read_directory(&mut self) -> Result<(), LogDeviceError> {
        let header = header(self.unit as u64, self.units);
        let found = self.directory.line(0);
        if found != header {
            // Also behind a header that was being written, everything else is zeros.
            let is_empty = (1..=ENTRIES).all(|index| self.directory.line(index) == [0; LINE_LEN]);
            let may_be_ours = found.iter().zip(header).all(|(found, ours)| *found == ours || *found == 0);
            if !is_empty || !may_be_ours {
                return Err(LogDeviceError::DaxForeign(self.path.clone()));
            }
            self.directory.put(0, &header);
        }
        let known = self.known.get_mut();
        for index in 1..=ENTRIES {
            let (name, entry) = match self.directory.look(index, self.units) {
                Found::Nothing => continue,
                Found::Unfinished => {
                    self.directory.clear(index);
                    continue;
                }
                Found::Damaged => {
                    self.damaged = self.damaged.or(Some(index));
                    continue;
                }
                Found::Entry(name, entry) => (name, entry),
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
                self.directory.clear(older.index);
            }
        }
        if let Some(damaged) = self.damaged() {
            tracing::error!("{damaged}");
        }
        Ok(())
    }

    fn damaged(&self) -> Option<LogDeviceError> {
        let at = self.damaged? * LINE_LEN;
        Some(LogDeviceError::DaxDamaged { path: self.path.clone(), at, len: LINE_LEN })
    }

    /// The logs there are.
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
    /// There is no room, an entry is damaged, or the kernel maps no more.
    pub fn open_log(&self, name: u128, len_bytes: usize) -> Result<LogDevice, LogDeviceError> {
        let mut known = self.known.lock();
        let wanted = len_bytes.div_ceil(self.unit).max(1) as u64;
        let before = known.get(&name).copied();
        let memory = match before {
            Some(entry) if entry.units >= wanted => self.map(entry)?,
            _ => {
                if let Some(damaged) = self.damaged() {
                    return Err(damaged);
                }
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
                self.directory.put(index, &entry.encode(name));
                if let Some(before) = before {
                    self.directory.clear(before.index);
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
    fn an_entry_that_was_not_finished_is_none_and_the_later_of_two_counts() {
        let (_dir, path) = file();
        let dax = device(&path).expect("made");
        dax.open_log(1, 1).expect("room").memory().write(0, b"first");
        let older = dax.directory.line(1);
        dax.open_log(1, UNIT as usize * 2).expect("it grows");
        // A crash before the older one was cleared, and in the midst of another.
        dax.directory.put(1, &older);
        let mut unfinished = Entry { index: 3, generation: 9, first: 5, units: 1 }.encode(1);
        unfinished[LINE_LEN - 8..].fill(0);
        dax.directory.put(3, &unfinished);
        drop(dax);
        let dax = device(&path).expect("opened again");
        assert_eq!((dax.names(), dax.len_bytes(1)), (vec![1], Some(2 * UNIT)));
        assert_eq!([1, 3].map(|index| dax.directory.line(index)), [[0; LINE_LEN]; 2]);
        let mut first = [0; 5];
        dax.open_log(1, 1).expect("there").memory().read(0, &mut first);
        assert_eq!(&first, b"first");
    }

    #[test]
    fn where_a_damaged_entry_may_have_pointed_nothing_is_written() {
        let (_dir, path) = file();
        let dax = device(&path).expect("made");
        for name in [1, 2, 3] {
            dax.open_log(name, 1).expect("room").memory().write(0, &[name as u8; 8]);
        }
        let mut damaged = dax.directory.line(2);
        damaged[20] ^= 1;
        dax.directory.clear(2);
        dax.directory.put(2, &damaged);
        drop(dax);
        let before = std::fs::read(&path).expect("read");
        let dax = device(&path).expect("the others are wanted");
        assert_eq!(dax.names(), [1, 3]);
        for (name, units) in [(2, 1), (4, 1), (3, 2)] {
            let refused = dax.open_log(name, units * UNIT as usize).err().expect("it may lie anywhere");
            assert!(matches!(refused, LogDeviceError::DaxDamaged { at: 128, .. }), "{refused}");
        }
        for name in [1, 3] {
            let mut bytes = [0; 8];
            dax.open_log(name, 1).expect("there").memory().read(0, &mut bytes);
            assert_eq!(bytes, [name as u8; 8]);
        }
        assert_eq!(std::fs::read(&path).expect("read"), before, "nothing was cleared");
        // As the message advises.
        dax.directory.clear(2);
        drop(dax);
        let dax = device(&path).expect("opened again");
        dax.open_log(4, 1).expect("room");
        assert_eq!(dax.names(), [1, 3, 4]);
        assert_eq!(dax.known.lock()[&4].first, 2);
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
