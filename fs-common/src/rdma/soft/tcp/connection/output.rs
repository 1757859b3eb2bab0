//! Packets that wait for the socket, and the socket events to watch for.
//!
//! # Gathered packets
//! A system call, and the peer's turn that it begins, cost as much as some kilobytes of copying. So a packet of up to a page behind which another one
//! follows at once stays here, and goes out with that one: requests of one doorbell, and replies to packets that came together. They are *gathered*
//! until `put` has a packet behind which nothing follows, or who promised one calls `send_gathered`. Of a doorbell that is longer than what is gathered
//! each part but the last goes out with MSG_MORE: the kernel, too, keeps it for the next one, and the peer finds the doorbell whole.
//!
//! A packet that is longer than what is gathered goes out without MSG_MORE. Else the kernel would keep back what fills no segment, which on loopback is up
//! to 64 KiB of it, and the peer would have nothing to take while the next packet is made.
//!
//! # Invariants
//! Output that is gathered waits for no socket, and is not counted to the peer. When the send lock is free, only replies of a turn with the engine that
//! is under way are gathered.
//!
//! Packets reach the socket whole and in the order of `put`. Beyond `OUTPUT_SOFT_BYTES` no request of this side is put; at `OUTPUT_HARD_BYTES` the
//! queue pair breaks.

use super::held::HeldReplies;
use super::initiator::Pending;
use super::input::INPUT_LEN;
use super::{End, KEEP_LEN, TcpQp};
use crate::breach::Breach;
use crate::ids::PAGE_SIZE;
use crate::rdma::soft::queue::MAX_TRANSFER_BYTES;
use crate::rdma::soft::tcp::packet::PACKET_HEADER_LEN;
use crate::rdma::soft::tcp::tls::SEALED_AT_ONCE;
use crate::rdma::verbs::{SendWr, WrId};
use rustix::event::epoll::EventFlags;
use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::net::SendFlags;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;

/// Waiting output beyond which no request of this side is put: four of the largest transfers.
pub(super) const OUTPUT_SOFT_BYTES: usize = 4 * MAX_TRANSFER_BYTES as usize;
/// Bytes owed to a peer beyond which the engine takes no more of its requests: enough to write while the next transfer is built. To build more for a
/// peer that does not read would be wasted work.
pub(super) const OWED_MAX_BYTES: usize = MAX_TRANSFER_BYTES as usize / 2;
/// The longest packet that is gathered: a page. While a longer one is built, the peer works on the one before it.
const GATHERED_PACKET_MAX: usize = PACKET_HEADER_LEN + PAGE_SIZE;
/// The most bytes that are gathered: what the peer takes with one system call.
const GATHERED_BYTES_MAX: usize = INPUT_LEN;
const _: () = assert!(GATHERED_BYTES_MAX < OUTPUT_SOFT_BYTES && GATHERED_BYTES_MAX < OWED_MAX_BYTES);
/// Waiting output at which the queue pair breaks. Only a peer that sends requests and does not read gets there.
pub(super) const OUTPUT_HARD_BYTES: usize = 16 * MAX_TRANSFER_BYTES as usize;

/// The sending half of a connection.
pub(super) struct Sending {
    pub(super) output: Vec<u8>,
    pub(super) output_at: usize,
    /// The output has packets that the socket was not asked to take, and nothing else.
    gathered: bool,
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
            gathered: false,
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
        let output = if self.waiting() == 0 || self.gathered { 0 } else { self.output.capacity() };
        output + self.held.bytes()
    }

    /// Discards all output.
    pub(super) fn discard_output(&mut self) {
        self.put_bytes -= self.waiting() as u64;
        (self.output, self.output_at) = (Vec::new(), 0);
        self.gathered = false;
    }

    /// Bytes that wait for the socket.
    pub(super) fn waiting(&self) -> usize {
        self.output.len() - self.output_at
    }
}

impl TcpQp {
    /// Sends a packet, or puts it behind output that waits. `more`: another packet follows at once, and the kernel may wait for it.
    pub(super) fn put(&self, sending: &mut Sending, packet: &[u8], more: bool) -> Result<(), End> {
        self.put_with(sending, packet, more, SendFlags::MORE)
    }

    /// As `put`, for an answer to a packet of a turn with the engine. While further packets are there, `send_gathered` follows. The kernel does not wait,
    /// so that the peer works on these answers while the next ones are made.
    pub(super) fn put_answer(&self, sending: &mut Sending, packet: &[u8]) -> Result<(), End> {
        self.put_with(sending, packet, self.gathers.load(Ordering::Relaxed), SendFlags::empty())
    }

    /// `between`: the flags of bytes behind which others follow at once.
    fn put_with(
        &self,
        sending: &mut Sending,
        packet: &[u8],
        more: bool,
        between: SendFlags,
    ) -> Result<(), End> {
        let fits = |sending: &Sending| sending.waiting() + packet.len() <= GATHERED_BYTES_MAX;
        let is_sealed = self.channel.is_sealed();
        if sending.gathered && !fits(sending) && !is_sealed {
            self.send_gathered_with(sending, between)?;
        }
        let is_free = sending.waiting() == 0 || sending.gathered;
        let gathers = more && is_free && packet.len() <= GATHERED_PACKET_MAX && fits(sending);
        if is_sealed {
            return self.put_sealed(sending, packet, is_free, gathers);
        }
        let flags = if more && packet.len() <= GATHERED_BYTES_MAX { between } else { SendFlags::empty() };
        sending.put_bytes += packet.len() as u64;
        if gathers || sending.gathered {
            sending.output.extend_from_slice(packet);
            sending.gathered = true;
            return if gathers { Ok(()) } else { self.send_gathered_with(sending, flags) };
        }
        let mut sent = 0;
        if is_free {
            self.send_now(packet, &mut sent, flags)?;
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
    fn put_sealed(
        &self,
        sending: &mut Sending,
        packet: &[u8],
        mut is_free: bool,
        gathers: bool,
    ) -> Result<(), End> {
        for part in packet.chunks(SEALED_AT_ONCE) {
            let before = sending.output.len();
            self.channel.seal(part, &mut sending.output).map_err(End::Broken)?;
            sending.put_bytes += (sending.output.len() - before) as u64;
            if is_free && !gathers {
                self.send_output(sending, SendFlags::empty())?;
                is_free = sending.waiting() == 0;
            }
        }
        if gathers {
            sending.gathered = true;
            return Ok(());
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

    /// Sends gathered packets.
    pub(super) fn send_gathered(&self, sending: &mut Sending) -> Result<(), End> {
        self.send_gathered_with(sending, SendFlags::empty())
    }

    fn send_gathered_with(&self, sending: &mut Sending, flags: SendFlags) -> Result<(), End> {
        if sending.gathered {
            self.send_output(sending, flags)?;
            self.watch(sending);
        }
        Ok(())
    }

    /// Sends waiting output, then does what depends on it.
    pub(super) fn flush_output(&self, sending: &mut Sending) -> Result<(), End> {
        self.send_output(sending, SendFlags::empty())?;
        self.watch(sending);
        self.complete_sent(sending);
        Ok(())
    }

    fn send_output(&self, sending: &mut Sending, flags: SendFlags) -> Result<(), End> {
        sending.gathered = false;
        self.send_now(&sending.output, &mut sending.output_at, flags)?;
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

    /// Has the socket take as many of these bytes, from `at` on, as it does without waiting.
    fn send_now(&self, bytes: &[u8], at: &mut usize, flags: SendFlags) -> Result<(), End> {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT | flags;
        while *at < bytes.len() {
            #[cfg(test)]
            self.sends.fetch_add(1, Ordering::Relaxed);
            match rustix::net::send(self.socket(), &bytes[*at..], flags) {
                Ok(count) => *at += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => return Err(End::Cut),
            }
        }
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
