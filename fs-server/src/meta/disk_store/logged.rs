//! A batch as it lies in the log: its number and its changes.

use crate::meta::record::{self, RecordError};
use crate::meta::store::Batch;
use serde::Serialize;
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

/// A record's key, and its value; none: it is removed.
type Change<'a> = (&'a [u8], Option<&'a [u8]>);

#[derive(Serialize)]
struct Logged<'a> {
    /// Number of the batch; one more than the batch before.
    seq: u64,
    changes: Vec<Change<'a>>,
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

/// The changes of a batch, in the order of their keys; they end behind an error.
///
/// # Errors
/// [`RecordError`].
pub fn changes(bytes: &[u8]) -> Result<impl Iterator<Item = Result<Change<'_>, RecordError>>, RecordError> {
    // A `Logged` is its number, how many changes there are, and each of them.
    let (body, malformed) = (bytes.get(1..).unwrap_or_default(), |_| RecordError::Malformed);
    number(bytes)?;
    let ((_, count), mut rest) = postcard::take_from_bytes::<(u64, u64)>(body).map_err(malformed)?;
    let mut left = count;
    Ok(std::iter::from_fn(move || {
        if left == 0 {
            return (!std::mem::take(&mut rest).is_empty()).then_some(Err(RecordError::Malformed));
        }
        left -= 1;
        let next = postcard::take_from_bytes(rest).map_err(malformed);
        (left, rest) = next.as_ref().map_or((0, &[][..]), |(_, rest)| (left, *rest));
        Some(next.map(|(change, _)| change))
    }))
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
        let all = |bytes| {
            changes(bytes)?
                .map(|change| change.map(|(key, value)| (key.to_vec(), value.map(<[u8]>::to_vec))))
                .collect()
        };
        type Owned = (Vec<u8>, Option<Vec<u8>>);
        let decode = |bytes| -> Result<Vec<Owned>, RecordError> { all(bytes) };
        assert_eq!(decode(&bytes).expect("decode"), batch.into_changes().collect::<Vec<_>>());
        assert_eq!(number(&bytes), Ok(9));
        (0..bytes.len()).for_each(|cut| assert!(decode(&bytes[..cut]).is_err(), "cut at {cut}"));
        assert!(decode(&[&bytes[..], &[0]].concat()).is_err(), "more than it says");
        assert!([&[][..], &[record::RECORD_VERSION], &[9, 9]].iter().all(|bytes| number(bytes).is_err()));
    }
}
