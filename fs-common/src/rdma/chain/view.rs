//! The memory that a chain reaches: ranges of registered memory, by key.
//!
//! # Invariants
//! A place is found only whole inside of one view that gives the right to it. The null address is in no view.

use crate::memory::SharedMemory;
use crate::rdma::MemoryRegion;
use std::sync::Arc;

/// The address of the first byte of each key's memory. Not zero, so that a null address, or one whose bytes are the wrong way round, is in no memory.
pub const FIRST_ADDRESS: u64 = 1 << 32;
/// The most views of one queue.
pub const VIEWS_MAX: usize = 8;

/// What an entry does to a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Reads it.
    Read,
    /// Writes it.
    Write,
    /// Changes an aligned word of it.
    Atomic,
}

/// Why a range cannot be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotInView {
    /// No view has the key.
    #[error("key {0:#010x} is of no view")]
    Key(u32),
    /// The range is not inside of the view.
    #[error("{len} bytes at {address:#x} are outside of what key {key:#010x} opens")]
    Range {
        /// The key.
        key: u32,
        /// The first byte.
        address: u64,
        /// Bytes.
        len: u64,
    },
    /// The view does not allow it.
    #[error("key {0:#010x} gives no right to {1:?}")]
    Right(u32, Need),
    /// An atomic, or an access to a view of words, that is no aligned word.
    #[error("{1} bytes at {0:#x} are no aligned word")]
    NoWord(u64, u64),
}

/// A place in memory that was found.
#[derive(Clone, Copy, Debug)]
pub struct Place<'m> {
    /// The memory.
    pub memory: &'m SharedMemory,
    /// The first byte in it.
    pub offset: usize,
}

/// Registered memory as a chain sees it.
pub trait ChainMemory {
    /// Finds a range.
    ///
    /// # Errors
    /// `NotInView`: the chain ends there.
    fn find(&self, key: u32, address: u64, len: u64, need: Need) -> Result<Place<'_>, NotInView>;
}

/// A range of registered memory that a queue's chains reach.
#[derive(Clone)]
pub struct View {
    name: &'static str,
    key: u32,
    memory: Arc<SharedMemory>,
    /// Keeps the memory registered.
    _region: Option<Arc<dyn MemoryRegion>>,
    from: u64,
    len: u64,
    write: bool,
    atomic: bool,
    words: bool,
}

impl std::fmt::Debug for View {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (key {:#010x}, {} bytes from {})", self.name, self.key, self.len, self.from)
    }
}

impl View {
    /// A view of a whole region, to read. The name is for people.
    pub fn of(name: &'static str, region: &Arc<dyn MemoryRegion>) -> Self {
        let view = Self::unregistered(name, region.lkey().0, region.memory().clone());
        Self { _region: Some(region.clone()), ..view }
    }

    /// A view of memory that no RNIC knows, for an executor of one's own.
    pub fn unregistered(name: &'static str, key: u32, memory: Arc<SharedMemory>) -> Self {
        let len = memory.len() as u64;
        Self { name, key, memory, _region: None, from: 0, len, write: false, atomic: false, words: false }
    }

    /// Only `len` bytes from `from` on; the bounds of the memory hold in any case.
    #[must_use]
    pub fn part(self, from: u64, len: u64) -> Self {
        let end = self.memory.len() as u64;
        let from = from.min(end);
        Self { from, len: len.min(end - from), ..self }
    }

    /// May be written, where the mapping may.
    #[must_use]
    pub fn writable(self) -> Self {
        Self { write: self.memory.is_writable(), ..self }
    }

    /// May be written and changed by atomics, where the mapping may be written.
    #[must_use]
    pub fn atomic(self) -> Self {
        Self { atomic: self.memory.is_writable(), ..self.writable() }
    }

    /// Every access must be an aligned word.
    #[must_use]
    pub fn of_words(self) -> Self {
        Self { words: true, ..self }
    }

    /// Its key.
    pub fn key(&self) -> u32 {
        self.key
    }

    /// Whether it gives this right to what lies in it.
    pub fn gives(&self, need: Need) -> bool {
        match need {
            Need::Read => true,
            Need::Write => self.write,
            Need::Atomic => self.atomic,
        }
    }

    /// Its name.
    pub fn name(&self) -> &'static str {
        self.name
    }
}

impl ChainMemory for [View] {
    fn find(&self, key: u32, address: u64, len: u64, need: Need) -> Result<Place<'_>, NotInView> {
        let view = self.iter().find(|view| view.key == key).ok_or(NotInView::Key(key))?;
        let outside = NotInView::Range { key, address, len };
        let offset = address.checked_sub(FIRST_ADDRESS).ok_or(outside)?;
        let end = offset.checked_add(len).ok_or(outside)?;
        if offset < view.from || end > view.from + view.len {
            return Err(outside);
        }
        if !view.gives(need) {
            return Err(NotInView::Right(key, need));
        }
        if (view.words || need == Need::Atomic) && (len != 8 || !offset.is_multiple_of(8)) {
            return Err(NotInView::NoWord(address, len));
        }
        Ok(Place { memory: &view.memory, offset: offset as usize })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_found_only_inside_of_its_view_and_rights() {
        let memory = Arc::new(SharedMemory::new("view", 8192).expect("memory"));
        let plain = View::unregistered("plain", 1, memory.clone()).part(4096, 64);
        let table = View::unregistered("table", 2, memory).atomic().of_words();
        let views = [plain, table];
        let find = |key, at: u64, len, need| {
            views.find(key, FIRST_ADDRESS.wrapping_add(at), len, need).map(|place| place.offset)
        };
        assert_eq!(find(1, 4096, 64, Need::Read), Ok(4096));
        assert_eq!(find(1, 4160, 0, Need::Read), Ok(4160));
        for (at, len) in [(4095, 2), (4096, 65), (0, 8), (u64::MAX, 2), (4100, u64::MAX)] {
            assert!(matches!(find(1, at, len, Need::Read), Err(NotInView::Range { .. })), "{at} {len}");
        }
        assert!(matches!(views.find(1, 0, 1, Need::Read), Err(NotInView::Range { .. })), "null");
        assert_eq!(find(1, 4096, 8, Need::Write), Err(NotInView::Right(1, Need::Write)));
        assert_eq!(find(3, 0, 8, Need::Read), Err(NotInView::Key(3)));
        assert_eq!(find(2, 8, 8, Need::Atomic), Ok(8));
        assert!(matches!(find(2, 12, 8, Need::Read), Err(NotInView::NoWord(..))));
        assert!(matches!(find(2, 8, 16, Need::Write), Err(NotInView::NoWord(..))));
    }
}
