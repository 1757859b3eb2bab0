//! The code of paged memory under a model checker, in every interleaving and with every reordering that the memory model allows: an RNIC that copies from
//! or to a page, and an owner that takes the page's frame meanwhile and gives it to another page. A page is two words. The tests need the feature
//! `model-check`; docs/testing.md has the command.

use cuttlefs_common::ids::PAGE_SIZE;
use cuttlefs_common::memory::paged::{ENTRIES_AT, FIRST_FRAME, PagedMemory};
use std::sync::Arc;

/// The part of the page that is read and written.
const LEN: usize = 16;
const SIGNATURE: u64 = 0x11;
/// The page's bytes, what an RNIC writes, and the bytes of the page that gets the frame.
const OWN: u64 = 0x22;
const WRITTEN: u64 = 0x33;
const FOREIGN: u64 = 0x44;

const FRAME: u32 = FIRST_FRAME;
const FRAME_AT: usize = FRAME as usize * PAGE_SIZE;

fn bytes(word: u64) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    bytes.chunks_exact_mut(8).for_each(|chunk| chunk.copy_from_slice(&word.to_ne_bytes()));
    bytes
}

fn words(bytes: [u8; LEN]) -> [u64; 2] {
    [0, 8].map(|at| u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("a word")))
}

/// Two pages and one frame, which is page 0's.
fn memory() -> Arc<PagedMemory> {
    let memory = PagedMemory::new(2, 1, &[0; PAGE_SIZE]).expect("memory");
    let (frames, table) = (memory.translated().frames(), memory.translated().table());
    for frame in 0..=FRAME as usize {
        frames.modelled.observe(frame * PAGE_SIZE, LEN);
    }
    // The slots of the owner's process that are used here, and the entries.
    table.modelled.observe(0, 8);
    table.modelled.observe(64, 8);
    table.modelled.observe(ENTRIES_AT, LEN);
    frames.write(0, &bytes(SIGNATURE));
    frames.write(FRAME_AT, &bytes(OWN));
    memory.show(0, FRAME, false);
    Arc::new(memory)
}

/// What the owner found when it took page 0's frame; `None`: an RNIC copied, and the page stayed. `look`: whether it reads the frame. The checker tries a
/// store before and after another thread's load only if the storing thread has not loaded the word itself, so a model of readers does without.
fn evict(memory: &PagedMemory, wait: bool, look: bool) -> Option<(bool, [u64; 2])> {
    let dirty = memory.hide(0).is_dirty();
    if wait && memory.is_copied(0) {
        memory.show(0, FRAME, dirty);
        return None;
    }
    let frames = memory.translated().frames();
    let mut found = [0; LEN];
    if look {
        frames.read(FRAME_AT, &mut found);
    }
    memory.gone(0);
    frames.write(FRAME_AT, &bytes(FOREIGN));
    memory.show(1, FRAME, false);
    Some((dirty, words(found)))
}

fn check(body: impl Fn() + Sync + Send + 'static) {
    loom::model::Builder::new().check(body);
}

fn check_read(wait: bool) {
    check(move || {
        let memory = memory();
        let owner = memory.clone();
        let evicting = loom::thread::spawn(move || evict(&owner, wait, false).is_some());
        let mut found = [0; LEN];
        memory.translated().read(0, &mut found);
        let found = words(found);
        assert!(found == [OWN; 2] || found == [SIGNATURE; 2], "{found:x?}");
        evicting.join().expect("the owner found nothing wrong");
    });
}

fn check_write(wait: bool) {
    check(move || {
        let memory = memory();
        let rnic = memory.clone();
        let writing = loom::thread::spawn(move || {
            let before = rnic.entry(0);
            rnic.translated().write(0, &bytes(WRITTEN));
            before.stayed(rnic.entry(0))
        });
        let evicted = evict(&memory, wait, true);
        let stayed = writing.join().expect("the writer found nothing wrong");
        let mut frame = [0; LEN];
        memory.translated().frames().read(FRAME_AT, &mut frame);
        let frame = words(frame);
        match evicted {
            None => {
                assert!(!stayed || frame == [WRITTEN; 2], "a WRITE that is done is in the page");
                assert!(frame == [OWN; 2] || memory.entry(0).is_dirty(), "what was written is dirty");
            }
            Some((dirty, found)) => {
                assert_eq!(frame, [FOREIGN; 2], "a WRITE went into another page");
                assert!(found == [OWN; 2] || found == [WRITTEN; 2], "{found:x?}");
                assert!(dirty || found == [OWN; 2], "what was written is dirty");
                assert!(!stayed || found == [WRITTEN; 2], "a WRITE that is done is in the page");
            }
        }
    });
}

#[test]
fn a_read_is_of_the_page_or_the_signature() {
    check_read(true);
}

#[test]
fn a_write_that_is_done_is_in_the_page_and_in_no_other() {
    check_write(true);
}

/// The model is worth something: without the wait for copies both go wrong.
#[test]
#[should_panic]
fn without_waiting_for_copies_a_read_is_of_another_page() {
    check_read(false);
}

#[test]
#[should_panic]
fn without_waiting_for_copies_a_write_goes_into_another_page() {
    check_write(false);
}

/// Two RNICs write the same page.
#[test]
fn two_writes_and_an_eviction() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let memory = memory();
        let writers: Vec<_> = (0..2)
            .map(|_| {
                let rnic = memory.clone();
                loom::thread::spawn(move || rnic.translated().write(0, &bytes(WRITTEN)))
            })
            .collect();
        let evicted = evict(&memory, true, true);
        writers.into_iter().for_each(|writer| writer.join().expect("a writer"));
        if let Some((dirty, found)) = evicted {
            assert!(dirty || found == [OWN; 2]);
            let mut frame = [0; LEN];
            memory.translated().frames().read(FRAME_AT, &mut frame);
            assert_eq!(words(frame), [FOREIGN; 2]);
        }
    });
}
