//! The server's absence, and the messages about it: one warning when it goes, one when it is back.

use super::Link;
use cuttlefs_common::ids::SlotIndex;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A server's absence: it does not answer, or refuses this mount.
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

    /// A lane has lost its connection or cannot connect: the server is away if no other lane is connected.
    pub(super) fn note_failure(&self, slot: SlotIndex, error: &dyn std::fmt::Display) {
        if self.others_stand(slot) {
            tracing::debug!(endpoint = %self.endpoint, %error, "a connection of several is gone or cannot be made; it is tried again");
        } else {
            self.note_away(error);
        }
    }

    fn note_away(&self, error: &dyn std::fmt::Display) {
        if self.ending.load(Ordering::Acquire) {
            return;
        }
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
    pub(super) fn note_back(&self) {
        if self.away.lock().take().is_some() {
            tracing::warn!(endpoint = %self.endpoint, "server is back; operations go on");
        }
    }
}
