//! One-sided changes under write grants that have to wait: for a lock, for a page to come into a frame, for space, for metadata.
//!
//! # How it works
//! The queue pair of such a request is stalled, and a fault thread brings the request here. It hands it to a worker, which has a disk, and waits for
//! the answer. The worker makes the change as it makes one by RPC, and under the same locks checks what the engine would have checked. In a full pool
//! it takes the pages that the filekey's grants have set aside. A server in one thread has no worker that runs meanwhile: there the fault thread tries
//! once more, with leave to read the store.
//!
//! # Bounds
//! A queue pair has one fault under way, and there are at most `FAULT_THREADS_MAX` threads that wait here, so the jobs are bounded.
//!
//! # Failure
//! As the engine's (`one_sided`). At a stop the jobs that wait are dropped, and their requests are refused with `RemoteOperation`.

use super::change_word::{Word, WordChanged, change_word};
use super::grant_write::bring_all;
use super::one_sided::{By, Placed, refusal};
use super::restore::begin_change;
use super::write::{WriteAt, Writer, Written, end_of, write_within, zero_tail};
use super::{Changed, FileRegion, Files};
use crate::pages::{Source, add};
use crate::pool::disk::Disk;
use cuttlefs_common::fair::Payer;
use cuttlefs_common::ids::{FileKey, PAGE_SIZE_U64};
use cuttlefs_common::rdma::{FileAtomic, FileValue, FileWrite, RegionOwner, WcStatus};
use cuttlefs_common::status::Status;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

/// Jobs that wait for a worker: one for each fault thread, with room to spare.
const JOBS_MAX: usize = 256;
/// How often the pages of a write into pages that are set aside are brought into frames before the request is refused, because they are evicted each
/// time.
const BRING_ROUNDS: usize = 16;

/// A change to be made.
pub(super) enum OneSided {
    Write { offset: u64, bytes: Vec<u8> },
    Atomic { offset: u64, operation: FileAtomic },
    Append { bytes: Vec<u8> },
}

/// A change that waits for a worker.
pub struct FaultJob {
    payer: Payer,
    owner: RegionOwner,
    filekey: FileKey,
    what: OneSided,
    answer: mpsc::SyncSender<Result<u64, WcStatus>>,
}

impl FaultJob {
    /// The account for it: that of the peer that has the grant.
    pub fn payer(&self) -> Payer {
        self.payer
    }
}

/// The jobs that wait.
#[derive(Debug)]
pub(super) struct FaultJobs {
    sender: async_channel::Sender<FaultJob>,
    receiver: async_channel::Receiver<FaultJob>,
    /// Whether a worker takes jobs. Set once, before the first connection; relaxed.
    are_taken: AtomicBool,
}

impl Default for FaultJobs {
    fn default() -> Self {
        let (sender, receiver) = async_channel::bounded(JOBS_MAX);
        Self { sender, receiver, are_taken: AtomicBool::new(false) }
    }
}

impl FaultJobs {
    /// Refuses all jobs from now on, also those that wait.
    pub(super) fn end(&self) {
        self.receiver.close();
        while self.receiver.try_recv().is_ok() {}
    }
}

impl Files {
    /// The jobs for a worker.
    pub fn fault_jobs(&self) -> async_channel::Receiver<FaultJob> {
        self.fault_jobs.are_taken.store(true, Ordering::Relaxed);
        self.fault_jobs.receiver.clone()
    }

    /// Makes a change for which the engine would have to wait. On a fault thread. Returns the value before, or the offset of appended bytes.
    pub(super) fn resolve_fault_of_grant(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        what: OneSided,
    ) -> Result<u64, WcStatus> {
        add(&self.pages.counters.grant_faults, 1);
        if !self.fault_jobs.are_taken.load(Ordering::Relaxed) {
            return self.try_again((owner, filekey), &what).map_err(refusal);
        }
        let (answer, answered) = mpsc::sync_channel(1);
        // Without a grant it is refused in a moment.
        let granted = self.keyed(owner, filekey).ok();
        let payer = granted.and_then(|keyed| keyed.file.grants.lock().payer_of(filekey));
        let payer = payer.unwrap_or(Payer::OWN);
        let job = FaultJob { payer, owner, filekey, what, answer };
        self.fault_jobs.sender.send_blocking(job).map_err(|_| WcStatus::RemoteOperation)?;
        answered.recv().unwrap_or(Err(WcStatus::RemoteOperation))
    }

    fn try_again(&self, who: (RegionOwner, FileKey), what: &OneSided) -> Result<u64, Status> {
        let by = By::FaultThread;
        let value = match what {
            OneSided::Write { offset, bytes } => match self.try_write(who, *offset, bytes, by)? {
                FileWrite::Done => FileValue::Done(0),
                FileWrite::Faults => FileValue::Faults,
            },
            OneSided::Atomic { offset, operation } => self.try_atomic(who, *offset, *operation, by)?,
            OneSided::Append { bytes } => self.try_append(who, bytes, by)?,
        };
        match value {
            FileValue::Done(value) => Ok(value),
            FileValue::Faults => Err(Status::Busy),
        }
    }
}

/// Makes the change of a job and answers it.
pub async fn run_fault(files: &Files, disk: &dyn Disk, job: FaultJob) {
    let FaultJob { owner, filekey, what, answer, .. } = job;
    let result = change(files, disk, (owner, filekey), what).await;
    // The fault thread waits for as long as it has the other end.
    let _ = answer.send(result.map_err(refusal));
}

pub(super) async fn change(
    files: &Files,
    disk: &dyn Disk,
    (owner, filekey): (RegionOwner, FileKey),
    what: OneSided,
) -> Result<u64, Status> {
    let keyed = files.grantable(owner, filekey)?;
    let file = &keyed.file;
    if files.meta.attr(file.ino())?.has_privileges() {
        return Err(Status::Denied);
    }
    // It has no answer that could wait for a sync.
    let changed = Changed::default();
    let changing = begin_change(files, file, &changed).await?;
    let (at, bytes) = match what {
        OneSided::Atomic { offset, operation } => {
            let word = Word { offset, operation };
            let may = |start, end| files.check_overwrite(&keyed, filekey, start, end);
            let WordChanged { old, change } = change_word(files, disk, (file, filekey), word, &may).await?;
            add(&files.pages.counters.target_atomics, 1);
            if let Some(change) = change {
                changing.done(change, word.bytes());
            }
            return Ok(old);
        }
        OneSided::Write { offset, bytes } => (WriteAt::Offset(offset), bytes),
        OneSided::Append { bytes } => (WriteAt::End, bytes),
    };
    let may = |start, end| match at {
        WriteAt::Offset(_) => files.check_overwrite(&keyed, filekey, start, end),
        WriteAt::End => files.check_append(&keyed, filekey, start, end),
    };
    let source = Source::Bytes(&bytes);
    let Written { offset, attr, .. } =
        write_granted(files, disk, (file, filekey), at, source, Writer::Grant, &may).await?;
    changing.done(attr.change, offset..offset + bytes.len() as u64);
    match at {
        WriteAt::Offset(_) => Ok(0),
        WriteAt::End => {
            add(&files.pages.counters.target_appends, 1);
            Ok(offset)
        }
    }
}

/// Writes as `write_within` does; in a full pool, into the pages that the filekey's grants have set aside, if it has any.
///
/// # Errors
/// As `write_within`.
pub async fn write_granted(
    files: &Files,
    disk: &dyn Disk,
    (file, filekey): (&Arc<FileRegion>, FileKey),
    at: WriteAt,
    source: Source<'_>,
    writer: Writer<'_>,
    may: &dyn Fn(u64, u64) -> Result<(), Status>,
) -> Result<Written, Status> {
    match write_within(files, disk, file, at, source, writer, may).await {
        Err(Status::NoSpace) if file.grants.lock().has(filekey) => {}
        result => return result,
    }
    let bytes = source.to_vec();
    for _ in 0..BRING_ROUNDS {
        let alone = file.order.write().await;
        let offset = match at {
            WriteAt::Offset(offset) => offset,
            WriteAt::End => file.size(),
        };
        let end = end_of(offset, bytes.len())?;
        may(offset, end)?;
        if end > file.size() {
            zero_tail(files, disk, file).await?;
        }
        match files.place_at_once(file, filekey, offset, &bytes, writer)? {
            Placed::Done(attr) => return Ok(Written { offset, len: bytes.len() as u32, attr }),
            Placed::Lacking => return Err(Status::NoSpace),
            Placed::Waits(pages) => drop(files.pages.locks.lock_many(pages).await),
        }
        drop(alone);
        bring_all(files, disk, file, offset / PAGE_SIZE_U64, end.div_ceil(PAGE_SIZE_U64)).await?;
    }
    Err(Status::Busy)
}
