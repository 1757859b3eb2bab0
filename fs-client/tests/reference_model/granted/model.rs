//! The file as the walk knows it, and what it may be after a death of the server.

use super::SPAN;
use std::collections::BTreeSet;

/// No session, as the writer of a byte.
const NOBODY: usize = usize::MAX;

/// A value that a byte got.
#[derive(Clone, Copy, Debug)]
struct Value {
    byte: u8,
    /// Whose answered request wrote it, or waited for it to be durable: it survives with the server, or with that session. `None`: it may be lost, as a
    /// one-sided change may.
    keeper: Option<usize>,
    /// Who appended it, perhaps one-sidedly.
    appender: Option<usize>,
}

impl Value {
    fn of(byte: u8) -> Self {
        Self { byte, keeper: None, appender: None }
    }
}

/// A change of the length.
#[derive(Clone, Copy, Debug)]
enum Length {
    AtLeast(usize, Option<usize>),
    Exactly(usize, Option<usize>),
}

/// What the file has, and what it may have after a death of the server.
pub struct Model {
    pub bytes: Vec<u8>,
    /// The values of each byte since it was durable, that one included. Behind the end there are zeros.
    cells: Vec<Vec<Value>>,
    durable_len: usize,
    lengths: Vec<Length>,
    /// Whose one-sided change each byte has.
    writers: Vec<usize>,
}

impl Model {
    pub fn new() -> Self {
        let (bytes, cells, writers) = (Vec::new(), vec![Vec::new(); SPAN], vec![NOBODY; SPAN]);
        let mut model = Self { bytes, cells, durable_len: 0, lengths: Vec::new(), writers };
        model.synced();
        model
    }

    /// All of it is durable.
    pub fn synced(&mut self) {
        for (at, cell) in self.cells.iter_mut().enumerate() {
            *cell = vec![Value::of(self.bytes.get(at).copied().unwrap_or(0))];
        }
        self.durable_len = self.bytes.len();
        self.lengths.clear();
        self.writers.fill(NOBODY);
    }

    /// A session wrote bytes, perhaps one-sidedly.
    pub fn write(&mut self, by: usize, is_one_sided: bool, offset: usize, bytes: &[u8]) {
        let end = offset + bytes.len();
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        self.bytes[offset..end].copy_from_slice(bytes);
        let keeper = (!is_one_sided).then_some(by);
        for (at, byte) in (offset..end).zip(bytes) {
            self.cells[at].push(Value { keeper, ..Value::of(*byte) });
            self.writers[at] = if is_one_sided { by } else { NOBODY };
        }
        self.lengths.push(Length::AtLeast(end, keeper));
    }

    /// A session appended bytes, perhaps one-sidedly.
    pub fn append(&mut self, by: usize, is_one_sided: bool, offset: usize, bytes: &[u8]) {
        self.write(by, is_one_sided, offset, bytes);
        let cells = self.cells[offset..offset + bytes.len()].iter_mut();
        let appended = cells.filter_map(|cell| cell.last_mut().filter(|_| is_one_sided));
        appended.for_each(|value| value.appender = Some(by));
    }

    /// A request was answered that put bytes or the end of the file at this place. What was appended before it is durable, or its appender's request
    /// wrote it. Returns whether there was any.
    pub fn answered(&mut self, place: usize) -> bool {
        let mut has_any = false;
        for (cell, byte) in self.cells.iter_mut().zip(&self.bytes).take(place) {
            // What a death took is in the place no more.
            let appended = cell.last_mut().filter(|value| value.byte == *byte && value.keeper.is_none());
            if let Some(value) = appended {
                value.keeper = value.appender;
                has_any |= value.keeper.is_some();
            }
        }
        has_any
    }

    /// Whether the last change of these bytes was made is in doubt, and its session knows that: nobody need be told that they are lost.
    pub fn doubt(&mut self, offset: usize, len: usize) {
        self.writers[offset..offset + len].fill(NOBODY);
    }

    pub fn set_len(&mut self, by: usize, len: usize) {
        self.bytes.resize(len, 0);
        self.cells[len..].iter_mut().for_each(|cell| *cell = vec![Value::of(0)]);
        self.writers[len..].fill(NOBODY);
        self.lengths.push(Length::Exactly(len, Some(by)));
    }

    /// A session is gone, and its copies of what it wrote.
    pub fn vanished(&mut self, gone: usize) {
        let forget = |keeper: &mut Option<usize>| {
            keeper.take_if(|keeper| *keeper == gone);
        };
        for value in self.cells.iter_mut().flatten() {
            forget(&mut value.keeper);
            // Nor does anybody bring back what it appended by requests.
            forget(&mut value.appender);
        }
        for length in &mut self.lengths {
            let (Length::AtLeast(_, keeper) | Length::Exactly(_, keeper)) = length;
            forget(keeper);
        }
        self.writers.iter_mut().filter(|writer| **writer == gone).for_each(|writer| *writer = NOBODY);
    }

    /// The word at an aligned place, with zeros behind the end.
    pub fn word(&self, offset: usize) -> u64 {
        let mut word = [0; 8];
        let from = offset.min(self.bytes.len());
        let bytes = &self.bytes[from..(offset + 8).min(self.bytes.len()).max(from)];
        word[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    }

    /// Whether a place may have these bytes behind a death: each was there since it was durable.
    pub fn may_have(&self, offset: usize, bytes: &[u8]) -> bool {
        let cells = self.cells[offset..offset + bytes.len()].iter();
        cells.zip(bytes).all(|(cell, byte)| cell.iter().any(|value| value.byte == *byte))
    }

    /// The lengths that the file may have.
    fn possible_lengths(&self) -> BTreeSet<usize> {
        let mut possible = BTreeSet::from([self.durable_len]);
        for length in &self.lengths {
            let longer = |end: usize| possible.iter().map(|len| end.max(*len)).collect::<BTreeSet<_>>();
            match *length {
                Length::AtLeast(end, Some(_)) => possible = longer(end),
                Length::AtLeast(end, None) => possible.extend(longer(end)),
                Length::Exactly(len, Some(_)) => possible = BTreeSet::from([len]),
                // That it was cut is durable.
                Length::Exactly(len, None) => {
                    possible = possible.iter().map(|before| len.min(*before)).chain([len]).collect()
                }
            }
        }
        possible
    }

    /// Checks what is there after a death, and goes on from that. Returns who has lost bytes that it wrote one-sidedly.
    pub fn survive(&mut self, found: &[u8]) -> BTreeSet<usize> {
        let lengths = self.possible_lengths();
        assert!(lengths.contains(&found.len()), "{} bytes, and not one of {lengths:?}", found.len());
        for (at, byte) in found.iter().enumerate() {
            let cell = &self.cells[at];
            let first = cell.iter().rposition(|value| value.keeper.is_some()).unwrap_or(0);
            assert!(
                cell[first..].iter().any(|value| value.byte == *byte),
                "byte {at} is {byte}, and was {cell:?}"
            );
        }
        let is_lost = |(at, byte): &(usize, &u8)| found.get(*at) != Some(*byte);
        let lost = self.bytes.iter().enumerate().filter(is_lost);
        let mut losers: BTreeSet<usize> = lost.map(|(at, _)| self.writers[at]).collect();
        losers.remove(&NOBODY);
        self.bytes = found.to_vec();
        losers
    }
}
