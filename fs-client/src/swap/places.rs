//! Saves pages, and finds places for them where the swap space or the node is full: pages that are here give up those that they have kept.
//!
//! # How it works
//! The page that came back last gives its place up first: it is the last one to leave again, and so the last one that the place would spare a store. That finds
//! places that one page alone counts on, without a look at all pages. Where it does not find enough, all pages are looked at: a place is given up if all who
//! count on it are here, in several processes after a fork, or in the swapper, on their way out.
//!
//! # Invariants
//! * A place that holds the only copy of a page is never given up, nor one of the pages that are being saved.
//! * So whatever a run has done, it goes on as long as the pages that are only at the node fit there.

use super::process::Process;
use super::remote::Remote;
use super::store::{Bytes, Slot, Store, StoreError};
use std::collections::{BTreeMap, BTreeSet};

/// Places that one look at all pages gives up: more than are needed at once, so that it is seldom, and fewer than are given back to the node.
const AT_ONCE: usize = 32;

/// As `Store::save`.
pub(super) fn save<R: Remote>(
    store: &mut Store<R>,
    processes: &mut BTreeMap<u64, Process>,
    pages: &[(Option<Slot>, &Bytes)],
) -> Result<Vec<Slot>, StoreError> {
    give_up(store, processes, pages);
    match store.save(pages) {
        Err(StoreError::Full(_)) => {}
        result => return result,
    }
    // If that was the node's first word of it, there may be some that were not asked for before.
    give_up(store, processes, pages);
    store.save(pages)
}

/// Before the node is asked: one that has no page breaks the connection.
fn give_up<R: Remote>(
    store: &mut Store<R>,
    processes: &mut BTreeMap<u64, Process>,
    pages: &[(Option<Slot>, &Bytes)],
) {
    give_up_youngest(store, processes, pages);
    if store.lacking(pages) > 0 {
        give_up_any(store, processes, pages);
    }
}

fn give_up_youngest<R: Remote>(
    store: &mut Store<R>,
    processes: &mut BTreeMap<u64, Process>,
    pages: &[(Option<Slot>, &Bytes)],
) {
    let mut lacking = store.lacking(pages);
    for process in processes.values_mut() {
        while lacking > 0
            && let Some(slot) = process.give_up_slot(|slot| store.users(slot) == 1)
        {
            store.pass_on(slot);
            lacking -= 1;
        }
    }
}

fn give_up_any<R: Remote>(
    store: &mut Store<R>,
    processes: &mut BTreeMap<u64, Process>,
    pages: &[(Option<Slot>, &Bytes)],
) {
    let mut here: BTreeMap<Slot, u32> = BTreeMap::new();
    for slot in processes.values().flat_map(Process::slots_of_pages_here) {
        *here.entry(slot).or_default() += 1;
    }
    let is_saved = |slot: Slot| pages.iter().any(|(saved, _)| *saved == Some(slot));
    let wanted: BTreeSet<Slot> = (here.into_iter())
        .filter(|(slot, pages)| *pages == store.users(*slot) && !is_saved(*slot))
        .map(|(slot, _)| slot)
        .take(AT_ONCE)
        .collect();
    for process in processes.values_mut() {
        for slot in process.give_up_slots(|slot| wanted.contains(&slot)) {
            store.pass_on(slot);
        }
    }
}

#[cfg(test)]
mod tests;
