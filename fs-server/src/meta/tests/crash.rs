//! Restarts and crashes: the records that are there afterwards, and numbers that are never given out twice.

use super::super::record::ClientRecord;
use super::super::{
    Answer, Batch, Caller, DataCommit, DoneRequest, FORMAT_VERSION, HashKey, MemoryStore, Meta, MetaError,
    NoteData, Operation, RequestId, Store, check,
};
use super::super::{DiskOptions, DiskStore};
use super::{HASH_KEY, ROOT_USER, USER, World, format};
use cuttlefs_common::attr::SetAttr;
use cuttlefs_common::ids::{ClientId, InodeNo, SlotIndex};
use cuttlefs_common::life::{End, Event, Life};
use cuttlefs_common::rdma::PeerKey;
use cuttlefs_common::rpc::{NewNode, RenameMode, Rights};
use cuttlefs_common::status::Status;
use cuttlefs_common::world::{SeededRandom, SystemClock};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

const ROOT: InodeNo = InodeNo::ROOT;

/// Options of a store that makes checkpoints often.
pub(super) fn options() -> DiskOptions {
    DiskOptions {
        cache_bytes: 8 << 20,
        reserve_bytes: 0,
        checkpoint_bytes: 128 << 10,
        direct_bytes: 64 << 10,
        ..DiskOptions::default()
    }
}

/// Opens a store with `options`.
pub(super) fn open(path: &Path) -> Arc<DiskStore> {
    Arc::new(DiskStore::open(path, options()).expect("open"))
}

#[test]
fn the_store_keeps_everything_over_a_restart() {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("meta");
    let tree = {
        let store = open(&path);
        format(&*store);
        let world = World::on(store);
        let below = world.directory(ROOT, "below");
        world.file(below, "file");
        world.make(below, "link", NewNode::Symlink(b"file")).expect("symlink");
        let many: Vec<_> = (0..5000).map(|index| super::extent(index * 2, index * 2, 1)).collect();
        let update = super::super::RangeUpdate { first: 0.into(), end: 10_000.into(), extents: many };
        let ino = world.file(below, "large");
        let commit = DataCommit::of_ranges(ino, vec![update], 10_000 * 4096);
        world.meta.commit_data(&[commit]).expect("commit");
        world.meta.flush().expect("flush");
        assert!(matches!(
            DiskStore::open(&path, DiskOptions::default()).map(|_| ()),
            Err(super::super::StoreError::Backend { .. })
        ));
        (world.attr(below), world.names(below), world.meta.inode_count(), world.meta.extents(ino))
    };
    let world = World::on(open(&path));
    let below = world.meta.lookup(ROOT, b"below").expect("lookup");
    let large = world.meta.lookup(below.ino, b"large").expect("lookup").ino;
    let again = (below, world.names(below.ino), world.meta.inode_count(), world.meta.extents(large));
    assert_eq!(again, tree);
    world.assert_sound();
}

#[test]
fn damaged_records_are_io_and_counted_and_harm_no_other() {
    let world = World::new();
    let (bad, good) = (world.file(ROOT, "bad"), world.file(ROOT, "good"));
    let mut batch = super::super::Batch::default();
    batch.put(super::super::key::inode(bad), vec![1, 2, 3]);
    world.store.commit(batch).expect("commit");
    assert_eq!(world.meta.attr(bad), Err(Status::Io));
    assert_eq!(world.unlink(ROOT, "bad"), Err(Status::Io));
    assert_eq!(world.meta.damage_count(), 2);
    assert_eq!(world.attr(good).nlink, 1);
    world.file(ROOT, "another");
    // A directory entry without an inode is damage as well, and not `NotFound`.
    let mut batch = super::super::Batch::default();
    batch.remove(super::super::key::inode(bad));
    world.store.commit(batch).expect("commit");
    assert_eq!(world.meta.lookup(ROOT, b"bad"), Err(Status::Io));
    assert!(!check(&*world.store, HASH_KEY).expect("parses").is_empty());
}

#[test]
fn what_is_no_store_is_refused() {
    let clock = Arc::new(SystemClock::new());
    let open_meta = |store: &Arc<MemoryStore>| Meta::open(store.clone(), clock.clone()).map(|_| ());
    let store = Arc::new(MemoryStore::new());
    assert!(matches!(open_meta(&store), Err(MetaError::NotFormatted)));
    format(&*store);
    open_meta(&store).expect("open");
    let again =
        super::super::Format { uuid: [0; 16], hash_key: HashKey([0; 16]), root: ROOT_USER, root_mode: 0o755 };
    assert!(matches!(Meta::format(&*store, &*clock, &again), Err(MetaError::AlreadyFormatted)));
    let mut superblock = store.get(super::super::key::SUPERBLOCK).expect("get").expect("there");
    let other = FORMAT_VERSION + 1;
    superblock[1] = other as u8;
    let mut batch = super::super::Batch::default();
    batch.put(super::super::key::SUPERBLOCK, superblock);
    store.commit(batch).expect("commit");
    let refused = open_meta(&store);
    assert!(
        matches!(refused, Err(MetaError::Format { found, expected: FORMAT_VERSION }) if found == other),
        "{refused:?}"
    );
}

#[test]
fn any_prefix_of_batches_is_sound_and_no_number_comes_back() {
    let store = Arc::new(MemoryStore::new());
    format(&*store);
    let world = World::on(store.clone());
    let directory = world.directory(ROOT, "directory");
    let mut last = directory;
    for index in 0..20 {
        last = world.file(directory, &format!("file{index}"));
        let link =
            Operation::Link { ino: last, parent: ROOT, name: format!("link{index}").into_bytes().leak() };
        world.run(&link).expect("link");
        if index % 3 == 0 {
            world.unlink(directory, &format!("file{index}")).expect("unlink");
        }
        let rename = Operation::Rename {
            parent: ROOT,
            name: b"link0",
            new_parent: ROOT,
            new_name: b"moved",
            mode: RenameMode::Replace,
        };
        let _ = world.run(&rename);
    }
    let change =
        world.meta.note_data(last, NoteData { modified: true, ..NoteData::default() }).expect("note").change;
    let batches = store.unflushed_batches();
    assert!(batches > 40);
    for kept in 0..=batches {
        let world = World::on(Arc::new(store.crashed(kept)));
        world.assert_sound();
        let fresh = world.make(ROOT, "fresh", NewNode::File).expect("make");
        assert!(fresh.ino > last, "{} was given out before", fresh.ino);
        assert!(fresh.change > change, "a change counter came back");
    }
}

#[test]
fn numbers_go_on_past_a_block_without_a_flush_of_ones_own() {
    let store = Arc::new(MemoryStore::new());
    format(&*store);
    let world = World::on(store.clone());
    let mut last = ROOT;
    for _ in 0..140_000 {
        let made = world.file(ROOT, "file");
        assert_eq!(made.0, last.0 + 1);
        last = made;
        world.unlink(ROOT, "file").expect("unlink");
    }
    assert!(last.0 >= 140_000);
    let crashed = World::on(Arc::new(store.crashed(0)));
    assert!(crashed.file(ROOT, "fresh") > last);
    // A clean stop returns the unused numbers of the reserved block.
    world.meta.close(None).expect("close");
    let reopened = World::on(store);
    assert_eq!(reopened.file(ROOT, "next").0, last.0 + 1);
    world.assert_sound();
}

#[test]
fn a_request_is_remembered_with_what_it_did() {
    let world = World::new();
    let request = |slot, seq| RequestId { client: ClientId(7), slot: SlotIndex(slot), seq };
    let unlink = |id| {
        let caller = Caller { request: Some(id), ..USER };
        world.meta.execute(caller, &Operation::Unlink { parent: ROOT, name: b"f" }, &|_| false).map(|_| ())
    };
    let ino = world.file(ROOT, "f");
    assert_eq!(unlink(request(3, 41)), Ok(()));
    assert_eq!(unlink(request(4, 1)), Err(Status::NotFound));
    let make = Operation::Create { parent: ROOT, name: b"f", mode: 0o600, exclusive: true };
    let rights = Rights { read: true, write: false };
    let caller = Caller { request: Some(request(3, 42)), opens: Some(rights), ..USER };
    let made = world.meta.execute(caller, &make, &|_| false).expect("made").attr.expect("told");
    assert!(made.ino > ino);
    // The remembered answer stays as it was, whatever happens to the file afterwards.
    let set = SetAttr { mode: Some(0o640), ..SetAttr::default() };
    world.run(&Operation::SetAttr { ino: made.ino, set, commit: None }).expect("chmod");
    assert_eq!(unlink(request(5, 1)), Ok(()));
    // The next server knows the answers of requests that were done, and none of requests that were refused.
    let world = World::on(world.store.clone());
    let done = Answer::Opened { attr: made, rights };
    assert_eq!(world.meta.answer_to(request(3, 42)), Ok(Some(done)));
    assert_eq!(world.meta.answer_to(request(5, 1)), Ok(Some(Answer::Done)));
    assert_eq!(world.meta.answer_to(request(3, 41)), Ok(None), "it was answered, or 42 had not come");
    assert_eq!(world.meta.answer_to(request(3, 43)), Ok(None));
    assert_eq!(world.meta.answer_to(request(4, 1)), Ok(None));
    for client in [ClientId(7), ClientId(8)] {
        world.run(&Operation::PutClient { client, owner: PeerKey::User(3) }).expect("kept");
    }
    let known =
        |client, has_session| (ClientId(client), Some(ClientRecord { has_session, owner: PeerKey::User(3) }));
    assert_eq!(world.meta.clients(), Ok(vec![known(7, true), known(8, true)]));
    world.run(&Operation::EndSession { client: ClientId(7) }).expect("ended");
    assert_eq!(world.meta.clients(), Ok(vec![known(7, false), known(8, true)]));
    assert_eq!(world.meta.answer_to(request(3, 42)), Ok(Some(done)), "it may still ask again");
    world.run(&Operation::RemoveClient { client: ClientId(7) }).expect("forgotten");
    assert_eq!(world.meta.answer_to(request(3, 42)), Ok(None));
    assert_eq!(world.meta.clients(), Ok(vec![known(8, true)]));
    // This request was under way when its client ended its session.
    let late = Caller { request: Some(request(3, 44)), ..USER };
    let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    let late = world.meta.execute(late, &Operation::SetAttr { ino: ROOT, set, commit: None }, &|_| false);
    late.expect("chmod");
    assert_eq!(world.meta.clients(), Ok(vec![(ClientId(7), None), known(8, true)]));
}

#[test]
fn an_append_is_remembered_with_its_bytes_and_never_hides_a_later_request() {
    let world = World::new();
    let request = |slot, seq| RequestId { client: ClientId(7), slot: SlotIndex(slot), seq };
    let (one, two) = (world.file(ROOT, "one"), world.file(ROOT, "two"));
    let answer = |seq| Answer::Written { offset: 10 * seq, len: 10, size: 10 * seq + 10, change: seq };
    let commit = |ino, appends: &[(u16, u64)]| DataCommit {
        done: appends
            .iter()
            .map(|(slot, seq)| DoneRequest { request: request(*slot, *seq), answer: answer(*seq) })
            .collect(),
        ..DataCommit::of_ranges(ino, Vec::new(), 1000)
    };
    // Slot 1 wrote to one file after the other. Its latest request counts, whatever the order of the files in the commit.
    world.meta.commit_data(&[commit(one, &[(1, 9), (2, 3)]), commit(two, &[(1, 8)])]).expect("commit");
    assert_eq!(world.meta.answer_to(request(1, 9)), Ok(Some(answer(9))));
    assert_eq!(world.meta.answer_to(request(1, 8)), Ok(None));
    assert_eq!(world.meta.answer_to(request(2, 3)), Ok(Some(answer(3))));
    // Slot 2 made a name after its append, and the append is written back only after that.
    let caller = Caller { request: Some(request(2, 5)), ..USER };
    let make = Operation::Create { parent: ROOT, name: b"new", mode: 0o600, exclusive: true };
    let made = world.meta.execute(caller, &make, &|_| false).expect("made").attr.expect("told");
    world.meta.commit_data(&[commit(one, &[(2, 4)])]).expect("commit");
    // The request did not say that it opens the file, so the answer is one without rights.
    assert_eq!(world.meta.answer_to(request(2, 5)), Ok(Some(Answer::Attr(made))));
}

#[test]
fn a_clean_stop_is_told_once() {
    let world = World::new();
    assert_eq!(world.meta.clean_predecessor(), None);
    world.meta.close(Some(77)).expect("close");
    let next = World::on(world.store.clone());
    assert_eq!(next.meta.clean_predecessor(), Some(77));
    // The next server is killed, so the one behind it has no clean predecessor.
    assert_eq!(World::on(world.store.clone()).meta.clean_predecessor(), None);
}

const CHILD: &str = "CUTTLEFS_TEST_CRASH_STORE";

/// Not a test by itself: the process that the next test kills. It prints each directory that it has made.
#[test]
fn crash_child() {
    use std::io::Write;
    let Some(path) = std::env::var_os(CHILD) else {
        return;
    };
    let world = World::on(open(Path::new(&path)));
    let start = world.attr(ROOT).change;
    for index in 0u64.. {
        let (name, renamed) = (format!("{start:x}-{index}"), format!("{start:x}-{index}-renamed"));
        let directory = world.directory(ROOT, &name);
        for entry in 0..3 {
            world.file(directory, &format!("file{entry}"));
        }
        world.unlink(directory, "file0").expect("unlink");
        let rename = Operation::Rename {
            parent: ROOT,
            name: name.as_bytes(),
            new_parent: ROOT,
            new_name: renamed.as_bytes(),
            mode: RenameMode::NoReplace,
        };
        world.run(&rename).expect("rename");
        if index % 16 == 0 {
            world.meta.flush().expect("flush");
        }
        println!("acknowledged {renamed}");
        std::io::stdout().flush().expect("flush");
    }
}

#[test]
fn a_killed_server_finds_a_sound_store_with_all_that_was_acknowledged() {
    const ROUNDS: u64 = 12;
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("meta");
    format(&*open(&path));
    let mut acknowledged: Vec<String> = Vec::new();
    for round in 0..ROUNDS {
        let output = directory.path().join("output");
        let mut child = Command::new(std::env::current_exe().expect("this test's binary"))
            .args(["--exact", "meta::tests::crash::crash_child", "--nocapture", "--test-threads=1"])
            .env(CHILD, &path)
            .stdout(std::fs::File::create(&output).expect("output"))
            .stderr(Stdio::null())
            .spawn()
            .expect("child");
        std::thread::sleep(Duration::from_millis(60 + round * 37));
        child.kill().expect("kill");
        child.wait().expect("wait");
        let said = std::fs::read_to_string(&output).expect("output");
        // The last line may be cut off, and libtest prints its own words in front of the first.
        let whole = said.rsplit_once('\n').map_or("", |(whole, _)| whole);
        acknowledged.extend(
            whole
                .lines()
                .filter_map(|line| line.split_once("acknowledged "))
                .map(|(_, name)| name.to_owned()),
        );
        let store = open(&path);
        let world = World::on(store);
        world.assert_sound();
        for name in &acknowledged {
            let found = world.meta.lookup(ROOT, name.as_bytes()).expect("what was acknowledged is there");
            assert_eq!(world.names(found.ino), ["file1", "file2"]);
        }
    }
    assert!(acknowledged.len() as u64 > ROUNDS, "the child got nothing done: {acknowledged:?}");
}

/// Copies a store's files as they are now.
pub(super) fn copy_files(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("directory");
    for entry in std::fs::read_dir(from).expect("list") {
        let entry = entry.expect("entry");
        if entry.file_type().expect("type").is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name())).expect("copy");
        }
    }
}

#[test]
fn a_store_whose_server_dies_keeps_what_the_log_keeps() {
    let mut kept_last = 0;
    let mut power_kept = std::collections::BTreeSet::new();
    for seed in 0..60 {
        let random = SeededRandom::new(seed);
        let life = Life::default();
        let store = MemoryStore::of(life.clone());
        let put = |number: u8| {
            let mut batch = Batch::default();
            batch.put([number], vec![number]);
            store.commit(batch)
        };
        put(1).expect("commits");
        store.flush().expect("flushes");
        (2..5).for_each(|number| put(number).expect("commits"));
        life.end(Some(End { after: 0, of: None }));
        assert!(put(5).is_err() && put(6).is_err() && store.flush().is_err());
        assert_eq!(life.last_event(), Some(Event::Batch));
        life.begin();
        let has = |store: &MemoryStore, number: u8| store.get(&[number]).expect("reads").is_some();
        let killed = store.killed(&random);
        assert!((1..5).all(|number| has(&killed, number)) && !has(&killed, 6));
        kept_last += u32::from(has(&killed, 5));
        let lost = store.lost_power(&random);
        let count = (1..7).take_while(|number| has(&lost, *number)).count();
        assert!(count >= 1 && (count as u8 + 1..7).all(|number| !has(&lost, number)), "a prefix");
        power_kept.insert(count);
        // Batches that a killed server left in the log are at risk until the next server has flushed them.
        let both = killed.lost_power(&random);
        assert!(has(&both, 1));
    }
    assert!((10..50).contains(&kept_last), "{kept_last}");
    assert_eq!(power_kept, (1..6).collect());
}
