//! Events of connections, as librdmacm tells them.

use super::{Id, ReadDepth, ffi, made, unblock};
use crate::rdma::verbs_provider::ends::{Ending, Ends};
use crate::rdma::verbs_provider::port::LastLook;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

/// A source of events of connections. Its connections end on a thread of its own (`ends`).
pub(in super::super) struct Channel {
    pub(super) raw: NonNull<ffi::rdma_event_channel>,
    pub(super) ends: Ends,
}

// SAFETY: librdmacm's calls may be made from any thread.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

/// A refusal's reason "consumer reject" (IBTA volume 1, 12.6.7.2).
const REFUSED_BY_PROGRAM: i32 = 28;

/// What happened to a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Happened {
    AddressResolved,
    RouteResolved,
    /// A client asks to connect: there is a new identifier.
    Asked,
    Established,
    /// The peer refuses; its reason is in the private data.
    Rejected,
    /// The connection could not be made: errno.
    Failed(i32),
    Disconnected,
    Other,
}

/// An event.
pub(in super::super) struct Event {
    /// The number of its identifier: see [`Id::number`]. If a client asks, the listener's.
    pub(in super::super) id: usize,
    pub(in super::super) what: Happened,
    /// The identifier of the client that asks.
    pub(in super::super) asker: Option<Id>,
    pub(in super::super) private: Vec<u8>,
    /// READs that the peer asks to have under way here, and that this side may have under way at the peer.
    pub(in super::super) reads: ReadDepth,
    /// Retransmissions that who asks wants our RNIC to make.
    pub(in super::super) retries: u8,
    /// Whether a program at the peer's has refused, and not its kernel because none listens. An RNIC of iWARP does not tell.
    pub(in super::super) by_program: bool,
}

impl Channel {
    /// `ending` counts identifiers that are over and that the kernel has not let go of; none ends while `port` is down.
    pub(in super::super) fn new(ending: &Arc<Ending>, port: &Arc<LastLook>) -> io::Result<Arc<Self>> {
        let ends = Ends::start(ending, port)?;
        // SAFETY: no preconditions.
        let raw = made(unsafe { ffi::rdma_create_event_channel() })?;
        let channel = Arc::new(Self { raw, ends });
        // SAFETY: the channel was just made.
        unblock(unsafe { (*raw.as_ptr()).fd })?;
        Ok(channel)
    }

    pub(in super::super) fn event_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel, and with it the descriptor, stays while `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw((*self.raw.as_ptr()).fd) }
    }

    /// The next event, if there is one. It is already acknowledged, so the identifier can be destroyed before the event is looked at.
    pub(in super::super) fn next(self: &Arc<Self>) -> Option<Event> {
        use ffi::rdma_cm_event_type as kind;
        let mut raw = null_mut();
        // SAFETY: the channel is there; the event is read before it is acknowledged, and not after. Private data is copied.
        unsafe {
            if ffi::rdma_get_cm_event(self.raw.as_ptr(), &mut raw) != 0 {
                return None;
            }
            let event = &*raw;
            let what = match event.event {
                kind::RDMA_CM_EVENT_ADDR_RESOLVED => Happened::AddressResolved,
                kind::RDMA_CM_EVENT_ROUTE_RESOLVED => Happened::RouteResolved,
                kind::RDMA_CM_EVENT_CONNECT_REQUEST => Happened::Asked,
                kind::RDMA_CM_EVENT_ESTABLISHED => Happened::Established,
                kind::RDMA_CM_EVENT_REJECTED => Happened::Rejected,
                kind::RDMA_CM_EVENT_ADDR_ERROR
                | kind::RDMA_CM_EVENT_ROUTE_ERROR
                | kind::RDMA_CM_EVENT_CONNECT_ERROR
                | kind::RDMA_CM_EVENT_UNREACHABLE => Happened::Failed(event.status.saturating_neg()),
                kind::RDMA_CM_EVENT_DISCONNECTED | kind::RDMA_CM_EVENT_DEVICE_REMOVAL => {
                    Happened::Disconnected
                }
                _ => Happened::Other,
            };
            let carries = matches!(what, Happened::Asked | Happened::Established | Happened::Rejected);
            let (mut private, mut reads, mut retries) = (Vec::new(), ReadDepth { at_us: 0, of_us: 0 }, 0);
            if carries {
                let conn = &event.param.conn;
                if !conn.private_data.is_null() {
                    let bytes = conn.private_data.cast::<u8>();
                    private = std::slice::from_raw_parts(bytes, conn.private_data_len.into()).to_vec();
                }
                // In an event the numbers are from the receiver's point of view (rdma_get_cm_event(3)).
                reads = ReadDepth { at_us: conn.responder_resources, of_us: conn.initiator_depth };
                retries = conn.retry_count;
            }
            let (id, asker) = if what == Happened::Asked {
                let asker = NonNull::new(event.id).map(|raw| Id::adopt(raw, self));
                (event.listen_id as usize, asker)
            } else {
                (event.id as usize, None)
            };
            let by_program = what == Happened::Rejected && event.status == REFUSED_BY_PROGRAM;
            ffi::rdma_ack_cm_event(raw);
            Some(Event { id, what, asker, private, reads, retries, by_program })
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: identifiers hold an `Arc` of it, so none is left.
        unsafe { ffi::rdma_destroy_event_channel(self.raw.as_ptr()) };
    }
}
