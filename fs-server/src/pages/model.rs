//! The residency protocol in small under a model checker: one reader against eviction and reuse, in every
//! interleaving and with every reordering the memory model allows.
//!
//! Run: `cargo test --release -p cuttlefs-server --features model-check --lib pages::model`.
//!
//! The tables live in mapped memory, which the checker cannot see, so the orderings of `ResidencyTable`, `FileTable`
//! and `SharedMemory` are restated here, step for step, over the checker's atomics: a page is two words, a pool is
//! one page and two frames, and the reader is the initiator's: generation, entry, copy, entry, generation. What was
//! written before a read began is told to the reader as a reply would be: released by the writer, acquired by it.

#[cfg(test)]
mod tests {
    use cuttlefs_common::ids::FrameIndex;
    use cuttlefs_common::region::ResidencyEntry;
    use loom::sync::atomic::{AtomicU64, Ordering, fence};
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    const FRAME: FrameIndex = FrameIndex::FIRST_USABLE;
    const OTHER_FRAME: FrameIndex = FrameIndex(FRAME.0 + 1);
    /// Bytes of the file the reader reads, and of the one that gets the frame or the page next.
    const OWN: u64 = 0x11;
    const FOREIGN: u64 = 0x22;
    /// What the file's writer puts in place of `OWN`.
    const NEWER: u64 = 0x33;

    struct Shared {
        generation: AtomicU64,
        entry: AtomicU64,
        frames: [[AtomicU64; 2]; 2],
        /// The last write that returned.
        written: AtomicU64,
    }

    impl Shared {
        fn new() -> Arc<Self> {
            Arc::new(Self {
                generation: AtomicU64::new(1),
                entry: AtomicU64::new(ResidencyEntry::new(FRAME, 2, false).0),
                frames: [OWN, 0].map(|word| [AtomicU64::new(word), AtomicU64::new(word)]),
                written: AtomicU64::new(OWN),
            })
        }

        fn begin_change(&self) {
            let entry = ResidencyEntry(self.entry.load(Ordering::Acquire));
            let odd = ResidencyEntry::new(entry.frame(), entry.next_seq(), entry.is_dirty());
            self.entry.store(odd.0, Ordering::Relaxed);
            fence(Ordering::Release);
        }

        fn end_change(&self, frame: FrameIndex) {
            let entry = ResidencyEntry(self.entry.load(Ordering::Acquire));
            let even = ResidencyEntry::new(frame, entry.next_seq(), false);
            self.entry.store(even.0, Ordering::Release);
        }

        fn frame(&self, frame: FrameIndex) -> &[AtomicU64; 2] {
            &self.frames[(frame.0 - FRAME.0) as usize]
        }

        fn fill(&self, frame: FrameIndex, word: u64) {
            self.frame(frame).iter().for_each(|at| at.store(word, Ordering::Relaxed));
        }

        fn evict(&self) {
            self.begin_change();
            self.end_change(FrameIndex::MAGIC);
        }

        /// A page on SSD gets a frame: bytes first, then the entry.
        fn promote(&self, frame: FrameIndex, word: u64) {
            self.fill(frame, word);
            self.begin_change();
            self.end_change(frame);
        }

        fn rewrite(&self, frame: FrameIndex, word: u64) {
            self.begin_change();
            self.fill(frame, word);
            self.end_change(frame);
            self.written.store(word, Ordering::Release);
        }

        /// The page leaves its file: the mapping changes first, then the entry moves.
        fn leave(&self) {
            self.generation.store(2, Ordering::SeqCst);
            self.evict();
        }

        /// What a copy that validates gives.
        fn read(&self) -> Option<[u64; 2]> {
            let generation = self.generation.load(Ordering::Acquire);
            if generation != 1 {
                return None;
            }
            let before = ResidencyEntry(self.entry.load(Ordering::Acquire));
            if !before.is_resident() || before.is_changing() {
                return None;
            }
            let frame = self.frame(before.frame());
            let copy = [0, 1].map(|index: usize| frame[index].load(Ordering::Relaxed));
            fence(Ordering::Acquire);
            let after = ResidencyEntry(self.entry.load(Ordering::Relaxed));
            fence(Ordering::Acquire);
            let same = self.generation.load(Ordering::Relaxed) == generation;
            (before.validates(after) && same).then_some(copy)
        }
    }

    fn check(change: impl Fn(&Shared) + Send + Sync + Copy + 'static, allowed: &'static [u64]) {
        let mut model = loom::model::Builder::new();
        // One read has seven loads, and what can go wrong does so in one gap or two between them; a bound keeps the
        // longest of these models at seconds.
        model.preemption_bound = Some(3);
        model.check(move || {
            let shared = Shared::new();
            let other = shared.clone();
            let reader = thread::spawn(move || {
                let written = other.written.load(Ordering::Acquire);
                if let Some(copy) = other.read() {
                    assert!(copy[0] == copy[1] && allowed.contains(&copy[0]), "read {copy:x?}");
                    assert!(copy[0] >= written, "read {copy:x?} after {written:x} was written");
                }
            });
            change(&shared);
            reader.join().expect("the reader found nothing wrong");
        });
    }

    #[test]
    fn an_evicted_frame_given_to_another_page_is_never_believed() {
        check(
            |shared| {
                shared.evict();
                // The frame is free now; another page's bytes go in.
                shared.fill(FRAME, FOREIGN);
            },
            &[OWN],
        );
    }

    #[test]
    fn a_page_given_to_another_file_is_never_believed() {
        check(
            |shared| {
                shared.leave();
                // The next file's page.
                shared.promote(FRAME, FOREIGN);
            },
            &[OWN],
        );
    }

    /// All that can befall a page, one after another, while one read is under way.
    #[test]
    fn a_page_that_is_evicted_promoted_rewritten_and_given_away_is_never_mistaken() {
        check(
            |shared| {
                shared.evict();
                shared.fill(FRAME, FOREIGN);
                shared.promote(OTHER_FRAME, OWN);
                shared.rewrite(OTHER_FRAME, NEWER);
                shared.leave();
                shared.promote(OTHER_FRAME, FOREIGN);
            },
            &[OWN, NEWER],
        );
    }

    /// The same by two threads under the page's block lock: eviction and promotion meet the writer and the one who
    /// frees in either order.
    #[test]
    fn eviction_against_a_writer_and_reuse_is_never_mistaken() {
        let mut model = loom::model::Builder::new();
        // Three threads: with one more it takes minutes.
        model.preemption_bound = Some(2);
        model.check(|| {
            let shared = Shared::new();
            let lock = Arc::new(Mutex::new(()));
            let (seen, evicted, evicting) = (shared.clone(), shared.clone(), lock.clone());
            let reader = thread::spawn(move || {
                let written = seen.written.load(Ordering::Acquire);
                if let Some(copy) = seen.read() {
                    assert!(copy[0] == copy[1] && [OWN, NEWER].contains(&copy[0]), "read {copy:x?}");
                    assert!(copy[0] >= written, "read {copy:x?} after {written:x} was written");
                }
            });
            let evictor = thread::spawn(move || {
                let _block = evicting.lock().expect("nobody panicked");
                let entry = ResidencyEntry(evicted.entry.load(Ordering::Acquire));
                evicted.evict();
                // Free, and another page's at once.
                evicted.fill(entry.frame(), FOREIGN);
            });
            {
                let _block = lock.lock().expect("nobody panicked");
                let entry = ResidencyEntry(shared.entry.load(Ordering::Acquire));
                if entry.is_resident() {
                    shared.rewrite(entry.frame(), NEWER);
                } else {
                    shared.promote(OTHER_FRAME, NEWER);
                    shared.written.store(NEWER, Ordering::Release);
                }
            }
            evictor.join().expect("it only evicts");
            {
                let _block = lock.lock().expect("nobody panicked");
                shared.leave();
                shared.promote(OTHER_FRAME, FOREIGN);
            }
            reader.join().expect("the reader found nothing wrong");
        });
    }

    #[test]
    fn a_write_in_the_frame_is_never_seen_torn() {
        check(|shared| shared.rewrite(FRAME, NEWER), &[OWN, NEWER]);
    }

    /// The model can fail: without the odd version in between, the checker finds the torn copy.
    #[test]
    #[should_panic(expected = "read [")]
    fn a_write_without_the_protocol_is_caught() {
        check(
            |shared| {
                shared.fill(FRAME, NEWER);
                shared.begin_change();
                shared.end_change(FRAME);
            },
            &[OWN, NEWER],
        );
    }

    /// And so it can with reuse: a page that is given away under its file's generation, with the entry as it was.
    #[test]
    #[should_panic(expected = "read [")]
    fn a_page_that_leaves_without_a_generation_is_caught() {
        check(
            |shared| {
                shared.evict();
                shared.promote(FRAME, FOREIGN);
            },
            &[OWN],
        );
    }
}
