//! Where rings lie: files of one directory, one a client.

use super::rings::RingStoreError;
use crate::ids::ClientId;
use crate::persist::{LogDevice, LogDeviceKind};
use std::io;
use std::path::{Path, PathBuf};

/// Files of one directory, and what they lie on.
#[derive(Clone, Debug)]
pub(super) struct RingFiles {
    pub(super) directory: PathBuf,
    pub(super) kind: Option<LogDeviceKind>,
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> RingStoreError {
    |source| RingStoreError::Directory { path: path.to_owned(), source }
}

impl RingFiles {
    /// What it is called, for people.
    pub(super) fn path(&self, client: ClientId) -> PathBuf {
        self.directory.join(format!("{:032x}.ring", client.0))
    }

    /// Whose rings there are.
    ///
    /// # Errors
    /// The place.
    pub(super) fn clients(&self) -> Result<Vec<ClientId>, RingStoreError> {
        let mut clients = Vec::new();
        for entry in std::fs::read_dir(&self.directory).map_err(failed(&self.directory))? {
            let name = entry.map_err(failed(&self.directory))?.file_name();
            let id = name
                .to_str()
                .and_then(|name| name.strip_suffix(".ring"))
                .filter(|name| name.len() == 32)
                .and_then(|name| u128::from_str_radix(name, 16).ok());
            clients.extend(id.map(ClientId));
        }
        Ok(clients)
    }

    /// How long a client's ring is in bytes, its first page included; `None`: there is none.
    ///
    /// # Errors
    /// The place.
    pub(super) fn len_bytes(&self, client: ClientId) -> Result<Option<u64>, RingStoreError> {
        let path = self.path(client);
        match std::fs::metadata(&path) {
            Ok(metadata) => Ok(Some(metadata.len())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(failed(&path)(source)),
        }
    }

    /// Opens a client's ring, at least that long; what is new of it is zeros, and will be found after a crash.
    ///
    /// # Errors
    /// The device.
    pub(super) fn open(&self, client: ClientId, len_bytes: usize) -> Result<LogDevice, RingStoreError> {
        let was_there = self.len_bytes(client)?.is_some_and(|len| len > 0);
        let device = LogDevice::open(&self.path(client), len_bytes, self.kind)?;
        if !was_there {
            // What is acknowledged in it must be found.
            std::fs::File::open(&self.directory)
                .and_then(|directory| directory.sync_all())
                .map_err(failed(&self.directory))?;
        }
        Ok(device)
    }
}
