//! `cuttlefs bench`: how fast a mounted file system is, by itself, beside another directory, or beside a FUSE file
//! system that does nothing.
//!
//! * `bench mount MNT` runs every row of `items` in a directory of its own under MNT and prints a table.
//! * `bench region`, `bench octopus`, `bench kv` need no mount: they serve a scratch pool themselves (`region`).
//! * `bench rpc` compares durable RPC with other patterns (`rpc`).
//! * `bench sync MNT` makes changes durable one by one, and counts what each costs (`sync`, `costs`).
//! * `bench null MNT` reads resident data at random, in turn with the null FUSE file system, and prints the ratio.
//!
//! `fio_job` runs the job files of `fixtures/fio`; `files` does what fio cannot: small files and names, through
//! plain system calls. `chart` draws plots. `link` is what is between a benchmark and a server of its own. `site` owns the directory worked in and removes it at the end, also after an error.
//! Whatever is compared is run in turn, round by round, because a machine's speed drifts.
//!
//! Nothing but `region` and `costs` knows that the file system is cuttlefs: any directory can be measured.

mod chart;
mod costs;
mod files;
mod fio_job;
mod items;
mod link;
mod mount;
mod null;
mod region;
mod report;
mod rpc;
mod site;
mod sync;

pub use mount::{BenchMountArgs, run};
pub use null::{BenchNullArgs, run_null};
pub use region::{KvArgs, OctopusArgs, OctopusClientArgs, RegionArgs};
pub use region::{run_kv, run_octopus, run_octopus_client, run_region};
pub use rpc::{RpcArgs, run_rpc};
pub use sync::{BenchSyncArgs, run_sync};

/// What to measure.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum BenchCommand {
    /// Measure a mounted directory: large files, random access, small files, metadata
    Mount(BenchMountArgs),
    /// Measure changes that are made durable one by one: overwrite, append, create, rename, each with fsync
    Sync(BenchSyncArgs),
    /// Compare random reads with a FUSE file system that does nothing: the price of FUSE itself
    Null(BenchNullArgs),
    /// Measure reads and writes of data that memory holds in part, as the TeRM paper does; needs no mount
    Region(RegionArgs),
    /// Measure clients that look a file up before each access, as the paper does with Octopus
    Octopus(OctopusArgs),
    /// Measure gets of a key-value table in one file, as the paper does with XStore
    Kv(KvArgs),
    /// Compare durable RPC with other ways to do RPC over RDMA, as the durable RPC paper does; needs no mount
    Rpc(RpcArgs),
    /// One client process of `octopus`
    #[command(hide = true)]
    OctopusClient(OctopusClientArgs),
}

/// Runs a benchmark.
///
/// # Errors
/// What is missing or went wrong, in words for the person at the terminal.
pub fn run_command(command: BenchCommand) -> anyhow::Result<()> {
    let result = match command {
        BenchCommand::Mount(args) => run(args),
        BenchCommand::Sync(args) => run_sync(&args),
        BenchCommand::Null(args) => run_null(args),
        BenchCommand::Region(args) => run_region(&args),
        BenchCommand::Octopus(args) => run_octopus(&args),
        BenchCommand::Kv(args) => run_kv(&args),
        BenchCommand::Rpc(args) => run_rpc(&args),
        BenchCommand::OctopusClient(args) => run_octopus_client(&args),
    };
    if result.is_err() {
        // Whatever failed, it may have been ended for that.
        region::check_interrupt()?;
    }
    result
}
