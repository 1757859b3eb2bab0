//! The bytes of a work queue in registered memory. All numbers are big-endian, as in an mlx5 work queue; `docs/odrp.md` has the table.

use zerocopy::big_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a work entry: three blocks of 64.
pub const ENTRY_LEN: usize = 192;
/// Bytes before its elements: one block.
pub(super) const HEAD_LEN: usize = 64;
/// Local elements of a work entry, and elements of a receive entry.
pub const ELEMENTS_MAX: usize = 8;
/// Bytes of an element.
pub const ELEMENT_LEN: usize = 16;
/// Bytes of a receive entry.
pub const RECEIVE_LEN: usize = ELEMENTS_MAX * ELEMENT_LEN;
const FLAG_PEER: u8 = 1;
const FLAG_LAST: u8 = 2;

/// What an entry does. The numbers are mlx5's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Opcode {
    /// Nothing.
    #[default]
    Nop = 0,
    /// From the local elements to the remote range.
    Write = 0x08,
    /// The same to the peer, and an immediate that completes one of its receives.
    WriteImm = 0x09,
    /// Goes on once as many messages have come.
    Wait = 0x0f,
    /// From the remote range to the local elements.
    Read = 0x10,
    /// Compares the bits of one mask, swaps those of another; the old value goes to the local elements.
    MaskedSwap = 0x14,
    /// Adds without a carry out of the fields whose top bits the mask has; the old value goes to the local elements.
    MaskedAdd = 0x15,
    /// Lets the entries before an index be executed.
    Enable = 0x17,
}

impl Opcode {
    fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            0 => Self::Nop,
            0x08 => Self::Write,
            0x09 => Self::WriteImm,
            0x0f => Self::Wait,
            0x10 => Self::Read,
            0x14 => Self::MaskedSwap,
            0x15 => Self::MaskedAdd,
            0x17 => Self::Enable,
            _ => return None,
        })
    }

    /// Whether the entry moves bytes, so that its remote and local parts mean something.
    pub const fn moves(self) -> bool {
        !matches!(self, Self::Nop | Self::Wait | Self::Enable)
    }

    /// Whether the local elements are written.
    pub const fn fills_local(self) -> bool {
        matches!(self, Self::Read | Self::MaskedSwap | Self::MaskedAdd)
    }
}

/// A field of a work entry that a message or another entry may name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// The immediate, 4 bytes.
    Immediate,
    /// The index of WAIT and ENABLE, 4 bytes.
    Index,
    /// The remote address, 8 bytes.
    Address,
    /// The remote address and key, 12 bytes in a row.
    Remote,
    /// The address of the first local element, 8 bytes.
    LocalAddress,
}

impl Field {
    /// Where it lies in the entry, and its bytes.
    pub const fn range(self) -> (usize, usize) {
        match self {
            Self::Immediate => (4, 4),
            Self::Index => (8, 4),
            Self::Address => (16, 8),
            Self::Remote => (16, 12),
            Self::LocalAddress => (72, 8),
        }
    }
}

/// A range of registered memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Element {
    /// Bytes.
    pub len: u32,
    /// The memory's key.
    pub key: u32,
    /// The first byte.
    pub address: u64,
}

/// A work entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// What it does.
    pub opcode: Opcode,
    /// The remote range is the peer's.
    pub peer: bool,
    /// The last one of a chain: it is counted.
    pub last: bool,
    /// Immediate data.
    pub imm: u32,
    /// Of WAIT and ENABLE.
    pub index: u32,
    /// First byte of the remote range.
    pub address: u64,
    /// Key of the remote range.
    pub key: u32,
    /// To add, or to swap in.
    pub operand: u64,
    /// To compare with.
    pub compare: u64,
    /// Bits to swap; top bits of fields.
    pub mask: u64,
    /// Bits to compare.
    pub compare_mask: u64,
    /// How many of `local` count; never more than there are.
    pub(super) elements: u8,
    pub(super) local: [Element; ELEMENTS_MAX],
}

/// Why bytes are no work entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadEntry {
    /// No such opcode.
    #[error("opcode {0:#04x} is unknown")]
    Opcode(u8),
    /// A flag that does not exist, or does not fit the opcode.
    #[error("flags {0:#04x} are impossible here")]
    Flags(u8),
    /// More elements than there is room for.
    #[error("{0} local elements are more than {ELEMENTS_MAX}")]
    Elements(u8),
    /// A reserved field is in use.
    #[error("a field that must be zero is not")]
    Reserved,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawElement {
    len: U32,
    key: U32,
    address: U64,
}
const _: () = assert!(size_of::<RawElement>() == ELEMENT_LEN);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Raw {
    opcode: u8,
    flags: u8,
    elements: u8,
    zero: u8,
    imm: U32,
    index: U32,
    zero_too: U32,
    address: U64,
    key: U32,
    zero_again: U32,
    operand: U64,
    compare: U64,
    mask: U64,
    compare_mask: U64,
    local: [RawElement; ELEMENTS_MAX],
}
const _: () = assert!(size_of::<Raw>() == ENTRY_LEN);
const _: () = assert!(ENTRY_LEN.is_multiple_of(HEAD_LEN) && ENTRY_LEN - HEAD_LEN == RECEIVE_LEN);
const _: () = assert!(std::mem::offset_of!(Raw, local) == HEAD_LEN);

impl Element {
    fn raw(self) -> RawElement {
        RawElement { len: self.len.into(), key: self.key.into(), address: self.address.into() }
    }

    fn parse(raw: &RawElement) -> Self {
        Self { len: raw.len.get(), key: raw.key.get(), address: raw.address.get() }
    }
}

impl Entry {
    /// An entry with these local elements, of which only the first `ELEMENTS_MAX` count.
    #[must_use]
    pub fn with_local(mut self, local: &[Element]) -> Self {
        let count = local.len().min(ELEMENTS_MAX);
        self.local = [Element::default(); ELEMENTS_MAX];
        self.local[..count].copy_from_slice(&local[..count]);
        self.elements = count as u8;
        self
    }

    /// The local elements.
    pub fn local(&self) -> &[Element] {
        &self.local[..usize::from(self.elements)]
    }

    /// Bytes of all local elements.
    pub fn local_len(&self) -> u64 {
        self.local().iter().map(|element| u64::from(element.len)).sum()
    }

    /// The range of this side that it changes at its remote end.
    pub fn changed_remote(&self) -> Option<Element> {
        let changes = self.opcode.moves() && self.opcode != Opcode::Read && !self.peer;
        changes.then(|| Element { len: self.local_len() as u32, key: self.key, address: self.address })
    }

    /// Its bytes.
    pub fn encode(&self) -> [u8; ENTRY_LEN] {
        let raw = Raw {
            opcode: self.opcode as u8,
            flags: if self.peer { FLAG_PEER } else { 0 } | if self.last { FLAG_LAST } else { 0 },
            elements: self.elements,
            zero: 0,
            imm: self.imm.into(),
            index: self.index.into(),
            zero_too: 0.into(),
            address: self.address.into(),
            key: self.key.into(),
            zero_again: 0.into(),
            operand: self.operand.into(),
            compare: self.compare.into(),
            mask: self.mask.into(),
            compare_mask: self.compare_mask.into(),
            local: self.local.map(Element::raw),
        };
        zerocopy::transmute!(raw)
    }

    /// Bytes of the elements that count, by an entry's first bytes.
    pub(super) fn elements_len(head: &[u8]) -> usize {
        usize::from(head[std::mem::offset_of!(Raw, elements)]) * ELEMENT_LEN
    }

    /// Parses an entry.
    ///
    /// # Errors
    /// `BadEntry`; whoever can write to the queue can cause it.
    pub fn parse(bytes: &[u8; ENTRY_LEN]) -> Result<Self, BadEntry> {
        let mut entry = Self::default();
        entry.fill(bytes).map(|()| entry)
    }

    /// Becomes the entry that these bytes are: it is too large to be handed on from call to call. On an error it is none.
    ///
    /// # Errors
    /// As `parse`.
    pub(super) fn fill(&mut self, bytes: &[u8; ENTRY_LEN]) -> Result<(), BadEntry> {
        let raw: &Raw = zerocopy::transmute_ref!(bytes);
        let opcode = Opcode::from_number(raw.opcode).ok_or(BadEntry::Opcode(raw.opcode))?;
        let peer = raw.flags & FLAG_PEER != 0;
        // Of the peer's memory nothing can be fetched, and there is no receive on this side.
        let fits = match opcode {
            Opcode::WriteImm => peer,
            Opcode::Write => true,
            _ => !peer,
        };
        if raw.flags & !(FLAG_PEER | FLAG_LAST) != 0 || !fits {
            return Err(BadEntry::Flags(raw.flags));
        }
        if usize::from(raw.elements) > ELEMENTS_MAX {
            return Err(BadEntry::Elements(raw.elements));
        }
        if raw.zero != 0 || raw.zero_too.get() != 0 || raw.zero_again.get() != 0 {
            return Err(BadEntry::Reserved);
        }
        self.opcode = opcode;
        (self.peer, self.last) = (peer, raw.flags & FLAG_LAST != 0);
        (self.imm, self.index) = (raw.imm.get(), raw.index.get());
        (self.address, self.key) = (raw.address.get(), raw.key.get());
        (self.operand, self.compare) = (raw.operand.get(), raw.compare.get());
        (self.mask, self.compare_mask) = (raw.mask.get(), raw.compare_mask.get());
        self.elements = raw.elements;
        self.local = [Element::default(); ELEMENTS_MAX];
        for (element, raw) in self.local.iter_mut().zip(&raw.local[..usize::from(raw.elements)]) {
            *element = Element::parse(raw);
        }
        Ok(())
    }
}

/// Where a message's bytes go, in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiveEntry {
    elements: [Element; ELEMENTS_MAX],
}

impl ReceiveEntry {
    /// An entry with these elements, of which only the first `ELEMENTS_MAX` count. None may be empty: the first empty one is the end.
    pub fn of(list: &[Element]) -> Self {
        let mut elements = [Element::default(); ELEMENTS_MAX];
        let count = list.len().min(ELEMENTS_MAX);
        elements[..count].copy_from_slice(&list[..count]);
        Self { elements }
    }

    /// Its elements up to the first empty one.
    pub fn elements(&self) -> &[Element] {
        let end = self.elements.iter().position(|element| element.len == 0).unwrap_or(ELEMENTS_MAX);
        &self.elements[..end]
    }

    /// Its bytes.
    pub fn encode(&self) -> [u8; RECEIVE_LEN] {
        zerocopy::transmute!(self.elements.map(Element::raw))
    }

    /// Parses an entry; all bytes are one.
    pub fn parse(bytes: &[u8; RECEIVE_LEN]) -> Self {
        let raw: &[RawElement; ELEMENTS_MAX] = zerocopy::transmute_ref!(bytes);
        Self { elements: raw.each_ref().map(Element::parse) }
    }
}

#[cfg(test)]
#[path = "entry_tests.rs"]
mod tests;
