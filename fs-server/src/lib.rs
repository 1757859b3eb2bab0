//! The cuttlefs server: pool, metadata, file regions, tiering IO, sessions and RPC.
//!
//! See `docs/ARCHITECTURE.md` for the way of a read and of a write through these modules.

// They panic where nobody reads; `say!` and `tell!` do not.
#![deny(clippy::print_stdout, clippy::print_stderr)]
// What is `pub` is for the programs, the benchmarks and the tests of other crates.
#![cfg_attr(not(test), warn(unreachable_pub))]

/// POSIX access control lists.
mod acl;
mod bits;
/// The `cuttlefsd` command.
pub mod cli;
/// Metadata's flushes, for all who wait.
mod committer;
/// `cuttlefs.toml`.
pub mod config;
/// Figures for status.
mod counters;
/// Paths of what is exported.
mod export;
/// Files: mapping, keys, operations.
pub mod files;
/// Checking a pool that nobody serves.
pub mod fsck;
/// A thread that syncs for many.
mod group_commit;
/// One sync for many, led by one of them.
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
/// Decode, admit, call, reply.
/// The server's RNICs.
pub mod rnics;
mod rpc;
/// Threads, links, start and stop.
pub mod serve;
/// What all workers share.
pub mod server;
/// Clients, leases, slots.
mod session;
/// How much of what is bounded one peer may have.
mod shares;
/// Sleeps.
mod timer;
/// The numbers clients of an exported subtree know inodes by.
mod veil;
/// One thread's executor and reactor.
pub mod worker;

pub use rpc::bounce::BUFFERS_OF_PEER;
pub use session::GATHER;
pub use shares::Resource;
