//! The steps of a walk.

use super::super::step::end;
use super::SPAN;
use cuttlefs_common::life::End;
use cuttlefs_common::rdma::sim::Cut;
use proptest::prelude::*;

/// A step of a walk.
#[derive(Clone, Debug)]
pub enum Step {
    Grant {
        offset: usize,
        len: usize,
    },
    GiveBack {
        which: usize,
    },
    Write {
        offset: usize,
        len: usize,
    },
    Append {
        len: usize,
    },
    /// The session appends under a grant, and then another one by a request. Then the server may die at some event.
    AppendBehind {
        len: usize,
        end: Option<End>,
    },
    Add {
        word: usize,
        add: u64,
    },
    Swap {
        word: usize,
        hits: bool,
    },
    SetLen {
        len: usize,
    },
    Sync,
    /// The file's pages move to fewer runs of the pool.
    Defragment,
    /// Another file takes the frames.
    Evict,
    /// A file is made, and removed again: pages of the pool are used for others.
    Reuse {
        pages: usize,
    },
    Unbind,
    /// Session 0 binds the file, and session 2 opens it by the key.
    HandOver {
        lifetime_ms: Option<u64>,
    },
    /// Session 1 is gone without a word, and another one takes its place.
    Vanish,
    Pass {
        ms: u64,
    },
    Lose {
        cut: Cut,
        pass: u32,
    },
    Die {
        end: End,
    },
}

/// A step, and the session that does it.
pub fn step() -> impl Strategy<Value = (usize, Step)> {
    let granted = || prop_oneof![1 => (0..SPAN / 2, 1..SPAN / 2), 2 => (Just(0), SPAN / 2..SPAN)];
    let range = || (0..SPAN).prop_flat_map(|offset| (Just(offset), 1..=(SPAN - offset).min(9000)));
    let word = || prop_oneof![3 => 0..SPAN / 32, 1 => 0..SPAN / 8];
    let cut = prop_oneof![1 => Just(Cut::Request), 1 => Just(Cut::Reply), 3 => Just(Cut::OneSided)];
    let step = prop_oneof![
        6 => granted().prop_map(|(offset, len)| Step::Grant { offset, len }),
        1 => (0usize..8).prop_map(|which| Step::GiveBack { which }),
        8 => range().prop_map(|(offset, len)| Step::Write { offset, len }),
        6 => (1usize..2500).prop_map(|len| Step::Append { len }),
        4 => (1usize..600, prop::option::of(end())).prop_map(|(len, end)| Step::AppendBehind { len, end }),
        5 => (word(), any::<u64>()).prop_map(|(word, add)| Step::Add { word, add }),
        5 => (word(), any::<bool>()).prop_map(|(word, hits)| Step::Swap { word, hits }),
        2 => (0..SPAN).prop_map(|len| Step::SetLen { len }),
        4 => Just(Step::Sync),
        3 => Just(Step::Defragment),
        2 => Just(Step::Evict),
        2 => (1usize..40).prop_map(|pages| Step::Reuse { pages }),
        1 => Just(Step::Unbind),
        2 => prop::option::weighted(0.3, 100u64..6000).prop_map(|lifetime_ms| Step::HandOver { lifetime_ms }),
        1 => Just(Step::Vanish),
        3 => (1u64..3000).prop_map(|ms| Step::Pass { ms }),
        3 => (cut, 0u32..4).prop_map(|(cut, pass)| Step::Lose { cut, pass }),
        3 => end().prop_map(|end| Step::Die { end }),
    ];
    (0usize..3, step)
}
