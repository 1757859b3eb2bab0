use super::*;
use crate::session::ServerOpens;
use crate::session::locks::GrantedLock;
use crate::transport::FsError;
use cuttlefs_common::attr::Attr;
use cuttlefs_common::ids::FileKey;
use cuttlefs_common::rpc::{OpenTicket, Opened, Rights};
use std::time::Instant;

const OWNER: LockOwner = LockOwner(7);
const INO: InodeNo = InodeNo(9);
const OWNED: Owned = Owned { ino: INO, space: LockSpace::Ranges, owner: OWNER };

struct Nobody;

impl LockWaiter for Nobody {
    fn is_interrupted(&self) -> bool {
        false
    }

    fn answer(&self, _: Result<GrantedLock, FsError>) -> bool {
        true
    }
}

fn begin(locks: &OwnLocks, file: &Arc<ServerOpen>) -> WaitId {
    ask(locks, file, LockMode::Exclusive)
}

fn ask(locks: &OwnLocks, file: &Arc<ServerOpen>, mode: LockMode) -> WaitId {
    ask_in(locks, file, mode, LockSpace::Ranges)
}

/// Two opens of the same file.
fn opens() -> [Arc<ServerOpen>; 2] {
    let attr = Attr::empty_file(INO);
    let opened = Opened { filekey: FileKey(1), slot: None, attr, ticket: OpenTicket(0) };
    let opens = ServerOpens::default();
    [(); 2].map(|()| opens.add(&opened, Rights { read: true, write: true }))
}

fn ask_in(locks: &OwnLocks, file: &Arc<ServerOpen>, mode: LockMode, space: LockSpace) -> WaitId {
    let range = LockRange { first: 10, last: 19 };
    let lock = Lock { space, owner: OWNER, range, mode, pid: 1 };
    let (file, waiter, before) = (file.clone(), Arc::new(Nobody), Before::default());
    locks.begin(Wait { file, lock, blocking: true, waiter, queued: false, before })
}

#[test]
fn answers_of_a_session_that_is_over_do_not_count() {
    let locks = OwnLocks::default();
    let [file, _] = opens();
    assert_eq!(locks.begin_session(1).0, []);
    let id = begin(&locks, &file);
    // The server was replaced before the answer was noted: the caller sends its request again, and recovery does not.
    assert!(locks.begin_session(2).1.is_empty());
    assert_eq!(locks.queued(id, 1), Noted::Outdated);
    assert_eq!(locks.granted(id, 1).0, Noted::Outdated);
    assert!(!locks.is_known(OWNED));
    // Once the request is known to wait, recovery sends it to the next server.
    assert_eq!(locks.queued(id, 2), Noted::Done);
    assert_eq!(locks.begin_session(3).1.len(), 1);
    let (noted, told) = locks.granted(id, 3);
    assert!(noted == Noted::Done && told.is_some() && locks.granted(id, 3).1.is_none());
    // Held locks are reclaimed, also those that were given up at a server that is gone.
    assert_eq!(locks.cleared(OWNED, LockRange::WHOLE, 2), Noted::Outdated);
    assert_eq!(locks.begin_session(4).0.len(), 1);
    assert_eq!(locks.cleared(OWNED, LockRange::WHOLE, 4), Noted::Done);
    assert_eq!(locks.begin_session(5).0, []);
}

#[test]
fn what_a_request_under_way_makes_less_is_not_reclaimed() {
    let locks = OwnLocks::default();
    let [file, _] = opens();
    let id = begin(&locks, &file);
    assert!(locks.granted(id, 0).1.is_some());
    let reclaimed = |session| locks.begin_session(session).0.iter().map(|held| held.lock).collect::<Vec<_>>();
    let whole = reclaimed(0);
    // A part of the range is being given up.
    let before = locks.give_up(OWNED, LockRange { first: 12, last: 13 });
    let ranges: Vec<_> = reclaimed(0).iter().map(|lock| (lock.range.first, lock.range.last)).collect();
    assert_eq!(ranges, [(10, 11), (14, 19)]);
    locks.keep(OWNED, before);
    assert_eq!(reclaimed(0), whole, "the server refused");
    // The whole range is being given up, and the server that would have refused is gone.
    let before = locks.give_up(OWNED, LockRange::WHOLE);
    assert_eq!((reclaimed(1), locks.is_known(OWNED)), (vec![], false));
    locks.keep(OWNED, before);
    assert_eq!(reclaimed(1), []);
    // The lock is being made shared.
    let id = begin(&locks, &file);
    assert!(locks.granted(id, 1).1.is_some());
    let shared = ask(&locks, &file, LockMode::Shared);
    assert_eq!(reclaimed(1)[0].mode, LockMode::Shared);
    assert!(locks.forget(shared).is_some());
    assert_eq!(reclaimed(1)[0].mode, LockMode::Exclusive, "the server refused");
}

#[test]
fn locks_go_with_the_open_file_they_were_taken_through() {
    let locks = OwnLocks::default();
    let [file, other_open] = opens();
    let id = begin(&locks, &file);
    assert!(locks.begin_release(&file).is_none(), "nothing is held yet");
    assert!(locks.granted(id, 0).1.is_some());
    assert!(locks.begin_release(&other_open).is_none());
    let other = Owned { owner: LockOwner(OWNER.0 + 1), ..OWNED };
    assert!(!locks.wait_for_release(other, locks.released()), "no close is under way");
    let released = locks.released();
    assert_eq!(locks.begin_release(&file), Some(vec![OWNED]));
    assert_eq!(locks.cleared(OWNED, LockRange::WHOLE, 0), Noted::Done);
    locks.end_release();
    assert!(locks.wait_for_release(other, released), "one has ended since");
    assert!(!locks.wait_for_release(other, locks.released()) && locks.begin_release(&file).is_none());
}

#[test]
fn who_is_refused_waits_for_a_close_that_no_thread_has_begun_with() {
    let locks = OwnLocks::default();
    let [file, _] = opens();
    let id = ask_in(&locks, &file, LockMode::Exclusive, LockSpace::Whole);
    assert!(locks.granted(id, 0).1.is_some());
    let held = Owned { space: LockSpace::Whole, ..OWNED };
    let other = Owned { owner: LockOwner(OWNER.0 + 1), ..held };
    let (released, began) = (locks.released(), Instant::now());
    assert!(!locks.wait_for_release(other, released) && began.elapsed() >= UNREAD_PATIENCE);
    assert_eq!(locks.begin_release(&file), Some(vec![held]));
    assert_eq!(locks.cleared(held, LockRange::WHOLE, 0), Noted::Done);
    locks.end_release();
    assert!(locks.wait_for_release(other, released), "it has ended since");
    assert!(!locks.wait_for_release(other, locks.released()), "nobody of this mount holds any");
}

#[test]
fn a_lost_lock_is_told_of_once_and_goes_with_its_file() {
    let locks = OwnLocks::default();
    let [file, _] = opens();
    let id = begin(&locks, &file);
    assert!(locks.granted(id, 0).1.is_some());
    let (held, _) = locks.begin_session(1);
    locks.lose(&held[0]);
    assert_eq!(locks.begin_session(2).0, []);
    assert!(locks.is_known(OWNED));
    assert_eq!(locks.begin_release(&file), Some(vec![OWNED]));
    assert!(locks.take_lost(OWNED) && !locks.take_lost(OWNED));
    assert_eq!(locks.cleared(OWNED, LockRange::WHOLE, 2), Noted::Done);
    locks.end_release();
    assert!(!locks.is_known(OWNED));
}
