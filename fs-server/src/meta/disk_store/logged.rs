//! A batch as it lies in the log: its number and its changes.

use crate::meta::record::{self, RecordError};
use crate::meta::store::Batch;
use serde::{Deserialize, Serialize};
use std::io;

/// Why the log cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// A record that is not in the format.
    #[error("meta/tail-* does not parse: {0}")]
    Record(#[from] RecordError),
    /// Another server wrote it.
    #[error(
        "meta/tail-* are of version {found}, and this server's of {known}; serve the pool with the server that wrote it"
    )]
    Version {
        /// Its version.
        found: String,
        /// This server's.
        known: &'static str,
    },
    /// A file.
    #[error("meta/tail-*: {0}")]
    File(#[from] io::Error),
    /// A batch that was durable is not there any more.
    #[error(
        "batch {missing} is damaged in meta/tail-*, and all up to batch {durable} were durable, so acknowledged changes of \
         names are lost. Restore the pool from a copy, or move meta/tail-0 and meta/tail-1 away to go on without batch \
         {missing} and what came after it"
    )]
    Damaged {
        /// The first that is missing.
        missing: u64,
        /// The last that was durable.
        durable: u64,
    },
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Logged<'a> {
    /// Number of the batch; one more than the batch before.
    seq: u64,
    #[serde(borrow)]
    changes: Vec<(&'a [u8], Option<&'a [u8]>)>,
}

/// The bytes of a batch.
pub fn encode(seq: u64, batch: &Batch) -> Vec<u8> {
    record::encode(&Logged { seq, changes: batch.iter().collect() })
}

/// The number of a batch.
///
/// # Errors
/// [`RecordError`].
pub fn number(bytes: &[u8]) -> Result<u64, RecordError> {
    match bytes.split_first() {
        Some((&record::RECORD_VERSION, body)) => {
            postcard::take_from_bytes(body).map(|(number, _)| number).map_err(|_| RecordError::Malformed)
        }
        Some((version, _)) => Err(RecordError::Version(*version)),
        None => Err(RecordError::Malformed),
    }
}

/// A batch and its number.
///
/// # Errors
/// [`RecordError`].
pub fn decode(bytes: &[u8]) -> Result<(u64, Batch), RecordError> {
    let logged: Logged<'_> = record::parse(bytes)?;
    let mut batch = Batch::default();
    for (key, value) in logged.changes {
        match value {
            Some(value) => batch.put(key, value.to_vec()),
            None => batch.remove(key),
        }
    }
    Ok((logged.seq, batch))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bytes() {
        let mut batch = Batch::default();
        batch.put(*b"k", b"v".to_vec());
        batch.remove(*b"r");
        let bytes = encode(9, &batch);
        assert_eq!(bytes, [record::RECORD_VERSION, 9, 2, 1, b'k', 1, 1, b'v', 1, b'r', 0]);
        assert_eq!(decode(&bytes).expect("decode"), (9, batch));
        assert_eq!(number(&bytes), Ok(9));
        assert!(decode(&bytes[..5]).is_err());
        assert!([&[][..], &[record::RECORD_VERSION], &[9, 9]].iter().all(|bytes| number(bytes).is_err()));
    }
}
