//! Atomics on words of files, by workers: those that clients ask for, and those of the NIC engine that have to wait (`one_sided_faults`).
//!
//! # How it works
//! An atomic reads and changes the word under its page's block lock, by the page protocol (`pages/word`), and shares the file's order, as an overwrite
//! does: so it is one step among all other atomics, one-sided and by request, all writes, and cuts. A page in no frame is brought into one, or changed
//! on SSD where there is none. A word in a hole is 0, and a write of eight bytes puts another one there, if it is still a hole when that has the file to
//! itself. An atomic that changes nothing changes no times either.
//!
//! No answer is kept for a later life of the server, as those of writes are: a page may reach the SSD before the batch with the answer, and then a
//! repeated atomic would be done twice. So a client repeats none to another server (`docs/native.md`).
//!
//! # Failure
//! As a write's. `Busy`, with nothing changed, if others fill the hole and punch it again, many times over.

use super::one_sided::word_at;
use super::one_sided_faults::write_granted;
use super::write::{WriteAt, Writer, end_of, note_modified};
use super::write_back::relieve;
use super::{FileRegion, Files};
use crate::meta::NoteData;
use crate::pages::Source;
use crate::pool::disk::Disk;
use cuttlefs_common::ids::FileKey;
use cuttlefs_common::rdma::FileAtomic;
use cuttlefs_common::status::Status;
use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

/// How often a word may turn out to be in a hole, and to have bytes when it is written.
const ROUNDS: usize = 16;

/// A word of a file, and what to do with it.
#[derive(Clone, Copy, Debug)]
pub struct Word {
    /// Its offset, a multiple of 8.
    pub offset: u64,
    /// What to do.
    pub operation: FileAtomic,
}

impl Word {
    /// The bytes of the word, which are before the largest offset of a file.
    pub fn bytes(&self) -> Range<u64> {
        self.offset..self.offset + 8
    }
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WordChanged {
    /// The word before.
    pub old: u64,
    /// The file's change counter, if the word was changed.
    pub change: Option<u64>,
}

/// Does an atomic. `may` is asked about the word's bytes, as by `write_within`.
///
/// # Errors
/// As a write's, and those of `may`, with nothing changed.
pub async fn change_word(
    files: &Files,
    disk: &dyn Disk,
    (file, filekey): (&Arc<FileRegion>, FileKey),
    word: Word,
    may: &dyn Fn(u64, u64) -> Result<(), Status>,
) -> Result<WordChanged, Status> {
    let Word { offset, operation } = word;
    let end = end_of(offset, 8)?;
    relieve(files, disk).await;
    for _ in 0..ROUNDS {
        let shared = file.order.read().await;
        file.usable()?;
        may(offset, end)?;
        let Some(place) = word_at(file, offset) else {
            let new = operation.apply(0);
            drop(shared);
            let change = match new {
                0 => None,
                _ => match write_into_hole(files, disk, (file, filekey), (offset, new), may).await? {
                    None => continue,
                    change => change,
                },
            };
            return Ok(WordChanged { old: 0, change });
        };
        let changed = files.pages.change_word(disk, &**file, place, |old| operation.apply(old)).await;
        let old = match changed {
            Ok(old) if operation.apply(old) == old => return Ok(WordChanged { old, change: None }),
            Ok(old) => old,
            Err(status) => {
                note_modified(files, file);
                return Err(status);
            }
        };
        let attr = file.change_bookkeeping(|state| {
            state.uncommitted = true;
            files.note_changed(file, NoteData::default())
        });
        // After the change: a write-back that takes the file off the list sees the change.
        files.list_dirty(file);
        return Ok(WordChanged { old, change: Some(attr?.change) });
    }
    Err(Status::Busy)
}

/// Writes a word to a page that has no bytes. Returns the change counter; `None`, with nothing changed, if somebody has written there meanwhile.
async fn write_into_hole(
    files: &Files,
    disk: &dyn Disk,
    (file, filekey): (&Arc<FileRegion>, FileKey),
    (offset, word): (u64, u64),
    may: &dyn Fn(u64, u64) -> Result<(), Status>,
) -> Result<Option<u64>, Status> {
    let is_there = Cell::new(false);
    let may = |start, end| {
        may(start, end)?;
        is_there.set(word_at(file, offset).is_some());
        if is_there.get() { Err(Status::Busy) } else { Ok(()) }
    };
    let (at, bytes) = (WriteAt::Offset(offset), word.to_le_bytes());
    let source = Source::Bytes(&bytes);
    // It makes the file no longer, and no answer is kept with it.
    let writer = Writer::Request(None);
    match write_granted(files, disk, (file, filekey), at, source, writer, &may).await {
        Ok(written) => Ok(Some(written.attr.change)),
        Err(_) if is_there.get() => Ok(None),
        Err(status) => Err(status),
    }
}
