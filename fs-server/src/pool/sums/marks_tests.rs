//! Marks with several writers at once, polled in any order, against a model that knows which regions must be marked on disk.
//!
//! The model: a region's bit must survive a power loss at this moment if a write to it is under way, or has ended and was not
//! synced since. What a power loss may leave is asked of the simulated disk after every step.

use super::intent;
use super::layout::{REGION_PAGES, SumLayout};
use super::marks::Marks;
use crate::pool::disk::{Disk, IoKind};
use crate::pool::simdisk::{SimDisk, SimFault, SimMode};
use cuttlefs_common::ids::PAGE_SIZE;
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::world::{Random, SeededRandom};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// Two data files, so two intent blocks; three regions each.
const FILES: [u64; 2] = [3 * REGION_PAGES, 3 * REGION_PAGES];
const REGIONS: u64 = 6;

/// Draws a number below the bound: from a seed, or each in turn.
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

/// Something under way.
struct Call {
    what: What,
    /// Resolves to whether it did well, and, of a sync, to the number of writes that had ended when it began.
    future: Pin<Box<dyn Future<Output = (bool, u64)>>>,
    woken: Arc<Woken>,
}

struct World {
    layout: SumLayout,
    disk: SimDisk,
    marks: Rc<Marks>,
    calls: Vec<Call>,
    /// Writes under way: their regions.
    writes: Vec<BTreeSet<u64>>,
    /// Writes that ended, and how many of them a sync covers.
    ended: Rc<Cell<u64>>,
    synced: u64,
    last_end: BTreeMap<u64, u64>,
    /// A call was dropped, which may have written.
    has_dropped: bool,
}

impl World {
    fn new(seed: u64) -> Self {
        let layout = SumLayout::new(FILES);
        let frames = Arc::new(SharedMemory::new("frames", PAGE_SIZE).expect("memfd"));
        let disk = SimDisk::seeded(layout.all_pages(), frames, seed);
        disk.format(&layout);
        disk.set_mode(SimMode::Deferred);
        let marks = Rc::new(Marks::new(&layout));
        Self {
            layout,
            disk,
            marks,
            calls: Vec::new(),
            writes: Vec::new(),
            ended: Rc::default(),
            synced: 0,
            last_end: BTreeMap::new(),
            has_dropped: false,
        }
    }

    fn call(&mut self, what: What) {
        let (marks, disk, made, ended) =
            (self.marks.clone(), self.disk.clone(), what.clone(), self.ended.clone());
        let future = Box::pin(async move {
            match made {
                What::Begin(regions) => (marks.begin(&disk, &regions).await.is_ok(), 0),
                What::Sweep => (marks.sweep(&disk, false).await.is_ok(), 0),
                What::Sync => {
                    let (covered, ended) = (marks.before_sync(), ended.get());
                    let is_well = disk.sync().await.is_ok();
                    if is_well {
                        marks.after_sync(covered);
                    }
                    (is_well, ended)
                }
            }
        });
        let woken = Arc::new(Woken(AtomicBool::new(true)));
        self.calls.push(Call { what, future, woken });
    }

    fn begin(&mut self, regions: impl IntoIterator<Item = u64>) {
        self.call(What::Begin(regions.into_iter().collect()));
    }

    fn sync(&mut self) {
        self.call(What::Sync);
    }

    fn runnable(&self) -> Vec<usize> {
        let is_woken = |index: &usize| self.calls[*index].woken.0.load(Ordering::SeqCst);
        (0..self.calls.len()).filter(is_woken).collect()
    }

    /// Polls one call that was woken, or does one thing of the disk; `false` if there is neither.
    fn step(&mut self, choose: &mut Choose<'_>) -> bool {
        let runnable = self.runnable();
        let ways = runnable.len() + usize::from(self.disk.pending() > 0);
        if ways == 0 {
            return false;
        }
        match runnable.get(choose(ways)) {
            Some(call) => self.poll(*call),
            None => drop(self.disk.step()),
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
            What::Begin(regions) if is_well => self.writes.push(regions),
            What::Sync if is_well => self.synced = self.synced.max(covered),
            _ => {}
        }
    }

    fn end(&mut self, index: usize) {
        let regions = self.writes.remove(index);
        self.ended.set(self.ended.get() + 1);
        self.last_end.extend(regions.iter().map(|region| (*region, self.ended.get())));
        self.marks.end(&regions);
    }

    /// Until nothing is under way; in any order.
    fn settle(&mut self, choose: &mut Choose<'_>) {
        while self.step(choose) {}
        assert!(self.calls.is_empty(), "nothing will wake {:?}", self.calls[0].what);
    }

    /// Nothing is written for a while.
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

    /// Whether the bit is set, or not, whatever a power loss leaves: in one copy surely set, or in no copy perhaps.
    fn on_disk(&self, region: u64) -> (bool, bool) {
        let block = self
            .layout
            .intent_blocks()
            .find(|block| (block.first_region..block.first_region + block.regions).contains(&region))
            .expect("a block of each region");
        let index = (region - block.first_region) as usize;
        let copies = block.copies.map(|page| {
            let set = |bytes: Vec<u8>| {
                let (bits, damaged) =
                    intent::join([Some(&bytes[..]), None], block.number).expect("whole sectors");
                assert_eq!(damaged, intent::SECTORS_PER_BLOCK, "the other copy is not looked at");
                intent::bit(&bits, index)
            };
            let found: Vec<bool> = self.disk.possible(page).into_iter().map(set).collect();
            (found.iter().all(|set| *set), found.iter().any(|set| *set))
        });
        (copies[0].0 || copies[1].0, copies[0].1 || copies[1].1)
    }

    fn check(&self) {
        for region in 0..REGIONS {
            let is_written = self.writes.iter().any(|regions| regions.contains(&region));
            let is_unsynced = self.last_end.get(&region).is_some_and(|end| *end > self.synced);
            if is_written || is_unsynced {
                assert!(self.on_disk(region).0, "region {region} is written and not surely marked");
            }
        }
    }

    /// All that was begun comes to its end, and leaves nothing behind.
    fn finish(mut self, choose: &mut Choose<'_>) {
        self.disk.clear_faults();
        if self.has_dropped {
            while self.step(choose) {}
            return;
        }
        self.idle(choose);
        assert_eq!(self.marks.figures().0, 0, "nothing is written, and something stays marked");
        self.sync();
        self.settle(choose);
        for region in 0..REGIONS {
            assert!(!self.on_disk(region).1, "region {region} stays marked on disk");
        }
    }
}

/// One run of a life of marks.
fn walk(seed: u64) {
    let random = SeededRandom::new(seed);
    let mut choose = |bound: usize| (random.next_u64() % bound as u64) as usize;
    let mut world = World::new(seed);
    let (may_fail, may_drop) = (seed.is_multiple_of(3), seed.is_multiple_of(4));
    for _ in 0..60 {
        match choose(12) {
            0..5 if world.calls.len() + world.writes.len() < 6 => {
                // Mostly of the same few regions.
                let regions: Vec<u64> = (0..=choose(2)).map(|_| [0, 0, 0, 1, 3, 4][choose(6)]).collect();
                world.begin(regions);
            }
            5..8 if !world.writes.is_empty() => {
                let index = choose(world.writes.len());
                world.end(index);
            }
            8 => world.call(What::Sweep),
            9 => world.sync(),
            10 if choose(2) == 0 && !world.has_dropped => world.idle(&mut choose),
            11 if may_drop && choose(8) == 0 && !world.calls.is_empty() => {
                world.has_dropped = true;
                let index = choose(world.calls.len());
                drop(world.calls.remove(index));
            }
            11 if may_fail => {
                let pages = world.layout.pages()..world.layout.all_pages();
                world.disk.inject(SimFault { pages, kind: Some(IoKind::Write), errno: libc::EIO, times: 1 });
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
fn whatever_the_order_a_region_that_is_written_is_surely_marked() {
    let seeds = std::env::var("CUTTLEFS_SIM_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1500);
    for seed in 0..seeds {
        let walked = std::panic::catch_unwind(|| walk(seed));
        if let Err(panic) = walked {
            println!("it was seed {seed}");
            std::panic::resume_unwind(panic);
        }
    }
}

/// Runs `scenario` with every sequence of choices; how many there were.
fn every_order(scenario: impl Fn(&mut Choose<'_>)) -> usize {
    // Of the run before: each choice, and among how many.
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

/// Found on real mounts: who found its mark durable, for another writer had written it, left a trace that outlived the mark.
#[test]
fn regression_several_begin_in_one_region_then_it_is_idle_then_another_is_marked() {
    let runs = every_order(|choose| {
        let mut world = World::new(1);
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
        let mut world = World::new(1);
        let mut in_order = |_: usize| 0;
        world.begin([0]);
        world.settle(&mut in_order);
        world.end(0);
        world.sync();
        world.settle(&mut in_order);
        world.call(What::Sweep);
        world.settle(&mut in_order);
        // This one clears the mark, before, between or after the others.
        world.call(What::Sweep);
        world.begin([0]);
        world.begin([0, 1]);
        world.settle(choose);
        assert_eq!(world.writes.len(), 2);
        world.finish(&mut in_order);
    });
    println!("{runs} orders of a sweep and two");
    assert!(runs > 50);
}

#[test]
fn after_a_write_of_marks_that_was_given_up_no_region_counts_as_marked_by_a_later_one() {
    for steps in 0..6 {
        let mut world = World::new(steps);
        let mut in_order = |_: usize| 0;
        world.begin([0]);
        for _ in 0..steps {
            world.step(&mut in_order);
        }
        let was_done = world.calls.is_empty();
        world.has_dropped = true;
        world.calls.clear();
        // What it had begun is still on its way, and would take the other one's bit from disk again if it came later.
        world.begin([1]);
        while world.step(&mut |bound| bound - 1) {}
        world.check();
        assert!(world.calls.is_empty(), "it is answered, well or not");
        assert!(!was_done || world.writes.len() == 2, "nothing was given up");
    }
}
