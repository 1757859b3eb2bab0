//! Filekeys that a client has closed, for as long as its counters may name them.
//!
//! A client counts its one-sided reads by filekey, and the server pulls the counts once a period (`rpc/sampling.rs`). Most files are closed
//! sooner. A key is kept from its close to the end of the first pull that begins after it: the next pull forgets it.

use cuttlefs_common::ids::{FileKey, InodeNo};
use parking_lot::Mutex;
use std::collections::HashMap;

/// Keys kept from one pull to the next. Reads of further files that are closed in that time are not heard of.
const CLOSED_KEPT: usize = 4096;

#[derive(Default)]
struct Kept {
    /// Closed since the last pull began.
    since: HashMap<FileKey, InodeNo>,
    /// Closed before that, and after the pull before it began.
    before: HashMap<FileKey, InodeNo>,
}

/// See the module. Nothing is kept until the client has shared its counters.
#[derive(Default)]
pub(crate) struct ClosedKeys(Mutex<Option<Kept>>);

impl ClosedKeys {
    /// The client counts: keys are kept from now on.
    pub(crate) fn begin(&self) {
        self.0.lock().get_or_insert_default();
    }

    /// Keeps keys of files that the client could read and is closing. `files` is asked for them only if they are to be kept.
    pub(crate) fn note<I: Iterator<Item = (FileKey, InodeNo)>>(&self, files: impl FnOnce() -> I) {
        if let Some(kept) = &mut *self.0.lock() {
            let room = CLOSED_KEPT.saturating_sub(kept.since.len());
            kept.since.extend(files().take(room));
        }
    }

    /// The client's counters are being pulled.
    pub(crate) fn begin_pull(&self) {
        if let Some(kept) = &mut *self.0.lock() {
            kept.before = std::mem::take(&mut kept.since);
        }
    }

    /// The file that a closed key named.
    pub(crate) fn get(&self, filekey: FileKey) -> Option<InodeNo> {
        let kept = self.0.lock();
        let kept = kept.as_ref()?;
        kept.since.get(&filekey).or_else(|| kept.before.get(&filekey)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(keys: &ClosedKeys, range: std::ops::Range<u64>) {
        keys.note(|| range.map(|key| (FileKey(key), InodeNo(key + 100))));
    }

    #[test]
    fn a_key_is_known_until_the_second_pull_behind_its_close_begins() {
        let keys = ClosedKeys::default();
        note(&keys, 1..2);
        assert_eq!(keys.get(FileKey(1)), None, "nobody counts");
        keys.begin();
        note(&keys, 2..3);
        assert_eq!(keys.get(FileKey(2)), Some(InodeNo(102)), "a pull that is under way may find it");
        keys.begin_pull();
        note(&keys, 3..4);
        assert_eq!(keys.get(FileKey(2)), Some(InodeNo(102)));
        keys.begin_pull();
        assert_eq!((keys.get(FileKey(2)), keys.get(FileKey(3))), (None, Some(InodeNo(103))));
        keys.begin();
        assert!(keys.get(FileKey(3)).is_some(), "to be told of counters again changes nothing");
    }

    #[test]
    fn few_are_kept() {
        let keys = ClosedKeys::default();
        keys.begin();
        note(&keys, 0..2 * CLOSED_KEPT as u64);
        let last = CLOSED_KEPT as u64 - 1;
        assert!(keys.get(FileKey(last)).is_some() && keys.get(FileKey(last + 1)).is_none());
    }
}
