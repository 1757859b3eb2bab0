//! The ring itself: the only code that passes memory to the kernel.
//!
//! It has the io_uring and every operation in it. `push` puts an operation into a place, and an entry with the place's number into the submission
//! queue. `pop` takes a completion and returns the operation of that place.
//!
//! # Safety argument
//! The kernel reads and writes the memory that an operation names from `push` until its completion is popped. That memory is (a) the request's own
//! buffer, kept by the operation; (b) frames, kept by `frames`, whose address and length never change; (c) the array of vectors, kept by the place;
//! (d) the blocks of a durable write and its file, kept by the operation. `Drop` waits for every operation in the kernel, and if it cannot, leaks all
//! of these instead of freeing them.

use super::operation::{Action, Operation};
use crate::pool::data_files::DataFiles;
use crate::pool::disk::IoKind;
use cuttlefs_common::memory::SharedMemory;
use io_uring::{IoUring, opcode, squeue, types};
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;

/// Bytes of a registered piece: the kernel registers at most 1 GiB at once.
const PIECE_BYTES: usize = 1 << 30;
/// Most pieces that the kernel registers (`IORING_MAX_REG_BUFFERS`).
const MOST_PIECES: usize = 1 << 14;

/// An io_uring, and the operations in it.
pub(super) struct Ring {
    ring: IoUring,
    places: Vec<Option<InKernel>>,
    free: Vec<u32>,
    files: Arc<DataFiles>,
    files_registered: bool,
    frames: Arc<SharedMemory>,
    frames_registered: bool,
    /// Whether the submission queue has entries that the kernel has not taken.
    unsubmitted: bool,
    /// The kernel cancels every operation.
    #[cfg(test)]
    pub(super) cancels: bool,
}

struct InKernel {
    operation: Operation,
    /// The array of a vectored transfer.
    vectors: Vec<libc::iovec>,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("in_flight", &self.in_flight()).finish_non_exhaustive()
    }
}

impl Ring {
    pub(super) fn new(
        depth: usize,
        files: &Arc<DataFiles>,
        frames: &Arc<SharedMemory>,
        register: bool,
    ) -> io::Result<Self> {
        let entries = u32::try_from(depth).map_err(io::Error::other)?;
        // Completions are processed when this thread enters the kernel anyway, without interrupting it. Kernels before 6.0 do not know all of the
        // flags, and are asked without them.
        let ring = IoUring::builder()
            .dontfork()
            .setup_single_issuer()
            .setup_coop_taskrun()
            .setup_taskrun_flag()
            .build(entries)
            .or_else(|error| match error.raw_os_error() {
                Some(libc::EINVAL) => IoUring::builder().dontfork().build(entries),
                _ => Err(error),
            })
            .map_err(|error| {
                let hint = "io_uring cannot be set up; is /proc/sys/kernel/io_uring_disabled 0, and does the \
                            container's seccomp profile allow it?";
                io::Error::new(error.kind(), format!("{hint} ({error})"))
            })?;
        let mut this = Self {
            ring,
            places: (0..depth).map(|_| None).collect(),
            free: (0..entries).rev().collect(),
            files: files.clone(),
            files_registered: false,
            frames: frames.clone(),
            frames_registered: false,
            unsubmitted: false,
            #[cfg(test)]
            cancels: false,
        };
        if register {
            this.register_files();
            this.register_frames();
        }
        Ok(this)
    }

    fn register_files(&mut self) {
        let descriptors: Vec<RawFd> =
            self.files.files().iter().map(|file| file.as_fd().as_raw_fd()).collect();
        match self.ring.submitter().register_files(&descriptors) {
            Ok(()) => self.files_registered = true,
            Err(error) => tracing::warn!(%error, "data files are not registered with io_uring"),
        }
    }

    fn register_frames(&mut self) {
        let base = self.frames.base_address().as_ptr();
        let pieces: Vec<libc::iovec> = (0..self.frames.len())
            .step_by(PIECE_BYTES)
            .map(|offset| libc::iovec {
                iov_base: base.wrapping_add(offset).cast(),
                iov_len: PIECE_BYTES.min(self.frames.len() - offset),
            })
            .collect();
        if pieces.len() > MOST_PIECES || !self.frames.is_writable() {
            return;
        }
        // SAFETY: the ranges are the frames' mapping, which lives as long as `self.frames`, so longer than the ring.
        match unsafe { self.ring.submitter().register_buffers(&pieces) } {
            Ok(()) => self.frames_registered = true,
            Err(error) => tracing::warn!(
                %error,
                "frames are not registered with io_uring; reads and writes are a little slower. Each worker thread registers all of \
                 --memory: raise the limit of locked memory (ulimit -l, LimitMEMLOCK=) above the sum"
            ),
        }
    }

    /// The size of registered pieces, if frames are registered.
    pub(super) fn piece_bytes(&self) -> Option<usize> {
        self.frames_registered.then_some(PIECE_BYTES)
    }

    pub(super) fn raw_fd(&self) -> RawFd {
        self.ring.as_raw_fd()
    }

    /// The number of operations that were pushed and not popped.
    pub(super) fn in_flight(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Whether `enter` or `pop` has something to do now.
    pub(super) fn has_work(&mut self) -> bool {
        if self.unsubmitted || !self.ring.completion().is_empty() {
            return true;
        }
        let submission = self.ring.submission();
        submission.taskrun() || submission.cq_overflow()
    }

    /// Puts an operation into the ring. The caller has checked that there is a free place: `in_flight` is less than the depth.
    pub(super) fn push(&mut self, operation: Operation) {
        let place = self.free.pop().expect("the caller looked for a free place");
        let vectors = match &operation.action {
            Action::Transfer { piece, .. } if piece.vectors.len() > 1 => piece
                .vectors
                .iter()
                .map(|vector| libc::iovec {
                    iov_base: vector.address as *mut libc::c_void,
                    iov_len: vector.len,
                })
                .collect(),
            _ => Vec::new(),
        };
        let entry = self.entry(&operation, &vectors);
        #[cfg(test)]
        let entry = if self.cancels { opcode::Nop::new().build() } else { entry };
        let entry = entry.user_data(u64::from(place));
        // Moving both does not move their memory: buffers and vectors are on the heap.
        self.places[place as usize] = Some(InKernel { operation, vectors });
        // SAFETY: everything the entry names lives until the completion is popped; see the module's argument.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.expect("the submission queue has a place for each operation in flight");
        self.unsubmitted = true;
    }

    fn entry(&self, operation: &Operation, vectors: &[libc::iovec]) -> squeue::Entry {
        match &operation.action {
            Action::Sync { file } => {
                let flags = types::FsyncFlags::DATASYNC;
                match self.files_registered {
                    true => opcode::Fsync::new(types::Fixed(*file as u32)).flags(flags).build(),
                    false => opcode::Fsync::new(self.fd(*file)).flags(flags).build(),
                }
            }
            Action::Blocks { write, done } => {
                let rest = &write.buffer.as_slice()[*done..];
                opcode::Write::new(types::Fd(write.file.as_raw_fd()), rest.as_ptr(), rest.len() as u32)
                    .offset(write.offset + *done as u64)
                    .rw_flags(libc::RWF_DSYNC)
                    .build()
            }
            Action::Transfer { kind, piece } => {
                let at = piece.file_offset;
                let first = piece.vectors[0];
                let (address, len) = (first.address as *mut u8, first.len as u32);
                let count = vectors.len() as u32;
                macro_rules! build {
                    ($target:expr) => {
                        match (kind, piece.fixed, count) {
                            (IoKind::Read, Some(buffer), 0) => {
                                opcode::ReadFixed::new($target, address, len, buffer).offset(at).build()
                            }
                            (IoKind::Write, Some(buffer), 0) => {
                                opcode::WriteFixed::new($target, address, len, buffer).offset(at).build()
                            }
                            (IoKind::Read, None, 0) => {
                                opcode::Read::new($target, address, len).offset(at).build()
                            }
                            (IoKind::Write, None, 0) => {
                                opcode::Write::new($target, address, len).offset(at).build()
                            }
                            (IoKind::Read, _, _) => {
                                opcode::Readv::new($target, vectors.as_ptr(), count).offset(at).build()
                            }
                            (IoKind::Write, _, _) => {
                                opcode::Writev::new($target, vectors.as_ptr(), count).offset(at).build()
                            }
                        }
                    };
                }
                match self.files_registered {
                    true => build!(types::Fixed(piece.file as u32)),
                    false => build!(self.fd(piece.file)),
                }
            }
        }
    }

    fn fd(&self, file: usize) -> types::Fd {
        types::Fd(self.files.files()[file].as_fd().as_raw_fd())
    }

    /// Submits the pushed operations and waits for `want` completions. Returns whether it made a system call.
    pub(super) fn enter(&mut self, want: usize) -> io::Result<bool> {
        let submission = self.ring.submission();
        let needed = want > 0 || self.unsubmitted || submission.taskrun() || submission.cq_overflow();
        drop(submission);
        if !needed {
            return Ok(false);
        }
        match self.ring.submit_and_wait(want) {
            Ok(_) => {}
            // The call was interrupted, or the kernel is short of memory or of completion places. Entries that it did not take stay in the queue for
            // the next turn.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => {}
            Err(error) => return Err(error),
        }
        self.unsubmitted = !self.ring.submission().is_empty();
        Ok(true)
    }

    /// The next completion: its operation and the kernel's result.
    pub(super) fn pop(&mut self) -> Option<(Operation, i32)> {
        let entry = self.ring.completion().next()?;
        let place = entry.user_data() as usize;
        let done = self.places[place].take().expect("a completion names an operation in the kernel");
        self.free.push(place as u32);
        let result = entry.result();
        #[cfg(test)]
        let result = if self.cancels { -libc::ECANCELED } else { result };
        // The kernel had no thread for it, and could start none. It has not begun: nobody else cancels an operation.
        let result =
            if result == -libc::ECANCELED { self.done_here(&done.operation, &done.vectors) } else { result };
        Some((done.operation, result))
    }

    /// Does an operation on this thread, which waits for it. Returns what the kernel would.
    fn done_here(&self, operation: &Operation, vectors: &[libc::iovec]) -> i32 {
        let file_of = |file: usize| self.files.files()[file].as_fd().as_raw_fd();
        let one = |address: usize, len: usize| {
            [libc::iovec { iov_base: address as *mut libc::c_void, iov_len: len }]
        };
        let returned = match &operation.action {
            Action::Sync { file } => {
                // SAFETY: the call is given no memory; the file stays open while `self.files` has it.
                unsafe { libc::fdatasync(file_of(*file)) as isize }
            }
            Action::Blocks { write, done } => {
                let rest = &write.buffer.as_slice()[*done..];
                let vectors = one(rest.as_ptr().addr(), rest.len());
                let (file, at) = (write.file.as_raw_fd(), (write.offset + *done as u64) as libc::off_t);
                // SAFETY: the kernel reads the vector and its memory during the call; both live longer.
                unsafe { libc::pwritev2(file, vectors.as_ptr(), 1, at, libc::RWF_DSYNC) }
            }
            Action::Transfer { kind, piece } => {
                let (file, at) = (file_of(piece.file), piece.file_offset as libc::off_t);
                let first = one(piece.vectors[0].address, piece.vectors[0].len);
                let vectors = if vectors.is_empty() { &first[..] } else { vectors };
                let count = vectors.len() as libc::c_int;
                // SAFETY: the memory that an entry of this operation names, by the module's argument; the operation lives longer than the call.
                unsafe {
                    match kind {
                        IoKind::Read => libc::preadv(file, vectors.as_ptr(), count, at),
                        IoKind::Write => libc::pwritev(file, vectors.as_ptr(), count, at),
                    }
                }
            }
        };
        match returned {
            // A transfer has less than 2 GiB: the kernel moves no more with one call.
            0.. => returned as i32,
            _ => -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        while self.in_flight() > 0 {
            if let Err(error) = self.enter(1) {
                tracing::error!(%error, "IOs in flight cannot be waited for; their memory is leaked");
                std::mem::forget(std::mem::take(&mut self.places));
                std::mem::forget(self.frames.clone());
                return;
            }
            while self.pop().is_some() {}
        }
    }
}
