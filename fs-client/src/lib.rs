//! The cuttlefs client: a volume on a server, the FUSE edge in front of it, and the `cuttlefs` command.
//!
//! Each imports only those before it: `transport` (lanes; knows no files) <- `session` (attach, reclaim) <- `read` <- `file` <- `fuse` <-
//! `cli`; `tests/layers.rs` holds them to it. A read goes down that way: see `docs/ARCHITECTURE.md`.

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
mod read;
#[cfg(feature = "model-check")]
pub use read::model;
/// What a mount is, and holds, at its server.
pub mod session;
mod transport;
