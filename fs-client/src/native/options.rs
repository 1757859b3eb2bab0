//! What a program says when it connects, and when it opens a file.

use crate::reach::Trust;
use cuttlefs_common::pool_uuid::PoolUuid;
use std::time::Duration;

/// How to connect.
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// How the right server is recognized: the key to show over `tcp://` and `rdma://`, the server's user over `unix://` and `shm://`.
    pub trust: Trust,
    /// A label for people, in the server's status; empty: the program's name.
    pub label: String,
    /// The pool whose files are meant: a server of another one is refused. `None`: that of the server that is there.
    pub pool: Option<PoolUuid>,
    /// The directory of the export that paths begin at; empty: the export's root.
    pub subtree: Vec<u8>,
    /// The requests that can wait for the server at once, each in a thread and with a lane of its own. Reads of what is in the server's memory need
    /// none over `shm`, and one for a whole queue over other links.
    pub threads: usize,
    /// How long a request waits for a server that is away; `None`: until it is back. [`crate::native::Session::with_deadline`] changes it for a handle.
    pub deadline: Option<Duration>,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self {
            trust: Trust::default(),
            label: String::new(),
            pool: None,
            subtree: Vec::new(),
            threads: 4,
            deadline: None,
        }
    }
}

/// How to open a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenOptions {
    /// For reading.
    pub read: bool,
    /// For writing.
    pub write: bool,
    /// Make the file if there is none.
    pub create: bool,
    /// Fail if there is one.
    pub exclusive: bool,
    /// Cut it to length 0.
    pub truncate: bool,
    /// Every write is durable when it returns.
    pub sync: bool,
    /// The permission bits of a file that is made; no umask is applied.
    pub mode: u16,
}

impl OpenOptions {
    /// A file that is there, for reading.
    pub const READ: Self = Self {
        read: true,
        write: false,
        create: false,
        exclusive: false,
        truncate: false,
        sync: false,
        mode: 0o644,
    };
    /// A file that is there, for reading and writing.
    pub const READ_WRITE: Self = Self { write: true, ..Self::READ };
    /// For reading and writing; made if there is none.
    pub const CREATE: Self = Self { create: true, ..Self::READ_WRITE };
}
