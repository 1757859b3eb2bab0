//! A data file mapped into memory: loads and stores in the kernel's page cache.
//!
//! As with `SharedMemory`, all access is by copies that tolerate a concurrent writer. Bytes may be torn, which the residency entry around the copy
//! detects. No reference into the mapping is handed out.
//!
//! # Failure
//! Unlike with `SharedMemory`, an access can fail: if the file was cut under the mapping, or the device cannot read the page or has no room for it,
//! SIGBUS ends the server. That is the nature of a mapped SSD; a policy that does IO gets errors instead.

use cuttlefs_common::ids::PAGE_SIZE;
use cuttlefs_common::memory::racing_copy;
use memmap2::{Advice, MmapOptions, MmapRaw};
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

/// Pages of one call of `mincore`.
const PAGES_A_LOOK: usize = 256;

/// The pool pages of one data file, mapped.
#[derive(Debug)]
pub(super) struct FileMapping {
    map: MmapRaw,
}

impl FileMapping {
    /// Maps `len` bytes of the file from `file_offset` on.
    pub(super) fn new(file: BorrowedFd<'_>, file_offset: u64, len: usize) -> io::Result<Self> {
        let map = MmapOptions::new().offset(file_offset).len(len).map_raw(file.as_raw_fd())?;
        // A fault is to read its page only, and not the 32 pages around it: accesses are random, and pages of readahead would count as hits of the
        // policy, or replace pages that are. The price since Linux 6.3: accesses through the mapping no longer count as recent use
        // (`vma_has_recency`), so pages are evicted about in the order of their arrival.
        map.advise(Advice::Random)?;
        Ok(Self { map })
    }

    fn check(&self, at: usize, len: usize) {
        assert!(
            at.checked_add(len).is_some_and(|end| end <= self.map.len()),
            "access past the mapped data file"
        );
    }

    /// Copies bytes out of the mapping. Pages that are not in memory fault, and the caller waits.
    pub(super) fn read(&self, at: usize, out: &mut [u8]) {
        self.check(at, out.len());
        // SAFETY: the range was just checked, `out` is exclusively ours; a racing writer gives torn bytes.
        unsafe { racing_copy(self.map.as_mut_ptr().add(at), out.as_mut_ptr(), out.len()) }
    }

    /// Copies bytes into the mapping. Pages that are not in memory fault, and the caller waits.
    pub(super) fn write(&self, at: usize, bytes: &[u8]) {
        self.check(at, bytes.len());
        // SAFETY: the range was just checked and is mapped writable; a racing reader gets torn bytes.
        unsafe { racing_copy(bytes.as_ptr(), self.map.as_mut_ptr().add(at), bytes.len()) }
    }

    /// Whether all pages of a range are in memory now. The kernel may evict one at any time.
    pub(super) fn is_cached(&self, at: usize, len: usize) -> bool {
        self.check(at, len);
        let end = at + len;
        let mut first = at - at % PAGE_SIZE;
        let mut pages = [0u8; PAGES_A_LOOK];
        while first < end {
            let count = (end - first).div_ceil(PAGE_SIZE).min(PAGES_A_LOOK);
            // SAFETY: the pages lie in this mapping (its length is whole pages), and `pages` has a byte for each.
            let looked = unsafe {
                libc::mincore(self.map.as_mut_ptr().add(first).cast(), count * PAGE_SIZE, pages.as_mut_ptr())
            };
            // An error counts as not in memory: then a thread that may block finds out.
            if looked != 0 || pages[..count].iter().any(|page| page & 1 == 0) {
                return false;
            }
            first += count * PAGE_SIZE;
        }
        true
    }

    /// Faults all pages of a range into memory.
    pub(super) fn touch(&self, at: usize, len: usize) {
        let mut byte = [0];
        let first = at - at % PAGE_SIZE;
        for page in (first..at + len).step_by(PAGE_SIZE) {
            self.read(page, &mut byte);
        }
    }
}
