//! One-sided changes under a model checker: the product's own code for WRITEs, APPENDs, changes by RPC, cuts, grants, write-back and eviction, in every
//! order of its steps that few preemptions make.
//!
//! [`Site`] is a server's files on metadata and a disk in memory. The checker knows the locks of files and pages, of live inodes, the store and the disk,
//! the lists of what is to be written back, free frames and free space, and the pins (`crate::sync`). It switches between threads there, and tries all
//! orders in which two threads use one of them. Of what it does not know it tries no orders: bytes, residency entries and mappings, which change under
//! one of these locks only. Readers without locks have a model of their own (`pages::model`), which sees every load and store.
//!
//! A model is some *parts*, each a function that one thread runs ([`changes`]; [`mistakes`] has those that leave a protection out), and what must hold
//! when all are done. Parts note what they find wrong and go on, for a thread that panics while others hold the checker's locks ends the process.
//! The tests are in fixtures/models.

mod changes;
mod mistakes;

use crate::committer::Committer;
use crate::files::{
    FileRegion, Files, FilesConfig, Grantee, WriteAt, grant_write, write_back_all, write_for,
};
use crate::meta::{Caller, Format, HashKey, MemoryStore, Meta, Operation};
use crate::pages::{Frames, MIN_FRAMES, Pages, PagesConfig, Sink, Source};
use crate::pool::simdisk::SimDisk;
use crate::pool::space::Space;
use cuttlefs_common::ids::{FileKey, InodeNo, PAGE_SIZE, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::rdma::{PeerKey, RegionOwner};
use cuttlefs_common::region::PageSet;
use cuttlefs_common::rpc::Rights;
use cuttlefs_common::status::Status;
use cuttlefs_common::world::{ManualClock, SeededRandom};
use parking_lot::Mutex;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// Every byte of the file at first, what a WRITE puts in place of it, and the other file's.
const OWN: u8 = 0x11;
const NEWER: u8 = 0x22;
const FOREIGN: u8 = 0x33;
/// The bytes of a record that is appended, and of a WRITE.
const RECORD: usize = 16;

/// Frames that can hold pages. A quarter is for grants.
const USABLE_FRAMES: u32 = 16;
/// How often a future that is pending may be polled again.
const POLLS_MAX: usize = 1000;
/// The stack of a thread of a model, in words: half a MiB. The checker's own is 32 KiB.
const STACK_WORDS: usize = 64 << 10;
/// Most steps of one order at which the checker could switch.
const STEPS_MAX: usize = 20_000;

const ROOT_USER: Caller =
    Caller { uid: 0, gid: 0, umask: 0, drops_privileges: false, request: None, opens: None };

/// What a model begins with.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Pages of the pool.
    pub pool_pages: u64,
    /// The length of the file, which is all [`OWN`], durable, and in frames. Its first page is dirty, for it was written once more, and it is listed.
    pub len: usize,
    /// The bytes that both sessions are granted from the first one on; 0: nothing is granted.
    pub granted: u64,
    /// Whether the other file has a page, which lies behind the file's first one.
    pub scattered: bool,
}

/// What parts have noted.
#[derive(Debug, Default)]
struct Noted {
    /// Offsets and bytes of the records that were appended.
    appended: Vec<(u64, u8)>,
    /// Whether a WRITE is done.
    is_written: bool,
    /// What is wrong.
    faults: Vec<String>,
}

/// A server's files: one that two sessions have open, and another one.
pub struct Site {
    files: Arc<Files>,
    disk: SimDisk,
    meta: Arc<Meta>,
    file: Arc<FileRegion>,
    other: Arc<FileRegion>,
    sessions: [(RegionOwner, FileKey); 2],
    /// Locked for moments, in which the checker does not switch.
    noted: Mutex<Noted>,
}

impl std::fmt::Debug for Site {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Site").field("noted", &self.noted).finish_non_exhaustive()
    }
}

/// What one thread does.
pub type Part = fn(&Site);

/// Notes whether a future is to be polled again.
#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs a future. Where it is pending, it gives others a turn, which is no step here, or waits for another thread's sync.
fn run<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(woken.clone());
    let mut context = Context::from_waker(&waker);
    for _ in 0..POLLS_MAX {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return value;
        }
        if !woken.0.swap(false, Ordering::Relaxed) {
            loom::thread::yield_now();
        }
    }
    panic!("it waits for something that the model does not have");
}

impl Site {
    /// Makes the server within an execution of the checker.
    fn new(setup: Setup) -> Self {
        let (store, clock) = (MemoryStore::new(), Arc::new(ManualClock::default()));
        let format = Format { uuid: [7; 16], hash_key: HashKey([7; 16]), root: ROOT_USER, root_mode: 0o755 };
        Meta::format(&store, &*clock, &format).expect("formatted");
        let meta = Arc::new(Meta::open(Arc::new(store), clock).expect("opened"));
        let random = Arc::new(SeededRandom::new(1));
        let frames = u64::from(MIN_FRAMES - 1 + USABLE_FRAMES);
        let config = PagesConfig::new(setup.pool_pages, frames * PAGE_SIZE_U64);
        let pages = Arc::new(Pages::new(config, &*random).expect("memory"));
        let space = Space::new(setup.pool_pages, crate::bits::of(setup.pool_pages, [])).expect("all is free");
        let disk = SimDisk::new(setup.pool_pages, pages.frames().memory().clone());
        let few = FilesConfig { file_slots: 4, max_inactive: 1024 };
        let committer = Committer::at_once(meta.clone());
        let files = Arc::new(Files::new(few, pages, Arc::new(space), committer, random).expect("memory"));
        let make = || {
            let operation = Operation::CreateNameless { parent: InodeNo::ROOT, mode: 0o600 };
            let made = meta.execute(ROOT_USER, &operation, &|_| true).expect("made");
            made.attr.expect("it has attributes").ino
        };
        let (ino, other) = (make(), make());
        let other = files.file(other).expect("a file");
        let both = Rights { read: true, write: true };
        let mut file = None;
        let sessions = [RegionOwner(1), RegionOwner(2)].map(|owner| {
            let opened = files.open(owner, ino, both).expect("opens");
            file = Some(opened.file);
            (owner, opened.filekey)
        });
        let file = file.expect("two sessions opened it");
        let site = Self { files, disk, meta, file, other, sessions, noted: Mutex::default() };
        let mut bytes = vec![OWN; setup.len];
        let behind = bytes.split_off(if setup.scattered { PAGE_SIZE } else { setup.len });
        run(site.write_to(&site.file, WriteAt::Offset(0), &bytes)).expect("written");
        if setup.scattered {
            site.write_other();
            run(site.write_to(&site.file, WriteAt::End, &behind)).expect("written");
        }
        run(write_back_all(&site.files, &site.disk)).expect("durable");
        if setup.granted > 0 {
            (0..2).for_each(|who| site.give_grant(who, setup.granted).expect("granted"));
        }
        run(site.write_to(&site.file, WriteAt::Offset(0), &[OWN; RECORD])).expect("written");
        site
    }

    async fn write_to(&self, file: &Arc<FileRegion>, at: WriteAt, bytes: &[u8]) -> Result<u64, Status> {
        let written = write_for(&self.files, &self.disk, file, at, Source::Bytes(bytes), None).await?;
        Ok(written.offset)
    }

    fn give_grant(&self, who: usize, len: u64) -> Result<(), Status> {
        let (owner, filekey) = self.sessions[who];
        let pages = self.files.grants.take(&PeerKey::User(0), true, len.div_ceil(PAGE_SIZE_U64))?;
        let grantee = Grantee { owner, filekey };
        run(grant_write(&self.files, &self.disk, &self.file, grantee, (0, len), pages)).map(drop)
    }

    /// Notes a fault unless `holds`.
    fn must(&self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            let what = what();
            self.noted.lock().faults.push(what);
        }
    }

    /// The pool pages of a file that have bytes.
    fn pools(file: &FileRegion) -> Vec<PoolPage> {
        let state = file.state();
        let with_bytes = state.table.pieces_in(0, u64::MAX).filter(|piece| piece.state.has_bytes());
        with_bytes.flat_map(|piece| piece.pool..piece.pool + piece.len).map(PoolPage).collect()
    }

    /// The bytes of a page in its frame.
    fn frame_bytes(&self, pool: PoolPage) -> Option<Vec<u8>> {
        let entry = self.files.pages.residency.load(pool);
        entry.is_resident().then(|| {
            let mut bytes = vec![0; PAGE_SIZE];
            self.files.pages.frames().memory().read(Frames::offset(entry.frame()), &mut bytes);
            bytes
        })
    }

    /// All bytes of a file.
    fn contents(&self, file: &FileRegion) -> Vec<u8> {
        let mut bytes = vec![0; file.size() as usize];
        if !bytes.is_empty() {
            let (len, pages) = (bytes.len(), PageSet::all(bytes.len().div_ceil(PAGE_SIZE)));
            let sink = Sink::Bytes(&mut bytes);
            let read = run(crate::files::fetch(&self.files, &self.disk, file, 0, len, &pages, sink));
            assert_eq!(read, Ok(len as u32), "all of it can be read");
        }
        bytes
    }
}

/// What must hold when all parts are done, whatever they were.
fn check_rest(site: &Site) {
    let pages = &site.files.pages;
    // First: a read may bring a page into a frame.
    for (file, foreign) in [(&site.file, FOREIGN), (&site.other, NEWER)] {
        let bytes = site.contents(file);
        site.must(!bytes.contains(&foreign), || "a byte is in a foreign page".into());
    }
    let mut resident = 0;
    for file in [&site.file, &site.other] {
        let is_listed = site.files.dirty.has(file.ino());
        site.must(file.is_clean() || is_listed, || "a file with changes is not on the list".into());
        let dirty: Vec<PoolPage> = file.dirty.lock().values().map(|page| page.pool).collect();
        for pool in Site::pools(file) {
            let entry = pages.residency.load(pool);
            resident += u32::from(entry.is_resident());
            site.must(!entry.is_changing(), || format!("page {pool} was left changing"));
            site.must(!entry.is_dirty() || dirty.contains(&pool), || {
                format!("page {pool} is dirty and not on the list")
            });
        }
    }
    let spare = site.file.grants.lock().held().0;
    site.must(pages.frames().free() + resident + spare == USABLE_FRAMES, || {
        format!("{} frames are free, {resident} have pages, {spare} are a grant's", pages.frames().free())
    });
    // What is listed is enough: a write-back of it leaves the frames' bytes on the disk.
    site.must(run(write_back_all(&site.files, &site.disk)).is_ok(), || "it is not durable".into());
    for pool in [&site.file, &site.other].into_iter().flat_map(|file| Site::pools(file)) {
        let is_there = site.frame_bytes(pool).is_none_or(|bytes| bytes == site.disk.peek(pool.0));
        site.must(is_there, || format!("page {pool} was changed and not written back"));
    }
}

/// Behind the file's first `len` bytes are the appended records where their appenders were told, each once, and nothing else. They are `all`; `None`: the
/// file was cut to `len` meanwhile, so that some may be gone, or refused, for that ends grants.
pub fn check_records(site: &Site, len: usize, all: Option<usize>) {
    let appended = site.noted.lock().appended.clone();
    let bytes = site.contents(&site.file);
    site.must(bytes.len() >= len && (bytes.len() - len).is_multiple_of(RECORD), || {
        format!("the file has {} bytes", bytes.len())
    });
    let records = bytes[len.min(bytes.len())..].chunks_exact(RECORD);
    let mut there = Vec::new();
    for (index, record) in records.enumerate() {
        let place = ((len + index * RECORD) as u64, record[0]);
        site.must(record.iter().all(|byte| *byte == record[0]), || {
            format!("the record at {} is torn", place.0)
        });
        site.must(appended.contains(&place), || {
            format!("the offset {} has {:#x}, appended were {appended:x?}", place.0, place.1)
        });
        there.push(record[0]);
    }
    let are_all = |all| there.len() == all && appended.len() == all;
    site.must(all.is_none_or(are_all), || format!("appended offsets overlap: {appended:x?}"));
    there.sort_unstable();
    site.must(there.is_sorted_by(|one, next| one < next), || "a record is there twice".into());
}

fn start(part: impl FnOnce() + Send + 'static) -> loom::thread::JoinHandle<()> {
    loom::thread::Builder::new().stack_size(STACK_WORDS).spawn(part).expect("a thread of the model")
}

/// Runs up to three parts beside each other, in all orders with at most so many preemptions, and checks `end` behind them. Returns how many orders there
/// were: those that differ in the use of what the checker knows.
///
/// # Panics
/// With what is wrong.
pub fn check(preemptions: usize, setup: Setup, parts: &'static [Part], end: Part) -> usize {
    let orders = Arc::new(AtomicUsize::new(0));
    let counted = orders.clone();
    let mut model = loom::model::Builder::new();
    // LOOM_MAX_PREEMPTIONS sets another bound.
    model.preemption_bound.get_or_insert(preemptions);
    model.max_branches = STEPS_MAX;
    model.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        let all = move || {
            let site = Arc::new(Site::new(setup));
            let threads: Vec<_> = parts[1..]
                .iter()
                .map(|part| {
                    let site = site.clone();
                    start(move || part(&site))
                })
                .collect();
            parts[0](&site);
            threads.into_iter().for_each(|thread| thread.join().expect("it notes its faults"));
            end(&site);
            check_rest(&site);
            let faults = std::mem::take(&mut site.noted.lock().faults);
            // Nobody holds a lock of the checker's any more.
            drop(site);
            assert!(faults.is_empty(), "{faults:?}");
        };
        start(all).join().expect("what is wrong was told");
    });
    orders.load(Ordering::Relaxed)
}
