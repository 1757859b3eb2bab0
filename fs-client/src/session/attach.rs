//! Attaching: this mount's first message on every connection.

use super::Session;
use crate::transport::{Attach, FsError, Lane, Link, Told};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::RdmaError;
use cuttlefs_common::rpc::{Reply, Request};
use cuttlefs_common::status::Status;
use std::sync::Arc;

impl Attach for Session {
    fn link(&self) -> &Link {
        &self.link
    }

    fn attach(&self, lane: &mut Lane, windows: &[Arc<SharedMemory>]) -> Result<Told, RdmaError> {
        let request = Request::Attach {
            secret: self.secret,
            label: &self.options.label,
            subtree: &self.options.subtree,
        };
        let refused =
            |reason: String| RdmaError::Refused { endpoint: self.link.endpoint().to_string(), reason };
        let attached = match lane.call_unnumbered(&self.link, &request)? {
            Ok(body) => match Reply::parse(body) {
                Ok(Reply::Attached(attached)) => attached,
                _ => {
                    return Err(refused("it does not speak this client's protocol".to_owned()));
                }
            },
            Err(Status::NotFound | Status::NotDirectory) => {
                return Err(refused(
                    "the directory to mount does not exist there: the `path` of the [[export]] that is for this client, or the \
                     subtree to mount below it; make it, and mount again"
                        .to_owned(),
                ));
            }
            Err(Status::Denied) => {
                return Err(refused(
                    "it exports nothing to this user or address, or not this subtree; an [[export]] of its cuttlefs.toml \
                     would have to be for it"
                        .to_owned(),
                ));
            }
            Err(status) => return Err(refused(status.to_string())),
        };
        let pool = *self.pool.get_or_init(|| attached.pool);
        if attached.pool != pool {
            return Err(refused(format!(
                "it serves another pool ({}) than the one that is mounted ({pool}); start the server of that one there again, \
                 or unmount (umount -f gives up what only the mount has)",
                attached.pool
            )));
        }
        let session = attached.session;
        let epoch = attached.server_epoch;
        let durable_answers = attached.durable_answers;
        let windows = self.attachment.attached(attached, windows, self.reads_tables());
        let mut recovered = self.recovered.lock();
        if recovered.number == 0 {
            // The mount's first attach: nothing is open yet.
            recovered.number = session;
            recovered.epoch = epoch;
            self.unsynced.begin_session(session, durable_answers);
            self.begin_locks(session);
        }
        Ok(Told { session, windows })
    }

    fn recover(&self, lane: &mut Lane, number: u64) -> Result<bool, FsError> {
        self.reclaim_in(lane, number)
    }

    fn hold(&self, number: u64) -> Option<impl Sized + '_> {
        Some(self.recovered.lock()).filter(|recovered| recovered.number == number)
    }
}
