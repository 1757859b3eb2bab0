//! `cuttlefs mount`, and the part that `up` shares with it: a mount that is served until it ends.

use super::background::{Reporter, run_detached};
use super::connect::{Backend, NotThere, VolumeOptions};
use super::figures::FiguresSocket;
use super::key;
use super::last_sync::LastSync;
use super::mount_options::{KNOWN, MountOptions};
use super::mountpoint;
use super::process::ProcessId;
use super::remount;
use super::run_state::{self, RunState};
use super::unmount::{Unmounted, busy_text, try_unmount};
use super::watchdog;
use super::written::Written;
use crate::file::volume::{Condition, Volume};
use crate::fuse::{MountTable, Mounted, mount};
use crate::threads::NO_THREAD;
use anyhow::{Context, bail};
use clap::Args;
use cuttlefs_common::descriptors::raise_to_at_least;
use cuttlefs_common::rdma::Endpoint;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The pause between attempts to reach a server that is not there.
const CONNECT_AGAIN: Duration = Duration::from_millis(250);

/// Arguments of `mount`.
#[derive(Args)]
#[command(after_help = format!("Options of -o:\n{KNOWN}

Examples:
  cuttlefs mount tcp://box:7950 /mnt --key /etc/cuttlefs/key
  cuttlefs mount shm:///run/cuttlefsd/a.sock /mnt -o ro,attr_cache=5
  cuttlefs mount unix:///run/cuttlefsd/b.sock /mnt --foreground
  mount -t fuse.cuttlefs tcp://box:7950 /mnt -o ro,key=/etc/cuttlefs/key
  mount -o remount,ro /mnt

Line of /etc/fstab:
  tcp://box:7950  /mnt  fuse.cuttlefs  _netdev,nofail,key=/etc/cuttlefs/key  0  0
  rdma://10.9.0.1?device=mlx5_0  /mnt  fuse.cuttlefs  _netdev,nofail,key=/etc/cuttlefs/key  0  0

shm:// is for root and the server's own user on the same machine, unix:// for every user of it.
tcp:// and rdma:// reach another machine and need a copy of one of the server's keys; without a
port they mean 7950. Without --foreground the mount stays in the background, and `cuttlefs status`
names its log.
docs/operations.md says how to mount at boot."))]
pub(super) struct MountArgs {
    /// The server: tcp://HOST:PORT, rdma://HOST:PORT, unix:///PATH or shm:///PATH
    pub server: Written,
    /// An empty directory to mount at
    pub mountpoint: PathBuf,
    /// Mount options, separated by commas
    #[arg(short = 'o', value_name = "OPTIONS")]
    pub options: Vec<String>,
    /// The key to show over tcp:// and rdma://, as `-o key=FILE`; a copy of one of the server's key files
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Believe this user's server over unix:// and shm://, not only root's and your own; as `-o server-user=UID`
    #[arg(long, value_name = "UID")]
    pub server_user: Option<u32>,
    /// Stay until it is unmounted; Ctrl-C unmounts
    #[arg(long)]
    pub foreground: bool,
    /// Set for the background process
    #[arg(long, hide = true)]
    pub detached: bool,
}

pub(super) fn run(backend: &dyn Backend, args: MountArgs) -> anyhow::Result<()> {
    if remount::is_wanted(&args.options) {
        return remount::run(&args.mountpoint, &args.options);
    }
    if args.foreground || args.detached {
        let reporter = Reporter::new(args.detached)?;
        return run_here(backend, &args, &reporter).map_err(|error| reporter.failed(error));
    }
    cuttlefs_common::say!("{}", in_background(args)?);
    Ok(())
}

/// Mounts by a process that stays in the background. Returns the text to print when it is mounted.
pub(super) fn in_background(args: MountArgs) -> anyhow::Result<String> {
    // Find mistakes here, where they are seen, before a process is started.
    let options = parse_options(&args.options)?;
    let mountpoint = mountpoint::prepare(&args.mountpoint, options.nonempty)?;
    let mut arguments =
        vec!["mount".into(), args.server.to_string().into(), mountpoint.clone().into_os_string()];
    for list in args.options {
        arguments.extend(["-o".into(), list.into()]);
    }
    if let Some(key) = key::chosen([args.key, options.trust.key])? {
        arguments.extend(["--key".into(), key.into_os_string()]);
    }
    if let Some(user) = args.server_user {
        arguments.extend(["--server-user".into(), user.to_string().into()]);
    }
    run_detached(&arguments, &run_state::file(&mountpoint, "log")?, None)
}

fn run_here(backend: &dyn Backend, args: &MountArgs, reporter: &Reporter) -> anyhow::Result<()> {
    let mut options = parse_options(&args.options)?;
    options.trust.key = key::chosen([args.key.clone(), options.trust.key])?;
    options.trust.server_user = args.server_user.or(options.trust.server_user);
    let mountpoint = mountpoint::prepare(&args.mountpoint, options.nonempty)?;
    // Before anything must be cleaned up.
    let signals = catch_signals()?;
    let served = ServedMount::start(backend, &args.server, &mountpoint, &options, signals, reporter)?;
    let state = RunState {
        mountpoint: mountpoint.clone(),
        source: args.server.to_string(),
        trust: options.trust.clone(),
        subtree: options.volume(&mountpoint).subtree,
        mount: ProcessId::own()?,
        server: None,
        pool: None,
        memory: None,
        lost: None,
        starting: false,
    };
    let ready = || reporter.ready(&format!("{} is mounted at {}", args.server, mountpoint.display()));
    let result = match state.save().and_then(|()| ready()) {
        Ok(()) => served.wait(),
        Err(error) => served.give_up(error),
    };
    state.end(&result);
    result
}

pub(super) fn parse_options(lists: &[String]) -> anyhow::Result<MountOptions> {
    Ok(MountOptions::parse(rustix::process::geteuid().is_root(), lists)?)
}

/// Catches the signals that end a mount, or its start.
pub(super) fn catch_signals() -> anyhow::Result<Signals> {
    Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot catch signals")
}

/// Several connections, each with a socket and memory, the kernel's device, and files of its own. With fewer a mount could wait for the rest for ever.
const DESCRIPTORS_LEAST: u64 = 256;

/// A mount that this process serves. SIGINT, SIGTERM and SIGHUP unmount it.
pub(super) struct ServedMount {
    mounted: Mounted,
    mountpoint: PathBuf,
    /// Unmounts at a signal; ends when `signals` is closed.
    unmounting: JoinHandle<()>,
    signals: Handle,
    /// Answers requests for figures as long as the mount is served.
    figures: Option<FiguresSocket>,
    last_sync: Arc<LastSync>,
    /// The server's endpoint.
    server: String,
}

impl ServedMount {
    /// Connects and mounts, unless one of `signals` comes before that.
    pub(super) fn start(
        backend: &dyn Backend,
        server: &Written,
        mountpoint: &Path,
        options: &MountOptions,
        mut signals: Signals,
        reporter: &Reporter,
    ) -> anyhow::Result<Self> {
        raise_to_at_least(DESCRIPTORS_LEAST, "a mount")?;
        let wanted = options.volume(mountpoint);
        let volume =
            connect_in_time(backend, &server.endpoint, &wanted, options.retry, &mut signals, reporter)?;
        if signals.pending().next().is_some() {
            volume.shut_down();
            bail!("broken off before {} was mounted", mountpoint.display());
        }
        let watch = || watchdog::start(mountpoint);
        let mounted = mount(Arc::clone(&volume), &server.to_string(), mountpoint, &options.fuse, watch)
            .inspect_err(|_| volume.shut_down())?;
        let last_sync = Arc::new(LastSync::new(Arc::clone(&volume)));
        let handle = signals.handle();
        let unmounting = match unmount_on_signals(signals, mountpoint, &last_sync) {
            Ok(thread) => thread,
            Err(error) => return Err(taken_back(mounted, mountpoint, error)),
        };
        let edge = Box::new(mounted.figures());
        let figures = FiguresSocket::start(mountpoint, volume, Arc::clone(&last_sync), edge);
        let server = server.to_string();
        let mountpoint = mountpoint.to_owned();
        Ok(Self { mounted, mountpoint, unmounting, signals: handle, figures, last_sync, server })
    }

    /// Serves the mount until it is unmounted.
    ///
    /// # Errors
    /// The session ended otherwise, or changes were lost with the mount (`Lost`).
    pub(super) fn wait(self) -> anyhow::Result<()> {
        let Self { mounted, mountpoint: _, unmounting, signals, figures, last_sync, server } = self;
        let mut synced = Ok(());
        let result = mounted.wait_and(|| synced = last_sync.finish(&server));
        drop(figures);
        signals.close();
        if unmounting.join().is_err() {
            tracing::error!("the signal thread panicked");
        }
        result?;
        synced
    }

    /// Unmounts at once, and returns `error`, which is the reason.
    pub(super) fn give_up(self, error: anyhow::Error) -> anyhow::Result<()> {
        Err(taken_back(self.mounted, &self.mountpoint, error))
    }
}

/// Unmounts at once. Returns `error`, which is the reason, or what is wrong with the unmounting.
fn taken_back(mounted: Mounted, mountpoint: &Path, error: anyhow::Error) -> anyhow::Error {
    let unmounted = try_unmount(mountpoint, true).and_then(|_| Ok(mounted.wait()?));
    unmounted.err().unwrap_or(error)
}

/// Connects. Waits for a server that is not there until `limit` is over, a signal comes, or nobody waits for this process any more.
fn connect_in_time(
    backend: &dyn Backend,
    server: &Endpoint,
    wanted: &VolumeOptions,
    limit: Duration,
    signals: &mut Signals,
    reporter: &Reporter,
) -> anyhow::Result<Arc<dyn Volume>> {
    let began = Instant::now();
    let mut is_told = false;
    loop {
        let error = match backend.connect_volume(server, wanted) {
            Err(error) if error.is::<NotThere>() && began.elapsed() < limit => error,
            result => return result,
        };
        if signals.pending().next().is_some() || !reporter.is_awaited() {
            return Err(error.context("given up waiting for the server"));
        }
        if !is_told {
            is_told = true;
            reporter.progress(&format!(
                "waiting up to {} s for the server (-o retry=): {error}",
                limit.as_secs_f64()
            ));
        }
        std::thread::sleep(CONNECT_AGAIN.min(limit.saturating_sub(began.elapsed())));
    }
}

/// Starts the thread that unmounts at a signal, and at the second one by force.
fn unmount_on_signals(
    mut signals: Signals,
    mountpoint: &Path,
    last_sync: &Arc<LastSync>,
) -> anyhow::Result<JoinHandle<()>> {
    let (mountpoint, last_sync) = (mountpoint.to_owned(), Arc::clone(last_sync));
    let unmount = move || {
        for (count, signal) in signals.forever().enumerate() {
            unmount_on_signal(&mountpoint, &last_sync, signal, count > 0);
        }
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(unmount).context(NO_THREAD)
}

fn unmount_on_signal(mountpoint: &Path, last_sync: &LastSync, signal: i32, force: bool) {
    // A signal to a mount that is unmounted already means that its last sync must not take long.
    let is_mounted = MountTable::read().is_ok_and(|table| table.at(mountpoint).is_some());
    if force && signal == SIGINT {
        // After the first signal the user was told what would be lost.
        last_sync.give_up();
    } else if force || !is_mounted {
        last_sync.hurry();
    }
    // A person can decide. A machine that is shut down cannot: there the server may come back within the time limit of the last sync.
    if !force && signal == SIGINT {
        let Condition { away, unsynced, .. } = last_sync.condition();
        if let Some(away) = away.filter(|_| unsynced.files > 0) {
            cuttlefs_common::tell!(
                "not unmounted: the server is away ({}), and {unsynced} may be lost. Bring the server or the network back, or press \
                 Ctrl-C again to give them up",
                away.because
            );
            return;
        }
    }
    match try_unmount(mountpoint, force) {
        Ok(Unmounted::Done) => {}
        Ok(Unmounted::Busy) => {
            let again = if signal == SIGINT { "press Ctrl-C again" } else { "signal again" };
            cuttlefs_common::tell!("{}\nor {again}", busy_text(mountpoint, "cuttlefs umount -f"));
        }
        Err(error) => cuttlefs_common::tell!("{error:#}"),
    }
}
