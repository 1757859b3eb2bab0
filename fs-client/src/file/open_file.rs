//! An open file of this mount: its filekey and slot at the server, and what is cached of its region.

use crate::region::MAX_BITMAP_BYTES;
use crate::region::{CachedLayout, PageBitmap};
use crate::session::LaneGuard;
use arc_swap::ArcSwapOption;
use cuttlefs_common::ids::{FileKey, FileSlot, InodeNo};
use cuttlefs_common::rpc::{MAX_TRANSFER_BYTES, OpenTicket, Opened, Reclaim, Rights};
use parking_lot::{Condvar, Mutex, RwLock};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const NO_SLOT: u64 = u64::MAX;
/// No server gives this key out.
const NO_KEY: u64 = 0;
/// Closes waiting to be sent. When so many wait, close(2) waits for the closer.
const CLOSE_QUEUE: usize = 16_384;

/// A file as opened at the server. Shared by the handle, the closer and recovery.
#[derive(Debug)]
pub(crate) struct OpenFile {
    number: u64,
    ino: InodeNo,
    rights: Rights,
    ticket: OpenTicket,
    /// Written by recovery alone; read by every request. Relaxed: a request with an old key fails at the server
    /// and is built again after recovery.
    filekey: AtomicU64,
    slot: AtomicU64,
    layout: ArcSwapOption<CachedLayout>,
    bitmap: RwLock<PageBitmap>,
    /// Read since the last pull: only such files' bitmaps are pulled. Length of the file as last seen, in pages.
    read_pages: AtomicU64,
    was_read: AtomicBool,
    /// Held while the bitmap is pulled.
    is_closing: Mutex<bool>,
    /// A lock that was taken through it was lost. Set once, by recovery, before any other request goes out (release); read
    /// when a request is made, and behind it (acquire).
    fenced: AtomicBool,
}

impl OpenFile {
    /// Nothing goes through it any more.
    pub(crate) fn fence(&self) {
        self.fenced.store(true, Ordering::Release);
    }

    /// Whether nothing may go through it any more.
    pub(crate) fn is_fenced(&self) -> bool {
        self.fenced.load(Ordering::Acquire)
    }

    /// The inode.
    pub(crate) fn ino(&self) -> InodeNo {
        self.ino
    }

    /// To have it again from the next server.
    pub(crate) fn reclaim(&self) -> Reclaim {
        Reclaim { ino: self.ino, rights: self.rights, ticket: Some(self.ticket) }
    }

    /// Its key in the current session; of one that is fenced, none: also requests that are sent again find no file.
    pub(crate) fn filekey(&self) -> FileKey {
        if self.is_fenced() { FileKey(NO_KEY) } else { self.bound_key() }
    }

    /// What the server knows it by, to close it.
    pub(crate) fn bound_key(&self) -> FileKey {
        FileKey(self.filekey.load(Ordering::Relaxed))
    }

    /// Its slot in the file table of the current server.
    pub(crate) fn slot(&self) -> Option<FileSlot> {
        u32::try_from(self.slot.load(Ordering::Relaxed)).ok().map(FileSlot)
    }

    /// After a recovery: the file's new names, or none if it is gone (its key then names nothing).
    pub(crate) fn rebind(&self, opened: Option<&Opened>) {
        let slot = opened.and_then(|o| o.slot).map_or(NO_SLOT, |slot| u64::from(slot.0));
        self.layout.store(None);
        self.slot.store(slot, Ordering::Relaxed);
        self.filekey.store(opened.map_or(NO_KEY, |o| o.filekey.0), Ordering::Relaxed);
    }

    /// The cached layout.
    pub(crate) fn layout(&self) -> arc_swap::Guard<Option<Arc<CachedLayout>>> {
        self.layout.load()
    }

    /// Remembers a layout.
    pub(crate) fn set_layout(&self, layout: Arc<CachedLayout>) {
        self.layout.store(Some(layout));
    }

    /// Looks at the bitmap.
    pub(crate) fn with_bitmap<T>(&self, look: impl FnOnce(&PageBitmap) -> T) -> T {
        look(&self.bitmap.read())
    }

    /// Notes a read up to `end_page`, so that the bitmap is pulled that far.
    pub(crate) fn note_read(&self, end_page: u64) {
        self.read_pages.fetch_max(end_page, Ordering::Relaxed);
        self.was_read.store(true, Ordering::Relaxed);
    }

    /// The server is going to be told that it is closed: nothing is pulled of it from now on, and nothing is being pulled. To name a
    /// key that the server knows no more would end the connection.
    pub(crate) fn end_pulls(&self) {
        *self.is_closing.lock() = true;
    }

    /// Pulls the bitmap one-sidedly if the file was read since the last time; returns how many bytes that was.
    pub(crate) fn pull_bitmap(&self, lane: &mut LaneGuard<'_>) -> u64 {
        // Held throughout.
        let is_closing = self.is_closing.lock();
        if *is_closing || !self.was_read.swap(false, Ordering::Relaxed) {
            return 0;
        }
        let pages = self.read_pages.load(Ordering::Relaxed);
        let wanted = usize::try_from(pages.div_ceil(8)).unwrap_or(usize::MAX).min(MAX_BITMAP_BYTES);
        let mut bytes = vec![0u8; wanted];
        let chunk_len = MAX_TRANSFER_BYTES as usize;
        for (index, chunk) in bytes.chunks_mut(chunk_len).enumerate() {
            let first_page = (index * chunk_len * 8) as u64;
            if lane.read_bitmap(self.filekey(), first_page, chunk.len()).is_none() {
                return 0;
            }
            lane.data().read(0, chunk);
        }
        *self.bitmap.write() = PageBitmap::new(bytes);
        wanted as u64
    }
}

#[derive(Debug, Default)]
struct Closing {
    files: Vec<Arc<OpenFile>>,
    ended: bool,
}

/// How files that are, or were, open for writing are reclaimed: what was written through one that is closed since may have
/// to be written again.
#[derive(Debug, Default)]
struct Written {
    by_inode: BTreeMap<InodeNo, Reclaim>,
    /// When there are more, those are looked for that are needed no more.
    looked_at: usize,
}

/// Files that were open for writing, before it is looked which are needed no more.
const WRITTEN_MANY: usize = 1024;

/// All open files of a session, for recovery, bitmap pulls and closing.
#[derive(Debug)]
pub(crate) struct OpenFiles {
    files: Mutex<BTreeMap<u64, Arc<OpenFile>>>,
    written: Mutex<Written>,
    next: AtomicU64,
    closing: Mutex<Closing>,
    /// Told when the first close waits, and when there is room again.
    closing_changed: Condvar,
}

impl Default for OpenFiles {
    fn default() -> Self {
        Self {
            files: Mutex::default(),
            written: Mutex::default(),
            next: AtomicU64::new(1),
            closing: Mutex::default(),
            closing_changed: Condvar::new(),
        }
    }
}

impl OpenFiles {
    /// A file that was just opened.
    pub(crate) fn add(&self, opened: &Opened, rights: Rights) -> Arc<OpenFile> {
        let file = Arc::new(OpenFile {
            number: self.next.fetch_add(1, Ordering::Relaxed),
            ino: opened.attr.ino,
            rights,
            ticket: opened.ticket,
            filekey: AtomicU64::new(NO_KEY),
            slot: AtomicU64::new(NO_SLOT),
            layout: ArcSwapOption::empty(),
            bitmap: RwLock::new(PageBitmap::default()),
            read_pages: AtomicU64::new(0),
            was_read: AtomicBool::new(false),
            is_closing: Mutex::new(false),
            fenced: AtomicBool::new(false),
        });
        file.rebind(Some(opened));
        if rights.write {
            self.written.lock().by_inode.insert(file.ino, file.reclaim());
        }
        self.files.lock().insert(file.number, file.clone());
        file
    }

    /// How a file is reclaimed that is, or was, open for writing.
    pub(crate) fn reclaim_written(&self, ino: InodeNo) -> Option<Reclaim> {
        self.written.lock().by_inode.get(&ino).copied()
    }

    /// Forgets how files are reclaimed that nobody has open and that owe nothing, where there are many. `owing` gives those
    /// that may have to be written again.
    pub(crate) fn forget_written(&self, owing: impl FnOnce() -> Vec<InodeNo>) {
        let mut written = self.written.lock();
        if written.by_inode.len() <= written.looked_at.max(WRITTEN_MANY) {
            return;
        }
        let mut needed: HashSet<InodeNo> = owing().into_iter().collect();
        needed.extend(self.files.lock().values().map(|file| file.ino));
        written.by_inode.retain(|ino, _| needed.contains(ino));
        written.looked_at = 2 * written.by_inode.len();
    }

    /// Every open file.
    pub(crate) fn all(&self) -> Vec<Arc<OpenFile>> {
        self.files.lock().values().cloned().collect()
    }

    /// Hands a file to the closer. Only the first of a batch wakes it.
    pub(crate) fn close(&self, file: Arc<OpenFile>) {
        let mut closing = self.closing.lock();
        while closing.files.len() >= CLOSE_QUEUE && !closing.ended {
            self.closing_changed.wait(&mut closing);
        }
        closing.files.push(file);
        if closing.files.len() == 1 {
            self.closing_changed.notify_all();
        }
    }

    /// Waits until there is something to close; `false` when the session has ended.
    pub(crate) fn wait_for_closes(&self) -> bool {
        let mut closing = self.closing.lock();
        while closing.files.is_empty() && !closing.ended {
            self.closing_changed.wait(&mut closing);
        }
        !closing.ended
    }

    /// Takes what waits to be closed.
    pub(crate) fn take_closes(&self) -> Vec<Arc<OpenFile>> {
        let files = std::mem::take(&mut self.closing.lock().files);
        self.closing_changed.notify_all();
        files
    }

    /// The session has ended: nobody waits for closes any more.
    pub(crate) fn end_closes(&self) {
        self.closing.lock().ended = true;
        self.closing_changed.notify_all();
    }

    /// The server has closed it.
    pub(crate) fn forget(&self, file: &OpenFile) {
        self.files.lock().remove(&file.number);
    }
}
