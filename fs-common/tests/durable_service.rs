//! What a service may ask of its receiver: heads behind a settlement, requests kept, senders held back, connections ended.

use cuttlefs_common::ids::ClientId;
use cuttlefs_common::persist::LogDeviceKind;
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions};
use cuttlefs_common::rdma::{ConnectOptions, Device as _, Endpoint, PeerIdentity, QpConfig, QpState};
use cuttlefs_common::rpc::durable::{
    CONNECTIONS_MAX, CONNECTIONS_OF_PEER, Executed, Kind, Receiver, ReceiverOptions, Request, RingStore,
    Sender, SenderError, SenderIdentity, Service, ServiceFuture, Settings, Wants, Work,
};
use std::future::ready;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

const CLIENT: ClientId = ClientId(0xbeef);
const PATIENCE: Duration = Duration::from_secs(30);
/// A request that cannot be done for now.
const STUCK: &[u8] = b"stuck";
const JUNK: &[u8] = b"junk";

/// Does requests on a thread of its own.
#[derive(Default)]
struct Careful {
    done: Mutex<Vec<(u64, Vec<u8>)>>,
    settled: AtomicUsize,
    stuck: AtomicBool,
    cannot_settle: AtomicBool,
    short: AtomicBool,
    feed: Mutex<Option<mpsc::Sender<Work>>>,
}

impl Careful {
    fn new() -> Arc<Self> {
        let (feed, queue) = mpsc::channel::<Work>();
        let this = Arc::new(Self { feed: Mutex::new(Some(feed)), ..Self::default() });
        let doing = this.clone();
        std::thread::spawn(move || {
            for work in queue {
                let mut answer = Vec::new();
                let executed = doing.execute(&work.request(), &mut answer);
                work.finish(executed, &answer);
            }
        });
        this
    }

    fn done(&self) -> Vec<(u64, Vec<u8>)> {
        self.done.lock().expect("no panic").clone()
    }
}

impl Service for Careful {
    fn lane(&self, _: &[u8]) -> u64 {
        0
    }

    fn execute(&self, request: &Request<'_>, answer: &mut Vec<u8>) -> Executed {
        assert_eq!(request.client, CLIENT);
        if request.body == STUCK && self.stuck.load(Ordering::Relaxed) {
            return Executed::Kept(9);
        }
        let mut done = self.done.lock().expect("no panic");
        if done.last().is_none_or(|(last, _)| *last < request.seq) {
            done.push((request.seq, request.body.to_vec()));
        }
        answer.extend_from_slice(request.body);
        Executed::Done(0)
    }

    fn admit(&self, sender: &SenderIdentity, _: &PeerIdentity) -> Result<(), String> {
        if sender.client == CLIENT { Ok(()) } else { Err("nobody knows it".to_owned()) }
    }

    fn check(&self, _: ClientId, body: &[u8]) -> Result<(), String> {
        if body == JUNK { Err("junk".to_owned()) } else { Ok(()) }
    }

    fn take_over(&self, work: Work) -> Option<Work> {
        let feed = self.feed.lock().expect("no panic");
        feed.as_ref().expect("it runs").send(work).expect("its thread runs");
        None
    }

    fn last_done(&self, _: ClientId) -> u64 {
        self.done.lock().expect("no panic").last().map_or(0, |(last, _)| *last)
    }

    fn holds_back(&self, _: ClientId) -> bool {
        self.short.load(Ordering::Relaxed)
    }

    fn settle(&self) -> ServiceFuture<'_, Result<(), String>> {
        self.settled.fetch_add(1, Ordering::Relaxed);
        let cannot = self.cannot_settle.load(Ordering::Relaxed);
        Box::pin(ready(if cannot { Err("it cannot".to_owned()) } else { Ok(()) }))
    }
}

struct Site {
    dir: tempfile::TempDir,
    device: LogDeviceKind,
    service: Arc<Careful>,
}

impl Site {
    fn new(device: LogDeviceKind) -> Self {
        let dir = tempfile::Builder::new().prefix("careful").tempdir_in("/var/tmp").expect("dir");
        Self { dir, device, service: Careful::new() }
    }

    fn rings(&self) -> PathBuf {
        self.dir.path().join("rings")
    }

    fn store(&self) -> RingStore {
        RingStore::new(&self.rings(), Some(self.device)).expect("store")
    }

    fn start(&self) -> Running {
        let device = SoftDevice::new(SoftOptions::default());
        let endpoints =
            [Endpoint::Shm(self.dir.path().join("shm")), Endpoint::Tcp { host: "127.0.0.1".into(), port: 0 }];
        let options = ReceiverOptions { slow_beyond: 64, settles: true, ..ReceiverOptions::default() };
        let receiver = Receiver::serve(&*device, &endpoints, self.store(), self.service.clone(), options);
        Running { receiver: receiver.expect("started"), _device: device }
    }

    fn held(&self) -> u64 {
        RingStore::look(&self.rings()).expect("readable")
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        // Its thread ends.
        self.service.feed.lock().expect("no panic").take();
    }
}

struct Running {
    receiver: Receiver,
    _device: Arc<SoftDevice>,
}

impl Running {
    fn connect(&self, link: usize, kind: Kind) -> Result<Sender, SenderError> {
        let device = SoftDevice::new(SoftOptions::default());
        let settings = Settings { depth: 64, answers: 64, ..Settings::new(kind, 1000, 1000) };
        Sender::connect(device, &self.receiver.endpoints()[link], CLIENT, settings)
    }
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn everywhere(test: impl Fn(&Site, usize, Kind)) {
    for device in [LogDeviceKind::PmemEmulated, LogDeviceKind::File] {
        for link in [0, 1] {
            for kind in Kind::ALL {
                test(&Site::new(device), link, kind);
            }
        }
    }
}

#[test]
fn heads_move_behind_settlements_and_every_link_is_served() {
    everywhere(|site, link, kind| {
        let running = site.start();
        let mut sender = running.connect(link, kind).expect("connected");
        let mut answer = Vec::new();
        for index in 0..300u32 {
            let ticket = sender.post(&index.to_be_bytes(), Wants::Answer).expect("posted");
            assert_eq!(sender.wait_answer(ticket, &mut answer).expect("answered"), 0);
            assert_eq!(answer, index.to_be_bytes());
            answer.clear();
        }
        // Its thread may not have run before the last answer.
        wait_until("the heads move when nothing more comes", || site.held() == 0);
        let settled = site.service.settled.load(Ordering::Relaxed);
        assert!((1..300).contains(&settled), "{settled} settlements for 300 requests");
        drop((sender, running));
        assert_eq!(site.service.done().len(), 300);
    });
}

#[test]
fn who_comes_back_hears_what_was_done_of_what_he_posted() {
    everywhere(|site, link, kind| {
        let running = site.start();
        let mut sender = running.connect(link, kind).expect("connected");
        assert_eq!(sender.last_done(), 0);
        for index in 0..5u32 {
            sender.post(&index.to_be_bytes(), Wants::Persistence).expect("posted");
        }
        // The last ones may be on their way, and nobody waits for them.
        drop(sender);
        let mut sender = running.connect(link, kind).expect("connected again");
        let done = sender.last_done();
        assert!(done <= 5 && site.service.done().len() as u64 == done, "{done} done");
        sender.count_from(done);
        let ticket = sender.post(b"next", Wants::Answer).expect("posted");
        sender.wait_answer(ticket, &mut Vec::new()).expect("answered");
        assert_eq!(site.service.done().last(), Some(&(done + 1, b"next".to_vec())));
    });
}

#[test]
fn what_a_receiver_lets_go_is_executed_and_its_connection_ends() {
    everywhere(|site, link, kind| {
        let running = site.start();
        let mut sender = running.connect(link, kind).expect("connected");
        for index in 0..20u32 {
            let ticket = sender.post(&index.to_be_bytes(), Wants::Persistence).expect("posted");
            sender.wait_persistent(ticket).expect("persistent");
        }
        let (done, wait) = mpsc::channel();
        running.receiver.retire(CLIENT, true, Box::new(move |gone| done.send(gone).expect("awaited")));
        wait.recv_timeout(PATIENCE).expect("let go");
        assert_eq!(site.service.done().len(), 20);
        assert_eq!(std::fs::read_dir(site.rings()).expect("dir").count(), 0, "the ring went");
        wait_until("the connection ended", || sender.is_slowed().is_err());
        // The next one is new, and numbers go on.
        let mut sender = running.connect(link, kind).expect("connected");
        assert_eq!(sender.last_done(), 20);
        sender.count_from(20);
        let ticket = sender.post(b"more", Wants::Answer).expect("posted");
        assert_eq!(ticket.number(), 21);
        sender.wait_answer(ticket, &mut Vec::new()).expect("answered");
        running.receiver.finish();
        assert_eq!((site.held(), site.service.done().len()), (0, 21));
    });
}

#[test]
fn what_cannot_be_done_is_kept_until_it_can() {
    everywhere(|site, link, kind| {
        let running = site.start();
        site.service.stuck.store(true, Ordering::Relaxed);
        let mut sender = running.connect(link, kind).expect("connected");
        let before = sender.post(b"before", Wants::Answer).expect("posted");
        let stuck = sender.post(STUCK, Wants::Answer).expect("posted");
        assert_eq!(sender.wait_answer(before, &mut Vec::new()).expect("answered"), 0);
        assert_eq!(sender.wait_answer(stuck, &mut Vec::new()).expect("answered"), 9);
        assert_eq!(running.receiver.figures().kept, 1);
        wait_until("what was before it goes", || site.held() == 1);
        drop(sender);
        assert!(matches!(running.connect(link, kind).err(), Some(SenderError::Refused)));
        drop(running);
        let found = site.store().found(CLIENT).expect("readable").expect("it holds something");
        assert!(found.requests().map(|request| (request.seq, request.body)).eq([(2, STUCK)]));
        drop(found);
        site.service.stuck.store(false, Ordering::Relaxed);
        let running = site.start();
        // It is done for the next hello.
        let sender = running.connect(link, kind).expect("connected");
        assert_eq!(site.service.done().len(), 2);
        drop((sender, running));
    });
}

#[test]
fn who_is_held_back_hears_it_first() {
    everywhere(|site, link, kind| {
        site.service.short.store(true, Ordering::Relaxed);
        let running = site.start();
        let mut sender = running.connect(link, kind).expect("connected");
        assert!(sender.is_slowed().expect("connected"), "with the welcome");
        site.service.short.store(false, Ordering::Relaxed);
        wait_until("it may go on", || !sender.is_slowed().expect("connected"));
        let ticket = sender.post(b"one", Wants::Answer).expect("posted");
        site.service.short.store(true, Ordering::Relaxed);
        if sender.wait_answer(ticket, &mut Vec::new()).is_ok() && site.service.done().len() == 1 {
            // It may have been executed before it was short; the next is not.
            if !sender.is_slowed().expect("connected") {
                let ticket = sender.post(b"two", Wants::Answer).expect("posted");
                sender.wait_answer(ticket, &mut Vec::new()).expect("answered");
            }
        }
        assert!(sender.is_slowed().expect("connected"), "before the answer");
        assert!(running.receiver.figures().slowed >= 2);
        assert_eq!(running.receiver.figures().slow_senders, 1);
        drop((sender, running));
    });
}

#[test]
fn nonsense_and_strangers_are_turned_away() {
    everywhere(|site, link, kind| {
        let running = site.start();
        let device = SoftDevice::new(SoftOptions::default());
        let endpoint = &running.receiver.endpoints()[link];
        let stranger = Sender::connect(device, endpoint, ClientId(1), Settings::new(kind, 1000, 1000));
        assert!(matches!(stranger.err(), Some(SenderError::Refused)));
        let mut sender = running.connect(link, kind).expect("connected");
        sender.post(JUNK, Wants::Answer).expect("posted");
        wait_until("the connection ended", || sender.is_slowed().is_err());
        drop((sender, running));
    });
}

/// As many as there are places connect and never say hello.
#[test]
fn who_says_nothing_keeps_no_place() {
    let site = Site::new(LogDeviceKind::PmemEmulated);
    for link in [0, 1] {
        let running = site.start();
        let device = SoftDevice::new(SoftOptions::default());
        let (pd, cq) = (device.alloc_pd(), device.create_cq(4096).expect("a queue"));
        let connect = || {
            let qp = QpConfig { send_cq: cq.clone(), recv_cq: cq.clone(), send_depth: 4, recv_depth: 4 };
            let options = ConnectOptions { qp, receives: Vec::new(), timeout: PATIENCE };
            pd.connect(&running.receiver.endpoints()[link], options).map(|connected| connected.qp)
        };
        let mut mute = Vec::new();
        // More than there are places, should some be closed meanwhile.
        while mute.len() < 4 * CONNECTIONS_MAX
            && let Ok(qp) = connect()
        {
            mute.push(qp);
        }
        assert!(mute.len() >= CONNECTIONS_OF_PEER, "{} places", mute.len());
        let mut sender = None;
        wait_until("a place for who speaks", || {
            sender = running.connect(link, Kind::WFlush).ok();
            sender.is_some()
        });
        wait_until("those who say nothing are closed", || {
            running.receiver.figures().silent == mute.len() as u64
        });
        wait_until("they see it", || {
            // Over shared memory who looks hears.
            cq.poll(&mut Vec::new(), 64);
            mute.iter().all(|qp| qp.state() != QpState::ReadyToSend)
        });
        assert!(!sender.expect("connected").is_slowed().expect("who spoke stays"));
        drop(running);
    }
}

#[test]
fn a_service_that_cannot_settle_loses_its_senders_and_nothing_else() {
    everywhere(|site, link, kind| {
        let running = site.start();
        site.service.cannot_settle.store(true, Ordering::Relaxed);
        let mut sender = running.connect(link, kind).expect("connected");
        let ticket = sender.post(b"executed", Wants::Answer).expect("posted");
        // The answer may or may not be out by then.
        let _ = sender.wait_answer(ticket, &mut Vec::new());
        wait_until("the connection ended", || sender.is_slowed().is_err());
        assert_eq!(site.held(), 1, "what is not durable stays");
        drop((sender, running));
    });
}
