//! One process whose memory is swapped: what is known of each of its pages.
//!
//! # A page
//! ```text
//!            fault                    Take            flush
//! (nothing) -------> Resident -----> Leaving -> Left -------> Stored
//!                       ^  ^----- held --+        |              |
//!                       +------------- fault -----+--------------+
//! ```
//! A page of which nothing is known is all zeros: never touched, given up, or it left as zeros. `Left` is the second chance: the page is no longer the
//! program's, but its bytes are still here; a fault brings it back without the node, and behind all others (segmented FIFO: Turner and Levy, 1981).
//!
//! # Invariants
//! * The bytes of a page that is `Left` or `Stored` cannot change: the program has no such page.
//! * Messages of the kernel are looked at in their order, and before the page that a call was refused for is looked at again.

use super::remote::Remote;
use super::store::{Bytes, Slot, Store};
use super::sys::{Message, Uffd};
use super::wire::PAGE;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Entries of a queue that are out of date, beside one for each page of it.
const STALE_MAX: usize = 1024;

/// What is known of a page.
#[derive(Clone, Debug)]
pub(super) enum State {
    /// The program has it. The slot, if there is one, had its bytes once.
    Resident(Option<Slot>),
    /// The process was asked for it.
    Leaving(Option<Slot>),
    /// Its bytes are here.
    Left(Arc<Bytes>, Option<Slot>),
    /// Its bytes are at the node.
    Stored(Slot),
}

impl State {
    fn slot(&self) -> Option<Slot> {
        match self {
            Self::Resident(slot) | Self::Leaving(slot) | Self::Left(_, slot) => *slot,
            Self::Stored(slot) => Some(*slot),
        }
    }
}

/// A page's state, and the number of its last change: a queue's entry with another number is out of date.
#[derive(Clone, Debug)]
struct Page {
    state: State,
    change: u64,
}

/// The way to a process.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) socket: OwnedFd,
    pub(super) pid: i32,
    pub(super) staging: u64,
    /// The thread that answers, once it has said that it is there.
    pub(super) thread: Option<u32>,
}

/// A process.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) uffd: Uffd,
    /// `None`: it was forked, and has not said hello yet.
    pub(super) link: Option<Link>,
    /// Where the process, and each that is forked from it, looks for its number.
    badge: u64,
    /// Pages that threads wait for.
    pub(super) waiting: VecDeque<u64>,
    /// `Some`: a fork of its waits for a descriptor (`spares`). What the kernel told behind the fork, and told first.
    pub(super) behind_fork: Option<Vec<Message>>,
    pages: BTreeMap<u64, Page>,
    changes: u64,
    resident: VecDeque<(u64, u64)>,
    resident_count: usize,
    /// Of these, those that have kept a slot.
    kept: VecDeque<(u64, u64)>,
    left: VecDeque<(u64, u64)>,
    left_count: usize,
    /// The pages that the process was asked for, by their places in the `Take`; `None`: given up meanwhile.
    pub(super) leaving: Vec<Option<u64>>,
}

impl Process {
    pub(super) fn new(uffd: Uffd, link: Option<Link>, badge: u64) -> Self {
        Self {
            uffd,
            link,
            badge,
            waiting: VecDeque::new(),
            behind_fork: None,
            pages: BTreeMap::new(),
            changes: 0,
            resident: VecDeque::new(),
            resident_count: 0,
            kept: VecDeque::new(),
            left: VecDeque::new(),
            left_count: 0,
            leaving: Vec::new(),
        }
    }

    pub(super) fn get(&self, page: u64) -> Option<&State> {
        self.pages.get(&page).map(|page| &page.state)
    }

    /// Whether a fork of its waits for a descriptor. Until then the kernel refuses to bring pages.
    pub(super) fn waits_in_fork(&self) -> bool {
        self.behind_fork.is_some()
    }

    /// Pages that the program has.
    pub(super) fn resident(&self) -> usize {
        self.resident_count
    }

    /// Pages whose bytes are here.
    pub(super) fn left(&self) -> usize {
        self.left_count
    }

    fn count(&mut self, state: &State, by: isize) {
        let count = match state {
            State::Resident(_) | State::Leaving(_) => &mut self.resident_count,
            State::Left(..) => &mut self.left_count,
            State::Stored(_) => return,
        };
        *count = count.saturating_add_signed(by);
    }

    /// Changes what is known of a page; its slot goes over to the new state, or to the caller.
    pub(super) fn set(&mut self, page: u64, state: State) {
        self.take(page);
        self.changes += 1;
        let change = self.changes;
        self.count(&state, 1);
        match state {
            State::Resident(slot) => {
                self.resident.push_back((page, change));
                self.kept.extend(slot.map(|_| (page, change)));
            }
            State::Left(..) => self.left.push_back((page, change)),
            State::Leaving(_) | State::Stored(_) => {}
        }
        self.pages.insert(page, Page { state, change });
        self.shorten();
    }

    /// Drops queues' entries that are out of date, if they are many: a program that takes and gives up memory all the time makes one each time.
    fn shorten(&mut self) {
        let pages = &self.pages;
        let is_last =
            |(page, change): &(u64, u64)| pages.get(page).is_some_and(|page| page.change == *change);
        let (resident, left) = (self.resident_count, self.left_count);
        for (queue, count) in
            [(&mut self.resident, resident), (&mut self.kept, resident), (&mut self.left, left)]
        {
            if queue.len() > 2 * count + STALE_MAX {
                queue.retain(is_last);
            }
        }
    }

    /// Forgets a page; its slot is the caller's.
    pub(super) fn take(&mut self, page: u64) -> Option<State> {
        let state = self.pages.remove(&page)?.state;
        self.count(&state, -1);
        Some(state)
    }

    /// The pages that have been the program's for longest, which are to leave now.
    pub(super) fn oldest(&mut self, most: usize) -> Vec<u64> {
        let mut found = Vec::new();
        while found.len() < most
            && let Some((page, change)) = self.resident.pop_front()
        {
            if let Some(Page { state: State::Resident(slot), change: last }) = self.pages.get_mut(&page)
                && *last == change
            {
                let slot = *slot;
                self.set(page, State::Leaving(slot));
                found.push(page);
            }
        }
        found
    }

    /// The pages that have been here for longest, with their bytes.
    pub(super) fn longest_left(&mut self, most: usize) -> Vec<(u64, Arc<Bytes>, Option<Slot>)> {
        let mut found = Vec::new();
        while found.len() < most
            && let Some((page, change)) = self.left.pop_front()
        {
            if let Some(Page { state: State::Left(bytes, slot), change: last }) = self.pages.get(&page)
                && *last == change
            {
                found.push((page, bytes.clone(), *slot));
            }
        }
        found
    }

    /// Has the page that came back last, and has kept a slot of which `may` says so, give it up; it is the caller's. That page will stay for longest, so its
    /// slot is of use last.
    pub(super) fn give_up_slot(&mut self, may: impl Fn(Slot) -> bool) -> Option<Slot> {
        while let Some((page, _)) = self.kept.pop_back() {
            // An entry that is out of date is before the page's last one.
            if let Some(Page { state: State::Resident(kept), .. }) = self.pages.get_mut(&page)
                && let Some(slot) = kept.take_if(|slot| may(*slot))
            {
                return Some(slot);
            }
        }
        None
    }

    /// The slots of pages whose bytes are here.
    pub(super) fn slots_of_pages_here(&self) -> impl Iterator<Item = Slot> {
        self.pages.values().filter_map(|page| match page.state {
            State::Resident(slot) | State::Left(_, slot) => slot,
            State::Leaving(_) | State::Stored(_) => None,
        })
    }

    /// Has pages whose bytes are here give up those of their slots of which `is_wanted` says so; they are the caller's.
    pub(super) fn give_up_slots(&mut self, is_wanted: impl Fn(Slot) -> bool) -> Vec<Slot> {
        let kept = self.pages.values_mut().filter_map(|page| match &mut page.state {
            State::Resident(slot) | State::Left(_, slot) => slot.take_if(|slot| is_wanted(*slot)),
            State::Leaving(_) | State::Stored(_) => None,
        });
        kept.collect()
    }

    /// Shows the process its number, if this is the page where it looks for it. It is no page of the program's: nothing is known of it, and it never leaves.
    pub(super) fn show(&self, page: u64, number: u64) -> bool {
        if page != self.badge {
            return false;
        }
        let mut bytes = [0; PAGE];
        bytes[..size_of::<u64>()].copy_from_slice(&number.to_ne_bytes());
        // If it is still missing (the kernel has more to tell first), the process looks once more.
        let _ = self.uffd.put(page, &bytes);
        let _ = self.uffd.wake(page);
        true
    }

    /// Gives the process's own thread a new page where it waits for one that it was asked for: it takes it as it is then. Nobody else may wait there, but
    /// for pages that were given up: those that the thread has moved away are not missed by itself.
    pub(super) fn help(&mut self, page: u64, asked: &[u64]) {
        if self.uffd.put(page, &[0; PAGE]).is_ok()
            && let Some(place) = asked.iter().position(|one| *one == page)
            && self.leaving.get(place).is_some_and(Option::is_none)
        {
            self.set(page, State::Leaving(None));
            self.leaving[place] = Some(page);
        }
        // If it is still missing (the kernel has more to tell first), the thread asks once more.
        let _ = self.uffd.wake(page);
    }

    /// The contents of a range are given up.
    pub(super) fn give_up<R: Remote>(&mut self, from: u64, to: u64, store: &mut Store<R>) {
        let gone: Vec<u64> = self.pages.range(from..to).map(|(page, _)| *page).collect();
        for page in gone {
            if let Some(slot) = self.take(page).and_then(|state| state.slot()) {
                store.release(slot);
            }
        }
        for page in self.leaving.iter_mut().filter(|page| page.is_some_and(|page| (from..to).contains(&page)))
        {
            *page = None;
        }
    }

    /// The pages of a range are elsewhere now.
    pub(super) fn remap<R: Remote>(&mut self, from: u64, to: u64, len: u64, store: &mut Store<R>) {
        let moved: Vec<u64> =
            self.pages.range(from..from.saturating_add(len)).map(|(page, _)| *page).collect();
        let moved: Vec<(u64, State)> =
            moved.into_iter().filter_map(|page| Some((page - from + to, self.take(page)?))).collect();
        let leaving = std::mem::take(&mut self.leaving);
        self.give_up(to, to.saturating_add(len), store);
        let is_inside = |page: &u64| (from..from.saturating_add(len)).contains(page);
        self.leaving = leaving
            .into_iter()
            .map(|page| page.map(|page| if is_inside(&page) { page - from + to } else { page }))
            .collect();
        for (page, state) in moved {
            self.set(page, state);
        }
    }

    /// The process that was forked from this one has its pages, and both count on the slots.
    pub(super) fn fork<R: Remote>(&self, uffd: Uffd, store: &mut Store<R>) -> Self {
        for slot in self.pages.values().filter_map(|page| page.state.slot()) {
            store.hold(slot);
        }
        Self {
            pages: self.pages.clone(),
            changes: self.changes,
            resident: self.resident.clone(),
            resident_count: self.resident_count,
            kept: self.kept.clone(),
            left: self.left.clone(),
            left_count: self.left_count,
            leaving: self.leaving.clone(),
            ..Self::new(uffd, None, self.badge)
        }
    }

    /// The process is gone.
    pub(super) fn end<R: Remote>(&mut self, store: &mut Store<R>) {
        self.give_up(0, u64::MAX, store);
    }

    /// The address of a place in the staging area.
    pub(super) fn staged(staging: u64, place: usize) -> u64 {
        staging + (place * PAGE) as u64
    }
}

#[cfg(test)]
pub(super) mod tests;
