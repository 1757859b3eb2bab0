//! Calls over a borrowed lane: a request is sent until it is answered.

use super::connect::BACKOFF_FIRST;
use super::exchange::{Broken, Place};
use super::lane::Lane;
use super::{Attach, Caller, DataBuffer, FsError, RemoteWindows, interrupt};
use cuttlefs_common::rpc::{HEADER_LEN, Reply, ReplyHeader, Request};
use cuttlefs_common::status::Status;
use parking_lot::MutexGuard;

/// A lane that one thread has borrowed.
pub(crate) struct LaneGuard<'s, S> {
    pub(super) session: &'s S,
    pub(super) lane: MutexGuard<'s, Lane>,
}

impl<'s, S: Attach> LaneGuard<'s, S> {
    pub(super) fn new(session: &'s S, mut lane: MutexGuard<'s, Lane>) -> Self {
        lane.used = true;
        Self { session, lane }
    }

    /// Whether the lane's connection stands, as far as this side knows.
    pub(crate) fn is_connected(&self) -> bool {
        self.lane.is_connected()
    }

    /// Whether the lane's connection is attached to this session, so that the session's attachment is valid for it.
    pub(crate) fn is_attached_to(&self, session: u64) -> bool {
        self.lane.connection.as_ref().is_some_and(|connection| connection.session == session)
    }

    /// The server's tables as they are READ over its connection, if that is attached to this session.
    pub(crate) fn windows_in(&self, session: u64) -> Option<RemoteWindows> {
        self.lane.connection.as_ref().filter(|connection| connection.session == session)?.windows
    }

    /// The lane itself.
    pub(crate) fn lane(&mut self) -> &mut Lane {
        &mut self.lane
    }

    /// Sends the request that `build` makes until it is answered, and hands the reply to `take`. `build` is called again for each attempt, because a
    /// recovery changes filekeys. Both get the lane's data buffer.
    ///
    /// The call returns `Interrupted` only if nothing was sent. After a send the server may have done the request: then its number is used up, and
    /// the lane is occupied until there is an answer, even if nobody wants it.
    pub(crate) fn call<'r, T>(
        &mut self,
        caller: &Caller,
        build: impl Fn(&DataBuffer) -> Request<'r>,
        take: impl FnOnce(Reply<'_>, &DataBuffer) -> Result<T, FsError>,
    ) -> Result<T, FsError> {
        self.call_where(caller, build, take, false)
    }

    /// As `call`, for a request that the next server may not do if this one has done it, and of which that server would not know. It is sent again in its
    /// session only, whose slot remembers the answer. If the session is over, it is given up: `MayBeDone`.
    pub(crate) fn call_in_one_session<'r, T>(
        &mut self,
        caller: &Caller,
        build: impl Fn(&DataBuffer) -> Request<'r>,
        take: impl FnOnce(Reply<'_>, &DataBuffer) -> Result<T, FsError>,
    ) -> Result<T, FsError> {
        self.call_where(caller, build, take, true)
    }

    fn call_where<'r, T>(
        &mut self,
        caller: &Caller,
        build: impl Fn(&DataBuffer) -> Request<'r>,
        take: impl FnOnce(Reply<'_>, &DataBuffer) -> Result<T, FsError>,
        in_one_session: bool,
    ) -> Result<T, FsError> {
        let link = self.session.link();
        let buffer = self.data();
        // Dropped after `_asking`: no recovery may run between an answer that opens a file or binds a range and the moment at which that is noted.
        let mut _in_session = None;
        let _asking = link.note_asking(self.lane.slot, self.lane.seq);
        let mut was_sent = false;
        // The session whose server may have done the request.
        let mut may_be_done_in = None;
        loop {
            if !was_sent && interrupt::is_interrupted() {
                return Err(FsError::Interrupted);
            }
            self.lane.ensure(self.session, !was_sent)?;
            if in_one_session && may_be_done_in.is_some_and(|session| session != self.session_number()) {
                // Its number may be used up. The slot is fresh in this session, and takes any.
                self.lane.seq += 1;
                return Err(FsError::MayBeDone);
            }
            let request = build(&buffer);
            let is_first = may_be_done_in.replace(self.session_number()).is_none();
            was_sent = true;
            let numbered = !request.needs_no_slot();
            let place = match numbered {
                true => Place { slot: self.lane.slot, seq: self.lane.seq },
                false => Place::NOWHERE,
            };
            match self.lane.exchange(link, caller, &request, place) {
                // The server has not looked at the request, so its number stays: it may have been done before the session ended.
                Ok(Ok(ReplyHeader { result: Err(Status::SessionExpired), .. })) => {
                    if is_first {
                        may_be_done_in = None;
                    }
                    self.lane.disconnect();
                }
                // The server has not looked at this request either: it is still at the one before, which came to it twice and changed nothing, so
                // that it runs again. The number must stay, or no later number would fit. Pause, so as not to loop at full speed.
                Ok(Ok(ReplyHeader { result: Err(Status::BadSequence), .. })) => {
                    tracing::warn!("the server refuses the slot's sequence number; reconnecting");
                    self.lane.disconnect();
                    link.pause(BACKOFF_FIRST);
                }
                Ok(Ok(header)) => {
                    if holds_session(&request) {
                        _in_session = self.session.hold(self.session_number());
                        if _in_session.is_none() {
                            // The answer came late, and names what is of a session that is over. In the next session the answer is another one, which
                            // recovery has asked for.
                            self.lane.disconnect();
                            continue;
                        }
                    }
                    self.lane.seq += u64::from(numbered);
                    match header.result {
                        Ok(()) => {
                            let reply = Reply::parse(&self.lane.message[HEADER_LEN..]).map_err(|error| {
                                tracing::error!(%error, "server sent a reply this client cannot read");
                                FsError::Server(Status::Io)
                            })?;
                            return take(reply, &buffer);
                        }
                        Err(status) => return Err(FsError::Server(status)),
                    }
                }
                Ok(Err(status)) => return Err(FsError::Server(status)),
                Err(Broken::ShutDown) => return Err(FsError::ShutDown),
                Err(Broken::Disconnected(reason)) => {
                    self.lane.disconnect();
                    link.note_failure(self.lane.slot, &reason);
                }
            }
        }
    }

    /// The number of the connection's session, which is the one that answered the last call.
    pub(crate) fn session_number(&self) -> u64 {
        self.lane.connection.as_ref().map_or(0, |connection| connection.session)
    }

    /// A number that names the standing connection, if there is one.
    pub(crate) fn connection_number(&self) -> Option<u64> {
        self.lane.connection.as_ref().map(|connection| u64::from(connection.qp.number().0))
    }

    /// The lane's registered data buffer.
    pub(crate) fn data(&self) -> DataBuffer {
        self.lane.data()
    }
}

/// Whether what the answer tells is of its session only: it must be noted before a recovery of the next one.
fn holds_session(request: &Request<'_>) -> bool {
    request.opens().is_some() || matches!(request, Request::Bind { .. } | Request::OpenRegion { .. })
}
