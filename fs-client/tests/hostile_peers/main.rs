//! Peers that break the protocol, fall silent, or take all they can get, beside a client that keeps the rules. The server must hold nothing of such a
//! peer after its end, and must go on to serve the other client.
//!
//! Where the tests run as root the hostile peers are another user, and so have a share of their own. `scripts/suites/attack.sh` measures what such
//! peers cost a mount.

mod peer;
#[path = "../serving/mod.rs"]
mod serving;

use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::{Caller, OpenHow, Volume};
use cuttlefs_common::attr::SetAttr;
use cuttlefs_common::ids::{InodeNo, TraceId};
use cuttlefs_common::rdma::Endpoint;
use cuttlefs_common::rdma::soft::tcp::packet::{PacketHeader, PacketKind};
use cuttlefs_common::rpc::{AWAIT_LOCKS_MAX_MS, RECLAIM_FILES_MAX, Reclaim, Request, Rights};
use cuttlefs_common::status::Status;
use cuttlefs_server::BUFFERS_OF_PEER;
use cuttlefs_server::Resource;
use cuttlefs_server::pages::Hotspots;
use cuttlefs_server::pages::policy::RegionPolicy;
use cuttlefs_server::pool::FormatOptions;
use cuttlefs_server::serve::RunningServer;
use peer::{PATIENCE, Peer, pulled_write, pushed_fetch};
use serving::Serve;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const CALLER: Caller = Caller { uid: 0, gid: 0, trace: TraceId(1), umask: 0, drops_privileges: false };
const READ_WRITE: OpenHow = OpenHow::READ_WRITE;
const MIB: usize = 1 << 20;

/// A server, and a client that keeps the rules.
struct Site {
    directory: tempfile::TempDir,
    running: Option<RunningServer>,
    client: Option<RemoteVolume>,
    /// A file of 1 MiB that everybody may open.
    handle: cuttlefs_client::file::volume::Handle,
    /// What the server held before the first hostile peer connected.
    before: Left,
}

/// What the server holds for its peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Left {
    used: [usize; Resource::ALL.len()],
    connections: usize,
    turns: (usize, usize),
    buffers: (usize, usize),
}

impl Left {
    fn of(running: &RunningServer) -> Self {
        let server = running.server();
        let (turns, bounce) = (&server.counters.turns, &server.counters.bounce);
        Self {
            used: Resource::ALL.map(|resource| server.admission.shares.used(resource)),
            connections: server.admission.connections.len(),
            turns: (turns.running(), turns.waiting()),
            buffers: (bounce.running(), bounce.waiting()),
        }
    }
}

/// The name of the file that everybody may write.
const FILE: &[u8] = b"file";

impl Site {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("directory");
        std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).expect("mode");
        let dir = directory.path().join("pool");
        let format = FormatOptions { dir: dir.clone(), size: 64 << 20, ..FormatOptions::default() };
        serving::make_pool(&format, [3; 16]);
        let running = Self::serve(directory.path());
        let own = Endpoint::Shm(directory.path().join("shm"));
        let client = serving::connect(&own, "honest", 4, false);
        let (attr, file) =
            client.create(&CALLER, InodeNo::ROOT, FILE, 0o666, true, READ_WRITE).expect("create");
        client
            .set_attr(&CALLER, attr.ino, SetAttr { mode: Some(0o666), ..SetAttr::default() })
            .expect("mode");
        assert_eq!(client.write(&CALLER, file.handle, 0, &vec![7; MIB]), Ok(MIB as u32));
        // From here on the client has all its lanes.
        let before = Left::of(&running);
        Self { directory, running: Some(running), client: Some(client), handle: file.handle, before }
    }

    fn serve(directory: &Path) -> RunningServer {
        let with = Serve {
            frames: 2048,
            listen: vec![Endpoint::Shm(directory.join("shm")), Endpoint::Unix(directory.join("unix"))],
            policy: RegionPolicy::default(),
            hotspots: Hotspots::Pages,
            durable_answers: false,
        };
        serving::serve(&directory.join("pool"), with).expect("start")
    }

    fn running(&self) -> &RunningServer {
        self.running.as_ref().expect("it runs")
    }

    fn unix(&self) -> PathBuf {
        self.directory.path().join("unix")
    }

    /// The client that keeps the rules writes and reads 1 MiB, for which the server needs bounce buffers.
    fn go_on(&self) {
        let client = self.client.as_ref().expect("it runs");
        let bytes: Vec<u8> = (0..MIB).map(|at| (at * 31 + (at >> 9)) as u8).collect();
        assert_eq!(client.write(&CALLER, self.handle, 0, &bytes), Ok(MIB as u32));
        let mut same = false;
        client.read(&CALLER, self.handle, 0, MIB as u32, &mut |read| same = read == bytes).expect("read");
        assert!(same, "what was written is read");
    }

    fn wait_until(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !is_so(self) {
            assert!(Instant::now() < deadline, "{what}: {:?}", Left::of(self.running()));
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the server holds nothing of the hostile peers, except their sessions, which may stay for a lease, and the files open in them.
    fn wait_for_nothing_left(&self) {
        let sessions = Resource::Sessions as usize;
        let keys = Resource::Filekeys as usize;
        self.wait_until("something is left", |site| {
            let mut left = Left::of(site.running());
            left.used[sessions] = site.before.used[sessions];
            left.used[keys] = site.before.used[keys];
            left == site.before
        });
        let sessions = self.running().server().sessions.list();
        let counted: u64 = sessions.iter().map(|session| session.connections()).sum();
        assert_eq!(counted as usize, self.before.connections, "a session counts a connection that is gone");
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let client = self.client.take().expect("it runs");
        client.release(self.handle);
        client.shut_down();
        self.running.take().expect("it runs").stop();
    }
}

/// A stranger listens at the path of a server that has stopped. The test needs root, to be another user.
#[test]
fn a_client_tells_a_stranger_in_its_servers_place_nothing() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let mut site = Site::new();
    let path = site.unix();
    let client = serving::connect(&Endpoint::Unix(path.clone()), "reconnects", 1, false);
    site.running.take().expect("it runs").stop();
    std::fs::set_permissions(site.directory.path(), PermissionsExt::from_mode(0o777)).expect("mode");
    let _ = std::fs::remove_file(&path);
    let squat = peer::Squat::listen(&path);
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| client.lookup(&CALLER, InodeNo::ROOT, FILE).expect("the server is back"));
        // The client connects again and again, and sends nothing each time.
        for _ in 0..3 {
            assert_eq!(squat.hear(), b"");
        }
        drop(squat);
        std::fs::remove_file(&path).expect("the stranger's socket");
        site.running = Some(Site::serve(site.directory.path()));
        asking.join().expect("an answer");
    });
    client.shut_down();
}

/// A mount whose further connections fail is not cut off from its server while another connection stands.
#[test]
fn a_connection_that_cannot_be_made_is_not_a_server_that_is_away() {
    let site = Site::new();
    let (path, aside) = (site.unix(), site.directory.path().join("aside"));
    let client = serving::connect(&Endpoint::Unix(path.clone()), "two lanes", 2, false);
    let lookup = || client.lookup(&CALLER, InodeNo::ROOT, FILE).expect("an answer");
    // Each thread gets a lane of its own. The first thread gets the first lane, which is there already.
    std::thread::scope(|scope| scope.spawn(lookup).join().expect("over the first lane"));
    let connections = site.running().server().admission.connections.len();
    std::fs::rename(&path, &aside).expect("the server's socket");
    let refusing = UnixListener::bind(&path).expect("free");
    let refuse = |listener: &UnixListener, times| {
        (0..times).for_each(|_| drop(listener.accept().expect("it tries again")));
    };
    std::thread::scope(|scope| {
        let asking = scope.spawn(lookup);
        refuse(&refusing, 3);
        assert!(!client.session().is_away(), "the first lane stands");
        lookup();
        assert!(!asking.is_finished(), "it had a lane of its own");
        // Now the server closes all connections.
        for connection in site.running().server().admission.connections.all() {
            connection.close();
        }
        site.wait_until("they are there", |site| {
            site.running().server().admission.connections.len() < connections
        });
        refuse(&refusing, 3);
        assert!(client.session().is_away(), "no lane stands");
        drop(refusing);
        std::fs::rename(&aside, &path).expect("the server's socket");
        asking.join().expect("an answer");
    });
    assert!(!client.session().is_away());
    lookup();
    client.shut_down();
}

/// Nothing of a connection stays, however it ends.
#[test]
fn a_connection_that_ended_leaves_nothing() {
    let site = Site::new();
    let path = site.unix();
    let send = PacketHeader::new(PacketKind::Send, 0);
    type Attack<'a> = (&'a str, Box<dyn Fn(u128) -> Peer + 'a>);
    let attacks: Vec<Attack<'_>> = vec![
        ("says nothing", Box::new(|_| Peer::silent(&path))),
        ("is welcomed", Box::new(|_| Peer::welcomed(&path).expect("welcomed"))),
        (
            "sends as much garbage as there are receives",
            Box::new(|_| {
                let mut peer = Peer::welcomed(&path).expect("welcomed");
                peer.put(send, b"x");
                peer.put(send, b"x");
                peer
            }),
        ),
        (
            "sends more garbage than there are receives",
            Box::new(|_| {
                let mut peer = Peer::welcomed(&path).expect("welcomed");
                (0..9).for_each(|_| peer.put(send, b"x"));
                peer
            }),
        ),
        (
            "sends bytes that are no packet",
            Box::new(|client| {
                let mut peer = Peer::attached(&path, client);
                peer.write(&[0xaa; 64]);
                peer
            }),
        ),
        (
            "sends immediate data",
            Box::new(|client| {
                let mut peer = Peer::attached(&path, client);
                peer.put(PacketHeader { imm: Some(7), ..send }, b"x");
                peer
            }),
        ),
        (
            "goes while all its receives are with requests that run",
            Box::new(|client| {
                let mut peer = Peer::attached(&path, client);
                peer.send(1, 1, &Request::AwaitLocks { hold_ms: 300 });
                peer.send(2, 1, &Request::AwaitLocks { hold_ms: 300 });
                peer
            }),
        ),
        (
            "asks for memory it may not have",
            Box::new(|client| {
                let mut peer = Peer::attached(&path, client);
                peer.put(
                    PacketHeader { key: 9, wanted: 64, ..PacketHeader::new(PacketKind::ReadMemory, 0) },
                    b"",
                );
                peer
            }),
        ),
        (
            "is half through a packet",
            Box::new(|client| {
                let mut peer = Peer::attached(&path, client);
                peer.write(&[b'C', b'F', b'N', b'F', 3]);
                peer
            }),
        ),
    ];
    for (number, (what, attack)) in attacks.iter().enumerate() {
        for waits in [false, true] {
            let client = 100 + 2 * number as u128 + u128::from(waits);
            for _ in 0..10 {
                let peer = attack(client);
                if waits {
                    // About as long as a packet is on its way.
                    std::thread::sleep(Duration::from_millis(2));
                }
                drop(peer);
            }
        }
        println!("a peer that {what}");
        site.wait_for_nothing_left();
    }
    site.go_on();
}

/// A request that only waits must not keep the connection of a peer that has gone.
#[test]
fn a_wait_ends_with_its_connection() {
    let site = Site::new();
    let asks = |client, slots: &[u16]| {
        let mut peer = Peer::attached(&site.unix(), client);
        slots
            .iter()
            .for_each(|slot| peer.send(*slot, 1, &Request::AwaitLocks { hold_ms: AWAIT_LOCKS_MAX_MS }));
        peer
    };
    // Sent before the others, so its wait ends before theirs would.
    let first = asks(1, &[1]);
    for (client, slots) in [(2, &[1][..]), (3, &[1, 2])] {
        let connections = site.running().server().admission.connections.len();
        drop(asks(client, slots));
        let is_gone = |site: &Site| site.running().server().admission.connections.len() <= connections;
        site.wait_until("the connection is still counted", is_gone);
        assert!(!first.has_answer(), "that is how long it would have waited anyway");
    }
    drop(first);
    site.wait_for_nothing_left();
}

/// A file that one connection of a session opens while another one ends the session must not stay open.
#[test]
fn what_a_session_opens_while_it_ends_is_closed() {
    let site = Site::new();
    let ino = Peer::attached(&site.unix(), 1).look_up(FILE);
    let file = Reclaim { ino, rights: Rights { read: true, write: false }, ticket: None };
    for round in 0..200 {
        let client = 100 + round;
        let mut opens = Peer::attached(&site.unix(), client);
        let mut ends = Peer::attached(&site.unix(), client);
        opens.send(1, 1, &Request::Reclaim { files: vec![file; RECLAIM_FILES_MAX] });
        // At some moment of the time that the reclaim takes.
        let sent = Instant::now();
        while sent.elapsed() < Duration::from_micros(4 * round as u64) {}
        ends.send(2, 1, &Request::Detach);
        ends.answer();
    }
    let keys = Resource::Filekeys as usize;
    let before = site.before.used[keys];
    site.wait_until("files stay open", |site| Left::of(site.running()).used[keys] == before);
    site.go_on();
}

/// A transfer ends with its connection, at whatever moment that is, and its buffer is free again.
#[test]
fn a_connection_that_ends_in_a_transfer_gives_its_buffer_back() {
    let site = Site::new();
    let filekey = Peer::attached(&site.unix(), 1).open(FILE);
    for round in 0..150u64 {
        let mut peer = Peer::attached(&site.unix(), 1);
        let slot = 1 + (round % 60) as u16;
        peer.send(slot, 1 + round / 60, &pushed_fetch(filekey));
        peer.acknowledge((round * 7 % 100) as usize);
    }
    for round in 0..50 {
        let mut peer = Peer::attached(&site.unix(), 100 + round);
        let filekey = peer.open(FILE);
        peer.send(1, 1, &pulled_write(filekey));
        if round % 2 == 0 {
            peer.packet();
        }
        peer.send(2, 1, &Request::Detach);
    }
    site.wait_for_nothing_left();
    site.go_on();
}

/// A peer that does not answer transfers gets no more buffers than its share, and keeps them for a limited time.
#[test]
fn a_peer_that_answers_no_transfer_stops_nobody() {
    let site = Site::new();
    let mut mute: Vec<Peer> = (0..4 * BUFFERS_OF_PEER as u128)
        .map(|number| {
            let mut peer = Peer::attached(&site.unix(), 10 + number);
            let filekey = peer.open(FILE);
            peer.send(1, 1, &pulled_write(filekey));
            peer
        })
        .collect();
    let server = site.running().server();
    site.wait_until("nothing is pulled", |_| server.counters.bounce.running() >= BUFFERS_OF_PEER);
    for _ in 0..20 {
        site.go_on();
    }
    // The peers have not answered and not gone: the server must close their connections.
    mute.iter_mut().for_each(Peer::wait_for_end);
    assert!(server.counters.timed_out.load(std::sync::atomic::Ordering::Relaxed) > 0);
    site.wait_for_nothing_left();
}

/// A connection without a session is closed after a while.
#[test]
fn a_peer_without_a_session_is_closed() {
    let site = Site::new();
    let mut mute: Vec<Peer> = (0..5).map(|_| Peer::welcomed(&site.unix()).expect("welcomed")).collect();
    // The session of this peer ends, and the peer stays connected.
    let mut ended = Peer::attached(&site.unix(), 1);
    ended.send(1, 1, &Request::Detach);
    ended.answer().expect("an answer");
    mute.push(ended);
    mute.iter_mut().for_each(Peer::wait_for_end);
    site.wait_for_nothing_left();
    site.go_on();
}

/// One user cannot take more than its share of connections and sessions, and an administrator still finds room.
#[test]
fn one_peer_cannot_take_all_places() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can connect as somebody else");
        return;
    }
    let site = Site::new();
    let sessions = Resource::Sessions.bound().share;
    let mut greedy: Vec<Peer> =
        (0..sessions as u128).map(|client| Peer::attached(&site.unix(), 1000 + client)).collect();
    let mut more = Peer::welcomed(&site.unix()).expect("a connection");
    assert_eq!(more.attach(1, "x"), Err(Status::Busy));
    greedy.push(more);
    let connections = Resource::Connections.bound().share;
    // These connections join the sessions from above: a connection without a session would be closed after a while.
    while greedy.len() < connections {
        greedy.push(Peer::attached(&site.unix(), 1000 + (greedy.len() % sessions) as u128));
    }
    assert!(Peer::welcomed(&site.unix()).is_none(), "more than its share");
    let administrator = serving::connect(&Endpoint::Unix(site.unix()), "administrator", 2, false);
    administrator.shut_down();
    drop(administrator);
    site.go_on();
    drop(greedy);
    site.wait_for_nothing_left();
}

/// Whatever labels contain, the text of `status` fits a message and has no control character.
#[test]
fn labels_do_not_break_status() {
    let site = Site::new();
    let label = "\u{1}\u{1b}]0;\u{7}".repeat(64);
    let mut peers: Vec<Peer> = (0..70)
        .map(|client| {
            let mut peer = Peer::welcomed(&site.unix()).expect("welcomed");
            assert_eq!(peer.attach(client, &label), Ok(()));
            peer
        })
        .collect();
    peers[0].send(0, 1, &Request::Status);
    let (header, body) = peers[0].answer().expect("an answer");
    assert_eq!(header.result, Ok(()));
    let Ok(cuttlefs_common::rpc::Reply::Status(text)) = cuttlefs_common::rpc::Reply::parse(&body) else {
        panic!("no status")
    };
    let status: serde_json::Value = serde_json::from_str(text).expect("JSON");
    assert_eq!(status["sessions"]["count"], 71);
    assert!(!text.contains("\\u00"), "{text}");
}
