//! Bitmaps of 64-bit words, with bit `n % 64` of word `n / 64`, and operations on ranges of bits.

use std::ops::Range;

/// The index of each word that a range touches, with a mask of the range's bits in it.
fn masks(range: Range<u64>) -> impl Iterator<Item = (usize, u64)> {
    let words = if range.is_empty() { 0..0 } else { range.start / 64..(range.end - 1) / 64 + 1 };
    words.map(move |word| {
        let from = range.start.saturating_sub(word * 64);
        let behind = ((word + 1) * 64).saturating_sub(range.end);
        (word as usize, (u64::MAX << from) & (u64::MAX >> behind))
    })
}

/// Gives all bits of a range one value.
pub(crate) fn fill(words: &mut [u64], range: Range<u64>, value: bool) {
    for (word, mask) in masks(range) {
        if value { words[word] |= mask } else { words[word] &= !mask }
    }
}

/// A bitmap of `bits` bits in which the bits of the ranges are set.
pub(crate) fn of(bits: u64, ranges: impl IntoIterator<Item = Range<u64>>) -> Vec<u64> {
    let mut words = vec![0; bits.div_ceil(64) as usize];
    ranges.into_iter().for_each(|range| fill(&mut words, range, true));
    words
}

/// The first bit of a range that has this value.
pub(crate) fn find(words: &[u64], range: Range<u64>, value: bool) -> Option<u64> {
    masks(range).find_map(|(word, mask)| {
        let found = (if value { words[word] } else { !words[word] }) & mask;
        (found != 0).then(|| word as u64 * 64 + u64::from(found.trailing_zeros()))
    })
}

/// How many bits of a range are set.
pub(crate) fn count(words: &[u64], range: Range<u64>) -> u64 {
    masks(range).map(|(word, mask)| u64::from((words[word] & mask).count_ones())).sum()
}

/// The next run of bits of one value within a range.
pub(crate) fn next_run(words: &[u64], range: Range<u64>, value: bool) -> Option<Range<u64>> {
    let start = find(words, range.clone(), value)?;
    Some(start..find(words, start..range.end, !value).unwrap_or(range.end))
}

/// All runs of bits of one value within a range, in order.
pub(crate) fn runs(words: &[u64], range: Range<u64>, value: bool) -> impl Iterator<Item = Range<u64>> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let run = next_run(words, at..range.end, value)?;
        at = run.end;
        Some(run)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranges_are_what_their_bits_are(
            fills in proptest::collection::vec((0u64..300, 0u64..300, any::<bool>()), 0..12),
            from in 0u64..300,
            to in 0u64..300,
        ) {
            let mut words = [0; 5];
            let mut model = [false; 300];
            for (start, end, value) in fills {
                fill(&mut words, start..end, value);
                (start..end).for_each(|bit| model[bit as usize] = value);
            }
            let is = |bit: &u64| model[*bit as usize];
            prop_assert_eq!(find(&words, from..to, true), (from..to).find(is));
            prop_assert_eq!(find(&words, from..to, false), (from..to).find(|bit| !is(bit)));
            prop_assert_eq!(count(&words, from..to), (from..to).filter(is).count() as u64);
            let mut rebuilt = [false; 300];
            for run in runs(&words, 0..300, true) {
                prop_assert!(!run.is_empty());
                prop_assert!(run.end == 300 || !model[run.end as usize]);
                run.for_each(|bit| rebuilt[bit as usize] = true);
            }
            prop_assert_eq!(rebuilt, model);
        }
    }
}
