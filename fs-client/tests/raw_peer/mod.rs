//! A peer of a server that posts what it likes.

#![allow(dead_code, reason = "each test binary uses its part")]

use crate::running::PATIENCE;
use cuttlefs_common::ids::{SlotIndex, TraceId};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::{
    Access, Completion, CompletionKind, CompletionQueue, ConnectOptions, Device, Endpoint, MemoryRegion,
    QpConfig, QpState, QueuePair, RdmaError, RecvWr, SendOp, SendWr, WcStatus, WrId,
};
use cuttlefs_common::rpc::{
    Attached, HEADER_LEN, MAX_MESSAGE_BYTES, Reply, ReplyHeader, Request, RequestHeader, SessionSecret,
};
use std::sync::Arc;
use std::time::Duration;

const MESSAGE: usize = MAX_MESSAGE_BYTES as usize;
/// Messages of each way.
const DEPTH: usize = 8;
/// The name of a one-sided request.
const TRIED: WrId = WrId(102);
/// Between two looks; the simulated RNIC steps once instead.
const LOOK: Duration = Duration::from_millis(20);

/// A peer that posts requests as it likes.
pub struct Peer {
    cq: Arc<dyn CompletionQueue>,
    pub mr: Arc<dyn MemoryRegion>,
    qp: Arc<dyn QueuePair>,
}

impl Peer {
    /// Connects.
    pub fn connected(device: &dyn Device, endpoint: &Endpoint) -> Self {
        Self::try_connected(device, endpoint).expect("connect")
    }

    /// Connects, if the server lets it in.
    pub fn try_connected(device: &dyn Device, endpoint: &Endpoint) -> Result<Self, RdmaError> {
        let (pd, cq) = (device.alloc_pd().expect("a domain"), device.create_cq(64).expect("a queue"));
        let memory = Arc::new(SharedMemory::new("peer", 2 * DEPTH * MESSAGE).expect("memory"));
        let mr = pd.register(memory, Access::LOCAL).expect("register");
        let receive = |index: usize| RecvWr {
            wr_id: WrId(index as u64),
            local: mr.sge((index * MESSAGE) as u64, MAX_MESSAGE_BYTES).into(),
        };
        let options = ConnectOptions {
            qp: QpConfig::new(&cq, DEPTH as u32, DEPTH as u32),
            receives: (0..DEPTH).map(receive).collect(),
            timeout: PATIENCE,
        };
        let qp = pd.connect(endpoint, options)?.qp;
        Ok(Self { cq, mr, qp })
    }

    /// Connects and attaches, as the client of this secret. Returns also what the server says to that.
    pub fn attached(device: &dyn Device, endpoint: &Endpoint, secret: u8) -> (Self, Attached) {
        let peer = Self::connected(device, endpoint);
        let attached = peer.attach(secret);
        (peer, attached)
    }

    /// Attaches as the client of this secret. Returns what the server says to that.
    pub fn attach(&self, secret: u8) -> Attached {
        let secret = SessionSecret([secret; 16]);
        self.post(&[(0, Request::Attach { secret, label: "peer", subtree: b"" })]);
        let message = self.message();
        let (header, body) = ReplyHeader::parse(&message).expect("a reply");
        assert_eq!((header.slot, header.result), (SlotIndex(0), Ok(())));
        let Reply::Attached(attached) = Reply::parse(body).expect("an answer") else { panic!("attached") };
        attached
    }

    /// Sends these requests with one doorbell, each in its slot.
    pub fn post(&self, requests: &[(u16, Request<'_>)]) {
        let encode = |(index, (slot, request)): (usize, &(u16, Request<'_>))| {
            let at = (DEPTH + index) * MESSAGE;
            let mut body = vec![0; MESSAGE - HEADER_LEN];
            let len = request.encode(&mut body).expect("it fits");
            let header = RequestHeader {
                slot: SlotIndex(*slot),
                seq: 1,
                trace: TraceId(1),
                uid: 0,
                gid: 0,
                umask: 0,
                drops_privileges: false,
            };
            self.mr.memory().write(at, &header.encode(len as u32));
            self.mr.memory().write(at + HEADER_LEN, &body[..len]);
            let local = self.mr.sge(at as u64, (HEADER_LEN + len) as u32);
            SendWr { wr_id: WrId(100), op: SendOp::Send, local: local.into(), signaled: false }
        };
        let all: Vec<_> = requests.iter().enumerate().map(encode).collect();
        self.qp.post_send(&all).expect("post");
    }

    /// Executes a one-sided request of this length. Returns how it ended.
    pub fn tries(&self, op: SendOp, len: u32) -> WcStatus {
        let local = self.mr.sge((DEPTH * MESSAGE) as u64, len);
        self.qp.post_send(&[SendWr { wr_id: TRIED, op, local: local.into(), signaled: true }]).expect("post");
        let mut out: Vec<Completion> = Vec::new();
        loop {
            if let Some(tried) = out.iter().find(|completion| completion.wr_id == TRIED) {
                return tried.status;
            }
            self.cq.wait(LOOK);
            self.cq.poll(&mut out, 1);
        }
    }

    /// The next message's header.
    pub fn answer(&self) -> ReplyHeader {
        ReplyHeader::parse(&self.message()).expect("a reply").0
    }

    fn message(&self) -> Vec<u8> {
        let mut out: Vec<Completion> = Vec::new();
        while out.iter().all(|completion| completion.kind != CompletionKind::Recv) {
            assert_eq!(self.qp.state(), QpState::ReadyToSend);
            self.cq.wait(LOOK);
            self.cq.poll(&mut out, 1);
        }
        let index = out.last().expect("a completion").wr_id.0 as usize;
        let mut message = vec![0; out.last().expect("a completion").byte_len as usize];
        self.mr.memory().read(index * MESSAGE, &mut message);
        message
    }

    /// Sends a message of many packets, of which the second half is no memory: its RNIC sends the packets of the first half, then breaks the
    /// connection.
    pub fn post_half_a_message(&self) {
        let half = MAX_MESSAGE_BYTES / 2;
        let at = self.mr.memory().len() as u64 - u64::from(half);
        let local = self.mr.sge(at, MAX_MESSAGE_BYTES);
        let message = SendWr { wr_id: WrId(101), op: SendOp::Send, local: local.into(), signaled: true };
        self.qp.post_send(&[message]).expect("post");
    }

    /// Waits until the server has ended the connection.
    pub fn wait_for_end(&self) {
        while self.qp.state() == QpState::ReadyToSend {
            self.cq.wait(LOOK);
            self.cq.poll(&mut Vec::new(), 16);
        }
    }
}
