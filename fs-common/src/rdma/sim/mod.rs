//! The simulated RNIC: both ends of every connection in one process, without sockets, threads or time.
//!
//! Owns the network (`SimNetwork`): its listeners, its registered memory, the messages under way. One-sided requests
//! execute when they are posted; messages are delivered when the receiver polls. A thread that waits for a completion
//! runs the *pump*, a closure of its own that drives everything else in that thread; so a server and several clients run
//! whole in one thread, and the order of everything follows from one seed.
//!
//! Connections break when told to (`SimNetwork::cut_after`), and the message being sent is lost. Under `set_weather` they
//! break by chance, and messages are late or come twice.
//!
//! The actions of the accepting side are events of its life, if it is given one (`SimNetwork::set_server_life`): when the life is over, that side
//! takes and sends nothing more.
//!
//! # Invariants
//! Those of the verbs API (`rdma/verbs/mod.rs`); keys, ranges and rights are checked as by the other providers.

mod link;
mod queue;
mod shared_receives;
mod window;

pub use link::{Cut, SimDevice, SimNetwork, Translation};

use std::cell::RefCell;

thread_local! {
    static PUMP: RefCell<Option<Box<dyn FnMut() -> bool>>> = const { RefCell::new(None) };
}

/// Sets the closure that this thread runs while it waits: one step of everything else; `false` if there was nothing to do.
pub fn set_pump(pump: impl FnMut() -> bool + 'static) {
    PUMP.with_borrow_mut(|slot| *slot = Some(Box::new(pump)));
}

/// Drops this thread's pump, and everything that it owns.
pub fn clear_pump() {
    let pump = PUMP.with_borrow_mut(Option::take);
    drop(pump);
}

/// Runs this thread's pump once; `false` if it did nothing, or there is none. The pump is taken out while it runs, so it must not wait for itself.
pub fn pump() -> bool {
    let Some(mut pump) = PUMP.with_borrow_mut(Option::take) else { return false };
    let progressed = pump();
    PUMP.with_borrow_mut(|slot| {
        if slot.is_none() {
            *slot = Some(pump);
        }
    });
    progressed
}
