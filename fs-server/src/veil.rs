//! Inode numbers for clients that may not reach every inode.
//!
//! A client names inodes by number, and numbers are small and dense: a client that is confined to a subtree could try them all and reach files
//! outside, and a client that may not search a directory could reach the inodes in it. Walking up from each named inode would not help, for a file
//! may have names in several directories. So the sessions of such clients (`rights::Grant`) are told other numbers: a keyed permutation of the 64-bit
//! numbers, a Feistel network of six rounds of SipHash-2-4 under the pool's secret. A client can use the numbers that it was told. A number that it
//! guesses is the number of some inode with a chance of the count of inodes in 2^64.
//!
//! A client that may list a directory and not search it gets numbers, too, as `d_ino` needs them. Those are not of the permutation, and `reveal`
//! finds no inode for them.
//!
//! The numbers depend on the pool's secret, the exported directory and the session's user, if it has one. They stay the same over restarts, as
//! `st_ino` must, and are of no use to another user who learns them.
//!
//! # Invariants
//! `hide` and `reveal` are inverse on every number but 0 and 1. FUSE reserves these: 1 is the exported directory if that is the pool's root, and no
//! inode otherwise. Neither function ever returns 0 or 1 for another inode.

use crate::meta::HashKey;
use crate::rpc::reply::{Body, body};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rpc::{Reply, Request};
use cuttlefs_common::status::Status;
use siphasher::sip::SipHasher24;

const ROUNDS: u8 = 6;

/// A permutation of inode numbers for one export and one user.
pub struct Veil {
    key: HashKey,
    root: InodeNo,
    /// The user to whom the numbers are told; `None` for a session that speaks for others.
    uid: Option<u32>,
}

impl Veil {
    /// The permutation of an exported directory, for a user, or for sessions that speak for others (`None`).
    pub fn new(key: HashKey, root: InodeNo, uid: Option<u32>) -> Self {
        Self { key, root, uid }
    }

    fn round(&self, round: u8, half: u32) -> u32 {
        self.hash(*b"veil", round, half)
    }

    fn hash(&self, what: [u8; 4], round: u8, half: u32) -> u32 {
        let mut input = [0; 25];
        input[..4].copy_from_slice(&what);
        input[4] = round;
        input[5..13].copy_from_slice(&self.root.0.to_le_bytes());
        input[13..17].copy_from_slice(&half.to_le_bytes());
        let user = self.uid.map_or(u64::MAX, u64::from);
        input[17..].copy_from_slice(&user.to_le_bytes());
        SipHasher24::new_with_key(&self.key.0).hash(&input) as u32
    }

    fn permute(&self, number: u64) -> u64 {
        let (mut left, mut right) = ((number >> 32) as u32, number as u32);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ self.round(round, right));
        }
        u64::from(left) << 32 | u64::from(right)
    }

    fn permute_back(&self, number: u64) -> u64 {
        let (mut left, mut right) = ((number >> 32) as u32, number as u32);
        for round in (0..ROUNDS).rev() {
            (left, right) = (right ^ self.round(round, left), left);
        }
        u64::from(left) << 32 | u64::from(right)
    }

    /// The number by which clients know an inode.
    pub fn hide(&self, ino: InodeNo) -> InodeNo {
        if ino == InodeNo::ROOT && self.root == InodeNo::ROOT {
            return ino;
        }
        // Permuting again while the result is 0 or 1 keeps this a permutation of all other numbers.
        let mut number = self.permute(ino.0);
        while number <= 1 {
            number = self.permute(number);
        }
        InodeNo(number)
    }

    /// The inode behind a client's number; 0, which is no inode, for numbers that no client was told.
    pub fn reveal(&self, ino: InodeNo) -> InodeNo {
        if ino == InodeNo::ROOT && self.root == InodeNo::ROOT {
            return ino;
        }
        if ino.0 <= 1 {
            return InodeNo(0);
        }
        let mut number = self.permute_back(ino.0);
        while number <= 1 {
            number = self.permute_back(number);
        }
        InodeNo(number)
    }

    /// A number for an inode that a client may see in a listing and may not reach. Collisions between inodes are as unlikely as with random 64-bit
    /// numbers.
    pub fn number_only(&self, ino: InodeNo) -> InodeNo {
        let half = |round| {
            self.hash(*b"only", round, (ino.0 >> 32) as u32 ^ self.hash(*b"low ", round, ino.0 as u32))
        };
        InodeNo(u64::from(half(0)) << 32 | u64::from(half(1)) | 2)
    }

    /// Replaces the inode numbers of a client's request by the server's.
    pub fn reveal_request(&self, request: &mut Request<'_>) {
        request.map_inodes(&|ino| self.reveal(ino));
    }

    /// The reply with its inode numbers replaced by the client's.
    ///
    /// # Errors
    /// `Io` if the server did not make this body.
    pub fn hide_reply(&self, encoded: &[u8]) -> Result<Body, Status> {
        let mut reply = Reply::parse(encoded).map_err(|_| Status::Io)?;
        reply.map_inodes(&|ino| self.hide(ino));
        body(&reply)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn veil(root: u64) -> Veil {
        Veil::new(HashKey(*b"sixteen byte key"), InodeNo(root), None)
    }

    #[test]
    fn numbers_come_back_and_look_like_nothing() {
        let veil = veil(9);
        let mut seen = std::collections::HashSet::new();
        for number in (2..5000).chain(u64::MAX - 100..=u64::MAX) {
            let shown = veil.hide(InodeNo(number));
            assert!(shown.0 > 1 && seen.insert(shown));
            assert_eq!(veil.reveal(shown), InodeNo(number));
            assert_eq!(veil.hide(veil.reveal(InodeNo(number))), InodeNo(number));
        }
        assert!(seen.iter().filter(|shown| shown.0 < 1 << 40).count() == 0, "dense numbers stay dense");
        assert_eq!(veil.reveal(InodeNo(0)), InodeNo(0));
        assert_eq!(veil.reveal(InodeNo::ROOT), InodeNo(0));
    }

    #[test]
    fn the_pools_root_keeps_its_number_where_it_is_exported() {
        let veil = veil(1);
        assert_eq!((veil.hide(InodeNo::ROOT), veil.reveal(InodeNo::ROOT)), (InodeNo::ROOT, InodeNo::ROOT));
        for number in 2..5000 {
            assert_eq!(veil.reveal(veil.hide(InodeNo(number))), InodeNo(number));
        }
    }

    #[test]
    fn a_number_that_is_only_a_number_leads_nowhere() {
        let veil = veil(1);
        let shown: std::collections::HashSet<_> =
            (2..5000).map(|ino| veil.number_only(InodeNo(ino))).collect();
        assert_eq!(shown.len(), 4998);
        assert!(shown.into_iter().all(|ino| ino.0 > 1 && veil.reveal(ino).0 > 1 << 20));
    }

    #[test]
    fn another_directory_or_user_has_other_numbers_and_each_its_golden_ones() {
        assert_ne!(veil(9).hide(InodeNo(77)), veil(10).hide(InodeNo(77)));
        let of_user = |uid| Veil::new(HashKey(*b"sixteen byte key"), InodeNo(9), Some(uid));
        let told = of_user(1004).hide(InodeNo(77));
        assert!(of_user(1006).reveal(told).0 > 1 << 20 && veil(9).reveal(told).0 > 1 << 20);
        // The permutation must never change: clients keep these numbers over restarts.
        assert_eq!(veil(9).hide(InodeNo(77)).0, 10_350_168_001_937_501_180);
    }
}
