//! A full pool under write grants: who changes a file one-sidedly is told as by requests, knows that nothing was done, and goes on when there is space
//! again.

use super::grants::until_one_sided;
use super::*;
use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::{FsError, Handle, OpenHow};
use cuttlefs_client::native::Buffer;
use cuttlefs_common::rpc::Allocate;

/// Somebody who takes space, and gives it back.
pub struct Taker {
    volume: RemoteVolume,
    ino: InodeNo,
    handle: Handle,
    taken: u64,
}

impl Taker {
    pub fn new(server: &Server) -> Self {
        let volume = serving::connect(&server.endpoint("unix"), "taker", 1, false);
        let (attr, file) =
            volume.create(&CALLER, InodeNo::ROOT, b"taken", 0o644, true, OpenHow::READ_WRITE).expect("made");
        Self { volume, ino: attr.ino, handle: file.handle, taken: 0 }
    }

    /// Takes all space that there is.
    pub fn take_all(&mut self) {
        let mut len = 32 << 20;
        while len >= PAGE as u64 {
            let how = Allocate::Reserve { keep_size: false };
            match self.volume.allocate(&CALLER, self.handle, self.taken, len, how) {
                Ok(_) => self.taken += len,
                Err(FsError::Server(Status::NoSpace)) => len /= 2,
                Err(error) => panic!("{error}"),
            }
        }
    }

    pub fn give(&mut self, pages: u64) {
        self.taken -= pages * PAGE as u64;
        let set = SetAttr { size: Some(self.taken), ..SetAttr::default() };
        self.volume.set_attr(&CALLER, self.ino, set).expect("cut");
    }
}

fn is_full<T: std::fmt::Debug>(result: Result<T, NativeError>) {
    assert_eq!(status(result), Status::NoSpace);
}

/// Appends as soon as there is space: what was given is free a moment later.
fn append_in_time(file: &File, bytes: &[u8]) -> u64 {
    let since = Instant::now();
    loop {
        match file.append(bytes) {
            Err(NativeError::Server(Status::NoSpace)) if since.elapsed() < LONG => {}
            appended => return appended.expect("space was freed"),
        }
    }
}

#[test]
fn a_full_pool_is_told_and_nothing_is_done() {
    let server = Server::new(512);
    let mut taker = Taker::new(&server);
    let faults = || server.running.server().files.pages().figures().counts.grant_faults;
    for link in ["unix", "tcp", "shm"] {
        let (session, other) = (server.connect(link), server.connect("tcp"));
        let mut expected = vec![7; 100];
        let file = create(&session, link, &expected);
        let looking = other.open(link, OpenOptions::READ).expect("opened");
        let grant = file.grant_write(0, 4 * PAGE as u64).expect("granted");
        let is_one_sided = grant.is_one_sided();
        assert_eq!(is_one_sided, link != "shm");
        taker.take_all();
        let mut append = |len: usize| {
            let bytes = pattern(len, len as u64 + expected.len() as u64);
            assert_eq!(file.append(&bytes).expect("there is room"), expected.len() as u64, "{link}");
            expected.extend(bytes);
        };
        append(PAGE - 100);
        if is_one_sided {
            // What the grant has set aside.
            (0..3).for_each(|_| append(PAGE));
        }
        let before = faults();
        for len in [PAGE, 1, 3 * PAGE] {
            is_full(file.append(&pattern(len, 1)));
        }
        assert!(!is_one_sided || faults() >= before + 3, "{link}: they were requests");
        assert_eq!(file.len().expect("a length"), expected.len() as u64);
        assert_eq!(grant.stands(), is_one_sided, "{link}");
        file.write_at(10, b"what is there can be written").expect("written");
        expected[10..38].copy_from_slice(b"what is there can be written");
        let mut queue = Queue::new(&session, 16).expect("a queue");
        let buffer = Buffer::new(&session, 2 * PAGE).expect("memory");
        buffer.write(0, &expected[..8]).expect("in the buffer");
        if is_one_sided {
            until_one_sided(&server, &mut queue, &file, &buffer);
        }
        buffer.write(0, &[3; PAGE]).expect("in the buffer");
        queue.post_append(1, &file, (&buffer, 0, PAGE)).expect("posted");
        queue.post_append(2, &file, (&buffer, 0, 1)).expect("posted");
        queue.post_write(3, &file, 50, (&buffer, 0, 8)).expect("posted");
        queue.post_read(4, &file, 0, (&buffer, PAGE, 10)).expect("posted");
        queue.post_fetch_add(5, &file, 56, 1).expect("posted");
        let ends = all_of(&mut queue);
        for token in [1, 2] {
            assert!(
                matches!(ends[&token], Err(NativeError::Server(Status::NoSpace))),
                "{link}: {:?}",
                ends[&token]
            );
        }
        assert_eq!(done(&ends, 3), Done::Written { offset: 50, len: 8 });
        assert_eq!(done(&ends, 4), Done::Read(10));
        expected[50..58].fill(3);
        // The word begins in the bytes that were written beside it, in whatever order.
        assert!(matches!(done(&ends, 5), Done::Old(_)));
        let word = read(&file, 56, 8).expect("read");
        expected[56..64].copy_from_slice(&word);
        assert_eq!(read(&looking, 0, 100_000).expect("read"), expected, "{link}");

        taker.give(16);
        let bytes = pattern(2 * PAGE, 5);
        assert_eq!(append_in_time(&file, &bytes), expected.len() as u64);
        expected.extend(bytes);
        queue.post_append(1, &file, (&buffer, 0, PAGE)).expect("posted");
        let offset = expected.len() as u64;
        assert_eq!(done(&all_of(&mut queue), 1), Done::Written { offset, len: PAGE });
        expected.extend([3; PAGE]);
        assert_eq!(grant.stands(), is_one_sided, "{link}");
        file.sync().expect("durable");
        assert_eq!(read(&looking, 0, 100_000).expect("read"), expected, "{link}");
        grant.give_back().expect("given back");
    }
}

/// What a grant has set aside is its holder's in a full pool, whatever the session knows of the file's length; and a renewal that is refused leaves it.
#[test]
fn what_is_set_aside_stays_for_its_holder() {
    let server = Server::new(512);
    let mut taker = Taker::new(&server);
    let page = PAGE as u64;
    for link in ["unix", "tcp"] {
        let (session, other) = (server.connect(link), server.connect("tcp"));
        let file = create(&session, link, &[7; 100]);
        let theirs = other.open(link, OpenOptions::READ_WRITE).expect("opened");
        let grant = file.grant_write(8 * page, 8 * page).expect("granted");
        // The session does not hear of it.
        theirs.set_len(10 * page).expect("longer");
        taker.take_all();
        is_full(theirs.write_at(9 * page, b"no grant"));
        file.write_at(8 * page, &pattern(PAGE, 1)).expect("before the end");
        // Twice its space is not there, and nobody has taken the grant away.
        is_full(grant.renew());
        assert!(grant.stands(), "{link}");
        file.write_at(10 * page - 2, b"over").expect("over the end");
        file.write_at(12 * page, b"behind").expect("behind the end");
        assert_eq!(file.fetch_add(11 * page, 5).expect("granted"), 0);
        assert_eq!(file.append(b"last").expect("granted"), 12 * page + 6);
        is_full(file.write_at(2 * page, b"not granted"));
        let mut expected = vec![0; 12 * PAGE + 10];
        expected[..100].fill(7);
        expected[8 * PAGE..9 * PAGE].copy_from_slice(&pattern(PAGE, 1));
        expected[10 * PAGE - 2..][..4].copy_from_slice(b"over");
        expected[11 * PAGE] = 5;
        expected[12 * PAGE..].copy_from_slice(b"behindlast");
        assert!(read(&theirs, 0, 100_000).expect("read") == expected, "{link}: other bytes");
        grant.give_back().expect("given back");
        taker.give(32);
        let gone = (session, file);
        drop(gone);
    }
}

/// A write that is a request, for it ends behind the end that the session knows, finds no space in a range that was granted: so the session hears that the
/// grant has ended, and says so.
#[test]
fn a_refusal_for_lack_of_space_tells_of_a_grant_that_has_ended() {
    let server = Server::new(512);
    let mut taker = Taker::new(&server);
    let page = PAGE as u64;
    for link in LINKS {
        let (session, other) = (server.connect(link), server.connect("tcp"));
        let file = create(&session, link, &[7; 100]);
        let theirs = other.open(link, OpenOptions::READ_WRITE).expect("opened");
        let grant = file.grant_write(8 * page, 4 * page).expect("granted");
        let stays = file.grant_write(0, 50).expect("granted");
        // The cut ends the first grant, and the session hears of neither change.
        theirs.set_len(60).expect("cut");
        theirs.set_len(20 * page).expect("longer");
        taker.take_all();
        assert!(grant.stands() && stays.stands(), "nobody has told");
        is_full(file.write_at(11 * page, &[1; 2 * PAGE]));
        assert!(grant.stands(), "{link}: not all of that was granted");
        is_full(file.write_at(8 * page, &[1; PAGE]));
        assert!(!grant.stands(), "{link}");
        is_full(file.fetch_add(8 * page, 1));
        assert_eq!(file.fetch_add(8 * page, 0).expect("no space is needed"), 0);
        file.write_at(0, b"granted").expect("granted");
        assert!(stays.stands(), "{link}");
        taker.give(32);
        let since = Instant::now();
        while let Err(error) = grant.renew() {
            assert!(since.elapsed() < LONG, "{link}: {error}");
        }
        taker.take_all();
        file.write_at(8 * page, &[1; PAGE]).expect("set aside");
        assert!(grant.stands(), "{link}");
        taker.give(32);
        let gone = (grant, stays, session, file);
        drop(gone);
    }
}

/// Records of two sessions until there is no space; then space is freed, and both go on.
#[test]
fn appenders_that_fill_the_pool_together_lose_nothing() {
    let server = Server::new(512);
    let mut taker = Taker::new(&server);
    let _made = create(&server.connect("unix"), "log", b"");
    taker.take_all();
    let sessions = LINKS.map(|link| server.connect(link));
    let files =
        sessions.each_ref().map(|session| session.open("log", OpenOptions::READ_WRITE).expect("opened"));
    let mut placed: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
    for round in 0..3u64 {
        taker.give(48);
        let grants = files.each_ref().map(|file| file.grant_write(0, 1).expect("granted"));
        let appender = |who: u64, file: &File| {
            let mut mine = Vec::new();
            // The first may come before what was given is free.
            let first = pattern(100, who);
            mine.push((append_in_time(file, &first), first));
            for number in 1u64.. {
                let bytes = pattern(100 + (number as usize * 577) % 5000, round * 1000 + number * 2 + who);
                match file.append(&bytes) {
                    Ok(at) => mine.push((at, bytes)),
                    Err(NativeError::Server(Status::NoSpace)) => break,
                    Err(error) => panic!("appender {who}: {error}"),
                }
            }
            mine
        };
        let [one, two] = &files;
        let all = std::thread::scope(|scope| {
            let beside = scope.spawn(|| appender(1, two));
            let mine = appender(0, one);
            [mine, beside.join().expect("no panic")].concat()
        });
        let count = placed.len() + all.len();
        placed.extend(all);
        assert_eq!(placed.len(), count, "no two are at one offset");
        let looking = server.connect("shm").open("log", OpenOptions::READ).expect("opened");
        let mut end = 0;
        for (at, bytes) in &placed {
            assert_eq!(*at, end, "round {round}: no hole and no overlap");
            assert_eq!(&read(&looking, *at, bytes.len()).expect("read"), bytes);
            end += bytes.len() as u64;
        }
        assert_eq!(looking.len().expect("a length"), end, "what was refused is not there");
        for grant in grants {
            assert!(grant.stands());
            grant.give_back().expect("given back");
        }
        taker.take_all();
    }
    let counts = server.running.server().files.pages().figures().counts;
    assert!(counts.target_appends > 0, "{counts:?}");
}
