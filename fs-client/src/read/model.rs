//! Both ways of initiator translation for the model checker, which is outside of this crate (fixtures/models).

use super::known_entries::KnownEntries;
use super::layout::CachedLayout;
use super::near_rnic::{NearRnic, Order};
use super::remote::{ReadsPieces, Shown};
use super::spread_count::SpreadCount;
use super::{initiator, remote};
use crate::session::MappedWindows;
use crate::transport::{Landing, Piece};
use cuttlefs_common::ids::{FilePage, FileSlot, PAGE_SIZE_U64};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::region::{FILE_SLOT_LEN, FileTable, MagicPattern, ResidencyTable};
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

/// The number of orders in which the words of a doorbell can be read ([`RemoteReader::in_order`]): the file's slot has two words, and the bytes of
/// these models too.
pub const ORDERS: usize = 24;
/// The order that begins with the last word.
pub const LAST_FIRST: usize = ORDERS - 1;

/// As [`read_as_initiator`], but by READs of the windows. Keeps entries from one read to the next.
#[derive(Debug, Default)]
pub struct RemoteReader {
    known: KnownEntries,
    order: Order,
}

impl RemoteReader {
    /// The same reader, with the entry of the layout's first page as it is now.
    #[must_use]
    pub fn knowing(self, residency: &ResidencyTable, layout: &Layout) -> Self {
        let page = layout.extents[0].pool_page;
        self.known.note(EPOCH, page, residency.load(page));
        self
    }

    /// The same reader, with an RNIC that reads the words of each doorbell in one of the [`ORDERS`].
    #[must_use]
    pub fn in_order(self, order: usize) -> Self {
        Self { order: Order::Words(order), ..self }
    }

    fn rnic(&self, [frames, residency, files]: [Arc<SharedMemory>; 3]) -> NearRnic {
        let mut rnic = NearRnic::new(frames, residency, files);
        rnic.order = self.order;
        rnic
    }

    /// As [`read_as_initiator`].
    pub fn read(
        &self,
        windows: [Arc<SharedMemory>; 3],
        slot: FileSlot,
        layout: Layout,
        out: &mut [u8],
    ) -> bool {
        let layout = CachedLayout::new(FilePage(0), layout);
        let mut rnic = self.rnic(windows);
        let (windows, magic, counted) = (rnic.windows(), MagicPattern::new([7; 32]), SpreadCount::default());
        let shown = Shown { windows: &windows, magic: &magic, epoch: EPOCH, counted: &counted };
        let got = remote::read(&mut rnic, shown, &self.known, slot, &layout, 0, out);
        matches!(got, Ok(Some(got)) if got.valid_len == out.len() && got.missing.is_empty())
    }

    /// The same by a known entry, with a mistake: the proof is asked for with the bytes, and not when they have come. Is right only as long as an RNIC
    /// executes READs once, and in their order.
    pub fn read_with_one_doorbell(
        &self,
        windows: [Arc<SharedMemory>; 3],
        slot: FileSlot,
        layout: &Layout,
        out: &mut [u8],
    ) -> bool {
        const ENTRY: usize = FileTable::VIEW_LEN;
        let page = layout.extents[0].pool_page;
        let mut rnic = self.rnic(windows);
        let shown = rnic.windows();
        let Some(known) =
            self.known.get(EPOCH, page).filter(|known| known.is_resident() && !known.is_changing())
        else {
            return false;
        };
        let piece = |remote, len, to| Piece { remote, len, to };
        let bytes = shown.frames.at(u64::from(known.frame().0) * PAGE_SIZE_U64);
        let pieces = [
            piece(bytes, out.len(), Landing::Data(0)),
            piece(shown.residency.at(page.0 * 8), 8, Landing::Proof(ENTRY)),
            piece(shown.files.at(u64::from(slot.0) * FILE_SLOT_LEN as u64), ENTRY, Landing::Proof(0)),
        ];
        let (mut view, mut entry) = ([0; FileTable::VIEW_LEN], [0; 8]);
        if rnic.read_pieces(&pieces).is_none() {
            return false;
        }
        rnic.data(0, out);
        rnic.proof(0, &mut view);
        rnic.proof(ENTRY, &mut entry);
        FileTable::view_of(&view).generation == layout.generation
            && known.validates(ResidencyTable::entry_of(entry))
    }
}
