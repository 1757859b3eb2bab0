//! A client of a memory node: a swap space whose pages lie there.
//!
//! # How it works
//! Each chain has a connection (`channel`) with up to 16 operations outstanding; a control connection (`control`) joins, beats and asks. The client knows
//! what is mapped, so it knows which chain a store needs (section 4.4), and keeps its budget itself. Operations on different pages may be outstanding
//! together, on one page only one: as a kernel's swap does. Invalidations are sent when the client next waits, all with one doorbell.
//!
//! # Failure
//! A connection that breaks ends all operations that were outstanding on it with an error. The client then asks what is mapped and connects again, so the
//! next operation works; a page whose store was cut off has its old or its new bytes.

mod bits;
mod channel;
mod control;

use super::chains::Kind;
use super::wire::{BadMessage, Why};
use crate::ids::PAGE_SIZE;
use crate::memory::SharedMemory;
use crate::rdma::{
    Access, Completion, CompletionKind, CompletionQueue, Device, Endpoint, MemoryRegion, ProtectionDomain,
    RdmaError, WcStatus,
};
use bits::Bits;
use channel::{Channel, SLOTS};
use control::Control;
pub use control::node_figures;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long an operation, or an answer of the node, may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long a node may take to greet a client that is new: a person may wait, and something else may listen there.
const GREETING: Duration = Duration::from_secs(5);
/// A waiting client looks for a broken connection this often.
const LOOK: Duration = Duration::from_millis(100);
/// Depth of the completion queue of all channels.
const CQ_DEPTH: u32 = 1024;

/// Errors of remote memory.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// The connection cannot be made, or is gone.
    #[error("{0}")]
    Rdma(#[from] RdmaError),
    /// The node refuses.
    #[error("the memory node refused: {0}")]
    Refused(String),
    /// The node's answer is none.
    #[error("the memory node's answer: {0}")]
    Answer(#[from] BadMessage),
    /// There is no page in the swap space with this number.
    #[error("page {page} is outside of the swap space of {pages} pages")]
    NoPage {
        /// The page.
        page: u64,
        /// Pages of the swap space.
        pages: u64,
    },
    /// The page was never stored, or was invalidated.
    #[error("page {0} is not stored at the memory node")]
    NotMapped(u64),
    /// An operation on the page is outstanding.
    #[error("an operation on page {0} is outstanding; finish it first")]
    Busy(u64),
    /// All of the chain's requests are outstanding.
    #[error("{SLOTS} operations of this kind are outstanding; finish one first")]
    Full,
    /// The client has as many pages as it may have.
    #[error("the client's budget of {0} pages at the node is used up: its --budget, or all its memory")]
    Budget(u64),
    /// The node has no free page.
    #[error("the node has no free page")]
    Empty,
    /// The node stopped the chain.
    #[error("the memory node stopped the operation: {0}")]
    Stopped(String),
    /// The connection broke, and was made again.
    #[error("the connection to the memory node broke; the operation may have been done or not. Try again")]
    Cut,
    /// Nothing came.
    #[error("the memory node did not answer for {} s; see whether it runs", PATIENCE.as_secs())]
    Silent,
    /// There is no memory for buffers.
    #[error("cannot get memory for buffers: {0}")]
    Memory(std::io::Error),
}

/// Options of a client.
#[derive(Clone, Copy, Debug)]
pub struct JoinOptions {
    /// Pages of the swap space.
    pub pages: u64,
}

/// An operation that is outstanding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket {
    kind: Kind,
    slot: u32,
}

/// An operation that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// Its ticket; a load's bytes are there until the next operation is begun.
    pub ticket: Ticket,
    /// What it was.
    pub kind: Kind,
    /// Its page.
    pub page: u64,
}

/// What channels share: the memory that the node WRITEs to, and the completion queue.
struct Base {
    pd: Arc<dyn ProtectionDomain>,
    cq: Arc<dyn CompletionQueue>,
    endpoint: Endpoint,
    arrivals: Arc<dyn MemoryRegion>,
}

/// A swap space at a memory node.
pub struct RemotePages {
    base: Base,
    control: Control,
    channels: Vec<Channel>,
    pages: u64,
    mapped: Bits,
    busy: Bits,
    /// Polled and not looked at yet.
    completions: VecDeque<Completion>,
    fresh: Vec<Completion>,
}

impl RemotePages {
    /// Joins a node.
    ///
    /// # Errors
    /// `RemoteError`, with advice.
    pub fn join(
        device: &Arc<dyn Device>,
        endpoint: &Endpoint,
        options: JoinOptions,
    ) -> Result<Self, RemoteError> {
        let pd = device.alloc_pd()?;
        let control = Control::join(device, &pd, endpoint, options.pages)?;
        let memory = SharedMemory::new("cuttlefs-odrp-arrivals", SLOTS as usize * PAGE_SIZE);
        let memory = Arc::new(memory.map_err(RemoteError::Memory)?);
        let access = Access { remote_write: true, ..Access::LOCAL };
        let arrivals = pd.register(memory, access)?;
        let cq = device.create_cq(CQ_DEPTH)?;
        let base = Base { pd, cq, endpoint: endpoint.clone(), arrivals };
        let mut others = VecDeque::new();
        let channels: Result<Vec<_>, _> = Kind::ALL
            .iter()
            .map(|kind| Channel::attach(&base, *kind, control.token(), &mut others))
            .collect();
        Ok(Self {
            base,
            control,
            channels: channels?,
            pages: options.pages,
            mapped: Bits::new(options.pages),
            busy: Bits::new(options.pages),
            completions: VecDeque::new(),
            fresh: Vec::new(),
        })
    }

    /// Pages of the swap space.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Pages that are stored.
    pub fn stored(&self) -> u64 {
        self.mapped.count()
    }

    /// The most pages that may be stored.
    pub fn budget(&self) -> u64 {
        self.control.budget()
    }

    /// Whether a page is stored.
    pub fn is_stored(&self, page: u64) -> bool {
        self.mapped.get(page)
    }

    /// Loads a page.
    ///
    /// # Errors
    /// `RemoteError`.
    pub fn load(&mut self, page: u64, out: &mut [u8]) -> Result<(), RemoteError> {
        let ticket = self.begin_load(page)?;
        self.finish(ticket)?;
        self.bytes(ticket, out);
        Ok(())
    }

    /// Stores a page: at most `PAGE_SIZE` bytes, behind which are zeros.
    ///
    /// # Errors
    /// As `load`.
    pub fn store(&mut self, page: u64, bytes: &[u8]) -> Result<(), RemoteError> {
        let ticket = self.begin_store(page, bytes)?;
        self.finish(ticket)
    }

    /// Forgets a page and gives its memory back.
    ///
    /// # Errors
    /// As `load`.
    pub fn invalidate(&mut self, page: u64) -> Result<(), RemoteError> {
        let ticket = self.begin_invalidate(page)?;
        self.finish(ticket)
    }

    /// Begins a load.
    ///
    /// # Errors
    /// As `load`; `Full` if a load has to be finished first.
    pub fn begin_load(&mut self, page: u64) -> Result<Ticket, RemoteError> {
        self.look(page, true)?;
        self.begin(Kind::Load, page, &[])
    }

    /// Begins a store.
    ///
    /// # Errors
    /// As `begin_load`.
    pub fn begin_store(&mut self, page: u64, bytes: &[u8]) -> Result<Ticket, RemoteError> {
        self.look(page, false)?;
        if self.mapped.get(page) {
            return self.begin(Kind::MappedStore, page, bytes);
        }
        let outstanding = self.channels[Kind::UnmappedStore.index()].outstanding();
        if self.mapped.count() + outstanding >= self.budget() {
            return Err(RemoteError::Budget(self.budget()));
        }
        self.begin(Kind::UnmappedStore, page, bytes)
    }

    /// Begins to forget a page. It is sent with the others that were begun, when [`Self::finish`] or [`Self::finish_any`] has to wait.
    ///
    /// # Errors
    /// As `begin_load`.
    pub fn begin_invalidate(&mut self, page: u64) -> Result<Ticket, RemoteError> {
        self.look(page, true)?;
        self.begin(Kind::Invalidate, page, &[])
    }

    /// Copies a loaded page out, after its `finish` and before the next `begin_load`.
    pub fn bytes(&self, ticket: Ticket, out: &mut [u8]) {
        let len = out.len().min(PAGE_SIZE);
        self.base.arrivals.memory().read(ticket.slot as usize * PAGE_SIZE, &mut out[..len]);
    }

    /// Waits until an operation is done; others may be done meanwhile.
    ///
    /// # Errors
    /// As `load`.
    pub fn finish(&mut self, ticket: Ticket) -> Result<(), RemoteError> {
        let deadline = Instant::now() + PATIENCE;
        while self.channels[ticket.kind.index()].is_outstanding(ticket.slot) {
            self.pump(deadline)?;
        }
        Ok(())
    }

    /// Waits until any operation is done; `None` if none is outstanding.
    ///
    /// # Errors
    /// As `load`.
    pub fn finish_any(&mut self) -> Result<Option<Done>, RemoteError> {
        let deadline = Instant::now() + PATIENCE;
        while self.channels.iter().any(|channel| channel.outstanding() > 0) {
            if let Some(done) = self.poll(deadline)? {
                return Ok(Some(done));
            }
        }
        Ok(None)
    }

    fn look(&self, page: u64, mapped: bool) -> Result<(), RemoteError> {
        if page >= self.pages {
            return Err(RemoteError::NoPage { page, pages: self.pages });
        }
        if self.busy.get(page) {
            return Err(RemoteError::Busy(page));
        }
        if mapped && !self.mapped.get(page) { Err(RemoteError::NotMapped(page)) } else { Ok(()) }
    }

    fn begin(&mut self, kind: Kind, page: u64, bytes: &[u8]) -> Result<Ticket, RemoteError> {
        let to = (self.base.arrivals.rkey().0, self.base.arrivals.first_address());
        match self.channels[kind.index()].begin(page, bytes, to) {
            Ok(slot) => {
                self.busy.set(page);
                Ok(Ticket { kind, slot })
            }
            Err(channel::NotBegun::Full) => Err(RemoteError::Full),
            Err(channel::NotBegun::Broken) => Err(self.recover(kind)),
        }
    }

    /// Waits for completions, and takes them all.
    fn pump(&mut self, deadline: Instant) -> Result<(), RemoteError> {
        self.poll(deadline).map(drop)
    }

    /// Takes the next completion; waits for it if there is none.
    fn poll(&mut self, deadline: Instant) -> Result<Option<Done>, RemoteError> {
        if self.completions.is_empty() {
            self.base.cq.poll(&mut self.fresh, SLOTS as usize);
            self.completions.extend(self.fresh.drain(..));
        }
        let Some(completion) = self.completions.pop_front() else {
            let broken = self.channels.iter().position(Channel::is_broken_with_work);
            if let Some(kind) = broken.map(|index| Kind::ALL[index]) {
                return Err(self.recover(kind));
            }
            if Instant::now() > deadline {
                return Err(RemoteError::Silent);
            }
            if let Some(kind) = self.ring() {
                return Err(self.recover(kind));
            }
            self.base.cq.wait(LOOK);
            return Ok(None);
        };
        let Some(kind) = self.channels.iter().find(|one| one.number() == completion.qp).map(Channel::kind)
        else {
            // Of a connection that is no more.
            return Ok(None);
        };
        if completion.status != WcStatus::Success {
            return Err(self.recover(kind));
        }
        if completion.kind != CompletionKind::RecvWithImm {
            return Ok(None);
        }
        let Some((slot, page)) = self.channels[kind.index()].arrived(completion.imm.unwrap_or(u32::MAX))
        else {
            return Ok(None);
        };
        self.busy.clear(page);
        match kind {
            Kind::UnmappedStore => self.mapped.set(page),
            Kind::Invalidate => self.mapped.clear(page),
            Kind::Load | Kind::MappedStore => {}
        }
        Ok(Some(Done { ticket: Ticket { kind, slot }, kind, page }))
    }

    /// Sends what was begun and not sent. Returns the kind whose connection is gone.
    fn ring(&mut self) -> Option<Kind> {
        let mut channels = self.channels.iter_mut();
        channels.find_map(|channel| channel.ring().is_err().then_some(channel.kind()))
    }

    /// Connects a channel again; returns the error of the operations that were outstanding on it.
    fn recover(&mut self, kind: Kind) -> RemoteError {
        self.reconnect(kind).unwrap_or_else(|error| error)
    }

    fn reconnect(&mut self, kind: Kind) -> Result<RemoteError, RemoteError> {
        // What has arrived before the break is done.
        let number = self.channels[kind.index()].number();
        self.base.cq.poll(&mut self.fresh, CQ_DEPTH as usize);
        let late = std::mem::take(&mut self.completions).into_iter().chain(self.fresh.drain(..));
        let (own, others) = late.partition::<VecDeque<_>, _>(|completion| completion.qp == number);
        self.completions = others;
        for completion in own.iter().filter(|completion| completion.status == WcStatus::Success) {
            if let Some((_, page)) = self.channels[kind.index()].arrived(completion.imm.unwrap_or(u32::MAX)) {
                self.busy.clear(page);
            }
        }
        for page in self.channels[kind.index()].abandon() {
            self.busy.clear(page);
        }
        let why = self.control.why(kind)?;
        let token = self.control.token();
        self.channels[kind.index()] = Channel::attach(&self.base, kind, token, &mut self.completions)?;
        if kind.changes_queue() {
            // The old connection's last chain has run or never will: the node has forgotten it.
            self.control.mapped(self.pages, &mut self.mapped)?;
        }
        Ok(match why {
            Why::Empty => RemoteError::Empty,
            Why::Fault(text) => RemoteError::Stopped(text),
            Why::Unknown => RemoteError::Cut,
        })
    }
}
