//! READs and WRITEs over shared memory: copies between the peer's memory, mapped here, and the local ranges of a request.
//!
//! One local range is one copy. Of several each is copied by itself, and what a READ and a WRITE promise of aligned words holds for the whole, wherever the
//! ranges are cut: short READs go through a buffer, and the last word of a WRITE is gathered.

use super::regions::PeerMemory;
use crate::memory::{SharedMemory, before_last_word};
use crate::rdma::soft::region::{Held, Piece};

impl PeerMemory {
    fn read(&self, offset: u64, out: &mut [u8]) -> bool {
        match self {
            Self::Whole(memory) => {
                memory.read_as_rnic(offset as usize, out);
                true
            }
            Self::Paged(memory, _) => memory.read(offset, out),
        }
    }

    #[inline]
    fn copy_piece_out(&self, offset: u64, to: &Piece<'_>, len: usize) -> bool {
        match self {
            Self::Whole(memory) => {
                memory.copy_as_rnic(offset as usize, to.memory, to.offset, len);
                true
            }
            Self::Paged(memory, _) => memory.copy_out(offset, to.memory, to.offset, len),
        }
    }

    #[inline]
    fn copy_piece_in(&self, offset: u64, from: &Piece<'_>, len: usize) -> bool {
        match self {
            Self::Whole(memory) => {
                from.memory.copy_to_word_last(from.offset, memory, offset as usize, len);
                true
            }
            Self::Paged(memory, slot) => memory.copy_in(*slot, offset, from.memory, from.offset, len),
        }
    }

    /// A READ of as many bytes as the local ranges have, from an offset on that was checked. Returns whether all pages were there.
    #[inline]
    pub(super) fn copy_out(&self, offset: u64, to: &Held<'_>) -> bool {
        if let Some(only) = to.only() {
            return self.copy_piece_out(offset, only, only.len);
        }
        self.scatter(offset, to)
    }

    #[cold]
    fn scatter(&self, offset: u64, to: &Held<'_>) -> bool {
        let len = to.len();
        if len <= SharedMemory::WHOLE_WORDS_MAX {
            let mut bytes = [0; SharedMemory::WHOLE_WORDS_MAX];
            let all_there = self.read(offset, &mut bytes[..len]);
            to.write(&bytes[..len]);
            return all_there;
        }
        let (mut at, mut all_there) = (offset, true);
        for piece in to.pieces() {
            all_there &= self.copy_piece_out(at, piece, piece.len);
            at += piece.len as u64;
        }
        all_there
    }

    /// A WRITE of the local ranges to an offset that was checked. Returns whether all pages were there.
    #[inline]
    pub(super) fn copy_in(&self, offset: u64, from: &Held<'_>) -> bool {
        if let Some(only) = from.only() {
            return self.copy_piece_in(offset, only, only.len);
        }
        self.gather(offset, from)
    }

    #[cold]
    fn gather(&self, offset: u64, from: &Held<'_>) -> bool {
        let first = before_last_word(offset, from.len());
        let (mut done, mut all_there) = (0, true);
        for piece in from.pieces() {
            let part = piece.len.min(first - done);
            all_there &= self.copy_piece_in(offset + done as u64, piece, part);
            done += part;
        }
        if first < from.len() {
            let mut word = [0; 8];
            from.read_from(first, &mut word);
            let place = offset + first as u64;
            match self {
                Self::Whole(memory) => memory.write_word_last(place as usize, &word),
                Self::Paged(memory, slot) => all_there &= memory.write_in(*slot, place, &word),
            }
        }
        all_there
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_cuts_copy_the_same_bytes() {
        let source: Vec<u8> = (0..2000).map(|index| (index % 251) as u8).collect();
        let here = SharedMemory::new("here", 65536).expect("memory");
        for (len, offset) in [(1, 0), (8, 8), (24, 0), (100, 3), (512, 64), (520, 64), (2000, 5)] {
            for cuts in [[0, 0], [1, 3], [4, 12], [8, 8], [333, 7], [2000, 0]] {
                let (mut sizes, mut left) = (Vec::new(), len);
                for cut in cuts.into_iter().chain([len]) {
                    let size = usize::min(cut, left);
                    sizes.push(size);
                    left -= size;
                }
                // Each piece in a place of its own, one a page.
                let pieces = |at: usize| {
                    let each = sizes.iter().enumerate().filter(|(_, size)| **size > 0);
                    let places: Vec<_> = each.map(|(index, size)| (at + index * 4096 + 5, *size)).collect();
                    Held::of(&here, &places)
                };
                let far = PeerMemory::Whole(SharedMemory::new("far", 4096).expect("memory"));
                let from = pieces(0);
                from.write(&source[..len]);
                assert!(far.copy_in(offset, &from));
                let mut there = vec![0; len];
                assert!(far.read(offset, &mut there));
                assert!(there == source[..len], "{len} bytes at {offset}, cut {cuts:?}");
                let to = pieces(32768);
                assert!(far.copy_out(offset, &to));
                to.read(&mut there);
                assert!(there == source[..len], "{len} bytes at {offset}, cut {cuts:?}");
                let PeerMemory::Whole(far) = &far else { unreachable!("it was made so") };
                let mut around = [0; 2];
                far.read(offset as usize + len, &mut around);
                assert_eq!(around, [0; 2]);
            }
        }
    }
}
