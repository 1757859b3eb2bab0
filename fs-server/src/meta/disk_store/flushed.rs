//! The number of the last durable batch, in a file beside log and checkpoint.
//!
//! A bit that rots at the log's end looks like a torn end, and one in the B-tree's header can make an older root the current one. So the number of
//! the last batch that a sync of the log or a checkpoint covered is also kept in a file of its own: a store that has less than that at a start is
//! damaged.
//!
//! ```text
//! meta/flushed:  [ magic "CFfl" | crc32c u32 of the number | number u64 ]     little-endian
//! ```
//!
//! The file is written after such a sync and never synced. After a power loss it may have an older number, which is harmless.
//!
//! # Failure
//! A damaged file is reported in the messages, and no number is known then until the next sync.

use super::space::Space;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

const NAME: &str = "flushed";
const MAGIC: [u8; 4] = *b"CFfl";
const LEN: usize = 16;

/// The opened file.
#[derive(Debug)]
pub(super) struct Flushed {
    file: File,
    found: u64,
}

fn encode(batch: u64) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    bytes[..4].copy_from_slice(&MAGIC);
    bytes[8..].copy_from_slice(&batch.to_le_bytes());
    let crc = crc32c::crc32c(&bytes[8..]);
    bytes[4..8].copy_from_slice(&crc.to_le_bytes());
    bytes
}

impl Flushed {
    /// Opens the file, or makes it if it does not exist.
    ///
    /// # Errors
    /// [`io::Error`].
    pub(super) fn open(directory: &Path) -> io::Result<Self> {
        let path = directory.join(NAME);
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path)?;
        let mut bytes = [0; LEN];
        let found = match file.read_exact_at(&mut bytes, 0) {
            Ok(()) => {
                let batch = u64::from_le_bytes(bytes[8..].try_into().expect("eight bytes"));
                if bytes == encode(batch) {
                    batch
                } else {
                    tracing::error!(path = %path.display(), "the note of what is durable is damaged; meta/ may be, too");
                    0
                }
            }
            // The file is new, or a power loss took its contents.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => 0,
            Err(error) => return Err(error),
        };
        Ok(Self { file, found })
    }

    /// The last batch that was durable when the file was opened; 0 if that is not known.
    pub(super) fn batch(&self) -> u64 {
        self.found
    }

    /// Notes that all batches up to this one are durable. Without space for that an older number stays.
    ///
    /// # Errors
    /// [`io::Error`].
    pub(super) fn note(&self, batch: u64, space: &Space) -> io::Result<()> {
        match space.write_all_at(&self.file, &encode(batch), 0) {
            Err(error) if error.kind() == io::ErrorKind::StorageFull => Ok(()),
            noted => noted,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bytes_and_damage() {
        let directory = tempfile::tempdir().expect("directory");
        let flushed = Flushed::open(directory.path()).expect("open");
        let space = Space::open(directory.path(), 0).expect("space");
        assert_eq!(flushed.batch(), 0);
        flushed.note(0x0102, &space).expect("write");
        let path = directory.path().join(NAME);
        let bytes = std::fs::read(&path).expect("read");
        assert_eq!(bytes[..4], *b"CFfl");
        assert_eq!(bytes[4..8], crc32c::crc32c(&[2, 1, 0, 0, 0, 0, 0, 0]).to_le_bytes());
        assert_eq!(bytes[8..], [2, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(Flushed::open(directory.path()).expect("open").batch(), 0x0102);
        for bit in 0..LEN * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            std::fs::write(&path, &flipped).expect("write");
            assert_eq!(Flushed::open(directory.path()).expect("open").batch(), 0, "bit {bit}");
        }
        std::fs::write(&path, b"CFfl").expect("write");
        assert_eq!(Flushed::open(directory.path()).expect("open").batch(), 0);
    }
}
