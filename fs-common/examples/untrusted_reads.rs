//! How to serve clients that are not trusted with all frames, over an RNIC: by memory windows on the frames of their files, or by copies that the
//! server makes. docs/rdma.md has the figures and the conclusions.
//!
//! `CUTTLEFS_RDMA_ADDRESS=ADDRESS cargo run --release -p cuttlefs-common --features verbs --example untrusted_reads`
//!
//! Both ends run here, on the RNIC with that address. Each figure is the median of five rounds, with the least and the most of the five behind it. In
//! a round the measurements take turns, and each is a median of its own.

use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::soft::TcpSecurity;
use cuttlefs_common::rdma::verbs_provider::VerbsDevice;
use cuttlefs_common::rdma::{
    Access, Binding, Completion, CompletionKind, CompletionQueue, ConnectOptions, Device, Endpoint, Listener,
    MemoryRegion, MemoryWindow, ProtectionDomain, QpConfig, QueuePair, RecvWr, Remote, SendOp, SendWr, Sge,
    WcStatus, WrId,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const ROUNDS: usize = 5;
/// Measurements of one kind in a round.
const TIMES: usize = 200;
const RECONNECTS: usize = 5;
const PAGE: u32 = 4096;
/// Header of a reply.
const HEADER: u32 = 48;
/// Pages of a longer read, whose frames lie apart.
const PAGES: usize = 16;
/// Where in a memory requests, replies and pages lie. Frames lie apart, as they do in a server that has run for a while.
const REQUEST: u64 = 0;
const REPLY: u64 = 64 << 10;
const DATA: u64 = 256 << 10;
const FRAMES: u64 = 512 << 10;
const MEMORY: usize = 2 << 20;
const PATIENCE: Duration = Duration::from_secs(30);

const READ: Access = Access { remote_read: true, ..Access::NONE };

fn frame(index: usize) -> u64 {
    FRAMES + index as u64 * 2 * u64::from(PAGE)
}

struct End {
    cq: Arc<dyn CompletionQueue>,
    mr: Arc<dyn MemoryRegion>,
    pd: Arc<dyn ProtectionDomain>,
}

impl End {
    fn new(device: &dyn Device, access: Access) -> Self {
        let pd = device.alloc_pd().expect("a domain");
        let cq = device.create_cq(128).expect("a queue");
        let memory = Arc::new(SharedMemory::new("untrusted-reads", MEMORY).expect("memory"));
        let mr = pd.register(memory, access).expect("registered");
        Self { cq, mr, pd }
    }

    fn config(&self) -> QpConfig {
        QpConfig::new(&self.cq, 64, 16).inline(256)
    }

    fn receive(&self) -> RecvWr {
        RecvWr { wr_id: WrId(0), local: self.mr.sge(REPLY, 2 * PAGE).into() }
    }

    fn next(&self) -> Completion {
        let mut out = Vec::new();
        let deadline = Instant::now() + PATIENCE;
        loop {
            while self.cq.poll(&mut out, 1) == 0 {
                assert!(Instant::now() < deadline, "no completion came");
                self.cq.wait(Duration::from_secs(1));
            }
            match out.pop() {
                // A flushed request of a queue pair that was closed.
                Some(completion) if completion.status == WcStatus::Flushed => {}
                Some(completion) => return completion,
                None => {}
            }
        }
    }

    fn done(&self, count: usize) {
        for _ in 0..count {
            let completion = self.next();
            assert_eq!(completion.status, WcStatus::Success, "{completion:?}");
        }
    }
}

fn silent(op: SendOp, local: Sge) -> SendWr {
    SendWr { wr_id: WrId(0), op, local: local.into(), signaled: false }
}

/// Client and server, and their queue pairs.
struct Pair {
    client: End,
    server: End,
    listener: Box<dyn Listener>,
}

type Joined = (Arc<dyn QueuePair>, Arc<dyn QueuePair>);

impl Pair {
    fn new(address: &str) -> Self {
        let endpoint = Endpoint::Rdma { host: address.to_owned(), port: 0, via: None };
        let open = || VerbsDevice::to_listen(&endpoint, TcpSecurity::Insecure).expect("an RNIC");
        let (client_device, server_device) = (open(), open());
        assert!(server_device.capabilities().memory_windows, "this RNIC has no memory windows");
        let server = End::new(&*server_device, Access::LOCAL);
        let listener = server.pd.listen(&endpoint).expect("listening");
        Self { client: End::new(&*client_device, Access::ALL), server, listener }
    }

    fn join(&self) -> Joined {
        let (client, server) = (&self.client, &self.server);
        std::thread::scope(|scope| {
            let accepting = scope.spawn(|| {
                let incoming = self.listener.accept().expect("somebody");
                incoming.accept(server.config(), vec![server.receive()]).expect("accepted")
            });
            let receives = vec![client.receive()];
            let options = ConnectOptions { qp: client.config(), receives, timeout: PATIENCE };
            let connected = client.pd.connect(&self.listener.endpoint(), options).expect("connected");
            (connected.qp, accepting.join().expect("accepted"))
        })
    }

    fn binding(&self, offset: u64, len: u32) -> Binding {
        Binding { region: self.server.mr.clone(), offset, len: len.into(), access: READ }
    }
}

/// The median time of `times` runs, in microseconds.
fn median(times: usize, mut one: impl FnMut()) -> f64 {
    let mut all: Vec<f64> = (0..times)
        .map(|_| {
            let start = Instant::now();
            one();
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Binds windows to frames and invalidates them, with one wait for all binds and one for all invalidations.
fn bind_and_invalidate(pair: &Pair, windows: &[Arc<dyn MemoryWindow>]) {
    for (index, window) in windows.iter().enumerate() {
        window.bind(WrId(0), pair.binding(frame(index), PAGE)).expect("posted");
    }
    pair.server.done(windows.len());
    for window in windows {
        window.invalidate(WrId(0)).expect("posted");
    }
    pair.server.done(windows.len());
}

/// Reads as a reader that proves its bytes: table entries, bytes, entries again, with one doorbell.
fn read_by_windows(pair: &Pair, qp: &dyn QueuePair, entries: Remote, frames: &[Remote]) {
    let client = &pair.client;
    let entry = |at| SendWr { signaled: true, ..silent(SendOp::Read(entries), client.mr.sge(at, 8)) };
    let page = |(index, remote): (usize, &Remote)| SendWr {
        signaled: true,
        ..silent(SendOp::Read(*remote), client.mr.sge(DATA + index as u64 * u64::from(PAGE), PAGE))
    };
    let mut requests = vec![entry(REQUEST)];
    requests.extend(frames.iter().enumerate().map(page));
    requests.push(entry(REQUEST + 8));
    qp.post_send(&requests).expect("posted");
    client.done(requests.len());
}

/// Answers requests as the server answers fetches: the bytes of a short one lie in the reply, those of a longer one are written before it. The length
/// of the request is the number of pages.
fn serve(pair: &Pair, qp: &dyn QueuePair, stop: &AtomicBool) {
    let (server, memory) = (&pair.server, pair.server.mr.memory());
    let mut out = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        server.cq.wait(Duration::from_millis(20));
        server.cq.poll(&mut out, 16);
        for completion in out.drain(..).filter(|completion| completion.kind == CompletionKind::Recv) {
            if completion.status == WcStatus::Flushed {
                continue;
            }
            assert_eq!(completion.status, WcStatus::Success, "{completion:?}");
            let pages = (completion.byte_len / 64) as usize;
            let to = if pages == 1 { REPLY + 2 * u64::from(PAGE) + u64::from(HEADER) } else { DATA };
            for index in 0..pages {
                let at = to + index as u64 * u64::from(PAGE);
                memory.copy_to(frame(index) as usize, memory, at as usize, PAGE as usize);
            }
            qp.post_recv(&[server.receive()]).expect("posted");
            let len = PAGE * pages as u32;
            let reply = REPLY + 2 * u64::from(PAGE);
            if pages == 1 {
                qp.post_send(&[silent(SendOp::Send, server.mr.sge(reply, HEADER + len))]).expect("posted");
            } else {
                let data = Remote::Memory { rkey: pair.client.mr.rkey(), offset: DATA };
                let push = silent(SendOp::Write(data), server.mr.sge(to, len));
                qp.post_send(&[push, silent(SendOp::Send, server.mr.sge(reply, HEADER))]).expect("posted");
            }
        }
    }
}

fn ask(pair: &Pair, qp: &dyn QueuePair, pages: usize) {
    qp.post_send(&[silent(SendOp::Send, pair.client.mr.sge(REQUEST, 64 * pages as u32))]).expect("posted");
    pair.client.done(1);
    qp.post_recv(&[pair.client.receive()]).expect("posted");
}

/// A read through a window that is invalidated meanwhile breaks the queue pair, and the client connects again. (A mount also has to attach again,
/// which is not measured here.)
fn read_what_was_evicted(pair: &Pair) -> f64 {
    let mut times: Vec<f64> = (0..RECONNECTS)
        .map(|_| {
            let (client, server) = pair.join();
            let window = server.create_window().expect("a window");
            let rkey = window.bind(WrId(0), pair.binding(frame(0), PAGE)).expect("posted");
            window.invalidate(WrId(0)).expect("posted");
            pair.server.done(2);
            let start = Instant::now();
            let remote = Remote::Memory { rkey, offset: frame(0) };
            let read = silent(SendOp::Read(remote), pair.client.mr.sge(DATA, PAGE));
            client.post_send(&[read]).expect("posted");
            assert_eq!(pair.client.next().status, WcStatus::RemoteAccess);
            let again = pair.join();
            let time = start.elapsed().as_secs_f64() * 1e6;
            for end in [client, server, again.0, again.1] {
                end.close();
            }
            drop(window);
            drain(pair);
            time
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Takes the completions that closed queue pairs have left.
fn drain(pair: &Pair) {
    let mut out = Vec::new();
    for end in [&pair.client, &pair.server] {
        end.cq.wait(Duration::from_millis(20));
        while end.cq.poll(&mut out, 64) > 0 {}
    }
}

/// The rounds of one figure.
struct Figure {
    what: &'static str,
    rounds: Vec<f64>,
}

impl Figure {
    fn median(&self) -> f64 {
        let mut sorted = self.rounds.clone();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    }
}

fn main() {
    let address = std::env::var("CUTTLEFS_RDMA_ADDRESS")
        .expect("CUTTLEFS_RDMA_ADDRESS says which RNIC: an address of its interface");
    let pair = Pair::new(&address);
    let mut figures = [
        "bind and invalidate: 1 window",
        "bind and invalidate: 16 windows",
        "READs by windows: 1 page between its entries",
        "READs by windows: 16 pages between their entries",
        "RPC with copies: 1 page in the reply",
        "RPC with copies: 16 pages by WRITE, and the reply",
        "READ of an evicted page, and a new connection",
    ]
    .map(|what| Figure { what, rounds: Vec::new() });
    for _ in 0..ROUNDS {
        let (client_qp, server_qp) = pair.join();
        let (client, server) = (&*client_qp, &*server_qp);
        let windows: Vec<_> = (0..PAGES).map(|_| server.create_window().expect("a window")).collect();
        let mut measured = Vec::new();
        for count in [1, PAGES] {
            measured.push(median(TIMES, || bind_and_invalidate(&pair, &windows[..count])));
        }
        let entries = server.create_window().expect("a window");
        let open = |window: &Arc<dyn MemoryWindow>, offset, len| {
            let rkey = window.bind(WrId(0), pair.binding(offset, len)).expect("posted");
            pair.server.done(1);
            Remote::Memory { rkey, offset }
        };
        let entry = open(&entries, 4096, 8);
        let frames: Vec<_> =
            windows.iter().enumerate().map(|(index, window)| open(window, frame(index), PAGE)).collect();
        for count in [1, PAGES] {
            measured.push(median(TIMES, || read_by_windows(&pair, client, entry, &frames[..count])));
        }
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| serve(&pair, server, &stop));
            for count in [1, PAGES] {
                measured.push(median(TIMES, || ask(&pair, client, count)));
            }
            stop.store(true, Ordering::Relaxed);
        });
        for qp in [client, server] {
            qp.close();
        }
        drop((windows, entries));
        drain(&pair);
        measured.push(read_what_was_evicted(&pair));
        for (figure, time) in figures.iter_mut().zip(measured) {
            figure.rounds.push(time);
        }
    }
    for figure in &figures {
        let least = figure.rounds.iter().copied().fold(f64::INFINITY, f64::min);
        let most = figure.rounds.iter().copied().fold(0.0, f64::max);
        println!("{:52} {:9.1} us   ({least:.1} to {most:.1})", figure.what, figure.median());
    }
    let [bind, bind_many, read, read_many, rpc, rpc_many, evicted] = figures.each_ref().map(Figure::median);
    for (what, bind, read, rpc) in [("1 page", bind, read, rpc), ("16 pages", bind_many, read_many, rpc_many)]
    {
        println!("{what}: bind and invalidate / RPC {:.2}, READs / RPC {:.2}", bind / rpc, read / rpc);
        // The server's copies cost nothing for a page that nobody reads. A window costs its bind in any case.
        match rpc - read {
            gain if gain > 0.0 => println!("   a window pays from {:.1} reads by its client on", bind / gain),
            _ => println!("   a window never pays: READs take longer than the RPC"),
        }
    }
    println!("a READ that comes too late costs as much as {:.0} RPCs of 1 page", evicted / rpc);
}
