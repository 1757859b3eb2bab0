//! Intents as they lie on disk: one bit a region, in sectors that are written whole or not at all.
//!
//! ```text
//! offset  bytes  field, of each 512-byte sector
//!      0      4  magic "CFwi"
//!      4      4  number of the sector among those of the data file: 0, 1, 2, ...
//!      8      4  reserved, zero
//!     12    496  a bit a region, the first region's lowest
//!    508      4  CRC32C of everything before
//! ```
//! Numbers are little-endian. There are two copies, so that one that rotted costs nothing; both are written before either
//! is relied upon, and what is set in either is set.

use cuttlefs_common::ids::PAGE_SIZE;

/// What a device writes whole or not at all.
pub const SECTOR_BYTES: usize = 512;
/// Sectors of a block.
pub const SECTORS_PER_BLOCK: usize = PAGE_SIZE / SECTOR_BYTES;
const MAGIC: [u8; 4] = *b"CFwi";
const BITS_AT: usize = 12;
const CRC_AT: usize = SECTOR_BYTES - 4;
/// Bytes of bits in a sector.
const BIT_BYTES: usize = CRC_AT - BITS_AT;
/// Regions one sector is about.
pub const REGIONS_PER_SECTOR: usize = BIT_BYTES * 8;

const _: () = assert!(BIT_BYTES == 496 && SECTORS_PER_BLOCK == 8);

/// The bits of one block, a bit a region.
pub type BlockBits = [[u8; BIT_BYTES]; SECTORS_PER_BLOCK];

/// No intents.
pub const NO_BITS: BlockBits = [[0; BIT_BYTES]; SECTORS_PER_BLOCK];

/// Whether a region's bit is set; `index` counts from the block's first region.
pub fn bit(bits: &BlockBits, index: usize) -> bool {
    let (sector, index) = (index / REGIONS_PER_SECTOR, index % REGIONS_PER_SECTOR);
    bits[sector][index / 8] & (1 << (index % 8)) != 0
}

/// Sets or clears a region's bit.
pub fn set_bit(bits: &mut BlockBits, index: usize, value: bool) {
    let (sector, index) = (index / REGIONS_PER_SECTOR, index % REGIONS_PER_SECTOR);
    let byte = &mut bits[sector][index / 8];
    let mask = 1 << (index % 8);
    *byte = if value { *byte | mask } else { *byte & !mask };
}

/// The bytes of a block; `block` is its number among those of its data file.
pub fn encode(bits: &BlockBits, block: u64, out: &mut [u8]) {
    for (index, (bits, sector)) in bits.iter().zip(out.chunks_exact_mut(SECTOR_BYTES)).enumerate() {
        sector[..4].copy_from_slice(&MAGIC);
        sector[4..8].copy_from_slice(&sector_number(block, index).to_le_bytes());
        sector[8..12].fill(0);
        sector[BITS_AT..CRC_AT].copy_from_slice(bits);
        let crc = crc32c::crc32c(&sector[..CRC_AT]);
        sector[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
    }
}

fn sector_number(block: u64, index: usize) -> u32 {
    // A data file has 2^51 pages at most, so 2^28 sectors.
    (block * SECTORS_PER_BLOCK as u64) as u32 + index as u32
}

/// The bits of one sector, if it is whole.
fn parse(sector: &[u8], number: u32) -> Option<[u8; BIT_BYTES]> {
    let whole = sector[..4] == MAGIC
        && sector[4..8] == number.to_le_bytes()
        && sector[8..12] == [0; 4]
        && sector[CRC_AT..] == crc32c::crc32c(&sector[..CRC_AT]).to_le_bytes();
    if whole { sector[BITS_AT..CRC_AT].try_into().ok() } else { None }
}

/// What two copies of a block say together, and how many sectors of them are damaged; `None` if a sector is damaged in
/// both. A copy that could not be read is `None`.
pub fn join(copies: [Option<&[u8]>; 2], block: u64) -> Option<(BlockBits, usize)> {
    let mut bits = NO_BITS;
    let mut damaged = 0;
    for (index, joined) in bits.iter_mut().enumerate() {
        let at = index * SECTOR_BYTES;
        let found = copies.map(|copy| parse(&copy?[at..at + SECTOR_BYTES], sector_number(block, index)));
        damaged += found.iter().filter(|found| found.is_none()).count();
        *joined = match found {
            // A power loss may leave one copy older; then either is right, and more marks are harmless.
            [Some(a), Some(b)] => std::array::from_fn(|byte| a[byte] | b[byte]),
            [Some(one), None] | [None, Some(one)] => one,
            [None, None] => return None,
        };
    }
    Some((bits, damaged))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(set: &[usize], block: u64) -> Vec<u8> {
        let mut bits = NO_BITS;
        set.iter().for_each(|index| set_bit(&mut bits, *index, true));
        let mut out = vec![0xEE; PAGE_SIZE];
        encode(&bits, block, &mut out);
        out
    }

    #[test]
    fn golden_bytes() {
        let block = bytes(&[0, 9, REGIONS_PER_SECTOR + 3], 2);
        let sector = &block[..SECTOR_BYTES];
        assert_eq!(sector[..16], [b'C', b'F', b'w', b'i', 16, 0, 0, 0, 0, 0, 0, 0, 1, 2, 0, 0]);
        assert!(sector[14..CRC_AT].iter().all(|byte| *byte == 0));
        assert_eq!(sector[CRC_AT..], GOLDEN_CRC32C.to_le_bytes());
        assert_eq!(block[SECTOR_BYTES + 4], 17);
        assert_eq!(block[SECTOR_BYTES + BITS_AT], 8);
    }

    /// Computed bit by bit outside of this program.
    const GOLDEN_CRC32C: u32 = 0xB22E57B4;

    #[test]
    fn either_copy_will_do_and_both_are_joined() {
        let (a, b) = (bytes(&[1, 4000], 0), bytes(&[2], 0));
        let (bits, damaged) = join([Some(&a), Some(&b)], 0).expect("whole");
        assert_eq!(damaged, 0);
        let set: Vec<usize> =
            (0..SECTORS_PER_BLOCK * REGIONS_PER_SECTOR).filter(|i| bit(&bits, *i)).collect();
        assert_eq!(set, [1, 2, 4000]);
        assert_eq!(
            join([None, Some(&b)], 0).map(|(bits, damaged)| (bit(&bits, 2), damaged)),
            Some((true, 8))
        );
        assert_eq!(join([None, None], 0), None);
        assert!(join([Some(&a), Some(&b)], 1).is_none(), "another block's");
    }

    #[test]
    fn any_flipped_bit_is_seen() {
        let whole = bytes(&[5], 0);
        for at in 0..SECTOR_BYTES * 8 {
            let mut flipped = whole.clone();
            flipped[at / 8] ^= 1 << (at % 8);
            let (bits, damaged) = join([Some(&flipped), Some(&whole)], 0).expect("the other copy is whole");
            assert_eq!((damaged, bit(&bits, 5)), (1, true), "bit {at}");
            assert!(join([Some(&flipped), Some(&flipped)], 0).is_none(), "bit {at}");
        }
    }
}
