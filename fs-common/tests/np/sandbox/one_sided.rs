//! One-sided requests of hostile peers.

use super::stranger::{Feed, RECEIVE, RECEIVES};
use super::{NO_KEY, PAGES, World, fresh};
use cuttlefs_common::ids::{PAGE_SIZE, Rkey};
use cuttlefs_common::rdma::{PagedAccess, Placement, Remote, SendOp, WcStatus};

impl World {
    /// A one-sided request of a hostile peer: what the provider lets through is done at once.
    pub(super) fn one_sided(&mut self, feed: &mut Feed<'_>) {
        let who = self.stranger(feed);
        let Some(welcome) = self.welcome else { return };
        let offset = self.offset(feed);
        let (of_region, of_table) = (welcome.region.rkey.0, welcome.table_rkey);
        let rkey = match feed.below(12) {
            0 | 1 => of_table,
            2 => NO_KEY,
            3 => feed.below(40) as u32,
            _ => of_region,
        };
        let remote = Remote::Memory { rkey: Rkey(rkey), offset };
        let len = if feed.below(4) == 0 { 1 + feed.two() % RECEIVE } else { 1 + feed.below(64) };
        let number = self.number();
        let (op, len) = match feed.below(8) {
            0..4 => (SendOp::Read(remote), len),
            4 | 5 => (SendOp::Write(remote), len),
            6 => (SendOp::FetchAdd { remote, add: 1 }, 8),
            _ if feed.below(2) == 0 => (SendOp::CompareSwap { remote, expect: 0, swap: 1 }, 8),
            _ => (SendOp::Flush { remote, len: 8, placement: Placement::Visibility }, 0),
        };
        let is_resident = |page| self.region.memory().entry(page).is_resident();
        let was_resident: Vec<bool> = (0..PAGES).map(is_resident).collect();
        let stranger = &self.strangers[who];
        let at = (RECEIVES * RECEIVE) as usize;
        stranger.buffers.memory().write(at, &fresh(number, len));
        stranger.post(op, len);
        let (own, _) = stranger.take();
        let status = own.last().expect("each request completes").status;
        let mut found = vec![0; len as usize];
        stranger.buffers.memory().read(at, &mut found);
        let range = Self::range(offset, len).filter(|_| rkey == of_region);
        let may = match op {
            SendOp::Read(_) => range.is_some(),
            SendOp::Write(_) => range.is_some() && self.access == PagedAccess::ReadWrite,
            _ => false,
        };
        let table_len = self.region.memory().translated().table().len() as u64;
        let is_of_table = matches!(op, SendOp::Read(_))
            && rkey == of_table
            && offset.checked_add(len).is_some_and(|end| end <= table_len);
        if status == WcStatus::Success {
            assert!(may || is_of_table, "{op:?} of {len} bytes is done");
            self.counts.one_sided += 1;
        } else {
            assert!(!may && !is_of_table, "{op:?} of {len} bytes: {status:?}");
            self.counts.one_sided_refused += 1;
            self.settle();
            self.strangers.swap_remove(who);
            return;
        }
        // Pages that are there are read and written; the others show the signature, and swallow what is written.
        for at in range.unwrap_or_default() {
            let is_there = was_resident[at / PAGE_SIZE];
            let byte = &mut found[at - offset as usize];
            match op {
                SendOp::Read(_) if is_there => assert_eq!(*byte, self.model[at], "byte {at} of a page"),
                SendOp::Read(_) => {
                    let mut signature = [0];
                    welcome.signature.fill(at % PAGE_SIZE, &mut signature);
                    assert_eq!(*byte, signature[0], "byte {at} of a page that is not there");
                }
                _ if is_there => self.model[at] = *byte,
                _ => {}
            }
        }
    }
}
