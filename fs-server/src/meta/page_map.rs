//! A map of the pool pages that extents have, and of those among them without bytes. It tells these without reading the extents.
//!
//! It is two bitmaps over the pool, in parts of 8,192 pages. A store keeps them beside its records and updates them with each change of the records
//! (`PageChanges`). A start makes the free space from them, so that it reads a kilobyte for 32 MiB of pool, and no extent.
//!
//! ```text
//! key     part * 2 + plane, u64          plane 0: an extent has the page; 1: and says that it is unwritten
//! value   1,024 bytes: bit n % 8 of byte n / 8 is page n of the part; empty: all are set. A part without set bits is not stored
//! ```
//!
//! # Invariants
//! * A change takes pages from extents first and gives them to extents then, so that within one change a page may move from one extent to another.
//! * A page is given once and taken once. Every contradiction is counted: either two extents have a page, or the map does not agree with the extents.
//!   A start refuses such a pool, and fsck says which of the two it is.

use super::key;
use super::record::{ExtentRecord, RecordError};
use crate::bits;
use crate::pool::POOL_PAGES_MAX;
use cuttlefs_common::region::ExtentState;
use std::collections::BTreeMap;
use std::ops::Range;

/// Pages of a part.
pub const PART_PAGES: u64 = 8192;
const PART_WORDS: usize = (PART_PAGES / 64) as usize;

/// The bits of a part of one bitmap, in words as in `bits`.
pub type PartBits = [u64; PART_WORDS];
/// A part that is not stored.
pub(super) const NO_PAGES: PartBits = [0; PART_WORDS];

/// One of the bitmaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Plane {
    /// Pages that an extent has.
    Named,
    /// Pages among these without bytes of the file.
    Unwritten,
}

/// The key of a part of a bitmap: in the order of pages, `Named` before `Unwritten`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PartKey(pub u64);

impl PartKey {
    fn new(part: u64, plane: Plane) -> Self {
        Self(part * 2 + plane as u64)
    }

    /// The part's first page.
    pub fn first_page(self) -> u64 {
        self.0 / 2 * PART_PAGES
    }

    /// The part's bitmap.
    pub fn plane(self) -> Plane {
        if self.0.is_multiple_of(2) { Plane::Named } else { Plane::Unwritten }
    }
}

/// A function that gets the parts of the map, in the order of their keys, without those that have no set bits.
pub type PartVisitor<'a> = &'a mut dyn FnMut(PartKey, &PartBits);

/// The stored bytes of a part; `None` if it is not stored.
pub(super) fn encode(bits: &PartBits) -> Option<Vec<u8>> {
    if bits.iter().all(|word| *word == 0) {
        None
    } else if bits.iter().all(|word| *word == u64::MAX) {
        Some(Vec::new())
    } else {
        Some(bits.iter().flat_map(|word| word.to_le_bytes()).collect())
    }
}

/// Decodes the stored bytes of a part.
///
/// # Errors
/// [`RecordError::Malformed`].
pub(super) fn decode(value: Option<&[u8]>) -> Result<PartBits, RecordError> {
    let Some(value) = value else { return Ok(NO_PAGES) };
    if value.is_empty() {
        return Ok([u64::MAX; PART_WORDS]);
    }
    let mut bits = NO_PAGES;
    let (words, rest) = value.as_chunks::<8>();
    if words.len() != PART_WORDS || !rest.is_empty() {
        return Err(RecordError::Malformed);
    }
    bits.iter_mut().zip(words).for_each(|(bits, word)| *bits = u64::from_le_bytes(*word));
    Ok(bits)
}

/// The extent of a record, if it is one and parses. A record that does not parse has no pages here; fsck reports it.
fn extent_of(key: &[u8], value: Option<&[u8]>) -> Option<ExtentRecord> {
    if key.first() != Some(&key::tag::EXTENT) {
        return None;
    }
    let (_, page) = key::parse_paged(key)?;
    ExtentRecord::parse(page, value?).ok()
}

/// The pages of an extent in each part, counted from the part's first page.
fn ranges_of(extent: ExtentRecord) -> impl Iterator<Item = (PartKey, Range<u64>)> {
    let start = extent.pool_page.0.min(POOL_PAGES_MAX - 1);
    let end = (extent.pool_page.0.saturating_add(extent.len_pages)).clamp(start + 1, POOL_PAGES_MAX);
    let planes: &[Plane] = match extent.state {
        ExtentState::Written => &[Plane::Named],
        ExtentState::Unwritten => &[Plane::Named, Plane::Unwritten],
    };
    (start / PART_PAGES..end.div_ceil(PART_PAGES)).flat_map(move |part| {
        let first = part * PART_PAGES;
        let range = start.max(first) - first..end.min(first + PART_PAGES) - first;
        planes.iter().map(move |plane| (PartKey::new(part, *plane), range.clone()))
    })
}

/// The changes of a part.
#[derive(Clone, Debug, Default)]
pub(super) struct PartChange {
    taken: Vec<Range<u64>>,
    given: Vec<Range<u64>>,
}

impl PartChange {
    /// Applies the changes to the bits. Returns how many pages contradict them.
    pub(super) fn apply(&self, bits: &mut PartBits) -> u64 {
        let mut contradictions = 0;
        for range in &self.taken {
            contradictions += range.end - range.start - bits::count(bits, range.clone());
            bits::fill(bits, range.clone(), false);
        }
        for range in &self.given {
            contradictions += bits::count(bits, range.clone());
            bits::fill(bits, range.clone(), true);
        }
        contradictions
    }
}

/// The changes of the map that follow from changes of records. It takes some 50 bytes for each extent that was added or removed, and for each part of
/// a large one.
#[derive(Debug, Default)]
pub(super) struct PageChanges {
    parts: BTreeMap<PartKey, PartChange>,
}

impl PageChanges {
    /// Adds the change of a record that was changed, added or removed.
    pub(super) fn change(&mut self, key: &[u8], old: Option<&[u8]>, new: Option<&[u8]>) {
        let (old, new) = (extent_of(key, old), extent_of(key, new));
        if old == new {
            return;
        }
        for (part, range) in old.into_iter().flat_map(ranges_of) {
            self.parts.entry(part).or_default().taken.push(range);
        }
        for (part, range) in new.into_iter().flat_map(ranges_of) {
            self.parts.entry(part).or_default().given.push(range);
        }
    }

    /// The changes of each part, in order.
    pub(super) fn into_parts(self) -> BTreeMap<PartKey, PartChange> {
        self.parts
    }
}

/// A map in memory, made from all extents. It takes at most 2 KiB for each part of the pool with pages.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct PageMap {
    parts: BTreeMap<PartKey, Box<PartBits>>,
    /// Pages that were added twice.
    pub contradictions: u64,
}

impl PageMap {
    /// Adds the record of an extent; ignores other records.
    pub(super) fn add(&mut self, key: &[u8], value: &[u8]) {
        if let Some(extent) = extent_of(key, Some(value)) {
            self.add_extent(extent);
        }
    }

    /// Adds an extent.
    pub(super) fn add_extent(&mut self, extent: ExtentRecord) {
        for (part, range) in ranges_of(extent) {
            let bits = self.parts.entry(part).or_insert_with(|| Box::new(NO_PAGES));
            self.contradictions += bits::count(&**bits, range.clone());
            bits::fill(&mut **bits, range, true);
        }
    }

    /// Visits all parts, in order.
    pub(super) fn visit(&self, visit: PartVisitor<'_>) {
        self.parts.iter().for_each(|(key, bits)| visit(*key, bits));
    }

    /// Takes a part out of the map; an empty one if there is none.
    pub(super) fn take(&mut self, key: PartKey) -> Box<PartBits> {
        self.parts.remove(&key).unwrap_or_else(|| Box::new(NO_PAGES))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meta::record;
    use cuttlefs_common::ids::{FilePage, InodeNo, PoolPage};

    fn extent(first: u64, len: u64, state: ExtentState) -> ExtentRecord {
        ExtentRecord { pool_page: PoolPage(first), len_pages: len, state }
    }

    #[test]
    fn golden_bytes() {
        let mut map = PageMap::default();
        map.add_extent(extent(PART_PAGES + 3, 6, ExtentState::Unwritten));
        map.add_extent(extent(2 * PART_PAGES, PART_PAGES, ExtentState::Written));
        let mut kept = Vec::new();
        map.visit(&mut |key, bits| kept.push((key.0, encode(bits))));
        let some = [&[0b1111_1000, 0b1][..], &[0; 1022]].concat();
        assert_eq!(kept, [(2, Some(some.clone())), (3, Some(some)), (4, Some(Vec::new()))]);
        assert_eq!(encode(&NO_PAGES), None);
    }

    #[test]
    fn parts_parse_back_and_others_do_not() {
        for bits in [NO_PAGES, [u64::MAX; PART_WORDS], std::array::from_fn(|word| word as u64 * 77)] {
            assert_eq!(decode(encode(&bits).as_deref()), Ok(bits));
        }
        assert_eq!(decode(Some(&[1; 1023])), Err(RecordError::Malformed));
        assert_eq!(decode(Some(&[1; 1032])), Err(RecordError::Malformed));
    }

    #[test]
    fn what_goes_from_one_extent_to_another_stays_named() {
        let key = |page| key::extent(InodeNo(7), FilePage(page));
        let value = |first, len| record::encode(&extent(first, len, ExtentState::Written));
        let mut changes = PageChanges::default();
        // The changes come in the order of keys: here the page is given before it is taken.
        changes.change(&key(1), None, Some(&value(10, 5)));
        changes.change(&key(2), Some(&value(10, 5)), Some(&value(15, 5)));
        changes.change(b"Zother", Some(b"one"), Some(b"two"));
        let mut bits = NO_PAGES;
        bits::fill(&mut bits, 10..15, true);
        let parts = changes.into_parts();
        assert_eq!(parts.len(), 1);
        assert_eq!(parts[&PartKey(0)].apply(&mut bits), 0);
        assert_eq!(bits::next_run(&bits, 0..PART_PAGES, true), Some(10..20));
        assert_eq!(bits::count(&bits, 0..PART_PAGES), 10);
        // The changes are applied to a map that does not agree with the records.
        assert_eq!(parts[&PartKey(0)].apply(&mut bits), 5, "15 to 20 are given twice");
    }

    #[test]
    fn what_is_named_twice_or_past_any_pool_is_told() {
        let mut map = PageMap::default();
        map.add_extent(extent(5, 5, ExtentState::Written));
        map.add_extent(extent(9, 5, ExtentState::Written));
        assert_eq!(map.contradictions, 1);
        map.add_extent(extent(u64::MAX - 5, 3, ExtentState::Written));
        let mut last = PartKey(0);
        map.visit(&mut |key, _| last = key);
        assert_eq!(last.first_page(), POOL_PAGES_MAX - PART_PAGES);
    }
}
