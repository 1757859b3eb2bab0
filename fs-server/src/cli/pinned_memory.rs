//! The memory that a server over RDMA hardware pins, beside the limit (`ulimit -l`) that it was started with.
//!
//! The kernel adds up what RNICs and io_uring pin for a process. A start that goes beyond the limit fails somewhere in the middle, so the sum is
//! told before. docs/rdma.md has it as a table.

use crate::files::file_table_bytes;
use crate::rpc::WORKER_REGISTERED_BYTES;
use cuttlefs_common::rdma::Devices;
use cuttlefs_common::size::ByteSize;

/// Bytes of a page's entry in the residency table.
const ENTRY_BYTES: u64 = 8;

/// The figures that decide how much is pinned.
pub(super) struct PinnedMemory {
    /// Bytes of frames.
    pub(super) memory: u64,
    /// Pages of the pool.
    pub(super) pool_pages: u64,
    /// Threads that run requests.
    pub(super) worker_threads: usize,
    /// Whether frames and tables are registered.
    pub(super) trust_clients: bool,
}

impl PinnedMemory {
    /// What is pinned at the start, with so many RNICs that are hardware. Connections come on top.
    fn bytes(&self, rnics: usize) -> u64 {
        let (threads, rnics) = (self.worker_threads as u64, rnics as u64);
        let of_uring = self.memory.saturating_mul(threads);
        let shown = self
            .memory
            .saturating_add(self.pool_pages.saturating_mul(ENTRY_BYTES))
            .saturating_add(file_table_bytes());
        let shown = if self.trust_clients { shown } else { 0 };
        let of_rnic = shown.saturating_add(threads.saturating_mul(WORKER_REGISTERED_BYTES));
        of_uring.saturating_add(of_rnic.saturating_mul(rnics))
    }

    /// A warning if the devices are hardware and the limit is less.
    pub(super) fn beyond(&self, devices: &Devices) -> Option<String> {
        let hardware: Vec<_> = devices.all().iter().filter_map(|device| device.hardware()).collect();
        let bound = hardware.iter().find_map(|figures| figures.pinned_bound)?;
        self.warning(hardware.len(), bound)
    }

    fn warning(&self, rnics: usize, bound: u64) -> Option<String> {
        let wanted = self.bytes(rnics);
        (wanted > bound).then(|| {
            let Self { memory, worker_threads, .. } = self;
            let shown = if self.trust_clients { "frames and tables for trusted clients, " } else { "" };
            format!(
                "the limit of pinned memory is {}, and this server wants {}: frames (--memory {}) for io_uring of each of {worker_threads} worker \
                 threads, {shown}and {} for each of them; keys and connections come on top. Raise it (ulimit -l, LimitMEMLOCK= of the service), or take less \
                 --memory (docs/rdma.md)",
                ByteSize(bound),
                ByteSize(wanted),
                ByteSize(*memory),
                ByteSize(WORKER_REGISTERED_BYTES),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_is_that_of_the_table_in_the_document() {
        let server =
            PinnedMemory { memory: 64 << 20, pool_pages: 65_536, worker_threads: 2, trust_clients: false };
        assert_eq!(server.bytes(1), (128 << 20) + 2 * WORKER_REGISTERED_BYTES);
        assert_eq!(server.bytes(2), (128 << 20) + 4 * WORKER_REGISTERED_BYTES);
        let trusting = PinnedMemory { trust_clients: true, ..server };
        assert_eq!(
            trusting.bytes(1),
            (192 << 20) + 65_536 * 8 + file_table_bytes() + 2 * WORKER_REGISTERED_BYTES
        );
        let warning = trusting.warning(1, 96 << 20).expect("too little");
        for words in ["is 96M", "--memory 64M", "2 worker threads", "trusted clients"] {
            assert!(warning.contains(words), "{warning}");
        }
        assert_eq!(trusting.warning(1, 1 << 30), None);
    }
}
