//! `initiator::read` for the model checker, which stands outside of the crate (tests/page_model.rs).

use super::initiator;
use super::layout::CachedLayout;
use crate::session::Windows;
use cuttlefs_common::ids::{FilePage, FileSlot};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::region::{FileTable, ResidencyTable};
use cuttlefs_common::rpc::Layout;
use std::sync::Arc;

/// Reads the beginning of a file of the server whose windows these are; whether all of it was there.
pub fn read_as_initiator(
    frames: Arc<SharedMemory>,
    residency: ResidencyTable,
    files: FileTable,
    slot: FileSlot,
    layout: Layout,
    out: &mut [u8],
) -> bool {
    let layout = CachedLayout::new(FilePage(0), layout);
    let got = initiator::read(&Windows { frames, residency, files }, slot, &layout, 0, out);
    got.is_ok_and(|got| got.valid_len == out.len() && got.missing.is_empty())
}
