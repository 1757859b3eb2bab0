//! The redo log: changes of contents that were acknowledged and are not in the pool yet (DESIGN section 5;
//! docs/durability.md has the order of durable things, the bytes, and what recovery does about each thing it may find).
//!
//! ```text
//! tier (a change, under its locks) -> Ticket::append -> one sync for many -> the answer
//! write-back of everything -> checkpoint: the room is free again
//! start -> Contents::read: what is left to do (net) -> done again through tier -> a new life of the log
//! ```

mod contents;
mod device;
mod header;
mod net;
mod operation;
mod redo_log;

#[cfg(test)]
mod tests;

pub use contents::{Contents, LogError, MAX_CAPACITY};
pub use device::{FileLog, LogDevice, SEGMENT_FILE, SimLog};
pub use header::RING_OFFSET;
pub use net::{Again, FileChanges, Net};
pub use operation::{Change, Operation};
pub use redo_log::{LogFigures, LoggedFile, MIN_CAPACITY, Mark, RedoLog, Ticket};
