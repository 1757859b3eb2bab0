//! A receiver's rings: one file a client, in one directory.
//!
//! At the start every ring is opened, whatever it holds is executed in order, checkpointed, and the ring gets a new
//! life. The same happens when a client comes back without a restart: what it wrote and nobody took is taken then.
//!
//! # Failure
//! A ring that cannot be read is kept as it is, and its client is refused: it may hold acknowledged requests. A person
//! has to decide.

use super::receiver::Service;
use super::wire::open_envelope;
use crate::ids::{ClientId, LogSeq};
use crate::persist::{LogDevice, LogDeviceError, LogDeviceKind, SyncFailed};
use crate::redo::LogId;
use crate::redo::ring::{Geometry, Recovered, Recovery, RingError, RingReader};
use crate::world::{Random, SystemRandom};
use std::path::{Path, PathBuf};

/// Largest ring a client may ask for.
const RING_MAX_BYTES: u64 = 256 << 20;
/// Rings of one store: clients that ever came and were not forgotten.
const RINGS_MAX: usize = 1024;

/// Why a ring cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum RingStoreError {
    /// The device.
    #[error(transparent)]
    Device(#[from] LogDeviceError),
    /// What it holds.
    #[error("{path}: {source}")]
    Ring {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        source: RingError,
    },
    /// The directory.
    #[error("cannot list the rings in {path}: {source}")]
    Directory {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A bound.
    #[error("there are {RINGS_MAX} rings already")]
    TooMany,
    /// The log device failed.
    #[error(transparent)]
    Sync(#[from] SyncFailed),
}

/// Where rings are and what they lie on.
#[derive(Clone, Debug)]
pub struct RingStore {
    directory: PathBuf,
    kind: Option<LogDeviceKind>,
}

/// A ring with the device it lies on.
pub(super) struct OpenRing {
    pub(super) device: LogDevice,
    pub(super) reader: RingReader,
}

fn new_life() -> LogId {
    LogId(SystemRandom.next_u64() | 1)
}

impl RingStore {
    /// Rings in `directory`, on what `kind` says ([`LogDevice::open`]).
    ///
    /// # Errors
    /// If the directory cannot be made.
    pub fn new(directory: &Path, kind: Option<LogDeviceKind>) -> Result<Self, RingStoreError> {
        std::fs::create_dir_all(directory)
            .map_err(|source| RingStoreError::Directory { path: directory.to_owned(), source })?;
        Ok(Self { directory: directory.to_owned(), kind })
    }

    fn path(&self, client: ClientId) -> PathBuf {
        self.directory.join(format!("{:032x}.ring", client.0))
    }

    fn files(&self) -> Result<Vec<(ClientId, PathBuf)>, RingStoreError> {
        let failed = |source| RingStoreError::Directory { path: self.directory.clone(), source };
        let mut files = Vec::new();
        for entry in std::fs::read_dir(&self.directory).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            let id = path
                .file_name()
                .and_then(|name| name.to_str())
                .and_then(|name| name.strip_suffix(".ring"))
                .filter(|name| name.len() == 32)
                .and_then(|name| u128::from_str_radix(name, 16).ok());
            if let Some(id) = id {
                files.push((ClientId(id), path));
            }
        }
        Ok(files)
    }

    /// Executes what the rings hold. Returns how many requests that were.
    ///
    /// # Errors
    /// The first ring that cannot be recovered; those before it are.
    pub fn recover(&self, service: &dyn Service) -> Result<u64, RingStoreError> {
        let mut executed = 0;
        for (client, path) in self.files()? {
            let len = std::fs::metadata(&path)
                .map_err(|source| RingStoreError::Directory { path: path.clone(), source })?
                .len();
            // What is shorter than a ring was never one.
            let least = crate::redo::ring::RECORDS_AT as u64 + 4096;
            let geometry = Geometry::stream(len.max(least) - crate::redo::ring::RECORDS_AT as u64)
                .map_err(|source| RingStoreError::Ring { path: path.clone(), source })?;
            let (_, count) = self.open_as(client, geometry, service)?;
            executed += count;
        }
        Ok(executed)
    }

    /// A client's ring, with nothing left in it that has not been executed, and how much that was.
    pub(super) fn open(
        &self,
        client: ClientId,
        geometry: Geometry,
        service: &dyn Service,
    ) -> Result<(OpenRing, u64), RingStoreError> {
        if geometry.capacity() > RING_MAX_BYTES {
            let source = RingError::Geometry { capacity: geometry.capacity(), stride: geometry.stride() };
            return Err(RingStoreError::Ring { path: self.path(client), source });
        }
        if !self.path(client).exists() && self.files()?.len() >= RINGS_MAX {
            return Err(RingStoreError::TooMany);
        }
        let (ring, executed) = self.open_as(client, geometry, service)?;
        if ring.reader.geometry() == geometry {
            return Ok((ring, executed));
        }
        // Another shape than last time: everything in it is executed, so it can be made anew, keeping what it knows.
        let past = ring.reader.checkpoint().past;
        drop(ring);
        let device = LogDevice::open(&self.path(client), geometry.memory_len(), self.kind)?;
        let mut reader = RingReader::make(
            device.memory().clone(),
            device.persistence().clone(),
            geometry,
            new_life(),
            client,
        )?;
        reader.remember(past)?;
        Ok((OpenRing { device, reader }, executed))
    }

    fn open_as(
        &self,
        client: ClientId,
        geometry: Geometry,
        service: &dyn Service,
    ) -> Result<(OpenRing, u64), RingStoreError> {
        let path = self.path(client);
        // What is there may be longer than what is wanted now.
        let there = std::fs::metadata(&path).map_or(0, |metadata| metadata.len() as usize);
        let device = LogDevice::open(&path, there.max(geometry.memory_len()), self.kind)?;
        let recovery = RingReader::open(
            device.memory().clone(),
            device.persistence().clone(),
            geometry,
            new_life(),
            client,
        )
        .map_err(|source| RingStoreError::Ring { path: path.clone(), source })?;
        match recovery {
            Recovery::Fresh(reader) => Ok((OpenRing { device, reader }, 0)),
            Recovery::Found(mut reader, recovered) => {
                let executed = settle(&mut reader, &recovered, service)?;
                if executed > 0 {
                    tracing::info!(path = %path.display(), executed, end = ?recovered.end, "recovered a ring");
                }
                reader.renew(new_life(), client)?;
                Ok((OpenRing { device, reader }, executed))
            }
        }
    }
}

/// Executes what was recovered.
fn settle(reader: &mut RingReader, recovered: &Recovered, service: &dyn Service) -> Result<u64, SyncFailed> {
    let mut answer = Vec::new();
    for taken in &recovered.records {
        if let Ok((_, body)) = open_envelope(&taken.data) {
            answer.clear();
            service.execute(recovered.client, recovered.log, taken.lsn, body, &mut answer);
        }
    }
    if let Some(last) = recovered.records.last() {
        reader.checkpoint_to(last.end, LogSeq(last.lsn.0 + 1))?;
    }
    Ok(recovered.records.len() as u64)
}
