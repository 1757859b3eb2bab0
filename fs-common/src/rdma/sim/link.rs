//! The simulated network: devices, registrations, listeners, windows.

use super::queue::{Role, SimPair, SimQueue};
use super::shared_receives::SimShared;
use super::window::Openings;
use crate::ids::{FileKey, Lkey, QpNumber, Rkey};
use crate::life::{Event, Life};
use crate::memory::SharedMemory;
use crate::memory::paged::PagedMemory;
use crate::persist::Persistence;
use crate::rdma::verbs::count_within;
use crate::rdma::{
    Access, Capabilities, CompletionQueue, ConnectOptions, Connected, Device, Endpoint, FileAtomic, FileRead,
    FileTarget, FileValue, FileWrite, FlushReach, Incoming, LinkKind, Listener, LocalPeer, MemoryRegion,
    PagedAccess, PeerIdentity, Placement, ProtectionDomain, QpConfig, QueuePair, RdmaError, RecvWr,
    RegionOwner, Remote, SGES_MAX, Sge, SharedReceiveQueue, WcStatus, WindowId,
};
use crate::world::{Random, SeededRandom};
use parking_lot::Mutex;
use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};

/// Largest two-sided message.
pub(super) const MAX_MESSAGE_BYTES: u32 = 1 << 20;
/// Largest one-sided transfer.
pub(super) const MAX_TRANSFER_BYTES: u32 = 1 << 30;
/// Steps that a connect waits for the other side before it gives up.
const CONNECT_STEPS: usize = 10_000;

/// The side that translates file addresses on this network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Translation {
    /// The target's NIC, as over `tcp`.
    Target,
    /// The initiator, as over `shm`.
    Initiator,
    /// The initiator, which READs the tables for it, since no link maps them: as over verbs.
    InitiatorByReads,
}

impl Translation {
    /// All variants.
    pub const ALL: [Self; 3] = [Self::Target, Self::Initiator, Self::InitiatorByReads];
}

/// What is lost when a connection is cut. The client is the side that connected, the server the side that accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// A message of the client's.
    Request,
    /// A message of the server's.
    Reply,
    /// A one-sided request of the server's.
    Transfer,
    /// A one-sided request of the client's.
    OneSided,
}

/// Random faults, from a seed.
struct Weather {
    random: SeededRandom,
    /// One of this many sends has a fault.
    one_in: u64,
}

/// What happens to something that is sent. In any case one queue pair's sends keep their order: the messages of a reliable connection can be late,
/// and so be overtaken by another connection's, but not by each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It arrives.
    Arrives,
    /// It arrives after the receiver has looked for it this number of times.
    Late(u32),
    /// It arrives twice, as a retransmission whose first transmission was not lost after all.
    Twice,
    /// It is lost, or damaged beyond what retransmissions repair: the connection breaks.
    Lost,
}

/// The most looks by which a message is late.
const LATE_MOST: u64 = 12;

/// The network that connects simulated devices.
pub struct SimNetwork {
    translation: Translation,
    next: AtomicU32,
    /// The next cut, and the number of sends of its kind that still get through.
    cut: Mutex<Option<(Cut, u32)>>,
    /// Random faults; `None`: no faults.
    weather: Mutex<Option<Weather>>,
    listeners: Mutex<HashMap<Endpoint, Weak<SimListener>>>,
    /// The life of the accepting side.
    server: Mutex<Life>,
}

impl SimNetwork {
    /// An empty network.
    pub fn new(translation: Translation) -> Arc<Self> {
        Arc::new(Self {
            translation,
            next: AtomicU32::new(1),
            cut: Mutex::default(),
            weather: Mutex::default(),
            listeners: Mutex::default(),
            server: Mutex::default(),
        })
    }

    /// From now on the accepting side's receives and sends are events of this life, and stop when it ends.
    pub fn set_server_life(&self, life: Life) {
        *self.server.lock() = life;
    }

    /// Whether the process that accepts connections is dead.
    pub(super) fn server_is_over(&self) -> bool {
        self.server.lock().is_over()
    }

    /// Whether this end is still alive to do this.
    pub(super) fn allows(&self, role: Role, event: Event, about: u64) -> bool {
        role == Role::Client || self.server.lock().allows(event, about)
    }

    /// Cuts one connection: after `pass` more of this kind got through, on any connections, the next is lost and its connection with it. Replaces a
    /// cut that has not happened yet.
    pub fn cut_after(&self, cut: Cut, pass: u32) {
        *self.cut.lock() = Some((cut, pass));
    }

    /// Whether a cut is still to come.
    pub fn cut_is_pending(&self) -> bool {
        self.cut.lock().is_some()
    }

    /// Whether everything that is sent arrives.
    pub fn is_faultless(&self) -> bool {
        !self.cut_is_pending() && self.weather.lock().is_none()
    }

    /// From now on one in `one_in` sends is late, arrives twice, or is lost with its connection, as the seed decides.
    pub fn set_weather(&self, seed: u64, one_in: u64) {
        let weather = Weather { random: SeededRandom::new(seed), one_in };
        *self.weather.lock() = (one_in > 0).then_some(weather);
    }

    /// What happens to a send of this kind.
    pub(super) fn fate(&self, kind: Cut) -> Fate {
        if self.loses(kind) {
            return Fate::Lost;
        }
        let weather = self.weather.lock();
        let Some(Weather { random, one_in }) = weather.as_ref() else { return Fate::Arrives };
        if !random.next_u64().is_multiple_of(*one_in) {
            return Fate::Arrives;
        }
        match random.next_u64() % 4 {
            0 => Fate::Lost,
            1 => Fate::Twice,
            _ => Fate::Late(1 + (random.next_u64() % LATE_MOST) as u32),
        }
    }

    /// Whether a cut takes this send.
    fn loses(&self, kind: Cut) -> bool {
        let mut cut = self.cut.lock();
        match cut.as_mut() {
            Some((wanted, 0)) if *wanted == kind => {
                *cut = None;
                true
            }
            Some((wanted, pass)) if *wanted == kind => {
                *pass -= 1;
                false
            }
            _ => false,
        }
    }

    /// A new device on this network, for one process.
    pub fn device(self: &Arc<Self>) -> Arc<SimDevice> {
        Arc::new_cyclic(|this| SimDevice {
            this: this.clone(),
            network: self.clone(),
            regions: Mutex::default(),
            openings: Openings::default(),
            target: Mutex::default(),
        })
    }

    fn number(&self) -> u32 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }
}

struct Registration {
    memory: Arc<SharedMemory>,
    paged: Option<Arc<PagedMemory>>,
    access: Access,
    persistence: Option<Arc<dyn Persistence>>,
}

/// One process's RNIC.
pub struct SimDevice {
    this: Weak<SimDevice>,
    network: Arc<SimNetwork>,
    regions: Mutex<HashMap<u32, Registration>>,
    openings: Openings,
    target: Mutex<Option<Arc<dyn FileTarget>>>,
}

impl SimDevice {
    /// The memory of a local range, if it is registered for this use.
    pub(super) fn local(&self, sge: Sge, write: bool) -> Option<(Arc<SharedMemory>, usize)> {
        let regions = self.regions.lock();
        let region = regions.get(&sge.lkey.0)?;
        let allowed = !write || region.access.local_write;
        let inside = region.memory.contains(sge.offset, u64::from(sge.len));
        (allowed && inside && region.paged.is_none()).then(|| (region.memory.clone(), sge.offset as usize))
    }

    pub(super) fn openings(&self) -> &Openings {
        &self.openings
    }

    pub(super) fn new_key(&self) -> u32 {
        self.network.number()
    }

    /// The memory of a region to which a window can be bound; `writes`: to change it.
    pub(super) fn to_bind(&self, lkey: Lkey, writes: bool) -> Option<Arc<SharedMemory>> {
        let regions = self.regions.lock();
        let region = regions.get(&lkey.0).filter(|region| region.paged.is_none())?;
        let Access { local_write, remote_write, remote_atomic, .. } = region.access;
        (!writes || local_write || remote_write || remote_atomic).then(|| region.memory.clone())
    }

    fn domain(&self, key: u32) -> Option<Arc<dyn Persistence>> {
        self.regions.lock().get(&key).and_then(|region| region.persistence.clone())
    }

    fn remote(
        &self,
        qp: QpNumber,
        rkey: Rkey,
        offset: u64,
        len: usize,
        allowed: impl Fn(&Access) -> bool,
    ) -> Result<Arc<SharedMemory>, WcStatus> {
        let regions = self.regions.lock();
        let Some(region) = regions.get(&rkey.0) else {
            let opened = self.openings.find(rkey, qp, (offset, len), allowed);
            return opened.ok_or(WcStatus::RemoteAccess);
        };
        if allowed(&region.access) && region.memory.contains(offset, len as u64) {
            Ok(region.memory.clone())
        } else {
            Err(WcStatus::RemoteAccess)
        }
    }

    /// Memory whose pages come and go; `None`: the key is of other memory, or of none.
    fn paged(
        &self,
        rkey: Rkey,
        offset: u64,
        len: usize,
        allowed: impl Fn(&Access) -> bool,
    ) -> Result<Option<Arc<PagedMemory>>, WcStatus> {
        let regions = self.regions.lock();
        let Some((paged, access)) =
            regions.get(&rkey.0).and_then(|region| Some((region.paged.as_ref()?, region.access)))
        else {
            return Ok(None);
        };
        let inside = offset.checked_add(len as u64).is_some_and(|end| end <= paged.translated().len());
        if allowed(&access) && inside { Ok(Some(paged.clone())) } else { Err(WcStatus::RemoteAccess) }
    }

    fn queue(queue: Arc<dyn CompletionQueue>) -> Result<Arc<SimQueue>, RdmaError> {
        let queue: Arc<dyn Any + Send + Sync> = queue;
        queue
            .downcast()
            .map_err(|_| RdmaError::Unsupported("a completion queue of another provider was given".into()))
    }

    fn shared(queue: Arc<dyn SharedReceiveQueue>) -> Result<Arc<SimShared>, RdmaError> {
        let queue: Arc<dyn Any + Send + Sync> = queue;
        queue
            .downcast()
            .map_err(|_| RdmaError::Unsupported("shared receives of another provider were given".into()))
    }

    /// Whether initiators of this network look pages of paged memory up themselves.
    pub(super) fn looks_pages_up(&self) -> bool {
        self.network.translation == Translation::Initiator
    }

    /// Whether this network behaves as one of RNICs, which have shared receives.
    fn has_shared_receives(&self) -> bool {
        self.network.translation == Translation::InitiatorByReads
    }

    pub(super) fn network(&self) -> &SimNetwork {
        &self.network
    }

    fn pair(
        self: &Arc<Self>,
        role: Role,
        qp: QpConfig,
        receives: Vec<RecvWr>,
    ) -> Result<Arc<SimPair>, RdmaError> {
        let queues = (Self::queue(qp.send_cq.clone())?, Self::queue(qp.recv_cq.clone())?);
        let shared = qp.shared_receives.clone().map(Self::shared).transpose()?;
        check_sges(qp.max_sges)?;
        if count_within(&receives, qp.max_sges) < receives.len() {
            return Err(RdmaError::Unsupported(format!(
                "a first receive names more than {} local ranges",
                qp.max_sges
            )));
        }
        let number = QpNumber(self.network.number());
        Ok(SimPair::new(number, role, self.clone(), queues, shared, qp, receives))
    }
}

fn check_sges(max_sges: u32) -> Result<(), RdmaError> {
    if (1..=SGES_MAX as u32).contains(&max_sges) {
        return Ok(());
    }
    Err(RdmaError::Unsupported(format!(
        "{max_sges} local ranges of a request are not between 1 and {SGES_MAX}"
    )))
}

/// The target of one-sided requests, as one queue pair's peer sees it.
pub(super) struct Peer<'p> {
    pub(super) device: &'p SimDevice,
    /// The number of that queue pair, at the target.
    pub(super) qp: QpNumber,
    pub(super) owner: RegionOwner,
    /// Whether the request touched a page that was not there.
    pub(super) absent: &'p AtomicBool,
}

impl Peer<'_> {
    fn note_absent(&self, all_there: bool) {
        self.absent.fetch_or(!all_there, Ordering::Relaxed);
    }

    fn target(&self) -> Result<Arc<dyn FileTarget>, WcStatus> {
        match self.device.network.translation {
            Translation::Target => self.device.target.lock().clone().ok_or(WcStatus::RemoteInvalid),
            Translation::Initiator | Translation::InitiatorByReads => Err(WcStatus::RemoteInvalid),
        }
    }

    pub(super) fn read(&self, remote: Remote, len: usize) -> Result<Vec<u8>, WcStatus> {
        let mut bytes = vec![0; len];
        match remote {
            Remote::Memory { rkey, offset } => {
                let may = |access: &Access| access.remote_read;
                match self.device.paged(rkey, offset, len, may)? {
                    Some(paged) => self.note_absent(paged.translated().read(offset, &mut bytes)),
                    None => {
                        let memory = self.device.remote(self.qp, rkey, offset, len, may)?;
                        memory.read_as_rnic(offset as usize, &mut bytes);
                    }
                }
            }
            Remote::File { filekey, offset } => {
                let target = self.target()?;
                let valid = match target.read_file(self.owner, filekey, offset, &mut bytes)? {
                    FileRead::Done(valid) => valid,
                    // A single thread has nobody else to serve meanwhile.
                    FileRead::Faults => target.read_file_faulting(self.owner, filekey, offset, &mut bytes)?,
                };
                bytes.truncate(valid);
            }
            Remote::Bitmap { filekey, first_page } => {
                let target = self.target()?;
                if !first_page.is_multiple_of(8) {
                    return Err(WcStatus::RemoteInvalid);
                }
                target.read_bitmap(self.owner, filekey, first_page, &mut bytes)?;
            }
        }
        Ok(bytes)
    }

    pub(super) fn write(&self, remote: Remote, bytes: &[u8]) -> Result<(), WcStatus> {
        match remote {
            Remote::Memory { rkey, offset } => {
                let may = |access: &Access| access.remote_write && offset >= access.own_bytes;
                if let Some(paged) = self.device.paged(rkey, offset, bytes.len(), may)? {
                    self.note_absent(paged.translated().write(offset, bytes));
                    return Ok(());
                }
                let memory = self.device.remote(self.qp, rkey, offset, bytes.len(), may)?;
                memory.write_word_last(offset as usize, bytes);
                Ok(())
            }
            Remote::File { filekey, offset } => {
                let target = self.target()?;
                match target.write_file(self.owner, filekey, offset, bytes)? {
                    FileWrite::Done => Ok(()),
                    FileWrite::Faults => target.write_file_faulting(self.owner, filekey, offset, bytes),
                }
            }
            Remote::Bitmap { .. } => Err(WcStatus::RemoteInvalid),
        }
    }

    pub(super) fn flush(&self, remote: Remote, len: usize, placement: Placement) -> Result<(), WcStatus> {
        let Remote::Memory { rkey, offset } = remote else { return Err(WcStatus::RemoteInvalid) };
        let memory = self.device.remote(self.qp, rkey, offset, len, |access| access.remote_flush)?;
        if placement == Placement::Visibility {
            // Requests execute whole when they are posted, so earlier writes are visible.
            return Ok(());
        }
        let domain = self.device.domain(rkey.0).ok_or(WcStatus::RemoteInvalid)?;
        // A single thread has nobody else to serve meanwhile.
        let persisted = domain.persist_and_wait(&memory, offset as usize, len);
        // A dead process fails no request and sends no answer.
        if self.device.network.server_is_over() {
            return Err(WcStatus::Disconnected);
        }
        persisted.map_err(|_| WcStatus::RemoteOperation)
    }

    pub(super) fn append(&self, filekey: FileKey, bytes: &[u8]) -> Result<u64, WcStatus> {
        let target = self.target()?;
        match target.append_file(self.owner, filekey, bytes)? {
            FileValue::Done(offset) => Ok(offset),
            FileValue::Faults => target.append_file_faulting(self.owner, filekey, bytes),
        }
    }

    pub(super) fn atomic(&self, remote: Remote, operation: FileAtomic) -> Result<u64, WcStatus> {
        let (Remote::Memory { offset, .. } | Remote::File { offset, .. }) = remote else {
            return Err(WcStatus::RemoteInvalid);
        };
        if !offset.is_multiple_of(8) {
            return Err(WcStatus::RemoteInvalid);
        }
        if let Remote::File { filekey, .. } = remote {
            let target = self.target()?;
            return match target.atomic_file(self.owner, filekey, offset, operation)? {
                FileValue::Done(old) => Ok(old),
                FileValue::Faults => target.atomic_file_faulting(self.owner, filekey, offset, operation),
            };
        }
        let Remote::Memory { rkey, offset } = remote else { return Err(WcStatus::RemoteInvalid) };
        let memory = self
            .device
            .remote(self.qp, rkey, offset, 8, |access| access.remote_atomic && offset >= access.own_bytes)?;
        let word = memory.atomic_u64(offset as usize);
        let mut old = word.load(Ordering::SeqCst);
        while let Err(now) =
            word.compare_exchange(old, operation.apply(old), Ordering::SeqCst, Ordering::SeqCst)
        {
            old = now;
        }
        Ok(old)
    }
}

struct SimRegion {
    device: Arc<SimDevice>,
    key: u32,
    memory: Arc<SharedMemory>,
    reach: FlushReach,
}

impl MemoryRegion for SimRegion {
    fn lkey(&self) -> Lkey {
        Lkey(self.key)
    }

    fn rkey(&self) -> Rkey {
        Rkey(self.key)
    }

    fn flush_reach(&self) -> FlushReach {
        self.reach
    }

    fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }
}

impl Drop for SimRegion {
    fn drop(&mut self) {
        self.device.regions.lock().remove(&self.key);
    }
}

struct SimDomain {
    device: Arc<SimDevice>,
    windows: Arc<Windows>,
}

/// The windows of a protection domain, by `WindowId`.
type Windows = Mutex<HashMap<u32, Arc<SharedMemory>>>;

impl SimDomain {
    fn insert(
        &self,
        memory: Arc<SharedMemory>,
        access: Access,
        persistence: Option<Arc<dyn Persistence>>,
    ) -> Arc<dyn MemoryRegion> {
        let key = self.device.network.number();
        let reach = FlushReach::of(access, persistence.is_some());
        let registration = Registration { memory: memory.clone(), paged: None, access, persistence };
        self.device.regions.lock().insert(key, registration);
        Arc::new(SimRegion { device: self.device.clone(), key, memory, reach })
    }
}

impl ProtectionDomain for SimDomain {
    fn register(
        &self,
        memory: Arc<SharedMemory>,
        access: Access,
    ) -> Result<Arc<dyn MemoryRegion>, RdmaError> {
        Ok(self.insert(memory, access, None))
    }

    fn register_persistent(
        &self,
        memory: Arc<SharedMemory>,
        access: Access,
        domain: Arc<dyn Persistence>,
    ) -> Result<Arc<dyn MemoryRegion>, RdmaError> {
        Ok(self.insert(memory, access, Some(domain)))
    }

    fn register_paged(
        &self,
        memory: Arc<PagedMemory>,
        access: PagedAccess,
    ) -> Result<Arc<dyn MemoryRegion>, RdmaError> {
        let key = self.device.network.number();
        let frames = memory.translated().frames().clone();
        let registration = Registration {
            memory: frames.clone(),
            paged: Some(memory),
            access: access.rights(),
            persistence: None,
        };
        self.device.regions.lock().insert(key, registration);
        let reach = FlushReach::None;
        Ok(Arc::new(SimRegion { device: self.device.clone(), key, memory: frames, reach }))
    }

    fn create_shared_receives(
        &self,
        depth: u32,
        max_sges: u32,
    ) -> Result<Arc<dyn SharedReceiveQueue>, RdmaError> {
        check_sges(max_sges)?;
        if !self.device.has_shared_receives() {
            return Err(RdmaError::Unsupported("this simulated device has no shared receive queues".into()));
        }
        Ok(Arc::new(SimShared::new(depth, max_sges)))
    }

    fn export_window(&self, id: WindowId, memory: Arc<SharedMemory>) {
        self.windows.lock().insert(id as u32, memory);
    }

    fn connect(&self, endpoint: &Endpoint, options: ConnectOptions) -> Result<Connected, RdmaError> {
        let listener = self.device.network.listeners.lock().get(endpoint).and_then(Weak::upgrade);
        let Some(listener) = listener.filter(|listener| !listener.closed.load(Ordering::SeqCst)) else {
            super::pump();
            return Err(RdmaError::Refused {
                endpoint: endpoint.to_string(),
                reason: "nobody listens there".into(),
            });
        };
        let pair = self.device.pair(Role::Client, options.qp, options.receives)?;
        let outcome = Arc::new(Mutex::new(None));
        listener.queue.lock().push_back(SimIncoming {
            device: listener.device.clone(),
            pair: pair.clone(),
            outcome: outcome.clone(),
        });
        for _ in 0..CONNECT_STEPS {
            if let Some(result) = outcome.lock().take() {
                result.map_err(|reason| RdmaError::Refused { endpoint: endpoint.to_string(), reason })?;
                return Ok(Connected { qp: pair, windows: listener.windows() });
            }
            if listener.closed.load(Ordering::SeqCst) {
                return Err(RdmaError::Refused {
                    endpoint: endpoint.to_string(),
                    reason: "it went away before it answered".into(),
                });
            }
            super::pump();
        }
        Err(RdmaError::Handshake { endpoint: endpoint.to_string(), reason: "nobody answered".into() })
    }

    fn listen(&self, endpoint: &Endpoint) -> Result<Box<dyn Listener>, RdmaError> {
        let listener = Arc::new(SimListener {
            device: self.device.clone(),
            windows: self.windows.clone(),
            endpoint: endpoint.clone(),
            queue: Mutex::default(),
            closed: AtomicBool::new(false),
        });
        self.device.network.listeners.lock().insert(endpoint.clone(), Arc::downgrade(&listener));
        Ok(Box::new(Listening(listener)))
    }
}

struct SimListener {
    device: Arc<SimDevice>,
    windows: Arc<Windows>,
    endpoint: Endpoint,
    queue: Mutex<VecDeque<SimIncoming>>,
    closed: AtomicBool,
}

impl SimListener {
    fn windows(&self) -> Vec<Arc<SharedMemory>> {
        if self.device.network.translation != Translation::Initiator {
            return Vec::new();
        }
        let windows = self.windows.lock();
        let window = |id: WindowId| windows.get(&(id as u32)).cloned();
        WindowId::ALL
            .into_iter()
            .filter_map(window)
            .filter_map(|memory| memory.read_only_view().ok())
            .map(Arc::new)
            .collect()
    }
}

struct Listening(Arc<SimListener>);

impl Listener for Listening {
    fn endpoint(&self) -> Endpoint {
        self.0.endpoint.clone()
    }

    /// Does not block: this thread has nobody else to wait for. `Unsupported` if nobody connects.
    fn accept(&self) -> Result<Box<dyn Incoming>, RdmaError> {
        if self.0.closed.load(Ordering::SeqCst) {
            return Err(RdmaError::Closed);
        }
        match self.0.queue.lock().pop_front() {
            Some(incoming) => Ok(Box::new(incoming)),
            None => Err(RdmaError::Unsupported("nobody asks to be connected".into())),
        }
    }

    fn close(&self) {
        self.0.closed.store(true, Ordering::SeqCst);
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.close();
    }
}

struct SimIncoming {
    device: Arc<SimDevice>,
    pair: Arc<SimPair>,
    outcome: Arc<Mutex<Option<Result<(), String>>>>,
}

impl Incoming for SimIncoming {
    fn peer(&self) -> PeerIdentity {
        PeerIdentity::Local(LocalPeer::root())
    }

    fn link(&self) -> LinkKind {
        LinkKind::Sim
    }

    fn accept(self: Box<Self>, qp: QpConfig, receives: Vec<RecvWr>) -> Result<Arc<dyn QueuePair>, RdmaError> {
        let pair = self.device.pair(Role::Server, qp, receives)?;
        pair.join(&self.pair);
        *self.outcome.lock() = Some(Ok(()));
        Ok(pair)
    }

    fn refuse(self: Box<Self>, reason: &str) {
        *self.outcome.lock() = Some(Err(reason.to_owned()));
    }
}

impl Device for SimDevice {
    fn name(&self) -> &str {
        "sim"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            file_regions: self.network.translation == Translation::Target,
            windows: self.network.translation == Translation::Initiator,
            max_message_bytes: MAX_MESSAGE_BYTES,
            max_transfer_bytes: MAX_TRANSFER_BYTES,
            max_queue_depth: 1 << 16,
            max_sges: SGES_MAX as u32,
            word_last: true,
            flush: FlushReach::Persistence,
            atomic_write: false,
            shared_receives: self.has_shared_receives(),
            memory_windows: true,
            // A READ is a copy from the process's own mapping.
            on_demand_paging: true,
            paged_memory: true,
            chains: false,
            // A FLUSH places the messages that were sent before it.
            flush_after_send: true,
        }
    }

    fn alloc_pd(&self) -> Result<Arc<dyn ProtectionDomain>, RdmaError> {
        let this = self.this.upgrade().expect("a device that is called is alive");
        Ok(Arc::new(SimDomain { device: this, windows: Arc::default() }))
    }

    fn create_cq(&self, _depth: u32) -> Result<Arc<dyn CompletionQueue>, RdmaError> {
        let queue = SimQueue::new().map_err(|source| RdmaError::Io {
            action: "make an event for",
            endpoint: "a completion queue".into(),
            source,
        })?;
        Ok(queue)
    }

    fn set_file_target(&self, target: Arc<dyn FileTarget>) {
        *self.target.lock() = Some(target);
    }
}
