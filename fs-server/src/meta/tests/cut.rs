//! Cuts of files in several batches, interrupted between any two of them.

use super::super::{CutStep, DataCommit, MemoryStore, RangeUpdate};
use super::{ROOT_USER, World, extent, format};
use cuttlefs_common::attr::SetAttr;
use cuttlefs_common::ids::{FilePage, InodeNo};
use std::sync::Arc;

const ROOT: InodeNo = InodeNo::ROOT;
const EXTENTS: u64 = 5000;
const KEPT_PAGES: u64 = 101;

#[test]
pub(super) fn the_next_server_finishes_a_cut_that_was_begun() {
    let store = Arc::new(MemoryStore::new());
    format(&*store);
    let world = World::on(store.clone());
    let ino = world.file(ROOT, "file");
    // The first extent begins in front of the cut and ends behind it.
    let mut extents = vec![extent(0, 0, KEPT_PAGES + 9)];
    extents.extend((100..EXTENTS).map(|index| extent(index * 2, index * 2, 1)));
    let end = FilePage(EXTENTS * 2);
    let all = RangeUpdate { first: FilePage(0), end, extents };
    world.meta.commit_data(&[DataCommit::of_ranges(ino, vec![all], EXTENTS * 2 * 4096)]).expect("commit");
    world.meta.flush().expect("flush");
    let size = KEPT_PAGES * 4096;
    let removal = |first: u64, end| RangeUpdate { first: FilePage(first), end, extents: Vec::new() };
    let step =
        |first, end, cut| DataCommit { cut, ..DataCommit::of_ranges(ino, vec![removal(first, end)], size) };
    let set = SetAttr { size: Some(size), ..SetAttr::default() };
    let begin = step(9000, FilePage(u64::MAX), CutStep::From(FilePage(KEPT_PAGES)));
    world.meta.set_attr(ROOT_USER, ino, &set, Some(begin)).expect("the first step");
    world.meta.commit_data(&[step(8000, FilePage(9000), CutStep::Unchanged)]).expect("the second");
    world.assert_sound();
    world.meta.commit_data(&[step(KEPT_PAGES, FilePage(8000), CutStep::Done)]).expect("the last");
    world.assert_sound();
    let batches = store.unflushed_batches();
    for kept in 0..=batches {
        let world = World::on(Arc::new(store.crashed(kept)));
        world.assert_sound();
        let attr = world.attr(ino);
        let (size_then, pages) =
            if kept == 0 { (EXTENTS * 2 * 4096, 110 + 4900) } else { (size, KEPT_PAGES) };
        assert_eq!((attr.size, attr.allocated_bytes), (size_then, pages * 4096), "{kept} batches kept");
        let kept_pages: u64 =
            world.meta.extents(ino).expect("extents").iter().map(|extent| extent.len_pages).sum();
        assert_eq!(kept_pages, pages);
        // The cut is finished: later writes behind the old end stay.
        let more = RangeUpdate {
            first: FilePage(20_000),
            end: FilePage(20_001),
            extents: vec![extent(20_000, 20_000, 1)],
        };
        world.meta.commit_data(&[DataCommit::of_ranges(ino, vec![more], 20_001 * 4096)]).expect("commit");
        let next = World::on(world.store.clone());
        assert_eq!(next.attr(ino).allocated_bytes, (pages + 1) * 4096);
    }
}
