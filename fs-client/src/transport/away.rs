//! The server's absence, and the messages about it: one warning when it goes, one when it is back.

use super::Link;
use cuttlefs_common::ids::SlotIndex;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A server does not answer, or refuses this mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Away {
    /// For how long.
    pub time: Duration,
    /// What the last attempt to connect came to.
    pub because: String,
}

/// The server does not answer, or refuses this mount.
pub(super) struct AwaySince {
    /// By the link's clock.
    since: Duration,
    /// What the last attempt to connect came to.
    because: String,
}

impl Link {
    /// Whether the server was away when somebody last asked it for something.
    pub(crate) fn is_away(&self) -> bool {
        self.away.lock().is_some()
    }

    /// Since when, and why.
    pub(crate) fn away(&self) -> Option<Away> {
        let since = |away: &AwaySince| self.now().saturating_sub(away.since);
        self.away.lock().as_ref().map(|away| Away { time: since(away), because: away.because.clone() })
    }

    /// A lane has lost its connection, or could not make one.
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
            // A server that is back and refuses this mount is another matter than one that is gone.
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
