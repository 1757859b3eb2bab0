//! The code of the page protocol under a model checker, in every interleaving and with every reordering that the memory model allows: one page of one
//! file, two frames, one reader, and each operation on the page meanwhile.
//!
//! [`Site`] is the server's side: its residency table, frames and file table, whose words the checker sees (`cuttlefs_common::sync`). A page is two
//! words. It has the NIC engine's way to read (target translation, `files::target`): the page and its entry under the mapping's lock, then the copy.
//! The tests are in fixtures/models; fs-client has the initiator's way.
//!
//! Only the surroundings of the protocol are rewritten here: the block lock and the mapping's lock, which are the checker's locks. The reader learns
//! of a write that returned before its read as by a reply: the writer releases, the reader acquires.

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

/// The file's slot in the file table.
pub const SLOT: FileSlot = FileSlot(1);
/// The part of the page that is read and written: two words.
pub const LEN: usize = 16;
/// The bytes of the file that the reader reads.
pub const OWN: u64 = 0x11;
/// The bytes of another file, which gets the frame or the page next.
pub const FOREIGN: u64 = 0x22;
/// The bytes that the file's writer puts in place of `OWN`.
pub const NEWER: u64 = 0x33;

/// The page, and a page of another file that may get its frame.
const PAGE: PoolPage = PoolPage(0);
const OTHER_PAGE: PoolPage = PoolPage(1);
const GENERATION: u64 = 1;
const FRAMES: u32 = super::MIN_FRAMES + 1;

/// A server with one page of one file, which is in a frame and has the bytes [`OWN`].
#[derive(Debug)]
pub struct Site {
    residency: Residency,
    files: FileTable,
    /// The pool page of the file's page, under the lock of the file's mapping.
    mapping: Mutex<Option<PoolPage>>,
    /// The page's block lock.
    block: Mutex<()>,
    /// The bytes of the last write that returned.
    written: AtomicU64,
}

fn bytes(word: u64) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    bytes.chunks_exact_mut(8).for_each(|chunk| chunk.copy_from_slice(&word.to_ne_bytes()));
    bytes
}

impl Site {
    /// Makes the server within an execution of the checker.
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

    /// The memory that a server shows to its clients: frames, residency table and file table.
    pub fn windows(&self) -> (Arc<SharedMemory>, ResidencyTable, FileTable) {
        (self.residency.frames().memory().clone(), self.residency.table().clone(), self.files.clone())
    }

    /// The file's layout, as a client has cached it.
    pub fn layout() -> Layout {
        let extent =
            Extent { file_page: FilePage(0), pool_page: PAGE, len_pages: 1, state: ExtentState::Written };
        Layout { generation: GENERATION, extents: vec![extent], known_until: None }
    }

    /// The page's block lock.
    pub fn lock_block(&self) -> loom::sync::MutexGuard<'_, ()> {
        self.block.lock().expect("nobody panics with it")
    }

    /// Whether the page is in a frame. Called under its block lock.
    pub fn is_resident(&self) -> bool {
        self.residency.load(PAGE).is_resident()
    }

    fn filled_frame(&self, word: u64) -> PrivateFrame {
        let frame = self.residency.frames().take().expect("a frame is free");
        self.residency.frames().memory().write(frame.offset(), &bytes(word));
        frame
    }

    /// Evicts the page, which frees its frame.
    pub fn evict(&self) {
        self.residency.vacate(PAGE);
    }

    /// Gives a free frame to another file's page.
    pub fn promote_other(&self) {
        self.residency.publish(OTHER_PAGE, self.filled_frame(FOREIGN), false);
    }

    /// Gives a frame to the page on SSD: the bytes first, then the entry.
    pub fn promote(&self, word: u64) {
        self.residency.publish(PAGE, self.filled_frame(word), false);
    }

    /// Does a whole write into the frame of the resident page.
    pub fn rewrite(&self, word: u64) {
        self.residency.write_in_frame(PAGE, |at| self.residency.frames().memory().write(at, &bytes(word)));
        self.wrote(word);
    }

    /// Notes that a write has returned.
    pub fn wrote(&self, word: u64) {
        self.written.store(word, Ordering::Release);
    }

    /// Writes without the protocol.
    pub fn scribble(&self, word: u64) {
        let at = Frames::offset(self.residency.load(PAGE).frame());
        self.residency.frames().memory().write(at, &bytes(word));
        self.residency.write_in_frame(PAGE, |_| {});
    }

    /// Makes the file empty: its layout has no extents.
    pub fn emptied(self) -> Self {
        self.files.publish(SLOT, InodeNo(5), GENERATION, 0);
        self
    }

    /// The layout of an empty file.
    pub fn empty_layout() -> Layout {
        Layout { generation: GENERATION, extents: Vec::new(), known_until: None }
    }

    /// Gives the empty file its first bytes.
    pub fn grow(&self) {
        self.files.change_layout(SLOT, GENERATION + 1, LEN as u64);
    }

    /// The same with a mistake: shows the length first, and the generation after it.
    pub fn grow_carelessly(&self) {
        self.files.publish(SLOT, InodeNo(5), GENERATION + 1, LEN as u64);
    }

    /// Takes the page from its file: the mapping changes first, then the entry moves.
    pub fn leave(&self) {
        *self.mapping.lock().expect("nobody panics with it") = None;
        self.files.change_layout(SLOT, GENERATION + 1, PAGE_SIZE as u64);
        self.residency.vacate(PAGE);
    }

    /// The bytes of the last write that returned before now.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Acquire)
    }

    /// Reads as target translation does; `None` if the copy does not validate.
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

/// A function that reads the file's first bytes; `None` if it gets none.
pub trait Reader: Fn(&Site) -> Option<[u8; LEN]> + Copy + Send + Sync + 'static {}
impl<R: Fn(&Site) -> Option<[u8; LEN]> + Copy + Send + Sync + 'static> Reader for R {}

fn read_once(site: &Site, read: impl Reader, allowed: &[u64]) {
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

/// Most preemptions of a thread where two run. A read has eight loads, and a mistake shows in one or two gaps between them. The bound keeps the
/// longest of these models at seconds.
pub const PREEMPTIONS: usize = 4;

/// Runs one read beside one thread that does `change`.
fn check(read: impl Reader, preemptions: usize, change: fn(&Site), allowed: &'static [u64]) {
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

/// Checks all cases for one way to read.
///
/// # Panics
/// If a read returns bytes that it must not.
pub fn check_reader(read: impl Reader, preemptions: usize) {
    check_changes(read, preemptions);
    // All operations on a page, one after another, while one read is under way.
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

/// Checks the cases in which one thing happens to the page.
///
/// # Panics
/// If a read returns bytes that it must not.
pub fn check_changes(read: impl Reader, preemptions: usize) {
    // An evicted frame that another page gets is not accepted.
    check(
        read,
        preemptions,
        |site| {
            site.evict();
            site.promote_other();
        },
        &[OWN],
    );
    // A page that another file gets is not accepted.
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
}

/// Eviction and promotion meet a writer and the freeing of the page, in either order.
fn check_two_changers(read: impl Reader) {
    let mut model = loom::model::Builder::new();
    // There are three threads: with one more preemption this takes minutes.
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

/// Shows that the model can fail: without the odd version in between, the checker finds the torn copy.
///
/// # Panics
/// Always, if the model is worth something.
pub fn check_scribble(read: impl Reader, preemptions: usize) {
    check(read, preemptions, |site| site.scribble(NEWER), &[OWN, NEWER]);
}

/// Shows the same for reuse: the page is given away while the mapping and the generation still name it.
///
/// # Panics
/// Always, if the model is worth something.
pub fn check_given_away(read: impl Reader, preemptions: usize) {
    check(
        read,
        preemptions,
        |site| {
            site.evict();
            site.promote(FOREIGN);
        },
        &[OWN],
    );
}

/// A file gets its first bytes while it is read by its earlier layout, which has no extents. `read` returns whether it got any bytes.
///
/// # Panics
/// If it got some: they are zeros that the file never had.
pub fn check_growth(read: impl Fn(&Site) -> bool + Copy + Send + Sync + 'static, grow: fn(&Site)) {
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
