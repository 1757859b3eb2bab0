//! One-sided transfers that the server posts for a request, as futures: it pulls large writes by RDMA READ and pushes fetched pages by RDMA WRITE
//! (TeRM section 4.1.2).
//!
//! The request's task owns the buffer of a transfer. If the task is dropped during a transfer, the token and the bounce buffer are kept until the
//! completion arrives.
//!
//! # Failure
//! Every posted transfer completes: when its peer answers, or flushed when its connection ends. A peer that does not answer for `TRANSFER_PATIENCE`
//! loses its connection, which frees its turns and buffers.

use super::bounce::Bounce;
use super::connection::{Connection, WorkId};
use cuttlefs_common::rdma::{Remote, SendOp, SendWr, WcStatus};
use cuttlefs_common::rpc::RemoteBuffer;
use std::cell::RefCell;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};

/// Direction of a transfer, seen from the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// RDMA READ from the client into the bounce buffer.
    Pull,
    /// RDMA WRITE from the bounce buffer to the client.
    Push,
}

/// Sweeps (one a second) within which a transfer of at most 1 MiB must complete: a peer needs 100 KiB a second.
pub(crate) const TRANSFER_PATIENCE: u32 = 10;

struct Pending {
    result: Option<Result<u32, WcStatus>>,
    waker: Option<Waker>,
    /// Keeps the memory allocated until the completion.
    keep: Option<Rc<Bounce>>,
    connection: Arc<Connection>,
    sweeps: u32,
}

/// Transfers of one worker that have not completed.
#[derive(Default)]
pub(crate) struct Transfers {
    pending: RefCell<Vec<Option<Pending>>>,
}

impl Transfers {
    /// Moves `[start, start + len)` of the bounce buffer from or to the same place in the client's buffer.
    ///
    /// # Errors
    /// The completion's status: the client gave a bad buffer, or the connection has ended.
    pub(crate) async fn run(
        &self,
        connection: &Arc<Connection>,
        direction: Direction,
        bounce: &Rc<Bounce>,
        client: &RemoteBuffer,
        start: usize,
        len: usize,
    ) -> Result<(), WcStatus> {
        let end = start.checked_add(len).ok_or(WcStatus::RemoteAccess)?;
        if end > client.len as usize {
            return Err(WcStatus::RemoteAccess);
        }
        let offset = client.offset.checked_add(start as u64).ok_or(WcStatus::RemoteAccess)?;
        let remote = Remote::Memory { rkey: client.rkey, offset };
        let token = self.take_token(connection, bounce);
        let request = SendWr {
            wr_id: WorkId::Transfer(token).encode(),
            op: match direction {
                Direction::Pull => SendOp::Read(remote),
                Direction::Push => SendOp::Write(remote),
            },
            local: bounce.sge(connection.rnic(), start, len).into(),
            signaled: true,
        };
        if !connection.post_send(request) {
            self.pending.borrow_mut()[token] = None;
            return Err(WcStatus::Disconnected);
        }
        let result = poll_fn(|context| {
            let mut pending = self.pending.borrow_mut();
            let entry = pending[token].as_mut().expect("a posted transfer keeps its token");
            match entry.result.take() {
                Some(result) => {
                    pending[token] = None;
                    Poll::Ready(result)
                }
                None => {
                    entry.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await;
        match result {
            Ok(got) if direction == Direction::Pull && got as usize != len => Err(WcStatus::LocalLength),
            Ok(_) => Ok(()),
            Err(status) => Err(status),
        }
    }

    fn take_token(&self, connection: &Arc<Connection>, bounce: &Rc<Bounce>) -> usize {
        let mut pending = self.pending.borrow_mut();
        let entry = Some(Pending {
            result: None,
            waker: None,
            keep: Some(bounce.clone()),
            connection: connection.clone(),
            sweeps: 0,
        });
        // Bounded: each running request has at most a few transfers, and requests are bounded by connections.
        match pending.iter().position(Option::is_none) {
            Some(token) => {
                pending[token] = entry;
                token
            }
            None => {
                pending.push(entry);
                pending.len() - 1
            }
        }
    }

    /// Called each second: closes the connections of peers that did not answer a transfer in time, and returns them.
    pub(crate) fn sweep(&self) -> Vec<Arc<Connection>> {
        let mut late = Vec::new();
        for pending in
            self.pending.borrow_mut().iter_mut().flatten().filter(|pending| pending.result.is_none())
        {
            pending.sweeps += 1;
            if pending.sweeps > TRANSFER_PATIENCE {
                late.push(pending.connection.clone());
            }
        }
        // Outside of the borrow, because flushed work requests may complete at once.
        late.iter().for_each(|connection| connection.close());
        late
    }

    /// Takes the completion of a transfer.
    pub(crate) fn complete(&self, token: usize, result: Result<u32, WcStatus>) {
        let mut pending = self.pending.borrow_mut();
        let entry = pending[token].as_mut().expect("a completion belongs to a posted transfer");
        entry.result = Some(result);
        entry.keep = None;
        if let Some(waker) = entry.waker.take() {
            waker.wake();
        }
    }
}
