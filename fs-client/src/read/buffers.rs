//! Memory that file bytes are read to on their way to the kernel: as many buffers as there are reads at once, the one that was given
//! back last first, so that one reader uses one.

use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// Buffers kept at most; there is one for each read that is under way, at most a thread's each.
const KEPT_MAX: usize = 64;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct ReadBuffers {
    free: Mutex<Vec<Vec<u8>>>,
    /// One was used since somebody last looked. Relaxed: a hint.
    used: AtomicBool,
}

impl ReadBuffers {
    /// Lends a buffer of this length; what is in it is anybody's.
    pub(crate) fn lend<T>(&self, len: usize, use_it: impl FnOnce(&mut [u8]) -> T) -> T {
        self.used.store(true, Ordering::Relaxed);
        let mut buffer = self.free.lock().pop().unwrap_or_default();
        if buffer.len() < len {
            // Of new memory only what is used is resident.
            buffer = vec![0; len];
        }
        let used = use_it(&mut buffer[..len]);
        let mut free = self.free.lock();
        if free.len() < KEPT_MAX {
            free.push(buffer);
        }
        used
    }

    /// Whether any was lent since this was last asked.
    pub(crate) fn take_used(&self) -> bool {
        self.used.swap(false, Ordering::Relaxed)
    }

    /// Frees those that are not lent.
    pub(crate) fn free(&self) {
        self.free.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_reader_uses_one_buffer_and_it_is_freed() {
        let buffers = ReadBuffers::default();
        for len in [10, 100_000, 10] {
            buffers.lend(len, |buffer| assert_eq!(buffer.len(), len));
        }
        assert_eq!(buffers.free.lock().len(), 1);
        buffers.lend(1, |_| buffers.lend(1, |_| ()));
        assert_eq!(buffers.free.lock().len(), 2);
        assert!(buffers.take_used() && !buffers.take_used());
        buffers.free();
        assert!(buffers.free.lock().is_empty());
    }
}
