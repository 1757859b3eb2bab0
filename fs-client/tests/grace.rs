//! The grace period of a server that follows another one: what nobody can say yet is waited for, and no longer.

mod serving;
mod world;

use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::{FsError, Handle, OpenHow, Volume};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rdma::Endpoint;
use cuttlefs_common::rdma::sim::Translation;
use cuttlefs_common::rpc::Request;
use cuttlefs_common::status::Status;
use cuttlefs_common::world::Clock;
use cuttlefs_server::pool::FormatOptions;
use cuttlefs_server::region::Hotspots;
use cuttlefs_server::region::policy::RegionPolicy;
use cuttlefs_server::serve::RunningServer;
use serving::Serve;
use std::path::Path;
use std::time::{Duration, Instant};
use world::contents::{CALLER, pattern, read};
use world::{LEASE, World, WorldConfig};

const READ_WRITE: OpenHow = OpenHow { read: true, write: true, append: false, truncate: false, sync: false };
/// What is done at once.
const AT_ONCE: Duration = Duration::from_secs(1);

/// A server that followed one that was killed, and a file without a name that has 40 of its 64 pages: the second client
/// has it open.
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

/// What it takes of the world's time.
fn timed<T>(world: &World, run: impl FnOnce() -> T) -> (T, Duration) {
    let begun = world.clock().monotonic();
    let result = run();
    (result, world.clock().monotonic() - begun)
}

/// Writes 30 pages to a new file.
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

fn start(pool: &Path, listen: &Endpoint) -> RunningServer {
    let with = Serve {
        frames: 64,
        listen: vec![listen.clone()],
        policy: RegionPolicy::default(),
        hotspots: Hotspots::Pages,
        durable_answers: false,
        rings: None,
    };
    serving::serve(pool, with).expect("start")
}

#[test]
fn who_waits_keeps_no_server_from_stopping_and_asks_the_next_one() {
    let directory = tempfile::tempdir().expect("directory");
    let pool = directory.path().join("pool");
    let options = FormatOptions { dir: pool.clone(), size: 1 << 20, ..FormatOptions::default() };
    serving::make_pool(&options, [7; 16]);
    let listen = format!("shm://{}", directory.path().join("socket").display()).parse().expect("an endpoint");
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
