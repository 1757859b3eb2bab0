//! The groups of a user in the server's own user database. They are needed for users that clients speak for and whose rights the server checks.
//!
//! The database is NSS (files, LDAP, any source of the machine). A lookup over a network may take a while, so answers are remembered for `KEPT_FOR`.
//!
//! # Failure
//! A user that the database does not know, or cannot look up, is in no group but the one its request names.

use nix::unistd::{Uid, User, getgrouplist};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ffi::CString;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long an answer is used. A change of a user's groups counts after this time at the latest.
const KEPT_FOR: Duration = Duration::from_secs(60);
/// How many users are remembered. When there is one more, all are forgotten.
const REMEMBERED: usize = 4096;

/// A function that looks up a user's groups.
type Look = Box<dyn Fn(u32) -> Vec<u32> + Send + Sync>;

/// The groups of a user, and when they were looked up.
type Known = (Arc<[u32]>, Instant);

/// The groups of users.
pub struct Accounts {
    look: Look,
    known: Mutex<HashMap<u32, Known>>,
}

impl Default for Accounts {
    /// Uses this machine's user database.
    fn default() -> Self {
        Self::by(Box::new(|uid| {
            let found = User::from_uid(Uid::from_raw(uid)).ok().flatten();
            let groups = found.and_then(|user| {
                let name = CString::new(user.name).ok()?;
                getgrouplist(&name, user.gid).ok()
            });
            groups.unwrap_or_default().into_iter().map(|gid| gid.as_raw()).collect()
        }))
    }
}

impl Accounts {
    /// Uses another function for lookups.
    pub fn by(look: Look) -> Self {
        Self { look, known: Mutex::default() }
    }

    /// The groups of a user.
    pub fn groups_of(&self, uid: u32) -> Arc<[u32]> {
        if let Some((groups, when)) = self.known.lock().get(&uid)
            && when.elapsed() < KEPT_FOR
        {
            return groups.clone();
        }
        // The lookup is done without the lock, so that it does not hold up users whose groups are known.
        let groups: Arc<[u32]> = (self.look)(uid).into();
        let mut known = self.known.lock();
        if known.len() >= REMEMBERED {
            known.clear();
        }
        known.insert(uid, (groups.clone(), Instant::now()));
        groups
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn users_are_looked_up_once_and_not_too_many_are_kept() {
        let looked = Arc::new(AtomicUsize::new(0));
        let count = looked.clone();
        let accounts = Accounts::by(Box::new(move |uid| {
            count.fetch_add(1, Ordering::Relaxed);
            vec![uid + 1]
        }));
        assert_eq!((&*accounts.groups_of(5), &*accounts.groups_of(5)), (&[6][..], &[6][..]));
        assert_eq!(looked.load(Ordering::Relaxed), 1);
        for uid in 0..2 * REMEMBERED as u32 {
            accounts.groups_of(uid);
            assert!(accounts.known.lock().len() <= REMEMBERED);
        }
    }

    #[test]
    fn root_is_in_its_group_and_nobody_knows_a_stranger() {
        let accounts = Accounts::default();
        assert!(accounts.groups_of(0).contains(&0));
        assert!(accounts.groups_of(u32::MAX - 7).is_empty());
    }
}
