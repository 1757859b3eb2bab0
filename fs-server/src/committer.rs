//! Where `Meta` meets the regions' narrow view of it (`MetaPort`), and the thread that makes metadata durable for everybody
//! who waits (`GroupCommit`): fsync, answers that must be durable, space that is to be given out again.

use crate::group_commit::GroupCommit;
use crate::meta::Meta;
use crate::pool::LocalFuture;
use crate::region::{DataCommit, MetaPort, NoteData, Written};
use cuttlefs_common::attr::Attr;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::region::Extent;
use cuttlefs_common::status::Status;
use std::sync::Arc;

/// Metadata with its committing thread.
pub struct CommittedMeta {
    meta: Arc<Meta>,
    commits: GroupCommit,
}

impl CommittedMeta {
    /// Starts the thread.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(meta: Arc<Meta>) -> std::io::Result<Arc<Self>> {
        let flushed = meta.clone();
        let commits = GroupCommit::start("committer", move || flushed.flush())?;
        Ok(Arc::new(Self { meta, commits }))
    }

    /// Without a thread: whoever drives the server steps `commits`. For a server in one thread.
    pub fn by_hand(meta: Arc<Meta>) -> Arc<Self> {
        let flushed = meta.clone();
        let commits = GroupCommit::by_hand(move || flushed.flush());
        Arc::new(Self { meta, commits })
    }

    /// What makes it durable, without a thread.
    pub fn commits(&self) -> &GroupCommit {
        &self.commits
    }

    /// Ends the thread; who still waits is served first.
    pub fn stop(&self) {
        self.commits.stop();
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
        if self.meta.is_durable() { Box::pin(std::future::ready(Ok(()))) } else { self.commits.wait() }
    }
}
