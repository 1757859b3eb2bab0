//! Keys that are handed over: who may open them, for what, and until when.

use super::program::{BOTH, PATIENCE, Program};
use super::{Site, links};
use cuttlefs_common::ids::{InodeNo, PAGE_SIZE_U64};
use cuttlefs_common::locks::{Lock, LockMode, LockOwner, LockRange, LockSpace, WaitId};
use cuttlefs_common::rdma::{Endpoint, WcStatus};
use cuttlefs_common::rpc::{Allocate, Opened, RegionKey, Request, Rights, SeekFor};
use cuttlefs_common::status::Status;
use cuttlefs_server::rights::{Account, ExportRule, PeerPattern};
use std::time::{Duration, Instant};

const READ: Rights = Rights { read: true, write: false };

/// 20,000 bytes, each of which says where it is.
fn contents() -> Vec<u8> {
    (0..20_000u32).map(|at| (at / 7 + at) as u8).collect()
}

/// A program with a file of `contents`.
fn binder(endpoint: &Endpoint) -> (Program, Opened) {
    let mut binder = Program::start(endpoint, 1);
    let opened = binder.create(b"file", 0o644);
    for (index, part) in contents().chunks(10_000).enumerate() {
        binder.write(opened.filekey, index as u64 * 10_000, false, part).expect("written");
    }
    (binder, opened)
}

#[test]
fn a_key_opens_its_range_and_nothing_else() {
    let site = Site::new(vec![ExportRule::default()]);
    let (mut binder, file) = binder(&site.tcp());
    let bytes = contents();
    for (number, endpoint) in links(&site).into_iter().enumerate() {
        let key = binder.bind(file.filekey, (5000, 6000), BOTH, 0).expect("bound");
        let mut redeemer = Program::start(&endpoint, 10 + number as u8);
        let opened = redeemer.open_region(&key.to_string()).expect("opened");
        assert_eq!(opened.attr.size, 20_000);
        let part = opened.filekey;
        assert_eq!(redeemer.read_at(part, 5000, 6000).expect("inside"), bytes[5000..11_000]);
        assert_eq!(redeemer.fetch(part, 10_990, 10).expect("inside"), bytes[10_990..11_000]);
        for (offset, len) in [(4999, 2), (10_999, 2), (0, 20_000), (u64::MAX, 1), (11_000, 1)] {
            assert_eq!(redeemer.read_at(part, offset, len), Err(WcStatus::RemoteAccess));
        }
        assert_eq!(redeemer.fetch(part, 4999, 2), Err(Status::Denied));
        assert_eq!(redeemer.write(part, 10_999, false, b"no"), Err(Status::Denied));
        assert_eq!(redeemer.write(part, 0, true, b"no"), Err(Status::Denied), "the end is not in the part");
        assert_eq!(redeemer.grant(part, 0, 6000), Err(Status::Denied));
        let lock = Lock {
            space: LockSpace::Whole,
            owner: LockOwner(1),
            range: LockRange::WHOLE,
            mode: LockMode::Shared,
            pid: 1,
        };
        let how = Allocate::PunchHole;
        for request in [
            Request::Seek { filekey: part, offset: 5000, seek: SeekFor::Data },
            Request::SetLock { filekey: part, lock, wait: WaitId(1), blocking: false },
            Request::Allocate { filekey: part, offset: 4096, len: 4096, how },
            Request::Bind { filekey: part, offset: 5000, len: 1, rights: READ, lifetime_ms: 0 },
        ] {
            assert_eq!(redeemer.call(&request, |_| ()), Err(Status::Denied), "{request:?}");
        }
        // Inside it is as good as any open.
        assert_eq!(redeemer.write(part, 5000, false, &bytes[5000..5100]), Ok(5000));
        redeemer.grant(part, 5000, 6000).expect("inside");
        redeemer.write_at(part, 6000, &bytes[6000..6100]).expect("granted");
        assert_eq!(redeemer.append(part, b"no"), Err(WcStatus::RemoteAccess), "the end is not in the part");
        assert_eq!(redeemer.write_at(part, 4999, b"no"), Err(WcStatus::RemoteAccess));
        // It ends for its holder alone.
        binder.done(&Request::Unbind { number: key.number }).expect("unbound");
        assert_eq!(redeemer.write_at(part, 6000, b"no"), Err(WcStatus::RemoteAccess));
        assert_eq!(redeemer.read_at(part, 5000, 10), Err(WcStatus::RemoteAccess));
        assert_eq!(redeemer.fetch(part, 5000, 10), Err(Status::Stale));
        assert_eq!(redeemer.open_region(&key.to_string()).err(), Some(Status::Stale));
        assert_eq!(binder.read_at(file.filekey, 0, 20_000).expect("its own"), bytes);
        binder.done(&Request::Unbind { number: key.number }).expect("it is gone already");
    }
    let figures = site.running().server().files.figures();
    assert_eq!((figures.bound_regions, figures.opened_regions, figures.grants.grants), (0, 0, 0));
}

#[test]
fn appends_stay_in_their_part() {
    let site = Site::new(vec![ExportRule::default()]);
    let (mut binder, file) = binder(&site.tcp());
    let mut redeemer = Program::start(&site.unix(), 2);
    let key = binder.bind(file.filekey, (20_000, 100), BOTH, 0).expect("bound");
    let part = redeemer.open_region(&key.to_string()).expect("opened").filekey;
    assert_eq!(redeemer.append(part, b"no"), Err(WcStatus::RemoteAccess), "no grant yet");
    redeemer.grant(part, 20_000, 100).expect("granted");
    assert_eq!(redeemer.append(part, &[1; 60]), Ok(20_000));
    assert_eq!(redeemer.write(part, 0, true, &[2; 30]), Ok(20_060));
    assert_eq!(redeemer.append(part, &[3; 11]), Err(WcStatus::RemoteAccess));
    assert_eq!(redeemer.write(part, 0, true, &[3; 11]), Err(Status::Denied));
    assert_eq!(redeemer.append(part, &[3; 10]), Ok(20_090));
    let all = [vec![1; 60], vec![2; 30], vec![3; 10]].concat();
    assert_eq!(binder.read_at(file.filekey, 20_000, 1000).expect("its own"), all);
}

#[test]
fn rights_are_at_most_those_of_the_open() {
    let site = Site::new(vec![ExportRule::default()]);
    let (mut binder, file) = binder(&site.tcp());
    let reading = binder.open(file.attr.ino, READ).expect("opens").filekey;
    assert_eq!(binder.bind(reading, (0, 10), BOTH, 0), Err(Status::Denied));
    assert_eq!(binder.bind(reading, (0, 0), READ, 0), Err(Status::Invalid));
    assert_eq!(binder.bind(reading, (0, 10), Rights::default(), 0), Err(Status::Invalid));
    assert_eq!(binder.bind(reading, (u64::MAX, 10), READ, 0), Err(Status::TooLarge));
    let key = binder.bind(reading, (0, 10), READ, 0).expect("bound");
    let mut redeemer = Program::start(&site.tcp(), 2);
    assert_eq!(redeemer.bind(reading, (0, 10), READ, 0), Err(Status::Stale), "another's filekey");
    let part = redeemer.open_region(&key.to_string()).expect("opened").filekey;
    assert_eq!(redeemer.write(part, 0, false, b"no"), Err(Status::Denied));
    assert_eq!(redeemer.grant(part, 0, 10), Err(Status::Denied));
    assert_eq!(redeemer.write_at(part, 0, b"no"), Err(WcStatus::RemoteAccess));
    // Keys that were made up, or changed.
    let mut refused = |key: RegionKey, status| {
        assert_eq!(redeemer.open_region(&key.to_string()).err(), Some(status), "{key:?}");
    };
    refused(RegionKey { rights: BOTH, ..key }, Status::Denied);
    refused(RegionKey { len: 11, ..key }, Status::Denied);
    refused(RegionKey { expiry_ms: Some(u64::MAX), ..key }, Status::Denied);
    refused(RegionKey { pool: [1; 16], ..key }, Status::Denied);
    refused(RegionKey { mac: [1; 16], ..key }, Status::Denied);
    refused(RegionKey { number: key.number ^ 1, ..key }, Status::Stale);
    refused(RegionKey { client: cuttlefs_common::ids::ClientId(1), ..key }, Status::Stale);
    // Only its binder ends it.
    redeemer.done(&Request::Unbind { number: key.number }).expect("none of its own");
    assert_eq!(redeemer.fetch(part, 0, 4).expect("it goes on"), contents()[..4]);
    // It ends with the open that it was bound by.
    binder.done(&Request::Close { filekeys: vec![reading] }).expect("closed");
    assert_eq!(redeemer.fetch(part, 0, 4), Err(Status::Stale));
    assert_eq!(redeemer.read_at(part, 0, 4), Err(WcStatus::RemoteAccess));
}

#[test]
fn a_file_without_a_name_lives_until_the_last_open_by_any_way() {
    let site = Site::new(vec![ExportRule::default()]);
    let (mut binder, file) = binder(&site.tcp());
    let key = binder.bind(file.filekey, (0, 10), READ, 0).expect("bound");
    let mut redeemer = Program::start(&site.tcp(), 2);
    let part = redeemer.open_region(&key.to_string()).expect("opened").filekey;
    let parent = binder.root;
    binder.done(&Request::Unlink { parent, name: b"file" }).expect("unlinked");
    assert_eq!(redeemer.fetch(part, 0, 4).expect("open"), contents()[..4]);
    let used = || site.running().server().files.space().figures().used;
    assert!(used() > 0);
    // The end of the binder's session closes its files, and what was opened by its keys.
    binder.done(&Request::Detach).expect("detached");
    assert_eq!(redeemer.fetch(part, 0, 4), Err(Status::Stale));
    let deadline = Instant::now() + PATIENCE;
    while used() > 0 {
        assert!(Instant::now() < deadline, "its space comes back");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_key_ends_with_its_time() {
    let site = Site::new(vec![ExportRule::default()]);
    let (mut binder, file) = binder(&site.tcp());
    let mut redeemer = Program::start(&site.tcp(), 2);
    let deadline = Instant::now() + PATIENCE;
    // On a slow machine its time may be over before it is opened.
    let (key, part) = loop {
        assert!(Instant::now() < deadline, "no key was opened in time");
        let key = binder.bind(file.filekey, (0, 10), BOTH, 500).expect("bound");
        match redeemer.open_region(&key.to_string()) {
            Ok(opened) => break (key, opened.filekey),
            Err(status) => assert_eq!(status, Status::Stale),
        }
    };
    loop {
        match redeemer.fetch(part, 0, 4) {
            Ok(bytes) => assert_eq!(bytes, contents()[..4]),
            Err(status) => break assert_eq!(status, Status::Stale),
        }
        assert!(Instant::now() < deadline, "it never ends");
    }
    assert_eq!(redeemer.read_at(part, 0, 4), Err(WcStatus::RemoteAccess));
    assert_eq!(redeemer.grant(part, 0, 4), Err(Status::Stale));
    assert_eq!(redeemer.open_region(&key.to_string()).err(), Some(Status::Stale));
    assert_eq!(binder.fetch(file.filekey, 0, 4).expect("its open goes on"), contents()[..4]);
}

#[test]
fn a_restart_keeps_what_was_bound_and_nothing_that_was_not() {
    let mut site = Site::new(vec![ExportRule::default()]);
    let (mut binder, file) = binder(&site.unix());
    let kept = binder.bind(file.filekey, (0, 100), BOTH, 0).expect("bound");
    let revoked = binder.bind(file.filekey, (0, 100), BOTH, 0).expect("bound");
    let mut redeemer = Program::start(&site.unix(), 2);
    let before = redeemer.open_region(&kept.to_string()).expect("opened").filekey;
    redeemer.grant(before, 0, 100).expect("granted");
    binder.done(&Request::Unbind { number: revoked.number }).expect("unbound");
    site.restart();
    redeemer.connect().expect("attached");
    assert_eq!(redeemer.write_at(before, 0, b"no"), Err(WcStatus::RemoteAccess), "a key of the life before");
    assert_eq!(redeemer.fetch(before, 0, 4), Err(Status::Stale));
    redeemer.done(&Request::Recovered { unanswered: vec![] }).expect("recovered");
    std::thread::scope(|scope| {
        // It waits for the binder, which has not come back yet.
        let opening = scope.spawn(|| {
            let opened = redeemer.open_region(&kept.to_string()).expect("opened again").filekey;
            assert_eq!(redeemer.open_region(&revoked.to_string()).err(), Some(Status::Stale));
            redeemer.fetch(opened, 0, 4).expect("inside")
        });
        binder.connect().expect("attached");
        let reclaimed = binder.reclaim(&file).filekey;
        let again = |key, filekey| Request::BindAgain { filekey, key };
        assert_eq!(binder.bound(&again(RegionKey { len: 101, ..kept }, reclaimed)), Err(Status::Denied));
        let other = binder.create(b"other", 0o644).filekey;
        assert_eq!(binder.bound(&again(kept, other)), Err(Status::Denied), "another file");
        assert_eq!(binder.bound(&again(kept, reclaimed)), Ok(kept));
        assert_eq!(binder.bound(&again(kept, reclaimed)), Ok(kept), "an answer may be lost");
        binder.done(&Request::Recovered { unanswered: vec![] }).expect("recovered");
        assert_eq!(opening.join().expect("no panic"), contents()[..4]);
        assert_eq!(binder.bound(&again(revoked, reclaimed)), Err(Status::Stale), "once it has recovered");
    });
    // Another client cannot bind what is not its own.
    let theirs = redeemer.open(file.attr.ino, BOTH).expect("opens").filekey;
    assert_eq!(redeemer.bound(&Request::BindAgain { filekey: theirs, key: kept }), Err(Status::Denied));
}

#[test]
fn a_key_widens_nothing() {
    let tcp = || vec![PeerPattern::Addresses([127, 0, 0, 1].into(), 8)];
    let rule = |rule: ExportRule| vec![ExportRule { peers: tcp(), ..rule }, ExportRule::default()];
    // The binder comes by the Unix socket, as root; the redeemer by tcp, under the first rule.
    let tried = |exports: Vec<ExportRule>, name: &[u8], mode, rights| {
        let site = Site::new(exports);
        let mut binder = Program::start(&site.unix(), 1);
        let made = binder.create(name, mode);
        binder.write(made.filekey, 0, false, &[5; 100]).expect("written");
        let make = |parent, name| Request::Make {
            parent,
            name,
            node: cuttlefs_common::rpc::NewNode::Directory,
            mode: 0o755,
        };
        binder.call(&make(InodeNo::ROOT, b"below"), |_| ()).expect("made");
        let key = binder.bind(made.filekey, (0, 100), rights, 0).expect("bound");
        let mut redeemer = Program::start(&site.tcp(), 2);
        let part = redeemer.open_region(&key.to_string())?.filekey;
        redeemer.fetch(part, 0, 100).map(|bytes| assert_eq!(bytes, [5; 100]))
    };
    let open = rule(ExportRule { speaks_for_others: Some(true), ..ExportRule::default() });
    assert_eq!(tried(open, b"a", 0o600, BOTH), Ok(()), "who speaks for others needs the key only");
    let read_only = || rule(ExportRule { read_only: true, ..ExportRule::default() });
    assert_eq!(tried(read_only(), b"a", 0o666, BOTH), Err(Status::ReadOnly));
    assert_eq!(tried(read_only(), b"a", 0o666, READ), Ok(()));
    let squashed = || {
        let nobody = Account { uid: 65534, gid: 65534 };
        rule(ExportRule { all_squash: Some(nobody), ..ExportRule::default() })
    };
    assert_eq!(tried(squashed(), b"a", 0o600, READ), Err(Status::Denied), "as if it opened the file");
    assert_eq!(tried(squashed(), b"a", 0o644, READ), Ok(()));
    assert_eq!(tried(squashed(), b"a", 0o644, BOTH), Err(Status::Denied));
    assert_eq!(tried(squashed(), b"a", 0o666, BOTH), Ok(()));
}

#[test]
fn a_key_leads_into_no_directory_that_is_not_exported() {
    let below = ExportRule {
        peers: vec![PeerPattern::Addresses([127, 0, 0, 1].into(), 8)],
        path: vec![b"below".to_vec()],
        ..ExportRule::default()
    };
    let site = Site::new(vec![below, ExportRule::default()]);
    let mut root = Program::start(&site.unix(), 1);
    let (parent, node) = (root.root, cuttlefs_common::rpc::NewNode::Directory);
    root.call(&Request::Make { parent, name: b"below", node, mode: 0o777 }, |_| ()).expect("made");
    let outside = root.create(b"outside", 0o666).filekey;
    let key = root.bind(outside, (0, PAGE_SIZE_U64), BOTH, 0).expect("bound");
    let mut confined = Program::start(&site.tcp(), 2);
    assert_eq!(confined.open_region(&key.to_string()).err(), Some(Status::Denied));
    // Two sessions of the same directory may hand keys to each other, and root may open theirs.
    let inside = confined.create(b"inside", 0o666);
    confined.write(inside.filekey, 0, false, b"inside").expect("written");
    let key = confined.bind(inside.filekey, (0, 6), READ, 0).expect("bound");
    let mut beside = Program::start(&site.tcp(), 3);
    for reader in [&mut beside, &mut root] {
        let part = reader.open_region(&key.to_string()).expect("opened");
        assert_eq!(reader.fetch(part.filekey, 0, 6).expect("inside"), b"inside");
    }
    let theirs = root.call(&Request::Lookup { parent, name: b"below" }, |_| ()).is_ok();
    assert!(theirs, "the pool goes on");
}
