//! Chains of an armed queue pair: a message that comes starts one here, in the connection's turn with the engine.
//!
//! A message that the queue cannot take yet is parked, as one without a posted receive is. What the chain WRITEs to the peer goes behind all output so far.

use super::input::Receiving;
use super::scratch::with_packet;
use super::target::Parked;
use super::{End, TcpQp};
use crate::breach::Breach;
use crate::rdma::chain::{Chain, ChainPeer, Fault, FaultKind, PeerGone};
use crate::rdma::soft::tcp::packet::{PACKET_HEADER_LEN, PacketHeader, PacketKind};
use crate::rdma::verbs::{QpState, RdmaError, WcStatus};
use std::sync::atomic::Ordering;

/// Entries, and bytes, of a chain that count as a packet in a turn.
const ENTRIES_PER_PACKET: u32 = 16;
const BYTES_PER_PACKET: u64 = 16 * 1024;

/// The peer of an armed queue pair.
struct Peer<'q> {
    qp: &'q TcpQp,
    end: Option<End>,
}

impl ChainPeer for Peer<'_> {
    fn write(
        &mut self,
        key: u32,
        address: u64,
        imm: Option<u32>,
        len: usize,
        fill: &dyn Fn(&mut [u8]),
    ) -> Result<(), PeerGone> {
        let put = with_packet(len, |packet| {
            fill(&mut packet[PACKET_HEADER_LEN..]);
            let mut sending = self.qp.send.lock();
            sending.sequence += 1;
            let mut header = PacketHeader::new(PacketKind::Write, sending.sequence);
            (header.key, header.offset, header.imm) = (key.into(), address, imm);
            header.payload_len = len as u32;
            header.seal(packet);
            self.qp.put_answer(&mut sending, packet)
        });
        put.map_err(|end| {
            self.end = Some(end);
            PeerGone
        })
    }
}

impl TcpQp {
    /// From now on messages start this chain.
    pub(super) fn arm_chain(&self, chain: Chain) -> Result<(), RdmaError> {
        if self.engine.is_none() {
            return Err(RdmaError::Unsupported(
                "only a queue pair that was accepted has an RNIC that executes chains; arm it at the listening side"
                    .to_owned(),
            ));
        }
        let mut receiving = self.receive.lock();
        if receiving.chain.is_some() {
            return Err(RdmaError::Unsupported("the queue pair is armed already; make another".to_owned()));
        }
        receiving.chain = Some((chain.queue().gate.clone(), Box::new(chain)));
        let result = self.unpark(&mut receiving);
        drop(receiving);
        if let Err(end) = result {
            self.end(Some(end));
        }
        Ok(())
    }

    /// Starts the chains of messages that waited for the gate, the doorbell or the limit.
    pub(super) fn resume_chains(&self) {
        let result = self.unpark(&mut self.receive.lock());
        if let Err(end) = result {
            self.end(Some(end));
        }
    }

    /// Gives a message to the chain. `Ok(false)`: it must wait.
    pub(super) fn start_chain(
        &self,
        receiving: &mut Receiving,
        payload: &[u8],
        imm: Option<u32>,
    ) -> Result<bool, End> {
        let Some((gate, chain)) = &mut receiving.chain else { return Ok(false) };
        if imm.is_some() {
            return Err(End::Refused(WcStatus::RemoteInvalid));
        }
        let Some(_started) = gate.enter() else { return Ok(false) };
        // Behind the gate: who closes the queue pair and then the gate knows that no chain of it runs any more.
        if !self.core.is_ready() || !chain.is_ready() {
            return Ok(false);
        }
        let mut peer = Peer { qp: self, end: None };
        let started = chain.start(payload, &mut peer);
        let (entries, bytes) = chain.cost();
        receiving.extra += (entries / ENTRIES_PER_PACKET) as usize + (bytes / BYTES_PER_PACKET) as usize;
        started.map(|()| true).map_err(|fault| self.faulted(chain, fault, peer.end))
    }

    fn faulted(&self, chain: &Chain, fault: Fault, end: Option<End>) -> End {
        if let Some(end) = end {
            return end;
        }
        let status = match fault.kind {
            FaultKind::Endless | FaultKind::Bytes => WcStatus::RemoteOperation,
            _ => WcStatus::LocalProtection,
        };
        self.core.become_state(QpState::Error);
        // The message has taken none of the posted receives; its completion briefly takes a place.
        self.core.slots.receives.fetch_add(1, Ordering::AcqRel);
        self.core.complete_receive(chain.queue().wr_id, status, 0, None);
        End::Broken(Breach::from(fault))
    }

    /// Parks a message of an armed queue pair.
    pub(super) fn park_for_chain(&self, receiving: &mut Receiving, payload: &[u8]) -> Result<(), End> {
        self.park(receiving, Parked::Message(payload.to_vec(), None))
    }
}
