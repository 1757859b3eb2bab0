//! Memory of another process that is larger than what it may use of its machine's (docs/np-rdma.md): the owner serves a region, most of whose pages lie in a
//! file, and whoever connects reads and writes it as if all of it were there. No file system is part of it.
//!
//! ```text
//! cargo run --release -p cuttlefs-client --example remote_memory -- serve unix:///tmp/memory.sock 256M 64M
//! cargo run --release -p cuttlefs-client --example remote_memory -- use unix:///tmp/memory.sock
//! ```
//! The first one has 64 MiB of its 256 in memory, until it is told to end; it makes its file in the working directory, or where a last argument says, and
//! takes the name away at once. The second one writes all of the region and reads it back, for which the owner has to be asked; reads a sixteenth of it several
//! times, for which it has not, if that fits its memory; and counts in the last page. One at a time, for another one writes other words to the same places. Over `tcp://` the key's file is named by `CUTTLEFS_KEY`; without, both must be on one machine (127.0.0.1).

use cuttlefs_common::cluster_key::{ClusterKey, ClusterKeys};
use cuttlefs_common::ids::PAGE_SIZE_U64;
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::np::{
    FileBacking, NpLocal, NpOp, NpOrder, NpPeer, NpRegion, NpServer, NpSettings, NpStatus, NpWr,
};
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions, TcpSecurity};
use cuttlefs_common::rdma::{Device, Endpoint, PagedAccess};
use cuttlefs_common::size::ByteSize;
use cuttlefs_common::world::SystemRandom;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::error::Error;
use std::fs::{OpenOptions, remove_file};
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const BLOCK: usize = 64 << 10;
/// Blocks under way at once.
const DEPTH: usize = 16;
/// The least region: a block, and a page for the counter.
const SIZE_MIN: u64 = 2 * BLOCK as u64;
/// As the region has at least as many pages in memory.
const BUDGET_MIN: u64 = 32 * PAGE_SIZE_U64;
/// How often the counter is counted up.
const COUNTS: u64 = 100;
/// The part of the blocks that is read once more, and so often.
const HOT_PART: u64 = 16;
const HOT_TIMES: u64 = 32;

fn device(endpoint: &Endpoint) -> Result<Arc<dyn Device>, Box<dyn Error>> {
    let tcp = match (endpoint, std::env::var_os("CUTTLEFS_KEY")) {
        (Endpoint::Tcp { .. }, Some(file)) => {
            TcpSecurity::Keys(ClusterKeys::new(vec![ClusterKey::read_file(Path::new(&file))?])?)
        }
        _ => TcpSecurity::Loopback,
    };
    Ok(SoftDevice::new(SoftOptions { tcp, ..SoftOptions::default() }))
}

/// A file for the pages that are not in memory, whose space comes back when this process ends, however it does.
fn backing(file: &Path, pages: u64) -> Result<FileBacking, Box<dyn Error>> {
    let made = OpenOptions::new().write(true).create_new(true).open(file);
    made.map_err(|error| {
        format!("cannot make {}: {error}; name a file that is not there yet", file.display())
    })?;
    // Past the kernel's page cache, which would keep the pages in memory all the same. Some file systems cannot.
    let opened = FileBacking::open(file, pages, true).or_else(|_| FileBacking::open(file, pages, false));
    remove_file(file)?;
    Ok(opened?)
}

fn serve(endpoint: &str, size: &str, budget: &str, file: &Path) -> Result<(), Box<dyn Error>> {
    let endpoint: Endpoint = endpoint.parse()?;
    let (size, budget): (ByteSize, ByteSize) = (size.parse()?, budget.parse()?);
    if size.0 < SIZE_MIN || budget.0 < BUDGET_MIN {
        return Err(
            format!("SIZE is at least {}, BUDGET {}", ByteSize(SIZE_MIN), ByteSize(BUDGET_MIN)).into()
        );
    }
    if budget.0 > size.0 {
        return Err(format!("BUDGET {budget} is more than SIZE {size}; give SIZE at most").into());
    }
    // Before there is a thread that would take the signals itself.
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let (pages, frames) = (size.0 / PAGE_SIZE_U64, u32::try_from(budget.0 / PAGE_SIZE_U64)?);
    let region = NpRegion::new(pages, frames, Arc::new(backing(file, pages)?), &SystemRandom)?;
    let server = NpServer::start(&device(&endpoint)?, region.clone(), PagedAccess::ReadWrite, &endpoint)?;
    println!("{size}, of which {budget} may be in memory, at {}", server.endpoint());
    std::io::stdout().flush()?;
    signals.forever().next();
    let (asked, figures) = (server.figures().requests, region.figures());
    // What a peer has under way ends with its connection.
    drop(server);
    println!(
        "asked {asked} times; {} pages written to the file, {} read from it, {} in memory",
        figures.written, figures.major_faults, figures.resident
    );
    Ok(())
}

/// A peer and its local memory: a block for each request.
struct User {
    peer: NpPeer,
    local: NpLocal,
    memory: Arc<SharedMemory>,
}

impl User {
    fn connect(endpoint: &str) -> Result<Self, Box<dyn Error>> {
        let endpoint: Endpoint = endpoint.parse()?;
        let mut peer = NpPeer::connect(&device(&endpoint)?, &endpoint, NpSettings::default())?;
        let memory = Arc::new(SharedMemory::new("remote-memory", DEPTH * BLOCK)?);
        let local = peer.register(memory.clone())?;
        Ok(Self { peer, local, memory })
    }

    /// Moves these blocks, several at once. `touch` sees each block's local memory, before it is written or after it is read.
    fn move_all(
        &mut self,
        op: NpOp,
        mut blocks: impl Iterator<Item = u64>,
        mut touch: impl FnMut(&SharedMemory, usize, u64) -> Result<(), Box<dyn Error>>,
    ) -> Result<(), Box<dyn Error>> {
        let mut free: Vec<usize> = (0..DEPTH).collect();
        let (mut next, mut ends) = (blocks.next(), Vec::new());
        while next.is_some() || free.len() < DEPTH {
            while let Some(block) = next
                && let Some(place) = free.pop()
            {
                if op == NpOp::Write {
                    touch(&self.memory, place * BLOCK, block)?;
                }
                self.peer.post(NpWr {
                    id: block * DEPTH as u64 + place as u64,
                    op,
                    offset: block * BLOCK as u64,
                    local: Some((self.local, (place * BLOCK) as u64)),
                    len: BLOCK as u32,
                    order: NpOrder::RELAXED,
                    signaled: true,
                })?;
                next = blocks.next();
            }
            if self.peer.poll(&mut ends, DEPTH) == 0 {
                self.peer.wait(Duration::from_millis(100));
            }
            for end in ends.drain(..) {
                let (block, place) = (end.id / DEPTH as u64, end.id as usize % DEPTH);
                done(end.status).map_err(|why| format!("{op:?} of block {block}: {why}"))?;
                if op == NpOp::Read {
                    touch(&self.memory, place * BLOCK, block)?;
                }
                free.push(place);
            }
        }
        Ok(())
    }

    /// Adds one to a word, and returns what it was. The owner does it, once, wherever the page is.
    fn count(&mut self, offset: u64) -> Result<u64, Box<dyn Error>> {
        let (op, order) = (NpOp::FetchAdd(1), NpOrder::RELAXED);
        self.peer.post(NpWr { id: 0, op, offset, local: None, len: 8, order, signaled: true })?;
        let ends = self.peer.drain();
        let end = ends.first().ok_or("the count has no completion")?;
        done(end.status)?;
        Ok(end.old)
    }
}

fn done(status: NpStatus) -> Result<(), String> {
    match status {
        NpStatus::Success => Ok(()),
        NpStatus::Refused(why) => Err(format!("the owner refuses it ({why:?}); see what it has logged")),
        NpStatus::Disconnected => Err("the owner is gone, or silent; start it, and begin anew".to_owned()),
    }
}

/// The words of a block, which differ in each run and at each place.
fn words(run: u64, block: u64) -> Vec<u8> {
    let first = block * (BLOCK / 8) as u64;
    (first..first + (BLOCK / 8) as u64).flat_map(|word| (word ^ run).to_le_bytes()).collect()
}

fn use_it(endpoint: &str) -> Result<(), Box<dyn Error>> {
    let mut user = User::connect(endpoint)?;
    let len = user.peer.region_len();
    if len < SIZE_MIN {
        return Err(format!("the region has {}; this needs {}", ByteSize(len), ByteSize(SIZE_MIN)).into());
    }
    let counter = (len / PAGE_SIZE_U64 - 1) * PAGE_SIZE_U64;
    let blocks = counter / BLOCK as u64;
    let run = (SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() as u64) << 16;
    user.move_all(NpOp::Write, 0..blocks, |memory, at, block| {
        memory.write(at, &words(run, block));
        Ok(())
    })?;
    let mut found = vec![0; BLOCK];
    let mut check = |memory: &SharedMemory, at: usize, block: u64| {
        memory.read(at, &mut found);
        if found == words(run, block) {
            return Ok(());
        }
        Err(format!("block {block} has other words than were written; does another one write, too?").into())
    };
    user.move_all(NpOp::Read, 0..blocks, &mut check)?;
    let hot = blocks.div_ceil(HOT_PART);
    let before = user.peer.figures().one_sided;
    user.move_all(NpOp::Read, (0..HOT_TIMES).flat_map(|_| 0..hot), &mut check)?;
    let one_sided = user.peer.figures().one_sided - before;
    let mut count = user.count(counter)?;
    for _ in 1..COUNTS {
        let now = user.count(counter)?;
        if now <= count {
            return Err(format!("the counter was at {count}, and {now} later").into());
        }
        count = now;
    }
    println!(
        "{blocks} blocks written and read; of {hot}, read {HOT_TIMES} times more, {one_sided} reads were one-sided; the counter is at {}",
        count + 1
    );
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("remote_memory: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", endpoint, size, budget] => serve(endpoint, size, budget, Path::new("remote-memory.pages")),
        ["serve", endpoint, size, budget, file] => serve(endpoint, size, budget, Path::new(file)),
        ["use", endpoint] => use_it(endpoint),
        _ => Err("usage: remote_memory serve ENDPOINT SIZE BUDGET [FILE] | use ENDPOINT".into()),
    }
}
