//! The cuttlefs client: a volume on a server, the FUSE edge in front of it, and the `cuttlefs` command.
//!
//! A read goes `fuse` -> `file` -> `region` (plan) -> `onesided` -> `sparse`; see `docs/ARCHITECTURE.md`.

// They panic where nobody reads; `say!` and `tell!` do not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

/// The `cuttlefs` command.
pub mod cli;
/// Questions that may never be answered.
pub mod deadline;
/// POSIX semantics without FUSE types.
pub mod file;
/// The FUSE edge.
pub mod fuse;
mod onesided;
mod region;
/// Connections, slots, retransmission and recovery.
pub mod session;
mod sparse;
