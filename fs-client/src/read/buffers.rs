//! Buffers for file bytes on their way to the kernel. There are as many as reads at a time. The buffer that was given back last is lent first, so
//! that a single reader uses a single buffer.

use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// The most buffers that are kept. Each read under way has one, so there are at most as many as threads.
const KEPT_MAX: usize = 64;

/// The buffers; see the module.
#[derive(Debug, Default)]
pub(crate) struct ReadBuffers {
    free: Mutex<Vec<Vec<u8>>>,
    /// Whether a buffer was lent since the last check. Relaxed: a hint.
    used: AtomicBool,
}

impl ReadBuffers {
    /// Lends a buffer of this length to `use_it`. Its contents are those of any earlier read.
    pub(crate) fn lend<T>(&self, len: usize, use_it: impl FnOnce(&mut [u8]) -> T) -> T {
        self.used.store(true, Ordering::Relaxed);
        let mut buffer = self.free.lock().pop().unwrap_or_default();
        if buffer.len() < len {
            // A new allocation is resident only where it is used.
            buffer = vec![0; len];
        }
        let used = use_it(&mut buffer[..len]);
        let mut free = self.free.lock();
        if free.len() < KEPT_MAX {
            free.push(buffer);
        }
        used
    }

    /// Whether a buffer was lent since the last call.
    pub(crate) fn take_used(&self) -> bool {
        self.used.swap(false, Ordering::Relaxed)
    }

    /// Frees the buffers that are not lent.
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
