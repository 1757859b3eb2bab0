//! Shared memory for a model checker: words that a model has named are the checker's atomics, all others are in the mapping.
//!
//! The checker cannot see into mapped memory. A model names the few words that it is about before it starts its threads ([`Words::observe`]); from
//! then on `load_u64`, `store_u64`, `read` and `write` of these words go to the checker. Copies are word by word and relaxed, since the racing copies
//! of the product promise no order. All other accesses bypass the checker.
//!
//! Works inside `loom::model` only. Misuse (a part of a named word) asserts.

use loom::sync::atomic::AtomicU64;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, RwLock};

pub use loom::sync::atomic::fence;

/// Bytes of a word.
const WORD: usize = 8;

/// The named words of one memory.
#[derive(Debug, Default)]
pub struct Words(RwLock<BTreeMap<usize, Arc<AtomicU64>>>);

impl Words {
    /// From now on the checker sees the words of `[offset, offset + len)`, which are zero.
    pub fn observe(&self, offset: usize, len: usize) {
        assert!(offset.is_multiple_of(WORD) && len.is_multiple_of(WORD), "whole words only");
        let mut words = self.0.write().expect("nobody panics with it");
        words.extend((offset..offset + len).step_by(WORD).map(|at| (at, Arc::new(AtomicU64::new(0)))));
    }

    /// The word at `offset`, if it is a named one.
    pub fn at(&self, offset: usize) -> Option<Arc<AtomicU64>> {
        self.0.read().expect("nobody panics with it").get(&offset).cloned()
    }

    /// The words of a range, in order; `None` if none of them is named.
    fn of(&self, offset: usize, len: usize) -> Option<Vec<Arc<AtomicU64>>> {
        let words = self.0.read().expect("nobody panics with it");
        words.range(offset.saturating_sub(WORD - 1)..offset + len).next()?;
        assert!(offset.is_multiple_of(WORD) && len.is_multiple_of(WORD), "a part of a named word");
        let word = |at| words.get(&at).expect("all words of a range are named, or none").clone();
        Some((offset..offset + len).step_by(WORD).map(word).collect())
    }

    /// Copies a range out; `false` if it is not named.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> bool {
        let Some(words) = self.of(offset, out.len()) else {
            return false;
        };
        for (word, out) in words.iter().zip(out.chunks_exact_mut(WORD)) {
            out.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        true
    }

    /// Copies bytes in; `false` if the range is not named.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> bool {
        let Some(words) = self.of(offset, bytes.len()) else {
            return false;
        };
        for (word, bytes) in words.iter().zip(bytes.chunks_exact(WORD)) {
            word.store(u64::from_ne_bytes(bytes.try_into().expect("a word")), Ordering::Relaxed);
        }
        true
    }
}

/// A lock that the checker sees, with the interface of the product's.
#[derive(Debug, Default)]
pub struct Mutex<T>(loom::sync::Mutex<T>);

impl<T> Mutex<T> {
    /// A lock of this value.
    pub fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    /// Waits for the lock.
    pub fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
        self.0.lock().expect("nobody panics with it")
    }
}
