//! One of the three sessions.

use super::super::world::World;
use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::native::{File, Grant, NativeError, Session};
use std::sync::Arc;

/// A session, and what it has of the file.
pub struct Side {
    pub file: Option<File>,
    pub grants: Vec<Grant>,
    pub session: Session,
    pub volume: Arc<RemoteVolume>,
    /// Whether it may have unsynced one-sided changes; whether it must be told of a loss, and whether it may be.
    pub is_ahead: bool,
    pub must_hear: bool,
    pub may_hear: bool,
}

impl Side {
    pub fn new(world: &World) -> Self {
        let volume = Arc::new(world.client());
        let session = Session::over(volume.clone(), 1, None).expect("a thread");
        let (is_ahead, must_hear, may_hear) = (false, false, false);
        Self { file: None, grants: Vec::new(), session, volume, is_ahead, must_hear, may_hear }
    }

    /// Takes another open file, or none. A loss that nobody was told of is told to it, too, whichever file of the session wrote the bytes.
    pub fn replace(&mut self, file: Option<File>) {
        self.grants.drain(..).for_each(give_back);
        self.file = file;
    }
}

/// Here, and not in a thread of the session's: the simulated network has one thread.
pub fn give_back(grant: Grant) {
    match grant.give_back() {
        Ok(()) | Err(NativeError::RegionEnded | NativeError::FileLost) => {}
        Err(error) => panic!("{error}"),
    }
}
