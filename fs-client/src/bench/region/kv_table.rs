//! A hash table in one file, made to be read from afar: a get is one read of one bucket.
//!
//! ```text
//!   bucket, 1024 bytes:  7 entries of 144 bytes, 16 bytes of zeros
//!   entry:  0 key (8)    8 value (128)    136 checksum of key and value, never 0 (8)      little-endian
//! ```
//!
//! An entry that is all zero is empty, and ends the search: keys that their bucket had no room for are in the next ones.
//! There are buckets behind the last that keys hash to, so that nothing wraps around. A reader takes no lock: whatever
//! it gets of an entry that is being written, or of another place, fails the checksum.

use super::positions::mix;

/// Bytes of a bucket: a quarter of a page, so that a get touches one page.
pub(super) const BUCKET_BYTES: usize = 1024;
/// Bytes of a value, as in the paper's section 6.6.2.
pub(super) const VALUE_BYTES: usize = 128;
const WORD_BYTES: usize = 8;
const ENTRY_BYTES: usize = WORD_BYTES + VALUE_BYTES + WORD_BYTES;
const ENTRIES: usize = BUCKET_BYTES / ENTRY_BYTES;
/// Keys for each bucket on average: half full, so that hardly a key is in another bucket than its own.
const KEYS_PER_BUCKET_HALVES: u64 = 7;
/// Buckets no key hashes to, at the end.
const SPARE_BUCKETS: u64 = 64;
/// A different mix than that of keys.
const CHECK_SALT: u64 = 0x6b76;

const _: () = assert!(ENTRIES == 7 && ENTRIES * ENTRY_BYTES <= BUCKET_BYTES);

/// How large a table is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// Buckets, spare ones included.
    pub(super) buckets: u64,
    /// Keys: the first numbers, mixed.
    pub(super) keys: u64,
}

/// What a reader found that nobody put there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("entry {entry} of bucket {bucket} is torn or damaged: its checksum does not match")]
pub(super) struct TornEntry {
    bucket: u64,
    entry: usize,
}

/// What a bucket says of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Its value, checked.
    Value([u8; VALUE_BYTES]),
    /// It is not in the table.
    Absent,
    /// The bucket is full of others: it may be in the next one.
    Next,
}

impl Shape {
    /// What fits into a file.
    ///
    /// # Errors
    /// If it holds next to nothing.
    pub(super) fn of_file(file_bytes: u64) -> anyhow::Result<Self> {
        let buckets = file_bytes / BUCKET_BYTES as u64;
        anyhow::ensure!(buckets > 2 * SPARE_BUCKETS, "--size is too little for a table");
        Ok(Self { buckets, keys: (buckets - SPARE_BUCKETS) * KEYS_PER_BUCKET_HALVES / 2 })
    }

    /// The bucket a key belongs to.
    pub(super) fn home(&self, key: u64) -> u64 {
        let range = u128::from(self.buckets - SPARE_BUCKETS);
        ((u128::from(mix(key)) * range) >> u64::BITS) as u64
    }
}

/// The key of a number.
pub(super) fn key_of(number: u64) -> u64 {
    mix(number)
}

/// The value that was put for a key.
pub(super) fn value_of(key: u64) -> [u8; VALUE_BYTES] {
    let mut value = [0; VALUE_BYTES];
    for (index, word) in value.chunks_exact_mut(WORD_BYTES).enumerate() {
        word.copy_from_slice(&mix(key ^ index as u64).to_le_bytes());
    }
    value
}

fn checksum(key: u64, value: &[u8]) -> u64 {
    let fold = |sum: u64, word: u64| mix(sum ^ word);
    value.chunks_exact(WORD_BYTES).map(word).fold(mix(key ^ CHECK_SALT), fold) | 1
}

fn word(bytes: &[u8]) -> u64 {
    let mut raw = [0; WORD_BYTES];
    raw.copy_from_slice(&bytes[..WORD_BYTES]);
    u64::from_le_bytes(raw)
}

/// Looks a key up in a bucket.
///
/// # Errors
/// If an entry before it, or its own, is torn.
pub(super) fn find(bytes: &[u8], bucket: u64, key: u64) -> Result<Found, TornEntry> {
    for (entry, bytes) in bytes.chunks_exact(ENTRY_BYTES).take(ENTRIES).enumerate() {
        let (this, value) = (word(bytes), &bytes[WORD_BYTES..WORD_BYTES + VALUE_BYTES]);
        let check = word(&bytes[WORD_BYTES + VALUE_BYTES..]);
        if check == 0 && bytes.iter().all(|byte| *byte == 0) {
            return Ok(Found::Absent);
        }
        if this != key && check != 0 {
            // Somebody else's: its owner checks it.
            continue;
        }
        if check != checksum(this, value) {
            return Err(TornEntry { bucket, entry });
        }
        let mut found = [0; VALUE_BYTES];
        found.copy_from_slice(value);
        return Ok(Found::Value(found));
    }
    Ok(Found::Next)
}

/// Makes a table's bytes from its first bucket to its last, without holding more than its keys.
pub(super) struct Builder {
    shape: Shape,
    /// Home and key, by home, last first.
    left: Vec<(u32, u64)>,
    /// Keys whose home was full.
    carried: std::collections::VecDeque<u64>,
    next_bucket: u64,
}

impl Builder {
    /// # Errors
    /// If there are more buckets than 32 bits can count.
    pub(super) fn new(shape: Shape) -> anyhow::Result<Self> {
        anyhow::ensure!(shape.buckets <= u64::from(u32::MAX), "--size is more than a table can have");
        let mut left: Vec<(u32, u64)> = (0..shape.keys)
            .map(|number| {
                let key = key_of(number);
                (shape.home(key) as u32, key)
            })
            .collect();
        left.sort_unstable_by(|a, b| b.cmp(a));
        Ok(Self { shape, left, carried: std::collections::VecDeque::new(), next_bucket: 0 })
    }

    /// The next buckets, as many as `len` bytes hold.
    pub(super) fn next(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        for bucket in bytes.chunks_exact_mut(BUCKET_BYTES) {
            while let Some(&(home, key)) = self.left.last()
                && u64::from(home) == self.next_bucket
            {
                self.carried.push_back(key);
                self.left.pop();
            }
            for entry in bucket.chunks_exact_mut(ENTRY_BYTES).take(ENTRIES) {
                let Some(key) = self.carried.pop_front() else {
                    break;
                };
                let value = value_of(key);
                entry[..WORD_BYTES].copy_from_slice(&key.to_le_bytes());
                entry[WORD_BYTES..WORD_BYTES + VALUE_BYTES].copy_from_slice(&value);
                entry[WORD_BYTES + VALUE_BYTES..].copy_from_slice(&checksum(key, &value).to_le_bytes());
            }
            self.next_bucket += 1;
        }
        bytes
    }

    /// # Errors
    /// If a key found no place, which takes a table far fuller than ours.
    pub(super) fn finish(self) -> anyhow::Result<()> {
        let all = self.next_bucket >= self.shape.buckets && self.left.is_empty() && self.carried.is_empty();
        anyhow::ensure!(all, "{} keys found no bucket", self.left.len() + self.carried.len());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> (Shape, Vec<u8>) {
        let shape = Shape::of_file(1 << 20).expect("shape");
        let mut builder = Builder::new(shape).expect("builder");
        let mut bytes = Vec::new();
        for _ in 0..4 {
            bytes.extend(builder.next(1 << 18));
        }
        builder.finish().expect("all keys have a place");
        (shape, bytes)
    }

    fn bucket(bytes: &[u8], number: u64) -> &[u8] {
        &bytes[number as usize * BUCKET_BYTES..][..BUCKET_BYTES]
    }

    fn get(shape: &Shape, bytes: &[u8], key: u64) -> Result<Option<[u8; VALUE_BYTES]>, TornEntry> {
        let mut at = shape.home(key);
        loop {
            match find(bucket(bytes, at), at, key)? {
                Found::Value(value) => return Ok(Some(value)),
                Found::Absent => return Ok(None),
                Found::Next => at += 1,
            }
        }
    }

    #[test]
    fn every_key_is_found_and_no_other() {
        let (shape, bytes) = table();
        assert!(shape.keys > 3000);
        for number in 0..shape.keys {
            let key = key_of(number);
            assert_eq!(get(&shape, &bytes, key), Ok(Some(value_of(key))), "{number}");
        }
        for number in shape.keys..shape.keys + 1000 {
            assert_eq!(get(&shape, &bytes, key_of(number)), Ok(None));
        }
    }

    #[test]
    fn a_torn_or_damaged_entry_is_found_out() {
        let (shape, bytes) = table();
        // A key that is the first of its bucket.
        let key = (0..shape.keys)
            .map(key_of)
            .find(|&key| word(bucket(&bytes, shape.home(key))) == key)
            .expect("one is");
        let home = shape.home(key);
        let place = home as usize * BUCKET_BYTES;
        for (at, what) in
            [(WORD_BYTES, "value"), (ENTRY_BYTES - 9, "value's end"), (ENTRY_BYTES - 8, "checksum")]
        {
            let mut damaged = bytes.clone();
            damaged[place + at] ^= 1;
            assert_eq!(get(&shape, &damaged, key), Err(TornEntry { bucket: home, entry: 0 }), "{what}");
        }
        let mut half = bytes.clone();
        half[place + 64..place + ENTRY_BYTES].fill(0);
        assert!(get(&shape, &half, key).is_err(), "half of it is not there yet");
    }
}
