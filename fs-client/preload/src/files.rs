//! The files of mounts that this process reads, by what the kernel calls them. A close(2) forgets the file, and so does [`Files::forget_idle`]: a file
//! that is held open longer than the program does would keep the space of a removed file.
//!
//! # Bound
//! [`FILES_MAX`] files; then the one that was read the longest ago is forgotten.

use crate::descriptor::{FileId, Regular};
use cuttlefs_client::native::File;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// The most files that are remembered.
const FILES_MAX: usize = 256;
/// Reads of a file, and bytes of them, that are left to the kernel before the file is opened here, which costs a request: most files are read once, as
/// a whole.
const FIRST_READS: u32 = 8;
const FIRST_BYTES: u64 = 1 << 20;
/// Ticks without a read after which a file is forgotten.
const IDLE_TICKS: u64 = 5;
/// Ticks until a file that could not be opened is tried again.
const AGAIN_TICKS: u64 = 10;

/// What is known of a file.
enum Known {
    /// It was read so often, through the kernel.
    Counted { reads: u32, bytes: u64 },
    /// It is open here.
    Open(File),
    /// It could not be opened at that tick.
    Refused { tick: u64 },
}

struct Entry {
    known: Known,
    read_at: u64,
    /// Its length at the first look.
    len: u64,
    /// Whether a look found another length.
    is_changing: bool,
}

/// What to do about a read of a file.
pub(crate) enum Way {
    /// Leave it to the kernel: it is one of the first.
    First,
    /// Leave it to the kernel: the file could not be opened.
    Refused,
    /// Open the file, then [`Files::opened`] or [`Files::refused`].
    Open,
    /// Read it. The length of one that `is_changing` was another one at an earlier look.
    Read { file: File, is_changing: bool },
}

/// The files; see the module.
#[derive(Default)]
pub(crate) struct Files {
    known: Mutex<HashMap<FileId, Entry>>,
    /// As many as `known` has. Relaxed: a close beside another thread's first read may miss it, and then the file is forgotten when it is idle.
    count: AtomicU64,
    /// Seconds, as the engine counts them. Relaxed: a coarse clock.
    tick: AtomicU64,
}

impl Files {
    fn now(&self) -> u64 {
        self.tick.load(Ordering::Relaxed)
    }

    /// The way of a read of so many bytes.
    pub(crate) fn way(&self, found: &Regular, wanted: u64) -> Way {
        let Regular { id, len } = *found;
        let now = self.now();
        let mut known = self.known.lock();
        if !known.contains_key(&id) {
            if known.len() >= FILES_MAX
                && let Some(oldest) = known.iter().min_by_key(|(_, entry)| entry.read_at).map(|(id, _)| *id)
            {
                known.remove(&oldest);
            }
            let first = Known::Counted { reads: 0, bytes: 0 };
            known.insert(id, Entry { known: first, read_at: now, len, is_changing: false });
            self.count.store(known.len() as u64, Ordering::Relaxed);
        }
        let Some(entry) = known.get_mut(&id) else { return Way::First };
        entry.read_at = now;
        entry.is_changing |= entry.len != len;
        match &mut entry.known {
            Known::Open(file) => Way::Read { file: file.clone(), is_changing: entry.is_changing },
            Known::Refused { tick } if now.saturating_sub(*tick) < AGAIN_TICKS => Way::Refused,
            Known::Refused { .. } => Way::Open,
            Known::Counted { reads, bytes } => {
                *reads += 1;
                *bytes += wanted;
                if *reads > FIRST_READS || *bytes > FIRST_BYTES { Way::Open } else { Way::First }
            }
        }
    }

    /// The file is open here, unless the program has closed it meanwhile.
    pub(crate) fn opened(&self, id: FileId, file: File) {
        if let Some(entry) = self.known.lock().get_mut(&id) {
            entry.known = Known::Open(file);
        }
    }

    /// The file cannot be opened here, or not be read.
    pub(crate) fn refused(&self, id: FileId) {
        let tick = self.now();
        if let Some(entry) = self.known.lock().get_mut(&id) {
            entry.known = Known::Refused { tick };
        }
    }

    /// Whether nothing is remembered: then a close need not be looked at.
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Whether a thread is in the middle of a look or a change.
    pub(crate) fn is_locked(&self) -> bool {
        self.known.is_locked()
    }

    /// A descriptor of the file is closed, or the file is mapped. If another descriptor reads on, the file is opened again.
    pub(crate) fn forget(&self, id: FileId) {
        let mut known = self.known.lock();
        let gone = known.remove(&id);
        self.count.store(known.len() as u64, Ordering::Relaxed);
        drop(known);
        drop(gone);
    }

    /// A second is over.
    pub(crate) fn forget_idle(&self) {
        let now = self.tick.fetch_add(1, Ordering::Relaxed) + 1;
        let mut known = self.known.lock();
        let idle = |entry: &Entry| {
            let limit = if matches!(entry.known, Known::Refused { .. }) { AGAIN_TICKS } else { IDLE_TICKS };
            now.saturating_sub(entry.read_at) > limit
        };
        let gone: Vec<Entry> = known.extract_if(|_, entry| idle(entry)).map(|(_, entry)| entry).collect();
        self.count.store(known.len() as u64, Ordering::Relaxed);
        drop(known);
        drop(gone);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(ino: u64) -> Regular {
        Regular { id: FileId { device: (0, 1), ino }, len: 1 << 20 }
    }

    #[test]
    fn the_first_reads_are_the_kernels() {
        let files = Files::default();
        assert!(files.is_empty());
        for _ in 0..FIRST_READS {
            assert!(matches!(files.way(&file(1), 10), Way::First));
        }
        assert!(matches!(files.way(&file(1), 10), Way::Open));
        assert!(matches!(files.way(&file(2), FIRST_BYTES), Way::First));
        assert!(matches!(files.way(&file(2), 1), Way::Open));
        files.refused(file(2).id);
        assert!(matches!(files.way(&file(2), 1), Way::Refused));
        (0..AGAIN_TICKS).for_each(|_| {
            assert!(matches!(files.way(&file(2), 1), Way::Refused));
            files.forget_idle();
        });
        assert!(matches!(files.way(&file(2), 1), Way::Open));
        files.forget(file(1).id);
        files.forget(file(2).id);
        assert!(files.is_empty());
        files.refused(file(1).id);
        assert!(files.is_empty(), "a file that was closed meanwhile stays forgotten");
    }

    #[test]
    fn a_file_with_another_length_than_at_the_first_look_is_changing() {
        let files = Files::default();
        let longer = Regular { len: file(1).len + 1, ..file(1) };
        let is_changing = |ino| files.known.lock().get(&file(ino).id).map(|entry| entry.is_changing);
        for (found, expected) in [(file(1), false), (file(1), false), (longer, true), (file(1), true)] {
            files.way(&found, 10);
            files.way(&file(2), 10);
            assert_eq!((is_changing(1), is_changing(2)), (Some(expected), Some(false)));
        }
        files.forget(file(1).id);
        files.way(&longer, 10);
        assert_eq!(is_changing(1), Some(false), "that is its first look");
    }

    #[test]
    fn idle_files_and_the_oldest_of_too_many_are_forgotten() {
        let files = Files::default();
        for ino in 0..2 * FILES_MAX as u64 {
            files.way(&file(ino), 1);
        }
        assert_eq!(files.known.lock().len(), FILES_MAX);
        (0..=IDLE_TICKS).for_each(|_| files.forget_idle());
        assert!(files.is_empty());
    }
}
