//! The peer's requests: one-sided ones are executed here, messages go to posted receives.
//!
//! An access to a file that faults is executed on a fault thread; the queue pair stalls meanwhile.

use super::held::Flush;
use super::input::Receiving;
use super::scratch::with_packet;
use super::{End, TcpQp};
use crate::breach::Breach;
use crate::ids::FileKey;
use crate::rdma::soft::queue::PostedReceive;
use crate::rdma::soft::region::Need;
use crate::rdma::soft::tcp::engine::token;
use crate::rdma::soft::tcp::faults::{Fault, FaultAccess};
use crate::rdma::soft::tcp::packet::{PACKET_HEADER_LEN, PacketHeader, PacketKind};
use crate::rdma::verbs::{
    FileAtomic, FileRead, FileTarget, FileValue, FileWrite, QpState, RegionOwner, WcStatus,
};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Messages that may wait for a receive; with more the queue pair breaks, as an RC queue pair does when its receiver-not-ready retries are used up.
const PARKED_MESSAGES_MAX: usize = 128;

/// Something that waits for a receive.
pub(super) enum Parked {
    Message(Vec<u8>, Option<u32>),
    WriteImm(u32, u32),
    /// A FLUSH behind messages that wait.
    Flush(Flush),
}

/// Makes a prepared packet a reply that carries the first `len` bytes of its room.
fn seal(packet: &mut Vec<u8>, mut header: PacketHeader, len: usize) {
    packet.truncate(PACKET_HEADER_LEN + len);
    header.payload_len = (packet.len() - PACKET_HEADER_LEN) as u32;
    header.seal(packet);
}

impl TcpQp {
    pub(super) fn serve(
        &self,
        receiving: &mut Receiving,
        header: &PacketHeader,
        payload: &[u8],
    ) -> Result<(), End> {
        let remote = |len: u64, need| {
            self.core.registry.remote(header.key, header.offset, len, need).map_err(End::Refused)
        };
        let gone = End::Refused(WcStatus::RemoteAccess);
        let wanted = header.wanted as usize;
        let reply = PacketHeader::new(PacketKind::ReadReply, header.sequence);
        match header.kind {
            PacketKind::Send => self.deliver(receiving, payload, header.imm),
            // Without bytes it touches no memory, and as with an RNIC its key is not looked at: the immediate alone is a message.
            PacketKind::Write if payload.is_empty() && header.imm.is_some() => {
                self.deliver_write_imm(receiving, 0, header.imm.unwrap_or_default())?;
                self.acknowledge_write(header)
            }
            PacketKind::Write => {
                let region = remote(payload.len() as u64, Need::Write)?;
                {
                    let _touch = region.touch().ok_or(gone)?;
                    region.write(header.offset, payload);
                }
                if let Some(imm) = header.imm {
                    self.deliver_write_imm(receiving, payload.len() as u32, imm)?;
                }
                self.acknowledge_write(header)
            }
            PacketKind::ReadMemory => {
                let region = remote(wanted as u64, Need::Read)?;
                self.reply(reply, wanted, |out| {
                    let _touch = region.touch().ok_or(WcStatus::RemoteAccess)?;
                    region.read(header.offset, out);
                    Ok(wanted)
                })
            }
            PacketKind::ReadFile
            | PacketKind::WriteFile
            | PacketKind::ReadBitmap
            | PacketKind::CompareSwapFile
            | PacketKind::FetchAddFile
            | PacketKind::Append => self.serve_file(header, payload),
            PacketKind::CompareSwap | PacketKind::FetchAdd => {
                let region = remote(8, Need::Atomic)?;
                let touch = region.touch().ok_or(gone)?;
                let word = region.memory.atomic_u64(header.offset as usize);
                let mut reply = PacketHeader::new(PacketKind::AtomicReply, header.sequence);
                reply.first = if header.kind == PacketKind::FetchAdd {
                    word.fetch_add(header.first, Ordering::AcqRel)
                } else {
                    word.compare_exchange(header.first, header.second, Ordering::AcqRel, Ordering::Acquire)
                        .unwrap_or_else(|old| old)
                };
                drop(touch);
                self.reply(reply, 0, |_| Ok(0))
            }
            PacketKind::Flush => self.flush(receiving, header),
            _ => Err(End::Broken(Breach::new(format_args!(
                "a {:?} packet came inside the connection",
                header.kind
            )))),
        }
    }

    /// Executes a request that names a file.
    fn serve_file(&self, header: &PacketHeader, payload: &[u8]) -> Result<(), End> {
        let target = self.file_target.read().clone().ok_or(End::Refused(WcStatus::RemoteInvalid))?;
        let owner = self.core.owner();
        if owner.0 == 0 {
            return Err(End::Refused(WcStatus::RemoteAccess));
        }
        let (filekey, wanted) = (FileKey(header.key), header.wanted as usize);
        match header.kind {
            PacketKind::ReadFile => self.read_file(header, target, owner),
            PacketKind::WriteFile => self.write_file(header, payload, target, owner),
            PacketKind::Append => self.append_file(header, payload, target, owner),
            // Bitmaps are read in whole bytes, and atomics are of aligned words.
            _ if !header.offset.is_multiple_of(8) => Err(End::Refused(WcStatus::RemoteInvalid)),
            PacketKind::CompareSwapFile => {
                let operation = FileAtomic::CompareSwap { expect: header.first, swap: header.second };
                self.change_word(header, operation, target, owner)
            }
            PacketKind::FetchAddFile => {
                self.change_word(header, FileAtomic::FetchAdd { add: header.first }, target, owner)
            }
            _ => {
                let reply = PacketHeader::new(PacketKind::ReadReply, header.sequence);
                self.reply(reply, wanted, |out| {
                    target.read_bitmap(owner, filekey, header.offset, out).map(|()| wanted)
                })
            }
        }
    }

    fn read_file(
        &self,
        header: &PacketHeader,
        target: Arc<dyn FileTarget>,
        owner: RegionOwner,
    ) -> Result<(), End> {
        let (filekey, offset, wanted) = (FileKey(header.key), header.offset, header.wanted as usize);
        let read = with_packet(wanted, |packet| {
            let read = target.read_file(owner, filekey, offset, &mut packet[PACKET_HEADER_LEN..]);
            let read = read.map_err(End::Refused)?;
            if let FileRead::Done(len) = read {
                seal(packet, PacketHeader::new(PacketKind::ReadReply, header.sequence), len);
                self.put_reply(&mut self.send.lock(), packet)?;
            }
            Ok::<_, End>(read)
        })?;
        match read {
            FileRead::Done(_) => Ok(()),
            FileRead::Faults => self.stall(Fault {
                number: token(self),
                payer: self.payer(),
                sequence: header.sequence,
                target,
                owner,
                filekey,
                offset,
                access: FaultAccess::Read(wanted),
            }),
        }
    }

    fn write_file(
        &self,
        header: &PacketHeader,
        bytes: &[u8],
        target: Arc<dyn FileTarget>,
        owner: RegionOwner,
    ) -> Result<(), End> {
        let (filekey, offset) = (FileKey(header.key), header.offset);
        match target.write_file(owner, filekey, offset, bytes).map_err(End::Refused)? {
            FileWrite::Done => self.acknowledge_write(header),
            FileWrite::Faults => self.stall(Fault {
                number: token(self),
                payer: self.payer(),
                sequence: header.sequence,
                target,
                owner,
                filekey,
                offset,
                access: FaultAccess::Write { bytes: bytes.to_vec(), ack: header.ack },
            }),
        }
    }

    fn change_word(
        &self,
        header: &PacketHeader,
        operation: FileAtomic,
        target: Arc<dyn FileTarget>,
        owner: RegionOwner,
    ) -> Result<(), End> {
        let (filekey, offset) = (FileKey(header.key), header.offset);
        match target.atomic_file(owner, filekey, offset, operation).map_err(End::Refused)? {
            FileValue::Done(old) => self.reply_value(PacketKind::AtomicReply, header.sequence, old),
            FileValue::Faults => self.stall(Fault {
                number: token(self),
                payer: self.payer(),
                sequence: header.sequence,
                target,
                owner,
                filekey,
                offset,
                access: FaultAccess::Atomic(operation),
            }),
        }
    }

    fn append_file(
        &self,
        header: &PacketHeader,
        bytes: &[u8],
        target: Arc<dyn FileTarget>,
        owner: RegionOwner,
    ) -> Result<(), End> {
        let filekey = FileKey(header.key);
        match target.append_file(owner, filekey, bytes).map_err(End::Refused)? {
            FileValue::Done(offset) => self.reply_value(PacketKind::AppendReply, header.sequence, offset),
            FileValue::Faults => self.stall(Fault {
                number: token(self),
                payer: self.payer(),
                sequence: header.sequence,
                target,
                owner,
                filekey,
                offset: 0,
                access: FaultAccess::Append(bytes.to_vec()),
            }),
        }
    }

    fn reply_value(&self, kind: PacketKind, sequence: u64, value: u64) -> Result<(), End> {
        self.reply(PacketHeader { first: value, ..PacketHeader::new(kind, sequence) }, 0, |_| Ok(0))
    }

    fn acknowledge_write(&self, header: &PacketHeader) -> Result<(), End> {
        if !header.ack {
            return Ok(());
        }
        self.reply(PacketHeader::new(PacketKind::WriteAck, header.sequence), 0, |_| Ok(0))
    }

    /// Stops reading input until the fault is over.
    fn stall(&self, fault: Fault) -> Result<(), End> {
        // Only a side with an engine may stall: on a self-driven side nobody else would read the replies.
        let engine = self.engine.as_ref().ok_or(End::Refused(WcStatus::RemoteInvalid))?;
        {
            let mut sending = self.send.lock();
            sending.stalled = true;
            self.watch(&mut sending);
        }
        engine.faults().take(engine, fault).map_err(|error| {
            tracing::error!(%error, "no thread for an access to a file that faults");
            End::Refused(WcStatus::RemoteOperation)
        })
    }

    /// Executes the request that faulted, replies, and lets the engine go on with the input. On a fault thread.
    pub(in crate::rdma::soft::tcp) fn finish_fault(&self, fault: &Fault) {
        let room = if let FaultAccess::Read(wanted) = &fault.access { *wanted } else { 0 };
        let result = with_packet(room, |packet| {
            let Fault { sequence, ref target, owner, filekey, offset, ref access, .. } = *fault;
            let header = |kind| PacketHeader::new(kind, sequence);
            let with_value = |kind, first| Some((PacketHeader { first, ..header(kind) }, 0));
            let done = match access {
                FaultAccess::Read(_) => {
                    let out = &mut packet[PACKET_HEADER_LEN..];
                    let read = target.read_file_faulting(owner, filekey, offset, out);
                    read.map(|len| Some((header(PacketKind::ReadReply), len)))
                }
                FaultAccess::Write { bytes, ack } => {
                    let written = target.write_file_faulting(owner, filekey, offset, bytes);
                    written.map(|()| ack.then_some((header(PacketKind::WriteAck), 0)))
                }
                FaultAccess::Atomic(operation) => {
                    let old = target.atomic_file_faulting(owner, filekey, offset, *operation);
                    old.map(|old| with_value(PacketKind::AtomicReply, old))
                }
                FaultAccess::Append(bytes) => {
                    let placed = target.append_file_faulting(owner, filekey, bytes);
                    placed.map(|at| with_value(PacketKind::AppendReply, at))
                }
            };
            let mut sending = self.send.lock();
            if self.has_ended() {
                return Ok(());
            }
            match done {
                Ok(reply) => {
                    if let Some((header, len)) = reply {
                        seal(packet, header, len);
                        self.put_reply(&mut sending, packet)?;
                    }
                    sending.stalled = false;
                    sending.resumed = true;
                    self.watch(&mut sending);
                    Ok(())
                }
                Err(status) => {
                    // The queue pair stays stalled: nothing is executed behind a refusal.
                    self.put_refusal(&mut sending, sequence, status)
                }
            }
        });
        if let Err(end) = result {
            self.end(Some(end));
        }
    }

    /// Builds a reply with room for `room` bytes; `fill` returns how many of them to send.
    pub(super) fn reply(
        &self,
        header: PacketHeader,
        room: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<usize, WcStatus>,
    ) -> Result<(), End> {
        with_packet(room, |packet| {
            let len = fill(&mut packet[PACKET_HEADER_LEN..]).map_err(End::Refused)?;
            seal(packet, header, len);
            self.put_reply(&mut self.send.lock(), packet)
        })
    }

    /// Hands a message to the oldest receive, or parks it.
    fn deliver(&self, receiving: &mut Receiving, payload: &[u8], imm: Option<u32>) -> Result<(), End> {
        if receiving.chain.is_some() {
            if receiving.parked.is_empty() && self.start_chain(receiving, payload, imm)? {
                return Ok(());
            }
            return self.park_for_chain(receiving, payload);
        }
        let receive = if receiving.parked.is_empty() { self.core.take_receive() } else { None };
        match receive {
            Some(receive) => self.fill(receive, payload, imm),
            None => self.park(receiving, Parked::Message(payload.to_vec(), imm)),
        }
    }

    fn deliver_write_imm(&self, receiving: &mut Receiving, len: u32, imm: u32) -> Result<(), End> {
        let receive = if receiving.parked.is_empty() { self.core.take_receive() } else { None };
        match receive {
            Some(receive) => {
                self.core.complete_receive(receive.wr_id, WcStatus::Success, len, Some(imm));
                Ok(())
            }
            None => self.park(receiving, Parked::WriteImm(len, imm)),
        }
    }

    fn fill(&self, receive: PostedReceive, payload: &[u8], imm: Option<u32>) -> Result<(), End> {
        if payload.len() > receive.local.len() {
            self.core.become_state(QpState::Error);
            self.core.complete_receive(receive.wr_id, WcStatus::LocalLength, 0, None);
            return Err(End::Failed(WcStatus::LocalLength));
        }
        let placed = receive.local.hold().map(|held| held.write(payload));
        if let Err(status) = placed {
            self.core.become_state(QpState::Error);
            self.core.complete_receive(receive.wr_id, status, 0, None);
            return Err(End::Failed(status));
        }
        self.core.complete_receive(receive.wr_id, WcStatus::Success, payload.len() as u32, imm);
        Ok(())
    }

    pub(super) fn park(&self, receiving: &mut Receiving, message: Parked) -> Result<(), End> {
        if receiving.parked.len() >= PARKED_MESSAGES_MAX {
            return Err(End::Broken(Breach::new(format_args!(
                "{PARKED_MESSAGES_MAX} messages wait for a receive to be posted"
            ))));
        }
        if let Parked::Message(payload, _) = &message {
            receiving.parked_bytes += payload.len();
        }
        receiving.parked.push_back(message);
        self.account_input(receiving);
        self.parked.store(receiving.parked.len(), Ordering::Release);
        // A receive that was posted just now may have read the old count.
        self.unpark(receiving)
    }

    pub(super) fn unpark(&self, receiving: &mut Receiving) -> Result<(), End> {
        while let Some(first) = receiving.parked.pop_front() {
            if !self.core.is_ready() {
                receiving.parked.push_front(first);
                break;
            }
            if let Parked::Flush(flush) = first {
                self.unpark_flush(&flush)?;
                continue;
            }
            if receiving.chain.is_some()
                && let Parked::Message(payload, imm) = &first
            {
                if !self.start_chain(receiving, payload, *imm)? {
                    receiving.parked.push_front(first);
                    break;
                }
                receiving.parked_bytes -= payload.len();
                continue;
            }
            let Some(receive) = self.core.take_receive() else {
                receiving.parked.push_front(first);
                break;
            };
            match first {
                Parked::Message(payload, imm) => {
                    receiving.parked_bytes -= payload.len();
                    self.fill(receive, &payload, imm)?;
                }
                Parked::WriteImm(len, imm) => {
                    self.core.complete_receive(receive.wr_id, WcStatus::Success, len, Some(imm));
                }
                Parked::Flush(_) => unreachable!("a flush takes no receive"),
            }
        }
        self.parked.store(receiving.parked.len(), Ordering::Release);
        self.account_input(receiving);
        Ok(())
    }
}
