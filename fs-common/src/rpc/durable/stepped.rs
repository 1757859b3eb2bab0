//! A receiver in the calling thread, which moves when it is told to: for a simulation of everything in one thread.

use super::core::{Core, Taking};
use super::settler;
use crate::rdma::Listener;
use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Something that goes on beside the steps.
pub type Beside = Pin<Box<dyn Future<Output = ()>>>;

/// Steps a receiver ([`Receiver::stepped`](super::Receiver::stepped)). Welcoming, settling and letting go are tasks of
/// whoever steps it: they wait for what others do.
pub struct Stepper {
    core: Arc<Core>,
    listeners: Vec<Arc<dyn Listener>>,
    spawn: Box<dyn Fn(Beside)>,
    /// A task settles.
    settles: Rc<Cell<bool>>,
}

impl Stepper {
    /// How long heads wait to be moved if nothing asks for it: whoever steps says so with `look`.
    pub const IDLE: Duration = settler::IDLE;

    pub(super) fn new(
        core: Arc<Core>,
        listeners: Vec<Arc<dyn Listener>>,
        spawn: Box<dyn Fn(Beside)>,
    ) -> Self {
        Self { core, listeners, spawn, settles: Rc::default() }
    }

    /// It is time to look whether heads can be moved, and who was held back can go on.
    pub fn look(&self) {
        self.core.common.settling.is_due();
    }

    /// One step: a connection, a message, or the beginning of a settlement. `false` if there was nothing to do.
    pub fn step(&self) -> bool {
        if let Some(incoming) = self.listeners.iter().find_map(|listener| listener.accept().ok()) {
            self.core.take_in(incoming);
            return true;
        }
        let welcome = &mut |hello| {
            let core = self.core.clone();
            (self.spawn)(Box::pin(async move { core.greet(hello).await }));
        };
        let now = self.core.clock.monotonic();
        if self.core.take_some(&mut Taking::default(), 1, welcome) > 0 || self.core.close_silent(now) {
            return true;
        }
        if self.settles.get() || !self.core.common.settling.is_asked() {
            return false;
        }
        let Some(retire) = self.core.common.settling.take() else { return false };
        self.settles.set(true);
        let (core, settles) = (self.core.clone(), self.settles.clone());
        (self.spawn)(Box::pin(async move {
            core.settle_once(retire).await;
            settles.set(false);
        }));
        true
    }
}
