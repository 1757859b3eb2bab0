//! Early writes against the real server: acknowledged once they are in a ring, there whatever happens afterwards.

mod checked;
mod client;
mod kept;
mod panics;
mod server;

use client::Client;
use cuttlefs_common::attr::SetAttr;
use cuttlefs_common::ids::{ClientId, FileKey, InodeNo};
use cuttlefs_common::locks::{Lock, LockMode, LockOwner, LockRange, LockSpace, WaitId};
use cuttlefs_common::persist::LogDeviceKind;
use cuttlefs_common::rdma::LinkKind;
use cuttlefs_common::rpc::durable::{Kind, SenderError, Wants};
use cuttlefs_common::rpc::{
    Allocate, EARLY_UNANSWERED_MAX, EARLY_WRITE_MAX, EarlyWrite, ReclaimLock, Reply, Request, SessionSecret,
    ring_client, ring_of,
};
use cuttlefs_common::status::Status;
use cuttlefs_common::world::{Random, SeededRandom, SystemRandom};
use serde_json::Value;
use server::Site;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(30);

/// Runs a test on persistent memory (declared) and on a synced file.
fn both(link: LinkKind, test: fn(Site)) {
    test(Site::new(link, LogDeviceKind::PmemEmulated));
    test(Site::new(link, LogDeviceKind::File));
}

macro_rules! suite {
    ($($name:ident),* $(,)?) => {
        mod shm { $(#[test] fn $name() { super::both(super::LinkKind::Shm, super::$name) })* }
        mod tcp { $(#[test] fn $name() { super::both(super::LinkKind::Tcp, super::$name) })* }
    };
}

suite!(
    what_is_written_early_is_read_over_the_session,
    a_killed_server_has_every_acknowledged_write_once,
    what_others_wrote_later_stays,
    numbers_are_executed_once_over_connections,
    who_sends_nonsense_ends_its_own_connection_only,
    who_knows_an_id_neither_joins_nor_ends_its_session,
    a_client_that_says_good_bye_leaves_no_ring,
    a_session_that_ends_has_its_rings_executed,
);

fn status(client: &mut Client) -> Value {
    let text = client.call(&Request::Status, |reply| match reply {
        Reply::Status(text) => text.to_owned(),
        other => panic!("{other:?}"),
    });
    serde_json::from_str(&text.expect("status")).expect("JSON")
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn what_is_written_early_is_read_over_the_session(site: Site) {
    let running = site.start();
    let mut client = Client::new(&running.endpoint);
    let (ino, _) = client.create("file");
    let number = ring_of(ino);
    let mut ring = client.ring(number, 0).expect("a ring");
    let mut expected = Vec::new();
    let mut last = 0;
    for index in 0..200u64 {
        let len = [1, 4096, 100, EARLY_WRITE_MAX, 5000][index as usize % 5];
        let bytes = vec![index as u8; len];
        let at = (index % 3 != 0).then_some(expected.len() as u64 / 2 + index);
        let offset = at.map_or(expected.len(), |at| at as usize);
        let ticket = ring.write(ino, at, &bytes).expect("persistent");
        let written = ring.answer(ticket).expect("executed");
        expected.resize(expected.len().max(offset + len), 0);
        expected[offset..offset + len].copy_from_slice(&bytes);
        assert_eq!((written.offset, written.size), (offset as u64, expected.len() as u64));
        assert!(written.change > last, "the counter moves");
        last = written.change;
        if expected.len() > 1 << 20 {
            break;
        }
    }
    assert!(client.read(ino) == expected);
    // A directory takes no bytes, and a file that is not there neither; the ring goes on.
    let root = InodeNo::ROOT;
    let mut other = client.ring(ring_of(root), 0).expect("a ring");
    let ticket = other.write(root, Some(0), b"x").expect("persistent");
    assert_eq!(other.answer(ticket), Err(Status::Invalid));
    let gone = InodeNo(ino.0 + 4_000_000);
    let ticket = ring.write(gone, Some(0), b"x").expect("persistent");
    assert!(matches!(ring.answer(ticket), Err(Status::Stale | Status::NotFound)));
    let ticket = ring.write(ino, Some(3), b"more").expect("persistent");
    ring.answer(ticket).expect("executed");
    expected[3..7].copy_from_slice(b"more");
    let figures = status(&mut client);
    assert_eq!(figures["early"]["device"], site.device.label());
    assert_eq!(figures["early"]["emulated"], site.device == LogDeviceKind::PmemEmulated);
    assert_eq!((&figures["early"]["rings"], &figures["early"]["failed"]), (&2.into(), &0.into()));
    assert!(figures["early"]["executed"].as_u64() > Some(20), "{figures}");
    if site.device == LogDeviceKind::PmemEmulated {
        assert!(running.log.contains("emulated persistent memory"), "{}", running.log);
    }
    running.stop();
    let running = site.start();
    let mut client = Client::new(&running.endpoint);
    assert!(client.read(ino) == expected);
    assert_eq!(status(&mut client)["early"]["recovered"], 0, "a clean stop leaves nothing");
    running.stop();
}

/// Writers and appenders; the server is frozen or killed, or killed in its recovery; then everything is there once.
fn a_killed_server_has_every_acknowledged_write_once(site: Site) {
    let seed = SystemRandom.next_u64();
    println!("seed {seed}");
    let random = SeededRandom::new(seed);
    let below = |bound: u64| random.next_u64() % bound;
    let mut running = site.start();
    let mut client = Client::new(&running.endpoint);
    let files: Vec<InodeNo> = (0..4).map(|index| client.create(&format!("file{index}")).0).collect();
    let (other_ino, mut other) = client.create("other");
    let mut expected: Vec<Vec<u8>> = vec![Vec::new(); files.len()];
    let mut last = [0u64; 4];
    for round in 0..4 {
        let mut rings: Vec<_> =
            (0..4).map(|ring| client.ring(ring, last[usize::from(ring)]).expect("a ring")).collect();
        // Over shared memory the sender is its own NIC: what comes now is acknowledged and not executed.
        let frozen =
            site.link == LinkKind::Shm && site.device == LogDeviceKind::PmemEmulated && round % 2 == 1;
        if frozen {
            running.freeze();
        }
        for _ in 0..40 + below(10) {
            let file = below(4) as usize;
            let number = usize::from(ring_of(files[file]));
            let bytes = vec![random.next_u64() as u8; 1 + below(6000) as usize];
            let at = (below(2) == 0).then(|| below(1 + expected[file].len() as u64));
            let ticket = rings[number].write(files[file], at, &bytes).expect("persistent");
            last[number] = ticket.number();
            let offset = at.map_or(expected[file].len(), |at| at as usize);
            let end = expected[file].len().max(offset + bytes.len());
            expected[file].resize(end, 0);
            expected[file][offset..offset + bytes.len()].copy_from_slice(&bytes);
            if !frozen && below(4) == 0 {
                rings[number].answer(ticket).expect("executed");
            }
            if !frozen && below(10) == 0 {
                // An ordinary change has the redo log synced: what was executed by then is known at recovery.
                client.write(other, 0, b"ordinary").expect("written");
            }
        }
        running.kill();
        for _ in 0..below(3) {
            site.start_and_kill(Duration::from_millis(below(400)));
        }
        running = site.start();
        client = Client::with_secret(&running.endpoint, client.secret);
        other = client.open(other_ino);
        for (ino, bytes) in files.iter().zip(&expected) {
            let found = client.read(*ino);
            assert_eq!(found.len(), bytes.len(), "seed {seed}, round {round}, {ino}");
            let wrong = found.iter().zip(bytes).position(|(found, expected)| found != expected);
            assert_eq!(wrong, None, "seed {seed}, round {round}, {ino}");
        }
    }
    running.stop();
}

fn what_others_wrote_later_stays(site: Site) {
    let running = site.start();
    let mut client = Client::new(&running.endpoint);
    let (ino, _) = client.create_in(0, "kept");
    let (cut, cut_key) = client.create_in(0, "cut");
    let (gone, gone_key) = client.create_in(0, "gone");
    let mut ring = client.ring(0, 0).expect("a ring");
    let mut tickets = Vec::new();
    for file in [ino, cut, gone] {
        tickets.push(ring.write(file, None, b"early").expect("persistent"));
    }
    for ticket in tickets {
        ring.answer(ticket).expect("executed");
    }
    let mut other = Client::new(&running.endpoint);
    let filekey = other.open(ino);
    other.write(filekey, 0, b"LA").expect("written");
    // Nothing of the early write is left in this file; it must not come back.
    let set = SetAttr { size: Some(0), ..Default::default() };
    other.call(&Request::SetAttr { ino: cut, set }, |_| ()).expect("cut");
    client.call(&Request::Close { filekeys: vec![gone_key, cut_key] }, |_| ()).expect("closed");
    let mut index = 0;
    while other.call(&Request::GetAttr { ino: gone }, |_| ()).is_ok() {
        let name = format!("gone{index}");
        other
            .call(&Request::Unlink { parent: InodeNo::ROOT, name: name.as_bytes() }, |_| ())
            .expect("unlinked");
        index += 1;
    }
    running.kill();
    let running = site.start();
    let mut client = Client::new(&running.endpoint);
    assert_eq!(client.read(ino), b"LArly");
    assert_eq!(client.read(cut), b"");
    assert!(client.call(&Request::GetAttr { ino: gone }, |_| ()).is_err());
    running.stop();
}

fn numbers_are_executed_once_over_connections(site: Site) {
    let mut running = site.start();
    let mut client = Client::new(&running.endpoint);
    let (ino, _) = client.create_in(1, "file");
    let mut expected = Vec::new();
    // Each write is sent under its number over the next connection once more, as if its answer had not come.
    for round in 0..6u64 {
        let mut ring = client.ring(1, round).expect("a ring");
        let bytes = [round as u8; 300];
        let ticket = ring.write(ino, None, &bytes).expect("persistent");
        assert_eq!(ticket.number(), round + 1);
        expected.extend_from_slice(&bytes);
        if round % 2 == 0 {
            ring.answer(ticket).expect("executed");
        }
        drop(ring);
        if round == 3 {
            running.kill();
            running = site.start();
            client = Client::with_secret(&running.endpoint, client.secret);
        }
        let mut ring = client.ring(1, round).expect("a ring");
        let ticket = ring.write(ino, None, &bytes).expect("persistent");
        let written = ring.answer(ticket).expect("told what was done");
        assert_eq!(written.size, expected.len() as u64);
    }
    assert_eq!(client.read(ino), expected);
    running.stop();
}

fn who_sends_nonsense_ends_its_own_connection_only(site: Site) {
    let running = site.start();
    let mut client = Client::new(&running.endpoint);
    let (ino, _) = client.create_in(2, "file");
    let mut ring = client.ring(2, 0).expect("a ring");
    let hostile = Client::new(&running.endpoint);
    // A ring of nobody.
    assert!(matches!(hostile.ring_as(ClientId(5), 0, 0).err(), Some(SenderError::Refused)));
    let ended = |ring: &mut client::Ring| {
        let begun = Instant::now();
        loop {
            let looked = ring.sender.is_slowed();
            if let Err(error) = looked {
                return matches!(error, SenderError::Disconnected);
            }
            assert!(begun.elapsed() < PATIENCE, "the connection goes on");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    // Somebody else's, whose client's id it knows: neither opened nor, which ends the connection before, let go.
    let of_another = hostile.ring_as(ring_client(client.id, 2), 2, 0);
    assert!(matches!(of_another.err(), Some(SenderError::Refused)));
    let ticket = ring.write(ino, Some(0), b"hers").expect("her connection stands");
    ring.answer(ticket).expect("executed");
    let mut nonsense = hostile.ring(0, 0).expect("a ring");
    nonsense.sender.post(b"nonsense", Wants::Answer).expect("posted");
    assert!(ended(&mut nonsense));
    // Somebody else's name, in its own ring.
    let mut body = Vec::new();
    let stolen = EarlyWrite { client: client.id, ring: 2, ino, at: Some(0), bytes: b"stolen" };
    stolen.encode_into(&mut body);
    let mut thief = hostile.ring(2, 0).expect("a ring");
    thief.sender.post(&body, Wants::Answer).expect("posted");
    assert!(ended(&mut thief));
    let ticket = ring.write(ino, Some(0), b"mine").expect("persistent");
    ring.answer(ticket).expect("executed");
    assert_eq!(client.read(ino), b"mine");
    // What is no write stays out at recovery, too.
    running.kill();
    let running = site.start();
    let mut client = Client::new(&running.endpoint);
    assert_eq!(client.read(ino), b"mine");
    running.stop();
}

/// What is shown of sessions opens none: not in this life of the server, and not in the next, where a session is taken up.
fn who_knows_an_id_neither_joins_nor_ends_its_session(site: Site) {
    let running = site.start();
    let mut client = Client::new(&running.endpoint);
    let (ino, filekey) = client.create("file");
    lock(&mut client, filekey).expect("locked");
    let id = client.id.0;
    let known = [id.to_le_bytes(), id.to_be_bytes()];
    let ends_only_its_own = |running: &server::Running| {
        for known in known {
            let mut hostile = Client::with_secret(&running.endpoint, SessionSecret(known));
            let seen = status(&mut hostile);
            let shown = seen.to_string();
            for word in [format!("{id:032x}"), id.to_string()] {
                assert!(!shown.contains(&word), "an id in {shown}");
            }
            let locks =
                hostile.call(&Request::ReclaimLocks { locks: vec![lock_of(ino)] }, |reply| match reply {
                    Reply::LocksReclaimed(held) => held,
                    other => panic!("{other:?}"),
                });
            assert_eq!(locks, Ok(vec![false]), "another client's lock");
            hostile.call(&Request::Detach, |_| ()).expect("its own ends");
        }
    };
    ends_only_its_own(&running);
    assert_eq!(status(&mut client)["sessions"]["count"], 1);
    assert_eq!(status(&mut client)["locks"]["held"], 1);
    client.call(&Request::Heartbeat, |_| ()).expect("its session goes on");
    running.kill();

    let running = site.start();
    ends_only_its_own(&running);
    let mut client = Client::with_secret(&running.endpoint, client.secret);
    let again = client.call(&Request::ReclaimLocks { locks: vec![lock_of(ino)] }, |reply| match reply {
        Reply::LocksReclaimed(held) => held,
        other => panic!("{other:?}"),
    });
    assert_eq!(again, Ok(vec![true]), "its own lock");
    running.stop();
}

const LOCK: Lock = Lock {
    space: LockSpace::Whole,
    owner: LockOwner(1),
    range: LockRange::WHOLE,
    mode: LockMode::Exclusive,
    pid: 1,
};

fn lock_of(ino: InodeNo) -> ReclaimLock {
    ReclaimLock { ino, lock: LOCK }
}

fn lock(client: &mut Client, filekey: FileKey) -> Result<(), Status> {
    let request = Request::SetLock { filekey, lock: LOCK, wait: WaitId(1), blocking: false };
    client.call(&request, |_| ())
}

fn a_client_that_says_good_bye_leaves_no_ring(site: Site) {
    let running = site.start();
    let mut client = Client::new(&running.endpoint);
    let (ino, _) = client.create_in(3, "file");
    let mut ring = client.ring(3, 0).expect("a ring");
    ring.write(ino, None, b"last words").expect("persistent");
    let name = format!("{:032x}.ring", ring_client(client.id, 3).0);
    assert!(site.rings().iter().any(|path| path.ends_with(&name)), "{:?}", site.rings());
    client.call(&Request::Detach, |_| ()).expect("detached");
    assert!(site.rings().is_empty(), "{:?}", site.rings());
    assert!(matches!(client.ring(3, 1).err(), Some(SenderError::Refused)), "its session is over");
    let mut other = Client::new(&running.endpoint);
    assert_eq!(other.read(ino), b"last words");
    running.stop();
}

fn a_session_that_ends_has_its_rings_executed(site: Site) {
    let config = site.pool().join("cuttlefs.toml");
    let text = std::fs::read_to_string(&config).expect("read");
    std::fs::write(&config, text.replace("lease_ms = 20000", "lease_ms = 1000")).expect("written");
    let running = site.start();
    let mut client = Client::new(&running.endpoint);
    let (ino, _) = client.create_in(0, "file");
    let mut ring = client.ring(0, 0).expect("a ring");
    let ticket = ring.write(ino, None, b"before").expect("persistent");
    wait_until("its lease ran out", || site.rings().is_empty());
    assert_eq!(Client::new(&running.endpoint).read(ino), b"before");
    wait_until("its connection ended", || ring.sender.is_slowed().is_err());
    // It comes back, not knowing what became of its last write, and is told.
    let mut client = Client::with_secret(&running.endpoint, client.secret);
    let mut ring = client.ring(0, ticket.number() - 1).expect("a ring");
    for _ in 0..2 {
        let ticket = ring.write(ino, None, b"before").expect("persistent");
        ring.answer(ticket).expect("executed");
    }
    assert_eq!(client.read(ino), b"beforebefore", "once, and one more");
    running.stop();
}

/// Ordinary writes find no space before what rings may need is gone.
#[test]
fn space_is_kept_for_what_is_acknowledged() {
    let site = Site::new(LinkKind::Shm, LogDeviceKind::PmemEmulated);
    let running = site.start();
    let mut client = Client::new(&running.endpoint);
    let (ino, _) = client.create_in(0, "early");
    let (_, filler) = client.create("filler");
    let mut ring = client.ring(0, 0).expect("a ring");
    assert!(!ring.sender.is_slowed().expect("connected"));
    let mut filled = 0;
    while client.write(filler, filled, &[7; 16 * 1024]).is_ok() {
        filled += 16 * 1024;
    }
    let withheld = status(&mut client)["pool"]["withheld_pages"].as_u64().expect("a number");
    assert_eq!(withheld, cuttlefs_server::early::RING_PAGES);
    // As many as may be unanswered, each as large as can be and at its own pages, and none of them fails.
    running.freeze();
    let place = |index: usize| 100 + (index * (EARLY_WRITE_MAX + 2 * 4096)) as u64;
    let tickets: Vec<_> = (0..EARLY_UNANSWERED_MAX)
        .map(|index| ring.write(ino, Some(place(index)), &[7; EARLY_WRITE_MAX]).expect("persistent"))
        .collect();
    running.thaw();
    for ticket in tickets {
        ring.answer(ticket).expect("executed");
    }
    assert!(ring.sender.is_slowed().expect("connected"), "there is nothing to keep for more");
    assert_eq!(client.write(filler, filled, &[7; 16 * 1024]), Err(Status::NoSpace));
    // A ring that finds no space is welcomed so.
    let mut second = client.ring(1, 0).expect("welcomed");
    assert!(second.sender.is_slowed().expect("connected"));
    // With space again both go on.
    let punch = Request::Allocate { filekey: filler, offset: 0, len: filled, how: Allocate::PunchHole };
    client.call(&punch, |_| ()).expect("punched");
    wait_until("there is space again", || {
        !ring.sender.is_slowed().expect("connected") && !second.sender.is_slowed().expect("connected")
    });
    running.stop();
}

#[test]
fn every_kind_survives_a_kill_and_auto_takes_what_suits() {
    for device in [LogDeviceKind::PmemEmulated, LogDeviceKind::File] {
        let mut site = Site::new(LinkKind::Unix, device);
        let mut expected = Vec::new();
        let mut file = None;
        for (name, kind) in ["sflush", "wflush", "s-rflush", "w-rflush"].into_iter().zip(Kind::ALL) {
            site.early = name;
            let running = site.start();
            let mut client = Client::new(&running.endpoint);
            assert_eq!(client.offer.map(|offer| offer.kind), Some(kind));
            let ino = *file.get_or_insert_with(|| client.create_in(0, "file").0);
            let mut ring = client.ring(0, 0).expect("a ring");
            for index in 0..150u8 {
                let bytes = vec![index; 1 + usize::from(index) * 7];
                let ticket = ring.write(ino, None, &bytes).expect("persistent");
                expected.extend_from_slice(&bytes);
                if index < 140 {
                    ring.answer(ticket).expect("executed");
                }
            }
            running.kill();
            let running = site.start();
            assert!(Client::new(&running.endpoint).read(ino) == expected, "{name}");
            running.stop();
        }
        site.early = "auto";
        let running = site.start();
        let offer = Client::new(&running.endpoint).offer;
        match device {
            LogDeviceKind::File => assert_eq!(offer, None, "a synced file is not worth it"),
            _ => assert_eq!(offer.map(|offer| offer.kind), Some(Kind::WFlush)),
        }
        running.stop();
    }
}

/// A page that rotted costs its own bytes, live and at recovery, and keeps neither the ring nor the server from going on.
#[test]
fn a_rotten_page_costs_itself_only() {
    let site = Site::new(LinkKind::Shm, LogDeviceKind::PmemEmulated);
    let running = site.start();
    let mut client = Client::new(&running.endpoint);
    let (ino, filekey) = client.create_in(0, "rotten");
    let (other, _) = client.create_in(0, "other");
    client.write(filekey, 0, &[b'#'; 4096]).expect("written");
    running.stop();
    let data = site.pool().join("data");
    let mut bytes = std::fs::read(&data).expect("read");
    let at = bytes.windows(4096).position(|window| window == [b'#'; 4096]).expect("its page");
    bytes[at + 9] ^= 1;
    std::fs::write(&data, &bytes).expect("rotten");
    let running = site.start();
    let mut client = Client::new(&running.endpoint);
    let mut ring = client.ring(0, 0).expect("a ring");
    let part = ring.write(ino, Some(10), b"part").expect("persistent");
    let behind = ring.write(other, None, b"one").expect("persistent");
    assert_eq!(ring.answer(part), Err(Status::Io));
    ring.answer(behind).expect("the ring goes on");
    assert_eq!(status(&mut client)["early"]["failed"], 1);
    running.freeze();
    ring.write(ino, Some(20), b"part").expect("persistent");
    let last = ring.write(other, None, b"two").expect("persistent").number();
    running.kill();
    let running = site.start();
    assert!(running.log.contains("write is lost"), "{}", running.log);
    let mut client = Client::with_secret(&running.endpoint, client.secret);
    assert_eq!(client.read(other), b"onetwo");
    let mut ring = client.ring(0, last).expect("a ring");
    // Whole, it is cured.
    let whole = ring.write(ino, Some(0), &[b'+'; 4096]).expect("persistent");
    ring.answer(whole).expect("executed");
    assert!(client.read(ino) == [b'+'; 4096]);
    running.stop();
}

#[test]
fn a_restricted_export_offers_nothing() {
    let site = Site::new(LinkKind::Unix, LogDeviceKind::PmemEmulated);
    let config = site.pool().join("cuttlefs.toml");
    let text = std::fs::read_to_string(&config).expect("read");
    let squashed = text.replace("# root_squash = ", "root_squash = ");
    assert_ne!(text, squashed);
    std::fs::write(&config, squashed).expect("written");
    let running = site.start();
    assert_eq!(Client::new(&running.endpoint).offer, None);
    running.stop();
    std::fs::write(&config, text).expect("written");
    let running = site.start();
    assert!(Client::new(&running.endpoint).offer.is_some());
    running.stop();
}

fn fsck(site: &Site, more: &[&str]) -> (i32, Value) {
    let mut arguments = vec!["fsck", "--json"];
    arguments.extend(more);
    let output = site.cuttlefsd(&arguments).output().expect("it runs");
    let json = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    (output.status.code().expect("a code"), json)
}

#[test]
fn fsck_tells_what_rings_hold_and_repairs_nothing_below_it() {
    let site = Site::new(LinkKind::Shm, LogDeviceKind::PmemEmulated);
    let running = site.start();
    let mut client = Client::new(&running.endpoint);
    let (ino, _) = client.create_in(0, "file");
    let mut ring = client.ring(0, 0).expect("a ring");
    running.freeze();
    for _ in 0..3 {
        ring.write(ino, None, b"bytes").expect("persistent without the server");
    }
    running.kill();
    let path = &site.rings()[0];
    let before = std::fs::read(path).expect("read");
    let (code, report) = fsck(&site, &[]);
    assert_eq!((code, &report["ring_writes"]), (0, &Value::from(3)), "{report}");
    assert_eq!(fsck(&site, &["--repair"]).0, 8);
    assert!(std::fs::read(path).expect("read") == before, "nothing changes");
    let mut damaged = before.clone();
    damaged[..8].copy_from_slice(b"damaged!");
    std::fs::write(path, &damaged).expect("written");
    let (code, report) = fsck(&site, &[]);
    assert_eq!((code, &report["findings"][0]["kind"]), (4, &Value::from("rings")), "{report}");
    let refused = site.serve().output().expect("it runs");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("may hold acknowledged writes"), "{said}");
    assert!(std::fs::read(path).expect("read") == damaged, "it is kept");
    std::fs::write(path, &before).expect("written");
    let running = site.start();
    let mut client = Client::new(&running.endpoint);
    assert_eq!(client.read(ino), b"bytesbytesbytes");
    running.stop();
    assert_eq!(fsck(&site, &[]).1["ring_writes"], 0);
    assert_eq!(fsck(&site, &["--repair"]).0, 0);
}

/// A pool that is served otherwise next time has its rings executed all the same.
#[test]
fn rings_are_executed_whatever_is_asked_for_next() {
    let mut site = Site::new(LinkKind::Shm, LogDeviceKind::PmemEmulated);
    let running = site.start();
    let mut client = Client::new(&running.endpoint);
    let (ino, _) = client.create_in(0, "file");
    let mut ring = client.ring(0, 0).expect("a ring");
    running.freeze();
    for byte in [b'a', b'b'] {
        ring.write(ino, None, &[byte; 5000]).expect("persistent");
    }
    running.kill();
    site.early = "off";
    let running = site.start();
    let mut client = Client::new(&running.endpoint);
    assert_eq!(client.offer, None);
    let found = client.read(ino);
    assert!(found.len() == 10_000 && found[..5000] == [b'a'; 5000] && found[5000..] == [b'b'; 5000]);
    assert!(site.rings().is_empty(), "nobody needs them");
    running.stop();
}

/// Rings are not missed by a server that is told to look elsewhere.
#[test]
fn rings_stay_where_they_were_until_they_hold_nothing() {
    let mut site = Site::new(LinkKind::Shm, LogDeviceKind::PmemEmulated);
    let (first, second) = (site.pool().join("../first"), site.pool().join("../second"));
    site.ring_dir = Some(first.clone());
    let running = site.start();
    let mut client = Client::new(&running.endpoint);
    let (ino, _) = client.create_in(0, "file");
    let mut ring = client.ring(0, 0).expect("a ring");
    running.freeze();
    ring.write(ino, None, b"there").expect("persistent");
    running.kill();
    assert_eq!(fsck(&site, &[]).1["ring_writes"], 1);
    site.ring_dir = Some(second.clone());
    let refused = site.serve().output().expect("it runs");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("first"), "{said}");
    // Without saying where, it is where it was. If that is not there (not mounted, say), nobody starts without it.
    site.ring_dir = None;
    let away = site.pool().join("../away");
    std::fs::rename(&first, &away).expect("away");
    let refused = site.serve().output().expect("it runs");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("not there"), "{said}");
    assert_eq!(fsck(&site, &[]).0, 4);
    std::fs::rename(&away, &first).expect("back");
    let running = site.start();
    assert_eq!(Client::new(&running.endpoint).read(ino), b"there");
    running.stop();
    site.ring_dir = Some(second.clone());
    let running = site.start();
    let mut client = Client::new(&running.endpoint);
    let mut ring = client.ring(0, 0).expect("a ring");
    let ticket = ring.write(ino, None, b", too").expect("persistent");
    ring.answer(ticket).expect("executed");
    assert_eq!(std::fs::read_dir(&second).expect("dir").count(), 1);
    assert_eq!(client.read(ino), b"there, too");
    running.stop();
}

#[test]
fn early_writes_need_durable_answers() {
    let site = Site::new(LinkKind::Unix, LogDeviceKind::PmemEmulated);
    let output = site
        .cuttlefsd(&["serve", "--durability", "fsync", "--early", "wflush", "--listen", "tcp://127.0.0.1:0"])
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("--durability ack"), "{said}");
}
