//! A key-value table in one file, by the native API: one process writes, any number read, on any machine. Slots of 256 bytes never cross a page, and a page
//! is read either before or after a write: so readers need no lock, and a lookup of a resident page is one one-sided read.
//!
//! ```text
//! cargo run --release -p cuttlefs-client --example native_table -- unix:///run/cuttlefsd/b.sock put apple red
//! cargo run --release -p cuttlefs-client --example native_table -- unix:///run/cuttlefsd/b.sock get apple
//! ```
//! Over `tcp://` the key's file is named by `CUTTLEFS_KEY`.

use cuttlefs_client::native::{ConnectOptions, File, NativeError, OpenOptions, Session, Trust};
use std::error::Error;

const SLOT: usize = 256;
const SLOTS: u64 = 1 << 16;
/// Slots that are looked at for one key.
const PROBES: u64 = 64;
/// A slot begins with the lengths of key and value, a byte each. A key has at least a byte.
const ROOM: usize = SLOT - 2;

struct Table(File);

/// Where a key's slot is, or a free one, and the value if the key is there.
struct Found {
    place: u64,
    value: Option<Vec<u8>>,
}

impl Table {
    fn open(session: &Session) -> Result<Self, NativeError> {
        let file = session.open("table", OpenOptions::CREATE)?;
        if file.is_empty()? {
            // A hole: it takes no space.
            file.set_len(SLOTS * SLOT as u64)?;
        }
        Ok(Self(file))
    }

    /// `None`: there is no free slot for the key.
    fn find(&self, key: &[u8]) -> Result<Option<Found>, NativeError> {
        // FNV-1a.
        let hash = key.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
        for probe in 0..PROBES {
            let place = hash.wrapping_add(probe) % SLOTS * SLOT as u64;
            let mut slot = [0; SLOT];
            self.0.read_at(place, &mut slot)?;
            let (key_len, value_len) = (usize::from(slot[0]), usize::from(slot[1]));
            match slot[2..].split_at_checked(key_len) {
                Some(([], _)) => return Ok(Some(Found { place, value: None })),
                Some((found, rest)) if found == key => {
                    let value = rest.get(..value_len).map(<[u8]>::to_vec);
                    return Ok(Some(Found { place, value }));
                }
                _ => {}
            }
        }
        Ok(None)
    }

    fn put(&self, key: &[u8], value: &[u8]) -> Result<(), Box<dyn Error>> {
        if key.is_empty() || key.len() + value.len() > ROOM {
            return Err(format!("a key has at least a byte, and with its value at most {ROOM}").into());
        }
        let Found { place, .. } = self.find(key)?.ok_or("the table is full there")?;
        let mut slot = vec![key.len() as u8, value.len() as u8];
        slot.extend_from_slice(key);
        slot.extend_from_slice(value);
        slot.resize(SLOT, 0);
        self.0.write_at(place, &slot)?;
        Ok(self.0.sync()?)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let trust = Trust { key: std::env::var_os("CUTTLEFS_KEY").map(Into::into), server_user: None };
    let connect = |url: &str| Session::connect(url, ConnectOptions { trust, ..ConnectOptions::default() });
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [url, "put", key, value] => Table::open(&connect(url)?)?.put(key.as_bytes(), value.as_bytes()),
        [url, "get", key] => {
            let found = Table::open(&connect(url)?)?.find(key.as_bytes())?;
            let value = found.and_then(|found| found.value).ok_or("there is no such key")?;
            println!("{}", String::from_utf8_lossy(&value));
            Ok(())
        }
        _ => Err("usage: native_table URL put KEY VALUE | URL get KEY".into()),
    }
}
