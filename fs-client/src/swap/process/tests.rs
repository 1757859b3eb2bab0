use super::super::store::tests::Map;
use super::*;
use std::fs::File;

/// What is known of pages does not ask the kernel; any descriptor will do.
pub(in crate::swap) fn nothing() -> Uffd {
    Uffd::from(OwnedFd::from(File::open("/dev/null").expect("a descriptor")))
}

pub(in crate::swap) fn process() -> Process {
    Process::new(nothing(), None, 0)
}

fn store() -> Store<Map> {
    Store::new(Map::default(), 100)
}

fn resident(process: &mut Process, pages: std::ops::Range<u64>) {
    pages.for_each(|page| process.set(page * PAGE as u64, State::Resident(None)));
}

#[test]
fn the_oldest_leave_first_and_who_came_back_is_last() {
    let mut process = process();
    resident(&mut process, 0..6);
    let at = |page: u64| page * PAGE as u64;
    process.set(at(0), State::Resident(None));
    assert_eq!(process.oldest(2), [at(1), at(2)]);
    assert!(matches!(process.get(at(1)), Some(State::Leaving(None))));
    assert_eq!((process.resident(), process.left()), (6, 0));
    process.set(at(1), State::Left(Arc::new([1; PAGE]), None));
    process.set(at(2), State::Left(Arc::new([2; PAGE]), None));
    assert_eq!((process.resident(), process.left()), (4, 2));
    // The second chance.
    process.set(at(1), State::Resident(None));
    let left: Vec<u64> = process.longest_left(10).into_iter().map(|(page, ..)| page).collect();
    assert_eq!(left, [at(2)]);
    assert_eq!(process.oldest(10), [at(3), at(4), at(5), at(0), at(1)]);
}

#[test]
fn what_is_given_up_moves_or_ends_takes_its_slots_along() {
    let mut store = store();
    let mut process = process();
    let at = |page: u64| page * PAGE as u64;
    let slots = store.save(&[(None, &[1; PAGE]), (None, &[2; PAGE]), (None, &[3; PAGE])]).expect("stored");
    for (page, slot) in (0..).zip(&slots) {
        process.set(at(page), State::Stored(*slot));
    }
    process.set(at(3), State::Leaving(None));
    process.leaving = vec![Some(at(3)), Some(at(2))];
    process.remap(at(2), at(10), 2 * PAGE as u64, &mut store);
    assert!(matches!(process.get(at(10)), Some(State::Stored(slot)) if *slot == slots[2]));
    assert_eq!(process.leaving, [Some(at(11)), Some(at(10))]);
    assert!(process.get(at(2)).is_none());
    process.give_up(at(1), at(11), &mut store);
    assert_eq!(process.leaving, [Some(at(11)), None]);
    assert!(process.get(at(1)).is_none() && process.get(at(10)).is_none() && process.get(at(0)).is_some());
    // A child counts on what its parent has.
    let mut child = process.fork(nothing(), &mut store);
    process.end(&mut store);
    assert_eq!(*store.load(slots[0]).expect("still there"), [1; PAGE]);
    child.end(&mut store);
    assert_eq!((child.resident(), child.left()), (0, 0));
    // All three are free again: a space of this size takes them anew.
    assert_eq!(store.save(&[(None, &[9; PAGE]); 100]).expect("room").len(), 100);
}

#[test]
fn queues_do_not_grow_with_memory_that_is_taken_and_given_up() {
    let (mut process, mut store) = (process(), store());
    let slot = store.save(&[(None, &[1; PAGE])]).expect("stored")[0];
    for _ in 0..10 * STALE_MAX {
        resident(&mut process, 0..1);
        process.give_up(0, PAGE as u64, &mut store);
        store.hold(slot);
        process.set(0, State::Resident(Some(slot)));
        process.give_up(0, PAGE as u64, &mut store);
    }
    assert!(process.resident.len() <= 2 * STALE_MAX, "{}", process.resident.len());
    assert!(process.kept.len() <= 2 * STALE_MAX, "{}", process.kept.len());
    resident(&mut process, 0..1);
    assert_eq!(process.oldest(10), [0]);
}

#[test]
fn the_page_that_came_back_last_gives_its_slot_up_first() {
    let (mut process, mut store) = (process(), store());
    let at = |page: u64| page * PAGE as u64;
    let slots = store.save(&[(None, &[1; PAGE]), (None, &[2; PAGE]), (None, &[3; PAGE])]).expect("stored");
    for (page, slot) in (0..).zip(&slots) {
        process.set(at(page), State::Resident(Some(*slot)));
    }
    resident(&mut process, 3..5);
    // It has left since: its slot is what it will be stored over.
    process.set(at(2), State::Left(Arc::new([3; PAGE]), Some(slots[2])));
    assert_eq!(process.slots_of_pages_here().collect::<Vec<_>>(), slots);
    assert_eq!(process.give_up_slot(|_| true), Some(slots[1]));
    assert_eq!((process.give_up_slot(|_| false), process.give_up_slot(|_| true)), (None, None));
    assert!(matches!(process.get(at(1)), Some(State::Resident(None))));
    assert_eq!(process.give_up_slots(|slot| slot != slots[0]), [slots[2]]);
    assert!(matches!(process.get(at(0)), Some(State::Resident(Some(slot))) if *slot == slots[0]));
    // They leave in the order in which they came, all the same.
    assert_eq!(process.oldest(10), [at(0), at(1), at(3), at(4)]);
    assert!(matches!(process.longest_left(1)[..], [(page, _, None)] if page == at(2)));
}
