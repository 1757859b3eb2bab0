//! Packets that wait for the socket, and the socket events to watch for.
//!
//! # Invariants
//! Packets reach the socket whole and in the order of `put`. Beyond `OUTPUT_SOFT_BYTES` no request of this side is put; at `OUTPUT_HARD_BYTES` the
//! queue pair breaks.

use super::held::HeldReplies;
use super::initiator::Pending;
use super::{End, KEEP_LEN, TcpQp};
use crate::breach::Breach;
use crate::rdma::soft::queue::MAX_TRANSFER_BYTES;
use crate::rdma::soft::tcp::tls::SEALED_AT_ONCE;
use crate::rdma::verbs::{SendWr, WrId};
use rustix::event::epoll::EventFlags;
use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::net::SendFlags;
use std::collections::VecDeque;

/// Waiting output beyond which no request of this side is put: four of the largest transfers.
pub(super) const OUTPUT_SOFT_BYTES: usize = 4 * MAX_TRANSFER_BYTES as usize;
/// Bytes owed to a peer beyond which the engine takes no more of its requests: enough to write while the next transfer is built. To build more for a
/// peer that does not read would be wasted work.
pub(super) const OWED_MAX_BYTES: usize = MAX_TRANSFER_BYTES as usize / 2;
/// Waiting output at which the queue pair breaks. Only a peer that sends requests and does not read gets there.
pub(super) const OUTPUT_HARD_BYTES: usize = 16 * MAX_TRANSFER_BYTES as usize;

/// The sending half of a connection.
pub(super) struct Sending {
    pub(super) output: Vec<u8>,
    pub(super) output_at: usize,
    /// Bytes of all packets so far, including those that wait.
    pub(super) put_bytes: u64,
    pub(super) queue: VecDeque<SendWr>,
    pub(super) sequence: u64,
    pub(super) pending: VecDeque<Pending>,
    /// Unsignaled WRITEs that a late Nak could name, newest last; at most the queue's depth.
    pub(super) silent: VecDeque<(u64, WrId)>,
    pub(super) watched: EventFlags,
    /// A file read faults: input is not read until its reply.
    pub(super) stalled: bool,
    /// Replies behind a FLUSH that is under way.
    pub(super) held: HeldReplies,
    /// The fault has ended: the engine has to take a turn, also if the socket has nothing new.
    pub(super) resumed: bool,
}

impl Sending {
    pub(super) fn new() -> Self {
        Self {
            output: Vec::new(),
            output_at: 0,
            put_bytes: 0,
            queue: VecDeque::new(),
            sequence: 0,
            pending: VecDeque::new(),
            silent: VecDeque::new(),
            watched: EventFlags::IN | EventFlags::RDHUP,
            stalled: false,
            held: HeldReplies::default(),
            resumed: false,
        }
    }

    /// Bytes that the peer is owed: replies that it does not have yet, and all other output that waits for the socket.
    pub(super) fn owed(&self) -> usize {
        self.waiting() + self.held.bytes()
    }

    /// Memory of waiting output and held replies. An empty buffer that is kept for later output is not counted to the peer.
    pub(super) fn held_bytes(&self) -> usize {
        let output = if self.waiting() == 0 { 0 } else { self.output.capacity() };
        output + self.held.bytes()
    }

    /// Discards all output.
    pub(super) fn discard_output(&mut self) {
        self.put_bytes -= self.waiting() as u64;
        (self.output, self.output_at) = (Vec::new(), 0);
    }

    /// Bytes that wait for the socket.
    pub(super) fn waiting(&self) -> usize {
        self.output.len() - self.output_at
    }
}

impl TcpQp {
    /// Sends a packet, or puts it behind output that waits. `more`: another packet follows at once, and the kernel may wait for it.
    pub(super) fn put(&self, sending: &mut Sending, packet: &[u8], more: bool) -> Result<(), End> {
        if self.channel.is_sealed() {
            return self.put_sealed(sending, packet);
        }
        let mut sent = 0;
        let mut flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        if more {
            flags |= SendFlags::MORE;
        }
        sending.put_bytes += packet.len() as u64;
        if sending.output.len() == sending.output_at {
            while sent < packet.len() {
                match rustix::net::send(self.socket(), &packet[sent..], flags) {
                    Ok(count) => sent += count,
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) => break,
                    Err(_) => return Err(End::Cut),
                }
            }
        }
        if sent < packet.len() {
            sending.output.extend_from_slice(&packet[sent..]);
            self.account_output(sending);
            self.check_output(sending)?;
            self.watch(sending);
        }
        Ok(())
    }

    /// As `put`, with TLS: the encrypted bytes are what is sent and counted. They are encrypted in parts, so that a long packet needs no memory of
    /// its own while the peer reads.
    fn put_sealed(&self, sending: &mut Sending, packet: &[u8]) -> Result<(), End> {
        for part in packet.chunks(SEALED_AT_ONCE) {
            let waited = sending.waiting();
            let before = sending.output.len();
            self.channel.seal(part, &mut sending.output).map_err(End::Broken)?;
            sending.put_bytes += (sending.output.len() - before) as u64;
            if waited == 0 {
                self.send_output(sending)?;
            }
        }
        self.account_output(sending);
        self.check_output(sending)?;
        self.watch(sending);
        Ok(())
    }

    fn check_output(&self, sending: &Sending) -> Result<(), End> {
        let waiting = sending.waiting();
        if waiting <= OUTPUT_HARD_BYTES {
            return Ok(());
        }
        Err(End::Broken(Breach::new(format_args!("{waiting} bytes wait for a peer that does not read"))))
    }

    /// Sends waiting output, then does what depends on it.
    pub(super) fn flush_output(&self, sending: &mut Sending) -> Result<(), End> {
        self.send_output(sending)?;
        self.watch(sending);
        self.complete_sent(sending);
        Ok(())
    }

    fn send_output(&self, sending: &mut Sending) -> Result<(), End> {
        while sending.waiting() > 0 {
            let waiting = &sending.output[sending.output_at..];
            match rustix::net::send(self.socket(), waiting, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(count) => sending.output_at += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => return Err(End::Cut),
            }
        }
        if sending.waiting() == 0 {
            sending.output.clear();
            sending.output_at = 0;
            if sending.output.capacity() > KEEP_LEN {
                sending.output = Vec::new();
            }
        } else if sending.output_at > OUTPUT_SOFT_BYTES {
            sending.output.drain(..sending.output_at);
            sending.output_at = 0;
        }
        self.account_output(sending);
        Ok(())
    }

    /// Watches for the socket events that are needed now.
    pub(super) fn watch(&self, sending: &mut Sending) {
        let mut flags = EventFlags::empty();
        if !sending.stalled && (self.engine.is_none() || sending.owed() <= OWED_MAX_BYTES) {
            flags |= EventFlags::IN | EventFlags::RDHUP;
        }
        // After a fault, too: a socket is writable nearly always, so that wakes the engine.
        if sending.waiting() > 0 || sending.resumed {
            flags |= EventFlags::OUT;
        }
        if flags == sending.watched {
            return;
        }
        sending.watched = flags;
        match &self.engine {
            Some(engine) => engine.watch(self, flags),
            None => self
                .core
                .queues()
                .for_each(|queue| queue.watch(self.core.number, self.socket().as_fd(), flags)),
        }
    }
}
