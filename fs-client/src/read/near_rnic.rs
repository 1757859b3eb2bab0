//! READs of windows in this process: for tests and the model checker.

use super::remote::ReadsPieces;
use crate::transport::{DATA_LEN, Landing, PROOFS_LEN, Piece, RemoteWindows};
use cuttlefs_common::ids::Rkey;
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::{Remote, RemoteRange};
use std::sync::Arc;

/// Executes READs of windows in this process.
pub(super) struct NearRnic {
    /// Frames, residency table, file table, and the window of pages if there is one. The index here is a window's rkey.
    windows: Vec<Arc<SharedMemory>>,
    data: Vec<u8>,
    proofs: Vec<u8>,
    /// Whether the READs of a doorbell are executed last first: they may be of any moments.
    pub(super) is_backwards: bool,
    /// The number of doorbells so far.
    pub(super) doorbells: usize,
    /// Called before each doorbell with its number.
    pub(super) meanwhile: Box<dyn FnMut(usize)>,
}

impl NearRnic {
    pub(super) fn new(
        frames: Arc<SharedMemory>,
        residency: Arc<SharedMemory>,
        files: Arc<SharedMemory>,
    ) -> Self {
        let data = vec![0; if cfg!(feature = "model-check") { 64 } else { DATA_LEN }];
        let proofs = vec![0; PROOFS_LEN];
        Self {
            windows: vec![frames, residency, files],
            data,
            proofs,
            is_backwards: false,
            doorbells: 0,
            meanwhile: Box::new(|_| ()),
        }
    }

    /// The same with a window of pages.
    #[cfg(test)]
    pub(super) fn with_pages(mut self, pages: Arc<SharedMemory>) -> Self {
        self.windows.push(pages);
        self
    }

    fn read_piece(&mut self, piece: &Piece) -> Option<()> {
        let target = match piece.to {
            Landing::Data(at) => &mut self.data[at..at + piece.len],
            Landing::Proof(at) => &mut self.proofs[at..at + piece.len],
        };
        let Remote::Memory { rkey, offset } = piece.remote else { return None };
        self.windows[rkey.0 as usize].read_as_rnic(usize::try_from(offset).ok()?, target);
        Some(())
    }

    /// The windows' rkeys and lengths.
    pub(super) fn windows(&self) -> RemoteWindows {
        let range = |place: usize| RemoteRange {
            rkey: Rkey(place as u32),
            first_address: 0,
            len: self.windows[place].len() as u64,
        };
        let pages = (self.windows.len() > 3).then(|| range(3));
        RemoteWindows { frames: range(0), residency: range(1), files: range(2), pages }
    }
}

impl ReadsPieces for NearRnic {
    fn read_pieces(&mut self, pieces: &[Piece]) -> Option<()> {
        (self.meanwhile)(self.doorbells);
        self.doorbells += 1;
        if self.is_backwards {
            return pieces.iter().rev().try_for_each(|piece| self.read_piece(piece));
        }
        pieces.iter().try_for_each(|piece| self.read_piece(piece))
    }

    fn data(&self, at: usize, out: &mut [u8]) {
        out.copy_from_slice(&self.data[at..at + out.len()]);
    }

    fn proof(&self, at: usize, out: &mut [u8]) {
        out.copy_from_slice(&self.proofs[at..at + out.len()]);
    }
}
