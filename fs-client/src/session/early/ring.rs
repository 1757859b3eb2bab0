//! One ring of this client: its connection, what was written and not answered, and what is done when it breaks.
//!
//! # How it works
//! A write posts its record and waits until that is persistent, under the ring's lock; so at most one request is *in
//! flight*, posted and not known to be persistent. Answers are taken in the order of the requests, when the next write
//! comes or somebody waits for them.
//!
//! # Failure
//! A broken connection is made again, to whatever server answers now. If that finds no place, or no way for
//! `RECONNECT_PATIENCE`, the server is asked to let the ring go, and for a while its writes go the ordinary way. Once the ring
//! is welcomed or let go, or the server that answers offers no rings any more, everything that was persistent has been executed,
//! before any write that goes the ordinary way; the answers are lost, and nobody needs them. Who welcomes or lets go says which
//! number was executed last, and so what became of the one in flight.
//!
//! | the ring is | unanswered writes | the one in flight, at an offset | the one in flight, at the end |
//! | --- | --- | --- | --- |
//! | connected again or let go, and has done it | were executed | is done | is done |
//! | connected again, and has not | were executed | posted again under its number, or goes the ordinary way | the same |
//! | let go, and has not | were executed | goes the ordinary way | the same |
//! | offered no more | were executed | goes the ordinary way | an I/O error: it may have been done |
//! | refused, or its device failed | an I/O error at the file's next fsync or close | an I/O error | an I/O error |
//!
//! After an answer that the device failed all that is unanswered is waited for, and the ring connected again a while later: it is
//! refused if the server goes no further in it.
//!
//! A refused ring keeps its records, and the next server executes them: what was in flight must not be overtaken by
//! a write that went the ordinary way.

use super::super::{Attachment, BACKOFF_FIRST, BACKOFF_LONGEST, Session};
use super::Early;
use crate::file::volume::FsError;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rdma::RdmaError;
use cuttlefs_common::rpc::durable::{Sender, SenderError, SenderIdentity, Settings, Ticket, Wants};
use cuttlefs_common::rpc::{
    EARLY_UNANSWERED_MAX, EarlyOffer, EarlyWrite, EarlyWritten, early_settings, ring_client,
};
use cuttlefs_common::status::Status;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long a write waits for room in its ring, or for a server that is behind, before it goes the ordinary way; also how
/// often who waits for something else looks whether the mount ends.
const PATIENCE: Duration = Duration::from_millis(100);
/// How long nobody tries to connect a ring again that could not be connected.
const REST: Duration = Duration::from_secs(1);
/// How long a broken ring is tried to be connected again while the server is there: as long as one lost attempt takes, or
/// many that fail at once.
const RECONNECT_PATIENCE: Duration = Duration::from_secs(5);
/// Refusals after which there is no place: one alone may have been meant for a hello that the link damaged.
const REFUSALS: u32 = 3;

/// A ring.
pub(super) struct Ring {
    index: u16,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    sender: Option<Sender>,
    /// Number of the newest request that is settled one way or the other: what is posted next has the one after it.
    number: u64,
    /// Acknowledged, oldest first.
    unanswered: VecDeque<(Ticket, InodeNo)>,
    /// The receiver was behind for longer than patience lasts: until it says otherwise, nobody waits for it.
    is_behind: bool,
    /// The server could not do one of the writes: it may do none of the ring's any more. Whoever connects again hears.
    is_doubtful: bool,
    /// The session in which the ring was refused.
    lost_in: Option<u64>,
    /// Not connected before.
    rests_until: Option<Duration>,
    request: Vec<u8>,
    answer: Vec<u8>,
}

/// Why a step at a ring did not end as it should.
#[derive(Debug, thiserror::Error)]
enum Trouble {
    /// The connection.
    #[error(transparent)]
    Sender(#[from] SenderError),
    /// The mount.
    #[error("the mount ends")]
    ShutDown,
}

/// What is found when a broken ring is looked after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// It is connected again; the last number that was executed.
    Connected(u64),
    /// The server executed what it held, up to this number, and there is no connection.
    LetGo(u64),
    /// It is not offered any more.
    Withdrawn,
    /// It is lost until the server is restarted.
    Refused,
}

/// Whether the server has as many rings as it takes.
fn is_no_place(error: &SenderError) -> bool {
    matches!(error, SenderError::Rdma(RdmaError::Refused { .. }))
}

/// Whether connecting again cannot help.
fn is_lasting(error: &SenderError) -> bool {
    matches!(
        error,
        SenderError::Refused
            | SenderError::Device
            | SenderError::Ring(_)
            | SenderError::Rdma(RdmaError::Unsupported(_))
    )
}

impl Ring {
    pub(super) fn new(index: u16) -> Self {
        Self { index, state: Mutex::default() }
    }

    /// Writes early, or says that the write has to go the ordinary way.
    pub(super) fn write(
        &self,
        session: &Session,
        ino: InodeNo,
        at: Option<u64>,
        bytes: &[u8],
    ) -> Result<Early, FsError> {
        let mut state = self.state.lock();
        let write = EarlyWrite { client: session.client, ring: self.index, ino, at, bytes };
        state.request.clear();
        write.encode_into(&mut state.request);
        if state.sender.is_none() && !self.open(&mut state, session) {
            return Ok(Early::Ordinary);
        }
        let mut in_flight = false;
        let found = loop {
            match state.post(session, &mut in_flight) {
                Ok(Some(ticket)) => {
                    state.unanswered.push_back((ticket, ino));
                    session.early.unexecuted.add(ino);
                    return Ok(Early::Acknowledged);
                }
                Ok(None) => return Ok(Early::Ordinary),
                Err(Trouble::ShutDown) => return Err(FsError::ShutDown),
                Err(Trouble::Sender(error)) => match self.look_after(&mut state, session, &error)? {
                    Found::Connected(done) | Found::LetGo(done) if in_flight && state.was_done(done) => {
                        session.seen.forget(ino);
                        return Ok(Early::Acknowledged);
                    }
                    // What the ring held is done: it never will be unless it is posted again.
                    Found::Connected(_) => in_flight = false,
                    Found::LetGo(_) => return Ok(Early::Ordinary),
                    found => break found,
                },
            }
        };
        if !in_flight {
            return Ok(Early::Ordinary);
        }
        // Its number is not given out again: the server may have done it.
        state.number += 1;
        if at.is_some() && found != Found::Refused {
            return Ok(Early::Ordinary);
        }
        tracing::error!(%ino, ring = self.index, ?found, "a write was in flight when its ring was lost; nobody can tell whether it was done");
        Err(FsError::Server(Status::Io))
    }

    /// Waits until the early writes of a file, or all of this ring (`None`), are executed.
    pub(super) fn settle(&self, session: &Session, ino: Option<InodeNo>) -> Result<(), FsError> {
        let mut state = self.state.lock();
        while !state.unanswered.is_empty() && ino.is_none_or(|ino| session.early.unexecuted.has(ino)) {
            let deadline = session.now() + session.answer_patience();
            match state.wait_first(session, deadline) {
                Ok(()) => {}
                Err(Trouble::ShutDown) => return Err(FsError::ShutDown),
                // Whatever is found, nothing is unanswered then.
                Err(Trouble::Sender(error)) => {
                    self.look_after(&mut state, session, &error)?;
                }
            }
        }
        Ok(())
    }

    /// Lets go of the ring, its writes executed if that does not take long and is not held up by somebody.
    pub(super) fn end(&self, session: &Session, deadline: Duration) {
        let Some(mut state) = self.state.try_lock_for(deadline.saturating_sub(session.now())) else { return };
        while !state.unanswered.is_empty() {
            if let Err(error) = state.wait_first(session, deadline) {
                let left = state.unanswered.len();
                tracing::warn!(ring = self.index, left, %error, "the server executes the last early writes by itself");
                break;
            }
        }
        state.sender = None;
    }

    /// The first connection, or the first after a refusal or a rest. `false`: not now.
    fn open(&self, state: &mut State, session: &Session) -> bool {
        let Some(attachment) = session.attachment() else { return false };
        let Some(offer) = attachment.attached.early else { return false };
        let rests = state.rests_until.is_some_and(|until| session.now() < until);
        if rests || state.lost_in == Some(attachment.attached.session) {
            return false;
        }
        match self.connect(state, session, offer) {
            Ok(()) => true,
            Err(error) if is_lasting(&error) => {
                self.refuse(state, session, &attachment, &error);
                false
            }
            Err(error) => {
                tracing::debug!(ring = self.index, %error, "a ring could not be connected; its writes go the ordinary way");
                state.rests_until = Some(session.now() + REST);
                false
            }
        }
    }

    fn connect(&self, state: &mut State, session: &Session, offer: EarlyOffer) -> Result<(), SenderError> {
        let endpoint = offer
            .door
            .endpoint(&session.options.endpoint)
            .ok_or(SenderError::Protocol("the rings' door does not fit the link"))?;
        let depth = session.options.ring_depth;
        let settings = Settings { patience: PATIENCE, depth, ..early_settings(offer.kind) };
        let who = SenderIdentity { client: ring_client(session.client, self.index), secret: session.secret };
        let mut sender = Sender::connect_by(
            session.options.clock.clone(),
            session.device.clone(),
            &endpoint,
            who,
            settings,
        )?;
        sender.count_from(state.number);
        state.sender = Some(sender);
        (state.is_behind, state.is_doubtful, state.lost_in) = (false, false, None);
        Ok(())
    }

    /// The connection is broken: finds out what became of the ring, as the table above says. Nothing is unanswered
    /// afterwards.
    fn look_after(
        &self,
        state: &mut State,
        session: &Session,
        error: &SenderError,
    ) -> Result<Found, FsError> {
        tracing::debug!(ring = self.index, %error, "a ring's connection is lost");
        state.sender = None;
        let mut backoff = BACKOFF_FIRST;
        let give_up_at = session.now() + RECONNECT_PATIENCE;
        let mut refusals = 0;
        loop {
            // Waits for the server to be there.
            session.ask_server()?;
            let Some(attachment) = session.attachment() else { continue };
            let Some(offer) = attachment.attached.early else {
                state.all_executed(session);
                return Ok(Found::Withdrawn);
            };
            if is_lasting(error) {
                self.refuse(state, session, &attachment, error);
                return Ok(Found::Refused);
            }
            let connected = self.connect(state, session, offer);
            refusals += u32::from(connected.as_ref().is_err_and(is_no_place));
            match connected {
                Ok(()) => {
                    state.all_executed(session);
                    return Ok(Found::Connected(state.sender.as_ref().map_or(0, Sender::last_done)));
                }
                Err(error) if is_lasting(&error) => {
                    // A server that is stopping refuses rings, too, and so does one that took our lease for over. Then
                    // another session answers.
                    session.ask_server()?;
                    if session.is_current(&attachment) {
                        self.refuse(state, session, &attachment, &error);
                        return Ok(Found::Refused);
                    }
                }
                Err(error) if refusals >= REFUSALS || session.now() >= give_up_at => {
                    tracing::debug!(ring = self.index, %error, "a ring is let go");
                    match session.let_ring_go(self.index) {
                        Ok(done) => {
                            state.all_executed(session);
                            state.rests_until = Some(session.now() + REST);
                            return Ok(Found::LetGo(done));
                        }
                        Err(FsError::Server(_)) => {
                            // As above: it may be stopping.
                            session.ask_server()?;
                            if session.is_current(&attachment) {
                                self.refuse(state, session, &attachment, &error);
                                return Ok(Found::Refused);
                            }
                        }
                        Err(error) => return Err(error),
                    }
                }
                Err(error) => {
                    tracing::debug!(ring = self.index, %error, "a ring could not be connected again");
                }
            }
            session.rest(backoff);
            backoff = (backoff * 2).min(BACKOFF_LONGEST);
        }
    }

    /// The server has no ring for this client any more: nobody knows of the unanswered writes.
    fn refuse(&self, state: &mut State, session: &Session, attachment: &Attachment, error: &SenderError) {
        tracing::warn!(ring = self.index, %error, "small writes of this ring's files wait for the server again");
        state.lost_in = Some(attachment.attached.session);
        for (_, ino) in std::mem::take(&mut state.unanswered) {
            fail(session, ino, error);
            session.early.unexecuted.remove(ino);
        }
    }
}

/// An acknowledged write was not executed, or nobody knows.
fn fail(session: &Session, ino: InodeNo, error: &dyn std::fmt::Display) {
    tracing::error!(%ino, %error, "an acknowledged write was not done; the file's next fsync or close fails");
    session.seen.forget(ino);
    session.unsynced.losses().note(ino);
}

/// Takes a step again and again until it is done, the connection breaks, or it takes too long.
fn wait<T>(
    session: &Session,
    deadline: Duration,
    mut step: impl FnMut() -> Result<T, SenderError>,
) -> Result<T, Trouble> {
    loop {
        match step() {
            Err(SenderError::TimedOut(_)) if session.is_shut_down() => return Err(Trouble::ShutDown),
            Err(SenderError::TimedOut(_)) if session.now() < deadline => {}
            done => return Ok(done?),
        }
    }
}

impl State {
    /// Everything up to `done` was executed, and nothing else: whether the request that was in flight is. It is settled then.
    fn was_done(&mut self, done: u64) -> bool {
        if done <= self.number {
            return false;
        }
        self.number += 1;
        if let Some(sender) = &mut self.sender {
            sender.count_from(self.number);
        }
        true
    }

    /// Posts the request and waits until it is persistent. `None`: there is no room for it, or the server is behind.
    /// `in_flight` is set once the server may have it.
    fn post(&mut self, session: &Session, in_flight: &mut bool) -> Result<Option<Ticket>, Trouble> {
        self.take_answers(session)?;
        if self.is_doubtful {
            // Each of them hears what became of it.
            while !self.unanswered.is_empty() {
                self.wait_first(session, session.now() + session.answer_patience())?;
            }
            self.sender = None;
            self.rests_until = Some(session.now() + REST);
            return Ok(None);
        }
        let Some(sender) = &mut self.sender else { return Err(SenderError::Disconnected.into()) };
        if self.is_behind && sender.is_slowed()? {
            return Ok(None);
        }
        self.is_behind = false;
        let ticket = match sender.post(&self.request, Wants::Answer) {
            Ok(ticket) => ticket,
            Err(SenderError::Slowed(_)) => {
                self.is_behind = true;
                session.counters.early_slowed.fetch_add(1, Ordering::Relaxed);
                return Ok(None);
            }
            Err(SenderError::Full(_)) => {
                session.counters.early_full.fetch_add(1, Ordering::Relaxed);
                return Ok(None);
            }
            Err(error) => {
                *in_flight = true;
                return Err(error.into());
            }
        };
        assert_eq!(ticket.number(), self.number + 1, "a ring's requests are numbered without gaps");
        *in_flight = true;
        let deadline = session.now() + session.answer_patience();
        wait(session, deadline, || sender.wait_persistent(ticket))?;
        self.number = ticket.number();
        Ok(Some(ticket))
    }

    /// Takes the answers that are there; waits for the first if no more may be outstanding.
    fn take_answers(&mut self, session: &Session) -> Result<(), Trouble> {
        while self.unanswered.len() >= EARLY_UNANSWERED_MAX {
            self.wait_first(session, session.now() + session.answer_patience())?;
        }
        while let (Some((ticket, ino)), Some(sender)) = (self.unanswered.front().copied(), &mut self.sender) {
            let Some(status) = sender.take_answer(ticket, &mut self.answer)? else { break };
            self.answered(session, ino, status);
        }
        Ok(())
    }

    /// Waits for the first answer.
    fn wait_first(&mut self, session: &Session, deadline: Duration) -> Result<(), Trouble> {
        let (Some((ticket, ino)), Some(sender)) = (self.unanswered.front().copied(), &mut self.sender) else {
            return Err(SenderError::Disconnected.into());
        };
        let answer = &mut self.answer;
        let status = wait(session, deadline, || sender.wait_answer(ticket, answer))?;
        self.answered(session, ino, status);
        Ok(())
    }

    /// The first of the unanswered writes was answered. What that says is noted before the file has one less.
    fn answered(&mut self, session: &Session, ino: InodeNo, status: u32) {
        self.unanswered.pop_front();
        match (status, EarlyWritten::parse(&self.answer)) {
            (0, Ok(written)) => session.seen.changed_by_us(ino, written.change),
            (0, Err(error)) => {
                tracing::warn!(%ino, %error, "the server's answer to an early write does not parse");
                session.seen.forget(ino);
            }
            (code, _) => {
                let status = Status::from_code(code).unwrap_or(Status::Io);
                fail(session, ino, &status);
                // Anything else is about this write alone.
                self.is_doubtful |= matches!(status, Status::Io | Status::NoSpace);
            }
        }
        session.early.unexecuted.remove(ino);
    }

    /// All that was acknowledged has been executed; the answers, and with them the change counters, are lost.
    fn all_executed(&mut self, session: &Session) {
        for (_, ino) in std::mem::take(&mut self.unanswered) {
            session.seen.forget(ino);
            session.early.unexecuted.remove(ino);
        }
    }
}
