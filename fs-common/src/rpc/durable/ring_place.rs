//! The place of rings: files of one directory, one a client, or parts of one device of persistent memory.

use super::rings::RingStoreError;
use crate::ids::ClientId;
use crate::persist::{DaxDevice, LogDevice, LogDeviceKind, is_device};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The place of rings; see the module.
#[derive(Clone, Debug)]
pub(super) enum RingPlace {
    /// Files, and their kind of log device.
    Files {
        directory: PathBuf,
        kind: Option<LogDeviceKind>,
    },
    Device(Arc<DaxDevice>),
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> RingStoreError {
    |source| RingStoreError::Directory { path: path.to_owned(), source }
}

impl RingPlace {
    /// Opens a device, or a directory, which is made if it does not exist.
    ///
    /// # Errors
    /// The place cannot be used.
    pub(super) fn open(path: &Path, kind: Option<LogDeviceKind>) -> Result<Self, RingStoreError> {
        if is_device(path) {
            return Ok(Self::Device(DaxDevice::open(path)?));
        }
        std::fs::create_dir_all(path).map_err(failed(path))?;
        Ok(Self::Files { directory: path.to_owned(), kind })
    }

    /// The name of a client's ring, for people.
    pub(super) fn path(&self, client: ClientId) -> PathBuf {
        let name = format!("{:032x}.ring", client.0);
        match self {
            Self::Files { directory, .. } => directory.join(name),
            Self::Device(device) => device.path().join(name),
        }
    }

    /// The clients that have a ring.
    ///
    /// # Errors
    /// The place cannot be read.
    pub(super) fn clients(&self) -> Result<Vec<ClientId>, RingStoreError> {
        let directory = match self {
            Self::Files { directory, .. } => directory,
            Self::Device(device) => return Ok(device.names().into_iter().map(ClientId).collect()),
        };
        let mut clients = Vec::new();
        for entry in std::fs::read_dir(directory).map_err(failed(directory))? {
            let name = entry.map_err(failed(directory))?.file_name();
            let id = name
                .to_str()
                .and_then(|name| name.strip_suffix(".ring"))
                .filter(|name| name.len() == 32)
                .and_then(|name| u128::from_str_radix(name, 16).ok());
            clients.extend(id.map(ClientId));
        }
        Ok(clients)
    }

    /// The length of a client's ring in bytes, including its first page; `None`: it has no ring.
    ///
    /// # Errors
    /// The place cannot be read.
    pub(super) fn len_bytes(&self, client: ClientId) -> Result<Option<u64>, RingStoreError> {
        let path = match self {
            Self::Files { .. } => self.path(client),
            Self::Device(device) => return Ok(device.len_bytes(client.0)),
        };
        match std::fs::metadata(&path) {
            Ok(metadata) => Ok(Some(metadata.len())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(failed(&path)(source)),
        }
    }

    /// Opens a client's ring with at least this length. New bytes are zeros. A new ring is found again after a crash.
    ///
    /// # Errors
    /// The device fails.
    pub(super) fn open_ring(&self, client: ClientId, len_bytes: usize) -> Result<LogDevice, RingStoreError> {
        let (directory, kind) = match self {
            Self::Files { directory, kind } => (directory, *kind),
            Self::Device(device) => return Ok(device.open_log(client.0, len_bytes)?),
        };
        let was_there = self.len_bytes(client)?.is_some_and(|len| len > 0);
        let device = LogDevice::open(&self.path(client), len_bytes, kind)?;
        if !was_there {
            // A crash must not lose the file, since requests in it may be acknowledged.
            std::fs::File::open(directory)
                .and_then(|directory| directory.sync_all())
                .map_err(failed(directory))?;
        }
        Ok(device)
    }
}
