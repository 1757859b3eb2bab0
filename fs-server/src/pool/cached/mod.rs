//! The pool through the kernel's page cache, for the region policies that TeRM is compared with (`odp`, `rpc`,
//! `rpc-buffer`).
//!
//! `CachedPool` has second descriptors of the data files, without O_DIRECT, and for the mapped policies their mappings. These do not hold the pool's
//! locks, so a NIC engine that outlives its server for a moment does not keep the next server from opening the pool. One `CachedPool` serves all
//! workers, and with a mapping also the NIC engine. `CachedDisk` is a worker's disk over it.
//!
//! # How it works
//! A page is at the same place as under every other policy (`DataFiles::locate`). An IO is done when `submit` is called, on the worker's own thread:
//! a read or write, or a copy from or to the mapping whose faults the worker takes. While the device works, the worker serves no other request. That
//! is intended: it is what is compared.
//!
//! `--memory` bounds nothing here: the kernel and the server's control group decide how much is in the page cache.
//!
//! # Invariants
//! * While a `CachedPool` is in use, nothing accesses pool pages with O_DIRECT: the kernel keeps page cache and device coherent only in part, and not
//!   at all for mapped pages.
//! * A failed sync is final: the kernel reports a lost page once for each descriptor, and forgets it.
//!
//! # Failure
//! As with io_uring, a device error goes to its request and affects no other. With a mapping there are no such errors: see `mapping`.

mod mapping;

use super::data_files::{DATA_START, DataFiles};
use super::disk::{Disk, IoBuffer, IoDone, IoError, IoKind, IoRequest, LocalFuture};
use cuttlefs_common::ids::{PAGE_SIZE, PAGE_SIZE_U64};
use mapping::FileMapping;
use parking_lot::Mutex;
use rustix::fs::Advice;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// The kind of access to a page in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// By read and write.
    Buffered,
    /// By load and store.
    Mapped,
}

/// The pool's data files in the kernel's page cache.
#[derive(Debug)]
pub struct CachedPool {
    /// The data files as opened here.
    files: DataFiles,
    /// One mapping for each file, or none.
    mappings: Vec<FileMapping>,
    /// Whether a sync failed. Locked during a sync, so that no two syncs share one report of a lost page.
    sync_failed: Mutex<bool>,
}

impl CachedPool {
    /// Opens the data files a second time.
    ///
    /// # Errors
    /// If a file cannot be opened without O_DIRECT, or cannot be mapped.
    pub fn open(data: &DataFiles, reach: Reach) -> io::Result<Arc<Self>> {
        let mut files = DataFiles::new();
        let mut mappings = Vec::new();
        for data in data.files() {
            // This opens the same file whatever its name is now.
            let path = format!("/proc/self/fd/{}", data.as_fd().as_raw_fd());
            let file = OpenOptions::new().read(true).write(true).open(path)?;
            match reach {
                Reach::Mapped => {
                    let len = usize::try_from(data.all_pages() * PAGE_SIZE_U64)
                        .map_err(|_| io::Error::other("a data file is too large for this machine"))?;
                    mappings.push(FileMapping::new(file.as_fd(), DATA_START, len)?);
                }
                // Without readahead, because accesses are random: see `FileMapping::new`.
                Reach::Buffered => rustix::fs::fadvise(&file, 0, None, Advice::Random)?,
            }
            files.push(data.path().to_owned(), file, data.pages(), false);
        }
        Ok(Arc::new(Self { files, mappings, sync_failed: Mutex::new(false) }))
    }

    /// The parts of a range of the pool, cut where data files end: index of the file, offset among its pages, length.
    fn pieces(&self, offset: u64, len: usize) -> impl Iterator<Item = (usize, usize, usize)> {
        let mut done = 0;
        std::iter::from_fn(move || {
            let place = self.files.locate(offset + done as u64).filter(|_| done < len)?;
            let room = usize::try_from(place.contiguous_bytes).unwrap_or(usize::MAX);
            let piece = room.min(len - done);
            done += piece;
            Some((place.file, (place.file_offset - DATA_START) as usize, piece))
        })
    }

    fn holds(&self, offset: u64, len: usize) -> bool {
        self.files.holds(offset, len)
    }

    /// Copies bytes out of a mapped pool, also while others write them. Pages that are not in memory fault.
    pub fn read_mapped(&self, offset: u64, out: &mut [u8]) {
        assert!(self.holds(offset, out.len()), "read past the pool");
        let mut done = 0;
        for (file, at, len) in self.pieces(offset, out.len()) {
            self.mappings[file].read(at, &mut out[done..done + len]);
            done += len;
        }
    }

    /// Whether a range of a mapped pool can be copied now without a fault that waits for the device.
    pub fn is_cached(&self, offset: u64, len: usize) -> bool {
        self.holds(offset, len)
            && self.pieces(offset, len).all(|(file, at, len)| {
                self.mappings.get(file).is_some_and(|mapping| mapping.is_cached(at, len))
            })
    }

    /// Faults a range of a mapped pool into memory.
    pub fn touch(&self, offset: u64, len: usize) {
        assert!(self.holds(offset, len), "fault past the pool");
        for (file, at, len) in self.pieces(offset, len) {
            self.mappings[file].touch(at, len);
        }
    }

    fn transfer(&self, kind: IoKind, offset: u64, buffer: &mut IoBuffer) -> io::Result<()> {
        let refuse = |why: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, why.to_owned()));
        let IoBuffer::Owned(buffer) = buffer else {
            // Only a policy with frames uses them, and its disk is io_uring.
            return refuse("this disk has no frames");
        };
        let len = buffer.len();
        if !offset.is_multiple_of(PAGE_SIZE_U64) {
            return refuse("an IO is whole pages");
        }
        if !self.holds(offset, len) {
            return refuse("the IO reaches past the pool's end");
        }
        let mut done = 0;
        for (index, at, len) in self.pieces(offset, len) {
            let file = self.files.files()[index].file();
            let file_offset = DATA_START + at as u64;
            let part = done..done + len;
            match (kind, self.mappings.get(index)) {
                (IoKind::Read, Some(mapping)) => mapping.read(at, &mut buffer.as_mut_slice()[part]),
                (IoKind::Write, Some(mapping)) => mapping.write(at, &buffer.as_slice()[part]),
                (IoKind::Read, None) => file.read_exact_at(&mut buffer.as_mut_slice()[part], file_offset)?,
                (IoKind::Write, None) => file.write_all_at(&buffer.as_slice()[part], file_offset)?,
            }
            done += len;
        }
        Ok(())
    }

    fn run(&self, request: IoRequest) -> IoDone {
        let IoRequest { kind, offset, mut buffer } = request;
        let len = match &buffer {
            IoBuffer::Owned(buffer) => buffer.len(),
            IoBuffer::Frames(frames) => frames.len() * PAGE_SIZE,
        };
        let result = self.transfer(kind, offset, &mut buffer);
        IoDone { buffer, result: result.map_err(|source| IoError { kind, offset, len, source }) }
    }

    fn sync(&self) -> io::Result<()> {
        let mut failed = self.sync_failed.lock();
        if *failed {
            return Err(io::Error::other("a sync of the data files failed before"));
        }
        for file in self.files.files() {
            // This covers a mapping as well: a page becomes dirty when its first store faults.
            if let Err(error) = rustix::fs::fdatasync(file) {
                *failed = true;
                return Err(error.into());
            }
        }
        Ok(())
    }
}

/// The cached pool as one worker's disk. Its futures are done when they are made.
#[derive(Debug)]
pub struct CachedDisk(Arc<CachedPool>);

impl CachedDisk {
    /// A worker's disk over the pool that all workers share.
    pub fn new(pool: Arc<CachedPool>) -> Self {
        Self(pool)
    }
}

impl Disk for CachedDisk {
    fn submit(&self, batch: Vec<IoRequest>) -> LocalFuture<'static, Vec<IoDone>> {
        let done = batch.into_iter().map(|request| self.0.run(request)).collect();
        Box::pin(std::future::ready(done))
    }

    fn sync(&self) -> LocalFuture<'static, io::Result<()>> {
        Box::pin(std::future::ready(self.0.sync()))
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
