//! Which descriptors the programs that this process starts inherit. The standard library opens its own ones so that nobody does; those that this process
//! has from the program that started it (a shell's `9>lock`) go on to its children, unless they are kept here.

use std::io::Error;

/// Behind standard input, output and error.
const FIRST: libc::c_uint = 3;

/// Keeps all descriptors of this process but the standard ones from the programs that it starts from now on. A process that stays in the background must
/// not hold what its caller's shell had open: a lock by `flock 9`, a pipe whose reader waits for the end. A kernel before 5.11 cannot do that; a warning
/// says so.
pub(crate) fn keep_from_children() {
    // SAFETY: touches no memory and closes nothing: it sets the flag by which exec(2) closes a descriptor in the new program.
    let done =
        unsafe { libc::syscall(libc::SYS_close_range, FIRST, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    if done != 0 {
        let error = Error::last_os_error();
        tracing::warn!(
            "background processes keep the files open that this program was started with: {error}"
        );
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

    #[test]
    fn what_a_shell_left_open_is_not_passed_on() {
        let (read, write) = rustix::pipe::pipe().expect("a pipe");
        for end in [&read, &write] {
            fcntl_setfd(end, FdFlags::empty()).expect("the flag");
        }
        super::keep_from_children();
        for end in [&read, &write] {
            assert_eq!(fcntl_getfd(end).expect("the flag"), FdFlags::CLOEXEC);
        }
        assert_eq!(rustix::io::write(&write, b"x"), Ok(1), "it is still open here");
    }
}
