//! The state that all workers share: metadata, files, sessions, and the steps that join them.
//!
//! # How it works
//! Names and attributes go to `meta`, bytes to `files`. Where one operation needs both (truncation,
//! the last close of an unlinked file) the joint is here, and only here.

use crate::counters::ServerCounters;
use crate::files::{self, Changed, ClosedRegion, FileRegion, Files};
use crate::locks::Locks;
use crate::meta::ClientChange;
use crate::meta::{Caller, DataCommit, Meta, Operation, Outcome};
use crate::pages::{ScrubFigures, Source};
use crate::pool::{Disk, PageSums};
use crate::rights::{Exports, Identity, Judge, Tickets};
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
use std::sync::Arc;

/// A server, but for its threads and links.
pub struct Server {
    /// Names, attributes, durable mappings.
    pub meta: Arc<Meta>,
    /// Mappings, filekeys, and the pages below.
    pub files: Arc<Files>,
    /// Clients.
    pub sessions: Sessions,
    /// Clients' advisory locks.
    pub locks: Locks,
    /// Who may come, and how much of what is bounded he gets.
    pub admission: Admission,
    /// Checksums of pages, and who looks for rot.
    pub integrity: Integrity,
    /// What clients and people are told of it.
    pub about: About,
    /// The RNICs, and what is registered with each for all.
    pub rnics: Rnics,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Figures.
    pub counters: ServerCounters,
    /// Whether it is going down.
    pub drain: Drain,
    /// Taken for reading while a file without a name is made and opened; for writing by who looks for files without a name
    /// that nobody has open.
    pub opens_nameless: RwLock<()>,
}

/// Who may come, and how much of what is bounded he gets.
pub struct Admission {
    /// To whom, and with which rights.
    pub exports: Exports,
    /// How clients prove that they had files open.
    pub tickets: Tickets,
    /// Clients' connections.
    pub connections: Connections,
    /// What each peer has of what is bounded.
    pub shares: Shares,
}

/// Checksums of pages, and who looks for rot.
pub struct Integrity {
    /// The checksums.
    pub sums: Arc<PageSums>,
    /// Where the scrub is.
    pub scrub: Mutex<ScrubFigures>,
    /// Whose the pages are that it finds.
    pub rotten: RottenPages,
}

/// What clients and people are told of a server. Fixed at its start, but for where it listens.
pub struct About {
    /// Differs at each start.
    pub epoch: u64,
    /// Where it listens, and by which RNIC; filled once links are up.
    pub endpoints: Mutex<Vec<(RnicIndex, Endpoint)>>,
    /// Worker threads.
    pub workers: usize,
    /// How clients count one-sided reads.
    pub sampling: Sampling,
    /// What a request changed is durable before its answer leaves.
    pub durable_answers: bool,
}

/// Who asks for something, and what that changed.
#[derive(Clone, Copy)]
pub struct Asker<'a> {
    /// As whom.
    pub who: &'a Identity,
    /// The session.
    pub owner: RegionOwner,
    /// What is to be durable before the answer.
    pub changed: &'a Changed,
}

impl Server {
    /// Runs an operation on metadata, if who asks may do it. A file that loses its last name always
    /// becomes an orphan first: whether it may go is decided by `settle` under the region's own locks. An orphan gets a name
    /// only while it is open: what is being freed is not.
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

    /// Somebody is about to change a file's contents: what he may not keep of its privileges (set-id bits, capabilities) goes
    /// first, in a batch of its own, which says nothing of the request.
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
        // Who is in the file's group by one of his further groups is in it.
        let gid = if who.is_in(attr.gid) { attr.gid } else { who.gid };
        let caller = Caller { gid, request: None, ..caller(who) };
        self.meta
            .execute(caller, &Operation::DropPrivileges { ino }, &|_| true)
            .map(|_| changed.note_records())
    }

    /// Changes attributes; `data` is what a truncation does to the durable mapping.
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
    /// one may still come back for what they had open, it stays; the end of that time frees it.
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
            // Busy: open. Stale, NotFound: somebody else was faster. Invalid: it got a name, and was closed then.
            Ok(()) | Err(Status::Busy | Status::Stale | Status::NotFound | Status::Invalid) => {}
            Err(status) => {
                tracing::error!(%ino, %status, "an unlinked file could not be freed; it is tried again at the next start");
            }
        }
    }

    /// Keeps that a client has a session.
    pub fn remember(&self, session: &Session) -> Result<(), Status> {
        let put = Operation::PutClient { client: session.client(), owner: session.peer().key().clone() };
        self.meta.execute(Caller::default(), &put, &|_| true).map(|_| ())
    }

    /// These clients' sessions have ended, and they may come back. Who has been away for longest is forgotten for it.
    pub fn note_absent(&self, sessions: &[Arc<Session>]) {
        let is_away = |session: &&Arc<Session>| self.sessions.of(session.client()).is_none();
        let away: Vec<&Arc<Session>> = sessions.iter().filter(is_away).collect();
        let known = away.iter().map(|session| (session.client(), session.peer().key().clone()));
        let forgotten = self.sessions.note_absent(known);
        self.end_sessions(away.iter().map(|session| session.client()));
        self.forget(&forgotten);
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
            if let Ok(closed) = self.files.close(owner, *filekey) {
                self.closed(closed).await;
            }
        }
    }

    /// When the last client of the server before this one has come back, or none will: locks are given out again.
    pub fn settle_grace(&self) {
        if !self.sessions.is_grace_period() {
            self.locks.end_grace();
            self.files.newer.stop();
        }
    }

    /// Ends every filekey of a session that is over.
    pub async fn revoke(&self, session: &Session) {
        for closed in self.files.revoke(session.number()) {
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
