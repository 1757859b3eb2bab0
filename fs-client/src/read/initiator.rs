//! Initiator translation over a link that maps the target's tables: plain loads from the target's tables and frames.
//!
//! Order of loads: slot (generation, size), then for each page: residency entry, frame bytes, residency entry
//! again; last the slot's generation again. Equal entries prove that the copy is that pool page, untorn; an equal
//! generation proves that every page was mapped to this file all the while.
//!
//! Nothing read is trusted: page numbers, frame numbers and sizes are checked against the windows.

use super::layout::CachedLayout;
use super::{Destination, OneSided};
use crate::session::MappedWindows;
use cuttlefs_common::ids::{FileSlot, PAGE_SIZE};
use cuttlefs_common::region::{ExtentState, PageSet, divide};

/// Why a read by the tables gave no answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NoAnswer {
    /// The slot is not this file's, or not any more: ask by RPC.
    SlotGone,
    /// The cached layout is of another generation, or does not reach far enough: request it again.
    LayoutStale,
}

/// Reads what `out` wants from `offset` on, of the file in `slot`, with this layout.
pub(super) fn read(
    windows: &MappedWindows,
    slot: FileSlot,
    layout: &CachedLayout,
    offset: u64,
    out: &mut (impl Destination + ?Sized),
) -> Result<OneSided, NoAnswer> {
    if slot.0 >= windows.files.slots() {
        return Err(NoAnswer::SlotGone);
    }
    let view = windows.files.load(slot);
    if view.generation == 0 {
        return Err(NoAnswer::SlotGone);
    }
    if view.generation != layout.generation() {
        return Err(NoAnswer::LayoutStale);
    }
    let valid_len = view.size.saturating_sub(offset).min(out.wanted() as u64) as usize;
    let mut missing = PageSet::none_of_range(offset, valid_len);
    for (index, part) in divide(offset, valid_len).enumerate() {
        let Some(extent) = layout.find(part.page)? else {
            out.zero(part.offset_in_request, part.len);
            continue;
        };
        if extent.state == ExtentState::Unwritten {
            out.zero(part.offset_in_request, part.len);
            continue;
        }
        let pool_page = extent.pool_page_of(part.page);
        if !windows.residency.covers(pool_page) {
            missing.insert(index);
            continue;
        }
        let before = windows.residency.load(pool_page);
        let at = u64::from(before.frame().0) * PAGE_SIZE as u64 + part.offset_in_page as u64;
        if !before.is_resident() || before.is_changing() || !windows.frames.contains(at, part.len as u64) {
            missing.insert(index);
            continue;
        }
        out.copy(&windows.frames, at as usize, part.offset_in_request, part.len);
        if !before.validates(windows.residency.load_after_copy(pool_page)) {
            missing.insert(index);
        }
    }
    if windows.files.generation_after_copy(slot) != view.generation {
        return Err(NoAnswer::LayoutStale);
    }
    Ok(OneSided { valid_len, missing })
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuttlefs_common::ids::{FilePage, FrameIndex, InodeNo, PoolPage};
    use cuttlefs_common::memory::SharedMemory;
    use cuttlefs_common::region::{Extent, FileTable, ResidencyTable};
    use cuttlefs_common::rpc::Layout;
    use std::sync::Arc;

    const SLOT: FileSlot = FileSlot(1);

    fn windows() -> MappedWindows {
        let frames = Arc::new(SharedMemory::new("frames", 8 * PAGE_SIZE).expect("frames"));
        frames.write(4 * PAGE_SIZE, &[b'a'; PAGE_SIZE]);
        let residency = ResidencyTable::new(64).expect("residency");
        residency.begin_change(PoolPage(10));
        residency.end_change(PoolPage(10), FrameIndex(4), false);
        let files = FileTable::new(4).expect("files");
        files.publish(SLOT, InodeNo(5), 7, 3 * PAGE_SIZE as u64 - 10);
        MappedWindows { frames, residency, files }
    }

    fn layout(generation: u64) -> CachedLayout {
        let extent = |file_page, pool_page, state| Extent {
            file_page: FilePage(file_page),
            pool_page: PoolPage(pool_page),
            len_pages: 1,
            state,
        };
        CachedLayout::new(
            FilePage(0),
            Layout {
                generation,
                // page 0 resident, page 1 a hole, page 2 on SSD
                extents: vec![extent(0, 10, ExtentState::Written), extent(2, 11, ExtentState::Written)],
                known_until: None,
            },
        )
    }

    #[test]
    fn resident_hole_ssd_and_end_of_file() {
        let windows = windows();
        let mut out = vec![0xff; 4 * PAGE_SIZE];
        let got = read(&windows, SLOT, &layout(7), 0, &mut out[..]).expect("answer");
        assert_eq!(got.valid_len, 3 * PAGE_SIZE - 10);
        assert_eq!((0..4).map(|i| got.missing.contains(i)).collect::<Vec<_>>(), [false, false, true, false]);
        assert!(out[..PAGE_SIZE].iter().all(|b| *b == b'a'));
        assert!(out[PAGE_SIZE..2 * PAGE_SIZE].iter().all(|b| *b == 0));
        let past = read(&windows, SLOT, &layout(7), 1 << 40, &mut out[..]).expect("answer");
        assert_eq!(past.valid_len, 0);
    }

    #[test]
    fn what_changes_is_noticed() {
        let windows = windows();
        let mut out = [0; 100];
        assert_eq!(read(&windows, SLOT, &layout(6), 0, &mut out[..]), Err(NoAnswer::LayoutStale));
        windows.residency.begin_change(PoolPage(10));
        let got = read(&windows, SLOT, &layout(7), 0, &mut out[..]).expect("answer");
        assert!(got.missing.contains(0), "a page that is being changed is missing");
        windows.files.retire(SLOT);
        assert_eq!(read(&windows, SLOT, &layout(7), 0, &mut out[..]), Err(NoAnswer::SlotGone));
        assert_eq!(read(&windows, FileSlot(999), &layout(7), 0, &mut out[..]), Err(NoAnswer::SlotGone));
    }

    #[test]
    fn numbers_from_a_broken_peer_are_checked() {
        let windows = windows();
        let mut out = [0; 100];
        // A frame beyond the window.
        windows.residency.begin_change(PoolPage(10));
        windows.residency.end_change(PoolPage(10), FrameIndex(u32::MAX), false);
        assert!(read(&windows, SLOT, &layout(7), 0, &mut out[..]).expect("answer").missing.contains(0));
        // A pool page beyond the table.
        let wild = CachedLayout::new(
            FilePage(0),
            Layout {
                generation: 7,
                extents: vec![Extent {
                    file_page: FilePage(0),
                    pool_page: PoolPage(u64::MAX / 2),
                    len_pages: 1,
                    state: ExtentState::Written,
                }],
                known_until: None,
            },
        );
        assert!(read(&windows, SLOT, &wild, 0, &mut out[..]).expect("answer").missing.contains(0));
    }
}
