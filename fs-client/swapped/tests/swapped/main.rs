//! Processes under the library, with a swapper in this process and their pages in a map: what they wrote is what they read, whatever they do with their
//! memory meanwhile. Each process is this program once more, with the name of what it has to do in a variable. Skipped where userfaultfd(2) is not to be
//! had (it needs root and Linux 6.8), an error with `CUTTLEFS_REQUIRE_UFFD`. A command, a node and real programs: the suite `swap`.

mod descriptors;

use cuttlefs_client::swap::sys::{Purpose, Uffd};
use cuttlefs_client::swap::wire::{PAGE, PLAN_VARIABLE, Plan};
use cuttlefs_client::swap::{Bytes, Figures, Remote, Store, StoreError, SwapError, Swapper, listen};
use cuttlefs_common::odrp::RemoteError;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::collections::HashMap;
use std::path::PathBuf;
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Names what a process has to do.
const TASK: &str = "CUTTLEFS_SWAPPED_TASK";
/// Pages that each process may have here: a quarter of what the tasks use, or less.
const LIMIT: usize = 256;
const USED: usize = 4 * LIMIT;
/// Pages of a swap space that is larger than all that a task uses.
const PLENTY: u64 = 1 << 20;
/// Of one that holds what is out at once, and not all that ever left: half of a limit is always here, if a task uses little beside its array.
const FEW: u64 = (USED - LIMIT / 2) as u64;

#[derive(Default)]
struct Map {
    pages: HashMap<u64, Bytes>,
    /// The load that brings a wrong byte.
    wrong: Option<usize>,
    loads: usize,
    room: Option<usize>,
}

impl Remote for Map {
    fn store(&mut self, pages: &[(u64, &Bytes)]) -> Result<(), RemoteError> {
        for (page, bytes) in pages {
            if !self.pages.contains_key(page) && self.room.is_some_and(|room| self.pages.len() >= room) {
                return Err(RemoteError::Empty);
            }
            self.pages.insert(*page, **bytes);
        }
        Ok(())
    }

    fn load(&mut self, page: u64) -> Result<Box<Bytes>, RemoteError> {
        self.loads += 1;
        let mut bytes =
            self.pages.get(&page).map(|bytes| Box::new(*bytes)).ok_or(RemoteError::NotMapped(page))?;
        bytes[100] ^= u8::from(self.wrong == Some(self.loads));
        Ok(bytes)
    }

    fn is_stored(&self, page: u64) -> bool {
        self.pages.contains_key(&page)
    }

    fn forget(&mut self, pages: &[u64]) -> Result<(), RemoteError> {
        self.pages.retain(|page, _| !pages.contains(page));
        Ok(())
    }
}

fn library() -> PathBuf {
    let program = std::env::current_exe().expect("this program's file");
    let places = program.ancestors().skip(1).take(2).map(|place| place.join("libcuttlefs_swapped.so"));
    places.into_iter().find(|library| library.exists()).expect("cargo builds the library with its tests")
}

struct Ran {
    status: ExitStatus,
    result: Result<(), SwapError>,
    figures: Figures,
}

/// Runs a task with a swap space of so many pages; `None` where that cannot be.
fn run(task: &str, remote: Map, slots: u64) -> Option<Ran> {
    if let Err(error) = Uffd::create(Purpose::Swapped) {
        assert!(std::env::var_os("CUTTLEFS_REQUIRE_UFFD").is_none(), "no userfaultfd: {error}");
        eprintln!("skipped: no userfaultfd: {error}");
        return None;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("swap");
    let listener = listen(&socket).expect("a socket");
    let plan = Plan { heap_bytes: 64 << 20, arena_bytes: 256 << 20, socket };
    let mut program = Command::new(std::env::current_exe().expect("this program's file"))
        .args(["--exact", "task", "--nocapture", "--test-threads=1"])
        .env(TASK, task)
        .env("LD_PRELOAD", library())
        .env(PLAN_VARIABLE, plan.encode())
        .spawn()
        .expect("started");
    let pid = Pid::from_raw(program.id() as i32).expect("a process id");
    let watched = pidfd_open(pid, PidfdFlags::empty()).expect("watched");
    let mut swapper = Swapper::new(Store::new(remote, slots), LIMIT);
    let result = swapper.serve(&listener, &watched);
    let status = program.wait().expect("ended");
    Some(Ran { status, result, figures: swapper.figures() })
}

fn passes(task: &str) -> Option<Figures> {
    passes_with(task, Map::default(), PLENTY)
}

fn passes_with(task: &str, remote: Map, slots: u64) -> Option<Figures> {
    let ran = run(task, remote, slots)?;
    assert!(
        ran.result.is_ok() && ran.status.success(),
        "{:?} {:?}\n{}",
        ran.result.err(),
        ran.status,
        ran.figures
    );
    // A child that was forked has a few more until it has said hello.
    let more = if matches!(task, "fork" | "waits") { 64 } else { 0 };
    assert!(
        ran.figures.most <= LIMIT as u64 + more && ran.figures.beyond <= more,
        "the limit held:\n{}",
        ran.figures
    );
    Some(ran.figures)
}

#[test]
fn what_is_written_is_read_in_any_order() {
    let Some(figures) = passes("fill") else { return };
    assert!(figures.store.loads > USED as u64 / 2 && figures.store.stores > USED as u64 / 2, "{figures}");
    assert!(figures.store.unchanged > 0 && figures.returned > 0, "{figures}");
}

#[test]
fn threads_write_while_pages_leave() {
    passes("threads");
}

/// Has the kernel compact all memory, again and again, until this is dropped. `None`: it may not be asked.
struct Compaction(Arc<AtomicBool>, Option<std::thread::JoinHandle<()>>);

impl Compaction {
    fn start() -> Option<Self> {
        let at = "/proc/sys/vm/compact_memory";
        std::fs::write(at, "1").ok()?;
        let is_over = Arc::new(AtomicBool::new(false));
        let own = is_over.clone();
        let compacting = std::thread::spawn(move || {
            while !own.load(Ordering::Relaxed) {
                std::fs::write(at, "1").expect("as before");
            }
        });
        Some(Self(is_over, Some(compacting)))
    }
}

impl Drop for Compaction {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        if let Some(compacting) = self.1.take() {
            // A panic has been printed.
            let _ = compacting.join();
        }
    }
}

/// UFFDIO_MOVE said EEXIST of pages that it had moved, while the kernel migrated them: they were zeros afterwards, or ended the program.
#[test]
fn pages_that_the_kernel_migrates_meanwhile_are_not_lost() {
    let Some(_compaction) = Compaction::start() else {
        eprintln!("skipped: the kernel may not be asked to compact memory");
        return;
    };
    for _ in 0..5 {
        for task in ["fill", "threads"] {
            if passes(task).is_none() {
                return;
            }
        }
    }
}

#[test]
fn a_fork_has_memory_of_its_own() {
    let Some(figures) = passes("fork") else { return };
    assert!(figures.forks >= 3, "{figures}");
}

#[test]
fn forked_processes_with_the_same_addresses_are_told_apart() {
    let Some(figures) = passes("stranger") else { return };
    assert_eq!(figures.forks, 2, "{figures}");
    let Some(figures) = passes("crowd") else { return };
    assert_eq!(figures.forks, CROWD * (CROWD + 1), "{figures}");
}

#[test]
fn memory_is_grown_moved_and_given_up() {
    passes("moves");
}

#[test]
fn a_wrong_byte_ends_the_program() {
    let Some(ran) = run("fill", Map { wrong: Some(50), ..Map::default() }, PLENTY) else { return };
    assert!(matches!(ran.result, Err(SwapError::Store(StoreError::Wrong))));
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&ran.status), Some(9));
}

#[test]
fn a_full_node_or_swap_space_ends_the_program() {
    let few = Map { room: Some(USED / 2), ..Map::default() };
    for (remote, slots) in [(few, PLENTY), (Map::default(), USED as u64 / 2)] {
        let Some(ran) = run("fill", remote, slots) else { return };
        assert!(matches!(ran.result, Err(SwapError::Store(StoreError::Full(_)))));
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&ran.status), Some(9));
    }
}

#[test]
fn what_is_out_at_once_has_to_fit_and_not_all_that_ever_left() {
    for task in ["fill", "threads"] {
        let Some(plenty) = passes(task) else { return };
        assert!(plenty.store.most > FEW && plenty.store.passed_on == 0, "{task}\n{plenty}");
        let Some(few) = passes_with(task, Map::default(), FEW) else { return };
        assert!(few.store.most == FEW && few.store.passed_on > 0, "{task}\n{few}");
        let node = Map { room: Some(FEW as usize), ..Map::default() };
        let Some(node) = passes_with(task, node, PLENTY) else { return };
        assert!(node.store.most == FEW && node.store.passed_on > 0, "{task}\n{node}");
        let [plenty, few, node] = [plenty, few, node].map(|figures| figures.store.requests_a_page());
        assert!(few.max(node) <= plenty, "a place is passed on by no request: {plenty}, {few}, {node}");
    }
}

#[test]
fn a_library_of_another_build_than_the_command_says_so() {
    // The next version's plan, or the one before it had a version.
    for plan in ["cuttlsw999 1 1 /nowhere", "67108864 268435456 /nowhere"] {
        let program = Command::new("true").env("LD_PRELOAD", library()).env(PLAN_VARIABLE, plan).output();
        let program = program.expect("started");
        let said = String::from_utf8_lossy(&program.stderr).into_owned();
        assert_eq!(program.status.code(), Some(127), "{said}");
        assert!(
            said.starts_with("cuttlefs swap: libcuttlefs_swapped.so") && said.contains("different builds"),
            "{said}"
        );
    }
}

/// What a process does; nothing in this one.
#[test]
fn task() {
    match std::env::var(TASK).as_deref() {
        Ok("fill") => fill(),
        Ok("threads") => threads(),
        Ok("fork") => fork(),
        Ok("stranger") => stranger(),
        Ok("crowd") => crowd(CROWD, true),
        Ok("moves") => moves(),
        Ok("full") => descriptors::full(),
        Ok("few") => descriptors::few(),
        Ok("waits") => descriptors::waits_in_fork(),
        Ok(other) => panic!("{other} is no task"),
        Err(_) => {}
    }
}

/// A word that depends on its place.
fn word(at: usize, salt: u64) -> u64 {
    (at as u64 ^ salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

const WORDS: usize = PAGE / 8;

fn fill() {
    let mut words = vec![0u64; USED * WORDS];
    for (at, one) in words.iter_mut().enumerate() {
        *one = word(at, 1);
    }
    // Every word once, far from each other: a step that has no divisor in common with the length.
    let mut at = 0;
    for _ in (0..words.len()).step_by(16) {
        at = (at + 1_000_003) % words.len();
        assert_eq!(words[at], word(at, 1), "word {at}");
    }
    // What is read again soon after it left comes back without the node.
    for at in (0..words.len()).rev() {
        assert_eq!(words[at], word(at, 1), "word {at}");
    }
}

fn threads() {
    const THREADS: usize = 4;
    let mut words = vec![0u64; USED * WORDS];
    let part = words.len() / THREADS;
    std::thread::scope(|scope| {
        for (number, words) in words.chunks_mut(part).enumerate() {
            scope.spawn(move || {
                for round in 1..4u64 {
                    // Neighbours' pages are in between: a page is written again and again while it leaves.
                    for at in 0..words.len() {
                        words[at] = words[at].wrapping_add(word(at, number as u64));
                        if at.is_multiple_of(WORDS) {
                            let back = at - at.min(3 * WORDS);
                            assert_eq!(
                                words[back],
                                word(back, number as u64).wrapping_mul(round),
                                "word {back}"
                            );
                        }
                    }
                }
            });
        }
    });
    // One page that all of them wrote at once, beside pages that push it out.
    let shared: Vec<std::sync::atomic::AtomicU64> = (0..WORDS).map(|_| Default::default()).collect();
    std::thread::scope(|scope| {
        for number in 0..THREADS {
            let (shared, words) = (&shared, &words);
            scope.spawn(move || {
                for round in 0..2000 {
                    shared[number].fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    std::hint::black_box(words[(round * 7919 + number * part) * WORDS % words.len()]);
                }
            });
        }
    });
    for count in &shared[..THREADS] {
        assert_eq!(count.load(std::sync::atomic::Ordering::Relaxed), 2000);
    }
}

/// Forks, and has the child check, change and check. Returns when it has ended well.
fn child(words: &mut [u64], salt: u64, inner: bool) {
    // SAFETY: the child touches this memory alone, and ends by `_exit`.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "forked");
    if pid == 0 {
        let is_right = |words: &[u64], salt| words.iter().enumerate().all(|(at, one)| *one == word(at, salt));
        let mut is_good = is_right(words, salt);
        for (at, one) in words.iter_mut().enumerate() {
            *one = word(at, salt + 1);
        }
        if inner {
            child(words, salt + 1, false);
        }
        // A child with a child of its own is a parent, which changes its words once more.
        is_good &= is_right(words, if inner { salt + 8 } else { salt + 1 });
        // SAFETY: ends the process.
        unsafe { libc::_exit(i32::from(!is_good)) };
    }
    // Meanwhile this process changes its own.
    for (at, one) in words.iter_mut().enumerate() {
        *one = word(at, salt + 7);
    }
    ends_well(pid);
    assert!(
        words.iter().enumerate().all(|(at, one)| *one == word(at, salt + 7)),
        "the parent saw its own words"
    );
}

fn fork() {
    let mut words = vec![0u64; USED / 2 * WORDS];
    for (at, one) in words.iter_mut().enumerate() {
        *one = word(at, 20);
    }
    child(&mut words, 20, true);
    // Pages that are shared since the fork, and only read, leave too.
    child(&mut words, 27, false);
}

/// Waits for a child, which ends with 0 if it saw its own memory.
fn ends_well(pid: libc::pid_t) {
    let mut status = 0;
    // SAFETY: the status is this function's own.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert_eq!(status, 0, "the child ended well");
}

/// A child that is made past the C library never says hello. Another one is forked beside it, and nobody takes one for the other: the first has maps
/// wherever the other one's library may map something, and sees nothing there.
fn stranger() {
    const PAGES: usize = 1024;
    let words = vec![word(0, 30); WORDS];
    let (parents, strangers) = std::os::unix::net::UnixStream::pair().expect("a pair");
    let tell = |mut end: &std::os::unix::net::UnixStream| std::io::Write::write_all(&mut end, b"x").is_ok();
    let hear =
        |mut end: &std::os::unix::net::UnixStream| std::io::Read::read_exact(&mut end, &mut [0]).is_ok();
    // SAFETY: as fork(2); the child gets by with memory that it has, or maps itself, and ends by `_exit`.
    let stranger = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } as libc::pid_t;
    assert!(stranger >= 0, "made");
    if stranger == 0 {
        let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let mut pages = [0usize; PAGES];
        for page in &mut pages {
            // SAFETY: a new mapping, which nobody unmaps. Page by page fills the gaps, the highest first.
            *page = unsafe { libc::syscall(libc::SYS_mmap, 0, PAGE, rights, flags, -1, 0) } as usize;
        }
        // With the last process that has it the wait ends, too.
        drop(parents);
        let is_told = tell(&strangers) && hear(&strangers);
        // SAFETY: it was mapped above.
        let is_untouched = pages.iter().all(|page| unsafe { *(*page as *const u64) } == 0);
        // SAFETY: ends the process.
        unsafe { libc::_exit(i32::from(!(is_told && is_untouched))) };
    }
    drop(strangers);
    assert!(hear(&parents), "it has its maps");
    // SAFETY: the child looks at memory, and ends by `_exit`.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let is_right = words.iter().all(|one| *one == word(0, 30));
        // SAFETY: ends the process.
        unsafe { libc::_exit(i32::from(!is_right)) };
    }
    ends_well(pid);
    assert!(tell(&parents), "it waits");
    ends_well(stranger);
}

/// Children of each process of the crowd.
const CROWD: u64 = 8;

/// Forks children that all are there at once, and fork at once if they are to.
fn crowd(count: u64, inner: bool) {
    let words = vec![word(0, count); WORDS];
    let fork = |_| {
        // SAFETY: the child looks at memory, forks, and ends by `_exit`.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "forked");
        if pid == 0 {
            if inner {
                crowd(count, false);
            }
            let is_right = words.iter().all(|one| *one == word(0, count));
            // SAFETY: ends the process.
            unsafe { libc::_exit(i32::from(!is_right)) };
        }
        pid
    };
    let children: Vec<libc::pid_t> = (0..count).map(fork).collect();
    children.into_iter().for_each(ends_well);
}

/// Anonymous memory, by the C library's function.
fn map(pages: usize) -> *mut u64 {
    let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping.
    let address = unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE, rights, flags, -1, 0) };
    assert_ne!(address, libc::MAP_FAILED);
    address.cast()
}

fn put(at: *mut u64, words: std::ops::Range<usize>, salt: u64) {
    // SAFETY: callers have mapped the words.
    words.for_each(|index| unsafe { at.add(index).write(word(index, salt)) });
}

fn look(at: *mut u64, words: std::ops::Range<usize>, wanted: impl Fn(usize) -> u64) {
    // SAFETY: callers have mapped the words.
    words.for_each(|index| assert_eq!(unsafe { at.add(index).read() }, wanted(index), "word {index}"));
}

fn moves() {
    let pages = LIMIT * 2;
    let all = pages * WORDS;
    let by = |salt| move |index| word(index, salt);
    let zero = |_| 0;
    let first = map(pages);
    put(first, 0..all, 1);
    // SAFETY: (of all calls below) the ranges are those that were mapped here, and what is given up is not looked at but for zeros.
    unsafe {
        // Given up in the middle: zeros, and the rest is there.
        let middle = first.add(all / 4).cast();
        assert_eq!(libc::madvise(middle, pages / 2 * PAGE, libc::MADV_DONTNEED), 0);
        look(first, 0..all / 4, by(1));
        look(first, all / 4..all * 3 / 4, zero);
        look(first, all * 3 / 4..all, by(1));
        put(first, all / 4..all * 3 / 4, 1);
        assert_eq!(libc::madvise(first.cast(), PAGE, libc::MADV_FREE), 0);
        // It could not be kept, and a child would see what it must not.
        let wiped = libc::madvise(middle, PAGE, libc::MADV_WIPEONFORK);
        assert_eq!((wiped, std::io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EINVAL)));
        look(first, 0..WORDS, zero);
        put(first, 0..WORDS, 1);
        // Grown, in place or elsewhere.
        let _behind = map(1);
        let grown =
            libc::mremap(first.cast(), pages * PAGE, 2 * pages * PAGE, libc::MREMAP_MAYMOVE).cast::<u64>();
        assert_ne!(grown.cast(), libc::MAP_FAILED);
        look(grown, 0..all, by(1));
        look(grown, all..2 * all, zero);
        put(grown, all..2 * all, 1);
        // Shortened, and what was behind is new when it is mapped again.
        assert_eq!(libc::mremap(grown.cast(), 2 * pages * PAGE, pages * PAGE, 0), grown.cast());
        look(grown, 0..all, by(1));
        let second = map(pages);
        look(second, 0..all, zero);
        put(second, 0..all, 2);
        // Moved past the library: the kernel tells.
        let target = map(pages);
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let moved = libc::syscall(libc::SYS_mremap, second, pages * PAGE, pages * PAGE, flags, target);
        assert_eq!(moved, target as i64);
        look(target, 0..all, by(2));
        look(grown, 0..all, by(1));
        assert_eq!(libc::munmap(grown.cast(), pages * PAGE), 0);
        // Mapped anew over what is there.
        let (rights, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED);
        assert_eq!(libc::mmap(target.cast(), pages * PAGE, rights, flags, -1, 0), target.cast());
        look(target, 0..all, zero);
        // The kernel reads and writes memory that left.
        put(target, 0..all, 3);
        let file = libc::memfd_create(c"swapped".as_ptr(), 0);
        assert_eq!(libc::write(file, target.cast(), all * 8), (all * 8) as isize);
        let copy = map(pages);
        assert_eq!(libc::pread(file, copy.cast(), all * 8, 0), (all * 8) as isize);
        look(copy, 0..all, by(3));
        look(target, 0..all, by(3));
    }
    // malloc(3)'s memory moves, too.
    let mut words: Vec<u64> = Vec::new();
    for at in 0..USED * WORDS {
        words.push(word(at, 4));
    }
    words.truncate(all);
    words.shrink_to_fit();
    assert!(words.iter().enumerate().all(|(at, one)| *one == word(at, 4)));
    let zeros = vec![0u64; all];
    assert!(zeros.iter().all(|one| *one == 0));
}
