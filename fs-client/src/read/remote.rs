//! Initiator translation over a link that maps nothing: the target's tables and frames are READ.
//!
//! One doorbell brings everything that a read of some pages needs, in this order: the file's slot, the pages' residency entries, their bytes,
//! the entries again, the slot again. READs of a queue pair see memory no older than earlier ones did, so the proof of a mapped read
//! (`initiator`) holds for this one: equal entries prove that the copy is that pool page, untorn; an equal generation proves that the page was
//! the file's all the while.
//!
//! The place of the bytes is known only from the entry that travels with them. The frame is guessed from the page's last known entry
//! ([`FrameGuesses`]). Pages with a wrong guess, or none, are read once more with the entries that came; a page whose entry is wrong again is
//! missing.
//!
//! **A window of pages** (`RemoteWindows::pages`), where the server has one, spares the guess: pool page N is at N pages, whatever frame it is in, or
//! the magic page is. The bytes are the page's if its entries prove it as above *and* no part of them is the magic pattern: the window follows the
//! entries some time later. Pages are READ there as a whole, and land as a whole: rdma_rxe brings the beginning of a page of such a window,
//! wherever in the page a READ begins. The last known entry only says whether the READ is worth it.
//!
//! # Invariants
//! * Nothing READ is trusted: pool pages, frames and slots are checked against the windows' lengths before they are asked for.
//! * A doorbell's pages are proven by its own slot. The file ends at the smallest of the sizes that were read: bytes before that were the
//!   file's at each look.

use super::OneSided;
use super::frame_guesses::FrameGuesses;
use super::initiator::NoAnswer;
use super::layout::CachedLayout;
use super::spread_count::SpreadCount;
use crate::session::SessionLane;
use crate::transport::{DATA_LEN, Landing, MAX_RUNS, PROOFS_LEN, Piece, RemoteWindows};
use cuttlefs_common::ids::{FileSlot, PAGE_SIZE, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::rdma::RemoteRange;
use cuttlefs_common::region::{
    ExtentState, FILE_SLOT_LEN, FileSlotView, FileTable, MagicPattern, PagePart, PageSet, ResidencyEntry,
    ResidencyTable, divide,
};

/// The most pages of a doorbell.
const PAGES: usize = 32;
/// The offsets in the proofs of the file's slot, which is READ first, and of its generation, which is READ last.
const SLOT_BEFORE: usize = 0;
const SLOT_AFTER: usize = FileTable::VIEW_LEN;
/// The offsets in the proofs of the residency entries that are READ before the bytes, and of those that are READ after them.
const ENTRIES_BEFORE: usize = 64;
const ENTRIES_AFTER: usize = ENTRIES_BEFORE + PAGES * ENTRY;
const ENTRY: usize = 8;
const _: () = assert!(ENTRIES_AFTER + PAGES * ENTRY <= PROOFS_LEN);
const _: () = assert!(PAGES * PAGE_SIZE <= DATA_LEN);
// Each page may need an entry far from the others, twice, and its bytes.
const _: () = assert!(2 + 3 * PAGES <= MAX_RUNS);

/// An RNIC that executes READs, and the memory where the bytes land.
pub(super) trait ReadsPieces {
    /// Reads all pieces, in order, with one doorbell. `None`: the link or the target refused.
    fn read_pieces(&mut self, pieces: &[Piece]) -> Option<()>;
    /// Copies bytes that landed among the data.
    fn data(&self, at: usize, out: &mut [u8]);
    /// Copies bytes that landed among the proofs.
    fn proof(&self, at: usize, out: &mut [u8]);
}

impl ReadsPieces for SessionLane<'_> {
    fn read_pieces(&mut self, pieces: &[Piece]) -> Option<()> {
        let lens = SessionLane::read_pieces(self, pieces)?;
        lens.iter().zip(pieces).all(|(got, piece)| *got == piece.len).then_some(())
    }

    fn data(&self, at: usize, out: &mut [u8]) {
        SessionLane::data(self).read(at, out);
    }

    fn proof(&self, at: usize, out: &mut [u8]) {
        SessionLane::data(self).proof(at, out);
    }
}

/// A page of the request that has a place in the pool.
struct Wanted {
    /// The page's number in the request.
    index: usize,
    part: PagePart,
    pool: PoolPage,
    /// A guess of its residency entry.
    guess: Option<ResidencyEntry>,
}

/// The result for a page.
enum Came {
    Filled,
    Missing,
    /// The page is in another frame than was guessed; this is its entry.
    Elsewhere(ResidencyEntry),
}

/// The server's windows, and the pattern that stands in its window of pages for pages on SSD.
#[derive(Clone, Copy)]
pub(super) struct Shown<'r> {
    pub(super) windows: &'r RemoteWindows,
    pub(super) magic: &'r MagicPattern,
    /// Counts the pages that came through that window.
    pub(super) counted: &'r SpreadCount,
}

/// Reads `[offset, offset + out.len())` of the file in `slot` with this layout. `None`: the link or the target refused, so fetch everything.
pub(super) fn read(
    rnic: &mut impl ReadsPieces,
    shown: Shown<'_>,
    guesses: &FrameGuesses,
    slot: FileSlot,
    layout: &CachedLayout,
    offset: u64,
    out: &mut [u8],
) -> Result<Option<OneSided>, NoAnswer> {
    let slot = u64::from(slot.0) * FILE_SLOT_LEN as u64;
    if !shown.windows.files.contains(slot, FILE_SLOT_LEN as u64) {
        return Err(NoAnswer::SlotGone);
    }
    let mut reading = Reading { rnic, shown, guesses, slot, generation: layout.generation() };
    let parts: Vec<PagePart> = divide(offset, out.len()).collect();
    let mut valid_len = out.len();
    let mut missing = Vec::new();
    for (number, chunk) in parts.chunks(PAGES).enumerate() {
        let mut wanted = Vec::with_capacity(chunk.len());
        for (index, part) in (number * PAGES..).zip(chunk) {
            match layout.find(part.page)? {
                Some(extent) if extent.state != ExtentState::Unwritten => {
                    let pool = extent.pool_page_of(part.page);
                    if reading.covers(pool) {
                        wanted.push(Wanted { index, part: *part, pool, guess: guesses.get(pool) });
                    } else {
                        missing.push(index);
                    }
                }
                _ => out[part.offset_in_request..part.offset_in_request + part.len].fill(0),
            }
        }
        let Some(size) = reading.pages(wanted, &mut missing, out)? else {
            return Ok(None);
        };
        let end = chunk.last().map_or(0, |part| part.offset_in_request + part.len);
        let before_end = size.saturating_sub(offset).min(out.len() as u64) as usize;
        if before_end < end {
            valid_len = before_end;
            break;
        }
    }
    let mut not_there = PageSet::none_of_range(offset, valid_len);
    let pages = divide(offset, valid_len).len();
    missing.into_iter().filter(|index| *index < pages).for_each(|index| not_there.insert(index));
    Ok(Some(OneSided { valid_len, missing: not_there }))
}

/// A read under way.
struct Reading<'r, R> {
    rnic: &'r mut R,
    shown: Shown<'r>,
    guesses: &'r FrameGuesses,
    /// The offset of the file's slot in the file table.
    slot: u64,
    /// The layout's generation.
    generation: u64,
}

impl<R: ReadsPieces> Reading<'_, R> {
    fn covers(&self, page: PoolPage) -> bool {
        let RemoteWindows { residency, pages, .. } = self.shown.windows;
        page.0.checked_mul(ENTRY as u64).is_some_and(|at| residency.contains(at, ENTRY as u64))
            && pages.is_none_or(|pages| self.page_in(pages, page.0).is_some())
    }

    /// The offset of this page of a window, if the window has it.
    fn page_in(&self, window: RemoteRange, number: u64) -> Option<u64> {
        let at = number.checked_mul(PAGE_SIZE_U64)?;
        window.contains(at, PAGE_SIZE_U64).then_some(at)
    }

    /// Where the page's bytes are by this entry, or if none is known: the window, and the offset of the page there. `None`: on SSD, or not known.
    fn place(&self, page: PoolPage, entry: Option<ResidencyEntry>) -> Option<(RemoteRange, u64)> {
        let RemoteWindows { frames, pages, .. } = *self.shown.windows;
        if entry.is_some_and(|entry| !entry.is_resident()) {
            return None;
        }
        let (window, number) = match pages {
            Some(pages) => (pages, page.0),
            None => (frames, u64::from(entry?.frame().0)),
        };
        Some((window, self.page_in(window, number)?))
    }

    /// Reads pages into their places in `out`. Returns the smallest size of the file among the looks.
    fn pages(
        &mut self,
        mut wanted: Vec<Wanted>,
        missing: &mut Vec<usize>,
        out: &mut [u8],
    ) -> Result<Option<u64>, NoAnswer> {
        let mut size = u64::MAX;
        for attempt in 0..2 {
            if attempt > 0 && wanted.is_empty() {
                break;
            }
            if self.rnic.read_pieces(&self.pieces(&wanted)).is_none() {
                return Ok(None);
            }
            size = size.min(self.view()?.size);
            let mut elsewhere = Vec::new();
            for (place, mut page) in wanted.into_iter().enumerate() {
                match self.look(place, &page, out) {
                    Came::Filled => {}
                    Came::Elsewhere(entry) if attempt == 0 => {
                        page.guess = Some(entry);
                        elsewhere.push(page);
                    }
                    Came::Missing | Came::Elsewhere(_) => missing.push(page.index),
                }
            }
            wanted = elsewhere;
        }
        Ok(Some(size))
    }

    /// The pieces to READ for these pages.
    fn pieces(&self, wanted: &[Wanted]) -> Vec<Piece> {
        let RemoteWindows { residency, files, pages, .. } = *self.shown.windows;
        let piece = |window: RemoteRange, offset: u64, len: usize, to: Landing| Piece {
            remote: window.at(offset),
            len,
            to,
        };
        let entries = |at: usize| {
            // Neighbours in the pool are neighbours in the table.
            let runs = wanted.chunk_by(|before, after| before.pool.0 + 1 == after.pool.0);
            let mut place = 0;
            runs.map(move |run| {
                let to = Landing::Proof(at + place * ENTRY);
                place += run.len();
                piece(residency, run[0].pool.0 * ENTRY as u64, run.len() * ENTRY, to)
            })
        };
        let bytes = wanted.iter().enumerate().filter_map(|(place, page)| {
            let (window, at) = self.place(page.pool, page.guess)?;
            let (from, len) = match pages {
                Some(_) => (0, PAGE_SIZE),
                None => (page.part.offset_in_page, page.part.len),
            };
            Some(piece(window, at + from as u64, len, Landing::Data(place * PAGE_SIZE + from)))
        });
        let before = piece(files, self.slot, FileTable::VIEW_LEN, Landing::Proof(SLOT_BEFORE));
        let after = piece(files, self.slot, FileTable::GENERATION_LEN, Landing::Proof(SLOT_AFTER));
        let mut pieces = vec![before];
        pieces.extend(entries(ENTRIES_BEFORE));
        pieces.extend(bytes);
        pieces.extend(entries(ENTRIES_AFTER));
        pieces.push(after);
        pieces
    }

    /// The slot, if it did not change during the doorbell.
    fn view(&self) -> Result<FileSlotView, NoAnswer> {
        let mut bytes = [0; FileTable::VIEW_LEN];
        self.rnic.proof(SLOT_BEFORE, &mut bytes);
        let view = FileTable::view_of(&bytes);
        let mut after = [0; FileTable::GENERATION_LEN];
        self.rnic.proof(SLOT_AFTER, &mut after);
        if view.generation == 0 {
            return Err(NoAnswer::SlotGone);
        }
        if view.generation != self.generation || after != bytes[..FileTable::GENERATION_LEN] {
            return Err(NoAnswer::LayoutStale);
        }
        Ok(view)
    }

    /// Checks what came for the page at this place among the wanted ones.
    fn look(&self, place: usize, page: &Wanted, out: &mut [u8]) -> Came {
        let entry = |at: usize| {
            let mut bytes = [0; ENTRY];
            self.rnic.proof(at + place * ENTRY, &mut bytes);
            ResidencyTable::entry_of(bytes)
        };
        let (before, after) = (entry(ENTRIES_BEFORE), entry(ENTRIES_AFTER));
        self.guesses.note(page.pool, after);
        let right = self.place(page.pool, Some(before));
        if !before.validates(after) || right.is_none() {
            return Came::Missing;
        }
        // The bytes were read where the guess said.
        if self.place(page.pool, page.guess) != right {
            return Came::Elsewhere(before);
        }
        if self.shown.windows.pages.is_some() {
            let mut whole = [0; PAGE_SIZE];
            self.rnic.data(place * PAGE_SIZE, &mut whole);
            if self.shown.magic.is_in(&whole) {
                return Came::Missing;
            }
            self.shown.counted.add(1);
        }
        let part = &page.part;
        let target = &mut out[part.offset_in_request..part.offset_in_request + part.len];
        self.rnic.data(place * PAGE_SIZE + part.offset_in_page, target);
        Came::Filled
    }
}

#[cfg(test)]
mod tests;
