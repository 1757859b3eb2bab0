//! The life of a simulated process, counted in events: each time it does something that a disk, its peers or the process
//! after it could notice. A simulation ends it at any of them.
//!
//! Disks, logs, stores and the network of a simulation share one `Life` and ask it before they carry out a request of the
//! process. From the event on at which the life ends, the process has no effect. Its tasks may run on for a moment, until
//! the owner of the simulation drops them, and see their storage fail. Changes of a process's own memory between two
//! events have no witness, so a crash there is the same as one at the next event.

use parking_lot::Mutex;
use std::sync::Arc;

/// What a process does to its surroundings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Event {
    /// An IO is given to the data disk.
    DiskSubmit,
    /// An IO of the data disk is done.
    DiskDone,
    /// A sync of the data disk is done.
    DiskSync,
    /// A batch of metadata.
    Batch,
    /// Metadata made durable.
    Flush,
    /// A message is taken.
    Taken,
    /// A message is sent.
    Sent,
    /// A one-sided request is sent.
    OneSided,
}

impl Event {
    /// Every kind.
    pub const ALL: [Self; 8] = [
        Self::DiskSubmit,
        Self::DiskDone,
        Self::DiskSync,
        Self::Batch,
        Self::Flush,
        Self::Taken,
        Self::Sent,
        Self::OneSided,
    ];
}

/// The event with which a life ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// Number of events that still happen before it.
    pub after: u64,
    /// The kind of event that counts; `None`: every kind.
    pub of: Option<Event>,
}

/// Whether an event happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It happens.
    Happens,
    /// The process dies with it: it happens in part or not at all.
    CutOff,
    /// The process was dead before.
    Never,
}

#[derive(Debug, Default)]
struct State {
    /// Events since the simulation began, over all lives.
    events: u64,
    /// A digest of the order of all events: two runs with the same digest did the same.
    digest: u64,
    /// The event that ends this life, counted from now.
    end: Option<End>,
    /// The event that ended this life.
    over: Option<Event>,
    /// Whether no event ends it for now.
    spared: bool,
}

/// The life of the process that runs now. Clones are the same life; a process without one is immortal.
#[derive(Clone, Debug, Default)]
pub struct Life {
    state: Arc<Mutex<State>>,
}

impl Life {
    /// Begins a new life: the process of the life before is gone.
    pub fn begin(&self) {
        self.state.lock().over = None;
    }

    /// Sets the event that ends it, counted from now; `None`: no event does.
    pub fn end(&self, end: Option<End>) {
        self.state.lock().end = end;
    }

    /// While `spared`, events are counted and none ends the life. If its end came due meanwhile, the next event of that kind ends it.
    pub fn spare(&self, spared: bool) {
        self.state.lock().spared = spared;
    }

    /// Whether an event is set that will end it.
    pub fn will_end(&self) -> bool {
        self.state.lock().end.is_some()
    }

    /// Whether it has ended.
    pub fn is_over(&self) -> bool {
        self.state.lock().over.is_some()
    }

    /// The event that ended it.
    pub fn last_event(&self) -> Option<Event> {
        self.state.lock().over
    }

    /// The number of events over all lives, and a digest of their order.
    pub fn events(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.events, state.digest)
    }

    /// The process is about to do this. `about`, such as an offset or a length, distinguishes events of one kind in the digest.
    pub fn meets(&self, event: Event, about: u64) -> Fate {
        let mut state = self.state.lock();
        if state.over.is_some() {
            return Fate::Never;
        }
        state.events += 1;
        // FNV-1a, a word at a time.
        for word in [event as u64, about] {
            state.digest = (state.digest ^ word).wrapping_mul(0x0100_0000_01b3);
        }
        let spared = state.spared;
        match &mut state.end {
            Some(end) if end.of.is_none_or(|of| of == event) => {
                if end.after > 0 || spared {
                    end.after = end.after.saturating_sub(1);
                    return Fate::Happens;
                }
                state.end = None;
                state.over = Some(event);
                Fate::CutOff
            }
            _ => Fate::Happens,
        }
    }

    /// As `meets`, for an event that happens completely or not at all.
    pub fn allows(&self, event: Event, about: u64) -> bool {
        self.meets(event, about) == Fate::Happens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meet(life: &Life, times: usize) -> Vec<Fate> {
        (0..times).map(|_| life.meets(Event::Batch, 0)).collect()
    }

    #[test]
    fn it_ends_at_the_event_it_was_told_and_stays_over_until_the_next_begins() {
        use Fate::{CutOff, Happens, Never};
        let life = Life::default();
        assert_eq!(meet(&life, 3), [Happens; 3]);
        life.end(Some(End { after: 1, of: None }));
        assert_eq!(meet(&life, 4), [Happens, CutOff, Never, Never]);
        assert_eq!(life.last_event(), Some(Event::Batch));
        assert_eq!(life.events().0, 5, "what never happens is no event");
        life.begin();
        assert!(!life.will_end() && !life.is_over());
        assert_eq!(meet(&life, 2), [Happens, Happens]);
    }

    #[test]
    fn it_can_be_spared_and_told_otherwise() {
        use Fate::{CutOff, Happens};
        let life = Life::default();
        life.end(Some(End { after: 0, of: None }));
        life.spare(true);
        assert_eq!(meet(&life, 2), [Happens, Happens]);
        life.spare(false);
        assert_eq!(meet(&life, 1), [CutOff]);
        life.begin();
        life.end(Some(End { after: 3, of: None }));
        life.end(None);
        assert_eq!(meet(&life, 6), [Happens; 6]);
    }

    #[test]
    fn it_can_end_with_one_kind_of_event() {
        let life = Life::default();
        life.end(Some(End { after: 1, of: Some(Event::Flush) }));
        assert_eq!(meet(&life, 3), [Fate::Happens; 3]);
        assert!(life.allows(Event::Flush, 0));
        assert_eq!(meet(&life, 1), [Fate::Happens]);
        assert_eq!(life.meets(Event::Flush, 0), Fate::CutOff);
    }

    #[test]
    fn the_digest_knows_the_order() {
        let digest = |events: &[(Event, u64)]| {
            let life = Life::default();
            for (event, about) in events {
                life.meets(*event, *about);
            }
            life.events().1
        };
        let (one, other) = ((Event::Batch, 1), (Event::Flush, 2));
        assert_eq!(digest(&[one, other]), digest(&[one, other]));
        assert_ne!(digest(&[one, other]), digest(&[other, one]));
        assert_ne!(digest(&[one]), digest(&[(Event::Batch, 2)]));
    }
}
