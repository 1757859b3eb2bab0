//! The wire protocol, drawn from a grammar, against a real server: hostile peers beside clients that keep the rules, and a model of sessions that
//! says which answers may come.
//!
//! An *episode* is drawn from a seed. It has `STEPS` steps: of hostile peers of two users (`hostile`), of a user whose numbers and lock they all know
//! (`victim`) and who has rights past the server's workers (`counter`), of a client that repeats its requests (`repeater`), and of one that hands a file
//! over by keys (`landlord`) to sessions that overstep them (`tenants`), while root's client works (`honest`). Then the hostile peers drop their connections without a detach. What must hold:
//!
//! * the server lives; it answers every client that keeps the rules, and these clients find their bytes, names, locks, keys and grants;
//! * nobody joins, ends or uses a session without its secret and its user. Nobody is sent bytes of a file that he may not read, or an answer to a
//!   request that he did not send (`oracle`);
//! * a one-sided request is done if its key, its grant and the file's length permit it, and is refused, with no effect, if not; pages that a file has
//!   given back show nothing of it, and nothing that was under way comes into them;
//! * a request takes effect once, however often and on however many connections it is sent;
//! * nothing of the hostile peers stays: all counts are as before, and memory does not grow from episode to episode;
//! * every answer parses, and the server logs no fault of its own.
//!
//! A seed repeats the messages, but not the schedule of the server's threads. The seed of an episode is the run's seed plus the episode's number, so
//! a run with the printed seed begins with that episode:
//!
//! `CUTTLEFS_SESSIONS_SEED=N CUTTLEFS_SESSIONS_SECONDS=1 cargo nextest run -p cuttlefs-client --test wire_sessions --no-capture`

mod acts;
mod asking;
mod bursts;
mod counter;
mod dice;
mod faults;
mod grammar;
mod honest;
mod hostile;
mod landlord;
mod oracle;
mod repeater;
mod scouts;
#[path = "../serving/mod.rs"]
mod serving;
mod site;
mod tenants;
mod victim;
mod wire;

use counter::Counter;
use cuttlefs_common::world::{Random, SystemRandom};
use dice::Dice;
use grammar::{Kind, Known};
use hostile::Crowd;
use landlord::Landlord;
use oracle::Oracle;
use repeater::Repeater;
use site::{Left, STRANGERS, Site};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tenants::Tenants;
use victim::Victim;

/// Steps of an episode.
const STEPS: usize = 1500;
/// Operations of root's client before the first episode.
const WARM_STEPS: u64 = 200;
/// Episodes after which memory must not grow any more, because every buffer for so many peers has been used.
const WARM_EPISODES: u64 = 10;
/// The most bytes of growth after these episodes: memory that allocators keep, and the metadata's caches (64 MiB).
const GROWTH_MAX: usize = 160 << 20;

/// The most descriptors by which a run may exceed its start: root's client and the workers keep some buffers of their own. An episode makes hundreds
/// of connections, each of two descriptors or more, so a leak exceeds this bound.
const DESCRIPTORS_MORE: usize = 48;

/// Figures for the summary that a run prints. For each kind of request: how many were done, and how many refused.
#[derive(Default)]
struct Totals {
    episodes: u64,
    honest: u64,
    answers: BTreeMap<Kind, (u64, u64)>,
    tenants: tenants::Counts,
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number"))
}

fn run(what: &str, durable_answers: bool) {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can connect as somebody else");
        return;
    }
    let seed = number("CUTTLEFS_SESSIONS_SEED").unwrap_or_else(|| SystemRandom.next_u64() >> 16);
    let seconds = Duration::from_secs(number("CUTTLEFS_SESSIONS_SECONDS").unwrap_or(8));
    let faults = faults::watch();
    // Not the first episode's: its secrets would be those of sessions that are there.
    let dice = Dice::new(!seed);
    let site = Site::new(&dice, durable_answers);
    let (mut victim, mut counter) = (Victim::new(&site, &dice), Counter::new(&site, &dice));
    warm_up(&site, seed);
    let (began, mut totals, mut warm) = (Instant::now(), Totals::default(), None);
    let descriptors = site::descriptors();
    while totals.episodes == 0 || began.elapsed() < seconds {
        let episode = seed.wrapping_add(totals.episodes);
        let replay = format!("CUTTLEFS_SESSIONS_SEED={episode} CUTTLEFS_SESSIONS_SECONDS=1, test {what}");
        faults.say(&replay);
        run_episode(&site, &mut victim, &mut counter, episode, &mut totals);
        faults.check();
        totals.episodes += 1;
        let now = site::descriptors();
        assert!(
            now < descriptors + DESCRIPTORS_MORE,
            "descriptors are left: {descriptors} before, now {now}"
        );
        if totals.episodes >= WARM_EPISODES {
            let resident = site::resident_bytes();
            let before = *warm.get_or_insert(resident);
            assert!(
                resident < before + GROWTH_MAX,
                "memory grows: {before} bytes were resident, now {resident}"
            );
        }
    }
    let resident = site::resident_bytes() >> 20;
    println!(
        "{what}: seed {seed}, {} episodes in {:.0?}, {} operations of root's client, {resident} MiB resident",
        totals.episodes,
        began.elapsed(),
        totals.honest
    );
    for (kind, (done, refused)) in &totals.answers {
        println!("  {kind:?}: {done} done, {refused} refused");
    }
    println!("  {:?}", totals.tenants);
    let unasked: Vec<&Kind> = Kind::ALL.iter().filter(|kind| !totals.answers.contains_key(kind)).collect();
    assert!(
        totals.episodes < WARM_EPISODES || unasked.is_empty(),
        "kinds that were never answered: {unasked:?}"
    );
    assert!(
        totals.episodes < WARM_EPISODES || totals.tenants.least() > 0,
        "tenants never did some of it: {:?}",
        totals.tenants
    );
    drop((victim, counter));
    site.stop();
}

fn run_episode(site: &Site, victim: &mut Victim, counter: &mut Counter, seed: u64, totals: &mut Totals) {
    let dice = Dice::new(seed);
    let mut oracle = Oracle::new(site.marks());
    let mut known = Known::new(site.notable.clone());
    let before = at_rest(site);
    victim.meet(&mut oracle, &dice, &mut known);
    counter.meet(&mut oracle, &dice, &mut known);
    let mut repeater = Repeater::new(site, &dice, &mut oracle);
    let mut landlord = Landlord::new(site, &dice, &mut oracle);
    let mut tenants = Tenants::new(&mut landlord, &dice, &mut oracle);
    let others = victim.secrets(&dice).to_vec();
    let mut crowd = Crowd::new(site.unix(), &dice, known, others);
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let honest_seed = dice.number();
    std::thread::scope(|scope| {
        scope.spawn(|| honest::work(site, honest_seed, &stop, &done));
        scope.spawn(|| honest::watch(&stop, &done));
        for _ in 0..STEPS {
            match dice.below(29) {
                0 => victim.step(&dice, &mut oracle),
                1 => counter.step(&dice, &mut oracle),
                2..5 => repeater.step(&dice, &mut oracle),
                5 | 6 => landlord.step(&dice, &mut oracle),
                7..13 => tenants.step(&mut landlord, &dice, &mut oracle),
                _ => crowd.act(&dice, &mut oracle),
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    totals.honest += done.load(Ordering::Relaxed);
    repeater.finish(site, &dice, &mut oracle);
    totals.tenants += tenants.finish(&mut landlord, &mut oracle);
    victim.check(&dice, &mut oracle);
    counter.check(&mut oracle);
    // Drops the connections as they are. Without a detach their sessions would stay for a lease.
    drop(crowd);
    for (uid, secret) in oracle.said() {
        if STRANGERS.contains(&uid) {
            repeater::detach(&site.unix(), uid, secret, &dice, &mut oracle);
        }
    }
    // The file is still open: grants have ended with the filekeys that had them.
    wait_for(|left| left.grants == before.grants, &before, site);
    landlord.finish(&mut oracle);
    site.clear(b"open");
    site.clear(b"once");
    site.clear(b"let");
    site.restore_inbox();
    site.read_secrets();
    wait_for(|left| *left == before, &before, site);
    victim.check(&dice, &mut oracle);
    counter.check(&mut oracle);
    for ((kind, is_done), count) in &oracle.seen {
        let (done, refused) = totals.answers.entry(*kind).or_default();
        *(if *is_done { done } else { refused }) += count;
    }
}

/// Runs root's client for a while, so that all its lanes are there and nothing is left to close.
fn warm_up(site: &Site, seed: u64) {
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| honest::work(site, seed, &stop, &done));
        while done.load(Ordering::Relaxed) < WARM_STEPS {
            std::thread::sleep(Duration::from_millis(1));
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// How many equal looks in a row mean that the server is at rest.
const STILL_LOOKS: u32 = 30;

/// Waits until the server is at rest and returns what it holds then. Root's client closes files after its calls return, and now and then asks by
/// itself. Pages of a file that its last close frees go a moment later than its filekey and its inode.
fn at_rest(site: &Site) -> Left {
    let deadline = Instant::now() + asking::PATIENCE;
    let (mut before, mut still) = (site.left(), 0);
    loop {
        let left = site.left();
        let is_quiet = left.filekeys == victim::OPEN_FILES + counter::FILEKEYS
            && (left.turns, left.buffers) == ((0, 0), (0, 0));
        still = if is_quiet && left == before { still + 1 } else { 0 };
        if still == STILL_LOOKS {
            return left;
        }
        assert!(Instant::now() < deadline, "it does not come to rest: {left:#?}");
        before = left;
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Waits until the server holds nothing more of what it should not.
fn wait_for(is_all: impl Fn(&Left) -> bool, before: &Left, site: &Site) {
    let deadline = Instant::now() + asking::PATIENCE;
    loop {
        let left = site.left();
        if is_all(&left) {
            return;
        }
        assert!(Instant::now() < deadline, "something is left: {left:#?}\nbefore: {before:#?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn hostile_peers_get_nothing() {
    run("hostile_peers_get_nothing", false);
}

#[test]
fn hostile_peers_get_nothing_of_durable_answers() {
    run("hostile_peers_get_nothing_of_durable_answers", true);
}
