//! Marks with several writers at once, whose futures are polled in any order, against a model that knows which zones must be marked on disk.
//!
//! The model: a zone's mark must survive a power loss now if a write to the zone is under way, or has ended and was not synced since. After every
//! step the test asks the store of marks which states a power loss may leave.

use super::marks::Marks;
use super::memory_marks::MemoryMarks;
use cuttlefs_common::world::{Random, SeededRandom};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

const ZONES: u64 = 6;

/// Returns a number below the bound: a random one, or in `every_order` each of them in turn.
type Choose<'a> = dyn FnMut(usize) -> usize + 'a;

#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[derive(Clone, Debug)]
enum What {
    Begin(BTreeSet<u64>),
    Sweep,
    Sync,
}

/// A call of the marks that is under way.
struct Call {
    what: What,
    /// Resolves to whether the call succeeded, and for a sync to the number of writes that had ended when it began.
    future: Pin<Box<dyn Future<Output = (bool, u64)>>>,
    woken: Arc<Woken>,
}

struct World {
    store: Arc<MemoryMarks>,
    marks: Rc<Marks>,
    calls: Vec<Call>,
    /// The zones of each write that is under way.
    writes: Vec<BTreeSet<u64>>,
    /// How many writes have ended, and how many of these a sync covers.
    ended: Rc<Cell<u64>>,
    synced: u64,
    last_end: BTreeMap<u64, u64>,
}

impl World {
    fn new() -> Self {
        let store = Arc::new(MemoryMarks::default());
        store.be_late(true);
        let marks = Rc::new(Marks::new([], store.clone()));
        Self {
            store,
            marks,
            calls: Vec::new(),
            writes: Vec::new(),
            ended: Rc::default(),
            synced: 0,
            last_end: BTreeMap::new(),
        }
    }

    fn call(&mut self, what: What) {
        let (marks, made, ended) = (self.marks.clone(), what.clone(), self.ended.clone());
        let future = Box::pin(async move {
            match made {
                What::Begin(zones) => (marks.begin(&zones).await.is_ok(), 0),
                What::Sweep => (marks.sweep(false).is_ok(), 0),
                What::Sync => {
                    let (covered, ended) = (marks.before_sync(), ended.get());
                    // Other calls go on while the data is synced.
                    futures_lite::future::yield_now().await;
                    marks.after_sync(covered);
                    (true, ended)
                }
            }
        });
        let woken = Arc::new(Woken(AtomicBool::new(true)));
        self.calls.push(Call { what, future, woken });
    }

    fn begin(&mut self, zones: impl IntoIterator<Item = u64>) {
        self.call(What::Begin(zones.into_iter().collect()));
    }

    fn sync(&mut self) {
        self.call(What::Sync);
    }

    fn runnable(&self) -> Vec<usize> {
        let is_woken = |index: &usize| self.calls[*index].woken.0.load(Ordering::SeqCst);
        (0..self.calls.len()).filter(is_woken).collect()
    }

    /// Polls a call that was woken, or completes a flush of the store. `false` if there is neither.
    fn step(&mut self, choose: &mut Choose<'_>) -> bool {
        let runnable = self.runnable();
        let ways = runnable.len() + usize::from(self.store.waiting() > 0);
        if ways == 0 {
            return false;
        }
        match runnable.get(choose(ways)) {
            Some(call) => self.poll(*call),
            None => drop(self.store.step()),
        }
        self.check();
        true
    }

    fn poll(&mut self, index: usize) {
        let call = &mut self.calls[index];
        call.woken.0.store(false, Ordering::SeqCst);
        let waker = Waker::from(call.woken.clone());
        let Poll::Ready((is_well, covered)) = call.future.as_mut().poll(&mut Context::from_waker(&waker))
        else {
            return;
        };
        let call = self.calls.remove(index);
        match call.what {
            What::Begin(zones) if is_well => self.writes.push(zones),
            What::Sync if is_well => self.synced = self.synced.max(covered),
            _ => {}
        }
    }

    fn end(&mut self, index: usize) {
        let zones = self.writes.remove(index);
        self.ended.set(self.ended.get() + 1);
        self.last_end.extend(zones.iter().map(|zone| (*zone, self.ended.get())));
        self.marks.end(&zones);
    }

    /// Takes steps, in any order, until no call is under way.
    fn settle(&mut self, choose: &mut Choose<'_>) {
        while self.step(choose) {}
        assert!(self.calls.is_empty(), "nothing will wake {:?}", self.calls[0].what);
    }

    /// Ends all writes, syncs, and sweeps as often as it takes to clear every mark.
    fn idle(&mut self, choose: &mut Choose<'_>) {
        self.settle(choose);
        while !self.writes.is_empty() {
            self.end(0);
        }
        self.sync();
        self.settle(choose);
        for _ in 0..3 {
            self.call(What::Sweep);
            self.settle(choose);
        }
    }

    /// Whether the zone is marked in every state that a power loss may leave, and whether it is in at least one of them.
    fn on_disk(&self, zone: u64) -> (bool, bool) {
        let states = self.store.possible();
        let is_marked = |marked: &BTreeSet<u64>| marked.contains(&zone);
        (states.iter().all(is_marked), states.iter().any(is_marked))
    }

    fn check(&self) {
        for zone in 0..ZONES {
            let is_written = self.writes.iter().any(|zones| zones.contains(&zone));
            let is_unsynced = self.last_end.get(&zone).is_some_and(|end| *end > self.synced);
            if is_written || is_unsynced {
                assert!(self.on_disk(zone).0, "zone {zone} is written and not surely marked");
            }
        }
    }

    /// Brings all calls to their ends, and checks that no mark stays.
    fn finish(mut self, choose: &mut Choose<'_>) {
        self.store.fail(false);
        self.idle(choose);
        assert_eq!(self.marks.figures().0, 0, "nothing is written, and something stays marked");
        // The mark of zone 0 flushes the removals of all other marks.
        let random = SeededRandom::new(0);
        self.begin([0]);
        self.settle(choose);
        self.store.crash(&random);
        for zone in 1..ZONES {
            assert!(!self.on_disk(zone).1, "zone {zone} stays marked on disk");
        }
    }
}

/// Begins and ends random writes, syncs and sweeps, with failures and dropped futures for some seeds.
fn walk(seed: u64) {
    let random = SeededRandom::new(seed);
    let mut choose = |bound: usize| (random.next_u64() % bound as u64) as usize;
    let mut world = World::new();
    let (may_fail, may_drop) = (seed.is_multiple_of(3), seed.is_multiple_of(4));
    for _ in 0..60 {
        match choose(12) {
            0..5 if world.calls.len() + world.writes.len() < 6 => {
                // Mostly writes to the same few zones.
                let zones: Vec<u64> = (0..=choose(2)).map(|_| [0, 0, 0, 1, 3, 4][choose(6)]).collect();
                world.begin(zones);
            }
            5..8 if !world.writes.is_empty() => {
                let index = choose(world.writes.len());
                world.end(index);
            }
            8 => world.call(What::Sweep),
            9 => world.sync(),
            10 if choose(2) == 0 => {
                world.store.fail(false);
                world.idle(&mut choose);
            }
            11 if may_drop && choose(8) == 0 && !world.calls.is_empty() => {
                let index = choose(world.calls.len());
                drop(world.calls.remove(index));
            }
            11 if may_fail => {
                let fails = choose(2) == 0;
                world.store.fail(fails);
            }
            _ => {}
        }
        for _ in 0..choose(5) {
            world.step(&mut choose);
        }
        world.check();
    }
    world.finish(&mut choose);
}

#[test]
fn whatever_the_order_a_zone_that_is_written_is_surely_marked() {
    let seeds = std::env::var("CUTTLEFS_SIM_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1500);
    for seed in 0..seeds {
        let walked = std::panic::catch_unwind(|| walk(seed));
        if let Err(panic) = walked {
            println!("it was seed {seed}");
            std::panic::resume_unwind(panic);
        }
    }
}

/// Runs `scenario` with every sequence of choices. Returns the number of runs.
fn every_order(scenario: impl Fn(&mut Choose<'_>)) -> usize {
    // The choices of the run: each choice, and the number of possible ones.
    let mut path: Vec<(usize, usize)> = Vec::new();
    for runs in 1.. {
        let mut at = 0;
        scenario(&mut |bound| {
            if at == path.len() {
                path.push((0, bound));
            }
            at += 1;
            assert_eq!(path[at - 1].1, bound, "a scenario depends on its choices only");
            path[at - 1].0
        });
        while path.last().is_some_and(|(choice, bound)| choice + 1 == *bound) {
            path.pop();
        }
        match path.last_mut() {
            Some((choice, _)) => *choice += 1,
            None => return runs,
        }
    }
    unreachable!("each run has one before it");
}

/// Found on real mounts: a writer whose mark another writer had made durable left an entry behind that outlived the mark.
#[test]
fn regression_several_begin_in_one_zone_then_it_is_idle_then_another_is_marked() {
    let runs = every_order(|choose| {
        let mut world = World::new();
        world.begin([0]);
        world.begin([0]);
        world.settle(choose);
        assert_eq!(world.writes.len(), 2);
        let mut in_order = |_: usize| 0;
        world.idle(&mut in_order);
        world.begin([1]);
        world.settle(&mut in_order);
        world.finish(&mut in_order);
    });
    println!("{runs} orders of two");
    assert!(runs > 5);
}

#[test]
fn in_every_order_of_three_that_begin_while_one_sweeps_the_marks_are_there() {
    let runs = every_order(|choose| {
        let mut world = World::new();
        let mut in_order = |_: usize| 0;
        world.begin([0]);
        world.settle(&mut in_order);
        world.end(0);
        world.sync();
        world.settle(&mut in_order);
        world.call(What::Sweep);
        world.settle(&mut in_order);
        // This sweep clears the mark: before, between or after the two writes begin.
        world.call(What::Sweep);
        world.begin([0]);
        world.begin([0, 1]);
        world.settle(choose);
        assert_eq!(world.writes.len(), 2);
        world.finish(&mut in_order);
    });
    println!("{runs} orders of a sweep and two");
    assert!(runs > 20);
}
