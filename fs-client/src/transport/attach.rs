//! The interface through which a lane uses the session whose requests it carries.

use super::{FsError, Lane, Link};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::RdmaError;
use std::sync::Arc;

/// The session that a link's lanes carry requests of.
pub(crate) trait Attach {
    /// The lanes, and what they share.
    fn link(&self) -> &Link;

    /// The first request on a connection, which brought `windows`. Gives the number of the session that the connection is of.
    ///
    /// # Errors
    /// The server refuses, or the connection broke.
    fn attach(&self, lane: &mut Lane, windows: &[Arc<SharedMemory>]) -> Result<u64, RdmaError>;

    /// Has what this mount holds at the server be of the session that the lane's connection is of, `number`, unless it is. `false`: the
    /// connection broke, or is of a session that is over.
    fn recover(&self, lane: &mut Lane, number: u64) -> Result<bool, FsError>;

    /// As long as what this gives is there, what the mount holds stays of this session. `None`: it is of another one.
    fn hold(&self, number: u64) -> Option<impl Sized + '_>;
}
