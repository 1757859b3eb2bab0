//! The locks of a mount's owners, and the open files that they were taken through.

use crate::session::ServerOpen;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::locks::{HeldLock, LockList, LockOwner, LockRange, LockSpace};
use std::collections::HashMap;
use std::sync::Arc;

/// What one owner has locked of one file, in one space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Owned {
    pub(super) ino: InodeNo,
    pub(super) space: LockSpace,
    pub(super) owner: LockOwner,
}

/// What an owner had of a range before a request that makes it less was sent.
#[derive(Clone, Debug, Default)]
pub(super) struct Before {
    /// The session it was held in.
    session: u64,
    held: Vec<HeldLock<LockOwner>>,
    pub(super) through: Option<Arc<ServerOpen>>,
}

/// See the module.
#[derive(Default)]
pub(super) struct Held {
    /// Whose server knows what is here.
    pub(super) session: u64,
    pub(super) lists: HashMap<(InodeNo, LockSpace), LockList<LockOwner>>,
    /// The open file each owner used last: with its end go locks the kernel says nothing more of.
    pub(super) through: HashMap<Owned, Arc<ServerOpen>>,
}

impl Held {
    /// What is held of a file.
    pub(super) fn list(&self, ino: InodeNo, space: LockSpace) -> Option<&LockList<LockOwner>> {
        self.lists.get(&(ino, space))
    }

    /// An owner holds this, in the place of what he held of its range.
    pub(super) fn set(&mut self, Owned { ino, space, .. }: Owned, lock: HeldLock<LockOwner>) {
        self.lists.entry((ino, space)).or_default().set(lock);
    }

    /// Takes out what an owner has of a range.
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

    /// The request did not do that after all.
    pub(super) fn put_back(&mut self, owned: Owned, before: Before) {
        // A server that has followed did not hear of it.
        if before.session == self.session && !before.held.is_empty() {
            for held in before.held {
                self.set(owned, held);
            }
            if let Some(through) = before.through {
                self.through.insert(owned, through);
            }
        }
    }

    /// Whether this mount has locks on the file that nobody gives up but the close of an open file.
    pub(super) fn others_go_with_a_close(&self, Owned { ino, space, owner }: Owned) -> bool {
        let held = self.lists.get(&(ino, space)).filter(|_| space == LockSpace::Whole);
        held.is_some_and(|list| list.iter().any(|held| held.holder != owner))
    }

    /// Forgets what an owner has of a range.
    pub(super) fn clear(&mut self, Owned { ino, space, owner }: Owned, range: LockRange) {
        let Some(list) = self.lists.get_mut(&(ino, space)) else {
            // What it was taken through is kept for a lock that was lost.
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
