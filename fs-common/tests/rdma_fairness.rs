//! The NIC engine's time is divided among peers: a peer gets its part of the one-sided requests, whatever others send on however many connections.
//!
//! Requests are counted and not timed. The third peer, which sends its next request behind each that was executed, does that within the target, on the
//! engine's own thread: so the counts do not depend on how fast a loaded machine wakes threads.

use cuttlefs_common::ids::FileKey;
use cuttlefs_common::rdma::soft::tcp::packet::{
    PACKET_HEADER_LEN, PacketHeader, PacketKind, build, hello_payload,
};
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions};
use cuttlefs_common::rdma::{
    Device, Endpoint, FileRead, FileTarget, FileWrite, Listener, PeerIdentity, QpConfig, QueuePair,
    RegionOwner, WcStatus,
};
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddrV4, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);
/// The peers: two that flood the server, and one that does not. Each is an address.
const GREEDY: [u64; 2] = [1, 2];
const THIRD: u64 = 3;
/// Connections of each greedy peer.
const CONNECTIONS: usize = 8;
/// The time that the target takes for each request: more than all that the engine does around it.
const WORK: Duration = Duration::from_micros(20);
const SMALL: usize = 8;

/// One client's end of a connection, without an RNIC.
struct Raw {
    stream: TcpStream,
    sequence: u64,
}

impl Raw {
    fn packet(&mut self, bytes: &[u8], ack: bool) -> Vec<u8> {
        self.sequence += 1;
        let header = PacketHeader { key: 7, ack, ..PacketHeader::new(PacketKind::WriteFile, self.sequence) };
        build(header, bytes)
    }
}

/// A server, and what it accepted.
struct Served {
    _device: Arc<SoftDevice>,
    listener: Arc<dyn Listener>,
    accepted: std::sync::mpsc::Receiver<Arc<dyn QueuePair>>,
    kept: Vec<Arc<dyn QueuePair>>,
}

impl Served {
    fn new(target: Arc<dyn FileTarget>) -> Self {
        let device = SoftDevice::new(SoftOptions::default());
        device.set_file_target(target);
        let endpoint = Endpoint::Tcp { host: "127.0.0.1".into(), port: 0 };
        let listener: Arc<dyn Listener> =
            Arc::from(device.alloc_pd().expect("a domain").listen(&endpoint).expect("listen"));
        let (give, accepted) = std::sync::mpsc::channel();
        let (accepts, cq) = (listener.clone(), device.create_cq(16).expect("cq"));
        std::thread::spawn(move || {
            while let Ok(incoming) = accepts.accept() {
                let qp = incoming.accept(QpConfig::new(&cq, 4, 4), Vec::new()).expect("the handshake ends");
                if give.send(qp).is_err() {
                    return;
                }
            }
        });
        Self { _device: device, listener, accepted, kept: Vec::new() }
    }

    /// A connection of a peer, which may reach files.
    fn connect(&mut self, peer: u64) -> Raw {
        let Endpoint::Tcp { port, .. } = self.listener.endpoint() else { panic!("tcp") };
        let socket =
            rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None);
        let socket: OwnedFd = socket.expect("socket");
        let from = Ipv4Addr::new(127, 9, 0, peer as u8);
        rustix::net::bind(&socket, &SocketAddrV4::new(from, 0)).expect("bound");
        rustix::net::connect(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, port)).expect("connected");
        let mut stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        stream.set_nodelay(true).expect("a socket");
        let hello = build(PacketHeader::new(PacketKind::Hello, 0), &hello_payload());
        stream.write_all(&hello).expect("hello");
        stream.read_exact(&mut vec![0; PACKET_HEADER_LEN + hello_payload().len()]).expect("welcome");
        let qp = self.accepted.recv_timeout(PATIENCE).expect("accepted");
        let PeerIdentity::Remote(address) = qp.peer() else { panic!("an address") };
        assert_eq!(
            address.ip(),
            IpAddr::V4(from),
            "connections are accepted in the order in which they come"
        );
        qp.set_region_owner(RegionOwner(peer));
        self.kept.push(qp);
        Raw { stream, sequence: 0 }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.listener.close();
        self.kept.iter().for_each(|qp| qp.close());
    }
}

/// Takes some time for each WRITE and counts it. Behind each of the third peer's it sends that peer's next.
struct Counting {
    of_greedy: AtomicU64,
    of_third: AtomicU64,
    /// Greedy WRITEs at the end of the window.
    at_end: Mutex<Option<u64>>,
    ended: Condvar,
    window: u64,
    third: Mutex<Option<Raw>>,
}

impl Counting {
    fn new(window: u64) -> Arc<Self> {
        Arc::new(Self {
            of_greedy: AtomicU64::new(0),
            of_third: AtomicU64::new(0),
            at_end: Mutex::new(None),
            ended: Condvar::new(),
            window,
            third: Mutex::new(None),
        })
    }

    fn send_of_third(&self) {
        let mut third = self.third.lock().expect("no panic");
        let third = third.as_mut().expect("it has connected");
        let packet = third.packet(&[0; SMALL], true);
        third.stream.write_all(&packet).expect("sent");
    }

    /// Begins the window; returns how many WRITEs of greedy peers were executed in the time of the third one's `window`.
    fn wait(&self) -> u64 {
        self.of_greedy.store(0, Ordering::Relaxed);
        self.send_of_third();
        let ended = self.at_end.lock().expect("no panic");
        let (ended, late) =
            self.ended.wait_timeout_while(ended, PATIENCE, |ended| ended.is_none()).expect("no panic");
        let so_far = self.of_third.load(Ordering::Relaxed);
        assert!(!late.timed_out(), "{so_far} of {} of the third peer were executed", self.window);
        ended.expect("not late")
    }
}

impl FileTarget for Counting {
    fn read_file(&self, _: RegionOwner, _: FileKey, _: u64, _: &mut [u8]) -> Result<FileRead, WcStatus> {
        Err(WcStatus::RemoteInvalid)
    }

    fn write_file(&self, owner: RegionOwner, _: FileKey, _: u64, _: &[u8]) -> Result<FileWrite, WcStatus> {
        let began = Instant::now();
        while began.elapsed() < WORK {
            std::hint::spin_loop();
        }
        if owner.0 != THIRD {
            self.of_greedy.fetch_add(1, Ordering::Relaxed);
            return Ok(FileWrite::Done);
        }
        if self.of_third.fetch_add(1, Ordering::Relaxed) + 1 < self.window {
            self.send_of_third();
        } else {
            *self.at_end.lock().expect("no panic") = Some(self.of_greedy.load(Ordering::Relaxed));
            self.ended.notify_all();
        }
        Ok(FileWrite::Done)
    }

    fn read_bitmap(&self, _: RegionOwner, _: FileKey, _: u64, _: &mut [u8]) -> Result<(), WcStatus> {
        Err(WcStatus::RemoteInvalid)
    }
}

/// Fills the sockets of a peer with WRITEs, again and again.
fn flood(mut peers: Vec<Raw>, over: &AtomicBool) {
    // Packets that are sent in part.
    let mut left: Vec<Vec<u8>> = peers.iter().map(|_| Vec::new()).collect();
    peers.iter().for_each(|peer| peer.stream.set_nonblocking(true).expect("a socket"));
    while !over.load(Ordering::Relaxed) {
        let mut is_full = true;
        for (peer, left) in peers.iter_mut().zip(&mut left) {
            if left.is_empty() {
                *left = (0..256).flat_map(|_| peer.packet(&[0; SMALL], false)).collect();
            }
            if let Ok(sent) = peer.stream.write(left) {
                left.drain(..sent);
                is_full = false;
            }
        }
        if is_full {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// How many WRITEs of two peers with many connections are executed while a third one, with one connection, gets `window` of them.
fn flooded(window: u64) -> u64 {
    let target = Counting::new(window);
    let mut served = Served::new(target.clone());
    let greedy: Vec<Vec<Raw>> =
        GREEDY.iter().map(|peer| (0..CONNECTIONS).map(|_| served.connect(*peer)).collect()).collect();
    *target.third.lock().expect("no panic") = Some(served.connect(THIRD));
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for peers in greedy {
            scope.spawn(|| flood(peers, &over));
        }
        // Until the flood has come.
        let began = Instant::now();
        while target.of_greedy.load(Ordering::Relaxed) < 100 {
            assert!(began.elapsed() < PATIENCE, "no flood");
            std::thread::sleep(Duration::from_millis(1));
        }
        let counted = target.wait();
        over.store(true, Ordering::Relaxed);
        counted
    })
}

#[test]
fn a_third_peer_gets_its_part_of_small_requests() {
    const WINDOW: u64 = 2_000;
    let others = flooded(WINDOW);
    println!("{WINDOW} of the third peer, {others} of the two others");
    // A third of all would be 2 of the others for each; half of a third is 5.
    assert!(others <= 5 * WINDOW, "{WINDOW} of the third peer, {others} of the two others");
}

/// Faults wait until the test lets them go. Notes whose fault begins.
#[derive(Default)]
struct Gate {
    /// Owners of the faults that have begun, in order; and how many may end.
    state: Mutex<(Vec<u64>, usize)>,
    moved: Condvar,
    /// Requests that the engine has seen.
    seen: AtomicUsize,
}

impl Gate {
    fn wait_for(&self, begun: usize) -> Vec<u64> {
        let state = self.state.lock().expect("no panic");
        let (state, late) = self
            .moved
            .wait_timeout_while(state, PATIENCE, |(owners, _)| owners.len() < begun)
            .expect("no panic");
        assert!(!late.timed_out(), "{} of {begun} faults have begun", state.0.len());
        state.0.clone()
    }

    fn let_go(&self, count: usize) {
        self.state.lock().expect("no panic").1 += count;
        self.moved.notify_all();
    }

    fn wait_until_seen(&self, count: usize) {
        let began = Instant::now();
        while self.seen.load(Ordering::Relaxed) < count {
            assert!(
                began.elapsed() < PATIENCE,
                "{} of {count} requests came",
                self.seen.load(Ordering::Relaxed)
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Opens the gate when the test ends, also by a failure: a server that ends waits for its faults.
struct Opens(Arc<Gate>);

impl Drop for Opens {
    fn drop(&mut self) {
        if let Ok(mut state) = self.0.state.lock() {
            state.1 = usize::MAX / 2;
        }
        self.0.moved.notify_all();
    }
}

impl FileTarget for Gate {
    fn read_file(&self, _: RegionOwner, _: FileKey, _: u64, _: &mut [u8]) -> Result<FileRead, WcStatus> {
        Err(WcStatus::RemoteInvalid)
    }

    fn write_file(&self, _: RegionOwner, _: FileKey, _: u64, bytes: &[u8]) -> Result<FileWrite, WcStatus> {
        self.seen.fetch_add(1, Ordering::Relaxed);
        // An empty one only tells that the engine has come so far.
        Ok(if bytes.is_empty() { FileWrite::Done } else { FileWrite::Faults })
    }

    fn write_file_faulting(&self, owner: RegionOwner, _: FileKey, _: u64, _: &[u8]) -> Result<(), WcStatus> {
        let mut state = self.state.lock().expect("no panic");
        state.0.push(owner.0);
        self.moved.notify_all();
        while state.1 == 0 {
            state = self.moved.wait(state).expect("no panic");
        }
        state.1 -= 1;
        Ok(())
    }

    fn read_bitmap(&self, _: RegionOwner, _: FileKey, _: u64, _: &mut [u8]) -> Result<(), WcStatus> {
        Err(WcStatus::RemoteInvalid)
    }
}

#[test]
fn a_fault_waits_for_a_thread_and_not_for_all_faults_of_others() {
    /// Threads for faults (`faults.rs`), and queue pairs that wait for one.
    const THREADS: usize = 64;
    const WAITING: usize = 20;
    const SOON: usize = 5;
    let gate = Arc::new(Gate::default());
    let mut served = Served::new(gate.clone());
    let _opens = Opens(gate.clone());
    let mut raws = Vec::new();
    for number in 0..THREADS + WAITING {
        let mut raw = served.connect(GREEDY[number % 2]);
        let packet = raw.packet(&[0; SMALL], true);
        raw.stream.write_all(&packet).expect("sent");
        raws.push(raw);
    }
    gate.wait_until_seen(THREADS + WAITING);
    gate.wait_for(THREADS);
    for (peer, len) in [(THIRD, SMALL), (THIRD + 1, 0)] {
        let seen = gate.seen.load(Ordering::Relaxed);
        let mut raw = served.connect(peer);
        let packet = raw.packet(&vec![0; len], true);
        raw.stream.write_all(&packet).expect("sent");
        // The engine is one thread: when it has seen the second of these, the first one waits for a thread.
        gate.wait_until_seen(seen + 1);
        raws.push(raw);
    }
    // Perhaps one or two of each other peer come first, which has had fewer than the other so far.
    gate.let_go(SOON);
    let begun = gate.wait_for(THREADS + SOON);
    assert!(begun[THREADS..].contains(&THIRD), "not one of the next {SOON} of {WAITING}: {begun:?}");
    gate.let_go(THREADS + WAITING);
    gate.wait_for(THREADS + WAITING + 1);
}
