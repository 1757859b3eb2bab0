//! The kernel's side of FUSE: `/dev/fuse`, its messages, and their answers.
//!
//! A small session layer of our own, with parts that published ones lack: FUSE_INTERRUPT, requests that are taken on
//! while all threads wait, the kind of a lock, the number of pages that a request may have, and buffers no larger than
//! the message.
//!
//! * `abi` has the numbers and flags of `linux/fuse.h`, version 7.40; `fields` reads a message.
//! * `filesystem` is the trait a file system implements; `dispatch` calls it; `reply` answers.
//! * `requests` are those that have been read and have no answer yet; `attendant` looks after the interrupted ones, and
//!   reads on while all threads wait.
//! * `mounting` mounts; `session` agrees with the kernel and runs the threads; `notifier` tells the kernel things.
//!
//! # Invariants
//! * A request is answered once: the first taker of its answer sends it, later ones are dropped.
//! * A reply that is dropped without an answer is EIO: no caller waits for ever.
//! * When the process has died, no caller waits for ever: the kernel ends the mount when the device is closed, or, if a thread of `notifier`'s users keeps it
//!   open in the kernel, a watchdog does (`cli/watchdog.rs`).
//! * A message of the kernel is checked before it is used; a malformed one is EIO, and logged.

mod abi;
mod attendant;
mod dispatch;
mod fields;
mod filesystem;
mod mounting;
mod notifier;
mod reply;
mod requests;
mod session;

pub use abi::{
    CopyFileRangeFlags, Errno, FileAttr, FileHandle, FileType, FopenFlags, Generation, INodeNo, InitFlags,
    IoctlFlags, LockKind, LockOwner, OpenFlags, RenameFlags, RequestId, TimeOrNow, WriteFlags,
};
pub use filesystem::{Filesystem, Request};
pub use mounting::{MountOptions, unmount};
pub use notifier::Notifier;
pub use reply::{
    ReplyAttr, ReplyClaimed, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty,
    ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr,
};
pub use requests::Figures;
pub use session::{Agreement, Serving, Session};
