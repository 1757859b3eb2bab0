//! The disk: io_uring over the pool's data files.
//!
//! A `UringDisk` is the ring of one worker thread. Tasks submit batches; the worker's reactor calls `UringDisk::turn`, which hands all new operations
//! to the kernel with one system call and completes finished ones.
//!
//! # How it works
//! A request becomes operations (`plan`): it is cut where a data file ends, neighbouring frames become one transfer of registered memory, and
//! scattered ones one vectored transfer. Operations wait in `waiting` until one of `RING_DEPTH` places is free. A transfer that came back short is
//! continued behind its last whole sector.
//!
//! # Invariants
//! * An operation in the kernel keeps its request, and the request its buffer, until the completion is reaped, also if the future is dropped. The
//!   ring waits for all of them when it is dropped. So no IO can write to memory that has another user.
//! * At most `RING_DEPTH` operations are in the kernel and the completion queue has twice as many places: it cannot
//!   overflow.
//! * A batch is taken as a whole or not at all. While `MOST_WAITING` operations wait, new batches stay in their futures until there is room.
//!
//! # Failure
//! A device error goes to its request; the others of a batch are not affected. `EINTR` and `EAGAIN` are tried again, `MOST_RETRIES` times. What the kernel
//! cancels because it can start no thread the worker does itself. If memory
//! or files cannot be registered, plain transfers are used instead, and one warning says so. If the ring cannot be entered at all, `turn` returns an
//! error: the worker cannot go on.

mod operation;
mod plan;
mod ring;

use super::batch::{Batch, BatchFuture, Ticket};
use super::block_write::BlockWrite;
use super::data_files::DataFiles;
use super::disk::{Disk, IoBuffer, IoDone, IoError, IoKind, IoRequest, LocalFuture};
use cuttlefs_common::memory::SharedMemory;
use operation::{Operation, Owner, RequestState, SyncState};
use ring::Ring;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::os::fd::BorrowedFd;
use std::pin::{Pin, pin};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// Operations in the kernel at once. Commodity NVMe drives reach their full rate at 32 to 128; more of them would only wait in the device instead of
/// here.
pub const RING_DEPTH: usize = 256;
/// Operations that may wait for a place in the ring. Further batches wait in their futures.
pub const MOST_WAITING: usize = 4096;
/// How many times an operation is tried again after `EINTR` or `EAGAIN`. Both mean that the kernel was short of something for a moment; if that
/// lasts, the caller must see the error.
pub const MOST_RETRIES: u8 = 32;

/// The unit that a device transfers as a whole. A short transfer is continued at such a boundary.
const SECTOR_BYTES: usize = 512;

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UringCounters {
    /// Operations completed.
    pub operations: u64,
    /// Operations that used registered frames.
    pub fixed: u64,
    /// System calls made to submit or complete.
    pub enters: u64,
    /// Transfers that came back short and were continued.
    pub continued: u64,
}

/// The pool's storage through one io_uring. Belongs to the thread that made it.
#[derive(Debug)]
pub struct UringDisk {
    core: Rc<RefCell<Core>>,
    /// The ring's descriptor, which is open as long as `core` exists.
    ring_fd: std::os::fd::RawFd,
}

/// A ring that this does not keep alive.
#[derive(Clone, Debug)]
pub struct WeakRing {
    core: Weak<RefCell<Core>>,
    ring_fd: std::os::fd::RawFd,
}

impl WeakRing {
    /// The ring, if it still exists.
    pub fn upgrade(&self) -> Option<UringDisk> {
        self.core.upgrade().map(|core| UringDisk { core, ring_fd: self.ring_fd })
    }
}

#[derive(Debug)]
struct Core {
    // The first field: dropping it waits for everything in flight, so buffers and files outlive it.
    ring: Ring,
    files: Arc<DataFiles>,
    frames: Arc<SharedMemory>,
    waiting: VecDeque<Operation>,
    /// Wakers of batches that found no room, in order.
    outside: Vec<Waker>,
    counters: UringCounters,
}

impl UringDisk {
    /// A ring over `files`, with `frames` registered.
    ///
    /// # Errors
    /// If the kernel has no io_uring or forbids it.
    pub fn new(files: Arc<DataFiles>, frames: Arc<SharedMemory>) -> io::Result<Self> {
        Self::with_registration(files, frames, true)
    }

    /// Without `register` everything works as if the kernel refused to register memory.
    fn with_registration(
        files: Arc<DataFiles>,
        frames: Arc<SharedMemory>,
        register: bool,
    ) -> io::Result<Self> {
        let ring = Ring::new(RING_DEPTH, &files, &frames, register)?;
        let ring_fd = ring.raw_fd();
        let core = Core {
            ring,
            files,
            frames,
            waiting: VecDeque::new(),
            outside: Vec::new(),
            counters: UringCounters::default(),
        };
        Ok(Self { core: Rc::new(RefCell::new(core)), ring_fd })
    }

    /// Hands new operations to the kernel, with one system call if there are any, and completes what is done.
    /// Returns how many operations completed.
    ///
    /// # Errors
    /// If the ring is broken.
    pub fn turn(&self) -> io::Result<usize> {
        self.turn_and_wait(0)
    }

    fn turn_and_wait(&self, want: usize) -> io::Result<usize> {
        let mut core = self.core.borrow_mut();
        core.fill();
        let want = if core.ring.in_flight() == 0 { 0 } else { want };
        core.counters.enters += u64::from(core.ring.enter(want)?);
        let mut finished = Vec::new();
        let completed = core.reap(&mut finished);
        if completed > 0 && core.fill() {
            // Places became free, so waiting operations and short transfers go on at once.
            core.counters.enters += u64::from(core.ring.enter(0)?);
        }
        let outside = match core.waiting.len() < MOST_WAITING {
            true => std::mem::take(&mut core.outside),
            false => Vec::new(),
        };
        drop(core);
        // Outside of the borrow, because wakers run other code.
        finished.into_iter().for_each(Owner::tell);
        outside.into_iter().for_each(Waker::wake);
        Ok(completed)
    }

    /// A reference that does not keep the ring.
    pub fn downgrade(&self) -> WeakRing {
        WeakRing { core: Rc::downgrade(&self.core), ring_fd: self.ring_fd }
    }

    /// Writes blocks to a file that is not a data file. Resolves when all of it survives a power loss.
    pub fn write_blocks(&self, write: BlockWrite) -> LocalFuture<'static, io::Result<()>> {
        let (ticket, future) = Ticket::new();
        let state = Rc::new(SyncState::new(ticket, 1));
        // Like a sync, it does not wait for room: a worker has one such write at a time.
        self.core.borrow_mut().waiting.push_back(Operation::blocks(write, state));
        Box::pin(future)
    }

    /// Whether no operation is in the kernel or waits to go there.
    pub fn is_idle(&self) -> bool {
        let core = self.core.borrow();
        core.ring.in_flight() == 0 && core.waiting.is_empty()
    }

    /// Whether `turn` has something to do now: operations to submit, or completions.
    pub fn has_work(&self) -> bool {
        let mut core = self.core.borrow_mut();
        let room = core.ring.in_flight() < RING_DEPTH;
        (room && !core.waiting.is_empty()) || core.ring.has_work()
    }

    /// The descriptor that is readable (POLLIN) while there are completions.
    pub fn poll_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is the ring's, which lives as long as `core`, and `self` keeps `core`.
        unsafe { BorrowedFd::borrow_raw(self.ring_fd) }
    }

    /// Counts since the start.
    pub fn counters(&self) -> UringCounters {
        self.core.borrow().counters
    }

    /// Whether IOs use frames as registered memory.
    pub fn has_registered_frames(&self) -> bool {
        self.core.borrow().ring.piece_bytes().is_some()
    }

    /// Runs one future without a worker, and sleeps in the kernel while IOs are in flight. For tools and tests.
    ///
    /// # Errors
    /// If the ring is broken, or the future waits for something other than this disk.
    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> io::Result<T> {
        let mut future = pin!(future);
        let mut context = Context::from_waker(Waker::noop());
        loop {
            if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
                return Ok(value);
            }
            if self.is_idle() {
                return Err(io::Error::other("the future does not wait for the disk"));
            }
            self.turn_and_wait(1)?;
        }
    }
}

impl Disk for UringDisk {
    fn submit(&self, requests: Vec<IoRequest>) -> LocalFuture<'static, Vec<IoDone>> {
        let mut core = self.core.borrow_mut();
        if core.waiting.len() >= MOST_WAITING {
            let core = Rc::downgrade(&self.core);
            return Box::pin(Admission::Outside { core, requests });
        }
        let (future, refused) = core.take(requests);
        drop(core);
        refused.into_iter().for_each(Owner::tell);
        Box::pin(future)
    }

    fn sync(&self) -> LocalFuture<'static, io::Result<()>> {
        let (ticket, future) = Ticket::new();
        let mut core = self.core.borrow_mut();
        let files = core.files.files().len();
        let state = Rc::new(SyncState::new(ticket, files));
        // Syncs do not wait for room, because there are few of them, with one operation for each data file.
        for file in 0..files {
            core.waiting.push_back(Operation::sync(file, state.clone()));
        }
        drop(core);
        if files == 0 {
            Owner::Sync(state).tell();
        }
        Box::pin(future)
    }
}

impl Core {
    /// Takes a batch. Also returns the requests that are impossible, whose results are told after the borrow ends.
    fn take(&mut self, requests: Vec<IoRequest>) -> (BatchFuture, Vec<Owner>) {
        let (batch, future) = Batch::new(requests.len());
        let mut refused = Vec::new();
        for (index, request) in requests.into_iter().enumerate() {
            let pieces = plan::plan(&request, &self.files, &self.frames, self.ring.piece_bytes());
            let state = RequestState::new(batch.clone(), index, request);
            match pieces {
                Ok(pieces) => {
                    let state = Rc::new(state.with_pieces(pieces.len()));
                    let kind = state.kind();
                    let operations =
                        pieces.into_iter().map(|piece| Operation::transfer(kind, piece, state.clone()));
                    self.waiting.extend(operations);
                }
                Err(error) => {
                    state.fail(error);
                    refused.push(Owner::Request(Rc::new(state)));
                }
            }
        }
        (future, refused)
    }

    /// Moves waiting operations to free places of the ring. Returns whether there were any.
    fn fill(&mut self) -> bool {
        let mut any = false;
        while self.ring.in_flight() < RING_DEPTH {
            let Some(operation) = self.waiting.pop_front() else {
                break;
            };
            self.ring.push(operation);
            any = true;
        }
        any
    }

    /// Takes completions. Requests that are done go to `finished`.
    fn reap(&mut self, finished: &mut Vec<Owner>) -> usize {
        let mut completed = 0;
        while let Some((mut operation, result)) = self.ring.pop() {
            completed += 1;
            self.counters.operations += 1;
            self.counters.fixed += u64::from(operation.is_fixed());
            match operation.advance(result) {
                operation::Next::Again => {
                    self.counters.continued += 1;
                    self.waiting.push_front(operation);
                }
                operation::Next::Done(result) => {
                    if let Some(owner) = operation.finish(result) {
                        finished.push(owner);
                    }
                }
            }
        }
        completed
    }
}

/// A batch that waits for room, and then for its IOs. If it is dropped while it waits for room, its IOs are not done.
enum Admission {
    Outside { core: Weak<RefCell<Core>>, requests: Vec<IoRequest> },
    Inside(BatchFuture),
}

impl Future for Admission {
    type Output = Vec<IoDone>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        if let Self::Outside { core, requests } = this {
            let Some(core) = core.upgrade() else {
                return Poll::Ready(std::mem::take(requests).into_iter().map(shut_down).collect());
            };
            let mut core = core.borrow_mut();
            if core.waiting.len() >= MOST_WAITING {
                // A waker that is already in the list is not added again.
                if !core.outside.iter().any(|waker| waker.will_wake(context.waker())) {
                    core.outside.push(context.waker().clone());
                }
                return Poll::Pending;
            }
            let (future, refused) = core.take(std::mem::take(requests));
            drop(core);
            refused.into_iter().for_each(Owner::tell);
            *this = Self::Inside(future);
        }
        match this {
            Self::Inside(future) => Pin::new(future).poll(context),
            Self::Outside { .. } => unreachable!("it was just let in"),
        }
    }
}

fn shut_down(request: IoRequest) -> IoDone {
    let len = len_bytes(&request.buffer);
    let source = io::Error::other("the disk is shut down");
    let error = IoError { kind: request.kind, offset: request.offset, len, source };
    IoDone { buffer: request.buffer, result: Err(error) }
}

fn len_bytes(buffer: &IoBuffer) -> usize {
    match buffer {
        IoBuffer::Owned(buffer) => buffer.len(),
        IoBuffer::Frames(frames) => frames.len() * cuttlefs_common::ids::PAGE_SIZE,
    }
}

/// Whether the operation moves bytes into memory.
fn is_read(kind: IoKind) -> bool {
    kind == IoKind::Read
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
