//! Signatures of other contents of a file or device that would become part of a pool.
//!
//! Formatting destroys all contents. This table has the signatures of usual contents of disks, and need not be complete. `--force` is needed if a
//! disk has one of these contents, and not for an empty disk.

/// Bytes at the start that must be read.
pub const HEAD_BYTES: usize = 128 << 10;

/// Offset and bytes of a signature, and the name of the contents.
const SIGNATURES: &[(usize, &[u8], &str)] = &[
    (0, b"cuttlefs", "a cuttlefs pool"),
    (1080, &[0x53, 0xef], "an ext2, ext3 or ext4 file system"),
    (0, b"XFSB", "an XFS file system"),
    (0x10040, b"_BHRfS_M", "a btrfs file system"),
    (1024, &[0x10, 0x20, 0xf5, 0xf2], "an F2FS file system"),
    (0, b"hsqs", "a squashfs file system"),
    (1024, &[0xe2, 0xe1, 0xf5, 0xe0], "an EROFS file system"),
    (4096, &[0xc6, 0x85, 0x73, 0xf6], "a bcachefs file system or a bcache device"),
    (4120, &[0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca], "a bcache device"),
    (3, b"NTFS    ", "an NTFS file system"),
    (3, b"EXFAT   ", "an exFAT file system"),
    (0x36, b"FAT", "a FAT file system"),
    (0x52, b"FAT32", "a FAT file system"),
    (0x8001, b"CD001", "an ISO 9660 file system"),
    (4086, b"SWAPSPACE2", "swap space"),
    (0, b"LUKS\xba\xbe", "a LUKS volume"),
    (512, b"LABELONE", "an LVM physical volume"),
    (0, &[0xfc, 0x4e, 0x2b, 0xa9], "a member of a RAID array"),
    (4096, &[0xfc, 0x4e, 0x2b, 0xa9], "a member of a RAID array"),
    (512, b"EFI PART", "a GPT partition table"),
    (4096, b"EFI PART", "a GPT partition table"),
    (0, b"QFI\xfb", "a qcow2 image"),
    (0, b"bluestore block device", "a Ceph OSD"),
    // The last entry, because many of the contents above leave these bytes in place.
    (510, &[0x55, 0xaa], "a partition table or boot sector"),
];

/// Names what the first bytes of a file or device belong to.
pub fn signature_of(head: &[u8]) -> Option<&'static str> {
    let found = SIGNATURES
        .iter()
        .find(|(offset, mark, _)| head.get(*offset..).is_some_and(|tail| tail.starts_with(mark)));
    found.map(|(_, _, what)| *what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_signature_is_found_and_nothing_in_zeros() {
        assert_eq!(signature_of(&[0; HEAD_BYTES]), None);
        assert_eq!(signature_of(&[]), None);
        for (offset, mark, what) in SIGNATURES {
            let mut head = vec![0; HEAD_BYTES];
            head[*offset..offset + mark.len()].copy_from_slice(mark);
            let found = signature_of(&head).expect("a signature");
            // The signature of one is the beginning of another's.
            assert!(found == *what || found.contains("bcache"), "{found} for {what}");
            assert_eq!(signature_of(&head[..offset + mark.len() - 1]), None);
        }
    }
}
