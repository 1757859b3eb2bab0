//! Open files of this mount at the server: their filekeys there, and their recovery from the next server.
//!
//! A recovery reclaims all of them and gives each its new filekey and slot ([`ServerOpen::rebind`]). A lost lock fences the open file through which
//! it was taken. Upper layers may use what they have cached by a filekey or a slot as long as the open file has that filekey.

use cuttlefs_common::ids::{FileKey, FileSlot, InodeNo};
use cuttlefs_common::rpc::{OpenTicket, Opened, Reclaim, RegionKey, Rights};
use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const NO_SLOT: u64 = u64::MAX;
/// No server gives this key out.
const NO_KEY: u64 = 0;

/// What opened a file, and opens it again at the next server.
#[derive(Clone, Copy, Debug)]
enum OpenedBy {
    /// A request for the whole file.
    Ticket(OpenTicket),
    /// A region key (`regions`).
    Key(RegionKey),
}

/// One open of a file at the server. Shared by the handle, the closer and recovery.
#[derive(Debug)]
pub(crate) struct ServerOpen {
    number: u64,
    ino: InodeNo,
    rights: Rights,
    by: OpenedBy,
    /// The keys of its bound ranges, which a recovery binds again.
    bound: Mutex<Vec<RegionKey>>,
    /// Held by who opens it again by its key.
    opening: Mutex<()>,
    /// Its region key is worth nothing any more. Set once; relaxed, as a request finds out anyway.
    has_ended: AtomicBool,
    /// Filekey and slot are written only by recovery, the filekey first, and read by every request, relaxed: a request with an old filekey fails at
    /// the server and is built again after recovery. A thread that sees a slot (acquire; written with release) sees the filekey that came with it, or
    /// a later one.
    filekey: AtomicU64,
    slot: AtomicU64,
    /// Whether the server is going to be told of the close. Locked while the filekey is used outside of requests.
    is_closing: Mutex<bool>,
    /// Whether a lock that was taken through this open file was lost. Set once, by recovery, before any other request goes out (release). Read when a
    /// request is built, and after it (acquire).
    fenced: AtomicBool,
}

impl ServerOpen {
    /// The number of this open among the mount's.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// From now on no request may use this open file.
    pub(super) fn fence(&self) {
        self.fenced.store(true, Ordering::Release);
    }

    /// Whether no request may use this open file any more.
    pub(crate) fn is_fenced(&self) -> bool {
        self.fenced.load(Ordering::Acquire)
    }

    /// The inode.
    pub(crate) fn ino(&self) -> InodeNo {
        self.ino
    }

    /// The reclaim of this open at the next server. `None`: it was opened by a region key, and is opened again by that.
    pub(super) fn reclaim(&self) -> Option<Reclaim> {
        match self.by {
            OpenedBy::Ticket(ticket) => {
                Some(Reclaim { ino: self.ino, rights: self.rights, ticket: Some(ticket) })
            }
            OpenedBy::Key(_) => None,
        }
    }

    /// The region key that it was opened by.
    pub(crate) fn region_key(&self) -> Option<&RegionKey> {
        match &self.by {
            OpenedBy::Key(key) => Some(key),
            OpenedBy::Ticket(_) => None,
        }
    }

    /// Whether it names no file at the server now.
    pub(crate) fn is_lost(&self) -> bool {
        self.bound_key() == FileKey(NO_KEY)
    }

    /// The keys of its bound ranges.
    pub(crate) fn bound(&self) -> MutexGuard<'_, Vec<RegionKey>> {
        self.bound.lock()
    }

    /// Held while it is opened again.
    pub(super) fn opening(&self) -> MutexGuard<'_, ()> {
        self.opening.lock()
    }

    /// The region key that it was opened by is worth nothing any more.
    pub(crate) fn end(&self) {
        self.has_ended.store(true, Ordering::Relaxed);
        self.rebind(None);
    }

    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Relaxed)
    }

    /// Its filekey in the current session. If it is fenced, a key that names no file, so that requests that are sent again fail, too.
    pub(crate) fn filekey(&self) -> FileKey {
        if self.is_fenced() { FileKey(NO_KEY) } else { self.bound_key() }
    }

    /// The filekey at the server, even if it is fenced: to close it, or to tell whether it is still the same.
    pub(crate) fn bound_key(&self) -> FileKey {
        FileKey(self.filekey.load(Ordering::Relaxed))
    }

    /// Its slot in the file table of the current server.
    pub(crate) fn slot(&self) -> Option<FileSlot> {
        u32::try_from(self.slot.load(Ordering::Acquire)).ok().map(FileSlot)
    }

    /// After a recovery: sets the new filekey and slot. If the file is gone, the filekey names no file.
    pub(super) fn rebind(&self, opened: Option<&Opened>) {
        let slot = opened.and_then(|o| o.slot).map_or(NO_SLOT, |slot| u64::from(slot.0));
        self.filekey.store(opened.map_or(NO_KEY, |o| o.filekey.0), Ordering::Relaxed);
        self.slot.store(slot, Ordering::Release);
    }

    /// The server is going to be told of the close. From now on the filekey is not used outside of requests, and no such use is under way.
    pub(super) fn begin_close(&self) {
        *self.is_closing.lock() = true;
    }

    /// Runs `use_key`, which uses the filekey outside of requests, unless the file is being closed: a filekey that the server does not know any more
    /// would end the connection.
    pub(crate) fn unless_closing<T>(&self, use_key: impl FnOnce() -> T) -> Option<T> {
        // Held until `use_key` returns.
        let is_closing = self.is_closing.lock();
        (!*is_closing).then(use_key)
    }
}

/// How to reclaim the files that are, or were, open for writing: a change may have to be restored although the file is closed by now.
#[derive(Debug, Default)]
struct Written {
    by_inode: BTreeMap<InodeNo, Reclaim>,
    /// The number of files at which those are looked for that are not needed any more.
    looked_at: usize,
}

/// The least number of files at which that is done.
const WRITTEN_MANY: usize = 1024;

/// All open files of a session.
#[derive(Debug)]
pub(crate) struct ServerOpens {
    opens: Mutex<BTreeMap<u64, Arc<ServerOpen>>>,
    written: Mutex<Written>,
    next: AtomicU64,
}

impl Default for ServerOpens {
    fn default() -> Self {
        Self { opens: Mutex::default(), written: Mutex::default(), next: AtomicU64::new(1) }
    }
}

impl ServerOpens {
    /// Adds a file that was just opened.
    pub(crate) fn add(&self, opened: &Opened, rights: Rights) -> Arc<ServerOpen> {
        self.add_by(opened, rights, OpenedBy::Ticket(opened.ticket))
    }

    /// Adds a part of a file that was just opened by a region key.
    pub(crate) fn add_region(&self, opened: &Opened, key: RegionKey) -> Arc<ServerOpen> {
        self.add_by(opened, key.rights, OpenedBy::Key(key))
    }

    fn add_by(&self, opened: &Opened, rights: Rights, by: OpenedBy) -> Arc<ServerOpen> {
        let open = Arc::new(ServerOpen {
            number: self.next.fetch_add(1, Ordering::Relaxed),
            ino: opened.attr.ino,
            rights,
            by,
            bound: Mutex::default(),
            opening: Mutex::default(),
            has_ended: AtomicBool::new(false),
            filekey: AtomicU64::new(NO_KEY),
            slot: AtomicU64::new(NO_SLOT),
            is_closing: Mutex::new(false),
            fenced: AtomicBool::new(false),
        });
        open.rebind(Some(opened));
        if rights.write
            && let Some(reclaim) = open.reclaim()
        {
            self.written.lock().by_inode.insert(open.ino, reclaim);
        }
        self.opens.lock().insert(open.number, open.clone());
        open
    }

    /// How to reclaim a file that is, or was, open for writing.
    pub(super) fn reclaim_written(&self, ino: InodeNo) -> Option<Reclaim> {
        self.written.lock().by_inode.get(&ino).copied()
    }

    /// If there are many, forgets how to reclaim the files that are not open and have no unsynced changes. `owing` returns the files with unsynced
    /// changes.
    pub(crate) fn forget_written(&self, owing: impl FnOnce() -> Vec<InodeNo>) {
        let mut written = self.written.lock();
        if written.by_inode.len() <= written.looked_at.max(WRITTEN_MANY) {
            return;
        }
        let mut needed: HashSet<InodeNo> = owing().into_iter().collect();
        needed.extend(self.opens.lock().values().map(|open| open.ino));
        written.by_inode.retain(|ino, _| needed.contains(ino));
        written.looked_at = 2 * written.by_inode.len();
    }

    /// All open files.
    pub(super) fn all(&self) -> Vec<Arc<ServerOpen>> {
        self.opens.lock().values().cloned().collect()
    }

    /// The server has closed the file: forgets it.
    pub(super) fn forget(&self, open: &ServerOpen) {
        self.opens.lock().remove(&open.number);
    }
}
