//! What a change of hotspots costs: how deep throughput falls, and until when it is back (Figure 11).

use serde::Serialize;

/// Back is within this share of what was before.
const BACK_SHARE: f64 = 0.9;
/// Ticks that must be back in a row: one lucky tick is no recovery.
const BACK_TICKS: usize = 3;

/// A change of hotspots.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Recovery {
    /// Mean throughput of the half before.
    pub(super) before: f64,
    /// Lowest tick after it.
    pub(super) lowest: f64,
    /// Seconds until it is back within 10 %; `None`: not while it was looked at.
    pub(super) back_after_seconds: Option<f64>,
}

/// Looks at a timeline of (seconds, operations a second) with a change at `change_at`.
pub(super) fn recovery(timeline: &[(f64, f64)], change_at: f64) -> Option<Recovery> {
    let (before, after): (Vec<_>, Vec<_>) = timeline.iter().copied().partition(|&(at, _)| at <= change_at);
    if before.is_empty() || after.is_empty() {
        return None;
    }
    let mean = before.iter().map(|&(_, rate)| rate).sum::<f64>() / before.len() as f64;
    let lowest = after.iter().map(|&(_, rate)| rate).fold(f64::INFINITY, f64::min);
    let ticks = BACK_TICKS.min(after.len());
    let back = after.windows(ticks).find(|ticks| ticks.iter().all(|&(_, rate)| rate >= BACK_SHARE * mean));
    let back_after_seconds = back.map(|ticks| ticks[0].0 - change_at);
    Some(Recovery { before: mean, lowest, back_after_seconds })
}

impl std::fmt::Display for Recovery {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let fall = 100.0 * (1.0 - self.lowest / self.before.max(1e-9));
        write!(f, "{:.1} kops/s before, {fall:.1} % lower at the worst, ", self.before / 1e3)?;
        match self.back_after_seconds {
            Some(seconds) => write!(f, "back within 10 % after {seconds:.1} s"),
            None => write!(f, "not back within 10 % in this time; use more --seconds"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fall_and_its_end() {
        let rates = [100.0, 100.0, 100.0, 40.0, 95.0, 60.0, 91.0, 95.0, 99.0];
        let timeline: Vec<_> = rates.iter().enumerate().map(|(at, &rate)| (at as f64, rate)).collect();
        let seen = recovery(&timeline, 2.0).expect("seen");
        assert_eq!((seen.before, seen.lowest, seen.back_after_seconds), (100.0, 40.0, Some(4.0)));
        assert!(seen.to_string().contains("60.0 % lower"), "{seen}");
        assert!(recovery(&timeline[..3], 2.0).is_none());
        let never = recovery(&timeline[..6], 2.0).expect("seen");
        assert_eq!(never.back_after_seconds, None);
    }
}
