//! Durable RPC over every link, of every kind, on persistent memory (emulated) and on a synced file.
//!
//! The tests over an RNIC (feature `verbs`) are ignored by default. The environment variable `CUTTLEFS_RDMA_ADDRESS` names the RNIC by an address of
//! its interface. With `CUTTLEFS_DAX_DEVICE` (such as `/dev/dax0.0`) the rings lie on that device, too, and its contents are lost.

use cuttlefs_common::ids::{ClientId, LogSeq};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::persist::LogDeviceKind;
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions};
use cuttlefs_common::rdma::{
    Access, CompletionQueue, Device, Endpoint, FlushReach, LinkKind, Listener, ProtectionDomain, QpConfig,
    RecvWr, SendOp, SendWr, WcStatus, WrId,
};
use cuttlefs_common::redo::LogId;
use cuttlefs_common::rpc::durable::{
    Kind, MESSAGE_LEN, Message, Receiver, ReceiverOptions, Request, RingStore, Sender, SenderError, Service,
    Settings, Wants,
};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

const CLIENT: ClientId = ClientId(0xc0ffee);

/// A service that notes what it executed, and can be held up.
#[derive(Default)]
struct Notes {
    state: Mutex<State>,
    moved: Condvar,
}

#[derive(Default)]
struct State {
    held: bool,
    /// The bodies of executed requests, each once: a repetition is recognised by its log and number.
    done: Vec<Vec<u8>>,
    seen: HashSet<(u64, u64)>,
    executions: usize,
}

impl Service for Notes {
    fn lane(&self, body: &[u8]) -> u64 {
        body.first().copied().unwrap_or(0).into()
    }

    fn execute(&self, request: &Request<'_>, answer: &mut Vec<u8>) -> u32 {
        let Request { client, log, lsn, body, .. } = *request;
        assert_eq!(client, CLIENT);
        let mut state = self.state.lock().expect("no panic");
        while state.held {
            state = self.moved.wait(state).expect("no panic");
        }
        state.executions += 1;
        if state.seen.insert((log.0, lsn.0)) {
            state.done.push(body.to_vec());
        }
        answer.extend(body.iter().rev());
        body.len() as u32
    }
}

impl Notes {
    fn hold(&self, held: bool) {
        self.state.lock().expect("no panic").held = held;
        self.moved.notify_all();
    }

    fn done(&self) -> Vec<Vec<u8>> {
        self.state.lock().expect("no panic").done.clone()
    }

    fn wait_for(&self, count: usize) {
        for _ in 0..6000 {
            if self.done().len() >= count {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("{} of {count} requests were executed", self.done().len());
    }
}

struct Site {
    dir: PathBuf,
    _dir: Option<tempfile::TempDir>,
    link: LinkKind,
    device: LogDeviceKind,
    notes: Arc<Notes>,
    /// Held by the one test that uses the device of persistent memory.
    _alone: Option<MutexGuard<'static, ()>>,
}

static DAX_DEVICE: Mutex<()> = Mutex::new(());

/// The device of persistent memory to test on.
fn dax_device() -> Option<PathBuf> {
    std::env::var_os("CUTTLEFS_DAX_DEVICE").map(PathBuf::from)
}

/// Makes the device look as if nothing was ever written to it.
fn clear(dax: &Path) {
    let device = std::fs::File::options().read(true).write(true).open(dax).expect("the device");
    let memory = SharedMemory::map_persistent(device.into(), 2 << 20, 0, true).expect("mapped");
    memory.fill(0, memory.len(), 0);
}

/// An RNIC for a link.
fn rnic(link: LinkKind) -> Arc<dyn Device> {
    match link {
        #[cfg(feature = "verbs")]
        LinkKind::Rdma => {
            use cuttlefs_common::rdma::soft::TcpSecurity;
            let device = cuttlefs_common::rdma::verbs_provider::VerbsDevice::to_listen(
                &rdma_endpoint(),
                TcpSecurity::Insecure,
            );
            device.expect("an RNIC")
        }
        _ => SoftDevice::new(SoftOptions::default()),
    }
}

#[cfg(feature = "verbs")]
fn rdma_endpoint() -> Endpoint {
    let host = std::env::var("CUTTLEFS_RDMA_ADDRESS")
        .expect("CUTTLEFS_RDMA_ADDRESS says which RNIC: an address of its interface");
    Endpoint::Rdma { host, port: 0, via: None }
}

impl Site {
    fn new(link: LinkKind, device: LogDeviceKind) -> Self {
        // Rings lie on a real disk, since syncs of tmpfs would test nothing. But an RNIC cannot register a mapped file of a disk.
        let is_pinned = link == LinkKind::Rdma && device == LogDeviceKind::PmemEmulated;
        let place = if is_pinned { "/dev/shm" } else { "/var/tmp" };
        let dir = tempfile::Builder::new().prefix("cuttlefs-durable").tempdir_in(place).expect("dir");
        let alone = (device == LogDeviceKind::Pmem).then(|| {
            let alone = DAX_DEVICE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            clear(&dax_device().expect("a device of persistent memory"));
            alone
        });
        let path = dir.path().to_owned();
        Self { dir: path, _dir: Some(dir), link, device, notes: Arc::default(), _alone: alone }
    }

    /// The kind that a sender of `kind` really gets: where the RNIC cannot flush, the receiver does.
    fn expected(&self, kind: Kind) -> Kind {
        let flushes = match self.link {
            LinkKind::Rdma => {
                let can = rnic(self.link).capabilities().flush == FlushReach::Persistence;
                can && self.device == LogDeviceKind::Pmem && kind != Kind::SFlush
            }
            _ => true,
        };
        if flushes { kind } else { kind.by_receiver() }
    }

    fn endpoint(&self) -> Endpoint {
        match self.link {
            LinkKind::Shm => Endpoint::Shm(self.dir.join("shm.sock")),
            LinkKind::Unix => Endpoint::Unix(self.dir.join("unix.sock")),
            #[cfg(feature = "verbs")]
            LinkKind::Rdma => rdma_endpoint(),
            _ => Endpoint::Tcp { host: "127.0.0.1".into(), port: 0 },
        }
    }

    fn rings(&self) -> PathBuf {
        match self.device {
            LogDeviceKind::Pmem => dax_device().expect("a device of persistent memory"),
            _ => self.dir.join("rings"),
        }
    }

    fn start(&self, executors: usize, slow_beyond: usize) -> Running {
        let device = rnic(self.link);
        let store = RingStore::new(&self.rings(), Some(self.device)).expect("store");
        let options = ReceiverOptions { executors, slow_beyond, ..ReceiverOptions::default() };
        let receiver = Receiver::start(&*device, &self.endpoint(), store, self.notes.clone(), options);
        Running { receiver: receiver.expect("started"), _device: device }
    }
}

/// A receiver and its RNIC, dropped in this order.
struct Running {
    receiver: Receiver,
    _device: Arc<dyn Device>,
}

fn connect(running: &Running, settings: Settings) -> Result<Sender, SenderError> {
    let endpoint = running.receiver.endpoint();
    let device = match endpoint {
        Endpoint::Rdma { .. } => rnic(LinkKind::Rdma),
        _ => SoftDevice::new(SoftOptions::default()),
    };
    Sender::connect(device, &endpoint, CLIENT, settings)
}

fn settings(kind: Kind) -> Settings {
    let patience = Duration::from_secs(30);
    Settings { depth: 16, answers: 8, patience, ..Settings::new(kind, 2000, 2000) }
}

/// How long a test waits for something that must not happen. In a virtual machine things that do happen may take a tenth of this.
fn short(link: LinkKind) -> Duration {
    Duration::from_millis(if link == LinkKind::Rdma { 4000 } else { 400 })
}

fn body(index: usize, len: usize) -> Vec<u8> {
    let mut body = vec![(index * 31 % 251) as u8; len];
    body[..4].copy_from_slice(&(index as u32).to_be_bytes());
    body
}

fn requests_are_persistent_executed_in_order_and_answered(link: LinkKind, device: LogDeviceKind) {
    for kind in Kind::ALL {
        for (executors, batch) in [(0, 1), (2, 5)] {
            let site = Site::new(link, device);
            let running = site.start(executors, 1000);
            let mut sender = connect(&running, Settings { batch, ..settings(kind) }).expect("connected");
            assert_eq!((sender.link(), sender.log_device()), (link, device));
            assert_eq!(sender.kind(), site.expected(kind));
            let mut answer = Vec::new();
            let mut expected = Vec::new();
            for index in 0..150 {
                let body = body(index, 4 + index * 97 % 1900);
                let wants = match index % 4 {
                    0 => Wants::Answer,
                    1 => Wants::AnswerOnly,
                    _ => Wants::Persistence,
                };
                let ticket = sender.post(&body, wants).expect("posted");
                if index % 7 == 0 && wants != Wants::AnswerOnly {
                    sender.wait_persistent(ticket).expect("persistent");
                }
                if wants != Wants::Persistence {
                    let status = sender.wait_answer(ticket, &mut answer).expect("answered");
                    assert_eq!(status as usize, body.len(), "{kind:?}");
                    assert!(answer.iter().rev().eq(&body), "{kind:?}");
                    if wants == Wants::Answer {
                        sender.wait_persistent(ticket).expect("what is answered is persistent");
                    }
                    assert!(matches!(sender.wait_answer(ticket, &mut answer), Err(SenderError::NoAnswer)));
                }
                expected.push(body);
            }
            let last = sender.post(&body(150, 9), Wants::Answer).expect("posted");
            expected.push(body(150, 9));
            sender.wait_answer(last, &mut answer).expect("answered");
            site.notes.wait_for(151);
            assert_eq!(site.notes.done(), expected, "{kind:?}");
            assert_eq!(sender.figures().posted, 151);
            let rung = sender.figures().doorbells;
            assert!(if batch == 1 { rung == 151 } else { rung < 151 }, "{rung} doorbells");
            assert!(matches!(
                sender.post(&[0; 70_000], Wants::Answer),
                Err(SenderError::Ring(cuttlefs_common::redo::ring::RingError::TooLong { .. }))
            ));
        }
    }
}

/// On persistent memory the head moves once for all requests that the receiver took together; on a synced file it moves even more rarely.
fn the_head_moves_once_for_a_doorbell(link: LinkKind, device: LogDeviceKind) {
    for kind in Kind::ALL {
        let site = Site::new(link, device);
        let running = site.start(1, 1000);
        // Five requests are less than an eighth of the ring.
        let mut sender =
            connect(&running, Settings { batch: 5, depth: 64, ..settings(kind) }).expect("connected");
        site.notes.hold(true);
        let before = running.receiver.figures().heads;
        let bodies: Vec<_> = (0..5).map(|index| body(index, 100)).collect();
        for body in &bodies {
            sender.post(body, Wants::Persistence).expect("posted");
        }
        wait_until(|| running.receiver.figures().behind == 5);
        site.notes.hold(false);
        wait_until(|| running.receiver.figures().behind == 0);
        // The head moves behind the last of the five.
        let moves = usize::from(device != LogDeviceKind::File);
        wait_until(|| running.receiver.figures().heads >= before + moves as u64);
        assert_eq!(running.receiver.figures().heads, before + moves as u64, "{kind:?} on {device:?}");
        assert_eq!(site.notes.done(), bodies);
    }
}

fn wait_until(is_so: impl Fn() -> bool) {
    for _ in 0..6000 {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("it does not come to be so");
}

/// The next receiver executes requests that were persistent when the receiver before ended; the sender does not send them again.
fn a_killed_receiver_executes_what_was_persistent(link: LinkKind, device: LogDeviceKind) {
    for kind in Kind::ALL {
        let site = Site::new(link, device);
        let running = site.start(1, 1000);
        let mut sender = connect(&running, settings(kind)).expect("connected");
        site.notes.hold(true);
        let mut tickets = Vec::new();
        for index in 0..10 {
            let wants = match index {
                // The sender does not need this request to be persistent, but the requests behind it do.
                2 => Wants::AnswerOnly,
                3 => Wants::Answer,
                _ => Wants::Persistence,
            };
            tickets.push(sender.post(&body(index, 300), wants).expect("posted"));
        }
        for ticket in &tickets {
            sender.wait_persistent(*ticket).expect("persistent");
        }
        assert!(site.notes.done().is_empty(), "nothing was executed");
        // The executor is in the middle of the first request: everything else stops first, then the executor goes on.
        let notes = site.notes.clone();
        let releasing = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            notes.hold(false);
        });
        drop(running);
        releasing.join().expect("thread");
        let before = site.notes.state.lock().expect("no panic").executions;
        assert!(before < 10, "{before} requests were executed while the receiver ended");
        let running = site.start(1, 1000);
        let resumed = sender.resume(&running.receiver.endpoint()).expect("resumed");
        assert_eq!((resumed.kept, resumed.resent), (10, 0), "{kind:?}");
        assert_eq!(sender.kind(), site.expected(kind));
        let expected: Vec<_> = (0..10).map(|index| body(index, 300)).collect();
        assert_eq!(site.notes.done(), expected, "{kind:?}");
        assert!(matches!(sender.wait_answer(tickets[3], &mut Vec::new()), Err(SenderError::AnswerLost)));
        sender.wait_persistent(tickets[9]).expect("executed");
        // The resumed connection serves new requests.
        let next = sender.post(&body(10, 40), Wants::Answer).expect("posted");
        sender.wait_answer(next, &mut Vec::new()).expect("answered");
        assert_eq!(site.notes.done().len(), 11);
    }
}

/// A resumption sends again the requests that never reached the receiver, and no others.
fn a_broken_connection_is_resumed(link: LinkKind, device: LogDeviceKind) {
    for kind in Kind::ALL {
        let site = Site::new(link, device);
        let running = site.start(1, 1000);
        let mut sender = connect(&running, Settings { batch: 100, ..settings(kind) }).expect("connected");
        let first = sender.post(&body(0, 100), Wants::Persistence).expect("posted");
        sender.wait_persistent(first).expect("persistent");
        // These requests are staged and never sent: the batch is not full.
        for index in 1..6 {
            sender.post(&body(index, 100), Wants::Persistence).expect("posted");
        }
        let resumed = sender.resume(&running.receiver.endpoint()).expect("resumed");
        assert_eq!(resumed.resent, 5, "{kind:?}");
        let last = sender.post(&body(6, 100), Wants::Answer).expect("posted");
        sender.wait_answer(last, &mut Vec::new()).expect("answered");
        let expected: Vec<_> = (0..7).map(|index| body(index, 100)).collect();
        assert_eq!(site.notes.done(), expected, "{kind:?}");
    }
}

/// After a resumption the sender still gets the answer to a request that was under way. While every answer slot holds an answer that nobody took, a
/// post fails with `NoSlot`.
fn an_answer_is_waited_for_across_a_resumption(link: LinkKind, device: LogDeviceKind) {
    for kind in Kind::ALL {
        let site = Site::new(link, device);
        let running = site.start(1, 1000);
        let two = Settings { answers: 2, batch: 100, patience: short(link), ..settings(kind) };
        let mut sender = connect(&running, two).expect("connected");
        for index in 0..4 {
            // The request is still staged when the connection ends, so the resumption sends it.
            let asked = sender.post(&body(index, 100), Wants::AnswerOnly).expect("there is a slot");
            assert_eq!(sender.resume(&running.receiver.endpoint()).expect("resumed").resent, 1);
            let mut answer = Vec::new();
            sender.wait_answer(asked, &mut answer).expect("answered");
            assert_eq!(answer, body(index, 100).into_iter().rev().collect::<Vec<_>>(), "{kind:?}");
        }
        let untaken =
            [4, 5].map(|index| sender.post(&body(index, 100), Wants::Answer).expect("there is a slot"));
        let refused = sender.post(&body(6, 100), Wants::Answer).expect_err("no slot");
        assert!(matches!(refused, SenderError::NoSlot(_)), "{kind:?}: {refused}");
        sender.wait_answer(untaken[0], &mut Vec::new()).expect("answered");
        sender.post(&body(6, 100), Wants::Answer).expect("a slot is free");
    }
}

/// A receiver that is further behind than its threshold asks the sender to slow down, and both count it. A ring that stays full is an error of its
/// own.
fn a_receiver_that_is_behind_is_heard(link: LinkKind, device: LogDeviceKind) {
    for kind in Kind::ALL {
        let site = Site::new(link, device);
        let running = site.start(1, 4);
        let patient = Settings { patience: short(link), ..settings(kind) };
        let mut sender = connect(&running, patient).expect("connected");
        site.notes.hold(true);
        let mut posted = 0;
        let refused = loop {
            match sender.post(&body(posted, 1900), Wants::Persistence) {
                Ok(ticket) => {
                    sender.wait_persistent(ticket).expect("persistent, though nothing is executed");
                    posted += 1;
                }
                Err(error) => break error,
            }
            assert!(posted < 40, "{kind:?}: a ring of 16 took {posted}");
        };
        assert!(matches!(refused, SenderError::Slowed(_)), "{kind:?}: {refused}");
        assert!(posted >= 4, "{posted}");
        site.notes.hold(false);
        let last = sender.post(&body(posted, 10), Wants::Answer).expect("it caught up");
        // A busy machine may take longer than the sender is patient.
        let answered = (0..50).find_map(|_| match sender.wait_answer(last, &mut Vec::new()) {
            Err(SenderError::TimedOut(_)) => None,
            result => Some(result),
        });
        answered.expect("in time").expect("answered");
        assert!(sender.figures().slowed >= 1 && running.receiver.figures().slowed >= 1);
        assert_eq!(site.notes.done().len(), posted + 1);
        drop((sender, running, site));

        let site = Site::new(link, device);
        let running = site.start(1, 1000);
        let mut sender = connect(&running, patient).expect("connected");
        site.notes.hold(true);
        let refused = (0..40).find_map(|index| sender.post(&body(index, 1900), Wants::Persistence).err());
        assert!(matches!(refused, Some(SenderError::Full(_))), "{kind:?}: {refused:?}");
        assert!(sender.figures().full >= 1 && sender.figures().head_reads >= 1);
        site.notes.hold(false);
        sender.post(&body(99, 10), Wants::Persistence).expect("there is room again");
    }
}

macro_rules! suite {
    ($($name:ident),* $(,)?) => {
        mod shm { $(#[test] fn $name() { super::both(super::LinkKind::Shm, super::$name) })* }
        mod tcp { $(#[test] fn $name() { super::both(super::LinkKind::Tcp, super::$name) })* }
        mod unix { $(#[test] fn $name() { super::both(super::LinkKind::Unix, super::$name) })* }
        #[cfg(feature = "verbs")]
        mod rdma {
            $(#[test] #[ignore = "wants an RNIC"] fn $name() { super::both(super::LinkKind::Rdma, super::$name) })*
        }
        #[cfg(feature = "verbs")]
        mod rdma_dax {
            $(#[test] #[ignore = "wants an RNIC and a device of persistent memory"]
            fn $name() { super::$name(super::LinkKind::Rdma, super::LogDeviceKind::Pmem) })*
        }
    };
}

fn both(link: LinkKind, test: fn(LinkKind, LogDeviceKind)) {
    test(link, LogDeviceKind::PmemEmulated);
    test(link, LogDeviceKind::File);
}

suite!(
    requests_are_persistent_executed_in_order_and_answered,
    a_killed_receiver_executes_what_was_persistent,
    a_broken_connection_is_resumed,
    an_answer_is_waited_for_across_a_resumption,
    a_receiver_that_is_behind_is_heard,
    the_head_moves_once_for_a_doorbell,
    a_refused_sender_is_told,
    a_receiver_process_is_killed,
);

#[test]
fn a_ring_that_cannot_be_read_is_kept_and_its_client_refused() {
    let site = Site::new(LinkKind::Unix, LogDeviceKind::PmemEmulated);
    let running = site.start(0, 1000);
    drop(connect(&running, settings(Kind::WFlush)).expect("connected"));
    drop(running);
    let ring = |dir: &Path| {
        let mut files = std::fs::read_dir(dir).expect("dir").map(|entry| entry.expect("entry").path());
        files.next().expect("a ring")
    };
    let path = ring(&site.rings());
    let mut bytes = std::fs::read(&path).expect("read");
    bytes[..8].copy_from_slice(b"damaged!");
    std::fs::write(&path, &bytes).expect("write");
    let device = SoftDevice::new(SoftOptions::default());
    let store = RingStore::new(&site.rings(), Some(site.device)).expect("store");
    let refused =
        Receiver::start(&*device, &site.endpoint(), store, site.notes.clone(), ReceiverOptions::default());
    assert!(refused.err().expect("refused").to_string().contains("damaged"));
    assert_eq!(std::fs::read(&path).expect("read"), bytes, "nothing was changed");
}

/// A refused sender is told `Refused`, not that the connection broke.
fn a_refused_sender_is_told(link: LinkKind, device: LogDeviceKind) {
    let site = Site::new(link, device);
    let running = site.start(0, 1000);
    // The sender asks for more room for answers than a receiver gives.
    let greedy = Settings { answers: 1, ..Settings::new(Kind::WFlush, 100, 2 << 20) };
    let refused = connect(&running, greedy).err();
    assert!(matches!(refused, Some(SenderError::Refused)), "{refused:?}");
    let mut sender = connect(&running, settings(Kind::WFlush)).expect("connected");
    let ticket = sender.post(&body(1, 10), Wants::Answer).expect("posted");
    sender.wait_answer(ticket, &mut Vec::new()).expect("answered");
}

/// Makes a process of this test program a receiver. Its value: link, log device and directory.
const RECEIVER: &str = "CUTTLEFS_TEST_RECEIVER";

const LINKS: [LinkKind; 4] = [LinkKind::Shm, LinkKind::Tcp, LinkKind::Unix, LinkKind::Rdma];
const DEVICES: [LogDeviceKind; 3] = [LogDeviceKind::Pmem, LogDeviceKind::PmemEmulated, LogDeviceKind::File];

/// The receiver of `a_receiver_process_is_killed`, in a process of its own: it takes requests and executes none.
#[test]
#[ignore = "another test starts it"]
fn receiver_process() {
    let Ok(told) = std::env::var(RECEIVER) else { return };
    let [link, device, dir] = told.splitn(3, ' ').collect::<Vec<_>>().try_into().expect("three words");
    let link = LINKS.into_iter().find(|known| format!("{known:?}") == link).expect("a link");
    let device = DEVICES.into_iter().find(|known| known.label() == device).expect("a device");
    let site = Site { dir: dir.into(), _dir: None, link, device, notes: Arc::default(), _alone: None };
    site.notes.hold(true);
    let running = site.start(1, 1000);
    let said = site.dir.join("said");
    std::fs::write(&said, running.receiver.endpoint().to_string()).expect("written");
    std::fs::rename(&said, site.dir.join("endpoint")).expect("renamed");
    // Runs until it is killed, or until its parent is gone.
    let _ = std::io::Read::read(&mut std::io::stdin(), &mut [0]);
}

/// As `a_killed_receiver_executes_what_was_persistent`, but SIGKILL ends the receiver's process. The next receiver finds the requests where the RNIC
/// (or its software) put them, and executes them.
fn a_receiver_process_is_killed(link: LinkKind, device: LogDeviceKind) {
    for kind in Kind::ALL {
        let site = Site::new(link, device);
        let program = std::env::args_os().next().expect("a program");
        let mut receiver = std::process::Command::new(program)
            .args(["--ignored", "--exact", "receiver_process"])
            .env(RECEIVER, format!("{link:?} {} {}", device.label(), site.dir.display()))
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::null())
            .spawn()
            .expect("a process");
        let said = site.dir.join("endpoint");
        wait_until(|| said.exists());
        let endpoint: Endpoint = std::fs::read_to_string(&said).expect("read").parse().expect("an endpoint");
        let mut sender = Sender::connect(rnic(link), &endpoint, CLIENT, settings(kind)).expect("connected");
        assert_eq!(sender.kind(), site.expected(kind));
        let mut last = None;
        for index in 0..10 {
            last = Some(sender.post(&body(index, 300), Wants::Persistence).expect("posted"));
        }
        sender.wait_persistent(last.expect("some were posted")).expect("persistent");
        receiver.kill().expect("killed");
        receiver.wait().expect("it ended");
        let running = site.start(1, 1000);
        let resumed = sender.resume(&running.receiver.endpoint()).expect("resumed");
        assert_eq!((resumed.kept, resumed.resent), (10, 0), "{kind:?}");
        let expected: Vec<_> = (0..10).map(|index| body(index, 300)).collect();
        assert_eq!(site.notes.done(), expected, "{kind:?}");
        let next = sender.post(&body(10, 40), Wants::Answer).expect("posted");
        sender.wait_answer(next, &mut Vec::new()).expect("answered");
    }
}

#[test]
fn what_cannot_be_flushed_is_flushed_by_the_receiver() {
    let mut capabilities = rnic(LinkKind::Tcp).capabilities();
    for kind in Kind::ALL {
        assert_eq!(kind.over(&capabilities, FlushReach::Persistence), kind);
        for reach in [FlushReach::None, FlushReach::Visibility] {
            assert_eq!(kind.over(&capabilities, reach), kind.by_receiver());
        }
        assert!(kind.by_receiver().label().ends_with("RFlush"));
    }
    capabilities.flush_after_send = false;
    let over = |kind: Kind| kind.over(&capabilities, FlushReach::Persistence);
    assert_eq!(Kind::ALL.map(over), [Kind::SRFlush, Kind::WFlush, Kind::SRFlush, Kind::WRFlush]);
}

#[test]
fn another_kind_gets_a_ring_of_another_shape() {
    let site = Site::new(LinkKind::Unix, LogDeviceKind::PmemEmulated);
    let running = site.start(0, 1000);
    for kind in [Kind::WFlush, Kind::SFlush, Kind::WRFlush, Kind::SRFlush] {
        let mut sender = connect(&running, settings(kind)).expect("connected");
        let ticket = sender.post(&body(1, 10), Wants::Answer).expect("posted");
        sender.wait_answer(ticket, &mut Vec::new()).expect("answered");
    }
    assert_eq!(site.notes.done().len(), 4);
}

/// A false receiver: it welcomes every sender, breaks the protocol at once, and takes no request.
fn welcome_and_break(listener: &dyn Listener, pd: &dyn ProtectionDomain, cq: &Arc<dyn CompletionQueue>) {
    while let Ok(incoming) = listener.accept() {
        let memory = SharedMemory::new("fake", 3 * MESSAGE_LEN).expect("memory");
        let region = pd.register(Arc::new(memory), Access::ALL).expect("registered");
        let hello = RecvWr { wr_id: WrId(1), local: region.sge(0, MESSAGE_LEN as u32).into() };
        let qp = QpConfig::new(cq, 8, 8);
        let qp = incoming.accept(qp, vec![hello]).expect("accepted");
        let mut completions = Vec::new();
        while cq.poll(&mut completions, 8) == 0 {
            cq.wait(Duration::from_millis(20));
        }
        let (ring, log, past) = (region.rkey(), LogId(7), (LogId(0), LogSeq(0)));
        let (reading, kind, device) = (ring, Kind::WFlush, LogDeviceKind::PmemEmulated);
        let welcome = Message::Welcome { ring, reading, kind, log, past, device };
        region.memory().write(MESSAGE_LEN, &welcome.encode());
        region.memory().write(2 * MESSAGE_LEN, &Message::Refused.encode());
        let send = |index: usize| {
            let local = region.sge((index * MESSAGE_LEN) as u64, MESSAGE_LEN as u32);
            SendWr { wr_id: WrId(0), op: SendOp::Send, local: local.into(), signaled: false }
        };
        qp.post_send(&[send(1), send(2)]).expect("posted");
        // The connection stays until the sender ends it.
        completions.clear();
        while completions.iter().all(|completion| completion.status == WcStatus::Success) {
            cq.poll(&mut completions, 8);
            cq.wait(Duration::from_millis(20));
        }
    }
}

/// A resumption that fails loses no request, whether it fails before or after the sender took its requests back. Until a resumption succeeds, the
/// sender reports no request as persistent, and posts nothing new.
#[test]
fn a_resumption_that_fails_on_its_way_loses_nothing() {
    let site = Site::new(LinkKind::Unix, LogDeviceKind::PmemEmulated);
    let running = site.start(1, 1000);
    let mut sender = connect(&running, Settings { batch: 100, ..settings(Kind::WFlush) }).expect("connected");
    let first = sender.post(&body(0, 100), Wants::Answer).expect("posted");
    sender.wait_answer(first, &mut Vec::new()).expect("answered");
    let tickets: Vec<_> =
        (1..6).map(|index| sender.post(&body(index, 100), Wants::Answer).expect("posted")).collect();
    let device = SoftDevice::new(SoftOptions::default());
    let (pd, cq) = (device.alloc_pd().expect("a domain"), device.create_cq(32).expect("a queue"));
    let at: Endpoint = format!("unix://{}", site.dir.join("fake").display()).parse().expect("an endpoint");
    let listener = pd.listen(&at).expect("it listens");
    std::thread::spawn(move || welcome_and_break(&*listener, &*pd, &cq));
    // A resumption may succeed if the two messages do not arrive together, which is up to the link. The next one fails.
    while sender.resume(&at).is_ok() {}
    let unsafe_yet = sender.wait_persistent(tickets[2]);
    assert!(matches!(unsafe_yet, Err(SenderError::Disconnected)), "{unsafe_yet:?}");
    assert!(matches!(sender.post(&body(6, 100), Wants::Answer), Err(SenderError::Disconnected)));
    let nowhere = format!("unix://{}", site.dir.join("nowhere").display());
    sender.resume(&nowhere.parse().expect("an endpoint")).expect_err("nobody is there");
    let resumed = sender.resume(&running.receiver.endpoint()).expect("resumed");
    assert_eq!((resumed.kept, resumed.resent), (0, 5));
    for (ticket, index) in tickets.into_iter().zip(1..) {
        let mut answer = Vec::new();
        sender.wait_answer(ticket, &mut answer).expect("answered");
        assert!(answer.iter().rev().eq(&body(index, 100)), "{index}");
    }
    let expected: Vec<_> = (0..6).map(|index| body(index, 100)).collect();
    assert_eq!(site.notes.done(), expected);
}
