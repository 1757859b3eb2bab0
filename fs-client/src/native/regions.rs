//! Ranges of files that are handed to other sessions, processes and machines by region keys (docs/native.md).

use super::session::Opened;
use super::{File, NativeError, OpenOptions, RegionKey, Rights, Session};
use crate::file::volume::FsError;
use cuttlefs_common::status::Status;
use std::time::Duration;

impl Session {
    /// Opens the range of a file that a region key is for, with the key's rights. After a restart of the server it is opened again by itself.
    ///
    /// # Errors
    /// `RegionEnded`, `KeyRefused`; `Server(ReadOnly)` if the key is for writing and the export is not; `Deadline`.
    pub fn redeem(&self, key: &RegionKey) -> Result<File, NativeError> {
        let key = *key;
        let opened = self.run(move |volume, caller| {
            let handle = volume.open_region(caller, key).map_err(|error| match error {
                FsError::Server(Status::Stale) => NativeError::RegionEnded,
                FsError::Server(Status::Denied) => NativeError::KeyRefused,
                error => error.into(),
            })?;
            Opened::take(volume, handle)
        })?;
        let Rights { read, write } = key.rights;
        File::new(self.clone(), opened, OpenOptions { read, write, ..OpenOptions::READ })
    }
}

impl File {
    /// Binds a range of this open file: whoever can connect to the server may open it by the key, with these rights and no more, until its time is over
    /// (`None`: it has none), [`Self::unbind`], or the end of this open file. The range may reach behind the end of the file. The key is a
    /// secret like the bytes; as text (`to_string`, `parse`) it is handed over. It stays good over restarts of the server.
    ///
    /// # Errors
    /// `NotOpenFor` (rights that this open file has not; it was opened by a key itself); `Server(Invalid)` for an empty range or no rights;
    /// `Server(Busy)` if this client has bound too many; `Deadline`.
    pub fn bind(
        &self,
        offset: u64,
        len: u64,
        rights: Rights,
        lifetime: Option<Duration>,
    ) -> Result<RegionKey, NativeError> {
        for (wanted, is_write) in [(rights.read, false), (rights.write, true)] {
            if wanted {
                self.check(is_write)?;
            }
        }
        self.check_whole("being bound: it was opened by a key itself")?;
        // 0 is no limit for the server, so the shortest time is a millisecond.
        let lifetime_ms =
            lifetime.map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX).max(1));
        let file = self.opened().clone();
        self.session().run(move |volume, caller| {
            Ok(volume.bind(caller, &file.state, (offset, len), rights, lifetime_ms)?)
        })
    }

    /// Ends the binding of a key: the key opens nothing any more, and what was opened by it has ended.
    ///
    /// # Errors
    /// `RegionEnded`: this open file has not bound it, or it has ended; `Deadline`.
    pub fn unbind(&self, key: &RegionKey) -> Result<(), NativeError> {
        let (file, key) = (self.opened().clone(), *key);
        self.session().run(move |volume, caller| match volume.unbind(caller, &file.state, &key)? {
            true => Ok(()),
            false => Err(NativeError::RegionEnded),
        })
    }

    /// The key that it was opened by, if it was.
    pub fn region(&self) -> Option<RegionKey> {
        self.state().file().region_key().copied()
    }
}
