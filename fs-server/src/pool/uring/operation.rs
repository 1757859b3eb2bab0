//! Operations in the ring and in front of it, and their requests and batches.
//!
//! An `Operation` keeps its request alive by a reference count, and the request keeps the buffer. When the last operation of a request is done, the
//! request's result goes to its batch.

use super::plan::{Piece, Vector};
use super::{MOST_RETRIES, SECTOR_BYTES};
use crate::pool::batch::{Batch, Ticket};
use crate::pool::block_write::BlockWrite;
use crate::pool::disk::{IoBuffer, IoDone, IoError, IoKind, IoRequest};
use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;

/// A request whose operations are not all done.
#[derive(Debug)]
pub(super) struct RequestState {
    batch: Batch,
    index: usize,
    kind: IoKind,
    offset: u64,
    len: usize,
    buffer: RefCell<Option<IoBuffer>>,
    left: Cell<usize>,
    error: RefCell<Option<io::Error>>,
}

impl RequestState {
    pub(super) fn new(batch: Batch, index: usize, request: IoRequest) -> Self {
        Self {
            batch,
            index,
            kind: request.kind,
            offset: request.offset,
            len: super::len_bytes(&request.buffer),
            buffer: RefCell::new(Some(request.buffer)),
            left: Cell::new(0),
            error: RefCell::new(None),
        }
    }

    pub(super) fn with_pieces(self, pieces: usize) -> Self {
        self.left.set(pieces);
        self
    }

    pub(super) fn kind(&self) -> IoKind {
        self.kind
    }

    /// Notes an error. The first error of a request is its result.
    pub(super) fn fail(&self, error: io::Error) {
        self.error.borrow_mut().get_or_insert(error);
    }
}

/// A sync whose files are not all done, or a durable write that is not done.
#[derive(Debug)]
pub(super) struct SyncState {
    ticket: Ticket,
    left: Cell<usize>,
    error: RefCell<Option<io::Error>>,
}

impl SyncState {
    pub(super) fn new(ticket: Ticket, files: usize) -> Self {
        Self { ticket, left: Cell::new(files), error: RefCell::new(None) }
    }
}

/// The request or sync to which an operation belongs.
#[derive(Clone, Debug)]
pub(super) enum Owner {
    Request(Rc<RequestState>),
    Sync(Rc<SyncState>),
}

impl Owner {
    /// Gives the result to the waiter. All operations are done.
    pub(super) fn tell(self) {
        match self {
            Self::Request(state) => {
                let buffer = state.buffer.borrow_mut().take().expect("a request is told once");
                let error = state.error.borrow_mut().take();
                let result = error.map_or(Ok(()), |source| {
                    let (kind, offset, len) = (state.kind, state.offset, state.len);
                    Err(IoError { kind, offset, len, source })
                });
                state.batch.finish(state.index, IoDone { buffer, result });
            }
            Self::Sync(state) => {
                let error = state.error.borrow_mut().take();
                state.ticket.finish(error.map_or(Ok(()), Err));
            }
        }
    }
}

/// The work of an operation.
#[derive(Debug)]
pub(super) enum Action {
    Transfer {
        kind: IoKind,
        piece: Piece,
    },
    Sync {
        file: usize,
    },
    /// Writes blocks durably; `done` bytes are written.
    Blocks {
        write: BlockWrite,
        done: usize,
    },
}

/// One submission to the kernel.
#[derive(Debug)]
pub(super) struct Operation {
    pub(super) action: Action,
    owner: Owner,
    retries: u8,
}

/// The next step after a completion.
#[derive(Debug)]
pub(super) enum Next {
    /// Submit the operation again: it came back short, or the kernel asked for that.
    Again,
    /// The operation is done.
    Done(io::Result<()>),
}

impl Operation {
    pub(super) fn transfer(kind: IoKind, piece: Piece, state: Rc<RequestState>) -> Self {
        Self { action: Action::Transfer { kind, piece }, owner: Owner::Request(state), retries: 0 }
    }

    pub(super) fn sync(file: usize, state: Rc<SyncState>) -> Self {
        Self { action: Action::Sync { file }, owner: Owner::Sync(state), retries: 0 }
    }

    pub(super) fn blocks(write: BlockWrite, state: Rc<SyncState>) -> Self {
        Self { action: Action::Blocks { write, done: 0 }, owner: Owner::Sync(state), retries: 0 }
    }

    pub(super) fn is_fixed(&self) -> bool {
        matches!(&self.action, Action::Transfer { piece, .. } if piece.fixed.is_some())
    }

    /// Takes the kernel's result.
    pub(super) fn advance(&mut self, result: i32) -> Next {
        if result < 0 {
            let error = io::Error::from_raw_os_error(result.saturating_neg());
            let passing = matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN));
            if passing && self.retries < MOST_RETRIES {
                self.retries += 1;
                return Next::Again;
            }
            return Next::Done(Err(error));
        }
        let wanted: usize = match &self.action {
            Action::Transfer { piece, .. } => piece.vectors.iter().map(|vector| vector.len).sum(),
            Action::Blocks { write, done } => write.buffer.len() - done,
            Action::Sync { .. } => 0,
        };
        let moved = result as usize;
        if moved >= wanted {
            return Next::Done(Ok(()));
        }
        // Direct IO is continued at a sector boundary, so the bytes of a partial sector are transferred again.
        let moved = moved - moved % SECTOR_BYTES;
        if moved == 0 {
            let is_read = matches!(&self.action, Action::Transfer { kind, .. } if super::is_read(*kind));
            let (error, what) = match is_read {
                true => (io::ErrorKind::UnexpectedEof, "the data file is shorter than the pool"),
                false => (io::ErrorKind::WriteZero, "the device takes no more bytes"),
            };
            return Next::Done(Err(io::Error::new(error, what)));
        }
        match &mut self.action {
            Action::Transfer { piece, .. } => {
                piece.file_offset += moved as u64;
                consume(&mut piece.vectors, moved);
            }
            Action::Blocks { done, .. } => *done += moved,
            Action::Sync { .. } => {}
        }
        Next::Again
    }

    /// Counts an operation as done. Returns the owner if it was its last one.
    pub(super) fn finish(self, result: io::Result<()>) -> Option<Owner> {
        let (left, error) = match &self.owner {
            Owner::Request(state) => (&state.left, &state.error),
            Owner::Sync(state) => (&state.left, &state.error),
        };
        if let Err(new) = result {
            error.borrow_mut().get_or_insert(new);
        }
        left.set(left.get() - 1);
        (left.get() == 0).then_some(self.owner)
    }
}

fn consume(vectors: &mut std::collections::VecDeque<Vector>, mut bytes: usize) {
    while bytes > 0
        && let Some(front) = vectors.front_mut()
    {
        let len = front.len.min(bytes);
        front.address += len;
        front.len -= len;
        bytes -= len;
        if front.len == 0 {
            vectors.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    fn operation(kind: IoKind) -> Operation {
        let (batch, _) = Batch::new(1);
        let request = IoRequest { kind, offset: 0, buffer: IoBuffer::Frames(Vec::new()) };
        let vectors =
            VecDeque::from([Vector { address: 0x1000, len: 4096 }, Vector { address: 0x9000, len: 8192 }]);
        let piece = Piece { file: 0, file_offset: 65536, vectors, fixed: None };
        let state = RequestState::new(batch, 0, request).with_pieces(1);
        Operation::transfer(kind, piece, Rc::new(state))
    }

    #[test]
    fn a_short_transfer_goes_on_at_a_sector() {
        let mut one = operation(IoKind::Write);
        assert!(matches!(one.advance(4096 + 700), Next::Again));
        let Action::Transfer { piece, .. } = &one.action else { panic!("a transfer") };
        assert_eq!(piece.file_offset, 65536 + 4096 + 512);
        assert_eq!(piece.vectors, [Vector { address: 0x9200, len: 8192 - 512 }]);
        assert!(matches!(one.advance(8192 - 512), Next::Done(Ok(()))));
    }

    #[test]
    fn no_progress_is_an_error_and_not_a_loop() {
        for (kind, expected) in
            [(IoKind::Read, io::ErrorKind::UnexpectedEof), (IoKind::Write, io::ErrorKind::WriteZero)]
        {
            for moved in [0, 511] {
                let Next::Done(Err(error)) = operation(kind).advance(moved) else {
                    panic!("no progress");
                };
                assert_eq!(error.kind(), expected);
            }
        }
    }

    #[test]
    fn retries_are_bounded_and_other_errors_final() {
        let mut one = operation(IoKind::Read);
        for _ in 0..MOST_RETRIES {
            assert!(matches!(one.advance(-libc::EAGAIN), Next::Again));
        }
        assert!(matches!(one.advance(-libc::EAGAIN), Next::Done(Err(_))));
        let Next::Done(Err(error)) = operation(IoKind::Read).advance(-libc::EIO) else {
            panic!("EIO is final");
        };
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
    }
}
