//! From a request to operations, without side effects.
//!
//! A request is a range of the pool and a sequence of memory. It is cut where a data file ends. Inside a file, contiguous memory becomes a plain or
//! fixed transfer, and scattered memory one vectored transfer.
//!
//! # Invariants
//! * The pieces cover the request's bytes in order, without gaps.
//! * Every address lies in the request's own buffer, or in the frames' memory.
//! * A fixed piece is within one registered piece.

use crate::pool::data_files::DataFiles;
use crate::pool::disk::{IoBuffer, IoRequest};
use cuttlefs_common::ids::{PAGE_SIZE, PAGE_SIZE_U64};
use cuttlefs_common::memory::SharedMemory;
use std::collections::VecDeque;
use std::io;

/// Most vectors of one transfer: the kernel's `UIO_MAXIOV`.
const MOST_VECTORS: usize = 1024;
/// Most bytes of one transfer. The kernel's limit is 2 GiB less a page (`MAX_RW_COUNT`).
const MOST_BYTES: usize = 1 << 30;

/// One range of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Vector {
    /// First address.
    pub(super) address: usize,
    /// Bytes.
    pub(super) len: usize,
}

/// One transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Index of the data file.
    pub(super) file: usize,
    /// The offset in the file.
    pub(super) file_offset: u64,
    /// The memory, in order.
    pub(super) vectors: VecDeque<Vector>,
    /// The index of the registered piece with this memory, if it is registered.
    pub(super) fixed: Option<u16>,
}

/// Cuts a request into transfers. `registered_bytes` is the size of the registered pieces of the frames' memory.
pub(super) fn plan(
    request: &IoRequest,
    files: &DataFiles,
    frames: &SharedMemory,
    registered_bytes: Option<usize>,
) -> io::Result<Vec<Piece>> {
    let refuse = |why: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, why.to_owned()));
    let len = super::len_bytes(&request.buffer);
    if len == 0 || !request.offset.is_multiple_of(PAGE_SIZE_U64) || !len.is_multiple_of(PAGE_SIZE) {
        return refuse("an IO is whole pages");
    }
    if !files.holds(request.offset, len) {
        return refuse("the IO reaches past the pool's end");
    }
    let mut memory = match &request.buffer {
        IoBuffer::Owned(buffer) => {
            VecDeque::from([Vector { address: buffer.base_address().as_ptr() as usize, len }])
        }
        IoBuffer::Frames(indices) => {
            let base = frames.base_address().as_ptr() as usize;
            let mut runs: VecDeque<Vector> = VecDeque::new();
            for index in indices {
                let offset = index.0 as usize * PAGE_SIZE;
                if !frames.contains(offset as u64, PAGE_SIZE_U64) {
                    return refuse("the IO names a frame that is not there");
                }
                let starts_piece = registered_bytes.is_some_and(|bytes| offset.is_multiple_of(bytes));
                match runs.back_mut() {
                    Some(run) if run.address + run.len == base + offset && !starts_piece => {
                        run.len += PAGE_SIZE;
                    }
                    _ => runs.push_back(Vector { address: base + offset, len: PAGE_SIZE }),
                }
            }
            runs
        }
    };
    let is_frames = matches!(request.buffer, IoBuffer::Frames(_));
    let fixed_index = |vector: &Vector| {
        let bytes = registered_bytes.filter(|_| is_frames)?;
        u16::try_from((vector.address - frames.base_address().as_ptr() as usize) / bytes).ok()
    };

    let mut pieces = Vec::new();
    let mut offset = request.offset;
    while !memory.is_empty() {
        let Some(place) = files.locate(offset) else {
            return refuse("the IO reaches past the pool's end");
        };
        let room = usize::try_from(place.contiguous_bytes).unwrap_or(usize::MAX).min(MOST_BYTES);
        let vectors = take_front(&mut memory, room);
        let len: usize = vectors.iter().map(|vector| vector.len).sum();
        let fixed = match vectors.len() {
            1 => fixed_index(&vectors[0]),
            _ => None,
        };
        pieces.push(Piece { file: place.file, file_offset: place.file_offset, vectors, fixed });
        offset += len as u64;
    }
    Ok(pieces)
}

/// Takes up to `room` bytes and `MOST_VECTORS` vectors from the front.
fn take_front(memory: &mut VecDeque<Vector>, mut room: usize) -> VecDeque<Vector> {
    let mut taken = VecDeque::new();
    while room > 0
        && taken.len() < MOST_VECTORS
        && let Some(front) = memory.front_mut()
    {
        let len = front.len.min(room);
        taken.push_back(Vector { address: front.address, len });
        room -= len;
        front.address += len;
        front.len -= len;
        if front.len == 0 {
            memory.pop_front();
        }
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::aligned_buf::AlignedBuf;
    use crate::pool::data_files::DATA_START;
    use crate::pool::disk::IoKind;
    use cuttlefs_common::ids::FrameIndex;
    use std::path::PathBuf;

    fn files(pages: &[u64]) -> DataFiles {
        let mut files = DataFiles::new();
        for &pages in pages {
            let file = tempfile::tempfile().expect("a temporary file");
            files.push(PathBuf::from("x"), file, pages, false);
        }
        files
    }

    fn request(page: u64, frames: &[u32]) -> IoRequest {
        let frames = frames.iter().map(|&index| FrameIndex(index)).collect();
        IoRequest { kind: IoKind::Read, offset: page * PAGE_SIZE_U64, buffer: IoBuffer::Frames(frames) }
    }

    /// The file, the page in it, frame and pages of each vector, and the registered piece.
    type Shape = (usize, u64, Vec<(usize, usize)>, Option<u16>);

    fn shape(pieces: &[Piece], base: usize) -> Vec<Shape> {
        let vector = |v: &Vector| ((v.address - base) / PAGE_SIZE, v.len / PAGE_SIZE);
        pieces
            .iter()
            .map(|piece| {
                let page = (piece.file_offset - DATA_START) / PAGE_SIZE_U64;
                (piece.file, page, piece.vectors.iter().map(vector).collect(), piece.fixed)
            })
            .collect()
    }

    #[test]
    fn neighbours_merge_files_and_registered_pieces_cut() {
        let frames = SharedMemory::new("frames", 64 * PAGE_SIZE).expect("memfd");
        let base = frames.base_address().as_ptr() as usize;
        let files = files(&[4, 60]);
        let registered = Some(16 * PAGE_SIZE);
        let plan = |page, list: &[u32], registered| {
            plan(&request(page, list), &files, &frames, registered).map(|pieces| shape(&pieces, base))
        };
        assert_eq!(plan(8, &[5, 6, 7], registered).ok(), Some(vec![(1, 4, vec![(5, 3)], Some(0))]));
        assert_eq!(plan(8, &[5, 6, 7], None).ok(), Some(vec![(1, 4, vec![(5, 3)], None)]));
        assert_eq!(
            plan(8, &[40, 39, 41, 42], registered).ok(),
            Some(vec![(1, 4, vec![(40, 1), (39, 1), (41, 2)], None)])
        );
        // A request across two data files.
        assert_eq!(
            plan(2, &[20, 21, 22, 23, 24], registered).ok(),
            Some(vec![(0, 2, vec![(20, 2)], Some(1)), (1, 0, vec![(22, 3)], Some(1))])
        );
        // A request across two registered pieces: neither has all of it, so the transfer is vectored.
        assert_eq!(
            plan(8, &[14, 15, 16, 17], registered).ok(),
            Some(vec![(1, 4, vec![(14, 2), (16, 2)], None)])
        );
        for (page, list) in [(63, &[3, 4][..]), (0, &[64]), (0, &[]), (u64::MAX / PAGE_SIZE_U64, &[3, 3])] {
            assert!(plan(page, list, registered).is_err());
        }
    }

    #[test]
    fn long_scattered_requests_keep_within_the_kernels_vectors() {
        let frames = SharedMemory::new("frames", 4096 * PAGE_SIZE).expect("memfd");
        let files = files(&[4096]);
        let every_other: Vec<u32> = (0..1500).map(|index| index * 2).collect();
        let pieces = plan(&request(0, &every_other), &files, &frames, None).expect("in range");
        assert_eq!(pieces.len(), 2);
        assert_eq!(pieces[0].vectors.len(), MOST_VECTORS);
        assert_eq!(pieces[1].file_offset, DATA_START + (MOST_VECTORS * PAGE_SIZE) as u64);
        assert_eq!(pieces[1].vectors.len(), 1500 - MOST_VECTORS);
    }

    #[test]
    fn a_bounce_buffer_is_one_vector_a_file() {
        let frames = SharedMemory::new("frames", PAGE_SIZE).expect("memfd");
        let files = files(&[1, 1, 1]);
        let buffer = AlignedBuf::zeroed(3 * PAGE_SIZE);
        let base = buffer.base_address().as_ptr() as usize;
        let request = IoRequest { kind: IoKind::Write, offset: 0, buffer: IoBuffer::Owned(buffer) };
        let pieces = plan(&request, &files, &frames, Some(PAGE_SIZE)).expect("in range");
        assert_eq!(shape(&pieces, base), [0, 1, 2].map(|file| (file, 0, vec![(file, 1)], None)).to_vec());
        let misplaced = IoRequest { offset: 5, ..request };
        assert!(plan(&misplaced, &files, &frames, None).is_err());
    }
}
