//! Inodes that are kept for requests which clients ask again, and by how many slots each is.
//!
//! Which slot keeps what stands in the slots. A slot's lock is held while both change, so that what is counted here is what
//! stands there.

use super::{Session, Sessions, Slot};
use cuttlefs_common::ids::{InodeNo, SlotIndex};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Of each inode that is kept, by how many slots. At most one inode a slot of each session. Taken after a slot.
#[derive(Debug, Default)]
pub(super) struct Kept {
    slots: Mutex<BTreeMap<InodeNo, usize>>,
}

impl Kept {
    fn add(&self, ino: InodeNo) {
        *self.slots.lock().entry(ino).or_default() += 1;
    }

    /// `true`: nobody keeps it any more.
    fn remove(&self, ino: InodeNo) -> bool {
        let mut slots = self.slots.lock();
        match slots.get_mut(&ino) {
            Some(1) => slots.remove(&ino).is_some(),
            Some(count) => {
                *count -= 1;
                false
            }
            None => unreachable!("a slot lets go what it keeps: {ino}"),
        }
    }
}

impl Sessions {
    /// Keeps an inode for the first request of each of these slots, and nothing for the others. Of slots whose first request
    /// has come nothing changes. Gives what nobody keeps any more.
    pub fn keep(&self, session: &Session, wanted: &BTreeMap<SlotIndex, InodeNo>) -> Vec<InodeNo> {
        let mut let_go = Vec::new();
        session.kept_since_ms.store(self.clock.monotonic().as_millis() as u64, Ordering::Relaxed);
        for (index, slot) in (0..).map(SlotIndex).zip(&session.slots) {
            let mut slot = slot.lock();
            // Looked at under the slot's lock, which whoever ended the session takes after that: nothing is left behind.
            let ino = wanted.get(&index).copied().filter(|_| !session.is_ended());
            if let Ok(before) = slot.keep(ino) {
                ino.into_iter().for_each(|ino| self.kept.add(ino));
                let_go.extend(before.filter(|before| self.kept.remove(*before)));
            }
        }
        let_go
    }

    /// Ends what is kept for requests that have not come for a lease: their answers did, late, from the server before this one.
    /// Gives what nobody keeps any more.
    pub fn end_overdue(&self) -> Vec<InodeNo> {
        if self.kept_count() == 0 {
            return Vec::new();
        }
        let now = self.clock.monotonic().as_millis() as u64;
        let lease_ms = self.lease.as_millis() as u64;
        let is_overdue = |session: &Arc<Session>| {
            now.saturating_sub(session.kept_since_ms.load(Ordering::Relaxed)) > lease_ms
        };
        let overdue: Vec<_> = self.list().into_iter().filter(is_overdue).collect();
        overdue.iter().flat_map(|session| self.keep(session, &BTreeMap::new())).collect()
    }

    /// The first request of a slot was answered. Gives what nobody keeps any more.
    pub fn asked_again(&self, slot: &mut Slot) -> Option<InodeNo> {
        slot.let_go().filter(|ino| self.kept.remove(*ino))
    }

    /// A session has ended. Gives what nobody keeps any more.
    pub fn keep_nothing(&self, session: &Session) -> Vec<InodeNo> {
        session.slots.iter().filter_map(|slot| self.asked_again(&mut slot.lock())).collect()
    }

    /// Whether somebody keeps an inode.
    pub fn keeps(&self, ino: InodeNo) -> bool {
        self.kept.slots.lock().contains_key(&ino)
    }

    /// How many inodes are kept.
    pub fn kept_count(&self) -> usize {
        self.kept.slots.lock().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuttlefs_common::ids::ClientId;
    use cuttlefs_common::rdma::{LocalPeer, PeerIdentity};
    use cuttlefs_common::world::{ManualClock, SeededRandom};
    use std::time::Duration;

    const ONE: InodeNo = InodeNo(5);
    const OTHER: InodeNo = InodeNo(6);

    #[test]
    fn an_inode_is_kept_until_each_slot_was_asked_again_or_its_session_is_over() {
        let clock = Arc::new(ManualClock::default());
        let sessions =
            Sessions::new(clock.clone(), Arc::new(SeededRandom::new(1)), Duration::from_secs(10), &[]);
        let attach = |client| {
            sessions
                .attach(
                    ClientId(client),
                    PeerIdentity::Local(LocalPeer::root()),
                    &crate::session::root_peer(),
                    "x",
                    InodeNo::ROOT,
                )
                .expect("attach")
                .0
        };
        let (first, second) = (attach(1), attach(2));
        let keep = |session: &Session, wanted: &[(u16, InodeNo)]| {
            sessions.keep(session, &wanted.iter().map(|(slot, ino)| (SlotIndex(*slot), *ino)).collect())
        };
        let asked_again = |session: &Session, slot| {
            let mut slot = session.slot(SlotIndex(slot)).expect("a slot").lock();
            slot.admit(1, 1).expect("it is fresh");
            slot.finish(None);
            sessions.asked_again(&mut slot)
        };
        assert_eq!(keep(&first, &[(0, ONE), (1, ONE), (2, OTHER)]), []);
        assert_eq!(keep(&second, &[(0, ONE)]), []);
        assert_eq!(
            (sessions.kept_count(), sessions.keeps(ONE), sessions.keeps(InodeNo(7))),
            (2, true, false)
        );
        assert_eq!(keep(&first, &[(0, ONE), (1, ONE)]), [OTHER], "another attempt of the same client");
        assert_eq!(asked_again(&first, 0), None);
        assert_eq!(keep(&first, &[(0, OTHER), (1, ONE)]), [], "that one has its answer");
        assert!(!sessions.keeps(OTHER));
        assert_eq!(asked_again(&first, 1), None);
        sessions.end(&second);
        assert_eq!(sessions.keep_nothing(&second), [ONE]);
        assert_eq!(keep(&second, &[(1, OTHER)]), [], "it is over");
        assert_eq!((sessions.kept_count(), asked_again(&second, 0)), (0, None));
        // The answer to this one came late, and nothing else in its slot.
        assert_eq!(keep(&first, &[(2, ONE)]), []);
        clock.advance(Duration::from_secs(10));
        assert_eq!(sessions.end_overdue(), []);
        clock.advance(Duration::from_secs(1));
        assert_eq!((sessions.end_overdue(), sessions.kept_count()), (vec![ONE], 0));
    }
}
