//! The swap space at the memory node: which of its pages are taken, by how many processes, and what must come back from each.
//!
//! # Invariants
//! * A page of the space that more than one process counts on is never overwritten.
//! * What a load brings is what the last store sent, or it is an error: a keyed hash of each stored page is kept here (SipHash-1-3, 128 bits, with a key
//!   that the node does not have). The same hash tells that a page that leaves is still the one that is stored.

use super::wire::PAGE;
use cuttlefs_common::odrp::{RemoteError, RemotePages};
use cuttlefs_common::world::{Random, SystemRandom};
use siphasher::sip128::{Hasher128, SipHasher13};
use std::hash::Hasher;

/// A page's bytes.
pub type Bytes = [u8; PAGE];

/// Times that an operation is tried whose connection broke.
const TRIES: u32 = 3;
/// Pages that nobody counts on any more, before they are given back to the node.
const GARBAGE_MAX: usize = 64;

/// A page of the swap space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Slot(u64);

/// Why pages cannot be kept at the node.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// There is no room.
    #[error(
        "the memory node takes no more pages ({0}); give the swap space (--size) or the node more, or the program a larger --limit"
    )]
    Full(String),
    /// What is there cannot be had.
    #[error("the memory node is gone, and with it the program's memory there: {0}")]
    Gone(RemoteError),
    /// Other bytes came than were stored.
    #[error(
        "the memory node gave other bytes than were stored; see whether its memory is sound, and who else can write it"
    )]
    Wrong,
}

/// Where the pages lie. A trait, so that the rest is tested without a node.
pub trait Remote {
    /// Stores pages, in any order.
    ///
    /// # Errors
    /// One of them is not stored.
    fn store(&mut self, pages: &[(u64, &Bytes)]) -> Result<(), RemoteError>;

    /// Loads a page.
    ///
    /// # Errors
    /// It cannot be had.
    fn load(&mut self, page: u64) -> Result<Box<Bytes>, RemoteError>;

    /// Gives pages back.
    ///
    /// # Errors
    /// The node is gone.
    fn forget(&mut self, pages: &[u64]) -> Result<(), RemoteError>;
}

/// Runs `operation`, again if the connection broke and was made anew.
fn again<T>(mut operation: impl FnMut() -> Result<T, RemoteError>) -> Result<T, RemoteError> {
    for _ in 1..TRIES {
        match operation() {
            Err(RemoteError::Cut) => {}
            result => return result,
        }
    }
    operation()
}

/// Has all operations outstanding at once, as far as there are slots.
fn pipelined<T: Copy>(
    pages: &mut RemotePages,
    all: &[T],
    begin: impl Fn(&mut RemotePages, T) -> Result<(), RemoteError>,
) -> Result<(), RemoteError> {
    for one in all {
        loop {
            match begin(pages, *one) {
                Err(RemoteError::Full) => drop(pages.finish_any()?),
                Ok(()) => break,
                Err(error) => {
                    // The others are none of this error's; what comes of them is seen when all are tried again.
                    while pages.finish_any().is_ok_and(|done| done.is_some()) {}
                    return Err(error);
                }
            }
        }
    }
    while pages.finish_any()?.is_some() {}
    Ok(())
}

impl Remote for RemotePages {
    fn store(&mut self, pages: &[(u64, &Bytes)]) -> Result<(), RemoteError> {
        again(|| pipelined(self, pages, |own, (page, bytes)| own.begin_store(page, bytes).map(drop)))
    }

    fn load(&mut self, page: u64) -> Result<Box<Bytes>, RemoteError> {
        let mut bytes = Box::new([0; PAGE]);
        again(|| RemotePages::load(self, page, &mut *bytes))?;
        Ok(bytes)
    }

    fn forget(&mut self, pages: &[u64]) -> Result<(), RemoteError> {
        again(|| {
            // One whose chain ran before the connection broke is forgotten already.
            let stored: Vec<u64> = pages.iter().copied().filter(|page| self.is_stored(*page)).collect();
            pipelined(self, &stored, |own, page| own.begin_invalidate(page).map(drop))
        })
    }
}

/// What is counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreFigures {
    /// Pages that were sent to the node.
    pub stores: u64,
    /// Pages that left and were still as they were stored.
    pub unchanged: u64,
    /// Pages that came from the node.
    pub loads: u64,
    /// Pages that were given back to it.
    pub forgotten: u64,
    /// The most pages that were there at once.
    pub most: u64,
}

/// The swap space.
pub struct Store<R> {
    remote: R,
    key: [u8; 16],
    /// How many processes count on each slot. It grows as slots are taken for the first time, up to `slots`.
    users: Vec<u32>,
    hashes: Vec<u128>,
    slots: u64,
    /// Slots that are not stored.
    free: Vec<u64>,
    /// Stored, and nobody counts on them.
    garbage: Vec<u64>,
    figures: StoreFigures,
}

impl<R: Remote> Store<R> {
    /// A swap space of so many pages.
    pub fn new(remote: R, slots: u64) -> Self {
        let mut key = [0; 16];
        for half in key.as_chunks_mut::<8>().0 {
            *half = SystemRandom.next_u64().to_ne_bytes();
        }
        Self {
            remote,
            key,
            users: Vec::new(),
            hashes: Vec::new(),
            slots,
            free: Vec::new(),
            garbage: Vec::new(),
            figures: StoreFigures::default(),
        }
    }

    /// What is counted.
    pub fn figures(&self) -> StoreFigures {
        self.figures
    }

    fn hash(&self, bytes: &Bytes) -> u128 {
        let mut hasher = SipHasher13::new_with_key(&self.key);
        hasher.write(bytes);
        hasher.finish128().as_u128()
    }

    /// Another process counts on a slot.
    pub fn hold(&mut self, slot: Slot) {
        self.users[slot.0 as usize] += 1;
    }

    /// A process no longer counts on a slot.
    pub fn release(&mut self, slot: Slot) {
        let users = &mut self.users[slot.0 as usize];
        *users -= 1;
        if *users == 0 {
            self.garbage.push(slot.0);
        }
    }

    fn take(&mut self) -> Result<Slot, StoreError> {
        let next = self.users.len() as u64;
        // One that is stored first: it needs no free page of the node.
        let slot = match self.garbage.pop().or_else(|| self.free.pop()) {
            Some(slot) => slot,
            None if next < self.slots => {
                self.users.push(0);
                self.hashes.push(0);
                next
            }
            None => {
                return Err(StoreError::Full(format!(
                    "all {} pages of the swap space are taken",
                    self.slots
                )));
            }
        };
        self.users[slot as usize] = 1;
        self.figures.most =
            self.figures.most.max((self.users.len() - self.free.len() - self.garbage.len()) as u64);
        Ok(Slot(slot))
    }

    /// Stores pages that leave; each may have a slot from before, which is the caller's. Returns the slots that they have now.
    ///
    /// # Errors
    /// `StoreError`; the space is not to be used any more.
    pub fn save(&mut self, pages: &[(Option<Slot>, &Bytes)]) -> Result<Vec<Slot>, StoreError> {
        let mut slots = Vec::with_capacity(pages.len());
        let mut sent = Vec::with_capacity(pages.len());
        for (slot, bytes) in pages {
            let hash = self.hash(bytes);
            let slot = match *slot {
                Some(slot) if self.hashes[slot.0 as usize] == hash => {
                    self.figures.unchanged += 1;
                    slots.push(slot);
                    continue;
                }
                Some(slot) if self.users[slot.0 as usize] == 1 => slot,
                Some(shared) => {
                    self.release(shared);
                    self.take()?
                }
                None => self.take()?,
            };
            self.hashes[slot.0 as usize] = hash;
            slots.push(slot);
            sent.push((slot.0, *bytes));
        }
        self.figures.stores += sent.len() as u64;
        self.remote.store(&sent).map_err(|error| match error {
            RemoteError::Budget(_) | RemoteError::Empty => StoreError::Full(error.to_string()),
            error => StoreError::Gone(error),
        })?;
        Ok(slots)
    }

    /// Loads a page.
    ///
    /// # Errors
    /// `StoreError`.
    pub fn load(&mut self, slot: Slot) -> Result<Box<Bytes>, StoreError> {
        let bytes = self.remote.load(slot.0).map_err(StoreError::Gone)?;
        self.figures.loads += 1;
        if self.hash(&bytes) == self.hashes[slot.0 as usize] { Ok(bytes) } else { Err(StoreError::Wrong) }
    }

    /// Gives back to the node what nobody counts on, if it is much.
    ///
    /// # Errors
    /// The node is gone.
    pub fn tidy(&mut self) -> Result<(), StoreError> {
        if self.garbage.len() < GARBAGE_MAX {
            return Ok(());
        }
        self.remote.forget(&self.garbage).map_err(StoreError::Gone)?;
        self.figures.forgotten += self.garbage.len() as u64;
        self.free.append(&mut self.garbage);
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::collections::HashMap;

    /// Pages in a map.
    #[derive(Debug, Default)]
    pub(in crate::swap) struct Map {
        pub(in crate::swap) pages: HashMap<u64, Bytes>,
        pub(in crate::swap) stores: usize,
    }

    impl Remote for Map {
        fn store(&mut self, pages: &[(u64, &Bytes)]) -> Result<(), RemoteError> {
            self.stores += pages.len();
            self.pages.extend(pages.iter().map(|(page, bytes)| (*page, **bytes)));
            Ok(())
        }

        fn load(&mut self, page: u64) -> Result<Box<Bytes>, RemoteError> {
            self.pages.get(&page).map(|bytes| Box::new(*bytes)).ok_or(RemoteError::NotMapped(page))
        }

        fn forget(&mut self, pages: &[u64]) -> Result<(), RemoteError> {
            self.pages.retain(|page, _| !pages.contains(page));
            Ok(())
        }
    }

    #[test]
    fn a_page_that_two_count_on_is_not_overwritten() {
        let mut store = Store::new(Map::default(), 10);
        let (one, two) = ([1; PAGE], [2; PAGE]);
        let slot = store.save(&[(None, &one)]).expect("stored")[0];
        store.hold(slot);
        let other = store.save(&[(Some(slot), &two)]).expect("stored")[0];
        assert_ne!(slot, other);
        assert_eq!((*store.load(slot).expect("loaded"), *store.load(other).expect("loaded")), (one, two));
        // Now it is the only one's.
        let same = store.save(&[(Some(slot), &two)]).expect("stored")[0];
        assert_eq!(same, slot);
        assert_eq!(*store.load(slot).expect("loaded"), two);
    }

    #[test]
    fn what_did_not_change_is_not_sent_and_what_changed_there_is_refused() {
        let mut store = Store::new(Map::default(), 10);
        let bytes = [7; PAGE];
        let slot = store.save(&[(None, &bytes)]).expect("stored")[0];
        assert_eq!(store.save(&[(Some(slot), &bytes)]).expect("stored"), [slot]);
        assert_eq!((store.remote.stores, store.figures().unchanged), (1, 1));
        store.remote.pages.get_mut(&slot.0).expect("there")[4095] ^= 1;
        assert!(matches!(store.load(slot), Err(StoreError::Wrong)));
    }

    #[test]
    fn a_full_space_says_so_and_what_is_released_is_used_again() {
        let mut store = Store::new(Map::default(), 100);
        let bytes = [7; PAGE];
        let slots = store.save(&[(None, &bytes); 100]).expect("stored");
        let full = store.save(&[(None, &bytes)]).expect_err("full").to_string();
        assert!(full.contains("all 100 pages") && full.contains("--size"), "{full}");
        slots.iter().for_each(|slot| store.release(*slot));
        store.tidy().expect("tidy");
        assert!(store.remote.pages.is_empty());
        assert_eq!(store.save(&[(None, &bytes); 100]).expect("stored").len(), 100);
        assert_eq!(store.figures().most, 100);
    }
}
