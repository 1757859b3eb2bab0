//! The locks of a mount's owners, and the open files that they were taken through.

use crate::session::ServerOpen;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::locks::{HeldLock, LockList, LockOwner, LockRange, LockSpace};
use std::collections::HashMap;
use std::sync::Arc;

/// Names the locks of one owner on one file, in one space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Owned {
    pub(super) ino: InodeNo,
    pub(super) space: LockSpace,
    pub(super) owner: LockOwner,
}

/// The locks of an owner in a range, before a request is sent that reduces them.
#[derive(Clone, Debug, Default)]
pub(super) struct Before {
    /// The session in which they were held.
    session: u64,
    held: Vec<HeldLock<LockOwner>>,
    pub(super) through: Option<Arc<ServerOpen>>,
}

/// The held locks; see the module.
#[derive(Default)]
pub(super) struct Held {
    /// The session whose server has these locks.
    pub(super) session: u64,
    pub(super) lists: HashMap<(InodeNo, LockSpace), LockList<LockOwner>>,
    /// The open file that each owner used last: when it ends, its locks end, and the kernel says nothing more of them.
    pub(super) through: HashMap<Owned, Arc<ServerOpen>>,
}

impl Held {
    /// The locks that are held on a file.
    pub(super) fn list(&self, ino: InodeNo, space: LockSpace) -> Option<&LockList<LockOwner>> {
        self.lists.get(&(ino, space))
    }

    /// An owner holds this lock now, in place of its earlier locks in the range.
    pub(super) fn set(&mut self, Owned { ino, space, .. }: Owned, lock: HeldLock<LockOwner>) {
        self.lists.entry((ino, space)).or_default().set(lock);
    }

    /// Takes out an owner's locks in a range.
    pub(super) fn take(&mut self, owned: Owned, range: LockRange) -> Before {
        let Owned { ino, space, owner } = owned;
        let list = self.lists.get(&(ino, space));
        let overlapping = list.into_iter().flat_map(|list| list.own(owner, range));
        let clip = |held: &HeldLock<LockOwner>| {
            let range =
                LockRange { first: held.range.first.max(range.first), last: held.range.last.min(range.last) };
            HeldLock { range, ..*held }
        };
        let held = overlapping.map(clip).collect();
        let through = self.through.get(&owned).cloned();
        self.clear(owned, range);
        Before { session: self.session, held, through }
    }

    /// The request failed: puts the locks back.
    pub(super) fn put_back(&mut self, owned: Owned, before: Before) {
        // A later server has not heard of these locks.
        if before.session == self.session && !before.held.is_empty() {
            for held in before.held {
                self.set(owned, held);
            }
            if let Some(through) = before.through {
                self.through.insert(owned, through);
            }
        }
    }

    /// Whether other owners of this mount have flock locks on the file, which only the close of an open file gives up.
    pub(super) fn others_go_with_a_close(&self, Owned { ino, space, owner }: Owned) -> bool {
        let held = self.lists.get(&(ino, space)).filter(|_| space == LockSpace::Whole);
        held.is_some_and(|list| list.iter().any(|held| held.holder != owner))
    }

    /// Forgets an owner's locks in a range.
    pub(super) fn clear(&mut self, Owned { ino, space, owner }: Owned, range: LockRange) {
        let Some(list) = self.lists.get_mut(&(ino, space)) else {
            // The entry may have been kept for a lost lock only.
            self.through.remove(&Owned { ino, space, owner });
            return;
        };
        list.clear(owner, range);
        if !list.iter().any(|held| held.holder == owner) {
            self.through.remove(&Owned { ino, space, owner });
        }
        if list.is_empty() {
            self.lists.remove(&(ino, space));
        }
    }
}
