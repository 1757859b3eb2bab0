//! `cuttlefsd memory`: a memory node, which lends pages to clients until SIGTERM or SIGINT (`cuttlefs_common::odrp`).

use super::key::tcp_security;
use super::machine_memory::MachineMemory;
use anyhow::{Context, ensure};
use clap::Args;
use cuttlefs_common::descriptors;
use cuttlefs_common::ids::PAGE_SIZE_U64;
use cuttlefs_common::odrp::{MemoryNode, NodeOptions, PAGES_MAX};
use cuttlefs_common::rdma::soft::SoftOptions;
use cuttlefs_common::rdma::{Endpoint, open_to_listen};
use cuttlefs_common::size::ByteSize;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::path::{Path, PathBuf};

/// Its own files, and those of some clients.
const DESCRIPTORS_LEAST: u64 = 64;

#[derive(Args)]
#[command(after_help = "Examples:
  cuttlefsd memory --size 16G --listen tcp://0.0.0.0:7951 --key /etc/cuttlefs/key
  cuttlefsd memory --size 16G --budget 4G --listen unix:///run/cuttlefsd/memory.sock

It runs in the foreground, logs to standard error, and stops at SIGTERM or Ctrl-C. What clients have
here is gone then: their programs are ended. Clients use it with:
  cuttlefs swap --memory tcp://HOST:7951 --key FILE PROGRAM")]
pub(super) struct MemoryArgs {
    /// Memory to lend
    #[arg(long, value_name = "SIZE")]
    size: ByteSize,
    /// The most that one client may have; without it one client can take all, and the programs of the others are ended [default: all of it]
    #[arg(long, value_name = "SIZE")]
    budget: Option<ByteSize>,
    /// Where to listen: tcp://HOST:PORT or unix:///PATH; over rdma://HOST:PORT and shm:///PATH the node's processor does what else its RNIC does
    #[arg(long, value_name = "ENDPOINT")]
    listen: Endpoint,
    /// A key that tcp:// and rdma:// take (`cuttlefsd key new`); may be given several times
    #[arg(long, value_name = "FILE")]
    key: Vec<PathBuf>,
    /// Take anybody over tcp:// and rdma://, without keys and in plain: for networks whose every member is trusted
    #[arg(long)]
    insecure: bool,
}

pub(super) fn run(args: MemoryArgs) -> anyhow::Result<()> {
    // Before any thread is started, so that no signal is lost.
    let mut signals = Signals::new([SIGTERM, SIGINT]).context("cannot catch signals")?;
    let pages = args.size.0 / PAGE_SIZE_U64;
    ensure!(
        (1..=PAGES_MAX).contains(&pages),
        "--size {} is not between 4K and {}",
        args.size,
        ByteSize(PAGES_MAX * PAGE_SIZE_U64)
    );
    if let Some(warning) = MachineMemory::read().admit("--size", args.size.0)? {
        tracing::warn!("{warning}");
    }
    let is_network = matches!(args.listen, Endpoint::Tcp { .. } | Endpoint::Rdma { .. });
    ensure!(
        !is_network || args.insecure || !args.key.is_empty(),
        "over tcp:// and rdma:// clients need a key; make one (cuttlefsd key new FILE) and give it with --key FILE, or give --insecure"
    );
    descriptors::raise_to_at_least(DESCRIPTORS_LEAST, "a memory node")?;
    let listen = std::slice::from_ref(&args.listen);
    // None is made here: a key is given where one is needed.
    let (tcp, _) = tcp_security(Path::new(""), listen, &args.key, args.insecure)?;
    let devices = open_to_listen(listen, SoftOptions { tcp, ..SoftOptions::default() })?;
    let device = devices.all().first().context("there is no RNIC for this endpoint")?;
    let whole = NodeOptions::new(pages);
    let budget = args.budget.map_or(pages, |budget| budget.0 / PAGE_SIZE_U64);
    ensure!(
        (1..=pages).contains(&budget),
        "--budget {} is not between 4K and --size {}",
        args.budget.unwrap_or(args.size),
        args.size
    );
    let node = MemoryNode::start(device, &args.listen, NodeOptions { budget, ..whole })?;
    tracing::info!(endpoint = %node.endpoint(), size = %args.size, "lending memory");
    let _ = signals.forever().next();
    let figures = node.figures();
    tracing::info!(clients = figures.clients, mapped = figures.mapped, free = figures.free, "stopping");
    Ok(())
}
