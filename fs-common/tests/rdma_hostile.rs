//! Peers that break the protocol of the software RNIC's links: their connections end, and nobody else's.

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

macro_rules! with_and_without_keys {
    ($($name:ident),* $(,)?) => {
        mod plain { $(#[test] fn $name() { super::$name(super::Trust::Plain) })* }
        mod keyed { $(#[test] fn $name() { super::$name(super::Trust::Keyed) })* }
    };
}

with_and_without_keys!(
    broken_packets_end_their_connection_only,
    a_packet_in_many_pieces_is_one_packet,
    a_refused_request_is_named_and_what_follows_is_not_executed,
    the_owners_bytes_are_not_written,
    a_write_of_many_pieces_is_made_whole_or_not,
    replies_that_wait_for_a_flush_are_bounded,
    a_peer_that_asks_and_never_reads_is_held_back,
    nothing_is_held_for_peers_whose_long_packets_were_taken,
);

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

/// Corrects the header's checksum after a change.
fn seal_again(packet: &mut [u8]) {
    let header = packet.first_chunk_mut().expect("a header");
    let crc = header_checksum(header);
    header[PACKET_HEADER_LEN - 4..].copy_from_slice(&crc.to_le_bytes());
}

fn broken_packets_end_their_connection_only(trust: Trust) {
    let served = tcp(trust);
    let client_cq = served.device.create_cq(16).expect("cq");
    let good = served.connect_with(&client_cq);
    let _good_server = served.accepted();
    let rkey = served.mr.rkey().0;
    let mut corrupt = build(PacketHeader::new(PacketKind::Send, 1), b"message");
    corrupt[PACKET_HEADER_LEN] ^= 1;
    let mut oversized = build(PacketHeader::new(PacketKind::Send, 1), b"");
    oversized[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    seal_again(&mut oversized);
    // A wrong length that the server would wait for, if the checksum did not give it away.
    let mut longer = build(PacketHeader::new(PacketKind::Send, 1), b"message");
    longer[9] ^= 1;
    let mut version = build(read(1, rkey, 8), b"");
    version[4] = 1;
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("garbage", vec![0xa5; 4096]),
        ("corrupt payload", corrupt),
        ("oversized", oversized),
        ("damaged length", longer),
        ("unknown version", version),
        ("unknown kind", {
            let mut packet = build(read(1, rkey, 8), b"");
            packet[5] = 200;
            seal_again(&mut packet);
            packet
        }),
        ("out of order", build(read(2, rkey, 8), b"")),
        ("second hello", build(PacketHeader::new(PacketKind::Hello, 0), &hello_payload())),
        ("reply to nothing", build(PacketHeader::new(PacketKind::ReadReply, 1), b"bytes")),
        ("flush ack of nothing", build(PacketHeader::new(PacketKind::FlushAck, 1), b"")),
        (
            "flush to nowhere",
            build(PacketHeader { first: 8, ..PacketHeader::new(PacketKind::Flush, 1) }, b""),
        ),
        ("ack of nothing", build(PacketHeader::new(PacketKind::WriteAck, 1), b"")),
        (
            "nak of nothing",
            build(
                PacketHeader {
                    status: Some(WcStatus::RemoteAccess),
                    ..PacketHeader::new(PacketKind::Nak, 1)
                },
                b"",
            ),
        ),
    ];
    for (name, bytes) in cases {
        let (mut stream, qp) = greeted(&served);
        stream.write_all(&bytes).expect(name);
        wait_for_error(&*qp);
        let mut rest = Vec::new();
        // The server has ended the connection: an end of file, or a reset if it had not read all of the garbage.
        let _ = stream.read_to_end(&mut rest);
        assert!(rest.is_empty(), "{name}: {rest:?}");
        // A read on the other connection still works.
        let local = served.mr.sge(8192, 8);
        let remote = Remote::Memory { rkey: served.mr.rkey(), offset: 0 };
        good.post_send(&[SendWr {
            wr_id: WrId(5),
            op: SendOp::Read(remote),
            local: local.into(),
            signaled: true,
        }])
        .expect("post");
        assert_eq!(next(&*client_cq).status, WcStatus::Success, "{name}");
    }
}

fn a_packet_in_many_pieces_is_one_packet(trust: Trust) {
    let served = tcp(trust);
    let (mut stream, _qp) = greeted(&served);
    let packets =
        [build(read(1, served.mr.rkey().0, 8), b""), build(read(2, served.mr.rkey().0, 4), b"")].concat();
    for byte in packets {
        stream.write_all(&[byte]).expect("write");
        stream.flush().expect("flush");
    }
    for (sequence, len) in [(1, 8usize), (2, 4)] {
        let mut reply = vec![0; PACKET_HEADER_LEN + len];
        stream.read_exact(&mut reply).expect("reply");
        assert_eq!(reply, build(PacketHeader::new(PacketKind::ReadReply, sequence), &[7; 8][..len]));
    }
}

fn a_refused_request_is_named_and_what_follows_is_not_executed(trust: Trust) {
    let served = tcp(trust);
    let (mut stream, qp) = greeted(&served);
    let write = PacketHeader { key: served.mr.rkey().0.into(), ..PacketHeader::new(PacketKind::Write, 2) };
    stream.write_all(&[build(read(1, 99, 8), b""), build(write, b"never")].concat()).expect("write");
    let mut reply = vec![0; PACKET_HEADER_LEN];
    stream.read_exact(&mut reply).expect("nak");
    let header = PacketHeader::parse(&reply).expect("packet");
    assert_eq!(
        (header.kind, header.sequence, header.status),
        (PacketKind::Nak, 1, Some(WcStatus::RemoteAccess))
    );
    assert_eq!(stream.read(&mut reply).expect("end"), 0);
    wait_for_error(&*qp);
    let mut bytes = [0; 8];
    served.mr.memory().read(0, &mut bytes);
    assert_eq!(bytes, [7; 8]);
}

/// A WRITE of 1 MiB comes in pieces. It is made when the last one is there: not if the connection ends before, nor if the region goes.
fn a_write_of_many_pieces_is_made_whole_or_not(trust: Trust) {
    const LEN: usize = 1 << 20;
    let served = tcp(trust);
    for end in ["whole", "cut", "deregistered"] {
        let memory = Arc::new(SharedMemory::new("large", LEN).expect("memory"));
        let large = served.pd.register(memory.clone(), Access::ALL).expect("register");
        let (mut stream, qp) = greeted(&served);
        let write =
            PacketHeader { key: large.rkey().0.into(), ack: true, ..PacketHeader::new(PacketKind::Write, 1) };
        let packet = build(write, &[3; LEN]);
        let (first, rest) = packet.split_at(packet.len() / 2);
        stream.write_all(first).expect("write");
        stream.flush().expect("flush");
        // So that the server has most likely read it.
        std::thread::sleep(Duration::from_millis(50));
        let mut bytes = vec![0; LEN];
        memory.read(0, &mut bytes);
        assert!(bytes.iter().all(|byte| *byte == 0), "{end}: a piece was written");
        if end == "cut" {
            drop(stream);
            wait_for_error(&*qp);
        } else {
            let kept = (end == "whole").then_some(large);
            stream.write_all(rest).expect("write");
            stream.flush().expect("flush");
            let mut reply = vec![0; PACKET_HEADER_LEN];
            stream.read_exact(&mut reply).expect("a reply");
            let reply = PacketHeader::parse(&reply).expect("packet");
            let refused = (PacketKind::Nak, Some(WcStatus::RemoteAccess));
            let expected = if kept.is_some() { (PacketKind::WriteAck, None) } else { refused };
            assert_eq!((reply.kind, reply.status), expected, "{end}");
        }
        memory.read(0, &mut bytes);
        let expected = if end == "whole" { 3 } else { 0 };
        assert!(bytes.iter().all(|byte| *byte == expected), "{end}");
    }
}

/// A peer may read the bytes that an owner keeps for itself at the beginning of a region, but not write them.
fn the_owners_bytes_are_not_written(trust: Trust) {
    let served = tcp(trust);
    let memory = Arc::new(SharedMemory::new("owned", 8192).expect("memory"));
    memory.write(0, b"the owner's own.");
    let access = Access { own_bytes: 4096, ..Access::ALL };
    let owned = served.pd.register(memory.clone(), access).expect("register");
    let key = u64::from(owned.rkey().0);
    let write = |offset| PacketHeader { key, offset, ..PacketHeader::new(PacketKind::Write, 1) };
    for (offset, allowed) in [(0, false), (4095, false), (4096, true)] {
        let (mut stream, qp) = greeted(&served);
        stream.write_all(&build(write(offset), b"a peer's")).expect("write");
        if allowed {
            let deadline = Instant::now() + Duration::from_secs(10);
            let mut found = [0; 8];
            while &found != b"a peer's" {
                assert!(Instant::now() < deadline, "nothing was written");
                std::thread::sleep(Duration::from_millis(1));
                memory.read(4096, &mut found);
            }
        } else {
            wait_for_error(&*qp);
        }
    }
    let mut found = [0; 16];
    memory.read(0, &mut found);
    assert_eq!(&found, b"the owner's own.");
    memory.read(4080, &mut found);
    assert_eq!(found, [0; 16]);
}

/// Flushes that wait for a device, each with a READ behind it. The server keeps only so many replies back, then stops reading requests. In the end
/// the device completes the flushes, and all replies arrive in order.
fn replies_that_wait_for_a_flush_are_bounded(trust: Trust) {
    struct Never(Mutex<Vec<WhenPersistent>>);
    impl Persistence for Never {
        fn by_cache_lines(&self) -> bool {
            false
        }

        fn persist(&self, _: &SharedMemory, _: usize, _: usize, done: WhenPersistent) {
            self.0.lock().expect("no panic").push(done);
        }
    }
    let served = tcp(trust);
    let domain = Arc::new(Never(Mutex::default()));
    let memory = Arc::new(SharedMemory::new("large", 1 << 20).expect("memory"));
    let large = served.pd.register_persistent(memory, Access::ALL, domain.clone()).expect("register");
    let (mut stream, qp) = greeted(&served);
    let key = large.rkey().0;
    let flush = |sequence| PacketHeader {
        key: key.into(),
        first: 64,
        second: 2,
        ..PacketHeader::new(PacketKind::Flush, sequence)
    };
    for round in 0..20 {
        let packets = [build(flush(2 * round + 1), b""), build(read(2 * round + 2, key, 1 << 20), b"")];
        stream.write_all(&packets.concat()).expect("write");
    }
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(qp.state(), QpState::ReadyToSend, "held back, not broken");
    let under_way = domain.0.lock().expect("no panic").len();
    assert!((1..20).contains(&under_way), "{under_way} flushes were taken");
    let releasing = std::thread::spawn(move || {
        for _ in 0..20 {
            let done = loop {
                if let Some(done) = { domain.0.lock().expect("no panic").pop() } {
                    break done;
                }
                std::thread::sleep(Duration::from_millis(1));
            };
            done(Ok(()));
        }
    });
    for round in 0..20 {
        let mut ack = vec![0; PACKET_HEADER_LEN];
        stream.read_exact(&mut ack).expect("ack");
        assert_eq!(ack, build(PacketHeader::new(PacketKind::FlushAck, 2 * round + 1), b""));
        let mut reply = vec![0; PACKET_HEADER_LEN + (1 << 20)];
        stream.read_exact(&mut reply).expect("reply");
        assert_eq!(PacketHeader::parse(&reply).expect("packet").sequence, 2 * round + 2);
    }
    releasing.join().expect("thread");
}

fn a_peer_that_asks_and_never_reads_is_held_back(trust: Trust) {
    let served = tcp(trust);
    let memory = Arc::new(SharedMemory::new("large", 1 << 20).expect("memory"));
    let large = served.pd.register(memory, Access::ALL).expect("register");
    let (mut stream, qp) = greeted(&served);
    stream.set_write_timeout(Duration::from_millis(500));
    // The peer asks for more bytes than the server buffers, so the server stops reading at some point.
    for sequence in 1..200 {
        if stream.write_all(&build(read(sequence, large.rkey().0, 1 << 20), b"")).is_err() {
            break;
        }
    }
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(qp.state(), QpState::ReadyToSend, "held back, not broken");
    // Other clients are served meanwhile.
    let cq = served.device.create_cq(16).expect("cq");
    let other = served.connect_with(&cq);
    let remote = Remote::Memory { rkey: served.mr.rkey(), offset: 0 };
    let local = served.mr.sge(8192, 8);
    other
        .post_send(&[SendWr {
            wr_id: WrId(5),
            op: SendOp::Read(remote),
            local: local.into(),
            signaled: true,
        }])
        .expect("post");
    assert_eq!(next(&*cq).status, WcStatus::Success);
    // When the peer reads after all, it gets all replies in order.
    for sequence in 1..=20 {
        let mut reply = vec![0; PACKET_HEADER_LEN + (1 << 20)];
        stream.read_exact(&mut reply).expect("reply");
        let header = PacketHeader::parse(&reply).expect("packet");
        assert_eq!((header.kind, header.sequence), (PacketKind::ReadReply, sequence));
    }
}

/// The server holds a bounded number of bytes for a peer, however many connections it has. Other clients get their replies.
#[test]
fn what_is_held_for_peers_is_bounded_and_the_greediest_pays() {
    let held_max_bytes = 8 << 20;
    let device = SoftDevice::holding(SoftOptions::default(), held_max_bytes);
    let endpoint = Endpoint::Tcp { host: "127.0.0.1".into(), port: 0 };
    let served = serve_with(&endpoint, Trust::Plain, device);
    let large = Arc::new(SharedMemory::new("large", 1 << 20).expect("memory"));
    let large = served.pd.register(large, Access::ALL).expect("register");
    let cq = served.device.create_cq(16).expect("cq");
    let honest = served.connect_with(&cq);
    let _honest_server = served.accepted();
    let peers: Vec<_> = (0..12)
        .map(|_| {
            let (mut stream, qp) = greeted(&served);
            for sequence in 1..=16 {
                let asks = build(read(sequence, large.rkey().0, 1 << 20), b"");
                match stream.write_all(&asks) {
                    Ok(()) => {}
                    // The server has closed this connection already.
                    Err(_) => break,
                }
            }
            (stream, qp)
        })
        .collect();
    let ended = || peers.iter().filter(|(_, qp)| qp.state() == QpState::Error).count();
    let deadline = Instant::now() + Duration::from_secs(30);
    // The server holds at least five replies of 1 MiB for each connection, so those of twelve do not fit.
    while ended() == 0 || served.device.figures().held_bytes > held_max_bytes {
        assert!(Instant::now() < deadline, "{:?}", served.device.figures());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(served.device.figures().held_bound, held_max_bytes);
    let sink = Arc::new(SharedMemory::new("sink", 65536).expect("memory"));
    let sink = served.pd.register(sink, Access::ALL).expect("register");
    let small = SendWr {
        wr_id: WrId(9),
        op: SendOp::Read(Remote::Memory { rkey: served.mr.rkey(), offset: 0 }),
        local: sink.sge(0, 64).into(),
        signaled: true,
    };
    honest.post_send(&[small]).expect("post");
    assert_eq!(next(&*cq).status, WcStatus::Success);
    drop(peers);
    while served.device.figures().held_bytes > 0 {
        assert!(Instant::now() < deadline, "{:?}", served.device.figures());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The room of a long packet is given back when the packet was taken, not when the next one comes: else quiet peers that once sent one would be ended.
fn nothing_is_held_for_peers_whose_long_packets_were_taken(trust: Trust) {
    const LONG: u32 = 1 << 20;
    let tcp = if trust == Trust::Keyed { TcpSecurity::Keys(keys(1)) } else { TcpSecurity::Loopback };
    let device = SoftDevice::holding(SoftOptions { tcp, ..SoftOptions::default() }, 4 * LONG as usize);
    let served = serve_with(&Endpoint::Tcp { host: "127.0.0.1".into(), port: 0 }, trust, device);
    let memory = Arc::new(SharedMemory::new("large", LONG as usize).expect("memory"));
    let large = served.pd.register(memory, Access::ALL).expect("register");
    let op = SendOp::Write(Remote::Memory { rkey: large.rkey(), offset: 0 });
    let cq = served.device.create_cq(16).expect("cq");
    let peers: Vec<_> = (0..8).map(|_| (served.connect_with(&cq), served.accepted())).collect();
    for (qp, _) in &peers {
        let local = large.sge(0, LONG).into();
        qp.post_send(&[SendWr { wr_id: WrId(1), op, local, signaled: true }]).expect("post");
        assert_eq!(next(&*cq).status, WcStatus::Success);
    }
    let deadline = Instant::now() + Duration::from_secs(30);
    while served.device.figures().held_bytes > 0 {
        assert!(Instant::now() < deadline, "{:?}", served.device.figures());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(peers.iter().all(|(_, qp)| qp.state() == QpState::ReadyToSend), "none was ended for it");
}

#[test]
fn bad_hellos_are_told_why_and_silent_clients_hold_nobody_up() {
    let served = tcp(Trust::Plain);
    let _silent: Vec<_> = (0..70).map(|_| raw(&served)).collect();
    let mut version = build(PacketHeader::new(PacketKind::Hello, 0), &hello_payload());
    version[4] = 9;
    for (bytes, why) in [
        (version, "version 9"),
        (b"GET / HTTP/1.1\r\nHost: example\r\nAccept: */*\r\nUser-Agent: something-long-enough-to-fill\r\n\r\n".to_vec(), "magic"),
        (build(PacketHeader::new(PacketKind::Send, 1), b"x"), "no hello"),
    ] {
        let mut stream = raw(&served);
        stream.write_all(&bytes).expect("write");
        let mut answer = Vec::new();
        // The end may be a reset: the server never read what follows the length of a hello.
        let _ = stream.read_to_end(&mut answer);
        let header = PacketHeader::parse(&answer).expect("refusal");
        assert_eq!(header.kind, PacketKind::Refuse);
        let reason = String::from_utf8_lossy(&answer[PACKET_HEADER_LEN..]);
        assert!(reason.contains(why), "{reason}");
    }
    let qp = served.connect();
    assert_eq!(qp.state(), QpState::ReadyToSend);
}

/// A peer that connects too fast is delayed, and no connection is lost. The server forgets a connection that hangs up before its turn.
#[test]
fn who_connects_too_fast_is_heard_later() {
    let served = tcp(Trust::Plain);
    let hello = build(PacketHeader::new(PacketKind::Hello, 0), &hello_payload());
    let deadline = Instant::now() + Duration::from_secs(60);
    while served.device.figures().arrivals_delayed == 0 {
        assert!(Instant::now() < deadline, "nobody had to wait");
        let mut streams: Vec<TcpStream> = (0..16).map(|_| raw(&served)).collect();
        streams.iter_mut().for_each(|stream| stream.write_all(&hello).expect("hello"));
        for mut stream in streams {
            let mut welcome = vec![0; PACKET_HEADER_LEN + hello_payload().len()];
            stream.read_exact(&mut welcome).expect("welcome");
            served.accepted();
        }
    }
    assert_eq!(served.device.figures().arrivals_turned_away, 0);
    // More connections than may wait at once. All hang up, so their places are free again.
    for _ in 0..100 {
        raw(&served).write_all(&hello).expect("hello");
    }
    drop(greeted(&served));
}

/// Packets that arrive together with the end of the connection are executed first, however many turns that takes.
#[test]
fn what_comes_with_the_end_is_taken_first() {
    for trust in [Trust::Plain, Trust::Keyed] {
        let served = tcp(trust);
        let (mut stream, qp) = greeted(&served);
        let mr =
            served.pd.register(Arc::new(SharedMemory::new("written", 4096).expect("memory")), Access::ALL);
        let mr = mr.expect("registered");
        let packets: Vec<u8> = (1..=512u64)
            .flat_map(|sequence| {
                let mut header = PacketHeader::new(PacketKind::Write, sequence);
                (header.key, header.offset) = (u64::from(mr.rkey().0), 8 * (sequence - 1));
                build(PacketHeader { payload_len: 8, ..header }, &sequence.to_le_bytes())
            })
            .collect();
        stream.write_all(&packets).expect("packets");
        drop(stream);
        wait_for_error(&*qp);
        for sequence in 1..=512u64 {
            let mut word = [0; 8];
            mr.memory().read(8 * (sequence as usize - 1), &mut word);
            assert_eq!(u64::from_le_bytes(word), sequence);
        }
    }
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

/// A client with another key or none is told what to do. A client with a key does not go on without encryption.
#[test]
fn who_has_not_the_key_is_told_and_nothing_else() {
    let (keyed, plain) = (tcp(Trust::Keyed), tcp(Trust::Plain));
    for (served, tcp, why) in [
        (&keyed, TcpSecurity::Loopback, "give --key FILE"),
        (&keyed, TcpSecurity::Keys(keys(2)), "does not know this key"),
        (&plain, TcpSecurity::Keys(keys(1)), "takes no keys"),
    ] {
        match connect(&served.listener.endpoint(), tcp) {
            Err(RdmaError::Refused { reason, .. }) => assert!(reason.contains(why), "{reason}"),
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("it should be: {why}"),
        }
    }
    assert_eq!(keyed.device.figures().refused, 2);
    // The client does not believe a server that answers in plain text.
    let impostor = TcpListener::bind("127.0.0.1:0").expect("bound");
    let endpoint =
        Endpoint::Tcp { host: "127.0.0.1".into(), port: impostor.local_addr().expect("bound").port() };
    let welcomes = std::thread::spawn(move || {
        let (mut stream, _) = impostor.accept().expect("accepted");
        let _ = stream.read(&mut [0; 4096]);
        stream
            .write_all(&build(PacketHeader::new(PacketKind::Welcome, 0), &hello_payload()))
            .expect("welcome");
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        assert!(rest.is_empty(), "something was said in plain: {rest:?}");
    });
    let refused = connect(&endpoint, TcpSecurity::Keys(keys(1))).err().expect("not believed");
    assert!(refused.to_string().contains("takes no keys"), "{refused}");
    welcomes.join().expect("thread");
    connect(&keyed.listener.endpoint(), TcpSecurity::Keys(keys(1))).expect("who has the key");
}

/// A server that answers a READ with too few or too many bytes: none of the request's ranges is filled. A message too long for its receive's ranges fills
/// none, either.
#[test]
fn what_does_not_fit_the_ranges_fills_none_of_them() {
    for (kind, len) in [
        (PacketKind::ReadReply, 0),
        (PacketKind::ReadReply, 11),
        (PacketKind::ReadReply, 13),
        (PacketKind::ReadReply, 4096),
        (PacketKind::Send, 13),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
        let port = listener.local_addr().expect("bound").port();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("accepted");
            let mut hello = vec![0; PACKET_HEADER_LEN + hello_payload().len()];
            stream.read_exact(&mut hello).expect("hello");
            let welcome = build(PacketHeader::new(PacketKind::Welcome, 0), &hello_payload());
            stream.write_all(&welcome).expect("welcome");
            let mut asked = [0; PACKET_HEADER_LEN];
            stream.read_exact(&mut asked).expect("a READ");
            let asked = PacketHeader::parse(&asked).expect("a packet");
            assert_eq!((asked.kind, asked.wanted), (PacketKind::ReadMemory, 12));
            stream.write_all(&build(PacketHeader::new(kind, 1), &vec![0xee; len])).expect("said");
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let endpoint = Endpoint::Tcp { host: "127.0.0.1".into(), port };
        let peer = connect(&endpoint, TcpSecurity::Loopback).expect("welcome");
        peer.mr.memory().fill(0, 4096, 0x11);
        let local = [(0, 4), (1024, 7), (3000, 1)].map(|(at, len)| peer.mr.sge(at, len));
        let local = SgeList::of(&local).expect("three");
        peer.qp.post_recv(&[RecvWr { wr_id: WrId(2), local }]).expect("receive");
        let op = SendOp::Read(Remote::Memory { rkey: peer.mr.rkey(), offset: 0 });
        peer.qp.post_send(&[SendWr { wr_id: WrId(1), op, local, signaled: true }]).expect("post");
        let mut ends = [next(&*peer.cq), next(&*peer.cq)];
        ends.sort_by_key(|end| end.wr_id.0);
        let too_long = if kind == PacketKind::Send { WcStatus::LocalLength } else { WcStatus::Flushed };
        assert_eq!(ends.map(|end| end.status), [WcStatus::Flushed, too_long], "{kind:?} of {len}");
        let mut there = [0; 4096];
        peer.mr.memory().read(0, &mut there);
        assert!(there == [0x11; 4096], "{kind:?} of {len}");
        drop(peer);
        server.join().expect("server");
    }
}

/// Somebody between the client and the server flips a bit, in either direction, at many places. The connection ends or stalls, and no wrong request
/// is executed.
#[test]
fn what_is_changed_on_its_way_ends_the_connection() {
    let served = tcp(Trust::Keyed);
    let Endpoint::Tcp { port, .. } = served.listener.endpoint() else { panic!("tcp") };
    for (at, to_server) in (0..40).flat_map(|step| [(step * 37, true), (step * 37, false)]) {
        let between = TcpListener::bind("127.0.0.1:0").expect("bound");
        let endpoint =
            Endpoint::Tcp { host: "127.0.0.1".into(), port: between.local_addr().expect("bound").port() };
        let tampers = std::thread::spawn(move || {
            let (here, _) = between.accept().expect("accepted");
            let there = TcpStream::connect(("127.0.0.1", port)).expect("connected");
            let ways = [
                (here.try_clone().expect("fd"), there.try_clone().expect("fd"), to_server),
                (there, here, !to_server),
            ];
            let pumps = ways
                .map(|(from, to, tampers)| std::thread::spawn(move || pump(from, to, tampers.then_some(at))));
            pumps.into_iter().for_each(|pump| pump.join().expect("thread"));
        });
        if let Ok(peer) = connect(&endpoint, TcpSecurity::Keys(keys(1))) {
            let remote = Remote::Memory { rkey: served.mr.rkey(), offset: 0 };
            for _ in 0..20 {
                let local = peer.mr.sge(0, 8);
                if peer
                    .qp
                    .post_send(&[SendWr {
                        wr_id: WrId(1),
                        op: SendOp::Read(remote),
                        local: local.into(),
                        signaled: true,
                    }])
                    .is_err()
                {
                    break;
                }
                let mut out = Vec::new();
                peer.cq.wait(Duration::from_millis(500));
                peer.cq.poll(&mut out, 1);
                // A record with a damaged length makes the receiver wait for more bytes, as if somebody held them back.
                if out.first().is_none_or(|completion| completion.status != WcStatus::Success) {
                    break;
                }
                let mut found = [0; 8];
                peer.mr.memory().read(0, &mut found);
                assert_eq!(found, [7; 8]);
            }
            peer.qp.close();
        }
        drop(served.accepted.try_recv());
        tampers.join().expect("thread");
    }
    let mut bytes = [0; 8];
    served.mr.memory().read(0, &mut bytes);
    assert_eq!(bytes, [7; 8]);
    connect(&served.listener.endpoint(), TcpSecurity::Keys(keys(1))).expect("others go on");
}

/// Passes bytes on, and flips one bit of byte number `tampered`.
fn pump(mut from: TcpStream, mut to: TcpStream, tampered: Option<usize>) {
    let (mut passed, mut buffer) = (0, [0; 4096]);
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        if let Some(at) = tampered.filter(|at| (passed..passed + count).contains(at)) {
            buffer[at - passed] ^= 0x10;
        }
        passed += count;
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(std::net::Shutdown::Both);
    let _ = to.shutdown(std::net::Shutdown::Both);
}

#[test]
fn shm_refuses_nonsense_and_serves_the_next() {
    let dir = tempfile::tempdir().expect("dir");
    let path = dir.path().join("shm.sock");
    let served = serve(&Endpoint::Shm(path.clone()), Trust::Plain);
    let hello = ShmMessage::Hello { page_len: 4096 }.encode();
    // A hello without descriptors, one that is too short, one with another page size, and garbage.
    for bytes in
        [hello.clone(), hello[..40].to_vec(), ShmMessage::Hello { page_len: 8192 }.encode(), vec![9; 80]]
    {
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("socket");
        rustix::net::connect(&socket, &SocketAddrUnix::new(&path).expect("address")).expect("connect");
        rustix::net::send(&socket, &bytes, rustix::net::SendFlags::NOSIGNAL).expect("send");
        let mut answer = [0; 512];
        let (_, len) =
            rustix::net::recv(&socket, &mut answer, rustix::net::RecvFlags::empty()).expect("answer");
        assert!(
            matches!(ShmMessage::parse(&answer[..len]), Ok(ShmMessage::Refuse { .. })),
            "{:?}",
            &answer[..len]
        );
    }
    let qp = served.connect();
    let _server = served.accepted();
    assert_eq!(qp.state(), QpState::ReadyToSend);
    assert!(served.cq.arm());
}
