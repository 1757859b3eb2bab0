//! libibverbs and librdmacm, with owners for their objects, and errors instead of numbers. All `unsafe` code of this provider is here and in its
//! parts: `address`, `cq`, `srq` (shared receive queues), `mw` (memory windows).
//!
//! # Invariants
//! * Each object is destroyed once, after all objects that were made with it: each owner holds the owners of what it needs.
//! * Memory regions begin at address 0 of their own (`ibv_reg_mr_iova`): an offset is an address, here and at peers. Only memory that an RNIC follows
//!   has its real addresses, because rdma_rxe of Linux 7.2 looks up every address of such a region there, whatever it was registered as.
//! * A context belongs to librdmacm, which never closes it.

use super::ends::{Ending, Ends};
use super::port::LastLook;
use super::sys_flush::{self, Abilities, Flush};
mod address;
mod cq;
mod mw;
mod srq;

use crate::memory::{Pinned, SharedMemory};
use address::{address_of, raw_address};
pub(super) use cq::{Cq, POLLED, Wc};
pub(super) use ffi::ibv_wc_status as status;
pub(super) use mw::Mw;
use rdma_sys as ffi;
use smallvec::SmallVec;
pub(super) use srq::Srq;
use srq::receive_with;
use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::net::{Ipv6Addr, SocketAddr};
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Requests of one post. Most posts are short, and these need no memory of the heap.
pub(super) type Few<T> = SmallVec<[T; 4]>;

/// The result of a call that returns 0, or sets errno.
pub(super) fn done(result: c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

pub(super) fn made<T>(pointer: *mut T) -> io::Result<NonNull<T>> {
    NonNull::new(pointer).ok_or_else(io::Error::last_os_error)
}

/// Makes a library's descriptor non-blocking.
fn unblock(fd: RawFd) -> io::Result<()> {
    // SAFETY: the library that gave the number keeps the descriptor open, and this borrows it for two calls.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = rustix::fs::fcntl_getfl(fd)?;
    Ok(rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)?)
}

/// An opened RNIC.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Context(NonNull<ffi::ibv_context>);

// SAFETY: libibverbs' calls may be made from any thread, and librdmacm keeps contexts open for as long as the process lives.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// The bounds of an RNIC.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Work requests of a queue.
    pub(super) queue_depth: u32,
    /// Completions of a queue.
    pub(super) completions: u32,
    /// The RNIC has windows of type 2B.
    pub(super) has_windows: bool,
    /// Receives of a shared queue; 0: the RNIC has no shared queues.
    pub(super) shared_receives: u32,
    /// Queue pairs of all users of the RNIC together.
    pub(super) queue_pairs: u32,
    /// READs and atomics of one queue pair.
    pub(super) reads: ReadDepth,
}

impl Context {
    pub(super) fn as_ptr(self) -> *mut ffi::ibv_context {
        self.0.as_ptr()
    }

    /// The kernel's name of the device.
    pub(super) fn name(self) -> String {
        // SAFETY: the context is open; the name is a string in memory of the library's, copied at once.
        unsafe {
            CStr::from_ptr(ffi::ibv_get_device_name((*self.0.as_ptr()).device)).to_string_lossy().into_owned()
        }
    }

    /// The largest MTU of a port.
    pub(super) fn max_mtu_bytes(self, port: u8) -> Option<u32> {
        let mut attributes = MaybeUninit::<ffi::ibv_port_attr>::zeroed();
        // SAFETY: the context is open; the library fills no more than the plain structure in (this call's is the beginning of it), of which all
        // zeros is a value.
        let attributes = unsafe {
            let asked = ffi::ibv_query_port(self.0.as_ptr(), port, attributes.as_mut_ptr().cast());
            (asked == 0).then(|| attributes.assume_init())
        };
        mtu_bytes(attributes?.max_mtu)
    }

    pub(super) fn limits(self) -> io::Result<Limits> {
        let mut attributes = MaybeUninit::<ffi::ibv_device_attr>::zeroed();
        // SAFETY: the context is open; the library fills the plain structure in, of which all zeros is a value, too.
        let attributes = unsafe {
            match ffi::ibv_query_device(self.0.as_ptr(), attributes.as_mut_ptr()) {
                0 => attributes.assume_init(),
                error => return Err(io::Error::from_raw_os_error(error)),
            }
        };
        let few = |count: c_int| u8::try_from(count.max(0)).unwrap_or(u8::MAX);
        Ok(Limits {
            queue_depth: attributes.max_qp_wr.max(0) as u32,
            completions: attributes.max_cqe.max(0) as u32,
            has_windows: attributes.device_cap_flags
                & ffi::ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2B.0
                != 0,
            shared_receives: if attributes.max_srq > 0 { attributes.max_srq_wr.max(0) as u32 } else { 0 },
            queue_pairs: attributes.max_qp.max(0) as u32,
            reads: ReadDepth {
                at_us: few(attributes.max_qp_rd_atom),
                of_us: few(attributes.max_qp_init_rd_atom),
            },
        })
    }
}

/// The bytes of an MTU: `IBV_MTU_256` is 1, and each next one twice that (verbs.h, enum ibv_mtu).
fn mtu_bytes(mtu: u32) -> Option<u32> {
    (1..=5).contains(&mtu).then(|| 128 << mtu)
}

/// A protection domain.
pub(super) struct Pd {
    raw: NonNull<ffi::ibv_pd>,
}

// SAFETY: libibverbs' calls may be made from any thread.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Pd {
    pub(super) fn new(context: Context) -> io::Result<Arc<Self>> {
        // SAFETY: the context is open.
        let raw = made(unsafe { ffi::ibv_alloc_pd(context.0.as_ptr()) })?;
        Ok(Arc::new(Self { raw }))
    }

    pub(super) fn as_ptr(&self) -> *mut ffi::ibv_pd {
        self.raw.as_ptr()
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: made by `new`; regions and queue pairs hold an `Arc` of it, so none is left.
        unsafe { ffi::ibv_dealloc_pd(self.raw.as_ptr()) };
    }
}

/// The rights that the RNIC is told.
#[derive(Clone, Copy, Default)]
pub(super) struct Rights {
    pub(super) local_write: bool,
    pub(super) remote_read: bool,
    pub(super) remote_write: bool,
    pub(super) remote_atomic: bool,
    pub(super) flush_global: bool,
    pub(super) flush_persistent: bool,
    /// Windows can be bound to the region.
    pub(super) windows: bool,
}

impl Rights {
    fn flags(self) -> ffi::ibv_access_flags {
        let mut access = ffi::ibv_access_flags(0);
        for (has, flag) in [
            (self.local_write, ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE),
            (self.remote_read, ffi::ibv_access_flags::IBV_ACCESS_REMOTE_READ),
            (self.remote_write, ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE),
            (self.remote_atomic, ffi::ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC),
            (self.windows, ffi::ibv_access_flags::IBV_ACCESS_MW_BIND),
        ] {
            if has {
                access |= flag;
            }
        }
        access
    }
}

/// Registered memory.
pub(super) struct Mr {
    raw: NonNull<ffi::ibv_mr>,
    pub(super) memory: Pinned,
    pub(super) first_address: u64,
    /// Offset in the memory at which the registration begins.
    from: u64,
    _pd: Arc<Pd>,
}

// SAFETY: libibverbs' calls may be made from any thread; the keys do not change.
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Sync for Mr {}

impl Mr {
    /// Pins the memory from an offset on, which must be a whole number of pages: the pages stay where they are until this is dropped. Memory whose
    /// pages are pointed is registered as a whole, and not pinned but followed, for which the RNIC needs on-demand paging.
    pub(super) fn new(
        pd: &Arc<Pd>,
        memory: Arc<SharedMemory>,
        from: usize,
        rights: Rights,
    ) -> io::Result<Self> {
        // When peers write to a region, this side's RNIC is the writer (IBTA volume 1, 10.6.3.1).
        let local_write = rights.local_write || rights.remote_write || rights.remote_atomic;
        let mut access = Rights { local_write, ..rights }.flags().0 as c_int;
        for (has, flag) in [
            (memory.is_pointed(), ffi::ibv_access_flags::IBV_ACCESS_ON_DEMAND.0 as c_int),
            (rights.flush_global, sys_flush::ACCESS_FLUSH_GLOBAL),
            (rights.flush_persistent, sys_flush::ACCESS_FLUSH_PERSISTENT),
        ] {
            if has {
                access |= flag;
            }
        }
        assert!(from < memory.len(), "something of the memory is registered");
        let memory = memory.pin();
        assert!(from == 0 || !memory.is_pointed(), "memory whose pages are pointed is registered whole");
        // SAFETY: inside of the mapping.
        let base = unsafe { memory.base_address().as_ptr().add(from) }.cast::<c_void>();
        let len = memory.len() - from;
        let first_address = if memory.is_pointed() { base as u64 } else { 0 };
        let address = first_address + from as u64;
        // SAFETY: the range is mapped for as long as `memory` lives, which this owns until after deregistration. The RNIC's copies race
        // with the CPU's, as `SharedMemory` allows.
        let raw = unsafe { ffi::ibv_reg_mr_iova(pd.raw.as_ptr(), base, len, address, access) };
        Ok(Self { raw: made(raw)?, memory, first_address, from: from as u64, _pd: pd.clone() })
    }

    /// The mapped address of a range, for a post that copies.
    fn mapped(&self, local: Local) -> Option<u64> {
        let is_inside = local.offset >= self.from && self.memory.contains(local.offset, local.len.into());
        is_inside.then(|| self.memory.base_address().as_ptr() as u64 + local.offset)
    }

    /// Registered bytes.
    pub(super) fn len(&self) -> u64 {
        // SAFETY: the registration stands while `self` lives; the field does not change.
        unsafe { (*self.raw.as_ptr()).length as u64 }
    }

    pub(super) fn lkey(&self) -> u32 {
        // SAFETY: the registration stands while `self` lives; the field does not change.
        unsafe { (*self.raw.as_ptr()).lkey }
    }

    pub(super) fn rkey(&self) -> u32 {
        // SAFETY: as `lkey`.
        unsafe { (*self.raw.as_ptr()).rkey }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: made by `new`, deregistered once; `memory` and `_pd` go after this.
        unsafe { ffi::ibv_dereg_mr(self.raw.as_ptr()) };
    }
}

/// A source of events of connections. Its connections end on a thread of its own (`ends`).
pub(super) struct Channel {
    raw: NonNull<ffi::rdma_event_channel>,
    ends: Ends,
}

// SAFETY: librdmacm's calls may be made from any thread.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

/// A refusal's reason "consumer reject" (IBTA volume 1, 12.6.7.2).
const REFUSED_BY_PROGRAM: i32 = 28;

/// What happened to a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Happened {
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
pub(super) struct Event {
    /// The number of its identifier: see [`Id::number`]. If a client asks, the listener's.
    pub(super) id: usize,
    pub(super) what: Happened,
    /// The identifier of the client that asks.
    pub(super) asker: Option<Id>,
    pub(super) private: Vec<u8>,
    /// READs that the peer asks to have under way here, and that this side may have under way at the peer.
    pub(super) reads: ReadDepth,
    /// Retransmissions that who asks wants our RNIC to make.
    pub(super) retries: u8,
    /// Whether a program at the peer's has refused, and not its kernel because none listens. An RNIC of iWARP does not tell.
    pub(super) by_program: bool,
}

impl Channel {
    /// `ending` counts identifiers that are over and that the kernel has not let go of; none ends while `port` is down.
    pub(super) fn new(ending: &Arc<Ending>, port: &Arc<LastLook>) -> io::Result<Arc<Self>> {
        let ends = Ends::start(ending, port)?;
        // SAFETY: no preconditions.
        let raw = made(unsafe { ffi::rdma_create_event_channel() })?;
        let channel = Arc::new(Self { raw, ends });
        // SAFETY: the channel was just made.
        unblock(unsafe { (*raw.as_ptr()).fd })?;
        Ok(channel)
    }

    pub(super) fn event_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel, and with it the descriptor, stays while `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw((*self.raw.as_ptr()).fd) }
    }

    /// The next event, if there is one. It is already acknowledged, so the identifier can be destroyed before the event is looked at.
    pub(super) fn next(self: &Arc<Self>) -> Option<Event> {
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

/// A queue pair's capacities.
#[derive(Clone, Copy, Debug)]
pub(super) struct Capacities {
    pub(super) send_depth: u32,
    pub(super) recv_depth: u32,
    /// The most bytes that a post copies.
    pub(super) max_inline: u32,
}

/// Retransmissions before a connection is given up: some seconds with the time-outs that the connection manager derives of the path. A path that
/// is gone for longer is a lost connection. Not 7, the most there are: rdma_rxe takes that for "for ever" (6.12, `rxe_comp.c`), and a peer that
/// went without a word would never be missed. Who asks to connect chooses for both sides (IBTA volume 1, 12.6.5), so who asks for more is refused.
pub(super) const RETRIES: u8 = 6;
/// The longest time between two of them, as a power of two of 4.096 us: 8.6 s. Paths of large fabrics have some 20.
const TIMEOUT_MOST: u8 = 21;
/// 7: for ever. A message waits for its receive, as over the other links; whoever waits too long for an answer gives the connection up.
const RNR_RETRIES: u8 = 7;

/// READs that may be under way, in each direction.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadDepth {
    pub(super) at_us: u8,
    pub(super) of_us: u8,
}

impl ReadDepth {
    /// The most that both sides can do.
    pub(super) fn min(self, other: Self) -> Self {
        Self { at_us: self.at_us.min(other.at_us), of_us: self.of_us.min(other.of_us) }
    }
}

/// Domain, completion queues and shared receives of a queue pair.
type MadeWith = (Arc<Pd>, [Arc<Cq>; 2], Option<Arc<Srq>>);

/// A connection identifier, with its queue pair once that is made.
pub(super) struct Id {
    raw: NonNull<ffi::rdma_cm_id>,
    channel: Option<Arc<Channel>>,
    /// A listener has sent nothing that could delay its destruction, and its address must be free when it is gone.
    listens: AtomicBool,
    /// What the queue pair was made with, kept until the queue pair is destroyed.
    made_with: Option<MadeWith>,
}

// SAFETY: librdmacm's and libibverbs' calls may be made from any thread; what needs an exclusive owner takes `&mut self`.
unsafe impl Send for Id {}
// SAFETY: as above.
unsafe impl Sync for Id {}

impl Id {
    fn adopt(raw: NonNull<ffi::rdma_cm_id>, channel: &Arc<Channel>) -> Self {
        Self { raw, channel: Some(channel.clone()), listens: AtomicBool::new(false), made_with: None }
    }

    /// An identifier whose events come through a channel, or, without one, whose calls block.
    pub(super) fn new(channel: Option<&Arc<Channel>>) -> io::Result<Self> {
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
    pub(super) fn number(&self) -> usize {
        self.raw.as_ptr() as usize
    }

    /// The RNIC, once an address has determined it.
    pub(super) fn context(&self) -> Option<Context> {
        // SAFETY: the identifier is there; librdmacm sets the field before the call or event that says so.
        NonNull::new(unsafe { (*self.raw.as_ptr()).verbs }).map(Context)
    }

    pub(super) fn bind(&self, address: SocketAddr) -> io::Result<()> {
        let mut address = raw_address(address);
        // SAFETY: the identifier is there; the address is copied.
        done(unsafe { ffi::rdma_bind_addr(self.raw.as_ptr(), (&raw mut address).cast()) })
    }

    pub(super) fn listen(&self, backlog: i32) -> io::Result<()> {
        self.listens.store(true, Ordering::Relaxed);
        // SAFETY: the identifier is there.
        done(unsafe { ffi::rdma_listen(self.raw.as_ptr(), backlog) })
    }

    pub(super) fn local_port(&self) -> u16 {
        // SAFETY: the identifier is there.
        u16::from_be(unsafe { ffi::rdma_get_src_port(self.raw.as_ptr()) })
    }

    pub(super) fn peer_address(&self) -> Option<SocketAddr> {
        // SAFETY: the identifier is there; every variant of the union is an address, and storage is the largest.
        address_of(unsafe { &(*self.raw.as_ptr()).route.addr.dst_addr_union.dst_storage })
    }

    /// `from` is an address of this machine; `None`: the one at which the route begins.
    pub(super) fn resolve_address(
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
    pub(super) fn port(&self) -> (u8, Ipv6Addr) {
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
    pub(super) fn misses_its_peer(&self) -> io::Result<()> {
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
    pub(super) fn path_mtu_bytes(&self) -> Option<u32> {
        mtu_bytes(self.query(ffi::ibv_qp_attr_mask::IBV_QP_PATH_MTU).ok()?.path_mtu)
    }

    pub(super) fn resolve_route(&self, timeout_ms: i32) -> io::Result<()> {
        // SAFETY: the identifier is there.
        done(unsafe { ffi::rdma_resolve_route(self.raw.as_ptr(), timeout_ms) })
    }

    /// Whether a queue pair for its connection can be made still. The kernel drops events of a client that asks until the client is accepted
    /// (`ucma_event_handler`), so nothing else tells that the client is gone.
    pub(super) fn still_asks(&self) -> bool {
        // SAFETY: all zeros is a value of this plain structure.
        let mut attributes: ffi::ibv_qp_attr = unsafe { std::mem::zeroed() };
        attributes.qp_state = ffi::ibv_qp_state::IBV_QPS_INIT;
        let mut mask = 0;
        // SAFETY: the identifier is there; the library fills the structure in. The kernel refuses if there is no connection to be made any more
        // (`cm_init_qp_init_attr`).
        unsafe { ffi::rdma_init_qp_attr(self.raw.as_ptr(), &mut attributes, &mut mask) == 0 }
    }

    /// Makes the queue pair, once. Returns its number, and how many bytes a post copies: less than asked for if the RNIC can copy less.
    pub(super) fn make_qp(
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
                max_send_sge: 1,
                max_recv_sge: 1,
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

    pub(super) fn connect(&self, private: &[u8], reads: ReadDepth) -> io::Result<()> {
        let mut param = Self::conn_param(private, reads);
        // SAFETY: the identifier is there; what is pointed to is copied.
        done(unsafe { ffi::rdma_connect(self.raw.as_ptr(), &mut param) })
    }

    pub(super) fn accept(&self, private: &[u8], reads: ReadDepth) -> io::Result<()> {
        let mut param = Self::conn_param(private, reads);
        // SAFETY: as `connect`.
        done(unsafe { ffi::rdma_accept(self.raw.as_ptr(), &mut param) })
    }

    /// Refuses a client that asks.
    pub(super) fn reject(&self, private: &[u8]) {
        let len = u8::try_from(private.len()).expect("private data is short");
        // SAFETY: as `connect`. If it fails the peer is gone.
        unsafe { ffi::rdma_reject(self.raw.as_ptr(), private.as_ptr().cast(), len) };
    }

    /// Puts the queue pair into the error state, and tells the peer.
    pub(super) fn disconnect(&self) {
        // SAFETY: the identifier is there. If it fails there is no connection.
        unsafe { ffi::rdma_disconnect(self.raw.as_ptr()) };
    }

    /// Puts the queue pair into the error state without a word to the peer.
    pub(super) fn fail_in_silence(&self) {
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
    pub(super) fn hurry_messages(&self) -> io::Result<()> {
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

    /// Posts a receive.
    pub(super) fn post_receive(&self, wr_id: u64, local: Option<Local>) -> io::Result<()> {
        assert!(self.made_with.is_some(), "there is a queue pair to post to");
        // SAFETY: the queue pair is there; `receive_with` says the rest.
        receive_with(wr_id, local, |wr, bad| unsafe { ffi::ibv_post_recv((*self.raw.as_ptr()).qp, wr, bad) })
    }

    /// Posts send work requests, with one doorbell, and one more for each FLUSH among them. The error contains how many were posted. The caller holds
    /// a lock meanwhile.
    pub(super) fn post_send(&self, requests: &[Posted]) -> Result<(), (usize, io::Error)> {
        assert!(self.made_with.is_some(), "there is a queue pair to post to");
        let is_flush = |request: &Posted| matches!(request.what, What::Flush(_));
        let mut posted = 0;
        for run in requests.chunk_by(|one, next| !is_flush(one) && !is_flush(next)) {
            let result = match run {
                [Posted { wr_id, what: What::Flush(flush), signaled, .. }] => {
                    // SAFETY: the identifier is there, and has its queue pair.
                    let qp = made(unsafe { (*self.raw.as_ptr()).qp });
                    // SAFETY: the queue pair stays; whoever posts a FLUSH has seen in the device's abilities that it can.
                    let post = |qp| unsafe { sys_flush::post(qp, *wr_id, *flush, *signaled) };
                    qp.and_then(post).map_err(|error| (0, error))
                }
                run => self.post_run(run),
            };
            result.map_err(|(done, error)| (posted + done, error))?;
            posted += run.len();
        }
        Ok(())
    }

    /// Posts requests that `ibv_post_send` supports.
    fn post_run(&self, requests: &[Posted]) -> Result<(), (usize, io::Error)> {
        let mut sges: Few<_> = requests.iter().map(Posted::raw_local).collect();
        let mut wrs: Few<ffi::ibv_send_wr> = requests
            .iter()
            .zip(&mut sges)
            .map(|(request, sge)| request.raw(sge.as_mut().map_or(null_mut(), |sge| sge)))
            .collect();
        let first = wrs.as_mut_ptr();
        for index in 1..wrs.len() {
            // SAFETY: inside of the list, which does not move any more.
            unsafe { (*first.add(index - 1)).next = first.add(index) };
        }
        if wrs.is_empty() {
            return Ok(());
        }
        let mut bad = null_mut();
        // SAFETY: the queue pair is there; the list and its elements outlive the call, which copies them. What they name is checked by
        // the RNIC, here and at the target; or, inline, is mapped memory whose region `requests` holds (`Posted::raw_local`). That the library's
        // copy can race with others is as `SharedMemory` allows.
        match unsafe { ffi::ibv_post_send((*self.raw.as_ptr()).qp, first, &mut bad) } {
            0 => Ok(()),
            error => {
                let posted = if bad.is_null() {
                    0
                } else {
                    // SAFETY: the library gives an element of the list.
                    usize::try_from(unsafe { bad.offset_from(first) }).unwrap_or(0)
                };
                Err((posted, io::Error::from_raw_os_error(error.abs())))
            }
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

/// A local range.
#[derive(Clone, Copy, Debug)]
pub(super) struct Local {
    pub(super) lkey: u32,
    pub(super) offset: u64,
    pub(super) len: u32,
}

impl Local {
    fn raw(self) -> ffi::ibv_sge {
        ffi::ibv_sge { addr: self.offset, length: self.len, lkey: self.lkey }
    }
}

/// A range at the target.
#[derive(Clone, Copy, Debug)]
pub(super) struct Far {
    pub(super) rkey: u32,
    pub(super) offset: u64,
}

/// The operation of a posted request.
#[derive(Clone, Copy)]
pub(super) enum What<'r> {
    Send,
    SendImm(u32),
    Read(Far),
    Write(Far),
    WriteImm(Far, u32),
    Flush(Flush),
    CompareSwap {
        far: Far,
        expect: u64,
        swap: u64,
    },
    FetchAdd {
        far: Far,
        add: u64,
    },
    /// Binds a window, with its new key.
    Bind {
        window: &'r Mw,
        rkey: u32,
        region: &'r Mr,
        offset: u64,
        len: u64,
        rights: Rights,
    },
    Invalidate {
        rkey: u32,
    },
}

/// A send work request.
#[derive(Clone, Copy)]
pub(super) struct Posted<'r> {
    pub(super) wr_id: u64,
    pub(super) what: What<'r>,
    pub(super) local: Option<Local>,
    /// The region of the local range, for a SEND or WRITE that the post copies.
    pub(super) inline: Option<&'r Mr>,
    pub(super) signaled: bool,
}

impl Posted<'_> {
    /// The address from which the post copies, if it does.
    fn mapped(&self) -> Option<u64> {
        self.inline?.mapped(self.local?)
    }

    fn raw_local(&self) -> Option<ffi::ibv_sge> {
        let raw = self.local?.raw();
        Some(ffi::ibv_sge { addr: self.mapped().unwrap_or(raw.addr), ..raw })
    }

    fn raw(&self, sge: *mut ffi::ibv_sge) -> ffi::ibv_send_wr {
        use ffi::ibv_wr_opcode as op;
        // SAFETY: all zeros is a value of this plain structure.
        let mut wr: ffi::ibv_send_wr = unsafe { std::mem::zeroed() };
        wr.wr_id = self.wr_id;
        wr.sg_list = sge;
        wr.num_sge = c_int::from(self.local.is_some());
        if self.signaled {
            wr.send_flags |= ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
        }
        if self.mapped().is_some() {
            wr.send_flags |= ffi::ibv_send_flags::IBV_SEND_INLINE.0;
        }
        let rdma = |far: Far| ffi::rdma_t { remote_addr: far.offset, rkey: far.rkey };
        let atomic = |far: Far, compare_add, swap| ffi::atomic_t {
            remote_addr: far.offset,
            compare_add,
            swap,
            rkey: far.rkey,
        };
        let mut imm = None;
        wr.opcode = match self.what {
            What::Send => op::IBV_WR_SEND,
            What::SendImm(value) => {
                imm = Some(value);
                op::IBV_WR_SEND_WITH_IMM
            }
            What::Read(far) => {
                wr.wr.rdma = rdma(far);
                op::IBV_WR_RDMA_READ
            }
            What::Write(far) => {
                wr.wr.rdma = rdma(far);
                op::IBV_WR_RDMA_WRITE
            }
            What::WriteImm(far, value) => {
                wr.wr.rdma = rdma(far);
                imm = Some(value);
                op::IBV_WR_RDMA_WRITE_WITH_IMM
            }
            What::CompareSwap { far, expect, swap } => {
                wr.wr.atomic = atomic(far, expect, swap);
                op::IBV_WR_ATOMIC_CMP_AND_SWP
            }
            What::FetchAdd { far, add } => {
                wr.wr.atomic = atomic(far, add, 0);
                op::IBV_WR_ATOMIC_FETCH_AND_ADD
            }
            What::Flush(_) => unreachable!("`ibv_post_send` knows no FLUSH"),
            What::Bind { window, rkey, region, offset, len, rights } => {
                wr.bind_mw_tso_union.bind_mw = ffi::bind_mw_t {
                    mw: window.raw.as_ptr(),
                    rkey,
                    bind_info: ffi::ibv_mw_bind_info {
                        mr: region.raw.as_ptr(),
                        addr: region.first_address + offset,
                        length: len,
                        mw_access_flags: rights.flags().0,
                    },
                };
                op::IBV_WR_BIND_MW
            }
            What::Invalidate { rkey } => {
                wr.imm_data_invalidated_rkey_union.invalidated_rkey = rkey;
                op::IBV_WR_LOCAL_INV
            }
        };
        if let Some(value) = imm {
            wr.imm_data_invalidated_rkey_union.imm_data = value.to_be();
        }
        wr
    }
}
