//! A receiver's rings: one a client, in one place (`ring_place`: files of a directory).
//!
//! At the start every ring is opened, whatever it holds is executed in order, checkpointed, and the ring gets a new
//! life. The same happens when a client comes back without a restart: what it wrote and nobody took is taken then.
//!
//! # Failure
//! A ring that cannot be read is kept as it is, and its client is refused: it may hold acknowledged requests. A person
//! has to decide.

use super::ring_place::RingFiles;
use super::service::{Executed, Request, Service};
use super::wire::open_envelope;
use crate::ids::{ClientId, LogSeq};
use crate::memory::SharedMemory;
use crate::persist::CacheLines;
use crate::persist::{LogDevice, LogDeviceError, LogDeviceKind, SyncFailed};
use crate::redo::LogId;
use crate::redo::ring::{Geometry, RECORDS_AT, Recovered, Recovery, RingError, RingReader};
use crate::world::{Random, SystemRandom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

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
    /// What a ring holds cannot be done.
    #[error("{path}: request {lsn} cannot be executed; it is kept")]
    Kept {
        /// Which file.
        path: PathBuf,
        /// The first of them.
        lsn: LogSeq,
    },
    /// What was executed is not durable.
    #[error("what rings held was executed and cannot be made durable: {0}")]
    Unsettled(String),
}

/// Where rings are and what they lie on.
#[derive(Clone)]
pub struct RingStore {
    place: RingFiles,
}

/// A ring with the device it lies on.
pub(super) struct OpenRing {
    pub(super) device: LogDevice,
    pub(super) reader: RingReader,
}

enum Opened {
    /// Nothing was ever in it.
    Fresh(OpenRing),
    Found(FoundRing),
}

/// A ring as it was left, with what may not have been executed.
pub struct FoundRing {
    path: PathBuf,
    ring: OpenRing,
    recovered: Recovered,
}

impl FoundRing {
    /// Whose it is.
    pub fn client(&self) -> ClientId {
        self.recovered.client
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it holds, in order. What is no request is left out.
    pub fn requests(&self) -> impl Iterator<Item = Request<'_>> {
        let Recovered { client, log, records, .. } = &self.recovered;
        records.iter().filter_map(|taken| {
            let (_, body) = open_envelope(&taken.data).ok()?;
            Some(Request { client: *client, log: *log, lsn: taken.lsn, seq: taken.seq, body })
        })
    }

    /// Everything it holds was executed, durably: begins a new life.
    ///
    /// # Errors
    /// [`RingStoreError::Sync`].
    pub fn executed(self) -> Result<(), RingStoreError> {
        self.renew().map(drop)
    }

    fn renew(self) -> Result<OpenRing, RingStoreError> {
        let Self { mut ring, recovered, path } = self;
        if let Some(last) = recovered.records.last() {
            ring.reader.checkpoint_to(last.end, LogSeq(last.lsn.0 + 1))?;
            let executed = recovered.records.len();
            tracing::info!(path = %path.display(), executed, end = ?recovered.end, "recovered a ring");
        }
        ring.reader.renew(new_life(), recovered.client)?;
        Ok(ring)
    }

    async fn execute(&self, service: &dyn Service) -> Result<u64, RingStoreError> {
        let mut kept = None;
        // Also what is behind one that is kept: the service must know what it owes.
        for request in self.requests() {
            let lsn = request.lsn;
            if let Executed::Kept(_) = service.execute_found(request).await {
                kept.get_or_insert(lsn);
            }
        }
        if let Some(lsn) = kept {
            return Err(RingStoreError::Kept { path: self.path.clone(), lsn });
        }
        let executed = self.recovered.records.len() as u64;
        if executed > 0 {
            service.settle().await.map_err(RingStoreError::Unsettled)?;
        }
        Ok(executed)
    }
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
        Ok(Self { place: RingFiles { directory: directory.to_owned(), kind } })
    }

    /// Executes what the rings hold. Returns how many requests that were.
    ///
    /// # Errors
    /// The first ring that cannot be recovered; those before it are.
    pub async fn recover(&self, service: &dyn Service) -> Result<u64, RingStoreError> {
        let mut executed = 0;
        for client in self.clients()? {
            executed += self.let_go(client, service, false).await?;
        }
        Ok(executed)
    }

    /// Whose rings there are.
    ///
    /// # Errors
    /// The directory.
    pub fn clients(&self) -> Result<Vec<ClientId>, RingStoreError> {
        let mut clients = self.place.clients()?;
        clients.sort_unstable();
        Ok(clients)
    }

    /// A ring as it was left; `None` if there is none, or if nothing was ever in it.
    ///
    /// # Errors
    /// A ring that cannot be read; it stays as it is.
    pub fn found(&self, client: ClientId) -> Result<Option<FoundRing>, RingStoreError> {
        let Some(len) = self.place.len_bytes(client)? else { return Ok(None) };
        let path = self.place.path(client);
        match self.open_as(client, geometry_of(&path, len)?)? {
            Opened::Fresh(_) => Ok(None),
            Opened::Found(found) => Ok(Some(found)),
        }
    }

    /// Executes what a client's ring holds; with `forget` the ring is removed then. Returns how much that was.
    ///
    /// # Errors
    /// It cannot be read or executed; it is kept.
    pub(super) async fn let_go(
        &self,
        client: ClientId,
        service: &dyn Service,
        forget: bool,
    ) -> Result<u64, RingStoreError> {
        let mut executed = 0;
        if let Some(found) = self.found(client)? {
            executed = found.execute(service).await?;
            found.executed()?;
        }
        if forget {
            self.remove(client)?;
        }
        Ok(executed)
    }

    /// Removes a client's ring: it holds nothing and its client is gone for good.
    ///
    /// # Errors
    /// The directory.
    pub fn remove(&self, client: ClientId) -> Result<(), RingStoreError> {
        self.place.remove(client)
    }

    /// How many requests the rings in a directory hold. Changes nothing.
    ///
    /// # Errors
    /// The first ring that cannot be read.
    pub fn look(directory: &Path) -> Result<u64, RingStoreError> {
        let files = RingFiles { directory: directory.to_owned(), kind: None };
        if !directory.exists() {
            if !directory.is_symlink() {
                return Ok(0);
            }
            // What is not mounted may hold something.
            let source = std::io::ErrorKind::NotFound.into();
            return Err(RingStoreError::Directory { path: directory.to_owned(), source });
        }
        let mut held = 0;
        for client in files.clients()? {
            let path = files.path(client);
            let failed = |source| RingStoreError::Directory { path: path.clone(), source };
            let len = std::fs::metadata(&path).map_err(failed)?.len();
            let geometry = geometry_of(&path, len)?;
            let bytes = std::fs::read(&path).map_err(failed)?;
            // A copy: opening writes where there never was a ring.
            let len = geometry.memory_len().max(bytes.len());
            let memory = Arc::new(SharedMemory::new("ring", len).map_err(failed)?);
            memory.write(0, &bytes);
            let life = new_life();
            let recovery = RingReader::open(memory, Arc::new(CacheLines), geometry, life, client)
                .map_err(|source| RingStoreError::Ring { path: path.clone(), source })?;
            if let Recovery::Found(_, recovered) = recovery {
                held += recovered.records.len() as u64;
            }
        }
        Ok(held)
    }

    /// A client's ring, with nothing left in it that has not been executed, and how much that was.
    pub(super) async fn open(
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
            Opened::Found(found) => {
                let executed = found.execute(service).await?;
                (found.renew()?, executed)
            }
        };
        if ring.reader.geometry() == geometry {
            return Ok((ring, executed));
        }
        // Another shape than last time: everything in it is executed, so it can be made anew, keeping what it knows.
        let past = ring.reader.checkpoint().past;
        drop(ring);
        let device = self.place.open(client, geometry.memory_len())?;
        let (memory, persistence) = (device.memory().clone(), device.persistence().clone());
        let mut reader = RingReader::make(memory, persistence, geometry, new_life(), client)?;
        reader.remember(past)?;
        Ok((OpenRing { device, reader }, executed))
    }

    /// A ring that holds nothing, or one as it was left.
    fn open_as(&self, client: ClientId, geometry: Geometry) -> Result<Opened, RingStoreError> {
        let path = self.place.path(client);
        // What is there may be longer than what is wanted now.
        let there = self.place.len_bytes(client)?.unwrap_or(0) as usize;
        let device = self.place.open(client, there.max(geometry.memory_len()))?;
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

/// What is shorter than a ring was never one.
fn geometry_of(path: &Path, len: u64) -> Result<Geometry, RingStoreError> {
    let at = RECORDS_AT as u64;
    Geometry::stream((len.clamp(at + 4096, at + RING_MAX_BYTES) - at) / 4096 * 4096)
        .map_err(|source| RingStoreError::Ring { path: path.to_owned(), source })
}
