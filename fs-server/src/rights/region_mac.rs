//! The MACs of region keys: who made a key, and of what.
//!
//! A region key (`RegionKey`) has a MAC of 128 bits under the pool's secret over all of its fields and the inode (SipHash-2-4 with 128 bits). So a key
//! cannot be made or changed by anybody else, a later life of the server knows it, and the server has to remember nothing for that. That a key is right
//! does not mean that it opens anything: its binding must be there, too.

use crate::meta::HashKey;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rpc::RegionKey;
use siphasher::sip128::{Hasher128, SipHasher24};
use std::hash::Hasher;

/// Makes and checks the MACs of one pool.
pub struct RegionMacs {
    key: HashKey,
    pool: [u8; 16],
}

impl RegionMacs {
    /// Of the pool with this secret and this UUID.
    pub fn new(key: HashKey, pool: [u8; 16]) -> Self {
        Self { key, pool }
    }

    /// The key with the pool's UUID and its MAC.
    pub fn sign(&self, key: RegionKey, ino: InodeNo) -> RegionKey {
        let key = RegionKey { pool: self.pool, ..key };
        let mut hasher = SipHasher24::new_with_key(&self.key.0);
        // Other uses of the secret hash other beginnings.
        hasher.write(b"region\0\0");
        hasher.write(&key.signed_bytes());
        hasher.write(&ino.0.to_le_bytes());
        RegionKey { mac: hasher.finish128().as_bytes(), ..key }
    }

    /// Whether this key was made here for the inode.
    pub fn is_good(&self, key: &RegionKey, ino: InodeNo) -> bool {
        let good = self.sign(*key, ino);
        // A single comparison of wide words takes the same time wherever they differ.
        good.pool == key.pool && u128::from_le_bytes(good.mac) ^ u128::from_le_bytes(key.mac) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuttlefs_common::ids::ClientId;
    use cuttlefs_common::rpc::{REGION_KEY_LEN, Rights};

    #[test]
    fn a_changed_bit_is_noticed() {
        let macs = RegionMacs::new(HashKey(*b"sixteen byte key"), [7; 16]);
        let ino = InodeNo(9);
        let key = RegionKey {
            pool: [0; 16],
            client: ClientId(7),
            number: 8,
            offset: 4096,
            len: 8192,
            rights: Rights { read: true, write: false },
            expiry_ms: None,
            mac: [0; 16],
        };
        let key = macs.sign(key, ino);
        assert_eq!(key.mac, MAC, "a later release knows the keys of this one");
        assert!(macs.is_good(&key, ino));
        assert!(!macs.is_good(&key, InodeNo(10)), "another file");
        let other = RegionMacs::new(HashKey(*b"another byte key"), [7; 16]);
        assert!(!other.is_good(&key, ino));
        let bytes = key.to_bytes();
        for bit in 0..REGION_KEY_LEN * 8 {
            let mut changed = bytes;
            changed[bit / 8] ^= 1 << (bit % 8);
            if let Ok(changed) = RegionKey::parse(&changed) {
                assert!(!macs.is_good(&changed, ino), "bit {bit}");
            }
        }
    }

    /// Computed by another implementation.
    const MAC: [u8; 16] =
        [0xd7, 0xcb, 0x3b, 0x30, 0x6d, 0xee, 0x34, 0xc5, 0x92, 0xeb, 0x2e, 0x81, 0x58, 0xcb, 0xc8, 0x1a];
}
