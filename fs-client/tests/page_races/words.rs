//! Self-describing pages: each word says to which page and version it belongs, so a reader can judge whether it may see the word.
//!
//! A page has one writer, which counts its versions. Even versions are bytes, odd ones zeros (a hole). Some versions are written in two parts, the
//! rear part first, so that a reader may see the version before it in front of the cut.

use cuttlefs_common::ids::PAGE_SIZE;
use std::sync::atomic::{AtomicU64, Ordering};

/// The number of words of a page.
pub const WORDS: usize = PAGE_SIZE / 8;
const VERSION_BITS: u32 = 36;

/// The word of a page's version: file (16 bits), page (12 bits) and version. It is never 0, and never equals a part of the magic pattern, which is
/// random.
pub fn word(file: u64, page: u64, version: u64) -> u64 {
    assert!(file > 0 && file < 1 << 16 && page < 1 << 12 && version < 1 << VERSION_BITS);
    (file << 48) | (page << VERSION_BITS) | version
}

/// The first `words` words of a version, as bytes.
pub fn bytes_of(file: u64, page: u64, version: u64, words: usize) -> Vec<u8> {
    word(file, page, version).to_le_bytes().repeat(words)
}

/// The word at which a version that is written in two parts is cut; 0 for a version that is written at once.
pub fn cut_of(file: u64, page: u64, version: u64) -> usize {
    let hash = word(file, page, version).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    if hash.is_multiple_of(3) { 1 + (hash as usize / 3) % (WORDS - 1) } else { 0 }
}

/// The version in a word of this page; `None` for zero.
///
/// # Panics
/// The word belongs to another page.
pub fn version_of(file: u64, page: u64, word_read: u64) -> Option<u64> {
    if word_read == 0 {
        return None;
    }
    let whose = (word_read >> 48, (word_read >> VERSION_BITS) & 0xfff);
    assert_eq!(whose, (file, page), "file {file} page {page} shows {word_read:x}");
    Some(word_read & ((1 << VERSION_BITS) - 1))
}

/// The words of a byte string whose length is a multiple of eight.
pub fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")))
}

/// The versions of one page that may be seen. With `SeqCst` its writer stores `zeroed`, if the next version is zeros, and then `begun` before it
/// writes the version, and `done` after the last part. A reader loads `done` before it reads, and the others afterwards.
pub struct PageState {
    begun: AtomicU64,
    done: AtomicU64,
    zeroed: AtomicU64,
}

impl PageState {
    /// A page that is a hole.
    pub fn new() -> Self {
        Self { begun: AtomicU64::new(1), done: AtomicU64::new(1), zeroed: AtomicU64::new(1) }
    }

    /// Begins the next version of zeros or of bytes; returns its number.
    pub fn begin(&self, zeros: bool) -> u64 {
        let begun = self.begun.load(Ordering::SeqCst);
        let next = if begun.is_multiple_of(2) != zeros { begun + 2 } else { begun + 1 };
        if zeros {
            self.zeroed.store(next, Ordering::SeqCst);
        }
        self.begun.store(next, Ordering::SeqCst);
        next
    }

    /// The version has been written completely.
    pub fn end(&self, version: u64) {
        self.done.store(version, Ordering::SeqCst);
    }

    /// The last version that was written completely.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::SeqCst)
    }

    /// Checks a part of the page that begins at `first_word` and was read after version `floor` was done.
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
