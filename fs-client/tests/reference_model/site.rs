//! Where a walk goes: a server with clients, simulated or real.

use super::world::{Crash, Death};
use cuttlefs_client::file::RemoteVolume;
use cuttlefs_common::attr::Timestamp;
use cuttlefs_common::rdma::sim::Cut;
use std::time::Duration;

/// A server with clients.
pub trait Site {
    /// How many clients.
    fn clients(&self) -> usize {
        2
    }
    /// A client.
    fn client(&self, index: usize) -> &RemoteVolume;
    /// The server's clock.
    fn now(&self) -> Timestamp;
    /// A client unmounts and mounts again, if this site can. Not where the server may not hear of it: it would wait for
    /// that client after its next death.
    fn remount(&mut self, _index: usize) -> bool {
        false
    }
    /// Lets time pass, if this site can.
    fn pass(&self, time: Duration);
    /// The server goes and comes back. What was synced stays.
    fn restart(&mut self);
    /// Whether what is answered survives the server and a power loss without any sync.
    fn answers_are_durable(&self) -> bool {
        false
    }
    /// Whether the server may die while a client has something that is not synced: then no other client looks at that or
    /// changes it before it is.
    fn dies_unsynced(&self) -> bool {
        false
    }
    /// Whether a server's death may show in the times of files: where clients make changes again, and time passes within
    /// requests.
    fn writes_again(&self) -> bool {
        false
    }
    /// The server dies with an event to come, if this site can; the one that starts then perhaps, too.
    fn crash_after(&self, _crash: Crash, _again: Option<Crash>) {}
    /// No crash that was to come comes.
    fn calm(&self) {}
    /// A crash that is to come waits.
    fn hold_crash(&self, _held: bool) {}
    /// Kills the server when the next message of this kind is lost, and starts it again, if this site can.
    fn kill_at(&self, cut: Cut, death: Death);
    /// Whether that has happened since this was asked last.
    fn has_died(&self) -> bool;
    /// Cuts a connection soon, if this site can.
    fn cut(&self, cut: Cut, pass: u32);
    /// Pages of the pool.
    fn pool_pages(&self) -> u64;
    /// Looks for what only the server knows.
    fn check_inside(&self);
}
