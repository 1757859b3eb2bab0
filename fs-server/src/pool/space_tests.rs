//! The free space against a bitmap.

use super::*;
use crate::bits;
use proptest::prelude::*;
use std::collections::HashMap;

fn run(first: u64, len: u64) -> Run {
    Run { first: PoolPage(first), len }
}

fn space(pages: u64, used: impl IntoIterator<Item = (u64, u64)>) -> Space {
    let used = used.into_iter().map(|(first, len)| first..first + len);
    Space::new(pages, bits::of(pages, used)).expect("all are inside")
}

fn figures(free: u64, used: u64, quarantined: u64) -> SpaceFigures {
    SpaceFigures { pages: free + used + quarantined, free, used, quarantined }
}

#[test]
fn starts_from_what_is_named() {
    let space = space(10, [(8, 2), (0, 3), (3, 1)]);
    assert_eq!(space.figures(), figures(4, 6, 0));
    assert_eq!(space.allocate(4, None).expect("four are free"), [run(4, 4)]);
    assert_eq!(space.allocate(1, None), Err(NoSpace { wanted: 1, free: 0, quarantined: 0 }));
}

#[test]
fn pages_past_the_end_are_refused() {
    for (first, len) in [(10, 1), (63, 1), (64, 3), (200, 56)] {
        let past = Space::new(10, bits::of(256, std::iter::once(first..first + len)));
        assert_eq!(past.err(), Some(SpaceError::OutOfRange { first: PoolPage(first), len, pages: 10 }));
    }
    assert!(Space::new(0, Vec::new()).expect("an empty pool").allocate(1, None).is_err());
}

#[test]
fn goes_on_where_the_file_ends() {
    let space = space(100, [(50, 1)]);
    assert_eq!(space.allocate(10, Some(PoolPage(51))), Ok(vec![run(51, 10)]));
    // The pages 61 to 99 are free: the run at the hint is taken first, then the rest elsewhere.
    assert_eq!(space.allocate(40, Some(PoolPage(61))), Ok(vec![run(61, 39), run(0, 1)]));
    // The page of the hint is taken, so the best fitting run is.
    assert_eq!(space.allocate(2, Some(PoolPage(55))), Ok(vec![run(1, 2)]));
    assert_eq!(space.allocate(2, Some(PoolPage(5000))), Ok(vec![run(3, 2)]));
    assert_eq!(space.allocate(0, Some(PoolPage(10))), Ok(vec![]));
    // The hint is in the middle of a run: the pages on both sides stay free.
    assert_eq!(space.allocate(5, Some(PoolPage(20))), Ok(vec![run(20, 5)]));
    assert_eq!((space.free_runs(), space.figures()), (2, figures(40, 60, 0)));
}

#[test]
fn the_first_pages_of_a_place_for_more() {
    let space = space(100, [(20, 1), (50, 1)]);
    let mut seen = Vec::new();
    let first = space.allocate_first(45, Some(PoolPage(60)), |runs| {
        seen = runs.to_vec();
        8
    });
    assert_eq!((first, &seen[..]), (Some(run(60, 8)), &[run(60, 40), run(51, 5)][..]));
    assert_eq!(space.figures(), figures(90, 10, 0));
    assert_eq!(
        space.allocate_first(30, None, |runs| runs[0].len + 1),
        Some(run(68, 30)),
        "no more than there is"
    );
    for (pages, kept) in [(60, 0), (61, 1), (0, 1)] {
        assert_eq!(space.allocate_first(pages, None, |_| kept), None, "{pages} {kept}");
    }
    assert_eq!((space.free_runs(), space.figures()), (4, figures(60, 40, 0)));
}

#[test]
fn what_is_free_or_about_to_be_is_not_used() {
    let space = space(100, [(10, 20)]);
    let is_used = |pages: &[u64]| pages.iter().map(|page| space.is_used(PoolPage(*page))).collect::<Vec<_>>();
    assert_eq!(is_used(&[9, 10, 29, 30, 99]), [false, true, true, false, false]);
    let seq = space.quarantine(&[run(12, 3), run(20, 1)]);
    assert_eq!(is_used(&[11, 12, 14, 15, 19, 20, 21]), [true, false, false, true, true, false, true]);
    space.release_quarantined(seq);
    assert_eq!(is_used(&[11, 12, 14, 15]), [true, false, false, true]);
}

#[test]
fn best_fit_keeps_large_runs() {
    let space = space(100, [(4, 1), (10, 1), (90, 10)]);
    assert_eq!(space.allocate(4, None), Ok(vec![run(0, 4)]));
    assert_eq!(space.allocate(79, None), Ok(vec![run(11, 79)]));
    assert_eq!(space.allocate(5, None), Ok(vec![run(5, 5)]));
}

#[test]
fn a_fragmented_pool_still_gives_its_last_page() {
    let pages = 20_000;
    let space = space(pages, (0..pages).step_by(2).map(|page| (page, 1)));
    assert_eq!(space.free_runs() as u64, pages / 2);
    assert_eq!(
        space.allocate(pages / 2 + 1, None),
        Err(NoSpace { wanted: pages / 2 + 1, free: pages / 2, quarantined: 0 })
    );
    let runs = space.allocate(pages / 2, None).expect("exactly what is free");
    assert_eq!(runs.len() as u64, pages / 2);
    assert_eq!(space.figures(), figures(0, pages, 0));
    space.give_back(&runs);
    let evens: Vec<Run> = (0..pages).step_by(2).map(|page| run(page, 1)).collect();
    space.give_back(&evens);
    assert_eq!((space.free_runs(), space.figures()), (1, figures(pages, 0, 0)));
}

#[test]
fn quarantined_pages_come_back_only_when_released() {
    let space = space(10, []);
    let runs = space.allocate(10, None).expect("all");
    assert_eq!(runs, [run(0, 10)]);
    let first = space.quarantine(&[run(0, 4)]);
    let mark = space.quarantine_mark();
    let second = space.quarantine(&[run(4, 2)]);
    assert!(first < second && first == mark);
    assert_eq!(space.allocate(1, None), Err(NoSpace { wanted: 1, free: 0, quarantined: 6 }));
    assert_eq!(space.figures(), figures(0, 4, 6));
    assert_eq!(space.release_quarantined(mark), 4);
    assert_eq!(space.release_quarantined(mark), 0);
    assert_eq!(space.figures(), figures(4, 4, 2));
    assert_eq!(space.release_quarantined(QuarantineSeq(u64::MAX)), 2);
    assert_eq!((space.free_runs(), space.figures()), (1, figures(6, 4, 0)));
}

#[test]
fn quarantined_pages_come_back_some_at_a_time() {
    let space = space(10, []);
    space.allocate(10, None).expect("all");
    space.quarantine(&[run(0, 1), run(2, 1), run(4, 1)]);
    let mark = space.quarantine_mark();
    space.quarantine(&[run(6, 1)]);
    assert!(space.release_some(mark, 2));
    assert_eq!(space.figures(), figures(2, 6, 2));
    assert!(!space.release_some(mark, 2), "what came behind the mark is not to be released");
    assert_eq!(space.figures(), figures(3, 6, 1));
}

#[test]
#[should_panic(expected = "is free")]
fn freeing_a_free_page_stops_the_server() {
    let space = space(10, [(3, 2)]);
    space.give_back(&[run(4, 2)]);
}

#[test]
#[should_panic(expected = "is quarantined")]
fn freeing_a_page_twice_stops_the_server() {
    let space = space(10, [(0, 10)]);
    space.quarantine(&[run(3, 4)]);
    space.quarantine(&[run(2, 3)]);
}

#[test]
fn threads_never_get_the_same_page() {
    let space = space(1 << 12, []);
    let owners: Vec<std::sync::atomic::AtomicU32> =
        (0..1 << 12).map(|_| std::sync::atomic::AtomicU32::new(0)).collect();
    std::thread::scope(|scope| {
        for thread in 1..=4u32 {
            let (space, owners) = (&space, &owners);
            scope.spawn(move || {
                for round in 0..500u64 {
                    let near = (round % 3 == 0).then_some(PoolPage(round * 7));
                    let Ok(runs) = space.allocate(1 + round % 900, near) else {
                        continue;
                    };
                    let pages = || runs.iter().flat_map(|run| run.first.0..run.end().0);
                    for page in pages() {
                        let before = owners[page as usize].swap(thread, std::sync::atomic::Ordering::SeqCst);
                        assert_eq!(before, 0, "page {page} has two owners");
                    }
                    for page in pages() {
                        owners[page as usize].store(0, std::sync::atomic::Ordering::SeqCst);
                    }
                    if round % 2 == 0 {
                        space.give_back(&runs);
                    } else {
                        space.quarantine(&runs);
                        space.release_quarantined(space.quarantine_mark());
                    }
                }
            });
        }
    });
    assert_eq!((space.free_runs(), space.figures()), (1, figures(1 << 12, 0, 0)));
}

#[test]
fn what_is_larger_than_a_part_goes_to_free_parts() {
    let parts = |number: u64| number * PART_PAGES;
    // Free are: two whole parts with 100 pages in front of them, four parts, and one part but for its first ten pages and its last.
    let space =
        space(parts(10), [(0, parts(1) - 100), (parts(3), parts(1)), (parts(8), 10), (parts(9) - 1, 1)]);
    assert_eq!(space.allocate(parts(2), None), Ok(vec![run(parts(1) - 100, parts(2))]));
    assert_eq!(space.allocate(parts(3), Some(PoolPage(0))), Ok(vec![run(parts(4), parts(3))]));
    // No free run is long enough, so the longest one is taken, and the best fit for the rest.
    let runs = space.allocate(parts(1) + 50, None).expect("that is free");
    assert_eq!(runs, [run(parts(7), parts(1)), run(parts(3) - 100, 50)]);
    space.give_back(&runs);
    assert_eq!(space.figures().free, parts(3) + 100 - 11);
}

#[test]
fn large_runs_stay_large_whatever_part_they_are_in() {
    // Part 1 begins with a free run of 600 pages, part 2 with one of 300; the other parts are all free.
    let part = PART_PAGES;
    let space = space(5 * part, [(part + 600, part - 600), (2 * part + 300, part - 300)]);
    let _behind = space.allocate(part, Some(PoolPage(0))).expect("free");
    assert_eq!(space.allocate(280, None), Ok(vec![run(2 * part, 280)]));
    assert_eq!(space.allocate(280, None), Ok(vec![run(part, 280)]));
    assert_eq!(space.allocate(310, None), Ok(vec![run(part + 280, 310)]));
    assert_eq!(space.allocate(part, None), Ok(vec![run(3 * part, part)]));
}

#[derive(Clone, Debug)]
enum Step {
    Allocate { pages: u64, near: Option<u64> },
    GiveBack { which: usize },
    Quarantine { which: usize },
    Release { ago: u64 },
}

/// Pages of the model's pool: three whole parts and a piece of one.
const PAGES: u64 = 3 * PART_PAGES + 77;

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (prop_oneof![0u64..40, 0u64..PAGES], proptest::option::of(0u64..PAGES + 20))
            .prop_map(|(pages, near)| Step::Allocate { pages, near }),
        1 => any::<usize>().prop_map(|which| Step::GiveBack { which }),
        2 => any::<usize>().prop_map(|which| Step::Quarantine { which }),
        1 => (0u64..4).prop_map(|ago| Step::Release { ago }),
    ]
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Page {
    Free,
    Used,
    Quarantined(QuarantineSeq),
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn agrees_with_a_bitmap(
        taken in proptest::collection::vec((0u64..PAGES, prop_oneof![1u64..3, 1u64..PAGES]), 0..60),
        steps in proptest::collection::vec(step(), 1..120),
    ) {
        let taken = taken.into_iter().map(|(page, len)| (page, len.min(PAGES - page)));
        let space = space(PAGES, taken.clone());
        let mut model = vec![Page::Free; PAGES as usize];
        for (page, len) in taken {
            model[page as usize..(page + len) as usize].fill(Page::Used);
        }
        let mut owned: Vec<Vec<Run>> = Vec::new();
        for step in steps {
            match step {
                Step::Allocate { pages, near } => {
                    let free = model.iter().filter(|page| **page == Page::Free).count() as u64;
                    match space.allocate(pages, near.map(PoolPage)) {
                        Ok(runs) => {
                            prop_assert!(pages <= free);
                            prop_assert_eq!(runs.iter().map(|run| run.len).sum::<u64>(), pages);
                            if let Some(near) = near
                                && pages > 0
                                && model.get(near as usize) == Some(&Page::Free)
                            {
                                prop_assert_eq!(runs[0].first, PoolPage(near));
                            }
                            for page in runs.iter().flat_map(|run| run.first.0..run.end().0) {
                                prop_assert_eq!(model[page as usize], Page::Free);
                                model[page as usize] = Page::Used;
                            }
                            owned.push(runs);
                        }
                        Err(error) => {
                            prop_assert!(pages > free);
                            prop_assert_eq!((error.wanted, error.free), (pages, free));
                        }
                    }
                }
                Step::GiveBack { which } if !owned.is_empty() => {
                    let runs = owned.swap_remove(which % owned.len());
                    space.give_back(&runs);
                    for page in runs.iter().flat_map(|run| run.first.0..run.end().0) {
                        model[page as usize] = Page::Free;
                    }
                }
                Step::Quarantine { which } if !owned.is_empty() => {
                    let runs = owned.swap_remove(which % owned.len());
                    let seq = space.quarantine(&runs);
                    for page in runs.iter().flat_map(|run| run.first.0..run.end().0) {
                        model[page as usize] = Page::Quarantined(seq);
                    }
                }
                Step::GiveBack { .. } | Step::Quarantine { .. } => {}
                Step::Release { ago } => {
                    let up_to = QuarantineSeq(space.quarantine_mark().0.saturating_sub(ago));
                    space.release_quarantined(up_to);
                    for page in &mut model {
                        if matches!(page, Page::Quarantined(seq) if *seq <= up_to) {
                            *page = Page::Free;
                        }
                    }
                }
            }
            let mut counts: HashMap<&str, u64> = HashMap::new();
            for page in &model {
                let kind = match page {
                    Page::Free => "free",
                    Page::Used => "used",
                    Page::Quarantined(_) => "quarantined",
                };
                *counts.entry(kind).or_default() += 1;
            }
            let count = |kind| counts.get(kind).copied().unwrap_or(0);
            prop_assert_eq!(space.figures(), SpaceFigures {
                pages: PAGES,
                free: count("free"),
                used: count("used"),
                quarantined: count("quarantined"),
            });
            let edges = (0..PAGES as usize)
                .filter(|&page| model[page] == Page::Free && (page == 0 || model[page - 1] != Page::Free))
                .count();
            prop_assert_eq!(space.free_runs(), edges, "free runs are merged");
        }
    }
}
