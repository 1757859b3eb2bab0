//! The cuttlefs server: pool, metadata, file regions, tiering IO, sessions and RPC.
//!
//! See `docs/ARCHITECTURE.md` for the way of a read and of a write through these modules.

// These macros panic if their output cannot be written; `say!` and `tell!` do not.
#![deny(clippy::print_stdout, clippy::print_stderr)]
// Items are `pub` for the programs, the benchmarks and the tests of other crates.
#![cfg_attr(not(test), warn(unreachable_pub))]

/// POSIX access control lists.
mod acl;
mod bits;
/// The `cuttlefsd` command.
pub mod cli;
/// Flushes of metadata, each for all that wait for one.
mod committer;
/// `cuttlefs.toml`.
pub mod config;
/// Figures for status.
mod counters;
/// Paths of exported directories.
mod export;
/// Files: mapping, keys, operations.
pub mod files;
/// Checking a pool that is not being served.
pub mod fsck;
/// A thread that syncs for many waiters.
mod group_commit;
/// One sync for many waiters, led by one of them.
mod group_sync;
/// Clients' advisory locks.
mod locks;
/// Names, inodes, extents, attributes, orphans: records of one ordered store.
pub mod meta;
/// The pool's pages: frames, residency, every read and change.
pub mod pages;
/// Which workers serve which peer.
mod placement;
/// The SSD space and how its bytes are reached.
pub mod pool;
/// Permissions.
pub mod rights;
/// The server's RNICs.
pub mod rnics;
mod rpc;
/// Threads, links, start and stop.
pub mod serve;
/// The state that all workers share.
pub mod server;
/// Clients, leases, slots.
mod session;
/// The share of each bounded resource that one peer may have.
mod shares;
/// Locks that a model checker may provide.
mod sync;
/// Sleeps.
mod timer;
/// Inode numbers for clients of an exported subtree.
mod veil;
/// One thread's executor and reactor.
pub mod worker;

pub use rpc::bounce::BUFFERS_OF_PEER;
pub use session::GATHER;
pub use shares::Resource;
