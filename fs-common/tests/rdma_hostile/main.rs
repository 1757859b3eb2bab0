//! Peers that break the protocol of the software RNIC's links: their connections end, and nobody else's.
//!
//! * `packets`: packets, messages and answers that are not as the protocol has them.
//! * `held`: what is held for peers that do not read, say nothing, or come too fast.
//! * `strangers`: peers without the key, and somebody between the two ends.

macro_rules! with_and_without_keys {
    ($($name:ident),* $(,)?) => {
        mod plain { $(#[test] fn $name() { super::$name(super::Trust::Plain) })* }
        mod keyed { $(#[test] fn $name() { super::$name(super::Trust::Keyed) })* }
    };
}

mod held;
mod packets;
mod strangers;

use cuttlefs_common::cluster_key::{ClusterKey, ClusterKeys};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::persist::{Persistence, WhenPersistent};
use cuttlefs_common::rdma::soft::shm::wire::ShmMessage;
use cuttlefs_common::rdma::soft::tcp::KeyedStream;
use cuttlefs_common::rdma::soft::tcp::packet::{
    PACKET_HEADER_LEN, PacketHeader, PacketKind, build, header_checksum, hello_payload,
};
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions, TcpSecurity};
use cuttlefs_common::rdma::{
    Access, Completion, CompletionQueue, ConnectOptions, Device, Endpoint, Listener, MemoryRegion,
    ProtectionDomain, QpConfig, QpState, QueuePair, RdmaError, RecvWr, Remote, SendOp, SendWr, SgeList,
    WcStatus, WrId,
};
use cuttlefs_common::world::SeededRandom;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

struct Served {
    pd: Arc<dyn ProtectionDomain>,
    mr: Arc<dyn MemoryRegion>,
    listener: Arc<dyn Listener>,
    accepted: Receiver<Arc<dyn QueuePair>>,
    cq: Arc<dyn CompletionQueue>,
    device: Arc<SoftDevice>,
    trust: Trust,
}

/// How `tcp` is protected.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Trust {
    Plain,
    /// The key is known to the hostile peer, too.
    Keyed,
}

fn keys(seed: u64) -> ClusterKeys {
    let key = ClusterKey::generate("hostile", &SeededRandom::new(seed)).expect("a key");
    ClusterKeys::new(vec![key]).expect("keys")
}

fn serve(endpoint: &Endpoint, trust: Trust) -> Served {
    let tcp = if trust == Trust::Keyed { TcpSecurity::Keys(keys(1)) } else { TcpSecurity::Loopback };
    serve_with(endpoint, trust, SoftDevice::new(SoftOptions { tcp, ..SoftOptions::default() }))
}

fn serve_with(endpoint: &Endpoint, trust: Trust, device: Arc<SoftDevice>) -> Served {
    let pd = device.alloc_pd().expect("a domain");
    let cq = device.create_cq(16).expect("cq");
    let memory = Arc::new(SharedMemory::new("server", 65536).expect("memory"));
    memory.write(0, &[7; 8]);
    let mr = pd.register(memory, Access::ALL).expect("register");
    let listener: Arc<dyn Listener> = Arc::from(pd.listen(endpoint).expect("listen"));
    let (give, accepted) = channel();
    let (loop_listener, loop_cq, loop_mr) = (listener.clone(), cq.clone(), mr.clone());
    std::thread::spawn(move || {
        loop {
            let incoming = match loop_listener.accept() {
                Ok(incoming) => incoming,
                Err(RdmaError::Closed) => return,
                Err(error) => panic!("accept: {error}"),
            };
            let config = QpConfig::new(&loop_cq, 8, 8);
            let receive = RecvWr { wr_id: WrId(1), local: loop_mr.sge(4096, 64).into() };
            if let Ok(qp) = incoming.accept(config, vec![receive])
                && give.send(qp).is_err()
            {
                return;
            }
        }
    });
    Served { pd, mr, listener, accepted, cq, device, trust }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.listener.close();
    }
}

impl Served {
    fn connect(&self) -> Arc<dyn QueuePair> {
        let cq = self.device.create_cq(16).expect("cq");
        self.connect_with(&cq)
    }

    fn connect_with(&self, cq: &Arc<dyn CompletionQueue>) -> Arc<dyn QueuePair> {
        let qp = QpConfig::new(cq, 8, 8);
        let options = ConnectOptions { qp, receives: vec![], timeout: Duration::from_secs(10) };
        self.pd.connect(&self.listener.endpoint(), options).expect("connect").qp
    }

    fn accepted(&self) -> Arc<dyn QueuePair> {
        self.accepted.recv_timeout(Duration::from_secs(10)).expect("accepted")
    }
}

fn next(cq: &dyn CompletionQueue) -> Completion {
    let mut out = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(10);
    while cq.poll(&mut out, 1) == 0 {
        assert!(Instant::now() < deadline, "no completion");
        cq.wait(Duration::from_millis(200));
    }
    out[0]
}

fn tcp(trust: Trust) -> Served {
    serve(&Endpoint::Tcp { host: "127.0.0.1".into(), port: 0 }, trust)
}

/// A byte stream to a server, plain or encrypted.
enum Raw {
    Plain(TcpStream),
    Keyed(KeyedStream),
}

impl Raw {
    fn set_write_timeout(&mut self, timeout: Duration) {
        match self {
            Self::Plain(stream) => stream.set_write_timeout(Some(timeout)).expect("timeout"),
            Self::Keyed(stream) => stream.set_patience(timeout),
        }
    }
}

impl Read for Raw {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.read(into),
            Self::Keyed(stream) => stream.read(into),
        }
    }
}

impl Write for Raw {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.write(bytes),
            Self::Keyed(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        match self {
            Self::Plain(stream) => stream.flush(),
            Self::Keyed(stream) => stream.flush(),
        }
    }
}

fn raw(served: &Served) -> TcpStream {
    let Endpoint::Tcp { host, port } = served.listener.endpoint() else { panic!("tcp") };
    let stream = TcpStream::connect((host.as_str(), port)).expect("connect");
    stream.set_read_timeout(Some(Duration::from_secs(10))).expect("timeout");
    stream
}

/// A raw connection after its handshake, and the server's queue pair of it.
fn greeted(served: &Served) -> (Raw, Arc<dyn QueuePair>) {
    let stream = raw(served);
    let mut stream = match served.trust {
        Trust::Plain => Raw::Plain(stream),
        Trust::Keyed => {
            Raw::Keyed(KeyedStream::open(stream, &keys(1), Duration::from_secs(10)).expect("proven"))
        }
    };
    stream.write_all(&build(PacketHeader::new(PacketKind::Hello, 0), &hello_payload())).expect("hello");
    let mut welcome = vec![0; PACKET_HEADER_LEN + hello_payload().len()];
    stream.read_exact(&mut welcome).expect("welcome");
    assert_eq!(welcome, build(PacketHeader::new(PacketKind::Welcome, 0), &hello_payload()));
    (stream, served.accepted())
}

fn wait_for_error(qp: &dyn QueuePair) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while qp.state() != QpState::Error {
        assert!(Instant::now() < deadline, "the connection still stands");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn read(sequence: u64, rkey: u32, wanted: u32) -> PacketHeader {
    PacketHeader { key: rkey.into(), wanted, ..PacketHeader::new(PacketKind::ReadMemory, sequence) }
}

fn connect(endpoint: &Endpoint, tcp: TcpSecurity) -> Result<Peer, RdmaError> {
    let device = SoftDevice::new(SoftOptions { tcp, ..SoftOptions::default() });
    let (pd, cq) = (device.alloc_pd().expect("a domain"), device.create_cq(16).expect("cq"));
    let mr = pd.register(Arc::new(SharedMemory::new("peer", 4096).expect("memory")), Access::ALL)?;
    let qp = QpConfig::new(&cq, 8, 8).sges(3);
    let options = ConnectOptions { qp, receives: vec![], timeout: Duration::from_secs(10) };
    let qp = pd.connect(endpoint, options)?.qp;
    Ok(Peer { qp, cq, mr, _device: device })
}

struct Peer {
    qp: Arc<dyn QueuePair>,
    cq: Arc<dyn CompletionQueue>,
    mr: Arc<dyn MemoryRegion>,
    _device: Arc<SoftDevice>,
}
