//! Before the program runs: its heap and arena are laid out, and the swapper is told.

use crate::arena::{ARENA, Arena, Pages};
use crate::fork;
use crate::servant::{self, Start};
use cuttlefs_client::swap::wire::{Hello, OTHER_BUILD, PAGE, PLAN_VARIABLE, Plan, TAKE_MAX};
use libc::{c_int, c_void};
use std::io;
use std::sync::OnceLock;

/// What the library was told, and where memory lies. Set once, before the program runs.
static LAID: OnceLock<Laid> = OnceLock::new();

/// What every process forked from this one has, too.
pub(crate) struct Laid {
    pub(crate) plan: Plan,
    /// The heap and the arena.
    swapped: [(usize, usize); 2],
    badge: usize,
}

/// The least heap and arena to try for.
const LEAST: u64 = 1 << 20;
/// mallopt(3): malloc(3) gets memory by brk(2) alone, gives none of it back, and has one arena for all threads.
const MALLOC: [(c_int, c_int); 3] =
    [(libc::M_MMAP_MAX, 0), (libc::M_TRIM_THRESHOLD, -1), (libc::M_ARENA_MAX, 1)];

/// Whether a range touches memory that is swapped.
pub(crate) fn is_swapped(address: usize, len: usize) -> bool {
    LAID.get().is_some_and(|laid| {
        laid.swapped
            .iter()
            .any(|(start, size)| address < start + size && address.saturating_add(len) > *start)
    })
}

/// Lays out the memory of a program that is to be swapped. Ends one that cannot be.
pub(crate) fn begin() {
    // SAFETY: it reads a value that the kernel gave this process.
    if unsafe { libc::getauxval(libc::AT_SECURE) } != 0 {
        // The program has rights that whoever set its environment has not.
        return;
    }
    let Some(text) = std::env::var_os(PLAN_VARIABLE) else { return };
    let Some(plan) = Plan::parse(&text) else { end(OTHER_BUILD) };
    if let Err(error) = lay_out(plan) {
        let advice = match error.raw_os_error() {
            Some(libc::EPERM) => "; userfaultfd(2) with forks needs root, or CAP_SYS_PTRACE",
            Some(libc::EINVAL | libc::ENOSYS) => "; it needs Linux 6.8 or later",
            _ => "",
        };
        end(&format!("this program's memory cannot be swapped: {error}{advice}"));
    }
}

/// Says why, and ends the process.
pub(crate) fn end(reason: &str) -> ! {
    let text = format!("cuttlefs swap: {reason}\n");
    // SAFETY: the bytes live until the call returns. The program's own handlers are not run: none of it has begun, or it is a child of a fork.
    unsafe {
        libc::write(2, text.as_ptr().cast(), text.len());
        libc::_exit(127);
    }
}

fn lay_out(plan: Plan) -> io::Result<()> {
    let heap = heap(plan.heap_bytes);
    let arena = addresses(plan.arena_bytes)?;
    let badge = badge()?;
    let staging = staging_area()?;
    for (start, len) in [heap, arena] {
        // SAFETY: no byte changes: pages of the range are to be small ones.
        unsafe { libc::syscall(libc::SYS_madvise, start, len, libc::MADV_NOHUGEPAGE) };
    }
    let wide = |(start, len): (usize, usize)| (start as u64, len as u64);
    let hello =
        Hello::Begun { heap: wide(heap), arena: wide(arena), badge: badge as u64, staging: staging as u64 };
    servant::start(Start { plan: &plan, hello, staging_at: staging })?;
    let count = arena.1 / PAGE;
    let words = map(count.div_ceil(64) * 8, libc::PROT_READ | libc::PROT_WRITE)?;
    // SAFETY: the mapping was just made, is all zeros, and is never unmapped; nobody else knows it.
    let words = unsafe { std::slice::from_raw_parts_mut(words as *mut u64, count.div_ceil(64)) };
    // The fork's functions first: from then on the arena is in use.
    let _ = LAID.set(Laid { plan, swapped: [heap, arena], badge });
    fork::watch()?;
    ARENA.set(Arena { start: arena.0, len: arena.1, pages: Pages::new(words, count) });
    Ok(())
}

/// New memory of the kernel's.
pub(crate) fn map(len: usize, protection: c_int) -> io::Result<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let address =
        unsafe { libc::syscall(libc::SYS_mmap, std::ptr::null::<c_void>(), len, protection, flags, -1, 0) };
    if address == -1 { Err(io::Error::last_os_error()) } else { Ok(address as usize) }
}

/// The heap of malloc(3), as long as can be had: the range that nothing has touched yet.
fn heap(wanted: u64) -> (usize, usize) {
    let mut len = wanted;
    // SAFETY: options of the allocator; memory that is given back at once, untouched. What malloc(3) has of it stays its own.
    unsafe {
        for (option, value) in MALLOC {
            libc::mallopt(option, value);
        }
        while len >= LEAST {
            // The compiler must not see that nothing comes of it.
            let start = std::hint::black_box(libc::malloc(len as usize));
            if !start.is_null() {
                libc::free(start);
                let from = (start as usize).next_multiple_of(PAGE);
                let to = (start as usize + len as usize) / PAGE * PAGE;
                return (from, to.saturating_sub(from));
            }
            len /= 2;
        }
    }
    (0, 0)
}

/// Addresses without rights and without memory, as many as can be had.
fn addresses(wanted: u64) -> io::Result<(usize, usize)> {
    let mut len = wanted as usize / PAGE * PAGE;
    loop {
        match map(len, libc::PROT_NONE) {
            Ok(start) => return Ok((start, len)),
            Err(error) if (len as u64) < LEAST => return Err(error),
            Err(_) => len = len / 2 / PAGE * PAGE,
        }
    }
}

/// The page that shows each forked process its number: the kernel gives a child a new one, and the first look at it is a fault.
fn badge() -> io::Result<usize> {
    let page = map(PAGE, libc::PROT_READ)?;
    // SAFETY: the mapping was just made.
    match unsafe { libc::syscall(libc::SYS_madvise, page, PAGE, libc::MADV_WIPEONFORK) } {
        0 => Ok(page),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Where pages are moved to. No child has it.
pub(crate) fn staging_area() -> io::Result<usize> {
    let start = map(TAKE_MAX * PAGE, libc::PROT_READ | libc::PROT_WRITE)?;
    for advice in [libc::MADV_DONTFORK, libc::MADV_NOHUGEPAGE] {
        // SAFETY: the mapping was just made.
        unsafe { libc::syscall(libc::SYS_madvise, start, TAKE_MAX * PAGE, advice) };
    }
    Ok(start)
}

/// What was laid out before the program ran.
pub(crate) fn laid() -> Option<&'static Laid> {
    LAID.get()
}

impl Laid {
    /// The number of this process, which was forked and has not looked before.
    pub(crate) fn number(&self) -> u64 {
        // SAFETY: the page can be read, nobody unmaps it, and who else writes there is the swapper, once.
        unsafe { std::ptr::read_volatile(self.badge as *const u64) }
    }
}
