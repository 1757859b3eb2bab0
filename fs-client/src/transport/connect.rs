//! How a lane connects, attaches, reconnects and detaches.

use super::exchange::Place;
use super::lane::{Connection, Lane, MAX_RUNS, RECEIVES};
use super::{Attach, FsError, Link, interrupt};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::{ConnectOptions, QpConfig, QpState, RdmaError};
use cuttlefs_common::rpc::{POSTED_INLINE_BYTES, Request};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The time limit of one attempt to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The first and the longest pause between attempts to reconnect.
pub(super) const BACKOFF_FIRST: Duration = Duration::from_millis(10);
const BACKOFF_LONGEST: Duration = Duration::from_secs(1);

impl Lane {
    /// Tries once to connect, without attaching. Returns the windows of the server's memory that the link maps.
    pub(crate) fn connect_link(&mut self, link: &Link) -> Result<Vec<Arc<SharedMemory>>, RdmaError> {
        self.disconnect();
        let qp = QpConfig::new(&self.cq, (MAX_RUNS + 2) as u32, RECEIVES as u32).inline(POSTED_INLINE_BYTES);
        let receives = (0..RECEIVES).map(|index| self.receive(index)).collect();
        let options = ConnectOptions { qp, receives, timeout: CONNECT_TIMEOUT };
        let connected = link.pd.connect(&link.endpoint, options)?;
        self.connection = Some(Connection { qp: connected.qp, session: 0, windows: None });
        Ok(connected.windows)
    }

    /// Tries once to connect and attach.
    pub(crate) fn connect_once<S: Attach>(&mut self, session: &S) -> Result<(), RdmaError> {
        let link = session.link();
        let windows = self.connect_link(link)?;
        self.is_at_door = true;
        let attached = session.attach(self, &windows);
        self.is_at_door = false;
        let told = attached?;
        if let Some(connection) = &mut self.connection {
            connection.session = told.session;
            connection.windows = told.windows;
        }
        if link.is_shut_down() {
            // The mount may have detached before this attach, which has then begun another session.
            self.detach(link);
            self.disconnect();
            return Err(RdmaError::Closed);
        }
        self.is_standing.store(true, Ordering::Relaxed);
        if std::mem::replace(&mut self.was_connected, true) {
            link.counters().reconnects.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Detaches over a standing connection. Best effort: if the message is lost, the lease ends the session.
    pub(crate) fn detach(&mut self, link: &Link) {
        self.is_at_door = true;
        // The heartbeat uses up the number of a request that the end of the mount may have left unanswered: otherwise that answer would be taken for
        // the detach's.
        let is_said = [Request::Heartbeat, Request::Detach].iter().all(|request| {
            let place = Place { slot: self.slot, seq: self.seq };
            let answer = self.exchange(link, &link.own_caller(), request, place);
            self.seq += 1;
            matches!(answer, Ok(Ok(_)))
        });
        self.is_at_door = false;
        if !is_said {
            tracing::debug!("the server did not answer our good-bye; the session ends with its lease");
        }
    }

    /// Connects. Tries until it works or the mount ends; with `may_end` also until the caller is interrupted.
    fn connect<S: Attach>(&mut self, session: &S, may_end: bool) -> Result<(), FsError> {
        let link = session.link();
        let mut backoff = BACKOFF_FIRST;
        loop {
            if link.is_shut_down() {
                return Err(FsError::ShutDown);
            }
            if may_end && interrupt::is_interrupted() {
                return Err(FsError::Interrupted);
            }
            match self.connect_once(session) {
                Ok(()) => {
                    link.note_back(self.slot);
                    return Ok(());
                }
                Err(error) => {
                    self.disconnect();
                    link.note_failure(self.slot, &error);
                    link.pause(backoff);
                    backoff = (backoff * 2).min(BACKOFF_LONGEST);
                }
            }
        }
    }

    /// Makes sure that the lane has a connection to the session in which open files are reclaimed.
    pub(super) fn ensure<S: Attach>(&mut self, session: &S, may_end: bool) -> Result<(), FsError> {
        loop {
            match &self.connection {
                Some(connection) if connection.qp.state() == QpState::ReadyToSend => {
                    let number = connection.session;
                    if session.recover(self, number)? {
                        return Ok(());
                    }
                    self.disconnect();
                }
                _ => self.connect(session, may_end)?,
            }
        }
    }
}
