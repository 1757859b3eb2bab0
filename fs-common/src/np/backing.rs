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
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// A page's bytes, at an address that direct IO takes.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes)]
#[repr(C, align(4096))]
pub struct Page(pub [u8; PAGE_SIZE]);

const _: () = assert!(align_of::<Page>() == PAGE_SIZE);

impl Page {
    /// All zeros.
    pub const ZERO: Self = Self([0; PAGE_SIZE]);
}

/// A file or device that has a place for each page of a region. Pages are read and written at the same time by several threads, one page by one
/// thread.
pub trait Backing: Send + Sync {
    /// Reads pages that follow each other, each of which was written before.
    ///
    /// # Errors
    /// The device failed at one of them. None is then swapped in, but for those that are asked for again.
    fn read(&self, first: u64, out: &mut [Page]) -> io::Result<()>;

    /// Writes pages that follow each other. They need not outlive the process.
    ///
    /// # Errors
    /// The device failed at one of them. All stay in their frames, but for those that are written again.
    fn write(&self, first: u64, pages: &[Page]) -> io::Result<()>;
}

/// A file, or a block device.
#[derive(Debug)]
pub struct FileBacking(File);

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
        Ok(Self(file))
    }
}

impl Backing for FileBacking {
    fn read(&self, first: u64, out: &mut [Page]) -> io::Result<()> {
        self.0.read_exact_at(out.as_mut_bytes(), first * PAGE_SIZE as u64)
    }

    fn write(&self, first: u64, pages: &[Page]) -> io::Result<()> {
        self.0.write_all_at(pages.as_bytes(), first * PAGE_SIZE as u64)
    }
}

/// The twin in memory: a device whose pages can be made to fail, and that takes its time.
#[derive(Debug, Default)]
pub struct MemoryBacking {
    pages: Mutex<HashMap<u64, Box<Page>>>,
    accesses: AtomicU64,
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

    /// Reads and writes so far.
    pub fn accesses(&self) -> u64 {
        self.accesses.load(Ordering::Relaxed)
    }

    fn access(&self, bad: &Mutex<HashSet<u64>>, first: u64, count: usize) -> io::Result<()> {
        self.accesses.fetch_add(1, Ordering::Relaxed);
        let delay = self.delay_us.load(Ordering::Relaxed);
        if delay > 0 {
            std::thread::sleep(Duration::from_micros(delay));
        }
        let bad = bad.lock();
        if (first..).take(count).any(|page| bad.contains(&page)) {
            return Err(io::Error::other("the device fails there"));
        }
        Ok(())
    }
}

impl Backing for MemoryBacking {
    fn read(&self, first: u64, out: &mut [Page]) -> io::Result<()> {
        self.access(&self.bad_reads, first, out.len())?;
        let pages = self.pages.lock();
        for (page, out) in (first..).zip(out) {
            *out = **pages
                .get(&page)
                .ok_or_else(|| io::Error::other("a page was read that was never written"))?;
        }
        Ok(())
    }

    fn write(&self, first: u64, pages: &[Page]) -> io::Result<()> {
        self.access(&self.bad_writes, first, pages.len())?;
        let mut all = self.pages.lock();
        all.extend((first..).zip(pages.iter().map(|page| Box::new(*page))));
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
            let mut out = [Page::ZERO; 2];
            file.write(7, &[Page([7; PAGE_SIZE]), Page([8; PAGE_SIZE])]).expect("written");
            file.write(3, &[Page([3; PAGE_SIZE])]).expect("written");
            file.read(7, &mut out).expect("read");
            assert!(out[0].0 == [7; PAGE_SIZE] && out[1].0 == [8; PAGE_SIZE]);
            assert!(file.read(8, &mut out).is_err());
        }
    }
}
