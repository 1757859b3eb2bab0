//! The cuttlefs client: a volume on a server, the FUSE edge in front of it, and the `cuttlefs` command.
//!
//! Each module imports only modules before it: `transport` (lanes; knows no files) <- `session` (attach, reclaim) <- `reach` (the way to a server)
//! <- `read` <- `file` <- `native` (for programs), `preload`, `fuse` <- `cli`. `swap`, `signals` and `descriptors` import none of them. `tests/layers.rs` checks this. `docs/ARCHITECTURE.md` has the way of a read through them.

// These macros panic if nobody reads the output; `say!` and `tell!` do not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

/// The `cuttlefs` command.
pub mod cli;
/// Calls that may never return.
pub mod deadline;
/// Which descriptors started programs inherit.
mod descriptors;
/// POSIX semantics without FUSE types.
pub mod file;
/// The FUSE edge.
pub mod fuse;
mod reach;
mod read;
#[cfg(feature = "model-check")]
pub use read::model;
/// Files on a server for programs that mount nothing.
pub mod native;
/// What `cuttlefs preload` and the library that it loads into programs tell each other.
pub mod preload;
/// A mount's session with its server.
pub mod session;
/// Which signals a thread blocks.
pub mod signals;
/// Memory of programs at a memory node.
pub mod swap;
mod threads;
mod transport;
