//! Two RNICs of one link, joined by a queue pair: the beginning of every test here.

use super::*;
use cuttlefs_common::cluster_key::{ClusterKey, ClusterKeys};
use cuttlefs_common::rdma::PeerIdentity;
use cuttlefs_common::rdma::sim::{self, SimNetwork, Translation};
use cuttlefs_common::world::SeededRandom;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// Client's and server's queue pair, and the windows the client got.
pub(super) type Joined = (Arc<dyn QueuePair>, Arc<dyn QueuePair>, Vec<Arc<SharedMemory>>);

/// The address of an RNIC's interface, where the suite runs over one.
#[cfg(feature = "verbs")]
pub(super) fn rdma_host() -> String {
    std::env::var("CUTTLEFS_RDMA_ADDRESS")
        .expect("CUTTLEFS_RDMA_ADDRESS says which RNIC: an address of its interface")
}

fn device(link: LinkKind) -> Arc<dyn Device> {
    let tcp = if KEYED.get() { TcpSecurity::Keys(keys()) } else { TcpSecurity::Loopback };
    match link {
        #[cfg(feature = "verbs")]
        LinkKind::Rdma => {
            let endpoint = Endpoint::Rdma { host: rdma_host(), port: 0, via: None };
            let trust = if KEYED.get() { tcp } else { TcpSecurity::Insecure };
            cuttlefs_common::rdma::verbs_provider::VerbsDevice::to_listen(&endpoint, trust).expect("an RNIC")
        }
        LinkKind::Sim => NETWORK.with_borrow(SimNetwork::device),
        _ => SoftDevice::new(SoftOptions { tcp, ..SoftOptions::default() }),
    }
}

thread_local! {
    /// Whether the RNICs that this thread makes have a key. With one, `tcp` is encrypted.
    static KEYED: Cell<bool> = const { Cell::new(false) };
    /// The network of this thread's simulated RNICs.
    static NETWORK: RefCell<Arc<SimNetwork>> = RefCell::new(SimNetwork::new(Translation::InitiatorByReads));
}

/// Runs a test over a simulated network whose targets translate file addresses.
pub(super) fn with_simulated_target(test: fn(LinkKind)) {
    NETWORK.replace(SimNetwork::new(Translation::Target));
    test(LinkKind::Sim);
}

pub(super) fn keys() -> ClusterKeys {
    let key = ClusterKey::generate("pair", &SeededRandom::new(1)).expect("a key");
    ClusterKeys::new(vec![key]).expect("keys")
}

/// Runs a test over a network's link, with keys.
pub(super) fn with_keys(link: LinkKind, test: fn(LinkKind)) {
    KEYED.set(true);
    test(link);
    KEYED.set(false);
}

/// What one of the two processes has.
pub(super) struct Half {
    pub(super) link: LinkKind,
    pub(super) device: Arc<dyn Device>,
    pub(super) pd: Arc<dyn ProtectionDomain>,
    pub(super) cq: Arc<dyn CompletionQueue>,
    pub(super) mr: Arc<dyn MemoryRegion>,
}

impl Half {
    pub(super) fn new(link: LinkKind, access: Access) -> Self {
        let device = device(link);
        let pd = device.alloc_pd().expect("a domain");
        let cq = device.create_cq(64).expect("cq");
        let memory = Arc::new(SharedMemory::new("half", MEMORY_LEN).expect("memory"));
        let mr = pd.register(memory, access).expect("register");
        Self { link, device, pd, cq, mr }
    }

    pub(super) fn config(&self, depth: u32) -> QpConfig {
        QpConfig::new(&self.cq, depth, depth)
    }

    pub(super) fn next(&self) -> Completion {
        next_of(&*self.cq)
    }

    pub(super) fn nothing(&self) {
        let mut out = Vec::new();
        self.cq.wait(Duration::from_millis(50));
        assert_eq!(self.cq.poll(&mut out, 1), 0, "{out:?}");
    }

    pub(super) fn put(&self, offset: u64, bytes: &[u8]) -> Sge {
        self.mr.memory().write(offset as usize, bytes);
        self.mr.sge(offset, bytes.len() as u32)
    }

    pub(super) fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.mr.memory().read(offset, &mut out);
        out
    }

    pub(super) fn receive(&self, id: u64, offset: u64, len: u32) -> RecvWr {
        RecvWr { wr_id: WrId(id), local: self.mr.sge(offset, len).into() }
    }

    pub(super) fn place(&self, offset: u64) -> Remote {
        Remote::Memory { rkey: self.mr.rkey(), offset }
    }
}

pub(super) fn next_of(cq: &dyn CompletionQueue) -> Completion {
    let deadline = Instant::now() + PATIENCE;
    let mut out = Vec::new();
    while cq.poll(&mut out, 1) == 0 {
        assert!(Instant::now() < deadline, "no completion came");
        cq.wait(Duration::from_secs(1));
    }
    out[0]
}

pub(super) fn send(id: u64, op: SendOp, local: impl Into<SgeList>) -> SendWr {
    SendWr { wr_id: WrId(id), op, local: local.into(), signaled: true }
}

pub(super) struct Pair {
    pub(super) client: Half,
    pub(super) server: Half,
    pub(super) client_qp: Option<Arc<dyn QueuePair>>,
    pub(super) server_qp: Option<Arc<dyn QueuePair>>,
    pub(super) listener: Arc<dyn Listener>,
    pub(super) _dir: tempfile::TempDir,
}

pub(super) fn endpoint(link: LinkKind, dir: &tempfile::TempDir) -> Endpoint {
    match link {
        LinkKind::Shm => Endpoint::Shm(dir.path().join("shm.sock")),
        LinkKind::Unix => Endpoint::Unix(dir.path().join("unix.sock")),
        #[cfg(feature = "verbs")]
        LinkKind::Rdma => Endpoint::Rdma { host: rdma_host(), port: 0, via: None },
        _ => Endpoint::Tcp { host: "127.0.0.1".into(), port: 0 },
    }
}

pub(super) fn options(half: &Half, depth: u32, receives: Vec<RecvWr>) -> ConnectOptions {
    ConnectOptions { qp: half.config(depth), receives, timeout: PATIENCE }
}

pub(super) fn join(
    client: &Half,
    server: &Half,
    listener: &Arc<dyn Listener>,
    depth: u32,
    receives: [Vec<RecvWr>; 2],
) -> Joined {
    join_as(client, listener, [client.config(depth), server.config(depth)], receives)
}

/// As [`join`], with queue pairs of these configurations.
pub(super) fn join_as(
    client: &Half,
    listener: &Arc<dyn Listener>,
    [client_config, server_config]: [QpConfig; 2],
    [client_receives, server_receives]: [Vec<RecvWr>; 2],
) -> Joined {
    let endpoint = listener.endpoint();
    let options = ConnectOptions { qp: client_config, receives: client_receives, timeout: PATIENCE };
    if client.link == LinkKind::Sim {
        // There is one thread, so the connecting side drives the accepting side.
        let accepted = Rc::new(RefCell::new(None));
        let (slot, listener) = (accepted.clone(), listener.clone());
        sim::set_pump(move || {
            let Ok(incoming) = listener.accept() else { return false };
            let accepted = incoming.accept(server_config.clone(), server_receives.clone());
            *slot.borrow_mut() = Some(accepted.expect("qp"));
            true
        });
        let connected = client.pd.connect(&endpoint, options).expect("connect");
        sim::clear_pump();
        let server_qp = accepted.borrow_mut().take().expect("accepted");
        return (connected.qp, server_qp, connected.windows);
    }
    std::thread::scope(|scope| {
        let accepting = scope
            .spawn(|| listener.accept().expect("accept").accept(server_config, server_receives).expect("qp"));
        let connected = client.pd.connect(&endpoint, options).expect("connect");
        (connected.qp, accepting.join().expect("thread"), connected.windows)
    })
}

impl Pair {
    pub(super) fn with(
        link: LinkKind,
        depth: u32,
        access: Access,
        first: impl FnOnce(&Half, &Half) -> [Vec<RecvWr>; 2],
    ) -> Self {
        Self::as_configured(link, access, |half| half.config(depth), first)
    }

    /// A pair whose queue pairs take several ranges a request.
    pub(super) fn gathering(link: LinkKind, max_sges: u32) -> Self {
        Self::as_configured(link, Access::ALL, |half| half.config(16).sges(max_sges), |_, _| [vec![], vec![]])
    }

    fn as_configured(
        link: LinkKind,
        access: Access,
        config: impl Fn(&Half) -> QpConfig,
        first: impl FnOnce(&Half, &Half) -> [Vec<RecvWr>; 2],
    ) -> Self {
        let dir = tempfile::tempdir().expect("dir");
        let (client, server) = (Half::new(link, Access::ALL), Half::new(link, access));
        let listener: Arc<dyn Listener> = Arc::from(server.pd.listen(&endpoint(link, &dir)).expect("listen"));
        let receives = first(&client, &server);
        let configs = [config(&client), config(&server)];
        let (client_qp, server_qp, _) = join_as(&client, &listener, configs, receives);
        assert_eq!((client_qp.link(), server_qp.link()), (link, link));
        let is_keyed = matches!(server_qp.peer(), PeerIdentity::Key { name, .. } if &*name == "pair");
        assert_eq!(is_keyed, KEYED.get(), "{}", server_qp.peer());
        Self { client, server, client_qp: Some(client_qp), server_qp: Some(server_qp), listener, _dir: dir }
    }

    pub(super) fn new(link: LinkKind) -> Self {
        Self::with(link, 16, Access::ALL, |_, _| [vec![], vec![]])
    }

    pub(super) fn c(&self) -> &dyn QueuePair {
        self.client_qp.as_deref().expect("open")
    }

    pub(super) fn s(&self) -> &dyn QueuePair {
        self.server_qp.as_deref().expect("open")
    }

    /// Waits until the server's queue pair is in error. Polls the server's side, since over some links it notices only so.
    pub(super) fn settle_server(&self) {
        let deadline = Instant::now() + PATIENCE;
        while self.s().state() != QpState::Error {
            assert!(Instant::now() < deadline);
            self.server.cq.wait(Duration::from_millis(20));
        }
    }
}

pub(super) fn ok(completion: Completion, id: u64, kind: CompletionKind, len: u32) {
    assert_eq!(
        (completion.wr_id, completion.kind, completion.status, completion.byte_len),
        (WrId(id), kind, WcStatus::Success, len),
        "{completion:?}"
    );
}

pub(super) fn bad(completion: Completion, id: u64, status: WcStatus) {
    assert_eq!((completion.wr_id, completion.status), (WrId(id), status), "{completion:?}");
}

impl Half {
    pub(super) fn post_and_forget(&self, qp: &dyn QueuePair) {
        qp.post_recv(&[self.receive(50, 70_000, 64)]).expect("receive");
    }
}
