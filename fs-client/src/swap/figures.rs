//! What a run under `cuttlefs swap` has done, for its report.

use super::store::StoreFigures;
use super::wire::PAGE;
use cuttlefs_common::size::ByteSize;
use std::fmt;
use std::time::Duration;

/// Figures of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Programs that began, and forks.
    pub processes: u64,
    /// The same.
    pub forks: u64,
    /// Pages that threads waited for.
    pub faults: u64,
    /// Pages that were touched for the first time.
    pub fresh: u64,
    /// Pages that came back before they were gone: the second chance.
    pub returned: u64,
    /// Pages that were asked back from the program.
    pub left: u64,
    /// Of these, all zeros: nothing is kept of them.
    pub zeros: u64,
    /// Pages that the kernel did not let go.
    pub held: u64,
    /// Pages that came although no other page could leave.
    pub beyond: u64,
    /// The most pages that one process had here: mapped, being moved, and left.
    pub most: u64,
    /// Time from a fault to the page, all together.
    pub waited: Duration,
    /// Of it, the time in which pages were asked for and stored.
    pub leaving: Duration,
    /// Of it, the time in which pages were loaded.
    pub loading: Duration,
    /// At the node.
    pub store: StoreFigures,
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = |pages: u64| ByteSize(pages * PAGE as u64);
        let store = self.store;
        let each = |time: Duration| time.as_secs_f64() * 1e6 / self.faults.max(1) as f64;
        writeln!(f, "{:>12}  programs and forks; {} forks", self.processes, self.forks)?;
        writeln!(
            f,
            "{:>12}  faults: {} new, {} second chance, {} loaded",
            self.faults, self.fresh, self.returned, store.loads
        )?;
        writeln!(
            f,
            "{:>12}  pages left: {} zeros, {} unchanged, {} held by the kernel",
            self.left, self.zeros, store.unchanged, self.held
        )?;
        writeln!(
            f,
            "{:>12}  pages out ({}), {} in ({}); {:.2} requests to the node for each",
            store.stores,
            bytes(store.stores),
            store.loads,
            bytes(store.loads),
            store.requests_a_page()
        )?;
        writeln!(
            f,
            "{:>12}  at the memory node at most ({} pages); {} places passed on by pages that had come back",
            bytes(store.most).to_string(),
            store.most,
            store.passed_on
        )?;
        writeln!(
            f,
            "{:>12}  here at most, of one process; {} pages came beyond the limit",
            bytes(self.most).to_string(),
            self.beyond
        )?;
        write!(
            f,
            "{:>12.1}  us a fault: {:.1} for pages that left, {:.1} for loads; {:.3} s in all",
            each(self.waited),
            each(self.leaving),
            each(self.loading),
            self.waited.as_secs_f64()
        )
    }
}
