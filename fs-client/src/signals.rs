//! Which signals a thread blocks, for libraries that live in programs: handlers are the program's, and must not run in their threads, nor in the midst of
//! their work.

use libc::c_int;

/// A set of signals, as the kernel has it: a bit each.
#[derive(Clone, Copy)]
pub struct Signals(u64);

impl Signals {
    /// All, but the C library's own by which all threads change their user: the thread that changes it would wait.
    pub const ALL: Self = Self(u64::MAX).without(33);
    /// Those that others send. What a thread's own instructions raise would end the program, if it was blocked.
    pub const SENT: Self = Self::ALL
        .without(libc::SIGSEGV)
        .without(libc::SIGBUS)
        .without(libc::SIGFPE)
        .without(libc::SIGILL)
        .without(libc::SIGTRAP)
        .without(libc::SIGSYS);

    const fn without(self, signal: c_int) -> Self {
        Self(self.0 & !(1 << (signal - 1)))
    }
}

/// Blocks these signals of the calling thread, too. Returns those that were blocked before.
pub fn block(signals: Signals) -> Signals {
    let mut before = Signals(0);
    // Not by the C library: it leaves out the signal by which threads are cancelled.
    // SAFETY: both sets are this function's own, and have the kernel's eight bytes.
    unsafe {
        let (how, set, old) = (libc::SIG_BLOCK, &raw const signals.0, &raw mut before.0);
        libc::syscall(libc::SYS_rt_sigprocmask, how, set, old, size_of::<u64>());
    }
    before
}

/// Blocks these signals and no others. Handlers of those that came meanwhile run now.
pub fn block_only(before: Signals) {
    // SAFETY: the kernel reads eight bytes.
    unsafe {
        let (how, set, old) = (libc::SIG_SETMASK, &raw const before.0, std::ptr::null_mut::<u64>());
        libc::syscall(libc::SYS_rt_sigprocmask, how, set, old, size_of::<u64>());
    }
}
