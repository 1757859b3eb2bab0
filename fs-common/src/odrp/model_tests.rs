//! The chains beside a reference model: several clients whose chains are interleaved entry by entry, as an RNIC may interleave queue pairs.

use super::chains::{Arguments, Kind, put_message, shape};
use super::node::work_queue_of;
use super::pages::{Pages, Table};
use crate::ids::PAGE_SIZE;
use crate::memory::SharedMemory;
use crate::rdma::chain::{
    Chain, ChainPeer, Fault, FaultKind, NotInView, PeerGone, Step, View, check, listing,
};
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

const POOL: u32 = 101;
const FREE: u32 = 102;

/// A client whose queues an executor runs.
struct One {
    table: Table,
    queues: Vec<(Chain, u64)>,
    told: Vec<(u32, Vec<u8>)>,
}

struct Told<'t>(&'t mut Vec<(u32, Vec<u8>)>);

impl ChainPeer for Told<'_> {
    fn write(
        &mut self,
        _key: u32,
        _address: u64,
        imm: Option<u32>,
        len: usize,
        fill: &dyn Fn(&mut [u8]),
    ) -> Result<(), PeerGone> {
        let mut bytes = vec![0; len];
        fill(&mut bytes);
        self.0.push((imm.expect("an immediate"), bytes));
        Ok(())
    }
}

fn queue(pages: &Pages, table: &Table, kind: Kind, client: u32) -> Chain {
    let key = 200 + client * 10 + kind.index() as u32;
    let ring = pages.ring();
    let keys = super::chains::Keys { queue: 1, pool: 2, free: 3, table: 4 };
    let len = super::chains::assemble(kind, keys, ring).image.len();
    let memory = Arc::new(SharedMemory::new("model-queue", len).expect("memory"));
    let parts = [
        View::unregistered("queue", key, memory.clone()),
        View::unregistered("pool", POOL, pages.pool.clone()),
        View::unregistered("free", FREE, pages.free.clone()),
        View::unregistered("table", 103, table.memory.clone()).part(0, table.pages * 8),
    ];
    let queue = work_queue_of(kind, ring, &memory, parts);
    check(&queue).unwrap_or_else(|error| panic!("{kind:?}: {error}\n{}", listing(&queue, 1, 10)));
    Chain::new(queue).expect("it can be armed")
}

impl One {
    fn new(pages: &Pages, client: u32, len: u64) -> Self {
        let table = Table::new(len).expect("memory");
        let queues = Kind::ALL.iter().map(|kind| (queue(pages, &table, *kind, client), 0)).collect();
        Self { table, queues, told: Vec::new() }
    }

    fn send(&mut self, kind: Kind, page: u64, tag: u32, bytes: &[u8]) -> Result<(), Fault> {
        let shape = shape(kind);
        let mut message = vec![0; shape.len()];
        let (chain, number) = &mut self.queues[kind.index()];
        put_message(kind, &shape, *number, Arguments { page, tag, to: (7, 0) }, &mut message);
        message[shape.payload()][..bytes.len()].copy_from_slice(bytes);
        assert!(chain.is_ready());
        *number += 1;
        chain.take(&message)
    }

    fn step(&mut self, kind: Kind) -> Result<Step, Fault> {
        self.queues[kind.index()].0.step(&mut Told(&mut self.told))
    }

    fn run(&mut self, kind: Kind) -> Result<(), Fault> {
        while self.step(kind)? == Step::Done {}
        Ok(())
    }
}

/// Every page is in exactly one place, and nothing outside of head and tail is in the queue.
fn consistent(pages: &Pages, clients: &[One]) {
    let mut places: HashMap<u64, u32> = HashMap::new();
    let queued = pages.queued();
    assert_eq!(queued.len() as u64, pages.free_count(), "elements lie between head and tail");
    for address in queued {
        *places.entry(address).or_default() += 1;
    }
    for client in clients {
        for entry in (0..client.table.pages).filter(|entry| client.table.get(*entry) != 0) {
            *places.entry(client.table.get(entry)).or_default() += 1;
        }
    }
    assert_eq!(places.len() as u64, pages.count(), "no page is lost");
    for (address, times) in places {
        assert!(times == 1 && pages.page_at(address).is_some(), "{address:#x} is in {times} places");
    }
}

fn pattern(client: usize, page: u64, version: u32) -> Vec<u8> {
    (0..PAGE_SIZE)
        .map(|at| {
            (at as u32).wrapping_mul(31).wrapping_add(version * 7 + client as u32 * 3 + page as u32) as u8
        })
        .collect()
}

#[derive(Clone, Debug)]
enum Act {
    Store(usize, u64),
    Load(usize, u64),
    Invalidate(usize, u64),
    /// Both clients do something, interleaved by these choices.
    Both(Kind, u64, Kind, u64, Vec<bool>),
    /// A client dies when its chain has executed so many entries.
    Crash(usize, Kind, u64, u32),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let kind = prop_oneof![
        Just(Kind::UnmappedStore),
        Just(Kind::Invalidate),
        Just(Kind::MappedStore),
        Just(Kind::Load)
    ];
    let act = prop_oneof![
        5 => (0usize..2, 0u64..6).prop_map(|(client, page)| Act::Store(client, page)),
        3 => (0usize..2, 0u64..6).prop_map(|(client, page)| Act::Load(client, page)),
        3 => (0usize..2, 0u64..6).prop_map(|(client, page)| Act::Invalidate(client, page)),
        4 => (kind.clone(), 0u64..6, kind.clone(), 0u64..6, proptest::collection::vec(any::<bool>(), 24))
            .prop_map(|(a, at, b, bt, order)| Act::Both(a, at, b, bt, order)),
        1 => (0usize..2, kind, 0u64..6, 0u32..11).prop_map(|(client, kind, page, steps)| Act::Crash(client, kind, page, steps)),
    ];
    proptest::collection::vec(act, 1..40)
}

/// The system and the model of it.
struct Bench {
    pages: Pages,
    clients: Vec<One>,
    /// What each client's pages hold.
    held: Vec<HashMap<u64, Vec<u8>>>,
    version: u32,
}

impl Bench {
    fn new(count: u64) -> Self {
        let pages = Pages::new(count).expect("memory");
        let clients = (0..2).map(|client| One::new(&pages, client, 6)).collect();
        Self { pages, clients, held: vec![HashMap::new(), HashMap::new()], version: 0 }
    }

    fn free(&self) -> u64 {
        self.pages.count() - self.held.iter().map(HashMap::len).sum::<usize>() as u64
    }

    /// The kind that an honest client sends for what it wants; `None`: it does not send it.
    fn honest(&self, client: usize, kind: Kind, page: u64) -> bool {
        self.held[client].contains_key(&page) == (kind != Kind::UnmappedStore)
    }

    /// Sends what an honest client sends, and notes what must come of it.
    fn begin(&mut self, client: usize, kind: Kind, page: u64) -> Vec<u8> {
        self.version += 1;
        let bytes = pattern(client, page, self.version);
        let payload: &[u8] = if kind.brings() { &bytes } else { &[] };
        self.clients[client].send(kind, page, self.version, payload).expect("it is taken");
        bytes
    }

    fn note(&mut self, client: usize, kind: Kind, page: u64, bytes: Vec<u8>, tag: u32) {
        let told = self.clients[client].told.pop().expect("the client was told");
        assert_eq!(told.0, tag);
        match kind {
            Kind::Load => assert!(told.1 == self.held[client][&page], "a load brings what was stored last"),
            Kind::Invalidate => drop(self.held[client].remove(&page)),
            Kind::MappedStore | Kind::UnmappedStore => drop(self.held[client].insert(page, bytes)),
        }
        assert!(kind == Kind::Load || told.1.is_empty());
    }

    /// The client is gone, and another is there in its place.
    fn replace(&mut self, client: usize) {
        self.clients[client] = One::new(&self.pages, client as u32, 6);
        self.held[client].clear();
        self.set_right();
    }

    fn set_right(&mut self) {
        let tables: Vec<&Table> = self.clients.iter().map(|client| &client.table).collect();
        let found = self.pages.set_right(&tables);
        assert_eq!((found.wrong, found.free), (0, self.free()));
    }

    fn alone(&mut self, client: usize, kind: Kind, page: u64) {
        if !self.honest(client, kind, page) {
            return;
        }
        let had_room = self.free() > 0;
        let bytes = self.begin(client, kind, page);
        let tag = self.version;
        match self.clients[client].run(kind) {
            Ok(()) => self.note(client, kind, page, bytes, tag),
            Err(fault) => {
                // Only the empty queue faults, before anything is mapped. The node sets the queue right, and the client connects again.
                assert!(kind == Kind::UnmappedStore && !had_room, "{fault}");
                assert!(matches!(
                    fault.kind,
                    FaultKind::Range(NotInView::Range { key: POOL, address: 0, .. })
                ));
                assert_eq!(self.clients[client].table.get(page), 0);
                self.set_right();
                let fresh = queue(&self.pages, &self.clients[client].table, kind, client as u32);
                self.clients[client].queues[kind.index()] = (fresh, 0);
            }
        }
    }

    fn act(&mut self, act: Act) {
        match act {
            Act::Store(client, page) => {
                let kind = if self.held[client].contains_key(&page) {
                    Kind::MappedStore
                } else {
                    Kind::UnmappedStore
                };
                self.alone(client, kind, page);
            }
            Act::Load(client, page) => self.alone(client, Kind::Load, page),
            Act::Invalidate(client, page) => self.alone(client, Kind::Invalidate, page),
            Act::Both(first, first_page, second, second_page, order) => {
                let both = [(first, first_page), (second, second_page)];
                // An allocation beside an empty queue faults or not, as the order is; that is `Store`'s to see.
                if self.free() < 2
                    || (0..2).any(|client| !self.honest(client, both[client].0, both[client].1))
                {
                    return;
                }
                let begun: Vec<_> = (0..2)
                    .map(|client| (self.begin(client, both[client].0, both[client].1), self.version))
                    .collect();
                for client in order.iter().map(|turn| usize::from(*turn)) {
                    self.clients[client].step(both[client].0).expect("no fault");
                }
                for (client, (bytes, tag)) in begun.into_iter().enumerate() {
                    let (kind, page) = both[client];
                    self.clients[client].run(kind).expect("no fault");
                    self.note(client, kind, page, bytes, tag);
                }
            }
            Act::Crash(client, kind, page, steps) => {
                if self.honest(client, kind, page) {
                    self.begin(client, kind, page);
                    for _ in 0..steps {
                        // A fault is as good a crash as any.
                        if self.clients[client].step(kind).is_err() {
                            break;
                        }
                    }
                }
                self.replace(client);
            }
        }
        consistent(&self.pages, &self.clients);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn chains_do_what_the_model_does(count in 1u64..12, acts in acts()) {
        let mut bench = Bench::new(count);
        for act in acts {
            bench.act(act);
        }
        // All of it is still there.
        for client in 0..2 {
            let pages: Vec<u64> = bench.held[client].keys().copied().collect();
            for page in pages {
                bench.alone(client, Kind::Load, page);
            }
        }
    }
}

/// Every interleaving of two chains, entry by entry.
fn interleavings(first: (Kind, u64), second: (Kind, u64), count: u64, prepare: impl Fn(&mut Bench)) {
    let lens = [first, second].map(|(kind, _)| if kind.changes_queue() { 10 } else { 6 });
    for pattern in 0u32..1 << (lens[0] + lens[1]) {
        if pattern.count_ones() != lens[1] {
            continue;
        }
        let mut bench = Bench::new(count);
        prepare(&mut bench);
        let order = (0..lens[0] + lens[1]).map(|bit| pattern >> bit & 1 == 1).collect();
        bench.act(Act::Both(first.0, first.1, second.0, second.1, order));
    }
}

#[test]
fn an_allocation_beside_another_or_a_free_that_runs_in_two_parts_is_right() {
    // 66 of the 184,756 orders of ten and ten entries: all of them take minutes. Proptest above draws others.
    for (second, prepared) in [(Kind::UnmappedStore, false), (Kind::Invalidate, true)] {
        for from in 0..=10usize {
            for until in from..=10usize {
                let mut bench = Bench::new(4);
                if prepared {
                    bench.alone(1, Kind::UnmappedStore, 2);
                }
                // The second client runs in two halves, each between two entries of the first.
                let mut order = vec![false; from];
                order.extend(vec![true; 5]);
                order.extend(vec![false; until - from]);
                order.extend(vec![true; 5]);
                bench.act(Act::Both(Kind::UnmappedStore, 1, second, 2, order));
            }
        }
    }
}

#[test]
fn every_interleaving_of_a_load_and_an_overwriting_store_is_right() {
    interleavings((Kind::Load, 1), (Kind::MappedStore, 1), 4, |bench| {
        bench.alone(0, Kind::UnmappedStore, 1);
        bench.alone(1, Kind::UnmappedStore, 1);
    });
}

/// What a hostile client's messages do to others: nothing. Whatever they are, the other client's pages stay as they are, no page is in two places, and
/// setting right finds every page again.
fn hostile(messages: Vec<(usize, Vec<u8>, u64, bool)>) {
    let mut bench = Bench::new(8);
    bench.alone(0, Kind::UnmappedStore, 1);
    bench.alone(0, Kind::UnmappedStore, 4);
    bench.alone(1, Kind::UnmappedStore, 0);
    let before = bench.held[0].clone();
    for (kind, noise, page, with_indices) in messages {
        let kind = Kind::ALL[kind];
        let shape = shape(kind);
        let mut message = vec![0; shape.len()];
        let (chain, number) = &mut bench.clients[1].queues[kind.index()];
        put_message(kind, &shape, *number, Arguments { page, tag: 0, to: (7, 0) }, &mut message);
        let argument = shape.argument(0);
        // Noise over the arguments, and over the indices, too.
        let reach = if with_indices { shape.payload().start } else { argument.end };
        for (byte, noise) in message[..reach].iter_mut().zip(&noise) {
            *byte ^= noise;
        }
        message.truncate(message.len() - usize::from(noise.first().copied().unwrap_or(0) % 3));
        if !chain.is_ready() {
            continue;
        }
        *number += 1;
        let taken = chain.take(&message);
        if taken.is_err() || bench.clients[1].run(kind).is_err() {
            // Its connection broke; it connects again.
            let fresh = queue(&bench.pages, &bench.clients[1].table, kind, 1);
            bench.clients[1].queues[kind.index()] = (fresh, 0);
        }
        let mut seen = HashSet::new();
        for client in &bench.clients {
            for entry in 0..client.table.pages {
                let address = client.table.get(entry);
                assert!(address == 0 || seen.insert(address), "a page is mapped twice");
            }
        }
        assert!(
            bench.pages.queued().iter().all(|address| seen.insert(*address)),
            "a free page is mapped, or twice free"
        );
    }
    let tables: Vec<&Table> = bench.clients.iter().map(|client| &client.table).collect();
    let found = bench.pages.set_right(&tables);
    assert_eq!((found.wrong, found.mapped + found.free), (0, 8));
    consistent(&bench.pages, &bench.clients);
    bench.held[0] = before;
    for page in [1, 4] {
        bench.alone(0, Kind::Load, page);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn hostile_messages_hurt_nobody_else(
        messages in proptest::collection::vec(
            (0usize..4, proptest::collection::vec(prop_oneof![3 => Just(0u8), 1 => any::<u8>()], 0..40), 0u64..9, any::<bool>()),
            1..40,
        ),
    ) {
        hostile(messages);
    }
}

#[test]
fn an_entry_that_is_mapped_over_loses_its_page_to_nobody() {
    let mut bench = Bench::new(4);
    bench.alone(0, Kind::UnmappedStore, 1);
    let first = bench.clients[0].table.get(1);
    bench.clients[0].send(Kind::UnmappedStore, 1, 9, &[1; PAGE_SIZE]).expect("taken");
    bench.clients[0].run(Kind::UnmappedStore).expect("no fault");
    assert_ne!(bench.clients[0].table.get(1), first);
    assert!(!bench.pages.queued().contains(&first));
    bench.set_right();
    assert!(bench.pages.queued().contains(&first));
}
