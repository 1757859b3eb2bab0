//! The load on a file: reads and writes of values at places that Zipf's law chooses.
//!
//! Every read is checked (`content`): a wrong byte ends the run with an error. Writes write words that can be checked.

use super::content;
use super::interrupt;
use super::load::Operation;
use super::positions::Positions;
use super::volume::{OpenFile, caller};
use crate::file::volume::{Caller, FsError};
use anyhow::anyhow;
use cuttlefs_common::rpc::MAX_TRANSFER_BYTES;
use rand::rngs::Xoshiro256PlusPlus;
use rand::{Rng as _, SeedableRng as _};
use serde::Serialize;

/// Key of the permutation: of the first hotspots; the next number is that of the others.
const FIRST_KEY: u64 = 0x7e24;

/// What each thread does.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Load {
    /// Bytes of a read or write, and what its place is aligned to.
    pub(super) value_bytes: u64,
    /// Share of writes.
    pub(super) write_percent: u32,
    /// Zipf's exponent; 0 is uniform.
    pub(super) theta: f64,
    /// Bytes that keep neighbouring ranks.
    pub(super) clustered_bytes: u64,
    /// Threads at once.
    pub(super) threads: usize,
}

/// A load on files of one size.
pub(super) struct FileLoad {
    load: Load,
    /// Where, before and after a change of hotspots.
    positions: [Positions; 2],
    /// Name to look up before each operation: a client that keeps no metadata.
    lookup: Option<String>,
}

impl FileLoad {
    /// On files of `file_bytes`; with `lookup`, that name is looked up before each operation.
    ///
    /// # Errors
    /// If the file holds no value.
    pub(super) fn new(load: &Load, file_bytes: u64, lookup: Option<&str>) -> anyhow::Result<Self> {
        let values = file_bytes / load.value_bytes;
        let run_values = load.clustered_bytes / load.value_bytes;
        let positions = |key| Positions::new(values, load.theta, run_values, key);
        Ok(Self {
            load: *load,
            positions: [positions(FIRST_KEY)?, positions(FIRST_KEY + 1)?],
            lookup: lookup.map(str::to_owned),
        })
    }

    /// What the thread of this seed does on a file.
    pub(super) fn operation<'a>(&'a self, seed: u64, file: &'a OpenFile) -> Operation<'a> {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed + 1);
        let value_bytes = self.load.value_bytes;
        let mut body = vec![0; value_bytes as usize];
        let mut version = 0u16;
        let caller = caller();
        Box::new(move |changed| {
            let offset = self.positions[usize::from(changed)].draw(&mut random) * value_bytes;
            if let Some(name) = &self.lookup {
                let found = file.volume.lookup(&caller, file.volume.root(), name.as_bytes());
                found.map_err(|error| anyhow!("looking up {name} failed: {error}"))?;
            }
            // The high half, because drawing a rank has used whole numbers of the same generator.
            if (random.next_u64() >> 32) % 100 < u64::from(self.load.write_percent) {
                version = version.wrapping_add(1);
                content::fill(&mut body, offset, version);
                write(file, &caller, offset, &body)
            } else {
                read(file, &caller, offset, value_bytes)
            }
        })
    }
}

fn read(file: &OpenFile, caller: &Caller, offset: u64, value_bytes: u64) -> anyhow::Result<()> {
    let mut checked = Ok(());
    let mut got = 0;
    file.volume
        .read(caller, file.handle, offset, value_bytes as u32, &mut |bytes| {
            got = bytes.len() as u64;
            checked = content::check(bytes, offset);
        })
        .map_err(|error| failed("reading", offset, error))?;
    anyhow::ensure!(got == value_bytes, "a read at byte {offset} ended after {got} of {value_bytes} bytes");
    Ok(checked?)
}

fn write(file: &OpenFile, caller: &Caller, offset: u64, body: &[u8]) -> anyhow::Result<()> {
    let written = file
        .volume
        .write(caller, file.handle, offset, body)
        .map_err(|error| failed("writing", offset, error))?;
    anyhow::ensure!(
        written as usize == body.len(),
        "a write at byte {offset} ended after {written} of {} bytes",
        body.len()
    );
    Ok(())
}

fn failed(doing: &str, offset: u64, error: FsError) -> anyhow::Error {
    anyhow!("{doing} at byte {offset} failed: {error}; the server's log says more")
}

/// Reads the file from its start, so that memory is as full as that of a server that has run for long.
///
/// # Errors
/// As the server says; wrong data.
pub(super) fn scan(file: &OpenFile, bytes: u64) -> anyhow::Result<()> {
    let caller = caller();
    let mut offset = 0;
    while offset < bytes {
        interrupt::check()?;
        let len = u64::from(MAX_TRANSFER_BYTES).min(bytes - offset);
        read(file, &caller, offset, len)?;
        offset += len;
    }
    Ok(())
}
