//! Peers over an RNIC that break the protocol: their connections end, and nobody else's. Here the RNIC makes the packets, and a peer chooses its
//! requests and private data. (`rdma_hostile` tests the links of the software RNIC, where a peer can forge every byte.)
//!
//! All tests are ignored by default, since they need an RNIC: `scripts/vm/rdma-test.sh` runs them over one.

mod raw;

use cuttlefs_common::cluster_key::{ClusterKey, ClusterKeys};
use cuttlefs_common::ids::Rkey;
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::soft::TcpSecurity;
use cuttlefs_common::rdma::verbs_provider::VerbsDevice;
use cuttlefs_common::rdma::{
    Access, Completion, CompletionQueue, ConnectOptions, Device, Endpoint, Listener, MemoryRegion, QpConfig,
    QpState, QueuePair, RdmaError, RecvWr, Remote, SendOp, SendWr, Sge, WcStatus, WrId,
};
use cuttlefs_common::world::SeededRandom;
use raw::{Heard, RawPeer};
use ring::hmac;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// How long a test waits for something that must happen. A machine without KVM stands still for seconds.
const PATIENCE: Duration = Duration::from_secs(60);
const DEPTH: u32 = 8;
/// Bytes at the beginning of a server's memory that requests access; its receive buffers lie behind them.
const OPEN_BYTES: u64 = 1 << 20;
const RECEIVE_BYTES: u64 = 64;

fn host() -> String {
    std::env::var("CUTTLEFS_RDMA_ADDRESS")
        .expect("CUTTLEFS_RDMA_ADDRESS says which RNIC: an address of its interface")
}

fn keys(seed: u64) -> TcpSecurity {
    let key = ClusterKey::generate("hostile", &SeededRandom::new(seed)).expect("a key");
    TcpSecurity::Keys(ClusterKeys::new(vec![key]).expect("keys"))
}

/// The key of this seed, with a name of its own, so that its holders are a peer of their own.
fn key_of(seed: u64) -> ClusterKey {
    ClusterKey::generate(&format!("key-{seed}"), &SeededRandom::new(seed)).expect("a key")
}

fn keys_of(seeds: &[u64]) -> TcpSecurity {
    TcpSecurity::Keys(ClusterKeys::new(seeds.iter().map(|seed| key_of(*seed)).collect()).expect("keys"))
}

/// A server that accepts every client that its `TcpSecurity` lets in.
struct Served {
    device: Arc<VerbsDevice>,
    mr: Arc<dyn MemoryRegion>,
    cq: Arc<dyn CompletionQueue>,
    listener: Arc<dyn Listener>,
    accepted: Receiver<Arc<dyn QueuePair>>,
    endpoint: Endpoint,
}

impl Served {
    /// Posts this number of receives for each accepted client.
    fn new(trust: TcpSecurity, access: Access, receives: u64) -> Self {
        let device = VerbsDevice::to_listen(&Endpoint::Rdma { host: host(), port: 0, via: None }, trust)
            .expect("an RNIC");
        let pd = device.alloc_pd().expect("a domain");
        let cq = device.create_cq(16).expect("cq");
        let len = OPEN_BYTES + RECEIVE_BYTES * u64::from(DEPTH);
        let memory = Arc::new(SharedMemory::new("server", len as usize).expect("memory"));
        memory.write(0, &[7; 8]);
        let mr = pd.register(memory, access).expect("register");
        let listener: Arc<dyn Listener> =
            Arc::from(pd.listen(&Endpoint::Rdma { host: host(), port: 0, via: None }).expect("listen"));
        let (give, accepted) = channel();
        let endpoint = listener.endpoint();
        let (accepts, its_cq, its_mr) = (listener.clone(), cq.clone(), mr.clone());
        std::thread::spawn(move || {
            let receive = |index: u64| RecvWr {
                wr_id: WrId(index),
                local: its_mr.sge(OPEN_BYTES + index * RECEIVE_BYTES, RECEIVE_BYTES as u32).into(),
            };
            loop {
                let incoming = match accepts.accept() {
                    Ok(incoming) => incoming,
                    Err(RdmaError::Closed) => return,
                    Err(error) => panic!("accept: {error}"),
                };
                let config = QpConfig::new(&its_cq, DEPTH, DEPTH);
                // A client that has hung up meanwhile is no error.
                if let Ok(qp) = incoming.accept(config, (0..receives).map(receive).collect())
                    && give.send(qp).is_err()
                {
                    return;
                }
            }
        });
        Self { device, mr, cq, listener, accepted, endpoint }
    }

    fn address(&self) -> SocketAddrV4 {
        address_of(&self.endpoint)
    }

    fn accepted(&self) -> Arc<dyn QueuePair> {
        self.accepted.recv_timeout(PATIENCE).expect("accepted")
    }

    fn place(&self, offset: u64) -> Remote {
        Remote::Memory { rkey: self.mr.rkey(), offset }
    }

    /// A client that keeps to the protocol.
    fn guest(&self, trust: TcpSecurity) -> Guest {
        Guest::connect(&self.endpoint, trust).expect("connect")
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.listener.close();
    }
}

fn address_of(endpoint: &Endpoint) -> SocketAddrV4 {
    let Endpoint::Rdma { host, port, .. } = endpoint else { panic!("rdma") };
    SocketAddrV4::new(host.parse::<Ipv4Addr>().expect("an address"), *port)
}

/// A client and its memory.
struct Guest {
    cq: Arc<dyn CompletionQueue>,
    mr: Arc<dyn MemoryRegion>,
    qp: Arc<dyn QueuePair>,
}

impl Guest {
    fn connect(endpoint: &Endpoint, trust: TcpSecurity) -> Result<Self, RdmaError> {
        let device = VerbsDevice::to_connect(endpoint, trust)?;
        let (pd, cq) = (device.alloc_pd()?, device.create_cq(16)?);
        let memory = Arc::new(SharedMemory::new("guest", OPEN_BYTES as usize).expect("memory"));
        let mr = pd.register(memory, Access::ALL)?;
        let qp = QpConfig::new(&cq, DEPTH, DEPTH);
        let options = ConnectOptions { qp, receives: vec![], timeout: PATIENCE };
        let qp = pd.connect(endpoint, options)?.qp;
        Ok(Self { cq, mr, qp })
    }

    fn post(&self, op: SendOp, len: u32) {
        let request = SendWr { wr_id: WrId(1), op, local: self.mr.sge(0, len).into(), signaled: true };
        self.qp.post_send(&[request]).expect("post");
    }

    fn next(&self) -> Completion {
        next(&*self.cq)
    }

    /// Reads the sevens at the beginning of the server's memory.
    fn reads_sevens(&self, served: &Served) {
        self.mr.memory().write(0, &[0; 8]);
        self.post(SendOp::Read(served.place(0)), 8);
        assert_eq!(self.next().status, WcStatus::Success);
        let mut found = [0; 8];
        self.mr.memory().read(0, &mut found);
        assert_eq!(found, [7; 8]);
    }
}

fn next(cq: &dyn CompletionQueue) -> Completion {
    let deadline = Instant::now() + PATIENCE;
    let mut out = Vec::new();
    while cq.poll(&mut out, 1) == 0 {
        assert!(Instant::now() < deadline, "no completion");
        cq.wait(Duration::from_millis(200));
    }
    out[0]
}

/// Waits until the server's side of a connection breaks. Polls the server's queue meanwhile, as a worker does.
fn wait_for_error(served: &Served, qp: &dyn QueuePair) {
    let deadline = Instant::now() + PATIENCE;
    while qp.state() != QpState::Error {
        assert!(Instant::now() < deadline, "the connection still stands");
        served.cq.wait(Duration::from_millis(20));
        served.cq.poll(&mut Vec::new(), 16);
    }
}

fn head(magic: u32, version: u16, kind: u16) -> Vec<u8> {
    [&magic.to_le_bytes()[..], &version.to_le_bytes(), &kind.to_le_bytes()].concat()
}

const MAGIC: u32 = 0x6375_746c;

/// Private data that is no request of this protocol is refused with a reason, with and without keys.
fn foreign_words_are_refused(trust: TcpSecurity) {
    let served = Served::new(trust.clone(), Access::ALL, 0);
    let good = served.guest(trust);
    let _good_server = served.accepted();
    for (name, said, why) in [
        ("nothing", vec![], "no cuttlefs"),
        ("a byte", vec![0x6c], "no cuttlefs"),
        ("garbage", vec![0xa5; 56], "no cuttlefs"),
        ("another magic", [head(MAGIC ^ 1, 1, 0), vec![0; 48]].concat(), "no cuttlefs"),
        ("another version", [head(MAGIC, 9, 0), vec![0; 48]].concat(), "version 9"),
    ] {
        let peer = RawPeer::ask(served.address(), &said);
        let Heard::Refused(answer) = peer.hear() else { panic!("{name} was let in") };
        let words = String::from_utf8_lossy(&answer).into_owned();
        assert!(words.contains(why), "{name}: {words:?}");
        good.reads_sevens(&served);
    }
    assert!(served.accepted.try_recv().is_err(), "nobody else was let in");
}

fn foreign_words_without_keys() {
    foreign_words_are_refused(TcpSecurity::Insecure);
}

fn foreign_words_with_keys() {
    foreign_words_are_refused(keys(1));
}

/// Guessed proofs and fingerprints get a challenge or a refusal, and are never accepted.
fn proofs_that_are_guessed_let_nobody_in() {
    let served = Served::new(keys(1), Access::ALL, 0);
    let mut challenge = vec![0; 16];
    for turn in 0..20u8 {
        let said =
            [head(MAGIC, 1, 0), challenge.clone(), vec![turn; 16], vec![turn.wrapping_mul(3); 16]].concat();
        let Heard::Refused(answer) = RawPeer::ask(served.address(), &said).hear() else {
            panic!("a guess was believed")
        };
        // Later guesses echo the server's own challenge.
        if turn % 2 == 0 && answer.len() >= 24 {
            challenge = answer[8..24].to_vec();
        }
    }
    assert!(served.accepted.try_recv().is_err(), "nobody was let in");
    served.guest(keys(1)).reads_sevens(&served);
}

/// A client with another key or none is told what to do. A client with a key refuses a server that proves none.
fn who_has_not_the_key_is_told() {
    let (keyed, plain) =
        (Served::new(keys(1), Access::ALL, 0), Served::new(TcpSecurity::Insecure, Access::ALL, 0));
    for (served, trust, why) in [
        (&keyed, TcpSecurity::Insecure, "it wants a key"),
        (&keyed, keys(2), "none of this server's"),
        (&plain, keys(1), "has not proven"),
    ] {
        match Guest::connect(&served.endpoint, trust) {
            Err(error) => assert!(error.to_string().contains(why), "{error}"),
            Ok(_) => panic!("it should be: {why}"),
        }
    }
    assert_eq!(keyed.device.figures().refused, 2, "each once: a challenge is no refusal");
    keyed.guest(keys(1)).reads_sevens(&keyed);
}

/// Peers that ask to connect and never read the answer keep nobody out. When they go, the server drops their connections.
fn who_asks_and_does_not_listen_holds_nobody_up() {
    let served = Served::new(TcpSecurity::Insecure, Access::ALL, 0);
    let said = [head(MAGIC, 1, 0), vec![0; 48]].concat();
    let silent: Vec<_> = (0..12).map(|_| RawPeer::ask(served.address(), &said)).collect();
    let good = served.guest(TcpSecurity::Insecure);
    good.reads_sevens(&served);
    let mut theirs: Vec<_> = (0..13).map(|_| served.accepted()).collect();
    drop(silent);
    let deadline = Instant::now() + PATIENCE;
    while theirs.len() > 1 {
        assert!(Instant::now() < deadline, "{} connections are left", theirs.len());
        served.cq.wait(Duration::from_millis(20));
        theirs.retain(|qp| qp.state() != QpState::Error);
    }
    good.reads_sevens(&served);
}

/// Asks, proves the key, and hangs up: the answer to the second request is not waited for.
fn prove_and_go(address: SocketAddrV4, key: &ClusterKey) {
    let mac = |of: &[&[u8]]| {
        let secret = hmac::Key::new(hmac::HMAC_SHA256, &key.rdma_secret());
        hmac::sign(&secret, &of.concat()).as_ref()[..16].to_vec()
    };
    let first = RawPeer::ask(address, &[head(MAGIC, 1, 0), vec![0; 48]].concat());
    let Heard::Refused(answer) = first.hear() else { panic!("it was let in without a proof") };
    let challenge = answer[8..24].to_vec();
    let proof = mac(&[b"ask", &challenge]);
    let fingerprint = key.fingerprint_bytes().to_vec();
    drop(RawPeer::ask(address, &[head(MAGIC, 1, 0), challenge, proof, fingerprint].concat()));
}

/// A holder of one key asks again and again and hangs up at once. No queue pair is made for such a peer, and a holder of another key is next.
fn who_hangs_up_holds_nobody_up() {
    let endpoint = Endpoint::Rdma { host: host(), port: 0, via: None };
    let device = VerbsDevice::to_listen(&endpoint, keys_of(&[1, 2])).expect("an RNIC");
    let listener = device.alloc_pd().expect("a domain").listen(&endpoint).expect("listen");
    let endpoint = listener.endpoint();
    let hostile = key_of(2);
    // Nobody accepts meanwhile.
    (0..20).for_each(|_| prove_and_go(address_of(&endpoint), &hostile));
    std::thread::scope(|scope| {
        let honest = scope.spawn(|| Guest::connect(&endpoint, keys_of(&[1])));
        let cq = device.create_cq(16).expect("cq");
        let (mut before, mut accepted) = (0, None);
        while accepted.is_none() {
            let incoming = listener.accept().expect("a client");
            if incoming.peer().to_string().contains("key-2") {
                before += 1;
                continue;
            }
            accepted = Some(incoming.accept(QpConfig::new(&cq, DEPTH, DEPTH), vec![]).expect("accept"));
        }
        assert!(honest.join().expect("no panic").is_ok());
        // One may have hung up so late that the kernel has not heard of it, and one whose turn it was.
        assert!(before <= 2, "{before} that had hung up came first");
    });
}

/// The same without an end, while the server accepts.
fn who_hangs_up_again_and_again_holds_nobody_up() {
    let served = Served::new(keys_of(&[1, 2]), Access::ALL, 0);
    let (stop, asked) = (AtomicBool::new(false), AtomicUsize::new(0));
    let (address, stop, asked) = (served.address(), &stop, &asked);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(move || {
                let hostile = key_of(2);
                while !stop.load(Ordering::Relaxed) {
                    prove_and_go(address, &hostile);
                    asked.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            while asked.load(Ordering::Relaxed) < 60 {
                std::thread::sleep(Duration::from_millis(20));
            }
            for _ in 0..5 {
                served.guest(keys_of(&[1])).reads_sevens(&served);
            }
        }));
        stop.store(true, Ordering::Relaxed);
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
    });
}

/// The server notices that a peer is gone without a word, even when it sends that peer nothing.
fn who_falls_silent_is_missed() {
    let served = Served::new(TcpSecurity::Insecure, Access::ALL, 0);
    let said = [head(MAGIC, 1, 0), vec![0; 48]].concat();
    let mut peer = RawPeer::ask(served.address(), &said);
    assert!(matches!(peer.hear(), Heard::Accepted(_)));
    let its = served.accepted();
    assert_eq!(its.state(), QpState::ReadyToSend);
    peer.fall_silent();
    wait_for_error(&served, &*its);
    served.guest(TcpSecurity::Insecure).reads_sevens(&served);
}

/// The same of a queue pair whose last request was not signaled, and whose completions nobody polls: that of an idle lane.
fn who_falls_silent_is_missed_by_the_idle() {
    let served = Served::new(TcpSecurity::Insecure, Access::ALL, 0);
    let said = [head(MAGIC, 1, 0), vec![0; 48]].concat();
    let mut peer = RawPeer::ask(served.address(), &said);
    assert!(matches!(peer.hear(), Heard::Accepted(_)));
    let its = served.accepted();
    // No bytes need no key.
    let op = SendOp::Write(Remote::Memory { rkey: Rkey(0), offset: 0 });
    its.post_send(&[SendWr { wr_id: WrId(1), op, local: Sge::EMPTY.into(), signaled: false }]).expect("post");
    peer.fall_silent();
    let deadline = Instant::now() + PATIENCE;
    while its.state() != QpState::Error {
        assert!(Instant::now() < deadline, "the connection still stands");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Who asks for a connection says how often, and how long, the server's RNIC retransmits: 7 times is for ever with rdma_rxe, and 2^31 * 4 us
/// are two hours. Such a peer would hold a queue pair when it is gone.
fn who_wants_endless_retransmissions_is_not_let_in() {
    let served = Served::new(TcpSecurity::Insecure, Access::ALL, 0);
    let said = [head(MAGIC, 1, 0), vec![0; 48]].concat();
    let peer = RawPeer::ask_for_retries(served.address(), &said, 7, None);
    let Heard::Refused(answer) = peer.hear() else { panic!("it was let in") };
    let words = String::from_utf8_lossy(&answer).into_owned();
    assert!(words.contains("ask for 6 at most"), "{words:?}");
    RawPeer::ask_for_retries(served.address(), &said, 6, Some(31)).is_let_go();
    assert!(served.accepted.try_recv().is_err(), "nobody was let in");
    served.guest(TcpSecurity::Insecure).reads_sevens(&served);
}

/// Requests that the server's RNIC refuses end the connection of who sent them, and change nothing.
fn refused_requests_end_their_connection_only() {
    let readable = Access { local_write: true, remote_read: true, ..Access::NONE };
    let served = Served::new(TcpSecurity::Insecure, readable, 1);
    let good = served.guest(TcpSecurity::Insecure);
    let _good_server = served.accepted();
    let nowhere = |rkey, offset| Remote::Memory { rkey: Rkey(rkey), offset };
    let rkey = served.mr.rkey().0;
    // A region consists of whole pages, so its end lies behind the length that was asked for.
    let end = served.mr.memory().len() as u64;
    for (name, op, len) in [
        ("READ of no region", SendOp::Read(nowhere(rkey ^ 0x5500, 0)), 8),
        ("WRITE to no region", SendOp::Write(nowhere(0, 0)), 8),
        ("READ across the end", SendOp::Read(nowhere(rkey, end - 4)), 8),
        ("READ of a range that wraps", SendOp::Read(nowhere(rkey, u64::MAX - 3)), 8),
        ("WRITE without the right", SendOp::Write(nowhere(rkey, 0)), 8),
        ("WRITE with a word, without the right", SendOp::WriteImm(nowhere(rkey, 0), 1), 8),
        ("swap without the right", SendOp::CompareSwap { remote: nowhere(rkey, 0), expect: 0, swap: 1 }, 8),
        ("add without the right", SendOp::FetchAdd { remote: nowhere(rkey, 0), add: 1 }, 8),
        ("a message longer than its receive", SendOp::Send, 4096),
    ] {
        let hostile = served.guest(TcpSecurity::Insecure);
        let its = served.accepted();
        hostile.post(op, len);
        let status = hostile.next().status;
        // The specification has a code for each case. The test only asks that each request is refused.
        let is_refused =
            matches!(status, WcStatus::RemoteAccess | WcStatus::RemoteInvalid | WcStatus::RemoteOperation);
        assert!(is_refused, "{name}: {status:?}");
        wait_for_error(&served, &*its);
        assert_eq!(hostile.qp.state(), QpState::Error, "{name}");
        good.reads_sevens(&served);
    }
    assert_eq!(good.qp.state(), QpState::ReadyToSend);
}

/// The keys of memory that is registered for the server's own use, of a region of another domain, and of one that is gone, open nothing, though they are
/// no guesses. So what keeps a peer out is not that it does not know a key: RNICs count them up.
fn keys_of_what_is_not_for_peers_open_nothing() {
    let gone = Served::new(TcpSecurity::Insecure, Access::ALL, 0).mr.rkey();
    let another = Served::new(TcpSecurity::Insecure, Access::ALL, 0);
    let (local, open) = (Access::LOCAL, Access { local_write: true, remote_read: true, ..Access::NONE });
    let (closed, served) =
        (Served::new(TcpSecurity::Insecure, local, 0), Served::new(TcpSecurity::Insecure, open, 0));
    let good = served.guest(TcpSecurity::Insecure);
    let _good_server = served.accepted();
    for (name, at, key) in [
        ("its own memory", &closed, closed.mr.rkey()),
        ("memory of another domain", &served, another.mr.rkey()),
        ("memory that is gone", &served, gone),
        ("the next variant of a key", &served, Rkey(served.mr.rkey().0 ^ 1)),
        ("the next region's key", &served, Rkey(served.mr.rkey().0.wrapping_add(0x100))),
    ] {
        let place = Remote::Memory { rkey: key, offset: 0 };
        for op in [SendOp::Read(place), SendOp::Write(place)] {
            let hostile = at.guest(TcpSecurity::Insecure);
            let its = at.accepted();
            hostile.post(op, 8);
            let status = hostile.next().status;
            assert_eq!(status, WcStatus::RemoteAccess, "{name}: {op:?}");
            wait_for_error(at, &*its);
        }
        let mut found = [0; 8];
        closed.mr.memory().read(0, &mut found);
        assert_eq!(found, [7; 8], "{name}");
        good.reads_sevens(&served);
    }
}

/// Messages that find no receive wait at their sender. Other clients are served meanwhile, and the messages arrive in order when receives are posted.
fn messages_beyond_the_receives_are_held_back() {
    let served = Served::new(TcpSecurity::Insecure, Access::ALL, 1);
    let hostile = served.guest(TcpSecurity::Insecure);
    let its = served.accepted();
    let good = served.guest(TcpSecurity::Insecure);
    let _good_server = served.accepted();
    for number in 0..u64::from(DEPTH) {
        hostile.mr.memory().write(8 * number as usize, &number.to_le_bytes());
        let local = hostile.mr.sge(8 * number, 8);
        let message = SendWr { wr_id: WrId(number), op: SendOp::Send, local: local.into(), signaled: true };
        hostile.qp.post_send(&[message]).expect("post");
    }
    for _ in 0..20 {
        good.reads_sevens(&served);
    }
    assert_eq!((its.state(), hostile.qp.state()), (QpState::ReadyToSend, QpState::ReadyToSend));
    for number in 0..u64::from(DEPTH) {
        assert_eq!(next(&*served.cq).status, WcStatus::Success);
        let mut word = [0; 8];
        served.mr.memory().read(OPEN_BYTES as usize, &mut word);
        assert_eq!(u64::from_le_bytes(word), number);
        let local = served.mr.sge(OPEN_BYTES, RECEIVE_BYTES as u32);
        its.post_recv(&[RecvWr { wr_id: WrId(number), local: local.into() }]).expect("receive");
    }
}

/// Bytes that each READ of the flood reads.
const FLOOD_BYTES: u32 = 1 << 18;

/// Peers that keep as many large READs under way as they may do not starve other clients.
fn who_floods_with_reads_leaves_others_their_turn() {
    let served = Served::new(TcpSecurity::Insecure, Access::ALL, 0);
    let good = served.guest(TcpSecurity::Insecure);
    let hostile: Vec<_> = (0..3).map(|_| served.guest(TcpSecurity::Insecure)).collect();
    let stop = AtomicBool::new(false);
    let everything = SendOp::Read(served.place(0));
    std::thread::scope(|scope| {
        for peer in &hostile {
            let stop = &stop;
            scope.spawn(move || {
                for _ in 0..DEPTH {
                    peer.post(everything, FLOOD_BYTES);
                }
                while !stop.load(Ordering::Relaxed) {
                    assert_eq!(peer.next().status, WcStatus::Success);
                    peer.post(everything, FLOOD_BYTES);
                }
            });
        }
        for _ in 0..20 {
            good.reads_sevens(&served);
        }
        stop.store(true, Ordering::Relaxed);
    });
}

macro_rules! over_an_rnic {
    ($($name:ident),* $(,)?) => {
        mod rdma { $(#[test] #[ignore = "wants an RNIC"] fn $name() { super::$name() })* }
    };
}

over_an_rnic!(
    foreign_words_without_keys,
    foreign_words_with_keys,
    proofs_that_are_guessed_let_nobody_in,
    who_has_not_the_key_is_told,
    who_asks_and_does_not_listen_holds_nobody_up,
    who_hangs_up_holds_nobody_up,
    who_hangs_up_again_and_again_holds_nobody_up,
    who_falls_silent_is_missed,
    who_falls_silent_is_missed_by_the_idle,
    who_wants_endless_retransmissions_is_not_let_in,
    refused_requests_end_their_connection_only,
    keys_of_what_is_not_for_peers_open_nothing,
    messages_beyond_the_receives_are_held_back,
    who_floods_with_reads_leaves_others_their_turn,
);
