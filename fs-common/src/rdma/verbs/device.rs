//! A device: its abilities and figures, and what it makes.

use super::connect::RdmaError;
use super::queue::{CompletionQueue, ProtectionDomain};
use super::request::FlushReach;
use super::target::FileTarget;
use crate::rdma::hardware::HardwareFigures;
use std::sync::Arc;

/// Abilities of a device beyond plain verbs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// The target translates `Remote::File` and `Remote::Bitmap`.
    pub file_regions: bool,
    /// `Connected::windows` holds the target's exported windows, where the link maps memory.
    pub windows: bool,
    /// Largest two-sided message in bytes.
    pub max_message_bytes: u32,
    /// Largest one-sided transfer in bytes.
    pub max_transfer_bytes: u32,
    /// Largest depth of a queue.
    pub max_queue_depth: u32,
    /// The most local ranges of a work request, at most [`super::SGES_MAX`]. A queue pair has as many as it asks for ([`super::QpConfig::max_sges`]).
    pub max_sges: u32,
    /// A WRITE's last aligned word is stored after its other bytes: a poller that finds it finds them, too.
    pub word_last: bool,
    /// How far a FLUSH that is posted here can reach, by the RNIC and its library. The region bounds it, too ([`super::MemoryRegion::flush_reach`]).
    pub flush: FlushReach,
    /// The RNIC has ATOMIC WRITE (IBTA memory placement extensions). For status only: nothing posts it.
    pub atomic_write: bool,
    /// There are shared receive queues ([`super::ProtectionDomain::create_shared_receives`]).
    pub shared_receives: bool,
    /// There are memory windows ([`super::QueuePair::create_window`]).
    pub memory_windows: bool,
    /// Memory whose pages are pointed can be registered, and is followed: a READ finds the page that is there at that moment (on-demand paging).
    pub on_demand_paging: bool,
    /// Queue pairs over `tcp` and `unix` that were accepted can be armed ([`super::QueuePair::arm`]).
    pub chains: bool,
    /// Memory whose pages come and go can be registered ([`super::ProtectionDomain::register_paged`]).
    pub paged_memory: bool,
    /// A FLUSH covers SENDs, too: the target's RNIC places messages without the target's CPU, or orders the FLUSH behind their placement.
    pub flush_after_send: bool,
}

/// The link that carries a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinkKind {
    /// Software RNIC over shared memory.
    Shm,
    /// Software RNIC over TCP.
    Tcp,
    /// Software RNIC, the TCP protocol over a Unix socket.
    Unix,
    /// An RNIC.
    Rdma,
    /// Both ends in one thread, for simulation.
    Sim,
}

/// Figures of a device at the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceFigures {
    /// Bytes held because peers do not take them, or have not sent all of a packet.
    pub held_bytes: usize,
    /// The most that may be held.
    pub held_bound: usize,
    /// Clients that have connected, but have neither proven a key nor said hello.
    pub unheard_strangers: usize,
    /// Clients whose peer is known, and that have not said hello.
    pub unheard_known: usize,
    /// The bound of each of the two, at one endpoint.
    pub unheard_bound: usize,
    /// Proofs of keys that are remembered, so that each is good once.
    pub knocks: usize,
    /// The most that are remembered.
    pub knocks_bound: usize,
    /// Connections one peer may make a second.
    pub arrivals_per_second: u32,
    /// Connections beyond that rate that one peer may make at once.
    pub arrivals_burst: u32,
    /// Connections that had to wait, since their peers connect too fast.
    pub arrivals_delayed: u64,
    /// Connections that were turned away, since too many of their peers' were waiting.
    pub arrivals_turned_away: u64,
    /// Clients that were refused: their key is none of the server's, or their handshake is none.
    pub refused: u64,
}

impl DeviceFigures {
    /// The figures of two devices together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            held_bytes: self.held_bytes + other.held_bytes,
            held_bound: self.held_bound + other.held_bound,
            unheard_strangers: self.unheard_strangers + other.unheard_strangers,
            unheard_known: self.unheard_known + other.unheard_known,
            unheard_bound: self.unheard_bound.max(other.unheard_bound),
            knocks: self.knocks + other.knocks,
            knocks_bound: self.knocks_bound + other.knocks_bound,
            arrivals_per_second: self.arrivals_per_second + other.arrivals_per_second,
            arrivals_burst: self.arrivals_burst + other.arrivals_burst,
            arrivals_delayed: self.arrivals_delayed + other.arrivals_delayed,
            arrivals_turned_away: self.arrivals_turned_away + other.arrivals_turned_away,
            refused: self.refused + other.refused,
        }
    }
}

/// An RNIC, real or software.
pub trait Device: Send + Sync {
    /// Its name, for status.
    fn name(&self) -> &str;
    /// Its figures, for status.
    fn figures(&self) -> DeviceFigures {
        DeviceFigures::default()
    }
    /// Its figures as hardware, for status; `None` for software.
    fn hardware(&self) -> Option<HardwareFigures> {
        None
    }
    /// Its abilities.
    fn capabilities(&self) -> Capabilities;
    /// A new protection domain.
    ///
    /// # Errors
    /// `RdmaError` if the device cannot.
    fn alloc_pd(&self) -> Result<Arc<dyn ProtectionDomain>, RdmaError>;
    /// A completion queue for `depth` completions.
    ///
    /// # Errors
    /// `RdmaError` if the device cannot.
    fn create_cq(&self, depth: u32) -> Result<Arc<dyn CompletionQueue>, RdmaError>;
    /// How connections between machines are protected, for status.
    fn network_security(&self) -> &'static str {
        "none"
    }
    /// Target side: sets the target that serves `Remote::File` and `Remote::Bitmap`.
    fn set_file_target(&self, target: Arc<dyn FileTarget>);
}
