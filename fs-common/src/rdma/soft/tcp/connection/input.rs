//! From the socket to frames: input is gathered, cut into frames, checked, and handed on.

use super::output::OUTPUT_SOFT_BYTES;
use super::target::Parked;
use super::{End, KEEP_LEN, READS_PER_TURN, TcpQp};
use crate::rdma::soft::tcp::channel::Input;
use crate::rdma::soft::tcp::frame::{FRAME_HEADER_LEN, FrameHeader, verify};
use std::collections::VecDeque;

/// Input buffer: a page's reply, or an inline write, arrives with one system call.
const INPUT_LEN: usize = 32 * 1024;

/// The receiving half of a connection.
pub(super) struct Receiving {
    pub(super) buffer: Vec<u8>,
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) sequence: u64,
    pub(super) parked: VecDeque<Parked>,
    /// Bytes of messages in `parked`.
    pub(super) parked_bytes: usize,
    /// Frames taken so far.
    pub(super) frames: u64,
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
            frames: 0,
        }
    }

    /// Memory beyond what every connection has.
    pub(super) fn held_bytes(&self) -> usize {
        self.buffer.len().saturating_sub(INPUT_LEN) + self.parked_bytes
    }

    /// Nothing of what came is taken any more.
    pub(super) fn discard(&mut self) {
        self.buffer = Vec::new();
        (self.start, self.end) = (0, 0);
        self.parked = VecDeque::new();
        self.parked_bytes = 0;
    }

    /// Makes room for the frame that is arriving, or for the next.
    fn make_room(&mut self) -> Result<(), End> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            if self.buffer.len() > KEEP_LEN {
                self.buffer = vec![0; INPUT_LEN];
            }
        }
        let mut needed = FRAME_HEADER_LEN;
        if self.end - self.start >= FRAME_HEADER_LEN {
            // Bounded: parse refuses oversized lengths.
            needed += FrameHeader::parse(&self.buffer[self.start..self.end])?.payload_len as usize;
        }
        if self.start + needed > self.buffer.len() || self.end == self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if needed > self.buffer.len() {
            self.buffer.resize(needed, 0);
        }
        Ok(())
    }
}

impl TcpQp {
    /// Reads what the socket has and acts on it.
    pub(super) fn read_socket(&self) -> Result<(), End> {
        let mut receiving = self.receive.lock();
        let receiving = &mut *receiving;
        // Frames that were held back while the output was full.
        self.take_frames(receiving)?;
        let mut reads = 0;
        loop {
            // What the channel holds has to be taken now: the socket does not tell of it.
            if reads >= READS_PER_TURN && !self.channel.holds_input() {
                return Ok(());
            }
            reads += 1;
            if !self.core.is_ready() || self.is_held_back() {
                return Ok(());
            }
            receiving.make_room()?;
            self.account_input(receiving);
            match self.channel.receive(&mut receiving.buffer[receiving.end..]).map_err(End::Broken)? {
                Input::Bytes { count, more } => {
                    receiving.end += count;
                    self.take_frames(receiving)?;
                    if !more {
                        // The socket is empty; if not, epoll says so again.
                        return Ok(());
                    }
                }
                Input::Nothing => return Ok(()),
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
        sending.stalled || sending.held.is_refused() || sending.owed() > OUTPUT_SOFT_BYTES
    }

    fn take_frames(&self, receiving: &mut Receiving) -> Result<(), End> {
        // Taken out, so that a payload can be looked at while the rest of the state changes.
        let buffer = std::mem::take(&mut receiving.buffer);
        let mut result = Ok(0);
        while receiving.end - receiving.start >= FRAME_HEADER_LEN
            && self.core.is_ready()
            && !self.is_held_back()
        {
            let bytes = &buffer[receiving.start..receiving.end];
            result = (|| {
                let header = FrameHeader::parse(bytes)?;
                let len = FRAME_HEADER_LEN + header.payload_len as usize;
                let Some(frame) = bytes.get(..len) else {
                    return Ok(0);
                };
                verify(frame)?;
                self.act(receiving, &header, &frame[FRAME_HEADER_LEN..])?;
                Ok(len)
            })();
            match result {
                Ok(0) | Err(_) => break,
                Ok(len) => {
                    receiving.start += len;
                    receiving.frames += 1;
                }
            }
        }
        receiving.buffer = buffer;
        result.map(drop::<usize>)
    }

    fn act(&self, receiving: &mut Receiving, header: &FrameHeader, payload: &[u8]) -> Result<(), End> {
        if !header.kind.is_request() {
            return self.take_reply(header, payload);
        }
        if header.sequence != receiving.sequence + 1 {
            return Err(End::Broken(format!(
                "request {} came where {} belongs",
                header.sequence,
                receiving.sequence + 1
            )));
        }
        receiving.sequence += 1;
        match self.serve(receiving, header, payload) {
            Err(End::Refused(status)) => self.put_refusal(&mut self.send.lock(), header.sequence, status),
            other => other,
        }
    }
}
