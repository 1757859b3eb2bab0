//! `cuttlefs up`: a pool, its server and a mount, in one command.
//!
//! One process serves the mount and has the server as its child. When the mount ends, by any means, it stops the server; if it is
//! killed, `down` finds the server by its file (`run_state`).
//!
//! A server that has died is started again by another `up` of the same place (`revive`): the mount goes on with it, and the end of the
//! mount stops the server that is written down then.
//!
//! # Failure
//! Directories that were made here, and a pool that could not be made whole, are removed again. A whole pool stays.

use super::background::{Reporter, run_detached};
use super::connect::{Backend, Trust};
use super::down::stop_leftover;
use super::made::Made;
use super::mount::{ServedMount, catch_signals, parse_options};
use super::mount_options::MountOptions;
use super::mountpoint;
use super::process::ProcessId;
use super::run_state::{self, RunState};
use super::server_process::{ServerProcess, check_size, format_if_needed};
use crate::fuse::{MountTable, resolve_mountpoint};
use anyhow::{Context, anyhow, bail};
use clap::Args;
use cuttlefs_common::size::ByteSize;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::path::{Path, PathBuf};

const DEFAULT_POOL: &str = "cuttlefs-data";
const DEFAULT_MEMORY: ByteSize = ByteSize(1 << 30);

/// Arguments of `up`.
#[derive(Args)]
#[command(after_help = "Examples:
  cuttlefs up ~/cuttle
  cuttlefs up /mnt --pool /data/pool --size 100G --memory 4G
  cuttlefs up ~/cuttle --foreground      Ctrl-C ends it

Where a mount is up and its server has died, the server is started again and the mount goes on.
The server's log is in the pool, log/cuttlefsd.log. `cuttlefs down` ends both.")]
pub(super) struct UpArgs {
    /// An empty directory to mount at; made if it is missing
    mountpoint: PathBuf,
    /// The pool's directory; made and formatted if there is none [default: ./cuttlefs-data, or that of a mount whose server has died]
    #[arg(long, value_name = "DIR")]
    pool: Option<PathBuf>,
    /// Size of a new pool, taken from the disk at once [default: 8G]
    #[arg(long)]
    size: Option<ByteSize>,
    /// DRAM for file data, never exceeded; less than the machine has [default: 1G, or what the server that has died had]
    #[arg(long)]
    memory: Option<ByteSize>,
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
        let pool = args.pool.as_ref().map(std::path::absolute).transpose();
        let pool = pool.context("cannot resolve the pool's path")?;
        let mountpoint = std::path::absolute(&args.mountpoint).context("cannot resolve the mount point")?;
        let reporter = Reporter::new(args.detached)?;
        let args = UpArgs { pool, mountpoint, ..args };
        return run_here(backend, &args, &reporter).map_err(|error| reporter.failed(error));
    }
    let options = parse_options(&args.options)?;
    let (made, mountpoint, pool) = match lacks_its_server(backend, &args.mountpoint)? {
        Some(state) => (Made::nothing(), state.mountpoint, args.pool),
        None => {
            let made = mountpoint::make(&args.mountpoint)?;
            let pool = args.pool.unwrap_or_else(|| DEFAULT_POOL.into());
            (made, mountpoint::prepare(&args.mountpoint, options.nonempty)?, Some(pool))
        }
    };
    let mut arguments = vec!["up".into(), mountpoint.clone().into_os_string()];
    if let Some(memory) = args.memory {
        arguments.extend(["--memory".into(), memory.0.to_string().into()]);
    }
    if let Some(pool) = pool {
        let pool = std::path::absolute(pool).context("cannot resolve the pool's path")?;
        arguments.extend(["--pool".into(), pool.into_os_string()]);
    }
    if let Some(size) = args.size {
        arguments.extend(["--size".into(), size.0.to_string().into()]);
    }
    for list in args.options {
        arguments.extend(["-o".into(), list.into()]);
    }
    let signals = Signals::new([SIGINT, SIGTERM]).context("cannot catch signals")?;
    let said = run_detached(&arguments, &run_state::file(&mountpoint, "log")?, Some(signals))?;
    made.keep();
    cuttlefs_common::say!("{said}");
    Ok(())
}

fn run_here(backend: &dyn Backend, args: &UpArgs, reporter: &Reporter) -> anyhow::Result<()> {
    // Before anything must be cleaned up.
    let mut signals = catch_signals()?;
    let options = parse_options(&args.options)?;
    if let Some(state) = lacks_its_server(backend, &args.mountpoint)? {
        return reporter.ready(&revive(backend, state, args, &mut signals, reporter)?);
    }
    let made_mountpoint = mountpoint::make(&args.mountpoint)?;
    let mountpoint = mountpoint::prepare(&args.mountpoint, options.nonempty)?;
    refuse_leftover(&mountpoint)?;
    let pool = args.pool.as_deref().unwrap_or(Path::new(DEFAULT_POOL));
    let made_pool = Made::directory(pool)?;
    let pool = pool.canonicalize().with_context(|| format!("cannot use {}", pool.display()))?;
    if pool.starts_with(&mountpoint) {
        bail!("the pool {} lies below the mount point, which would hide it; name another", pool.display());
    }
    let memory = args.memory.unwrap_or(DEFAULT_MEMORY);
    let starting = RunState {
        subtree: options.volume(&mountpoint).subtree,
        mountpoint,
        source: String::new(),
        trust: Trust::default(),
        mount: ProcessId::own()?,
        server: None,
        pool: Some(pool.clone()),
        memory: Some(memory.0),
        lost: None,
        starting: true,
    };
    // For `down`, while the server starts.
    starting.save()?;
    if let Err(error) = format_if_needed(&pool, args.size, reporter) {
        starting.forget();
        made_pool.remove_with_contents();
        // Ctrl-C reaches the process that makes the pool, too, which then fails without a word.
        let broken_off = signals.pending().next().is_some();
        return Err(if broken_off { anyhow!("broken off while the pool was made") } else { error });
    }
    made_pool.keep();
    let started = start(backend, &pool, memory, &starting.mountpoint, &options, signals, reporter);
    let (server, served) = started.inspect_err(|_| starting.forget())?;
    made_mountpoint.keep();
    let state = RunState {
        source: server.endpoint().to_string(),
        server: Some(server.id()),
        starting: false,
        ..starting
    };
    let mountpoint = state.mountpoint.clone();
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
    // The mount has ended, so nobody needs the server. Wait for its end whatever became of the mount.
    let stopped = server.stop(reporter);
    let (state, stopped) = match RunState::load(&mountpoint) {
        Ok(Some(now)) if now.mount == state.mount && now.server != state.server => {
            let revived = now.server.map_or(Ok(()), |server| stop_leftover(server, false));
            (now, stopped.and(revived))
        }
        _ => (state, stopped),
    };
    state.end(&served);
    served.and(stopped)
}

/// Starts a server, and mounts what it serves.
fn start(
    backend: &dyn Backend,
    pool: &Path,
    memory: ByteSize,
    mountpoint: &Path,
    options: &MountOptions,
    mut signals: Signals,
    reporter: &Reporter,
) -> anyhow::Result<(ServerProcess, ServedMount)> {
    let server = ServerProcess::start(backend, pool, memory, &mut signals, reporter)?;
    match ServedMount::start(backend, &server.endpoint().into(), mountpoint, options, signals, reporter) {
        Ok(served) => Ok((server, served)),
        Err(error) => {
            server.stop(reporter)?;
            Err(error)
        }
    }
}

/// The state of a mount that is up and whose server has died; `None` if there is no such mount.
fn lacks_its_server(backend: &dyn Backend, mountpoint: &Path) -> anyhow::Result<Option<RunState>> {
    let Ok(mountpoint) = resolve_mountpoint(mountpoint) else {
        return Ok(None);
    };
    let table = MountTable::read()?;
    let Some(state) = RunState::load(&mountpoint)?
        .filter(|_| table.at(&mountpoint).is_some_and(|entry| entry.is_cuttlefs()))
    else {
        return Ok(None);
    };
    let has_died = match state.server {
        Some(server) => server.find()?.is_none() && state.mount.find()?.is_some(),
        None => false,
    };
    // Somebody may have started a server by hand.
    let is_served = || {
        let endpoint = state.source.parse();
        endpoint.is_ok_and(|endpoint| backend.server_status(&endpoint, &state.trust).is_ok())
    };
    let lacks_it = has_died && !is_served();
    Ok(lacks_it.then_some(state))
}

/// Starts the server of a mount again. Returns the text to print.
fn revive(
    backend: &dyn Backend,
    state: RunState,
    args: &UpArgs,
    signals: &mut Signals,
    reporter: &Reporter,
) -> anyhow::Result<String> {
    let pool = state.pool.clone().context("what is written down of this mount does not name its pool")?;
    let place = state.mountpoint.display().to_string();
    if let Some(asked) = args.pool.as_ref().filter(|asked| asked.canonicalize().ok().as_ref() != Some(&pool))
    {
        bail!(
            "{} is up at {place}, without its server, and not {}; start that server again with: cuttlefs up {place}",
            pool.display(),
            asked.display()
        );
    }
    if let Some(size) = args.size {
        check_size(&pool, size)?;
    }
    let memory = args.memory.or(state.memory.map(ByteSize)).unwrap_or(DEFAULT_MEMORY);
    let server = ServerProcess::start(backend, &pool, memory, signals, reporter)?;
    let state = RunState { server: Some(server.id()), memory: Some(memory.0), ..state };
    let kept = state.save().and_then(|()| match state.mount.find()? {
        Some(_) => Ok(()),
        None => bail!("the mount at {place} has ended meanwhile; try again"),
    });
    if let Err(error) = kept {
        state.forget();
        server.stop(reporter)?;
        return Err(error);
    }
    Ok(format!(
        "the server of {place} had ended and runs again (process {}, --memory {memory}); the mount goes on",
        server.id().pid
    ))
}

/// Refuses to start if another `up` starts there, or if a server still runs, and holds its pool, that a killed mount process has left behind.
fn refuse_leftover(mountpoint: &Path) -> anyhow::Result<()> {
    let Some(state) = RunState::load(mountpoint)? else {
        return Ok(());
    };
    if state.starting && state.mount.find()?.is_some() {
        bail!(
            "another `up` is starting there (process {}); wait for it, or break it off with: cuttlefs down {}",
            state.mount.pid,
            mountpoint.display()
        );
    }
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
