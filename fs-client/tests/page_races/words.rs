//! Self-describing pages: one word says whose it is, and judges whether it may be there.
//!
//! A page has one writer, which counts its versions. Even versions are bytes, odd ones zeros (a hole). Some versions
//! are written in two parts, the rear first, so that a reader may see the version before in front of the cut.

use cuttlefs_common::ids::PAGE_SIZE;
use std::sync::atomic::{AtomicU64, Ordering};

/// Words of a page.
pub const WORDS: usize = PAGE_SIZE / 8;
const VERSION_BITS: u32 = 36;

/// The word of a page's version: file (16 bits), page (12 bits) and version, never 0. A magic pattern is random, so
/// these words are none.
pub fn word(file: u64, page: u64, version: u64) -> u64 {
    assert!(file > 0 && file < 1 << 16 && page < 1 << 12 && version < 1 << VERSION_BITS);
    (file << 48) | (page << VERSION_BITS) | version
}

/// `words` words of a version, as bytes.
pub fn bytes_of(file: u64, page: u64, version: u64, words: usize) -> Vec<u8> {
    word(file, page, version).to_le_bytes().repeat(words)
}

/// Where a version is cut that is written in two parts; 0: it is written in one.
pub fn cut_of(file: u64, page: u64, version: u64) -> usize {
    let hash = word(file, page, version).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    if hash.is_multiple_of(3) { 1 + (hash as usize / 3) % (WORDS - 1) } else { 0 }
}

/// The version of a word of this page; `None` for zero.
///
/// # Panics
/// The word is another page's.
pub fn version_of(file: u64, page: u64, word_read: u64) -> Option<u64> {
    if word_read == 0 {
        return None;
    }
    let whose = (word_read >> 48, (word_read >> VERSION_BITS) & 0xfff);
    assert_eq!(whose, (file, page), "file {file} page {page} shows {word_read:x}");
    Some(word_read & ((1 << VERSION_BITS) - 1))
}

/// The words of bytes that begin and end at multiples of eight.
pub fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")))
}

/// What may be seen of one page. Its writer stores, with `SeqCst`: before it begins a version `zeroed` or nothing and
/// then `begun`, once the version is all there `done`. Readers load `done` before a read and the others after.
pub struct PageState {
    begun: AtomicU64,
    done: AtomicU64,
    zeroed: AtomicU64,
}

impl PageState {
    /// A page without bytes.
    pub fn new() -> Self {
        Self { begun: AtomicU64::new(1), done: AtomicU64::new(1), zeroed: AtomicU64::new(1) }
    }

    /// Begins the next version, of zeros or of bytes.
    pub fn begin(&self, zeros: bool) -> u64 {
        let begun = self.begun.load(Ordering::SeqCst);
        let next = if begun.is_multiple_of(2) != zeros { begun + 2 } else { begun + 1 };
        if zeros {
            self.zeroed.store(next, Ordering::SeqCst);
        }
        self.begun.store(next, Ordering::SeqCst);
        next
    }

    /// The version is all there.
    pub fn end(&self, version: u64) {
        self.done.store(version, Ordering::SeqCst);
    }

    /// The last version that was all there.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::SeqCst)
    }

    /// Judges a part of the page, from `first_word` on, read after `floor` was done.
    pub fn judge(&self, file: u64, page: u64, first_word: usize, floor: u64, part: &[u8]) {
        let zeroed = self.zeroed.load(Ordering::SeqCst);
        let begun = self.begun.load(Ordering::SeqCst);
        let mut before: Option<u64> = None;
        let mut cuts = 0;
        for (index, read) in words(part).enumerate() {
            if before != Some(read) {
                let version = version_of(file, page, read);
                let context =
                    || format!("file {file} page {page}: {version:?} of {floor}..={begun}, zeros {zeroed}");
                match version {
                    None => assert!(zeroed >= floor, "{}", context()),
                    Some(version) => assert!((floor..=begun).contains(&version), "{}", context()),
                }
                if let Some(before) = before {
                    cuts += 1;
                    let front = version_of(file, page, before).unwrap_or(0);
                    let rear = version.unwrap_or(0);
                    let at = first_word + index;
                    let is_cut = cuts == 1 && front < rear && at == cut_of(file, page, rear);
                    assert!(is_cut, "file {file} page {page} is torn at word {at}: {front} {rear}");
                }
                before = Some(read);
            }
        }
    }
}
