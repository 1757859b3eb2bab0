//! The places of a file's pages in the server's pool, and moves to fewer of them.

use crate::errors::{invalid, told};
use crate::pointers::{handle, number};
use cuttlefs_client::native::{File, FilePage};
use libc::c_int;

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_runs(file: *const File) -> i64 {
    // SAFETY: the caller's.
    let file = unsafe { handle(file) };
    number(file.and_then(|file| file.runs().map_err(|error| told(&error))))
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_defragment_step(
    file: *const File,
    page: *mut u64,
    moved_pages: *mut u64,
) -> c_int {
    if page.is_null() || moved_pages.is_null() {
        return invalid("there is no place for the next page, or for the pages that were moved");
    }
    // SAFETY: the caller's; the places were checked.
    let step = || unsafe {
        let moved = handle(file)?.defragment_step(FilePage(page.read())).map_err(|error| told(&error))?;
        moved_pages.write(moved_pages.read().saturating_add(moved.pages));
        let Some(next) = moved.next else { return Ok(false) };
        page.write(next.0);
        Ok(true)
    };
    match step() {
        Ok(is_more) => is_more.into(),
        Err(errno) => errno,
    }
}
