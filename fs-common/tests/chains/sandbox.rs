//! Chains made of arbitrary bytes, in memory with guards around what their views open. Used by the test `chains` and by the fuzz target `chain`.

use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::WrId;
use cuttlefs_common::rdma::chain::{
    Assembled, Assembler, BYTES_MAX, Bytes, Chain, ChainPeer, ENTRY_LEN, FIRST_ADDRESS, Field, Label,
    PeerGone, STEPS_MAX, View, WorkQueue,
};
use std::sync::Arc;
use std::sync::atomic::Ordering;

const QUEUE: u32 = 1;
const TABLE: u32 = 2;
const POOL: u32 = 3;
const ROM: u32 = 4;
/// A key that no view has.
const NONE: u32 = 5;
/// What is outside of the views.
const GUARD: u8 = 0x5a;
/// Messages of one case.
const MESSAGES: usize = 8;

/// What became of a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The checker refused the queue.
    Refused,
    /// It ran; so many entries were executed.
    Ran(u64),
    /// Something happened that a proven queue cannot do.
    Broke(String),
}

/// Bytes that decide; zeros when they are used up.
struct Feed<'b>(&'b [u8]);

impl Feed<'_> {
    fn byte(&mut self) -> usize {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        usize::from(*first)
    }

    fn below(&mut self, bound: usize) -> usize {
        self.byte() % bound
    }

    fn two(&mut self) -> usize {
        self.byte() << 8 | self.byte()
    }
}

fn field(feed: &mut Feed<'_>) -> Field {
    let fields = [Field::Immediate, Field::Index, Field::Address, Field::Remote, Field::LocalAddress];
    fields[feed.below(fields.len())]
}

/// A range: scratch, a field of an entry, or fixed bytes around the edges of a view.
fn bytes(feed: &mut Feed<'_>, a: &mut Assembler) -> Bytes {
    match feed.below(8) {
        0 | 1 => a.scratch([4, 8, 12, 64][feed.below(4)]),
        2 | 3 => Bytes::Of(Label(feed.below(10) as u32), field(feed)),
        4 => Bytes::ByteOf(Label(feed.below(10) as u32), field(feed), feed.below(8) as u32),
        5 => Bytes::Filled { key: [TABLE, POOL, ROM, QUEUE, NONE][feed.below(5)] },
        _ => {
            let key = [TABLE, TABLE, POOL, POOL, ROM, QUEUE, NONE][feed.below(7)];
            let at = [0, 8, 1016, 1024, 1032, 3064, 3072, 4088, 4096, 12_280, 12_288][feed.below(11)];
            let len = [8, 8, 4, 16, 64, 4096][feed.below(6)];
            Bytes::At { key, address: FIRST_ADDRESS + at, len }
        }
    }
}

fn local(feed: &mut Feed<'_>, a: &mut Assembler) -> Vec<Bytes> {
    (0..1 + feed.below(3)).map(|_| bytes(feed, a)).collect()
}

/// A chain, and some bytes of its queue changed.
fn assemble(feed: &mut Feed<'_>) -> Assembled {
    let mut a = Assembler::new(QUEUE);
    a.wait();
    a.enable();
    let mut enables = 1;
    for _ in 0..feed.below(10) {
        match feed.below(8) {
            0 if enables < 3 => {
                a.enable();
                enables += 1;
            }
            1 | 2 => {
                let (from, to) = (bytes(feed, &mut a), local(feed, &mut a));
                a.read(from, &to);
            }
            3 | 4 => {
                let (to, from) = (bytes(feed, &mut a), local(feed, &mut a));
                a.write(to, &from);
            }
            5 => {
                let from = local(feed, &mut a);
                a.tell_peer(&from);
            }
            6 => {
                let (word, old) = (bytes(feed, &mut a), a.scratch(8));
                a.add(word, feed.two() as u64, 1 << (feed.below(64)), old);
            }
            _ => {
                let (word, old) = (bytes(feed, &mut a), bytes(feed, &mut a));
                a.take(word, old);
            }
        }
    }
    // A message has at most eight parts: the indices, the doorbell, and these.
    for _ in 0..feed.below(6 - enables) {
        let to = bytes(feed, &mut a);
        a.argument(to);
    }
    if feed.below(3) == 0 {
        let to = bytes(feed, &mut a);
        a.payload(to);
    }
    let mut assembled = a.finish(4);
    for _ in 0..feed.below(4) {
        let at = feed.two() % assembled.image.len();
        assembled.image[at] = feed.byte() as u8;
    }
    assembled
}

/// The other end: it counts, and has nothing.
#[derive(Default)]
struct Peer {
    writes: u64,
    bytes: u64,
}

impl ChainPeer for Peer {
    fn write(
        &mut self,
        _key: u32,
        _address: u64,
        _imm: Option<u32>,
        len: usize,
        fill: &dyn Fn(&mut [u8]),
    ) -> Result<(), PeerGone> {
        self.writes += 1;
        self.bytes += len as u64;
        fill(&mut vec![0; len]);
        Ok(())
    }
}

/// Memory of which a view opens a part.
struct Guarded {
    memory: Arc<SharedMemory>,
    open: std::ops::Range<usize>,
}

impl Guarded {
    fn new(len: usize, open: std::ops::Range<usize>) -> Self {
        let memory = Arc::new(SharedMemory::new("chain-sandbox", len).expect("memory"));
        memory.fill(0, len, GUARD);
        memory.fill(open.start, open.len(), 0);
        Self { memory, open }
    }

    fn view(&self, name: &'static str, key: u32) -> View {
        View::unregistered(name, key, self.memory.clone())
            .part(self.open.start as u64, self.open.len() as u64)
    }

    fn contents(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.memory.len()];
        self.memory.read(0, &mut bytes);
        bytes
    }

    fn is_whole(&self) -> bool {
        let contents = self.contents();
        contents[..self.open.start].iter().chain(&contents[self.open.end..]).all(|byte| *byte == GUARD)
    }
}

/// The bytes of the queue that nothing may change: all of entries and receives, but for the fields that `docs/odrp.md` lists.
fn fixed(assembled: &Assembled, image: &[u8]) -> Vec<u8> {
    let geometry = assembled.geometry;
    let (receives, entries) = (geometry.receives_at() as usize, geometry.entries_at() as usize);
    let mut fixed = image[receives..geometry.scratch_at() as usize].to_vec();
    for entry in fixed[entries - receives..].chunks_exact_mut(ENTRY_LEN) {
        let is_peer = entry[1] & 1 == 1;
        for field in [Field::Immediate, Field::Index, Field::Address, Field::LocalAddress] {
            let (at, len) = field.range();
            entry[at..at + len].fill(0);
        }
        if is_peer {
            let (at, len) = Field::Remote.range();
            entry[at..at + len].fill(0);
        }
    }
    fixed
}

/// Makes a queue of the bytes; runs it with messages of them if `is_proven`.
pub fn run(input: &[u8], is_proven: impl FnOnce(&WorkQueue) -> bool) -> Outcome {
    let mut feed = Feed(input);
    let assembled = assemble(&mut feed);
    let own = Arc::new(SharedMemory::new("chain-sandbox", assembled.image.len()).expect("memory"));
    own.write(0, &assembled.image);
    let table = Guarded::new(4096, 1024..3072);
    let pool = Guarded::new(16_384, 4096..12_288);
    let rom = Guarded::new(8192, 4096..6144);
    let queue = assembled.queue(
        QUEUE,
        vec![
            View::unregistered("queue", QUEUE, own.clone()).writable(),
            table.view("table", TABLE).atomic().of_words(),
            pool.view("pool", POOL).writable(),
            rom.view("rom", ROM),
        ],
        WrId(9),
    );
    if !is_proven(&queue) {
        return Outcome::Refused;
    }
    let before = (fixed(&assembled, &assembled.image), rom.contents());
    let figures = queue.figures.clone();
    let executed = || figures.entries.load(Ordering::Relaxed);
    let Ok(mut chain) = Chain::new(queue) else {
        return Outcome::Broke("a proven queue cannot be armed".into());
    };
    for number in 0..MESSAGES {
        if !chain.is_ready() {
            break;
        }
        let mut message = vec![0; assembled.shape.len()];
        message.iter_mut().for_each(|byte| *byte = feed.byte() as u8);
        match feed.below(4) {
            0 => message.truncate(feed.byte()),
            1 => message.extend([1; 9]),
            _ => assembled.shape.put_indices(number as u64, &mut message),
        }
        let (entries, mut peer) = (executed(), Peer::default());
        let result = chain.start(&message, &mut peer);
        let steps = executed() - entries;
        if steps > u64::from(STEPS_MAX) || peer.writes > u64::from(STEPS_MAX) || peer.bytes > BYTES_MAX {
            return Outcome::Broke(format!(
                "{steps} entries and {} bytes to the peer for one message",
                peer.bytes
            ));
        }
        let mut image = vec![0; assembled.image.len()];
        own.read(0, &mut image);
        if fixed(&assembled, &image) != before.0 {
            return Outcome::Broke("a fixed byte of the queue has changed".into());
        }
        if !table.is_whole() || !pool.is_whole() || rom.contents() != before.1 {
            return Outcome::Broke(
                "memory outside of the views, or one that is to be read, has changed".into(),
            );
        }
        if result.is_err() {
            // Final: nothing is executed any more.
            break;
        }
    }
    Outcome::Ran(executed())
}
