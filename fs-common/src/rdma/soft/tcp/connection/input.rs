//! From the socket to packets: input is gathered, cut into packets, checked, and passed on.

use super::output::OWED_MAX_BYTES;
use super::target::Parked;
use super::{End, KEEP_LEN, READS_PER_TURN, TcpQp};
use crate::breach::Breach;
use crate::rdma::chain::{Chain, Gate};
use crate::rdma::soft::tcp::channel::Input;
use crate::rdma::soft::tcp::packet::{PACKET_HEADER_LEN, PACKET_LEN_AT, PacketHeader, verify};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Bytes of an input buffer: the reply of a page, or a WRITE with its bytes, arrives with one system call.
pub(super) const INPUT_LEN: usize = 32 * 1024;
/// Packets of one turn with the engine: some tens of microseconds. A packet with many bytes counts as several.
const PACKETS_PER_TURN: usize = 32;
/// Bytes of input or of a reply that count as one packet.
const BYTES_PER_PACKET: usize = 16 * 1024;
/// Bytes that are taken from the socket at once in a turn that has an end: some ten microseconds.
const PIECE_LEN: usize = 64 * 1024;
/// The buffer's room for a packet, as a multiple of the bytes that have arrived: a peer that announces much and sends little gets little.
const ROOM_FACTOR: usize = 4;

/// The receiving half of a connection.
pub(super) struct Receiving {
    pub(super) buffer: Vec<u8>,
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) sequence: u64,
    pub(super) parked: VecDeque<Parked>,
    /// Bytes of messages in `parked`.
    pub(super) parked_bytes: usize,
    /// Packets taken so far.
    pub(super) packets: u64,
    /// The work queue that the queue pair is armed with, and its gate.
    pub(super) chain: Option<(Arc<Gate>, Box<Chain>)>,
    /// What chains cost beyond their message's packet, counted in packets.
    pub(super) extra: usize,
}

impl Receiving {
    pub(super) fn new() -> Self {
        Self {
            buffer: vec![0; INPUT_LEN],
            start: 0,
            end: 0,
            sequence: 0,
            parked: VecDeque::new(),
            parked_bytes: 0,
            packets: 0,
            chain: None,
            extra: 0,
        }
    }

    /// Memory beyond that of every connection.
    pub(super) fn held_bytes(&self) -> usize {
        self.buffer.len().saturating_sub(INPUT_LEN) + self.parked_bytes
    }

    /// Discards all input.
    pub(super) fn discard(&mut self) {
        self.buffer = Vec::new();
        (self.start, self.end) = (0, 0);
        self.parked = VecDeque::new();
        self.parked_bytes = 0;
    }

    /// Frees a large buffer whose packets were all taken.
    fn let_go(&mut self) {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            if self.buffer.len() > KEEP_LEN {
                self.buffer = vec![0; INPUT_LEN];
            }
        }
    }

    /// Makes room for the packet that is arriving, or for the next.
    fn make_room(&mut self) -> Result<(), End> {
        self.let_go();
        let mut needed = PACKET_HEADER_LEN;
        if self.end - self.start >= PACKET_HEADER_LEN {
            // Bounded: parse refuses oversized lengths.
            needed += PacketHeader::parse(&self.buffer[self.start..self.end])?.payload_len as usize;
        }
        if self.start > 0 && (self.start + needed > self.buffer.len() || self.end == self.buffer.len()) {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if needed > self.buffer.len() && self.end == self.buffer.len() {
            let room = needed.min(ROOM_FACTOR * self.buffer.len().max(INPUT_LEN));
            self.buffer.resize(room, 0);
        }
        Ok(())
    }
}

/// Whether these bytes seem to begin with a whole packet. A damaged length does no harm.
fn has_packet(bytes: &[u8]) -> bool {
    let len = bytes.get(PACKET_LEN_AT..PACKET_HEADER_LEN).and_then(|rest| rest.first_chunk());
    len.is_some_and(|len| bytes.len() - PACKET_HEADER_LEN >= u32::from_le_bytes(*len) as usize)
}

/// Whether a turn that ends then is over.
fn is_over(until: Option<Instant>) -> bool {
    until.is_some_and(|until| Instant::now() >= until)
}

impl TcpQp {
    /// Reads the socket's input and acts on it, for one turn; returns whether there is more. `hangs_up`: the peer has closed behind the bytes that it
    /// sent, so the socket will not signal them again. The turn ends at `until`, but not before something was done: a packet, or a part of one.
    pub(super) fn read_socket(&self, hangs_up: bool, until: Option<Instant>) -> Result<bool, End> {
        let mut receiving = self.receive.lock();
        let result = self.read_turn(&mut receiving, hangs_up, until);
        // Not with the next input: a peer that sends none would hold it, and could be ended for that.
        receiving.let_go();
        self.account_input(&receiving);
        result
    }

    fn read_turn(
        &self,
        receiving: &mut Receiving,
        hangs_up: bool,
        until: Option<Instant>,
    ) -> Result<bool, End> {
        // A self-driven side serves one peer, and the polling thread goes on until there is nothing left.
        let mut packets_left = if self.engine.is_some() { PACKETS_PER_TURN } else { usize::MAX };
        let piece = if until.is_some() { PIECE_LEN } else { usize::MAX };
        // Packets that were held back while the output was full, or until this turn.
        self.take_packets(receiving, &mut packets_left, until)?;
        let mut reads = 0;
        loop {
            // Input that is held back is looked at again when its obstacle is gone.
            if !self.core.is_ready() || self.is_held_back() {
                return Ok(false);
            }
            // A self-driven side takes all that the channel holds now, since the socket does not signal it.
            if packets_left == 0
                || (reads >= READS_PER_TURN && (self.engine.is_some() || !self.channel.holds_input()))
            {
                return Ok(true);
            }
            reads += 1;
            receiving.make_room()?;
            self.account_input(receiving);
            let room = receiving.end..receiving.buffer.len().min(receiving.end.saturating_add(piece));
            match self.channel.receive(&mut receiving.buffer[room]).map_err(End::Broken)? {
                Input::Bytes { count, more } => {
                    receiving.end += count;
                    if is_over(until) {
                        // Also if the socket is empty now: the next turn acts on these bytes.
                        return Ok(true);
                    }
                    self.take_packets(receiving, &mut packets_left, until)?;
                    let is_done = packets_left > 0 || receiving.start == receiving.end;
                    if !more && !hangs_up && is_done {
                        // The socket was empty; epoll reports all bytes that have come since.
                        return Ok(false);
                    }
                }
                Input::Nothing => return Ok(false),
                Input::Closed => return Err(End::Cut),
            }
        }
    }

    /// Whether the peer must read, or a fault must end, before more requests are executed.
    fn is_held_back(&self) -> bool {
        let sending = self.send.lock();
        if self.engine.is_none() {
            return sending.held.is_refused();
        }
        sending.stalled || sending.held.is_refused() || sending.owed() > OWED_MAX_BYTES
    }

    /// Acts on the packets that are there, one at least, until the turn is used up. Then all replies are sent.
    fn take_packets(
        &self,
        receiving: &mut Receiving,
        packets_left: &mut usize,
        until: Option<Instant>,
    ) -> Result<(), End> {
        let taken = self.take_packets_gathering(receiving, packets_left, until);
        if self.gathers.swap(false, Ordering::Relaxed) {
            // If the connection ends, that sends them.
            taken.and_then(|()| self.send_gathered(&mut self.send.lock()))
        } else {
            taken
        }
    }

    fn take_packets_gathering(
        &self,
        receiving: &mut Receiving,
        packets_left: &mut usize,
        until: Option<Instant>,
    ) -> Result<(), End> {
        // Taken out, so that a payload can be looked at while the rest of the state changes.
        let buffer = std::mem::take(&mut receiving.buffer);
        let mut result = Ok(0);
        while *packets_left > 0
            && receiving.end - receiving.start >= PACKET_HEADER_LEN
            && self.core.is_ready()
            && !self.is_held_back()
        {
            let bytes = &buffer[receiving.start..receiving.end];
            result = (|| {
                let header = PacketHeader::parse(bytes)?;
                let len = PACKET_HEADER_LEN + header.payload_len as usize;
                let Some(packet) = bytes.get(..len) else {
                    return Ok(0);
                };
                verify(packet)?;
                let bytes = header.payload_len as usize + header.wanted as usize;
                *packets_left = packets_left.saturating_sub(1 + bytes / BYTES_PER_PACKET);
                if *packets_left > 0 && has_packet(&buffer[receiving.start + len..receiving.end]) {
                    self.gathers.store(true, Ordering::Relaxed);
                }
                self.act(receiving, &header, &packet[PACKET_HEADER_LEN..])?;
                *packets_left = packets_left.saturating_sub(std::mem::take(&mut receiving.extra));
                Ok(len)
            })();
            match result {
                Ok(0) | Err(_) => break,
                Ok(len) => {
                    receiving.start += len;
                    receiving.packets += 1;
                    if is_over(until) {
                        *packets_left = 0;
                    }
                }
            }
        }
        receiving.buffer = buffer;
        result.map(drop::<usize>)
    }

    fn act(&self, receiving: &mut Receiving, header: &PacketHeader, payload: &[u8]) -> Result<(), End> {
        if !header.kind.is_request() {
            return self.take_reply(header, payload);
        }
        if header.sequence != receiving.sequence + 1 {
            return Err(End::Broken(Breach::new(format_args!(
                "request {} came where {} belongs",
                header.sequence,
                receiving.sequence + 1
            ))));
        }
        receiving.sequence += 1;
        match self.serve(receiving, header, payload) {
            Err(End::Refused(status)) => self.put_refusal(&mut self.send.lock(), header.sequence, status),
            other => other,
        }
    }
}
