//! The client's copy of a file's page bitmap (TeRM section 4.2): one bit for each file page, set if the page needs no
//! SSD.
//!
//! A stale bit costs time, never correctness. Pages beyond the pulled bits count as present: the one-sided read finds
//! out.

use cuttlefs_common::ids::FilePage;

/// The most bytes that are kept for a file: enough for 32 GiB. The rest of larger files is read one-sidedly without a check.
pub(super) const MAX_BITMAP_BYTES: usize = 1 << 20;

/// The bits as they were pulled.
#[derive(Debug, Default)]
pub(super) struct PageBitmap {
    bytes: Vec<u8>,
}

impl PageBitmap {
    /// A pulled bitmap, from page 0 on.
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        Self { bytes }
    }

    /// Whether the bitmap says that the page is on SSD.
    pub(super) fn is_absent(&self, page: FilePage) -> bool {
        let byte = usize::try_from(page.0 / 8).ok().and_then(|index| self.bytes.get(index));
        byte.is_some_and(|byte| byte >> (page.0 % 8) & 1 == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_pages_count_as_present() {
        let bitmap = PageBitmap::new(vec![0b0000_0101]);
        assert!(!bitmap.is_absent(FilePage(0)));
        assert!(bitmap.is_absent(FilePage(1)));
        assert!(!bitmap.is_absent(FilePage(8)));
        assert!(!bitmap.is_absent(FilePage(u64::MAX)));
    }
}
