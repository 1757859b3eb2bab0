//! Changes that a client makes again after it was away while its server was killed and another one started. They must never replace what other
//! clients were answered in this life of the server or the one before, and the client must hear of the changes that are lost.

mod world;

use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::{FsError, Handle, OpenHow, Volume};
use cuttlefs_common::attr::SetAttr;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::life::End;
use cuttlefs_common::locks::LockOwner;
use cuttlefs_common::rdma::sim::Translation;
use cuttlefs_common::rpc::{Allocate, Request};
use cuttlefs_common::status::Status;
use cuttlefs_server::server::Server;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;
use world::contents::{CALLER, read};
use world::{Crash, Death, LEASE, World, WorldConfig};

const READ_WRITE: OpenHow = OpenHow::READ_WRITE;
const APPEND: OpenHow = OpenHow { append: true, ..READ_WRITE };
const CONFIG: WorldConfig = WorldConfig::new(1, Translation::Target, 1024, 64);
const LOST: Result<(), FsError> = Err(FsError::Server(Status::Io));

/// A client that has the file open, also for appending.
struct User {
    volume: RemoteVolume,
    ino: InodeNo,
    handle: Handle,
    log: Handle,
}

impl User {
    fn new(world: &World) -> Self {
        let volume = world.client();
        let made = volume.create(&CALLER, InodeNo::ROOT, b"f", 0o644, false, READ_WRITE);
        let (attr, file) = made.expect("create or open");
        let log = volume.open(&CALLER, attr.ino, APPEND).expect("open").handle;
        Self { volume, ino: attr.ino, handle: file.handle, log }
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        assert_eq!(self.volume.write(&CALLER, self.handle, offset, bytes), Ok(bytes.len() as u32));
    }

    fn append(&self, bytes: &[u8]) {
        assert_eq!(self.volume.write(&CALLER, self.log, 0, bytes), Ok(bytes.len() as u32));
    }

    fn cut(&self, size: u64) {
        let set = SetAttr { size: Some(size), ..SetAttr::default() };
        self.volume.set_attr(&CALLER, self.ino, set).expect("cut");
    }

    fn allocate(&self, offset: u64, len: u64, how: Allocate) {
        self.volume.allocate(&CALLER, self.handle, offset, len, how).expect("allocate");
    }

    fn fsync(&self) -> Result<(), FsError> {
        self.volume.fsync(&CALLER, self.handle, false)
    }

    /// Comes back to a server that has started since, and makes its unsynced changes again.
    fn come_back(&self) {
        let session = self.volume.session();
        session.call(&session.own_caller(), || Request::Heartbeat, |_| Ok(())).expect("heartbeat");
    }

    fn all(&self) -> Vec<u8> {
        read(&self.volume, self.handle, 0, 100_000).expect("read")
    }
}

/// When the client that was away comes back: in the grace period, or after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Back {
    InGrace,
    BehindGrace,
}

fn kill(world: &World, power: bool) {
    if power {
        world.lose_power()
    } else {
        world.kill()
    }
    world.start();
}

/// `away` does `before` and is away while the server dies and `stays` does `since`; then it comes back. The file must contain `expected`, now and
/// after a power loss, and the next fsync of `away` must return `told`. `base` is the synced contents before.
fn away(
    before: impl Fn(&User),
    since: impl Fn(&User),
    expected: &[u8],
    told: Result<(), FsError>,
    base: &[u8],
) {
    for back in [Back::InGrace, Back::BehindGrace] {
        for power in [false, true] {
            let world = World::new(CONFIG);
            let (away, stays) = (User::new(&world), User::new(&world));
            stays.write(0, base);
            assert_eq!(stays.fsync(), Ok(()));
            before(&away);
            kill(&world, power);
            since(&stays);
            assert_eq!(stays.fsync(), Ok(()));
            if back == Back::BehindGrace {
                world.pass(LEASE / 2);
                stays.come_back();
                world.pass(LEASE / 2 + Duration::from_secs(1));
            }
            away.come_back();
            let what = format!("{back:?}, power lost: {power}");
            assert_eq!(String::from_utf8_lossy(&stays.all()), String::from_utf8_lossy(expected), "{what}");
            assert_eq!(away.fsync(), told, "{what}");
            assert_eq!(away.fsync(), Ok(()), "it is told once: {what}");
            assert_eq!(stays.fsync(), Ok(()), "nobody else has lost anything: {what}");
            kill(&world, true);
            assert_eq!(stays.all(), expected, "{what}");
        }
    }
}

#[test]
fn an_append_that_was_acknowledged_since_stays() {
    away(|b| b.append(b"B before\n"), |a| a.append(b"A synced\n"), b"base.\nA synced\n", LOST, b"base.\n");
}

#[test]
fn writes_cuts_punches_and_copies_since_stay() {
    let base = &[b'.'; 8];
    away(|b| b.write(2, b"BBBB"), |a| a.write(2, b"AAAA"), b"..AAAA..", LOST, base);
    away(|b| b.write(2, b"BBBB"), |a| a.cut(2), b"..", LOST, base);
    away(
        |b| b.write(8, b"BBBB"),
        |a| {
            a.cut(0);
            a.append(b"new");
        },
        b"new",
        LOST,
        base,
    );
    away(|b| b.write(8, b"BBBB"), |a| a.cut(8), base, LOST, base);
    away(|b| b.write(2, b"BBBB"), |a| a.allocate(2, 4, Allocate::PunchHole), b"..\0\0\0\0..", LOST, base);
    away(
        |b| b.write(2, b"BBBB"),
        |a| a.allocate(0, 8, Allocate::ZeroRange { keep_size: false }),
        &[0; 8],
        LOST,
        base,
    );
    away(
        |b| b.write(4, b"BBBB"),
        |a| {
            a.write(0, b"copy");
            let copied = a.volume.copy_range(&CALLER, a.handle, 0, a.handle, 4, 4);
            assert_eq!(copied.map(|copied| copied.len), Ok(4));
        },
        b"copycopy",
        LOST,
        base,
    );
}

/// As `away`, for changes of both clients that do not touch: as long as the server knows the changes by range nothing is lost.
fn beside(before: impl Fn(&User), since: impl Fn(&User), expected: &[u8], base: &[u8]) {
    for power in [false, true] {
        let world = World::new(CONFIG);
        let (away, stays) = (User::new(&world), User::new(&world));
        stays.write(0, base);
        assert_eq!(stays.fsync(), Ok(()));
        before(&away);
        kill(&world, power);
        since(&stays);
        assert_eq!(stays.fsync(), Ok(()));
        away.come_back();
        assert_eq!((away.fsync(), stays.fsync()), (Ok(()), Ok(())), "power lost: {power}");
        assert_eq!(String::from_utf8_lossy(&stays.all()), String::from_utf8_lossy(expected), "{power}");
        kill(&world, true);
        assert_eq!(stays.all(), expected, "power lost: {power}");
    }
}

#[test]
fn what_goes_beside_what_others_changed_is_restored() {
    let base = &[b'.'; 8];
    beside(|b| b.write(0, b"BB"), |a| a.write(2, b"AA"), b"BBAA....", base);
    beside(|b| b.write(0, b"BBBBBB"), |a| a.cut(9), b"BBBBBB..\0", base);
    beside(|b| b.write(8, b"BB"), |a| a.write(0, b"AA"), b"AA......BB", base);
    beside(|b| b.cut(12), |a| a.write(0, b"AA"), b"AA......\0\0\0\0", base);
    beside(|b| b.allocate(0, 4, Allocate::PunchHole), |a| a.write(6, b"AA"), b"\0\0\0\0..AA", base);
    beside(
        |b| b.write(0, b"BB"),
        |a| a.allocate(0, 9000, Allocate::Reserve { keep_size: true }),
        b"BB......",
        base,
    );
}

#[test]
fn what_was_overtaken_before_the_kill_is_no_loss() {
    for late in [false, true] {
        for (change, expected) in [
            ((|a: &User| a.write(2, b"AAAA")) as fn(&User), b"..AAAA..".as_slice()),
            (|a| a.cut(2), b".."),
            (|a| a.allocate(0, 8, Allocate::PunchHole), &[0; 8]),
        ] {
            let world = World::new(CONFIG);
            let (away, stays) = (User::new(&world), User::new(&world));
            stays.write(0, &[b'.'; 8]);
            assert_eq!(stays.fsync(), Ok(()));
            away.write(2, b"BBBB");
            change(&stays);
            assert_eq!(stays.fsync(), Ok(()));
            kill(&world, true);
            if late {
                world.pass(LEASE + Duration::from_secs(1));
            }
            away.come_back();
            assert_eq!(stays.all(), expected);
            assert_eq!((away.fsync(), stays.fsync()), (Ok(()), Ok(())));
            assert_eq!(stays.all(), expected);
        }
    }
}

#[test]
fn a_cut_that_nobody_synced_holds_against_older_writes_and_not_against_newer_ones() {
    let world = World::new(CONFIG);
    let (away, stays) = (User::new(&world), User::new(&world));
    away.write(0, b"0123456789");
    stays.cut(4);
    away.write(6, b"new");
    kill(&world, false);
    away.come_back();
    assert_eq!(stays.all(), b"0123\0\0new");
    assert_eq!((away.fsync(), stays.fsync()), (Ok(()), Ok(())));
    // A cut to a larger size between two others, and writes of the other client before, between and after them.
    stays.cut(0);
    away.write(0, b"0123456789");
    stays.cut(8);
    stays.cut(6);
    kill(&world, false);
    away.come_back();
    assert_eq!(stays.all(), b"012345");
    assert_eq!((away.fsync(), stays.fsync()), (Ok(()), Ok(())));
}

#[test]
fn a_cut_of_an_earlier_life_hides_nothing_that_was_written_since() {
    let world = World::new(CONFIG);
    let one = User::new(&world);
    one.write(0, &[1; 9000]);
    assert_eq!(one.fsync(), Ok(()));
    one.write(0, &[2; 10]);
    one.cut(5000);
    kill(&world, false);
    one.come_back();
    one.write(0, &[3; 9000]);
    one.cut(8000);
    kill(&world, false);
    one.come_back();
    assert_eq!(one.all(), [3; 8000]);
    assert_eq!(one.fsync(), Ok(()));
}

#[test]
fn a_cut_is_restored_between_what_came_before_and_behind_it_also_when_power_took_it() {
    for (first, power) in [(0, false), (0, true), (1, false), (1, true)] {
        let world = World::new(CONFIG);
        let users = [User::new(&world), User::new(&world)];
        let [one, two] = &users;
        one.write(0, b"0123456789");
        assert_eq!(one.fsync(), Ok(()));
        two.write(6, b"older");
        one.cut(4);
        two.write(8, b"new");
        let expected = b"0123\0\0\0\0new";
        kill(&world, power);
        users[first].come_back();
        users[1 - first].come_back();
        assert_eq!(one.all(), expected, "{first} came first, power lost: {power}");
        assert_eq!((one.fsync(), two.fsync()), (Ok(()), Ok(())));
        kill(&world, true);
        assert_eq!(two.all(), expected, "{first} came first, power lost: {power}");
    }
}

#[test]
fn where_a_file_was_made_longer_nobody_restores_what_was_there_before() {
    for away_first in [false, true] {
        let world = World::new(CONFIG);
        let users = [User::new(&world), User::new(&world)];
        let [away, stays] = &users;
        stays.write(0, b"0123");
        assert_eq!(stays.fsync(), Ok(()));
        away.write(8, b"lost");
        kill(&world, false);
        stays.cut(6);
        stays.write(20, b"end");
        kill(&world, false);
        let [first, second] = if away_first { [away, stays] } else { [stays, away] };
        first.come_back();
        second.come_back();
        let expected = [b"0123".as_slice(), &[0; 16], b"end"].concat();
        assert_eq!(stays.all(), expected, "who was away came first: {away_first}");
        assert_eq!(stays.fsync(), Ok(()));
        kill(&world, true);
        assert_eq!(stays.all(), expected, "who was away came first: {away_first}");
    }
}

#[test]
fn space_that_was_reserved_behind_a_punch_stays_the_files() {
    for power in [false, true] {
        let world = World::new(CONFIG);
        let user = User::new(&world);
        user.write(0, &[b'.'; 20_000]);
        assert_eq!(user.fsync(), Ok(()));
        user.allocate(4096, 40_000, Allocate::PunchHole);
        user.allocate(0, 49_152, Allocate::Reserve { keep_size: true });
        kill(&world, power);
        user.come_back();
        let attr = user.volume.get_attr(&CALLER, user.ino).expect("attributes");
        assert_eq!((attr.size, attr.allocated_bytes), (20_000, 49_152), "power lost: {power}");
        assert_eq!(user.all()[4096..], [0; 20_000 - 4096]);
    }
}

#[test]
fn what_two_clients_restore_stands_in_the_order_it_was_answered() {
    for first in [0, 1] {
        let world = World::new(CONFIG);
        let users = [User::new(&world), User::new(&world)];
        let [one, two] = &users;
        one.write(0, b"111111");
        two.write(2, b"2222");
        one.write(4, b"11");
        kill(&world, false);
        users[first].come_back();
        assert_eq!(users[first].fsync(), Ok(()));
        users[1 - first].come_back();
        assert_eq!(one.all(), b"112211", "{first} came first");
        assert_eq!((one.fsync(), two.fsync()), (Ok(()), Ok(())));
        kill(&world, true);
        assert_eq!(two.all(), b"112211");
    }
}

/// A hole, and zeros, may leave the length to the change that they lie over. A cut does not.
#[test]
fn a_length_is_restored_though_newer_holes_lie_over_all_of_the_change_that_gave_it() {
    let zeros = Allocate::ZeroRange { keep_size: true };
    // What made the file longer; where the hole begins; whether there is a cut behind the hole.
    for (first, how, at, cut) in [0, 1].into_iter().flat_map(|first| {
        let hows = [Allocate::PunchHole, zeros];
        hows.into_iter().flat_map(move |how| {
            [1000, 1050].into_iter().flat_map(move |at| [false, true].map(|cut| (first, how, at, cut)))
        })
    }) {
        let world = World::new(CONFIG);
        let users = [User::new(&world), User::new(&world)];
        let [one, two] = &users;
        one.write(0, &[b'.'; 1000]);
        assert_eq!(one.fsync(), Ok(()));
        one.append(&[b'a'; 100]);
        two.allocate(at, 5000, how);
        if cut {
            two.cut(900);
        }
        kill(&world, false);
        users[first].come_back();
        users[1 - first].come_back();
        let mut expected = [vec![b'.'; 1000], vec![b'a'; at as usize - 1000]].concat();
        expected.resize(1100, 0);
        if cut {
            expected.truncate(900);
        }
        assert!(one.all() == expected, "{first} came first, {how:?} at {at}, {cut}: {}", one.all().len());
        assert_eq!((one.fsync(), two.fsync()), (Ok(()), Ok(())));
        kill(&world, true);
        assert!(two.all() == expected, "{first} came first, {how:?} at {at}, {cut}: {}", two.all().len());
    }
}

#[test]
fn who_misses_a_whole_life_of_the_server_restores_nothing_over_what_others_restored_in_it() {
    let world = World::new(CONFIG);
    let (away, stays) = (User::new(&world), User::new(&world));
    away.write(0, b"older");
    stays.write(0, b"newer");
    away.write(8, b"newest");
    kill(&world, false);
    stays.come_back();
    assert_eq!(stays.fsync(), Ok(()));
    kill(&world, false);
    away.come_back();
    assert_eq!(stays.all(), b"newer\0\0\0newest");
    // The client `away` cannot know which of the two changes was later.
    assert_eq!((away.fsync(), stays.fsync()), (LOST, Ok(())));
    // Nor may its changes replace a change that was acknowledged by a server which this client has never seen.
    away.write(0, b"lost.");
    kill(&world, false);
    stays.write(0, b"other");
    assert_eq!(stays.fsync(), Ok(()));
    kill(&world, false);
    away.come_back();
    assert_eq!(stays.all(), b"other\0\0\0newest");
    assert_eq!((away.fsync(), stays.fsync()), (LOST, Ok(())));
}

/// A child process that was forked for another purpose closes its inherited descriptors and ignores the result.
#[test]
fn a_loss_is_told_by_fsync_to_each_handle_also_if_a_close_has_said_it() {
    let world = World::new(CONFIG);
    let (away, stays) = (User::new(&world), User::new(&world));
    away.write(0, b"lost");
    kill(&world, false);
    stays.write(0, b"stays");
    assert_eq!(stays.fsync(), Ok(()));
    away.come_back();
    for _ in 0..2 {
        assert_eq!(away.volume.flush(away.handle, LockOwner(1)), LOST);
    }
    assert_eq!((away.fsync(), away.fsync()), (LOST, Ok(())));
    assert_eq!(away.volume.flush(away.handle, LockOwner(1)), Ok(()));
    assert_eq!(away.volume.fsync(&CALLER, away.log, true), LOST, "another handle");
    assert_eq!(stays.fsync(), Ok(()));
}

/// The server dies at each event of a recovery in turn. A client that is alone loses nothing.
#[test]
fn a_recovery_that_dies_at_any_event_loses_nothing() {
    for power in [false, true] {
        let mut events = 0;
        loop {
            let world = World::new(CONFIG);
            let user = User::new(&world);
            user.write(0, &[b'.'; 9000]);
            assert_eq!(user.fsync(), Ok(()));
            user.write(100, b"one");
            user.cut(8000);
            user.write(8500, b"two");
            user.allocate(4000, 1000, Allocate::PunchHole);
            user.append(b"three");
            let expected = user.all();
            kill(&world, power);
            world.crash_after(Crash { end: End { after: events, of: None }, power: false }, None);
            user.come_back();
            // Time for write-backs of restored changes, before and after the end of the recovery.
            world.pass(Duration::from_secs(3));
            user.come_back();
            let died = !world.will_crash();
            world.calm();
            assert!(user.all() == expected, "died at {events}, power lost: {power}");
            assert_eq!(user.fsync(), Ok(()), "died at {events}, power lost: {power}");
            if !died {
                break;
            }
            events += 1;
        }
        assert!(events > 20, "{events} events");
    }
}

/// Another client's sync makes the file durable at each moment of a recovery in turn. The file must then be as it was at some time.
#[test]
fn a_file_is_nothing_in_a_recovery_that_it_never_was() {
    let (mut moments, mut seen) = (0, BTreeSet::new());
    loop {
        let world = World::new(CONFIG);
        let (user, other) = (User::new(&world), User::new(&world));
        let mut versions = vec![user.all()];
        assert_eq!(user.fsync(), Ok(()));
        let changes: [&dyn Fn(); 8] = [
            &|| user.write(0, &[1; 189]),
            &|| user.write(22, &[2; 6613]),
            &|| user.write(100, &[3; 90_000]),
            &|| user.allocate(50_000, 30_000, Allocate::PunchHole),
            &|| user.cut(20_000),
            &|| user.write(30_000, &[4; 10]),
            &|| user.allocate(20, 29_990, Allocate::ZeroRange { keep_size: true }),
            &|| user.write(30_005, &[5; 10]),
        ];
        for change in changes {
            change();
            versions.push(user.all());
        }
        kill(&world, false);
        other.come_back();
        let polls = Cell::new(0);
        let is_time = move |_: &Server| polls.replace(polls.get() + 1) == moments;
        let (syncs, looks) = (Rc::new(other), Rc::new(RefCell::new(None)));
        let (other, found) = (syncs.clone(), looks.clone());
        world.meanwhile(is_time, move |_| {
            syncs.volume.session().sync_all(&CALLER).expect("sync");
            Some(Death::Sudden)
        });
        world.behind_death(move || *looks.borrow_mut() = Some(other.all()));
        user.come_back();
        if !world.has_acted() {
            break;
        }
        // The client may notice the death only in this call.
        user.come_back();
        if let Some(found) = found.take() {
            let what = format!("moment {moments}: {} bytes", found.len());
            let lengths = versions.iter().map(Vec::len);
            seen.extend(lengths.clone().filter(|length| *length == found.len()));
            assert!(lengths.clone().any(|length| length == found.len()), "{what}, as it never was long");
            // Zeroing is not atomic with the writes around it.
            let had = |at: usize, byte: &u8| versions.iter().any(|version| version.get(at) == Some(byte));
            let wrong = found.iter().enumerate().find(|(at, byte)| !had(*at, byte));
            assert_eq!(wrong, None, "{what}: a byte that never was there");
        }
        assert!(Some(&user.all()) == versions.last(), "moment {moments}");
        assert_eq!(user.fsync(), Ok(()));
        moments += 1;
    }
    assert!(seen.len() > 4, "{seen:?} in {moments} moments");
}

/// The first change changes no byte, and is the first change of the file in this life of the server.
#[test]
fn whoever_is_alone_loses_nothing_in_a_second_life() {
    type Doing<'d> = (&'d str, &'d dyn Fn(&User));
    let firsts: [Doing<'_>; 6] = [
        ("space behind the end", &|user| user.allocate(3000, 9000, Allocate::Reserve { keep_size: true })),
        ("space within", &|user| user.allocate(0, 10, Allocate::Reserve { keep_size: false })),
        ("a hole in a hole", &|user| user.allocate(8192, 4096, Allocate::PunchHole)),
        ("zeros behind the end", &|user| user.allocate(8192, 4096, Allocate::ZeroRange { keep_size: true })),
        ("its own length", &|user| user.cut(3000)),
        ("cut twice", &|user| {
            user.cut(0);
            let cut = OpenHow { truncate: true, ..READ_WRITE };
            let open = user.volume.open(&CALLER, user.ino, cut).expect("open");
            user.volume.release(open.handle);
        }),
    ];
    let thens: [Doing<'_>; 4] = [
        ("cut", &|user| user.cut(20)),
        ("write", &|user| user.write(5, b"five")),
        ("grow", &|user| user.cut(5000)),
        ("punch", &|user| user.allocate(1, 10, Allocate::PunchHole)),
    ];
    for (first, then) in firsts.iter().flat_map(|first| thens.iter().map(move |then| (first, then))) {
        for death in [Death::Sudden, Death::WrittenBack, Death::PowerLost] {
            let world = World::new(CONFIG);
            let user = User::new(&world);
            user.write(0, &[b'.'; 3000]);
            assert_eq!(user.fsync(), Ok(()));
            kill(&world, false);
            (first.1)(&user);
            (then.1)(&user);
            let before = user.all();
            if death == Death::WrittenBack {
                world.pass(Duration::from_secs(3));
            }
            kill(&world, death == Death::PowerLost);
            let what = format!("{}, {}, {death:?}", first.0, then.0);
            assert_eq!(user.fsync(), Ok(()), "{what}");
            assert!(user.all() == before, "{what}");
        }
    }
}
