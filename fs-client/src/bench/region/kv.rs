//! `cuttlefs bench kv`: gets of a key-value store whose table is one file, memory holding half of it (Figure 17).
//!
//! What XStore is to the paper: the client computes where a value is and reads it there, one-sidedly where it can.

use super::campaign::{self, Case, Workload};
use super::figures::{Panel, charts};
use super::file_load::Load;
use super::interrupt;
use super::kv_table::{BUCKET_BYTES, Builder, Found, Shape, find, key_of, value_of};
use super::load::{self, Operation, Outcome, Timing};
use super::policy::Policy;
use super::pool::{ScratchPool, fill_by};
use super::positions::Positions;
use super::results::Figure;
use super::server::RegionServer;
use super::settings::{CommonArgs, Settings};
use super::volume::{self, OpenFile, caller};
use crate::bench::chart::Kind;
use anyhow::{anyhow, bail, ensure};
use clap::Args;
use cuttlefs_common::rpc::MAX_TRANSFER_BYTES;
use cuttlefs_common::size::ByteSize;
use rand::SeedableRng as _;
use rand::rngs::Xoshiro256PlusPlus;

/// Name of the table's file.
const TABLE_NAME: &str = "table";
/// Key of the permutation of ranks; which one does not matter.
const RANK_KEY: u64 = 0x6b76;
/// The number of the paper's figure.
const FIGURE: u8 = 17;

/// Arguments of `cuttlefs bench kv`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  cuttlefs bench kv
  cuttlefs bench kv --size 8G --threads 16 --link shm --policy pin,term

Keys of 8 bytes, values of 128 bytes, gets only (YCSB-C). The table is built in a scratch pool,
which is removed.")]
pub struct KvArgs {
    /// Exponents of Zipf's law [default: 0.5 to 0.99]
    #[arg(long, value_delimiter = ',', value_name = "THETA,...")]
    theta: Vec<f64>,
    #[command(flatten)]
    common: CommonArgs,
}

/// Runs the benchmark, prints its table, writes its files.
///
/// # Errors
/// Says what is missing or failing; what was made is removed in any case.
pub fn run_kv(args: &KvArgs) -> anyhow::Result<()> {
    let settings = Settings::new(&args.common)?;
    ensure!(args.theta.iter().all(|theta| (0.0..=2.0).contains(theta)), "--theta must be between 0 and 2");
    interrupt::watch()?;
    let usual = settings.choose(&[0.5, 0.7, 0.9, 0.99], &[0.99]);
    let thetas = if args.theta.is_empty() { &usual } else { &args.theta };
    let policies = settings.policies(&[Policy::Pin, Policy::Term, Policy::Rpc, Policy::Odp]);
    let case = |&theta: &f64| Case {
        panel: "get",
        x: theta.to_string(),
        load: settings.load(BUCKET_BYTES as u64, 0, theta),
        dram_percent: settings.dram_percent,
        workers: settings.args.workers,
        policies: policies.clone(),
    };
    let cases: Vec<Case> = thetas.iter().map(case).collect();
    let pool = ScratchPool::format(&settings.args.scratch, None, settings.size_bytes)?;
    let shape = Shape::of_file(pool.file_bytes())?;
    cuttlefs_common::tell!("building a table of {} keys in {}", shape.keys, ByteSize(pool.file_bytes()));
    let table = Table { shape };
    table.build(&pool)?;
    let results = campaign::run(&pool, &table, &settings, &settings.timing, &cases)?;
    let setup = format!(
        "{} keys, {} over {}, {} % DRAM, {} client threads",
        shape.keys,
        ByteSize(pool.file_bytes()),
        settings.args.link.label(),
        settings.dram_percent,
        settings.threads
    );
    let panel = Panel { key: "get", x_label: "Zipfian theta", kind: Kind::Lines, logarithmic: true };
    let charts = charts(&[panel], &results.points, None);
    Figure::new("figure-17", "Key-value gets (Figure 17)", Some(FIGURE), setup, panel.x_label, results)
        .publish(&settings.args.out, &charts)
}

/// A table in a pool.
struct Table {
    shape: Shape,
}

impl Table {
    fn build(&self, pool: &ScratchPool) -> anyhow::Result<()> {
        let mut builder = Builder::new(self.shape)?;
        let bytes = self.shape.buckets * BUCKET_BYTES as u64;
        pool.with_filler(|volume| fill_by(volume, TABLE_NAME, bytes, |_, len| builder.next(len)))?;
        builder.finish()
    }

    /// Gets one key after the other.
    fn gets<'a>(&'a self, seed: u64, positions: &'a Positions, file: &'a OpenFile) -> Operation<'a> {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed + 1);
        Box::new(move |_| {
            let key = key_of(positions.draw(&mut random));
            let value = self.get(file, key)?;
            ensure!(value == value_of(key), "key {key:#x} has another value than was put; this is a defect");
            Ok(())
        })
    }

    fn get(&self, file: &OpenFile, key: u64) -> anyhow::Result<[u8; super::kv_table::VALUE_BYTES]> {
        let caller = caller();
        for bucket in self.shape.home(key)..self.shape.buckets {
            let mut found = Ok(Found::Absent);
            file.volume
                .read(&caller, file.handle, bucket * BUCKET_BYTES as u64, BUCKET_BYTES as u32, &mut |bytes| {
                    found = find(bytes, bucket, key);
                })
                .map_err(|error| anyhow!("reading bucket {bucket} failed: {error}"))?;
            match found? {
                Found::Value(value) => return Ok(value),
                Found::Absent => break,
                Found::Next => {}
            }
        }
        bail!("key {key:#x} is not in the table although it was put there; this is a defect")
    }
}

impl Workload for Table {
    fn preload(&self, _: &ScratchPool, server: &RegionServer, bytes: u64) -> anyhow::Result<()> {
        let volume = server.connect(1)?;
        let file = volume::open(&volume, TABLE_NAME)?;
        let caller = caller();
        let end = bytes.min(self.shape.buckets * BUCKET_BYTES as u64);
        for offset in (0..end).step_by(MAX_TRANSFER_BYTES as usize) {
            interrupt::check()?;
            volume
                .read(&caller, file.handle, offset, MAX_TRANSFER_BYTES, &mut |_| {})
                .map_err(|error| anyhow!("reading the table failed: {error}"))?;
        }
        volume.shut_down();
        Ok(())
    }

    fn run(
        &self,
        _: &ScratchPool,
        server: &RegionServer,
        load: &Load,
        timing: &Timing,
        at_phase: &mut dyn FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<Outcome> {
        let volumes = volume::connect_all(server.endpoint(), load.threads)?;
        let files = volumes
            .iter()
            .map(|volume| volume::open(volume, TABLE_NAME))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let positions = Positions::new(self.shape.keys, load.theta, 1, RANK_KEY)?;
        let make = |index: usize| Ok(self.gets(index as u64, &positions, &files[index % files.len()]));
        let outcome = load::run(load.threads, timing, &make, at_phase)?;
        for volume in &volumes {
            volume.shut_down();
        }
        Ok(outcome)
    }
}
