//! Memory that may not be there, over every link that can have it (`docs/np-rdma.md`).
//!
//! * `links`: what accesses do, one after the other.
//! * `order`: the ordering bits.
//! * `races`: many initiators, and an owner that evicts all the time.
//! * `hostile`: peers, and owners, that break the protocol, or vanish.
//! * `hostile_walk`: arbitrary messages and one-sided requests beside a model, in one thread (`sandbox`, which the fuzz target `np_target` runs too).
//! * `walk`: random steps in one thread, with evictions between any two work requests (`stepped`).

mod hostile;
mod hostile_walk;
mod links;
mod order;
mod races;
mod sandbox;
mod stepped;
mod walk;

use cuttlefs_common::ids::PAGE_SIZE;
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::np::{
    MemoryBacking, NpCompletion, NpLocal, NpOp, NpOrder, NpPeer, NpRegion, NpServer, NpSettings, NpStatus,
    NpWr,
};
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions, TcpSecurity};
use cuttlefs_common::rdma::{Device, Endpoint, LinkKind, MemoryRegion, PagedAccess};
use cuttlefs_common::world::SeededRandom;
use std::sync::Arc;
use std::time::Duration;

const PAGE: u64 = PAGE_SIZE as u64;
const LINKS: [LinkKind; 3] = [LinkKind::Shm, LinkKind::Unix, LinkKind::Tcp];

/// The address of an RNIC's interface, where a test runs over one.
fn rdma_host() -> String {
    std::env::var("CUTTLEFS_RDMA_ADDRESS")
        .expect("CUTTLEFS_RDMA_ADDRESS says which RNIC: an address of its interface")
}

fn device() -> Arc<dyn Device> {
    SoftDevice::new(SoftOptions { tcp: TcpSecurity::Loopback, ..SoftOptions::default() })
}

fn endpoint(link: LinkKind, dir: &tempfile::TempDir) -> Endpoint {
    match link {
        LinkKind::Shm => Endpoint::Shm(dir.path().join("shm.sock")),
        LinkKind::Unix => Endpoint::Unix(dir.path().join("unix.sock")),
        LinkKind::Rdma => Endpoint::Rdma { host: rdma_host(), port: 0, via: None },
        _ => Endpoint::Tcp { host: "127.0.0.1".into(), port: 0 },
    }
}

/// A region of this many pages with the smallest number of frames, which is 32.
fn region(pages: u64) -> (Arc<NpRegion>, Arc<MemoryBacking>) {
    let backing = Arc::new(MemoryBacking::default());
    let region = NpRegion::new(pages, 32, backing.clone(), &SeededRandom::new(7)).expect("region");
    (region, backing)
}

/// A region that is served.
struct Served {
    region: Arc<NpRegion>,
    backing: Arc<MemoryBacking>,
    server: NpServer,
    _dir: tempfile::TempDir,
}

impl Served {
    fn new(link: LinkKind, pages: u64) -> Self {
        Self::with(link, pages, PagedAccess::ReadWrite)
    }

    fn with(link: LinkKind, pages: u64, access: PagedAccess) -> Self {
        Self::by(&device(), link, pages, access)
    }

    fn by(device: &Arc<dyn Device>, link: LinkKind, pages: u64, access: PagedAccess) -> Self {
        let dir = tempfile::tempdir().expect("dir");
        let (region, backing) = region(pages);
        let server = NpServer::start(device, region.clone(), access, &endpoint(link, &dir)).expect("served");
        Self { region, backing, server, _dir: dir }
    }

    fn settings() -> NpSettings {
        let long = Duration::from_secs(60);
        NpSettings { patience: long, connect_timeout: long, ..NpSettings::default() }
    }

    fn peer(&self) -> Peer {
        self.peer_with(Self::settings())
    }

    fn peer_with(&self, settings: NpSettings) -> Peer {
        self.peer_by(&device(), settings)
    }

    fn peer_by(&self, device: &Arc<dyn Device>, settings: NpSettings) -> Peer {
        Peer::new(NpPeer::connect(device, &self.server.endpoint(), settings).expect("connected"))
    }
}

/// An initiator and its memory.
struct Peer {
    peer: NpPeer,
    local: NpLocal,
    memory: Arc<SharedMemory>,
    next: u64,
}

const LOCAL_LEN: usize = 4 << 20;

impl Peer {
    fn new(mut peer: NpPeer) -> Self {
        let memory = Arc::new(SharedMemory::new("local", LOCAL_LEN).expect("memory"));
        let local = peer.register(memory.clone()).expect("registered");
        Self { peer, local, memory, next: 0 }
    }

    fn wr(&mut self, op: NpOp, offset: u64, at: u64, len: u32) -> NpWr {
        self.next += 1;
        let local = Some((self.local, at));
        NpWr { id: self.next, op, offset, local, len, order: NpOrder::RELAXED, signaled: true }
    }

    /// Posts a request and waits for its completion, the only one.
    fn run(&mut self, op: NpOp, offset: u64, len: u32) -> NpCompletion {
        let wr = self.wr(op, offset, 0, len);
        self.peer.post(wr).expect("posted");
        let done = self.peer.drain();
        assert_eq!((done.len(), done[0].id), (1, self.next));
        done[0]
    }

    fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        // What was there before must not be taken for what is read.
        self.memory.fill(0, len, 0xee);
        assert_eq!(self.run(NpOp::Read, offset, len as u32).status, NpStatus::Success);
        let mut out = vec![0; len];
        self.memory.read(0, &mut out);
        out
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) {
        self.memory.write(0, bytes);
        assert_eq!(self.run(NpOp::Write, offset, bytes.len() as u32).status, NpStatus::Success);
    }
}
