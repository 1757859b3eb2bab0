//! The log while it is written: records in, one sync for many, room given back by checkpoints.
//!
//! # How it works
//! A change of contents begins with a [`Ticket`]: room for its records, and a mark that no checkpoint passes until the
//! change is done. Records are put into memory under the change's own locks. Whoever must know that they are durable
//! waits for the log's thread, which writes all there is and syncs once. Positions count bytes from the log's beginning
//! and never go back; the ring's offset is the position modulo its capacity.
//!
//! # Invariants
//! * `head <= positions of every record needed <= tail <= head + capacity`, and the durable header's head is at most
//!   `head`: nothing that a recovery could need is overwritten.
//! * Records are written in order of their numbers; `written` is what a sync has covered.
//! * A header that says *closed* is written when no record is needed, and no record is put into that life after it.
//!
//! # Failure
//! A failed write or sync is final: what is on the device is unknown. No further change of contents gets a ticket, and
//! nobody is told that anything is durable, until the server is restarted.

use super::device::LogDevice;
use super::header::{Header, RING_OFFSET};
use super::operation::{Change, Operation, record_bytes};
use crate::group_commit::GroupCommit;
use crate::meta::RequestId;
use crate::pool::LocalFuture;
use cuttlefs_common::attr::Timestamp;
use cuttlefs_common::ids::{ClientId, InodeNo, LogSeq, SlotIndex};
use cuttlefs_common::redo::{self, LogId, MAX_DATA_BYTES, Record, RecordKind};
use cuttlefs_common::status::Status;
use cuttlefs_common::world::{Clock, Random};
use event_listener::Event;
use parking_lot::Mutex;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Room kept free for the end of the ring, where a record may not fit.
const SLACK_BYTES: u64 = redo::encoded_len(MAX_DATA_BYTES) as u64;
/// Smallest ring: a few of the largest changes.
pub const MIN_CAPACITY: u64 = 3 * SLACK_BYTES.next_multiple_of(4096);

/// A place in the log: everything before it is not needed any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    lsn: LogSeq,
    position: u64,
}

#[derive(Debug)]
struct State {
    header: Header,
    /// Of the next record.
    next: Mark,
    /// Position of the durable head.
    head: u64,
    /// Room promised to tickets.
    reserved: u64,
    tickets: BTreeMap<u64, Mark>,
    next_ticket: u64,
    /// Ring offset and bytes of what is to be written.
    pending: Vec<(u64, Vec<u8>)>,
    checkpoint: Option<Mark>,
    written: LogSeq,
    failed: bool,
    /// Write-backs for room that failed: who waited for one is refused.
    refusals: u64,
    syncs: u64,
    records: u64,
}

struct Shared {
    device: Arc<dyn LogDevice>,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
    /// There is room again, or there will be none.
    room: Event,
    /// Somebody waits for room.
    pressed: Event,
}

/// A log that is written.
pub struct RedoLog {
    shared: Arc<Shared>,
    commits: GroupCommit,
}

impl std::fmt::Debug for RedoLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedoLog").field("figures", &self.figures()).finish_non_exhaustive()
    }
}

/// For `status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogFigures {
    /// Bytes of the ring.
    pub capacity: u64,
    /// Of these, needed or promised.
    pub used: u64,
    /// Changes under way.
    pub under_way: usize,
    /// Records since the start.
    pub records: u64,
    /// Syncs since the start.
    pub syncs: u64,
    /// It refuses everything.
    pub failed: bool,
}

impl RedoLog {
    /// Begins a new life of the log on `device`: nothing that is on it is valid afterwards. What it held has been done
    /// again and flushed before. `turn` is the last header's.
    ///
    /// # Errors
    /// The device's; or it is too small.
    pub fn begin(
        device: Arc<dyn LogDevice>,
        turn: u64,
        clock: Arc<dyn Clock>,
        random: &dyn Random,
        threaded: bool,
    ) -> std::io::Result<Arc<Self>> {
        let first = Header::first(LogId(random.next_u64()), device.len());
        if first.capacity < MIN_CAPACITY {
            return Err(std::io::Error::other("the log is too small"));
        }
        // One copy after the other: whichever is lost later, the other one is of this life.
        let header = Header { turn: turn + 2, ..first };
        for header in [Header { turn: turn + 1, ..header }, header] {
            device.write(header.place(), &header.encode())?;
            device.sync()?;
        }
        let next = Mark { lsn: header.lsn, position: 0 };
        let state = State {
            header,
            next,
            head: 0,
            reserved: 0,
            tickets: BTreeMap::new(),
            next_ticket: 0,
            pending: Vec::new(),
            checkpoint: None,
            written: LogSeq(0),
            failed: false,
            refusals: 0,
            syncs: 0,
            records: 0,
        };
        let (room, pressed) = (Event::new(), Event::new());
        let shared = Arc::new(Shared { device, clock, state: Mutex::new(state), room, pressed });
        let working = shared.clone();
        let work = move || working.commit();
        let commits =
            if threaded { GroupCommit::start("redo-log", work)? } else { GroupCommit::by_hand(work) };
        Ok(Arc::new(Self { shared, commits }))
    }

    /// What makes it durable, without a thread.
    pub fn commits(&self) -> &GroupCommit {
        &self.commits
    }

    /// Ends the thread; who still waits is served first. If nothing of the log is needed any more, says so on the device,
    /// so that the next start need not read it.
    pub fn stop(&self) {
        self.commits.stop();
        self.shared.close();
    }

    /// Takes room for the records of a change that writes at most `bytes` in `records` records; waits for it.
    ///
    /// # Errors
    /// `Io` once the log has failed; `NoSpace` if room could not be made. Nothing has been changed then.
    pub async fn begin_change(&self, bytes: usize, records: usize) -> Result<Ticket<'_>, Status> {
        let wanted = record_bytes(bytes) + (records.saturating_sub(1) as u64) * record_bytes(8);
        let first_refusals = self.shared.state.lock().refusals;
        loop {
            let room = {
                let mut state = self.shared.state.lock();
                if state.failed || state.header.closed {
                    return Err(Status::Io);
                }
                let used = state.next.position - state.head + state.reserved;
                if used + wanted + SLACK_BYTES <= state.header.capacity {
                    state.reserved += wanted;
                    let number = state.next_ticket;
                    state.next_ticket += 1;
                    let mark = state.next;
                    state.tickets.insert(number, mark);
                    return Ok(Ticket { log: self, number, left: Cell::new(wanted) });
                }
                if state.refusals > first_refusals {
                    return Err(Status::NoSpace);
                }
                self.shared.room.listen()
            };
            self.shared.pressed.notify(usize::MAX);
            room.await;
        }
    }

    /// Resolves when somebody waits for room. Listening begins with the call.
    pub fn pressed(&self) -> impl Future<Output = ()> + use<> {
        self.shared.pressed.listen()
    }

    /// What the next checkpoint may say: nothing before it is under way.
    pub fn mark(&self) -> Mark {
        let state = self.shared.state.lock();
        state.tickets.values().copied().min_by_key(|mark| mark.lsn).unwrap_or(state.next)
    }

    /// Resolves when everything put into the log so far is durable.
    pub fn committed(&self) -> LocalFuture<'static, Result<(), Status>> {
        {
            let state = self.shared.state.lock();
            if state.failed {
                return Box::pin(std::future::ready(Err(Status::Io)));
            }
            if state.written.0 + 1 >= state.next.lsn.0 {
                return Box::pin(std::future::ready(Ok(())));
            }
        }
        self.commits.wait()
    }

    /// Everything before `mark` is in the pool and in metadata, durably: gives its room back.
    ///
    /// # Errors
    /// `Io` if the log fails.
    pub async fn checkpoint(&self, mark: Mark) -> Result<(), Status> {
        {
            let mut state = self.shared.state.lock();
            if mark.position > state.head {
                state.checkpoint = Some(mark);
            } else if !state.failed {
                drop(state);
                // Whoever waits looks once more, and asks again.
                self.shared.room.notify(usize::MAX);
                return Ok(());
            }
        }
        self.commits.wait().await
    }

    /// A write-back that was to make room failed: who waits for room is refused.
    pub fn refuse_waiting(&self) {
        self.shared.state.lock().refusals += 1;
        self.shared.room.notify(usize::MAX);
    }

    /// How full it is.
    pub fn figures(&self) -> LogFigures {
        let state = self.shared.state.lock();
        LogFigures {
            capacity: state.header.capacity,
            used: state.next.position - state.head + state.reserved,
            under_way: state.tickets.len(),
            records: state.records,
            syncs: state.syncs,
            failed: state.failed,
        }
    }
}

impl Shared {
    /// Writes and syncs what there is; a checkpoint's header with it.
    fn commit(&self) -> Result<(), Status> {
        let (pending, upto, checkpoint) = {
            let mut state = self.state.lock();
            if state.failed {
                return Err(Status::Io);
            }
            // Taken now: one that is asked for meanwhile is not the one this header says.
            let checkpoint = state.checkpoint.take().map(|mark| {
                let (turn, head) = (state.header.turn + 1, mark.position % state.header.capacity);
                (mark, Header { turn, head, lsn: mark.lsn, ..state.header })
            });
            (std::mem::take(&mut state.pending), LogSeq(state.next.lsn.0 - 1), checkpoint)
        };
        if pending.is_empty() && checkpoint.is_none() {
            return Ok(());
        }
        let written = pending
            .iter()
            .try_for_each(|(offset, bytes)| self.device.write(RING_OFFSET + offset, bytes))
            .and_then(|()| {
                checkpoint.map_or(Ok(()), |(_, header)| self.device.write(header.place(), &header.encode()))
            })
            .and_then(|()| self.device.sync());
        let mut state = self.state.lock();
        state.syncs += 1;
        match written {
            Ok(()) => {
                state.written = upto;
                if let Some((mark, header)) = checkpoint {
                    (state.header, state.head) = (header, mark.position);
                    self.room.notify(usize::MAX);
                }
                Ok(())
            }
            Err(error) => {
                tracing::error!(
                    %error,
                    "the redo log failed; nothing more is acknowledged until the server is restarted. Check its device"
                );
                state.failed = true;
                self.room.notify(usize::MAX);
                Err(Status::Io)
            }
        }
    }

    /// Writes a header that says that no record is needed, if that is so.
    fn close(&self) {
        let mut state = self.state.lock();
        let is_needed = state.head != state.next.position || !state.tickets.is_empty();
        if state.failed || state.header.closed || is_needed {
            return;
        }
        let header = Header {
            turn: state.header.turn + 1,
            head: state.next.position % state.header.capacity,
            lsn: state.next.lsn,
            closed: true,
            ..state.header
        };
        // Before it is written: from here on no change gets a ticket.
        state.header = header;
        let written = self.device.write(header.place(), &header.encode());
        if let Err(error) = written.and_then(|()| self.device.sync()) {
            tracing::warn!(%error, "the redo log's clean end could not be noted; the next start reads all of it");
        }
    }

    fn put(&self, state: &mut State, kind: RecordKind, request: Option<RequestId>, data: &[u8]) {
        let offset = state.next.position % state.header.capacity;
        let mut bytes = Vec::new();
        let (client, slot, seq) = request
            .map_or((ClientId(0), SlotIndex(0), 0), |request| (request.client, request.slot, request.seq));
        let record = Record { kind, lsn: state.next.lsn, client, slot, seq, data };
        let target = match state.pending.last_mut() {
            Some((start, chunk)) if *start + chunk.len() as u64 == offset => chunk,
            _ => &mut bytes,
        };
        redo::encode(state.header.log, &record, target);
        if !bytes.is_empty() {
            state.pending.push((offset, bytes));
        }
        state.next.position += redo::encoded_len(data.len()) as u64;
        state.next.lsn.0 += 1;
    }

    fn append(&self, request: Option<RequestId>, file: LoggedFile, at: Timestamp, change: Change<'_>) -> u64 {
        let LoggedFile { ino, before } = file;
        let state = &mut *self.state.lock();
        let data = Operation { durable: state.written, ino, at, before, change }.encode();
        let capacity = state.header.capacity;
        let room = capacity - state.next.position % capacity;
        if (redo::encoded_len(data.len()) as u64) > room {
            let start = state.next.position;
            if room >= redo::encoded_len(0) as u64 {
                self.put(state, RecordKind::Wrap, None, &[]);
            }
            state.next.position = start + room;
        }
        self.put(state, RecordKind::Operation, request, &data);
        state.records += 1;
        let used = redo::encoded_len(data.len()) as u64;
        state.reserved -= used;
        used
    }
}

/// The file a change is of.
#[derive(Clone, Copy, Debug)]
pub struct LoggedFile {
    /// Inode.
    pub ino: InodeNo,
    /// Its change counter before the change.
    pub before: u64,
}

/// A change of contents under way.
pub struct Ticket<'l> {
    log: &'l RedoLog,
    number: u64,
    /// Room promised and not used.
    left: Cell<u64>,
}

impl Ticket<'_> {
    /// Puts a record into the log. Called under the locks under which the contents change.
    pub fn append(&self, request: Option<RequestId>, file: LoggedFile, change: Change<'_>) {
        let shared = &self.log.shared;
        self.take(shared.append(request, file, shared.clock.now(), change));
    }

    /// The change is done: metadata took note of it then, with the counter after `file.before`.
    pub fn done(&self, file: LoggedFile, at: Timestamp) {
        self.take(self.log.shared.append(None, file, at, Change::Done));
    }

    fn take(&self, used: u64) {
        let left = self.left.get();
        assert!(used <= left, "a change takes {used} bytes of the log and asked for {left}");
        self.left.set(left - used);
    }

    /// As `RedoLog::committed`.
    pub fn committed(&self) -> LocalFuture<'static, Result<(), Status>> {
        self.log.committed()
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        let mut state = self.log.shared.state.lock();
        state.reserved -= self.left.get();
        state.tickets.remove(&self.number);
    }
}
