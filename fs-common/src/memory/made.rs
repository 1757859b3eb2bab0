//! Pages that the system makes before their first use: many with one call, or a huge one.
//!
//! Owns where large memory is mapped, so that a huge page of its file can be one of the processor's, too.
//!
//! # Failure
//! All of it is advice. What the system does not make now it makes page by page, at the first use.

use super::SharedMemory;
use rustix::fd::AsFd;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::ffi::c_void;
use std::io;

/// Bytes of a huge page, where there are some.
pub const HUGE_PAGE: usize = 2 << 20;

impl SharedMemory {
    /// Has the system make the pages of a range now, all with one call: that takes less than a page fault for each at its first use. It is advice: what
    /// the system does not make now, it makes then.
    pub fn make_pages(&self, offset: usize, len: usize) {
        assert!(self.contains(offset as u64, len as u64), "pages outside of the memory");
        // SAFETY: inside of the mapping, which stays mapped while `&self`; making pages changes no byte.
        let _ = unsafe {
            rustix::mm::madvise(self.base.as_ptr().add(offset).cast(), len, Advice::LinuxPopulateWrite)
        };
    }

    /// Has the system make the huge page at `offset`, a multiple of [`HUGE_PAGE`]: in a part of the time that its small ones take.
    /// `false`: it has none (before Linux 6.1, or with memory in too many pieces), and the pages are as they were. What the system's policy for huge pages
    /// says does not matter, since this asks for one.
    pub fn make_huge_page(&self, offset: usize) -> bool {
        assert!(offset.is_multiple_of(HUGE_PAGE) && self.contains(offset as u64, HUGE_PAGE as u64));
        // The system takes no range in which there is no page yet.
        self.make_pages(offset, rustix::param::page_size());
        // SAFETY: inside of the mapping, which stays mapped while `&self`. The system moves the bytes of the pages that are there; threads that use them
        // meanwhile wait.
        unsafe { libc::madvise(self.base.as_ptr().add(offset).cast(), HUGE_PAGE, libc::MADV_COLLAPSE) == 0 }
    }
}

/// Maps a file. Bytes that are a multiple of a huge page from its beginning are at an address that is one.
pub(super) fn map_file(
    fd: impl AsFd,
    len: usize,
    offset: u64,
    prot: ProtFlags,
    flags: MapFlags,
) -> io::Result<*mut c_void> {
    if len < HUGE_PAGE || !offset.is_multiple_of(HUGE_PAGE as u64) {
        // SAFETY: a fresh mapping at an address the kernel picks aliases nothing of ours.
        return Ok(unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, flags, &fd, offset)? });
    }
    let len = len.next_multiple_of(rustix::param::page_size());
    let room = len.checked_add(HUGE_PAGE).ok_or(io::ErrorKind::OutOfMemory)?;
    // SAFETY: a fresh mapping at an address the kernel picks aliases nothing of ours.
    let start = unsafe {
        rustix::mm::mmap_anonymous(
            std::ptr::null_mut(),
            room,
            ProtFlags::empty(),
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )?
    };
    let skipped = start.cast::<u8>().align_offset(HUGE_PAGE);
    // SAFETY: the three parts are of the mapping that was just made, which nobody else knows; the middle one is replaced whole or not at all, and what
    // is not used is given back.
    unsafe {
        let base = start.cast::<u8>().add(skipped);
        let mapped = rustix::mm::mmap(base.cast(), len, prot, flags | MapFlags::FIXED, &fd, offset);
        if let Err(error) = mapped {
            rustix::mm::munmap(start, room)?;
            return Err(error.into());
        }
        if skipped > 0 {
            rustix::mm::munmap(start, skipped)?;
        }
        rustix::mm::munmap(base.add(len).cast(), HUGE_PAGE - skipped)?;
        Ok(base.cast())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_huge_page_has_the_bytes_that_were_there() {
        let memory = SharedMemory::new("huge", 3 * HUGE_PAGE + 4096).expect("memory");
        let other = memory.read_only_view().expect("a view");
        assert!(memory.base_address().as_ptr().cast::<u8>().addr().is_multiple_of(HUGE_PAGE));
        memory.write(HUGE_PAGE + 5, b"bytes");
        // Where the system has huge pages, and where it has none.
        let is_huge = memory.make_huge_page(HUGE_PAGE);
        let mut found = [0; 7];
        other.read(HUGE_PAGE + 4, &mut found);
        assert_eq!(&found, b"\0bytes\0");
        let blocks = rustix::fs::fstat(memory.fd()).expect("stat").st_blocks as usize * 512;
        assert_eq!(blocks, if is_huge { HUGE_PAGE } else { 4096 });
        other.read(HUGE_PAGE * 3 + 4089, &mut found);
        assert_eq!(found, [0; 7]);
    }
}
