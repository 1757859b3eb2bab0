//! The site of a walk: a server with clients, simulated or real.

use super::world::{Crash, Death};
use cuttlefs_client::file::RemoteVolume;
use cuttlefs_common::attr::Timestamp;
use cuttlefs_common::rdma::sim::Cut;
use std::time::Duration;

/// A server with clients.
pub trait Site {
    /// The number of clients.
    fn clients(&self) -> usize {
        2
    }
    /// A client.
    fn client(&self, index: usize) -> &RemoteVolume;
    /// The server's clock.
    fn now(&self) -> Timestamp;
    /// Unmounts a client and mounts it again, if this site can; returns whether it did. Not while messages may be lost: a server that did not hear of
    /// the unmount would wait for that client after its next death.
    fn remount(&mut self, _index: usize) -> bool {
        false
    }
    /// Lets time pass, if this site can.
    fn pass(&self, time: Duration);
    /// Replaces the server by a new one. Everything synced stays.
    fn restart(&mut self);
    /// Whether everything answered survives a power loss of the server without a sync.
    fn answers_are_durable(&self) -> bool {
        false
    }
    /// Whether the server may die while a client has unsynced changes. If so, no other client reads or changes these files before they are synced.
    fn dies_unsynced(&self) -> bool {
        false
    }
    /// Whether a server's death may change the times of files, because clients make changes again and time passes during requests.
    fn writes_again(&self) -> bool {
        false
    }
    /// Lets the server die at a later event, if this site can, and the next server at `again`.
    fn crash_after(&self, _crash: Crash, _again: Option<Crash>) {}
    /// Cancels all scheduled crashes.
    fn calm(&self) {}
    /// Holds scheduled crashes back while `held`.
    fn hold_crash(&self, _held: bool) {}
    /// Kills the server when the next message of this kind is lost, and starts another, if this site can.
    fn kill_at(&self, cut: Cut, death: Death);
    /// Whether a server has died since the last call of this function.
    fn has_died(&self) -> bool;
    /// Cuts a connection after `pass` more messages of this kind, if this site can.
    fn cut(&self, cut: Cut, pass: u32);
    /// The number of pages of the pool.
    fn pool_pages(&self) -> u64;
    /// Checks the server's own state.
    fn check_inside(&self);
}
