//! Where `Meta` meets the regions' narrow view of it (`MetaPort`), and the threads that make metadata durable for everybody
//! who waits (`GroupCommit`).

use crate::group_commit::GroupCommit;
use crate::meta::Meta;
use crate::pool::LocalFuture;
use crate::region::{DataCommit, MetaPort, NoteData, Written};
use cuttlefs_common::attr::Attr;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::region::Extent;
use cuttlefs_common::status::Status;
use std::sync::Arc;

/// Metadata with its committing threads.
pub struct CommittedMeta {
    meta: Arc<Meta>,
    flushes: GroupCommit,
    /// Apart from the flushes, which take longer and for which no answer is to wait.
    persists: GroupCommit,
}

impl CommittedMeta {
    /// Starts the threads.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn start(meta: Arc<Meta>) -> std::io::Result<Arc<Self>> {
        let (flushed, persisted) = (meta.clone(), meta.clone());
        let flushes = GroupCommit::start("committer", move || flushed.flush())?;
        let persists = GroupCommit::start("acknowledger", move || persisted.persist())?;
        Ok(Arc::new(Self { meta, flushes, persists }))
    }

    /// Without threads: whoever drives the server steps `commits`. For a server in one thread.
    pub fn by_hand(meta: Arc<Meta>) -> Arc<Self> {
        let (flushed, persisted) = (meta.clone(), meta.clone());
        let flushes = GroupCommit::by_hand(move || flushed.flush());
        let persists = GroupCommit::by_hand(move || persisted.persist());
        Arc::new(Self { meta, flushes, persists })
    }

    /// What makes it durable, without threads.
    pub fn commits(&self) -> [&GroupCommit; 2] {
        [&self.flushes, &self.persists]
    }

    /// Ends the threads; who still waits is served first.
    pub fn stop(&self) {
        self.flushes.stop();
        self.persists.stop();
    }
}

impl MetaPort for CommittedMeta {
    fn attr(&self, ino: InodeNo) -> Result<Attr, Status> {
        self.meta.attr(ino)
    }

    fn written(&self, ino: InodeNo) -> Result<Written, Status> {
        self.meta.written(ino)
    }

    fn has_room(&self) -> bool {
        self.meta.has_room()
    }

    fn takes_images(&self) -> bool {
        self.meta.takes_images()
    }

    fn extents(&self, ino: InodeNo) -> Result<Vec<Extent>, Status> {
        self.meta.extents(ino)
    }

    fn note_data(&self, ino: InodeNo, note: NoteData) -> Result<Attr, Status> {
        self.meta.note_data(ino, note)
    }

    fn commit_data(&self, commits: &[DataCommit]) -> Result<(), Status> {
        self.meta.commit_data(commits)
    }

    fn flush(&self) -> LocalFuture<'static, Result<(), Status>> {
        self.flushes.wait()
    }

    fn persist(&self) -> LocalFuture<'static, Result<(), Status>> {
        if self.meta.is_persistent() { Box::pin(std::future::ready(Ok(()))) } else { self.persists.wait() }
    }
}
