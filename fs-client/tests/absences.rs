//! Walks of clients that change one file and are away while its server dies and other clients go on. None, one or several of them are away, for a
//! moment, past the grace period, or past whole lives of the server. The server dies between two operations, or at any event of an operation, of a
//! recovery, or of its own work; the next server may die so, too. After each walk every byte must be what the operations leave in the order of their
//! answers. Only an operation whose client was told of a loss may be missing. Where answers are durable no client is told of a loss.
//!
//! A walk depends on its seed only. `CUTTLEFS_ABSENCE_SEED=n` runs the walk of one seed, `CUTTLEFS_ABSENCE_SEEDS=n` the first n.

mod world;

use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::{FsError, Handle, OpenHow, Volume};
use cuttlefs_common::attr::SetAttr;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::life::{End, Event};
use cuttlefs_common::rdma::sim::Translation;
use cuttlefs_common::rpc::{Allocate, Request};
use cuttlefs_common::status::Status;
use cuttlefs_common::world::{Random, SeededRandom};
use std::collections::BTreeSet;
use world::contents::{CALLER, read};
use world::{Crash, LEASE, World, WorldConfig, unsynced_bytes};

const SEEDS: u64 = 300;
const STEPS: u64 = 60;
/// The approximate length of the longest file: a few pages, so that changes meet.
const LEN: u64 = 20_000;
const READ_WRITE: OpenHow = OpenHow::READ_WRITE;
const APPEND: OpenHow = OpenHow { append: true, ..READ_WRITE };

/// A change that was answered. The changes are kept in the order of their answers.
#[derive(Debug)]
struct Done {
    client: usize,
    start: u64,
    end: u64,
    /// The value of the changed bytes; 0 for zeros and for a cut.
    value: u8,
    /// Whether a sync has covered it.
    synced: bool,
    /// Whether a server died with it and its client has not come back since.
    pending: bool,
    /// Whether its client has come back and makes it again, unless the next fsync says otherwise.
    restored: bool,
    /// Whether its client was told of a loss.
    may_be_missing: bool,
}

struct Client {
    volume: RemoteVolume,
    file: Handle,
    log: Handle,
    ino: InodeNo,
    is_away: bool,
    /// Whether a server has died since its last call.
    is_behind: bool,
    /// Whether another client has changed the file while this one was behind.
    may_lose: bool,
}

impl Client {
    fn new(world: &World) -> Self {
        let volume = world.client();
        let made = volume.create(&CALLER, InodeNo::ROOT, b"f", 0o644, false, READ_WRITE);
        let (attr, file) = made.expect("create or open");
        let log = volume.open(&CALLER, attr.ino, APPEND).expect("open").handle;
        let (is_away, is_behind, may_lose) = (false, false, false);
        Self { volume, file: file.handle, log, ino: attr.ino, is_away, is_behind, may_lose }
    }
}

struct Walk {
    seed: u64,
    // Dropped before the world, which their calls need.
    clients: Vec<Client>,
    world: World,
    random: SeededRandom,
    done: Vec<Done>,
    value: u8,
    /// The deaths at an event that the walk has noticed.
    deaths: usize,
    told: Vec<String>,
}

impl Walk {
    fn new(seed: u64) -> Self {
        let random = SeededRandom::new(seed ^ 0xab5e);
        let translation = Translation::ALL[seed as usize % Translation::ALL.len()];
        let deferred = random.next_u64().is_multiple_of(2);
        let (durable_answers, restless) =
            (random.next_u64().is_multiple_of(4), random.next_u64().is_multiple_of(2));
        let config = WorldConfig::new(seed, translation, 2048, 32);
        let unsynced_bytes = unsynced_bytes(seed);
        let world = World::new(WorldConfig { deferred, durable_answers, restless, unsynced_bytes, ..config });
        let clients: Vec<_> = (0..2 + random.next_u64() % 3).map(|_| Client::new(&world)).collect();
        // A power loss must not remove the file.
        clients[0].volume.session().sync_all(&CALLER).expect("sync");
        Self { seed, clients, world, random, done: Vec::new(), value: 0, deaths: 0, told: Vec::new() }
    }

    fn draw(&self, below: u64) -> u64 {
        self.random.next_u64() % below
    }

    fn place(&self) -> u64 {
        // Often near the ends of pages.
        match self.draw(3) {
            0 => 4096 * self.draw(5) + self.draw(3) * 100,
            _ => self.draw(LEN),
        }
    }

    /// The client makes a call; if it was behind, it comes back with it.
    fn calls(&mut self, client: usize) {
        let session = self.clients[client].volume.session();
        session.call(&session.own_caller(), || Request::Heartbeat, |_| Ok(())).expect("heartbeat");
        self.has_called(client);
    }

    /// A call of this client was answered, so the client is not behind. Deaths during the call came before the answer.
    fn has_called(&mut self, client: usize) {
        self.look_for_deaths();
        if std::mem::take(&mut self.clients[client].is_behind) {
            for done in self.done.iter_mut().filter(|done| done.client == client && done.pending) {
                (done.pending, done.restored) = (false, true);
            }
        }
    }

    fn look_for_deaths(&mut self) {
        let deaths = self.world.deaths();
        for _ in std::mem::replace(&mut self.deaths, deaths)..deaths {
            self.told.push("the server died".to_owned());
            self.has_died();
        }
    }

    fn note(&mut self, client: usize, start: u64, end: u64, value: u8) {
        for other in self.clients.iter_mut().filter(|other| other.is_behind) {
            other.may_lose = true;
        }
        let synced = self.world.answers_are_durable();
        let (pending, restored, may_be_missing) = (false, false, false);
        self.done.push(Done { client, start, end, value, synced, pending, restored, may_be_missing });
    }

    fn fsync(&mut self, client: usize) {
        let one = &self.clients[client];
        let result = one.volume.fsync(&CALLER, one.file, false);
        self.has_called(client);
        self.told.push(format!("{client} fsync: {result:?}"));
        let may_lose = std::mem::take(&mut self.clients[client].may_lose);
        match result {
            Ok(()) => {}
            Err(FsError::Server(Status::Io)) => {
                let may_lose = may_lose && !self.world.answers_are_durable();
                assert!(may_lose, "client {client} was told of a loss that cannot be: {:#?}", self.told);
                let lost = self.done.iter_mut().filter(|done| done.client == client && done.restored);
                lost.for_each(|done| done.may_be_missing = true);
            }
            Err(error) => panic!("{error}"),
        }
        self.done.iter_mut().filter(|done| done.client == client).for_each(|done| done.restored = false);
        self.done.iter_mut().filter(|done| !done.pending).for_each(|done| done.synced = true);
    }

    fn kill(&mut self, power: bool) {
        self.told.push(format!("killed, power lost: {power}"));
        if power {
            self.world.lose_power()
        } else {
            self.world.kill()
        }
        self.world.start();
        self.has_died();
    }

    fn has_died(&mut self) {
        self.done.iter_mut().filter(|done| !done.synced).for_each(|done| done.pending = true);
        // A client that misses two servers does not know which changes were made in between.
        for client in &mut self.clients {
            client.may_lose |= client.is_behind;
            client.is_behind = true;
        }
    }

    /// The server dies at a later event, and perhaps the next one, too.
    fn crash(&mut self) {
        let end = || {
            let kinds = Event::ALL;
            let kind = kinds[self.draw(kinds.len() as u64) as usize];
            let of = (self.draw(3) > 0).then_some(kind);
            End { after: self.draw(if of.is_some() { 4 } else { 60 }), of }
        };
        let crash = || Crash { end: end(), power: self.draw(4) == 0 };
        let (first, again) = (crash(), (self.draw(3) == 0).then(crash));
        self.told.push(format!("to come: {first:?}, {again:?}"));
        self.world.crash_after(first, again);
    }

    fn step(&mut self) {
        let client = self.draw(self.clients.len() as u64) as usize;
        let what = self.draw(26);
        if what > 23 {
            return self.crash();
        }
        if what == 20 {
            return self.kill(self.draw(4) == 0);
        }
        if what == 21 {
            self.clients[client].is_away ^= true;
            return;
        }
        if what == 22 {
            let time = if self.draw(2) == 0 { LEASE / 20 } else { LEASE * 2 };
            self.told.push(format!("{time:?} pass"));
            self.world.pass(time);
            return self.look_for_deaths();
        }
        if self.clients[client].is_away {
            return;
        }
        self.calls(client);
        let (start, len) = (self.place(), 1 + self.draw(3000));
        self.value = self.value % 255 + 1;
        let (value, one) = (self.value, &self.clients[client]);
        let told = match what {
            0..8 => {
                let written = one.volume.write(&CALLER, one.file, start, &vec![value; len as usize]);
                assert_eq!(written, Ok(len as u32));
                self.has_called(client);
                self.note(client, start, start + len, value);
                format!("{client} writes {value} to {start}..{}", start + len)
            }
            8..13 => {
                // No crash meanwhile, so that the offset of the append is known.
                self.world.hold_crash(true);
                let start = one.volume.get_attr(&CALLER, one.ino).expect("attr").size;
                let written = one.volume.write(&CALLER, one.log, 0, &vec![value; len as usize]);
                assert_eq!(written, Ok(len as u32));
                self.world.hold_crash(false);
                self.has_called(client);
                self.note(client, start, start + len, value);
                format!("{client} appends {value} to {start}..{}", start + len)
            }
            13..15 => {
                let set = SetAttr { size: Some(start), ..SetAttr::default() };
                one.volume.set_attr(&CALLER, one.ino, set).expect("cut");
                self.has_called(client);
                self.note(client, start, u64::MAX, 0);
                format!("{client} cuts to {start}")
            }
            15..17 => {
                one.volume.allocate(&CALLER, one.file, start, len, Allocate::PunchHole).expect("punch");
                self.has_called(client);
                self.note(client, start, start + len, 0);
                format!("{client} punches {start}..{}", start + len)
            }
            _ => return self.fsync(client),
        };
        self.told.push(told);
    }

    /// All clients come back and sync. Then every byte of the file must be one that it may be, also after a power loss.
    fn end(&mut self) -> usize {
        self.world.calm();
        for client in 0..self.clients.len() {
            self.calls(client);
        }
        for client in 0..self.clients.len() {
            self.fsync(client);
        }
        for lose_power in [false, true] {
            if lose_power {
                self.kill(true);
            }
            let one = &self.clients[0];
            let bytes = read(&one.volume, one.file, 0, 2 * LEN as u32).expect("read");
            for at in 0..2 * LEN {
                let mut may_be = BTreeSet::from([0]);
                for done in self.done.iter().filter(|done| (done.start..done.end).contains(&at)) {
                    if !done.may_be_missing {
                        may_be.clear();
                    }
                    may_be.insert(done.value);
                }
                let is = bytes.get(at as usize).copied().unwrap_or(0);
                assert!(
                    may_be.contains(&is),
                    "byte {at} is {is}, and may be {may_be:?} (power lost: {lose_power}): {:#?}",
                    self.told
                );
            }
        }
        self.deaths
    }
}

impl Drop for Walk {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!(
                "CUTTLEFS_ABSENCE_SEED={} cargo nextest run -p cuttlefs-client --test absences",
                self.seed
            );
        }
    }
}

#[test]
fn nobody_restores_over_what_others_were_acknowledged() {
    let number = |name| std::env::var(name).ok().map(|number| number.parse::<u64>().expect("a number"));
    let all = 0..number("CUTTLEFS_ABSENCE_SEEDS").unwrap_or(SEEDS);
    let seeds = number("CUTTLEFS_ABSENCE_SEED").map_or(all, |seed| seed..seed + 1);
    let (count, mut deaths) = (seeds.end - seeds.start, 0);
    for seed in seeds {
        let mut walk = Walk::new(seed);
        for _ in 0..STEPS {
            walk.step();
        }
        deaths += walk.end();
    }
    println!("{count} walks, {deaths} deaths with an event");
    assert!(count < SEEDS || deaths as u64 > count, "{deaths} deaths with an event in {count} walks");
}
