//! Atomics, one-sided and by request: one order of all of them, what is refused, and what a kill of the server does to those by request.

use super::grants::one_sided_counts;
use super::killed::Site;
use super::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const POOL: u64 = 16 << 20;
const ONES: u64 = u64::from_le_bytes([1; 8]);

/// Sessions with a grant and without one, over links with such verbs and without, and queues: each adds to one word, and counts up another one by swaps.
#[test]
fn whichever_way_they_take_they_are_one_sequence() {
    const ADDS: u64 = 300;
    const SWAPS: u64 = 60;
    let server = Server::new(512);
    let maker = server.connect("unix");
    let made = create(&maker, "file", &[0; 2 * PAGE]);
    let one_sided = AtomicU64::new(0);
    let way = |link: &str, is_granted: bool, is_sync: bool| {
        let session = server.connect(link);
        let file =
            session.open("file", OpenOptions { sync: is_sync, ..OpenOptions::READ_WRITE }).expect("opened");
        let grant = is_granted.then(|| file.grant_write(0, 2 * PAGE as u64).expect("granted"));
        one_sided.fetch_add(u64::from(grant.as_ref().is_some_and(|grant| grant.stands())), Ordering::Relaxed);
        let mut queue = Queue::new(&session, 4).expect("a queue");
        for round in 0..ADDS {
            if round % 3 == 0 {
                queue.post_fetch_add(1, &file, 64, 1).expect("posted");
                assert!(matches!(done(&all_of(&mut queue), 1), Done::Old(_)));
            } else {
                file.fetch_add(64, 1).expect("added");
            }
        }
        let mut known = 0;
        for _ in 0..SWAPS {
            loop {
                let old = file.compare_swap(PAGE as u64, known, known + 1).expect("done");
                if old == known {
                    break;
                }
                known = old;
            }
        }
        // Bytes beside the words, by writes of whichever way.
        file.write_at(128, &[7; 8]).expect("written");
        drop(grant);
    };
    let ways = [
        ("shm", true, false),
        ("shm", false, true),
        ("unix", true, false),
        ("unix", false, false),
        ("tcp", true, false),
    ];
    std::thread::scope(|scope| {
        for (link, is_granted, is_sync) in ways {
            let way = &way;
            scope.spawn(move || way(link, is_granted, is_sync));
        }
    });
    let count = ways.len() as u64;
    assert_eq!(made.fetch_add(64, 0).expect("read"), count * ADDS);
    assert_eq!(made.compare_swap(PAGE as u64, 0, 1).expect("read"), count * SWAPS);
    assert_eq!(read(&made, 128, 8).expect("read"), [7; 8]);
    assert_eq!(one_sided.load(Ordering::Relaxed), 2);
    let atomics = one_sided_counts(&server).1;
    assert!(atomics > ADDS && atomics < count * (ADDS + SWAPS), "{atomics} were one-sided");
}

#[test]
fn what_cannot_be_done_is_refused_with_nothing_changed() {
    let server = Server::new(512);
    for link in ["shm", "unix", "tcp"] {
        let session = server.connect(link);
        let file = create(&session, link, &[1; PAGE + 12]);
        let before = file.stat().expect("attributes");
        for offset in [1, 4, 4095] {
            assert!(matches!(file.fetch_add(offset, 1), Err(NativeError::Unaligned)), "{link}");
        }
        for offset in [PAGE as u64 + 8, 4 * PAGE as u64] {
            assert!(matches!(file.fetch_add(offset, 1), Err(NativeError::PastEnd)), "{link}");
            assert!(matches!(file.compare_swap(offset, 0, 1), Err(NativeError::PastEnd)), "{link}");
        }
        assert_eq!(status(file.fetch_add(u64::MAX - 7, 1)), Status::TooLarge);
        for read in [false, true] {
            let options = OpenOptions { read, write: !read, ..OpenOptions::READ };
            let half = session.open(link, options).expect("opened");
            assert!(matches!(half.fetch_add(0, 1), Err(NativeError::NotOpenFor(_))), "{link}");
        }
        let key = file.bind(8, 16, BOTH, None).expect("bound");
        let part = server.connect("unix").redeem(&key).expect("opened");
        assert!(matches!(part.fetch_add(0, 1), Err(NativeError::OutsideRegion { .. })));
        assert_eq!(file.compare_swap(8, 7, 8).expect("not swapped"), ONES);
        assert_eq!(file.stat().expect("attributes"), before, "{link}: nothing was changed");
        assert_eq!(part.fetch_add(8, 1).expect("added"), ONES);
        let after = file.stat().expect("attributes");
        assert!(after.change > before.change && after.size == before.size && after.mtime >= before.mtime);
        for flags in [InodeFlags::APPEND_ONLY, InodeFlags::IMMUTABLE] {
            server.set_attr(file.ino(), SetAttr { flags: Some(flags), ..SetAttr::default() });
            assert_eq!(status(file.fetch_add(8, 1)), Status::NotPermitted);
            assert_eq!(status(part.compare_swap(8, 0, 1)), Status::NotPermitted);
        }
        server.set_attr(file.ino(), SetAttr { flags: Some(InodeFlags::default()), ..SetAttr::default() });
        file.unbind(&key).expect("unbound");
        has_ended(part.fetch_add(8, 1));
        assert_eq!(file.fetch_add(8, 1).expect("added"), ONES + 1, "{link}");
    }
}

/// What a grant is refused for, a request does.
#[test]
fn a_file_with_set_id_bits_is_changed_by_requests() {
    let server = Server::new(512);
    let session = server.connect("tcp");
    let file = create(&session, "file", &[1; PAGE]);
    let _grant = file.grant_write(0, PAGE as u64).expect("granted");
    server.set_attr(file.ino(), SetAttr { mode: Some(0o4755), ..SetAttr::default() });
    let before = one_sided_counts(&server).1;
    assert_eq!(file.fetch_add(0, 1).expect("by request"), ONES);
    assert_eq!(one_sided_counts(&server).1, before);
}

#[test]
fn a_server_that_gives_no_grants_does_them_by_request() {
    let policies = [PolicyName::Rpc, PolicyName::RpcDirect, PolicyName::RpcBuffer];
    for name in policies {
        let server = Server::with(64, RegionPolicy::of(name));
        let session = server.connect("tcp");
        let file = create(&session, "file", &[1; PAGE]);
        file.set_len(3 * PAGE as u64).expect("longer");
        assert!(!file.grant_write(0, 8).expect("an empty promise").is_one_sided());
        for offset in [0, PAGE as u64 + 8] {
            let there = if offset == 0 { ONES } else { 0 };
            assert_eq!(file.fetch_add(offset, 2).expect("added"), there, "{name}");
            assert_eq!(file.compare_swap(offset, there + 2, 9).expect("swapped"), there + 2, "{name}");
            assert_eq!(read(&file, offset, 8).expect("read"), 9u64.to_le_bytes(), "{name}");
        }
        file.sync().expect("durable");
    }
}

/// The next server must not do it again, and does not know what the one before has done: so it may be done. The session goes on.
#[test]
fn one_that_was_asked_for_when_the_server_was_killed_may_be_done() {
    for link in ["shm", "unix", "tcp"] {
        let mut site = Site::new(link, POOL);
        let session = Session::over(Arc::new(site.connect()), 4, None).expect("a session");
        let file = create(&session, "file", &[1; PAGE]);
        let synced =
            session.open("file", OpenOptions { sync: true, ..OpenOptions::READ_WRITE }).expect("opened");
        file.sync().expect("durable");
        let (mut told, mut there) = (0, ONES);
        for _ in 0..3 {
            site.freeze();
            let asked = std::thread::scope(|scope| {
                let asking = [&file, &synced].map(|file| scope.spawn(|| file.fetch_add(8, 1)));
                std::thread::sleep(Duration::from_millis(300));
                site.kill();
                site.start();
                asking.map(|asking| asking.join().expect("no panic"))
            });
            let now = file.fetch_add(8, 0).expect("the session goes on");
            for asked in asked {
                match asked {
                    // The killed server did nothing: it stood still.
                    Err(NativeError::MayBeDone) => told += 1,
                    Ok(old) => {
                        assert!((there..now).contains(&old), "{link}");
                    }
                    Err(error) => panic!("{link}: {error}"),
                }
            }
            assert!(now - there <= 2, "{link}: something was done twice");
            file.sync().expect("nothing that was told to be done is lost");
            there = now;
        }
        assert!(told > 0, "{link}: none was under way");
        drop((file, synced, session));
        site.stop();
    }
}

#[test]
fn one_that_was_answered_and_not_synced_is_told_to_be_lost() {
    for link in ["shm", "unix", "tcp"] {
        let mut site = Site::new(link, POOL);
        // Without the thread that syncs every two seconds.
        let session = Session::over(Arc::new(site.connect_quietly()), 4, None).expect("a session");
        let file = create(&session, "file", &[1; PAGE]);
        let twin = session.open("file", OpenOptions::READ_WRITE).expect("opened");
        let options = OpenOptions { sync: true, ..OpenOptions::CREATE };
        let durable = session.open("durable", options).expect("made");
        let untouched = create(&session, "untouched", &[1; 100]);
        durable.write_at(0, &[1; 16]).expect("written");
        file.sync().and_then(|()| untouched.sync()).expect("durable");
        file.write_at(100, b"is restored").expect("written");
        assert_eq!(file.fetch_add(8, 1).expect("added"), ONES);
        assert_eq!(untouched.compare_swap(0, 0, 9).expect("not swapped"), ONES);
        assert_eq!(durable.fetch_add(8, 1).expect("added"), ONES);
        site.kill();
        site.start();
        for file in [&file, &twin] {
            let told = file.sync();
            assert!(matches!(told, Err(NativeError::BytesLost)), "{link}: {told:?}");
            file.sync().expect("told before");
        }
        untouched.sync().expect("it was not changed");
        durable.sync().expect("nothing of it was lost");
        assert_eq!(durable.fetch_add(8, 0).expect("read"), ONES + 1, "{link}");
        assert!([ONES, ONES + 1].contains(&file.fetch_add(8, 0).expect("read")), "{link}");
        assert_eq!(read(&file, 100, 11).expect("read"), b"is restored", "{link}");
        // What a sync has covered is not lost.
        let there = file.fetch_add(16, 5).expect("added");
        file.sync().expect("durable");
        site.kill();
        site.start();
        file.sync().expect("nothing was lost");
        assert_eq!(file.fetch_add(16, 0).expect("read"), there + 5, "{link}");
        drop((file, twin, durable, untouched, session));
        site.stop();
    }
}
