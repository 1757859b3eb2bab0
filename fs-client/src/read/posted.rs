//! One-sided reads of the target-translated kind whose bytes come later, into memory of the poster's: the same plan and the same byte detection as in
//! `target`, with the waiting left to the poster.

use super::bitmap::PageBitmap;
use super::plan::Plan;
use super::{CachedRegion, OneSided, Reads, counting};
use crate::session::{Attachment, Session};
use cuttlefs_common::ids::{FileKey, PAGE_SIZE, PAGE_SIZE_U64};
use cuttlefs_common::rdma::Remote;
use cuttlefs_common::region::{AccessCounters, MagicPattern, PageSet, divide};
use cuttlefs_common::rpc::OneSidedReads;
use std::sync::atomic::Ordering;

/// Bytes of a page that are looked at first. Nearly all pages that are there differ from the magic pattern in them, so that the others are not read.
const FIRST_LOOK: usize = 32;

/// A read whose bytes are on their way; see the module.
#[derive(Debug)]
pub(crate) struct PlannedRead {
    plan: Plan,
    filekey: FileKey,
    magic: Option<MagicPattern>,
    offset: u64,
    valid_len: usize,
    counters: Option<AccessCounters>,
}

impl Reads {
    /// Plans a read of `[offset, offset + len)`, at least a byte. `None`: nothing of it can be read in this way.
    pub(crate) fn plan(
        &self,
        session: &Session,
        attachment: &Attachment,
        region: &CachedRegion,
        offset: u64,
        len: usize,
    ) -> Option<PlannedRead> {
        let attached = &attachment.attached;
        if attached.one_sided == OneSidedReads::Off || !session.target_translates_for(attachment) {
            return None;
        }
        let is_whole = attached.one_sided == OneSidedReads::Whole;
        let plan = if is_whole {
            Plan::new(&PageBitmap::default(), offset, len)
        } else {
            region.note_read((offset + len as u64).div_ceil(PAGE_SIZE_U64));
            region.with_bitmap(|bitmap| Plan::new(bitmap, offset, len))
        };
        if plan.runs().is_empty() {
            return None;
        }
        self.counters.onesided_reads.add(plan.runs().len() as u64);
        Some(PlannedRead {
            plan,
            filekey: region.open().filekey(),
            magic: (!is_whole).then_some(attached.magic),
            offset,
            valid_len: len,
            counters: attachment.counting.get().cloned(),
        })
    }
}

impl PlannedRead {
    /// The runs to READ: (offset in the request, length).
    pub(crate) fn runs(&self) -> &[(usize, usize)] {
        self.plan.runs()
    }

    /// The source of the run that begins here.
    pub(crate) fn remote(&self, start: usize) -> Remote {
        Remote::File { filekey: self.filekey, offset: self.offset + start as u64 }
    }

    /// So many bytes of a run came. `false`: more than were asked for.
    pub(crate) fn came(&mut self, run: usize, got: usize) -> bool {
        let Some(&(start, len)) = self.plan.runs().get(run).filter(|(_, len)| got <= *len) else {
            return false;
        };
        if got < len {
            // The file ends in (or before) this run.
            self.valid_len = self.valid_len.min(start + got);
        }
        true
    }

    /// All runs have come. Returns how many bytes of the request precede the end of the file, and which pages have to be fetched. `look` copies bytes of
    /// the request out of the memory in which they landed.
    pub(crate) fn finish(self, reads: &Reads, look: impl Fn(usize, &mut [u8])) -> (usize, PageSet) {
        let Self { plan, filekey, magic, offset, valid_len, counters } = self;
        let mut missing = PageSet::none_of_range(offset, valid_len);
        let mut is_surprise = false;
        for (index, part) in divide(offset, valid_len).enumerate() {
            let is_absent = plan.is_absent(index);
            let is_magic = |magic: &MagicPattern| {
                let mut bytes = [0; PAGE_SIZE];
                let covers = |bytes: &mut [u8]| {
                    look(part.offset_in_request, bytes);
                    magic.covers(part.offset_in_page, bytes)
                };
                covers(&mut bytes[..part.len.min(FIRST_LOOK)]) && covers(&mut bytes[..part.len])
            };
            if is_absent || magic.as_ref().is_some_and(is_magic) {
                missing.insert(index);
                is_surprise |= !is_absent;
            }
        }
        if is_surprise {
            reads.counters.read_twice.fetch_add(1, Ordering::Relaxed);
        }
        if !missing.is_empty() {
            reads.counters.magic_hits.fetch_add(missing.count() as u64, Ordering::Relaxed);
        }
        let got = OneSided { valid_len, missing };
        if let Some(counters) = &counters {
            counting::count(counters, filekey, offset, &got);
        }
        (got.valid_len, got.missing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAGIC: MagicPattern = MagicPattern::new([7; 32]);

    fn planned(offset: u64, len: usize, bitmap: Vec<u8>) -> PlannedRead {
        let plan = Plan::new(&PageBitmap::new(bitmap), offset, len);
        let (filekey, magic) = (FileKey(1), Some(MAGIC));
        PlannedRead { plan, filekey, magic, offset, valid_len: len, counters: None }
    }

    #[test]
    fn pages_of_the_pattern_and_those_that_were_not_read_are_missing() {
        // Of five pages the second is on SSD by the bitmap, and the fourth comes back as the pattern. The third only begins like it.
        let mut bytes = vec![1; 5 * PAGE_SIZE];
        MAGIC.fill(0, &mut bytes[2 * PAGE_SIZE..3 * PAGE_SIZE - 1]);
        MAGIC.fill(0, &mut bytes[3 * PAGE_SIZE..4 * PAGE_SIZE]);
        let mut read = planned(0, 5 * PAGE_SIZE, vec![0b1111_1101]);
        assert_eq!(read.runs(), [(0, PAGE_SIZE), (2 * PAGE_SIZE, 3 * PAGE_SIZE)]);
        assert!(read.came(0, PAGE_SIZE) && read.came(1, 2 * PAGE_SIZE + 10));
        let reads = Reads::default();
        let (valid_len, missing) =
            read.finish(&reads, |at, out| out.copy_from_slice(&bytes[at..at + out.len()]));
        assert_eq!(valid_len, 4 * PAGE_SIZE + 10);
        assert_eq!(
            (0..5).map(|page| missing.contains(page)).collect::<Vec<_>>(),
            [false, true, false, true, false]
        );
    }

    #[test]
    fn a_target_that_sends_more_than_was_asked_for_is_not_believed() {
        let mut read = planned(100, 50, Vec::new());
        assert!(!read.came(0, 51) && !read.came(1, 0) && read.came(0, 50));
    }
}
