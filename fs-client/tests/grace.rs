//! The grace period of a server that follows another one: a request whose answer depends on clients that may come back waits for them, but no longer
//! than needed; and files that requests opened, which are sent again after a death, stay open after the grace period.

mod serving;
mod world;

use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::{FsError, Handle, OpenHow, Volume};
use cuttlefs_common::attr::{FileKind, SetAttr};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::locks::{Lock, LockMode, LockOwner, LockRange, LockSpace};
use cuttlefs_common::rdma::Endpoint;
use cuttlefs_common::rdma::sim::{Cut, Translation};
use cuttlefs_common::rpc::{NewNode, RenameMode, Request};
use cuttlefs_common::status::Status;
use cuttlefs_common::world::Clock;
use cuttlefs_server::GATHER;
use cuttlefs_server::pages::Hotspots;
use cuttlefs_server::pages::policy::RegionPolicy;
use cuttlefs_server::pool::FormatOptions;
use cuttlefs_server::serve::RunningServer;
use cuttlefs_server::server::Server;
use serving::Serve;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use world::contents::{CALLER, pattern, read};
use world::waiter::Waiter;
use world::{Death, LEASE, World, WorldConfig};

const READ_WRITE: OpenHow = OpenHow::READ_WRITE;
/// Less than this counts as not waiting.
const AT_ONCE: Duration = Duration::from_secs(1);

/// A world in which a server has followed a killed one. A file without a name has 40 of the pool's 64 pages, and the second client has it open.
fn with_a_file_to_reclaim() -> (World, [RemoteVolume; 2], InodeNo, Handle) {
    let world = World::new(WorldConfig::new(1, Translation::Target, 64, 16));
    let clients = [world.client(), world.client()];
    let [one, two] = &clients;
    let (attr, file) = one.create(&CALLER, InodeNo::ROOT, b"file", 0o644, true, READ_WRITE).expect("create");
    one.write(&CALLER, file.handle, 0, &pattern(40 * 4096, 1)).expect("write");
    let open = two.open(&CALLER, attr.ino, READ_WRITE).expect("open");
    one.release(file.handle);
    one.session().sync_all(&CALLER).expect("sync");
    one.unlink(&CALLER, InodeNo::ROOT, b"file").expect("unlink");
    world.kill();
    world.start();
    (world, clients, attr.ino, open.handle)
}

/// Returns the result of `run`, and how much of the world's time it took.
fn timed<T>(world: &World, run: impl FnOnce() -> T) -> (T, Duration) {
    let begun = world.clock().monotonic();
    let result = run();
    (result, world.clock().monotonic() - begun)
}

/// Writes 30 pages to a new file. They fit only if the file without a name is freed.
fn fill(volume: &RemoteVolume) -> Result<u32, FsError> {
    let (_, file) = volume.create(&CALLER, InodeNo::ROOT, b"other", 0o644, true, READ_WRITE).expect("create");
    volume.write(&CALLER, file.handle, 0, &pattern(30 * 4096, 2))
}

#[test]
fn space_that_may_come_back_is_waited_for() {
    let (world, [one, _away], ino, _) = with_a_file_to_reclaim();
    let (filled, took) = timed(&world, || fill(&one));
    assert_eq!(filled, Ok(30 * 4096));
    assert!(took <= LEASE + AT_ONCE, "{took:?}");
    assert_eq!(one.get_attr(&CALLER, ino).map(|_| ()), Err(FsError::Server(Status::Stale)));
}

#[test]
fn a_file_that_may_come_back_is_waited_for() {
    let (world, [one, _away], ino, _) = with_a_file_to_reclaim();
    let (attr, took) = timed(&world, || one.get_attr(&CALLER, ino).map(|_| ()));
    assert_eq!(attr, Err(FsError::Server(Status::Stale)));
    assert!(took <= LEASE + AT_ONCE, "{took:?}");
    let (filled, took) = timed(&world, || fill(&one));
    assert_eq!(filled, Ok(30 * 4096));
    assert!(took < AT_ONCE, "{took:?}");
}

#[test]
fn nobody_waits_any_more_for_a_file_that_came_back() {
    let (world, clients, ino, handle) = with_a_file_to_reclaim();
    world.set_bystanders(&clients);
    let [one, two] = &clients;
    world.speaks(0);
    let (attr, took) = timed(&world, || one.get_attr(&CALLER, ino).map(|attr| attr.nlink));
    assert_eq!(attr, Ok(0));
    assert!(took < AT_ONCE, "{took:?}");
    let (filled, took) = timed(&world, || fill(one));
    assert_eq!(filled, Err(FsError::Server(Status::NoSpace)));
    assert!(took < AT_ONCE, "{took:?}");
    world.speaks(1);
    assert_eq!(read(two, handle, 0, 40 * 4096), Ok(pattern(40 * 4096, 1)));
    two.release(handle);
    assert_eq!(two.get_attr(&CALLER, ino).map(|_| ()), Err(FsError::Server(Status::Stale)));
}

/// When another client removes the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Removed {
    /// After the request took effect, before its server dies.
    Before,
    /// When the client of the request is back at the next server, before it sends the request again.
    Behind,
}

/// A client sends a request that takes effect but is not answered; the server dies, and another client removes the file of the request. When the
/// request comes again the grace period is over. Its answer and its inode must be as if the server had not died.
fn asked_again<P, T>(
    removed: Removed,
    prepare: impl Fn(&RemoteVolume) -> P,
    ask: impl Fn(&RemoteVolume, P) -> Result<T, FsError>,
    names: &'static [&'static [u8]],
    check: impl Fn(&RemoteVolume, T) -> InodeNo,
) {
    let world = World::new(WorldConfig::new(1, Translation::Target, 64, 16));
    let one = world.client();
    let client = world.with_server(|server| server.server().sessions.list()[0].client());
    let other = Rc::new(world.client());
    let free = one.stat_fs(&CALLER).expect("statfs");
    let prepared = prepare(&one);
    let first = world.with_server(|server| server.server().about.epoch);
    let is_back = move |server: &Server| {
        server.about.epoch != first
            && server.sessions.of(client).is_some()
            && server.sessions.has_recovered(client)
    };
    let remove = {
        let other = other.clone();
        move || names.iter().for_each(|name| other.unlink(&CALLER, InodeNo::ROOT, name).expect("unlink"))
    };
    match removed {
        Removed::Before => {
            world.network().cut_after(Cut::Reply, 0);
            let is_done = |server: &Server| server.meta.lookup(InodeNo::ROOT, NEW).is_ok();
            world.meanwhile(is_done, move |_| {
                remove();
                Some(Death::Sudden)
            });
            let other = other.clone();
            world.meanwhile(is_back, move |pass| {
                other.session().call(&CALLER, || Request::Heartbeat, |_| Ok(())).expect("heartbeat");
                pass(AT_ONCE);
                None
            });
        }
        Removed::Behind => {
            world.kill_at(Cut::Reply, Death::Sudden);
            world.meanwhile(is_back, move |pass| {
                remove();
                pass(AT_ONCE);
                None
            });
        }
    }
    let answer = ask(&one, prepared).unwrap_or_else(|error| panic!("{removed:?}: {error}"));
    assert!(world.has_acted() && world.has_died(), "{removed:?}");
    assert!(world.with_server(|server| server.server().sessions.is_settled()), "{removed:?}");
    let ino = check(&one, answer);
    for volume in [&one, &*other] {
        assert_eq!(
            volume.get_attr(&CALLER, ino).map(|_| ()),
            Err(FsError::Server(Status::Stale)),
            "{removed:?}"
        );
    }
    assert_eq!(other.stat_fs(&CALLER), Ok(free), "{removed:?}");
}

const OLD: &[u8] = b"old";
const NEW: &[u8] = b"new";

#[test]
fn a_file_that_was_created_and_unlinked_meanwhile_is_open_when_it_is_asked_for_again() {
    for removed in [Removed::Before, Removed::Behind] {
        let create =
            |one: &RemoteVolume, ()| one.create(&CALLER, InodeNo::ROOT, NEW, 0o644, true, READ_WRITE);
        asked_again(
            removed,
            |_| (),
            create,
            &[NEW],
            |one, (attr, file)| {
                one.write(&CALLER, file.handle, 0, b"mine").expect("write");
                assert_eq!(read(one, file.handle, 0, 10), Ok(b"mine".to_vec()));
                assert_eq!(one.get_attr(&CALLER, attr.ino).map(|attr| attr.nlink), Ok(0));
                one.release(file.handle);
                attr.ino
            },
        );
    }
}

/// For every kind of inode. There is no `Before`: without a death an inode that is not open goes with its last name.
#[test]
fn what_was_linked_and_unlinked_meanwhile_was_linked() {
    for node in
        [NewNode::File, NewNode::Symlink(b"target"), NewNode::Special { kind: FileKind::Fifo, rdev: 0 }]
    {
        let prepare =
            |one: &RemoteVolume| one.make(&CALLER, InodeNo::ROOT, OLD, node, 0o644).expect("make").ino;
        let link = |one: &RemoteVolume, ino| one.link(&CALLER, ino, InodeNo::ROOT, NEW);
        asked_again(Removed::Behind, prepare, link, &[OLD, NEW], |_, attr| attr.ino);
    }
}

#[test]
fn what_was_cut_and_unlinked_meanwhile_was_cut() {
    let prepare = |one: &RemoteVolume| {
        let (attr, file) = one.create(&CALLER, InodeNo::ROOT, OLD, 0o644, true, READ_WRITE).expect("create");
        one.write(&CALLER, file.handle, 0, b"mine").expect("write");
        one.fsync(&CALLER, file.handle, true).expect("fsync");
        one.release(file.handle);
        attr.ino
    };
    asked_again(
        Removed::Behind,
        prepare,
        |one, ino| one.set_attr(&CALLER, ino, SetAttr { size: Some(2), ..SetAttr::default() }),
        &[OLD],
        |_, attr| {
            assert_eq!(attr.size, 2);
            attr.ino
        },
    );
}

/// A new pool in a directory of its own, and an endpoint to serve it at.
fn place() -> (TempDir, PathBuf, Endpoint) {
    let directory = tempfile::tempdir().expect("directory");
    let pool = directory.path().join("pool");
    let options = FormatOptions { dir: pool.clone(), size: 1 << 20, ..FormatOptions::default() };
    serving::make_pool(&options, [7; 16]);
    let listen = format!("shm://{}", directory.path().join("socket").display()).parse().expect("an endpoint");
    (directory, pool, listen)
}

fn start(pool: &Path, listen: &Endpoint) -> RunningServer {
    let with = Serve {
        frames: 64,
        listen: vec![listen.clone()],
        policy: RegionPolicy::default(),
        hotspots: Hotspots::Pages,
        durable_answers: false,
    };
    serving::serve(pool, with).expect("start")
}

#[test]
fn who_waits_keeps_no_server_from_stopping_and_asks_the_next_one() {
    let (_directory, pool, listen) = place();
    let first = start(&pool, &listen);
    let connect = || serving::connect(&listen, "grace", 2, false);
    let (one, two) = (connect(), connect());
    let (attr, _) = two.create(&CALLER, InodeNo::ROOT, b"file", 0o644, true, READ_WRITE).expect("create");
    one.unlink(&CALLER, InodeNo::ROOT, b"file").expect("unlink");
    first.stop();
    let second = start(&pool, &listen);
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| one.get_attr(&CALLER, attr.ino).map(|attr| attr.nlink));
        std::thread::sleep(Duration::from_secs(1));
        assert!(!asking.is_finished(), "the other client has not come back");
        let begun = Instant::now();
        second.stop();
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
        let third = start(&pool, &listen);
        two.session().call(&CALLER, || Request::Heartbeat, |_| Ok(())).expect("heartbeat");
        assert_eq!(asking.join().expect("no panic"), Ok(0));
        one.shut_down();
        two.shut_down();
        third.stop();
    });
}

/// In the grace period a request that does not wait for locks waits for clients that may hold some: the client's own threads hear of its end.
#[test]
fn a_lock_that_is_not_waited_for_is_answered_when_those_who_may_hold_it_are_back() {
    let (_directory, pool, listen) = place();
    let first = start(&pool, &listen);
    let (one, two) =
        (serving::connect(&listen, "holder", 2, false), serving::connect(&listen, "other", 2, true));
    let (attr, held) = one.create(&CALLER, InodeNo::ROOT, b"file", 0o644, true, READ_WRITE).expect("create");
    let open = two.open(&CALLER, attr.ino, READ_WRITE).expect("open");
    let try_lock = |volume: &RemoteVolume, handle: Handle| {
        let (owner, mode) = (LockOwner(1), LockMode::Exclusive);
        let lock = Lock { space: LockSpace::Ranges, owner, range: LockRange::WHOLE, mode, pid: 7 };
        let waiter = Arc::<Waiter>::default();
        volume.set_lock(&CALLER, handle, lock, false, waiter.clone());
        waiter
    };
    assert_eq!(try_lock(&one, held.handle).answer(), Some(Ok(())));
    first.stop();
    let second = start(&pool, &listen);
    let asked = try_lock(&two, open.handle);
    assert_eq!(asked.answer(), None, "the holder has not come back");
    one.session().call(&CALLER, || Request::Heartbeat, |_| Ok(())).expect("heartbeat");
    let begun = Instant::now();
    while asked.answer().is_none() {
        assert!(begun.elapsed() < Duration::from_secs(30), "nobody answers");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(asked.answer(), Some(Err(FsError::Server(Status::Locked))));
    one.shut_down();
    two.shut_down();
    second.stop();
}

/// Two clients that know a synced file of eight bytes. The first one appends four bytes without a sync, and the server is killed.
fn with_an_unsynced_append() -> (World, [RemoteVolume; 2], InodeNo) {
    let world = World::new(WorldConfig::new(1, Translation::Target, 64, 16));
    let clients = [world.client(), world.client()];
    let [one, two] = &clients;
    let (attr, file) = one.create(&CALLER, InodeNo::ROOT, b"log", 0o644, true, READ_WRITE).expect("create");
    one.write(&CALLER, file.handle, 0, b"01234567").expect("write");
    one.fsync(&CALLER, file.handle, false).expect("fsync");
    one.write(&CALLER, file.handle, 8, b"once").expect("write");
    one.release(file.handle);
    let open = two.open(&CALLER, attr.ino, READ_WRITE).expect("open");
    two.release(open.handle);
    world.kill();
    world.start();
    (world, clients, attr.ino)
}

const APPEND: OpenHow = OpenHow { append: true, ..READ_WRITE };

/// Opens the file, appends to it and returns its contents.
fn append_and_read(volume: &RemoteVolume, ino: InodeNo) -> Vec<u8> {
    let open = volume.open(&CALLER, ino, APPEND).expect("open");
    volume.write(&CALLER, open.handle, 0, b"more").expect("append");
    let contents = read(volume, open.handle, 0, 64).expect("read");
    volume.fsync(&CALLER, open.handle, false).expect("fsync");
    volume.release(open.handle);
    contents
}

#[test]
fn who_opens_behind_a_restart_finds_what_was_closed_before_the_kill() {
    let (world, clients, ino) = with_an_unsynced_append();
    world.set_bystanders(&clients);
    let [one, two] = &clients;
    world.speaks(1);
    let (contents, took) = timed(&world, || append_and_read(two, ino));
    assert_eq!(String::from_utf8_lossy(&contents), "01234567oncemore");
    assert!(took < AT_ONCE, "{took:?}");
    world.speaks(0);
    let open = one.open(&CALLER, ino, READ_WRITE).expect("open");
    assert_eq!(one.fsync(&CALLER, open.handle, false), Ok(()), "nothing is lost");
}

#[test]
fn who_does_not_come_back_is_waited_for_a_moment() {
    let (world, [_away, two], ino) = with_an_unsynced_append();
    let (contents, took) = timed(&world, || append_and_read(&two, ino));
    assert_eq!(String::from_utf8_lossy(&contents), "01234567more");
    assert!(took >= AT_ONCE && took <= GATHER + AT_ONCE, "{took:?}");
    let (open, took) = timed(&world, || two.open(&CALLER, ino, READ_WRITE));
    assert!(open.is_ok() && took < AT_ONCE, "{took:?}");
}

#[test]
fn names_are_not_waited_for() {
    let (world, [_away, two], _) = with_an_unsynced_append();
    let (made, took) = timed(&world, || {
        two.make(&CALLER, InodeNo::ROOT, b"other", NewNode::Directory, 0o755)?;
        two.rename(&CALLER, InodeNo::ROOT, b"log", InodeNo::ROOT, b"old", RenameMode::Replace)
    });
    made.expect("it moves");
    assert!(took < AT_ONCE, "{took:?}");
}
