//! A client without a mount: a session on one connection.

use cuttlefs_common::cluster_key::ClusterKeys;
use cuttlefs_common::ids::{FileKey, InodeNo, SlotIndex, TraceId};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions, TcpSecurity};
use cuttlefs_common::rdma::{
    Access, CompletionKind, CompletionQueue, ConnectOptions, Device, Endpoint, MemoryRegion, QpConfig,
    QueuePair, RecvWr, SendOp, SendWr, WcStatus, WrId,
};
use cuttlefs_common::region::{PageSet, divide};
use cuttlefs_common::rpc::{
    MAX_INLINE_BYTES, MAX_MESSAGE_BYTES, OpenBy, Payload, Reply, ReplyHeader, Request, RequestHeader, Rights,
    SessionSecret, Sink,
};
use cuttlefs_common::status::Status;
use cuttlefs_common::world::SystemRandom;
use std::sync::Arc;
use std::time::{Duration, Instant};

const MESSAGE: usize = MAX_MESSAGE_BYTES as usize;
const PATIENCE: Duration = Duration::from_secs(30);

pub struct Client {
    cq: Arc<dyn CompletionQueue>,
    qp: Arc<dyn QueuePair>,
    region: Arc<dyn MemoryRegion>,
    seq: u64,
}

impl Client {
    pub fn new(endpoint: &Endpoint) -> Self {
        let keys = ClusterKeys::new(vec![crate::server::key()]).expect("keys");
        let device = SoftDevice::new(SoftOptions { tcp: TcpSecurity::Keys(keys), ..SoftOptions::default() });
        let pd = device.alloc_pd().expect("a domain");
        let cq = device.create_cq(16).expect("a queue");
        let memory = SharedMemory::new("client", 2 * MESSAGE).expect("memory");
        let region = pd.register(Arc::new(memory), Access::LOCAL).expect("registered");
        let qp = QpConfig::new(&cq, 4, 4);
        let options = ConnectOptions { qp, receives: vec![receive(&*region)], timeout: PATIENCE };
        let qp = pd.connect(endpoint, options).expect("connected").qp;
        let mut client = Self { cq, qp, region, seq: 0 };
        let secret = SessionSecret::draw(&SystemRandom);
        let attach = Request::Attach { secret, label: "test", subtree: &[] };
        let attached = client.call(&attach, |reply| match reply {
            Reply::Attached(attached) => attached.durable_answers,
            other => panic!("{other:?}"),
        });
        assert_eq!(attached, Ok(true));
        client
    }

    pub fn call<T>(&mut self, request: &Request<'_>, take: impl FnOnce(Reply<'_>) -> T) -> Result<T, Status> {
        // An attach and a status request are answered outside of the slots, so they take no sequence number.
        self.seq += u64::from(!matches!(request, Request::Attach { .. } | Request::Status));
        let header = RequestHeader {
            slot: SlotIndex(0),
            seq: self.seq,
            trace: TraceId(self.seq),
            uid: 0,
            gid: 0,
            umask: 0,
            drops_privileges: false,
        };
        let mut bytes = vec![0; MESSAGE];
        let len = request.encode(&mut bytes).expect("it fits");
        let mut message = header.encode(len as u32).to_vec();
        message.extend_from_slice(&bytes[..len]);
        self.region.memory().write(0, &message);
        let local = self.region.sge(0, message.len() as u32);
        let send = SendWr { wr_id: WrId(0), op: SendOp::Send, local: local.into(), signaled: true };
        self.qp.post_send(&[send]).expect("posted");
        let len = self.received() as usize;
        let mut reply = vec![0; len];
        self.region.memory().read(MESSAGE, &mut reply);
        self.qp.post_recv(&[receive(&*self.region)]).expect("posted");
        let (header, body) = ReplyHeader::parse(&reply).expect("a reply");
        assert!(header.seq == self.seq, "an answer to another request");
        header.result.map(|()| take(Reply::parse(body).expect("a reply")))
    }

    fn received(&self) -> u32 {
        let begun = Instant::now();
        let mut completions = Vec::new();
        loop {
            self.cq.poll(&mut completions, 4);
            for completion in completions.drain(..) {
                assert_eq!(completion.status, WcStatus::Success);
                if completion.kind == CompletionKind::Recv {
                    return completion.byte_len;
                }
            }
            assert!(begun.elapsed() < PATIENCE, "no answer");
            self.cq.wait(Duration::from_millis(20));
        }
    }

    pub fn create(&mut self, name: &str) -> (InodeNo, FileKey) {
        let rights = Rights { read: true, write: true };
        let request = Request::Create {
            parent: InodeNo::ROOT,
            name: name.as_bytes(),
            mode: 0o644,
            exclusive: true,
            rights,
        };
        self.call(&request, |reply| match reply {
            Reply::Opened(opened) => (opened.attr.ino, opened.filekey),
            other => panic!("{other:?}"),
        })
        .expect("created")
    }

    fn open(&mut self, ino: InodeNo) -> FileKey {
        let rights = Rights { read: true, write: true };
        self.call(&Request::Open { ino, rights, truncate: false, by: OpenBy::Name { told: 0 } }, |reply| {
            match reply {
                Reply::Opened(opened) => opened.filekey,
                other => panic!("{other:?}"),
            }
        })
        .expect("opened")
    }

    pub fn write(&mut self, filekey: FileKey, offset: u64, bytes: &[u8]) -> Result<(), Status> {
        let payload = Payload::Inline(bytes);
        self.call(&Request::Write { filekey, offset, append: false, payload }, |_| ())
    }

    /// Opens a file and reads all of it.
    pub fn read(&mut self, ino: InodeNo) -> Vec<u8> {
        let filekey = self.open(ino);
        let mut found = Vec::new();
        loop {
            let (offset, len) = (found.len() as u64, MAX_INLINE_BYTES);
            let pages = PageSet::all(divide(offset, len).len());
            let request = Request::Fetch { filekey, offset, len: len as u32, pages, sink: Sink::Inline };
            let part = self.call(&request, |reply| match reply {
                Reply::Fetched { valid_len, inline } => inline[..valid_len as usize].to_vec(),
                other => panic!("{other:?}"),
            });
            let part = part.expect("fetched");
            found.extend_from_slice(&part);
            if part.len() < len {
                self.call(&Request::Close { filekeys: vec![filekey] }, |_| ()).expect("closed");
                return found;
            }
        }
    }
}

fn receive(region: &dyn MemoryRegion) -> RecvWr {
    RecvWr { wr_id: WrId(1), local: region.sge(MESSAGE as u64, MESSAGE as u32).into() }
}
