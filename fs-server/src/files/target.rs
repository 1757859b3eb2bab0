//! Target translation: the NIC engine's reads of a file without an RPC worker, and its way to changes (`one_sided`, `exposed_writes`).
//!
//! The policy decides from where the engine reads: from frames (here), or from the mapped pool (`faulting`).
//!
//! # How it works
//! The filekey gives the file. Under the mapping's read lock, held for moments, every page of the request is looked up together with its residency
//! entry. If an entry was loaded while the page belonged to the file, and did not move until the copy was done, the copy is this file's page. So the
//! bytes are copied without any lock and validated one page at a time. A page on SSD, or one that keeps changing, is answered with the magic pattern.
//! Under policies that keep all pages in frames clients do not look for the pattern: there the engine waits a moment for such a page, or refuses the
//! READ.
//!
//! # Failure
//! `RemoteAccess` for a bad filekey or right, `RemoteInvalid` under a policy without one-sided reads, `RemoteOperation` for a page that should be in
//! a frame and is not.

use super::one_sided::{By, refusal};
use super::one_sided_faults::OneSided;
use super::{FileRegion, Files, KeyedFile};
use crate::pages::policy::Exposure;
use crate::pages::{PageView, add};
use cuttlefs_common::ids::{FileKey, MAX_FILE_SIZE, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::rdma::{FileAtomic, FileRead, FileTarget, FileValue, FileWrite, RegionOwner, WcStatus};
use cuttlefs_common::region::{PagePart, divide};
use std::sync::Arc;

/// How often a page that changed during its copy is copied again before the pattern is sent instead. A write takes less than a microsecond, so a
/// reader that meets several in a row had better ask by RPC.
pub(super) const COPY_ATTEMPTS: usize = 4;
/// The same under policies that must not send the pattern: about a millisecond, long enough for a writer that was interrupted between two
/// instructions. The engine serves nobody else during that time.
const PINNED_ATTEMPTS: usize = 10_000;

/// The pages of a request at one moment.
pub(super) struct Look {
    /// The length of the file.
    pub(super) size: u64,
    /// The pages before the end of the file.
    pub(super) views: Vec<(PagePart, PageView)>,
}

impl Files {
    fn keyed_to_read(&self, owner: RegionOwner, filekey: FileKey) -> Result<KeyedFile, WcStatus> {
        match self.keyed(owner, filekey) {
            Ok(keyed) if keyed.rights.read && !keyed.file.is_reaped() => {
                // Under policies without the pattern the READ is refused, and the client asks by RPC.
                if keyed.file.is_closed() && self.pages.policy().exposure != Exposure::Magic {
                    return Err(WcStatus::RemoteOperation);
                }
                Ok(keyed)
            }
            _ => Err(WcStatus::RemoteAccess),
        }
    }

    /// The file of a filekey that is good for reading `len` bytes at `offset`.
    pub(super) fn file_to_read(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        len: usize,
    ) -> Result<Arc<FileRegion>, WcStatus> {
        let keyed = self.keyed_to_read(owner, filekey)?;
        if keyed.holds(offset, offset.saturating_add(len as u64)) {
            Ok(keyed.file)
        } else {
            Err(WcStatus::RemoteAccess)
        }
    }

    /// Copies one page's part, and looks it up again as long as it keeps changing. Returns the file's length as of the last lookup, if there was one,
    /// and `false` if the part has the pattern instead of bytes.
    fn read_part(
        &self,
        file: &FileRegion,
        part: PagePart,
        mut view: PageView,
        out: &mut [u8],
    ) -> Result<(Option<u64>, bool), WcStatus> {
        let mut size = None;
        let pinned = self.pages.policy().exposure == Exposure::Pinned;
        for _ in 0..if pinned { PINNED_ATTEMPTS } else { COPY_ATTEMPTS } {
            match view {
                PageView::Zeros => {
                    out.fill(0);
                    return Ok((size, true));
                }
                PageView::Pool(_, entry) if !entry.is_resident() && !pinned => break,
                PageView::Pool(pool, entry) => {
                    if self.pages.copy_resident(pool, entry, part.offset_in_page, out) {
                        add(&self.pages.counters.target_hits, 1);
                        return Ok((size, true));
                    }
                    std::hint::spin_loop();
                }
            }
            let state = file.state();
            size = Some(size.unwrap_or(u64::MAX).min(state.size));
            view = self.view(&state, part.page);
        }
        if pinned {
            tracing::warn!(ino = %file.ino(), page = %part.page, "a page is not in memory; its one-sided read is refused");
            return Err(WcStatus::RemoteOperation);
        }
        self.pages.magic().fill(part.offset_in_page, out);
        add(&self.pages.counters.target_magic, 1);
        Ok((size, false))
    }

    pub(super) fn look(&self, file: &FileRegion, offset: u64, len: usize) -> Look {
        let state = file.state();
        let wanted = state.size.saturating_sub(offset).min(len as u64) as usize;
        let views = divide(offset, wanted).map(|part| (part, self.view(&state, part.page))).collect();
        Look { size: state.size, views }
    }

    /// Answers a read past the end.
    fn read_nothing(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        out: &mut [u8],
    ) -> Result<usize, WcStatus> {
        self.file_to_read(owner, filekey, offset, out.len())?;
        out.fill(0);
        Ok(0)
    }

    /// Reads from frames.
    fn read_frames(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        out: &mut [u8],
    ) -> Result<usize, WcStatus> {
        let file = self.file_to_read(owner, filekey, offset, out.len())?;
        if file.is_closed() || self.is_gathering() && self.pages.policy().exposure == Exposure::Magic {
            // All pages are answered with the pattern. The client asks by RPC, and gets the error, or waits for who restores something.
            divide(offset, out.len()).for_each(|part| {
                let target = &mut out[part.offset_in_request..part.offset_in_request + part.len];
                self.pages.magic().fill(part.offset_in_page, target);
            });
            return Ok(out.len());
        }
        let Look { mut size, views } = self.look(&file, offset, out.len());
        let wanted = size.saturating_sub(offset).min(out.len() as u64) as usize;
        let mut is_whole = true;
        for (part, view) in views {
            let target = &mut out[part.offset_in_request..part.offset_in_request + part.len];
            let (seen, is_there) = self.read_part(&file, part, view, target)?;
            size = size.min(seen.unwrap_or(size));
            is_whole &= is_there;
        }
        if !is_whole {
            add(&self.pages.counters.target_magic_reads, 1);
        }
        out[wanted..].fill(0);
        // The file may have been cut meanwhile; then the answer is shorter.
        Ok((size.saturating_sub(offset) as usize).min(wanted))
    }
}

/// Checked before anything is computed with a peer's numbers.
fn is_past_any_file(offset: u64, len: usize) -> bool {
    offset.checked_add(len as u64).is_none_or(|end| end > MAX_FILE_SIZE)
}

impl FileTarget for Files {
    fn read_file(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        out: &mut [u8],
    ) -> Result<FileRead, WcStatus> {
        if is_past_any_file(offset, out.len()) {
            return self.read_nothing(owner, filekey, offset, out).map(FileRead::Done);
        }
        match self.pages.policy().exposure {
            Exposure::Magic | Exposure::Pinned => {
                self.read_frames(owner, filekey, offset, out).map(FileRead::Done)
            }
            Exposure::Faulting => self.read_mapped(owner, filekey, offset, out),
            Exposure::Hidden => Err(WcStatus::RemoteInvalid),
        }
    }

    fn read_file_faulting(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        out: &mut [u8],
    ) -> Result<usize, WcStatus> {
        if is_past_any_file(offset, out.len()) {
            return self.read_nothing(owner, filekey, offset, out);
        }
        self.resolve_fault(owner, filekey, offset, out)
    }

    fn write_file(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        bytes: &[u8],
    ) -> Result<FileWrite, WcStatus> {
        if self.is_exposed() {
            return self.write_exposed(owner, filekey, offset, bytes);
        }
        self.try_write((owner, filekey), offset, bytes, By::Engine).map_err(refusal)
    }

    fn write_file_faulting(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), WcStatus> {
        if self.is_exposed() {
            return self.resolve_write_fault(owner, filekey, offset, bytes);
        }
        let what = OneSided::Write { offset, bytes: bytes.to_vec() };
        self.resolve_fault_of_grant(owner, filekey, what).map(drop)
    }

    fn atomic_file(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        operation: FileAtomic,
    ) -> Result<FileValue, WcStatus> {
        self.try_atomic((owner, filekey), offset, operation, By::Engine).map_err(refusal)
    }

    fn atomic_file_faulting(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        operation: FileAtomic,
    ) -> Result<u64, WcStatus> {
        self.resolve_fault_of_grant(owner, filekey, OneSided::Atomic { offset, operation })
    }

    fn append_file(&self, owner: RegionOwner, filekey: FileKey, bytes: &[u8]) -> Result<FileValue, WcStatus> {
        self.try_append((owner, filekey), bytes, By::Engine).map_err(refusal)
    }

    fn append_file_faulting(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        bytes: &[u8],
    ) -> Result<u64, WcStatus> {
        self.resolve_fault_of_grant(owner, filekey, OneSided::Append { bytes: bytes.to_vec() })
    }

    fn read_bitmap(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        first_page: u64,
        out: &mut [u8],
    ) -> Result<(), WcStatus> {
        let keyed = self.keyed_to_read(owner, filekey)?;
        let file = &keyed.file;
        out.fill(0);
        if file.is_closed() {
            return Ok(());
        }
        let state = file.state();
        let bits = out.len() as u64 * 8;
        let end = first_page.saturating_add(bits).min(state.size.div_ceil(PAGE_SIZE_U64));
        if first_page >= end {
            return Ok(());
        }
        let pages = (end - first_page) as usize;
        out[..pages / 8].fill(u8::MAX);
        if !pages.is_multiple_of(8) {
            out[pages / 8] = (1 << (pages % 8)) - 1;
        }
        // All bits are set first, and those of pages with bytes that are not resident are cleared. That takes one walk over the pieces instead of a
        // search for each page.
        for piece in state.table.pieces_in(first_page, end).filter(|piece| piece.state.has_bytes()) {
            for page in piece.first..piece.end() {
                let pool = PoolPage(piece.pool + (page - piece.first));
                if !self.pages.is_resident(pool) {
                    let index = (page - first_page) as usize;
                    out[index / 8] &= !(1 << (index % 8));
                }
            }
        }
        // Whoever may see a part of the file learns nothing of the pages around it.
        if keyed.part.is_some() {
            for page in first_page..end {
                let start = page * PAGE_SIZE_U64;
                if !keyed.overlaps(start, start + PAGE_SIZE_U64) {
                    let index = (page - first_page) as usize;
                    out[index / 8] &= !(1 << (index % 8));
                }
            }
        }
        Ok(())
    }
}
