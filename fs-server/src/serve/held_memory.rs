//! Gives memory back to the system that the server has held for peers and freed.
//!
//! Malloc keeps freed memory for later allocations. Waiting messages, replies that are not taken and packets that come slowly are many pieces in
//! several heaps: after 256 MiB of them, 170 MiB stay with the process, and the next 256 MiB use these again.

use crate::server::Server;
use crate::worker::Spawner;
use cuttlefs_common::memory::trim_heap;
use std::time::Duration;

/// How often the held memory is measured.
const LOOK: Duration = Duration::from_secs(1);
/// Bytes that must have been freed to make a walk over the heap worthwhile.
const WORTH_BYTES: usize = 32 << 20;

/// The most that was held since the heap was last given back.
#[derive(Debug, Default)]
struct Peak(usize);

impl Peak {
    /// Takes a measurement. Returns whether it is so much below the peak that the heap should be given back.
    fn look(&mut self, held_bytes: usize) -> bool {
        let falls = self.0.saturating_sub(held_bytes) >= WORTH_BYTES;
        self.0 = if falls { held_bytes } else { self.0.max(held_bytes) };
        falls
    }
}

/// Measures, and gives memory back, for ever.
pub(super) async fn give_back(server: &Server, timer: &Spawner) {
    let mut peak = Peak::default();
    loop {
        timer.sleep(LOOK).await;
        if !peak.look(server.rnics.figures().held_bytes) {
            continue;
        }
        // The walk takes milliseconds, so it has a thread of its own and requests go on.
        let walk = std::thread::Builder::new().name("trim-heap".into()).spawn(trim_heap);
        if let Err(error) = walk {
            tracing::debug!(%error, "the heap keeps what was freed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_heap_is_given_back_once_behind_each_fall() {
        const MIB: usize = 1 << 20;
        let mut peak = Peak::default();
        let looks =
            [0, 256, 250, 225, 224, 200, 193, 192, 256, 0, 0, 31, 0].map(|held| peak.look(held * MIB));
        let falls: Vec<_> = (0..looks.len()).filter(|look| looks[*look]).collect();
        // The falls from 256 to 224, from 224 to 192 and from 192 to 0. Smaller ones are ignored.
        assert_eq!(falls, [4, 7, 9]);
    }
}
