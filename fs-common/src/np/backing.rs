//! Where pages are that have no frame.

use crate::ids::PAGE_SIZE;
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A page's bytes.
pub type Page = [u8; PAGE_SIZE];

/// A file or device that has a place for each page of a region. Pages are read and written at the same time by several threads, one page by one
/// thread.
pub trait Backing: Send + Sync {
    /// Reads a page that was written before.
    ///
    /// # Errors
    /// The device failed. The page is then not swapped in.
    fn read(&self, page: u64, out: &mut Page) -> io::Result<()>;

    /// Writes a page. It need not outlive the process.
    ///
    /// # Errors
    /// The device failed. The page then stays in its frame.
    fn write(&self, page: u64, bytes: &Page) -> io::Result<()>;
}

/// A file, or a block device.
#[derive(Debug)]
pub struct FileBacking {
    file: File,
    direct: bool,
}

/// Bytes at an address that direct IO takes.
struct Aligned(Vec<u8>);

impl Aligned {
    fn new() -> Self {
        Self(vec![0; 2 * PAGE_SIZE])
    }

    fn page(&mut self) -> &mut [u8] {
        let at = self.0.as_ptr().align_offset(PAGE_SIZE);
        &mut self.0[at..at + PAGE_SIZE]
    }
}

impl FileBacking {
    /// Opens or makes a file with room for `pages` pages; of a device, which must be as large, the bytes are overwritten. With `direct` the kernel's
    /// page cache keeps none of the pages, so that the region's budget is all the memory that they take.
    ///
    /// # Errors
    /// The file cannot be opened, or the file system has no direct IO.
    pub fn open(path: &Path, pages: u64, direct: bool) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        if direct {
            options.custom_flags(libc::O_DIRECT);
        }
        let file = options.open(path)?;
        if file.metadata()?.is_file() {
            let len = pages.checked_mul(PAGE_SIZE as u64).ok_or(io::ErrorKind::FileTooLarge)?;
            file.set_len(len)?;
        }
        Ok(Self { file, direct })
    }
}

impl Backing for FileBacking {
    fn read(&self, page: u64, out: &mut Page) -> io::Result<()> {
        let at = page * PAGE_SIZE as u64;
        if !self.direct {
            return self.file.read_exact_at(out, at);
        }
        let mut aligned = Aligned::new();
        self.file.read_exact_at(aligned.page(), at)?;
        out.copy_from_slice(aligned.page());
        Ok(())
    }

    fn write(&self, page: u64, bytes: &Page) -> io::Result<()> {
        let at = page * PAGE_SIZE as u64;
        if !self.direct {
            return self.file.write_all_at(bytes, at);
        }
        let mut aligned = Aligned::new();
        aligned.page().copy_from_slice(bytes);
        self.file.write_all_at(aligned.page(), at)
    }
}

/// The twin in memory: a device whose pages can be made to fail, and that takes its time.
#[derive(Debug, Default)]
pub struct MemoryBacking {
    pages: Mutex<HashMap<u64, Box<Page>>>,
    bad_reads: Mutex<HashSet<u64>>,
    bad_writes: Mutex<HashSet<u64>>,
    delay_us: AtomicU64,
}

impl MemoryBacking {
    /// From now on reads of a page fail, or succeed again.
    pub fn fail_reads(&self, page: u64, fail: bool) {
        let mut bad = self.bad_reads.lock();
        if fail {
            bad.insert(page)
        } else {
            bad.remove(&page)
        };
    }

    /// From now on writes of a page fail, or succeed again.
    pub fn fail_writes(&self, page: u64, fail: bool) {
        let mut bad = self.bad_writes.lock();
        if fail {
            bad.insert(page)
        } else {
            bad.remove(&page)
        };
    }

    /// From now on each access takes this long.
    pub fn set_delay(&self, delay: Duration) {
        self.delay_us.store(delay.as_micros() as u64, Ordering::Relaxed);
    }

    fn access(&self, bad: &Mutex<HashSet<u64>>, page: u64) -> io::Result<()> {
        let delay = self.delay_us.load(Ordering::Relaxed);
        if delay > 0 {
            std::thread::sleep(Duration::from_micros(delay));
        }
        if bad.lock().contains(&page) { Err(io::Error::other("the device fails there")) } else { Ok(()) }
    }
}

impl Backing for MemoryBacking {
    fn read(&self, page: u64, out: &mut Page) -> io::Result<()> {
        self.access(&self.bad_reads, page)?;
        let pages = self.pages.lock();
        let bytes =
            pages.get(&page).ok_or_else(|| io::Error::other("a page was read that was never written"))?;
        out.copy_from_slice(&bytes[..]);
        Ok(())
    }

    fn write(&self, page: u64, bytes: &Page) -> io::Result<()> {
        self.access(&self.bad_writes, page)?;
        self.pages.lock().insert(page, Box::new(*bytes));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_keeps_pages() {
        let dir = tempfile::tempdir().expect("dir");
        for direct in [false, true] {
            let Ok(file) = FileBacking::open(&dir.path().join("pages"), 9, direct) else {
                assert!(direct, "a file can be opened");
                continue;
            };
            let mut out = [0; PAGE_SIZE];
            file.write(8, &[8; PAGE_SIZE]).expect("written");
            file.write(3, &[3; PAGE_SIZE]).expect("written");
            file.read(8, &mut out).expect("read");
            assert_eq!(out, [8; PAGE_SIZE]);
            assert!(file.read(9, &mut out).is_err());
        }
    }
}
