//! The window follows the residency table. The tests look at it through a mapping, as an RNIC with on-demand paging does, and through a device's DMA.

use super::*;
use crate::pages::frames::{Frames, PrivateFrame};
use crate::pages::residency::Residency;
use cuttlefs_common::ids::PAGE_SIZE;
use cuttlefs_common::memory::{PointedMemory, SharedMemory};
use cuttlefs_common::region::{MagicPattern, ResidencyTable};
use cuttlefs_common::world::{Random, SeededRandom};
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

mod edu;

const POOL: u64 = 600;
const MAGIC: u64 = 0x5a5a_5a5a_5a5a_5a5a;
/// The word in a frame that is filled anew and belongs to no page yet.
const NOBODYS: u64 = u64::MAX;

fn frames(count: u32) -> Arc<Frames> {
    Arc::new(Frames::new(count, &MagicPattern::new([0x5a; 32])).expect("frames"))
}

fn mapped(frames: &Arc<Frames>) -> Arc<PointedMemory> {
    let window = PointedMemory::new(frames.memory().clone(), POOL as usize, &[0x5a; PAGE_SIZE]);
    Arc::new(window.expect("a window"))
}

fn residency(frames: &Arc<Frames>, window: impl PageWindow + 'static) -> Residency {
    let table = ResidencyTable::new(POOL).expect("a table");
    Residency::new(table, frames.clone()).with_window(Box::new(window))
}

fn fill(frames: &Frames, frame: &PrivateFrame, word: u64) {
    let page: Vec<u8> = std::iter::repeat_n(word.to_le_bytes(), PAGE_SIZE / 8).flatten().collect();
    frames.memory().write(frame.offset(), &page);
}

fn filled(frames: &Arc<Frames>, word: u64) -> PrivateFrame {
    let frame = frames.take().expect("a frame is free");
    fill(frames, &frame, word);
    frame
}

fn words(memory: &SharedMemory, page: u64) -> Vec<u64> {
    let mut bytes = vec![0; PAGE_SIZE];
    memory.read(page as usize * PAGE_SIZE, &mut bytes);
    bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight"))).collect()
}

/// The word of which a page of the window consists.
fn word(window: &PointedMemory, page: u64) -> u64 {
    let words = words(window.memory(), page);
    assert!(words.iter().all(|word| *word == words[0]), "page {page} is mixed");
    words[0]
}

#[test]
fn a_window_shows_pages_that_have_frames() {
    let frames = frames(7);
    let window = mapped(&frames);
    let residency = residency(&frames, window.clone());
    residency.publish(PoolPage(5), filled(&frames, 55), false);
    residency.publish(PoolPage(500), filled(&frames, 77), true);
    assert_eq!(word(&window, 5), MAGIC, "shown later, magic until then");
    residency.settle_window();
    assert_eq!([4, 5, 6, 500].map(|page| word(&window, page)), [MAGIC, 55, MAGIC, 77]);
    residency.write_in_frame(PoolPage(5), |at| frames.memory().write(at, &56u64.to_le_bytes()));
    assert_eq!(words(window.memory(), 5)[..2], [56, 55], "a write to the frame is one to the window");
}

#[test]
fn a_frame_is_free_when_the_window_no_longer_shows_it() {
    let frames = frames(7);
    let window = mapped(&frames);
    let residency = residency(&frames, window.clone());
    residency.publish(PoolPage(5), filled(&frames, 55), false);
    residency.settle_window();
    residency.vacate(PoolPage(5));
    assert!(!residency.load(PoolPage(5)).is_resident());
    assert_eq!((frames.free(), word(&window, 5)), (3, 55), "the window shows it, so nobody may have it");
    residency.settle_window();
    assert_eq!((frames.free(), word(&window, 5)), (4, MAGIC));
}

#[test]
fn a_page_that_comes_back_at_once_does_not_show_its_old_bytes_under_its_new_entry() {
    let frames = frames(7);
    let window = mapped(&frames);
    let residency = residency(&frames, window.clone());
    residency.publish(PoolPage(5), filled(&frames, 1), false);
    residency.settle_window();
    residency.vacate(PoolPage(5));
    residency.publish(PoolPage(5), filled(&frames, 2), false);
    assert_eq!(word(&window, 5), MAGIC);
    residency.settle_window();
    assert_eq!(word(&window, 5), 2);
}

#[test]
fn a_frame_that_goes_to_another_page_is_shown_there() {
    let frames = frames(7);
    let window = mapped(&frames);
    let residency = residency(&frames, window.clone());
    residency.publish(PoolPage(9), filled(&frames, 1), false);
    residency.settle_window();
    residency.vacate(PoolPage(9));
    residency.publish(PoolPage(5), filled(&frames, 55), false);
    residency.relocate(PoolPage(5), PoolPage(9));
    assert_eq!(word(&window, 9), MAGIC, "what it had before is hidden first");
    residency.settle_window();
    assert_eq!([5, 9].map(|page| word(&window, page)), [MAGIC, 55]);
    residency.vacate(PoolPage(9));
    residency.settle_window();
    assert_eq!((frames.free(), window.shown()), (4, 0));
}

#[test]
fn frames_do_not_wait_for_ever() {
    let frames = frames(3 + 200);
    let window = mapped(&frames);
    let residency = residency(&frames, window.clone());
    (0..200).for_each(|page| residency.publish(PoolPage(page), filled(&frames, page), false));
    (0..200).for_each(|page| residency.vacate(PoolPage(page)));
    assert!(frames.free() > 200 - 64, "most are free: {}", frames.free());
    residency.settle_window();
    assert_eq!((frames.free(), window.shown()), (200, 0));
}

/// A window whose `point` fails from call number `from` on.
#[derive(Debug, Default)]
struct Failing {
    calls: AtomicU64,
    from: u64,
    is_closed: AtomicBool,
    shown: Mutex<Vec<Pointed>>,
}

impl PageWindow for Arc<Failing> {
    fn point(&self, changes: &[Pointed]) -> Result<(), WindowLost> {
        assert!(!self.is_closed.load(Ordering::Relaxed), "a window that was closed is pointed");
        if self.calls.fetch_add(1, Ordering::Relaxed) >= self.from {
            return Err(WindowLost { source: io::ErrorKind::NotConnected.into(), advice: "a test's" });
        }
        self.shown.lock().extend(changes);
        Ok(())
    }

    fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_window_that_is_lost_is_closed_and_keeps_no_frame() {
    let frames = frames(7);
    let window = Arc::new(Failing { from: 1, ..Failing::default() });
    let residency = residency(&frames, window.clone());
    residency.publish(PoolPage(1), filled(&frames, 1), false);
    residency.settle_window();
    let shown = Pointed { page: PoolPage(1), frame: Some(residency.load(PoolPage(1)).frame()) };
    assert_eq!(*window.shown.lock(), [shown]);
    residency.vacate(PoolPage(1));
    residency.settle_window();
    assert!(window.is_closed.load(Ordering::Relaxed));
    assert_eq!(frames.free(), 4);
    // The server goes on without a window.
    (0..100).for_each(|page| {
        residency.publish(PoolPage(page), filled(&frames, page), false);
        residency.vacate(PoolPage(page));
    });
    residency.settle_window();
    assert_eq!((frames.free(), window.calls.load(Ordering::Relaxed)), (4, 2));
}

/// Makes pages resident and evicts them at random, as a server does. Each frame is filled anew for its next page at once, with a word that names the
/// page and the turn. Counts the turns.
fn come_and_go(
    frames: &Arc<Frames>,
    residency: &Residency,
    pages: u64,
    is_over: &AtomicBool,
    turns: &AtomicU64,
) {
    let random = SeededRandom::new(3);
    while !is_over.load(Ordering::Relaxed) {
        let page = random.next_u64() % pages;
        if residency.load(PoolPage(page)).is_resident() {
            residency.vacate(PoolPage(page));
        } else {
            let frame = frames.take().or_else(|| {
                residency.settle_window();
                frames.take()
            });
            let Some(frame) = frame else {
                let resident = (0..pages).find(|page| residency.load(PoolPage(*page)).is_resident());
                residency.vacate(PoolPage(resident.expect("whose the frames are")));
                continue;
            };
            fill(frames, &frame, NOBODYS);
            fill(frames, &frame, word_of(page, turns.load(Ordering::Relaxed) + 1));
            residency.publish(PoolPage(page), frame, false);
        }
        turns.fetch_add(1, Ordering::Relaxed);
    }
}

/// Ends `come_and_go`, also when a check fails.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn word_of(page: u64, turn: u64) -> u64 {
    (page + 1) << 32 | (turn & 0xffff_ffff)
}

fn is_of(word: u64, page: u64) -> bool {
    word >> 32 == page + 1
}

#[test]
fn under_concurrent_looks_a_window_shows_the_page_or_magic_and_nothing_else() {
    const PAGES: u64 = 40;
    let frames = frames(3 + 20);
    let window = mapped(&frames);
    let residency = residency(&frames, window.clone());
    let (is_over, turns) = (AtomicBool::new(false), AtomicU64::new(0));
    let (mut shown, mut gone) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| come_and_go(&frames, &residency, PAGES, &is_over, &turns));
        let _ends = Ends(&is_over);
        let random = SeededRandom::new(4);
        while shown < 500 || gone < 500 {
            let page = random.next_u64() % PAGES;
            let words = words(window.memory(), page);
            let bad = words.iter().find(|word| **word != MAGIC && !is_of(**word, page));
            assert_eq!(bad, None, "page {page} shows something else");
            shown += u32::from(words.iter().any(|word| *word != MAGIC));
            gone += u32::from(words.contains(&MAGIC));
        }
    });
    assert!(turns.into_inner() > 0);
}
