//! The FUSE edge: one kernel request in, one reply out.
//!
//! Owns all parts of FUSE: errno, FUSE inode numbers, `/dev/fuse`, the kernel's caching. The file system itself is behind
//! [`Volume`](crate::file::volume::Volume); here is only translation.
//!
//! * `kernel` is the protocol: `/dev/fuse`, its messages, interrupts, threads.
//! * `edge` is the `Filesystem` over a volume: a thin method for each request, one span each; `reply` its answers.
//! * `convert` turns attributes, times, kinds and flags into FUSE's and back.
//! * `errno` is the one table of errors.
//! * `directory` adds `.` and `..` to listings.
//! * `filling` delays READs' short answers, which tell the kernel where a file ends.
//! * `kernel_cache` makes the kernel forget cached pages and attributes; `cached_files` knows what it may have, and `watch` looks at open files.
//! * `lock_wait` is a request that waits for a lock.
//! * `xattr_names` has the extended attributes that exist here.
//! * `inode_flags` has the requests of chattr(1).
//! * `root` has the root's answers while the server does not answer, so that a mount can be unmounted.
//! * `lacking` remembers the files without ACLs, capabilities and set-id bits; `groups` has the groups of processes.
//! * `settings` are the settings of a mount; `session` mounts with them; `mount_table` reads the present mounts.
//!
//! # The kernel's caching
//! Attributes and names for `attr_cache` and `entry_cache` (one second by default), missing names for `negative_cache`; pages until an
//! open, a lock, attributes, or a look each `attr_cache`, find that another client has changed the file: then this mount has the kernel forget them
//! (`kernel_cache`). Writes go through at once: there is no write-back cache, so `flush` has no bytes to send. A lock that is granted
//! makes the kernel forget the file's attributes, too. With `cache=none` every lifetime is
//! zero and every file is opened `FOPEN_DIRECT_IO`.
//!
//! # Permission checks
//! The kernel makes them (`default_permissions`). The edge makes sure that they are not bypassed: see `create` in `edge`.

mod cached_files;
mod convert;
mod directory;
mod edge;
mod errno;
mod file_system;
mod filling;
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
mod watch;
mod xattr_names;

/// The errno that a mount's programs see for a server's status, for other edges with errnos.
pub fn errno_of(status: cuttlefs_common::status::Status) -> i32 {
    errno::of_status(status).code()
}

pub use mount_table::{MountEntry, MountTable, resolve_mountpoint};
pub use session::{MountError, Mounted, agreement, mount, mount_options};
pub use settings::{FuseSettings, MAX_THREADS};
