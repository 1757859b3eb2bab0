//! Locks that clients request, hold and give up while the server dies: two to four clients at once, in the world of `together`.
//!
//! Each round of a client is a critical section: it takes a lock, reads a counter in the locked file, writes the counter plus one, and gives the lock
//! up, at once or in the next batch. The model counts for each lock the clients inside:
//! * no client gets an exclusive lock while another one is inside, nor a shared lock while another one is inside exclusively;
//! * no client is told that it has lost its lock, because no client pauses for as long as its lease, whatever dies;
//! * each counter has the value in the model: the next holder reads what the holder before wrote, also when the server died between them;
//! * after each batch the server has the locks that were kept, and no request waits.

use super::*;
use crate::world::waiter::Waiter;
use cuttlefs_client::file::volume::{FsError, Handle, OpenHow, Volume};
use cuttlefs_common::locks::{Lock, LockMode, LockOwner, LockRange, LockSpace};
use cuttlefs_common::rpc::Request;
use cuttlefs_common::status::Status;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

/// The number of seeds of the walk.
const SEEDS: u64 = 400;
/// The number of locked files. Each has a lock of each space.
const FILES: usize = 2;
const SPACES: [LockSpace; 2] = [LockSpace::Ranges, LockSpace::Whole];
/// How long the server may hold a question for the end of waits. While it does nothing else may move, so that bystanders come back and time goes on.
const HOLD: Duration = Duration::from_secs(1);
const OWNER: LockOwner = LockOwner(5);
const READ_WRITE: OpenHow = OpenHow::READ_WRITE;

/// A critical section.
#[derive(Clone, Copy, Debug)]
struct Round {
    file: usize,
    space: usize,
    /// It takes a shared lock, and only reads.
    shared: bool,
    /// It waits for the lock; else it is refused if others are inside.
    blocking: bool,
    /// It gives the lock up in the next batch. In a batch with such rounds no round waits.
    keeps: bool,
}

/// Rounds that are under way together.
#[derive(Clone, Debug)]
struct Rounds {
    rounds: Vec<(usize, Round)>,
    pace: Pace,
    crash: Option<(Crash, Option<Crash>)>,
    pass: Duration,
}

#[derive(Clone, Debug)]
struct LockCase {
    config: WorldConfig,
    clients: usize,
    batches: Vec<Rounds>,
}

fn case(seed: u64) -> impl Strategy<Value = LockCase> {
    let durable_answers = seed.is_multiple_of(3);
    let crash = move || end().prop_map(|end| Crash { end, power: false });
    let crash = prop::option::weighted(0.8, (crash(), prop::option::weighted(0.3, crash())));
    let pace = || prop_oneof![1 => Just(6u64), 2 => Just(12), 2 => Just(20)];
    let paces = (any::<u64>(), [pace(), pace(), pace(), pace()], prop_oneof![Just(20u64), Just(80)])
        .prop_map(|(seed, clients, world)| Pace { seed, clients, world, away: None });
    let weights = (prop::bool::weighted(0.25), prop::bool::weighted(0.6), prop::bool::weighted(0.3));
    let round = (0..4usize, 0..FILES, 0..SPACES.len(), weights).prop_map(
        |(client, file, space, (shared, blocking, keeps))| {
            (client, Round { file, space, shared, blocking, keeps })
        },
    );
    let rounds = (prop::collection::vec(round, 2..10), any::<bool>()).prop_map(|(mut rounds, waits)| {
        for (_, round) in &mut rounds {
            round.blocking &= waits;
            round.keeps &= !waits;
        }
        rounds
    });
    let batch = (rounds, paces, crash, 0u64..2000).prop_map(|(rounds, pace, crash, ms)| Rounds {
        rounds,
        pace,
        crash,
        pass: Duration::from_millis(ms),
    });
    let translation = proptest::sample::select(Translation::ALL.to_vec());
    (translation, any::<bool>(), 2usize..=4, prop::collection::vec(batch, 2..8)).prop_map(
        move |(translation, deferred, clients, batches)| {
            let small = WorldConfig::new(seed, translation, POOL_PAGES, 32);
            let config = WorldConfig { deferred, durable_answers, restless: true, ..small };
            LockCase { config, clients, batches }
        },
    )
}

/// The number of clients inside one lock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Inside {
    shared: usize,
    exclusive: usize,
}

/// The model: the clients inside each lock, and the value of each counter.
#[derive(Debug, Default)]
struct Counted {
    inside: [[Inside; SPACES.len()]; FILES],
    counts: [[u64; SPACES.len()]; FILES],
    /// The number of rounds that were refused because another client was inside.
    without: u64,
}

/// A client's handles, and the rounds whose locks it keeps.
struct Holder {
    handles: Vec<Handle>,
    kept: Vec<Round>,
}

impl Round {
    fn lock(&self) -> Lock {
        let mode = if self.shared { LockMode::Shared } else { LockMode::Exclusive };
        Lock { space: SPACES[self.space], owner: OWNER, range: LockRange::WHOLE, mode, pid: 1 }
    }

    fn inside<'c>(&self, counted: &'c mut Counted) -> &'c mut Inside {
        &mut counted.inside[self.file][self.space]
    }

    fn offset(&self) -> u64 {
        8 * self.space as u64
    }

    /// Takes the lock; returns whether the client has it now.
    fn enter(&self, volume: &RemoteVolume, handle: Handle, counted: &Mutex<Counted>) -> bool {
        let waiter = Arc::<Waiter>::default();
        volume.set_lock(&CALLER, handle, self.lock(), self.blocking, waiter.clone());
        let answer = loop {
            if let Some(answer) = waiter.answer() {
                break answer;
            }
            volume.session().await_locks(HOLD).expect("the server answers");
        };
        match answer {
            Ok(()) => {}
            Err(FsError::Server(Status::Locked)) if !self.blocking => {
                counted.lock().without += 1;
                return false;
            }
            Err(error) => panic!("{self:?}: {error}"),
        }
        let mut counted = counted.lock();
        let inside = self.inside(&mut counted);
        assert_eq!(inside.exclusive, 0, "{self:?} is let in, and somebody else is inside");
        assert!(self.shared || inside.shared == 0, "{self:?} is let in, and others are inside");
        if self.shared {
            inside.shared += 1;
        } else {
            inside.exclusive += 1;
        }
        true
    }

    /// Reads the counter, checks it, and with an exclusive lock writes the counter plus one.
    fn count(&self, volume: &RemoteVolume, handle: Handle, counted: &Mutex<Counted>) {
        let mut bytes = [0; 8];
        let take = &mut |read: &[u8]| bytes.copy_from_slice(read);
        volume.read(&CALLER, handle, self.offset(), 8, take).expect("read");
        let count = u64::from_le_bytes(bytes);
        assert_eq!(count, counted.lock().counts[self.file][self.space], "{self:?} reads another count");
        if !self.shared {
            let more = (count + 1).to_le_bytes();
            assert_eq!(volume.write(&CALLER, handle, self.offset(), &more), Ok(8), "{self:?}");
            counted.lock().counts[self.file][self.space] += 1;
        }
    }

    fn leave(&self, volume: &RemoteVolume, handle: Handle, counted: &Mutex<Counted>) {
        {
            let mut counted = counted.lock();
            let inside = self.inside(&mut counted);
            if self.shared {
                inside.shared -= 1;
            } else {
                inside.exclusive -= 1;
            }
        }
        let unlocked = volume.unlock(&CALLER, handle, SPACES[self.space], OWNER, LockRange::WHOLE);
        assert_eq!(unlocked, Ok(()), "{self:?} is told that it lost its lock");
    }
}

/// Runs a client's part of a batch. Returns the rounds whose locks it keeps.
fn play(volume: &RemoteVolume, holder: &Holder, rounds: &[Round], counted: &Mutex<Counted>) -> Vec<Round> {
    for kept in &holder.kept {
        let handle = holder.handles[kept.file];
        kept.count(volume, handle, counted);
        kept.leave(volume, handle, counted);
    }
    let mut keeps: Vec<Round> = Vec::new();
    for round in rounds {
        // The client has this lock already. A second request for it is not a subject of this test.
        if keeps.iter().any(|kept| (kept.file, kept.space) == (round.file, round.space)) {
            continue;
        }
        let handle = holder.handles[round.file];
        if round.enter(volume, handle, counted) {
            round.count(volume, handle, counted);
            if round.keeps { keeps.push(*round) } else { round.leave(volume, handle, counted) }
        }
    }
    keeps
}

fn run(case: &LockCase) -> Ran {
    let site = Simulated::with_clients(case.config, case.clients, true);
    let mut holders: Vec<Holder> = (0..case.clients)
        .map(|client| {
            let open = |file: usize| {
                let name = [b'a' + file as u8];
                let root = InodeNo::ROOT;
                let made = site.client(client).create(&CALLER, root, &name, 0o644, false, READ_WRITE);
                let handle = made.expect("create or open").1.handle;
                if client == 0 {
                    assert_eq!(site.client(0).write(&CALLER, handle, 0, &[0; 16]), Ok(16));
                    site.client(0).fsync(&CALLER, handle, false).expect("fsync");
                }
                handle
            };
            Holder { handles: (0..FILES).map(open).collect(), kept: Vec::new() }
        })
        .collect();
    let counted = Mutex::new(Counted::default());
    for batch in &case.batches {
        run_batch(&site, batch, &mut holders, &counted);
        site.pass(batch.pass);
    }
    // A last batch: the clients that keep locks use them and give them up.
    let (jobs, playing) = jobs(&site, &holders, &[], &counted);
    at_once(&site, &case.batches[0].pace, &playing, jobs, &AtomicU64::new(0));
    assert_eq!(site.world.with_server(|server| server.server().locks.figures().held), 0);
    Ran::of(&site.world)
}

type Keeps = Vec<Round>;

fn jobs<'j>(
    site: &'j Simulated,
    holders: &'j [Holder],
    rounds: &[(usize, Round)],
    counted: &'j Mutex<Counted>,
) -> (Vec<baton::Job<'j, Keeps>>, Vec<usize>) {
    let of = |client: usize| -> Vec<Round> {
        let mine = rounds.iter().filter(|(of, _)| of % holders.len() == client);
        mine.map(|(_, round)| *round).collect()
    };
    // A client that only keeps a lock plays, too, and gives it up: others may wait for it.
    let is_playing = |client: &usize| !of(*client).is_empty() || !holders[*client].kept.is_empty();
    let playing: Vec<usize> = (0..holders.len()).filter(is_playing).collect();
    let job = |client: &usize| -> baton::Job<'j, Keeps> {
        let (volume, holder, rounds) = (site.client(*client), &holders[*client], of(*client));
        Box::new(move || play(volume, holder, &rounds, counted))
    };
    (playing.iter().map(job).collect(), playing)
}

fn run_batch(site: &Simulated, batch: &Rounds, holders: &mut [Holder], counted: &Mutex<Counted>) {
    if let Some((crash, again)) = batch.crash {
        site.crash_after(crash, again);
    }
    let (jobs, playing) = jobs(site, holders, &batch.rounds, counted);
    let (keeps, _) = at_once(site, &batch.pace, &playing, jobs, &AtomicU64::new(0));
    for (client, kept) in playing.iter().zip(keeps) {
        holders[*client].kept = kept;
    }
    // All clients must be back before the figures are read, and no crash may come meanwhile.
    site.hold_crash(true);
    for client in 0..holders.len() {
        let session = site.client(client).session();
        session.call(&CALLER, || Request::Heartbeat, |_| Ok(())).expect("heartbeat");
    }
    let figures = site.world.with_server(|server| server.server().locks.figures());
    let kept: usize = holders.iter().map(|holder| holder.kept.len()).sum();
    assert_eq!((figures.held, figures.waiting), (kept, 0), "locks that the server has, and who waits");
    site.hold_crash(false);
}

#[test]
fn nobody_loses_a_lock_or_shares_it_whoever_is_killed() {
    let test = "together::locks::nobody_loses_a_lock_or_shares_it_whoever_is_killed";
    seeds::seeds(test, SEEDS, case, run);
}

#[test]
fn a_seed_of_locks_does_the_same_each_time() {
    seeds::does_the_same(case, run);
}
