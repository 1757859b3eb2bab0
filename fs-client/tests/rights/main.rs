//! Who may do what, against the kernel's own answers.
//!
//! Users are threads of this process with credentials of their own: what they do to a directory of a local file system is the
//! reference, and what they do through the server's `unix://` socket must be answered the same and leave the same. So these
//! tests need root, and are skipped without.
//!
//! `people` who they are, `op` what they do, `kernel` and `cuttle` the two worlds it is done in, `hostile` peers that speak
//! the wire themselves.

#[path = "../serving/mod.rs"]
mod serving;

mod cuttle;
mod handles;
mod hostile;
mod kernel;
mod op;
mod people;
mod walk;

/// Whether there can be other users; says so if not.
fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("skipped: only root can be somebody else");
    }
    is_root
}
