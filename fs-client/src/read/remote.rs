//! Initiator translation over a link that maps nothing: the target's tables and frames are READ.
//!
//! A page goes through three steps, and no two of them are posted with one doorbell: the READ of its residency *entry*, which says where its bytes are;
//! the READ of the *bytes*; and the READ of its *proof*, the entry again. Each is posted when the one before has come, so they are of three moments, one
//! after the other, and equal entries prove that the copy is that pool page, untorn. The first step is spared where the entry of an earlier look is known
//! ([`KnownEntries`]): such a page takes two doorbells, another one three, or four if it is not where it was. A doorbell carries the next step of all
//! pages that are left, and the file's slot. The layout came before all of them; if its generation is still there with the proofs, the page was the
//! file's all the while. A length that is followed by that generation is one that the file had with that layout. The first step asks for no generation
//! behind it, and needs none: an entry is true of its pool page, whoever has the page.
//!
//! READs of one doorbell prove nothing about each other's moments: an answer to a READ may come late, after the READ was executed once more
//! (`rdma/verbs`). A proof that is asked for when the bytes are there is of a later moment, whichever of its executions is answered.
//!
//! A page that the last look around (`look_around`) found on SSD is missing without a READ of its own.
//!
//! A page whose proof is another entry is read once more by that one; if it is another one again, the page is missing.
//!
//! **A window of pages** (`RemoteWindows::pages`), where the server has one: pool page N is at N pages, whatever frame it is in, or the magic page
//! is. The bytes are the page's if its entries prove it as above *and* no part of them is the magic pattern: the window follows the
//! entries some time later. Pages are READ there as a whole, and land as a whole: rdma_rxe brings the beginning of a page of such a window,
//! wherever in the page a READ begins.
//!
//! # Invariants
//! * Nothing READ is trusted: pool pages, frames and slots are checked against the windows' lengths before they are asked for.
//! * Each doorbell's slot has the layout's generation. So each but the last one's length is proven by the next one's; the file ends at the smallest of them.

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

/// The most pages that are read together.
const PAGES: usize = 32;
/// How often a page's entry is READ at most.
const LOOKS: u8 = 2;
/// The offsets in the proofs of the file's slot, and of the residency entries: a page's is at its place among the pages that are read together.
const SLOT: usize = 0;
const ENTRIES: usize = 64;
const ENTRY: usize = 8;
const _: () = assert!(FileTable::VIEW_LEN <= ENTRIES && ENTRIES + PAGES * ENTRY <= PROOFS_LEN);
const _: () = assert!(PAGES * PAGE_SIZE <= DATA_LEN);
// A doorbell has the slot, and one piece at most for each page.
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

/// The next step of a page.
#[derive(Clone, Copy)]
enum Step {
    /// Its entry is not known, or by that one the page was not in a frame.
    Entry,
    /// Its bytes are where this entry says.
    Bytes(ResidencyEntry),
    /// Its bytes were READ by this entry.
    Proof(ResidencyEntry),
}

/// A page of the request that has a place in the pool.
struct Wanted {
    /// The page's number in the request.
    index: usize,
    part: PagePart,
    pool: PoolPage,
    step: Step,
    /// How often its entry was READ.
    looks: u8,
}

impl Wanted {
    /// Its place among the pages that are read together: where its entry and its bytes land.
    fn place(&self) -> usize {
        self.index % PAGES
    }
}

/// What a page's next step is, when what the last doorbell brought for it was looked at.
enum Came {
    Filled,
    Missing,
    Next(Step),
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

/// Reads `[offset, offset + out.len())` of the file in `slot` with this layout. `None`: the link or the target refused, or the last look around found
/// all pages on SSD; so fetch everything.
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
    let is_away = |part: &PagePart| {
        let extent = layout.find(part.page).ok().flatten();
        extent.is_some_and(|extent| {
            extent.state != ExtentState::Unwritten && reading.is_away(extent.pool_page_of(part.page))
        })
    };
    if parts.iter().all(is_away) {
        return Ok(None);
    }
    let mut valid_len = out.len();
    let mut missing = Vec::new();
    for (number, chunk) in parts.chunks(PAGES).enumerate() {
        let mut wanted = Vec::with_capacity(chunk.len());
        for (index, part) in (number * PAGES..).zip(chunk) {
            match layout.find(part.page)? {
                Some(extent) if extent.state != ExtentState::Unwritten => {
                    let pool = extent.pool_page_of(part.page);
                    if reading.covers(pool) && !reading.is_away(pool) {
                        let step = reading.first_step(pool);
                        wanted.push(Wanted { index, part: *part, pool, step, looks: 0 });
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

    /// Whether the page was on SSD when this mount looked around last: it is fetched without a look.
    fn is_away(&self, page: PoolPage) -> bool {
        self.known.is_away(self.shown.epoch, page)
    }

    /// By the entry of an earlier look.
    fn first_step(&self, page: PoolPage) -> Step {
        let known = self.known.get(self.shown.epoch, page);
        known.filter(|known| self.place(page, *known).is_some()).map_or(Step::Entry, Step::Bytes)
    }

    /// Reads pages into their places in `out`. Returns the smallest of the file's proven sizes.
    fn pages(
        &mut self,
        mut wanted: Vec<Wanted>,
        missing: &mut Vec<usize>,
        out: &mut [u8],
    ) -> Result<Option<u64>, NoAnswer> {
        let (mut size, mut unproven) = (u64::MAX, None);
        // Four doorbells at most: a page has two looks, and one more doorbell before each for its bytes.
        loop {
            // These READs are posted when those of the doorbell before have come, and not before.
            if self.rnic.read_pieces(&self.pieces(&wanted)).is_none() {
                return Ok(None);
            }
            let before = unproven.replace(self.view()?.size);
            size = size.min(before.unwrap_or(u64::MAX));
            wanted.retain_mut(|page| match self.came(page, out) {
                Came::Next(step) => {
                    page.step = step;
                    true
                }
                Came::Missing => {
                    missing.push(page.index);
                    false
                }
                Came::Filled => false,
            });
            if wanted.is_empty() && before.is_some() {
                return Ok(Some(size));
            }
        }
    }

    /// The pieces to READ for the next step of these pages, and the slot.
    fn pieces(&self, wanted: &[Wanted]) -> Vec<Piece> {
        let RemoteWindows { residency, files, pages, .. } = *self.shown.windows;
        let piece = |window: RemoteRange, offset: u64, len: usize, to: Landing| Piece {
            remote: window.at(offset),
            len,
            to,
        };
        let mut pieces = vec![piece(files, self.slot, FileTable::VIEW_LEN, Landing::Proof(SLOT))];
        pieces.extend(wanted.iter().filter_map(|page| {
            let Step::Bytes(entry) = page.step else { return None };
            let (window, at) = self.place(page.pool, entry)?;
            let (from, len) = match pages {
                Some(_) => (0, PAGE_SIZE),
                None => (page.part.offset_in_page, page.part.len),
            };
            Some(piece(window, at + from as u64, len, Landing::Data(page.place() * PAGE_SIZE + from)))
        }));
        let looked: Vec<&Wanted> =
            wanted.iter().filter(|page| !matches!(page.step, Step::Bytes(_))).collect();
        // Neighbours in the pool are neighbours in the table.
        let is_next = |before: &&Wanted, after: &&Wanted| {
            before.pool.0 + 1 == after.pool.0 && before.index + 1 == after.index
        };
        for run in looked.chunk_by(is_next) {
            let to = Landing::Proof(ENTRIES + run[0].place() * ENTRY);
            pieces.push(piece(residency, run[0].pool.0 * ENTRY as u64, run.len() * ENTRY, to));
        }
        pieces
    }

    /// The slot, if it is that of the layout.
    fn view(&self) -> Result<FileSlotView, NoAnswer> {
        let mut bytes = [0; FileTable::VIEW_LEN];
        self.rnic.proof(SLOT, &mut bytes);
        let view = FileTable::view_of(&bytes);
        match view.generation {
            0 => Err(NoAnswer::SlotGone),
            generation if generation != self.generation => Err(NoAnswer::LayoutStale),
            _ => Ok(view),
        }
    }

    /// Looks at what the last doorbell brought for a page.
    fn came(&self, page: &mut Wanted, out: &mut [u8]) -> Came {
        if let Step::Bytes(entry) = page.step {
            return Came::Next(Step::Proof(entry));
        }
        let mut bytes = [0; ENTRY];
        self.rnic.proof(ENTRIES + page.place() * ENTRY, &mut bytes);
        let now = ResidencyTable::entry_of(bytes);
        self.known.note(self.shown.epoch, page.pool, now);
        page.looks += 1;
        if self.place(page.pool, now).is_none() {
            return Came::Missing;
        }
        match page.step {
            Step::Proof(entry) if entry.validates(now) => self.fill(page, out),
            _ if page.looks < LOOKS => Came::Next(Step::Bytes(now)),
            _ => Came::Missing,
        }
    }

    /// Copies a page whose bytes are proven.
    fn fill(&self, page: &Wanted, out: &mut [u8]) -> Came {
        let at = page.place() * PAGE_SIZE;
        if self.shown.windows.pages.is_some() {
            let mut whole = [0; PAGE_SIZE];
            self.rnic.data(at, &mut whole);
            if self.shown.magic.is_in(&whole) {
                return Came::Missing;
            }
            self.shown.counted.add(1);
        }
        let part = &page.part;
        let target = &mut out[part.offset_in_request..part.offset_in_request + part.len];
        self.rnic.data(at + part.offset_in_page, target);
        Came::Filled
    }
}

#[cfg(test)]
mod tests;
