//! The check whether a thread's caller still waits for its request.
//!
//! A request is handled by one thread from beginning to end, and while the server is away it waits in many places. As long as it has
//! sent nothing that the server may have done, it need not wait: `is_interrupted` says so, and the request ends with `Interrupted`.
//! A request that was sent goes on until its answer is there, even if no caller wants it: a slot's request is retransmitted until it
//! is answered, or the slot would be lost, and the outcome unknown.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

/// A request that may be given up.
pub trait Interruptible: Send + Sync {
    /// Whether the caller does not want to wait any more. Once true, it stays true.
    fn is_interrupted(&self) -> bool;
}

thread_local! {
    static REQUEST: RefCell<Option<Arc<dyn Interruptible>>> = const { RefCell::new(None) };
    static WHOLE: Cell<u32> = const { Cell::new(0) };
}

/// Runs `handle` for this request: meanwhile `is_interrupted` checks it.
pub fn handling<T>(request: Arc<dyn Interruptible>, handle: impl FnOnce() -> T) -> T {
    struct Done;
    impl Drop for Done {
        fn drop(&mut self) {
            REQUEST.set(None);
        }
    }
    REQUEST.set(Some(request));
    let _done = Done;
    handle()
}

/// Whether the calling thread's request was given up and may end here.
pub(crate) fn is_interrupted() -> bool {
    WHOLE.get() == 0
        && REQUEST.with_borrow(|request| request.as_ref().is_some_and(|request| request.is_interrupted()))
}

/// While this lives, the calling thread's request cannot end as interrupted, because a part of it is done.
pub(crate) struct Whole(());

impl Whole {
    pub(crate) fn begin() -> Self {
        WHOLE.set(WHOLE.get() + 1);
        Self(())
    }
}

impl Drop for Whole {
    fn drop(&mut self) {
        WHOLE.set(WHOLE.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct GivenUp;

    impl Interruptible for GivenUp {
        fn is_interrupted(&self) -> bool {
            true
        }
    }

    #[test]
    fn only_the_request_of_this_thread_counts_and_what_is_begun_is_finished() {
        assert!(!is_interrupted());
        handling(Arc::new(GivenUp), || {
            assert!(is_interrupted());
            let whole = Whole::begin();
            assert!(!is_interrupted());
            drop(whole);
            assert!(is_interrupted());
            std::thread::spawn(|| assert!(!is_interrupted())).join().expect("another thread");
        });
        assert!(!is_interrupted());
    }
}
