//! Files on a server for programs: no mount, no kernel, one library call for each operation. `docs/native.md` says what a program gets.
//!
//! A `Session` is what a mount has: lanes to the server, open files, copies of unsynced changes. Names are walked by `walk`. A `File` reads and
//! writes at offsets; a `Queue` has many such requests under way at once, into `Buffer`s that are registered once. `Calls` are the threads for
//! requests that wait for the server: those of queues, and those whose caller has named a deadline. `regions` has ranges of files that are handed
//! over by keys; `grant` write grants, and one-sided changes under them; `atomic` atomics on words of files.
//!
//! # Failure
//! While the server is away, requests wait; with a deadline, that long. Then the error is `NativeError::Deadline`, and the request may still be done.

mod atomic;
mod buffer;
mod calls;
mod defragment;
mod error;
mod file;
mod grant;
mod options;
mod queue;
mod regions;
mod session;
mod walk;

pub use crate::reach::Trust;
pub use buffer::Buffer;
pub use cuttlefs_common::attr::{Attr, FileKind, Timestamp};
pub use cuttlefs_common::ids::{FilePage, InodeNo};
pub use cuttlefs_common::rpc::{RegionKey, RegionKeyError, Rights};
pub use cuttlefs_common::status::Status;
pub use defragment::{Defragmented, Moved};
pub use error::NativeError;
pub use file::File;
pub use grant::{GRANT_MAX_BYTES, Grant};
pub use options::{ConnectOptions, OpenOptions};
pub use queue::{Completion, DEPTH_MAX, Done, Post, Queue};
pub use session::{Entry, Session};

use calls::Calls;
