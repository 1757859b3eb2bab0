//! The parts that the cuttlefs server and client share: names of things, wire formats, the parts of a file region both
//! look at, and the verbs-shaped RDMA layer.
//!
//! See `docs/ARCHITECTURE.md` for the way of a read and of a write through the tree.

// The print macros panic when nobody reads the output; `say!` and `tell!` do not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

/// Inode attributes as they cross the wire.
pub mod attr;
/// Why a connection is ended.
pub mod breach;
/// Keys that servers and clients share, and by which they know each other.
pub mod cluster_key;
/// How many descriptors the process may have, and which of them are its own.
pub mod descriptors;
/// Errors as people read them.
pub mod explain;
/// Turns by time: the choice of a thread's next work.
pub mod fair;
/// Newtypes for every number that crosses a boundary.
pub mod ids;
/// The life of a simulated process, counted in events.
pub mod life;
/// Advisory locks: ranges, modes, and lists of held locks.
pub mod locks;
/// A log that no peer can fill.
pub mod log_limit;
/// Mapped memory shared between threads and processes.
pub mod memory;
/// The names that a directory entry may have.
pub mod name;
/// NP-RDMA: one-sided verbs on memory that may not be there.
pub mod np;
/// Remote memory by pages, which an RNIC manages.
pub mod odrp;
/// A panic ends the process.
pub mod panic_ends;
/// How bytes become persistent.
pub mod persist;
pub mod pool_uuid;
/// The verbs-shaped API and its providers.
pub mod rdma;
/// The records of a client's ring, and the ring.
pub mod redo;
/// The memory that clients read one-sidedly, and the arithmetic of pages.
pub mod region;
/// Files that may be anything.
pub mod regular_file;
/// RPC messages.
pub mod rpc;
/// Sizes in the notation of people.
pub mod size;
/// The files of Unix sockets: their mode, and whether a process has them.
pub mod socket_file;
/// How long an idle thread spins before it sleeps.
pub mod spin;
/// The wire status.
pub mod status;
/// Locks and fences that a model checker replaces.
pub mod sync;
/// Output for people.
pub mod terminal;
/// Clock and randomness as they come in from outside.
pub mod world;
