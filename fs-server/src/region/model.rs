//! The residency protocol in small under a model checker: one reader against eviction and reuse, in every
//! interleaving and with every reordering the memory model allows.
//!
//! Run: `cargo test --release -p cuttlefs-server --features model-check --lib region::model`.
//!
//! The tables live in mapped memory, which the checker cannot see, so the orderings of `ResidencyTable`, `FileTable`
//! and `SharedMemory` are restated here, step for step, over the checker's atomics: a page is two words, a pool is
//! one page, and the reader is the initiator's: generation, entry, copy, entry, generation.

#[cfg(test)]
mod tests {
    use cuttlefs_common::ids::FrameIndex;
    use cuttlefs_common::region::ResidencyEntry;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU64, Ordering, fence};
    use loom::thread;

    const FRAME: FrameIndex = FrameIndex::FIRST_USABLE;
    /// Bytes of the file the reader reads, and of the one that gets the frame or the page next.
    const OWN: u64 = 0x11;
    const FOREIGN: u64 = 0x22;

    struct Shared {
        generation: AtomicU64,
        entry: AtomicU64,
        frame: [AtomicU64; 2],
    }

    impl Shared {
        fn new() -> Arc<Self> {
            Arc::new(Self {
                generation: AtomicU64::new(1),
                entry: AtomicU64::new(ResidencyEntry::new(FRAME, 2, false).0),
                frame: [AtomicU64::new(OWN), AtomicU64::new(OWN)],
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

        fn fill(&self, word: u64) {
            self.frame.iter().for_each(|at| at.store(word, Ordering::Relaxed));
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
            let copy = [0, 1].map(|index: usize| self.frame[index].load(Ordering::Relaxed));
            fence(Ordering::Acquire);
            let after = ResidencyEntry(self.entry.load(Ordering::Relaxed));
            fence(Ordering::Acquire);
            let same = self.generation.load(Ordering::Relaxed) == generation;
            (before.validates(after) && same).then_some(copy)
        }
    }

    fn check(change: impl Fn(&Shared) + Send + Sync + Copy + 'static, allowed: &'static [[u64; 2]]) {
        loom::model(move || {
            let shared = Shared::new();
            let other = shared.clone();
            let reader = thread::spawn(move || {
                if let Some(copy) = other.read() {
                    assert!(allowed.contains(&copy), "read {copy:x?}");
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
                shared.begin_change();
                shared.end_change(FrameIndex::MAGIC);
                // The frame is free now; another page's bytes go in.
                shared.fill(FOREIGN);
            },
            &[[OWN, OWN]],
        );
    }

    #[test]
    fn a_page_given_to_another_file_is_never_believed() {
        check(
            |shared| {
                // The mapping changes first, then the page leaves, then the next file writes it.
                shared.generation.store(2, Ordering::SeqCst);
                shared.begin_change();
                shared.end_change(FrameIndex::MAGIC);
                shared.fill(FOREIGN);
                shared.begin_change();
                shared.end_change(FRAME);
            },
            &[[OWN, OWN]],
        );
    }

    #[test]
    fn a_write_in_the_frame_is_never_seen_torn() {
        check(
            |shared| {
                shared.begin_change();
                shared.fill(0x33);
                shared.end_change(FRAME);
            },
            &[[OWN, OWN], [0x33, 0x33]],
        );
    }

    /// The model can fail: without the odd version in between, the checker finds the torn copy.
    #[test]
    #[should_panic]
    fn a_write_without_the_protocol_is_caught() {
        check(
            |shared| {
                shared.fill(0x33);
                shared.begin_change();
                shared.end_change(FRAME);
            },
            &[[OWN, OWN], [0x33, 0x33]],
        );
    }
}
