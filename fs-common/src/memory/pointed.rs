//! A mapping whose pages are pointed, one by one, at pages of other memory: a window with constant addresses.
//!
//! An RNIC with on-demand paging that has registered the mapping follows it: a READ of a page finds the page that it is pointed at, and the
//! registration stays the same (`Mr::new`). A page that is pointed at nothing reads as the magic page.
//!
//! # How it works
//! The kernel keeps a process's mappings as runs: a run maps one range of one file. So the magic page is in a file of its own, `GONE_PAGES` times in
//! a row, as long as a run of it may be. A page is pointed by mapping over it (`MAP_FIXED`): with the frame's page, or with the magic file's page at
//! the same place in the run, so that the kernel joins the run again. A shown page among pages that are gone costs two runs of the process.
//!
//! # Invariants
//! * When `point` has returned, no READ that comes through the mapping finds what the page was pointed at before: the kernel takes the old page from
//!   the process, and from each RNIC that has it, before `mmap` returns. READs meanwhile find the one or the other.
//! * Hiding a page never lacks runs: at most half as many pages are shown as the kernel allows a process in runs.
//!
//! # Failure
//! A page that cannot be shown stays gone: `Full`, or the kernel's error. If a page cannot be hidden, the owner must not ignore the error:
//! [`PointedMemory::close`] takes the whole window away.

use super::SharedMemory;
use parking_lot::Mutex;
use rustix::mm::{MapFlags, ProtFlags};
use std::collections::HashSet;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

/// Pages of a run of gone pages: 1 MiB of memory for all windows of a process, and a run for each MiB of a window.
const GONE_PAGES: usize = 256;
/// Runs that are left to the rest of the process: its heap, its threads' stacks, libraries.
const OTHER_RUNS: usize = 8192;
/// Linux's limit of a process, unless somebody changes it.
const DEFAULT_RUNS: usize = 65_530;

/// Why a page was not pointed.
#[derive(Debug, thiserror::Error)]
pub enum PointError {
    /// No more pages may be shown.
    #[error(
        "{shown} pages are shown, which is as many as vm.max_map_count allows; raise it (two for each page that is to be shown)"
    )]
    Full {
        /// The number of shown pages.
        shown: usize,
    },
    /// The kernel refused.
    #[error("the kernel does not map a page of the window: {0}")]
    Kernel(#[from] io::Error),
}

/// A mapping whose pages are pointed at pages of other memory. See the module.
#[derive(Debug)]
pub struct PointedMemory {
    memory: Arc<SharedMemory>,
    frames: Arc<SharedMemory>,
    gone: SharedMemory,
    page_bytes: usize,
    shown: Mutex<HashSet<usize>>,
    /// Pages that may be shown at once.
    room: usize,
}

impl PointedMemory {
    /// A window of `pages` pages onto pages of `frames`. All are gone at first: they read as `magic`, which is a page long.
    ///
    /// # Errors
    /// The kernel has no room for it.
    pub fn new(frames: Arc<SharedMemory>, pages: usize, magic: &[u8]) -> io::Result<Self> {
        let page_bytes = rustix::param::page_size();
        assert_eq!(magic.len(), page_bytes, "the magic page is a page");
        assert!(pages > 0, "a window has pages");
        let gone = SharedMemory::new("cuttlefs-gone", GONE_PAGES * page_bytes)?;
        (0..GONE_PAGES).for_each(|page| gone.write(page * page_bytes, magic));
        let allowed = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
        let allowed = allowed.and_then(|text| text.trim().parse().ok()).unwrap_or(DEFAULT_RUNS);
        let room = allowed.saturating_sub(OTHER_RUNS).saturating_sub(pages.div_ceil(GONE_PAGES)) / 2;
        let len = pages.checked_mul(page_bytes).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: a fresh mapping at an address the kernel picks aliases nothing of ours.
        let base = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::empty(), MapFlags::PRIVATE)?
        };
        let base = NonNull::new(base.cast::<u8>()).ok_or_else(|| io::Error::other("mmap gave null"))?;
        let memory = SharedMemory {
            fd: gone.fd.try_clone()?,
            base,
            len,
            writable: false,
            is_part: false,
            is_pointed: true,
            pins: AtomicU32::new(0),
            #[cfg(feature = "model-check")]
            modelled: crate::sync::Words::default(),
        };
        let window =
            Self { memory: Arc::new(memory), frames, gone, page_bytes, shown: Mutex::default(), room };
        for first in (0..pages).step_by(GONE_PAGES) {
            window.map(first, GONE_PAGES.min(pages - first), &window.gone, 0)?;
        }
        Ok(window)
    }

    /// Mappings of a process (`vm.max_map_count`) that suffice for a window of so many pages, of which so many are shown at once.
    pub fn mappings(pages: u64, shown: u64) -> u64 {
        OTHER_RUNS as u64 + pages.div_ceil(GONE_PAGES as u64) + 2 * shown
    }

    /// The memory of the window, to register and to read.
    pub fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// How many pages may be shown at once.
    pub fn room(&self) -> usize {
        self.room
    }

    /// The number of pages that are shown now.
    pub fn shown(&self) -> usize {
        self.shown.lock().len()
    }

    /// Points a page at a page of the frames, or at nothing.
    ///
    /// # Errors
    /// `PointError`; the page stays as it was.
    pub fn point(&self, page: usize, frame: Option<usize>) -> Result<(), PointError> {
        assert!((page + 1) * self.page_bytes <= self.memory.len, "the window has no page {page}");
        // Held while the page is mapped, so that the count is right.
        let mut shown = self.shown.lock();
        match frame {
            Some(frame) => {
                assert!((frame + 1) * self.page_bytes <= self.frames.len, "there is no frame {frame}");
                if shown.len() >= self.room && !shown.contains(&page) {
                    return Err(PointError::Full { shown: shown.len() });
                }
                self.map(page, 1, &self.frames, frame)?;
                shown.insert(page);
            }
            None if shown.contains(&page) => {
                self.map(page, 1, &self.gone, page % GONE_PAGES)?;
                shown.remove(&page);
            }
            None => {}
        }
        Ok(())
    }

    /// Takes the whole window away: READs fail from now on, and find nothing. For an owner that could not hide a page.
    pub fn close(&self) {
        let mut shown = self.shown.lock();
        // SAFETY: the range is this window's own, and what is put there can be read as little as nothing: of the processor's accesses, which the
        // owner has given up, none is left.
        let closed = unsafe {
            let base = self.memory.base.as_ptr().cast();
            rustix::mm::mmap_anonymous(
                base,
                self.memory.len,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::FIXED,
            )
        };
        // One run takes the place of many, so no limit of the kernel can refuse it.
        assert!(closed.is_ok(), "a window cannot be taken away: {closed:?}");
        shown.clear();
    }

    fn map(&self, page: usize, pages: usize, of: &SharedMemory, of_page: usize) -> io::Result<()> {
        // SAFETY: the callers have checked that the range is in this window's own mapping, and that what it shows is in `of`, which is sealed against
        // shrinking. It is mapped for reading; whoever copies from it meanwhile gets old or new bytes.
        unsafe {
            rustix::mm::mmap(
                self.memory.base.as_ptr().add(page * self.page_bytes).cast(),
                pages * self.page_bytes,
                ProtFlags::READ,
                MapFlags::SHARED | MapFlags::FIXED,
                &of.fd,
                (of_page * self.page_bytes) as u64,
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(page: usize) -> Arc<SharedMemory> {
        let frames = Arc::new(SharedMemory::new("frames", 4 * page).expect("memory"));
        (0..4).for_each(|frame| frames.fill(frame * page, page, frame as u8 + 1));
        frames
    }

    /// The one byte that a page consists of.
    fn all(window: &PointedMemory, page: usize) -> u8 {
        let mut bytes = vec![0; window.page_bytes];
        window.memory().read(page * window.page_bytes, &mut bytes);
        assert!(bytes.iter().all(|byte| *byte == bytes[0]));
        bytes[0]
    }

    #[test]
    fn pages_show_what_they_are_pointed_at() {
        let page = rustix::param::page_size();
        let frames = frames(page);
        let window =
            PointedMemory::new(frames.clone(), 3 * GONE_PAGES + 5, &vec![0x5a; page]).expect("window");
        let last = 3 * GONE_PAGES + 4;
        assert!([0, 1, GONE_PAGES, last].iter().all(|at| all(&window, *at) == 0x5a));
        window.point(last, Some(2)).expect("shown");
        window.point(1, Some(3)).expect("shown");
        assert_eq!(
            (all(&window, last), all(&window, 1), all(&window, 0), all(&window, 2)),
            (3, 4, 0x5a, 0x5a)
        );
        frames.fill(3 * page, page, 9);
        assert_eq!(all(&window, 1), 9, "it is the frame, no copy of it");
        window.point(1, Some(0)).expect("another");
        assert_eq!((all(&window, 1), window.shown()), (1, 2));
        window.point(1, None).expect("gone");
        window.point(1, None).expect("gone twice");
        assert_eq!((all(&window, 1), window.shown()), (0x5a, 1));
    }

    /// The number of this process's runs that lie in the window.
    fn runs(window: &PointedMemory) -> usize {
        let base = window.memory().base_address().as_ptr() as usize;
        let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
        let starts = maps.lines().filter_map(|line| usize::from_str_radix(line.split('-').next()?, 16).ok());
        starts.filter(|start| (base..base + window.memory().len()).contains(start)).count()
    }

    #[test]
    fn a_page_that_is_gone_again_leaves_no_run_behind() {
        let page = rustix::param::page_size();
        let window = PointedMemory::new(frames(page), 4 * GONE_PAGES, &vec![0; page]).expect("window");
        assert_eq!(runs(&window), 4);
        for at in (1..4 * GONE_PAGES).step_by(10) {
            window.point(at, Some(at % 4)).expect("shown");
        }
        let shown = window.shown();
        assert!(runs(&window) <= 4 + 2 * shown && runs(&window) > shown);
        (0..4 * GONE_PAGES).for_each(|at| window.point(at, None).expect("gone"));
        assert_eq!((runs(&window), window.shown()), (4, 0));
    }

    #[test]
    fn no_more_are_shown_than_can_be_hidden() {
        let page = rustix::param::page_size();
        let mut window = PointedMemory::new(frames(page), 16, &vec![0; page]).expect("window");
        window.room = 2;
        window.point(3, Some(0)).expect("one");
        window.point(9, Some(1)).expect("two");
        let full = window.point(5, Some(2)).expect_err("no room").to_string();
        assert!(full.contains("vm.max_map_count"), "{full}");
        window.point(9, Some(3)).expect("one that is shown may show another");
        window.point(3, None).expect("gone");
        window.point(5, Some(2)).expect("room again");
    }

    #[test]
    fn a_closed_window_shows_nothing() {
        let page = rustix::param::page_size();
        let window = PointedMemory::new(frames(page), 16, &vec![0; page]).expect("window");
        (0..8).for_each(|at| window.point(2 * at, Some(at % 4)).expect("shown"));
        window.close();
        assert_eq!((runs(&window).max(1), window.shown()), (1, 0));
    }
}
