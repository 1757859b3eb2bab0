//! Latencies of the software RNIC, beside the best that the machine can do.
//!
//! `cargo run --release -p cuttlefs-common --example rdma_bench [LINK,...]`: shm, tcp, tcp+tls, unix; without a LINK all of them

use cuttlefs_common::cluster_key::{ClusterKey, ClusterKeys};
use cuttlefs_common::ids::FileKey;
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions, TcpSecurity};
use cuttlefs_common::rdma::{
    Access, Completion, CompletionQueue, ConnectOptions, Device, Endpoint, FileRead, FileTarget,
    MemoryRegion, QpConfig, QueuePair, RecvWr, RegionOwner, Remote, SendOp, SendWr, WcStatus, WrId,
};
use cuttlefs_common::world::SystemRandom;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const ROUNDS: u32 = 20_000;

struct Zeros;

impl FileTarget for Zeros {
    fn read_file(&self, _: RegionOwner, _: FileKey, _: u64, out: &mut [u8]) -> Result<FileRead, WcStatus> {
        out.fill(0);
        Ok(FileRead::Done(out.len()))
    }

    fn read_bitmap(&self, _: RegionOwner, _: FileKey, _: u64, _: &mut [u8]) -> Result<(), WcStatus> {
        Ok(())
    }
}

struct Half {
    cq: Arc<dyn CompletionQueue>,
    mr: Arc<dyn MemoryRegion>,
    qp: Arc<dyn QueuePair>,
}

/// Takes one completion. With `sleepy` it sleeps until there is one, else it polls.
fn next(cq: &dyn CompletionQueue, out: &mut Vec<Completion>, sleepy: bool) -> bool {
    let start = Instant::now();
    while cq.poll(out, 1) == 0 {
        if start.elapsed() > Duration::from_secs(1) {
            return false;
        }
        if sleepy {
            cq.wait(Duration::from_secs(1));
        } else {
            std::hint::spin_loop();
        }
    }
    let completion = out.pop().expect("one came");
    assert_eq!(completion.status, WcStatus::Success);
    true
}

fn report(name: &str, times: &mut [u64]) {
    times.sort_unstable();
    let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize] as f64 / 1000.0;
    println!("{name:44} median {:8.2} us   p99 {:8.2} us", at(0.5), at(0.99));
}

fn measure(name: &str, rounds: u32, mut one: impl FnMut()) {
    let mut times: Vec<u64> = (0..rounds)
        .map(|_| {
            let start = Instant::now();
            one();
            start.elapsed().as_nanos() as u64
        })
        .collect();
    report(name, &mut times);
}

fn pair(endpoint: &Endpoint, tcp: &TcpSecurity) -> (Half, Half, [Arc<SoftDevice>; 2]) {
    let make = || {
        let device = SoftDevice::new(SoftOptions { tcp: tcp.clone(), ..SoftOptions::default() });
        let pd = device.alloc_pd().expect("a domain");
        let cq = device.create_cq(64).expect("cq");
        let memory = Arc::new(SharedMemory::new("bench", 1 << 21).expect("memory"));
        let mr = pd.register(memory, Access::ALL).expect("register");
        let qp = QpConfig::new(&cq, 16, 16);
        (device, pd, cq, mr, qp)
    };
    let (server_device, server_pd, server_cq, server_mr, server_config) = make();
    let (client_device, client_pd, client_cq, client_mr, client_config) = make();
    server_device.set_file_target(Arc::new(Zeros));
    let listener = server_pd.listen(endpoint).expect("listen");
    let receive = |mr: &Arc<dyn MemoryRegion>| vec![RecvWr { wr_id: WrId(0), local: mr.sge(0, 256).into() }];
    let (client_qp, server_qp) = std::thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            listener.accept().expect("accept").accept(server_config, receive(&server_mr)).expect("qp")
        });
        let timeout = Duration::from_secs(5);
        let options = ConnectOptions { qp: client_config, receives: receive(&client_mr), timeout };
        (
            client_pd.connect(&listener.endpoint(), options).expect("connect").qp,
            accepting.join().expect("thread"),
        )
    });
    server_qp.set_region_owner(RegionOwner(1));
    let server = Half { cq: server_cq, mr: server_mr, qp: server_qp };
    (Half { cq: client_cq, mr: client_mr, qp: client_qp }, server, [server_device, client_device])
}

fn ask(half: &Half) {
    half.qp.post_recv(&[RecvWr { wr_id: WrId(0), local: half.mr.sge(0, 256).into() }]).expect("receive");
    let local = half.mr.sge(4096, 64);
    half.qp
        .post_send(&[SendWr { wr_id: WrId(0), op: SendOp::Send, local: local.into(), signaled: false }])
        .expect("send");
}

fn link(endpoint: &Endpoint, scheme: &str, tcp: &TcpSecurity) {
    let (client, server, _devices) = pair(endpoint, tcp);
    let mut out = Vec::new();
    for (how, sleepy, gap_us) in [("sleeping between", true, 50), ("waiting", true, 0), ("polling", false, 0)]
    {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut out = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    if next(&*server.cq, &mut out, sleepy) {
                        ask(&server);
                    }
                }
            });
            let rounds = if gap_us > 0 { ROUNDS / 4 } else { ROUNDS };
            let mut times = Vec::new();
            for _ in 0..rounds {
                if gap_us > 0 {
                    std::thread::sleep(Duration::from_micros(gap_us));
                }
                let start = Instant::now();
                ask(&client);
                assert!(next(&*client.cq, &mut out, sleepy));
                times.push(start.elapsed().as_nanos() as u64);
            }
            stop.store(true, Ordering::Relaxed);
            report(&format!("{scheme}: SEND, reply ({how})"), &mut times);
        });
    }
    let remote = Remote::Memory { rkey: server.mr.rkey(), offset: 0 };
    let file = Remote::File { filekey: FileKey(1), offset: 0 };
    for (what, remote, len) in [
        ("READ 8 B of memory", remote, 8),
        ("READ 4 KiB of memory", remote, 4096),
        ("READ 1 MiB of memory", remote, 1 << 20),
        ("READ 4 KiB of a file", file, 4096),
    ] {
        if scheme == "shm" && remote == file {
            continue;
        }
        let local = client.mr.sge(8192, len);
        measure(&format!("{scheme}: {what}"), if len > 4096 { 500 } else { ROUNDS }, || {
            let read =
                SendWr { wr_id: WrId(0), op: SendOp::Read(remote), local: local.into(), signaled: true };
            client.qp.post_send(&[read]).expect("post");
            assert!(next(&*client.cq, &mut out, true));
        });
    }
    if scheme == "shm" {
        let read = SendWr {
            wr_id: WrId(0),
            op: SendOp::Read(remote),
            local: client.mr.sge(8192, 8).into(),
            signaled: true,
        };
        let start = Instant::now();
        for _ in 0..1_000_000 {
            client.qp.post_send(&[read]).expect("post");
            out.clear();
            client.cq.poll(&mut out, 1);
        }
        println!(
            "shm: post and complete a READ of 8 B          mean {:8.1} ns",
            start.elapsed().as_nanos() as f64 / 1e6
        );
    }
}

/// The lower bound: two threads with blocking calls, 64 bytes in one direction, a page and a header in the other.
fn raw_loopback() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let address = listener.local_addr().expect("address");
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("accept");
        stream.set_nodelay(true).expect("nodelay");
        let (mut request, reply) = ([0; 64], [0; 4160]);
        while stream.read_exact(&mut request).is_ok() {
            stream.write_all(&reply).expect("write");
        }
    });
    let mut stream = TcpStream::connect(address).expect("connect");
    stream.set_nodelay(true).expect("nodelay");
    let mut reply = [0; 4160];
    measure("raw loopback TCP, 64 B there, 4160 B back", ROUNDS, || {
        stream.write_all(&[0; 64]).expect("write");
        stream.read_exact(&mut reply).expect("read");
    });
    drop(stream);
    server.join().expect("server");
}

fn main() {
    let dir = std::env::temp_dir().join(format!("cuttlefs-rdma-bench-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("directory");
    raw_loopback();
    let plain = TcpSecurity::Loopback;
    let key = ClusterKey::generate("bench", &SystemRandom).expect("a key");
    let keys = TcpSecurity::Keys(ClusterKeys::new(vec![key]).expect("keys"));
    let tcp = Endpoint::Tcp { host: "127.0.0.1".into(), port: 0 };
    let only = std::env::args().nth(1);
    let wanted = |name: &str| only.as_deref().is_none_or(|only| only.split(',').any(|one| one == name));
    for (name, endpoint, tcp) in [
        ("shm", &Endpoint::Shm(dir.join("shm.sock")), &plain),
        ("tcp", &tcp, &plain),
        ("tcp+tls", &tcp, &keys),
        ("unix", &Endpoint::Unix(dir.join("unix.sock")), &plain),
    ] {
        if wanted(name) {
            link(endpoint, name, tcp);
        }
    }
    std::fs::remove_dir_all(&dir).expect("clean");
}
