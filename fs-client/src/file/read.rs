//! The way of a read: plan, one-sided, sparse fetch.

use super::open_file::OpenFile;
use super::volume::{Caller, FsError};
use crate::onesided::{NoAnswer, OneSided, read_by_initiator, read_by_target};
use crate::region::{CachedLayout, MAX_EXTENTS, PageBitmap, Plan};
use crate::session::{Session, Windows};
use crate::sparse;
use cuttlefs_common::ids::{FilePage, FileSlot};
use cuttlefs_common::region::{PageSet, divide};
use cuttlefs_common::rpc::{OneSidedReads, Reply, Request};
use cuttlefs_common::status::Status;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// How often a read asks for a new layout before it fetches by RPC: a file that is being extended all the time
/// would otherwise keep its readers asking.
const LAYOUT_ATTEMPTS: usize = 2;

/// Reads `[offset, offset + out.len())`; returns how many bytes precede the end of the file.
pub(crate) fn read(
    session: &Session,
    caller: &Caller,
    file: &OpenFile,
    offset: u64,
    out: &mut [u8],
) -> Result<usize, FsError> {
    if out.is_empty() {
        return Ok(0);
    }
    match one_sided(session, caller, file, offset, out)? {
        Some(got) if got.missing.is_empty() => {
            session.count_read(file, offset, &got);
            Ok(got.valid_len)
        }
        Some(got) => {
            session.count_read(file, offset, &got);
            session.counters.magic_hits.fetch_add(got.missing.count() as u64, Ordering::Relaxed);
            let mut lane = session.borrow_lane();
            let wanted = &mut out[..got.valid_len];
            sparse::fetch(session, &mut lane, caller, file, offset, &got.missing, wanted)
        }
        None => {
            let everything = PageSet::all(divide(offset, out.len()).len());
            let mut lane = session.borrow_lane();
            sparse::fetch(session, &mut lane, caller, file, offset, &everything, out)
        }
    }
}

/// What can be had without the server's CPU; `None`: nothing, fetch it all.
fn one_sided(
    session: &Session,
    caller: &Caller,
    file: &OpenFile,
    offset: u64,
    out: &mut [u8],
) -> Result<Option<OneSided>, FsError> {
    let worth = session.one_sided_reads();
    if worth == OneSidedReads::Off {
        return Ok(None);
    }
    if let Some(windows) = session.windows() {
        return match file.slot() {
            Some(slot) => by_initiator(session, &windows, caller, file, slot, offset, out),
            None => Ok(None),
        };
    }
    if !session.target_translates() {
        return Ok(None);
    }
    if worth == OneSidedReads::Whole {
        let plan = Plan::new(&PageBitmap::default(), offset, out.len());
        let mut lane = session.borrow_lane();
        return Ok(read_by_target(&mut lane, file.filekey(), None, &plan, offset, out));
    }
    let Some(magic) = session.magic() else {
        return Ok(None);
    };
    file.note_read((offset + out.len() as u64).div_ceil(cuttlefs_common::ids::PAGE_SIZE_U64));
    let plan = file.with_bitmap(|bitmap| Plan::new(bitmap, offset, out.len()));
    if plan.runs().is_empty() {
        return Ok(None);
    }
    let mut lane = session.borrow_lane();
    Ok(read_by_target(&mut lane, file.filekey(), Some(&magic), &plan, offset, out))
}

fn by_initiator(
    session: &Session,
    windows: &Windows,
    caller: &Caller,
    file: &OpenFile,
    slot: FileSlot,
    offset: u64,
    out: &mut [u8],
) -> Result<Option<OneSided>, FsError> {
    let mut cached = file.layout();
    for _ in 0..=LAYOUT_ATTEMPTS {
        if let Some(layout) = cached.as_ref() {
            match read_by_initiator(windows, slot, layout, offset, out) {
                Ok(got) => {
                    session.counters.onesided_reads.fetch_add(1, Ordering::Relaxed);
                    return Ok(Some(got));
                }
                Err(NoAnswer::SlotGone) => return Ok(None),
                Err(NoAnswer::LayoutStale) => {}
            }
        }
        let layout = Arc::new(ask_layout(session, caller, file, FilePage::containing(offset))?);
        file.set_layout(layout);
        cached = file.layout();
    }
    Ok(None)
}

/// Asks for the layout around a page. Small files are asked for whole, so that one answer serves all reads.
fn ask_layout(
    session: &Session,
    caller: &Caller,
    file: &OpenFile,
    page: FilePage,
) -> Result<CachedLayout, FsError> {
    let ask = |first_page: FilePage| {
        session.call(
            caller,
            || Request::Layout { filekey: file.filekey(), first_page, max_extents: MAX_EXTENTS },
            |reply| match reply {
                Reply::Layout(layout) => Ok(layout),
                _ => Err(FsError::Server(Status::Malformed)),
            },
        )
    };
    let layout = ask(FilePage(0))?;
    if layout.known_until.is_some_and(|until| page >= until) {
        return Ok(CachedLayout::new(page, ask(page)?));
    }
    Ok(CachedLayout::new(FilePage(0), layout))
}
