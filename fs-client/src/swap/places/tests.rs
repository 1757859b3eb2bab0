//! A program as the swapper sees it, without a kernel: its pages are touched, leave and come back.

use super::super::process::tests::{nothing, process};
use super::super::process::{Process, State};
use super::super::store::tests::Map;
use super::super::wire::PAGE;
use super::*;
use cuttlefs_common::odrp::{JoinOptions, MemoryNode, NodeOptions, RemotePages};
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions};
use cuttlefs_common::rdma::{Device, Endpoint};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pages of a program, those that it may have, those that are on their way out, and those that leave at once.
const PAGES: u64 = 300;
const RESIDENT: usize = 60;
const LEFT: usize = 20;
const TAKEN: usize = 32;
const SAVED: usize = 16;
/// The most pages that are at the node only, behind a save.
const OUT: u64 = PAGES - (RESIDENT - TAKEN + LEFT + 1 - SAVED) as u64;

fn bytes(page: u64, version: u64) -> Bytes {
    let mut bytes = [0x5a; PAGE];
    bytes[..8].copy_from_slice(&page.to_le_bytes());
    bytes[8..16].copy_from_slice(&version.to_le_bytes());
    bytes
}

/// A program whose pages each have a number and a version.
struct Program<R> {
    store: Store<R>,
    processes: BTreeMap<u64, Process>,
    versions: Vec<u64>,
    random: u64,
}

impl<R: Remote> Program<R> {
    fn new(remote: R, slots: u64) -> Self {
        let processes = BTreeMap::from([(1, process())]);
        Self { store: Store::new(remote, slots), processes, versions: vec![0; PAGES as usize], random: 7 }
    }

    fn own(&mut self) -> &mut Process {
        self.processes.get_mut(&1).expect("it is there")
    }

    /// Touches a page; what it finds must be what was written last.
    fn touch(&mut self, page: u64, writes: bool) -> Result<(), StoreError> {
        if self.own().resident() >= RESIDENT {
            self.leave()?;
        }
        let (at, wanted) = (page * PAGE as u64, bytes(page, self.versions[page as usize]));
        let slot = match self.own().get(at).cloned() {
            Some(State::Stored(slot)) => {
                assert_eq!(*self.store.load(slot)?, wanted, "page {page}");
                Some(Some(slot))
            }
            Some(State::Left(found, slot)) => {
                assert_eq!(*found, wanted, "page {page}");
                Some(slot)
            }
            Some(State::Resident(_) | State::Leaving(_)) => None,
            None => Some(None),
        };
        if let Some(slot) = slot {
            self.own().set(at, State::Resident(slot));
        }
        self.versions[page as usize] += u64::from(writes);
        Ok(())
    }

    fn leave(&mut self) -> Result<(), StoreError> {
        for at in self.own().oldest(TAKEN) {
            let page = at / PAGE as u64;
            let found = Arc::new(bytes(page, self.versions[page as usize]));
            let Some(State::Leaving(slot)) = self.own().get(at).cloned() else {
                panic!("page {page} leaves")
            };
            self.own().set(at, State::Left(found, slot));
        }
        while self.own().left() > LEFT {
            let oldest = self.own().longest_left(SAVED);
            let pages: Vec<_> = oldest.iter().map(|(_, bytes, slot)| (*slot, &**bytes)).collect();
            let slots = save(&mut self.store, &mut self.processes, &pages)?;
            for ((at, ..), slot) in oldest.iter().zip(slots) {
                self.own().set(*at, State::Stored(slot));
            }
        }
        self.store.tidy()
    }

    fn draw(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % below
    }

    /// Goes through all pages, and then touches some at random and some in order; writes to one of `every`.
    fn run(&mut self, every: u64) -> Result<(), StoreError> {
        (0..PAGES).try_for_each(|page| self.touch(page, true))?;
        for round in 0..4 * PAGES {
            let writes = self.draw(every) == 0;
            let page = if round % 2 == 0 { self.draw(PAGES) } else { round % PAGES };
            self.touch(page, writes)?;
        }
        (0..PAGES).try_for_each(|page| self.touch(page, false))
    }

    /// The program ends.
    fn end(mut self) -> Store<R> {
        for process in self.processes.values_mut() {
            process.end(&mut self.store);
        }
        self.store.tidy().expect("given back");
        self.store
    }
}

#[test]
fn a_program_goes_on_as_long_as_what_is_out_fits() {
    for every in [1, 2, 1000] {
        let mut program = Program::new(Map::default(), OUT);
        program.run(every).expect("it fits");
        let figures = program.store.figures();
        // Each page moved is one request: a place that is passed on costs none.
        assert_eq!((figures.most, figures.forgotten), (OUT, 0), "{figures:?}");
        assert!(figures.passed_on > PAGES, "{figures:?}");
        assert!(figures.requests_a_page() <= 1.0, "{figures:?}");
    }
    let full = Program::new(Map::default(), OUT - SAVED as u64 - 1).run(2).expect_err("too few").to_string();
    assert!(full.contains("takes no more pages"), "{full}");
}

#[test]
fn places_are_kept_while_there_are_plenty() {
    let mut program = Program::new(Map::default(), PAGES);
    program.run(1000).expect("it fits");
    let figures = program.store.figures();
    assert!(figures.passed_on == 0 && figures.unchanged > figures.stores, "{figures:?}");
    // With few, some are still left as they were.
    let mut program = Program::new(Map::default(), (OUT + PAGES) / 2);
    program.run(1000).expect("it fits");
    let few = program.store.figures();
    assert!(few.passed_on > 0 && few.unchanged > 0 && few.stores > figures.stores, "{few:?}");
}

#[test]
fn a_place_is_given_up_when_all_who_count_on_it_are_here() {
    let mut store = Store::new(Map::default(), 2);
    let (mut parent, page) = (process(), PAGE as u64);
    let slots = store.save(&[(None, &bytes(0, 0)), (None, &bytes(1, 0))]).expect("stored");
    parent.set(0, State::Stored(slots[0]));
    parent.set(page, State::Stored(slots[1]));
    let child = parent.fork(nothing(), &mut store);
    let mut processes = BTreeMap::from([(1, parent), (2, child)]);
    let set = |processes: &mut BTreeMap<u64, Process>, id, page, state| {
        processes.get_mut(&id).expect("there").set(page, state);
    };
    set(&mut processes, 1, 0, State::Resident(Some(slots[0])));
    let leaves = bytes(9, 0);
    save(&mut store, &mut processes, &[(None, &leaves)]).expect_err("the child has it at the node only");
    assert_eq!(*store.load(slots[0]).expect("loaded"), bytes(0, 0));
    let keeps = matches!(processes[&1].get(0), Some(State::Resident(Some(_))));
    assert!(keeps, "nobody has anything of it if the parent gives it up");
    // In the swapper, on its way out; but not if it is one of those that are saved.
    set(&mut processes, 2, 0, State::Left(Arc::new(bytes(0, 0)), Some(slots[0])));
    let both = [(Some(slots[0]), &bytes(0, 0)), (None, &leaves)];
    save(&mut store, &mut processes, &both).expect_err("it is saved itself");
    let slot = save(&mut store, &mut processes, &[(None, &leaves)]).expect("a place")[0];
    assert_eq!(slot, slots[0]);
    assert!(matches!(processes[&1].get(0), Some(State::Resident(None))));
    assert!(matches!(processes[&2].get(0), Some(State::Left(_, None))));
    assert!(matches!(processes[&2].get(page), Some(State::Stored(slot)) if *slot == slots[1]));
    assert_eq!((*store.load(slot).expect("loaded"), store.figures().passed_on), (leaves, 1));
}

#[test]
fn a_node_serves_a_program_with_what_is_out_and_gets_all_back() {
    let directory = tempfile::tempdir().expect("a directory");
    let device: Arc<dyn Device> = SoftDevice::new(SoftOptions::default());
    let all = NodeOptions::new(PAGES);
    // What is bounded: the swap space, the pages of the node, the budget there.
    let bounds = [
        (all.clone(), OUT),
        (NodeOptions { budget: PAGES, ..NodeOptions::new(OUT) }, PAGES),
        (NodeOptions { budget: OUT, ..all }, PAGES),
    ];
    for (number, (options, slots)) in bounds.into_iter().enumerate() {
        let at = Endpoint::Unix(directory.path().join(number.to_string()));
        let node = MemoryNode::start(&device, &at, options.clone()).expect("a node");
        let remote = RemotePages::join(&device, &node.endpoint(), JoinOptions { pages: slots });
        let remote = remote.expect("joined");
        let mut program = Program::new(remote, slots);
        program.run(2).expect("it fits");
        let figures = program.store.figures();
        // The node counts a chain when it has told the client of its end.
        let deadline = Instant::now() + Duration::from_secs(30);
        while node.figures().chains[0] < figures.loads && Instant::now() < deadline {
            std::thread::yield_now();
        }
        let at_node = node.figures();
        assert!(figures.passed_on > PAGES, "{figures:?}");
        assert_eq!((at_node.free, figures.forgotten), (options.pages - OUT, 0), "{figures:?} {at_node:?}");
        // What the node's RNIC did: a chain for each page moved, and those of the one save that found it full.
        let [loads, mapped, unmapped, invalidated] = at_node.chains;
        assert_eq!((loads, invalidated, unmapped), (figures.loads, 0, OUT), "{at_node:?}");
        assert!(mapped + unmapped <= figures.stores + SAVED as u64, "{figures:?} {at_node:?}");
        assert!(at_node.faults <= 1, "it is asked once: {at_node:?}");
        let store = program.end();
        assert_eq!(store.figures().forgotten, OUT);
        assert_eq!(node.figures().free, options.pages);
    }
}
