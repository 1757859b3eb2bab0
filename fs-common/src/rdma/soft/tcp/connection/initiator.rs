//! Requests of this side: from the send queue to a packet, and from a reply to a completion.

use super::output::{OUTPUT_SOFT_BYTES, Sending};
use super::scratch::with_packet;
use super::{End, TcpQp};
use crate::breach::Breach;
use crate::rdma::soft::queue::{MAX_MESSAGE_BYTES, MAX_TRANSFER_BYTES, writes_local};
use crate::rdma::soft::region::Local;
use crate::rdma::soft::tcp::packet::{PACKET_HEADER_LEN, PacketHeader, PacketKind, placement_number};
use crate::rdma::verbs::{CompletionKind, QpState, Remote, SendOp, SendWr, WcStatus, WrId};
use std::sync::atomic::Ordering;

/// A request that is on its way.
pub(super) struct Pending {
    pub(super) sequence: u64,
    pub(super) wr_id: WrId,
    pub(super) kind: CompletionKind,
    pub(super) signaled: bool,
    /// The reply it waits for; `None`: it is done when its bytes have reached the socket and all requests before it are done.
    pub(super) expects: Option<PacketKind>,
    /// Bytes that have reached the socket when this request's bytes have.
    pub(super) sent_at: u64,
    /// The reply may be shorter, at the end of a file.
    pub(super) may_be_short: bool,
    /// Where the bytes of the reply go.
    pub(super) local: Local,
    /// Bytes that were sent.
    pub(super) sent_len: u32,
}

impl TcpQp {
    pub(super) fn drain_queue(&self, sending: &mut Sending) -> Result<(), End> {
        while sending.waiting() <= OUTPUT_SOFT_BYTES
            && let Some(request) = sending.queue.pop_front()
        {
            if let Err(end) = self.execute(sending, &request) {
                if !matches!(end, End::Failed(_)) {
                    // The request is neither done nor completed. The flush that follows completes it first.
                    sending.queue.push_front(request);
                }
                return Err(end);
            }
        }
        // Those that were gathered have reached the socket with the last of the doorbell.
        self.complete_sent(sending);
        Ok(())
    }

    /// Builds and sends the packet of one request.
    fn execute(&self, sending: &mut Sending, request: &SendWr) -> Result<(), End> {
        let kind = request.op.kind();
        let refuse = |sending: &mut Sending, status| {
            // Those before it in the doorbell are done first.
            self.send_gathered(sending)?;
            self.complete_sent(sending);
            self.core.become_state(QpState::Error);
            self.core.complete_send(request.wr_id, kind, status, true, 0);
            Err(End::Failed(status))
        };
        let local = match self.core.registry.local(&request.local, writes_local(&request.op)) {
            Ok(local) => local,
            Err(status) => return refuse(sending, status),
        };
        let mut placed = None;
        let mut header = PacketHeader::new(PacketKind::Send, sending.sequence + 1);
        let mut expects = None;
        let mut may_be_short = false;
        let mut bound = MAX_TRANSFER_BYTES;
        match request.op {
            SendOp::Send => bound = MAX_MESSAGE_BYTES,
            SendOp::SendImm(imm) => {
                bound = MAX_MESSAGE_BYTES;
                header.imm = Some(imm);
            }
            SendOp::Write(Remote::Memory { rkey, offset })
            | SendOp::WriteImm(Remote::Memory { rkey, offset }, _) => {
                header.kind = PacketKind::Write;
                header.key = rkey.0.into();
                header.offset = offset;
                header.ack = request.signaled;
                if let SendOp::WriteImm(_, imm) = request.op {
                    header.imm = Some(imm);
                }
                expects = request.signaled.then_some(PacketKind::WriteAck);
            }
            SendOp::Write(Remote::File { filekey, offset }) => {
                (header.kind, header.key, header.offset) = (PacketKind::WriteFile, filekey.0, offset);
                header.ack = request.signaled;
                expects = request.signaled.then_some(PacketKind::WriteAck);
            }
            SendOp::Read(remote) => {
                (header.kind, header.key, header.offset) = match remote {
                    Remote::Memory { rkey, offset } => (PacketKind::ReadMemory, rkey.0.into(), offset),
                    Remote::File { filekey, offset } => (PacketKind::ReadFile, filekey.0, offset),
                    Remote::Bitmap { filekey, first_page } => (PacketKind::ReadBitmap, filekey.0, first_page),
                };
                // Not sent if it is more than a transfer may have.
                header.wanted = local.len() as u32;
                may_be_short = matches!(remote, Remote::File { .. });
                expects = Some(PacketKind::ReadReply);
            }
            SendOp::CompareSwap { remote: Remote::Memory { rkey, offset }, expect, swap } => {
                (header.kind, header.key, header.offset) = (PacketKind::CompareSwap, rkey.0.into(), offset);
                (header.first, header.second) = (expect, swap);
                expects = Some(PacketKind::AtomicReply);
            }
            SendOp::FetchAdd { remote: Remote::Memory { rkey, offset }, add } => {
                (header.kind, header.key, header.offset) = (PacketKind::FetchAdd, rkey.0.into(), offset);
                header.first = add;
                expects = Some(PacketKind::AtomicReply);
            }
            SendOp::CompareSwap { remote: Remote::File { filekey, offset }, expect, swap } => {
                (header.kind, header.key, header.offset) = (PacketKind::CompareSwapFile, filekey.0, offset);
                (header.first, header.second) = (expect, swap);
                expects = Some(PacketKind::AtomicReply);
            }
            SendOp::FetchAdd { remote: Remote::File { filekey, offset }, add } => {
                (header.kind, header.key, header.offset) = (PacketKind::FetchAddFile, filekey.0, offset);
                header.first = add;
                expects = Some(PacketKind::AtomicReply);
            }
            SendOp::Append { filekey, placed: at } => {
                placed = match self.core.registry.local(&at.into(), true) {
                    Ok(at) if at.is_word() => Some(at),
                    Ok(_) => return refuse(sending, WcStatus::LocalLength),
                    Err(status) => return refuse(sending, status),
                };
                (header.kind, header.key) = (PacketKind::Append, filekey.0);
                expects = Some(PacketKind::AppendReply);
            }
            SendOp::Flush { remote: Remote::Memory { rkey, offset }, len, placement } => {
                (header.kind, header.key, header.offset) = (PacketKind::Flush, rkey.0.into(), offset);
                (header.first, header.second) = (len.into(), placement_number(placement));
                bound = 0;
                expects = Some(PacketKind::FlushAck);
            }
            // FLUSH covers memory only; an RPC makes files durable.
            _ => return refuse(sending, WcStatus::RemoteInvalid),
        }
        if local.len() > bound as usize || (expects == Some(PacketKind::AtomicReply) && !local.is_word()) {
            return refuse(sending, WcStatus::LocalLength);
        }
        let payload_len = if writes_local(&request.op) { 0 } else { local.len() };
        let held = match local.hold() {
            Ok(held) => held,
            Err(status) => return refuse(sending, status),
        };
        header.payload_len = payload_len as u32;
        sending.sequence += 1;
        with_packet(payload_len, |packet| {
            if payload_len > 0 {
                held.read(&mut packet[PACKET_HEADER_LEN..]);
            }
            header.seal(packet);
            // All requests of one doorbell go out together.
            let more = !sending.queue.is_empty();
            self.put(sending, packet, more)
        })?;
        drop(held);
        let byte_len = local.len() as u32;
        if expects.is_none() && !request.signaled {
            if matches!(header.kind, PacketKind::Write | PacketKind::WriteFile) {
                sending.silent.push_back((header.sequence, request.wr_id));
                if sending.silent.len() > self.core.send_depth as usize {
                    sending.silent.pop_front();
                }
            }
            self.core.complete_send(request.wr_id, kind, WcStatus::Success, false, byte_len);
        } else if expects.is_none() && sending.pending.is_empty() && sending.waiting() == 0 {
            self.core.complete_send(request.wr_id, kind, WcStatus::Success, true, byte_len);
        } else {
            sending.pending.push_back(Pending {
                sequence: header.sequence,
                wr_id: request.wr_id,
                kind,
                signaled: request.signaled,
                expects,
                sent_at: sending.put_bytes,
                may_be_short,
                local: placed.unwrap_or(local),
                sent_len: payload_len as u32,
            });
        }
        Ok(())
    }

    /// Completes requests that waited only for their bytes to reach the socket, and for the requests before them.
    pub(super) fn complete_sent(&self, sending: &mut Sending) {
        let reached = sending.put_bytes - sending.waiting() as u64;
        while sending.pending.front().is_some_and(|next| next.expects.is_none() && next.sent_at <= reached)
            && let Some(done) = sending.pending.pop_front()
        {
            self.core.complete_send(
                done.wr_id,
                done.kind,
                WcStatus::Success,
                done.signaled,
                done.local.len() as u32,
            );
        }
    }

    /// Completes the oldest request that waits for a reply.
    pub(super) fn take_reply(&self, header: &PacketHeader, payload: &[u8]) -> Result<(), End> {
        let mut sending = self.send.lock();
        if let Some(status) = header.status {
            if let Some((_, wr_id)) = sending.silent.iter().find(|(sequence, _)| *sequence == header.sequence)
            {
                // Its place was given back when it was sent; the completion briefly takes one again.
                self.core.slots.sends.fetch_add(1, Ordering::AcqRel);
                self.core.become_state(QpState::Error);
                self.core.complete_send(*wr_id, CompletionKind::Write, status, true, 0);
                return Err(End::Failed(status));
            }
            return match sending.pending.front() {
                Some(pending) if pending.sequence == header.sequence => {
                    self.core.become_state(QpState::Error);
                    self.core.complete_send(pending.wr_id, pending.kind, status, true, 0);
                    sending.pending.pop_front();
                    Err(End::Failed(status))
                }
                _ => Err(End::Broken(Breach::new(format_args!(
                    "a refusal of request {} that is not outstanding",
                    header.sequence
                )))),
            };
        }
        let expected = sending.pending.front().filter(|pending| {
            let fits = payload.len() == pending.local.len()
                || (payload.len() < pending.local.len() && pending.may_be_short);
            pending.sequence == header.sequence
                && pending.expects == Some(header.kind)
                && (header.kind != PacketKind::ReadReply || fits)
        });
        let Some(pending) = expected else {
            return Err(End::Broken(Breach::new(format_args!(
                "a {:?} to request {} does not fit",
                header.kind, header.sequence
            ))));
        };
        let old = header.first.to_le_bytes();
        let arrived = match header.kind {
            PacketKind::ReadReply => Some(payload),
            PacketKind::AtomicReply | PacketKind::AppendReply => Some(&old[..]),
            _ => None,
        };
        let placed = match arrived {
            Some(bytes) => pending.local.hold().map(|held| {
                held.write(bytes);
                // A completion tells how many bytes arrived; that of an APPEND, how many it placed.
                if header.kind == PacketKind::AppendReply { pending.sent_len } else { bytes.len() as u32 }
            }),
            None => Ok(pending.local.len() as u32),
        };
        let len = match placed {
            Ok(len) => len,
            Err(status) => {
                self.core.become_state(QpState::Error);
                self.core.complete_send(pending.wr_id, pending.kind, status, true, 0);
                sending.pending.pop_front();
                return Err(End::Failed(status));
            }
        };
        self.core.complete_send(pending.wr_id, pending.kind, WcStatus::Success, pending.signaled, len);
        sending.pending.pop_front();
        self.complete_sent(&mut sending);
        Ok(())
    }
}
