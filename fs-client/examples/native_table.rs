//! A key-value table in one file, by the native API: any number of processes write and read it, on any machine. Over `tcp://` and `unix://` the server's
//! workers do nothing; over `shm://` and `rdma://`, which have no such verbs, each change is a request.
//!
//! Slots of 256 bytes never cross a page, and a page is read either before or after a change: so readers need no lock, and a lookup of a resident page is
//! one one-sided read. A slot begins with a word that counts: it is odd while somebody changes the slot. A writer takes the slot by a compare-swap
//! of the word, writes the rest, and lets it go by another one, all under a write grant, if there is one. Both are compare-swaps, as a one-sided write whose connection
//! breaks is done again and might then let go what another one has taken meanwhile.
//!
//! ```text
//! cargo run --release -p cuttlefs-client --example native_table -- unix:///run/cuttlefsd/b.sock put apple red
//! cargo run --release -p cuttlefs-client --example native_table -- unix:///run/cuttlefsd/b.sock get apple
//! cargo run --release -p cuttlefs-client --example native_table -- unix:///run/cuttlefsd/b.sock put-many 1000 me
//! ```
//! Over `tcp://` the key's file is named by `CUTTLEFS_KEY`.

use cuttlefs_client::native::{ConnectOptions, File, NativeError, OpenOptions, Session, Trust};
use std::error::Error;
use std::process::ExitCode;
use std::time::{Duration, Instant};

const SLOT: usize = 256;
const SLOTS: u64 = 1 << 12;
/// Slots that are looked at for one key.
const PROBES: u64 = 64;
/// The word, and then the lengths of key and value, a byte each. A key has at least a byte.
const HEAD: usize = 8 + 2;
const ROOM: usize = SLOT - HEAD;
/// A slot that is taken for so long is that of a process that is gone.
const GONE_AFTER: Duration = Duration::from_secs(10);

struct Table(File);

/// A slot as it was read.
struct Slot {
    place: u64,
    word: u64,
    key: Vec<u8>,
    value: Vec<u8>,
}

impl Table {
    fn open(session: &Session) -> Result<Self, NativeError> {
        let file = session.open("table", OpenOptions::CREATE)?;
        let len = SLOTS * SLOT as u64;
        if file.len()? < len {
            // A hole: it takes no space. Whoever else does the same does no harm.
            file.set_len(len)?;
        }
        Ok(Self(file))
    }

    /// Reads a slot. `None`: its bytes are none that a writer left.
    fn read(&self, place: u64) -> Result<Option<Slot>, NativeError> {
        let mut bytes = [0; SLOT];
        self.0.read_at(place, &mut bytes)?;
        let [word, rest] = [&bytes[..8], &bytes[HEAD..]];
        let mut counts = [0; 8];
        counts.copy_from_slice(word);
        let (key_len, value_len) = (usize::from(bytes[8]), usize::from(bytes[9]));
        let key = rest.get(..key_len);
        let value = rest.get(key_len..key_len + value_len);
        Ok(key.zip(value).map(|(key, value)| Slot {
            place,
            word: u64::from_le_bytes(counts),
            key: key.to_vec(),
            value: value.to_vec(),
        }))
    }

    /// Reads a slot when nobody changes it. One that is taken for long is let go.
    fn read_settled(&self, place: u64) -> Result<Option<Slot>, NativeError> {
        let (mut since, mut taken_as) = (Instant::now(), 0);
        loop {
            match self.read(place)? {
                Some(slot) if slot.word % 2 == 1 => {
                    if slot.word != taken_as {
                        (since, taken_as) = (Instant::now(), slot.word);
                    } else if since.elapsed() > GONE_AFTER {
                        self.let_go(place, slot.word)?;
                    }
                    std::thread::yield_now();
                }
                slot => return Ok(slot),
            }
        }
    }

    /// Lets a slot go whose writer is gone. A writer has a grant of all slots; for a reader it is a request.
    fn let_go(&self, place: u64, word: u64) -> Result<(), NativeError> {
        self.0.compare_swap(place, word, word + 1).map(drop)
    }

    /// The key's slot, or else the first free one.
    fn find(&self, key: &[u8]) -> Result<Option<Slot>, NativeError> {
        // FNV-1a.
        let hash = key.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
        for probe in 0..PROBES {
            let place = hash.wrapping_add(probe) % SLOTS * SLOT as u64;
            match self.read_settled(place)? {
                Some(slot) if slot.key.is_empty() || slot.key == key => return Ok(Some(slot)),
                _ => {}
            }
        }
        Ok(None)
    }

    /// Puts under a grant of the table. Not durable before the file's sync.
    fn put(&self, key: &[u8], value: &[u8]) -> Result<(), Box<dyn Error>> {
        if key.is_empty() || key.len() + value.len() > ROOM {
            return Err(format!("a key has at least a byte, and with its value at most {ROOM}").into());
        }
        loop {
            let Slot { place, word, .. } = self.find(key)?.ok_or("the table is full there")?;
            if self.0.compare_swap(place, word, word + 1)? != word {
                // Somebody else was faster, and may have taken it for another key.
                continue;
            }
            let mut rest = vec![key.len() as u8, value.len() as u8];
            rest.extend_from_slice(key);
            rest.extend_from_slice(value);
            self.0.write_at(place + 8, &rest)?;
            if self.0.compare_swap(place, word + 1, word + 2)? != word + 1 {
                return Err("the slot was let go by another process; is this one so slow?".into());
            }
            return Ok(());
        }
    }

    fn put_all(&self, pairs: impl Iterator<Item = (String, String)>) -> Result<(), Box<dyn Error>> {
        let _grant = self.0.grant_write(0, SLOTS * SLOT as u64)?;
        for (key, value) in pairs {
            self.put(key.as_bytes(), value.as_bytes())?;
        }
        Ok(self.0.sync()?)
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("native_table: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let trust = Trust { key: std::env::var_os("CUTTLEFS_KEY").map(Into::into), server_user: None };
    let connect = |url: &str| Session::connect(url, ConnectOptions { trust, ..ConnectOptions::default() });
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [url, "put", key, value] => {
            Table::open(&connect(url)?)?.put_all(std::iter::once((key.to_owned(), value.to_owned())))
        }
        [url, "put-many", count, name] => {
            let (count, since): (u64, _) = (count.parse()?, Instant::now());
            let pairs =
                (0..count).map(|number| (format!("key {}", number % 1000), format!("{name} {number}")));
            Table::open(&connect(url)?)?.put_all(pairs)?;
            println!("{count} puts in {:.2?}", since.elapsed());
            Ok(())
        }
        [url, "get", key] => {
            let slot = Table::open(&connect(url)?)?.find(key.as_bytes())?;
            let slot = slot.filter(|slot| !slot.key.is_empty()).ok_or("there is no such key")?;
            println!("{}", String::from_utf8_lossy(&slot.value));
            Ok(())
        }
        _ => Err("usage: native_table URL put KEY VALUE | URL put-many COUNT NAME | URL get KEY".into()),
    }
}
