//! One lane: a queue pair, a session slot and the memory its requests travel through.
//!
//! ```text
//! lane memory:  [ request 64 KiB | 2 receives of 64 KiB | data: 1 MiB + a page ]
//! ```
//!
//! The data part is where large writes are pulled from and where fetches and one-sided reads land.

use super::{BACKOFF_FIRST, BACKOFF_LONGEST, CONNECT_TIMEOUT, DETACH_PATIENCE, RECOVERY_SLOT, Session};
use crate::file::interrupt;
use crate::file::volume::{Caller, FsError};
use cuttlefs_common::ids::{FileKey, PAGE_SIZE, SlotIndex};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::{
    Access, Completion, CompletionKind, CompletionQueue, ConnectOptions, Device, MemoryRegion,
    ProtectionDomain, QpConfig, QpState, QueuePair, RdmaError, RecvWr, Remote, RemoteWindow, SendOp, SendWr,
    WcStatus, WrId,
};
use cuttlefs_common::rpc::{
    HEADER_LEN, MAX_INLINE_BYTES, MAX_MESSAGE_BYTES, MAX_TRANSFER_BYTES, Payload, RemoteBuffer, Reply,
    ReplyHeader, Request, RequestHeader,
};
use cuttlefs_common::status::Status;
use parking_lot::MutexGuard;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const MESSAGE: usize = MAX_MESSAGE_BYTES as usize;
/// Receives posted: the reply, and one more so that a late duplicate never waits for a buffer.
const RECEIVES: usize = 2;
const DATA_OFFSET: usize = MESSAGE * (1 + RECEIVES);
const DATA_LEN: usize = MAX_TRANSFER_BYTES as usize + PAGE_SIZE;
/// Memory of a lane.
pub(super) const LANE_BYTES: usize = DATA_OFFSET + DATA_LEN;
/// One-sided reads of one request at most: a request of 1 MiB whose every second page is absent.
const MAX_RUNS: usize = MAX_TRANSFER_BYTES as usize / PAGE_SIZE / 2 + 1;
/// Longest sleep before looking whether the mount ends.
const WAIT_SLICE: Duration = Duration::from_millis(500);
const SEND_ID: WrId = WrId(u64::MAX);

/// A connection that stands.
struct Connection {
    qp: Arc<dyn QueuePair>,
    /// The session it is attached to.
    session: u64,
}

/// How a request is numbered.
#[derive(Clone, Copy)]
struct Place {
    slot: SlotIndex,
    seq: u64,
}

impl Place {
    /// Answered outside of the slots. Such a request uses up no number: an attach comes between a request and its
    /// retransmission.
    const NOWHERE: Self = Self { slot: SlotIndex(0), seq: 0 };

    /// A request of a recovery. It has a slot of its own, whichever lane carries it: the lane's number belongs to the
    /// request that found the server gone and is sent again.
    const fn of_recovery(seq: u64) -> Self {
        Self { slot: RECOVERY_SLOT, seq }
    }
}

/// A queue pair with its slot and memory.
pub(crate) struct Lane {
    slot: SlotIndex,
    /// Number of the request in flight or the next one. It moves on when the reply is there and stays over
    /// reconnects: that is what makes a request run once.
    seq: u64,
    cq: Arc<dyn CompletionQueue>,
    region: Arc<dyn MemoryRegion>,
    connection: Option<Connection>,
    /// Whether it is there: for those who look at a lane that somebody has. Relaxed: a moment late does not matter.
    is_standing: Arc<AtomicBool>,
    /// A connection was there before.
    was_connected: bool,
    completions: Vec<Completion>,
    /// The reply being looked at.
    message: Vec<u8>,
    /// Its memory was used since somebody last looked.
    used: bool,
    /// What is asked is waited for also when the mount ends: it begins a session, or ends it.
    is_at_door: bool,
}

/// How one attempt at a request ended, apart from an answer.
enum Broken {
    /// The connection is gone: connect and send again.
    Disconnected(&'static str),
    /// The mount ends.
    ShutDown,
}

impl Lane {
    pub(super) fn new(slot: u16, device: &dyn Device, pd: &dyn ProtectionDomain) -> Result<Self, RdmaError> {
        let memory = SharedMemory::new("cuttlefs-lane", LANE_BYTES).map_err(|source| RdmaError::Io {
            action: "allocate memory for",
            endpoint: "a lane".to_owned(),
            source,
        })?;
        let access = Access { remote_atomic: false, remote_flush: false, ..Access::ALL };
        Ok(Self {
            slot: SlotIndex(slot),
            seq: 1,
            cq: device.create_cq((MAX_RUNS + RECEIVES + 2) as u32)?,
            region: pd.register(Arc::new(memory), access)?,
            connection: None,
            is_standing: Arc::default(),
            was_connected: false,
            completions: Vec::new(),
            message: Vec::new(),
            used: false,
            is_at_door: false,
        })
    }

    /// Whether its memory was used since this was last asked.
    pub(super) fn take_used(&mut self) -> bool {
        std::mem::take(&mut self.used)
    }

    /// Gives back the memory that file bytes travel through. Nobody uses the lane.
    pub(super) fn give_memory_back(&self) {
        if let Err(error) = self.region.memory().discard(DATA_OFFSET, DATA_LEN) {
            tracing::debug!(%error, "a lane keeps its memory");
        }
    }

    fn receive(&self, index: usize) -> RecvWr {
        RecvWr {
            wr_id: WrId(index as u64),
            local: self.region.sge((MESSAGE * (1 + index)) as u64, MAX_MESSAGE_BYTES),
        }
    }

    /// Whether a connection stands, as far as this side knows.
    pub(super) fn is_connected(&self) -> bool {
        self.connection.as_ref().is_some_and(|c| c.qp.state() == QpState::ReadyToSend)
    }

    /// Tells whether a connection stands, at any time and without the lane.
    pub(super) fn standing(&self) -> Arc<AtomicBool> {
        self.is_standing.clone()
    }

    /// Whether a connection stands, by what its link has told by now. Nobody uses the lane.
    pub(super) fn still_stands(&mut self) -> bool {
        self.cq.take_event();
        self.idle(Duration::ZERO);
        self.is_connected()
    }

    pub(super) fn disconnect(&mut self) {
        self.is_standing.store(false, Ordering::Relaxed);
        if let Some(connection) = self.connection.take() {
            connection.qp.close();
        }
        let mut rest = Vec::new();
        while self.cq.poll(&mut rest, 64) > 0 {}
    }

    /// Connects, once; attached to no session yet. Gives what the server shows of its memory.
    pub(super) fn connect_link(
        &mut self,
        session: &Session,
    ) -> Result<Vec<Arc<dyn RemoteWindow>>, RdmaError> {
        self.disconnect();
        let qp = QpConfig {
            send_cq: self.cq.clone(),
            recv_cq: self.cq.clone(),
            send_depth: (MAX_RUNS + 2) as u32,
            recv_depth: RECEIVES as u32,
        };
        let receives = (0..RECEIVES).map(|index| self.receive(index)).collect();
        let options = ConnectOptions { qp, receives, timeout: CONNECT_TIMEOUT };
        let connected = session.pd.connect(&session.options.endpoint, options)?;
        self.connection = Some(Connection { qp: connected.qp, session: 0 });
        Ok(connected.windows)
    }

    /// Connects and attaches, once.
    pub(super) fn connect_once(&mut self, session: &Session) -> Result<(), RdmaError> {
        let windows = self.connect_link(session)?;
        self.is_at_door = true;
        let attached = session.attach(self, &windows);
        self.is_at_door = false;
        let number = attached?;
        if let Some(connection) = &mut self.connection {
            connection.session = number;
        }
        if session.is_shut_down() {
            // The mount may have said good-bye before this: then this has begun another session.
            self.detach(session);
            self.disconnect();
            return Err(RdmaError::Closed);
        }
        self.is_standing.store(true, Ordering::Relaxed);
        if std::mem::replace(&mut self.was_connected, true) {
            session.counters.reconnects.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Says good-bye over a standing connection. Best effort: if it is lost, the lease ends the session.
    pub(super) fn detach(&mut self, session: &Session) {
        self.is_at_door = true;
        // The first uses up the number of a request that the end of the mount may have left without an answer: that answer would be
        // taken for the good-bye's.
        let is_said = [Request::Heartbeat, Request::Detach].iter().all(|request| {
            let place = Place { slot: self.slot, seq: self.seq };
            let answer = self.exchange(session, &session.own_caller(), request, place);
            self.seq += 1;
            matches!(answer, Ok(Ok(_)))
        });
        self.is_at_door = false;
        if !is_said {
            tracing::debug!("the server did not answer our good-bye; the session ends with its lease");
        }
    }

    /// Connects, trying until it works, the mount ends, or, if it `may_end`, nobody waits for it.
    fn connect(&mut self, session: &Session, may_end: bool) -> Result<(), FsError> {
        let mut backoff = BACKOFF_FIRST;
        loop {
            if session.is_shut_down() {
                return Err(FsError::ShutDown);
            }
            if may_end && interrupt::is_interrupted() {
                return Err(FsError::Interrupted);
            }
            match self.connect_once(session) {
                Ok(()) => {
                    session.note_back();
                    return Ok(());
                }
                Err(error) => {
                    self.disconnect();
                    session.note_failure(self.slot, &error);
                    session.pause(backoff);
                    backoff = (backoff * 2).min(BACKOFF_LONGEST);
                }
            }
        }
    }

    /// Makes sure that a connection to the session that open files are reclaimed for stands.
    fn ensure(&mut self, session: &Session, may_end: bool) -> Result<(), FsError> {
        loop {
            match &self.connection {
                Some(connection) if connection.qp.state() == QpState::ReadyToSend => {
                    let number = connection.session;
                    if session.is_recovered(number) || session.recover(self, number)? {
                        return Ok(());
                    }
                    self.disconnect();
                }
                _ => self.connect(session, may_end)?,
            }
        }
    }

    /// Sends one request over the standing connection and waits for its reply's header; the body is then in
    /// `self.message`.
    fn exchange(
        &mut self,
        session: &Session,
        caller: &Caller,
        request: &Request<'_>,
        Place { slot, seq }: Place,
    ) -> Result<Result<ReplyHeader, Status>, Broken> {
        let mut body = [0u8; 512];
        // Most requests are small; only names and inline data need the large buffer.
        let spill;
        let (header_room, encoded): (usize, &[u8]) = match request.encode(&mut body) {
            Ok(len) => (len, &body[..len]),
            Err(_) => {
                let mut large = vec![0u8; MESSAGE - HEADER_LEN];
                match request.encode(&mut large) {
                    Ok(len) => {
                        large.truncate(len);
                        spill = large;
                        (len, &spill)
                    }
                    Err(_) => return Ok(Err(Status::ValueTooLarge)),
                }
            }
        };
        let &Caller { uid, gid, umask, drops_privileges, trace } = caller;
        let header = RequestHeader { slot, seq, trace, uid, gid, umask, drops_privileges };
        let memory = self.region.memory();
        memory.write(0, &header.encode(header_room as u32));
        memory.write(HEADER_LEN, encoded);
        let send = SendWr {
            wr_id: SEND_ID,
            op: SendOp::Send,
            local: self.region.sge(0, (HEADER_LEN + encoded.len()) as u32),
            signaled: false,
        };
        self.post(&[send])?;
        loop {
            let completion = self.next_completion(session)?;
            match completion.kind {
                CompletionKind::Recv => {}
                // No reply has immediate data, and its length may be that of a WRITE somewhere else.
                CompletionKind::RecvWithImm => return Err(Broken::Disconnected("immediate data")),
                _ => continue,
            }
            let index = completion.wr_id.0 as usize;
            self.message.resize(completion.byte_len as usize, 0);
            self.region.memory().read(MESSAGE * (1 + index), &mut self.message);
            let receive = self.receive(index);
            self.post_receive(receive)?;
            match ReplyHeader::parse(&self.message) {
                Ok((reply, _)) if reply.seq == seq && reply.slot == slot => {
                    session.counters.rpc_requests.fetch_add(1, Ordering::Relaxed);
                    return Ok(Ok(reply));
                }
                // A duplicate of an earlier reply, after a retransmission.
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!(%error, "server sent a malformed reply; reconnecting");
                    return Err(Broken::Disconnected("malformed reply"));
                }
            }
        }
    }

    /// Something arrived that nobody waits for: the answer to a request that was sent twice. It took a receive.
    fn pass_over(&self, completion: &Completion) -> Result<(), Broken> {
        match completion.kind {
            CompletionKind::Recv | CompletionKind::RecvWithImm if completion.status == WcStatus::Success => {
                self.post_receive(self.receive(completion.wr_id.0 as usize))
            }
            _ => Ok(()),
        }
    }

    fn post(&self, requests: &[SendWr]) -> Result<(), Broken> {
        let Some(connection) = &self.connection else {
            return Err(Broken::Disconnected("not connected"));
        };
        connection.qp.post_send(requests).map_err(|_| Broken::Disconnected("post failed"))
    }

    fn post_receive(&self, receive: RecvWr) -> Result<(), Broken> {
        let Some(connection) = &self.connection else {
            return Err(Broken::Disconnected("not connected"));
        };
        connection.qp.post_recv(&[receive]).map_err(|_| Broken::Disconnected("post failed"))
    }

    /// The next completion of the standing connection; waits for it.
    ///
    /// If nothing comes for long the connection is given up, though it stands: a link may have lost what its stream
    /// promised to bring, or damaged a length, and both ends would wait for ever. Asking again on another connection
    /// costs nothing if the server is only slow: it answers where it was asked last.
    fn next_completion(&mut self, session: &Session) -> Result<Completion, Broken> {
        let since = session.now();
        loop {
            let Some(connection) = &self.connection else {
                return Err(Broken::Disconnected("not connected"));
            };
            let number = connection.qp.number();
            while let Some(completion) = self.completions.pop() {
                if completion.qp != number {
                    continue;
                }
                match completion.status {
                    WcStatus::Flushed | WcStatus::Disconnected => {
                        return Err(Broken::Disconnected("connection lost"));
                    }
                    _ => return Ok(completion),
                }
            }
            // Sleeping first: an answer is never there yet when its question has just left, and over a socket a look
            // costs a system call. `wait` returns at once if something is there.
            self.cq.wait(WAIT_SLICE.min(session.answer_patience()));
            if self.cq.poll(&mut self.completions, 16) > 0 {
                self.completions.reverse();
                continue;
            }
            if connection.qp.state() == QpState::Error {
                return Err(Broken::Disconnected("connection lost"));
            }
            let waited = session.now().saturating_sub(since);
            if session.is_shut_down() && (!self.is_at_door || waited >= DETACH_PATIENCE) {
                return Err(Broken::ShutDown);
            }
            if waited >= session.answer_patience() {
                return Err(Broken::Disconnected("no answer for long"));
            }
        }
    }

    /// One request over a connection that is being set up; no retransmission.
    fn call_raw(
        &mut self,
        session: &Session,
        caller: &Caller,
        request: &Request<'_>,
        place: Place,
    ) -> Result<Result<&[u8], Status>, RdmaError> {
        let broken = |reason: &str| RdmaError::Handshake {
            endpoint: session.options.endpoint.to_string(),
            reason: reason.to_owned(),
        };
        match self.exchange(session, caller, request, place) {
            Ok(Ok(header)) => Ok(header.result.map(|()| &self.message[HEADER_LEN..])),
            Ok(Err(status)) => Ok(Err(status)),
            Err(Broken::ShutDown) => Err(RdmaError::Closed),
            Err(Broken::Disconnected(reason)) => Err(broken(reason)),
        }
    }

    /// The first request of a connection.
    pub(super) fn call_unnumbered(
        &mut self,
        session: &Session,
        request: &Request<'_>,
    ) -> Result<Result<&[u8], Status>, RdmaError> {
        self.call_raw(session, &session.own_caller(), request, Place::NOWHERE)
    }

    /// Its memory for bytes of requests.
    pub(super) fn data(&self) -> DataBuffer {
        DataBuffer { region: self.region.clone() }
    }

    /// A request of a recovery. `seq` moves on when it is answered. `None`: the connection broke.
    pub(super) fn call_recovering(
        &mut self,
        session: &Session,
        request: &Request<'_>,
        seq: &mut u64,
    ) -> Option<Result<&[u8], Status>> {
        let answer = self.call_raw(session, &session.own_caller(), request, Place::of_recovery(*seq)).ok()?;
        if matches!(answer, Err(Status::BadSequence)) {
            // As in `call`: the number stays, and another connection tries again.
            session.pause(BACKOFF_FIRST);
            return None;
        }
        *seq += 1;
        Some(answer)
    }

    /// Sleeps until something arrives on the idle lane, its connection breaks, or the time is over.
    pub(super) fn idle(&mut self, time: Duration) {
        self.cq.wait(time);
        self.cq.poll(&mut self.completions, 16);
        let number = self.connection.as_ref().map(|connection| connection.qp.number());
        for completion in std::mem::take(&mut self.completions) {
            if Some(completion.qp) == number {
                // If that fails the connection is broken, which whoever asks next finds.
                let _ = self.pass_over(&completion);
            }
        }
    }
}

/// A borrowed lane.
pub(crate) struct LaneGuard<'s> {
    session: &'s Session,
    lane: MutexGuard<'s, Lane>,
}

impl<'s> LaneGuard<'s> {
    pub(super) fn new(session: &'s Session, mut lane: MutexGuard<'s, Lane>) -> Self {
        lane.used = true;
        Self { session, lane }
    }

    pub(super) fn is_connected(&self) -> bool {
        self.lane.is_connected()
    }

    /// Whether its connection is attached to this session: what the attachment says holds for it.
    pub(crate) fn is_attached_to(&self, session: u64) -> bool {
        self.lane.connection.as_ref().is_some_and(|connection| connection.session == session)
    }

    pub(super) fn lane(&mut self) -> &mut Lane {
        &mut self.lane
    }

    /// As [`Session::call`]; `build` and `take` also get the lane's data buffer.
    ///
    /// It ends with `Interrupted` only while nothing was sent. Afterwards the server may have done it: then the number is used up, and the
    /// lane with it until there is an answer, whoever wants that.
    pub(crate) fn call<'r, T>(
        &mut self,
        caller: &Caller,
        build: impl Fn(&DataBuffer) -> Request<'r>,
        take: impl FnOnce(Reply<'_>, &DataBuffer) -> Result<T, FsError>,
    ) -> Result<T, FsError> {
        let buffer = self.data();
        // Given up behind `_asking`: no recovery comes between an answer that opens a file and the file that is open.
        let mut _in_session = None;
        let _asking = self.session.note_asking(self.lane.slot, self.lane.seq);
        let mut was_sent = false;
        loop {
            if !was_sent && interrupt::is_interrupted() {
                return Err(FsError::Interrupted);
            }
            self.lane.ensure(self.session, !was_sent)?;
            let request = build(&buffer);
            was_sent = true;
            let numbered = !request.needs_no_slot();
            let place = match numbered {
                true => Place { slot: self.lane.slot, seq: self.lane.seq },
                false => Place::NOWHERE,
            };
            match self.lane.exchange(self.session, caller, &request, place) {
                // Not looked at, so the number stays: the request may have been done before the session ended.
                Ok(Ok(ReplyHeader { result: Err(Status::SessionExpired), .. })) => self.lane.disconnect(),
                // Not looked at either: the server is still at the request before, which came to it twice and changed
                // nothing, so that it runs again. The number must stay, or no later one fits. Not in a tight loop.
                Ok(Ok(ReplyHeader { result: Err(Status::BadSequence), .. })) => {
                    tracing::warn!("the server refuses the slot's sequence number; reconnecting");
                    self.lane.disconnect();
                    self.session.pause(BACKOFF_FIRST);
                }
                Ok(Ok(header)) => {
                    if request.opens().is_some() {
                        _in_session = self.session.hold_session(self.session_number());
                        if _in_session.is_none() {
                            // It came late, and names a file of a session that is over. The next one has another answer, which the
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
                    self.session.note_failure(self.lane.slot, &reason);
                }
            }
        }
    }

    /// The session of the standing connection, which is the one that answered the last call.
    pub(crate) fn session_number(&self) -> u64 {
        self.lane.connection.as_ref().map_or(0, |connection| connection.session)
    }

    /// Names the standing connection, if there is one.
    pub(super) fn connection_number(&self) -> Option<u64> {
        self.lane.connection.as_ref().map(|connection| u64::from(connection.qp.number().0))
    }

    /// The lane's registered data buffer.
    pub(crate) fn data(&self) -> DataBuffer {
        self.lane.data()
    }

    /// One-sided, target-translated reads: each run `(offset in request, len)` of the file from `base` on, all
    /// posted with one doorbell; bytes land in the data buffer at their offset in the request. Returns for each
    /// run the bytes that precede the end of the file, or `None` if the connection broke or the target refused:
    /// then everything is fetched by RPC, which also finds out why.
    pub(crate) fn read_file_runs(
        &mut self,
        filekey: FileKey,
        base: u64,
        runs: &[(usize, usize)],
    ) -> Option<Vec<usize>> {
        self.one_sided(runs, |start| Remote::File { filekey, offset: base + start as u64 })
    }

    /// One-sided read of a file's page bitmap into the data buffer.
    pub(crate) fn read_bitmap(&mut self, filekey: FileKey, first_page: u64, len_bytes: usize) -> Option<()> {
        self.one_sided(&[(0, len_bytes)], |_| Remote::Bitmap { filekey, first_page }).map(|_| ())
    }

    fn one_sided(&mut self, runs: &[(usize, usize)], remote: impl Fn(usize) -> Remote) -> Option<Vec<usize>> {
        if runs.len() > MAX_RUNS || !self.lane.is_connected() {
            return None;
        }
        let wrs: Vec<SendWr> = runs
            .iter()
            .enumerate()
            .map(|(index, &(start, len))| SendWr {
                wr_id: WrId(index as u64),
                op: SendOp::Read(remote(start)),
                local: self.lane.region.sge((DATA_OFFSET + start) as u64, len as u32),
                signaled: true,
            })
            .collect();
        let mut lens = vec![0usize; runs.len()];
        let mut outstanding = runs.len();
        self.lane.post(&wrs).ok()?;
        while outstanding > 0 {
            match self.lane.next_completion(self.session) {
                Ok(completion) if completion.kind == CompletionKind::Read => {
                    if completion.status != WcStatus::Success {
                        self.lane.disconnect();
                        return None;
                    }
                    *lens.get_mut(completion.wr_id.0 as usize)? = completion.byte_len as usize;
                    outstanding -= 1;
                }
                Ok(completion) => {
                    if self.lane.pass_over(&completion).is_err() {
                        self.lane.disconnect();
                        return None;
                    }
                }
                Err(_) => {
                    self.lane.disconnect();
                    return None;
                }
            }
        }
        self.session.counters.onesided_reads.add(runs.len() as u64);
        Some(lens)
    }
}

/// The part of a lane's memory that carries file bytes.
pub(crate) struct DataBuffer {
    region: Arc<dyn MemoryRegion>,
}

impl DataBuffer {
    /// Copies bytes in; they fit, because no request is larger than `MAX_TRANSFER_BYTES`.
    fn write(&self, bytes: &[u8]) {
        self.region.memory().write(DATA_OFFSET, bytes);
    }

    /// Bytes of one request: in the message if they are few, otherwise from here.
    pub(crate) fn payload<'b>(&self, bytes: &'b [u8]) -> Payload<'b> {
        if bytes.len() <= MAX_INLINE_BYTES {
            return Payload::Inline(bytes);
        }
        self.write(bytes);
        Payload::Pull(self.remote(bytes.len() as u32))
    }

    /// Copies bytes out.
    pub(crate) fn read(&self, offset: usize, out: &mut [u8]) {
        self.region.memory().read(DATA_OFFSET + offset, out);
    }

    /// What the server needs to reach the first `len` bytes.
    pub(crate) fn remote(&self, len: u32) -> RemoteBuffer {
        assert!(len as usize <= DATA_LEN, "transfer larger than the lane's buffer");
        RemoteBuffer { rkey: self.region.rkey(), offset: DATA_OFFSET as u64, len }
    }
}
