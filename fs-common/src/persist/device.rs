//! A log device: memory, and the way in which its bytes become persistent.
//!
//! Persistent memory is mapped. The bytes of any other file are kept in memory, and persistence writes them to the file (`file_sync`). The mapping,
//! not the name, decides which of them a file is: the kernel grants `MAP_SYNC` for DAX files only, so a mapping that succeeds *is* persistent memory.
//! Any other file is taken for persistent memory only if it is declared so (`pmem-emulated`). Messages about such a file say that its bytes survive
//! the process, not the machine.

use super::{CacheLines, FileSync, Persistence, cache_lines};
use crate::memory::SharedMemory;
use rustix::fd::OwnedFd;
use rustix::fs::{FallocateFlags, FlockOperation, Mode, OFlags};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Once};

/// The kind of a log device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogDeviceKind {
    /// A DAX file: persistent memory.
    Pmem,
    /// A file declared to be persistent memory. For emulation.
    PmemEmulated,
    /// A file that is synced.
    File,
}

impl LogDeviceKind {
    /// Its name for status, logs and benchmarks.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Pmem => "pmem",
            Self::PmemEmulated => "pmem-emulated",
            Self::File => "file",
        }
    }
}

/// Why a log device cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum LogDeviceError {
    /// The operating system refused.
    #[error("cannot {action} the log {path}: {source}")]
    Io {
        /// The action that failed.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another process has it.
    #[error("the log {0} is in use by another process")]
    Busy(PathBuf),
    /// It should be persistent memory and is not.
    #[error(
        "{0} is no persistent memory (the kernel grants it no MAP_SYNC); put it on a DAX mount, or declare it \
         pmem-emulated, or use a file"
    )]
    NotPmem(PathBuf),
    /// The device is none of persistent memory.
    #[error("{0} is no device of persistent memory (`ndctl list -N` lists those of mode devdax)")]
    NotDax(PathBuf),
    /// The device is too small or has too small units for logs.
    #[error(
        "{0} is too small for logs, or mapped in units of less than 128 KiB; make the namespace with an alignment of 2 MiB"
    )]
    DaxShape(PathBuf),
    /// Another program uses the device, or used it.
    #[error(
        "{0} holds something that is not of this program; give another device, or have its first 128 KiB be zeros"
    )]
    DaxForeign(PathBuf),
    /// An entry of a device's directory is damaged.
    #[error(
        "the directory of {path} is damaged at byte {at}: a log may lie anywhere where no other does, so none is made and none grows. Copy the \
         device; to give that log up, have these {len} bytes be zeros (`daxio --zero --output={path} --seek={at} --len={len}`) and open it again"
    )]
    DaxDamaged {
        /// Which.
        path: PathBuf,
        /// Where.
        at: usize,
        /// How many bytes an entry has.
        len: usize,
    },
    /// No room on a device.
    #[error("{path} has no room for a log of {len_bytes} bytes")]
    DaxFull {
        /// The device.
        path: PathBuf,
        /// The length of the log.
        len_bytes: usize,
    },
}

/// A log's memory and its persistence.
pub struct LogDevice {
    kind: LogDeviceKind,
    memory: Arc<SharedMemory>,
    persistence: Arc<dyn Persistence>,
    path: PathBuf,
    /// A descriptor of its own: a peer may get the mapped one, and the lock would outlive this process. Logs of one device share it.
    _lock: Option<Arc<OwnedFd>>,
}

/// The first bytes of a file, in memory.
fn load(fd: &OwnedFd, len_bytes: usize) -> io::Result<SharedMemory> {
    let memory = SharedMemory::new("log", len_bytes)?;
    let mut piece = vec![0; 64 << 10];
    let mut at = 0;
    while at < len_bytes {
        let most = piece.len().min(len_bytes - at);
        let read = rustix::io::pread(fd, &mut piece[..most], at as u64)?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        memory.write(at, &piece[..read]);
        at += read;
    }
    Ok(memory)
}

impl LogDevice {
    /// Opens or makes the file, at least `len_bytes` long with its blocks allocated, locks it against other processes and maps it. `kind` is the kind
    /// that it must be; `None`: persistent memory if the kernel grants it, else a synced file.
    ///
    /// # Errors
    /// [`LogDeviceError`].
    pub fn open(path: &Path, len_bytes: usize, kind: Option<LogDeviceKind>) -> Result<Self, LogDeviceError> {
        let failed = |action| {
            move |source: rustix::io::Errno| LogDeviceError::Io {
                action,
                path: path.to_owned(),
                source: source.into(),
            }
        };
        let io_failed =
            |action| move |source: io::Error| LogDeviceError::Io { action, path: path.to_owned(), source };
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let fd = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).map_err(failed("open"))?;
        let lock = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty())
            .map_err(failed("open"))?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(LogDeviceError::Busy(path.to_owned())),
            Err(error) => return Err(failed("lock")(error)),
        }
        // The blocks come first: a store to a mapped hole of a full disk would be a SIGBUS.
        rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, len_bytes as u64)
            .map_err(failed("make room in"))?;
        rustix::fs::fsync(&fd).map_err(failed("sync"))?;
        let dax = match kind {
            None | Some(LogDeviceKind::Pmem) => {
                let again = fd.try_clone().map_err(io_failed("open"))?;
                SharedMemory::map_persistent(again, len_bytes, 0, true).ok()
            }
            Some(_) => None,
        };
        let (kind, memory) = match (dax, kind) {
            (Some(memory), _) => (LogDeviceKind::Pmem, memory),
            (None, Some(LogDeviceKind::Pmem)) => return Err(LogDeviceError::NotPmem(path.to_owned())),
            (None, kind) => {
                let kind = kind.unwrap_or(LogDeviceKind::File);
                let memory = if kind == LogDeviceKind::File {
                    load(&fd, len_bytes).map_err(io_failed("read"))?
                } else {
                    let again = fd.try_clone().map_err(io_failed("open"))?;
                    SharedMemory::map_persistent(again, len_bytes, 0, false).map_err(io_failed("map"))?
                };
                (kind, memory)
            }
        };
        let memory = Arc::new(memory);
        let persistence: Arc<dyn Persistence> = match kind {
            LogDeviceKind::File => {
                Arc::new(FileSync::start(fd, memory.clone()).map_err(io_failed("start syncing"))?)
            }
            LogDeviceKind::Pmem | LogDeviceKind::PmemEmulated => Arc::new(CacheLines),
        };
        if kind == LogDeviceKind::PmemEmulated {
            // A warning only the first time: each client has a ring, and the log would show nothing else.
            static WARNED: Once = Once::new();
            WARNED.call_once(|| {
                tracing::warn!("logs are on emulated persistent memory: they survive a killed process, not a power failure");
            });
            tracing::info!(path = %path.display(), "a log on emulated persistent memory");
        }
        Ok(Self::of_parts(kind, memory, persistence, path, Some(Arc::new(lock))))
    }

    pub(super) fn of_parts(
        kind: LogDeviceKind,
        memory: Arc<SharedMemory>,
        persistence: Arc<dyn Persistence>,
        path: &Path,
        lock: Option<Arc<OwnedFd>>,
    ) -> Self {
        Self { kind, memory, persistence, path: path.to_owned(), _lock: lock }
    }

    /// A device of a simulation, of this memory and its simulated persistence.
    pub fn simulated(path: &Path, memory: Arc<SharedMemory>, persistence: Arc<dyn Persistence>) -> Self {
        Self::of_parts(LogDeviceKind::Pmem, memory, persistence, path, None)
    }

    /// Its kind.
    pub fn kind(&self) -> LogDeviceKind {
        self.kind
    }

    /// Its bytes.
    pub fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// Its way to make bytes persistent.
    pub fn persistence(&self) -> &Arc<dyn Persistence> {
        &self.persistence
    }

    /// For people: kind, place, and how ranges become persistent.
    pub fn describe(&self) -> String {
        let how = match self.kind {
            LogDeviceKind::File => "group-committed writes and data syncs",
            LogDeviceKind::Pmem | LogDeviceKind::PmemEmulated => cache_lines::instruction().label(),
        };
        format!("{} {} ({how})", self.kind.label(), self.path.display())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_stay_and_a_second_opener_is_refused() {
        let dir = tempfile::tempdir().expect("dir");
        let path = dir.path().join("log");
        for kind in [LogDeviceKind::File, LogDeviceKind::PmemEmulated] {
            let device = LogDevice::open(&path, 10_000, Some(kind)).expect("opened");
            assert_eq!(device.kind(), kind);
            assert!(device.describe().starts_with(kind.label()));
            device.memory().write(4090, b"across a page");
            device.persistence().persist_and_wait(device.memory(), 4090, 13).expect("persistent");
            assert!(matches!(LogDevice::open(&path, 10_000, Some(kind)), Err(LogDeviceError::Busy(_))));
            // A peer that has the memory does not keep the next opener out.
            let given = device.memory().fd().try_clone_to_owned().expect("given to a peer");
            drop(device);
            drop(LogDevice::open(&path, 10_000, Some(kind)).expect("opened again"));
            drop(given);
            assert_eq!(&std::fs::read(&path).expect("read")[4090..4103], b"across a page");
        }
    }

    #[test]
    fn what_is_no_persistent_memory_is_not_taken_for_it() {
        // On a DAX mount there is nothing to refuse.
        let dir = tempfile::tempdir().expect("dir");
        let path = dir.path().join("log");
        match LogDevice::open(&path, 4096, Some(LogDeviceKind::Pmem)) {
            Err(error) => assert!(matches!(error, LogDeviceError::NotPmem(_)), "{error}"),
            Ok(device) => assert_eq!(device.kind(), LogDeviceKind::Pmem),
        }
    }
}
