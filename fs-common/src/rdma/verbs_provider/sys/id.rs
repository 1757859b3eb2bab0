//! Connections: identifiers of librdmacm, and the queue pair that each of them may have. `posted` posts to it.

use super::address::{address_of, raw_address};
use super::{Channel, Context, Cq, Pd, Srq, done, ffi, made, mtu_bytes};
use crate::rdma::verbs_provider::sys_flush::{self, Abilities};
use std::ffi::c_int;
use std::io;
use std::mem::MaybeUninit;
use std::net::{Ipv6Addr, SocketAddr};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A queue pair's capacities.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Capacities {
    pub(in super::super) send_depth: u32,
    pub(in super::super) recv_depth: u32,
    /// The most bytes that a post copies.
    pub(in super::super) max_inline: u32,
    /// The most local ranges of a request.
    pub(in super::super) max_sges: u32,
}

/// Retransmissions before a connection is given up: some seconds with the time-outs that the connection manager derives of the path. A path that
/// is gone for longer is a lost connection. Not 7, the most there are: rdma_rxe takes that for "for ever" (6.12, `rxe_comp.c`), and a peer that
/// went without a word would never be missed. Who asks to connect chooses for both sides (IBTA volume 1, 12.6.5), so who asks for more is refused.
pub(in super::super) const RETRIES: u8 = 6;
/// The longest time between two of them, as a power of two of 4.096 us: 8.6 s. Paths of large fabrics have some 20.
const TIMEOUT_MOST: u8 = 21;
/// 7: for ever. A message waits for its receive, as over the other links; whoever waits too long for an answer gives the connection up.
const RNR_RETRIES: u8 = 7;

/// READs that may be under way, in each direction.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct ReadDepth {
    pub(in super::super) at_us: u8,
    pub(in super::super) of_us: u8,
}

impl ReadDepth {
    /// The most that both sides can do.
    pub(in super::super) fn min(self, other: Self) -> Self {
        Self { at_us: self.at_us.min(other.at_us), of_us: self.of_us.min(other.of_us) }
    }
}

/// Domain, completion queues and shared receives of a queue pair.
type MadeWith = (Arc<Pd>, [Arc<Cq>; 2], Option<Arc<Srq>>);

/// A connection identifier, with its queue pair once that is made.
pub(in super::super) struct Id {
    pub(super) raw: NonNull<ffi::rdma_cm_id>,
    channel: Option<Arc<Channel>>,
    /// A listener has sent nothing that could delay its destruction, and its address must be free when it is gone.
    listens: AtomicBool,
    /// What the queue pair was made with, kept until the queue pair is destroyed.
    pub(super) made_with: Option<MadeWith>,
}

// SAFETY: librdmacm's and libibverbs' calls may be made from any thread; what needs an exclusive owner takes `&mut self`.
unsafe impl Send for Id {}
// SAFETY: as above.
unsafe impl Sync for Id {}

impl Id {
    pub(super) fn adopt(raw: NonNull<ffi::rdma_cm_id>, channel: &Arc<Channel>) -> Self {
        Self { raw, channel: Some(channel.clone()), listens: AtomicBool::new(false), made_with: None }
    }

    /// An identifier whose events come through a channel, or, without one, whose calls block.
    pub(in super::super) fn new(channel: Option<&Arc<Channel>>) -> io::Result<Self> {
        let events = channel.map_or(null_mut(), |channel| channel.raw.as_ptr());
        let mut raw = null_mut();
        // SAFETY: the channel outlives the identifier, which holds an `Arc` of it.
        let result =
            unsafe { ffi::rdma_create_id(events, &mut raw, null_mut(), ffi::rdma_port_space::RDMA_PS_TCP) };
        done(result)?;
        Ok(Self {
            raw: made(raw)?,
            channel: channel.cloned(),
            listens: AtomicBool::new(false),
            made_with: None,
        })
    }

    /// Names the identifier in events.
    pub(in super::super) fn number(&self) -> usize {
        self.raw.as_ptr() as usize
    }

    /// The RNIC, once an address has determined it.
    pub(in super::super) fn context(&self) -> Option<Context> {
        // SAFETY: the identifier is there; librdmacm sets the field before the call or event that says so.
        NonNull::new(unsafe { (*self.raw.as_ptr()).verbs }).map(Context)
    }

    pub(in super::super) fn bind(&self, address: SocketAddr) -> io::Result<()> {
        let mut address = raw_address(address);
        // SAFETY: the identifier is there; the address is copied.
        done(unsafe { ffi::rdma_bind_addr(self.raw.as_ptr(), (&raw mut address).cast()) })
    }

    pub(in super::super) fn listen(&self, backlog: i32) -> io::Result<()> {
        self.listens.store(true, Ordering::Relaxed);
        // SAFETY: the identifier is there.
        done(unsafe { ffi::rdma_listen(self.raw.as_ptr(), backlog) })
    }

    pub(in super::super) fn local_port(&self) -> u16 {
        // SAFETY: the identifier is there.
        u16::from_be(unsafe { ffi::rdma_get_src_port(self.raw.as_ptr()) })
    }

    pub(in super::super) fn peer_address(&self) -> Option<SocketAddr> {
        // SAFETY: the identifier is there; every variant of the union is an address, and storage is the largest.
        address_of(unsafe { &(*self.raw.as_ptr()).route.addr.dst_addr_union.dst_storage })
    }

    /// `from` is an address of this machine; `None`: the one at which the route begins.
    pub(in super::super) fn resolve_address(
        &self,
        from: Option<SocketAddr>,
        address: SocketAddr,
        timeout_ms: i32,
    ) -> io::Result<()> {
        let mut address = raw_address(address);
        let mut from = from.map(raw_address);
        let from = from.as_mut().map_or(null_mut(), |from| (&raw mut *from).cast());
        // SAFETY: the identifier is there; the addresses are copied.
        done(unsafe {
            ffi::rdma_resolve_addr(self.raw.as_ptr(), from, (&raw mut address).cast(), timeout_ms)
        })
    }

    /// The port, and the address that connections have there, once an address has determined them.
    pub(in super::super) fn port(&self) -> (u8, Ipv6Addr) {
        // SAFETY: the identifier is there; librdmacm sets both before the call or event that says so. Every variant of the union is 16 bytes.
        unsafe {
            let id = &*self.raw.as_ptr();
            (id.port_num, Ipv6Addr::from(id.route.addr.addr.ibaddr.sgid.raw))
        }
    }

    /// What the RNIC says of its queue pair.
    fn query(&self, mask: ffi::ibv_qp_attr_mask) -> io::Result<ffi::ibv_qp_attr> {
        assert!(self.made_with.is_some(), "there is a queue pair");
        let mut attributes = MaybeUninit::<ffi::ibv_qp_attr>::zeroed();
        let mut made_as = MaybeUninit::<ffi::ibv_qp_init_attr>::zeroed();
        // SAFETY: the queue pair is there; the library fills the plain structures in, of which all zeros is a value, too.
        unsafe {
            let qp = (*self.raw.as_ptr()).qp;
            match ffi::ibv_query_qp(qp, attributes.as_mut_ptr(), mask.0 as c_int, made_as.as_mut_ptr()) {
                0 => Ok(attributes.assume_init()),
                error => Err(io::Error::from_raw_os_error(error.abs())),
            }
        }
    }

    /// Fails if the RNIC would take longer than some minutes to give a peer up that answers nothing: with the wish to connect comes the time
    /// between retransmissions, too. Of a connected queue pair.
    pub(in super::super) fn misses_its_peer(&self) -> io::Result<()> {
        let mask = ffi::ibv_qp_attr_mask::IBV_QP_TIMEOUT | ffi::ibv_qp_attr_mask::IBV_QP_RETRY_CNT;
        let ffi::ibv_qp_attr { timeout, retry_cnt, .. } = self.query(mask)?;
        if timeout <= TIMEOUT_MOST && retry_cnt <= RETRIES {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "the peer would have {retry_cnt} retransmissions, each after 4 us * 2^{timeout}: more than {RETRIES} after 2^{TIMEOUT_MOST}"
        )))
    }

    /// Of its connection.
    pub(in super::super) fn path_mtu_bytes(&self) -> Option<u32> {
        mtu_bytes(self.query(ffi::ibv_qp_attr_mask::IBV_QP_PATH_MTU).ok()?.path_mtu)
    }

    pub(in super::super) fn resolve_route(&self, timeout_ms: i32) -> io::Result<()> {
        // SAFETY: the identifier is there.
        done(unsafe { ffi::rdma_resolve_route(self.raw.as_ptr(), timeout_ms) })
    }

    /// Whether a queue pair for its connection can be made still. The kernel drops events of a client that asks until the client is accepted
    /// (`ucma_event_handler`), so nothing else tells that the client is gone.
    pub(in super::super) fn still_asks(&self) -> bool {
        // SAFETY: all zeros is a value of this plain structure.
        let mut attributes: ffi::ibv_qp_attr = unsafe { std::mem::zeroed() };
        attributes.qp_state = ffi::ibv_qp_state::IBV_QPS_INIT;
        let mut mask = 0;
        // SAFETY: the identifier is there; the library fills the structure in. The kernel refuses if there is no connection to be made any more
        // (`cm_init_qp_init_attr`).
        unsafe { ffi::rdma_init_qp_attr(self.raw.as_ptr(), &mut attributes, &mut mask) == 0 }
    }

    /// Makes the queue pair, once. Returns its number, and how many bytes a post copies: less than asked for if the RNIC can copy less.
    pub(in super::super) fn make_qp(
        &mut self,
        pd: &Arc<Pd>,
        [send_cq, recv_cq]: [&Arc<Cq>; 2],
        shared: Option<&Arc<Srq>>,
        mut capacities: Capacities,
        abilities: Abilities,
    ) -> io::Result<(u32, u32)> {
        assert!(self.made_with.is_none(), "an identifier has one queue pair");
        let wanted = |capacities: Capacities| ffi::ibv_qp_init_attr {
            qp_context: null_mut(),
            send_cq: send_cq.raw.as_ptr(),
            recv_cq: recv_cq.raw.as_ptr(),
            srq: shared.map_or(null_mut(), |shared| shared.raw.as_ptr()),
            cap: ffi::ibv_qp_cap {
                max_send_wr: capacities.send_depth,
                max_recv_wr: capacities.recv_depth,
                max_send_sge: capacities.max_sges,
                // Of a shared queue: its own.
                max_recv_sge: if shared.is_some() { 1 } else { capacities.max_sges },
                max_inline_data: capacities.max_inline,
            },
            qp_type: ffi::ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        let granted = loop {
            let mut attributes = wanted(capacities);
            // SAFETY: the domain and all queues are there and stay: `made_with` holds them until the queue pair is destroyed.
            match unsafe { sys_flush::create_qp(self.raw, pd, &mut attributes, abilities) } {
                Ok(()) => break attributes.cap.max_inline_data,
                // No attribute of an RNIC tells how many bytes it can copy. If the client is gone, all fail, and each takes long.
                Err(_) if capacities.max_inline > 0 && self.still_asks() => capacities.max_inline /= 2,
                Err(error) => return Err(error),
            }
        };
        self.made_with = Some((pd.clone(), [send_cq.clone(), recv_cq.clone()], shared.cloned()));
        // SAFETY: the queue pair was just made.
        let number = unsafe { (*(*self.raw.as_ptr()).qp).qp_num };
        // RNICs round up; no more is promised than was asked for.
        Ok((number, granted.min(capacities.max_inline)))
    }

    fn conn_param(private: &[u8], reads: ReadDepth) -> ffi::rdma_conn_param {
        ffi::rdma_conn_param {
            private_data: private.as_ptr().cast(),
            private_data_len: u8::try_from(private.len()).expect("private data is short"),
            responder_resources: reads.at_us,
            initiator_depth: reads.of_us,
            flow_control: 1,
            retry_count: RETRIES,
            rnr_retry_count: RNR_RETRIES,
            srq: 0,
            qp_num: 0,
        }
    }

    pub(in super::super) fn connect(&self, private: &[u8], reads: ReadDepth) -> io::Result<()> {
        let mut param = Self::conn_param(private, reads);
        // SAFETY: the identifier is there; what is pointed to is copied.
        done(unsafe { ffi::rdma_connect(self.raw.as_ptr(), &mut param) })
    }

    pub(in super::super) fn accept(&self, private: &[u8], reads: ReadDepth) -> io::Result<()> {
        let mut param = Self::conn_param(private, reads);
        // SAFETY: as `connect`.
        done(unsafe { ffi::rdma_accept(self.raw.as_ptr(), &mut param) })
    }

    /// Refuses a client that asks.
    pub(in super::super) fn reject(&self, private: &[u8]) {
        let len = u8::try_from(private.len()).expect("private data is short");
        // SAFETY: as `connect`. If it fails the peer is gone.
        unsafe { ffi::rdma_reject(self.raw.as_ptr(), private.as_ptr().cast(), len) };
    }

    /// Puts the queue pair into the error state, and tells the peer.
    pub(in super::super) fn disconnect(&self) {
        // SAFETY: the identifier is there. If it fails there is no connection.
        unsafe { ffi::rdma_disconnect(self.raw.as_ptr()) };
    }

    /// Puts the queue pair into the error state without a word to the peer.
    pub(in super::super) fn fail_in_silence(&self) {
        let ffi::ibv_qp_attr_mask(mask) = ffi::ibv_qp_attr_mask::IBV_QP_STATE;
        // SAFETY: all zeros is a value of this plain structure; what the mask does not name is not looked at.
        let mut attributes: ffi::ibv_qp_attr = unsafe { std::mem::zeroed() };
        attributes.qp_state = ffi::ibv_qp_state::IBV_QPS_ERR;
        // SAFETY: the identifier is there, and its queue pair if it has one. If it fails, the queue pair is in that state or gone.
        unsafe {
            let qp = (*self.raw.as_ptr()).qp;
            if !qp.is_null() {
                ffi::ibv_modify_qp(qp, &mut attributes, mask as c_int);
            }
        }
    }

    /// Sets how soon a peer repeats a message that found no receive (IBTA volume 1, table 45: 12 is 0.64 ms; the connection manager leaves it at 0,
    /// which is 655 ms). For a connected queue pair.
    pub(in super::super) fn hurry_messages(&self) -> io::Result<()> {
        assert!(self.made_with.is_some(), "there is a queue pair");
        // SAFETY: all zeros is a value of this plain structure; what the mask does not name is not looked at.
        let mut attributes: ffi::ibv_qp_attr = unsafe { std::mem::zeroed() };
        attributes.min_rnr_timer = 12;
        let mask = ffi::ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER.0;
        // SAFETY: the queue pair is there.
        match unsafe { ffi::ibv_modify_qp((*self.raw.as_ptr()).qp, &mut attributes, mask as c_int) } {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error.abs())),
        }
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        if self.made_with.is_some() {
            // SAFETY: made once, destroyed once. What it was made with goes after it.
            unsafe { ffi::rdma_destroy_qp(self.raw.as_ptr()) };
        }
        match self.channel.take() {
            Some(channel) if !self.listens.load(Ordering::Relaxed) => {
                channel.ends.destroy(self.raw, &channel);
            }
            _ => {
                // SAFETY: made once, destroyed once; without a channel, or listening, it has sent nothing, so this does not wait.
                unsafe { ffi::rdma_destroy_id(self.raw.as_ptr()) };
            }
        }
    }
}
