//! One request over a live connection, and its answer.

use super::connect::BACKOFF_FIRST;
use super::lane::{Lane, MESSAGE};
use super::{Caller, Link};
use cuttlefs_common::ids::SlotIndex;
use cuttlefs_common::rdma::{
    Completion, CompletionKind, QpState, RdmaError, RecvWr, SendOp, SendWr, WcStatus, WrId,
};
use cuttlefs_common::rpc::{HEADER_LEN, ReplyHeader, Request, RequestHeader, SLOTS_PER_SESSION};
use cuttlefs_common::status::Status;
use std::borrow::Cow;
use std::io::ErrorKind;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The slot of recovery's own requests: the last one.
const RECOVERY_SLOT: SlotIndex = SlotIndex(SLOTS_PER_SESSION - 1);
/// The longest sleep before a check whether the mount ends.
const WAIT_SLICE: Duration = Duration::from_millis(500);
/// How long a detach waits for its answer.
const DETACH_PATIENCE: Duration = Duration::from_secs(2);
const SEND_ID: WrId = WrId(u64::MAX);

/// The slot and sequence number of a request.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) slot: SlotIndex,
    pub(super) seq: u64,
}

impl Place {
    /// The place of a request that is answered outside of the slots. It uses up no number: an attach comes between a request and its retransmission.
    pub(super) const NOWHERE: Self = Self { slot: SlotIndex(0), seq: 0 };

    /// The place of a request of a recovery. It has a slot of its own, whichever lane carries it: the lane's number belongs to the request that found
    /// the server gone and will be sent again.
    const fn of_recovery(seq: u64) -> Self {
        Self { slot: RECOVERY_SLOT, seq }
    }
}

/// How an attempt at a request ended without an answer.
pub(super) enum Broken {
    /// The connection is gone: connect and send again.
    Disconnected(Cow<'static, str>),
    /// The mount ends.
    ShutDown,
}

impl Lane {
    /// Sends one request over the standing connection and returns the header of its reply. The body is then in `self.message`.
    pub(super) fn exchange(
        &mut self,
        link: &Link,
        caller: &Caller,
        request: &Request<'_>,
        Place { slot, seq }: Place,
    ) -> Result<Result<ReplyHeader, Status>, Broken> {
        let memory = self.region.memory();
        let Ok(body_len) = request.encode_into(memory, HEADER_LEN, MESSAGE - HEADER_LEN) else {
            return Ok(Err(Status::ValueTooLarge));
        };
        let &Caller { uid, gid, umask, drops_privileges, trace } = caller;
        let header = RequestHeader { slot, seq, trace, uid, gid, umask, drops_privileges };
        memory.write(0, &header.encode(body_len as u32));
        let send = SendWr {
            wr_id: SEND_ID,
            op: SendOp::Send,
            local: self.region.sge(0, (HEADER_LEN + body_len) as u32).into(),
            signaled: false,
        };
        self.post(&[send])?;
        loop {
            let completion = self.next_completion(link)?;
            match completion.kind {
                CompletionKind::Recv => {}
                // No reply has immediate data, and its length may be that of a WRITE somewhere else.
                CompletionKind::RecvWithImm => return Err(Broken::Disconnected("immediate data".into())),
                _ => continue,
            }
            let index = completion.wr_id.0 as usize;
            self.message.resize(completion.byte_len as usize, 0);
            self.region.memory().read(MESSAGE * (1 + index), &mut self.message);
            let receive = self.receive(index);
            self.post_receive(receive)?;
            match ReplyHeader::parse(&self.message) {
                Ok((reply, _)) if reply.seq == seq && reply.slot == slot => {
                    link.counters().rpc_requests.fetch_add(1, Ordering::Relaxed);
                    return Ok(Ok(reply));
                }
                // A duplicate of an earlier reply, after a retransmission.
                Ok(_) => {}
                Err(error) => {
                    return Err(Broken::Disconnected(format!("malformed reply: {error}").into()));
                }
            }
        }
    }

    /// Ignores a completion that nobody waits for: the answer to a request that was sent twice. Posts its receive again.
    pub(super) fn pass_over(&self, completion: &Completion) -> Result<(), Broken> {
        match completion.kind {
            CompletionKind::Recv | CompletionKind::RecvWithImm if completion.status == WcStatus::Success => {
                self.post_receive(self.receive(completion.wr_id.0 as usize))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn post(&self, requests: &[SendWr]) -> Result<(), Broken> {
        let Some(connection) = &self.connection else {
            return Err(Broken::Disconnected("not connected".into()));
        };
        connection.qp.post_send(requests).map_err(|_| Broken::Disconnected("post failed".into()))
    }

    fn post_receive(&self, receive: RecvWr) -> Result<(), Broken> {
        let Some(connection) = &self.connection else {
            return Err(Broken::Disconnected("not connected".into()));
        };
        connection.qp.post_recv(&[receive]).map_err(|_| Broken::Disconnected("post failed".into()))
    }

    /// Waits for the next completion of the standing connection.
    ///
    /// If nothing comes for long, the connection is given up although it stands: a link may have lost bytes or damaged a length, and then both ends
    /// would wait for ever. To send the request on another connection costs nothing if the server is only slow: it answers on the connection on which
    /// it was asked last.
    pub(super) fn next_completion(&mut self, link: &Link) -> Result<Completion, Broken> {
        let since = link.now();
        loop {
            let Some(connection) = &self.connection else {
                return Err(Broken::Disconnected("not connected".into()));
            };
            let number = connection.qp.number();
            while let Some(completion) = self.completions.pop() {
                if completion.qp != number {
                    continue;
                }
                match completion.status {
                    WcStatus::Flushed | WcStatus::Disconnected => {
                        return Err(Broken::Disconnected("connection lost".into()));
                    }
                    _ => return Ok(completion),
                }
            }
            // Sleep first: the answer is never there when its request has just left, and over a socket each check costs a system call. `wait` returns
            // at once if something is there.
            self.cq.wait(WAIT_SLICE.min(link.answer_patience()));
            if self.cq.poll(&mut self.completions, 16) > 0 {
                self.completions.reverse();
                continue;
            }
            if connection.qp.state() == QpState::Error {
                return Err(Broken::Disconnected("connection lost".into()));
            }
            let waited = link.now().saturating_sub(since);
            if link.is_shut_down() && (!self.is_at_door || waited >= DETACH_PATIENCE) {
                return Err(Broken::ShutDown);
            }
            if waited >= link.answer_patience() {
                return Err(Broken::Disconnected("no answer for long".into()));
            }
        }
    }

    /// Sends one request over a connection that is being set up, once.
    fn call_raw(
        &mut self,
        link: &Link,
        caller: &Caller,
        request: &Request<'_>,
        place: Place,
    ) -> Result<Result<&[u8], Status>, RdmaError> {
        let broken = |reason: &str| RdmaError::Handshake {
            endpoint: link.endpoint.to_string(),
            reason: reason.to_owned(),
        };
        match self.exchange(link, caller, request, place) {
            Ok(Ok(header)) => Ok(header.result.map(|()| &self.message[HEADER_LEN..])),
            Ok(Err(status)) => Ok(Err(status)),
            Err(Broken::ShutDown) => Err(RdmaError::Closed),
            Err(Broken::Disconnected(reason)) => Err(broken(&reason)),
        }
    }

    /// Sends the first request of a connection.
    pub(crate) fn call_unnumbered(
        &mut self,
        link: &Link,
        request: &Request<'_>,
    ) -> Result<Result<&[u8], Status>, RdmaError> {
        self.call_raw(link, &link.own_caller(), request, Place::NOWHERE)
    }

    /// Asks for the server's status, which needs no session. Its answer fills a packet of an RNIC.
    ///
    /// # Errors
    /// No answer came. Over RDMA hardware the error names the path MTU if that may be why.
    pub(crate) fn ask_status(&mut self, link: &Link) -> Result<Result<&[u8], Status>, RdmaError> {
        let asked = self.call_unnumbered(link, &Request::Status);
        asked.map_err(|error| match (error, link.hardware().and_then(|of| of.hop_advice())) {
            (RdmaError::Handshake { endpoint, reason }, Some(advice)) => RdmaError::Io {
                action: "have the first long answer from",
                endpoint,
                source: std::io::Error::new(ErrorKind::BrokenPipe, format!("{reason}; {advice}")),
            },
            (error, _) => error,
        })
    }

    /// Sends a request of a recovery. `seq` moves on when it is answered. `None`: the connection broke.
    pub(crate) fn call_recovering(
        &mut self,
        link: &Link,
        request: &Request<'_>,
        seq: &mut u64,
    ) -> Option<Result<&[u8], Status>> {
        let answer = self.call_raw(link, &link.own_caller(), request, Place::of_recovery(*seq)).ok()?;
        if matches!(answer, Err(Status::BadSequence)) {
            // As in `call`: the number stays, and another connection tries again.
            link.pause(BACKOFF_FIRST);
            return None;
        }
        *seq += 1;
        Some(answer)
    }
}
