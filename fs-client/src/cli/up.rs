//! `cuttlefs up`: a pool, its server and a mount, in one command.
//!
//! One process serves the mount and has the server as its child. When the mount ends, by whatever means, it stops
//! the server; if it is killed, `down` finds the server by what is written down.

use super::background::{Reporter, run_detached};
use super::connect::{Backend, Trust};
use super::mount::{ServedMount, parse_options};
use super::mountpoint;
use super::process::ProcessId;
use super::run_state::{self, RunState};
use super::server_process::{ServerProcess, format_if_needed};
use anyhow::{Context, bail};
use clap::Args;
use cuttlefs_common::size::ByteSize;
use std::path::{Path, PathBuf};

/// Arguments of `up`.
#[derive(Args)]
#[command(after_help = "Examples:
  cuttlefs up ~/cuttle
  cuttlefs up /mnt --pool /data/pool --size 100G --memory 4G
  cuttlefs up ~/cuttle --foreground      Ctrl-C ends it

The server's log is in the pool, log/cuttlefsd.log. `cuttlefs down` ends both.")]
pub(super) struct UpArgs {
    /// An empty directory to mount at; made if it is missing
    mountpoint: PathBuf,
    /// The pool's directory; made and formatted if there is none
    #[arg(long, default_value = "./cuttlefs-data", value_name = "DIR")]
    pool: PathBuf,
    /// Size of a new pool, taken from the disk at once [default: 8G]
    #[arg(long)]
    size: Option<ByteSize>,
    /// DRAM for file data, never exceeded; less than the machine has
    #[arg(long, default_value = "1G")]
    memory: ByteSize,
    /// Mount options, separated by commas; see `cuttlefs mount --help`
    #[arg(short = 'o', value_name = "OPTIONS")]
    options: Vec<String>,
    /// Stay until it is unmounted; Ctrl-C ends it
    #[arg(long)]
    foreground: bool,
    /// Set for the background process
    #[arg(long, hide = true)]
    detached: bool,
}

pub(super) fn run(backend: &dyn Backend, args: UpArgs) -> anyhow::Result<()> {
    if args.foreground || args.detached {
        let pool = std::path::absolute(&args.pool).context("cannot resolve the pool's path")?;
        let mountpoint = std::path::absolute(&args.mountpoint).context("cannot resolve the mount point")?;
        let reporter = Reporter::new(args.detached)?;
        let args = UpArgs { pool, mountpoint, ..args };
        return run_here(backend, &args, &reporter).map_err(|error| reporter.failed(error));
    }
    let options = parse_options(&args.options)?;
    mountpoint::make(&args.mountpoint)?;
    let mountpoint = mountpoint::prepare(&args.mountpoint, options.nonempty)?;
    let pool = std::path::absolute(&args.pool).context("cannot resolve the pool's path")?;
    let mut arguments = vec![
        "up".into(),
        mountpoint.clone().into_os_string(),
        "--pool".into(),
        pool.into_os_string(),
        "--memory".into(),
        args.memory.0.to_string().into(),
    ];
    if let Some(size) = args.size {
        arguments.extend(["--size".into(), size.0.to_string().into()]);
    }
    for list in args.options {
        arguments.extend(["-o".into(), list.into()]);
    }
    cuttlefs_common::say!("{}", run_detached(&arguments, &run_state::file(&mountpoint, "log")?)?);
    Ok(())
}

fn run_here(backend: &dyn Backend, args: &UpArgs, reporter: &Reporter) -> anyhow::Result<()> {
    let options = parse_options(&args.options)?;
    mountpoint::make(&args.mountpoint)?;
    let mountpoint = mountpoint::prepare(&args.mountpoint, options.nonempty)?;
    refuse_leftover(&mountpoint)?;
    std::fs::create_dir_all(&args.pool).with_context(|| format!("cannot make {}", args.pool.display()))?;
    let pool = args.pool.canonicalize().with_context(|| format!("cannot use {}", args.pool.display()))?;
    if pool.starts_with(&mountpoint) {
        bail!("the pool {} lies below the mount point, which would hide it; name another", pool.display());
    }
    format_if_needed(&pool, args.size, reporter)?;
    let server = ServerProcess::start(backend, &pool, args.memory, reporter)?;
    let served = match ServedMount::start(backend, server.endpoint(), &mountpoint, &options) {
        Ok(served) => served,
        Err(error) => {
            server.stop(reporter)?;
            return Err(error);
        }
    };
    let state = RunState {
        mountpoint: mountpoint.clone(),
        source: server.endpoint().to_string(),
        trust: Trust::default(),
        mount: ProcessId::own()?,
        server: Some(server.id()),
        pool: Some(pool.clone()),
        lost: None,
    };
    let ready = format!(
        "{} is mounted at {}; end it with: cuttlefs down {}",
        pool.display(),
        mountpoint.display(),
        mountpoint.display()
    );
    let served = match state.save().and_then(|()| reporter.ready(&ready)) {
        Ok(()) => served.wait(),
        Err(error) => served.give_up(error),
    };
    // The mount has ended, so the server has nobody left; its end is waited for whatever became of the mount.
    let stopped = server.stop(reporter);
    state.end(&served);
    served.and(stopped)
}

/// A server left behind by a mount process that was killed still holds its pool.
fn refuse_leftover(mountpoint: &Path) -> anyhow::Result<()> {
    let Some(state) = RunState::load(mountpoint)? else {
        return Ok(());
    };
    let Some(server) = state.server else {
        return Ok(());
    };
    if server.find()?.is_some() {
        bail!(
            "the server of an earlier `up` still runs (process {}); end it with: cuttlefs down {}",
            server.pid,
            mountpoint.display()
        );
    }
    Ok(())
}
