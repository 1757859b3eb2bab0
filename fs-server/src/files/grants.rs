//! Write grants: what a filekey may change one-sidedly (docs/file-regions.md; FileMR section 4 for space behind the end).
//!
//! A grant is of a range of one file, for one filekey. Its pages that have bytes are in frames, and pinned there. For its other pages (holes, reserved
//! space, what is behind the end) it has frames and space of its own, which no mapping names: a WRITE or an APPEND takes them, and the end of the grant
//! gives back what is left. So a server that dies leaves no trace of a grant.
//!
//! # Invariants
//! * Grants of one filekey do not overlap; neighbours are as one.
//! * A page leaves the file only after the grants that pin it have ended.
//! * The pages of all grants are counted to their peers: a quarter of the frames is for grants. So are the grants of each file. A peer gets half of what
//!   others leave of either, administrators all of it.

use super::FileRegion;
use crate::meta::HeldLive;
use crate::pages::{Pins, PrivateFrame};
use crate::pool::space::{Run, Space};
use crate::shares::Peer;
use crate::sync::Mutex;
use cuttlefs_common::fair::Payer;
use cuttlefs_common::ids::{FileKey, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::rdma::PeerKey;
use cuttlefs_common::status::Status;
use event_listener::Event;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// One in so many frames may be held by grants.
const GRANT_FRACTION: u64 = 4;
/// Most grants of one file: a one-sided write looks for its grant in a tree of these.
pub(super) const GRANTS_PER_FILE_MAX: u64 = 1024;

/// The part of `left`, which others leave, for a peer.
fn share(left: u64, is_administrator: bool) -> u64 {
    if is_administrator { left } else { left.div_ceil(2) }
}

/// A grant of a range.
pub(super) struct WriteGrant {
    /// The byte behind the range.
    pub(super) end: u64,
    /// The pages in frames.
    pub(super) pins: Pins,
    /// Frames for pages that had no bytes.
    pub(super) spare: Vec<PrivateFrame>,
    /// Space for those of them that the file has none for, by file page.
    pub(super) space: TakenSpace,
    /// Has the engine note changes without reading the store.
    pub(super) _live: HeldLive,
    /// Its place in the peer's share.
    pub(super) pages: GrantPages,
}

/// Space that no mapping names, by the file page that it is for. What is left is given back when this is dropped.
pub(super) struct TakenSpace {
    pub(super) of: Arc<Space>,
    pub(super) pages: BTreeMap<u64, PoolPage>,
}

impl Drop for TakenSpace {
    fn drop(&mut self) {
        let runs: Vec<Run> = self.pages.values().map(|page| Run { first: *page, len: 1 }).collect();
        if !runs.is_empty() {
            self.of.give_back(&runs);
        }
    }
}

/// The grants of one file: by filekey and first byte.
#[derive(Default)]
pub(super) struct Grants(BTreeMap<(FileKey, u64), WriteGrant>);

impl std::fmt::Debug for Grants {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.iter().map(|((_, start), grant)| (start, grant.end))).finish()
    }
}

impl Grants {
    /// The grant of a filekey that has a byte.
    fn at(&self, filekey: FileKey, offset: u64) -> Option<&WriteGrant> {
        let (_, grant) = self.0.range((filekey, 0)..=(filekey, offset)).next_back()?;
        (offset < grant.end).then_some(grant)
    }

    /// Whether all of `[offset, end)` is granted.
    pub(super) fn cover(&self, filekey: FileKey, offset: u64, end: u64) -> bool {
        let mut at = offset;
        while at < end {
            match self.at(filekey, at) {
                Some(grant) => at = grant.end,
                None => return false,
            }
        }
        true
    }

    /// The frames and the pages of the pool that grants hold for pages without bytes.
    #[cfg(any(test, feature = "model-check"))]
    pub(super) fn held(&self) -> (u32, u64) {
        let held = |grant: &WriteGrant| (grant.spare.len() as u32, grant.space.pages.len() as u64);
        self.0.values().map(held).fold((0, 0), |(a, b), (c, d)| (a + c, b + d))
    }

    /// Whether the filekey has any grant.
    pub(super) fn has(&self, filekey: FileKey) -> bool {
        self.0.range((filekey, 0)..=(filekey, u64::MAX)).next().is_some()
    }

    /// The account of the peer that has the filekey's grants.
    pub(super) fn payer_of(&self, filekey: FileKey) -> Option<Payer> {
        let (_, grant) = self.0.range((filekey, 0)..=(filekey, u64::MAX)).next()?;
        Some(grant.pages.payer)
    }

    /// The last grant of a filekey that begins in a page or before it, if it has a part of the page.
    pub(super) fn of_page(&mut self, filekey: FileKey, page: u64) -> Option<&mut WriteGrant> {
        let start = page.saturating_mul(PAGE_SIZE_U64);
        let last = start.saturating_add(PAGE_SIZE_U64 - 1);
        let (_, grant) = self.0.range_mut((filekey, 0)..=(filekey, last)).next_back()?;
        (start < grant.end).then_some(grant)
    }

    /// Whether a peer may have one more grant of this file.
    fn has_room_for(&self, pages: &GrantPages) -> bool {
        let own = self.0.values().filter(|grant| grant.pages.peer == pages.peer).count() as u64;
        let left = GRANTS_PER_FILE_MAX.saturating_sub(self.0.len() as u64 - own);
        own < share(left, pages.is_administrator)
    }

    /// Adds a grant of `[offset, grant.end)` in place of those of the filekey that overlap it, if its peer may have it. Returns whether it was added, and
    /// what is to be dropped without the lock.
    pub(super) fn add(
        &mut self,
        filekey: FileKey,
        offset: u64,
        grant: WriteGrant,
    ) -> (bool, Vec<WriteGrant>) {
        let replaced = self.take(Some(filekey), offset, grant.end);
        if !self.has_room_for(&grant.pages) {
            // The replaced ones come back as they were: there is room for these.
            self.0.extend(replaced);
            return (false, vec![grant]);
        }
        self.0.insert((filekey, offset), grant);
        (true, replaced.into_iter().map(|(_, grant)| grant).collect())
    }

    /// Takes out the grants that have a byte of `[offset, end)`: those of one filekey, or all.
    fn take(&mut self, of: Option<FileKey>, offset: u64, end: u64) -> Vec<((FileKey, u64), WriteGrant)> {
        let is_hit = |(filekey, start): &(FileKey, u64), grant: &WriteGrant| {
            of.is_none_or(|of| of == *filekey) && *start < end && offset < grant.end
        };
        let hit: Vec<_> = self.0.iter().filter(|(at, grant)| is_hit(at, grant)).map(|(at, _)| *at).collect();
        hit.into_iter().filter_map(|at| self.0.remove_entry(&at)).collect()
    }
}

impl FileRegion {
    /// Ends all grants that have a byte of `[offset, end)`.
    pub(super) fn end_grants(&self, offset: u64, end: u64) {
        let ended = self.grants.lock().take(None, offset, end);
        drop(ended);
    }

    /// Ends the grants of a filekey that have a byte of `[offset, end)`.
    pub(super) fn return_grants(&self, filekey: FileKey, offset: u64, end: u64) {
        let ended = self.grants.lock().take(Some(filekey), offset, end);
        drop(ended);
    }

    /// Ends all grants of a filekey.
    pub(super) fn end_grants_of(&self, filekey: FileKey) {
        self.return_grants(filekey, 0, u64::MAX);
    }
}

/// Counts of write grants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrantFigures {
    /// Grants.
    pub grants: usize,
    /// Their pages.
    pub pages: u64,
    /// The most pages that grants may have.
    pub pages_bound: u64,
    /// The most grants of a file.
    pub of_file_bound: u64,
}

#[derive(Debug, Default)]
struct Granted {
    grants: usize,
    pages: u64,
    of_peer: HashMap<PeerKey, u64>,
}

/// The pages of all grants, by peer.
#[derive(Debug)]
pub(super) struct GrantShares {
    bound: u64,
    granted: Mutex<Granted>,
    /// Notified when the first grant is made and when the last one ends.
    first_or_last: Arc<Event>,
}

impl GrantShares {
    /// None granted, of a server with so many frames.
    pub(super) fn new(frames: u32, first_or_last: Arc<Event>) -> Arc<Self> {
        let bound = u64::from(frames) / GRANT_FRACTION;
        Arc::new(Self { bound, granted: Mutex::default(), first_or_last })
    }

    pub(super) fn figures(&self) -> GrantFigures {
        let granted = self.granted.lock();
        GrantFigures {
            grants: granted.grants,
            pages: granted.pages,
            pages_bound: self.bound,
            of_file_bound: GRANTS_PER_FILE_MAX,
        }
    }

    /// Counts the pages of one more grant. Administrators have no share but the whole.
    pub(super) fn take(
        self: &Arc<Self>,
        peer: &PeerKey,
        is_administrator: bool,
        pages: u64,
    ) -> Result<GrantPages, Status> {
        let mut granted = self.granted.lock();
        let own = granted.of_peer.get(peer).copied().unwrap_or(0);
        let left = self.bound.saturating_sub(granted.pages - own);
        if own.saturating_add(pages) > share(left, is_administrator) {
            return Err(Status::Busy);
        }
        granted.grants += 1;
        granted.pages += pages;
        *granted.of_peer.entry(peer.clone()).or_default() += pages;
        if granted.grants == 1 {
            self.first_or_last.notify(1);
        }
        Ok(GrantPages {
            shares: self.clone(),
            peer: peer.clone(),
            is_administrator,
            payer: Payer::OWN,
            pages,
        })
    }
}

/// The pages of one grant, counted to a peer.
#[derive(Debug)]
pub struct GrantPages {
    shares: Arc<GrantShares>,
    peer: PeerKey,
    is_administrator: bool,
    /// The account for changes that the engine leaves to workers.
    payer: Payer,
    pages: u64,
}

impl Drop for GrantPages {
    fn drop(&mut self) {
        let mut granted = self.shares.granted.lock();
        granted.grants -= 1;
        granted.pages -= self.pages;
        if granted.grants == 0 {
            self.shares.first_or_last.notify(1);
        }
        if let Some(own) = granted.of_peer.get_mut(&self.peer) {
            *own -= self.pages;
            if *own == 0 {
                granted.of_peer.remove(&self.peer);
            }
        }
    }
}

impl super::Files {
    /// Whether there are write grants.
    pub(super) fn has_grants(&self) -> bool {
        self.grants.figures().grants > 0
    }

    /// Takes pages for a grant from a peer's share.
    ///
    /// # Errors
    /// `Busy` if the share is used up.
    pub fn take_grant_pages(&self, peer: &Peer, pages: u64) -> Result<GrantPages, Status> {
        let taken = self.grants.take(peer.key(), peer.is_administrator(), pages);
        taken.map(|mut pages| {
            pages.payer = peer.payer();
            pages
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_leaves_room_for_others() {
        let shares = GrantShares::new(400, Arc::default());
        let (one, two, root) = (PeerKey::User(4_000_001), PeerKey::User(4_000_002), PeerKey::User(0));
        let first = shares.take(&one, false, 50).expect("half of a quarter");
        assert_eq!(shares.take(&one, false, 1).err(), Some(Status::Busy));
        let second = shares.take(&two, false, 25).expect("half of what is left");
        assert_eq!(shares.take(&two, false, 1).err(), Some(Status::Busy));
        assert_eq!(shares.take(&root, true, 26).err(), Some(Status::Busy));
        let all = shares.take(&root, true, 25).expect("all of the rest");
        assert_eq!(
            shares.figures(),
            GrantFigures { grants: 3, pages: 100, pages_bound: 100, of_file_bound: 1024 }
        );
        assert_eq!(shares.take(&one, false, u64::MAX).err(), Some(Status::Busy), "no overflow");
        drop((first, second, all));
        assert_eq!(
            shares.figures(),
            GrantFigures { grants: 0, pages: 0, pages_bound: 100, of_file_bound: 1024 }
        );
        assert!(shares.granted.lock().of_peer.is_empty());
    }
}
