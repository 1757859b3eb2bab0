//! Queues.

use crate::errors::{invalid, told};
use crate::layout;
use crate::pointers::{free, give, handle, handle_alone, outcome};
use cuttlefs_client::native::{Buffer, Completion, DEPTH_MAX, Done, File, Post, Queue, Session};
use libc::c_int;
use std::os::fd::AsRawFd;
use std::time::Duration;

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_queue_new(
    session: *const Session,
    depth: usize,
    queue: *mut *mut Queue,
) -> c_int {
    // SAFETY: the caller's.
    let make = || unsafe {
        let session = handle(session)?;
        give(queue, Queue::new(session, depth).map_err(|error| told(&error))?)
    };
    outcome(make())
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_queue_free(queue: *mut Queue) {
    // SAFETY: the caller's.
    unsafe { free(queue) }
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_queue_fd(queue: *const Queue) -> c_int {
    // SAFETY: the caller's.
    match unsafe { handle(queue) } {
        Ok(queue) => queue.event_fd().as_raw_fd(),
        Err(errno) => errno,
    }
}

/// Posts one request.
///
/// # Safety
/// The pointers are handles or null; only this thread uses the queue.
unsafe fn post(
    queue: *mut Queue,
    token: u64,
    file: *const File,
    buffer: Option<*const Buffer>,
    request: impl for<'q> FnOnce(&'q File, Option<&'q Buffer>) -> Option<Post<'q>>,
) -> c_int {
    // SAFETY: the caller's.
    let post = || unsafe {
        let (queue, file) = (handle_alone(queue)?, handle(file)?);
        let buffer = buffer.map(|buffer| handle(buffer)).transpose()?;
        let request = request(file, buffer).ok_or_else(|| invalid("there is no buffer"))?;
        queue.post(&[(token, request)]).map_err(|error| told(&error))
    };
    outcome(post())
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_post_read(
    queue: *mut Queue,
    token: u64,
    file: *const File,
    offset: u64,
    buffer: *const Buffer,
    at: usize,
    len: usize,
) -> c_int {
    // SAFETY: the caller's.
    unsafe {
        post(queue, token, file, Some(buffer), |file, buffer| {
            buffer.map(|buffer| Post::Read { file, offset, buffer, at, len })
        })
    }
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_post_write(
    queue: *mut Queue,
    token: u64,
    file: *const File,
    offset: u64,
    buffer: *const Buffer,
    at: usize,
    len: usize,
) -> c_int {
    // SAFETY: the caller's.
    unsafe {
        post(queue, token, file, Some(buffer), |file, buffer| {
            buffer.map(|buffer| Post::Write { file, offset, buffer, at, len })
        })
    }
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_post_append(
    queue: *mut Queue,
    token: u64,
    file: *const File,
    buffer: *const Buffer,
    at: usize,
    len: usize,
) -> c_int {
    // SAFETY: the caller's.
    unsafe {
        post(queue, token, file, Some(buffer), |file, buffer| {
            buffer.map(|buffer| Post::Append { file, buffer, at, len })
        })
    }
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_post_compare_swap(
    queue: *mut Queue,
    token: u64,
    file: *const File,
    offset: u64,
    expect: u64,
    swap: u64,
) -> c_int {
    // SAFETY: the caller's.
    unsafe {
        post(queue, token, file, None, |file, _| Some(Post::CompareSwap { file, offset, expect, swap }))
    }
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_post_fetch_add(
    queue: *mut Queue,
    token: u64,
    file: *const File,
    offset: u64,
    add: u64,
) -> c_int {
    // SAFETY: the caller's.
    unsafe { post(queue, token, file, None, |file, _| Some(Post::FetchAdd { file, offset, add })) }
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_post_sync(queue: *mut Queue, token: u64, file: *const File) -> c_int {
    // SAFETY: the caller's.
    unsafe { post(queue, token, file, None, |file, _| Some(Post::Sync { file })) }
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_poll(
    queue: *mut Queue,
    completions: *mut layout::Completion,
    max: usize,
) -> c_int {
    // SAFETY: the caller's.
    unsafe { take(queue, completions, max, Duration::ZERO) }
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_wait(
    queue: *mut Queue,
    completions: *mut layout::Completion,
    max: usize,
    timeout_ms: u32,
) -> c_int {
    // SAFETY: the caller's.
    unsafe { take(queue, completions, max, Duration::from_millis(timeout_ms.into())) }
}

/// # Safety
/// `queue` is a handle or null, and only this thread uses it; `completions` has room for `max`.
unsafe fn take(
    queue: *mut Queue,
    completions: *mut layout::Completion,
    max: usize,
    timeout: Duration,
) -> c_int {
    if completions.is_null() && max > 0 {
        return invalid("there is no place for the completions");
    }
    // SAFETY: the caller's.
    let queue = match unsafe { handle_alone(queue) } {
        Ok(queue) => queue,
        Err(errno) => return errno,
    };
    let mut ends = Vec::new();
    queue.wait(&mut ends, max.min(DEPTH_MAX), timeout);
    for (index, end) in ends.iter().enumerate() {
        // SAFETY: there are at most `max`, for which the caller has room.
        unsafe { completions.add(index).write(told_of(end)) };
    }
    // At most the depth of a queue.
    ends.len() as c_int
}

fn told_of(end: &Completion) -> layout::Completion {
    let (result, offset) = match &end.result {
        Ok(Done::Read(len)) => (*len as i64, 0),
        Ok(Done::Written { offset, len }) => (*len as i64, *offset),
        Ok(Done::Old(old)) => (8, *old),
        Ok(Done::Synced) => (0, 0),
        Err(error) => (told(error).into(), 0),
    };
    layout::Completion { token: end.token, result, offset }
}
