//! Accesses to files that fault: they stall their own queue pair and no other, and connections may end meanwhile.

use cuttlefs_common::ids::FileKey;
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions};
use cuttlefs_common::rdma::{
    Access, Completion, CompletionKind, CompletionQueue, ConnectOptions, Device, FileRead, FileTarget,
    FileWrite, Listener, MemoryRegion, ProtectionDomain, QpConfig, QpState, QueuePair, RegionOwner, Remote,
    SendOp, SendWr, WcStatus, WrId,
};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(20);
/// A READ or WRITE from this offset on faults, and waits until the gate lets it go.
const FAULTS_FROM: u64 = 1 << 20;
/// A READ or WRITE from this offset on faults, and then fails.
const REFUSED_FROM: u64 = 1 << 30;

/// A file target whose faults wait until the test lets them go.
#[derive(Default)]
struct Gate {
    /// Faults under way, faults that are over, faults that may still end.
    state: Mutex<(usize, usize, usize)>,
    moved: Condvar,
    /// Offset and first byte of each WRITE, in order.
    written: Mutex<Vec<(u64, u8)>>,
}

impl Gate {
    fn fault(&self) {
        let mut state = self.state.lock().expect("no panic");
        state.0 += 1;
        self.moved.notify_all();
        while state.2 == 0 {
            state = self.moved.wait(state).expect("no panic");
        }
        state.2 -= 1;
        state.0 -= 1;
        state.1 += 1;
        self.moved.notify_all();
    }

    fn let_go(&self, faults: usize) {
        self.state.lock().expect("no panic").2 += faults;
        self.moved.notify_all();
    }

    fn wait_until(&self, reached: impl Fn(usize, usize) -> bool) {
        let state = self.state.lock().expect("no panic");
        let (_, late) = self
            .moved
            .wait_timeout_while(state, PATIENCE, |state| !reached(state.0, state.1))
            .map(|(state, late)| (state.0, late.timed_out()))
            .expect("no panic");
        assert!(!late);
    }
}

impl FileTarget for Gate {
    fn read_file(
        &self,
        _: RegionOwner,
        _: FileKey,
        offset: u64,
        out: &mut [u8],
    ) -> Result<FileRead, WcStatus> {
        if offset >= FAULTS_FROM {
            return Ok(FileRead::Faults);
        }
        out.fill(offset as u8);
        Ok(FileRead::Done(out.len()))
    }

    fn read_file_faulting(
        &self,
        _: RegionOwner,
        _: FileKey,
        offset: u64,
        out: &mut [u8],
    ) -> Result<usize, WcStatus> {
        self.fault();
        if offset >= REFUSED_FROM {
            return Err(WcStatus::RemoteOperation);
        }
        out.fill(0xfa);
        Ok(out.len() - 1)
    }

    fn write_file(
        &self,
        _: RegionOwner,
        _: FileKey,
        offset: u64,
        bytes: &[u8],
    ) -> Result<FileWrite, WcStatus> {
        if offset >= FAULTS_FROM {
            return Ok(FileWrite::Faults);
        }
        self.written.lock().expect("no panic").push((offset, bytes[0]));
        Ok(FileWrite::Done)
    }

    fn write_file_faulting(
        &self,
        _: RegionOwner,
        _: FileKey,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), WcStatus> {
        self.fault();
        if offset >= REFUSED_FROM {
            return Err(WcStatus::RemoteOperation);
        }
        self.written.lock().expect("no panic").push((offset, bytes[0]));
        Ok(())
    }

    fn read_bitmap(&self, _: RegionOwner, _: FileKey, _: u64, _: &mut [u8]) -> Result<(), WcStatus> {
        Ok(())
    }
}

struct Target {
    device: Arc<SoftDevice>,
    pd: Arc<dyn ProtectionDomain>,
    cq: Arc<dyn CompletionQueue>,
    listener: Arc<dyn Listener>,
    gate: Arc<Gate>,
    _dir: tempfile::TempDir,
}

struct Reader {
    _device: Arc<SoftDevice>,
    cq: Arc<dyn CompletionQueue>,
    mr: Arc<dyn MemoryRegion>,
    qp: Arc<dyn QueuePair>,
    target_qp: Arc<dyn QueuePair>,
}

fn config(cq: &Arc<dyn CompletionQueue>) -> QpConfig {
    QpConfig::new(cq, 32, 32)
}

impl Target {
    fn new(scheme: &str) -> Self {
        let dir = tempfile::tempdir().expect("directory");
        let device = SoftDevice::new(SoftOptions::default());
        let gate = Arc::new(Gate::default());
        device.set_file_target(gate.clone());
        let pd = device.alloc_pd().expect("a domain");
        let cq = device.create_cq(64).expect("queue");
        let endpoint = match scheme {
            "tcp" => "tcp://127.0.0.1:0".to_owned(),
            _ => format!("{scheme}://{}", dir.path().join("socket").display()),
        };
        let listener = pd.listen(&endpoint.parse().expect("an endpoint")).expect("listen");
        Self { device, pd, cq, listener: Arc::from(listener), gate, _dir: dir }
    }

    fn connect(&self) -> Reader {
        let device = SoftDevice::new(SoftOptions::default());
        let pd = device.alloc_pd().expect("a domain");
        let cq = device.create_cq(64).expect("queue");
        let memory = Arc::new(SharedMemory::new("reader", 1 << 20).expect("memory"));
        let mr = pd.register(memory, Access::ALL).expect("register");
        let (qp, target_qp) = std::thread::scope(|scope| {
            let accepting = scope.spawn(|| {
                let incoming = self.listener.accept().expect("accept");
                incoming.accept(config(&self.cq), Vec::new()).expect("queue pair")
            });
            let options = ConnectOptions { qp: config(&cq), receives: Vec::new(), timeout: PATIENCE };
            let connected = pd.connect(&self.listener.endpoint(), options).expect("connect");
            (connected.qp, accepting.join().expect("thread"))
        });
        target_qp.set_region_owner(RegionOwner(42));
        Reader { _device: device, cq, mr, qp, target_qp }
    }
}

impl Reader {
    /// Posts READs at these offsets with one doorbell; their `wr_id`s count from 0.
    fn post(&self, offsets: &[u64]) {
        let read = |(index, &offset): (usize, &u64)| SendWr {
            wr_id: WrId(index as u64),
            op: SendOp::Read(Remote::File { filekey: FileKey(7), offset }),
            local: self.mr.sge(index as u64 * 4096, 4096).into(),
            signaled: true,
        };
        let requests: Vec<_> = offsets.iter().enumerate().map(read).collect();
        self.qp.post_send(&requests).expect("post");
    }

    /// Posts a WRITE of a page full of `byte`; its `wr_id` is that byte.
    fn post_write(&self, offset: u64, byte: u8, signaled: bool) {
        let local = self.mr.sge(u64::from(byte) * 4096, 4096);
        self.mr.memory().fill(local.offset as usize, 4096, byte);
        let op = SendOp::Write(Remote::File { filekey: FileKey(7), offset });
        self.qp
            .post_send(&[SendWr { wr_id: WrId(byte.into()), op, local: local.into(), signaled }])
            .expect("post");
    }

    fn next(&self) -> Completion {
        self.next_of(CompletionKind::Read)
    }

    fn next_of(&self, kind: CompletionKind) -> Completion {
        let deadline = Instant::now() + PATIENCE;
        let mut out = Vec::new();
        while self.cq.poll(&mut out, 1) == 0 {
            assert!(Instant::now() < deadline, "nothing completed");
            self.cq.wait(Duration::from_millis(20));
        }
        assert_eq!(out[0].kind, kind);
        out[0]
    }

    fn finishes(&self, index: u64, len: u32, byte: u8) {
        let done = self.next();
        assert_eq!((done.wr_id, done.status, done.byte_len), (WrId(index), WcStatus::Success, len));
        let mut first = [0];
        self.mr.memory().read(index as usize * 4096, &mut first);
        assert_eq!(first, [byte]);
    }

    fn has_nothing(&self) {
        assert_eq!(self.cq.poll(&mut Vec::new(), 1), 0);
    }
}

#[test]
fn a_fault_stalls_its_own_queue_pair_only() {
    for scheme in ["tcp", "unix"] {
        let target = Target::new(scheme);
        let (one, other) = (target.connect(), target.connect());
        // Requests before the fault are answered. Requests behind it wait, although they would not fault.
        one.post(&[1, FAULTS_FROM, 3, FAULTS_FROM + 1, 5]);
        one.finishes(0, 4096, 1);
        target.gate.wait_until(|under_way, _| under_way == 1);
        for round in 0..100 {
            other.post(&[round]);
            other.finishes(0, 4096, round as u8);
        }
        one.has_nothing();
        target.gate.let_go(1);
        one.finishes(1, 4095, 0xfa);
        one.finishes(2, 4096, 3);
        target.gate.wait_until(|under_way, over| (under_way, over) == (1, 1));
        one.has_nothing();
        target.gate.let_go(1);
        one.finishes(3, 4095, 0xfa);
        one.finishes(4, 4096, 5);
    }
}

#[test]
fn many_queue_pairs_fault_at_once() {
    let target = Target::new("tcp");
    let readers: Vec<_> = (0..8).map(|_| target.connect()).collect();
    readers.iter().for_each(|reader| reader.post(&[FAULTS_FROM, 9]));
    target.gate.wait_until(|under_way, _| under_way == readers.len());
    target.gate.let_go(readers.len());
    for reader in &readers {
        reader.finishes(0, 4095, 0xfa);
        reader.finishes(1, 4096, 9);
    }
}

#[test]
fn what_cannot_be_read_after_all_is_refused() {
    let target = Target::new("tcp");
    let reader = target.connect();
    reader.post(&[REFUSED_FROM, 3]);
    target.gate.let_go(1);
    assert_eq!(reader.next().status, WcStatus::RemoteOperation);
    assert_eq!(reader.next().status, WcStatus::Flushed);
    assert_eq!(reader.qp.state(), QpState::Error);
}

#[test]
fn a_write_that_faults_keeps_its_place() {
    for scheme in ["tcp", "unix"] {
        let target = Target::new(scheme);
        let writer = target.connect();
        let written = || target.gate.written.lock().expect("no panic").clone();
        writer.post_write(8, 9, true);
        assert_eq!(writer.next_of(CompletionKind::Write).status, WcStatus::Success);
        // Posts a faulting WRITE without a completion, a faulting one with a completion, and one that does not fault.
        writer.post_write(FAULTS_FROM, 1, false);
        writer.post_write(FAULTS_FROM + 1, 2, true);
        writer.post_write(16, 3, true);
        target.gate.wait_until(|under_way, _| under_way == 1);
        target.gate.let_go(1);
        target.gate.wait_until(|under_way, over| (under_way, over) == (1, 1));
        writer.has_nothing();
        assert_eq!(written(), [(8, 9), (FAULTS_FROM, 1)]);
        target.gate.let_go(1);
        for number in [2, 3] {
            let done = writer.next_of(CompletionKind::Write);
            assert_eq!((done.wr_id, done.status), (WrId(number), WcStatus::Success));
        }
        assert_eq!(written(), [(8, 9), (FAULTS_FROM, 1), (FAULTS_FROM + 1, 2), (16, 3)]);
        writer.post_write(REFUSED_FROM, 4, true);
        target.gate.let_go(1);
        assert_eq!(writer.next_of(CompletionKind::Write).status, WcStatus::RemoteOperation);
    }
}

#[test]
fn connections_may_end_while_they_fault() {
    for scheme in ["tcp", "unix"] {
        let target = Target::new(scheme);
        let (gone, closed, other) = (target.connect(), target.connect(), target.connect());
        gone.post(&[FAULTS_FROM]);
        closed.post(&[FAULTS_FROM, 1]);
        target.gate.wait_until(|under_way, _| under_way == 2);
        // One initiator goes away altogether; the other connection is closed by the target.
        drop(gone);
        closed.target_qp.close();
        assert_ne!(closed.next().status, WcStatus::Success);
        target.gate.let_go(2);
        target.gate.wait_until(|_, over| over == 2);
        other.post(&[3, FAULTS_FROM]);
        target.gate.let_go(1);
        other.finishes(0, 4096, 3);
        other.finishes(1, 4095, 0xfa);
    }
}

#[test]
fn a_device_that_goes_away_waits_for_its_faults() {
    let target = Target::new("tcp");
    let reader = target.connect();
    reader.post(&[FAULTS_FROM]);
    target.gate.wait_until(|under_way, _| under_way == 1);
    let Target { device, pd, cq, listener, gate, _dir } = target;
    gate.let_go(1);
    listener.close();
    drop((device, pd, cq, listener));
    gate.wait_until(|_, over| over == 1);
}
