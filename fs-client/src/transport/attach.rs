//! The interface through which a lane uses the session whose requests it carries, and what a connection is told at its attach.

use super::{FsError, Lane, Link};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::{RdmaError, RemoteRange};
use cuttlefs_common::rpc::Attached;
use std::sync::Arc;

/// The server's tables, for READs over the connection that was told of them: a key is good at the RNIC that gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RemoteWindows {
    /// The frames.
    pub(crate) frames: RemoteRange,
    /// The residency table.
    pub(crate) residency: RemoteRange,
    /// The file table.
    pub(crate) files: RemoteRange,
    /// The window in which pool page N is at N pages, where the server has one: then bytes of pages are READ there, and not in the frames.
    pub(crate) pages: Option<RemoteRange>,
}

impl RemoteWindows {
    /// The tables that the server has told of.
    pub(crate) fn told(attached: &Attached) -> Option<Self> {
        let [frames, residency, files] = attached.windows?;
        Some(Self { frames, residency, files, pages: attached.page_window })
    }
}

/// What a connection is told at its attach.
pub(crate) struct Told {
    /// The number of the session that it is of.
    pub(crate) session: u64,
    /// The server's tables, where this side is to READ them.
    pub(crate) windows: Option<RemoteWindows>,
}

/// The session that a link's lanes carry requests of.
pub(crate) trait Attach {
    /// The link: its lanes, and the state that they share.
    fn link(&self) -> &Link;

    /// The first request on a connection, which maps `windows`.
    ///
    /// # Errors
    /// The server refuses, or the connection broke.
    fn attach(&self, lane: &mut Lane, windows: &[Arc<SharedMemory>]) -> Result<Told, RdmaError>;

    /// Reclaims everything that this mount holds at the server in the session `number` of the lane's connection, unless that is done. `false`: the
    /// connection broke, or its session is over.
    fn recover(&self, lane: &mut Lane, number: u64) -> Result<bool, FsError>;

    /// While the returned guard exists, what the mount holds stays in this session. `None`: it is in another one.
    fn hold(&self, number: u64) -> Option<impl Sized + '_>;
}
