//! Looks around: which pages of files are on SSD. It is what the page bitmap is over links where the target translates (TeRM section 4.2), for links
//! where this side READs the tables (`remote`): the residency entries of a file's pages, from its beginning to the end of the furthest read that did
//! not find all of its pages in frames. The control thread does it each period (`bitmap_pulls`).
//!
//! What is found is a hint: a page that was on SSD is fetched without a doorbell, whatever it is now, and the server answers a fetch rightly
//! wherever the page is. So a look may be old, and its words torn; that costs time.

use super::Reads;
use super::known_entries::{KnownEntries, PLACES};
use super::layout::CachedLayout;
use super::region::{CachedRegion, Pulled};
use super::remote::ReadsPieces;
use crate::session::{Session, SessionLane, Windows};
use crate::transport::{DATA_LEN, Landing, MAX_RUNS, Piece};
use cuttlefs_common::ids::PoolPage;
use cuttlefs_common::rdma::RemoteRange;
use cuttlefs_common::region::ResidencyTable;
use std::sync::Arc;

const ENTRY: usize = 8;
/// The most entries of one READ, and the most READs of a doorbell.
const PART: usize = 512;
const PARTS: usize = 32;
const _: () = assert!(PARTS <= MAX_RUNS && PARTS * PART * ENTRY <= DATA_LEN);

impl Reads {
    /// Looks at the pages of those files of which pages were missing since the last look: at as many as the table of known entries has places.
    pub(crate) fn look_around(
        &self,
        session: &Session,
        regions: &[Arc<CachedRegion>],
        lane: &mut SessionLane<'_>,
    ) -> Pulled {
        let mut looked = Pulled::default();
        let Some(attachment) = session.look() else { return looked };
        if !matches!(attachment.windows, Some(Windows::Remote)) {
            return looked;
        }
        let attached = &attachment.attached;
        let Some(windows) = lane.windows_in(attached.session) else { return looked };
        self.known_entries.begin_look();
        for region in regions {
            let Some(end_page) = region.read_since() else { continue };
            let room = PLACES - looked.bytes as usize / ENTRY;
            let around =
                Around { residency: windows.residency, epoch: attached.server_epoch, end_page, room };
            let of_file = region.with_layout(|layout| around.look(lane, &self.known_entries, layout));
            let of_file = of_file.unwrap_or_default();
            looked.reads += of_file.reads;
            looked.bytes += of_file.bytes;
        }
        looked
    }
}

/// What to look at.
struct Around {
    residency: RemoteRange,
    /// The server's.
    epoch: u64,
    /// The end of the pages of the file.
    end_page: u64,
    /// The most entries.
    room: usize,
}

impl Around {
    /// Notes which pages are in no frame.
    fn look(&self, rnic: &mut impl ReadsPieces, known: &KnownEntries, layout: &CachedLayout) -> Pulled {
        let mut looked = Pulled::default();
        for doorbell in self.parts(layout).chunks(PARTS) {
            let piece = |(place, &(first, len)): (usize, &(PoolPage, usize))| Piece {
                remote: self.residency.at(first.0 * ENTRY as u64),
                len: len * ENTRY,
                to: Landing::Data(place * PART * ENTRY),
            };
            let pieces: Vec<Piece> = doorbell.iter().enumerate().map(piece).collect();
            if rnic.read_pieces(&pieces).is_none() {
                return looked;
            }
            for (place, &(first, len)) in doorbell.iter().enumerate() {
                let mut entries = [0; PART * ENTRY];
                rnic.data(place * PART * ENTRY, &mut entries[..len * ENTRY]);
                let (entries, _) = entries[..len * ENTRY].as_chunks::<ENTRY>();
                for (page, entry) in (first.0..).map(PoolPage).zip(entries) {
                    let entry = ResidencyTable::entry_of(*entry);
                    if !entry.is_resident() {
                        known.note_away(self.epoch, page, entry);
                    }
                }
                looked.bytes += (len * ENTRY) as u64;
            }
            looked.reads += pieces.len() as u64;
        }
        looked
    }

    /// The pool pages to look at: first page and number of each READ. Nothing that the server told is trusted: pages beyond the table are left out.
    fn parts(&self, layout: &CachedLayout) -> Vec<(PoolPage, usize)> {
        let mut parts = Vec::new();
        let mut room = self.room as u64;
        for (first, len) in layout.written_before(self.end_page) {
            let len = len.min(room);
            let at = first.0.checked_mul(ENTRY as u64);
            if at.is_none_or(|at| !self.residency.contains(at, len * ENTRY as u64)) {
                continue;
            }
            room -= len;
            let pages = (first.0..first.0 + len).step_by(PART);
            parts
                .extend(pages.map(|page| (PoolPage(page), (first.0 + len - page).min(PART as u64) as usize)));
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::super::near_rnic::NearRnic;
    use super::*;
    use cuttlefs_common::ids::{FilePage, FrameIndex, PAGE_SIZE};
    use cuttlefs_common::memory::SharedMemory;
    use cuttlefs_common::region::{Extent, ExtentState, FileTable};
    use cuttlefs_common::rpc::Layout;

    const EPOCH: u64 = 3;

    /// Looks at the first `end_page` pages of a file, every third page of which is in a frame. Returns the cost, and which pool pages are away.
    fn look(extents: Vec<Extent>, end_page: u64, room: usize, doorbells: usize) -> (Pulled, Vec<u64>) {
        let residency = ResidencyTable::new(4096).expect("residency");
        for page in (0..4096).step_by(3) {
            residency.begin_change(PoolPage(page));
            residency.end_change(PoolPage(page), FrameIndex(4), false);
        }
        let frames = Arc::new(SharedMemory::new("frames", 8 * PAGE_SIZE).expect("frames"));
        let files = FileTable::new(4).expect("files");
        let mut rnic = NearRnic::new(frames, residency.memory().clone(), files.memory().clone());
        let known = KnownEntries::default();
        known.begin_look();
        let layout = CachedLayout::new(FilePage(0), Layout { generation: 7, extents, known_until: None });
        let around = Around { residency: rnic.windows().residency, epoch: EPOCH, end_page, room };
        let cost = around.look(&mut rnic, &known, &layout);
        assert_eq!(rnic.doorbells, doorbells);
        (cost, (0..4096).filter(|page| known.is_away(EPOCH, PoolPage(*page))).collect())
    }

    fn extent(file_page: u64, pool_page: u64, len_pages: u64, state: ExtentState) -> Extent {
        Extent { file_page: FilePage(file_page), pool_page: PoolPage(pool_page), len_pages, state }
    }

    #[test]
    fn pages_of_the_file_that_are_in_no_frame_are_noted() {
        let written = ExtentState::Written;
        let extents = vec![
            extent(0, 1000, 700, written),
            extent(700, 100, 50, ExtentState::Unwritten),
            extent(800, 200, 100, written),
        ];
        // Up to the middle of the last extent, and with room for less than the first.
        let in_frame = |page: &u64| page.is_multiple_of(3);
        let (cost, away) = look(extents.clone(), 850, PLACES, 1);
        let expected: Vec<u64> = (200..250).chain(1000..1700).filter(|page| !in_frame(page)).collect();
        assert_eq!((cost.reads, cost.bytes, away), (3, 750 * 8, expected));
        let (cost, away) = look(extents, 850, 600, 1);
        let expected: Vec<u64> = (1000..1600).filter(|page| !in_frame(page)).collect();
        assert_eq!((cost.reads, cost.bytes, away), (2, 600 * 8, expected));
    }

    #[test]
    fn a_file_in_many_pieces_takes_more_doorbells() {
        let extents = (0..100).map(|n| extent(n, 2 * n, 1, ExtentState::Written)).collect();
        let (cost, away) = look(extents, 100, PLACES, 4);
        assert_eq!((cost.reads, cost.bytes), (100, 800));
        assert_eq!(
            away,
            (0..100u64).map(|n| 2 * n).filter(|page| !page.is_multiple_of(3)).collect::<Vec<u64>>()
        );
    }

    #[test]
    fn pages_beyond_the_table_are_not_asked_for() {
        let (written, far) = (ExtentState::Written, u64::MAX / 4);
        let extents =
            vec![extent(0, far, 5, written), extent(5, 4090, 20, written), extent(30, 1, 1, written)];
        let (cost, away) = look(extents, 100, PLACES, 1);
        assert_eq!((cost.reads, away), (1, vec![1]));
    }
}
