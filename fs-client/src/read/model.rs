//! Both ways of initiator translation for the model checker, which is outside of this crate (fixtures/models).

use super::known_entries::KnownEntries;
use super::layout::CachedLayout;
use super::near_rnic::NearRnic;
use super::remote::Shown;
use super::spread_count::SpreadCount;
use super::{initiator, remote};
use crate::session::MappedWindows;
use cuttlefs_common::ids::{FilePage, FileSlot};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::region::{FileTable, MagicPattern, ResidencyTable};
use cuttlefs_common::rpc::Layout;
use std::sync::Arc;

const EPOCH: u64 = 1;

/// Reads the beginning of a file of the server with these windows. Returns whether all of it could be read.
pub fn read_as_initiator(
    frames: Arc<SharedMemory>,
    residency: ResidencyTable,
    files: FileTable,
    slot: FileSlot,
    layout: Layout,
    out: &mut [u8],
) -> bool {
    let layout = CachedLayout::new(FilePage(0), layout);
    let got = initiator::read(&MappedWindows { frames, residency, files }, slot, &layout, 0, out);
    got.is_ok_and(|got| got.valid_len == out.len() && got.missing.is_empty())
}

/// As [`read_as_initiator`], but by READs of the windows. Keeps entries from one read to the next.
#[derive(Debug, Default)]
pub struct RemoteReader {
    known: KnownEntries,
    is_backwards: bool,
}

impl RemoteReader {
    /// A reader that knows the entry of the layout's first page.
    pub fn knowing(residency: &ResidencyTable, layout: Layout) -> Self {
        let page = layout.extents[0].pool_page;
        let reader = Self::default();
        reader.known.note(EPOCH, page, residency.load(page));
        reader
    }

    /// One whose RNIC executes the READs of a doorbell last first.
    pub fn backwards() -> Self {
        Self { is_backwards: true, ..Self::default() }
    }

    /// As [`read_as_initiator`].
    pub fn read(
        &self,
        [frames, residency, files]: [Arc<SharedMemory>; 3],
        slot: FileSlot,
        layout: Layout,
        out: &mut [u8],
    ) -> bool {
        let layout = CachedLayout::new(FilePage(0), layout);
        let mut rnic = NearRnic::new(frames, residency, files);
        rnic.is_backwards = self.is_backwards;
        let (windows, magic, counted) = (rnic.windows(), MagicPattern::new([7; 32]), SpreadCount::default());
        let shown = Shown { windows: &windows, magic: &magic, epoch: EPOCH, counted: &counted };
        let got = remote::read(&mut rnic, shown, &self.known, slot, &layout, 0, out);
        matches!(got, Ok(Some(got)) if got.valid_len == out.len() && got.missing.is_empty())
    }
}
