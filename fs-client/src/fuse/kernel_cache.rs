//! The kernel's cached pages and attributes of a file, and the way to make the kernel forget them.
//!
//! # Locks
//! Programs on different machines take turns with a file by locks, so the new holder of a lock must read everything that the holder before wrote. So
//! with every grant of a lock the kernel forgets the file's attributes, and its cached bytes if another client may have changed the file. The kernel
//! also forgets the attributes when the server has taken set-id bits away in a write (`edge`).
//!
//! # Writes past the page cache
//! The kernel drops the pages of a direct write when it sends the write, and once more when a synchronous one is answered. A page that
//! is read while an asynchronous write is under way keeps the old bytes, also if the file is not open through the cache when the write
//! is done. So **a direct write is answered only when none of its bytes is cached**:
//!
//! * A page can get old bytes only by a request that fills it and that the volume answered before the write. The kernel locks a page
//!   before it asks for its bytes, and forgetting waits for the lock: the bytes of such a request are dropped, too. Later requests
//!   bring the new bytes.
//! * So each file has a note whether pages of it were filled ([`KernelCache::fills`], *before* the volume is asked), and a direct
//!   write of such a file has its range forgotten. Open handles and their flags do not matter: a mapping of a direct handle fills
//!   pages, too.
//! * A file of which no page is filled for [`QUIET_WRITES`] direct writes is forgotten as a whole. Then, if no filling has begun
//!   meanwhile, there is nothing to forget, and its direct writes are answered at once.
//!
//! # A length that comes before its bytes
//! A direct write that makes a file longer may be done, and its bytes not be forgotten yet: the last page has zeros behind the old end. A thread that
//! is told the new length then would have all others read them. So attributes are told when the direct writes that were under way have been answered
//! ([`Filling::until_passed`](super::filling::Filling::until_passed)).
//!
//! Forgetting waits for requests that fill pages and need this mount's threads: so it has a thread of its own. It must never be asked
//! for a write *through* the cache, whose pages stay locked until it is answered.

use super::filling::Under;
use super::kernel::{INodeNo, Notifier, ReplyClaimed, ReplyWrite};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

/// The number of direct writes of a file, without a page filled in between, after which all pages of the file are forgotten. A reader beside a direct
/// writer keeps the pages that are not written; a writer alone pays for a few forgotten ranges.
const QUIET_WRITES: u32 = 16;
/// The most files of which it is known whether pages were filled. Beyond that all files are forgotten here; a file that is not known may have pages,
/// and its next direct writes find out.
const FILES_MAX: usize = 65_536;

/// An answer that waits until bytes are forgotten.
#[derive(Debug)]
enum Waiting {
    Lock(ReplyClaimed),
    Write(ReplyWrite, u32, Under),
}

/// Bytes of a file that are stale.
#[derive(Debug)]
struct Stale {
    ino: INodeNo,
    range: Range,
    waiting: Waiting,
}

/// The stale bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Range {
    /// This range.
    Bytes { offset: i64, len: i64 },
    /// All bytes. Afterwards nothing is cached, if no page was filled since; `fills` is the count of fillings before.
    All { fills: u64 },
}

/// The pages of a file that the kernel may have cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pages {
    /// No page is cached.
    None,
    /// Pages may be cached.
    Some {
        /// How often pages were filled, so that a further filling is noticed.
        fills: u64,
        /// The number of direct writes since the last filling.
        quiet_writes: u32,
    },
}

/// The pages that the kernel may have cached, by file.
#[derive(Debug, Default)]
struct Filled {
    pages: HashMap<u64, Pages>,
    /// Whether files were forgotten here, so that an unknown file may have pages.
    forgot: bool,
}

impl Filled {
    fn of(&mut self, ino: INodeNo) -> &mut Pages {
        if self.pages.len() >= FILES_MAX && !self.pages.contains_key(&ino.0) {
            self.pages.clear();
            self.forgot = true;
        }
        let unknown = if self.forgot { Pages::Some { fills: 0, quiet_writes: 0 } } else { Pages::None };
        self.pages.entry(ino.0).or_insert(unknown)
    }

    fn fills(&mut self, ino: INodeNo) {
        let pages = self.of(ino);
        let fills = match *pages {
            Pages::None => 1,
            Pages::Some { fills, .. } => fills + 1,
        };
        *pages = Pages::Some { fills, quiet_writes: 0 };
    }

    /// The range to forget after a direct write; `None` if nothing can be cached.
    fn passed(&mut self, ino: INodeNo, offset: u64, len: u32) -> Option<Range> {
        match self.of(ino) {
            Pages::None => None,
            Pages::Some { fills, quiet_writes } => {
                *quiet_writes += 1;
                Some(if *quiet_writes < QUIET_WRITES {
                    Range::Bytes { offset: offset.cast_signed(), len: i64::from(len) }
                } else {
                    Range::All { fills: *fills }
                })
            }
        }
    }

    /// All pages were forgotten. A filling is noted before its bytes are requested, so if there was no new one, nothing is cached.
    fn forgotten(&mut self, ino: INodeNo, fills_before: u64) {
        let pages = self.of(ino);
        if matches!(*pages, Pages::Some { fills, .. } if fills == fills_before) {
            *pages = Pages::None;
        }
    }
}

/// Makes the kernel forget what it has cached of a file.
#[derive(Debug)]
pub(super) struct KernelCache {
    notifier: Notifier,
    stale: Mutex<Option<Sender<Stale>>>,
    filled: Arc<Mutex<Filled>>,
}

impl KernelCache {
    /// Nothing is cached yet.
    pub(super) fn new(notifier: Notifier) -> Self {
        Self { notifier, stale: Mutex::default(), filled: Arc::default() }
    }

    /// Makes the kernel forget the attributes, so that it requests them before their next use.
    pub(super) fn forget_attributes(&self, ino: INodeNo) {
        // A negative offset means no bytes. That the kernel does not know the inode (any more) is not worth a message.
        let _ = self.notifier.inval_inode(ino, -1, 0);
    }

    /// A request that fills pages begins. Must be called before the volume is asked for the bytes.
    pub(super) fn fills(&self, ino: INodeNo) {
        self.filled.lock().fills(ino);
    }

    /// Answers a request for a lock when no earlier byte is cached any more.
    pub(super) fn answer_without_bytes(&self, ino: INodeNo, reply: ReplyClaimed) {
        self.forget_bytes(Stale {
            ino,
            range: Range::Bytes { offset: 0, len: 0 },
            waiting: Waiting::Lock(reply),
        });
    }

    /// Answers a direct write when none of the replaced bytes is cached any more. `offset` is the place of the write.
    pub(super) fn answer_passed(
        &self,
        ino: INodeNo,
        offset: u64,
        written: u32,
        reply: ReplyWrite,
        passing: Under,
    ) {
        let range = self.filled.lock().passed(ino, offset, written);
        match range {
            None => reply.written(written),
            Some(range) => {
                self.forget_bytes(Stale { ino, range, waiting: Waiting::Write(reply, written, passing) });
            }
        }
    }

    /// The queue is bounded: each thread that asks waits for one answer.
    fn forget_bytes(&self, bytes: Stale) {
        let mut stale = self.stale.lock();
        let sender = stale.get_or_insert_with(|| {
            let (sender, receiver) = channel::<Stale>();
            let notifier = self.notifier.clone();
            let filled = self.filled.clone();
            let forget = move || {
                for Stale { ino, range, waiting } in receiver {
                    // Length 0 means all bytes from the offset on.
                    let (offset, len) = match range {
                        Range::Bytes { offset, len } => (offset, len),
                        Range::All { .. } => (0, 0),
                    };
                    let _ = notifier.inval_inode(ino, offset, len);
                    if let Range::All { fills } = range {
                        filled.lock().forgotten(ino, fills);
                    }
                    match waiting {
                        Waiting::Lock(reply) => reply.ok(),
                        Waiting::Write(reply, written, passing) => {
                            reply.written(written);
                            drop(passing);
                        }
                    }
                }
            };
            // If there is no thread, the answer is dropped with the receiver, and the caller gets an error.
            if let Err(error) = std::thread::Builder::new().name("cache-answers".to_owned()).spawn(forget) {
                tracing::error!(%error, "a thread that answers when cached bytes are forgotten could not be started");
            }
            sender
        });
        let _ = sender.send(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INO: INodeNo = INodeNo(2);

    fn bytes(offset: i64, len: i64) -> Option<Range> {
        Some(Range::Bytes { offset, len })
    }

    #[test]
    fn only_what_may_be_cached_is_forgotten() {
        let mut filled = Filled::default();
        assert_eq!(filled.passed(INO, 0, 10), None, "nobody has read it through the cache");
        filled.fills(INO);
        assert_eq!(filled.passed(INO, 4096, 10), bytes(4096, 10));
        assert_eq!(filled.passed(INodeNo(3), 4096, 10), None);
    }

    #[test]
    fn a_file_that_nobody_fills_is_soon_forgotten_as_a_whole() {
        let mut filled = Filled::default();
        filled.fills(INO);
        for _ in 1..QUIET_WRITES {
            assert_eq!(filled.passed(INO, 0, 1), bytes(0, 1));
        }
        assert_eq!(filled.passed(INO, 0, 1), Some(Range::All { fills: 1 }));
        // A filling begins before all pages were forgotten: it may bring bytes from before the next write.
        filled.fills(INO);
        filled.forgotten(INO, 1);
        assert_eq!(filled.passed(INO, 0, 1), bytes(0, 1));
        filled.forgotten(INO, 2);
        assert_eq!(filled.passed(INO, 0, 1), None);
        filled.fills(INO);
        assert_eq!(filled.passed(INO, 0, 1), bytes(0, 1));
    }

    #[test]
    fn what_is_not_known_any_more_may_be_cached() {
        let mut filled = Filled::default();
        filled.fills(INO);
        for ino in 0..FILES_MAX as u64 {
            filled.fills(INodeNo(1000 + ino));
        }
        assert!(filled.forgot && filled.pages.len() < FILES_MAX);
        assert_eq!(filled.passed(INO, 0, 1), bytes(0, 1));
        for _ in 2..QUIET_WRITES {
            assert_eq!(filled.passed(INO, 0, 1), bytes(0, 1));
        }
        let Some(Range::All { fills }) = filled.passed(INO, 0, 1) else {
            panic!("all is to be forgotten");
        };
        filled.forgotten(INO, fills);
        assert_eq!(filled.passed(INO, 0, 1), None);
    }
}
