//! The control connection: joins, asks, and beats once a second from a thread of its own.

use super::super::chains::Kind;
use super::super::figures::NodeFigures;
use super::super::wire::{Answer, MAPPED_PER_ANSWER, MESSAGE_MAX, Question, Why, encode, parse};
use super::bits::Bits;
use super::{GREETING, LOOK, PATIENCE, RemoteError};
use crate::memory::SharedMemory;
use crate::rdma::{
    Access, Completion, CompletionKind, CompletionQueue, ConnectOptions, Device, Endpoint, MemoryRegion,
    ProtectionDomain, QpConfig, QueuePair, RdmaError, RecvWr, SendOp, SendWr, WcStatus, WrId,
};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Between two beats, at most: a third of the lease is less.
const BEAT: Duration = Duration::from_secs(1);

/// One connection on which a question has an answer.
pub(super) struct Asking {
    qp: Arc<dyn QueuePair>,
    cq: Arc<dyn CompletionQueue>,
    region: Arc<dyn MemoryRegion>,
}

impl Asking {
    /// Connects.
    pub(super) fn connect(
        pd: &Arc<dyn ProtectionDomain>,
        cq: Arc<dyn CompletionQueue>,
        endpoint: &Endpoint,
        depth: u32,
        timeout: Duration,
    ) -> Result<Self, RemoteError> {
        let memory =
            SharedMemory::new("cuttlefs-odrp-control", 2 * MESSAGE_MAX).map_err(RemoteError::Memory)?;
        let region = pd.register(Arc::new(memory), Access::LOCAL)?;
        let options = ConnectOptions { qp: QpConfig::new(&cq, depth, depth), receives: Vec::new(), timeout };
        let qp = pd.connect(endpoint, options)?.qp;
        Ok(Self { qp, cq, region })
    }

    /// As `ask`, on a completion queue of its own.
    fn alone(&self, question: &Question) -> Result<Answer, RemoteError> {
        self.ask(question, &mut VecDeque::new())
    }

    /// The queue pair.
    pub(super) fn queue_pair(&self) -> &Arc<dyn QueuePair> {
        &self.qp
    }

    /// Asks, and waits for the answer. Completions of other queue pairs of the same queue go to `others`.
    pub(super) fn ask(
        &self,
        question: &Question,
        others: &mut VecDeque<Completion>,
    ) -> Result<Answer, RemoteError> {
        let gone = |_| RemoteError::Rdma(RdmaError::Closed);
        let bytes = encode(question)?;
        self.region.memory().write(0, &bytes);
        let room = self.region.sge(MESSAGE_MAX as u64, MESSAGE_MAX as u32);
        self.qp.post_recv(&[RecvWr { wr_id: WrId(1), local: room.into() }]).map_err(gone)?;
        let local = self.region.sge(0, bytes.len() as u32);
        self.qp
            .post_send(&[SendWr { wr_id: WrId(0), op: SendOp::Send, local: local.into(), signaled: false }])
            .map_err(gone)?;
        let deadline = Instant::now() + PATIENCE;
        let mut completions = Vec::new();
        loop {
            // One at a time: what is behind the answer stays in the queue.
            if self.cq.poll(&mut completions, 1) == 0 {
                if Instant::now() > deadline {
                    return Err(RemoteError::Silent);
                }
                self.cq.wait(LOOK);
            }
            for completion in completions.drain(..) {
                if completion.qp != self.qp.number() {
                    others.push_back(completion);
                    continue;
                }
                if completion.status != WcStatus::Success {
                    return Err(RemoteError::Rdma(RdmaError::Closed));
                }
                if completion.kind == CompletionKind::Recv {
                    let mut bytes = vec![0; (completion.byte_len as usize).min(MESSAGE_MAX)];
                    self.region.memory().read(MESSAGE_MAX, &mut bytes);
                    return match parse(&bytes)? {
                        Answer::Refused { reason } => Err(RemoteError::Refused(reason)),
                        answer => Ok(answer),
                    };
                }
            }
        }
    }
}

struct Beating {
    asking: Mutex<Asking>,
    stop: Mutex<bool>,
    bell: Condvar,
}

/// The control connection of a client.
pub(super) struct Control {
    beating: Arc<Beating>,
    token: u128,
    budget: u64,
    thread: Option<std::thread::JoinHandle<()>>,
}

fn unexpected(answer: &Answer) -> RemoteError {
    RemoteError::Refused(format!("it answered {answer:?} to another question; run the same release on both"))
}

/// Asks a node what it says of itself, without joining.
///
/// # Errors
/// `RemoteError`, with advice.
pub fn node_figures(device: &Arc<dyn Device>, endpoint: &Endpoint) -> Result<NodeFigures, RemoteError> {
    let asking = Asking::connect(&device.alloc_pd()?, device.create_cq(16)?, endpoint, 4, GREETING)?;
    let answer = asking.alone(&Question::Figures);
    asking.qp.close();
    match answer? {
        Answer::Figures(figures) => Ok(figures),
        other => Err(unexpected(&other)),
    }
}

impl Control {
    pub(super) fn join(
        device: &Arc<dyn Device>,
        pd: &Arc<dyn ProtectionDomain>,
        endpoint: &Endpoint,
        pages: u64,
    ) -> Result<Self, RemoteError> {
        let asking = Asking::connect(pd, device.create_cq(16)?, endpoint, 4, GREETING)?;
        let (token, budget, lease) = match asking.alone(&Question::Join { pages })? {
            Answer::Joined { token, budget, lease_seconds } => (token, budget, lease_seconds),
            other => return Err(unexpected(&other)),
        };
        let beating =
            Arc::new(Beating { asking: Mutex::new(asking), stop: Mutex::new(false), bell: Condvar::new() });
        let own = beating.clone();
        let pause = BEAT.min(Duration::from_secs(lease.into()) / 4);
        let thread = std::thread::Builder::new()
            .name("odrp-beat".to_owned())
            .spawn(move || own.beat(pause))
            .map_err(RemoteError::Memory)?;
        Ok(Self { beating, token, budget, thread: Some(thread) })
    }

    pub(super) fn token(&self) -> u128 {
        self.token
    }

    pub(super) fn budget(&self) -> u64 {
        self.budget
    }

    /// Why a kind's connection broke.
    pub(super) fn why(&self, kind: Kind) -> Result<Why, RemoteError> {
        match self.beating.asking.lock().alone(&Question::Why { kind })? {
            Answer::Broke { why } => Ok(why),
            other => Err(unexpected(&other)),
        }
    }

    /// Learns what is mapped.
    pub(super) fn mapped(&self, pages: u64, into: &mut Bits) -> Result<(), RemoteError> {
        let mut learnt = Bits::new(pages);
        for first in (0..pages).step_by(MAPPED_PER_ANSWER as usize) {
            match self.beating.asking.lock().alone(&Question::Mapped { first })? {
                Answer::Mapped { bits } => {
                    let set = (0..bits.len() * 8).filter(|at| bits[at / 8] >> (at % 8) & 1 == 1);
                    set.for_each(|at| learnt.set(first + at as u64));
                }
                other => return Err(unexpected(&other)),
            }
        }
        *into = learnt;
        Ok(())
    }
}

impl Beating {
    fn beat(&self, pause: Duration) {
        let mut stop = self.stop.lock();
        while !*stop {
            self.bell.wait_for(&mut stop, pause);
            if *stop {
                return;
            }
            let asked =
                parking_lot::MutexGuard::unlocked(&mut stop, || self.asking.lock().alone(&Question::Beat));
            if let Err(error) = asked {
                // Whoever uses the pages hears of it, too.
                tracing::warn!("the memory node does not hear this client: {error}");
                return;
            }
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        *self.beating.stop.lock() = true;
        self.beating.bell.notify_all();
        // An answer that the thread waits for comes no more.
        if let Some(asking) = self.beating.asking.try_lock() {
            asking.qp.close();
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
