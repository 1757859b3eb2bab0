//! The swap space at the memory node: which of its pages are taken, by how many processes, and what must come back from each.
//!
//! # Places
//! A page that came back keeps its place (`Slot`), so that it need not be stored again if it is unchanged when it leaves. Where places are few, whoever saves
//! pages first gives up those of pages that are here (`lacking`; `Swapper::save`): they are stored at the node, so what comes to them is a mapped store, which
//! needs no free page of the node's, and giving a place on costs no request of its own. Places that nobody counts on for other reasons are used in the same
//! way, and given back to the node (the invalidate chain), 64 at a time, if they are not used.
//!
//! # Invariants
//! * A page of the space that more than one process counts on is never overwritten.
//! * What a load brings is what the last store sent, or it is an error: a keyed hash of each stored page is kept here (SipHash-1-3, 128 bits, with a key
//!   that the node does not have). The same hash tells that a page that leaves is still the one that is stored.

use super::remote::Remote;
use super::wire::PAGE;
use cuttlefs_common::odrp::RemoteError;
use cuttlefs_common::world::{Random, SystemRandom};
use siphasher::sip128::{Hasher128, SipHasher13};
use std::hash::Hasher;

/// A page's bytes.
pub type Bytes = [u8; PAGE];

/// Pages that nobody counts on any more, before they are given back to the node.
const GARBAGE_MAX: usize = 64;

/// A page of the swap space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Slot(u64);

/// Why pages cannot be kept at the node.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// There is no room. Nothing has changed here.
    #[error(
        "the memory node takes no more pages ({0}); give the swap space or the node more memory (--size), or the program a larger --limit"
    )]
    Full(String),
    /// What is there cannot be had.
    #[error(
        "the memory node is gone, or has let this client go because it was silent (stopped?) for too long, and with it the program's memory there: {0}"
    )]
    Gone(RemoteError),
    /// Other bytes came than were stored.
    #[error(
        "the memory node gave other bytes than were stored; see whether its memory is sound, and who else can write it"
    )]
    Wrong,
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
    /// Places that pages which had come back gave up for others.
    pub passed_on: u64,
    /// The most pages that were there at once.
    pub most: u64,
}

impl StoreFigures {
    /// Requests to the node for each page that was moved: 1 where no place is given back to it.
    pub fn requests_a_page(&self) -> f64 {
        let moved = self.stores + self.loads;
        (moved + self.forgotten) as f64 / moved.max(1) as f64
    }
}

/// What a page that leaves needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    /// Nothing: it is there as it is.
    Nothing(Slot),
    /// To be stored over what was there.
    Over(Slot),
    /// A place. One that it had is other processes', too, and is theirs alone then.
    Place(Option<Slot>),
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
    /// The node has refused a further page, since it last got one back.
    is_node_full: bool,
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
            is_node_full: false,
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

    /// How many processes count on a slot.
    pub(super) fn users(&self, slot: Slot) -> u32 {
        self.users[slot.0 as usize]
    }

    /// A page that is in a process's memory gives up its slot for another page.
    pub(super) fn pass_on(&mut self, slot: Slot) {
        self.figures.passed_on += u64::from(self.users(slot) == 1);
        self.release(slot);
    }

    /// Places that can be taken.
    fn ready(&self) -> u64 {
        let unstored = self.free.len() as u64 + self.slots - self.users.len() as u64;
        self.garbage.len() as u64 + unstored
    }

    /// Places that should be given up before these pages are saved, if all of them have changed.
    pub(super) fn lacking(&self, pages: &[(Option<Slot>, &Bytes)]) -> usize {
        let needed = pages.iter().filter(|(slot, _)| slot.is_none_or(|slot| self.users(slot) > 1)).count();
        // One that is not stored needs a further page of the node.
        let ready = if self.is_node_full { self.garbage.len() as u64 } else { self.ready() };
        needed.saturating_sub(usize::try_from(ready).unwrap_or(usize::MAX))
    }

    fn need(&self, slot: Option<Slot>, hash: u128) -> Need {
        match slot {
            Some(slot) if self.hashes[slot.0 as usize] == hash => Need::Nothing(slot),
            Some(slot) if self.users(slot) == 1 => Need::Over(slot),
            slot => Need::Place(slot),
        }
    }

    /// Takes a place, if there is one.
    fn take(&mut self) -> Option<Slot> {
        let next = self.users.len() as u64;
        // One that is stored first: it needs no free page of the node.
        let slot = self.garbage.pop().or_else(|| self.free.pop()).or_else(|| {
            (next < self.slots).then(|| {
                self.users.push(0);
                self.hashes.push(0);
                next
            })
        })?;
        self.users[slot as usize] = 1;
        Some(Slot(slot))
    }

    /// Nobody counts on the places that were taken for these needs.
    fn put_back(&mut self, needs: &[Need], slots: &[Option<Slot>]) {
        for (need, slot) in needs.iter().zip(slots) {
            if let (Need::Place(_), Some(slot)) = (need, slot) {
                self.users[slot.0 as usize] = 0;
                let list = if self.remote.is_stored(slot.0) { &mut self.garbage } else { &mut self.free };
                list.push(slot.0);
            }
        }
    }

    /// Stores pages that leave; each may have a slot from before, which is the caller's. Returns the slots that they have now.
    ///
    /// # Errors
    /// `StoreError`. `Full`: it may be tried again when places were given up. Otherwise the space is not to be used any more.
    pub fn save(&mut self, pages: &[(Option<Slot>, &Bytes)]) -> Result<Vec<Slot>, StoreError> {
        let hashes: Vec<u128> = pages.iter().map(|(_, bytes)| self.hash(bytes)).collect();
        let needs: Vec<Need> =
            pages.iter().zip(&hashes).map(|((slot, _), hash)| self.need(*slot, *hash)).collect();
        let slots: Vec<Option<Slot>> = (needs.iter())
            .map(|need| match *need {
                Need::Nothing(slot) | Need::Over(slot) => Some(slot),
                Need::Place(_) => self.take(),
            })
            .collect();
        let Some(slots) = slots.iter().copied().collect::<Option<Vec<Slot>>>() else {
            self.put_back(&needs, &slots);
            return Err(StoreError::Full(format!("all {} pages of the swap space are taken", self.slots)));
        };
        let all = needs.iter().zip(&slots).zip(pages);
        let sent: Vec<(u64, &Bytes)> = all
            .filter(|((need, _), _)| !matches!(need, Need::Nothing(_)))
            .map(|((_, slot), (_, bytes))| (slot.0, *bytes))
            .collect();
        if let Err(error) = self.remote.store(&sent) {
            let (RemoteError::Budget(_) | RemoteError::Empty) = error else {
                return Err(StoreError::Gone(error));
            };
            self.is_node_full = true;
            self.put_back(&needs, &slots.into_iter().map(Some).collect::<Vec<_>>());
            return Err(StoreError::Full(error.to_string()));
        }
        self.figures.stores += sent.len() as u64;
        self.figures.unchanged += (pages.len() - sent.len()) as u64;
        for ((slot, hash), need) in slots.iter().zip(hashes).zip(needs) {
            self.hashes[slot.0 as usize] = hash;
            if let Need::Place(Some(shared)) = need {
                self.release(shared);
            }
        }
        self.figures.most =
            self.figures.most.max((self.users.len() - self.free.len() - self.garbage.len()) as u64);
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
        // It has room for so many, if no other client is faster.
        self.is_node_full = false;
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests;
