//! Counts of the situations that walks came across. Without these situations a walk would test nothing.

/// How often a walk came across each situation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reached {
    pub refused_for_space: u64,
    pub moved_pages: u64,
    pub magic_hits: u64,
    pub onesided_reads: u64,
    pub window_pages: u64,
    pub reconnects: u64,
}

impl Reached {
    /// Adds the counts of a client.
    pub fn add(&mut self, figures: &[(&str, u64)]) {
        let figure =
            |name: &str| figures.iter().find(|(known, _)| *known == name).expect("a figure of that name").1;
        self.magic_hits += figure("magic_hits");
        self.window_pages += figure("window_pages");
        self.onesided_reads += figure("onesided_reads");
        self.reconnects += figure("reconnects");
    }
}
