//! A link: all lanes to one server, and the state that they share.

use super::away::{AwaySince, UnheardSince};
use super::{Caller, Lane};
use cuttlefs_common::ids::{SlotIndex, TraceId};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::{
    Access, Device, Endpoint, HardwareFigures, MemoryRegion, ProtectionDomain, RdmaError,
};
use cuttlefs_common::rpc::Unanswered;
use cuttlefs_common::world::Clock;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// How long a request waits for its answer before it is sent on another connection. Longer than all but the largest syncs on a slow disk, and as long
/// as TCP's keepalive needs to notice a silent host.
const ANSWER_PATIENCE: Duration = Duration::from_secs(30);

/// The counts of a link.
#[derive(Debug, Default)]
pub(crate) struct WireCounters {
    /// The number of requests answered.
    pub(crate) rpc_requests: AtomicU64,
    /// The number of reconnects.
    pub(crate) reconnects: AtomicU64,
}

/// A link; see the module.
pub(crate) struct Link {
    device: Arc<dyn Device>,
    pub(super) pd: Arc<dyn ProtectionDomain>,
    pub(super) endpoint: Endpoint,
    /// The clock for time limits.
    clock: Arc<dyn Clock>,
    /// Each lane is locked for the time of one request. The last lanes are not lent to callers.
    pub(super) lanes: Vec<Mutex<Lane>>,
    /// The number of lanes that are lent to callers.
    pub(super) callers: usize,
    /// For each lane whether it has a connection.
    pub(super) standing: Vec<Arc<AtomicBool>>,
    /// The lane for the next thread that has no preferred lane yet; the lanes take turns.
    pub(super) next_lane: AtomicU64,
    /// For each lane the number of its unanswered request; 0: none. Written by the thread that has the lane (release, before it sends), read by
    /// recovery (acquire): so recovery sees every request that a server has done that is known to be gone.
    asking: Vec<AtomicU64>,
    shut_down: AtomicBool,
    /// Whether this side is ending the session, so that lost connections are not reported.
    pub(super) ending: AtomicBool,
    /// Wakes pausing reconnects when the mount ends.
    pause: (Mutex<()>, Condvar),
    trace: AtomicU64,
    /// Since when the server is away, and why, if that was logged and the server is not back.
    pub(super) away: Mutex<Option<AwaySince>>,
    /// Since when heartbeats do not go out, and why, though the server is not away.
    pub(super) unheard: Mutex<Option<UnheardSince>>,
    /// Milliseconds an answer may take. Relaxed: read before each wait, guards nothing.
    answer_patience_ms: AtomicU64,
    counters: WireCounters,
}

/// Marks a lane's request as unanswered until it is dropped.
pub(super) struct Asking<'l>(&'l AtomicU64);

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

impl Link {
    /// Lanes without connections: `callers` that are lent, and `own` behind those that are not, the first of them for heartbeats.
    ///
    /// # Errors
    /// The lanes' memory cannot be allocated or registered.
    pub(crate) fn new(
        device: Arc<dyn Device>,
        endpoint: Endpoint,
        clock: Arc<dyn Clock>,
        callers: usize,
        own: usize,
    ) -> Result<Self, RdmaError> {
        let pd = device.alloc_pd()?;
        let lane = |slot| Lane::new(SlotIndex(slot as u16), device.as_ref(), pd.as_ref());
        let lanes = (0..callers + own).map(lane).collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            asking: lanes.iter().map(|_| AtomicU64::new(0)).collect(),
            standing: lanes.iter().map(Lane::standing).collect(),
            lanes: lanes.into_iter().map(Mutex::new).collect(),
            callers,
            device,
            pd,
            endpoint,
            clock,
            next_lane: AtomicU64::new(0),
            shut_down: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            pause: (Mutex::new(()), Condvar::new()),
            trace: AtomicU64::new(1),
            away: Mutex::new(None),
            unheard: Mutex::new(None),
            answer_patience_ms: AtomicU64::new(ANSWER_PATIENCE.as_millis() as u64),
            counters: WireCounters::default(),
        })
    }

    /// The lane that heartbeats go out over.
    pub(super) fn heartbeat_lane(&self) -> SlotIndex {
        SlotIndex(self.callers as u16)
    }

    /// The lane to connect first: nobody else has it yet.
    pub(crate) fn first_lane(&self) -> MutexGuard<'_, Lane> {
        self.lanes[0].lock()
    }

    /// The counts of this link.
    pub(crate) fn counters(&self) -> &WireCounters {
        &self.counters
    }

    /// The server's endpoint.
    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// This side's RNIC.
    pub(super) fn device(&self) -> &dyn Device {
        self.device.as_ref()
    }

    /// Registers memory that only this side's READs fill: no peer can reach it.
    ///
    /// # Errors
    /// The device has no more room for it.
    pub(crate) fn register_own(&self, memory: Arc<SharedMemory>) -> Result<Arc<dyn MemoryRegion>, RdmaError> {
        self.pd.register(memory, Access::LOCAL)
    }

    /// Whether this side's device can read files by their filekeys.
    pub(crate) fn has_file_regions(&self) -> bool {
        self.device.capabilities().file_regions
    }

    /// The figures of this side's RNIC, if it is hardware.
    pub(crate) fn hardware(&self) -> Option<HardwareFigures> {
        self.device.hardware()
    }

    /// Registers memory, so that the peer can reach it.
    ///
    /// # Errors
    /// The device has no more room for it.
    pub(crate) fn register(&self, memory: Arc<SharedMemory>) -> Result<Arc<dyn MemoryRegion>, RdmaError> {
        let access = Access { remote_atomic: false, remote_flush: false, ..Access::ALL };
        self.pd.register(memory, access)
    }

    /// A caller for requests of the client's own, which belong to no FUSE request.
    pub(crate) fn own_caller(&self) -> Caller {
        Caller::new(0, 0, TraceId(self.trace.fetch_add(1, Ordering::Relaxed)))
    }

    /// Sets how long an answer may take before its connection is given up and the request is sent on another one.
    pub(crate) fn set_answer_patience(&self, patience: Duration) {
        self.answer_patience_ms.store(patience.as_millis() as u64, Ordering::Relaxed);
    }

    pub(super) fn answer_patience(&self) -> Duration {
        Duration::from_millis(self.answer_patience_ms.load(Ordering::Relaxed))
    }

    /// The link's time, by which time limits are measured.
    pub(crate) fn now(&self) -> Duration {
        self.clock.monotonic()
    }

    /// Notes that a lane's request is unanswered, until the returned guard is dropped.
    pub(super) fn note_asking(&self, slot: SlotIndex, seq: u64) -> Asking<'_> {
        let number = &self.asking[usize::from(slot.0)];
        number.store(seq, Ordering::Release);
        Asking(number)
    }

    /// The unanswered requests. Some of them may not have been sent yet.
    pub(crate) fn unanswered(&self) -> Vec<Unanswered> {
        let lanes = (0..).map(SlotIndex).zip(&self.asking);
        let asked = lanes.map(|(slot, number)| Unanswered { slot, seq: number.load(Ordering::Acquire) });
        asked.filter(|request| request.seq != 0).collect()
    }

    /// Begins the end of the mount; `false` if it had begun before. Requests go on.
    pub(crate) fn begin_end(&self) -> bool {
        !self.ending.swap(true, Ordering::AcqRel)
    }

    /// From now on calls that wait fail with `ShutDown`.
    pub(crate) fn shut_down(&self) {
        self.shut_down.store(true, Ordering::Release);
        self.pause.1.notify_all();
    }

    /// Whether the mount is ending.
    pub(crate) fn is_shut_down(&self) -> bool {
        self.shut_down.load(Ordering::Acquire)
    }

    /// Sleeps until `time` is over or the mount ends.
    pub(crate) fn pause(&self, time: Duration) {
        let mut guard = self.pause.0.lock();
        if !self.is_shut_down() {
            self.pause.1.wait_for(&mut guard, time);
        }
    }
}
