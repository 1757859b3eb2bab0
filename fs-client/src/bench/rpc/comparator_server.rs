//! The receiver's half of the other systems: threads that share one completion queue, each taking a request, doing it to
//! its end and replying, as run-to-completion servers do.

use super::comparator::{Areas, NUMBER_LEN, REPLY_HEADER, WARM_UP, reply_len};
use super::store::ObjectStore;
use super::system::System;
use anyhow::Context as _;
use cuttlefs_common::ids::{QpNumber, Rkey};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions};
use cuttlefs_common::rdma::{
    Access, Completion, CompletionKind, CompletionQueue, Device, Endpoint, Listener, MemoryRegion,
    ProtectionDomain, QpConfig, QueuePair, RdmaError, RecvWr, Remote, SendOp, SendWr, WcStatus, WrId,
};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

const DEPTH: u32 = 64;
/// `WrId` of a warm-up's READ; its length is in the low half.
const FETCH: u64 = 1 << 32;

struct Connection {
    qp: Arc<dyn QueuePair>,
    mr: Arc<dyn MemoryRegion>,
    /// The sender's memory; 0 until it said so. Written once by whoever takes its first message, before any request.
    peer: AtomicU32,
}

struct Shared {
    system: System,
    areas: Areas,
    store: Arc<ObjectStore>,
    pd: Arc<dyn ProtectionDomain>,
    cq: Arc<dyn CompletionQueue>,
    connections: Mutex<HashMap<QpNumber, Arc<Connection>>>,
    stopping: AtomicBool,
}

/// A receiver that runs.
pub(super) struct ComparatorServer {
    shared: Arc<Shared>,
    listener: Arc<dyn Listener>,
    threads: Vec<JoinHandle<()>>,
    _device: Arc<SoftDevice>,
}

impl ComparatorServer {
    pub(super) fn start(
        endpoint: &Endpoint,
        system: System,
        areas: Areas,
        store: Arc<ObjectStore>,
        threads: usize,
    ) -> anyhow::Result<Self> {
        let device = SoftDevice::new(SoftOptions::default());
        let pd = device.alloc_pd();
        let listener: Arc<dyn Listener> = Arc::from(pd.listen(endpoint)?);
        let shared = Arc::new(Shared {
            system,
            areas,
            store,
            cq: device.create_cq(DEPTH)?,
            pd,
            connections: Mutex::default(),
            stopping: AtomicBool::new(false),
        });
        let mut server = Self { shared, listener, threads: Vec::new(), _device: device };
        let (running, listening) = (server.shared.clone(), server.listener.clone());
        server.threads.push(std::thread::spawn(move || running.accept(&*listening)));
        for _ in 0..threads.max(1) {
            let running = server.shared.clone();
            server.threads.push(std::thread::spawn(move || running.work()));
        }
        Ok(server)
    }

    pub(super) fn endpoint(&self) -> Endpoint {
        self.listener.endpoint()
    }
}

impl Drop for ComparatorServer {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        self.listener.close();
        for connection in std::mem::take(&mut *self.shared.connections.lock()).values() {
            connection.qp.close();
        }
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                cuttlefs_common::tell!("a thread of {} panicked", self.shared.system.label());
            }
        }
    }
}

impl Shared {
    fn accept(&self, listener: &dyn Listener) {
        loop {
            let incoming = match listener.accept() {
                Ok(incoming) => incoming,
                Err(RdmaError::Closed) => return,
                Err(_) => continue,
            };
            let mut connections = self.connections.lock();
            let made = SharedMemory::new("bench-receiver", self.areas.len())
                .context("no memory")
                .and_then(|memory| Ok(self.pd.register(Arc::new(memory), Access::ALL)?))
                .and_then(|mr| {
                    let (send_cq, recv_cq) = (self.cq.clone(), self.cq.clone());
                    let config = QpConfig { send_cq, recv_cq, send_depth: DEPTH, recv_depth: DEPTH };
                    let qp = incoming.accept(config, vec![self.receive(&*mr); 2])?;
                    Ok(Arc::new(Connection { qp, mr, peer: AtomicU32::new(0) }))
                });
            match made {
                Ok(connection) => drop(connections.insert(connection.qp.number(), connection)),
                Err(error) => cuttlefs_common::tell!("a sender could not connect: {error:#}"),
            }
        }
    }

    fn receive(&self, mr: &dyn MemoryRegion) -> RecvWr {
        RecvWr { wr_id: WrId(0), local: mr.sge(0, self.areas.request_max as u32) }
    }

    fn work(&self) {
        let mut completions = Vec::new();
        let (mut request, mut answer) = (Vec::new(), Vec::new());
        while !self.stopping.load(Ordering::Acquire) {
            // One at a time: another thread may take the next meanwhile.
            if self.cq.poll(&mut completions, 1) == 0 {
                self.cq.wait(Duration::from_millis(20));
                continue;
            }
            for completion in completions.drain(..) {
                if let Err(error) = self.on_completion(&completion, &mut request, &mut answer) {
                    tracing::debug!("a connection ended: {error:#}");
                }
            }
        }
    }

    fn on_completion(
        &self,
        completion: &Completion,
        request: &mut Vec<u8>,
        answer: &mut Vec<u8>,
    ) -> anyhow::Result<()> {
        let found = {
            let mut connections = self.connections.lock();
            if completion.status != WcStatus::Success {
                connections.remove(&completion.qp);
                return Ok(());
            }
            connections.get(&completion.qp).cloned()
        };
        let Some(connection) = found else { return Ok(()) };
        let peer = Rkey(connection.peer.load(Ordering::Acquire));
        let len = match completion.kind {
            CompletionKind::Recv if peer.0 == 0 => return self.greet(&connection),
            CompletionKind::Recv => completion.byte_len as usize,
            CompletionKind::RecvWithImm => {
                let imm = completion.imm.unwrap_or(0);
                connection.qp.post_recv(&[self.receive(&*connection.mr)])?;
                if imm & WARM_UP != 0 {
                    let len = imm & !WARM_UP;
                    let op = SendOp::Read(Remote::Memory { rkey: peer, offset: 0 });
                    let local = connection.mr.sge(0, len);
                    let fetch = SendWr { wr_id: WrId(FETCH | u64::from(len)), op, local, signaled: true };
                    return Ok(connection.qp.post_send(&[fetch])?);
                }
                imm as usize
            }
            CompletionKind::Read => completion.wr_id.0 as u32 as usize,
            _ => return Ok(()),
        };
        anyhow::ensure!((NUMBER_LEN..=self.areas.request_max).contains(&len), "a request of {len} bytes");
        let memory = connection.mr.memory();
        request.resize(len, 0);
        memory.read(0, request);
        let (number, body) = request.split_at(NUMBER_LEN);
        answer.clear();
        let status = self.store.serve(body, answer);
        self.reply(
            &connection,
            peer,
            u32::from_le_bytes([number[0], number[1], number[2], number[3]]),
            status,
            answer,
        )
    }

    /// A sender's first message says where its memory is.
    fn greet(&self, connection: &Connection) -> anyhow::Result<()> {
        let memory = connection.mr.memory();
        connection.peer.store(memory.atomic_u32(0).load(Ordering::Acquire), Ordering::Release);
        connection.qp.post_recv(&[self.receive(&*connection.mr)])?;
        let at = self.areas.reply_at();
        memory.write(at, &connection.mr.rkey().0.to_le_bytes());
        let local = connection.mr.sge(at as u64, 4);
        Ok(connection.qp.post_send(&[SendWr { wr_id: WrId(0), op: SendOp::Send, local, signaled: false }])?)
    }

    fn reply(
        &self,
        connection: &Connection,
        peer: Rkey,
        number: u32,
        status: u32,
        body: &[u8],
    ) -> anyhow::Result<()> {
        let (at, len) = (self.areas.reply_at(), reply_len(body.len()));
        anyhow::ensure!(len <= self.areas.reply_max, "a reply of {len} bytes");
        let memory = connection.mr.memory();
        memory.write(at + REPLY_HEADER, body);
        memory.write(at + 8, &u64::from(status).to_le_bytes());
        memory.atomic_u64(at + len - 8).store(number.into(), Ordering::Release);
        // Last: who reads this one-sidedly and finds the number finds the rest.
        let header = u64::from(number) | (body.len() as u64) << 32;
        memory.atomic_u64(at).store(header, Ordering::Release);
        let there = Remote::Memory { rkey: peer, offset: at as u64 };
        let op = match self.system {
            System::Darpc | System::Fasst => {
                connection.qp.post_recv(&[self.receive(&*connection.mr)])?;
                SendOp::Send
            }
            System::Octopus => SendOp::WriteImm(there, number),
            System::Rfp => return Ok(()),
            _ => SendOp::Write(there),
        };
        let local = connection.mr.sge(at as u64, len as u32);
        Ok(connection.qp.post_send(&[SendWr { wr_id: WrId(0), op, local, signaled: false }])?)
    }
}
