//! The verbs' semantics, one suite over every link of the software RNIC.

use cuttlefs_common::ids::{FileKey, Rkey};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions};
use cuttlefs_common::rdma::{
    Access, Completion, CompletionKind, CompletionQueue, ConnectOptions, Device, Endpoint, FileRead,
    FileTarget, LinkKind, Listener, MemoryRegion, PostError, ProtectionDomain, QpConfig, QpState, QueuePair,
    RdmaError, RecvWr, RegionOwner, Remote, RemoteWindow, SendOp, SendWr, Sge, WcStatus, WindowId, WrId,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

#[path = "rdma_semantics/flush.rs"]
mod flush;

use flush::{
    a_connection_that_ends_forgets_its_flush, a_failed_device_fails_its_flush,
    a_flush_comes_after_earlier_writes_and_holds_up_completions_only,
    a_refusal_waits_for_the_flush_before_it, a_target_that_closed_takes_no_flush, flush_errors,
    messages_are_flushed_where_they_land, real_devices_persist,
};

const PATIENCE: Duration = Duration::from_secs(10);
const MEMORY_LEN: usize = 2 << 20;

/// Client's and server's queue pair, and the windows the client got.
type Joined = (Arc<dyn QueuePair>, Arc<dyn QueuePair>, Vec<Arc<dyn RemoteWindow>>);

/// One process's half.
struct Half {
    device: Arc<SoftDevice>,
    pd: Arc<dyn ProtectionDomain>,
    cq: Arc<dyn CompletionQueue>,
    mr: Arc<dyn MemoryRegion>,
}

impl Half {
    fn new(access: Access) -> Self {
        let device = SoftDevice::new(SoftOptions::default());
        let pd = device.alloc_pd();
        let cq = device.create_cq(64).expect("cq");
        let memory = Arc::new(SharedMemory::new("half", MEMORY_LEN).expect("memory"));
        let mr = pd.register(memory, access).expect("register");
        Self { device, pd, cq, mr }
    }

    fn config(&self, depth: u32) -> QpConfig {
        QpConfig { send_cq: self.cq.clone(), recv_cq: self.cq.clone(), send_depth: depth, recv_depth: depth }
    }

    fn next(&self) -> Completion {
        next_of(&*self.cq)
    }

    fn nothing(&self) {
        let mut out = Vec::new();
        self.cq.wait(Duration::from_millis(50));
        assert_eq!(self.cq.poll(&mut out, 1), 0, "{out:?}");
    }

    fn put(&self, offset: u64, bytes: &[u8]) -> Sge {
        self.mr.memory().write(offset as usize, bytes);
        self.mr.sge(offset, bytes.len() as u32)
    }

    fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.mr.memory().read(offset, &mut out);
        out
    }

    fn receive(&self, id: u64, offset: u64, len: u32) -> RecvWr {
        RecvWr { wr_id: WrId(id), local: self.mr.sge(offset, len) }
    }

    fn place(&self, offset: u64) -> Remote {
        Remote::Memory { rkey: self.mr.rkey(), offset }
    }
}

fn next_of(cq: &dyn CompletionQueue) -> Completion {
    let deadline = Instant::now() + PATIENCE;
    let mut out = Vec::new();
    while cq.poll(&mut out, 1) == 0 {
        assert!(Instant::now() < deadline, "no completion came");
        cq.wait(Duration::from_secs(1));
    }
    out[0]
}

fn send(id: u64, op: SendOp, local: Sge) -> SendWr {
    SendWr { wr_id: WrId(id), op, local, signaled: true }
}

struct Pair {
    client: Half,
    server: Half,
    client_qp: Option<Arc<dyn QueuePair>>,
    server_qp: Option<Arc<dyn QueuePair>>,
    listener: Arc<dyn Listener>,
    _dir: tempfile::TempDir,
}

fn endpoint(link: LinkKind, dir: &tempfile::TempDir) -> Endpoint {
    match link {
        LinkKind::Shm => Endpoint::Shm(dir.path().join("shm.sock")),
        LinkKind::Unix => Endpoint::Unix(dir.path().join("unix.sock")),
        _ => Endpoint::Tcp { host: "127.0.0.1".into(), port: 0 },
    }
}

fn options(half: &Half, depth: u32, receives: Vec<RecvWr>) -> ConnectOptions {
    ConnectOptions { qp: half.config(depth), receives, timeout: PATIENCE }
}

fn join(
    client: &Half,
    server: &Half,
    listener: &Arc<dyn Listener>,
    depth: u32,
    receives: [Vec<RecvWr>; 2],
) -> Joined {
    let [client_receives, server_receives] = receives;
    std::thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            listener.accept().expect("accept").accept(server.config(depth), server_receives).expect("qp")
        });
        let connected = client
            .pd
            .connect(&listener.endpoint(), options(client, depth, client_receives))
            .expect("connect");
        (connected.qp, accepting.join().expect("thread"), connected.windows)
    })
}

impl Pair {
    fn with(
        link: LinkKind,
        depth: u32,
        access: Access,
        first: impl FnOnce(&Half, &Half) -> [Vec<RecvWr>; 2],
    ) -> Self {
        let dir = tempfile::tempdir().expect("dir");
        let (client, server) = (Half::new(Access::ALL), Half::new(access));
        let listener: Arc<dyn Listener> = Arc::from(server.pd.listen(&endpoint(link, &dir)).expect("listen"));
        let receives = first(&client, &server);
        let (client_qp, server_qp, _) = join(&client, &server, &listener, depth, receives);
        assert_eq!((client_qp.link(), server_qp.link()), (link, link));
        Self { client, server, client_qp: Some(client_qp), server_qp: Some(server_qp), listener, _dir: dir }
    }

    fn new(link: LinkKind) -> Self {
        Self::with(link, 16, Access::ALL, |_, _| [vec![], vec![]])
    }

    fn c(&self) -> &dyn QueuePair {
        self.client_qp.as_deref().expect("open")
    }

    fn s(&self) -> &dyn QueuePair {
        self.server_qp.as_deref().expect("open")
    }

    /// The server's side has nobody polling it: some links need that to notice things.
    fn settle_server(&self) {
        let deadline = Instant::now() + PATIENCE;
        while self.s().state() != QpState::Error {
            assert!(Instant::now() < deadline);
            self.server.cq.wait(Duration::from_millis(20));
        }
    }
}

fn ok(completion: Completion, id: u64, kind: CompletionKind, len: u32) {
    assert_eq!(
        (completion.wr_id, completion.kind, completion.status, completion.byte_len),
        (WrId(id), kind, WcStatus::Success, len),
        "{completion:?}"
    );
}

fn bad(completion: Completion, id: u64, status: WcStatus) {
    assert_eq!((completion.wr_id, completion.status), (WrId(id), status), "{completion:?}");
}

fn send_and_receive(link: LinkKind) {
    let pair = Pair::with(link, 16, Access::ALL, |client, server| {
        [vec![client.receive(100, 0, 64)], vec![server.receive(200, 4096, 64), server.receive(201, 8192, 64)]]
    });
    let hello = pair.client.put(1000, b"hello");
    pair.c()
        .post_send(&[send(1, SendOp::Send, hello), send(2, SendOp::SendImm(77), Sge::EMPTY)])
        .expect("post");
    ok(pair.client.next(), 1, CompletionKind::Send, 5);
    ok(pair.client.next(), 2, CompletionKind::Send, 0);
    ok(pair.server.next(), 200, CompletionKind::Recv, 5);
    let imm = pair.server.next();
    ok(imm, 201, CompletionKind::RecvWithImm, 0);
    assert_eq!(imm.imm, Some(77));
    assert_eq!(pair.server.bytes(4096, 5), b"hello");
    pair.s().post_send(&[send(3, SendOp::Send, pair.server.put(0, b"world!"))]).expect("post");
    ok(pair.client.next(), 100, CompletionKind::Recv, 6);
    assert_eq!(pair.client.bytes(0, 6), b"world!");
}

fn one_sided(link: LinkKind) {
    let pair = Pair::new(link);
    let (client, server) = (&pair.client, &pair.server);
    for len in [1u32, 4096, 70_000, 1 << 20] {
        let bytes: Vec<u8> = (0..len).map(|index| (index % 251) as u8).collect();
        server.put(512, &bytes);
        pair.c()
            .post_send(&[send(1, SendOp::Read(server.place(512)), client.mr.sge(64, len))])
            .expect("post");
        ok(client.next(), 1, CompletionKind::Read, len);
        assert!(client.bytes(64, len as usize) == bytes);
        let back: Vec<u8> = bytes.iter().map(|byte| !byte).collect();
        pair.c()
            .post_send(&[send(2, SendOp::Write(server.place(512)), client.put(64, &back))])
            .expect("post");
        ok(client.next(), 2, CompletionKind::Write, len);
        assert!(server.bytes(512, len as usize) == back);
    }
    // And the server reads and writes the client's memory.
    client.put(0, b"of the client");
    pair.s().post_send(&[send(3, SendOp::Read(client.place(0)), server.mr.sge(0, 13))]).expect("post");
    let driver = AtomicBool::new(true);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while driver.load(Ordering::Relaxed) {
                client.cq.wait(Duration::from_millis(5));
                client.cq.poll(&mut Vec::new(), 0);
            }
        });
        ok(server.next(), 3, CompletionKind::Read, 13);
        pair.s()
            .post_send(&[send(4, SendOp::Write(client.place(100)), server.put(0, b"pushed"))])
            .expect("post");
        ok(server.next(), 4, CompletionKind::Write, 6);
        driver.store(false, Ordering::Relaxed);
    });
    assert_eq!(client.bytes(100, 6), b"pushed");
}

fn write_imm_and_atomics(link: LinkKind) {
    let pair = Pair::with(link, 16, Access::ALL, |_, server| [vec![], vec![server.receive(9, 0, 64)]]);
    let (client, server) = (&pair.client, &pair.server);
    let data = client.put(0, b"data");
    pair.c().post_send(&[send(1, SendOp::WriteImm(server.place(4096), 5), data)]).expect("post");
    ok(client.next(), 1, CompletionKind::Write, 4);
    let arrived = server.next();
    ok(arrived, 9, CompletionKind::RecvWithImm, 4);
    assert_eq!(arrived.imm, Some(5));
    assert_eq!(server.bytes(4096, 4), b"data");
    server.put(8, &7u64.to_le_bytes());
    let swap = |expect, swap| SendOp::CompareSwap { remote: server.place(8), expect, swap };
    let old = client.mr.sge(64, 8);
    for (op, kind, before, after) in [
        (swap(7, 9), CompletionKind::CompareSwap, 7u64, 9u64),
        (swap(7, 1), CompletionKind::CompareSwap, 9, 9),
        (SendOp::FetchAdd { remote: server.place(8), add: 5 }, CompletionKind::FetchAdd, 9, 14),
    ] {
        pair.c().post_send(&[send(2, op, old)]).expect("post");
        ok(client.next(), 2, kind, 8);
        assert_eq!(client.bytes(64, 8), before.to_le_bytes());
        assert_eq!(server.bytes(8, 8), after.to_le_bytes());
    }
    pair.c().post_send(&[send(3, SendOp::FetchAdd { remote: server.place(9), add: 1 }, old)]).expect("post");
    bad(client.next(), 3, WcStatus::RemoteInvalid);
}

fn order_and_silence(link: LinkKind) {
    let pair = Pair::with(link, 16, Access::ALL, |_, server| {
        [vec![], (0..8).map(|index| server.receive(index, 65536 + index * 64, 64)).collect()]
    });
    let (client, server) = (&pair.client, &pair.server);
    let mut requests = Vec::new();
    for index in 0..8u64 {
        let local = client.put(index * 8, &index.to_le_bytes());
        let mut write = send(100 + index, SendOp::Write(server.place(0)), local);
        write.signaled = false;
        requests.push(write);
        let mut message = send(200 + index, SendOp::Send, local);
        message.signaled = index == 7;
        requests.push(message);
    }
    pair.c().post_send(&requests).expect("post");
    for index in 0..8u64 {
        ok(server.next(), index, CompletionKind::Recv, 8);
        assert_eq!(server.bytes(65536 + index as usize * 64, 8), index.to_le_bytes());
    }
    assert_eq!(server.bytes(0, 8), 7u64.to_le_bytes());
    // Everything before it was silent.
    ok(client.next(), 207, CompletionKind::Send, 8);
    client.nothing();
    // READ, then WRITE, then SEND: completions in that order, and silent ones gave their places back.
    for round in 0..20 {
        server.post_and_forget(pair.s());
        let requests = [
            send(1, SendOp::Read(server.place(0)), client.mr.sge(4096, 4096)),
            send(2, SendOp::Write(server.place(8192)), client.mr.sge(0, 8)),
            send(3, SendOp::Send, client.mr.sge(0, 8)),
            SendWr { signaled: false, ..send(4, SendOp::Write(server.place(8192)), client.mr.sge(0, 8)) },
            send(5, SendOp::Read(server.place(0)), client.mr.sge(4096, 8)),
        ];
        pair.c().post_send(&requests).unwrap_or_else(|error| panic!("round {round}: {error}"));
        for id in [1, 2, 3, 5] {
            assert_eq!(client.next().wr_id, WrId(id));
        }
        ok(server.next(), 50, CompletionKind::Recv, 8);
    }
}

impl Half {
    fn post_and_forget(&self, qp: &dyn QueuePair) {
        qp.post_recv(&[self.receive(50, 70_000, 64)]).expect("receive");
    }
}

/// A refused request: the initiator hears it, everything behind it is flushed, the target is unchanged.
fn refused(link: LinkKind, access: Access, op: impl Fn(&Half) -> SendOp, local_len: u32, status: WcStatus) {
    let pair = Pair::with(link, 16, access, |client, _| [vec![client.receive(77, 0, 8)], vec![]]);
    let (client, server) = (&pair.client, &pair.server);
    server.put(0, &[0xaa; 64]);
    let good = SendOp::Write(server.place(0));
    let local = client.put(0, &[0xbb; 64]);
    pair.c()
        .post_send(&[
            send(1, op(server), Sge { len: local_len, ..local }),
            send(2, good, local),
            send(3, SendOp::Send, local),
        ])
        .expect("post");
    bad(client.next(), 1, status);
    let mut flushed: Vec<_> = (0..3).map(|_| client.next()).collect();
    flushed.sort_by_key(|completion| completion.wr_id.0);
    for (completion, id) in flushed.into_iter().zip([2, 3, 77]) {
        bad(completion, id, WcStatus::Flushed);
    }
    assert_eq!(pair.c().state(), QpState::Error);
    assert!(matches!(
        pair.c().post_send(&[send(4, good, local)]),
        Err(PostError::BadState { state: QpState::Error })
    ));
    assert!(matches!(pair.c().post_recv(&[client.receive(1, 0, 8)]), Err(PostError::BadState { .. })));
    pair.settle_server();
    assert_eq!(server.bytes(0, 64), [0xaa; 64]);
}

fn access_errors(link: LinkKind) {
    let read_only = Access { remote_write: false, remote_atomic: false, ..Access::ALL };
    let write_only = Access { remote_read: false, ..Access::ALL };
    let wrong_key = Remote::Memory { rkey: Rkey(1), offset: 0 };
    let past = |server: &Half| Remote::Memory { rkey: server.mr.rkey(), offset: MEMORY_LEN as u64 - 8 };
    let wraps = |server: &Half| Remote::Memory { rkey: server.mr.rkey(), offset: u64::MAX - 8 };
    refused(link, Access::ALL, |_| SendOp::Read(wrong_key), 64, WcStatus::RemoteAccess);
    refused(link, Access::ALL, |_| SendOp::Write(wrong_key), 64, WcStatus::RemoteAccess);
    refused(link, Access::ALL, |server| SendOp::Read(past(server)), 64, WcStatus::RemoteAccess);
    refused(link, Access::ALL, |server| SendOp::Write(past(server)), 64, WcStatus::RemoteAccess);
    refused(link, Access::ALL, |server| SendOp::Write(wraps(server)), 64, WcStatus::RemoteAccess);
    refused(link, read_only, |server| SendOp::Write(server.place(0)), 64, WcStatus::RemoteAccess);
    refused(
        link,
        read_only,
        |server| SendOp::FetchAdd { remote: server.place(0), add: 1 },
        8,
        WcStatus::RemoteAccess,
    );
    refused(link, write_only, |server| SendOp::Read(server.place(0)), 64, WcStatus::RemoteAccess);
    refused(link, Access::LOCAL, |server| SendOp::Read(server.place(0)), 64, WcStatus::RemoteAccess);
    let file = Remote::File { filekey: FileKey(1), offset: 0 };
    refused(link, Access::ALL, |_| SendOp::Write(file), 64, WcStatus::RemoteInvalid);
    refused(link, Access::ALL, |_| SendOp::Read(file), 64, WcStatus::RemoteInvalid);
    refused(link, Access::ALL, |server| SendOp::Write(server.place(0)), 1 << 22, WcStatus::LocalProtection);
    refused(link, Access::ALL, |server| SendOp::Read(server.place(0)), (1 << 20) + 1, WcStatus::LocalLength);
    refused(link, Access::ALL, |_| SendOp::Send, 68 * 1024 + 1, WcStatus::LocalLength);
    refused(
        link,
        Access::ALL,
        |server| SendOp::FetchAdd { remote: server.place(0), add: 1 },
        4,
        WcStatus::LocalLength,
    );
}

fn silent_failure_is_heard(link: LinkKind) {
    let pair = Pair::new(link);
    let mut request =
        send(5, SendOp::Write(Remote::Memory { rkey: Rkey(3), offset: 0 }), pair.client.mr.sge(0, 8));
    request.signaled = false;
    pair.c().post_send(&[request]).expect("post");
    bad(pair.client.next(), 5, WcStatus::RemoteAccess);
    assert_eq!(pair.c().state(), QpState::Error);
}

fn deregistered_memory_is_gone(link: LinkKind) {
    let pair = Pair::new(link);
    let memory = Arc::new(SharedMemory::new("late", 4096).expect("memory"));
    memory.write(0, b"late");
    // Registered after the connection was made.
    let late = pair.server.pd.register(memory, Access::ALL).expect("register");
    let read =
        send(1, SendOp::Read(Remote::Memory { rkey: late.rkey(), offset: 0 }), pair.client.mr.sge(0, 4));
    pair.c().post_send(&[read]).expect("post");
    ok(pair.client.next(), 1, CompletionKind::Read, 4);
    assert_eq!(pair.client.bytes(0, 4), b"late");
    drop(late);
    pair.c().post_send(&[read]).expect("post");
    bad(pair.client.next(), 1, WcStatus::RemoteAccess);
}

fn many_registrations_stay_reachable(link: LinkKind) {
    let pair = Pair::new(link);
    // More than the socket's buffer takes announcements of; the server only polls now and then.
    let regions: Vec<_> = (0..600u64)
        .map(|index| {
            let memory = Arc::new(SharedMemory::new("many", 4096).expect("memory"));
            memory.write(0, &index.to_le_bytes());
            pair.server.pd.register(memory, Access::ALL).expect("register")
        })
        .collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                pair.server.cq.wait(Duration::from_millis(1));
                pair.server.cq.poll(&mut Vec::new(), 1);
            }
        });
        for (index, region) in regions.iter().enumerate().rev() {
            let remote = Remote::Memory { rkey: region.rkey(), offset: 0 };
            pair.c().post_send(&[send(1, SendOp::Read(remote), pair.client.mr.sge(0, 8))]).expect("post");
            let completion = pair.client.next();
            if completion.status != WcStatus::Success {
                stop.store(true, Ordering::Relaxed);
            }
            ok(completion, 1, CompletionKind::Read, 8);
            assert_eq!(pair.client.bytes(0, 8), (index as u64).to_le_bytes());
        }
        stop.store(true, Ordering::Relaxed);
    });
}

fn message_too_long(link: LinkKind) {
    let pair = Pair::with(link, 16, Access::ALL, |_, server| {
        [vec![], vec![server.receive(1, 0, 4), server.receive(2, 64, 4)]]
    });
    pair.c().post_send(&[send(1, SendOp::Send, pair.client.put(0, b"12345"))]).expect("post");
    bad(pair.server.next(), 1, WcStatus::LocalLength);
    bad(pair.server.next(), 2, WcStatus::Flushed);
    assert_eq!(pair.s().state(), QpState::Error);
    assert_eq!(pair.server.bytes(0, 8), [0; 8]);
}

fn messages_wait_for_receives(link: LinkKind) {
    let pair = Pair::new(link);
    for index in 0..10u64 {
        pair.c()
            .post_send(&[send(index, SendOp::Send, pair.client.put(0, &index.to_le_bytes()))])
            .expect("post");
        assert_eq!(pair.client.next().status, WcStatus::Success);
    }
    pair.server.nothing();
    for index in 0..10u64 {
        pair.s().post_recv(&[pair.server.receive(index, index * 64, 64)]).expect("receive");
        ok(pair.server.next(), index, CompletionKind::Recv, 8);
        assert_eq!(pair.server.bytes(index as usize * 64, 8), index.to_le_bytes());
    }
}

fn queues_are_bounded(link: LinkKind) {
    let pair = Pair::with(link, 4, Access::ALL, |_, _| [vec![], vec![]]);
    let read = |id| send(id, SendOp::Read(pair.server.place(0)), pair.client.mr.sge(0, 8));
    let six: Vec<_> = (0..6).map(read).collect();
    assert_eq!(pair.c().post_send(&six), Err(PostError::QueueFull { posted: 4 }));
    assert_eq!(pair.c().post_send(&six[4..]), Err(PostError::QueueFull { posted: 0 }));
    for id in 0..4 {
        ok(pair.client.next(), id, CompletionKind::Read, 8);
    }
    pair.c().post_send(&six[4..]).expect("room again");
    for id in 4..6 {
        ok(pair.client.next(), id, CompletionKind::Read, 8);
    }
    let five: Vec<_> = (0..5).map(|id| pair.client.receive(id, 0, 8)).collect();
    assert_eq!(pair.c().post_recv(&five), Err(PostError::QueueFull { posted: 4 }));
}

fn a_burst_larger_than_the_link_arrives(link: LinkKind) {
    // 64 messages of 60 KiB: more than a ring or a socket buffer holds, so sends queue and go on by themselves.
    let pair = Pair::with(link, 64, Access::ALL, |_, _| [vec![], vec![]]);
    let sends: Vec<_> =
        (0..64).map(|id| send(id, SendOp::Send, pair.client.mr.sge(id * 1000, 60_000))).collect();
    let pattern: Vec<u8> = (0..200_000u32).map(|index| (index % 253) as u8).collect();
    pair.client.put(0, &pattern);
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| {
            for id in 0..64u64 {
                pair.s().post_recv(&[pair.server.receive(id, 0, 65536)]).expect("receive");
                ok(pair.server.next(), id, CompletionKind::Recv, 60_000);
                let start = id as usize * 1000;
                assert!(pair.server.bytes(0, 60_000) == pattern[start..start + 60_000], "message {id}");
            }
        });
        pair.c().post_send(&sends).expect("post");
        for id in 0..64 {
            ok(pair.client.next(), id, CompletionKind::Send, 60_000);
        }
        receiving.join().expect("receiver");
    });
}

fn close_flushes_and_the_peer_notices(link: LinkKind) {
    let mut pair = Pair::with(link, 16, Access::ALL, |client, server| {
        [vec![client.receive(1, 0, 8)], vec![server.receive(2, 0, 8), server.receive(3, 64, 8)]]
    });
    pair.c().post_send(&[send(9, SendOp::Send, pair.client.put(64, b"bye"))]).expect("post");
    ok(pair.client.next(), 9, CompletionKind::Send, 3);
    pair.c().close();
    pair.c().close();
    bad(pair.client.next(), 1, WcStatus::Flushed);
    assert_eq!(pair.c().state(), QpState::Error);
    // What was sent before is delivered first.
    ok(pair.server.next(), 2, CompletionKind::Recv, 3);
    bad(pair.server.next(), 3, WcStatus::Flushed);
    assert_eq!(pair.s().state(), QpState::Error);
    pair.client.nothing();
    // And again with a new connection on the same listener; this time the server's side is dropped.
    let receives = [vec![pair.client.receive(5, 0, 8)], vec![]];
    let (client_qp, server_qp, _) = join(&pair.client, &pair.server, &pair.listener, 16, receives);
    pair.client_qp = Some(client_qp);
    drop(server_qp);
    bad(pair.client.next(), 5, WcStatus::Flushed);
    assert_eq!(pair.c().state(), QpState::Error);
}

fn a_hundred_on_one_queue(link: LinkKind) {
    let dir = tempfile::tempdir().expect("dir");
    let server = Half::new(Access::ALL);
    let listener: Arc<dyn Listener> = Arc::from(server.pd.listen(&endpoint(link, &dir)).expect("listen"));
    let client = Half::new(Access::ALL);
    let pairs: Vec<_> = (0..100u64)
        .map(|id| {
            join(
                &client,
                &server,
                &listener,
                4,
                [vec![client.receive(id, 65536 + id * 8, 8)], vec![server.receive(id, id * 8, 8)]],
            )
        })
        .collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The server's worker: sleeps on the event descriptor among others, as it will in the product.
            let mut out = Vec::new();
            let mut served = 0;
            while served < 100 {
                if server.cq.poll(&mut out, 16) == 0 {
                    if server.cq.arm() {
                        let fd = server.cq.event_fd();
                        let mut fds = [rustix_poll(&fd)];
                        let timeout = rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 };
                        assert!(rustix::event::poll(&mut fds, Some(&timeout)).expect("poll") > 0, "no event");
                    }
                    server.cq.take_event();
                    continue;
                }
                for completion in out.drain(..) {
                    if completion.kind != CompletionKind::Recv {
                        continue;
                    }
                    let (_, qp, _) =
                        pairs.iter().find(|(_, qp, _)| qp.number() == completion.qp).expect("known");
                    let mut reply = send(1, SendOp::Send, server.mr.sge(completion.wr_id.0 * 8, 8));
                    reply.signaled = false;
                    qp.post_send(&[reply]).expect("reply");
                    served += 1;
                }
            }
        });
        for (id, (qp, ..)) in pairs.iter().enumerate() {
            let local = client.put(id as u64 * 8, &(id as u64 * 3).to_le_bytes());
            qp.post_send(&[SendWr { signaled: false, ..send(1, SendOp::Send, local) }]).expect("request");
        }
        let mut ids: Vec<_> = (0..100).map(|_| client.next().wr_id.0).collect();
        ids.sort_unstable();
        assert_eq!(ids, (0..100).collect::<Vec<_>>());
    });
    for id in 0..100u64 {
        assert_eq!(client.bytes(65536 + id as usize * 8, 8), (id * 3).to_le_bytes());
    }
}

fn rustix_poll<'fd>(fd: &'fd std::os::fd::BorrowedFd<'fd>) -> rustix::event::PollFd<'fd> {
    rustix::event::PollFd::new(fd, rustix::event::PollFlags::IN)
}

fn ping_pong_loses_no_wake_up(link: LinkKind) {
    // Short random pauses make both sides fall asleep at every possible moment.
    let pair = Pair::with(link, 8, Access::ALL, |client, server| {
        [vec![client.receive(0, 0, 8)], vec![server.receive(0, 0, 8)]]
    });
    const ROUNDS: u64 = 5_000;
    let pause = |round: u64| {
        let spins = round.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 51;
        for _ in 0..spins {
            std::hint::spin_loop();
        }
    };
    let turn = |half: &Half, qp: &dyn QueuePair, round: u64| {
        qp.post_recv(&[half.receive(round + 1, 0, 8)]).expect("receive");
        let mut message = send(0, SendOp::Send, half.put(64, &round.to_le_bytes()));
        message.signaled = false;
        qp.post_send(&[message]).expect("send");
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..ROUNDS {
                ok(pair.server.next(), round, CompletionKind::Recv, 8);
                assert_eq!(pair.server.bytes(0, 8), round.to_le_bytes());
                pause(round);
                turn(&pair.server, pair.s(), round);
            }
        });
        for round in 0..ROUNDS {
            let start = Instant::now();
            turn(&pair.client, pair.c(), round);
            ok(pair.client.next(), round, CompletionKind::Recv, 8);
            assert!(start.elapsed() < Duration::from_millis(900), "round {round} was saved by the timeout");
            pause(round + 7);
        }
    });
}

fn two_threads_post_to_one_queue_pair(link: LinkKind) {
    let pair = Pair::with(link, 64, Access::ALL, |_, _| [vec![], vec![]]);
    std::thread::scope(|scope| {
        for thread in 0..2u64 {
            let pair = &pair;
            scope.spawn(move || {
                for _ in 0..500 {
                    let add = SendWr {
                        signaled: false,
                        ..send(
                            thread,
                            SendOp::FetchAdd { remote: pair.server.place(0), add: 1 },
                            pair.client.mr.sge(thread * 8, 8),
                        )
                    };
                    while pair.c().post_send(&[add]).is_err() {
                        pair.client.cq.poll(&mut Vec::new(), 1);
                        std::thread::yield_now();
                    }
                }
            });
        }
    });
    pair.c()
        .post_send(&[send(9, SendOp::Read(pair.server.place(0)), pair.client.mr.sge(64, 8))])
        .or_else(|_| {
            pair.client.cq.wait(Duration::from_secs(1));
            pair.c().post_send(&[send(9, SendOp::Read(pair.server.place(0)), pair.client.mr.sge(64, 8))])
        })
        .expect("post");
    ok(pair.client.next(), 9, CompletionKind::Read, 8);
    assert_eq!(pair.client.bytes(64, 8), 1000u64.to_le_bytes());
}

struct OneFile;

impl FileTarget for OneFile {
    fn read_file(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        out: &mut [u8],
    ) -> Result<FileRead, WcStatus> {
        if (owner, filekey) != (RegionOwner(42), FileKey(7)) {
            return Err(WcStatus::RemoteAccess);
        }
        out.fill(0x5a);
        Ok(FileRead::Done((10_000u64.saturating_sub(offset) as usize).min(out.len())))
    }

    fn read_bitmap(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        first_page: u64,
        out: &mut [u8],
    ) -> Result<(), WcStatus> {
        if (owner, filekey) != (RegionOwner(42), FileKey(7)) {
            return Err(WcStatus::RemoteAccess);
        }
        out.fill(first_page as u8);
        Ok(())
    }
}

fn files_are_read_by_the_engine(link: LinkKind) {
    let read = |pair: &Pair, remote, len| {
        pair.c().post_send(&[send(1, SendOp::Read(remote), pair.client.mr.sge(0, len))]).expect("post");
        pair.client.next()
    };
    let file = |filekey, offset| Remote::File { filekey: FileKey(filekey), offset };
    if link == LinkKind::Shm {
        let pair = Pair::new(link);
        assert_eq!(read(&pair, file(7, 0), 4096).status, WcStatus::RemoteInvalid);
        return;
    }
    let pair = Pair::new(link);
    pair.server.device.set_file_target(Arc::new(OneFile));
    pair.s().set_region_owner(RegionOwner(42));
    ok(read(&pair, file(7, 0), 4096), 1, CompletionKind::Read, 4096);
    assert_eq!(pair.client.bytes(0, 4096), [0x5a; 4096]);
    ok(read(&pair, file(7, 8192), 4096), 1, CompletionKind::Read, 1808);
    ok(read(&pair, file(7, 1 << 40), 4096), 1, CompletionKind::Read, 0);
    ok(read(&pair, Remote::Bitmap { filekey: FileKey(7), first_page: 16 }, 8), 1, CompletionKind::Read, 8);
    assert_eq!(pair.client.bytes(0, 8), [16; 8]);
    assert_eq!(read(&pair, file(8, 0), 4096).status, WcStatus::RemoteAccess);
    // Without a session every file is refused, and a crooked bitmap is no request.
    for (owner, remote, status) in [
        (0, file(7, 0), WcStatus::RemoteAccess),
        (42, Remote::Bitmap { filekey: FileKey(7), first_page: 3 }, WcStatus::RemoteInvalid),
    ] {
        let pair = Pair::new(link);
        pair.server.device.set_file_target(Arc::new(OneFile));
        pair.s().set_region_owner(RegionOwner(owner));
        assert_eq!(read(&pair, remote, 8).status, status);
    }
}

fn windows_are_mapped_read_only(link: LinkKind) {
    let dir = tempfile::tempdir().expect("dir");
    let (client, server) = (Half::new(Access::ALL), Half::new(Access::ALL));
    let frames = Arc::new(SharedMemory::new("frames", 8192).expect("memory"));
    frames.write(0, b"frame");
    server.device.export_window(WindowId::Frames, frames.clone());
    server
        .device
        .export_window(WindowId::FileTable, Arc::new(SharedMemory::new("table", 4096).expect("memory")));
    let listener: Arc<dyn Listener> = Arc::from(server.pd.listen(&endpoint(link, &dir)).expect("listen"));
    let (_client_qp, _server_qp, windows) = join(&client, &server, &listener, 4, [vec![], vec![]]);
    if link != LinkKind::Shm {
        assert!(windows.is_empty());
        return;
    }
    assert_eq!(windows.iter().map(|window| window.len()).collect::<Vec<_>>(), [8192, 4096]);
    let mapped = windows[0].mapped().expect("mapped");
    let mut bytes = [0; 5];
    mapped.read(0, &mut bytes);
    assert_eq!(&bytes, b"frame");
    assert!(!mapped.is_writable());
    // The descriptor itself forbids writing, whatever a client tries.
    let again = mapped.fd().try_clone_to_owned().expect("dup");
    assert!(SharedMemory::from_fd(again, 8192, true).is_err());
}

fn refusals_and_shutdown(link: LinkKind) {
    let dir = tempfile::tempdir().expect("dir");
    let (client, server) = (Half::new(Access::ALL), Half::new(Access::ALL));
    let listener: Arc<dyn Listener> = Arc::from(server.pd.listen(&endpoint(link, &dir)).expect("listen"));
    let bound = listener.endpoint();
    std::thread::scope(|scope| {
        scope.spawn(|| listener.accept().expect("accept").refuse("the pool is being checked"));
        let error = client.pd.connect(&bound, options(&client, 4, vec![])).err().expect("refused");
        assert!(
            matches!(&error, RdmaError::Refused { reason, .. } if reason.contains("being checked")),
            "{error}"
        );
    });
    assert!(matches!(server.pd.listen(&bound), Err(RdmaError::Io { .. })), "taken");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| listener.accept().err());
        std::thread::sleep(Duration::from_millis(50));
        listener.close();
        assert!(matches!(waiting.join().expect("thread"), Some(RdmaError::Closed)));
    });
    drop(listener);
    assert!(client.pd.connect(&bound, options(&client, 4, vec![])).is_err());
    let other = Half::new(Access::ALL);
    let foreign = ConnectOptions { qp: other.config(4), receives: vec![], timeout: PATIENCE };
    assert!(matches!(client.pd.connect(&bound, foreign), Err(RdmaError::Unsupported(_))));
}

macro_rules! suite {
    ($($name:ident),* $(,)?) => {
        mod shm { $(#[test] fn $name() { super::$name(super::LinkKind::Shm) })* }
        mod tcp { $(#[test] fn $name() { super::$name(super::LinkKind::Tcp) })* }
        mod unix { $(#[test] fn $name() { super::$name(super::LinkKind::Unix) })* }
    };
}

suite!(
    send_and_receive,
    one_sided,
    write_imm_and_atomics,
    order_and_silence,
    access_errors,
    silent_failure_is_heard,
    deregistered_memory_is_gone,
    many_registrations_stay_reachable,
    message_too_long,
    messages_wait_for_receives,
    queues_are_bounded,
    a_burst_larger_than_the_link_arrives,
    close_flushes_and_the_peer_notices,
    a_hundred_on_one_queue,
    ping_pong_loses_no_wake_up,
    two_threads_post_to_one_queue_pair,
    files_are_read_by_the_engine,
    windows_are_mapped_read_only,
    refusals_and_shutdown,
    flush_errors,
    a_flush_comes_after_earlier_writes_and_holds_up_completions_only,
    a_failed_device_fails_its_flush,
    a_refusal_waits_for_the_flush_before_it,
    a_connection_that_ends_forgets_its_flush,
    messages_are_flushed_where_they_land,
    real_devices_persist,
    a_target_that_closed_takes_no_flush,
);

#[test]
fn listening_beyond_this_machine_needs_a_word() {
    let open = Endpoint::Tcp { host: "0.0.0.0".into(), port: 0 };
    let refused = SoftDevice::new(SoftOptions::default()).alloc_pd().listen(&open).err().expect("refused");
    assert!(refused.to_string().contains("--insecure"), "{refused}");
    let device = SoftDevice::new(SoftOptions { allow_insecure_listen: true });
    assert!(device.alloc_pd().listen(&open).is_ok());
}

#[test]
fn a_socket_left_behind_is_replaced_and_another_file_is_not() {
    let dir = tempfile::tempdir().expect("dir");
    let path = dir.path().join("left.sock");
    drop(std::os::unix::net::UnixListener::bind(&path).expect("bind"));
    let device = SoftDevice::new(SoftOptions::default());
    assert!(device.alloc_pd().listen(&Endpoint::Unix(path)).is_ok());
    let file = dir.path().join("precious");
    std::fs::write(&file, "bytes").expect("write");
    assert!(device.alloc_pd().listen(&Endpoint::Shm(file.clone())).is_err());
    assert_eq!(std::fs::read(&file).expect("still there"), b"bytes");
}

/// Its own requests complete as they are posted, so each poll finds one; the ring must be looked at all the same.
#[test]
fn who_always_finds_a_completion_hears_of_messages_over_shm() {
    let pair =
        Pair::with(LinkKind::Shm, 16, Access::ALL, |client, _| [vec![client.receive(100, 0, 64)], vec![]]);
    let (client, server) = (&pair.client, &pair.server);
    let read = || pair.c().post_send(&[send(2, SendOp::Read(server.place(512)), client.mr.sge(64, 8))]);
    // The first one may have to hear of the memory.
    read().expect("post");
    ok(client.next(), 2, CompletionKind::Read, 8);
    pair.s().post_send(&[send(1, SendOp::Send, server.put(0, b"hello"))]).expect("post");
    ok(server.next(), 1, CompletionKind::Send, 5);
    for _ in 0..1000 {
        read().expect("post");
        let mut out = Vec::new();
        assert_eq!(client.cq.poll(&mut out, 1), 1, "a completion is there before the poll");
        if out[0].kind == CompletionKind::Recv {
            return ok(out[0], 100, CompletionKind::Recv, 5);
        }
        ok(out[0], 2, CompletionKind::Read, 8);
    }
    panic!("the message was never seen");
}
