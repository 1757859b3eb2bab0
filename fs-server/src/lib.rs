//! The cuttlefs server: pool, metadata, file regions, tiering IO, sessions and RPC.
//!
//! See `docs/ARCHITECTURE.md` for the way of a read and of a write through these modules.

// They panic where nobody reads; `say!` and `tell!` do not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

/// POSIX access control lists.
pub mod acl;
mod bits;
/// The `cuttlefsd` command.
pub mod cli;
/// Metadata's flushes, for all who wait.
pub mod committer;
/// `cuttlefs.toml`.
pub mod config;
/// Figures for status.
pub mod counters;
/// Paths of what is exported.
pub mod export;
/// Files: mapping, keys, operations.
pub mod files;
/// Checking a pool that nobody serves.
pub mod fsck;
/// A thread that syncs for many.
pub mod group_commit;
/// One sync for many, led by one of them.
pub mod group_sync;
/// Clients' advisory locks.
pub mod locks;
/// Names, inodes, extents, attributes, orphans: records of one ordered store.
pub mod meta;
/// The pool's pages: frames, residency, every read and change.
pub mod pages;
/// Which workers serve which peer.
pub mod placement;
/// The SSD space and how its bytes are reached.
pub mod pool;
/// Who may do what.
pub mod rights;
/// Decode, admit, call, reply.
pub mod rpc;
/// Threads, links, start and stop.
pub mod serve;
/// What all workers share.
pub mod server;
/// Clients, leases, slots.
pub mod session;
/// How much of what is bounded one peer may have.
pub mod shares;
/// Sleeps.
pub mod timer;
/// The numbers clients of an exported subtree know inodes by.
pub mod veil;
/// One thread's executor and reactor.
pub mod worker;
