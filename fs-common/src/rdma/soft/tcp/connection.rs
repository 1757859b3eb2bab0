//! A queue pair over a byte stream.
//!
//! # Locks
//! `receive` before `send`. Both are held only over non-blocking system calls.
//!
//! # Back-pressure
//! Requests of this side wait in the send queue while more than `OUTPUT_SOFT_BYTES` of output wait for the socket. The engine takes no more requests
//! of a peer that is owed more than `OWED_MAX_BYTES`; a self-driven side always reads (so the two can never wait for each other) and breaks the queue
//! pair at `OUTPUT_HARD_BYTES`.

//! A file read that faults stalls its queue pair: no input is taken until the fault thread has replied.

//! # The parts
//! `input`: from the socket to packets; `target`: the peer's requests; `initiator`: this side's requests and their replies; `output`: packets that
//! wait for the socket; `scratch`: the memory for a packet; `held`: FLUSHes, and replies behind them; `chain`: messages of an armed queue pair. This file has the life of a connection.

mod chain;
mod held;
mod initiator;
mod input;
mod output;
mod scratch;
mod target;
#[cfg(test)]
mod tests;

use super::channel::Channel;
use super::engine::Engine;
use super::ledger::{Account, Due, Progress};
use super::packet::PacketError;
use crate::breach::Breach;
use crate::fair::Payer;
use crate::ids::QpNumber;
use crate::rdma::PeerKey;
use crate::rdma::chain::Chain;
use crate::rdma::soft::cq::Pumped;
use crate::rdma::soft::queue::{LinkQp, QpCore};
use crate::rdma::verbs::{FileTarget, QpState, RdmaError, SendWr, WcStatus};
use input::Receiving;
use output::{OWED_MAX_BYTES, Sending};
use parking_lot::{Mutex, RwLock};
use rustix::event::epoll::EventFlags;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

/// Larger buffers are freed when they are empty again, or (`scratch`) some time later.
const KEEP_LEN: usize = 128 * 1024;
/// Reads of one socket in one turn.
const READS_PER_TURN: usize = 16;

/// The target that serves file reads; shared with the device, which may get the target later.
pub(in crate::rdma::soft) type FileTargetCell = Arc<RwLock<Option<Arc<dyn FileTarget>>>>;

/// Why a connection ends.
enum End {
    /// The peer broke the protocol, or a bound was reached.
    Broken(Breach),
    /// The peer is gone.
    Cut,
    /// This side has sent a Nak.
    Refused(WcStatus),
    /// A request of this side failed; its completion is made.
    Failed(WcStatus),
}

impl From<PacketError> for End {
    fn from(error: PacketError) -> Self {
        Self::Broken(error.into())
    }
}

/// A queue pair over a byte stream.
pub(in crate::rdma::soft) struct TcpQp {
    this: Weak<TcpQp>,
    core: QpCore,
    channel: Channel,
    /// The engine that reads the socket; `None`: the thread that polls the completion queues reads it.
    engine: Option<Arc<Engine>>,
    file_target: FileTargetCell,
    receive: Mutex<Receiving>,
    parked: AtomicUsize,
    /// Further packets came with the one that is acted on: replies are gathered. Written under the receive lock; who finds it set under the send lock
    /// may leave a packet to the thread that has the receive lock, which sends it behind that (relaxed: that thread takes the send lock then).
    gathers: AtomicBool,
    send: Mutex<Sending>,
    ended: AtomicBool,
    account: Account,
    /// The payer of its turns with the engine.
    payer: Payer,
    /// Calls of send(2) so far, which gathering keeps few.
    #[cfg(test)]
    sends: std::sync::atomic::AtomicU64,
}

impl TcpQp {
    pub(super) fn new(
        core: QpCore,
        channel: Channel,
        engine: Option<Arc<Engine>>,
        file_target: FileTargetCell,
    ) -> Arc<Self> {
        let account = Account::new(engine.as_ref().map(|engine| engine.ledger().clone()));
        let payer = engine.as_ref().map_or(Payer::OWN, |engine| engine.payer(&PeerKey::from(&core.peer)));
        Arc::new_cyclic(|this| Self {
            this: this.clone(),
            account,
            payer,
            core,
            channel,
            engine,
            file_target,
            receive: Mutex::new(Receiving::new()),
            parked: AtomicUsize::new(0),
            gathers: AtomicBool::new(false),
            send: Mutex::new(Sending::new()),
            ended: AtomicBool::new(false),
            #[cfg(test)]
            sends: std::sync::atomic::AtomicU64::new(0),
        })
    }

    /// Makes the queue pair live.
    pub(super) fn start(self: &Arc<Self>) -> std::io::Result<()> {
        self.core.become_state(QpState::ReadyToSend);
        let flags = EventFlags::IN | EventFlags::RDHUP;
        match &self.engine {
            Some(engine) => engine.add(self, flags)?,
            None => {
                for queue in self.core.queues() {
                    queue.attach(self.clone(), &[(self.socket().as_fd(), flags)])?;
                }
            }
        }
        if self.channel.holds_input() {
            // These bytes came with the end of the handshake, so the socket does not signal them.
            if self.drive(flags, None) {
                let mut sending = self.send.lock();
                sending.resumed = true;
                self.watch(&mut sending);
            }
        }
        Ok(())
    }

    pub(super) fn socket(&self) -> &OwnedFd {
        self.channel.socket()
    }

    pub(super) fn payer(&self) -> Payer {
        self.payer
    }

    /// Ends the connection. Called without any lock held.
    fn end(&self, end: Option<End>) {
        let first = !self.ended.swap(true, Ordering::AcqRel);
        self.core.become_state(QpState::Error);
        let mut status =
            if matches!(end, Some(End::Cut)) { WcStatus::Disconnected } else { WcStatus::Flushed };
        let mut sending = self.send.lock();
        let sending = &mut *sending;
        for pending in sending.pending.drain(..) {
            self.core.complete_send(pending.wr_id, pending.kind, status, true, 0);
            status = WcStatus::Flushed;
        }
        for request in sending.queue.drain(..) {
            self.core.complete_send(request.wr_id, request.op.kind(), status, true, 0);
            status = WcStatus::Flushed;
        }
        sending.held.clear();
        self.core.flush_receives();
        if !first {
            return;
        }
        let (number, peer) = (self.core.number.0, &self.core.peer);
        match &end {
            None => {}
            Some(End::Cut) => tracing::debug!(qp = number, %peer, "the peer closed the connection"),
            Some(End::Broken(reason)) => {
                tracing::warn!(qp = number, %peer, "connection closed: {reason}")
            }
            Some(End::Refused(status)) => {
                tracing::warn!(qp = number, %peer, ?status, "connection closed: request refused")
            }
            Some(End::Failed(status)) => {
                tracing::warn!(qp = number, %peer, ?status, "connection closed: request failed")
            }
        }
        let _ = self.flush_output(sending);
        // Output that the socket does not take now is never sent.
        sending.discard_output();
        self.account_output(sending);
        // Only this side's direction: closing both could throw away the last bytes sent, such as a refusal.
        let _ = rustix::net::shutdown(self.socket(), Shutdown::Write);
        match &self.engine {
            Some(engine) => engine.end(self),
            None => {
                for queue in self.core.queues() {
                    queue.detach(self.core.number, &[self.socket().as_fd()]);
                    queue.wake();
                }
            }
        }
    }

    /// Acts on the socket's events, for one turn, which ends early at `until`; returns whether there is more to do.
    pub(super) fn drive(&self, flags: EventFlags, until: Option<Instant>) -> bool {
        let result = (|| {
            if flags.intersects(EventFlags::HUP | EventFlags::ERR) && self.send.lock().stalled {
                // Epoll would report this again and again, and the awaited reply can reach nobody.
                return Err(End::Cut);
            }
            // Output finds out that the peer is gone: epoll reports that once, and input may be held back.
            if flags.intersects(EventFlags::OUT | EventFlags::HUP | EventFlags::ERR) {
                let mut sending = self.send.lock();
                sending.resumed = false;
                self.flush_output(&mut sending)?;
                self.drain_queue(&mut sending)?;
            }
            // On OUT, too: requests that were held back can go on.
            if flags.intersects(
                EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR,
            ) {
                let hangs_up = flags.intersects(EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR);
                return self.read_socket(hangs_up, until);
            }
            Ok(false)
        })();
        result.unwrap_or_else(|end| {
            self.end(Some(end));
            false
        })
    }

    /// Bytes that the connection holds because of its peer.
    pub(super) fn held(&self) -> usize {
        self.account.held()
    }

    /// How far the connection has come. On the engine's thread.
    pub(super) fn progress(&self) -> Progress {
        let receiving = self.receive.lock();
        let sending = self.send.lock();
        let waits_for_us = sending.stalled || sending.held.is_refused() || sending.owed() > OWED_MAX_BYTES;
        Progress {
            waiting: sending.waiting(),
            reached: sending.put_bytes - sending.waiting() as u64,
            is_partial: receiving.end > receiving.start && !waits_for_us,
            packets: receiving.packets,
        }
    }

    /// Notes in the account how much output is held. Under the send lock.
    fn account_output(&self, sending: &Sending) {
        self.look_if(self.account.set_output(sending.held_bytes()));
    }

    /// Notes in the account how much input is held. Under the receive lock.
    fn account_input(&self, receiving: &Receiving) {
        self.look_if(self.account.set_input(receiving.held_bytes()));
    }

    fn look_if(&self, due: Due) {
        if due == Due::Look
            && let Some(engine) = &self.engine
        {
            engine.ring();
        }
    }

    /// Throws away input of an ended connection; true once the peer has closed, too.
    pub(super) fn discard_input(&self) -> bool {
        let mut receiving = self.receive.lock();
        receiving.discard();
        self.account_input(&receiving);
        drop(receiving);
        let mut buffer = [0u8; 4096];
        for _ in 0..READS_PER_TURN {
            match rustix::net::recv(self.socket(), &mut buffer, RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return true,
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return false,
                Err(_) => return true,
            }
        }
        false
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}

impl Pumped for TcpQp {
    fn number(&self) -> QpNumber {
        self.core.number
    }

    fn has_rings(&self) -> bool {
        false
    }

    fn pump_rings(&self) {}

    fn pump_socket(&self) {
        if self.core.is_ready() {
            let waits = self.send.lock().waiting() > 0;
            self.drive(if waits { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN }, None);
        }
    }

    fn event(&self, flags: EventFlags) {
        if self.core.is_ready() {
            self.drive(flags, None);
        }
    }
}

impl LinkQp for TcpQp {
    fn core(&self) -> &QpCore {
        &self.core
    }

    fn submit(&self, requests: &[SendWr]) -> bool {
        if self.engine.is_none() {
            self.core.queues().for_each(|queue| queue.asked_over(self.core.number));
        }
        let mut sending = self.send.lock();
        sending.queue.extend(requests);
        let result = if self.core.is_ready() { self.drain_queue(&mut sending) } else { Ok(()) };
        drop(sending);
        match result {
            Err(end) => self.end(Some(end)),
            // The queue pair was closed after the caller had looked at its state: flush the queued requests.
            Ok(()) if !self.core.is_ready() => self.end(None),
            Ok(()) => {}
        }
        // The peer's end executes them.
        false
    }

    fn receives_posted(&self) {
        if self.parked.load(Ordering::Acquire) > 0 {
            let result = self.unpark(&mut self.receive.lock());
            if let Err(end) = result {
                self.end(Some(end));
            }
        }
    }

    fn arm(&self, chain: Chain) -> Result<(), RdmaError> {
        self.arm_chain(chain)
    }

    fn resume(&self) {
        self.resume_chains();
    }

    fn fail(&self, reason: Option<&Breach>) {
        self.end(reason.map(|reason| End::Broken(reason.to_owned())));
    }
}
