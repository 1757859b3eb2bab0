//! FLUSH, over every link and in the simulated provider.

use super::*;
use cuttlefs_common::persist::{LogDevice, LogDeviceKind, Persistence, SyncFailed, WhenPersistent};
use cuttlefs_common::rdma::{FlushReach, Placement};
use std::sync::Mutex;

pub(super) fn flush(remote: Remote, len: u32, placement: Placement) -> SendOp {
    SendOp::Flush { remote, len, placement }
}

/// How far a FLUSH over this link can reach.
fn reach(link: LinkKind) -> FlushReach {
    Half::new(link, Access::ALL).device.capabilities().flush
}

pub(super) fn flush_errors(link: LinkKind) {
    use Placement::{Persistence, Visibility};
    let reach = reach(link);
    let no_flush = Access { remote_flush: false, ..Access::ALL };
    let wrong_key = Remote::Memory { rkey: Rkey(1), offset: 0 };
    let past = |server: &Half| Remote::Memory { rkey: server.mr.rkey(), offset: MEMORY_LEN as u64 - 8 };
    let file = Remote::File { filekey: FileKey(1), offset: 0 };
    for placement in [Visibility, Persistence] {
        // A FLUSH beyond the RNIC's reach is refused before it is sent. An RNIC without FLUSH sends a READ in its place, which needs no right to
        // FLUSH.
        let can = placement == Visibility || reach == FlushReach::Persistence;
        let access = if can { WcStatus::RemoteAccess } else { WcStatus::RemoteInvalid };
        refused(link, Access::ALL, |_| flush(wrong_key, 8, placement), 0, access);
        refused(link, Access::ALL, |server| flush(past(server), 9, placement), 0, access);
        if reach > FlushReach::None || !can {
            refused(link, no_flush, |server| flush(server.place(0), 8, placement), 0, access);
        }
        refused(link, Access::ALL, |_| flush(file, 8, placement), 0, WcStatus::RemoteInvalid);
        refused(link, Access::ALL, |server| flush(server.place(0), 8, placement), 8, WcStatus::LocalLength);
    }
    // A region without a persistence domain can be flushed for visibility only.
    let is_asked = link == LinkKind::Rdma && reach == FlushReach::Persistence;
    let status = if is_asked { WcStatus::RemoteAccess } else { WcStatus::RemoteInvalid };
    refused(link, Access::ALL, |server| flush(server.place(0), 8, Persistence), 0, status);
    let pair = Pair::new(link);
    let local = pair.client.put(0, b"visible!");
    let place = pair.server.place(64);
    pair.c()
        .post_send(&[send(1, SendOp::Write(place), local), send(2, flush(place, 8, Visibility), Sge::EMPTY)])
        .expect("post");
    ok(pair.client.next(), 1, CompletionKind::Write, 8);
    ok(pair.client.next(), 2, CompletionKind::Flush, 0);
    assert_eq!(pair.server.bytes(64, 8), b"visible!");
}

/// WRITEs, FLUSHes and READs of one doorbell complete in order, and an unsignaled FLUSH gives its place in the queue back.
pub(super) fn flushes_stand_among_other_requests(link: LinkKind) {
    let pair = Pair::new(link);
    for round in 0..40u64 {
        let local = pair.client.put(0, &round.to_le_bytes());
        let place = |offset: u64| pair.server.place(4096 + offset);
        let visible = |offset: u64| flush(place(offset), 8, Placement::Visibility);
        pair.c()
            .post_send(&[
                send(1, SendOp::Write(place(0)), local),
                SendWr { signaled: false, ..send(2, visible(0), Sge::EMPTY) },
                SendWr { signaled: false, ..send(3, SendOp::Write(place(64)), local) },
                send(4, visible(64), Sge::EMPTY),
                send(5, visible(0), Sge::EMPTY),
                send(6, SendOp::Read(place(64)), pair.client.mr.sge(128, 8)),
            ])
            .unwrap_or_else(|error| panic!("round {round}: {error}"));
        ok(pair.client.next(), 1, CompletionKind::Write, 8);
        ok(pair.client.next(), 4, CompletionKind::Flush, 0);
        ok(pair.client.next(), 5, CompletionKind::Flush, 0);
        ok(pair.client.next(), 6, CompletionKind::Read, 8);
        assert_eq!(pair.client.bytes(128, 8), round.to_le_bytes());
        assert_eq!(pair.server.bytes(4096, 8), round.to_le_bytes());
    }
    pair.client.nothing();
}

/// A region says how far a FLUSH of it reaches, and a FLUSH does that.
pub(super) fn a_region_says_how_far_it_is_flushed(link: LinkKind) {
    use Placement::{Persistence, Visibility};
    let dir = tempfile::tempdir().expect("dir");
    for kind in [None, Some(LogDeviceKind::PmemEmulated), Some(LogDeviceKind::File)] {
        let pair = Pair::new(link);
        let device =
            kind.map(|kind| LogDevice::open(&dir.path().join("log"), 65536, Some(kind)).expect("device"));
        let pd = &pair.server.pd;
        let region = match &device {
            None => pd.register(Arc::new(SharedMemory::new("plain", 65536).expect("memory")), Access::ALL),
            Some(device) => {
                pd.register_persistent(device.memory().clone(), Access::ALL, device.persistence().clone())
            }
        };
        let region = region.expect("registered");
        if link != LinkKind::Rdma {
            let is_log = kind.is_some();
            assert_eq!(
                region.flush_reach(),
                if is_log { FlushReach::Persistence } else { FlushReach::Visibility }
            );
        } else if kind != Some(LogDeviceKind::PmemEmulated) {
            assert!(region.flush_reach() <= FlushReach::Visibility, "no RNIC syncs files");
        }
        let place = Remote::Memory { rkey: region.rkey(), offset: 4096 };
        let write = send(1, SendOp::Write(place), pair.client.put(0, b"so far!!"));
        pair.c().post_send(&[write, send(2, flush(place, 8, Visibility), Sge::EMPTY)]).expect("post");
        std::thread::scope(|scope| {
            let _driver = Driver::start(scope, &pair.server);
            ok(pair.client.next(), 1, CompletionKind::Write, 8);
            ok(pair.client.next(), 2, CompletionKind::Flush, 0);
            pair.c().post_send(&[send(3, flush(place, 8, Persistence), Sge::EMPTY)]).expect("post");
            let completion = pair.client.next();
            if region.flush_reach().min(reach(link)) == FlushReach::Persistence {
                ok(completion, 3, CompletionKind::Flush, 0);
            } else {
                let refused = [WcStatus::RemoteInvalid, WcStatus::RemoteAccess];
                assert!(refused.contains(&completion.status), "{completion:?}");
            }
        });
    }
}

/// Polls the server's side, which a FLUSH of a file may need.
struct Driver(Arc<AtomicBool>);

impl Driver {
    fn start<'s, 'e>(scope: &'s std::thread::Scope<'s, 'e>, server: &'e Half) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = stop.clone();
        scope.spawn(move || {
            while !seen.load(Ordering::Relaxed) {
                server.cq.wait(Duration::from_millis(1));
            }
        });
        Self(stop)
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The first bytes of a region may be its owner's: peers can READ and FLUSH them, and can change them with neither of the region's keys.
pub(super) fn the_owners_bytes_are_not_the_peers(link: LinkKind) {
    let access = Access { own_bytes: 4096, ..Access::ALL };
    let pair = Pair::with(link, 16, access, |_, _| [vec![], vec![]]);
    pair.server.put(4088, b"owner's.peers'..");
    let region = &pair.server.mr;
    let by = |rkey, offset| Remote::Memory { rkey, offset };
    let reading = by(region.read_rkey(), 4088);
    pair.c()
        .post_send(&[
            send(1, SendOp::Read(reading), pair.client.mr.sge(0, 16)),
            send(2, flush(reading, 8, Placement::Visibility), Sge::EMPTY),
            send(3, SendOp::Write(by(region.rkey(), 4096)), pair.client.put(64, b"changed!")),
            send(4, flush(by(region.rkey(), 4096), 8, Placement::Visibility), Sge::EMPTY),
        ])
        .expect("post");
    ok(pair.client.next(), 1, CompletionKind::Read, 16);
    ok(pair.client.next(), 2, CompletionKind::Flush, 0);
    ok(pair.client.next(), 3, CompletionKind::Write, 8);
    ok(pair.client.next(), 4, CompletionKind::Flush, 0);
    assert_eq!(pair.client.bytes(0, 16), b"owner's.peers'..");
    assert_eq!(pair.server.bytes(4088, 16), b"owner's.changed!");
    // A message can land behind the owner's bytes.
    pair.s().post_recv(&[pair.server.receive(7, 8192, 8)]).expect("receive");
    pair.c().post_send(&[send(5, SendOp::Send, pair.client.put(64, b"message!"))]).expect("post");
    ok(pair.server.next(), 7, CompletionKind::Recv, 8);
    assert_eq!(pair.server.bytes(8192, 8), b"message!");
    // Over shm the peer maps the memory and is its own RNIC: nothing refuses its WRITEs.
    if !has(link, Ability::GuardsOwnBytes, link != LinkKind::Shm) {
        return;
    }
    let writes = [
        |server: &Half| (server.mr.rkey(), 0),
        |server: &Half| (server.mr.rkey(), 4092),
        |server: &Half| (server.mr.read_rkey(), 0),
    ];
    for key_and_place in writes {
        let write = |server: &Half| {
            let (rkey, offset) = key_and_place(server);
            SendOp::Write(by(rkey, offset))
        };
        refused(link, access, write, 8, WcStatus::RemoteAccess);
    }
    refused(
        link,
        access,
        |server| SendOp::FetchAdd { remote: by(server.mr.read_rkey(), 8), add: 1 },
        8,
        WcStatus::RemoteAccess,
    );
}

/// A FLUSH by hardware to a device of persistent memory: the bytes are there when the device is opened again.
#[cfg(feature = "verbs")]
#[test]
#[ignore = "wants an RNIC and a device of persistent memory"]
fn a_device_of_persistent_memory_is_flushed() {
    use cuttlefs_common::persist::DaxDevice;
    let path = std::env::var_os("CUTTLEFS_DAX_DEVICE").expect("CUTTLEFS_DAX_DEVICE names it");
    let link = LinkKind::Rdma;
    let pair = Pair::new(link);
    let device = DaxDevice::open(path.as_ref()).expect("the device");
    let log = device.open_log(0xda, 1 << 20).expect("a log");
    let region = pair
        .server
        .pd
        .register_persistent(log.memory().clone(), Access::ALL, log.persistence().clone())
        .expect("registered");
    assert_eq!(region.flush_reach(), FlushReach::Persistence);
    let place = Remote::Memory { rkey: region.rkey(), offset: 5000 };
    let write = send(1, SendOp::Write(place), pair.client.put(0, b"persist!"));
    pair.c().post_send(&[write, send(2, flush(place, 8, Placement::Persistence), Sge::EMPTY)]).expect("post");
    ok(pair.client.next(), 1, CompletionKind::Write, 8);
    let flushed = pair.client.next();
    if reach(link) == FlushReach::Persistence {
        ok(flushed, 2, CompletionKind::Flush, 0);
    } else {
        // An older libibverbs has no FLUSH.
        bad(flushed, 2, WcStatus::RemoteInvalid);
    }
    drop((pair, region, log, device));
    let device = DaxDevice::open(path.as_ref()).expect("the device again");
    let mut bytes = [0; 8];
    device.open_log(0xda, 1 << 20).expect("the log").memory().read(5000, &mut bytes);
    assert_eq!(&bytes, b"persist!");
}

/// A persistence domain that notes the bytes of each flush, and completes the flushes when the test tells it to.
#[derive(Default)]
struct Slow {
    seen: Mutex<Vec<Vec<u8>>>,
    waiting: Mutex<Vec<WhenPersistent>>,
}

impl Persistence for Slow {
    fn by_cache_lines(&self) -> bool {
        false
    }

    fn persist(&self, memory: &SharedMemory, offset: usize, len: usize, done: WhenPersistent) {
        let mut bytes = vec![0; len];
        memory.read(offset, &mut bytes);
        self.seen.lock().expect("no panic").push(bytes);
        self.waiting.lock().expect("no panic").push(done);
    }
}

impl Slow {
    fn finish(&self, result: Result<(), SyncFailed>) {
        let waiting = std::mem::take(&mut *self.waiting.lock().expect("no panic"));
        waiting.into_iter().for_each(|done| done(result));
    }

    /// Waits until `count` flushes have arrived. Polls both sides, since some links need that.
    fn asked(&self, pair: &Pair, count: usize) {
        let deadline = Instant::now() + PATIENCE;
        while self.waiting.lock().expect("no panic").len() < count {
            assert!(Instant::now() < deadline, "nobody asked");
            pair.server.cq.wait(Duration::from_millis(1));
            pair.server.cq.poll(&mut Vec::new(), 0);
            pair.client.cq.wait(Duration::from_millis(1));
        }
    }
}

pub(super) fn persistent(pair: &Pair, domain: Arc<dyn Persistence>) -> Arc<dyn MemoryRegion> {
    let memory = Arc::new(SharedMemory::new("log", 65536).expect("memory"));
    pair.server.pd.register_persistent(memory, Access::ALL, domain).expect("register")
}

pub(super) fn a_flush_comes_after_earlier_writes_and_holds_up_completions_only(link: LinkKind) {
    let pair = Pair::new(link);
    let slow = Arc::new(Slow::default());
    let log = persistent(&pair, slow.clone());
    let place = |offset| Remote::Memory { rkey: log.rkey(), offset };
    let persist = |id, offset| send(id, flush(place(offset), 8, Placement::Persistence), Sge::EMPTY);
    pair.c()
        .post_send(&[
            send(1, SendOp::Write(place(0)), pair.client.put(0, b"earlier.")),
            persist(2, 0),
            send(3, SendOp::Write(place(8)), pair.client.put(8, b"later...")),
            persist(4, 8),
            send(5, SendOp::Read(place(8)), pair.client.mr.sge(64, 8)),
        ])
        .expect("post");
    slow.asked(&pair, 2);
    assert_eq!(*slow.seen.lock().expect("no panic"), [b"earlier.".to_vec(), b"later...".to_vec()]);
    ok(pair.client.next(), 1, CompletionKind::Write, 8);
    // The second WRITE and the READ were executed, but their completions wait for the first FLUSH.
    pair.client.nothing();
    slow.finish(Ok(()));
    ok(pair.client.next(), 2, CompletionKind::Flush, 0);
    ok(pair.client.next(), 3, CompletionKind::Write, 8);
    ok(pair.client.next(), 4, CompletionKind::Flush, 0);
    ok(pair.client.next(), 5, CompletionKind::Read, 8);
    assert_eq!(pair.client.bytes(64, 8), b"later...");
}

pub(super) fn a_failed_device_fails_its_flush(link: LinkKind) {
    let pair = Pair::new(link);
    let slow = Arc::new(Slow::default());
    let log = persistent(&pair, slow.clone());
    let place = Remote::Memory { rkey: log.rkey(), offset: 0 };
    pair.c()
        .post_send(&[
            send(1, flush(place, 8, Placement::Persistence), Sge::EMPTY),
            send(2, SendOp::Read(place), pair.client.mr.sge(0, 8)),
        ])
        .expect("post");
    slow.asked(&pair, 1);
    slow.finish(Err(SyncFailed));
    bad(pair.client.next(), 1, WcStatus::RemoteOperation);
    bad(pair.client.next(), 2, WcStatus::Flushed);
    assert_eq!(pair.c().state(), QpState::Error);
    pair.settle_server();
}

pub(super) fn a_refusal_waits_for_the_flush_before_it(link: LinkKind) {
    let pair = Pair::new(link);
    let slow = Arc::new(Slow::default());
    let log = persistent(&pair, slow.clone());
    let place = Remote::Memory { rkey: log.rkey(), offset: 0 };
    let wrong = Remote::Memory { rkey: Rkey(1), offset: 0 };
    pair.c()
        .post_send(&[
            send(1, flush(place, 8, Placement::Persistence), Sge::EMPTY),
            send(2, SendOp::Read(wrong), pair.client.mr.sge(0, 8)),
            send(3, SendOp::Write(place), pair.client.put(0, b"never!!!")),
        ])
        .expect("post");
    slow.asked(&pair, 1);
    slow.finish(Ok(()));
    ok(pair.client.next(), 1, CompletionKind::Flush, 0);
    bad(pair.client.next(), 2, WcStatus::RemoteAccess);
    bad(pair.client.next(), 3, WcStatus::Flushed);
    pair.settle_server();
    let mut bytes = [0; 8];
    log.memory().read(0, &mut bytes);
    assert_eq!(bytes, [0; 8]);
}

pub(super) fn a_connection_that_ends_forgets_its_flush(link: LinkKind) {
    let mut pair = Pair::new(link);
    let slow = Arc::new(Slow::default());
    let log = persistent(&pair, slow.clone());
    let place = Remote::Memory { rkey: log.rkey(), offset: 0 };
    pair.c().post_send(&[send(1, flush(place, 8, Placement::Persistence), Sge::EMPTY)]).expect("post");
    slow.asked(&pair, 1);
    pair.c().close();
    bad(pair.client.next(), 1, WcStatus::Flushed);
    pair.settle_server();
    slow.finish(Ok(()));
    pair.server_qp = None;
    slow.finish(Ok(()));
    pair.client.nothing();
}

/// Messages that land in a log's memory are flushed as WRITEs are.
pub(super) fn messages_are_flushed_where_they_land(link: LinkKind) {
    let pair = Pair::new(link);
    let slow = Arc::new(Slow::default());
    let log = persistent(&pair, slow.clone());
    pair.s().post_recv(&[RecvWr { wr_id: WrId(7), local: log.sge(128, 64).into() }]).expect("receive");
    let place = Remote::Memory { rkey: log.rkey(), offset: 128 };
    pair.c()
        .post_send(&[
            send(1, SendOp::Send, pair.client.put(0, b"message.")),
            send(2, flush(place, 8, Placement::Persistence), Sge::EMPTY),
        ])
        .expect("post");
    slow.asked(&pair, 1);
    assert_eq!(*slow.seen.lock().expect("no panic"), [b"message.".to_vec()]);
    slow.finish(Ok(()));
    ok(pair.client.next(), 1, CompletionKind::Send, 8);
    ok(pair.client.next(), 2, CompletionKind::Flush, 0);
}

/// A FLUSH behind messages that find no receive is no failure of the device: it waits until receives are posted.
pub(super) fn a_flush_waits_for_messages_without_a_place(link: LinkKind) {
    let pair = Pair::new(link);
    let slow = Arc::new(Slow::default());
    let log = persistent(&pair, slow.clone());
    let place = |offset| Remote::Memory { rkey: log.rkey(), offset };
    pair.c()
        .post_send(&[
            send(1, SendOp::Send, pair.client.put(0, b"message1")),
            send(2, flush(place(128), 8, Placement::Persistence), Sge::EMPTY),
            send(3, SendOp::Send, pair.client.put(8, b"message2")),
            send(4, flush(place(256), 8, Placement::Visibility), Sge::EMPTY),
            send(5, SendOp::Read(place(256)), pair.client.mr.sge(64, 8)),
        ])
        .expect("post");
    // The link has taken the first message.
    ok(pair.client.next(), 1, CompletionKind::Send, 8);
    pair.client.nothing();
    assert!(slow.waiting.lock().expect("no panic").is_empty(), "what is to be flushed is not there");
    for (id, offset) in [(7, 128), (8, 256)] {
        pair.s()
            .post_recv(&[RecvWr { wr_id: WrId(id), local: log.sge(offset, 64).into() }])
            .expect("receive");
        slow.asked(&pair, 1);
    }
    assert_eq!(*slow.seen.lock().expect("no panic"), [b"message1".to_vec()]);
    slow.finish(Ok(()));
    ok(pair.client.next(), 2, CompletionKind::Flush, 0);
    ok(pair.client.next(), 3, CompletionKind::Send, 8);
    ok(pair.client.next(), 4, CompletionKind::Flush, 0);
    ok(pair.client.next(), 5, CompletionKind::Read, 8);
}

/// Over some links the initiator flushes by itself. Nobody uses the memory of a closed target any more, so a FLUSH must fail there.
pub(super) fn a_target_that_closed_takes_no_flush(link: LinkKind) {
    let mut pair = Pair::new(link);
    let dir = tempfile::tempdir().expect("dir");
    let device =
        LogDevice::open(&dir.path().join("log"), 4096, Some(LogDeviceKind::PmemEmulated)).expect("device");
    let log = pair
        .server
        .pd
        .register_persistent(device.memory().clone(), Access::ALL, device.persistence().clone())
        .expect("register");
    let place = Remote::Memory { rkey: log.rkey(), offset: 0 };
    let is_far = log.flush_reach().min(reach(link)) == FlushReach::Persistence;
    let placement = if is_far { Placement::Persistence } else { Placement::Visibility };
    let persist = |id| {
        let mut write = send(1, SendOp::Write(place), pair.client.put(0, b"written."));
        write.signaled = false;
        [write, send(id, flush(place, 8, placement), Sge::EMPTY)]
    };
    // This FLUSH makes the region known to the client, so that later only the FLUSH itself can notice the end.
    pair.c().post_send(&persist(2)).expect("post");
    ok(pair.client.next(), 2, CompletionKind::Flush, 0);
    let late = persist(3);
    pair.server_qp = None;
    // The client has not polled since, so it does not know of the end yet.
    if pair.c().post_send(&late).is_ok() {
        let completion = pair.client.next();
        assert_ne!(completion.status, WcStatus::Success, "{completion:?}");
    }
    assert_eq!(pair.c().state(), QpState::Error);
}

/// Flushes of real devices: persistent memory, and a file whose syncs many flushes share.
pub(super) fn real_devices_persist(link: LinkKind) {
    let pair = Pair::new(link);
    let dir = tempfile::tempdir().expect("dir");
    for (name, kind) in [("pmem", LogDeviceKind::PmemEmulated), ("file", LogDeviceKind::File)] {
        let path = dir.path().join(name);
        let device = LogDevice::open(&path, 65536, Some(kind)).expect("device");
        let log = pair
            .server
            .pd
            .register_persistent(device.memory().clone(), Access::ALL, device.persistence().clone())
            .expect("register");
        let place = |offset| Remote::Memory { rkey: log.rkey(), offset };
        let driving = AtomicBool::new(true);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while driving.load(Ordering::Relaxed) {
                    pair.server.cq.wait(Duration::from_millis(1));
                }
            });
            for round in 0..4u64 {
                let bytes = [round as u8 + 1; 100];
                let local = pair.client.put(0, &bytes);
                let mut write = send(1, SendOp::Write(place(round * 5000 + 3)), local);
                write.signaled = false;
                let persist = flush(place(round * 5000), 200, Placement::Persistence);
                pair.c().post_send(&[write, send(2, persist, Sge::EMPTY)]).expect("post");
                ok(pair.client.next(), 2, CompletionKind::Flush, 0);
                let file = std::fs::read(&path).expect("read");
                assert_eq!(file[round as usize * 5000 + 3..][..100], bytes, "{name}");
            }
            driving.store(false, Ordering::Relaxed);
        });
    }
}

/// The simulated provider flushes by the same rules, within one thread.
#[test]
fn the_simulated_rnic_flushes_too() {
    use cuttlefs_common::rdma::sim::{SimNetwork, Translation, clear_pump, set_pump};
    let network = SimNetwork::new(Translation::Target);
    let (client, server) = (network.device(), network.device());
    let (client_pd, server_pd) = (client.alloc_pd().expect("a domain"), server.alloc_pd().expect("a domain"));
    let endpoint = Endpoint::Unix("sim".into());
    let listener = server_pd.listen(&endpoint).expect("listen");
    let server_cq = server.create_cq(8).expect("cq");
    let client_cq = client.create_cq(8).expect("cq");
    let config = |cq: &Arc<dyn CompletionQueue>| QpConfig::new(cq, 8, 8);
    let dir = tempfile::tempdir().expect("dir");
    let device =
        LogDevice::open(&dir.path().join("log"), 4096, Some(LogDeviceKind::PmemEmulated)).expect("device");
    let log = server_pd
        .register_persistent(device.memory().clone(), Access::ALL, device.persistence().clone())
        .expect("register");
    let plain = server_pd
        .register(Arc::new(SharedMemory::new("plain", 4096).expect("memory")), Access::ALL)
        .expect("register");
    let local = client_pd
        .register(Arc::new(SharedMemory::new("local", 4096).expect("memory")), Access::ALL)
        .expect("register");
    local.memory().write(0, b"simulate");
    let (pumped_config, qps) = (config(&server_cq), Arc::new(Mutex::new(Vec::new())));
    let kept = qps.clone();
    set_pump(move || {
        if let Ok(incoming) = listener.accept() {
            kept.lock().expect("no panic").push(incoming.accept(pumped_config.clone(), vec![]));
        }
        false
    });
    let connect = || {
        let options = ConnectOptions { qp: config(&client_cq), receives: vec![], timeout: PATIENCE };
        client_pd.connect(&endpoint, options).expect("connect").qp
    };
    let place = |region: &Arc<dyn MemoryRegion>| Remote::Memory { rkey: region.rkey(), offset: 0 };
    let qp = connect();
    qp.post_send(&[
        send(1, SendOp::Write(place(&log)), local.sge(0, 8)),
        send(2, flush(place(&log), 8, Placement::Persistence), Sge::EMPTY),
        send(3, flush(place(&plain), 8, Placement::Visibility), Sge::EMPTY),
        send(4, flush(place(&plain), 8, Placement::Persistence), Sge::EMPTY),
    ])
    .expect("post");
    ok(next_of(&*client_cq), 1, CompletionKind::Write, 8);
    ok(next_of(&*client_cq), 2, CompletionKind::Flush, 0);
    ok(next_of(&*client_cq), 3, CompletionKind::Flush, 0);
    bad(next_of(&*client_cq), 4, WcStatus::RemoteInvalid);
    assert_eq!(&std::fs::read(dir.path().join("log")).expect("read")[..8], b"simulate");
    let qp = connect();
    qp.post_send(&[send(5, flush(place(&log), 4097, Placement::Persistence), Sge::EMPTY)]).expect("post");
    bad(next_of(&*client_cq), 5, WcStatus::RemoteAccess);
    clear_pump();
}
