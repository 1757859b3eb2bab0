//! Entries of pages, as this peer last saw them.
//!
//! A WRITE needs the page's entry from before it. What was seen earlier serves as well as what is READ right before: if the entry is the same after the
//! WRITE, the page has not moved since it was seen, and so not during the WRITE.

use crate::memory::paged::PageEntry;

/// Pages that are remembered: 1 MiB a peer. A page takes the place of another one with the same remainder.
const PLACES: usize = 1 << 16;

/// The entries. Zeroed memory is an empty cache.
pub(super) struct Versions(Vec<(u64, u64)>);

impl Versions {
    pub(super) const BYTES: u64 = (PLACES * size_of::<(u64, u64)>()) as u64;

    pub(super) fn new() -> Self {
        Self(vec![(0, 0); PLACES])
    }

    fn place(page: u64) -> usize {
        page as usize % PLACES
    }

    /// The entry of a page, if it was seen with a frame.
    pub(super) fn get(&self, page: u64) -> Option<PageEntry> {
        let (known, entry) = self.0[Self::place(page)];
        (known == page + 1).then_some(PageEntry(entry))
    }

    /// Notes an entry that was READ. One without a frame is forgotten: the next look will tell.
    pub(super) fn see(&mut self, page: u64, entry: PageEntry) {
        self.0[Self::place(page)] = if entry.is_resident() { (page + 1, entry.0) } else { (0, 0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_seen_last_is_known() {
        let mut versions = Versions::new();
        assert_eq!(versions.get(0), None);
        versions.see(0, PageEntry::new(3, 2, false));
        assert_eq!(versions.get(0), Some(PageEntry::new(3, 2, false)));
        versions.see(PLACES as u64, PageEntry::new(4, 2, false));
        assert_eq!(versions.get(0), None, "another page has its place");
        versions.see(PLACES as u64, PageEntry::new(0, 4, false));
        assert_eq!(versions.get(PLACES as u64), None);
    }
}
