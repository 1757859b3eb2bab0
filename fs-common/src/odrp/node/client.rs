//! A client at its node: its table, its armed queues, what it has.

use super::super::chains::{Kind, Ring, assemble};
use super::super::pages::{Table, keys, views};
use super::super::wire::Why;
use super::Shared;
use super::connections::FAULT;
use super::processor::{About, Executed};
use crate::ids::QpNumber;
use crate::memory::SharedMemory;
use crate::rdma::chain::{ChainFigures, Fault, FaultKind, NotInView, View, WorkQueue, check, listing};
use crate::rdma::{Access, MemoryRegion, QueuePair};
use crate::world::{Random, SystemRandom};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// An armed queue.
struct Queue {
    number: QpNumber,
    figures: Arc<ChainFigures>,
    /// What executes it, if no RNIC does.
    executed: Option<Executed>,
}

/// A client.
pub(super) struct Client {
    pub(super) token: u128,
    pub(super) control: QpNumber,
    pub(super) table: Table,
    table_region: Arc<dyn MemoryRegion>,
    queues: [Option<Queue>; 4],
    /// What stopped the last queue of each kind.
    why: [Why; 4],
    last_heard: Instant,
    budget: u64,
    /// Pages that it had, less what its present queues have taken and given back since.
    base: i64,
    /// What its former queues have done.
    past: [u64; 4],
    past_entries: u64,
}

/// Why a client or a queue cannot be had, in words for the client.
pub(super) type Refusal = String;

impl Client {
    pub(super) fn new(shared: &Shared, pages: u64, control: QpNumber) -> Result<Self, Refusal> {
        let options = &shared.options;
        if pages == 0 || pages > options.table_pages {
            return Err(format!(
                "a swap space of {pages} pages of 4 KiB is not between 1 and {}; ask for less (swap: --size)",
                options.table_pages
            ));
        }
        let no_memory =
            |error: &dyn std::fmt::Display| format!("the memory node has no memory for a table: {error}");
        let table = Table::new(pages).map_err(|error| no_memory(&error))?;
        let table_region =
            shared.pd.register(table.memory.clone(), Access::LOCAL).map_err(|error| no_memory(&error))?;
        let token = u128::from(SystemRandom.next_u64()) << 64 | u128::from(SystemRandom.next_u64());
        Ok(Self {
            token,
            control,
            table,
            table_region,
            queues: [const { None }; 4],
            why: [const { Why::Unknown }; 4],
            last_heard: Instant::now(),
            budget: options.budget,
            base: 0,
            past: [0; 4],
            past_entries: 0,
        })
    }

    /// Arms a queue pair with the chain of a kind.
    pub(super) fn arm(
        &mut self,
        shared: &Shared,
        kind: Kind,
        qp: &Arc<dyn QueuePair>,
    ) -> Result<(), Refusal> {
        let failed = |error: &dyn std::fmt::Display| format!("the memory node cannot arm a queue: {error}");
        let ring = shared.pages.ring();
        // The queue has no keys before it is registered; what it is long does not depend on them.
        let len = assemble(kind, super::super::chains::Keys { queue: 1, pool: 2, free: 3, table: 4 }, ring)
            .image
            .len();
        let memory = Arc::new(SharedMemory::new("cuttlefs-odrp-queue", len).map_err(|error| failed(&error))?);
        let region = shared.pd.register(memory.clone(), Access::LOCAL).map_err(|error| failed(&error))?;
        let queue = work_queue(
            kind,
            ring,
            &memory,
            [
                View::of("queue", &region),
                View::of("pool", &shared.pool),
                View::of("free", &shared.free),
                // The memory ends with a whole page, the table before.
                View::of("table", &self.table_region).part(0, self.table.pages * 8),
            ],
        );
        let queue = WorkQueue { gate: shared.gate.clone(), ..queue };
        check(&queue).map_err(|error| failed(&error))?;
        tracing::trace!(?kind, "armed:\n{}", listing(&queue, 1, 10));
        let figures = queue.figures.clone();
        self.forget(kind);
        let (executed, armed) = match shared.by_processor {
            true => (Some(Executed::new(shared, kind, queue, qp)?), None),
            false => (None, Some(queue)),
        };
        self.queues[kind.index()] = Some(Queue { number: qp.number(), figures, executed });
        self.move_limit();
        armed.map_or(Ok(()), |queue| qp.arm(queue).map_err(|error| failed(&error)))
    }

    /// A request of a queue that the processor executes is done.
    pub(super) fn done(&mut self, kind: Kind, about: About, len: u32) {
        if let Some(executed) = self.queues[kind.index()].as_mut().and_then(|queue| queue.executed.as_mut()) {
            executed.done(about, len);
        }
    }

    /// Executes what its messages let go on. Returns the queue pairs that are at their end, and whether by a fault.
    pub(super) fn go_on(&mut self) -> Vec<(QpNumber, bool)> {
        let mut ended = Vec::new();
        for queue in self.queues.iter_mut().flatten() {
            if let Some(executed) = &mut queue.executed
                && let Err(fault) = executed.go_on()
            {
                ended.push((queue.number, fault.is_some()));
                queue.executed = None;
            }
        }
        ended
    }

    /// The present queue of a kind is no more; returns its queue pair.
    pub(super) fn forget(&mut self, kind: Kind) -> Option<QpNumber> {
        let queue = self.queues[kind.index()].take()?;
        let chains = queue.figures.chains();
        self.past[kind.index()] += chains;
        self.past_entries += queue.figures.entries.load(Ordering::Relaxed);
        match kind {
            Kind::UnmappedStore => self.base += chains as i64,
            Kind::Invalidate => self.base -= chains as i64,
            Kind::Load | Kind::MappedStore => {}
        }
        Some(queue.number)
    }

    /// The queue pairs of its queues.
    pub(super) fn queue_pairs(&self) -> Vec<QpNumber> {
        self.queues.iter().flatten().map(|queue| queue.number).collect()
    }

    /// Notes why a queue was stopped. Returns whether the free page queue may be wrong now.
    pub(super) fn stopped(&mut self, shared: &Shared, kind: Kind) -> bool {
        let fault = self.queues[kind.index()].as_ref().and_then(|queue| queue.figures.fault.lock().clone());
        let is_empty =
            kind == Kind::UnmappedStore && fault.as_ref().is_some_and(|fault| names_null(fault, shared));
        self.why[kind.index()] = match fault {
            Some(_) if is_empty => Why::Empty,
            Some(fault) => Why::Fault(fault.to_string()),
            None => Why::Unknown,
        };
        self.forget(kind);
        kind == Kind::UnmappedStore
    }

    /// What stopped a kind.
    pub(super) fn why(&mut self, kind: Kind) -> Why {
        std::mem::replace(&mut self.why[kind.index()], Why::Unknown)
    }

    pub(super) fn heard(&mut self) {
        self.last_heard = Instant::now();
    }

    pub(super) fn is_silent(&self, now: Instant, lease: Duration) -> bool {
        now.saturating_duration_since(self.last_heard) > lease
    }

    /// What its queues of a kind have done.
    pub(super) fn chains(&self, kind: Kind) -> u64 {
        self.past[kind.index()] + self.chains_now(kind)
    }

    fn chains_now(&self, kind: Kind) -> u64 {
        self.queues[kind.index()].as_ref().map_or(0, |queue| queue.figures.chains())
    }

    /// Entries that the RNIC has executed for it.
    pub(super) fn entries(&self) -> u64 {
        let now = self.queues.iter().flatten().map(|queue| queue.figures.entries.load(Ordering::Relaxed));
        self.past_entries + now.sum::<u64>()
    }

    /// Pages that it has, by its chains' counters (section 4.5.2): one word a queue, and no look at its table.
    pub(super) fn mapped(&self) -> u64 {
        let taken = self.chains_now(Kind::UnmappedStore) as i64;
        let given_back = self.chains_now(Kind::Invalidate) as i64;
        (self.base + taken - given_back).max(0) as u64
    }

    /// Counts its table. No chain may be under way.
    pub(super) fn recount(&mut self) {
        let counted = self.mapped() as i64;
        self.base += self.table.mapped() as i64 - counted;
    }

    /// Lets its unmapped stores go on as far as its budget goes. Returns whether that is further than before.
    pub(super) fn move_limit(&mut self) -> bool {
        let Some(queue) = &self.queues[Kind::UnmappedStore.index()] else { return false };
        // Read first: chains that end meanwhile are counted to what it has, and not to what it may still take.
        let received = queue.figures.received.load(Ordering::Acquire);
        let limit = received + self.budget.saturating_sub(self.mapped());
        queue.figures.limit.swap(limit, Ordering::AcqRel) < limit
    }
}

/// A work queue, assembled into memory that the first view is of.
pub(in crate::odrp) fn work_queue(
    kind: Kind,
    ring: Ring,
    memory: &SharedMemory,
    parts: [View; 4],
) -> WorkQueue {
    let keys = keys(&parts);
    let assembled = assemble(kind, keys, ring);
    memory.write(0, &assembled.image);
    assembled.queue(keys.queue, views(kind, parts), FAULT)
}

/// Whether a chain was stopped because it found no page.
fn names_null(fault: &Fault, shared: &Shared) -> bool {
    let key = shared.pool.lkey().0;
    matches!(fault.kind, FaultKind::Range(NotInView::Range { key: of, address: 0, .. }) if of == key)
}
