//! `cuttlefsd serve`: opens a pool, serves it, stops cleanly on SIGTERM or SIGINT.

use super::machine_memory::MachineMemory;
use super::pinned_memory::PinnedMemory;
use crate::config::{CONFIG_FILE, Durability, ExportConfig, LEAST_MEMORY_BYTES};
use crate::meta::{DiskOptions, DiskStore, Meta};
use crate::pages::policy::{PolicyName, RegionPolicy, Technique};
use crate::pages::window::WindowKind;
use crate::pages::{Hotspots, ScrubOptions};
use crate::pool;
use crate::serve::{Parts, RunningServer, ServeOptions};
use crate::shares::Resource;
use anyhow::{Context, bail, ensure};
use clap::Args;
use cuttlefs_common::descriptors::{self, OWN_DESCRIPTORS};
use cuttlefs_common::ids::PAGE_SIZE_U64;
use cuttlefs_common::rdma::Endpoint;
use cuttlefs_common::rdma::open_to_listen;
use cuttlefs_common::rdma::soft::SoftOptions;
use cuttlefs_common::region::MAX_SAMPLE_UNIT_PAGES;
use cuttlefs_common::rpc::Sampling;
use cuttlefs_common::size::ByteSize;
use cuttlefs_common::world::{SystemClock, SystemRandom};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// With fewer, a mount could connect and wait for the rest of its connections.
const DESCRIPTORS_LEAST: u64 = 256;
/// Descriptors for all connections that there may be: each has a socket and memory.
const WANTED_DESCRIPTORS: u64 = 2 * Resource::Connections.bound().all as u64 + 2 * OWN_DESCRIPTORS;
/// More workers than this gain nothing on one machine's metadata store.
const MOST_WORKERS: usize = 64;

#[derive(Args)]
#[command(after_help = "Examples:
  cuttlefsd serve --pool /srv/cuttle --memory 8G --listen tcp://0.0.0.0:7950
  cuttlefsd serve --pool /srv/cuttle --listen shm:///run/cuttlefsd/a.sock --listen tcp://127.0.0.1
  cuttlefsd serve --pool /srv/cuttle          with memory, listen and keys of its cuttlefs.toml

It runs in the foreground, logs to standard error, and stops at SIGTERM or Ctrl-C when everything is
written back. The port of tcp:// and rdma:// is 7950 if none is written. Clients mount with:
  cuttlefs mount tcp://HOST:7950 DIR --key FILE")]
pub(super) struct ServeArgs {
    /// Directory of the pool
    #[arg(long, value_name = "DIR")]
    pool: PathBuf,
    /// DRAM for file pages, never exceeded (other memory: docs/operations.md) [default: `memory` of cuttlefs.toml, 1G]
    #[arg(long, value_name = "SIZE")]
    memory: Option<ByteSize>,
    /// Where to listen: tcp://HOST:PORT, unix:///PATH, shm:///PATH, or rdma://HOST:PORT (the address of an RNIC's interface); may be given
    /// several times
    /// [default: `listen` of cuttlefs.toml]
    #[arg(long, value_name = "ENDPOINT")]
    listen: Vec<Endpoint>,
    /// Worker threads that serve one client. Twice as many run, so that there are some for others [default: one for two cores, at most 8]
    #[arg(long, value_name = "N")]
    workers: Option<usize>,
    /// How file regions are served: term, or one of what it is compared with (pin, odp, rpc, rpc-buffer, rpc-direct)
    #[arg(long, default_value_t, value_name = "POLICY")]
    region: PolicyName,
    /// Techniques of term for --region rpc-direct, one building on the other: tiering,hotspot,magic
    #[arg(long, value_name = "TECHNIQUE,...", value_delimiter = ',')]
    with: Vec<Technique>,
    /// What is promoted to DRAM: pages, or whole sample units as in the paper
    #[arg(long, default_value_t, value_name = "WHAT")]
    hotspots: Hotspots,
    /// When a change is durable: fsync (when fsync and its like say so) or ack (when it is answered)
    /// [default: `durability` of cuttlefs.toml]
    #[arg(long, value_enum, value_name = "WHEN")]
    durability: Option<Durability>,
    /// For --region odp: reads that fault also wait as long as an RNIC was measured to (330 us beside the page fault)
    #[arg(long)]
    odp_hardware: bool,
    /// Bytes of a file that clients count together; a power of two, 4K to 16M
    #[arg(long, default_value = "1M", value_name = "SIZE")]
    sample_unit: ByteSize,
    /// Milliseconds between two looks at what clients counted
    #[arg(long, default_value_t = 1000, value_name = "N", value_parser = clap::value_parser!(u32).range(50..=60_000))]
    sample_period_ms: u32,
    /// Bytes a second that the scrub reads at most to verify checksums; 0 for no scrub
    #[arg(long, default_value = "32M", value_name = "SIZE")]
    scrub_rate: ByteSize,
    /// Hours from the start of one scrub of the pool to the start of the next
    #[arg(long, default_value_t = 168, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    scrub_hours: u32,
    /// DRAM for checksums; 4K for 4M of file pages that are in use. What is not there is read from SSD
    #[arg(long, default_value = "16M", value_name = "SIZE")]
    checksum_cache: ByteSize,
    /// A key that tcp:// and rdma:// take (`cuttlefsd key new`); may be given several times
    /// [default: `keys` of cuttlefs.toml, else the file `key` in the pool's directory, made if there is none]
    #[arg(long, value_name = "FILE")]
    key: Vec<PathBuf>,
    /// Take anybody over tcp:// and rdma://, without keys and in plain: for networks whose every member is trusted
    #[arg(long)]
    insecure: bool,
    /// Let every client over rdma:// read this server's memory, so that reads cost it no CPU: whoever may connect can then read every
    /// file, whatever its mode and his export. Without it reads over rdma:// are RPCs [default: `trust_clients` of cuttlefs.toml]
    #[arg(long)]
    trust_clients: bool,
    /// Where trusted clients over rdma:// read pages: pinned (the server's frames), odp (a window that each RNIC follows by on-demand paging;
    /// slower, and for RNICs that have it: docs/rdma.md), or iommu (a window that the IOMMU translates; for RNICs behind one, with kmod-iommu
    /// loaded: docs/kmod-iommu.md) [default: `page_window` of cuttlefs.toml, pinned]
    #[arg(long, value_enum, value_name = "WINDOW")]
    page_window: Option<WindowKind>,
    /// Stop when standard input ends: for a program that starts a server and may be killed, which closes its pipe
    #[arg(long, hide = true)]
    until_stdin_ends: bool,
}

pub(super) fn run(args: ServeArgs) -> anyhow::Result<()> {
    // Before any thread is started, so that no signal is lost.
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).context("cannot catch signals")?;
    if args.until_stdin_ends {
        let ended = signals.handle();
        std::thread::Builder::new()
            .name("stdin".into())
            .spawn(move || {
                // The bytes are ignored, and an error counts as the end.
                let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
                ended.close();
            })
            .context("cannot watch standard input")?;
    }
    let descriptors = descriptors::raise_to_at_least(DESCRIPTORS_LEAST, "a server")?;
    if descriptors < WANTED_DESCRIPTORS {
        tracing::warn!(
            descriptors,
            "few files may be open (ulimit -Hn), so few clients can connect; {WANTED_DESCRIPTORS} are enough for all"
        );
    }
    let opened = pool::open(&args.pool)?;
    let config = opened.config().clone();
    let listen = if args.listen.is_empty() { config.server.listen.clone() } else { args.listen };
    if listen.is_empty() {
        bail!(
            "nothing to listen on; give --listen, such as --listen tcp://127.0.0.1:7950, or set `listen` in {}",
            args.pool.join(CONFIG_FILE).display()
        );
    }
    let configured = config.server.keys.iter().map(|path| args.pool.join(path));
    let keys = if args.key.is_empty() && !args.insecure { configured.collect() } else { args.key };
    let (tcp, made_key) = super::key::tcp_security(&args.pool, &listen, &keys, args.insecure)?;
    let memory = args.memory.map_or(config.server.memory, |size| size.0);
    ensure!(
        memory >= LEAST_MEMORY_BYTES,
        "--memory {} is too little; give {} or more",
        ByteSize(memory),
        ByteSize(LEAST_MEMORY_BYTES)
    );
    if let Some(warning) = MachineMemory::read().admit("--memory", memory)? {
        tracing::warn!("{warning}");
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    // The other half of the cores is for the NIC engine, the kernel's part of every IO and, on one machine, the clients.
    let workers = args.workers.unwrap_or((cores / 2).clamp(1, 8));
    ensure!((1..=MOST_WORKERS).contains(&workers), "--workers must be between 1 and {MOST_WORKERS}");
    // One peer uses half of the workers (`placement`).
    let worker_threads = 2 * workers;
    let trust_clients = args.trust_clients || config.server.trust_clients;
    if trust_clients {
        // Over the other links there is nothing to gain by it, and everything to lose.
        ensure!(
            listen.iter().any(|endpoint| matches!(endpoint, Endpoint::Rdma { .. })),
            "--trust-clients is for clients over rdma://, and no endpoint is one; give --listen rdma://HOST:PORT, or leave --trust-clients (trust_clients \
             in {CONFIG_FILE}) out"
        );
        tracing::warn!(
            "clients are trusted (--trust-clients, or trust_clients in {CONFIG_FILE}): whoever may connect can read every file, whatever its mode and \
             export (docs/security.md)"
        );
    }
    let mut policy = RegionPolicy::with(args.region, &args.with)?;
    if args.odp_hardware {
        policy = policy.with_hardware_times()?;
        tracing::warn!(
            "--odp-hardware: what faults is delayed by an RNIC's times; figures are not measured ones"
        );
    }
    let sampling = sampling(args.sample_unit, args.sample_period_ms)?;
    let store = DiskStore::open(&opened.meta_dir(), DiskOptions::default())?;
    let clock = Arc::new(SystemClock::new());
    let meta =
        Arc::new(Meta::open(Arc::new(store), clock.clone()).context("cannot open the pool's metadata")?);
    ensure!(
        meta.uuid() == opened.uuid().0,
        "the metadata in {} belongs to another pool; put the right one back",
        opened.meta_dir().display()
    );
    let durability = args.durability.unwrap_or(config.server.durability);
    let devices = open_to_listen(&listen, SoftOptions { tcp, ..SoftOptions::default() })?;
    let pinned = PinnedMemory { memory, pool_pages: opened.pages(), worker_threads, trust_clients };
    if let Some(warning) = pinned.beyond(&devices) {
        tracing::warn!("{warning}");
    }
    for rnic in devices.all().iter().filter_map(|device| device.hardware()) {
        if !rnic.state.contains("ACTIVE") {
            let (device, port, state) = (&rnic.device, rnic.port, &rnic.state);
            tracing::warn!(
                "port {port} of {device} is not active ({state}): nobody can connect until its cable and its interface are up (`rdma link`, `ip link`)"
            );
        }
    }
    let parts =
        Parts { meta, data: opened.data_files().clone(), devices, clock, random: Arc::new(SystemRandom) };
    let page_window = args.page_window.unwrap_or(config.server.page_window);
    let options = ServeOptions {
        memory_bytes: memory,
        listen,
        workers: worker_threads,
        lease: Duration::from_millis(config.server.lease_ms),
        exports: config.export.iter().map(ExportConfig::rule).collect(),
        policy,
        hotspots: args.hotspots,
        sampling,
        scrub: ScrubOptions {
            rate_bytes: args.scrub_rate.0,
            interval: Duration::from_secs(u64::from(args.scrub_hours) * 3600),
        },
        sum_cache_bytes: usize::try_from(args.checksum_cache.0).context("--checksum-cache is too large")?,
        durable_answers: durability == Durability::Ack,
        trust_clients,
        page_window,
    };
    let running = RunningServer::start(parts, options)?;
    made_key.stay();
    for endpoint in running.endpoints() {
        tracing::info!(%endpoint, "listening");
    }
    tracing::info!(
        pool = %opened.uuid(),
        pages = opened.pages(),
        memory = %ByteSize(running.server().files.pages().frames().memory().len() as u64),
        region = %policy,
        page_window = %page_window,
        %durability,
        workers,
        worker_threads,
        "serving"
    );
    match signals.forever().next() {
        Some(signal) => tracing::info!(signal, "stopping; writing everything back"),
        None => tracing::info!("standard input ended; stopping; writing everything back"),
    }
    running.stop();
    tracing::info!("stopped");
    Ok(())
}

/// How clients count accesses, from the options.
fn sampling(unit: ByteSize, period_ms: u32) -> anyhow::Result<Sampling> {
    let pages = unit.0 / PAGE_SIZE_U64;
    let unit_pages = u32::try_from(pages).ok().filter(|pages| {
        (1..=MAX_SAMPLE_UNIT_PAGES).contains(pages)
            && pages.is_power_of_two()
            && unit.0.is_multiple_of(PAGE_SIZE_U64)
    });
    let Some(unit_pages) = unit_pages else {
        bail!("--sample-unit {unit} cannot be; give a power of two from 4K to 16M");
    };
    Ok(Sampling { unit_pages, period_ms })
}
