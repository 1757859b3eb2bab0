//! READs of windows in this process: for tests and the model checker.

use super::remote::ReadsPieces;
use crate::transport::{DATA_LEN, Landing, PROOFS_LEN, Piece, RemoteWindows};
use cuttlefs_common::ids::Rkey;
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::{Remote, RemoteRange};
use cuttlefs_common::sync::fence;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const WORD: usize = 8;

/// The order in which the READs of a doorbell are executed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum Order {
    /// As they are posted.
    #[default]
    Posted,
    /// Each by its words, and all words of all READs in the order with this number ([`arrange`]). An answer is of any moment since its doorbell: a READ
    /// waits, or it is executed twice and either execution is answered (`rdma/verbs`), even packet by packet. For whoever READs, that is another
    /// order of the words.
    Words(usize),
}

/// Puts the items into the order with this number: of n items there are n! orders, and the numbers from there on begin again.
fn arrange<T>(mut items: Vec<T>, mut number: usize) -> Vec<T> {
    let mut arranged = Vec::with_capacity(items.len());
    while !items.is_empty() {
        arranged.push(items.remove(number % items.len()));
        number /= items.len() + 1;
    }
    arranged
}

/// Executes READs of windows in this process.
pub(super) struct NearRnic {
    /// Frames, residency table, file table, and the window of pages if there is one. The index here is a window's rkey.
    windows: Vec<Arc<SharedMemory>>,
    data: Vec<u8>,
    proofs: Vec<u8>,
    pub(super) order: Order,
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
            order: Order::default(),
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

    /// Reads all pieces word by word. Loads have no order among each other, and the answers are complete at the end only.
    fn read_words(&mut self, pieces: &[Piece], order: usize) -> Option<()> {
        let words = pieces.iter().flat_map(|piece| (0..piece.len).step_by(WORD).map(move |at| (piece, at)));
        for (piece, at) in arrange(words.collect(), order) {
            let Remote::Memory { rkey, offset } = piece.remote else { return None };
            let word = self.windows[rkey.0 as usize].load_u64_relaxed(usize::try_from(offset).ok()? + at);
            let (landed, place) = match piece.to {
                Landing::Data(place) => (&mut self.data, place),
                Landing::Proof(place) => (&mut self.proofs, place),
            };
            landed[place + at..][..WORD].copy_from_slice(&word.to_ne_bytes());
        }
        fence(Ordering::Acquire);
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
        match self.order {
            Order::Posted => pieces.iter().try_for_each(|piece| self.read_piece(piece)),
            Order::Words(order) => self.read_words(pieces, order),
        }
    }

    fn data(&self, at: usize, out: &mut [u8]) {
        out.copy_from_slice(&self.data[at..at + out.len()]);
    }

    fn proof(&self, at: usize, out: &mut [u8]) {
        out.copy_from_slice(&self.proofs[at..at + out.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn each_number_is_an_order() {
        let orders: HashSet<Vec<usize>> = (0..24).map(|number| arrange((0..4).collect(), number)).collect();
        assert_eq!(orders.len(), 24);
        assert_eq!((arrange(vec![1, 2, 3], 0), arrange(vec![1, 2, 3], 23)), (vec![1, 2, 3], vec![3, 2, 1]));
    }
}
