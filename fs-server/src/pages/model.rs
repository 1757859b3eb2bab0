//! The page protocol's own code under a model checker, in every interleaving and with every reordering the memory model allows: one
//! page of one file, two frames, one reader, and each operation on the page meanwhile.
//!
//! [`Site`] is the server's side: its residency table, frames and file table, whose words the checker sees (`cuttlefs_common::sync`). A
//! page is two words. Its own way to read is the NIC engine's (target translation, `files::target`): the page and its entry under the
//! mapping's lock, then the copy. The tests are fs-client's (tests/page_model.rs), which has the initiator's way.
//!
//! Only the surroundings of the protocol are restated: the block lock and the mapping's lock, which are locks of the checker's. A write
//! before the beginning of a read is told to the reader as by a reply: released by the writer, acquired by the reader.

use super::frames::{Frames, PrivateFrame};
use super::residency::Residency;
use cuttlefs_common::ids::{FilePage, FileSlot, InodeNo, PAGE_SIZE, PoolPage};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::region::{Extent, ExtentState, FileTable, MagicPattern, ResidencyTable};
use cuttlefs_common::rpc::Layout;
use loom::sync::Mutex;
use loom::sync::atomic::AtomicU64;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The file's slot.
pub const SLOT: FileSlot = FileSlot(1);
/// What of the page is read and written: two words.
pub const LEN: usize = 16;
/// Bytes of the file the reader reads, and of the one that gets the frame or the page next.
pub const OWN: u64 = 0x11;
/// See [`OWN`].
pub const FOREIGN: u64 = 0x22;
/// What the file's writer puts in place of `OWN`.
pub const NEWER: u64 = 0x33;

/// The page, and another file's that may get its frame.
const PAGE: PoolPage = PoolPage(0);
const OTHER_PAGE: PoolPage = PoolPage(1);
const GENERATION: u64 = 1;
const FRAMES: u32 = super::MIN_FRAMES + 1;

/// A server with one page of one file, which is in a frame and holds [`OWN`].
#[derive(Debug)]
pub struct Site {
    residency: Residency,
    files: FileTable,
    /// Which pool page the file's page is at, under the lock of the file's mapping.
    mapping: Mutex<Option<PoolPage>>,
    /// The page's block lock.
    block: Mutex<()>,
    /// The last write that returned.
    written: AtomicU64,
}

fn bytes(word: u64) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    bytes.chunks_exact_mut(8).for_each(|chunk| chunk.copy_from_slice(&word.to_ne_bytes()));
    bytes
}

impl Site {
    /// In an execution of the checker.
    #[expect(clippy::new_without_default, reason = "a model begins with it, nothing else")]
    pub fn new() -> Self {
        let frames = Frames::new(FRAMES, &MagicPattern::new([7; 32])).expect("frames");
        for frame in super::MIN_FRAMES - 1..FRAMES {
            frames.memory().modelled.observe(frame as usize * PAGE_SIZE, LEN);
        }
        let table = ResidencyTable::new(2).expect("a table");
        table.memory().modelled.observe(PAGE.0 as usize * 8, 8);
        let files = FileTable::new(SLOT.0 + 1).expect("a table");
        files.memory().modelled.observe(SLOT.0 as usize * cuttlefs_common::region::FILE_SLOT_LEN, 16);
        let residency = Residency::new(table, Arc::new(frames));
        let site = Self {
            residency,
            files,
            mapping: Mutex::new(Some(PAGE)),
            block: Mutex::new(()),
            written: AtomicU64::new(OWN),
        };
        site.promote(OWN);
        site.files.publish(SLOT, InodeNo(5), GENERATION, PAGE_SIZE as u64);
        site
    }

    /// What a server shows its clients: frames, residency table and file table.
    pub fn windows(&self) -> (Arc<SharedMemory>, ResidencyTable, FileTable) {
        (self.residency.frames().memory().clone(), self.residency.table().clone(), self.files.clone())
    }

    /// The file's layout, as a client has it cached.
    pub fn layout() -> Layout {
        let extent =
            Extent { file_page: FilePage(0), pool_page: PAGE, len_pages: 1, state: ExtentState::Written };
        Layout { generation: GENERATION, extents: vec![extent], known_until: None }
    }

    /// The page's block lock.
    pub fn lock_block(&self) -> loom::sync::MutexGuard<'_, ()> {
        self.block.lock().expect("nobody panics with it")
    }

    /// Whether the page is in a frame. Under its block lock.
    pub fn is_resident(&self) -> bool {
        self.residency.load(PAGE).is_resident()
    }

    fn filled_frame(&self, word: u64) -> PrivateFrame {
        let frame = self.residency.frames().take().expect("a frame is free");
        self.residency.frames().memory().write(frame.offset(), &bytes(word));
        frame
    }

    /// The page goes to SSD, and its frame is free.
    pub fn evict(&self) {
        self.residency.vacate(PAGE);
    }

    /// Another file's page gets a free frame.
    pub fn promote_other(&self) {
        self.residency.publish(OTHER_PAGE, self.filled_frame(FOREIGN), false);
    }

    /// A page on SSD gets a frame: bytes first, then the entry.
    pub fn promote(&self, word: u64) {
        self.residency.publish(PAGE, self.filled_frame(word), false);
    }

    /// A write into the frame of a resident page returns.
    pub fn rewrite(&self, word: u64) {
        self.residency.write_in_frame(PAGE, |at| self.residency.frames().memory().write(at, &bytes(word)));
        self.wrote(word);
    }

    /// A write returns.
    pub fn wrote(&self, word: u64) {
        self.written.store(word, Ordering::Release);
    }

    /// A write that forgets the protocol.
    pub fn scribble(&self, word: u64) {
        let at = Frames::offset(self.residency.load(PAGE).frame());
        self.residency.frames().memory().write(at, &bytes(word));
        self.residency.write_in_frame(PAGE, |_| {});
    }

    /// An empty file in place of the page's: it has a layout without extents.
    pub fn emptied(self) -> Self {
        self.files.publish(SLOT, InodeNo(5), GENERATION, 0);
        self
    }

    /// The layout of an empty file.
    pub fn empty_layout() -> Layout {
        Layout { generation: GENERATION, extents: Vec::new(), known_until: None }
    }

    /// The empty file gets its first bytes.
    pub fn grow(&self) {
        self.files.change_layout(SLOT, GENERATION + 1, LEN as u64);
    }

    /// The same, with the length shown first, and the layout that it is of next.
    pub fn grow_carelessly(&self) {
        self.files.publish(SLOT, InodeNo(5), GENERATION + 1, LEN as u64);
    }

    /// The page leaves its file: the mapping changes first, then the entry moves.
    pub fn leave(&self) {
        *self.mapping.lock().expect("nobody panics with it") = None;
        self.files.change_layout(SLOT, GENERATION + 1, PAGE_SIZE as u64);
        self.residency.vacate(PAGE);
    }

    /// What was written before now.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Acquire)
    }

    /// A read of target translation: what a copy that validates gives.
    pub fn read_as_target(&self) -> Option<[u8; LEN]> {
        let (page, entry) = {
            let mapping = self.mapping.lock().expect("nobody panics with it");
            let page = (*mapping)?;
            (page, self.residency.load(page))
        };
        let mut out = [0; LEN];
        self.residency.copy(page, entry, 0, &mut out).then_some(out)
    }
}

/// How a read is made, and what must be true of it.
pub type Reader = fn(&Site) -> Option<[u8; LEN]>;

fn read_once(site: &Site, read: Reader, allowed: &[u64]) {
    let written = site.written();
    if let Some(copy) = read(site) {
        let words: Vec<u64> = copy
            .chunks_exact(8)
            .map(|word| u64::from_ne_bytes(word.try_into().expect("eight bytes")))
            .collect();
        assert!(words[0] == words[1] && allowed.contains(&words[0]), "read {words:x?}");
        assert!(words[0] >= written, "read {words:x?} after {written:x} was written");
    }
}

/// How often a thread is stopped in its midst, at most, where two run. One read has eight loads, and what can go wrong does so in one gap or
/// two between them; a bound keeps the longest of these models at seconds.
pub const PREEMPTIONS: usize = 4;

/// One read beside one thread that does `change`.
fn check(read: Reader, preemptions: usize, change: fn(&Site), allowed: &'static [u64]) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(move || {
        let site = Arc::new(Site::new());
        let seen = site.clone();
        let reader = loom::thread::spawn(move || read_once(&seen, read, allowed));
        change(&site);
        reader.join().expect("the reader found nothing wrong");
    });
}

/// All cases, for one way to read.
///
/// # Panics
/// A read gave what it must not.
pub fn check_reader(read: Reader, preemptions: usize) {
    // An evicted frame that another page gets is not believed.
    check(
        read,
        preemptions,
        |site| {
            site.evict();
            site.promote_other();
        },
        &[OWN],
    );
    // A page that another file gets is not believed.
    check(
        read,
        preemptions,
        |site| {
            site.leave();
            site.promote(FOREIGN);
        },
        &[OWN],
    );
    // A write in the frame is not seen torn.
    check(read, preemptions, |site| site.rewrite(NEWER), &[OWN, NEWER]);
    // All that can befall a page, one after another, while one read is under way.
    check(
        read,
        preemptions,
        |site| {
            site.evict();
            site.promote_other();
            site.promote(OWN);
            site.rewrite(NEWER);
            site.leave();
            site.promote(FOREIGN);
        },
        &[OWN, NEWER],
    );
    check_two_changers(read);
}

/// Eviction and promotion meet the writer and the one who frees in either order.
fn check_two_changers(read: Reader) {
    let mut model = loom::model::Builder::new();
    // Three threads: with one more it takes minutes.
    model.preemption_bound = Some(2);
    model.check(move || {
        let site = Arc::new(Site::new());
        let (seen, evicted) = (site.clone(), site.clone());
        let reader = loom::thread::spawn(move || read_once(&seen, read, &[OWN, NEWER]));
        let evictor = loom::thread::spawn(move || {
            let _block = evicted.lock_block();
            evicted.evict();
            evicted.promote_other();
        });
        {
            let _block = site.lock_block();
            if site.is_resident() {
                site.rewrite(NEWER);
            } else {
                site.promote(NEWER);
                site.wrote(NEWER);
            }
        }
        evictor.join().expect("it only evicts");
        {
            let _block = site.lock_block();
            site.leave();
            site.promote(FOREIGN);
        }
        reader.join().expect("the reader found nothing wrong");
    });
}

/// The model can fail: without the odd version in between, the checker finds the torn copy.
///
/// # Panics
/// Always, if the model is worth something.
pub fn check_scribble(read: Reader) {
    check(read, PREEMPTIONS, |site| site.scribble(NEWER), &[OWN, NEWER]);
}

/// And so it can with reuse: a page that is given away while the mapping and the generation still name it.
///
/// # Panics
/// Always, if the model is worth something.
pub fn check_given_away(read: Reader) {
    check(
        read,
        PREEMPTIONS,
        |site| {
            site.evict();
            site.promote(FOREIGN);
        },
        &[OWN],
    );
}

/// A file that gets its first bytes while it is read by the layout that it had before, which has none. `read`: whether it got any bytes.
///
/// # Panics
/// It did: zeros that the file never had.
pub fn check_growth(read: fn(&Site) -> bool, grow: fn(&Site)) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(PREEMPTIONS);
    model.check(move || {
        let site = Arc::new(Site::new().emptied());
        let seen = site.clone();
        let reader = loom::thread::spawn(move || assert!(!read(&seen), "zeros were read"));
        grow(&site);
        reader.join().expect("the reader found nothing wrong");
    });
}
