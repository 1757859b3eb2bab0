//! What the kernel has cached of a file, and how it is made to forget that.
//!
//! A lock is how programs on different machines take turns with a file, so whoever gets one must read what the one before
//! wrote. Attributes are forgotten with every grant, cached bytes where somebody else may have changed the file. The latter
//! waits for reads that are under way, which need this mount's threads: so it has a thread of its own. Attributes are also
//! forgotten where a write took set-id bits away without the kernel's doing (`privileges`).
//!
//! A write past the page cache is to be seen by who reads the file through it. The kernel drops the pages before it sends the
//! write; who reads them again before it is done would keep the old bytes. So where a file is open both ways here, its pages are
//! dropped once more before the write is answered.

use fuser::{FileHandle, INodeNo, Notifier, ReplyEmpty, ReplyWrite};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};

/// An answer that waits until bytes are forgotten.
#[derive(Debug)]
enum Waiting {
    Lock(ReplyEmpty),
    Write(ReplyWrite, u32),
}

/// Bytes of a file that are stale.
#[derive(Debug)]
struct Stale {
    ino: INodeNo,
    offset: i64,
    /// All behind the offset, if it is zero.
    len: i64,
    waiting: Waiting,
}

/// Makes the kernel forget what it has cached of a file. Usable once the mount has begun.
#[derive(Debug, Default)]
pub(super) struct KernelCache {
    notifier: OnceLock<Notifier>,
    stale: Mutex<Option<Sender<Stale>>>,
    /// Handles of files that are open through the page cache, behind their inodes.
    cached: Mutex<BTreeSet<(u64, u64)>>,
}

impl KernelCache {
    /// The mount begins.
    pub(super) fn begin(&self, notifier: Notifier) {
        let _ = self.notifier.set(notifier);
    }

    /// Attributes, so that they are asked for before they are used again.
    pub(super) fn forget_attributes(&self, ino: INodeNo) {
        if let Some(notifier) = self.notifier.get() {
            // A negative offset: no bytes. An inode the kernel does not know (any more) is no error worth telling.
            let _ = notifier.inval_inode(ino, -1, 0);
        }
    }

    /// A file is opened through the page cache.
    pub(super) fn opened(&self, ino: INodeNo, handle: FileHandle) {
        self.cached.lock().insert((ino.0, handle.0));
    }

    /// A file is closed, whichever way it was open.
    pub(super) fn closed(&self, ino: INodeNo, handle: FileHandle) {
        self.cached.lock().remove(&(ino.0, handle.0));
    }

    /// Whether a write goes past the page cache, of a file that is also open through it.
    pub(super) fn is_passed(&self, ino: INodeNo, handle: FileHandle) -> bool {
        let cached = self.cached.lock();
        cached.range((ino.0, 0)..=(ino.0, u64::MAX)).next().is_some() && !cached.contains(&(ino.0, handle.0))
    }

    /// Answers a request for a lock when no byte of before is cached any more.
    pub(super) fn answer_without_bytes(&self, ino: INodeNo, reply: ReplyEmpty) {
        self.forget_bytes(Stale { ino, offset: 0, len: 0, waiting: Waiting::Lock(reply) });
    }

    /// Answers a write when none of the bytes that it replaced is cached any more.
    pub(super) fn answer_written(&self, ino: INodeNo, offset: u64, written: u32, reply: ReplyWrite) {
        let waiting = Waiting::Write(reply, written);
        self.forget_bytes(Stale { ino, offset: offset.cast_signed(), len: i64::from(written), waiting });
    }

    /// As many wait as threads ask, each for one answer.
    fn forget_bytes(&self, bytes: Stale) {
        let mut stale = self.stale.lock();
        let sender = stale.get_or_insert_with(|| {
            let (sender, receiver) = channel::<Stale>();
            let notifier = self.notifier.get().cloned();
            let forget = move || {
                for Stale { ino, offset, len, waiting } in receiver {
                    if let Some(notifier) = &notifier {
                        let _ = notifier.inval_inode(ino, offset, len);
                    }
                    match waiting {
                        Waiting::Lock(reply) => reply.ok(),
                        Waiting::Write(reply, written) => reply.written(written),
                    }
                }
            };
            // Without it the answer is dropped with the receiver, which tells the caller of an error.
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

    #[test]
    fn writes_past_the_cache_are_told_from_others() {
        let cache = KernelCache::default();
        let (ino, cached, direct) = (INodeNo(2), FileHandle(1), FileHandle(7));
        assert!(!cache.is_passed(ino, direct), "nobody reads it through the cache");
        cache.opened(ino, cached);
        assert!(cache.is_passed(ino, direct) && !cache.is_passed(ino, cached));
        assert!(!cache.is_passed(INodeNo(1), direct) && !cache.is_passed(INodeNo(3), direct));
        cache.closed(ino, direct);
        assert!(cache.is_passed(ino, direct));
        cache.closed(ino, cached);
        assert!(!cache.is_passed(ino, direct));
    }
}
