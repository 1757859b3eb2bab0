//! Executes the entries of one armed work queue.
//!
//! # How it works
//! `take` scatters a message, `step` executes the next entry; `start` does both until a WAIT holds the queue up, or nothing is enabled any more. An executor
//! that is stepped by hand may be interleaved with others at every entry, as RNICs interleave queue pairs.
//!
//! # Failure
//! A fault is final: the queue executes nothing any more. What earlier entries did stays done.

use super::entry::{BadEntry, ENTRY_LEN, Element, Entry, HEAD_LEN, Opcode, RECEIVE_LEN, ReceiveEntry};
use super::queue::{ArmError, WorkQueue};
use super::view::{ChainMemory, Need, NotInView, Place};
use std::sync::atomic::{AtomicU64, Ordering};

/// The most entries that one message may execute.
pub const STEPS_MAX: u32 = 64;
/// The most bytes that one message may move, its own included.
pub const BYTES_MAX: u64 = 64 * 1024;
/// Up to this many bytes a READ copies at once, whatever its elements are.
const SMALL: usize = 64;

/// The peer is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerGone;

/// The other end of the armed queue pair.
pub trait ChainPeer {
    /// WRITEs `len` bytes, which `fill` puts into the packet, to the peer's memory. With an immediate it completes one of the peer's receives.
    ///
    /// # Errors
    /// The connection is at its end.
    fn write(
        &mut self,
        key: u32,
        address: u64,
        imm: Option<u32>,
        len: usize,
        fill: &dyn Fn(&mut [u8]),
    ) -> Result<(), PeerGone>;
}

/// Why a chain was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FaultKind {
    /// The bytes are no entry.
    #[error("{0}")]
    Entry(#[from] BadEntry),
    /// A range is not the chain's.
    #[error("{0}")]
    Range(#[from] NotInView),
    /// The message is longer than the receive entry.
    #[error("a message of {0} bytes came where {1} have a place")]
    Message(usize, u64),
    /// ENABLE of an entry that does not exist.
    #[error("ENABLE to {0} is further than the queue is long")]
    Enable(u32),
    /// An atomic's old value does not fill the local elements.
    #[error("{0} bytes are no room for the old value of an atomic")]
    OldValue(u64),
    /// Source and target are one memory and overlap.
    #[error("{0} bytes would be copied onto themselves")]
    Overlap(usize),
    /// More entries than a message may execute.
    #[error("more than {STEPS_MAX} entries were executed for one message")]
    Endless,
    /// More bytes than a message may move.
    #[error("more than {BYTES_MAX} bytes were moved for one message")]
    Bytes,
    /// The connection ended.
    #[error("the peer is gone")]
    PeerGone,
}

impl From<PeerGone> for FaultKind {
    fn from(_: PeerGone) -> Self {
        Self::PeerGone
    }
}

/// A chain that was stopped, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Why.
    pub kind: FaultKind,
    /// The entry's position in the queue.
    pub position: u32,
    /// The entry as it was fetched; `None` if the bytes were none, or a message did not fit.
    pub entry: Option<Box<Entry>>,
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "chain stopped at entry {}: {}", self.position, self.kind)?;
        match &self.entry {
            Some(entry) => write!(f, ": {}", super::disassemble::Plain(entry)),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Fault {}

/// The result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// An entry was executed.
    Done,
    /// A WAIT waits for a message, or no further entry is enabled.
    Held,
}

/// The executor of one work queue.
#[derive(Debug)]
pub struct Chain {
    queue: WorkQueue,
    /// Messages taken since the arming.
    received: u64,
    /// The next entry, counted from the arming, and its place in the queue. Two numbers, since the queue's length need not divide 2^32.
    next: u32,
    position: u32,
    enabled: u32,
    /// Of the message in hand.
    steps: u32,
    bytes: u64,
    is_stopped: bool,
}

/// Adds to a figure that this thread alone writes: no locked addition is needed.
fn count(figure: &AtomicU64, more: u64) {
    figure.store(figure.load(Ordering::Relaxed) + more, Ordering::Relaxed);
}

/// Bytes in a row and where they lie: the source or the target of a copy.
fn copy(from: Place<'_>, to: Place<'_>, len: usize) -> Result<(), FaultKind> {
    if len == 8 && from.offset.is_multiple_of(8) && to.offset.is_multiple_of(8) {
        to.memory.store_u64(to.offset, from.memory.load_u64(from.offset), Ordering::Release);
    } else if len <= SMALL {
        let mut bytes = [0; SMALL];
        from.memory.read(from.offset, &mut bytes[..len]);
        to.memory.write(to.offset, &bytes[..len]);
    } else if std::ptr::eq(from.memory, to.memory)
        && from.offset < to.offset + len
        && to.offset < from.offset + len
    {
        return Err(FaultKind::Overlap(len));
    } else {
        from.memory.copy_to_word_last(from.offset, to.memory, to.offset, len);
    }
    Ok(())
}

impl Chain {
    /// An executor for a queue, which has not begun.
    ///
    /// # Errors
    /// `ArmError`.
    pub fn new(queue: WorkQueue) -> Result<Self, ArmError> {
        queue.look()?;
        let enabled = queue.enabled.min(queue.entries.1);
        Ok(Self { queue, received: 0, next: 0, position: 0, enabled, steps: 0, bytes: 0, is_stopped: false })
    }

    /// The queue.
    pub fn queue(&self) -> &WorkQueue {
        &self.queue
    }

    /// Whether a message that comes now would be taken.
    pub fn is_ready(&self) -> bool {
        let mut doorbell = [0; 4];
        match self.queue.views[..].find(self.queue.key, self.queue.doorbell, 4, Need::Read) {
            Ok(place) => place.memory.read(place.offset, &mut doorbell),
            Err(_) => return false,
        }
        let posted = u32::from_be_bytes(doorbell).wrapping_sub(self.received as u32) as i32;
        posted > 0 && self.received < self.queue.figures.limit.load(Ordering::Relaxed)
    }

    /// Entries and bytes of the last message.
    pub fn cost(&self) -> (u32, u64) {
        (self.steps, self.bytes)
    }

    /// Takes a message, and executes what it lets go on. Call it only if the queue is ready.
    ///
    /// # Errors
    /// `Fault`; the queue is at its end.
    pub fn start(&mut self, message: &[u8], peer: &mut dyn ChainPeer) -> Result<(), Fault> {
        self.take(message)?;
        while self.step(peer)? == Step::Done {}
        Ok(())
    }

    /// Scatters a message.
    ///
    /// # Errors
    /// As `start`.
    pub fn take(&mut self, message: &[u8]) -> Result<(), Fault> {
        (self.steps, self.bytes) = (0, message.len() as u64);
        let position = (self.received % u64::from(self.queue.receives.1)) as u32;
        let scattered = self.scatter(position, message);
        scattered.map_err(|kind| self.stop(Fault { kind, position, entry: None }))?;
        self.received += 1;
        self.queue.figures.received.store(self.received, Ordering::Relaxed);
        Ok(())
    }

    fn scatter(&self, position: u32, message: &[u8]) -> Result<(), FaultKind> {
        let views = &self.queue.views[..];
        let mut bytes = [0; RECEIVE_LEN];
        let at = self.queue.receives.0 + u64::from(position) * RECEIVE_LEN as u64;
        let place = views.find(self.queue.key, at, RECEIVE_LEN as u64, Need::Read)?;
        place.memory.read(place.offset, &mut bytes);
        let entry = ReceiveEntry::parse(&bytes);
        let mut left = message;
        for element in entry.elements() {
            let (part, rest) = left.split_at(left.len().min(element.len as usize));
            left = rest;
            if part.is_empty() {
                break;
            }
            let place = views.find(element.key, element.address, part.len() as u64, Need::Write)?;
            place.memory.write(place.offset, part);
        }
        if left.is_empty() {
            return Ok(());
        }
        let room = entry.elements().iter().map(|element| u64::from(element.len)).sum();
        Err(FaultKind::Message(message.len(), room))
    }

    /// Executes the next entry, if it may be.
    ///
    /// # Errors
    /// As `start`.
    pub fn step(&mut self, peer: &mut dyn ChainPeer) -> Result<Step, Fault> {
        if self.is_stopped || self.next == self.enabled {
            return Ok(Step::Held);
        }
        let position = self.position;
        let mut entry = Entry::default();
        let fetched = self.fetch(position, &mut entry);
        fetched.map_err(|kind| self.stop(Fault { kind, position, entry: None }))?;
        if entry.last {
            // Before the peer is told: who knows that the chain is done finds it counted.
            count(&self.queue.figures.bytes, self.bytes);
            count(&self.queue.figures.chains, 1);
        }
        let step = self
            .execute(&entry, peer)
            .map_err(|kind| self.stop(Fault { kind, position, entry: Some(Box::new(entry)) }))?;
        if step == Step::Done {
            self.next = self.next.wrapping_add(1);
            self.position = (position + 1) % self.queue.entries.1;
            count(&self.queue.figures.entries, 1);
        }
        Ok(step)
    }

    fn stop(&mut self, fault: Fault) -> Fault {
        self.is_stopped = true;
        *self.queue.figures.fault.lock() = Some(fault.clone());
        fault
    }

    fn fetch(&self, position: u32, entry: &mut Entry) -> Result<(), FaultKind> {
        let mut bytes = [0; ENTRY_LEN];
        let at = self.queue.entries.0 + u64::from(position) * ENTRY_LEN as u64;
        let place = self.queue.views[..].find(self.queue.key, at, ENTRY_LEN as u64, Need::Read)?;
        // Most entries have one element or none, and those that do not count mean nothing.
        let (head, elements) = bytes.split_at_mut(HEAD_LEN);
        place.memory.read(place.offset, head);
        let counted = Entry::elements_len(head).min(elements.len());
        if counted > 0 {
            place.memory.read(place.offset + HEAD_LEN, &mut elements[..counted]);
        }
        Ok(entry.fill(&bytes)?)
    }

    fn execute(&mut self, entry: &Entry, peer: &mut dyn ChainPeer) -> Result<Step, FaultKind> {
        match entry.opcode {
            Opcode::Wait if (self.received as u32).wrapping_sub(entry.index) as i32 >= 0 => {}
            Opcode::Wait => return Ok(Step::Held),
            Opcode::Enable => self.enable(entry.index)?,
            _ => {}
        }
        self.steps += 1;
        if self.steps > STEPS_MAX {
            return Err(FaultKind::Endless);
        }
        if entry.opcode.moves() {
            let len = entry.local_len();
            self.bytes = self.bytes.saturating_add(len);
            if self.bytes > BYTES_MAX {
                return Err(FaultKind::Bytes);
            }
            self.move_bytes(entry, len, peer)?;
        }
        Ok(Step::Done)
    }

    fn enable(&mut self, index: u32) -> Result<(), FaultKind> {
        if index.wrapping_sub(self.enabled) as i32 <= 0 {
            return Ok(());
        }
        // Counted from the ENABLE itself, which is behind `next` once it is done.
        if index.wrapping_sub(self.next.wrapping_add(1)) > self.queue.entries.1 {
            return Err(FaultKind::Enable(index));
        }
        self.enabled = index;
        Ok(())
    }

    fn move_bytes(&self, entry: &Entry, len: u64, peer: &mut dyn ChainPeer) -> Result<(), FaultKind> {
        let views = &self.queue.views[..];
        let local =
            |element: &Element, need| views.find(element.key, element.address, element.len.into(), need);
        match entry.opcode {
            Opcode::Write | Opcode::WriteImm if entry.peer => {
                // Found before the packet is begun: a fault sends nothing.
                for element in entry.local() {
                    local(element, Need::Read)?;
                }
                let imm = (entry.opcode == Opcode::WriteImm).then_some(entry.imm);
                peer.write(entry.key, entry.address, imm, len as usize, &|mut out| {
                    for element in entry.local() {
                        let (part, rest) = out.split_at_mut((element.len as usize).min(out.len()));
                        if let Ok(place) = local(element, Need::Read) {
                            place.memory.read(place.offset, part);
                        }
                        out = rest;
                    }
                })?;
            }
            Opcode::Write => {
                let mut to = views.find(entry.key, entry.address, len, Need::Write)?;
                for element in entry.local() {
                    copy(local(element, Need::Read)?, to, element.len as usize)?;
                    to.offset += element.len as usize;
                }
            }
            Opcode::Read => {
                let mut from = views.find(entry.key, entry.address, len, Need::Read)?;
                if entry.local().len() > 1 && len as usize <= SMALL {
                    return self.scatter_small(entry, from, len as usize);
                }
                for element in entry.local() {
                    copy(from, local(element, Need::Write)?, element.len as usize)?;
                    from.offset += element.len as usize;
                }
            }
            Opcode::MaskedSwap | Opcode::MaskedAdd => {
                if len != 8 {
                    return Err(FaultKind::OldValue(len));
                }
                // The room for the old value is found first: a fault changes nothing.
                for element in entry.local() {
                    local(element, Need::Write)?;
                }
                let place = views.find(entry.key, entry.address, 8, Need::Atomic)?;
                let old = atomic(entry, place).to_le_bytes();
                let mut at = 0;
                for element in entry.local() {
                    let to = local(element, Need::Write)?;
                    to.memory.write(to.offset, &old[at..at + element.len as usize]);
                    at += element.len as usize;
                }
            }
            Opcode::Nop | Opcode::Wait | Opcode::Enable | Opcode::WriteImm => {}
        }
        Ok(())
    }

    /// A READ of few bytes into several elements.
    fn scatter_small(&self, entry: &Entry, from: Place<'_>, len: usize) -> Result<(), FaultKind> {
        let mut bytes = [0; SMALL];
        from.memory.read_as_rnic(from.offset, &mut bytes[..len]);
        let mut left = &bytes[..len];
        for element in entry.local() {
            let (part, rest) = left.split_at(element.len as usize);
            let to =
                self.queue.views[..].find(element.key, element.address, element.len.into(), Need::Write)?;
            to.memory.write(to.offset, part);
            left = rest;
        }
        Ok(())
    }
}

/// Does an atomic; returns the old value. The word is the host's, little-endian.
fn atomic(entry: &Entry, place: Place<'_>) -> u64 {
    let word = place.memory.atomic_u64(place.offset);
    let new = |old: u64| {
        if entry.opcode == Opcode::MaskedAdd {
            // Without the top bits nothing is carried out of a field; the top bits are added without a carry.
            let tops = entry.mask;
            (old & !tops).wrapping_add(entry.operand & !tops) ^ ((old ^ entry.operand) & tops)
        } else if (old ^ entry.compare) & entry.compare_mask == 0 {
            (old & !entry.mask) | (entry.operand & entry.mask)
        } else {
            old
        }
    };
    word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| Some(new(old))).unwrap_or_else(|old| old)
}

#[cfg(test)]
#[path = "run_tests.rs"]
pub(in crate::rdma::chain) mod tests;
