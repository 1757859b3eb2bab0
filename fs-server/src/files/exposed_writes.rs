//! One-sided writes, for comparison (region policies `pin` and `odp`; TeRM section 6.1): the NIC engine overwrites bytes that a file has.
//!
//! Under other policies a one-sided write takes a grant (`one_sided`). A write past the server's CPU changes neither the file's length, times and
//! counter, nor does it tell anybody but the write-back.
//!
//! # How it works
//! Like an overwrite by RPC (`write`): the file's order is shared, so mapping and length stay, and `Pages::change` does the rest. A page's entry is
//! odd while its bytes change, and a page in a frame is dirty and listed, so that write-back, a clean stop and checksums miss nothing. The engine
//! never waits for the order or for pages' locks. A write that would have to wait is a fault, and is done by a thread that may wait.
//!
//! | policy | how a page is written | what is a fault |
//! | --- | --- | --- |
//! | `pin` | changed in its frame | the page is being written back, or changed by another request |
//! | `odp` | read, changed and written through the mapping, with its new checksum | the same, and a page, sum or mark that is not in memory |
//!
//! # Failure
//! `RemoteAccess`, with nothing changed, if the file has no bytes there or the filekey has no right to write. `RemoteOperation` for a page without a
//! frame under `pin`, and for a device error. If a killed server loses such a write, no client restores it, nor does it count as newer than a
//! restored change. Between the engine's check of a mapped page and its change, another task may take the locks that it needs. Then the engine itself
//! waits, for all queue pairs; the check and the change are a microsecond apart.

use super::faulting::{RNIC_RESUMES, RNIC_STALLS};
use super::write::changes_of;
use super::{FileRegion, Files};
use crate::pages::policy::Exposure;
use crate::pages::{NewBytes, PageChange, Source, add};
use crate::pool::CachedPool;
use crate::pool::disk::{Disk, IoDone, IoError, IoRequest, LocalFuture};
use cuttlefs_common::ids::{FileKey, PAGE_SIZE};
use cuttlefs_common::rdma::{FileWrite, RegionOwner, WcStatus};
use cuttlefs_common::status::Status;
use futures_lite::future::{block_on, poll_once};
use std::io;
use std::sync::Arc;

/// The disk for a policy that keeps all pages in frames: it is never used.
struct NoDisk;

impl Disk for NoDisk {
    fn submit(&self, batch: Vec<IoRequest>) -> LocalFuture<'static, Vec<IoDone>> {
        let refuse = |IoRequest { kind, offset, buffer }| {
            let source = io::Error::other("a pinned page has no frame");
            IoDone { buffer, result: Err(IoError { kind, offset, len: PAGE_SIZE, source }) }
        };
        Box::pin(std::future::ready(batch.into_iter().map(refuse).collect()))
    }

    fn sync(&self) -> LocalFuture<'static, io::Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

impl Files {
    /// The engine's attempt, without waiting.
    pub(super) fn write_exposed(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        bytes: &[u8],
    ) -> Result<FileWrite, WcStatus> {
        let file = self.file_to_write(owner, filekey)?;
        let Some(ended) = self.one_sided_writes_ended.try_read().filter(|ended| !**ended) else {
            return Err(WcStatus::RemoteOperation);
        };
        let Some(shared) = file.order.try_read() else { return Ok(FileWrite::Faults) };
        let changes = self.exposed_changes(&file, offset, bytes)?;
        let done = match self.pages.mapped() {
            // It changes nothing before it has the pages' locks, and waits for nothing then.
            None => block_on(poll_once(self.change_exposed(&NoDisk, &file, &changes, bytes))),
            Some(pool) if self.pages.may_overwrite_at_once(pool, &changes) => {
                let disk = self.pages.mapped_disk(pool);
                Some(block_on(self.change_exposed(disk.as_ref(), &file, &changes, bytes)))
            }
            Some(_) => None,
        };
        drop((shared, ended));
        done.map_or(Ok(FileWrite::Faults), |done| done.map(|()| FileWrite::Done))
    }

    /// The fault thread's part, which waits for other changes of the pages, and for the device.
    pub(super) fn resolve_write_fault(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), WcStatus> {
        // Resolved again, because the filekey may have been closed meanwhile.
        let file = self.file_to_write(owner, filekey)?;
        // Taken before the next lock, so that a stop does not wait for a request that has the file.
        let _shared = block_on(file.order.read());
        let ended = self.one_sided_writes_ended.read();
        if *ended {
            return Err(WcStatus::RemoteOperation);
        }
        let changes = self.exposed_changes(&file, offset, bytes)?;
        let Some(pool) = self.pages.mapped() else {
            return block_on(self.change_exposed(&NoDisk, &file, &changes, bytes));
        };
        self.fault_in(pool, &changes);
        block_on(self.change_exposed(self.pages.mapped_disk(pool).as_ref(), &file, &changes, bytes))
    }

    fn fault_in(&self, pool: &CachedPool, changes: &[PageChange]) {
        add(&self.pages.counters.odp_faults, 1);
        add(&self.pages.counters.odp_fault_pages, changes.len() as u64);
        if changes.iter().all(|change| pool.is_cached(change.pool.byte_offset(), PAGE_SIZE)) {
            return;
        }
        self.wait_for_rnic(RNIC_STALLS);
        changes.iter().for_each(|change| pool.touch(change.pool.byte_offset(), PAGE_SIZE));
        self.wait_for_rnic(RNIC_RESUMES);
    }

    /// Whether the policy exposes pages to one-sided writes, without grants.
    pub(super) fn is_exposed(&self) -> bool {
        matches!(self.pages.policy().exposure, Exposure::Pinned | Exposure::Faulting)
    }

    /// The file of a filekey, if peers may write its pages.
    fn file_to_write(&self, owner: RegionOwner, filekey: FileKey) -> Result<Arc<FileRegion>, WcStatus> {
        if !self.is_exposed() {
            return Err(WcStatus::RemoteInvalid);
        }
        match self.resolve(owner, filekey) {
            Ok((file, rights)) if rights.write => Ok(file),
            _ => Err(WcStatus::RemoteAccess),
        }
    }

    /// The page changes of a write. The caller shares the file's order.
    fn exposed_changes(
        &self,
        file: &FileRegion,
        offset: u64,
        bytes: &[u8],
    ) -> Result<Vec<PageChange>, WcStatus> {
        file.usable().map_err(refusal)?;
        file.check_marks(false).map_err(|_| WcStatus::RemoteAccess)?;
        let state = file.state();
        let is_inside = offset.checked_add(bytes.len() as u64).is_some_and(|end| end <= state.size);
        let changes = is_inside.then(|| changes_of(&state, offset, bytes.len())).flatten();
        let changes = changes.ok_or(WcStatus::RemoteAccess)?;
        let is_pinned = self.pages.policy().exposure == Exposure::Pinned;
        if is_pinned && !changes.iter().all(|change| self.pages.is_resident(change.pool)) {
            return Err(WcStatus::RemoteOperation);
        }
        Ok(changes)
    }

    async fn change_exposed(
        &self,
        disk: &dyn Disk,
        file: &Arc<FileRegion>,
        changes: &[PageChange],
        bytes: &[u8],
    ) -> Result<(), WcStatus> {
        let changed = self.pages.change(disk, &**file, changes, NewBytes::From(Source::Bytes(bytes))).await;
        add(&self.pages.counters.target_writes, changes.len() as u64);
        // After the change: a write-back that takes the file off the list sees the change.
        self.list_dirty(file);
        changed.map_err(refusal)
    }

    /// Ends one-sided changes: when this returns, all that the engine and fault threads had under way are over, and no later one changes anything.
    pub fn end_one_sided_writes(&self) {
        *self.one_sided_writes_ended.write() = true;
        self.fault_jobs.end();
    }
}

fn refusal(status: Status) -> WcStatus {
    if status == Status::Stale { WcStatus::RemoteAccess } else { WcStatus::RemoteOperation }
}
