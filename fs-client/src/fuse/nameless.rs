//! Opens of files without a name.
//!
//! The kernel remembers names for as long as entries may be cached, and opens the file of a name by its inode. If another client removed that name,
//! or put another file in its place, the inode may still exist, because a process has it open. To open it would read, or roll back, a file that
//! others have removed. So such an open is refused with `ESTALE`, after which the kernel looks the name up once more, and opens the file that it
//! finds. The same holds for a file that others have moved away. A file that has just been looked up again is opened even if it is moved or removed
//! in between, as on any file system: otherwise opens would fail beside a program that moves files all the time.
//!
//! A file can be opened without a name, too, through `/proc/PID/fd`. Then the kernel has no name to look up, and the same thread asks to open the
//! same inode again at once. This distinguishes the two cases: a thread that was refused and asks again gets the file.
//!
//! # Bound
//! [`MOST`] threads. Beyond that all are forgotten, and opens through `/proc` that are under way are refused.

use super::told_names::NameId;
use cuttlefs_common::attr::FileKind;
use cuttlefs_common::ids::InodeNo;
use parking_lot::Mutex;
use std::collections::HashMap;

/// The most threads that are remembered.
const MOST: usize = 1024;
/// The thread id that the kernel gives for threads of a container that this process cannot see. They cannot be distinguished, so none of them gets a
/// file without a name.
const UNKNOWN: u32 = 0;

/// What a thread has done since it was refused an open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Since {
    /// Nothing. It was refused this inode.
    Refused(InodeNo),
    /// It has looked up directories and symlinks, on the way to a file.
    Walks,
    /// It has found this file, in its last lookup.
    Found(InodeNo),
    /// It has found no file of this name. The kernel, which remembered the name, looks it up once more before it believes that.
    Missed(NameId),
}

/// The threads that were refused an open.
#[derive(Debug, Default)]
pub(super) struct NamelessOpens {
    refused: Mutex<HashMap<u32, Since>>,
}

impl NamelessOpens {
    /// A thread asks to open an inode. Returns whether the inode may be opened whatever names it has: because the thread was refused just now, and
    /// asks for the same inode again, or for the file that it has looked up since. Otherwise a name led to the inode that the kernel may have
    /// remembered for too long.
    pub(super) fn is_trusted(&self, thread: u32, ino: InodeNo) -> bool {
        let mut refused = self.refused.lock();
        let since = if refused.is_empty() { None } else { refused.remove(&thread) };
        matches!(since, Some(Since::Found(known) | Since::Refused(known)) if known == ino)
    }

    /// The thread was refused an open of this inode.
    pub(super) fn note_refused(&self, thread: u32, ino: InodeNo) {
        if thread == UNKNOWN {
            return;
        }
        let mut refused = self.refused.lock();
        if refused.len() >= MOST {
            refused.clear();
        }
        refused.insert(thread, Since::Refused(ino));
    }

    /// The thread has looked up a name, and found this inode, or nothing.
    pub(super) fn note_lookup(&self, thread: u32, name: NameId, found: Option<(InodeNo, FileKind)>) {
        let mut refused = self.refused.lock();
        let Some(since) = refused.get_mut(&thread) else { return };
        let missed = match *since {
            Since::Missed(before) => Some(before),
            _ => None,
        };
        match found {
            // The thread looks for something else by now.
            _ if missed.is_some_and(|before| before != name) => drop(refused.remove(&thread)),
            // The kernel looks a name up twice if it now means another file than the kernel remembered.
            Some((ino, FileKind::File)) => *since = Since::Found(ino),
            Some(_) => *since = Since::Walks,
            None if missed.is_none() => *since = Since::Missed(name),
            // There is nothing to open.
            None => drop(refused.remove(&thread)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_refused_gets_the_same_or_what_he_looked_up_since_and_once() {
        let opens = NamelessOpens::default();
        let (one, other) = (InodeNo(7), InodeNo(8));
        assert!(!opens.is_trusted(1, one));
        opens.note_refused(1, one);
        assert!(!opens.is_trusted(2, one), "another thread");
        assert!(opens.is_trusted(1, one), "asked again");
        assert!(!opens.is_trusted(1, one), "that was answered");
        opens.note_refused(1, one);
        assert!(!opens.is_trusted(1, other), "another file");
        assert!(!opens.is_trusted(1, one), "not at once");
        let (directory, file) = (Some((other, FileKind::Directory)), Some((one, FileKind::File)));
        let (symlink, another) = (Some((other, FileKind::Symlink)), Some((other, FileKind::File)));
        let name = |name: u8| NameId::new(InodeNo(1), &[name]);
        let after = |lookups: &[(u8, Option<(InodeNo, FileKind)>)]| {
            opens.note_refused(1, one);
            lookups.iter().for_each(|(last, found)| opens.note_lookup(1, name(*last), *found));
            (opens.is_trusted(1, one), opens.is_trusted(1, one))
        };
        let walk = [(b'd', directory), (b's', symlink), (b'd', directory), (b'f', file)];
        assert_eq!(after(&walk), (true, false), "it came by a name");
        assert_eq!(after(&[(b'f', file), (b'f', file)]), (true, false), "the kernel looked twice");
        assert_eq!(after(&[(b'f', file), (b'f', another)]), (false, false), "another file");
        assert_eq!(after(&[(b'd', directory)]), (false, false));
        assert_eq!(
            after(&[(b'f', None), (b'f', file)]),
            (true, false),
            "it was moved away and back between the two looks"
        );
        assert_eq!(after(&[(b'd', directory), (b'f', None)]), (false, false), "it found nothing");
        assert_eq!(after(&[(b'f', None), (b'f', None), (b'f', file)]), (false, false), "and was told so");
        assert_eq!(after(&[(b'f', None), (b'g', file)]), (false, false), "that is a new walk");
        opens.note_lookup(1, name(b'f'), file);
        assert!(!opens.is_trusted(1, one), "it was refused nothing");
        opens.note_refused(UNKNOWN, one);
        assert!(!opens.is_trusted(UNKNOWN, one), "it may be another thread");
        for thread in 1..=1 + MOST as u32 {
            opens.note_refused(thread, one);
        }
        assert_eq!(opens.refused.lock().len(), 1);
    }
}
