//! Writes work queues: one chain, repeated in every place of the queue, and the message that starts it.
//!
//! # Laps
//! Message `n` starts the chain of place `n mod places`. The indices of its WAIT and its ENABLEs, and the doorbell, are those of this lap; who sends the
//! message sends with it those of the place that is half the queue ahead, whose chain is over if no more than `window` messages are outstanding. So a
//! queue goes on for ever, and nobody at its side touches it (ODRP section 4.4).
//!
//! ```text
//! doorbell | receive entries | work entries of place 0, 1, ... | scratch of place 0, 1, ...
//! ```

use super::entry::{ELEMENTS_MAX, ENTRY_LEN, Element, Entry, Field, Opcode, RECEIVE_LEN, ReceiveEntry};
use super::queue::WorkQueue;
use super::view::{FIRST_ADDRESS, View};
use crate::rdma::WrId;
use std::sync::Arc;

/// Room of the doorbell record; it has a block of its own.
const DOORBELL_LEN: usize = 64;

/// An entry of a chain, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label(pub u32);

/// Bytes that a chain names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bytes {
    /// Of the place's own scratch.
    Scratch {
        /// The first byte.
        at: u32,
        /// Bytes.
        len: u32,
    },
    /// A field of an entry.
    Of(Label, Field),
    /// One byte of a field.
    ByteOf(Label, Field, u32),
    /// Fixed bytes elsewhere.
    At {
        /// The key.
        key: u32,
        /// The address.
        address: u64,
        /// Bytes.
        len: u32,
    },
    /// Bytes of this key's memory at an address that a message or another entry puts into the entry. Only as a remote range.
    Filled {
        /// The key.
        key: u32,
    },
}

#[derive(Clone, Copy, Debug)]
struct Symbolic {
    entry: Entry,
    remote: Option<Bytes>,
    local: [Option<Bytes>; ELEMENTS_MAX],
}

/// A chain in the making.
#[derive(Clone, Debug)]
pub struct Assembler {
    key: u32,
    entries: Vec<Symbolic>,
    arguments: Vec<Bytes>,
    payload: Option<Bytes>,
    scratch_len: u32,
}

/// Where the parts of a queue lie, as offsets in its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Places: messages of one lap.
    pub places: u32,
    /// Entries of one chain.
    pub per_place: u32,
    /// Bytes of scratch of one place.
    pub scratch_len: u32,
}

impl Geometry {
    /// The first receive entry.
    pub fn receives_at(self) -> u64 {
        DOORBELL_LEN as u64
    }

    /// The first work entry.
    pub fn entries_at(self) -> u64 {
        self.receives_at() + u64::from(self.places) * RECEIVE_LEN as u64
    }

    /// Work entries of the whole queue.
    pub fn entries(self) -> u32 {
        self.places * self.per_place
    }

    /// The scratch of place 0.
    pub fn scratch_at(self) -> u64 {
        self.entries_at() + u64::from(self.entries()) * ENTRY_LEN as u64
    }

    /// Bytes of the queue's memory.
    pub fn len(self) -> u64 {
        self.scratch_at() + u64::from(self.places) * u64::from(self.scratch_len)
    }

    /// Never true; here because clippy wants a pair.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The most messages that may be outstanding.
    pub fn window(self) -> u32 {
        self.places / 2
    }
}

/// What a message looks like: the arguments in their order, the indices of a later lap, the payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageShape {
    per_place: u32,
    window: u32,
    /// Offset and length of each argument.
    arguments: Vec<(usize, usize)>,
    /// Each ENABLE's index, counted from the chain's first entry.
    enables: Vec<u32>,
    payload: Option<(usize, usize)>,
}

impl MessageShape {
    /// The most messages that may be outstanding.
    pub fn window(&self) -> u32 {
        self.window
    }

    fn indices_at(&self) -> usize {
        self.arguments.last().map_or(0, |(at, len)| at + len)
    }

    /// Bytes of a message.
    pub fn len(&self) -> usize {
        let indices = self.indices_at() + 4 * (2 + self.enables.len());
        self.payload.map_or(indices, |(at, len)| at + len)
    }

    /// Never true; here because clippy wants a pair.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where an argument lies in the message.
    pub fn argument(&self, number: usize) -> std::ops::Range<usize> {
        let (at, len) = self.arguments[number];
        at..at + len
    }

    /// Where the payload lies in the message; empty if there is none.
    pub fn payload(&self) -> std::ops::Range<usize> {
        let (at, len) = self.payload.unwrap_or((self.len(), 0));
        at..at + len
    }

    /// Writes the indices of message `number`, counted from 0, into a message.
    pub fn put_indices(&self, number: u64, message: &mut [u8]) {
        let later = number.wrapping_add(u64::from(self.window));
        let count = (later as u32).wrapping_add(1);
        let base = (later as u32).wrapping_mul(self.per_place);
        let enables = self.enables.iter().map(|relative| base.wrapping_add(*relative));
        let values = std::iter::once(count).chain(enables).chain([count]);
        let room = message[self.indices_at()..].chunks_exact_mut(4);
        for (room, value) in room.zip(values) {
            room.copy_from_slice(&value.to_be_bytes());
        }
    }
}

/// A work queue as bytes, to be copied to the beginning of its memory.
#[derive(Clone, Debug)]
pub struct Assembled {
    /// The bytes.
    pub image: Vec<u8>,
    /// Where the parts lie.
    pub geometry: Geometry,
    /// The entries before this index are enabled from the beginning.
    pub enabled: u32,
    /// What its messages look like.
    pub shape: MessageShape,
}

impl Assembled {
    /// The queue, whose bytes lie at the beginning of the memory of `key`, which one of the views is of.
    pub fn queue(&self, key: u32, views: Vec<View>, wr_id: WrId) -> WorkQueue {
        let geometry = self.geometry;
        WorkQueue {
            views,
            key,
            receives: (FIRST_ADDRESS + geometry.receives_at(), geometry.places),
            entries: (FIRST_ADDRESS + geometry.entries_at(), geometry.entries()),
            doorbell: FIRST_ADDRESS,
            enabled: self.enabled,
            wr_id,
            gate: Arc::default(),
            figures: Arc::default(),
        }
    }
}

impl Assembler {
    /// A chain of a queue whose memory has this key.
    pub fn new(key: u32) -> Self {
        Self { key, entries: Vec::new(), arguments: Vec::new(), payload: None, scratch_len: 0 }
    }

    /// Takes scratch memory; aligned to eight bytes.
    pub fn scratch(&mut self, len: u32) -> Bytes {
        let at = self.scratch_len;
        self.scratch_len += len.next_multiple_of(8);
        Bytes::Scratch { at, len }
    }

    fn push(&mut self, entry: Entry, remote: Option<Bytes>, local: &[Bytes]) -> Label {
        let mut elements = [None; ELEMENTS_MAX];
        for (element, bytes) in elements.iter_mut().zip(local) {
            *element = Some(*bytes);
        }
        self.entries.push(Symbolic { entry, remote, local: elements });
        Label(self.entries.len() as u32 - 1)
    }

    /// WAIT for the message of this place.
    pub fn wait(&mut self) -> Label {
        self.push(Entry { opcode: Opcode::Wait, ..Entry::default() }, None, &[])
    }

    /// ENABLE of everything up to the next ENABLE, which may be the next place's.
    pub fn enable(&mut self) -> Label {
        self.push(Entry { opcode: Opcode::Enable, ..Entry::default() }, None, &[])
    }

    /// READ of a range as long as the local elements.
    pub fn read(&mut self, remote: Bytes, local: &[Bytes]) -> Label {
        self.push(Entry { opcode: Opcode::Read, ..Entry::default() }, Some(remote), local)
    }

    /// Turns a number's bytes around: one READ into eight elements of a byte (section 4.2).
    pub fn turn(&mut self, from: Bytes, label: Label, field: Field) -> Label {
        let bytes: [Bytes; 8] = std::array::from_fn(|index| Bytes::ByteOf(label, field, 7 - index as u32));
        self.read(from, &bytes)
    }

    /// WRITE of the local elements.
    pub fn write(&mut self, remote: Bytes, local: &[Bytes]) -> Label {
        self.push(Entry { opcode: Opcode::Write, ..Entry::default() }, Some(remote), local)
    }

    /// WRITE_IMM of the local elements to where a message says in the peer's memory; the chain's last entry.
    pub fn tell_peer(&mut self, local: &[Bytes]) -> Label {
        let entry = Entry { opcode: Opcode::WriteImm, peer: true, last: true, ..Entry::default() };
        self.push(entry, None, local)
    }

    /// Adds in the low bits of a word, up to the bit that `top` has, and fetches the old value.
    pub fn add(&mut self, remote: Bytes, operand: u64, top: u64, old: Bytes) -> Label {
        let entry = Entry { opcode: Opcode::MaskedAdd, operand, mask: top, ..Entry::default() };
        self.push(entry, Some(remote), &[old])
    }

    /// Swaps a word with zero.
    pub fn take(&mut self, remote: Bytes, old: Bytes) -> Label {
        let entry = Entry { opcode: Opcode::MaskedSwap, mask: u64::MAX, ..Entry::default() };
        self.push(entry, Some(remote), &[old])
    }

    /// The next bytes of each message go there.
    pub fn argument(&mut self, to: Bytes) {
        self.arguments.push(to);
    }

    /// The last bytes of each message go there.
    pub fn payload(&mut self, to: Bytes) {
        self.payload = Some(to);
    }

    /// The queue, with this number of places (even, so that half of it is whole).
    ///
    /// # Panics
    /// The chain has no WAIT or no ENABLE, or its messages have more parts than a receive entry: a fault of the program that wrote it.
    pub fn finish(&self, places: u32) -> Assembled {
        let places = places.next_multiple_of(2);
        let geometry = Geometry {
            places,
            per_place: self.entries.len() as u32,
            scratch_len: self.scratch_len.next_multiple_of(64),
        };
        let of = |opcode| {
            let labels = self.entries.iter().enumerate().filter(move |(_, one)| one.entry.opcode == opcode);
            labels.map(|(label, _)| label as u32).collect::<Vec<u32>>()
        };
        let (waits, enables) = (of(Opcode::Wait), of(Opcode::Enable));
        let first = *enables.first().expect("a chain has an ENABLE");
        assert_eq!(waits, [0], "a chain begins with its one WAIT");
        // Up to the next ENABLE and with it; the last one of a place reaches the first one of the next place.
        let next = enables[1..].iter().copied().chain([geometry.per_place + first]);
        let relative: Vec<u32> = next.map(|label| label + 1).collect();
        let shape = self.shape(&geometry, &relative);
        let mut image = vec![0; geometry.len() as usize];
        image[..4].copy_from_slice(&geometry.window().to_be_bytes());
        for place in 0..places {
            let base = place * geometry.per_place;
            let mut next_enable = relative.iter();
            for (label, symbolic) in self.entries.iter().enumerate() {
                let mut entry = self.resolve(symbolic, &geometry, place);
                match entry.opcode {
                    Opcode::Wait => entry.index = place + 1,
                    Opcode::Enable => entry.index = base + next_enable.next().copied().unwrap_or_default(),
                    _ => {}
                }
                let at = geometry.entries_at() as usize + (base as usize + label) * ENTRY_LEN;
                image[at..at + ENTRY_LEN].copy_from_slice(&entry.encode());
            }
            let at = geometry.receives_at() as usize + place as usize * RECEIVE_LEN;
            let receive = self.receive(&geometry, place, &waits, &enables);
            image[at..at + RECEIVE_LEN].copy_from_slice(&receive.encode());
        }
        Assembled { image, geometry, enabled: first + 1, shape }
    }

    fn shape(&self, geometry: &Geometry, enables: &[u32]) -> MessageShape {
        let len_of = |bytes: &Bytes| self.element(bytes, geometry, 0).len as usize;
        let mut at = 0;
        let arguments: Vec<_> = (self.arguments.iter())
            .map(|bytes| {
                let argument = (at, len_of(bytes));
                at += argument.1;
                argument
            })
            .collect();
        at += 4 * (2 + enables.len());
        let payload = self.payload.as_ref().map(|bytes| (at, len_of(bytes)));
        MessageShape {
            per_place: geometry.per_place,
            window: geometry.window(),
            arguments,
            enables: enables.to_vec(),
            payload,
        }
    }

    fn receive(&self, geometry: &Geometry, place: u32, waits: &[u32], enables: &[u32]) -> ReceiveEntry {
        let later = (place + geometry.window()) % geometry.places;
        let mut elements: Vec<Element> =
            self.arguments.iter().map(|bytes| self.element(bytes, geometry, place)).collect();
        for label in waits.iter().chain(enables) {
            elements.push(self.element(&Bytes::Of(Label(*label), Field::Index), geometry, later));
        }
        elements.push(Element { len: 4, key: self.key, address: FIRST_ADDRESS });
        elements.extend(self.payload.as_ref().map(|bytes| self.element(bytes, geometry, place)));
        assert!(elements.len() <= ELEMENTS_MAX, "a message has at most {ELEMENTS_MAX} parts");
        ReceiveEntry::of(&elements)
    }

    fn resolve(&self, symbolic: &Symbolic, geometry: &Geometry, place: u32) -> Entry {
        let local: Vec<Element> =
            symbolic.local.iter().flatten().map(|bytes| self.element(bytes, geometry, place)).collect();
        let remote = symbolic.remote.map(|bytes| self.element(&bytes, geometry, place)).unwrap_or_default();
        Entry { key: remote.key, address: remote.address, ..symbolic.entry }.with_local(&local)
    }

    fn element(&self, bytes: &Bytes, geometry: &Geometry, place: u32) -> Element {
        let own = |offset: u64, len: u32| Element { len, key: self.key, address: FIRST_ADDRESS + offset };
        let entry_at = |label: Label| {
            geometry.entries_at() + u64::from(place * geometry.per_place + label.0) * ENTRY_LEN as u64
        };
        match *bytes {
            Bytes::Scratch { at, len } => {
                let of_place = u64::from(place) * u64::from(geometry.scratch_len);
                own(geometry.scratch_at() + of_place + u64::from(at), len)
            }
            Bytes::Of(label, field) => {
                let (at, len) = field.range();
                own(entry_at(label) + at as u64, len as u32)
            }
            Bytes::ByteOf(label, field, byte) => {
                own(entry_at(label) + field.range().0 as u64 + u64::from(byte), 1)
            }
            Bytes::At { key, address, len } => Element { len, key, address },
            Bytes::Filled { key } => Element { len: 0, key, address: 0 },
        }
    }
}
