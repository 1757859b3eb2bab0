//! A receiver's rings: one a client, in one place (`ring_place`: files of a directory, or a device of persistent memory).
//!
//! At the start every ring is opened, its requests are executed in order and checkpointed, and the ring gets a new life. The same happens when a
//! client reconnects without a restart: requests that it wrote and nobody took are taken then.
//!
//! # Failure
//! A ring that cannot be read is kept unchanged, and its client is refused: the ring may hold acknowledged requests. A person has to decide.

use super::ring_place::RingPlace;
use super::service::{Request, Service};
use super::wire::open_envelope;
use crate::ids::{ClientId, LogSeq};
use crate::persist::{LogDevice, LogDeviceError, LogDeviceKind, SyncFailed};
use crate::redo::LogId;
use crate::redo::ring::{Geometry, RECORDS_AT, Recovered, Recovery, RingError, RingReader};
use crate::world::{Random, SystemRandom};
use std::path::{Path, PathBuf};

/// Largest ring that a client may ask for.
const RING_MAX_BYTES: u64 = 256 << 20;
/// Rings of one store: those of all clients that ever connected and were not forgotten.
const RINGS_MAX: usize = 1024;

/// Why a ring cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum RingStoreError {
    /// The device fails.
    #[error(transparent)]
    Device(#[from] LogDeviceError),
    /// The contents of the ring are not valid.
    #[error("{path}: {source}")]
    Ring {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: RingError,
    },
    /// The directory cannot be read.
    #[error("cannot list the rings in {path}: {source}")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The bound of rings is reached.
    #[error("there are {RINGS_MAX} rings already")]
    TooMany,
    /// The log device failed.
    #[error(transparent)]
    Sync(#[from] SyncFailed),
}

/// The place of rings, and their kind of log device.
#[derive(Clone)]
pub struct RingStore {
    place: RingPlace,
}

/// A ring with its device.
pub(super) struct OpenRing {
    pub(super) device: LogDevice,
    pub(super) reader: RingReader,
}

enum Opened {
    /// The ring was never used.
    Fresh(OpenRing),
    Found(FoundRing),
}

/// A ring that was in use, with the requests that may not have been executed.
struct FoundRing {
    path: PathBuf,
    ring: OpenRing,
    recovered: Recovered,
}

impl FoundRing {
    /// Executes its requests, in order, and begins a new life of the ring. Returns how many requests there were.
    fn execute(self, service: &dyn Service) -> Result<(OpenRing, u64), RingStoreError> {
        let Self { mut ring, recovered: Recovered { client, log, records, end }, path } = self;
        for taken in &records {
            // A record that is no request was never acknowledged as one.
            if let Ok((_, body)) = open_envelope(&taken.data) {
                let request = Request { client, log, lsn: taken.lsn, seq: taken.seq, body };
                service.execute(&request, &mut Vec::new());
            }
        }
        if let Some(last) = records.last() {
            ring.reader.checkpoint_to(last.end, LogSeq(last.lsn.0 + 1))?;
            tracing::info!(path = %path.display(), executed = records.len(), ?end, "recovered a ring");
        }
        ring.reader.renew(new_life(), client)?;
        Ok((ring, records.len() as u64))
    }
}

fn new_life() -> LogId {
    LogId(SystemRandom.next_u64() | 1)
}

impl RingStore {
    /// Rings in files of a directory, each a log device of this `kind` ([`LogDevice::open`]), or on a device of persistent memory (`/dev/dax*`),
    /// which this store has alone.
    ///
    /// # Errors
    /// The directory cannot be made, or the device cannot be opened.
    pub fn new(path: &Path, kind: Option<LogDeviceKind>) -> Result<Self, RingStoreError> {
        Ok(Self { place: RingPlace::open(path, kind)? })
    }

    /// Executes the requests in all rings. Returns how many there were.
    ///
    /// # Errors
    /// The first ring that cannot be recovered; those before it are recovered.
    pub(super) fn recover(&self, service: &dyn Service) -> Result<u64, RingStoreError> {
        let mut clients = self.place.clients()?;
        clients.sort_unstable();
        let mut executed = 0;
        for client in clients {
            let Some(len) = self.place.len_bytes(client)? else { continue };
            if let Opened::Found(found) = self.open_as(client, geometry_of(&self.place.path(client), len)?)? {
                executed += found.execute(service)?.1;
            }
        }
        Ok(executed)
    }

    /// Opens a client's ring after executing all requests in it; returns how many there were, too.
    pub(super) fn open(
        &self,
        client: ClientId,
        geometry: Geometry,
        service: &dyn Service,
    ) -> Result<(OpenRing, u64), RingStoreError> {
        if geometry.capacity() > RING_MAX_BYTES {
            let source = RingError::Geometry { capacity: geometry.capacity(), stride: geometry.stride() };
            return Err(RingStoreError::Ring { path: self.place.path(client), source });
        }
        if self.place.len_bytes(client)?.is_none() && self.place.clients()?.len() >= RINGS_MAX {
            return Err(RingStoreError::TooMany);
        }
        let (ring, executed) = match self.open_as(client, geometry)? {
            Opened::Fresh(ring) => (ring, 0),
            Opened::Found(found) => found.execute(service)?,
        };
        if ring.reader.geometry() == geometry {
            return Ok((ring, executed));
        }
        // The client wants another shape than before. Everything in the ring is executed, so it can be made anew, and keeps its past.
        let past = ring.reader.checkpoint().past;
        drop(ring);
        let device = self.place.open_ring(client, geometry.memory_len())?;
        let (memory, persistence) = (device.memory().clone(), device.persistence().clone());
        let mut reader = RingReader::make(memory, persistence, geometry, new_life(), client)?;
        reader.remember(past)?;
        Ok((OpenRing { device, reader }, executed))
    }

    /// Opens a ring, without executing anything.
    fn open_as(&self, client: ClientId, geometry: Geometry) -> Result<Opened, RingStoreError> {
        let path = self.place.path(client);
        // The existing ring may be longer than the one that is asked for.
        let there = self.place.len_bytes(client)?.unwrap_or(0) as usize;
        let device = self.place.open_ring(client, there.max(geometry.memory_len()))?;
        let (memory, persistence) = (device.memory().clone(), device.persistence().clone());
        let recovery = RingReader::open(memory, persistence, geometry, new_life(), client)
            .map_err(|source| RingStoreError::Ring { path: path.clone(), source })?;
        Ok(match recovery {
            Recovery::Fresh(reader) => Opened::Fresh(OpenRing { device, reader }),
            Recovery::Found(reader, recovered) => {
                let ring = OpenRing { device, reader };
                Opened::Found(FoundRing { path, ring, recovered })
            }
        })
    }
}

/// The shape for a ring of this length. A file that is shorter than any ring never was one.
fn geometry_of(path: &Path, len: u64) -> Result<Geometry, RingStoreError> {
    let at = RECORDS_AT as u64;
    Geometry::stream((len.clamp(at + 4096, at + RING_MAX_BYTES) - at) / 4096 * 4096)
        .map_err(|source| RingStoreError::Ring { path: path.to_owned(), source })
}
