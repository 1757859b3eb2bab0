//! On-demand paging: how the NIC engine reads files from the mapped pool (region policy `odp`; TeRM sections 2.2, 3.2).
//!
//! # How it works
//! The engine copies a READ whose pages are all in the kernel's page cache. Any other READ faults, step by step as at an RNIC: its queue pair stalls
//! (1a), a fault thread takes the CPU's page faults (1b), the pages are mapped (1c), the queue pair continues (1d). Only (1b) costs anything here.
//! For the other steps `--odp-hardware` makes that queue pair wait as long as the paper measured. The simulated RNIC has no page table of its own, so
//! a page in memory never faults: hits are as fast as the best case of an RNIC.
//!
//! Pages are looked up and validated as in all reads: if an entry of the residency table did not move since it was loaded under the mapping's lock,
//! the copy is this file's page. The entries name no frames under this policy, but their versions move whenever a page's bytes change or the page
//! leaves its file.
//!
//! # Failure
//! A READ of a page that keeps changing for a tenth of a second is refused, and the client asks by RPC. If the kernel evicts a page between the check
//! and the copy, the engine itself waits, for all queue pairs; the two are less than a microsecond apart.

use super::Files;
use super::target::{COPY_ATTEMPTS, Look};
use crate::pages::{PageView, add};
use crate::pool::CachedPool;
use cuttlefs_common::ids::FileKey;
use cuttlefs_common::rdma::{FileRead, RegionOwner, WcStatus};
use cuttlefs_common::region::divide;
use std::time::Duration;

/// Figure 4, step 1a: the RNIC notices the fault, stalls the queue pair and interrupts the CPU.
pub(super) const RNIC_STALLS: Duration = Duration::from_nanos(127_370);
/// Figure 4, steps 1c and 1d: the RNIC's page table is updated, and the queue pair continues.
pub(super) const RNIC_RESUMES: Duration = Duration::from_nanos(74_170 + 128_860);
/// How often a fault thread tries a page again that is being written, and how long it waits in between. A write of a page takes as long as its
/// worker's own page fault, at most some milliseconds.
const FAULTING_ATTEMPTS: usize = 1000;
const FAULTING_PAUSE: Duration = Duration::from_micros(100);

impl Look {
    /// The ranges of the pool that the request needs. Neighbouring pages are one range.
    fn runs(&self) -> Vec<(u64, usize)> {
        let mut runs: Vec<(u64, usize)> = Vec::new();
        for (part, view) in &self.views {
            let PageView::Pool(pool, _) = view else { continue };
            let start = pool.byte_offset() + part.offset_in_page as u64;
            match runs.last_mut() {
                Some((first, len)) if *first + *len as u64 == start => *len += part.len,
                _ => runs.push((start, part.len)),
            }
        }
        runs
    }

    fn is_cached(&self, pool: &CachedPool) -> bool {
        self.runs().into_iter().all(|(start, len)| pool.is_cached(start, len))
    }
}

impl Files {
    /// Copies the pages that were looked up; `None` if an entry has moved or a page is being changed.
    fn copy_mapped(&self, pool: &CachedPool, look: &Look, offset: u64, out: &mut [u8]) -> Option<usize> {
        let mut wanted = 0;
        for (part, view) in &look.views {
            let target = &mut out[part.offset_in_request..part.offset_in_request + part.len];
            wanted = part.offset_in_request + part.len;
            match view {
                PageView::Zeros => target.fill(0),
                PageView::Pool(_, before) if before.is_changing() => return None,
                PageView::Pool(page, before) => {
                    pool.read_mapped(page.byte_offset() + part.offset_in_page as u64, target);
                    if !before.validates(self.pages.residency.table().load_after_copy(*page)) {
                        return None;
                    }
                }
            }
        }
        out[wanted..].fill(0);
        add(&self.pages.counters.target_hits, look.views.len() as u64);
        debug_assert!(wanted as u64 <= look.size.saturating_sub(offset));
        Some(wanted)
    }

    /// The engine's attempt: copies if all pages are in memory and none is being changed, else the READ faults.
    pub(super) fn read_mapped(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        out: &mut [u8],
    ) -> Result<FileRead, WcStatus> {
        let file = self.file_to_read(owner, filekey, offset, out.len())?;
        let pool = self.pages.mapped().ok_or(WcStatus::RemoteInvalid)?;
        for _ in 0..COPY_ATTEMPTS {
            let look = self.look(&file, offset, out.len());
            if !look.is_cached(pool) {
                break;
            }
            if let Some(valid) = self.copy_mapped(pool, &look, offset, out) {
                return Ok(FileRead::Done(valid));
            }
        }
        Ok(FileRead::Faults)
    }

    /// The fault thread's part, which waits for the device, and for other changes of a page.
    pub(super) fn resolve_fault(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        out: &mut [u8],
    ) -> Result<usize, WcStatus> {
        let pool = self.pages.mapped().ok_or(WcStatus::RemoteInvalid)?;
        add(&self.pages.counters.odp_faults, 1);
        add(&self.pages.counters.odp_fault_pages, divide(offset, out.len()).len() as u64);
        for attempt in 0..FAULTING_ATTEMPTS {
            // Resolved in each attempt, because the filekey may have been closed meanwhile.
            let file = self.file_to_read(owner, filekey, offset, out.len())?;
            let look = self.look(&file, offset, out.len());
            if attempt == 0 && !look.is_cached(pool) {
                self.wait_for_rnic(RNIC_STALLS);
                look.runs().into_iter().for_each(|(start, len)| pool.touch(start, len));
                self.wait_for_rnic(RNIC_RESUMES);
            }
            if let Some(valid) = self.copy_mapped(pool, &look, offset, out) {
                return Ok(valid);
            }
            std::thread::sleep(FAULTING_PAUSE);
        }
        tracing::warn!(offset, "a page is being changed all the time; its one-sided read is refused");
        Err(WcStatus::RemoteOperation)
    }

    pub(super) fn wait_for_rnic(&self, time: Duration) {
        if self.pages.policy().hardware_times {
            std::thread::sleep(time);
        }
    }
}
