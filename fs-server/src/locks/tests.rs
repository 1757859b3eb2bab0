use super::table::Table;
use super::*;
use crate::meta::ClientRecord;
use cuttlefs_common::ids::ClientId;
use cuttlefs_common::locks::{LOCK_END, LockMode};
use cuttlefs_common::rdma::{PeerIdentity, PeerKey};
use cuttlefs_common::rpc::SETTLED_LOCKS_MAX;
use cuttlefs_common::world::{ManualClock, SeededRandom};
use proptest::prelude::*;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

const INO: InodeNo = InodeNo(9);

thread_local! {
    /// How many waits this thread's lock tables examined, to see whether they can be granted now.
    pub(super) static WAITS_LOOKED_AT: Cell<usize> = const { Cell::new(0) };
}

fn range(first: u64, last: u64) -> LockRange {
    LockRange { first, last }
}

fn lock(owner: u64, range: LockRange, mode: LockMode) -> Lock {
    Lock { space: LockSpace::Ranges, owner: LockOwner(owner), range, mode, pid: 1 }
}

fn flock(owner: u64, mode: LockMode) -> Lock {
    Lock { space: LockSpace::Whole, ..lock(owner, LockRange::WHOLE, mode) }
}

/// A table that numbers its waits from 1.
struct Site {
    table: Table,
    waits: u64,
}

impl Site {
    fn new(grace: bool) -> Self {
        Self { table: Table::new(grace), waits: 0 }
    }

    fn ask(&mut self, session: u64, lock: Lock, blocking: bool) -> Result<Asked, Status> {
        self.waits += 1;
        self.table.set(session, INO, &lock, WaitId(self.waits), blocking)
    }

    fn clear(&mut self, session: u64, lock: &Lock) {
        let holder = Holder { session, owner: lock.owner };
        self.table.clear(holder, INO, lock.space, lock.range).expect("room");
    }

    fn ended(&mut self, session: u64) -> Vec<(u64, Result<(), Status>)> {
        let settled = self.table.take_settled(session);
        settled.into_iter().map(|SettledLock { wait, result }| (wait.0, result)).collect()
    }
}

use LockMode::{Exclusive, Shared};

#[test]
fn who_waits_is_served_in_the_order_they_came() {
    for make in [|owner, mode| lock(owner, range(5, 9), mode), flock] {
        let mut site = Site::new(false);
        assert_eq!(site.ask(1, make(1, Exclusive), true), Ok(Asked::Granted));
        assert_eq!(site.ask(2, make(1, Shared), false), Err(Status::Locked));
        for (session, owner, mode) in [(2, 9, Exclusive), (3, 1, Shared), (2, 1, Shared), (4, 1, Exclusive)] {
            assert_eq!(site.ask(session, make(owner, mode), true), Ok(Asked::Queued));
        }
        assert_eq!(site.table.figures(), LockFigures { held: 1, waiting: 4 });
        site.clear(1, &make(1, Exclusive));
        assert_eq!(site.ended(2), [(3, Ok(()))]);
        assert!(site.ended(3).is_empty() && site.ended(4).is_empty());
        site.clear(2, &make(9, Exclusive));
        // Both shared waits are granted, and the exclusive one that was asked last is not.
        assert_eq!((site.ended(2), site.ended(3)), (vec![(5, Ok(()))], vec![(4, Ok(()))]));
        site.table.end_session(2);
        assert!(site.ended(4).is_empty());
        site.table.end_session(3);
        assert_eq!(site.ended(4), [(6, Ok(()))]);
        site.table.end_session(4);
        assert_eq!(site.table.figures(), LockFigures::default());
    }
}

#[test]
fn the_two_kinds_do_not_see_each_other() {
    let mut site = Site::new(false);
    assert_eq!(site.ask(1, flock(1, Exclusive), false), Ok(Asked::Granted));
    assert_eq!(site.ask(2, lock(1, LockRange::WHOLE, Exclusive), false), Ok(Asked::Granted));
    assert_eq!(site.ask(2, flock(1, Shared), false), Err(Status::Locked));
    assert_eq!(site.ask(1, lock(1, range(0, 0), Shared), false), Err(Status::Locked));
}

#[test]
fn a_flock_that_is_converted_is_given_up_first() {
    let mut site = Site::new(false);
    for session in [1, 2] {
        assert_eq!(site.ask(session, flock(1, Shared), false), Ok(Asked::Granted));
    }
    assert_eq!(site.ask(1, flock(1, Exclusive), true), Ok(Asked::Queued));
    // For range locks this would be a deadlock. For flock it is not: the first waiter gave up its shared lock before, so its wait is granted.
    assert_eq!(site.ask(2, flock(1, Exclusive), true), Ok(Asked::Queued));
    assert_eq!(site.ended(1), [(3, Ok(()))]);
    assert_eq!(site.ask(1, flock(2, Shared), false), Err(Status::Locked));
    // A downgrade to shared lets shared waits in.
    assert_eq!(site.ask(3, flock(1, Shared), true), Ok(Asked::Queued));
    assert_eq!(site.ask(1, flock(1, Exclusive), true), Ok(Asked::Granted), "it is held already");
    site.clear(1, &flock(1, Shared));
    assert_eq!((site.ended(2), site.ended(3)), (vec![(4, Ok(()))], vec![]));
}

#[test]
fn circles_are_found_across_files_and_clients() {
    let mut site = Site::new(false);
    let files = [InodeNo(1), InodeNo(2), InodeNo(3)];
    let whole = lock(5, LockRange::WHOLE, Exclusive);
    for (session, ino) in (1..).zip(files) {
        assert_eq!(site.table.set(session, ino, &whole, WaitId(1), true), Ok(Asked::Granted));
    }
    assert_eq!(site.table.set(1, files[1], &whole, WaitId(2), true), Ok(Asked::Queued));
    assert_eq!(site.table.set(2, files[2], &whole, WaitId(2), true), Ok(Asked::Queued));
    assert_eq!(site.table.set(3, files[0], &whole, WaitId(2), false), Err(Status::Locked));
    assert_eq!(site.table.set(3, files[0], &whole, WaitId(2), true), Err(Status::Deadlock));
    // There is no circle any more once one of the waits was given up.
    assert_eq!(site.table.cancel(1, WaitId(2)), Cancelled::GivenUp);
    assert_eq!(site.table.cancel(1, WaitId(2)), Cancelled::Unknown);
    assert_eq!(site.table.set(3, files[0], &whole, WaitId(3), true), Ok(Asked::Queued));
}

#[test]
fn in_the_grace_period_only_what_is_reclaimed_is_granted() {
    let mut site = Site::new(true);
    let (early, late) = (lock(1, range(0, 9), Exclusive), lock(2, range(5, 5), Exclusive));
    // During the grace period both blocking and non-blocking requests wait.
    assert_eq!(site.ask(2, late, false), Ok(Asked::Queued));
    assert_eq!(site.ask(3, lock(1, range(9, 9), Shared), true), Ok(Asked::Queued));
    assert_eq!(site.ask(3, lock(1, range(90, 90), Shared), false), Ok(Asked::Queued));
    assert_eq!(site.table.test(Holder { session: 2, owner: LockOwner(2) }, INO, &late), TestedLock::Unknown);
    assert!(!site.table.reclaim(4, INO, &late, false), "its lease had run out before");
    assert!(site.table.reclaim(1, INO, &early, true));
    assert!(site.table.reclaim(1, INO, &early, true), "once more, after a cut");
    assert!(!site.table.reclaim(4, INO, &late, true), "somebody else was given it, and was faster");
    site.table.end_grace();
    assert_eq!(site.ended(2), [(1, Err(Status::Locked))]);
    assert_eq!(site.ended(3), [(3, Ok(()))]);
    assert!(!site.table.reclaim(1, INO, &lock(1, range(50, 50), Shared), true), "it is over");
    assert!(site.table.reclaim(1, INO, &early, false), "it is held");
    site.clear(1, &early);
    assert_eq!(site.ended(3), [(2, Ok(()))]);
}

#[test]
fn asking_again_for_a_wait_does_not_wait_twice() {
    let mut site = Site::new(false);
    let wanted = lock(1, range(0, 0), Exclusive);
    assert_eq!(site.ask(1, wanted, true), Ok(Asked::Granted));
    for _ in 0..3 {
        assert_eq!(site.table.set(2, INO, &wanted, WaitId(7), true), Ok(Asked::Queued));
    }
    assert_eq!(site.table.figures().waiting, 1);
    site.clear(1, &wanted);
    assert_eq!(site.table.set(2, INO, &wanted, WaitId(7), true), Ok(Asked::Queued), "its end is to be told");
    assert_eq!(
        site.table.cancel(2, WaitId(7)),
        Cancelled::Ended(SettledLock { wait: WaitId(7), result: Ok(()) })
    );
    assert!(site.ended(2).is_empty());
}

#[test]
fn locks_and_waits_are_bounded() {
    let mut site = Site::new(false);
    for at in 0..LOCKS_PER_CLIENT as u64 - 2 {
        site.table.set(1, InodeNo(at), &lock(1, range(10, 20), Exclusive), WaitId(0), false).expect("room");
    }
    let at_the_end = lock(1, range(10, 20), Exclusive);
    assert_eq!(site.table.set(1, InodeNo(0), &at_the_end, WaitId(0), false), Ok(Asked::Granted));
    let holder = Holder { session: 1, owner: LockOwner(1) };
    for ino in [1, 2] {
        site.table.clear(holder, InodeNo(ino), LockSpace::Ranges, range(15, 15)).expect("room for two parts");
    }
    let parts = site.table.clear(holder, InodeNo(3), LockSpace::Ranges, range(15, 15));
    assert_eq!(parts, Err(Status::NoLocks));
    let other = lock(2, range(50, 50), Shared);
    assert_eq!(site.table.set(1, INO, &other, WaitId(0), false), Err(Status::NoLocks));
    assert_eq!(site.table.set(2, INO, &other, WaitId(0), false), Ok(Asked::Granted), "others have room");
    site.table.clear(holder, InodeNo(3), LockSpace::Ranges, LockRange::WHOLE).expect("giving up needs none");
    for wait in 0..WAITS_PER_CLIENT as u64 {
        let wanted = lock(wait, range(10, 10), Exclusive);
        assert_eq!(site.table.set(2, INO, &wanted, WaitId(wait), true), Ok(Asked::Queued));
    }
    let wanted = lock(1, range(10, 10), Exclusive);
    assert_eq!(site.table.set(2, INO, &wanted, WaitId(u64::MAX), true), Err(Status::NoLocks));
    assert_eq!(site.table.set(2, INO, &wanted, WaitId(u64::MAX), false), Err(Status::Locked));
    site.table.end_session(1);
    // One wait has the lock now. The number of granted waits that one call reports is bounded as well.
    assert_eq!(site.ended(2), [(0, Ok(()))]);
    for wait in 1..WAITS_PER_CLIENT as u64 {
        site.table
            .clear(Holder { session: 2, owner: LockOwner(wait - 1) }, INO, LockSpace::Ranges, range(10, 10))
            .expect("room");
    }
    assert_eq!(site.ended(2).len(), SETTLED_LOCKS_MAX);
    site.table.end_session(2);
    assert_eq!(site.table.figures(), LockFigures::default());
}

/// One client holds every other byte, another waits for each of these bytes. Locks on other bytes must not make the table examine these waits.
#[test]
fn waits_are_looked_at_only_when_what_they_wait_for_goes() {
    const MANY: u64 = WAITS_PER_CLIENT as u64;
    let byte = |number| lock(1, range(2 * number, 2 * number), Exclusive);
    let mut site = Site::new(false);
    for number in 0..MANY {
        assert_eq!(site.ask(1, byte(number), true), Ok(Asked::Granted));
        assert_eq!(site.ask(2, byte(number), true), Ok(Asked::Queued));
    }
    site.ask(3, lock(1, range(1, 1), Exclusive), true).expect("free");
    assert_eq!(WAITS_LOOKED_AT.get(), 0, "a lock that is taken is of interest to nobody");
    site.clear(1, &byte(7));
    assert_eq!(WAITS_LOOKED_AT.get(), 1, "one waits for that byte");
    assert_eq!(site.ended(2), [(16, Ok(()))]);
    // A byte that becomes shared makes the table examine its wait as well.
    site.ask(1, lock(1, range(16, 16), Shared), true).expect("its own");
    assert_eq!(WAITS_LOOKED_AT.get(), 2);
    site.table.end_session(1);
    assert_eq!(WAITS_LOOKED_AT.get() as u64, 2 + MANY - 1);
    assert_eq!(site.table.figures(), LockFigures { held: MANY as usize + 1, waiting: 0 });
}

#[test]
fn an_ended_session_gets_no_locks() {
    let clock = Arc::new(ManualClock::default());
    let before = vec![(ClientId(1), ClientRecord { has_session: true, owner: PeerKey::User(0) })];
    let random = Arc::new(SeededRandom::new(1));
    let (sessions, _) = crate::session::Sessions::new(clock, random, Duration::from_secs(10), before);
    let locks = Locks::new(sessions.is_grace_period());
    let attached = sessions.attach(ClientId(1), &crate::session::root_peer(), "a", InodeNo::ROOT);
    let (session, _) = attached.expect("attach");
    let wanted = lock(1, LockRange::WHOLE, Exclusive);
    assert!(sessions.may_reclaim(ClientId(1)) && !sessions.may_reclaim(ClientId(2)));
    assert_eq!(locks.reclaim(&session, INO, &wanted, true), Ok(true));
    assert_eq!(locks.set(&session, INO, &wanted, WaitId(1), true), Ok(Asked::Queued), "grace");
    sessions.end(&session);
    locks.end_session(session.number());
    locks.end_grace();
    let expired = Err(Status::SessionExpired);
    assert_eq!(locks.set(&session, INO, &wanted, WaitId(2), true), expired);
    assert_eq!(locks.reclaim(&session, INO, &wanted, true).map(|_| Asked::Granted), expired);
    assert_eq!(locks.figures(), LockFigures::default());
    assert!(futures_lite::future::block_on(locks.settled(&session)).is_empty());
    let (other, _) =
        sessions.attach(ClientId(1), &crate::session::root_peer(), "a", InodeNo::ROOT).expect("attach");
    locks.stop();
    assert!(
        futures_lite::future::block_on(locks.settled(&other)).is_empty(),
        "a server that stops holds nobody"
    );
}

// ---- a model: the bytes of a file, and a list of waits -----------------------------------------------------------

const BYTES: usize = 8;
type Who = (u64, u64);

#[derive(Clone, Debug)]
enum Step {
    Ask { who: Who, range: LockRange, mode: LockMode, blocking: bool },
    Clear { who: Who, range: LockRange },
    Cancel { nth: usize },
    EndSession { session: u64 },
}

#[derive(Default)]
struct Model {
    bytes: BTreeMap<Who, [Option<LockMode>; BYTES]>,
    waits: Vec<(WaitId, Who, LockRange, LockMode)>,
    ended: BTreeMap<u64, Vec<WaitId>>,
}

fn within(range: LockRange) -> std::ops::RangeInclusive<usize> {
    range.first as usize..=(range.last as usize).min(BYTES - 1)
}

impl Model {
    fn in_the_way(&self, who: Who, range: LockRange, mode: LockMode) -> Vec<Who> {
        let others = self.bytes.iter().filter(|(other, _)| **other != who);
        let blocks = |bytes: &[Option<LockMode>; BYTES]| {
            within(range).any(|at| bytes[at].is_some_and(|held| held == Exclusive || mode == Exclusive))
        };
        others.filter(|(_, bytes)| blocks(bytes)).map(|(other, _)| *other).collect()
    }

    fn put(&mut self, who: Who, range: LockRange, to: Option<LockMode>) {
        let bytes = self.bytes.entry(who).or_default();
        within(range).for_each(|at| bytes[at] = to);
        let mut any = true;
        while std::mem::take(&mut any) {
            let mut at = 0;
            while let Some(&(id, who, range, mode)) = self.waits.get(at) {
                if self.in_the_way(who, range, mode).is_empty() {
                    self.waits.remove(at);
                    self.ended.entry(who.0).or_default().push(id);
                    within(range).for_each(|at| self.bytes.entry(who).or_default()[at] = Some(mode));
                    any = true;
                } else {
                    at += 1;
                }
            }
        }
    }

    fn waits_for(&self, from: Who, target: Who, depth: usize) -> bool {
        let waits = self.waits.iter().filter(|(_, who, ..)| *who == from);
        from == target
            || depth > 0
                && waits.clone().any(|(_, who, range, mode)| {
                    self.in_the_way(*who, *range, *mode)
                        .into_iter()
                        .any(|next| self.waits_for(next, target, depth - 1))
                })
    }

    fn ask(
        &mut self,
        id: WaitId,
        who: Who,
        range: LockRange,
        mode: LockMode,
        blocking: bool,
    ) -> Result<Asked, Status> {
        let in_the_way = self.in_the_way(who, range, mode);
        if in_the_way.is_empty() {
            self.put(who, range, Some(mode));
            return Ok(Asked::Granted);
        }
        if !blocking {
            return Err(Status::Locked);
        }
        if in_the_way.into_iter().any(|other| self.waits_for(other, who, 8)) {
            return Err(Status::Deadlock);
        }
        self.waits.push((id, who, range, mode));
        Ok(Asked::Queued)
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let who = || (1..=2u64, 1..=2u64);
    let range = || {
        (0..BYTES as u64, 0..BYTES as u64).prop_map(|(a, b)| {
            let last = a.max(b);
            LockRange { first: a.min(b), last: if last == BYTES as u64 - 1 { LOCK_END } else { last } }
        })
    };
    let mode = || prop_oneof![Just(Shared), Just(Exclusive)];
    let step = prop_oneof![
        6 => (who(), range(), mode(), any::<bool>())
            .prop_map(|(who, range, mode, blocking)| Step::Ask { who, range, mode, blocking }),
        4 => (who(), range()).prop_map(|(who, range)| Step::Clear { who, range }),
        1 => (0..6usize).prop_map(|nth| Step::Cancel { nth }),
        1 => (1..=2u64).prop_map(|session| Step::EndSession { session }),
    ];
    proptest::collection::vec(step, 1..80)
}

proptest! {
    #[test]
    fn the_table_does_what_a_model_of_bytes_does(steps in steps()) {
        let (mut table, mut model) = (Table::new(false), Model::default());
        for (number, step) in steps.into_iter().enumerate() {
            let id = WaitId(number as u64);
            match step {
                Step::Ask { who, range, mode, blocking } => prop_assert_eq!(
                    table.set(who.0, INO, &lock(who.1, range, mode), id, blocking),
                    model.ask(id, who, range, mode, blocking)
                ),
                Step::Clear { who: (session, owner), range } => {
                    let holder = Holder { session, owner: LockOwner(owner) };
                    prop_assert_eq!(table.clear(holder, INO, LockSpace::Ranges, range), Ok(()));
                    model.put((session, owner), range, None);
                }
                Step::Cancel { nth } => {
                    if nth < model.waits.len() {
                        let (id, who, ..) = model.waits.remove(nth);
                        prop_assert_eq!(table.cancel(who.0, id), Cancelled::GivenUp);
                    }
                }
                Step::EndSession { session } => {
                    table.end_session(session);
                    model.waits.retain(|(_, who, ..)| who.0 != session);
                    model.bytes.retain(|who, _| who.0 != session);
                    model.ended.remove(&session);
                    model.put((session, 1), LockRange::WHOLE, None);
                }
            }
            for session in [1, 2] {
                let mut told: Vec<_> = table.take_settled(session).into_iter().map(|settled| {
                    assert_eq!(settled.result, Ok(()));
                    settled.wait
                }).collect();
                let mut expected = model.ended.remove(&session).unwrap_or_default();
                told.sort();
                expected.sort();
                prop_assert_eq!(told, expected);
            }
            prop_assert_eq!(table.figures().waiting, model.waits.len());
            // Which locks a third session could have on each byte.
            for at in 0..BYTES as u64 {
                for mode in [Shared, Exclusive] {
                    let stranger = Holder { session: 3, owner: LockOwner(1) };
                    let tested = table.test(stranger, INO, &lock(1, range(at, at), mode));
                    let free = model.in_the_way((3, 1), range(at, at), mode).is_empty();
                    prop_assert_eq!(tested == TestedLock::Free, free);
                }
            }
        }
        table.end_session(1);
        table.end_session(2);
        prop_assert_eq!(table.figures(), LockFigures::default());
    }
}

#[test]
fn what_a_peer_holds_and_waits_for_is_its_share_until_it_ends() {
    let shares = crate::shares::Shares::new(1);
    let peer = shares.peer(&PeerIdentity::Remote(std::net::SocketAddr::from(([10, 0, 0, 1], 1))));
    let used = || shares.used(crate::shares::Resource::Locks);
    let mut site = Site::new(false);
    site.table.count_for(1, &peer);
    site.table.count_for(2, &peer);
    let lock = |at| Lock {
        space: LockSpace::Ranges,
        owner: LockOwner(1),
        range: LockRange { first: at, last: at },
        mode: LockMode::Exclusive,
        pid: 1,
    };
    for at in 0..10 {
        assert_eq!(site.ask(1, lock(2 * at), false), Ok(Asked::Granted));
    }
    assert_eq!(used(), 10);
    assert_eq!(site.ask(2, lock(0), true), Ok(Asked::Queued));
    assert_eq!(used(), 11);
    site.clear(1, &lock(0));
    // The waiter holds the lock, and its session has not been told of that yet: it counts as a lock and as a wait.
    assert_eq!(used(), 9 + 1 + 1);
    assert_eq!(site.table.take_settled(2).len(), 1);
    assert_eq!(used(), 10);
    site.table.end_session(1);
    assert_eq!(used(), 1);
    site.table.end_session(2);
    assert_eq!((used(), peer.used(crate::shares::Resource::Locks)), (0, 0));
    // A peer that has its whole share gets no more locks in any of its sessions.
    let mut other = peer.tally(crate::shares::Resource::Locks);
    other.set(crate::shares::Resource::Locks.bound().share);
    site.table.count_for(3, &peer);
    assert_eq!(site.ask(3, lock(0), false), Err(Status::NoLocks));
    drop(other);
    assert_eq!(site.ask(3, lock(0), false), Ok(Asked::Granted));
}
