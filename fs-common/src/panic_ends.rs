//! A panic in any thread or task ends the process.
//!
//! A panic is a broken invariant: the contents of the process's memory are not to be trusted. The process has many threads and tasks, and most of
//! them have no waiter. So a panic that ended only one of them would silently leave slots busy, locks held and background work undone. A process
//! that ends at once is the case that clients and disks are made for: a kill.
//!
//! # How it works
//! `install` puts a hook before all others: it runs at the panic, before anything unwinds, so that no `catch_unwind` of a library can swallow
//! it. It prints the usual report of a panic (thread, place, message), then aborts: SIGABRT.
//!
//! # The one exception
//! A database that is opened may be damaged in a way that its library panics on. That is a finding and no broken invariant, and nothing runs yet:
//! `survive` lets a call panic, in its own thread, and the caller reports the panic. (A test's program may open the files that crashes leave in
//! the same way.)

use std::any::Any;
use std::cell::Cell;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static SURVIVES: Cell<bool> = const { Cell::new(false) };
}

/// Lets every panic end this process from now on. Call it first in `main`; `program` is the name of the program.
pub fn install(program: &'static str) {
    let tell = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if is_survived() {
            return;
        }
        tell(panic);
        // Not by tracing: the panicking thread may be in the middle of tracing.
        let _ = writeln!(
            std::io::stderr(),
            "{program}: ends here, as if it was killed: the panic above is a fault of {program}"
        );
        std::process::abort();
    }));
}

fn is_survived() -> bool {
    SURVIVES.get()
}

/// Calls a function that may panic on damaged data, and survives its panic.
///
/// # Errors
/// The value of the panic.
pub fn survive<T>(call: impl FnOnce() -> T) -> Result<T, Box<dyn Any + Send>> {
    struct Surviving(bool);
    impl Drop for Surviving {
        fn drop(&mut self) {
            SURVIVES.set(self.0);
        }
    }
    let _surviving = Surviving(SURVIVES.replace(true));
    catch_unwind(AssertUnwindSafe(call))
}

/// Panics here if a test asks for it: the environment variable `CUTTLEFS_TEST_PANIC=PLACE:FILE` names the place, and a file that must exist by then.
/// Each kind of thread and of task has a place; tests check that a panic in each ends the process. Does nothing in release builds.
#[inline]
pub fn plant(place: &str) {
    #[cfg(debug_assertions)]
    planted::look(place);
    #[cfg(not(debug_assertions))]
    let _ = place;
}

#[cfg(debug_assertions)]
mod planted {
    use std::path::PathBuf;
    use std::sync::OnceLock;

    static ASKED: OnceLock<Option<(String, PathBuf)>> = OnceLock::new();

    pub(super) fn look(place: &str) {
        let asked = ASKED.get_or_init(|| {
            let asked = std::env::var("CUTTLEFS_TEST_PANIC").ok()?;
            let (place, file) = asked.split_once(':')?;
            Some((place.to_owned(), file.into()))
        });
        if let Some((asked, file)) = asked
            && asked == place
            && file.exists()
        {
            panic!("planted by a test in {place}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_survived_is_returned_and_others_are_not() {
        assert!(!is_survived());
        assert_eq!(survive(|| 7).ok(), Some(7));
        let panicked = survive(|| {
            assert!(is_survived());
            let elsewhere = std::thread::spawn(is_survived).join().expect("no panic");
            assert!(!elsewhere, "another thread's panic is not this call's");
            panic!("on purpose");
        });
        assert!(panicked.is_err() && !is_survived());
    }
}
