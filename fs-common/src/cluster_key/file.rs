//! Key files: made for their owner alone, and not read if others could have read them.

use super::{ClusterKey, KeyError};
use crate::regular_file;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The mode of a new key file.
pub const KEY_FILE_MODE: u32 = 0o600;
/// The mode bits that a key file must not have: all rights of group and others.
const OTHERS: u32 = 0o077;
/// Longest file that may hold a key.
const FILE_MAX_BYTES: u64 = 4096;

/// Why a key file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// It cannot be made.
    #[error("cannot make the key file {path}: {source}")]
    Make {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It would be made in a folder that is not there.
    #[error("cannot make the key file {path}: there is no folder {folder}; make it first", folder = folder.display())]
    NoFolder {
        /// The file.
        path: PathBuf,
        /// Where it would be.
        folder: PathBuf,
    },
    /// It would be made, and is there.
    #[error("{path} is there already and is kept; choose another name")]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// It cannot be read.
    #[error("cannot read the key file {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Others can read it, or put another key there.
    #[error(
        "the key file {path} has mode {mode:04o}: others than its owner can reach the key; if nobody has, \
         `chmod 600 {path}`, else make a new one"
    )]
    Open {
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// It belongs to somebody else.
    #[error("the key file {path} belongs to user {owner}; it must be yours or root's")]
    Owner {
        /// The file.
        path: PathBuf,
        /// Its owner.
        owner: u32,
    },
    /// It holds no key.
    #[error("the key file {path} cannot be used: {source}")]
    Key {
        /// The file.
        path: PathBuf,
        /// Why.
        source: KeyError,
    },
}

impl KeyFileError {
    /// Whether there is no such file.
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Read { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }

    /// Whether there is a file that does not look like a key.
    pub fn is_no_key(&self) -> bool {
        matches!(self, Self::Key { source: KeyError::Format, .. })
    }
}

impl ClusterKey {
    /// Writes the key to a new file that only its owner can read. Durable when this returns.
    ///
    /// # Errors
    /// `Exists` if there is such a file: a key is never written over. `NoFolder`, `Make`.
    pub fn create_file(&self, path: &Path) -> Result<(), KeyFileError> {
        let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let write = || {
            let mut file = OpenOptions::new().write(true).create_new(true).mode(KEY_FILE_MODE).open(path)?;
            file.write_all(self.encode().as_bytes())?;
            file.sync_all()?;
            File::open(folder)?.sync_all()
        };
        write().map_err(|source| match source.kind() {
            io::ErrorKind::AlreadyExists => KeyFileError::Exists { path: path.to_owned() },
            io::ErrorKind::NotFound => {
                KeyFileError::NoFolder { path: path.to_owned(), folder: folder.to_owned() }
            }
            _ => KeyFileError::Make { path: path.to_owned(), source },
        })
    }

    /// Reads a key file.
    ///
    /// # Errors
    /// [`KeyFileError`].
    pub fn read_file(path: &Path) -> Result<Self, KeyFileError> {
        let failed = |source| KeyFileError::Read { path: path.to_owned(), source };
        let file = regular_file::open(path).map_err(failed)?;
        let found = file.metadata().map_err(failed)?;
        // The text is parsed first: the user is not told to change the mode of a file that is no key.
        let mut bytes = Vec::new();
        file.take(FILE_MAX_BYTES).read_to_end(&mut bytes).map_err(failed)?;
        let text = str::from_utf8(&bytes).map_err(|_| KeyError::Format);
        let key = text.and_then(Self::parse);
        let key = key.map_err(|source| KeyFileError::Key { path: path.to_owned(), source })?;
        if found.mode() & OTHERS != 0 {
            return Err(KeyFileError::Open { path: path.to_owned(), mode: found.mode() & 0o7777 });
        }
        let owner = found.uid();
        if owner != 0 && owner != rustix::process::geteuid().as_raw() {
            return Err(KeyFileError::Owner { path: path.to_owned(), owner });
        }
        Ok(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::SeededRandom;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_key_file_is_its_owners_alone() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("key");
        let key = ClusterKey::generate("a", &SeededRandom::new(1)).expect("a key");
        key.create_file(&path).expect("made");
        assert_eq!(path.metadata().expect("there").mode() & 0o7777, KEY_FILE_MODE);
        assert_eq!(ClusterKey::read_file(&path).expect("read"), key);
        let again = key.create_file(&path).expect_err("it is there").to_string();
        assert!(again.contains("choose another name"), "{again}");
        let nowhere = key.create_file(&directory.path().join("none/key")).expect_err("no folder").to_string();
        assert!(nowhere.contains("make it first"), "{nowhere}");
        for mode in [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o666] {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).expect("changed");
            let error = ClusterKey::read_file(&path).expect_err("others reach it").to_string();
            assert!(error.contains(&format!("mode {mode:04o}")) && error.contains("chmod 600"), "{error}");
        }
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o400)).expect("changed");
        ClusterKey::read_file(&path).expect("still its owner's alone");
        let nothing = ClusterKey::read_file(&directory.path().join("none")).expect_err("none");
        assert!(
            nothing.is_missing() && nothing.to_string().contains("cannot read the key file"),
            "{nothing}"
        );
        let folder = ClusterKey::read_file(directory.path()).expect_err("a directory").to_string();
        assert!(folder.contains("no regular file"), "{folder}");
        std::fs::write(&path, [0xff, 0, 7]).expect("written");
        let binary = ClusterKey::read_file(&path).expect_err("no text");
        assert!(binary.is_no_key() && binary.to_string().contains("cuttlefs-key-1"), "{binary}");
    }

    #[test]
    fn what_is_no_key_is_refused() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("key");
        std::fs::write(&path, "nonsense").expect("written");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).expect("changed");
        let error = ClusterKey::read_file(&path).expect_err("no key");
        assert!(error.is_no_key() && !error.is_missing(), "{error}");
        assert!(error.to_string().contains("holds no cluster key"), "{error}");
    }
}
