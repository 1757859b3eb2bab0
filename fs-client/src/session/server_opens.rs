//! Open files of this mount at the server: their filekeys there, and their recovery from the next server.
//!
//! A recovery reclaims all of them and gives each its new filekey and slot ([`ServerOpen::rebind`]); a lost lock fences the open that it
//! was taken through. Upper layers may use what they remember of a file by a filekey or a slot as long as the open has that filekey.

use cuttlefs_common::ids::{FileKey, FileSlot, InodeNo};
use cuttlefs_common::rpc::{OpenTicket, Opened, Reclaim, Rights};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const NO_SLOT: u64 = u64::MAX;
/// No server gives this key out.
const NO_KEY: u64 = 0;

/// A file as opened at the server, once. Shared by the handle, the closer and recovery.
#[derive(Debug)]
pub(crate) struct ServerOpen {
    number: u64,
    ino: InodeNo,
    rights: Rights,
    ticket: OpenTicket,
    /// Both written by recovery alone, the key first; read by every request, relaxed: a request with an old key fails at the server
    /// and is built again after recovery. Whoever sees a slot (acquire, written with release) sees the key it came with, or a later one.
    filekey: AtomicU64,
    slot: AtomicU64,
    /// The server is going to be told that it is closed. Held while its key is used beside requests.
    is_closing: Mutex<bool>,
    /// A lock that was taken through it was lost. Set once, by recovery, before any other request goes out (release); read
    /// when a request is made, and behind it (acquire).
    fenced: AtomicBool,
}

impl ServerOpen {
    /// Names it among this mount's.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Nothing goes through it any more.
    pub(super) fn fence(&self) {
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
    pub(super) fn reclaim(&self) -> Reclaim {
        Reclaim { ino: self.ino, rights: self.rights, ticket: Some(self.ticket) }
    }

    /// Its key in the current session; of one that is fenced, none: also requests that are sent again find no file.
    pub(crate) fn filekey(&self) -> FileKey {
        if self.is_fenced() { FileKey(NO_KEY) } else { self.bound_key() }
    }

    /// What the server knows it by, to close it, or to tell whether it is still known by that.
    pub(crate) fn bound_key(&self) -> FileKey {
        FileKey(self.filekey.load(Ordering::Relaxed))
    }

    /// Its slot in the file table of the current server.
    pub(crate) fn slot(&self) -> Option<FileSlot> {
        u32::try_from(self.slot.load(Ordering::Acquire)).ok().map(FileSlot)
    }

    /// After a recovery: the file's new names, or none if it is gone (its key then names nothing).
    pub(super) fn rebind(&self, opened: Option<&Opened>) {
        let slot = opened.and_then(|o| o.slot).map_or(NO_SLOT, |slot| u64::from(slot.0));
        self.filekey.store(opened.map_or(NO_KEY, |o| o.filekey.0), Ordering::Relaxed);
        self.slot.store(slot, Ordering::Release);
    }

    /// The server is going to be told that it is closed: its key is not used beside requests from now on, nor is it being used.
    pub(super) fn begin_close(&self) {
        *self.is_closing.lock() = true;
    }

    /// Uses its key beside requests, unless it is being closed: to name a key that the server knows no more would end the connection.
    pub(crate) fn unless_closing<T>(&self, use_key: impl FnOnce() -> T) -> Option<T> {
        // Held throughout.
        let is_closing = self.is_closing.lock();
        (!*is_closing).then(use_key)
    }
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

/// All of a session.
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
    /// A file that was just opened.
    pub(crate) fn add(&self, opened: &Opened, rights: Rights) -> Arc<ServerOpen> {
        let open = Arc::new(ServerOpen {
            number: self.next.fetch_add(1, Ordering::Relaxed),
            ino: opened.attr.ino,
            rights,
            ticket: opened.ticket,
            filekey: AtomicU64::new(NO_KEY),
            slot: AtomicU64::new(NO_SLOT),
            is_closing: Mutex::new(false),
            fenced: AtomicBool::new(false),
        });
        open.rebind(Some(opened));
        if rights.write {
            self.written.lock().by_inode.insert(open.ino, open.reclaim());
        }
        self.opens.lock().insert(open.number, open.clone());
        open
    }

    /// How a file is reclaimed that is, or was, open for writing.
    pub(super) fn reclaim_written(&self, ino: InodeNo) -> Option<Reclaim> {
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
        needed.extend(self.opens.lock().values().map(|open| open.ino));
        written.by_inode.retain(|ino, _| needed.contains(ino));
        written.looked_at = 2 * written.by_inode.len();
    }

    /// Every one.
    pub(super) fn all(&self) -> Vec<Arc<ServerOpen>> {
        self.opens.lock().values().cloned().collect()
    }

    /// The server has closed it.
    pub(super) fn forget(&self, open: &ServerOpen) {
        self.opens.lock().remove(&open.number);
    }
}
