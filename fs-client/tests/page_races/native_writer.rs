//! A writer that is a native program with a write grant: its changes go past the server's workers, until something ends the grant.

use cuttlefs_client::native::{ConnectOptions, File, Grant, NativeError, OpenOptions, Session, Status};
use cuttlefs_common::ids::PAGE_SIZE_U64;
use cuttlefs_common::rdma::Endpoint;
use parking_lot::Mutex;

/// Pages of a grant. The server has few frames, of which a quarter is for grants, and a peer gets half of that.
const GRANT_PAGES: u64 = 8;

/// An open file and its grant.
struct Opened {
    file: File,
    grant: Option<Grant>,
}

/// A native session with one file.
pub struct NativeWriter {
    session: Session,
    opened: Mutex<Option<Opened>>,
}

impl NativeWriter {
    pub fn connect(endpoint: &Endpoint) -> Self {
        let session =
            Session::connect(&endpoint.to_string(), ConnectOptions::default()).expect("a native session");
        Self { session, opened: Mutex::new(None) }
    }

    /// Opens its file.
    pub fn open(&self, name: &str) {
        let file = self.session.open(name, OpenOptions::READ_WRITE).expect("opens");
        *self.opened.lock() = Some(Opened { file, grant: None });
    }

    /// Writes under a grant of the pages there and behind, up to `end`, which is asked for if there is none. Returns whether there was room.
    pub fn write(&self, offset: u64, bytes: &[u8], end: u64) -> bool {
        let mut opened = self.opened.lock();
        let Opened { file, grant } = opened.as_mut().expect("it was opened");
        let covers = |grant: &Grant| {
            let range = grant.range();
            grant.stands() && range.start <= offset && offset + bytes.len() as u64 <= range.end
        };
        if !grant.as_ref().is_some_and(covers) {
            if let Some(old) = grant.take() {
                old.give_back().expect("returned");
            }
            let first = offset / PAGE_SIZE_U64 * PAGE_SIZE_U64;
            *grant = match file.grant_write(first, (GRANT_PAGES * PAGE_SIZE_U64).min(end - first)) {
                Ok(granted) => Some(granted),
                // Then it goes as a request.
                Err(NativeError::Server(Status::Busy | Status::NoSpace)) => None,
                Err(error) => panic!("{error}"),
            };
        }
        match file.write_at(offset, bytes) {
            Ok(()) => true,
            Err(NativeError::Server(Status::NoSpace)) => false,
            Err(error) => panic!("{error}"),
        }
    }

    pub fn close(&self) {
        drop(self.opened.lock().take());
        self.session.close();
    }
}
