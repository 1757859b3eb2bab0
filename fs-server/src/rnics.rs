//! The server's RNICs: one device for each provider, and for each piece of hardware, that its endpoints need.
//!
//! # What is of one RNIC
//! Its protection domain, and what is registered there: a key is good at the RNIC that gave it. So each RNIC has keys of its own for the windows,
//! each worker's bounce buffers have one of each RNIC, and each worker has a completion queue of each. Queue pairs are
//! numbered by their RNIC. A connection says which RNIC it came by (`Connection::rnic`); whoever posts, or tells a client a key, asks it.
//!
//! # What is shared
//! All else: memory (the same bytes are registered with each), workers, sessions, locks, peers' shares. A client may have connections by several
//! RNICs in one session; its key makes it one peer.

use cuttlefs_common::rdma::{
    CompletionQueue, Device, DeviceFigures, Devices, Endpoint, FileTarget, MemoryRegion, ProtectionDomain,
    RdmaError, RemoteRange, SharedReceiveQueue,
};
use std::sync::{Arc, OnceLock};

/// Completions that a worker's queue of an RNIC holds: every connection may have a few of each kind outstanding.
const CQ_DEPTH: u32 = 64 * 1024;
/// Receives of a worker where an RNIC has shared ones, 8 MiB: several mounts whose every lane asks at once.
pub const RECEIVES_OF_WORKER: usize = 128;

/// Which of the server's RNICs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RnicIndex(pub usize);

/// A worker's queues of one RNIC.
#[derive(Clone)]
pub struct RnicQueues {
    /// Completions of all its queue pairs that the worker has.
    pub cq: Arc<dyn CompletionQueue>,
    /// The receives of those, where the RNIC has shared ones.
    pub receives: Option<Arc<dyn SharedReceiveQueue>>,
}

/// One of the server's RNICs.
pub struct Rnic {
    /// The device.
    pub device: Arc<dyn Device>,
    /// What all connections by it have in common.
    pub pd: Arc<dyn ProtectionDomain>,
    /// The tables that clients may READ, where they are trusted; for as long as they are to be read.
    windows: OnceLock<[Arc<dyn MemoryRegion>; 3]>,
}

impl Rnic {
    /// These may be READ by every client from now on. Once.
    pub fn show_windows(&self, windows: [Arc<dyn MemoryRegion>; 3]) {
        // A server is shown once.
        let _ = self.windows.set(windows);
    }

    /// A worker's queues.
    ///
    /// # Errors
    /// The device cannot.
    pub fn create_queues(&self) -> Result<RnicQueues, RdmaError> {
        let has_shared = self.device.capabilities().shared_receives;
        Ok(RnicQueues {
            cq: self.device.create_cq(CQ_DEPTH)?,
            receives: has_shared
                .then(|| self.pd.create_shared_receives(RECEIVES_OF_WORKER as u32))
                .transpose()?,
        })
    }

    /// What clients by this RNIC are told, in `WindowId::ALL` order.
    pub fn windows(&self) -> Option<[RemoteRange; 3]> {
        let range = |region: &Arc<dyn MemoryRegion>| RemoteRange {
            rkey: region.rkey(),
            len: region.memory().len() as u64,
        };
        self.windows.get().map(|windows| windows.each_ref().map(range))
    }
}

/// All of them; there is at least one.
pub struct Rnics {
    devices: Devices,
    all: Vec<Rnic>,
}

impl Rnics {
    /// Allocates a protection domain of each; `target` translates file addresses where a device can have that done.
    ///
    /// # Errors
    /// A device cannot.
    pub fn new(devices: Devices, target: &Arc<impl FileTarget + 'static>) -> Result<Self, RdmaError> {
        let rnic = |device: &Arc<dyn Device>| {
            device.set_file_target(target.clone());
            Ok(Rnic { device: device.clone(), pd: device.alloc_pd()?, windows: OnceLock::new() })
        };
        let all = devices.all().iter().map(rnic).collect::<Result<_, RdmaError>>()?;
        Ok(Self { devices, all })
    }

    /// In the order of their indices.
    pub fn all(&self) -> &[Rnic] {
        &self.all
    }

    /// One of them.
    pub fn get(&self, index: RnicIndex) -> &Rnic {
        &self.all[index.0]
    }

    /// The one that listens on an endpoint.
    pub fn of_endpoint(&self, endpoint: &Endpoint) -> RnicIndex {
        RnicIndex(self.devices.place_of(endpoint))
    }

    /// A worker's queues of each, in the order of their indices.
    ///
    /// # Errors
    /// A device cannot.
    pub fn create_queues(&self) -> Result<Vec<RnicQueues>, RdmaError> {
        self.all.iter().map(Rnic::create_queues).collect()
    }

    /// Figures of all of them together.
    pub fn figures(&self) -> DeviceFigures {
        self.all.iter().map(|rnic| rnic.device.figures()).fold(DeviceFigures::default(), DeviceFigures::and)
    }
}
