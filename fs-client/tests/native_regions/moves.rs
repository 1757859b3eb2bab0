//! Moves of a file's pages: the same bytes under the same keys in fewer runs, steps that may be left off, and typed errors.

use super::killed::Site;
use super::space::Taker;
use super::*;
use cuttlefs_client::native::FilePage;
use std::sync::Arc;

/// Pages of a file: two steps of at most 256, and one that finds nothing left.
const PAGES: u64 = 300;
const LEN: usize = PAGES as usize * PAGE;

/// A file that was written in turns with another one, so that no two of its pages are neighbours in the pool.
fn scattered(session: &Session) -> (File, Vec<u8>) {
    let open = |name| session.open(name, OpenOptions::CREATE).expect("made");
    let (file, between) = (open("file"), open("between"));
    let contents = pattern(LEN, 3);
    for (page, bytes) in (0..PAGES).zip(contents.chunks(PAGE)) {
        for file in [&file, &between] {
            file.write_at(page * PAGE as u64, bytes).expect("written");
        }
    }
    file.sync().expect("durable");
    assert!(file.runs().expect("counted") > PAGES / 2);
    (file, contents)
}

#[test]
fn pages_move_under_keys_and_grants() {
    for link in ["shm", "unix", "tcp"] {
        // A pool of its own: in one from which files were just removed, free space lies in pieces, too.
        let server = Server::new(512);
        let session = server.connect(link);
        let (file, contents) = scattered(&session);
        let key = file.bind(0, LEN as u64, BOTH, None).expect("bound");
        let part = session.redeem(&key).expect("opened");
        let grant = file.grant_write(0, PAGE as u64).expect("granted");
        let before = file.stat().expect("attributes");
        let mut steps = Vec::new();
        let moved = file.defragment(|pages| {
            steps.push(pages);
            true
        });
        let moved = moved.expect("moved");
        assert_eq!((moved.moved_pages, moved.runs_after), (PAGES, 1), "{link}: {moved:?}");
        assert!(moved.runs_before > PAGES / 2, "{moved:?}");
        assert_eq!(steps.last(), Some(&PAGES));
        assert!(steps.len() > 1 && steps.is_sorted(), "{steps:?}");
        assert_eq!(file.stat().expect("attributes"), before);
        assert_eq!(read(&file, 0, 2 * LEN).expect("read"), contents);
        assert_eq!(read(&part, 0, LEN).expect("read"), contents);
        assert_eq!(grant.stands(), grant.is_one_sided());
        part.write_at(0, b"by the key").expect("written");
        file.write_at(10, b"by the grant").expect("written");
        assert_eq!(read(&file, 0, 22).expect("read"), b"by the keyby the grant");
        drop(grant);
        // What lies well costs a look, of which `progress` hears, too.
        let mut looks = 0;
        let again = file.defragment(|_| {
            looks += 1;
            true
        });
        assert_eq!((again.expect("looked at").moved_pages, looks), (0, 1));
    }
}

#[test]
fn moves_are_left_off_between_two_steps() {
    let server = Server::new(512);
    let (file, contents) = scattered(&server.connect("unix"));
    let moved = file.defragment(|_| false).expect("moved in part");
    assert!(moved.moved_pages > 0 && moved.moved_pages < PAGES, "{moved:?}");
    assert_eq!(moved.runs_after, file.runs().expect("counted"));
    assert!(moved.runs_after > 1 && moved.runs_after < moved.runs_before, "{moved:?}");
    // It may be gone on with at any page; one behind the end has none left.
    let step = file.defragment_step(FilePage(moved.moved_pages)).expect("moved");
    assert_eq!((step.pages, file.runs().expect("counted")), (PAGES - moved.moved_pages, 1));
    for page in [PAGES, u64::MAX] {
        let step = file.defragment_step(FilePage(page)).expect("nothing to do");
        assert_eq!((step.pages, step.next), (0, None));
    }
    assert_eq!(read(&file, 0, LEN).expect("read"), contents);
}

#[test]
fn refusals_are_typed_and_move_nothing() {
    let server = Server::new(512);
    let session = server.connect("tcp");
    let (file, contents) = scattered(&session);
    let runs = file.runs().expect("counted");
    let not_open = |result: Result<_, NativeError>| {
        assert!(matches!(result, Err(NativeError::NotOpenFor(_))), "{result:?}");
    };
    let open = |options| session.open("file", options).expect("opened");
    not_open(open(OpenOptions::READ).defragment(|_| true).map(drop));
    let writing = open(OpenOptions { read: false, ..OpenOptions::READ_WRITE });
    not_open(writing.runs().map(drop));
    not_open(writing.defragment(|_| true).map(drop));
    let key = file.bind(0, LEN as u64, BOTH, None).expect("bound");
    let part = session.redeem(&key).expect("opened");
    not_open(part.defragment_step(FilePage(0)).map(drop));
    let mut taker = Taker::new(&server);
    taker.take_all();
    assert_eq!(status(file.defragment(|_| panic!("nothing is moved"))), Status::NoSpace);
    assert_eq!(file.runs().expect("counted"), runs);
    assert_eq!(read(&file, 0, LEN).expect("read"), contents);
    // Half of what is free is left to writers, so that takes some steps more.
    taker.give(PAGES + 20);
    let since = Instant::now();
    let moved = loop {
        match file.defragment(|_| true) {
            Err(NativeError::Server(Status::NoSpace)) if since.elapsed() < LONG => {}
            moved => break moved.expect("space was freed"),
        }
    };
    assert!(moved.moved_pages > 0 && moved.runs_after < runs, "{moved:?}");
    assert_eq!(read(&file, 0, LEN).expect("read"), contents);
    session.close();
    for result in [file.defragment_step(FilePage(0)).map(drop), file.runs().map(drop)] {
        assert!(matches!(result, Err(NativeError::Closed)), "{result:?}");
    }
}

#[test]
fn moves_go_on_with_the_next_server() {
    for link in ["shm", "tcp"] {
        let mut site = Site::new(link, 16 << 20);
        let session = Session::over(Arc::new(site.connect()), 4, None).expect("a session");
        let (file, contents) = scattered(&session);
        let hurried = file.with_deadline(Some(Duration::from_millis(200)));
        let mut kills = 0;
        let moved = file.defragment(|moved| {
            if kills == 0 && moved > 0 {
                kills += 1;
                site.kill();
                // Who has no time is told that a step may be made, and goes on later.
                let late = hurried.defragment_step(FilePage(moved));
                assert!(matches!(late, Err(NativeError::Deadline { .. })), "{late:?}");
                assert!(matches!(hurried.runs(), Err(NativeError::Deadline { .. })));
                site.start();
            }
            true
        });
        let moved = moved.expect("moved by both servers");
        assert_eq!((kills, moved.runs_after), (1, 1), "{link}: {moved:?}");
        assert_eq!(read(&file, 0, LEN).expect("read"), contents);
        file.sync().expect("nothing is lost");
        drop((file, hurried, session));
        site.stop();
    }
}
