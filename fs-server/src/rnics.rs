//! The server's RNICs: one device for each provider, and for each piece of hardware, that its endpoints need.
//!
//! # What belongs to one RNIC
//! Its protection domain and the memory that is registered there: a key is valid only at the RNIC that gave it. So each RNIC has keys of its own for
//! the windows and for each worker's bounce buffers, and each worker has a completion queue of each RNIC. Queue pairs are numbered by their RNIC. A
//! connection names its RNIC (`Connection::rnic`), and whoever posts a work request on it or tells its client a key asks for that.
//! # What is shared
//! All else: memory (the same bytes are registered with each RNIC), workers, sessions, locks, peers' shares. One session of a client may have
//! connections through several RNICs; the client's key makes it one peer.

use cuttlefs_common::ids::PAGE_SIZE;
use cuttlefs_common::rdma::{
    Device, DeviceFigures, Devices, DmaBufRegion, Endpoint, FileTarget, MemoryRegion, ProtectionDomain,
    QueuePair, RdmaError, RemoteRange,
};
use std::sync::{Arc, OnceLock};

/// Which of the server's RNICs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RnicIndex(pub usize);

/// One of the server's RNICs.
pub struct Rnic {
    /// The device.
    pub device: Arc<dyn Device>,
    /// The protection domain of all its connections.
    pub pd: Arc<dyn ProtectionDomain>,
    /// The tables that trusted clients may READ, for as long as they are readable.
    shown: OnceLock<Shown>,
}

/// What trusted clients may READ.
struct Shown {
    /// In the order of `WindowId::ALL`.
    tables: [Arc<dyn MemoryRegion>; 3],
    /// The window of pages, if there is one.
    pages: Option<PagesRegion>,
}

/// The window of pages as it is registered with an RNIC.
pub enum PagesRegion {
    /// Memory that the RNIC follows by on-demand paging.
    Followed(Arc<dyn MemoryRegion>),
    /// Addresses that the IOMMU translates.
    Translated(Arc<dyn DmaBufRegion>),
}

fn range(region: &Arc<dyn MemoryRegion>) -> RemoteRange {
    let (rkey, first_address) = (region.rkey(), region.first_address());
    RemoteRange { rkey, first_address, len: region.memory().len() as u64 }
}

impl Rnic {
    /// Lets every client READ these tables, and the window of pages, from now on. Called once.
    pub fn show_windows(&self, tables: [Arc<dyn MemoryRegion>; 3], pages: Option<PagesRegion>) {
        // Fails only on a second call, and a server makes one.
        let _ = self.shown.set(Shown { tables, pages });
    }

    /// The windows as clients of this RNIC are told of them, in the order of `WindowId::ALL`.
    pub fn windows(&self) -> Option<[RemoteRange; 3]> {
        self.shown.get().map(|shown| shown.tables.each_ref().map(range))
    }

    /// The window of pages as the client of this connection is told of it. Of memory that the RNIC follows a client is told none if its READ of a page
    /// comes in several packets: rdma_rxe fills each packet from the beginning of the page (7.2, `__rxe_odp_mr_copy()`).
    pub fn page_window(&self, connection: &dyn QueuePair) -> Option<RemoteRange> {
        let is_one_packet = |mtu: u32| mtu as usize >= PAGE_SIZE;
        match self.shown.get()?.pages.as_ref()? {
            PagesRegion::Followed(pages) => {
                connection.path_mtu_bytes().is_none_or(is_one_packet).then(|| range(pages))
            }
            PagesRegion::Translated(pages) => Some(pages.range()),
        }
    }
}

/// The server's RNICs; there is at least one.
pub struct Rnics {
    devices: Devices,
    all: Vec<Rnic>,
}

impl Rnics {
    /// Makes a protection domain at each device. `target` translates file addresses, if a device can have that done.
    ///
    /// # Errors
    /// If a device cannot make one.
    pub fn new(devices: Devices, target: &Arc<impl FileTarget + 'static>) -> Result<Self, RdmaError> {
        let rnic = |device: &Arc<dyn Device>| {
            device.set_file_target(target.clone());
            Ok(Rnic { device: device.clone(), pd: device.alloc_pd()?, shown: OnceLock::new() })
        };
        let all = devices.all().iter().map(rnic).collect::<Result<_, RdmaError>>()?;
        Ok(Self { devices, all })
    }

    /// The RNICs, in the order of their indices.
    pub fn all(&self) -> &[Rnic] {
        &self.all
    }

    /// The RNIC of this index.
    pub fn get(&self, index: RnicIndex) -> &Rnic {
        &self.all[index.0]
    }

    /// The RNIC that listens on an endpoint.
    pub fn of_endpoint(&self, endpoint: &Endpoint) -> RnicIndex {
        RnicIndex(self.devices.place_of(endpoint))
    }

    /// Figures of all of them together.
    pub fn figures(&self) -> DeviceFigures {
        self.all.iter().map(|rnic| rnic.device.figures()).fold(DeviceFigures::default(), DeviceFigures::and)
    }
}
