//! Clients that do as they like.

use super::{Link, PATIENCE};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::odrp::{
    Answer, Arguments, Kind, MemoryNode, Question, encode, parse, put_message, shape,
};
use cuttlefs_common::rdma::{
    Access, CompletionQueue, ConnectOptions, Device, MemoryRegion, QpConfig, QpState, QueuePair, RecvWr,
    SendOp, SendWr, WcStatus, WrId,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A client that does as it likes.
pub(super) struct Hostile {
    device: Arc<dyn Device>,
    pub(super) control: Raw,
    token: u128,
}

/// A connection of its own, and registered memory.
pub(super) struct Raw {
    qp: Arc<dyn QueuePair>,
    cq: Arc<dyn CompletionQueue>,
    mr: Arc<dyn MemoryRegion>,
}

impl Raw {
    fn connect(device: &Arc<dyn Device>, node: &MemoryNode) -> Self {
        let pd = device.alloc_pd().expect("pd");
        let cq = device.create_cq(256).expect("cq");
        let memory = Arc::new(SharedMemory::new("hostile", 64 << 10).expect("memory"));
        let mr = pd.register(memory, Access::ALL).expect("region");
        let options = ConnectOptions {
            qp: QpConfig::new(&cq, 64, 64),
            receives: vec![RecvWr { wr_id: WrId(1), local: mr.sge(8192, 4096).into() }],
            timeout: PATIENCE,
        };
        let qp = pd.connect(&node.endpoint(), options).expect("connected").qp;
        Self { qp, cq, mr }
    }

    pub(super) fn post(&self, op: SendOp, bytes: &[u8]) {
        self.mr.memory().write(0, bytes);
        let request =
            SendWr { wr_id: WrId(5), op, local: self.mr.sge(0, bytes.len() as u32).into(), signaled: true };
        self.qp.post_send(&[request]).expect("posted");
    }

    pub(super) fn ask(&self, question: &Question) -> Answer {
        self.post(SendOp::Send, &encode(question).expect("it fits"));
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut completions = Vec::new();
            self.cq.poll(&mut completions, 1);
            if let Some(completion) = completions.first().filter(|completion| completion.wr_id == WrId(1)) {
                assert_eq!(completion.status, WcStatus::Success);
                let mut bytes = vec![0; completion.byte_len as usize];
                self.mr.memory().read(8192, &mut bytes);
                return parse(&bytes).expect("an answer");
            }
            assert!(Instant::now() < deadline, "no answer");
            self.cq.wait(Duration::from_millis(50));
        }
    }

    pub(super) fn send(&self, kind: Kind, number: u64, page: u64) {
        let shape = shape(kind);
        let mut message = vec![0; shape.len()];
        let arguments = Arguments { page, tag: 0, to: (self.mr.rkey().0, self.mr.first_address() + 16384) };
        put_message(kind, &shape, number, arguments, &mut message);
        self.post(SendOp::Send, &message);
    }

    /// The node ends the connection.
    pub(super) fn ends(&self) {
        let deadline = Instant::now() + PATIENCE;
        while self.qp.state() != QpState::Error {
            assert!(Instant::now() < deadline, "the connection goes on");
            self.cq.poll(&mut Vec::new(), 16);
            self.cq.wait(Duration::from_millis(20));
        }
    }
}

impl Hostile {
    pub(super) fn join(link: &Link, node: &MemoryNode, pages: u64) -> Self {
        let device = link.device.clone();
        let control = Raw::connect(&device, node);
        let Answer::Joined { token, .. } = control.ask(&Question::Join { pages }) else {
            panic!("not joined")
        };
        Self { device, control, token }
    }

    pub(super) fn connect(&self, node: &MemoryNode) -> Raw {
        Raw::connect(&self.device, node)
    }

    pub(super) fn attach(&self, node: &MemoryNode, kind: Kind) -> Raw {
        let raw = self.connect(node);
        assert_eq!(raw.ask(&Question::Attach { token: self.token, kind }), Answer::Attached);
        raw
    }
}

impl Raw {
    /// As `ask`, once the first receive is used up.
    pub(super) fn ask_again(&self, question: &Question) -> Answer {
        self.qp
            .post_recv(&[RecvWr { wr_id: WrId(1), local: self.mr.sge(8192, 4096).into() }])
            .expect("posted");
        self.ask(question)
    }
}
