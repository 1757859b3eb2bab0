//! Stretches of tables that are written down, and random tables whose pages are moved until there is nothing to be moved.

use super::*;
use crate::bits;
use crate::files::range_table::{Piece, PieceState};
use proptest::prelude::*;

const POOL: u64 = 200;
/// Most pages of one step.
const MOST: u64 = 4;

fn table(pieces: &[(u64, u64, u64)]) -> RangeTable {
    let mut table = RangeTable::default();
    pieces.iter().for_each(|(first, pool, len)| {
        table.insert(Piece { first: *first, pool: *pool, len: *len, state: PieceState::Written });
    });
    table
}

fn space(table: &RangeTable, others: &[(u64, u64)]) -> Space {
    let own = table.pieces_in(0, u64::MAX).map(|piece| piece.pool..piece.pool + piece.len);
    let others = others.iter().map(|(first, len)| *first..*first + *len);
    Space::new(POOL, bits::of(POOL, own.chain(others))).expect("they do not overlap")
}

/// Places where the file goes on and its pool pages do not.
fn breaks(table: &RangeTable) -> usize {
    let pieces: Vec<Piece> = table.pieces_in(0, u64::MAX).collect();
    let is_break =
        |pair: &&[Piece]| pair[0].end() == pair[1].first && pair[0].pool + pair[0].len != pair[1].pool;
    pieces.windows(2).filter(is_break).count()
}

fn found(pieces: &[(u64, u64, u64)], first: u64) -> Option<(u64, u64, usize, u64, Option<u64>, bool)> {
    match find(&table(pieces), first) {
        Found::Stretch(Stretch { first, end, breaks, near, lead, is_cut }) => {
            Some((first, end, breaks, near.0, lead, is_cut))
        }
        Found::Nothing => None,
        Found::GoOn(page) => panic!("goes on at {page}"),
    }
}

#[test]
fn a_file_in_one_run_has_no_stretch() {
    assert_eq!(found(&[], 0), None);
    assert_eq!(found(&[(3, 50, 9)], 0), None);
    assert_eq!(found(&[(3, 50, 9), (20, 7, 4), (30, 90, 1)], 0), None, "behind holes pages may be anywhere");
    let mut states = table(&[(0, 10, 4)]);
    states.set_state(1, 3, PieceState::Unwritten);
    assert_eq!(find(&states, 0), Found::Nothing, "states do not matter");
}

#[test]
fn a_stretch_begins_at_its_first_break() {
    let pieces = [(0, 10, 2), (4, 20, 3), (7, 40, 2), (9, 42, 1), (10, 5, 1), (12, 60, 2)];
    assert_eq!(found(&pieces, 0), Some((7, 11, 2, 23, Some(4), false)));
    assert_eq!(found(&pieces, 5), Some((7, 11, 2, 23, None, false)), "page 4 stays");
    assert_eq!(found(&pieces, 7), Some((7, 11, 2, 23, None, false)));
    assert_eq!(found(&pieces, 8), Some((10, 11, 1, 43, None, false)));
    assert_eq!(found(&pieces, 11), None);
}

#[test]
fn a_long_stretch_is_cut() {
    assert_eq!(found(&[(0, 10, 2), (2, 50, 40)], 0), Some((2, 18, 1, 12, Some(0), true)));
    assert_eq!(found(&[(0, 10, 17), (17, 50, 2)], 0), Some((17, 19, 1, 27, None, false)), "the lead is long");
    let short: Vec<_> = (0..20).map(|page| (page, 150 - 3 * page, 1)).collect();
    assert_eq!(found(&short, 0), Some((1, 9, 8, 151, Some(0), false)));
    let apart: Vec<_> = (0..20).map(|page| (2 * page, 150 - 3 * page, 1)).collect();
    assert_eq!(find(&table(&apart), 0), Found::GoOn(16));
    assert_eq!(find(&table(&apart), 39), Found::Nothing);
}

#[test]
fn what_is_in_place_stays_if_there_is_room_behind() {
    let table = table(&[(0, 10, 6), (6, 50, 3), (9, 70, 1)]);
    let Found::Stretch(stretch) = find(&table, 0) else { panic!("a stretch") };
    let place = |others: &[(u64, u64)]| {
        let space = space(&table, others);
        let free = space.figures().free;
        let place = stretch.take_place(&space, 10, MOST);
        assert_eq!(space.figures().free, free - place.map_or(0, |(_, run)| run.len), "no more is taken");
        place
    };
    let run = |first, len| Run { first: PoolPage(first), len };
    assert_eq!(place(&[]), Some((6, run(16, 4))));
    assert_eq!(place(&[(18, 1)]), Some((0, run(0, 4))), "all of it goes where it fits best");
    assert_eq!(place(&[(18, 1), (3, 1)]), Some((0, run(53, 4))));
    let others = [(18, 32), (53, 17), (71, 129)];
    let with = |more: &[(u64, u64)]| place(&[&others[..], more].concat());
    assert_eq!(with(&[(3, 1)]), Some((6, run(4, 4))), "the lead stays");
    assert_eq!(with(&[(3, 4)]), Some((6, run(16, 2))), "one break is left, behind two pages");
    assert_eq!(with(&[(3, 4), (16, 2)]), None, "two runs elsewhere are no better");
}

/// Pieces of a file, as `table` takes them, and runs of other files.
type Layout = (Vec<(u64, u64, u64)>, Vec<(u64, u64)>);

fn layout() -> impl Strategy<Value = Layout> {
    let pieces = prop::collection::vec((0u64..3, 1u64..7, 0u64..4, any::<bool>()), 1..20);
    let others = prop::collection::vec((0u64..6, 1u64..9), 0..8);
    (pieces, others).prop_map(|(pieces, others)| {
        // Pool pages from both ends, so that neither overlap and some go on.
        let (mut page, mut low, mut high) = (0, 0, POOL / 2);
        let mut placed = Vec::new();
        for (hole, len, gap, is_low) in pieces {
            page += if hole == 2 { 1 } else { 0 };
            let from = if is_low { &mut low } else { &mut high };
            *from += if gap == 3 { 1 } else { 0 };
            if *from + len <= if is_low { POOL / 2 } else { POOL } {
                placed.push((page, *from, len));
                *from += len;
                page += len;
            }
        }
        let taken = |at: u64| placed.iter().any(|(_, pool, len)| (*pool..pool + len).contains(&at));
        let mut at = 0;
        let mut free = Vec::new();
        for (gap, len) in others {
            at += gap;
            (at..at + len).filter(|page| *page < POOL && !taken(*page)).for_each(|page| free.push((page, 1)));
            at += len;
        }
        (placed, free)
    })
}

proptest! {
    #[test]
    fn moves_leave_fewer_breaks_and_the_same_file((pieces, others) in layout()) {
        let mut table = table(&pieces);
        let space = space(&table, &others);
        let (pages, free, before) = (table.allocated_pages(), space.figures().free, breaks(&table));
        let mapped = |table: &RangeTable| -> Vec<u64> {
            table.pieces_in(0, u64::MAX).flat_map(|piece| piece.first..piece.end()).collect()
        };
        let file = mapped(&table);
        let mut at = 0;
        let is_stuck = loop {
            match find(&table, at) {
                Found::Nothing => break false,
                Found::GoOn(next) => {
                    prop_assert!(next > at);
                    at = next;
                }
                Found::Stretch(stretch) => {
                    prop_assert!(stretch.breaks > 0 && stretch.first < stretch.end && stretch.first >= at);
                    let Some((from, to)) = stretch.take_place(&space, pages, MOST) else { break true };
                    prop_assert!(to.len > 0 && to.len <= MOST && from + to.len <= stretch.end);
                    let old = table.remove(from, from + to.len);
                    prop_assert_eq!(old.iter().map(|piece| piece.len).sum::<u64>(), to.len, "without holes");
                    table.insert(Piece { first: from, pool: to.first.0, len: to.len, state: PieceState::Written });
                    let old: Vec<Run> =
                        old.iter().map(|piece| Run { first: PoolPage(piece.pool), len: piece.len }).collect();
                    space.give_back(&old);
                    at = from + to.len;
                }
            }
        };
        prop_assert_eq!(mapped(&table), file);
        prop_assert_eq!((table.allocated_pages(), space.figures().free), (pages, free));
        if !is_stuck {
            prop_assert!(breaks(&table) <= before, "{} breaks, {} before", breaks(&table), before);
        }
    }
}
