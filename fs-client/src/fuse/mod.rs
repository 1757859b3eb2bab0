//! The FUSE edge: one kernel request in, one reply out.
//!
//! Owns everything that is FUSE: errno, FUSE inode numbers, `/dev/fuse`, what the kernel may cache. What a
//! file system *does* is behind [`Volume`](crate::file::volume::Volume); here is only translation.
//!
//! * `kernel` is the protocol: `/dev/fuse`, its messages, interrupts, threads.
//! * `edge` is the `Filesystem` over a volume: a thin method for each request, one span each; `reply` its answers.
//! * `convert` turns attributes, times, kinds and flags into FUSE's and back.
//! * `errno` is the one table of errors.
//! * `directory` adds `.` and `..` to listings.
//! * `kernel_cache` makes the kernel forget what it has cached.
//! * `lock_wait` is who waits for a lock.
//! * `xattr_names` says which extended attributes exist here.
//! * `inode_flags` is how chattr(1) asks.
//! * `root` is what the root answers while the server does not, so that a mount can be unmounted.
//! * `lacking` remembers which files have no ACLs, capabilities and set-id bits; `groups` says who is in which group.
//! * `settings` is what a mount can be told; `session` mounts with it; `mount_table` reads what is mounted.
//!
//! # What the kernel may cache
//! Attributes and names for `attr_cache` and `entry_cache` (one second by default), missing names for
//! `negative_cache`; pages until an open, or a refresh of the attributes, finds that the file has changed
//! (`FUSE_AUTO_INVAL_DATA`, and no `FOPEN_KEEP_CACHE` unless the volume says so). Writes go through at once:
//! there is no write-back cache, so `flush` has no bytes to send. A lock that is granted makes the kernel forget the file's attributes,
//! and its pages if somebody else has changed it. With `cache=none` every lifetime is zero and
//! every file is opened `FOPEN_DIRECT_IO`.
//!
//! # Who checks permissions
//! The kernel (`default_permissions`). The edge makes sure that it gets to: see `create` in `edge`.

mod convert;
mod directory;
mod edge;
mod errno;
mod groups;
mod inode_flags;
/// The kernel's side of FUSE.
pub mod kernel;
mod kernel_cache;
mod lacking;
mod lock_wait;
mod mount_table;
mod nameless;
mod reply;
mod root;
mod session;
mod settings;
mod told_names;
mod xattr_names;

pub use mount_table::{MountEntry, MountTable, resolve_mountpoint};
pub use session::{MountError, Mounted, agreement, mount, mount_options};
pub use settings::{FuseSettings, MAX_THREADS};
