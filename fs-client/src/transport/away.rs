//! The server's absence, and the messages about it: one warning when it goes, one when it is back.
//!
//! It is away when no lane has a connection that stands. If only the lane of heartbeats cannot connect, calls go on over the others, and the
//! mount is *unheard*: its lease runs out as soon as nobody calls. That is a warning, too, and one when it is over.

use super::Link;
use cuttlefs_common::ids::SlotIndex;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long the lane of heartbeats cannot connect before that is said. A server that goes breaks all connections, and each stands until
/// somebody looks at it: that takes less.
const UNHEARD_TOLD_AFTER: Duration = Duration::from_secs(2);

/// A server does not answer, or refuses this mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Away {
    /// How long the server has been away.
    pub time: Duration,
    /// The error of the last attempt to connect.
    pub because: String,
}

/// A server's absence, as the link notes it.
pub(super) struct AwaySince {
    /// The time at which the absence began, by the link's clock.
    since: Duration,
    /// The error of the last attempt to connect.
    because: String,
}

/// The lane of heartbeats cannot connect, and others stand.
pub(super) struct UnheardSince {
    /// By the link's clock.
    since: Duration,
    /// What the last attempt to connect came to.
    because: String,
    is_told: bool,
}

impl Link {
    /// Whether the server was away at the last request.
    pub(crate) fn is_away(&self) -> bool {
        self.away.lock().is_some()
    }

    /// How long the server has been away, and why; `None` if it is not.
    pub(crate) fn away(&self) -> Option<Away> {
        let since = |away: &AwaySince| self.now().saturating_sub(away.since);
        self.away.lock().as_ref().map(|away| Away { time: since(away), because: away.because.clone() })
    }

    /// Since when heartbeats have not gone out, and why, though the server is not away.
    pub(crate) fn unheard(&self) -> Option<Away> {
        let since = |unheard: &UnheardSince| self.now().saturating_sub(unheard.since);
        let unheard = self.unheard.lock();
        let told = unheard.as_ref().filter(|unheard| unheard.is_told);
        told.map(|unheard| Away { time: since(unheard), because: unheard.because.clone() })
    }

    /// A lane has lost its connection, or could not make one.
    pub(super) fn note_failure(&self, slot: SlotIndex, error: &dyn std::fmt::Display) {
        if !self.others_stand(slot) {
            return self.note_away(error);
        }
        tracing::debug!(endpoint = %self.endpoint, %error, "a connection of several is gone or cannot be made; it is tried again");
        if slot == self.heartbeat_lane() {
            self.note_unheard(error);
        }
    }

    fn note_unheard(&self, error: &dyn std::fmt::Display) {
        if self.ending.load(Ordering::Acquire) {
            return;
        }
        let now = self.now();
        let mut unheard = self.unheard.lock();
        let known = unheard.get_or_insert_with(|| UnheardSince {
            since: now,
            because: String::new(),
            is_told: false,
        });
        if !known.is_told && now.saturating_sub(known.since) >= UNHEARD_TOLD_AFTER {
            tracing::warn!(
                endpoint = %self.endpoint,
                %error,
                "the connection for heartbeats cannot be made again, and is tried on; calls go on over others, but the session ends when none goes \
                 out for a lease"
            );
            known.is_told = true;
        }
        known.because = error.to_string();
    }

    fn note_away(&self, error: &dyn std::fmt::Display) {
        if self.ending.load(Ordering::Acquire) {
            return;
        }
        *self.unheard.lock() = None;
        let because = error.to_string();
        let mut away = self.away.lock();
        match &mut *away {
            Some(known) if known.because == because => {}
            // The reason has changed: a server that is back and refuses this mount needs other action than one that is gone.
            Some(known) => {
                tracing::warn!(endpoint = %self.endpoint, %error, "server is still away; operations wait");
                known.because = because;
            }
            None => {
                tracing::warn!(endpoint = %self.endpoint, %error, "server is away; operations wait until it is back");
                *away = Some(AwaySince { since: self.now(), because });
            }
        }
    }

    /// A lane has connected.
    pub(super) fn note_back(&self, slot: SlotIndex) {
        if slot == self.heartbeat_lane() && self.unheard.lock().take().is_some_and(|unheard| unheard.is_told)
        {
            tracing::warn!(endpoint = %self.endpoint, "the connection for heartbeats is there again");
        }
        if self.away.lock().take().is_some() {
            tracing::warn!(endpoint = %self.endpoint, "server is back; operations go on");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions};
    use cuttlefs_common::world::ManualClock;
    use std::sync::Arc;

    /// The lanes of a link with one for callers.
    const CALLERS: SlotIndex = SlotIndex(0);
    const HEARTBEATS: SlotIndex = SlotIndex(1);
    const LOCKS: SlotIndex = SlotIndex(2);

    fn link(clock: &Arc<ManualClock>) -> Link {
        let endpoint = "shm:///nowhere".parse().expect("an endpoint");
        Link::new(SoftDevice::new(SoftOptions::default()), endpoint, clock.clone(), 1, 2).expect("a link")
    }

    #[test]
    fn heartbeats_that_cannot_go_out_are_told_though_a_connection_stands() {
        let clock = Arc::default();
        let link = link(&clock);
        // A caller has the first lane, whose connection stands.
        let _calling = link.first_lane();
        link.standing[0].store(true, Ordering::Relaxed);
        link.note_failure(HEARTBEATS, &"the connection is lost");
        clock.advance(UNHEARD_TOLD_AFTER);
        link.note_failure(LOCKS, &"another lane's matter");
        assert_eq!(link.unheard(), None, "it may be made again at once");
        link.note_failure(HEARTBEATS, &"no answer");
        let because = "no answer".to_owned();
        assert_eq!(link.unheard(), Some(Away { time: UNHEARD_TOLD_AFTER, because }));
        assert!(!link.is_away());
        link.note_back(LOCKS);
        assert!(link.unheard().is_some());
        link.note_back(HEARTBEATS);
        assert_eq!(link.unheard(), None);
    }

    #[test]
    fn a_server_that_is_away_is_told_once() {
        let clock = Arc::default();
        let link = link(&clock);
        let calling = link.first_lane();
        link.standing[0].store(true, Ordering::Relaxed);
        link.note_failure(HEARTBEATS, &"the connection is lost");
        clock.advance(UNHEARD_TOLD_AFTER);
        drop(calling);
        // Nobody has the first lane now, and its connection is found to be gone.
        link.note_failure(HEARTBEATS, &"refused");
        assert_eq!((link.unheard(), link.is_away()), (None, true));
        link.note_back(CALLERS);
        assert!(!link.is_away());
    }
}
