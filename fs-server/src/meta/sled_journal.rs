//! Atomic batches on sled, without sled's own.
//!
//! Sled's `apply_batch` rolls the log buffer twice a batch, so that each batch becomes two tiny synced writes,
//! and from its first use on every flush holds a lock against all batches. Measured: 50 thousand creates left
//! five seconds of writes behind them, during which nothing else could be committed.
//!
//! Sled recovers a *prefix* of its log, in the order of its operations. That is enough to build on: before the
//! records of a batch are changed one by one, the whole batch is put into one journal record. Whatever prefix
//! survives, only the last journalled batch can be in it in part, and opening redoes it.
//!
//! ```text
//! log   ... | J batch 7 | puts of 7 ... | J batch 8 | puts of 8 ...
//!                                                 ^ cut here: 8 is redone from J; 7 is whole, for it came before
//!                             ^ cut here: J is 7: redone
//!                  ^ cut here: J is 6, which is whole; redoing it changes nothing
//! ```
//!
//! A batch too large for a record (the truncation of a file in very many extents) goes into a file of its own,
//! `batch-<number>`, which is synced before the journal record that names it is written. It is removed once a
//! later journal record is durable.

use super::record::{self, RecordError};
use super::store::Batch;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Largest batch kept in the journal record: half of the quarter of a log segment from where on sled would put
/// it into a file that it does not sync.
pub const INLINE_MAX_BYTES: usize = 64 * 1024;
/// First part of the names of large batches' files.
const FILE_PREFIX: &str = "batch-";

/// Why the journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The store.
    #[error(transparent)]
    Sled(#[from] sled::Error),
    /// A record or a file that is not in the format.
    #[error("the journal does not parse: {0}")]
    Record(#[from] RecordError),
    /// A large batch's file.
    #[error("a large batch's file: {0}")]
    File(#[from] io::Error),
    /// A large batch's file that is not what was written.
    #[error("the file of batch {0} is damaged")]
    Damaged(u64),
    /// A batch of the tail that was durable is not there any more.
    #[error(
        "batch {missing} is damaged in meta/tail-*, and all up to batch {durable} were durable, so acknowledged changes of \
         names are lost. Restore the pool from a copy, or move meta/tail-0 and meta/tail-1 away to go on without batch \
         {missing} and what came after it"
    )]
    TailDamaged {
        /// The first that is missing.
        missing: u64,
        /// The last that was durable.
        durable: u64,
    },
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Place<'a> {
    /// In the record.
    Inline(#[serde(borrow)] &'a [u8]),
    /// In the batch's file.
    File { len_bytes: u64, crc32c: u32 },
}

/// The journal record.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct JournalRecord<'a> {
    /// Number of the batch; one more than the batch before.
    seq: u64,
    #[serde(borrow)]
    place: Place<'a>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Changes<'a>(#[serde(borrow)] Vec<(&'a [u8], Option<&'a [u8]>)>);

fn file_of(directory: &Path, seq: u64) -> PathBuf {
    directory.join(format!("{FILE_PREFIX}{seq:016x}"))
}

/// A batch's journal record.
#[derive(Debug)]
pub struct Encoded {
    /// The record's value.
    pub record: Vec<u8>,
    /// Whether the batch is in it; otherwise it is in a file.
    pub is_inline: bool,
}

/// The journal record of a batch. A large batch's file is durable when this returns.
///
/// # Errors
/// [`JournalError::File`].
pub fn encode(directory: &Path, seq: u64, batch: &Batch) -> Result<Encoded, JournalError> {
    let bytes = record::encode(&Changes(batch.iter().collect()));
    if bytes.len() <= INLINE_MAX_BYTES {
        let record = record::encode(&JournalRecord { seq, place: Place::Inline(&bytes) });
        return Ok(Encoded { record, is_inline: true });
    }
    let mut file = File::create(file_of(directory, seq))?;
    file.write_all(&bytes)?;
    file.sync_all()?;
    File::open(directory)?.sync_all()?;
    let place = Place::File { len_bytes: bytes.len() as u64, crc32c: crc32c::crc32c(&bytes) };
    Ok(Encoded { record: record::encode(&JournalRecord { seq, place }), is_inline: false })
}

/// The number of the batch a journal record stands for.
///
/// # Errors
/// [`JournalError::Record`].
pub fn seq_of(value: &[u8]) -> Result<u64, JournalError> {
    let journal: JournalRecord<'_> = record::parse(value)?;
    Ok(journal.seq)
}

/// The batch a journal record stands for, and its number.
///
/// # Errors
/// [`JournalError`].
pub fn decode(directory: &Path, value: &[u8]) -> Result<(u64, Batch), JournalError> {
    let journal: JournalRecord<'_> = record::parse(value)?;
    let batch = match journal.place {
        Place::Inline(bytes) => decode_changes(bytes)?,
        Place::File { len_bytes, crc32c } => {
            let bytes = std::fs::read(file_of(directory, journal.seq))?;
            if bytes.len() as u64 != len_bytes || crc32c::crc32c(&bytes) != crc32c {
                return Err(JournalError::Damaged(journal.seq));
            }
            decode_changes(&bytes)?
        }
    };
    Ok((journal.seq, batch))
}

fn decode_changes(bytes: &[u8]) -> Result<Batch, RecordError> {
    let changes: Changes<'_> = record::parse(bytes)?;
    let mut batch = Batch::default();
    for (key, value) in changes.0 {
        match value {
            Some(value) => batch.put(key, value.to_vec()),
            None => batch.remove(key),
        }
    }
    Ok(batch)
}

/// Removes the files of all batches but `kept`, which the durable journal record may still name. Gives whether
/// there were such.
///
/// # Errors
/// [`io::Error`].
pub fn remove_files(directory: &Path, kept: impl Fn(u64) -> bool) -> io::Result<bool> {
    let mut kept_any = false;
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix(FILE_PREFIX));
        if let Some(seq) = number.and_then(|number| u64::from_str_radix(number, 16).ok()) {
            if kept(seq) {
                kept_any = true;
            } else {
                std::fs::remove_file(entry.path())?;
            }
        }
    }
    Ok(kept_any)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn large() -> Batch {
        let mut batch = Batch::default();
        for index in 0..30u8 {
            batch.put([index], vec![index; 4000]);
        }
        batch
    }

    #[test]
    fn golden_bytes() {
        let directory = tempfile::tempdir().expect("directory");
        let mut batch = Batch::default();
        batch.put(*b"k", b"v".to_vec());
        batch.remove(*b"r");
        let value = encode(directory.path(), 9, &batch).expect("encode").record;
        let changes = [1, 2, 1, b'k', 1, 1, b'v', 1, b'r', 0];
        assert_eq!(value, [&[1, 9, 0, 10][..], &changes].concat());
        assert_eq!(decode(directory.path(), &value).expect("decode"), (9, batch));
        let file = JournalRecord { seq: 9, place: Place::File { len_bytes: 300, crc32c: 1 } };
        assert_eq!(record::encode(&file), [1, 9, 1, 0xac, 2, 1]);
    }

    #[test]
    fn large_batches_lie_in_files_that_are_checked_and_cleaned_up() {
        let directory = tempfile::tempdir().expect("directory");
        let value = encode(directory.path(), 0x1f, &large()).expect("encode").record;
        assert!(value.len() < 20);
        assert_eq!(decode(directory.path(), &value).expect("decode"), (0x1f, large()));
        let path = directory.path().join("batch-000000000000001f");
        let mut bytes = std::fs::read(&path).expect("file");
        bytes[1000] ^= 1;
        std::fs::write(&path, &bytes).expect("write");
        assert!(matches!(decode(directory.path(), &value), Err(JournalError::Damaged(0x1f))));
        assert!(remove_files(directory.path(), |seq| seq >= 0x1f).expect("clean up"));
        assert!(path.exists());
        assert!(!remove_files(directory.path(), |seq| seq > 0x1f).expect("clean up"));
        assert!(!path.exists());
        assert!(matches!(decode(directory.path(), &value), Err(JournalError::File(_))));
        assert!(matches!(decode(directory.path(), &[1, 2]), Err(JournalError::Record(_))));
    }
}
