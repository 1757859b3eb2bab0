//! The one-sided appends of a file that no sync has covered.
//!
//! No client has a copy of a one-sided append, so it is lost with the server, and takes its length along. A change by request is brought back by its
//! client, at its place. If that place is behind a lost append, zeros would stand in the place of the append. So what a request puts behind such
//! appends is answered only once they are durable (`Changed`).
//!
//! # How it works
//! They lie one behind the other, so one interval has them all, from the first byte of the first one to the end of the last one. The step that makes
//! the file longer notes them, under the lock of the file's state. A sync takes from the front of the interval what was committed before its flush
//! began: a commit has the file's length, with all bytes before it.
//!
//! # Invariants
//! * Each byte that a one-sided append has put behind the durable end is in the interval, until a flush that began behind its commit has succeeded.
//! * What is cut off has left the interval, and a flush that began before a cut takes nothing from it: later appends may have come in its place.

/// The interval; empty if its start is not before its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UnsyncedAppends {
    start: u64,
    end: u64,
    /// How often the file was made shorter.
    cuts: u64,
}

/// What a flush that begins now makes durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Committed {
    until: u64,
    cuts: u64,
}

impl UnsyncedAppends {
    /// Whether there is none.
    pub(crate) fn is_empty(&self) -> bool {
        self.start >= self.end
    }

    /// Whether a byte or an end at this offset has the first byte of one before it.
    pub(crate) fn are_before(&self, offset: u64) -> bool {
        !self.is_empty() && self.start < offset
    }

    /// Notes that one has made the file longer.
    pub(crate) fn note(&mut self, start: u64, end: u64) {
        if self.is_empty() {
            self.start = start;
        }
        self.end = end;
    }

    /// Notes that the file was made shorter.
    pub(crate) fn cut(&mut self, size: u64) {
        self.end = self.end.min(size);
        self.cuts += 1;
    }

    /// What a flush that begins now makes durable, if it has some of them; `size` is the length that was committed.
    pub(crate) fn committed(&self, size: u64) -> Option<Committed> {
        self.are_before(size).then_some(Committed { until: size, cuts: self.cuts })
    }

    /// Notes that the flush has succeeded.
    pub(crate) fn flushed(&mut self, committed: Committed) {
        if committed.cuts == self.cuts {
            self.start = self.start.max(committed.until);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(start: u64, end: u64) -> UnsyncedAppends {
        let mut appends = UnsyncedAppends::default();
        appends.note(start, end);
        appends
    }

    fn flush(appends: &mut UnsyncedAppends, size: u64) {
        if let Some(committed) = appends.committed(size) {
            appends.flushed(committed);
        }
    }

    #[test]
    fn what_lies_behind_the_first_one_is_behind_them() {
        let mut appends = of(100, 200);
        assert!(!UnsyncedAppends::default().are_before(u64::MAX));
        let are_before =
            |appends: &UnsyncedAppends, offsets: [u64; 4]| offsets.map(|at| appends.are_before(at));
        assert_eq!(are_before(&appends, [0, 100, 101, 5000]), [false, false, true, true]);
        appends.note(200, 300);
        assert_eq!(are_before(&appends, [0, 100, 101, 5000]), [false, false, true, true]);
    }

    #[test]
    fn a_sync_takes_those_that_were_committed_before_it() {
        let mut appends = of(100, 200);
        assert_eq!(appends.committed(100), None, "it was committed before they came");
        let committed = appends.committed(200).expect("one of them");
        appends.note(200, 300);
        appends.flushed(committed);
        assert!(!appends.are_before(200) && appends.are_before(201), "{appends:?}");
        flush(&mut appends, 250);
        assert!(!appends.are_before(250) && appends.are_before(251), "{appends:?}");
        flush(&mut appends, 300);
        assert!(appends.is_empty());
        appends.note(300, 310);
        assert!(!appends.are_before(300) && appends.are_before(301), "{appends:?}");
    }

    #[test]
    fn what_is_cut_off_is_gone() {
        let mut appends = of(100, 200);
        appends.cut(150);
        assert!(appends.are_before(150), "a part of it stays");
        appends.cut(100);
        assert!(appends.is_empty());
        appends.cut(50);
        appends.note(50, 60);
        assert!(!appends.are_before(50) && appends.are_before(51), "{appends:?}");
    }

    #[test]
    fn a_flush_that_began_before_a_cut_takes_nothing() {
        let mut appends = of(100, 200);
        let committed = appends.committed(200).expect("all of it");
        appends.cut(50);
        appends.note(50, 180);
        appends.flushed(committed);
        assert!(appends.are_before(51), "what came in its place is not durable");
        // Also if others have taken all of it meanwhile.
        let mut appends = of(100, 200);
        let committed = appends.committed(200).expect("all of it");
        flush(&mut appends, 200);
        appends.cut(50);
        appends.note(50, 180);
        appends.flushed(committed);
        assert!(appends.are_before(51));
    }
}
