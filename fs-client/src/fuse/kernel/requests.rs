//! Requests that the kernel waits for, and the device from which they are read.
//!
//! Each request is noted when it is read, until it is answered, so that a FUSE_INTERRUPT finds it. The kernel may send an interrupt so soon that
//! another thread reads it before the request is noted: then the interrupt is kept, and the request finds it.

use super::abi::{OUT_HEADER_LEN, opcode};
use crate::transport::interrupt::Interruptible;
use parking_lot::{Condvar, Mutex};
use rustix::fd::OwnedFd;
use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

/// The number of locks for the table of requests: several, so that threads seldom wait for each other.
const SHARDS: usize = 16;
/// The most interrupts that are kept for requests that are not noted yet. A request is noted within microseconds, so an older interrupt is of a
/// request that has been answered.
const EARLY_MAX: usize = 64;
/// The most parts of an answer.
const PARTS_MAX: usize = 3;

/// A request that has been read and not answered.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) unique: u64,
    pub(super) opcode: u32,
    /// The thread that made the system call, as this process sees it; 0 if it cannot see it.
    pub(super) thread: u32,
    /// Whether the right to answer was taken. The one who sets this answers.
    is_answered: AtomicBool,
    /// Whether the caller does not want to wait any more. Relaxed: it is read again and again.
    is_interrupted: AtomicBool,
}

impl Pending {
    pub(super) fn is_answered(&self) -> bool {
        self.is_answered.load(Ordering::Acquire)
    }

    /// Asks the request's thread to give up what can still be given up.
    pub(super) fn interrupt(&self) {
        self.is_interrupted.store(true, Ordering::Relaxed);
    }
}

impl Interruptible for Pending {
    fn is_interrupted(&self) -> bool {
        self.is_interrupted.load(Ordering::Relaxed)
    }
}

#[derive(Debug, Default)]
struct Shard {
    pending: HashMap<u64, Arc<Pending>>,
    /// Interrupted requests that are not noted yet, the oldest first.
    early: Vec<u64>,
}

/// State that the attendant looks at.
#[derive(Debug, Default)]
pub(super) struct Attention {
    /// Requests that the kernel has interrupted, and since when.
    pub(super) interrupted: Vec<(Arc<Pending>, Instant)>,
    /// Whether all threads have been busy for a while, so that a spare thread must read.
    pub(super) is_stuck: bool,
    /// The number of spare threads, which handle one request each.
    pub(super) spare_threads: usize,
    /// The bytes of their requests.
    pub(super) spare_bytes: usize,
    /// Whether the kernel has ended the connection.
    pub(super) has_ended: bool,
}

/// The counts of a session, for `cuttlefs status`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Requests that were answered with EINTR because the caller did not want to wait.
    pub interrupted: u64,
    /// Requests that were taken on while all threads waited.
    pub spare: u64,
}

/// The connection to the kernel.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) device: OwnedFd,
    shards: [Mutex<Shard>; SHARDS],
    pub(super) attention: Mutex<Attention>,
    /// Notified of interrupts, of the end, and when no thread is idle.
    pub(super) attend: Condvar,
    /// Notified when `is_stuck`, the number of spare threads or `has_ended` changes.
    pub(super) spare: Condvar,
    /// The number of threads that wait for a message. Changed by each of them and read by the attendant; `attendant_sleeps` orders the two.
    idle: AtomicUsize,
    /// The number of messages read. Relaxed: the attendant uses it as a clock.
    taken: AtomicU64,
    /// Whether the attendant sleeps until no thread is idle. Sequentially consistent with `idle`: either the attendant sees that no thread is idle,
    /// or the last thread sees that the attendant sleeps.
    pub(super) attendant_sleeps: AtomicBool,
    interrupted: AtomicU64,
    pub(super) spare_requests: AtomicU64,
}

impl Connection {
    pub(super) fn new(device: OwnedFd) -> Arc<Self> {
        Arc::new(Self {
            device,
            shards: Default::default(),
            attention: Mutex::default(),
            attend: Condvar::new(),
            spare: Condvar::new(),
            idle: AtomicUsize::new(0),
            taken: AtomicU64::new(0),
            attendant_sleeps: AtomicBool::new(false),
            interrupted: AtomicU64::new(0),
            spare_requests: AtomicU64::new(0),
        })
    }

    pub(super) fn figures(&self) -> Figures {
        Figures {
            interrupted: self.interrupted.load(Ordering::Relaxed),
            spare: self.spare_requests.load(Ordering::Relaxed),
        }
    }

    fn shard(&self, unique: u64) -> &Mutex<Shard> {
        // The kernel numbers requests in steps of two.
        &self.shards[(unique / 2) as usize % SHARDS]
    }

    /// Reads one message into the buffer. `None`: the connection has ended.
    pub(super) fn receive(&self, buffer: &mut [u8]) -> Option<usize> {
        use rustix::io::Errno;
        loop {
            match rustix::io::read(&self.device, &mut *buffer) {
                Ok(len) => return Some(len),
                // ENOENT: the request was given up while the kernel handed it over.
                Err(Errno::NOENT | Errno::INTR | Errno::AGAIN) => {}
                Err(Errno::NODEV) => return None,
                Err(error) => {
                    tracing::error!(%error, "requests cannot be read from the kernel");
                    return None;
                }
            }
        }
    }

    /// As `receive`, by one of the session's threads.
    pub(super) fn receive_idle(&self, buffer: &mut [u8]) -> Option<usize> {
        self.idle.fetch_add(1, Ordering::SeqCst);
        let received = self.receive(buffer);
        self.taken.fetch_add(1, Ordering::Relaxed);
        if self.idle.fetch_sub(1, Ordering::SeqCst) == 1 && self.attendant_sleeps.load(Ordering::SeqCst) {
            let _attention = self.attention.lock();
            self.attend.notify_all();
        }
        received
    }

    /// Whether no thread waits for a message, and the number of messages read so far.
    pub(super) fn progress(&self) -> (bool, u64) {
        (self.idle.load(Ordering::SeqCst) == 0, self.taken.load(Ordering::Relaxed))
    }

    /// Notes a request that was read.
    pub(super) fn note(&self, unique: u64, opcode: u32, thread: u32) -> Arc<Pending> {
        let pending = Arc::new(Pending {
            unique,
            opcode,
            thread,
            is_answered: AtomicBool::new(false),
            is_interrupted: AtomicBool::new(false),
        });
        let mut shard = self.shard(unique).lock();
        shard.pending.insert(unique, pending.clone());
        let early = shard.early.iter().position(|interrupted| *interrupted == unique);
        if let Some(at) = early {
            shard.early.remove(at);
            drop(shard);
            self.attend_to(pending.clone());
        }
        pending
    }

    /// Notes a FUSE_INTERRUPT: a signal has come while a caller waits for this request.
    pub(super) fn note_interrupt(&self, unique: u64) {
        let mut shard = self.shard(unique).lock();
        match shard.pending.get(&unique).cloned() {
            Some(pending) => {
                drop(shard);
                self.attend_to(pending);
            }
            None => {
                if shard.early.len() >= EARLY_MAX {
                    shard.early.remove(0);
                }
                shard.early.push(unique);
            }
        }
    }

    fn attend_to(&self, pending: Arc<Pending>) {
        self.attention.lock().interrupted.push((pending, Instant::now()));
        self.attend.notify_all();
    }

    /// The kernel has ended the connection: wakes all threads.
    pub(super) fn end(&self) {
        self.attention.lock().has_ended = true;
        self.attend.notify_all();
        self.spare.notify_all();
    }

    /// Takes the right to answer. Returns whether it was still free.
    fn take(&self, pending: &Pending) -> bool {
        if pending.is_answered.swap(true, Ordering::AcqRel) {
            return false;
        }
        self.shard(pending.unique).lock().pending.remove(&pending.unique);
        true
    }

    /// Answers a request. `false`: it was answered before, or the kernel does not want the answer.
    pub(super) fn answer(&self, pending: &Pending, error: i32, parts: &[&[u8]]) -> bool {
        if !self.take(pending) {
            return false;
        }
        match self.send(pending.unique, -error, parts) {
            Ok(()) => true,
            Err(error) => {
                // ENOENT: the caller was told that the connection was aborted.
                tracing::debug!(%error, unique = pending.unique, opcode = pending.opcode, "an answer was not taken");
                false
            }
        }
    }

    /// Answers a request with EINTR for its caller. The thread of the request goes on until it notices.
    pub(super) fn end_interrupted(&self, pending: &Pending) {
        pending.interrupt();
        if self.answer(pending, libc::EINTR, &[]) {
            self.interrupted.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Sends one message to the kernel: an answer, or a notification, which belongs to no request.
    pub(super) fn send(&self, unique: u64, error: i32, parts: &[&[u8]]) -> io::Result<()> {
        let body_len: usize = parts.iter().map(|part| part.len()).sum();
        let len = u32::try_from(OUT_HEADER_LEN + body_len).map_err(io::Error::other)?;
        let mut header = [0; OUT_HEADER_LEN];
        header[..4].copy_from_slice(&len.to_ne_bytes());
        header[4..8].copy_from_slice(&error.to_ne_bytes());
        header[8..].copy_from_slice(&unique.to_ne_bytes());
        assert!(parts.len() <= PARTS_MAX, "an answer of {} parts", parts.len());
        let mut slices = [IoSlice::new(&header), IoSlice::new(&[]), IoSlice::new(&[]), IoSlice::new(&[])];
        for (slice, part) in slices[1..].iter_mut().zip(parts) {
            *slice = IoSlice::new(part);
        }
        // The kernel takes a message whole or not at all.
        rustix::io::writev(&self.device, &slices[..=parts.len()])?;
        Ok(())
    }
}

/// The right to answer a request. If it is dropped without an answer, the answer is EIO.
#[derive(Debug)]
pub(super) struct Answer {
    connection: Arc<Connection>,
    pending: Arc<Pending>,
}

impl Answer {
    pub(super) fn new(connection: Arc<Connection>, pending: Arc<Pending>) -> Self {
        Self { connection, pending }
    }

    /// Answers with a body. `false`: nobody wants the answer any more.
    pub(super) fn ok(self, parts: &[&[u8]]) -> bool {
        self.connection.answer(&self.pending, 0, parts)
    }

    /// Takes the right to answer, so that nobody else can end the request. `None`: somebody has.
    pub(super) fn claim(self) -> Option<Claimed> {
        let is_mine = self.connection.take(&self.pending);
        is_mine.then(|| Claimed {
            connection: self.connection.clone(),
            unique: self.pending.unique,
            errno: libc::EIO,
        })
    }

    pub(super) fn error(self, errno: i32) {
        self.connection.answer(&self.pending, errno, &[]);
    }

    /// Whether the caller does not want to wait any more.
    pub(super) fn is_interrupted(&self) -> bool {
        self.pending.is_interrupted()
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if !self.pending.is_answered() && self.pending.opcode != opcode::DESTROY {
            self.connection.answer(&self.pending, libc::EIO, &[]);
        }
    }
}

/// An answer that nobody else can give any more. If it is dropped without `ok`, the answer is EIO.
#[derive(Debug)]
pub(super) struct Claimed {
    connection: Arc<Connection>,
    unique: u64,
    errno: i32,
}

impl Claimed {
    /// Answers without a body.
    pub(super) fn ok(mut self) {
        self.errno = 0;
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        if let Err(error) = self.connection.send(self.unique, -self.errno, &[]) {
            tracing::debug!(%error, unique = self.unique, "an answer was not taken");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixDatagram;

    /// A connection, and a socket in the place of the kernel's end.
    fn connection() -> (Arc<Connection>, UnixDatagram) {
        let (ours, kernels) = UnixDatagram::pair().expect("sockets");
        kernels.set_nonblocking(true).expect("nonblocking");
        (Connection::new(ours.into()), kernels)
    }

    fn answer(kernel: &UnixDatagram) -> Option<(i32, u64, Vec<u8>)> {
        let mut bytes = [0; 100];
        let len = kernel.recv(&mut bytes).ok()?;
        assert_eq!(u32::from_ne_bytes(bytes[..4].try_into().expect("four")) as usize, len);
        let error = i32::from_ne_bytes(bytes[4..8].try_into().expect("four"));
        let unique = u64::from_ne_bytes(bytes[8..16].try_into().expect("eight"));
        Some((error, unique, bytes[16..len].to_vec()))
    }

    #[test]
    fn a_request_is_answered_once() {
        let (connection, kernel) = connection();
        let pending = connection.note(10, opcode::MKDIR, 1);
        let reply = Answer::new(connection.clone(), pending.clone());
        assert!(reply.ok(&[b"a", b"bc"]));
        assert_eq!(answer(&kernel), Some((0, 10, b"abc".to_vec())));
        connection.end_interrupted(&pending);
        assert_eq!(answer(&kernel), None);

        let pending = connection.note(12, opcode::READ, 1);
        let reply = Answer::new(connection.clone(), pending.clone());
        connection.end_interrupted(&pending);
        assert!(reply.is_interrupted());
        assert_eq!(answer(&kernel), Some((-libc::EINTR, 12, vec![])));
        assert!(!reply.ok(&[b"late"]));
        assert_eq!(answer(&kernel), None);
        assert_eq!(connection.figures().interrupted, 1);

        let pending = connection.note(16, opcode::SETLKW, 1);
        let claimed = Answer::new(connection.clone(), pending.clone()).claim().expect("nobody has answered");
        connection.end_interrupted(&pending);
        assert_eq!(answer(&kernel), None, "it is for who claimed it");
        claimed.ok();
        assert_eq!(answer(&kernel), Some((0, 16, vec![])));
        assert!(Answer::new(connection.clone(), pending).claim().is_none());

        drop(Answer::new(connection.clone(), connection.note(14, opcode::READ, 1)));
        assert_eq!(answer(&kernel), Some((-libc::EIO, 14, vec![])));
        assert!(connection.shards.iter().all(|shard| shard.lock().pending.is_empty()), "nothing is left");
    }

    #[test]
    fn an_interrupt_finds_its_request_whichever_comes_first() {
        let (connection, _kernel) = connection();
        let found = |connection: &Connection| {
            connection
                .attention
                .lock()
                .interrupted
                .drain(..)
                .map(|(pending, _)| pending.unique)
                .collect::<Vec<_>>()
        };
        let pending = connection.note(10, opcode::READ, 1);
        connection.note_interrupt(10);
        assert_eq!(found(&connection), [10]);
        connection.note_interrupt(20);
        assert_eq!(found(&connection), [0u64; 0]);
        let early = connection.note(20, opcode::READ, 1);
        assert_eq!(found(&connection), [20]);
        assert!(!early.is_interrupted() && !pending.is_interrupted(), "what follows is for others to say");
        // Interrupts of answered requests do not pile up.
        (0..10_000).for_each(|unique| connection.note_interrupt(unique));
        assert!(connection.shards.iter().all(|shard| shard.lock().early.len() <= EARLY_MAX));
    }
}
