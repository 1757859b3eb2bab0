//! A node and its clients over the software RNIC.

use super::*;
use crate::cluster_key::{ClusterKey, ClusterKeys};
use crate::ids::PAGE_SIZE;
use crate::memory::SharedMemory;
use crate::rdma::soft::{SoftDevice, SoftOptions, TcpSecurity};
use crate::rdma::{
    Access, CompletionQueue, ConnectOptions, Device, Endpoint, MemoryRegion, QpConfig, QueuePair, RecvWr,
    Remote, SendOp, SendWr, WcStatus, WrId,
};
use crate::world::SeededRandom;
use std::sync::Arc;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

fn device() -> Arc<dyn Device> {
    SoftDevice::new(SoftOptions::default())
}

/// A device whose connections over `tcp` are encrypted.
fn keyed() -> Arc<dyn Device> {
    let key = ClusterKey::generate("pages", &SeededRandom::new(1)).expect("a key");
    let tcp = TcpSecurity::Keys(ClusterKeys::new(vec![key]).expect("keys"));
    SoftDevice::new(SoftOptions { tcp, ..SoftOptions::default() })
}

fn tcp() -> Endpoint {
    Endpoint::Tcp { host: "127.0.0.1".into(), port: 0 }
}

/// A node whose leases end in no test, however slow the machine is.
fn node(options: NodeOptions) -> MemoryNode {
    let options = NodeOptions { lease: Duration::from_secs(600), ..options };
    MemoryNode::start(&device(), &tcp(), options).expect("a node")
}

fn join(node: &MemoryNode, pages: u64) -> RemotePages {
    RemotePages::join(&device(), &node.endpoint(), JoinOptions { pages }).expect("a client")
}

fn bytes(page: u64, version: u64) -> Vec<u8> {
    (0..PAGE_SIZE as u64).map(|at| (at * 7 + page * 13 + version) as u8).collect()
}

fn loaded(client: &mut RemotePages, page: u64) -> Vec<u8> {
    let mut out = vec![0; PAGE_SIZE];
    client.load(page, &mut out).expect("a load");
    out
}

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn pages_come_back_and_the_nodes_threads_do_nothing() {
    let directory = tempfile::tempdir().expect("directory");
    let unix = Endpoint::Unix(directory.path().join("node.sock"));
    for (device, endpoint) in [(device(), tcp()), (device(), unix), (keyed(), tcp())] {
        let node =
            MemoryNode::start(&device, &endpoint, NodeOptions { lease: PATIENCE, ..NodeOptions::new(256) })
                .expect("a node");
        let mut client =
            RemotePages::join(&device, &node.endpoint(), JoinOptions { pages: 1000 }).expect("a client");
        let before = node.figures();
        for page in 0..200 {
            client.store(page * 5, &bytes(page, 0)).expect("an unmapped store");
        }
        for page in (0..200).step_by(3) {
            client.store(page * 5, &bytes(page, 1)).expect("a mapped store");
        }
        for page in 0..200 {
            assert!(loaded(&mut client, page * 5) == bytes(page, u64::from(page % 3 == 0)));
        }
        for page in 0..100 {
            client.invalidate(page * 5).expect("an invalidate");
        }
        let figures = node.figures();
        assert_eq!(figures.chains, [200, 67, 200, 100]);
        assert_eq!((figures.mapped, figures.free, client.stored()), (100, 156, 100));
        // Every page that is taken is in use: 100 %. The service thread has heard of beats at most.
        assert_eq!((figures.faults, figures.set_right), (0, before.set_right));
        // The last entry tells the client, and is counted behind that.
        wait_for("all entries are counted", || {
            node.figures().entries == 200 * 5 + 67 * 6 + 200 * 10 + 100 * 10
        });
    }
}

#[test]
fn a_node_of_one_user_turns_all_others_away() {
    let directory = tempfile::tempdir().expect("directory");
    let unix = Endpoint::Unix(directory.path().join("node.sock"));
    let own = rustix::process::geteuid().as_raw();
    let tried = |endpoint: &Endpoint, user| {
        let options = NodeOptions { only_user: Some(user), ..NodeOptions::new(16) };
        let node = MemoryNode::start(&device(), endpoint, options).expect("a node");
        RemotePages::join(&device(), &node.endpoint(), JoinOptions { pages: 16 })
            .map(|_| ())
            .map_err(|error| error.to_string())
    };
    assert_eq!(tried(&unix, own), Ok(()));
    // Over tcp nobody is known to be that user.
    for (endpoint, user) in [(unix, own + 1), (tcp(), own)] {
        let refused = tried(&endpoint, user).expect_err("somebody else's node");
        assert!(refused.contains("for another user's programs only"), "{refused}");
    }
}

#[test]
fn what_takes_a_connection_and_says_nothing_is_not_waited_for_long() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("bound");
    let port = silent.local_addr().expect("bound").port();
    let began = Instant::now();
    let joined = RemotePages::join(
        &device(),
        &Endpoint::Tcp { host: "127.0.0.1".into(), port },
        JoinOptions { pages: 1 },
    );
    let error = joined.err().expect("no node").to_string();
    assert!(error.contains("no answer in time"), "{error}");
    // As for a file server.
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

#[test]
fn operations_may_be_outstanding_together() {
    let node = node(NodeOptions::new(64));
    let mut client = join(&node, 64);
    let mut tickets = Vec::new();
    for page in 0..16 {
        tickets.push(client.begin_store(page, &bytes(page, 0)).expect("begun"));
    }
    assert!(matches!(client.begin_store(16, &[]), Err(RemoteError::Full)));
    assert!(matches!(client.begin_store(3, &[]), Err(RemoteError::Busy(3))));
    tickets.into_iter().rev().for_each(|ticket| client.finish(ticket).expect("done"));
    // Many laps of the queue.
    let mut next = 0u64;
    let mut seen = 0;
    while seen < 500 {
        while next < 500 && client.begin_load(next % 16).is_ok() {
            next += 1;
        }
        let done = client.finish_any().expect("no error").expect("some are outstanding");
        let mut out = vec![0; PAGE_SIZE];
        client.bytes(done.ticket, &mut out);
        assert!(out == bytes(done.page, 0));
        seen += 1;
    }
    assert!(client.finish_any().expect("no error").is_none());
}

#[test]
fn invalidations_go_out_together() {
    let node = node(NodeOptions::new(64));
    let mut client = join(&node, 64);
    for page in 0..40 {
        client.store(page, &bytes(page, 0)).expect("a store");
    }
    for page in 0..16 {
        client.begin_invalidate(page).expect("begun");
    }
    assert!(matches!(client.begin_invalidate(16), Err(RemoteError::Full)));
    assert!(matches!(client.load(3, &mut []), Err(RemoteError::Busy(3))));
    assert_eq!(node.figures().chains[Kind::Invalidate.index()], 0, "none was sent");
    // The others go on meanwhile, and a wait for one of them sends the invalidations.
    assert!(loaded(&mut client, 30) == bytes(30, 0));
    let mut done = Vec::new();
    while let Some(one) = client.finish_any().expect("no error") {
        done.push(one.page);
    }
    done.sort_unstable();
    assert!(done.iter().all(|page| *page < 16) && client.stored() == 24, "{done:?}");
    assert_eq!(node.figures().chains[Kind::Invalidate.index()], 16);
    assert_eq!((node.figures().mapped, node.figures().free), (24, 40));
    client.store(3, &bytes(3, 1)).expect("a store");
    assert!(loaded(&mut client, 3) == bytes(3, 1));
}

#[test]
fn what_is_not_there_is_refused_at_the_client() {
    let node = node(NodeOptions::new(8));
    let mut client = join(&node, 4);
    assert!(matches!(client.load(0, &mut []), Err(RemoteError::NotMapped(0))));
    assert!(matches!(client.invalidate(1), Err(RemoteError::NotMapped(1))));
    assert!(matches!(client.store(4, &[]), Err(RemoteError::NoPage { page: 4, pages: 4 })));
    client.store(0, b"short").expect("a store");
    assert_eq!(&loaded(&mut client, 0)[..7], b"short\0\0");
    let Err(error) = RemotePages::join(&device(), &node.endpoint(), JoinOptions { pages: 1 << 40 }) else {
        panic!("a swap space without end")
    };
    assert!(error.to_string().contains("ask for less"), "{error}");
}

#[test]
fn an_empty_node_says_so_and_goes_on() {
    let node = node(NodeOptions::new(8));
    let (mut first, mut second) = (join(&node, 64), join(&node, 64));
    for page in 0..6 {
        first.store(page, &bytes(page, 1)).expect("a store");
    }
    for page in 0..2 {
        second.store(page, &bytes(page, 2)).expect("a store");
    }
    for _ in 0..3 {
        let error = second.store(9, &[9]).expect_err("nothing is free");
        assert!(matches!(error, RemoteError::Empty), "{error}");
        assert!(!second.is_stored(9));
    }
    first.invalidate(0).expect("a page is free");
    second.store(9, &bytes(9, 2)).expect("there is a page");
    assert!(matches!(first.store(0, &[]), Err(RemoteError::Empty)));
    for page in 1..6 {
        assert!(loaded(&mut first, page) == bytes(page, 1));
    }
    for page in [0, 1, 9] {
        assert!(loaded(&mut second, page) == bytes(page, 2));
    }
    let figures = node.figures();
    assert_eq!((figures.mapped, figures.free, figures.faults, figures.set_right), (8, 0, 4, 4));
}

#[test]
fn the_pages_of_a_client_that_is_gone_are_free() {
    let node = node(NodeOptions::new(32));
    let mut stays = join(&node, 32);
    stays.store(3, &bytes(3, 3)).expect("a store");
    let mut goes = join(&node, 32);
    for page in 0..20 {
        goes.store(page, &bytes(page, 0)).expect("a store");
    }
    // Some are under way when it goes.
    for page in 20..25 {
        goes.begin_store(page, &bytes(page, 0)).expect("begun");
    }
    drop(goes);
    wait_for("its pages are taken back", || node.figures().clients == 1);
    let figures = node.figures();
    assert_eq!((figures.mapped, figures.free, figures.gone), (1, 31, 1));
    assert!(loaded(&mut stays, 3) == bytes(3, 3));
    for page in 0..31 {
        stays.store(if page < 3 { page } else { page + 1 }, &bytes(page, 4)).expect("all others are free");
    }
}

/// The client is there, and says nothing.
#[test]
fn a_silent_clients_lease_ends() {
    let options = NodeOptions { lease: Duration::from_millis(300), ..NodeOptions::new(8) };
    let node = MemoryNode::start(&device(), &tcp(), options).expect("a node");
    let hostile = Hostile::join(&node, 8);
    wait_for("its lease ends", || node.figures().gone == 1);
    assert_eq!(node.figures().clients, 0);
    drop(hostile);
}

#[test]
fn a_budget_is_kept_at_both_ends() {
    let node = node(NodeOptions { budget: 4, ..NodeOptions::new(32) });
    let mut client = join(&node, 32);
    for page in 0..4 {
        client.store(page, &[1]).expect("a store");
    }
    assert!(matches!(client.store(4, &[1]), Err(RemoteError::Budget(4))));
    client.invalidate(2).expect("an invalidate");
    client.store(4, &[1]).expect("the node has moved its bound");
    // One that does not count itself.
    let hostile = Hostile::join(&node, 32);
    let channel = hostile.attach(&node, Kind::UnmappedStore);
    for number in 0..8 {
        channel.send(Kind::UnmappedStore, number, number);
    }
    wait_for("four are done", || node.figures().mapped == 8);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(node.figures().mapped, 8, "and no more");
}

#[test]
fn shared_memory_has_no_rnic_that_executes_chains() {
    let directory = tempfile::tempdir().expect("directory");
    let endpoint = Endpoint::Shm(directory.path().join("node.sock"));
    let Err(error) = MemoryNode::start(&device(), &endpoint, NodeOptions::new(8)) else {
        panic!("it started over shm")
    };
    assert!(error.to_string().contains("tcp://"), "{error}");
}

/// A client that does as it likes.
struct Hostile {
    device: Arc<dyn Device>,
    control: Raw,
    token: u128,
}

/// A connection of its own, and registered memory.
struct Raw {
    qp: Arc<dyn QueuePair>,
    cq: Arc<dyn CompletionQueue>,
    mr: Arc<dyn MemoryRegion>,
}

impl Raw {
    fn connect(device: &Arc<dyn Device>, node: &MemoryNode) -> Self {
        let pd = device.alloc_pd().expect("pd");
        let cq = device.create_cq(256).expect("cq");
        let memory = Arc::new(SharedMemory::new("hostile", 64 << 10).expect("memory"));
        let mr = pd.register(memory, Access::ALL).expect("region");
        let options = ConnectOptions {
            qp: QpConfig::new(&cq, 64, 64),
            receives: vec![RecvWr { wr_id: WrId(1), local: mr.sge(8192, 4096).into() }],
            timeout: PATIENCE,
        };
        let qp = pd.connect(&node.endpoint(), options).expect("connected").qp;
        Self { qp, cq, mr }
    }

    fn post(&self, op: SendOp, bytes: &[u8]) {
        self.mr.memory().write(0, bytes);
        let request =
            SendWr { wr_id: WrId(5), op, local: self.mr.sge(0, bytes.len() as u32).into(), signaled: true };
        self.qp.post_send(&[request]).expect("posted");
    }

    fn ask(&self, question: &Question) -> Answer {
        self.post(SendOp::Send, &encode(question).expect("it fits"));
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut completions = Vec::new();
            self.cq.poll(&mut completions, 1);
            if let Some(completion) = completions.first().filter(|completion| completion.wr_id == WrId(1)) {
                assert_eq!(completion.status, WcStatus::Success);
                let mut bytes = vec![0; completion.byte_len as usize];
                self.mr.memory().read(8192, &mut bytes);
                return parse(&bytes).expect("an answer");
            }
            assert!(Instant::now() < deadline, "no answer");
            self.cq.wait(Duration::from_millis(50));
        }
    }

    fn send(&self, kind: Kind, number: u64, page: u64) {
        let shape = shape(kind);
        let mut message = vec![0; shape.len()];
        let arguments = Arguments { page, tag: 0, to: (self.mr.rkey().0, 16384) };
        put_message(kind, &shape, number, arguments, &mut message);
        self.post(SendOp::Send, &message);
    }

    /// The node ends the connection.
    fn ends(&self) {
        let deadline = Instant::now() + PATIENCE;
        while self.qp.state() != crate::rdma::QpState::Error {
            assert!(Instant::now() < deadline, "the connection goes on");
            self.cq.poll(&mut Vec::new(), 16);
            self.cq.wait(Duration::from_millis(20));
        }
    }
}

impl Hostile {
    fn join(node: &MemoryNode, pages: u64) -> Self {
        let device = device();
        let control = Raw::connect(&device, node);
        let Answer::Joined { token, .. } = control.ask(&Question::Join { pages }) else {
            panic!("not joined")
        };
        Self { device, control, token }
    }

    fn attach(&self, node: &MemoryNode, kind: Kind) -> Raw {
        let raw = Raw::connect(&self.device, node);
        assert_eq!(raw.ask(&Question::Attach { token: self.token, kind }), Answer::Attached);
        raw
    }
}

#[test]
fn hostile_clients_break_their_own_connections() {
    let node = node(NodeOptions::new(16));
    let mut honest = join(&node, 16);
    honest.store(2, &bytes(2, 7)).expect("a store");
    let hostile = Hostile::join(&node, 16);
    // One-sided requests of keys that may exist.
    for (op, len) in [
        (SendOp::Read(Remote::Memory { rkey: crate::ids::Rkey(1), offset: 0 }), 8),
        (SendOp::Write(Remote::Memory { rkey: crate::ids::Rkey(1), offset: 0 }), 8),
        (SendOp::FetchAdd { remote: Remote::Memory { rkey: crate::ids::Rkey(1), offset: 0 }, add: 8 }, 8),
    ] {
        let raw = hostile.attach(&node, Kind::Load);
        raw.post(op, &vec![0; len]);
        raw.ends();
    }
    // Entries that map nothing, or are outside, or would be the other client's.
    for kind in Kind::ALL {
        for page in [0u64, 16, 17, 512, 1 << 40, u64::MAX / 8] {
            if kind == Kind::UnmappedStore && page == 0 {
                continue;
            }
            let raw = hostile.attach(&node, kind);
            raw.send(kind, 0, page);
            raw.ends();
        }
    }
    assert!(
        matches!(hostile.control.ask_again(&Question::Why { kind: Kind::Load }), Answer::Broke { why: Why::Fault(text) } if text.contains("chain stopped"))
    );
    // A message that is too long, and one for a page in memory that the client has not.
    let raw = hostile.attach(&node, Kind::MappedStore);
    raw.post(SendOp::Send, &[0; 8000]);
    raw.ends();
    // Foreign words, and tokens of nobody.
    for first in [
        b"hello".to_vec(),
        vec![],
        encode(&Question::Attach { token: 1, kind: Kind::Load }).expect("it fits"),
    ] {
        let raw = Raw::connect(&hostile.device, &node);
        raw.post(SendOp::Send, &first);
        raw.ends();
    }
    assert!(loaded(&mut honest, 2) == bytes(2, 7));
    for page in 3..10 {
        honest.store(page, &bytes(page, 8)).expect("a store");
        assert!(loaded(&mut honest, page) == bytes(page, 8));
    }
    let figures = node.figures();
    assert_eq!((figures.mapped, figures.mapped + figures.free), (8, 16), "no page is lost");
}

impl Raw {
    /// As `ask`, once the first receive is used up.
    fn ask_again(&self, question: &Question) -> Answer {
        self.qp
            .post_recv(&[RecvWr { wr_id: WrId(1), local: self.mr.sge(8192, 4096).into() }])
            .expect("posted");
        self.ask(question)
    }
}

#[test]
fn clients_work_at_once_and_share_no_page() {
    let node = node(NodeOptions::new(96));
    std::thread::scope(|scope| {
        for number in 0..3u64 {
            let node = &node;
            scope.spawn(move || {
                let mut client = join(node, 40);
                let mut versions = vec![None; 40];
                for turn in 0..400u64 {
                    let page = (turn * 17 + number * 5) % 40;
                    match (versions[page as usize], turn % 4) {
                        (Some(_), 0) if client.stored() > 20 => {
                            client.invalidate(page).expect("an invalidate");
                            versions[page as usize] = None;
                        }
                        (Some(version), 1) => assert!(loaded(&mut client, page) == bytes(page, version)),
                        (None, _) if client.stored() >= 30 => {}
                        _ => {
                            let version = turn * 3 + number;
                            client.store(page, &bytes(page, version)).expect("a store");
                            versions[page as usize] = Some(version);
                        }
                    }
                }
                for (page, version) in versions.iter().enumerate() {
                    if let Some(version) = version {
                        assert!(loaded(&mut client, page as u64) == bytes(page as u64, *version));
                    }
                }
            });
        }
    });
    wait_for("all pages are free again", || node.figures().free == 96);
}
