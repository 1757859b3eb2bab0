//! Keys of the metadata records. All numbers are big-endian, so that key order is number order and a range of
//! numbers is one scan.
//!
//! | key | record |
//! |-----|--------|
//! | `I ino:8` | inode |
//! | `D parent:8 hash:7` | directory bucket: the entries whose names have that hash |
//! | `X ino:8 file_page:8` | extent |
//! | `P ino:8 file_page:8` | image of a page whose bytes are not in their place yet (`images`) |
//! | `A ino:8 length:1 name piece:1` | piece of an extended attribute |
//! | `S ino:8` | symlink target |
//! | `O ino:8` | orphan |
//! | `T ino:8` | a cut that is not finished: the pages from its page on are being removed |
//! | `W zone:8` | pages of this zone of the pool may be overwritten in place (`marks`); nothing in it |
//! | `C client:16` | a client that is remembered: its peer, and whether it has a session |
//! | `C client:16 slot:2` | the slot's last request that changed something |
//! | `M name` | superblock, counters, position of the scrub |
//!
//! There is no record of free space: pages that no extent has are free (`page_map`).

use cuttlefs_common::ids::{ClientId, FilePage, InodeNo, SlotIndex};

/// First byte of each kind of key.
pub(super) mod tag {
    #![allow(missing_docs)]
    pub(crate) const XATTR: u8 = b'A';
    pub(crate) const CLIENT: u8 = b'C';
    pub(crate) const ENTRY: u8 = b'D';
    pub(crate) const INODE: u8 = b'I';
    pub(crate) const ORPHAN: u8 = b'O';
    pub(crate) const IMAGE: u8 = b'P';
    pub(crate) const SYMLINK: u8 = b'S';
    pub(crate) const CUT: u8 = b'T';
    pub(crate) const MARK: u8 = b'W';
    pub(crate) const EXTENT: u8 = b'X';
}

/// Key of the superblock. All `M` keys are given in full here.
pub(super) const SUPERBLOCK: &[u8] = b"Msuper";
/// The first inode number that was not reserved yet.
pub(super) const NEXT_INO: &[u8] = b"Mnext_ino";
/// How many times the store was opened.
pub(super) const STARTS: &[u8] = b"Mstarts";
/// The epoch of a server that stopped with nothing left to write back. The next server removes it.
pub(super) const CLEAN: &[u8] = b"Mclean";
/// The state of the scrub.
pub(super) const SCRUB: &[u8] = b"Mscrub";

fn tagged(tag: u8, ino: InodeNo) -> [u8; 9] {
    let mut key = [tag; 9];
    key[1..].copy_from_slice(&ino.0.to_be_bytes());
    key
}

/// Key of an inode.
pub(super) fn inode(ino: InodeNo) -> [u8; 9] {
    tagged(tag::INODE, ino)
}

/// Key of a zone's mark.
pub(super) fn mark(zone: u64) -> [u8; 9] {
    tagged(tag::MARK, InodeNo(zone))
}

/// Zone of a `W` key.
pub(super) fn parse_mark(key: &[u8]) -> Option<u64> {
    parse_u64(key.get(1..)?)
}

/// Key of a symlink's target.
pub(super) fn symlink(ino: InodeNo) -> [u8; 9] {
    tagged(tag::SYMLINK, ino)
}

/// Key of a cut that is not finished.
pub(super) fn cut(ino: InodeNo) -> [u8; 9] {
    tagged(tag::CUT, ino)
}

/// Key of an orphan.
pub(super) fn orphan(ino: InodeNo) -> [u8; 9] {
    tagged(tag::ORPHAN, ino)
}

/// Key of a directory bucket; `hash` has 56 bits.
pub(super) fn bucket(parent: InodeNo, hash: u64) -> [u8; 16] {
    let mut key = [0; 16];
    key[..9].copy_from_slice(&tagged(tag::ENTRY, parent));
    key[9..].copy_from_slice(&hash.to_be_bytes()[1..]);
    key
}

fn paged(tag: u8, ino: InodeNo, page: FilePage) -> [u8; 17] {
    let mut key = [0; 17];
    key[..9].copy_from_slice(&tagged(tag, ino));
    key[9..].copy_from_slice(&page.0.to_be_bytes());
    key
}

/// Key of an extent.
pub(super) fn extent(ino: InodeNo, page: FilePage) -> [u8; 17] {
    paged(tag::EXTENT, ino, page)
}

/// Key of the image of a page.
pub(super) fn image(ino: InodeNo, page: FilePage) -> [u8; 17] {
    paged(tag::IMAGE, ino, page)
}

/// Keys of the images of the pages `[first, end)` of a file. No file has a page `u64::MAX`.
pub(super) fn images(ino: InodeNo, first: FilePage, end: FilePage) -> KeyRange {
    KeyRange { from: image(ino, first).to_vec(), to: image(ino, end).to_vec() }
}

/// Key of a piece of an extended attribute. The name's length comes first, so that the pieces of no name are among another's. Names have at most 255
/// bytes.
pub(super) fn xattr(ino: InodeNo, name: &[u8], piece: u8) -> Vec<u8> {
    [&tagged(tag::XATTR, ino)[..], &[name.len() as u8], name, &[piece]].concat()
}

/// Keys of all pieces of one extended attribute.
pub(super) fn all_of_xattr(ino: InodeNo, name: &[u8]) -> KeyRange {
    let mut first = xattr(ino, name, 0);
    first.pop();
    prefixed(&first)
}

/// Key of a client.
pub(super) fn client(client: ClientId) -> [u8; 17] {
    let mut key = [tag::CLIENT; 17];
    key[1..].copy_from_slice(&client.0.to_be_bytes());
    key
}

/// Key of a slot of a client.
pub(super) fn client_slot(client: ClientId, slot: SlotIndex) -> [u8; 19] {
    let mut key = [tag::CLIENT; 19];
    key[..17].copy_from_slice(&self::client(client));
    key[17..].copy_from_slice(&slot.0.to_be_bytes());
    key
}

/// Whether a key is a slot's.
pub(super) fn is_slot(key: &[u8]) -> bool {
    key.len() == 19 && key[0] == tag::CLIENT
}

/// Keys of a client and its slots.
pub(super) fn all_of_client(client: ClientId) -> KeyRange {
    prefixed(&self::client(client))
}

/// A range of keys: `from <= key < to`.
pub struct KeyRange {
    /// The first key.
    pub from: Vec<u8>,
    /// The first key behind the range.
    pub to: Vec<u8>,
}

fn prefixed(prefix: &[u8]) -> KeyRange {
    // The tags are ASCII, so the carry ends at the first byte at the latest.
    let mut to = prefix.to_vec();
    while let Some(last) = to.pop() {
        if last < u8::MAX {
            to.push(last + 1);
            break;
        }
    }
    KeyRange { from: prefix.to_vec(), to }
}

/// All keys of one kind.
pub(super) fn all(tag: u8) -> KeyRange {
    prefixed(&[tag])
}

/// All keys of one kind that belong to one inode.
pub(super) fn all_of(tag: u8, ino: InodeNo) -> KeyRange {
    prefixed(&tagged(tag, ino))
}

fn parse_u64(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(bytes.try_into().ok()?))
}

/// The inode number of an `I`, `O`, `S` or `T` key.
pub(super) fn parse_ino(key: &[u8]) -> Option<InodeNo> {
    Some(InodeNo(parse_u64(key.get(1..)?)?))
}

/// Parent and hash of a `D` key.
pub(super) fn parse_bucket(key: &[u8]) -> Option<(InodeNo, u64)> {
    let hash: [u8; 7] = key.get(9..)?.try_into().ok()?;
    let mut wide = [0; 8];
    wide[1..].copy_from_slice(&hash);
    Some((InodeNo(parse_u64(key.get(1..9)?)?), u64::from_be_bytes(wide)))
}

/// Inode and page of an `X` or `P` key.
pub(super) fn parse_paged(key: &[u8]) -> Option<(InodeNo, FilePage)> {
    Some((InodeNo(parse_u64(key.get(1..9)?)?), FilePage(parse_u64(key.get(9..)?)?)))
}

/// Inode, name and piece of an `A` key.
pub(super) fn parse_xattr(key: &[u8]) -> Option<(InodeNo, &[u8], u8)> {
    let (len, rest) = key.get(9..)?.split_first()?;
    let (piece, name) = rest.split_last()?;
    (name.len() == usize::from(*len)).then_some((InodeNo(parse_u64(key.get(1..9)?)?), name, *piece))
}

/// Client of a `C` key.
pub(super) fn parse_client(key: &[u8]) -> Option<ClientId> {
    Some(ClientId(u128::from_be_bytes(key.get(1..17)?.try_into().ok()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bytes() {
        let ino = InodeNo(0x0102_0304_0506_0708);
        assert_eq!(&inode(ino), b"I\x01\x02\x03\x04\x05\x06\x07\x08");
        assert_eq!(&symlink(ino), b"S\x01\x02\x03\x04\x05\x06\x07\x08");
        assert_eq!(&orphan(ino), b"O\x01\x02\x03\x04\x05\x06\x07\x08");
        assert_eq!(&cut(ino), b"T\x01\x02\x03\x04\x05\x06\x07\x08");
        assert_eq!(
            &bucket(ino, 0x00a1_a2a3_a4a5_a6a7),
            b"D\x01\x02\x03\x04\x05\x06\x07\x08\xa1\xa2\xa3\xa4\xa5\xa6\xa7"
        );
        assert_eq!(
            &extent(ino, FilePage(0x1112_1314_1516_1718)),
            b"X\x01\x02\x03\x04\x05\x06\x07\x08\x11\x12\x13\x14\x15\x16\x17\x18"
        );
        assert_eq!(
            &image(ino, FilePage(0x1112_1314_1516_1718)),
            b"P\x01\x02\x03\x04\x05\x06\x07\x08\x11\x12\x13\x14\x15\x16\x17\x18"
        );
        assert_eq!(xattr(ino, b"user.a", 2), b"A\x01\x02\x03\x04\x05\x06\x07\x08\x06user.a\x02");
        assert_eq!(
            &client(ClientId(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10)),
            b"C\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f\x10"
        );
        assert_eq!(
            &client_slot(ClientId(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10), SlotIndex(0x2122)),
            b"C\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f\x10\x21\x22"
        );
        assert_eq!(
            [SUPERBLOCK, NEXT_INO, STARTS, CLEAN, SCRUB],
            [&b"Msuper"[..], b"Mnext_ino", b"Mstarts", b"Mclean", b"Mscrub"]
        );
    }

    #[test]
    fn keys_parse_back() {
        let ino = InodeNo(77);
        assert_eq!(parse_ino(&inode(ino)), Some(ino));
        assert_eq!(parse_bucket(&bucket(ino, (1 << 56) - 1)), Some((ino, (1 << 56) - 1)));
        assert_eq!(parse_paged(&extent(ino, FilePage(9))), Some((ino, FilePage(9))));
        assert_eq!(parse_xattr(&xattr(ino, b"n", 3)), Some((ino, &b"n"[..], 3)));
        assert_eq!(parse_client(&client(ClientId(5))), Some(ClientId(5)));
        assert_eq!(parse_client(&client_slot(ClientId(5), SlotIndex(6))), Some(ClientId(5)));
        assert_eq!(all_of_client(ClientId(u128::MAX)).to, b"D");
        assert_eq!(parse_ino(b"I123"), None);
        assert_eq!(parse_bucket(b"D"), None);
        assert_eq!(parse_paged(b""), None);
    }

    #[test]
    fn ranges_cover_their_prefix_and_no_more() {
        for ino in [0, 1, 0xff, 0xffff, u64::MAX - 1, u64::MAX].map(InodeNo) {
            let KeyRange { from, to } = all_of(tag::EXTENT, ino);
            assert!(from.as_slice() <= &extent(ino, FilePage(0))[..]);
            assert!(&extent(ino, FilePage(u64::MAX))[..] < to.as_slice());
            if ino.0 < u64::MAX {
                assert!(to.as_slice() <= &extent(InodeNo(ino.0 + 1), FilePage(0))[..]);
            }
        }
        assert_eq!(all(tag::INODE).to, b"J");
    }
}
