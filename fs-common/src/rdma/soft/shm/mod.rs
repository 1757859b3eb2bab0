//! Link `shm`: both ends are processes of one machine that may see each other's memory.
//!
//! # How it works
//! * Two-sided messages go through rings in shared memory (`ring`).
//! * One-sided requests are executed by the initiator's own thread, as copies on the peer's mapped memory. A region's
//!   descriptor is sent over the socket when it is registered (`wire`); a region that the peer may not change is handed
//!   over read-only, so the kernel prevents it. A directory word says whether the region is alive.
//! * A FLUSH is the initiator's own cache-line write-back where that is enough. Otherwise it is a message to the target
//!   (`flush`), done when the target next polls.
//! * The doorbell is an eventfd, written only when the peer sleeps (see `cq.rs`).
//! * No thread of the device runs. The peer's death shows as hang-up of the socket.
//!
//! # Invariants
//! * Requests of one queue pair execute in the order posted: a request that has to wait (ring full, announcement not
//!   here) holds up those behind it.
//! * Contents of shared memory that the peer writes are bytes until checked; a broken ring breaks this queue pair only.

mod connection;
mod copies;
mod flush;
mod handshake;
mod regions;
pub mod ring;
pub mod wire;

pub(super) use connection::ShmQp;
pub(super) use handshake::{ShmIncoming, connect, receive_hello, refuse};
