use super::*;
use crate::memory::SharedMemory;
use crate::rdma::WrId;
use crate::rdma::chain::{Assembled, Assembler, Bytes, FIRST_ADDRESS, Field, Label, View, WorkQueue, check};
use proptest::prelude::*;
use std::sync::Arc;

const QUEUE: u32 = 1;
const TABLE: u32 = 2;
const OTHER: u32 = 3;

/// What was written to the peer: its address, the immediate, the bytes.
#[derive(Default)]
pub(in crate::rdma::chain) struct Told(pub(in crate::rdma::chain) Vec<(u64, Option<u32>, Vec<u8>)>);

impl ChainPeer for Told {
    fn write(
        &mut self,
        _key: u32,
        address: u64,
        imm: Option<u32>,
        len: usize,
        fill: &dyn Fn(&mut [u8]),
    ) -> Result<(), PeerGone> {
        let mut bytes = vec![0; len];
        fill(&mut bytes);
        self.0.push((address, imm, bytes));
        Ok(())
    }
}

fn memory(len: usize) -> Arc<SharedMemory> {
    Arc::new(SharedMemory::new("chain-test", len).expect("memory"))
}

/// A queue in memory, beside a table of words and memory that no view opens.
pub(in crate::rdma::chain) struct Site {
    pub(in crate::rdma::chain) assembled: Assembled,
    pub(in crate::rdma::chain) queue: WorkQueue,
    own: Arc<SharedMemory>,
    table: Arc<SharedMemory>,
}

impl Site {
    pub(in crate::rdma::chain) fn new(assembler: &Assembler, places: u32) -> Self {
        let assembled = assembler.finish(places);
        let (own, table) = (memory(assembled.image.len()), memory(4096));
        own.write(0, &assembled.image);
        let queue = assembled.queue(
            QUEUE,
            vec![
                View::unregistered("queue", QUEUE, own.clone()).writable(),
                View::unregistered("table", TABLE, table.clone()).part(0, 2048).atomic().of_words(),
            ],
            WrId(9),
        );
        Self { assembled, queue, own, table }
    }

    fn chain(&self) -> Chain {
        Chain::new(self.queue.clone()).expect("it lies in its views")
    }

    /// Overwrites an entry of place 0.
    pub(in crate::rdma::chain) fn put(&self, label: u32, entry: &Entry) {
        let at = self.assembled.geometry.entries_at() as usize + label as usize * ENTRY_LEN;
        self.own.write(at, &entry.encode());
    }

    pub(in crate::rdma::chain) fn entry(&self, label: u32) -> Entry {
        let mut bytes = [0; ENTRY_LEN];
        let at = self.assembled.geometry.entries_at() as usize + label as usize * ENTRY_LEN;
        self.own.read(at, &mut bytes);
        Entry::parse(&bytes).expect("an entry")
    }
}

/// A counter in the table that a message names is incremented in its low 16 bits; its old value goes to the client, turned around.
pub(in crate::rdma::chain) fn counting() -> Assembler {
    let mut a = Assembler::new(QUEUE);
    let (old, turned) = (a.scratch(8), a.scratch(8));
    let Bytes::Scratch { at, .. } = turned else { unreachable!("scratch is scratch") };
    a.wait();
    a.enable();
    let add = a.add(Bytes::Filled { key: TABLE }, 1, 1 << 15, old);
    let bytes: [Bytes; 8] = std::array::from_fn(|index| Bytes::Scratch { at: at + 7 - index as u32, len: 1 });
    a.read(old, &bytes);
    let tell = a.tell_peer(&[turned]);
    a.argument(Bytes::Of(add, Field::Address));
    a.argument(Bytes::Of(tell, Field::Immediate));
    a.argument(Bytes::Of(tell, Field::Remote));
    a
}

fn message(site: &Site, number: u64, table_at: u64, imm: u32) -> Vec<u8> {
    let shape = &site.assembled.shape;
    let mut message = vec![0; shape.len()];
    message[shape.argument(0)].copy_from_slice(&FIRST_ADDRESS.wrapping_add(table_at).to_be_bytes());
    message[shape.argument(1)].copy_from_slice(&imm.to_be_bytes());
    message[shape.argument(2)][..8].copy_from_slice(&77u64.to_be_bytes());
    shape.put_indices(number, &mut message);
    message
}

#[test]
fn a_queue_goes_around_by_its_messages() {
    let site = Site::new(&counting(), 4);
    assert_eq!(check(&site.queue), Ok(()));
    let mut chain = site.chain();
    let mut told = Told::default();
    site.table.store_u64(16, 0xffff_ffff, Ordering::Relaxed);
    for number in 0..11u64 {
        assert!(chain.is_ready(), "{number}");
        chain.start(&message(&site, number, 16, number as u32), &mut told).expect("a good message");
    }
    for (number, (address, imm, bytes)) in told.0.iter().enumerate() {
        // The addition wraps around in its sixteen bits, and the number comes with its first byte first.
        let value = 0xffff_0000 + (0xffff + number as u64) % 0x1_0000;
        assert_eq!((*address, *imm, &bytes[..]), (77, Some(number as u32), &value.to_be_bytes()[..]));
    }
    assert_eq!(site.queue.figures.chains(), 11);
    assert_eq!(site.queue.figures.entries.load(Ordering::Relaxed), 11 * 5);
}

#[test]
fn counts_wrap_around_at_32_bits() {
    let site = Site::new(&counting(), 6);
    let mut chain = site.chain();
    // As after many laps: 5 entries a message, and neither 6 places nor 30 entries divide 2^32.
    let first = (1u64 << 32) / 5 / 6 * 6;
    (chain.received, chain.next) = (first, (first * 5) as u32);
    chain.enabled = chain.next.wrapping_add(2);
    let shape = &site.assembled.shape;
    for number in first..first + 6 {
        let mut message = message(&site, number, 16, 0);
        shape.put_indices(number - u64::from(shape.window()), &mut message);
        site_indices(&site, &shape_indices(shape, &message), (number - first) as u32);
    }
    let posted = (first as u32).wrapping_add(shape.window());
    site.own.write(0, &posted.to_be_bytes());
    let mut told = Told::default();
    for number in first..first + 40 {
        assert!(chain.is_ready(), "{number}");
        chain.start(&message(&site, number, 16, number as u32), &mut told).expect("a good message");
    }
    assert_eq!(told.0.len(), 40);
    assert!(chain.next < 1000, "it wrapped around");
}

fn shape_indices(shape: &crate::rdma::chain::MessageShape, message: &[u8]) -> Vec<u8> {
    message[shape.argument(2).end..].to_vec()
}

/// Puts the indices of a message into the WAIT and the ENABLE of a place.
fn site_indices(site: &Site, indices: &[u8], place: u32) {
    let entries_at = site.assembled.geometry.entries_at() as usize;
    for (label, index) in [0, 1].iter().zip(indices.chunks_exact(4)) {
        let at = entries_at + (place as usize * 5 + label) * ENTRY_LEN;
        site.own.write(at + Field::Index.range().0, index);
    }
}

/// The paper's Figure 2: what a message brings decides, by compare and swap of an opcode, whether an entry does something.
#[test]
fn a_swap_of_an_opcode_is_a_branch() {
    for (left, right) in [(5u32, 5u32), (5, 6)] {
        let mut a = Assembler::new(QUEUE);
        let (value, old, unused) = (a.scratch(8), a.scratch(8), a.scratch(8));
        a.wait();
        a.enable();
        a.take(Bytes::Of(Label(4), Field::Immediate), old);
        a.enable();
        let Bytes::Scratch { at, .. } = unused else { unreachable!("scratch is scratch") };
        a.write(unused, &[value]);
        a.tell_peer(&[unused]);
        let site = Site::new(&a, 2);
        let views = vec![View::unregistered("queue", QUEUE, site.own.clone()).atomic()];
        let queue = WorkQueue { views, ..site.queue.clone() };
        // The first word of entry 4: a NOP with x as its immediate becomes a WRITE if x is y.
        let write = site.entry(4);
        site.put(4, &Entry { opcode: Opcode::Nop, imm: left, ..write });
        let compare = Entry {
            address: FIRST_ADDRESS + site.assembled.geometry.entries_at() + 4 * ENTRY_LEN as u64,
            key: QUEUE,
            operand: first_word(Entry { opcode: Opcode::Write, imm: right, ..write }),
            compare: first_word(Entry { opcode: Opcode::Nop, imm: right, ..write }),
            mask: u64::MAX,
            compare_mask: u64::MAX,
            ..site.entry(2)
        };
        site.put(2, &compare);
        site.own.write(site.assembled.geometry.scratch_at() as usize, b"branched");
        let mut told = Told::default();
        Chain::new(queue).expect("queue").start(&[], &mut told).expect("no fault");
        let expected: &[u8] = if left == right { b"branched" } else { &[0; 8] };
        assert_eq!((at, &told.0[0].2[..]), (16, expected));
    }
}

fn first_word(entry: Entry) -> u64 {
    u64::from_le_bytes(entry.encode()[..8].try_into().expect("a word"))
}

fn fault(site: &Site, message: &[u8]) -> Fault {
    let mut chain = site.chain();
    let fault = chain.start(message, &mut Told::default()).expect_err("it faults");
    assert_eq!(chain.step(&mut Told::default()), Ok(Step::Held), "nothing runs behind a fault");
    assert_eq!(site.queue.figures.fault.lock().as_ref(), Some(&fault));
    fault
}

#[test]
fn what_is_outside_ends_the_chain_and_says_where() {
    let site = Site::new(&counting(), 4);
    for (at, why) in [
        (4u64.wrapping_sub(FIRST_ADDRESS), "are outside"),
        (2048, "are outside"),
        (12, "no aligned word"),
        (u64::MAX, "are outside"),
    ] {
        let fault = fault(&site, &message(&site, 0, at, 1));
        let text = fault.to_string();
        assert!(fault.position == 2 && text.contains(why) && text.contains("MASKED_FAA"), "{at}: {text}");
    }
    let long = vec![0; site.assembled.shape.len() + 1];
    assert!(matches!(fault(&site, &long).kind, FaultKind::Message(..)));
    // Other keys, and this key without the right.
    let add = site.entry(2);
    for (key, kind) in [
        (OTHER, FaultKind::Range(NotInView::Key(OTHER))),
        (QUEUE, FaultKind::Range(NotInView::Right(QUEUE, Need::Atomic))),
    ] {
        site.put(2, &Entry { key, ..add });
        assert_eq!(fault(&site, &message(&site, 0, 16, 1)).kind, kind);
    }
    site.put(2, &Entry { opcode: Opcode::Enable, index: 2 + 22, ..add });
    assert_eq!(fault(&site, &message(&site, 0, 16, 1)).kind, FaultKind::Enable(24));
}

#[test]
fn a_chain_that_never_ends_is_stopped() {
    let site = Site::new(&counting(), 4);
    let nop = Entry::default();
    // Without a WAIT in any place, and everything always enabled, the queue would go around for ever.
    for place in 0..4 {
        site.put(place * 5, &Entry::default());
        for label in 1..5 {
            let next = Entry { opcode: Opcode::Enable, index: u32::MAX / 4, ..Entry::default() };
            site.put(place * 5 + label, if label == 1 { &next } else { &nop });
        }
    }
    assert_eq!(fault(&site, &[]).kind, FaultKind::Enable(u32::MAX / 4));
    let queue = &site.queue;
    let mut chain = site.chain();
    for place in 0..4 {
        site.put(place * 5 + 1, &nop);
    }
    chain.enabled = u32::MAX / 2;
    let endless = chain.start(&[], &mut Told::default()).expect_err("it is endless");
    assert_eq!(endless.kind, FaultKind::Endless);
    assert!(queue.figures.entries.load(Ordering::Relaxed) < 2 * u64::from(STEPS_MAX));
}

#[test]
fn bytes_of_a_message_are_bounded() {
    let mut a = Assembler::new(QUEUE);
    let (from, to) = (a.scratch(40_000), a.scratch(40_000));
    a.wait();
    a.enable();
    a.write(to, &[from]);
    a.write(from, &[to]);
    let site = Site::new(&a, 2);
    assert!(matches!(check(&site.queue), Err(super::super::Unproven::Bytes(0, 80_000))));
    assert_eq!(fault(&site, &[]).kind, FaultKind::Bytes);
}

#[test]
fn a_closed_gate_and_a_limit_hold_messages_up() {
    let site = Site::new(&counting(), 4);
    let chain = site.chain();
    assert!(chain.is_ready() && site.queue.gate.enter().is_some());
    let closed = site.queue.gate.close();
    assert!(site.queue.gate.enter().is_none());
    drop(closed);
    assert!(site.queue.gate.enter().is_some());
    site.queue.figures.limit.store(0, Ordering::Relaxed);
    assert!(!chain.is_ready());
    site.queue.figures.limit.store(1, Ordering::Relaxed);
    assert!(chain.is_ready());
    site.own.write(0, &0u32.to_be_bytes());
    assert!(!chain.is_ready(), "no receive is posted");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Whatever is in the queue and in the messages: nothing panics, a message ends within its bounds, and nothing outside of the views changes.
    #[test]
    fn arbitrary_queues_hurt_nobody(
        wild in proptest::collection::vec((0usize..2000, any::<u8>()), 0..60),
        messages in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..48), 1..8),
        mixed in proptest::collection::vec(any::<bool>(), 8),
    ) {
        let site = Site::new(&counting(), 4);
        site.table.fill(2048, 2048, 0x5a);
        for (at, byte) in wild {
            site.own.write(64 + at, &[byte]);
        }
        let mut chain = site.chain();
        let mut told = Told::default();
        for (number, bytes) in messages.iter().enumerate() {
            let good = message(&site, number as u64, 16, 5);
            let before = site.queue.figures.entries.load(Ordering::Relaxed);
            let result = chain.start(if mixed[number] { bytes } else { &good }, &mut told);
            let after = site.queue.figures.entries.load(Ordering::Relaxed);
            prop_assert!(after - before <= u64::from(STEPS_MAX));
            if result.is_err() {
                break;
            }
        }
        let mut outside = [0; 2048];
        site.table.read(2048, &mut outside);
        prop_assert!(outside.iter().all(|byte| *byte == 0x5a));
    }
}
