//! A memory node and its clients, over every link: by the RNIC's chains over `tcp` and `unix`, by the node's processor over `shm` and hardware.
//!
//! The tests over an RNIC (feature `verbs`) are ignored by default. The environment variable `CUTTLEFS_RDMA_ADDRESS` names it by an address of its interface.

mod hostile;

use cuttlefs_common::cluster_key::{ClusterKey, ClusterKeys};
use cuttlefs_common::ids::{PAGE_SIZE, Rkey};
use cuttlefs_common::odrp::{
    Answer, JoinOptions, Kind, MemoryNode, NodeOptions, Question, RemoteError, RemotePages, Why, encode,
};
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions, TcpSecurity};
use cuttlefs_common::rdma::{Device, Endpoint, Remote, SendOp};
use cuttlefs_common::world::SeededRandom;
use hostile::Hostile;
use std::sync::Arc;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

/// A link, and where nodes listen on it.
struct Link {
    device: Arc<dyn Device>,
    endpoint: Endpoint,
    /// The socket's.
    _directory: Option<tempfile::TempDir>,
}

impl Link {
    fn soft(endpoint: Endpoint) -> Self {
        Self { device: SoftDevice::new(SoftOptions::default()), endpoint, _directory: None }
    }

    fn tcp() -> Self {
        Self::soft(Endpoint::Tcp { host: "127.0.0.1".into(), port: 0 })
    }

    /// `tcp`, encrypted.
    fn keys() -> Self {
        let key = ClusterKey::generate("pages", &SeededRandom::new(1)).expect("a key");
        let tcp = TcpSecurity::Keys(ClusterKeys::new(vec![key]).expect("keys"));
        Self { device: SoftDevice::new(SoftOptions { tcp, ..SoftOptions::default() }), ..Self::tcp() }
    }

    fn at_socket(endpoint: impl FnOnce(std::path::PathBuf) -> Endpoint) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let endpoint = endpoint(directory.path().join("node.sock"));
        Self { _directory: Some(directory), ..Self::soft(endpoint) }
    }

    fn unix() -> Self {
        Self::at_socket(Endpoint::Unix)
    }

    fn shm() -> Self {
        Self::at_socket(Endpoint::Shm)
    }

    #[cfg(feature = "verbs")]
    fn rdma() -> Self {
        let host = std::env::var("CUTTLEFS_RDMA_ADDRESS")
            .expect("CUTTLEFS_RDMA_ADDRESS says which RNIC: an address of its interface");
        let endpoint = Endpoint::Rdma { host, port: 0, via: None };
        let device =
            cuttlefs_common::rdma::verbs_provider::VerbsDevice::to_listen(&endpoint, TcpSecurity::Insecure);
        Self { device: device.expect("an RNIC"), endpoint, _directory: None }
    }

    /// A node whose leases end in no test, however slow the machine is.
    fn node(&self, options: NodeOptions) -> MemoryNode {
        self.hasty_node(NodeOptions { lease: Duration::from_secs(600), ..options })
    }

    fn hasty_node(&self, options: NodeOptions) -> MemoryNode {
        MemoryNode::start(&self.device, &self.endpoint, options).expect("a node")
    }

    fn join(&self, node: &MemoryNode, pages: u64) -> RemotePages {
        self.joined(node, pages).expect("a client")
    }

    fn joined(&self, node: &MemoryNode, pages: u64) -> Result<RemotePages, RemoteError> {
        RemotePages::join(&self.device, &node.endpoint(), JoinOptions { pages })
    }
}

/// Makes each function a test over each link.
macro_rules! over_each_link {
    ($($name:ident),* $(,)?) => {
        mod tcp { $(#[test] fn $name() { super::$name(&super::Link::tcp()) })* }
        mod keys { $(#[test] fn $name() { super::$name(&super::Link::keys()) })* }
        mod unix { $(#[test] fn $name() { super::$name(&super::Link::unix()) })* }
        mod shm { $(#[test] fn $name() { super::$name(&super::Link::shm()) })* }
        #[cfg(feature = "verbs")]
        mod rdma { $(#[test] #[ignore = "wants an RNIC"] fn $name() { super::$name(&super::Link::rdma()) })* }
    };
}

over_each_link!(
    pages_come_back,
    operations_may_be_outstanding_together,
    invalidations_go_out_together,
    what_is_not_there_is_refused_at_the_client,
    an_empty_node_says_so_and_goes_on,
    the_pages_of_a_client_that_is_gone_are_free,
    a_silent_clients_lease_ends,
    a_budget_is_kept_at_both_ends,
    hostile_clients_break_their_own_connections,
    clients_work_at_once_and_share_no_page,
);

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

fn pages_come_back(link: &Link) {
    let node = link.node(NodeOptions::new(256));
    let mut client = link.join(&node, 1000);
    let before = node.figures();
    let has_rnic = matches!(link.endpoint, Endpoint::Tcp { .. } | Endpoint::Unix(_));
    assert_eq!(before.by_processor, !has_rnic);
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
    // Every page that is taken is in use: 100 %.
    assert_eq!((figures.faults, figures.set_right), (0, before.set_right));
    // The last entry tells the client, and is counted behind that.
    wait_for("all entries are counted", || node.figures().entries == 200 * 5 + 67 * 6 + 200 * 10 + 100 * 10);
}

#[test]
fn a_node_of_one_user_turns_all_others_away() {
    let own = rustix::process::geteuid().as_raw();
    let tried = |link: &Link, user| {
        let node = link.node(NodeOptions { only_user: Some(user), ..NodeOptions::new(16) });
        link.joined(&node, 16).map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(tried(&Link::unix(), own), Ok(()));
    assert_eq!(tried(&Link::shm(), own), Ok(()));
    // Over tcp nobody is known to be that user.
    for (link, user) in [(Link::unix(), own + 1), (Link::shm(), own + 1), (Link::tcp(), own)] {
        let refused = tried(&link, user).expect_err("somebody else's node");
        assert!(refused.contains("for another user's programs only"), "{refused}");
    }
}

#[test]
fn what_takes_a_connection_and_says_nothing_is_not_waited_for_long() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("bound");
    let port = silent.local_addr().expect("bound").port();
    let began = Instant::now();
    let at = Endpoint::Tcp { host: "127.0.0.1".into(), port };
    let joined = RemotePages::join(&Link::tcp().device, &at, JoinOptions { pages: 1 });
    let error = joined.err().expect("no node").to_string();
    assert!(error.contains("no answer in time"), "{error}");
    // As for a file server.
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

fn operations_may_be_outstanding_together(link: &Link) {
    let node = link.node(NodeOptions::new(64));
    let mut client = link.join(&node, 64);
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

fn invalidations_go_out_together(link: &Link) {
    let node = link.node(NodeOptions::new(64));
    let mut client = link.join(&node, 64);
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

fn what_is_not_there_is_refused_at_the_client(link: &Link) {
    let node = link.node(NodeOptions::new(8));
    let mut client = link.join(&node, 4);
    assert!(matches!(client.load(0, &mut []), Err(RemoteError::NotMapped(0))));
    assert!(matches!(client.invalidate(1), Err(RemoteError::NotMapped(1))));
    assert!(matches!(client.store(4, &[]), Err(RemoteError::NoPage { page: 4, pages: 4 })));
    client.store(0, b"short").expect("a store");
    assert_eq!(&loaded(&mut client, 0)[..7], b"short\0\0");
    let error = link.joined(&node, 1 << 40).err().expect("a swap space without end");
    assert!(error.to_string().contains("ask for less"), "{error}");
}

fn an_empty_node_says_so_and_goes_on(link: &Link) {
    let node = link.node(NodeOptions::new(8));
    let (mut first, mut second) = (link.join(&node, 64), link.join(&node, 64));
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

fn the_pages_of_a_client_that_is_gone_are_free(link: &Link) {
    let node = link.node(NodeOptions::new(32));
    let mut stays = link.join(&node, 32);
    stays.store(3, &bytes(3, 3)).expect("a store");
    let mut goes = link.join(&node, 32);
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
fn a_silent_clients_lease_ends(link: &Link) {
    let options = NodeOptions { lease: Duration::from_millis(300), ..NodeOptions::new(8) };
    let node = link.hasty_node(options);
    let hostile = Hostile::join(link, &node, 8);
    wait_for("its lease ends", || node.figures().gone == 1);
    assert_eq!(node.figures().clients, 0);
    drop(hostile);
}

fn a_budget_is_kept_at_both_ends(link: &Link) {
    let node = link.node(NodeOptions { budget: 4, ..NodeOptions::new(32) });
    let mut client = link.join(&node, 32);
    for page in 0..4 {
        client.store(page, &[1]).expect("a store");
    }
    assert!(matches!(client.store(4, &[1]), Err(RemoteError::Budget(4))));
    client.invalidate(2).expect("an invalidate");
    client.store(4, &[1]).expect("the node has moved its bound");
    // One that does not count itself.
    let hostile = Hostile::join(link, &node, 32);
    let channel = hostile.attach(&node, Kind::UnmappedStore);
    for number in 0..8 {
        channel.send(Kind::UnmappedStore, number, number);
    }
    wait_for("four are done", || node.figures().mapped == 8);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(node.figures().mapped, 8, "and no more");
}

fn clients_work_at_once_and_share_no_page(link: &Link) {
    let node = link.node(NodeOptions::new(96));
    std::thread::scope(|scope| {
        for number in 0..3u64 {
            let node = &node;
            scope.spawn(move || {
                let mut client = link.join(node, 40);
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

fn hostile_clients_break_their_own_connections(link: &Link) {
    let node = link.node(NodeOptions::new(16));
    let mut honest = link.join(&node, 16);
    honest.store(2, &bytes(2, 7)).expect("a store");
    let hostile = Hostile::join(link, &node, 16);
    // One-sided requests of keys that may exist.
    for (op, len) in [
        (SendOp::Read(Remote::Memory { rkey: Rkey(1), offset: 0 }), 8),
        (SendOp::Write(Remote::Memory { rkey: Rkey(1), offset: 0 }), 8),
        (SendOp::FetchAdd { remote: Remote::Memory { rkey: Rkey(1), offset: 0 }, add: 8 }, 8),
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
        let raw = hostile.connect(&node);
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
