//! Permissions of users, compared with those of the kernel.
//!
//! Users are threads of this process with credentials of their own. Their operations on a directory of a local file system are the reference: the
//! same operations through the server's `unix://` socket must have the same answers and leave the same state. So these tests need root, and are
//! skipped without it.
//!
//! `people` has the users, `op` the operations, `kernel` and `cuttle` the two worlds in which they run, and `hostile` has peers that send any
//! message.

#[path = "../serving/mod.rs"]
mod serving;

mod cuttle;
mod handles;
mod hostile;
mod kernel;
mod op;
mod people;
mod walk;

/// Whether this process can become other users. Prints a message if not.
fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("skipped: only root can be somebody else");
    }
    is_root
}
