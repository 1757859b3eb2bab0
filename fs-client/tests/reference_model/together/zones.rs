//! Several writers in one zone of the pool. Clients overwrite and sync files whose pages lie together, all at once; then more time passes than marks
//! of write intents are kept; then the same in another zone. In some runs the server is killed meanwhile.
//!
//! The pools of other walks have one zone or few, which are always in use, and these walks seldom wait. So there no zone is marked anew after an idle
//! time.

use super::op::Op;
use super::*;
use cuttlefs_common::ids::PAGE_SIZE_U64;
use cuttlefs_server::pages::SWEEP_INTERVAL;
use cuttlefs_server::pool::ZONE_PAGES;

/// The number of seeds of the walk. It moves more bytes than others.
const SEEDS: u64 = 150;
/// The number of small files before the large one, which fills the rest of their zone. One more small file follows it.
const FILES: usize = 6;
/// The number of pages of a small file.
const PAGES: u64 = 2;
/// A mark without a write is cleared after two sweeps, so it is gone after a third.
const IDLE_SWEEPS: u32 = 3;

/// Clients overwrite files, and sync most of them.
fn overwrites(clients: usize) -> impl Strategy<Value = Vec<(usize, Op)>> {
    let places = prop_oneof![3 => Just((0, PAGE_SIZE_U64)), 1 => Just((0, PAGES * PAGE_SIZE_U64)), 1 => Just((100, 300u64))];
    let one = (0..clients, 0..FILES + 2, places, any::<u64>(), prop::bool::weighted(0.8)).prop_map(
        |(client, handle, (offset, len), salt, syncs)| {
            let write = (client, Op::Write { handle, offset, len, salt });
            [Some(write), syncs.then_some((client, Op::Fsync { handle }))]
        },
    );
    prop::collection::vec(one, 2..7).prop_map(|ops| ops.into_iter().flatten().flatten().collect())
}

fn case(seed: u64) -> impl Strategy<Value = Case> {
    let pace = || prop_oneof![Just(1u64), Just(6), Just(20)];
    let crash = end().prop_map(|end| (Crash { end, power: false }, None));
    let crash = prop::option::weighted(0.15, crash);
    let world_pace = prop_oneof![Just(20u64), Just(80)];
    let batch = (overwrites(4), any::<u64>(), [pace(), pace(), pace(), pace()], world_pace, crash).prop_map(
        |(ops, seed, clients, world, crash)| Batch {
            ops,
            pace: Pace { seed, clients, world, away: None },
            crash,
            cut: None,
        },
    );
    let idle = Step::Pass { ms: SWEEP_INTERVAL.as_millis() as u64 * u64::from(IDLE_SWEEPS) + 500 };
    let item = (batch, prop::bool::weighted(0.5)).prop_map(move |(batch, is_idle)| {
        [Some(Item::Together(batch)), is_idle.then(|| Item::One(0, idle.clone()))]
    });
    let items = prop::collection::vec(item, 3..9);
    let items = items.prop_map(|items| items.into_iter().flatten().flatten().collect());
    (any::<bool>(), 2usize..=4, items).prop_map(move |(deferred, clients, items)| {
        let small = WorldConfig::new(seed, Translation::Target, 4 * ZONE_PAGES, 48);
        let unsynced_bytes = unsynced_bytes(seed);
        let config = WorldConfig { deferred, restless: true, unsynced_bytes, ..small };
        Case { kind: Kind::Names, config, clients, weather: None, items, furnish: zones }
    })
}

/// Makes the small files, the large one whose pages fill their zone and go on in the next one, and a small file after it.
fn zones(walk: &mut Walk<Simulated>, clients: usize) {
    let how = How { read: true, write: true, append: false, truncate: false, sync: false };
    let names = (0..4).map(|name| (0, name)).chain((0..4).map(|name| (1, name)));
    walk.run(0, &Step::Make { parent: 0, name: 4, kind: FileKind::Directory });
    for (index, (parent, name)) in names.take(FILES + 2).enumerate() {
        walk.run(0, &Step::Create { parent, name, exclusive: true, how });
        let pages = if index == FILES { ZONE_PAGES } else { PAGES };
        walk.run(0, &Step::Write { handle: index, offset: 0, len: pages * PAGE_SIZE_U64 });
        walk.run(0, &Step::Fsync { handle: index, contents_only: false });
    }
    for client in 1..clients {
        for ino in 2..2 + FILES + 2 {
            walk.run(client, &Step::Open { ino, how });
        }
    }
}

#[test]
fn several_write_and_sync_in_one_zone_with_idle_time_between() {
    let test = "together::zones::several_write_and_sync_in_one_zone_with_idle_time_between";
    seeds::seeds(test, SEEDS, case, run);
}
