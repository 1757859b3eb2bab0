//! Moves of directories far from the root: the path to the root is climbed without the writer's lock, and other moves come in between.

use super::super::LEVELS_MAX;
use super::super::climbs::NEAR_LEVELS;
use super::{Operation, StopOnDrop, USER, World};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rpc::RenameMode;
use cuttlefs_common::status::Status;
use std::sync::atomic::{AtomicBool, Ordering};

const ROOT: InodeNo = InodeNo::ROOT;
/// The length of a chain of nested directories: more than one climb's step passes.
const CHAIN: usize = 4 * NEAR_LEVELS;

fn chain(world: &World, top: InodeNo, name: &str, levels: usize) -> Vec<InodeNo> {
    let mut at = top;
    (0..levels)
        .map(|_| {
            at = world.directory(at, name);
            at
        })
        .collect()
}

fn operation<'n>(from: (InodeNo, &'n str), to: (InodeNo, &'n str), mode: RenameMode) -> Operation<'n> {
    let (name, new_name) = (from.1.as_bytes(), to.1.as_bytes());
    Operation::Rename { parent: from.0, name, new_parent: to.0, new_name, mode }
}

/// Renames, without climbing if the rename is refused.
fn rename(world: &World, from: (InodeNo, &str), to: (InodeNo, &str), mode: RenameMode) -> Result<(), Status> {
    world.meta.execute(USER, &operation(from, to, mode), &|_| false).map(|_| ())
}

#[test]
fn a_long_way_is_not_climbed_under_the_writer() {
    let world = World::new();
    let bottom = *chain(&world, ROOT, "a", CHAIN).last().expect("a chain");
    world.directory(ROOT, "x");
    let go = || rename(&world, (ROOT, "x"), (bottom, "x"), RenameMode::Replace);
    assert_eq!(go(), Err(Status::Busy));
    let mut climb = world.meta.climb(bottom);
    assert_eq!(go(), Err(Status::Busy), "it has not come to its end");
    let mut steps = 1;
    while climb.step().expect("climb") {
        assert_eq!(go(), Err(Status::Busy));
        steps += 1;
    }
    assert!(steps > 2, "in parts");
    assert_eq!(go(), Ok(()));
    drop(climb);
    assert_eq!(
        rename(&world, (bottom, "x"), (ROOT, "x"), RenameMode::Replace),
        Ok(()),
        "the way up is no way"
    );
    assert_eq!(go(), Err(Status::Busy), "what was known is forgotten with the climb");
    // Neither a file, nor a directory that keeps its parent, can become its own ancestor, so these renames need no climb.
    world.file(ROOT, "file");
    assert_eq!(rename(&world, (ROOT, "file"), (bottom, "file"), RenameMode::Replace), Ok(()));
    let deep = world.directory(bottom, "y");
    assert_eq!(rename(&world, (bottom, "y"), (bottom, "z"), RenameMode::Replace), Ok(()));
    assert_eq!(world.meta.parent(deep), Ok(bottom));
    world.assert_sound();
}

#[test]
fn a_move_above_a_climb_is_seen_wherever_the_climb_is() {
    // The two moves together would form a loop: `x` moves below the chain's bottom, and the chain's directory `at` moves below `x`.
    for at in 0..CHAIN {
        for steps in 0..=CHAIN {
            let world = World::new();
            let levels = chain(&world, ROOT, "a", CHAIN);
            let bottom = *levels.last().expect("a chain");
            let x = world.directory(ROOT, "x");
            let mut climb = world.meta.climb(bottom);
            let mut has_more = true;
            for _ in 0..steps {
                has_more = has_more && climb.step().expect("climb");
            }
            let parent = if at == 0 { ROOT } else { levels[at - 1] };
            rename(&world, (parent, "a"), (x, "a"), RenameMode::Replace).expect("it is near");
            while has_more {
                has_more = climb.step().expect("climb");
            }
            let first = rename(&world, (ROOT, "x"), (bottom, "x"), RenameMode::Replace);
            assert!(matches!(first, Err(Status::Busy | Status::Invalid)), "{at} {steps} {first:?}");
            drop(climb);
            let again = world.run(&operation((ROOT, "x"), (bottom, "x"), RenameMode::Replace));
            assert_eq!(again.map(drop), Err(Status::Invalid), "{at} {steps}");
            world.assert_sound();
        }
    }
}

#[test]
fn a_move_elsewhere_disturbs_no_climb() {
    let world = World::new();
    let bottom = *chain(&world, ROOT, "a", CHAIN).last().expect("a chain");
    for name in ["x", "y", "z"] {
        world.directory(ROOT, name);
    }
    let z = world.directory(ROOT, "into");
    let mut climb = world.meta.climb(bottom);
    while climb.step().expect("climb") {}
    rename(&world, (ROOT, "y"), (z, "y"), RenameMode::Replace).expect("a move");
    world.directory(bottom, "below");
    rename(&world, (ROOT, "a"), (ROOT, "b"), RenameMode::Replace).expect("another name, and the same place");
    assert_eq!(rename(&world, (ROOT, "x"), (bottom, "x"), RenameMode::Replace), Ok(()));
    assert_eq!(
        rename(&world, (ROOT, "z"), (bottom, "z"), RenameMode::Replace),
        Ok(()),
        "as often as one likes"
    );
    world.assert_sound();
}

#[test]
fn an_exchange_climbs_both_ways() {
    let world = World::new();
    let one = *chain(&world, ROOT, "a", CHAIN).last().expect("a chain");
    let levels = chain(&world, ROOT, "b", CHAIN);
    let two = *levels.last().expect("a chain");
    world.directory(one, "x");
    world.directory(two, "y");
    let go = || rename(&world, (one, "x"), (two, "y"), RenameMode::Exchange);
    let mut climb = world.meta.climb(two);
    while climb.step().expect("climb") {}
    assert_eq!(go(), Err(Status::Busy));
    let mut other = world.meta.climb(one);
    while other.step().expect("climb") {}
    assert_eq!(go(), Ok(()));
    // An exchange with one of its own ancestors would put a directory below itself.
    let top = operation((two, "y"), (levels[0], "b"), RenameMode::Exchange);
    assert_eq!(world.run(&top).map(drop), Err(Status::Invalid));
    world.assert_sound();
}

#[test]
fn nothing_is_moved_deeper_than_the_bound_and_all_else_is_as_everywhere() {
    let world = World::new();
    let levels = chain(&world, ROOT, "a", LEVELS_MAX + 3);
    world.directory(ROOT, "x");
    let go = |to: InodeNo| world.run(&operation((ROOT, "x"), (to, "x"), RenameMode::NoReplace)).map(drop);
    // The path from the root to `last` has `LEVELS_MAX` directories, with the root.
    let (last, past) = (levels[LEVELS_MAX - 2], levels[LEVELS_MAX - 1]);
    assert_eq!(go(past), Err(Status::NameTooLong));
    assert_eq!(go(levels[LEVELS_MAX + 2]), Err(Status::NameTooLong));
    assert_eq!(go(last), Ok(()));
    let deep = *levels.last().expect("a chain");
    let made = world.directory(deep, "y");
    world.file(deep, "file");
    world.run(&operation((deep, "file"), (past, "file"), RenameMode::Replace)).expect("a file");
    world.run(&operation((deep, "y"), (deep, "z"), RenameMode::Replace)).expect("another name");
    world.run(&operation((deep, "z"), (ROOT, "up"), RenameMode::Replace)).expect("to near the root");
    assert_eq!(world.meta.parent(made), Ok(ROOT));
    // A move below itself is refused as that, though it would be too deep as well.
    let below = operation((past, "a"), (deep, "b"), RenameMode::Replace);
    assert_eq!(world.run(&below).map(drop), Err(Status::Invalid));
    world.assert_sound();
}

#[test]
fn moves_into_each_other_at_once_form_no_loop() {
    let world = World::new();
    let ends = ["a", "b", "c"].map(|name| *chain(&world, ROOT, name, CHAIN).last().expect("a chain"));
    let is_over = AtomicBool::new(false);
    let moved = std::thread::scope(|scope| {
        let _stop = StopOnDrop(&is_over);
        let mover = |from: &'static str, into: InodeNo| {
            let (world, is_over) = (&world, &is_over);
            scope.spawn(move || {
                let mut moved = 0;
                while !is_over.load(Ordering::Relaxed) {
                    let down = operation((ROOT, from), (into, from), RenameMode::NoReplace);
                    if world.execute(&down, &|_| false).is_ok() {
                        moved += 1;
                        let up = operation((into, from), (ROOT, from), RenameMode::NoReplace);
                        world.execute(&up, &|_| false).expect("nobody else moves it");
                    }
                }
                moved
            })
        };
        let movers = [mover("a", ends[1]), mover("b", ends[2]), mover("c", ends[0])];
        for _ in 0..2000 {
            // A climb ends at the root only if there is no loop.
            for end in ends {
                let mut climb = world.meta.climb(end);
                while climb.step().expect("climb") {}
            }
        }
        is_over.store(true, Ordering::Relaxed);
        movers.map(|mover| mover.join().expect("a mover"))
    });
    assert!(moved.iter().all(|moved| *moved > 0), "{moved:?}");
    world.assert_sound();
}
