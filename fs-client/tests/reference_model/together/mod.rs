//! Requests of several clients at once, with crashes among them. In a batch two to four clients have an operation or two each. All operations begin
//! before the first is done. A seed decides who goes on next (`baton`): one of the clients, or the world with its server. The server dies at any
//! event meanwhile, so that requests that are sent again, recoveries of several clients and other requests race each other.
//!
//! The answers must be the answers of some order of the operations (`orders`, `fits`), and the file system must be in a state that such an order
//! leaves (`look`, and `Walk::compare`). Ordinary steps come between the batches.
//!
//! | walk | durability | a batch is about | the server |
//! | --- | --- | --- | --- |
//! | `Ack` | `ack` | names, attributes, contents of the same files | is killed or loses power |
//! | `Names` | `fsync` | names, attributes; contents of a file by one client | is killed |
//!
//! `zones` is a walk of `Names` over several zones of the pool, with idle time.
//!
//! The following is not promised, so the walks do not ask for it, or do not check it:
//! * with `fsync`, that contents which several clients change at once are in order after a crash: each client writes again what no sync covered. Nor
//!   that answers since the last sync survive a power loss;
//! * that a read sees all its pages, or a copy both its files, at one moment;
//! * with `ack`, that an answer lasts which only shows a state, or which refuses a request: a client can see another one's change before the change
//!   is durable. Such an answer, given before a crash, says nothing about the state after the crash.

mod baton;
mod directed;
mod fits;
mod locks;
mod look;
mod op;
mod orders;
mod zones;

use super::model::{Clients, Model};
use super::seeds::{self, Ran};
use super::simulated::Simulated;
use super::site::Site;
use super::step::{How, Step, end, step_among_crashes};
use super::walk::{CALLER, Open, Walk};
use super::world::{Crash, LEASE, Lie, WorldConfig, unsynced_bytes};
use cuttlefs_client::file::RemoteVolume;
use cuttlefs_common::attr::FileKind;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rdma::sim::{self, Cut, Translation};
use cuttlefs_common::world::{Random, SeededRandom};
use cuttlefs_server::meta::StoreLie;
use op::{Answer, Op, Places};
use orders::Answered;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};

/// The number of seeds of each walk.
const SEEDS: u64 = 600;
/// The number of batches and steps of a walk.
const ITEMS: std::ops::Range<usize> = 3..24;
/// More pages than all files can have: other walks are about full pools.
const POOL_PAGES: u64 = 2048;

/// The walks of the table above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Ack,
    Names,
}

impl Kind {
    fn test(self) -> &'static str {
        match self {
            Self::Ack => "together::answers_at_once_have_an_order_whatever_dies",
            Self::Names => "together::names_changed_at_once_have_an_order_whoever_is_killed",
        }
    }
}

/// Operations that are under way together.
#[derive(Clone, Debug)]
struct Batch {
    ops: Vec<(usize, Op)>,
    pace: Pace,
    /// How the server dies, and then the next server, counted from the beginning of the batch.
    crash: Option<(Crash, Option<Crash>)>,
    cut: Option<(Cut, u32)>,
}

/// How the turns are shared out.
#[derive(Clone, Debug)]
struct Pace {
    seed: u64,
    /// The shares of turns of the clients; `world` is the share of the world.
    clients: [u64; 4],
    world: u64,
    /// The client that is away during the whole batch, even if others wait for it.
    away: Option<usize>,
}

/// A part of a walk.
#[derive(Clone, Debug)]
enum Item {
    One(usize, Step),
    Together(Batch),
}

/// Everything that a run depends on.
#[derive(Clone, Debug)]
struct Case {
    kind: Kind,
    config: WorldConfig,
    clients: usize,
    /// One message of this many has a fault.
    weather: Option<u64>,
    items: Vec<Item>,
    /// Makes the files that the items need.
    furnish: fn(&mut Walk<Simulated>, usize),
}

fn batch(kind: Kind) -> impl Strategy<Value = Batch> {
    let durable_answers = kind == Kind::Ack;
    let crash = move || {
        (end(), any::<bool>()).prop_map(move |(end, power)| Crash { end, power: power && durable_answers })
    };
    let crash = prop::option::weighted(0.6, (crash(), prop::option::weighted(0.3, crash())));
    let pace = || prop_oneof![1 => Just(1u64), 2 => Just(6), 2 => Just(20)];
    let cut = prop_oneof![Just(Cut::Request), Just(Cut::Reply), Just(Cut::Transfer), Just(Cut::OneSided)];
    let cut = prop::option::weighted(0.1, (cut, 0u32..6));
    let world = prop_oneof![Just(20u64), Just(80)];
    let away = prop::option::weighted(0.2, 0usize..4);
    (op::ops(4), any::<u64>(), [pace(), pace(), pace(), pace()], world, away, crash, cut).prop_map(
        |(ops, seed, clients, world, away, crash, cut)| Batch {
            ops,
            pace: Pace { seed, clients, world, away },
            crash,
            cut,
        },
    )
}

fn case(kind: Kind, seed: u64, lie: Option<Lie>) -> impl Strategy<Value = Case> {
    let translation = proptest::sample::select(Translation::ALL.to_vec());
    let weather = prop::option::weighted(0.15, 10u64..60);
    let step = step_among_crashes(4, kind == Kind::Ack)
        // Crashes come only with batches, so that they hit operations that are under way together.
        .prop_filter("no crash", |(_, step)| !matches!(step, Step::Crash { .. }))
        .prop_filter("as `promised`", move |(_, step)| match *step {
            Step::Allocate { offset, len, how, .. } => {
                kind == Kind::Ack || !op::punches_within_a_page(offset, len, how)
            }
            _ => true,
        });
    let item = prop_oneof![
        1 => step.prop_map(|(client, step)| Item::One(client, step)),
        2 => batch(kind).prop_map(Item::Together),
    ];
    let items = prop::collection::vec(item, ITEMS);
    (translation, 8u64..64, any::<bool>(), 2usize..=4, weather, items).prop_map(
        move |(translation, frames, deferred, clients, weather, items)| {
            let small = WorldConfig::new(seed, translation, POOL_PAGES, frames);
            let unsynced_bytes = unsynced_bytes(seed);
            let config = WorldConfig {
                deferred,
                durable_answers: kind == Kind::Ack,
                restless: true,
                lie,
                unsynced_bytes,
                ..small
            };
            Case { kind, config, clients, weather, items, furnish }
        },
    )
}

/// Makes files with handles of all clients, and directories.
fn furnish(walk: &mut Walk<Simulated>, clients: usize) {
    let how = How { read: true, write: true, append: false, truncate: false, sync: false };
    for name in 0..3 {
        walk.run(name % clients, &Step::Create { parent: 0, name, exclusive: true, how });
    }
    for client in 0..clients {
        for ino in 1..4 {
            walk.run(client, &Step::Open { ino, how: How { append: ino == 1 && client % 2 == 1, ..how } });
        }
    }
    for (parent, name) in [(0, 3), (4, 0), (4, 1)] {
        walk.run(0, &Step::Make { parent, name, kind: FileKind::Directory });
    }
}

fn run(case: &Case) -> Ran {
    let site = Simulated::with_clients(case.config, case.clients, case.kind == Kind::Names);
    if let Some(one_in) = case.weather {
        site.world.network().set_weather(case.config.seed, one_in);
    }
    let mut walk = Walk::new(site);
    (case.furnish)(&mut walk, case.clients);
    for item in &case.items {
        match item {
            Item::One(client, step) => walk.run(client % case.clients, step),
            Item::Together(batch) => {
                if !together(&mut walk, case.kind, batch) {
                    return Ran::of(&walk.site.world);
                }
                walk.compare();
            }
        }
    }
    walk.end();
    Ran::of(&walk.site.world)
}

/// No client. As the owner of a file it means: no further operation of any client on this file, in this batch.
const NOBODY: usize = usize::MAX;

/// The client that is away during a batch, even if others wait for it and the server dies. Its writes are synced before, because tests of `absences`
/// are about unsynced bytes of absent clients. No client is away if the end of its lease could free an open file without a name.
fn goes_away(walk: &mut Walk<Simulated>, batch: &Batch) -> Option<usize> {
    let clients = walk.site.clients();
    let away = batch.pace.away? % clients;
    let is_nameless = |open: &Open| walk.model.nlink(open.ino) == 0;
    let keeps_names = batch.ops.iter().all(|(_, op)| !op.changes_names());
    if !keeps_names || walk.handles.iter().any(is_nameless) {
        return None;
    }
    if !walk.site.answers_are_durable() {
        walk.sync_client(away);
    }
    Some(away)
}

/// The operations of a batch for whose answers cuttlefs makes a promise.
fn promised(kind: Kind, batch: &Batch, clients: usize, places: &Places) -> Vec<(usize, Op)> {
    // Files that only one client may use in this batch, and the clients that use each file.
    let (mut own, mut used): (BTreeMap<InodeNo, usize>, BTreeMap<InodeNo, Vec<usize>>) = Default::default();
    let mut promised = Vec::new();
    for (client, op) in &batch.ops {
        let client = client % clients;
        let files = op.contents(client, places);
        // A page whose unsynced bytes are all zeroed by the punch may be a hole after a death (docs/recovery.md).
        if kind == Kind::Names && op.punches_within_a_page() {
            continue;
        }
        // Unsynced contents beyond the new end do not come back after a death, not even as space.
        let cuts = kind == Kind::Names && op.cuts();
        if cuts && files.iter().any(|file| used.contains_key(file)) {
            continue;
        }
        // A copy reads its source before it writes, so nobody else may change the source.
        let source = op.source(client, places);
        let alone = |file: &InodeNo| kind == Kind::Names || source == Some(*file);
        let is_others = |file: &InodeNo| {
            own.get(file).is_some_and(|owner| *owner != client)
                || alone(file) && used.get(file).is_some_and(|used| used.iter().any(|user| *user != client))
        };
        if files.iter().any(is_others) {
            continue;
        }
        for file in files {
            used.entry(file).or_default().push(client);
            if alone(&file) {
                own.insert(file, if cuts { NOBODY } else { client });
            }
        }
        promised.push((client, op.clone()));
    }
    promised
}

/// Runs a batch and updates the walk's model. Returns `false` if several models fit, so that the walk must end.
fn together(walk: &mut Walk<Simulated>, kind: Kind, batch: &Batch) -> bool {
    let clients = walk.site.clients();
    let places = Places::new(&walk.model, &walk.handles, clients);
    let away = goes_away(walk, batch);
    let batch = &Batch { pace: Pace { away, ..batch.pace.clone() }, ..batch.clone() };
    let mut ops = promised(kind, batch, clients, &places);
    ops.retain(|(client, _)| Some(*client) != away);
    for (client, op) in &ops {
        for file in op.contents(*client, &places) {
            let to = if kind == Kind::Names && op.cuts() { NOBODY } else { *client };
            walk.hand_over(file, to);
        }
    }
    walk.model.now = walk.site.now();
    if let Some((crash, again)) = batch.crash {
        walk.site.crash_after(crash, again);
    }
    if let Some((cut, pass)) = batch.cut {
        walk.site.cut(cut, pass);
    }
    let (mut histories, last_death) = under_way(&walk.site, batch, &ops, &places);
    let died = walk.site.is_new();
    if let (Some(death), Kind::Ack) = (last_death, kind) {
        forgive(&mut histories, death);
    }
    let mut states = orders::states(&walk.model, &histories, &places, died);
    assert!(!states.is_empty(), "no order of these explains what they were answered:\n{}", told(&histories));
    for answered in histories.iter().flatten() {
        if let Answer::Opened(Ok((ino, handle, _))) = answered.answer {
            let (ino, how) = match answered.op {
                Op::Open { ino: index, how } => (places.ino(index), how),
                Op::Create { how, .. } | Op::CreateNameless { how, .. } => {
                    (ino.expect("a create tells its inode"), how)
                }
                _ => unreachable!("opens nothing: {:?}", answered.op),
            };
            walk.handles.push(Open { handle, client: answered.client, ino, how });
            if died {
                // After a death the open may have been answered with a later state of the file, so it is not known whether the pages were stale.
                states
                    .iter_mut()
                    .for_each(|state| state.node_mut(ino).more.stale_for[answered.client] = false);
            }
        }
    }
    // All clients must be back before the state is compared, and no crash may come meanwhile.
    walk.site.hold_crash(true);
    if away.is_some() && batch.pace.seed.is_multiple_of(2) {
        // The other clients make their changes again. Then the absent client misses the grace period, too.
        (0..clients).filter(|client| Some(*client) != away).for_each(|client| walk.touch_by(client));
        walk.site.pass(LEASE * 2);
    }
    walk.touch();
    if walk.site.has_died() {
        walk.settle(true);
        states.iter_mut().for_each(Model::written_again);
        if kind == Kind::Names {
            states.iter_mut().for_each(Model::may_be_as_seen);
        }
    }
    let number = states.len();
    let left = look::single_out(&walk.site, states).unwrap_or_else(|why| {
        panic!("none of {number} orders leaves what there is: {why:#?}\n{}", told(&histories))
    });
    walk.site.hold_crash(false);
    let Some(model) = left else { return false };
    walk.model = model;
    true
}

/// A line for each operation, for the message of a failed check.
fn told(histories: &[Vec<Answered>]) -> String {
    histories.iter().flatten().map(|answered| format!("{answered:?}\n")).collect()
}

/// Marks answers that are not promised to last, if they came before the crash: those that only show a state, and refusals.
fn forgive(histories: &mut [Vec<Answered>], death: u64) {
    for answered in histories.iter_mut().flatten() {
        answered.unpromised =
            answered.is_before(death) && (answered.op.only_looks() || answered.answer.refusal().is_some());
    }
}

/// Runs all operations at once. Returns the answers of each client, and the turn in which a server died last.
fn under_way(
    site: &Simulated,
    batch: &Batch,
    ops: &[(usize, Op)],
    places: &Places,
) -> (Vec<Vec<Answered>>, Option<u64>) {
    let turns = AtomicU64::new(0);
    let job = |client: usize| -> baton::Job<'_, Vec<Answered>> {
        let volume: &RemoteVolume = site.client(client);
        let turns = &turns;
        let mine: Vec<&Op> = ops.iter().filter(|(of, _)| *of == client).map(|(_, op)| op).collect();
        Box::new(move || {
            let answered = mine.into_iter().filter_map(|op| {
                let begun = turns.load(Ordering::SeqCst);
                let answer = op.ask(volume, client, places)?;
                let ended = turns.load(Ordering::SeqCst);
                Some(Answered::new(client, op, answer, begun..ended))
            });
            answered.collect()
        })
    };
    let playing: Vec<usize> =
        (0..site.clients()).filter(|client| ops.iter().any(|(of, _)| of == client)).collect();
    let jobs = playing.iter().map(|client| job(*client)).collect();
    at_once(site, &batch.pace, &playing, jobs, &turns)
}

/// Runs a job for each of the clients `playing`. Returns the results, and the turn in which a server died last.
fn at_once<T: Send>(
    site: &Simulated,
    pace: &Pace,
    playing: &[usize],
    jobs: Vec<baton::Job<'_, T>>,
    turns: &AtomicU64,
) -> (Vec<T>, Option<u64>) {
    let random = SeededRandom::new(pace.seed);
    let mut begin: Vec<usize> = (0..playing.len()).collect();
    let mut last_death = None;
    // The jobs that had a turn since the world last moved. Time may go on only when every job had one.
    let mut looked = BTreeSet::new();
    site.world.hold_time(true);
    let given = baton::run(jobs, |open| {
        // A client without a job comes back to a new server when all others wait for that.
        site.set_bystanders(|client| {
            pace.away != Some(client) && !open.iter().any(|job| playing[*job] == client)
        });
        let turn = 1 + turns.fetch_add(1, Ordering::SeqCst);
        if !begin.is_empty() {
            return Some(begin.swap_remove((random.next_u64() % begin.len() as u64) as usize));
        }
        let of_job = |job: &usize| pace.clients[playing[*job]];
        let mut drawn = random.next_u64() % (pace.world + open.iter().map(of_job).sum::<u64>());
        for job in open {
            if drawn < of_job(job) {
                looked.insert(*job);
                return Some(*job);
            }
            drawn -= of_job(job);
        }
        let before = site.world.deaths();
        let moved = sim::pump();
        if site.world.deaths() > before {
            last_death = Some(turn);
        }
        if moved {
            looked.clear();
            return None;
        }
        let next = open.iter().find(|job| !looked.contains(*job)).copied();
        match next {
            Some(job) => {
                looked.insert(job);
            }
            None => {
                looked.clear();
                site.world.hold_time(false);
                sim::pump();
                site.world.hold_time(true);
            }
        }
        next
    });
    site.world.hold_time(false);
    site.set_bystanders(|_| true);
    (given, last_death)
}

/// Runs seeds until one fails.
fn seeds(kind: Kind) {
    seeds::seeds(kind.test(), SEEDS, |seed| case(kind, seed, None), run);
}

#[test]
fn answers_at_once_have_an_order_whatever_dies() {
    seeds(Kind::Ack);
}

#[test]
fn names_changed_at_once_have_an_order_whoever_is_killed() {
    seeds(Kind::Names);
}

/// Checks that one of the first seeds finds the lie, and that the same seed passes without it.
fn finds(kind: Kind, lie: Lie) {
    seeds::finds((lie, kind), |seed, lies| case(kind, seed, lies.then_some(lie)), run);
}

/// Other walks have one request at a time, so at most one request was done and not answered, and they cannot find this lie.
#[test]
fn batches_of_names_that_forget_other_clients_requests_are_found() {
    finds(Kind::Names, Lie::Store(StoreLie::OtherSlots));
    finds(Kind::Ack, Lie::Store(StoreLie::OtherSlots));
}

#[test]
fn the_lies_that_other_walks_find_are_found() {
    for lie in [
        Lie::DiskSync,
        Lie::Store(StoreLie::Flush),
        Lie::Store(StoreLie::Images),
        Lie::Store(StoreLie::Slots),
    ] {
        finds(Kind::Ack, lie);
    }
    finds(Kind::Names, Lie::Store(StoreLie::Slots));
}

#[test]
fn a_seed_does_the_same_each_time() {
    for kind in [Kind::Ack, Kind::Names] {
        seeds::does_the_same(|seed| case(kind, seed, None), run);
    }
}
