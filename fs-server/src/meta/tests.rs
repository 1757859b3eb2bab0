//! Tests of metadata as a whole: a reference model, POSIX rules one by one, live data, crashes.

mod acl;
mod around;
mod climbs;
mod crash;
mod cut;
mod data;
mod directory;
mod images;
mod marks;
mod model;
mod posix;
mod power;
mod recovery;
mod refill;
mod repair;
mod room;
mod rot;
mod start;

use super::{Caller, Format, HashKey, MemoryStore, Meta, Operation, Outcome, Store, check};
use cuttlefs_common::attr::Attr;
use cuttlefs_common::ids::{InodeNo, PoolPage};
use cuttlefs_common::region::{Extent, ExtentState};
use cuttlefs_common::rpc::NewNode;
use cuttlefs_common::status::Status;
use cuttlefs_common::world::ManualClock;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const HASH_KEY: HashKey = HashKey(*b"sixteen byte key");
const USER: Caller =
    Caller { uid: 1000, gid: 100, umask: 0, drops_privileges: false, request: None, opens: None };
const ROOT_USER: Caller =
    Caller { uid: 0, gid: 0, umask: 0, drops_privileges: false, request: None, opens: None };

fn format(store: &dyn Store) {
    let format = Format { uuid: [7; 16], hash_key: HASH_KEY, root: ROOT_USER, root_mode: 0o755 };
    Meta::format(store, &ManualClock::default(), &format).expect("format");
}

/// A file system for tests, with a clock that moves by a millisecond before each operation.
struct World {
    meta: Meta,
    clock: Arc<ManualClock>,
    store: Arc<dyn Store>,
}

impl World {
    fn on(store: Arc<dyn Store>) -> Self {
        let clock = Arc::new(ManualClock::default());
        let meta = Meta::open(store.clone(), clock.clone()).expect("open");
        Self { meta, clock, store }
    }

    fn new() -> Self {
        let store = Arc::new(MemoryStore::new());
        format(&*store);
        Self::on(store)
    }

    fn tick(&self) {
        self.clock.advance(Duration::from_millis(1));
    }

    fn run_open(
        &self,
        operation: &Operation<'_>,
        is_open: &dyn Fn(InodeNo) -> bool,
    ) -> Result<Outcome, Status> {
        self.tick();
        self.execute(operation, is_open)
    }

    /// Executes an operation as the server does: a rename that is refused as `Busy` is done again after climbs from both of its directories.
    fn execute(
        &self,
        operation: &Operation<'_>,
        is_open: &dyn Fn(InodeNo) -> bool,
    ) -> Result<Outcome, Status> {
        let execute = || self.meta.execute(USER, operation, is_open);
        let mut outcome = execute();
        if let Operation::Rename { parent, new_parent, .. } = operation {
            while outcome == Err(Status::Busy) {
                let mut climbs = [*parent, *new_parent].map(|directory| self.meta.climb(directory));
                climbs.iter_mut().for_each(|climb| while climb.step().expect("climb") {});
                outcome = execute();
            }
        }
        outcome
    }

    fn run(&self, operation: &Operation<'_>) -> Result<Outcome, Status> {
        self.run_open(operation, &|_| false)
    }

    fn make(&self, parent: InodeNo, name: &str, node: NewNode<'_>) -> Result<Attr, Status> {
        let make = Operation::Make { parent, name: name.as_bytes(), node, mode: 0o755 };
        self.run(&make).map(|outcome| outcome.attr.expect("make gives attributes"))
    }

    fn file(&self, parent: InodeNo, name: &str) -> InodeNo {
        self.make(parent, name, NewNode::File).expect("file").ino
    }

    fn directory(&self, parent: InodeNo, name: &str) -> InodeNo {
        self.make(parent, name, NewNode::Directory).expect("directory").ino
    }

    fn unlink(&self, parent: InodeNo, name: &str) -> Result<Outcome, Status> {
        self.run(&Operation::Unlink { parent, name: name.as_bytes() })
    }

    fn attr(&self, ino: InodeNo) -> Attr {
        self.meta.attr(ino).expect("attr")
    }

    fn names(&self, ino: InodeNo) -> Vec<String> {
        let mut names = Vec::new();
        let end = self.meta.read_dir(ino, 0, false, &mut |entry| {
            names.push(String::from_utf8_lossy(entry.name).into_owned());
            true
        });
        assert_eq!(end, Ok(true));
        names.sort();
        names
    }

    fn assert_sound(&self) {
        assert_eq!(check(&*self.store, HASH_KEY).expect("records parse"), []);
        assert_eq!(self.meta.damage_count(), 0);
    }
}

fn extent(file_page: u64, pool_page: u64, len_pages: u64) -> Extent {
    Extent {
        file_page: file_page.into(),
        pool_page: PoolPage(pool_page),
        len_pages,
        state: ExtentState::Written,
    }
}

/// Tells a thread to stop, also when an assertion fails: a thread scope waits for its threads before it panics.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
