//! The memory in which a thread builds packets.
//!
//! A large packet has a buffer of its own. Its pages come from the kernel one by one, which takes as long as the transfer itself, so the thread keeps it as
//! long as it builds large packets now and then, whatever small ones it builds in between.

use super::KEEP_LEN;
use crate::rdma::soft::tcp::packet::PACKET_HEADER_LEN;
use std::cell::RefCell;

/// Small packets in a row behind which the buffer of large ones is freed.
const SMALL_MAX: u32 = 64;

thread_local! {
    static SCRATCH: RefCell<Scratch> = const { RefCell::new(Scratch::NEW) };
}

/// Has a packet built where there is room for a header and `payload_len` bytes, none of which have a meaning yet.
pub(super) fn with_packet<R>(payload_len: usize, build: impl FnOnce(&mut Vec<u8>) -> R) -> R {
    SCRATCH.with_borrow_mut(|scratch| build(scratch.room(PACKET_HEADER_LEN + payload_len)))
}

struct Scratch {
    small: Vec<u8>,
    /// For packets of more than `KEEP_LEN`.
    large: Vec<u8>,
    /// Small packets since the last large one.
    since_large: u32,
}

impl Scratch {
    const NEW: Self = Self { small: Vec::new(), large: Vec::new(), since_large: 0 };

    fn room(&mut self, len: usize) -> &mut Vec<u8> {
        let packet = if len > KEEP_LEN {
            self.since_large = 0;
            &mut self.large
        } else {
            self.since_large = self.since_large.saturating_add(1);
            if self.since_large == SMALL_MAX {
                self.large = Vec::new();
            }
            &mut self.small
        };
        packet.resize(len, 0);
        packet
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_buffer_is_kept_among_small_packets_and_freed_behind_many() {
        const LARGE: usize = 4 * KEEP_LEN;
        let mut scratch = Scratch::NEW;
        assert_eq!(scratch.room(LARGE).len(), LARGE);
        let at = scratch.large.as_ptr();
        for small in [64, KEEP_LEN, 1] {
            assert_eq!(scratch.room(small).len(), small);
        }
        assert_eq!((scratch.room(LARGE).as_ptr(), scratch.small.capacity()), (at, KEEP_LEN));
        for _ in 1..SMALL_MAX {
            scratch.room(64);
        }
        assert_eq!(scratch.large.as_ptr(), at);
        scratch.room(64);
        assert_eq!(scratch.large.capacity(), 0);
        assert_eq!(scratch.room(LARGE + 1).len(), LARGE + 1);
    }
}
