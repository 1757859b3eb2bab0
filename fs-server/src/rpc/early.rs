//! Completions that find no connection at their worker.
//!
//! The queue pair of a connection reports to its worker from its handshake on, and the acceptor hands the connection over a moment later. What comes
//! in between is kept (`Early`) until then. Over shared receives messages can also come behind the end: those of a connection that is gone are
//! told from those of one that is to come by its name (`Gone`), for a queue pair's number is not given out again.

use super::connection::RECEIVES;
use crate::rnics::RnicIndex;
use cuttlefs_common::ids::QpNumber;
use std::collections::HashMap;

/// A connection: its RNIC, and its queue pair there.
pub(super) type Name = (RnicIndex, QpNumber);

/// Completions kept for a connection: those of its own receives, or, of shared ones, as many as end it.
const EARLY_MAX: usize = RECEIVES + 1;
/// Sweeps that completions are kept for a connection, which is never handed over if its handshake failed at the last step; and that the name of one
/// is kept that is gone.
const PATIENCE: u32 = 60;

/// What came for connections that were not handed over yet: bounded by the places for connections.
pub(super) struct Early<C>(HashMap<Name, (Vec<C>, u32)>);

impl<C> Default for Early<C> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<C> Early<C> {
    /// Keeps a completion for its connection. A further one is dropped: its peer does not keep to the protocol, or says it again.
    pub(super) fn keep(&mut self, name: Name, came: C) {
        let (kept, _) = self.0.entry(name).or_insert_with(|| (Vec::new(), 0));
        if kept.len() < EARLY_MAX {
            kept.push(came);
        }
    }

    /// The connection is here: what came for it, in order.
    pub(super) fn take(&mut self, name: Name) -> Vec<C> {
        self.0.remove(&name).map_or_else(Vec::new, |(kept, _)| kept)
    }

    /// A second has passed.
    pub(super) fn sweep(&mut self) {
        self.0.retain(|_, (_, sweeps)| is_awaited(sweeps));
    }
}

/// Names of connections with shared receives that are gone: bounded by how many are made in `PATIENCE` seconds.
#[derive(Default)]
pub(super) struct Gone(HashMap<Name, u32>);

impl Gone {
    /// What still comes for this connection is for nobody.
    pub(super) fn note(&mut self, name: Name) {
        self.0.insert(name, 0);
    }

    /// Whether the connection was here, and is gone.
    pub(super) fn has(&self, name: Name) -> bool {
        self.0.contains_key(&name)
    }

    /// A second has passed.
    pub(super) fn sweep(&mut self) {
        self.0.retain(|_, sweeps| is_awaited(sweeps));
    }
}

/// One sweep more.
fn is_awaited(sweeps: &mut u32) -> bool {
    *sweeps += 1;
    *sweeps <= PATIENCE
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Name = (RnicIndex(0), QpNumber(7));
    /// Of another RNIC, which numbers its queue pairs alike.
    const OTHER: Name = (RnicIndex(1), QpNumber(7));

    #[test]
    fn what_comes_early_waits_for_its_connection_in_order() {
        let mut early = Early::default();
        for came in 0..2 * EARLY_MAX {
            early.keep(ONE, came);
        }
        early.keep(OTHER, 100);
        assert_eq!(early.take(ONE), (0..EARLY_MAX).collect::<Vec<_>>(), "as many as end a connection");
        assert_eq!((early.take(ONE), early.take(OTHER)), (vec![], vec![100]));
    }

    #[test]
    fn a_connection_that_is_never_handed_over_is_forgotten() {
        let mut early = Early::default();
        early.keep(ONE, 1);
        (0..PATIENCE).for_each(|_| early.sweep());
        early.keep(ONE, 2);
        early.keep(OTHER, 3);
        early.sweep();
        assert_eq!((early.take(ONE), early.take(OTHER)), (vec![], vec![3]));
    }

    #[test]
    fn a_connection_that_is_gone_is_known_for_as_long_as_its_messages_may_come() {
        let mut gone = Gone::default();
        gone.note(ONE);
        assert!(gone.has(ONE) && !gone.has(OTHER));
        (0..PATIENCE).for_each(|_| gone.sweep());
        assert!(gone.has(ONE));
        gone.sweep();
        assert!(!gone.has(ONE));
    }
}
