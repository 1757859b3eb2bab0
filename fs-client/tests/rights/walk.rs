//! Random operations of users on trees with random owners and modes, in both worlds.

use super::cuttle::{Cuttle, Site};
use super::is_root;
use super::kernel::Kernel;
use super::op::{Draw, Op};
use super::people::{self, Credentials, Person};
use cuttlefs_server::rights::{Account, ExportRule, PeerPattern};

/// The number of trees and operations of each user; `CUTTLEFS_RIGHTS_CASES` sets another number.
const CASES: u64 = 600;

fn cases() -> u64 {
    std::env::var("CUTTLEFS_RIGHTS_CASES").ok().map_or(CASES, |cases| cases.parse().expect("a number"))
}

/// In these tests the server checks root, too.
fn rules() -> Vec<ExportRule> {
    let root_is_checked = ExportRule {
        peers: vec![PeerPattern::User(people::ROOT.uid)],
        speaks_for_others: Some(false),
        ..ExportRule::default()
    };
    vec![root_is_checked, ExportRule::default()]
}

struct Worlds {
    kernel: Kernel,
    root: Person,
    by_root: Cuttle,
}

impl Worlds {
    fn new(site: &Site) -> Self {
        // Modes of new inodes must be those that were asked for.
        rustix::process::umask(rustix::fs::Mode::empty());
        let root = Person::new(people::ROOT);
        let by_root = site.volume(&root);
        Self { kernel: Kernel::new(), root, by_root }
    }

    /// Runs one operation on one tree as one user in both worlds, and compares answers and states. `real` is that user in the kernel's world.
    fn compare(&self, seed: u64, real: &Person, person: &Person, cuttle: &Cuttle) {
        let draw = Draw::new(seed);
        let tree = draw.tree();
        let op = draw.op(&tree);
        if matches!(op, Op::Link(..)) && !links_are_protected() {
            return;
        }
        self.kernel.clear();
        self.kernel.make(&tree);
        let (root, by_root) = (&self.root, &self.by_root);
        let expected = real.does(|| self.kernel.run(&op, &|work| root.does(work)));
        let after = self.kernel.state();
        root.does(|| {
            by_root.clear();
            by_root.make(&tree);
        });
        let found = person.does(|| cuttle.run(&op, &|work| root.does(|| work(by_root))));
        let left = root.does(|| by_root.state());
        let who = real.credentials;
        let case = format!("seed {seed}: {op:?} by {who:?}\n{tree:#?}");
        assert_eq!(found, expected, "answer (left), and the kernel's (right); {case}");
        assert_eq!(left, after, "state (left), and the kernel's (right); {case}");
    }
}

/// Whether `fs.protected_hardlinks` is set. This server always applies its rule.
fn links_are_protected() -> bool {
    std::fs::read_to_string("/proc/sys/fs/protected_hardlinks").is_ok_and(|set| set.trim() == "1")
}

fn walk(credentials: Credentials, first_seed: u64) {
    if !is_root() {
        return;
    }
    let site = Site::new(rules());
    let worlds = Worlds::new(&site);
    let person = Person::new(credentials);
    let cuttle = site.volume(&person);
    for seed in first_seed..first_seed + cases() {
        worlds.compare(seed, &person, &person, &cuttle);
    }
}

#[test]
fn an_owner_may_what_the_kernel_says() {
    walk(people::OWNER, 1_000_000);
}

#[test]
fn somebody_of_the_group_may_what_the_kernel_says() {
    walk(people::FELLOW, 2_000_000);
}

#[test]
fn a_member_of_the_group_may_what_the_kernel_says() {
    walk(people::MEMBER, 3_000_000);
}

#[test]
fn a_stranger_may_what_the_kernel_says() {
    walk(people::STRANGER, 4_000_000);
}

#[test]
fn root_may_what_the_kernel_says() {
    walk(people::ROOT, 5_000_000);
}

/// The server checks the requests of a squashed client by the user that each request names: root becomes the stranger, and everybody else stays
/// himself.
#[test]
fn whoever_a_squashed_client_names_may_what_the_kernel_says() {
    if !is_root() {
        return;
    }
    let trusted = vec![PeerPattern::User(people::ROOT.uid)];
    let squash = Account { uid: people::STRANGER.uid, gid: people::STRANGER.gid };
    let squashed =
        ExportRule { root_squash: Some(squash), speaks_for_others: Some(true), ..ExportRule::default() };
    let site = Site::new(vec![ExportRule { peers: trusted, ..ExportRule::default() }, squashed]);
    let worlds = Worlds::new(&site);
    // The user of the connection does not matter here.
    let person = Person::new(people::FELLOW);
    let cuttle = site.volume(&person);
    let owner = Person::new(people::OWNER);
    let stranger = Person::new(people::STRANGER);
    for (real, said, first_seed) in [
        (&owner, (people::OWNER.uid, people::OWNER.gid), 6_000_000),
        (&stranger, (people::STRANGER.uid, people::STRANGER.gid), 7_000_000),
        (&stranger, (0, 0), 8_000_000),
    ] {
        let cuttle = Cuttle { said, ..cuttle.clone() };
        for seed in first_seed..first_seed + cases() / 3 {
            worlds.compare(seed, real, &person, &cuttle);
        }
    }
}

/// Everybody is squashed to the owner.
#[test]
fn whoever_comes_where_all_are_squashed_is_that_user() {
    if !is_root() {
        return;
    }
    let trusted = vec![PeerPattern::User(people::ROOT.uid)];
    let squash = Account { uid: people::OWNER.uid, gid: people::OWNER.gid };
    let squashed = ExportRule { all_squash: Some(squash), ..ExportRule::default() };
    let site = Site::new(vec![ExportRule { peers: trusted, ..ExportRule::default() }, squashed]);
    let worlds = Worlds::new(&site);
    let owner = Person::new(people::OWNER);
    let person = Person::new(people::MEMBER);
    let cuttle = Cuttle { said: (people::STRANGER.uid, 0), ..site.volume(&person) };
    for seed in 9_000_000..9_000_000 + cases() / 3 {
        worlds.compare(seed, &owner, &person, &cuttle);
    }
}
