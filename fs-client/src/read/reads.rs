//! The steps of a read: plan, one-sided read, fetch.

use super::bitmap::PageBitmap;
use super::initiator::NoAnswer;
use super::known_entries::KnownEntries;
use super::layout::{CachedLayout, MAX_EXTENTS};
use super::plan::Plan;
use super::remote::Shown;
use super::{
    CachedRegion, Destination, OneSided, ReadBuffers, ReadCounters, counting, initiator, remote, target,
};
use crate::session::{Attachment, Session, SessionLane, Windows};
use crate::transport::{Caller, FsError};
use cuttlefs_common::ids::{FilePage, PAGE_SIZE_U64};
use cuttlefs_common::region::{PageSet, divide};
use cuttlefs_common::rpc::{OneSidedReads, Reply, Request};
use cuttlefs_common::status::Status;
use std::cell::Cell;
use std::sync::atomic::Ordering;

/// How often a read asks for a new layout before it fetches by RPC: a file that is being extended all the time
/// would otherwise keep its readers asking.
const LAYOUT_ATTEMPTS: usize = 2;

/// The state of a mount's reads.
#[derive(Default)]
pub(crate) struct Reads {
    /// Buffers for bytes on their way to the kernel.
    pub(crate) buffers: ReadBuffers,
    /// The counts of this mount's reads.
    pub(crate) counters: ReadCounters,
    pub(super) known_entries: KnownEntries,
}

impl Reads {
    /// Reads `[offset, offset + out.len())`. Returns how many of these bytes precede the end of the file.
    ///
    /// # Errors
    /// The server's error.
    pub(crate) fn read(
        &self,
        session: &Session,
        caller: &Caller,
        region: &CachedRegion,
        offset: u64,
        out: &mut [u8],
    ) -> Result<usize, FsError> {
        if out.is_empty() {
            return Ok(0);
        }
        match self.one_sided(session, caller, region, offset, out)? {
            Some(got) if got.missing.is_empty() => Ok(got.valid_len),
            Some(got) => {
                self.counters.magic_hits.fetch_add(got.missing.count() as u64, Ordering::Relaxed);
                let mut lane = session.borrow_lane()?;
                let wanted = &mut out[..got.valid_len];
                self.fetch(&mut lane, caller, region.open(), offset, &got.missing, wanted)
            }
            None => {
                let everything = PageSet::all(divide(offset, out.len()).len());
                let mut lane = session.borrow_lane()?;
                self.fetch(&mut lane, caller, region.open(), offset, &everything, out)
            }
        }
    }

    /// Reads what the mapped tables and frames of the server alone can give: no message is sent. `None` if they cannot give all of it. Returns how many
    /// bytes precede the end of the file.
    pub(crate) fn read_mapped(
        &self,
        session: &Session,
        region: &CachedRegion,
        offset: u64,
        out: &mut (impl Destination + ?Sized),
    ) -> Option<usize> {
        let attachment = session.look()?;
        let Some(Windows::Mapped(windows)) = &attachment.windows else { return None };
        if attachment.attached.one_sided == OneSidedReads::Off || region.open().region_key().is_some() {
            return None;
        }
        let slot = region.open().slot()?;
        let read = |layout: &CachedLayout| initiator::read(windows, slot, layout, offset, out).ok();
        let got = region.with_layout(read)?.filter(|got| got.missing.is_empty())?;
        self.counters.onesided_reads.add(1);
        if let Some(counters) = attachment.counting.get() {
            counting::count(counters, region.open().filekey(), offset, &got);
        }
        Some(got.valid_len)
    }

    /// Reads what can be had without the server's CPU, and counts it. `None`: nothing can, so fetch everything.
    fn one_sided(
        &self,
        session: &Session,
        caller: &Caller,
        region: &CachedRegion,
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
            // The tables say nothing of a region key that has ended: the server must be asked.
            if region.open().region_key().is_some() {
                return Ok(None);
            }
            self.by_initiator(session, &attachment, windows, caller, region, offset, out)?
        } else if session.target_translates_for(&attachment) {
            self.by_target(session, &attachment, region, offset, out)?
        } else {
            None
        };
        if let (Some(got), Some(counters)) = (&got, attachment.counting.get()) {
            counting::count(counters, region.open().filekey(), offset, got);
        }
        Ok(got)
    }

    fn by_target(
        &self,
        session: &Session,
        attachment: &Attachment,
        region: &CachedRegion,
        offset: u64,
        out: &mut [u8],
    ) -> Result<Option<OneSided>, FsError> {
        // The magic pattern belongs to the attachment's server, so it must not be applied to a lane that has moved on to the next server.
        let belongs = |lane: &SessionLane<'_>| lane.is_attached_to(attachment.attached.session);
        let is_whole = attachment.attached.one_sided == OneSidedReads::Whole;
        let plan = if is_whole {
            Plan::new(&PageBitmap::default(), offset, out.len())
        } else {
            region.note_read((offset + out.len() as u64).div_ceil(PAGE_SIZE_U64));
            region.with_bitmap(|bitmap| Plan::new(bitmap, offset, out.len()))
        };
        if plan.runs().is_empty() {
            return Ok(None);
        }
        let mut lane = session.borrow_lane()?;
        if !belongs(&lane) {
            return Ok(None);
        }
        let magic = (!is_whole).then_some(&attachment.attached.magic);
        let filekey = region.open().filekey();
        let Some(got) = target::read(&mut lane, filekey, magic, &plan, offset, out) else {
            return Ok(None);
        };
        self.counters.onesided_reads.add(plan.runs().len() as u64);
        let promised = |page: usize| !plan.is_absent(page);
        let pages = divide(offset, got.valid_len).len();
        if !got.missing.is_empty() && (0..pages).any(|page| got.missing.contains(page) && promised(page)) {
            self.counters.read_twice.fetch_add(1, Ordering::Relaxed);
        }
        Ok(Some(got))
    }

    #[expect(clippy::too_many_arguments, reason = "who asks, whom, and for what")]
    fn by_initiator(
        &self,
        session: &Session,
        attachment: &Attachment,
        windows: &Windows,
        caller: &Caller,
        region: &CachedRegion,
        offset: u64,
        out: &mut [u8],
    ) -> Result<Option<OneSided>, FsError> {
        let Some(slot) = region.open().slot() else {
            return Ok(None);
        };
        for _ in 0..=LAYOUT_ATTEMPTS {
            // The lane of a read is given back before the layout is requested.
            let got = match windows {
                Windows::Mapped(windows) => {
                    region.with_layout(|layout| initiator::read(windows, slot, layout, offset, out).map(Some))
                }
                Windows::Remote => {
                    let mut lane = session.borrow_lane()?;
                    let Some(windows) = lane.windows_in(attachment.attached.session) else {
                        return Ok(None);
                    };
                    let shown = Shown {
                        windows: &windows,
                        magic: &attachment.attached.magic,
                        epoch: attachment.attached.server_epoch,
                        counted: &self.counters.window_pages,
                    };
                    let got = region.with_layout(|layout| {
                        remote::read(&mut lane, shown, &self.known_entries, slot, layout, offset, out)
                    });
                    let is_whole = |got: &OneSided| got.missing.is_empty();
                    if let Some(Ok(got)) = &got
                        && !got.as_ref().is_some_and(is_whole)
                    {
                        region.note_read((offset + out.len() as u64).div_ceil(PAGE_SIZE_U64));
                    }
                    got
                }
            };
            match got {
                Some(Ok(got)) => {
                    self.counters.onesided_reads.add(u64::from(got.is_some()));
                    return Ok(got);
                }
                Some(Err(NoAnswer::SlotGone)) => return Ok(None),
                Some(Err(NoAnswer::LayoutStale)) | None => {}
            }
            ask_layout(session, caller, region, FilePage::containing(offset))?;
        }
        Ok(None)
    }
}

/// Requests the layout around a page. It begins at page 0 if that reaches far enough, so that for a small file one answer serves all reads.
fn ask_layout(
    session: &Session,
    caller: &Caller,
    region: &CachedRegion,
    page: FilePage,
) -> Result<(), FsError> {
    let asked_by = Cell::new(region.open().filekey());
    let ask = |first_page: FilePage| {
        let build = || {
            // A recovery between two attempts changes the filekey.
            asked_by.set(region.open().filekey());
            Request::Layout { filekey: asked_by.get(), first_page, max_extents: MAX_EXTENTS }
        };
        session.call(caller, build, |reply| match reply {
            Reply::Layout(layout) => Ok(layout),
            _ => Err(FsError::Server(Status::Malformed)),
        })
    };
    let mut layout = (FilePage(0), ask(FilePage(0))?);
    if layout.1.known_until.is_some_and(|until| page >= until) {
        layout = (page, ask(page)?);
    }
    region.set_layout(asked_by.get(), CachedLayout::new(layout.0, layout.1));
    Ok(())
}
