//! Initiator translation over a link that maps nothing: the target's tables and frames are READ.
//!
//! A *look* is two doorbells. The first brings the pages' bytes and the file's slot. When all of these have come, the second is posted: it brings their
//! *proofs*, the pages' residency entries and the slot's generation. The place of the bytes is known from the page's entry at an earlier look
//! ([`KnownEntries`], or the first of two looks). Three moments follow each other: the earlier look, the READ of the bytes, the READ of the entry. So
//! equal entries prove that the copy is that pool page, untorn. The layout came before all of them; if its generation is still there among the
//! proofs, the page was the file's all the while, and the length is one that the file had with that layout. READs of one doorbell prove nothing
//! about each other's moments: an answer to a READ may come late, after the READ was executed once more (`rdma/verbs`). A proof that is asked for
//! when the bytes are there is of a later moment, whichever of its executions is answered. A page whose entry was not known, or is another one, is
//! read once more by the entry that came; if that is another one again, the page is missing.
//!
//! **A window of pages** (`RemoteWindows::pages`), where the server has one: pool page N is at N pages, whatever frame it is in, or the magic page
//! is. The bytes are the page's if its entries prove it as above *and* no part of them is the magic pattern: the window follows the
//! entries some time later. Pages are READ there as a whole, and land as a whole: rdma_rxe brings the beginning of a page of such a window,
//! wherever in the page a READ begins.
//!
//! # Invariants
//! * Nothing READ is trusted: pool pages, frames and slots are checked against the windows' lengths before they are asked for.
//! * A look's pages are proven by its own slot. The file ends at the smallest of the sizes that were read.

use super::OneSided;
use super::initiator::NoAnswer;
use super::known_entries::KnownEntries;
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

/// The most pages of a look.
const PAGES: usize = 32;
/// The offsets in the proofs of the file's slot, of its generation among the proofs, and of the residency entries.
const SLOT: usize = 0;
const GENERATION: usize = FileTable::VIEW_LEN;
const ENTRIES: usize = 64;
const ENTRY: usize = 8;
const _: () =
    assert!(GENERATION + FileTable::GENERATION_LEN <= ENTRIES && ENTRIES + PAGES * ENTRY <= PROOFS_LEN);
const _: () = assert!(PAGES * PAGE_SIZE <= DATA_LEN);
// A doorbell has the slot and each page's bytes, or the generation and, at most, an entry for each page.
const _: () = assert!(PAGES < MAX_RUNS);

/// An RNIC that executes READs, and the memory where the bytes land.
pub(super) trait ReadsPieces {
    /// Reads all pieces with one doorbell, and waits for them: they may be of any moments of the call. `None`: the link or the target refused.
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
    /// Its residency entry at an earlier look.
    known: Option<ResidencyEntry>,
}

/// The result for a page.
enum Came {
    Filled,
    Missing,
    /// Nothing is proven; this is the page's entry by now.
    Elsewhere(ResidencyEntry),
}

/// The server's windows, and the pattern that stands in its window of pages for pages on SSD.
#[derive(Clone, Copy)]
pub(super) struct Shown<'r> {
    pub(super) windows: &'r RemoteWindows,
    pub(super) magic: &'r MagicPattern,
    /// The server's.
    pub(super) epoch: u64,
    /// Counts the pages that came through that window.
    pub(super) counted: &'r SpreadCount,
}

/// Reads `[offset, offset + out.len())` of the file in `slot` with this layout. `None`: the link or the target refused, so fetch everything.
pub(super) fn read(
    rnic: &mut impl ReadsPieces,
    shown: Shown<'_>,
    known: &KnownEntries,
    slot: FileSlot,
    layout: &CachedLayout,
    offset: u64,
    out: &mut [u8],
) -> Result<Option<OneSided>, NoAnswer> {
    let slot = u64::from(slot.0) * FILE_SLOT_LEN as u64;
    if !shown.windows.files.contains(slot, FILE_SLOT_LEN as u64) {
        return Err(NoAnswer::SlotGone);
    }
    let mut reading = Reading { rnic, shown, known, slot, generation: layout.generation() };
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
                        wanted.push(Wanted { index, part: *part, pool, known: known.get(shown.epoch, pool) });
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
    known: &'r KnownEntries,
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

    /// Where the page's bytes are by this entry: the window, and the offset of the page there. `None`: on SSD, or being changed.
    fn place(&self, page: PoolPage, entry: ResidencyEntry) -> Option<(RemoteRange, u64)> {
        let RemoteWindows { frames, pages, .. } = *self.shown.windows;
        if !entry.is_resident() || entry.is_changing() {
            return None;
        }
        let (window, number) = match pages {
            Some(pages) => (pages, page.0),
            None => (frames, u64::from(entry.frame().0)),
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
            let (bytes, proofs) = self.pieces(&wanted);
            // The proofs are posted when the bytes have come, and not before.
            if self.rnic.read_pieces(&bytes).is_none() || self.rnic.read_pieces(&proofs).is_none() {
                return Ok(None);
            }
            size = size.min(self.view()?.size);
            let mut elsewhere = Vec::new();
            for (place, mut page) in wanted.into_iter().enumerate() {
                match self.look(place, &page, out) {
                    Came::Filled => {}
                    Came::Elsewhere(entry) if attempt == 0 => {
                        page.known = Some(entry);
                        elsewhere.push(page);
                    }
                    Came::Missing | Came::Elsewhere(_) => missing.push(page.index),
                }
            }
            wanted = elsewhere;
        }
        Ok(Some(size))
    }

    /// The pieces to READ for these pages: the bytes with the slot, and their proofs.
    fn pieces(&self, wanted: &[Wanted]) -> (Vec<Piece>, Vec<Piece>) {
        let RemoteWindows { residency, files, pages, .. } = *self.shown.windows;
        let piece = |window: RemoteRange, offset: u64, len: usize, to: Landing| Piece {
            remote: window.at(offset),
            len,
            to,
        };
        let bytes = wanted.iter().enumerate().filter_map(|(place, page)| {
            let (window, at) = self.place(page.pool, page.known?)?;
            let (from, len) = match pages {
                Some(_) => (0, PAGE_SIZE),
                None => (page.part.offset_in_page, page.part.len),
            };
            Some(piece(window, at + from as u64, len, Landing::Data(place * PAGE_SIZE + from)))
        });
        let slot = |to: usize, len: usize| piece(files, self.slot, len, Landing::Proof(to));
        let mut pieces = vec![slot(SLOT, FileTable::VIEW_LEN)];
        pieces.extend(bytes);
        let mut proofs = vec![slot(GENERATION, FileTable::GENERATION_LEN)];
        let mut place = 0;
        // Neighbours in the pool are neighbours in the table.
        for run in wanted.chunk_by(|before, after| before.pool.0 + 1 == after.pool.0) {
            let to = Landing::Proof(ENTRIES + place * ENTRY);
            place += run.len();
            proofs.push(piece(residency, run[0].pool.0 * ENTRY as u64, run.len() * ENTRY, to));
        }
        (pieces, proofs)
    }

    /// The slot, if it was that of the layout from before its READ to the proof's.
    fn view(&self) -> Result<FileSlotView, NoAnswer> {
        let mut bytes = [0; FileTable::VIEW_LEN];
        self.rnic.proof(SLOT, &mut bytes);
        let view = FileTable::view_of(&bytes);
        let mut behind = [0; FileTable::GENERATION_LEN];
        self.rnic.proof(GENERATION, &mut behind);
        match view.generation {
            0 => Err(NoAnswer::SlotGone),
            generation if generation != self.generation => Err(NoAnswer::LayoutStale),
            _ if behind != bytes[..FileTable::GENERATION_LEN] => Err(NoAnswer::LayoutStale),
            _ => Ok(view),
        }
    }

    /// Checks what came for the page at this place among the wanted ones.
    fn look(&self, place: usize, page: &Wanted, out: &mut [u8]) -> Came {
        let mut bytes = [0; ENTRY];
        self.rnic.proof(ENTRIES + place * ENTRY, &mut bytes);
        let now = ResidencyTable::entry_of(bytes);
        self.known.note(self.shown.epoch, page.pool, now);
        if self.place(page.pool, now).is_none() {
            return Came::Missing;
        }
        if !page.known.is_some_and(|known| known.validates(now)) {
            return Came::Elsewhere(now);
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
