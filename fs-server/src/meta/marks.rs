//! Marks of zones whose pages may be overwritten in place (`pool/sums`): each is a record without contents.

use super::error::MetaError;
use super::key::{self, tag};
use super::metadata::Meta;
use super::record::{self, BytesRecord, RecordError};
use super::store::{Batch, Direction, Store, StoreError};
use crate::pool::{LocalFuture, MarkStore};
use cuttlefs_common::status::Status;
use std::io;
use std::sync::Arc;

fn batch_of(zones: &[u64], marked: bool) -> Batch {
    let mut batch = Batch::default();
    for zone in zones {
        match marked {
            true => batch.put(key::mark(*zone), record::encode(&BytesRecord { bytes: b"" })),
            false => batch.remove(key::mark(*zone)),
        }
    }
    batch
}

impl Meta {
    /// The marked zones.
    ///
    /// # Errors
    /// `Io`.
    pub fn marks(&self) -> Result<Vec<u64>, Status> {
        let mut zones = Vec::new();
        let range = key::all(tag::MARK);
        let scanned = self.stored().scan(&range.from, &range.to, Direction::Forward, &mut |key, _| {
            let malformed = || MetaError::record(key)(RecordError::Malformed);
            zones.push(key::parse_mark(key).ok_or_else(malformed)?);
            Ok(true)
        });
        scanned.map_err(|e| self.fail("marks", e))?;
        Ok(zones)
    }

    /// Marks zones, or removes their marks. Durable with the next `flush`.
    ///
    /// # Errors
    /// `NoSpace`, `Io`.
    pub fn put_marks(&self, zones: &[u64], marked: bool) -> Result<(), Status> {
        let _writer = self.writer.lock();
        let batch = batch_of(zones, marked);
        self.store.commit(batch).map_err(|e| self.fail("put_marks", e.into()))
    }
}

/// The marks in a store that is not being served, for fsck.
pub struct StoredMarks(pub Arc<dyn Store>);

impl MarkStore for StoredMarks {
    fn put_marks(&self, zones: &[u64], marked: bool) -> io::Result<()> {
        self.0.commit(batch_of(zones, marked)).map_err(failed)
    }

    fn flush_marks(&self) -> LocalFuture<'static, io::Result<()>> {
        Box::pin(std::future::ready(self.0.flush().map_err(failed)))
    }
}

fn failed(error: StoreError) -> io::Error {
    io::Error::other(error.to_string())
}
