//! The state that all workers share: metadata, files, sessions, and the steps that join them.
//!
//! # How it works
//! Names and attributes go to `meta`, bytes to `files`. Operations that need both (truncation, the last close of an unlinked file) are joined here
//! and nowhere else.

use crate::counters::ServerCounters;
use crate::files::{self, Changed, ClosedRegion, FileRegion, Files};
use crate::locks::Locks;
use crate::meta::ClientChange;
use crate::meta::{Caller, DataCommit, Meta, Operation, Outcome};
use crate::pages::window::ServedWindow;
use crate::pages::{ScrubFigures, Source};
use crate::pool::{Disk, PageSums};
use crate::rights::{Exports, Identity, Judge, RegionMacs, Tickets};
use crate::rnics::{RnicIndex, Rnics};
use crate::rpc::connections::Connections;
use crate::serve::Drain;
use crate::serve::rotten::RottenPages;
use crate::session::{Session, Sessions};
use crate::shares::Shares;
use cuttlefs_common::attr::{Attr, FileKind, SetAttr};
use cuttlefs_common::ids::{ClientId, FileKey, FilePage, InodeNo};
use cuttlefs_common::rdma::{Endpoint, PeerKey, RegionOwner};
use cuttlefs_common::rpc::{Restored, Rights, Sampling};
use cuttlefs_common::status::Status;
use cuttlefs_common::world::Clock;
use parking_lot::{Mutex, RwLock};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How often files without a name are tried again that could not be freed.
pub(crate) const UNFREED_AGAIN: Duration = Duration::from_secs(10);

/// A server without its threads and links.
pub struct Server {
    /// Names, attributes, durable mappings.
    pub meta: Arc<Meta>,
    /// Mappings, filekeys, and the pages below.
    pub files: Arc<Files>,
    /// Sessions of clients.
    pub sessions: Sessions,
    /// Clients' advisory locks.
    pub locks: Locks,
    /// The clients that are admitted, and the bounds that apply to each.
    pub admission: Admission,
    /// Checksums of pages, and the scrub that looks for rot.
    pub integrity: Integrity,
    /// Facts about the server, for clients and for `status`.
    pub about: About,
    /// The window of pages that RNICs translate, if there is one.
    pub page_window: Option<ServedWindow>,
    /// The RNICs, and the memory that is registered with each for all clients.
    pub rnics: Rnics,
    /// The clock.
    pub clock: Arc<dyn Clock>,
    /// Figures.
    pub counters: ServerCounters,
    /// Whether the server is going down.
    pub drain: Drain,
    /// Held for reading while a file without a name is made and opened. Held for writing by whoever looks for files without a name that nobody has
    /// open.
    pub opens_nameless: RwLock<()>,
    /// Files without a name that nobody has open could not be freed: they are tried again.
    pub unfreed: AtomicBool,
}

/// The clients that are admitted, and the bounds that apply to each.
pub struct Admission {
    /// The rules of the export: peers, directories and rights.
    pub exports: Exports,
    /// The proofs with which clients show that they had files open.
    pub tickets: Tickets,
    /// The proofs in region keys.
    pub region_macs: RegionMacs,
    /// Clients' connections.
    pub connections: Connections,
    /// Each peer's use of bounded resources.
    pub shares: Shares,
}

/// Checksums of pages, and the scrub that looks for rot.
pub struct Integrity {
    /// The checksums.
    pub sums: Arc<PageSums>,
    /// How far the scrub is.
    pub scrub: Mutex<ScrubFigures>,
    /// The files of the rotten pages that the scrub found.
    pub rotten: RottenPages,
}

/// Facts about a server, for clients and for `status`. Fixed at its start, but for its endpoints.
pub struct About {
    /// A number that differs at each start.
    pub epoch: u64,
    /// The endpoints at which it listens, each with its RNIC; filled once the links are up.
    pub endpoints: Mutex<Vec<(RnicIndex, Endpoint)>>,
    /// Worker threads.
    pub workers: usize,
    /// How clients count one-sided reads.
    pub sampling: Sampling,
    /// Whether a request's changes are durable before its answer is sent.
    pub durable_answers: bool,
    /// Whether every client may read the frames and tables by itself.
    pub trust_clients: bool,
}

/// The requester of an operation, and the notes of its changes.
#[derive(Clone, Copy)]
pub struct Asker<'a> {
    /// The identity under which the request runs.
    pub who: &'a Identity,
    /// The session.
    pub owner: RegionOwner,
    /// The changes that may have to be durable before the answer.
    pub changed: &'a Changed,
}

impl Server {
    /// Runs an operation on metadata, if the requester may do it. A file that loses its last name always becomes an orphan first: `settle` decides
    /// under the region's own locks whether it is freed. An orphan gets a name only while it is open, for otherwise it may be in the course of being
    /// freed.
    ///
    /// # Errors
    /// As POSIX says.
    pub fn execute(&self, asker: Asker<'_>, operation: &Operation<'_>) -> Result<Outcome, Status> {
        let Asker { who, owner, changed } = asker;
        let names = matches!(operation, Operation::Link { .. });
        let is_open = |ino| !names || self.files.opens(ino) > 0;
        if !who.checked {
            return self.meta.execute(caller(who), operation, &is_open).inspect(|_| changed.note_records());
        }
        let judge = Judge { meta: &self.meta, who };
        let writes = Rights { read: false, write: true };
        let outcome = self.meta.execute_judged(caller(who), operation, &is_open, &|operation| {
            judge.may_change(operation, |ino| self.files.has_open(owner, ino, writes))
        });
        outcome.inspect(|_| changed.note_records())
    }

    /// Takes a file's privileges (set-id bits, capabilities) that the requester may not keep, before it changes the file's contents. This is a batch
    /// of its own, which does not name the request.
    ///
    /// # Errors
    /// `Stale`, `Io`.
    pub fn take_privileges(&self, asker: Asker<'_>, ino: InodeNo) -> Result<(), Status> {
        let Asker { who, changed, .. } = asker;
        if !who.drops_privileges {
            return Ok(());
        }
        let attr = self.meta.attr(ino)?;
        if !attr.has_privileges() {
            return Ok(());
        }
        // Metadata knows one group of the caller only. A caller with the file's group among its supplementary groups counts as in that group.
        let gid = if who.is_in(attr.gid) { attr.gid } else { who.gid };
        let caller = Caller { gid, request: None, ..caller(who) };
        self.meta
            .execute(caller, &Operation::DropPrivileges { ino }, &|_| true)
            .map(|_| changed.note_records())
    }

    /// Changes attributes; `data` is the change of the durable mapping by a truncation.
    ///
    /// # Errors
    /// As POSIX says.
    pub fn set_attr(
        &self,
        asker: Asker<'_>,
        ino: InodeNo,
        set: &SetAttr,
        data: Option<DataCommit>,
    ) -> Result<Attr, Status> {
        let operation = Operation::SetAttr { ino, set: *set, commit: data.map(Box::new) };
        self.execute(asker, &operation)?.attr.ok_or(Status::Io)
    }

    /// Changes a file's length, and the other attributes of `set` in the same batch.
    ///
    /// # Errors
    /// As POSIX says.
    pub async fn truncate(
        &self,
        disk: &dyn Disk,
        asker: Asker<'_>,
        ino: InodeNo,
        size: u64,
        set: &SetAttr,
    ) -> Result<Attr, Status> {
        let file = self.files.file(ino)?;
        let commit = |data| self.set_attr(asker, ino, set, Some(data));
        let changing = files::begin_change(&self.files, &file, asker.changed).await?;
        let attr = files::truncate(&self.files, disk, &file, size, commit).await?;
        // Also if the file was not longer: bytes that other clients wrote behind the new end and may restore are cut off, too.
        changing.done(attr.change, size..u64::MAX);
        Ok(attr)
    }

    /// Restores a change of a client after its server was killed. Returns whether some of it is lost.
    ///
    /// # Errors
    /// As the change itself.
    pub async fn restore(
        &self,
        disk: &dyn Disk,
        asker: Asker<'_>,
        file: &Arc<FileRegion>,
        by: (ClientChange, &PeerKey),
        what: Restored<Source<'_>>,
    ) -> Result<bool, Status> {
        let set_length = async |size| {
            let set = SetAttr { size: Some(size), ..SetAttr::default() };
            let commit = |data| self.set_attr(asker, file.ino(), &set, Some(data));
            files::restore_length(&self.files, disk, file, size, commit).await
        };
        files::restore(&self.files, disk, file, by, what, set_length, asker.changed).await
    }

    /// Finishes an operation: frees an inode that has lost its last name, if nobody has it open.
    pub async fn settle(&self, outcome: Outcome) {
        if let Some(ino) = outcome.orphaned {
            self.reap(ino).await;
        }
    }

    /// Inodes without a name, without those that a request has made and not opened yet.
    pub fn orphans(&self) -> Vec<InodeNo> {
        let _no_maker = self.opens_nameless.write();
        self.meta.orphans()
    }

    /// Frees an orphan, unless somebody has it open: then the last close frees it. In the grace period orphans stay, because clients may reclaim what
    /// they had open; the end of that period frees them.
    pub async fn reap(&self, ino: InodeNo) {
        if self.sessions.is_grace_period() {
            return;
        }
        let result = match self.meta.attr(ino) {
            Ok(attr) if matches!(attr.kind, FileKind::File | FileKind::Directory) => {
                let mut below = FilePage(u64::MAX);
                let step = || {
                    let next = self.meta.reap_step(ino, below)?.1;
                    below = next.unwrap_or(below);
                    Ok(next.is_some())
                };
                files::reap(&self.files, ino, step).await.map(drop)
            }
            Ok(_) => self.meta.reap(ino).map(|_| ()),
            Err(status) => Err(status),
        };
        match result {
            // Busy: it is open. Stale, NotFound: another task has freed it. Invalid: it got a name and was closed since.
            Ok(()) | Err(Status::Busy | Status::Stale | Status::NotFound | Status::Invalid) => {}
            Err(status) => {
                // One line for all that fail until the next try.
                if !self.unfreed.swap(true, Ordering::Relaxed) {
                    tracing::error!(%ino, %status, "an unlinked file could not be freed; it is tried again every {} s", UNFREED_AGAIN.as_secs());
                }
            }
        }
    }

    /// Makes it durable that a client has a session.
    pub fn remember(&self, session: &Session) -> Result<(), Status> {
        let put = Operation::PutClient { client: session.client(), owner: session.peer().key().clone() };
        self.meta.execute(Caller::default(), &put, &|_| true).map(|_| ())
    }

    /// Notes that these clients' sessions have ended and may come back. For that the clients that have been away for longest may be forgotten.
    pub fn note_absent(&self, sessions: &[Arc<Session>]) {
        let is_away = |session: &&Arc<Session>| self.sessions.of(session.client()).is_none();
        let away: Vec<&Arc<Session>> = sessions.iter().filter(is_away).collect();
        let known = away.iter().map(|session| (session.client(), session.peer().key().clone()));
        let forgotten = self.sessions.note_absent(known);
        self.end_sessions(away.iter().map(|session| session.client()));
        self.forget(&forgotten);
    }

    /// Notes that these clients have nothing open any more, so that no later start waits for them.
    pub fn end_sessions(&self, clients: impl IntoIterator<Item = ClientId>) {
        clients.into_iter().for_each(|client| self.drop_client(&Operation::EndSession { client }));
    }

    /// Forgets these clients, which are gone for good.
    pub fn forget(&self, clients: &[ClientId]) {
        clients.iter().for_each(|&client| self.drop_client(&Operation::RemoveClient { client }));
    }

    /// Runs an operation that drops a client's records. If it fails, the next start waits for that client in vain; nothing else is lost.
    fn drop_client(&self, operation: &Operation<'_>) {
        if let Err(status) = self.meta.execute(Caller::default(), operation, &|_| true) {
            tracing::error!(?operation, %status, "the records of a client that is gone could not be dropped");
        }
    }

    /// Closes filekeys, and frees each unlinked file whose last filekey was closed.
    pub async fn close(&self, owner: RegionOwner, filekeys: &[FileKey]) {
        for filekey in filekeys {
            // A key that is not known was closed before: closing is idempotent.
            self.closed_all(self.files.close(owner, *filekey).unwrap_or_default()).await;
        }
    }

    /// Ends the grace period for locks and restored changes, if all clients of the server before have come back, or none of the others can any more.
    pub fn settle_grace(&self) {
        if !self.sessions.is_grace_period() {
            self.locks.end_grace();
            self.files.newer.stop();
        }
    }

    /// Closes every filekey of a session that has ended.
    pub async fn revoke(&self, session: &Session) {
        self.closed_all(self.files.revoke(session.number())).await;
    }

    /// Does what the closing of files asks for: what was opened by region keys changes nothing any more when this returns, and each unlinked file is freed
    /// that nobody has open any more.
    pub async fn closed_all(&self, closed: Vec<ClosedRegion>) {
        let by_keys: BTreeSet<_> =
            closed.iter().filter(|closed| closed.by_key).map(|closed| closed.ino).collect();
        for file in by_keys.into_iter().filter_map(|ino| self.files.active(ino)) {
            files::settle(&file).await;
        }
        for closed in closed {
            self.closed(closed).await;
        }
    }

    async fn closed(&self, closed: ClosedRegion) {
        if closed.last && self.meta.attr(closed.ino).is_ok_and(|attr| attr.nlink == 0) {
            self.reap(closed.ino).await;
        }
    }
}

fn caller(who: &Identity) -> Caller {
    Caller {
        uid: who.uid,
        gid: who.gid,
        umask: who.umask,
        drops_privileges: who.drops_privileges,
        request: who.request,
        opens: who.opens,
    }
}
