//! Intervals of bytes: a search for those that overlap a range does not visit the others.
//!
//! # How it works
//! A treap: a binary tree in the order of (first byte, key), a heap in random priorities, which keeps it about as deep as the
//! logarithm of its size in whatever order intervals come and go. Each node knows the last byte that any interval below it
//! reaches, so that a search leaves out the intervals that end before its range. Priorities come from a state that is drawn
//! for each tree: a peer that chooses the intervals cannot choose the tree's shape.
//!
//! # Cost
//! A change takes time in the logarithm of the size; a search takes that for each interval it finds.

use super::LockRange;
use std::cmp::Ordering;
use std::hash::{BuildHasher, RandomState};

type Link<K, V> = Option<Box<Node<K, V>>>;

#[derive(Clone, Debug)]
struct Node<K, V> {
    range: LockRange,
    key: K,
    value: V,
    priority: u64,
    /// The last byte of any interval in the subtree of this node.
    reach: u64,
    left: Link<K, V>,
    right: Link<K, V>,
}

impl<K: Ord, V> Node<K, V> {
    fn order(&self, first: u64, key: &K) -> Ordering {
        (self.range.first, &self.key).cmp(&(first, key))
    }

    fn update(&mut self) {
        let below = [&self.left, &self.right].into_iter().flatten().map(|node| node.reach);
        self.reach = below.fold(self.range.last, u64::max);
    }
}

/// Intervals, each with a key that distinguishes it from others with the same first byte.
#[derive(Clone, Debug)]
pub struct Intervals<K, V> {
    root: Link<K, V>,
    len: usize,
    /// Number of nodes made so far.
    made: u64,
    state: RandomState,
}

impl<K, V> Default for Intervals<K, V> {
    fn default() -> Self {
        Self { root: None, len: 0, made: 0, state: RandomState::new() }
    }
}

impl<K: Ord, V> Intervals<K, V> {
    /// The number of intervals.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no interval.
    pub fn is_empty(&self) -> bool {
        self.root.is_none()
    }

    /// Adds an interval. There must be none with this first byte and this key.
    pub fn insert(&mut self, range: LockRange, key: K, value: V) {
        self.made += 1;
        let priority = self.state.hash_one(self.made);
        let reach = range.last;
        insert(
            &mut self.root,
            Box::new(Node { range, key, value, priority, reach, left: None, right: None }),
        );
        self.len += 1;
    }

    /// Removes the interval with this first byte and this key.
    pub fn remove(&mut self, first: u64, key: &K) -> Option<V> {
        let removed = remove(&mut self.root, first, key)?;
        self.len -= 1;
        Some(removed.value)
    }

    /// The interval with this first byte and this key.
    pub fn get(&self, first: u64, key: &K) -> Option<&V> {
        let mut next = self.root.as_deref();
        while let Some(node) = next {
            next = match node.order(first, key) {
                Ordering::Equal => return Some(&node.value),
                Ordering::Greater => node.left.as_deref(),
                Ordering::Less => node.right.as_deref(),
            };
        }
        None
    }

    /// The intervals that overlap a range, in order.
    pub fn overlapping(&self, range: LockRange) -> Overlapping<'_, K, V> {
        let mut found = Overlapping { range, path: Vec::new() };
        found.descend(self.root.as_deref());
        found
    }

    /// All intervals, in order.
    pub fn iter(&self) -> impl Iterator<Item = &V> {
        self.overlapping(LockRange { first: 0, last: u64::MAX })
    }
}

/// See [`Intervals::overlapping`].
pub struct Overlapping<'i, K, V> {
    range: LockRange,
    /// The next nodes to visit; the last one is the first in order.
    path: Vec<&'i Node<K, V>>,
}

impl<'i, K, V> Overlapping<'i, K, V> {
    fn descend(&mut self, from: Option<&'i Node<K, V>>) {
        let mut next = from;
        while let Some(node) = next.filter(|node| node.reach >= self.range.first) {
            #[cfg(test)]
            tests::LOOKED_AT.with(|count| count.set(count.get() + 1));
            self.path.push(node);
            next = node.left.as_deref();
        }
    }
}

impl<'i, K, V> Iterator for Overlapping<'i, K, V> {
    type Item = &'i V;

    fn next(&mut self) -> Option<&'i V> {
        while let Some(node) = self.path.pop() {
            if node.range.first > self.range.last {
                // All later intervals begin behind the range, too.
                self.path.clear();
                return None;
            }
            self.descend(node.right.as_deref());
            if node.range.last >= self.range.first {
                return Some(&node.value);
            }
        }
        None
    }
}

fn insert<K: Ord, V>(link: &mut Link<K, V>, mut node: Box<Node<K, V>>) {
    match link {
        Some(top) if top.priority >= node.priority => {
            let below = match top.order(node.range.first, &node.key) {
                Ordering::Greater => &mut top.left,
                Ordering::Less | Ordering::Equal => &mut top.right,
            };
            insert(below, node);
            top.update();
        }
        _ => {
            (node.left, node.right) = split(link.take(), node.range.first, &node.key);
            node.update();
            *link = Some(node);
        }
    }
}

fn remove<K: Ord, V>(link: &mut Link<K, V>, first: u64, key: &K) -> Link<K, V> {
    let top = link.as_mut()?;
    let below = match top.order(first, key) {
        Ordering::Equal => {
            let mut removed = link.take()?;
            *link = join(removed.left.take(), removed.right.take());
            return Some(removed);
        }
        Ordering::Greater => &mut top.left,
        Ordering::Less => &mut top.right,
    };
    let removed = remove(below, first, key);
    top.update();
    removed
}

/// Splits a tree into the intervals before (first, key) and the others.
fn split<K: Ord, V>(link: Link<K, V>, first: u64, key: &K) -> (Link<K, V>, Link<K, V>) {
    let Some(mut top) = link else { return (None, None) };
    if top.order(first, key) == Ordering::Less {
        let (before, after) = split(top.right.take(), first, key);
        top.right = before;
        top.update();
        (Some(top), after)
    } else {
        let (before, after) = split(top.left.take(), first, key);
        top.left = after;
        top.update();
        (before, Some(top))
    }
}

/// Joins two trees; all of the first comes before all of the second.
fn join<K: Ord, V>(before: Link<K, V>, after: Link<K, V>) -> Link<K, V> {
    match (before, after) {
        (Some(mut before), Some(after)) if before.priority >= after.priority => {
            before.right = join(before.right.take(), Some(after));
            before.update();
            Some(before)
        }
        (before, Some(mut after)) => {
            after.left = join(before, after.left.take());
            after.update();
            Some(after)
        }
        (before, None) => before,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::cell::Cell;
    use std::collections::BTreeMap;

    thread_local! {
        /// Nodes that this thread's searches have visited.
        pub(super) static LOOKED_AT: Cell<usize> = const { Cell::new(0) };
    }

    fn range(first: u64, last: u64) -> LockRange {
        LockRange { first, last }
    }

    proptest! {
        #[test]
        fn a_search_finds_what_a_walk_over_all_finds(
            steps in proptest::collection::vec((0..40u64, 0..12u64, 0..4u8, any::<bool>()), 1..200),
            searches in proptest::collection::vec((0..60u64, 0..20u64), 1..20),
        ) {
            let (mut intervals, mut model) = (Intervals::default(), BTreeMap::new());
            for (first, len, key, adds) in steps {
                let there = model.remove(&(first, key));
                prop_assert_eq!(intervals.get(first, &key), there.as_ref());
                prop_assert_eq!(intervals.remove(first, &key), there);
                if adds {
                    intervals.insert(range(first, first + len), key, (first, first + len));
                    model.insert((first, key), (first, first + len));
                }
                prop_assert_eq!(intervals.len(), model.len());
            }
            for (first, len) in searches {
                let found: Vec<_> = intervals.overlapping(range(first, first + len)).copied().collect();
                let overlaps = |(from, to): &(u64, u64)| *from <= first + len && first <= *to;
                let expected: Vec<_> = model.values().filter(|value| overlaps(value)).copied().collect();
                prop_assert_eq!(found, expected);
            }
            prop_assert!(intervals.iter().eq(model.values()));
            prop_assert_eq!(intervals.is_empty(), model.is_empty());
        }
    }

    #[test]
    fn a_search_looks_at_few_of_many_in_whatever_order_they_came() {
        const MANY: u64 = 65_536;
        for up in [true, false] {
            let mut intervals = Intervals::default();
            for number in 0..MANY {
                let first = 2 * if up { number } else { MANY - 1 - number };
                intervals.insert(range(first, first), 0, first);
            }
            LOOKED_AT.set(0);
            for first in (0..2 * MANY).step_by(1000) {
                let found: Vec<u64> = intervals.overlapping(range(first, first + 1)).copied().collect();
                assert_eq!(found, [first]);
            }
            let searches = (2 * MANY).div_ceil(1000) as usize;
            // The depth of a random tree is some three times the logarithm. Searches through everything would visit 65,536 nodes each.
            assert!(LOOKED_AT.get() < searches * 100, "{} for {searches} searches", LOOKED_AT.get());
        }
    }
}
