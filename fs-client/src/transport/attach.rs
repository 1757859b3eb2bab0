//! The interface between a lane and the session whose requests it carries.

use super::{FsError, Lane, Link};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::RdmaError;
use std::sync::Arc;

/// The session whose requests a link's lanes carry.
pub(crate) trait Attach {
    /// The link: its lanes, and the state that they share.
    fn link(&self) -> &Link;

    /// Sends the first request on a connection, which brought `windows`. Returns the number of the session to which the connection is attached.
    ///
    /// # Errors
    /// The server refuses, or the connection broke.
    fn attach(&self, lane: &mut Lane, windows: &[Arc<SharedMemory>]) -> Result<u64, RdmaError>;

    /// Reclaims everything that this mount holds at the server in the session `number` of the lane's connection, unless that is done. `false`: the
    /// connection broke, or its session is over.
    fn recover(&self, lane: &mut Lane, number: u64) -> Result<bool, FsError>;

    /// While the returned guard exists, what the mount holds stays in this session. `None`: it is in another one.
    fn hold(&self, number: u64) -> Option<impl Sized + '_>;
}
