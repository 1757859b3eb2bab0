//! Write grants: what goes past the server's workers, what goes as requests, and when a grant ends.

use super::*;
use cuttlefs_client::native::{Buffer, GRANT_MAX_BYTES};

/// Until a connection of the queue's own stands, which a busy machine may need several attempts for, changes go as requests.
pub(super) fn until_one_sided(server: &Server, queue: &mut Queue, file: &File, buffer: &Buffer) {
    let since = Instant::now();
    loop {
        let before = server.requests();
        queue.post_write(1, file, 0, (buffer, 0, 8)).expect("posted");
        assert_eq!(done(&all_of(queue), 1), Done::Written { offset: 0, len: 8 });
        if server.requests() == before {
            return;
        }
        assert!(since.elapsed() < LONG, "no write is one-sided");
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub(super) fn one_sided_counts(server: &Server) -> (u64, u64) {
    let counts = server.running.server().files.pages().figures().counts;
    (counts.target_appends, counts.target_atomics)
}

/// Requests of background threads are none of ours: the least of several attempts counts.
fn costs_no_request(server: &Server, mut work: impl FnMut()) {
    let mut least = u64::MAX;
    for _ in 0..50 {
        let before = server.requests();
        work();
        least = least.min(server.requests() - before);
        if least == 0 {
            return;
        }
    }
    panic!("at least {least} requests each time");
}

#[test]
fn granted_changes_go_past_the_servers_workers() {
    let server = Server::new(512);
    for link in LINKS {
        let (session, other) = (server.connect(link), server.connect("unix"));
        let file = create(&session, link, &[7; 5000]);
        let looking = other.open(link, OpenOptions::READ).expect("opened");
        let grant = file.grant_write(0, 8 * PAGE as u64).expect("granted");
        assert!(grant.is_one_sided() && grant.stands() && grant.range() == (0..8 * PAGE as u64));
        let mut expected = vec![7; 5000];
        let mut round = 0u8;
        costs_no_request(&server, || {
            round += 1;
            let at = usize::from(round) * 50;
            file.write_at(at as u64, &[round; 100]).expect("granted");
            expected[at..at + 100].fill(round);
            assert_eq!(file.append(&[round; 30]).expect("granted"), expected.len() as u64);
            expected.extend([round; 30]);
            let known = u64::from_le_bytes(expected[16..24].try_into().expect("eight"));
            assert_eq!(file.fetch_add(16, 3).expect("granted"), known);
            assert_eq!(file.compare_swap(16, known, 9).expect("granted"), known + 3, "not swapped");
            assert_eq!(file.compare_swap(16, known + 3, known + 5).expect("granted"), known + 3);
            expected[16..24].copy_from_slice(&(known + 5).to_le_bytes());
        });
        assert_eq!(read(&looking, 0, 20_000).expect("read"), expected, "{link}");

        let mut queue = Queue::new(&session, 32).expect("a queue");
        let buffer = Buffer::new(&session, 32 * PAGE).expect("memory");
        buffer.write(0, &expected[..8]).expect("in the buffer");
        until_one_sided(&server, &mut queue, &file, &buffer);
        let before = one_sided_counts(&server);
        let mut waves = 0;
        costs_no_request(&server, || {
            waves += 1;
            let first = expected.len() as u64;
            for index in 0..8u64 {
                let at = index as usize * 100;
                buffer.write(at, &[index as u8; 100]).expect("in the buffer");
                queue.post_write(index, &file, 1000 + index * 100, (&buffer, at, 100)).expect("posted");
                expected[1000 + at..1100 + at].fill(index as u8);
                queue.post_append(100 + index, &file, (&buffer, at, 10)).expect("posted");
                expected.extend([index as u8; 10]);
                queue.post_fetch_add(200 + index, &file, 32, 1).expect("posted");
            }
            let known = u64::from_le_bytes(expected[32..40].try_into().expect("eight"));
            expected[32..40].copy_from_slice(&(known + 8).to_le_bytes());
            let ends = all_of(&mut queue);
            for index in 0..8 {
                assert_eq!(done(&ends, index), Done::Written { offset: 1000 + index * 100, len: 100 });
                // One connection does them in the order of their posts.
                let offset = first + index * 10;
                assert_eq!(done(&ends, 100 + index), Done::Written { offset, len: 10 });
                assert_eq!(done(&ends, 200 + index), Done::Old(known + index));
            }
        });
        let after = one_sided_counts(&server);
        assert_eq!((after.0 - before.0, after.1 - before.1), (8 * waves, 8 * waves), "{link}");
        queue.post_compare_swap(1, &file, 32, (1, 2)).expect("posted");
        assert!(matches!(done(&all_of(&mut queue), 1), Done::Old(old) if old != 1));
        assert_eq!(read(&looking, 0, 50_000).expect("read"), expected, "{link}");
        queue.post_sync(2, &file).expect("posted");
        assert_eq!(done(&all_of(&mut queue), 2), Done::Synced);
        // Past the grant, appends go on, and so do writes.
        let large = pattern(12 * PAGE, 5);
        assert_eq!(file.append(&large).expect("appended"), expected.len() as u64);
        expected.extend(&large);
        file.write_at(9 * PAGE as u64, b"beyond").expect("written");
        expected[9 * PAGE..][..6].copy_from_slice(b"beyond");
        assert_eq!(read(&looking, 0, 200_000).expect("read"), expected, "{link}");
    }
}

#[test]
fn appends_beyond_a_grant_need_no_worker_while_there_are_free_pages() {
    let server = Server::new(2048);
    let files = &server.running.server().files;
    for link in LINKS {
        let (session, other) = (server.connect(link), server.connect("unix"));
        let file = create(&session, link, b"");
        let grant = file.grant_write(0, 1).expect("granted");
        let mut expected = Vec::new();
        let faults = || files.pages().figures().counts.grant_faults;
        let queued = || files.figures().free_page_queue;
        // Now and then a write-back has the lock of the last page, and a worker makes the append.
        let mut least = u64::MAX;
        for _ in 0..50 {
            let since = Instant::now();
            while queued() < 16 {
                assert!(since.elapsed() < LONG, "the queue is not filled");
                std::thread::sleep(Duration::from_millis(10));
            }
            let before = (faults(), server.requests());
            for index in 0..8 {
                let bytes = pattern(PAGE, index);
                assert_eq!(file.append(&bytes).expect("appended"), expected.len() as u64);
                expected.extend(bytes);
            }
            least = least.min(faults() - before.0 + server.requests() - before.1);
            if least == 0 {
                break;
            }
        }
        assert_eq!(least, 0, "requests and faults of eight appends over {link}");
        let looking = other.open(link, OpenOptions::READ).expect("opened");
        assert_eq!(read(&looking, 0, expected.len() + 1).expect("read"), expected, "{link}");
        file.sync().expect("durable");
        grant.give_back().expect("given back");
    }
    assert!(files.pages().figures().counts.queue_pages >= 14);
    let since = Instant::now();
    while files.figures().free_page_queue > 0 {
        assert!(since.elapsed() < LONG, "nobody has a grant, and the queue is kept");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn what_a_grant_is_not_for_is_refused_and_harms_nobody() {
    let server = Server::new(512);
    let session = server.connect("tcp");
    let file = create(&session, "file", &[1; 3 * PAGE]);
    let reading = session.open("file", OpenOptions::READ).expect("opened");
    assert!(matches!(reading.grant_write(0, 1), Err(NativeError::NotOpenFor(_))));
    assert!(matches!(file.grant_write(0, 0), Err(NativeError::GrantLength { .. })));
    assert!(matches!(file.grant_write(0, GRANT_MAX_BYTES + 1), Err(NativeError::GrantLength { .. })));
    assert_eq!(status(file.grant_write(0, GRANT_MAX_BYTES)), Status::Busy, "more than there are frames");
    let by_request = |file: &File, offset| {
        let before = one_sided_counts(&server).1;
        file.fetch_add(offset, 1).expect("by request");
        assert_eq!(one_sided_counts(&server).1, before, "nothing is granted");
    };
    by_request(&file, 0);
    let grant = file.grant_write(0, PAGE as u64).expect("granted");
    assert!(matches!(file.grant_write(PAGE as u64 - 1, 10), Err(NativeError::GrantOverlaps)));
    assert!(matches!(file.fetch_add(4, 1), Err(NativeError::Unaligned)));
    by_request(&file, PAGE as u64);
    let before = one_sided_counts(&server).1;
    assert_eq!(file.fetch_add(0, 1).expect("granted"), u64::from_le_bytes([1; 8]) + 1);
    assert_eq!(one_sided_counts(&server).1, before + 1);
    // Another open of the same file has grants of its own.
    let other = session.open("file", OpenOptions::READ_WRITE).expect("opened");
    by_request(&other, 0);
    let beside = other.grant_write(0, PAGE as u64).expect("granted");
    assert_eq!(other.fetch_add(8, 1).expect("granted"), u64::from_le_bytes([1; 8]));
    drop(beside);
    // What is dropped may be asked for again at once, and its late return does not end the new one.
    for _ in 0..20 {
        let wide = other.grant_write(0, 2 * PAGE as u64).expect("granted");
        other.fetch_add(PAGE as u64, 1).expect("granted");
        drop(wide);
    }
    by_request(&other, 8);
    let behind = file.grant_write(2 * PAGE as u64, 4 * PAGE as u64).expect("behind the end");
    assert!(matches!(file.fetch_add(3 * PAGE as u64, 1), Err(NativeError::PastEnd)));
    file.set_len(4 * PAGE as u64).expect("extended");
    assert_eq!(file.fetch_add(3 * PAGE as u64, 5).expect("granted"), 0);
    behind.give_back().expect("given back");
    grant.give_back().expect("given back");
    by_request(&file, 0);
    drop(other);
    let since = Instant::now();
    while server.running.server().files.figures().grants.grants > 0 {
        assert!(since.elapsed() < LONG, "a grant is left");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_grant_that_others_end_is_told_and_what_can_go_by_requests_goes() {
    let server = Server::new(512);
    for link in LINKS {
        let (session, other) = (server.connect(link), server.connect("unix"));
        let file = create(&session, link, &[1; 4 * PAGE]);
        let theirs = other.open(link, OpenOptions::READ_WRITE).expect("opened");
        let grant = file.grant_write(0, 4 * PAGE as u64).expect("granted");
        let mut queue = Queue::new(&session, 16).expect("a queue");
        let buffer = Buffer::new(&session, PAGE).expect("memory");
        buffer.write(0, &[9; 100]).expect("in the buffer");
        until_one_sided(&server, &mut queue, &file, &buffer);
        theirs.set_len(2 * PAGE as u64).expect("cut");
        // The first is refused; those behind it were not done, and go other ways.
        queue.post_write(1, &file, 100, (&buffer, 0, 100)).expect("posted");
        queue.post_append(2, &file, (&buffer, 0, 100)).expect("posted");
        queue.post_fetch_add(3, &file, 8, 1).expect("posted");
        queue.post_read(4, &file, 100, (&buffer, 1000, 100)).expect("posted");
        let ends = all_of(&mut queue);
        assert_eq!(done(&ends, 1), Done::Written { offset: 100, len: 100 });
        assert_eq!(done(&ends, 2), Done::Written { offset: 2 * PAGE as u64, len: 100 });
        assert_eq!(done(&ends, 3), Done::Old(u64::from_le_bytes([1; 8])));
        assert_eq!(done(&ends, 4), Done::Read(100));
        assert!(!grant.stands());
        assert_eq!(file.fetch_add(16, 1).expect("by request"), u64::from_le_bytes([1; 8]));
        file.write_at(0, b"by request").expect("written");
        assert_eq!(read(&theirs, 0, 10).expect("read"), b"by request");
        grant.renew().expect("granted again");
        assert!(grant.stands());
        file.fetch_add(8, 1).expect("granted");
        assert_eq!(read(&theirs, 2 * PAGE as u64, PAGE).expect("read"), [9; 100]);
    }
}

/// What chmod does not end, chattr does: as for descriptors of a local file system.
#[test]
fn an_immutable_file_is_not_written_by_those_who_have_it_open() {
    let server = Server::new(512);
    for link in LINKS {
        let session = server.connect(link);
        let file = create(&session, link, &[1; 2 * PAGE]);
        let key = file.bind(0, PAGE as u64, BOTH, None).expect("bound");
        let redeemed = server.connect("unix").redeem(&key).expect("opened");
        let grant = file.grant_write(0, 4 * PAGE as u64).expect("granted");
        let ino = file.stat().expect("attributes").ino;
        server.set_attr(ino, SetAttr { mode: Some(0o400), ..SetAttr::default() });
        file.write_at(0, b"who may").expect("opened before");
        file.fetch_add(8, 1).expect("granted before");
        redeemed.write_at(0, b"who may").expect("opened before");
        let mark = |flags| server.set_attr(ino, SetAttr { flags: Some(flags), ..SetAttr::default() });
        mark(InodeFlags::IMMUTABLE);
        let before = read(&file, 0, PAGE).expect("reads go on");
        for file in [&file, &redeemed] {
            assert_eq!(status(file.write_at(0, b"no")), Status::NotPermitted);
        }
        assert_eq!(status(file.append(b"no")), Status::NotPermitted);
        assert_eq!(status(file.fetch_add(8, 1)), Status::NotPermitted);
        assert_eq!(status(grant.renew()), Status::NotPermitted);
        assert_eq!(read(&file, 0, PAGE).expect("read"), before);
        assert_eq!(file.len().expect("length"), 2 * PAGE as u64);
        mark(InodeFlags::default());
        redeemed.write_at(0, b"again").expect("bindings stay");
        grant.renew().expect("granted again");
        file.fetch_add(8, 1).expect("granted");
    }
}

#[test]
fn synchronous_changes_are_requests() {
    let server = Server::new(256);
    let session = server.connect("tcp");
    let file = session.open("file", OpenOptions { sync: true, ..OpenOptions::CREATE }).expect("made");
    file.write_at(0, &[1; 100]).expect("written");
    let _grant = file.grant_write(0, 1000).expect("granted");
    let (before, atomics) = (server.requests(), one_sided_counts(&server).1);
    file.write_at(0, b"durable").expect("written");
    assert!(server.requests() > before, "a one-sided write is not durable");
    file.fetch_add(0, 1).expect("added");
    let mut queue = Queue::new(&session, 1).expect("a queue");
    queue.post_fetch_add(1, &file, 0, 1).expect("posted");
    assert!(matches!(done(&all_of(&mut queue), 1), Done::Old(_)));
    assert_eq!(one_sided_counts(&server).1, atomics, "a one-sided atomic is not durable");
}
