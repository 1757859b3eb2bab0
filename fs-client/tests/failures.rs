//! Cut connections and vanished clients, in one thread: every mutation takes effect once, and everything that a vanished client held becomes free.

mod world;

use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::{Caller, FsError, OpenHow, Volume};
use cuttlefs_common::attr::SetAttr;
use cuttlefs_common::ids::{FileSlot, InodeNo};
use cuttlefs_common::rdma::WindowId;
use cuttlefs_common::rdma::sim::Cut;
use cuttlefs_common::region::FileTable;
use cuttlefs_common::rpc::{Allocate, DirEntry, NewNode, RenameMode, Request, XattrMode};
use cuttlefs_common::status::Status;
use cuttlefs_server::meta::{Caller as MetaCaller, Operation};
use cuttlefs_server::rights::{Account, ExportRule};
use std::time::Duration;
use world::contents::{CALLER, pattern, read};
use world::kinds::{CONFIG, each_kind};
use world::{Death, LEASE, World, WorldConfig};

const READ_WRITE: OpenHow = OpenHow::READ_WRITE;
const APPEND: OpenHow = OpenHow { append: true, ..READ_WRITE };
const ROOT: InodeNo = InodeNo::ROOT;

/// Runs `test` with the request lost and with the reply lost; first with only that, then with a death of the server at that moment of each kind after
/// which the next server knows all answered changes.
fn cut_both_ways(test: impl Fn(&World, &dyn Fn())) {
    each_kind(|world| {
        for cut in [Cut::Request, Cut::Reply] {
            test(world, &|| world.network().cut_after(cut, 0));
            assert!(!world.network().cut_is_pending(), "{cut:?} did not happen");
            // Where answers are not durable, a power loss may undo more than the request under way.
            let power = world.answers_are_durable().then_some(Death::PowerLost);
            for death in [Death::Sudden, Death::WrittenBack].into_iter().chain(power) {
                test(world, &|| world.kill_at(cut, death));
                let happened = !world.network().cut_is_pending() && world.has_died();
                assert!(happened, "{cut:?}, {death:?} did not happen");
            }
        }
    });
}

fn heartbeat(volume: &RemoteVolume) {
    let session = volume.session();
    session.call(&session.own_caller(), || Request::Heartbeat, |_| Ok(())).expect("heartbeat");
}

#[test]
fn exclusive_create_answers_once() {
    cut_both_ways(|world, cut| {
        let volume = world.client();
        cut();
        let made = volume.create(&CALLER, ROOT, b"lock", 0o644, true, READ_WRITE);
        let (attr, file) = made.expect("the first answer, not what a second run would say");
        assert_eq!(volume.lookup(&CALLER, ROOT, b"lock").map(|found| found.ino), Ok(attr.ino));
        volume.write(&CALLER, file.handle, 0, b"mine").expect("the filekey is the one the server kept");
        volume.release(file.handle);
        volume.unlink(&CALLER, ROOT, b"lock").expect("unlink");
        volume.shut_down();
    });
}

#[test]
fn a_file_without_a_name_is_made_once_and_named_once() {
    cut_both_ways(|world, cut| {
        let volume = world.client();
        let free = volume.stat_fs(&CALLER).expect("statfs");
        cut();
        let (attr, file) = volume.create_nameless(&CALLER, ROOT, 0o640, READ_WRITE).expect("create");
        assert_eq!((attr.nlink, attr.mode), (0, 0o640));
        let one_more = volume.stat_fs(&CALLER).expect("statfs").inodes;
        assert_eq!(one_more, free.inodes + 1, "it was made once");
        volume.write(&CALLER, file.handle, 0, b"mine").expect("the filekey is the one the server kept");
        cut();
        volume.fsync(&CALLER, file.handle, false).expect("fsync");
        assert_eq!(read(&volume, file.handle, 0, 10), Ok(b"mine".to_vec()));
        cut();
        let named = volume.link(&CALLER, attr.ino, ROOT, b"named").expect("the first answer");
        assert_eq!((named.ino, named.nlink), (attr.ino, 1));
        let (_, never) = volume.create_nameless(&CALLER, ROOT, 0o640, READ_WRITE).expect("create");
        volume.write(&CALLER, never.handle, 0, b"never named").expect("write");
        volume.release(file.handle);
        cut();
        heartbeat(&volume);
        volume.release(never.handle);
        let found = volume.lookup(&CALLER, ROOT, b"named").expect("lookup");
        assert_eq!((found.ino, found.size), (attr.ino, 4));
        volume.unlink(&CALLER, ROOT, b"named").expect("unlink");
        // Clients that went without a detach may come back within a lease: until then a file without a name stays.
        for _ in 0..LEASE.as_secs() {
            if volume.stat_fs(&CALLER) != Ok(free) {
                world.pass(Duration::from_secs(1));
            }
        }
        assert_eq!(volume.stat_fs(&CALLER), Ok(free), "nothing is left of either");
        volume.shut_down();
    });
}

#[test]
fn unlinked_open_files_are_kept_for_who_comes_back() {
    cut_both_ways(|world, cut| {
        let clients = [world.client(), world.client()];
        let [volume, other] = &clients;
        // The other client waits for the one that has the file open.
        world.set_bystanders(&clients);
        let (attr, file) = volume.create(&CALLER, ROOT, b"f", 0o644, true, READ_WRITE).expect("create");
        volume.write(&CALLER, file.handle, 0, b"mine").expect("write");
        cut();
        volume.unlink(&CALLER, ROOT, b"f").expect("unlink");
        world.speaks(1);
        assert_eq!(other.get_attr(&CALLER, attr.ino).map(|attr| attr.nlink), Ok(0));
        world.speaks(0);
        assert_eq!(read(volume, file.handle, 0, 10), Ok(b"mine".to_vec()));
        cut();
        world.speaks(1);
        assert_eq!(other.get_attr(&CALLER, attr.ino).map(|attr| attr.nlink), Ok(0));
        world.speaks(0);
        assert_eq!(read(volume, file.handle, 0, 10), Ok(b"mine".to_vec()));
        volume.release(file.handle);
        volume.shut_down();
        other.shut_down();
    });
}

#[test]
fn the_way_up_ends_at_the_root_that_a_client_sees() {
    each_kind(|world| {
        let whole = world.client();
        let make = |parent, name: &[u8]| {
            whole.make(&CALLER, parent, name, NewNode::Directory, 0o755).expect("make").ino
        };
        let (inside, outside) = (make(ROOT, b"in"), make(ROOT, b"out"));
        let (below, moved) = (make(inside, b"below"), make(inside, b"moved"));
        make(below, b"deep");
        let up = |volume: &RemoteVolume, ino| volume.lookup(&CALLER, ino, b"..").map(|attr| attr.ino);
        let way: Vec<_> = [below, inside, ROOT].map(|ino| up(&whole, ino)).into();
        assert_eq!(way, [Ok(inside), Ok(ROOT), Ok(ROOT)]);
        let (file, _) = whole.create(&CALLER, inside, b"f", 0o644, true, READ_WRITE).expect("create");
        assert_eq!(up(&whole, file.ino), Err(FsError::Server(Status::NotDirectory)));
        whole.session().sync_all(&CALLER).expect("sync");
        whole.shut_down();
        world.kill();
        world.set_export(ExportRule { path: vec![b"in".to_vec()], ..ExportRule::default() });
        world.start();
        let volume = world.client();
        let find = |parent, name: &[u8]| volume.lookup(&CALLER, parent, name).expect("it is inside").ino;
        let below = find(volume.root(), b"below");
        let (deep, known) = (find(below, b"deep"), find(volume.root(), b"moved"));
        let way: Vec<_> = [deep, below, volume.root()].map(|ino| up(&volume, ino)).into();
        assert_eq!(way, [Ok(below), Ok(volume.root()), Ok(volume.root())]);
        // A client that sees the whole tree moves the directory out of the subtree.
        world.with_server(|server| {
            let meta = &server.server().meta;
            let mode = RenameMode::Replace;
            let rename = Operation::Rename {
                parent: inside,
                name: b"moved",
                new_parent: outside,
                new_name: b"moved",
                mode,
            };
            meta.execute(MetaCaller::default(), &rename, &|_| true).expect("rename");
            assert_eq!(meta.parent(moved), Ok(outside));
        });
        assert_eq!(volume.get_attr(&CALLER, known).map(|attr| attr.ino), Ok(known), "its number is good");
        assert_eq!(up(&volume, known), Err(FsError::Server(Status::Stale)));
        volume.shut_down();
    });
}

#[test]
fn growing_takes_no_space_away_after_a_crash() {
    each_kind(|world| {
        let volume = world.client();
        let (attr, file) = volume.create(&CALLER, ROOT, b"f", 0o644, true, READ_WRITE).expect("create");
        let how = Allocate::Reserve { keep_size: true };
        volume.allocate(&CALLER, file.handle, 0, 40_960, how).expect("reserve");
        // The reservation is written back, and the log forgets it.
        world.pass(Duration::from_secs(3));
        for size in [10_000, 10_000, 20_000] {
            let set = SetAttr { size: Some(size), ..SetAttr::default() };
            volume.set_attr(&CALLER, attr.ino, set).expect("grow");
        }
        volume.session().sync_all(&CALLER).expect("sync");
        world.kill();
        world.start();
        let attr = volume.get_attr(&CALLER, attr.ino).expect("attr");
        assert_eq!((attr.size, attr.allocated_bytes), (20_000, 40_960));
        volume.shut_down();
    });
}

#[test]
fn a_client_of_a_subtree_reaches_nothing_else_by_number() {
    each_kind(|world| {
        let stale = Err(FsError::Server(Status::Stale));
        let whole = world.client();
        let inside = whole.make(&CALLER, ROOT, b"in", NewNode::Directory, 0o755).expect("make").ino;
        let (secret, _) = whole.create(&CALLER, ROOT, b"secret", 0o644, true, READ_WRITE).expect("create");
        let (known, _) = whole.create(&CALLER, inside, b"f", 0o644, true, READ_WRITE).expect("create");
        whole.session().sync_all(&CALLER).expect("sync");
        whole.shut_down();
        world.kill();
        world.set_export(ExportRule { path: vec![b"in".to_vec()], ..ExportRule::default() });
        world.start();
        let volume = world.client();
        let root = volume.root();
        let found = volume.lookup(&CALLER, root, b"f").expect("it is inside");
        assert_ne!(found.ino, known.ino);
        for ino in [secret.ino, known.ino, inside, ROOT, InodeNo(0), InodeNo(u64::MAX)] {
            assert_eq!(volume.get_attr(&CALLER, ino).map(|_| ()), stale);
            assert_eq!(volume.open(&CALLER, ino, READ_WRITE).map(|_| ()), stale);
            assert_eq!(volume.lookup(&CALLER, ino, b"f").map(|_| ()), stale);
            assert_eq!(volume.link(&CALLER, ino, root, b"stolen").map(|_| ()), stale);
            assert_eq!(volume.rename(&CALLER, ino, b"f", root, b"g", RenameMode::Replace).map(drop), stale);
        }
        // Inode numbers that the client was told work, also after a restart.
        let open = volume.open(&CALLER, found.ino, READ_WRITE).expect("open");
        volume.write(&CALLER, open.handle, 0, b"bytes").expect("write");
        volume.link(&CALLER, found.ino, root, b"again").expect("link");
        volume.rename(&CALLER, root, b"again", root, b"moved", RenameMode::NoReplace).expect("rename");
        volume.fsync(&CALLER, open.handle, false).expect("fsync");
        world.kill();
        world.start();
        assert_eq!(volume.get_attr(&CALLER, found.ino).map(|attr| attr.ino), Ok(found.ino), "numbers stay");
        assert_eq!(read(&volume, open.handle, 0, 10), Ok(b"bytes".to_vec()));
        let mut listed = Vec::new();
        let mut take = |entry: &DirEntry<'_>| {
            assert_eq!(entry.attr.map(|attr| attr.ino), Some(entry.ino));
            listed.push((entry.name.to_vec(), entry.ino));
            true
        };
        volume.read_dir(&CALLER, root, 0, true, &mut take).expect("list");
        listed.sort();
        assert_eq!(listed, [(b"f".to_vec(), found.ino), (b"moved".to_vec(), found.ino)]);
        volume.shut_down();
    });
}

/// Recovery opens the files of many users again, whatever rights they have by now.
#[test]
fn a_squashed_client_has_its_files_and_its_bytes_again() {
    each_kind(|world| {
        let whole = world.client();
        let everybody = SetAttr { mode: Some(0o777), ..SetAttr::default() };
        whole.set_attr(&CALLER, ROOT, everybody).expect("chmod");
        whole.session().sync_all(&CALLER).expect("sync");
        whole.shut_down();
        world.kill();
        let squash = Some(Account { uid: 65_534, gid: 65_534 });
        world.set_export(ExportRule { root_squash: squash, ..ExportRule::default() });
        world.start();
        let volume = world.client();
        let (first, second) = (Caller { uid: 7, gid: 7, ..CALLER }, Caller { uid: 8, gid: 8, ..CALLER });
        let create = |caller, name| {
            volume.create(caller, volume.root(), name, 0o600, true, READ_WRITE).expect("everybody may")
        };
        let (attr, open) = create(&first, b"open");
        let (_, closed) = create(&second, b"closed");
        for (caller, file) in [(&first, open), (&second, closed)] {
            volume.write(caller, file.handle, 0, b"bytes").expect("write");
        }
        volume.release(closed.handle);
        let nobody = SetAttr { mode: Some(0), ..SetAttr::default() };
        volume.set_attr(&first, attr.ino, nobody).expect("its own");
        world.kill();
        world.start();
        assert_eq!(read(&volume, open.handle, 0, 10), Ok(b"bytes".to_vec()));
        volume.write(&first, open.handle, 5, b"!").expect("it is open");
        volume.fsync(&first, open.handle, false).expect("nothing is lost");
        let again = volume.lookup(&second, volume.root(), b"closed").expect("it is there");
        assert_eq!(again.size, 5, "what its writer had closed was written again");
        let anew = volume.open(&second, attr.ino, READ_WRITE).map(|_| ());
        assert_eq!(anew, Err(FsError::Server(Status::Denied)));
        volume.shut_down();
    });
}

#[test]
fn what_grew_and_what_was_zeroed_survives_a_killed_server() {
    each_kind(|world| {
        let volume = world.client();
        let (attr, file) = volume.create(&CALLER, ROOT, b"f", 0o644, true, READ_WRITE).expect("create");
        let size = |size| SetAttr { size: Some(size), ..SetAttr::default() };
        let mut expected = pattern(20_000, 0);
        volume.write(&CALLER, file.handle, 0, &expected).expect("write");
        volume.fsync(&CALLER, file.handle, false).expect("fsync");
        // In pages that stay, zeros are bytes in memory like any others, and so is a length beyond the last write.
        volume.allocate(&CALLER, file.handle, 100, 9_000, Allocate::PunchHole).expect("punch");
        expected[100..9_100].fill(0);
        volume.write(&CALLER, file.handle, 8_000, b"over it").expect("write");
        expected[8_000..8_007].copy_from_slice(b"over it");
        volume.set_attr(&CALLER, attr.ino, size(15_000)).expect("cut");
        volume.set_attr(&CALLER, attr.ino, size(30_000)).expect("grow");
        expected.truncate(15_000);
        expected.resize(30_000, 0);
        let how = Allocate::ZeroRange { keep_size: false };
        volume.allocate(&CALLER, file.handle, 14_000, 20_000, how).expect("zero");
        expected[14_000..].fill(0);
        expected.resize(34_000, 0);
        world.kill();
        world.start();
        assert_eq!(volume.fsync(&CALLER, file.handle, false), Ok(()));
        assert_eq!(volume.get_attr(&CALLER, attr.ino).map(|attr| attr.size), Ok(34_000));
        world.lose_power();
        world.start();
        assert_eq!(read(&volume, file.handle, 0, 40_000), Ok(expected));
        volume.release(file.handle);
        volume.unlink(&CALLER, ROOT, b"f").expect("unlink");
        volume.shut_down();
    });
}

#[test]
fn a_punched_end_keeps_its_length_over_a_killed_server() {
    each_kind(|world| {
        let volume = world.client();
        let (attr, file) = volume.create(&CALLER, ROOT, b"f", 0o644, true, READ_WRITE).expect("create");
        let mut expected = pattern(20_000, 0);
        volume.write(&CALLER, file.handle, 0, &expected).expect("write");
        volume.allocate(&CALLER, file.handle, 9_000, 11_000, Allocate::PunchHole).expect("punch");
        expected[9_000..].fill(0);
        world.kill();
        world.start();
        assert_eq!(volume.get_attr(&CALLER, attr.ino).map(|attr| attr.size), Ok(20_000));
        assert!(read(&volume, file.handle, 0, 30_000) == Ok(expected), "other bytes");
        volume.unlink(&CALLER, ROOT, b"f").expect("unlink");
        volume.shut_down();
    });
}

#[test]
fn names_change_once() {
    cut_both_ways(|world, cut| {
        let volume = world.client();
        volume.make(&CALLER, ROOT, b"from", NewNode::File, 0o644).expect("make");
        cut();
        let mode = RenameMode::NoReplace;
        assert_eq!(volume.rename(&CALLER, ROOT, b"from", ROOT, b"to", mode).map(drop), Ok(()));
        cut();
        assert_eq!(volume.make(&CALLER, ROOT, b"dir", NewNode::Directory, 0o755).map(|_| ()), Ok(()));
        cut();
        let to = volume.lookup(&CALLER, ROOT, b"to").expect("lookup").ino;
        assert_eq!(volume.link(&CALLER, to, ROOT, b"link").map(|attr| attr.nlink), Ok(2));
        cut();
        assert_eq!(volume.set_xattr(&CALLER, to, b"user.a", b"1", XattrMode::Create), Ok(()));
        cut();
        assert_eq!(volume.remove_xattr(&CALLER, to, b"user.a"), Ok(()));
        cut();
        assert_eq!(volume.rmdir(&CALLER, ROOT, b"dir"), Ok(()));
        for name in [&b"to"[..], b"link"] {
            cut();
            assert_eq!(volume.unlink(&CALLER, ROOT, name), Ok(()));
        }
        volume.shut_down();
    });
}

#[test]
fn append_appends_once() {
    cut_both_ways(|world, cut| {
        let volume = world.client();
        let (attr, file) = volume.create(&CALLER, ROOT, b"log", 0o644, true, APPEND).expect("create");
        let mut expected = Vec::new();
        // A short write goes inline; the server pulls a long one.
        for len in [10, 70_000, 3] {
            let bytes = pattern(len, 0);
            cut();
            assert_eq!(volume.write(&CALLER, file.handle, 0, &bytes), Ok(len as u32));
            expected.extend_from_slice(&bytes);
        }
        assert_eq!(volume.get_attr(&CALLER, attr.ino).map(|attr| attr.size), Ok(expected.len() as u64));
        assert_eq!(read(&volume, file.handle, 0, 100_000), Ok(expected));
        volume.release(file.handle);
        volume.unlink(&CALLER, ROOT, b"log").expect("unlink");
        volume.shut_down();
    });
}

#[test]
fn a_transfer_that_breaks_is_no_io_error() {
    each_kind(|world| {
        let volume = world.client();
        let (_, file) = volume.create(&CALLER, ROOT, b"log", 0o644, true, APPEND).expect("create");
        let bytes = pattern(300_000, 0);
        world.network().cut_after(Cut::Transfer, 0);
        assert_eq!(volume.write(&CALLER, file.handle, 0, &bytes), Ok(300_000));
        assert!(!world.network().cut_is_pending());
        // More than the frames hold, so the server pushes the rest.
        world.network().cut_after(Cut::Transfer, 0);
        assert_eq!(read(&volume, file.handle, 0, 300_000), Ok(bytes));
        assert!(!world.network().cut_is_pending());
    });
}

#[test]
fn a_one_sided_read_that_breaks_is_read_again() {
    let world = World::new(CONFIG);
    let volume = world.client();
    let (_, file) = volume.create(&CALLER, ROOT, b"hot", 0o644, true, READ_WRITE).expect("create");
    let bytes = pattern(8 * 4096, 0);
    volume.write(&CALLER, file.handle, 0, &bytes).expect("write");
    for pass in 0..3 {
        world.network().cut_after(Cut::OneSided, pass);
        for _ in 0..4 {
            assert_eq!(read(&volume, file.handle, 0, 8 * 4096), Ok(bytes.clone()));
        }
        assert!(!world.network().cut_is_pending());
    }
}

#[test]
fn a_client_that_is_gone_leaves_nothing_behind() {
    each_kind(|world| {
        let (gone, stays) = (world.client(), world.client());
        let free = stays.stat_fs(&CALLER).expect("statfs");
        let (attr, file) = gone.create(&CALLER, ROOT, b"orphan", 0o644, true, READ_WRITE).expect("create");
        gone.write(&CALLER, file.handle, 0, &pattern(100_000, 0)).expect("write");
        gone.unlink(&CALLER, ROOT, b"orphan").expect("unlink");
        let sessions = || world.with_server(|server| server.server().sessions.list().len());
        assert_eq!(sessions(), 2);
        // Within its lease a client keeps what it has.
        world.pass(LEASE / 2);
        heartbeat(&stays);
        assert_eq!(stays.get_attr(&CALLER, attr.ino).map(|attr| attr.nlink), Ok(0));
        drop(gone);
        world.pass(LEASE / 2 - Duration::from_secs(1));
        heartbeat(&stays);
        assert_eq!(sessions(), 2, "its lease has not run out");
        world.pass(LEASE / 2);
        heartbeat(&stays);
        assert_eq!(sessions(), 1);
        assert_eq!(stays.get_attr(&CALLER, attr.ino), Err(FsError::Server(Status::Stale)));
        assert_eq!(stays.stat_fs(&CALLER), Ok(free), "its space is back, and its inode");
    });
}

#[test]
fn a_client_that_slept_reclaims_its_files() {
    each_kind(|world| {
        let volume = world.client();
        let (_, file) = volume.create(&CALLER, ROOT, b"kept", 0o644, true, READ_WRITE).expect("create");
        volume.write(&CALLER, file.handle, 0, b"kept").expect("write");
        let (_, lost) = volume.create(&CALLER, ROOT, b"lost", 0o644, true, READ_WRITE).expect("create");
        volume.unlink(&CALLER, ROOT, b"lost").expect("unlink");
        world.pass(LEASE * 3);
        assert_eq!(world.with_server(|server| server.server().sessions.list().len()), 0);
        assert_eq!(read(&volume, file.handle, 0, 10), Ok(b"kept".to_vec()));
        volume.write(&CALLER, file.handle, 4, b" on").expect("write");
        assert_eq!(read(&volume, file.handle, 0, 10), Ok(b"kept on".to_vec()));
        assert_eq!(
            volume.write(&CALLER, lost.handle, 0, b"x"),
            Err(FsError::Server(Status::Stale)),
            "nobody held it any more"
        );
    });
}

#[test]
fn a_reclaim_that_is_cut_gives_each_handle_its_own_file() {
    // More files than one request reclaims. The last answer is small enough to be kept, and each message is lost once.
    let files = 256 + 20;
    for cut in [Cut::Request, Cut::Reply] {
        for pass in 0..8 {
            let world = World::new(CONFIG);
            let volume = world.client();
            let handles: Vec<_> = (0..files)
                .map(|index: u32| {
                    let name = format!("file{index}");
                    let made = volume.create(&CALLER, ROOT, name.as_bytes(), 0o644, true, READ_WRITE);
                    let handle = made.expect("create").1.handle;
                    volume.write(&CALLER, handle, 0, &index.to_le_bytes()).expect("write");
                    volume.fsync(&CALLER, handle, true).expect("fsync");
                    handle
                })
                .collect();
            world.kill();
            world.start();
            world.network().cut_after(cut, pass);
            for (index, handle) in handles.iter().enumerate() {
                let expected = (index as u32).to_le_bytes().to_vec();
                assert_eq!(read(&volume, *handle, 0, 4), Ok(expected), "{cut:?} after {pass}");
            }
            assert!(!world.network().cut_is_pending());
        }
    }
}

#[test]
fn a_recovery_that_is_cut_leaves_nothing_open() {
    for cut in [Cut::Request, Cut::Reply] {
        for pass in 0..8 {
            let world = World::new(CONFIG);
            let volume = world.client();
            let made = volume.create(&CALLER, ROOT, b"orphan", 0o644, true, READ_WRITE);
            let (attr, file) = made.expect("create");
            // The write is not synced: recovery makes it again, with a filekey of its own.
            volume.write(&CALLER, file.handle, 0, b"kept").expect("write");
            volume.unlink(&CALLER, ROOT, b"orphan").expect("unlink");
            world.kill();
            world.start();
            world.network().cut_after(cut, pass);
            assert_eq!(read(&volume, file.handle, 0, 10), Ok(b"kept".to_vec()), "{cut:?} after {pass}");
            volume.release(file.handle);
            let gone = volume.get_attr(&CALLER, attr.ino);
            assert_eq!(gone, Err(FsError::Server(Status::Stale)), "{cut:?} after {pass}: it is still open");
        }
    }
}

#[test]
fn a_truncating_set_attr_runs_once() {
    cut_both_ways(|world, cut| {
        let volume = world.client();
        let (attr, file) = volume.create(&CALLER, ROOT, b"cut", 0o644, true, READ_WRITE).expect("create");
        volume.write(&CALLER, file.handle, 0, &pattern(50_000, 0)).expect("write");
        let before = volume.get_attr(&CALLER, attr.ino).expect("attr").change;
        cut();
        let set = SetAttr { size: Some(7), ..SetAttr::default() };
        let after = volume.set_attr(&CALLER, attr.ino, set).expect("truncate");
        assert_eq!(after.size, 7);
        let restarted = after.change >> 32 > before >> 32;
        assert!(restarted || after.change == before + 1, "one change");
        assert_eq!(read(&volume, file.handle, 0, 100), Ok(pattern(50_000, 0)[..7].to_vec()));
        volume.release(file.handle);
        volume.unlink(&CALLER, ROOT, b"cut").expect("unlink");
        volume.shut_down();
    });
}

#[test]
fn zeros_that_keep_the_length_do_not_grow_a_file_after_a_kill() {
    each_kind(|world| {
        let volume = world.client();
        let (attr, file) = volume.create(&CALLER, ROOT, b"empty", 0o644, true, READ_WRITE).expect("create");
        let zeros = Allocate::ZeroRange { keep_size: true };
        volume.allocate(&CALLER, file.handle, 73_728, 42_962, zeros).expect("zero");
        volume.allocate(&CALLER, file.handle, 69_632, 118_218, Allocate::PunchHole).expect("punch");
        world.kill();
        world.start();
        assert_eq!(volume.get_attr(&CALLER, attr.ino).expect("attr").size, 0);
        volume.shut_down();
    });
}

#[test]
fn a_request_behind_one_that_came_twice_is_only_late() {
    for seed in 0..20 {
        let world = World::new(WorldConfig { seed, ..CONFIG });
        let volume = world.client();
        world.network().set_weather(seed, 3);
        let made = volume.create(&CALLER, ROOT, b"f", 0o644, true, READ_WRITE);
        let (attr, file) = made.expect("create");
        for round in 0..10u64 {
            volume.write(&CALLER, file.handle, round, b"x").expect("write");
            // A sync changes nothing, so it runs again when it comes again, and takes its time.
            volume.session().sync_all(&CALLER).expect("sync");
            assert_eq!(
                volume.get_attr(&CALLER, attr.ino).map(|attr| attr.size),
                Ok(round + 1),
                "seed {seed}"
            );
        }
        world.network().set_weather(0, 0);
        volume.shut_down();
    }
}

#[test]
fn a_layout_of_one_server_fits_no_other() {
    each_kind(|world| {
        let volume = world.client();
        let (_, file) = volume.create(&CALLER, ROOT, b"f", 0o644, true, READ_WRITE).expect("create");
        volume.write(&CALLER, file.handle, 0, &pattern(10_000, 0)).expect("write");
        volume.fsync(&CALLER, file.handle, false).expect("fsync");
        let generations = || {
            world.with_server(|server| {
                let table = FileTable::over(server.server().files.window(WindowId::FileTable));
                let open = (0..8).map(|slot| table.load(FileSlot(slot)).generation);
                open.filter(|generation| *generation != 0).collect::<Vec<_>>()
            })
        };
        let before = generations();
        world.kill();
        world.start();
        assert_eq!(read(&volume, file.handle, 0, 10_000), Ok(pattern(10_000, 0)));
        let after = generations();
        assert!(!before.is_empty() && !after.is_empty());
        assert!(before.iter().all(|generation| !after.contains(generation)), "{before:?} {after:?}");
        volume.shut_down();
    });
}
