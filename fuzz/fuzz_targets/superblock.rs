//! The first bytes of a data file. Whatever parses is the one encoding of what it says, and its place in the pool can be
//! computed with.
#![no_main]

use cuttlefs_server::pool::superblock::{SUPERBLOCK_BYTES, Superblock};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|start: &[u8]| {
    let mut bytes = [0; SUPERBLOCK_BYTES];
    let given = start.len().min(SUPERBLOCK_BYTES);
    bytes[..given].copy_from_slice(&start[..given]);
    parse(&bytes);

    // Again with the right checksum, or hardly an input would get past it.
    let checked = SUPERBLOCK_BYTES - 4;
    let crc = crc32c::crc32c(&bytes[..checked]);
    bytes[checked..].copy_from_slice(&crc.to_le_bytes());
    parse(&bytes);
});

fn parse(bytes: &[u8; SUPERBLOCK_BYTES]) {
    let Ok(superblock) = Superblock::parse(bytes) else {
        return;
    };
    assert_eq!(*superblock.encode(), *bytes);
    assert!(superblock.file_index < superblock.file_count);
    assert!(superblock.file_bytes() <= i64::MAX as u64);
}
