//! A program that speaks to a server by itself: requests and one-sided verbs over one queue pair, and a new queue pair for its session after each
//! refusal.

use crate::serving::device_to;
use cuttlefs_common::attr::Attr;
use cuttlefs_common::ids::{FileKey, InodeNo, SlotIndex, TraceId};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::{
    Access, Completion, CompletionKind, CompletionQueue, ConnectOptions, Device, Endpoint, MemoryRegion,
    ProtectionDomain, QpConfig, QpState, QueuePair, RecvWr, Remote, SendOp, SendWr, Sge, WcStatus, WrId,
};
use cuttlefs_common::region::{PageSet, divide};
use cuttlefs_common::rpc::{
    Attached, HEADER_LEN, MAX_MESSAGE_BYTES, OpenBy, Opened, Payload, Reclaim, RegionKey, Reply, ReplyHeader,
    Request, RequestHeader, Rights, SessionSecret, Sink,
};
use cuttlefs_common::status::Status;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest time for an answer.
pub const PATIENCE: Duration = Duration::from_secs(60);
const MESSAGE: usize = MAX_MESSAGE_BYTES as usize;
/// Where the bytes of one-sided verbs are: behind a message received and one sent.
const DATA: usize = 2 * MESSAGE;
const DATA_LEN: usize = 1 << 20;
/// Where values land.
const VALUE: usize = DATA + DATA_LEN;
pub const BOTH: Rights = Rights { read: true, write: true };

pub struct Program {
    endpoint: Endpoint,
    secret: SessionSecret,
    device: Arc<dyn Device>,
    pd: Arc<dyn ProtectionDomain>,
    cq: Arc<dyn CompletionQueue>,
    mr: Arc<dyn MemoryRegion>,
    qp: Option<Arc<dyn QueuePair>>,
    seq: u64,
    pub root: InodeNo,
}

impl Program {
    /// Connects, and attaches the session of this secret.
    pub fn start(endpoint: &Endpoint, secret: u8) -> Self {
        Self::start_by(device_to(endpoint), endpoint, secret)
    }

    /// The same by this RNIC.
    pub fn start_by(device: Arc<dyn Device>, endpoint: &Endpoint, secret: u8) -> Self {
        let (pd, cq) = (device.alloc_pd().expect("a domain"), device.create_cq(64).expect("a queue"));
        let memory = Arc::new(SharedMemory::new("program", VALUE + 64).expect("memory"));
        let mr = pd.register(memory, Access::ALL).expect("register");
        let (endpoint, secret) = (endpoint.clone(), SessionSecret([secret; 16]));
        let root = InodeNo::ROOT;
        let mut program = Self { endpoint, secret, device, pd, cq, mr, qp: None, seq: 0, root };
        program.connect().expect("attached");
        program
    }

    /// Connects again to the same session, or to a new server; `seq` goes on.
    pub fn connect(&mut self) -> Result<Attached, Status> {
        if let Some(qp) = self.qp.take() {
            qp.close();
            self.cq.poll(&mut Vec::new(), 64);
        }
        // A queue of its own, so that no completion of an earlier queue pair comes between.
        self.cq = self.device.create_cq(64).expect("a queue");
        let deadline = Instant::now() + PATIENCE;
        self.qp = loop {
            let receive = RecvWr { wr_id: WrId(0), local: self.mr.sge(0, MAX_MESSAGE_BYTES).into() };
            let options = ConnectOptions {
                qp: QpConfig::new(&self.cq, 8, 8),
                receives: vec![receive],
                timeout: PATIENCE,
            };
            match self.pd.connect(&self.endpoint, options) {
                Ok(connected) => break Some(connected.qp),
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let attach = Request::Attach { secret: self.secret, label: "program", subtree: b"" };
        let attached = self.ask(&attach, 0, |reply| match reply {
            Reply::Attached(attached) => attached.clone(),
            other => panic!("{other:?}"),
        })?;
        self.root = attached.root;
        Ok(attached)
    }

    fn qp(&self) -> &dyn QueuePair {
        self.qp.as_deref().expect("connected")
    }

    fn next(&self) -> Completion {
        let (deadline, mut out) = (Instant::now() + PATIENCE, Vec::new());
        while self.cq.poll(&mut out, 1) == 0 {
            assert!(Instant::now() < deadline, "nothing completes");
            self.cq.wait(Duration::from_millis(20));
        }
        out[0]
    }

    fn ask<T>(
        &mut self,
        request: &Request<'_>,
        seq: u64,
        take: impl FnOnce(&Reply<'_>) -> T,
    ) -> Result<T, Status> {
        let mut body = vec![0; MESSAGE - HEADER_LEN];
        let len = request.encode(&mut body).expect("it fits");
        let header = RequestHeader {
            slot: SlotIndex(0),
            seq,
            trace: TraceId(1),
            uid: 0,
            gid: 0,
            umask: 0,
            drops_privileges: false,
        };
        let memory = self.mr.memory();
        memory.write(MESSAGE, &header.encode(len as u32));
        memory.write(MESSAGE + HEADER_LEN, &body[..len]);
        let local = self.mr.sge(MESSAGE as u64, (HEADER_LEN + len) as u32);
        let send = SendWr { wr_id: WrId(1), op: SendOp::Send, local: local.into(), signaled: false };
        self.qp().post_send(&[send]).expect("post");
        let completion = self.next();
        assert_eq!((completion.kind, completion.status), (CompletionKind::Recv, WcStatus::Success));
        let mut message = vec![0; completion.byte_len as usize];
        self.mr.memory().read(0, &mut message);
        let receive = RecvWr { wr_id: WrId(0), local: self.mr.sge(0, MAX_MESSAGE_BYTES).into() };
        self.qp().post_recv(&[receive]).expect("post");
        let (header, body) = ReplyHeader::parse(&message).expect("a reply");
        header.result?;
        Ok(take(&Reply::parse(body).expect("a reply")))
    }

    /// Asks, and takes what is wanted of the reply.
    pub fn call<T>(
        &mut self,
        request: &Request<'_>,
        take: impl FnOnce(&Reply<'_>) -> T,
    ) -> Result<T, Status> {
        self.seq += 1;
        self.ask(request, self.seq, take)
    }

    pub fn done(&mut self, request: &Request<'_>) -> Result<(), Status> {
        self.call(request, |reply| assert_eq!(*reply, Reply::Done))
    }

    fn opened(&mut self, request: &Request<'_>) -> Result<Opened, Status> {
        self.call(request, |reply| match reply {
            Reply::Opened(opened) => *opened,
            other => panic!("{other:?}"),
        })
    }

    pub fn create(&mut self, name: &[u8], mode: u16) -> Opened {
        let parent = self.root;
        self.opened(&Request::Create { parent, name, mode, exclusive: false, rights: BOTH }).expect("created")
    }

    pub fn open(&mut self, ino: InodeNo, rights: Rights) -> Result<Opened, Status> {
        self.opened(&Request::Open { ino, rights, truncate: false, by: OpenBy::Number })
    }

    pub fn reclaim(&mut self, opened: &Opened) -> Opened {
        let reclaim = Reclaim { ino: opened.attr.ino, rights: BOTH, ticket: Some(opened.ticket) };
        let reclaimed = self.call(&Request::Reclaim { files: vec![reclaim] }, |reply| match reply {
            Reply::Reclaimed(files) => files[0].expect("it is there"),
            other => panic!("{other:?}"),
        });
        reclaimed.expect("reclaimed")
    }

    pub fn bind(
        &mut self,
        filekey: FileKey,
        (offset, len): (u64, u64),
        rights: Rights,
        lifetime_ms: u64,
    ) -> Result<RegionKey, Status> {
        self.bound(&Request::Bind { filekey, offset, len, rights, lifetime_ms })
    }

    pub fn bound(&mut self, request: &Request<'_>) -> Result<RegionKey, Status> {
        self.call(request, |reply| match reply {
            Reply::Bound(key) => *key,
            other => panic!("{other:?}"),
        })
    }

    /// Opens a key that came as a text, as keys are handed over.
    pub fn open_region(&mut self, text: &str) -> Result<Opened, Status> {
        self.opened(&Request::OpenRegion { key: text.parse().expect("a key") })
    }

    pub fn grant(&mut self, filekey: FileKey, offset: u64, len: u64) -> Result<Attr, Status> {
        self.call(&Request::GrantWrite { filekey, offset, len }, |reply| match reply {
            Reply::Attr(attr) => *attr,
            other => panic!("{other:?}"),
        })
    }

    /// Writes or appends by RPC. Returns the offset.
    pub fn write(
        &mut self,
        filekey: FileKey,
        offset: u64,
        append: bool,
        bytes: &[u8],
    ) -> Result<u64, Status> {
        let payload = Payload::Inline(bytes);
        self.call(&Request::Write { filekey, offset, append, payload }, |reply| match reply {
            Reply::Written { offset, .. } => *offset,
            other => panic!("{other:?}"),
        })
    }

    /// Reads at most 16 KiB by RPC.
    pub fn fetch(&mut self, filekey: FileKey, offset: u64, len: u32) -> Result<Vec<u8>, Status> {
        let pages = PageSet::all(divide(offset, len as usize).len());
        let fetch = Request::Fetch { filekey, offset, len, pages, sink: Sink::Inline };
        self.call(&fetch, |reply| match reply {
            Reply::Fetched { inline, .. } => inline.to_vec(),
            other => panic!("{other:?}"),
        })
    }

    /// Posts a one-sided request and waits for it. After a refusal it connects again.
    fn one_sided(&mut self, op: SendOp, local: Sge) -> Result<u32, WcStatus> {
        self.qp()
            .post_send(&[SendWr { wr_id: WrId(2), op, local: local.into(), signaled: true }])
            .expect("post");
        let completion = self.next();
        assert_eq!(completion.kind, op.kind());
        if completion.status == WcStatus::Success {
            return Ok(completion.byte_len);
        }
        assert_eq!(self.qp().state(), QpState::Error);
        self.connect().expect("attached");
        Err(completion.status)
    }

    fn value(&self) -> u64 {
        let mut bytes = [0; 8];
        self.mr.memory().read(VALUE, &mut bytes);
        u64::from_le_bytes(bytes)
    }

    pub fn read_at(&mut self, filekey: FileKey, offset: u64, len: u32) -> Result<Vec<u8>, WcStatus> {
        let read = SendOp::Read(Remote::File { filekey, offset });
        let got = self.one_sided(read, self.mr.sge(DATA as u64, len))?;
        let mut bytes = vec![0; got as usize];
        self.mr.memory().read(DATA, &mut bytes);
        Ok(bytes)
    }

    pub fn write_at(&mut self, filekey: FileKey, offset: u64, bytes: &[u8]) -> Result<(), WcStatus> {
        self.mr.memory().write(DATA, bytes);
        let local = self.mr.sge(DATA as u64, bytes.len() as u32);
        self.one_sided(SendOp::Write(Remote::File { filekey, offset }), local).map(drop)
    }

    /// Appends one-sidedly. Returns the offset.
    pub fn append(&mut self, filekey: FileKey, bytes: &[u8]) -> Result<u64, WcStatus> {
        self.mr.memory().write(DATA, bytes);
        let local = self.mr.sge(DATA as u64, bytes.len() as u32);
        let placed = self.mr.sge(VALUE as u64, 8);
        assert_eq!(self.one_sided(SendOp::Append { filekey, placed }, local)?, bytes.len() as u32);
        Ok(self.value())
    }

    pub fn add(&mut self, filekey: FileKey, offset: u64, add: u64) -> Result<u64, WcStatus> {
        let remote = Remote::File { filekey, offset };
        self.one_sided(SendOp::FetchAdd { remote, add }, self.mr.sge(VALUE as u64, 8))?;
        Ok(self.value())
    }

    pub fn swap(&mut self, filekey: FileKey, offset: u64, expect: u64, swap: u64) -> Result<u64, WcStatus> {
        let remote = Remote::File { filekey, offset };
        let op = SendOp::CompareSwap { remote, expect, swap };
        self.one_sided(op, self.mr.sge(VALUE as u64, 8))?;
        Ok(self.value())
    }
}
