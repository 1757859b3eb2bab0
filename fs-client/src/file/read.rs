//! The way of a read: plan, one-sided, sparse fetch.

use super::open_file::OpenFile;
use super::volume::{Caller, FsError};
use crate::onesided::{NoAnswer, OneSided, read_by_initiator, read_by_target};
use crate::region::{CachedLayout, MAX_EXTENTS, PageBitmap, Plan};
use crate::session::{Attachment, LaneGuard, Session, Windows};
use crate::sparse;
use cuttlefs_common::ids::{FileKey, FilePage, FileSlot, PAGE_SIZE_U64};
use cuttlefs_common::region::{AccessCounters, PageSet, divide};
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
    // One-sided reads ask nobody who could wait for them.
    match one_sided(session, caller, file, offset, out)? {
        Some(got) if got.missing.is_empty() => Ok(got.valid_len),
        Some(got) => {
            session.counters.magic_hits.fetch_add(got.missing.count() as u64, Ordering::Relaxed);
            let mut lane = session.borrow_lane()?;
            let wanted = &mut out[..got.valid_len];
            sparse::fetch(session, &mut lane, caller, file, offset, &got.missing, wanted)
        }
        None => {
            let everything = PageSet::all(divide(offset, out.len()).len());
            let mut lane = session.borrow_lane()?;
            sparse::fetch(session, &mut lane, caller, file, offset, &everything, out)
        }
    }
}

/// What can be had without the server's CPU, counted; `None`: nothing, fetch it all.
fn one_sided(
    session: &Session,
    caller: &Caller,
    file: &OpenFile,
    offset: u64,
    out: &mut [u8],
) -> Result<Option<OneSided>, FsError> {
    let Some(attachment) = session.look() else {
        return Ok(None);
    };
    let worth = attachment.attached.one_sided;
    if worth == OneSidedReads::Off {
        return Ok(None);
    }
    let got = if let Some(windows) = &attachment.windows {
        match file.slot() {
            Some(slot) => by_initiator(session, windows, caller, file, slot, offset, out)?,
            None => None,
        }
    } else if session.target_translates_for(&attachment) {
        by_target(session, &attachment, file, offset, out)?
    } else {
        None
    };
    if let (Some(got), Some(counters)) = (&got, attachment.counting.get()) {
        count(counters, file.filekey(), offset, got);
    }
    Ok(got)
}

/// Counts the pages a one-sided read brought, for the server, which cannot see it (TeRM section 4.4).
fn count(counters: &AccessCounters, filekey: FileKey, offset: u64, got: &OneSided) {
    if got.valid_len == 0 {
        return;
    }
    let first_page = offset / PAGE_SIZE_U64;
    if got.missing.is_empty() {
        let end_page = (offset + got.valid_len as u64).div_ceil(PAGE_SIZE_U64);
        return counters.count(filekey, first_page, end_page);
    }
    for index in (0..divide(offset, got.valid_len).len()).filter(|index| !got.missing.contains(*index)) {
        let page = first_page + index as u64;
        counters.count(filekey, page, page + 1);
    }
}

fn by_target(
    session: &Session,
    attachment: &Attachment,
    file: &OpenFile,
    offset: u64,
    out: &mut [u8],
) -> Result<Option<OneSided>, FsError> {
    // The pattern is the server's that the attachment is of: a lane that has moved on to the next one must not be looked
    // at with it.
    let belongs = |lane: &LaneGuard<'_>| lane.is_attached_to(attachment.attached.session);
    if attachment.attached.one_sided == OneSidedReads::Whole {
        let plan = Plan::new(&PageBitmap::default(), offset, out.len());
        let mut lane = session.borrow_lane()?;
        if !belongs(&lane) {
            return Ok(None);
        }
        return Ok(read_by_target(&mut lane, file.filekey(), None, &plan, offset, out));
    }
    file.note_read((offset + out.len() as u64).div_ceil(PAGE_SIZE_U64));
    let plan = file.with_bitmap(|bitmap| Plan::new(bitmap, offset, out.len()));
    if plan.runs().is_empty() {
        return Ok(None);
    }
    let mut lane = session.borrow_lane()?;
    if !belongs(&lane) {
        return Ok(None);
    }
    let magic = &attachment.attached.magic;
    let Some(got) = read_by_target(&mut lane, file.filekey(), Some(magic), &plan, offset, out) else {
        return Ok(None);
    };
    let promised = |page: usize| !plan.is_absent(page);
    let pages = divide(offset, got.valid_len).len();
    if !got.missing.is_empty() && (0..pages).any(|page| got.missing.contains(page) && promised(page)) {
        session.counters.read_twice.fetch_add(1, Ordering::Relaxed);
    }
    Ok(Some(got))
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
                    session.counters.onesided_reads.add(1);
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
