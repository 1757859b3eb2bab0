//! The native API against a real server, over each link: names, reads and writes, queues, and a server that is away.

mod killed;
mod serving;

use cuttlefs_client::file::volume::Volume;
use cuttlefs_client::native::{
    Buffer, Completion, ConnectOptions, Done, File, FileKind, NativeError, OpenOptions, Post, Queue, Session,
    Status,
};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rdma::Endpoint;
use cuttlefs_common::rpc::NewNode;
use cuttlefs_common::world::{Random, SeededRandom};
use cuttlefs_server::pages::Hotspots;
use cuttlefs_server::pages::policy::RegionPolicy;
use cuttlefs_server::pool::FormatOptions;
use cuttlefs_server::serve::RunningServer;
use killed::Site;
use rustix::event::{PollFd, PollFlags, poll};
use serving::Serve;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const LINKS: [&str; 3] = ["shm", "unix", "tcp"];
const LONG: Duration = Duration::from_secs(60);
const PAGE: usize = 4096;

/// The server of tests that kill it, which runs in a process of its own.
#[test]
fn serving_child() {
    killed::serve_if_asked();
}

/// A server with so many frames, and where it listens.
struct Server {
    directory: TempDir,
    running: RunningServer,
}

impl Server {
    fn new(link: &str, frames: u64) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let dir = directory.path().join("pool");
        serving::make_pool(&FormatOptions { dir, size: 16 << 20, ..FormatOptions::default() }, [7; 16]);
        let endpoint: Endpoint = match link {
            "tcp" => "tcp://127.0.0.1:0".parse().expect("an endpoint"),
            "rdma" => serving::rdma_endpoint(),
            link => {
                let path = directory.path().join("socket");
                format!("{link}://{}", path.display()).parse().expect("an endpoint")
            }
        };
        let with = Serve {
            frames,
            listen: vec![endpoint],
            policy: RegionPolicy::default(),
            hotspots: Hotspots::Pages,
            durable_answers: false,
        };
        let running = serving::serve(&directory.path().join("pool"), with).expect("served");
        Self { directory, running }
    }

    fn connect(&self) -> Session {
        let url = self.running.endpoints()[0].to_string();
        Session::connect(&url, ConnectOptions::default()).expect("a session")
    }

    fn stop(self) {
        self.running.stop();
        drop(self.directory);
    }
}

fn pattern(len: usize, salt: u64) -> Vec<u8> {
    let random = SeededRandom::new(salt);
    (0..len.div_ceil(8)).flat_map(|_| random.next_u64().to_le_bytes()).take(len).collect()
}

fn status<T: std::fmt::Debug>(result: Result<T, NativeError>) -> Status {
    match result {
        Err(NativeError::Server(status)) => status,
        other => panic!("{other:?}"),
    }
}

fn figure(session: &Session, name: &str) -> u64 {
    session.figures().into_iter().find(|(found, _)| *found == name).expect("a figure").1
}

/// The ends of everything that is under way, in the order in which they came.
fn in_order(queue: &mut Queue) -> Vec<Completion> {
    let since = Instant::now();
    let mut ends = Vec::new();
    while queue.outstanding() > 0 {
        assert!(since.elapsed() < LONG, "nothing comes of {} requests", queue.outstanding());
        queue.wait(&mut ends, 16, LONG);
    }
    ends
}

/// The same by token.
fn all_of(queue: &mut Queue) -> BTreeMap<u64, Result<Done, NativeError>> {
    in_order(queue).into_iter().map(|Completion { token, result }| (token, result)).collect()
}

/// Reads the first page until a read is one-sided. On a busy machine a connection may take several attempts, and reads go as requests meanwhile.
fn until_one_sided(session: &Session, queue: &mut Queue, file: &File, buffer: &Buffer) {
    let since = Instant::now();
    let counts = || (figure(session, "onesided_reads"), figure(session, "sparse_fetches"));
    loop {
        let before = counts();
        queue.post_read(1, file, 0, (buffer, 0, PAGE)).expect("posted");
        assert_eq!(done(&all_of(queue), 1), Done::Read(PAGE));
        let after = counts();
        if after.0 > before.0 && after.1 == before.1 {
            return;
        }
        assert!(since.elapsed() < LONG, "no read is one-sided");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn done(ends: &BTreeMap<u64, Result<Done, NativeError>>, token: u64) -> Done {
    *ends[&token].as_ref().unwrap_or_else(|error| panic!("request {token}: {error}"))
}

#[test]
fn names_lead_to_files() {
    let server = Server::new("unix", 256);
    let session = server.connect();
    session.mkdir("a", 0o755).expect("a directory");
    session.mkdir("/a/b/", 0o755).expect("a directory");
    assert_eq!(status(session.mkdir("a/b", 0o755)), Status::Exists);
    let file = session.open("a/b/c", OpenOptions::CREATE).expect("made");
    file.write_at(0, b"one").expect("written");
    // A symlink by a mount: a program that mounts nothing makes none.
    let volume = serving::connect(&server.running.endpoints()[0], "mount", 1, false);
    let link = |at: &str, target: &[u8]| {
        let made = volume.make(
            &volume.session().own_caller(),
            InodeNo::ROOT,
            at.as_bytes(),
            NewNode::Symlink(target),
            0o777,
        );
        made.expect("a link");
    };
    link("way", b"a/./b");
    link("round", b"round");
    link("out", b"/etc");
    link("over", b"a/b/../b/c");
    for path in ["a/b/c", "/a//b/./c", "way/c", "way/../b/c", "a/../../a/b/c", "over"] {
        let found = session.open(path, OpenOptions::READ).unwrap_or_else(|error| panic!("{path}: {error}"));
        assert_eq!(found.ino(), file.ino(), "{path}");
    }
    assert_eq!(session.stat("way").expect("followed").kind, FileKind::Directory);
    assert_eq!(session.stat("/").expect("the root").kind, FileKind::Directory);
    assert!(matches!(session.stat("round"), Err(NativeError::LinkLoop { max: 40 })));
    for path in ["/", "a/..", "a/b/../.."] {
        assert!(matches!(session.rmdir(path), Err(NativeError::IsRoot)), "{path}");
        assert!(matches!(session.rename(path, "b"), Err(NativeError::IsRoot)), "{path}");
        assert!(matches!(session.rename("a", path), Err(NativeError::IsRoot)), "{path}");
    }
    assert!(matches!(session.stat("out/passwd"), Err(NativeError::AbsoluteLink)));
    assert_eq!(status(session.stat("a/none/c")), Status::NotFound);
    assert_eq!(status(session.stat("a/b/c/d")), Status::NotDirectory);
    assert_eq!(status(session.stat("a/b/c/")), Status::NotDirectory);
    assert_eq!(status(session.stat("")), Status::NotFound);
    assert_eq!(status(session.open("a", OpenOptions::READ)), Status::IsDirectory);
    assert_eq!(status(session.open("none", OpenOptions::READ)), Status::NotFound);
    assert_eq!(
        status(session.open("a/b/c", OpenOptions { exclusive: true, ..OpenOptions::CREATE })),
        Status::Exists
    );
    let mut names = Vec::new();
    session
        .read_dir("a/b", |entry| {
            names.push((entry.name.to_vec(), entry.kind));
            true
        })
        .expect("listed");
    assert_eq!(names, [(b"c".to_vec(), FileKind::File)]);
    session.rename("a/b/c", "d").expect("moved");
    assert_eq!(status(session.rmdir("a")), Status::NotEmpty);
    session.rmdir("a/b/").expect("removed");
    session.unlink("d").expect("removed");
    assert_eq!(status(session.stat("d")), Status::NotFound);
    // An open file outlives its name.
    let mut bytes = [0; 3];
    assert_eq!(file.read_at(0, &mut bytes).expect("read"), 3);
    assert_eq!(&bytes, b"one");
    volume.shut_down();
    drop((file, session));
    server.stop();
}

fn written_is_read(link: &str) {
    let server = Server::new(link, 64);
    let (writer, reader) = (server.connect(), server.connect().with_deadline(Some(LONG)));
    let file = writer.open("file", OpenOptions::CREATE).expect("made");
    let other = reader.open("file", OpenOptions::READ).expect("opened");
    // More than the server has frames for, and than one request carries.
    let mut model = pattern(3 << 20, 1);
    file.write_at(0, &model).expect("written");
    assert_eq!(file.append(b"tail").expect("appended"), model.len() as u64);
    model.extend(b"tail");
    file.write_at(5000, b"changed").expect("written");
    model[5000..5007].copy_from_slice(b"changed");
    file.sync().expect("durable");
    for file in [&file, &other] {
        let mut bytes = vec![0xee; model.len() + 100];
        assert_eq!(file.read_at(0, &mut bytes).expect("read"), model.len(), "{link}");
        assert!(bytes[..model.len()] == model, "{link}: other bytes");
        assert_eq!(file.read_at(u64::MAX, &mut bytes).expect("read"), 0);
        assert_eq!(file.read_at(4998, &mut bytes[..11]).expect("read"), 11);
        assert_eq!(bytes[..11], model[4998..5009]);
    }
    file.set_len(4999).expect("cut");
    file.set_len(6000).expect("extended");
    assert_eq!(other.len().expect("length"), 6000);
    let mut bytes = vec![0xee; 6000];
    assert_eq!(other.read_at(0, &mut bytes).expect("read"), 6000);
    assert!(bytes[..4999] == model[..4999] && bytes[4999..].iter().all(|byte| *byte == 0), "{link}");
    assert!(matches!(other.write_at(0, b"no"), Err(NativeError::NotOpenFor(_))));
    let cut = writer.open("file", OpenOptions { truncate: true, ..OpenOptions::READ_WRITE }).expect("cut");
    assert!(cut.is_empty().expect("length"));
    drop((cut, file, other, writer, reader));
    server.stop();
}

#[test]
fn what_was_written_is_read_over_every_link() {
    LINKS.into_iter().for_each(written_is_read);
}

/// Random reads, writes, appends and syncs through one queue, beside an array of bytes. A wave has no two requests that would have to be in order.
fn queue_does(link: &str) {
    let server = Server::new(link, 48);
    let session = server.connect();
    let file = session.open("file", OpenOptions::CREATE).expect("made");
    let mut model = pattern(200 * PAGE, 2);
    file.write_at(0, &model).expect("written");
    let mut queue = Queue::new(&session, 64).expect("a queue");
    let buffer = Buffer::new(&session, 64 * 8 * PAGE).expect("memory");
    let random = SeededRandom::new(3);
    let below = |bound: usize| (random.next_u64() % bound as u64) as usize;
    for wave in 0..30 {
        if wave % 3 == 2 {
            // Writes of distinct parts, one append behind them, and a sync that covers them.
            let parts = 1 + below(20);
            let part_len = model.len() / parts;
            for part in 0..parts {
                let len = 1 + below(part_len.min(8 * PAGE));
                let offset = part * part_len + below(part_len - len + 1);
                let bytes = pattern(len, wave * 100 + part as u64);
                let at = part * 8 * PAGE;
                buffer.write(at, &bytes).expect("in the buffer");
                queue.post_write(part as u64, &file, offset as u64, (&buffer, at, len)).expect("posted");
                model[offset..offset + len].copy_from_slice(&bytes);
            }
            let tail = pattern(1 + below(3000), wave);
            buffer.write(63 * 8 * PAGE, &tail).expect("in the buffer");
            queue.post_append(1000, &file, (&buffer, 63 * 8 * PAGE, tail.len())).expect("posted");
            queue.post_sync(1001, &file).expect("posted");
            let ends = all_of(&mut queue);
            assert_eq!(ends.len(), parts + 2);
            let (offset, len) = (model.len() as u64, tail.len());
            assert_eq!(done(&ends, 1000), Done::Written { offset, len }, "{link}");
            assert_eq!(done(&ends, 1001), Done::Synced);
            model.extend(&tail);
            continue;
        }
        let wanted: Vec<(usize, usize)> =
            (0..64).map(|_| (below(model.len() + PAGE), below(8 * PAGE))).collect();
        let posts: Vec<(u64, Post<'_>)> = wanted
            .iter()
            .enumerate()
            .map(|(index, &(offset, len))| {
                let at = index * 8 * PAGE;
                (index as u64, Post::Read { file: &file, offset: offset as u64, buffer: &buffer, at, len })
            })
            .collect();
        queue.post(&posts).expect("posted");
        let ends = all_of(&mut queue);
        for (index, &(offset, len)) in wanted.iter().enumerate() {
            let expected = &model[offset.min(model.len())..(offset + len).min(model.len())];
            assert_eq!(done(&ends, index as u64), Done::Read(expected.len()), "{link}: {offset} {len}");
            let mut bytes = vec![0; expected.len()];
            buffer.read(index * 8 * PAGE, &mut bytes).expect("out of the buffer");
            assert!(bytes == expected, "{link}: other bytes at {offset}, {len}");
        }
    }
    drop((queue, file, session));
    server.stop();
}

#[test]
fn a_queue_does_what_was_posted() {
    LINKS.into_iter().for_each(queue_does);
}

/// A thread for each request, so that nothing but the queue keeps the sync, which has little to do, behind the writes.
#[test]
fn a_sync_waits_for_the_writes_that_were_posted_before_it() {
    const WRITES: usize = 12;
    const LEN: usize = 512 << 10;
    let server = Server::new("unix", 2048);
    let url = server.running.endpoints()[0].to_string();
    let options = ConnectOptions { threads: 2 * WRITES, ..ConnectOptions::default() };
    let session = Session::connect(&url, options).expect("a session");
    let file = session.open("file", OpenOptions::CREATE).expect("made");
    let other = session.open("other", OpenOptions::CREATE).expect("made");
    let mut queue = Queue::new(&session, WRITES + 2).expect("a queue");
    let buffer = Buffer::new(&session, LEN).expect("memory");
    for _ in 0..5 {
        for write in 0..WRITES {
            queue.post_write(write as u64, &file, (write * LEN) as u64, (&buffer, 0, LEN)).expect("posted");
        }
        queue.post_sync(100, &file).expect("posted");
        // It has nothing to wait for, and nobody waits for it.
        queue.post_sync(200, &other).expect("posted");
        let order: Vec<u64> = in_order(&mut queue).into_iter().map(|end| end.token).collect();
        let place = |token| order.iter().position(|found| *found == token).expect("it has ended");
        assert!((0..WRITES as u64).all(|write| place(write) < place(100)), "{order:?}");
        place(200);
    }
    drop((queue, file, other, session));
    server.stop();
}

fn reads_cost_no_request(link: &str) {
    let server = Server::new(link, 512);
    let session = server.connect();
    let file = session.open("file", OpenOptions::CREATE).expect("made");
    let model = pattern(128 * PAGE, 4);
    file.write_at(0, &model).expect("written");
    file.sync().expect("durable");
    let mut bytes = vec![0; model.len()];
    // Everything is resident after this, and the layout is known.
    assert_eq!(file.read_at(0, &mut bytes).expect("read"), model.len());
    let mut queue = Queue::new(&session, 32).expect("a queue");
    let buffer = Buffer::new(&session, 32 * PAGE).expect("memory");
    until_one_sided(&session, &mut queue, &file, &buffer);
    let (reads, fetches) = (figure(&session, "onesided_reads"), figure(&session, "sparse_fetches"));
    const WAVES: u64 = 40;
    for wave in 0..WAVES {
        let posts: Vec<(u64, Post<'_>)> = (0..32)
            .map(|index| {
                let (at, offset) = (index * PAGE, ((wave as usize * 7 + index * 4) % 128 * PAGE) as u64);
                (index as u64, Post::Read { file: &file, offset, buffer: &buffer, at, len: PAGE })
            })
            .collect();
        queue.post(&posts).expect("posted");
        let ends = all_of(&mut queue);
        assert!((0..32).all(|index| done(&ends, index) == Done::Read(PAGE)));
    }
    assert!(figure(&session, "onesided_reads") - reads >= WAVES * 32, "{link}");
    assert_eq!(figure(&session, "sparse_fetches") - fetches, 0, "{link}");
    drop((queue, file, session));
    server.stop();
}

#[test]
fn reads_of_resident_pages_cost_the_server_no_request() {
    LINKS.into_iter().for_each(reads_cost_no_request);
}

#[test]
fn an_event_loop_sleeps_on_the_queues_descriptor() {
    for link in LINKS {
        let server = Server::new(link, 64);
        let session = server.connect();
        let file = session.open("file", OpenOptions::CREATE).expect("made");
        file.write_at(0, &pattern(100 * PAGE, 5)).expect("written");
        let mut queue = Queue::new(&session, 16).expect("a queue");
        let buffer = Buffer::new(&session, 16 * PAGE).expect("memory");
        let (mut posted, mut ended) = (0u64, 0);
        let mut ends = Vec::new();
        while ended < 200 {
            while queue.outstanding() < 16 && posted < 200 {
                let (at, offset) = (posted as usize % 16 * PAGE, posted % 100 * PAGE as u64);
                queue.post_read(posted, &file, offset, (&buffer, at, PAGE)).expect("posted");
                posted += 1;
            }
            let limit = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
            let woken = poll(&mut [PollFd::new(&queue.event_fd(), PollFlags::IN)], Some(&limit));
            assert_eq!(woken, Ok(1), "{link}: {posted} posted, {ended} ended, and nothing wakes");
            // One at a time: the others must keep the descriptor readable.
            ended += queue.poll(&mut ends, 1);
        }
        assert!(ends.iter().all(|end| matches!(end.result, Ok(Done::Read(PAGE)))), "{link}");
        drop((queue, file, session));
        server.stop();
    }
}

#[test]
fn what_can_never_be_done_is_refused_at_once() {
    let server = Server::new("tcp", 64);
    let session = server.connect();
    let file = session.open("file", OpenOptions::CREATE).expect("made");
    let reading = session.open("file", OpenOptions::READ).expect("opened");
    let mut queue = Queue::new(&session, 2).expect("a queue");
    assert!(matches!(Queue::new(&session, 0), Err(NativeError::Depth { .. })));
    assert!(matches!(Queue::new(&session, 1000), Err(NativeError::Depth { .. })));
    let buffer = Buffer::new(&session, 100).expect("memory");
    let large = Buffer::new(&session, 2 << 20).expect("memory");
    let refused = queue.post_read(0, &file, 0, (&buffer, 50, 51));
    assert!(matches!(refused, Err(NativeError::PastBuffer { len: 100 })), "{refused:?}");
    assert!(queue.post_read(0, &file, 0, (&buffer, usize::MAX, 2)).is_err());
    assert!(buffer.read(99, &mut [0; 2]).is_err() && buffer.write(101, b"").is_err());
    let refused = queue.post_read(0, &file, 0, (&large, 0, 2 << 20));
    assert!(matches!(refused, Err(NativeError::TooLong { .. })), "{refused:?}");
    let refused = queue.post_write(0, &reading, 0, (&buffer, 0, 1));
    assert!(matches!(refused, Err(NativeError::NotOpenFor(_))), "{refused:?}");
    // If one of several is refused, none is posted.
    let sync = Post::Sync { file: &file };
    let past = Post::Read { file: &file, offset: 0, buffer: &buffer, at: 0, len: 101 };
    assert!(queue.post(&[(1, sync), (2, past)]).is_err());
    assert_eq!(queue.outstanding(), 0);
    let full = queue.post(&[(1, sync), (2, sync), (3, sync)]);
    assert!(matches!(full, Err(NativeError::QueueFull { depth: 2 })), "{full:?}");
    queue.post(&[(1, sync), (2, sync)]).expect("posted");
    assert!(queue.post(&[(3, sync)]).is_err());
    assert_eq!(all_of(&mut queue).len(), 2);
    assert!(matches!(Session::connect("nowhere", ConnectOptions::default()), Err(NativeError::Url(_))));
    let nobody = Session::connect("tcp://127.0.0.1:1", ConnectOptions::default()).expect_err("nobody");
    assert!(nobody.to_string().contains("is cuttlefsd running there"), "{nobody}");
    session.close();
    let closed = file.stat();
    assert!(matches!(closed, Err(NativeError::Closed)), "{closed:?}");
    queue.post(&[(1, sync)]).expect("posted");
    assert!(matches!(all_of(&mut queue)[&1], Err(NativeError::Closed)));
    drop((queue, file, reading, session));
    server.stop();
}

/// Reads `file` as a whole.
fn contents(file: &File) -> Result<Vec<u8>, NativeError> {
    let mut bytes = vec![0; file.len()? as usize];
    let got = file.read_at(0, &mut bytes)?;
    bytes.truncate(got);
    Ok(bytes)
}

#[test]
fn a_server_that_is_away_is_waited_for_as_long_as_the_caller_says() {
    for link in ["shm", "tcp"] {
        let mut site = Site::new(link, 16 << 20);
        let session = Session::over(Arc::new(site.connect()), 2, None).expect("a session");
        let file = session.open("file", OpenOptions::CREATE).expect("made");
        let model = pattern(100 * PAGE, 6);
        // Never synced: the session has the only copy when the server is killed.
        file.write_at(0, &model).expect("written");
        let mut queue = Queue::new(&session, 8).expect("a queue");
        let buffer = Buffer::new(&session, 8 * PAGE).expect("memory");
        queue.post_read(1, &file, 0, (&buffer, 0, PAGE)).expect("posted");
        assert_eq!(done(&all_of(&mut queue), 1), Done::Read(PAGE));
        // Some of these may be under way when the server dies.
        for token in 2..8 {
            let place = (&buffer, token as usize * PAGE, PAGE);
            queue.post_read(token, &file, token * PAGE as u64, place).expect("posted");
        }
        site.kill();
        let short = file.with_deadline(Some(Duration::from_millis(50)));
        let late = short.write_at(0, b"late");
        assert!(matches!(late, Err(NativeError::Deadline { .. })), "{late:?}");
        // The first calls stay with the threads; later ones do not pile up behind them.
        for _ in 0..20 {
            assert!(matches!(short.stat(), Err(NativeError::Deadline { .. })));
        }
        // A queue's requests wait.
        for token in 0..2 {
            let place = (&buffer, token as usize * PAGE, PAGE);
            queue.post_read(token, &file, token * PAGE as u64, place).expect("posted");
        }
        site.start();
        let ends = all_of(&mut queue);
        for token in 0..8 {
            assert_eq!(done(&ends, token), Done::Read(PAGE), "{link}");
            let (at, mut bytes) = (token as usize * PAGE, vec![0; PAGE]);
            buffer.read(at, &mut bytes).expect("out of the buffer");
            // The write whose caller went away may be done by now.
            assert!(bytes[4..] == model[at + 4..at + PAGE], "{link}: other bytes in page {token}");
        }
        let read = contents(&file).expect("read");
        // The write whose caller went away may have been done.
        assert!(
            read == model || (&read[..4] == b"late" && read[4..] == model[4..]),
            "{link}: bytes are lost"
        );
        // The queue reads one-sidedly again, over a connection to the new server.
        until_one_sided(&session, &mut queue, &file, &buffer);
        drop((queue, short, file, session));
        site.stop();
    }
}

fn same_by_requests(link: &str) {
    let server = Server::new(link, 256);
    let session = server.connect();
    let file = session.open("file", OpenOptions::CREATE).expect("made");
    file.write_at(0, &[1; 100]).expect("written");
    let grant = file.grant_write(0, 1000).expect("an empty promise");
    assert!(!grant.is_one_sided() && !grant.stands());
    grant.renew().expect("nothing to do");
    file.write_at(10, b"write").expect("written");
    assert_eq!(file.append(b"append").expect("appended"), 100);
    let word = u64::from_le_bytes([1; 8]);
    assert_eq!(file.fetch_add(0, 1).expect("added"), word);
    assert_eq!(file.compare_swap(0, word, 7).expect("not swapped"), word + 1);
    let mut queue = Queue::new(&session, 2).expect("a queue");
    queue.post_compare_swap(1, &file, 0, (word + 1, word + 5)).expect("posted");
    assert!(matches!(all_of(&mut queue)[&1], Ok(Done::Old(old)) if old == word + 1));
    queue.post_fetch_add(2, &file, 0, word.wrapping_sub(word + 5)).expect("posted");
    assert!(matches!(all_of(&mut queue)[&2], Ok(Done::Old(old)) if old == word + 5));
    assert_eq!(server.running.server().files.figures().grants.grants, 0);
    let mut bytes = [0; 106];
    assert_eq!(file.read_at(0, &mut bytes).expect("read"), 106);
    assert!(bytes[..10] == [1; 10] && bytes[10..15] == *b"write" && bytes[100..] == *b"append");
    grant.give_back().expect("nothing to do");
    drop((queue, file, session));
    server.stop();
}

#[test]
fn links_without_such_verbs_do_the_same_by_requests() {
    same_by_requests("shm");
}

/// Over a real RNIC (scripts/vm/rdma-test.sh), which translates no file addresses: it READs windows, and changes go as requests.
mod rdma {
    use super::*;

    #[test]
    #[ignore = "wants an RNIC"]
    fn what_was_written_is_read() {
        written_is_read("rdma");
    }

    #[test]
    #[ignore = "wants an RNIC"]
    fn a_queue_does_what_was_posted() {
        queue_does("rdma");
    }

    #[test]
    #[ignore = "wants an RNIC"]
    fn reads_of_resident_pages_cost_the_server_no_request() {
        reads_cost_no_request("rdma");
    }

    #[test]
    #[ignore = "wants an RNIC"]
    fn a_grant_promises_nothing_and_changes_are_requests() {
        same_by_requests("rdma");
    }
}
