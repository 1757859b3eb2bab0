//! What all workers share: metadata, regions, sessions, and the steps that join them.
//!
//! # How it works
//! Names and attributes go to `meta`, bytes to `regions` and `tier`. Where one operation needs both (truncation,
//! the last close of an unlinked file) the joint is here, and only here.

use crate::counters::ServerCounters;
use crate::early::Early;
use crate::locks::Locks;
use crate::meta::{Caller, DataCommit, Meta, Operation, Outcome, RequestId};
use crate::pool::{Disk, PageSums};
use crate::region::{ClientChange, ClosedRegion, FileRegion, Regions};
use crate::rights::{Exports, Identity, Judge, Tickets};
use crate::rpc::connections::Connections;
use crate::serve::Drain;
use crate::serve::rotten::RottenPages;
use crate::session::{Session, Sessions};
use crate::shares::Shares;
use crate::tier::{self, ScrubFigures};
use cuttlefs_common::attr::{Attr, FileKind, SetAttr, SetTime};
use cuttlefs_common::ids::{ClientId, FileKey, FilePage, InodeNo, SlotIndex};
use cuttlefs_common::rdma::{Device, Endpoint, PeerKey, RegionOwner};
use cuttlefs_common::rpc::{Restored, Rights, Sampling, Unanswered};
use cuttlefs_common::status::Status;
use cuttlefs_common::world::Clock;
use parking_lot::{Mutex, RwLock};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A server, but for its threads and links.
pub struct Server {
    /// Names, attributes, durable mappings.
    pub meta: Arc<Meta>,
    /// Frames, mappings, filekeys.
    pub regions: Arc<Regions>,
    /// Clients.
    pub sessions: Sessions,
    /// Their connections.
    pub connections: Connections,
    /// What each peer has of what is bounded.
    pub shares: Shares,
    /// The RNIC.
    pub device: Arc<dyn Device>,
    /// To whom, and with which rights.
    pub exports: Exports,
    /// How clients prove that they had files open.
    pub tickets: Tickets,
    /// Differs at each start.
    pub epoch: u64,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Figures.
    pub counters: ServerCounters,
    /// Where it listens; filled once links are up.
    pub endpoints: Mutex<Vec<Endpoint>>,
    /// What protects connections between machines, for people.
    pub network_security: &'static str,
    /// Worker threads.
    pub workers: usize,
    /// How clients count one-sided reads.
    pub sampling: Sampling,
    /// Checksums of pages.
    pub sums: Arc<PageSums>,
    /// Where the scrub is.
    pub scrub: Mutex<ScrubFigures>,
    /// Whose the pages are that it finds.
    pub rotten: RottenPages,
    /// Whether it is going down.
    pub drain: Drain,
    /// Small writes that are acknowledged before they are executed.
    pub early: Early,
    /// Clients' advisory locks.
    pub locks: Locks,
    /// Taken for reading while a file without a name is made and opened; for writing by who looks for files without a name
    /// that nobody has open.
    pub opens_nameless: RwLock<()>,
}

impl Server {
    /// Runs an operation on metadata, if who asks may do it; `owner` is the session. A file that loses its last name always
    /// becomes an orphan first: whether it may go is decided by `settle` under the region's own locks. An orphan gets a name
    /// only while it is open: what is being freed is not.
    ///
    /// # Errors
    /// As POSIX says.
    pub fn execute(
        &self,
        who: &Identity,
        owner: RegionOwner,
        operation: &Operation<'_>,
    ) -> Result<Outcome, Status> {
        let names = matches!(operation, Operation::Link { .. });
        let is_open = |ino| !names || self.regions.opens(ino) > 0;
        if !who.checked {
            return self.meta.execute(caller(who), operation, &is_open);
        }
        let judge = Judge { meta: &self.meta, who };
        let writes = Rights { read: false, write: true };
        self.meta.execute_judged(caller(who), operation, &is_open, &|operation| {
            judge.may_change(operation, |ino| self.regions.has_open(owner, ino, writes))
        })
    }

    /// Somebody is about to change a file's contents: what he may not keep of its privileges (set-id bits, capabilities) goes
    /// first, in a batch of its own, which says nothing of the request.
    ///
    /// # Errors
    /// `Stale`, `Io`.
    pub fn take_privileges(&self, who: &Identity, ino: InodeNo) -> Result<(), Status> {
        if !who.drops_privileges {
            return Ok(());
        }
        let attr = self.meta.attr(ino)?;
        if !attr.has_privileges() {
            return Ok(());
        }
        // Who is in the file's group by one of his further groups is in it.
        let gid = if who.is_in(attr.gid) { attr.gid } else { who.gid };
        let caller = Caller { gid, request: None, ..caller(who) };
        self.meta.execute(caller, &Operation::DropPrivileges { ino }, &|_| true).map(|_| ())
    }

    /// Changes attributes; `data` is what a truncation does to the durable mapping.
    ///
    /// # Errors
    /// As POSIX says.
    pub fn set_attr(
        &self,
        who: &Identity,
        owner: RegionOwner,
        ino: InodeNo,
        set: &SetAttr,
        data: Option<DataCommit>,
    ) -> Result<Attr, Status> {
        let operation = Operation::SetAttr { ino, set: *set, commit: data.map(Box::new) };
        self.execute(who, owner, &operation)?.attr.ok_or(Status::Io)
    }

    /// Changes a file's length, and the other attributes of `set` in the same batch.
    ///
    /// # Errors
    /// As POSIX says.
    pub async fn truncate(
        &self,
        disk: &dyn Disk,
        who: &Identity,
        owner: RegionOwner,
        ino: InodeNo,
        size: u64,
        set: &SetAttr,
    ) -> Result<Attr, Status> {
        let file = self.regions.file(ino)?;
        // That anything else was set only the batch says. A change of length sets the time by itself.
        let mtime = set.mtime.filter(|mtime| *mtime != SetTime::Now);
        let others = SetAttr { size: None, mtime, ..*set };
        let request = who.request.filter(|_| others == SetAttr::default());
        let commit = |data| self.set_attr(who, owner, ino, set, Some(data));
        let changing = tier::begin_change(&self.regions, &file).await?;
        let attr = tier::truncate(&self.regions, disk, &file, size, request, commit).await?;
        // Also where the file was not longer: what others had written there, and bring back, was cut off.
        changing.done(attr.change, size..u64::MAX);
        Ok(attr)
    }

    /// Makes a change again that a client's server was killed after; whether some of it is lost.
    ///
    /// # Errors
    /// As the change itself.
    pub async fn restore(
        &self,
        disk: &dyn Disk,
        who: &Identity,
        owner: RegionOwner,
        file: &Arc<FileRegion>,
        by: (ClientChange, &PeerKey),
        what: Restored<tier::Source<'_>>,
    ) -> Result<bool, Status> {
        let set_length = async |size| {
            let set = SetAttr { size: Some(size), ..SetAttr::default() };
            let commit = |data| self.set_attr(who, owner, file.ino(), &set, Some(data));
            tier::restore_length(&self.regions, disk, file, size, commit).await
        };
        tier::restore(&self.regions, disk, file, by, what, set_length).await
    }

    /// Where every answered mutation is durable: waits until everything done so far is.
    ///
    /// # Errors
    /// `Io` once the log or the store has failed.
    pub async fn acknowledge(&self) -> Result<(), Status> {
        if let Some(log) = self.regions.redo() {
            log.committed().await?;
            self.regions.meta.flush().await?;
        }
        Ok(())
    }

    /// What an operation leaves to do: an inode without names that nobody has open goes.
    pub async fn settle(&self, outcome: Outcome) {
        if let Some(ino) = outcome.orphaned {
            self.reap(ino).await;
        }
    }

    /// Inodes without a name: none of them is one that its maker is about to open.
    pub fn orphans(&self) -> Vec<InodeNo> {
        let _no_maker = self.opens_nameless.write();
        self.meta.orphans()
    }

    /// Frees an orphan unless somebody has it open; then the last close will. While clients of the server before this
    /// one may still come back for what they had open, it stays; the end of that time frees it. While it is kept for a request
    /// that is asked again, it stays, too; `let_go` frees it then.
    pub async fn reap(&self, ino: InodeNo) {
        if self.sessions.is_grace_period() || self.sessions.keeps(ino) {
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
                tier::reap(&self.regions, ino, step).await.map(drop)
            }
            Ok(_) => self.meta.reap(ino).map(|_| ()),
            Err(status) => Err(status),
        };
        match result {
            // Busy: open. Stale, NotFound: somebody else was faster. Invalid: it got a name, and was closed then.
            Ok(()) | Err(Status::Busy | Status::Stale | Status::NotFound | Status::Invalid) => {}
            Err(status) => {
                tracing::error!(%ino, %status, "an unlinked file could not be freed; it is tried again at the next start");
            }
        }
    }

    /// Keeps that a client has a session.
    pub fn remember(&self, client: ClientId) -> Result<(), Status> {
        self.meta.execute(Caller::default(), &Operation::PutClient { client }, &|_| true).map(|_| ())
    }

    /// These clients' sessions have ended, and they may come back. Who has been away for longest is forgotten for it.
    pub async fn note_absent(&self, clients: impl IntoIterator<Item = ClientId>) {
        let is_away = |client: &ClientId| self.sessions.of(*client).is_none();
        let away: Vec<ClientId> = clients.into_iter().filter(is_away).collect();
        let is_owed = |client| self.early.is_owed(client);
        let forgotten = self.sessions.note_absent(away.iter().copied(), &is_owed);
        self.end_sessions(away);
        for client in forgotten {
            if self.early.let_go(self, client).await {
                self.early.forget(client);
                self.forget(&[client]);
            }
        }
    }

    /// These clients have nothing open any more: no later start needs to wait for them.
    pub fn end_sessions(&self, clients: impl IntoIterator<Item = ClientId>) {
        clients.into_iter().for_each(|client| self.drop_client(&Operation::EndSession { client }));
    }

    /// Forgets these clients: they are gone for good.
    pub fn forget(&self, clients: &[ClientId]) {
        clients.iter().for_each(|&client| self.drop_client(&Operation::RemoveClient { client }));
    }

    /// What fails here costs the next start a wait, and nothing else.
    fn drop_client(&self, operation: &Operation<'_>) {
        if let Err(status) = self.meta.execute(Caller::default(), operation, &|_| true) {
            tracing::error!(?operation, %status, "the records of a client that is gone could not be dropped");
        }
    }

    /// Ends filekeys; unlinked files whose last key this was are freed.
    pub async fn close(&self, owner: RegionOwner, filekeys: &[FileKey]) {
        for filekey in filekeys {
            // A key that is not known was closed before: closing is idempotent.
            if let Ok(closed) = self.regions.close(owner, *filekey) {
                self.closed(closed).await;
            }
        }
    }

    /// When the last client of the server before this one has come back, or none will: locks are given out again.
    pub fn settle_grace(&self) {
        if !self.sessions.is_grace_period() {
            self.locks.end_grace();
            self.regions.newer.stop();
        }
    }

    /// Ends every filekey of a session that is over, and what is kept for it.
    pub async fn revoke(&self, session: &Session) {
        for closed in self.regions.revoke(session.number()) {
            self.closed(closed).await;
        }
        for ino in self.sessions.keep_nothing(session) {
            self.let_go(ino).await;
        }
    }

    /// A client asks these requests again: what the server before this one did of them, and was about a file, keeps that
    /// file until then.
    pub async fn keep(&self, session: &Session, unanswered: &[Unanswered]) {
        let done = |&Unanswered { slot, seq }: &Unanswered| {
            let request = RequestId { client: session.client(), slot, seq };
            // What cannot be read was logged; its request will be told so, too.
            let ino = self.meta.request_done(request).ok()??.ino?;
            self.meta.attr(ino).is_ok().then_some((slot, ino))
        };
        let wanted: BTreeMap<SlotIndex, InodeNo> = unanswered.iter().filter_map(done).collect();
        for ino in self.sessions.keep(session, &wanted) {
            self.let_go(ino).await;
        }
    }

    /// Nobody has an inode open any more, or no request keeps it: without a name it goes, if nothing else keeps it.
    pub async fn let_go(&self, ino: InodeNo) {
        if self.meta.attr(ino).is_ok_and(|attr| attr.nlink == 0) {
            self.reap(ino).await;
        }
    }

    async fn closed(&self, closed: ClosedRegion) {
        if closed.last {
            self.let_go(closed.ino).await;
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
    }
}
