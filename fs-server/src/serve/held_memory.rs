//! Gives memory back that the server has held for peers and freed.
//!
//! Malloc keeps freed memory for its next use. Messages that wait, replies that are not taken and packets that come slowly are many
//! pieces from several heaps: after 256 MiB of them 170 MiB stay with the process, and the next 256 MiB use these again.

use crate::server::Server;
use crate::worker::Spawner;
use cuttlefs_common::memory::trim_heap;
use std::time::Duration;

/// How often it is looked.
const LOOK: Duration = Duration::from_secs(1);
/// What has to be freed to be worth a walk over the heap.
const WORTH_BYTES: usize = 32 << 20;

/// What was held at most since the heap was given back last.
#[derive(Debug, Default)]
struct Peak(usize);

impl Peak {
    /// So much is held now; whether so much less than before that the heap is to be given back.
    fn look(&mut self, held_bytes: usize) -> bool {
        let falls = self.0.saturating_sub(held_bytes) >= WORTH_BYTES;
        self.0 = if falls { held_bytes } else { self.0.max(held_bytes) };
        falls
    }
}

/// Looks for ever.
pub(super) async fn give_back(server: &Server, timer: &Spawner) {
    let mut peak = Peak::default();
    loop {
        timer.sleep(LOOK).await;
        if !peak.look(server.rnics.figures().held_bytes) {
            continue;
        }
        // The walk takes milliseconds; requests go on meanwhile.
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
        // 256 to 224, 224 to 192, 256 to 0; what is less is kept.
        assert_eq!(falls, [4, 7, 9]);
    }
}
