//! The parts that the cuttlefs server and client share: names of things, wire formats, the parts of a file region both
//! look at, and the verbs-shaped RDMA layer.
//!
//! See `docs/ARCHITECTURE.md` for the way of a read and of a write through the tree.

// They panic where nobody reads; `say!` and `tell!` do not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

/// Inode attributes as they cross the wire.
pub mod attr;
/// Why a connection is ended.
pub mod breach;
/// Keys that servers and clients share, and by which they know each other.
pub mod cluster_key;
/// How many descriptors there may be, and who gets the last ones.
pub mod descriptors;
/// Errors as people read them.
pub mod explain;
/// Turns by time: whose work a thread does next.
pub mod fair;
/// Newtypes for every number that crosses a boundary.
pub mod ids;
/// The life of a simulated process, counted in events.
pub mod life;
/// Advisory locks: ranges, modes, lists of who holds what.
pub mod locks;
/// A log that no peer can fill.
pub mod log_limit;
/// Mapped memory shared between threads and processes.
pub mod memory;
/// Which names a directory entry may have.
pub mod name;
/// A panic ends the process.
pub mod panic_ends;
/// What makes bytes outlive a crash.
pub mod persist;
/// The verbs-shaped API and its providers.
pub mod rdma;
/// What the log holds.
pub mod redo;
/// What clients may read one-sidedly, and the arithmetic of pages.
pub mod region;
/// RPC messages.
pub mod rpc;
/// Sizes as people write them.
pub mod size;
/// How long an idle thread spins before it sleeps.
pub mod spin;
/// The wire status.
pub mod status;
/// Locks and fences that a model checker replaces.
pub mod sync;
/// Lines for people.
pub mod terminal;
/// Clock and randomness as they come in from outside.
pub mod world;
