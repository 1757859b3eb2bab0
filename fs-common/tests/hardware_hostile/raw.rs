//! A peer that calls librdmacm itself, so it can send any private data. All `unsafe` code of these tests is here.

use rdma_sys as ffi;
use rustix::event::{PollFd, PollFlags};
use std::ffi::c_int;
use std::net::SocketAddrV4;
use std::os::fd::BorrowedFd;
use std::ptr::null_mut;
use std::time::Instant;

/// The other side's answer to a request to connect, with its private data.
#[derive(Debug, PartialEq, Eq)]
pub enum Heard {
    Accepted(Vec<u8>),
    Refused(Vec<u8>),
}

/// A connection, or a request for one.
pub struct RawPeer {
    channel: *mut ffi::rdma_event_channel,
    id: *mut ffi::rdma_cm_id,
    pd: *mut ffi::ibv_pd,
    cq: *mut ffi::ibv_cq,
    has_queue_pair: bool,
}

fn done(what: &str, result: c_int) {
    assert_eq!(result, 0, "{what}: {}", std::io::Error::last_os_error());
}

impl RawPeer {
    /// Sends a request to connect with this private data, and does not wait for the answer.
    pub fn ask(address: SocketAddrV4, private: &[u8]) -> Self {
        // As the library does.
        Self::ask_for_retries(address, private, 6, None)
    }

    /// Asks to be let in, and that the other side's RNIC retransmits so often, each time after 4.096 us times two to the power of `timeout`
    /// (`None`: as the path has it).
    pub fn ask_for_retries(address: SocketAddrV4, private: &[u8], retries: u8, timeout: Option<u8>) -> Self {
        let mut storage: libc::sockaddr_in = libc::sockaddr_in {
            sin_family: libc::AF_INET as libc::sa_family_t,
            sin_port: address.port().to_be(),
            sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.ip().octets()) },
            sin_zero: [0; 8],
        };
        // SAFETY: everything is made here, checked, and destroyed by `drop` in the other order; the address and the private data are
        // copied by the calls that take them.
        unsafe {
            let channel = ffi::rdma_create_event_channel();
            assert!(!channel.is_null(), "a channel");
            let mut id = null_mut();
            done(
                "an identifier",
                ffi::rdma_create_id(channel, &mut id, null_mut(), ffi::rdma_port_space::RDMA_PS_TCP),
            );
            let mut peer = Self { channel, id, pd: null_mut(), cq: null_mut(), has_queue_pair: false };
            if let Some(mut timeout) = timeout {
                // rdma_cma.h: RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT.
                done("a time-out", ffi::rdma_set_option(id, 0, 3, (&raw mut timeout).cast(), 1));
            }
            done("an address", ffi::rdma_resolve_addr(id, null_mut(), (&raw mut storage).cast(), 10_000));
            assert_eq!(peer.event().0, ffi::rdma_cm_event_type::RDMA_CM_EVENT_ADDR_RESOLVED);
            done("a route", ffi::rdma_resolve_route(id, 10_000));
            assert_eq!(peer.event().0, ffi::rdma_cm_event_type::RDMA_CM_EVENT_ROUTE_RESOLVED);
            peer.pd = ffi::ibv_alloc_pd((*id).verbs);
            peer.cq = ffi::ibv_create_cq((*id).verbs, 8, null_mut(), null_mut(), 0);
            assert!(!peer.pd.is_null() && !peer.cq.is_null(), "a domain and a queue");
            let mut wanted: ffi::ibv_qp_init_attr = std::mem::zeroed();
            (wanted.send_cq, wanted.recv_cq) = (peer.cq, peer.cq);
            (wanted.cap.max_send_wr, wanted.cap.max_recv_wr) = (4, 4);
            (wanted.cap.max_send_sge, wanted.cap.max_recv_sge) = (1, 1);
            wanted.qp_type = ffi::ibv_qp_type::IBV_QPT_RC;
            done("a queue pair", ffi::rdma_create_qp(id, peer.pd, &mut wanted));
            peer.has_queue_pair = true;
            let mut param: ffi::rdma_conn_param = std::mem::zeroed();
            param.private_data = private.as_ptr().cast();
            param.private_data_len = private.len() as u8;
            (param.responder_resources, param.initiator_depth) = (1, 1);
            (param.retry_count, param.rnr_retry_count) = (retries, 7);
            done("asking", ffi::rdma_connect(id, &mut param));
            peer
        }
    }

    /// The next event and its private data. On `ESTABLISHED` librdmacm has completed the connection.
    fn event(&self) -> (ffi::rdma_cm_event_type::Type, Vec<u8>) {
        let deadline = Instant::now() + super::PATIENCE;
        // SAFETY: the channel is there as long as `self`; the event is copied before it is acknowledged, and not touched after.
        unsafe {
            let fd = BorrowedFd::borrow_raw((*self.channel).fd);
            let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
            while fds[0].revents().is_empty() {
                assert!(Instant::now() < deadline, "no event came");
                let second = rustix::event::Timespec { tv_sec: 1, tv_nsec: 0 };
                let _ = rustix::event::poll(&mut fds, Some(&second));
            }
            let mut raw = null_mut();
            done("an event", ffi::rdma_get_cm_event(self.channel, &mut raw));
            let kind = (*raw).event;
            let conn = &(*raw).param.conn;
            let has_data = matches!(
                kind,
                ffi::rdma_cm_event_type::RDMA_CM_EVENT_ESTABLISHED
                    | ffi::rdma_cm_event_type::RDMA_CM_EVENT_REJECTED
            ) && !conn.private_data.is_null();
            let private = if has_data {
                std::slice::from_raw_parts(conn.private_data.cast::<u8>(), conn.private_data_len.into())
                    .to_vec()
            } else {
                Vec::new()
            };
            ffi::rdma_ack_cm_event(raw);
            (kind, private)
        }
    }

    /// Waits for the answer to `ask`.
    pub fn hear(&self) -> Heard {
        match self.event() {
            (ffi::rdma_cm_event_type::RDMA_CM_EVENT_ESTABLISHED, said) => Heard::Accepted(said),
            (ffi::rdma_cm_event_type::RDMA_CM_EVENT_REJECTED, said) => Heard::Refused(said),
            (other, _) => panic!("event {other}"),
        }
    }

    /// Waits until the other side has ended the connection that it accepted, or is about to.
    pub fn is_let_go(&self) {
        use ffi::rdma_cm_event_type as kind;
        match self.event().0 {
            kind::RDMA_CM_EVENT_ESTABLISHED => self.is_let_go(),
            kind::RDMA_CM_EVENT_DISCONNECTED | kind::RDMA_CM_EVENT_REJECTED => {}
            // The end came before this side had taken the answer in.
            kind::RDMA_CM_EVENT_CONNECT_ERROR => {}
            other => panic!("event {other}"),
        }
    }

    /// Takes the queue pair away without a word to the peer, as a process does that is stopped and never goes on.
    pub fn fall_silent(&mut self) {
        assert!(std::mem::take(&mut self.has_queue_pair), "once");
        // SAFETY: made by `ask`, destroyed once.
        unsafe { ffi::rdma_destroy_qp(self.id) };
    }
}

impl Drop for RawPeer {
    fn drop(&mut self) {
        // SAFETY: each was made by `ask` and is destroyed once, after what was made with it; all events are acknowledged.
        unsafe {
            if self.has_queue_pair {
                ffi::rdma_destroy_qp(self.id);
            }
            if !self.cq.is_null() {
                ffi::ibv_destroy_cq(self.cq);
            }
            if !self.pd.is_null() {
                ffi::ibv_dealloc_pd(self.pd);
            }
            ffi::rdma_destroy_id(self.id);
            ffi::rdma_destroy_event_channel(self.channel);
        }
    }
}
