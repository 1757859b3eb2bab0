//! The range table against a map with one entry for each page.

use super::*;
use proptest::prelude::*;

const PAGES: u64 = 48;

#[derive(Clone, Debug)]
enum Step {
    Insert { first: u64, len: u64, pool: u64, state: PieceState },
    Remove { first: u64, len: u64 },
    SetState { first: u64, len: u64, state: PieceState },
}

fn state() -> impl Strategy<Value = PieceState> {
    prop_oneof![Just(PieceState::Written), Just(PieceState::Unwritten), Just(PieceState::Fresh)]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        // Pool pages near the file pages, so that neighbours often continue each other.
        3 => (0..PAGES, 1u64..9, 0u64..3, state()).prop_map(|(first, len, shift, state)| Step::Insert {
            first, len, pool: first + 100 * shift, state
        }),
        2 => (0..PAGES, 0u64..20).prop_map(|(first, len)| Step::Remove { first, len }),
        2 => (0..PAGES, 0u64..20, state()).prop_map(|(first, len, state)| Step::SetState { first, len, state }),
    ]
}

type Model = BTreeMap<u64, (u64, PieceState)>;

fn check(table: &RangeTable, model: &Model) {
    let end = PAGES + 40;
    for page in 0..end {
        let expected = model.get(&page).map(|(pool, state)| (PoolPage(*pool), *state));
        assert_eq!(table.get(FilePage(page)), expected, "page {page}");
        let data = (page..end).find(|page| model.get(page).is_some_and(|(_, state)| state.has_bytes()));
        let found = (0..).try_fold(page, |from, _| match table.next_data(from, 1) {
            Search::GoOn(next) => Ok(next),
            ended => Err(ended),
        });
        let data = data.map_or(Search::Nowhere, Search::Found);
        assert_eq!(table.next_data(page, usize::MAX), data, "data from {page}");
        assert_eq!(found, Err(data), "data from {page}, a piece at a time");
        let hole = (page..).find(|page| !model.get(page).is_some_and(|(_, state)| state.has_bytes()));
        let found = (0..).try_fold(page, |from, _| match table.next_hole(from, 1) {
            Search::GoOn(next) => Ok(next),
            ended => Err(ended),
        });
        let hole = hole.map_or(Search::Nowhere, Search::Found);
        assert_eq!(table.next_hole(page, usize::MAX), hole, "hole from {page}");
        assert_eq!(found, Err(hole), "hole from {page}, a piece at a time");
    }
    assert_eq!(table.allocated_pages(), model.len() as u64);
    let fresh = model.values().filter(|(_, state)| *state == PieceState::Fresh).count() as u64;
    assert_eq!(table.fresh_pages(), fresh);
    let fresh_pieces: Vec<_> = table.iter().filter(|piece| piece.state == PieceState::Fresh).collect();
    assert_eq!(table.fresh(), fresh_pieces);
    let pieces: Vec<_> = table.iter().collect();
    for pair in pieces.windows(2) {
        assert!(pair[0].end() <= pair[1].first, "{pair:?} overlap");
        assert!(!pair[0].continues_with(&pair[1]), "{pair:?} should be one");
    }
    for (first, len) in table.holes_in(0, end) {
        assert!((first..first + len).all(|page| !model.contains_key(&page)));
    }
    let held: u64 = table.holes_in(0, end).iter().map(|(_, len)| len).sum();
    assert_eq!(held, end - model.len() as u64);
    // The layout in parts is the same as the layout as a whole, and it has every page.
    let (whole, until) = table.extents(FilePage(0), usize::MAX);
    assert_eq!(until, None);
    assert_eq!(whole.iter().map(|extent| extent.len_pages).sum::<u64>(), model.len() as u64);
    let mut parts = Vec::new();
    let mut from = FilePage(0);
    loop {
        let (part, until) = table.extents(from, 2);
        parts.extend(part);
        match until {
            Some(page) => from = page,
            None => break,
        }
    }
    assert_eq!(parts, whole);
}

proptest! {
    #[test]
    fn agrees_with_a_map_of_pages(steps in prop::collection::vec(step(), 1..60)) {
        let mut table = RangeTable::default();
        let mut model = Model::new();
        for step in steps {
            match step {
                Step::Insert { first, len, pool, state } => {
                    for (hole, hole_len) in table.holes_in(first, first + len) {
                        let pool = pool + (hole - first);
                        table.insert(Piece { first: hole, pool, len: hole_len, state });
                        for index in 0..hole_len {
                            model.insert(hole + index, (pool + index, state));
                        }
                    }
                }
                Step::Remove { first, len } => {
                    let removed = table.remove(first, first + len);
                    let count: u64 = removed.iter().map(|piece| piece.len).sum();
                    let before = model.len();
                    model.retain(|page, _| !(first..first + len).contains(page));
                    prop_assert_eq!(count as usize, before - model.len());
                }
                Step::SetState { first, len, state } => {
                    table.set_state(first, first + len, state);
                    for (_, entry) in model.range_mut(first..first + len) {
                        entry.1 = state;
                    }
                }
            }
            check(&table, &model);
        }
        // A mapping that is stored and read again is the same, but for `Fresh`, which is stored as `Written`.
        let (extents, _) = table.extents(FilePage(0), usize::MAX);
        let again = RangeTable::from_extents(&extents, 1000).expect("own extents");
        prop_assert_eq!(again.extents(FilePage(0), usize::MAX).0, extents);
    }
}

fn extent(file_page: u64, pool_page: u64, len_pages: u64) -> Extent {
    Extent {
        file_page: FilePage(file_page),
        pool_page: PoolPage(pool_page),
        len_pages,
        state: ExtentState::Written,
    }
}

#[test]
fn a_stored_mapping_that_cannot_be_is_refused() {
    for (extents, error) in [
        (vec![extent(0, 0, 0)], RangeError::OutOfRange { first: 0, pool: 0, len: 0 }),
        (vec![extent(0, 90, 11)], RangeError::OutOfRange { first: 0, pool: 90, len: 11 }),
        (vec![extent(0, u64::MAX, 2)], RangeError::OutOfRange { first: 0, pool: u64::MAX, len: 2 }),
        (
            vec![extent(MAX_FILE_PAGES, 0, 1)],
            RangeError::OutOfRange { first: MAX_FILE_PAGES, pool: 0, len: 1 },
        ),
        (vec![extent(0, 0, 4), extent(3, 50, 4)], RangeError::Overlap(3)),
    ] {
        assert_eq!(RangeTable::from_extents(&extents, 100), Err(error));
    }
}

#[test]
fn fresh_pages_between_written_neighbours_can_be_recorded_as_one_extent() {
    let mut table = RangeTable::from_extents(&[extent(0, 10, 2), extent(4, 14, 2)], 100).expect("table");
    let fresh = Piece { first: 2, pool: 12, len: 2, state: PieceState::Fresh };
    table.insert(fresh);
    assert_eq!(table.written_before(&fresh).map(|piece| piece.first), Some(0));
    assert_eq!(table.written_after(&fresh).map(|piece| piece.end()), Some(6));
    table.set_state(2, 4, PieceState::Written);
    assert_eq!(table.iter().count(), 1);
}
