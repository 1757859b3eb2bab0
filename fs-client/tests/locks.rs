//! Locks between clients, in one thread: cut connections and killed servers while locks are requested, reclaimed or given up change nothing for their
//! holders.

mod world;

use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::{Caller, FsError, Handle, OpenHow, Volume};
use cuttlefs_common::ids::{InodeNo, TraceId};
use cuttlefs_common::locks::{Lock, LockMode, LockOwner, LockRange, LockSpace};
use cuttlefs_common::rdma::sim::{Cut, Translation};
use cuttlefs_common::rpc::{BlockingLock, Request};
use cuttlefs_common::status::Status;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use world::contents;
use world::waiter::Waiter;
use world::{Death, LEASE, World, WorldConfig};

const CALLER: Caller = Caller::new(0, 0, TraceId(1));
const READ_WRITE: OpenHow = OpenHow::READ_WRITE;
const CONFIG: WorldConfig = WorldConfig::new(1, Translation::Target, 1024, 64);
const OWNER: LockOwner = LockOwner(u64::MAX - 5);
const SPACES: [LockSpace; 2] = [LockSpace::Ranges, LockSpace::Whole];
const LOCKED: Option<Result<(), FsError>> = Some(Err(FsError::Server(Status::Locked)));
const LOST: Option<Result<(), FsError>> = Some(Err(FsError::Server(Status::Io)));
const HELD: Option<Result<(), FsError>> = Some(Ok(()));

/// A client that has the file open.
struct User {
    volume: RemoteVolume,
    handle: Handle,
    ino: InodeNo,
    /// The file's change counter when it was opened.
    opened_at: Option<u64>,
}

impl User {
    fn new(world: &World) -> Self {
        let volume = world.client();
        let made = volume.create(&CALLER, InodeNo::ROOT, b"f", 0o644, false, READ_WRITE);
        let (attr, file) = made.expect("create or open");
        Self { volume, handle: file.handle, ino: attr.ino, opened_at: Some(file.change) }
    }

    fn ask(&self, space: LockSpace, owner: LockOwner, blocking: bool) -> Arc<Waiter> {
        self.ask_for(LockMode::Exclusive, space, owner, blocking)
    }

    fn ask_for(&self, mode: LockMode, space: LockSpace, owner: LockOwner, blocking: bool) -> Arc<Waiter> {
        let lock = Lock { space, owner, range: LockRange::WHOLE, mode, pid: 77 };
        let waiter = Arc::<Waiter>::default();
        self.volume.set_lock(&CALLER, self.handle, lock, blocking, waiter.clone());
        waiter
    }

    /// Requests the lock without waiting for others.
    fn try_lock(&self, space: LockSpace) -> Option<Result<(), FsError>> {
        self.ask(space, OWNER, false).answer()
    }

    fn unlock(&self, space: LockSpace) -> Result<(), FsError> {
        self.volume.unlock(&CALLER, self.handle, space, OWNER, LockRange::WHOLE)
    }

    /// Closes the file and opens it again, as is needed after a lock was lost.
    fn open_again(&mut self) {
        self.volume.release(self.handle);
        self.handle = self.volume.open(&CALLER, self.ino, READ_WRITE).expect("open").handle;
    }

    /// Asks the server which waits have ended.
    fn hear(&self) {
        self.volume.session().await_locks(Duration::ZERO).expect("the server answers");
    }

    fn heartbeat(&self) {
        let session = self.volume.session();
        session.call(&session.own_caller(), || Request::Heartbeat, |_| Ok(())).expect("heartbeat");
    }
}

fn both(test: impl Fn(&World, LockSpace)) {
    for translation in Translation::ALL {
        for durable_answers in [false, true] {
            for space in SPACES {
                test(&World::new(WorldConfig { translation, durable_answers, frames: 16, ..CONFIG }), space);
            }
        }
    }
}

fn held(world: &World) -> usize {
    world.with_server(|server| server.server().locks.figures().held)
}

fn kill(world: &World) {
    world.kill();
    world.start();
}

#[test]
fn a_lock_keeps_others_out_and_lets_them_in() {
    both(|world, space| {
        let (one, two) = (User::new(world), User::new(world));
        assert_eq!(one.try_lock(space), HELD);
        assert_eq!(one.try_lock(space), HELD, "it is held already");
        assert_eq!(two.try_lock(space), LOCKED);
        assert_eq!(one.ask(space, LockOwner(1), false).answer(), LOCKED, "nor is another owner here let in");
        let waiting = two.ask(space, OWNER, true);
        two.hear();
        assert_eq!(waiting.answer(), None);
        one.volume.write(&CALLER, one.handle, 0, b"for the next").expect("write");
        one.unlock(space).expect("unlock");
        two.hear();
        assert_eq!(waiting.answer(), HELD);
        let change = waiting.change();
        assert!(change > two.opened_at, "somebody has written since it was opened");
        assert_eq!(one.try_lock(space), LOCKED);
        two.unlock(space).expect("unlock");
        assert_eq!(two.ask(space, OWNER, false).change(), change, "nobody has since");
        two.volume.shut_down();
        assert_eq!(one.try_lock(space), HELD, "a client that leaves leaves no locks");
    });
}

#[test]
fn closing_gives_locks_up() {
    both(|world, space| {
        let (one, two) = (User::new(world), User::new(world));
        assert_eq!(one.try_lock(space), HELD);
        one.volume.flush(one.handle, LockOwner(1)).expect("flush");
        assert_eq!(two.try_lock(space), LOCKED, "somebody else closed his descriptor");
        one.volume.flush(one.handle, OWNER).expect("flush");
        let expected = if space == LockSpace::Ranges { HELD } else { LOCKED };
        assert_eq!(two.try_lock(space), expected, "a process that closes gives its ranges up");
        if space == LockSpace::Ranges {
            two.unlock(space).expect("unlock");
            assert_eq!(one.try_lock(space), HELD);
        }
        one.volume.release(one.handle);
        assert_eq!(two.try_lock(space), HELD, "the end of an open file ends the locks taken through it");
        assert_eq!(held(world), 1);
    });
}

#[test]
fn what_was_written_under_a_lock_that_becomes_shared_stays_without_its_writer() {
    both(|world, space| {
        let (one, two) = (User::new(world), User::new(world));
        assert_eq!(one.try_lock(space), HELD);
        one.volume.write(&CALLER, one.handle, 0, b"for readers").expect("write");
        assert_eq!(one.ask_for(LockMode::Shared, space, OWNER, false).answer(), HELD);
        assert_eq!(two.ask_for(LockMode::Shared, space, OWNER, false).answer(), HELD);
        // The server dies, and the writer does not come back.
        kill(world);
        for _ in 0..LEASE.as_secs() + 1 {
            world.pass(Duration::from_secs(1));
            two.heartbeat();
        }
        assert_eq!(contents::read(&two.volume, two.handle, 0, 100).expect("read"), b"for readers");
    });
}

#[test]
fn what_is_in_the_way_is_told() {
    let world = World::new(CONFIG);
    let (one, two) = (User::new(&world), User::new(&world));
    let range = LockRange { first: 100, last: 199 };
    let lock = |owner, mode| Lock { space: LockSpace::Ranges, owner, range, mode, pid: 77 };
    let test = |user: &User, owner, mode| user.volume.test_lock(&CALLER, user.handle, lock(owner, mode));
    let shared = Arc::<Waiter>::default();
    one.volume.set_lock(&CALLER, one.handle, lock(OWNER, LockMode::Shared), false, shared.clone());
    assert_eq!(shared.answer(), HELD);
    let found = Ok(Some(BlockingLock { range, mode: LockMode::Shared, pid: 77 }));
    assert_eq!(test(&two, OWNER, LockMode::Exclusive), found, "an owner of another client is another");
    assert_eq!(test(&one, LockOwner(1), LockMode::Exclusive), found);
    assert_eq!(test(&one, OWNER, LockMode::Exclusive), Ok(None));
    assert_eq!(test(&two, OWNER, LockMode::Shared), Ok(None));
    // After a restart the answer waits until the lock is reclaimed.
    kill(&world);
    one.heartbeat();
    assert_eq!(test(&two, OWNER, LockMode::Exclusive), found);
}

/// Runs `test` with the request lost and with the reply lost; each time alone, and with the server killed at that moment.
fn cut_both_ways(test: impl Fn(&World, LockSpace, &dyn Fn())) {
    both(|world, space| {
        for cut in [Cut::Request, Cut::Reply] {
            test(world, space, &|| world.network().cut_after(cut, 0));
            assert!(!world.network().cut_is_pending(), "{cut:?} did not happen");
            test(world, space, &|| world.kill_at(cut, Death::Sudden));
            assert!(
                !world.network().cut_is_pending() && world.has_died(),
                "{cut:?} with a kill did not happen"
            );
        }
    });
}

#[test]
fn cut_requests_have_their_effect_once() {
    cut_both_ways(|world, space, cut| {
        let (one, two) = (User::new(world), User::new(world));
        cut();
        // After a kill this request may wait until the other client is back.
        let asked = one.ask(space, OWNER, false);
        two.heartbeat();
        one.hear();
        assert_eq!(asked.answer(), HELD);
        assert_eq!(held(world), 1, "it does not wait behind itself");
        assert_eq!(two.try_lock(space), LOCKED);
        cut();
        one.unlock(space).expect("unlock");
        two.heartbeat();
        assert_eq!(held(world), 0);
        // The unlock that was sent twice must not give up a lock that was taken since.
        assert_eq!(one.try_lock(space), HELD);
        one.heartbeat();
        assert_eq!(two.try_lock(space), LOCKED);
        // A request that waits, and the question for its end.
        cut();
        let waiting = two.ask(space, OWNER, true);
        one.heartbeat();
        two.hear();
        assert_eq!(waiting.answer(), None);
        one.unlock(space).expect("unlock");
        cut();
        two.hear();
        // A killed server had not told this client of the end. The client has sent its request again, and got the lock then or when all clients were
        // back.
        one.heartbeat();
        two.hear();
        assert_eq!(waiting.answer(), HELD);
        assert_eq!(held(world), 1);
        assert_eq!(one.try_lock(space), LOCKED);
        one.volume.shut_down();
        two.volume.shut_down();
        assert_eq!(held(world), 0);
    });
}

#[test]
fn locks_are_reclaimed_before_anybody_else_gets_them() {
    both(|world, space| {
        let (one, two, three) = (User::new(world), User::new(world), User::new(world));
        assert_eq!(one.try_lock(space), HELD);
        let waiting = three.ask(space, OWNER, true);
        kill(world);
        // The client that comes back first does not hold the lock. Its request waits for the others to come back, although it would not wait for a
        // lock.
        let asked = two.ask(space, OWNER, false);
        two.hear();
        assert_eq!(asked.answer(), None);
        three.heartbeat();
        one.heartbeat();
        assert_eq!(held(world), 1);
        two.hear();
        assert_eq!(asked.answer(), LOCKED);
        three.hear();
        assert_eq!(waiting.answer(), None);
        // Once more, with connections cut in the midst of reclaiming.
        kill(world);
        for pass in 0..6 {
            world.network().cut_after(Cut::Reply, pass);
            one.heartbeat();
        }
        two.heartbeat();
        three.heartbeat();
        assert_eq!(two.try_lock(space), LOCKED);
        one.unlock(space).expect("unlock");
        three.hear();
        assert_eq!(waiting.answer(), HELD, "who has waited all the time");
    });
}

#[test]
fn who_does_not_come_back_loses_his_locks_with_the_grace_period() {
    both(|world, space| {
        let (mut one, two) = (User::new(world), User::new(world));
        assert_eq!(one.try_lock(space), HELD);
        kill(world);
        let asked = two.ask(space, OWNER, false);
        world.pass(LEASE / 2);
        two.hear();
        assert_eq!(asked.answer(), None);
        world.pass(LEASE / 2 + Duration::from_secs(1));
        two.hear();
        assert_eq!(asked.answer(), HELD);
        // The client that was away hears of its loss, and may not use that open file any more.
        one.heartbeat();
        assert_eq!(one.try_lock(space), LOST);
        assert_eq!(one.try_lock(space), LOST);
        one.open_again();
        assert_eq!(one.try_lock(space), LOCKED);
    });
}

#[test]
fn a_client_that_was_silent_for_too_long_has_lost_its_locks() {
    both(|world, space| {
        let (mut one, two) = (User::new(world), User::new(world));
        assert_eq!(one.try_lock(space), HELD);
        let waiting = two.ask(space, OWNER, true);
        for _ in 0..5 {
            world.pass(LEASE / 3);
            two.hear();
        }
        assert_eq!(waiting.answer(), HELD, "within the lease and a quarter");
        two.unlock(space).expect("unlock");
        // The lock is free, but what it protects may have changed. So it is not granted, not even by a later server, until the file is opened again.
        kill(world);
        two.heartbeat();
        one.heartbeat();
        assert_eq!(held(world), 0);
        assert_eq!(one.unlock(space), Err(FsError::Server(Status::Io)));
        assert_eq!(one.unlock(space), Ok(()));
        assert_eq!(one.try_lock(space), LOST);
        one.open_again();
        assert_eq!(one.try_lock(space), HELD);
        assert_eq!(two.try_lock(space), LOCKED);
        let ino = one.ino;
        assert_eq!(two.volume.get_attr(&CALLER, ino).map(|attr| attr.ino), Ok(ino));
    });
}

/// How an owner gives up a lock, or a part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GivesUp {
    Unlocks,
    Closes,
    Shares,
}

/// The server grants the lock to the client that waits for it, and tells that client; it is killed before it answers the client that gave the lock
/// up.
#[test]
fn what_a_killed_server_gave_to_others_is_not_reclaimed() {
    for gives_up in [GivesUp::Unlocks, GivesUp::Closes, GivesUp::Shares] {
        both(|world, space| {
            if gives_up == GivesUp::Shares && space == LockSpace::Whole {
                // flock gives the old lock up when it converts it.
                return;
            }
            let (one, two) = (User::new(world), Rc::new(User::new(world)));
            assert_eq!(one.try_lock(space), HELD);
            let mode = if gives_up == GivesUp::Shares { LockMode::Shared } else { LockMode::Exclusive };
            let waiting = two.ask_for(mode, space, OWNER, true);
            let (who_waits, waiter) = (two.clone(), waiting.clone());
            let hears = move |_: &dyn Fn(Duration)| {
                who_waits.hear();
                assert_eq!(waiter.answer(), HELD);
                Some(Death::Sudden)
            };
            world.network().cut_after(Cut::Reply, 0);
            world.meanwhile(|server| server.locks.figures().waiting == 0, hears);
            // The client that has the lock now comes back first.
            let comes_back = two.clone();
            world.behind_death(move || comes_back.heartbeat());
            match (gives_up, space) {
                (GivesUp::Unlocks, _) => one.unlock(space).expect("unlock"),
                (GivesUp::Closes, LockSpace::Ranges) => one.volume.flush(one.handle, OWNER).expect("flush"),
                (GivesUp::Closes, LockSpace::Whole) => one.volume.release(one.handle),
                (GivesUp::Shares, _) => {
                    let shared = one.ask_for(LockMode::Shared, space, OWNER, false);
                    two.heartbeat();
                    one.heartbeat();
                    one.hear();
                    assert_eq!(shared.answer(), HELD);
                }
            }
            assert!(world.has_acted() && world.has_died(), "{gives_up:?}");
            two.heartbeat();
            one.heartbeat();
            let held_by_both = if gives_up == GivesUp::Shares { 2 } else { 1 };
            assert_eq!(held(world), held_by_both, "{gives_up:?}, {space:?}");
            assert_eq!(two.unlock(space), Ok(()), "{gives_up:?}, {space:?}: it was not lost");
            if gives_up != GivesUp::Closes {
                assert_eq!(
                    one.unlock(space),
                    Ok(()),
                    "{gives_up:?}, {space:?}: nor was it by who gave it up"
                );
            }
        });
    }
}

#[test]
fn an_open_file_whose_lock_was_lost_is_fenced() {
    both(|world, space| {
        let (mut one, two) = (User::new(world), User::new(world));
        let other = one.volume.open(&CALLER, one.ino, READ_WRITE).expect("open").handle;
        assert_eq!(one.try_lock(space), HELD);
        one.volume.write(&CALLER, one.handle, 0, b"locked").expect("write");
        world.pass(LEASE * 2);
        assert_eq!(two.try_lock(space), HELD);
        two.volume.write(&CALLER, two.handle, 0, b"others").expect("write");
        // The session is gone, so the request is not sent again.
        let io = FsError::Server(Status::Io);
        assert_eq!(one.volume.write(&CALLER, one.handle, 0, b"fenced"), Err(io.clone()));
        assert_eq!(one.volume.read(&CALLER, one.handle, 0, 6, &mut |_| ()), Err(io.clone()));
        assert_eq!(one.volume.fsync(&CALLER, one.handle, false), Err(io));
        let mut bytes = Vec::new();
        one.volume.read(&CALLER, other, 0, 6, &mut |read| bytes.extend_from_slice(read)).expect("read");
        assert_eq!(bytes, b"others", "another open file of the same mount");
        one.open_again();
        one.volume.write(&CALLER, one.handle, 0, b"anew").expect("write");
    });
}

#[test]
fn a_circle_of_two_clients_is_told() {
    let world = World::new(CONFIG);
    let (one, two) = (User::new(&world), User::new(&world));
    let ask = |user: &User, at: u64| {
        let (range, mode) = (LockRange { first: at, last: at }, LockMode::Exclusive);
        let lock = Lock { space: LockSpace::Ranges, owner: OWNER, range, mode, pid: 1 };
        let waiter = Arc::<Waiter>::default();
        user.volume.set_lock(&CALLER, user.handle, lock, true, waiter.clone());
        waiter
    };
    assert_eq!((ask(&one, 1).answer(), ask(&two, 2).answer()), (HELD, HELD));
    let waiting = ask(&one, 2);
    assert_eq!(ask(&two, 1).answer(), Some(Err(FsError::Server(Status::Deadlock))));
    two.unlock(LockSpace::Ranges).expect("unlock");
    one.hear();
    assert_eq!(waiting.answer(), HELD);
}

#[test]
fn who_waits_when_a_mount_ends_is_told() {
    let world = World::new(CONFIG);
    let (one, two) = (User::new(&world), User::new(&world));
    assert_eq!(one.try_lock(LockSpace::Whole), HELD);
    let waiting = two.ask(LockSpace::Whole, OWNER, true);
    two.volume.shut_down();
    assert_eq!(waiting.answer(), Some(Err(FsError::ShutDown)));
    assert_eq!(world.with_server(|server| server.server().locks.figures().waiting), 0);
}
