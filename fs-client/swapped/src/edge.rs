//! The functions of the C library that are replaced: mmap(2), munmap(2), mremap(2) and madvise(2). What is not of the arena goes to the kernel as it is.

use crate::arena::{ARENA, Arena};
use cuttlefs_client::swap::wire::PAGE;
use libc::{c_int, c_long, c_void, off_t, size_t};

#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

extern "C" fn begin() {
    crate::begin::begin();
}

/// Flags of mmap(2) that change nothing of what memory is: the others are left to the kernel.
const PLAIN: c_int =
    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_POPULATE | libc::MAP_NONBLOCK;

fn set_errno(errno: c_int) {
    // SAFETY: the calling thread's own variable.
    unsafe { *libc::__errno_location() = errno };
}

fn errno() -> c_int {
    // SAFETY: the calling thread's own variable.
    unsafe { *libc::__errno_location() }
}

fn whole_pages(len: usize) -> Option<usize> {
    len.checked_next_multiple_of(PAGE).filter(|len| *len > 0)
}

/// Memory of the arena.
fn take(len: usize, protection: c_int) -> Option<usize> {
    let len = whole_pages(len)?;
    let address = ARENA.with(|arena| arena.pages.take(len / PAGE).map(|page| arena.address(page)))??;
    // SAFETY: the range was just taken, so it is nobody else's.
    match unsafe { libc::mprotect(address as *mut c_void, len, protection) } {
        0 => Some(address),
        _ => {
            // Too many mappings: the kernel may have room elsewhere.
            ARENA.with(|arena| give_pages(arena, address, len));
            None
        }
    }
}

fn give_pages(arena: &mut Arena, address: usize, len: usize) {
    let first = arena.page(address);
    arena.pages.give(first, len / PAGE);
}

/// Gives memory of the arena back. It stays mapped, without rights and without pages.
///
/// # Safety
/// As munmap(2) of a range of the arena.
unsafe fn give(address: usize, len: usize) -> bool {
    let at = address as *mut c_void;
    // SAFETY: the caller gives the range up.
    let is_given = unsafe {
        libc::munlock(at, len);
        libc::syscall(libc::SYS_madvise, at, len, libc::MADV_DONTNEED) == 0
            && libc::mprotect(at, len, libc::PROT_NONE) == 0
    };
    if is_given {
        ARENA.with(|arena| give_pages(arena, address, len));
    }
    is_given
}

/// # Safety
/// As mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    address: *mut c_void,
    len: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    let is_plain = flags & !PLAIN == 0 && flags & libc::MAP_ANONYMOUS != 0 && flags & libc::MAP_PRIVATE != 0;
    if is_plain && protection & libc::PROT_EXEC == 0 {
        let before = errno();
        if let Some(taken) = take(len, protection) {
            set_errno(before);
            return taken as *mut c_void;
        }
        set_errno(before);
    }
    // A part of the arena that the program has, which it wants new: given up, and it stays where it is.
    let is_renewed = flags & !PLAIN == libc::MAP_FIXED
        && flags & libc::MAP_ANONYMOUS != 0
        && flags & libc::MAP_PRIVATE != 0
        && protection & libc::PROT_EXEC == 0;
    if is_renewed
        && let Some(whole) = whole_pages(len)
        && ARENA.with(|arena| arena.has(address as usize, whole)) == Some(true)
    {
        // SAFETY: the program has the range, and gives its contents up.
        let is_new = unsafe {
            libc::syscall(libc::SYS_madvise, address, whole, libc::MADV_DONTNEED) == 0
                && libc::mprotect(address, whole, protection) == 0
        };
        if is_new {
            return address;
        }
    }
    // SAFETY: the caller's.
    unsafe { libc::syscall(libc::SYS_mmap, address, len, protection, flags, fd, offset) as *mut c_void }
}

/// # Safety
/// As mmap(2). On machines with 64-bit words it is `mmap64`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    address: *mut c_void,
    len: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: the caller's.
    unsafe { mmap64(address, len, protection, flags, fd, offset) }
}

/// # Safety
/// As munmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(address: *mut c_void, len: size_t) -> c_int {
    if let Some(whole) = whole_pages(len)
        && ARENA.with(|arena| arena.has(address as usize, whole)) == Some(true)
    {
        // SAFETY: the caller's.
        return if unsafe { give(address as usize, whole) } { 0 } else { -1 };
    }
    // SAFETY: the caller's.
    unsafe { libc::syscall(libc::SYS_munmap, address, len) as c_int }
}

/// Grows memory of the arena, as memory that is read and written: where it is, or by a copy elsewhere.
///
/// # Safety
/// As mremap(2) of a range of the arena.
unsafe fn grow(old: usize, old_len: usize, new_len: usize, may_move: bool) -> *mut c_void {
    let more = new_len - old_len;
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let is_behind_free = ARENA.with(|arena| {
        let behind = arena.page(old + old_len);
        arena.pages.take_at(behind, more / PAGE)
    });
    if is_behind_free == Some(true) {
        // SAFETY: the range behind was just taken.
        if unsafe { libc::mprotect((old + old_len) as *mut c_void, more, rights) } == 0 {
            return old as *mut c_void;
        }
        ARENA.with(|arena| give_pages(arena, old + old_len, more));
    }
    if may_move && let Some(new) = take(new_len, rights) {
        // SAFETY: the caller has the old range, the new one was just taken, and is longer.
        unsafe {
            std::ptr::copy_nonoverlapping(old as *const u8, new as *mut u8, old_len);
            give(old, old_len);
        }
        return new as *mut c_void;
    }
    set_errno(libc::ENOMEM);
    libc::MAP_FAILED
}

/// # Safety
/// As mremap(2); the last argument is there with some flags only, and looked at with these only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    old: *mut c_void,
    old_len: size_t,
    new_len: size_t,
    flags: c_int,
    new: *mut c_void,
) -> *mut c_void {
    if flags & !libc::MREMAP_MAYMOVE == 0
        && let (Some(old_whole), Some(new_whole)) = (whole_pages(old_len), whole_pages(new_len))
        && ARENA.with(|arena| arena.has(old as usize, old_whole)) == Some(true)
    {
        if new_whole > old_whole {
            // SAFETY: the caller's.
            return unsafe { grow(old as usize, old_whole, new_whole, flags & libc::MREMAP_MAYMOVE != 0) };
        }
        // SAFETY: the caller gives up what is behind.
        let is_done =
            new_whole == old_whole || unsafe { give(old as usize + new_whole, old_whole - new_whole) };
        return if is_done { old } else { libc::MAP_FAILED };
    }
    // SAFETY: the caller's.
    unsafe { libc::syscall(libc::SYS_mremap, old, old_len, new_len, flags as c_long, new) as *mut c_void }
}

/// # Safety
/// As madvise(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(address: *mut c_void, len: size_t, advice: c_int) -> c_int {
    let is_swapped = || crate::begin::is_swapped(address as usize, len);
    let advice = match advice {
        // At some later time the kernel would take these pages away, without a word. It may do so at once.
        libc::MADV_FREE if is_swapped() => libc::MADV_DONTNEED,
        // A page that has left comes back in a child, too. Who is refused knows another way: old kernels have none either.
        libc::MADV_WIPEONFORK if is_swapped() => {
            set_errno(libc::EINVAL);
            return -1;
        }
        // Pages leave one by one.
        libc::MADV_HUGEPAGE if is_swapped() => return 0,
        advice => advice,
    };
    // SAFETY: the caller's.
    unsafe { libc::syscall(libc::SYS_madvise, address, len, advice) as c_int }
}
