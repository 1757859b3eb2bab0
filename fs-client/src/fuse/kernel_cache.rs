//! The way to make the kernel forget its cached pages and attributes of a file. What it may have is in `cached_files`.
//!
//! # Changes of other clients
//! An open shows all changes of mounts that have closed the file (close-to-open), a granted lock those that the holder before made, and attributes must
//! not be newer than the bytes that are read behind them. So these are answered when the pages that another client may have changed are gone
//! ([`KernelCache::when_good`], [`KernelCache::tell`]). Files that are open and have pages are also looked at each time when attributes would be asked for again (`watch`).
//!
//! The kernel can do both itself: it drops the pages at an open (without `FOPEN_KEEP_CACHE`), and when attributes show another time of change
//! (`FUSE_AUTO_INVAL_DATA`). But at an open it does so behind the answer, when the next opener was told already that pages are good. And it takes the
//! time of the mount's own last write for a change of others: each write would cost the file's pages, and a page that was written and is not sent
//! yet would come back with the bytes of before. So the kernel drops pages by itself only when the length has changed.
//!
//! # Writes past the page cache
//! The kernel drops the pages of a direct write when it sends the write, and once more when a synchronous one is answered. A page that
//! is read while an asynchronous write is under way keeps the old bytes, also if the file is not open through the cache when the write
//! is done. So **a direct write is answered only when none of its bytes is cached**:
//!
//! * A page can get old bytes only by a request that fills it and that the volume answered before the write. The kernel locks a page
//!   before it asks for its bytes, and forgetting waits for the lock: the bytes of such a request are dropped, too. Later requests
//!   bring the new bytes.
//! * So each file has a note whether pages of it were filled ([`CachedFiles::fills`], *before* the volume is asked), and a direct
//!   write of such a file has its range forgotten. Open handles and their flags do not matter: a mapping of a direct handle fills
//!   pages, too.
//! * A file of which no page is filled for some direct writes is forgotten as a whole. Then, if no filling has begun
//!   meanwhile, there is nothing to forget, and its direct writes are answered at once.
//!
//! # A length that comes before its bytes
//! A direct write that makes a file longer may be done, and its bytes not be forgotten yet: the last page has zeros behind the old end. A thread that
//! is told the new length then would have all others read them. And no thread can read up to a length before the kernel has the answer to the write
//! that made it. So attributes are told when the writes that were under way have been answered
//! ([`Filling::until_passed`](super::filling::Filling::until_passed)).
//!
//! # Its thread
//! Forgetting waits for requests that fill pages and need this mount's threads: so it has a thread of its own. A write *through* the cache may have its
//! last page locked until it is answered: see [`KernelCache::wrote`].
//!
//! It waits in the kernel, where no signal reaches it, with the device open. If the process dies meanwhile nobody answers these requests, and the kernel would
//! keep the mount, and all who wait for it, for ever. Another process ends the mount then: `cli/watchdog.rs`.

use super::cached_files::{At, CachedFiles, Look, Range};
use super::kernel::{INodeNo, Notifier};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

/// The longest time that is waited for bytes that were stored through mappings: the server may be away.
const WRITE_BACK_LIMIT: Duration = Duration::from_secs(10);
/// The longest time for which a write through the page cache waits until its pages are forgotten.
const LOCKED: Duration = Duration::from_millis(10);

/// What is to be forgotten.
#[derive(Clone, Copy, Debug)]
enum What {
    /// Bytes that a write has changed.
    Written(Range),
    /// All bytes, unless they are of this change. `None`: in any case.
    Older(Option<At>),
}

/// An answer that waits until bytes are forgotten.
type Then = Box<dyn FnOnce() + Send>;

struct Stale {
    ino: INodeNo,
    what: What,
    then: Then,
}

/// Makes the kernel forget what it has cached of a file.
pub(super) struct KernelCache {
    notifier: Notifier,
    stale: Mutex<Option<Sender<Stale>>>,
    files: Arc<CachedFiles>,
}

impl KernelCache {
    /// Nothing is cached yet.
    pub(super) fn new(notifier: Notifier) -> Self {
        Self { notifier, stale: Mutex::default(), files: Arc::default() }
    }

    /// What the kernel may have.
    pub(super) fn files(&self) -> &Arc<CachedFiles> {
        &self.files
    }

    /// Makes the kernel forget the attributes, so that it requests them before their next use.
    pub(super) fn forget_attributes(&self, ino: INodeNo) {
        // A negative offset means no bytes. That the kernel does not know the inode (any more) is not worth a message.
        let _ = self.notifier.inval_inode(ino, -1, 0);
    }

    /// Calls `then` when no page is cached that another client may have changed before `at`. Waits for own changes that are under way. `None`: all
    /// pages go.
    pub(super) fn when_good(&self, ino: INodeNo, at: Option<At>, then: impl FnOnce() + Send + 'static) {
        if at.is_some_and(|at| is_good(&self.files, ino, at)) {
            then();
        } else {
            self.forget(ino, What::Older(at), then);
        }
    }

    /// As `when_good`, and does not wait itself.
    pub(super) fn soon_good(&self, ino: INodeNo, at: Option<At>, then: impl FnOnce() + Send + 'static) {
        if at.is_some_and(|at| self.files.look(ino, at) == Look::Good) {
            then();
        } else {
            self.forget(ino, What::Older(at), then);
        }
    }

    /// Tells attributes to the kernel by `answer`: with another client's change in them before `at` only when the pages of before are forgotten.
    ///
    /// The kernel takes no answer when pages are forgotten before its thread has taken it, and that thread may have to wait for a processor. So:
    ///
    /// * **A longer length** comes first, and the kernel itself forgets all pages when it takes the length. Else a program would be told a length that its
    ///   mappings do not have. If the kernel does not take it after all, the next look at open files has the pages forgotten (`watch`).
    /// * **Behind a shorter one, or the same,** the pages are gone before the answer: the kernel would read them up to the old length.
    /// * **If the kernel asks for the sake of a read** (`is_reading`), and does not have this length, the pages are forgotten behind the answer: the read needs
    ///   the length, and the kernel itself forgets all pages when it takes it. A read that needs none must not find the pages of before.
    ///
    /// If an own change that is under way may be the one that counted, the kernel is told at once: whoever needs to know opens the file, or takes a lock.
    /// `None`: another server has come since the request began, so nobody knows what others did before; all pages go.
    pub(super) fn tell(
        &self,
        ino: INodeNo,
        at: Option<At>,
        size: u64,
        is_reading: bool,
        answer: impl FnOnce() + Send + 'static,
    ) {
        // Who opens the file later asks then.
        let is_stale = self.files.is_open(ino) && self.is_stale(ino, at);
        let grows = self.files.has_shorter(ino, size);
        if is_stale && !grows && (!is_reading || self.files.has_size(ino, size)) {
            return self.forget(ino, What::Older(at), answer);
        }
        if is_stale {
            // The kernel itself may forget pages when it takes the answer.
            self.files.forgets(ino);
        }
        self.files.takes_size(ino, size);
        answer();
        if is_stale && !grows {
            self.forget(ino, What::Older(at), || ());
        }
    }

    /// Another client may have changed an open file, by a look at its change counter. `None`: another server has come since the look began.
    pub(super) fn looked(&self, ino: INodeNo, at: Option<At>) {
        if self.is_stale(ino, at) {
            self.forget(ino, What::Older(at), || ());
        }
    }

    fn is_stale(&self, ino: INodeNo, at: Option<At>) -> bool {
        at.is_none_or(|at| self.files.look(ino, at) == Look::Stale)
    }

    /// Has the kernel give the volume what programs have stored in pages through mappings. Waits for that, at most [`WRITE_BACK_LIMIT`].
    pub(super) fn write_back(&self, ino: INodeNo) {
        self.forget_within(ino, Range::Bytes { offset: 0, len: 0 }, WRITE_BACK_LIMIT);
    }

    /// Calls `then` when none of the bytes that a direct write has replaced is cached any more. `offset` is the place of the write.
    pub(super) fn when_passed(
        &self,
        ino: INodeNo,
        offset: u64,
        written: u32,
        then: impl FnOnce() + Send + 'static,
    ) {
        match self.files.passed(ino, offset, written) {
            None => then(),
            Some(range) => self.forget(ino, What::Written(range), then),
        }
    }

    /// A write through the page cache is done, and is going to be answered. Waits until pages that have the bytes of before are forgotten.
    ///
    /// A page that was read is not locked by a write, unless the kernel has thrown it away meanwhile: it would be unlocked by the answer. So this waits for
    /// [`LOCKED`] at most.
    pub(super) fn wrote(&self, ino: INodeNo, offset: u64, len: u32) {
        let end = offset.saturating_add(len.into());
        if self.files.may_be_replaced(ino, offset, end) {
            self.forget_within(ino, Range::Bytes { offset: offset.cast_signed(), len: len.into() }, LOCKED);
        }
    }

    /// Waits until the bytes are forgotten, at most so long.
    fn forget_within(&self, ino: INodeNo, range: Range, limit: Duration) {
        let (done, is_done) = channel();
        self.forget(ino, What::Written(range), move || {
            let _ = done.send(());
        });
        let _ = is_done.recv_timeout(limit);
    }

    /// The queue is bounded: each thread that asks waits for one answer, but for files that are watched.
    fn forget(&self, ino: INodeNo, what: What, then: impl FnOnce() + Send + 'static) {
        let mut stale = self.stale.lock();
        let sender = stale.get_or_insert_with(|| {
            let (sender, receiver) = channel::<Stale>();
            let forgetter = Forgetter { notifier: self.notifier.clone(), files: self.files.clone() };
            let forget = move || receiver.into_iter().for_each(|stale| forgetter.forget(stale));
            // If there is no thread, the answer is dropped with the receiver, and the caller gets an error.
            if let Err(error) = std::thread::Builder::new().name("cache-answers".to_owned()).spawn(forget) {
                tracing::error!(%error, "a thread that answers when cached bytes are forgotten could not be started");
            }
            sender
        });
        let _ = sender.send(Stale { ino, what, then: Box::new(then) });
    }
}

/// Whether the pages are good. Waits for own changes that are under way.
fn is_good(files: &CachedFiles, ino: INodeNo, at: At) -> bool {
    match files.look(ino, at) {
        Look::Good => true,
        Look::Stale => false,
        Look::Unknown(before) => files.settle(ino, at, before),
    }
}

/// The thread that makes the kernel forget bytes, and answers then.
struct Forgetter {
    notifier: Notifier,
    files: Arc<CachedFiles>,
}

impl Forgetter {
    fn forget(&self, Stale { ino, what, then }: Stale) {
        match what {
            What::Written(Range::Bytes { offset, len }) => {
                let _ = self.notifier.inval_inode(ino, offset, len);
            }
            What::Written(Range::All { fills }) => {
                let _ = self.notifier.inval_inode(ino, 0, 0);
                self.files.forgotten(ino, fills);
            }
            What::Older(at) => self.forget_older(ino, at),
        }
        then();
    }

    /// Another request may have had them forgotten meanwhile.
    fn forget_older(&self, ino: INodeNo, at: Option<At>) {
        if at.is_some_and(|at| is_good(&self.files, ino, at)) {
            return;
        }
        let fills = self.files.forgets(ino);
        // Length 0 means all bytes from the offset on.
        let _ = self.notifier.inval_inode(ino, 0, 0);
        self.files.are_of(ino, at);
        self.files.forgotten(ino, fills);
    }
}
