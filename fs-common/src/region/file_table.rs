//! The file table: one 64-byte slot for each open file, read one-sidedly by initiators.
//!
//! | offset | bytes | field      | meaning |
//! |-------:|------:|------------|---------|
//! | 0      | 8     | generation | moves on with every change of the file's layout; 0: the slot is free |
//! | 8      | 8     | size       | file length in bytes |
//! | 16     | 8     | ino        | inode number, for debugging |
//! | 24     | 40    | reserved   | zero |
//!
//! Generations come from one counter of the server, so a slot that is given to another file never has a generation that a client could have cached.
//!
//! # Ordering
//! A length alone changes in one store. A length that changes with the layout changes under generation 0: first generation 0 is stored, then the
//! size, then the new generation. A reader loads both in any order, copies, and loads the generation again behind an acquire fence. If the generation
//! is unchanged and that of the reader's cached layout, the layout was valid all the time: every copied page belonged to this file, and the length is
//! not that of a later layout. (If the length was simply stored first, a reader with the old layout could read up to the new end: zeros that the file
//! never had.)

use crate::ids::{FileSlot, InodeNo};
use crate::memory::SharedMemory;
use crate::sync::fence;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Bytes of one slot: a cache line, so that writers of two files do not slow each other.
pub const FILE_SLOT_LEN: usize = 64;
const GENERATION: usize = 0;
const SIZE: usize = 8;
const INO: usize = 16;

/// A slot as a reader finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileSlotView {
    /// Version of the layout; 0 if the slot is free.
    pub generation: u64,
    /// File length in bytes.
    pub size: u64,
}

/// The table of open files, in shared memory.
#[derive(Clone, Debug)]
pub struct FileTable {
    memory: Arc<SharedMemory>,
}

impl FileTable {
    /// A table of `slots` free slots.
    pub fn new(slots: u32) -> io::Result<Self> {
        let len = slots as usize * FILE_SLOT_LEN;
        Ok(Self { memory: Arc::new(SharedMemory::new("cuttlefs-files", len)?) })
    }

    /// A view of a table that another process owns.
    pub fn over(memory: Arc<SharedMemory>) -> Self {
        Self { memory }
    }

    /// The memory, to export to clients.
    pub fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// The number of slots.
    pub fn slots(&self) -> u32 {
        (self.memory.len() / FILE_SLOT_LEN) as u32
    }

    fn at(&self, slot: FileSlot, field: usize) -> usize {
        slot.0 as usize * FILE_SLOT_LEN + field
    }

    /// Bytes at the beginning of a slot that [`Self::view_of`] needs.
    pub const VIEW_LEN: usize = 16;

    /// The view in the first bytes of a slot, which a READ brought.
    pub fn view_of(bytes: &[u8; Self::VIEW_LEN]) -> FileSlotView {
        let (words, _) = bytes.as_chunks::<8>();
        FileSlotView { generation: u64::from_le_bytes(words[0]), size: u64::from_le_bytes(words[1]) }
    }

    /// Loads a slot before the copies it guards.
    pub fn load(&self, slot: FileSlot) -> FileSlotView {
        let generation = self.memory.load_u64(self.at(slot, GENERATION));
        let size = self.memory.load_u64(self.at(slot, SIZE));
        FileSlotView { generation, size }
    }

    /// Loads the generation after the copies it validates.
    pub fn generation_after_copy(&self, slot: FileSlot) -> u64 {
        fence(Ordering::Acquire);
        self.memory.load_u64_relaxed(self.at(slot, GENERATION))
    }

    /// Gives the slot to a file. Server only.
    pub fn publish(&self, slot: FileSlot, ino: InodeNo, generation: u64, size: u64) {
        assert_ne!(generation, 0, "generation 0 means free");
        self.memory.store_u64(self.at(slot, INO), ino.0, Ordering::Relaxed);
        self.set_size(slot, size);
        self.set_generation(slot, generation);
    }

    /// Changes the layout, and with it the length. Server only; before any page that left the file is used for another.
    pub fn change_layout(&self, slot: FileSlot, generation: u64, size: u64) {
        assert_ne!(generation, 0, "generation 0 means free");
        self.set_generation(slot, 0);
        self.set_size(slot, size);
        self.set_generation(slot, generation);
    }

    /// Changes the file's length only, not its layout. Server only.
    pub fn set_size(&self, slot: FileSlot, size: u64) {
        self.memory.store_u64(self.at(slot, SIZE), size, Ordering::Release);
    }

    fn set_generation(&self, slot: FileSlot, generation: u64) {
        self.memory.store_u64(self.at(slot, GENERATION), generation, Ordering::SeqCst);
    }

    /// Frees the slot. Server only.
    pub fn retire(&self, slot: FileSlot) {
        self.set_generation(slot, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_slot_bytes() {
        let table = FileTable::new(2).expect("table");
        table.publish(FileSlot(1), InodeNo(0x11), 0x22, 0x33);
        let mut bytes = [0xffu8; FILE_SLOT_LEN];
        table.memory().read(FILE_SLOT_LEN, &mut bytes);
        let mut expected = [0u8; FILE_SLOT_LEN];
        expected[0] = 0x22;
        expected[8] = 0x33;
        expected[16] = 0x11;
        assert_eq!(bytes, expected);
        assert_eq!(table.load(FileSlot(1)), FileSlotView { generation: 0x22, size: 0x33 });
        let view = bytes.first_chunk().expect("sixteen bytes");
        assert_eq!(FileTable::view_of(view), table.load(FileSlot(1)));
        table.change_layout(FileSlot(1), 0x23, 0x31);
        assert_eq!(table.load(FileSlot(1)), FileSlotView { generation: 0x23, size: 0x31 });
        table.retire(FileSlot(1));
        assert_eq!(table.generation_after_copy(FileSlot(1)), 0);
    }
}
