//! How fast metadata is on a disk: creates, lookups, listings, data commits, a start, unlinks, flushes; and how large, in memory
//! and on the disk.
//!
//! `cargo run --release -p cuttlefs-server --example meta_bench [FILES] [DIRECTORY] [starts]` FILES is 50000 if not given; the store is made in a
//! temporary directory below DIRECTORY (or the system's). With `starts` it measures only starts and sizes: after a clean stop, after a kill, and
//! after a kill with the longest log of names that there can be without a checkpoint under way.

use cuttlefs_common::ids::{FilePage, InodeNo, PoolPage};
use cuttlefs_common::region::{Extent, ExtentState};
use cuttlefs_common::rpc::NewNode;
use cuttlefs_common::status::Status;
use cuttlefs_common::world::SystemClock;
use cuttlefs_server::meta::{
    Caller, Covers, CutStep, DataCommit, DiskOptions, DiskStore, Format, HashKey, Images, Meta, Operation,
    Plane, RangeUpdate, Store,
};
use cuttlefs_server::pool::Space;
use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Files of one directory, as a source tree or a mail store might have.
const FILES_PER_DIRECTORY: usize = 1000;
const NOBODY: Caller =
    Caller { uid: 1000, gid: 1000, umask: 0, drops_privileges: false, request: None, opens: None };

fn report(what: &str, count: usize, took: Duration) {
    let each_us = took.as_secs_f64() * 1e6 / count.max(1) as f64;
    println!("{what:<28} {:>10.0}/s {each_us:>9.2} us each", count as f64 / took.as_secs_f64());
}

fn timed<T>(
    what: &str,
    count: usize,
    run: impl FnOnce() -> Result<T, Box<dyn Error>>,
) -> Result<T, Box<dyn Error>> {
    let start = Instant::now();
    let value = run()?;
    report(what, count, start.elapsed());
    Ok(value)
}

/// Prints the memory and disk space in use, in all and for each inode.
fn footprint(what: &str, files: usize, store: &dyn Store) -> Result<(), Box<dyn Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let of = |name| status.lines().find(|line| line.starts_with(name)).unwrap_or("").replace('\t', " ");
    let disk = store.size_on_disk_bytes()?;
    println!(
        "{what:<28} {} {}; on disk {disk} bytes, {} an inode",
        of("VmRSS"),
        of("VmHWM"),
        disk / files.max(1) as u64
    );
    Ok(())
}

/// Opens the store as a server does: metadata, and the free space of the map of pages. Prints how long that takes and how much memory is resident
/// then. Measures that in a new process of this program, which has done nothing else.
fn start(what: &str, path: &Path) -> Result<(Arc<DiskStore>, Meta), Box<dyn Error>> {
    let begun =
        Command::new(std::env::current_exe()?).args(["--start".as_ref(), path.as_os_str()]).output()?;
    println!("{what:<28} {}", String::from_utf8(begun.stdout)?.trim_end());
    opened(path).map(|(store, meta, _)| (store, meta))
}

fn copy_all(from: &Path, to: &Path) -> Result<(), Box<dyn Error>> {
    std::fs::create_dir(to)?;
    for file in std::fs::read_dir(from)? {
        let file = file?;
        std::fs::copy(file.path(), to.join(file.file_name()))?;
    }
    Ok(())
}

/// Copies the files as they are and opens the copy as `start` does, with everything that is in the log only. No checkpoint may be under way: it would
/// change the files during the copy.
fn killed(path: &Path) -> Result<String, Box<dyn Error>> {
    let copy = path.with_extension("killed");
    copy_all(path, &copy)?;
    let begun =
        Command::new(std::env::current_exe()?).args(["--start".as_ref(), copy.as_os_str()]).output()?;
    let log_bytes =
        std::fs::metadata(path.join("tail-0"))?.len() + std::fs::metadata(path.join("tail-1"))?.len();
    std::fs::remove_dir_all(&copy)?;
    Ok(format!("{} of log; {}", log_bytes, String::from_utf8(begun.stdout)?.trim_end()))
}

/// Makes files in new directories, each with an extent, until the log is nearly as long as it can be without a checkpoint. Returns how many it made.
fn fill_log(path: &Path) -> Result<usize, Box<dyn Error>> {
    let options = DiskOptions { checkpoint_bytes: 60 << 20, ..DiskOptions::default() };
    let store = Arc::new(DiskStore::open(path, options)?);
    let meta = Meta::open(store.clone(), Arc::new(SystemClock::new()))?;
    let (mut files, mut parent) = (0, InodeNo::ROOT);
    while store.figures().since_checkpoint < (56 << 20) {
        if files % FILES_PER_DIRECTORY == 0 {
            parent = new_directory(&meta, &format!("another-{files}"))?;
        }
        let name = format!("some-file-name-{files}.rs");
        let create = Operation::Create { parent, name: name.as_bytes(), mode: 0o644, exclusive: true };
        let ino = meta.execute(NOBODY, &create, &closed)?.attr.ok_or("a file")?.ino;
        meta.commit_data(&[commit_of(ino, (1 << 22) + files as u64 * 2)])?;
        files += 1;
    }
    Ok(files)
}

/// A commit that maps a file's first page to this page of the pool.
fn commit_of(ino: InodeNo, pool_page: u64) -> DataCommit {
    DataCommit {
        covers: Covers::Nothing,
        ino,
        ranges: vec![RangeUpdate {
            first: FilePage(0),
            end: FilePage(1),
            extents: vec![Extent {
                file_page: FilePage(0),
                pool_page: PoolPage(pool_page),
                len_pages: 1,
                state: ExtentState::Written,
            }],
        }],
        size: 4096,
        done: Vec::new(),
        cut: CutStep::Unchanged,
        images: Images::Follow,
    }
}

fn opened(path: &Path) -> Result<(Arc<DiskStore>, Meta, Space), Box<dyn Error>> {
    let store = Arc::new(DiskStore::open(path, DiskOptions::default())?);
    let meta = Meta::open(store.clone(), Arc::new(SystemClock::new()))?;
    let mut used = Vec::new();
    meta.pages(&mut |key, bits| {
        if key.plane() == Plane::Named {
            used.resize((key.first_page() / 64) as usize, 0);
            used.extend_from_slice(bits);
        }
    })?;
    let space = Space::new(used.len() as u64 * 64, used)?;
    Ok((store, meta, space))
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<_> = std::env::args_os().collect();
    if let [_, start, path] = &arguments[..]
        && start == "--start"
    {
        let began = Instant::now();
        let (_store, meta, space) = opened(Path::new(path))?;
        let took = began.elapsed();
        let status = std::fs::read_to_string("/proc/self/status")?;
        let resident = status.lines().find(|line| line.starts_with("VmRSS")).unwrap_or("").replace('\t', " ");
        let (inodes, figures) = (meta.inode_count(), space.figures());
        println!("{took:.2?}; {resident}; {inodes} inodes, {} of {} pages used", figures.used, figures.pages);
        return Ok(());
    }
    measure()
}

/// Where a file is: its directory and its name.
type Place<'a> = &'a dyn Fn(usize) -> (InodeNo, String);

fn closed(_: InodeNo) -> bool {
    false
}

fn new_directory(meta: &Meta, name: &str) -> Result<InodeNo, Box<dyn Error>> {
    let (name, node) = (name.as_bytes(), NewNode::Directory);
    let make = Operation::Make { parent: InodeNo::ROOT, name, node, mode: 0o755 };
    Ok(meta.execute(NOBODY, &make, &closed)?.attr.ok_or("a directory")?.ino)
}

fn look_up(
    meta: &Meta,
    parents: &[InodeNo],
    inos: &[InodeNo],
    place: Place<'_>,
) -> Result<(), Box<dyn Error>> {
    let files = inos.len();
    timed("lookup", files, || {
        for index in 0..files {
            let (parent, name) = place(index * 7919 % files);
            meta.lookup(parent, name.as_bytes())?;
        }
        Ok(())
    })?;
    timed("lookup of a missing name", files, || {
        for index in 0..files {
            let (parent, name) = place(index);
            if meta.lookup(parent, &name.as_bytes()[1..]).is_ok() {
                return Err("found what is not there".into());
            }
        }
        Ok(())
    })?;
    timed("attr", files, || {
        for index in 0..files {
            meta.attr(inos[index * 7919 % files])?;
        }
        Ok(())
    })?;
    for (what, plus) in [("listed entry", false), ("listed entry with attr", true)] {
        timed(what, files, || {
            for parent in parents {
                meta.read_dir(*parent, 0, plus, &mut |_| true)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn make_more(meta: &Meta, files: usize, place: Place<'_>) -> Result<(), Box<dyn Error>> {
    timed("extents, all looked at", files, || Ok(meta.all_extents(&mut |_, _| true)?))?;
    timed("flush of one create", 100, || {
        for index in 0..100 {
            let name = format!("flushed-{index}");
            let create = Operation::Create {
                parent: InodeNo::ROOT,
                name: name.as_bytes(),
                mode: 0o644,
                exclusive: true,
            };
            meta.execute(NOBODY, &create, &closed)?;
            meta.flush()?;
        }
        Ok(())
    })?;
    let stop = AtomicBool::new(false);
    let worst = std::thread::scope(|scope| -> Result<Duration, Box<dyn Error>> {
        let flusher = scope.spawn(|| -> Result<(), Status> {
            while !stop.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(100));
                meta.flush()?;
            }
            Ok(())
        });
        let mut worst = Duration::ZERO;
        let created = timed("create beside flushes", files, || {
            for index in 0..files {
                let (parent, name) = place(index);
                let name = &name.as_bytes()[1..];
                let create = Operation::Create { parent, name, mode: 0o644, exclusive: true };
                let start = Instant::now();
                meta.execute(NOBODY, &create, &closed)?;
                worst = worst.max(start.elapsed());
            }
            Ok(())
        });
        stop.store(true, Ordering::Relaxed);
        flusher.join().map_err(|_| "the flushing thread panicked")??;
        created.map(|()| worst)
    })?;
    println!("{:<28} {worst:>10.2?}", "slowest of them");
    Ok(())
}

fn unlink_more(meta: &Meta, files: usize, place: Place<'_>) -> Result<(), Box<dyn Error>> {
    timed("unlink of the others", files, || {
        for index in 0..files {
            let (parent, name) = place(index);
            let name = &name.as_bytes()[1..];
            meta.execute(NOBODY, &Operation::Unlink { parent, name }, &closed)?;
        }
        Ok(())
    })?;
    Ok(())
}

fn measure() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let files: usize = arguments.next().map_or(Ok(50_000), |count| count.parse())?;
    let below = arguments.next();
    let brief = arguments.next().is_some_and(|what| what == "starts");
    let directory = match below {
        Some(below) => tempfile::tempdir_in(below)?,
        None => tempfile::tempdir()?,
    };
    let store = Arc::new(DiskStore::open(&directory.path().join("meta"), DiskOptions::default())?);
    let clock = Arc::new(SystemClock::new());
    let format = Format { uuid: [1; 16], hash_key: HashKey([2; 16]), root: NOBODY, root_mode: 0o755 };
    Meta::format(&*store, &*clock, &format)?;
    let meta = Meta::open(store.clone(), clock)?;

    let mut parents = Vec::new();
    for index in 0..files.div_ceil(FILES_PER_DIRECTORY) {
        parents.push(new_directory(&meta, &format!("directory-{index}"))?);
    }
    let place = |index: usize| (parents[index / FILES_PER_DIRECTORY], format!("some-file-name-{index}.rs"));

    let inos = timed("create", files, || {
        let mut inos = Vec::with_capacity(files);
        for index in 0..files {
            let (parent, name) = place(index);
            let create = Operation::Create { parent, name: name.as_bytes(), mode: 0o644, exclusive: true };
            inos.extend(meta.execute(NOBODY, &create, &closed)?.attr.map(|attr| attr.ino));
        }
        Ok(inos)
    })?;
    timed("flush after creates", 1, || Ok(meta.flush()?))?;
    if !brief {
        look_up(&meta, &parents, &inos, &place)?;
    }
    timed("data commit, 32 a batch", files, || {
        for (batch, inos) in inos.chunks(32).enumerate() {
            let commit = |(index, ino): (usize, &InodeNo)| commit_of(*ino, (batch * 32 + index) as u64 * 2);
            let commits: Vec<_> = inos.iter().enumerate().map(commit).collect();
            meta.commit_data(&commits)?;
        }
        Ok(())
    })?;
    meta.flush()?;
    footprint("with all files", files, &*store)?;
    let path = directory.path().join("meta");
    // Waits for the end of the checkpoint that is under way.
    while store.figures().since_checkpoint > (16 << 20) {
        std::thread::sleep(Duration::from_millis(100));
    }
    println!("{:<28} {}", "start after a kill", killed(&path)?);
    timed("clean stop", 1, || Ok(meta.close(None)?))?;
    drop((meta, store));
    if brief {
        let copy = path.with_extension("more");
        copy_all(&path, &copy)?;
        let more = fill_log(&copy)?;
        println!("{:<28} {more} files; {}", "start, longest log", killed(&copy)?);
        std::fs::remove_dir_all(&copy)?;
    }
    let (store, meta) = start("start", &path)?;
    footprint("after that start", files, &*store)?;
    if !brief {
        make_more(&meta, files, &place)?;
    }
    timed("unlink", files, || {
        for index in 0..files {
            let (parent, name) = place(index);
            meta.execute(NOBODY, &Operation::Unlink { parent, name: name.as_bytes() }, &closed)?;
        }
        Ok(())
    })?;
    if !brief {
        unlink_more(&meta, files, &place)?;
    }
    timed("clean stop", 1, || Ok(meta.close(None)?))?;
    footprint("without them", files, &*store)?;
    drop((meta, store));
    let (store, _) = start("start without them", &path)?;
    footprint("after that start", files, &*store)
}
