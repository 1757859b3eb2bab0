//! The sender's half of the other systems: one RPC at a time, by the verbs each uses (`system`).
//!
//! A reply is header (number, bytes of the body: u32 each; status u64), body padded to eight bytes, and the number
//! again: who finds both numbers has all of it, whether it was written here or read from there.

use super::load::Caller;
use super::store::Requests;
use super::system::System;
use anyhow::{Context as _, bail, ensure};
use cuttlefs_common::ids::Rkey;
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions};
use cuttlefs_common::rdma::{
    Access, Completion, CompletionKind, CompletionQueue, ConnectOptions, Device, Endpoint, MemoryRegion,
    QpConfig, QueuePair, RecvWr, Remote, SendOp, SendWr, WcStatus, WrId,
};
use cuttlefs_common::spin;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes before a reply's body.
pub(super) const REPLY_HEADER: usize = 16;
/// Requests of ScaleRPC between two warm-ups (section 5.1).
const PROCESS_PHASES: u32 = 100;
/// Immediate of a warm-up: the receiver fetches the request itself.
pub(super) const WARM_UP: u32 = 1 << 31;
/// How long a reply may take.
const PATIENCE: Duration = Duration::from_secs(10);
const DEPTH: u32 = 64;
/// Requests before what is sent: their number, and padding.
pub(super) const NUMBER_LEN: usize = 8;

/// What both sides keep for a connection: requests at the front, replies behind.
#[derive(Clone, Copy, Debug)]
pub(super) struct Areas {
    pub(super) request_max: usize,
    pub(super) reply_max: usize,
}

impl Areas {
    pub(super) fn new(object_len: usize, batch: usize, scan: usize) -> Self {
        let request_max = (NUMBER_LEN + Requests::write_len(object_len, batch)).next_multiple_of(64);
        let reply_max = (REPLY_HEADER + scan * object_len + 16).next_multiple_of(64);
        Self { request_max, reply_max }
    }

    pub(super) fn reply_at(self) -> usize {
        self.request_max
    }

    /// A valid word or an address, behind all else.
    pub(super) fn word_at(self) -> usize {
        self.request_max + self.reply_max
    }

    pub(super) fn len(self) -> usize {
        self.word_at() + 64
    }
}

/// Bytes of a reply with such a body.
pub(super) fn reply_len(body: usize) -> usize {
    REPLY_HEADER + body.next_multiple_of(8) + 8
}

/// The body of the reply with this number, if all of it is there.
fn reply(memory: &SharedMemory, at: usize, room: usize, number: u32, body: &mut Vec<u8>) -> Option<u64> {
    let header = memory.load_u64(at);
    let len = (header >> 32) as usize;
    if header as u32 != number || reply_len(len) > room {
        return None;
    }
    if memory.load_u64(at + reply_len(len) - 8) != u64::from(number) {
        return None;
    }
    body.resize(len, 0);
    memory.read(at + REPLY_HEADER, body);
    Some(memory.load_u64(at + 8))
}

/// One sender.
pub(super) struct ComparatorCaller {
    system: System,
    areas: Areas,
    qp: Arc<dyn QueuePair>,
    cq: Arc<dyn CompletionQueue>,
    mr: Arc<dyn MemoryRegion>,
    peer: Rkey,
    number: u32,
    requests: Requests,
    answer: Vec<u8>,
    completions: Vec<Completion>,
    _device: Arc<SoftDevice>,
}

impl ComparatorCaller {
    pub(super) fn connect(
        endpoint: &Endpoint,
        system: System,
        areas: Areas,
        object_len: usize,
    ) -> anyhow::Result<Self> {
        let device = SoftDevice::new(SoftOptions::default());
        let pd = device.alloc_pd();
        let cq = device.create_cq(DEPTH)?;
        let memory = Arc::new(SharedMemory::new("bench-caller", areas.len()).context("no memory")?);
        let mr = pd.register(memory, Access::ALL)?;
        let config =
            QpConfig { send_cq: cq.clone(), recv_cq: cq.clone(), send_depth: DEPTH, recv_depth: DEPTH };
        let receive =
            RecvWr { wr_id: WrId(0), local: mr.sge(areas.reply_at() as u64, areas.reply_max as u32) };
        let options = ConnectOptions { qp: config, receives: vec![receive; 2], timeout: PATIENCE };
        let qp = pd.connect(endpoint, options)?.qp;
        let mut caller = Self {
            system,
            areas,
            qp,
            cq,
            mr,
            peer: Rkey(0),
            number: 0,
            requests: Requests::new(object_len),
            answer: Vec::new(),
            completions: Vec::new(),
            _device: device,
        };
        // The receiver is told where to write and says where to write to.
        caller.mr.memory().write(0, &caller.mr.rkey().0.to_le_bytes());
        caller.post(SendOp::Send, 0, 4, false)?;
        caller.receive()?;
        caller.peer =
            Rkey(caller.mr.memory().atomic_u32(areas.reply_at()).load(std::sync::atomic::Ordering::Acquire));
        Ok(caller)
    }

    fn wr(&self, op: SendOp, at: usize, len: usize, signaled: bool) -> SendWr {
        SendWr { wr_id: WrId(0), op, local: self.mr.sge(at as u64, len as u32), signaled }
    }

    fn post(&self, op: SendOp, at: usize, len: usize, signaled: bool) -> anyhow::Result<()> {
        Ok(self.qp.post_send(&[self.wr(op, at, len, signaled)])?)
    }

    fn there(&self, at: usize) -> Remote {
        Remote::Memory { rkey: self.peer, offset: at as u64 }
    }

    /// Waits for a completion of a receive or a READ.
    fn wait_for(&mut self, kinds: &[CompletionKind]) -> anyhow::Result<()> {
        let start = Instant::now();
        loop {
            while self.cq.poll(&mut self.completions, 16) == 0 {
                ensure!(start.elapsed() < PATIENCE, "{}: no reply came", self.system.label());
                self.cq.wait(Duration::from_millis(20));
            }
            for completion in std::mem::take(&mut self.completions) {
                ensure!(
                    completion.status == WcStatus::Success,
                    "the connection broke: {:?}",
                    completion.status
                );
                if kinds.contains(&completion.kind) {
                    return Ok(());
                }
            }
        }
    }

    fn receive(&mut self) -> anyhow::Result<()> {
        self.wait_for(&[CompletionKind::Recv, CompletionKind::RecvWithImm])?;
        let local = self.mr.sge(self.areas.reply_at() as u64, self.areas.reply_max as u32);
        Ok(self.qp.post_recv(&[RecvWr { wr_id: WrId(0), local }])?)
    }

    /// Polls memory for a reply that is written without a word.
    fn poll_memory(&mut self) -> anyhow::Result<u64> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.here() {
                return Ok(status);
            }
            // The RNIC of a socket link works when it is polled; a broken connection shows here, too.
            self.cq.poll(&mut self.completions, 16);
            for completion in self.completions.drain(..) {
                ensure!(
                    completion.status == WcStatus::Success,
                    "the connection broke: {:?}",
                    completion.status
                );
            }
            ensure!(start.elapsed() < PATIENCE, "{}: no reply came", self.system.label());
            spin::pause();
        }
    }

    fn here(&mut self) -> Option<u64> {
        let (at, room) = (self.areas.reply_at(), self.areas.reply_max);
        reply(self.mr.memory(), at, room, self.number, &mut self.answer)
    }

    /// READs the reply until it is there.
    fn fetch(&mut self, body: usize) -> anyhow::Result<u64> {
        let start = Instant::now();
        let at = self.areas.reply_at();
        loop {
            self.post(SendOp::Read(self.there(at)), at, reply_len(body), true)?;
            self.wait_for(&[CompletionKind::Read])?;
            if let Some(status) = self.here() {
                return Ok(status);
            }
            ensure!(start.elapsed() < PATIENCE, "{}: no reply came", self.system.label());
            spin::pause();
        }
    }

    /// Does the RPC whose request was built; the reply's body has so many bytes.
    fn call(&mut self, body: usize) -> anyhow::Result<()> {
        self.number += 1;
        let len = NUMBER_LEN + self.requests.bytes.len();
        ensure!(len <= self.areas.request_max, "a request of {len} bytes");
        let memory = self.mr.memory();
        memory.write(0, &u64::from(self.number).to_le_bytes());
        memory.write(NUMBER_LEN, &self.requests.bytes);
        let imm = len as u32;
        let status = match self.system {
            System::Darpc | System::Fasst => {
                self.post(SendOp::Send, 0, len, false)?;
                self.receive()?;
                self.here()
            }
            System::Octopus => {
                self.post(SendOp::WriteImm(self.there(0), imm), 0, len, false)?;
                self.receive()?;
                self.here()
            }
            System::L5 => {
                let word = self.areas.word_at();
                memory.write(word, &u64::from(self.number).to_le_bytes());
                let data = self.wr(SendOp::Write(self.there(0)), 0, len, false);
                let valid = self.wr(SendOp::WriteImm(self.there(word), imm), word, 8, false);
                self.qp.post_send(&[data, valid])?;
                Some(self.poll_memory()?)
            }
            System::Rfp => {
                self.post(SendOp::WriteImm(self.there(0), imm), 0, len, false)?;
                Some(self.fetch(body)?)
            }
            System::Scalerpc if self.number % PROCESS_PHASES == 1 => {
                let word = self.areas.word_at();
                memory.write(word, &0u64.to_le_bytes());
                self.post(SendOp::WriteImm(self.there(word), imm | WARM_UP), word, 8, false)?;
                Some(self.poll_memory()?)
            }
            System::Farm | System::Scalerpc => {
                self.post(SendOp::WriteImm(self.there(0), imm), 0, len, false)?;
                Some(self.poll_memory()?)
            }
            _ => bail!("{} is no comparator", self.system.label()),
        };
        match status {
            Some(0) => Ok(()),
            Some(status) => bail!("a request failed with {status}"),
            None => bail!("{}: a reply is not what it should be", self.system.label()),
        }
    }
}

impl Caller for ComparatorCaller {
    fn write(&mut self, keys: &[u32]) -> anyhow::Result<()> {
        self.requests.write(keys);
        self.call(0)
    }

    fn read(&mut self, key: u32, count: u32) -> anyhow::Result<()> {
        self.requests.read(key, count);
        self.call(count as usize * self.requests.object_len)?;
        self.requests.check(key, count, &self.answer)
    }

    fn slowed(&self) -> u64 {
        0
    }
}
