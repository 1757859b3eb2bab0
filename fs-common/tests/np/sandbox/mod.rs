//! A served region of memory that may not be there, and peers that do what arbitrary bytes say: messages of any kind, length, order and key, changed
//! in places; one-sided requests at any place; connections that end in between. Beside them a peer that keeps the rules, an owner that evicts, and a model
//! of the region's bytes. Used by the walk of `hostile_walk` and by the fuzz target `np_target`.
//!
//! All peers of a region have the same rights, so what a hostile one may change is its own affair. What must hold:
//!
//! * each request is answered with the status that it deserves, and with the region's bytes and no others: zeros where nobody has written;
//! * a message that is none, or is not due, ends its connection, and nothing behind it has an effect;
//! * what is refused changes no byte; the memory of a peer is changed only where its request says;
//! * the owner never waits: all is done when it has nothing more to do;
//! * nobody else notices: the other peer's accesses are right, and the owner has no connection too many.
//!
//! A run panics when one of these does not hold. Everything is in one thread, so the same bytes do the same.

mod drawn;
mod messages;
mod one_sided;
mod stranger;

use cuttlefs_common::ids::PAGE_SIZE;
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::np::{
    MemoryBacking, Message, NpLocal, NpOp, NpOrder, NpPeer, NpRegion, NpSettings, NpStatus, NpTarget, NpWr,
    Request, RequestOp, Welcome,
};
use cuttlefs_common::rdma::sim::{self, SimNetwork, Translation};
use cuttlefs_common::rdma::{
    Access, ConnectOptions, Device, Endpoint, MemoryRegion, PagedAccess, ProtectionDomain, QpConfig, RecvWr,
    WrId,
};
use cuttlefs_common::world::SeededRandom;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use stranger::{Feed, RECEIVE, RECEIVES, Stranger};

const PAGE: u64 = PAGE_SIZE as u64;
/// More pages than frames.
const PAGES: u64 = 40;
const FRAMES: u32 = 32;
const LEN: u64 = PAGES * PAGE;
/// Pages that are written at first. The others are zeros, and get frames that had other pages.
const WRITTEN: u64 = 24;
/// Bytes of each buffer that hostile peers name: longer than a piece.
const BUFFER: u64 = 96 << 10;
/// Steps of a run.
const STEPS_MAX: usize = 80;
/// Hostile peers at a time.
const STRANGERS_MAX: usize = 5;
/// Times that the owner looks for work before it counts as never done.
const SETTLED_WITHIN: usize = 20_000;
/// Connections that are ended in a row: more than the owner has bounce buffers.
const ENDED_IN_A_ROW: usize = 34;
/// A key that nobody has.
const NO_KEY: u32 = 0x7777_7777;

/// What a run came across.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests that were done.
    pub done: u64,
    /// Requests that were answered with a refusal.
    pub refused: u64,
    /// Connections that were ended because of what came on them.
    pub ended: u64,
    /// Requests whose connection ended before their answer came.
    pub in_doubt: u64,
    /// One-sided requests that were done, and that were refused.
    pub one_sided: u64,
    pub one_sided_refused: u64,
    /// Accesses of the peer that keeps the rules.
    pub honest: u64,
}

struct World {
    region: Arc<NpRegion>,
    target: Arc<NpTarget>,
    access: PagedAccess,
    welcome: Option<Welcome>,
    model: Vec<u8>,
    honest: NpPeer,
    honest_local: NpLocal,
    honest_memory: Arc<SharedMemory>,
    device: Arc<dyn Device>,
    domain: Arc<dyn ProtectionDomain>,
    endpoint: Endpoint,
    strangers: Vec<Stranger>,
    /// Into the sink of the hostile peers the owner may only write, and from their source only read. So a source's bytes stay.
    sink: Arc<dyn MemoryRegion>,
    sink_model: Vec<u8>,
    source: Arc<dyn MemoryRegion>,
    /// Numbers of requests, and of bytes that were made.
    next: u32,
    counts: Counts,
}

/// Bytes that are not those of another number, and no zeros.
fn fresh(number: u32, len: u64) -> Vec<u8> {
    (0..len).map(|at| (u64::from(number) * 31 + at * 7 + (at >> 8)) as u8 | 1).collect()
}

fn contents(region: &Arc<dyn MemoryRegion>) -> Vec<u8> {
    let mut bytes = vec![0; region.memory().len()];
    region.memory().read(0, &mut bytes);
    bytes
}

impl World {
    fn new(feed: &mut Feed<'_>) -> Self {
        let translation = [Translation::Target, Translation::Initiator][feed.below(2) as usize];
        let access = if feed.below(4) == 0 { PagedAccess::Read } else { PagedAccess::ReadWrite };
        let network = SimNetwork::new(translation);
        let backing = Arc::new(MemoryBacking::default());
        let region = NpRegion::new(PAGES, FRAMES, backing, &SeededRandom::new(7)).expect("region");
        let mut model = fresh(0, WRITTEN * PAGE);
        region.write(0, &model).expect("written");
        model.resize(LEN as usize, 0);
        let owner: Arc<dyn Device> = network.device();
        let target = NpTarget::new(&owner, region.clone(), access).expect("target");
        let endpoint = Endpoint::Tcp { host: "sim".into(), port: 1 };
        let listener = target.domain().listen(&endpoint).expect("listen");
        let pumped = target.clone();
        sim::set_pump(move || {
            let accepted = listener.accept().is_ok_and(|incoming| pumped.accept(incoming).is_ok());
            pumped.step() || accepted
        });
        let good: Arc<dyn Device> = network.device();
        let settings = NpSettings { patience: Duration::from_secs(5), ..NpSettings::default() };
        let mut honest = NpPeer::connect(&good, &endpoint, settings).expect("connected");
        let memory = |len: u64| Arc::new(SharedMemory::new("np-sandbox", len as usize).expect("memory"));
        let honest_memory = memory(LEN);
        let honest_local = honest.register(honest_memory.clone()).expect("registered");
        let device: Arc<dyn Device> = network.device();
        let domain = device.alloc_pd().expect("domain");
        let may = |remote_read, remote_write| Access { remote_read, remote_write, ..Access::LOCAL };
        let sink = domain.register(memory(BUFFER), may(false, true)).expect("sink");
        let source = domain.register(memory(BUFFER), may(true, false)).expect("source");
        source.memory().write(0, &fresh(99, BUFFER));
        Self {
            region,
            target,
            access,
            welcome: None,
            model,
            honest,
            honest_local,
            honest_memory,
            device,
            domain,
            endpoint,
            strangers: Vec::new(),
            sink_model: contents(&sink),
            sink,
            source,
            next: 100,
            counts: Counts::default(),
        }
    }

    fn number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    /// Lets the owner do all that there is to do.
    fn settle(&self) {
        let is_done = (0..SETTLED_WITHIN).any(|_| !sim::pump());
        assert!(is_done, "the owner does not come to rest");
    }

    fn connect(&self) -> Stranger {
        let cq = self.device.create_cq(1024).expect("cq");
        let len = (RECEIVES + 2) * RECEIVE;
        let memory = Arc::new(SharedMemory::new("np-sandbox", len as usize).expect("memory"));
        let buffers = self.domain.register(memory, Access::LOCAL).expect("buffers");
        let receive =
            |id| RecvWr { wr_id: WrId(id), local: buffers.sge(id * RECEIVE, RECEIVE as u32).into() };
        let options = ConnectOptions {
            qp: QpConfig::new(&cq, 256, RECEIVES as u32),
            receives: (0..RECEIVES).map(receive).collect(),
            timeout: Duration::from_secs(1),
        };
        let qp = self.domain.connect(&self.endpoint, options).expect("connected").qp;
        Stranger { qp, cq, buffers, greeted: false }
    }

    /// A hostile peer to act; a new one if there are few. Most have said hello.
    fn stranger(&mut self, feed: &mut Feed<'_>) -> usize {
        let choice = feed.byte();
        let comes = self.strangers.is_empty() || self.strangers.len() < STRANGERS_MAX && choice >= 224;
        if !comes {
            return choice as usize % self.strangers.len();
        }
        self.strangers.push(self.connect());
        let who = self.strangers.len() - 1;
        if feed.below(8) > 0 {
            self.say(who, &[Message::Hello.encode()]);
        }
        who
    }

    fn range(offset: u64, len: u64) -> Option<Range<usize>> {
        let end = offset.checked_add(len).filter(|end| *end <= LEN)?;
        Some(offset as usize..end as usize)
    }

    fn word(&self, offset: u64) -> Option<u64> {
        let bytes = self.model[Self::range(offset, 8)?].try_into().expect("eight bytes");
        Some(u64::from_le_bytes(bytes))
    }

    fn honest(&mut self, op: NpOp, offset: u64, len: u64) {
        let (id, local) = (u64::from(self.number()), Some((self.honest_local, 0)));
        let wr = NpWr { id, op, offset, local, len: len as u32, order: NpOrder::RELAXED, signaled: true };
        self.honest.post(wr).expect("posted");
        let done = self.honest.drain();
        assert_eq!(
            (done.len(), done[0].id, done[0].status),
            (1, id, NpStatus::Success),
            "{op:?} at {offset}"
        );
        self.counts.honest += 1;
    }

    fn honest_read(&mut self, offset: u64, len: u64) {
        self.honest_memory.fill(0, len as usize, 0xee);
        self.honest(NpOp::Read, offset, len);
        let mut found = vec![0; len as usize];
        self.honest_memory.read(0, &mut found);
        let range = Self::range(offset, len).expect("it keeps the rules");
        assert!(found == self.model[range], "another peer reads other bytes at {offset}");
    }

    fn evict_all(&self) {
        for page in 0..PAGES {
            self.region.evict_page(page).expect("the device takes it");
        }
    }

    fn owner(&mut self, feed: &mut Feed<'_>) {
        match feed.below(4) {
            0 => self.evict_all(),
            1 => {
                let page = feed.below(PAGES);
                self.region.evict_page(page).expect("the device takes it");
            }
            2 => {
                let len = 1 + feed.two() % 9000;
                let offset = feed.two() * 3 % (LEN - len);
                let bytes = fresh(self.number(), len);
                self.region.write(offset, &bytes).expect("written");
                self.model[Self::range(offset, len).expect("inside")].copy_from_slice(&bytes);
            }
            _ => {
                let page = feed.below(PAGES);
                self.region.bring_in(page * PAGE, PAGE).expect("there is a frame");
            }
        }
    }

    fn step(&mut self, feed: &mut Feed<'_>) {
        match feed.below(16) {
            0..8 => {
                let who = self.stranger(feed);
                let mut messages = Vec::new();
                for _ in 0..=feed.below(5) {
                    let message = self.message(feed);
                    // Now and then more than there are slots.
                    let times = if feed.below(100) == 0 { 80 } else { 1 };
                    messages.extend(std::iter::repeat_n(message, times));
                }
                self.say(who, &messages);
            }
            8..11 => self.one_sided(feed),
            11 | 12 => self.owner(feed),
            13 | 14 => {
                let len = 1 + feed.two() % 20_000;
                let offset = feed.two() * 3 % (LEN - len);
                if self.access == PagedAccess::Read || feed.below(2) == 0 {
                    return self.honest_read(offset, len);
                }
                let bytes = fresh(self.number(), len);
                self.honest_memory.write(0, &bytes);
                self.honest(NpOp::Write, offset, len);
                self.model[Self::range(offset, len).expect("inside")].copy_from_slice(&bytes);
            }
            _ if feed.below(12) == 0 => {
                let bad = [
                    RequestOp::Read { len: 4096, rkey: NO_KEY, address: 0 },
                    RequestOp::Write { len: 4096, rkey: NO_KEY, address: 0 },
                ][feed.below(2) as usize]
                    .clone();
                let message = Message::Request(Request { tag: self.number(), offset: 0, op: bad }).encode();
                for _ in 0..ENDED_IN_A_ROW {
                    self.strangers.push(self.connect());
                    let who = self.strangers.len() - 1;
                    self.say(who, &[Message::Hello.encode(), message.clone()]);
                }
            }
            _ if !self.strangers.is_empty() => {
                let who = feed.byte() as usize % self.strangers.len();
                let gone = self.strangers.swap_remove(who);
                // In the middle of a WRITE, of which the owner has the bytes and has not stored them.
                let offset = feed.below(PAGES - 1) * PAGE + feed.byte();
                let op = RequestOp::Write { len: PAGE as u32, rkey: self.source.rkey().0, address: 0 };
                let request = Request { tag: self.number(), offset, op };
                if gone.greeted && feed.below(4) > 0 {
                    gone.send(&Message::Request(request.clone()).encode());
                    sim::pump();
                    gone.qp.close();
                    self.settle();
                    return self.take_over(&request);
                }
                gone.qp.close();
                self.settle();
            }
            _ => {}
        }
    }

    fn finish(mut self) -> Counts {
        let mut found = vec![0; LEN as usize];
        self.region.read(0, &mut found).expect("read");
        let wrong = found.iter().zip(&self.model).position(|(one, other)| one != other);
        assert_eq!(wrong, None, "the region has another byte");
        for stranger in self.strangers.drain(..) {
            stranger.qp.close();
        }
        self.settle();
        assert_eq!(self.target.figures().connections, 1, "the one that keeps the rules");
        // By messages, through bounce buffers.
        self.evict_all();
        self.honest_read(0, LEN);
        self.counts
    }
}

/// Does what the bytes say.
///
/// # Panics
/// A request has another outcome than it deserves, or somebody else notices it.
pub fn run(input: &[u8]) -> Counts {
    let mut feed = Feed(input);
    let mut world = World::new(&mut feed);
    for _ in 0..STEPS_MAX {
        if feed.0.is_empty() {
            break;
        }
        world.step(&mut feed);
    }
    let counts = world.finish();
    sim::clear_pump();
    counts
}
